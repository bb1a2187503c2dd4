//! A table of entries that come and go, in address space for as many as there can ever be, of which those are used that were opened.
//!
//! Sits between the tables' memory and rows and owners, under the allocator's lock. An entry that was given back is handed
//! out again before one that was never used; nothing goes back to the system.

use crate::chunk::NONE;
use core::marker::PhantomData;
use core::ops::Range;

#[derive(Debug)]
#[repr(C)]
struct Entry<T> {
    /// The next free one.
    link: u32,
    value: T,
}

/// Entries of one kind.
#[derive(Debug)]
pub(crate) struct Pool<T> {
    address: usize,
    /// Entries that may be touched.
    opened: u32,
    /// Entries behind which there is memory; those beyond may be without.
    ready: u32,
    /// Entries that were ever in use.
    reach: u32,
    free: u32,
    in_use: u32,
    kind: PhantomData<T>,
}

impl<T: Copy> Pool<T> {
    pub(crate) fn bytes(most: u32) -> usize {
        most as usize * size_of::<Entry<T>>()
    }

    /// # Safety
    /// Zeroes at `address`, aligned, of [as many bytes](Pool::bytes) as are opened belong to the pool as long as it is used; `T` is valid as zeroes.
    pub(crate) unsafe fn at(address: usize) -> Pool<T> {
        Pool { address, opened: 0, ready: 0, reach: 0, free: NONE, in_use: 0, kind: PhantomData }
    }

    /// Where entries lie.
    pub(crate) fn places(&self, entries: Range<u32>) -> Range<usize> {
        self.address + Self::bytes(entries.start)..self.address + Self::bytes(entries.end)
    }

    fn entry(&self, index: u32) -> *mut Entry<T> {
        debug_assert!(index < self.reach);
        core::ptr::with_exposed_provenance_mut(self.address + index as usize * size_of::<Entry<T>>())
    }

    pub(crate) fn get(&self, index: u32) -> &T {
        // SAFETY: indexes come from `take`, so the entry lies within what `at` was given.
        unsafe { &(*self.entry(index)).value }
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> &mut T {
        // SAFETY: as above, and the pool is borrowed exclusively.
        unsafe { &mut (*self.entry(index)).value }
    }

    pub(crate) fn opened(&self) -> u32 {
        self.opened
    }

    /// Lets the entries below an index be used.
    ///
    /// # Safety
    /// Their memory may be touched.
    pub(crate) unsafe fn open(&mut self, end: u32) {
        self.opened = end;
    }

    /// Entries that are to have memory, so that the next `ahead` that are taken have it; none, where they have.
    pub(crate) fn unready(&self, ahead: u32) -> Range<u32> {
        if self.ready >= (self.reach + ahead).min(self.opened) {
            return 0..0;
        }
        // Twice as many, so that this is not for each that is taken.
        self.ready.max(self.reach)..(self.reach + 2 * ahead).min(self.opened)
    }

    /// The entries below an index have memory.
    pub(crate) fn note_ready(&mut self, end: u32) {
        self.ready = end;
    }

    /// An entry that nobody has, as it was given back, or all zeroes; `None` where all that were opened are in use.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let index = if self.free != NONE {
            let index = self.free;
            // SAFETY: as in `get`.
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
        // SAFETY: as in `get_mut`.
        unsafe { (*self.entry(index)).link = self.free };
        self.free = index;
        self.in_use -= 1;
    }

    /// Entries in use.
    pub(crate) fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Indexes below this were in use at some time.
    pub(crate) fn reach(&self) -> u32 {
        self.reach
    }
}
