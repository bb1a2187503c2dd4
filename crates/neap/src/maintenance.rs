//! Maintenance: giving back what is not needed.
//!
//! A tick drains the stacks of CPUs that did nothing since the last one, trims barns to their
//! working sets, has slabs that rest give back pages without objects, releases pages, and is the
//! worker of per-CPU data. neap's own thread ([`background`](crate::background)) makes it; where
//! there is none, calls that go the slow way do. One tick at a time: a mutex that is only ever
//! tried. No thread is stopped or signalled. The thread or call that ticks also answers what other
//! processes ask ([`requests`](crate::requests)).

use crate::mm::{Core, Mm};
use core::cell::Cell;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use neap_base::Mutex;
use neap_base::platform::{Errno, Platform};
use neap_objects::size_class::{CLASSES, Class};
use neap_objects::slots::Peek;

/// Slow calls from one look for a due tick to the next, where there is no thread. Prime: in
/// whatever rhythm a program allocates and frees, both are met.
const LOOK_EVERY: u32 = 7;
/// Ticks in a row in which a CPU is skipped, after which what it holds is given up for now.
const PATIENCE: u32 = 8;
/// Bytes that a call of the program's gives back at most, where there is no thread: in its turn from caches to slabs, and from there to the system.
const IN_CALL: u64 = 16 << 20;

/// The state of maintenance.
#[derive(Debug)]
pub(crate) struct Maintenance {
    ticks: AtomicU64,
    drains: AtomicU64,
    /// When the last tick was, in the platform's nanoseconds.
    last: AtomicU64,
    /// Calls that went the slow way while there was no thread.
    calls: AtomicU32,
    /// Whether a tick within a call has left something because it did as much as a call may.
    unfinished: AtomicBool,
    /// Bytes of free pages that ticks leave to the process.
    kept: AtomicU64,
    /// Where the [`Peek`]s are, for whoever does not have the mutex, which is held as long as a tick takes.
    memory: usize,
    /// What the slots looked like at the last tick: a [`Peek`] per CPU and class.
    seen: Mutex<Seen>,
}

/// Where the [`Peek`]s are.
#[derive(Debug)]
struct Seen {
    memory: usize,
    /// Ticks in a row in which a CPU was skipped.
    skips: u32,
    /// Ticks in a row in which nothing was released for the sake of an isolated CPU.
    holds: u32,
}

/// What giving back is to do.
struct Work {
    /// When that is, where an interval is over; the rest of what an earlier call left otherwise.
    now: Option<u64>,
    /// Bytes at most.
    most: u64,
    /// Whether stacks are taken that need a fence which is a system call.
    fences: bool,
}

/// What a tick did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tick {
    /// CPUs whose idle stacks were taken.
    pub drained: u32,
    /// CPUs that could not be drained now.
    pub skipped: u32,
    /// What the pages did.
    pub pages: neap_pages::Report,
    /// What the worker of per-CPU data did.
    pub per_cpu: neap_percpu::Tick,
    /// Whether nothing was released because an isolated CPU runs the process and would be interrupted by it.
    pub held: bool,
    /// In how many nanoseconds groups want the next one, if they do.
    pub groups: Option<u64>,
    /// Whether a later tick may find something to do though nobody calls in between.
    pub left: bool,
}

impl Maintenance {
    pub(crate) fn open<P: Platform>(platform: &P) -> Result<Maintenance, Errno> {
        let length = platform.cpus() * CLASSES * size_of::<Peek>();
        let memory = platform.map(length.next_multiple_of(platform.page_size()))?;
        Ok(Maintenance {
            ticks: AtomicU64::new(0),
            drains: AtomicU64::new(0),
            last: AtomicU64::new(platform.now()),
            calls: AtomicU32::new(0),
            unfinished: AtomicBool::new(false),
            kept: AtomicU64::new(0),
            memory,
            seen: Mutex::new(Seen { memory, skips: 0, holds: 0 }),
        })
    }

    /// Unmaps what [`Maintenance::open`] mapped.
    ///
    /// # Safety
    /// Nobody ticks any more.
    pub(crate) unsafe fn close<P: Platform>(&self, platform: &P) {
        let (memory, length) = self.mapping(platform);
        // SAFETY: as the caller promises.
        unsafe { platform.unmap(memory, length) };
    }

    /// What [`Maintenance::open`] mapped, and its length.
    pub(crate) fn mapping<P: Platform>(&self, platform: &P) -> (usize, usize) {
        let length = platform.cpus() * CLASSES * size_of::<Peek>();
        (self.memory, length.next_multiple_of(platform.page_size()))
    }

    /// Ticks made, and CPUs drained.
    pub(crate) fn counters(&self) -> (u64, u64) {
        (self.ticks.load(Ordering::Relaxed), self.drains.load(Ordering::Relaxed))
    }

    /// Bytes of free pages that the program wants to keep.
    pub(crate) fn kept(&self) -> u64 {
        self.kept.load(Ordering::Relaxed)
    }
}

impl Seen {
    /// Remembers what a slot looks like and answers whether it looked the same, and held something, the last time.
    fn is_idle(&mut self, cpu: usize, class: Class, now: Peek) -> bool {
        let entry =
            core::ptr::with_exposed_provenance_mut::<Peek>(self.memory).wrapping_add(cpu * CLASSES + class.index());
        // SAFETY: the mapping has an entry per CPU and class; zeroes are a valid one; the lock is held.
        let before = unsafe { entry.replace(now) };
        before == now && now.active
    }
}

impl<P: Platform> Core<P> {
    /// What follows a call that went the slow way where there is no thread.
    pub(crate) fn after_without_thread(&self, mm: &Mm<P>) {
        if self.maintenance.calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(LOOK_EVERY) {
            self.tick_if_due(mm);
        }
        if self.page.is_asked() {
            self.answer_in_call(mm);
        }
    }

    /// Ticks where the thread would have done it, as far as a call may; a later call goes on with the rest at once.
    fn tick_if_due(&self, mm: &Mm<P>) {
        let platform = &self.objects.platform;
        if platform.is_isolated(platform.cpu()) {
            return;
        }
        let now = platform.now();
        let interval = u64::from(self.options.interval) * 1_000_000;
        if now.saturating_sub(self.maintenance.last.load(Ordering::Relaxed)) >= interval {
            self.tick_groups(mm);
            self.tick_reclaim(mm, false);
            let tick = self.give_back(mm, Work { now: Some(now), most: IN_CALL, fences: false });
            let _inside = mm.gate.enter(platform.cpu());
            self.in_call.note_given(u64::from(tick.pages.released) * self.objects.pages.page_size() as u64);
        } else if self.maintenance.unfinished.load(Ordering::Relaxed) {
            self.give_back(mm, Work { now: None, most: IN_CALL, fences: false });
        }
    }

    /// Bytes that are resident and in use, in caches or not, and that are free as pages.
    fn used_and_free(&self) -> (u64, u64) {
        let statistics = self.objects.pages.statistics();
        let page_size = self.objects.pages.page_size() as u64;
        let (per_cpu, per_cpu_free) = self.per_cpu.bytes();
        let free = u64::from(statistics.backed_free + statistics.listed) * page_size + per_cpu_free;
        let used = u64::from(statistics.used.saturating_sub(statistics.listed)) * page_size + per_cpu;
        (used, free)
    }

    /// Whether no more pages are free and resident than the program wants to keep.
    fn keeps_all(&self) -> bool {
        // Relaxed: a number that publishes no other data.
        let kept = self.maintenance.kept.load(Ordering::Relaxed);
        kept > 0 && (kept == u64::MAX || self.used_and_free().1 <= kept)
    }

    /// Gives back what was not needed since the last tick, and does what groups have to do now and then.
    pub(crate) fn tick(&self, mm: &Mm<P>, now: u64, makes_threads: bool) -> Tick {
        let groups = self.tick_groups(mm);
        self.tick_reclaim(mm, makes_threads);
        let mut tick = self.give_back(mm, Work { now: Some(now), most: u64::MAX, fences: true });
        tick.left |= groups.is_some();
        Tick { groups, ..tick }
    }

    /// Whether a call that allocates or frees may take what is in a CPU's stacks.
    pub(crate) fn may_take_in_call(&self, cpu: usize) -> bool {
        let platform = &self.objects.platform;
        !self.objects.slots.takes_fence(platform, cpu) || platform.may_fence()
    }

    fn give_back(&self, mm: &Mm<P>, Work { now, most, fences }: Work) -> Tick {
        let mut tick = Tick::default();
        let room = Cell::new(most);
        // The gate first: a mutex that is held while fork finds nobody inside would stay held in the child.
        let _inside = mm.gate.enter(self.objects.platform.cpu());
        let Some(mut seen) = self.maintenance.seen.try_lock() else {
            return Tick { left: true, ..tick };
        };
        if let Some(now) = now {
            self.maintenance.last.store(now, Ordering::Relaxed);
            self.maintenance.ticks.fetch_add(1, Ordering::Relaxed);
        }
        // A rest is taken up too soon to tell which stacks are idle.
        for cpu in self.objects.slots.used().iter().filter(|_| now.is_some()) {
            let mut idle = [false; CLASSES];
            let (mut any, mut active) = (false, false);
            for class in Class::all() {
                let now = self.objects.slots.peek(&self.objects.platform, cpu, class);
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
            // A CPU that cannot be drained tick after tick (a sandbox refuses fences) is no reason to tick for ever.
            tick.left |= active && (!any || tick.skipped == 0 || seen.skips < PATIENCE);
        }
        seen.skips = if tick.skipped > 0 { seen.skips.saturating_add(1) } else { 0 };
        // Fork waits for this: stop between two sheaves, or two system calls, when it does.
        let stop = || mm.gate.is_closed();
        for class in Class::all() {
            let sheaf = u64::from(class.sheaf_capacity()) * class.size() as u64;
            // Asked before each sheaf.
            let stop = || stop() || room.replace(room.get().saturating_sub(sheaf)) == 0;
            tick.left |= self.objects.trim_barn(class, false, &stop).1;
        }
        let platform = &self.objects.platform;
        // Releasing interrupts every CPU that runs the process: it waits until no isolated one does, or for an explicit call.
        tick.held = self.objects.look_for_isolated_use();
        seen.holds = if tick.held { seen.holds.saturating_add(1) } else { 0 };
        let keeps = self.keeps_all();
        let held = || tick.held || keeps || room.get() == 0 || stop();
        let holes = self.objects.punch(false, &held);
        let page_size = self.objects.pages.page_size() as u64;
        let spend = |pages: u32| room.set(room.get().saturating_sub(u64::from(pages) * page_size));
        spend(holes.released);
        // What calls have learned to keep is not for ticks within calls.
        let spare = if most == u64::MAX { most } else { self.used_and_free().1.saturating_sub(self.in_call.kept()) };
        let pages = u32::try_from(room.get().min(spare) / page_size).unwrap_or(u32::MAX);
        if room.get().min(spare) < IN_CALL / 4 && !held() {
            self.offer_kept();
        }
        tick.pages = self.objects.pages.tick_within(platform, pages, &held);
        spend(tick.pages.released);
        tick.pages = holes.and(tick.pages);
        // What is left of a room that was enough is too little for a block.
        self.maintenance.unfinished.store(room.get() < most / 4 && !keeps, Ordering::Relaxed);
        // That is no reason to tick for ever: who next goes the slow way wakes the thread again.
        tick.left |= tick.pages.left && !keeps && seen.holds < PATIENCE;
        tick.per_cpu = self.per_cpu.tick(platform, &stop);
        tick.left |= tick.per_cpu.more && !tick.per_cpu.rests && seen.holds < PATIENCE;
        self.maintenance.drains.fetch_add(u64::from(tick.drained), Ordering::Relaxed);
        if now.is_some() {
            mm.hooks.ticked.inspect(|ticked| ticked(mm));
        }
        tick
    }
}

impl<P: Platform> Mm<P> {
    /// Gives back what was not needed since the last tick; for programs that want no thread, and for tests. `now` is in
    /// nanoseconds and only ever grows.
    ///
    /// Those who want to hear of groups are called from here: the caller holds nothing that they may want.
    pub fn tick(&self, now: u64) -> Tick {
        let tick = self.core_if_open().map_or(Tick::default(), |core| core.tick(self, now, true));
        self.deliver();
        tick
    }

    /// Lets ticks release nothing as long as at most so many bytes of pages are free and resident; `u64::MAX`: ever. Calls that are made to give memory
    /// back do so all the same. Answers whether there is a manager.
    pub fn keep_free(&self, bytes: u64) -> bool {
        let Some(core) = self.core() else { return false };
        // Relaxed: a number that publishes no other data.
        core.maintenance.kept.store(bytes, Ordering::Relaxed);
        let _inside = self.gate.enter(core.objects.platform.cpu());
        core.objects.pages.keep_chunks(bytes > 0);
        true
    }

    /// Gives back everything that is free, needed a moment ago or not. Answers whether any memory went back.
    pub fn release_all(&self) -> bool {
        let Some(core) = self.core_if_open() else { return false };
        let (platform, mut released) = (&core.objects.platform, 0);
        self.inside_to_the_end(core, |stop| {
            core.drain_everything(true, stop);
            released += core.per_cpu.release_all(platform, stop).released;
            let holes = core.objects.punch(true, stop);
            released += u64::from(holes.and(core.objects.pages.release_all_until(platform, stop)).released);
        });
        released > 0
    }

    /// Tells who wants to know that the numbers have changed.
    pub(crate) fn ticked(&self) {
        if let (Some(core), Some(ticked)) = (self.core_if_open(), self.hooks.ticked) {
            let _inside = self.gate.enter(core.objects.platform.cpu());
            ticked(self);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Hooks;
    use crate::options::Options;
    use neap_base::virtual_platform::Virtual;
    use std::boxed::Box;
    use std::vec::Vec;

    /// By its own word, or because it has locked it.
    #[test]
    fn memory_that_the_program_keeps_goes_back_by_its_own_call_alone() {
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
            // Objects lie in a part of what the run was in.
            let most = matches!(keep, Keep::Nothing | Keep::Less);
            assert!(if most { gone > BYTES as u64 / 2 } else { gone == 0 }, "{keep:?}: {gone} bytes went");
            burst();
            mm.release_all();
            assert!(platform.released_bytes() > gone + BYTES as u64 / 2, "{keep:?}: by its own call");
            // SAFETY: nobody uses the manager any more.
            unsafe { mm.close() };
        }
    }

    /// The rest goes in later calls, and soon.
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
            // SAFETY: as before; no byte is used again.
            blocks.into_iter().for_each(|block| unsafe { mm.free(block) });
            let (mut most, mut intervals) = (0, 0);
            while platform.released_bytes() < BURST as u64 / 10 * 9 {
                intervals += 1;
                assert!(intervals < 10, "{} bytes after ten intervals", platform.released_bytes());
                platform.advance(400_000_000);
                for _ in 0..400 {
                    let before = platform.released_bytes();
                    // SAFETY: a run that nobody uses: the slow way.
                    unsafe { mm.free(mm.allocate(50_000)) };
                    most = most.max(platform.released_bytes() - before);
                }
            }
            assert!(most <= IN_CALL + IN_CALL / 4, "{most} bytes within two calls, small {small}");
            // SAFETY: nobody uses the manager any more.
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
