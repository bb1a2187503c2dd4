//! The fork gate: who is inside the allocator's cold paths, and a way to keep everybody out for a moment.
//!
//! Sits between the public entry points of the facade and `fork`. A cold path holds objects and pages in its registers
//! that are in no structure; a child forked at that moment would lose them, and inherit held mutexes. So every cold path
//! passes the gate, and fork closes it and waits until nobody is inside: then all mutexes are free and everything is in
//! its place. One mechanism instead of taking every mutex in order; it costs a cold path two locked instructions on a
//! cache line of its own CPU.
//!
//! Never nested: only entry points pass it. The wait is bounded: a thread that forks from a signal handler which
//! interrupted a cold path would wait for itself.

use crate::constructor;
use crate::sync::{AtomicU32, Ordering, model_fence, wait, wake};
use crossbeam_utils::CachePadded;

/// Counters that threads are spread over, by CPU.
const LANES: usize = 16;

/// A gate: open from the start.
#[derive(Debug)]
pub struct Gate {
    closed: AtomicU32,
    inside: [CachePadded<AtomicU32>; LANES],
}

impl Gate {
    constructor! {
        /// An open gate with nobody inside.
        pub fn new() -> Gate {
            Gate { closed: AtomicU32::new(0), inside: lanes() }
        }
    }

    /// Goes in; waits while the gate is closed. `cpu` only spreads threads over counters.
    #[inline]
    pub fn enter(&self, cpu: usize) -> Inside<'_> {
        let lane = &self.inside[cpu % LANES];
        loop {
            // All four accesses are SeqCst, so either the closer sees this thread inside or this thread sees the gate closed:
            // 1. A counts itself, B closes. 2. A reads `closed`, B reads the counters.
            lane.fetch_add(1, Ordering::SeqCst); // Pairs with the load in `close`.
            model_fence();
            // SeqCst pairs with the store in `close`, and as an Acquire with the Release in `open`.
            if self.closed.load(Ordering::SeqCst) == 0 {
                return Inside { lane };
            }
            drop(Inside { lane });
            wait(&self.closed, 1);
        }
    }

    /// Closes the gate and waits until nobody is inside, looking at most `looks` times with `pause` in between. Answers
    /// whether that came true; the gate is closed either way. One closer at a time: the caller holds a lock for that.
    pub fn close(&self, looks: u32, mut pause: impl FnMut()) -> bool {
        self.closed.store(1, Ordering::SeqCst); // Pairs with the load in `enter`.
        model_fence();
        for _ in 0..looks {
            // SeqCst pairs with the addition in `enter`, and as an Acquire with the Release in Inside::drop.
            if self.inside.iter().all(|lane| lane.load(Ordering::SeqCst) == 0) {
                return true;
            }
            pause();
        }
        false
    }

    /// Opens the gate again and wakes who waits before it.
    pub fn open(&self) {
        self.closed.store(0, Ordering::Release); // Pairs with the Acquire in `enter`.
        wake(&self.closed, i32::MAX as u32);
    }

    /// Forgets everybody inside: in a forked child, where they do not exist.
    pub fn forget_inside(&self) {
        self.inside.iter().for_each(|lane| lane.store(0, Ordering::Relaxed));
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
        assert!(!gate.close(5, || ()));
        drop(inside);
        assert!(gate.close(1, || ()));
        gate.open();
        drop(gate.enter(19));
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
