//! Direct system calls, for those that rustix does not wrap.
//!
//! The C library's `syscall` is not used, since it writes `errno`, which `free` must preserve. The
//! functions never retry a call. They only distinguish an error from a result.

use crate::Errno;

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
pub(crate) unsafe fn syscall6(
    number: usize,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> Result<usize, Errno> {
    // SAFETY: the caller meets the call's requirements.
    let answer = unsafe { crate::arch::system_call(number, [a, b, c, d, e, f]) };
    if (-4095..0).contains(&answer) { Err(Errno::from_raw_os_error(-answer as i32)) } else { Ok(answer as usize) }
}
