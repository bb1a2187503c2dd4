//! The class cache: what all CPUs share of one size class, under one mutex.
//!
//! Sits between the stacks of the CPUs and the pages. It is a barn of full and empty sheaves in front of partly free slabs,
//! which are on a list each, by what time has seen of them: used since the last tick, resting since then, sidelined because
//! there was nothing left to give back of them, hollow where all that is free of them was given back. Objects freed on another CPU than they were allocated on come back this way: full sheaves flow through
//! the barn. The mutex is held for a link or two, or for a batch of objects of slabs, and never across a system call;
//! making and giving back slabs is the caller's, outside.

use crate::sheaf::{Sheaf, SheafList};
use crate::slab::{On, SlabId, SlabList, SlabTable};
use core::ops::Range;
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
    /// Plain sheaves without any.
    pub empty: SheafList,
    /// Bound ones without any.
    pub empty_bound: SheafList,
    /// Slabs with free objects that are not wholly free, and were used since the last tick.
    pub partial: SlabList,
    /// Such slabs that were not.
    pub resting: SlabList,
    /// Such slabs that rested, with no page left to give back.
    pub sidelined: SlabList,
    /// Such slabs whose free objects all lie in holes.
    pub hollow: SlabList,
    /// Such slabs of which pages are on their way to the system.
    pub isolated: SlabList,
    /// Slabs of the class.
    pub slabs: u32,
    /// Objects in bitmaps of the class's slabs.
    pub free: u64,
    /// Pages of the class's slabs that nothing is behind.
    pub holes: u64,
    /// Which way sheaves went last, and how many calls moved some that way in a row, less [what others brought back](ClassCache::shorten_streak).
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

/// Objects of one slab that follow each other.
#[derive(Debug)]
pub struct Row {
    /// Which slab.
    pub slab: SlabId,
    /// Which objects of it, at least one.
    pub objects: Range<u32>,
}

impl ClassCache {
    /// An empty cache.
    pub const fn new() -> ClassCache {
        ClassCache {
            full: SheafList::new(),
            empty: SheafList::new(),
            empty_bound: SheafList::new(),
            partial: SlabList::named(On::Odd),
            resting: SlabList::named(On::Even),
            sidelined: SlabList::named(On::Sidelined),
            hollow: SlabList::named(On::Hollow),
            isolated: SlabList::named(On::Isolated),
            slabs: 0,
            free: 0,
            holes: 0,
            streak: (Way::Refill, 0),
        }
    }

    /// Notes that a call is about to move sheaves, and answers how many calls before it moved some the same way in a row.
    pub fn streak(&mut self, way: Way) -> u32 {
        let before = if self.streak.0 == way { self.streak.1 } else { 0 };
        self.streak = (way, before.saturating_add(1));
        before
    }

    /// Notes that a sheaf of guests goes home by way of the barn: a row of calls is shorter by one. Where all that a program takes on one CPU comes
    /// back from another, no row gets long.
    pub fn shorten_streak(&mut self) {
        self.streak.1 -= u32::from(self.streak.1 > 1);
    }

    /// The lists of the barn, full sheaves first.
    pub(crate) fn sheaf_lists(&mut self) -> [&mut SheafList; 3] {
        [&mut self.full, &mut self.empty, &mut self.empty_bound]
    }

    /// Sheaves in the barn, empty ones included.
    pub(crate) fn all_sheaves(&self) -> u32 {
        self.full.length() + self.empty.length() + self.empty_bound.length()
    }

    /// Takes a sheaf out of the barn, a full one if there is one.
    pub(crate) fn pop_sheaf(&mut self) -> Option<Sheaf> {
        self.sheaf_lists().into_iter().find_map(SheafList::pop)
    }

    /// Plain sheaves in the barn, and bound ones.
    pub(crate) fn sheaves(&self) -> (u32, u32) {
        let [full, empty, bound] = [&self.full, &self.empty, &self.empty_bound].map(SheafList::lengths);
        (full.0 + empty.0 + bound.0, full.1 + empty.1 + bound.1)
    }

    /// Every list of slabs, in the order in which objects are taken from them.
    pub(crate) fn lists(&self) -> [&SlabList; 5] {
        [&self.partial, &self.resting, &self.sidelined, &self.hollow, &self.isolated]
    }

    /// Puts a slab onto a list of this cache's, or onto none, from whichever it is on.
    ///
    /// # Safety
    /// As for [`ClassCache::take`].
    pub(crate) unsafe fn move_to(&mut self, slabs: &SlabTable, slab: SlabId, to: On) {
        let ClassCache { partial, resting, sidelined, hollow, isolated, .. } = self;
        // SAFETY: as the caller promises.
        let from = unsafe { slabs.get(slab) }.on;
        let mut lists = [partial, resting, sidelined, hollow, isolated];
        if let Some(list) = lists.iter_mut().find(|list| list.on == from) {
            // SAFETY: as the caller promises; the slab says that it is on the list.
            unsafe { list.remove(slabs, slab) };
        }
        if let Some(list) = lists.iter_mut().find(|list| list.on == to) {
            // SAFETY: as the caller promises; it is on no list now.
            unsafe { list.insert(slabs, slab) };
        }
    }

    /// Takes up to `most` objects out of slabs, none that lies in a hole, and answers how many.
    ///
    /// # Safety
    /// The caller holds this cache's lock; `slabs` is the table of its slabs.
    pub unsafe fn take(&mut self, slabs: &SlabTable, most: usize, mut each: impl FnMut(Row)) -> usize {
        let mut taken = 0;
        while taken < most
            && let Some(slab) = self.partial.first().or_else(|| self.resting.first()).or_else(|| self.sidelined.first())
        {
            // SAFETY: as the caller promises; the slab is on one of this cache's lists.
            unsafe {
                taken += slabs.take_backed(slab, most - taken, |objects| each(Row { slab, objects }));
                let (on, free) = (slabs.get(slab).on, slabs.get(slab).free);
                if free == 0 {
                    self.move_to(slabs, slab, On::Nothing);
                } else if taken < most {
                    self.move_to(slabs, slab, On::Hollow);
                } else if on == self.resting.on {
                    self.move_to(slabs, slab, self.partial.on);
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
            let (free, objects, on) = (slab.free, slab.objects, slab.on);
            if on == On::Isolated {
                // Whoever has its pages looks at it again.
                slab.touched = true;
            } else if free == objects {
                self.forget(slabs, place.slab, empties);
            } else if on != self.partial.on {
                self.move_to(slabs, place.slab, self.partial.on);
            }
        }
        true
    }

    /// Moves a slab that is wholly free to `empties`: it is none of the class's any more.
    ///
    /// # Safety
    /// As for [`ClassCache::take`]; the slab is one of this class.
    pub(crate) unsafe fn forget(&mut self, slabs: &SlabTable, slab: SlabId, empties: &mut SlabList) {
        // SAFETY: as the caller promises.
        unsafe {
            self.move_to(slabs, slab, On::Nothing);
            empties.insert(slabs, slab);
            self.slabs -= 1;
            self.free -= u64::from(slabs.get(slab).objects);
            self.holes -= u64::from(slabs.get(slab).holes.count_ones());
        }
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
        match (sheaf.is_empty(), sheaf.is_bound()) {
            (false, _) => &mut self.full,
            (true, false) => &mut self.empty,
            (true, true) => &mut self.empty_bound,
        }
        .push(sheaf);
    }

    /// Takes one object out of the barn, for who cannot have a slot now.
    pub fn take_one(&mut self) -> Option<*mut u8> {
        let mut sheaf = self.full.pop()?;
        let object = sheaf.pop();
        self.stow(sheaf);
        object
    }
}
