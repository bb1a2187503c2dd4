//! Maintenance: the work of a tick.
//!
//! # Design
//! A tick does the following. It stops or signals no thread.
//!
//! 1. It serves groups and reclaim, a limit that follows the container, and the option `high`.
//! 2. It drains the stacks of CPUs that were idle since the last tick.
//! 3. It trims barns to their working sets.
//! 4. It punches holes into resting slabs, and releases pages.
//! 5. It runs the worker of per-CPU data.
//!
//! neap's own thread (`background.rs`) ticks. Where there is none, calls on the slow path tick. The
//! thread or call that ticks also answers requests of other processes (`control/mod.rs`).
//!
//! # Locking
//! A tick holds a mutex while it releases memory. Threads only try to take it, so one at a time
//! does that work.

use crate::limits::limit::{PERIOD, TICKING};
use crate::mm::{Core, Mm};
use crate::returning::drain::Fences;
use core::cell::Cell;
use core::sync::atomic::Ordering;
use neap_base::platform::Platform;
use neap_objects::size_class::{CLASSES, Class};
use neap_pages::{Effort, INTERVALS};

/// Slow calls between two checks for a due tick, where there is no thread. A prime, so that the
/// checks do not always hit the same call of a program's rhythm.
const CHECK_PERIOD_CALLS: u32 = 7;
/// Ticks in a row in which a CPU may be skipped before its stacks no longer cause further ticks.
/// Likewise for pages, if an isolated CPU keeps ticks from releasing them.
const SKIPPED_TICKS_MAX: u32 = 8;
/// Most bytes that one call of the program moves from barns to slabs, or releases, where there is
/// no thread.
const CALL_TICK_BYTES_MAX: u64 = 16 << 20;

/// Limits of one `give_back`.
struct GiveBackLimits {
    /// The current time, for a full tick. `None` to go on with work that an earlier call left.
    now: Option<u64>,
    /// Bytes at most.
    most: u64,
    /// Whether to drain also stacks that need a fence by a system call.
    fences: bool,
}

/// Report of a tick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Tick {
    /// CPUs whose idle stacks were drained.
    pub drained: u32,
    /// CPUs that could not be drained now.
    pub skipped: u32,
    /// Report of the pages.
    pub pages: neap_pages::Report,
    /// Report of the worker of per-CPU data.
    pub per_cpu: neap_percpu::Tick,
    /// Whether a thread of the process may run on an isolated CPU. If so, the tick releases no
    /// memory, except to get below the option `high`: a release interrupts every CPU that runs the
    /// process.
    pub held: bool,
    /// Nanoseconds until groups or a limit that follows the container need the next tick, if they
    /// do.
    pub soon: Option<u64>,
    /// Whether a later tick may find work even without calls in between.
    pub left: bool,
}

impl<P: Platform> Core<P> {
    /// Ticks if due, and answers requests of other processes, after a slow call without neap's
    /// thread.
    pub(crate) fn after_without_thread(&self, mm: &Mm<P>) {
        // Relaxed, and no atomic addition: heuristic. A call of another thread may be lost.
        let calls = self.maintenance.calls.load(Ordering::Relaxed);
        self.maintenance.calls.store(calls.wrapping_add(1), Ordering::Relaxed);
        if calls.is_multiple_of(CHECK_PERIOD_CALLS) {
            self.tick_if_due(mm);
        }
        if self.page.is_asked() {
            self.answer_in_call(mm);
        }
    }

    /// Ticks in place of the thread, up to the limit of a call. A later call continues at once.
    fn tick_if_due(&self, mm: &Mm<P>) {
        let platform = &self.objects.platform;
        if platform.is_isolated(platform.cpu()) {
            return;
        }
        let now = platform.now();
        let interval = self.settings.interval();
        if now.saturating_sub(self.maintenance.last.load(Ordering::Relaxed)) >= interval {
            self.follow_if_due(mm, PERIOD);
            self.tick_groups(mm);
            mm.reclaiming_if_made().inspect(|reclaiming| self.tick_reclaim(mm, reclaiming));
            self.keep_below_high(mm);
            let tick = self.give_back(mm, GiveBackLimits { now: Some(now), most: CALL_TICK_BYTES_MAX, fences: false });
            let bytes = u64::from(tick.pages.released) * self.objects.pages.page_size() as u64;
            self.in_call.note_given(&mm.gate.enter(platform.cpu()), bytes, now);
        } else if self.maintenance.unfinished.load(Ordering::Relaxed) {
            self.give_back(mm, GiveBackLimits { now: None, most: CALL_TICK_BYTES_MAX, fences: false });
        }
    }

    /// Bytes that are resident in free pages.
    fn free_bytes(&self) -> u64 {
        let statistics = self.objects.pages.statistics();
        let page_size = self.objects.pages.page_size() as u64;
        u64::from(statistics.backed_free + statistics.listed) * page_size + self.per_cpu.bytes().free
    }

    /// Returns whether the free resident pages do not exceed the bytes that the program keeps.
    fn keeps_all(&self) -> bool {
        // Relaxed: a number that publishes no other data.
        let kept = self.maintenance.kept.load(Ordering::Relaxed);
        kept > 0 && (kept == u64::MAX || self.free_bytes() <= kept)
    }

    /// Makes one tick: groups, reclaim, then memory.
    pub(crate) fn tick(&self, mm: &Mm<P>, now: u64) -> Tick {
        let look = self.follow_if_due(mm, TICKING).filter(|_| self.following.is_hurrying());
        let groups = self.tick_groups(mm);
        if let Some(reclaiming) = mm.reclaiming_if_made() {
            self.tick_reclaim(mm, &reclaiming);
            _ = self.spawn_worker(mm, &reclaiming, 0);
        }
        let goes_on = self.keep_below_high(mm);
        let mut tick = self.give_back(mm, GiveBackLimits { now: Some(now), most: u64::MAX, fences: true });
        let soon = [groups, look].into_iter().flatten().min();
        tick.left |= soon.is_some() || goes_on;
        // Ticks continue reclaim until the use is below a limit that was cut. Without shrinkers,
        // only frees of the program lower the use.
        tick.left |= self.is_beyond_limit(mm) && mm.reclaiming_if_made().is_some();
        Tick { soon, ..tick }
    }

    /// Whether a call that allocates or frees may drain a CPU's stacks.
    pub(crate) fn may_take_in_call(&self, cpu: usize) -> bool {
        let platform = &self.objects.platform;
        !self.objects.cpu_caches.takes_fence(platform, cpu) || platform.may_fence()
    }

    fn give_back(&self, mm: &Mm<P>, GiveBackLimits { now, most, fences }: GiveBackLimits) -> Tick {
        let mut tick = Tick::default();
        let room = Cell::new(most);
        let inside = mm.gate.enter(self.objects.platform.cpu());
        let Some(mut seen) = self.maintenance.seen.try_lock(&inside) else {
            return Tick { left: true, ..tick };
        };
        if let Some(now) = now {
            self.maintenance.last.store(now, Ordering::Relaxed);
            self.maintenance.ticks.fetch_add(1, Ordering::Relaxed);
            mm.resume_guarding(self);
        }
        // Only full ticks drain: a continuation comes too soon to tell which stacks are idle.
        for cpu in self.objects.cpu_caches.used().iter().filter(|_| now.is_some()) {
            let mut idle = [false; CLASSES];
            let (mut any, mut active) = (false, false);
            for class in Class::all() {
                let now = self.objects.cpu_caches.snapshot(&self.objects.platform, cpu, class);
                active |= now.active;
                idle[class.index()] = seen.is_idle(cpu, class, now);
                any |= idle[class.index()];
            }
            let may_take = fences || self.may_take_in_call(cpu);
            if any && may_take && self.objects.drain_cpu(cpu, |class| idle[class.index()]).is_some() {
                tick.drained += 1;
            } else if any {
                tick.skipped += 1;
            }
            // A CPU that cannot be drained in many ticks (a sandbox refuses fences) does not cause
            // further ticks.
            tick.left |= active && (!any || tick.skipped == 0 || seen.skips < SKIPPED_TICKS_MAX);
        }
        seen.skips = if tick.skipped > 0 { seen.skips.saturating_add(1) } else { 0 };
        // A fork waits for this thread, so the thread stops between two sheaves or two system
        // calls.
        let stop = || mm.gate.is_closed();
        for class in Class::all() {
            let sheaf = u64::from(class.sheaf_capacity()) * class.size() as u64;
            // Called before each sheaf.
            let stop = || stop() || room.replace(room.get().saturating_sub(sheaf)) == 0;
            tick.left |= self.objects.trim_barn(class, Effort::Sparing, &stop).has_sheaves;
        }
        let platform = &self.objects.platform;
        // Releasing pages interrupts every CPU that runs the process. So a tick releases none while
        // an isolated CPU runs it. Explicit calls do.
        tick.held = self.objects.look_for_isolated_use();
        seen.holds = if tick.held { seen.holds.saturating_add(1) } else { 0 };
        let keeps = self.keeps_all();
        let held = || tick.held || keeps || room.get() == 0 || stop();
        // One tick in so many punches holes into whole huge pages.
        let breaks = self.maintenance.ticks.load(Ordering::Relaxed).is_multiple_of(INTERVALS as u64);
        let holes = self.objects.punch(if breaks { Effort::Sparing } else { Effort::Whole }, &held);
        let page_size = self.objects.pages.page_size() as u64;
        let spend = |pages: u32| room.set(room.get().saturating_sub(u64::from(pages) * page_size));
        spend(holes.released);
        // Ticks within calls leave the pages that calls have learned to keep.
        let spare = if most == u64::MAX { most } else { self.free_bytes().saturating_sub(self.in_call.kept()) };
        let pages = u32::try_from(room.get().min(spare) / page_size).unwrap_or(u32::MAX);
        if room.get().min(spare) < CALL_TICK_BYTES_MAX / 4 && !held() {
            self.offer_kept(&inside);
        }
        tick.pages = self.objects.pages.tick_within(platform, pages, &held);
        spend(tick.pages.released);
        tick.pages = holes.and(tick.pages);
        // A tick that stopped at its limit may have some room left, too little for a block.
        self.maintenance.unfinished.store(room.get() < most / 4 && !keeps, Ordering::Relaxed);
        // Pages that are kept, or held back for many ticks, cause no further ticks. The next slow
        // call wakes the thread.
        tick.left |= tick.pages.left && !keeps && seen.holds < SKIPPED_TICKS_MAX;
        tick.per_cpu = self.per_cpu.tick(&inside, platform, &stop);
        tick.left |= tick.per_cpu.more && !tick.per_cpu.rests && seen.holds < SKIPPED_TICKS_MAX;
        self.maintenance.drains.fetch_add(u64::from(tick.drained), Ordering::Relaxed);
        if now.is_some() {
            mm.hooks.ticked.inspect(|ticked| ticked(mm, &inside));
        }
        tick
    }
}

impl<P: Platform> Mm<P> {
    /// Makes one tick, for programs without neap's thread, and for tests. `now` is in nanoseconds
    /// and must not decrease.
    ///
    /// This calls listeners of groups, so the caller must hold no lock that they take.
    pub fn tick(&self, now: u64) -> Tick {
        let tick = self.core_if_open().map_or(Tick::default(), |core| core.tick(self, now));
        self.deliver();
        tick
    }

    /// Lets ticks leave up to `bytes` bytes of free pages resident; `u64::MAX` means all of them.
    /// Explicit calls that release memory ignore this. Returns whether there is a manager.
    pub fn keep_free(&self, bytes: u64) -> bool {
        let Some(core) = self.core() else { return false };
        // Relaxed: a number that publishes no other data.
        core.maintenance.kept.store(bytes, Ordering::Relaxed);
        let _inside = self.gate.enter(core.objects.platform.cpu());
        core.objects.pages.keep_chunks(bytes > 0);
        core.in_call.forget_bound();
        true
    }

    /// Releases all free memory, recently used or not. Returns whether any memory was released.
    pub fn release_all(&self) -> bool {
        let Some(core) = self.core_if_open() else { return false };
        let (platform, mut released) = (&core.objects.platform, 0);
        self.inside_to_the_end(core, |inside, stop| {
            core.drain_everything(inside, Fences::All, stop);
            released += core.per_cpu.release_all(inside, platform, stop).released;
            let holes = core.objects.punch(Effort::Full, stop);
            released += u64::from(holes.and(core.objects.pages.release_all_until(platform, stop)).released);
        });
        released > 0
    }

    /// Calls the hook `ticked`, which publishes the numbers.
    pub(crate) fn ticked(&self) {
        if let (Some(core), Some(ticked)) = (self.core_if_open(), self.hooks.ticked) {
            ticked(self, &self.gate.enter(core.objects.platform.cpu()));
        }
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

    /// Kept by `keep_free`, or because the program has locked its memory.
    #[test]
    fn kept_free_memory_is_released_only_by_explicit_call() {
        const BYTES: usize = 24 << 20;
        for keep in [Keep::Nothing, Keep::More, Keep::Less, Keep::All, Keep::Locked] {
            let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
            // SAFETY: the manager stays in its box.
            unsafe { mm.open(Virtual::new(4096, 1), &Options { stat: false, ..Options::DEFAULT }) }.unwrap();
            let platform = &mm.core().unwrap().objects.platform;
            match keep {
                Keep::Nothing => {}
                Keep::More => assert!(mm.keep_free(2 * BYTES as u64)),
                Keep::Less => assert!(mm.keep_free(BYTES as u64 / 2)),
                Keep::All => assert!(mm.keep_free(u64::MAX)),
                Keep::Locked => platform.lock_memory(true),
            }
            // SAFETY: the memory is this test's.
            let burst = || unsafe {
                let run = mm.allocate(BYTES);
                run.write_bytes(1, BYTES);
                mm.free(run);
                let small: Vec<*mut u8> = (0..20_000).map(|_| mm.allocate(100)).collect();
                small.into_iter().step_by(3).for_each(|object| mm.free(object));
            };
            burst();
            let mut left = true;
            for tick in 1..200 {
                left = mm.tick(tick << 30).left;
            }
            assert!(!left, "ticks end");
            let gone = platform.released_bytes();
            // Objects lie in a part of the former run.
            let most = matches!(keep, Keep::Nothing | Keep::Less);
            assert!(if most { gone > BYTES as u64 / 2 } else { gone == 0 }, "{keep:?}: {gone} bytes went");
            burst();
            mm.release_all();
            assert!(platform.released_bytes() > gone + BYTES as u64 / 2, "{keep:?}: by its own call");
            // SAFETY: no thread uses the manager any more.
            unsafe { mm.close() };
        }
    }

    /// The survivors in a whole huge page stay fast until it is clear that the holes stay.
    #[test]
    fn whole_huge_pages_get_holes_by_few_ticks_only() {
        for ticks_before in 0..INTERVALS as u64 {
            let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
            // SAFETY: the manager stays in its box.
            unsafe { mm.open(Virtual::new(4096, 1), &Options { stat: false, ..Options::DEFAULT }) }.unwrap();
            let core = mm.core().unwrap();
            let splits_in = |tick: u64| {
                let before = core.objects.platform.splits();
                mm.tick(tick << 30);
                core.objects.platform.splits() - before
            };
            let objects: Vec<*mut u8> = (0..100_000).map(|_| mm.allocate(256)).collect();
            assert!(core.objects.pages.statistics().populated > 8 * 512);
            (1..=ticks_before).for_each(|tick| assert_eq!(splits_in(tick), 0));
            // So that no call releases memory.
            assert!(mm.keep_free(u64::MAX));
            for (_, object) in objects.iter().enumerate().filter(|(n, _)| n % 64 > 0) {
                // SAFETY: the objects are this test's, and each is freed once.
                unsafe { mm.free(*object) };
            }
            assert!(mm.keep_free(0));
            let breaking = (ticks_before + 1..20).find(|&tick| splits_in(tick) > 0).unwrap();
            assert!(
                breaking.is_multiple_of(INTERVALS as u64),
                "{ticks_before} ticks before, broken by tick {breaking}"
            );
            assert_eq!(mm.verify(0).map(|_| ()), Ok(()));
            // SAFETY: no thread uses the manager any more.
            unsafe { mm.close() };
        }
    }

    /// Later calls release the rest, soon.
    #[test]
    fn a_call_gives_little_back_and_later_ones_the_rest() {
        const BURST: usize = 256 << 20;
        for small in [false, true] {
            let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
            // SAFETY: the manager stays in its box.
            unsafe { mm.open(Virtual::new(4096, 1), &Options { stat: false, ..Options::DEFAULT }) }.unwrap();
            let platform = &mm.core().unwrap().objects.platform;
            let size = if small { 1000 } else { 8 << 20 };
            let blocks: Vec<*mut u8> = (0..BURST / size).map(|_| mm.allocate(size)).collect();
            // SAFETY: the memory is this test's.
            blocks.iter().for_each(|&block| unsafe { block.write_bytes(1, size) });
            // SAFETY: allocated above, and not used after this.
            blocks.into_iter().for_each(|block| unsafe { mm.free(block) });
            let (mut most, mut intervals) = (0, 0);
            while platform.released_bytes() < BURST as u64 / 10 * 9 {
                intervals += 1;
                assert!(intervals < 10, "{} bytes after ten intervals", platform.released_bytes());
                platform.advance(400_000_000);
                for _ in 0..400 {
                    let before = platform.released_bytes();
                    // SAFETY: a run, just allocated and not used; freeing it takes the slow path.
                    unsafe { mm.free(mm.allocate(50_000)) };
                    most = most.max(platform.released_bytes() - before);
                }
            }
            assert!(most <= CALL_TICK_BYTES_MAX / 4 * 5, "{most} bytes within two calls, small {small}");
            // SAFETY: no thread uses the manager any more.
            unsafe { mm.close() };
        }
    }

    #[derive(Debug, Clone, Copy)]
    enum Keep {
        Nothing,
        More,
        Less,
        All,
        Locked,
    }
}
