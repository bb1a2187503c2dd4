//! One byte per object, outside the object: allocated, cached, or neither.
//!
//! Sits between `malloc`/`free` and the state tables of the arena. The byte is what catches a double free, the free of an
//! interior pointer, and an object that would be handed out twice, before anything is harmed; memory that a program
//! overran is never trusted for it.
//!
//! A table has one byte per 2^s bytes of the arena (s from [`Class::state_shift`]). The byte of an object is that of its
//! first byte; it holds the state in its two lower bits and, in the others, the lowest six bits of the number of the
//! object's first grain (16 bytes), its position. 2^s is at most 64 grains, so a pointer into the middle of an object
//! meets 0 or another position:
//!
//! | byte | meaning |
//! |---|---|
//! | 0 | no object starts here that anyone has: in a slab's bitmap, or no slab |
//! | position × 4 + 1 | in a sheaf or a stack |
//! | position × 4 + 2 | the program has it |
//!
//! Accesses are relaxed and not exchanges: two threads that free one object at the very same moment may both see it
//! allocated. It is then in two cells of sheaves, and the second of the two pops finds a byte that is not "cached".

use crate::size_class::{CLASSES, Class, GRAIN};
use core::sync::atomic::{AtomicU8, Ordering};

/// The program has the object.
pub const ALLOCATED: u8 = 2;
/// A sheaf or a stack has the object.
pub const CACHED: u8 = 1;

/// The shifts of the tables there are.
pub const SHIFTS: [u8; 4] = [4, 5, 6, 10];

/// Which of [`SHIFTS`] a class uses.
pub fn table_of(class: Class) -> usize {
    SHIFTS.iter().position(|&shift| shift == class.state_shift()).unwrap_or(0)
}

/// Where the state bytes of one class are, and where its stack is: 16 bytes, read by every malloc and free.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub struct StateMap {
    table: *const AtomicU8,
    /// Grains to a state byte, as a power of two.
    shift: u8,
    /// [`Class::place`].
    pub place: u16,
}

// SAFETY: the table is an array of atomics that lives as long as the arena.
unsafe impl Sync for StateMap {}
// SAFETY: as above.
unsafe impl Send for StateMap {}

/// A byte that no state equals.
static NOTHING: AtomicU8 = AtomicU8::new(0);

impl StateMap {
    /// A map that every offset leads to the byte 0 with: nothing is allocated, nothing cached.
    pub const NOTHING: StateMap = StateMap { table: &raw const NOTHING, shift: 63, place: 0 };

    /// The maps of all classes over the tables at these addresses, in the order of [`SHIFTS`], for an arena at `base`.
    pub fn all(tables: [usize; SHIFTS.len()], base: usize) -> [StateMap; CLASSES] {
        let mut maps = [StateMap::NOTHING; CLASSES];
        for class in Class::all() {
            let shift = class.state_shift() - GRAIN.trailing_zeros() as u8;
            // Where the byte of address 0 would be, so that an address needs no subtraction.
            let table = core::ptr::with_exposed_provenance::<AtomicU8>(tables[table_of(class)]);
            let table = table.wrapping_sub(base >> class.state_shift());
            maps[class.index()] = StateMap { table, shift, place: class.place() };
        }
        maps
    }

    /// The byte of an object at address `grain` × 16.
    ///
    /// # Safety
    /// The address lies in the mapped part of the arena (any below 2^63 × 16 will do for [`StateMap::NOTHING`]).
    #[inline(always)]
    unsafe fn byte<'a>(&self, grain: usize) -> &'a AtomicU8 {
        // SAFETY: the table has a byte for every mapped part of the arena.
        unsafe { &*self.table.wrapping_add(grain >> self.shift) }
    }

    /// What the byte of an object says in a state.
    #[inline(always)]
    pub(crate) fn value(grain: usize, state: u8) -> u8 {
        (grain as u8).wrapping_mul(4).wrapping_add(state)
    }

    /// Whether an object is in a state.
    ///
    /// # Safety
    /// As for [`StateMap::change`].
    #[inline]
    pub unsafe fn is(&self, grain: usize, state: u8) -> bool {
        // SAFETY: as the caller promises.
        unsafe { self.byte(grain) }.load(Ordering::Relaxed) == StateMap::value(grain, state)
    }

    /// Moves an object from one state to another if it is in the first.
    ///
    /// # Safety
    /// The address lies in the mapped part of the arena (any below 2^63 × 16 will do for [`StateMap::NOTHING`]).
    #[inline(always)]
    pub unsafe fn change(&self, grain: usize, from: u8, to: u8) -> bool {
        // SAFETY: as the caller promises.
        let byte = unsafe { self.byte(grain) };
        if byte.load(Ordering::Relaxed) != StateMap::value(grain, from) {
            return false;
        }
        byte.store(StateMap::value(grain, to), Ordering::Relaxed);
        true
    }

    /// Says that nobody has an object any more, without looking.
    ///
    /// # Safety
    /// As for [`StateMap::change`], and the caller owns the object.
    #[inline]
    pub unsafe fn clear(&self, grain: usize) {
        // SAFETY: as the caller promises.
        unsafe { self.byte(grain) }.store(0, Ordering::Relaxed);
    }

    /// Says that a sheaf or stack has an object, without looking.
    ///
    /// # Safety
    /// As for [`StateMap::clear`].
    #[inline]
    pub unsafe fn cache(&self, grain: usize) {
        // SAFETY: as the caller promises.
        unsafe { self.byte(grain) }.store(StateMap::value(grain, CACHED), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const BASE: usize = 7 << 30;

    #[test]
    fn an_interior_pointer_never_meets_a_state() {
        let mut tables: Vec<Vec<u8>> = SHIFTS.iter().map(|shift| std::vec![0; (256 << 10) >> shift]).collect();
        let mut addresses = [0; 4];
        tables.iter_mut().enumerate().for_each(|(i, table)| addresses[i] = table.as_mut_ptr().expose_provenance());
        let maps = StateMap::all(addresses, BASE);
        for class in Class::all() {
            let map = &maps[class.index()];
            let objects = (128 << 10) / class.size();
            let grains = |object: usize| (BASE + object * class.size()) / GRAIN;
            // SAFETY: every offset lies in the tables made above.
            unsafe {
                (0..objects).for_each(|object| map.cache(grains(object)));
                (0..objects).for_each(|object| assert!(map.change(grains(object), CACHED, ALLOCATED)));
                for grain in BASE / GRAIN..grains(objects) {
                    let starts = (grain * GRAIN - BASE).is_multiple_of(class.size());
                    assert_eq!(map.is(grain, ALLOCATED), starts, "{class:?} at grain {grain}");
                }
                (0..objects).for_each(|object| assert!(map.change(grains(object), ALLOCATED, CACHED)));
                (0..objects).for_each(|object| assert!(!map.change(grains(object), ALLOCATED, CACHED)));
                (0..objects).for_each(|object| map.clear(grains(object)));
            }
            assert!(tables.iter().flatten().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn nothing_is_in_no_state() {
        // SAFETY: any offset will do.
        assert!(unsafe { !StateMap::NOTHING.change(usize::MAX >> 5, ALLOCATED, CACHED) });
    }
}
