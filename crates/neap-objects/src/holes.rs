//! Holes of a slab: pages without objects in use whose memory was released to the system.
//!
//! # Design
//!
//! A page is *empty* if every object that touches it is in the slab's bitmap. The waste at a slab's
//! end does not count. An empty page may become a hole. Allocations take objects that touch a hole
//! last; the page is then no longer a hole. This module computes on bits. It makes no system call
//! and does not touch the pages.
//!
//! # Locking
//!
//! The functions run under the lock of the slab's class cache.

use crate::slab::{SlabId, SlabTable};
use core::ops::Range;
use neap_base::bitmap;
use neap_pages::MOST_PAGES;

/// Result of [`SlabTable::take_hollow`].
#[derive(Clone, Copy, Debug)]
pub struct HollowTaken {
    /// Number of objects.
    pub objects: usize,
    /// A bit for each page that is no longer a hole.
    pub filled: u64,
}

/// The layout of a slab's objects on its pages.
#[derive(Clone, Copy, Debug)]
struct Layout {
    size: usize,
    objects: usize,
    pages: u32,
    page_shift: u32,
}

impl Layout {
    /// The objects that touch a page.
    fn on(&self, page: u32) -> Range<usize> {
        let (start, end) = ((page as usize) << self.page_shift, (page as usize + 1) << self.page_shift);
        (start / self.size).min(self.objects)..end.div_ceil(self.size).min(self.objects)
    }

    /// The objects that touch only pages of a range.
    fn within(&self, pages: Range<u32>) -> Range<usize> {
        let (start, end) = ((pages.start as usize) << self.page_shift, (pages.end as usize) << self.page_shift);
        start.div_ceil(self.size)..(end / self.size).min(self.objects)
    }

    /// A bit for every page that an object touches.
    fn under(&self, object: usize) -> u64 {
        let (start, last) = (object * self.size, (object + 1) * self.size - 1);
        bits(start >> self.page_shift..(last >> self.page_shift) + 1)
    }
}

/// The bits of a range, which begins below 64, is not empty, and ends at 64 at most.
pub(crate) fn bits(pages: Range<usize>) -> u64 {
    u64::MAX >> (64 - (pages.end - pages.start)) << pages.start
}

/// The runs of set bits, lowest first.
pub(crate) fn runs(mut bits: u64) -> impl Iterator<Item = Range<u32>> {
    core::iter::from_fn(move || {
        let start = (bits != 0).then_some(bits.trailing_zeros())?;
        let end = start + (bits >> start).trailing_ones();
        bits &= u64::MAX.checked_shl(end).unwrap_or(0);
        Some(start..end)
    })
}

impl SlabTable {
    /// # Safety
    /// The caller holds the lock of the slab's class cache, and no reference to the descriptor is
    /// in use.
    unsafe fn layout(&self, id: SlabId) -> Layout {
        // SAFETY: the caller holds the lock of the slab's class cache, and has no other reference
        // to the descriptor.
        let slab = unsafe { self.get(id) };
        let (objects, pages) = (slab.objects as usize, 1 << slab.order);
        Layout { size: slab.class.size(), objects, pages, page_shift: self.page_shift }
    }

    /// A bit for every empty page of a slab, holes included.
    ///
    /// # Safety
    /// The caller holds the lock of the slab's class cache, and no reference to the descriptor is
    /// in use.
    pub unsafe fn empty_pages(&self, id: SlabId) -> u64 {
        // SAFETY: the caller holds the lock of the slab's class cache, and has no other reference
        // to the descriptor.
        let layout = unsafe { self.layout(id) };
        // SAFETY: the lock guards the bitmap, too, and the count of objects is the slab's.
        let words = unsafe { self.words(id, layout.objects as u32).as_ref() };
        let is_empty = |page: &u32| {
            let objects = layout.on(*page);
            bitmap::next_clear(words, objects.start, objects.end).is_none()
        };
        (0..layout.pages.min(MOST_PAGES)).filter(is_empty).fold(0, |all, page| all | 1 << page)
    }

    /// Whether every free object of a slab touches a hole.
    ///
    /// # Safety
    /// The caller holds the lock of the slab's class cache, and no reference to the descriptor is
    /// in use.
    pub unsafe fn is_hollow(&self, id: SlabId) -> bool {
        // SAFETY: the caller holds the lock of the slab's class cache. The first reference ends
        // before the second begins.
        let (holes, layout) = unsafe { (self.get(id).holes, self.layout(id)) };
        // SAFETY: the lock guards the bitmap, too, and the count of objects is the slab's.
        let words = unsafe { self.words(id, layout.objects as u32).as_ref() };
        runs(!holes & bits(0..layout.pages as usize)).all(|pages| {
            let objects = layout.within(pages);
            bitmap::next_set(words, objects.start, objects.end).is_none()
        })
    }

    /// Takes up to `most` objects that touch no hole out of a slab, lowest first. Calls `each` with
    /// each range of neighbouring object numbers, and returns the number of objects taken.
    ///
    /// # Safety
    /// The caller holds the lock of the slab's class cache, and no reference to the descriptor is
    /// in use.
    pub unsafe fn take_backed(&self, id: SlabId, most: usize, mut each: impl FnMut(Range<u32>)) -> usize {
        // SAFETY: the caller holds the lock of the slab's class cache. The first reference ends
        // before the second begins.
        let (holes, layout) = unsafe { (self.get(id).holes, self.layout(id)) };
        if holes == 0 {
            // SAFETY: the caller holds the lock of the slab's class cache, and no reference to the
            // descriptor is left.
            return unsafe { self.take(id, most, each) };
        }
        let mut left = most;
        for pages in runs(!holes & bits(0..layout.pages as usize)) {
            // SAFETY: the caller holds the lock of the slab's class cache, and no reference to the
            // descriptor is left.
            left -= unsafe { self.take_range(id, layout.within(pages), left, &mut each) };
        }
        most - left
    }

    /// Takes up to `most` objects, lowest first, that together touch at most `pages` holes. These
    /// pages are then no longer holes.
    ///
    /// # Safety
    /// The caller holds the lock of the slab's class cache, and no reference to the descriptor is
    /// in use.
    pub unsafe fn take_hollow(
        &self,
        id: SlabId,
        most: usize,
        pages: u32,
        mut each: impl FnMut(Range<u32>),
    ) -> HollowTaken {
        // SAFETY: the caller holds the lock of the slab's class cache. The first reference ends
        // before the second begins.
        let (holes, layout) = unsafe { (self.get(id).holes, self.layout(id)) };
        let (mut filled, mut taken) = (0_u64, 0);
        // SAFETY: the lock guards the bitmap, too, and the count of objects is the slab's.
        let words = unsafe { self.words(id, layout.objects as u32).as_mut() };
        let mut from = 0;
        while taken < most
            && let Some(object) = bitmap::next_set(words, from, layout.objects)
            && let more = filled | layout.under(object) & holes
            && more.count_ones() <= pages
        {
            bitmap::clear(words, object);
            each(object as u32..object as u32 + 1);
            (from, taken, filled) = (object + 1, taken + 1, more);
        }
        // SAFETY: the caller holds the lock of the slab's class cache, and no reference to the
        // descriptor is left.
        let slab = unsafe { self.get(id) };
        slab.free -= taken as u32;
        slab.holes &= !filled;
        HollowTaken { objects: taken, filled }
    }

    /// Takes up to `most` free objects of a range, lowest first. Returns their number.
    ///
    /// # Safety
    /// The caller holds the lock of the slab's class cache, and no reference to the descriptor is
    /// in use.
    unsafe fn take_range(
        &self,
        id: SlabId,
        objects: Range<usize>,
        most: usize,
        each: &mut impl FnMut(Range<u32>),
    ) -> usize {
        // SAFETY: the lock guards the bitmap, too. The reference to the descriptor ends once its
        // count of objects is read.
        let words = unsafe { self.words(id, self.get(id).objects).as_mut() };
        let (mut from, mut left) = (objects.start, most);
        while left > 0
            && let Some(first) = bitmap::next_set(words, from, objects.end)
        {
            let end = objects.end.min(first.saturating_add(left));
            from = bitmap::next_clear(words, first, end).unwrap_or(end);
            bitmap::clear_range(words, first, from);
            each(first as u32..from as u32);
            left -= from - first;
        }
        // SAFETY: the caller holds the lock of the slab's class cache, and no reference to the
        // descriptor is left.
        unsafe { self.get(id) }.free -= (most - left) as u32;
        most - left
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size_class::Class;
    use core::ptr::NonNull;
    use neap_base::Pfn;
    use neap_testing::random::{Random, seed};
    use std::collections::BTreeSet;
    use std::vec::Vec;

    const PAGES: [usize; 3] = [4 << 10, 16 << 10, 64 << 10];

    /// A table with one slab, all of it free, and a model of its objects by bytes.
    struct Model {
        table: SlabTable,
        slab: SlabId,
        size: usize,
        page_size: usize,
        pages: u32,
        free: BTreeSet<u32>,
        holes: u64,
        _memory: Vec<u128>,
    }

    impl Model {
        fn new(class: Class, page_size: usize) -> Model {
            let mut memory = std::vec![0_u128; 4096];
            let base = memory.as_mut_ptr().cast::<u8>();
            let base = NonNull::new(base.wrapping_add(base.align_offset(64))).unwrap();
            // SAFETY: the memory is aligned by hand to 64 bytes, zero, and lives in the same value.
            let table = unsafe { SlabTable::new(base, 32 << 10 << crate::slab::TABLE_SHIFT, page_size) };
            let shape = class.slab_shape(page_size);
            let slab = table.create(Pfn(0), class, shape, |_| true).unwrap();
            let (pages, free) = (1 << shape.order, (0..shape.objects).collect());
            Model { table, slab, size: class.size(), page_size, pages, free, holes: 0, _memory: memory }
        }

        /// The pages of an object, from its bytes one by one.
        fn pages_of(&self, object: u32) -> u64 {
            let start = object as usize * self.size;
            (start..start + self.size).step_by(16).fold(0, |all, byte| all | 1 << (byte / self.page_size))
        }

        fn empty(&self) -> u64 {
            let all = if self.pages == 64 { u64::MAX } else { (1 << self.pages) - 1 };
            // SAFETY: the test has one thread.
            let objects = unsafe { self.table.get(self.slab) }.objects;
            (0..objects).filter(|object| !self.free.contains(object)).fold(all, |all, used| all & !self.pages_of(used))
        }

        fn backed(&self) -> Vec<u32> {
            self.free.iter().copied().filter(|&object| self.pages_of(object) & self.holes == 0).collect()
        }

        fn check(&self) {
            // SAFETY: the test has one thread.
            unsafe {
                assert_eq!(self.table.empty_pages(self.slab), self.empty());
                assert_eq!(self.table.get(self.slab).holes, self.holes);
                assert_eq!(self.table.get(self.slab).free as usize, self.free.len());
                assert!(self.table.is_consistent(self.slab));
                assert_eq!(self.table.is_hollow(self.slab), self.backed().is_empty());
            }
        }

        fn step(&mut self, random: &mut Random) {
            let most = random.below(1 + 2 * self.free.len().max(1));
            match random.below(5) {
                // SAFETY: the test has one thread.
                0 => unsafe {
                    let used: Vec<u32> =
                        (0..self.table.get(self.slab).objects).filter(|object| !self.free.contains(object)).collect();
                    for object in used.into_iter().filter(|_| random.below(3) > 0) {
                        assert!(self.table.put(self.slab, object));
                        self.free.insert(object);
                    }
                },
                1 => {
                    self.holes |= self.empty() & random.next();
                    // SAFETY: the test has one thread.
                    unsafe { self.table.get(self.slab) }.holes = self.holes;
                }
                2 | 3 => {
                    let expected: Vec<u32> = self.backed().into_iter().take(most).collect();
                    let mut taken = Vec::new();
                    // SAFETY: the test has one thread.
                    let count = unsafe { self.table.take_backed(self.slab, most, |objects| taken.extend(objects)) };
                    assert_eq!((count, &taken), (expected.len(), &expected));
                    taken.iter().for_each(|object| assert!(self.free.remove(object)));
                }
                _ => {
                    let (pages, mut filled, mut expected) = (random.below(6) as u32, 0, Vec::new());
                    for &object in self.free.iter().take(most) {
                        let more = filled | self.pages_of(object) & self.holes;
                        if more.count_ones() > pages {
                            break;
                        }
                        filled = more;
                        expected.push(object);
                    }
                    let mut taken = Vec::new();
                    // SAFETY: the test has one thread.
                    let found =
                        unsafe { self.table.take_hollow(self.slab, most, pages, |objects| taken.extend(objects)) };
                    assert_eq!((found.objects, found.filled, &taken), (expected.len(), filled, &expected));
                    taken.iter().for_each(|object| assert!(self.free.remove(object)));
                    self.holes &= !filled;
                }
            }
            self.check();
        }
    }

    #[test]
    fn every_class_on_every_page_size_agrees_with_its_bytes() {
        let mut random = Random(seed());
        // A step takes some hundred times as long in Miri.
        let (apart, steps) = if cfg!(miri) { (71, 3) } else { (1, 60) };
        let all = Class::all().flat_map(|class| PAGES.map(|page_size| (class, page_size)));
        for (class, page_size) in all.skip(apart / 2).step_by(apart) {
            let mut model = Model::new(class, page_size);
            assert!(model.pages <= MOST_PAGES, "{class:?}");
            model.check();
            (0..steps).for_each(|_| model.step(&mut random));
        }
    }

    #[test]
    fn runs_are_the_set_bits() {
        let mut random = Random(seed());
        let some = (0..if cfg!(miri) { 20 } else { 1000 }).map(|_| random.next() & random.next());
        for word in some.chain([0, 1, u64::MAX, 1 << 63, u64::MAX >> 1, u64::MAX << 1, 0x5555_5555_5555_5555]) {
            let all: Vec<Range<u32>> = runs(word).collect();
            assert!(all.windows(2).all(|pair| pair[0].end < pair[1].start), "{word:#x}: {all:?}");
            let back = all.into_iter().fold(0, |back, run| back | bits(run.start as usize..run.end as usize));
            assert_eq!(back, word);
        }
    }
}
