//! Guarded samples: their pages, and a slot with the data of each. [`guard`](crate::guard) has the
//! design.
//!
//! # Layout
//! The region begins with a page that never has access. Behind it, each slot has the page of its
//! allocation, and one more page that never has access. A table outside the region has the data of
//! the slots.
//!
//! # Locking
//! One mutex protects the order in which slots are reused. The words of a slot are atomic, because
//! a signal handler may read them at any moment.

pub(crate) mod trail;

use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use neap_base::Mutex;
use neap_base::platform::Errno;
use neap_objects::size_class::GRAIN;
use neap_os::memory;
use trail::{Caller, Trail};

/// Number of slots of a region.
pub(crate) const SLOTS: usize = 512;
/// Pages of a region.
const REGION_PAGES: usize = 2 * SLOTS + 1;
/// Most slots that are live at a time. So before a freed slot is reused, at least as many other
/// slots are freed after it.
const MOST_LIVE: u32 = SLOTS as u32 / 2;
/// While this many slots or more are live, neap guards one sample in two. From twice as many on, it
/// guards one in four, and so on. So lasting allocations leave slots to later ones.
const THINNED_BY: u32 = MOST_LIVE / 8;
/// Value of the bytes beside an allocation that are verified at its free.
const FILL: u8 = 0xfd;
/// The most bytes on each side of an allocation that are verified when it is freed.
const VERIFIED: usize = 256;

/// States of a slot that was used. The state of other slots is 0.
const LIVE: u32 = 1;
const FREED: u32 = 2;

/// Data of a slot. All zeroes: the slot was never used.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Slot {
    state: AtomicU32,
    /// The allocation's address.
    start: AtomicUsize,
    size: AtomicUsize,
    /// The group that pays for its page, as a number; 0: none.
    payer: AtomicU64,
    pub(crate) allocated: Trail,
    pub(crate) freed: Trail,
}

/// The memory of a table.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct SlotTable {
    slots: [Slot; SLOTS],
    /// Slots in the order of their frees, in a ring.
    freed: [AtomicU16; SLOTS],
}

/// The order of slots.
#[derive(Debug)]
pub(crate) struct SlotOrder {
    /// Slots from this one on were never used.
    unused: u32,
    /// Place in the ring of the slot that was freed first, and number of freed slots.
    oldest: u32,
    freed: u32,
    live: u32,
    counts: GuardCounts,
}

/// Numbers of samples that were guarded, and that were not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GuardCounts {
    /// Guarded so far.
    pub(crate) guarded: u64,
    /// Not guarded: no slot was free, the sample was left out, or the system refused access to its
    /// page.
    pub(crate) refused: u64,
}

/// The guarded samples of a manager.
#[derive(Debug)]
pub(crate) struct Guard {
    /// Bytes between two samples, on average; 0: nothing is guarded.
    pub(crate) mean: AtomicU64,
    /// Whether no allocation is counted, and no sample guarded, until the next tick.
    pub(crate) rests: AtomicBool,
    /// Samples since the last tick that were not guarded.
    pub(crate) vain: AtomicU32,
    /// Address and length of the region; 0: there is none.
    base: AtomicUsize,
    bytes: AtomicUsize,
    page_size: AtomicUsize,
    table: AtomicPtr<SlotTable>,
    /// Bytes of pages that groups pay for.
    pub(crate) paid: AtomicU64,
    order: Mutex<SlotOrder>,
}

/// How a program has misused memory of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Misuse {
    /// It accessed an address beyond the end.
    Overflow,
    /// It accessed an address before the start.
    Underflow,
    /// It accessed memory that it had freed.
    AfterFree,
    /// It freed the memory twice, or resized it after the free.
    DoubleFree,
    /// It freed an address that is no allocation's.
    BadFree,
}

/// A misuse, and the slot that it concerns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoundMisuse<'a> {
    pub(crate) misuse: Misuse,
    pub(crate) slot: &'a Slot,
    /// The address that was accessed, written to or freed.
    pub(crate) address: usize,
}

/// A slot for an allocation, and the allocation's place on its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    index: usize,
    /// Whether the allocation lies at the end of its page, so that an access beyond it faults. Else
    /// it lies at the start.
    is_at_end: bool,
}

/// The memory of guarded samples, after [`Guard::open`] has reserved it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region<'a> {
    table: &'a SlotTable,
    order: &'a Mutex<SlotOrder>,
    base: usize,
    /// Bytes of a page. An allocation of any size has one page.
    pub(crate) page_size: usize,
}

impl Slot {
    /// Address of the allocation; 0 if there was none yet.
    pub(crate) fn start(&self) -> usize {
        self.start.load(Ordering::Relaxed)
    }

    /// Bytes that the program asked for.
    pub(crate) fn size(&self) -> usize {
        self.size.load(Ordering::Relaxed)
    }

    /// Whether the program has freed the allocation.
    pub(crate) fn is_freed(&self) -> bool {
        self.state() == FREED
    }

    fn state(&self) -> u32 {
        // Acquire pairs with the Release in `hand_out` and with the exchange in `retire`. The other
        // words then belong to the state that was read.
        self.state.load(Ordering::Acquire)
    }

    /// Returns the range of bytes around the allocation that are filled, and verified at its free.
    fn around(&self, page_size: usize) -> [core::ops::Range<usize>; 2] {
        let (start, end) = (self.start(), self.start() + self.size());
        let page = start & !(page_size - 1);
        let before = start.saturating_sub(VERIFIED).max(page);
        [before..start, end..(end + VERIFIED).min(page + page_size)]
    }
}

impl Guard {
    pub(crate) const fn new() -> Guard {
        let counts = GuardCounts { guarded: 0, refused: 0 };
        Guard {
            mean: AtomicU64::new(0),
            rests: AtomicBool::new(false),
            vain: AtomicU32::new(0),
            base: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            page_size: AtomicUsize::new(0),
            table: AtomicPtr::new(core::ptr::null_mut()),
            paid: AtomicU64::new(0),
            order: Mutex::new(SlotOrder { unused: 0, oldest: 0, freed: 0, live: 0, counts }),
        }
    }

    /// Reserves the region and the table. Must be called once, before allocations are guarded.
    ///
    /// # Errors
    /// The system's error if it gives no address space. Nothing is reserved then.
    pub(crate) fn open(&self) -> Result<(), Errno> {
        let page_size = memory::page_size();
        let (bytes, table_bytes) = (REGION_PAGES * page_size, Guard::table_bytes(page_size));
        let table = memory::reserve(table_bytes)?;
        // SAFETY: the range was reserved just now.
        let opened = unsafe { memory::open(table, table_bytes) };
        // The table has copies of stacks, which may hold secrets.
        let opened = opened.and_then(|()| memory::keep_from_core_files(table, table_bytes));
        let opened = opened.and_then(|()| memory::reserve(bytes));
        // SAFETY: the range was reserved above, and no code uses it.
        let base = opened.inspect_err(|_| _ = unsafe { memory::unmap(table, table_bytes) })?;
        self.table.store(core::ptr::with_exposed_provenance_mut(table), Ordering::Relaxed);
        self.page_size.store(page_size, Ordering::Relaxed);
        self.base.store(base, Ordering::Relaxed);
        // Release pairs with the Acquire in `region`: a thread that sees the length sees the rest.
        self.bytes.store(bytes, Ordering::Release);
        Ok(())
    }

    fn table_bytes(page_size: usize) -> usize {
        size_of::<SlotTable>().next_multiple_of(page_size)
    }

    /// Unmaps the region and the table.
    ///
    /// # Safety
    /// No thread uses guarded memory any more.
    pub(crate) unsafe fn close(&mut self) {
        let (bytes, table) = (*self.bytes.get_mut(), *self.table.get_mut());
        if bytes > 0 {
            // SAFETY: `open` reserved both, and no thread uses them (the caller's promise).
            unsafe {
                let _ = memory::unmap(*self.base.get_mut(), bytes);
                let _ = memory::unmap(table.addr(), Guard::table_bytes(*self.page_size.get_mut()));
            }
        }
        *self = Guard::new();
    }

    /// The region, if there is one.
    pub(crate) fn region(&self) -> Option<Region<'_>> {
        // Acquire pairs with the Release in `open`.
        if self.bytes.load(Ordering::Acquire) == 0 {
            return None;
        }
        // SAFETY: the region is there, so `open` has mapped the table. All of its bits are valid,
        // and it is only changed by atomic accesses and by `Trail`.
        let table = NonNull::new(self.table.load(Ordering::Relaxed)).map(|table| unsafe { table.as_ref() })?;
        let [base, page_size] = [&self.base, &self.page_size].map(|word| word.load(Ordering::Relaxed));
        Some(Region { table, order: &self.order, base, page_size })
    }

    /// The region, if a pointer leads into it.
    pub(crate) fn region_of(&self, pointer: *const u8) -> Option<Region<'_>> {
        self.region().filter(|region| region.has(pointer.addr()))
    }

    /// The region, if an allocation of `size` bytes may be guarded.
    pub(crate) fn region_for(&self, size: usize) -> Option<Region<'_>> {
        let is_on = self.mean.load(Ordering::Relaxed) > 0;
        self.region().filter(|region| is_on && size <= region.page_size)
    }
}

impl<'a> Region<'a> {
    /// The mappings of the region and of the table.
    pub(crate) fn mappings(self) -> [memory::Range; 2] {
        let table = core::ptr::from_ref(self.table).addr();
        [(self.base, REGION_PAGES * self.page_size), (table, Guard::table_bytes(self.page_size))]
            .map(|(start, length)| memory::Range { start, length })
    }

    /// Number of live slots, and counts of samples.
    pub(crate) fn numbers(self) -> (u32, GuardCounts) {
        let order = self.order.lock();
        (order.live, order.counts)
    }

    fn has(self, address: usize) -> bool {
        address.wrapping_sub(self.base) < REGION_PAGES * self.page_size
    }

    /// The slot of a number.
    fn slot(self, index: usize) -> &'a Slot {
        &self.table.slots[index % SLOTS]
    }

    /// Returns the number of the slot whose page an address of the region lies on. If the address
    /// lies on a page that never has access, returns `Err` with the number of the slot behind that
    /// page.
    fn index_of(self, address: usize) -> Result<usize, usize> {
        let page = address.wrapping_sub(self.base) / self.page_size;
        if page % 2 == 1 { Ok(page / 2) } else { Err(page / 2) }
    }

    /// Takes a slot for an allocation: one that was never used, else the one that was freed first.
    /// `None` if too many are live, this sample is left out, or another thread holds the mutex.
    pub(crate) fn take(self) -> Option<Taken> {
        let mut order = self.order.try_lock()?;
        let seen = order.counts.guarded + order.counts.refused;
        let is_left_out = seen % (1 << (order.live / THINNED_BY)) != 0;
        if order.live >= MOST_LIVE || is_left_out {
            order.counts.refused += 1;
            return None;
        }
        let index = if (order.unused as usize) < SLOTS {
            order.unused += 1;
            order.unused - 1
        } else {
            let oldest = &self.table.freed[order.oldest as usize % SLOTS];
            order.oldest = (order.oldest + 1) % SLOTS as u32;
            order.freed -= 1;
            oldest.load(Ordering::Relaxed).into()
        };
        order.live += 1;
        order.counts.guarded += 1;
        Some(Taken { index: index as usize, is_at_end: order.counts.guarded % 2 == 0 })
    }

    /// Appends a slot to the ring of freed slots.
    fn put_back(self, order: &mut SlotOrder, index: usize) {
        let place = (order.oldest + order.freed) as usize % SLOTS;
        self.table.freed[place].store(index as u16, Ordering::Relaxed);
        order.freed += 1;
        order.live -= 1;
    }

    /// Makes an allocation of `size` bytes in a slot. Returns `None` if the system refuses access
    /// to the page. The slot is free again then.
    ///
    /// # Safety
    /// This thread took the slot for this call. `caller` describes this thread, and its stack can
    /// be read. The size is at most a page.
    pub(crate) unsafe fn hand_out(self, taken: Taken, size: usize, payer: u64, caller: &Caller) -> Option<*mut u8> {
        let (slot, page) = (self.slot(taken.index), self.base + (2 * taken.index + 1) * self.page_size);
        // SAFETY: the page lies in the region, which `Guard::open` reserved. It belongs to the
        // slot, which this thread took (the caller's promise).
        if unsafe { memory::open(page, self.page_size) }.is_err() {
            let mut order = self.order.lock();
            order.counts.guarded -= 1;
            order.counts.refused += 1;
            self.put_back(&mut order, taken.index);
            return None;
        }
        // An allocation of 0 bytes gets an address of its own, too.
        let size = size.max(1);
        let start = if taken.is_at_end { page + ((self.page_size - size) & !(GRAIN - 1)) } else { page };
        slot.start.store(start, Ordering::Relaxed);
        slot.size.store(size, Ordering::Relaxed);
        slot.payer.store(payer, Ordering::Relaxed);
        for range in slot.around(self.page_size) {
            // SAFETY: the range lies on the page of the slot. The page was opened above, and no
            // other code uses it before the slot is live.
            unsafe { core::ptr::with_exposed_provenance_mut::<u8>(range.start).write_bytes(FILL, range.len()) };
        }
        // SAFETY: no other thread writes to the slot's trail, since the slot belongs to this call.
        // The stack is this thread's and can be read (the caller's promise).
        unsafe { slot.allocated.take(caller) };
        slot.state.store(LIVE, Ordering::Release); // Pairs with the Acquire in `Slot::state`.
        Some(core::ptr::with_exposed_provenance_mut(start))
    }

    /// Frees the allocation at an address of the region, and appends its slot to the freed ones. If
    /// `seals`, its page loses its access and its memory. Returns the payer; 0 if there is none.
    ///
    /// # Errors
    /// [`FoundMisuse`] if the program has no allocation at `address`, or has written beside it.
    ///
    /// # Safety
    /// `caller` describes this thread, and its stack can be read. No thread uses the allocation any
    /// more.
    pub(crate) unsafe fn retire(self, address: usize, seals: bool, caller: &Caller) -> Result<u64, FoundMisuse<'a>> {
        let (index, slot) = self.allocation_at(address)?;
        // Of two threads that free at once, only one makes the exchange. Acquire pairs with the
        // Release in `hand_out`, Release with the Acquire in `Slot::state`.
        if slot.state.compare_exchange(LIVE, FREED, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return Err(FoundMisuse { misuse: Misuse::DoubleFree, slot, address });
        }
        for (range, misuse) in slot.around(self.page_size).into_iter().zip([Misuse::Underflow, Misuse::Overflow]) {
            let bytes = core::ptr::with_exposed_provenance::<u8>(range.start);
            // SAFETY: the range lies on the page of the slot, which has access. After the exchange,
            // no other thread changes the page.
            let bytes = unsafe { core::slice::from_raw_parts(bytes, range.len()) };
            if let Some(at) = bytes.iter().position(|&byte| byte != FILL) {
                return Err(FoundMisuse { misuse, slot, address: range.start + at });
            }
        }
        // SAFETY: no other thread writes to the slot's trail, since the slot belongs to this call.
        // The stack is this thread's and can be read (the caller's promise).
        unsafe { slot.freed.take(caller) };
        if seals {
            let page = address & !(self.page_size - 1);
            // If the system refuses, the page keeps its access, and misuse after the free is not
            // found. SAFETY: the page lies in the region, which `Guard::open` reserved. No code
            // needs its contents any more, or accesses it until `hand_out` opens it again.
            let _ = unsafe { memory::seal(page, self.page_size).and_then(|()| memory::release(page, self.page_size)) };
        }
        let payer = slot.payer.load(Ordering::Relaxed);
        self.put_back(&mut self.order.lock(), index);
        Ok(payer)
    }

    /// Returns number and slot of the allocation at an address of the region.
    ///
    /// # Errors
    /// [`FoundMisuse`] if no allocation begins at `address`, or it was freed.
    fn allocation_at(self, address: usize) -> Result<(usize, &'a Slot), FoundMisuse<'a>> {
        let place = self.index_of(address);
        let slot = match place {
            Ok(index) => self.slot(index),
            Err(above) => self.blame(address).map_or(self.slot(above), |found| found.slot),
        };
        let found = |misuse| Err(FoundMisuse { misuse, slot, address });
        match place {
            Ok(index) if slot.start() == address && slot.state() == LIVE => Ok((index, slot)),
            Ok(_) if slot.start() == address => found(Misuse::DoubleFree),
            _ => found(Misuse::BadFree),
        }
    }

    /// Returns the bytes of the allocation at an address of the region.
    ///
    /// # Errors
    /// [`FoundMisuse`] if no allocation begins at `address`, or it was freed.
    pub(crate) fn size_at(self, address: usize) -> Result<usize, FoundMisuse<'a>> {
        self.allocation_at(address).map(|(_, slot)| slot.size())
    }

    /// Returns the payer of the allocation that an address of the region lies in; 0: none.
    pub(crate) fn payer_at(self, address: usize) -> u64 {
        let slot = self.index_of(address).ok().map(|index| self.slot(index));
        slot.filter(|slot| slot.state() == LIVE).map_or(0, |slot| slot.payer.load(Ordering::Relaxed))
    }

    /// Finds the allocation for which a failed access to an address of the region was meant. `None`
    /// on a page that has access, and where there was no allocation.
    pub(crate) fn blame(self, address: usize) -> Option<FoundMisuse<'a>> {
        let above = match self.index_of(address) {
            Ok(index) => {
                let slot = self.slot(index);
                return slot.is_freed().then_some(FoundMisuse { misuse: Misuse::AfterFree, slot, address });
            }
            Err(above) => above,
        };
        // The address lies between two slots. Chooses a live slot before a freed one, and then the
        // nearer one.
        let is_nearer_above = address % self.page_size >= self.page_size / 2;
        let below = above.checked_sub(1).map(|below| (Misuse::Overflow, self.slot(below)));
        let above = (above < SLOTS).then(|| (Misuse::Underflow, self.slot(above)));
        let sides = if is_nearer_above { [above, below] } else { [below, above] };
        let in_state = |state| sides.into_iter().flatten().find(|(_, slot)| slot.state() == state);
        let (misuse, slot) = in_state(LIVE).or_else(|| in_state(FREED))?;
        Some(FoundMisuse { misuse, slot, address })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashMap, VecDeque};
    use std::vec::Vec;

    const PAGE: usize = 4096;

    fn open() -> Guard {
        let guard = Guard::new();
        guard.open().unwrap();
        guard.mean.store(1, Ordering::Relaxed);
        guard
    }

    fn allocate(region: Region<'_>, size: usize) -> Option<usize> {
        let taken = region.take()?;
        // SAFETY: the slot was taken above, and the stack is this thread's.
        unsafe { region.hand_out(taken, size, 7, &Caller::here()) }.map(|start| start.addr())
    }

    fn free(region: Region<'_>, address: usize) -> Result<u64, Misuse> {
        // SAFETY: no test uses the memory afterwards.
        unsafe { region.retire(address, true, &Caller::here()) }.map_err(|found| found.misuse)
    }

    fn write(address: usize, byte: u8) {
        // SAFETY: the tests write to pages that have access.
        unsafe { core::ptr::with_exposed_provenance_mut::<u8>(address).write(byte) }
    }

    /// Allocates until an allocation lies at the end of its page, or at its start.
    fn placed(region: Region<'_>, size: usize, at_end: bool) -> usize {
        let page_size = region.page_size;
        loop {
            let start = allocate(region, size).unwrap();
            if start.is_multiple_of(page_size) != at_end {
                return start;
            }
            free(region, start).unwrap();
        }
    }

    #[test]
    fn copies_of_stacks_are_in_no_core_file() {
        let guard = open();
        let [_, table] = guard.region().unwrap().mappings();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let own = maps.split_once(&std::format!("{:x}-", table.start)).unwrap().1;
        let flags = own.lines().find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
    }

    #[test]
    fn allocation_ends_with_its_page_or_begins_with_it() {
        let guard = open();
        let region = guard.region_for(PAGE).unwrap();
        for size in [0, 1, 15, 16, 17, 100, 4095, 4096] {
            let places = [0; 2].map(|_| allocate(region, size).unwrap());
            let [at_end, at_start] = places.map(|start| {
                let rest = region.page_size - start % region.page_size;
                (start.is_multiple_of(GRAIN) && rest >= size && rest < size.max(1) + GRAIN, rest == region.page_size)
            });
            assert!(at_end.0 || at_start.0, "{size}: {places:x?}");
            assert!(at_end.1 || at_start.1, "{size}: {places:x?}");
            for start in places {
                assert_eq!(region.size_at(start).map_err(|found| found.misuse), Ok(size.max(1)));
                assert_eq!(region.payer_at(start), 7);
                free(region, start).unwrap();
            }
        }
        assert!(guard.region_for(region.page_size + 1).is_none());
    }

    /// Against a queue: at least 256 others are freed before a slot is used again.
    #[test]
    fn freed_slot_waits_behind_all_others() {
        let guard = open();
        let region = guard.region_for(1).unwrap();
        let (mut live, mut frees, mut freed, mut random) = (VecDeque::new(), 0_u32, HashMap::new(), 5_u64);
        for step in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            if (random >> 33) % 100 < 52
                && let Some(start) = allocate(region, 16)
            {
                let page = start & !(region.page_size - 1);
                if let Some(at) = freed.remove(&page) {
                    assert!(frees - at >= MOST_LIVE, "step {step}: {} frees later", frees - at);
                }
                live.push_back(start);
            } else if let Some(start) = live.pop_front() {
                free(region, start).unwrap();
                frees += 1;
                freed.insert(start & !(region.page_size - 1), frees);
            }
            assert_eq!(region.numbers().0 as usize, live.len());
        }
        assert!(frees > 2000 && freed.len() <= SLOTS);
    }

    #[test]
    fn lasting_allocations_leave_slots_to_later_ones() {
        let guard = open();
        let region = guard.region_for(1).unwrap();
        let allocated = |samples: usize| (0..samples).filter_map(|_| allocate(region, 1)).collect::<Vec<_>>();
        let first = allocated(32);
        assert_eq!((first.len(), allocated(64).len(), allocated(128).len()), (32, 32, 32));
        let all = allocated(1 << 16).len() + 96;
        assert_eq!((all, region.numbers().0), (MOST_LIVE as usize, MOST_LIVE));
        let (_, GuardCounts { guarded, refused }) = region.numbers();
        assert_eq!((guarded, guarded + refused), (256, 224 + (1 << 16)));
        free(region, first[0]).unwrap();
        assert_eq!(allocated(256).len(), 1);
    }

    #[test]
    fn wrong_frees_are_told_apart() {
        let guard = open();
        let region = guard.region_for(1).unwrap();
        let start = allocate(region, 100).unwrap();
        for bad in [start + 16, start - 1, start & !(PAGE - 1) | 2048, start + PAGE, start - PAGE] {
            assert_eq!(free(region, bad), Err(Misuse::BadFree), "{bad:x} for {start:x}");
        }
        assert_eq!((free(region, start), free(region, start)), (Ok(7), Err(Misuse::DoubleFree)));
        assert_eq!(region.size_at(start).map_err(|found| found.misuse), Err(Misuse::DoubleFree));
        assert_eq!((region.payer_at(start), guard.region_of(core::ptr::null()).is_none()), (0, true));
    }

    #[test]
    fn writes_beside_an_allocation_are_found_at_its_free() {
        let guard = open();
        let region = guard.region_for(1).unwrap();
        for (at_end, offset, misuse) in [
            (true, 99, Some(Misuse::Overflow)),
            (true, 107, Some(Misuse::Overflow)),
            (true, -1, Some(Misuse::Underflow)),
            (true, -256, Some(Misuse::Underflow)),
            (true, -257, None),
            (false, 99, Some(Misuse::Overflow)),
            (false, 354, Some(Misuse::Overflow)),
            (false, 355, None),
            (false, 98, None),
        ] {
            let start = placed(region, 99, at_end);
            write(start.wrapping_add_signed(offset), 0);
            assert_eq!(free(region, start).err(), misuse, "{at_end}, {offset}");
        }
    }

    #[test]
    fn failed_access_is_blamed_on_the_nearest_allocation() {
        let guard = open();
        let region = guard.region_for(1).unwrap();
        let page = region.page_size;
        let blamed = |address| region.blame(address).map(|found| (found.misuse, found.slot.start()));
        assert_eq!(blamed(region.base), None, "there is no allocation yet");
        let [low, high, gone] = [0; 3].map(|_| allocate(region, 100).unwrap());
        free(region, gone).unwrap();
        let low_page = low & !(page - 1);
        assert_eq!(blamed(low), None, "it has access");
        assert_eq!(blamed(low_page - 1), Some((Misuse::Underflow, low)));
        assert_eq!(blamed(low_page - page), Some((Misuse::Underflow, low)));
        assert_eq!(blamed(low_page + page), Some((Misuse::Overflow, low)));
        assert_eq!(blamed(low_page + page + page / 2), Some((Misuse::Underflow, high)));
        assert_eq!(blamed(gone), Some((Misuse::AfterFree, gone)));
        // A live one is likelier than one that was freed.
        assert_eq!(blamed((gone & !(page - 1)) - 1), Some((Misuse::Overflow, high)));
        assert_eq!(blamed((gone & !(page - 1)) + page), Some((Misuse::Overflow, gone)));
        assert_eq!(blamed((gone & !(page - 1)) + 2 * page), None, "it was never used");
    }
}
