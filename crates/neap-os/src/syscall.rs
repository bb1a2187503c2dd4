//! Direct system calls, for those that rustix does not wrap.
//!
//! The C library's `syscall` is not used, since it writes `errno`, which `free` must preserve.
//! Never retries and never interprets a result.

use crate::Errno;
use core::arch::asm;

pub(crate) const MEMBARRIER: usize = linux_raw_sys::general::__NR_membarrier as usize;
pub(crate) const GETRANDOM: usize = linux_raw_sys::general::__NR_getrandom as usize;
pub(crate) const PROCESS_MADVISE: usize = linux_raw_sys::general::__NR_process_madvise as usize;
pub(crate) const PROCESS_VM_WRITEV: usize = linux_raw_sys::general::__NR_process_vm_writev as usize;

/// Makes one system call with up to five arguments.
///
/// # Safety
/// The arguments meet the requirements of the call numbered `number`.
pub(crate) unsafe fn syscall5(number: usize, a: usize, b: usize, c: usize, d: usize, e: usize) -> Result<usize, Errno> {
    // SAFETY: the caller meets the call's requirements. A call of five arguments does not read a
    // sixth.
    unsafe { syscall6(number, a, b, c, d, e, 0) }
}

/// Makes one system call with six arguments.
///
/// # Safety
/// As for [`syscall5`].
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn syscall6(
    number: usize,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> Result<usize, Errno> {
    let answer: isize;
    // SAFETY: the caller meets the call's requirements. The x86-64 convention: number in rax,
    // arguments in rdi, rsi, rdx, r10, r8 and r9; rcx and r11 are clobbered.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => answer, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    if (-4095..0).contains(&answer) { Err(Errno::from_raw_os_error(-answer as i32)) } else { Ok(answer as usize) }
}

#[cfg(not(target_arch = "x86_64"))]
compile_error!("neap has its system calls and restartable sequences for x86-64 only");
