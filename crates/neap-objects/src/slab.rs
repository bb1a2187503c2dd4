//! Slabs: blocks of pages cut into objects of one class. The bitmap of free objects lies outside
//! the slab's memory.
//!
//! # Design
//!
//! A number identifies a slab. Its descriptor (links, counts, bitmap) lies in a side table, never
//! inside free memory. This module neither allocates nor frees pages. Its callers do, while they
//! hold no lock.
//!
//! # Locking
//!
//! A mutex guards the free and unused numbers of slabs. The lock of a slab's class cache guards the
//! slab's descriptor and bitmap.

use crate::holes::{bits, runs};
use crate::size_class::{Class, SlabShape};
use core::ops::Range;
use core::ptr::NonNull;
use neap_base::{Mutex, Pfn, bitmap};

/// The number of a slab.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct SlabId(pub u32);

impl SlabId {
    /// No slab: the end of a list.
    pub const NONE: SlabId = SlabId(u32::MAX);

    /// The number, or `None` for [`SlabId::NONE`].
    pub fn some(self) -> Option<SlabId> {
        (self != SlabId::NONE).then_some(self)
    }
}

/// The most objects that a slab may have: number of bits of the bitmap behind a descriptor.
pub const fn most_objects(page_size: usize) -> usize {
    let smallest = page_size / crate::size_class::GRAIN;
    if smallest < 512 { 512 } else { smallest }
}

/// Binary logarithm of the bytes of arena for a byte of the descriptor table.
pub const TABLE_SHIFT: u8 = 6;

/// The descriptor of a slab.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Slab {
    next: SlabId,
    previous: SlabId,
    /// The first page.
    pub pfn: Pfn,
    /// Objects in the slab.
    pub objects: u32,
    /// Free objects: those in the bitmap.
    pub free: u32,
    /// Objects of neap's own: memory of sheaves and of owners' vectors.
    pub private: u32,
    /// No bit below this word is set.
    first_word: u32,
    /// The class of the objects.
    pub class: Class,
    /// The order of the block of pages.
    pub order: u8,
    /// The list that the slab is on.
    pub(crate) on: On,
    /// Whether an object came back while the slab was isolated.
    pub(crate) touched: bool,
    /// A bit for every page whose memory was released: see [`holes`](crate::holes).
    pub holes: u64,
}

/// The list that a slab is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum On {
    /// The slab is on no list.
    Nothing,
    /// One of two lists that swap their roles: slabs used since the last tick, and slabs at rest
    /// since then.
    Odd,
    /// The other one of the two lists.
    Even,
    /// [`ClassCache::sidelined`](crate::class_cache::ClassCache::sidelined).
    Sidelined,
    /// [`ClassCache::hollow`](crate::class_cache::ClassCache::hollow).
    Hollow,
    /// [`ClassCache::isolated`](crate::class_cache::ClassCache::isolated).
    Isolated,
    /// A list made by [`SlabList::new`].
    Own,
}

/// All descriptors, by number.
#[derive(Debug)]
pub struct SlabTable {
    base: NonNull<u8>,
    stride: usize,
    limit: u32,
    pub(crate) page_shift: u32,
    numbers: Mutex<Numbers>,
}

// SAFETY: threads access descriptors under the lock of their class cache, and numbers under the
// mutex. `pfn_of` takes no lock, but the field that it reads does not change while the slab exists.
unsafe impl Sync for SlabTable {}
// SAFETY: the table may be dropped and used by any thread: `base` is memory of the process, not of
// a thread.
unsafe impl Send for SlabTable {}

#[derive(Debug)]
struct Numbers {
    /// The first freed number. Freed numbers are linked through `next`.
    free: SlabId,
    /// Numbers from here on were never given out.
    fresh: u32,
    /// Number of slabs that exist.
    used: u32,
}

impl SlabTable {
    /// The table over memory at `base`. The memory reads as zeroes and has a byte per 64 bytes of
    /// arena.
    ///
    /// # Safety
    /// `base` is the side table of shift [`TABLE_SHIFT`] and `span` the bytes of arena that it is
    /// for.
    pub unsafe fn new(base: NonNull<u8>, span: usize, page_size: usize) -> SlabTable {
        let stride = size_of::<Slab>() + most_objects(page_size) / 8;
        let limit = ((span >> TABLE_SHIFT) / stride).min(u32::MAX as usize - 1) as u32;
        let page_shift = page_size.trailing_zeros();
        SlabTable {
            base,
            stride,
            limit,
            page_shift,
            numbers: Mutex::new(Numbers { free: SlabId::NONE, fresh: 0, used: 0 }),
        }
    }

    /// Whether the table is mapped for a descriptor and its bitmap.
    fn is_mapped(&self, number: u32, mapped: impl Fn(usize) -> bool) -> bool {
        let start = number as usize * self.stride;
        [start, start + self.stride - 1].into_iter().all(|byte| mapped(byte << TABLE_SHIFT))
    }

    fn pointer(&self, id: SlabId) -> NonNull<Slab> {
        // SAFETY: the number was given out by this table, so its descriptor lies inside it.
        unsafe { self.base.add(id.0 as usize * self.stride).cast() }
    }

    /// The descriptor of a slab.
    ///
    /// # Safety
    /// * The caller holds the lock of the class cache that the slab belongs to, or has just made
    ///   the slab.
    /// * No other reference from this function to the same descriptor is in use.
    #[expect(clippy::mut_from_ref, reason = "the caller holds the lock that makes it exclusive")]
    pub unsafe fn get(&self, id: SlabId) -> &mut Slab {
        // SAFETY: the descriptor was written by `create`. The caller has exclusive access to the
        // slab and holds no other reference (its promise).
        unsafe { self.pointer(id).as_mut() }
    }

    pub(crate) fn words(&self, id: SlabId, objects: u32) -> NonNull<[u64]> {
        // SAFETY: the stride of the table has room for the bitmap directly behind the descriptor.
        let words = unsafe { self.pointer(id).add(1).cast() };
        NonNull::slice_from_raw_parts(words, (objects as usize).div_ceil(64))
    }

    /// Upper bound of the numbers with a descriptor.
    pub(crate) fn numbers(&self) -> u32 {
        self.numbers.lock().fresh
    }

    /// Number of slabs that exist.
    pub fn used(&self) -> u32 {
        self.numbers.lock().used
    }

    /// The first page of a slab. It does not change while the slab exists, so no lock is needed.
    ///
    /// # Safety
    /// The slab exists: the caller holds an object of it.
    pub unsafe fn pfn_of(&self, id: SlabId) -> Pfn {
        // SAFETY: the field is written before the slab has objects, and not again while it has any.
        // The caller holds one.
        unsafe { (&raw const (*self.pointer(id).as_ptr()).pfn).read() }
    }

    /// Makes a slab over the block at `pfn`. All its objects are free, and it is on no list.
    /// Returns `None` if no number is left, which the table's size rules out as long as slabs do
    /// not overlap. `mapped` says whether the table is mapped for an offset into the arena. In a
    /// hole of the arena it may be unmapped. The function leaves out numbers whose descriptors lie
    /// there.
    pub fn create(&self, pfn: Pfn, class: Class, shape: SlabShape, mapped: impl Fn(usize) -> bool) -> Option<SlabId> {
        let id = {
            let mut numbers = self.numbers.lock();
            let id = match numbers.free.some() {
                Some(id) => {
                    // SAFETY: a number on the free list belongs to no slab, and the mutex over the
                    // list is held.
                    numbers.free = unsafe { self.get(id) }.next;
                    id
                }
                None => {
                    let fresh = (numbers.fresh..self.limit).find(|&number| self.is_mapped(number, &mapped))?;
                    numbers.fresh = fresh + 1;
                    SlabId(fresh)
                }
            };
            numbers.used += 1;
            debug_assert!(numbers.used <= numbers.fresh && numbers.fresh <= self.limit);
            id
        };
        let slab = Slab {
            next: SlabId::NONE,
            previous: SlabId::NONE,
            pfn,
            objects: shape.objects,
            free: shape.objects,
            private: 0,
            first_word: 0,
            class,
            order: shape.order,
            on: On::Nothing,
            touched: false,
            holes: 0,
        };
        // SAFETY: the number was just given to this caller alone, and `is_mapped` found its
        // descriptor mapped.
        unsafe { self.pointer(id).write(slab) };
        // SAFETY: the bitmap lies in the stride of the descriptor, both ends of which `is_mapped`
        // found mapped when the number was first given out. No other thread has the number.
        let words = unsafe { self.words(id, shape.objects).as_mut() };
        words.fill(0);
        bitmap::set_range(words, 0, shape.objects as usize);
        Some(id)
    }

    /// Frees a slab's number. The caller has taken the slab off its list, and no other thread uses
    /// the slab.
    pub fn destroy(&self, id: SlabId) {
        let mut numbers = self.numbers.lock();
        // SAFETY: the caller has taken the slab off its list, and no other thread uses it.
        unsafe { self.get(id) }.next = numbers.free;
        numbers.free = id;
        numbers.used -= 1;
    }

    /// Takes up to `most` objects out of a slab, lowest first. Calls `each` with each range of
    /// neighbouring object numbers, and returns the number of objects taken.
    ///
    /// # Safety
    /// The caller holds the lock of the slab's class cache, and no reference to the descriptor is
    /// in use.
    pub unsafe fn take(&self, id: SlabId, most: usize, mut each: impl FnMut(Range<u32>)) -> usize {
        // SAFETY: the caller holds the lock of the slab's class cache, and has no other reference
        // to the descriptor.
        let slab = unsafe { self.get(id) };
        // SAFETY: the lock guards the bitmap, too, and `objects` is the slab's.
        let words = unsafe { self.words(id, slab.objects).as_mut() };
        let mut left = most.min(slab.free as usize);
        let taken = left;
        let mut word = slab.first_word as usize;
        while left > 0 {
            let Some(row) = runs(words[word]).next() else {
                word += 1;
                continue;
            };
            let (first, end) = (row.start, row.end.min(row.start + left as u32));
            words[word] &= !bits(first as usize..end as usize);
            each(word as u32 * 64 + first..word as u32 * 64 + end);
            left -= (end - first) as usize;
        }
        slab.first_word = word as u32;
        debug_assert!(taken <= slab.free as usize && slab.free <= slab.objects);
        slab.free -= taken as u32;
        taken
    }

    /// Puts an object back into the bitmap, by its number. Returns `false` if it is there already
    /// or there is no such object.
    ///
    /// # Safety
    /// The caller holds the lock of the slab's class cache, and no reference to the descriptor is
    /// in use.
    pub unsafe fn put(&self, id: SlabId, object: u32) -> bool {
        // SAFETY: the caller holds the lock of the slab's class cache, and has no other reference
        // to the descriptor.
        let slab = unsafe { self.get(id) };
        // SAFETY: the lock guards the bitmap, too, and `objects` is the slab's.
        let words = unsafe { self.words(id, slab.objects).as_mut() };
        if object >= slab.objects || bitmap::set(words, object as usize) {
            return false;
        }
        slab.free += 1;
        debug_assert!(slab.free <= slab.objects, "more bits are set than there are objects");
        slab.first_word = slab.first_word.min(object / 64);
        true
    }

    /// Whether the counts of a slab agree with its bitmap.
    ///
    /// # Safety
    /// The caller holds the lock of the slab's class cache, and no reference to the descriptor is
    /// in use.
    pub unsafe fn is_consistent(&self, id: SlabId) -> bool {
        // SAFETY: the caller holds the lock of the slab's class cache, and has no other reference
        // to the descriptor.
        let slab = unsafe { self.get(id) };
        // SAFETY: the lock guards the bitmap, too, and `objects` is the slab's.
        let words = unsafe { self.words(id, slab.objects).as_ref() };
        let set = bitmap::count_range(words, 0, words.len() * 64);
        let below = bitmap::count_range(words, 0, (slab.first_word as usize * 64).min(words.len() * 64));
        set == slab.free as usize && below == 0 && slab.free <= slab.objects
    }
}

/// A list of slabs of one class, guarded by the lock of the class cache.
#[derive(Debug)]
pub struct SlabList {
    head: SlabId,
    /// Number of slabs on the list.
    pub length: u32,
    /// The name of the list.
    pub(crate) on: On,
}

impl SlabList {
    /// An empty list that belongs to no class cache.
    pub const fn new() -> SlabList {
        SlabList::named(On::Own)
    }

    /// An empty list.
    pub(crate) const fn named(on: On) -> SlabList {
        SlabList { head: SlabId::NONE, length: 0, on }
    }

    /// The first slab, which was inserted last.
    pub fn first(&self) -> Option<SlabId> {
        self.head.some()
    }

    /// Whether a slab is on a list.
    ///
    /// # Safety
    /// The caller holds the lock of the slab's class cache, and no reference to the descriptor is
    /// in use.
    pub unsafe fn contains(table: &SlabTable, id: SlabId) -> bool {
        // SAFETY: the caller holds the lock of the slab's class cache, and has no other reference
        // to the descriptor.
        unsafe { table.get(id) }.on != On::Nothing
    }

    /// The slab after `id`.
    ///
    /// # Safety
    /// The caller holds the lock of the slab's class cache, and no reference to the descriptor is
    /// in use.
    pub unsafe fn after(table: &SlabTable, id: SlabId) -> Option<SlabId> {
        // SAFETY: the caller holds the lock of the slab's class cache, and has no other reference
        // to the descriptor.
        unsafe { table.get(id) }.next.some()
    }

    /// Inserts a slab at the front.
    ///
    /// # Safety
    /// The caller holds the lock of the list's class cache, and no reference to a descriptor of its
    /// slabs is in use. The slab is on no list.
    pub unsafe fn insert(&mut self, table: &SlabTable, id: SlabId) {
        // SAFETY: the caller holds the lock, and has no other reference to the descriptor.
        let slab = unsafe { table.get(id) };
        debug_assert!(slab.on == On::Nothing, "a slab is on one list");
        (slab.next, slab.previous, slab.on) = (self.head, SlabId::NONE, self.on);
        if let Some(next) = self.head.some() {
            // SAFETY: the lock covers every slab of the list. The slab was on no list, so `next` is
            // another slab.
            unsafe { table.get(next) }.previous = id;
        }
        self.head = id;
        self.length += 1;
    }

    /// Removes a slab from the list.
    ///
    /// # Safety
    /// The caller holds the lock of the list's class cache, and no reference to a descriptor of its
    /// slabs is in use. The slab is on this list.
    pub unsafe fn remove(&mut self, table: &SlabTable, id: SlabId) {
        // SAFETY: the caller holds the lock, and has no other reference to the descriptor.
        let slab = unsafe { table.get(id) };
        let (next, previous) = (slab.next, slab.previous);
        debug_assert!(slab.on == self.on && self.length > 0, "the slab is on another list");
        debug_assert!(previous != SlabId::NONE || self.head == id);
        slab.on = On::Nothing;
        match previous.some() {
            // SAFETY: the lock covers every slab of the list, and a slab's neighbour is another
            // slab.
            Some(previous) => unsafe { table.get(previous) }.next = next,
            None => self.head = next,
        }
        if let Some(next) = next.some() {
            // SAFETY: the lock covers every slab of the list, and a slab's neighbour is another
            // slab.
            unsafe { table.get(next) }.previous = previous;
        }
        self.length -= 1;
    }
}

impl Default for SlabList {
    fn default() -> Self {
        SlabList::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::vec::Vec;

    fn table() -> (SlabTable, Vec<u128>) {
        let mut memory = std::vec![0_u128; 4096];
        // SAFETY: the memory is aligned by hand to 64 bytes and outlives the table in every test.
        let base = memory.as_mut_ptr().cast::<u8>();
        let base = NonNull::new(base.wrapping_add(base.align_offset(64))).unwrap();
        // SAFETY: the memory has 65536 bytes, and the table uses 32768 behind the alignment.
        (unsafe { SlabTable::new(base, 32 << 10 << TABLE_SHIFT, 4096) }, memory)
    }

    #[test]
    fn every_object_is_given_out_once_and_taken_back_once() {
        let (table, _memory) = table();
        for class in [Class(1), Class(20), Class(40), Class(72)] {
            let shape = class.slab_shape(4096);
            let id = table.create(Pfn(7), class, shape, |_| true).unwrap();
            let mut given = BTreeSet::new();
            // SAFETY: the test has one thread.
            unsafe {
                let mut give = |object| assert!(given.insert(object) && object < shape.objects);
                // Batches end within a word of the bitmap, and the next one goes on behind that.
                while table.take(id, 70, |row| row.for_each(&mut give)) > 0 {
                    assert!(table.is_consistent(id));
                }
                assert_eq!(given.len() as u32, shape.objects);
                for &object in given.iter().rev() {
                    assert!(table.put(id, object) && !table.put(id, object) && table.is_consistent(id));
                }
                assert!(!table.put(id, shape.objects));
                assert_eq!(table.get(id).free, shape.objects);
            }
            table.destroy(id);
        }
        assert_eq!(table.used(), 0);
    }

    #[test]
    fn numbers_are_used_again_and_run_out() {
        let (table, _memory) = table();
        let shape = Class(5).slab_shape(4096);
        let ids: Vec<SlabId> = core::iter::from_fn(|| table.create(Pfn(0), Class(5), shape, |_| true)).collect();
        assert_eq!(ids.len() as u32, table.limit);
        table.destroy(ids[3]);
        assert_eq!(table.create(Pfn(0), Class(5), shape, |_| true), Some(ids[3]));
        assert_eq!(table.create(Pfn(0), Class(5), shape, |_| true), None);
    }

    #[test]
    fn numbers_leave_out_descriptors_that_are_not_mapped() {
        let (table, _memory) = table();
        let shape = Class(5).slab_shape(4096);
        // A hole over two and a half descriptors, as a range of offsets into the arena.
        let hole = (3 * table.stride) << TABLE_SHIFT..(11 * table.stride / 2) << TABLE_SHIFT;
        let create = || table.create(Pfn(0), Class(5), shape, |offset| !hole.contains(&offset));
        let numbers: Vec<u32> = (0..5).map(|_| create().unwrap().0).collect();
        assert_eq!(numbers, [0, 1, 2, 6, 7]);
        assert_eq!(table.used(), 5);
    }

    #[test]
    fn a_list_keeps_its_links() {
        let (table, _memory) = table();
        let ids: Vec<SlabId> =
            (0..4).map(|_| table.create(Pfn(0), Class(5), Class(5).slab_shape(4096), |_| true).unwrap()).collect();
        let mut list = SlabList::new();
        // SAFETY: the test has one thread.
        unsafe {
            ids.iter().for_each(|&id| list.insert(&table, id));
            list.remove(&table, ids[1]);
            list.remove(&table, ids[3]);
            list.remove(&table, ids[0]);
            assert_eq!((list.first(), list.length), (Some(ids[2]), 1));
            assert!(SlabList::contains(&table, ids[2]) && !SlabList::contains(&table, ids[1]));
            assert_eq!(SlabList::after(&table, ids[2]), None);
            list.remove(&table, ids[2]);
        }
        assert_eq!(list.first(), None);
    }
}
