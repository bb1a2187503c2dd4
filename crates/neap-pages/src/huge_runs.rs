//! Huge pages behind long runs.
//!
//! # Design
//!
//! The arena forbids huge pages, because the kernel would give released pages memory again
//! ([`populate`](crate::populate)). A run may allow them in the aligned parts of 2 MiB that lie
//! wholly in it, until it is freed:
//!
//! - If the system gives huge pages to every mapping (`always`), each run with such a part allows
//!   them.
//! - If the system gives huge pages on request (`madvise`), a run allows them by the rule
//!   [`at_most_doubles`]. The arrays of a growing program get memory without a fault for each small
//!   page.
//! - Without a limit, a run of [`LONG_PAGES`] or more allows them, too. A program writes to
//!   undefined memory before it reads it, so such a buffer or table is mostly touched as a whole.
//!   A run of zeroes may stay sparse, and does not: [`Pages::expect_sparse`](crate::Pages).
//! - If the system gives none (`never`, or to this process), no run asks for them.
//!
//! A run of small pages that grows out of its place is copied, up to [`COPIED_PAGES_MAX`], if the
//! new run has huge pages. Moved page tables would keep the small pages, in a mapping of their own.
//! A run shorter than a huge page is copied, too, if it or its new place is a part of one, since a
//! move would break that one.
//!
//! At most [`RUNS_MAX`] runs allow huge pages at a time, since each may split a mapping into three.
//! On a machine with isolated CPUs no run does, since khugepaged flushes address translations on
//! every CPU of the process.
//!
//! # Concurrency
//!
//! There are no locks. The caller owns the run, so no other thread changes the advice on its parts.
//! A bit marks each part. A tick forbids huge pages in the whole range in which populations have
//! allowed them, except in marked parts. One race remains:
//!
//! | tick | owner of a run |
//! |---|---|
//! | 1. finds no bit | |
//! | | 2. takes the run, allows huge pages, sets the bit |
//! | 3. forbids huge pages | |
//!
//! The run then has small pages, which is correct. The reverse cannot occur: no free range allows
//! huge pages, since the owner forbids them before it frees the run.

use crate::arena::{Arena, IN_RUNS};
use crate::shape::MARKED;
use crate::units::{CHUNK, HUGE, at_most_doubles, huge_page_supply};
use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use neap_base::platform::{HugePageSupply, memory::HugePages};
use neap_base::{Pfn, Platform};

/// The most runs with huge pages: the kernel allows 65530 mappings by default.
const RUNS_MAX: u32 = 8192;

/// The longest run that is copied to get huge pages: 64 MiB.
pub(crate) const COPIED_PAGES_MAX: u32 = 32 * UNIT;

/// The shortest run that allows huge pages for its length alone: 16 MiB. Stacks of coroutines,
/// which stay sparse, are shorter.
const LONG_PAGES: u32 = 8 * UNIT;

/// Pages of a huge page.
const UNIT: u32 = HUGE.pages();

/// The use of huge pages by runs.
#[derive(Debug)]
pub(crate) struct HugeRuns {
    /// Whether runs may have huge pages.
    wanted: bool,
    /// What the system supplies; `None` if blocks and runs may have no huge pages.
    pub(crate) supply: HugePageSupply,
    count: AtomicU32,
}

impl HugeRuns {
    /// Runs may have huge pages if these are `wanted`, the system supplies them, and no CPU is
    /// isolated.
    pub(crate) fn new<P: Platform>(platform: &P, wanted: bool) -> HugeRuns {
        let supply = huge_page_supply(platform, wanted);
        let is_isolated = |cpu| platform.is_isolated(cpu);
        let wanted = supply != HugePageSupply::None && !(0..platform.cpus()).any(is_isolated);
        HugeRuns { wanted, supply, count: AtomicU32::new(0) }
    }

    pub(crate) fn count(&self) -> u32 {
        self.count.load(Relaxed)
    }
}

/// The pages of all huge pages that lie wholly in a run. If there are none, returns an empty range
/// at the place where the first could begin.
fn whole_units(pfn: Pfn, pages: u32) -> Range<u32> {
    let start = pfn.0.next_multiple_of(UNIT);
    start..((pfn.0 + pages) / UNIT * UNIT).max(start)
}

impl Arena {
    /// Whether a run of `pages` pages should have huge pages. `resident` counts all resident pages,
    /// and the run as if it were resident.
    pub(crate) fn is_worth_huge(&self, pages: u32, resident: u32) -> bool {
        let is_long = pages >= LONG_PAGES && self.budget().is_none();
        self.huge_runs.wanted && pages >= UNIT && (is_long || !self.is_risky(pages, resident))
    }

    /// Whether huge pages in a run of `pages` pages could more than double the resident memory, if
    /// the program leaves it sparse. Not where every mapping has them anyway. `resident` is as for
    /// [`Arena::is_worth_huge`].
    pub(crate) fn is_risky(&self, pages: u32, resident: u32) -> bool {
        let is_everywhere = self.huge_runs.supply == HugePageSupply::Everywhere;
        !is_everywhere && !at_most_doubles(pages, resident.saturating_sub(pages))
    }

    /// Allows huge pages in the part that a run gains when it grows from `old` to `new` pages. If
    /// the run does not allow them in its first whole part, later parts do not allow them either.
    /// The caller owns the run.
    pub(crate) fn allow_huge<P: Platform>(&self, platform: &P, pfn: Pfn, old: u32, new: u32) {
        let (before, after) = (whole_units(pfn, old), whole_units(pfn, new));
        let is_counted = || self.is_in_run(Pfn(before.start));
        if after.end > before.end && if before.is_empty() { self.count_huge_run() } else { is_counted() } {
            self.advise_run(platform, &(before.end..after.end), HugePages::Allowed);
        }
    }

    /// Forbids huge pages in the part that a run loses when it shrinks from `old` to `new` pages.
    /// The caller owns all old pages. Returns the pages for which the system refused; the caller
    /// leaves them to the next tick.
    pub(crate) fn forbid_huge<P: Platform>(&self, platform: &P, pfn: Pfn, old: u32, new: u32) -> Option<Range<u32>> {
        if !self.huge_runs.wanted || old < UNIT {
            return None;
        }
        let (before, after) = (whole_units(pfn, old), whole_units(pfn, new));
        if !self.is_huge_run(pfn, old) {
            return None;
        }
        if after.is_empty() {
            self.huge_runs.count.fetch_sub(1, Relaxed);
        }
        let lost = after.end..before.end;
        (!self.advise_run(platform, &lost, HugePages::Forbidden)).then_some(lost)
    }

    /// Whether a run allows huge pages. The caller owns the run.
    pub(crate) fn is_huge_run(&self, pfn: Pfn, pages: u32) -> bool {
        let units = whole_units(pfn, pages);
        !units.is_empty() && self.is_in_run(Pfn(units.start))
    }

    /// The bit of a page's huge page in [`Arena::marks`].
    fn huge_bit(pfn: Pfn) -> u8 {
        const { assert!(MARKED as u32 + CHUNK / HUGE.pages() <= u8::BITS) };
        1 << (MARKED as u32 + pfn.0 / HUGE.pages() % (CHUNK / HUGE.pages()))
    }

    /// Records that a page is part of a huge page.
    pub(crate) fn note_huge(&self, pfn: Pfn) {
        self.marks(pfn).fetch_or(Arena::huge_bit(pfn), Relaxed);
    }

    /// Whether a page may be part of a huge page.
    pub(crate) fn is_huge(&self, pfn: Pfn) -> bool {
        self.marks(pfn).load(Relaxed) & Arena::huge_bit(pfn) != 0
    }

    /// Whether a run is shorter than a huge page, and may have pages of one.
    pub(crate) fn is_part_of_huge(&self, pfn: Pfn, pages: u32) -> bool {
        pages < UNIT && (self.is_huge(pfn) || self.is_huge(pfn.plus(pages - 1)))
    }

    /// Whether a page may be part of a huge page. Clears the record.
    pub(crate) fn forget_huge(&self, pfn: Pfn) -> bool {
        self.is_huge(pfn) && self.marks(pfn).fetch_and(!Arena::huge_bit(pfn), Relaxed) & Arena::huge_bit(pfn) != 0
    }

    /// Counts one more run with huge pages. Returns `false` at the limit.
    fn count_huge_run(&self) -> bool {
        let count = &self.huge_runs.count;
        count.try_update(Relaxed, Relaxed, |count| (count < RUNS_MAX).then_some(count + 1)).is_ok()
    }

    /// Whether a page is in a part of a run in which huge pages are allowed.
    pub(crate) fn is_in_run(&self, pfn: Pfn) -> bool {
        self.about_chunk(pfn, IN_RUNS).load(Relaxed) & run_bit(pfn) != 0
    }

    /// Allows or forbids huge pages in parts of a run, and records it in the bit of each part. Also
    /// notes allowed parts as huge pages, which a release splits. Returns whether the system
    /// agreed.
    fn advise_run<P: Platform>(&self, platform: &P, parts: &Range<u32>, huge: HugePages) -> bool {
        let bytes = parts.len() << self.page_shift();
        let done = bytes == 0 || platform.huge_pages(self.address(Pfn(parts.start)), bytes, huge).is_ok();
        for part in parts.clone().step_by(UNIT as usize).map(Pfn) {
            // Relaxed: a tick reads the bit as a hint; see the table in the module's head.
            let byte = self.about_chunk(part, IN_RUNS);
            if huge == HugePages::Allowed {
                byte.fetch_or(run_bit(part), Relaxed);
                self.note_huge(part);
            } else {
                byte.fetch_and(!run_bit(part), Relaxed);
            }
        }
        done
    }
}

/// The bit of the huge page of `pfn` in its chunk's byte [`IN_RUNS`].
fn run_bit(pfn: Pfn) -> u8 {
    const { assert!(CHUNK / UNIT <= u8::BITS) };
    1 << (pfn.0 / UNIT % (CHUNK / UNIT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_in_a_run_with_all_its_pages() {
        let parts = |pfn, pages| whole_units(Pfn(pfn), pages);
        assert_eq!((parts(1024, 512), parts(1024, 511), parts(1024, 1500)), (1024..1536, 1024..1024, 1024..2048));
        assert_eq!((parts(1025, 1022), parts(1025, 1023), parts(1025, 0)), (1536..1536, 1536..2048, 1536..1536));
    }
}
