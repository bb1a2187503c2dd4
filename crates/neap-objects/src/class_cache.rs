//! The class cache: the sheaves and slabs of one size class on a node, which all CPUs share.
//!
//! # Design
//!
//! A class cache has a barn of full and empty sheaves, and lists of the slabs with free objects. An
//! object that is freed on another CPU than its [home](crate::kind_map::KindEntry) returns through
//! the barn, in a full sheaf. Each slab with free objects is on one list:
//! * partial: used since the last tick;
//! * resting: not used since the last tick;
//! * sidelined: it rested, and no page of it can be released;
//! * hollow: all its free objects lie in [holes](crate::holes);
//! * isolated: a thread is releasing pages of it.
//!
//! # Locking
//!
//! One mutex guards a class cache. A thread holds it while it moves a few sheaves or a batch of
//! objects, and never across a system call. It holds no class's mutex while it makes or frees
//! slabs. Before it unlocks, it stores the counters for other processes.

use crate::live::ClassCell;
use crate::sheaf::{Sheaf, SheafCounts, SheafList};
use crate::slab::{On, SlabId, SlabList, SlabTable};
use core::ops::{Deref, DerefMut, Range};
use neap_base::Mutex;
use neap_base::live::Cells;
use neap_base::mutex::Guard;

/// Number of objects returned to slabs under one hold of the mutex.
pub const FLUSH_BATCH: usize = 64;

/// Direction of sheaves between a CPU's stack and the barn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Direction {
    /// To the stack.
    #[default]
    Refill,
    /// To the barn.
    Spill,
}

/// The shared part of one class on a node.
#[derive(Debug, Default)]
pub struct ClassCache {
    /// Sheaves with at least one object.
    pub full: SheafList,
    /// Plain sheaves without objects.
    pub empty: SheafList,
    /// Bound sheaves without objects.
    pub empty_bound: SheafList,
    /// Slabs with some objects free and some not, used since the last tick.
    pub partial: SlabList,
    /// Slabs with some objects free and some not, unused since the last tick.
    pub resting: SlabList,
    /// Slabs that rested, with no page left to release.
    pub sidelined: SlabList,
    /// Slabs whose free objects all lie in holes.
    pub hollow: SlabList,
    /// Slabs with pages whose release is under way.
    pub isolated: SlabList,
    /// Number of slabs of the class.
    pub slabs: u32,
    /// Number of objects of the class's slabs.
    pub objects: u64,
    /// Number of objects in bitmaps of the class's slabs.
    pub free: u64,
    /// Number of holes: released pages of the class's slabs.
    pub holes: u64,
    /// The direction in which sheaves moved last, and the number of successive calls that moved
    /// sheaves in this direction, less the [sheaves of remote objects](ClassCache::shorten_streak).
    streak: (Direction, u32),
    /// The cells with counters for other processes, and the index of this cache's cell.
    /// [`NodeCache::lock`] stores both, so that no thread writes to a cache before its first use.
    live: Cells<ClassCell>,
    index: usize,
}

/// A class cache and its lock.
pub type SharedCache = Mutex<ClassCache>;

/// The class cache of a class on a node.
#[derive(Clone, Copy, Debug)]
pub struct NodeCache<'a> {
    cache: &'a SharedCache,
    cells: &'a Cells<ClassCell>,
    index: usize,
}

impl<'a> NodeCache<'a> {
    /// Wraps a cache. Its counters go into the cell with the index `index`.
    pub(crate) fn new(cache: &'a SharedCache, cells: &'a Cells<ClassCell>, index: usize) -> NodeCache<'a> {
        NodeCache { cache, cells, index }
    }

    /// Waits until the cache's mutex is free and takes it.
    #[inline]
    pub fn lock(self) -> CacheGuard<'a> {
        self.guard(self.cache.lock())
    }

    /// Takes the cache's mutex if it is free.
    #[inline]
    pub fn try_lock(self) -> Option<CacheGuard<'a>> {
        self.cache.try_lock().map(|cache| self.guard(cache))
    }

    /// Stores the counters for other processes, unless the mutex is held.
    ///
    /// # Safety
    /// No other thread uses the cache.
    pub(crate) unsafe fn store_live(self) {
        // SAFETY: the caller says that no other thread uses the cache, and this thread does not
        // take the mutex while it stores the counters.
        let cache = unsafe { self.cache.peek() };
        cache.inspect(|cache| cache.store_into(self.cells, self.index));
    }

    #[inline]
    fn guard(self, mut cache: Guard<'a, ClassCache>) -> CacheGuard<'a> {
        cache.live = self.cells.clone();
        cache.index = self.index;
        CacheGuard(cache)
    }
}

/// Access to a class cache. When dropped, it stores the counters for other processes and unlocks.
#[derive(Debug)]
pub struct CacheGuard<'a>(Guard<'a, ClassCache>);

impl Deref for CacheGuard<'_> {
    type Target = ClassCache;

    #[inline]
    fn deref(&self) -> &ClassCache {
        &self.0
    }
}

impl DerefMut for CacheGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut ClassCache {
        &mut self.0
    }
}

impl Drop for CacheGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        debug_assert!(self.0.has_sound_counts());
        // Afterwards the inner guard is dropped, which unlocks the mutex.
        self.0.store_into(&self.0.live, self.0.index);
    }
}

/// An object, by slab and number.
#[derive(Clone, Copy, Debug)]
pub struct ObjectIndex {
    /// The slab.
    pub slab: SlabId,
    /// The object's number in the slab.
    pub object: u32,
}

/// Neighbouring objects of one slab.
#[derive(Debug)]
pub struct Row {
    /// The slab.
    pub slab: SlabId,
    /// The objects' numbers, at least one.
    pub objects: Range<u32>,
}

impl ClassCache {
    /// Whether the counts are consistent: the lists have no more slabs than the class, and no more
    /// objects are free than the class has.
    fn has_sound_counts(&self) -> bool {
        let lists = [&self.partial, &self.resting, &self.sidelined, &self.hollow, &self.isolated];
        lists.iter().map(|list| list.length).sum::<u32>() <= self.slabs && self.free <= self.objects
    }

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
            objects: 0,
            free: 0,
            holes: 0,
            streak: (Direction::Refill, 0),
            live: Cells::new(),
            index: 0,
        }
    }

    /// Stores the counters into a cell, if cells are attached.
    #[inline(never)]
    fn store_into(&self, cells: &Cells<ClassCell>, index: usize) {
        if let Some(cell) = cells.get(index) {
            cell.store(self.slabs, self.holes, self.free, self.full.objects());
        }
    }

    /// Records that a call is about to move sheaves. Returns the number of calls in a row before it
    /// that moved sheaves in the same direction.
    pub fn streak(&mut self, direction: Direction) -> u32 {
        let before = if self.streak.0 == direction { self.streak.1 } else { 0 };
        self.streak = (direction, before.saturating_add(1));
        before
    }

    /// Reduces the streak by one, for a sheaf of remote objects that goes to the barn. If a program
    /// frees all objects on another CPU than it allocates them, the streak stays short.
    pub fn shorten_streak(&mut self) {
        self.streak.1 -= u32::from(self.streak.1 > 1);
    }

    /// The lists of the barn, full sheaves first.
    pub(crate) fn sheaf_lists(&mut self) -> [&mut SheafList; 3] {
        [&mut self.full, &mut self.empty, &mut self.empty_bound]
    }

    /// Number of sheaves in the barn, empty ones included.
    pub(crate) fn all_sheaves(&self) -> u32 {
        self.full.length() + self.empty.length() + self.empty_bound.length()
    }

    /// Takes a sheaf out of the barn, a full one if there is one.
    pub(crate) fn pop_sheaf(&mut self) -> Option<Sheaf> {
        self.sheaf_lists().into_iter().find_map(SheafList::pop)
    }

    /// Number of sheaves in the barn, by kind.
    pub(crate) fn sheaves(&self) -> SheafCounts {
        let lists = [&self.full, &self.empty, &self.empty_bound].map(SheafList::lengths);
        SheafCounts {
            plain: lists.iter().map(|list| list.plain).sum(),
            bound: lists.iter().map(|list| list.bound).sum(),
        }
    }

    /// All lists of slabs, in the order in which objects are taken from them.
    pub(crate) fn lists(&self) -> [&SlabList; 5] {
        [&self.partial, &self.resting, &self.sidelined, &self.hollow, &self.isolated]
    }

    /// Moves a slab from any list of this cache, or none, to one of its lists, or to none.
    ///
    /// # Safety
    /// The caller holds this class's mutex. `slabs` is the table of its slabs, and the slab is one
    /// of this class.
    pub(crate) unsafe fn move_to(&mut self, slabs: &SlabTable, slab: SlabId, to: On) {
        let ClassCache { partial, resting, sidelined, hollow, isolated, .. } = self;
        // SAFETY: the caller holds the lock of the slab's class cache.
        let from = unsafe { slabs.get(slab) }.on;
        let mut lists = [partial, resting, sidelined, hollow, isolated];
        if let Some(list) = lists.iter_mut().find(|list| list.on == from) {
            // SAFETY: the caller holds the lock, and the slab's descriptor says that it is on this
            // list.
            unsafe { list.remove(slabs, slab) };
        }
        if let Some(list) = lists.iter_mut().find(|list| list.on == to) {
            // SAFETY: the caller holds the lock, and the slab is on no list now.
            unsafe { list.insert(slabs, slab) };
        }
    }

    /// Takes up to `most` objects out of slabs, none from a hole, and returns the number taken.
    ///
    /// # Safety
    /// The caller holds this class's mutex; `slabs` is the table of its slabs.
    pub unsafe fn take(&mut self, slabs: &SlabTable, most: usize, mut each: impl FnMut(Row)) -> usize {
        let mut taken = 0;
        while taken < most
            && let Some(slab) = self.partial.first().or_else(|| self.resting.first()).or_else(|| self.sidelined.first())
        {
            // SAFETY: the caller holds this class's mutex, and the slab is on one of this cache's
            // lists.
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

    /// Returns one object to its slab. A slab that becomes wholly free moves to `empties`. Returns
    /// `false` if the object was free already.
    ///
    /// # Safety
    /// The caller holds this class's mutex. `slabs` is the table of its slabs, and the slab is one
    /// of this class.
    pub unsafe fn put(&mut self, slabs: &SlabTable, place: ObjectIndex, empties: &mut SlabList) -> bool {
        // SAFETY: the caller holds this class's mutex, and the slab is one of this class.
        unsafe {
            if !slabs.put(place.slab, place.object) {
                return false;
            }
            self.free += 1;
            let slab = slabs.get(place.slab);
            let (free, objects, on) = (slab.free, slab.objects, slab.on);
            if on == On::Isolated {
                // The thread that releases its pages checks the slab again.
                slab.touched = true;
            } else if free == objects {
                self.forget(slabs, place.slab, empties);
            } else if on != self.partial.on {
                self.move_to(slabs, place.slab, self.partial.on);
            }
        }
        true
    }

    /// Moves a slab that is wholly free to `empties`, and subtracts it from the class's counts.
    ///
    /// # Safety
    /// The caller holds this class's mutex. `slabs` is the table of its slabs, and the slab is one
    /// of this class.
    pub(crate) unsafe fn forget(&mut self, slabs: &SlabTable, slab: SlabId, empties: &mut SlabList) {
        // SAFETY: the caller holds this class's mutex, and the slab is one of this class, on no
        // list after `move_to`.
        unsafe {
            self.move_to(slabs, slab, On::Nothing);
            empties.insert(slabs, slab);
            self.slabs -= 1;
            let objects = u64::from(slabs.get(slab).objects);
            self.objects -= objects;
            self.free -= objects;
            self.holes -= u64::from(slabs.get(slab).holes.count_ones());
        }
    }

    /// Adds a new slab, with all objects free.
    ///
    /// # Safety
    /// The caller holds this class's mutex. `slabs` is the table of its slabs, and the slab is on
    /// no list.
    pub unsafe fn add(&mut self, slabs: &SlabTable, slab: SlabId) {
        // SAFETY: the caller holds this class's mutex, and the slab is on no list.
        unsafe {
            let objects = u64::from(slabs.get(slab).objects);
            self.objects += objects;
            self.free += objects;
            self.partial.insert(slabs, slab);
        }
        self.slabs += 1;
    }

    /// Takes up to `most` sheaves with objects out of the barn while the barn has too many. A barn
    /// has too many if most objects of the class are free in slabs, and it has more than an eighth
    /// of the others. A burst of such a class takes most of its objects from slabs in any case, and
    /// each object in the barn keeps its slab from being freed.
    pub(crate) fn take_surplus(&mut self, most: u32) -> SheafList {
        let (others, mut taken) = (self.objects - self.free, SheafList::new());
        while self.free > others
            && self.full.objects() > others / 8
            && taken.length() < most
            && let Some(sheaf) = self.full.pop()
        {
            taken.push(sheaf);
        }
        taken
    }

    /// Puts a sheaf into the barn.
    pub fn stow(&mut self, sheaf: Sheaf) {
        match (sheaf.is_empty(), sheaf.is_bound()) {
            (false, _) => &mut self.full,
            (true, false) => &mut self.empty,
            (true, true) => &mut self.empty_bound,
        }
        .push(sheaf);
    }

    /// Takes one object out of the barn, for a caller whose slot is busy.
    pub fn take_one(&mut self) -> Option<*mut u8> {
        let mut sheaf = self.full.pop()?;
        let object = sheaf.pop();
        self.stow(sheaf);
        object
    }
}
