//! Read-copy-update: readers use data that is seldom replaced, without a lock, a locked instruction
//! or a wait. A thread that replaced data learns when no reader can still use it.
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
//! 1. A thread has replaced data, so no new reader finds it. The thread marks the moment.
//! 2. A step fences all CPUs that are not isolated. A reader whose count the fence did not make
//!    visible began after the fence, and does not find that data.
//! 3. Steps check each phase until one has found it without readers. They sum the exits before the
//!    entries, so they count no exit of a reader whose entry they did not count.
//! 4. Once a step has found one phase without readers, it lets new readers count in that phase. The
//!    other phase therefore drains, even if new readers keep entering.
//! 5. Once steps have found both phases without readers, the period is complete. All readers of
//!    moments that were marked before its first step have left.
//!
//! Item 4 needs no fence: a reader that counts in a phase after a step found it empty began after
//! item 2. If the fence fails, the period is not complete, and a later call tries again.
//!
//! # Locking
//!
//! A thread holds the *turn*, a mutex, during one step. [`Rcu::open`] waits for it; a step only
//! tries it. No call allocates.
//!
//! # Fork
//!
//! [`Rcu::advance_past`] takes the turn inside the fork gate, so no child finds the turn taken.
//! Readers and [`Rcu::mark`] need no gate. In the child, [`Rcu::forget_others`] subtracts the
//! readers that were inside.
//!
//! Source: P. McKenney, "Sleepable RCU", 2006 (two phases, summed counts).

use crate::gate::Inside;
use crate::platform::memory::Range;
use crate::platform::{Errno, Platform};
use crate::sync::{AtomicIsize, AtomicUsize, Ordering, fence, spread};
use crate::{Mutex, constructor};
use core::fmt;
use core::ptr::with_exposed_provenance;
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
struct Turn {
    fenced: bool,
    /// Bit `n` is set once a step has found phase `n` without readers since the fence.
    seen: usize,
}

/// A moment of a domain ([`Rcu`]), stored as the number of the first grace period that begins after
/// it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Mark(usize);

/// A domain: readers, and the grace periods that wait for them.
pub struct Rcu {
    front: CachePadded<Front>,
    /// Number of grace periods that began, including the current one. `completed` counts those that
    /// ended.
    started: AtomicUsize,
    completed: AtomicUsize,
    /// For each phase, the number of readers that entered in a parent process and will never leave.
    forgotten: [AtomicUsize; 2],
    turn: Mutex<Turn>,
    lanes: [Words; LANES],
}

constructor! {
    fn lane() -> Words {
        CachePadded::new([AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0)])
    }
}

impl Rcu {
    constructor! {
        /// Creates a domain without sequences, usable at once. [`Rcu::open`] makes it faster.
        pub fn new() -> Rcu {
            Rcu {
                front: CachePadded::new(Front {
                    now: AtomicUsize::new(0),
                    sequences: AtomicIsize::new(0),
                    table: AtomicUsize::new(0),
                    cpus: AtomicUsize::new(0),
                }),
                started: AtomicUsize::new(0),
                completed: AtomicUsize::new(0),
                forgotten: [AtomicUsize::new(0), AtomicUsize::new(0)],
                turn: Mutex::new(Turn { fenced: false, seen: 0 }),
                lanes: [lane(), lane(), lane(), lane(), lane(), lane(), lane(), lane()],
            }
        }
    }

    /// Lets readers count by restartable sequences if the platform has them. Maps 136 bytes for
    /// each CPU, in whole pages. Readers may be active. Further calls do nothing.
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

    /// Begins a read section, which ends when the returned value is dropped. No grace period that
    /// begins meanwhile is complete before that end. Never waits. Sections may nest, and their
    /// threads may sleep. The value may move to another thread. Signal-safe.
    #[inline]
    pub fn enter(&self) -> Reading<'_> {
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

    /// Marks this moment, for [`Rcu::advance_past`].
    pub fn mark(&self) -> Mark {
        // SeqCst pairs with the fence in `step`: a period that this thread does not see begun sees
        // this thread's earlier stores.
        fence(Ordering::SeqCst);
        Mark(self.started.load(Ordering::Relaxed) + 1)
    }

    /// Makes one step. Returns whether all readers of the marked moment have left. Never waits.
    /// While another thread makes a step, this call makes none.
    ///
    /// # Errors
    /// The fence's error. Some of these readers may not have left. A later call tries again.
    pub fn advance_past<P: Platform>(&self, _: &Inside<'_>, platform: &P, mark: Mark) -> Result<bool, Errno> {
        self.step(platform, mark.0)?;
        // Acquire pairs with the Release in `step`: accesses of readers are visible.
        Ok(self.completed.load(Ordering::Acquire) >= mark.0)
    }

    /// Makes one step. Begins a new period only if fewer than `wanted` periods are complete.
    fn step<P: Platform>(&self, platform: &P, wanted: usize) -> Result<(), Errno> {
        let Some(mut turn) = self.turn.try_lock() else { return Ok(()) };
        let completed = self.completed.load(Ordering::Relaxed);
        let started = self.started.load(Ordering::Relaxed);
        debug_assert!(started == completed || started == completed + 1);
        if started == completed {
            if wanted <= completed {
                return Ok(());
            }
            self.started.store(completed + 1, Ordering::Relaxed);
            *turn = Turn { fenced: false, seen: 0 };
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
        if turn.seen == BOTH {
            // Release pairs with the Acquire in `advance_past`.
            self.completed.store(completed + 1, Ordering::Release);
        } else if turn.seen != 0 {
            let now = self.front.now.load(Ordering::Relaxed);
            self.front.now.store(now & !1 | turn.seen >> 1, Ordering::Relaxed);
        }
        Ok(())
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

    /// Subtracts the readers of threads that do not exist in a forked child. Marks stay valid. The
    /// child must register for fences again before [`Rcu::advance_past`] can fence.
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

impl Default for Rcu {
    fn default() -> Self {
        Rcu::new()
    }
}

impl fmt::Debug for Rcu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [started, completed] = [&self.started, &self.completed].map(|count| count.load(Ordering::Relaxed));
        f.debug_struct("Rcu").field("started", &started).field("completed", &completed).finish_non_exhaustive()
    }
}

/// An active read section, which ends when the value is dropped.
pub struct Reading<'r> {
    rcu: &'r Rcu,
    now: usize,
}

impl Drop for Reading<'_> {
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

impl fmt::Debug for Reading<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reading")
    }
}
