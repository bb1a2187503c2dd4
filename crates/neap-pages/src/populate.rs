//! Population of huge pages: memory for 2 MiB at once, before the program faults it in page by
//! page.
//!
//! # Design
//!
//! A small block may have to come from an aligned block of 2 MiB without any memory. If the
//! resident memory [at most doubles](at_most_doubles), the allocating thread detaches the block,
//! populates it as a huge page, and puts it back as backed. The first huge page waits for a larger
//! zone, unless the block's class is known to take more. Several threads may populate, each a block
//! of its own. While more pages are being populated than are resident, other threads wait.
//!
//! Allowing huge pages takes the process's mapping lock for writing, which waits for faults in the
//! same mapping. So one thread allows huge pages for a batch of blocks. Meanwhile other threads
//! populate the last blocks of the previous batch, or wait. Blocks that wait for population stay
//! detached, so small blocks never come from unbacked memory that allows huge pages. The next tick
//! forbids huge pages again before it releases anything, and puts the waiting blocks back into the
//! buddy. So the kernel never fills released memory again, and adjacent mappings merge.
//!
//! A block's parts of tables are populated with the block. Otherwise threads would fault them in
//! under a lock. Runs are not populated, since the program may not touch them: see
//! [`huge_runs`](crate::huge_runs).
//!
//! # Locking
//!
//! No thread holds the zone's mutex over a system call.

use crate::arena::Arena;
use crate::buddy::{FoundBlock, Memory, UNBACKED};
use crate::frames::State;
use crate::shape::EarlyTables;
use crate::units::{HUGE, UNLIMITED, at_most_doubles};
use crate::zone::{Inner, Touched, Zone, ZoneGuard};
use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use neap_base::platform::memory::HugePages;
use neap_base::sync::{wait, wake};
use neap_base::{Order, Pfn, Platform};

/// The largest order of a requested block that leads to population.
pub(crate) const LARGEST: Order = Order(8);
/// With at least this many pages in use or backed, beyond the pages that lists keep, a thread
/// populates the first block, if it is none of [`Touched::one_more`]: 3 MiB.
const FLOOR_PAGES: u32 = 768;
/// The most blocks for which huge pages are allowed at once: 128 MiB of addresses, no memory.
const BATCH_BLOCKS_MAX: u32 = 64;
/// A batch is at most this multiple of the resident memory. Each time huge pages are allowed for
/// one, new faults wait for the faults in progress.
const RESIDENT_MULTIPLE_MAX: u32 = 2;
/// Once a batch has this many blocks left, a thread allows huge pages for the next batch. Other
/// threads populate the blocks left meanwhile.
const AHEAD_BLOCKS: u32 = 4;
/// The most pages that come from unbacked pieces of less than 2 MiB between two ticks. A program
/// that grows slowly fills the pieces. One that grows faster gets huge pages, and the pieces are
/// left until there is no whole block.
const PIECE_PAGES_MAX: u32 = 32;
/// The smallest blocks that threads populate because the blocks' pages were released and are needed
/// again: 64 KiB.
const LEAST_REFILL: Order = Order(4);
/// A thread populates a block again only if at most one in `FEW` pages of each part is backed.
const FEW: u32 = 4;
/// Number of opportunities for population that are skipped after the system refused one.
const SKIPPED_AFTER_REFUSAL: u32 = 256;

/// The state of population, protected by the zone's mutex.
#[derive(Debug, Default)]
pub(crate) struct Population {
    /// Whether there are huge pages and they are wanted.
    enabled: bool,
    /// The fewest pages in use or backed with which the first block is populated.
    floor: u32,
    /// Number of pages that threads are populating.
    pub(crate) busy: u32,
    /// Whether a thread is allowing huge pages for a batch of blocks.
    allowing: bool,
    /// Whether a thread is releasing memory.
    paused: bool,
    /// Whether a thread waits for `busy` or `allowing` to change.
    awaited: bool,
    /// Detached blocks in a row that allow huge pages and wait to be populated.
    ready: Range<u32>,
    /// A range that contains all memory of the zone that allows huge pages, except for runs.
    allowed: Range<u32>,
    /// The blocks of the next batch, which become `ready` when that is empty.
    next: Range<u32>,
    /// Number of opportunities to skip.
    left_to_skip: u32,
    /// Pages that came from unbacked pieces of less than 2 MiB since the last tick.
    pub(crate) pieces: u32,
    /// Pages that may be needed again: see [`Pages::expect_again`](crate::Pages::expect_again).
    pub(crate) again: u32,
    /// Pages populated so far.
    pub(crate) pages: u64,
}

impl Population {
    /// The state of a new zone. Lists keep up to `listed` pages, which count as used although they
    /// may never have been touched.
    pub(crate) fn new(enabled: bool, listed: u32) -> Population {
        let mut population = Population { enabled, ..Population::default() };
        population.set_listed(listed);
        population
    }

    /// Sets the most pages that lists keep without tuning.
    pub(crate) fn set_listed(&mut self, listed: u32) {
        self.floor = FLOOR_PAGES.saturating_add(listed);
    }

    /// Records that huge pages are allowed in a range from now on.
    fn note_allowed(&mut self, pages: &Range<u32>) {
        let Range { start, end } = self.allowed;
        let start = if start == end { pages.start } else { start.min(pages.start) };
        self.allowed = start..end.max(pages.end);
    }
}

/// A step of population, before a block is taken.
#[derive(Debug)]
pub(crate) enum Step {
    /// Allow huge pages for these detached blocks.
    Allow(Range<u32>),
    /// Wait until the zone's count of steps differs from this number. Another thread then has
    /// allowed huge pages or populated a block.
    Wait(u32),
    /// Populate this detached block, and early tables if the caller will write to them.
    Populate(Pfn, EarlyTables),
    /// Populate this detached block of this order. Most of its pages were released and are expected
    /// to be needed again.
    Refill(Pfn, Order),
}

impl Inner {
    /// The next step before a block is taken, if the block would come from memory that is worth
    /// population. Any blocks in the result are detached. `steps` is the zone's count of steps.
    pub(crate) fn step_to_populate(&mut self, block: Touched, steps: &AtomicU32) -> Option<Step> {
        let Touched { order, one_more, early } = block;
        let resident = self.used() + self.buddy.backed_free;
        let has_begun = self.population.pages > 0;
        let is_worth = one_more || has_begun || resident >= self.population.floor;
        let fits = at_most_doubles(HUGE.pages(), resident) && self.resident_room() >= HUGE.pages();
        let fits = fits && !(self.population.paused && self.budget != UNLIMITED);
        if !self.population.enabled || order > LARGEST || !is_worth || !fits {
            return None;
        }
        let found = self.buddy.find(order);
        let missing = found.and_then(|found| self.block_to_refill(found));
        if missing.is_none() && found.is_some_and(|found| found.class != UNBACKED) {
            return None;
        }
        let is_piece = missing.is_none() && found.is_some_and(|found| found.order < HUGE);
        if is_piece && self.population.pieces < PIECE_PAGES_MAX {
            self.population.pieces += order.pages();
            return None;
        }
        if self.population.left_to_skip > 0 {
            self.population.left_to_skip -= 1;
            return None;
        }
        if let (Some(size), Some(found)) = (missing, found) {
            let pfn = self.buddy.carve(found, size).pfn;
            self.buddy.frames.frame(pfn).set_head(State::Releasing, size);
            self.releasing += size.pages();
            self.population.busy += size.pages();
            self.population.again -= size.pages();
            return Some(Step::Refill(pfn, size));
        }
        // If more is being populated than is resident, this thread waits. A small page would cost
        // more: it would split a block of 2 MiB, whose other pages would come as small pages too.
        if self.population.busy > resident {
            return Some(self.wait_for_step(steps));
        }
        let population = &mut self.population;
        if population.ready.is_empty() {
            population.ready = core::mem::take(&mut population.next);
        }
        let (ready, few) = (population.ready.len(), (AHEAD_BLOCKS * HUGE.pages()) as usize);
        if found.is_some() && ready <= few && population.next.is_empty() {
            if population.allowing {
                if ready == 0 {
                    return Some(self.wait_for_step(steps));
                }
            } else {
                let blocks = (resident.saturating_mul(RESIDENT_MULTIPLE_MAX) / HUGE.pages()).clamp(1, BATCH_BLOCKS_MAX);
                if let Some(pages) = self.detach_huge(blocks) {
                    self.population.allowing = true;
                    return Some(Step::Allow(pages));
                }
            }
        }
        let population = &mut self.population;
        let start = population.ready.start;
        (!population.ready.is_empty()).then(|| {
            population.ready.start += HUGE.pages();
            population.busy += HUGE.pages();
            Step::Populate(Pfn(start), early)
        })
    }

    /// The order of the part of a found block to populate, at most 2 MiB, because its pages were
    /// released and are expected to be needed again. `None` if too many of its pages are backed, or
    /// if it is too small.
    fn block_to_refill(&self, FoundBlock { pfn, order: size, class }: FoundBlock) -> Option<Order> {
        let part = size.min(HUGE);
        let pages = part.pages();
        if part < LEAST_REFILL || self.population.again < pages || class == UNBACKED && size >= HUGE {
            return None;
        }
        let mut parts = (pfn.0..pfn.0 + size.pages()).step_by(pages as usize);
        parts.all(|part| self.buddy.count_backed(Pfn(part), pages) <= pages / FEW).then_some(part)
    }

    /// A step that waits until the next step is over.
    fn wait_for_step(&mut self, steps: &AtomicU32) -> Step {
        self.population.awaited = true;
        // Relaxed: `steps` changes under the lock, which this thread holds. `wait` compares it
        // again.
        Step::Wait(steps.load(Relaxed))
    }

    /// Detaches up to `most` wholly unbacked blocks that lie in a row.
    fn detach_huge(&mut self, most: u32) -> Option<Range<u32>> {
        let mut pages: Option<Range<u32>> = None;
        for _ in 0..most {
            let Some(found @ FoundBlock { class: UNBACKED, .. }) = self.buddy.find(HUGE) else { break };
            if pages.as_ref().is_some_and(|pages| pages.end != found.pfn.0) {
                break;
            }
            let pfn = self.buddy.carve(found, HUGE).pfn;
            self.buddy.frames.frame(pfn).set_head(State::Releasing, HUGE);
            self.releasing += HUGE.pages();
            pages = Some(pages.map_or(pfn.0, |pages| pages.start)..pfn.0 + HUGE.pages());
        }
        pages
    }

    /// Puts a detached block of two mebibytes back.
    fn attach_huge(&mut self, pfn: Pfn, memory: Memory) {
        self.attach_populated(pfn, HUGE, memory);
    }

    /// Puts a detached block back.
    fn attach_populated(&mut self, pfn: Pfn, size: Order, memory: Memory) {
        self.buddy.frames.frame(pfn).set_state(State::Inside);
        self.buddy.give(pfn, size, memory);
        self.releasing -= size.pages();
    }
}

impl Zone {
    /// Runs a step of population.
    #[cold]
    pub(crate) fn populate<P: Platform>(&self, arena: &Arena, platform: &P, step: Step) {
        match step {
            Step::Allow(pages) => self.allow_huge_pages(arena, platform, pages),
            Step::Wait(steps) => wait(&self.steps, steps),
            Step::Populate(pfn, early) => self.populate_block(arena, platform, pfn, early),
            Step::Refill(pfn, size) => self.refill_block(arena, platform, pfn, size),
        }
    }

    /// Allows huge pages for blocks, and makes them available for population.
    fn allow_huge_pages<P: Platform>(&self, arena: &Arena, platform: &P, pages: Range<u32>) {
        let bytes = pages.len() << arena.page_shift();
        // If the system refuses, small pages come.
        let _ = platform.huge_pages(arena.address(Pfn(pages.start)), bytes, HugePages::Allowed);
        let mut inner = self.lock();
        inner.population.note_allowed(&pages);
        inner.population.next = pages;
        inner.population.allowing = false;
        self.end_step(inner);
    }

    /// Counts a step, and wakes threads that wait for one.
    fn end_step(&self, mut inner: ZoneGuard<'_>) {
        self.steps.fetch_add(1, Relaxed);
        let awaited = core::mem::take(&mut inner.population.awaited);
        drop(inner);
        if awaited {
            wake(&self.steps, u32::MAX >> 1);
        }
    }

    /// Populates a block that was detached for it, and puts it back.
    fn populate_block<P: Platform>(&self, arena: &Arena, platform: &P, pfn: Pfn, early: EarlyTables) {
        let address = arena.address(pfn);
        let bytes = (HUGE.pages() as usize) << arena.page_shift();
        // This store faults the huge page in under the lock of its mapping. `populate` below holds
        // the process's mapping lock, for which other threads' mapping calls wait, and finds the
        // page there. The kernel clears a huge page towards the faulting address. A fault at the
        // end makes it clear upwards, which is faster. SAFETY: the arena maps the block, and it is
        // detached, so no other thread uses it.
        unsafe { core::ptr::with_exposed_provenance_mut::<u8>(address + bytes - 1).write_volatile(0) };
        let answer = platform.populate(address, bytes);
        if answer.is_ok() {
            arena.note_huge(pfn);
            arena.populate_tables(platform, pfn, HUGE.pages(), early);
        }
        let mut inner = self.lock();
        inner.population.busy -= HUGE.pages();
        match answer {
            Ok(()) => inner.population.pages += u64::from(HUGE.pages()),
            Err(_) => inner.population.left_to_skip = SKIPPED_AFTER_REFUSAL,
        }
        // Even after a refusal, a part of the block may have memory now.
        inner.attach_huge(pfn, Memory::All);
        self.count_growth(&inner, HUGE.pages().into());
        self.end_step(inner);
    }

    /// Populates a detached block. First releases a block of 2 MiB, since the system makes no huge
    /// page where there are small pages.
    fn refill_block<P: Platform>(&self, arena: &Arena, platform: &P, pfn: Pfn, size: Order) {
        let (address, bytes) = (arena.address(pfn), (size.pages() as usize) << arena.page_shift());
        // SAFETY: the block is detached, so no thread needs its contents.
        if size == HUGE && unsafe { platform.release_unless_locked(address, bytes) }.is_ok() {
            // If the system refuses, small pages come.
            let _ = platform.huge_pages(address, bytes, HugePages::Allowed);
            self.forbid_later(&(pfn.0..pfn.0 + size.pages()));
            return self.populate_block(arena, platform, pfn, EarlyTables::Written);
        }
        let answer = platform.populate(address, bytes);
        let mut inner = self.lock();
        inner.population.busy -= size.pages();
        match answer {
            Ok(()) => inner.population.pages += u64::from(size.pages()),
            Err(_) => inner.population.left_to_skip = SKIPPED_AFTER_REFUSAL,
        }
        // Even after a refusal, a part of the block may have memory now.
        inner.attach_populated(pfn, size, Memory::All);
        self.count_growth(&inner, size.pages().into());
        self.end_step(inner);
    }

    /// Lets the next tick forbid huge pages in a range.
    pub(crate) fn forbid_later(&self, pages: &Range<u32>) {
        self.lock().population.note_allowed(pages);
    }

    /// Calls `release` after [`Zone::end_population`]: the kernel would fill released pages again
    /// in ranges where it may make huge pages. With a budget, no thread populates meanwhile, since
    /// that memory could be released next, in a range that allows huge pages again.
    pub(crate) fn without_population<P: Platform, T>(
        &self,
        arena: &Arena,
        platform: &P,
        release: impl FnOnce() -> T,
    ) -> T {
        self.lock().population.paused = true;
        self.end_population(arena, platform);
        let result = release();
        self.lock().population.paused = false;
        result
    }

    /// Forbids huge pages again and puts waiting blocks back. Returns whether any blocks waited.
    /// Blocks of other nodes go on waiting.
    pub(crate) fn end_population<P: Platform>(&self, arena: &Arena, platform: &P) -> bool {
        let (waiting, allowed) = {
            let Population { ready, next, allowed, .. } = &mut self.lock().population;
            ([core::mem::take(ready), core::mem::take(next)], core::mem::take(allowed))
        };
        if !arena.forbid_huge_pages(platform, allowed.clone(), self.node) {
            self.forbid_later(&allowed);
        }
        let waited = waiting.iter().any(|pages| !pages.is_empty());
        if waited {
            let mut inner = self.lock();
            let blocks = waiting.into_iter().flat_map(|pages| pages.step_by(HUGE.pages() as usize));
            blocks.for_each(|pfn| inner.attach_huge(Pfn(pfn), Memory::AsRecorded));
        }
        waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{Opened, shape};
    use crate::purge::Effort;
    use crate::shape::Shape;
    use crate::zone::INTERVALS;
    use core::sync::atomic::AtomicBool;
    use neap_testing::virtual_platform::Virtual;
    use std::vec::Vec;

    #[test]
    fn allocation_waits_for_population_instead_of_small_pages() {
        let machine = Virtual::new(4096, 2);
        let o = Opened::new(&machine, &Shape { huge: true, ..shape(None) }).unwrap();
        // Until some blocks have been populated and all their memory is used.
        while o.pages.statistics().populated == 0 || o.pages.statistics().backed_free >= 32 {
            o.pages.allocate_one_more_block(&machine, Order(5), EarlyTables::Written).unwrap();
        }
        let (before, more) = (o.pages.statistics(), 16_384);
        o.pages.zone.lock().population.busy += more;
        let (has, steps) = (AtomicBool::new(false), o.pages.zone.steps.load(Relaxed));
        std::thread::scope(|scope| {
            let taken = scope.spawn(|| {
                let block = o.pages.allocate_one_more_block(&machine, Order(5), EarlyTables::Written).unwrap();
                has.store(true, Relaxed);
                block
            });
            while !has.load(Relaxed) && !o.pages.zone.lock().population.awaited {
                std::thread::yield_now();
            }
            assert!(!has.load(Relaxed) && o.pages.statistics().used == before.used);
            // For the waiting thread, population seems finished.
            let mut inner = o.pages.zone.lock();
            inner.population.busy -= more;
            o.pages.zone.end_step(inner);
            assert!(
                !taken.join().unwrap().zero,
                "the block is part of a populated block, which is not known to be zero"
            );
        });
        assert!(o.pages.zone.steps.load(Relaxed) > steps + 1 && o.pages.statistics().populated > before.populated);
        o.pages.verify().unwrap();
    }

    /// With room for one huge page, one thread at a time populates.
    #[test]
    fn pages_in_population_take_the_room_of_a_budget() {
        let machine = Virtual::new(4096, 1);
        let o = Opened::new(&machine, &Shape { huge: true, ..shape(Some(1 << 20)) }).unwrap();
        while o.pages.statistics().populated == 0 {
            o.pages.allocate_one_more_block(&machine, Order(5), EarlyTables::Written).unwrap();
        }
        let mut inner = o.pages.zone.lock();
        let room = inner.resident_room();
        inner.population.busy += HUGE.pages();
        assert_eq!(inner.resident_room(), room - HUGE.pages());
        inner.population.busy -= HUGE.pages();
    }

    /// Memory that is populated while another thread releases could be released next, in a range
    /// that allows huge pages. The kernel would then fill it beyond the budget.
    #[test]
    fn no_thread_populates_under_a_budget_during_a_release() {
        for (budget, populates) in [(Some(1 << 20), false), (None, true)] {
            let machine = Virtual::new(4096, 1);
            let o = Opened::new(&machine, &Shape { huge: true, ..shape(budget) }).unwrap();
            let take = || _ = o.pages.allocate_one_more_block(&machine, Order(5), EarlyTables::Written).unwrap();
            let populated = || o.pages.statistics().populated > 0;
            o.pages.zone.without_population(&o.pages.arena, &machine, || (0..100).for_each(|_| take()));
            assert_eq!(populated(), populates, "{budget:?} during a release");
            (0..100).for_each(|_| take());
            assert!(populated(), "{budget:?} afterwards");
        }
    }

    /// A thread that passed the budget while another thread populates waits for the populated
    /// pages, and releases them.
    #[test]
    fn sheds_wait_for_pages_in_population() {
        let machine = Virtual::new(4096, 1);
        let o = Opened::new(&machine, &shape(Some(1024))).unwrap();
        o.pages.allocate_run(&machine, 1000, 1).unwrap();
        let populate = |pages| {
            let mut inner = o.pages.zone.lock();
            inner.population.busy = pages;
            o.pages.zone.note_beyond(&inner);
        };
        populate(HUGE.pages());
        let looks = AtomicU32::new(0);
        let stop = || {
            if looks.fetch_add(1, Relaxed) == 9 {
                populate(0);
            }
            false
        };
        o.pages.shed_until(&machine, false, &stop);
        assert_eq!((looks.load(Relaxed), o.pages.zone.beyond()), (10, 0));
    }

    /// A program that grows by a slab now and then reuses the parts of a huge page that ticks
    /// released.
    #[test]
    fn released_pieces_are_reused_before_a_new_huge_page() {
        let machine = Virtual::new(4096, 1);
        let o = opened_with_a_huge_page(&machine);
        for _ in 0..12 {
            (0..=INTERVALS).for_each(|_| _ = o.pages.tick(&machine));
            assert_eq!(o.pages.statistics().backed_free, 0);
            o.pages.allocate_one_more_block(&machine, Order(5), EarlyTables::Written).unwrap();
        }
        assert_eq!(o.pages.statistics().populated, 512);
        o.pages.verify().unwrap();
    }

    /// A program that grows fast takes huge pages although pieces are left.
    #[test]
    fn fast_growth_leaves_pieces_for_later() {
        let machine = Virtual::new(4096, 1);
        let o = opened_with_a_huge_page(&machine);
        (0..=INTERVALS).for_each(|_| _ = o.pages.tick(&machine));
        let zero = || o.pages.allocate_one_more_block(&machine, Order(5), EarlyTables::Written).unwrap().zero;
        assert_eq!((0..8).filter(|_| zero()).count(), PIECE_PAGES_MAX as usize / 32, "blocks out of pieces");
        assert_eq!(o.pages.statistics().populated, 1024);
        o.pages.verify().unwrap();
    }

    /// A heap with huge pages does not go on with small ones, whatever lists may keep.
    #[test]
    fn any_block_comes_from_huge_pages_once_there_is_one() {
        let machine = Virtual::new(4096, 1);
        let o = opened_with_a_huge_page(&machine);
        while o.pages.statistics().populated < 1024 {
            o.pages.allocate_block(&machine, Order(4)).unwrap();
            let inner = o.pages.zone.lock();
            assert!(inner.resident() < inner.population.floor, "{} pages are resident", inner.resident());
        }
        o.pages.verify().unwrap();
    }

    /// Opens a zone and takes blocks of 32 pages until the first huge page is populated.
    fn opened_with_a_huge_page(machine: &Virtual) -> Opened<'_, Virtual> {
        let o = Opened::new(machine, &Shape { huge: true, ..shape(None) }).unwrap();
        while o.pages.statistics().populated == 0 {
            o.pages.allocate_one_more_block(machine, Order(5), EarlyTables::Written).unwrap();
        }
        o
    }

    /// Pages that were released between a few resident ones are populated again by one call for
    /// each block.
    #[test]
    fn released_pages_expected_again_are_populated_in_bulk() {
        let machine = Virtual::new(4096, 1);
        let o = Opened::new(&machine, &Shape { huge: true, ..shape(None) }).unwrap();
        let take = |order: u8| o.pages.allocate_one_more_block(&machine, Order(order), EarlyTables::Written).unwrap();
        let mut blocks = [(); 256].map(|()| take(5));
        for expected in [false, true] {
            let mut freed: Vec<_> =
                blocks.iter_mut().enumerate().filter(|(n, _)| n % 8 > 0).map(|(_, block)| block).collect();
            freed.iter().for_each(|block| o.pages.free_block(&machine, block.pfn, Order(5)));
            o.pages.drain_all(&machine);
            let released = o.pages.release_blocks(&machine, u32::MAX, Order(4), Effort::Sparing, &|| false).released;
            assert!(released >= 224 * 32, "{released} pages");
            if expected {
                o.pages.expect_again(released);
            }
            let before = o.pages.statistics().populated;
            freed[..200].iter_mut().for_each(|block| **block = take(5));
            let populated = o.pages.statistics().populated - before;
            let zero = freed[..200].iter().filter(|block| block.zero).count();
            // If nothing is expected, the first blocks are small pages out of the pieces.
            let pieces = PIECE_PAGES_MAX as usize / 32;
            assert!(if expected { populated >= 200 * 32 && zero == 0 } else { zero >= pieces }, "{populated}, {zero}");
            freed[200..].iter_mut().for_each(|block| **block = take(5));
            o.pages.verify().unwrap();
        }
    }

    #[test]
    fn ticks_forget_what_may_be_needed_again() {
        let machine = Virtual::new(4096, 1);
        let o = Opened::new(&machine, &shape(None)).unwrap();
        o.pages.expect_again(100);
        let after = [(); 8].map(|()| {
            o.pages.tick(&machine);
            o.pages.zone.lock().population.again
        });
        assert_eq!(after, [50, 25, 12, 6, 3, 1, 0, 0]);
    }

    #[test]
    fn everything_that_was_allowed_lies_in_what_is_forbidden() {
        let ranges = [512..1024, 4096..8192, 2048..2560];
        for first in 0..3 {
            let mut population = Population::new(true, 0);
            (first..first + 3).for_each(|n| population.note_allowed(&ranges[n % 3]));
            assert_eq!(population.allowed, 512..8192);
        }
    }
}
