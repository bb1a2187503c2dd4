//! Time only makes lists smaller.
//!
//! # Design
//!
//! * If none of the pages given to the zone was asked for soon, the list keeps less by a sixteenth
//!   of its size above the fixed one.
//! * A list that is used and does not need the zone tries to keep less, by an eighth of its size
//!   above the fixed one. If the list then regrets that, the next try is half as large and comes
//!   after twice the time, at most four seconds.
//! * A list that is not used is emptied. Its size above the fixed one falls by an eighth each
//!   quarter of a second. After two seconds the list is reset.
//! * Once a second, the list keeps less by a quarter of its least count at the ticks of that
//!   second.

use super::super::Limits;
use super::batch_size::BatchSize;
use super::keep_target::KeepTarget;

/// Quarters of a second without use after which the list's state is reset.
const RESET_QUARTERS: u8 = 8;
/// Binary logarithm of the most quarters before a try to keep less.
const TRY_INTERVAL_LOG2_MAX: u8 = 4;
/// Quarters after which a list is trimmed.
const TRIM_QUARTERS: u8 = 4;
/// The most steps of one tick, however long ago the last one was.
const STEPS_MAX: u8 = 64;

/// Events and ticks of one list, as far as its decay depends on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Decay {
    /// [`List::moved`](super::List) at the last tick.
    moved_at_tick: u32,
    /// The least count at a tick since the list was last trimmed; 0 if ticks cannot tell.
    count_min_since_trim: u32,
    quarters_since_trim: u8,
    quarters_without_event: u8,
    quarters_without_use: u8,
    /// Binary logarithm of the quarters before the next try: see [`TRY_INTERVAL_LOG2_MAX`].
    try_interval_log2: u8,
    /// Whether the list tries to keep less.
    is_trying: bool,
    event_since_tick: bool,
    event_since_quarter: bool,
}

impl Decay {
    pub(super) fn new(moved: u32) -> Decay {
        Decay { moved_at_tick: moved, count_min_since_trim: u32::MAX, ..Decay::default() }
    }

    /// Records a refill or a spill.
    pub(super) fn add_event(&mut self) {
        self.event_since_tick = true;
    }

    /// Records that the list keeps more pages: a try to keep less has failed.
    pub(super) fn end_try(&mut self) {
        if core::mem::take(&mut self.is_trying) {
            self.try_interval_log2 = (self.try_interval_log2 + 1).min(TRY_INTERVAL_LOG2_MAX);
        }
    }

    /// Records a tick. Returns the pages that moved since the last one, and whether the list was
    /// not used meanwhile.
    pub(super) fn tick(&mut self, moved_now: u32) -> (u32, bool) {
        let moved = moved_now.wrapping_sub(self.moved_at_tick);
        let active = core::mem::take(&mut self.event_since_tick);
        self.event_since_quarter |= active;
        self.moved_at_tick = moved_now;
        (moved, moved == 0 && !active)
    }

    /// Applies the effect of one or more quarters of a second.
    pub(super) fn age(
        &mut self,
        batch: &mut BatchSize,
        keep: &mut KeepTarget,
        rested: bool,
        limits: &Limits,
        quarters: u8,
    ) {
        keep.age(limits, quarters);
        self.quarters_without_use = if rested { self.quarters_without_use.saturating_add(quarters) } else { 0 };
        if core::mem::take(&mut self.event_since_quarter) {
            self.quarters_without_event = 0;
            return;
        }
        batch.end_run();
        self.quarters_without_event = self.quarters_without_event.saturating_add(quarters);
        if rested {
            keep.forget_spills();
            (self.try_interval_log2, self.is_trying) = (0, false);
            (0..quarters.min(STEPS_MAX)).for_each(|_| keep.step_down(8, limits));
        } else if self.quarters_without_event >= 1 << self.try_interval_log2 {
            self.try_interval_log2 -= u8::from(self.is_trying && self.try_interval_log2 > 0);
            self.is_trying = keep.pages > limits.fixed.high;
            self.quarters_without_event = 0;
            keep.step_down(8 << self.try_interval_log2, limits);
        }
    }

    /// Whether the list was not used for so long that it is reset.
    pub(super) fn is_long_unused(&self) -> bool {
        self.quarters_without_use >= RESET_QUARTERS
    }

    /// Once a second, lowers the size by a quarter of the least count that ticks found. If the list
    /// goes up and down several times between two ticks, its least count is unknown.
    pub(super) fn trim(&mut self, keep: &mut KeepTarget, count: u32, moved: u32, limits: &Limits, quarters: u8) {
        self.count_min_since_trim = if moved / 2 < keep.pages { self.count_min_since_trim.min(count) } else { 0 };
        self.quarters_since_trim = self.quarters_since_trim.saturating_add(quarters);
        if self.quarters_since_trim >= TRIM_QUARTERS {
            keep.shrink(self.count_min_since_trim / 4, limits);
            (self.count_min_since_trim, self.quarters_since_trim) = (u32::MAX, 0);
        }
    }

    pub(super) fn is_settled(&self) -> bool {
        self.try_interval_log2 == 0 && !self.event_since_tick && !self.event_since_quarter
    }
}
