//! Functions of the dynamic linker and the C library, by name.
//!
//! # Design
//!
//! 1. This module refers to `dlsym` by a weak symbol. glibc from 2.34 on and musl have it in the C
//!    library.
//! 2. An older glibc has `dlsym` in libdl, which some programs do not load. The C library of such a
//!    glibc has `__libc_dlopen_mode` and `__libc_dlsym` for its own use. This module opens libdl by
//!    these two functions. Shared objects of glibc from 2.34 on do not have them.
//! 3. A static program may have the two functions, too. They would load a second C library, in
//!    which the program's threads are not registered. Therefore this module calls them only if the
//!    symbol `_rtld_global` exists, which is part of the dynamic linker.
//!
//! # Locking
//!
//! Every function takes the dynamic linker's lock and may allocate. [`dlsym`] does neither where
//! the C library has `dlsym`.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::transmute;
use core::ptr::{null_mut, without_provenance_mut};

/// Type of dlsym(3).
pub type Find = extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// Type of dlopen(3).
type Open = extern "C" fn(*const c_char, c_int) -> *mut c_void;

/// `RTLD_NEXT`: the libraries that follow the caller's library in the search order.
pub const NEXT: *mut c_void = without_provenance_mut(usize::MAX);

/// `RTLD_LAZY | RTLD_NOLOAD`
const LAZY_IF_LOADED: c_int = 1 | 4;

/// The dynamic linker's `dlsym`. `None` if there is none, as in some static programs.
pub fn dlsym() -> Option<Find> {
    let found = match crate::weak_variable!("dlsym", address) {
        0 => of_libdl(c"dlsym").expose_provenance(),
        found => found,
    };
    // SAFETY: the dynamic linker's function of this name has this type.
    (found != 0).then(|| unsafe { transmute::<usize, Find>(found) })
}

/// The address of a function of libdl; null if it is not found. glibc from 2.34 on and musl have no
/// separate libdl.
#[cold]
pub fn of_libdl(name: &CStr) -> *mut c_void {
    /// `RTLD_LAZY`, with the mark of a caller inside the C library.
    const LAZY_INSIDE: c_int = 1 | c_int::MIN;
    let (open, find) =
        (crate::weak_variable!("__libc_dlopen_mode", address), crate::weak_variable!("__libc_dlsym", address));
    if open == 0 || find == 0 || crate::weak_variable!("_rtld_global", address) == 0 {
        return null_mut();
    }
    // SAFETY: in the versions of glibc that have functions of these names, they have these types.
    let (open, find) = unsafe { (transmute::<usize, Open>(open), transmute::<usize, Find>(find)) };
    let library = open(c"libdl.so.2".as_ptr(), LAZY_INSIDE);
    if library.is_null() { null_mut() } else { find(library, name.as_ptr()) }
}

/// The address of a function of the C library; 0 if there is none. Searches glibc's files first, so
/// that it does not find another library's function of that name. If they do not have the function,
/// searches the libraries that follow this one.
pub fn of_c_library(name: &CStr) -> usize {
    let Some(find) = dlsym() else { return 0 };
    // RTLD_NEXT, since the preload library has a `dlopen` of its own.
    let mut open = find(NEXT, c"dlopen".as_ptr());
    if open.is_null() {
        open = of_libdl(c"dlopen");
    }
    if !open.is_null() {
        // SAFETY: the dynamic linker's function of this name has this type.
        let open = unsafe { transmute::<*mut c_void, Open>(open) };
        // glibc before 2.34 has the functions for threads in libpthread.
        for file in [c"libc.so.6", c"libpthread.so.0"] {
            let library = open(file.as_ptr(), LAZY_IF_LOADED);
            let found = if library.is_null() { null_mut() } else { find(library, name.as_ptr()) };
            if !found.is_null() {
                return found.expose_provenance();
            }
        }
    }
    find(NEXT, name.as_ptr()).expose_provenance()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_the_c_library_are_found_by_name() {
        // With glibc before 2.34, the test program itself refers to the function, so that both
        // addresses are equal.
        assert_eq!(of_c_library(c"pthread_create"), libc::pthread_create as *const () as usize);
        assert_eq!(of_c_library(c"no_function_of_any_library"), 0);
        let dlsym = dlsym().unwrap();
        assert!(!dlsym(null_mut(), c"malloc".as_ptr()).is_null());
    }
}
