//! malloc, free and the other functions of the family.
//!
//! Source: C17 7.22.3, POSIX.1-2024, malloc(3), posix_memalign(3), malloc_usable_size(3).

use core::ffi::{c_int, c_void};
use core::mem::transmute;
use core::ptr::null_mut;
use neap::NamedSize;
use neap::process::PROCESS;

const EINVAL: c_int = 22;
const ENOMEM: c_int = 12;

unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
}

/// Returns the result of an allocation; null sets errno to ENOMEM.
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
    allocate(size)
}

/// malloc(3) by this library. [`neap::mm`] lists the steps.
#[inline(always)]
pub(crate) fn allocate(size: usize) -> *mut c_void {
    // The call is the last one: the fast path needs no stack frame.
    PROCESS.alloc_fast(size, move || malloc_grouped(size).cast()).cast()
}

#[inline(never)]
pub(crate) extern "C" fn malloc_grouped(size: usize) -> *mut c_void {
    PROCESS.alloc_fast_grouped(size, move || malloc_slow(size).cast()).cast()
}

#[cold]
#[inline(never)]
extern "C" fn malloc_slow(size: usize) -> *mut c_void {
    answer(PROCESS.alloc_cpu_locked(size))
}

/// free(3). errno does not change.
///
/// # Safety
/// As for `free` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn free(memory: *mut c_void) {
    // SAFETY: the caller passes null or memory of this family that is in use, as for `free` in C.
    unsafe { PROCESS.free(memory.cast()) }
}

/// calloc(3).
#[unsafe(no_mangle)]
extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    allocate_array(count, size)
}

/// calloc(3) by this library. A call of `calloc` may reach the definition of another library.
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
    // SAFETY: `resize` needs what `realloc` in C needs, which the caller says holds.
    unsafe { resize(memory, size) }
}

/// realloc(3) by this library.
///
/// # Safety
/// As for `realloc` in C.
#[inline(always)]
pub(crate) unsafe fn resize(memory: *mut c_void, size: usize) -> *mut c_void {
    if memory.is_null() {
        return allocate(size);
    }
    if size == 0 {
        // SAFETY: the caller passes memory of this family that is in use, as for `realloc` in C.
        unsafe { PROCESS.free(memory.cast()) };
        return null_mut();
    }
    // SAFETY: the caller passes memory of this family that is in use, as for `realloc` in C.
    answer(unsafe { PROCESS.reallocate(memory.cast(), size) })
}

/// reallocarray(3). Like the GNU C library's, it calls the `realloc` that the dynamic linker chose,
/// since a program that has its own malloc and no reallocarray passes its own memory.
///
/// # Safety
/// As for `realloc` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn reallocarray(memory: *mut c_void, count: usize, size: usize) -> *mut c_void {
    let Some(bytes) = count.checked_mul(size) else { return refuse(ENOMEM) };
    let realloc = chosen!("realloc");
    // SAFETY: every definition of `realloc` has this type, and this library has one, so the address
    // is not 0. The caller passes memory of that `realloc`'s family.
    unsafe { transmute::<usize, unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void>(realloc)(memory, bytes) }
}

/// cfree(3), which programs from before 2017 call.
///
/// # Safety
/// As for `free` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn cfree(memory: *mut c_void) {
    // SAFETY: the caller passes null or memory of this family that is in use, as for `free` in C.
    unsafe { PROCESS.free(memory.cast()) }
}

/// free_sized of C23.
///
/// # Safety
/// As for `free` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn free_sized(memory: *mut c_void, size: usize) {
    // SAFETY: the caller passes null or memory of this family that is in use, as for `free` in C.
    unsafe { PROCESS.free_named(memory.cast(), NamedSize::Exact(size)) }
}

/// free_aligned_sized of C23.
///
/// # Safety
/// As for `free` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn free_aligned_sized(memory: *mut c_void, _align: usize, size: usize) {
    // SAFETY: the caller passes null or memory of this family that is in use, as for `free` in C.
    unsafe { PROCESS.free_named(memory.cast(), NamedSize::Exact(size)) }
}

/// memalign(3). As in the GNU C library, an alignment that is not a power of two is rounded up to
/// one.
#[unsafe(no_mangle)]
extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    allocate_rounded(align, size)
}

/// memalign(3) by this library.
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
    // SAFETY: the caller says that `memory` may be written.
    unsafe { memory.write(allocated.cast()) };
    0
}

/// aligned_alloc(3). The size may be any, as in C17 since its defect report 460.
#[unsafe(no_mangle)]
extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    if align.is_power_of_two() { answer(PROCESS.allocate_aligned(size, align)) } else { refuse(EINVAL) }
}

/// valloc(3).
#[unsafe(no_mangle)]
extern "C" fn valloc(size: usize) -> *mut c_void {
    allocate_on_page(size)
}

/// valloc(3) by this library.
#[inline(always)]
pub(crate) fn allocate_on_page(size: usize) -> *mut c_void {
    answer(PROCESS.allocate_aligned(size, page_size()))
}

/// pvalloc(3): allocates whole pages.
#[unsafe(no_mangle)]
extern "C" fn pvalloc(size: usize) -> *mut c_void {
    allocate_pages(size)
}

/// pvalloc(3) by this library.
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

/// malloc_trim(3): releases all free memory, and ignores `pad`.
#[unsafe(no_mangle)]
extern "C" fn malloc_trim(_pad: usize) -> c_int {
    PROCESS.release_all().into()
}

/// mallopt(3). Returns 1 if the value takes effect, or if neap behaves that way in any case.
/// Otherwise returns 0.
///
/// - `M_TRIM_THRESHOLD`: neap releases no pages by itself while at most this many bytes of pages
///   are free. With -1 it never does. `malloc_trim` releases them in any case.
/// - `M_MMAP_MAX`: 0, since no block is a mapping of its own.
/// - `M_ARENA_MAX`: any number of at least 1, since there is one heap for all threads.
#[unsafe(no_mangle)]
extern "C" fn mallopt(parameter: c_int, value: c_int) -> c_int {
    const M_TRIM_THRESHOLD: c_int = -1;
    const M_MMAP_MAX: c_int = -4;
    const M_ARENA_MAX: c_int = -8;
    let done = match parameter {
        // As in the GNU C library, a negative number stands for a very large one.
        M_TRIM_THRESHOLD => PROCESS.keep_free(u64::try_from(value).unwrap_or(u64::MAX)),
        M_MMAP_MAX => value == 0,
        M_ARENA_MAX => value > 0,
        _ => false,
    };
    done.into()
}
