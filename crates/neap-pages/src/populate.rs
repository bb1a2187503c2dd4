//! Huge pages on demand: memory behind two mebibytes at once, before the program faults it in page by page.
//!
//! Sits between the zone and `madvise`. When small blocks are about to come from a wholly unbacked, aligned block of two
//! mebibytes, and the zone is large enough for that to be no waste, the block is detached, populated with huge pages
//! allowed for just that moment, and put back as backed. The arena as a whole forbids huge pages, so that the kernel never
//! refills what was released and equal neighbours stay one mapping. One thread at a time; the others take pages as they
//! are. No lock is held over a call. Never for runs that the program may not touch.

use crate::arena::Arena;
use crate::buddy::UNBACKED;
use crate::frames::State;
use crate::zone::{Inner, Zone};
use neap_base::{Order, Pfn, Platform};

/// Two mebibytes of small pages: what a huge page is on every machine with such pages.
pub(crate) const HUGE: Order = Order(9);
/// The largest blocks it is done for.
pub(crate) const LARGEST: Order = Order(6);
/// Pages in use or backed from which on it is done: a huge page is a quarter of 8 MiB.
const FLOOR: u32 = 2048;
/// Opportunities that are let pass after the system refused.
const PATIENCE: u32 = 256;

/// Whether and when to populate; part of what the zone's lock protects.
#[derive(Debug, Default)]
pub(crate) struct Population {
    /// There are huge pages, and they are wanted.
    enabled: bool,
    /// A thread is at it.
    busy: bool,
    /// Opportunities to let pass.
    patience: u32,
    /// Pages populated so far.
    pub(crate) pages: u64,
}

impl Population {
    pub(crate) fn new(enabled: bool) -> Population {
        Population { enabled, ..Population::default() }
    }
}

impl Inner {
    /// Detaches a block to populate, if a block of `order` would come from memory that is worth it.
    pub(crate) fn detach_to_populate(&mut self, order: Order) -> Option<Pfn> {
        if !self.population.enabled || self.population.busy || order > LARGEST {
            return None;
        }
        if self.used() + self.buddy.backed_free < FLOOR {
            return None;
        }
        let (found, size, class) = self.buddy.find(order)?;
        if class != UNBACKED || size < HUGE {
            return None;
        }
        if self.population.patience > 0 {
            self.population.patience -= 1;
            return None;
        }
        let (pfn, _) = self.buddy.carve(found, size, class, HUGE);
        self.buddy.frames.frame(pfn).set_head(State::Releasing, HUGE);
        self.releasing += HUGE.pages();
        self.population.busy = true;
        Some(pfn)
    }
}

impl Zone {
    /// Populates a block that was detached for it, and puts it back.
    #[cold]
    pub(crate) fn populate<P: Platform>(&self, arena: &Arena, platform: &P, pfn: Pfn) {
        let (address, length) = (arena.address(pfn), (HUGE.pages() as usize) << arena.page_shift());
        platform.huge_pages(address, length, true);
        let answer = platform.populate(address, length);
        platform.huge_pages(address, length, false);
        let mut inner = self.lock();
        inner.population.busy = false;
        match answer {
            Ok(()) => inner.population.pages += u64::from(HUGE.pages()),
            Err(_) => inner.population.patience = PATIENCE,
        }
        // Refused or not, some of it may have memory now.
        inner.buddy.frames.frame(pfn).set_state(State::Inside);
        inner.buddy.give(pfn, HUGE, true);
        inner.releasing -= HUGE.pages();
    }
}
