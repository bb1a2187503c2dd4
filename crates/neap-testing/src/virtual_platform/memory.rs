//! Replacement of memory calls under Miri, which supports few system calls: memory is the
//! allocator's.

use neap_os::Errno;
pub(super) use neap_os::memory::SCATTERED_RANGES;
use std::alloc::{Layout, alloc_zeroed, dealloc};

pub(super) fn page_size() -> usize {
    4096
}

pub(super) fn is_grantable(_length: usize) -> bool {
    true
}

pub(super) fn map_at(_address: usize, _length: usize) -> Result<(), Errno> {
    Err(Errno::NOMEM)
}

pub(super) fn huge_pages(_address: usize, _length: usize, _huge: super::HugePages) -> Result<(), Errno> {
    Ok(())
}

pub(super) fn map(length: usize) -> Result<usize, Errno> {
    let layout = Layout::from_size_align(length, page_size()).map_err(|_| Errno::NOMEM)?;
    // SAFETY: no test maps 0 bytes, so the layout has a size.
    Ok(unsafe { alloc_zeroed(layout) }.expose_provenance())
}

pub(super) use map as reserve;

/// # Safety
/// The range lies in one that [`reserve`] returned.
pub(super) unsafe fn open(_address: usize, _length: usize) -> Result<(), Errno> {
    Ok(())
}

/// # Safety
/// The range is the whole of one that [`map`] returned, and no code uses it any more.
pub(super) unsafe fn unmap(address: usize, length: usize) -> Result<(), Errno> {
    let layout = Layout::from_size_align(length, page_size()).map_err(|_| Errno::NOMEM)?;
    // SAFETY: the caller promises all of a range that `map` allocated with this layout.
    unsafe { dealloc(core::ptr::with_exposed_provenance_mut(address), layout) };
    Ok(())
}

/// # Safety
/// The contents are no longer needed.
pub(super) unsafe fn release(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: the caller promises that the contents are not needed; the range lies in one that
    // `map` made.
    unsafe { core::ptr::with_exposed_provenance_mut::<u8>(address).write_bytes(0, length) };
    Ok(())
}

pub(super) fn populate(_address: usize, _length: usize) -> Result<(), Errno> {
    Ok(())
}

/// # Safety
/// None: the call moves nothing.
pub(super) unsafe fn move_pages(_from: usize, _to: usize, _length: usize) -> Result<(), Errno> {
    Err(Errno::INVAL)
}
