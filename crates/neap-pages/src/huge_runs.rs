//! Huge pages behind long runs, where the system gives them to everybody.
//!
//! Sits between runs and `madvise`. The arena refuses huge pages, or the kernel would put memory back behind what was released
//! ([`populate`](crate::populate)). A system that gives them to everybody (`always`) gives them to large allocations of any
//! other malloc: so they are allowed behind the chunks that lie wholly in a run, for as long as they do. A system that gives
//! them to who asks (`madvise`) is not asked: a run may never be touched as a whole.
//!
//! The most is [`MOST`] runs at a time: each may leave two mappings more. And none on a machine with isolated CPUs: what the kernel puts
//! together later flushes address translations on every CPU of the process.
//!
//! No locks: whoever calls has the run, so nobody else has a say about its chunks. A bit of each says so to the tick, which
//! forbids again what populations have allowed between the first and the last of them:
//!
//! 1. the tick finds no bit; 2. somebody takes the run, allows and sets it; 3. the tick forbids. Then this run has small
//!    pages, which is no harm. The other way around there is none: a run that is given back is forbidden by its owner, before.

use crate::arena::{Arena, CHUNK};
use crate::populate::HUGE;
use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use neap_base::platform::nodes::MAX_NODES;
use neap_base::{Pfn, Platform};

/// The most runs with huge pages: the kernel allows 65530 mappings by default.
const MOST: u32 = 8192;

/// The bit of a chunk's second byte that says that huge pages are allowed there for a run; the others are its node, from 1.
pub(crate) const IN_RUN: u8 = 1 << 7;
const _: () = assert!(MAX_NODES < IN_RUN as usize);

/// Whether runs have huge pages, and how many do.
#[derive(Debug)]
pub(crate) struct HugeRuns {
    given: bool,
    count: AtomicU32,
}

impl HugeRuns {
    /// If they are `wanted` and the system gives them to everybody.
    pub(crate) fn new<P: Platform>(platform: &P, wanted: bool) -> HugeRuns {
        // The kernel's huge pages are 2 MiB where pages are 4 KiB.
        let any = wanted && platform.page_size() == 4096 && platform.gives_huge_pages();
        let given = any && !(0..platform.cpus()).any(|cpu| platform.is_isolated(cpu));
        HugeRuns { given, count: AtomicU32::new(0) }
    }

    pub(crate) fn count(&self) -> u32 {
        self.count.load(Relaxed)
    }
}

/// The pages of the chunks that lie wholly in a run; where there are none, where the first could be.
fn whole_chunks(pfn: Pfn, pages: u32) -> Range<u32> {
    let start = pfn.0.next_multiple_of(CHUNK);
    start..((pfn.0 + pages) / CHUNK * CHUNK).max(start)
}

impl Arena {
    /// Whether a run of so many pages may have huge ones.
    pub(crate) fn may_be_huge(&self, pages: u32) -> bool {
        pages >= CHUNK && self.huge_runs.given
    }

    /// Lets huge pages stand behind a run of `new` pages that had `old` so far, and no longer behind what it loses. To be
    /// called while all of these are the caller's. Answers where the system would not forbid them: somebody has to try again.
    pub(crate) fn resize_huge<P: Platform>(&self, platform: &P, pfn: Pfn, old: u32, new: u32) -> Option<Range<u32>> {
        if !self.may_be_huge(old.max(new)) {
            return None;
        }
        let (before, after) = (whole_chunks(pfn, old), whole_chunks(pfn, new));
        // A run has them from its first chunk on.
        let counted = !before.is_empty() && self.is_in_run(Pfn(before.start));
        if after.end > before.end {
            let more = before.end..after.end;
            if counted || before.is_empty() && self.count_huge_run() {
                self.advise_run(platform, &more, true);
            }
        } else if counted {
            if after.is_empty() {
                self.huge_runs.count.fetch_sub(1, Relaxed);
            }
            let less = after.end..before.end;
            return (!self.advise_run(platform, &less, false)).then_some(less);
        }
        None
    }

    /// Counts one more run with huge pages, unless there are as many as there may be.
    fn count_huge_run(&self) -> bool {
        let count = &self.huge_runs.count;
        count.fetch_update(Relaxed, Relaxed, |count| (count < MOST).then_some(count + 1)).is_ok()
    }

    /// Whether huge pages are allowed behind the chunk of a page because it lies in a run.
    pub(crate) fn is_in_run(&self, pfn: Pfn) -> bool {
        self.about_chunk(pfn, 1).load(Relaxed) & IN_RUN != 0
    }

    /// Tells the system, and notes of each chunk, whether huge pages may stand behind it for a run; those that come are huge ones for whoever
    /// releases the chunk. Answers whether the system did so.
    fn advise_run<P: Platform>(&self, platform: &P, chunks: &Range<u32>, allowed: bool) -> bool {
        let bytes = chunks.len() << self.page_shift();
        let done = bytes == 0 || platform.huge_pages(self.address(Pfn(chunks.start)), bytes, allowed).is_ok();
        for chunk in chunks.clone().step_by(CHUNK as usize).map(Pfn) {
            let byte = self.about_chunk(chunk, 1);
            if allowed {
                byte.fetch_or(IN_RUN, Relaxed);
                (0..CHUNK).step_by(HUGE.pages() as usize).for_each(|page| self.note_huge(chunk.plus(page)));
            } else {
                byte.fetch_and(!IN_RUN, Relaxed);
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_in_a_run_with_all_its_pages() {
        let chunks = |pfn, pages| whole_chunks(Pfn(pfn), pages);
        assert_eq!((chunks(2048, 1024), chunks(2048, 1023), chunks(2048, 3000)), (2048..3072, 2048..2048, 2048..4096));
        assert_eq!((chunks(2049, 2046), chunks(2049, 2047), chunks(2049, 0)), (3072..3072, 3072..4096, 3072..3072));
    }
}
