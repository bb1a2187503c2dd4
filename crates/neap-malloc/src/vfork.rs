//! vfork, whose child may allocate.
//!
//! Sits between a program and the system call. A child of `vfork` runs on its parent's stack and
//! with its parent's thread area, while the parent's thread waits and the parent's other threads
//! run on. The kernel does not tell that area which CPU the child is on, and does not abort the
//! child's restartable sequences: the parent leaves the kernel's care for them before, so the child
//! has no CPU id, and allocates by the slow path. Nothing is added to malloc or free.
//!
//! The call itself cannot be a Rust function: it returns twice, and what the child calls afterwards
//! overwrites the frame and the return address.

use core::arch::naked_asm;
use core::ffi::c_int;
use neap_os::rseq::{Left, enter, leave};

const VFORK: u32 = 58;

unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
}

/// vfork(2).
///
/// # Safety
/// As for `vfork` in C, but that the child may use the malloc family.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn vfork() -> c_int {
    naked_asm!(
        ".cfi_startproc",
        "sub rsp, 8", ".cfi_adjust_cfa_offset 8",
        "call {before}",
        "add rsp, 8", ".cfi_adjust_cfa_offset -8",
        // What was left stays in rsi and rdx, and the return address in r9: the kernel changes none
        // of them.
        "mov rsi, rax",
        "mov r9, qword ptr [rsp]", ".cfi_register rip, r9",
        "mov eax, {vfork}",
        "syscall",
        "mov qword ptr [rsp], r9", ".cfi_offset rip, -8",
        "mov rdi, rax",
        "test rax, rax",
        "jne {in_parent}",
        "ret",
        ".cfi_endproc",
        before = sym before, vfork = const VFORK, in_parent = sym in_parent
    )
}

/// The other name that the GNU C library has for it.
///
/// # Safety
/// As for [`vfork`].
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn __vfork() -> c_int {
    // The other one as the dynamic linker chose it, without a linkage table, which has no unwind
    // information.
    naked_asm!(".cfi_startproc", "jmp qword ptr [rip + vfork@GOTPCREL]", ".cfi_endproc")
}

extern "C" fn before() -> Left {
    leave()
}

/// What the parent does when the child has ended or become another program: `answer` is its number
/// or an error's.
extern "C" fn in_parent(answer: isize, area: usize, length: usize) -> c_int {
    enter(Left { area, length });
    if answer > 0 {
        return answer as c_int;
    }
    // SAFETY: the C library gives every thread an errno.
    unsafe { __errno_location().write(-answer as c_int) };
    -1
}
