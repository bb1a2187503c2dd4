//! libFuzzer with the targets of [`fuzz_targets`](crate::fuzz_targets). libFuzzer prefers inputs
//! that reach new code.
//!
//! `cargo xtask fuzz` builds the unit tests with the engine and with counters of all branches, and
//! runs the ignored test here. The variable `NEAP_FUZZ` names the target. A target aborts on a
//! failure. Then libFuzzer prints the input and writes it to a file.

use core::ffi::{CStr, c_char, c_int};
use std::cell::OnceCell;
use std::ffi::CString;

use crate::fuzz_targets::{Target, check, target};

unsafe extern "C" {
    /// Runs libFuzzer, which calls `target` with inputs. The arguments are libFuzzer's own.
    fn LLVMFuzzerRunDriver(
        count: *mut c_int,
        words: *mut *mut *mut c_char,
        target: unsafe extern "C" fn(*const u8, usize) -> c_int,
    ) -> c_int;
    fn LLVMFuzzerTestOneInput(data: *const u8, size: usize) -> c_int;
}

thread_local! {
    static TARGET: OnceCell<Target> = const { OnceCell::new() };
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    TARGET.with(|cell| check(cell.get_or_init(|| target(&std::env::var("NEAP_FUZZ").unwrap_or_default())), data));
});

/// The words of `NEAP_FUZZ_WORDS`, separated by blanks, are the engine's arguments.
#[test]
#[ignore = "`cargo xtask fuzz` runs it"]
fn fuzz() {
    let words = std::env::var("NEAP_FUZZ_WORDS").unwrap_or_default();
    let words = ["fuzz"].into_iter().chain(words.split_whitespace());
    let words: Vec<CString> = words.map(|word| CString::new(word).unwrap()).collect();
    let mut words: Vec<*mut c_char> = words.iter().map(|word| CStr::as_ptr(word).cast_mut()).collect();
    let mut count = words.len() as c_int;
    words.push(core::ptr::null_mut());
    // SAFETY: `count` is a live local. `words` holds pointers to `count` C strings that outlive the
    // call, and then a null. The engine calls the target in this thread.
    let status = unsafe { LLVMFuzzerRunDriver(&mut count, &mut words.as_mut_ptr(), LLVMFuzzerTestOneInput) };
    assert_eq!(status, 0);
}
