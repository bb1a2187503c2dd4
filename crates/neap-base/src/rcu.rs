//! Read-copy-update: readers use data that is seldom replaced, without a lock, a locked instruction
//! or a wait. Replaced data is freed once no reader can still use it.
//!
//! # Design
//!
//! A reader counts its entry and its exit by one restartable sequence each, in words of the CPU
//! that it is on at that moment. A reader counts in one of two *phases*. A phase has no readers if
//! it has as many exits as entries. Without sequences, and on isolated CPUs, which are never
//! fenced, a reader counts by a locked instruction in shared words. When it enters, a full fence
//! follows.
//!
//! A *grace period*:
//! 1. A step takes all deferred objects. No new reader finds them.
//! 2. It fences all CPUs that are not isolated. A reader whose count the fence did not make visible
//!    began after the fence, and finds none of these objects.
//! 3. Steps check each phase until one has found it without readers. They sum the exits before the
//!    entries, so they count no exit of a reader whose entry they did not count.
//! 4. Once a step has found one phase without readers, it lets new readers count in that phase. The
//!    other phase therefore drains, even if new readers keep entering.
//! 5. Once steps have found both phases without readers, the last step frees the objects.
//!
//! Item 4 needs no fence: a reader that counts in a phase after a step found it empty began after
//! item 2. If the fence fails, the step frees nothing, and a later call tries again.
//!
//! # Locking
//!
//! A thread holds the *turn*, a mutex, during one step and while [`Run`] functions free objects.
//! [`Rcu::open`] waits for it; a step only tries it. No call allocates. [`Rcu::enter`] and
//! [`Rcu::defer`] free nothing.
//!
//! # Fork
//!
//! [`Rcu::advance`] and [`Rcu::grace`] must be called inside the fork gate. Otherwise a child may
//! find the turn taken, and never free again. Readers and [`Rcu::defer`] need no gate. In the
//! child, [`Rcu::forget_others`] subtracts the readers that were inside.
//!
//! Source: P. McKenney, "Sleepable RCU", 2006 (two phases, summed counts).

use crate::platform::memory::Range;
use crate::platform::{Errno, Platform};
use crate::sync::{AtomicIsize, AtomicPtr, AtomicUsize, Ordering, UnsafeCell, fence, spin, spread};
use crate::{Mutex, constructor};
use core::fmt;
use core::ptr::{NonNull, null_mut, with_exposed_provenance};
use core::sync::atomic::compiler_fence;
use crossbeam_utils::CachePadded;

/// Indexes in [`Words`]. `ENTERED + phase` is the count of a phase's entries, `LEFT + phase` that
/// of its exits.
const ENTERED: usize = 0;
const LEFT: usize = 2;

/// Counters of one lane: entries in phases 0 and 1, then exits of phases 0 and 1.
type Words = CachePadded<[AtomicUsize; 4]>;

/// Counters of one CPU, in the order of [`Words`]. Only restartable sequences change them.
type Record = CachePadded<[core::sync::atomic::AtomicUsize; 4]>;

/// Lanes for readers without sequences, selected by thread.
const LANES: usize = 8;

/// Attempts of a sequence before a reader counts in a lane. The number is bounded, since a debugger
/// that single-steps aborts every attempt.
const ATTEMPTS_MAX: usize = 3;

/// Value of [`Turn::seen`] after both phases were seen without readers.
const BOTH: usize = 0b11;

/// Bound on the waits of [`Rcu::grace`] by [`Platform::pause`]. Each further wait is a sleep of
/// [`SLEEP_NS`] nanoseconds.
const PAUSES_MAX: u32 = 20;
const SLEEP_NS: u64 = 50_000;

/// Function that frees the object with this head. It may defer other objects and take locks. It
/// must not wait for a grace period.
pub type Run<C> = unsafe fn(NonNull<RcuHead<C>>, &C);

/// A field that an object needs to be deferred: a link of a list, and the function that frees the
/// object. Zeroed memory is a valid head.
pub struct RcuHead<C = ()>(UnsafeCell<Link<C>>);

struct Link<C> {
    next: *mut RcuHead<C>,
    run: Option<Run<C>>,
}

// SAFETY: a head's link is accessed by the thread that calls `Rcu::defer`, which owns the head
// then, and afterwards only by the thread that holds the turn. The list hands it over by Release
// and AcqRel.
unsafe impl<C> Sync for RcuHead<C> {}
// SAFETY: a head holds two pointers, neither of which depends on a thread.
unsafe impl<C> Send for RcuHead<C> {}

impl<C> RcuHead<C> {
    constructor! {
        /// A head that is not deferred.
        pub fn new() -> RcuHead<C> {
            RcuHead(UnsafeCell::new(Link { next: null_mut(), run: None }))
        }
    }
}

impl<C> Default for RcuHead<C> {
    fn default() -> Self {
        RcuHead::new()
    }
}

impl<C> fmt::Debug for RcuHead<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RcuHead")
    }
}

/// Fields that readers load, on a cache line that is seldom written.
struct Front {
    /// Bit 0: the phase in which readers count. Other bits: the number of forks between this
    /// process and the first one.
    now: AtomicUsize,
    /// Offset of a thread's rseq area from the thread pointer; 0 without sequences.
    sequences: AtomicIsize,
    /// Address of a table with the address of each CPU's record; 0 for a CPU without one.
    table: AtomicUsize,
    cpus: AtomicUsize,
}

/// The grace period under way.
struct Turn<C> {
    fenced: bool,
    /// Bit `n` is set once a step has found phase `n` without readers since the fence.
    seen: usize,
    /// List of the objects that are freed at the period's end.
    batch: *mut RcuHead<C>,
}

// SAFETY: the heads of a batch may be freed by any thread, as `Rcu::defer` requires, and only the
// thread that holds the turn accesses them.
unsafe impl<C> Send for Turn<C> {}

/// A moment of a domain ([`Rcu`]), stored as the number of the first grace period that begins after
/// it.
#[derive(Clone, Copy, Debug)]
pub struct Mark(usize);

/// A domain: readers, and the deferred objects that wait for them. [`Run`] functions receive the
/// context `C`, for example the instance that owns the objects.
pub struct Rcu<C = ()> {
    front: CachePadded<Front>,
    deferred: AtomicPtr<RcuHead<C>>,
    /// Number of grace periods that began, including the current one. `completed` counts those that
    /// ended.
    started: AtomicUsize,
    completed: AtomicUsize,
    /// For each phase, the number of readers that entered in a parent process and will never leave.
    forgotten: [AtomicUsize; 2],
    turn: Mutex<Turn<C>>,
    lanes: [Words; LANES],
}

constructor! {
    fn lane() -> Words {
        CachePadded::new([AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0)])
    }
}

impl<C> Rcu<C> {
    constructor! {
        /// Creates a domain without sequences, usable at once. [`Rcu::open`] makes it faster.
        pub fn new() -> Rcu<C> {
            Rcu {
                front: CachePadded::new(Front {
                    now: AtomicUsize::new(0),
                    sequences: AtomicIsize::new(0),
                    table: AtomicUsize::new(0),
                    cpus: AtomicUsize::new(0),
                }),
                deferred: AtomicPtr::new(null_mut()),
                started: AtomicUsize::new(0),
                completed: AtomicUsize::new(0),
                forgotten: [AtomicUsize::new(0), AtomicUsize::new(0)],
                turn: Mutex::new(Turn { fenced: false, seen: 0, batch: null_mut() }),
                lanes: [lane(), lane(), lane(), lane(), lane(), lane(), lane(), lane()],
            }
        }
    }

    /// Lets readers count by restartable sequences if the platform has them. Maps 136 bytes for
    /// each CPU, in whole pages. Readers may be active. A [`Run`] function must not call this,
    /// since its thread holds the turn. Further calls do nothing.
    ///
    /// # Errors
    /// The error of [`Platform::map`]. Readers continue without sequences.
    pub fn open<P: Platform>(&self, platform: &P) -> Result<(), Errno> {
        // Readers begin to use sequences while this thread holds the turn. A grace period whose
        // fence is done does not depend on readers that enter later. A later fence includes
        // sequences.
        let _turn = self.turn.lock();
        let Some(sequences) = platform.rseq_offset() else { return Ok(()) };
        if self.front.sequences.load(Ordering::Relaxed) != 0 {
            return Ok(());
        }
        let cpus = platform.cpus();
        let records = platform.map(length(platform, cpus))?;
        let table = records + cpus * size_of::<Record>();
        for cpu in 0..cpus {
            let record = if platform.is_isolated(cpu) { 0 } else { records + cpu * size_of::<Record>() };
            // SAFETY: `map` returned `length` bytes, and the table's `cpus` words are their end. No
            // other thread knows the mapping yet.
            unsafe { core::ptr::with_exposed_provenance_mut::<usize>(table).add(cpu).write(record) };
        }
        self.front.cpus.store(cpus, Ordering::Relaxed);
        self.front.table.store(table, Ordering::Relaxed);
        // Release pairs with the Acquire in `count` and `sum`.
        self.front.sequences.store(sequences, Ordering::Release);
        Ok(())
    }

    /// The mapping that [`Rcu::open`] made, if any.
    pub fn mapping<P: Platform>(&self, platform: &P) -> Option<Range> {
        // Acquire pairs with the Release in `open`.
        let opened = self.front.sequences.load(Ordering::Acquire) != 0;
        let (cpus, table) = (self.front.cpus.load(Ordering::Relaxed), self.front.table.load(Ordering::Relaxed));
        opened.then(|| Range { start: table - cpus * size_of::<Record>(), length: length(platform, cpus) })
    }

    /// Unmaps the memory that [`Rcu::open`] mapped.
    ///
    /// # Safety
    /// No thread uses the domain any more.
    pub unsafe fn close<P: Platform>(&self, platform: &P) {
        let cpus = self.front.cpus.load(Ordering::Relaxed);
        if self.front.sequences.swap(0, Ordering::Relaxed) != 0 {
            let records = self.front.table.load(Ordering::Relaxed) - cpus * size_of::<Record>();
            // SAFETY: `open` mapped these bytes. The caller promises that no thread uses the domain
            // any more, so none accesses them.
            unsafe { platform.unmap(records, length(platform, cpus)) };
        }
    }

    /// Begins a read section, which ends when the returned value is dropped. No object that the
    /// reader finds meanwhile is freed before that end. Never waits. Sections may nest, and their
    /// threads may sleep. The value may move to another thread. Signal-safe.
    #[inline]
    pub fn enter(&self) -> Reading<'_, C> {
        // A stale phase is fine: every grace period checks both.
        let now = self.front.now.load(Ordering::Relaxed);
        self.count(ENTERED + (now & 1));
        // SeqCst for the compiler only: the fence on this CPU in `step` makes it a real one.
        compiler_fence(Ordering::SeqCst);
        Reading { rcu: self, now }
    }

    #[inline(always)]
    fn count(&self, word: usize) {
        if !self.count_here(word) {
            self.count_elsewhere(word);
        }
    }

    /// Adds one to a word of this CPU by one attempt of a sequence. Returns `false` if nothing was
    /// added.
    #[inline(always)]
    fn count_here(&self, word: usize) -> bool {
        // Acquire pairs with the Release in `open`: the table is there.
        let sequences = self.front.sequences.load(Ordering::Acquire);
        let [table, cpus] = [&self.front.table, &self.front.cpus].map(|number| number.load(Ordering::Relaxed));
        // SAFETY: `sequences` is the platform's offset of the rseq area. `open` published the table
        // before it, with `cpus` entries that are 0 or lead to a mapped record. Only sequences
        // change a record.
        sequences != 0 && unsafe { neap_os::rseq::count_one(sequences, table, cpus, word) }
    }

    #[cold]
    fn count_elsewhere(&self, word: usize) {
        if (1..ATTEMPTS_MAX).any(|_| self.count_here(word)) {
            return;
        }
        // Release pairs with the Acquire in `sum`: a thread that sees this exit sees this reader's
        // accesses.
        self.lanes[spread() % LANES][word].fetch_add(1, Ordering::Release);
        if word < LEFT {
            // SeqCst pairs with the fence in `step`: either the step sees this reader, or this
            // reader sees the stores before the step.
            fence(Ordering::SeqCst);
        }
    }

    /// Defers an object. Once all current readers have left, a step calls `run` with `head` and the
    /// step's context. Returns whether the list of deferred objects was empty before. If so, the
    /// caller must arrange a call of [`Rcu::advance`]. Never waits, and calls no [`Run`] function.
    ///
    /// # Safety
    /// * New readers do not find the object.
    /// * The head is part of the object. Until `run` is called it does not move, and no other code
    ///   accesses it.
    /// * Any thread may call `run` with the head after the grace period.
    pub unsafe fn defer(&self, head: NonNull<RcuHead<C>>, run: Run<C>) -> bool {
        let mut next = self.deferred.load(Ordering::Relaxed);
        loop {
            // SAFETY: the caller promises that the head is valid and that no other code accesses
            // it.
            unsafe { head.as_ref().0.with_mut(|link| *link = Link { next, run: Some(run) }) };
            // Release pairs with the AcqRel in `step`: the step sees the head, and all stores
            // before.
            match self.deferred.compare_exchange_weak(next, head.as_ptr(), Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return next.is_null(),
                Err(other) => next = other,
            }
        }
    }

    /// Makes one step: takes the deferred objects, checks for readers, and frees the objects if no
    /// reader is left. Never waits. Returns whether work is left for another call. While another
    /// thread makes a step, this does nothing and returns `true`.
    ///
    /// # Errors
    /// The fence's error. The step freed nothing, and a later call tries again.
    pub fn advance<P: Platform>(&self, platform: &P, context: &C) -> Result<bool, Errno> {
        self.step(platform, context, 0)
    }

    /// Waits until all current readers have left, and this or another thread has freed all objects
    /// deferred before the call. A reader or a [`Run`] function must not call this: it would wait
    /// for itself.
    ///
    /// # Errors
    /// The fence's error.
    pub fn grace<P: Platform>(&self, platform: &P, context: &C) -> Result<(), Errno> {
        let Mark(wanted) = self.mark();
        let mut polls = 0;
        // Acquire pairs with the Release in `step`: accesses of readers and of freeing functions
        // are visible.
        while self.completed.load(Ordering::Acquire) < wanted {
            let before = self.completed.load(Ordering::Relaxed);
            self.step(platform, context, wanted)?;
            if self.completed.load(Ordering::Relaxed) == before {
                polls += 1;
                // In a model this runs another thread.
                spin();
                if polls < PAUSES_MAX { platform.pause() } else { platform.sleep(SLEEP_NS) }
            }
        }
        Ok(())
    }

    /// Marks this moment, for [`Rcu::advance_past`].
    pub fn mark(&self) -> Mark {
        // SeqCst pairs with the fence in `step`: a period that this thread does not see begun sees
        // this thread's earlier stores.
        fence(Ordering::SeqCst);
        Mark(self.started.load(Ordering::Relaxed) + 1)
    }

    /// Makes one step as [`Rcu::advance`] does. Returns whether all readers of the marked moment
    /// have left.
    ///
    /// # Errors
    /// The fence's error. Some of these readers may not have left. A later call tries again.
    pub fn advance_past<P: Platform>(&self, platform: &P, context: &C, mark: Mark) -> Result<bool, Errno> {
        self.step(platform, context, mark.0)?;
        // Acquire pairs with the Release in `step`: accesses of readers are visible.
        Ok(self.completed.load(Ordering::Acquire) >= mark.0)
    }

    /// Makes one step. If no object is deferred, begins a new period only if fewer than `wanted`
    /// periods are complete.
    fn step<P: Platform>(&self, platform: &P, context: &C, wanted: usize) -> Result<bool, Errno> {
        let Some(mut turn) = self.turn.try_lock() else { return Ok(true) };
        let completed = self.completed.load(Ordering::Relaxed);
        if self.started.load(Ordering::Relaxed) == completed {
            if self.deferred.load(Ordering::Relaxed).is_null() && wanted <= completed {
                return Ok(false);
            }
            self.started.store(completed + 1, Ordering::Relaxed);
            // AcqRel pairs with the Release in `defer`. With the fence in `mark`, a thread that
            // defers too late for this swap sees the period begun.
            let batch = self.deferred.swap(null_mut(), Ordering::AcqRel);
            *turn = Turn { fenced: false, seen: 0, batch };
        }
        if !turn.fenced {
            // SeqCst pairs with the fences in `count_elsewhere` and `mark`. The platform's fence
            // pairs with the compiler fences of readers.
            fence(Ordering::SeqCst);
            if self.front.sequences.load(Ordering::Relaxed) != 0 {
                platform.fence_all()?;
            }
            turn.fenced = true;
        }
        for phase in 0..2 {
            if turn.seen >> phase & 1 == 0 && self.is_empty(phase) {
                turn.seen |= 1 << phase;
            }
        }
        if turn.seen != BOTH {
            if turn.seen != 0 {
                let now = self.front.now.load(Ordering::Relaxed);
                self.front.now.store(now & !1 | turn.seen >> 1, Ordering::Relaxed);
            }
            return Ok(true);
        }
        while let Some(head) = NonNull::new(turn.batch) {
            // SAFETY: `defer` put the head into the list that became this batch, so its object
            // still exists. The turn makes this thread the only one that accesses it.
            let Link { next, run } = unsafe { head.as_ref().0.with_mut(|link| link.read()) };
            turn.batch = next;
            if let Some(run) = run {
                // SAFETY: `defer`'s caller promised that `run` may be called after a grace period.
                // Both phases were seen without readers since the fence, so the period is over.
                unsafe { run(head, context) };
            }
        }
        // Release pairs with the Acquire in `grace` and `advance_past`.
        self.completed.store(completed + 1, Ordering::Release);
        Ok(!self.deferred.load(Ordering::Relaxed).is_null())
    }

    /// Returns whether a phase has no readers: its entries minus its exits equal the number in
    /// `forgotten`. Counts every reader that an earlier fence made visible.
    fn is_empty(&self, phase: usize) -> bool {
        let left = self.sum(LEFT + phase);
        self.sum(ENTERED + phase).wrapping_sub(left) == self.forgotten[phase].load(Ordering::Relaxed)
    }

    fn sum(&self, word: usize) -> usize {
        // Acquire pairs with the Release in `open`.
        let opened = self.front.sequences.load(Ordering::Acquire) != 0;
        let cpus = if opened { self.front.cpus.load(Ordering::Relaxed) } else { 0 };
        let records = self.front.table.load(Ordering::Relaxed).wrapping_sub(cpus * size_of::<Record>());
        let records = (0..cpus).map(|cpu| {
            let record = with_exposed_provenance::<Record>(records).wrapping_add(cpu);
            // SAFETY: `open` mapped a zeroed record for each CPU before it published `sequences`. A
            // record's words are atomics.
            let record = unsafe { &*record };
            // Acquire pairs with the commits of sequences, which are release stores.
            record[word].load(Ordering::Acquire)
        });
        // Acquire pairs with the Release in `count_elsewhere`, and orders the sum of entries after
        // this one.
        let lanes = self.lanes.iter().map(|lane| lane[word].load(Ordering::Acquire));
        lanes.chain(records).fold(0, usize::wrapping_add)
    }

    /// Subtracts the readers of threads that do not exist in a forked child. Deferred objects stay
    /// deferred. The child must register for fences again before [`Rcu::advance`] can fence.
    ///
    /// # Safety
    /// The caller is the only thread of the child. If a signal handler forked and interrupted a
    /// reader of this thread, the data that the reader found is no longer protected. Its
    /// [`Reading`] may be dropped.
    pub unsafe fn forget_others(&self) {
        for phase in 0..2 {
            let inside = loop {
                let left = self.sum(LEFT + phase);
                let inside = self.sum(ENTERED + phase).wrapping_sub(left);
                // If the sums of exits differ, a signal handler has entered and left in between.
                // Then the loop counts again.
                if self.sum(LEFT + phase) == left {
                    break inside;
                }
            };
            self.forgotten[phase].store(inside, Ordering::Relaxed);
        }
        self.front.now.fetch_add(2, Ordering::Relaxed);
    }
}

/// Bytes of the records and the table, in whole pages.
fn length<P: Platform>(platform: &P, cpus: usize) -> usize {
    (cpus * (size_of::<Record>() + size_of::<usize>())).next_multiple_of(platform.page_size())
}

impl<C> Default for Rcu<C> {
    fn default() -> Self {
        Rcu::new()
    }
}

impl<C> fmt::Debug for Rcu<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [started, completed] = [&self.started, &self.completed].map(|count| count.load(Ordering::Relaxed));
        f.debug_struct("Rcu").field("started", &started).field("completed", &completed).finish_non_exhaustive()
    }
}

/// An active read section, which ends when the value is dropped.
pub struct Reading<'r, C = ()> {
    rcu: &'r Rcu<C>,
    now: usize,
}

impl<C> Drop for Reading<'_, C> {
    #[inline]
    fn drop(&mut self) {
        // SeqCst for the compiler only, pairs with the Acquire in `sum`: the section's accesses
        // come before the count, which is a release store.
        compiler_fence(Ordering::SeqCst);
        // If the numbers of forks differ, `forget_others` has subtracted this reader already.
        if self.rcu.front.now.load(Ordering::Relaxed) ^ self.now <= 1 {
            self.rcu.count(LEFT + (self.now & 1));
        }
    }
}

impl<C> fmt::Debug for Reading<'_, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reading")
    }
}
