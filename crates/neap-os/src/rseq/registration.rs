//! Registration of threads by the C library, and the CPU id that the kernel writes for them.
//!
//! The C library describes its registration by two variables, to which this module refers by weak
//! symbols. The functions take no lock, never retry, and are signal-safe.

use crate::arch;

/// Whether the C library registers its threads. It does not if it is too old, under
/// `GLIBC_TUNABLES=glibc.pthread.rseq=0`, under valgrind, or in some sandboxes.
pub fn is_registered() -> bool {
    crate::weak_variable!("__rseq_size", u32) != 0
}

/// Offset of a thread's rseq area from the thread pointer, if the C library [registers
/// threads](is_registered). Before glibc 2.41, the area lies behind the thread pointer, in the
/// thread's control block. From 2.41 on it lies in front of the thread pointer, with thread-local
/// variables. The offset is never 0.
pub fn registered_offset() -> Option<isize> {
    let offset = crate::weak_variable!("__rseq_offset", usize);
    (is_registered() && offset != 0).then_some(offset.cast_signed())
}

/// Whether the kernel has the call that registers a thread, and a sandbox allows it.
pub fn may_register() -> bool {
    let number = linux_raw_sys::general::__NR_rseq as usize;
    // SAFETY: the kernel checks the arguments, and refuses to register address 0 with length 0.
    let answer = unsafe { crate::syscall::syscall5(number, 0, 0, 0, 0, 0) };
    matches!(answer, Err(crate::Errno::INVAL | crate::Errno::BUSY | crate::Errno::FAULT))
}

/// Whether the processor has the instructions of malloc's and free's sequences. On x86-64 these are
/// BMI1 and BMI2 (Intel since 2013, AMD since 2015).
pub fn has_instructions() -> bool {
    arch::has_instructions()
}

/// The CPU that this thread is on; `None` if the thread is not registered.
pub fn current_cpu() -> Option<usize> {
    registered_offset().and_then(cpu_at)
}

/// The CPU that this thread is on; `None` if the thread is not registered. `offset` must be
/// [`registered_offset`], or that of [`OwnAreas`](super::OwnAreas).
#[inline]
pub fn cpu_at(offset: isize) -> Option<usize> {
    // SAFETY: the caller passes `registered_offset` or the offset of `OwnAreas`, as this function
    // demands.
    let cpu = unsafe { arch::cpu_id(offset) };
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
