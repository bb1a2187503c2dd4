//! `Depth`: the size follows the depth of allocation and freeing in periods of a second, as first
//! posted for Linux.
//!
//! For comparison only. The policy counts allocated minus freed pages. In each period it measures
//! the rise and the fall of that number, and averages both over periods with halving weight. The
//! smaller average is the size, since a larger list does not help traffic in one direction. Each
//! free reads the clock. In all other respects the policy is [`Unchanged`], that of the kernel for
//! which it was posted. Its reviewers objected to these properties: a window, a reset, a second
//! cache line of numbers, and work on each operation.

use neap_pages::policy::{Limits, List, Policy, ZoneState};

use super::linux_6_6::Unchanged;

/// The period, in nanoseconds.
pub const PERIOD: u64 = 1_000_000_000;

/// The numbers of one list.
#[derive(Clone, Copy, Debug)]
pub struct Depth {
    list: Unchanged,
    /// Pages allocated minus pages freed in this period. The next two fields are its extremes.
    count: i32,
    most: i32,
    least: i32,
    rise: i32,
    fall: i32,
    average_rise: i32,
    average_fall: i32,
    since: u64,
}

impl Depth {
    fn tune(&mut self, limits: &Limits, now: u64) {
        let past = now.saturating_sub(self.since);
        if past <= PERIOD {
            return;
        }
        let least = limits.fixed.high;
        if past > 2 * PERIOD {
            let list = Unchanged { high: least, ..self.list };
            *self = Depth { since: now, list, ..Depth::new(limits) };
            return;
        }
        self.since = now;
        self.average_rise = (self.average_rise + self.rise) / 2;
        self.average_fall = (self.average_fall + self.fall) / 2;
        (self.most, self.least, self.count, self.rise, self.fall) = (0, 0, 0, 0, 0);
        let depth = self.average_rise.min(self.average_fall).max(0) as u32;
        self.list.high = depth.clamp(least, limits.ceiling.max(least));
    }
}

impl Policy for Depth {
    fn new(limits: &Limits) -> Depth {
        Depth {
            list: Unchanged::new(limits),
            count: 0,
            most: 0,
            least: 0,
            rise: 0,
            fall: 0,
            average_rise: 0,
            average_fall: 0,
            since: 0,
        }
    }

    fn high(&self) -> u32 {
        self.list.high
    }

    fn batch(&self, limits: &Limits) -> u32 {
        self.list.batch(limits)
    }

    fn asked(&mut self, list: List, order: u8) {
        self.list.asked(list, order);
        self.count = self.count.wrapping_add(1 << order);
        self.most = self.most.max(self.count);
        self.rise = self.rise.max(self.count.wrapping_sub(self.least));
    }

    fn put<'a>(&mut self, list: List, order: u8, supply: impl FnOnce() -> ZoneState<'a>) -> u32 {
        let supply = supply();
        self.count = self.count.wrapping_sub(1 << order);
        self.least = self.least.min(self.count);
        self.fall = self.fall.max(self.most.wrapping_sub(self.count));
        self.tune(supply.limits, supply.now);
        self.list.put(list, order, || supply)
    }

    fn refill(&mut self, list: List, order: u8, supply: &ZoneState<'_>) -> u32 {
        self.list.refill(list, order, supply)
    }

    fn decay(&mut self, list: List, supply: &ZoneState<'_>, quarters: u32) -> u32 {
        self.list.decay(list, supply, quarters)
    }

    fn is_settled(&self, limits: &Limits) -> bool {
        self.list.is_settled(limits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::test_inputs::{limits, supply};

    /// Allocates and frees `pages` one by one, the frees at `now`.
    fn swing(depth: &mut Depth, bounds: &Limits, pages: u32, now: u64) {
        let list = List { count: 0, moved: 0 };
        (0..pages).for_each(|_| depth.asked(list, 0));
        for _ in 0..pages {
            depth.put(list, 0, || ZoneState { now, ..supply(bounds, u32::MAX) });
        }
    }

    #[test]
    fn depth_learns_periodic_swing_and_forgets_in_two_idle_periods() {
        let bounds = limits(1 << 20, 2);
        let mut depth = Depth::new(&bounds);
        let mut sizes = Vec::new();
        for period in 1..=6 {
            swing(&mut depth, &bounds, 30_000, period * (PERIOD + 1));
            sizes.push(depth.high());
        }
        // The first free of a period ends the previous one, so each average lacks later frees of
        // that period.
        assert!(sizes.is_sorted() && sizes[1] >= 7_000 && sizes[5] > 28_000 && sizes[5] <= 30_000, "{sizes:?}");
        swing(&mut depth, &bounds, 1, 9 * PERIOD);
        assert_eq!(depth.high(), bounds.fixed.high);
        swing(&mut depth, &bounds, 40_000, 10 * PERIOD - 1);
        assert_eq!(depth.high(), bounds.fixed.high, "bursts that lie further apart than the window are never learned");
    }

    #[test]
    fn only_allocating_and_only_freeing_teach_nothing() {
        let bounds = limits(1 << 20, 2);
        for way in [true, false] {
            let mut depth = Depth::new(&bounds);
            for period in 1..=5 {
                let list = List { count: 0, moved: 0 };
                (0..20_000).for_each(|_| {
                    if way {
                        depth.asked(list, 0)
                    }
                });
                let frees = if way { 1 } else { 20_000 };
                for _ in 0..frees {
                    depth.put(list, 0, || ZoneState { now: period * (PERIOD + 1), ..supply(&bounds, u32::MAX) });
                }
            }
            assert_eq!(depth.high(), bounds.fixed.high);
        }
    }
}
