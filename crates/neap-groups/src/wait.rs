//! Charges that wait for room at a limit, by a sleeping thread or a future.
//!
//! # Design
//!
//! 1. The thread flushes caches and empties stocks, as for any charge.
//! 2. It queues a request at the group without room. That group asks for memory until it needs none
//!    (`requests.rs`).
//! 3. The thread that makes room admits waiters (`admission.rs`).
//!
//! A waiting thread runs no callback of a shrinker, so no shrinker can delay its deadline. Bytes
//! freed into a cache make room only when the cache is flushed. A tick or a waiting thread flushes
//! caches every [`TICK_INTERVAL_NS`], and once after the deadline.
//!
//! A thread sleeps on the state word of its entry. A future stores its waker in its entry, and
//! [`Groups::deliver`] calls the waker. A waiting thread holds no lock, and is not inside the fork
//! gate.
//!
//! A wait ends by a grant, at its deadline, when the group is deleted, or when the future is
//! dropped. At the deadline the charge is refused with the error of [`Groups::charge`]. A request
//! that exceeds a `max` on its path is refused at once.
//!
//! A future that was granted bytes above a `high` is pending until its delay is over or all groups
//! on its path are below their `high` again.
//!
//! A forked child has none of its parent's waiters. A future that is polled there queues again, as
//! the youngest waiter.

use crate::charge::{ChargeFailure, OnLimit, Refusal};
use crate::group::Bound;
use crate::groups::{FlushPace, Groups, Reclaimer};
use crate::id::{GroupId, Payer};
use crate::queue::{Queues, TICK_INTERVAL_NS, Waiter, WaiterHandle, state};
use crate::requests::Due;
use core::fmt;
use core::future::Future;
use core::pin::Pin;
use core::sync::atomic::Ordering;
use core::task::{Context, Poll, Waker};
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_os::futex::{self, Sharing};

/// No deadline.
pub const FOREVER: u64 = u64::MAX;

/// Whether a thread that finds no answer yet goes on waiting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Patience {
    /// It waits.
    Waits,
    /// It takes its request back.
    GivesUp,
}

impl Patience {
    /// Returns the patience at the time `now` of a thread that waits until `deadline`.
    pub fn until(deadline: u64, now: u64) -> Patience {
        if now >= deadline { Patience::GivesUp } else { Patience::Waits }
    }
}

/// Description of a waiting charge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Waiting {
    /// The group to be charged.
    pub group: GroupId,
    /// The group at whose limit, or in whose queue, it waits: the charged group or an ancestor.
    pub at: GroupId,
    /// The reason for the wait.
    pub reason: Reason,
    /// Requested bytes.
    pub bytes: u64,
    /// A number that is higher the later the request came.
    pub age: u64,
    /// Number of waiters that have passed it while it was the oldest of a queue.
    pub passed: u32,
    /// Time when it began to wait, in nanoseconds of the platform's clock.
    pub since: u64,
    /// Time at which the wait ends, in nanoseconds of the platform's clock; [`FOREVER`] for none.
    pub deadline: u64,
}

/// Reason for which a charge waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Reason {
    /// It waits for room below a `max`, and is the oldest waiter there.
    Room,
    /// It is the oldest waiter, and the last pass brought nothing: caches are busy, barred, in use
    /// or empty.
    Backoff,
    /// An older charge waits in the same queue.
    Turn,
    /// It has its bytes, and is delayed above a `high`.
    High,
}

/// Result of a wait.
#[derive(Clone, Copy)]
enum WaitEnd {
    Granted,
    /// Refused, at the limit of this group.
    Refused(GroupId),
    Gone,
    /// This process is a child of the one in which the charge waited.
    Forgotten,
}

impl Groups {
    /// Charges bytes to the group of a payer, and waits where [`Groups::charge`] would be refused.
    /// Returns the nanoseconds for which the caller is to be delayed.
    ///
    /// `deadline` is a time of the platform's clock in nanoseconds, or [`FOREVER`]. The oldest
    /// waiter is admitted first. A request below an eighth of the oldest's bytes may pass it. At
    /// most eight requests pass each oldest waiter. Charges that do not wait take available bytes.
    /// The caller must hold no lock that other threads need to make room.
    ///
    /// # Errors
    /// [`Refusal`] gives the reason; nothing is charged then. A request that exceeds a `max` on its
    /// path is refused at once. So is a request if there is no memory for its entry.
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
        let mut now = host.platform().precise();
        loop {
            if let Some(end) = self.look(host, handle, Patience::until(deadline, now), &mut None) {
                return self.answer(host, end, payer, bytes);
            }
            let time = (deadline - now).min(TICK_INTERVAL_NS);
            // Acquire pairs with the Release in `conclude`.
            let is_waiting = |waiter: &&Waiter| waiter.state.load(Ordering::Acquire) == state::WAITING;
            if let Some(waiter) = self.waiters.entry(handle.index).filter(is_waiting) {
                futex::wait(&waiter.state, state::WAITING, Some(time), Sharing::Process);
                now = host.platform().precise();
                // There may be no thread that ticks, so this thread does the work. Its last call is
                // after the deadline.
                if is_waiting(&waiter) {
                    self.service_waiters(host, now);
                    // The waiter may have moved to a group that did not ask before.
                    if now < deadline && matches!(self.look_for_request(host), Due::Now(_)) {
                        host.ask_soon();
                    }
                }
            }
        }
    }

    /// Returns a future that charges bytes as [`Groups::charge_or_wait`] does. It asks when it is
    /// first polled, and gives up when it is dropped.
    ///
    /// [`Groups::deliver`] wakes the future's task. The groups request a delivery by
    /// [`Reclaimer::request_tick`]. A deadline takes effect in [`Groups::tick`], before the next
    /// `deliver`.
    pub fn charge_async<H: Reclaimer>(&self, host: H, payer: Payer, bytes: u64, deadline: u64) -> ChargeAsync<'_, H> {
        ChargeAsync { groups: self, host, payer, bytes, deadline, on_limit: OnLimit::Refuse, stage: Stage::Unasked }
    }

    /// Returns the first waiting charge from entry `from` on, and the index of its entry.
    pub fn next_waiting(&self, inside: &Inside<'_>, from: u32) -> Option<(u32, Waiting)> {
        let mut index = from;
        loop {
            // This releases the mutex after each entry, so other threads can take it in between.
            let queues = self.waiters.lock(inside, &self.tree);
            let waiter = queues.get(index).filter(|_| index < queues.len())?;
            if let Some((at, reason)) = self.reason(inside, &queues, index, waiter) {
                let waiting = Waiting {
                    group: waiter.payer().id(),
                    at,
                    reason,
                    bytes: waiter.bytes(),
                    age: waiter.ticket(),
                    passed: waiter.passed.load(Ordering::Relaxed),
                    since: waiter.since(),
                    deadline: waiter.deadline(),
                };
                return Some((index, waiting));
            }
            index += 1;
        }
    }

    /// Returns the group that a waiter waits at, and the reason; `None` if it does not wait.
    fn reason(
        &self,
        inside: &Inside<'_>,
        queues: &Queues<'_>,
        index: u32,
        waiter: &Waiter,
    ) -> Option<(GroupId, Reason)> {
        if waiter.is_held() {
            return Some((self.highest_above(inside, waiter.payer().id())?, Reason::High));
        }
        let group = self.tree.group(waiter.place()).filter(|_| waiter.is_waiting())?;
        let reason = match (queues.first(group) == Some(index), group.rest()) {
            (false, _) => Reason::Turn,
            (true, 0) => Reason::Room,
            (true, _) => Reason::Backoff,
        };
        Some((group.id(), reason))
    }

    /// Returns whether a request waits at the group of an id, or at an ancestor.
    pub(crate) fn is_waited_for(&self, id: GroupId) -> bool {
        let _reading = self.rcu.enter();
        let Some(behind) = self.tree.owners.behind(id) else { return false };
        self.tree.upwards(behind.slot()).any(|(_, group)| group.has_waiters())
    }

    /// Returns the uppermost group above its `high`, from the group of an id upwards.
    fn highest_above(&self, _: &Inside<'_>, id: GroupId) -> Option<GroupId> {
        let _reading = self.rcu.enter();
        let behind = self.tree.owners.behind(id)?;
        let above = self.tree.upwards(behind.slot()).filter(|(_, group)| group.usage() > group.bound(Bound::High));
        above.last().map(|(_, group)| group.id())
    }

    /// Delays a charge that was granted above a `high`, at most until the time `until`. Returns
    /// `None` if there is no memory for an entry. The groups above their `high` ask for memory.
    fn hold<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64, until: u64) -> Option<WaiterHandle> {
        let handle = host.inside(|inside| {
            let handle = {
                let mut queues = self.waiters.lock(inside, &self.tree);
                let _reading = self.rcu.enter();
                queues.add(host.platform(), payer, bytes, until, state::HELD).ok()
            };
            let _reading = self.rcu.enter();
            self.tree.owners.behind(payer.id()).inspect(|behind| self.ask_for_excess(inside, behind.slot()));
            host.request_tick(inside);
            handle
        });
        host.ask_soon();
        handle
    }

    /// Charges bytes if a flush of caches and stocks makes room. Otherwise queues a request.
    ///
    /// # Errors
    /// The result of the charge, granted or refused, if it does not have to wait.
    fn ask<H: Reclaimer>(
        &self,
        host: &H,
        payer: Payer,
        bytes: u64,
        deadline: u64,
    ) -> Result<WaiterHandle, Result<u64, Refusal>> {
        if self.stocks.take(host.platform(), payer, bytes) {
            return Err(Ok(0));
        }
        let mut full = payer.id();
        // If older requests wait, this one does not try to charge before them.
        let others_wait = host.inside(|_| self.is_waited_for(full));
        if !others_wait {
            match self.look_for_room(host, payer, bytes, OnLimit::Refuse, 0) {
                Ok(charged) => return Err(Ok(self.delay(host, payer, charged))),
                Err(ChargeFailure::Gone) => return Err(Err(Refusal::Gone)),
                Err(ChargeFailure::Full(group)) => full = group,
            }
        }
        let added = host.inside(|inside| {
            self.in_queues(inside, host, |queues, round| {
                let handle = queues.add(host.platform(), payer, bytes, deadline, state::WAITING).ok()?;
                self.try_admit(host, queues, handle.index, round);
                let place = queues.of(handle).map(Waiter::place);
                place.and_then(|slot| self.tree.group(slot)).inspect(|group| full = group.id());
                Some(handle)
            })
        });
        let Some(handle) = added else { return Err(self.answer(host, WaitEnd::Refused(full), payer, bytes)) };
        if let Some(end) = self.look(host, handle, Patience::Waits, &mut None) {
            return Err(self.answer(host, end, payer, bytes));
        }
        // From here on charges and uncharges below `full` stock nothing, and uncharges admit
        // waiters. Cached bytes are flushed by `service_waiters`.
        self.drain_stocks(host, full);
        host.ask_soon();
        host.inside(|inside| host.request_tick(inside));
        Ok(handle)
    }

    /// Returns the result of a wait, and frees the entry; `None` if the wait goes on.
    ///
    /// If it goes on and `waker` has a waker, exchanges it with that of the entry. The caller drops
    /// the waker that it then finds in `waker`.
    fn look<H: Reclaimer>(
        &self,
        host: &H,
        handle: WaiterHandle,
        patience: Patience,
        waker: &mut Option<Waker>,
    ) -> Option<WaitEnd> {
        let gives_up = patience == Patience::GivesUp;
        host.inside(|inside| {
            self.in_queues(inside, host, |queues, round| {
                let Some(waiter) = queues.of(handle) else { return Some(WaitEnd::Forgotten) };
                let (place, answer) = (waiter.place(), waiter.answer.load(Ordering::Relaxed));
                let end = match waiter.state.load(Ordering::Relaxed) {
                    state::GRANTED => WaitEnd::Granted,
                    state::REFUSED => WaitEnd::Refused(GroupId::from_bits(answer)),
                    state::GONE => WaitEnd::Gone,
                    state::HELD if gives_up => WaitEnd::Granted,
                    _ if gives_up => self.tree.group(place).map_or(WaitEnd::Gone, |group| WaitEnd::Refused(group.id())),
                    _ => {
                        if waker.is_some() {
                            *waker = waiter.replace_waker(waker.take());
                        }
                        return None;
                    }
                };
                let was_waiting = waiter.is_waiting();
                *waker = queues.free(handle.index, host.platform().precise());
                if was_waiting {
                    self.admit_at(host, queues, place, round);
                }
                Some(end)
            })
        })
    }

    fn answer<H: Reclaimer>(&self, host: &H, end: WaitEnd, payer: Payer, bytes: u64) -> Result<u64, Refusal> {
        match end {
            WaitEnd::Granted => Ok(self.delay(host, payer, bytes)),
            WaitEnd::Refused(group) => Err(host.inside(|inside| self.refuse(inside, host, group, bytes))),
            WaitEnd::Gone | WaitEnd::Forgotten => Err(Refusal::Gone),
        }
    }

    /// Visits all waiters. Ends those for which `verdict` returns a state, and then admits waiters.
    /// Returns whether more could be admitted.
    fn sweep<H: Reclaimer>(
        &self,
        inside: &Inside<'_>,
        host: &H,
        mut verdict: impl FnMut(&Waiter) -> Option<u32>,
    ) -> bool {
        let mut more = false;
        for ending in [true, false] {
            let (mut at, mut end) = (0, 1);
            while at < end {
                self.in_queues(inside, host, |queues, round| {
                    end = queues.len();
                    while at < end && !round.is_over() {
                        let waiter = queues.get(at);
                        if ending && waiter.is_some_and(|waiter| waiter.is_held() && verdict(waiter).is_some()) {
                            self.end(host, queues, at, state::GRANTED, 0, round);
                        } else if let Some(waiter) = waiter.filter(|waiter| ending && waiter.is_stalled()) {
                            if verdict(waiter).is_some() {
                                queues.end_stall(waiter, host.platform().precise());
                            }
                        } else if let Some(waiter) = waiter.filter(|waiter| waiter.is_waiting())
                            && let Some(group) = self.tree.group(waiter.place())
                        {
                            if !ending && queues.first(group) == Some(at) {
                                self.admit_at(host, queues, waiter.place(), round);
                            } else if ending && let Some(state) = verdict(waiter) {
                                self.end(host, queues, at, state, group.id().to_bits(), round);
                                self.publish_wanted(queues, group);
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

    /// Ends the delay of charges with no group above its `high` on their path. [`Groups::wake`]
    /// must follow. The caller must be outside the fork gate.
    pub(crate) fn end_delays<H: Reclaimer>(&self, host: &H) {
        host.inside(|inside| {
            let is_below = |waiter: &Waiter| self.highest_above(inside, waiter.payer().id()).is_none();
            if self.waiters.lock(inside, &self.tree).count() > 0 {
                self.sweep(inside, host, |waiter| (waiter.is_held() && is_below(waiter)).then_some(state::GRANTED));
            }
        });
    }

    /// Ends the waits to charge a deleted group, and the stalls of its threads. The caller must be
    /// within a read since before the group was deleted.
    pub(crate) fn end_waits<H: Reclaimer>(&self, inside: &Inside<'_>, host: &H, gone: GroupId) {
        if !self.waiters.lock(inside, &self.tree).is_empty() {
            self.sweep(inside, host, |waiter| (waiter.payer().id() == gone).then_some(state::GONE));
        }
    }

    /// Serves waiters: flushes caches, empties stocks, ends waits after their deadline, and admits
    /// waiters. Returns the nanoseconds until the next call is needed; `None` without waiters. The
    /// caller must be outside the fork gate.
    pub(crate) fn service_waiters<H: Reclaimer>(&self, host: &H, now: u64) -> Option<u64> {
        let is_late = self.is_any_late(host, now)?;
        // A free that ends in a cache uncharges nothing and wakes no waiter:
        //
        // 1. A waits, after a flush of all caches.
        // 2. B frees all memory of the group, which is still charged for it.
        // 3. No other thread calls.
        //
        // So caches are flushed at intervals for waiters, and after a deadline before the request
        // is refused.
        if is_late || self.waiters.flush_in(now) == 0 {
            self.waiters.note_flush(now);
            host.flush(&|payer| self.is_waited_for(payer.id()), FlushPace::AtOnce);
        }
        self.drain_and_admit(host, now)
    }

    /// Returns whether a waiter's deadline has passed; `None` without waiters. Not inlined, like
    /// [`Groups::drain_and_admit`]: their locals would take stack while caches are flushed.
    #[inline(never)]
    fn is_any_late<H: Reclaimer>(&self, host: &H, now: u64) -> Option<bool> {
        host.inside(|inside| {
            let queues = self.waiters.lock(inside, &self.tree);
            let mut all = (0..queues.len()).filter_map(|index| queues.get(index));
            (queues.count() > 0).then(|| all.any(|waiter| waiter.is_waiting() && waiter.deadline() <= now))
        })
    }

    /// Empties stocks, ends waits after their deadline, and admits waiters. Returns the nanoseconds
    /// until the next call is needed.
    #[inline(never)]
    fn drain_and_admit<H: Reclaimer>(&self, host: &H, now: u64) -> Option<u64> {
        let wanted = |payer: Payer| self.is_waited_for(payer.id());
        host.inside(|inside| {
            self.stocks
                .drain(host.platform(), wanted, |payer, bytes| self.uncharge_counters(inside, host, payer, bytes));
            let mut next = self.waiters.flush_in(now).min(TICK_INTERVAL_NS);
            let more = self.sweep(inside, host, |waiter| match waiter.deadline().checked_sub(now) {
                None | Some(0) => Some(state::REFUSED),
                Some(_) if waiter.is_held() && self.highest_above(inside, waiter.payer().id()).is_none() => {
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

    /// Calls the wakers of futures that have an answer. The caller must be outside the fork gate
    /// and hold no lock, since a waker may do anything.
    pub fn wake<H: Reclaimer>(&self, host: &H) {
        while let Some(waker) = host.inside(|inside| self.waiters.lock(inside, &self.tree).next_due()) {
            waker.wake();
        }
    }

    /// Frees all entries in a forked child, which has none of the threads that waited. It does not
    /// drop wakers, since the data that they refer to may stay locked for ever.
    pub(crate) fn forget_waiters<H: Reclaimer>(&self, inside: &Inside<'_>, host: &H) {
        let mut index = 0;
        loop {
            let mut queues = self.waiters.lock(inside, &self.tree);
            let reading = self.rcu.enter();
            let Some(waiter) = queues.get(index).filter(|_| index < queues.len()) else { return };
            let (state, place) = (waiter.state.load(Ordering::Relaxed), waiter.place());
            let (payer, bytes) = (waiter.payer(), waiter.bytes());
            if state != state::FREE {
                core::mem::forget(queues.free(index, host.platform().precise()));
                self.tree.group(place).inspect(|group| _ = self.publish_wanted(&queues, group));
            }
            drop(reading);
            drop(queues);
            if matches!(state, state::GRANTED | state::HELD) {
                self.uncharge_counters(inside, host, payer, bytes);
            }
            index += 1;
        }
    }
}

/// State of a future.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Unasked,
    Waits(WaiterHandle),
    /// It has its bytes, and is delayed.
    Held(WaiterHandle),
    Ended,
}

/// A charge that waits for room, made by [`Groups::charge_async`]. Its output is that of
/// [`Groups::charge_or_wait`]. The output's delay is 0, since the future has waited for it. If
/// there was no memory for that wait, the output has the delay, and the caller must sleep.
///
/// If the future is dropped before it returned a grant, the granted bytes are uncharged. It
/// allocates nothing. A future that is polled after its end stays pending for ever.
#[must_use = "a future does nothing unless it is polled"]
pub struct ChargeAsync<'g, H: Reclaimer> {
    groups: &'g Groups,
    host: H,
    payer: Payer,
    bytes: u64,
    deadline: u64,
    on_limit: OnLimit,
    stage: Stage,
}

impl<H: Reclaimer> ChargeAsync<'_, H> {
    /// Makes the future charge as [`OnLimit::Overcharge`] does. The future does not wait for room,
    /// only for the end of the delay above a `high`.
    pub fn overcharge(self) -> Self {
        ChargeAsync { on_limit: OnLimit::Overcharge, ..self }
    }
}

impl<H: Reclaimer> Unpin for ChargeAsync<'_, H> {}

impl<H: Reclaimer> Future for ChargeAsync<'_, H> {
    type Output = Result<u64, Refusal>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<u64, Refusal>> {
        let future = self.get_mut();
        let (groups, host) = (future.groups, &future.host);
        loop {
            let answer = match future.stage {
                Stage::Unasked if future.on_limit == OnLimit::Overcharge => {
                    groups.charge(host, future.payer, future.bytes, OnLimit::Overcharge)
                }
                Stage::Unasked => match groups.ask(host, future.payer, future.bytes, future.deadline) {
                    Ok(handle) => {
                        future.stage = Stage::Waits(handle);
                        continue;
                    }
                    Err(answer) => answer,
                },
                Stage::Waits(handle) => {
                    let patience = Patience::until(future.deadline, host.platform().precise());
                    match groups.look(host, handle, patience, &mut Some(context.waker().clone())) {
                        None => return Poll::Pending,
                        Some(WaitEnd::Forgotten) => {
                            future.stage = Stage::Unasked;
                            continue;
                        }
                        Some(end) => groups.answer(host, end, future.payer, future.bytes),
                    }
                }
                Stage::Held(handle) => {
                    match groups.look(host, handle, Patience::Waits, &mut Some(context.waker().clone())) {
                        None => return Poll::Pending,
                        Some(WaitEnd::Forgotten) => {
                            future.stage = Stage::Unasked;
                            continue;
                        }
                        Some(_) => Ok(0),
                    }
                }
                Stage::Ended => return Poll::Pending,
            };
            if let (Ok(delay @ 1..), false) = (answer, matches!(future.stage, Stage::Held(_))) {
                let until = host.platform().precise().saturating_add(delay).min(future.deadline);
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
        if let Some(WaitEnd::Granted) = self.groups.look(&self.host, handle, Patience::GivesUp, &mut None) {
            self.host.inside(|inside| self.groups.uncharge_counters(inside, &self.host, self.payer, self.bytes));
        }
    }
}

impl<H: Reclaimer> fmt::Debug for ChargeAsync<'_, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChargeAsync({:?}, {} bytes, {:?})", self.payer.id(), self.bytes, self.stage)
    }
}
