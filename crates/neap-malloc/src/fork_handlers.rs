//! pthread_atfork for this library alone, in any C library.
//!
//! The GNU C library's is no function of its shared object: each library that uses it gets a copy, which calls `__register_atfork`. Other C libraries
//! have no such function, and the program that preloads a library with that copy would not start. Here the reference is weak. Where nothing answers it, the
//! C library's own `pthread_atfork` is found by name.

use core::arch::global_asm;
use core::ffi::{c_int, c_void};
use core::mem::transmute;

type Handler = extern "C" fn();
type Register = extern "C" fn(Handler, Handler, Handler) -> c_int;

// Hidden: the program's own pthread_atfork is not this one. In the section of what runs when the library is loaded: the two are one page fault. The
// fourth argument is the library at whose end the handlers go, which is never.
global_asm!(
    ".weak __register_atfork",
    ".pushsection __at_load, \"ax\", @progbits",
    ".globl pthread_atfork",
    ".hidden pthread_atfork",
    ".type pthread_atfork, @function",
    "pthread_atfork:",
    ".cfi_startproc",
    "mov rax, qword ptr [rip + __register_atfork@GOTPCREL]",
    "xor ecx, ecx",
    "test rax, rax",
    "je {otherwise}",
    "jmp rax",
    ".cfi_endproc",
    ".size pthread_atfork, . - pthread_atfork",
    ".popsection",
    otherwise = sym register_by_name,
);

extern "C" fn register_by_name(prepare: Handler, parent: Handler, child: Handler) -> c_int {
    const ENOSYS: c_int = 38;
    let register: *mut c_void = crate::dl_open::next(c"pthread_atfork");
    if register.is_null() {
        return ENOSYS;
    }
    // SAFETY: POSIX's function of this name.
    unsafe { transmute::<*mut c_void, Register>(register)(prepare, parent, child) }
}
