//! Huge pages on demand: memory behind two mebibytes at once, before the program faults it in page by page.
//!
//! Sits between the zone and `madvise`. When small blocks are about to come from a wholly unbacked, aligned block of two
//! mebibytes, and the zone is large enough for that to be no waste, the block is detached, populated as a huge page, and
//! put back as backed. Several threads may be at it, each with a block of its own. Allowing huge pages takes the
//! process's mapping lock for writing, which waits for every population in progress; so it is done for a batch of
//! blocks, and those that wait are detached: nobody but a population ever touches memory that allows huge pages and has
//! none yet. The next tick forbids them again, before it releases anything, and gives the waiting blocks back: the
//! kernel never refills what was released, and equal neighbours are one mapping again. What the tables say about a block
//! for small blocks comes with it: a page of them that is missing would be faulted in under the lock of a size class. No lock of the zone's
//! is held over a call. Never for runs that the program may not touch.

use crate::arena::Arena;
use crate::buddy::UNBACKED;
use crate::frames::State;
use crate::page_lists::LISTED_ORDERS;
use crate::zone::{Inner, Zone};
use core::ops::Range;
use neap_base::{Order, Pfn, Platform};

/// Two mebibytes of small pages: what a huge page is on every machine with such pages.
pub(crate) const HUGE: Order = Order(9);
/// The largest blocks it is done for.
pub(crate) const LARGEST: Order = Order(6);
/// Pages in use or backed from which on it is done: a huge page is a sixth of 12 MiB, more of what a small program touches.
const FLOOR: u32 = 3072;
/// The most blocks for which huge pages are allowed at once: 128 MiB of addresses, no memory.
const BATCH: u32 = 64;
/// Opportunities that are let pass after the system refused.
const PATIENCE: u32 = 256;

/// Whether and when to populate; part of what the zone's lock protects.
#[derive(Debug, Default)]
pub(crate) struct Population {
    /// There are huge pages, and they are wanted.
    enabled: bool,
    /// Pages that threads are populating.
    busy: u32,
    /// A thread is about to fill `ready`.
    opening: bool,
    /// Detached blocks in a row that allow huge pages and wait to be populated.
    ready: Range<u32>,
    /// All memory of the zone that allows huge pages lies between these.
    allowed: Range<u32>,
    /// Opportunities to let pass.
    patience: u32,
    /// Pages populated so far.
    pub(crate) pages: u64,
}

impl Population {
    pub(crate) fn new(enabled: bool) -> Population {
        Population { enabled, ..Population::default() }
    }

    /// Notes that huge pages are allowed in a range from now on.
    fn note_allowed(&mut self, pages: &Range<u32>) {
        let Range { start, end } = self.allowed;
        let start = if start == end { pages.start } else { start.min(pages.start) };
        self.allowed = start..end.max(pages.end);
    }
}

/// Detached blocks, the first of them to be populated now.
#[derive(Debug)]
pub(crate) struct Batch {
    pages: Range<u32>,
    /// Whether huge pages are allowed there already.
    allowed: bool,
    /// Whether the others are to wait in [`Population::ready`].
    opens: bool,
    /// Whether what the tables say about small blocks will be written soon.
    tables: bool,
}

impl Inner {
    /// Detaches a block to populate, if a block of `order` would come from memory that is worth it.
    pub(crate) fn detach_to_populate(&mut self, order: Order) -> Option<Batch> {
        let resident = self.used() + self.buddy.backed_free;
        // What is under way is at most as much as there is.
        if !self.population.enabled || order > LARGEST || resident < FLOOR || self.population.busy > resident {
            return None;
        }
        let found = self.buddy.find(order);
        if found.is_some_and(|(_, size, class)| class != UNBACKED || size < HUGE) {
            return None;
        }
        if self.population.patience > 0 {
            self.population.patience -= 1;
            return None;
        }
        let ready = &mut self.population.ready;
        let (pages, allowed) = if ready.start == ready.end {
            let most = if self.population.opening { 1 } else { BATCH };
            (self.detach_huge(most)?, false)
        } else {
            ready.start += HUGE.pages();
            (ready.start - HUGE.pages()..ready.start, true)
        };
        let opens = pages.len() > HUGE.pages() as usize;
        self.population.opening |= opens;
        self.population.busy += HUGE.pages();
        Some(Batch { pages, allowed, opens, tables: order.index() < LISTED_ORDERS })
    }

    /// Detaches up to `most` wholly unbacked blocks that lie in a row.
    fn detach_huge(&mut self, most: u32) -> Option<Range<u32>> {
        let mut pages: Option<Range<u32>> = None;
        for _ in 0..most {
            let Some((found, size, UNBACKED)) = self.buddy.find(HUGE) else { break };
            if pages.as_ref().is_some_and(|pages| pages.end != found.0) {
                break;
            }
            let (pfn, _) = self.buddy.carve(found, size, UNBACKED, HUGE);
            self.buddy.frames.frame(pfn).set_head(State::Releasing, HUGE);
            self.releasing += HUGE.pages();
            pages = Some(pages.map_or(pfn.0, |pages| pages.start)..pfn.0 + HUGE.pages());
        }
        pages
    }

    /// Puts a detached block back.
    fn attach_huge(&mut self, pfn: Pfn, touched: bool) {
        self.buddy.frames.frame(pfn).set_state(State::Inside);
        self.buddy.give(pfn, HUGE, touched);
        self.releasing -= HUGE.pages();
    }
}

impl Zone {
    /// Populates a block that was detached for it, and puts it back.
    #[cold]
    pub(crate) fn populate<P: Platform>(&self, arena: &Arena, platform: &P, batch: Batch) {
        let bytes = |pages: u32| (pages as usize) << arena.page_shift();
        let (pfn, end) = (Pfn(batch.pages.start), batch.pages.end);
        let address = arena.address(pfn);
        if !batch.allowed {
            platform.huge_pages(address, bytes(end - pfn.0), true);
            let population = &mut self.lock().population;
            population.note_allowed(&batch.pages);
            if batch.opens {
                (population.ready, population.opening) = (pfn.0 + HUGE.pages()..end, false);
            }
        }
        let answer = platform.populate(address, bytes(HUGE.pages()));
        if answer.is_ok() && batch.tables {
            arena.populate_tables(platform, pfn, HUGE.pages());
        }
        let mut inner = self.lock();
        inner.population.busy -= HUGE.pages();
        match answer {
            Ok(()) => inner.population.pages += u64::from(HUGE.pages()),
            Err(_) => inner.population.patience = PATIENCE,
        }
        // Refused or not, some of it may have memory now.
        inner.attach_huge(pfn, true);
    }

    /// Forbids huge pages again and puts the blocks back that wait; answers whether there were any. Of this node alone: blocks
    /// of others wait on.
    pub(crate) fn end_population<P: Platform>(&self, arena: &Arena, platform: &P) -> bool {
        let (ready, allowed) = {
            let population = &mut self.lock().population;
            (core::mem::take(&mut population.ready), core::mem::take(&mut population.allowed))
        };
        arena.forbid_huge_pages(platform, allowed, self.node);
        let waited = ready.start < ready.end;
        if waited {
            let mut inner = self.lock();
            ready.step_by(HUGE.pages() as usize).for_each(|pfn| inner.attach_huge(Pfn(pfn), false));
        }
        waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_was_allowed_lies_in_what_is_forbidden() {
        let ranges = [512..1024, 4096..8192, 2048..2560];
        for first in 0..3 {
            let mut population = Population::new(true);
            (first..first + 3).for_each(|n| population.note_allowed(&ranges[n % 3]));
            assert_eq!(population.allowed, 512..8192);
        }
    }
}
