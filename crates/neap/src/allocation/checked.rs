//! Checks of what the program writes (`check:on`), for tests and canaries.
//!
//! # Design
//! The fast paths stay closed, so the slow paths serve every call. An allocation is a block of the
//! layers below with three parts:
//!
//! | part | bytes | contents |
//! |---|---|---|
//! | front | the alignment, at least 64 | [`FILL`], and a [`Label`] in the last 48 bytes |
//! | the program's | as it asked for | |
//! | tail | at least 16, up to the end of the block | [`FILL`] |
//!
//! The label holds the size, two links of a list, and a checksum of itself and its address. A free
//! verifies front and tail, and fills the program's part with [`FREED`]. Then it appends the block
//! to the list of freed blocks. While the list has more than [`KEPT`] bytes, it verifies the oldest
//! block again, and frees it to the layers below. The end of the process verifies all blocks, freed
//! or not. If a check fails, neap prints one line and aborts the process.
//!
//! `free_sized`, C++'s sized delete and Rust's `dealloc` name a size. It must be the requested
//! size. With [`NamedSize::Within`] it may be larger, up to the usable size.
//!
//! One mutex guards both lists. No thread holds it while it allocates or frees in the layers below.

use crate::mm::{Core, Mm, is_beyond_any};
use crate::state::checked::{GONE, LIVE, Label, NamedSize, label, pointer, write};
use core::ptr::{NonNull, null_mut};
use neap_base::Platform;
use neap_objects::size_class::{Class, GRAIN};
use neap_os::fatal::die;

/// The least bytes in front of the program's part.
const LEAST_FRONT: usize = 64;
/// The least bytes behind the program's part.
const LEAST_TAIL: usize = 16;
/// The most bytes of a front that are verified. A large alignment makes a longer front.
const MOST_VERIFIED: usize = 4096;
/// Contents of front and tail.
const FILL: u8 = 0xfd;
/// Contents of the program's part after a free.
const FREED: u8 = 0xdf;
/// The most bytes of freed blocks that are kept.
const KEPT: usize = 16 << 20;

/// Returns the offset of the first byte of a range that is not `fill`.
///
/// # Safety
/// The range lies in the front or the tail of a block, or in a freed block.
unsafe fn first_other(start: usize, bytes: usize, fill: u8) -> Option<usize> {
    // SAFETY: the range lies in a block of the checks and belongs to them (the caller's promise).
    let bytes = unsafe { core::slice::from_raw_parts(pointer::<u8>(start), bytes) };
    bytes.iter().position(|&byte| byte != fill)
}

impl<P: Platform> Core<P> {
    /// Verifies front and tail of a block that has a valid label.
    fn verify_edges(&self, address: usize, label: Label, call: &str) {
        let Label { size, front, .. } = label;
        let start = address + size_of::<Label>();
        let before = (front - size_of::<Label>()).min(MOST_VERIFIED);
        // SAFETY: the range lies in the front of the block, before the label.
        if let Some(found) = unsafe { first_other(address - before, before, FILL) } {
            let bytes = before - found + size_of::<Label>();
            die(format_args!(
                "write before the start: {call}: {start:#x} ({size} bytes) was written to {bytes} bytes before its start"
            ));
        }
        let tail = self.usable_size(pointer(start - front), call) - front - size;
        // SAFETY: the range is the tail of the block.
        if let Some(found) = unsafe { first_other(start + size, tail, FILL) } {
            die(format_args!(
                "write beyond the end: {call}: {start:#x} ({size} bytes) was written to {} bytes beyond its end",
                found + 1
            ));
        }
    }

    /// Verifies that the program has not written to a block since it freed the block.
    fn verify_freed(&self, address: usize, label: Label, call: &str) {
        let Label { size, .. } = label;
        let start = address + size_of::<Label>();
        // SAFETY: the range is the program's part of a freed block.
        if let Some(found) = unsafe { first_other(start, size, FREED) } {
            die(format_args!(
                "write after free: {start:#x} ({size} bytes) was written to at byte {found} after it was freed; found \
                 by {call}"
            ));
        }
        self.verify_edges(address, label, call);
    }

    /// Returns the label of the allocation at `memory`. Any other pointer ends the process.
    fn label_of(&self, memory: *const u8, call: &str) -> Label {
        let class = self.class_of(memory, call);
        let address = memory.addr() - size_of::<Label>();
        let may_begin = memory.addr().is_multiple_of(GRAIN) && self.objects.class_at(pointer(address)).is_some();
        // SAFETY: the label may lie on a page of another allocation, but in the arena, which is
        // mapped. A pointer directly behind a hole of the arena may cause SIGSEGV.
        let found = may_begin.then(|| unsafe { pointer::<Label>(address).read() });
        if let Some(found) = found.filter(|found| found.sum == found.sum_at(address)) {
            match found.state {
                LIVE => return found,
                _ => die(format_args!("double free: {call}: {memory:p} ({} bytes) is free already", found.size)),
            }
        }
        let into = if class == Class::NONE { 0 } else { self.objects.offset_in(class, memory) };
        die(format_args!(
            "bad pointer, or write before the start: {call}: {memory:p} is no allocation, or the bytes before it were \
             overwritten (it is {into} bytes into a block)"
        ))
    }
}

impl<P: Platform> Mm<P> {
    /// Allocates `size` bytes, with a front and a tail. Their address is a multiple of `align`.
    /// Returns null if there is no memory.
    pub(crate) fn allocate_checked(&self, core: &Core<P>, size: usize, align: usize) -> *mut u8 {
        let front = align.max(LEAST_FRONT);
        let whole = size.checked_add(front + LEAST_TAIL).filter(|whole| !is_beyond_any(*whole, align));
        let block = whole.map_or(null_mut(), |whole| self.alloc_slow_charged(core, whole, align.max(GRAIN)).memory);
        let Some(block) = NonNull::new(block) else { return null_mut() };
        let usable = core.usable_size(block.as_ptr(), "malloc");
        let start = block.addr().get() + front;
        // SAFETY: the block is this call's. It has `usable` bytes, which are more than `front +
        // size`.
        unsafe {
            block.write_bytes(FILL, front);
            block.add(front + size).write_bytes(FILL, usable - front - size);
        }
        let address = start - size_of::<Label>();
        let label = Label { size, front, state: LIVE, older: 0, newer: 0, sum: 0 };
        let inside = self.gate.enter(core.objects.platform.cpu());
        // SAFETY: the label lies in the front of a block that the layers below have handed out to
        // this call. The block stays while it is in the list.
        unsafe { core.checked.lock(&inside).live.add(address, label, "malloc") };
        pointer(start)
    }

    /// Verifies an allocation and adds its block to the list of freed blocks. Frees the oldest
    /// blocks of the list while it has more than [`KEPT`] bytes. `named` is the size that the
    /// caller names.
    #[cold]
    pub(crate) fn free_checked(&self, core: &Core<P>, memory: *mut u8, named: Option<NamedSize>, call: &str) {
        self.end_sample_of_run(core, memory);
        self.put_freed(core, memory, named, call);
        while let Some(block) = self.take_freed(core) {
            self.free_block(core, block);
        }
    }

    /// Verifies an allocation, and adds its block to the end of the list of freed blocks.
    #[inline(never)]
    fn put_freed(&self, core: &Core<P>, memory: *mut u8, named: Option<NamedSize>, call: &str) {
        let inside = self.gate.enter(core.objects.platform.cpu());
        let mut checked = core.checked.lock(&inside);
        let label = core.label_of(memory, call);
        let address = memory.addr() - size_of::<Label>();
        core.verify_edges(address, label, call);
        let wrong = match named {
            Some(NamedSize::Exact(size)) if size != label.size => Some(size),
            Some(NamedSize::Within(size))
                if size < label.size || size > self.usable_size_of(label.size, label.front) =>
            {
                Some(size)
            }
            _ => None,
        };
        if let Some(wrong) = wrong {
            die(format_args!("size mismatch: {call}: {memory:p} has {} bytes, and is freed as {wrong}", label.size));
        }
        // SAFETY: `label_of` has found a live block, which is in the list of these. The program
        // frees its part. The block stays until `take_freed` takes it out of the other list.
        unsafe {
            checked.live.remove(address, call);
            memory.write_bytes(FREED, label.size);
            checked.gone.add(address, Label { state: GONE, ..label }, call);
        }
    }

    /// Takes the oldest freed block out of the list if the list has more than [`KEPT`] bytes.
    #[inline(never)]
    fn take_freed(&self, core: &Core<P>) -> Option<*mut u8> {
        let inside = self.gate.enter(core.objects.platform.cpu());
        let mut checked = core.checked.lock(&inside);
        let oldest = Some(checked.gone.oldest).filter(|_| checked.gone.bytes > KEPT)?;
        // SAFETY: the block is in the list, so it stays.
        let freed = unsafe { label(oldest, "free") };
        core.verify_freed(oldest, freed, "free");
        // No later free of the pointer finds a label of a live block.
        // SAFETY: the block is in the list, and stays until it is returned from here.
        unsafe {
            checked.gone.remove(oldest, "free");
            write(oldest, Label { state: 0, ..freed });
        }
        Some(pointer(oldest + size_of::<Label>() - freed.front))
    }

    /// Returns how many bytes the program requested for the allocation at `memory`.
    pub(crate) fn usable_checked(&self, core: &Core<P>, memory: *const u8, call: &str) -> usize {
        let inside = self.gate.enter(core.objects.platform.cpu());
        let _checked = core.checked.lock(&inside);
        core.label_of(memory, call).size
    }

    /// Verifies all blocks, including freed ones. A failed check ends the process.
    #[cold]
    pub(crate) fn check_all(&self, call: &str) {
        let Some(core) = self.core_if_open().filter(|core| core.options.check) else { return };
        let inside = self.gate.enter(core.objects.platform.cpu());
        let checked = core.checked.lock(&inside);
        checked.live.each(call, |at, label| core.verify_edges(at, label, call));
        checked.gone.each(call, |at, label| core.verify_freed(at, label, call));
    }
}
