//! `Fixed`: Linux's formula for a list that does not tune itself.
//!
//! It follows `zone_batchsize` and `zone_highsize` in `mm/page_alloc.c`, bounded so that all lists
//! together keep at most an eighth of the pages.

use super::{Limits, List, Policy, ZoneState, blocks, watermarks};

/// The two sizes of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fixed {
    /// The most pages that the list keeps. With 0, every block goes to the zone.
    pub high: u32,
    /// Pages that move between list and zone at once.
    pub batch: u32,
}

impl Fixed {
    /// The sizes of each of `cpus` lists over `managed` pages.
    pub fn new(managed: u32, cpus: usize, page_shift: u32) -> Fixed {
        let batch = (managed / 4096).min((256 << 10) >> page_shift);
        // One less than a power of two, so that batches of sizes that differ by one bit do not run
        // in lockstep.
        let batch = if batch <= 1 { 1 } else { (1 << (batch + batch / 2).ilog2()) - 1 };
        let cpus = cpus as u32;
        let share = (watermarks(managed, page_shift).low / cpus).max(4 * batch);
        Fixed { high: share.min(managed / 8 / cpus), batch }
    }

    /// Number of blocks of an order in a refill: at least two if a batch is more than a page, and
    /// never more than the list keeps.
    pub fn refill(&self, order: u8) -> u32 {
        blocks(self.batch, self.high, order)
    }

    /// Number of blocks of an order in one batch.
    pub fn blocks(&self, order: u8) -> u32 {
        (self.batch >> order).max(1)
    }
}

/// [`Fixed`] with the state between ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Still {
    fixed: Fixed,
    seen: u32,
}

impl Policy for Still {
    fn new(limits: &Limits) -> Still {
        Still { fixed: limits.fixed, seen: 0 }
    }

    #[inline]
    fn high(&self) -> u32 {
        self.fixed.high
    }

    fn batch(&self, _limits: &Limits) -> u32 {
        self.fixed.batch
    }

    #[inline]
    fn put<'a>(&mut self, list: List, _order: u8, _supply: impl FnOnce() -> ZoneState<'a>) -> u32 {
        let over = list.count.saturating_sub(self.fixed.high);
        if over == 0 { 0 } else { over.max(self.fixed.batch).min(list.count) }
    }

    fn refill(&mut self, _list: List, order: u8, _supply: &ZoneState<'_>) -> u32 {
        self.fixed.refill(order)
    }

    fn decay(&mut self, list: List, _supply: &ZoneState<'_>, _quarters: u32) -> u32 {
        let rested = self.seen == list.moved;
        self.seen = list.moved;
        if rested { list.count } else { 0 }
    }

    fn is_settled(&self, _limits: &Limits) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::tests::{limits, supply};
    use crate::statistics::Watermarks;

    #[test]
    fn a_gibibyte_of_small_pages_has_upstreams_figures() {
        let pages = 1 << 18;
        let Watermarks { min, low, high } = watermarks(pages, 12);
        assert_eq!((min, low, high), (1024, 1286, 1548));
        assert_eq!(Fixed::new(pages, 2, 12), Fixed { high: 643, batch: 63 });
        assert_eq!(Fixed::new(pages, 64, 12), Fixed { high: 252, batch: 63 });
        assert_eq!(Fixed::new(pages >> 4, 2, 16), Fixed { high: 40, batch: 3 });
    }

    #[test]
    fn a9_tiny_zones_have_small_lists_and_nonzero_batches() {
        for managed in 0..3000 {
            for cpus in [1, 3, 16] {
                let fixed = Fixed::new(managed, cpus, 12);
                assert!(fixed.batch >= 1 && fixed.high as usize * cpus <= managed as usize / 8);
                assert!((0..=3).all(|order| fixed.refill(order) >= 1 && fixed.blocks(order) >= 1));
            }
        }
        assert_eq!(Fixed::new(15, 2, 12), Fixed { high: 0, batch: 1 });
    }

    #[test]
    fn fixed_policy_spills_a_batch_and_drains_all_when_idle() {
        let bounds = limits(1 << 18, 2);
        let mut still = Still::new(&bounds);
        let plenty = supply(&bounds, u32::MAX);
        let put = |still: &mut Still, count, moved| still.put(List { count, moved }, 0, || plenty);
        assert_eq!((put(&mut still, 643, 643), put(&mut still, 644, 644), put(&mut still, 651, 700)), (0, 63, 63));
        let list = List { count: 581, moved: 700 };
        assert_eq!(still.refill(list, 3, &plenty), 7);
        assert_eq!((still.decay(list, &plenty, 1), still.decay(list, &plenty, 0)), (0, 581));
    }
}
