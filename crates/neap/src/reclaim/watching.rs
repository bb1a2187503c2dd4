//! Supervision of the callbacks of one pass. It decides whether a callback may begin, whether its
//! shrinker is blamed, and whether the pass has freed enough.
//!
//! # Design
//! A thread that runs a pass has a [`Watch`]. The watch records the beginning and the end of each
//! callback in the thread's slot of the watchdog. It begins no callback of a barred shrinker, which
//! neap does not call for some time after it was blamed.
//!
//! Reading the clock of a thread's CPU time is a system call. So the watch does not read it before
//! every callback: it measures from an earlier reading. The measured time may include earlier
//! callbacks; [`SLACK`] allows for that.
//!
//! # Locking
//! This module has no lock. It blames shrinkers inside the fork gate, and the watchdog takes its
//! mutex for that.

use crate::reclaim::reclaiming::Reclaiming;
use crate::state::reclaim::Reclaim;
use core::cell::Cell;
use neap_base::Platform;
use neap_os::clock;
use neap_percpu::Host as _;
use neap_reclaim::reclaim::{BUDGET, EndedCallback, Misbehaviour, RunningCallback, SLACK};
use neap_reclaim::{Asked, Caller, DONE, STOP, ShrinkerId};

/// More objects, or bytes, than any cache has.
const ABSURD: u64 = 1 << 48;

/// The result of work that runs callbacks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ran<T> {
    pub(crate) result: T,
    /// Whether the thread was written off meanwhile: its callback took too long, and another thread
    /// took over its job.
    pub(crate) is_written_off: bool,
    /// Whether a shrinker gave nothing while another thread called it as well. It may have objects,
    /// because the other call may hold the lock of its cache.
    pub(crate) is_contended: bool,
}

impl<T> Ran<T> {
    /// The result of a thread that was not written off.
    pub(crate) fn of(result: T) -> Ran<T> {
        Ran { result, is_written_off: false, is_contended: false }
    }

    pub(crate) fn map<U>(self, with: impl FnOnce(T) -> U) -> Ran<U> {
        let Ran { result, is_written_off, is_contended } = self;
        Ran { result: with(result), is_written_off, is_contended }
    }
}

/// Watches the callbacks of one pass.
pub(crate) struct Watch<'w, 'm, P: Platform> {
    reclaiming: &'w Reclaiming<'m, P>,
    running: &'w RunningCallback<'w>,
    deadline: u64,
    is_written_off: Cell<bool>,
    is_contended: Cell<bool>,
    /// A time, and the CPU time that this thread had used by then.
    base: Cell<(u64, u64)>,
    /// The time at which the last callback ended, and the answer of the last count.
    ended: Cell<u64>,
    counted: Cell<u64>,
}

impl<'w, 'm, P: Platform> Watch<'w, 'm, P> {
    pub(crate) fn new(reclaiming: &'w Reclaiming<'m, P>, running: &'w RunningCallback<'w>, deadline: u64) -> Self {
        let [is_written_off, is_contended] = [const { Cell::new(false) }; 2];
        let ([ended, counted], base) = ([const { Cell::new(0) }; 2], Cell::new((0, 0)));
        Watch { reclaiming, running, deadline, is_written_off, is_contended, base, ended, counted }
    }

    /// Whether the thread was written off.
    pub(crate) fn is_written_off(&self) -> bool {
        self.is_written_off.get()
    }

    /// The `result` of the work that this watched.
    pub(crate) fn ran<T>(&self, result: T) -> Ran<T> {
        Ran { result, is_written_off: self.is_written_off(), is_contended: self.is_contended.get() }
    }

    /// Returns how long one callback of a shrinker may take.
    fn budget_of(&self, id: ShrinkerId) -> u64 {
        match self.reclaiming.reclaim.shrinkers.budget_of(id) {
            0 => BUDGET,
            budget => budget,
        }
    }
}

/// A [`Watch`] of a visit, with the function that decides whether enough was freed.
pub(crate) struct Enough<'e, 'w, 'm, P: Platform, E> {
    pub(crate) watch: &'e Watch<'w, 'm, P>,
    pub(crate) enough: E,
    /// Whether shrinkers take turns. If so, a visit starts no further callback of a shrinker once
    /// its callbacks in this visit have taken the budget of one callback. Later passes continue.
    pub(crate) takes_turns: bool,
    /// Time when the first callback of a shrinker began.
    pub(crate) begun: Cell<u64>,
}

impl<P: Platform, E: Fn(u64, u64) -> bool> Caller for Enough<'_, '_, '_, P, E> {
    fn began(&self, id: ShrinkerId, again: bool) -> bool {
        let has_turn = !again || !self.takes_turns || {
            let took = self.watch.ended.get().saturating_sub(self.begun.get());
            took < self.watch.budget_of(id)
        };
        let begins = has_turn && self.watch.began(id, again);
        if !again {
            self.begun.set(self.watch.running.last_began());
        }
        begins
    }

    fn deadline(&self) -> u64 {
        self.watch.deadline
    }

    fn has_enough(&self, need: u64, said: u64) -> bool {
        (self.enough)(need, said)
    }

    fn ended(&self, id: ShrinkerId, asked: &Asked, answer: u64) -> u64 {
        self.watch.ended(id, asked, answer)
    }
}

impl<P: Platform> Caller for Watch<'_, '_, P> {
    fn deadline(&self) -> u64 {
        self.deadline
    }

    fn began(&self, id: ShrinkerId, again: bool) -> bool {
        let is_late = self.deadline != u64::MAX && self.reclaiming.source.platform().precise() >= self.deadline;
        // The end of the last callback is close enough, and saves a reading of the clock.
        let now = if again { self.ended.get() } else { self.reclaiming.reclaim.clock.now() };
        if is_late || self.is_written_off.get() {
            return false;
        }
        if self.base.get() == (0, 0) {
            self.base.set((now, clock::of_thread()));
        }
        self.running.began(id.to_bits(), now, self.budget_of(id))
    }

    fn ended(&self, id: ShrinkerId, asked: &Asked, answer: u64) -> u64 {
        self.ended.set(self.reclaiming.reclaim.clock.now());
        let EndedCallback { nanoseconds, is_written_off } = self.running.ended(self.ended.get());
        let budget = self.budget_of(id);
        if is_written_off || nanoseconds > budget {
            let Reclaim { watchdog, shrinkers, .. } = self.reclaiming.reclaim;
            let (_, busy) = self.base.get();
            let busy = clock::of_thread().saturating_sub(busy);
            let excess = watchdog.excess_of(self.running.last_began(), busy, budget);
            let now = self.reclaiming.reclaim.clock.now();
            if is_written_off {
                self.running.is_back(&self.reclaiming.source.enter(), now, excess);
                self.is_written_off.set(true);
            } else {
                let name = shrinkers.name_of(id);
                watchdog.overran(&self.reclaiming.source.enter(), id.to_bits(), name, excess, now);
            }
        }
        // Keeps the CPU time of earlier callbacks in the next measurement small.
        if self.ended.get().saturating_sub(self.base.get().0) > SLACK / 2 {
            self.base.set((self.ended.get(), clock::of_thread()));
        }
        let is_count = asked.to_scan == 0;
        let objects = if answer >= DONE { 0 } else { answer };
        if objects == 0 && self.reclaiming.reclaim.watchdog.runs(id.to_bits()) {
            self.is_contended.set(true);
        }
        if !is_count && objects > 0 && !self.reclaiming.reclaim.shrinkers.is_own(id) {
            let freed = objects.min(asked.scanned).min(asked.to_scan.max(self.counted.get()));
            self.reclaiming.source.core().count_shrunk(freed);
        }
        // No shrinker can have freed more than requested, and more than it has just counted.
        let is_too_much = !is_count && objects > asked.to_scan && objects > self.counted.get();
        if is_count {
            self.counted.set(objects);
        }
        let is_lie = answer != STOP && (objects >= ABSURD || is_too_much || asked.freed_bytes >= ABSURD);
        // neap's own caches may free more than requested: whole sheaves, or all objects of a CPU.
        if is_lie && !self.reclaiming.reclaim.shrinkers.is_own(id) {
            self.reclaiming.blame(id, Misbehaviour::Lied);
        }
        nanoseconds
    }
}
