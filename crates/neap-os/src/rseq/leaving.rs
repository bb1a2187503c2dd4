//! Unregisters a thread from rseq for a while, for a child that shares its thread area.
//!
//! A child of `vfork` runs with its parent's thread area, which holds the parent's CPU id. The
//! kernel does not update it for the child. Without a registration the area has no CPU id, and
//! every sequence refuses. Used by the interposed `vfork`. Takes no lock, never retries.

use super::{is_registered, registered_offset};
use crate::arch::SIGNATURE;
use crate::syscall::syscall5;
use core::ffi::c_ulong;

/// Flag of the system call that unregisters.
const UNREGISTER: usize = 1;

/// Length of an area in kernels and C libraries that know the first fields only.
const FIRST_LENGTH: usize = 32;

/// Area of an unregistered thread, in two registers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Left {
    /// Address; 0: the thread was not registered, or could not be unregistered.
    pub area: usize,
    /// Length in bytes, as registered.
    pub length: usize,
}

fn call(area: usize, length: usize, flag: usize) -> bool {
    let number = linux_raw_sys::general::__NR_rseq as usize;
    // SAFETY: the C library keeps this area for as long as the thread lives. The kernel refuses a
    // length that is not the registered one.
    unsafe { syscall5(number, area, length, flag, SIGNATURE, 0) }.is_ok()
}

/// Length with which C libraries from 2.40 on register: the kernel's length, rounded up.
fn offered_length() -> usize {
    const AT_RSEQ_FEATURE_SIZE: c_ulong = 27;
    const AT_RSEQ_ALIGN: c_ulong = 28;
    // SAFETY: getauxval has no preconditions.
    let [size, align] = [AT_RSEQ_FEATURE_SIZE, AT_RSEQ_ALIGN].map(|key| unsafe { libc::getauxval(key) } as usize);
    size.next_multiple_of(align.max(1)).max(FIRST_LENGTH)
}

/// Unregisters the calling thread. It has no CPU id then, and its sequences refuse.
pub fn leave() -> Left {
    let Some(offset) = registered_offset().filter(|_| is_registered()) else { return Left { area: 0, length: 0 } };
    let area = crate::thread::pointer().wrapping_add_signed(offset);
    let length = [FIRST_LENGTH, offered_length()].into_iter().find(|length| call(area, *length, UNREGISTER));
    length.map_or(Left { area: 0, length: 0 }, |length| Left { area, length })
}

/// Registers the thread again. If the kernel refuses, the thread stays without a CPU id, and
/// slower.
pub fn enter(left: Left) {
    if left.area != 0 {
        call(left.area, left.length, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rseq::current_cpu;

    #[test]
    fn a_thread_that_left_has_no_cpu_until_it_enters() {
        std::thread::spawn(|| {
            let registered = current_cpu().is_some();
            let left = leave();
            assert_eq!((left.area != 0, current_cpu()), (registered, None));
            assert_eq!(leave().area, 0, "it has left already");
            enter(left);
            assert_eq!(current_cpu().is_some(), registered);
        })
        .join()
        .unwrap();
    }
}
