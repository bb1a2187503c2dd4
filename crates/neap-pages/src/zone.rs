//! The zone: the buddy behind a mutex, the budget, and growth when it is empty.
//!
//! Sits between the CPU lists (and everything too large for them) and the arena. One mutex protects the buddy and the
//! counters; no system call is made under it. Pages that travel (detached from a CPU's list, or being released) are
//! counted apart, and an allocation that is about to fail waits for them, a bounded time. Never calls upwards: no
//! reclaim, no draining of lists here.

use crate::arena::{Arena, Grown};
use crate::buddy::Buddy;
use crate::chains::Chain;
use crate::pages::Exhausted;
use crate::policy::watermarks;
use crate::statistics::Watermarks;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use neap_base::mutex::Guard;
use neap_base::{Mutex, Order, Platform};

/// Looks at travelling pages before an allocation fails, with [`Platform::pause`] in between: some ten milliseconds.
const LOOKS: u32 = 20_000;

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) buddy: Buddy,
    /// Pages detached for release or population.
    pub(crate) releasing: u32,
    pub(crate) locks: u64,
    budget: u32,
}

impl Inner {
    /// Pages that are handed out, or in CPUs' lists.
    pub(crate) fn used(&self) -> u32 {
        self.buddy.managed - self.buddy.free - self.releasing
    }

    /// Pages that may still be handed out.
    pub(crate) fn room(&self) -> u32 {
        self.budget.saturating_sub(self.used())
    }
}

#[derive(Debug)]
pub(crate) struct Zone {
    inner: Mutex<Inner>,
    pub(crate) budget: Option<u32>,
    pub(crate) watermarks: Watermarks,
    /// Pages that are on their way back into the buddy.
    travelling: AtomicU32,
}

impl Zone {
    /// A zone over `buddy`, in which at most `budget` pages are in use at once.
    pub(crate) fn new(buddy: Buddy, budget: Option<u32>, page_shift: u32) -> Zone {
        Zone {
            inner: Mutex::new(Inner { buddy, releasing: 0, locks: 0, budget: budget.unwrap_or(u32::MAX) }),
            budget,
            watermarks: budget.map(|pages| watermarks(pages, page_shift)).unwrap_or_default(),
            travelling: AtomicU32::new(0),
        }
    }

    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, Inner> {
        let mut inner = self.inner.lock();
        inner.locks += 1;
        inner
    }

    /// Lets `take` take something of `pages` pages out of the buddy; it is told how many pages the budget still has, and is
    /// called again when the arena has grown, by at least `growth`, or travelling pages have arrived.
    pub(crate) fn acquire<P: Platform, T>(
        &self,
        arena: &Arena,
        platform: &P,
        pages: u32,
        growth: u32,
        mut take: impl FnMut(&mut Buddy, u32) -> Option<T>,
    ) -> Result<T, Exhausted> {
        let mut looks = 0;
        loop {
            let mut inner = self.lock();
            let room = inner.room();
            let fits = room >= pages;
            if fits && let Some(taken) = take(&mut inner.buddy, room) {
                return Ok(taken);
            }
            // Both are read under the lock of the attempt: what arrives or grows later makes another one worth while.
            let (seen, travelling) = (inner.buddy.frames.pages(), self.travelling.load(Relaxed));
            drop(inner);
            if fits && arena.grow(platform, growth, seen, |grown| self.add(grown)).is_ok() {
                continue;
            }
            if travelling == 0 || looks == LOOKS {
                return Err(Exhausted);
            }
            looks += 1;
            platform.pause();
        }
    }

    pub(crate) fn add(&self, (start, pages): Grown) {
        // SAFETY: the arena maps its tables before it tells of new pages; the buddy alone writes them.
        unsafe { self.lock().buddy.add(start, pages) };
    }

    /// Takes a whole chain back, at most `blocks` blocks under one hold of the lock.
    pub(crate) fn give_chain(&self, mut chain: Chain, order: Order, blocks: u32) {
        while chain.blocks > 0 {
            self.lock().buddy.give_chain(&mut chain, order, blocks);
        }
    }

    /// Pages that are on their way back.
    pub(crate) fn travelling(&self) -> u32 {
        self.travelling.load(Relaxed)
    }

    /// Says that pages leave: before they do, for the lists; under the zone's lock, for the buddy.
    pub(crate) fn depart(&self, pages: u32) {
        self.travelling.fetch_add(pages, Relaxed);
    }

    /// Says that pages are back, after the zone's lock was held to put them there. So a reader under the lock that no
    /// longer sees them travel sees them in the buddy.
    pub(crate) fn arrive(&self, pages: u32) {
        self.travelling.fetch_sub(pages, Relaxed);
    }
}
