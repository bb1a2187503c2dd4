//! The instance of neap in the process, through functions of `neap.h`.
//!
//! The functions are weak symbols. So the library loads without neap in the process as well, and
//! then knows no name.

use core::ffi::{c_char, c_int};
use core::mem::transmute;
use neap_os::weak_variable;

/// Number of words of `neap_stats`.
pub(crate) const WORDS: usize = 18;

/// Whether neap is in the process.
pub(crate) fn is_there() -> bool {
    weak_variable!("neap_stats_get", address) != 0
}

/// Returns `neap_stats` as words; zeroes without neap.
pub(crate) fn stats() -> [u64; WORDS] {
    let (mut words, get) = ([0; WORDS], weak_variable!("neap_stats_get", address));
    if get != 0 {
        // SAFETY: `get` is the address of the function `neap_stats_get` of `neap.h`, which has this
        // signature. `words` has as many bytes as the size says.
        unsafe {
            transmute::<usize, unsafe extern "C" fn(*mut u64, usize) -> i32>(get)(
                words.as_mut_ptr(),
                size_of_val(&words),
            )
        };
    }
    words
}

/// Releases all free memory, of all arenas.
pub(crate) fn release() {
    call(weak_variable!("neap_release", address));
}

/// Drains idle caches and releases memory that rested, as neap's thread does every 250 ms.
pub(crate) fn tick() {
    call(weak_variable!("neap_tick", address));
}

/// Writes a heap profile to a file; null stands for a name by neap. Returns whether that succeeded.
///
/// # Safety
/// `file` is null or a C string that does not change during the call.
pub(crate) unsafe fn dump_profile(file: *const c_char) -> bool {
    let dump = weak_variable!("neap_profile_dump", address);
    // SAFETY: if it is not 0, `dump` is the address of `neap_profile_dump` of `neap.h`, which has
    // this signature. The caller promises what the function needs of `file`.
    dump != 0 && unsafe { transmute::<usize, unsafe extern "C" fn(*const c_char) -> c_int>(dump)(file) } == 0
}

/// Calls a function of `neap.h` without arguments, if it is there.
fn call(function: usize) {
    if function != 0 {
        // SAFETY: the callers pass the address of such a function.
        unsafe { transmute::<usize, extern "C" fn() -> bool>(function)() };
    }
}
