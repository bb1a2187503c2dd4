//! Words of per-CPU data, changed only by additions to this CPU's word.
//!
//! If the platform has restartable sequences, an addition is one sequence, without a lock or a
//! locked instruction. Otherwise it is an atomic addition to the word of the CPU that the thread
//! seems to be on. One allocation never uses both, since either could overwrite an addition of the
//! other. An addition may be refused. The caller then counts elsewhere. Counters, references and
//! histograms use this module.

use crate::data::{OffsetsOf, Refused, Wait};
use crate::embedder::Host;
use crate::handle::Handle;
use crate::rows::Owner;
use core::sync::atomic::{AtomicI64, Ordering};
use neap_base::Platform;
use neap_base::sync::AtomicUsize;
pub(crate) use neap_os::rseq::Counted;

/// Number of interrupted attempts after which an addition is refused. A debugger interrupts every
/// attempt.
const ATTEMPTS_MAX: usize = 3;

/// An allocation of words.
#[derive(Debug)]
pub(crate) struct Words<H: Host> {
    /// Offset of a thread's rseq area from the thread pointer; 0 without sequences.
    sequences: isize,
    base: usize,
    cpus: usize,
    /// Address of the table of offsets.
    pub(crate) offsets: usize,
    handle: Handle,
    pub(crate) host: H,
}

impl<H: Host> Words<H> {
    /// Allocates `count` zeroed words for each CPU.
    pub(crate) fn new(host: H, owner: Owner, count: usize, of: OffsetsOf, wait: Wait) -> Result<Words<H>, Refused> {
        let handle = host.allocate(owner, count * size_of::<i64>(), size_of::<i64>(), wait)?;
        let sequences = host.platform().rseq_offset().unwrap_or(0);
        let (base, cpus, offsets) = (handle.address(), host.data().cpus(), host.data().offsets(handle, of));
        Ok(Words { sequences, base, cpus, offsets, handle, host })
    }

    /// Whether additions are restartable sequences.
    #[inline(always)]
    pub(crate) fn has_sequences(&self) -> bool {
        self.sequences != 0
    }

    /// Adds to a word of this CPU. Returns whether it did. `offsets` points to a word that holds
    /// [`Words::offsets`] or 0. Other threads may change that word.
    #[inline(always)]
    pub(crate) fn add(&self, offsets: *const usize, word: usize, value: i64) -> bool {
        if !self.has_sequences() {
            self.add_atomically(word, value);
            return true;
        }
        self.attempt(offsets, word, value) || self.attempt_again(offsets, word, value)
    }

    /// Adds to the first word of this CPU, in one attempt. Reports whether the word has bits of
    /// `mask` afterwards.
    #[inline(always)]
    pub(crate) fn count(&self, value: i64, mask: i64) -> Counted {
        if !self.has_sequences() {
            return Counted::Refused;
        }
        // SAFETY: `sequences` is the platform's offset of the rseq area. Only counters call this.
        // Their table is not the fenced one, so it has an offset for every CPU, and only sequences
        // change their words.
        unsafe { neap_os::rseq::count(self.sequences, self.offsets, self.cpus, self.base, value, mask) }
    }

    #[inline(always)]
    fn attempt(&self, offsets: *const usize, word: usize, value: i64) -> bool {
        let place = self.base + word * size_of::<i64>();
        // SAFETY: `sequences` is the platform's offset of the rseq area. `offsets` leads to the
        // allocation's table or holds 0, and only sequences change the words.
        unsafe { neap_os::rseq::add(self.sequences, offsets, self.cpus, place, value) }
    }

    #[cold]
    #[inline(never)]
    fn attempt_again(&self, offsets: *const usize, word: usize, value: i64) -> bool {
        (1..ATTEMPTS_MAX).any(|_| self.attempt(offsets, word, value))
    }

    #[cold]
    fn add_atomically(&self, word: usize, value: i64) {
        let cpu = self.host.platform().cpu() % self.cpus;
        self.word(word, cpu).fetch_add(value, Ordering::Relaxed);
    }

    pub(crate) fn word(&self, word: usize, cpu: usize) -> &AtomicI64 {
        // SAFETY: the copy has the word, aligned, as long as this value lives.
        unsafe { &*self.host.data().address(self.handle, cpu).cast::<AtomicI64>().add(word) }
    }

    /// The word of the CPU that the thread seems to be on.
    pub(crate) fn here(&self, word: usize) -> i64 {
        self.word(word, self.host.platform().cpu() % self.cpus).load(Ordering::Relaxed)
    }

    /// Number of CPUs that have words.
    pub(crate) fn cpus(&self) -> usize {
        self.cpus
    }

    /// Sum of a word over all CPUs.
    pub(crate) fn sum(&self, word: usize) -> i64 {
        (0..self.cpus).map(|cpu| self.word(word, cpu).load(Ordering::Relaxed)).fold(0, i64::wrapping_add)
    }
}

impl<H: Host> Drop for Words<H> {
    fn drop(&mut self) {
        // SAFETY: this value is dropped, and no other code uses the words. The handle is from
        // `allocate`, so there is no error.
        let _ = unsafe { self.host.free(self.handle) };
    }
}

/// Address of an atomic that holds the address of offsets, as the sequences take it.
#[inline(always)]
pub(crate) fn address_of(offsets: &AtomicUsize) -> *const usize {
    (&raw const *offsets).cast()
}
