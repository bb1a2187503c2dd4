//! Changes of the settings while threads use the pages.
//!
//! # Design
//!
//! The budget is split into the nodes' parts, the pages of tables, and a reserve. A change adds the
//! difference to the reserve, and tables that grow are paid from it. If the reserve is then less
//! than zero, the other parts exceed the budget. Each node then gives up as much of its unused part
//! as the reserve lacks, at the change and at its next allocations. If the reserve stays negative,
//! more pages are in use than the budget allows, and no page is handed out until enough are freed.
//! So the parts always sum up to the budget, and no node's part is less than its use.
//!
//! # Locking
//!
//! A change holds one zone's mutex or one list's lock at a time. Two changes must not run at the
//! same time.

use crate::arena::Arena;
use crate::node_pages::NodePages;
use crate::page_lists::Why;
use crate::pages::Pages;
use crate::policy::Limits;
use crate::purge::Report;
use crate::settings::Settings;
use crate::units::UNLIMITED;
use core::sync::atomic::Ordering::{Relaxed, Release};
use neap_base::Platform;

impl Arena {
    /// Pages of the budget that no node and no table has. First charges the pages of tables, as far
    /// as that was not done yet. Negative if other parts exceed the budget; 0 without one.
    pub(crate) fn reserve(&self) -> i64 {
        if self.budget().is_none() {
            return 0;
        }
        let pages = self.table_pages();
        // Relaxed: counts that publish no other data. Of two threads, the later one charges the
        // difference to what the other charged.
        if self.charged_tables.load(Relaxed) != pages {
            let before = self.charged_tables.swap(pages, Relaxed);
            self.reserve.fetch_sub(i64::from(pages) - i64::from(before), Relaxed);
        }
        self.reserve.load(Relaxed)
    }

    /// Pages that the reserve lacks.
    pub(crate) fn lacking(&self) -> u32 {
        u32::try_from((-self.reserve()).max(0)).unwrap_or(u32::MAX)
    }

    /// Begins with a reserve of `pages`, which has paid for no tables.
    fn begin_reserve(&self, pages: u32) {
        self.charged_tables.store(0, Relaxed);
        self.reserve.store(pages.into(), Relaxed);
    }
}

impl<P: Platform> NodePages<P> {
    /// Changes the settings. Memory in use stays in use; [`NodePages::beyond_budget`] returns how
    /// much of it the new budget does not allow. Only one thread at a time may call this.
    pub fn change(&self, settings: &Settings) {
        self.set_budget(settings.budget.map_or(UNLIMITED, |pages| pages.min(UNLIMITED - 1)));
        let limits = settings.limits(self.nodes() as u32, self.cpus(), self.page_shift());
        self.all().for_each(|pages| pages.set_limits(limits));
        self.give_first_the_reserve();
        _ = self.beyond_budget();
    }

    fn set_budget(&self, pages: u32) {
        let arena = &self.node(0).arena;
        // Relaxed: only this thread changes it.
        let before = arena.budget.load(Relaxed);
        if pages == before {
            return;
        }
        if before == UNLIMITED {
            // The reserve gets the whole budget first, so that it can give each node its part. No
            // thread makes it pay for tables before the thread sees the budget.
            arena.begin_reserve(pages);
        }
        // Release: pairs with `Arena::budget`. The parts change under the zones' locks, and a
        // thread that still sees the old budget decides nothing but whether to give up room.
        arena.budget.store(pages, Release);
        match (before, pages) {
            (UNLIMITED, _) => {
                for node in self.all() {
                    let mut inner = node.zone.lock();
                    inner.budget = inner.used();
                    arena.reserve.fetch_sub(inner.budget.into(), Relaxed);
                }
            }
            (_, UNLIMITED) => {
                for node in self.all() {
                    let mut inner = node.zone.lock();
                    inner.budget = UNLIMITED;
                    node.zone.note_beyond(&inner);
                }
                arena.begin_reserve(0);
            }
            _ => _ = arena.reserve.fetch_add(i64::from(pages) - i64::from(before), Relaxed),
        }
    }

    /// Gives the first node all of the budget that no node has, as at the start.
    fn give_first_the_reserve(&self) {
        let (mut inner, reserve) = (self.node(0).zone.lock(), &self.node(0).arena.reserve);
        let drawn = reserve.try_update(Relaxed, Relaxed, |left| (left > 0).then_some(0));
        // The sum is at most the whole budget, which is less than `UNLIMITED`.
        inner.budget += drawn.map_or(0, |left| left as u32);
    }

    /// Pages that a budget counts: used and free resident pages, untouched pages of allocations,
    /// and pages of tables.
    pub fn counted(&self) -> u64 {
        self.resident() + u64::from(self.node(0).arena.table_pages())
    }

    /// Pages of allocations and tables beyond the budget, after all nodes gave up their unused
    /// parts. Notes what is resident beyond them for [`NodePages::shed`]. Returns 0 without a
    /// budget.
    pub fn beyond_budget(&self) -> u64 {
        let arena = &self.node(0).arena;
        for pages in self.all() {
            let (mut inner, lacking) = (pages.zone.lock(), arena.lacking());
            if lacking > 0 {
                inner.give_up_room(&arena.reserve, lacking);
            }
            pages.zone.note_beyond(&inner);
        }
        arena.lacking().into()
    }

    /// Releases free pages while more memory is resident than the budget allows. Splits huge pages
    /// of which it releases a part, so that the part is uncharged from the container at once. Stops
    /// when `stop` returns true.
    pub fn shed(&self, platform: &P, stop: &dyn Fn() -> bool) {
        self.all().for_each(|pages| pages.shed_until(platform, true, stop));
    }
}

impl<P: Platform> Pages<P> {
    /// Sets the bounds of the lists, and brings the lists within them. The next tick does so for
    /// lists that another thread holds.
    fn set_limits(&self, limits: Limits) {
        self.lists.limits.set(limits);
        self.zone.lock().population.set_listed(limits.all_fixed());
        let mut report = Report::default();
        self.drain_lists(Why::Limits, &mut report);
        if report.skipped > 0 {
            self.lists.untold.store(true, Relaxed);
        }
        let room = self.zone.lock().room();
        self.look_at(room);
    }
}
