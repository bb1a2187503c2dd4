//! The pages of one node, and the few decisions that tie the parts of the page layer together.
//!
//! Sits between [`NodePages`](crate::NodePages), which chooses the node, and arena, zone and lists. Blocks of order 0 to 3
//! go through the list of the CPU; if that is busy, and for everything larger, through the zone. A refill takes a batch
//! from the zone with no list held, then looks again on which CPU it is. Takes no lock of its own; makes system calls with
//! none held but the arena's growth mutex. How all this comes and goes is in `open.rs`, the way back in `give_back.rs`.

use crate::arena::{self, Shared};
use crate::buddy::{Buddy, CHUNK_ORDER, take_out};
use crate::chains::{Chain, TOUCHED};
use crate::frames::{Frames, State};
use crate::open::Own;
use crate::page_lists::{LISTED_ORDERS, Missing, PageLists};
use crate::policy::{Adaptive, Policy};
use crate::release::Release;
use crate::run_cache::{LONGEST, Run, Runs};
use crate::statistics::{Finding, Needs, Statistics};
use crate::tables::OWN_TABLES;
use crate::zone::{Touched, Wanted, Zone};
use core::marker::PhantomData;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use neap_base::{Order, Pfn, Platform};

/// Side tables that the layer above may name.
pub const TABLES: usize = 7;

/// Those in front, of whose memory is known where it may be: only they are ever [droppable](SideTable::droppable) or [early](SideTable::early).
pub const MARKED: usize = 6;

/// A table of one byte per 2^shift bytes of the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SideTable {
    /// 0: no such table.
    pub shift: u8,
    /// Bytes of a page in front of its first.
    pub lead: u8,
    /// Whether its memory goes back with a chunk's: all its bytes there are zero in meaning when the chunk is free.
    /// Only for shifts up to 10. With a lead, pages at both ends of what goes stay: they may have bytes of others.
    pub droppable: bool,
    /// Whether its memory comes with that of any block that is populated: it has a page or two for each, which are written to under locks.
    pub brief: bool,
    /// Whether its memory comes with that of a block that is populated for small blocks, or for one that it will be written to for.
    pub early: bool,
}

/// Pages that go back to the system at least when there is memory beyond the limit: those of a huge
/// page, which releases as a whole.
const LEAST_SHED: u32 = 512;

/// What an arena is to be like.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The most address space it may take, in bytes.
    pub span: usize,
    /// The most pages that may be in use.
    pub budget: Option<u32>,
    /// Side tables of the layer above.
    pub tables: [SideTable; TABLES],
    /// Whether fresh memory may be populated as huge pages, and runs may have them.
    pub huge: bool,
    /// The most pages that a CPU's list keeps, where that is not to be found out; 0 for no lists.
    pub list_high: Option<u32>,
}

/// A block or run that was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its first page.
    pub pfn: Pfn,
    /// Whether every byte of it is known to be zero.
    pub zero: bool,
}

/// Nothing can be had: the budget is used up, or the system or the address space refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted;

/// All pages of a node. Only the laboratory gives its lists another policy.
#[derive(Debug)]
pub struct Pages<P: Platform, T = Adaptive> {
    pub(crate) arena: Shared,
    pub(crate) node: usize,
    pub(crate) zone: Zone,
    pub(crate) lists: PageLists<T>,
    pub(crate) release: Release,
    /// Blocks and runs that were wanted here and came from another node.
    pub(crate) misses: AtomicU64,
    /// Pages of holes that were filled again.
    pub(crate) refilled: AtomicU64,
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

    /// Bytes from the base up to the end of the arena so far. Not all of it need be the arena's, but no page of the arena
    /// lies above, and for every page of it all tables are mapped.
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
        self.arena.table(OWN_TABLES + table).place(0, 0).0
    }

    /// The frame table.
    #[inline]
    pub fn frames(&self) -> &Frames {
        self.arena.frames()
    }

    /// Notes that side table `table` has been written to for the chunk of `pfn`, a page that is handed out.
    #[inline]
    pub fn mark_side_table(&self, pfn: Pfn, table: usize) {
        let (marks, bit) = (self.arena.marks(pfn), 1 << table);
        if table < MARKED && marks.load(Relaxed) & bit == 0 {
            self.arena.mark_table(pfn, table);
        }
    }

    /// A block of 2^order pages, order 0 to 10.
    ///
    /// # Errors
    /// [`Exhausted`].
    #[inline]
    pub fn allocate_block(&self, platform: &P, order: Order) -> Result<Block, Exhausted> {
        self.take_block(platform, Wanted::block(order), order)
    }

    /// The same where many such blocks have been filled, so that this one will be too; `early`: and [early tables](crate::SideTable::early) written to for it.
    ///
    /// # Errors
    /// [`Exhausted`].
    #[inline]
    pub fn allocate_one_more_block(&self, platform: &P, order: Order, early: bool) -> Result<Block, Exhausted> {
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
        assert!(order <= CHUNK_ORDER, "a block has at most {} pages", arena::CHUNK);
        self.acquire(platform, wanted, |buddy, _| buddy.allocate_block(order))
    }

    /// Lets `take` take pages out of the buddy, as [`Zone::acquire`] does. Where pages are limited,
    /// as many free pages go back to the system as there is memory beyond the limit now.
    fn acquire<R>(
        &self,
        platform: &P,
        wanted: Wanted,
        take: impl FnMut(&mut Buddy, u32) -> Option<R>,
    ) -> Result<R, Exhausted> {
        let taken = self.zone.acquire(&self.arena, platform, wanted, take)?;
        self.shed(platform);
        Ok(taken)
    }

    /// Gives as many free pages back to the system as there is memory beyond the limit.
    fn shed(&self, platform: &P) {
        let beyond = self.zone.beyond();
        if beyond > 0 {
            self.release(platform, beyond.max(LEAST_SHED), &|| false);
        }
    }

    /// A block of 2^order pages, some of which have memory already; `None` where that would have to
    /// come from the system.
    pub fn allocate_resident_block(&self, platform: &P, order: Order) -> Option<Block> {
        if order.index() < LISTED_ORDERS
            && self.lists.is_on()
            && let Ok(block) = self.lists.pop(self.frames(), platform.cpu(), order)
        {
            return Some(block);
        }
        self.zone.take_resident(&self.arena, order.pages(), |buddy| buddy.allocate_backed_block(order))
    }

    /// A run as of [`Pages::allocate_run`], some pages of which have memory already; `None` where that
    /// would have to come from the system.
    pub fn allocate_resident_run(&self, pages: u32, align_pages: u32) -> Option<Block> {
        self.zone.take_resident(&self.arena, pages, |buddy| buddy.allocate_backed_run(pages, align_pages))
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
        // Where the thread is by now, and whether there is still room, is looked at again.
        if chain.blocks > 0
            && let Err(chain) = self.lists.fill(self.frames(), platform.cpu(), chain, order, contended)
        {
            self.zone.give_chain(chain, order, self.lists.limits.fixed.blocks(order.0));
        }
        self.look_at(room);
        Ok(block)
    }

    /// Takes a block back. A block that is not handed out, or not of this order, ends the process.
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
        self.zone.lock().buddy.give(pfn, order, true);
    }

    /// Gives a batch to the zone under one hold of its lock: the policy bounds it.
    #[cold]
    pub(crate) fn spill(&self, platform: &P, chain: Chain, order: Order) {
        let waits = self.zone.waits();
        self.zone.give_chain(chain, order, chain.blocks);
        self.zone.arrive(chain.blocks << order.0);
        if self.zone.waits() != waits {
            self.lists.contended(platform.cpu());
        }
    }

    /// A run of exactly `pages` pages whose address is a multiple of `align_pages` pages, a power of two.
    ///
    /// # Errors
    /// [`Exhausted`].
    pub fn allocate_run(&self, platform: &P, pages: u32, align_pages: u32) -> Result<Block, Exhausted> {
        debug_assert!(pages > 0 && align_pages.is_power_of_two());
        // The base is a multiple of a chunk, and perhaps of no stricter alignment.
        if pages <= LONGEST
            && align_pages <= arena::CHUNK
            && self.lists.is_on()
            && let Some(run) = self.lists.take_run(self.frames(), platform.cpu(), pages, align_pages)
        {
            return Ok(run);
        }
        // New pages begin at a multiple of a chunk; a stricter alignment may need that much more of them.
        let growth = if align_pages > arena::CHUNK { pages.saturating_add(align_pages) } else { pages };
        // `populate` looks at the order: a long run may never be touched as a whole.
        let populate = Some(Touched::block(Order::holding(pages.max(align_pages))));
        let wanted = Wanted { pages, growth, populate };
        let mut is_huge = false;
        let run = self.acquire(platform, wanted, |buddy, _| {
            let run = buddy.allocate_run(pages, align_pages)?;
            let resident = buddy.managed - buddy.free + buddy.backed_free;
            // Memory that is there already will not come in huge pages.
            is_huge = self.arena.is_worth_huge(pages, resident) && buddy.count_backed(run.pfn, pages) < pages;
            Some(run)
        })?;
        if is_huge {
            self.arena.allow_huge(platform, run.pfn, 0, pages);
        }
        Ok(run)
    }

    /// The first pages in a row of `part` of the run at `head` that may hold data, if nothing has
    /// been written to the run since it was handed out. The map of backed pages is about free
    /// pages. Of the pages of a run it says what they were when the zone handed the run out, so a
    /// run from a CPU's cache counts as written to.
    pub fn backed_part(&self, head: Pfn, part: Range<u32>) -> Option<Range<u32>> {
        if self.frames().frame(head).spare() == TOUCHED {
            return Some(part).filter(|part| !part.is_empty());
        }
        /// Pages that are looked at under one hold of the zone's lock.
        const LOOK: u32 = 1 << 18;
        let mut start = part.start;
        while start < part.end {
            let pages = (part.end - start).min(LOOK);
            let found = self.zone.lock().buddy.backed.next_part(Pfn(start), pages);
            if found.is_some() {
                return found;
            }
            start += pages;
        }
        None
    }

    /// Takes a run back. A run that is not handed out, or not of this length, ends the process.
    pub fn free_run(&self, platform: &P, pfn: Pfn, pages: u32) {
        // Under a limit, what is free is for whichever allocation comes next.
        let may_cache = pages <= LONGEST && self.lists.is_on() && self.zone.budget.is_none();
        if may_cache && self.cache_run(platform, pfn, pages) {
            return;
        }
        self.forbid_huge(platform, pfn, pages, 0);
        self.zone.lock().buddy.free_run(pfn, pages, false);
    }

    /// Puts a run that is freed into the CPU's cache; `false`: another thread holds that, or there
    /// is no such run.
    fn cache_run(&self, platform: &P, pfn: Pfn, pages: u32) -> bool {
        let frame = self.frames().frame(pfn);
        if frame.owner() != pages || !frame.cache_run() {
            return false;
        }
        match self.lists.put_run(&self.zone, platform.cpu(), Run { pfn, pages }) {
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

    /// Gives runs to the zone that were in a CPU's cache.
    #[cold]
    pub(crate) fn free_cached(&self, runs: &Runs) {
        for Run { pfn, pages } in runs.iter() {
            self.frames().frame(pfn).set_state(State::Run);
            self.zone.lock().buddy.free_run(pfn, pages, false);
        }
    }

    /// Allows huge pages behind a run whose pages have been moved there, if it is worth them.
    pub(crate) fn allow_huge(&self, platform: &P, pfn: Pfn, pages: u32) {
        let resident = self.zone.lock().resident();
        if self.arena.is_worth_huge(pages, resident) {
            self.arena.allow_huge(platform, pfn, 0, pages);
        }
    }

    /// Forbids huge pages behind what a run of `old` pages loses when it becomes one of `new`
    /// pages.
    pub(crate) fn forbid_huge(&self, platform: &P, pfn: Pfn, old: u32, new: u32) {
        if let Some(left) = self.arena.forbid_huge(platform, pfn, old, new) {
            self.zone.forbid_later(&left);
        }
    }

    /// Runs, of all nodes, behind which huge pages are allowed.
    pub fn huge_runs(&self) -> u32 {
        self.arena.huge_runs.count()
    }

    /// Takes a run back whose pages have been moved elsewhere ([`Platform::move_pages`]): nothing is behind it any more.
    pub fn free_moved_run(&self, pfn: Pfn, pages: u32) {
        self.zone.lock().buddy.free_run(pfn, pages, true);
    }

    /// Makes a run longer or shorter where it is; `false`, and nothing changed, if it cannot grow there. What the pages
    /// that it gains hold is not known.
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
                    self.zone.count_growth(resident.wrapping_sub(before).into());
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
            // A run at the end of everything grows with the arena.
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

    /// Whether all chunks that there are behind a run, up to its new end, are this node's: what
    /// another node has free there is not for this one, and in a hole of the arena there may be no
    /// frames to look at. Under the zone's lock; chunks never change hands.
    fn is_own(&self, pfn: Pfn, old: u32, new: u32) -> bool {
        let end = pfn.0.saturating_add(new).min(self.frames().pages());
        let behind = (pfn.0 + old).next_multiple_of(arena::CHUNK)..end;
        let own = |page| self.arena.node(Pfn(page)) == Some(self.node);
        behind.step_by(arena::CHUNK as usize).all(own)
    }

    /// Gives up what it may still hand out, and the memory of free pages, for other nodes of the
    /// same budget.
    pub(crate) fn give_up_room(&self, platform: &P) {
        if self.zone.budget.is_some() {
            {
                let mut inner = self.zone.lock();
                inner.give_up_room(&self.arena.reserve);
                self.zone.note_beyond(&inner);
            }
            self.shed(platform);
        }
    }

    /// Pages that may be used here at the moment, where there is a budget.
    pub(crate) fn share(&self) -> Option<u32> {
        self.zone.budget.map(|_| self.zone.lock().budget)
    }

    /// Pages taken from the system so far; pages that went back and came again count again.
    pub fn grown(&self) -> u64 {
        self.zone.grown()
    }

    /// Pages that have memory behind them: used ones and free ones.
    pub fn resident(&self) -> u32 {
        self.zone.lock().resident()
    }

    /// Pages that are free in the zone: neither handed out nor in a list nor on their way.
    pub fn free_pages(&self) -> u32 {
        self.zone.lock().buddy.free
    }

    /// Of these, those that are resident or possibly resident.
    pub fn backed_free_pages(&self) -> u32 {
        self.zone.lock().buddy.backed_free
    }

    /// Pages in all lists, but for those that somebody holds.
    pub fn listed(&self) -> u32 {
        self.lists.used().iter().filter_map(|cpu| self.lists.count(cpu)).sum()
    }

    /// Pages that are handed out, but for holes, or in lists.
    pub fn used(&self) -> u32 {
        self.zone.lock().used()
    }

    /// Pages in a CPU's list; `None` while somebody holds it.
    pub fn listed_on(&self, cpu: usize) -> Option<u32> {
        self.lists.count(cpu)
    }

    /// The most pages that a CPU's list keeps at the moment; `None` while somebody holds it.
    pub fn list_high_on(&self, cpu: usize) -> Option<u32> {
        self.lists.sizes(cpu).map(|(high, _)| high)
    }

    /// The numbers; each is right for some moment, together they are when nobody runs.
    pub fn statistics(&self) -> Statistics {
        let listed = self.listed();
        let used = self.lists.used();
        let (first, unused) = (self.lists.first_sizes(), (self.lists.cpus() - used.count()) as u32);
        // Lists that were never used may keep what new ones may.
        let start = if unused > 0 { (unused * first.0, first.0, first.1) } else { (0, 0, 0) };
        let sizes = used.iter().filter_map(|cpu| self.lists.sizes(cpu));
        let (list_highs, list_high, list_batch) =
            sizes.fold(start, |(sum, high, batch), list| (sum + list.0, list.0.max(high), list.1.max(batch)));
        let (mapped_bytes, table_bytes) = self.arena.mapped();
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
            budget: self.zone.budget,
            watermarks: self.lists.limits.watermarks,
            released: self.release.released.load(Relaxed),
            punched: self.release.punched.load(Relaxed),
            refilled: self.refilled.load(Relaxed),
            release_calls: self.release.calls.load(Relaxed),
            release_failures: self.release.failures.load(Relaxed),
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

    /// Proves that every page is in exactly one state and that all counts are true. Only while nobody else uses this.
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
        Finding::unless_equal("pages under way while nobody runs", Pfn::NONE, 0, self.zone.draining().into())
    }
}
