//! Makes memory available to the machine before a run.
//!
//! The host of a virtual machine takes back memory that has been free for a while. Getting it again
//! costs ten times as much as clearing it. So before each run the benchmark touches, as huge pages,
//! as much memory as any variant uses, and frees it. Errors are ignored, since they only make the
//! measurement noisier.

use std::ptr;

/// Touches `bytes` of fresh memory and frees them.
pub(super) fn touch(bytes: usize) {
    if bytes == 0 {
        return;
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: the mapping is new, and the kernel chooses its place. No other code knows it. Both
    // `madvise` and `munmap` get exactly its range, and nothing uses it after `munmap`.
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
