//! jemalloc's functions with flags, for C programs that are linked with the system's jemalloc and
//! mix these functions with malloc's (a distribution's redis from version 8 on).
//!
//! Without them, memory of one allocator would reach the other's `free` or `malloc_usable_size`,
//! which ends the process. Flags that name arenas or thread caches have no effect. If a program
//! frees memory by destroying its arena, that memory leaks.
//!
//! `mallctl` is not defined here: a program that checks for all these functions learns from this
//! that malloc is not jemalloc. The library `neap-mallctl` defines it, for users that load that
//! library. jemalloc's `operator new` bypasses malloc; it is not handled here.
//!
//! Source: jemalloc(3), "Non-standard API".

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use neap::NamedSize;
use neap::process::PROCESS;

/// `MALLOCX_ZERO`: new bytes are zero, up to the usable size.
const ZERO: c_int = 1 << 6;

/// `MALLOCX_ALIGN`: the low six bits are the binary logarithm of the alignment.
fn align(flags: c_int) -> usize {
    1 << (flags & (ZERO - 1))
}

/// Allocates `size` bytes with `flags`; null if there is no memory. errno does not change.
#[unsafe(no_mangle)]
extern "C" fn mallocx(size: usize, flags: c_int) -> *mut c_void {
    let align = align(flags);
    if flags & ZERO == 0 {
        return PROCESS.allocate_aligned(size, align).cast();
    }
    match PROCESS.usable_size_of(size, align) {
        0 => null_mut(),
        real => PROCESS.allocate_zeroed_aligned(real, align).cast(),
    }
}

/// Resizes memory to at least `size` bytes, and moves it if necessary. Returns null and changes
/// nothing if there is no memory.
///
/// # Safety
/// As for `realloc` in C, but `memory` is not null.
#[unsafe(no_mangle)]
unsafe extern "C" fn rallocx(memory: *mut c_void, size: usize, flags: c_int) -> *mut c_void {
    let align = align(flags);
    let (before, after) = (PROCESS.usable_size(memory.cast()), PROCESS.usable_size_of(size, align));
    if after == 0 {
        return null_mut();
    }
    // SAFETY: the caller passes memory of this family that is in use. Both blocks have at least
    // `before.min(after)` usable bytes.
    unsafe {
        if memory.addr().is_multiple_of(align) && (flags & ZERO == 0 || after <= before) {
            return PROCESS.reallocate_aligned(memory.cast(), after, align).cast();
        }
        let moved = mallocx(after, flags);
        if !moved.is_null() {
            moved.copy_from_nonoverlapping(memory, before.min(after));
            PROCESS.free(memory.cast());
        }
        moved
    }
}

/// Leaves memory as it is, since this library never resizes in place here. Returns its usable size.
#[unsafe(no_mangle)]
extern "C" fn xallocx(memory: *mut c_void, _size: usize, _extra: usize, _flags: c_int) -> usize {
    PROCESS.usable_size(memory.cast())
}

/// Returns the usable size of memory.
#[unsafe(no_mangle)]
extern "C" fn sallocx(memory: *const c_void, _flags: c_int) -> usize {
    PROCESS.usable_size(memory.cast())
}

/// Returns the usable size that an allocation of `size` bytes would have; 0 if it would be refused.
#[unsafe(no_mangle)]
extern "C" fn nallocx(size: usize, flags: c_int) -> usize {
    PROCESS.usable_size_of(size, align(flags))
}

/// Frees memory.
///
/// # Safety
/// As for `free` in C, but `memory` is not null.
#[unsafe(no_mangle)]
unsafe extern "C" fn dallocx(memory: *mut c_void, _flags: c_int) {
    // SAFETY: the caller passes memory of this family that is in use.
    unsafe { PROCESS.free(memory.cast()) }
}

/// Frees memory that was allocated with `size`.
///
/// # Safety
/// As for `free` in C, but `memory` is not null.
#[unsafe(no_mangle)]
unsafe extern "C" fn sdallocx(memory: *mut c_void, size: usize, _flags: c_int) {
    // SAFETY: the caller passes memory of this family that is in use.
    unsafe { PROCESS.free_named(memory.cast(), NamedSize::Within(size)) }
}
