//! The functions that make threads: the C library's, and neap's own thread besides the program's
//! first one.
//!
//! # Design
//! A process with one thread has no second one of neap's. Making a thread is the one call of the
//! program's in which neap may make one, too: the C library allocates and takes its locks there
//! anyway. The next definition of the function does the work: the C library's, or that of a library
//! which is preloaded behind this one. neap's thread is made when it succeeded, so it never takes
//! the place of the program's at a limit of threads.
//!
//! C11's function is here since the C library's does not call the other one by its name.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::transmute;
use core::ptr::{null_mut, without_provenance_mut};
use core::sync::atomic::{AtomicPtr, Ordering};
use neap::process::PROCESS;

const EAGAIN: c_int = 11;
const THRD_ERROR: c_int = 2;

type Create = unsafe extern "C" fn(*mut c_void, *const c_void, *mut c_void, *mut c_void) -> c_int;
type Start = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_void) -> c_int;

/// The next definition of a function, which `found` keeps; null if there is none.
fn next(name: &CStr, found: &AtomicPtr<c_void>) -> *mut c_void {
    const NEXT: *mut c_void = without_provenance_mut(usize::MAX); // RTLD_NEXT
    // Relaxed: code, which was there before.
    let known = found.load(Ordering::Relaxed);
    let find = chosen!("dlsym");
    if !known.is_null() || find == 0 {
        return known;
    }
    // SAFETY: the dynamic linker's function of this name has this type.
    let find = unsafe { transmute::<usize, extern "C" fn(*mut c_void, *const c_char) -> *mut c_void>(find) };
    // It looks behind the library of its caller, which is this one.
    let address = find(NEXT, name.as_ptr());
    found.store(address, Ordering::Relaxed);
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
    // Not in `.bss`: what lies there has a mapping more in every process that loads the library.
    #[unsafe(link_section = ".data")]
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    let next = next(c"pthread_create", &FOUND);
    if next.is_null() {
        return EAGAIN;
    }
    // SAFETY: every definition of `pthread_create` has this type; the caller promises what it asks
    // for.
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
    // As in `pthread_create`.
    #[unsafe(link_section = ".data")]
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    let next = next(c"thrd_create", &FOUND);
    if next.is_null() {
        return THRD_ERROR;
    }
    // SAFETY: every definition of `thrd_create` has this type; the caller promises what it asks
    // for.
    let answer = unsafe { transmute::<*mut c_void, Start>(next)(thread, body, argument) };
    if answer == 0 {
        PROCESS.start_background();
    }
    answer
}
