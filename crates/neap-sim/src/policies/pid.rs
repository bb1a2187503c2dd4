//! `Pid`: a controller with three terms (proportional, integral, derivative). It looks for the
//! least size at which refills and spills are rare.
//!
//! For comparison only. Once a quarter of a second it measures the traffic that a larger list would
//! have saved: pages that came in by refills or went out by spills, whichever is less. This traffic
//! is the error. The goal is the least size without such traffic. So a quarter of a second without
//! traffic counts as a negative error of a sixteenth of the size. The size changes by half of the
//! error, an eighth of its sum and a quarter of its change. The batch doubles as long as refills
//! follow refills, or spills follow spills. The size swings under a steady load, as its author
//! expected.

use neap_pages::policy::{self, Limits, List, Policy, ZoneState};

/// The numbers of one list.
#[derive(Clone, Copy, Debug)]
pub struct Pid {
    high: u32,
    refilled_pages: u32,
    spilled_pages: u32,
    error: i32,
    sum: i32,
    moved_at_tick: u32,
    doublings: u8,
    last: ListEvent,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ListEvent {
    Refill,
    Spill,
}

impl Pid {
    fn event(&mut self, event: ListEvent, supply: &ZoneState<'_>) -> u32 {
        let (limits, cap) = (supply.limits, supply.limits.cap(supply));
        self.high = self.high.min(cap);
        let doublings = if self.last == event { self.doublings + 1 } else { 0 };
        self.doublings = doublings.min(limits.doublings(cap) as u8);
        self.last = event;
        limits.fixed.batch << self.doublings
    }
}

impl Policy for Pid {
    fn new(limits: &Limits) -> Pid {
        let high = limits.fixed.high;
        Pid {
            high,
            refilled_pages: 0,
            spilled_pages: 0,
            error: 0,
            sum: 0,
            moved_at_tick: 0,
            doublings: 0,
            last: ListEvent::Spill,
        }
    }

    fn high(&self) -> u32 {
        self.high
    }

    fn batch(&self, limits: &Limits) -> u32 {
        limits.fixed.batch << self.doublings
    }

    fn put<'a>(&mut self, list: List, _order: u8, supply: impl FnOnce() -> ZoneState<'a>) -> u32 {
        if list.count <= self.high {
            return 0;
        }
        let batch = self.event(ListEvent::Spill, &supply());
        let give = list.count.saturating_sub(self.high).max(batch).min(list.count);
        self.spilled_pages = self.spilled_pages.saturating_add(give);
        give
    }

    fn refill(&mut self, _list: List, order: u8, supply: &ZoneState<'_>) -> u32 {
        let batch = self.event(ListEvent::Refill, supply);
        let blocks = policy::blocks(batch, self.high, order);
        self.refilled_pages = self.refilled_pages.saturating_add(blocks << order);
        blocks
    }

    fn decay(&mut self, list: List, supply: &ZoneState<'_>, quarters: u32) -> u32 {
        let (limits, cap) = (supply.limits, supply.limits.cap(supply));
        let rested = list.moved == self.moved_at_tick;
        self.moved_at_tick = list.moved;
        if quarters > 0 {
            let saved = self.refilled_pages.min(self.spilled_pages) as i32;
            let error = if saved > 0 { saved } else { -(self.high as i32 / 16) };
            // An unbounded sum would change the size long after the traffic has ended.
            let bound = limits.ceiling as i32;
            self.sum = (self.sum.saturating_add(error)).clamp(-bound, bound);
            let step = error / 2 + self.sum / 8 + (error - self.error) / 4;
            self.high = self.high.saturating_add_signed(step).max(limits.fixed.high).min(cap);
            (self.error, self.refilled_pages, self.spilled_pages) = (error, 0, 0);
        }
        if rested { list.count } else { list.count.saturating_sub(self.high) }
    }

    fn pressure(&mut self, list: List, supply: &ZoneState<'_>) -> u32 {
        self.high = self.high.min(supply.limits.cap(supply));
        list.count.saturating_sub(self.high)
    }

    fn is_settled(&self, limits: &Limits) -> bool {
        self.high == limits.fixed.high
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::test_inputs::{limits, supply};

    #[test]
    fn traffic_both_ways_grows_it_and_quiet_takes_it_back() {
        let bounds = limits(1 << 18, 2);
        let plenty = supply(&bounds, u32::MAX);
        let mut policy = Pid::new(&bounds);
        for moved in 1..=20 {
            let traffic = 8000_u32.saturating_sub(policy.high()) / 2;
            (policy.refilled_pages, policy.spilled_pages) = (traffic, traffic + 10);
            policy.decay(List { count: 0, moved }, &plenty, 1);
        }
        assert!(policy.high() > 4000, "{}", policy.high());
        (0..60).for_each(|_| _ = policy.decay(List { count: 0, moved: 20 }, &plenty, 1));
        assert!(policy.is_settled(&bounds), "{}", policy.high());
        policy.refilled_pages = 500;
        policy.decay(List { count: 0, moved: 21 }, &plenty, 1);
        assert!(policy.is_settled(&bounds), "refills alone are no reason");
    }
}
