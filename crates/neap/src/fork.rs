//! Closing a manager for fork, and opening it again. This concerns the fork gate, the restartable
//! sequences, the locks of CPUs, and the clock of callbacks. [`process`](crate::process) has all
//! steps of a fork.

use crate::mm::Mm;
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_os::clock;

/// Number of looks at the gate that are followed by a yield. A nap follows each later look.
const YIELDS: u32 = 20;

/// Nanoseconds of a nap.
const NAP: u64 = 50_000;

/// Most naps while the lock of an Atomic CPU is held: about a second. This thread may hold the lock
/// itself.
const LOCK_NAPS: u32 = 10_000;
/// Looks at the gate that one nap for a CPU's lock counts as.
const LOCK_NAP: u32 = 10;

impl<P: Platform> Mm<P> {
    /// Closes the gate and the sequences. Afterwards every object and page is in exactly one
    /// structure. This thread then holds the locks of the Atomic CPUs, and no other lock is held.
    ///
    /// `patience` gets the number of looks that found a thread in a slow path, and returns whether
    /// to wait on. The sequences stay open if `patience` returns false first, or if this thread
    /// itself is in a slow path that a forking signal handler has interrupted. Rows and locks may
    /// be in use then.
    pub(crate) fn close_for_fork(&self, patience: &dyn Fn(u32) -> bool) {
        self.wait_until_opened();
        if self.gate.close_again() {
            return;
        }
        let Some(core) = self.core_if_open() else {
            // No thread is inside. After `close_in_vain`, opening does not touch a core that is
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
            // The fence failed, or a lock stayed held. A sequence has a few instructions, so all
            // sequences have very likely ended after some pauses.
            (0..YIELDS).for_each(|_| core.objects.platform.pause());
        }
    }

    /// Opens the gate and the sequences again. If a signal handler forked during another fork of
    /// this thread, the other fork opens them. Returns `false` if the gate is not closed: this is
    /// then the end of the interrupted fork, in the child of the handler's fork.
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

    /// Opens the gate and the sequences again in the child, which has one thread. Forgets all other
    /// threads.
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
        // Before the gate opens: the thread that closed the gate may enter it.
        self.core_if_open().inspect(|core| core.renew_profile(self));
        self.reopen_after_fork();
        // After the sequences are open again, so that `store_live` counts the stacks.
        // SAFETY: the child has no other thread.
        self.core_if_open().inspect(|core| unsafe { core.store_live() });
    }
}
