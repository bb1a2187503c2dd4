//! State of heap profiles that are written [at a limit](crate::limits::at_limit).

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Why a heap profile is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Reason {
    /// An allocation is about to be refused.
    Refused = 1,
    /// The container's memory is about to run out.
    Imminent,
}

/// State of the heap profiles at a limit.
#[derive(Debug)]
pub(crate) struct AtLimit {
    /// The [`Reason`] to write a heap profile; 0 if none is to be written.
    pub(crate) wanted: AtomicU32,
    /// Time of the last heap profile or of the last failure; 0 before the first.
    pub(crate) last: AtomicU64,
    pub(crate) is_writing: AtomicBool,
    /// Number of files that were written, and number of failures.
    pub(crate) written: AtomicU64,
    pub(crate) failed: AtomicU64,
}

impl AtLimit {
    pub(crate) const fn new() -> AtLimit {
        let [last, written, failed] = [const { AtomicU64::new(0) }; 3];
        AtLimit { wanted: AtomicU32::new(0), last, is_writing: AtomicBool::new(false), written, failed }
    }

    /// Resets the state in a forked child. A thread of the parent that was writing does not exist
    /// there.
    pub(crate) fn forget(&self) {
        // Relaxed: the child has one thread.
        self.wanted.store(0, Ordering::Relaxed);
        self.is_writing.store(false, Ordering::Relaxed);
        [&self.last, &self.written, &self.failed].into_iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}
