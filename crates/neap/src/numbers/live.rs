//! Live counters: the part of the page of numbers that needs no tick. The process stores most
//! counters where it changes their values.
//!
//! # Design
//! A zone stores its page counts whenever its lock is released, and a class cache likewise
//! ([`ZoneCell`], [`ClassCell`]). A zone stores its counts since the start where they change. Runs
//! are counted where they are allocated and freed, and refusals and objects of shrinkers where an
//! allocation is refused and a callback has ended. So the numbers need neither a tick nor a thread,
//! and a stopped process has them too. The fast path stores nothing, so objects on the stacks of
//! CPUs count as the last tick found them.
//!
//! Pages in the lists of CPUs are not counted. A reader computes their number: the pages that zones
//! have handed out, minus those of slabs and runs.
//!
//! # Format
//! After the control channel, in this order: [`LiveHead`], a [`ZoneCell`] for each node, a
//! [`ClassShape`] for each class, [`ClassCell`]s node by node and class by class, and then the
//! text. Class 0 does not exist, so its shape and cells are unused.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use neap_objects::live::ClassCell;
use neap_objects::size_class::{CLASSES, Class};
use neap_os::memory;
use neap_pages::ZoneCell;

/// Numbers of the whole instance.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct LiveHead {
    /// Bytes of a page.
    page_size: AtomicU32,
    nodes: AtomicU32,
    /// Number of shapes, and of class cells of each node.
    classes: AtomicU32,
    /// Bytes of runs that the program has.
    pub(crate) run_bytes: AtomicU64,
    /// Bytes of objects on the stacks of CPUs at the last tick.
    pub(crate) stacked_bytes: AtomicU64,
    /// The limit in bytes; 0: none.
    pub(crate) limit: AtomicU64,
    /// Number of refused allocations.
    pub(crate) refused: AtomicU64,
    /// Objects that the program's shrinkers have freed.
    pub(crate) shrunk: AtomicU64,
}

/// The slabs of a class.
#[derive(Debug)]
#[repr(C)]
struct ClassShape {
    /// Bytes of an object.
    size: AtomicU32,
    /// Objects of a slab.
    objects: AtomicU32,
    /// Pages of a slab.
    pages: AtomicU32,
    unused: AtomicU32,
}

/// The places of the parts in a page with `nodes` nodes, in bytes from the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageLayout {
    pub(crate) nodes: usize,
    /// Bytes for the text.
    pub(crate) text: usize,
}

impl PageLayout {
    /// Offset of the head.
    pub(crate) const HEAD: usize = 128;

    pub(crate) const fn zones_at(self) -> usize {
        PageLayout::HEAD + size_of::<LiveHead>()
    }

    const fn shapes_at(self) -> usize {
        self.zones_at() + self.nodes * size_of::<ZoneCell>()
    }

    pub(crate) const fn classes_at(self) -> usize {
        (self.shapes_at() + CLASSES * size_of::<ClassShape>()).next_multiple_of(align_of::<ClassCell>())
    }

    pub(crate) const fn text_at(self) -> usize {
        self.classes_at() + self.nodes * CLASSES * size_of::<ClassCell>()
    }

    /// Bytes of all parts with the text, in whole pages, but no more than `most`.
    pub(crate) fn bytes(self, most: usize) -> usize {
        (self.text_at() + self.text).next_multiple_of(memory::page_size()).min(most)
    }

    /// Writes the numbers that never change into the page at `address`, and returns the head.
    ///
    /// # Safety
    /// [`PageLayout::text_at`] bytes lie at `address`, a multiple of 64. They are initialised, and
    /// changed by atomic accesses only, for as long as the head is used.
    pub(crate) unsafe fn begin<'a>(self, address: usize) -> &'a LiveHead {
        // SAFETY: the range lies in the bytes at `address`, at a multiple of 64 from their start.
        // The bytes are initialised, and changed by atomic accesses only (the caller's promise).
        let head = unsafe { &*core::ptr::with_exposed_provenance::<LiveHead>(address + PageLayout::HEAD) };
        let page_size = memory::page_size();
        // Relaxed: the link to the cells, or the page's magic, is stored later.
        head.page_size.store(page_size as u32, Ordering::Relaxed);
        head.nodes.store(self.nodes as u32, Ordering::Relaxed);
        head.classes.store(CLASSES as u32, Ordering::Relaxed);
        let shapes = core::ptr::with_exposed_provenance::<ClassShape>(address + self.shapes_at());
        // SAFETY: the range lies in the bytes at `address`, at a multiple of 64 from their start.
        // The bytes are initialised, and changed by atomic accesses only (the caller's promise).
        let shapes = unsafe { core::slice::from_raw_parts(shapes, CLASSES) };
        for class in Class::all() {
            let (place, shape) = (&shapes[class.index()], class.slab_shape(page_size));
            place.size.store(class.size() as u32, Ordering::Relaxed);
            place.objects.store(shape.objects, Ordering::Relaxed);
            place.pages.store(1 << shape.order, Ordering::Relaxed);
        }
        head
    }
}
