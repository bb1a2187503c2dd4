//! Where objects come from when neither stack nor barn has any: slabs, and in which order.
//!
//! Sits between the slow way of allocating and class caches, holes and fresh slabs. First come free objects with memory behind
//! them; then, since both take memory from the system, holes that are filled again, and then a new slab; then the slabs of
//! other nodes. Locks: a class cache's mutex at a time, held for one call of it; pages are asked for outside. Never waits,
//! but for pages that are on their way to the system while there are no others.

use crate::class_cache::Row;
use crate::flush::Loose;
use crate::objects::Objects;
use crate::size_class::Class;
use crate::slab::{On, SlabId};
use core::ptr::NonNull;
use neap_base::{Order, Platform};

impl<P: Platform> Objects<P> {
    /// Takes up to `most` objects out of the near slabs of a class, with a new slab if they have none, or else out of any;
    /// answers how many.
    pub(crate) fn take(&self, class: Class, most: usize, mut each: impl FnMut(Row)) -> usize {
        let near = self.pages.nearest(&self.platform);
        let taken = self.take_from_partial(near, class, most, &mut each);
        if taken > 0 {
            return taken;
        }
        let order = Order(class.slab_shape(self.pages.page_size()).order);
        let resident = || self.pages.allocate_resident_block(&self.platform, order);
        if let Some(block) = self.reuse_before_growth(order.pages(), resident) {
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

    /// The same where no page is to be had.
    #[cold]
    fn take_from_any(&self, class: Class, most: usize, mut each: impl FnMut(Row)) -> usize {
        let from = |node: usize, each: &mut dyn FnMut(Row)| {
            if self.cache(node, class).lock().isolated.length > 0 {
                self.pages.node(node).await_release(&self.platform);
            }
            self.take_from_slabs(node, class, most, each)
        };
        (0..self.pages.nodes()).map(|node| from(node, &mut each)).find(|&taken| taken > 0).unwrap_or(0)
    }

    /// An object for neap itself: it comes from its slab directly and is in no state, so that freeing it by hand is found
    /// out.
    pub(crate) fn private_memory(&self, class: Class) -> Option<NonNull<u8>> {
        let near = self.pages.nearest(&self.platform);
        let (mut row, mut loose) = (None, Loose::default());
        {
            let mut cache = self.cache(near, class).lock();
            // SAFETY: the lock is held.
            unsafe { cache.take(&self.slabs, 1, |found| row = Some(found)) };
            row.iter().for_each(|row| self.make_private(row.slab, &mut loose));
        }
        // Called within bursts: what the rest of one is served from is no surplus.
        if row.is_none()
            && (self.refill_holes(near, class, 1, |found| row = Some(found)) > 0
                || self.take_from_new(class, 1, |found| row = Some(found)) > 0)
            && let Some(row) = &row
        {
            let _cache = self.cache(self.node_of(self.first_of(class, row)), class).lock();
            self.make_private(row.slab, &mut loose);
        }
        self.give_back(loose);
        NonNull::new(self.first_of(class, &row?))
    }

    /// Counts an object of a slab that was just taken as neap's own, under the class's lock.
    fn make_private(&self, slab: SlabId, loose: &mut Loose) {
        // SAFETY: the caller holds the lock, and has no other reference to the slab.
        unsafe {
            self.slabs.get(slab).private += 1;
            self.detach_unused(slab, &mut loose.vectors);
        }
    }

    /// Takes up to `most` objects out of slabs of a node that are there.
    pub(crate) fn take_from_slabs(&self, node: usize, class: Class, most: usize, mut each: impl FnMut(Row)) -> usize {
        match self.take_from_partial(node, class, most, &mut each) {
            0 => self.refill_holes(node, class, most, each),
            taken => taken,
        }
    }

    /// The same, but none in holes.
    fn take_from_partial(&self, node: usize, class: Class, most: usize, each: impl FnMut(Row)) -> usize {
        // SAFETY: the lock is held.
        unsafe { self.cache(node, class).lock().take(&self.slabs, most, each) }
    }

    /// Takes up to `most` objects out of a slab whose free objects all lie in holes, and has these filled.
    fn refill_holes(&self, node: usize, class: Class, most: usize, mut each: impl FnMut(Row)) -> usize {
        let pages = self.pages.node(node);
        if self.cache(node, class).lock().hollow.length == 0 {
            return 0;
        }
        // What so many objects touch at most, however they lie.
        let per_object = class.size().div_ceil(self.pages.page_size()) as u32 + 1;
        let wanted = (most as u32).saturating_mul(per_object).min(neap_pages::MOST_PAGES);
        let charged = match pages.charge_holes(wanted) {
            0 => pages.charge_holes(per_object),
            charged => charged,
        };
        let (mut taken, mut filled, mut found) = (0, 0, None);
        if charged > 0 {
            let mut cache = self.cache(node, class).lock();
            if let Some(slab) = cache.hollow.first() {
                // SAFETY: the lock is held; the slab is on one of the cache's lists.
                unsafe {
                    let row = |objects| each(Row { slab, objects });
                    (taken, filled) = self.slabs.take_hollow(slab, most, charged, row);
                    if taken > 0 {
                        let on = if self.slabs.get(slab).free == 0 { On::Nothing } else { cache.partial.on };
                        cache.move_to(&self.slabs, slab, on);
                    }
                    found = Some(self.slabs.get(slab).pfn);
                }
                cache.free -= taken as u64;
                cache.holes -= u64::from(filled.count_ones());
            }
        }
        pages.uncharge_holes(charged - filled.count_ones());
        if let Some(pfn) = found.filter(|_| filled != 0) {
            // All the holes between the first and the last: the lowest objects come first.
            let (first, end) = (filled.trailing_zeros(), u64::BITS - filled.leading_zeros());
            let length = (end - first) as usize * self.pages.page_size();
            // Refused, the program has it page by page as it touches it.
            let _ = self.platform.populate(self.pages.address(pfn.plus(first)), length);
        }
        taken
    }

    /// Adds a new slab and takes from it under one hold of the lock: left wholly free, it would never be given back.
    pub(crate) fn take_from_new(&self, class: Class, most: usize, each: impl FnMut(Row)) -> usize {
        self.take_from_slab(self.new_slab(class), class, most, each)
    }

    /// Adds a slab that was just made, if there is one, and takes from it.
    fn take_from_slab(&self, slab: Option<(SlabId, usize)>, class: Class, most: usize, each: impl FnMut(Row)) -> usize {
        let Some((slab, node)) = slab else { return 0 };
        let mut cache = self.cache(node, class).lock();
        // SAFETY: the slab is new; the lock is held. The list's first slab is the one that was put there last.
        unsafe {
            cache.add(&self.slabs, slab);
            cache.take(&self.slabs, most, each)
        }
    }
}
