//! Registers fork handlers, in any C library.
//!
//! glibc's `pthread_atfork` is not in its shared library. Each library that uses the function gets
//! a copy, which calls `__register_atfork` through a linkage table without unwind information. A
//! preload library with such a copy does not start in a program of another C library. Therefore
//! this module refers to both functions by weak symbols, and calls one that exists. A static
//! program that has `fork` also has `__register_atfork`, which is in a part of the C library that
//! `fork` needs. A program with neither function cannot fork.

/// A fork handler.
pub type Handler = extern "C" fn();

/// Registers fork handlers as `pthread_atfork` does. Returns 0, or an error number. In a program
/// that cannot fork, registers nothing and returns 0. Handlers stay registered for ever.
///
/// # Safety
/// The handlers are functions of code that is never unloaded.
#[inline(always)]
pub unsafe fn register(prepare: Handler, parent: Handler, child: Handler) -> i32 {
    // SAFETY: the caller promises that the handlers' code is never unloaded.
    unsafe { register_in(prepare, parent, child) }
}

#[cfg(not(all(target_env = "musl", target_feature = "crt-static")))]
#[inline(always)]
unsafe fn register_in(prepare: Handler, parent: Handler, child: Handler) -> i32 {
    use core::ffi::c_void;
    use core::mem::transmute;
    use core::ptr::null;

    type Gnu = extern "C" fn(Handler, Handler, Handler, *const c_void) -> i32;
    type Posix = extern "C" fn(Handler, Handler, Handler) -> i32;
    let gnu = crate::weak_variable!("__register_atfork", address);
    if gnu != 0 {
        // SAFETY: glibc's `__register_atfork` has the type `Gnu`. The null pointer names no
        // library, so no handler is removed when a library is unloaded.
        return unsafe { transmute::<usize, Gnu>(gnu)(prepare, parent, child, null()) };
    }
    match crate::weak_variable!("pthread_atfork", address) {
        0 => 0,
        // SAFETY: `pthread_atfork` has the type `Posix`.
        posix => unsafe { transmute::<usize, Posix>(posix)(prepare, parent, child) },
    }
}

#[cfg(all(target_env = "musl", target_feature = "crt-static"))]
unsafe fn register_in(prepare: Handler, parent: Handler, child: Handler) -> i32 {
    unsafe extern "C" {
        safe fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> i32;
    }
    pthread_atfork(prepare, parent, child)
}
