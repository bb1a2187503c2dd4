//! Holes: pages that are handed out and have nothing behind them.
//!
//! Sits between the object layer, which knows which pages of its blocks nobody needs, and release and zone. A hole counts
//! as handed out, but not as used: a limit is about memory that is there. So who is about to fill one asks first, as for a
//! page, and may be refused. A block that is given back with holes goes to the zone at once, which knows page by page what
//! is behind it; lists do not. Holds the release turn over system calls, the zone's lock for a moment.

use crate::buddy::take_out;
use crate::give_back::{Report, TURN_LOOKS};
use crate::node_pages::NodePages;
use crate::pages::Pages;
use crate::policy::Policy;
use crate::release::Run;
use crate::zone::wait;
use core::sync::atomic::Ordering::Relaxed;
use neap_base::platform::Handover;
use neap_base::platform::memory::Range;
use neap_base::{Order, Pfn, Platform};

/// The most pages of a block that may have holes: a bit for each.
pub const MOST_PAGES: u32 = u64::BITS;

impl<P: Platform, T: Policy> Pages<P, T> {
    /// Gives back to the system what `gather` finds: it fills ranges of whole pages, all handed out, into the list that it is
    /// given and answers how many. Then `settle` is told the ranges, and how many from the first on are holes now; the others
    /// are as they were. So it goes on until `gather` finds none, the system refuses, or it is time to `stop`. `all`: now, and
    /// not less because the system refused before. `None`: another thread releases.
    ///
    /// # Safety
    /// What is in the ranges is not needed, and not touched until `settle` was called.
    pub unsafe fn punch(
        &self,
        platform: &P,
        all: bool,
        stop: &dyn Fn() -> bool,
        gather: impl FnMut(&mut [Range]) -> usize,
        settle: impl FnMut(&[Range], usize),
    ) -> Option<Report> {
        let (mut report, mut turn) = (Report::default(), self.release.turn()?);
        let (release, ranges) = turn.parts();
        let (arena, zone, hold) = (&self.arena, &self.zone, self.lists.limits.fixed.batch);
        // The kernel would fill holes again where it may make huge pages.
        zone.end_population(arena, platform);
        let run = Run { release, ranges, platform, arena, zone, hold, explicit: all, stop };
        report.left = run.held(gather, settle, &mut report);
        Some(report)
    }

    /// Counts up to `pages` holes as used again, before they are filled; answers how many, 0 if there are none or the budget
    /// has no room for so many.
    pub fn charge_holes(&self, pages: u32) -> u32 {
        let mut inner = self.zone.lock();
        let pages = pages.min(inner.holes.max(0) as u32);
        if !inner.fits(pages, &self.arena) {
            return 0;
        }
        inner.holes -= pages as i32;
        self.zone.count_growth(pages.into());
        self.refilled.fetch_add(pages.into(), Relaxed);
        pages
    }

    /// Takes back what [`Pages::charge_holes`] counted and was not filled.
    pub fn uncharge_holes(&self, pages: u32) {
        if pages > 0 {
            self.zone.lock().holes += pages as i32;
            self.refilled.fetch_sub(pages.into(), Relaxed);
        }
    }

    /// Waits, a bounded time, until nobody releases: what [`Pages::punch`] had gathered is settled then.
    pub fn await_release(&self, platform: &P) {
        (0..TURN_LOOKS).take_while(|_| self.release.turn().is_none()).for_each(|look| wait(platform, look));
    }

    fn free_block_with_holes(&self, pfn: Pfn, order: Order, holes: u64) {
        take_out(self.frames(), pfn, order);
        let mut inner = self.zone.lock();
        inner.holes -= holes.count_ones() as i32;
        inner.buddy.backed.set(pfn, order.pages(), true);
        let gone = (0..order.pages()).filter(|page| holes >> page & 1 == 1);
        gone.for_each(|page| inner.buddy.backed.set(pfn.plus(page), 1, false));
        inner.buddy.give(pfn, order, false);
    }
}

impl<P: Platform> NodePages<P> {
    /// Takes a block back of which some pages are holes, a bit for each. As [`NodePages::free_block`] otherwise.
    pub fn free_block_with_holes(&self, platform: &P, pfn: Pfn, order: Order, holes: u64) {
        if holes == 0 {
            return self.free_block(platform, pfn, order);
        }
        platform.note(Handover { pfn, pages: order.pages(), freed: true });
        self.node(self.node_of(pfn)).free_block_with_holes(pfn, order, holes);
    }
}
