//! Words of per-CPU data for structures without a host, which keep many
//! [counts](crate::reference::Count) in their own tables.
//!
//! The words stay until [`PerCpuWords::free`]; a drop does not free them. The first two belong to
//! the count: references taken, and references put. So the first sum is the number of references
//! ever taken, without a further addition. An addition is a restartable sequence. On isolated CPUs
//! and without sequences, `add` refuses it. The caller then counts elsewhere. This module has no
//! lock.

use crate::data::{OffsetsOf, Refused, Wait};
use crate::embedder::Host;
use crate::handle::Handle;
use crate::reference::Counts;
use crate::rows::Owner;
use crate::words::address_of;
use core::ptr::with_exposed_provenance;
use core::sync::atomic::{AtomicI64, Ordering};
use neap_base::Platform;
use neap_base::sync::AtomicUsize;

/// Number of interrupted attempts after which an addition is refused. A debugger interrupts every
/// attempt.
const ATTEMPTS_MAX: usize = 3;

/// The words of the count.
const TAKEN: usize = 0;
const GIVEN_BACK: usize = 1;

/// Words of an allocation that is not freed when the value is dropped.
#[derive(Debug)]
pub struct PerCpuWords {
    /// Offset of a thread's rseq area from the thread pointer; 0 without sequences.
    sequences: isize,
    base: usize,
    handle: Handle,
    cpus: usize,
    /// Addresses of two tables of offsets: of all copies, and of those on CPUs that may be fenced.
    all: usize,
    fenced: AtomicUsize,
}

impl PerCpuWords {
    /// The first word that does not belong to the count.
    pub const FIRST: usize = GIVEN_BACK + 1;

    /// Allocates `count` zeroed words for each CPU. The first [`PerCpuWords::FIRST`] words belong
    /// to the count, so `count` is at least as many.
    ///
    /// # Errors
    /// As for [`PerCpuData::allocate`](crate::PerCpuData::allocate).
    pub fn new<H: Host>(host: &H, owner: Owner, count: usize, wait: Wait) -> Result<PerCpuWords, Refused> {
        debug_assert!(count >= PerCpuWords::FIRST, "the first words belong to the count");
        let handle = host.allocate(owner, count * size_of::<i64>(), size_of::<i64>(), wait)?;
        let [all, fenced] = [OffsetsOf::AllCpus, OffsetsOf::FencedCpus].map(|of| host.data().offsets(handle, of));
        Ok(PerCpuWords {
            sequences: host.platform().rseq_offset().unwrap_or(0),
            base: handle.address(),
            handle,
            cpus: host.data().cpus(),
            all,
            fenced: AtomicUsize::new(fenced),
        })
    }

    /// Frees the words.
    ///
    /// # Safety
    /// No thread uses the words any more.
    pub unsafe fn free<H: Host>(self, host: &H) {
        // SAFETY: the handle is from `new`, and the caller promises that no thread uses the words.
        // So there is no error.
        _ = unsafe { host.free(self.handle) };
    }

    /// Adds to a word of this CPU; returns whether it did.
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
        // SAFETY: `sequences` is the platform's offset of the rseq area. `open` holds 0 or the
        // address of the allocation's offsets, one for each of `cpus` CPUs. Only sequences change
        // the words while it is open.
        unsafe { neap_os::rseq::add(self.sequences, address_of(open), self.cpus, place, value) }
    }

    #[cold]
    #[inline(never)]
    fn attempt_again(&self, open: &AtomicUsize, word: usize, value: i64) -> bool {
        (1..ATTEMPTS_MAX).any(|_| self.attempt(open, word, value))
    }

    fn each(&self, word: usize) -> impl Iterator<Item = &AtomicI64> {
        (0..self.cpus).map(move |cpu| {
            // SAFETY: the table has an entry for every CPU, and each copy has the word. Both stay
            // as long as the instance.
            unsafe {
                let offset = *with_exposed_provenance::<usize>(self.all).add(cpu);
                &*with_exposed_provenance::<AtomicI64>(self.base + offset).add(word)
            }
        })
    }

    /// Number of references that were taken in these words since [`PerCpuWords::clear_all`].
    pub fn taken(&self) -> u64 {
        self.sum(TAKEN) as u64
    }

    /// Sum of a word over all CPUs.
    pub fn sum(&self, word: usize) -> i64 {
        self.each(word).map(|word| word.load(Ordering::Relaxed)).fold(0, i64::wrapping_add)
    }

    /// Sets the first `count` words of all CPUs to 0. The [count](crate::reference::Count) must be
    /// dead and without references.
    pub fn clear_all(&self, count: usize) {
        (0..count).flat_map(|word| self.each(word)).for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

impl Counts for PerCpuWords {
    #[inline(always)]
    fn add(&self, open: &AtomicUsize, value: i64) -> bool {
        match value {
            0.. => self.add_if(open, TAKEN, value),
            _ => self.add_if(open, GIVEN_BACK, -value),
        }
    }

    fn sum(&self) -> i64 {
        PerCpuWords::sum(self, TAKEN).wrapping_sub(PerCpuWords::sum(self, GIVEN_BACK))
    }

    fn opened(&self) -> usize {
        if self.sequences == 0 { 0 } else { self.fenced.load(Ordering::Relaxed) }
    }

    fn clear(&self) {
        let words = self.each(TAKEN).zip(self.each(GIVEN_BACK));
        words.for_each(|(taken, given_back)| given_back.store(taken.load(Ordering::Relaxed), Ordering::Relaxed));
    }
}
