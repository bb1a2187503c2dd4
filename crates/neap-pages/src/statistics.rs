//! What the page layer tells about itself: plain numbers, and a finding where they do not add up.
//!
//! Sits between the structures and whoever prints or tests them. Values only, no locks.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use neap_base::Pfn;

/// Free-page thresholds of a zone with a budget, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watermarks {
    /// Below this only those who free memory should allocate.
    pub min: u32,
    /// Below this background reclaim should run.
    pub low: u32,
    /// Background reclaim stops here.
    pub high: u32,
}

impl Watermarks {
    pub(crate) fn and(self, other: Watermarks) -> Watermarks {
        Watermarks { min: self.min + other.min, low: self.low + other.low, high: self.high + other.high }
    }
}

/// The page layer in numbers; pages unless said otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub struct Statistics {
    /// Mapped: the sum of all states.
    pub managed: u32,
    /// On buddy lists and in free chunks.
    pub free: u32,
    /// Of these, resident or possibly resident.
    pub backed_free: u32,
    /// The least `backed_free` since the last tick.
    pub backed_free_low: u32,
    /// Handed out, but for holes, or in a CPU's list.
    pub used: u32,
    /// Handed out with nothing behind them.
    pub holes: u32,
    /// In CPUs' lists.
    pub listed: u32,
    /// Detached while their memory goes back or comes, or until it is to come.
    pub releasing: u32,
    /// These, and the pages on their way from a CPU's list to the zone.
    pub travelling: u32,
    /// The most that may be used, if there is a budget.
    pub budget: Option<u32>,
    /// Thresholds on the budget (zero without one); of several nodes, which have a part of it each, the sum.
    pub watermarks: Watermarks,
    /// Given back to the system so far.
    pub released: u64,
    /// Of these, pages that were handed out: they were holes from then on.
    pub punched: u64,
    /// Pages of holes that were filled again so far.
    pub refilled: u64,
    /// System calls made for that.
    pub release_calls: u64,
    /// Of these, those that failed.
    pub release_failures: u64,
    /// Populated as parts of huge pages so far.
    pub populated: u64,
    /// Times the zone's lock was taken.
    pub zone_locks: u64,
    /// Times that it was found held, wrapping.
    pub zone_waits: u32,
    /// Blocks that went around a busy CPU list.
    pub list_busy: u64,
    /// Refills of CPU lists.
    pub list_refills: u64,
    /// Batches that CPU lists gave back because they were over their high mark.
    pub list_spills: u64,
    /// CPU lists that were drained, by a tick or on demand.
    pub list_drains: u64,
    /// Times that lists were drained for an allocation that found nothing else.
    pub need_drains: u64,
    /// Pages that came out of lists then.
    pub need_pages: u64,
    /// Most pages that one CPU's list keeps at the moment.
    pub list_high: u32,
    /// Most that all of them together keep.
    pub list_highs: u32,
    /// Most pages that move between a list and the zone at once at the moment.
    pub list_batch: u32,
    /// Blocks and runs that came from another node than the nearest.
    pub node_misses: u64,
    /// Segments that the system would not bind to their node.
    pub unbound_segments: u32,
    /// Bytes of address space mapped for the arena itself.
    pub mapped_bytes: usize,
    /// Bytes of side tables mapped.
    pub table_bytes: usize,
    /// Pages of side tables that the budget pays for: all of those about chunks for which they were
    /// written to.
    pub table_pages: u32,
}

impl Statistics {
    /// What two nodes of an instance are together.
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
            // These are the arena's, or the budget's, which they share.
            budget: self.budget,
            unbound_segments: self.unbound_segments,
            mapped_bytes: self.mapped_bytes,
            table_bytes: self.table_bytes,
            table_pages: self.table_pages,
        }
    }
}

/// Counts drains for allocations that found nothing else.
#[derive(Debug, Default)]
pub(crate) struct Needs {
    pub(crate) drains: AtomicU64,
    pub(crate) pages: AtomicU64,
}

impl Needs {
    /// Counts one, by which so many pages came out of lists.
    pub(crate) fn count(&self, pages: u64) {
        self.drains.fetch_add(1, Relaxed);
        self.pages.fetch_add(pages, Relaxed);
    }
}

/// Two numbers that should be equal and are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What does not add up.
    pub what: &'static str,
    /// Where it was seen, [`Pfn::NONE`] if nowhere in particular.
    pub page: Pfn,
    /// What it should be.
    pub expected: u64,
    /// What it is.
    pub found: u64,
}

impl Finding {
    /// A finding unless both numbers are equal.
    pub(crate) fn unless_equal(what: &'static str, page: Pfn, expected: u64, found: u64) -> Result<(), Finding> {
        if expected == found { Ok(()) } else { Err(Finding { what, page, expected, found }) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected {}, found {}", self.what, self.expected, self.found)?;
        if self.page == Pfn::NONE { Ok(()) } else { write!(f, " at page {}", self.page.0) }
    }
}
