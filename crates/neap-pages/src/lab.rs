//! The laboratory, for simulators: it splits each call that may visit the zone into two halves. A
//! simulator can declare the zone's mutex busy.
//!
//! # Design
//!
//! A simulator owns the time and drives the real lists, zone and buddy in one thread. The first
//! half of an operation works on the CPU's list. If it needs the zone, it returns a [`Visit`], and
//! the second half runs at the simulator's later time. The simulator then says whether the zone's
//! lock is held, and learns how often it was taken and how many pages moved under it. Compiled with
//! the feature `lab` only.

use crate::block_batch::Chain;
use crate::buddy::{Buddy, Memory, take_out};
use crate::page_lists::{Missing, Why};
use crate::pages::Pages;
use crate::policy::{Limits, Policy};
use crate::purge::Report;
use crate::shape::Shape;
use crate::units::{Block, Exhausted, LISTED_ORDERS};
use crate::zone::Wanted;
use core::sync::atomic::Ordering::Relaxed;
use neap_base::platform::Errno;
use neap_base::{Order, Pfn, Platform};

/// The rest of an operation, which takes the zone's mutex.
#[derive(Debug)]
#[must_use]
pub enum Visit {
    /// The list has no block of this order. The second half takes this many from the zone.
    Refill(Order, u32),
    /// The list has these blocks too many. The second half gives them to the zone.
    Spill(Spilled),
    /// The list is not used. The second half takes one block from the zone.
    Take(Order),
    /// The list is not used. The second half gives this block to the zone.
    Give(Pfn, Order),
}

/// Blocks on their way from a list to the zone.
#[derive(Debug)]
pub struct Spilled(Chain, Order);

/// Use of the zone's mutex.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LockUse {
    /// Number of times that it was taken.
    pub holds: u32,
    /// Number of pages that moved, in either direction.
    pub pages: u32,
}

/// Result of a call, and its use of the zone's mutex.
#[derive(Debug)]
pub struct Metered<R> {
    /// The result.
    pub answer: R,
    /// The use of the mutex.
    pub held: LockUse,
}

/// A platform and pages on it whose lists have policy `T`. Dropping it closes the pages.
#[derive(Debug)]
pub struct Laboratory<P: Platform, T: Policy> {
    platform: P,
    pages: Pages<P, T>,
}

impl<P: Platform, T: Policy> Laboratory<P, T> {
    /// Opens pages on a platform.
    ///
    /// # Errors
    /// The platform's error.
    pub fn open(platform: P, shape: &Shape) -> Result<Laboratory<P, T>, Errno> {
        let pages = Pages::open_tuned(&platform, shape)?;
        pages.zone.meter.on.store(true, Relaxed);
        Ok(Laboratory { platform, pages })
    }

    /// The platform.
    pub fn platform(&self) -> &P {
        &self.platform
    }

    /// The pages.
    pub fn pages(&self) -> &Pages<P, T> {
        &self.pages
    }

    /// Sets the time for policies with a clock. Ticks use the platform's time.
    #[inline]
    pub fn set_clock(&self, nanoseconds: u64) {
        self.pages.lists.clock.store(nanoseconds, Relaxed);
    }

    /// The bounds of the lists.
    pub fn limits(&self) -> Limits {
        self.pages.lists.limits.now()
    }

    /// Takes a block of order 0 to 3 from this CPU's list. With `bypass`, acts as if another thread
    /// held the list.
    ///
    /// # Errors
    /// The [`Visit`] that takes a block from the zone, if the list gives none.
    #[inline]
    pub fn begin_allocate(&self, order: Order, bypass: bool) -> Result<Block, Visit> {
        let lists = &self.pages.lists;
        if bypass || order.index() >= LISTED_ORDERS || !lists.is_on() {
            return Err(Visit::Take(order));
        }
        lists.pop(self.pages.frames(), self.platform.cpu(), order).map_err(|missing| match missing {
            Missing::Busy => Visit::Take(order),
            Missing::Blocks(blocks) => Visit::Refill(order, blocks),
        })
    }

    /// Puts a block into this CPU's list. With `bypass`, acts as if another thread held the list.
    /// Returns the rest of the operation.
    #[inline]
    pub fn begin_free(&self, pfn: Pfn, order: Order, bypass: bool) -> Option<Visit> {
        let Pages { lists, zone, .. } = &self.pages;
        take_out(self.pages.frames(), pfn, order);
        if bypass || order.index() >= LISTED_ORDERS || !lists.is_on() {
            return Some(Visit::Give(pfn, order));
        }
        match lists.push(self.pages.frames(), zone, self.platform.cpu(), pfn, order) {
            Ok(spilled) => spilled.map(|(chain, order)| Visit::Spill(Spilled(chain, order))),
            Err(_) => Some(Visit::Give(pfn, order)),
        }
    }

    /// Runs the rest of an operation, on the CPU that began it. With `busy`, the zone counts the
    /// first hold of its lock as one that found the lock held. A visit for an allocation returns
    /// the block.
    pub fn visit(&self, visit: Visit, busy: bool) -> Metered<Result<Option<Block>, Exhausted>> {
        let (pages, platform) = (&self.pages, &self.platform);
        self.metered_first(busy, || match visit {
            Visit::Refill(order, blocks) => pages.refill(platform, Wanted::block(order), order, blocks).map(Some),
            Visit::Spill(Spilled(chain, order)) => {
                pages.spill(platform, chain, order);
                Ok(None)
            }
            Visit::Take(order) => {
                let take = |buddy: &mut Buddy, _| buddy.allocate_block(order);
                pages.zone.acquire(&pages.arena, platform, Wanted::block(order), take).map(Some)
            }
            Visit::Give(pfn, order) => {
                pages.zone.lock().buddy.give(pfn, order, Memory::All);
                Ok(None)
            }
        })
    }

    /// Runs the part of a tick that concerns lists. `forget` says that nothing else is left to do,
    /// so no tick follows soon; lists are then reset. Returns whether a list has pages.
    pub fn tick(&self, forget: bool) -> Metered<bool> {
        let (pages, mut report) = (&self.pages, Report::default());
        self.metered(|| {
            pages.look_at(self.room());
            let listed = pages.drain_lists(Why::Time(pages.lists.quarters(self.platform.now())), &mut report);
            if forget && !listed {
                pages.drain_lists(Why::Time(u32::MAX), &mut report);
            }
            listed
        })
    }

    /// Drains a CPU's list, or all of them.
    pub fn drain(&self, cpu: Option<usize>) -> LockUse {
        let drain = || match cpu {
            Some(cpu) => _ = self.pages.drain_cpu(&self.platform, cpu),
            None => _ = self.pages.drain_all(&self.platform),
        };
        self.metered(drain).held
    }

    /// Calls [`Pages::set_reclaiming`], and returns its use of the zone's mutex.
    pub fn set_reclaiming(&self, reclaiming: bool) -> LockUse {
        self.metered(|| self.pages.set_reclaiming(reclaiming)).held
    }

    /// Pages that can still be handed out. The call does not count as a hold of the zone's mutex.
    pub fn room(&self) -> u32 {
        self.pages.zone.peek_room()
    }

    /// The most pages that a CPU's list keeps at the moment.
    pub fn list_high(&self, cpu: usize) -> u32 {
        self.pages.list_high_on(cpu).unwrap_or_default()
    }

    /// The pages in a CPU's list.
    pub fn listed_on(&self, cpu: usize) -> u32 {
        self.pages.listed_on(cpu).unwrap_or_default()
    }

    /// Whether the passing of time would change nothing more about any list.
    pub fn is_settled(&self) -> bool {
        (0..self.pages.lists.cpus()).all(|cpu| self.pages.lists.is_settled(cpu))
    }

    fn metered<R>(&self, act: impl FnOnce() -> R) -> Metered<R> {
        self.metered_first(false, act)
    }

    /// Runs `act`. With `busy`, its first hold of the zone's lock counts as one that found the lock
    /// held.
    fn metered_first<R>(&self, busy: bool, act: impl FnOnce() -> R) -> Metered<R> {
        let (meter, free) = (&self.pages.zone.meter, || self.pages.zone.peek_free());
        meter.holds.store(0, Relaxed);
        meter.pages.store(0, Relaxed);
        meter.free.store(free(), Relaxed);
        meter.busy.store(busy.into(), Relaxed);
        let answer = act();
        // The pages of the last hold are counted by the next one, or here.
        let pages = meter.pages.load(Relaxed) + free().abs_diff(meter.free.load(Relaxed));
        meter.busy.store(0, Relaxed);
        Metered { answer, held: LockUse { holds: meter.holds.load(Relaxed), pages } }
    }
}

impl<P: Platform, T: Policy> Drop for Laboratory<P, T> {
    fn drop(&mut self) {
        // SAFETY: `self` is dropped, so no thread uses the pages any more. A simulator uses blocks
        // as numbers; other code accesses their memory by unsafe code of its own.
        unsafe { self.pages.close(&self.platform) };
    }
}
