//! `Upstream`: the size follows refills and bursts of frees, as in Linux since 6.7.
//!
//! For comparison only. A refill raises the size by the pages that it brought. A free counts its
//! pages as freed lately; an allocation halves that count. A free that finds the list at its size
//! raises the size to that count and a batch, if it is smaller. Each second the size loses an
//! eighth. A refill doubles the batch of the next refill; a free halves it. Two consecutive frees
//! of blocks of several pages empty the list, if enough pages were freed lately and the list has a
//! batch. Linux requires the batch only on CPUs whose share of the data cache is more than three
//! batches. Below the high watermark and while reclaim runs, every free lowers the size.
//!
//! The policy differs from Linux in one point. Linux stores a shortage of memory in a flag. This
//! policy checks for a shortage where it needs the answer.

use neap_pages::policy::{DOUBLINGS, Limits, List, Policy, ZoneState};

/// The numbers of one list.
#[derive(Clone, Copy, Debug)]
pub struct Upstream {
    high: u32,
    /// Pages freed lately.
    freed: u32,
    alloc_factor: u8,
    /// Whether the last free was of several pages.
    several: bool,
    quarters: u8,
}

impl Upstream {
    /// Applies a second's decay to the size. Returns the pages above it.
    pub(super) fn second(&mut self, count: u32, limits: &Limits) -> u32 {
        let least = limits.fixed.high;
        if self.high > least {
            let most = count.saturating_sub(limits.fixed.batch << DOUBLINGS);
            self.high = most.max(self.high - self.high / 8).max(least);
        }
        count.saturating_sub(self.high)
    }

    /// Whether a second is over.
    pub(super) fn is_second(&mut self, quarters: u32) -> bool {
        let quarters = u32::from(self.quarters) + quarters;
        self.quarters = (quarters % 4) as u8;
        quarters >= 4
    }
}

fn is_short(supply: &ZoneState<'_>) -> bool {
    supply.free <= supply.limits.watermarks.high
}

impl Policy for Upstream {
    fn new(limits: &Limits) -> Upstream {
        let high = limits.fixed.high;
        Upstream { high, freed: 0, alloc_factor: 0, several: false, quarters: 0 }
    }

    fn high(&self) -> u32 {
        self.high
    }

    fn batch(&self, limits: &Limits) -> u32 {
        limits.fixed.batch << self.alloc_factor
    }

    fn asked(&mut self, _list: List, _order: u8) {
        self.freed /= 2;
    }

    fn put<'a>(&mut self, list: List, order: u8, supply: impl FnOnce() -> ZoneState<'a>) -> u32 {
        let supply = supply();
        let (limits, batch, least) = (supply.limits, supply.limits.fixed.batch, supply.limits.fixed.high);
        let burst = batch << DOUBLINGS;
        self.alloc_factor /= 2;
        if self.freed < burst {
            self.freed += 1 << order;
        }
        let several = (1..=3).contains(&order);
        let flush = several && self.several && self.freed >= batch + least / 2 && list.count >= batch;
        self.several = several;
        if least == 0 {
            self.high = 0;
            return list.count;
        }
        let lowered = self.high.saturating_sub(self.freed.max(batch)).max(least);
        let threshold = if flush {
            self.high = self.high.saturating_sub(burst).max(least);
            0
        } else if supply.reclaiming {
            self.high = if limits.is_tuned() { lowered } else { self.high };
            self.high.min(4 * batch)
        } else if !limits.is_tuned() {
            self.high
        } else if is_short(&supply) {
            self.high = lowered;
            list.count.max(least)
        } else {
            let before = self.high;
            if list.count >= before && before < self.freed + batch {
                self.high = (self.freed + batch).clamp(least, limits.ceiling.max(least));
            }
            before
        };
        if list.count < threshold {
            0
        } else if flush {
            list.count.min(burst)
        } else if threshold < batch {
            1
        } else {
            self.freed.min(threshold - batch).max(batch).min(list.count)
        }
    }

    fn refill(&mut self, list: List, order: u8, supply: &ZoneState<'_>) -> u32 {
        let (limits, batch) = (supply.limits, supply.limits.fixed.batch);
        if self.high < batch {
            return 1;
        }
        let mut pages = if order == 0 { batch << self.alloc_factor } else { batch };
        if limits.is_tuned() && !is_short(supply) {
            self.high = (self.high + pages).min(limits.ceiling.max(limits.fixed.high));
        }
        if order == 0 {
            let room = self.high.saturating_sub(list.count + batch).max(batch);
            if pages <= room && u32::from(self.alloc_factor) < DOUBLINGS {
                self.alloc_factor += 1;
            }
            pages = pages.min(room);
        }
        if pages > 1 { (pages >> order).max(2) } else { 1 }
    }

    fn decay(&mut self, list: List, supply: &ZoneState<'_>, quarters: u32) -> u32 {
        if self.is_second(quarters) { self.second(list.count, supply.limits) } else { 0 }
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
    fn a11_refills_double_and_a_free_halves_the_factor() {
        let bounds = limits(1 << 18, 2);
        let plenty = supply(&bounds, u32::MAX);
        let mut upstream = Upstream::new(&bounds);
        let empty = List { count: 0, moved: 0 };
        let refills: Vec<u32> = (0..7).map(|_| upstream.refill(empty, 0, &plenty)).collect();
        assert_eq!(refills, [63, 126, 252, 504, 1008, 2016, 2016]);
        assert_eq!(upstream.high(), 643 + refills.iter().sum::<u32>());
        upstream.put(List { count: 1, moved: 1 }, 0, || plenty);
        assert_eq!(upstream.refill(empty, 0, &plenty), 252, "five halved is two");
    }

    #[test]
    fn a1_alternating_order_3_bursts_do_not_flush_the_list() {
        let bounds = limits(1 << 18, 2);
        let plenty = supply(&bounds, u32::MAX);
        for burst in [64_u32, 150, 300] {
            let mut upstream = Upstream::new(&bounds);
            let mut flushes = 0;
            for _ in 0..20 {
                (0..burst / 8).for_each(|_| upstream.asked(List { count: 8, moved: 0 }, 3));
                for block in 1..=burst / 8 {
                    flushes += u32::from(upstream.put(List { count: block * 8, moved: 0 }, 3, || plenty) > 0);
                }
            }
            assert_eq!(flushes, 0, "{burst} pages are below a batch and half of the size");
        }
        let mut upstream = Upstream::new(&bounds);
        let flushed = (1..=100).find(|block| upstream.put(List { count: block * 8, moved: 0 }, 3, || plenty) > 0);
        assert_eq!(flushed, Some((63_u32 + 643 / 2).div_ceil(8)));
    }

    #[test]
    fn shortage_and_time_take_the_size_back() {
        let bounds = limits(1 << 18, 2);
        let plenty = supply(&bounds, u32::MAX);
        let raised = || {
            let mut upstream = Upstream::new(&bounds);
            (0..9).for_each(|_| _ = upstream.refill(List { count: 0, moved: 0 }, 0, &plenty));
            upstream
        };
        let mut upstream = raised();
        let high = upstream.high();
        assert_eq!(upstream.decay(List { count: 0, moved: 0 }, &plenty, 3), 0);
        assert_eq!((upstream.high(), upstream.decay(List { count: high, moved: 0 }, &plenty, 1)), (high, high / 8));
        for short in [supply(&bounds, bounds.watermarks.high), ZoneState { reclaiming: true, ..plenty }] {
            let mut upstream = raised();
            let list = List { count: 700, moved: 0 };
            let gives = (0..400).filter(|_| upstream.put(list, 0, || short) > 0).count();
            assert!(gives == 400 && upstream.high() == bounds.fixed.high);
        }
    }
}
