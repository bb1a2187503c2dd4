//! A byte for every object, outside the objects: allocated, cached, or neither; and whether somebody pays for it.
//!
//! Sits between `malloc`/`free` and the state tables of the arena. Objects start on multiples of 16, so 64 bytes have room for
//! four starts, and there are four tables with a byte for every 64 bytes of the arena: a start's byte is in the table that
//! its place in the 64 bytes says. Objects on multiples of 64 need the first table alone: the bytes of a page are one cache line, and the
//! others have no memory there. It is what catches a double free, the free of an interior pointer, and an object that would be handed out
//! twice, before anything is harmed; memory that a program overran is never trusted for it.
//!
//! | byte | meaning |
//! |---|---|
//! | 0 | no object starts here that anyone has: in a slab's bitmap, inside an object, or no slab |
//! | [`CACHED`] | in a sheaf or a stack |
//! | [`ALLOCATED`] | the program has it |
//! | [`ACCOUNTED`] | the program has it, and somebody pays for it: see [`owners`](crate::owners) |
//! | [`PAID`] | in a sheaf or a stack, and somebody pays for it still: see [`paid`](crate::paid) |
//!
//! A line of a table is that of one page of 4 KiB, and a page has a [home](crate::hot::KindEntry), so CPUs share lines where they share
//! pages. The memory under the tables is written to only where slabs lie, and goes back with theirs; who frees anything else looks there.
//!
//! Accesses are relaxed and not exchanges: two threads that free one object at the very same moment may both see it
//! allocated. It is then in two cells of stacks, and the second of the two pops finds a byte that is not "cached".

use crate::size_class::{Class, GRAIN};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

/// The program has the object, and somebody pays for it.
pub const ACCOUNTED: u8 = 7;
/// The program has the object.
pub const ALLOCATED: u8 = 2;
/// A sheaf or a stack has the object.
pub const CACHED: u8 = 1;
/// A sheaf or a stack has the object, and somebody pays for it.
pub const PAID: u8 = 4;

/// Tables, each with the bytes of every so manieth grain.
pub const TABLES: usize = 4;

/// Bytes of the arena to a byte of a table, as a power of two.
pub const TABLE_SHIFT: u8 = (TABLES * GRAIN).trailing_zeros() as u8;

/// The tables that have bytes of objects of a class, whose slabs start on pages.
pub fn tables_of(class: Class) -> impl Iterator<Item = usize> {
    (0..TABLES).step_by(TABLES.min(1 << (class.size() / GRAIN).trailing_zeros()))
}

/// The state tables of an arena.
#[derive(Debug)]
pub struct States {
    /// The byte of address 0 in each, so that an address needs no subtraction.
    origins: [AtomicPtr<AtomicU8>; TABLES],
}

impl States {
    /// No tables.
    pub const fn none() -> States {
        States { origins: [const { AtomicPtr::new(null_mut()) }; TABLES] }
    }

    /// The tables at these addresses for an arena at `base`.
    pub fn new(tables: [usize; TABLES], base: usize) -> States {
        let origin =
            |table| core::ptr::with_exposed_provenance_mut::<AtomicU8>(table).wrapping_sub(base >> TABLE_SHIFT);
        States { origins: tables.map(|table| AtomicPtr::new(origin(table))) }
    }

    /// Makes these the same as others.
    pub fn copy(&self, from: &States) {
        let copy =
            |(to, from): (&AtomicPtr<_>, &AtomicPtr<_>)| to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        self.origins.iter().zip(&from.origins).for_each(copy);
    }

    /// The byte of an object that starts at `grain` (its address divided by 16).
    ///
    /// # Safety
    /// The grain lies in the mapped part of the arena.
    #[inline(always)]
    pub(crate) unsafe fn byte(&self, grain: usize) -> &AtomicU8 {
        let origin = self.origins[grain % TABLES].load(Ordering::Relaxed);
        // SAFETY: each table has a byte for every mapped part of the arena.
        unsafe { &*origin.wrapping_add(grain / TABLES) }
    }

    /// Whether an object is in a state.
    ///
    /// # Safety
    /// As for [`States::change`].
    #[inline]
    pub unsafe fn is(&self, grain: usize, state: u8) -> bool {
        // SAFETY: as the caller promises.
        unsafe { self.byte(grain) }.load(Ordering::Relaxed) == state
    }

    /// Moves an object from one state to another if it is in the first.
    ///
    /// # Safety
    /// `grain` (an address divided by 16) lies in the mapped part of the arena.
    #[inline(always)]
    pub unsafe fn change(&self, grain: usize, from: u8, to: u8) -> bool {
        // SAFETY: as the caller promises.
        let byte = unsafe { self.byte(grain) };
        if byte.load(Ordering::Relaxed) != from {
            return false;
        }
        byte.store(to, Ordering::Relaxed);
        true
    }

    /// Says that the program gives an object back, whoever pays for it, as [`Hot::free`](crate::hot::Hot::free) does; `false`, and nothing has
    /// changed, if it has none there.
    ///
    /// # Safety
    /// As for [`States::change`].
    #[inline]
    pub unsafe fn release(&self, grain: usize) -> bool {
        // SAFETY: as the caller promises.
        unsafe { self.change(grain, ALLOCATED, CACHED) || self.change(grain, ACCOUNTED, PAID) }
    }

    /// Writes a state without looking; 0: nobody has the object, a slab's bitmap does.
    ///
    /// # Safety
    /// As for [`States::change`], and the caller owns the object.
    #[inline]
    pub unsafe fn set(&self, grain: usize, state: u8) {
        // SAFETY: as the caller promises.
        unsafe { self.byte(grain) }.store(state, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const BASE: usize = 7 << 30;
    const BYTES: usize = 128 << 10;

    #[test]
    fn an_interior_pointer_never_meets_a_state() {
        let tables = [(); TABLES].map(|()| (0..BYTES >> TABLE_SHIFT).map(|_| AtomicU8::new(0)).collect::<Vec<_>>());
        let states = States::none();
        states.copy(&States::new(tables.each_ref().map(|table| table.as_ptr().expose_provenance()), BASE));
        for class in Class::all() {
            let objects = BYTES / class.size();
            let grain = |object: usize| (BASE + object * class.size()) / GRAIN;
            // SAFETY: every offset lies in the tables made above.
            unsafe {
                (0..objects).for_each(|object| states.set(grain(object), CACHED));
                (0..objects).for_each(|object| assert!(states.change(grain(object), CACHED, ALLOCATED)));
                (0..objects).for_each(|object| assert!(!states.change(grain(object), CACHED, ALLOCATED)));
                for (state, freed) in [(CACHED, None), (PAID, None), (ALLOCATED, Some(CACHED)), (ACCOUNTED, Some(PAID))]
                {
                    (0..objects).for_each(|object| states.set(grain(object), state));
                    for somewhere in BASE / GRAIN..grain(objects) {
                        let starts = (somewhere * GRAIN - BASE).is_multiple_of(class.size());
                        for held in [ALLOCATED, ACCOUNTED] {
                            let is = states.is(somewhere, held);
                            assert_eq!(is, starts && held == state, "{class:?} at grain {somewhere}");
                        }
                        let given = states.release(somewhere);
                        assert_eq!(given, starts && freed.is_some(), "{class:?} at grain {somewhere}");
                        assert!(!states.release(somewhere), "once");
                        if given {
                            assert!(freed.is_some_and(|freed| states.is(somewhere, freed)));
                            states.set(somewhere, state);
                        }
                    }
                }
            }
            let written = |table: &Vec<AtomicU8>| table.iter().any(|byte| byte.load(Ordering::Relaxed) != 0);
            let named = |table| tables_of(class).any(|named| named == table);
            assert!((0..TABLES).all(|table| written(&tables[table]) == named(table)), "{class:?}");
            // SAFETY: as above.
            (0..objects).for_each(|object| unsafe { states.set(grain(object), 0) });
            assert!(tables.iter().flatten().all(|byte| byte.load(Ordering::Relaxed) == 0));
        }
    }
}
