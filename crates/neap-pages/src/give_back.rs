//! Giving back: from CPUs' lists to the zone, and from the zone to the system.
//!
//! Sits between who decides that it is time (a tick, a drain, an allocation about to fail, a watermark) and lists, zone and
//! release. A tick drains lists that rested, then releases what was not needed since the tick before; one thread at a time
//! releases, and has the turn for it. Lists are held to detach what is in them, and the zone's lock for a batch at a time,
//! one after the other; no lock is held over a system call.

use crate::arena::CHUNK;
use crate::page_lists::Why;
use crate::pages::Pages;
use crate::policy::Policy;
use crate::release::{Run, Turn};
use crate::zone::wait;
use core::sync::atomic::Ordering::Relaxed;
use neap_base::{Order, Platform};

/// What a tick did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Pages that went back to the system.
    pub released: u32,
    /// System calls made for that.
    pub calls: u32,
    /// Of these, those that failed.
    pub failed: u32,
    /// Pages that came back from CPU lists.
    pub drained: u32,
    /// CPU lists that were busy.
    pub skipped: u32,
    /// Whether a later tick may find something to do without anybody allocating or freeing in between.
    pub left: bool,
}

impl Report {
    /// What two of them did, or two nodes.
    pub fn and(self, other: Report) -> Report {
        Report {
            released: self.released + other.released,
            calls: self.calls + other.calls,
            failed: self.failed + other.failed,
            drained: self.drained + other.drained,
            skipped: self.skipped + other.skipped,
            left: self.left || other.left,
        }
    }
}

/// What came of draining one CPU's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drain {
    /// This many pages went back to the zone.
    Drained(u32),
    /// Somebody held the list.
    Skipped,
}

/// Looks at a turn that another thread has: some tenths of a second.
pub(crate) const TURN_LOOKS: u32 = 3000;

impl<P: Platform, T: Policy> Pages<P, T> {
    /// Notes what the zone has left, and takes from all lists what they may no longer keep where that has come to a
    /// watermark.
    pub(crate) fn look_at(&self, room: u32) {
        // What no node has may be had by this one.
        if self.lists.note_free(room.saturating_add(self.arena.reserve.load(Relaxed))) {
            self.tell_pressure();
        }
    }

    /// Says whether background reclaim runs. While it does, lists keep and move no more than they would without tuning.
    pub fn set_reclaiming(&self, reclaiming: bool) {
        if self.lists.note_reclaim(reclaiming) {
            self.tell_pressure();
        }
    }

    /// Whether it was said to run.
    pub fn is_reclaiming(&self) -> bool {
        self.lists.is_reclaiming()
    }

    /// Takes from all lists what they may no longer keep; those that somebody holds are told by the next tick.
    fn tell_pressure(&self) {
        let mut report = Report::default();
        self.lists.untold.store(false, Relaxed);
        self.drain_lists(Why::Pressure, &mut report);
        if report.skipped > 0 {
            self.lists.untold.store(true, Relaxed);
        }
    }

    /// Gives back what was not needed since the last tick: lists that have not changed go to the zone, and of the zone as
    /// many backed pages go to the system as were never needed. Only one thread at a time does this; for the others there
    /// is nothing to do. An interval is whatever lies between two ticks.
    pub fn tick(&self, platform: &P) -> Report {
        self.tick_until(platform, &|| false)
    }

    /// The same, but looks between system calls whether to `stop`: what is left then is for the next tick.
    pub fn tick_until(&self, platform: &P, stop: &dyn Fn() -> bool) -> Report {
        self.tick_within(platform, u32::MAX, stop)
    }

    /// Ticks, and releases `most` pages at most: what is left then is for the next tick.
    pub(crate) fn tick_within(&self, platform: &P, most: u32, stop: &dyn Fn() -> bool) -> Report {
        let mut report = Report::default();
        let Some(turn) = self.release.turn() else { return Report { left: true, ..report } };
        let (unneeded, room) = {
            let inner = self.zone.lock();
            (inner.buddy.backed_low, inner.room())
        };
        self.look_at(room);
        if self.lists.untold.load(Relaxed) {
            self.tell_pressure();
        }
        let listed = self.drain_lists(Why::Time(self.lists.quarters(platform.now())), &mut report);
        self.give_back(platform, turn, unneeded.min(most), false, stop, &mut report);
        report.left |= listed;
        if !report.left {
            // Nobody may tick again for long, so what rested lists have learned is forgotten now.
            self.drain_lists(Why::Time(u32::MAX), &mut report);
        }
        report
    }

    /// Gives everything back that is free, lists included. Waits, a bounded time, for a tick in progress.
    pub fn release_all(&self, platform: &P) -> Report {
        self.release_all_until(platform, &|| false)
    }

    /// The same, but looks between system calls whether to `stop`.
    pub fn release_all_until(&self, platform: &P, stop: &dyn Fn() -> bool) -> Report {
        let mut report = Report::default();
        let listed = self.drain_lists(Why::Wanted, &mut report);
        for look in 0..TURN_LOOKS {
            if stop() {
                break;
            }
            if let Some(turn) = self.release.turn() {
                self.give_back(platform, turn, u32::MAX, true, stop, &mut report);
                report.left |= listed;
                return report;
            }
            wait(platform, look);
        }
        Report { left: true, ..report }
    }

    /// Gives up to so many free pages back to the system, though they may be needed again: for whoever has a reason beyond time. Pages in
    /// lists stay, and so does everything while another thread releases.
    pub fn release(&self, platform: &P, pages: u32, stop: &dyn Fn() -> bool) -> Report {
        let mut report = Report::default();
        if let Some(turn) = self.release.turn() {
            self.run(platform, turn, pages, false, stop, &mut report);
            let mut inner = self.zone.lock();
            inner.buddy.backed_low = inner.buddy.backed_low.min(inner.buddy.backed_free);
        }
        report
    }

    /// Lets the system take up to `most` pages of whole free chunks when it is short of memory, of
    /// those that nobody needed since the last tick. `keep` free pages stay as they are. Returns
    /// how many pages were offered, which count as free and backed all the same.
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
            // SAFETY: the chunk is detached, so nobody needs it.
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

    /// Free pages that the system may take when it is short of memory.
    pub fn lazily_free(&self) -> u32 {
        self.zone.lock().buddy.lazy
    }

    /// Releases up to `pages` backed pages, and begins a new interval.
    fn give_back(
        &self,
        platform: &P,
        turn: Turn<'_>,
        pages: u32,
        explicit: bool,
        stop: &dyn Fn() -> bool,
        report: &mut Report,
    ) {
        let willing = self.run(platform, turn, pages, explicit, stop, report);
        let mut inner = self.zone.lock();
        inner.buddy.backed_low = inner.buddy.backed_free;
        report.left = willing && inner.buddy.backed_free > 0;
    }

    /// Releases up to `pages` backed pages; answers whether the system would take more.
    fn run(
        &self,
        platform: &P,
        mut turn: Turn<'_>,
        pages: u32,
        explicit: bool,
        stop: &dyn Fn() -> bool,
        report: &mut Report,
    ) -> bool {
        let (release, ranges) = turn.parts();
        let (arena, zone, hold) = (&self.arena, &self.zone, self.lists.limits.fixed.batch);
        zone.end_population(arena, platform);
        // What is freed meanwhile is for the next time: others may free, and take again, as fast as this goes.
        let pages = pages.min(zone.lock().buddy.backed_free);
        Run { release, ranges, platform, arena, zone, hold, explicit, stop }.run(pages, report)
    }

    /// Takes from every CPU's list what it has too much; answers whether something is left in one.
    pub(crate) fn drain_lists(&self, why: Why, report: &mut Report) -> bool {
        let mut listed = false;
        for cpu in self.lists.used().iter() {
            match self.drain(cpu, why) {
                Some((drained, left)) => {
                    report.drained += drained;
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

    /// Pages drained, and pages still there; `None` where somebody held the list.
    fn drain(&self, cpu: usize, why: Why) -> Option<(u32, u32)> {
        let detached = self.lists.detach(self.frames(), &self.zone, cpu, why)?;
        for (order, chain) in detached.chains.iter().enumerate() {
            let order = Order(order as u8);
            self.zone.give_chain(*chain, order, self.lists.limits.fixed.blocks(order.0));
        }
        self.free_cached(&detached.runs);
        self.zone.arrive(detached.pages);
        Some((detached.pages, detached.left))
    }

    /// Takes everything out of a CPU's list, from any CPU.
    pub fn drain_cpu(&self, _platform: &P, cpu: usize) -> Drain {
        self.drain(cpu, Why::Wanted).map_or(Drain::Skipped, |(drained, _)| Drain::Drained(drained))
    }

    /// Drains every CPU's list; answers how many pages came back, and how many lists somebody held.
    pub fn drain_all(&self, _platform: &P) -> (u32, u32) {
        let mut report = Report::default();
        self.drain_lists(Why::Wanted, &mut report);
        (report.drained, report.skipped)
    }
}
