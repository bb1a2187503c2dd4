//! Cached runs of one CPU: large allocations of up to 1 MiB, taken and freed without the zone's
//! lock.
//!
//! # Design
//!
//! A few freed runs, newest last, lie beside the CPU's page lists and under their lock. An
//! allocation takes the newest run of exactly its length. A freed run for which there is no room
//! displaces the oldest runs, which the caller gives to the zone. A tick returns all runs of a CPU
//! that took and freed none since the tick before.
//!
//! # Invariants
//!
//! - The first frame of a cached run has the state [`State::Cached`](crate::frames::State::Cached),
//!   and its owner is the number of pages. The pages count as used and as listed.
//! - `pages` is the sum over `runs[..count]`, at most [`MOST_PAGES`].

use core::mem::{replace, take};
use neap_base::Pfn;

/// The most cached runs of a CPU.
pub(crate) const MOST_RUNS: usize = 8;
/// The most pages in all cached runs of a CPU: 2 MiB.
pub(crate) const MOST_PAGES: u32 = 512;
/// Pages of the longest run that is cached: 1 MiB.
pub(crate) const LONGEST: u32 = 256;

/// A run: its first page and its length in pages. No run has 0 pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CachedRun {
    pub(crate) pfn: Pfn,
    pub(crate) pages: u32,
}

/// A few runs: the first `count` entries of `runs`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Runs {
    runs: [CachedRun; MOST_RUNS],
    count: usize,
}

impl Runs {
    pub(crate) const NONE: Runs = Runs { runs: [CachedRun { pfn: Pfn::NONE, pages: 0 }; MOST_RUNS], count: 0 };

    pub(crate) fn iter(&self) -> impl Iterator<Item = CachedRun> + '_ {
        self.runs[..self.count].iter().copied()
    }

    /// Pages in all of them.
    pub(crate) fn pages(&self) -> u32 {
        self.iter().map(|run| run.pages).sum()
    }
}

/// The cached runs of a CPU.
#[derive(Debug)]
pub(crate) struct RunCache {
    /// Oldest first.
    runs: Runs,
    pages: u32,
    /// Whether a run was taken or freed since the last tick.
    changed: bool,
}

impl RunCache {
    pub(crate) const EMPTY: RunCache = RunCache { runs: Runs::NONE, pages: 0, changed: false };

    /// Offset of the number of pages.
    pub(crate) const PAGES_AT: usize = core::mem::offset_of!(RunCache, pages);

    /// Pages of all cached runs.
    pub(crate) fn pages(&self) -> u32 {
        self.pages
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = CachedRun> + '_ {
        self.runs.iter()
    }

    fn has_sound_counts(&self) -> bool {
        self.pages == self.runs.pages() && self.pages <= MOST_PAGES
    }

    /// Takes the newest run of exactly `pages` pages whose first page is a multiple of `align`, a
    /// power of two.
    #[inline]
    pub(crate) fn take(&mut self, pages: u32, align: u32) -> Option<Pfn> {
        let Runs { runs, count } = &mut self.runs;
        let fits = |run: &CachedRun| run.pages == pages && run.pfn.0 & (align - 1) == 0;
        let found = runs[..*count].iter().rposition(fits)?;
        let pfn = runs[found].pfn;
        runs[found..*count].rotate_left(1);
        *count -= 1;
        self.pages -= pages;
        self.changed = true;
        debug_assert!(self.has_sound_counts());
        Some(pfn)
    }

    /// Caches a run of at most [`LONGEST`] pages. Returns the runs that it displaces.
    #[inline]
    pub(crate) fn put(&mut self, run: CachedRun) -> Runs {
        debug_assert!(run.pages > 0 && run.pages <= LONGEST);
        let full = self.runs.count == MOST_RUNS || self.pages + run.pages > MOST_PAGES;
        let out = if full { self.make_room(run.pages) } else { Runs::NONE };
        let Runs { runs, count } = &mut self.runs;
        runs[*count] = run;
        *count += 1;
        self.pages += run.pages;
        self.changed = true;
        debug_assert!(self.has_sound_counts());
        out
    }

    /// Removes the oldest runs until one more of `pages` pages fits.
    #[cold]
    fn make_room(&mut self, pages: u32) -> Runs {
        let mut out = Runs::NONE;
        let Runs { runs, count } = &mut self.runs;
        while *count == MOST_RUNS || self.pages + pages > MOST_PAGES {
            self.pages -= runs[0].pages;
            out.runs[out.count] = runs[0];
            out.count += 1;
            runs[..*count].rotate_left(1);
            *count -= 1;
        }
        out
    }

    /// Removes all runs.
    pub(crate) fn drain(&mut self) -> Runs {
        self.pages = 0;
        replace(&mut self.runs, Runs::NONE)
    }

    /// Removes all runs if none was taken or freed since the last call.
    pub(crate) fn age(&mut self) -> Runs {
        if take(&mut self.changed) { Runs::NONE } else { self.drain() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(pfn: u32, pages: u32) -> CachedRun {
        CachedRun { pfn: Pfn(pfn), pages }
    }

    #[test]
    fn newest_run_of_the_same_length_is_taken() {
        let mut cache = RunCache::EMPTY;
        for at in [run(0, 16), run(100, 10), run(203, 16), run(304, 11)] {
            assert_eq!(cache.put(at).iter().count(), 0);
        }
        assert_eq!((cache.take(16, 2), cache.take(12, 1)), (Some(Pfn(0)), None), "an odd page is no multiple of 2");
        assert_eq!((cache.take(16, 1), cache.take(16, 1), cache.pages()), (Some(Pfn(203)), None, 21));
    }

    #[test]
    fn oldest_runs_leave_when_a_bound_is_reached() {
        let mut cache = RunCache::EMPTY;
        for n in 0..MOST_RUNS as u32 {
            assert_eq!(cache.put(run(n * 1000, 10 + n)).pages(), 0);
        }
        assert!(cache.put(run(9000, 3)).iter().eq([run(0, 10)]), "too many");
        assert!(cache.put(run(10_000, 256)).iter().eq([run(1000, 11)]), "too many again");
        let out = cache.put(run(11_000, 200));
        assert!(out.iter().eq([run(2000, 12), run(3000, 13), run(4000, 14)]), "too many pages: {out:?}");
        assert!(cache.pages() <= MOST_PAGES && cache.pages() == cache.iter().map(|run| run.pages).sum());
    }

    #[test]
    fn runs_that_rest_for_an_interval_leave() {
        let mut cache = RunCache::EMPTY;
        cache.put(run(5, 7));
        assert_eq!(cache.age().pages(), 0);
        assert!(cache.age().iter().eq([run(5, 7)]) && cache.pages() == 0);
    }
}
