//! The pages to keep follow from regret.
//!
//! # Design
//!
//! If a refill soon asks for pages that a spill gave to the zone, the list should have kept them.
//! So the refill claims only these, and the list keeps that many more. At a change of direction,
//! the size is first lowered to the pages that the list really held. After one swing up and down,
//! the list keeps as many pages as the swing.
//!
//! "Soon" weighs an idle page against a visit to the zone. It means before the next tick. If more
//! than one visit in sixteen finds the zone's mutex busy, it means before the fourth tick, since
//! other threads wait for the lock too. Under a slow load, "soon" alone decides how many pages are
//! kept.

use super::super::{Limits, List};

/// The most quarters of a second after a spill at which a request for a page still counts as soon,
/// if the zone's mutex is busy.
const SOON_IF_BUSY_MAX: u8 = 3;
/// Weight of a visit that finds the zone's mutex busy, relative to one that does not.
const BUSY_WEIGHT: u8 = 16;
/// The largest sum of weights.
const BUSY_WEIGHT_MAX: u8 = 8 * BUSY_WEIGHT;

/// The pages that one list is to keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KeepTarget {
    /// The pages that the list has learned to keep.
    pub(super) pages: u32,
    /// Pages given to the zone lately, and not asked for since.
    spilled_pages_unclaimed: u32,
    /// [`List::moved`] at the last spill.
    moved_at_spill: u32,
    count_after_spill: u32,
    quarters_since_spill: u8,
    /// Sum of the weights of visits that found the zone's mutex busy, less one for each other
    /// visit.
    busy_weight: u8,
    /// Whether any of the spilled pages were asked for again.
    any_claimed: bool,
}

impl KeepTarget {
    pub(super) fn new(limits: &Limits) -> KeepTarget {
        KeepTarget { pages: limits.fixed.high, ..KeepTarget::default() }
    }

    /// Keeps more pages, if less than `cap`. Returns whether it does.
    pub(super) fn grow(&mut self, pages: u32, cap: u32) -> bool {
        let grows = pages > 0 && self.pages < cap;
        if grows {
            self.pages = self.pages.saturating_add(pages);
        }
        grows
    }

    /// Keeps fewer pages, but not fewer than the fixed size.
    pub(super) fn shrink(&mut self, pages: u32, limits: &Limits) {
        self.pages = self.pages.saturating_sub(pages).max(limits.fixed.high.min(self.pages));
    }

    /// Keeps less by one part in `parts` of the size above the fixed one, at least by a batch.
    pub(super) fn step_down(&mut self, parts: u32, limits: &Limits) {
        let above = self.pages.saturating_sub(limits.fixed.high);
        self.shrink((above / parts).max(limits.fixed.batch), limits);
    }

    pub(super) fn bound(&mut self, limits: &Limits, cap: u32) {
        // The size falls below the fixed one only if memory is so short that `cap` does.
        self.pages = self.pages.max(limits.fixed.high).min(cap);
    }

    /// Records a visit to the zone, before it is known whether the zone's mutex is busy.
    pub(super) fn add_visit(&mut self) {
        self.busy_weight = self.busy_weight.saturating_sub(1);
    }

    /// Records that the last visit found the zone's mutex busy.
    pub(super) fn add_busy_visit(&mut self) {
        self.busy_weight = (self.busy_weight + BUSY_WEIGHT).min(BUSY_WEIGHT_MAX);
    }

    /// Records that a list spilled pages, and then has `list.count`.
    pub(super) fn add_spill(&mut self, pages: u32, list: List, limits: &Limits) {
        self.spilled_pages_unclaimed = self.spilled_pages_unclaimed.saturating_add(pages).min(limits.ceiling);
        (self.moved_at_spill, self.count_after_spill, self.quarters_since_spill) = (list.moved, list.count, 0);
    }

    /// Lowers the size to the pages that the list held since the last spill.
    pub(super) fn lower_to_swing(&mut self, list: List, limits: &Limits) {
        // `moved` counts the pages put and popped since the last spill. If all were put before the
        // first was popped, the list was then this full.
        let moved = i64::from(list.moved.wrapping_sub(self.moved_at_spill));
        let full = (moved + i64::from(list.count) + i64::from(self.count_after_spill)) / 2;
        self.shrink(self.pages.saturating_sub(full as u32), limits);
    }

    /// Whether an allocation that asks for pages now claims spilled ones.
    pub(super) fn has_claims(&self) -> bool {
        self.spilled_pages_unclaimed > 0 && self.is_soon()
    }

    /// Claims at most `batch` spilled pages. Returns their number.
    pub(super) fn claim(&mut self, batch: u32) -> u32 {
        let claimed = batch.min(self.spilled_pages_unclaimed);
        self.spilled_pages_unclaimed -= claimed;
        self.any_claimed = true;
        claimed
    }

    fn is_soon(&self) -> bool {
        self.quarters_since_spill <= if self.busy_weight >= BUSY_WEIGHT { SOON_IF_BUSY_MAX } else { 0 }
    }

    /// Applies the effect of one or more quarters of a second.
    pub(super) fn age(&mut self, limits: &Limits, quarters: u8) {
        self.quarters_since_spill = self.quarters_since_spill.saturating_add(quarters);
        if self.spilled_pages_unclaimed > 0 && !self.is_soon() {
            if !self.any_claimed {
                self.step_down(16, limits);
            }
            (self.spilled_pages_unclaimed, self.any_claimed) = (0, false);
        }
        self.busy_weight -= self.busy_weight / 4;
    }

    /// Forgets the spilled pages that were not claimed.
    pub(super) fn forget_spills(&mut self) {
        self.spilled_pages_unclaimed = 0;
    }

    pub(super) fn is_settled(&self, limits: &Limits) -> bool {
        self.pages <= limits.fixed.high && self.spilled_pages_unclaimed == 0
    }
}
