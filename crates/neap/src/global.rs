//! [`Neap`]: the process's memory manager as Rust's global allocator. This module has no state.

use crate::process::PROCESS;
use crate::state::checked::NamedSize;
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

// SAFETY: the manager hands out every byte to one owner until it is freed. The memory has the
// requested size and alignment. The functions never unwind.
unsafe impl GlobalAlloc for Neap {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PROCESS.allocate_aligned(layout.size(), layout.align())
    }

    #[inline]
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: this allocator returned `pointer`, and no thread uses the memory any more (the
        // contract of `dealloc`).
        unsafe { PROCESS.free_named(pointer, NamedSize::Exact(layout.size())) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        PROCESS.allocate_zeroed_aligned(layout.size(), layout.align())
    }

    #[inline]
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: this allocator returned `pointer` with the alignment of `layout`. No thread uses
        // the memory any more if the call succeeds (the contract of `realloc`).
        unsafe { PROCESS.reallocate_aligned(pointer, size, layout.align()) }
    }
}
