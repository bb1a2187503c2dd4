//! Registers fork handlers, in any C library.
//!
//! glibc's `pthread_atfork` is not in its shared object. Each library that uses it gets a copy,
//! which calls `__register_atfork` through a linkage table without unwind information. A preload
//! library with such a copy does not start in a program of another C library. Both names are weak
//! here, and are called if they exist. A static program has `__register_atfork` if it has `fork`,
//! which needs that part of the C library. Without it no handler ever runs.

/// A fork handler.
pub type Handler = extern "C" fn();

/// Registers fork handlers as `pthread_atfork` does. Returns an error number, or 0. A program that
/// cannot fork returns 0, too. Handlers stay registered for ever.
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
        // SAFETY: glibc's function of this name has this type. Null: no library whose unloading
        // removes the handlers.
        return unsafe { transmute::<usize, Gnu>(gnu)(prepare, parent, child, null()) };
    }
    match crate::weak_variable!("pthread_atfork", address) {
        0 => 0,
        // SAFETY: POSIX's function of this name has this type.
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
