//! Refill from slabs: takes objects out of slabs, in a fixed order, if neither the stack nor the
//! barn has any.
//!
//! # Design
//!
//! A thread takes the first of these that exists:
//! 1. free objects with memory, in slabs of the near node;
//! 2. a slab over pages that [`reuse`](crate::reuse) made of free objects;
//! 3. free objects in [holes](crate::holes) of the near node's slabs;
//! 4. a new slab;
//! 5. free objects of any node.
//!
//! The steps 3 and 4 take memory from the system. In step 5 a thread may wait until the release of
//! a slab's pages ends.
//!
//! # Locking
//!
//! A thread holds one class's mutex at a time, for one call of a function of the cache. It
//! allocates pages without the mutex.

use crate::class_cache::Row;
use crate::holes::HollowTaken;
use crate::objects::{NewSlab, Objects};
use crate::size_class::Class;
use crate::slab::{On, SlabId};
use crate::slab_free::Loose;
use core::ptr::NonNull;
use neap_base::gate::Inside;
use neap_base::{Order, Platform};

impl<P: Platform> Objects<P> {
    /// Takes up to `most` objects out of slabs of a class: near ones, reused pages, near holes, a
    /// new slab, or else any slab. Returns the number taken.
    pub(crate) fn take(&self, inside: &Inside<'_>, class: Class, most: usize, mut each: impl FnMut(Row)) -> usize {
        let near = self.pages.nearest(&self.platform);
        let taken = self.take_from_partial(near, class, most, &mut each);
        if taken > 0 {
            return taken;
        }
        let order = Order(class.slab_shape(self.pages.page_size()).order);
        let resident = || self.pages.allocate_resident_block(&self.platform, order);
        if let Some(block) = self.reuse_before_growth(inside, order.pages(), resident) {
            let taken = self.take_from_slab(self.make_slab(class, block), class, most, &mut each);
            if taken > 0 {
                return taken;
            }
        }
        let taken = self.refill_holes(near, class, most, &mut each);
        if taken > 0 {
            return taken;
        }
        match self.take_from_new(class, most, &mut each) {
            0 => self.take_from_any(class, most, each),
            taken => taken,
        }
    }

    /// Takes up to `most` objects out of slabs of any node, when there is no page for a new slab.
    #[cold]
    fn take_from_any(&self, class: Class, most: usize, mut each: impl FnMut(Row)) -> usize {
        let from = |node: usize, each: &mut dyn FnMut(Row)| {
            if self.shared(node, class).lock().isolated.length > 0 {
                self.pages.node(node).await_release(&self.platform);
            }
            self.take_from_slabs(node, class, most, each)
        };
        (0..self.pages.nodes()).map(|node| from(node, &mut each)).find(|&taken| taken > 0).unwrap_or(0)
    }

    /// Allocates an object for neap itself, from its slab directly. Its state byte is 0, so the
    /// free of its address by the program is detected.
    pub(crate) fn private_memory(&self, class: Class) -> Option<NonNull<u8>> {
        let near = self.pages.nearest(&self.platform);
        let (mut row, mut loose) = (None, Loose::default());
        {
            let mut cache = self.cache(near, class).lock();
            // SAFETY: the class's mutex is held, and the table is that of its slabs.
            unsafe { cache.take(&self.slabs, 1, |found| row = Some(found)) };
            row.iter().for_each(|row| self.make_private(row.slab, &mut loose));
        }
        // Does not call `reuse_before_growth`: bursts call this function, and memory that serves
        // the rest of a burst is no surplus.
        if row.is_none()
            && (self.refill_holes(near, class, 1, |found| row = Some(found)) > 0
                || self.take_from_new(class, 1, |found| row = Some(found)) > 0)
            && let Some(row) = &row
        {
            let _cache = self.shared(self.node_of(self.first_of(class, row)), class).lock();
            self.make_private(row.slab, &mut loose);
        }
        self.give_back(loose);
        NonNull::new(self.first_of(class, &row?))
    }

    /// Counts an object that was just taken out of a slab as neap's own. The caller holds the
    /// class's lock.
    fn make_private(&self, slab: SlabId, loose: &mut Loose) {
        // SAFETY: the caller holds the lock, and has no other reference to the slab.
        unsafe {
            self.slabs.get(slab).private += 1;
            self.detach_unused(slab, &mut loose.vectors);
        }
    }

    /// Takes up to `most` objects out of existing slabs of a node. Returns the number taken.
    pub(crate) fn take_from_slabs(&self, node: usize, class: Class, most: usize, mut each: impl FnMut(Row)) -> usize {
        match self.take_from_partial(node, class, most, &mut each) {
            0 => self.refill_holes(node, class, most, each),
            taken => taken,
        }
    }

    /// Takes up to `most` objects out of existing slabs of a node, none from a hole. Returns the
    /// number taken.
    fn take_from_partial(&self, node: usize, class: Class, most: usize, each: impl FnMut(Row)) -> usize {
        // SAFETY: the class's mutex is held, and the table is that of its slabs.
        unsafe { self.cache(node, class).lock().take(&self.slabs, most, each) }
    }

    /// Takes up to `most` objects out of a slab whose free objects all lie in holes, and populates
    /// these holes. Returns the number taken.
    // Not inlined: the caller goes on to make a slab, with little stack.
    #[inline(never)]
    fn refill_holes(&self, node: usize, class: Class, most: usize, mut each: impl FnMut(Row)) -> usize {
        let pages = self.pages.node(node);
        if self.shared(node, class).lock().hollow.length == 0 {
            return 0;
        }
        // The most pages that an object touches.
        let per_object = class.size().div_ceil(self.pages.page_size()) as u32 + 1;
        let wanted = (most as u32).saturating_mul(per_object).min(neap_pages::MOST_PAGES);
        let charged = match pages.charge_holes(wanted) {
            0 => pages.charge_holes(per_object),
            charged => charged,
        };
        let (mut taken, mut found) = (HollowTaken { objects: 0, filled: 0 }, None);
        if charged > 0 {
            let mut cache = self.cache(node, class).lock();
            if let Some(slab) = cache.hollow.first() {
                // SAFETY: the class's mutex is held, and the slab is on one of the cache's lists.
                unsafe {
                    let row = |objects| each(Row { slab, objects });
                    taken = self.slabs.take_hollow(slab, most, charged, row);
                    if taken.objects > 0 {
                        let on = if self.slabs.get(slab).free == 0 { On::Nothing } else { cache.partial.on };
                        cache.move_to(&self.slabs, slab, on);
                    }
                    found = Some(self.slabs.get(slab).pfn);
                }
                cache.free -= taken.objects as u64;
                cache.holes -= u64::from(taken.filled.count_ones());
            }
        }
        let HollowTaken { objects, filled } = taken;
        pages.uncharge_holes(charged - filled.count_ones());
        if let Some(pfn) = found.filter(|_| filled != 0) {
            // The lowest objects were taken, so no hole is left between the first filled page and
            // the last.
            let (first, end) = (filled.trailing_zeros(), u64::BITS - filled.leading_zeros());
            let length = (end - first) as usize * self.pages.page_size();
            pages.shed(&self.platform);
            // If the system refuses, the pages come one by one as the program touches them.
            let _ = self.platform.populate(self.pages.address(pfn.plus(first)), length);
        }
        objects
    }

    /// Makes a slab, then adds it and takes objects from it under one hold of the class's lock.
    /// Only the free of a slab's last object frees the slab, so a slab of which no object was taken
    /// would stay.
    pub(crate) fn take_from_new(&self, class: Class, most: usize, each: impl FnMut(Row)) -> usize {
        self.take_from_slab(self.new_slab(class), class, most, each)
    }

    /// Adds a slab that was just made, if there is one, and takes up to `most` objects from it.
    /// Returns the number taken.
    fn take_from_slab(&self, made: Option<NewSlab>, class: Class, most: usize, each: impl FnMut(Row)) -> usize {
        let Some(NewSlab { slab, node }) = made else { return 0 };
        let mut cache = self.cache(node, class).lock();
        // SAFETY: the class's mutex is held, and the slab is new, so it is on no list.
        unsafe {
            cache.add(&self.slabs, slab);
            cache.take(&self.slabs, most, each)
        }
    }
}
