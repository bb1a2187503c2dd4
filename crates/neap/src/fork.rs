//! Closing a manager for fork, and opening it again. This concerns the fork gate, the restartable
//! sequences, the locks of CPUs, and the clock of callbacks. [`process`](crate::process) lists all
//! steps of a fork.

use crate::mm::Mm;
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_os::clock;

/// Number of checks of the gate after which the thread yields. It naps after each later check.
const POLL_YIELDS_MAX: u32 = 20;

/// Nanoseconds of a nap.
const POLL_SLEEP_NS: u64 = 50_000;

/// Most naps while another thread holds the lock of a CPU without restartable sequences. They take
/// about a second. The wait is bounded, since this thread may hold the lock itself.
const LOCK_SLEEPS_MAX: u32 = 10_000;
/// One nap for a CPU's lock counts as so many checks of the gate.
const POLLS_PER_LOCK_SLEEP: u32 = 10;

impl<P: Platform> Mm<P> {
    /// Closes the gate and the restartable sequences. Afterwards every object and page is in
    /// exactly one structure. This thread then holds the locks of the CPUs without restartable
    /// sequences, and no other lock is held.
    ///
    /// `patience` gets the number of checks that found a thread in a slow path, and returns whether
    /// to wait longer. The sequences stay open if `patience` returns false first. They also stay
    /// open if a forking signal handler has interrupted a slow path of this thread. Rows and locks
    /// may be in use then.
    pub(crate) fn close_for_fork(&self, patience: &dyn Fn(u32) -> bool) {
        self.wait_until_opened();
        if self.gate.close_again() {
            return;
        }
        let Some(core) = self.core_if_open() else {
            // No thread is inside. If another thread makes a core meanwhile, opening the gate after
            // `close_in_vain` does not touch that core.
            self.gate.close_in_vain();
            return;
        };
        // Most slow paths take a microsecond. A slow path of a preempted thread takes as long as
        // the scheduler lets that thread wait.
        let mut seen = 0;
        let stop_clock = || _ = core.reclaim.get().inspect(|reclaim| reclaim.clock.stop(clock::precise()));
        let empty = self.gate.close(|| {
            // From here on the gate is this thread's.
            stop_clock();
            seen = u32::saturating_add(seen, 1);
            if seen < POLL_YIELDS_MAX {
                core.objects.platform.pause()
            } else {
                core.objects.platform.sleep(POLL_SLEEP_NS)
            }
            patience(seen)
        });
        stop_clock();
        // A lock is held for a few instructions, unless its holder does not run.
        let mut naps = 0;
        let wait = || {
            core.objects.platform.sleep(POLL_SLEEP_NS);
            naps += 1;
            naps < LOCK_SLEEPS_MAX && patience(naps * POLLS_PER_LOCK_SLEEP)
        };
        if empty && core.objects.cpu_caches.close_table(&core.objects.platform, wait).is_err() {
            // The fence failed, or another thread kept a lock. A sequence has a few instructions.
            // So after some pauses all sequences have very likely ended.
            (0..POLL_YIELDS_MAX).for_each(|_| core.objects.platform.pause());
        }
    }

    /// Opens the gate and the sequences again. If a signal handler forked during another fork of
    /// this thread, only the other fork opens them. Returns `false` if this thread has not closed
    /// the gate. This is then the end of the interrupted fork, in the child of the handler's fork.
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
            // This comes before the gate opens, since the next thread that closes it stops a
            // running clock.
            core.reclaim.get().inspect(|reclaim| reclaim.clock.go(clock::precise()));
        }
        self.gate.open();
        true
    }

    /// Opens the gate and the sequences again in the child, which has one thread. Removes the state
    /// that other threads of the parent left.
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
            // SAFETY: the caller is the only thread of the child. A forking thread is no reader, so
            // it does not rely on groups that it found before.
            unsafe { grouped.forget_others() };
        }
        if let Some(reclaiming) = self.reclaiming_if_made() {
            // SAFETY: the caller is the only thread of the child. A forking thread is no reader, so
            // it does not rely on a read that it began before.
            unsafe { reclaiming.forget_others() };
        }
        // This comes before the gate opens. The thread that closed the gate may enter it.
        self.core_if_open().inspect(|core| core.renew_profile(self));
        self.reopen_after_fork();
        // This comes after the sequences are open again, so that `store_live` counts the stacks.
        // SAFETY: the child has no other thread.
        self.core_if_open().inspect(|core| unsafe { core.store_live() });
    }
}
