//! A zone's page counts in memory that other processes read: see [`neap_base::live`].

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Page counts of a zone. Counts that change together share a word, the first one in its low half.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct ZoneCell {
    /// Free pages, and pages detached for release or population.
    free: AtomicU64,
    /// Mapped pages, and free pages that may have memory.
    managed: AtomicU64,
    /// Pages handed out without memory.
    holes: AtomicU64,
}

/// The counts of a [`ZoneCell`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct ZoneCounts {
    pub(crate) free: u32,
    pub(crate) releasing: u32,
    pub(crate) managed: u32,
    pub(crate) backed_free: u32,
    pub(crate) holes: u32,
}

impl ZoneCell {
    /// Replaces the counts. Only one thread at a time may call this.
    pub(crate) fn store(&self, counts: ZoneCounts) {
        let pair = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        // Relaxed: counts for other processes; they publish no other data.
        self.free.store(pair(counts.free, counts.releasing), Relaxed);
        self.managed.store(pair(counts.managed, counts.backed_free), Relaxed);
        self.holes.store(counts.holes.into(), Relaxed);
    }
}
