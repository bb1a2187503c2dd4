//! vfork, whose child may allocate.
//!
//! # Design
//!
//! A child of `vfork` runs on its parent's stack and with its parent's thread area. The parent's
//! thread waits, and its other threads run on. The kernel does not write the child's CPU to that
//! area, and does not abort the child's restartable sequences. So the parent ends its registration
//! before the call. The child then has no CPU id and allocates by the slow path. malloc and free
//! need no extra code.
//!
//! The function itself is assembly, since it returns twice, and the child's later calls overwrite
//! the frame and the return address.

use core::arch::naked_asm;
use core::ffi::c_int;
use neap_os::rseq::{Left, enter, leave};

unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
}

/// vfork(2).
///
/// # Safety
/// As for `vfork` in C, except that the child may use the malloc family.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn vfork() -> c_int {
    vfork!(before, in_parent)
}

/// The GNU C library's other name of [`vfork`].
///
/// # Safety
/// As for `vfork` in C, except that the child may use the malloc family.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn __vfork() -> c_int {
    // Jumps to the `vfork` that the dynamic linker chose, without a linkage table, which has no
    // unwind information.
    //
    // go to the chosen vfork
    naked_asm!(".cfi_startproc", jump!("vfork"), ".cfi_endproc")
}

extern "C" fn before() -> Left {
    leave()
}

/// Runs in the parent once the child has ended or executes another program. `answer` is the child's
/// process id, or a negative errno.
extern "C" fn in_parent(answer: isize, area: usize, length: usize) -> c_int {
    enter(Left { area, length });
    if answer > 0 {
        return answer as c_int;
    }
    // SAFETY: the C library gives every thread an errno.
    unsafe { __errno_location().write(-answer as c_int) };
    -1
}
