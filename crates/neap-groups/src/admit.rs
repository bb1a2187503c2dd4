//! Who is let in when there is room: the oldest first, and who it is let past.
//!
//! Sits between whoever makes room and the queues. Who waits is queued at the group that refused it. At that group, and at each on its way, it
//! goes in only if nobody older waits there, or if it asks for less than an eighth of what the oldest there asks for, which lets
//! at most [`PASSES`] pass. So one that waits for much is not a wall for those that need little, and still has its turn: every one that passes
//! is counted against the oldest, and each becomes the oldest in time. A waiter that is refused by another group waits
//! there, as old as it is. What can never fit, because it is more than a limit, does not wait: it would hold everybody up.
//!
//! Bytes are handed over: who makes room charges them to the waiter at once, so that nobody else can take them in between. The mutex of the
//! queues is held for [`STEPS`] attempts at most; what is left to do then is done when somebody comes again, and that is asked for.
//! A charge that does not wait takes what there is, and does not ask who waits.

use crate::charge::How;
use crate::group::{Bound, DEEPEST, Group, NONE};
use crate::groups::{Groups, Reclaimer};
use crate::id::GroupId;
use crate::owners::Behind;
use crate::queue::{Queues, Waiter, state};
use core::sync::atomic::Ordering;
use neap_os::futex::{self, Scope};

/// How many may pass the oldest that waits at a group.
pub(crate) const PASSES: u32 = 8;
/// A request that passes asks for less than this part of what the oldest asks for.
pub(crate) const PASSING_PART: u64 = 8;
/// Attempts for one hold of the mutex.
const STEPS: usize = 64;
/// Waiters behind the oldest that are looked at.
const LOOKS: usize = 64;

/// What one hold of the mutex has done, and what is to be done after it.
pub(crate) struct Round {
    attempts: usize,
    /// Threads to wake.
    woken: [u32; STEPS],
    threads: usize,
    /// Wakers are to be called.
    due: bool,
    /// Somebody could be let in.
    unfinished: bool,
}

impl Round {
    /// Whether nobody else can be attended to in this hold.
    pub(crate) fn is_over(&self) -> bool {
        self.attempts >= STEPS || self.threads >= STEPS
    }

    /// Whether there was more to do.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.unfinished
    }
}

/// What became of an attempt to let somebody in.
enum Attempt {
    Granted,
    /// There is no room in the group in this slot, or somebody older waits there.
    Waits(u32),
    /// It is more than the limit of this group.
    Never(GroupId),
    Gone,
}

/// Whether a request is small enough to pass, and may.
fn passes(bytes: u64, oldest: &Waiter) -> bool {
    bytes < oldest.bytes() / PASSING_PART && oldest.passed.load(Ordering::Relaxed) < PASSES
}

impl Groups {
    /// Lets in who waits for room in the group of an id, or in those above it. Inside the gate.
    #[cold]
    #[inline(never)]
    pub(crate) fn admit<H: Reclaimer>(&self, host: &H, id: GroupId) -> bool {
        self.in_queues(host, |queues, round| {
            let Some(behind) = self.tree.owners.behind(id) else { return false };
            let mut path = [NONE; DEEPEST as usize];
            let slots = self.tree.upwards(behind.slot()).zip(&mut path).map(|((slot, _), place)| *place = slot).count();
            // From the top: who waits further down may be let in only past those.
            path[..slots].iter().rev().for_each(|&slot| self.admit_at(host, queues, slot, round));
            round.unfinished
        })
    }

    /// Runs `body` with the queues and within a read, and then wakes whom it concerns. Inside the gate.
    pub(crate) fn in_queues<H: Reclaimer, R>(
        &self,
        host: &H,
        body: impl FnOnce(&mut Queues<'_>, &mut Round) -> R,
    ) -> R {
        let mut round = Round { attempts: 0, woken: [NONE; STEPS], threads: 0, due: false, unfinished: false };
        let answer = {
            let mut queues = self.waiters.lock(&self.tree);
            let _reading = self.rcu.enter();
            body(&mut queues, &mut round)
        };
        // An entry that somebody else has by now is woken for no reason.
        for waiter in round.woken[..round.threads].iter().filter_map(|&index| self.waiters.entry(index)) {
            futex::wake(&waiter.state, 1, Scope::Process);
        }
        if round.due || round.unfinished {
            host.come_soon();
        }
        answer
    }

    /// Lets in who waits at the group in a slot, and says what is waited for there from now on.
    pub(crate) fn admit_at<H: Reclaimer>(&self, host: &H, queues: &Queues<'_>, slot: u32, round: &mut Round) {
        let Some(group) = self.tree.group(slot) else { return };
        if !group.has_waiters() && queues.first(group).is_none() {
            return;
        }
        loop {
            while let Some(oldest) = queues.first(group)
                && !round.is_over()
            {
                if !self.let_in(host, queues, oldest, round) {
                    break;
                }
            }
            self.let_pass(host, queues, group, round);
            let there_is_room = self.say_what_is_wanted(queues, group);
            round.unfinished |= there_is_room && round.is_over();
            if !there_is_room || round.is_over() {
                return;
            }
        }
    }

    /// Lets in who may pass the oldest.
    fn let_pass<H: Reclaimer>(&self, host: &H, queues: &Queues<'_>, group: &Group, round: &mut Round) {
        // What did not fit fits no better for being younger.
        let mut least = u64::MAX;
        let mut looks = 0;
        let mut next = queues.first(group).and_then(|oldest| queues.after(oldest));
        while let (Some(index), Some(oldest)) = (next, queues.first(group).and_then(|index| queues.get(index)))
            && looks < LOOKS
            && !round.is_over()
        {
            looks += 1;
            // Before it is in another list.
            next = queues.after(index);
            let bytes = queues.get(index).map_or(u64::MAX, Waiter::bytes);
            if bytes < least && passes(bytes, oldest) && !self.let_in(host, queues, index, round) {
                least = bytes;
            }
        }
    }

    /// Says what is waited for at a group; answers whether there is room for that already.
    pub(crate) fn say_what_is_wanted(&self, queues: &Queues<'_>, group: &Group) -> bool {
        let Some(oldest) = queues.first(group) else { return group.want(0) };
        let Some(first) = queues.get(oldest) else { return false };
        let younger = core::iter::successors(queues.after(oldest), |&index| queues.after(index)).take(LOOKS);
        let passing = younger.filter_map(|index| queues.get(index)).map(Waiter::bytes).filter(|&b| passes(b, first));
        group.want(passing.fold(first.bytes(), u64::min).max(1))
    }

    /// Lets a waiter in, or moves it to where it has to wait; answers whether it left the queue that it was in.
    pub(crate) fn let_in<H: Reclaimer>(&self, host: &H, queues: &Queues<'_>, index: u32, round: &mut Round) -> bool {
        let Some(waiter) = queues.get(index) else { return false };
        round.attempts += 1;
        match self.attempt_for(host, queues, waiter, round) {
            Attempt::Waits(slot) if slot == waiter.place() => return false,
            Attempt::Waits(slot) => {
                queues.withdraw(index);
                queues.queue(index, slot);
                let Some(group) = self.tree.group(slot) else { return true };
                // What was stocked while nobody waited here is to be emptied.
                round.unfinished |= !group.has_waiters();
                // As is room that came since: whoever made it did not know who waits.
                round.unfinished |= self.say_what_is_wanted(queues, group);
            }
            Attempt::Granted => self.end(queues, index, state::GRANTED, 0, round),
            Attempt::Never(group) => self.end(queues, index, state::REFUSED, group.to_bits(), round),
            Attempt::Gone => self.end(queues, index, state::GONE, 0, round),
        }
        true
    }

    /// A waiter has its answer. What is waited for where it was queued is the caller's to say.
    pub(crate) fn end(&self, queues: &Queues<'_>, index: u32, state: u32, answer: u64, round: &mut Round) {
        let was_queued = queues.get(index).is_some_and(|waiter| waiter.place() != NONE);
        queues.withdraw(index);
        if queues.conclude(index, state, answer) {
            round.due = true;
        } else if let (true, Some(place)) = (was_queued, round.woken.get_mut(round.threads)) {
            *place = index;
            round.threads += 1;
        }
    }

    /// Charges a waiter what it asks for, if it is its turn and there is room all the way up. Exactly that: while somebody waits nothing is
    /// stocked.
    fn attempt_for<H: Reclaimer>(&self, host: &H, queues: &Queues<'_>, waiter: &Waiter, round: &mut Round) -> Attempt {
        let (payer, bytes) = (waiter.payer(), waiter.bytes());
        let Some(Behind::Group(slot)) = self.tree.owners.behind(payer.id()) else { return Attempt::Gone };
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
        if self.raise(slot, bytes, How::Refuse).is_err() {
            // Somebody who does not wait was faster, and who came for what was raised for a moment went in vain.
            round.unfinished = true;
            return Attempt::Waits(if waiter.place() == NONE { slot } else { waiter.place() });
        }
        for oldest in self.tree.upwards(slot).filter_map(|(_, group)| older(group)) {
            oldest.passed.fetch_add(1, Ordering::Relaxed);
        }
        self.book(host, slot, payer, bytes);
        Attempt::Granted
    }
}
