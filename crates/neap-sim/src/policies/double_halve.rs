//! `DoubleHalve`: a batch that doubles when it is used up and halves when twice as many pages lie
//! unused.
//!
//! For comparison only. The policy implements a reviewer's question literally. It has one number
//! and no separate size: the list keeps two batches. A tick empties and resets a list that was not
//! used since the tick before. A shortage of memory resets it.

use neap_pages::policy::{self, Limits, List, Policy, ZoneState};

/// The numbers of one list.
#[derive(Clone, Copy, Debug)]
pub struct DoubleHalve {
    batch: u32,
    high: u32,
    moved_at_tick: u32,
}

impl DoubleHalve {
    fn set(&mut self, batch: u32, supply: &ZoneState<'_>) {
        let (limits, cap) = (supply.limits, supply.limits.cap(supply));
        self.batch = batch.clamp(limits.fixed.batch, limits.fixed.batch << limits.doublings(cap));
        self.high = cap.min(2 * self.batch);
    }
}

impl Policy for DoubleHalve {
    fn new(limits: &Limits) -> DoubleHalve {
        let batch = limits.fixed.batch;
        DoubleHalve { batch, high: limits.fixed.high.min(2 * batch), moved_at_tick: 0 }
    }

    fn high(&self) -> u32 {
        self.high
    }

    fn batch(&self, _limits: &Limits) -> u32 {
        self.batch
    }

    fn put<'a>(&mut self, list: List, _order: u8, supply: impl FnOnce() -> ZoneState<'a>) -> u32 {
        if list.count <= self.high {
            return 0;
        }
        self.set(self.batch / 2, &supply());
        list.count.saturating_sub(self.batch.min(self.high))
    }

    fn refill(&mut self, _list: List, order: u8, supply: &ZoneState<'_>) -> u32 {
        let blocks = policy::blocks(self.batch, self.high, order);
        self.set(2 * self.batch, supply);
        blocks
    }

    fn decay(&mut self, list: List, supply: &ZoneState<'_>, _quarters: u32) -> u32 {
        let rested = list.moved == self.moved_at_tick;
        self.moved_at_tick = list.moved;
        if rested {
            self.set(0, supply);
        }
        if rested { list.count } else { 0 }
    }

    fn pressure(&mut self, list: List, supply: &ZoneState<'_>) -> u32 {
        self.set(0, supply);
        list.count.saturating_sub(self.high)
    }

    fn is_settled(&self, limits: &Limits) -> bool {
        self.batch == limits.fixed.batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::test_inputs::{limits, supply};

    #[test]
    fn use_doubles_and_surplus_halves() {
        let bounds = limits(1 << 18, 2);
        let plenty = supply(&bounds, u32::MAX);
        let mut policy = DoubleHalve::new(&bounds);
        let empty = List { count: 0, moved: 0 };
        let refills: Vec<u32> = (0..7).map(|_| policy.refill(empty, 0, &plenty)).collect();
        assert_eq!(refills, [63, 126, 252, 504, 1008, 2016, 2016]);
        assert_eq!(policy.put(List { count: 4032, moved: 0 }, 0, || plenty), 0);
        assert_eq!(policy.put(List { count: 4033, moved: 0 }, 0, || plenty), 4033 - 1008);
        assert_eq!((policy.pressure(List { count: 1000, moved: 0 }, &plenty), policy.high()), (874, 126));
    }
}
