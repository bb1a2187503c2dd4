//! The zone: the buddy behind a mutex, the budget, and growth if the buddy has no block.
//!
//! # Design
//!
//! An allocation that finds no block grows the arena. If that fails, the allocation waits a bounded
//! time for *travelling* pages. A thread cut these off a CPU's list, or is releasing or populating
//! them. The zone counts them apart. An allocation that needs fresh memory may also wait for huge
//! pages that other threads populate (`populate.rs`). The zone neither reclaims nor drains lists.
//!
//! # Locking
//!
//! One mutex protects the buddy and the counters. No system call is made under it. Before a thread
//! unlocks it, the thread stores the counters for other processes.

use crate::arena::{Arena, Grown};
use crate::block_batch::Chain;
use crate::buddy::Buddy;
use crate::live::{ZoneCell, ZoneCounts, ZoneTotals};
use crate::populate::Population;
use crate::shape::EarlyTables;
use crate::units::{Block, Exhausted, LISTED_ORDERS, UNLIMITED};
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};
use neap_base::live::Cells;
use neap_base::mutex::Guard;
use neap_base::{Mutex, Order, Platform};

/// Number of waits for travelling pages before an allocation fails: one or two tenths of a second.
const POLLS_MAX: u32 = 2000;

/// The most pages that a node draws from the reserve beyond what it needs.
const AHEAD_PAGES_MAX: i64 = 256;

/// Waits between two attempts of a bounded wait for another thread's system call.
pub(crate) fn wait<P: Platform>(platform: &P, poll: u32) {
    /// Number of attempts that only yield; later ones sleep.
    const PAUSES_MAX: u32 = 32;
    const SLEEP_NS: u64 = 50_000;
    if poll < PAUSES_MAX { platform.pause() } else { platform.sleep(SLEEP_NS) }
}

/// Number of intervals during which free pages stay in whole huge pages: a second by default. A
/// program that needs them again once a second keeps its huge pages.
pub const INTERVALS: usize = 4;

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) buddy: Buddy,
    /// Pages detached for release or population, in progress or waiting for it.
    pub(crate) releasing: u32,
    /// Pages that are handed out without memory. Negative for a moment if one thread has charged
    /// holes that another thread frees.
    pub(crate) holes: i32,
    /// The least number of free backed pages in each of the intervals before this one.
    lows: [u32; INTERVALS - 1],
    pub(crate) locks: u64,
    pub(crate) population: Population,
    /// Pages that may be used here; [`UNLIMITED`] without a budget.
    pub(crate) budget: u32,
    /// The cells for the counters of all nodes, which other processes read.
    pub(crate) live: Cells<ZoneCell>,
    node: usize,
}

impl Inner {
    /// Pages that are handed out or in CPUs' lists, without holes.
    pub(crate) fn used(&self) -> u32 {
        (self.buddy.managed - self.buddy.free - self.releasing).wrapping_sub(self.holes as u32)
    }

    /// Resident pages, used and free. Includes those that threads are releasing or populating.
    pub(crate) fn resident(&self) -> u32 {
        self.used().wrapping_add(self.buddy.backed_free).wrapping_add(self.moving())
    }

    /// Pages with memory that threads are releasing, and pages that threads are populating.
    pub(crate) fn moving(&self) -> u32 {
        self.buddy.backed_detached + self.population.busy
    }

    /// Returns the number of backed pages that were free during the last [`INTERVALS`] intervals,
    /// and moves on to the next interval.
    pub(crate) fn end_interval(&mut self) -> u32 {
        let low = self.buddy.backed_low;
        self.lows.rotate_right(1);
        core::mem::replace(&mut self.lows[0], low).min(self.lows.iter().copied().fold(low, u32::min))
    }

    /// Resident pages beyond the node's part of the budget.
    pub(crate) fn beyond_budget(&self) -> u32 {
        self.resident().saturating_sub(self.budget)
    }

    /// Pages that may still come from the system.
    pub(crate) fn resident_room(&self) -> u32 {
        self.budget.saturating_sub(self.resident())
    }

    /// Pages that may still be handed out.
    pub(crate) fn room(&self) -> u32 {
        self.budget.saturating_sub(self.used())
    }

    /// Whether `pages` more may be handed out. If this node's part of the budget is too small,
    /// draws pages from the reserve.
    pub(crate) fn fits(&mut self, pages: u32, arena: &Arena) -> bool {
        // The tables grew, or the budget was cut below the use. This node gives up what the reserve
        // lacks. No page is handed out until the reserve lacks nothing.
        let lacking = arena.lacking();
        if lacking > 0 {
            self.give_up_room(&arena.reserve, lacking);
        }
        let missing = pages.saturating_sub(self.room());
        if missing == 0 {
            return true;
        }
        // Draws more than is missing, so that not every page draws from the reserve. Draws little
        // more, so that the reserve has pages for nodes that need many. Relaxed: a count that
        // publishes no other data.
        let missing = i64::from(missing);
        let drawn = |left: i64| missing + ((left - missing) / 4).min(AHEAD_PAGES_MAX);
        let before = arena.reserve.try_update(Relaxed, Relaxed, |left| (left >= missing).then(|| left - drawn(left)));
        // The sum is at most the whole budget, which is less than `UNLIMITED`.
        self.budget += before.map_or(0, |left| drawn(left) as u32);
        before.is_ok()
    }

    /// Stores the counters for other processes.
    #[inline(never)]
    fn store_live(&self) {
        debug_assert!(self.buddy.backed_free <= self.buddy.free, "a page with memory is free or not");
        debug_assert!(self.buddy.free + self.releasing <= self.buddy.managed, "free pages are mapped");
        if let Some(cell) = self.live.get(self.node) {
            let Buddy { free, managed, backed_free, .. } = self.buddy;
            let holes = self.holes.max(0) as u32;
            let (releasing, populated) = (self.releasing, self.population.pages);
            cell.store(ZoneCounts { free, releasing, managed, backed_free, holes, populated });
        }
    }

    /// Gives up at most `most` pages of the unused part of the budget.
    pub(crate) fn give_up_room(&mut self, reserve: &AtomicI64, most: u32) {
        // A node without a budget has nothing to give up. The caller may have seen a budget that
        // another thread is setting or removing.
        let room = if self.budget == UNLIMITED { 0 } else { self.room().min(most) };
        self.budget -= room;
        reserve.fetch_add(room.into(), Relaxed);
    }
}

/// The needs of an allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// Pages that the budget must have room for.
    pub(crate) pages: u32,
    /// Number of free pages at the end of the arena with which the allocation always succeeds.
    pub(crate) growth: u32,
    /// Set for a block that will be touched at once.
    pub(crate) populate: Option<Touched>,
}

/// A block that will be touched at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Touched {
    pub(crate) order: Order,
    /// Whether the caller has filled many such blocks.
    pub(crate) one_more: bool,
    pub(crate) early: EarlyTables,
}

impl Touched {
    /// A block of this order, or a batch of such blocks for a list. The program probably writes to
    /// the early tables of blocks of listed orders.
    pub(crate) fn block(order: Order) -> Touched {
        let is_listed = order.index() < LISTED_ORDERS;
        let early = if is_listed { EarlyTables::Written } else { EarlyTables::Untouched };
        Touched { order, one_more: false, early }
    }
}

impl Wanted {
    /// One block.
    pub(crate) fn block(order: Order) -> Wanted {
        Wanted { pages: order.pages(), growth: order.pages(), populate: Some(Touched::block(order)) }
    }

    /// One more block for a caller that has filled many such blocks.
    pub(crate) fn one_more_block(order: Order, early: EarlyTables) -> Wanted {
        Wanted { populate: Some(Touched { order, one_more: true, early }), ..Wanted::block(order) }
    }
}

/// Adds to a count that only holders of a zone's lock change.
pub(crate) fn add(count: &AtomicU64, more: u64) {
    count.store(count.load(Relaxed).wrapping_add(more), Relaxed);
}

#[derive(Debug)]
pub(crate) struct Zone {
    inner: Mutex<Inner>,
    /// Number of steps of population that are over, wrapping. Written under the lock.
    pub(crate) steps: AtomicU32,
    pub(crate) node: usize,
    /// Pages on their way from a CPU's list into the buddy.
    draining: AtomicU32,
    /// Resident pages beyond the budget when pages were last taken.
    beyond: AtomicU32,
    /// Counts since the start; written under the lock.
    totals: ZoneTotals,
    /// The most pages that were resident so far; written under the lock.
    peak: AtomicU32,
    /// Number of times that the lock was found held.
    waits: AtomicU32,
    #[cfg(feature = "lab")]
    pub(crate) meter: crate::meter::Meter,
}

impl Zone {
    /// Creates a node's zone over `buddy`. At most `budget` pages are in use at once; [`UNLIMITED`]
    /// means no budget. Without tuning, all lists together keep `listed` pages. With `huge`,
    /// threads populate blocks as huge pages.
    pub(crate) fn new(buddy: Buddy, node: usize, budget: u32, listed: u32, huge: bool) -> Zone {
        let population = Population::new(huge, listed);
        Zone {
            inner: Mutex::new(Inner {
                buddy,
                releasing: 0,
                holes: 0,
                lows: [0; INTERVALS - 1],
                locks: 0,
                population,
                budget,
                live: Cells::new(),
                node,
            }),
            steps: AtomicU32::new(0),
            node,
            draining: AtomicU32::new(0),
            beyond: AtomicU32::new(0),
            totals: ZoneTotals::default(),
            peak: AtomicU32::new(0),
            waits: AtomicU32::new(0),
            #[cfg(feature = "lab")]
            meter: crate::meter::Meter::default(),
        }
    }

    #[inline]
    pub(crate) fn lock(&self) -> ZoneGuard<'_> {
        let mut inner = ZoneGuard(self.inner.try_lock().unwrap_or_else(|| self.lock_held()));
        inner.locks += 1;
        #[cfg(feature = "lab")]
        match self.meter.enter(inner.buddy.free) {
            0 => {}
            busy => _ = self.waits.fetch_add(busy, Relaxed),
        }
        inner
    }

    /// Stores the counters for other processes. Stores nothing if the lock is held, since its
    /// holder stores them when it unlocks.
    ///
    /// # Safety
    /// No other thread uses the zone.
    pub(crate) unsafe fn store_live(&self) {
        // SAFETY: no other thread takes the mutex (the caller's promise), and this thread does not
        // take it while it stores the counters.
        let Some(inner) = (unsafe { self.inner.peek() }) else { return };
        inner.store_live();
        self.change_totals(inner, |_| ());
    }

    #[cold]
    fn lock_held(&self) -> Guard<'_, Inner> {
        self.waits.fetch_add(1, Relaxed);
        self.inner.lock()
    }

    /// Free pages. This hold of the lock is not counted.
    #[cfg(feature = "lab")]
    pub(crate) fn peek_free(&self) -> u32 {
        self.inner.lock().buddy.free
    }

    /// Pages that may still be handed out. This hold of the lock is not counted.
    #[cfg(feature = "lab")]
    pub(crate) fn peek_room(&self) -> u32 {
        self.inner.lock().room()
    }

    /// Number of times that the lock was found held, wrapping. If it changes while a thread uses
    /// the zone, another thread waited for the lock.
    pub(crate) fn waits(&self) -> u32 {
        self.waits.load(Relaxed)
    }

    /// Lets `take` take pages out of the buddy. `take` gets the budget's room in pages. It is
    /// called again after the arena has grown, memory was populated, or travelling pages have
    /// arrived.
    ///
    /// # Errors
    /// [`Exhausted`]: the budget has no room, or there are no more pages.
    pub(crate) fn acquire<P: Platform, T>(
        &self,
        arena: &Arena,
        platform: &P,
        Wanted { pages, growth, populate }: Wanted,
        mut take: impl FnMut(&mut Buddy, u32) -> Option<T>,
    ) -> Result<T, Exhausted> {
        let mut polls = 0;
        loop {
            let mut inner = self.lock();
            let fits = inner.fits(pages, arena);
            if fits && let Some(step) = populate.and_then(|block| inner.step_to_populate(block, &self.steps)) {
                drop(inner);
                self.populate(arena, platform, step);
                continue;
            }
            let (room, before) = (inner.room(), inner.resident());
            if fits && let Some(taken) = take(&mut inner.buddy, room) {
                self.count_growth(&inner, inner.resident().wrapping_sub(before).into());
                self.note_beyond(&inner);
                return Ok(taken);
            }
            self.note_beyond(&inner);
            // `seen` and `coming` are read under the attempt's hold of the lock. So later growth,
            // and pages that arrive later, are noticed and lead to another attempt.
            let seen = inner.buddy.frames.pages();
            // Pages under release already count as free for the budget.
            let coming = self.draining() > 0 || fits && inner.releasing > 0;
            let missing = if fits { growth.saturating_sub(inner.buddy.free_tail()).max(1) } else { 0 };
            drop(inner);
            if fits && arena.grow(platform, self.node, missing, seen, |grown| self.add(grown)).is_ok() {
                continue;
            }
            if fits && self.end_population(arena, platform) {
                continue;
            }
            if !coming || polls == POLLS_MAX {
                return Err(Exhausted);
            }
            wait(platform, polls);
            polls += 1;
        }
    }

    /// Stores the number of resident pages beyond the budget. The caller holds the lock.
    pub(crate) fn note_beyond(&self, inner: &Inner) {
        self.beyond.store(inner.beyond_budget(), Relaxed);
    }

    /// Resident pages beyond the budget when pages were last taken or released.
    pub(crate) fn beyond(&self) -> u32 {
        // Relaxed: it publishes no other data. A thread that takes pages stores the number under
        // the lock, so it reads its own or a later one.
        self.beyond.load(Relaxed)
    }

    /// Lets `take` take `pages` pages out of the buddy if the budget has room for them. Never
    /// waits, grows or populates.
    pub(crate) fn take_resident(
        &self,
        arena: &Arena,
        pages: u32,
        take: impl FnOnce(&mut Buddy) -> Option<Block>,
    ) -> Option<Block> {
        let mut inner = self.lock();
        if !inner.fits(pages, arena) {
            return None;
        }
        let before = inner.resident();
        let block = take(&mut inner.buddy)?;
        self.count_growth(&inner, inner.resident().wrapping_sub(before).into());
        // If a part of the block has no memory, that part takes memory from the system.
        self.note_beyond(&inner);
        Some(block)
    }

    pub(crate) fn add(&self, Grown { first, pages, table_bytes }: Grown) {
        let mut inner = self.lock();
        // SAFETY: the arena maps its tables before it passes new pages on, and keeps them until it
        // is closed. Only this node's buddy uses its maps of chunks, and the words of the map of
        // backed pages for these pages. All code accesses frames by the rules of `frames`.
        unsafe { inner.buddy.add(first, pages) };
        self.change_totals(&inner, |totals| totals.table_bytes.store(table_bytes as u64, Relaxed));
    }

    /// Puts a whole chain back, at most `blocks` blocks under one hold of the lock. Pauses between
    /// two holds if other threads wait. Otherwise this thread could take the lock again before they
    /// see it free.
    pub(crate) fn give_chain(&self, mut chain: Chain, order: Order, blocks: u32) {
        /// Spins, some tenths of a microsecond, until a waiting CPU has seen that the lock is free.
        const SPINS: u32 = 20;
        let waits = self.waits();
        while chain.blocks > 0 {
            self.lock().buddy.give_chain(&mut chain, order, blocks);
            if chain.blocks > 0 && self.waits() != waits {
                (0..SPINS).for_each(|_| core::hint::spin_loop());
            }
        }
    }

    /// Counts since the start. Pages taken from the system never decrease.
    pub(crate) fn totals(&self) -> &ZoneTotals {
        &self.totals
    }

    /// Has `change` change counts since the start, and stores them for other processes. `inner`
    /// stands for the lock, which the caller holds, so no change is lost.
    pub(crate) fn change_totals(&self, inner: &Inner, change: impl FnOnce(&ZoneTotals)) {
        change(&self.totals);
        inner.live.get(self.node).inspect(|cell| cell.store_totals(&self.totals));
    }

    /// Counts pages taken from the system. `inner` is that of the lock, which the caller holds.
    pub(crate) fn count_growth(&self, inner: &Inner, pages: u64) {
        if pages > 0 {
            self.change_totals(inner, |totals| add(&totals.grown, pages));
            // Relaxed: a heuristic reads it.
            self.peak.store(self.peak.load(Relaxed).max(inner.resident()), Relaxed);
        }
    }

    /// The most pages that were resident so far.
    pub(crate) fn peak(&self) -> u32 {
        self.peak.load(Relaxed)
    }

    /// Pages on their way from a CPU's list into the buddy.
    pub(crate) fn draining(&self) -> u32 {
        self.draining.load(Relaxed)
    }

    /// Records that pages leave a list. The caller holds the list's lock.
    pub(crate) fn depart(&self, pages: u32) {
        self.draining.fetch_add(pages, Relaxed);
    }

    /// Records that travelling pages have arrived. The caller has put them into the buddy under the
    /// zone's mutex before. So a reader under the lock that does not see them travel any more sees
    /// them in the buddy.
    pub(crate) fn arrive(&self, pages: u32) {
        self.draining.fetch_sub(pages, Relaxed);
    }
}

/// Access to a zone's buddy and counters. When dropped, it stores the counters and unlocks.
#[derive(Debug)]
pub(crate) struct ZoneGuard<'a>(Guard<'a, Inner>);

impl Deref for ZoneGuard<'_> {
    type Target = Inner;

    #[inline]
    fn deref(&self) -> &Inner {
        &self.0
    }
}

impl DerefMut for ZoneGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Inner {
        &mut self.0
    }
}

impl Drop for ZoneGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        // The inner guard is dropped afterwards, which unlocks.
        self.0.store_live();
    }
}
