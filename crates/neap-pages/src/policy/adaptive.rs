//! `Adaptive`: the size of a list follows from its events.
//!
//! # Design
//!
//! The policy finds two sizes separately:
//!
//! * the batch, which follows from straight runs of events (`batch_size.rs`);
//! * the pages to keep, which follow from regret (`keep_target.rs`). If the zone's mutex was busy,
//!   the list keeps a fixed batch more at once. It does not if pages have already moved in one
//!   direction for half of its size, since no size helps then. In a run of spills longer than the
//!   list, each spill lowers the size by half of the batch: another CPU allocates the pages that
//!   are freed here.
//!
//! Time only makes lists smaller (`decay.rs`).
//!
//! If memory is short, [`Limits::cap`] bounds both sizes, down to exactly those of
//! [`Fixed`](super::Fixed).

mod batch_size;
mod decay;
mod keep_target;

use super::{Limits, List, Policy, ZoneState, blocks};
use batch_size::{BatchSize, Direction};
use core::mem::offset_of;
use decay::Decay;
use keep_target::KeepTarget;

/// The state of one list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Adaptive {
    /// The count above which a free spills: the pages to keep, or a batch if that is more.
    high: u32,
    batch: BatchSize,
    keep: KeepTarget,
    decay: Decay,
}

impl Adaptive {
    /// Offset of the most pages that the list keeps.
    pub(crate) const HIGH_AT: usize = offset_of!(Adaptive, high);

    /// Records an event and returns the batch for it.
    fn turn(&mut self, direction: Direction, order: u8, moved: u32, limits: &Limits, cap: u32) -> u32 {
        self.decay.add_event();
        self.keep.add_visit();
        self.batch.turn(direction, order, moved, limits, cap)
    }

    fn grow(&mut self, pages: u32, cap: u32) {
        if self.keep.grow(pages, cap) {
            self.decay.end_try();
        }
    }

    /// Brings both sizes within bounds.
    fn bound(&mut self, limits: &Limits, cap: u32) {
        self.keep.bound(limits, cap);
        self.batch.bound(limits, cap);
        self.high = self.keep.pages.max(self.batch(limits)).min(cap);
    }

    #[cold]
    fn spill(&mut self, list: List, order: u8, supply: &ZoneState<'_>) -> u32 {
        let (limits, cap) = (supply.limits, supply.limits.cap(supply));
        let batch = self.turn(Direction::ToZone, order, list.moved, limits, cap);
        if self.batch.run_pages > self.keep.pages {
            // Shrinks by half of the batch, so that there is room for as much again before the next
            // spill.
            self.keep.shrink(batch / 2, limits);
        }
        self.bound(limits, cap);
        // Gives nothing if the list should collect a larger batch first.
        let over = list.count.saturating_sub(self.high);
        let give = if over == 0 { 0 } else { over.max(batch).min(limits.largest()).min(list.count) };
        let count = list.count - give;
        self.keep.add_spill(give, List { count, ..list }, limits);
        let room = self.high.saturating_sub(count);
        self.batch.add_move(give, list.moved.wrapping_add(room + room / 4 + 1));
        give
    }
}

impl Policy for Adaptive {
    fn new(limits: &Limits) -> Adaptive {
        Adaptive {
            high: limits.fixed.high,
            batch: BatchSize::default(),
            keep: KeepTarget::new(limits),
            decay: Decay::new(0),
        }
    }

    #[inline]
    fn high(&self) -> u32 {
        self.high
    }

    fn batch(&self, limits: &Limits) -> u32 {
        self.batch.pages(limits)
    }

    #[inline]
    fn put<'a>(&mut self, list: List, order: u8, supply: impl FnOnce() -> ZoneState<'a>) -> u32 {
        if list.count <= self.high { 0 } else { self.spill(list, order, &supply()) }
    }

    fn refill(&mut self, list: List, order: u8, supply: &ZoneState<'_>) -> u32 {
        let (limits, cap) = (supply.limits, supply.limits.cap(supply));
        let turned = self.batch.direction == Direction::ToZone;
        let mut batch = self.turn(Direction::FromZone, order, list.moved, limits, cap);
        // Keeping more blocks would not help a list that is full of other orders.
        if list.count <= self.high / 2 && self.keep.has_claims() {
            if turned {
                self.keep.lower_to_swing(list, limits);
            }
            let claimed = self.keep.claim(batch);
            self.grow(claimed, cap);
            batch = claimed.max(limits.fixed.batch);
        }
        self.bound(limits, cap);
        // A batch of this order must fit in beside the blocks of other orders.
        self.high = self.high.max((list.count + limits.fixed.batch).min(cap));
        let room = self.high.saturating_sub(list.count) >> order;
        let blocks = blocks(batch, self.high, order).min(1 + room);
        let pages = blocks << order;
        self.batch.add_move(pages, list.moved.wrapping_add(pages + pages / 4 + list.count));
        blocks
    }

    fn contended(&mut self, supply: &ZoneState<'_>) {
        let (limits, cap) = (supply.limits, supply.limits.cap(supply));
        self.keep.add_busy_visit();
        if self.batch.run_pages <= self.keep.pages / 2 {
            self.grow(limits.fixed.batch, cap);
            self.bound(limits, cap);
        }
    }

    fn decay(&mut self, list: List, supply: &ZoneState<'_>, quarters: u32) -> u32 {
        let limits = supply.limits;
        let (moved, rested) = self.decay.tick(list.moved);
        if quarters > 0 {
            let quarters = quarters.min(255) as u8;
            self.decay.trim(&mut self.keep, list.count, moved, limits, quarters);
            self.decay.age(&mut self.batch, &mut self.keep, rested, limits, quarters);
            if self.decay.is_long_unused() {
                *self = Adaptive { decay: Decay::new(list.moved), ..Adaptive::new(limits) };
            }
        }
        self.bound(limits, limits.cap(supply));
        if rested { list.count } else { list.count.saturating_sub(self.high) }
    }

    fn pressure(&mut self, list: List, supply: &ZoneState<'_>) -> u32 {
        self.bound(supply.limits, supply.limits.cap(supply));
        list.count.saturating_sub(self.high)
    }

    fn is_settled(&self, limits: &Limits) -> bool {
        self.batch.is_settled() && self.keep.is_settled(limits) && self.decay.is_settled()
    }
}
