//! The option `high`. A heap above it gives memory back in the background.
//!
//! # Design
//!
//! If a tick finds that the heap has more bytes than `high`, it drains every cache and releases
//! free memory. Then reclaimers ask shrinkers for the rest. No thread waits for that, and no
//! allocation is refused. If the heap is not smaller than at the last such tick, the next [`REST`]
//! ticks do nothing.
//!
//! # Locking
//!
//! This module has no lock. Its counters publish no other data.

use crate::mm::{Core, Mm};
use crate::returning::drain::Fences;
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_os::stack;
use neap_pages::Effort;
use neap_reclaim::is_calling;
use neap_reclaim::reclaim::ReclaimJob;

/// Ticks that do nothing after a tick at which the heap was not smaller.
const REST: u32 = 16;
/// Least bytes that count as a fall of the use.
const LEAST: u64 = 1 << 20;

impl<P: Platform> Core<P> {
    /// Returns by how many bytes the heap is above `high`.
    fn beyond_high(&self) -> u64 {
        self.settings.high().map_or(0, |high| self.counted().saturating_sub(high))
    }

    /// Gives memory back if the heap is above `high`. Returns whether a later tick has to go on
    /// with that.
    pub(crate) fn keep_below_high(&self, mm: &Mm<P>) -> bool {
        let maintenance = &self.maintenance;
        if self.beyond_high() == 0 {
            maintenance.high_rest.store(0, Ordering::Relaxed);
            maintenance.high_use.store(u64::MAX, Ordering::Relaxed);
            return false;
        }
        let rest = maintenance.high_rest.load(Ordering::Relaxed);
        if rest > 0 {
            maintenance.high_rest.store(rest - 1, Ordering::Relaxed);
            return false;
        }
        // Calls of the program may come here, from a small stack.
        stack::apart(|| {
            let platform = &self.objects.platform;
            mm.inside_to_the_end(self, |inside, stop| _ = self.drain_everything(inside, Fences::OfCall, stop));
            mm.inside_to_the_end(self, |_, stop| {
                self.objects.punch(Effort::Full, stop);
                self.objects.pages.release_all_until(platform, stop);
            });
        });
        let (used, beyond) = (self.counted(), self.beyond_high());
        let asked = mm.reclaiming_if_made().filter(|made| made.reclaim.shrinkers.has_others() && !is_calling());
        if beyond > 0
            && let Some(reclaiming) = asked
        {
            self.ask_reclaimers(mm, &reclaiming, ReclaimJob::Budget(beyond), None);
        }
        // The next tick sees the memory that shrinkers free.
        let before = maintenance.high_use.swap(used, Ordering::Relaxed);
        let has_fallen = before > used.saturating_add(LEAST);
        maintenance.high_rest.store(if has_fallen { 0 } else { REST }, Ordering::Relaxed);
        beyond > 0 && has_fallen && asked.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Hooks;
    use crate::options::Options;
    use neap_testing::virtual_platform::Virtual;
    use std::boxed::Box;
    use std::vec::Vec;

    const MIB: u64 = 1 << 20;

    #[test]
    fn ticks_above_high_release_free_memory_without_refusals() {
        let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        let options = Options { stat: false, limit: 200 * MIB, ..Options::DEFAULT };
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(Virtual::new(4096, 1), &options) }.unwrap();
        let core = mm.core().unwrap();
        assert!(mm.keep_free(u64::MAX), "the program keeps its free memory");
        let mut blocks: Vec<*mut u8> = (0..600).map(|_| mm.allocate(256 << 10)).collect();
        // SAFETY: allocated above, and freed once.
        let free = |blocks: Vec<*mut u8>| blocks.into_iter().for_each(|block| unsafe { mm.free(block) });
        free(blocks.split_off(200));
        let mut now = 1 << 30;
        let mut ticked = |times: usize| {
            for _ in 0..times {
                now += 1 << 30;
                mm.tick(now);
            }
            core.counted() / MIB
        };
        assert!(ticked(8) >= 150, "no mark");
        mm.set("high", "50%").unwrap();
        let left = ticked(2);
        assert!((50..=60).contains(&left), "{left} MiB, 50 in use and 100 allowed");
        mm.set("high", "20m").unwrap();
        assert_eq!(core.settings.high(), Some(20 * MIB));
        let blocks: Vec<*mut u8> = blocks.into_iter().chain((0..400).map(|_| mm.allocate(256 << 10))).collect();
        assert!(!blocks.contains(&core::ptr::null_mut()), "150 MiB below the limit");
        ticked(4);
        let rest = core.maintenance.high_rest.load(Ordering::Relaxed);
        assert!(rest > 0, "nothing is to be had, so it rests");
        mm.set("limit", "none").unwrap();
        mm.set("high", "50%").unwrap();
        assert_eq!(core.settings.high(), None, "a part of no limit");
        free(blocks);
        // SAFETY: no thread uses the manager any more.
        unsafe { mm.close() };
    }
}
