//! fflush in programs of musl, whose flush of all streams excludes a fork.
//!
//! `fflush(NULL)` of musl holds the lock of the list of streams, while it waits for one stream
//! after the other. `fork` takes that lock after the fork handlers, which have stopped all
//! allocations. A thread that holds a stream and needs memory would stop all three for ever. So the
//! flush holds a [lock](neap_os::stdio_lock), which the fork handler takes before it stops
//! allocations.

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
