//! Taking a thread out of the kernel's care for a while, for a child that shares its thread area.
//!
//! Sits beside the sequences, below an interposed `vfork`. A child of `vfork` runs with its
//! parent's area, which says the CPU of the parent's: to the kernel the child has none. Without a
//! registration the area says that the thread has no CPU, and every sequence refuses. Takes no
//! lock, never retries.

use super::{is_registered, registered_offset};
use crate::syscall::syscall5;
use core::ffi::c_ulong;

/// What the C library registers with.
const SIGNATURE: usize = 0x5305_3053;

/// The call's flag that takes a registration back.
const UNREGISTER: usize = 1;

/// The length of an area in kernels and C libraries that know the first fields only.
const FIRST_LENGTH: usize = 32;

/// The area of a thread that has been taken out of the kernel's care, in two registers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Left {
    /// Its address; 0: the thread was not registered, or cannot be taken out.
    pub area: usize,
    /// Its length, as it was registered.
    pub length: usize,
}

fn call(area: usize, length: usize, flag: usize) -> bool {
    let number = linux_raw_sys::general::__NR_rseq as usize;
    // SAFETY: the area is this thread's for as long as the thread lives, and as long as the C
    // library said.
    unsafe { syscall5(number, area, length, flag, SIGNATURE, 0) }.is_ok()
}

/// The length with which C libraries from 2.40 on register: what the kernel offers, rounded up.
fn offered_length() -> usize {
    const AT_RSEQ_FEATURE_SIZE: c_ulong = 27;
    const AT_RSEQ_ALIGN: c_ulong = 28;
    // SAFETY: getauxval has no preconditions.
    let [size, align] = [AT_RSEQ_FEATURE_SIZE, AT_RSEQ_ALIGN].map(|key| unsafe { libc::getauxval(key) } as usize);
    size.next_multiple_of(align.max(1)).max(FIRST_LENGTH)
}

/// Takes the calling thread out, which then has no CPU id: its sequences refuse.
pub fn leave() -> Left {
    let Some(offset) = registered_offset().filter(|_| is_registered()) else { return Left { area: 0, length: 0 } };
    let area = crate::thread::pointer().wrapping_add_signed(offset);
    let length = [FIRST_LENGTH, offered_length()].into_iter().find(|length| call(area, *length, UNREGISTER));
    length.map_or(Left { area: 0, length: 0 }, |length| Left { area, length })
}

/// Takes it in again. Where the kernel refuses, the thread stays without a CPU id, and slower.
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
