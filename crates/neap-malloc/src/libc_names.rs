//! The family under the GNU C library's own names: `__libc_malloc` and its relatives.
//!
//! Programs that call these names mostly do so from a `malloc` of their own. Each function behaves
//! as the plain one. None calls a plain name, since the dynamic linker may have chosen the
//! program's definition, which calls this one.
//!
//! Source: malloc.c of the GNU C library, the versions of its exported symbols.

use crate::family::{allocate, allocate_array, allocate_on_page, allocate_pages, allocate_rounded, resize};
use core::ffi::c_void;
use neap::process::PROCESS;

/// malloc(3).
#[unsafe(no_mangle)]
extern "C" fn __libc_malloc(size: usize) -> *mut c_void {
    allocate(size)
}

/// calloc(3).
#[unsafe(no_mangle)]
extern "C" fn __libc_calloc(count: usize, size: usize) -> *mut c_void {
    allocate_array(count, size)
}

/// realloc(3).
///
/// # Safety
/// As for `realloc` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn __libc_realloc(memory: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: `resize` needs what `realloc` in C needs, which the caller says holds.
    unsafe { resize(memory, size) }
}

/// free(3).
///
/// # Safety
/// As for `free` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn __libc_free(memory: *mut c_void) {
    // SAFETY: the caller passes null or memory of this family that is in use, as for `free` in C.
    unsafe { PROCESS.free(memory.cast()) }
}

/// memalign(3).
#[unsafe(no_mangle)]
extern "C" fn __libc_memalign(align: usize, size: usize) -> *mut c_void {
    allocate_rounded(align, size)
}

/// valloc(3).
#[unsafe(no_mangle)]
extern "C" fn __libc_valloc(size: usize) -> *mut c_void {
    allocate_on_page(size)
}

/// pvalloc(3).
#[unsafe(no_mangle)]
extern "C" fn __libc_pvalloc(size: usize) -> *mut c_void {
    allocate_pages(size)
}
