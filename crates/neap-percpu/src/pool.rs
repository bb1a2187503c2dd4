//! A table of entries in reserved address space. The space is opened as entries are needed.
//!
//! A freed entry is reused before one that was never used. No memory is released. Rows and owners
//! are kept in pools, under the allocator's lock.

use crate::chunk::NONE;
use core::marker::PhantomData;
use core::ops::Range;

#[derive(Debug)]
#[repr(C)]
struct PoolEntry<T> {
    /// The next free entry.
    link: u32,
    value: T,
}

/// Entries of one kind.
#[derive(Debug)]
pub(crate) struct Pool<T> {
    address: usize,
    /// Number of entries whose address space is open.
    opened: u32,
    /// Number of entries that have memory; later ones may lack it.
    ready: u32,
    /// Number of entries that were ever in use.
    reach: u32,
    free: u32,
    in_use: u32,
    kind: PhantomData<T>,
}

impl<T: Copy> Pool<T> {
    pub(crate) fn bytes(most: u32) -> usize {
        most as usize * size_of::<PoolEntry<T>>()
    }

    /// # Safety
    /// The bytes at `address` belong to the pool as long as it is used. They are aligned for its
    /// entries, and there are [enough](Pool::bytes) for all that are opened. Opened entries are
    /// zeroes at first. All-zero memory is a valid `T`.
    pub(crate) unsafe fn at(address: usize) -> Pool<T> {
        Pool { address, opened: 0, ready: 0, reach: 0, free: NONE, in_use: 0, kind: PhantomData }
    }

    /// Addresses of a range of entries.
    pub(crate) fn places(&self, entries: Range<u32>) -> Range<usize> {
        self.address + Self::bytes(entries.start)..self.address + Self::bytes(entries.end)
    }

    fn entry(&self, index: u32) -> *mut PoolEntry<T> {
        debug_assert!(index < self.reach);
        core::ptr::with_exposed_provenance_mut(self.address + index as usize * size_of::<PoolEntry<T>>())
    }

    pub(crate) fn get(&self, index: u32) -> &T {
        // SAFETY: indexes come from `take`, so the entry is open and lies in the aligned memory
        // that `at` was given. The pool is borrowed shared.
        unsafe { &(*self.entry(index)).value }
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> &mut T {
        // SAFETY: indexes come from `take`, so the entry is open and lies in the aligned memory
        // that `at` was given. The pool is borrowed exclusively.
        unsafe { &mut (*self.entry(index)).value }
    }

    /// Address of the number of entries in use.
    pub(crate) fn in_use_word(&self) -> *const u32 {
        &raw const self.in_use
    }

    pub(crate) fn opened(&self) -> u32 {
        self.opened
    }

    /// Allows the entries below `end` to be used.
    ///
    /// # Safety
    /// The memory of the entries below `end` is open.
    pub(crate) unsafe fn open(&mut self, end: u32) {
        self.opened = end;
    }

    /// Entries to populate, so that the next `ahead` new ones have memory. Empty if they have it
    /// already.
    pub(crate) fn unready(&self, ahead: u32) -> Range<u32> {
        if self.ready >= (self.reach + ahead).min(self.opened) {
            return 0..0;
        }
        // Returns twice as many, so that most new entries need no population.
        self.ready.max(self.reach)..(self.reach + 2 * ahead).min(self.opened)
    }

    /// Records that the entries below `end` have memory.
    pub(crate) fn note_ready(&mut self, end: u32) {
        self.ready = end;
    }

    /// Takes a free entry. Its value is the one that it was freed with, or zeroes if it was never
    /// used. Returns `None` if all opened entries are in use.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let index = if self.free != NONE {
            let index = self.free;
            // SAFETY: the free list holds indexes that came from `take`, so the entry is open and
            // aligned.
            self.free = unsafe { (*self.entry(index)).link };
            index
        } else if self.reach < self.opened {
            self.reach += 1;
            self.reach - 1
        } else {
            return None;
        };
        self.in_use += 1;
        Some(index)
    }

    pub(crate) fn give(&mut self, index: u32) {
        // SAFETY: the index came from `take`, so the entry is open, and the pool is borrowed
        // exclusively.
        unsafe { (*self.entry(index)).link = self.free };
        self.free = index;
        self.in_use -= 1;
    }

    /// Number of entries in use.
    pub(crate) fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Upper bound of the indexes that were ever in use.
    pub(crate) fn reach(&self) -> u32 {
        self.reach
    }
}
