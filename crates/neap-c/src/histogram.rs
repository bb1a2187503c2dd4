//! C functions over [`PerCpuHistogram`].

use crate::error::{Error, wait};
use crate::object::{Kind, Object};
use core::ffi::{c_int, c_void};
use neap::percpu::{Owner, PerCpuHistogram};

/// `neap_histogram`.
pub(crate) type Histogram = Object<PerCpuHistogram>;

impl Kind for PerCpuHistogram {
    const MARK: u64 = u64::from_ne_bytes(*b"neapHist");
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_histogram_init(histogram: *mut Histogram, owner: u64, wait_ns: i64) -> c_int {
    let make = || Ok(PerCpuHistogram::of(Owner::from_bits(owner), wait(wait_ns)?)?);
    // SAFETY: by the header's contract, `histogram` is null, misaligned, or memory of the object's
    // size that no other thread uses during the call.
    unsafe { Object::make(histogram, make) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_histogram_destroy(histogram: *mut Histogram) -> c_int {
    // SAFETY: by the header's contract, `histogram` is null, misaligned, or an object that no other
    // thread uses any more.
    unsafe { Object::destroy(histogram) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_histogram_record(histogram: *const Histogram, value: u64) {
    // SAFETY: by the header's contract, `histogram` is null, misaligned, or an object that no
    // thread destroys during the call.
    if let Some(histogram) = unsafe { Object::value(histogram) } {
        histogram.record(value);
    }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_histogram_count(histogram: *const Histogram) -> u64 {
    // SAFETY: by the header's contract, `histogram` is null, misaligned, or an object that no
    // thread destroys during the call.
    unsafe { Object::value(histogram) }.map_or(0, |histogram| histogram.count())
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_histogram_quantile(
    histogram: *const Histogram,
    millionths: u32,
    value: *mut u64,
) -> bool {
    // SAFETY: by the header's contract, `histogram` is null, misaligned, or an object that no
    // thread destroys during the call.
    let found = unsafe { Object::value(histogram) }.and_then(|histogram| histogram.quantile(millionths));
    let Some(found) = found.filter(|_| !value.is_null() && value.is_aligned()) else { return false };
    // SAFETY: `value` is neither null nor misaligned, so it is writable by the header's contract.
    unsafe { value.write(found) };
    true
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_histogram_each(
    histogram: *const Histogram,
    each: Option<extern "C" fn(u64, u64, *mut c_void) -> c_int>,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: by the header's contract, `histogram` is null, misaligned, or an object that no
    // thread destroys during the call.
    let (Some(histogram), Some(each)) = (unsafe { Object::value(histogram) }, each) else {
        return Error::Argument as c_int;
    };
    let mut answer = 0;
    histogram.each(|lowest, count| {
        if answer == 0 {
            answer = each(lowest, count, argument);
        }
    });
    answer
}
