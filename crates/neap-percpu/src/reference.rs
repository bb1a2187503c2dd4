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
//! If the fence fails nothing is known: the place is opened again, and the reference lives on.

use crate::copies::Site;
use crate::data::{Charge, Refused, Wait};
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
}

const LIVE: usize = 0;
/// Any other number: that of the thread that is killing it.
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
    /// A count of one: the reference that [`Count::kill_all`] puts.
    pub fn new(words: W) -> Count<W> {
        let open = words.opened();
        Count { words, open: AtomicUsize::new(open), shared: AtomicUsize::new(BIAS + 1), state: AtomicUsize::new(LIVE) }
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
        self.words.add(&self.open, 1) || self.try_get_shared()
    }

    #[cold]
    fn try_get_shared(&self) -> bool {
        if self.is_dead() {
            return false;
        }
        // Killed meanwhile: it counts as long as one was left.
        let one_more = |count| if count == 0 { None } else { Some(count + 1) };
        // Relaxed: what the reference protects was visible to whoever could name it.
        self.shared.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
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
        // Acquire pairs with the Release in `kill_all`.
        self.state.load(Ordering::Acquire) == DEAD
    }

    /// References, once it was killed; `None` before.
    pub fn references(&self) -> Option<usize> {
        // Relaxed: a number for whoever wants to look.
        self.is_dead().then(|| self.shared.load(Ordering::Relaxed))
    }

    /// Kills counts with one call of `fence`, and puts the reference that each was made with. `last` is told the index of each that
    /// has no other. One that was killed before, or is being killed by somebody else, is left out. Answers how many.
    ///
    /// # Errors
    /// That of the fence: all live on.
    pub fn kill_all<'c>(
        counts: impl Iterator<Item = &'c Count<W>> + Clone,
        fence: impl FnOnce() -> Result<(), Errno>,
        mut last: impl FnMut(usize),
    ) -> Result<usize, Errno>
    where
        W: 'c,
    {
        // Only one caller finds a count alive, and leaves its number.
        let (mut any, me) = (0, me());
        for count in counts.clone() {
            // AcqRel pairs with the Release below, of a call that failed.
            if count.state.compare_exchange(LIVE, me, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                // SeqCst with the fence: a sequence that starts behind it reads 0.
                count.open.store(0, Ordering::SeqCst);
                any += 1;
            }
        }
        if any == 0 {
            return Ok(0);
        }
        let fenced = fence();
        for (index, count) in counts.enumerate().filter(|(_, count)| count.state.load(Ordering::Relaxed) == me) {
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
            count.state.store(DEAD, Ordering::Release);
            if count.put_shared() {
                last(index);
            }
        }
        fenced.map(|()| any)
    }
}

/// Words of per-CPU data as counts.
#[derive(Debug)]
pub struct Sequences<'a, P: Platform, C: Charge>(Words<'a, P, C>);

impl<P: Platform, C: Charge> Counts for Sequences<'_, P, C> {
    #[inline(always)]
    fn add(&self, open: &AtomicUsize, value: i64) -> bool {
        // Without sequences words could change behind a fence: then all references are in the shared count.
        self.0.has_sequences() && self.0.add(address_of(open), 0, value).is_some()
    }

    fn sum(&self) -> i64 {
        self.0.sum(0)
    }

    fn opened(&self) -> usize {
        if self.0.has_sequences() { self.0.offsets } else { 0 }
    }
}

/// A reference count. Frees its memory itself; where its owner is closed instead, it must be forgotten.
#[derive(Debug)]
pub struct PerCpuRef<'a, P: Platform, C: Charge = ()>(Count<Sequences<'a, P, C>>);

impl<'a, P: Platform, C: Charge> PerCpuRef<'a, P, C> {
    /// A count of one: the reference that killing puts.
    ///
    /// # Errors
    /// As for [`PerCpuData::allocate`](crate::PerCpuData::allocate).
    pub fn new(site: Site<'a, P, C>, wait: Wait) -> Result<Self, Refused> {
        Ok(PerCpuRef(Count::new(Sequences(Words::new(site, 1, true, wait)?))))
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
    /// has no other. Those killed before are left out. Answers how many were killed.
    ///
    /// # Errors
    /// That of the fence: all live on.
    pub fn kill_all(platform: &P, references: &[&Self], last: impl FnMut(usize)) -> Result<usize, Errno> {
        let fence = || if platform.rseq_offset().is_some() { platform.fence_all() } else { Ok(()) };
        Count::kill_all(references.iter().map(|reference| &reference.0), fence, last)
    }
}
