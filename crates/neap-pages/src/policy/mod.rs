//! Policies: the pages that a CPU's list keeps, and the pages that move at once.
//!
//! # Design
//!
//! A policy gets events and returns numbers of pages. Its state is a few numbers per CPU, at most a
//! cache line, which the list keeps beside its count and changes under its lock. A policy reads no
//! clock, atomic or platform. It gets time as quarters of a second, the zone's state as
//! [`ZoneState`], and a busy zone lock as an event. The library uses [`Adaptive`]. [`Fixed`] is its
//! starting point and its fallback. The simulator has other policies, for comparison.
//!
//! # Invariants
//!
//! After every event:
//! * A list keeps at most [`Policy::high`] pages, and up to seven more for a moment, since blocks
//!   of mixed order do not add up exactly.
//! * All lists together keep at most an eighth of the pages.
//! * One event moves at most [`Limits::largest`] pages, at least one block.
//! * With the size 0, nothing is listed at all.
//!
//! The kernel's policies in the simulator break two of these rules. After their size has fallen,
//! they keep more until their next spill. They may give a whole list to the zone at once.

pub mod adaptive;
#[cfg(test)]
mod adaptive_tests;
#[cfg(test)]
mod adaptive_time_tests;
pub mod fixed;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod program_tests;
#[cfg(feature = "lab")]
pub mod unlocked;

pub use adaptive::Adaptive;
pub use fixed::Fixed;
#[cfg(feature = "lab")]
pub use unlocked::Unlocked;

use crate::statistics::Watermarks;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The size in bytes that a zone without a budget is taken to have, for the sizes of its lists.
pub(crate) const NOMINAL: u64 = 1 << 30;

/// The most doublings of the batch if nothing else is set. With 4 KiB pages the largest batch is
/// 2016 pages, as in Linux.
pub const DOUBLINGS: u32 = 5;

/// The most doublings of the batch that can be set, as in Linux.
pub const MOST_DOUBLINGS: u32 = 6;

/// Bounds that all lists of an instance share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The size without tuning. Tuning never goes below this size while there is memory.
    pub fixed: Fixed,
    /// The most pages that a list may be tuned to.
    pub ceiling: u32,
    /// The most doublings of the batch.
    pub scale: u32,
    /// Number of lists that share the zone.
    pub cpus: u32,
    /// Thresholds of the budget; zero without one.
    pub watermarks: Watermarks,
}

impl Limits {
    /// Returns the limits of `cpus` lists that share a zone of `managed` pages. With a budget,
    /// `managed` is the zone's part of it, and `watermarks` are its thresholds. Without a budget,
    /// `managed` is a nominal size, and `watermarks` are zero.
    pub fn new(managed: u32, cpus: usize, page_shift: u32, watermarks: Watermarks) -> Limits {
        let fixed = Fixed::new(managed, cpus, page_shift);
        Limits { fixed, ceiling: managed / 8 / cpus as u32, scale: DOUBLINGS, cpus: cpus as u32, watermarks }
    }

    /// Replaces the size by one that the user has chosen and that is not tuned; 0 means no lists.
    pub fn with_size(self, pages: u32) -> Limits {
        let fixed = Fixed { high: pages.min(self.ceiling), ..self.fixed };
        // A ceiling below the size marks a size that is not tuned.
        Limits { fixed, ceiling: 0, ..self }
    }

    /// Bounds the batch by `doublings` of the fixed one.
    pub fn with_scale(self, doublings: u32) -> Limits {
        Limits { scale: doublings.min(MOST_DOUBLINGS), ..self }
    }

    /// The most pages that all lists keep together without tuning.
    pub(crate) fn all_fixed(&self) -> u32 {
        self.fixed.high.saturating_mul(self.cpus)
    }

    /// Whether lists may have a size other than the fixed one.
    pub fn is_tuned(&self) -> bool {
        self.ceiling > 0
    }

    /// The most pages that one event moves.
    pub fn largest(&self) -> u32 {
        self.fixed.batch << self.doublings(self.ceiling)
    }

    /// The most pages that a list may keep now. The lists' pages above the fixed size are together
    /// at most half of the free pages above the high watermark. So the sum falls as memory runs
    /// out, and is the fixed one when reclaim begins. At the low watermark the lists together keep
    /// at most that many pages, even if the fixed size is larger. A size that the user has chosen
    /// does not change.
    pub fn cap(&self, supply: &ZoneState) -> u32 {
        let Fixed { high, .. } = self.fixed;
        if !self.is_tuned() {
            return high;
        }
        let slack = if supply.reclaiming { 0 } else { supply.free.saturating_sub(self.watermarks.high) };
        if supply.free <= self.watermarks.low {
            return high.min(self.watermarks.low / self.cpus);
        }
        high.saturating_add(slack / 2 / self.cpus).min(self.ceiling)
    }

    /// The most doublings of the batch if a list keeps at most `cap` pages. The batch is then at
    /// most an eighth of the ceiling, or half of `cap` if memory is getting short and that is less.
    /// Returns 0 if a list keeps no more than the fixed size.
    pub fn doublings(&self, cap: u32) -> u32 {
        if cap <= self.fixed.high {
            return 0;
        }
        ((self.ceiling / 8).min(cap / 2) / self.fixed.batch).max(1).ilog2().min(self.scale)
    }
}

/// The [`Limits`] of an instance's lists, which may change at any time.
///
/// A reader during a change may see old and new words together. Every rule of a policy holds for
/// any mix: no number is an index, and no difference runs below zero. The thread that changes the
/// limits then resets each list under the list's lock. Each tick also brings a list within the
/// limits.
#[derive(Debug)]
pub(crate) struct SharedLimits {
    high: AtomicU32,
    batch: AtomicU32,
    ceiling: AtomicU32,
    scale: AtomicU32,
    marks: [AtomicU32; 3],
    cpus: u32,
}

impl SharedLimits {
    pub(crate) fn new(limits: Limits) -> SharedLimits {
        let Limits { fixed, ceiling, scale, cpus, watermarks: Watermarks { min, low, high } } = limits;
        SharedLimits {
            high: AtomicU32::new(fixed.high),
            batch: AtomicU32::new(fixed.batch),
            ceiling: AtomicU32::new(ceiling),
            scale: AtomicU32::new(scale),
            marks: [min, low, high].map(AtomicU32::new),
            cpus,
        }
    }

    /// The limits at the moment.
    #[inline]
    pub(crate) fn now(&self) -> Limits {
        // Relaxed: every rule holds for any mix of words, and they publish no other data.
        let fixed = Fixed { high: self.high.load(Relaxed), batch: self.batch.load(Relaxed) };
        let [min, low, high] = self.marks.each_ref().map(|mark| mark.load(Relaxed));
        let watermarks = Watermarks { min, low, high };
        let (ceiling, scale) = (self.ceiling.load(Relaxed), self.scale.load(Relaxed));
        Limits { fixed, ceiling, scale, cpus: self.cpus, watermarks }
    }

    /// Replaces the limits. The number of lists stays.
    pub(crate) fn set(&self, limits: Limits) {
        let Limits { fixed, ceiling, scale, cpus: _, watermarks: Watermarks { min, low, high } } = limits;
        // Relaxed: every rule holds for any mix of words, and they publish no other data.
        self.high.store(fixed.high, Relaxed);
        self.batch.store(fixed.batch, Relaxed);
        self.ceiling.store(ceiling, Relaxed);
        self.scale.store(scale, Relaxed);
        self.marks.iter().zip([min, low, high]).for_each(|(mark, pages)| mark.store(pages, Relaxed));
    }

    /// Whether pages are listed at all.
    #[inline]
    pub(crate) fn are_any_listed(&self) -> bool {
        // Relaxed: it publishes no other data. A block that is listed after the lists were switched
        // off goes to the zone at a tick, or when an allocation drains all lists.
        self.high.load(Relaxed) > 0
    }
}

/// The state of a list at an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct List {
    /// Base pages in the list.
    pub count: u32,
    /// Base pages taken by allocations and put by frees so far, wrapping.
    pub moved: u32,
}

/// The state of the zone at an event.
#[derive(Clone, Copy, Debug)]
pub struct ZoneState<'a> {
    /// The bounds.
    pub limits: &'a Limits,
    /// Pages that can still be handed out, without those in lists; `u32::MAX` without a budget.
    pub free: u32,
    /// Whether background reclaim runs.
    pub reclaiming: bool,
    /// The time in nanoseconds, for policies of the laboratory that use a clock.
    pub now: u64,
}

/// The state of one list, and its answers to events. An event never waits and never fails.
///
/// All-zero memory must be a valid value, since the memory of lists is zero before they are made.
pub trait Policy: Copy + core::fmt::Debug {
    /// Whether owners lock their lists. It is `false` in benchmarks only.
    const LOCKED: bool = true;

    /// Returns the initial state of a list. A requested drain and a change of the limits reset a
    /// list to this state; [`Adaptive`] also does so after two seconds without use.
    fn new(limits: &Limits) -> Self;

    /// The most pages that the list keeps at the moment.
    fn high(&self) -> u32;

    /// Pages that move at once at the moment.
    fn batch(&self, limits: &Limits) -> u32;

    /// Records that an allocation asked for a block, whether the list has one or not.
    #[inline]
    fn asked(&mut self, _list: List, _order: u8) {}

    /// Records that a block was put into the list, whose count includes it. Returns the number of
    /// pages to give to the zone.
    fn put<'a>(&mut self, list: List, order: u8, supply: impl FnOnce() -> ZoneState<'a>) -> u32;

    /// Returns the number of blocks of this order to take from the zone, since the list has none.
    /// The number is at least one, and the caller uses that block.
    fn refill(&mut self, list: List, order: u8, supply: &ZoneState<'_>) -> u32;

    /// Records that the zone's mutex was busy at the visit that the last refill or `put` caused.
    fn contended(&mut self, _supply: &ZoneState<'_>) {}

    /// Records that time has passed: whole quarters of a second since the last call. Each tick
    /// calls this, for idle CPUs too. Returns the pages to give to the zone: all of them if the
    /// list has not changed.
    fn decay(&mut self, list: List, supply: &ZoneState<'_>, quarters: u32) -> u32;

    /// Records that the zone came to a watermark, or that reclaim began. Returns the number of
    /// pages to give to the zone.
    fn pressure(&mut self, list: List, _supply: &ZoneState<'_>) -> u32 {
        list.count.saturating_sub(self.high())
    }

    /// Whether the passing of time will change nothing more.
    fn is_settled(&self, limits: &Limits) -> bool;
}

/// Number of blocks of an order in a refill of `pages` pages: at least two if that is more than one
/// page, and at most what a list of `high` pages holds.
#[inline]
pub fn blocks(pages: u32, high: u32, order: u8) -> u32 {
    let blocks = if pages > 1 { (pages >> order).max(2) } else { 1 };
    blocks.min((high >> order).max(1))
}

/// Linux's thresholds for `managed` pages. `min` is 4 * sqrt(kilobytes) kilobytes, at most 256 MiB.
/// `low` is above `min`, and `high` above `low`, by a quarter of `min` or a thousandth of the
/// pages, whichever is more. Unlike in Linux, `min` is also at most a sixteenth of the pages, so
/// that a small budget is not all reserve.
pub fn watermarks(managed: u32, page_shift: u32) -> Watermarks {
    let kilobytes = (u64::from(managed) << page_shift) >> 10;
    let min = ((kilobytes * 16).isqrt().min(256 << 10) << 10 >> page_shift) as u32;
    let min = min.min(managed / 16);
    let gap = (min / 4).max(managed / 1000);
    Watermarks { min, low: min + gap, high: min + 2 * gap }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Limits of lists of a zone with a budget.
    pub(crate) fn limits(managed: u32, cpus: usize) -> Limits {
        Limits::new(managed, cpus, 12, watermarks(managed, 12))
    }

    pub(crate) fn supply(limits: &Limits, free: u32) -> ZoneState<'_> {
        ZoneState { limits, free, reclaiming: false, now: 0 }
    }

    pub(crate) fn list(count: u32, moved: u32) -> List {
        List { count, moved }
    }

    #[test]
    fn a_gibibyte_on_two_cpus_has_these_bounds() {
        let bounds = limits(1 << 18, 2);
        assert_eq!((bounds.fixed.high, bounds.fixed.batch, bounds.ceiling, bounds.largest()), (643, 63, 16384, 2016));
        let cap = |free| bounds.cap(&supply(&bounds, free));
        assert_eq!((cap(u32::MAX), cap(1548), cap(1549 + 4000), cap(1287)), (16384, 643, 1643, 643));
        assert_eq!((cap(1286), cap(0)), (643, 643));
        assert_eq!(bounds.cap(&ZoneState { reclaiming: true, ..supply(&bounds, 100_000) }), 643);
        assert_eq!(limits(1 << 18, 64).largest(), 63, "512 pages in a list are not worth a larger batch");
        let doublings = [643, 644, 4031, 4032, 16384].map(|cap| bounds.doublings(cap));
        assert_eq!(doublings, [0, 2, 4, 5, 5], "half of what a list may keep");
    }

    #[test]
    fn a8_list_caps_sum_below_eighth_of_zone_and_low_watermark() {
        for managed in (0..100_000).step_by(37).chain((17..32).map(|bits| 1 << bits)) {
            for cpus in [1, 2, 3, 16, 64, 224] {
                let bounds = limits(managed, cpus);
                let sum = |free| bounds.cap(&supply(&bounds, free)) as u64 * cpus as u64;
                let marks = bounds.watermarks;
                assert!(sum(u32::MAX) <= u64::from(managed) / 8);
                assert!(sum(marks.low) <= u64::from(marks.low), "{bounds:?}");
                let frees = [0, marks.min, marks.low, marks.high, marks.high + 1000, managed / 2, managed, u32::MAX];
                assert!(frees.is_sorted_by(|less, more| less > more || sum(*less) <= sum(*more)), "{bounds:?}");
            }
        }
    }

    #[test]
    fn a_size_that_the_user_chose_is_not_tuned() {
        let bounds = limits(1 << 18, 2);
        for (asked, high) in [(0, 0), (1, 1), (5000, 5000), (u32::MAX, 16384)] {
            let fixed = bounds.with_size(asked);
            assert_eq!((fixed.fixed.high, fixed.is_tuned(), fixed.largest()), (high, false, 63));
            assert!([0, 1000, u32::MAX].iter().all(|&free| fixed.cap(&supply(&fixed, free)) == high));
        }
    }

    #[test]
    fn scale_bounds_the_batch() {
        let bounds = limits(1 << 22, 2);
        let largest = [0, 1, 5, 6, 7].map(|scale| bounds.with_scale(scale).largest());
        assert_eq!(largest, [63, 126, 2016, 4032, 4032]);
    }

    #[test]
    fn a3_no_size_of_zone_makes_a_difference_run_below_zero() {
        for bits in 0..32 {
            for cpus in [1, 2, 64, 1024] {
                let managed = 1_u32 << bits;
                let fixed = Fixed::new(managed, cpus, 12);
                let marks = watermarks(managed, 12);
                assert!(fixed.high as u64 * cpus as u64 <= u64::from(managed) / 8);
                assert!(marks.min <= marks.low && marks.low <= marks.high && marks.high <= managed, "{marks:?}");
                assert!((0..=3).all(|order| u64::from(fixed.refill(order) - 1) << order <= u64::from(fixed.high)));
            }
        }
    }
}
