//! C functions over [`PerCpuCounter`].

use crate::error::wait;
use crate::object::{Kind, Object};
use core::ffi::c_int;
use neap::percpu::{Owner, PerCpuCounter};

/// `neap_counter`.
pub(crate) type Counter = Object<PerCpuCounter>;

impl Kind for PerCpuCounter {
    const MARK: u64 = u64::from_ne_bytes(*b"neapCntr");
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_counter_init(
    counter: *mut Counter,
    owner: u64,
    batch: i64,
    wait_ns: i64,
) -> c_int {
    let make = || Ok(PerCpuCounter::of(Owner::from_bits(owner), batch, wait(wait_ns)?)?);
    // SAFETY: by the header's contract, `counter` is null, misaligned, or memory of the object's
    // size that no other thread uses during the call.
    unsafe { Object::make(counter, make) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_counter_destroy(counter: *mut Counter) -> c_int {
    // SAFETY: by the header's contract, `counter` is null, misaligned, or an object that no other
    // thread uses any more.
    unsafe { Object::destroy(counter) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_counter_add(counter: *const Counter, value: i64) {
    // SAFETY: by the header's contract, `counter` is null, misaligned, or an object that no thread
    // destroys during the call.
    if let Some(counter) = unsafe { Object::value(counter) } {
        counter.add(value);
    }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_counter_approximate(counter: *const Counter) -> i64 {
    // SAFETY: by the header's contract, `counter` is null, misaligned, or an object that no thread
    // destroys during the call.
    unsafe { Object::value(counter) }.map_or(0, |counter| counter.approximate())
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_counter_exact(counter: *const Counter) -> i64 {
    // SAFETY: by the header's contract, `counter` is null, misaligned, or an object that no thread
    // destroys during the call.
    unsafe { Object::value(counter) }.map_or(0, |counter| counter.exact())
}
