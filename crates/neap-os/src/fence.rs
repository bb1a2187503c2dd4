//! Fences on other CPUs, by `membarrier`.
//!
//! When [`cpu`] returns `Ok`, each restartable sequence of this process that was in progress on
//! that CPU has been aborted or has committed. Its stores are visible to the caller. The call
//! interrupts the CPU only if a thread of this process runs there at that moment. After an error,
//! sequences may still be in progress, and the caller may not see their stores. Success does not
//! prove that rseq works: valgrind and kernels return 0 even for CPUs that do not exist. Rseq works
//! if threads have CPU ids ([`cpu_at`](crate::rseq::cpu_at)).

use crate::Errno;
use crate::syscall::{MEMBARRIER, syscall5};

const REGISTER_PRIVATE_EXPEDITED_RSEQ: usize = 1 << 8;
const PRIVATE_EXPEDITED_RSEQ: usize = 1 << 7;
const FLAG_CPU: usize = 1;

/// Registers this process for fences. A process needs this once. The first fence in a forked child
/// registers the child.
pub fn register() -> Result<(), Errno> {
    // SAFETY: membarrier touches no memory of the caller.
    unsafe { syscall5(MEMBARRIER, REGISTER_PRIVATE_EXPEDITED_RSEQ, 0, 0, 0, 0) }.map(|_| ())
}

/// Aborts every restartable sequence of this process in progress on `cpu`, and makes its stores
/// visible.
///
/// # Errors
/// The kernel's error. Sequences may still be in progress.
pub fn cpu(cpu: usize) -> Result<(), Errno> {
    fence(FLAG_CPU, cpu)
}

/// Aborts every restartable sequence of this process in progress on any CPU, and makes their stores
/// visible.
///
/// # Errors
/// The kernel's error. Sequences may still be in progress.
pub fn all() -> Result<(), Errno> {
    fence(0, 0)
}

fn fence(flags: usize, cpu: usize) -> Result<(), Errno> {
    // SAFETY: membarrier touches no memory of the caller.
    let call = || unsafe { syscall5(MEMBARRIER, PRIVATE_EXPEDITED_RSEQ, flags, cpu, 0, 0) }.map(|_| ());
    call().or_else(|error| if error == Errno::PERM && register().is_ok() { call() } else { Err(error) })
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_registered_process_fences_its_own_cpus() {
        if super::register().is_err() {
            return; // The kernel or a sandbox has no membarrier.
        }
        assert_eq!(super::cpu(0), Ok(()));
        assert_eq!(super::all(), Ok(()));
    }
}
