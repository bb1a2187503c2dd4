//! The process's instance for C: its version, its numbers, and its upkeep.

use crate::error::{Error, answer, into};
use core::ffi::{CStr, c_char, c_int};
use neap::percpu;
use neap::process::PROCESS;

/// The library's version as a C string.
const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => c"",
};

/// `neap_usage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Usage {
    pub(crate) allocated_bytes: u64,
    pub(crate) populated_bytes: u64,
    pub(crate) empty_bytes: u64,
    pub(crate) reserve_bytes: u64,
    pub(crate) allocations: u64,
    pub(crate) owners: u64,
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_version() -> *const c_char {
    VERSION.as_ptr()
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_usage_get(usage: *mut Usage) -> c_int {
    let now = || {
        percpu::statistics().map_or(Usage::default(), |now| Usage {
            allocated_bytes: now.allocated_bytes as u64,
            populated_bytes: (now.populated * now.page) as u64,
            empty_bytes: ((now.empty + now.isolated_empty) * now.page) as u64,
            reserve_bytes: (now.reserve * now.page) as u64,
            allocations: now.allocations as u64,
            owners: now.owners as u64,
        })
    };
    // SAFETY: by the header's contract, `usage` is null, misaligned or writable.
    unsafe { into(usage, || Ok(now())) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_set(key: *const c_char, value: *const c_char) -> c_int {
    if key.is_null() || value.is_null() {
        return Error::Argument as c_int;
    }
    // SAFETY: neither is null, so the header's contract says that both are strings that nothing
    // changes during the call.
    let [key, value] = [key, value].map(|text| unsafe { CStr::from_ptr(text) }.to_str());
    let (Ok(key), Ok(value)) = (key, value) else { return Error::Argument as c_int };
    answer(PROCESS.set(key, value).map(|()| 0).map_err(Error::from))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_tick() -> bool {
    PROCESS.tick(neap_os::clock::coarse()).left
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_release() -> bool {
    PROCESS.release_all()
}
