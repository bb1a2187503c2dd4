//! Waiting for room: a charge that does not fail at a limit at once, by a thread that sleeps or a future.
//!
//! Sits between whoever would rather wait than be refused, and the queues. First stocks and caches
//! are emptied, as for any charge; then it waits, the group that it waits at asks for memory as
//! often as it takes (`asking.rs`), and whoever makes room lets it in (`admit.rs`). The waiting
//! thread itself runs no callback and waits for nothing but its grant, so a deadline is kept
//! whatever shrinkers do. What is freed into a cache makes room when that is flushed, every
//! [`INTERVAL`] and once behind the deadline: by ticks, or by a thread that waits. A thread sleeps
//! on the state word of its entry; a future leaves its waker there, which [`Groups::deliver`]
//! calls. No lock is held while waiting, and nobody is inside the gate. Every wait ends: by a
//! grant, at its deadline with the error of a charge, when the group is deleted, when the future is
//! dropped, or, for what is more than a limit, at once.
//!
//! A future that was granted its bytes above a `high` is held up as a thread is, but by its entry:
//! it is pending until the delay is over or all groups on its way are below their `high` again.
//!
//! Fork: a child has none of the waiters. A future that is polled there asks again, as the youngest.

use crate::asking::Due;
use crate::charge::{Against, How, Refusal};
use crate::group::Bound;
use crate::groups::{Groups, INTERVAL, Reclaimer};
use crate::id::{GroupId, Payer};
use crate::queue::{Handle, Waiter, state};
use core::fmt;
use core::future::Future;
use core::pin::Pin;
use core::sync::atomic::Ordering;
use core::task::{Context, Poll, Waker};
use neap_base::Platform;
use neap_os::futex::{self, Scope};

/// No deadline.
pub const FOREVER: u64 = u64::MAX;

/// Somebody who waits for room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Waiting {
    /// The group that is to be charged.
    pub group: GroupId,
    /// The group whose limit, or queue, it waits at: the same, or one above.
    pub at: GroupId,
    /// What it waits for.
    pub reason: Reason,
    /// What it asks for.
    pub bytes: u64,
    /// A number that is higher the later it came.
    pub age: u64,
    /// How many have passed it, as the oldest of a queue.
    pub passed: u32,
    /// Until when it waits, in nanoseconds of the platform's clock; [`FOREVER`] for no end.
    pub deadline: u64,
}

/// What a charge waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// Room below a `max`: it is the oldest there.
    Room,
    /// Its turn: an older one waits there.
    Turn,
    /// It has its bytes, and is held up above a `high`.
    High,
}

/// How a wait ended.
#[derive(Clone, Copy)]
enum End {
    Granted,
    /// At the limit of this group.
    Refused(GroupId),
    Gone,
    /// This process is a child of the one that it waited in.
    Forgotten,
}

impl Groups {
    /// Charges bytes to the group of a payer as [`Groups::charge`] does, but waits where that is refused, until `deadline` at most, a time of the
    /// platform's clock in nanoseconds, or [`FOREVER`]. The oldest that waits is let in first; one that asks for less than an eighth
    /// of what the oldest does may pass, eight times for each that is the oldest. Charges that do not wait take what there is. The caller holds
    /// nothing that others need to make room.
    ///
    /// # Errors
    /// See [`Refusal`]; nothing is charged then. What is more than a limit is refused at once, and so is what there is no memory
    /// to wait with.
    pub fn charge_or_wait<H: Reclaimer>(
        &self,
        host: &H,
        payer: Payer,
        bytes: u64,
        deadline: u64,
    ) -> Result<u64, Refusal> {
        let handle = match self.ask(host, payer, bytes, deadline) {
            Ok(handle) => handle,
            Err(answer) => return answer,
        };
        let mut now = host.platform().now();
        loop {
            if let Some(end) = self.look(host, handle, now >= deadline, &mut None) {
                return self.answer(host, end, payer, bytes);
            }
            let time = (deadline - now).min(INTERVAL);
            // Acquire pairs with the Release in `conclude`.
            let is_waiting = |waiter: &&Waiter| waiter.state.load(Ordering::Acquire) == state::WAITING;
            if let Some(waiter) = self.waiters.entry(handle.index).filter(is_waiting) {
                futex::wait(&waiter.state, state::WAITING, Some(time), Scope::Process);
                now = host.platform().now();
                // Perhaps nobody else does it, and the last time it is done behind the deadline.
                if is_waiting(&waiter) {
                    self.attend(host, now);
                    // It may have moved to a group that did not ask before.
                    if now < deadline && matches!(self.look_for_request(host), Due::Now(_)) {
                        host.ask_soon();
                    }
                }
            }
        }
    }

    /// The same as a future, which asks when it is first polled, and gives up when it is dropped. Its task is woken by
    /// [`Groups::deliver`], which [`Reclaimer::come_soon`] asks for, and at the deadline by [`Groups::tick`] before that.
    pub fn charge_async<H: Reclaimer>(&self, host: H, payer: Payer, bytes: u64, deadline: u64) -> ChargeAsync<'_, H> {
        ChargeAsync { groups: self, host, payer, bytes, deadline, stage: Stage::Unasked }
    }

    /// Calls `each` with all who wait for room at this moment, in no order; it must not allocate from the manager whose groups these are.
    pub fn each_waiting<H: Reclaimer>(&self, host: &H, mut each: impl FnMut(Waiting)) {
        host.inside(|| {
            let mut index = 0;
            // One by one: there may be many, and the mutex is held for a few.
            while let Some(waiting) = {
                let queues = self.waiters.lock(&self.tree);
                queues.get(index).filter(|_| index < queues.len()).map(|waiter| {
                    let group = self.tree.group(waiter.place()).filter(|_| waiter.is_waiting());
                    let at = group.map(|group| {
                        let is_first = queues.first(group) == Some(index);
                        (group.id(), if is_first { Reason::Room } else { Reason::Turn })
                    });
                    let held = || Some((self.highest_above(waiter.payer().id())?, Reason::High));
                    let at = if waiter.is_held() { held() } else { at };
                    at.map(|(at, reason)| Waiting {
                        group: waiter.payer().id(),
                        at,
                        reason,
                        bytes: waiter.bytes(),
                        age: waiter.ticket(),
                        passed: waiter.passed.load(Ordering::Relaxed),
                        deadline: waiter.deadline(),
                    })
                })
            } {
                waiting.inspect(|&waiting| each(waiting));
                index += 1;
            }
        });
    }

    /// Whether anybody waits for room in the group of an id, or above it.
    pub(crate) fn is_waited_for(&self, id: GroupId) -> bool {
        let _reading = self.rcu.enter();
        let Some(behind) = self.tree.owners.behind(id) else { return false };
        self.tree.upwards(behind.slot()).any(|(_, group)| group.has_waiters())
    }

    /// The uppermost group on the way of an id that is above its `high`. Inside the gate.
    fn highest_above(&self, id: GroupId) -> Option<GroupId> {
        let _reading = self.rcu.enter();
        let behind = self.tree.owners.behind(id)?;
        let above = self.tree.upwards(behind.slot()).filter(|(_, group)| group.usage() > group.bound(Bound::High));
        above.last().map(|(_, group)| group.id())
    }

    /// Holds a charge up that was granted above a `high`, until a time at most; `None` where there
    /// is no memory for that. The groups that are above their `high` ask for memory.
    fn hold<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64, until: u64) -> Option<Handle> {
        let handle = host.inside(|| {
            let handle = self.waiters.lock(&self.tree).add(host.platform(), payer, bytes, until, state::HELD).ok();
            let _reading = self.rcu.enter();
            self.tree.owners.behind(payer.id()).inspect(|behind| self.ask_for_excess(behind.slot()));
            host.come_soon();
            handle
        });
        host.ask_soon();
        handle
    }

    /// Empties what can be emptied without asking for memory, and then queues.
    ///
    /// # Errors
    /// The answer, where there is one already.
    fn ask<H: Reclaimer>(
        &self,
        host: &H,
        payer: Payer,
        bytes: u64,
        deadline: u64,
    ) -> Result<Handle, Result<u64, Refusal>> {
        if self.stocks.take(host.platform(), payer, bytes) {
            return Err(Ok(0));
        }
        let mut full = payer.id();
        // Who comes later does not try before those who wait.
        let others_wait = host.inside(|| self.is_waited_for(full));
        if !others_wait {
            match self.look_for_room(host, payer, bytes, How::Refuse, false) {
                Ok(charged) => return Err(Ok(self.delay(host, payer, charged))),
                Err(Against::Gone) => return Err(Err(Refusal::Gone)),
                Err(Against::Full(group)) => full = group,
            }
        }
        let added = host.inside(|| {
            self.in_queues(host, |queues, round| {
                let handle = queues.add(host.platform(), payer, bytes, deadline, state::WAITING).ok()?;
                self.let_in(host, queues, handle.index, round);
                let place = queues.of(handle).map(Waiter::place);
                place.and_then(|slot| self.tree.group(slot)).inspect(|group| full = group.id());
                Some(handle)
            })
        });
        let Some(handle) = added else { return Err(self.answer(host, End::Refused(full), payer, bytes)) };
        if let Some(end) = self.look(host, handle, false, &mut None) {
            return Err(self.answer(host, end, payer, bytes));
        }
        // From here on nothing is stocked, and what comes back lets somebody in; for what caches keep see `attend`.
        self.drain_stocks(host, full);
        host.ask_soon();
        host.inside(|| host.come_soon());
        Ok(handle)
    }

    /// How a wait has ended, or ends now where its owner is `giving_up`; the entry is free then. Else, if there is a waker, it is left there in
    /// place of the one from before. Whatever waker comes back is the caller's to drop.
    fn look<H: Reclaimer>(&self, host: &H, handle: Handle, giving_up: bool, waker: &mut Option<Waker>) -> Option<End> {
        host.inside(|| {
            self.in_queues(host, |queues, round| {
                let Some(waiter) = queues.of(handle) else { return Some(End::Forgotten) };
                let (place, answer) = (waiter.place(), waiter.answer.load(Ordering::Relaxed));
                let end = match waiter.state.load(Ordering::Relaxed) {
                    state::GRANTED => End::Granted,
                    state::REFUSED => End::Refused(GroupId::from_bits(answer)),
                    state::GONE => End::Gone,
                    state::HELD if giving_up => End::Granted,
                    _ if giving_up => self.tree.group(place).map_or(End::Gone, |group| End::Refused(group.id())),
                    _ => {
                        if waker.is_some() {
                            *waker = waiter.replace_waker(waker.take());
                        }
                        return None;
                    }
                };
                let was_waiting = waiter.is_waiting();
                *waker = queues.free(handle.index);
                if was_waiting {
                    self.admit_at(host, queues, place, round);
                }
                Some(end)
            })
        })
    }

    fn answer<H: Reclaimer>(&self, host: &H, end: End, payer: Payer, bytes: u64) -> Result<u64, Refusal> {
        match end {
            End::Granted => Ok(self.delay(host, payer, bytes)),
            End::Refused(group) => Err(host.inside(|| self.refuse(host, group, bytes))),
            End::Gone | End::Forgotten => Err(Refusal::Gone),
        }
    }

    /// Looks at all who wait: ends those that `verdict` has a state for, then lets in who can be. Answers whether there is more to do. Inside
    /// the gate.
    fn sweep<H: Reclaimer>(&self, host: &H, mut verdict: impl FnMut(&Waiter) -> Option<u32>) -> bool {
        let mut more = false;
        for ending in [true, false] {
            let (mut at, mut end) = (0, 1);
            while at < end {
                self.in_queues(host, |queues, round| {
                    end = queues.len();
                    while at < end && !round.is_over() {
                        let waiter = queues.get(at);
                        if ending && waiter.is_some_and(|waiter| waiter.is_held() && verdict(waiter).is_some()) {
                            self.end(queues, at, state::GRANTED, 0, round);
                        } else if let Some(waiter) = waiter.filter(|waiter| waiter.is_waiting())
                            && let Some(group) = self.tree.group(waiter.place())
                        {
                            if !ending && queues.first(group) == Some(at) {
                                self.admit_at(host, queues, waiter.place(), round);
                            } else if ending && let Some(state) = verdict(waiter) {
                                self.end(queues, at, state, group.id().to_bits(), round);
                                self.say_what_is_wanted(queues, group);
                            }
                        }
                        at += 1;
                    }
                    more |= round.is_unfinished();
                });
            }
        }
        more
    }

    /// Lets charges go on that are held up, where no group on their way is above its `high` any
    /// more. [`Groups::wake`] is to follow. Outside the gate.
    pub(crate) fn let_go<H: Reclaimer>(&self, host: &H) {
        let is_below = |waiter: &Waiter| self.highest_above(waiter.payer().id()).is_none();
        host.inside(|| {
            if self.waiters.lock(&self.tree).count() > 0 {
                self.sweep(host, |waiter| (waiter.is_held() && is_below(waiter)).then_some(state::GRANTED));
            }
        });
    }

    /// A group is gone: so are those who wait to charge it. Inside the gate.
    pub(crate) fn end_waits<H: Reclaimer>(&self, host: &H, gone: GroupId) {
        if self.waiters.lock(&self.tree).count() > 0 {
            self.sweep(host, |waiter| (waiter.payer().id() == gone).then_some(state::GONE));
        }
    }

    /// What those who wait need now and then: what caches keep, what others stocked as they came, the ends of their time, a second look.
    /// Answers how soon again, which it is `now`. Outside the gate.
    pub(crate) fn attend<H: Reclaimer>(&self, host: &H, now: u64) -> Option<u64> {
        let is_late = host.inside(|| {
            let queues = self.waiters.lock(&self.tree);
            let mut all = (0..queues.len()).filter_map(|index| queues.get(index));
            (queues.count() > 0).then(|| all.any(|waiter| waiter.is_waiting() && waiter.deadline() <= now))
        })?;
        let wanted = |payer: Payer| self.is_waited_for(payer.id());
        // A free that ends in a cache tells nobody, and uncharges nobody:
        // 1. A waits, behind a flush of all caches. 2. B frees all that the group has: it is paid for still. 3. Nobody else comes by.
        // So caches are flushed now and then for those who wait, and behind a deadline before who waited is refused.
        if is_late || self.waiters.flush_in(now) == 0 {
            self.waiters.note_flush(now);
            host.flush(&wanted, true);
        }
        host.inside(|| {
            self.stocks.drain(host.platform(), wanted, |payer, bytes| self.settle(host, payer, bytes));
            let mut next = self.waiters.flush_in(now).min(INTERVAL);
            let more = self.sweep(host, |waiter| match waiter.deadline().checked_sub(now) {
                None | Some(0) => Some(state::REFUSED),
                Some(_) if waiter.is_held() && self.highest_above(waiter.payer().id()).is_none() => {
                    Some(state::GRANTED)
                }
                Some(left) => {
                    next = next.min(left);
                    None
                }
            });
            Some(if more { 0 } else { next })
        })
    }

    /// Calls the wakers of futures that have an answer. Outside the gate, by somebody who holds nothing: a waker may do anything.
    pub fn wake<H: Reclaimer>(&self, host: &H) {
        while let Some(waker) = host.inside(|| self.waiters.lock(&self.tree).next_due()) {
            waker.wake();
        }
    }

    /// In a forked child, which has none of the threads that waited, and perhaps not those that would poll. Wakers are not dropped: what they
    /// refer to may be locked for good. Inside the gate.
    pub(crate) fn forget_waiters<H: Reclaimer>(&self, host: &H) {
        let mut index = 0;
        loop {
            let mut queues = self.waiters.lock(&self.tree);
            let Some(waiter) = queues.get(index).filter(|_| index < queues.len()) else { return };
            let (state, place) = (waiter.state.load(Ordering::Relaxed), waiter.place());
            let (payer, bytes) = (waiter.payer(), waiter.bytes());
            if state != state::FREE {
                core::mem::forget(queues.free(index));
                self.tree.group(place).inspect(|group| _ = self.say_what_is_wanted(&queues, group));
            }
            drop(queues);
            if matches!(state, state::GRANTED | state::HELD) {
                self.settle(host, payer, bytes);
            }
            index += 1;
        }
    }
}

/// Where a future stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Unasked,
    Waits(Handle),
    /// It has its bytes, and is held up.
    Held(Handle),
    Ended,
}

/// A charge that waits for room: [`Groups::charge_async`]. Its output is that of
/// [`Groups::charge`], but that the caller is not to be held up: it was. What it was granted and
/// did not answer goes back when it is dropped. Allocates nothing. Polled after its end it is
/// pending for ever.
#[must_use = "a future does nothing unless it is polled"]
pub struct ChargeAsync<'g, H: Reclaimer> {
    groups: &'g Groups,
    host: H,
    payer: Payer,
    bytes: u64,
    deadline: u64,
    stage: Stage,
}

impl<H: Reclaimer> Unpin for ChargeAsync<'_, H> {}

impl<H: Reclaimer> Future for ChargeAsync<'_, H> {
    type Output = Result<u64, Refusal>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<u64, Refusal>> {
        let future = self.get_mut();
        let (groups, host) = (future.groups, &future.host);
        loop {
            let answer = match future.stage {
                Stage::Unasked => match groups.ask(host, future.payer, future.bytes, future.deadline) {
                    Ok(handle) => {
                        future.stage = Stage::Waits(handle);
                        continue;
                    }
                    Err(answer) => answer,
                },
                Stage::Waits(handle) => {
                    let is_late = host.platform().now() >= future.deadline;
                    match groups.look(host, handle, is_late, &mut Some(context.waker().clone())) {
                        None => return Poll::Pending,
                        Some(End::Forgotten) => {
                            future.stage = Stage::Unasked;
                            continue;
                        }
                        Some(end) => groups.answer(host, end, future.payer, future.bytes),
                    }
                }
                Stage::Held(handle) => match groups.look(host, handle, false, &mut Some(context.waker().clone())) {
                    None => return Poll::Pending,
                    Some(End::Forgotten) => {
                        future.stage = Stage::Unasked;
                        continue;
                    }
                    Some(_) => Ok(0),
                },
                Stage::Ended => return Poll::Pending,
            };
            if let (Ok(delay @ 1..), false) = (answer, matches!(future.stage, Stage::Held(_))) {
                let until = host.platform().now().saturating_add(delay).min(future.deadline);
                if let Some(handle) = groups.hold(host, future.payer, future.bytes, until) {
                    future.stage = Stage::Held(handle);
                    continue;
                }
            }
            future.stage = Stage::Ended;
            return Poll::Ready(answer);
        }
    }
}

impl<H: Reclaimer> Drop for ChargeAsync<'_, H> {
    fn drop(&mut self) {
        let (Stage::Waits(handle) | Stage::Held(handle)) = self.stage else { return };
        if let Some(End::Granted) = self.groups.look(&self.host, handle, true, &mut None) {
            self.host.inside(|| self.groups.settle(&self.host, self.payer, self.bytes));
        }
    }
}

impl<H: Reclaimer> fmt::Debug for ChargeAsync<'_, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChargeAsync({:?}, {} bytes, {:?})", self.payer.id(), self.bytes, self.stage)
    }
}
