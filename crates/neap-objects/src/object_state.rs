//! State bytes: one byte for every object, outside the object. It says whether the object is
//! allocated, cached or neither, and whether it is charged.
//!
//! # Design
//!
//! The number of trailing zeros of an object's address selects the table that holds the object's
//! byte. Two objects never share a byte. The lookup is a count, a load and a shift, without a
//! branch.
//!
//! | address of the object | one byte covers | one cache line covers |
//! |---|---|---|
//! | odd multiple of 16 | 32 bytes | 2 KiB |
//! | odd multiple of 32 | 64 bytes | 4 KiB |
//! | multiple of 64, but not of 512 | 64 bytes | 4 KiB |
//! | multiple of 512, but not of 32 KiB | 512 bytes | 32 KiB |
//! | multiple of 32 KiB | 32 KiB | 2 MiB |
//!
//! The bytes detect a double free, the free of an interior pointer, and an object that a cache
//! would hand out twice. They lie outside the objects, so an overrun of an object does not change
//! its byte.
//!
//! | byte | meaning |
//! |---|---|
//! | 0 | in a slab's bitmap, or neap's own; or no object starts here |
//! | [`CACHED`] | in a sheaf or a stack |
//! | [`ALLOCATED`] | the program has it |
//! | [`ACCOUNTED`] | the program has it, and it is charged: see [`payers`](crate::payers) |
//! | [`PAID`] | in a sheaf or a stack, and still charged: see [`charged`](crate::charged) |
//!
//! If a profile follows an object that the program has, the bit [`SAMPLED`] of its byte is set in
//! addition. The fast path of `free` refuses such a byte, so the free takes the slow path.
//!
//! If two CPUs use neighbouring objects, the cache line with the objects' bytes moves between them.
//! So a cache line of a table ends where a part with one [home](crate::kind_map::KindEntry) ends,
//! or at most three bytes from there. This does not hold for the largest objects. Threads write to
//! a table only where slabs lie. When neap releases the memory of slabs, it also releases that of
//! their bytes, except in the last table, which has little. The free of a pointer outside slabs
//! only reads.
//!
//! # Concurrency
//!
//! Threads access the bytes by relaxed loads and stores, not by exchanges. Two threads that free
//! one object at the same moment may both succeed:
//!
//! | thread A | thread B |
//! |---|---|
//! | 1. reads "allocated" | |
//! | | 2. reads "allocated" |
//! | 3. writes "cached", pushes | |
//! | | 4. writes "cached", pushes |
//!
//! Two cells then hold the object. The thread that takes it from the second cell, by a pop or a
//! flush, finds a byte that is not "cached" and ends the process. The thread finds no error if the
//! object of the first cell was handed out and freed again by then.

use crate::size_class::{Class, GRAIN};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

/// The program has the object, and an owner pays for it.
pub const ACCOUNTED: u8 = 7;
/// The program has the object.
pub const ALLOCATED: u8 = 2;
/// A sheaf or a stack has the object.
pub const CACHED: u8 = 1;
/// A sheaf or a stack has the object, and an owner still pays for it.
pub const PAID: u8 = 4;
/// Bit that is set in addition to [`ALLOCATED`] or [`ACCOUNTED`] if a profile follows the object.
pub const SAMPLED: u8 = 16;

/// Number of tables.
pub const TABLES: usize = 5;

/// Binary logarithm of the bytes of arena that a byte of the table covers, by table.
pub const SHIFTS: [u8; TABLES] = [6, 6, 5, 9, 15];

/// The table with most memory. It has the bytes of most small objects.
pub const COMMON: usize = 0;

/// Distance from the byte of address 0 to the address in a word of [`States`], in bytes.
pub(crate) const BEHIND: usize = SHIFTS[COMMON] as usize;

/// Unused bytes in front of the first byte of each table. They put the table's shift into the low
/// bits of its word; 0 for the common shift.
pub(crate) const LEADS: [u8; TABLES] = {
    let (mut leads, mut table) = ([0; TABLES], 0);
    while table < TABLES {
        leads[table] = (SHIFTS[table] + SHIFT_BITS - BEHIND as u8) % SHIFT_BITS;
        table += 1;
    }
    leads
};

/// A processor takes shifts modulo this number.
const SHIFT_BITS: u8 = usize::BITS as u8;

/// Number of possible counts of trailing zeros. Null has 64; no address of an arena has more than
/// 47.
const POWERS: usize = 65;

/// The table that has the bytes of objects at odd multiples of 2^`power`; `power` is at least 4.
const fn table_of(power: usize) -> usize {
    match power {
        4 => 2,
        5 => 1,
        6..=8 => COMMON,
        9..=14 => 3,
        _ => 4,
    }
}

/// The tables that have bytes of a class's objects. Slabs start at page boundaries.
pub fn tables_of(class: Class) -> impl Iterator<Item = usize> {
    let of_class = ALIKE[class.size().trailing_zeros() as usize];
    (0..TABLES).filter(move |table| of_class >> table & 1 != 0)
}

/// For each power of two, a bit for each table with bytes of its multiples.
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

/// The byte of the addresses that are not multiples of a grain, and of null. No object starts
/// there, so the byte that threads read is always 0. It is not in `.bss`, which would take another
/// mapping in every process that loads the library.
#[unsafe(link_section = ".data")]
static NOTHING: Nothing = Nothing([const { AtomicU8::new(0) }; SHIFT_BITS as usize]);

#[repr(align(64))]
struct Nothing([AtomicU8; SHIFT_BITS as usize]);

/// The state tables of an arena.
///
/// `origins` has a word for each number of trailing zeros of an address. The word is the address
/// that the byte of address 0 would have, plus `BEHIND`. So a lookup does not subtract the arena's
/// base. The word's low six bits are the shift from an address to the number of its byte; shift
/// instructions use no other bits. For this, tables begin some bytes (`LEADS`) into a cache line.
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

    /// The state tables of an arena at `base`. `tables` has the addresses of their first bytes.
    pub fn new(tables: [usize; TABLES], base: usize) -> States {
        let origin = |power: usize| {
            let (first, number, shift): (*mut AtomicU8, _, _) = if (GRAIN_POWER..usize::BITS as usize).contains(&power)
            {
                let table = table_of(power);
                (core::ptr::with_exposed_provenance_mut(tables[table]), base >> SHIFTS[table], SHIFTS[table])
            } else {
                // This shift turns every address of a program into 0.
                (NOTHING.0.as_ptr().cast_mut().wrapping_add(usize::BITS as usize - 1 - BEHIND), 0, SHIFT_BITS - 1)
            };
            let origin = first.wrapping_add(BEHIND).wrapping_sub(number);
            assert!(origin.addr() % usize::from(SHIFT_BITS) == usize::from(shift), "{power}: {origin:p}");
            AtomicPtr::new(origin)
        };
        States { origins: core::array::from_fn(origin) }
    }

    /// Copies the addresses of the tables from another value.
    pub fn copy(&self, from: &States) {
        let copy =
            |(to, from): (&AtomicPtr<_>, &AtomicPtr<_>)| to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        self.origins.iter().zip(&from.origins).for_each(copy);
    }

    /// The byte of an object that starts at `address`.
    ///
    /// # Safety
    /// `address` lies in the mapped part of the arena.
    #[inline(always)]
    pub(crate) unsafe fn byte(&self, address: usize) -> &AtomicU8 {
        let power = address.trailing_zeros() as usize;
        // SAFETY: `power` is at most 64, and `origins` has 65 words. The caller says that the
        // address lies in the mapped part of the arena. The table that the word leads to has
        // a byte for every address there. A word without a table leads to `NOTHING`.
        unsafe {
            let origin = self.origins.get_unchecked(power).load(Ordering::Relaxed);
            &*origin.wrapping_add(address.wrapping_shr(origin.addr() as u32)).wrapping_sub(BEHIND)
        }
    }

    /// Whether an object is in a state, sampled or not.
    ///
    /// # Safety
    /// `address` lies in the mapped part of the arena.
    #[inline]
    pub unsafe fn is(&self, address: usize, state: u8) -> bool {
        // SAFETY: the caller says that the address lies in the mapped part of the arena.
        unsafe { self.byte(address) }.load(Ordering::Relaxed) & !SAMPLED == state
    }

    /// Marks as sampled an object that the program has.
    ///
    /// # Safety
    /// `address` lies in the mapped part of the arena, and the object there was just handed out to
    /// the caller.
    pub unsafe fn mark_sampled(&self, address: usize) {
        // SAFETY: the caller says that the address lies in the mapped part of the arena.
        let byte = unsafe { self.byte(address) };
        byte.store(byte.load(Ordering::Relaxed) | SAMPLED, Ordering::Relaxed);
    }

    /// Makes a sampled object an ordinary one. Returns `false` and changes nothing if no sampled
    /// object starts at the address.
    ///
    /// # Safety
    /// `address` lies in the mapped part of the arena.
    pub unsafe fn end_sample(&self, address: usize) -> bool {
        // SAFETY: the caller says that the address lies in the mapped part of the arena.
        unsafe {
            self.change(address, ALLOCATED | SAMPLED, ALLOCATED) || self.change(address, ACCOUNTED | SAMPLED, ACCOUNTED)
        }
    }

    /// Moves an object from one state to another if it is in the first.
    ///
    /// # Safety
    /// `address` lies in the mapped part of the arena.
    #[inline(always)]
    pub unsafe fn change(&self, address: usize, from: u8, to: u8) -> bool {
        // SAFETY: the caller says that the address lies in the mapped part of the arena.
        let byte = unsafe { self.byte(address) };
        if byte.load(Ordering::Relaxed) != from {
            return false;
        }
        byte.store(to, Ordering::Relaxed);
        true
    }

    /// Marks as cached an object that the program has, and keeps its charge, as
    /// [`FastPath::free`](crate::fast_path::FastPath::free) does. Returns `false` and changes
    /// nothing if the program has no object there.
    ///
    /// # Safety
    /// `address` lies in the mapped part of the arena.
    #[inline]
    pub unsafe fn release(&self, address: usize) -> bool {
        // SAFETY: the caller says that the address lies in the mapped part of the arena.
        unsafe { self.change(address, ALLOCATED, CACHED) || self.change(address, ACCOUNTED, PAID) }
    }

    /// Writes a state without a check. State 0 puts the object into its slab's bitmap.
    ///
    /// # Safety
    /// `address` lies in the mapped part of the arena, and the object there is the caller's.
    #[inline]
    pub unsafe fn set(&self, address: usize, state: u8) {
        // SAFETY: the caller says that the address lies in the mapped part of the arena.
        unsafe { self.byte(address) }.store(state, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const BASE: usize = 7 << 30;
    const BYTES: usize = 128 << 10;

    /// Tables for `BYTES` of arena at `BASE`, and the words that lead to them.
    fn opened() -> ([Vec<AtomicU8>; TABLES], States) {
        let table = |table: usize| {
            let bytes = usize::from(LEADS[table]) + (BYTES >> SHIFTS[table]);
            (0..bytes + usize::from(SHIFT_BITS)).map(|_| AtomicU8::new(0)).collect::<Vec<_>>()
        };
        let tables = core::array::from_fn(table);
        // The first byte of a table: a cache line's start and the lead.
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
        // SAFETY: every start lies in the range that the tables are for.
        let byte = |at: usize| core::ptr::from_ref(unsafe { states.byte(at) });
        let starts = (BASE..BASE + BYTES).step_by(GRAIN);
        let mut found: Vec<_> = starts.clone().map(byte).collect();
        assert!(found.iter().all(|byte| tables.iter().any(|table| table.as_ptr_range().contains(byte))));
        // SAFETY: null has the byte of addresses off a grain.
        assert!(unsafe { states.is(0, 0) } && !found.contains(&byte(0)), "and null has none of theirs");
        found.sort_unstable();
        found.dedup();
        assert_eq!(found.len(), starts.count());
    }

    #[test]
    fn sampled_object_is_not_released_before_its_sample_ends() {
        let (_tables, states) = opened();
        for (held, freed) in [(ALLOCATED, CACHED), (ACCOUNTED, PAID)] {
            // SAFETY: the address lies in the range that the tables are for.
            unsafe {
                states.set(BASE, held);
                assert!(!states.end_sample(BASE));
                states.mark_sampled(BASE);
                assert!(states.is(BASE, held) && !states.release(BASE));
                assert!(states.end_sample(BASE) && !states.end_sample(BASE), "once");
                assert!(states.release(BASE) && states.is(BASE, freed));
            }
        }
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
            // SAFETY: every object lies in the range that the tables are for.
            (0..objects).for_each(|object| unsafe { states.set(at(object), 0) });
            assert!(tables.iter().flatten().all(|byte| byte.load(Ordering::Relaxed) == 0));
        }
    }
}
