//! The fork gate: counts threads in slow paths, and lets `fork` keep all threads out for a moment.
//!
//! # Design
//!
//! A slow path holds objects and pages in registers that are in no structure. A child forked at
//! that moment would lose them, and inherit held mutexes. Therefore every slow path enters the
//! gate. The exception is work under a lock that `fork` takes, too. `fork` closes the gate and
//! waits until no thread is inside. Then all mutexes are free, and every object and page is in a
//! structure. Entering and leaving cost one locked instruction each, on a cache line that the CPU's
//! number selects.
//!
//! Closers queue, so the gate also makes one fork wait for another. The C library's own lock does
//! not do that: glibc 2.36 and later release it while they call a fork handler.
//!
//! Only entry points enter the gate, so sections do not nest. The exception is a signal handler
//! that interrupts its thread inside the gate. It may fork, or allocate against the rules. A
//! thread-local word holds the address of the counter that the thread is counted in, and how often
//! it is counted there. With this word, a closer leaves itself out of its wait, and a forked child
//! keeps the count of its only thread.
//!
//! A child of the bare system call `clone` has run no fork handler. It finds the counts of its
//! parent's threads, and possibly a gate that one of them closed. Before a thread waits for the
//! gate or closes it, it therefore calls [`Gate::adopt`]. `adopt` compares the process's id with
//! the id at its last call. If they differ and the process has one thread, `adopt` resets the
//! counts of all other threads.

use crate::constructor;
use crate::sync::{
    AtomicU32, AtomicUsize, Ordering, inside, is_alone, me, model_fence, process, set_inside, wait, wake,
};
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use crossbeam_utils::CachePadded;

const OPEN: u32 = 0;
/// Closed, and no thread is inside.
const CLOSED: u32 = 1;
/// Closed, and a thread is or may be inside.
const CLOSED_IN_VAIN: u32 = 2;

/// Number of counters. A thread's CPU selects its counter.
const LANES: usize = 16;
/// Mask of the low bits of a thread's word, which hold the thread's depth. In a lane's address
/// these bits are zero.
const DEPTH: usize = align_of::<CachePadded<AtomicU32>>() - 1;

/// A fork gate. A new gate is open.
#[derive(Debug)]
pub struct Gate {
    closed: AtomicU32,
    /// The thread that closed the gate, as [`me`](crate::sync::me) names it.
    closer: AtomicUsize,
    /// How often the closer called `close_again` without `open_again`. Only the closer uses this
    /// field.
    again: AtomicU32,
    /// Number of threads that are inside and are closing the gate. [`Gate::adopt`] adds one if it
    /// cannot tell the counts of parent and child apart.
    stuck: AtomicU32,
    /// Id of the process whose threads are counted; 0 until a call stores it. It is an atomic of
    /// `core`, not of loom, since a model has only one process.
    process: core::sync::atomic::AtomicU32,
    inside: [CachePadded<AtomicU32>; LANES],
}

impl Gate {
    constructor! {
        /// Creates an open gate with no thread inside.
        pub fn new() -> Gate {
            Gate { closed: AtomicU32::new(OPEN), closer: AtomicUsize::new(0), again: AtomicU32::new(0), stuck: AtomicU32::new(0), process: core::sync::atomic::AtomicU32::new(0), inside: lanes() }
        }
    }

    /// Enters the gate. Waits while it is closed. `cpu` selects the counter and may be any number.
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

    /// Checks whether the counts are those of this process's threads. In a child that was made
    /// without `fork`, resets the counts of the parent's threads, and opens a gate that one of them
    /// closed. If the child has several threads by then, the counts of parent and child cannot be
    /// told apart, and [`Gate::is_wait_vain`] returns `true` from then on.
    pub fn adopt(&self) {
        let own = process();
        // Relaxed: a child has a copy of its parent's value. If several threads of the child swap,
        // exactly one of them gets the parent's value.
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

    /// Enters the gate, unless it is closed.
    pub fn try_enter(&self, cpu: usize) -> Option<Inside<'_>> {
        self.attempt(cpu).ok()
    }

    /// Enters the gate, or returns how it is closed.
    #[inline(always)]
    fn attempt(&self, cpu: usize) -> Result<Inside<'_>, u32> {
        let before = inside();
        let (lane, depth) = match self.own_lane() {
            None => (&self.inside[cpu % LANES], 0),
            Some(own) => own,
        };
        // The thread sets its word before it counts itself. A signal handler that forks in between
        // finds its thread inside, and does not wait for the thread's count.
        set_inside(core::ptr::from_ref(lane).addr() | (depth + 1));
        // SeqCst on the accesses of both sides: either the closer sees this thread inside, or this
        // thread sees the gate closed.
        //
        // | this thread | closer |
        // |---|---|
        // | 1. adds to the counter | 1. closes `closed` |
        // | 2. loads `closed` | 2. loads the counters |
        lane.fetch_add(1, Ordering::SeqCst); // Pairs with the load in `close`.
        model_fence();
        // SeqCst pairs with the exchange in `close_in_vain`, and as an Acquire with the Release in
        // `open`.
        let closed = self.closed.load(Ordering::SeqCst);
        let inside = Inside { lane, before, thread: PhantomData };
        // The closer may enter, since a fork handler of the program that runs later may allocate. A
        // thread that is inside already may enter, too, since the closer waits for it.
        if closed == OPEN || depth > 0 || self.closer.load(Ordering::Relaxed) == me() {
            Ok(inside)
        } else {
            Err(closed)
        }
    }

    /// The counter of this thread and its depth there; `None` if the thread is not inside.
    fn own_lane(&self) -> Option<(&CachePadded<AtomicU32>, usize)> {
        let word = inside();
        let own = |lane: &&CachePadded<AtomicU32>| core::ptr::from_ref(*lane).addr() == word & !DEPTH;
        if word == 0 { None } else { self.inside.iter().find(own).map(|lane| (lane, word & DEPTH)) }
    }

    /// Whether this thread is inside. A signal handler is inside if it has interrupted a slow path.
    pub fn is_inside(&self) -> bool {
        self.own_lane().is_some()
    }

    /// Closes the gate, then waits until no other thread is inside. After each check that finds
    /// another thread inside, calls `patience`, and stops waiting if it returns `false`. If another
    /// thread has closed the gate, first waits until it is open. The gate is closed at the return.
    /// Returns `true` if no thread is inside, not even this one.
    pub fn close(&self, mut patience: impl FnMut() -> bool) -> bool {
        // Repeats if this is the child of a signal handler that forked meanwhile. That child has
        // opened the gate.
        while !self.is_closed_by_me() {
            self.close_in_vain();
            // SeqCst pairs with the addition in `attempt`, and as an Acquire with the Release in
            // Inside::drop.
            while self.lanes_and_own().any(|(lane, own)| lane.load(Ordering::SeqCst) > own) {
                if !patience() {
                    return false;
                }
            }
        }
        let is_empty = !self.is_inside();
        if is_empty {
            // This is the last store, so that a signal handler that forks earlier does not find the
            // gate marked as empty. Relaxed: only the closer and its child call `is_empty`.
            self.closed.store(CLOSED, Ordering::Relaxed);
        }
        is_empty
    }

    /// Runs `close`, which closes the gate. If this thread is inside, counts the thread in `stuck`
    /// meanwhile. Other closers then know that waiting for this thread is in vain, since it waits
    /// for them.
    pub fn close_by<R>(&self, close: impl FnOnce() -> R) -> R {
        if !self.is_inside() {
            return close();
        }
        // Relaxed: a waiting closer checks again.
        self.stuck.fetch_add(1, Ordering::Relaxed);
        let answer = close();
        self.stuck.fetch_sub(1, Ordering::Relaxed);
        answer
    }

    /// Whether a wait for the threads inside may never end, since this thread is one of them, or
    /// another thread inside is closing the gate.
    pub fn is_wait_vain(&self) -> bool {
        self.is_inside() || self.stuck.load(Ordering::Relaxed) > 0
    }

    /// Closes the gate without waiting for the threads inside. Waits until an earlier closer opens
    /// it.
    pub fn close_in_vain(&self) {
        self.adopt();
        // SeqCst pairs with the load in `attempt`; as an Acquire with the Release in `open` of the
        // last closer.
        while let Err(closed) = self.closed.compare_exchange(OPEN, CLOSED_IN_VAIN, Ordering::SeqCst, Ordering::Relaxed)
        {
            wait(&self.closed, closed);
        }
        self.closer.store(me(), Ordering::Relaxed);
        model_fence();
    }

    /// Each counter, and how often this thread is counted in it.
    fn lanes_and_own(&self) -> impl Iterator<Item = (&CachePadded<AtomicU32>, u32)> {
        let own = self.own_lane();
        let part = move |lane| own.filter(|own| core::ptr::eq(own.0, lane)).map_or(0, |own| own.1 as u32);
        self.inside.iter().map(move |lane| (lane, part(lane)))
    }

    /// Waits until the threads inside at the call have left, for at most `looks` checks. The wait
    /// ends when the checks have found each counter at zero once. Calls `pause` after each other
    /// check. Further threads may enter meanwhile. Returns whether any thread was inside at the
    /// first check. The caller must be outside.
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

    /// Whether the gate is closed. Long operations inside check this, to leave early.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed) != OPEN
    }

    /// Whether a thread other than the caller has closed the gate. The closer does not wait for
    /// itself.
    pub fn is_closed_to_me(&self) -> bool {
        self.is_closed() && !self.is_closed_by_me()
    }

    /// Whether this thread has closed the gate.
    pub fn is_closed_by_me(&self) -> bool {
        self.is_closed() && self.closer.load(Ordering::Relaxed) == me()
    }

    /// Counts one more closing if this thread has closed the gate already. That is so in a signal
    /// handler that forks and has interrupted a fork. Returns whether this thread has closed the
    /// gate.
    pub fn close_again(&self) -> bool {
        let is_mine = self.is_closed_by_me();
        if is_mine {
            self.again.fetch_add(1, Ordering::Relaxed);
        }
        is_mine
    }

    /// Undoes one [`Gate::close_again`]; `false` if there is none.
    pub fn open_again(&self) -> bool {
        let again = self.again.load(Ordering::Relaxed);
        self.again.store(again.saturating_sub(1), Ordering::Relaxed);
        again > 0
    }

    /// Undoes every [`Gate::close_again`], in a child, which may never leave the signal handler.
    pub fn forget_again(&self) {
        self.again.store(0, Ordering::Relaxed);
    }

    /// Whether the gate is closed and [`Gate::close`] found no thread inside.
    pub fn is_empty(&self) -> bool {
        self.closed.load(Ordering::Relaxed) == CLOSED
    }

    /// Resets the counts of threads that do not exist in a forked child, where only the closer is
    /// left. Such a thread was inside, or had counted itself before it found the gate closed. The
    /// closer's own count stays, since it leaves in the child as well. If a signal handler forks
    /// between the store to its thread's word and the count, the kept count may be one too high.
    pub fn forget_others(&self) {
        self.lanes_and_own().for_each(|(lane, own)| _ = lane.fetch_min(own, Ordering::Relaxed));
        self.stuck.store(0, Ordering::Relaxed);
        self.process.store(process(), Ordering::Relaxed);
    }

    /// Opens the gate and wakes the threads that wait. Only the closer calls this, or its copy in a
    /// forked child. [`Gate::adopt`] calls it for a closer that the child lacks.
    pub fn open(&self) {
        self.closer.store(0, Ordering::Relaxed);
        self.closed.store(OPEN, Ordering::Release); // Pairs with `attempt` and `close_in_vain`.
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

/// A thread's stay inside the gate, which ends when the value is dropped.
///
/// A function that must run inside takes a reference to it, as the proof that its caller entered.
#[derive(Debug)]
pub struct Inside<'a> {
    lane: &'a AtomicU32,
    /// The thread's word before it entered.
    before: usize,
    /// Makes the value not `Send`: the thread that drops it sets its own word.
    thread: PhantomData<*const ()>,
}

impl Inside<'_> {
    /// Calls `body` with a value that no gate counts. It is for a host without a gate, for a caller
    /// that is inside and has no value at hand, and for one that has closed the gate or is the only
    /// user of what the gate guards.
    #[inline(always)]
    pub fn assume<R>(body: impl FnOnce(&Inside<'_>) -> R) -> R {
        let lane = AtomicU32::new(0);
        body(&ManuallyDrop::new(Inside { lane: &lane, before: 0, thread: PhantomData }))
    }
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

    /// Counts one more thread in a lane. Returns the lane's counter, from which the caller
    /// subtracts it.
    fn count_another(gate: &Gate, lane: usize) -> &AtomicU32 {
        gate.inside[lane].fetch_add(1, Ordering::Relaxed);
        &gate.inside[lane]
    }

    fn not_again() -> bool {
        unreachable!("no other thread is inside")
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no assembly, which a thread's word is read by")]
    fn a_closer_that_is_inside_waits_for_others_and_not_for_itself() {
        let gate = Gate::new();
        // Two signal handlers on top of each other: each allocates, the second on another CPU.
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
        // Another thread that forks does not wait for this thread for ever.
        gate.close_by(|| {
            assert!(std::thread::scope(|scope| scope
                .spawn(|| gate.is_wait_vain() && !gate.is_inside())
                .join()
                .unwrap()));
        });
        assert!(std::thread::scope(|scope| scope.spawn(|| !gate.is_wait_vain()).join().unwrap()));
        // A child has no thread that stayed inside, nor one that was about to find the gate closed.
        let _ = [3, 5].map(|lane| count_another(&gate, lane));
        assert!(!gate.close(|| false));
        gate.forget_others();
        gate.open();
        drop(inner);
        drop(outer);
        assert!(!gate.is_inside() && gate.close(not_again));
    }

    /// The test's process has several threads, so `adopt` cannot reset counts of another process.
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
    fn gate_outwait_ignores_threads_that_enter_later() {
        let gate = Gate::new();
        assert!(!gate.outwait(1, || unreachable!("no thread is inside")));
        let ([one, other], mut looks) = ([3, 5].map(|lane| count_another(&gate, lane)), 0);
        assert!(gate.outwait(u32::MAX, || {
            looks += 1;
            // A thread leaves and another enters by the same counter; the third stays for one more
            // check.
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
    fn fork_between_gate_count_and_check_leaves_child_gate_empty() {
        let gate = Gate::new();
        assert!(gate.close(not_again));
        // The first action of `enter`, then the fork: in the child, no thread undoes it.
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
