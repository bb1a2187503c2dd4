//! Admission of waiters when there is room: the oldest first, with bounded overtaking.
//!
//! # Design
//!
//! A waiter is queued at the group that refused it. It is admitted only if it is not barred at any
//! group from the charged one up to the root. A group bars it if an older waiter waits there,
//! unless it may pass the oldest one. A waiter passes if it requests less than an eighth of the
//! oldest's bytes; at most [`PASSES_MAX`] pass each oldest waiter. So a large request does not
//! block small ones. It is still admitted, since passes are bounded and each waiter becomes the
//! oldest in time.
//!
//! If another group refuses a waiter, the waiter moves to that group's queue, by its age. A request
//! that exceeds a `max` is refused, since it would block all others.
//!
//! The thread that makes room charges the bytes to the waiter at once, so no other thread can take
//! them in between. A charge that does not wait takes available bytes, even if others wait.
//!
//! # Locking
//!
//! A thread holds the mutex of the queues for at most [`ATTEMPTS_PER_HOLD_MAX`] attempts. If more
//! waiters could be admitted, the thread requests a tick.

use crate::charge::OnLimit;
use crate::group::{Bound, DEEPEST, Group, NONE};
use crate::groups::{Groups, Reclaimer};
use crate::id::GroupId;
use crate::id_table::IdTarget;
use crate::queue::{Queues, Waiter, state};
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_os::futex::{self, Sharing};

/// Number of waiters that may pass the oldest waiter of a group.
pub(crate) const PASSES_MAX: u32 = 8;
/// A request may pass if it is below the bytes of the oldest, divided by this.
pub(crate) const PASSING_PART: u64 = 8;
/// Attempts during one hold of the mutex.
const ATTEMPTS_PER_HOLD_MAX: usize = 64;
/// Waiters behind the oldest that are examined.
const PASSING_CHECKS_MAX: usize = 64;

/// Work done during one hold of the mutex, and work left for after it.
pub(crate) struct Round {
    attempts: usize,
    /// Entries of threads to wake.
    woken: [u32; ATTEMPTS_PER_HOLD_MAX],
    threads: usize,
    /// There are wakers to call.
    due: bool,
    /// More waiters could be admitted.
    unfinished: bool,
}

impl Round {
    /// Returns whether no further waiter can be handled during this hold.
    pub(crate) fn is_over(&self) -> bool {
        self.attempts >= ATTEMPTS_PER_HOLD_MAX || self.threads >= ATTEMPTS_PER_HOLD_MAX
    }

    /// Returns whether there is more to do.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.unfinished
    }
}

/// Result of an attempt to admit a waiter.
enum Attempt {
    Granted,
    /// The group in this slot has no room, or an older waiter.
    Waits(u32),
    /// The request exceeds the limit of this group.
    Never(GroupId),
    Gone,
}

/// Returns whether a request may pass the oldest.
fn passes(bytes: u64, oldest: &Waiter) -> bool {
    bytes < oldest.bytes() / PASSING_PART && oldest.passed.load(Ordering::Relaxed) < PASSES_MAX
}

impl Groups {
    /// Admits waiters at the group that an id leads to, and at its ancestors. Returns whether more
    /// could be admitted.
    #[cold]
    #[inline(never)]
    pub(crate) fn admit<H: Reclaimer>(&self, inside: &Inside<'_>, host: &H, id: GroupId) -> bool {
        self.in_queues(inside, host, |queues, round| {
            let Some(behind) = self.tree.owners.behind(id) else { return false };
            let mut path = [NONE; DEEPEST as usize];
            let slots = self.tree.upwards(behind.slot()).zip(&mut path).map(|((slot, _), place)| *place = slot).count();
            // From the root downwards: waiters at a group may bar those further down.
            path[..slots].iter().rev().for_each(|&slot| self.admit_at(host, queues, slot, round));
            round.unfinished
        })
    }

    /// Runs `body` with the queues and within a read, and then wakes threads.
    pub(crate) fn in_queues<H: Reclaimer, R>(
        &self,
        inside: &Inside<'_>,
        host: &H,
        body: impl FnOnce(&mut Queues<'_>, &mut Round) -> R,
    ) -> R {
        let mut round =
            Round { attempts: 0, woken: [NONE; ATTEMPTS_PER_HOLD_MAX], threads: 0, due: false, unfinished: false };
        let answer = {
            let mut queues = self.waiters.lock(inside, &self.tree);
            let _reading = self.rcu.enter();
            body(&mut queues, &mut round)
        };
        // If an entry has a new owner by now, the wake-up is spurious.
        for waiter in round.woken[..round.threads].iter().filter_map(|&index| self.waiters.entry(index)) {
            futex::wake(&waiter.state, 1, Sharing::Process);
        }
        if round.due || round.unfinished {
            host.request_tick(inside);
        }
        answer
    }

    /// Admits waiters at the group in a slot, and publishes the bytes that the remaining waiters
    /// need.
    pub(crate) fn admit_at<H: Reclaimer>(&self, host: &H, queues: &Queues<'_>, slot: u32, round: &mut Round) {
        let Some(group) = self.tree.group(slot) else { return };
        if !group.has_waiters() && queues.first(group).is_none() {
            return;
        }
        loop {
            while let Some(oldest) = queues.first(group)
                && !round.is_over()
            {
                if !self.try_admit(host, queues, oldest, round) {
                    break;
                }
            }
            self.admit_passing(host, queues, group, round);
            let there_is_room = self.publish_wanted(queues, group);
            round.unfinished |= there_is_room && round.is_over();
            if !there_is_room || round.is_over() {
                return;
            }
        }
    }

    /// Admits waiters that may pass the oldest.
    fn admit_passing<H: Reclaimer>(&self, host: &H, queues: &Queues<'_>, group: &Group, round: &mut Round) {
        // `least` is the smallest request that was refused. No larger one fits either.
        let mut least = u64::MAX;
        let mut checks = 0;
        let mut next = queues.first(group).and_then(|oldest| queues.after(oldest));
        while let (Some(index), Some(oldest)) = (next, queues.first(group).and_then(|index| queues.get(index)))
            && checks < PASSING_CHECKS_MAX
            && !round.is_over()
        {
            checks += 1;
            // Read before `try_admit`, which may move the waiter to another list.
            next = queues.after(index);
            let bytes = queues.get(index).map_or(u64::MAX, Waiter::bytes);
            if bytes < least && passes(bytes, oldest) && !self.try_admit(host, queues, index, round) {
                least = bytes;
            }
        }
    }

    /// Publishes the least bytes that a waiter at a group needs. Returns whether there is room for
    /// them.
    pub(crate) fn publish_wanted(&self, queues: &Queues<'_>, group: &Group) -> bool {
        let Some(oldest) = queues.first(group) else { return group.want(0) };
        let Some(first) = queues.get(oldest) else { return false };
        let younger =
            core::iter::successors(queues.after(oldest), |&index| queues.after(index)).take(PASSING_CHECKS_MAX);
        let passing = younger.filter_map(|index| queues.get(index)).map(Waiter::bytes).filter(|&b| passes(b, first));
        group.want(passing.fold(first.bytes(), u64::min).max(1))
    }

    /// Admits a waiter, or moves it to the queue where it has to wait. Returns whether it left its
    /// queue.
    pub(crate) fn try_admit<H: Reclaimer>(&self, host: &H, queues: &Queues<'_>, index: u32, round: &mut Round) -> bool {
        let Some(waiter) = queues.get(index) else { return false };
        round.attempts += 1;
        match self.try_grant(host, queues, waiter, round) {
            Attempt::Waits(slot) if slot == waiter.place() => return false,
            Attempt::Waits(slot) => {
                queues.withdraw(index);
                queues.queue(index, slot);
                let Some(group) = self.tree.group(slot) else { return true };
                // Bytes stocked while this group had no waiters must be drained.
                round.unfinished |= !group.has_waiters();
                // Room may have come since: the thread that made it did not know of this waiter.
                round.unfinished |= self.publish_wanted(queues, group);
            }
            Attempt::Granted => self.end(host, queues, index, state::GRANTED, 0, round),
            Attempt::Never(group) => self.end(host, queues, index, state::REFUSED, group.to_bits(), round),
            Attempt::Gone => self.end(host, queues, index, state::GONE, 0, round),
        }
        true
    }

    /// Answers a waiter, and ends its stall. The caller must then call
    /// [`Groups::publish_wanted`] for its group.
    pub(crate) fn end<H: Reclaimer>(
        &self,
        host: &H,
        queues: &Queues<'_>,
        index: u32,
        state: u32,
        answer: u64,
        round: &mut Round,
    ) {
        queues.get(index).inspect(|waiter| queues.end_stall(waiter, host.platform().precise()));
        let was_queued = queues.get(index).is_some_and(|waiter| waiter.place() != NONE);
        queues.withdraw(index);
        if queues.conclude(index, state, answer) {
            round.due = true;
        } else if let (true, Some(place)) = (was_queued, round.woken.get_mut(round.threads)) {
            *place = index;
            round.threads += 1;
        }
    }

    /// Charges exactly the requested bytes of a waiter, if it may be admitted and all groups on its
    /// path have room. While a request waits, nothing is stocked.
    fn try_grant<H: Reclaimer>(&self, host: &H, queues: &Queues<'_>, waiter: &Waiter, round: &mut Round) -> Attempt {
        let (payer, bytes) = (waiter.payer(), waiter.bytes());
        let Some(IdTarget::Group(slot)) = self.tree.owners.behind(payer.id()) else { return Attempt::Gone };
        if let Some((_, small)) = self.tree.upwards(slot).find(|(_, group)| bytes > group.bound(Bound::Max)) {
            return Attempt::Never(small.id());
        }
        let older = |group: &Group| {
            let oldest = queues.get(queues.first(group)?)?;
            (oldest.ticket() < waiter.ticket()).then_some(oldest)
        };
        let is_barred = |group: &Group| older(group).is_some_and(|oldest| !passes(bytes, oldest));
        if let Some((barred, _)) = self.tree.upwards(slot).find(|(_, group)| is_barred(group)) {
            return Attempt::Waits(barred);
        }
        if let Some((full, _)) = self.tree.upwards(slot).find(|(_, group)| !group.has_room(bytes)) {
            return Attempt::Waits(full);
        }
        if self.charge_ancestors(slot, bytes, OnLimit::Refuse).is_err() {
            // A charge that does not wait was faster. Another waiter may have been refused because
            // of the bytes that were raised for a moment.
            round.unfinished = true;
            return Attempt::Waits(if waiter.place() == NONE { slot } else { waiter.place() });
        }
        for oldest in self.tree.upwards(slot).filter_map(|(_, group)| older(group)) {
            oldest.passed.fetch_add(1, Ordering::Relaxed);
        }
        self.record_charge(host, slot, payer, bytes);
        Attempt::Granted
    }
}
