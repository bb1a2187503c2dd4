//! A class's counters in memory that other processes read: see [`neap_base::live`].

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Counts of a class on a node.
#[derive(Debug, Default)]
#[repr(C, align(32))]
pub struct ClassCell {
    slabs: AtomicU32,
    /// Pages of these slabs without memory.
    holes: AtomicU32,
    /// Free objects in slabs.
    in_slabs: AtomicU64,
    /// Free objects in the barn.
    in_barn: AtomicU64,
}

impl ClassCell {
    /// Replaces the counts. Only one thread at a time may call this.
    pub(crate) fn store(&self, slabs: u32, holes: u64, in_slabs: u64, in_barn: u64) {
        // Relaxed: counts for other processes, on which no access to memory depends.
        self.slabs.store(slabs, Relaxed);
        self.holes.store(holes as u32, Relaxed);
        self.in_slabs.store(in_slabs, Relaxed);
        self.in_barn.store(in_barn, Relaxed);
    }
}
