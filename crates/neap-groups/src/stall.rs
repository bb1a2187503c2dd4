//! Time for which a group was stalled on memory, counted as the kernel's PSI counts `some`.
//!
//! # Design
//!
//! A thread or future is *stalled* while it waits for room, is delayed above a `high`, or reclaims
//! within a charge. A group is stalled while at least one thread or future of it or of a descendant
//! is. Stalls that overlap thus count once.
//!
//! Each group counts its running stalls. The first stall stores the time when it begins. When the
//! last one ends, the time since then is added to the group's sum. Each stall has an entry in the
//! table of waiters, even if it is not a request. So a forked child forgets the stalls of its
//! parent's threads together with the waiters.
//!
//! # Invariants
//!
//! The group of an entry that counts as a stall exists: [`Groups::delete`] ends the stalls of the
//! group that it deletes. So a stall ends at the same groups at which it began.
//!
//! # Locking
//!
//! The mutex of the queues protects the counts. A thread takes it before and after it waits or
//! reclaims.

use crate::group::Group;
use crate::groups::{Groups, Reclaimer};
use crate::id::Payer;
use crate::queue::{Queues, Waiter, state};
use crate::wait::FOREVER;
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_percpu::Host;

impl Queues<'_> {
    /// Counts an entry at its group and all ancestors, unless the group is deleted. The caller must
    /// be within a read.
    pub(crate) fn begin_stall(&self, waiter: &Waiter) {
        let tree = self.tree();
        let Some(slot) = tree.owners.own(waiter.payer().id()) else { return };
        waiter.counts.store(1, Ordering::Relaxed);
        for (_, group) in tree.upwards(slot) {
            if group.stalls.fetch_add(1, Ordering::Relaxed) == 0 {
                group.stalled_since.store(waiter.since(), Ordering::Relaxed);
            }
        }
    }

    /// Ends the stall of an entry, unless it has ended already. The caller must be within a read.
    pub(crate) fn end_stall(&self, waiter: &Waiter, now: u64) {
        if waiter.counts.swap(0, Ordering::Relaxed) == 0 {
            return;
        }
        let tree = self.tree();
        let Some(behind) = tree.owners.behind(waiter.payer().id()) else { return };
        for (_, group) in tree.upwards(behind.slot()) {
            if group.stalls.fetch_sub(1, Ordering::Relaxed) == 1 {
                let time = now.saturating_sub(group.stalled_since.load(Ordering::Relaxed));
                group.stalled.fetch_add(time, Ordering::Relaxed);
            }
        }
    }
}

impl Groups {
    /// Runs `body`, in which the calling thread is stalled on memory of a payer's group. The caller
    /// must be outside the fork gate; `body` must not unwind.
    ///
    /// The time does not count if there is no memory for an entry.
    pub fn stalled<H: Reclaimer, R>(&self, host: &H, payer: Payer, body: impl FnOnce() -> R) -> R {
        let handle = host.inside(|inside| {
            let mut queues = self.waiters.lock(inside, &self.tree);
            let _reading = self.rcu.enter();
            queues.add(host.platform(), payer, 0, FOREVER, state::STALLED).ok()
        });
        let answer = body();
        host.inside(|inside| {
            let mut queues = self.waiters.lock(inside, &self.tree);
            let _reading = self.rcu.enter();
            // In a child that `body` forked, the entry is gone.
            if let Some(handle) = handle.filter(|&handle| queues.of(handle).is_some()) {
                // Only a future has a waker.
                let _ = queues.free(handle.index, host.platform().precise());
            }
        });
        answer
    }

    /// Returns the microseconds in which a group was stalled, up to now.
    pub(crate) fn stalled_us<H: Host>(&self, inside: &Inside<'_>, host: &H, group: &Group) -> u64 {
        let _queues = self.waiters.lock(inside, &self.tree);
        let running = match group.stalls.load(Ordering::Relaxed) {
            0 => 0,
            _ => host.platform().precise().saturating_sub(group.stalled_since.load(Ordering::Relaxed)),
        };
        (group.stalled.load(Ordering::Relaxed) + running) / 1000
    }
}
