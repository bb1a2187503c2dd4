//! The batch follows from straight runs.
//!
//! # Design
//!
//! A straight run is refill after refill, or spill after spill, with hardly any traffic in the
//! other direction in between. Each such event doubles the batch, up to [`Limits::largest`]. A
//! change of direction, or traffic in both directions, halves it. So a burst makes five smaller
//! visits to the zone, then one for each 2016 pages. A CPU that takes and frees a page now and then
//! moves 63 pages at a visit. The largest batch is at most an eighth of [`Limits::ceiling`].

use super::super::Limits;

/// Number of orders with a batch of their own.
const ORDERS: usize = 4;

/// The last direction of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Direction {
    #[default]
    Neither,
    FromZone,
    ToZone,
}

/// The batch of one list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BatchSize {
    /// The most that [`List::moved`](super::List) may be at the next event for both events to count
    /// as one straight run.
    moved_if_straight: u32,
    /// Pages that moved in `direction` since the last change of direction.
    pub(super) run_pages: u32,
    pub(super) direction: Direction,
    /// Number of doublings of the fixed batch, by order.
    doublings: [u8; ORDERS],
}

impl BatchSize {
    /// The largest batch of all orders.
    pub(super) fn pages(&self, limits: &Limits) -> u32 {
        limits.fixed.batch << self.doublings.iter().max().unwrap_or(&0)
    }

    /// Records an event and returns the batch for it.
    pub(super) fn turn(&mut self, direction: Direction, order: u8, moved: u32, limits: &Limits, cap: u32) -> u32 {
        let same = self.direction == direction;
        if !same {
            (self.direction, self.run_pages) = (direction, 0);
        }
        let straight = same && self.moved_if_straight.wrapping_sub(moved) <= u32::MAX / 2;
        let doublings = &mut self.doublings[usize::from(order).min(ORDERS - 1)];
        *doublings =
            if straight { *doublings + 1 } else { doublings.saturating_sub(1) }.min(limits.doublings(cap) as u8);
        limits.fixed.batch << *doublings
    }

    /// Records that an event moved pages.
    pub(super) fn add_move(&mut self, pages: u32, moved_if_straight: u32) {
        self.run_pages = self.run_pages.saturating_add(pages);
        self.moved_if_straight = moved_if_straight;
    }

    pub(super) fn bound(&mut self, limits: &Limits, cap: u32) {
        self.doublings = self.doublings.map(|doublings| doublings.min(limits.doublings(cap) as u8));
    }

    /// Ends the run, after a quarter of a second without an event.
    pub(super) fn end_run(&mut self) {
        *self = BatchSize { moved_if_straight: self.moved_if_straight, ..BatchSize::default() };
    }

    pub(super) fn is_settled(&self) -> bool {
        self.run_pages == 0 && self.doublings == [0; ORDERS]
    }
}
