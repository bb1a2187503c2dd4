//! pthread_create and thrd_create, which also start neap's thread.
//!
//! # Design
//!
//! neap starts no thread of its own in a process with one thread. When the program creates a
//! thread, neap may create its thread as well, since the C library allocates and takes its locks in
//! this call anyway. The next definition of the function does the work: the C library's, or that of
//! a library preloaded behind this one. neap's thread is created only after the next definition has
//! succeeded. So it never takes the place of the program's thread at a limit of threads.
//!
//! C11's function is defined here, too, since the C library's does not call pthread_create by its
//! name.

use crate::dl_open;
use core::ffi::{CStr, c_int, c_void};
use core::mem::transmute;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};
use neap::process::PROCESS;
use neap_os::dynamic_linker;

const EAGAIN: c_int = 11;
const THRD_ERROR: c_int = 2;

type Create = unsafe extern "C" fn(*mut c_void, *const c_void, *mut c_void, *mut c_void) -> c_int;
type Start = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_void) -> c_int;

/// Returns the next definition of a function, and keeps it in `found`; null if there is none.
pub(crate) fn next(name: &CStr, found: &AtomicPtr<c_void>) -> *mut c_void {
    // Relaxed: the address of code that was loaded before.
    let mut address = found.load(Ordering::Relaxed);
    if address.is_null() {
        address = dl_open::next(name);
        if address.is_null() {
            // A plugin may have loaded an old glibc's libpthread in a scope of its own.
            address = core::ptr::with_exposed_provenance_mut(dynamic_linker::of_c_library(name));
        }
        found.store(address, Ordering::Relaxed);
    }
    address
}

/// pthread_create(3).
///
/// # Safety
/// As for `pthread_create` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    thread: *mut c_void,
    attributes: *const c_void,
    body: *mut c_void,
    argument: *mut c_void,
) -> c_int {
    // Not in `.bss`, which would take another mapping in every process that loads the library.
    #[unsafe(link_section = ".data")]
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    let next = next(c"pthread_create", &FOUND);
    if next.is_null() {
        return EAGAIN;
    }
    // SAFETY: every definition of `pthread_create` has this type. The caller's arguments are valid
    // for it.
    let answer = unsafe { transmute::<*mut c_void, Create>(next)(thread, attributes, body, argument) };
    if answer == 0 {
        PROCESS.start_background();
    }
    answer
}

/// thrd_create(3).
///
/// # Safety
/// As for `thrd_create` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn thrd_create(thread: *mut c_void, body: *mut c_void, argument: *mut c_void) -> c_int {
    // Not in `.bss`, which would take another mapping in every process that loads the library.
    #[unsafe(link_section = ".data")]
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    let next = next(c"thrd_create", &FOUND);
    if next.is_null() {
        return THRD_ERROR;
    }
    // SAFETY: every definition of `thrd_create` has this type. The caller's arguments are valid for
    // it.
    let answer = unsafe { transmute::<*mut c_void, Start>(next)(thread, body, argument) };
    if answer == 0 {
        PROCESS.start_background();
    }
    answer
}
