//! Unregisters a thread from rseq while a child of `vfork` shares its thread area.
//!
//! A child of `vfork` runs with its parent's thread area, which holds the parent's CPU id. The
//! kernel does not update it for the child. Without a registration the area has no CPU id, and
//! every sequence refuses. The preload library's `vfork` uses this module. The functions take no
//! lock and never retry.

use super::own_areas::{LENGTH, UNREGISTER};
use super::{cpu_at, registered_offset};
use crate::arch::SIGNATURE;
use crate::syscall::syscall5;
use crate::thread_state::{has_asked, own_area, set_asked};
use core::ffi::c_ulong;

/// The area that [`leave`] has unregistered. The value fits into two registers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Left {
    /// Address; 0 if the thread was not registered, or the kernel refused to unregister it.
    pub area: usize,
    /// Length in bytes, as registered. If `area` is 0: [`MAY_ASK`], or 0.
    pub length: usize,
}

/// Value of [`Left::length`]: the thread has not tried to register an area of neap's own yet, and
/// may do so later.
const MAY_ASK: usize = 1;

fn call(area: usize, length: usize, flag: usize) -> bool {
    let number = linux_raw_sys::general::__NR_rseq as usize;
    // SAFETY: the area was registered for this thread, and stays as long as the thread runs the
    // program's code. The kernel refuses a length that is not the registered one.
    unsafe { syscall5(number, area, length, flag, SIGNATURE, 0) }.is_ok()
}

/// Length with which glibc from 2.40 on registers an area: the kernel's length, rounded up.
fn offered_length() -> usize {
    const AT_RSEQ_FEATURE_SIZE: c_ulong = 27;
    const AT_RSEQ_ALIGN: c_ulong = 28;
    // SAFETY: getauxval has no preconditions.
    let [size, align] = [AT_RSEQ_FEATURE_SIZE, AT_RSEQ_ALIGN].map(|key| unsafe { libc::getauxval(key) } as usize);
    size.next_multiple_of(align.max(1)).max(LENGTH)
}

/// Unregisters the calling thread. Until [`enter`], the thread has no CPU id, its sequences refuse,
/// and it registers no area of neap's own.
pub fn leave() -> Left {
    let none = Left { area: 0, length: if has_asked() { 0 } else { MAY_ASK } };
    set_asked(true);
    let offset = registered_offset().unwrap_or_else(own_area);
    if cpu_at(offset).is_none() {
        return none;
    }
    let area = crate::thread::pointer().wrapping_add_signed(offset);
    let length = [LENGTH, offered_length()].into_iter().find(|length| call(area, *length, UNREGISTER));
    length.map_or(none, |length| Left { area, length })
}

/// Registers the thread again. If the kernel refuses, the thread stays without a CPU id, and its
/// sequences refuse.
pub fn enter(left: Left) {
    if left.area != 0 {
        call(left.area, left.length, 0);
    } else if left.length == MAY_ASK {
        set_asked(false);
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
