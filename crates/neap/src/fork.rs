//! Closing a manager for fork, and opening it again: gate, sequences, CPU locks, and the clock of
//! callbacks. See [`process`](crate::process) for the whole.

use crate::mm::Mm;
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_os::clock;

/// Looks at the gate with only a yield in between, before naps.
const YIELDS: u32 = 20;

/// Nanoseconds of a nap.
const NAP: u64 = 50_000;

/// Most naps for an Atomic CPU's lock: about a second. This thread may hold it itself.
const LOCK_NAPS: u32 = 10_000;
/// Looks at the gate that one such nap counts as.
const LOCK_NAP: u32 = 10;

impl<P: Platform> Mm<P> {
    /// Closes the gate and the sequences. Afterwards every object and page is in exactly one
    /// structure, and no lock is held but those of Atomic stacks, by this thread.
    ///
    /// `patience` gets the number of vain looks, and says whether to wait on for slow paths. If it
    /// ends first, or a slow path is this thread's own, interrupted by a signal handler that forks,
    /// then the sequences stay open: rows and locks may be in use.
    pub(crate) fn close_for_fork(&self, patience: &dyn Fn(u32) -> bool) {
        self.wait_until_opened();
        if self.gate.close_again() {
            return;
        }
        let Some(core) = self.core_if_open() else {
            // No thread is inside. `close_in_vain`, so that opening leaves alone a core that is
            // made meanwhile.
            self.gate.close_in_vain();
            return;
        };
        // Most slow paths take a microsecond. One of a preempted thread takes as long as the
        // scheduler lets it wait.
        let mut seen = 0;
        let stop_clock = || _ = core.reclaim.get().inspect(|reclaim| reclaim.clock.stop(clock::precise()));
        let empty = self.gate.close(|| {
            // From here on the gate is this thread's.
            stop_clock();
            seen = u32::saturating_add(seen, 1);
            if seen < YIELDS {
                core.objects.platform.pause()
            } else {
                core.objects.platform.sleep(NAP)
            }
            patience(seen)
        });
        stop_clock();
        // A lock is held for a few instructions, unless its holder does not run.
        let mut naps = 0;
        let wait = || {
            core.objects.platform.sleep(NAP);
            naps += 1;
            naps < LOCK_NAPS && patience(naps * LOCK_NAP)
        };
        if empty && core.objects.cpu_caches.close_table(&core.objects.platform, wait).is_err() {
            // No fence, or a lock that is never free. A sequence has a few instructions, so it has
            // ended after some turns of other threads. Not proved.
            (0..YIELDS).for_each(|_| core.objects.platform.pause());
        }
    }

    /// Opens both again, or leaves that to the fork that this one has interrupted. Returns `false`
    /// if nothing is closed: then this is such a fork's end, in the child of the fork that
    /// interrupted it.
    pub(crate) fn reopen_after_fork(&self) -> bool {
        if !self.gate.is_closed_by_me() {
            return false;
        }
        if self.gate.open_again() {
            return true;
        }
        if let Some(core) = self.core_if_open() {
            if self.gate.is_empty() {
                core.objects.cpu_caches.open_table(&core.objects.platform);
            }
            // Before the gate opens: the next thread that closes it stops a running clock.
            core.reclaim.get().inspect(|reclaim| reclaim.clock.go(clock::precise()));
        }
        self.gate.open();
        true
    }

    /// Opens both again in the child, which has one thread, and forgets all other threads.
    pub(crate) fn reopen_in_child(&self) {
        self.forget_opener();
        if let Some(core) = self.core_if_open() {
            core.background.forget();
            core.objects.helper.forget();
            // Relaxed: the child has one thread.
            self.own_thread.store(0, Ordering::Relaxed);
            core.page.renew();
        }
        self.gate.forget_again();
        self.gate.forget_others();
        if let Some(grouped) = self.groups_if_made() {
            // SAFETY: the child has no other thread, and the one that forks is no reader.
            unsafe { grouped.forget_others() };
        }
        if let Some(reclaiming) = self.reclaiming_if_made() {
            // SAFETY: the child has no other thread, and the forking one is no reader.
            unsafe { reclaiming.forget_others() };
        }
        // Before the gate opens, which it does not need in a process with one thread.
        self.core_if_open().inspect(|core| core.renew_profile(self));
        self.reopen_after_fork();
        // After the stacks are open again, so that they are counted.
        // SAFETY: the child has no other thread.
        self.core_if_open().inspect(|core| unsafe { core.store_live() });
    }
}
