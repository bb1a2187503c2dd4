//! The worker: populates pages before they are needed, and releases them when they are not.
//!
//! # Design
//!
//! At each [`PerCpuData::tick`]:
//!
//! 1. The worker isolates all wholly free chunks except one: it takes their empty pages out of the
//!    reserve. It empties isolated chunks from the end, since allocations need pages near the start
//!    first. Pages that the reserve needs stay, and allocations may use their chunk again. The
//!    worker destroys an emptied chunk without rows if there is another wholly free chunk. It
//!    sidelines an emptied chunk with rows, so that allocations use it last.
//! 2. The worker isolates and empties further chunks, although these have no empty quarter. It does
//!    so for as many pages beyond the reserve as stayed empty since the last tick.
//! 3. The worker populates pages until the reserve is full, and entries of rows for them. If a
//!    caller that may not wait was refused, it populates as many pages as a whole reserve.
//!
//! While an isolated CPU runs the process, the worker releases nothing unless a caller requests it,
//! since the kernel would interrupt that CPU. It also releases nothing in some ticks after the
//! system refused. In both cases a tick makes the chunks that `free` isolated available to
//! allocations again. If an allocation or the reserve lacks room, it may use any chunk that waits
//! to be emptied. Otherwise it would create a new chunk, which would later wait to be emptied, too.
//!
//! # Locking
//!
//! A *pass* runs under the turn, so only one thread changes which pages are populated. Between
//! passes the turn is free for waiting threads. The state's lock is dropped over every system call.

use crate::chunk::NONE;
use crate::chunk_buckets::slot;
use crate::data::{Charge, PerCpuData};
use crate::rows::ListEnd;
use crate::state::{ChunkPages, State};
use core::ops::Range;
use neap_base::Platform;
use neap_base::platform::memory::SCATTERED_RANGES;
use neap_base::platform::{Errno, memory};
use neap_os::stack;

/// Maximum number of ticks without a release after the system refused one.
const IDLE_TICKS_MAX: u32 = 64;
/// Maximum number of page runs that one pass releases.
const RUNS_MAX: usize = 128;

/// State that belongs to the holder of the turn.
#[derive(Debug)]
pub(crate) struct Work {
    /// Room for [`SCATTERED_RANGES`] ranges.
    ranges: *mut memory::Range,
    /// Ticks left in which nothing is released, because the system refused.
    idle: u32,
    idle_after_refusal: u32,
    pub(crate) counts: WorkTotals,
}

// SAFETY: the pointer leads to memory that only this value uses.
unsafe impl Send for Work {}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WorkTotals {
    pub(crate) released: u64,
    pub(crate) release_calls: u64,
    pub(crate) release_failures: u64,
    pub(crate) populate_calls: u64,
    pub(crate) destroyed: u64,
}

/// Which pages beyond the reserve a tick releases.
#[derive(Clone, Copy)]
enum Need {
    /// Pages that were not needed since the last tick.
    Old,
    /// This number of pages in each group.
    Pages(usize),
    /// All, regardless of isolated CPUs and of earlier refusals.
    Asked,
}

/// Result of a tick.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Tick {
    /// Pages released, in all groups together.
    pub released: u64,
    /// Calls that the system refused.
    pub failed: u64,
    /// Whether nothing was released because an isolated CPU runs the process.
    pub held: bool,
    /// Whether another tick may have work to do.
    pub more: bool,
    /// Whether the next ticks release nothing, because the system refused.
    pub rests: bool,
}

/// A run of pages of a chunk that is to be released.
#[derive(Clone, Copy)]
struct PageRun {
    chunk: u32,
    first: usize,
    count: usize,
}

impl PageRun {
    fn pages(&self) -> Range<usize> {
        self.first..self.first + self.count
    }
}

impl Work {
    /// # Safety
    /// There is zeroed room for [`SCATTERED_RANGES`] ranges at `ranges`, aligned for a range. Only
    /// this value uses the room as long as it exists.
    pub(crate) unsafe fn at(ranges: *mut memory::Range) -> Work {
        Work { ranges, idle: 0, idle_after_refusal: 0, counts: WorkTotals::default() }
    }

    fn ranges(&mut self) -> &mut [memory::Range] {
        // SAFETY: `at`'s caller promised zeroed, aligned room for this many ranges, for which
        // zeroes are valid. `self` is borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.ranges, SCATTERED_RANGES) }
    }
}

impl<C: Charge> PerCpuData<C> {
    /// Does the worker's work. The program calls this every 250 ms, and sooner if
    /// [`PerCpuData::is_work_wanted`]. Does nothing if another thread has the turn.
    pub fn tick<P: Platform>(&self, platform: &P) -> Tick {
        self.tick_until(platform, &|| false)
    }

    /// Ticks, but stops between passes if `stop` returns `true`. The next tick does the rest.
    pub fn tick_until<P: Platform>(&self, platform: &P, stop: &dyn Fn() -> bool) -> Tick {
        self.work(platform, Need::Old, stop)
    }

    /// Releases all empty pages beyond the reserve on a caller's request. Unlike a tick, this also
    /// releases pages that were needed since the last tick. It does so even while an isolated CPU
    /// runs the process, and even if the system refused lately.
    pub fn release_all<P: Platform>(&self, platform: &P, stop: &dyn Fn() -> bool) -> Tick {
        self.work(platform, Need::Asked, stop)
    }

    /// Number of empty pages beyond the reserve, in all groups together.
    pub fn spare_pages(&self) -> u64 {
        let state = self.settled();
        let spare = (state.empty + state.isolated_empty).saturating_sub(self.geometry.high);
        (spare * self.geometry.groups) as u64
    }

    /// Ticks and releases about `pages` of the [`PerCpuData::spare_pages`], even if they were
    /// needed since the last tick.
    pub fn give_back<P: Platform>(&self, platform: &P, pages: u64, stop: &dyn Fn() -> bool) -> Tick {
        self.work(platform, Need::Pages((pages as usize).div_ceil(self.geometry.groups)), stop)
    }

    fn work<P: Platform>(&self, platform: &P, need: Need, stop: &dyn Fn() -> bool) -> Tick {
        let asked = matches!(need, Need::Asked);
        let mut report = Tick { held: !asked && platform.is_isolated_cpu_in_use(), ..Tick::default() };
        let Some(mut work) = self.turn.try_lock() else { return Tick { more: true, ..report } };
        let before = work.counts;
        let rests = !asked && work.idle > 0;
        work.idle = work.idle.saturating_sub(1);
        let mut state = self.settled();
        state.wanted = false;
        self.tell(&state);
        let high = self.geometry.high;
        // Reads `empty_low` before it isolates chunks, since that lowers `empty_low`.
        let unneeded = match need {
            Need::Old => state.empty_low.saturating_sub(high),
            Need::Pages(pages) => pages,
            Need::Asked => usize::MAX,
        };
        if report.held || rests {
            state.give_up();
        } else {
            state.isolate_spares();
            drop(state);
            work = self.depopulate_apart(platform, work, high, stop);
            state = self.state.lock();
            let surplus = unneeded.min(state.empty.saturating_sub(high));
            if surplus > 0 {
                let floor = state.empty - surplus;
                state.isolate_down_to(floor);
                drop(state);
                work = self.depopulate_apart(platform, work, floor, stop);
                state = self.state.lock();
            }
        }
        drop(state);
        self.replenish(platform, &mut work);
        let mut state = self.state.lock();
        state.empty_low = state.empty;
        report.released = work.counts.released - before.released;
        report.failed = work.counts.release_failures - before.release_failures;
        if report.failed > 0 && report.released == 0 {
            work.idle_after_refusal = (2 * work.idle_after_refusal + 1).min(IDLE_TICKS_MAX);
            work.idle = work.idle_after_refusal;
        } else if report.released > 0 {
            work.idle_after_refusal = 0;
        }
        report.more = state.wanted || state.empty > high || state.has_more();
        report.rests = work.idle > 0;
        report
    }

    /// Runs [`PerCpuData::depopulate`] on a separate stack, since its arrays are large. Does
    /// nothing if no stack can be mapped.
    fn depopulate_apart<'a, P: Platform>(
        &'a self,
        platform: &P,
        work: neap_base::mutex::Guard<'a, Work>,
        floor: usize,
        stop: &dyn Fn() -> bool,
    ) -> neap_base::mutex::Guard<'a, Work> {
        stack::apart(|| self.depopulate(platform, work, floor, stop)).unwrap_or_else(|| self.turn.lock())
    }

    /// Empties isolated chunks, until the reserve would be smaller than `floor`. Returns the turn.
    /// Other threads may have had the turn in between. After `stop`, the remaining chunks stay
    /// isolated.
    fn depopulate<'a, P: Platform>(
        &'a self,
        platform: &P,
        mut work: neap_base::mutex::Guard<'a, Work>,
        floor: usize,
        stop: &dyn Fn() -> bool,
    ) -> neap_base::mutex::Guard<'a, Work> {
        while !stop() {
            let mut runs = [PageRun { chunk: 0, first: 0, count: 0 }; RUNS_MAX];
            let mut gone = [0; RUNS_MAX];
            let most = RUNS_MAX.min(SCATTERED_RANGES / self.geometry.groups).max(1);
            let mut state = self.state.lock();
            let Gathered { runs: count, destroyed } = state.gather(&mut runs[..most], &mut gone, floor);
            let length = state.chunks.tables_length();
            gone[..destroyed].iter_mut().for_each(|chunk| *chunk = state.chunks.tables(*chunk as u32));
            drop(state);
            for tables in &gone[..destroyed] {
                // SAFETY: the chunk is destroyed. A thread that creates it again needs the turn,
                // and writes all of its tables.
                let _ = unsafe { platform.release(*tables, length) };
            }
            work.counts.destroyed += destroyed as u64;
            if count + destroyed == 0 {
                return work;
            }
            let done = self.release(platform, &mut work, &runs[..count]);
            let mut state = self.state.lock();
            for run in &runs[..done] {
                state.remove_pages(run.chunk, run.pages());
                work.counts.released += (run.count * self.geometry.groups) as u64;
            }
            if done < count {
                state.give_up();
                return work;
            }
            drop(state);
            drop(work);
            work = self.turn.lock();
        }
        work
    }

    /// Address of a group's pages from page `first` of a chunk on.
    pub(crate) fn pages_at(&self, group: usize, chunk: u32, first: usize) -> usize {
        self.base
            + group * self.geometry.group_span()
            + chunk as usize * self.geometry.chunk
            + first * self.geometry.page
    }

    /// Releases runs in all groups. Returns how many of them, from the first, are released. The
    /// other runs are unchanged.
    fn release<P: Platform>(&self, platform: &P, work: &mut Work, runs: &[PageRun]) -> usize {
        let (groups, page) = (self.geometry.groups, self.geometry.page);
        let mut done = 0;
        if runs.len() * groups <= SCATTERED_RANGES && runs.len() * groups > 1 {
            let ranges = &mut work.ranges()[..runs.len() * groups];
            for (at, range) in ranges.iter_mut().enumerate() {
                let run = &runs[at / groups];
                let start = self.pages_at(at % groups, run.chunk, run.first);
                *range = memory::Range { start, length: run.count * page };
            }
            // SAFETY: no row touches the pages, and none is placed in a chunk that waits to be
            // emptied. So no code needs the pages' contents.
            let mut bytes = unsafe { platform.release_scattered(ranges) }.unwrap_or(0);
            while done < runs.len() && bytes >= runs[done].count * page * groups {
                bytes -= runs[done].count * page * groups;
                done += 1;
            }
            work.counts.release_calls += 1;
        }
        for run in &runs[done..] {
            for group in 0..groups {
                work.counts.release_calls += 1;
                let start = self.pages_at(group, run.chunk, run.first);
                // SAFETY: no row touches the pages, and none is placed in a chunk that waits to be
                // emptied. So no code needs the pages' contents.
                if unsafe { platform.release(start, run.count * page) }.is_err() {
                    work.counts.release_failures += 1;
                    // Populates the released pages again: a page is populated in all groups or in
                    // none. If that is refused, too, a touch brings the page back.
                    for group in 0..group {
                        let _ = platform.populate(self.pages_at(group, run.chunk, run.first), run.count * page);
                    }
                    return done;
                }
            }
            done += 1;
        }
        done
    }

    /// Populates pages in all groups, or in none.
    pub(crate) fn populate<P: Platform>(
        &self,
        platform: &P,
        work: &mut Work,
        chunk: u32,
        pages: &Range<usize>,
    ) -> Result<(), Errno> {
        let length = pages.len() * self.geometry.page;
        for group in 0..self.geometry.groups {
            let start = self.pages_at(group, chunk, pages.start);
            work.counts.populate_calls += 1;
            let answer = match platform.populate(start, length) {
                // The kernel has no such call: touch the pages one by one.
                Err(Errno::INVAL) => {
                    self.touch(start, length);
                    Ok(())
                }
                answer => answer,
            };
            if let Err(error) = answer {
                for group in 0..=group {
                    // SAFETY: no allocation has these pages yet.
                    let _ = unsafe { platform.release(self.pages_at(group, chunk, pages.start), length) };
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn touch(&self, start: usize, length: usize) {
        for address in (start..start + length).step_by(4096) {
            // SAFETY: the page is open, and no allocation has it yet.
            unsafe { core::ptr::with_exposed_provenance_mut::<u8>(address).write_volatile(0) };
        }
    }

    /// Populates pages until the reserve is full, and rows for it. Stops if the system refuses, or
    /// if there is no address space.
    pub(crate) fn replenish<P: Platform>(&self, platform: &P, work: &mut Work) {
        if self.ready_rows(platform).is_err() {
            return;
        }
        let mut state = self.state.lock();
        let high = self.geometry.high;
        let mut wanted = if state.starved { high } else { high.saturating_sub(state.empty) };
        state.starved = false;
        while wanted > 0 {
            if let Some(pages) = state.recall() {
                wanted = wanted.saturating_sub(pages);
                continue;
            }
            let Some(ChunkPages { chunk, pages }) = state.next_holes(wanted) else {
                let Ok(grown) = self.grow(platform, state) else { return };
                state = grown;
                continue;
            };
            drop(state);
            let answer = self.populate(platform, work, chunk, &pages);
            state = self.state.lock();
            if answer.is_err() {
                return;
            }
            wanted -= pages.len();
            state.add_pages(chunk, pages);
        }
    }
}

/// Result of [`State::gather`].
struct Gathered {
    /// Runs to release.
    runs: usize,
    /// Destroyed chunks.
    destroyed: usize,
}

impl State {
    /// Isolates all wholly free chunks except the first: gives their empty pages to the worker,
    /// which releases them.
    fn isolate_spares(&mut self) {
        let free = self.lists.free();
        while let Some(first) = self.lists.head(free) {
            let next = self.chunks.header(first).next;
            self.looks += 1;
            if next == NONE {
                return;
            }
            self.isolate(next);
        }
    }

    /// Isolates chunks with empty pages, emptiest lists first, until the reserve is not above
    /// `floor`.
    fn isolate_down_to(&mut self, floor: usize) {
        for list in (0..=self.lists.free()).rev() {
            let mut next = self.lists.head(list).unwrap_or(NONE);
            while next != NONE && self.empty > floor {
                let (chunk, header) = (next, *self.chunks.header(next));
                next = header.next;
                self.looks += 1;
                if header.empty > 0 && !header.isolated {
                    self.isolate(chunk);
                }
            }
        }
    }

    /// Finds empty pages of isolated chunks and writes them to `runs`, for the caller to release.
    /// Begins at the end of each chunk. An isolated chunk without pages to release is reintegrated,
    /// sidelined or destroyed. Writes destroyed chunks to `gone`. Stops once `runs` or `gone` is
    /// full.
    fn gather(&mut self, runs: &mut [PageRun], gone: &mut [usize], floor: usize) -> Gathered {
        let (mut count, mut destroyed, list) = (0, 0, self.lists.to_depopulate());
        let mut next = self.lists.head(list).unwrap_or(NONE);
        while next != NONE && count < runs.len() && destroyed < gone.len() {
            let (chunk, header) = (next, *self.chunks.header(next));
            next = header.next;
            self.looks += 1;
            let spare = header.taken == 0 && self.lists.head(self.lists.free()).is_some();
            let keep = if spare { 0 } else { floor.saturating_sub(self.empty).min(header.empty as usize) };
            let mut left = header.empty as usize - keep;
            if left > 0 {
                let view = self.chunks.get(chunk);
                let mut before = view.geometry.pages;
                while left > 0 && count < runs.len() {
                    let Some(pages) = view.last_empty(before, left) else { break };
                    runs[count] = PageRun { chunk, first: pages.start, count: pages.len() };
                    (left, before, count) = (left - pages.len(), pages.start, count + 1);
                }
            } else if spare && header.populated == 0 {
                self.lists.remove(&mut self.chunks, chunk);
                self.chunks.destroy(chunk);
                gone[destroyed] = chunk as usize;
                destroyed += 1;
            } else if keep > 0 || header.taken == 0 {
                self.reintegrate(chunk);
            } else {
                self.move_to(chunk, self.lists.sidelined(), ListEnd::Tail);
            }
        }
        Gathered { runs: count, destroyed }
    }

    /// Whether chunks wait to be emptied, because the worker was stopped.
    fn has_more(&self) -> bool {
        self.lists.head(self.lists.to_depopulate()).is_some()
    }

    /// Makes a chunk that waits to be emptied available to allocations; returns its number of empty
    /// pages. The caller holds the turn: otherwise the worker may be releasing the chunk's pages.
    pub(crate) fn recall(&mut self) -> Option<usize> {
        let chunk = self.lists.head(self.lists.to_depopulate())?;
        self.reintegrate(chunk);
        Some(self.chunks.header(chunk).empty as usize)
    }

    /// Makes all chunks that wait to be emptied available to allocations, since the worker cannot
    /// release their pages now.
    fn give_up(&mut self) {
        while self.recall().is_some() {}
    }

    /// Pages to populate for the reserve, at most `most`. `None`: a chunk must be created first.
    fn next_holes(&mut self, most: usize) -> Option<ChunkPages> {
        let geometry = &self.chunks.geometry;
        let pages = geometry.pages;
        let mut list = slot((geometry.page / geometry.columns).max(geometry.grain));
        while let Some(filled) = self.lists.filled_from(list) {
            let mut next = self.lists.head(filled).unwrap_or(NONE);
            while next != NONE {
                let (chunk, header) = (next, *self.chunks.header(next));
                next = header.next;
                self.looks += 1;
                if (header.populated as usize) < pages {
                    if header.isolated {
                        self.reintegrate(chunk); // Only then does the reserve count its pages.
                    }
                    return self.chunks.get(chunk).first_holes(most).map(|pages| ChunkPages { chunk, pages });
                }
            }
            list = filled + 1;
        }
        None
    }
}
