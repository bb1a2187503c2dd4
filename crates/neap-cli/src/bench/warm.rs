//! Makes memory available to the machine before a run.
//!
//! The host of a virtual machine takes back memory that has been free for a while, and gives it
//! again at ten times the cost of clearing it. So before each run as much memory as any variant
//! uses is touched, as huge pages, and freed: no run pays for the memory of the one before. Best
//! effort; without it only the noise is larger.

use std::ptr;

/// Touches `bytes` of fresh memory and frees them.
pub(super) fn touch(bytes: usize) {
    if bytes == 0 {
        return;
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at a place of the kernel's choice, which no other code knows, and which
    // is unmapped at the end.
    unsafe {
        let base = libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        if base != libc::MAP_FAILED {
            libc::madvise(base, bytes, libc::MADV_HUGEPAGE);
            libc::madvise(base, bytes, libc::MADV_POPULATE_WRITE);
            libc::munmap(base, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::rss_kib;

    #[test]
    fn what_was_touched_does_not_stay() {
        let before = rss_kib(std::process::id()).unwrap();
        touch(64 << 20);
        touch(0);
        assert!(rss_kib(std::process::id()).unwrap() < before + (32 << 10));
    }
}
