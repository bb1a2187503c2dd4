//! How much a CPU's list keeps, and how much moves at once.
//!
//! Sits between numbers and numbers: pure functions. `Fixed` is upstream's formula for a list that does not tune itself
//! (linux `mm/page_alloc.c`, `zone_batchsize` and `zone_highsize`), bounded so that all lists together keep at most an
//! eighth of the pages.

use crate::statistics::Watermarks;

/// What a zone without a budget counts as, in bytes: lists of the usual size whatever the machine.
pub(crate) const NOMINAL: u64 = 1 << 30;

/// What a list does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fixed {
    /// Most pages it keeps; 0: it keeps none and every block goes to the zone.
    pub(crate) high: u32,
    /// Pages that move between list and zone at once.
    pub(crate) batch: u32,
}

impl Fixed {
    /// For each of `cpus` lists over `managed` pages.
    pub(crate) fn new(managed: u32, cpus: usize, page_shift: u32) -> Fixed {
        let batch = (managed / 4096).min((256 << 10) >> page_shift);
        // One less than a power of two: batches of sizes that differ by one bit do not follow each other in lockstep.
        let batch = if batch <= 1 { 1 } else { (1 << (batch + batch / 2).ilog2()) - 1 };
        let cpus = cpus as u32;
        let share = (watermarks(managed, page_shift).low / cpus).max(4 * batch);
        Fixed { high: share.min(managed / 8 / cpus), batch }
    }

    /// Blocks of an order that a refill brings: at least two where a batch is more than a page, never over the high mark.
    pub(crate) fn refill(&self, order: u8) -> u32 {
        let blocks = if self.batch > 1 { (self.batch >> order).max(2) } else { 1 };
        blocks.min((self.high >> order).max(1))
    }

    /// Blocks of an order in one batch.
    pub(crate) fn blocks(&self, order: u8) -> u32 {
        (self.batch >> order).max(1)
    }
}

/// Upstream's thresholds for `managed` pages: min is 4 * sqrt(kilobytes) kilobytes, the others a quarter of it, or a
/// thousandth of the pages, above one another. Upstream's bounds on min are those of a whole machine; here it is at most
/// a sixteenth of the pages instead, so that a small budget is not all reserve.
pub(crate) fn watermarks(managed: u32, page_shift: u32) -> Watermarks {
    let kilobytes = (u64::from(managed) << page_shift) >> 10;
    let min = ((kilobytes * 16).isqrt().min(256 << 10) << 10 >> page_shift) as u32;
    let min = min.min(managed / 16);
    let gap = (min / 4).max(managed / 1000);
    Watermarks { min, low: min + gap, high: min + 2 * gap }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a9_tiny_zones_keep_little_or_nothing_and_still_move_something() {
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
    fn a3_no_size_of_zone_makes_a_difference_run_below_zero() {
        for bits in 0..32 {
            for cpus in [1, 2, 64, 1024] {
                let managed = 1_u32 << bits;
                let fixed = Fixed::new(managed, cpus, 12);
                let marks = watermarks(managed, 12);
                assert!(fixed.high as u64 * cpus as u64 <= u64::from(managed) / 8);
                assert!(marks.min <= marks.low && marks.low <= marks.high && marks.high <= managed, "{marks:?}");
                assert!((0..=3).all(|order| u64::from(fixed.refill(order) - 1) << order <= u64::from(fixed.high)));
            }
        }
    }
}
