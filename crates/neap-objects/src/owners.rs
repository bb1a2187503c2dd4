//! Who pays for an object: a word for all that start on a page while it is one owner, and then one for each, in a vector.
//!
//! Sits between whoever charges for what is allocated, whose owners are numbers and no more here, and the state bytes,
//! which say whether an object has one. The frame of a slab's page says who its first owner was; the second gets the page
//! a vector: where it lies, and how an object's place on the page leads to its entry, is then in the frame instead. A
//! vector is an object of neap's own, in no state, so that freeing it by hand is found out. All that is forgotten when the
//! slab has no objects in use but neap's own, and when the page is about to become a hole.
//!
//! The fast ways, on [`Hot`], take no lock, execute no locked instruction and never allocate. An owner or a vector is
//! installed by whoever has an object of the page, without a lock, and detached under the lock of the slab's class, when
//! nobody has one.

use crate::hot::Hot;
use crate::objects::Objects;
use crate::size_class::{Class, GRAIN};
use crate::slab::SlabId;
use crate::state::{ACCOUNTED, PAID};
use core::ops::Range;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use neap_base::{Pfn, Platform};
use neap_pages::State;

/// What the [word](neap_pages::Frame::word) of a slab's page holds: 0, while nobody has paid for anything there; who pays
/// for every object that somebody pays for, below a bit that says so; or a [`Vector`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Owners(u64);

impl Owners {
    /// One for all. No vector has this bit.
    const SOLE: u64 = 1 << 63;

    const fn sole(owner: u64) -> Owners {
        Owners(owner | Owners::SOLE)
    }

    /// The one who pays for all.
    #[inline(always)]
    fn owner(self) -> Option<u64> {
        (self.0 & Owners::SOLE != 0).then_some(self.0 & !Owners::SOLE)
    }

    /// Where there is more than one.
    #[inline(always)]
    pub(crate) fn vector(self) -> Option<Vector> {
        if self.0 & Owners::SOLE != 0 { None } else { Vector(self.0).some() }
    }

    /// Whether an owner pays for an object of the page that somebody pays for, and whose grain of the page is `grain`; `sole` is what [`word_of`]
    /// says of the owner. One comparison where it pays for all.
    ///
    /// # Safety
    /// As for [`Vector::entry`].
    #[inline(always)]
    unsafe fn is_of(self, sole: u64, grain: impl FnOnce() -> usize) -> bool {
        self.0 == sole || {
            core::hint::cold_path();
            // SAFETY: as the caller promises.
            self.vector().is_some_and(|vector| unsafe { vector.entry(grain()) }.load(Relaxed) | Owners::SOLE == sole)
        }
    }

    /// Who pays for an object of the page that somebody pays for, and whose grain of the page is `grain`.
    ///
    /// # Safety
    /// As for [`Vector::entry`].
    #[inline(always)]
    unsafe fn of(self, grain: impl FnOnce() -> usize) -> Option<u64> {
        match self.owner() {
            Some(owner) => Some(owner),
            // SAFETY: as the caller promises.
            None => self.vector().map(|vector| unsafe { vector.entry(grain()) }.load(Relaxed)),
        }
    }
}

/// An owner, as the hot part compares it.
#[inline(always)]
pub const fn word_of(owner: u64) -> u64 {
    Owners::sole(owner).0
}

/// Where a page's owners are if it has several: an address, and below it a factor that leads from grains of the page to
/// entries of 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Vector(u64);

impl Vector {
    /// Bits of the factor; a program's addresses have 47.
    const ADDRESS: u32 = u16::BITS;

    /// A factor of 2^this leads from every grain to an entry of its own.
    const SHIFT: u32 = 15;

    /// Objects that start on one page are apart by as many grains as one has, so with such a factor, rounded up, by one
    /// entry at least: no two have the same.
    const fn factor(class: Class) -> u64 {
        (1_u64 << Vector::SHIFT).div_ceil((class.size() / GRAIN) as u64)
    }

    pub(crate) const fn new(address: usize, class: Class) -> Vector {
        Vector((address as u64) << Vector::ADDRESS | Vector::factor(class))
    }

    /// Entries for a page.
    const fn entries(self, page_size: usize) -> usize {
        self.entry_of(page_size / GRAIN - 1) + 1
    }

    /// The class of vectors for pages of slabs of `class`.
    pub(crate) fn class(class: Class, page_size: usize) -> Class {
        Class::of_size(Vector::new(0, class).entries(page_size) * size_of::<u64>())
    }

    fn some(self) -> Option<Vector> {
        (self.0 != 0).then_some(self)
    }

    pub(crate) const fn address(self) -> usize {
        (self.0 >> Vector::ADDRESS) as usize
    }

    /// The number of the entry of an object that starts at a grain of the page.
    const fn entry_of(self, grain: usize) -> usize {
        (grain * (self.0 as u16) as usize) >> Vector::SHIFT
    }

    /// The entry of an object that starts at a grain of the page.
    ///
    /// # Safety
    /// The vector is that of the page, and nobody gives it back meanwhile.
    #[inline(always)]
    unsafe fn entry<'a>(self, grain: usize) -> &'a AtomicU64 {
        let entries = core::ptr::with_exposed_provenance::<AtomicU64>(self.address());
        // SAFETY: the vector has an entry for every grain of the page.
        unsafe { &*entries.add(self.entry_of(grain)) }
    }
}

/// Vectors that belong to no page any more: what the word of the first was, or 0; its first entry has that of the next.
#[derive(Default)]
pub(crate) struct VectorList(u64);

impl Hot {
    /// Who pays for objects of the page that an object starts on.
    ///
    /// # Safety
    /// The object lies in the arena that this was opened for.
    #[inline(always)]
    unsafe fn owners(&self, object: *const u8) -> Owners {
        let frame = self.frames.load(Relaxed).wrapping_add(object.addr() >> self.page_shift.load(Relaxed));
        // SAFETY: every page of the arena has a frame. Acquire pairs with the Release in `own_slowly`: what a vector's
        // memory was before is over.
        Owners(unsafe { &*frame }.word().load(Acquire))
    }

    #[inline(always)]
    fn grain_of_page(&self, object: *const u8) -> usize {
        (object.addr() & self.page_mask.load(Relaxed)) / GRAIN
    }

    /// Whether an owner, of which [`word_of`] says `sole`, pays for an object.
    ///
    /// # Safety
    /// As for [`Hot::owner`].
    #[inline(always)]
    pub(crate) unsafe fn is_of(&self, object: *const u8, sole: u64) -> bool {
        // SAFETY: as the caller promises.
        unsafe { self.owners(object).is_of(sole, || self.grain_of_page(object)) }
    }

    /// Who pays for an object.
    ///
    /// # Safety
    /// Somebody does, and the caller has it.
    #[inline(always)]
    pub(crate) unsafe fn owner(&self, object: *const u8) -> Option<u64> {
        // SAFETY: as the caller promises.
        unsafe { self.owners(object).of(|| self.grain_of_page(object)) }
    }

    /// Says who pays for an object from now on, whoever it was before; `false`, and nothing has changed, where that takes
    /// [`Objects::own_slowly`].
    ///
    /// # Safety
    /// The object is one that the caller alone has, of the instance that this was opened for; `owner` is neither 0
    /// nor above 2^63.
    #[inline]
    pub unsafe fn own(&self, object: *mut u8, owner: u64) -> bool {
        // SAFETY: as the caller promises.
        unsafe {
            let owners = self.owners(object);
            if owners != Owners::sole(owner) {
                let Some(vector) = owners.vector() else { return false };
                vector.entry(self.grain_of_page(object)).store(owner, Relaxed);
            }
            self.states.set(object.addr(), ACCOUNTED);
        }
        true
    }

    /// Who pays for an object; `None`: nobody does.
    ///
    /// # Safety
    /// The object is one that the caller has, of the instance that this was opened for.
    #[inline]
    pub unsafe fn payer(&self, object: *const u8) -> Option<u64> {
        // SAFETY: as the caller promises.
        unsafe {
            let accounted = self.states.is(object.addr(), ACCOUNTED);
            if accounted { self.owner(object) } else { None }
        }
    }
}

impl<P: Platform> Objects<P> {
    /// As [`Hot::own`], and makes the page's vector if the object's owner is its second; `false`, and nothing has changed, where
    /// there is no memory for that.
    ///
    /// Who has an object of the page keeps the word from being forgotten, and it only ever goes from 0 to an owner to a vector.
    /// One that comes late for the first finds another owner, and one that comes late for a vector finds that.
    ///
    /// # Safety
    /// As for [`Hot::own`].
    #[cold]
    #[inline(never)]
    pub unsafe fn own_slowly(&self, class: Class, object: *mut u8, owner: u64) -> bool {
        self.owned.store(true, Relaxed);
        let word = self.pages.frames().frame(self.pages.pfn(object.addr())).word();
        // Relaxed: no memory is behind an owner.
        let first = match word.compare_exchange(0, Owners::sole(owner).0, Relaxed, Relaxed) {
            Ok(_) => None,
            Err(found) => Owners(found).owner().filter(|first| *first != owner),
        };
        if let Some(first) = first {
            let vector_class = Vector::class(class, self.pages.page_size());
            let Some(memory) = self.private_memory(vector_class) else { return false };
            let vector = Vector::new(memory.expose_provenance().get(), class);
            // SAFETY: the memory is this thread's alone, and has so many entries.
            unsafe {
                core::slice::from_raw_parts_mut(memory.as_ptr().cast::<u64>(), vector.entries(self.pages.page_size()))
            }
            .fill(first);
            // Release pairs with the Acquire in `Hot::owners` and `Objects::owners`.
            match word.compare_exchange(Owners::sole(first).0, vector.0, Release, Relaxed) {
                Ok(_) => _ = self.vector_bytes.fetch_add(vector_class.size() as u64, Relaxed),
                // Another thread has made one for another object of the page.
                Err(_) => self.flush_private(vector_class, memory.as_ptr()),
            }
        }
        // SAFETY: as the caller promises.
        unsafe { self.hot().own(object, owner) }
    }

    /// Detaches the vectors of a slab that has no object but free ones and neap's own, or nothing is left to wait for: two
    /// slabs may hold vectors for each other.
    ///
    /// # Safety
    /// As for [`SlabTable::get`](crate::slab::SlabTable::get).
    pub(crate) unsafe fn detach_unused(&self, slab: SlabId, vectors: &mut VectorList) {
        // SAFETY: as the caller promises.
        let slab = unsafe { self.slabs.get(slab) };
        if slab.free + slab.private == slab.objects {
            // SAFETY: the lock is held, so none of the free ones is handed out meanwhile.
            unsafe { self.detach(slab.pfn.0..slab.pfn.0 + (1 << slab.order), vectors) };
        }
    }

    /// Forgets who paid for objects of some pages of a slab, and detaches their vectors.
    ///
    /// # Safety
    /// The caller holds the lock of the slab's class cache. No object that starts on these pages is anybody's but neap's own,
    /// and none will be before the lock is dropped.
    pub(crate) unsafe fn detach(&self, pages: Range<u32>, vectors: &mut VectorList) {
        for page in pages {
            let owners = self.owners(Pfn(page));
            self.pages.frames().frame(Pfn(page)).word().store(0, Relaxed);
            let Some(vector) = owners.vector() else { continue };
            // SAFETY: nobody else has the vector now; every one has a first entry.
            unsafe { vector.entry(0) }.store(vectors.0, Relaxed);
            vectors.0 = vector.0;
        }
    }

    /// Takes the memory of a vector off a list, and its class.
    pub(crate) fn next_vector(&self, vectors: &mut VectorList) -> Option<(Class, *mut u8)> {
        let vector = Vector(vectors.0).some()?;
        // SAFETY: the list's vectors are this thread's alone.
        vectors.0 = unsafe { vector.entry(0) }.load(Relaxed);
        let memory = core::ptr::with_exposed_provenance_mut(vector.address());
        let class = self.class_at(memory)?;
        self.vector_bytes.fetch_sub(class.size() as u64, Relaxed);
        Some((class, memory))
    }

    /// Bytes of all vectors.
    pub fn vector_bytes(&self) -> u64 {
        self.vector_bytes.load(Relaxed)
    }

    /// Whether anything has ever had an owner.
    pub fn has_owned(&self) -> bool {
        self.owned.load(Relaxed)
    }

    /// Who pays for objects of a slab's page.
    pub(crate) fn owners(&self, page: Pfn) -> Owners {
        // Acquire pairs with the Release in `own_slowly`.
        Owners(self.pages.frames().frame(page).word().load(Acquire))
    }

    /// Who pays for an object that somebody pays for; 0 where its page knows nobody.
    pub(crate) fn owner_at(&self, object: usize) -> u64 {
        let grain = (object & (self.pages.page_size() - 1)) / GRAIN;
        // SAFETY: the object exists, so the page keeps its vector.
        unsafe { self.owners(self.pages.pfn(object)).of(|| grain) }.unwrap_or(0)
    }

    /// Calls `each` with the class of every object that somebody pays for, cached ones included, the object, and its owner; and
    /// with [`Class::NONE`] for every such run of pages. Only while nobody else uses this.
    pub fn each_accounted(&self, each: &mut dyn FnMut(Class, *mut u8, u64)) {
        let frames = self.pages.frames();
        for page in (0..frames.pages()).map(Pfn) {
            let (frame, start) = (frames.frame(page), self.pages.address(page));
            let word = frame.word().load(Relaxed);
            match frame.state() {
                State::Run if word != 0 => each(Class::NONE, core::ptr::with_exposed_provenance_mut(start), word),
                State::Slab if word != 0 => self.each_accounted_on(page, each),
                _ => {}
            }
        }
    }

    /// The same for the objects of a slab that start on one of its pages.
    fn each_accounted_on(&self, page: Pfn, each: &mut dyn FnMut(Class, *mut u8, u64)) {
        // SAFETY: the frame says that the slab exists; nobody else is here.
        let slab = unsafe { self.slabs.get(SlabId(self.pages.frames().frame(page).owner())) };
        let (size, start) = (slab.class.size(), self.pages.address(slab.pfn));
        let offset = self.pages.address(page) - start;
        let end = (offset + self.pages.page_size()).div_ceil(size).min(slab.objects as usize);
        for object in (offset.div_ceil(size)..end).map(|number| start + number * size) {
            // SAFETY: objects lie in the arena.
            let is = |state| unsafe { self.states.is(object, state) };
            if is(ACCOUNTED) || is(PAID) {
                each(slab.class, core::ptr::with_exposed_provenance_mut(object), self.owner_at(object));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn objects_that_start_on_one_page_have_entries_of_their_own_within_the_vector() {
        for page_size in [4096, 16384, 65536] {
            for class in Class::all() {
                let (vector, shape) = (Vector::new(0, class), class.slab_shape(page_size));
                let entries = Vector::class(class, page_size).size() / size_of::<u64>();
                let starts = (0..shape.objects as usize).map(|object| object * class.size());
                let mut seen = BTreeSet::new();
                for start in starts {
                    let entry = vector.entry_of(start % page_size / GRAIN);
                    assert!(entry < entries, "{class:?} on {page_size}: {entry} of {entries}");
                    assert!(seen.insert((start / page_size, entry)), "{class:?} on {page_size}: {entry} twice");
                }
                // No more entries than objects may start on a page: 8 bytes for each.
                let most = page_size.div_ceil(class.size());
                assert_eq!(vector.entries(page_size), most, "{class:?} on {page_size}");
            }
        }
    }

    #[test]
    fn a_word_keeps_address_and_factor_apart() {
        for class in Class::all() {
            for address in [16, 0x7fff_ffff_fff0, 0x5555_5555_5550] {
                let vector = Vector::new(address, class);
                assert_eq!((vector.address(), vector.some()), (address, Some(vector)), "{class:?}");
                let owners = Owners(vector.0);
                assert_eq!((owners.owner(), owners.vector()), (None, Some(vector)), "{class:?}");
                assert_eq!(vector.entry_of(0), 0);
            }
        }
        for owner in [1, u64::MAX >> 1] {
            assert_eq!((Owners::sole(owner).owner(), Owners::sole(owner).vector()), (Some(owner), None));
        }
        assert_eq!((Owners(0).owner(), Owners(0).vector()), (None, None));
        assert_eq!(Vector::new(0, Class(1)).entry_of(4095), 4095, "every grain");
    }
}
