//! The fork gate: who is inside the allocator's cold paths, and a way to keep everybody out for a moment.
//!
//! Sits between the public entry points of the facade and `fork`. A cold path holds objects and pages in its registers
//! that are in no structure; a child forked at that moment would lose them, and inherit held mutexes. So every cold path
//! passes the gate (but for what is done under a lock that fork takes, too), and fork closes it and waits until nobody is inside: then all mutexes are free and everything is in
//! its place. One mechanism instead of taking every mutex in order; it costs a cold path two locked instructions on a
//! cache line of its own CPU.
//!
//! Closers queue before it, so it is also what makes one fork wait for another: the C library's own lock does not (since
//! glibc 2.36 it is dropped around each handler).
//!
//! Never nested: only entry points pass it. The wait is bounded: a thread that forks from a signal handler which
//! interrupted a cold path would wait for itself.

use crate::constructor;
use crate::sync::{AtomicU32, AtomicUsize, Ordering, me, model_fence, wait, wake};
use crossbeam_utils::CachePadded;

const OPEN: u32 = 0;
const CLOSED: u32 = 1;
/// Closed, though somebody is still inside.
const CLOSED_IN_VAIN: u32 = 2;

/// Counters that threads are spread over, by CPU.
const LANES: usize = 16;

/// A gate: open from the start.
#[derive(Debug)]
pub struct Gate {
    closed: AtomicU32,
    /// Who closed it: [`me`](crate::sync::me).
    closer: AtomicUsize,
    /// How often the closer has closed it again; nobody else looks.
    again: AtomicU32,
    inside: [CachePadded<AtomicU32>; LANES],
}

impl Gate {
    constructor! {
        /// An open gate with nobody inside.
        pub fn new() -> Gate {
            Gate { closed: AtomicU32::new(OPEN), closer: AtomicUsize::new(0), again: AtomicU32::new(0), inside: lanes() }
        }
    }

    /// Goes in; waits while the gate is closed. `cpu` only spreads threads over counters.
    #[inline]
    pub fn enter(&self, cpu: usize) -> Inside<'_> {
        loop {
            match self.attempt(cpu) {
                Ok(inside) => return inside,
                Err(closed) => wait(&self.closed, closed),
            }
        }
    }

    /// Goes in, unless the gate is closed.
    pub fn try_enter(&self, cpu: usize) -> Option<Inside<'_>> {
        self.attempt(cpu).ok()
    }

    /// Goes in, or answers how the gate is closed.
    #[inline(always)]
    fn attempt(&self, cpu: usize) -> Result<Inside<'_>, u32> {
        let lane = &self.inside[cpu % LANES];
        // All four accesses are SeqCst, so either the closer sees this thread inside or this thread sees the gate closed:
        // 1. A counts itself, B closes. 2. A reads `closed`, B reads the counters.
        lane.fetch_add(1, Ordering::SeqCst); // Pairs with the load in `close`.
        model_fence();
        // SeqCst pairs with the store in `close`, and as an Acquire with the Release in `open`.
        let closed = self.closed.load(Ordering::SeqCst);
        let inside = Inside { lane };
        // The closer itself passes: a fork handler of the program's that allocates, run between ours and the fork.
        if closed == OPEN || self.closer.load(Ordering::Relaxed) == me() { Ok(inside) } else { Err(closed) }
    }

    /// Closes the gate and waits until nobody is inside, looking at most `looks` times with `pause` in between. Answers
    /// whether that came true; the gate is closed either way. Closers queue: where the gate is closed already, this first
    /// waits until it is open again.
    pub fn close(&self, looks: u32, mut pause: impl FnMut()) -> bool {
        // SeqCst pairs with the load in `enter`; as an Acquire with the Release in `open` of the last closer.
        while let Err(closed) = self.closed.compare_exchange(OPEN, CLOSED, Ordering::SeqCst, Ordering::Relaxed) {
            wait(&self.closed, closed);
        }
        self.closer.store(me(), Ordering::Relaxed);
        model_fence();
        for _ in 0..looks {
            // SeqCst pairs with the addition in `enter`, and as an Acquire with the Release in Inside::drop.
            if self.inside.iter().all(|lane| lane.load(Ordering::SeqCst) == 0) {
                return true;
            }
            pause();
        }
        self.closed.store(CLOSED_IN_VAIN, Ordering::Relaxed);
        false
    }

    /// Waits until whoever is inside has come out, whether others go in or not: until every counter was seen at zero once, in at most `looks` looks with
    /// `pause` in between. Answers whether anybody was there at first. For who is outside.
    pub fn outwait(&self, looks: u32, mut pause: impl FnMut()) -> bool {
        let mut left = [true; LANES];
        for look in 0..looks {
            for (left, lane) in left.iter_mut().zip(&self.inside) {
                // Acquire pairs with the Release in Inside::drop.
                *left = *left && lane.load(Ordering::Acquire) > 0;
            }
            if left == [false; LANES] {
                return look > 0;
            }
            pause();
        }
        true
    }

    /// Whether somebody wants everybody out: those inside for long look at this.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed) != OPEN
    }

    /// The same for who may be the closer, which nobody waits for.
    pub fn is_closed_to_me(&self) -> bool {
        self.is_closed() && self.closer.load(Ordering::Relaxed) != me()
    }

    /// Whether the caller has closed it.
    pub fn is_closed_by_me(&self) -> bool {
        self.is_closed() && self.closer.load(Ordering::Relaxed) == me()
    }

    /// Closes it once more where it is the caller's already: a signal handler that forks has interrupted a fork. `false`: it is not.
    pub fn close_again(&self) -> bool {
        let is_mine = self.is_closed_by_me();
        if is_mine {
            self.again.fetch_add(1, Ordering::Relaxed);
        }
        is_mine
    }

    /// Takes back the last [`Gate::close_again`]; `false` if there is none.
    pub fn open_again(&self) -> bool {
        let again = self.again.load(Ordering::Relaxed);
        self.again.store(again.saturating_sub(1), Ordering::Relaxed);
        again > 0
    }

    /// Takes all of them back: in a child, which may stay in the signal handler for good.
    pub fn forget_again(&self) {
        self.again.store(0, Ordering::Relaxed);
    }

    /// Whether the gate is closed and nobody was inside when it was.
    pub fn is_empty(&self) -> bool {
        self.closed.load(Ordering::Relaxed) == CLOSED
    }

    /// In a forked child, where only the closer is left: takes back the counts of threads that do not exist here. Whoever finds the
    /// gate closed has counted itself first, and the fork may have come in between. For a gate that [`Gate::is_empty`]; in any
    /// other the closer may be inside itself.
    pub fn forget_others(&self) {
        self.inside.iter().for_each(|lane| lane.store(0, Ordering::Relaxed));
    }

    /// Opens the gate again and wakes who waits before it. By the closer, or by its copy in a forked child.
    pub fn open(&self) {
        self.closer.store(0, Ordering::Relaxed);
        self.closed.store(OPEN, Ordering::Release); // Pairs with the Acquire in `enter` and `close`.
        wake(&self.closed, i32::MAX as u32);
    }
}

impl Default for Gate {
    fn default() -> Self {
        Gate::new()
    }
}

constructor! {
    fn lanes() -> [CachePadded<AtomicU32>; LANES] {
        [const_lane(), const_lane(), const_lane(), const_lane(), const_lane(), const_lane(), const_lane(), const_lane(),
         const_lane(), const_lane(), const_lane(), const_lane(), const_lane(), const_lane(), const_lane(), const_lane()]
    }
}

constructor! {
    fn const_lane() -> CachePadded<AtomicU32> {
        CachePadded::new(AtomicU32::new(0))
    }
}

/// Being inside; goes out when dropped.
#[derive(Debug)]
pub struct Inside<'a> {
    lane: &'a AtomicU32,
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        self.lane.fetch_sub(1, Ordering::Release); // Pairs with the Acquire in `close`.
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn closing_waits_for_those_inside_and_gives_up() {
        let gate = Gate::new();
        let inside = gate.enter(3);
        assert!(!gate.close(5, || ()) && !gate.is_empty());
        gate.open();
        drop(inside);
        assert!(gate.close(1, || ()) && gate.is_empty());
        std::thread::scope(|scope| {
            let refused = scope.spawn(|| gate.try_enter(19).is_none());
            assert!(refused.join().unwrap());
        });
        gate.open();
        drop(gate.enter(19));
        assert!(gate.try_enter(19).is_some());
    }

    #[test]
    fn who_is_inside_is_waited_for_and_not_who_comes_later() {
        let gate = Gate::new();
        assert!(!gate.outwait(1, || unreachable!("nobody is inside")));
        let (mut inside, mut later) = ([3, 5].map(|cpu| Some(gate.enter(cpu))), None);
        let mut looks = 0;
        assert!(gate.outwait(u32::MAX, || {
            looks += 1;
            // One goes out and another goes in by the same counter; the other one stays for another look.
            match looks {
                1 => inside[0] = None,
                2 => later = Some(gate.enter(3)),
                _ => inside[1] = None,
            }
        }));
        assert_eq!(looks, 3);
        drop(later);
        let _inside = gate.enter(0);
        assert!(gate.outwait(5, || looks += 1) && looks == 8);
    }

    #[test]
    fn a_thread_that_was_about_to_find_the_gate_closed_is_not_in_a_child() {
        let gate = Gate::new();
        assert!(gate.close(1, || ()));
        // What `enter` does first. Then the fork: nobody takes it back in the child.
        gate.inside[5].fetch_add(1, Ordering::Relaxed);
        gate.forget_others();
        gate.open();
        assert!(gate.close(1, || ()) && gate.is_empty());
    }

    #[test]
    fn the_closer_passes_its_own_gate() {
        let gate = Gate::new();
        assert!(gate.close(1, || ()));
        drop(gate.enter(0));
        gate.open();
    }

    #[test]
    fn a_closer_closes_it_again_and_opens_it_as_often() {
        let gate = Gate::new();
        assert!(!gate.close_again() && gate.close(1, || ()));
        assert!(gate.close_again() && gate.close_again() && gate.open_again());
        std::thread::scope(|scope| {
            let other = scope.spawn(|| gate.close_again() || gate.try_enter(0).is_some());
            assert!(!other.join().unwrap(), "it is another thread's");
        });
        assert!(gate.open_again() && !gate.open_again() && gate.is_closed_by_me());
        assert!(gate.close_again());
        gate.forget_again();
        assert!(!gate.open_again());
        gate.open();
        assert!(!gate.close_again());
    }

    #[test]
    fn closers_queue() {
        let (gate, closed) = (Gate::new(), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        assert!(gate.close(1, || ()));
                        assert_eq!(closed.fetch_add(1, Ordering::Relaxed), 0, "two closed the gate");
                        closed.fetch_sub(1, Ordering::Relaxed);
                        gate.open();
                    }
                });
            }
        });
    }

    #[test]
    fn a_closed_gate_keeps_threads_out_until_it_opens() {
        let (gate, entered) = (Gate::new(), AtomicU32::new(0));
        assert!(gate.close(1, || ()));
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let _inside = gate.enter(0);
                entered.fetch_add(1, Ordering::Relaxed)
            });
            std::thread::sleep(core::time::Duration::from_millis(20));
            assert_eq!(entered.load(Ordering::Relaxed), 0);
            gate.open();
            thread.join().unwrap();
        });
        assert_eq!(entered.load(Ordering::Relaxed), 1);
    }
}
