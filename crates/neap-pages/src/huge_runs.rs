//! Huge pages behind long runs, where the system gives them to everybody.
//!
//! Sits between runs and `madvise`. The arena refuses huge pages, or the kernel would put memory back behind what was released
//! ([`populate`](crate::populate)). A system that gives them to everybody (`always`) gives them to large allocations of any
//! other malloc: so they are allowed behind the chunks that lie wholly in a run, for as long as they do. A system that gives
//! them to who asks (`madvise`) is not asked: a run may never be touched as a whole.
//!
//! No locks: whoever calls has the run, so nobody else has a say about its chunks. A bit of each says so to the tick, which
//! forbids again what populations have allowed between the first and the last of them:
//!
//! 1. the tick finds no bit; 2. somebody takes the run, allows and sets it; 3. the tick forbids. Then this run has small
//!    pages, which is no harm. The other way around there is none: a run that is given back is forbidden by its owner, before.

use crate::arena::{Arena, CHUNK};
use crate::populate::HUGE;
use core::ops::Range;
use core::sync::atomic::Ordering::Relaxed;
use neap_base::platform::nodes::MAX_NODES;
use neap_base::{Pfn, Platform};

/// The bit of a chunk's second byte that says that huge pages are allowed there for a run; the others are its node, from 1.
pub(crate) const IN_RUN: u8 = 1 << 7;
const _: () = assert!(MAX_NODES < IN_RUN as usize);

/// Nobody has asked yet whether the system gives huge pages to everybody.
pub(crate) const UNASKED: u8 = 2;

/// The pages of the chunks that lie wholly in a run; where there are none, where the first could be.
fn whole_chunks(pfn: Pfn, pages: u32) -> Range<u32> {
    let start = pfn.0.next_multiple_of(CHUNK);
    start..((pfn.0 + pages) / CHUNK * CHUNK).max(start)
}

impl Arena {
    /// Lets huge pages stand behind a run of `new` pages that had `old` so far, and no longer behind what it loses. To be
    /// called while all of these are the caller's.
    pub(crate) fn resize_huge<P: Platform>(&self, platform: &P, pfn: Pfn, old: u32, new: u32) {
        if old.max(new) < CHUNK || !self.gives_huge_pages(platform) {
            return;
        }
        let (before, after) = (whole_chunks(pfn, old).end, whole_chunks(pfn, new).end);
        let (chunks, allowed) = (before.min(after)..before.max(after), after > before);
        let each = || chunks.clone().step_by(CHUNK as usize).map(Pfn);
        // What the kernel puts together later flushes translations on every CPU of the process.
        let nothing =
            if allowed { platform.is_isolated_cpu_in_use() } else { !each().any(|chunk| self.is_in_run(chunk)) };
        if nothing {
            return;
        }
        platform.huge_pages(self.address(Pfn(chunks.start)), chunks.len() << self.page_shift(), allowed);
        each().for_each(|chunk| self.set_in_run(chunk, allowed));
    }

    /// Whether huge pages are allowed behind the chunk of a page because it lies in a run.
    pub(crate) fn is_in_run(&self, pfn: Pfn) -> bool {
        self.about_chunk(pfn, 1).load(Relaxed) & IN_RUN != 0
    }

    /// Says so; those that come are huge ones for whoever releases the chunk.
    fn set_in_run(&self, pfn: Pfn, allowed: bool) {
        if allowed {
            self.about_chunk(pfn, 1).fetch_or(IN_RUN, Relaxed);
            (0..CHUNK).step_by(HUGE.pages() as usize).for_each(|page| self.note_huge(pfn.plus(page)));
        } else {
            self.about_chunk(pfn, 1).fetch_and(!IN_RUN, Relaxed);
        }
    }

    /// Whether runs have huge pages: the system gives them to everybody. It is asked once.
    fn gives_huge_pages<P: Platform>(&self, platform: &P) -> bool {
        match self.huge_runs.load(Relaxed) {
            UNASKED => {
                let gives = platform.gives_huge_pages();
                self.huge_runs.store(gives.into(), Relaxed);
                gives
            }
            answer => answer == u8::from(true),
        }
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
