//! Hole punching: releases the empty pages of slabs that are partly in use.
//!
//! # Design
//!
//! A pass takes the slabs that rested since the last tick. Since then no thread took an object from
//! these slabs or returned one, so their empty pages were not needed. As Linux's percpu allocator
//! does with chunks, a pass
//! 1. isolates slabs under the class's lock, some at a time, gathers their empty pages, and
//!    detaches these pages' [vectors of owners](crate::payers);
//! 2. releases the pages with no lock held. Meanwhile no thread gets an object of these slabs, but
//!    objects may come back;
//! 3. records the holes, and moves each slab to its list: sidelined if no page is left to release,
//!    hollow if all its free objects lie in holes, partial if an object came back or the system
//!    refused the release. A slab that is wholly free is freed.
//!
//! Then the slabs used since the last tick become the resting ones. So a pass examines a slab once
//! each time it comes to rest, not at every tick.
//!
//! # Locking
//!
//! A thread that punches has the release turn, which one thread has at a time. Meanwhile it takes
//! one class's mutex at a time.

use crate::class_cache::ClassCache;
use crate::holes::{bits, runs};
use crate::objects::Objects;
use crate::size_class::Class;
use crate::slab::{On, SlabId};
use crate::slab_free::Loose;
use neap_base::Platform;
use neap_base::platform::memory::Range;
use neap_pages::{Effort, MOST_PAGES, Report};

/// Number of slabs handled under one hold of a class's lock.
const SLABS_PER_HOLD_MAX: usize = 32;

/// The most ranges that a slab has: every second page.
const RANGES_MAX: usize = MOST_PAGES as usize / 2;

/// Result of [`Objects::gather`].
struct Gathered {
    /// Isolated slabs.
    slabs: usize,
    /// Ranges to release.
    ranges: usize,
}

/// Result of [`Objects::punch_on`].
#[derive(Clone, Copy, Debug)]
pub struct Punched {
    /// Examined slabs.
    pub slabs: usize,
    /// The released pages.
    pub report: Report,
}

impl<P: Platform> Objects<P> {
    /// Releases empty pages of slabs that rested since the last call, or of all slabs with
    /// [`Effort::Full`], until `stop` returns `true`. [`Report::left`] says whether slabs are left
    /// that may have empty pages by the next call.
    pub fn punch(&self, effort: Effort, stop: &dyn Fn() -> bool) -> Report {
        (0..self.pages.nodes())
            .fold(Report::default(), |sum, node| sum.and(self.punch_on(node, effort, usize::MAX, stop).report))
    }

    /// Number of slabs of a node that [`Objects::punch_on`] would examine.
    pub fn punchable_on(&self, node: usize) -> u64 {
        let slabs = |cache: &ClassCache| u64::from(cache.partial.length) + u64::from(cache.resting.length);
        Class::all().map(|class| slabs(&self.shared(node, class).lock())).sum()
    }

    /// Runs [`Objects::punch`] on at most `most` slabs of one node.
    pub fn punch_on(&self, node: usize, effort: Effort, most: usize, stop: &dyn Fn() -> bool) -> Punched {
        let has_any =
            |cache: fn(&ClassCache) -> bool| Class::all().any(|class| cache(&self.shared(node, class).lock()));
        let mut report = Report::default();
        let (mut willing, mut looked) = (true, 0);
        // A second round takes the slabs that were in use.
        for _ in 0..1 + u32::from(effort == Effort::Full) {
            if has_any(|cache| cache.resting.length > 0) {
                let mut next = Class::all();
                let mut class = next.next();
                let gather = |ranges: &mut [Range]| {
                    let mut count = 0;
                    while let Some(at) = class
                        && count + RANGES_MAX <= ranges.len()
                        && looked < most
                    {
                        match self.gather(node, at, effort, most - looked, &mut ranges[count..]) {
                            Gathered { slabs: 0, .. } => class = next.next(),
                            Gathered { slabs, ranges } => (looked, count) = (looked + slabs, count + ranges),
                        }
                    }
                    count
                };
                let settle = |ranges: &[Range], done: usize| self.settle(node, ranges, done);
                // SAFETY: `gather` passes empty pages of isolated slabs only. No object of an
                // isolated slab is handed out until `settle` moves the slab to another list.
                let done = unsafe { self.pages.node(node).punch(&self.platform, effort, stop, gather, settle) };
                willing = done.is_none_or(|done| done.left);
                report = report.and(done.unwrap_or_default());
            }
            Class::all().for_each(|class| self.cache(node, class).lock().let_rest());
        }
        report.left = willing && has_any(|cache| cache.partial.length + cache.resting.length > 0);
        Punched { slabs: looked, report }
    }

    /// Isolates at most `most` resting slabs of a class. With [`Effort::Whole`], slabs in whole
    /// huge pages count as in use instead.
    fn gather(&self, node: usize, class: Class, effort: Effort, most: usize, ranges: &mut [Range]) -> Gathered {
        let (mut count, page_size) = (0, self.pages.page_size());
        let (mut loose, mut slabs) = (Loose::default(), 0);
        let mut cache = self.cache(node, class).lock();
        for _ in 0..SLABS_PER_HOLD_MAX.min(most) {
            if count + RANGES_MAX > ranges.len() {
                break;
            }
            let Some(slab) = cache.resting.first() else { break };
            // SAFETY: the lock is held, and the slab is on one of the cache's lists. The detached
            // pages are empty, so all objects that start on them are free.
            unsafe {
                let pfn = self.slabs.get(slab).pfn;
                if effort == Effort::Whole && self.pages.is_huge(pfn) {
                    let on = cache.partial.on;
                    cache.move_to(&self.slabs, slab, on);
                    slabs += 1;
                    continue;
                }
                let gone = self.slabs.empty_pages(slab) & !self.slabs.get(slab).holes;
                for pages in runs(gone) {
                    let (start, length) = (self.pages.address(pfn.plus(pages.start)), pages.len() * page_size);
                    ranges[count] = Range { start, length };
                    count += 1;
                    self.detach(pfn.0 + pages.start..pfn.0 + pages.end, &mut loose.vectors);
                }
                self.slabs.get(slab).touched = false;
                cache.move_to(&self.slabs, slab, if gone == 0 { On::Sidelined } else { On::Isolated });
            }
            slabs += 1;
        }
        drop(cache);
        self.give_back(loose);
        Gathered { slabs, ranges: count }
    }

    /// Records the first `done` ranges as holes, and moves the isolated slabs to their lists.
    fn settle(&self, node: usize, ranges: &[Range], done: usize) {
        let mut next = 0;
        while let Some(range) = ranges.get(next) {
            // All ranges of this class in a row: they were gathered class by class.
            let class = self.class_at(core::ptr::without_provenance(range.start)).unwrap_or(Class::NONE);
            let mut cache = self.cache(node, class).lock();
            for _ in 0..RANGES_MAX {
                let Some(range) = ranges.get(next) else { break };
                if self.class_at(core::ptr::without_provenance(range.start)) != Some(class) {
                    break;
                }
                let (pfn, pages) = (self.pages.pfn(range.start), range.length / self.pages.page_size());
                let slab = SlabId(self.pages.frames().frame(pfn).owner());
                // SAFETY: the lock is held, and only this thread, which has the release turn, frees
                // an isolated slab.
                let slab = unsafe { self.slabs.get(slab) };
                if next < done {
                    let first = (pfn.0 - slab.pfn.0) as usize;
                    slab.holes |= bits(first..first + pages);
                    cache.holes += pages as u64;
                } else {
                    slab.touched = true;
                }
                next += 1;
            }
        }
        for class in Class::all() {
            while self.let_go(node, class) {}
        }
    }

    /// Moves some isolated slabs of a class to their lists. Returns whether there may be more.
    fn let_go(&self, node: usize, class: Class) -> bool {
        let mut loose = Loose::default();
        let mut cache = self.cache(node, class).lock();
        for _ in 0..SLABS_PER_HOLD_MAX {
            let Some(id) = cache.isolated.first() else { break };
            // SAFETY: the lock is held, and the slab is on one of the cache's lists.
            unsafe {
                let slab = self.slabs.get(id);
                let (touched, wholly_free) = (slab.touched, slab.free == slab.objects);
                if wholly_free {
                    cache.forget(&self.slabs, id, &mut loose.slabs);
                } else if touched {
                    let on = cache.partial.on;
                    cache.move_to(&self.slabs, id, on);
                } else {
                    let on = if self.slabs.is_hollow(id) { On::Hollow } else { On::Sidelined };
                    cache.move_to(&self.slabs, id, on);
                }
            }
        }
        let more = cache.isolated.length > 0;
        drop(cache);
        self.give_back(loose);
        more
    }
}

impl ClassCache {
    /// If no slab rests, swaps the lists of used and of resting slabs.
    fn let_rest(&mut self) {
        if self.resting.length == 0 {
            core::mem::swap(&mut self.partial, &mut self.resting);
        }
    }
}
