//! Memory that the machine has at hand before a run.
//!
//! Sits between a session and the system. A virtual machine's host takes memory back that has been
//! free for a while, and gives it anew at ten times the price of clearing it, to whichever program
//! asks first. So before each run as much as any variant uses is touched, as huge pages, and given
//! back: no run pays for what the one before it left. Best effort; where it does not work, nothing
//! but the noise is different.

use std::ptr;

/// Touches `bytes` of fresh memory and gives them back.
pub(super) fn touch(bytes: usize) {
    if bytes == 0 {
        return;
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping wherever the kernel likes, which nobody else knows and which is gone at
    // the end.
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
