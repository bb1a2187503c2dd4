//! Reference counts for C.
//!
//! C functions over [`PerCpuRef`], with a callback for the last put. The callback may free the
//! memory of the reference, so this code does not access the reference afterwards.

use crate::error::{Error, answer, wait};
use crate::object::{Kind, Object};
use core::ffi::{c_int, c_void};
use neap::percpu::{Owner, PerCpuRef};

type Release = extern "C" fn(*mut Ref, *mut c_void);

/// A reference and the callback for its last put.
pub(crate) struct Told {
    count: PerCpuRef,
    release: Option<Release>,
    argument: *mut c_void,
}

/// `neap_ref`.
pub(crate) type Ref = Object<Told>;

impl Kind for Told {
    const MARK: u64 = u64::from_ne_bytes(*b"neapRefs");
}

/// Calls the callback after the last put.
///
/// # Safety
/// There is a value at `object`, and this is the only such call for it.
unsafe fn release(object: *mut Ref) {
    // SAFETY: the caller promises that there is a value at `object`.
    let told = unsafe { Object::value(object) }.and_then(|told| Some((told.release?, told.argument)));
    if let Some((release, argument)) = told {
        release(object, argument);
    }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_ref_init(
    object: *mut Ref,
    owner: u64,
    release: Option<Release>,
    argument: *mut c_void,
    wait_ns: i64,
) -> c_int {
    let make = || Ok(Told { count: PerCpuRef::of(Owner::from_bits(owner), wait(wait_ns)?)?, release, argument });
    // SAFETY: by the header's contract, `object` is null, misaligned, or memory of the object's
    // size that no other thread uses during the call.
    unsafe { Object::make(object, make) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_ref_destroy(object: *mut Ref) -> c_int {
    // SAFETY: by the header's contract, `object` is null, misaligned, or an object that no other
    // thread uses any more.
    unsafe { Object::destroy(object) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_ref_get(object: *const Ref) {
    // SAFETY: by the header's contract, `object` is null, misaligned, or an object that no thread
    // destroys during the call.
    if let Some(told) = unsafe { Object::value(object) } {
        told.count.get();
    }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_ref_try_get(object: *const Ref) -> bool {
    // SAFETY: by the header's contract, `object` is null, misaligned, or an object that no thread
    // destroys during the call.
    unsafe { Object::value(object) }.is_some_and(|told| told.count.try_get())
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_ref_put(object: *mut Ref) -> bool {
    // SAFETY: by the header's contract, `object` is null, misaligned, or an object that no thread
    // destroys during the call.
    let last = unsafe { Object::value(object) }.is_some_and(|told| told.count.put());
    if last {
        // SAFETY: exactly one put is the last, and there is a value until the callback destroys it.
        unsafe { release(object) };
    }
    last
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_ref_kill(object: *mut Ref) -> c_int {
    // SAFETY: by the header's contract, `object` is null, misaligned, or an object that no thread
    // destroys during the call.
    if unsafe { Object::value(object) }.is_none() {
        return Error::Argument as c_int;
    }
    // SAFETY: the array is one pointer, to an object with a value, for which the header's contract
    // holds.
    unsafe { neap_ref_kill_all(&raw const object, 1) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_ref_kill_all(objects: *const *mut Ref, count: usize) -> c_int {
    if count == 0 {
        return 0;
    }
    if objects.is_null() || !objects.is_aligned() || count > c_int::MAX as usize {
        return Error::Argument as c_int;
    }
    // SAFETY: the pointer is neither null nor misaligned, so by the header's contract it leads to
    // `count` pointers.
    let objects = unsafe { core::slice::from_raw_parts(objects, count) };
    // SAFETY: by the header's contract, each pointer is null, misaligned, or that of an object that
    // no thread destroys during the call.
    let counts = objects.iter().filter_map(|&object| unsafe { Object::value(object) }).map(|told: &Told| &told.count);
    let killed = PerCpuRef::close_all(counts);
    // If this call killed no reference, it puts none. An outer call, whose callback made this one,
    // puts those that it killed.
    if killed.is_ok_and(|killed| killed > 0) {
        for &object in objects {
            // SAFETY: as the header requires, `object` is null, misaligned, or an object that
            // exists until its last put. Earlier objects, which callbacks may have freed, are not
            // accessed again.
            if unsafe { Object::value(object) }.is_some_and(|told: &Told| told.count.put_first()) {
                // SAFETY: exactly one put is the last, and there is a value until the callback
                // destroys it.
                unsafe { release(object) };
            }
        }
    }
    answer(killed.map(|killed| killed as c_int).map_err(|_| Error::Fence))
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_ref_is_dead(object: *const Ref) -> bool {
    // SAFETY: by the header's contract, `object` is null, misaligned, or an object that no thread
    // destroys during the call.
    unsafe { Object::value(object) }.is_some_and(|told| told.count.is_dead())
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_ref_count(object: *const Ref) -> i64 {
    // SAFETY: by the header's contract, `object` is null, misaligned, or an object that no thread
    // destroys during the call.
    let references = unsafe { Object::value(object) }.and_then(|told| told.count.references());
    references.map_or(-1, |references| references as i64)
}
