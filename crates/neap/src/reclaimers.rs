//! Reclaimers: threads that run the callbacks of a program's shrinkers for those who may not run them, and who watches over them.
//!
//! Sits between a charge at its limit, which may be made within `malloc` by a thread that holds the very lock a callback takes, and passes of
//! reclaim. So such a thread calls nobody: it posts a [job](crate::jobs), and waits to a deadline. There is a thread for each node at most, or four; the first comes with the
//! first shrinker, others when all are busy. Whoever waits, and every tick, looks whether a callback has run for longer than it may: then its shrinker is a
//! culprit, its thread is written off and another one made, which goes on with the job. A thread that was written off ends when its callback is
//! back. Takes no lock but those of the jobs and of blaming, both within the gate; no callback runs inside the gate.

use crate::jobs::{Aim, Jobs};
use crate::mm::{Core, Mm, Task};
use crate::reclaiming::{Reclaiming, Runner};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use neap_base::Platform;
use neap_groups::{Bound, GroupId};
use neap_os::{clock, thread};
use neap_reclaim::reclaim::{Ask, BUDGET, Lanes, Overdue, Passes, goal};
use neap_reclaim::{ShrinkerId, Shrinkers, is_calling};

/// How long somebody waits for reclaimers, in nanoseconds: one callback may take all of its time, and another thread go on with the job.
const PATIENCE: u64 = 2 * BUDGET;
/// From one look at callbacks to the next.
const LOOK: u64 = BUDGET / 4;
/// Threads that may be in callbacks that do not come back, before no more are made.
const MOST_LOST: u32 = 32;
/// Reclaimers that there may be on a machine with fewer nodes: so that one slow callback does not keep other groups' from being called.
const LEAST: usize = 4;
/// How long a pass of a reclaimer may take.
const PASS: u64 = 10 * BUDGET;

/// What a manager has once somebody has registered a shrinker.
#[derive(Debug)]
pub(crate) struct Reclaim {
    pub(crate) shrinkers: Shrinkers,
    pub(crate) passes: Passes,
    pub(crate) lanes: Lanes,
    pub(crate) jobs: Jobs,
    /// Threads that work, and those that were written off and have not ended.
    threads: AtomicU32,
    lost: AtomicU32,
    /// The number of the last one.
    last: AtomicU32,
    /// None can be had, or none is wanted.
    never: AtomicBool,
    /// How often somebody waited for reclaimers, and in vain.
    pub(crate) waits: AtomicU64,
    pub(crate) late: AtomicU64,
}

impl Reclaim {
    pub(crate) fn new(shrinkers: Shrinkers) -> Reclaim {
        Reclaim {
            shrinkers,
            passes: Passes::default(),
            lanes: Lanes::default(),
            jobs: Jobs::new(),
            threads: AtomicU32::new(0),
            lost: AtomicU32::new(0),
            last: AtomicU32::new(0),
            never: AtomicBool::new(false),
            waits: AtomicU64::new(0),
            late: AtomicU64::new(0),
        }
    }

    /// Threads that work, those that do not come back, waits for them, and waits in vain.
    pub(crate) fn threads(&self) -> (u32, u32, u64, u64) {
        let (threads, lost) = (self.threads.load(Ordering::Relaxed), self.lost.load(Ordering::Relaxed));
        (threads, lost, self.waits.load(Ordering::Relaxed), self.late.load(Ordering::Relaxed))
    }

    /// In a forked child: there are no threads, and nobody waits. Inside the gate.
    pub(crate) fn forget_others(&self) {
        self.lanes.forget_others();
        self.jobs.forget_all();
        self.threads.store(0, Ordering::Relaxed);
        self.lost.store(0, Ordering::Relaxed);
    }
}

impl<P: Platform> Core<P> {
    /// What is asked of a charge's host at a limit: [`Reclaimer::reclaim`](neap_groups::Reclaimer::reclaim). Outside the gate.
    #[cold]
    pub(crate) fn reclaim_for_charge(&self, mm: &Mm<P>, group: GroupId, bytes: u64, manner: Manner) -> u64 {
        let Some(reclaiming) = mm.reclaiming_if_made() else { return 0 };
        // A callback that charges asks nobody: the pass that it is part of is at it.
        if is_calling() || !reclaiming.is_anybody_there() {
            return 0;
        }
        let wanted = reclaiming.used(group).map_or(bytes, |used| goal(bytes, used));
        if manner == Manner::Inline {
            let deadline = reclaiming.now().saturating_add(PATIENCE);
            let ask = Ask { top: group, bytes: wanted, deadline, background: false };
            let (got, _) = reclaiming.run(&ask, Runner { reclaimer: 0, inline_only: true });
            if got.bytes >= bytes {
                return got.bytes;
            }
        }
        self.ask_reclaimers(mm, &reclaiming, Aim::Bytes(group, wanted), (manner != Manner::Post).then_some(PATIENCE))
    }

    /// The same where the budget, or the system, has no more: the program's caches are to give some. Answers whether they did;
    /// `None` if there are none.
    #[cold]
    pub(crate) fn reclaim_for_budget(&self, mm: &Mm<P>, bytes: u64) -> Option<bool> {
        let reclaiming = mm.reclaiming_if_made()?;
        if is_calling() || !reclaiming.is_anybody_there() {
            return None;
        }
        let aim = Aim::Bytes(GroupId::ROOT, goal(bytes, u64::MAX));
        Some(self.ask_reclaimers(mm, &reclaiming, aim, Some(PATIENCE)) > 0)
    }

    /// A group, or one above it, is beyond its `high`, and who charges is held up for so long: until then it is asked for what is too much. Answers
    /// whether that came to an end.
    #[cold]
    pub(crate) fn relieve(&self, mm: &Mm<P>, group: GroupId, delay: u64) -> bool {
        let Some(reclaiming) = mm.reclaiming_if_made() else { return false };
        if is_calling() || !reclaiming.is_anybody_there() {
            return false;
        }
        self.ask_reclaimers(mm, &reclaiming, Aim::High(group), Some(delay));
        !reclaiming.is_above_high(group)
    }

    /// What somebody outside wants of one shrinker: how many objects it has of a group on a node, or that it looks at so many; answers how many
    /// there are, or were freed. `None`: it did not answer.
    pub(crate) fn ask_shrinker(
        &self,
        mm: &Mm<P>,
        id: ShrinkerId,
        place: (GroupId, u32),
        scan: Option<u64>,
    ) -> Option<u64> {
        let (reclaiming, (group, node)) = (mm.reclaiming_if_made()?, place);
        let aim = match scan {
            None => Aim::Look(id, group, node),
            Some(objects) => Aim::Scan(id, group, node, objects),
        };
        self.ask_reclaimers(mm, &reclaiming, aim, Some(PATIENCE)).checked_sub(1)
    }

    /// Posts a job, and waits for it for so long, if at all.
    fn ask_reclaimers(&self, mm: &Mm<P>, reclaiming: &Reclaiming<'_, P>, aim: Aim, patience: Option<u64>) -> u64 {
        let reclaim = reclaiming.reclaim;
        if !self.has_reclaimer(mm, reclaim) {
            return 0;
        }
        let Some(ticket) = reclaiming.inside(|| reclaim.jobs.post(aim, patience.is_some())) else { return 0 };
        self.hire(mm, reclaiming);
        let Some(patience) = patience else { return 0 };
        reclaim.waits.fetch_add(1, Ordering::Relaxed);
        let end = clock::precise().saturating_add(patience);
        loop {
            let dones = reclaim.jobs.dones();
            let left = end.saturating_sub(clock::precise());
            if let Some(bytes) = reclaiming.inside(|| reclaim.jobs.look(ticket, left == 0)) {
                reclaim.late.fetch_add(u64::from(left == 0), Ordering::Relaxed);
                return bytes;
            }
            reclaim.jobs.wait(dones, left.min(LOOK));
            self.watch(mm, reclaiming);
        }
    }

    /// Writes off threads whose callbacks do not come back, and makes others in their place.
    pub(crate) fn watch(&self, mm: &Mm<P>, reclaiming: &Reclaiming<'_, P>) {
        let reclaim = reclaiming.reclaim;
        let (now, mut is_needed) = (clock::precise(), false);
        let name = |shrinker| reclaim.shrinkers.name_of(ShrinkerId::from_bits(shrinker));
        let replace = |overdue: Overdue| {
            if overdue.reclaimer > 0 {
                reclaim.threads.fetch_sub(1, Ordering::Relaxed);
                reclaim.lost.fetch_add(1, Ordering::Relaxed);
                is_needed |= reclaim.jobs.give_back(overdue.reclaimer);
            }
        };
        reclaiming.inside(|| reclaim.lanes.write_off(now, name, replace));
        if is_needed {
            self.hire(mm, reclaiming);
        }
    }

    /// Whether there is a reclaimer; the first one is made.
    pub(crate) fn has_reclaimer(&self, mm: &Mm<P>, reclaim: &Reclaim) -> bool {
        reclaim.threads.load(Ordering::Relaxed) > 0 || self.make_reclaimer(mm, reclaim, 0)
    }

    /// Makes another reclaimer if all are busy.
    fn hire(&self, mm: &Mm<P>, reclaiming: &Reclaiming<'_, P>) {
        let reclaim = reclaiming.reclaim;
        let (posted, taken) = reclaiming.inside(|| reclaim.jobs.count());
        let threads = reclaim.threads.load(Ordering::Relaxed);
        if posted > 0 && taken >= threads && (threads as usize) < self.objects.platform.nodes().max(LEAST) {
            self.make_reclaimer(mm, reclaim, threads);
        }
    }

    /// Makes a reclaimer, if there are as many as are expected; whether there is one then. Not inside the gate: making a thread allocates.
    fn make_reclaimer(&self, mm: &Mm<P>, reclaim: &Reclaim, expected: u32) -> bool {
        let Some(spawn) = mm.hooks.spawn else { return false };
        if !self.options.background
            || reclaim.never.load(Ordering::Relaxed)
            || reclaim.lost.load(Ordering::Relaxed) >= MOST_LOST
        {
            return false;
        }
        // Relaxed: only one thread has to be the one that makes it.
        if reclaim.threads.compare_exchange(expected, expected + 1, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return true;
        }
        let number = reclaim.last.fetch_add(1, Ordering::Relaxed) + 1;
        let made = spawn(mm, Task::Reclaim(number)).is_ok();
        if !made {
            reclaim.threads.fetch_sub(1, Ordering::Relaxed);
            reclaim.never.store(expected == 0, Ordering::Relaxed);
        }
        made
    }

    /// What reclaim has to do in a tick. Not inside the gate.
    pub(crate) fn tick_reclaim(&self, mm: &Mm<P>) {
        let Some(reclaiming) = mm.reclaiming_if_made() else { return };
        self.watch(mm, &reclaiming);
        if self.options.limit == 0 {
            return;
        }
        // Exact: what lists hold counts as used, and nothing is counted in parts.
        let marks = self.objects.pages.statistics().watermarks;
        let free = self.objects.pages.free_pages();
        if free > u64::from(marks.high) {
            reclaiming.reclaim.passes.has_enough();
        } else if free <= u64::from(marks.low)
            && !reclaiming.reclaim.passes.is_hopeless()
            && reclaiming.is_anybody_there()
        {
            self.ask_reclaimers(mm, &reclaiming, Aim::Budget, None);
        }
    }
}

/// What a thread that charges does about callbacks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Manner {
    /// It waits for reclaimers.
    Wait,
    /// It runs those that allow it itself, and waits for reclaimers then.
    Inline,
    /// It only lets reclaimers know.
    Post,
}

impl<P: Platform> Mm<P> {
    /// What a reclaimer does, from its first moment to its last.
    pub(crate) fn reclaimer(&self, number: u32) {
        thread::name(c"neap-reclaim");
        let (Some(core), Some(reclaiming)) = (self.core_if_open(), self.reclaiming_if_made()) else { return };
        let reclaim = reclaiming.reclaim;
        loop {
            let posts = reclaim.jobs.posts();
            let Some(aim) = reclaiming.inside(|| reclaim.jobs.take(number)) else {
                reclaim.jobs.sleep(posts);
                continue;
            };
            let (bytes, is_written_off) = core.work(&reclaiming, aim, number);
            if is_written_off {
                reclaim.lost.fetch_sub(1, Ordering::Relaxed);
                return;
            }
            reclaiming.inside(|| reclaim.jobs.finish(number, bytes));
        }
    }
}

impl<P: Platform> Core<P> {
    /// Does a job; answers how many bytes came back, and whether this thread has been written off meanwhile.
    fn work(&self, reclaiming: &Reclaiming<'_, P>, aim: Aim, number: u32) -> (u64, bool) {
        let deadline = reclaiming.now().saturating_add(PASS);
        let run = |top: GroupId, bytes: u64, background: bool| {
            reclaiming.run(&Ask { top, bytes, deadline, background }, Runner { reclaimer: number, inline_only: false })
        };
        match aim {
            Aim::Bytes(group, bytes) => {
                let (got, is_written_off) = run(group, bytes, false);
                // Whoever gave something without saying how much is to be asked again.
                (got.bytes.max(u64::from(got.is_something())), is_written_off)
            }
            Aim::High(group) => {
                let (mut next, mut bytes) = (Some(group), 0_u64);
                while let Some(info) = next.and_then(|group| reclaiming.info(group)) {
                    let excess = info.charged.saturating_sub(info.bounds[Bound::High as usize]);
                    if excess > 0 {
                        let (got, is_written_off) = run(info.id, goal(excess, info.charged), false);
                        bytes = bytes.saturating_add(got.bytes);
                        reclaiming.drain(info.id);
                        if is_written_off {
                            return (bytes, true);
                        }
                    }
                    next = info.parent;
                }
                (bytes, false)
            }
            // With one more, so that nothing is not nobody.
            Aim::Look(id, group, node) => {
                let counted = reclaiming.count_as(number, id, group, node);
                counted.map_or((0, false), |(objects, is_written_off)| (objects + 1, is_written_off))
            }
            Aim::Scan(id, group, node, objects) => {
                let scanned = reclaiming.scan_as(number, id, group, node, objects);
                scanned.map_or((0, false), |(visited, is_written_off)| (visited.freed + 1, is_written_off))
            }
            Aim::Budget => {
                let missing = (self.objects.pages.statistics().watermarks.high + 1)
                    .saturating_sub(self.objects.pages.free_pages().min(u32::MAX.into()) as u32);
                let bytes = u64::from(missing) * self.objects.pages.page_size() as u64;
                self.objects.pages.set_reclaiming(true);
                let (got, is_written_off) = run(GroupId::ROOT, bytes, true);
                self.objects.pages.set_reclaiming(false);
                (got.bytes, is_written_off)
            }
        }
    }
}
