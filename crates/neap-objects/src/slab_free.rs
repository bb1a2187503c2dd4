//! The return of free objects to their slabs, and of wholly free slabs to the pages.
//!
//! # Design
//!
//! The return of an object may make its slab wholly free, or the slab's vectors unused. A thread
//! gathers such slabs and vectors under the lock (`Loose`), and frees them after it has unlocked. A
//! vector is an object of a slab that may have vectors itself, so the thread frees vectors in a
//! loop, not by recursion.
//!
//! # Locking
//!
//! A thread holds one class's mutex at a time, for a batch of objects.

use crate::class_cache::{FLUSH_BATCH, ObjectIndex};
use crate::object_state::CACHED;
use crate::objects::Objects;
use crate::payers::VectorList;
use crate::size_class::Class;
use crate::slab::{SlabId, SlabList};
use neap_base::{Order, Platform};
use neap_os::fatal::die;
use neap_pages::State;

/// Slabs and vectors gathered under a class's lock, to be freed outside it.
#[derive(Default)]
pub(crate) struct Loose {
    /// Slabs that are wholly free.
    pub(crate) slabs: SlabList,
    /// Vectors that no page uses any more.
    pub(crate) vectors: VectorList,
}

/// The holder of memory before it returns to its slab.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holder {
    /// The program: an object.
    Program,
    /// neap: a sheaf or a vector.
    Neap,
}

impl<P: Platform> Objects<P> {
    /// Returns cached objects to their slabs, and slabs that are wholly free to the pages.
    ///
    /// The call checks the state of each object before it accesses the object's slab, which may no
    /// longer exist after a double free:
    ///
    /// | threads A and B | this thread |
    /// |---|---|
    /// | 1. both free an object, and both see that the program has it | |
    /// | 2. two cells of caches hold it | |
    /// | 3. the first cell's is handed out, or returns to its slab | |
    /// | | 4. returns the second cell's: it is in another state |
    pub(crate) fn flush(&self, class: Class, objects: &[*mut u8]) {
        self.repay(class, objects);
        for &object in objects {
            // SAFETY: the objects come from caches, so they lie in the mapped part of the arena.
            if !unsafe { self.states.change(object.addr(), CACHED, 0) } {
                freed_twice(class, object);
            }
        }
        let mut rest = objects;
        while let Some(&first) = rest.first() {
            // The objects at the front that are of one node.
            let node = self.node_of(first);
            let batch = &rest[..rest.len().min(FLUSH_BATCH)];
            let count = batch.iter().take_while(|&&object| self.node_of(object) == node).count();
            let mut loose = Loose::default();
            self.put_back(node, class, &batch[..count], Holder::Program, &mut loose);
            rest = &rest[count..];
            self.give_back(loose);
        }
    }

    /// Returns memory of neap's own to its slab.
    pub(crate) fn flush_private(&self, class: Class, memory: *mut u8) {
        let mut loose = Loose::default();
        self.put_back(self.node_of(memory), class, &[memory], Holder::Neap, &mut loose);
        self.give_back(loose);
    }

    /// Returns at most [`FLUSH_BATCH`] objects of one node to their slabs under one hold of the
    /// class's lock. The objects' state bytes are 0.
    fn put_back(&self, node: usize, class: Class, objects: &[*mut u8], holder: Holder, loose: &mut Loose) {
        // Objects freed in random order miss the cache for each frame and each descriptor. The
        // misses of this loop overlap, and happen without the lock.
        let mut places = [ObjectIndex { slab: SlabId::NONE, object: 0 }; FLUSH_BATCH];
        objects.iter().zip(&mut places).for_each(|(&object, place)| *place = self.place(class, object));
        let mut cache = self.cache(node, class).lock();
        for (&object, &place) in objects.iter().zip(&places) {
            // SAFETY: the lock is held, and the frame of the object's page says that the slab is
            // one of this class.
            unsafe {
                self.slabs.get(place.slab).private -= u32::from(holder == Holder::Neap);
                if !cache.put(&self.slabs, place, &mut loose.slabs) {
                    // `freed_twice` ends the process. A handler of the program may allocate then,
                    // so this thread unlocks the cache first.
                    drop(cache);
                    freed_twice(class, object);
                }
                self.detach_unused(place.slab, &mut loose.vectors);
            }
        }
    }

    /// Frees gathered vectors and slabs, and those that become unused or wholly free meanwhile.
    pub(crate) fn give_back(&self, mut loose: Loose) {
        while let Some((class, memory)) = self.next_vector(&mut loose.vectors) {
            self.put_back(self.node_of(memory), class, &[memory], Holder::Neap, &mut loose);
        }
        self.destroy(loose.slabs);
    }

    /// Returns wholly free slabs to the pages.
    fn destroy(&self, mut empties: SlabList) {
        while let Some(slab) = empties.first() {
            // SAFETY: the slabs on this list belong to no class cache, so this thread has them
            // alone.
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

    /// The slab of an object, and its number in the slab.
    pub(crate) fn place(&self, class: Class, object: *const u8) -> ObjectIndex {
        let pfn = self.pages.pfn(object.addr());
        let slab = SlabId(self.pages.frames().frame(pfn).owner());
        ObjectIndex { slab, object: ((object.addr() - self.start_of(slab)) as u32) / class.size() as u32 }
    }
}

/// Ends the process: a cache gave up an object that is not cached, or that is free in its slab
/// already.
#[cold]
fn freed_twice(class: Class, object: *mut u8) -> ! {
    die(format_args!(
        "double free: {object:p} ({} bytes) was freed by two threads at once; found when a cache gave it up",
        class.size()
    ))
}
