//! jemalloc's functions with flags, for programs in C that are linked with the system's and mix them with malloc's (a distribution's redis from 8 on).
//!
//! Sits between such programs and [`PROCESS`]: memory from one of two allocators that is handed to the other's `free` or `malloc_usable_size` would
//! end the process. Arenas and thread caches that flags name are those of the library, and mean nothing here: what a program drops by dropping its arena
//! stays. `mallctl` is not here: what it tells and sets is jemalloc's own, and who looks for all of these to find out whether jemalloc is malloc is told
//! that it is not. Nothing is done for C++, whose `operator new` jemalloc has, too, without malloc.
//! Source: jemalloc(3), "Non-standard API".

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use neap::process::PROCESS;

/// `MALLOCX_ZERO`: bytes that are new are zero, of the real size.
const ZERO: c_int = 1 << 6;

/// `MALLOCX_ALIGN`: the low six bits are the alignment's logarithm.
fn align(flags: c_int) -> usize {
    1 << (flags & (ZERO - 1))
}

/// Memory of `size` bytes as `flags` want it, or null.
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

/// Makes memory at least `size` bytes large, moving it if need be; null, and all is as it was, where there is no memory for that.
///
/// # Safety
/// As for `realloc` in C, but never null.
#[unsafe(no_mangle)]
unsafe extern "C" fn rallocx(memory: *mut c_void, size: usize, flags: c_int) -> *mut c_void {
    let align = align(flags);
    let (before, after) = (PROCESS.usable_size(memory.cast()), PROCESS.usable_size_of(size, align));
    if after == 0 {
        return null_mut();
    }
    // SAFETY: as the caller promises; memory that moves is as large as is copied.
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

/// How large memory is that was to become larger or smaller where it is, which it never does.
#[unsafe(no_mangle)]
extern "C" fn xallocx(memory: *mut c_void, _size: usize, _extra: usize, _flags: c_int) -> usize {
    PROCESS.usable_size(memory.cast())
}

/// How large memory really is.
#[unsafe(no_mangle)]
extern "C" fn sallocx(memory: *const c_void, _flags: c_int) -> usize {
    PROCESS.usable_size(memory.cast())
}

/// How large memory of `size` bytes would be; 0 where that is refused outright.
#[unsafe(no_mangle)]
extern "C" fn nallocx(size: usize, flags: c_int) -> usize {
    PROCESS.usable_size_of(size, align(flags))
}

/// Frees memory.
///
/// # Safety
/// As for `free` in C, but never null.
#[unsafe(no_mangle)]
unsafe extern "C" fn dallocx(memory: *mut c_void, _flags: c_int) {
    // SAFETY: as the caller promises.
    unsafe { PROCESS.free(memory.cast()) }
}

/// Frees memory that was allocated with `size`.
///
/// # Safety
/// As for `free` in C, but never null.
#[unsafe(no_mangle)]
unsafe extern "C" fn sdallocx(memory: *mut c_void, _size: usize, _flags: c_int) {
    // SAFETY: as the caller promises.
    unsafe { PROCESS.free(memory.cast()) }
}
