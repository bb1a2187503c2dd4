//! Per-CPU stocks: bytes that a group is already charged for and that are not used yet.
//!
//! # Design
//!
//! Each CPU has a line of eight words. A word holds a payer and the number of bytes stocked for it.
//! The kind of memory is part of the payer. `Stocks::take` and `Stocks::give` are one restartable
//! sequence each, which commits by one store, without a lock or a locked instruction. A hash of the
//! payer selects its word. If another payer has that word, `Stocks::put` replaces it, and returns
//! its bytes.
//!
//! # Invariants
//!
//! Stocked bytes are charged to their group. There are at most [`CAP`] bytes for each payer and
//! CPU, and eight times that on each CPU.
//!
//! # Concurrency
//!
//! Any thread can empty any CPU's line. First it stores the address of the closed line in the CPU's
//! table entry. The words of the closed line match no sequence. Then it fences the CPU. After that
//! no other thread changes the line. On isolated CPUs and without sequences, words change by
//! compare-and-exchange. A line never changes in both ways. Threads that empty lines exclude each
//! other by a mutex.

use crate::id::{PAYER_BITS, Payer};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use neap_base::platform::Errno;
use neap_base::platform::memory::Range;
use neap_base::{Mutex, Platform};
use neap_os::rseq::{self, SequenceResult, UNREGISTERED};

/// Maximum number of bytes in a word.
pub const CAP: u64 = 256 << 10;
/// Bytes charged at once for a stock: 64 pages of 4 KiB.
pub const BATCH: u64 = 256 << 10;

/// Words of a line.
const WORDS: usize = 8;
/// Indexes of two words behind a line. One has a hash of the line at the last
/// [`Stocks::drain_idle`], the other the CPU's number of operations on shared memory.
const LAST_HASH: usize = 0;
const SHARED_OPERATIONS: usize = 1;
/// Distance from one CPU's line to the next, in bytes. It is two cache lines, since the processor
/// may prefetch the second one with the first.
const STRIDE: usize = 128;
/// Bits of a word that hold the number of bytes.
const NUMBER_BITS: u32 = u64::BITS - PAYER_BITS;
/// Maximum attempts of a sequence. A debugger interrupts every attempt.
const ATTEMPTS_MAX: usize = 3;

const _: () = assert!(CAP < 1 << NUMBER_BITS && size_of::<[AtomicU64; WORDS]>() == 64);

type Line = [AtomicU64; WORDS];

/// The stocks of all CPUs.
#[derive(Debug)]
pub(crate) struct Stocks {
    /// Offset of a thread's rseq area, and address of the table entry of CPU 0. Both are 0 without
    /// sequences.
    sequences: isize,
    regions: usize,
    /// Start and length of one mapping: a line for each CPU, the closed line, and the table of the
    /// lines.
    memory: usize,
    length: usize,
    cpus: usize,
    taking: Mutex<()>,
    fences: AtomicU32,
}

/// Places and sizes of [`Stocks`] in memory.
pub(crate) struct StocksLayout {
    /// Address of the first CPU's line.
    pub(crate) lines: usize,
    pub(crate) cpus: usize,
    /// Distance from one line to the next, in bytes.
    pub(crate) stride: usize,
    /// Words of a line.
    pub(crate) words: usize,
    /// Low bits of a word that hold the bytes. The payer is above them.
    pub(crate) bytes_bits: u32,
    /// Address of the number of fences.
    pub(crate) fences: *const u32,
}

/// Result of [`Stocks::drain_idle`].
#[derive(Clone, Copy)]
pub(crate) struct IdleDrain {
    /// Whether any line still has bytes.
    pub(crate) left: bool,
    /// Whether a CPU was skipped.
    pub(crate) skipped: bool,
}

const fn word(payer: Payer, bytes: u64) -> u64 {
    payer.to_bits() << NUMBER_BITS | bytes
}

const fn parts(word: u64) -> (Payer, u64) {
    (Payer::from_bits(word >> NUMBER_BITS), word & ((1 << NUMBER_BITS) - 1))
}

/// Returns the index in a line of a payer's word.
fn place(payer: Payer) -> usize {
    (payer.to_bits().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - WORDS.ilog2())) as usize
}

impl Stocks {
    /// Maps empty stocks.
    pub(crate) fn open<P: Platform>(platform: &P) -> Result<Stocks, Errno> {
        let (cpus, named) = (platform.cpus(), platform.nameable_cpus().max(platform.cpus()));
        let lines = (cpus + 1) * STRIDE;
        let length = (lines + (named + UNREGISTERED) * size_of::<usize>()).next_multiple_of(platform.page_size());
        let memory = platform.map(length)?;
        let (taking, fences) = (Mutex::new(()), 0.into());
        let mut stocks = Stocks { sequences: 0, regions: 0, memory, length, cpus, taking, fences };
        // The closed line: the words' number of bytes is above the bound of every sequence,
        // whatever payer the sequence compares. No group has their payer.
        stocks.line(cpus).iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
        (0..named + UNREGISTERED).for_each(|entry| stocks.entry(entry).store(stocks.closed_line(), Ordering::Relaxed));
        if let Some(offset) = platform.rseq_offset() {
            for cpu in (0..cpus).filter(|&cpu| !platform.is_isolated(cpu)) {
                stocks.entry(cpu + UNREGISTERED).store(stocks.line_address(cpu), Ordering::Relaxed);
            }
            stocks.sequences = offset;
            stocks.regions = core::ptr::from_ref(stocks.entry(UNREGISTERED)).expose_provenance();
        }
        Ok(stocks)
    }

    /// Unmaps the lines.
    ///
    /// # Safety
    /// No thread uses the stocks any more.
    pub(crate) unsafe fn close<P: Platform>(&self, platform: &P) {
        // SAFETY: `open` mapped this range, and by this function's contract no thread uses it.
        unsafe { platform.unmap(self.memory, self.length) };
    }

    fn line_address(&self, cpu: usize) -> *mut u8 {
        core::ptr::with_exposed_provenance_mut(self.memory + cpu * STRIDE)
    }

    fn closed_line(&self) -> *mut u8 {
        self.line_address(self.cpus)
    }

    fn line(&self, cpu: usize) -> &Line {
        // SAFETY: `open` mapped `cpus + 1` lines of `STRIDE` bytes, zeroed and aligned; all access
        // to them is atomic.
        unsafe { &*self.line_address(cpu).cast::<Line>() }
    }

    /// Returns one of the words behind a CPU's line.
    fn behind(&self, cpu: usize, word: usize) -> &AtomicU64 {
        // SAFETY: a stride is twice as long as a line, so `WORDS` more words lie behind each, in
        // the mapping of `open`.
        unsafe { &*self.line_address(cpu).cast::<AtomicU64>().add(WORDS + word) }
    }

    /// Counts operations on memory that all CPUs share.
    pub(crate) fn count_shared<P: Platform>(&self, platform: &P, operations: u64) {
        self.behind(platform.cpu(), SHARED_OPERATIONS).fetch_add(operations, Ordering::Relaxed);
    }

    /// Returns the number of operations that were counted.
    pub(crate) fn shared(&self) -> u64 {
        (0..self.cpus).map(|cpu| self.behind(cpu, SHARED_OPERATIONS).load(Ordering::Relaxed)).sum()
    }

    fn entry(&self, entry: usize) -> &AtomicPtr<u8> {
        let entries = core::ptr::with_exposed_provenance::<AtomicPtr<u8>>(self.memory + (self.cpus + 1) * STRIDE);
        // SAFETY: `open` mapped `named + UNREGISTERED` entries behind the lines, for every CPU
        // number that rseq can have, and callers stay below that.
        unsafe { &*entries.add(entry) }
    }

    /// Returns whether a CPU's words change by sequences.
    fn has_sequences<P: Platform>(&self, platform: &P, cpu: usize) -> bool {
        self.sequences != 0 && !platform.is_isolated(cpu)
    }

    /// Adds `delta` to the word at `place` of this CPU's line, if the word has the payer of `tag`,
    /// and `low` to `low + span` bytes more than `tag`. Returns whether it did.
    #[inline(always)]
    fn alter<P: Platform>(&self, platform: &P, place: usize, tag: u64, low: u64, span: u64, delta: u64) -> bool {
        if self.sequences != 0 && self.attempt(place, tag, low, span, delta) == SequenceResult::Committed {
            return true;
        }
        self.alter_again(platform, place, tag, low, span, delta)
    }

    #[inline(always)]
    fn attempt(&self, place: usize, tag: u64, low: u64, span: u64, delta: u64) -> SequenceResult {
        let regions = core::ptr::with_exposed_provenance(self.regions);
        // The entries of `regions` point to a CPU's line or the closed line, of `WORDS` words each.
        // Only the closed line must not be written: its words exceed every bound under every tag.
        // SAFETY: `sequences` is the registered offset, `regions` is the table from CPU 0 on, with
        // the entries described above, and `place` is below `WORDS`.
        unsafe { rseq::alter(self.sequences, regions, place, tag, low, span, delta) }
    }

    #[cold]
    fn alter_again<P: Platform>(&self, platform: &P, place: usize, tag: u64, low: u64, span: u64, delta: u64) -> bool {
        let cpu = platform.cpu();
        if self.has_sequences(platform, cpu) {
            let mut attempts = (1..ATTEMPTS_MAX).map(|_| self.attempt(place, tag, low, span, delta));
            return attempts.find(|outcome| *outcome != SequenceResult::Aborted) == Some(SequenceResult::Committed);
        }
        let change = |word: u64| ((word ^ tag).wrapping_sub(low) <= span).then(|| word.wrapping_add(delta));
        // Relaxed, as are sequences: the word publishes no other data. The transfer of the memory
        // for which the bytes are charged has its own ordering.
        self.line(cpu)[place].try_update(Ordering::Relaxed, Ordering::Relaxed, change).is_ok()
    }

    /// Takes bytes from a payer's stock on this CPU. Returns false if the stock has too few.
    #[inline(always)]
    pub(crate) fn take<P: Platform>(&self, platform: &P, payer: Payer, bytes: u64) -> bool {
        let tag = word(payer, 0);
        bytes <= CAP && self.alter(platform, place(payer), tag, bytes, CAP - bytes, bytes.wrapping_neg())
    }

    /// Adds bytes to a payer's word on this CPU. Returns false if there is no such word, or no room
    /// in it.
    #[inline(always)]
    pub(crate) fn give<P: Platform>(&self, platform: &P, payer: Payer, bytes: u64) -> bool {
        bytes <= CAP && self.alter(platform, place(payer), word(payer, 0), 0, CAP - bytes, bytes)
    }

    /// Stocks bytes, at most [`CAP`], for a payer on this CPU. Returns bytes that the caller must
    /// uncharge, and their payer.
    ///
    /// If another payer has the word, its bytes are returned. If the word would exceed `CAP`, half
    /// of `CAP` stays, and the rest is returned. After [`ATTEMPTS_MAX`] failed attempts, `bytes`
    /// are returned.
    pub(crate) fn put<P: Platform>(&self, platform: &P, payer: Payer, bytes: u64) -> Option<(Payer, u64)> {
        debug_assert!(bytes <= CAP);
        let place = place(payer);
        for _ in 0..ATTEMPTS_MAX {
            // A hint: after a migration `alter` finds another CPU's word, and changes it only if it
            // is equal.
            let found = self.line(platform.cpu())[place].load(Ordering::Relaxed);
            let (holder, held) = parts(found);
            let (kept, out) = match held + bytes {
                _ if holder != payer => (bytes, (held > 0).then_some((holder, held))),
                sum if sum > CAP => (CAP / 2, Some((payer, sum - CAP / 2))),
                sum => (sum, None),
            };
            let delta = word(payer, kept).wrapping_sub(found);
            if self.alter(platform, place, found, 0, 0, delta) {
                return out;
            }
        }
        Some((payer, bytes))
    }

    /// Calls `each` with the stocked bytes by payer and CPU. Other threads may change them
    /// meanwhile.
    pub(crate) fn each(&self, mut each: impl FnMut(Payer, u64)) {
        for word in (0..self.cpus).flat_map(|cpu| self.line(cpu)) {
            let (payer, bytes) = parts(word.load(Ordering::Relaxed));
            debug_assert!(bytes <= CAP);
            if bytes > 0 {
                each(payer, bytes);
            }
        }
    }

    /// Empties the words of payers for which `wanted` returns true, on every CPU. Passes the bytes
    /// to `out`; the caller must uncharge them. Returns the number of CPUs that were skipped
    /// because the fence failed.
    pub(crate) fn drain<P: Platform>(
        &self,
        platform: &P,
        wanted: impl Fn(Payer) -> bool,
        mut out: impl FnMut(Payer, u64),
    ) -> u32 {
        let _taking = self.taking.lock();
        (0..self.cpus).filter(|&cpu| !self.drain_cpu(platform, cpu, &wanted, &mut out)).count() as u32
    }

    /// Empties the lines that have not changed since the last call.
    pub(crate) fn drain_idle<P: Platform>(&self, platform: &P, mut out: impl FnMut(Payer, u64)) -> IdleDrain {
        let Some(_taking) = self.taking.try_lock() else { return IdleDrain { left: true, skipped: false } };
        let mut drain = IdleDrain { left: false, skipped: false };
        for cpu in 0..self.cpus {
            let line = self.line(cpu);
            let holds = |word: &AtomicU64| parts(word.load(Ordering::Relaxed)).1 > 0;
            if !line.iter().any(holds) {
                continue;
            }
            // Different words can have the same sum. Then a line in use is emptied, which is
            // harmless.
            let hash = line.iter().fold(0_u64, |sum, word| sum.rotate_left(7) ^ word.load(Ordering::Relaxed));
            let before = self.behind(cpu, LAST_HASH).swap(hash, Ordering::Relaxed);
            if before == hash {
                drain.skipped |= !self.drain_cpu(platform, cpu, &|_| true, &mut out);
            }
            drain.left |= line.iter().any(holds);
        }
        drain
    }

    /// Empties the words of payers for which `wanted` returns true, on one CPU. Returns false if
    /// the fence failed. The caller holds the mutex.
    ///
    /// Emptied words have no payer, so the next uncharge takes the slow path.
    fn drain_cpu<P: Platform>(
        &self,
        platform: &P,
        cpu: usize,
        wanted: &impl Fn(Payer) -> bool,
        out: &mut impl FnMut(Payer, u64),
    ) -> bool {
        let line = self.line(cpu);
        let is_wanted = |word: &AtomicU64| {
            let found = word.load(Ordering::Relaxed);
            found != 0 && wanted(parts(found).0)
        };
        if !line.iter().any(is_wanted) {
            return true;
        }
        let closed = self.has_sequences(platform, cpu);
        if closed {
            // SeqCst: a sequence that starts after the fence below finds the closed line.
            self.entry(cpu + UNREGISTERED).store(self.closed_line(), Ordering::SeqCst);
            self.fences.fetch_add(1, Ordering::Relaxed);
            if platform.fence(cpu).is_err() {
                self.reopen(cpu);
                return false;
            }
        }
        let mut taken = [0; WORDS];
        for (word, taken) in line.iter().zip(&mut taken).filter(|(word, _)| is_wanted(word)) {
            // No sequence changes the word now. On a CPU without sequences, its threads may.
            *taken = word.swap(0, Ordering::Relaxed);
        }
        if closed {
            self.reopen(cpu);
        }
        taken.into_iter().map(parts).filter(|(_, bytes)| *bytes > 0).for_each(|(payer, bytes)| out(payer, bytes));
        true
    }

    fn reopen(&self, cpu: usize) {
        // Release pairs with the sequences: a sequence that finds the line finds its words empty.
        self.entry(cpu + UNREGISTERED).store(self.line_address(cpu), Ordering::Release);
    }

    /// Returns the places and sizes of the lines, and of the number of fences.
    pub(crate) fn memory_layout(&self) -> StocksLayout {
        StocksLayout {
            lines: self.memory,
            cpus: self.cpus,
            stride: STRIDE,
            words: WORDS,
            bytes_bits: NUMBER_BITS,
            fences: self.fences.as_ptr(),
        }
    }

    /// Returns the number of fences requested so far.
    pub(crate) fn fences(&self) -> u32 {
        self.fences.load(Ordering::Relaxed)
    }

    /// Returns the mapping of the lines.
    pub(crate) fn mapping(&self) -> Range {
        Range { start: self.memory, length: self.length }
    }
}
