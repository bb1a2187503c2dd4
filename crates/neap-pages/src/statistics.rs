//! Statistics of the page layer. This module has values only, and no locks.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Free-page thresholds of a zone with a budget, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Watermarks {
    /// Below this, only threads that free memory should allocate.
    pub min: u32,
    /// Below this, background reclaim should run.
    pub low: u32,
    /// Background reclaim stops here.
    pub high: u32,
}

impl Watermarks {
    pub(crate) fn and(self, other: Watermarks) -> Watermarks {
        Watermarks { min: self.min + other.min, low: self.low + other.low, high: self.high + other.high }
    }
}

/// The statistics of the page layer. Numbers are pages unless stated otherwise.
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Statistics {
    /// Mapped pages: the sum of all states.
    pub managed: u32,
    /// Pages on buddy lists and in free chunks.
    pub free: u32,
    /// Free pages that are resident or possibly resident.
    pub backed_free: u32,
    /// The least `backed_free` since the last tick.
    pub backed_free_low: u32,
    /// Pages handed out or in a CPU's list, without holes.
    pub used: u32,
    /// Pages handed out without memory.
    pub holes: u32,
    /// Pages in CPUs' lists.
    pub listed: u32,
    /// Detached pages: their memory is being released or populated, or they wait for population.
    pub releasing: u32,
    /// `releasing`, and the pages on their way from a CPU's list to the zone.
    pub travelling: u32,
    /// The most pages that may be used, if there is a budget.
    pub budget: Option<u32>,
    /// Thresholds of the budget; zero without one. With several nodes, the sum of their thresholds.
    pub watermarks: Watermarks,
    /// Pages released so far.
    pub released: u64,
    /// Released pages that were handed out, and so became holes.
    pub punched: u64,
    /// Pages of holes that were filled again so far.
    pub refilled: u64,
    /// System calls made for releases.
    pub release_calls: u64,
    /// System calls made for releases that failed.
    pub release_failures: u64,
    /// Pages populated as parts of huge pages so far.
    pub populated: u64,
    /// Number of times that the zone's mutex was taken.
    pub zone_locks: u64,
    /// Number of times that the zone's mutex was found held, wrapping.
    pub zone_waits: u32,
    /// Number of blocks that bypassed a busy CPU list.
    pub list_busy: u64,
    /// Number of refills of CPU lists.
    pub list_refills: u64,
    /// Number of batches that CPU lists gave to the zone since they were over their high mark.
    pub list_spills: u64,
    /// Number of drains of CPU lists, by a tick or on demand.
    pub list_drains: u64,
    /// Number of drains of all lists as the last resort of an allocation.
    pub need_drains: u64,
    /// Pages that came out of lists in such drains.
    pub need_pages: u64,
    /// The most pages that one CPU's list keeps at the moment.
    pub list_high: u32,
    /// The most pages that all CPUs' lists together keep.
    pub list_highs: u32,
    /// The most pages that move between a list and the zone at once at the moment.
    pub list_batch: u32,
    /// Number of blocks and runs that came from another node than the nearest.
    pub node_misses: u64,
    /// Number of segments that the system would not bind to their node.
    pub unbound_segments: u32,
    /// Bytes of address space mapped for the arena itself.
    pub mapped_bytes: usize,
    /// Bytes of side tables mapped.
    pub table_bytes: usize,
    /// Pages of side tables that are charged to the budget: all pages of each droppable table for
    /// the chunks for which the table was written to.
    pub table_pages: u32,
}

impl Statistics {
    /// The sum of the statistics of two nodes of an instance.
    pub(crate) fn and(self, other: &Statistics) -> Statistics {
        Statistics {
            managed: self.managed + other.managed,
            free: self.free + other.free,
            backed_free: self.backed_free + other.backed_free,
            backed_free_low: self.backed_free_low + other.backed_free_low,
            used: self.used + other.used,
            holes: self.holes + other.holes,
            listed: self.listed + other.listed,
            releasing: self.releasing + other.releasing,
            travelling: self.travelling + other.travelling,
            released: self.released + other.released,
            punched: self.punched + other.punched,
            refilled: self.refilled + other.refilled,
            release_calls: self.release_calls + other.release_calls,
            release_failures: self.release_failures + other.release_failures,
            populated: self.populated + other.populated,
            zone_locks: self.zone_locks + other.zone_locks,
            zone_waits: self.zone_waits.wrapping_add(other.zone_waits),
            list_busy: self.list_busy + other.list_busy,
            list_refills: self.list_refills + other.list_refills,
            list_spills: self.list_spills + other.list_spills,
            list_drains: self.list_drains + other.list_drains,
            need_drains: self.need_drains + other.need_drains,
            need_pages: self.need_pages + other.need_pages,
            list_high: self.list_high.max(other.list_high),
            list_highs: self.list_highs + other.list_highs,
            list_batch: self.list_batch.max(other.list_batch),
            node_misses: self.node_misses + other.node_misses,
            watermarks: self.watermarks.and(other.watermarks),
            // These belong to the arena or the budget, which the nodes share.
            budget: self.budget,
            unbound_segments: self.unbound_segments,
            mapped_bytes: self.mapped_bytes,
            table_bytes: self.table_bytes,
            table_pages: self.table_pages,
        }
    }
}

/// Counts drains as the last resort of allocations.
#[derive(Debug, Default)]
pub(crate) struct Needs {
    pub(crate) drains: AtomicU64,
    pub(crate) pages: AtomicU64,
}

impl Needs {
    /// Counts a drain that took `pages` pages out of lists.
    pub(crate) fn count(&self, pages: u64) {
        self.drains.fetch_add(1, Relaxed);
        self.pages.fetch_add(pages, Relaxed);
    }
}
