//! Reads the calling thread's stack for an unwinder: three registers, and the bytes above the stack
//! pointer.
//!
//! neap does not know where a stack ends, since the stack may belong to a coroutine or a signal
//! handler. So [`readable`] asks the kernel how far the memory can be read. This module has no lock
//! and no state, and is signal-safe.

use core::ffi::c_void;
use rustix::mm::{Advice, madvise};

/// The registers from which an unwinder finds the callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// Address of an instruction of the function that the call was inlined into.
    pub instruction: usize,
    /// The stack pointer there.
    pub stack_pointer: usize,
    /// The frame pointer register there. The compiler may use it for another value.
    pub frame_pointer: usize,
}

/// Returns the registers of the calling function.
#[inline(always)]
pub fn registers() -> Registers {
    crate::arch::registers()
}

/// Every address of code is lower than this number.
pub const ADDRESS_END: u64 = crate::arch::ADDRESS_END;

/// Returns the address in a word of a stack, without the signature that a return address may have
/// on arm64.
#[inline(always)]
pub fn without_signature(word: u64) -> u64 {
    crate::arch::without_signature(word)
}

/// Returns how many bytes from `address` on can be read, where `address` lies on the calling
/// thread's stack. The result is at most `most`, and a multiple of 8. It is 0 before Linux 5.14. If
/// fewer than `most` bytes can be read, the result may be about half of them.
///
/// Makes one system call, and one more each time it halves the range.
pub fn readable(address: usize, most: usize) -> usize {
    // The control block of a thread that is not the first lies at the end of its stack.
    let to_control_block = crate::thread::pointer().wrapping_sub(address);
    let most = if to_control_block < most { to_control_block } else { most };
    let page = crate::memory::page_size();
    let start = address & !(page - 1);
    let mut end = (address + most).next_multiple_of(page);
    while end > start {
        let pointer = core::ptr::with_exposed_provenance_mut::<c_void>(start);
        // SAFETY: populating for reading changes no contents.
        if unsafe { madvise(pointer, end - start, Advice::LinuxPopulateRead) }.is_ok() {
            return (end - address).min(most) & !7;
        }
        end = start + (((end - start) / 2) & !(page - 1));
    }
    0
}

/// Copies bytes of this thread's stack, including those of other functions' variables.
///
/// # Safety
/// * `bytes` bytes from `from` on lie above this thread's stack pointer, and can be read.
/// * `to` has room for as many, and no other code uses them.
pub unsafe fn copy(from: usize, to: *mut u8, bytes: usize) {
    // Assembly makes the copy, since Rust code may not access the bytes of other functions'
    // variables.
    // SAFETY: the caller promises that the first range can be read, and that the second is its own.
    unsafe { crate::arch::copy(from, to, bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[inline(never)]
    fn depth(levels: usize, test: &mut dyn FnMut()) -> usize {
        let kept = core::hint::black_box([levels; 64]);
        let deeper = if levels > 0 { depth(levels - 1, test) } else { test_and_count(test) };
        deeper + kept[0] - levels + 1
    }

    fn test_and_count(test: &mut dyn FnMut()) -> usize {
        test();
        0
    }

    #[test]
    fn a_copy_has_what_lies_on_the_stack() {
        let marker = core::hint::black_box([0x5a_u64; 32]);
        let calls = depth(10, &mut || {
            let at = registers();
            let bytes = readable(at.stack_pointer, 32 << 10);
            assert!(bytes >= 8192 && bytes.is_multiple_of(8), "{bytes}");
            let mut copied: Vec<u64> = std::vec![0; bytes / 8];
            // SAFETY: the kernel says that the bytes can be read; the vector is as long.
            unsafe { copy(at.stack_pointer, copied.as_mut_ptr().cast(), bytes) };
            let of_levels = (0..=10).all(|level| copied.windows(64).any(|words| words == [level; 64]));
            assert!(of_levels && copied.windows(32).any(|words| words == marker), "all frames are in it");
        });
        assert_eq!(calls, 11);
    }

    #[test]
    fn what_cannot_be_read_ends_it() {
        let page = crate::memory::page_size();
        let start = crate::memory::map(4 * page).unwrap();
        // SAFETY: a part of the mapping above, which no code uses.
        unsafe { crate::memory::unmap(start + 3 * page, page) }.unwrap();
        assert_eq!(readable(start, 2 * page), 2 * page);
        assert_eq!(readable(start + 8, 3 * page - 8), 3 * page - 8);
        assert_eq!(readable(start, 16 * page), 2 * page, "found by halves");
        assert_eq!(readable(start + 3 * page, page), 0);
        // SAFETY: mapped above.
        unsafe { crate::memory::unmap(start, 3 * page) }.unwrap();
    }

    #[test]
    fn an_address_has_no_signature() {
        let address = (an_address_has_no_signature as *const ()).addr() as u64;
        assert!(address < ADDRESS_END && without_signature(address) == address);
        let signed = address | 0x7b << 48;
        let bare = if cfg!(target_arch = "aarch64") { address } else { signed };
        assert_eq!(without_signature(signed), bare);
    }

    #[test]
    fn the_instruction_lies_in_the_calling_function() {
        #[inline(never)]
        fn here() -> Registers {
            registers()
        }
        let offset = here().instruction.wrapping_sub(here as *const () as usize);
        assert!(offset < 256, "{offset}");
        let local = 0_u8;
        assert!(registers().stack_pointer.abs_diff((&raw const local).addr()) < 4096);
    }
}
