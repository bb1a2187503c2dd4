//! Collections whose memory a group pays for, whatever thread uses them.
//!
//! This module needs the feature `allocator-api2`. It has no state and no lock. See [`InGroup`].

use super::Group;
use crate::process::PROCESS;
use allocator_api2::alloc::{AllocError, Allocator, Layout};
use core::ptr::NonNull;

/// A vector whose memory a group pays for: `GroupVec::new_in(group.allocator())`.
pub type GroupVec<T> = allocator_api2::vec::Vec<T, InGroup>;

/// An allocator of neap's memory that charges a fixed group. [`Group::allocator`] returns it. The
/// group of the calling thread does not matter.
///
/// Use it with collections of `allocator_api2`, and with others that take its allocators, such as
/// hashbrown's maps. The charge ends when any thread frees the memory. A charge beyond a limit
/// succeeds, and is counted, unless `NEAP=refuse:on` is set. After the group's deletion its heir is
/// charged.
///
/// The process needs no [`Neap`](crate::Neap) as its global allocator. After the first allocation
/// every thread's malloc checks whether the thread is in a group, until the process ends.
///
/// ```
/// use neap::groups::{Group, GroupVec};
///
/// let query = Group::create("queries/23")?;
/// let mut rows = GroupVec::new_in(query.allocator());
/// rows.resize(1 << 20, 0_u8);
/// assert!(query.used()? >= 1 << 20);
/// std::thread::spawn(|| drop(rows)).join().unwrap();
/// assert!(query.used()? < 1 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The type implements Rust's unstable trait `Allocator` in the form of the crate `allocator-api2`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InGroup(Group);

impl Group {
    /// Returns an allocator whose memory the group pays for.
    pub const fn allocator(self) -> InGroup {
        InGroup(self)
    }
}

impl InGroup {
    /// Calls `allocate` with this thread in the group. `allocate` returns null, or memory of at
    /// least `layout.size()` bytes.
    fn paid(self, layout: Layout, allocate: impl FnOnce() -> *mut u8) -> Result<NonNull<[u8]>, AllocError> {
        let before = PROCESS.enter(Some(self.0.0));
        let memory = allocate();
        PROCESS.leave(before);
        NonNull::new(memory).map(|memory| NonNull::slice_from_raw_parts(memory, layout.size())).ok_or(AllocError)
    }

    /// Resizes memory in place, or moves it.
    ///
    /// # Safety
    /// Those of [`Allocator::grow`] or [`Allocator::shrink`].
    unsafe fn resize(self, pointer: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if old.size() > 0 && new.size() > 0 && old.align() >= new.align() {
            // SAFETY: the old memory has more than 0 bytes, so it came from this process's manager.
            // It has the old alignment. No thread uses it any more if the call succeeds (the
            // caller's promise).
            return self.paid(new, || unsafe { PROCESS.reallocate_aligned(pointer.as_ptr(), new.size(), old.align()) });
        }
        let memory = self.allocate(new)?;
        let kept = old.size().min(new.size());
        // SAFETY: the old memory has `old.size()` bytes (the caller's promise), the new one has
        // `new.size()`. They do not overlap.
        unsafe { memory.cast::<u8>().copy_from_nonoverlapping(pointer, kept) };
        // SAFETY: the memory came from this allocator with the layout `old`. No thread uses it any
        // more once this function succeeds (the caller's promise).
        unsafe { self.deallocate(pointer, old) };
        Ok(memory)
    }
}

// SAFETY: the manager hands out every byte to one owner until it is freed, with the requested
// alignment. Copies of an allocator share the process's manager, which never moves.
unsafe impl Allocator for InGroup {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if layout.size() == 0 {
            return Ok(NonNull::slice_from_raw_parts(dangling(layout), 0));
        }
        self.paid(layout, || PROCESS.allocate_aligned(layout.size(), layout.align()))
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if layout.size() == 0 {
            return self.allocate(layout);
        }
        self.paid(layout, || PROCESS.allocate_zeroed_aligned(layout.size(), layout.align()))
    }

    unsafe fn deallocate(&self, pointer: NonNull<u8>, layout: Layout) {
        if layout.size() > 0 {
            // SAFETY: the memory has more than 0 bytes, so it came from this process's manager. No
            // thread uses it any more (the contract of `deallocate`).
            unsafe { PROCESS.free(pointer.as_ptr()) };
        }
    }

    unsafe fn grow(&self, pointer: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
        // SAFETY: the caller fulfils the conditions of `grow`, which are those of `resize`.
        unsafe { self.resize(pointer, old, new) }
    }

    unsafe fn shrink(&self, pointer: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
        // SAFETY: the caller fulfils the conditions of `shrink`, which are those of `resize`.
        unsafe { self.resize(pointer, old, new) }
    }
}

/// Returns a pointer with the alignment of `layout`. It leads to no memory.
fn dangling(layout: Layout) -> NonNull<u8> {
    NonNull::without_provenance(core::num::NonZero::new(layout.align()).unwrap_or(core::num::NonZero::<usize>::MIN))
}
