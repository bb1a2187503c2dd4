//! The way back of what nobody needs: objects into their slabs, wholly free slabs to the pages, and with them what else goes.
//!
//! Sits between whoever has objects to put away (drains, barns, frees that go around a busy slot) and class caches, vectors of
//! owners and pages. Locks: a class cache's mutex at a time, for a batch of objects. What comes loose under it is gathered and
//! given back after it, one after the other and not one inside the other, however long the chain: a vector that goes may leave
//! a slab that has vectors itself.

use crate::class_cache::{FLUSH_BATCH, Place};
use crate::objects::Objects;
use crate::owners::VectorList;
use crate::size_class::Class;
use crate::slab::{SlabId, SlabList};
use crate::state::CACHED;
use neap_base::{Order, Platform};
use neap_os::write::die;
use neap_pages::State;

/// What came loose under a class's lock and is to be given back outside it.
#[derive(Default)]
pub(crate) struct Loose {
    /// Slabs that are wholly free.
    pub(crate) slabs: SlabList,
    /// Vectors that nobody has an entry in.
    pub(crate) vectors: VectorList,
}

impl<P: Platform> Objects<P> {
    /// Puts cached objects back into their slabs, and slabs that are wholly free back to the pages.
    ///
    /// They are looked at before their slabs, which may have gone. 1: two threads free an object, and each sees that the program has it. 2: it is in
    /// two cells of caches; one of them is handed out, or goes back with the whole slab. 3: the other comes here: it is in another state.
    pub(crate) fn flush(&self, class: Class, objects: &[*mut u8]) {
        self.repay(class, objects);
        for &object in objects {
            // SAFETY: the objects were in caches, so they lie in the arena.
            if !unsafe { self.states.change(object.addr(), CACHED, 0) } {
                freed_twice(class, object);
            }
        }
        let mut rest = objects;
        while let Some(&first) = rest.first() {
            // As many as are of one node.
            let node = self.node_of(first);
            let batch = &rest[..rest.len().min(FLUSH_BATCH)];
            let count = batch.iter().take_while(|&&object| self.node_of(object) == node).count();
            let mut loose = Loose::default();
            self.put_back(node, class, &batch[..count], false, &mut loose);
            rest = &rest[count..];
            self.give_back(loose);
        }
    }

    /// Gives memory back that is neap's own.
    pub(crate) fn flush_private(&self, class: Class, memory: *mut u8) {
        let mut loose = Loose::default();
        self.put_back(self.node_of(memory), class, &[memory], true, &mut loose);
        self.give_back(loose);
    }

    /// Puts objects of one node, which are in no state, back into their slabs under one hold of the class's lock; `private`: they are neap's own.
    fn put_back(&self, node: usize, class: Class, objects: &[*mut u8], private: bool, loose: &mut Loose) {
        let mut cache = self.cache(node, class).lock();
        for &object in objects {
            let place = self.place(class, object);
            // SAFETY: the lock is held; the frame says that the slab is one of this class.
            unsafe {
                self.slabs.get(place.slab).private -= u32::from(private);
                if !cache.put(&self.slabs, place, &mut loose.slabs) {
                    // A handler of the program's may allocate.
                    drop(cache);
                    freed_twice(class, object);
                }
                self.detach_unused(place.slab, &mut loose.vectors);
            }
        }
    }

    /// Gives back what came loose, and what that makes come loose.
    pub(crate) fn give_back(&self, mut loose: Loose) {
        while let Some((class, memory)) = self.next_vector(&mut loose.vectors) {
            self.put_back(self.node_of(memory), class, &[memory], true, &mut loose);
        }
        self.destroy(loose.slabs);
    }

    /// Gives wholly free slabs back to the pages.
    fn destroy(&self, mut empties: SlabList) {
        while let Some(slab) = empties.first() {
            // SAFETY: the slabs on this list are this thread's alone.
            let (pfn, order, holes) = unsafe {
                empties.remove(&self.slabs, slab);
                let slab = self.slabs.get(slab);
                (slab.pfn, Order(slab.order), slab.holes)
            };
            self.set_kind(pfn, order, Class::NONE);
            let frames = self.pages.frames();
            frames.frame(pfn).set_head(State::Allocated, order);
            (1..order.pages()).for_each(|page| frames.frame(pfn.plus(page)).set_state(State::Inside));
            self.slabs.destroy(slab);
            self.pages.free_block_with_holes(&self.platform, pfn, order, holes);
        }
    }

    /// Where an object is in its slab.
    pub(crate) fn place(&self, class: Class, object: *const u8) -> Place {
        let pfn = self.pages.pfn(object.addr());
        let slab = SlabId(self.pages.frames().frame(pfn).owner());
        Place { slab, object: ((object.addr() - self.start_of(slab)) as u32) / class.size() as u32 }
    }
}

/// Ends the process: a cache gave up an object that is not cached, or that is free in its slab.
#[cold]
fn freed_twice(class: Class, object: *mut u8) -> ! {
    die(format_args!(
        "double free: {object:p} ({} bytes) was freed by two threads at once; found when a cache gave it up",
        class.size()
    ))
}
