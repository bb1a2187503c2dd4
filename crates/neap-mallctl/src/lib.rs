//! jemalloc's `mallctl` with neap's values, for programs that read their memory use by it.
//!
//! A program that finds `mallctl` takes its malloc for jemalloc. So neap exports the name only in
//! this separate library, for users that ask for it.
//!
//! # Design
//! The library has three functions over one table of names (`names.rs`). Values come from the
//! instance of neap in the process, through functions of `neap.h` that the dynamic linker finds
//! (`instance.rs`). This library has no instance of its own. It allocates nothing and writes no
//! errno.
//!
//! # Invariants
//! Values other than `epoch` and those of `prof` change only when a program writes to `epoch`, or
//! at the first call.
//!
//! Source: jemalloc(3), "Non-standard API" and "MALLCTL NAMESPACE".
#![no_std]

mod exchange;
mod instance;
mod names;
mod snapshot;

use crate::exchange::{Error, Exchange};
use crate::names::{Control, MOST_PARTS, Named};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::slice;

/// 0, or an error's number.
fn answer(outcome: Result<(), Error>) -> c_int {
    outcome.map_or_else(|error| error as c_int, |()| 0)
}

/// Finds a name. No name exists without neap in the process.
///
/// # Safety
/// `name` is null or a C string that does not change during the call.
unsafe fn find(name: *const c_char) -> Result<Named, Error> {
    if name.is_null() || !instance::is_there() {
        return Err(Error::NoSuchName);
    }
    // SAFETY: it is not null, so it is a string (the caller's promise).
    unsafe { CStr::from_ptr(name) }.to_str().ok().and_then(Named::parse).ok_or(Error::NoSuchName)
}

/// Reads the value of a name, writes it, or does its work.
fn control(named: &Named, exchange: &mut Exchange) -> Result<(), Error> {
    if let Some(index) = named.index()
        && !snapshot::has_arena(index)
    {
        return Err(Error::NoSuchName);
    }
    match named.control() {
        Control::Epoch => {
            if exchange.is_write_of::<u64>()? {
                snapshot::refresh();
            }
            exchange.read(snapshot::epoch())
        }
        Control::Text(text) => exchange.read_only(text.as_ptr()),
        Control::Size(value) => exchange.read_only(snapshot::size(value)),
        Control::Number(value) => exchange.read_only(snapshot::number(value)),
        Control::Flag(value) => exchange.read_only(u8::from(snapshot::number(value) != 0)),
        Control::Constant(value) => exchange.read_only(value),
        Control::Sampled => exchange.read_only(u8::from(snapshot::is_sampled())),
        Control::Dump => {
            if !snapshot::is_sampled() {
                return Err(Error::NoSuchName);
            }
            let file = exchange.written_address()?;
            // SAFETY: the name takes an address, so this is null or a C string (the promise of
            // `Exchange::new`).
            if unsafe { instance::dump_profile(file) } { Ok(()) } else { Err(Error::Failed) }
        }
        Control::Act(act) => exchange.nothing().map(|()| act()),
    }
}

/// Reads the value of `name` into `old`, if that is not null, and replaces it by `new`, if that is
/// not null. Returns 0 or a number of errno.h.
///
/// # Safety
/// `name` is null or a C string. `old` is null or has `*old_length` writable bytes, `old_length` is
/// null or writable, and `new` is null or has `new_length` bytes. For `prof.dump` these bytes are
/// null or the address of a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn mallctl(
    name: *const c_char,
    old: *mut c_void,
    old_length: *mut usize,
    new: *const c_void,
    new_length: usize,
) -> c_int {
    // SAFETY: the caller says that each pointer is null, or valid as `find` and `Exchange::new`
    // require.
    let (named, mut exchange) = unsafe { (find(name), Exchange::new(old, old_length, new, new_length)) };
    answer(named.and_then(|named| control(&named, &mut exchange)))
}

/// Translates a name into numbers for [`mallctlbymib`], as many as `*length` allows, and stores
/// their count there. Returns 0 or a number of errno.h.
///
/// # Safety
/// `name` is null or a C string. `length` is null or writable, and `mib` is null or has `*length`
/// writable words.
#[unsafe(no_mangle)]
unsafe extern "C" fn mallctlnametomib(name: *const c_char, mib: *mut usize, length: *mut usize) -> c_int {
    let translate = || {
        // SAFETY: the caller says that `name` is null or a C string.
        let named = unsafe { find(name) }?;
        if mib.is_null() || length.is_null() {
            return Err(Error::Invalid);
        }
        // SAFETY: neither is null, so the caller promises that `length` is writable and says how
        // many words `mib` has.
        unsafe {
            let parts = named.parts();
            *length = parts.len().min(*length);
            mib.copy_from_nonoverlapping(parts.as_ptr(), *length);
        }
        Ok(())
    };
    answer(translate())
}

/// Does the work of [`mallctl`] for a name that is given by its numbers.
///
/// # Safety
/// The conditions of [`mallctl`] hold for the other pointers. `mib` is null or has `length` words.
#[unsafe(no_mangle)]
unsafe extern "C" fn mallctlbymib(
    mib: *const usize,
    length: usize,
    old: *mut c_void,
    old_length: *mut usize,
    new: *const c_void,
    new_length: usize,
) -> c_int {
    if mib.is_null() || length > MOST_PARTS || !instance::is_there() {
        return Error::NoSuchName as c_int;
    }
    // SAFETY: `mib` is not null and has `length` words, and the other pointers are valid as for
    // `mallctl` (the caller's promise).
    let (mib, mut exchange) =
        unsafe { (slice::from_raw_parts(mib, length), Exchange::new(old, old_length, new, new_length)) };
    answer(Named::of_parts(mib).ok_or(Error::NoSuchName).and_then(|named| control(&named, &mut exchange)))
}
