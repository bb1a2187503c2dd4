//! Holes: pages that are handed out and have no memory.
//!
//! # Design
//!
//! A hole counts as handed out, but not as used, since a budget limits resident memory. So a hole
//! is charged like a page before it is filled, and the charge may be refused. A block that is freed
//! with holes goes to the zone at once. The zone records for each page whether it is backed; CPUs'
//! lists do not.
//!
//! # Locking
//!
//! A release holds the turn over system calls. The zone's mutex is held only to change counts and
//! to free blocks.

use crate::buddy::{Memory, take_out};
use crate::node_pages::NodePages;
use crate::pages::Pages;
use crate::policy::Policy;
use crate::purge::{Effort, ReleasePass, Report};
use crate::trim::TURN_POLLS_MAX;
use crate::zone::{add, wait};
use neap_base::platform::Handover;
use neap_base::platform::memory::Range;
use neap_base::{Order, Pfn, Platform};

/// The most pages of a block with holes, since the holes are a word with a bit for each page.
pub const MOST_PAGES: u32 = u64::BITS;

impl<P: Platform, T: Policy> Pages<P, T> {
    /// Releases the pages that `gather` finds. `gather` writes ranges of whole pages to its
    /// argument and returns their number. All of these pages must be handed out. Then `settle` gets
    /// the ranges, and how many of them, from the first, are holes now. The other ranges are
    /// unchanged. This repeats until `gather` returns 0, the system refuses, or `stop` returns
    /// true.
    ///
    /// With [`Effort::Full`], asks the system even if it refused lately. Returns `None` if another
    /// thread releases.
    ///
    /// # Safety
    /// The contents of the ranges are not needed. No thread accesses the ranges until `settle` was
    /// called.
    pub unsafe fn punch(
        &self,
        platform: &P,
        effort: Effort,
        stop: &dyn Fn() -> bool,
        gather: impl FnMut(&mut [Range]) -> usize,
        settle: impl FnMut(&[Range], usize),
    ) -> Option<Report> {
        let (mut report, mut turn) = (Report::default(), self.release.turn()?);
        let (release, ranges) = turn.parts();
        let (arena, zone, hold) = (&self.arena, &self.zone, self.lists.limits.now().fixed.batch);
        let (least, splits) = (Order(0), true);
        let run = ReleasePass { release, ranges, platform, arena, zone, hold, least, effort, splits, stop };
        report.left = zone.without_population(arena, platform, || run.held(gather, settle, &mut report));
        Some(report)
    }

    /// Charges up to `pages` holes as used again, before they are filled. Returns their number; 0
    /// if there are none or the budget has no room for them. The caller [sheds](Pages::shed) other
    /// free pages before it fills the holes.
    pub fn charge_holes(&self, pages: u32) -> u32 {
        let mut inner = self.zone.lock();
        let pages = pages.min(inner.holes.max(0) as u32);
        if !inner.fits(pages, &self.arena) {
            return 0;
        }
        inner.holes -= pages as i32;
        self.zone.note_beyond(&inner);
        self.zone.count_growth(&inner, pages.into());
        self.zone.change_totals(&inner, |totals| add(&totals.refilled, pages.into()));
        pages
    }

    /// Uncharges pages that [`Pages::charge_holes`] charged and that were not filled.
    pub fn uncharge_holes(&self, pages: u32) {
        if pages > 0 {
            let mut inner = self.zone.lock();
            inner.holes += pages as i32;
            self.zone.note_beyond(&inner);
            self.zone.change_totals(&inner, |totals| add(&totals.refilled, u64::from(pages).wrapping_neg()));
        }
    }

    /// Waits until no thread has the release turn, for some tenths of a second at most. If the wait
    /// succeeds, [`Pages::punch`] has called `settle` for all ranges that it had gathered before.
    pub fn await_release(&self, platform: &P) {
        (0..TURN_POLLS_MAX).take_while(|_| self.release.turn().is_none()).for_each(|look| wait(platform, look));
    }

    fn free_block_with_holes(&self, pfn: Pfn, order: Order, holes: u64) {
        take_out(self.frames(), pfn, order);
        let mut inner = self.zone.lock();
        inner.holes -= holes.count_ones() as i32;
        inner.buddy.backed.set(pfn, order.pages(), true);
        let gone = (0..order.pages()).filter(|page| holes >> page & 1 == 1);
        gone.for_each(|page| inner.buddy.backed.set(pfn.plus(page), 1, false));
        inner.buddy.give(pfn, order, Memory::AsRecorded);
    }
}

impl<P: Platform> NodePages<P> {
    /// Frees a block with holes. Bit `n` of `holes` is set if page `n` of the block is a hole.
    /// Otherwise like [`NodePages::free_block`].
    pub fn free_block_with_holes(&self, platform: &P, pfn: Pfn, order: Order, holes: u64) {
        if holes == 0 {
            return self.free_block(platform, pfn, order);
        }
        platform.note(Handover { pfn, pages: order.pages(), freed: true });
        self.node(self.node_of(pfn)).free_block_with_holes(pfn, order, holes);
    }
}
