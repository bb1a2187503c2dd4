//! A byte for every object, outside the objects: allocated, cached, or neither; and whether somebody pays for it.
//!
//! Sits between `malloc`/`free` and the state tables of the arena. Which table has an object's byte says the largest power of two that its address is a
//! multiple of: it takes a count of zeros, no branch, and no two starts have one byte.
//!
//! | objects on | a byte for | a line for |
//! |---|---|---|
//! | odd multiples of 16 | 32 bytes | 2 KiB |
//! | odd multiples of 32 | 64 bytes | 4 KiB |
//! | multiples of 64, and no more than 256 | 64 bytes | 4 KiB |
//! | multiples of 512, and no more than 16 KiB | 512 bytes | 32 KiB |
//! | multiples of 32 KiB | 32 KiB | 2 MiB |
//!
//! It is what catches a double free, the free of an interior pointer, and an object that would be handed out
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
//! The more objects have their bytes in a line the more are found there that a processor has, but CPUs that use objects side by side take lines from each
//! other. So lines end where [homes](crate::hot::KindEntry) do, or three bytes from there at most, but for those of the largest objects. The memory under the tables is written to only where
//! slabs lie, and goes back with theirs, but for the last table's, which has next to none; who frees anything else looks there.
//!
//! Accesses are relaxed and not exchanges: two threads that free one object at the very same moment may both see it
//! allocated. It is then in two cells of stacks, and who takes the second finds a byte that is not "cached", be it a pop or a cache that gives it
//! up; unless the first was handed out and freed again by then.

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

/// Tables.
pub const TABLES: usize = 5;

/// Bytes of the arena to a byte of each table, as a power of two.
pub const SHIFTS: [u8; TABLES] = [6, 6, 5, 9, 15];

/// The table that has most memory, with the bytes of most small objects.
pub const COMMON: usize = 0;

/// What the number of an object's byte is counted from lies so far behind the byte of address 0: see [`States`].
pub(crate) const BEHIND: usize = SHIFTS[COMMON] as usize;

/// Bytes in front of the first of each table, so that what says where it is has its shift in the low bits: none where the common shift is.
pub(crate) const LEADS: [u8; TABLES] = {
    let (mut leads, mut table) = ([0; TABLES], 0);
    while table < TABLES {
        leads[table] = (SHIFTS[table] + SHIFT_BITS - BEHIND as u8) % SHIFT_BITS;
        table += 1;
    }
    leads
};

/// A shift is a number modulo this.
const SHIFT_BITS: u8 = usize::BITS as u8;

/// Counts of zeros that an address may have: 64 has 0, and none of an arena has more than 47.
const POWERS: usize = 65;

/// The table that has the bytes of objects on odd multiples of 2^power, which is 4 at least.
const fn table_of(power: usize) -> usize {
    match power {
        4 => 2,
        5 => 1,
        6..=8 => COMMON,
        9..=14 => 3,
        _ => 4,
    }
}

/// The tables that have bytes of objects of a class, whose slabs start on pages.
pub fn tables_of(class: Class) -> impl Iterator<Item = usize> {
    let of_class = ALIKE[class.size().trailing_zeros() as usize];
    (0..TABLES).filter(move |table| of_class >> table & 1 != 0)
}

/// By power of two: a bit for each table that has bytes of its multiples.
const ALIKE: [u8; POWERS] = {
    let (mut tables, mut power) = ([0; POWERS], POWERS);
    while power > GRAIN_POWER {
        let beyond = if power < POWERS { tables[power] } else { 0 };
        power -= 1;
        tables[power] = beyond | 1 << table_of(power);
    }
    tables
};

const GRAIN_POWER: usize = GRAIN.trailing_zeros() as usize;

/// The one byte of what starts on no grain, and of null: no object. It is the only one of these that is looked at. Not in `.bss`: what lies there
/// has a mapping more in every process that loads the library.
#[unsafe(link_section = ".data")]
static NOTHING: Nothing = Nothing([const { AtomicU8::new(0) }; SHIFT_BITS as usize]);

#[repr(align(64))]
struct Nothing([AtomicU8; SHIFT_BITS as usize]);

/// The state tables of an arena.
///
/// For each count of zeros there is one word that says all: where the byte of address 0 is, [`BEHIND`] bytes before it, so that an address needs no
/// subtraction; and in its low six bits, of which the processor's shifts by a register take no more, how far an address is shifted to be the number of
/// its byte. So tables begin some [bytes](LEADS) into a line.
#[derive(Debug)]
#[repr(transparent)]
pub struct States {
    origins: [AtomicPtr<AtomicU8>; POWERS],
}

impl States {
    /// No tables.
    pub const fn none() -> States {
        States { origins: [const { AtomicPtr::new(null_mut()) }; POWERS] }
    }

    /// The tables whose first bytes are at these addresses, for an arena at `base`.
    pub fn new(tables: [usize; TABLES], base: usize) -> States {
        let origin = |power: usize| {
            let (first, number, shift): (*mut AtomicU8, _, _) = if (GRAIN_POWER..usize::BITS as usize).contains(&power)
            {
                let table = table_of(power);
                (core::ptr::with_exposed_provenance_mut(tables[table]), base >> SHIFTS[table], SHIFTS[table])
            } else {
                // Nothing is left of an address that is shifted so far.
                (NOTHING.0.as_ptr().cast_mut().wrapping_add(usize::BITS as usize - 1 - BEHIND), 0, SHIFT_BITS - 1)
            };
            let origin = first.wrapping_add(BEHIND).wrapping_sub(number);
            assert!(origin.addr() % usize::from(SHIFT_BITS) == usize::from(shift), "{power}: {origin:p}");
            AtomicPtr::new(origin)
        };
        States { origins: core::array::from_fn(origin) }
    }

    /// Makes these the same as others.
    pub fn copy(&self, from: &States) {
        let copy =
            |(to, from): (&AtomicPtr<_>, &AtomicPtr<_>)| to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        self.origins.iter().zip(&from.origins).for_each(copy);
    }

    /// The byte of an object that starts at `address`.
    ///
    /// # Safety
    /// As for [`States::change`].
    #[inline(always)]
    pub(crate) unsafe fn byte(&self, address: usize) -> &AtomicU8 {
        let power = address.trailing_zeros() as usize;
        // SAFETY: no count is larger, and each table has a byte for every mapped part of the arena.
        unsafe {
            let origin = self.origins.get_unchecked(power).load(Ordering::Relaxed);
            &*origin.wrapping_add(address.wrapping_shr(origin.addr() as u32)).wrapping_sub(BEHIND)
        }
    }

    /// Whether an object is in a state.
    ///
    /// # Safety
    /// As for [`States::change`].
    #[inline]
    pub unsafe fn is(&self, address: usize, state: u8) -> bool {
        // SAFETY: as the caller promises.
        unsafe { self.byte(address) }.load(Ordering::Relaxed) == state
    }

    /// Moves an object from one state to another if it is in the first.
    ///
    /// # Safety
    /// `address` lies in the mapped part of the arena.
    #[inline(always)]
    pub unsafe fn change(&self, address: usize, from: u8, to: u8) -> bool {
        // SAFETY: as the caller promises.
        let byte = unsafe { self.byte(address) };
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
    pub unsafe fn release(&self, address: usize) -> bool {
        // SAFETY: as the caller promises.
        unsafe { self.change(address, ALLOCATED, CACHED) || self.change(address, ACCOUNTED, PAID) }
    }

    /// Writes a state without looking; 0: nobody has the object, a slab's bitmap does.
    ///
    /// # Safety
    /// As for [`States::change`], and the caller owns the object.
    #[inline]
    pub unsafe fn set(&self, address: usize, state: u8) {
        // SAFETY: as the caller promises.
        unsafe { self.byte(address) }.store(state, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const BASE: usize = 7 << 30;
    const BYTES: usize = 128 << 10;

    /// Tables of so many bytes of arena, and what leads to them.
    fn opened() -> ([Vec<AtomicU8>; TABLES], States) {
        let table = |table: usize| {
            let bytes = usize::from(LEADS[table]) + (BYTES >> SHIFTS[table]);
            (0..bytes + usize::from(SHIFT_BITS)).map(|_| AtomicU8::new(0)).collect::<Vec<_>>()
        };
        let tables = core::array::from_fn(table);
        // Where a line begins, and behind that.
        let first = |table: usize| {
            tables[table].as_ptr().expose_provenance().next_multiple_of(SHIFT_BITS.into()) + usize::from(LEADS[table])
        };
        let states = States::none();
        states.copy(&States::new(core::array::from_fn(first), BASE));
        (tables, states)
    }

    #[test]
    fn no_two_starts_have_one_byte() {
        let (tables, states) = opened();
        // SAFETY: every start lies in what the tables are for.
        let byte = |at: usize| core::ptr::from_ref(unsafe { states.byte(at) });
        let starts = (BASE..BASE + BYTES).step_by(GRAIN);
        let mut found: Vec<_> = starts.clone().map(byte).collect();
        assert!(found.iter().all(|byte| tables.iter().any(|table| table.as_ptr_range().contains(byte))));
        // SAFETY: null has the byte of what starts nowhere.
        assert!(unsafe { states.is(0, 0) } && !found.contains(&byte(0)), "and null has none of theirs");
        found.sort_unstable();
        found.dedup();
        assert_eq!(found.len(), starts.count());
    }

    #[test]
    fn an_interior_pointer_never_meets_a_state() {
        let (tables, states) = opened();
        for class in Class::all() {
            let objects = BYTES / class.size();
            let at = |object: usize| BASE + object * class.size();
            // SAFETY: every offset lies in the tables made above.
            unsafe {
                (0..objects).for_each(|object| states.set(at(object), CACHED));
                (0..objects).for_each(|object| assert!(states.change(at(object), CACHED, ALLOCATED)));
                (0..objects).for_each(|object| assert!(!states.change(at(object), CACHED, ALLOCATED)));
                for (state, freed) in [(CACHED, None), (PAID, None), (ALLOCATED, Some(CACHED)), (ACCOUNTED, Some(PAID))]
                {
                    (0..objects).for_each(|object| states.set(at(object), state));
                    for somewhere in (BASE..at(objects)).step_by(8) {
                        let starts = (somewhere - BASE).is_multiple_of(class.size());
                        for held in [ALLOCATED, ACCOUNTED] {
                            let is = states.is(somewhere, held);
                            assert_eq!(is, starts && held == state, "{class:?} at {somewhere:#x}");
                        }
                        let given = states.release(somewhere);
                        assert_eq!(given, starts && freed.is_some(), "{class:?} at {somewhere:#x}");
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
            (0..objects).for_each(|object| unsafe { states.set(at(object), 0) });
            assert!(tables.iter().flatten().all(|byte| byte.load(Ordering::Relaxed) == 0));
        }
    }
}
