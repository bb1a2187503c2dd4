//! A region: all stacks of one CPU, in one piece of memory.
//!
//! # Layout
//!
//! A region begins with a mark that says whether threads may write to it. The stacks follow one
//! cache line later, two for each class, then their cells. Below each stack's lowest cell lies
//! another cell, which holds null.
//!
//! # Locking
//!
//! This module takes no lock. A thread that changes a region must have exclusive access to it.

use crate::size_class::{CLASSES, Class};
use core::sync::atomic::Ordering;
use neap_os::rseq::Stack;

/// Number of stacks in a region: two for each class of objects.
const STACKS: usize = 2 * (CLASSES - 1);

/// Offset of the first stack in a region. It is not 0, since programs write to page starts; see
/// [`FastPath`](crate::fast_path::FastPath).
const FIRST: usize = 64;

/// Offset of the end of the stacks.
pub(crate) const STACKS_END: usize = FIRST + STACKS * size_of::<Stack>();

/// Offset of each stack's cells in a region, in bytes. They lie behind all stacks.
const CELLS: [usize; STACKS] = layout().0;

/// Bytes of a region.
pub(crate) const REGION: usize = layout().1.next_multiple_of(4096);

const fn layout() -> ([usize; STACKS], usize) {
    let mut cells = [0; STACKS];
    let mut next = STACKS_END;
    let mut stack = 0;
    while stack < STACKS {
        cells[stack] = next + size_of::<usize>();
        next = cells[stack] + StackId(stack as u8).capacity() as usize * size_of::<usize>();
        stack += 1;
    }
    (cells, next)
}

/// One of a CPU's stacks, by class and by local or remote objects. It is valid in every region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StackId(u8);

impl StackId {
    /// A class's stack of local objects, which malloc pops from.
    pub const fn local(class: Class) -> StackId {
        StackId(2 * (class.0 - 1))
    }

    /// A class's stack of remote objects, on their way to the barn. It lies directly behind the
    /// stack of local objects, as [`push`](neap_os::rseq::push) requires.
    pub const fn remote(class: Class) -> StackId {
        StackId(2 * (class.0 - 1) + 1)
    }

    /// The first stack of a region.
    pub(crate) const FIRST: StackId = StackId(0);

    /// Number of stacks of a class, which lie one after the other.
    pub(crate) const OF_CLASS: usize = 2;

    /// Every stack.
    pub fn all() -> impl Iterator<Item = StackId> {
        (0..STACKS as u8).map(StackId)
    }

    /// The class of its objects.
    pub const fn class(self) -> Class {
        Class(self.0 / 2 + 1)
    }

    /// Whether the stack is for remote objects.
    pub const fn is_remote(self) -> bool {
        self.0 % 2 == 1
    }

    /// Number of objects that the stack has room for at first.
    pub const fn first_capacity(self) -> u32 {
        if self.is_remote() { self.capacity() } else { self.class().stack_capacity() }
    }

    /// Largest number of objects that the stack ever has room for. A remote stack fits into one
    /// sheaf.
    pub const fn capacity(self) -> u32 {
        if self.is_remote() { self.class().sheaf_capacity() } else { self.class().most_capacity() }
    }

    /// Offset of the stack in a region, in bytes.
    pub(crate) const fn offset(self) -> u16 {
        const { assert!(STACKS_END <= u16::MAX as usize) };
        (FIRST + self.0 as usize * size_of::<Stack>()) as u16
    }

    /// Address of the stack's cells.
    pub(crate) fn cells(self, region: usize) -> usize {
        region + CELLS[usize::from(self.0)]
    }
}

impl Class {
    /// Offset of the class's local stack in a region, in bytes; 0 for [`Class::NONE`]. No stack has
    /// offset 0, where the region's mark lies.
    #[inline(always)]
    pub const fn stack_offset(self) -> u16 {
        if self.0 == 0 { 0 } else { StackId::local(self).offset() }
    }

    /// The class of a [stack offset](Class::stack_offset).
    pub const fn of_stack_offset(offset: u16) -> Class {
        let Some(beyond) = (offset as usize).checked_sub(FIRST) else { return Class::NONE };
        StackId((beyond / size_of::<Stack>()) as u8).class()
    }
}

/// The objects of a stack that the caller has alone, lowest first.
pub(crate) fn objects(stack: &Stack) -> &[*mut u8] {
    let (head, bottom) = (stack.head.load(Ordering::Relaxed), stack.bottom.load(Ordering::Relaxed));
    // SAFETY: the caller has the stack alone, and the cells from bottom to head hold its objects.
    unsafe { core::slice::from_raw_parts(bottom, (head.addr() - bottom.addr()) / size_of::<usize>()) }
}

/// Makes a stack empty and without room. The caller has the region alone.
pub(crate) fn clear(region: usize, id: StackId) {
    let (stack, cells) = (stack(region, id), at(id.cells(region)));
    stack.head.store(cells, Ordering::Relaxed);
    stack.bottom.store(cells, Ordering::Relaxed);
    stack.end.store(cells, Ordering::Relaxed);
}

/// Bytes of the closed region: the stacks of a region, one cell for all of them, and the cell
/// below, which holds null.
pub(crate) const CLOSED_REGION_BYTES: usize = (STACKS_END + 2 * size_of::<usize>()).next_multiple_of(128);

/// Makes the closed region at `address`, where the caller has [`CLOSED_REGION_BYTES`] zeroed bytes
/// alone. No stack has objects or room, and the mark forbids writes.
pub(crate) fn make_closed_region(address: usize) {
    for id in StackId::all() {
        let (stack, cell) = (stack(address, id), at(closed_region_cell(address)));
        [&stack.head, &stack.bottom, &stack.end].into_iter().for_each(|pointer| pointer.store(cell, Ordering::Relaxed));
    }
}

/// Address of the cell that all stacks of the closed region share.
pub(crate) const fn closed_region_cell(address: usize) -> usize {
    address + STACKS_END + size_of::<usize>()
}

/// Copies the stacks that are not wanted to a region with empty stacks. The caller has both alone.
pub(crate) fn keep(from: usize, to: usize, wanted: &impl Fn(Class) -> bool) {
    for id in StackId::all().filter(|id| !wanted(id.class())) {
        let (from, to) = (stack(from, id), stack(to, id));
        let (old, new) = (from.bottom.load(Ordering::Relaxed), to.bottom.load(Ordering::Relaxed));
        // SAFETY: the caller has both regions alone. They are different ones, with as many cells
        // for each stack.
        unsafe { new.copy_from_nonoverlapping(old, objects(from).len()) };
        // Pointers keep their distance from the bottom.
        let moved = |pointer: *mut *mut u8| new.wrapping_byte_add(pointer.addr() - old.addr());
        to.head.store(moved(from.head.load(Ordering::Relaxed)), Ordering::Relaxed);
        to.end.store(moved(from.end.load(Ordering::Relaxed)), Ordering::Relaxed);
    }
}

pub(crate) fn stack(region: usize, id: StackId) -> &'static Stack {
    // SAFETY: every region has a stack at each `StackId`'s place. Regions stay mapped until
    // `CpuCaches::close`, and a stack consists of atomics. `'static` is longer than that, but no
    // function of this crate passes the reference on beyond `close`.
    unsafe { &*at::<Stack>(region + usize::from(id.offset())) }
}

pub(crate) fn at<T>(address: usize) -> *mut T {
    core::ptr::with_exposed_provenance_mut(address)
}
