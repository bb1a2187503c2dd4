//! `Adaptive`: the size of a list follows from its events.
//!
//! # Design
//!
//! The policy finds two sizes separately:
//!
//! * **The batch** follows from straight runs: refill after refill, or spill after spill, with
//!   hardly any traffic in the other direction in between. Each such event doubles the batch, up to
//!   [`Limits::largest`]. A change of direction, or traffic in both directions, halves it. So a
//!   burst makes five smaller visits to the zone, then one for each 2016 pages. A CPU that takes
//!   and frees a page now and then moves 63 pages at a visit. The largest batch is at most an
//!   eighth of [`Limits::ceiling`].
//! * **The pages to keep** follow from regret. If a refill soon asks for pages that a spill gave to
//!   the zone, the list should have kept them. So the refill takes only these, and the list keeps
//!   that many more. At a change of direction, the size is first lowered to the pages that the list
//!   really held. After one swing up and down, the list keeps as many pages as the swing. If the
//!   zone's lock was busy, the list keeps a fixed batch more at once. It does not if pages have
//!   already moved in one direction for half of its size, since no size helps then. In a run of
//!   spills longer than the list, each spill lowers the size by half of the batch: another CPU
//!   allocates the pages that are freed here.
//!
//! "Soon" weighs an idle page against a visit to the zone. It means before the next tick. If more
//! than one visit in sixteen finds the zone's lock busy, it means before the fourth tick, since
//! other threads wait for the lock too. Under a slow load, "soon" alone decides how many pages are
//! kept.
//!
//! Time only makes lists smaller:
//! * If none of the pages given to the zone was asked for soon, the list keeps less by a sixteenth
//!   of its size above the fixed one.
//! * A list that is used and does not need the zone tries to keep less, by an eighth of its size
//!   above the fixed one. If the list then regrets that, the next try is half as large and comes
//!   after twice the time, at most four seconds.
//! * A list that is not used is emptied. Its size above the fixed one falls by an eighth each
//!   quarter of a second. After two seconds the list is reset.
//! * Once a second, the list keeps less by a quarter of its least count at the ticks of that
//!   second.
//!
//! If memory is short, [`Limits::cap`] bounds both sizes, down to exactly those of
//! [`Fixed`](super::Fixed).

use super::{Limits, List, Policy, ZoneState, blocks};

/// Quarters of a second without use after which the list's state is reset.
const REST: u8 = 8;
/// Binary logarithm of the most quarters before a try to keep less.
const PATIENCE: u8 = 4;
/// Quarters after which a list is trimmed.
const SECOND: u8 = 4;
/// The most ticks after a spill at which a request for a page still counts as soon, if the zone's
/// lock is busy.
const BUSY_TICKS: u8 = 3;
/// Weight of a visit that finds the zone's lock busy, relative to one that does not.
const BUSY: u8 = 16;
/// The largest sum of weights.
const MOST_BUSY: u8 = 8 * BUSY;
/// Number of orders with a batch of their own.
const ORDERS: usize = 4;
/// The most steps of one tick, however long ago the last one was.
const STEPS: u32 = 64;

/// The last direction of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Neither,
    In,
    Out,
}

/// The numbers of one list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Adaptive {
    /// The count above which a free spills: `keep`, or a batch if that is more.
    high: u32,
    /// The pages that the list has learned to keep.
    keep: u32,
    /// The most that `moved` may be at the next event for both events to count as one straight run.
    straight: u32,
    /// Pages that moved in direction `way` since the last change of direction.
    run: u32,
    /// Pages given to the zone lately, and not asked for since.
    given: u32,
    /// `moved` at the last tick.
    seen: u32,
    /// `moved` at the last spill. The next field is the count after it.
    spilled: u32,
    left: u32,
    /// The least count at a tick since the list was last trimmed; 0 if ticks cannot tell.
    least: u32,
    way: Way,
    /// Number of doublings of the fixed batch, by order.
    doublings: [u8; ORDERS],
    /// Quarters since the list was last trimmed.
    untrimmed: u8,
    /// Quarters without an event.
    quiet: u8,
    /// Quarters without use.
    idle: u8,
    /// Binary logarithm of the quarters before the next try: see [`PATIENCE`].
    patience: u8,
    /// Whether there was an event since the last tick. The next field: since the last quarter.
    active: bool,
    needed: bool,
    /// Ticks since the last spill.
    age: u8,
    /// Sum of the weights of visits that found the zone's lock busy, less one for each other visit.
    busy: u8,
    /// Whether any of the given pages were asked for again.
    regretted: bool,
    /// Whether the list tries to keep less.
    trying: bool,
}

impl Adaptive {
    /// Records an event and returns the batch for it.
    fn turn(&mut self, way: Way, order: u8, moved: u32, limits: &Limits, cap: u32) -> u32 {
        let same = self.way == way;
        if !same {
            (self.way, self.run) = (way, 0);
        }
        let straight = same && self.straight.wrapping_sub(moved) <= u32::MAX / 2;
        let doublings = &mut self.doublings[usize::from(order).min(ORDERS - 1)];
        *doublings =
            if straight { *doublings + 1 } else { doublings.saturating_sub(1) }.min(limits.doublings(cap) as u8);
        let batch = limits.fixed.batch << *doublings;
        self.active = true;
        self.busy = self.busy.saturating_sub(1);
        batch
    }

    /// Whether pages given to the zone are still worth keeping if an allocation asks for them now.
    fn is_soon(&self) -> bool {
        self.age <= if self.busy >= BUSY { BUSY_TICKS } else { 0 }
    }

    fn grow(&mut self, pages: u32, cap: u32) {
        if pages > 0 && self.keep < cap {
            self.keep = self.keep.saturating_add(pages);
            if self.trying {
                self.trying = false;
                self.patience = (self.patience + 1).min(PATIENCE);
            }
        }
    }

    fn shrink(&mut self, pages: u32, limits: &Limits) {
        self.keep = self.keep.saturating_sub(pages).max(limits.fixed.high.min(self.keep));
    }

    /// Lowers `keep` by one part in `parts` of its size above the fixed one, at least by a batch.
    fn step_down(&mut self, parts: u32, limits: &Limits) {
        let above = self.keep.saturating_sub(limits.fixed.high);
        self.shrink((above / parts).max(limits.fixed.batch), limits);
    }

    /// Learns from a refill that asks for given pages. Returns the pages to refill.
    fn regret(&mut self, batch: u32, turned: bool, list: List, limits: &Limits, cap: u32) -> u32 {
        if turned {
            // `moved` counts the pages put and popped since the last spill. If all were put before
            // the first was popped, the list was then this full.
            let moved = i64::from(list.moved.wrapping_sub(self.spilled));
            let full = (moved + i64::from(list.count) + i64::from(self.left)) / 2;
            self.shrink(self.keep.saturating_sub(full as u32), limits);
        }
        let again = batch.min(self.given);
        self.given -= again;
        self.regretted = true;
        self.grow(again, cap);
        again.max(limits.fixed.batch)
    }

    /// Brings both sizes within bounds.
    fn bound(&mut self, limits: &Limits, cap: u32) {
        // The size falls below the fixed one only if memory is so short that `cap` does.
        self.keep = self.keep.max(limits.fixed.high).min(cap);
        self.doublings = self.doublings.map(|doublings| doublings.min(limits.doublings(cap) as u8));
        self.high = self.keep.max(self.batch(limits)).min(cap);
    }

    #[cold]
    fn spill(&mut self, list: List, order: u8, supply: &ZoneState<'_>) -> u32 {
        let (limits, cap) = (supply.limits, supply.limits.cap(supply));
        let batch = self.turn(Way::Out, order, list.moved, limits, cap);
        if self.run > self.keep {
            // Shrinks by half of the batch, so that there is room for as much again before the next
            // spill.
            self.shrink(batch / 2, limits);
        }
        self.bound(limits, cap);
        // Gives nothing if the list should collect a larger batch first.
        let over = list.count.saturating_sub(self.high);
        let give = if over == 0 { 0 } else { over.max(batch).min(limits.largest()).min(list.count) };
        self.given = self.given.saturating_add(give).min(limits.ceiling);
        self.run = self.run.saturating_add(give);
        (self.spilled, self.left, self.age) = (list.moved, list.count - give, 0);
        let room = self.high.saturating_sub(list.count - give);
        self.straight = list.moved.wrapping_add(room + room / 4 + 1);
        give
    }

    /// Once a second, lowers the size by a quarter of the least count that ticks found. If the list
    /// goes up and down several times between two ticks, its least count is unknown.
    fn trim(&mut self, count: u32, moved: u32, limits: &Limits, quarters: u32) {
        self.least = if moved / 2 < self.keep { self.least.min(count) } else { 0 };
        self.untrimmed = self.untrimmed.saturating_add(quarters.min(255) as u8);
        if self.untrimmed >= SECOND {
            self.shrink(self.least / 4, limits);
            (self.least, self.untrimmed) = (u32::MAX, 0);
        }
    }

    /// Applies the effect of one or more quarters of a second.
    fn age(&mut self, rested: bool, limits: &Limits, quarters: u32) {
        self.age = self.age.saturating_add(quarters.min(255) as u8);
        if self.given > 0 && !self.is_soon() {
            if !self.regretted {
                self.step_down(16, limits);
            }
            (self.given, self.regretted) = (0, false);
        }
        self.busy -= self.busy / 4;
        if core::mem::take(&mut self.needed) {
            self.quiet = 0;
            return;
        }
        (self.way, self.run, self.doublings) = (Way::Neither, 0, [0; ORDERS]);
        self.quiet = self.quiet.saturating_add(quarters.min(255) as u8);
        if rested {
            (self.given, self.patience, self.trying) = (0, 0, false);
            (0..quarters.min(STEPS)).for_each(|_| self.step_down(8, limits));
        } else if self.quiet >= 1 << self.patience {
            self.patience -= u8::from(self.trying && self.patience > 0);
            self.trying = self.keep > limits.fixed.high;
            self.quiet = 0;
            self.step_down(8 << self.patience, limits);
        }
    }
}

impl Policy for Adaptive {
    fn new(limits: &Limits) -> Adaptive {
        Adaptive {
            high: limits.fixed.high,
            keep: limits.fixed.high,
            straight: 0,
            run: 0,
            given: 0,
            seen: 0,
            spilled: 0,
            left: 0,
            least: u32::MAX,
            untrimmed: 0,
            way: Way::Neither,
            doublings: [0; ORDERS],
            quiet: 0,
            idle: 0,
            patience: 0,
            active: false,
            needed: false,
            age: 0,
            busy: 0,
            regretted: false,
            trying: false,
        }
    }

    #[inline]
    fn high(&self) -> u32 {
        self.high
    }

    fn batch(&self, limits: &Limits) -> u32 {
        limits.fixed.batch << self.doublings.iter().max().unwrap_or(&0)
    }

    #[inline]
    fn put<'a>(&mut self, list: List, order: u8, supply: impl FnOnce() -> ZoneState<'a>) -> u32 {
        if list.count <= self.high { 0 } else { self.spill(list, order, &supply()) }
    }

    fn refill(&mut self, list: List, order: u8, supply: &ZoneState<'_>) -> u32 {
        let (limits, cap) = (supply.limits, supply.limits.cap(supply));
        let turned = self.way == Way::Out;
        let mut batch = self.turn(Way::In, order, list.moved, limits, cap);
        // Keeping more blocks would not help a list that is full of other orders.
        if list.count <= self.high / 2 && self.given > 0 && self.is_soon() {
            batch = self.regret(batch, turned, list, limits, cap);
        }
        self.bound(limits, cap);
        // A batch of this order must fit in beside the blocks of other orders.
        self.high = self.high.max((list.count + limits.fixed.batch).min(cap));
        let room = self.high.saturating_sub(list.count) >> order;
        let blocks = blocks(batch, self.high, order).min(1 + room);
        let pages = blocks << order;
        self.run = self.run.saturating_add(pages);
        self.straight = list.moved.wrapping_add(pages + pages / 4 + list.count);
        blocks
    }

    fn contended(&mut self, supply: &ZoneState<'_>) {
        let (limits, cap) = (supply.limits, supply.limits.cap(supply));
        self.busy = (self.busy + BUSY).min(MOST_BUSY);
        if self.run <= self.keep / 2 {
            self.grow(limits.fixed.batch, cap);
            self.bound(limits, cap);
        }
    }

    fn decay(&mut self, list: List, supply: &ZoneState<'_>, quarters: u32) -> u32 {
        let limits = supply.limits;
        let active = core::mem::take(&mut self.active);
        let rested = list.moved == self.seen && !active;
        self.needed |= active;
        let moved = list.moved.wrapping_sub(self.seen);
        self.seen = list.moved;
        if quarters > 0 {
            self.trim(list.count, moved, limits, quarters);
            self.idle = if rested { self.idle.saturating_add(quarters.min(255) as u8) } else { 0 };
            self.age(rested, limits, quarters);
            if self.idle >= REST {
                *self = Adaptive { seen: self.seen, ..Adaptive::new(limits) };
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
        let Adaptive { keep, run, given, doublings, patience, active, needed, .. } = *self;
        keep <= limits.fixed.high && run | given == 0 && doublings == [0; ORDERS] && patience == 0 && !active && !needed
    }
}
