//! The pages of one node.
//!
//! # Design
//!
//! Calls for blocks of order 0 to 3 use the list of the CPU. If another thread holds the list, they
//! use the zone, as calls for larger blocks do. A refill holds no list while it takes a batch from
//! the zone. Afterwards it reads its CPU again. `init.rs` opens and closes the pages,
//! `trim.rs` releases them.
//!
//! # Locking
//!
//! This module has no lock. During a system call, a thread holds no lock but the arena's growth
//! mutex or the release turn.

use crate::arena::{MappedBytes, Shared};
use crate::block_batch::{Chain, TOUCHED};
use crate::buddy::{Buddy, Memory, take_out};
use crate::frames::{Frames, State};
use crate::huge_runs::COPIED_PAGES_MAX;
use crate::init::Own;
use crate::page_lists::{Missing, PageLists};
use crate::policy::{Adaptive, Policy};
use crate::purge::Release;
use crate::run_cache::{CachedRun, LONGEST, Runs};
use crate::shape::{EarlyTables, MARKED};
use crate::statistics::{Needs, Statistics};
use crate::tables::OWN_TABLES;
use crate::units::{Block, CHUNK, CHUNK_ORDER, Exhausted, HUGE, LISTED_ORDERS};
use crate::zone::{Touched, Wanted, Zone};
use core::cell::Cell;
use core::marker::PhantomData;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use neap_base::{Finding, Order, Pfn, Platform};

/// All pages of a node. `T` is the policy of the CPUs' lists. Only the feature `lab` uses another
/// one.
#[derive(Debug)]
pub struct Pages<P: Platform, T = Adaptive> {
    pub(crate) arena: Shared,
    pub(crate) node: usize,
    pub(crate) zone: Zone,
    pub(crate) lists: PageLists<T>,
    pub(crate) release: Release,
    /// Number of blocks and runs that threads requested here and that another node supplied.
    pub(crate) misses: AtomicU64,
    pub(crate) needs: Needs,
    pub(crate) own: Own,
    pub(crate) platform: PhantomData<fn(&P)>,
}

impl<P: Platform, T: Policy> Pages<P, T> {
    /// The first address of the arena.
    #[inline]
    pub fn base(&self) -> usize {
        self.arena.base()
    }

    /// Bytes from the base to the end of the arena so far. There may be holes in between. No page
    /// of the arena lies above, and all tables are mapped for every page of the arena.
    #[inline]
    pub fn limit(&self) -> usize {
        self.arena.limit()
    }

    /// The page size as a power of two.
    #[inline]
    pub fn page_shift(&self) -> u32 {
        self.arena.page_shift()
    }

    /// Bytes in a page.
    #[inline]
    pub fn page_size(&self) -> usize {
        1 << self.page_shift()
    }

    /// The address of a page.
    #[inline]
    pub fn address(&self, pfn: Pfn) -> usize {
        self.arena.address(pfn)
    }

    /// The page of an address between base and limit.
    #[inline]
    pub fn pfn(&self, address: usize) -> Pfn {
        Pfn(((address - self.base()) >> self.page_shift()) as u32)
    }

    /// The first byte of the caller's side table `table`.
    #[inline]
    pub fn side_table(&self, table: usize) -> usize {
        self.arena.table(OWN_TABLES + table).place(0, 0).start
    }

    /// The frame table.
    #[inline]
    pub fn frames(&self) -> &Frames {
        self.arena.frames()
    }

    /// Records that the caller wrote to side table `table` for the chunk of `pfn`. That page must
    /// be handed out.
    #[inline]
    pub fn mark_side_table(&self, pfn: Pfn, table: usize) {
        let (marks, bit) = (self.arena.marks(pfn), 1 << table);
        if table < MARKED && marks.load(Relaxed) & bit == 0 {
            self.arena.mark_table(pfn, table);
        }
    }

    /// Allocates a block of 2^order pages, order 0 to 10.
    ///
    /// # Errors
    /// [`Exhausted`] if the budget has no room, or the zone gets no more pages.
    #[inline]
    pub fn allocate_block(&self, platform: &P, order: Order) -> Result<Block, Exhausted> {
        self.take_block(platform, Wanted::block(order), order)
    }

    /// Allocates a block for a caller that has filled many such blocks, and probably fills this one
    /// too.
    ///
    /// # Errors
    /// [`Exhausted`] if the budget has no room, or the zone gets no more pages.
    #[inline]
    pub fn allocate_one_more_block(&self, platform: &P, order: Order, early: EarlyTables) -> Result<Block, Exhausted> {
        self.take_block(platform, Wanted::one_more_block(order, early), order)
    }

    #[inline]
    fn take_block(&self, platform: &P, wanted: Wanted, order: Order) -> Result<Block, Exhausted> {
        if order.index() < LISTED_ORDERS && self.lists.is_on() {
            match self.lists.pop(self.frames(), platform.cpu(), order) {
                Ok(block) => return Ok(block),
                Err(Missing::Blocks(blocks)) => return self.refill(platform, wanted, order, blocks),
                Err(Missing::Busy) => {}
            }
        }
        assert!(order <= CHUNK_ORDER, "a block has at most {} pages", CHUNK);
        self.acquire(platform, wanted, |buddy, _| buddy.allocate_block(order))
    }

    /// Calls [`Zone::acquire`] with `take`. If more pages are then resident than the budget allows,
    /// releases about as many free pages.
    fn acquire<R>(
        &self,
        platform: &P,
        wanted: Wanted,
        take: impl FnMut(&mut Buddy, u32) -> Option<R>,
    ) -> Result<R, Exhausted> {
        let taken = self.zone.acquire(&self.arena, platform, wanted, take);
        // A failure, too, may leave free pages beyond the budget: tables have grown since then.
        self.shed(platform);
        taken
    }

    /// Allocates a block of 2^order pages from the CPU's list. If that has none, allocates a block
    /// of the zone whose pages all have memory. `None` if the zone has no such block.
    pub fn allocate_resident_block(&self, platform: &P, order: Order) -> Option<Block> {
        if order.index() < LISTED_ORDERS
            && self.lists.is_on()
            && let Ok(block) = self.lists.pop(self.frames(), platform.cpu(), order)
        {
            return Some(block);
        }
        self.take_resident(platform, order.pages(), |buddy| buddy.allocate_backed_block(order))
    }

    /// Allocates a run as [`Pages::allocate_run`] does, but only in a wholly backed block or in
    /// adjacent blocks with memory. `None` if there is neither.
    pub fn allocate_resident_run(&self, platform: &P, pages: u32, align_pages: u32) -> Option<Block> {
        self.take_resident(platform, pages, |buddy| buddy.allocate_backed_run(pages, align_pages))
    }

    /// Allocates a run as [`Pages::allocate_run`] does, but only one that this CPU caches.
    #[inline]
    pub fn allocate_cached_run(&self, platform: &P, pages: u32, align_pages: u32) -> Option<Block> {
        // Page numbers count from the base. Stricter alignments than a chunk depend on the address
        // of the base.
        let may_be_cached = pages <= LONGEST && align_pages <= CHUNK && self.lists.is_on();
        may_be_cached.then(|| self.lists.take_run(self.frames(), platform.cpu(), pages, align_pages))?
    }

    /// Calls [`Zone::take_resident`] with `take`. Then releases pages as [`Pages::acquire`] does.
    fn take_resident(&self, platform: &P, pages: u32, take: impl FnOnce(&mut Buddy) -> Option<Block>) -> Option<Block> {
        let taken = self.zone.take_resident(&self.arena, pages, take)?;
        self.shed(platform);
        Some(taken)
    }

    #[cold]
    pub(crate) fn refill(&self, platform: &P, wanted: Wanted, order: Order, blocks: u32) -> Result<Block, Exhausted> {
        let (waits, mut room) = (self.zone.waits(), u32::MAX);
        let mut chain = self.acquire(platform, wanted, |buddy, most| {
            let chain = buddy.take_chain(order, blocks.min(most >> order.0));
            room = most - (chain.blocks << order.0);
            Some(chain).filter(|chain| chain.blocks > 0)
        })?;
        let contended = self.zone.waits() != waits;
        let (pfn, frame) = (chain.head, self.frames().frame(chain.head));
        chain.head = frame.next();
        chain.blocks -= 1;
        let block = Block { pfn, zero: frame.spare() == 0 };
        frame.set_state(State::Allocated);
        // The thread may have migrated, and the list may have no room any more.
        if chain.blocks > 0
            && let Err(chain) = self.lists.fill(self.frames(), platform.cpu(), chain, order, contended)
        {
            self.zone.give_chain(chain, order, self.lists.limits.now().fixed.blocks(order.0));
        }
        self.look_at(room);
        Ok(block)
    }

    /// Frees a block. Ends the process if the block is not handed out, or is not of this order.
    #[inline]
    pub fn free_block(&self, platform: &P, pfn: Pfn, order: Order) {
        take_out(self.frames(), pfn, order);
        if order.index() < LISTED_ORDERS && self.lists.is_on() {
            match self.lists.push(self.frames(), &self.zone, platform.cpu(), pfn, order) {
                Ok(None) => return,
                Ok(Some((chain, order))) => return self.spill(platform, chain, order),
                Err(_) => {}
            }
        }
        self.zone.lock().buddy.give(pfn, order, Memory::All);
    }

    /// Gives a batch to the zone under one hold of the zone's mutex. The policy bounds the batch.
    #[cold]
    pub(crate) fn spill(&self, platform: &P, chain: Chain, order: Order) {
        let waits = self.zone.waits();
        self.zone.give_chain(chain, order, chain.blocks);
        self.zone.arrive(chain.blocks << order.0);
        if self.zone.waits() != waits {
            self.lists.contended(platform.cpu());
        }
    }

    /// Allocates a run of exactly `pages` pages. Its address is a multiple of `align_pages` pages.
    /// `align_pages` must be a power of two.
    ///
    /// # Errors
    /// [`Exhausted`] if the budget has no room, or the zone gets no more pages.
    pub fn allocate_run(&self, platform: &P, pages: u32, align_pages: u32) -> Result<Block, Exhausted> {
        debug_assert!(pages > 0 && align_pages.is_power_of_two());
        if let Some(run) = self.allocate_cached_run(platform, pages, align_pages) {
            return Ok(run);
        }
        // New pages begin at a multiple of a chunk. A stricter alignment may need `align_pages`
        // more of them.
        let growth = if align_pages > CHUNK { pages.saturating_add(align_pages) } else { pages };
        // The zone populates no large orders: the program may never touch all of a long run.
        let populate = Some(Touched::block(Order::holding(pages.max(align_pages))));
        let wanted = Wanted { pages, growth, populate };
        let (mut is_huge, mut room) = (false, u32::MAX);
        let run = self.acquire(platform, wanted, |buddy, most| {
            room = most.saturating_sub(pages);
            let resident = |buddy: &Buddy| buddy.managed - buddy.free + buddy.backed_free;
            let run = if self.arena.is_worth_huge(pages, resident(buddy).saturating_add(pages)) {
                // Memory that is there comes first. Fresh memory begins at a huge page.
                let backed = buddy.allocate_backed_run(pages, align_pages);
                backed.or_else(|| buddy.allocate_run(pages, align_pages.max(HUGE.pages())))
            } else {
                None
            };
            let run = run.or_else(|| buddy.allocate_run(pages, align_pages))?;
            // Pages that have memory already do not become huge pages.
            is_huge = self.arena.is_worth_huge(pages, resident(buddy)) && buddy.count_backed(run.pfn, pages) < pages;
            Some(run)
        })?;
        if is_huge {
            self.arena.allow_huge(platform, run.pfn, 0, pages);
        }
        self.look_at(room);
        Ok(run)
    }

    /// Finds the first adjacent pages of `part` of the run at `head` that may hold data. Returns
    /// `None` if every byte is zero. The result is right only if the run was not written to since
    /// its allocation. The map of backed pages keeps the state of a run's pages at the moment when
    /// the zone handed the run out. All pages of a run from a CPU's cache count as holding data.
    pub fn backed_part(&self, head: Pfn, part: Range<u32>) -> Option<Range<u32>> {
        if self.frames().frame(head).spare() == TOUCHED {
            return Some(part).filter(|part| !part.is_empty());
        }
        /// Pages examined under one hold of the zone's mutex.
        const EXAMINED_PAGES_MAX: u32 = 1 << 18;
        let mut start = part.start;
        while start < part.end {
            let pages = (part.end - start).min(EXAMINED_PAGES_MAX);
            let found = self.zone.lock().buddy.backed.next_part(Pfn(start), pages);
            if found.is_some() {
                return found;
            }
            start += pages;
        }
        None
    }

    /// Frees a run. Ends the process if the run is not handed out, or is not of this length.
    pub fn free_run(&self, platform: &P, pfn: Pfn, pages: u32) {
        let may_cache = pages <= LONGEST && self.lists.is_on() && self.lists.may_keep(pages);
        if may_cache && self.cache_run(platform, pfn, pages) {
            return;
        }
        self.forbid_huge(platform, pfn, pages, 0);
        self.zone.lock().buddy.free_run(pfn, pages, Memory::All);
    }

    /// Puts a freed run into the CPU's cache. Returns `false` if another thread holds the cache, or
    /// if there is no such run.
    fn cache_run(&self, platform: &P, pfn: Pfn, pages: u32) -> bool {
        let frame = self.frames().frame(pfn);
        if frame.owner() != pages || !frame.cache_run() {
            return false;
        }
        match self.lists.put_run(&self.zone, platform.cpu(), CachedRun { pfn, pages }) {
            Ok(out) if out.pages() > 0 => {
                self.free_cached(&out);
                self.zone.arrive(out.pages());
            }
            Ok(_) => {}
            Err(_) => {
                frame.set_state(State::Run);
                return false;
            }
        }
        true
    }

    /// Gives runs from a CPU's cache to the zone.
    #[cold]
    pub(crate) fn free_cached(&self, runs: &Runs) {
        for CachedRun { pfn, pages } in runs.iter() {
            self.frames().frame(pfn).set_state(State::Run);
            self.zone.lock().buddy.free_run(pfn, pages, Memory::All);
        }
    }

    /// Allows huge pages in a run, if
    /// [`Arena::is_worth_huge`](crate::arena::Arena::is_worth_huge) agrees.
    pub(crate) fn allow_huge(&self, platform: &P, pfn: Pfn, pages: u32) {
        let resident = self.zone.lock().resident();
        if self.arena.is_worth_huge(pages, resident) {
            self.arena.allow_huge(platform, pfn, 0, pages);
        }
    }

    /// See [`NodePages::expect_sparse`](crate::NodePages::expect_sparse).
    pub(crate) fn expect_sparse(&self, platform: &P, pfn: Pfn, pages: u32) {
        if self.arena.is_huge_run(pfn, pages) && self.arena.is_risky(pages, self.zone.lock().resident()) {
            self.forbid_huge(platform, pfn, pages, 0);
        }
    }

    /// See [`NodePages::is_better_copied`](crate::NodePages::is_better_copied).
    pub(crate) fn is_better_copied(&self, pfn: Pfn, old: u32, new: u32) -> bool {
        let gains = || {
            old <= COPIED_PAGES_MAX && !self.arena.is_huge_run(pfn, old) && {
                let resident = self.zone.lock().resident();
                self.arena.is_worth_huge(new, resident.saturating_add(new))
            }
        };
        self.arena.is_part_of_huge(pfn, old) || gains()
    }

    /// Forbids huge pages in the part that a run loses when it shrinks from `old` to `new` pages.
    pub(crate) fn forbid_huge(&self, platform: &P, pfn: Pfn, old: u32, new: u32) {
        if let Some(left) = self.arena.forbid_huge(platform, pfn, old, new) {
            self.zone.forbid_later(&left);
        }
    }

    /// Number of runs, of all nodes, in which huge pages are allowed.
    pub fn huge_runs(&self) -> u32 {
        self.arena.huge_runs.count()
    }

    /// Frees a run whose pages were moved elsewhere ([`Platform::move_pages`]), so that it has no
    /// memory.
    pub fn free_moved_run(&self, pfn: Pfn, pages: u32) {
        self.zone.lock().buddy.free_run(pfn, pages, Memory::None);
    }

    /// Makes a run longer or shorter in place. Returns `false` and changes nothing if the run
    /// cannot grow there. The contents of the gained pages are undefined.
    pub fn resize_run(&self, platform: &P, pfn: Pfn, old: u32, new: u32) -> bool {
        debug_assert!(new > 0);
        if new < old {
            self.forbid_huge(platform, pfn, old, new);
        }
        loop {
            let mut inner = self.zone.lock();
            if !inner.fits(new.saturating_sub(old), &self.arena) || !self.is_own(pfn, old, new) {
                return false;
            }
            let before = inner.resident();
            if inner.buddy.resize_run(pfn, old, new) {
                let resident = inner.resident();
                if new > old {
                    self.zone.count_growth(&inner, resident.wrapping_sub(before).into());
                    self.zone.note_beyond(&inner);
                }
                drop(inner);
                if new > old {
                    self.shed(platform);
                }
                if new > old && self.arena.is_worth_huge(new, resident) {
                    self.arena.allow_huge(platform, pfn, old, new);
                }
                return true;
            }
            // A run at the end of the arena grows with the arena.
            let seen = inner.buddy.frames.pages();
            let free = seen - (pfn.0 + old);
            if !inner.buddy.is_free_to_end(pfn.plus(old)) || seen != self.frames().pages() {
                return false;
            }
            drop(inner);
            let missing = (new - old).saturating_sub(free);
            if self.arena.grow(platform, self.node, missing, seen, |grown| self.zone.add(grown)).is_err() {
                return false;
            }
        }
    }

    /// Whether all existing chunks after a run, up to its new end, belong to this node. A run must
    /// not grow into pages of another node, or into a hole of the arena, where there may be no
    /// frames. The caller holds the zone's mutex. A chunk's node never changes.
    fn is_own(&self, pfn: Pfn, old: u32, new: u32) -> bool {
        let end = pfn.0.saturating_add(new).min(self.frames().pages());
        let behind = (pfn.0 + old).next_multiple_of(CHUNK)..end;
        let own = |page| self.arena.node(Pfn(page)) == Some(self.node);
        behind.step_by(CHUNK as usize).all(own)
    }

    /// Releases this node's free pages, and gives its unused part of the budget to the reserve, for
    /// other nodes. The room of pages that are still resident stays: another node may take as much
    /// memory as the reserve has, at once. `polls` is the number of waits that are left.
    // Not inlined: the caller then takes a block, and must need little stack.
    #[inline(never)]
    pub(crate) fn give_up_room(&self, platform: &P, polls: &Cell<u32>) {
        if self.arena.budget().is_some() {
            self.release_free(platform, polls);
            let mut inner = self.zone.lock();
            let room = inner.resident_room();
            inner.give_up_room(&self.arena.reserve, room);
        }
    }

    /// This node's part of the budget, in pages; `None` without a budget.
    pub(crate) fn share(&self) -> Option<u32> {
        self.arena.budget().map(|_| self.zone.lock().budget)
    }

    /// Pages taken from the system so far. Pages that were released and taken again count again.
    pub fn grown(&self) -> u64 {
        self.zone.totals().grown.load(Relaxed)
    }

    /// Resident pages, used and free.
    pub fn resident(&self) -> u32 {
        self.zone.lock().resident()
    }

    /// Free pages of the zone. Handed-out, listed and travelling pages do not count.
    pub fn free_pages(&self) -> u32 {
        self.zone.lock().buddy.free
    }

    /// Free pages of the zone that are resident or possibly resident.
    pub fn backed_free_pages(&self) -> u32 {
        self.zone.lock().buddy.backed_free
    }

    /// Pages in all lists, without lists that another thread holds.
    pub fn listed(&self) -> u32 {
        self.lists.used().iter().filter_map(|cpu| self.lists.count(cpu)).sum()
    }

    /// Pages that are handed out or in lists, without holes.
    pub fn used(&self) -> u32 {
        self.zone.lock().used()
    }

    /// Pages in a CPU's list; `None` while another thread holds it.
    pub fn listed_on(&self, cpu: usize) -> Option<u32> {
        self.lists.count(cpu)
    }

    /// The most pages that a CPU's list keeps at the moment; `None` while another thread holds it.
    pub fn list_high_on(&self, cpu: usize) -> Option<u32> {
        self.lists.sizes(cpu).map(|sizes| sizes.high)
    }

    /// The statistics. Each number is exact for some moment. The numbers fit together only while no
    /// thread runs.
    pub fn statistics(&self) -> Statistics {
        let listed = self.listed();
        let (used, totals) = (self.lists.used(), self.zone.totals());
        let (first, unused) = (self.lists.first_sizes(), (self.lists.cpus() - used.count()) as u32);
        // A list that was never used counts with the size of a new one.
        let start = if unused > 0 { (unused * first.high, first.high, first.batch) } else { (0, 0, 0) };
        let sizes = used.iter().filter_map(|cpu| self.lists.sizes(cpu));
        let (list_highs, list_high, list_batch) =
            sizes.fold(start, |(sum, high, batch), list| (sum + list.high, list.high.max(high), list.batch.max(batch)));
        let MappedBytes { memory: mapped_bytes, tables: table_bytes } = self.arena.mapped();
        let inner = self.zone.lock();
        Statistics {
            managed: inner.buddy.managed,
            free: inner.buddy.free,
            backed_free: inner.buddy.backed_free,
            backed_free_low: inner.buddy.backed_low,
            used: inner.used(),
            listed,
            releasing: inner.releasing,
            holes: inner.holes.max(0) as u32,
            travelling: inner.releasing + self.zone.draining(),
            budget: self.arena.budget(),
            watermarks: self.lists.limits.now().watermarks,
            released: totals.released.load(Relaxed),
            punched: totals.punched.load(Relaxed),
            refilled: totals.refilled.load(Relaxed),
            release_calls: totals.calls.load(Relaxed),
            release_failures: totals.failures.load(Relaxed),
            populated: inner.population.pages,
            zone_locks: inner.locks,
            list_busy: self.lists.busy.load(Relaxed),
            list_refills: self.lists.refills.load(Relaxed),
            list_spills: self.lists.spills.load(Relaxed),
            list_drains: self.lists.drains.load(Relaxed),
            zone_waits: self.zone.waits(),
            list_highs,
            list_high,
            list_batch,
            node_misses: self.misses.load(Relaxed),
            need_drains: self.needs.drains.load(Relaxed),
            need_pages: self.needs.pages.load(Relaxed),
            unbound_segments: self.arena.unbound.load(Relaxed),
            mapped_bytes,
            table_bytes,
            table_pages: self.arena.table_pages(),
        }
    }

    /// Proves that every page is in exactly one state and that all counts are right. No other
    /// thread may use the pages during the call.
    ///
    /// # Errors
    /// The first [`Finding`].
    pub fn verify(&self) -> Result<(), Finding> {
        let listed = self.lists.verify(self.frames())?;
        let inner = self.zone.lock();
        let sums = inner.buddy.verify(|pfn| self.arena.node(pfn) == Some(self.node))?;
        Finding::unless_equal("listed pages", Pfn::NONE, sums.listed.into(), listed.into())?;
        let used = i64::from(inner.used()) + i64::from(inner.holes);
        Finding::unless_equal("used pages", Pfn::NONE, (sums.used + sums.listed).into(), used as u64)?;
        Finding::unless_equal("releasing pages", Pfn::NONE, sums.releasing.into(), inner.releasing.into())?;
        Finding::unless_equal("pages under way while no thread runs", Pfn::NONE, 0, self.zone.draining().into())
    }
}
