//! Writes samples and frees into the [area](neap_base::profile_area).
//!
//! With each sample, the recorder passes the probe `otel_memory:alloc` (address, size, bytes that
//! the sample stands for). With each free, it passes `otel_memory:free` (address). A probe is an
//! instruction that does nothing until a tracer puts a breakpoint there.
//!
//! Other processes of the user may write to the area. So the recorder keeps positions and live
//! samples outside of it, and checks the records that it reads back to keep their stacks.

use super::intervals::{Intervals, Pace, weight};
use super::kept_stacks::Cell;
use super::sample_table::{RemovedSample, SampleTable};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering, fence};
use neap_base::packed_stack::{UnpackedStack, unpack};
use neap_base::platform::Errno;
use neap_base::profile_area::{
    ALLOC, AREA_BYTES, AllocRecord, AreaHeader, BLOCK_BYTES, CELLS_AT, FORMAT, FREE, FreeRecord, MAGIC, PAD, RING_AT,
    RING_BYTES, SLOTS_AT, Slot,
};
use neap_os::call_stack::{self, Registers};
use neap_os::{clock, environment, memory};

/// Bytes between the end of the ring and the records whose stacks are kept. A reader that comes
/// late begins less than two blocks after the oldest byte.
const KEPT_BEHIND: u64 = (RING_BYTES - 2 * BLOCK_BYTES) as u64;

/// A sampled allocation.
#[derive(Debug)]
pub(crate) struct Sampled {
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) mean: u64,
    pub(crate) group: u64,
    pub(crate) time: u64,
    pub(crate) thread: u32,
}

/// A process's own data of its samples.
#[derive(Debug)]
pub(crate) struct Recorder {
    intervals: Intervals,
    pace: Pace,
    /// Number of the last sample.
    taken: u64,
    /// Bytes ever written to the ring.
    head: u64,
    /// Bytes ever passed of the ring. The stacks of live samples before this position are kept in
    /// cells.
    passed: u64,
    /// `None`: nothing is recorded.
    live: Option<SampleTable>,
}

/// Distance to the next sample.
pub(crate) struct Interval {
    /// Bytes up to the next sample.
    pub(crate) bytes: usize,
    /// The average of the distribution.
    pub(crate) mean: usize,
}

impl Recorder {
    pub(crate) const fn new() -> Recorder {
        Recorder { intervals: Intervals::new(0), pace: Pace::new(), taken: 0, head: 0, passed: 0, live: None }
    }

    /// Begins to record, or continues with another mean.
    ///
    /// # Errors
    /// The system's error if it gives no address space. Nothing has changed then.
    pub(crate) fn begin(&mut self, area: &AreaHeader, mean: u64) -> Result<(), Errno> {
        if self.live.is_none() {
            *self = Recorder { live: Some(SampleTable::make()?), ..Recorder::new() };
            self.intervals = Intervals::new(environment::random());
            // Memory that the system did not take back is not zero.
            let counters = [&area.head, &area.taken, &area.live, &area.without_slot, &area.without_stack];
            counters.into_iter().for_each(|counter| counter.store(0, Ordering::Relaxed));
            area.began.store(clock::precise(), Ordering::Relaxed);
            area.format.store(FORMAT, Ordering::Relaxed);
            // Release: a reader that sees the magic sees the rest.
            area.magic.store(MAGIC, Ordering::Release);
        }
        // The pace of another distance says nothing about this one.
        self.pace = Pace::new();
        area.mean.store(mean, Ordering::Relaxed);
        area.is_on.store(1, Ordering::Relaxed);
        Ok(())
    }

    /// Begins to draw intervals for samples that are only guarded, and not recorded.
    pub(crate) fn begin_guard(&mut self) {
        self.intervals = Intervals::new(environment::random());
        self.pace = Pace::new();
    }

    /// Forgets all samples, and unmaps their table. If there is an `area`, also releases its
    /// memory.
    pub(crate) fn end(&mut self, area: Option<&AreaHeader>) {
        let live = self.live.take();
        if let Some(area) = area {
            // Without the magic, a reader does not take the memory for an area.
            area.magic.store(0, Ordering::Release);
            let address = core::ptr::from_ref(area).addr();
            // SAFETY: the header is the start of a mapping of that length. In this process, only
            // the recorder relies on its contents, and it has forgotten all samples.
            let is_zero = unsafe { memory::release_shared(address, AREA_BYTES) }.is_ok();
            // The next samples are numbered from 1 again, so no slot may keep a number.
            for index in (0..live.as_ref().map_or(0, SampleTable::used)).filter(|_| !is_zero) {
                // SAFETY: the area is mapped, and has a slot for every entry.
                unsafe { slot_at(area, index).as_ref() }.number.store(0, Ordering::Relaxed);
            }
        }
        if let Some(live) = live {
            live.close();
        }
    }

    /// Draws the interval up to the next sample for the requested `mean`.
    pub(crate) fn interval(&mut self, mean: u64) -> Interval {
        let mean = self.pace.mean(mean);
        Interval { bytes: self.intervals.draw(mean), mean: mean as usize }
    }

    /// Bytes ever written to the ring; `None` if nothing is recorded.
    pub(crate) fn head(&self) -> Option<u64> {
        self.live.as_ref().map(|_| self.head)
    }

    /// Whether a sample is live and has a slot.
    pub(crate) fn is_live(&self, address: u64, number: u64) -> bool {
        self.live.as_ref().is_some_and(|live| live.has(address, number))
    }

    /// Copies the block of the ring that begins at a position. Returns the number of copied words.
    /// It is 0 if the block was overwritten, or if it lies beyond the head because sampling began
    /// again.
    ///
    /// # Safety
    /// `area` is the start of a mapped area that no other thread of the process writes to.
    pub(crate) unsafe fn copy_block(&self, area: &AreaHeader, position: u64, to: &mut [u64; BLOCK_BYTES / 8]) -> usize {
        if position.saturating_add(RING_BYTES as u64) < self.head {
            return 0;
        }
        let words = (self.head.saturating_sub(position) as usize / 8).min(to.len());
        // SAFETY: `position` is that of a block, which lies in the ring of the mapped area (the
        // caller's promise).
        unsafe { copy_words(ring_at(area, position), &mut to[..words]) };
        words
    }

    /// Copies as many slots as fill a block, from the slot `first` on.
    ///
    /// # Safety
    /// `area` is the start of a mapped area that no other thread of the process writes to. It has
    /// the slots.
    pub(crate) unsafe fn copy_slots(&self, area: &AreaHeader, first: usize, to: &mut [u64; BLOCK_BYTES / 8]) {
        // SAFETY: the slots lie in the mapped area (the caller's promise), at a multiple of 8.
        unsafe { copy_words(slot_at(area, first).cast(), to) };
    }

    /// Unpacks the kept stack of a live sample. `None` if there is none.
    ///
    /// # Safety
    /// `area` is the start of a mapped area that no other thread of the process writes to.
    pub(crate) unsafe fn kept(
        &self,
        area: &AreaHeader,
        address: u64,
        number: u64,
        to: &mut [u64],
    ) -> Option<UnpackedStack> {
        let live = self.live.as_ref()?;
        // SAFETY: the area is mapped and has the cells (the caller's promise). It stays mapped
        // while this function reads them.
        let mut stream = unsafe { live.kept().stream(cells_of(area), live.find(address, number)?) };
        unpack(&mut stream, to)
    }

    #[cfg(test)]
    pub(super) fn live_samples(&self) -> Option<&SampleTable> {
        self.live.as_ref()
    }

    /// Number of live samples.
    pub(crate) fn live(&self) -> u32 {
        self.live.as_ref().map_or(0, SampleTable::live)
    }

    /// Records a sample with `stack_bytes` bytes of the stack. Returns whether its free will be
    /// recorded.
    ///
    /// # Safety
    /// * `area` is the start of a mapped area that no other thread writes to.
    /// * The bytes of the stack can be read. `stack_bytes` is a multiple of 8, and at most
    ///   `MOST_STACK`.
    pub(crate) unsafe fn record(
        &mut self,
        area: &AreaHeader,
        sampled: &Sampled,
        registers: Registers,
        stack_bytes: usize,
    ) -> bool {
        let Some(live) = &mut self.live else { return false };
        self.pace.count(sampled.time);
        self.taken += 1;
        let number = self.taken;
        let slot = live.insert(sampled.address, number);
        area.taken.store(number, Ordering::Relaxed);
        area.live.store(live.live().into(), Ordering::Relaxed);
        let count = |counter: &AtomicU64, is: bool| _ = counter.fetch_add(is.into(), Ordering::Relaxed);
        count(&area.without_slot, slot.is_none());
        count(&area.without_stack, stack_bytes == 0);
        if let Some(index) = slot {
            // SAFETY: the area is mapped (the caller's promise), and has a slot for every entry.
            let slot = unsafe { slot_at(area, index).as_ref() };
            let words = [
                (&slot.address, sampled.address),
                (&slot.size, sampled.size),
                (&slot.mean, sampled.mean),
                (&slot.time, sampled.time),
                (&slot.group, sampled.group),
            ];
            words.into_iter().for_each(|(word, value)| word.store(value, Ordering::Relaxed));
            slot.thread.store(sampled.thread, Ordering::Relaxed);
            slot.kept.store(0, Ordering::Relaxed);
            // Release: a reader that sees the number sees the rest.
            slot.number.store(number, Ordering::Release);
        }
        let bytes = size_of::<AllocRecord>() + stack_bytes;
        let record = AllocRecord {
            kind: ALLOC,
            bytes: bytes as u32,
            number,
            time: sampled.time,
            address: sampled.address,
            size: sampled.size,
            mean: sampled.mean,
            group: sampled.group,
            thread: sampled.thread,
            stack_bytes: stack_bytes as u32,
            instruction: registers.instruction as u64,
            stack_pointer: registers.stack_pointer as u64,
            frame_pointer: registers.frame_pointer as u64,
        };
        // The record has a multiple of 8 bytes, and fits a block, since `stack_bytes` is at most
        // `MOST_STACK`. So `room` returns that many bytes of the ring.
        // SAFETY: the area is mapped, no other thread writes to it, and the stack can be read (the
        // caller's promises). The stack lies above this function's frame.
        unsafe {
            let to = self.room(area, bytes);
            to.cast::<AllocRecord>().write(record);
            call_stack::copy(registers.stack_pointer, to.as_ptr().add(size_of::<AllocRecord>()), stack_bytes);
        }
        self.publish(area, bytes);
        let weight = weight(sampled.size, sampled.mean);
        probe::probe!(otel_memory, alloc, sampled.address, sampled.size, weight);
        slot.is_some()
    }

    /// Ends the sample at an address, if there is one, and records its free.
    ///
    /// # Safety
    /// `area` is the start of a mapped area that no other thread writes to.
    pub(crate) unsafe fn forget(&mut self, area: &AreaHeader, address: u64) {
        let removed = self.live.as_mut().and_then(|live| live.remove(address));
        let Some(RemovedSample { index, number }) = removed else { return };
        // SAFETY: the area is mapped (the caller's promise), and has a slot for every entry.
        unsafe { slot_at(area, index).as_ref() }.number.store(0, Ordering::Relaxed);
        // A reader that sees later data in a freed cell sees the 0.
        fence(Ordering::Release);
        if let Some(live) = &mut self.live {
            live.kept_mut().free(index);
        }
        area.live.store(self.live().into(), Ordering::Relaxed);
        let bytes = size_of::<FreeRecord>();
        let record = FreeRecord { kind: FREE, bytes: bytes as u32, number, time: clock::precise() };
        // SAFETY: the area is mapped, and no other thread writes to it (the caller's promise). The
        // size of a `FreeRecord` is a multiple of 8. `room` returns that many bytes of the ring.
        unsafe { self.room(area, bytes).cast::<FreeRecord>().write(record) };
        self.publish(area, bytes);
        probe::probe!(otel_memory, free, address);
    }

    /// Returns the place of a record of `bytes` bytes. Its address is a multiple of 8. A record
    /// lies in one block, so this first fills the rest of a block in which the record does not fit.
    ///
    /// # Safety
    /// `area` is the start of a mapped area that no other thread writes to. `bytes` is a multiple
    /// of 8 and at most a block.
    unsafe fn room(&mut self, area: &AreaHeader, bytes: usize) -> NonNull<u8> {
        let rest = BLOCK_BYTES - self.head as usize % BLOCK_BYTES;
        let growth = if bytes > rest { rest + bytes } else { bytes };
        // SAFETY: the area is mapped, and no other thread writes to it (the caller's promise).
        unsafe { self.keep_stacks(area, self.head + growth as u64) };
        if bytes > rest {
            // SAFETY: the head is a multiple of 8. So the rest of a block has at least 8 bytes, and
            // lies in the ring of the mapped area.
            unsafe { ring_at(area, self.head).cast::<[u32; 2]>().write([PAD, rest as u32]) };
            self.publish(area, rest);
        }
        // SAFETY: the area is mapped (the caller's promise).
        unsafe { ring_at(area, self.head) }
    }

    /// Keeps the stacks of live samples before readers lose their records. Once `head` is `end`,
    /// readers do not read records that lie less than two blocks after the oldest byte of the ring.
    /// Passes as many bytes as the ring grows by, up to the end of a record.
    ///
    /// # Safety
    /// `area` is the start of a mapped area that no other thread writes to.
    unsafe fn keep_stacks(&mut self, area: &AreaHeader, end: u64) {
        let Some(live) = &mut self.live else { return };
        while self.passed + KEPT_BEHIND < end {
            let rest = BLOCK_BYTES - self.passed as usize % BLOCK_BYTES;
            // SAFETY: the area is mapped (the caller's promise).
            let place = unsafe { ring_at(area, self.passed) };
            // SAFETY: `place` lies in the ring, and its address is a multiple of 8. Volatile:
            // another process may write there, so sizes are checked, and any other value is valid.
            let [kind, bytes] = unsafe { place.cast::<[u32; 2]>().read_volatile() };
            let bytes = bytes as usize;
            if kind == PAD || !bytes.is_multiple_of(8) || bytes < size_of::<FreeRecord>() || bytes > rest {
                self.passed += rest as u64;
                continue;
            }
            self.passed += bytes as u64;
            if kind != ALLOC || bytes < size_of::<AllocRecord>() {
                continue;
            }
            // SAFETY: the head lies in the ring, as the record's `bytes` do. Any value is valid.
            let record = unsafe { place.cast::<AllocRecord>().read_volatile() };
            let stack_bytes = record.stack_bytes as usize;
            let is_whole = stack_bytes > 0 && stack_bytes <= bytes - size_of::<AllocRecord>();
            if let Some(index) = live.find(record.address, record.number).filter(|_| is_whole) {
                let registers = [record.instruction, record.stack_pointer, record.frame_pointer];
                // SAFETY: the stack lies in the record, in the ring. The area has the cells and the
                // slots, and this thread alone writes there.
                unsafe {
                    let stack = place.add(size_of::<AllocRecord>()).cast();
                    let kept = live.kept_mut().keep(cells_of(area), index, registers, stack, stack_bytes / 8);
                    // Release: a reader that sees it sees the cells.
                    slot_at(area, index).as_ref().kept.store(kept, Ordering::Release);
                }
            }
        }
    }

    /// Lets readers see the record of `bytes` bytes that was written last.
    fn publish(&mut self, area: &AreaHeader, bytes: usize) {
        self.head += bytes as u64;
        // Release pairs with the reader's Acquire, or its system call: it sees the record.
        area.head.store(self.head, Ordering::Release);
    }
}

/// Copies words of an area, which other processes may write to.
///
/// # Safety
/// `from` is a multiple of 8. `to.len()` words from `from` on lie in a mapped area.
unsafe fn copy_words(from: NonNull<u8>, to: &mut [u64]) {
    let from = from.cast::<u64>();
    for (at, word) in to.iter_mut().enumerate() {
        // SAFETY: the word lies in a mapping, and its address is a multiple of 8 (the caller's
        // promise). Volatile: another process may write it meanwhile, and any value is valid.
        *word = unsafe { from.add(at).read_volatile() };
    }
}

/// The slot `index` of an area.
///
/// # Safety
/// `area` is the start of a mapped area, which has that slot.
unsafe fn slot_at(area: &AreaHeader, index: usize) -> NonNull<Slot> {
    // SAFETY: the slot lies in the area's mapping (the caller's promise).
    unsafe { at(area, SLOTS_AT + index * size_of::<Slot>()) }.cast()
}

/// The byte `position` of the ring of an area.
///
/// # Safety
/// `area` is the start of a mapped area.
unsafe fn ring_at(area: &AreaHeader, position: u64) -> NonNull<u8> {
    // SAFETY: the ring lies in the area's mapping (the caller's promise).
    unsafe { at(area, RING_AT + position as usize % RING_BYTES) }
}

/// The cells of an area.
///
/// # Safety
/// `area` is the start of a mapped area.
unsafe fn cells_of(area: &AreaHeader) -> NonNull<Cell> {
    // SAFETY: the cells lie in the area's mapping (the caller's promise).
    unsafe { at(area, CELLS_AT) }.cast()
}

/// A byte of an area.
///
/// # Safety
/// `area` is the start of a mapped area that is longer than `offset`.
unsafe fn at(area: &AreaHeader, offset: usize) -> NonNull<u8> {
    let address = core::ptr::from_ref(area).addr() + offset;
    // SAFETY: an address within a mapping (the caller's promise) is not 0.
    unsafe { NonNull::new_unchecked(core::ptr::with_exposed_provenance_mut(address)) }
}
