//! Owners, allocations and their copies for C.
//!
//! C functions over [`neap::percpu`]. C programs name owners and allocations by numbers, and each
//! function checks the numbers that it gets.

use crate::error::{Error, answer, into, wait};
use crate::group::group;
use core::ffi::{c_int, c_uint, c_void};
use core::num::NonZeroU64;
use core::ptr::null_mut;
use neap::percpu::{self, Handle, Owner};

fn handle(data: u64) -> Option<Handle> {
    NonZeroU64::new(data).map(Handle::from_bits)
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_owner_open(owner: *mut u64) -> c_int {
    // SAFETY: by the header's contract, `owner` is null, misaligned or writable.
    unsafe { into(owner, || Ok(percpu::open_owner()?.to_bits())) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_owner_open_in(number: u64, owner: *mut u64) -> c_int {
    // SAFETY: by the header's contract, `owner` is null, misaligned or writable.
    unsafe { into(owner, || Ok(group(number)?.open_owner()?.to_bits())) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_owner_close(owner: u64, bytes: *mut usize) -> c_int {
    // SAFETY: by the header's contract, no thread uses the owner's allocations any more, or
    // allocates for it.
    let closed = unsafe { percpu::close_owner(Owner::from_bits(owner)) };
    if let Ok(freed) = closed
        && !bytes.is_null()
        && bytes.is_aligned()
    {
        // SAFETY: `bytes` is neither null nor misaligned, so it is writable by the header's
        // contract.
        unsafe { bytes.write(freed) };
    }
    answer(closed.map(|_| 0).map_err(Error::from))
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_percpu_alloc(
    data: *mut u64,
    owner: u64,
    size: usize,
    align: usize,
    wait_ns: i64,
) -> c_int {
    let allocate = || Ok(percpu::allocate(Owner::from_bits(owner), size, align, wait(wait_ns)?)?.to_bits().get());
    // SAFETY: by the header's contract, `data` is null, misaligned or writable.
    unsafe { into(data, allocate) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_percpu_free(data: u64) -> c_int {
    let Some(handle) = handle(data) else { return 0 };
    // SAFETY: by the header's contract, no thread uses the allocation any more.
    answer(unsafe { percpu::free(handle) }.map(|_| 0).map_err(Error::from))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_cpus() -> c_uint {
    percpu::cpus() as c_uint
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_cpu() -> c_uint {
    percpu::cpu() as c_uint
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_percpu_ptr(data: u64, cpu: c_uint) -> *mut c_void {
    let copy = handle(data).and_then(|handle| percpu::copy(handle, cpu as usize));
    copy.map_or(null_mut(), <*mut u8>::cast)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_percpu_this_cpu(data: u64) -> *mut c_void {
    neap_percpu_ptr(data, neap_cpu())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_percpu_each(
    data: u64,
    each: Option<extern "C" fn(*mut c_void, c_uint, *mut c_void) -> c_int>,
    argument: *mut c_void,
) -> c_int {
    let Some(each) = each else { return Error::Argument as c_int };
    if neap_percpu_ptr(data, 0).is_null() {
        return Error::Handle as c_int;
    }
    let answers = (0..neap_cpus()).map(|cpu| each(neap_percpu_ptr(data, cpu), cpu, argument));
    answers.into_iter().find(|&answer| answer != 0).unwrap_or(0)
}
