//! Reclaimers: threads that run the callbacks of a program's shrinkers for threads that may not run
//! them.
//!
//! # Design
//! A charge at its limit may be made within `malloc`, by a thread that holds a lock that a callback
//! takes. So the charging thread calls no callback. It posts a
//! [job](neap_reclaim::reclaim::job_queue), and waits for the answer until a deadline.
//!
//! There is at most one reclaimer for each node, or four on machines with fewer nodes. The
//! registration of the first shrinker makes the first reclaimer. More are made when all are busy:
//! by neap's own thread, by a charge that waits, or by a reclaimer. No call that allocates or frees
//! makes one.
//!
//! Every waiting thread and every tick checks whether a callback has run for longer than it may. If
//! so, the shrinker becomes a culprit, the thread that runs the callback is written off, and
//! another thread goes on with the job. A reclaimer that was written off ends when its callback
//! returns.
//!
//! # Locking
//! This module takes only the mutexes of the job queue and of blaming, both inside the fork gate.
//! No callback runs inside the gate.

use crate::mm::{Core, Mm, Task};
use crate::options::Background;
use crate::reclaim::pass::{PassContext, Purpose};
use crate::reclaim::reclaiming::Reclaiming;
use crate::reclaim::watching::Ran;
use crate::state::reclaim::{Manner, PASS_MAX_NS, Reclaim, WAIT_MAX_NS};
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_groups::{Bound, Due, GroupId, Patience, Request};
use neap_os::clock;
use neap_percpu::Host as _;
use neap_reclaim::reclaim::{Ask, BUDGET, Next, Overdue, PassResult, ReclaimJob, Waiter, goal};
use neap_reclaim::{ShrinkerFilter, ShrinkerId, is_calling};

/// Nanoseconds between two checks of running callbacks by a waiting thread.
const CHECK_PERIOD_NS: u64 = BUDGET / 4;
/// Most reclaimers on a machine with fewer nodes. With several, one slow callback does not delay
/// the callbacks of other groups.
const LEAST: usize = 4;

impl<P: Platform> Core<P> {
    /// Reclaims for a charge at a limit, and returns the reclaimed bytes:
    /// [`Reclaimer::reclaim`](neap_groups::Reclaimer::reclaim).
    #[cold]
    pub(crate) fn reclaim_for_charge(&self, mm: &Mm<P>, group: GroupId, bytes: u64, manner: Manner) -> u64 {
        let Some(reclaiming) = mm.reclaiming_if_made() else { return 0 };
        // A charge within a callback requests no reclaim, because its thread already runs a pass.
        let reclaim = reclaiming.reclaim;
        let (marks, began) = (reclaim.shrinkers.marks(), self.objects.platform.precise());
        if is_calling() || reclaim.backoff.is_noted(group, marks, began) {
            return 0;
        }
        let answer = if reclaiming.has_shrinkers_below(group) {
            self.ask_for_charge(mm, &reclaiming, group, bytes, manner)
        } else {
            Some(0)
        };
        match answer {
            Some(0) => {
                let is_anything_marked = reclaiming.has_shrinkers_below(group);
                reclaim.backoff.note(group, marks, began, self.objects.platform.precise(), is_anything_marked);
            }
            Some(_) => reclaim.backoff.forget(group),
            // No reclaimer has answered yet.
            None => {}
        }
        answer.unwrap_or(0)
    }

    /// Asks shrinkers for memory of `group` in the given manner, and returns the reclaimed bytes.
    /// `None` if there is no answer yet.
    fn ask_for_charge(
        &self,
        mm: &Mm<P>,
        reclaiming: &Reclaiming<'_, P>,
        group: GroupId,
        bytes: u64,
        manner: Manner,
    ) -> Option<u64> {
        let before = reclaiming.groups.usage(&reclaiming.source, group).ok();
        let wanted = before.map_or(bytes, |charged| goal(bytes, charged));
        let had = if manner == Manner::Inline { reclaiming.ask_inline(group, wanted, u64::MAX) } else { 0 };
        if had >= bytes && had > 0 {
            return Some(had);
        }
        if matches!(manner, Manner::Post | Manner::Quiet) {
            reclaiming.groups.ask_for(&reclaiming.source, group, bytes);
            return None;
        }
        // Threads that wait at this limit may share one job. `work` adds the excess over the limit
        // once for the job, so a thread posts its bytes without the excess.
        let missing = bytes.saturating_sub(reclaiming.groups.excess(&reclaiming.source, group));
        match self.ask_reclaimers(mm, reclaiming, ReclaimJob::Group(group, missing), Some(WAIT_MAX_NS)) {
            Some(bytes) => Some(bytes.max(had)),
            // The reclaimer's pass goes on. If usage has fallen by now, the charge tries again.
            None => {
                let now = reclaiming.groups.usage(&reclaiming.source, group).ok();
                let fallen = before.zip(now).map_or(0, |(before, now)| before.saturating_sub(now));
                Some(fallen.max(had)).filter(|&bytes| bytes > 0)
            }
        }
    }

    /// Posts a job that lets a reclaimer serve a request of a group. Does not wait. The caller must
    /// be outside the gate. Makes a missing reclaimer; with [`Manner::Quiet`], the next tick makes
    /// it.
    pub(crate) fn call_servers(&self, mm: &Mm<P>, manner: Manner) {
        if let Some(reclaiming) = mm.reclaiming_if_made().filter(|_| self.may_have_reclaimers(mm)) {
            _ = reclaiming.reclaim.jobs.post(&reclaiming.source.enter(), ReclaimJob::Requests);
            if manner == Manner::Quiet {
                self.request_tick();
            } else {
                _ = self.spawn_worker(mm, &reclaiming, 0);
            }
        }
    }

    /// Reclaims for an allocation that the budget or the system refuses. This thread asks neap's
    /// own caches. Then reclaimers ask the program's caches.
    ///
    /// Returns whether neap's caches gave enough, or the program's shrinkers gave anything. `None`
    /// if no shrinker was ever registered, or inside a callback.
    #[cold]
    pub(crate) fn reclaim_for_budget(&self, mm: &Mm<P>, bytes: u64) -> Option<bool> {
        let reclaiming = mm.reclaiming_if_made().filter(|_| !is_calling())?;
        let bytes = goal(bytes, u64::MAX);
        let deadline = self.objects.platform.precise().saturating_add(WAIT_MAX_NS);
        let ask = Ask { top: GroupId::ROOT, bytes, deadline, node: None, ahead: false };
        let context = PassContext { filter: ShrinkerFilter::Own, purpose: Purpose::Budget, ..PassContext::of(0) };
        let has_enough = reclaiming.run(&ask, context).result.bytes >= bytes;
        let asks = || self.ask_reclaimers(mm, &reclaiming, ReclaimJob::Budget(bytes), Some(WAIT_MAX_NS)) > Some(0);
        Some(has_enough || reclaiming.reclaim.shrinkers.has_others() && asks())
    }

    /// Reclaims for a charge while `group`, or one above it, is beyond its `high`. Waits for
    /// reclaimers for at most `delay` nanoseconds. Returns whether all of these groups are at or
    /// below their `high` afterwards.
    #[cold]
    pub(crate) fn relieve(&self, mm: &Mm<P>, group: GroupId, delay: u64) -> bool {
        let Some(reclaiming) = mm.reclaiming_if_made() else { return false };
        if is_calling() || !reclaiming.above_high(group).any(|info| reclaiming.has_shrinkers_below(info.id)) {
            return false;
        }
        self.ask_reclaimers(mm, &reclaiming, ReclaimJob::AboveHigh(group), Some(delay));
        reclaiming.above_high(group).next().is_none()
    }

    /// Asks one shrinker, at the request of another process. Without `scan`, the shrinker counts
    /// its objects of a group on a node. With `scan`, it scans that many of them. This thread asks
    /// neap's own shrinkers; reclaimers ask a program's.
    ///
    /// Returns the number of counted or freed objects; `None` if the shrinker did not answer.
    pub(crate) fn ask_shrinker(
        &self,
        mm: &Mm<P>,
        reclaiming: &Reclaiming<'_, P>,
        id: ShrinkerId,
        (group, node): (GroupId, u32),
        scan: Option<u64>,
    ) -> Option<u64> {
        if is_calling() {
            return None;
        }
        if reclaiming.reclaim.shrinkers.is_own(id) {
            return match scan {
                None => reclaiming.count(id, group, node),
                Some(objects) => reclaiming.scan(id, group, node, objects).map(|visited| visited.freed),
            };
        }
        let job = match scan {
            None => ReclaimJob::CountObjects(id, group, node),
            Some(objects) => ReclaimJob::ScanObjects(id, group, node, objects),
        };
        self.ask_reclaimers(mm, reclaiming, job, Some(WAIT_MAX_NS))?.checked_sub(1)
    }

    /// Posts a job. With `patience`, waits for its answer for that many nanoseconds. If the thread
    /// wakes too late, the delay does not count. Returns the answer; 0 if there can be no
    /// reclaimers; `None` without `patience`, or if the answer came too late.
    pub(crate) fn ask_reclaimers(
        &self,
        mm: &Mm<P>,
        reclaiming: &Reclaiming<'_, P>,
        job: ReclaimJob,
        patience: Option<u64>,
    ) -> Option<u64> {
        let Reclaim { jobs, clock, watchdog, waits, late, .. } = reclaiming.reclaim;
        if !self.may_have_reclaimers(mm) {
            return Some(0);
        }
        let Some(patience) = patience else {
            _ = jobs.post(&reclaiming.source.enter(), job);
            _ = self.call_reclaimers(reclaiming);
            return None;
        };
        let mut end = clock::precise().saturating_add(patience);
        waits.fetch_add(1, Ordering::Relaxed);
        let mut waiter = Waiter::new(job);
        loop {
            // If there are too many jobs, the waiter first waits for room in the queue.
            jobs.ask(&reclaiming.source.enter(), &mut waiter);
            let left = if self.call_reclaimers(reclaiming) { end.saturating_sub(clock::precise()) } else { 0 };
            let patience = if left == 0 { Patience::GivesUp } else { Patience::Waits };
            let answer = jobs.answer(&reclaiming.source.enter(), &waiter, patience);
            if let Some(bytes) = answer {
                late.fetch_add(u64::from(left == 0), Ordering::Relaxed);
                return (left > 0).then_some(bytes);
            }
            let before = clock.now();
            jobs.wait(&waiter, left.min(CHECK_PERIOD_NS));
            let now = clock.now();
            let late_by = now.saturating_sub(before).saturating_sub(left.min(CHECK_PERIOD_NS));
            let is_on_time = watchdog.looked(now, late_by);
            // While this thread did not run, in a stopped process or beyond a CPU quota, reclaimers
            // may not have run either.
            end = end.saturating_add(late_by);
            self.watch(reclaiming, Some(before).filter(|_| is_on_time));
        }
    }

    /// Writes off threads whose callbacks have not returned in time, and lets other threads take
    /// over their jobs. `seen_from` is the time from which this thread has watched.
    fn watch(&self, reclaiming: &Reclaiming<'_, P>, seen_from: Option<u64>) {
        let Reclaim { shrinkers, watchdog, jobs, clock, .. } = reclaiming.reclaim;
        let name = |shrinker| shrinkers.name_of(ShrinkerId::from_bits(shrinker));
        let inside = reclaiming.source.enter();
        let replace = |overdue: Overdue| {
            if overdue.reclaimer > 0 {
                reclaiming.groups.leave_request(&inside, overdue.reclaimer);
                jobs.write_off(&inside, overdue.reclaimer, |node| self.objects.pages.node(node).set_reclaiming(false));
            }
        };
        watchdog.write_off(&inside, clock.now(), seen_from, name, replace);
    }

    /// Requests a reclaimer from neap's thread if there are fewer than the jobs need. Returns
    /// whether there is a reclaimer, or a thread that can make one.
    fn call_reclaimers(&self, reclaiming: &Reclaiming<'_, P>) -> bool {
        let jobs = &reclaiming.reclaim.jobs;
        let inside = reclaiming.source.enter();
        let (is_short, threads) = (jobs.is_short(&inside, 0), jobs.threads(&inside).working);
        drop(inside);
        if is_short && threads < self.most_reclaimers() {
            self.request_tick();
        }
        threads > 0 || self.background.has_thread()
    }

    /// Makes a reclaimer if there are fewer than `least`, or fewer than the jobs need. Returns
    /// whether there is one now, or will be. Must not be called within a call that allocates or
    /// frees, because making a thread allocates.
    pub(crate) fn spawn_worker(&self, mm: &Mm<P>, reclaiming: &Reclaiming<'_, P>, least: u32) -> bool {
        let jobs = &reclaiming.reclaim.jobs;
        if !self.may_have_reclaimers(mm) {
            return false;
        }
        // A thread that is making a reclaimer, or runs a callback, makes none here. The next tick
        // does.
        if is_calling() {
            return self.call_reclaimers(reclaiming);
        }
        let most = self.most_reclaimers();
        let inside = reclaiming.source.enter();
        let reserved = jobs.reserve_worker(&inside, least, most, clock::precise());
        let threads = jobs.threads(&inside).working;
        drop(inside);
        if reserved.is_none_or(|number| self.spawn(mm, Task::Reclaim(number)).is_ok()) {
            return threads > 0;
        }
        jobs.spawn_failed(&reclaiming.source.enter(), clock::precise());
        threads > 1
    }

    fn most_reclaimers(&self) -> u32 {
        self.objects.platform.nodes().max(LEAST) as u32
    }

    pub(crate) fn may_have_reclaimers(&self, mm: &Mm<P>) -> bool {
        mm.hooks.spawn.is_some() && self.options.background != Background::Never
    }

    /// Records that neap's thread, which watches callbacks, woke `late_by` nanoseconds too late.
    pub(crate) fn look_after_nap(&self, mm: &Mm<P>, late_by: u64) {
        if let Some(reclaiming) = mm.reclaiming_if_made() {
            reclaiming.reclaim.watchdog.looked(reclaiming.reclaim.clock.now(), late_by);
        }
    }

    /// Does reclaim's part of a tick: checks callbacks and nodes.
    pub(crate) fn tick_reclaim(&self, mm: &Mm<P>, reclaiming: &Reclaiming<'_, P>) {
        self.watch(reclaiming, None);
        (0..self.objects.pages.nodes()).for_each(|node| self.look_at_node(mm, node));
        // A request may have been handed back, or may have found no reclaimer when it was posted.
        if self.may_have_reclaimers(mm) && matches!(reclaiming.groups.look_for_request(&reclaiming.source), Due::Now(_))
        {
            _ = reclaiming.reclaim.jobs.post(&reclaiming.source.enter(), ReclaimJob::Requests);
        }
    }

    /// Posts a job for reclaimers if a node is at its low watermark. The job frees pages of that
    /// node alone, until it is above the high watermark. Does not wait.
    pub(crate) fn look_at_node(&self, mm: &Mm<P>, node: usize) {
        if self.settings.limit() == 0 || is_calling() {
            return;
        }
        let Some(reclaiming) = mm.reclaiming_if_made() else { return };
        let (reclaim, pages) = (reclaiming.reclaim, &self.objects.pages);
        let shortage = reclaiming.source.inside(|_| pages.shortage(node));
        if shortage.pages == 0 {
            reclaim.passes.has_enough(node);
        } else if shortage.is_low
            && !reclaim.passes.is_hopeless(node)
            && reclaim.shrinkers.has_others()
            && self.may_have_reclaimers(mm)
        {
            _ = reclaim.jobs.post(&reclaiming.source.enter(), ReclaimJob::Node(node));
            _ = self.call_reclaimers(&reclaiming);
        }
    }
}

impl<P: Platform> Mm<P> {
    /// Body of the reclaimer `number`: does jobs until the thread is dismissed or written off.
    pub(crate) fn reclaimer(&self, number: u32) {
        let (Some(core), Some(reclaiming)) = (self.core_if_open(), self.reclaiming_if_made()) else { return };
        let jobs = &reclaiming.reclaim.jobs;
        let idle = |node| core.objects.pages.node(node).set_reclaiming(false);
        loop {
            let next = jobs.take(&reclaiming.source.enter(), number);
            let job = match next {
                Next::Job(job) => job,
                Next::Nothing(idle) => {
                    match reclaiming.groups.look_for_request(&reclaiming.source) {
                        Due::Now(_) => _ = jobs.post(&reclaiming.source.enter(), ReclaimJob::Requests),
                        Due::In(nanoseconds) => jobs.sleep(idle, Some(nanoseconds)),
                        Due::Nothing => jobs.sleep(idle, None),
                    }
                    continue;
                }
                Next::End => return,
            };
            let Ran { result: bytes, is_written_off, .. } = core.work(self, &reclaiming, job, number);
            if is_written_off {
                jobs.end(&reclaiming.source.enter(), number, idle);
                // The thread that wrote this reclaimer off may not have made a successor, or may
                // have failed to.
                _ = core.spawn_worker(self, &reclaiming, 0);
                return;
            }
            jobs.finish(&reclaiming.source.enter(), number, bytes, idle);
        }
    }
}

impl<P: Platform> Core<P> {
    /// Does a job. Returns its answer.
    fn work(&self, mm: &Mm<P>, reclaiming: &Reclaiming<'_, P>, job: ReclaimJob, number: u32) -> Ran<u64> {
        let deadline = self.objects.platform.precise().saturating_add(PASS_MAX_NS);
        let run = |top: GroupId, bytes: u64, purpose: Purpose, node: Option<usize>| {
            let context = PassContext { purpose, ..PassContext::of(number) };
            let ask = Ask { top, bytes, deadline, node, ahead: false };
            match job {
                ReclaimJob::Group(..) | ReclaimJob::Budget(_) => reclaiming.run_to_answer(&ask, context),
                _ => reclaiming.run(&ask, context),
            }
        };
        // A shrinker that freed objects without giving a size counts as one byte, so that it is
        // asked again.
        let something = |got: PassResult| got.bytes.max(u64::from(got.is_something()));
        match job {
            ReclaimJob::Group(group, bytes) => {
                let bytes = bytes.saturating_add(reclaiming.groups.excess(&reclaiming.source, group));
                let charged = reclaiming.groups.usage(&reclaiming.source, group);
                let bytes = charged.map_or(bytes, |charged| goal(bytes, charged));
                run(group, bytes, Purpose::Charges, None).map(something)
            }
            ReclaimJob::Budget(bytes) => run(GroupId::ROOT, bytes, Purpose::Budget, None).map(something),
            ReclaimJob::AboveHigh(group) => {
                let mut bytes = 0_u64;
                for high in reclaiming.above_high(group) {
                    // First uncharges stocks and cached objects of the group, which may be the
                    // whole excess.
                    reclaiming.groups.drain(&reclaiming.source, high.id);
                    let Ok(info) = reclaiming.groups.info(&reclaiming.source, high.id) else { continue };
                    let excess = info.charged.saturating_sub(info.bounds[Bound::High as usize]);
                    if excess == 0 {
                        continue;
                    }
                    let ran = run(info.id, goal(excess, info.charged), Purpose::Charges, None);
                    bytes = bytes.saturating_add(ran.result.bytes);
                    reclaiming.groups.drain(&reclaiming.source, info.id);
                    if ran.is_written_off {
                        return ran.map(|_| bytes);
                    }
                }
                Ran::of(bytes)
            }
            // Biased by one: 0 means no answer, n + 1 means n objects.
            ReclaimJob::CountObjects(id, group, node) => {
                let counted = reclaiming.count_as(number, id, group, node);
                counted.map_or(Ran::of(0), |ran| ran.map(|objects| objects.saturating_add(1)))
            }
            ReclaimJob::ScanObjects(id, group, node, objects) => {
                let scanned = reclaiming.scan_as(number, id, group, node, objects);
                scanned.map_or(Ran::of(0), |ran| ran.map(|visited| visited.freed.saturating_add(1)))
            }
            ReclaimJob::Requests => {
                let Due::Now(request) = reclaiming.groups.take_request(&reclaiming.source, number) else {
                    return Ran::of(0);
                };
                // A further request is for another reclaimer.
                if matches!(reclaiming.groups.look_for_request(&reclaiming.source), Due::Now(_)) {
                    self.call_servers(mm, Manner::Wait);
                }
                let ran = self.serve(reclaiming, &request, deadline, number);
                reclaiming.groups.served(&reclaiming.source, &request, number);
                // This thread holds no lock, so it may wake waiters. It leaves listeners to the
                // ticks, because they may take long.
                reclaiming.groups.wake(&reclaiming.source);
                ran
            }
            ReclaimJob::Node(node) => {
                let pages = &self.objects.pages;
                let missing = reclaiming.source.inside(|_| pages.shortage(node).pages);
                if missing == 0 {
                    return Ran::of(0);
                }
                // The flag stays set until `finish`, `end` or `write_off` takes the job from this
                // thread.
                reclaiming.source.inside(|_| pages.node(node).set_reclaiming(true));
                let bytes = u64::from(missing) * pages.page_size() as u64;
                run(GroupId::ROOT, bytes, Purpose::Budget, Some(node)).map(|got| got.bytes)
            }
        }
    }
}

impl<P: Platform> Core<P> {
    /// Reclaims from the group of a request for as long as the group needs memory. Returns the
    /// reclaimed bytes.
    fn serve(&self, reclaiming: &Reclaiming<'_, P>, request: &Request, deadline: u64, number: u32) -> Ran<u64> {
        let top = request.group;
        // First uncharges unused stock, which may be all that the group needs.
        reclaiming.groups.drain(&reclaiming.source, top);
        let needs = reclaiming.groups.needs(&reclaiming.source, request);
        if needs == 0 || !reclaiming.has_shrinkers_below(top) {
            return Ran::of(0);
        }
        let bytes = reclaiming.groups.usage(&reclaiming.source, top).map_or(needs, |charged| goal(needs, charged));
        let ask = Ask { top, bytes, deadline, node: None, ahead: false };
        let ran = reclaiming.run(&ask, PassContext { request: Some(*request), ..PassContext::of(number) });
        reclaiming.groups.drain(&reclaiming.source, top);
        ran.map(|got| got.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Hooks;
    use crate::options::Options;
    use core::ffi::c_void;
    use neap_reclaim::reclaim::JobCount;
    use neap_reclaim::{Asked, STOP, Spec};
    use neap_testing::virtual_platform::Virtual;
    use std::boxed::Box;
    use std::sync::Mutex;
    use std::vec::Vec;

    const BLOCK: usize = 64 << 10;

    /// Blocks that a program caches, by node, and the nodes that it was asked for.
    struct Blocks {
        mm: *const Mm<Virtual>,
        by_node: Mutex<[Vec<usize>; 2]>,
        asked: Mutex<Vec<u32>>,
    }

    impl Blocks {
        fn mm(&self) -> &Mm<Virtual> {
            // SAFETY: the manager is in a box that outlives this.
            unsafe { &*self.mm }
        }

        fn put(&self, cpu: usize) {
            Virtual::run_on(cpu);
            let block = self.mm().allocate(BLOCK);
            assert!(!block.is_null());
            self.by_node.lock().unwrap()[cpu / 2].push(block.expose_provenance());
        }

        fn lengths(&self) -> [usize; 2] {
            self.by_node.lock().unwrap().each_ref().map(Vec::len)
        }

        fn spec(&self) -> Spec<'static> {
            unsafe extern "C" fn count(data: *mut c_void, asked: *const Asked) -> u64 {
                // SAFETY: `data` is the `Blocks` that `spec` was made of, which the test keeps
                // until the manager is closed; `asked` is valid for this call.
                let (blocks, node) = unsafe { (&*data.cast::<Blocks>(), (*asked).node) };
                blocks.asked.lock().unwrap().push(node);
                blocks.lengths()[node as usize] as u64
            }
            unsafe extern "C" fn scan(data: *mut c_void, asked: *mut Asked) -> u64 {
                // SAFETY: `data` is the `Blocks` that `spec` was made of, which the test keeps
                // until the manager is closed; `asked` is valid for this call.
                let (blocks, asked) = unsafe { (&*data.cast::<Blocks>(), &*asked) };
                // A callback that allocates while its node is short posts no job.
                let reclaiming = blocks.mm().reclaiming_if_made().unwrap();
                let jobs = || reclaiming.reclaim.jobs.count(&reclaiming.source.enter());
                let before = jobs();
                let block = blocks.mm().allocate(BLOCK);
                // SAFETY: allocated above, and used nowhere else.
                unsafe { blocks.mm().free(block) };
                if jobs() != before {
                    return STOP;
                }
                let mut freed = 0;
                while freed < asked.to_scan
                    && let Some(block) = blocks.by_node.lock().unwrap()[asked.node as usize].pop()
                {
                    // SAFETY: allocated by `put`; popped above, so no other thread has it.
                    unsafe { blocks.mm().free(core::ptr::with_exposed_provenance_mut(block)) };
                    freed += 1;
                }
                freed
            }
            let data = core::ptr::from_ref(self).cast_mut().cast();
            let (name, by_node, by_group, inline) = ("blocks", true, false, false);
            Spec { name, count, scan, data, gone: None, seeks: 2, batch: 1, by_node, by_group, inline }
        }
    }

    /// A reclaimer works for one node between its watermarks: a job is posted at the low one, ends
    /// above the high one, is not posted twice, and is repeated for a shortage that comes while it
    /// runs.
    #[test]
    fn background_reclaim_runs_from_low_to_high_on_one_node() {
        // Threads that are made do nothing: the test is the reclaimer.
        let hooks = Hooks { open: |_| (), spawn: Some(|_, _| Ok(1)), ticked: None };
        let mut mm = Box::new(Mm::new(hooks));
        let machine = Virtual::new(4096, 4).with_nodes(&[0, 0, 1, 1]);
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(machine, &Options { limit: 32 << 20, stat: false, ..Options::DEFAULT }) }.unwrap();
        let blocks = Blocks { mm: &raw const *mm, by_node: Mutex::default(), asked: Mutex::default() };
        let (core, reclaiming) = (mm.core_if_open().unwrap(), mm.reclaiming().unwrap());
        // SAFETY: the blocks stay in place until the manager is closed, and the callbacks return.
        let id = unsafe { reclaiming.reclaim.shrinkers.prepare(&reclaiming.source, &blocks.spec()) }.unwrap();
        reclaiming.start(id).unwrap();
        let jobs = &reclaiming.reclaim.jobs;
        let inside = || reclaiming.source.enter();
        let counted = |posted, taken| JobCount { posted, taken };
        let shortage = |node| core.objects.pages.shortage(node);
        // The second node is below its part of the limit: the missing pages are the first node's to
        // free.
        (0..64).for_each(|_| blocks.put(2));
        while !shortage(0).is_low {
            assert_eq!(jobs.count(&inside()), counted(0, 0), "above the low watermark no reclaimer is woken");
            blocks.put(0);
        }
        assert_eq!((shortage(1).pages, jobs.count(&inside())), (0, counted(1, 0)));
        blocks.put(0);
        core.tick_reclaim(&mm, &mm.reclaiming_if_made().unwrap());
        assert_eq!(jobs.count(&inside()), counted(1, 0), "once");
        let before = blocks.lengths();
        let Next::Job(job) = jobs.take(&inside(), 1) else { panic!("a job was posted") };
        assert_eq!(job, ReclaimJob::Node(0));
        let missing = u64::from(shortage(0).pages) * 4096;
        let bytes = core.work(&mm, &reclaiming, job, 1).result;
        assert!(bytes >= missing && shortage(0).pages == 0 && !shortage(0).is_low);
        let now = blocks.lengths();
        let freed = (before[0] - now[0]) * BLOCK;
        assert!((missing as usize..missing as usize * 4).contains(&freed), "{freed} of {missing}");
        // The pass has emptied caches of neap's own, too.
        assert_eq!(core.shrunk.load(Ordering::Relaxed), (freed / BLOCK) as u64);
        assert_eq!((now[1], blocks.asked.lock().unwrap().iter().all(|&node| node == 0)), (before[1], true));
        // A new shortage while the job runs: it is done once more, and then the reclaimer sleeps.
        while !shortage(0).is_low {
            blocks.put(0);
        }
        assert_eq!(jobs.count(&inside()), counted(0, 1));
        jobs.finish(&inside(), 1, bytes, |_| ());
        assert_eq!(jobs.take(&inside(), 1), Next::Job(job));
        core.work(&mm, &reclaiming, job, 1);
        jobs.finish(&inside(), 1, 0, |_| ());
        assert_eq!((shortage(0).pages, jobs.count(&inside())), (0, counted(0, 0)));
        // Between the watermarks no reclaimer is woken, not even by a tick.
        while shortage(0).pages == 0 {
            blocks.put(0);
        }
        core.tick_reclaim(&mm, &mm.reclaiming_if_made().unwrap());
        assert_eq!((shortage(0).is_low, jobs.count(&inside())), (false, counted(0, 0)));
        let [direct, background] = reclaiming.reclaim.passes.counts().map(|[passes, ..]| passes);
        assert_eq!((direct, background), (0, 2));
        // SAFETY: nothing of the manager is used any more.
        unsafe { mm.close() };
    }
}
