//! A reference count that is per-CPU until it is killed, and exact from then on.
//!
//! Sits on words of per-CPU data. While it lives, a reference is taken and put by adding to this CPU's word, and nobody knows the
//! sum. The shared count has a bias meanwhile, so that it cannot be 0, whoever must use it: isolated CPUs, which are
//! never fenced, and threads without a CPU id.
//!
//! Killing, in numbered steps:
//! 1. the place where sequences find the words is closed: who starts now is refused, and uses the shared count;
//! 2. one fence, for all references that are killed together, on all CPUs but isolated ones, which have no words: a sequence that had
//!    read the place before is over, by its commit or by being restarted;
//! 3. the words, which nobody changes any more, are added to the shared count, and the bias is taken off;
//! 4. the reference that it was made with is put.
//!
//! If the fence fails nothing is known: the place is opened again, and the reference lives on. Steps 1 to 3 are one for a fork: a
//! child finds a reference alive or killed. What follows the last put is the caller's, so step 4 is outside.

use crate::data::{Refused, Wait};
use crate::host::Host;
use crate::rows::Owner;
use crate::words::{Words, address_of};
use neap_base::Platform;
use neap_base::platform::Errno;
use neap_base::sync::{AtomicUsize, Ordering, me};

/// More than there are references: half of what a word can hold.
const BIAS: usize = 1 << (usize::BITS - 2);

/// What a count needs of the CPUs' words. A model can stand in for them.
pub trait Counts {
    /// Adds to this CPU's word if `open` is not 0, in one step with looking; whether it did.
    fn add(&self, open: &AtomicUsize, value: i64) -> bool;

    /// The sum of all words, which nobody changes.
    fn sum(&self) -> i64;

    /// What `open` is while the count lives; 0 if there are no words that could be fenced.
    fn opened(&self) -> usize;

    /// Makes the sum 0, of words that nobody changes.
    fn clear(&self);
}

/// The states: alive; being killed by a thread, half its number; killed by it (that inverted, so from [`KILLED`] on), the first
/// reference not yet put; dead.
const LIVE: usize = 0;
const KILLED: usize = 1 << (usize::BITS - 1);
const DEAD: usize = usize::MAX;

/// The protocol, over words of any kind.
#[derive(Debug)]
pub struct Count<W> {
    words: W,
    open: AtomicUsize,
    shared: AtomicUsize,
    state: AtomicUsize,
}

impl<W: Counts> Count<W> {
    /// A count of one: the reference that `Count::kill_all` puts.
    pub fn new(words: W) -> Count<W> {
        let open = words.opened();
        Count { words, open: AtomicUsize::new(open), shared: AtomicUsize::new(BIAS + 1), state: AtomicUsize::new(LIVE) }
    }

    /// A count that is dead, with no reference: for [`Count::revive`].
    pub fn dead(words: W) -> Count<W> {
        let [open, shared] = [(); 2].map(|()| AtomicUsize::new(0));
        Count { words, open, shared, state: AtomicUsize::new(DEAD) }
    }

    /// Its words.
    pub fn words(&self) -> &W {
        &self.words
    }

    /// Lets a dead count without references live again, as a count of one. Whoever could name it before may take references from now on.
    /// One caller at a time; of a count that is not dead, or has references, nothing good will come.
    pub fn revive(&self) {
        self.words.clear();
        // Release pairs with the Acquire in `try_get_shared`: what the caller did before is visible to who takes a reference on the shared count.
        self.shared.store(BIAS + 1, Ordering::Release);
        self.state.store(LIVE, Ordering::Release); // Pairs with the Acquire in `is_dead`.
        // Release pairs with the sequences, whose loads the processor keeps in order: the same for a CPU's.
        self.open.store(self.words.opened(), Ordering::Release);
    }

    /// In a forked child, where only `held` references are this thread's, of a count that may be of any state: the others are put, and so is the
    /// first one of a count that another thread has killed. Whether none is left.
    ///
    /// The caller is the only thread of the child.
    pub fn forget_others(&self, held: usize) -> bool {
        self.words.clear();
        let alive = self.state.load(Ordering::Relaxed) == LIVE;
        let first_is_mine = self.state.load(Ordering::Relaxed) == !(me() / 2);
        if !alive && !first_is_mine {
            self.state.store(DEAD, Ordering::Relaxed);
        }
        let first = usize::from(alive || first_is_mine);
        self.shared.store(held + first + if alive { BIAS } else { 0 }, Ordering::Relaxed);
        !alive && held + first == 0
    }

    /// Takes a reference; the caller has one already, or knows that the count is alive.
    #[inline]
    pub fn get(&self) {
        if !self.words.add(&self.open, 1) {
            self.shared.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes a reference unless the count was killed.
    #[inline]
    pub fn try_get(&self) -> bool {
        self.try_get_here() || self.try_get_shared()
    }

    /// Takes a reference in this CPU's word, while the count lives and there is one: then no other CPU's line is written.
    #[inline]
    pub fn try_get_here(&self) -> bool {
        self.words.add(&self.open, 1)
    }

    /// Takes a reference in the shared count, unless that was killed.
    #[cold]
    pub fn try_get_shared(&self) -> bool {
        if self.is_dead() {
            return false;
        }
        // Killed meanwhile: it counts as long as one was left.
        let one_more = |count| if count == 0 { None } else { Some(count + 1) };
        // Acquire pairs with the Release in `revive`: it may be another life than the one looked at above. What a first life protects was
        // visible to whoever could name it.
        self.shared.fetch_update(Ordering::Acquire, Ordering::Relaxed, one_more).is_ok()
    }

    /// Puts a reference; whether it was the last, which is so for one caller, once.
    #[inline]
    #[must_use = "whoever puts the last one gives back what it protects"]
    pub fn put(&self) -> bool {
        !self.words.add(&self.open, -1) && self.put_shared()
    }

    fn put_shared(&self) -> bool {
        // AcqRel pairs with itself in the other puts: whoever sees 0 has seen all that was done under the references.
        self.shared.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether it was killed.
    pub fn is_dead(&self) -> bool {
        // Acquire pairs with the Release in `close_all`.
        self.state.load(Ordering::Acquire) >= KILLED
    }

    /// References, once it was killed; `None` before.
    pub fn references(&self) -> Option<usize> {
        // Relaxed: a number for whoever wants to look.
        self.is_dead().then(|| self.shared.load(Ordering::Relaxed))
    }

    /// Kills counts with one call of `fence`, all but their first references: [`Count::put_first`] is to follow for each, by the
    /// same thread. One that was killed before, or is being killed by somebody else, is left out. Answers how many.
    ///
    /// # Errors
    /// That of the fence: all live on.
    pub fn close_all<'c>(
        counts: impl Iterator<Item = &'c Count<W>> + Clone,
        fence: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<usize, Errno>
    where
        W: 'c,
    {
        // Only one caller finds a count alive, and leaves its number.
        let (mut any, killing) = (0, me() / 2);
        for count in counts.clone() {
            // AcqRel pairs with the Release below, of a call that failed.
            if count.state.compare_exchange(LIVE, killing, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                // SeqCst with the fence: a sequence that starts behind it reads 0.
                count.open.store(0, Ordering::SeqCst);
                any += 1;
            }
        }
        if any == 0 {
            return Ok(0);
        }
        let fenced = fence();
        for count in counts.filter(|count| count.state.load(Ordering::Relaxed) == killing) {
            if fenced.is_err() {
                // Release pairs with the sequences, which read it before the words' table.
                count.open.store(count.words.opened(), Ordering::Release);
                // Release pairs with the AcqRel above.
                count.state.store(LIVE, Ordering::Release);
                continue;
            }
            // AcqRel pairs with the puts'. The words may be below 0: references that were taken elsewhere.
            count.shared.fetch_add((count.words.sum() as usize).wrapping_sub(BIAS), Ordering::AcqRel);
            // Release pairs with the Acquire in `is_dead`.
            count.state.store(!killing, Ordering::Release);
        }
        fenced.map(|()| any)
    }

    /// Puts the first reference, if this thread killed the count and has not put it; whether it was the last.
    #[must_use = "whoever puts the last one gives back what it protects"]
    pub fn put_first(&self) -> bool {
        // Relaxed: nobody else changes it from this.
        if self.state.load(Ordering::Relaxed) != !(me() / 2) {
            return false;
        }
        // Release pairs with the Acquire in `is_dead`.
        self.state.store(DEAD, Ordering::Release);
        self.put_shared()
    }
}

/// Words of per-CPU data as counts.
#[derive(Debug)]
pub struct Sequences<H: Host>(Words<H>);

impl<H: Host> Counts for Sequences<H> {
    #[inline(always)]
    fn add(&self, open: &AtomicUsize, value: i64) -> bool {
        // Without sequences words could change behind a fence: then all references are in the shared count.
        self.0.has_sequences() && self.0.add(address_of(open), 0, value)
    }

    fn sum(&self) -> i64 {
        self.0.sum(0)
    }

    fn opened(&self) -> usize {
        if self.0.has_sequences() { self.0.offsets } else { 0 }
    }

    fn clear(&self) {
        (0..self.0.cpus()).for_each(|cpu| self.0.word(0, cpu).store(0, core::sync::atomic::Ordering::Relaxed));
    }
}

/// The fence that [`Count::close_all`] wants, for words of per-CPU data.
///
/// # Errors
/// As for [`Platform::fence_all`].
pub fn fence<P: Platform>(platform: &P) -> Result<(), Errno> {
    if platform.rseq_offset().is_some() { platform.fence_all() } else { Ok(()) }
}

/// A reference count. Frees its memory itself; where its owner is closed instead, it must be forgotten.
#[derive(Debug)]
pub struct PerCpuRef<H: Host>(Count<Sequences<H>>);

impl<H: Host> PerCpuRef<H> {
    /// A count of one: the reference that killing puts.
    ///
    /// # Errors
    /// As for [`PerCpuData::allocate`](crate::PerCpuData::allocate).
    pub fn new(host: H, owner: Owner, wait: Wait) -> Result<Self, Refused> {
        Ok(PerCpuRef(Count::new(Sequences(Words::new(host, owner, 1, true, wait)?))))
    }

    /// Takes a reference; the caller has one already, or knows that it is alive.
    #[inline]
    pub fn get(&self) {
        self.0.get();
    }

    /// Takes a reference unless it was killed.
    #[inline]
    pub fn try_get(&self) -> bool {
        self.0.try_get()
    }

    /// Puts a reference; whether it was the last, which is so for one caller, once.
    #[inline]
    #[must_use = "whoever puts the last one gives back what it protects"]
    pub fn put(&self) -> bool {
        self.0.put()
    }

    /// Whether it was killed.
    pub fn is_dead(&self) -> bool {
        self.0.is_dead()
    }

    /// References, once it was killed; `None` before.
    pub fn references(&self) -> Option<usize> {
        self.0.references()
    }

    /// Kills references with one fence, and puts the reference that each was made with; `last` is told the index of each that
    /// has no other, and may do what it likes. Those killed before are left out. Answers how many were killed.
    ///
    /// The references are gone through several times, also while a fork would wait: each clone has to give the same ones, whatever has become of them
    /// meanwhile (no filter by [`PerCpuRef::is_dead`]), and may neither allocate nor lock.
    ///
    /// # Errors
    /// That of the fence: all live on.
    pub fn kill_all<'r>(
        host: &H,
        references: impl Iterator<Item = &'r Self> + Clone,
        mut last: impl FnMut(usize),
    ) -> Result<usize, Errno>
    where
        H: 'r,
    {
        let killed = Self::close_all(host, references.clone())?;
        if killed == 0 {
            return Ok(0); // What a call around this one killed is that one's to put.
        }
        references.enumerate().filter(|(_, reference)| reference.put_first()).for_each(|(index, _)| last(index));
        Ok(killed)
    }

    /// The first half of [`PerCpuRef::kill_all`]; the other is [`PerCpuRef::put_first`] for each, by the same thread.
    ///
    /// # Errors
    /// As there.
    pub fn close_all<'r>(host: &H, references: impl Iterator<Item = &'r Self> + Clone) -> Result<usize, Errno>
    where
        H: 'r,
    {
        host.inside(|| Count::close_all(references.map(|reference| &reference.0), || fence(host.platform())))
    }

    /// Puts the first reference, if this thread killed it by [`PerCpuRef::close_all`]; whether it was the last.
    #[must_use = "whoever puts the last one gives back what it protects"]
    pub fn put_first(&self) -> bool {
        self.0.put_first()
    }
}
