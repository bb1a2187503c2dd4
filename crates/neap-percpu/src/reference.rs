//! A reference count that is per-CPU until it is killed, and exact afterwards.
//!
//! While the count lives, a thread takes and puts references by additions to its CPU's word, and
//! the sum is unknown. Threads on isolated CPUs, which are never fenced, and threads without a CPU
//! id use the shared count. A bias keeps the shared count above 0.
//!
//! # Killing
//!
//! 1. The killing thread stores 0 into `open`, where sequences find the words. A sequence that
//!    starts now adds nothing, and its thread uses the shared count.
//! 2. The thread makes one fence, for all counts that are killed together. After it, the sequences
//!    that had read `open` before have committed or been restarted. Isolated CPUs are not fenced,
//!    since they have no words.
//! 3. The thread adds the words, which no thread changes any more, to the shared count, and removes
//!    the bias.
//! 4. The thread puts the first reference, with which the count was made.
//!
//! If the fence fails, `open` gets its value back, and the count lives on. Steps 1 to 3 happen
//! inside the fork gate, so a child finds each count either alive or killed. Step 4 is outside,
//! since the last put runs the caller's code.

use crate::data::{OffsetsOf, Refused, Wait};
use crate::embedder::Host;
use crate::rows::Owner;
use crate::words::{Words, address_of};
use neap_base::Platform;
use neap_base::platform::Errno;
use neap_base::sync::{AtomicUsize, Ordering, me};

/// The shared count's bias: more than there can be references.
const BIAS: usize = 1 << (usize::BITS - 2);

/// Interface of the CPUs' words. A model can replace them.
pub trait Counts {
    /// Adds `value` to this CPU's word if `open` is not 0. Check and addition are one atomic step.
    /// Returns `true` if the value was added.
    fn add(&self, open: &AtomicUsize, value: i64) -> bool;

    /// Returns the sum of all words. The caller ensures that no thread changes them meanwhile.
    fn sum(&self) -> i64;

    /// Value of `open` while the count lives; 0 if there are no words that can be fenced.
    fn opened(&self) -> usize;

    /// Sets the sum of all words to 0. The caller ensures that no thread changes them meanwhile.
    fn clear(&self);
}

/// Values of `state`:
/// * [`LIVE`]: the count is alive.
/// * `me() / 2`: the thread with the number `me()` is killing the count.
/// * `!(me() / 2)`, at least [`KILLED`]: that thread killed it, but did not put its first
///   reference.
/// * [`DEAD`]: the count was killed, and its first reference was put.
const LIVE: usize = 0;
const KILLED: usize = 1 << (usize::BITS - 1);
const DEAD: usize = usize::MAX;

/// The protocol over words of any kind.
#[derive(Debug)]
pub struct Count<W> {
    words: W,
    open: AtomicUsize,
    shared: AtomicUsize,
    state: AtomicUsize,
}

impl<W: Counts> Count<W> {
    /// Creates a count with one reference, the first. `Count::put_first` puts that one.
    pub fn new(words: W) -> Count<W> {
        let open = words.opened();
        Count { words, open: AtomicUsize::new(open), shared: AtomicUsize::new(BIAS + 1), state: AtomicUsize::new(LIVE) }
    }

    /// Creates a dead count without references, for [`Count::revive`].
    pub fn dead(words: W) -> Count<W> {
        let [open, shared] = [(); 2].map(|()| AtomicUsize::new(0));
        Count { words, open, shared, state: AtomicUsize::new(DEAD) }
    }

    /// The count's words.
    pub fn words(&self) -> &W {
        &self.words
    }

    /// Revives a dead count without references. It then has one reference, the first. Threads that
    /// can name the count may take references from now on. Only one thread at a time may call this.
    pub fn revive(&self) {
        self.words.clear();
        // Release pairs with the Acquire in `try_get_shared`: the caller's earlier stores are
        // visible to a thread that takes a reference on the shared count.
        self.shared.store(BIAS + 1, Ordering::Release);
        self.state.store(LIVE, Ordering::Release); // Pairs with the Acquire in `is_dead`.
        // Release pairs with the sequences, whose load of `open` is an acquire load: the earlier
        // stores are visible to a thread that takes a reference on its CPU's word.
        self.open.store(self.words.opened(), Ordering::Release);
    }

    /// Resets the count in a forked child, where this thread has `held` references. The count may
    /// be in any state. Puts the references of other threads, and the first one if another thread
    /// has killed the count. Returns whether the count is killed and no reference is left.
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

    /// Takes a reference. The caller has one already, or knows that the count is alive.
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

    /// Takes a reference in this CPU's word, if the count lives and the CPU has a word. Writes no
    /// cache line of another CPU.
    #[inline]
    pub fn try_get_here(&self) -> bool {
        self.words.add(&self.open, 1)
    }

    /// Takes a reference in the shared count, unless the count was killed.
    #[cold]
    pub fn try_get_shared(&self) -> bool {
        if self.is_dead() {
            return false;
        }
        // If the count is killed meanwhile, a reference can be taken as long as one is left.
        // Acquire pairs with the Release in `revive`: the count may have been revived since the
        // check above. The data of a count that was never revived was visible to any thread that
        // could name the count.
        let mut count = self.shared.load(Ordering::Relaxed);
        while count != 0 {
            match self.shared.compare_exchange_weak(count, count + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => count = now,
            }
        }
        false
    }

    /// Puts a reference; returns whether it was the last. Exactly one put returns `true`.
    #[inline]
    #[must_use = "the caller that puts the last one gives back what it protects"]
    pub fn put(&self) -> bool {
        !self.words.add(&self.open, -1) && self.put_shared()
    }

    fn put_shared(&self) -> bool {
        // AcqRel pairs with itself in the other puts: the thread that sees 0 has seen all accesses
        // under the references.
        self.shared.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether the count was killed.
    pub fn is_dead(&self) -> bool {
        // Acquire pairs with the Release in `close_all`.
        self.state.load(Ordering::Acquire) >= KILLED
    }

    /// Number of references after the kill; `None` before.
    pub fn references(&self) -> Option<usize> {
        // Relaxed: informative; nothing depends on it.
        self.is_dead().then(|| self.shared.load(Ordering::Relaxed))
    }

    /// Kills counts with one call of `fence`, but does not put their first references. The same
    /// thread must then call [`Count::put_first`] for each. Skips counts that were killed before or
    /// that another thread is killing. Returns the number of killed counts.
    ///
    /// # Errors
    /// The fence's error. This call then kills no count.
    pub fn close_all<'c>(
        counts: impl Iterator<Item = &'c Count<W>> + Clone,
        fence: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<usize, Errno>
    where
        W: 'c,
    {
        // Only one caller finds a count alive and stores its number.
        let (mut any, killing) = (0, me() / 2);
        for count in counts.clone() {
            // AcqRel pairs with the Release below of a failed call.
            if count.state.compare_exchange(LIVE, killing, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                // SeqCst with the fence: a sequence that starts after the fence reads 0.
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
                // Release pairs with the acquire load of `open` in the sequences.
                count.open.store(count.words.opened(), Ordering::Release);
                // Release pairs with the AcqRel above.
                count.state.store(LIVE, Ordering::Release);
                continue;
            }
            // AcqRel pairs with that of the puts. The sum may be negative: references that were
            // taken in the shared count may have been put in words.
            count.shared.fetch_add((count.words.sum() as usize).wrapping_sub(BIAS), Ordering::AcqRel);
            // Release pairs with the Acquire in `is_dead`.
            count.state.store(!killing, Ordering::Release);
        }
        fenced.map(|()| any)
    }

    /// Puts the first reference if this thread killed the count and has not put it; returns whether
    /// it was the last.
    #[must_use = "the caller that puts the last one gives back what it protects"]
    pub fn put_first(&self) -> bool {
        // Relaxed: only this thread changes the state from its own number.
        if self.state.load(Ordering::Relaxed) != !(me() / 2) {
            return false;
        }
        // Release pairs with the Acquire in `is_dead`.
        self.state.store(DEAD, Ordering::Release);
        self.put_shared()
    }
}

/// Words of per-CPU data as [`Counts`].
#[derive(Debug)]
pub struct Sequences<H: Host>(Words<H>);

impl<H: Host> Counts for Sequences<H> {
    #[inline(always)]
    fn add(&self, open: &AtomicUsize, value: i64) -> bool {
        // Without sequences, a thread could change its word after the fence. All references are
        // then in the shared count.
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

/// Fences the sequences of per-CPU words, for [`Count::close_all`]. Does nothing without sequences.
///
/// # Errors
/// As for [`Platform::fence_all`].
pub fn fence<P: Platform>(platform: &P) -> Result<(), Errno> {
    if platform.rseq_offset().is_some() { platform.fence_all() } else { Ok(()) }
}

/// A reference count. Dropping it frees its memory. If its owner was closed before, the caller must
/// forget the count instead of dropping it.
#[derive(Debug)]
pub struct PerCpuRef<H: Host>(Count<Sequences<H>>);

impl<H: Host> PerCpuRef<H> {
    /// Creates a count with one reference, which killing puts.
    ///
    /// # Errors
    /// As for [`PerCpuData::allocate`](crate::PerCpuData::allocate).
    pub fn new(host: H, owner: Owner, wait: Wait) -> Result<Self, Refused> {
        Ok(PerCpuRef(Count::new(Sequences(Words::new(host, owner, 1, OffsetsOf::FencedCpus, wait)?))))
    }

    /// Takes a reference. The caller has one already, or knows that the count is alive.
    #[inline]
    pub fn get(&self) {
        self.0.get();
    }

    /// Takes a reference unless the count was killed.
    #[inline]
    pub fn try_get(&self) -> bool {
        self.0.try_get()
    }

    /// Puts a reference; returns whether it was the last. Exactly one put returns `true`.
    #[inline]
    #[must_use = "the caller that puts the last one gives back what it protects"]
    pub fn put(&self) -> bool {
        self.0.put()
    }

    /// Whether the count was killed.
    pub fn is_dead(&self) -> bool {
        self.0.is_dead()
    }

    /// Number of references after the kill; `None` before.
    pub fn references(&self) -> Option<usize> {
        self.0.references()
    }

    /// Kills counts with one fence, and puts the first reference of each. Calls `last` with the
    /// index of each count without further references. `last` runs without locks and may call
    /// anything. Skips counts that were killed before. Returns the number of killed counts.
    ///
    /// This function iterates `references` several times, also while a fork waits. Each clone must
    /// yield the same references, whatever their state is then. So it must not filter by
    /// [`PerCpuRef::is_dead`]. It must neither allocate nor lock.
    ///
    /// # Errors
    /// The fence's error. This call then kills no count.
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
            return Ok(0); // Counts that an outer call killed are put by that call.
        }
        references.enumerate().filter(|(_, reference)| reference.put_first()).for_each(|(index, _)| last(index));
        Ok(killed)
    }

    /// Kills counts, but does not put their first references: the first half of
    /// [`PerCpuRef::kill_all`]. The same thread must then call [`PerCpuRef::put_first`] for each.
    ///
    /// # Errors
    /// The fence's error. This call then kills no count.
    pub fn close_all<'r>(host: &H, references: impl Iterator<Item = &'r Self> + Clone) -> Result<usize, Errno>
    where
        H: 'r,
    {
        host.inside(|_| Count::close_all(references.map(|reference| &reference.0), || fence(host.platform())))
    }

    /// Puts the first reference if this thread killed the count by [`PerCpuRef::close_all`];
    /// returns whether it was the last.
    #[must_use = "the caller that puts the last one gives back what it protects"]
    pub fn put_first(&self) -> bool {
        self.0.put_first()
    }
}
