//! One byte per 16 bytes of memory, outside the objects: allocated, cached, or neither.
//!
//! Sits between `malloc`/`free` and the state table of the arena. The byte of an object is that of its first 16 bytes. It
//! is what catches a double free, the free of an interior pointer, and an object that would be handed out twice, before
//! anything is harmed; memory that a program overran is never trusted for it.
//!
//! | byte | meaning |
//! |---|---|
//! | 0 | no object starts here that anyone has: in a slab's bitmap, inside an object, or no slab |
//! | [`CACHED`] | in a sheaf or a stack |
//! | [`ALLOCATED`] | the program has it |
//!
//! Objects that lie within a KiB of each other share a cache line of the table: that is why pages have a
//! [home](crate::hot::KindEntry). A denser table shares more. The memory under the table is touched only where slabs lie,
//! and goes back with theirs.
//!
//! Accesses are relaxed and not exchanges: two threads that free one object at the very same moment may both see it
//! allocated. It is then in two cells of stacks, and the second of the two pops finds a byte that is not "cached".

use crate::size_class::GRAIN;
use core::sync::atomic::{AtomicU8, Ordering};

/// The program has the object.
pub const ALLOCATED: u8 = 2;
/// A sheaf or a stack has the object.
pub const CACHED: u8 = 1;

/// Bytes of the arena to a byte of the table, as a power of two.
pub const TABLE_SHIFT: u8 = GRAIN.trailing_zeros() as u8;

/// The state table of an arena.
#[derive(Clone, Copy, Debug)]
pub struct States {
    /// The byte of address 0, so that an address needs no subtraction.
    origin: *const AtomicU8,
}

// SAFETY: the table is an array of atomics that lives as long as the arena.
unsafe impl Sync for States {}
// SAFETY: as above.
unsafe impl Send for States {}

impl States {
    /// The table at `address` for an arena at `base`.
    pub fn new(address: usize, base: usize) -> States {
        let table = core::ptr::with_exposed_provenance::<AtomicU8>(address);
        States { origin: table.wrapping_sub(base / GRAIN) }
    }

    /// Where the byte of address 0 would be.
    pub fn origin(&self) -> *const AtomicU8 {
        self.origin
    }

    /// The table that [`States::origin`] is of.
    ///
    /// # Safety
    /// `origin` is one, of a table that lives as long as this value is used.
    #[inline(always)]
    pub unsafe fn from_origin(origin: *const AtomicU8) -> States {
        States { origin }
    }

    /// The byte of an object.
    ///
    /// # Safety
    /// `grain` (an address divided by 16) lies in the mapped part of the arena.
    #[inline(always)]
    unsafe fn byte<'a>(self, grain: usize) -> &'a AtomicU8 {
        // SAFETY: the table has a byte for every mapped part of the arena.
        unsafe { &*self.origin.wrapping_add(grain) }
    }

    /// Whether an object is in a state.
    ///
    /// # Safety
    /// As for [`States::change`].
    #[inline]
    pub unsafe fn is(self, grain: usize, state: u8) -> bool {
        // SAFETY: as the caller promises.
        unsafe { self.byte(grain) }.load(Ordering::Relaxed) == state
    }

    /// Moves an object from one state to another if it is in the first.
    ///
    /// # Safety
    /// `grain` (an address divided by 16) lies in the mapped part of the arena.
    #[inline(always)]
    pub unsafe fn change(self, grain: usize, from: u8, to: u8) -> bool {
        // SAFETY: as the caller promises.
        let byte = unsafe { self.byte(grain) };
        if byte.load(Ordering::Relaxed) != from {
            return false;
        }
        byte.store(to, Ordering::Relaxed);
        true
    }

    /// Writes a state, 0 for none, without looking.
    ///
    /// # Safety
    /// As for [`States::change`], and the caller owns the object.
    #[inline]
    pub unsafe fn set(self, grain: usize, state: u8) {
        // SAFETY: as the caller promises.
        unsafe { self.byte(grain) }.store(state, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size_class::Class;
    use std::vec::Vec;

    const BASE: usize = 7 << 30;

    #[test]
    fn an_interior_pointer_never_meets_a_state() {
        let table: Vec<AtomicU8> = (0..(128 << 10) / GRAIN).map(|_| AtomicU8::new(0)).collect();
        let states = States::new(table.as_ptr().expose_provenance(), BASE);
        for class in Class::all() {
            let objects = (128 << 10) / class.size();
            let grain = |object: usize| (BASE + object * class.size()) / GRAIN;
            // SAFETY: every offset lies in the table made above.
            unsafe {
                (0..objects).for_each(|object| states.set(grain(object), CACHED));
                (0..objects).for_each(|object| assert!(states.change(grain(object), CACHED, ALLOCATED)));
                for somewhere in BASE / GRAIN..grain(objects) {
                    let starts = (somewhere * GRAIN - BASE).is_multiple_of(class.size());
                    assert_eq!(states.is(somewhere, ALLOCATED), starts, "{class:?} at grain {somewhere}");
                }
                (0..objects).for_each(|object| assert!(states.change(grain(object), ALLOCATED, CACHED)));
                (0..objects).for_each(|object| assert!(!states.change(grain(object), ALLOCATED, CACHED)));
                (0..objects).for_each(|object| states.set(grain(object), 0));
            }
            assert!(table.iter().all(|byte| byte.load(Ordering::Relaxed) == 0));
        }
    }
}
