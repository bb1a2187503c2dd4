//! jemalloc's functions with flags, for programs that are linked with it and mix them with malloc's (redis from 8 on).
//!
//! Sits between such programs and [`PROCESS`]: memory from one of two allocators that is handed to the other's `free` or `malloc_usable_size` would
//! end the process. Arenas and thread caches that flags name are those of the library, and mean nothing here. `mallctl` is not here: what it tells and
//! sets is jemalloc's own, and who looks for all of these to find out whether jemalloc is malloc is told that it is not.
//! Source: jemalloc(3), "Non-standard API".

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use neap::process::PROCESS;

/// `MALLOCX_ZERO`: bytes that are new are zero.
const ZERO: c_int = 1 << 6;

/// `MALLOCX_ALIGN`: the low six bits are the alignment's logarithm.
fn align(flags: c_int) -> usize {
    1 << (flags & (ZERO - 1))
}

/// Memory of `size` bytes as `flags` want it, or null.
#[unsafe(no_mangle)]
extern "C" fn mallocx(size: usize, flags: c_int) -> *mut c_void {
    let align = align(flags);
    let memory = if flags & ZERO == 0 {
        PROCESS.allocate_aligned(size, align)
    } else {
        PROCESS.allocate_zeroed_aligned(size, align)
    };
    memory.cast()
}

/// Makes memory at least `size` bytes large, moving it if need be; null, and all is as it was, where there is no memory for that.
///
/// # Safety
/// As for `realloc` in C, but never null.
#[unsafe(no_mangle)]
unsafe extern "C" fn rallocx(memory: *mut c_void, size: usize, flags: c_int) -> *mut c_void {
    let (align, memory, before) = (align(flags), memory.cast::<u8>(), PROCESS.usable_size(memory.cast()));
    // SAFETY: as the caller promises; memory that moves is as large as is copied and zeroed.
    unsafe {
        let resized = if memory.addr().is_multiple_of(align) {
            PROCESS.reallocate_aligned(memory, size, align)
        } else {
            let moved = PROCESS.allocate_aligned(size, align);
            if !moved.is_null() {
                moved.copy_from_nonoverlapping(memory, before.min(size));
                PROCESS.free(memory);
            }
            moved
        };
        if resized.is_null() {
            return null_mut();
        }
        if flags & ZERO != 0 {
            let after = PROCESS.usable_size(resized);
            resized.wrapping_add(before).write_bytes(0, after.saturating_sub(before));
        }
        resized.cast()
    }
}

/// How large memory is that was to become larger or smaller where it is: it stays as it is.
#[unsafe(no_mangle)]
extern "C" fn xallocx(memory: *mut c_void, _size: usize, _extra: usize, _flags: c_int) -> usize {
    PROCESS.usable_size(memory.cast())
}

/// How large memory really is.
#[unsafe(no_mangle)]
extern "C" fn sallocx(memory: *const c_void, _flags: c_int) -> usize {
    PROCESS.usable_size(memory.cast())
}

/// How large memory of `size` bytes would be; 0 where there cannot be any.
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
