//! Words of per-CPU data that only ever change by adding to this CPU's.
//!
//! Sits between the allocator and counters, references and histograms. Adding is one restartable sequence where the machine has
//! them, without a lock and without a locked instruction; elsewhere an atomic addition to the word of the CPU that the thread
//! seems to be on. The two are never mixed in one allocation, since each would undo the other. An addition may be refused;
//! what is added to then is the caller's to say.

use crate::copies::Site;
use crate::data::{Charge, Handle, Refused, Wait};
use core::sync::atomic::{AtomicI64, Ordering};
use neap_base::Platform;
use neap_base::sync::AtomicUsize;

/// Attempts that are interrupted before an addition is refused: a debugger interrupts all of them.
const ATTEMPTS: usize = 3;

/// An allocation of words.
#[derive(Debug)]
pub(crate) struct Words<'a, P: Platform, C: Charge> {
    /// Where a thread's rseq area lies, where there are sequences.
    sequences: Option<usize>,
    base: usize,
    cpus: usize,
    /// Where the offsets lie.
    pub(crate) offsets: usize,
    handle: Handle,
    site: Site<'a, P, C>,
}

impl<'a, P: Platform, C: Charge> Words<'a, P, C> {
    /// Zeroes; `fenced` as for the offsets.
    pub(crate) fn new(
        site: Site<'a, P, C>,
        count: usize,
        fenced: bool,
        wait: Wait,
    ) -> Result<Words<'a, P, C>, Refused> {
        let handle = site.data.allocate(site.platform, site.owner, count * size_of::<i64>(), size_of::<i64>(), wait)?;
        let sequences = site.platform.rseq_offset().map(|offset| offset as usize);
        let (base, cpus, offsets) = (handle.address(), site.data.cpus(), site.data.offsets(handle, fenced));
        Ok(Words { sequences, base, cpus, offsets, handle, site })
    }

    /// Whether additions are restartable sequences.
    pub(crate) fn has_sequences(&self) -> bool {
        self.sequences.is_some()
    }

    /// Adds to a word of this CPU; answers what it is then. `offsets` is where [`Words::offsets`] stands, or 0, and may be
    /// changed by others.
    #[inline(always)]
    pub(crate) fn add(&self, offsets: *const usize, word: usize, value: i64) -> Option<i64> {
        let Some(sequences) = self.sequences else { return Some(self.add_atomically(word, value)) };
        match self.attempt(sequences, offsets, word, value) {
            None => self.attempt_again(sequences, offsets, word, value),
            done => done,
        }
    }

    #[inline(always)]
    fn attempt(&self, sequences: usize, offsets: *const usize, word: usize, value: i64) -> Option<i64> {
        let place = self.base + word * size_of::<i64>();
        // SAFETY: the platform says where the thread's area is; the offsets are those of the allocation, whose words change by
        // nothing else.
        unsafe { neap_os::rseq::add(sequences, offsets, self.cpus, place, value) }
    }

    #[cold]
    fn attempt_again(&self, sequences: usize, offsets: *const usize, word: usize, value: i64) -> Option<i64> {
        (1..ATTEMPTS).find_map(|_| self.attempt(sequences, offsets, word, value))
    }

    #[cold]
    fn add_atomically(&self, word: usize, value: i64) -> i64 {
        let cpu = self.site.platform.cpu() % self.site.data.cpus();
        self.word(word, cpu).fetch_add(value, Ordering::Relaxed) + value
    }

    fn word(&self, word: usize, cpu: usize) -> &AtomicI64 {
        // SAFETY: the copy has the word, aligned, as long as this value lives.
        unsafe { &*self.site.data.address(self.handle, cpu).cast::<AtomicI64>().add(word) }
    }

    /// The sum of all CPUs' words.
    pub(crate) fn sum(&self, word: usize) -> i64 {
        (0..self.site.data.cpus()).map(|cpu| self.word(word, cpu).load(Ordering::Relaxed)).fold(0, i64::wrapping_add)
    }
}

impl<P: Platform, C: Charge> Drop for Words<'_, P, C> {
    fn drop(&mut self) {
        // SAFETY: the words are this value's alone. The handle is as it was given, so there is no error.
        let _ = unsafe { self.site.data.free(self.handle) };
    }
}

/// The address of a word that offsets stand in, as the sequences want it.
#[inline(always)]
pub(crate) fn address_of(offsets: &AtomicUsize) -> *const usize {
    (&raw const *offsets).cast()
}
