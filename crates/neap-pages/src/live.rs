//! A zone's counts in memory that other processes read: see [`neap_base::live`].

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts of a zone. Counts of pages that change together share a word, the first one in its low
/// half.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct ZoneCell {
    /// Free pages, and pages detached for release or population.
    free: AtomicU64,
    /// Mapped pages, and free pages that may have memory.
    managed: AtomicU64,
    /// Pages handed out without memory.
    holes: AtomicU64,
    /// Pages populated as parts of huge pages since the start.
    populated: AtomicU64,
    /// Other counts since the start.
    totals: ZoneTotals,
}

/// The page counts of a [`ZoneCell`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct ZoneCounts {
    pub(crate) free: u32,
    pub(crate) releasing: u32,
    pub(crate) managed: u32,
    pub(crate) backed_free: u32,
    pub(crate) holes: u32,
    pub(crate) populated: u64,
}

/// Counts of a zone since the start. They change under the zone's lock.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct ZoneTotals {
    /// Pages taken from the system.
    pub(crate) grown: AtomicU64,
    /// Pages released to the system, those of holes among them.
    pub(crate) released: AtomicU64,
    /// System calls made for releases.
    pub(crate) calls: AtomicU64,
    /// System calls made for releases that failed.
    pub(crate) failures: AtomicU64,
    /// Released pages that were handed out.
    pub(crate) punched: AtomicU64,
    /// Pages of holes that were filled again.
    pub(crate) refilled: AtomicU64,
    /// Mapped bytes of the tables of all zones when this one grew last. They never decrease, so the
    /// largest number of all zones is that of now.
    pub(crate) table_bytes: AtomicU64,
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

impl ZoneCell {
    /// Replaces the page counts. Only one thread at a time may call this.
    pub(crate) fn store(&self, counts: ZoneCounts) {
        // Relaxed: counts for other processes; they publish no other data.
        self.free.store(pair(counts.free, counts.releasing), Relaxed);
        self.managed.store(pair(counts.managed, counts.backed_free), Relaxed);
        self.holes.store(counts.holes.into(), Relaxed);
        self.populated.store(counts.populated, Relaxed);
    }

    /// Replaces the counts since the start. Only one thread at a time may call this.
    pub(crate) fn store_totals(&self, totals: &ZoneTotals) {
        for (cell, total) in self.totals.words().into_iter().zip(totals.words()) {
            // Relaxed: counts for other processes; they publish no other data.
            cell.store(total.load(Relaxed), Relaxed);
        }
    }
}

impl ZoneTotals {
    fn words(&self) -> [&AtomicU64; 7] {
        let ZoneTotals { grown, released, calls, failures, punched, refilled, table_bytes } = self;
        [grown, released, calls, failures, punched, refilled, table_bytes]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{Opened, shape};
    use crate::purge::Effort;
    use crate::shape::{EarlyTables, Shape};
    use neap_base::Order;
    use neap_base::live::Link;
    use neap_base::platform::memory::Range;
    use neap_testing::virtual_platform::Virtual;
    use std::vec::Vec;

    #[test]
    fn cell_has_all_counts_right_after_each_change() {
        let machine = Virtual::new(4096, 1);
        let o = Opened::new(&machine, &Shape { huge: true, ..shape(None) }).unwrap();
        let take = || o.pages.allocate_one_more_block(&machine, Order(5), EarlyTables::Written).unwrap();
        let first = take();
        let cell = ZoneCell::default();
        let link = Link::new((&raw const cell).cast_mut());
        {
            let inner = o.pages.zone.lock();
            // SAFETY: link and cell outlive the pages' last change, and there is one node.
            unsafe { inner.live.attach(&link) };
            o.pages.zone.change_totals(&inner, |_| ());
        }
        let check = |most: &str| {
            let seen = [&cell.populated].into_iter().chain(cell.totals.words()).map(|word| word.load(Relaxed));
            let of = o.pages.statistics();
            let all = [
                of.populated,
                o.pages.grown(),
                of.released,
                of.release_calls,
                of.release_failures,
                of.punched,
                of.refilled,
                of.table_bytes as u64,
            ];
            assert_eq!(seen.collect::<Vec<_>>(), all, "{most}");
            all
        };
        check("first counts");
        let mut blocks: Vec<_> = core::iter::from_fn(|| Some(take())).take(2048 / 32).collect();
        while o.pages.statistics().populated == 0 {
            blocks.push(take());
        }
        assert!(check("growth")[1] > 0);
        blocks.iter().for_each(|block| o.pages.free_block(&machine, block.pfn, Order(5)));
        o.pages.drain_all(&machine);
        o.pages.release(&machine, u32::MAX, Effort::Sparing, &|| false);
        assert!(check("release")[2] > 0);
        let mut pages = [2, 3].map(|page| o.pages.address(first.pfn.plus(page))).into_iter();
        let gather = |ranges: &mut [Range]| {
            let wanted = pages.by_ref().zip(ranges);
            wanted.map(|(start, range)| *range = Range { start, length: 4096 }).count()
        };
        // SAFETY: the test does not need the contents of these pages.
        unsafe { o.pages.punch(&machine, Effort::Full, &|| false, gather, |_, _| ()) }.unwrap();
        assert_eq!(check("holes")[5], 2);
        assert_eq!(o.pages.charge_holes(2), 2);
        check("filled holes");
        o.pages.uncharge_holes(1);
        assert_eq!(check("a hole that was not filled")[6], 1);
    }
}
