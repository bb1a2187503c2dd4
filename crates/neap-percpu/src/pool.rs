//! A table of entries that come and go, in memory that is mapped as far as it can ever grow and touched as it does.
//!
//! Sits between the tables' memory and rows and owners, under the allocator's lock. An entry that was given back is handed
//! out again before one that was never used; nothing goes back to the system.

use crate::chunk::NONE;
use core::marker::PhantomData;

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
    most: u32,
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
    /// [`Pool::bytes`] zeroes at `address`, aligned, belong to the pool as long as it is used; `T` is valid as zeroes.
    pub(crate) unsafe fn at(address: usize, most: u32) -> Pool<T> {
        Pool { address, most, reach: 0, free: NONE, in_use: 0, kind: PhantomData }
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

    /// An entry that nobody has, as it was given back, or all zeroes.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let index = if self.free != NONE {
            let index = self.free;
            // SAFETY: as in `get`.
            self.free = unsafe { (*self.entry(index)).link };
            index
        } else if self.reach < self.most {
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
