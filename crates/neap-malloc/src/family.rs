//! malloc, free and their relatives.
//!
//! Sits between C and [`PROCESS`]. Source: C17 7.22.3, POSIX.1-2024, malloc(3), posix_memalign(3), malloc_usable_size(3).

use core::ffi::{c_int, c_void};
use core::mem::transmute;
use core::ptr::null_mut;
use neap::process::PROCESS;

const EINVAL: c_int = 22;
const ENOMEM: c_int = 12;

unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
}

/// Hands on what an allocation answered; null sets errno to ENOMEM.
#[inline(always)]
fn answer(memory: *mut u8) -> *mut c_void {
    if memory.is_null() { refuse(ENOMEM) } else { memory.cast() }
}

#[cold]
fn refuse(error: c_int) -> *mut c_void {
    // SAFETY: the C library gives every thread an errno.
    unsafe { __errno_location().write(error) };
    null_mut()
}

fn page_size() -> usize {
    PROCESS.page_size()
}

/// malloc(3).
#[unsafe(no_mangle)]
extern "C" fn malloc(size: usize) -> *mut c_void {
    // A call at the very end: the fast path needs no frame on the stack.
    PROCESS.allocate_or(size, move || malloc_otherwise(size).cast()).cast()
}

#[inline(never)]
pub(crate) extern "C" fn malloc_otherwise(size: usize) -> *mut c_void {
    PROCESS.allocate_entered_or(size, move || malloc_slow(size).cast()).cast()
}

#[cold]
#[inline(never)]
extern "C" fn malloc_slow(size: usize) -> *mut c_void {
    answer(PROCESS.allocate_slow(size))
}

/// free(3). errno stays as it is.
///
/// # Safety
/// As for `free` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn free(memory: *mut c_void) {
    // SAFETY: as the caller promises.
    unsafe { PROCESS.free(memory.cast()) }
}

/// calloc(3).
#[unsafe(no_mangle)]
extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    allocate_array(count, size)
}

/// What calloc does. A call of `calloc` may reach the definition of another library; a call of this function does not.
#[inline(always)]
pub(crate) fn allocate_array(count: usize, size: usize) -> *mut c_void {
    count.checked_mul(size).map_or_else(|| refuse(ENOMEM), |bytes| answer(PROCESS.allocate_zeroed(bytes)))
}

/// realloc(3). A size of 0 frees, as in the GNU C library.
///
/// # Safety
/// As for `realloc` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn realloc(memory: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: the caller promises what `resize` asks for.
    unsafe { resize(memory, size) }
}

/// What realloc does, always by this library.
///
/// # Safety
/// As for `realloc` in C.
#[inline(always)]
pub(crate) unsafe fn resize(memory: *mut c_void, size: usize) -> *mut c_void {
    if size == 0 && !memory.is_null() {
        // SAFETY: as the caller promises.
        unsafe { PROCESS.free(memory.cast()) };
        return null_mut();
    }
    // SAFETY: as the caller promises.
    answer(unsafe { PROCESS.reallocate(memory.cast(), size) })
}

/// reallocarray(3), which calls the `realloc` that the dynamic linker chose, as the GNU C library's does.
///
/// A program that has its own malloc and no reallocarray passes memory of its own here.
///
/// # Safety
/// As for `realloc` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn reallocarray(memory: *mut c_void, count: usize, size: usize) -> *mut c_void {
    let Some(bytes) = count.checked_mul(size) else { return refuse(ENOMEM) };
    let realloc = chosen!("realloc");
    // SAFETY: every definition of `realloc` has this type, and this library has one, so the address is not 0. The caller promises what it asks for.
    unsafe { transmute::<usize, unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void>(realloc)(memory, bytes) }
}

/// cfree(3), which programs from before 2017 call.
///
/// # Safety
/// As for `free` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn cfree(memory: *mut c_void) {
    // SAFETY: as the caller promises.
    unsafe { PROCESS.free(memory.cast()) }
}

/// free_sized of C23.
///
/// # Safety
/// As for `free` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn free_sized(memory: *mut c_void, _size: usize) {
    // SAFETY: as the caller promises.
    unsafe { PROCESS.free(memory.cast()) }
}

/// free_aligned_sized of C23.
///
/// # Safety
/// As for `free` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn free_aligned_sized(memory: *mut c_void, _align: usize, _size: usize) {
    // SAFETY: as the caller promises.
    unsafe { PROCESS.free(memory.cast()) }
}

/// memalign(3): an alignment that is no power of two is rounded up to one, as in the GNU C library.
#[unsafe(no_mangle)]
extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    allocate_rounded(align, size)
}

/// What memalign does, always by this library.
#[inline(always)]
pub(crate) fn allocate_rounded(align: usize, size: usize) -> *mut c_void {
    match align.max(1).checked_next_power_of_two() {
        Some(align) => answer(PROCESS.allocate_aligned(size, align)),
        None => refuse(EINVAL),
    }
}

/// posix_memalign(3).
///
/// # Safety
/// `memory` may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn posix_memalign(memory: *mut *mut c_void, align: usize, size: usize) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<usize>()) {
        return EINVAL;
    }
    let allocated = PROCESS.allocate_aligned(size, align);
    if allocated.is_null() {
        return ENOMEM;
    }
    // SAFETY: as the caller promises.
    unsafe { memory.write(allocated.cast()) };
    0
}

/// aligned_alloc(3): any size, as C17 has it since its defect report 460.
#[unsafe(no_mangle)]
extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    if align.is_power_of_two() { answer(PROCESS.allocate_aligned(size, align)) } else { refuse(EINVAL) }
}

/// valloc(3).
#[unsafe(no_mangle)]
extern "C" fn valloc(size: usize) -> *mut c_void {
    allocate_on_page(size)
}

/// What valloc does, always by this library.
#[inline(always)]
pub(crate) fn allocate_on_page(size: usize) -> *mut c_void {
    answer(PROCESS.allocate_aligned(size, page_size()))
}

/// pvalloc(3): whole pages.
#[unsafe(no_mangle)]
extern "C" fn pvalloc(size: usize) -> *mut c_void {
    allocate_pages(size)
}

/// What pvalloc does, always by this library.
#[inline(always)]
pub(crate) fn allocate_pages(size: usize) -> *mut c_void {
    match size.max(1).checked_next_multiple_of(page_size()) {
        Some(size) => answer(PROCESS.allocate_aligned(size, page_size())),
        None => refuse(ENOMEM),
    }
}

/// malloc_usable_size(3).
#[unsafe(no_mangle)]
extern "C" fn malloc_usable_size(memory: *mut c_void) -> usize {
    PROCESS.usable_size(memory.cast())
}

/// malloc_trim(3): everything that is free goes back to the system; `pad` is not kept.
#[unsafe(no_mangle)]
extern "C" fn malloc_trim(_pad: usize) -> c_int {
    PROCESS.release_all().into()
}

/// mallopt(3): answers 1 where the value is what happens, 0 for everything else.
///
/// - `M_TRIM_THRESHOLD`: as long as at most so many bytes of pages are free, none go back by themselves; with -1 none ever do. `malloc_trim` gives them back.
/// - `M_MMAP_MAX`: 0, since no block is a mapping of its own.
/// - `M_ARENA_MAX`: any number of at least 1, since there is one heap for all threads.
#[unsafe(no_mangle)]
extern "C" fn mallopt(parameter: c_int, value: c_int) -> c_int {
    const M_TRIM_THRESHOLD: c_int = -1;
    const M_MMAP_MAX: c_int = -4;
    const M_ARENA_MAX: c_int = -8;
    let done = match parameter {
        // A negative number is one of the largest, as in the GNU C library.
        M_TRIM_THRESHOLD => PROCESS.keep_free(u64::try_from(value).unwrap_or(u64::MAX)),
        M_MMAP_MAX => value == 0,
        M_ARENA_MAX => value > 0,
        _ => false,
    };
    done.into()
}
