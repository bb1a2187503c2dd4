//! `Unchanged`: the policy of Linux before [`Depth`](super::Depth), with a fixed size and a batch
//! of frees that doubles.
//!
//! For comparison only. [`Depth`](super::Depth) builds on it and changes the size. Each time that a
//! full list spills pages to the zone, the next batch of frees is twice as large, if the current
//! spill leaves more than a batch in the list. Each allocation halves the batch of frees. The batch
//! of refills is fixed. A block of several pages that is freed while the batch is doubled empties
//! the list. So a process that exits empties the list: its pages fill the list, and it frees its
//! page directory, a block of two pages, last. While reclaim runs, the list keeps at most four
//! batches. The policy does not depend on time.

use neap_pages::policy::{self, Limits, List, Policy, ZoneState};

/// The numbers of one list.
#[derive(Clone, Copy, Debug)]
pub struct Unchanged {
    pub(super) high: u32,
    pub(super) free_factor: u8,
}

impl Policy for Unchanged {
    fn new(limits: &Limits) -> Unchanged {
        Unchanged { high: limits.fixed.high, free_factor: 0 }
    }

    fn high(&self) -> u32 {
        self.high
    }

    fn batch(&self, limits: &Limits) -> u32 {
        limits.fixed.batch << self.free_factor
    }

    fn asked(&mut self, _list: List, _order: u8) {
        self.free_factor >>= 1;
    }

    fn put<'a>(&mut self, list: List, order: u8, supply: impl FnOnce() -> ZoneState<'a>) -> u32 {
        let supply = supply();
        let batch = supply.limits.fixed.batch;
        if self.free_factor > 0 && (1..=3).contains(&order) {
            return list.count;
        }
        let high = if supply.reclaiming { self.high.min(4 * batch) } else { self.high };
        if list.count < high {
            return 0;
        }
        if high < batch {
            return 1;
        }
        let most = high - batch;
        let give = batch << self.free_factor;
        self.free_factor += u8::from(give < most);
        give.min(most).max(batch).min(list.count)
    }

    fn refill(&mut self, _list: List, order: u8, supply: &ZoneState<'_>) -> u32 {
        policy::blocks(supply.limits.fixed.batch, self.high, order)
    }

    fn decay(&mut self, _list: List, _supply: &ZoneState<'_>, _quarters: u32) -> u32 {
        0
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
    fn frees_double_their_batch_until_an_allocation() {
        let bounds = limits(1 << 18, 2);
        let mut unchanged = Unchanged::new(&bounds);
        let full = List { count: 643, moved: 0 };
        let free = |unchanged: &mut Unchanged| unchanged.put(full, 0, || supply(&bounds, u32::MAX));
        assert_eq!([free(&mut unchanged), free(&mut unchanged), free(&mut unchanged)], [63, 126, 252]);
        assert_eq!([free(&mut unchanged), free(&mut unchanged)], [504, 580]);
        unchanged.asked(full, 0);
        assert_eq!(free(&mut unchanged), 252);
        assert_eq!(unchanged.put(List { count: 642, moved: 0 }, 0, || supply(&bounds, u32::MAX)), 0);
        assert_eq!(unchanged.high(), 643);
    }

    #[test]
    fn block_at_doubled_batch_empties_list_reclaim_keeps_4_batches() {
        let bounds = limits(1 << 18, 2);
        let mut unchanged = Unchanged::new(&bounds);
        let mut free = |count, order, reclaiming| {
            unchanged.put(List { count, moved: 0 }, order, || ZoneState { reclaiming, ..supply(&bounds, u32::MAX) })
        };
        assert_eq!((free(500, 1, false), free(643, 0, false), free(300, 1, false)), (0, 63, 300));
        assert_eq!((free(251, 0, true), free(252, 0, true)), (0, 126));
    }
}
