//! Read-copy-update: readers of what others replace, without a lock, a locked instruction or a wait; what was replaced is
//! freed when everybody who could have seen it has gone.
//!
//! Sits between structures that are read everywhere and changed seldom, and the maintenance thread, which frees. A reader counts
//! itself in and out by one restartable sequence each, on the CPU that it is on then. Counts are kept in two *phases*;
//! in either, as many as came in went out if nobody is inside. Where there are no sequences, and on isolated CPUs, which are
//! never fenced, a reader counts by a locked instruction and a fence on words that only such readers use.
//!
//! A *grace period*, in numbered steps:
//! 1. all that was deferred is taken; whoever deferred it had made sure that no new reader finds it;
//! 2. one fence on all CPUs but isolated ones: a reader whose count it did not make visible begins behind it, and finds nothing of that;
//! 3. each phase is looked at until it was seen without readers: those who went out are added up first, those who came in
//!    after, so nobody is seen to go out who was not seen to come in;
//! 4. once one phase was, new readers count in that one, so that the other's come to an end however many there are;
//! 5. once both were, what was taken is freed.
//!
//! Step 4 needs no fence: a reader that counts in a phase after that was seen without readers begins behind step 2. If the fence
//! fails nothing is known, nothing is freed, and it is tried again.
//!
//! Locks: the *turn*, held for one look and while functions run that free; it is only ever tried, but by [`Rcu::open`]. Never
//! allocates, and frees nothing from within [`Rcu::enter`] or [`Rcu::defer`].
//!
//! Fork: [`Rcu::advance`] and [`Rcu::grace`] belong inside the gate, or a child may find the turn taken and free nothing any more.
//! Readers and [`Rcu::defer`] need no gate: [`Rcu::forget_others`] is for those who were inside.
//!
//! Source: P. McKenney, "Sleepable RCU", 2006 (two phases, counts that are added up).

use crate::platform::{Errno, Platform};
use crate::sync::{AtomicIsize, AtomicPtr, AtomicUsize, Ordering, UnsafeCell, fence, spin, spread};
use crate::{Mutex, constructor};
use core::fmt;
use core::ptr::{NonNull, null_mut, with_exposed_provenance};
use core::sync::atomic::compiler_fence;
use crossbeam_utils::CachePadded;

/// Where who came in is counted, by phase, and where who went out is.
const ENTERED: usize = 0;
const LEFT: usize = 2;

/// Words of one place: those who came in in phase 0 and 1, and those who went out.
type Words = CachePadded<[AtomicUsize; 4]>;

/// The same on a CPU, changed by restartable sequences alone.
type Record = CachePadded<[core::sync::atomic::AtomicUsize; 4]>;

/// Places for those who have no sequence, spread by thread.
const LANES: usize = 8;

/// Attempts of a sequence: a debugger interrupts all of them.
const ATTEMPTS: usize = 3;

/// Both phases were seen without readers.
const BOTH: usize = 0b11;

/// Looks of [`Rcu::grace`] with a mere yield in between, before naps of so many nanoseconds.
const YIELDS: u32 = 20;
const NAP: u64 = 50_000;

/// What frees an object whose head this is. It may defer more, and take locks, but not wait for a grace period.
pub type Run<C> = unsafe fn(NonNull<RcuHead<C>>, &C);

/// What an object that is to be freed is deferred by: a part of the object. All zeroes are a head, too.
pub struct RcuHead<C = ()>(UnsafeCell<Link<C>>);

struct Link<C> {
    next: *mut RcuHead<C>,
    run: Option<Run<C>>,
}

// SAFETY: only whoever deferred the head, then whoever has the turn, looks inside.
unsafe impl<C> Sync for RcuHead<C> {}
// SAFETY: it names no thread.
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

/// What readers look at, on a line that is seldom written.
struct Front {
    /// The phase that readers count in, and above that bit how many forks were between this process and its ancestor's.
    now: AtomicUsize,
    /// Where a thread's rseq area lies; 0 without sequences.
    sequences: AtomicIsize,
    /// Where a table of each CPU's record lies, with 0 for one that has none.
    table: AtomicUsize,
    cpus: AtomicUsize,
}

/// The grace period under way.
struct Turn<C> {
    fenced: bool,
    /// A bit for each phase that was seen without readers since the fence.
    seen: usize,
    /// What is freed at its end.
    batch: *mut RcuHead<C>,
}

// SAFETY: the heads of a batch are whoever's who has the turn.
unsafe impl<C> Send for Turn<C> {}

/// A moment of a domain's, and the number of the grace period that begins after it.
#[derive(Clone, Copy, Debug)]
pub struct Mark(usize);

/// One domain of readers and of what is freed behind them. `C` is what the functions that free are told, such as the
/// instance that everything is part of.
pub struct Rcu<C = ()> {
    front: CachePadded<Front>,
    deferred: AtomicPtr<RcuHead<C>>,
    /// Grace periods begun and over, the one under way included in the former.
    started: AtomicUsize,
    completed: AtomicUsize,
    /// Readers of each phase who came in and will never go out: they were in a process that this one is a fork of.
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
        /// A domain without sequences: it can be used at once, and is faster after [`Rcu::open`].
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

    /// Lets readers count by restartable sequences where the platform has them: maps 136 bytes for each of its CPUs. At any
    /// time, also while there are readers, but not by a function that frees; from the second time on it does nothing.
    ///
    /// # Errors
    /// A limit; readers go on without sequences.
    pub fn open<P: Platform>(&self, platform: &P) -> Result<(), Errno> {
        // Readers by sequences begin behind this turn, and grace periods that do not know of them are over, or fenced, before.
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
            // SAFETY: within the mapping, which nobody else knows of yet.
            unsafe { core::ptr::with_exposed_provenance_mut::<usize>(table).add(cpu).write(record) };
        }
        self.front.cpus.store(cpus, Ordering::Relaxed);
        self.front.table.store(table, Ordering::Relaxed);
        // Release pairs with the Acquire in `count` and `sum`.
        self.front.sequences.store(sequences, Ordering::Release);
        Ok(())
    }

    /// Start and length of what [`Rcu::open`] mapped, if it has.
    pub fn mapping<P: Platform>(&self, platform: &P) -> Option<(usize, usize)> {
        // Acquire pairs with the Release in `open`.
        let opened = self.front.sequences.load(Ordering::Acquire) != 0;
        let (cpus, table) = (self.front.cpus.load(Ordering::Relaxed), self.front.table.load(Ordering::Relaxed));
        opened.then(|| (table - cpus * size_of::<Record>(), length(platform, cpus)))
    }

    /// Gives back what [`Rcu::open`] mapped.
    ///
    /// # Safety
    /// The domain is not used any more.
    pub unsafe fn close<P: Platform>(&self, platform: &P) {
        let cpus = self.front.cpus.load(Ordering::Relaxed);
        if self.front.sequences.swap(0, Ordering::Relaxed) != 0 {
            let records = self.front.table.load(Ordering::Relaxed) - cpus * size_of::<Record>();
            // SAFETY: the mapping of `open`, of which nobody knows any more, as the caller promises.
            unsafe { platform.unmap(records, length(platform, cpus)) };
        }
    }

    /// Comes in: what is found from now on is not freed before the answer is dropped. Never waits, may be nested and slept in, and
    /// may be moved to another thread. Signal-safe.
    #[inline]
    pub fn enter(&self) -> Reading<'_, C> {
        // Any phase will do: both are looked at in every grace period.
        let now = self.front.now.load(Ordering::Relaxed);
        self.count(ENTERED + (now & 1));
        // SeqCst pairs with the fence on this CPU in `step`, which makes a real one of it.
        compiler_fence(Ordering::SeqCst);
        Reading { rcu: self, now }
    }

    #[inline(always)]
    fn count(&self, word: usize) {
        if !self.count_here(word) {
            self.count_elsewhere(word);
        }
    }

    /// Adds one to a word of this CPU, by one attempt.
    #[inline(always)]
    fn count_here(&self, word: usize) -> bool {
        // Acquire pairs with the Release in `open`: the table is there.
        let sequences = self.front.sequences.load(Ordering::Acquire);
        let [table, cpus] = [&self.front.table, &self.front.cpus].map(|number| number.load(Ordering::Relaxed));
        // SAFETY: the platform says where the thread's area is; the table leads to records, whose words change by nothing else.
        sequences != 0 && unsafe { neap_os::rseq::count_one(sequences, table, cpus, word) }
    }

    #[cold]
    fn count_elsewhere(&self, word: usize) {
        if (1..ATTEMPTS).any(|_| self.count_here(word)) {
            return;
        }
        // Release pairs with the Acquire in `sum`: whoever sees this reader go out sees what it did inside.
        self.lanes[spread() % LANES][word].fetch_add(1, Ordering::Release);
        if word < LEFT {
            // SeqCst pairs with the fence in `step`: either that sees this reader, or this reader sees what was done before.
            fence(Ordering::SeqCst);
        }
    }

    /// Has `run` called with `head` and the context of whoever advances, when every reader of this moment has gone. Answers
    /// whether nothing else waits to be taken up: then somebody has to see to it that [`Rcu::advance`] is called. Never
    /// waits, and calls nothing itself.
    ///
    /// # Safety
    /// New readers do not find the object; the head is part of it, stays where it is and is nobody else's until `run` is called; `run` may
    /// be called with it, by any thread.
    pub unsafe fn defer(&self, head: NonNull<RcuHead<C>>, run: Run<C>) -> bool {
        let mut next = self.deferred.load(Ordering::Relaxed);
        loop {
            // SAFETY: the head is there, and this thread's alone, as the caller promises.
            unsafe { head.as_ref().0.with_mut(|link| *link = Link { next, run: Some(run) }) };
            // Release pairs with the AcqRel in `step`: who takes it sees the head, and what was done before.
            match self.deferred.compare_exchange_weak(next, head.as_ptr(), Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return next.is_null(),
                Err(other) => next = other,
            }
        }
    }

    /// One step of what is deferred: takes it up, looks whether its readers have gone, frees it if so. Never waits. Answers
    /// whether anything is left, for another call; a call while another is under way does nothing and says so, too.
    ///
    /// # Errors
    /// That of the fence: nothing was freed. To be tried again.
    pub fn advance<P: Platform>(&self, platform: &P, context: &C) -> Result<bool, Errno> {
        self.step(platform, context, 0)
    }

    /// Waits until every reader of this moment has gone and all that was deferred until now has been freed, as
    /// [`Rcu::advance`] does, by whoever. Not by a reader and not by a function that frees: they would wait for themselves.
    ///
    /// # Errors
    /// That of the fence.
    pub fn grace<P: Platform>(&self, platform: &P, context: &C) -> Result<(), Errno> {
        let Mark(wanted) = self.mark();
        let mut looks = 0;
        // Acquire pairs with the Release in `step`: what readers did is visible, and what freeing did.
        while self.completed.load(Ordering::Acquire) < wanted {
            let before = self.completed.load(Ordering::Relaxed);
            self.step(platform, context, wanted)?;
            if self.completed.load(Ordering::Relaxed) == before {
                looks += 1;
                // In a model this runs somebody else, and the others do nothing.
                spin();
                if looks < YIELDS { platform.pause() } else { platform.sleep(NAP) }
            }
        }
        Ok(())
    }

    /// Marks this moment, for [`Rcu::advance_past`].
    pub fn mark(&self) -> Mark {
        // SeqCst pairs with the fence in `step`: a period that is not seen begun here sees what was done before.
        fence(Ordering::SeqCst);
        Mark(self.started.load(Ordering::Relaxed) + 1)
    }

    /// One step, as [`Rcu::advance`], towards the moment when every reader of a marked one has gone: whether that has come.
    ///
    /// # Errors
    /// That of the fence: nothing is known. To be tried again.
    pub fn advance_past<P: Platform>(&self, platform: &P, context: &C, mark: Mark) -> Result<bool, Errno> {
        self.step(platform, context, mark.0)?;
        // Acquire pairs with the Release in `step`: what readers did is visible.
        Ok(self.completed.load(Ordering::Acquire) >= mark.0)
    }

    /// One step; a new period also begins if fewer than `wanted` are over.
    fn step<P: Platform>(&self, platform: &P, context: &C, wanted: usize) -> Result<bool, Errno> {
        let Some(mut turn) = self.turn.try_lock() else { return Ok(true) };
        let completed = self.completed.load(Ordering::Relaxed);
        if self.started.load(Ordering::Relaxed) == completed {
            if self.deferred.load(Ordering::Relaxed).is_null() && wanted <= completed {
                return Ok(false);
            }
            self.started.store(completed + 1, Ordering::Relaxed);
            // AcqRel pairs with the Release in `defer`, and with the fence in `grace`: who defers too late for this sees it begun.
            let batch = self.deferred.swap(null_mut(), Ordering::AcqRel);
            *turn = Turn { fenced: false, seen: 0, batch };
        }
        if !turn.fenced {
            // SeqCst pairs with the fences in `count_elsewhere` and `grace`; the platform's with those that only a compiler sees.
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
            // SAFETY: it was deferred and has not been freed.
            let Link { next, run } = unsafe { head.as_ref().0.with_mut(|link| link.read()) };
            turn.batch = next;
            if let Some(run) = run {
                // SAFETY: whoever deferred it has promised that, for when every reader of then has gone.
                unsafe { run(head, context) };
            }
        }
        // Release pairs with the Acquire in `grace`.
        self.completed.store(completed + 1, Ordering::Release);
        Ok(!self.deferred.load(Ordering::Relaxed).is_null())
    }

    /// Whether as many have gone out as came in. For readers whom a fence before made visible.
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
            // SAFETY: `open` mapped a record for each CPU.
            let record = unsafe { &*record };
            // Acquire pairs with the commits of sequences, which the processor keeps in order.
            record[word].load(Ordering::Acquire)
        });
        // Acquire pairs with the Release in `count_elsewhere`; what is added up after this is read after it.
        let lanes = self.lanes.iter().map(|lane| lane[word].load(Ordering::Acquire));
        lanes.chain(records).fold(0, usize::wrapping_add)
    }

    /// In a forked child: readers of threads that do not exist here do not count any more. What was deferred stays deferred.
    /// (Fences have to be registered again, too, before [`Rcu::advance`] can have one.)
    ///
    /// # Safety
    /// The caller is the only thread of the child. What it has found as a reader itself before the fork, if it was one (a signal handler
    /// that forks may have interrupted one), is not protected any more; a [`Reading`] that it has may be dropped.
    pub unsafe fn forget_others(&self) {
        for phase in 0..2 {
            let inside = loop {
                let left = self.sum(LEFT + phase);
                let inside = self.sum(ENTERED + phase).wrapping_sub(left);
                // Otherwise a signal handler was in and out meanwhile.
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

/// Being a reader; goes out when dropped.
pub struct Reading<'r, C = ()> {
    rcu: &'r Rcu<C>,
    now: usize,
}

impl<C> Drop for Reading<'_, C> {
    #[inline]
    fn drop(&mut self) {
        // SeqCst pairs with the Acquire in `sum`: what was done inside is done before the count, which the processor keeps in order.
        compiler_fence(Ordering::SeqCst);
        // After a fork it is forgotten already.
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

#[cfg(all(test, not(loom)))]
mod tests;
