//! Registration of threads by the C library, and the CPU id that the kernel writes for them.
//!
//! The C library announces its registration by weak symbols. Takes no lock, never retries.
//! Signal-safe.

use core::arch::asm;

/// Reads a variable of another library through the GOT: `$read` loads it into the register `{0}`
/// from the address there. With an empty `$read`, returns the address of a variable or function. 0
/// if no loaded library has the name.
///
/// The symbol is weak, so the library loads without it, too. Each use declares it weak, since each
/// object file that uses the name must do so.
#[macro_export]
macro_rules! weak_variable {
    ($name:literal, $read:literal) => {{
        let value: usize;
        // SAFETY: loads the address from the GOT, and reads from it only if it is not null.
        unsafe {
            core::arch::asm!(concat!(".weak ", $name), concat!("mov {0}, qword ptr [rip + ", $name, "@GOTPCREL]"), "test {0}, {0}", "jz 2f", $read, "2:",
                out(reg) value, options(nostack, readonly));
        }
        value
    }};
}
pub(crate) use weak_variable;

/// Whether the C library registers its threads. It does not if it is too old, under
/// `GLIBC_TUNABLES=glibc.pthread.rseq=0`, under valgrind, or in some sandboxes.
pub fn is_registered() -> bool {
    weak_variable!("__rseq_size", "mov {0:e}, dword ptr [{0}]") != 0
}

/// Offset of a thread's rseq area from the thread pointer, if the C library [registers
/// threads](is_registered). It lies in the thread's control block, behind the pointer, or, from
/// glibc 2.41 on, in front of it with thread-local variables. Never 0, where the pointer itself is.
pub fn registered_offset() -> Option<isize> {
    let offset = weak_variable!("__rseq_offset", "mov {0}, qword ptr [{0}]");
    (is_registered() && offset != 0).then_some(offset.cast_signed())
}

/// Whether the kernel has the call that registers a thread, and a sandbox allows it.
pub fn may_register() -> bool {
    let number = linux_raw_sys::general::__NR_rseq as usize;
    // SAFETY: nothing is registered at address 0 with length 0; the kernel checks the arguments and
    // refuses.
    let answer = unsafe { crate::syscall::syscall5(number, 0, 0, 0, 0, 0) };
    matches!(answer, Err(crate::Errno::INVAL | crate::Errno::BUSY | crate::Errno::FAULT))
}

/// Whether the processor has the instructions of malloc's and free's sequences: `tzcnt` and shifts
/// that preserve the flags (BMI1 and BMI2; Intel since 2013, AMD since 2015).
pub fn has_instructions() -> bool {
    const BOTH: u32 = 1 << 3 | 1 << 8;
    let leaf = |leaf| core::arch::x86_64::__cpuid_count(leaf, 0);
    leaf(0).eax >= 7 && leaf(7).ebx & BOTH == BOTH
}

/// The CPU that this thread is on; `None` if the thread is not registered.
pub fn current_cpu() -> Option<usize> {
    registered_offset().and_then(cpu_at)
}

/// The CPU that this thread is on, with the [`registered_offset`] given; `None` if the thread is
/// not registered.
#[inline]
pub fn cpu_at(offset: isize) -> Option<usize> {
    let cpu: u32;
    // SAFETY: the caller passes the registered offset. There the C library keeps a `struct rseq`
    // for every thread, whose second word is `cpu_id`.
    unsafe {
        asm!("mov {0:e}, dword ptr fs:[{1} + 4]", out(reg) cpu, in(reg) offset, options(nostack, readonly, preserves_flags))
    };
    (cpu < u32::MAX - 15).then_some(cpu as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registered_thread_has_the_cpu_that_the_kernel_reports() {
        let Some(offset) = registered_offset() else { return };
        assert!(is_registered() && may_register());
        // The thread may migrate between the reads.
        // SAFETY: sched_getcpu has no preconditions.
        let is_equal = || cpu_at(offset) == usize::try_from(unsafe { libc::sched_getcpu() }).ok();
        assert!((0..1_000).any(|_| is_equal()) && current_cpu().is_some());
    }
}
