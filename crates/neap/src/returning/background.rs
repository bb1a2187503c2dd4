//! neap's own thread: when neap makes it, how calls wake it, and how it ends.
//!
//! # Design
//! - A call that allocates or frees never makes the thread. [`Mm::start_background`] does, which
//!   the preload library calls when the program makes its first thread. Calls for work that only a
//!   thread can do make it, too. They register a shrinker, subscribe to events, or charge and wait.
//! - Otherwise, a process with one thread has no thread of neap's. In such a process, and where the
//!   system refuses a thread, slow calls tick ([`maintenance`](crate::returning::maintenance)).
//! - The thread ticks while anything is cached. Then it sleeps without a deadline, until a slow
//!   call wakes it. With a limit that [follows the container](crate::limits::following) it wakes
//!   once a second.
//! - neap's thread ends with the main thread ([`Mm::end_background`]). The C library counts it like
//!   the program's threads, so it would keep a process alive whose other threads have ended.
//!
//! # Locking
//! This module has no lock. An atomic state says what the thread does next. The thread sleeps on
//! the bell of the [helper](neap_objects::helper).

use crate::mm::{Core, Mm, Task};
use crate::returning::maintenance::Tick;
use crate::state::background::ThreadState::{Absent, Disabled, Ended, GoingToSleep, Running, Sleeping};
use crate::state::background::{Background, fence_unless_exchanged};
use core::sync::atomic::Ordering;
use neap_base::platform::{Errno, Platform};
use neap_percpu::{PerCpuData, Wait};
use neap_reclaim::without_reclaim;

impl<P: Platform> Core<P> {
    /// Wakes neap's thread after a slow call, or ticks in its place.
    #[inline]
    pub(crate) fn after_slow_path(&self, mm: &Mm<P>) {
        if !self.background.is_awake() {
            self.wake_or_tick(mm);
        }
    }

    #[cold]
    #[inline(never)]
    fn wake_or_tick(&self, mm: &Mm<P>) {
        if !self.background.has_thread() {
            self.after_without_thread(mm);
        } else if self.background.keep_awake() {
            self.objects.helper.ring();
        }
    }

    /// Wakes neap's thread after a call for per-CPU data, or does due work in its place. If there
    /// is no thread, a caller that may not wait long does no work.
    pub(crate) fn after_per_cpu(&self, mm: &Mm<P>, data: &PerCpuData, wait: Wait) {
        let background = &self.background;
        if wait != Wait::Long && !background.has_thread() {
            return;
        }
        self.after_slow_path(mm);
        let platform = &self.objects.platform;
        if data.is_work_wanted() && !background.has_thread() && !platform.is_isolated(platform.cpu()) {
            let _inside = mm.gate.enter(platform.cpu());
            data.tick_until(platform, &|| mm.gate.is_closed());
        }
    }

    /// Requests an early tick: wakes the thread, or ends its nap. Callable in any context. Without
    /// a thread a later call ticks.
    pub(crate) fn request_tick(&self) {
        // Release pairs with the Acquire in `take_tick_request`.
        self.background.tick_requested.store(true, Ordering::Release);
        self.background.keep_awake();
        self.objects.helper.ring();
    }

    /// Makes neap's thread, if there is none and one may be made. Returns whether it did. Must not
    /// be called in a call that allocates or frees.
    pub(crate) fn ensure_thread(&self, mm: &Mm<P>) -> bool {
        let background = &self.background;
        // The state is Running even before the thread exists, since the thread begins so.
        if mm.hooks.spawn.is_none() || !background.change(Absent, Running, Ordering::Relaxed) {
            return false;
        }
        self.objects.helper.set_present(true);
        match self.spawn(mm, Task::Maintain) {
            Ok(made) => {
                // Release pairs with the Acquire in `end_background`.
                background.id.store(made, Ordering::Release);
                true
            }
            Err(error) => {
                self.objects.helper.set_present(false);
                // A reached limit of threads may be temporary.
                background.set(if error == Errno::AGAIN { Absent } else { Disabled }, Ordering::Relaxed);
                false
            }
        }
    }

    /// Makes a thread of neap's. Meanwhile, the calling thread is in no group, and its allocations
    /// request no reclaim. Otherwise a thread could wait for itself:
    /// 1. A thread in a group at its limit makes the reclaimer that is to make room.
    /// 2. The C library allocates for that, under preload by this very manager.
    /// 3. That charge posts a job, and waits for the reclaimer of step 1.
    pub(crate) fn spawn(&self, mm: &Mm<P>, task: Task) -> Result<usize, Errno> {
        let Some(spawn) = mm.hooks.spawn else { return Err(Errno::NOSYS) };
        let before = mm.enter(None);
        let made = without_reclaim(|| spawn(mm, task));
        mm.leave(before);
        made
    }

    /// Serves allocations that wait for neap's thread: drains the stacks of all CPUs, because these
    /// allocations may not make the required fences. Before that, reads the container's limit anew
    /// for a limit that follows it, and writes a heap profile if one is wanted.
    pub(crate) fn help(&self, mm: &Mm<P>) {
        self.objects.helper.serve(|| {
            self.look_for_allocation(mm);
            self.write_wanted_profile(mm);
            // Only tries to enter: the asking thread may be inside the gate, and a fork may wait
            // for that thread.
            let Some(_inside) = mm.gate.try_enter(self.objects.platform.cpu()) else { return false };
            let used = self.objects.cpu_caches.used();
            used.iter().take_while(|_| !mm.gate.is_closed()).for_each(|cpu| _ = self.objects.drain_cpu(cpu, |_| true));
            true
        });
    }
}

impl<P: Platform> Mm<P> {
    /// Makes neap's thread, if there is none and the options allow one (not `NEAP=background:off`).
    /// With it, the memory of a burst is released about two seconds later, even if all threads are
    /// idle. Returns whether there is one.
    ///
    /// The preload library calls this when the program makes a thread. Other programs call it after
    /// they have made their threads, and not while they hold a lock that an allocation may take:
    /// making a thread allocates. A child of `fork` has no thread, and calls it again.
    pub fn start_background(&self) -> bool {
        let Some(core) = self.core() else { return false };
        core.ensure_thread(self) || core.background.has_thread()
    }

    /// Ends neap's thread for good, and calls `join` with its handle to wait for it. Afterwards
    /// calls release memory.
    pub(crate) fn end_background(&self, join: impl FnOnce(usize)) {
        let Some(core) = self.core_if_open() else { return };
        let background @ Background { ending, id, .. } = &core.background;
        ending.store(true, Ordering::Release); // Pairs with the Acquire in `is_ending`.
        // From here on, `ensure_thread` makes no thread.
        background.change(Absent, Ended, Ordering::Relaxed);
        core.objects.helper.set_present(false);
        core.objects.helper.ring();
        // Acquire pairs with the Release in `ensure_thread`.
        let made = id.swap(0, Ordering::Acquire);
        if made != 0 {
            join(made);
        }
    }

    /// Body of the thread: ticks while there is memory to release, then sleeps until woken.
    pub(crate) fn background(&self) {
        let Some(core) = self.core_if_open() else { return };
        let background = &core.background;
        let mut nap = core.settings.interval();
        while core.nap(self, nap) {
            // A call that caches memory from here on turns GoingToSleep back into Running, so the
            // thread ticks again instead of sleeping:
            //
            // | this thread | thread B |
            // |---|---|
            // | 1. stores GoingToSleep | |
            // | 2. looks at CPU 0 | |
            // | | 3. frees on CPU 0, stores Running |
            // | 4. finds the rest empty, but Running: ticks again | |
            //
            // SeqCst orders the store before every look of the tick. Pairs with the fence in
            // `is_awake`, which `after_slow_path` calls.
            background.set(GoingToSleep, Ordering::SeqCst);
            fence_unless_exchanged();
            let Tick { left, soon, .. } = core.tick(self, core.objects.platform.now());
            self.deliver();
            let interval = core.settings.interval();
            nap = soon.map_or(interval, |next| next.min(interval));
            // Acquire pairs with the Release in `keep_awake`.
            if !left && background.change(GoingToSleep, Sleeping, Ordering::Acquire) {
                self.ticked();
                core.sleep_until_woken(self);
            }
            // The state may be another one: work is left, or a request woke the thread without
            // changing the state.
            background.set(Running, Ordering::Relaxed);
        }
        background.set(Ended, Ordering::Relaxed);
    }
}
