//! A byte for every object, outside the objects: allocated, cached, or neither; and whether somebody pays for it.
//!
//! Sits between `malloc`/`free` and two state tables of the arena: a byte per 16 bytes for objects up to 1 KiB, and a byte
//! per KiB for larger ones, which need no more. The byte of an object is that of its first 16 bytes or first KiB. It is
//! what catches a double free, the free of an interior pointer, and an object that would be handed out twice, before
//! anything is harmed; memory that a program overran is never trusted for it.
//!
//! | low three bits | meaning |
//! |---|---|
//! | 0 | no object starts here that anyone has: in a slab's bitmap, inside an object, or no slab |
//! | [`CACHED`] | in a sheaf or a stack |
//! | [`ALLOCATED`] | the program has it |
//! | [`ACCOUNTED`] | the program has it, and somebody pays for it: see [`owners`](crate::owners) |
//! | [`PAID`] | in a sheaf or a stack, and somebody pays for it still: see [`paid`](crate::paid) |
//!
//! The upper six bits of a large object's byte say at which 16 bytes of the KiB it starts, so that a pointer into the
//! object never meets a state that the program frees. Large objects start on multiples of 128 bytes, so three of these are
//! 0, and one of them is a state's.
//!
//! Objects that lie within a KiB of each other share a cache line of the fine table: that is why pages have a
//! [home](crate::hot::KindEntry). A denser table shares more. The memory under the tables is touched only where slabs lie,
//! and goes back with theirs.
//!
//! Accesses are relaxed and not exchanges: two threads that free one object at the very same moment may both see it
//! allocated. It is then in two cells of stacks, and the second of the two pops finds a byte that is not "cached".

use crate::size_class::{Class, GRAIN};
use core::sync::atomic::{AtomicU8, Ordering};

/// The program has the object, and somebody pays for it.
pub const ACCOUNTED: u8 = 7;
/// The program has the object.
pub const ALLOCATED: u8 = 2;
/// A sheaf or a stack has the object.
pub const CACHED: u8 = 1;
/// A sheaf or a stack has the object, and somebody pays for it.
pub const PAID: u8 = 4;

/// Each has two low bits of its own, so that a pointer into a large object, whose start has other bits above these, never meets a state that the program frees.
const _: () = assert!(1 << (CACHED & 3) | 1 << (ALLOCATED & 3) | 1 << (ACCOUNTED & 3) | 1 << (PAID & 3) == 0b1111);

/// Bytes of the arena to a byte of the table for small objects, as a power of two.
pub const TABLE_SHIFT: u8 = GRAIN.trailing_zeros() as u8;
/// The same of the table for large objects.
pub const LARGE_TABLE_SHIFT: u8 = 10;

/// The place of the first class of large objects: those that are longer than a byte of their table stands for.
const LARGE: u16 = {
    let mut class = Class(1);
    while class.size() <= 1 << LARGE_TABLE_SHIFT {
        class.0 += 1;
    }
    class.place()
};

/// The state tables of an arena.
#[derive(Clone, Copy, Debug)]
pub struct States {
    /// The byte of address 0 in the table for small objects, so that an address needs no subtraction.
    small: *const AtomicU8,
    /// The same in the table for large objects.
    large: *const AtomicU8,
}

// SAFETY: the tables are arrays of atomics that live as long as the arena.
unsafe impl Sync for States {}
// SAFETY: as above.
unsafe impl Send for States {}

impl States {
    /// The tables at two addresses for an arena at `base`.
    pub fn new(small: usize, large: usize, base: usize) -> States {
        let origin =
            |table: usize, shift: u8| core::ptr::with_exposed_provenance::<AtomicU8>(table).wrapping_sub(base >> shift);
        States { small: origin(small, TABLE_SHIFT), large: origin(large, LARGE_TABLE_SHIFT) }
    }

    /// Where the bytes of address 0 would be.
    pub fn origins(&self) -> [*const AtomicU8; 2] {
        [self.small, self.large]
    }

    /// The tables that [`States::origins`] are of.
    ///
    /// # Safety
    /// They are those of tables that live as long as this value is used.
    #[inline(always)]
    pub unsafe fn from_origins([small, large]: [*const AtomicU8; 2]) -> States {
        States { small, large }
    }

    /// Whether the objects of the class of `place` are in the table for large ones.
    #[inline(always)]
    pub fn is_large(place: u16) -> bool {
        place >= LARGE
    }

    /// The byte of an object of the class of `place` that starts at `grain` (its address divided by 16), and what the byte
    /// holds besides the state.
    ///
    /// # Safety
    /// The grain lies in the mapped part of the arena.
    #[inline(always)]
    pub(crate) unsafe fn byte<'a>(self, place: u16, grain: usize) -> (&'a AtomicU8, u8) {
        let (byte, start) = if States::is_large(place) {
            (self.large.wrapping_add(grain >> (LARGE_TABLE_SHIFT - TABLE_SHIFT)), (grain as u8) << 2)
        } else {
            (self.small.wrapping_add(grain), 0)
        };
        // SAFETY: both tables have a byte for every mapped part of the arena.
        (unsafe { &*byte }, start)
    }

    /// Whether an object is in a state.
    ///
    /// # Safety
    /// As for [`States::change`].
    #[inline]
    pub unsafe fn is(self, place: u16, grain: usize, state: u8) -> bool {
        // SAFETY: as the caller promises.
        let (byte, start) = unsafe { self.byte(place, grain) };
        byte.load(Ordering::Relaxed) == state ^ start
    }

    /// Moves an object from one state to another if it is in the first.
    ///
    /// # Safety
    /// `grain` (an address divided by 16) lies in the mapped part of the arena; `place` is that of the class there.
    #[inline(always)]
    pub unsafe fn change(self, place: u16, grain: usize, from: u8, to: u8) -> bool {
        // A jump and not a choice of values, with no more than constants on the way of small objects.
        if States::is_large(place) {
            core::hint::cold_path();
            // SAFETY: as the caller promises.
            let (byte, start) = unsafe { self.byte(place, grain) };
            return States::replace(byte, from ^ start, to ^ start);
        }
        // SAFETY: as the caller promises.
        unsafe { States::change_small(self.small, grain, from, to) }
    }

    /// The same for a small object, by the first of [`States::origins`] alone.
    ///
    /// # Safety
    /// As for [`States::change`].
    #[inline(always)]
    pub(crate) unsafe fn change_small(small: *const AtomicU8, grain: usize, from: u8, to: u8) -> bool {
        // SAFETY: as the caller promises.
        States::replace(unsafe { &*small.wrapping_add(grain) }, from, to)
    }

    #[inline(always)]
    fn replace(byte: &AtomicU8, from: u8, to: u8) -> bool {
        if byte.load(Ordering::Relaxed) != from {
            return false;
        }
        byte.store(to, Ordering::Relaxed);
        true
    }

    /// Says that the program gives an object back, whoever pays for it; `false`, and nothing has changed, if it has none there.
    ///
    /// # Safety
    /// As for [`States::change`].
    #[inline(always)]
    pub unsafe fn release(self, place: u16, grain: usize) -> bool {
        // SAFETY: as the caller promises.
        let (byte, start) = unsafe { self.byte(place, grain) };
        States::let_go(byte, start)
    }

    /// The same for a small object, by the first of [`States::origins`] alone.
    ///
    /// # Safety
    /// As for [`States::change`].
    #[inline(always)]
    pub(crate) unsafe fn release_small(small: *const AtomicU8, grain: usize) -> bool {
        // SAFETY: as the caller promises.
        States::let_go(unsafe { &*small.wrapping_add(grain) }, 0)
    }

    /// A state that depended on the one before, without a jump for what somebody pays for, is what the next malloc would wait for.
    #[inline(always)]
    fn let_go(byte: &AtomicU8, start: u8) -> bool {
        let state = byte.load(Ordering::Relaxed);
        if state == ALLOCATED ^ start {
            byte.store(CACHED ^ start, Ordering::Relaxed);
            return true;
        }
        core::hint::cold_path();
        if state != ACCOUNTED ^ start {
            return false;
        }
        byte.store(PAID ^ start, Ordering::Relaxed);
        true
    }

    /// Writes a state without looking.
    ///
    /// # Safety
    /// As for [`States::change`], and the caller owns the object.
    #[inline]
    pub unsafe fn set(self, place: u16, grain: usize, state: u8) {
        // SAFETY: as the caller promises.
        let (byte, start) = unsafe { self.byte(place, grain) };
        byte.store(state ^ start, Ordering::Relaxed);
    }

    /// Says that nobody has the object: a slab's bitmap does.
    ///
    /// # Safety
    /// As for [`States::set`].
    #[inline]
    pub unsafe fn clear(self, place: u16, grain: usize) {
        // SAFETY: as the caller promises.
        unsafe { self.byte(place, grain) }.0.store(0, Ordering::Relaxed);
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
        let table = |shift: u8| -> Vec<AtomicU8> { (0..(128 << 10) >> shift).map(|_| AtomicU8::new(0)).collect() };
        let tables = [TABLE_SHIFT, LARGE_TABLE_SHIFT].map(table);
        let [small, large] = [0, 1].map(|table| tables[table].as_ptr().expose_provenance());
        let states = States::new(small, large, BASE);
        for class in Class::all() {
            let (objects, place) = ((128 << 10) / class.size(), class.place());
            let grain = |object: usize| (BASE + object * class.size()) / GRAIN;
            // SAFETY: every offset lies in the tables made above.
            unsafe {
                (0..objects).for_each(|object| states.set(place, grain(object), CACHED));
                (0..objects).for_each(|object| assert!(states.change(place, grain(object), CACHED, ALLOCATED)));
                (0..objects).for_each(|object| assert!(!states.change(place, grain(object), CACHED, ALLOCATED)));
                for (state, freed) in [(CACHED, None), (PAID, None), (ALLOCATED, Some(CACHED)), (ACCOUNTED, Some(PAID))]
                {
                    (0..objects).for_each(|object| states.set(place, grain(object), state));
                    for somewhere in BASE / GRAIN..grain(objects) {
                        let starts = (somewhere * GRAIN - BASE).is_multiple_of(class.size());
                        for held in [ALLOCATED, ACCOUNTED] {
                            let is = states.is(place, somewhere, held);
                            assert_eq!(is, starts && held == state, "{class:?} at grain {somewhere}");
                        }
                        let given = states.release(place, somewhere);
                        assert_eq!(given, starts && freed.is_some(), "{class:?} at grain {somewhere}");
                        assert!(!states.release(place, somewhere), "once");
                        if given {
                            assert!(freed.is_some_and(|freed| states.is(place, somewhere, freed)));
                            states.set(place, somewhere, state);
                            let origin = states.origins()[0];
                            assert!(States::is_large(place) || States::release_small(origin, somewhere));
                        }
                    }
                }
                let untouched = &tables[usize::from(class.size() <= 1 << LARGE_TABLE_SHIFT)];
                assert!(untouched.iter().all(|byte| byte.load(Ordering::Relaxed) == 0), "{class:?}");
                (0..objects).for_each(|object| states.clear(place, grain(object)));
            }
            assert!(tables.iter().flatten().all(|byte| byte.load(Ordering::Relaxed) == 0));
        }
    }
}
