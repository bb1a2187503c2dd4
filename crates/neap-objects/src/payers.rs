//! Owners: the memory group that pays for each object, found by the object's page.
//!
//! # Design
//!
//! An owner is a number; this module does not interpret it. The state byte of an object says
//! whether the object has an owner. The word in the frame of the object's page says which one: the
//! only owner of the page, or the address of a vector with an entry for each object that starts
//! there. The second owner of a page makes its vector. A vector is an object of neap's own. Its
//! state byte is 0, so the free of its address by the program is detected.
//!
//! The word is cleared when the slab has only free objects and neap's own, and before the page
//! becomes a hole.
//!
//! # Concurrency
//!
//! The functions of [`FastPath`] take no lock, execute no locked instruction and never allocate. A
//! thread that has an object of the page installs an owner or a vector without a lock. Vectors are
//! detached under the lock of the slab's class, while neither the program nor a cache has an object
//! of the page.

use crate::fast_path::FastPath;
use crate::object_state::{ACCOUNTED, PAID};
use crate::objects::Objects;
use crate::size_class::{Class, GRAIN};
use crate::slab::SlabId;
use core::ops::Range;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use neap_base::{Pfn, Platform};
use neap_pages::State;

/// The [word](neap_pages::Frame::word) of a slab's page. It is 0 while no object of the page has
/// had an owner. Otherwise it is the only owner, with the bit [`Payers::SOLE`] set, or a
/// [`Vector`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Payers(u64);

impl Payers {
    /// Set if the word holds the only owner of the page. No vector has this bit.
    const SOLE: u64 = 1 << 63;

    const fn sole(owner: u64) -> Payers {
        Payers(owner | Payers::SOLE)
    }

    /// The only owner of the page's charged objects; `None` if the page has no owner or a vector.
    #[inline(always)]
    fn owner(self) -> Option<u64> {
        (self.0 & Payers::SOLE != 0).then_some(self.0 & !Payers::SOLE)
    }

    /// The page's vector; `None` if the word holds no vector.
    #[inline(always)]
    pub(crate) fn vector(self) -> Option<Vector> {
        if self.0 & Payers::SOLE != 0 { None } else { Vector(self.0).some() }
    }

    /// Whether an owner pays for a charged object. `sole` is [`word_of`] that owner, and `grain`
    /// returns the number of the object's first grain on the page. If that owner is the page's only
    /// one, a single comparison finds it.
    ///
    /// # Safety
    /// The word is that of the object's page, and a vector in it is not freed during the call.
    #[inline(always)]
    unsafe fn is_of(self, sole: u64, grain: impl FnOnce() -> usize) -> bool {
        self.0 == sole || {
            core::hint::cold_path();
            // SAFETY: the caller says that the word is that of the object's page, and that its
            // vector is not freed meanwhile.
            self.vector().is_some_and(|vector| unsafe { vector.entry(grain()) }.load(Relaxed) | Payers::SOLE == sole)
        }
    }

    /// The owner of a charged object; `None` if the word is 0. `grain` returns the number of the
    /// object's first grain on the page.
    ///
    /// # Safety
    /// The word is that of the object's page, and a vector in it is not freed during the call.
    #[inline(always)]
    unsafe fn of(self, grain: impl FnOnce() -> usize) -> Option<u64> {
        match self.owner() {
            Some(owner) => Some(owner),
            // SAFETY: the caller says that the word is that of the object's page, and that its
            // vector is not freed meanwhile.
            None => self.vector().map(|vector| unsafe { vector.entry(grain()) }.load(Relaxed)),
        }
    }
}

/// The word of a page whose only owner is `owner`. The fast path compares it with the page's word.
#[inline(always)]
pub const fn word_of(owner: u64) -> u64 {
    Payers::sole(owner).0
}

/// The owners of a page that has several. The upper 48 bits are the address of the entries, 8 bytes
/// for each. The lower 16 bits are a factor that maps grains of the page to entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Vector(u64);

impl Vector {
    /// Number of low bits, which hold the factor. A program's addresses have 47 bits.
    const ADDRESS: u32 = u16::BITS;

    /// With the factor 2^`SHIFT`, every grain has an entry of its own.
    const SHIFT: u32 = 15;

    /// The factor for pages with objects of `class`. Neighbours start `size / GRAIN` grains apart.
    /// The factor is rounded up, so their entries differ by at least one and no two objects share
    /// an entry.
    const fn factor(class: Class) -> u64 {
        (1_u64 << Vector::SHIFT).div_ceil((class.size() / GRAIN) as u64)
    }

    pub(crate) const fn new(address: usize, class: Class) -> Vector {
        Vector((address as u64) << Vector::ADDRESS | Vector::factor(class))
    }

    /// Number of entries for a page.
    const fn entries(self, page_size: usize) -> usize {
        self.entry_of(page_size / GRAIN - 1) + 1
    }

    /// The size class of the memory of a vector for a page with objects of `class`.
    pub(crate) fn class(class: Class, page_size: usize) -> Class {
        Class::of_size(Vector::new(0, class).entries(page_size) * size_of::<u64>())
    }

    fn some(self) -> Option<Vector> {
        (self.0 != 0).then_some(self)
    }

    pub(crate) const fn address(self) -> usize {
        (self.0 >> Vector::ADDRESS) as usize
    }

    /// Number of the entry of an object that starts at a grain of the page.
    const fn entry_of(self, grain: usize) -> usize {
        (grain * (self.0 as u16) as usize) >> Vector::SHIFT
    }

    /// The entry of an object that starts at a grain of the page.
    ///
    /// # Safety
    /// The grain is one of the page that the vector was made for, and the vector is not freed
    /// during `'a`.
    #[inline(always)]
    unsafe fn entry<'a>(self, grain: usize) -> &'a AtomicU64 {
        let entries = core::ptr::with_exposed_provenance::<AtomicU64>(self.address());
        // SAFETY: `entries` is the number of the last grain's entry plus one, so the entry of any
        // grain of the page lies in the vector. The caller says that the vector is not freed.
        unsafe { &*entries.add(self.entry_of(grain)) }
    }
}

/// Layout of the words of pages, for readers of this process's memory.
pub(crate) struct PayersLayout {
    /// The bit of a word with the only owner.
    pub(crate) sole_bit: u32,
    /// Number of low bits of a vector's word. They hold the factor.
    pub(crate) vector_address_bits: u32,
    /// The entry of a grain is the product with the factor, shifted by this.
    pub(crate) vector_shift: u32,
}

/// Returns the layout of the words of pages.
pub(crate) const fn payers_layout() -> PayersLayout {
    PayersLayout {
        sole_bit: Payers::SOLE.trailing_zeros(),
        vector_address_bits: Vector::ADDRESS,
        vector_shift: Vector::SHIFT,
    }
}

/// A list of vectors that no page uses any more: the word of the first vector, or 0. The first
/// entry of each vector holds the word of the next.
#[derive(Default)]
pub(crate) struct VectorList(u64);

impl FastPath {
    /// The owners of the page that an object starts on.
    ///
    /// # Safety
    /// The object lies in the arena that this [`FastPath`] was opened for.
    #[inline(always)]
    unsafe fn owners(&self, object: *const u8) -> Payers {
        let frame = self.frames.load(Relaxed).wrapping_add(object.addr() >> self.page_shift.load(Relaxed));
        // SAFETY: the caller says that the object lies in the arena, and every page of the arena
        // has a frame. Acquire pairs with the Release in `own_slowly`, which publishes the vector's
        // entries.
        Payers(unsafe { &*frame }.word().load(Acquire))
    }

    #[inline(always)]
    fn grain_of_page(&self, object: *const u8) -> usize {
        (object.addr() & self.page_mask.load(Relaxed)) / GRAIN
    }

    /// Whether an owner pays for a charged object. `sole` is [`word_of`] that owner.
    ///
    /// # Safety
    /// The object is charged and lies in the arena that this [`FastPath`] was opened for. The
    /// caller has it.
    #[inline(always)]
    pub(crate) unsafe fn is_of(&self, object: *const u8, sole: u64) -> bool {
        // SAFETY: the caller says that it has the object and that this lies in the arena. So the
        // object's page keeps its vector. The word and the grain are the object's.
        unsafe { self.owners(object).is_of(sole, || self.grain_of_page(object)) }
    }

    /// The owner of a charged object.
    ///
    /// # Safety
    /// The object is charged and lies in the arena that this [`FastPath`] was opened for. The
    /// caller has it.
    #[inline(always)]
    pub(crate) unsafe fn owner(&self, object: *const u8) -> Option<u64> {
        // SAFETY: the caller says that it has the object and that this lies in the arena. So the
        // object's page keeps its vector. The word and the grain are the object's.
        unsafe { self.owners(object).of(|| self.grain_of_page(object)) }
    }

    /// Makes `owner` the owner of an object that is the program's, in place of any owner before.
    /// Returns `false` and changes nothing if the caller must use [`Objects::own_slowly`].
    ///
    /// # Safety
    /// * The object belongs to the instance that this [`FastPath`] was opened for, and no other
    ///   thread has it.
    /// * `owner` is neither 0 nor 2^63 or above.
    #[inline]
    pub unsafe fn own(&self, object: *mut u8, owner: u64) -> bool {
        // SAFETY: the object belongs to the instance, so it lies in the arena, which has state
        // bytes. The caller has the object, so its page keeps its vector. The grain is the
        // object's. No other thread has the object, so its entry and state byte are the caller's.
        unsafe {
            let owners = self.owners(object);
            if owners != Payers::sole(owner) {
                let Some(vector) = owners.vector() else { return false };
                vector.entry(self.grain_of_page(object)).store(owner, Relaxed);
            }
            self.states.set(object.addr(), ACCOUNTED);
        }
        true
    }

    /// The owner of an object of the program's; `None` if no owner pays for it.
    ///
    /// # Safety
    /// The object belongs to the instance that this [`FastPath`] was opened for, and the caller has
    /// it.
    #[inline]
    pub unsafe fn payer(&self, object: *const u8) -> Option<u64> {
        // SAFETY: the object belongs to the instance, so it lies in the arena, which has state
        // bytes. The caller has the object, so its page keeps its vector.
        unsafe {
            let accounted = self.states.is(object.addr(), ACCOUNTED);
            if accounted { self.owner(object) } else { None }
        }
    }
}

impl<P: Platform> Objects<P> {
    /// Makes `owner` the owner of an object, and makes the page's vector if the page has another
    /// owner. Returns `false` and changes nothing if there is no memory for the vector.
    ///
    /// The caller has an object of the page, so no thread clears the page's word meanwhile. The
    /// word changes from 0 to an owner, and from an owner to a vector. A thread that finds the word
    /// set by another thread uses that owner or vector.
    ///
    /// # Safety
    /// * The object belongs to this instance, and no other thread has it.
    /// * `owner` is neither 0 nor 2^63 or above.
    #[cold]
    #[inline(never)]
    pub unsafe fn own_slowly(&self, class: Class, object: *mut u8, owner: u64) -> bool {
        self.owned.store(true, Relaxed);
        let word = self.pages.frames().frame(self.pages.pfn(object.addr())).word();
        // Relaxed: an owner is a number and publishes no memory.
        let first = match word.compare_exchange(0, Payers::sole(owner).0, Relaxed, Relaxed) {
            Ok(_) => None,
            Err(found) => Payers(found).owner().filter(|first| *first != owner),
        };
        if let Some(first) = first {
            let vector_class = Vector::class(class, self.pages.page_size());
            let Some(memory) = self.private_memory(vector_class) else { return false };
            let vector = Vector::new(memory.expose_provenance().get(), class);
            // SAFETY: `private_memory` gave the memory to this thread alone. Its class is
            // `Vector::class`, which has room for all entries.
            unsafe {
                core::slice::from_raw_parts_mut(memory.as_ptr().cast::<u64>(), vector.entries(self.pages.page_size()))
            }
            .fill(first);
            // Release pairs with the Acquire in `FastPath::owners` and `Objects::owners`.
            match word.compare_exchange(Payers::sole(first).0, vector.0, Release, Relaxed) {
                Ok(_) => _ = self.vector_bytes.fetch_add(vector_class.size() as u64, Relaxed),
                // Another thread installed a vector first, for another object of the page.
                Err(_) => self.flush_private(vector_class, memory.as_ptr()),
            }
        }
        // SAFETY: the caller says that the object belongs to this instance, that only this thread
        // has it, and that the owner is in range.
        unsafe { self.fast_path().own(object, owner) }
    }

    /// Detaches the vectors of a slab if all its objects are free or neap's own. The slab need not
    /// be wholly free: two slabs may hold each other's vectors, and neither would ever become
    /// wholly free.
    ///
    /// # Safety
    /// The caller holds the lock of the slab's class cache, and no reference to the descriptor is
    /// in use.
    pub(crate) unsafe fn detach_unused(&self, slab: SlabId, vectors: &mut VectorList) {
        // SAFETY: the caller holds the lock of the slab's class cache, and has no other reference
        // to the descriptor.
        let slab = unsafe { self.slabs.get(slab) };
        if slab.free + slab.private == slab.objects {
            // SAFETY: every object is free or neap's own. The lock is held, so no free object is
            // handed out meanwhile.
            unsafe { self.detach(slab.pfn.0..slab.pfn.0 + (1 << slab.order), vectors) };
        }
    }

    /// Clears the owners of some pages of a slab, and moves their vectors to a list.
    ///
    /// # Safety
    /// The caller holds the lock of the slab's class cache. All objects that start on these pages
    /// are free or neap's own, and stay so until the lock is dropped.
    pub(crate) unsafe fn detach(&self, pages: Range<u32>, vectors: &mut VectorList) {
        for page in pages {
            let owners = self.owners(Pfn(page));
            self.pages.frames().frame(Pfn(page)).word().store(0, Relaxed);
            let Some(vector) = owners.vector() else { continue };
            // SAFETY: the word was the only reference to the vector, and no object of the page is
            // in use, so only this thread has it. Every vector has a first entry.
            unsafe { vector.entry(0) }.store(vectors.0, Relaxed);
            vectors.0 = vector.0;
        }
    }

    /// Takes a vector off a list. Returns its memory and the class of that memory.
    pub(crate) fn next_vector(&self, vectors: &mut VectorList) -> Option<(Class, *mut u8)> {
        let vector = Vector(vectors.0).some()?;
        // SAFETY: `detach` put the vector on the list, which is this thread's alone. Every vector
        // has a first entry.
        vectors.0 = unsafe { vector.entry(0) }.load(Relaxed);
        let memory = core::ptr::with_exposed_provenance_mut(vector.address());
        let class = self.class_at(memory)?;
        self.vector_bytes.fetch_sub(class.size() as u64, Relaxed);
        Some((class, memory))
    }

    /// Total size of all vectors, in bytes.
    pub fn vector_bytes(&self) -> u64 {
        self.vector_bytes.load(Relaxed)
    }

    /// Whether any object has ever had an owner.
    pub fn has_owned(&self) -> bool {
        self.owned.load(Relaxed)
    }

    /// The owners of a page of a slab.
    pub(crate) fn owners(&self, page: Pfn) -> Payers {
        // Acquire pairs with the Release in `own_slowly`.
        Payers(self.pages.frames().frame(page).word().load(Acquire))
    }

    /// The owner of a charged object; 0 if its page has none.
    pub(crate) fn owner_at(&self, object: usize) -> u64 {
        let grain = (object & (self.pages.page_size() - 1)) / GRAIN;
        // SAFETY: the word and the grain are those of the object. It is charged, so its slab has an
        // object in use and its page keeps its vector.
        unsafe { self.owners(self.pages.pfn(object)).of(|| grain) }.unwrap_or(0)
    }

    /// Calls `each` with class, address and owner of every charged object, cached ones included.
    /// Charged runs of pages come with [`Class::NONE`]. No other thread may use this instance
    /// during the call.
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

    /// Calls `each` for the charged objects of a slab that start on one of its pages.
    fn each_accounted_on(&self, page: Pfn, each: &mut dyn FnMut(Class, *mut u8, u64)) {
        // SAFETY: the frame says that the page belongs to this slab, and no other thread uses the
        // instance.
        let slab = unsafe { self.slabs.get(SlabId(self.pages.frames().frame(page).owner())) };
        let (size, start) = (slab.class.size(), self.pages.address(slab.pfn));
        let offset = self.pages.address(page) - start;
        let end = (offset + self.pages.page_size()).div_ceil(size).min(slab.objects as usize);
        for object in (offset.div_ceil(size)..end).map(|number| start + number * size) {
            // SAFETY: the object lies in a slab, so in the mapped part of the arena, which has
            // state bytes.
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
    fn objects_on_one_page_have_distinct_entries_in_the_vector() {
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
                let owners = Payers(vector.0);
                assert_eq!((owners.owner(), owners.vector()), (None, Some(vector)), "{class:?}");
                assert_eq!(vector.entry_of(0), 0);
            }
        }
        for owner in [1, u64::MAX >> 1] {
            assert_eq!((Payers::sole(owner).owner(), Payers::sole(owner).vector()), (Some(owner), None));
        }
        assert_eq!((Payers(0).owner(), Payers(0).vector()), (None, None));
        assert_eq!(Vector::new(0, Class(1)).entry_of(4095), 4095, "every grain");
    }
}
