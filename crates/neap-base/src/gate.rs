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
//! Never nested: only entry points pass it, and a signal handler that interrupts one and allocates, which none may, or forks: then the closer is inside
//! itself. A word of each thread's own says where it is counted, and how often, so the closer knows whom it would wait for in vain, and a child which count is its own.
//!
//! A child that the bare system call `clone` made has run no fork handler: it finds the counts of
//! its parent's threads, and a gate that one of these has closed. Before anything waits, it
//! compares the number of its process with that of the last one that did, and forgets threads that
//! it does not have.

use crate::constructor;
use crate::sync::{
    AtomicU32, AtomicUsize, Ordering, inside, is_alone, me, model_fence, process, set_inside, wait, wake,
};
use core::marker::PhantomData;
use crossbeam_utils::CachePadded;

const OPEN: u32 = 0;
/// Nobody is inside.
const CLOSED: u32 = 1;
/// Closed, and somebody is still inside, or may be.
const CLOSED_IN_VAIN: u32 = 2;

/// Counters that threads are spread over, by CPU.
const LANES: usize = 16;
/// Where a lane lies leaves these bits of a thread's word for how often it is counted there.
const DEPTH: usize = align_of::<CachePadded<AtomicU32>>() - 1;

/// A gate: open from the start.
#[derive(Debug)]
pub struct Gate {
    closed: AtomicU32,
    /// Who closed it: [`me`](crate::sync::me).
    closer: AtomicUsize,
    /// How often the closer has closed it again; nobody else looks.
    again: AtomicU32,
    /// Threads that are inside and are about to close it.
    stuck: AtomicU32,
    /// The process whose threads are counted; 0: none has been told. No part of what is explored: a
    /// model is one process.
    process: core::sync::atomic::AtomicU32,
    inside: [CachePadded<AtomicU32>; LANES],
}

impl Gate {
    constructor! {
        /// An open gate with nobody inside.
        pub fn new() -> Gate {
            Gate { closed: AtomicU32::new(OPEN), closer: AtomicUsize::new(0), again: AtomicU32::new(0), stuck: AtomicU32::new(0), process: core::sync::atomic::AtomicU32::new(0), inside: lanes() }
        }
    }

    /// Goes in; waits while the gate is closed. `cpu` only spreads threads over counters.
    #[inline]
    pub fn enter(&self, cpu: usize) -> Inside<'_> {
        loop {
            match self.attempt(cpu) {
                Ok(inside) => return inside,
                Err(closed) => {
                    self.adopt();
                    wait(&self.closed, closed);
                }
            }
        }
    }

    /// Says that the counts are of this process's threads. In a child that was not made by `fork`
    /// they are not: it forgets them, and opens a gate that a thread of its parent's has closed.
    /// Where it has several threads by then, nothing says which counts are theirs, and waiting is
    /// in vain from then on.
    pub fn adopt(&self) {
        let own = process();
        // Relaxed: a child finds what its parent had, and of several threads of its own one
        // forgets.
        let before = self.process.swap(own, Ordering::Relaxed);
        if before == own || before == 0 {
            return;
        }
        if !is_alone() {
            self.stuck.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.forget_others();
        if self.is_closed_to_me() {
            self.open();
        }
    }

    /// Goes in, unless the gate is closed.
    pub fn try_enter(&self, cpu: usize) -> Option<Inside<'_>> {
        self.attempt(cpu).ok()
    }

    /// Goes in, or answers how the gate is closed.
    #[inline(always)]
    fn attempt(&self, cpu: usize) -> Result<Inside<'_>, u32> {
        let before = inside();
        let (lane, depth) = match self.own_lane() {
            None => (&self.inside[cpu % LANES], 0),
            Some(own) => own,
        };
        // Before the count: a signal handler that forks in between takes the thread for one that is inside.
        set_inside(core::ptr::from_ref(lane).addr() | (depth + 1));
        // All four accesses are SeqCst, so either the closer sees this thread inside or this thread sees the gate closed:
        // 1. A counts itself, B closes. 2. A reads `closed`, B reads the counters.
        lane.fetch_add(1, Ordering::SeqCst); // Pairs with the load in `close`.
        model_fence();
        // SeqCst pairs with the exchange in `close_in_vain`, and as an Acquire with the Release in `open`.
        let closed = self.closed.load(Ordering::SeqCst);
        let inside = Inside { lane, before, thread: PhantomData };
        // The closer itself passes: a fork handler of the program's that allocates, run between ours and the fork. And so does who is inside already, whom
        // the closer waits for.
        if closed == OPEN || depth > 0 || self.closer.load(Ordering::Relaxed) == me() {
            Ok(inside)
        } else {
            Err(closed)
        }
    }

    /// Where this thread is counted, and how often; `None`: it is not inside.
    fn own_lane(&self) -> Option<(&CachePadded<AtomicU32>, usize)> {
        let word = inside();
        let own = |lane: &&CachePadded<AtomicU32>| core::ptr::from_ref(*lane).addr() == word & !DEPTH;
        if word == 0 { None } else { self.inside.iter().find(own).map(|lane| (lane, word & DEPTH)) }
    }

    /// Whether this thread is inside: a signal handler asks, which has interrupted a cold path.
    pub fn is_inside(&self) -> bool {
        self.own_lane().is_some()
    }

    /// Closes the gate and waits until nobody is inside but this thread itself, as long as there is `patience`, which is asked after each look in vain. Answers
    /// whether nobody is; the gate is closed either way. Closers queue: where the gate is closed already, this first
    /// waits until it is open again.
    pub fn close(&self, mut patience: impl FnMut() -> bool) -> bool {
        // Again where a signal handler has forked meanwhile, and this is its child, which has opened the gate.
        while !self.is_closed_by_me() {
            self.close_in_vain();
            // SeqCst pairs with the addition in `attempt`, and as an Acquire with the Release in Inside::drop.
            while self.lanes_and_own().any(|(lane, own)| lane.load(Ordering::SeqCst) > own) {
                if !patience() {
                    return false;
                }
            }
        }
        let is_empty = !self.is_inside();
        if is_empty {
            // Not before, so that a signal handler which forks meanwhile finds no more than there is. Relaxed: for this thread and its child.
            self.closed.store(CLOSED, Ordering::Relaxed);
        }
        is_empty
    }

    /// Runs `close`, which is to close the gate, by a thread that may be inside: who closes it at the same moment would wait for that thread, and it for that one.
    pub fn close_by<R>(&self, close: impl FnOnce() -> R) -> R {
        if !self.is_inside() {
            return close();
        }
        // Relaxed: whoever waits looks again.
        self.stuck.fetch_add(1, Ordering::Relaxed);
        let answer = close();
        self.stuck.fetch_sub(1, Ordering::Relaxed);
        answer
    }

    /// Whether waiting for those inside may be in vain: this thread is one of them, or another one is about to close the gate.
    pub fn is_wait_vain(&self) -> bool {
        self.is_inside() || self.stuck.load(Ordering::Relaxed) > 0
    }

    /// Closes the gate, whoever is inside.
    pub fn close_in_vain(&self) {
        self.adopt();
        // SeqCst pairs with the load in `attempt`; as an Acquire with the Release in `open` of the last closer.
        while let Err(closed) = self.closed.compare_exchange(OPEN, CLOSED_IN_VAIN, Ordering::SeqCst, Ordering::Relaxed)
        {
            wait(&self.closed, closed);
        }
        self.closer.store(me(), Ordering::Relaxed);
        model_fence();
    }

    /// Every counter, and how much of it is this thread.
    fn lanes_and_own(&self) -> impl Iterator<Item = (&CachePadded<AtomicU32>, u32)> {
        let own = self.own_lane();
        let part = move |lane| own.filter(|own| core::ptr::eq(own.0, lane)).map_or(0, |own| own.1 as u32);
        self.inside.iter().map(move |lane| (lane, part(lane)))
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
        self.is_closed() && !self.is_closed_by_me()
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

    /// In a forked child, where only the closer is left: takes back the counts of threads that do not exist here. Some may have been inside, and whoever finds the
    /// gate closed has counted itself first, and the fork may have come in between. The closer's own stays: it comes out in the child as well. (Where a signal
    /// handler forks that has come between a thread's word and its count, that may be one too many.)
    pub fn forget_others(&self) {
        self.lanes_and_own().for_each(|(lane, own)| _ = lane.fetch_min(own, Ordering::Relaxed));
        self.stuck.store(0, Ordering::Relaxed);
        self.process.store(process(), Ordering::Relaxed);
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
    /// The thread's word as it was.
    before: usize,
    /// It goes out where it came in.
    thread: PhantomData<*const ()>,
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        self.lane.fetch_sub(1, Ordering::Release); // Pairs with the Acquire in `close` and `outwait`.
        set_inside(self.before); // After the count, as in `attempt`.
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Another thread comes in, and it is the caller who lets it out.
    fn count_another(gate: &Gate, lane: usize) -> &AtomicU32 {
        gate.inside[lane].fetch_add(1, Ordering::Relaxed);
        &gate.inside[lane]
    }

    fn not_again() -> bool {
        unreachable!("nobody else is inside")
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no assembly, which a thread's word is read by")]
    fn a_closer_that_is_inside_waits_for_others_and_not_for_itself() {
        let gate = Gate::new();
        // A signal handler that allocates has interrupted a cold path, on another CPU by now, and is interrupted in its turn.
        let outer = gate.enter(3);
        let inner = gate.enter(4);
        assert_eq!((gate.inside[3].load(Ordering::Relaxed), gate.inside[4].load(Ordering::Relaxed)), (2, 0));
        for lane in [3, 5] {
            let (another, mut looks) = (count_another(&gate, lane), 0);
            assert!(!gate.close(|| {
                looks += 1;
                another.fetch_sub(u32::from(looks == 7), Ordering::Relaxed);
                assert!(looks < 8, "it would wait for itself");
                true
            }));
            assert!(looks == 7 && !gate.is_empty() && gate.is_inside());
            gate.open();
        }
        // Another one that forks does not wait for it for ever.
        gate.close_by(|| {
            assert!(std::thread::scope(|scope| scope
                .spawn(|| gate.is_wait_vain() && !gate.is_inside())
                .join()
                .unwrap()));
        });
        assert!(std::thread::scope(|scope| scope.spawn(|| !gate.is_wait_vain()).join().unwrap()));
        // A child has neither who was inside for too long, nor who was about to find the gate closed.
        let _ = [3, 5].map(|lane| count_another(&gate, lane));
        assert!(!gate.close(|| false));
        gate.forget_others();
        gate.open();
        drop(inner);
        drop(outer);
        assert!(!gate.is_inside() && gate.close(not_again));
    }

    /// The test's process has other threads, so none of the counts can be told to be another
    /// process's.
    #[test]
    fn counts_of_another_process_are_not_waited_out() {
        let gate = Gate::new();
        gate.adopt();
        let _ = count_another(&gate, 3);
        assert!(!gate.is_wait_vain());
        gate.process.fetch_add(1, Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| gate.adopt());
        });
        assert!(gate.is_wait_vain() && !gate.close(|| false));
        gate.forget_others();
        gate.open();
        assert!(!gate.is_wait_vain() && gate.close(not_again));
    }

    #[test]
    fn closing_waits_for_those_inside_and_gives_up() {
        let gate = Gate::new();
        let (inside, mut looks) = (count_another(&gate, 3), 0);
        let five = || {
            looks += 1;
            looks < 5
        };
        assert!(!gate.close(five) && !gate.is_empty() && looks == 5);
        gate.open();
        let out = || {
            inside.fetch_sub(1, Ordering::Relaxed);
            true
        };
        assert!(gate.close(out) && gate.is_empty());
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
        let ([one, other], mut looks) = ([3, 5].map(|lane| count_another(&gate, lane)), 0);
        assert!(gate.outwait(u32::MAX, || {
            looks += 1;
            // One goes out and another goes in by the same counter; the other one stays for another look.
            match looks {
                1 => _ = one.fetch_sub(1, Ordering::Relaxed),
                2 => _ = one.fetch_add(1, Ordering::Relaxed),
                _ => _ = other.fetch_sub(1, Ordering::Relaxed),
            }
        }));
        assert_eq!(looks, 3);
        assert!(gate.outwait(5, || looks += 1) && looks == 8);
    }

    #[test]
    fn a_thread_that_was_about_to_find_the_gate_closed_is_not_in_a_child() {
        let gate = Gate::new();
        assert!(gate.close(not_again));
        // What `enter` does first. Then the fork: nobody takes it back in the child.
        gate.inside[5].fetch_add(1, Ordering::Relaxed);
        gate.forget_others();
        gate.open();
        assert!(gate.close(not_again) && gate.is_empty());
    }

    #[test]
    fn the_closer_passes_its_own_gate() {
        let gate = Gate::new();
        assert!(gate.close(not_again));
        drop(gate.enter(0));
        gate.open();
    }

    #[test]
    fn a_closer_closes_it_again_and_opens_it_as_often() {
        let gate = Gate::new();
        assert!(!gate.close_again() && gate.close(not_again));
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
                        assert!(gate.close(|| true));
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
        assert!(gate.close(not_again));
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
