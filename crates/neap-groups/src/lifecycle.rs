//! Life of a group: creation, deletion, and the end of its slot and id after a grace period.
//!
//! # Design
//!
//! 1. [`Groups::create`] opens the group's counts and puts the group into the tree.
//! 2. [`Groups::delete`] takes it out of the tree. Its items and charges become its parent's. From
//!    now on its id leads to the parent, its heir.
//! 3. A [`Groups::tick`] begins a grace period for all groups deleted so far, unless another period
//!    has not ended. Readers that found such a group may still use it.
//! 4. A tick after the last such reader has gone empties stocks that hold bytes of these groups,
//!    moves the remaining counts to the heir, closes the per-CPU data, and frees slot and id.
//!
//! # Locking
//!
//! A tick only tries the mutex of the grace period. If another thread holds it, that thread ends
//! deleted groups.

use crate::counts_memory::{counts_of_new_group, drop_counts};
use crate::error::GroupError;
use crate::groups::{Groups, Reclaimer};
use crate::id::{GroupId, Payer};
use crate::id_table::GraceNeeds;
use crate::queue::TICK_INTERVAL_NS;
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_percpu::Owner;

/// Maximum grace-period polls in [`Groups::end_deleted`]; slightly more than an idle system needs.
const GRACE_POLLS_MAX: u32 = 4;
/// Maximum attempts to end deleted groups before tables grow, and the sleep between them.
const GRACE_SLEEPS_MAX: u32 = 100;
const GRACE_SLEEP_NS: u64 = 1_000_000;

impl Groups {
    /// Makes a group below `parent`. The group's counts are per-CPU data, with an owner for this
    /// group alone.
    ///
    /// Tables never shrink. If a table would have to grow although deleted groups hold a quarter of
    /// it, this ends deleted groups first. That can take a tenth of a second if a thread that
    /// charges was preempted.
    ///
    /// # Errors
    /// [`GroupError`] gives the reason. The tree of groups is unchanged then.
    pub fn create<H: Reclaimer>(&self, host: &H, parent: GroupId, name: &str) -> Result<GroupId, GroupError> {
        for _ in (0..GRACE_SLEEPS_MAX).take_while(|_| host.inside(|_| self.tree.is_crowded())) {
            if self.end_deleted(host) && host.inside(|_| self.tree.is_crowded()) {
                host.platform().sleep(GRACE_SLEEP_NS);
            }
        }
        let per_cpu = counts_of_new_group(host, self.nodes)?;
        let made = host.inside(|_| self.tree.create(host.platform(), parent, name, per_cpu));
        made.inspect_err(|_| drop_counts(host, per_cpu.0))
    }

    /// Deletes a group without children. The items attached to it move to its parent
    /// ([`Reclaimer::offline`]), and then its charges.
    ///
    /// Bytes that are uncharged later go to the parent. Charging the group fails from now on,
    /// except from a stock filled a moment ago. Its slot and id are freed a few ticks later.
    ///
    /// # Errors
    /// [`GroupError`] gives the reason. The tree of groups is unchanged then.
    pub fn delete<H: Reclaimer>(&self, host: &H, id: GroupId) -> Result<(), GroupError> {
        host.inside(|inside| {
            let subscribers = self.subscribers.lock(inside);
            // Within this read the slot is not reused before the subscriptions have stored the
            // group's counts.
            let _reading = self.rcu.enter();
            let slot = self.tree.delete(id, |child, parent| host.offline(inside, self, child, parent))?;
            let is_news = self.tree.group(slot).is_some_and(|group| self.subscribers.orphan(&subscribers, group));
            drop(subscribers);
            self.tree.group(slot).inspect(|group| self.reparent_counts(host, group));
            if is_news {
                host.request_tick(inside);
            }
            self.end_waits(inside, host, id);
            Ok(())
        })
    }

    /// Does pending work: empties idle stocks, ends deleted groups, and serves waiters.
    ///
    /// A CPU's stocks are idle if they have not changed since the last call. Returns the
    /// nanoseconds until the next call is needed; `None` if nothing is left. The host calls this at
    /// intervals, outside the fork gate. It does not wait for the end of a grace period.
    pub fn tick<H: Reclaimer>(&self, host: &H) -> Option<u64> {
        let left = host.inside(|inside| {
            let out = |payer, bytes| self.uncharge_counters(inside, host, payer, bytes);
            let stocks = self.stocks.drain_idle(host.platform(), out);
            // A CPU that cannot be fenced must not cause further ticks for ever.
            self.reap(inside, host) || stocks.left && !stocks.skipped
        });
        let next = self.service_waiters(host, host.platform().precise());
        next.or(left.then_some(TICK_INTERVAL_NS))
    }

    /// Ends deleted groups, unless other threads may still be reading them. Returns whether any are
    /// left. For hosts that may not tick soon. Fences CPUs.
    pub fn end_deleted<H: Reclaimer>(&self, host: &H) -> bool {
        (0..GRACE_POLLS_MAX).all(|_| host.inside(|inside| self.reap(inside, host)))
    }

    /// Ends deleted groups that no reader can have found. Returns whether any are left.
    fn reap<H: Reclaimer>(&self, inside: &Inside<'_>, host: &H) -> bool {
        if self.tree.grace_needs() == GraceNeeds::default() {
            return false;
        }
        let Some(mut since) = self.reaping.try_lock() else { return true };
        if self.tree.grace_needs().to_end {
            if !self.has_passed(inside, host.platform(), *since) {
                return true;
            }
            let gone = |payer: Payer| !payer.is_of_heir() && !self.tree.owners.exists(payer.id());
            let out = |payer, bytes| self.uncharge_counters(inside, host, payer, bytes);
            if self.stocks.drain(host.platform(), gone, out) > 0 {
                return true;
            }
            self.tree.end_grace(|group| {
                self.reparent_counts(host, group);
                let owner = Owner::from_bits(group.per_cpu.load(Ordering::Relaxed));
                // SAFETY: before the grace period the id led to the heir; its readers have gone,
                // so no thread can find the counts or allocate for the owner. The owner was opened
                // for this group alone, so there is no error.
                let _ = unsafe { host.data().close_owner(owner) };
            });
        }
        let begins = self.tree.grace_needs().to_begin;
        if begins {
            self.tree.begin_grace();
            *since = self.rcu.mark();
        }
        begins
    }
}
