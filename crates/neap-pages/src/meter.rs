//! The laboratory's meter of a zone's mutex.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

/// Counts holds of a zone's mutex, and makes it seem contended.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    /// Whether a [`Laboratory`](crate::lab::Laboratory) drives the zone. Otherwise nothing is
    /// counted, so that a benchmark measures the shipped code.
    pub(crate) on: AtomicBool,
    pub(crate) busy: AtomicU32,
    pub(crate) holds: AtomicU32,
    pub(crate) pages: AtomicU32,
    /// Free pages when the lock was taken last.
    pub(crate) free: AtomicU32,
}

impl Meter {
    /// Records that the lock was taken while `free` pages were free. Returns how many times the
    /// lock counts as found held.
    #[inline]
    pub(crate) fn enter(&self, free: u32) -> u32 {
        if self.on.load(Relaxed) { self.count(free) } else { 0 }
    }

    fn count(&self, free: u32) -> u32 {
        self.holds.fetch_add(1, Relaxed);
        self.pages.fetch_add(free.abs_diff(self.free.swap(free, Relaxed)), Relaxed);
        self.busy.swap(0, Relaxed)
    }
}
