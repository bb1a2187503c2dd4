//! One byte per object, outside the object: allocated, cached, or neither.
//!
//! Sits between `malloc`/`free` and the state tables of the arena. The byte is what catches a double free, the free of an
//! interior pointer, and an object that would be handed out twice, before anything is harmed; memory that a program
//! overran is never trusted for it.
//!
//! A table has one byte per 2^s bytes of the arena (s from [`Class::state_shift`]). The byte of an object is that of its
//! first byte; it holds the state in its two upper bits and, in the others, where in those 2^s bytes the object starts,
//! in grains of 16. So a pointer into the middle of an object meets 0 or another position:
//!
//! | byte | meaning |
//! |---|---|
//! | 0 | no object starts here that anyone has: in a slab's bitmap, or no slab |
//! | 0x40 + position | in a sheaf |
//! | 0x80 + position | the program has it |
//!
//! Accesses are relaxed and not exchanges: two threads that free one object at the very same moment may both see it
//! allocated. It is then in two cells of sheaves, and the second of the two pops finds a byte that is not "cached".

use crate::size_class::{CLASSES, Class, GRAIN};
use core::sync::atomic::{AtomicU8, Ordering};

/// The program has the object.
pub const ALLOCATED: u8 = 0x80;
/// A sheaf has the object.
pub const CACHED: u8 = 0x40;

/// The shifts of the tables there are.
pub const SHIFTS: [u8; 4] = [4, 5, 6, 10];

/// Which of [`SHIFTS`] a class uses.
pub fn table_of(class: Class) -> usize {
    SHIFTS.iter().position(|&shift| shift == class.state_shift()).unwrap_or(0)
}

/// Where the state bytes of one class are: 16 bytes, read by every malloc and free.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub struct StateMap {
    table: *const AtomicU8,
    /// Grains of 16 bytes to a state byte, as a power of two.
    shift: u8,
    mask: u8,
}

// SAFETY: the table is an array of atomics that lives as long as the arena.
unsafe impl Sync for StateMap {}
// SAFETY: as above.
unsafe impl Send for StateMap {}

/// A byte that no state equals.
static NOTHING: AtomicU8 = AtomicU8::new(0);

impl StateMap {
    /// A map that every offset leads to the byte 0 with: nothing is allocated, nothing cached.
    pub const NOTHING: StateMap = StateMap { table: &raw const NOTHING, shift: 63, mask: 0 };

    /// The maps of all classes over the tables at these addresses, in the order of [`SHIFTS`].
    pub fn all(tables: [usize; SHIFTS.len()]) -> [StateMap; CLASSES] {
        let mut maps = [StateMap::NOTHING; CLASSES];
        for class in Class::all() {
            let shift = class.state_shift() - GRAIN.trailing_zeros() as u8;
            let table = core::ptr::with_exposed_provenance(tables[table_of(class)]);
            maps[class.index()] = StateMap { table, shift, mask: ((1_u32 << shift) - 1) as u8 };
        }
        maps
    }

    /// The byte of an object and the position to combine with a state, for an object `grains` × 16 bytes from the base.
    ///
    /// # Safety
    /// The offset lies in the mapped part of the arena (anything will do for [`StateMap::NOTHING`]).
    #[inline(always)]
    pub unsafe fn byte<'a>(&self, grains: usize) -> (&'a AtomicU8, u8) {
        // SAFETY: the table has a byte for every mapped part of the arena.
        (unsafe { &*self.table.add(grains >> self.shift) }, grains as u8 & self.mask)
    }

    /// Moves an object from one state to another (0 for neither) if it is in the first.
    ///
    /// # Safety
    /// As for [`StateMap::byte`].
    #[inline(always)]
    pub unsafe fn change(&self, grains: usize, from: u8, to: u8) -> bool {
        // SAFETY: as the caller promises.
        let (byte, position) = unsafe { self.byte(grains) };
        if byte.load(Ordering::Relaxed) != from | position {
            return false;
        }
        byte.store(to | position, Ordering::Relaxed);
        true
    }

    /// Writes a state without looking (0 clears the byte).
    ///
    /// # Safety
    /// As for [`StateMap::byte`], and the caller owns the object.
    #[inline]
    pub unsafe fn set(&self, grains: usize, state: u8) {
        // SAFETY: as the caller promises.
        let (byte, position) = unsafe { self.byte(grains) };
        byte.store(if state == 0 { 0 } else { state | position }, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn an_interior_pointer_never_meets_a_state() {
        let mut tables: Vec<Vec<u8>> = SHIFTS.iter().map(|shift| std::vec![0; (256 << 10) >> shift]).collect();
        let mut addresses = [0; 4];
        tables.iter_mut().enumerate().for_each(|(i, table)| addresses[i] = table.as_mut_ptr().expose_provenance());
        let maps = StateMap::all(addresses);
        for class in Class::all() {
            let map = &maps[class.index()];
            let objects = (128 << 10) / class.size();
            let grains = |object: usize| object * class.size() / GRAIN;
            // SAFETY: every offset lies in the tables made above.
            unsafe {
                (0..objects).for_each(|object| map.set(grains(object), ALLOCATED));
                for offset in 0..grains(objects) {
                    let starts = offset * GRAIN % class.size() == 0;
                    assert_eq!(map.change(offset, ALLOCATED, ALLOCATED), starts, "{class:?} at grain {offset}");
                }
                (0..objects).for_each(|object| assert!(map.change(grains(object), ALLOCATED, CACHED)));
                (0..objects).for_each(|object| assert!(!map.change(grains(object), ALLOCATED, CACHED)));
                (0..objects).for_each(|object| map.set(grains(object), 0));
            }
            assert!(tables.iter().flatten().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn nothing_is_in_no_state() {
        // SAFETY: any offset will do.
        assert!(unsafe { !StateMap::NOTHING.change(usize::MAX >> 4, ALLOCATED, CACHED) });
    }
}
