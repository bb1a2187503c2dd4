//! The class cache: what all CPUs share of one size class, under one mutex.
//!
//! Sits between the stacks of the CPUs and the pages. It is a barn of full and empty sheaves in front of a list of partly
//! free slabs. Objects freed on another CPU than they were allocated on come back this way: full sheaves flow through
//! the barn. The mutex is held for a link or two, or for a batch of objects of slabs, and never across a system call;
//! making and giving back slabs is the caller's, outside.

use crate::sheaf::{Sheaf, SheafList};
use crate::size_class::Class;
use crate::slab::{SlabId, SlabList, SlabTable};
use neap_base::Mutex;

/// Objects put back into slabs under one hold of the mutex.
pub const FLUSH_BATCH: usize = 64;

/// Which way sheaves go between a CPU's stack and the barn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Way {
    /// To the stack.
    #[default]
    Refill,
    /// To the barn.
    Spill,
}

/// The shared part of one class.
#[derive(Debug, Default)]
pub struct ClassCache {
    /// Sheaves with at least one object.
    pub full: SheafList,
    /// Sheaves without any.
    pub empty: SheafList,
    /// Slabs with free objects that are not wholly free.
    pub partial: SlabList,
    /// Slabs of the class.
    pub slabs: u32,
    /// Objects in bitmaps of the class's slabs.
    pub free: u64,
    /// Whether the class is known to have more sheaves than its share.
    pub surplus: bool,
    /// Which way sheaves went last, and how many calls moved some that way in a row.
    streak: (Way, u32),
}

/// A class cache and its lock.
pub type SharedCache = Mutex<ClassCache>;

/// An object as its slab knows it.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Which slab.
    pub slab: SlabId,
    /// Which object of it.
    pub object: u32,
}

impl ClassCache {
    /// An empty cache.
    pub const fn new() -> ClassCache {
        ClassCache {
            full: SheafList::new(),
            empty: SheafList::new(),
            partial: SlabList::new(),
            slabs: 0,
            free: 0,
            surplus: false,
            streak: (Way::Refill, 0),
        }
    }

    /// Notes that a call is about to move sheaves, and answers how many calls before it moved some the same way in a row.
    pub fn streak(&mut self, way: Way) -> u32 {
        let before = if self.streak.0 == way { self.streak.1 } else { 0 };
        self.streak = (way, before.saturating_add(1));
        before
    }

    /// Takes up to `most` objects out of slabs and answers how many.
    ///
    /// # Safety
    /// The caller holds this cache's lock; `slabs` is the table of its slabs.
    pub unsafe fn take(&mut self, slabs: &SlabTable, most: usize, mut each: impl FnMut(Place)) -> usize {
        let mut taken = 0;
        while taken < most
            && let Some(slab) = self.partial.first()
        {
            // SAFETY: as the caller promises; the slab is on this cache's list.
            unsafe {
                taken += slabs.take(slab, most - taken, |object| each(Place { slab, object }));
                if slabs.get(slab).free == 0 {
                    self.partial.remove(slabs, slab);
                }
            }
        }
        self.free -= taken as u64;
        taken
    }

    /// Puts one object back into its slab; a slab that is wholly free moves to `empties`. `false`: it was free already.
    ///
    /// # Safety
    /// As for [`ClassCache::take`]; the slab is one of this class.
    pub unsafe fn put(&mut self, slabs: &SlabTable, place: Place, empties: &mut SlabList) -> bool {
        // SAFETY: as the caller promises.
        unsafe {
            if !slabs.put(place.slab, place.object) {
                return false;
            }
            self.free += 1;
            let slab = slabs.get(place.slab);
            let (free, objects) = (slab.free, slab.objects);
            if free == objects {
                if SlabList::contains(slabs, place.slab) {
                    self.partial.remove(slabs, place.slab);
                }
                empties.insert(slabs, place.slab);
                self.slabs -= 1;
                self.free -= u64::from(objects);
            } else if free == 1 {
                self.partial.insert(slabs, place.slab);
            }
        }
        true
    }

    /// Adds a new slab, all of it free.
    ///
    /// # Safety
    /// As for [`ClassCache::take`]; the slab is on no list.
    pub unsafe fn add(&mut self, slabs: &SlabTable, slab: SlabId) {
        // SAFETY: as the caller promises.
        unsafe {
            self.free += u64::from(slabs.get(slab).objects);
            self.partial.insert(slabs, slab);
        }
        self.slabs += 1;
    }

    /// Gives a sheaf to the barn.
    pub fn stow(&mut self, sheaf: Sheaf) {
        if sheaf.objects().is_empty() { self.empty.push(sheaf) } else { self.full.push(sheaf) }
    }

    /// Whether there are more sheaves than the barn's share, full or empty.
    pub fn has_surplus(&self, class: Class) -> bool {
        self.full.length().max(self.empty.length()) > class.barn_share()
    }

    /// Takes a sheaf that is beyond the barn's share, a full one if there is.
    pub fn pop_surplus(&mut self, class: Class) -> Option<Sheaf> {
        let share = class.barn_share();
        [&mut self.full, &mut self.empty].into_iter().find(|list| list.length() > share)?.pop()
    }

    /// Takes one object out of the barn, for who cannot have a slot now.
    pub fn take_one(&mut self) -> Option<*mut u8> {
        let mut sheaf = self.full.pop()?;
        let object = sheaf.pop();
        self.stow(sheaf);
        object
    }
}
