//! dlopen without RTLD_DEEPBIND.
//!
//! A library that is loaded with that flag has the C library's malloc and free, since its own
//! dependencies come before what is preloaded. Memory that it and the program hand to each other
//! then meets the wrong `free`, which PHP's extensions do. Without the flag the library has this
//! one's.
//!
//! The C library's own dlopen asks its return address who has called: whose run path holds, and in
//! which namespace. So it is reached by a jump, with the stack as it was.

use core::arch::{global_asm, naked_asm};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::transmute;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

// Weak: it is the C library's from 2.34 on, and in any C library where a program loads libraries.
global_asm!(".weak dlsym");

/// The flag; a number of the GNU C library and of musl, which ignores it.
const DEEPBIND: c_int = 8;

/// dlopen(3), of which `RTLD_DEEPBIND` is left out.
#[unsafe(no_mangle)]
#[unsafe(naked)]
extern "C" fn dlopen(_file: *const c_char, _flags: c_int) -> *mut c_void {
    naked_asm!(
        ".cfi_startproc",
        "and esi, {others}",
        "push rdi",
        ".cfi_adjust_cfa_offset 8",
        "push rsi",
        ".cfi_adjust_cfa_offset 8",
        "push rax",
        ".cfi_adjust_cfa_offset 8",
        "call {next}",
        "pop rcx",
        ".cfi_adjust_cfa_offset -8",
        "pop rsi",
        ".cfi_adjust_cfa_offset -8",
        "pop rdi",
        ".cfi_adjust_cfa_offset -8",
        "jmp rax",
        ".cfi_endproc",
        others = const !DEEPBIND, next = sym next_dlopen
    )
}

/// The C library's dlopen, or that of another library that wraps it.
extern "C" fn next_dlopen() -> *const c_void {
    // Not in `.bss`: what lies there has a mapping more in every process that loads the library.
    #[unsafe(link_section = ".data")]
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    // Relaxed: code, which was there before.
    let mut found = FOUND.load(Ordering::Relaxed);
    if found.is_null() {
        found = next(c"dlopen");
        FOUND.store(found, Ordering::Relaxed);
    }
    if found.is_null() { nothing as *const c_void } else { found }
}

extern "C" fn nothing(_file: *const c_char, _flags: c_int) -> *mut c_void {
    null_mut()
}

/// The definition of a name behind this library's own; null where there is none.
pub(crate) fn next(name: &CStr) -> *mut c_void {
    /// `RTLD_NEXT`: goes by the return address, which is this library's.
    const NEXT: *mut c_void = core::ptr::without_provenance_mut(usize::MAX);
    let find = chosen!("dlsym");
    if find == 0 {
        return null_mut();
    }
    // SAFETY: the C library's function of this name.
    let find = unsafe { transmute::<usize, extern "C" fn(*mut c_void, *const c_char) -> *mut c_void>(find) };
    let found = find(NEXT, name.as_ptr());
    // No call at the very end: the return address would be the caller's, or the caller's caller's.
    core::hint::black_box(found)
}
