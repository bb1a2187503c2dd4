//! Per-CPU stocks: bytes that a group is charged for already and nobody has used yet.
//!
//! Sits between a charge's fast path and the counters of the tree. Each CPU has a line of eight words; a word is a payer and how
//! many bytes are stocked for it, so that to take and to give is one restartable sequence that commits by one store, without
//! a lock and without a locked instruction. Pages and bytes are not stocked apart: a word counts bytes. A payer has one place in
//! the line; another that needs the place puts the first one out.
//!
//! Anyone can empty any CPU's line: with DUMMY, whose words nobody's sequence matches, in the CPU's entry of the table, and
//! a fence, the line is the taker's. CPUs that must not be fenced, and machines without sequences, change words by
//! compare-and-exchange; the two are never mixed on one line. Takers exclude each other by a mutex. What is in words is
//! charged: at most eight times [`CAP`] on each CPU, and for one payer at most [`CAP`].

use crate::id::{PAYER_BITS, Payer};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use neap_base::platform::Errno;
use neap_base::{Mutex, Platform};
use neap_os::rseq::{self, Outcome, UNREGISTERED};

/// The most that a word holds, in bytes.
pub const CAP: u64 = 256 << 10;
/// What is charged at once for a stock: 64 pages of 4 KiB.
pub const BATCH: u64 = 256 << 10;

/// Words of a line.
const WORDS: usize = 8;
/// Behind a line: what it looked like to [`Stocks::drain_idle`], and how many operations on shared memory its CPU has asked for.
const LOOK: usize = 0;
const SHARED: usize = 1;
/// From one CPU's line to the next: a line, and the one that the processor may fetch with it.
const STRIDE: usize = 128;
/// Bits of the number in a word.
const NUMBER_BITS: u32 = u64::BITS - PAYER_BITS;
/// Attempts that are interrupted before a sequence gives up: a debugger interrupts all of them.
const ATTEMPTS: usize = 3;

const _: () = assert!(CAP < 1 << NUMBER_BITS && size_of::<[AtomicU64; WORDS]>() == 64);

type Line = [AtomicU64; WORDS];

/// The stocks of all CPUs.
#[derive(Debug)]
pub(crate) struct Stocks {
    /// Where a thread's rseq area lies, and the table's entry of CPU 0; 0 without sequences.
    sequences: isize,
    regions: usize,
    /// One mapping: a line for each CPU, DUMMY, the table.
    memory: usize,
    length: usize,
    cpus: usize,
    taking: Mutex<()>,
    fences: AtomicU32,
}

const fn word(payer: Payer, bytes: u64) -> u64 {
    payer.to_bits() << NUMBER_BITS | bytes
}

const fn parts(word: u64) -> (Payer, u64) {
    (Payer::from_bits(word >> NUMBER_BITS), word & ((1 << NUMBER_BITS) - 1))
}

/// Where in a line a payer has its word.
fn place(payer: Payer) -> usize {
    (payer.to_bits().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - WORDS.ilog2())) as usize
}

impl Stocks {
    /// Empty stocks.
    pub(crate) fn open<P: Platform>(platform: &P) -> Result<Stocks, Errno> {
        let (cpus, named) = (platform.cpus(), platform.nameable_cpus().max(platform.cpus()));
        let lines = (cpus + 1) * STRIDE;
        let length = (lines + (named + UNREGISTERED) * size_of::<usize>()).next_multiple_of(platform.page_size());
        let memory = platform.map(length)?;
        let (taking, fences) = (Mutex::new(()), 0.into());
        let mut stocks = Stocks { sequences: 0, regions: 0, memory, length, cpus, taking, fences };
        // A word with this payer is above any number under every other; no group has it.
        stocks.line(cpus).iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
        (0..named + UNREGISTERED).for_each(|entry| stocks.entry(entry).store(stocks.dummy(), Ordering::Relaxed));
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
    /// Nobody uses the stocks any more.
    pub(crate) unsafe fn close<P: Platform>(&self, platform: &P) {
        // SAFETY: as the caller promises.
        unsafe { platform.unmap(self.memory, self.length) };
    }

    fn line_address(&self, cpu: usize) -> *mut u8 {
        core::ptr::with_exposed_provenance_mut(self.memory + cpu * STRIDE)
    }

    fn dummy(&self) -> *mut u8 {
        self.line_address(self.cpus)
    }

    fn line(&self, cpu: usize) -> &Line {
        // SAFETY: the mapping has a line for each CPU, and one more.
        unsafe { &*self.line_address(cpu).cast::<Line>() }
    }

    /// One of the words behind a CPU's line.
    fn behind(&self, cpu: usize, word: usize) -> &AtomicU64 {
        // SAFETY: behind each line is as much room again.
        unsafe { &*self.line_address(cpu).cast::<AtomicU64>().add(WORDS + word) }
    }

    /// Counts operations on memory that all CPUs share.
    pub(crate) fn count_shared<P: Platform>(&self, platform: &P, operations: u64) {
        self.behind(platform.cpu(), SHARED).fetch_add(operations, Ordering::Relaxed);
    }

    /// What has been counted so.
    pub(crate) fn shared(&self) -> u64 {
        (0..self.cpus).map(|cpu| self.behind(cpu, SHARED).load(Ordering::Relaxed)).sum()
    }

    fn entry(&self, entry: usize) -> &AtomicPtr<u8> {
        let entries = core::ptr::with_exposed_provenance::<AtomicPtr<u8>>(self.memory + (self.cpus + 1) * STRIDE);
        // SAFETY: behind the lines is an entry for every CPU that could be named, and two more.
        unsafe { &*entries.add(entry) }
    }

    /// Whether a CPU's words change by sequences.
    fn has_sequences<P: Platform>(&self, platform: &P, cpu: usize) -> bool {
        self.sequences != 0 && !platform.is_isolated(cpu)
    }

    /// Changes the payer's word on this CPU by `delta` if it has from `low` to `low + span` bytes.
    #[inline(always)]
    fn alter<P: Platform>(&self, platform: &P, place: usize, tag: u64, low: u64, span: u64, delta: u64) -> bool {
        if self.sequences != 0 && self.attempt(place, tag, low, span, delta) == Outcome::Committed {
            return true;
        }
        self.alter_again(platform, place, tag, low, span, delta)
    }

    #[inline(always)]
    fn attempt(&self, place: usize, tag: u64, low: u64, span: u64, delta: u64) -> Outcome {
        let regions = core::ptr::with_exposed_provenance(self.regions);
        // SAFETY: there are sequences; the table's lines, and DUMMY, have that many words.
        unsafe { rseq::alter(self.sequences, regions, place, tag, low, span, delta) }
    }

    #[cold]
    fn alter_again<P: Platform>(&self, platform: &P, place: usize, tag: u64, low: u64, span: u64, delta: u64) -> bool {
        let cpu = platform.cpu();
        if self.has_sequences(platform, cpu) {
            let mut attempts = (1..ATTEMPTS).map(|_| self.attempt(place, tag, low, span, delta));
            return attempts.find(|outcome| *outcome != Outcome::Aborted) == Some(Outcome::Committed);
        }
        let change = |word: u64| ((word ^ tag).wrapping_sub(low) <= span).then(|| word.wrapping_add(delta));
        // Relaxed, as are sequences: the bytes are a number, and who hands them on orders what they stand for.
        self.line(cpu)[place].fetch_update(Ordering::Relaxed, Ordering::Relaxed, change).is_ok()
    }

    /// Takes bytes that are stocked for a payer, if there are so many on this CPU.
    #[inline(always)]
    pub(crate) fn take<P: Platform>(&self, platform: &P, payer: Payer, bytes: u64) -> bool {
        let tag = word(payer, 0);
        bytes <= CAP && self.alter(platform, place(payer), tag, bytes, CAP - bytes, bytes.wrapping_neg())
    }

    /// Stocks bytes for a payer, if it has its word on this CPU and there is room.
    #[inline(always)]
    pub(crate) fn give<P: Platform>(&self, platform: &P, payer: Payer, bytes: u64) -> bool {
        bytes <= CAP && self.alter(platform, place(payer), word(payer, 0), 0, CAP - bytes, bytes)
    }

    /// Stocks bytes, at most [`CAP`], for a payer, which gets its word for that. Answers what has to be uncharged: what the word held for somebody
    /// else, half of what is too much, or the bytes themselves where this was interrupted again and again.
    pub(crate) fn put<P: Platform>(&self, platform: &P, payer: Payer, bytes: u64) -> Option<(Payer, u64)> {
        let place = place(payer);
        for _ in 0..ATTEMPTS {
            // A hint: where the thread is on another CPU by then, the word is another, and nothing happens unless it is the same.
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

    /// What is stocked at this moment, by payer and CPU, as far as it can be seen from here.
    pub(crate) fn each(&self, mut each: impl FnMut(Payer, u64)) {
        for word in (0..self.cpus).flat_map(|cpu| self.line(cpu)) {
            let (payer, bytes) = parts(word.load(Ordering::Relaxed));
            if bytes > 0 {
                each(payer, bytes);
            }
        }
    }

    /// Empties the words of payers that are `wanted`, on every CPU that has any, and answers how many CPUs had to be skipped because
    /// the fence failed. What came out is the caller's to uncharge.
    pub(crate) fn drain<P: Platform>(
        &self,
        platform: &P,
        wanted: impl Fn(Payer) -> bool,
        mut out: impl FnMut(Payer, u64),
    ) -> u32 {
        let _taking = self.taking.lock();
        (0..self.cpus).filter(|&cpu| !self.drain_cpu(platform, cpu, &wanted, &mut out)).count() as u32
    }

    /// Empties the lines that look as they did when this was last called. Answers whether anything is left in any, and whether it is of a
    /// CPU that had to be skipped.
    pub(crate) fn drain_idle<P: Platform>(&self, platform: &P, mut out: impl FnMut(Payer, u64)) -> (bool, bool) {
        let Some(_taking) = self.taking.try_lock() else { return (true, false) };
        let (mut left, mut skipped) = (false, false);
        for cpu in 0..self.cpus {
            let line = self.line(cpu);
            let holds = |word: &AtomicU64| parts(word.load(Ordering::Relaxed)).1 > 0;
            if !line.iter().any(holds) {
                continue;
            }
            // Lines that change and add up to the same are rare, and then one is emptied that is in use.
            let looks = line.iter().fold(0_u64, |sum, word| sum.rotate_left(7) ^ word.load(Ordering::Relaxed));
            let before = self.behind(cpu, LOOK).swap(looks, Ordering::Relaxed);
            if before == looks {
                skipped |= !self.drain_cpu(platform, cpu, &|_| true, &mut out);
            }
            left |= line.iter().any(holds);
        }
        (left, skipped)
    }

    /// Empties the words of payers that are `wanted` on one CPU; whether that could be done. They are nobody's then, so that what comes back next
    /// goes the slow way. Under the mutex.
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
            // SeqCst with the fence: a sequence that starts behind it finds DUMMY.
            self.entry(cpu + UNREGISTERED).store(self.dummy(), Ordering::SeqCst);
            self.fences.fetch_add(1, Ordering::Relaxed);
            if platform.fence(cpu).is_err() {
                self.reopen(cpu);
                return false;
            }
        }
        let mut taken = [0; WORDS];
        for (word, taken) in line.iter().zip(&mut taken).filter(|(word, _)| is_wanted(word)) {
            // By now nobody else changes it, or does so by an exchange.
            *taken = word.swap(0, Ordering::Relaxed);
        }
        if closed {
            self.reopen(cpu);
        }
        taken.into_iter().map(parts).filter(|(_, bytes)| *bytes > 0).for_each(|(payer, bytes)| out(payer, bytes));
        true
    }

    fn reopen(&self, cpu: usize) {
        // Release pairs with the sequences: who finds the line finds its words empty.
        self.entry(cpu + UNREGISTERED).store(self.line_address(cpu), Ordering::Release);
    }

    /// Fences asked for so far.
    pub(crate) fn fences(&self) -> u32 {
        self.fences.load(Ordering::Relaxed)
    }

    /// The mapping, and its length.
    pub(crate) fn mapping(&self) -> (usize, usize) {
        (self.memory, self.length)
    }
}
