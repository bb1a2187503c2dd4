//! Release of memory to the system.
//!
//! # Design
//!
//! A run detaches free blocks from the buddy and releases their memory by `madvise`. Whole chunks
//! come first: adjacent chunks by one call of at most 32 MiB, with their parts of side tables.
//! Smaller blocks follow. One call releases up to 512 of them if the kernel supports that;
//! otherwise the run releases a few one by one. [`ReleasePass::held`] releases pages of blocks that
//! are handed out, which their holders choose. Blocks that the system refused stay as they were.
//! The caller decides how many pages are released.
//!
//! A part of a whole huge page is released late ([`Effort::Whole`]), since the rest of the huge
//! page is slower afterwards and never becomes whole again. The huge page is split first. Otherwise
//! the kernel keeps all of it until the container is short of memory. A release that makes room for
//! pages that another allocation takes at once does not split.
//!
//! # Locking
//!
//! Only the thread that has the turn releases. To other threads [`Release::turn`] returns `None`.
//! During a system call, a thread holds no lock but the turn.

use crate::arena::Arena;
use crate::buddy::Buddy;
use crate::isolate::{DetachedBlock, DetachedChunks};
use crate::units::CHUNK;

use crate::shape::MARKED;
use crate::tables::{FRAMES, OWN_TABLES};
use crate::units::HUGE_BYTES;
use crate::zone::{Zone, add};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use neap_base::platform::memory::{Range, SCATTERED_RANGES};
use neap_base::{Order, Pfn, Platform};

/// The most bytes of one call. During a call the kernel flushes other CPUs' address translations
/// and holds locks.
const CALL_BYTES_MAX: usize = 32 << 20;
/// The most calls for single blocks in one tick.
const SINGLE_CALLS_MAX: u32 = 64;
/// Number of refused calls after which a run releases no more chunks.
const REFUSALS_MAX: u32 = 2;
/// The most ticks without a release after the system refused everything. Also the number of runs
/// that release blocks one by one after the system refused a call for several.
const IDLE_TICKS_MAX: u32 = 64;

/// The result of a tick or release.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Report {
    /// Number of pages released.
    pub released: u32,
    /// Number of system calls made for that.
    pub calls: u32,
    /// Number of these calls that failed.
    pub failed: u32,
    /// Number of pages that were drained from CPU lists.
    pub drained: u32,
    /// Number of CPU lists that another thread held.
    pub skipped: u32,
    /// Whether a later tick may find something to do even if no thread allocates or frees in
    /// between.
    pub left: bool,
}

impl Report {
    /// The sum of two reports.
    pub fn and(self, other: Report) -> Report {
        Report {
            released: self.released + other.released,
            calls: self.calls + other.calls,
            failed: self.failed + other.failed,
            drained: self.drained + other.drained,
            skipped: self.skipped + other.skipped,
            left: self.left || other.left,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Release {
    /// Room for [`SCATTERED_RANGES`] ranges, for the thread that has the turn.
    ranges: *mut Range,
    turn: AtomicBool,
    /// Number of further ticks that release nothing, because the system refused everything.
    idle: AtomicU32,
    idle_after_refusal: AtomicU32,
    /// Number of further runs that release blocks one by one.
    singly: AtomicU32,
}

// SAFETY: only the thread that has the turn uses the pointer, and its memory belongs to this value.
unsafe impl Send for Release {}
// SAFETY: only the thread that has the turn uses the pointer; everything else is atomics.
unsafe impl Sync for Release {}

/// The right to release.
#[derive(Debug)]
pub(crate) struct ReleaseTurn<'a>(&'a Release);

impl Drop for ReleaseTurn<'_> {
    fn drop(&mut self) {
        self.0.turn.store(false, Ordering::Release); // Pairs with the Acquire in `Release::turn`.
    }
}

impl Release {
    /// Size of the ranges, in bytes.
    pub(crate) const BYTES: usize = SCATTERED_RANGES * size_of::<Range>();

    /// # Safety
    /// [`Release::BYTES`] zeroed bytes lie at `address`, aligned for a range. They belong to this
    /// value alone as long as it lives.
    pub(crate) unsafe fn at(address: usize) -> Release {
        Release {
            ranges: core::ptr::with_exposed_provenance_mut(address),
            turn: AtomicBool::new(false),
            idle: AtomicU32::new(0),
            idle_after_refusal: AtomicU32::new(0),
            singly: AtomicU32::new(0),
        }
    }

    /// Takes the turn; `None` if another thread has it.
    pub(crate) fn turn(&self) -> Option<ReleaseTurn<'_>> {
        // Acquire pairs with the Release in the drop of the last turn, and publishes the ranges.
        self.turn.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).ok().map(|_| ReleaseTurn(self))
    }
}

impl ReleaseTurn<'_> {
    /// The statistics and the ranges for a run.
    pub(crate) fn parts(&mut self) -> (&Release, &mut [Range]) {
        // SAFETY: the caller of `Release::at` gave zeroed, aligned memory for that many ranges, for
        // this value alone. Zeroes are valid ranges. The turn is exclusive, and borrowed
        // exclusively.
        (self.0, unsafe { core::slice::from_raw_parts_mut(self.0.ranges, SCATTERED_RANGES) })
    }
}

/// The effort of a release or a trim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effort {
    /// As [`Effort::Sparing`]. Also leaves all parts of huge pages that are whole.
    Whole,
    /// Makes few single calls at a time, and releases no locked memory. A trim leaves memory that
    /// was used lately.
    Sparing,
    /// Makes as many calls as the release takes, since a caller requested it.
    Full,
}

/// One run of releasing.
pub(crate) struct ReleasePass<'a, P> {
    pub(crate) release: &'a Release,
    pub(crate) ranges: &'a mut [Range],
    pub(crate) platform: &'a P,
    pub(crate) arena: &'a Arena,
    pub(crate) zone: &'a Zone,
    /// Number of blocks handled under one hold of the zone's mutex.
    pub(crate) hold: u32,
    /// The least order of released blocks that are smaller than a chunk.
    pub(crate) least: Order,
    pub(crate) effort: Effort,
    /// Whether a huge page is split before a part of it is released. Otherwise the part leaves the
    /// process at once, but stays charged to the container until that is short of memory.
    pub(crate) splits: bool,
    /// The run calls this between system calls, and stops when it returns true.
    pub(crate) stop: &'a dyn Fn() -> bool,
}

impl<P: Platform> ReleasePass<'_, P> {
    /// Releases up to `pages` backed pages. Returns whether the system would take more.
    pub(crate) fn run(mut self, pages: u32, report: &mut Report) -> bool {
        let release = self.release;
        let idle = release.idle.load(Ordering::Relaxed);
        if idle > 0 && self.effort != Effort::Full {
            release.idle.store(idle - 1, Ordering::Relaxed);
            return false;
        }
        let left = self.chunks(pages, report);
        let left = self.blocks(left, report);
        self.parts(left, report);
        self.conclude(report)
    }

    /// Releases ranges of pages that are handed out, in rounds. In each round, `gather` writes
    /// ranges to its argument and returns their number; 0 ends the run. After the release, `settle`
    /// gets all ranges of the round, and how many of them, from the first, were released. Returns
    /// whether the system would take more.
    pub(crate) fn held(
        self,
        mut gather: impl FnMut(&mut [Range]) -> usize,
        mut settle: impl FnMut(&[Range], usize),
        report: &mut Report,
    ) -> bool {
        if self.release.idle.load(Ordering::Relaxed) > 0 && self.effort != Effort::Full {
            // Only `run` counts `idle` down.
            return false;
        }
        let mut rationed = if self.effort == Effort::Full { u32::MAX } else { SINGLE_CALLS_MAX };
        while rationed > 0 && !(self.stop)() {
            let count = gather(self.ranges);
            if count == 0 {
                break;
            }
            let done = self.scattered(count, &mut rationed, report);
            let bytes: usize = self.ranges[..done].iter().map(|range| range.length).sum();
            let pages = (bytes >> self.arena.page_shift()) as u32;
            // Counted before `settle`: after it, another thread may find the holes and fill them.
            let mut inner = self.zone.lock();
            inner.holes += pages as i32;
            self.zone.note_beyond(&inner);
            self.zone.change_totals(&inner, |totals| add(&totals.punched, pages.into()));
            drop(inner);
            report.released += pages;
            settle(&self.ranges[..count], done);
            if done < count {
                break;
            }
        }
        report.calls == 0 || self.conclude(report)
    }

    /// Adds a run to the statistics, and decides when to try again after a refusal.
    fn conclude(&self, report: &Report) -> bool {
        let release = self.release;
        self.zone.change_totals(&self.zone.lock(), |totals| {
            add(&totals.released, report.released.into());
            add(&totals.calls, report.calls.into());
            add(&totals.failures, report.failed.into());
        });
        // If everything was refused, try less and less often. Otherwise start anew.
        let refused = report.failed > 0 && report.released == 0;
        let idle_after_refusal = release.idle_after_refusal.load(Ordering::Relaxed);
        let idle_after_refusal = if refused { (2 * idle_after_refusal + 1).min(IDLE_TICKS_MAX) } else { 0 };
        release.idle_after_refusal.store(idle_after_refusal, Ordering::Relaxed);
        release.idle.store(idle_after_refusal, Ordering::Relaxed);
        !refused
    }

    /// Releases whole chunks. Returns the number of pages still wanted.
    fn chunks(&self, mut wanted: u32, report: &mut Report) -> u32 {
        let bytes = (CHUNK as usize) << self.arena.page_shift();
        let most = (CALL_BYTES_MAX / bytes).max(1) as u32;
        let (mut below, failed) = (u32::MAX, report.failed);
        while wanted > 0 && report.failed - failed < REFUSALS_MAX && !(self.stop)() {
            let mut inner = self.zone.lock();
            let Some(DetachedChunks { first, count, backed }) = inner.buddy.detach_chunks(below, most, wanted) else {
                break;
            };
            let (pfn, pages) = (Pfn(first * CHUNK), count * CHUNK);
            inner.releasing += pages;
            drop(inner);
            let emptied = self.range(pfn, pages, report);
            if emptied == pages {
                self.tables(pfn, count, report);
            }
            self.back(|buddy| {
                let before = buddy.count_backed(pfn, emptied);
                buddy.attach(pfn, pages, emptied);
                report.released += before;
                pages
            });
            below = first;
            wanted -= backed;
        }
        wanted
    }

    /// Releases a range of detached pages. Returns the number of pages released, from its start.
    fn range(&self, pfn: Pfn, pages: u32, report: &mut Report) -> u32 {
        let (start, length) = (self.arena.address(pfn), (pages as usize) << self.arena.page_shift());
        let mut done = 0;
        while done < length {
            let part = (length - done).min(CALL_BYTES_MAX);
            if !self.call(start + done, part, report) {
                break;
            }
            done += part;
        }
        (done >> self.arena.page_shift()) as u32
    }

    fn call(&self, start: usize, length: usize, report: &mut Report) -> bool {
        report.calls += 1;
        // SAFETY: the range is detached, or holds no information (a table's part for free chunks),
        // or its holder does not need it.
        let answer = unsafe {
            if self.effort == Effort::Full {
                self.platform.release(start, length)
            } else {
                // Locked memory must stay resident, unless the program itself requests a release.
                self.platform.release_unless_locked(start, length)
            }
        };
        let done = answer.is_ok();
        // A branch: rustc 1.95 loses `failed += u32::from(!done)` where this is inlined. Its pass
        // SimplifyComparisonIntegral removes a comparison that is both copied and branched on.
        if !done {
            report.failed += 1;
        }
        done
    }

    /// Releases the parts of tables for free chunks.
    fn tables(&self, pfn: Pfn, chunks: u32, report: &mut Report) {
        let each = || (0..chunks).map(|chunk| pfn.plus(chunk * CHUNK));
        // The marks go after the memory: threads may use what the budget no longer pays for.
        let marked = each().fold(0, |all, chunk| all | self.arena.marks(chunk).load(Ordering::Relaxed));
        let mut kept = 0_u8;
        let offset = self.arena.address(pfn) - self.arena.base();
        let bytes = (chunks as usize * CHUNK as usize) << self.arena.page_shift();
        let page_size = 1 << self.arena.page_shift();
        let part = if self.arena.huge_tables.load(Ordering::Relaxed) { offset..offset + bytes } else { 0..0 };
        for index in 0..MARKED {
            let table = self.arena.table(OWN_TABLES + index);
            let mut huge = table.huge_pages(part.clone()).peekable();
            // A part that is not marked may also have memory, in a huge page that describes other
            // parts.
            if marked >> index & 1 == 0 && huge.peek().is_none() {
                continue;
            }
            // The other parts of each huge page may be in use.
            huge.for_each(|page| self.platform.split(page));
            let Range { start, length } = table.pages(offset, bytes, page_size);
            if table.droppable && length > 0 && !self.call(start, length, report) {
                kept |= 1 << index;
            }
        }
        each().for_each(|chunk| self.arena.unmark_tables(chunk, kept));
        let frames = self.arena.table(FRAMES);
        if frames.droppable {
            let Range { start, length } = frames.pages(offset, bytes, page_size);
            self.call(start, length, report);
        }
    }

    /// Releases blocks smaller than a chunk. Returns the number of pages still wanted.
    fn blocks(&mut self, mut wanted: u32, report: &mut Report) -> u32 {
        let mut rationed = if self.effort == Effort::Full { u32::MAX } else { SINGLE_CALLS_MAX };
        while wanted > 0 && rationed > 0 && !(self.stop)() {
            let count = self.gather(&mut wanted);
            let done = self.scattered(count, &mut rationed, report);
            self.scatter_back(count, done, report);
            if done < count || count == 0 {
                break;
            }
        }
        wanted
    }

    /// Releases parts of chunks and blocks that have more backed pages than are wanted, but no
    /// parts smaller than a huge page.
    fn parts(&mut self, mut wanted: u32, report: &mut Report) {
        let least = Order((HUGE_BYTES >> self.arena.page_shift()).trailing_zeros() as u8);
        let failed = report.failed;
        while report.failed == failed && !(self.stop)() {
            let mut inner = self.zone.lock();
            let Some(DetachedBlock { pfn, order, backed }) = inner.buddy.detach_part(wanted, least) else { break };
            inner.releasing += order.pages();
            drop(inner);
            let emptied = self.range(pfn, order.pages(), report);
            self.back(|buddy| {
                report.released += buddy.count_backed(pfn, emptied);
                buddy.attach(pfn, order.pages(), emptied);
                order.pages()
            });
            wanted -= backed;
        }
    }

    fn page_range(&self, range: &Range) -> (Pfn, u32) {
        let shift = self.arena.page_shift();
        (Pfn(((range.start - self.arena.base()) >> shift) as u32), (range.length >> shift) as u32)
    }

    /// Detaches blocks into the ranges until these are full, long enough for one call, or `wanted`
    /// is reached.
    fn gather(&mut self, wanted: &mut u32) -> usize {
        let shift = self.arena.page_shift();
        let (mut count, mut bytes, mut dry) = (0, 0, false);
        let stays = |pfn| self.effort == Effort::Whole && self.arena.is_huge(pfn);
        while !dry {
            let mut inner = self.zone.lock();
            for _ in 0..self.hold {
                dry = count == self.ranges.len() || bytes >= CALL_BYTES_MAX || *wanted == 0;
                let block = if dry { None } else { inner.buddy.detach_block(*wanted, self.least, &stays) };
                let Some(DetachedBlock { pfn, order, backed }) = block else {
                    dry = true;
                    break;
                };
                inner.releasing += order.pages();
                let length = (order.pages() as usize) << shift;
                self.ranges[count] = Range { start: self.arena.address(pfn), length };
                bytes += length;
                count += 1;
                *wanted -= backed;
            }
        }
        count
    }

    /// Records that huge pages are about to lose pages. First splits those of which the ranges are
    /// parts, if this run splits.
    fn break_huge(&self, ranges: &[Range]) {
        let is_part = |range: &&Range| range.length < HUGE_BYTES;
        let breaks = |range: &&Range| self.splits || !is_part(range);
        let was_huge = |range: &&Range| self.arena.forget_huge(self.page_range(range).0);
        let broken = ranges.iter().filter(breaks).filter(was_huge);
        broken.filter(is_part).for_each(|range| self.platform.split(range.start));
    }

    /// Releases the gathered ranges. Returns the number of them, from the first, that are released.
    fn scattered(&self, count: usize, rationed: &mut u32, report: &mut Report) -> usize {
        let (ranges, release) = (&self.ranges[..count], self.release);
        self.break_huge(ranges);
        let mut done = 0;
        let singly = release.singly.load(Ordering::Relaxed);
        if singly > 0 {
            release.singly.store(singly - 1, Ordering::Relaxed);
        }
        while singly == 0 && self.platform.may_scatter() && done + 1 < count {
            report.calls += 1;
            // SAFETY: the ranges are detached, or their holder does not need their contents.
            let answer = unsafe { self.platform.release_scattered(&ranges[done..]) };
            let mut bytes = answer.unwrap_or(0);
            let before = done;
            while done < count && bytes >= ranges[done].length {
                bytes -= ranges[done].length;
                done += 1;
            }
            if done == before {
                report.failed += 1;
                release.singly.store(IDLE_TICKS_MAX, Ordering::Relaxed);
                break;
            }
        }
        while done < count && *rationed > 0 && self.call(ranges[done].start, ranges[done].length, report) {
            done += 1;
            *rationed -= 1;
        }
        done
    }

    /// Puts the gathered blocks back. The first `done` of them are empty.
    fn scatter_back(&self, count: usize, done: usize, report: &mut Report) {
        let ranges = &self.ranges[..count];
        let mut next = 0;
        while next < count {
            self.back(|buddy| {
                let mut sum = 0;
                for range in ranges[next..].iter().take(self.hold as usize) {
                    let (pfn, pages) = self.page_range(range);
                    let emptied = if next < done { pages } else { 0 };
                    report.released += buddy.count_backed(pfn, emptied);
                    buddy.attach(pfn, pages, emptied);
                    next += 1;
                    sum += pages;
                }
                sum
            });
        }
    }

    /// Calls `put` under the zone's mutex. `put` puts pages back into the buddy and returns their
    /// number.
    fn back(&self, put: impl FnOnce(&mut Buddy) -> u32) {
        let mut inner = self.zone.lock();
        let pages = put(&mut inner.buddy);
        inner.releasing -= pages;
        self.zone.note_beyond(&inner);
    }
}

#[cfg(test)]
mod tests {
    use crate::machine::{Opened, shape};
    use crate::purge::Effort;
    use crate::shape::{EarlyTables, Shape};
    use crate::zone::INTERVALS;
    use neap_base::Order;
    use neap_testing::virtual_platform::Virtual;
    use std::vec::Vec;

    /// A machine whose zone has populated two huge pages, and their blocks of 32 pages.
    fn two_huge_pages(machine: &Virtual) -> (Opened<'_, Virtual>, Vec<crate::Block>) {
        let o = Opened::new(machine, &Shape { huge: true, ..shape(None) }).unwrap();
        let take = || o.pages.allocate_one_more_block(machine, Order(5), EarlyTables::Written).unwrap();
        let mut blocks: Vec<_> = core::iter::from_fn(|| Some(take())).take(2048 / 32).collect();
        while o.pages.statistics().populated < 2 * 512 || o.pages.statistics().backed_free >= 32 {
            blocks.push(take());
        }
        let huge = blocks.split_off(blocks.len() - 32);
        (o, huge)
    }

    fn free(o: &Opened<'_, Virtual>, machine: &Virtual, blocks: &[crate::Block]) {
        blocks.iter().for_each(|block| o.pages.free_block(machine, block.pfn, Order(5)));
        o.pages.drain_all(machine);
    }

    /// A container's charge falls with its resident memory, unless the pages are replaced at once.
    #[test]
    fn a_huge_page_is_split_once_before_parts_of_it_go_for_good() {
        let machine = Virtual::new(4096, 1);
        let (o, blocks) = two_huge_pages(&machine);
        let free = |blocks: &[crate::Block]| free(&o, &machine, blocks);
        // Every second block of two huge pages.
        let parts: Vec<_> = blocks.iter().step_by(2).copied().collect();
        free(&parts[..4]);
        assert_eq!(
            (o.pages.release(&machine, u32::MAX, Effort::Sparing, &|| false).released, machine.splits()),
            (4 * 32, 0)
        );
        for (part, splits) in [(4..6, 1), (6..8, 1), (8..10, 2), (10..16, 2)] {
            free(&parts[part.clone()]);
            let released = o.pages.release_blocks(&machine, u32::MAX, Order(0), Effort::Sparing, &|| false).released;
            assert_eq!((released, machine.splits()), (part.len() as u32 * 32, splits), "{part:?}");
        }
        o.pages.verify().unwrap();
    }

    /// The rest of a huge page stays fast, and the program may soon need the free part.
    #[test]
    fn parts_of_a_whole_huge_page_stay_for_several_intervals() {
        let machine = Virtual::new(4096, 1);
        let (o, blocks) = two_huge_pages(&machine);
        let ticks = || core::array::from_fn::<u32, INTERVALS, _>(|_| o.pages.tick(&machine).released);
        ticks();
        // Half of the first huge page, and the second as a whole.
        let parts: Vec<_> = blocks[..16].iter().step_by(2).chain(&blocks[16..]).copied().collect();
        free(&o, &machine, &parts);
        let whole = |wanted| o.pages.release_blocks(&machine, wanted, Order(0), Effort::Whole, &|| false).released;
        assert_eq!(whole(100), 0, "a part of either huge page would go");
        assert_eq!((ticks(), machine.splits()), ([0, 512, 0, 0], 0));
        assert_eq!(o.pages.statistics().backed_free, 8 * 32);
        // What was needed meanwhile begins to wait anew.
        let taken = o.pages.allocate_block(&machine, Order(5)).unwrap();
        assert_eq!((ticks(), machine.splits()), ([7 * 32, 0, 0, 0], 1));
        free(&o, &machine, &[taken]);
        // The huge page is broken by now, so its parts wait no longer.
        assert_eq!(ticks(), [0, 32, 0, 0]);
        o.pages.verify().unwrap();
    }

    /// Growth exchanges free pages outside of whole huge pages for fresh ones first.
    #[test]
    fn blocks_behind_parts_of_whole_huge_pages_are_found() {
        let machine = Virtual::new(4096, 1);
        let (o, blocks) = two_huge_pages(&machine);
        // A broken huge page, whose blocks were freed last.
        free(&o, &machine, &blocks[..1]);
        assert_eq!(o.pages.release_blocks(&machine, u32::MAX, Order(0), Effort::Sparing, &|| false).released, 32);
        let later: Vec<_> = blocks[2..16].iter().step_by(2).copied().collect();
        let sooner: Vec<_> = blocks[16..].iter().step_by(2).copied().collect();
        free(&o, &machine, &sooner);
        free(&o, &machine, &later);
        let released = o.pages.release_blocks(&machine, u32::MAX, Order(0), Effort::Whole, &|| false).released;
        assert_eq!((released, machine.splits()), (7 * 32, 1));
        o.pages.verify().unwrap();
    }
}
