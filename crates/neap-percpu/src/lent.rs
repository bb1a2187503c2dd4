//! Words of per-CPU data for structures that know no host: they are known by where they are, and stay as long as the instance.
//!
//! Sits between the allocator and whoever keeps many [counts](crate::reference::Count) in tables of its own. The first two words are the count's:
//! references that were taken, and those that were given back, so that how many were ever taken is known without another addition;
//! the others are added to by restartable sequences alone, and not on isolated CPUs. Where there are no sequences nothing is added at
//! all: the caller has another place for that. No locks.

use crate::data::{Handle, Refused, Wait};
use crate::host::Host;
use crate::reference::Counts;
use crate::rows::Owner;
use crate::words::address_of;
use core::ptr::with_exposed_provenance;
use core::sync::atomic::{AtomicI64, Ordering};
use neap_base::Platform;
use neap_base::sync::AtomicUsize;

/// Attempts that are interrupted before an addition is refused: a debugger interrupts all of them.
const ATTEMPTS: usize = 3;

/// The words of the count.
const TAKEN: usize = 0;
const GIVEN_BACK: usize = 1;

/// Words of an allocation that does not go by itself.
#[derive(Debug)]
pub struct LentWords {
    /// Where a thread's rseq area lies; 0 where there are no sequences.
    sequences: isize,
    base: usize,
    handle: Handle,
    cpus: usize,
    /// Where the offsets of all copies lie, and those of CPUs that may be fenced.
    all: usize,
    fenced: AtomicUsize,
}

impl LentWords {
    /// The first word that is not the count's.
    pub const FIRST: usize = GIVEN_BACK + 1;

    /// Zeroes: `count` words for each CPU, at least [`LentWords::FIRST`], which are the count's.
    ///
    /// # Errors
    /// As for [`PerCpuData::allocate`](crate::PerCpuData::allocate).
    pub fn new<H: Host>(host: &H, owner: Owner, count: usize, wait: Wait) -> Result<LentWords, Refused> {
        let handle = host.allocate(owner, count * size_of::<i64>(), size_of::<i64>(), wait)?;
        let [all, fenced] = [false, true].map(|fenced| host.data().offsets(handle, fenced));
        Ok(LentWords {
            sequences: host.platform().rseq_offset().unwrap_or(0),
            base: handle.address(),
            handle,
            cpus: host.data().cpus(),
            all,
            fenced: AtomicUsize::new(fenced),
        })
    }

    /// Frees them after all.
    ///
    /// # Safety
    /// Nobody uses them.
    pub unsafe fn free<H: Host>(self, host: &H) {
        // SAFETY: they are from `new`, and nobody uses them, as the caller promises; so there is no error.
        _ = unsafe { host.free(self.handle) };
    }

    /// Adds to a word of this CPU; whether it did.
    #[inline(always)]
    pub fn add(&self, word: usize, value: i64) -> bool {
        self.add_if(&self.fenced, word, value)
    }

    #[inline(always)]
    fn add_if(&self, open: &AtomicUsize, word: usize, value: i64) -> bool {
        self.sequences != 0 && (self.attempt(open, word, value) || self.attempt_again(open, word, value))
    }

    #[inline(always)]
    fn attempt(&self, open: &AtomicUsize, word: usize, value: i64) -> bool {
        let place = self.base + word * size_of::<i64>();
        // SAFETY: the platform says where the thread's area is; the offsets are those of the allocation, whose words change by nothing
        // else while they are open.
        unsafe { neap_os::rseq::add(self.sequences, address_of(open), self.cpus, place, value) }
    }

    #[cold]
    #[inline(never)]
    fn attempt_again(&self, open: &AtomicUsize, word: usize, value: i64) -> bool {
        (1..ATTEMPTS).any(|_| self.attempt(open, word, value))
    }

    fn each(&self, word: usize) -> impl Iterator<Item = &AtomicI64> {
        (0..self.cpus).map(move |cpu| {
            // SAFETY: the table has every CPU, and each copy has the word, as long as the instance is there.
            unsafe {
                let offset = *with_exposed_provenance::<usize>(self.all).add(cpu);
                &*with_exposed_provenance::<AtomicI64>(self.base + offset).add(word)
            }
        })
    }

    /// References that were ever taken here since [`LentWords::clear_all`].
    pub fn taken(&self) -> u64 {
        self.sum(TAKEN) as u64
    }

    /// The sum of all CPUs' words.
    pub fn sum(&self, word: usize) -> i64 {
        self.each(word).map(|word| word.load(Ordering::Relaxed)).fold(0, i64::wrapping_add)
    }

    /// Makes the first `count` words of all CPUs 0, of a count that is dead and has no references.
    pub fn clear_all(&self, count: usize) {
        (0..count).flat_map(|word| self.each(word)).for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

impl Counts for LentWords {
    #[inline(always)]
    fn add(&self, open: &AtomicUsize, value: i64) -> bool {
        match value {
            0.. => self.add_if(open, TAKEN, value),
            _ => self.add_if(open, GIVEN_BACK, -value),
        }
    }

    fn sum(&self) -> i64 {
        LentWords::sum(self, TAKEN).wrapping_sub(LentWords::sum(self, GIVEN_BACK))
    }

    fn opened(&self) -> usize {
        if self.sequences == 0 { 0 } else { self.fenced.load(Ordering::Relaxed) }
    }

    fn clear(&self) {
        let words = self.each(TAKEN).zip(self.each(GIVEN_BACK));
        words.for_each(|(taken, given_back)| given_back.store(taken.load(Ordering::Relaxed), Ordering::Relaxed));
    }
}
