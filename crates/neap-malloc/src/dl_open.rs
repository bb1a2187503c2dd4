//! dlopen without RTLD_DEEPBIND.
//!
//! A library that is loaded with that flag uses the C library's malloc and free, since its own
//! dependencies come before preloaded libraries. Memory that it exchanges with the program then
//! meets the wrong `free`, as with PHP's extensions. Without the flag the library uses this one's
//! malloc.
//!
//! The C library's own dlopen learns its caller from its return address, for the run path and the
//! namespace. So this dlopen jumps to the C library's, with an unchanged stack.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};
use neap_os::dynamic_linker;

/// `RTLD_DEEPBIND` of the GNU C library; musl ignores it.
const DEEPBIND: c_int = 8;

/// dlopen(3) without `RTLD_DEEPBIND`.
#[unsafe(no_mangle)]
#[unsafe(naked)]
extern "C" fn dlopen(_file: *const c_char, _flags: c_int) -> *mut c_void {
    filtered!(!DEEPBIND, next_dlopen)
}

/// The C library's dlopen, or that of another library that wraps it.
extern "C" fn next_dlopen() -> *const c_void {
    // Not in `.bss`, which would take another mapping in every process that loads the library.
    #[unsafe(link_section = ".data")]
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    // Relaxed: the address of code that was loaded before.
    let mut found = FOUND.load(Ordering::Relaxed);
    if found.is_null() {
        found = next(c"dlopen");
        if found.is_null() {
            // A plugin may have loaded an old glibc's libdl in a scope of its own.
            found = dynamic_linker::of_libdl(c"dlopen");
        }
        FOUND.store(found, Ordering::Relaxed);
    }
    if found.is_null() { nothing as *const c_void } else { found }
}

extern "C" fn nothing(_file: *const c_char, _flags: c_int) -> *mut c_void {
    null_mut()
}

/// The next definition of a name after this library's own; null if there is none.
pub(crate) fn next(name: &CStr) -> *mut c_void {
    let Some(find) = dynamic_linker::dlsym() else { return null_mut() };
    let found = find(dynamic_linker::NEXT, name.as_ptr());
    // The call must not become a jump. Otherwise dlsym would find the return address of this
    // function's caller, and take the caller's library for the one that asks.
    core::hint::black_box(found)
}
