//! The worker: pages come before they are needed, and go when they are not.
//!
//! Sits beside the entry points and above the state, whose lock it drops over every system call. A *pass* runs under the
//! turn, so that no two threads change which pages are populated; between passes whoever waits for the turn may have it. What it does
//! at each [`PerCpuData::tick`], in this order:
//! 1. isolates wholly free chunks but one, and empties them, and whatever `free` has isolated, from the end: pages near
//!    the start are needed first. What the reserve lacks stays, and its chunk with it; a wholly free chunk that is not the
//!    only one is destroyed, any other is sidelined;
//! 2. the same for what stayed empty since the last tick, although in no chunk a quarter is: the reserve's smallest number of
//!    pages since then, beyond what it is for;
//! 3. populates pages until the reserve is full, all of it if somebody was refused, and rows for it.
//!
//! While an isolated CPU runs the process nothing goes back unless somebody asks for it: the kernel would interrupt it. Allocations may have what
//! `free` isolates then, and what it isolates while the system is not asked because it refused. Where they, or the reserve, lack room they may have
//! whatever waits to be emptied: otherwise each would take a new chunk, which would wait in its turn.

use crate::chunk::NONE;
use crate::data::{Charge, PerCpuData};
use crate::lists::slot;
use crate::state::State;
use core::ops::Range;
use neap_base::Platform;
use neap_base::platform::memory::SCATTERED_RANGES;
use neap_base::platform::{Errno, memory};
use neap_os::stack;

/// Ticks that the system is not asked again after it refused, at most.
const MOST_PATIENCE: u32 = 64;
/// Runs of pages in one call.
const RUNS: usize = 128;

/// What the holder of the turn has.
#[derive(Debug)]
pub(crate) struct Work {
    /// Room for [`SCATTERED_RANGES`] ranges.
    ranges: *mut memory::Range,
    /// Ticks in which nothing is given back, because the system refused it.
    idle: u32,
    patience: u32,
    pub(crate) counts: Counts,
}

// SAFETY: the pointer is to memory that this value has alone.
unsafe impl Send for Work {}

/// What was done so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) released: u64,
    pub(crate) release_calls: u64,
    pub(crate) release_failures: u64,
    pub(crate) populate_calls: u64,
    pub(crate) destroyed: u64,
}

/// Which of the pages beyond the reserve a tick gives back.
#[derive(Clone, Copy)]
enum Need {
    /// Those that were of no use since the last tick.
    Old,
    /// So many in each group.
    Pages(usize),
    /// All, whatever there is against it.
    Asked,
}

/// What a tick did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tick {
    /// Pages given back, in all groups together.
    pub released: u64,
    /// Calls that the system refused.
    pub failed: u64,
    /// Nothing was given back for the sake of an isolated CPU.
    pub held: bool,
    /// Something is left: another tick would do more, or bring the end of the rest nearer.
    pub more: bool,
    /// The system refused to take memory back, and is not asked for some ticks.
    pub rests: bool,
}

/// A run of pages of a chunk that is on its way to the system.
#[derive(Clone, Copy)]
struct Run {
    chunk: u32,
    first: usize,
    count: usize,
}

impl Run {
    fn pages(&self) -> Range<usize> {
        self.first..self.first + self.count
    }
}

impl Work {
    /// # Safety
    /// Room for [`SCATTERED_RANGES`] ranges at `ranges` belongs to this value as long as it is used.
    pub(crate) unsafe fn at(ranges: usize) -> Work {
        let ranges = core::ptr::with_exposed_provenance_mut(ranges);
        Work { ranges, idle: 0, patience: 0, counts: Counts::default() }
    }

    fn ranges(&mut self) -> &mut [memory::Range] {
        // SAFETY: as `at` was promised.
        unsafe { core::slice::from_raw_parts_mut(self.ranges, SCATTERED_RANGES) }
    }
}

impl<C: Charge> PerCpuData<C> {
    /// Does what is to be done: every 250 ms, and sooner where [`PerCpuData::is_work_wanted`]. Where somebody else has the turn
    /// that is nothing.
    pub fn tick<P: Platform>(&self, platform: &P) -> Tick {
        self.tick_until(platform, &|| false)
    }

    /// The same, but looks between passes whether to `stop`: what is left then is for the next tick.
    pub fn tick_until<P: Platform>(&self, platform: &P, stop: &dyn Fn() -> bool) -> Tick {
        self.work(platform, Need::Old, stop)
    }

    /// A tick for somebody who asks for memory to go back: also what was of use since the last tick, but for the reserve, also while an isolated
    /// CPU runs the process, and also if the system refused to take some a moment ago.
    pub fn release_all<P: Platform>(&self, platform: &P, stop: &dyn Fn() -> bool) -> Tick {
        self.work(platform, Need::Asked, stop)
    }

    /// Pages, in all groups together, in which nothing is, beyond the reserve.
    pub fn spare_pages(&self) -> u64 {
        let state = self.settled();
        let spare = (state.empty + state.isolated_empty).saturating_sub(self.geometry.high);
        (spare * self.geometry.groups) as u64
    }

    /// A tick that gives back about so many of these, though they were of use since the last one.
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
        // Read before anything is isolated: that lowers it.
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
            work.patience = (2 * work.patience + 1).min(MOST_PATIENCE);
            work.idle = work.patience;
        } else if report.released > 0 {
            work.patience = 0;
        }
        report.more = state.wanted || state.empty > high || state.has_more();
        report.rests = work.idle > 0;
        report
    }

    /// [`PerCpuData::depopulate`] on a stack of its own, since the runs are large; nothing where
    /// that cannot be had.
    fn depopulate_apart<'a, P: Platform>(
        &'a self,
        platform: &P,
        work: neap_base::mutex::Guard<'a, Work>,
        floor: usize,
        stop: &dyn Fn() -> bool,
    ) -> neap_base::mutex::Guard<'a, Work> {
        stack::apart(|| self.depopulate(platform, work, floor, stop)).unwrap_or_else(|| self.turn.lock())
    }

    /// Empties the chunks that are isolated, until the reserve would be smaller than `floor`. Answers with the turn, which
    /// others may have had meanwhile. What is left where it is to `stop` stays isolated.
    fn depopulate<'a, P: Platform>(
        &'a self,
        platform: &P,
        mut work: neap_base::mutex::Guard<'a, Work>,
        floor: usize,
        stop: &dyn Fn() -> bool,
    ) -> neap_base::mutex::Guard<'a, Work> {
        while !stop() {
            let mut runs = [Run { chunk: 0, first: 0, count: 0 }; RUNS];
            let mut gone = [0; RUNS];
            let most = RUNS.min(SCATTERED_RANGES / self.geometry.groups).max(1);
            let mut state = self.state.lock();
            let (count, destroyed) = state.gather(&mut runs[..most], &mut gone, floor);
            let length = state.chunks.tables_length();
            gone[..destroyed].iter_mut().for_each(|chunk| *chunk = state.chunks.tables(*chunk as u32));
            drop(state);
            for tables in &gone[..destroyed] {
                // SAFETY: who creates the chunk again has the turn, and writes all of its tables.
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

    /// Where a group's pages lie.
    pub(crate) fn pages_at(&self, group: usize, chunk: u32, first: usize) -> usize {
        self.base
            + group * self.geometry.group_span()
            + chunk as usize * self.geometry.chunk
            + first * self.geometry.page
    }

    /// Gives runs back in all groups; answers how many, from the first, are gone. Those behind are as they were.
    fn release<P: Platform>(&self, platform: &P, work: &mut Work, runs: &[Run]) -> usize {
        let (groups, page) = (self.geometry.groups, self.geometry.page);
        let mut done = 0;
        if runs.len() * groups <= SCATTERED_RANGES && runs.len() * groups > 1 {
            let ranges = &mut work.ranges()[..runs.len() * groups];
            for (at, range) in ranges.iter_mut().enumerate() {
                let run = &runs[at / groups];
                let start = self.pages_at(at % groups, run.chunk, run.first);
                *range = memory::Range { start, length: run.count * page };
            }
            // SAFETY: no row touches the pages, and none is placed in an isolated chunk.
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
                // SAFETY: as above.
                if unsafe { platform.release(start, run.count * page) }.is_err() {
                    work.counts.release_failures += 1;
                    // What is gone already comes back: a page is there in all groups or in none. (If that is refused as
                    // well, a touch brings it back.)
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

    /// Puts memory behind pages in all groups, or in none.
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
                // A kernel that has no such call: the pages come one by one.
                Err(Errno::INVAL) => {
                    self.touch(start, length);
                    Ok(())
                }
                answer => answer,
            };
            if let Err(error) = answer {
                for group in 0..=group {
                    // SAFETY: nobody was given these pages yet.
                    let _ = unsafe { platform.release(self.pages_at(group, chunk, pages.start), length) };
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn touch(&self, start: usize, length: usize) {
        for address in (start..start + length).step_by(4096) {
            // SAFETY: mapped, and nobody's.
            unsafe { core::ptr::with_exposed_provenance_mut::<u8>(address).write_volatile(0) };
        }
    }

    /// Populates pages until the reserve is full, and rows for it; gives up where the system does, or where there is no address space.
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
            let Some((chunk, pages)) = state.next_holes(wanted) else {
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

impl State {
    /// Isolates the wholly free chunks but the first.
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

    /// Isolates chunks with empty pages, emptiest lists first, until the reserve is not above `floor`.
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

    /// Finds pages that are to go, in isolated chunks, from their ends, and lets go of the chunks that have none, or destroys
    /// them; answers how many runs there are, and chunks that are gone.
    fn gather(&mut self, runs: &mut [Run], gone: &mut [usize], floor: usize) -> (usize, usize) {
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
                    runs[count] = Run { chunk, first: pages.start, count: pages.len() };
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
                self.move_to(chunk, self.lists.sidelined(), false);
            }
        }
        (count, destroyed)
    }

    /// Whether chunks wait to be depopulated: the worker was stopped before it came to them.
    fn has_more(&self) -> bool {
        self.lists.head(self.lists.to_depopulate()).is_some()
    }

    /// Lets allocations have a chunk again that waits to be emptied; answers how many empty pages it has. For who has the turn: with anybody else,
    /// these may be on their way to the system.
    pub(crate) fn recall(&mut self) -> Option<usize> {
        let chunk = self.lists.head(self.lists.to_depopulate())?;
        self.reintegrate(chunk);
        Some(self.chunks.header(chunk).empty as usize)
    }

    /// Lets allocations have the chunks again that the system will not take pages of.
    fn give_up(&mut self) {
        while self.recall().is_some() {}
    }

    /// Pages without memory where the reserve would be of use, at most `most`; none, if a chunk is needed first.
    fn next_holes(&mut self, most: usize) -> Option<(u32, Range<usize>)> {
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
                        self.reintegrate(chunk); // So that its pages count.
                    }
                    return self.chunks.get(chunk).first_holes(most).map(|pages| (chunk, pages));
                }
            }
            list = filled + 1;
        }
        None
    }
}
