//! neap's own thread: when there is one, how it is woken, and how it ends.
//!
//! # Design
//! - A call that allocates or frees never makes it. It is made by [`Mm::start_background`], which
//!   the preload library calls
//!   when the program makes its first thread, and by calls that ask for something that only a thread can do: a registered
//!   shrinker, a subscription, a charge that is waited for.
//! - A process with one thread has none otherwise. There, and where the system refuses one, ticks
//!   are made from within calls
//!   ([`maintenance`](crate::maintenance)).
//! - It ticks while anything is cached. Then it sleeps without a deadline until a call that goes
//!   the slow way wakes it.
//! - It ends with the main thread ([`Mm::end_background`]), since the C library counts it: the
//!   process would not end with the
//!   last of the program's threads.
//!
//! # Locking
//! None. The state says what the thread is about to do; it sleeps on the
//! [helper's](neap_objects::helper) bell.

use crate::maintenance::Tick;
use crate::mm::{Core, Mm, Task};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use neap_base::platform::{Errno, Platform};
use neap_percpu::PerCpuData;
use neap_reclaim::without_reclaim;

/// No thread, and none was asked for.
const ABSENT: u32 = 0;
/// Ticking.
const AWAKE: u32 = 2;
/// Sleeping until woken.
const ASLEEP: u32 = 3;
/// None can be had (a sandbox) or none is wanted.
const NEVER: u32 = 4;
/// Ticking, and about to sleep if nothing happens meanwhile.
const DROWSY: u32 = 5;
/// It has ended for good.
const ENDED: u32 = 6;

/// What the thread and the calls that wake it share.
#[derive(Debug)]
pub(crate) struct Background {
    state: AtomicU32,
    /// A call wants the thread to come soon.
    soon: AtomicBool,
    /// The thread is to end.
    ending: AtomicBool,
    /// The thread for who joins it; 0 for none.
    id: AtomicUsize,
}

impl Background {
    pub(crate) const fn new(wanted: bool) -> Background {
        Background {
            state: AtomicU32::new(if wanted { ABSENT } else { NEVER }),
            soon: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            id: AtomicUsize::new(0),
        }
    }

    /// In a forked child there is no thread; one may be made again.
    pub(crate) fn forget(&self) {
        if self.state.load(Ordering::Relaxed) != NEVER {
            self.state.store(ABSENT, Ordering::Relaxed);
        }
        self.ending.store(false, Ordering::Relaxed);
        self.id.store(0, Ordering::Relaxed);
    }

    /// Whether there is a thread to tick, or to be woken.
    pub(crate) fn has_thread(&self) -> bool {
        matches!(self.state.load(Ordering::Relaxed), AWAKE | ASLEEP | DROWSY)
    }

    /// Whether it ticks, and will look once more at what is cached from now on.
    #[inline]
    fn is_awake(&self) -> bool {
        // Relaxed: the states only tell what to do next.
        self.state.load(Ordering::Relaxed) == AWAKE
    }

    /// Lets the thread tick once more if it is about to sleep. Returns whether it sleeps and has to
    /// be woken.
    fn keep_awake(&self) -> bool {
        // Release pairs with the Acquire of the exchange in `background`: the thread looks once
        // more.
        self.state.compare_exchange(DROWSY, AWAKE, Ordering::Release, Ordering::Relaxed) == Err(ASLEEP)
            // Release pairs with the Acquire of the thread's next look.
            && self.state.compare_exchange(ASLEEP, AWAKE, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Whether the thread is to end.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire) // Pairs with the Release in `end_background`.
    }

    /// Whether the thread sleeps until it is woken.
    pub(crate) fn is_asleep(&self) -> bool {
        // Acquire pairs with the Release of who wakes it.
        self.state.load(Ordering::Acquire) == ASLEEP
    }

    /// Whether the thread was wanted soon since this was last asked.
    pub(crate) fn is_wanted_soon(&self) -> bool {
        // Acquire pairs with the Release in `come_soon`.
        self.soon.swap(false, Ordering::Acquire)
    }

    /// The state in a word.
    pub(crate) fn state(&self) -> &'static str {
        match self.state.load(Ordering::Relaxed) {
            AWAKE | DROWSY => "awake",
            ASLEEP => "asleep",
            NEVER => "off",
            _ => "absent",
        }
    }
}

impl<P: Platform> Core<P> {
    /// What follows every call that went the slow way: wakes the thread, or ticks in its place. Not
    /// inside the gate.
    #[inline]
    pub(crate) fn after(&self, mm: &Mm<P>) {
        if !self.background.is_awake() {
            self.after_unless_awake(mm);
        }
    }

    #[cold]
    #[inline(never)]
    fn after_unless_awake(&self, mm: &Mm<P>) {
        if !self.background.has_thread() {
            self.after_without_thread(mm);
        } else if self.background.keep_awake() {
            self.objects.helper.ring();
        }
    }

    /// What follows a call for per-CPU data: wakes the thread, or does its work in its place where
    /// that is wanted now. Not inside the gate. A caller that is in a `hurry` leaves the work to
    /// others where there is no thread.
    pub(crate) fn after_per_cpu(&self, mm: &Mm<P>, data: &PerCpuData, hurry: bool) {
        let background = &self.background;
        if hurry && !background.has_thread() {
            return;
        }
        self.after(mm);
        let platform = &self.objects.platform;
        if data.is_work_wanted() && !background.has_thread() && !platform.is_isolated(platform.cpu()) {
            let _inside = mm.gate.enter(platform.cpu());
            data.tick_until(platform, &|| mm.gate.is_closed());
        }
    }

    /// Lets the thread come soon, from within anything: it is woken if it sleeps, and its nap ends.
    /// Where there is none it is the next call that ticks.
    pub(crate) fn come_soon(&self) {
        self.background.soon.store(true, Ordering::Release); // Pairs with the Acquire in `is_wanted_soon`.
        self.background.keep_awake();
        self.objects.helper.ring();
    }

    /// Makes the thread, if there is none and one may be made. Returns whether it did. Not inside
    /// the gate, and not from within a call that allocates or frees.
    pub(crate) fn make_thread(&self, mm: &Mm<P>) -> bool {
        let Background { state, id, .. } = &self.background;
        // Who makes it says AWAKE at once: it will be.
        if mm.hooks.spawn.is_none()
            || state.compare_exchange(ABSENT, AWAKE, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return false;
        }
        self.objects.helper.set_present(true);
        match self.spawn(mm, Task::Maintain) {
            Ok(made) => {
                // Release pairs with the Acquire in `end_background`.
                id.store(made, Ordering::Release);
                true
            }
            Err(error) => {
                self.objects.helper.set_present(false);
                // A limit of threads that was met is one for a moment.
                state.store(if error == Errno::AGAIN { ABSENT } else { NEVER }, Ordering::Relaxed);
                false
            }
        }
    }

    /// Makes a thread of neap's own. No group is charged for what that allocates in this thread,
    /// and no cache is asked to shrink for it, as far as that can be:
    /// 1. A thread in a group at its limit makes the reclaimer that is to make room. 2. The C
    ///    library allocates for that,
    ///    under preload by this very manager. 3. That charge would post a job, and wait for the thread of 1.
    pub(crate) fn spawn(&self, mm: &Mm<P>, task: Task) -> Result<usize, Errno> {
        let Some(spawn) = mm.hooks.spawn else { return Err(Errno::NOSYS) };
        let before = mm.enter(None);
        let made = without_reclaim(|| spawn(mm, task));
        mm.leave(before);
        made
    }

    /// Empties the stacks of all CPUs for allocations that may not fence.
    pub(crate) fn help(&self, mm: &Mm<P>) {
        self.objects.helper.serve(|| {
            // Who asks may be inside, and a fork waits for it.
            let Some(_inside) = mm.gate.try_enter(self.objects.platform.cpu()) else { return false };
            let used = self.objects.slots.used();
            used.iter().take_while(|_| !mm.gate.is_closed()).for_each(|cpu| _ = self.objects.drain_cpu(cpu, |_| true));
            true
        });
    }
}

impl<P: Platform> Mm<P> {
    /// Makes neap's thread if it may have one (`NEAP=background:off`) and has none: about two
    /// seconds after a burst the memory of it is back with the system then, also if all threads are
    /// idle. Returns whether there is one.
    ///
    /// The preload library calls this when the program makes a thread. Other programs call it where
    /// they have made their threads, and not while they hold a lock that an allocation may need:
    /// making a thread allocates. A child of `fork` has none, and calls it again.
    pub fn start_background(&self) -> bool {
        let Some(core) = self.core() else { return false };
        core.make_thread(self) || core.background.has_thread()
    }

    /// Ends neap's thread for good, and calls `join` with what its making answered to wait for it.
    /// Memory goes back from within calls from now on.
    pub(crate) fn end_background(&self, join: impl FnOnce(usize)) {
        let Some(core) = self.core_if_open() else { return };
        let Background { state, ending, id, .. } = &core.background;
        ending.store(true, Ordering::Release); // Pairs with the Acquire in `is_ending`.
        // None is made from here on.
        _ = state.compare_exchange(ABSENT, ENDED, Ordering::Relaxed, Ordering::Relaxed);
        core.objects.helper.set_present(false);
        core.objects.helper.ring();
        // Acquire pairs with the Release in `make_thread`.
        let made = id.swap(0, Ordering::Acquire);
        if made != 0 {
            join(made);
        }
    }

    /// What the thread does: ticks while there is anything to give back, then sleeps until it is
    /// woken.
    pub(crate) fn background(&self) {
        let Some(core) = self.core_if_open() else { return };
        let state = &core.background.state;
        let interval = u64::from(core.options.interval) * 1_000_000;
        let mut nap = interval;
        while core.nap(self, nap) {
            // What is cached from here on turns DROWSY back into AWAKE, so it is not slept over:
            // 1. This thread says DROWSY. 2. It looks at CPU 0. 3. A thread frees on CPU 0 and says
            //    AWAKE. 4. This thread finds the rest empty, but not DROWSY any more, and ticks
            //    again. SeqCst: before every look of the tick. Pairs with the load in `after`.
            state.store(DROWSY, Ordering::SeqCst);
            let Tick { left, groups, .. } = core.tick(self, core.objects.platform.now(), true);
            self.deliver();
            nap = groups.map_or(interval, |next| next.min(interval));
            // Acquire pairs with the Release in `keep_awake`.
            if left || state.compare_exchange(DROWSY, ASLEEP, Ordering::Acquire, Ordering::Relaxed).is_err() {
                state.store(AWAKE, Ordering::Relaxed);
                continue;
            }
            self.ticked();
            core.sleep_until_woken(self);
            // Woken by a request, it is not what the word says.
            state.store(AWAKE, Ordering::Relaxed);
        }
        state.store(ENDED, Ordering::Relaxed);
    }
}
