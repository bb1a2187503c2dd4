//! `Neap`: the process's memory manager as Rust's global allocator.
//!
//! Sits between Rust's collections and [`PROCESS`]. No state of its own.

use crate::process::PROCESS;
use core::alloc::{GlobalAlloc, Layout};

/// The process's memory manager, for `#[global_allocator]`.
///
/// ```
/// #[global_allocator]
/// static ALLOCATOR: neap::Neap = neap::Neap;
///
/// let words = vec![1_u64; 1000];
/// assert_eq!(words.iter().sum::<u64>(), 1000);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Neap;

// SAFETY: the manager hands out every byte once, on the alignment asked for, and unwinds never.
unsafe impl GlobalAlloc for Neap {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PROCESS.allocate_aligned(layout.size(), layout.align())
    }

    #[inline]
    unsafe fn dealloc(&self, pointer: *mut u8, _layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { PROCESS.free(pointer) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        PROCESS.allocate_zeroed_aligned(layout.size(), layout.align())
    }

    #[inline]
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { PROCESS.reallocate_aligned(pointer, size, layout.align()) }
    }
}
