//! fflush for programs with musl: a flush of all streams and a fork exclude each other.
//!
//! musl's `fflush(NULL)` holds the lock of the list of streams while it waits for the lock of each
//! stream in turn. musl's `fork` takes the lock of the list after neap's fork handler has stopped
//! all allocations. If a third thread holds a stream's lock and needs memory, the three threads
//! deadlock. So `fflush(NULL)` here holds a [lock](neap_os::stdio_lock), which neap's fork handler
//! takes before it stops allocations.

use crate::threads::next;
use core::ffi::{c_int, c_void};
use core::mem::transmute;
use core::ptr::null_mut;
use core::sync::atomic::AtomicPtr;
use neap::process::streams;

const EOF: c_int = -1;

type Flush = unsafe extern "C" fn(*mut c_void) -> c_int;

/// fflush(3).
///
/// # Safety
/// As for `fflush` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn fflush(stream: *mut c_void) -> c_int {
    // Not in `.bss`, which would take another mapping in every process that loads the library.
    #[unsafe(link_section = ".data")]
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    let next = next(c"fflush", &FOUND);
    if next.is_null() {
        return EOF;
    }
    // SAFETY: every definition of `fflush` has this type.
    let flush = unsafe { transmute::<*mut c_void, Flush>(next) };
    if !stream.is_null() {
        // SAFETY: the caller's stream is one that `fflush` accepts.
        return unsafe { flush(stream) };
    }
    streams().lock();
    // SAFETY: null names all streams.
    let answer = unsafe { flush(stream) };
    streams().unlock();
    answer
}
