//! Gives pages back: from CPUs' lists to the zone, and from the zone to the system.
//!
//! # Design
//!
//! A tick drains lists that did not change, then releases pages that were not needed since the
//! previous tick. It leaves the parts of whole huge pages, except for as many pages as were free
//! during the last [`INTERVALS`](crate::zone::INTERVALS) intervals. Lists are also drained on
//! request, at watermarks, and by allocations that are about to fail. Only the thread that has the
//! turn releases.
//!
//! # Locking
//!
//! A drain detaches pages under the list's lock. Afterwards it takes the zone's mutex for one batch
//! at a time. During a system call, a thread holds no lock but the turn.

use crate::page_lists::Why;
use crate::pages::Pages;
use crate::policy::Policy;
use crate::purge::{Effort, ReleasePass, ReleaseTurn, Report};
use crate::units::{CHUNK, HUGE};
use crate::zone::wait;
use core::cell::Cell;
use core::sync::atomic::Ordering::Relaxed;
use neap_base::{Order, Platform};

/// The result of draining one CPU's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drain {
    /// This many pages went back to the zone.
    Drained(u32),
    /// Another thread held the list.
    Skipped,
}

/// Result of draining several lists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainSum {
    /// Pages moved to the zone.
    pub pages: u32,
    /// Lists that another thread held.
    pub held: u32,
}

/// Result of draining a list.
struct DrainedList {
    /// Pages moved to the zone.
    pages: u32,
    /// Pages left in the list.
    left: u32,
}

/// The pages that a run releases.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    /// The most backed pages.
    pages: u32,
    /// The least order of released blocks that are smaller than a chunk.
    least: Order,
    /// See [`ReleasePass::effort`].
    effort: Effort,
    /// See [`ReleasePass::splits`].
    splits: bool,
}

impl Wanted {
    /// About `pages` pages, to make room for others, up to those of a huge page if that is more.
    fn room(pages: u32, effort: Effort, splits: bool) -> Wanted {
        let pages = if pages == 0 { 0 } else { pages.max(HUGE.pages()) };
        Wanted { pages, least: Order(0), effort, splits }
    }
}

/// The backed pages that [`Pages::give_back`] releases.
#[derive(Clone, Copy, Debug)]
struct GiveBack {
    unneeded: u32,
    effort: Effort,
    /// Pages that were free for so long that parts of whole huge pages go for them.
    long_unneeded: u32,
}

/// Attempts to take a turn that another thread has: some tenths of a second.
pub(crate) const TURN_POLLS_MAX: u32 = 3000;

impl<P: Platform, T: Policy> Pages<P, T> {
    /// Records the zone's room. If the room has fallen to a watermark, takes the surplus pages from
    /// all lists.
    pub(crate) fn look_at(&self, room: u32) {
        // This node may also draw the reserve: the pages of the budget that no node has. If the
        // reserve is negative, the node must give up as many pages.
        let free = i64::from(room).saturating_add(self.arena.reserve());
        if self.lists.note_free(free.clamp(0, u32::MAX.into()) as u32) {
            self.tell_pressure();
        }
    }

    /// Sets whether background reclaim runs. While it runs, lists keep and move no more pages than
    /// without tuning.
    pub fn set_reclaiming(&self, reclaiming: bool) {
        if self.lists.note_reclaim(reclaiming) {
            self.tell_pressure();
        }
    }

    /// Whether background reclaim runs, as set by [`Pages::set_reclaiming`].
    pub fn is_reclaiming(&self) -> bool {
        self.lists.is_reclaiming()
    }

    /// Takes the surplus pages from all lists. The next tick repeats this if another thread holds a
    /// list.
    fn tell_pressure(&self) {
        let mut report = Report::default();
        self.lists.untold.store(false, Relaxed);
        self.drain_lists(Why::Pressure, &mut report);
        if report.skipped > 0 {
            self.lists.untold.store(true, Relaxed);
        }
    }

    /// Gives back pages that were not needed since the last tick. Lists that have not changed give
    /// their pages to the zone. The zone releases as many backed pages as were free during the
    /// whole *interval* between the ticks. Only one thread at a time ticks; other threads return at
    /// once.
    pub fn tick(&self, platform: &P) -> Report {
        self.tick_until(platform, &|| false)
    }

    /// Ticks until `stop` returns true. Calls `stop` between system calls. The next tick does the
    /// rest.
    pub fn tick_until(&self, platform: &P, stop: &dyn Fn() -> bool) -> Report {
        self.tick_within(platform, u32::MAX, stop)
    }

    /// Ticks until `stop` returns true, and releases at most `most` pages. The next tick does the
    /// rest.
    pub(crate) fn tick_within(&self, platform: &P, most: u32, stop: &dyn Fn() -> bool) -> Report {
        let mut report = Report::default();
        let Some(turn) = self.release.turn() else { return Report { left: true, ..report } };
        let (unneeded, long_unneeded, room) = {
            let mut inner = self.zone.lock();
            (inner.buddy.backed_low, inner.end_interval(), inner.room())
        };
        self.look_at(room);
        if self.lists.untold.load(Relaxed) {
            self.tell_pressure();
        }
        let listed = self.drain_lists(Why::Time(self.lists.quarters(platform.now())), &mut report);
        let unneeded = unneeded.min(most);
        let wanted = GiveBack { unneeded, effort: Effort::Whole, long_unneeded: long_unneeded.min(most) };
        self.give_back(platform, turn, wanted, stop, &mut report);
        report.left |= listed;
        if !report.left {
            // There may be no tick for long, so the state of rested lists is reset now.
            self.drain_lists(Why::Time(u32::MAX), &mut report);
        }
        report
    }

    /// Releases all free pages, lists included. Waits for a tick in progress, for some tenths of a
    /// second at most.
    pub fn release_all(&self, platform: &P) -> Report {
        self.release_all_until(platform, &|| false)
    }

    /// Releases all free pages, lists included, until `stop` returns true. Calls `stop` between
    /// system calls.
    pub fn release_all_until(&self, platform: &P, stop: &dyn Fn() -> bool) -> Report {
        let mut report = Report::default();
        let listed = self.drain_lists(Why::Wanted, &mut report);
        for look in 0..TURN_POLLS_MAX {
            if stop() {
                break;
            }
            if let Some(turn) = self.release.turn() {
                let wanted = GiveBack { unneeded: u32::MAX, effort: Effort::Full, long_unneeded: 0 };
                self.give_back(platform, turn, wanted, stop, &mut report);
                report.left |= listed;
                return report;
            }
            wait(platform, look);
        }
        Report { left: true, ..report }
    }

    /// Releases about `pages` free pages to make room for other pages that are taken from the
    /// system at once, up to those of a huge page if that is more: a release leaves blocks that
    /// have more pages than it wants. Does not split huge pages. Pages in lists stay. Does nothing
    /// while another thread releases.
    pub fn release(&self, platform: &P, pages: u32, effort: Effort, stop: &dyn Fn() -> bool) -> Report {
        self.release_wanted(platform, Wanted::room(pages, effort, false), stop).unwrap_or_default()
    }

    /// Releases about as many free pages as are resident beyond the budget. Waits for other threads
    /// that release or populate, for some tenths of a second at most. A thread that took memory
    /// calls this before the memory is touched, so the resident pages do not pass the budget.
    pub fn shed(&self, platform: &P) {
        self.shed_until(platform, false, &|| false);
    }

    /// As [`Pages::shed`]. Stops when `stop` returns true. See [`ReleasePass::splits`].
    pub(crate) fn shed_until(&self, platform: &P, splits: bool, stop: &dyn Fn() -> bool) {
        let polls = Cell::new(TURN_POLLS_MAX);
        self.release_while(platform, splits, &polls, |_| self.zone.beyond(), stop);
    }

    /// Releases about as many pages as are free now, up to those that other threads take meanwhile.
    /// Waits for other threads that release. `polls` is the number of waits that are left.
    pub(crate) fn release_free(&self, platform: &P, polls: &Cell<u32>) {
        let free = || {
            let inner = self.zone.lock();
            inner.buddy.backed_free + inner.buddy.backed_detached
        };
        let most = free();
        self.release_while(platform, false, polls, |released| most.saturating_sub(released).min(free()), &|| false);
    }

    /// Releases about as many free pages as `excess` returns, again and again until it returns 0 or
    /// nothing goes. `excess` gets the number of pages that are released so far. Where nothing is
    /// free, waits for pages that other threads release or populate.
    fn release_while(
        &self,
        platform: &P,
        splits: bool,
        polls: &Cell<u32>,
        excess: impl Fn(u32) -> u32,
        stop: &dyn Fn() -> bool,
    ) {
        let mut released = 0;
        while let pages @ 1.. = excess(released)
            && polls.get() > 0
            && !stop()
        {
            let (free, moving) = {
                let inner = self.zone.lock();
                (inner.buddy.backed_free, inner.moving())
            };
            // One call may release fewer pages: it leaves blocks that have more backed pages than
            // it still wants. Each call ends the population of other threads, so there is none
            // where nothing is free.
            let wanted = Wanted::room(pages, Effort::Sparing, splits);
            let report = if free > 0 { self.release_wanted(platform, wanted, stop) } else { None };
            match report {
                Some(Report { released: 0, .. }) => break,
                Some(report) => released += report.released,
                None if free == 0 && moving == 0 => break,
                None => {
                    wait(platform, TURN_POLLS_MAX - polls.get());
                    polls.set(polls.get() - 1);
                }
            }
        }
    }

    /// Releases up to `pages` pages of free blocks that are at least of order `least`, although
    /// they may be needed again. Pages in lists stay. Does nothing while another thread releases.
    pub fn release_blocks(
        &self,
        platform: &P,
        pages: u32,
        least: Order,
        effort: Effort,
        stop: &dyn Fn() -> bool,
    ) -> Report {
        self.release_wanted(platform, Wanted { pages, least, effort, splits: true }, stop).unwrap_or_default()
    }

    /// `None` while another thread releases.
    fn release_wanted(&self, platform: &P, wanted: Wanted, stop: &dyn Fn() -> bool) -> Option<Report> {
        let (mut report, mut turn) = (Report::default(), self.release.turn()?);
        self.run(platform, &mut turn, wanted, stop, &mut report);
        let mut inner = self.zone.lock();
        inner.buddy.backed_low = inner.buddy.backed_low.min(inner.buddy.backed_free);
        Some(report)
    }

    /// Records that `pages` pages were released although they may be needed again. Allocating
    /// threads then populate free blocks with few backed pages by one call each, up to the recorded
    /// number. Each tick halves the number.
    pub fn expect_again(&self, pages: u32) {
        let again = &mut self.zone.lock().population.again;
        *again = again.saturating_add(pages);
    }

    /// Lets the system take about `most` pages of whole free chunks when it is short of memory.
    /// Offers only pages that were not needed since the last tick, and leaves `keep` free pages as
    /// they are. Returns the number of offered pages. They still count as free and backed.
    pub fn offer(&self, platform: &P, keep: u32, most: u32) -> u32 {
        let Some(_turn) = self.release.turn() else { return 0 };
        let mut offered = 0;
        while offered < most {
            let (pfn, backed) = {
                let mut inner = self.zone.lock();
                let buddy = &mut inner.buddy;
                if buddy.backed_low.min(buddy.backed_free.saturating_sub(keep)) <= buddy.lazy {
                    break;
                }
                let Some(pfn) = buddy.detach_eager_chunk() else { break };
                inner.releasing += CHUNK;
                (pfn, inner.buddy.count_backed(pfn, CHUNK))
            };
            let bytes = (CHUNK as usize) << self.page_shift();
            // SAFETY: the chunk is detached, so no thread needs its contents.
            let done = unsafe { platform.release_lazily(self.address(pfn), bytes) }.is_ok();
            let mut inner = self.zone.lock();
            inner.buddy.attach_lazy_chunk(pfn, done);
            inner.releasing -= CHUNK;
            if !done {
                break;
            }
            offered += backed;
        }
        offered
    }

    /// Number of lazily free pages.
    pub fn lazily_free(&self) -> u32 {
        self.zone.lock().buddy.lazy
    }

    /// Releases up to `unneeded` backed pages. Then releases parts of whole huge pages as well,
    /// until `long_unneeded` pages are released in all. Begins a new interval.
    fn give_back(
        &self,
        platform: &P,
        mut turn: ReleaseTurn<'_>,
        GiveBack { unneeded, effort, long_unneeded }: GiveBack,
        stop: &dyn Fn() -> bool,
        report: &mut Report,
    ) {
        let wanted = Wanted { pages: unneeded, least: Order(0), effort, splits: true };
        let mut willing = self.run(platform, &mut turn, wanted, stop, report);
        let pages = long_unneeded.saturating_sub(report.released);
        if willing && pages > 0 {
            let mut parts = Report::default();
            let wanted = Wanted { pages, effort: Effort::Sparing, ..wanted };
            willing = self.run(platform, &mut turn, wanted, stop, &mut parts);
            *report = report.and(parts);
        }
        let mut inner = self.zone.lock();
        inner.buddy.backed_low = inner.buddy.backed_free;
        inner.population.pieces = 0;
        inner.population.again /= 2;
        report.left = willing && inner.buddy.backed_free > 0;
    }

    /// Releases up to `pages` backed pages. Returns whether the system would take more.
    fn run(
        &self,
        platform: &P,
        turn: &mut ReleaseTurn<'_>,
        Wanted { pages, least, effort, splits }: Wanted,
        stop: &dyn Fn() -> bool,
        report: &mut Report,
    ) -> bool {
        let (release, ranges) = turn.parts();
        let (arena, zone, hold) = (&self.arena, &self.zone, self.lists.limits.now().fixed.batch);
        zone.without_population(arena, platform, || {
            // Pages that are freed meanwhile are left for the next run, since other threads may
            // free and allocate as fast as this one releases.
            let pages = pages.min(zone.lock().buddy.backed_free);
            ReleasePass { release, ranges, platform, arena, zone, hold, least, effort, splits, stop }.run(pages, report)
        })
    }

    /// Takes the surplus pages from every CPU's list. Returns whether pages are left in a list.
    pub(crate) fn drain_lists(&self, why: Why, report: &mut Report) -> bool {
        let mut listed = false;
        for cpu in self.lists.used().iter() {
            match self.drain(cpu, why) {
                Some(DrainedList { pages, left }) => {
                    report.drained += pages;
                    listed |= left > 0;
                }
                None => {
                    report.skipped += 1;
                    listed = true;
                }
            }
        }
        listed
    }

    /// Drains a CPU's list; `None` if another thread held it.
    fn drain(&self, cpu: usize, why: Why) -> Option<DrainedList> {
        let detached = self.lists.detach(self.frames(), &self.zone, cpu, why)?;
        for (order, chain) in detached.chains.iter().enumerate() {
            let order = Order(order as u8);
            self.zone.give_chain(*chain, order, self.lists.limits.now().fixed.blocks(order.0));
        }
        self.free_cached(&detached.runs);
        self.zone.arrive(detached.pages);
        Some(DrainedList { pages: detached.pages, left: detached.left })
    }

    /// Drains a CPU's list, from any CPU.
    pub fn drain_cpu(&self, _platform: &P, cpu: usize) -> Drain {
        self.drain(cpu, Why::Wanted).map_or(Drain::Skipped, |drained| Drain::Drained(drained.pages))
    }

    /// Drains every CPU's list.
    pub fn drain_all(&self, _platform: &P) -> DrainSum {
        let mut report = Report::default();
        self.drain_lists(Why::Wanted, &mut report);
        DrainSum { pages: report.drained, held: report.skipped }
    }
}
