//! The pages of an instance, node by node.
//!
//! # Design
//!
//! There is one [`Pages`] per node, with its own zone and lists. All nodes share one arena, so the
//! place of an address's table bytes follows by arithmetic on every node. An allocation takes
//! memory from the node nearest to the CPU. If that node has none, the allocation drains the node's
//! lists, and then tries the next node by distance. A page is freed to its own node. With one node,
//! the choice of the node costs one comparison. The first call on a CPU determines the CPU's
//! nearest node, so CPUs may be added at any time.
//!
//! # Locking
//!
//! This module has no lock.

use crate::frames::Frames;
use crate::live::ZoneCell;
use crate::page_snapshot::PIECE;
use crate::pages::Pages;
use crate::purge::Report;
use crate::shape::{EarlyTables, Shape};
use crate::statistics::Statistics;
use crate::tables::MappingKind;
use crate::trim::{Drain, DrainSum, TURN_POLLS_MAX};
use crate::units::{Block, CHUNK, Exhausted};
use core::cell::Cell;
use core::ops::Range;
use core::sync::atomic::{AtomicU8, Ordering::Relaxed};
use neap_base::live::Link;
use neap_base::platform::nodes::{MAX_NODES, NearestNode};
use neap_base::platform::{Errno, Handover, HugePageSupply, memory};
use neap_base::{Finding, Order, Pfn, Platform};
use neap_os::topology::CpuSet;

/// All pages of an instance.
#[derive(Debug)]
pub struct NodePages<P: Platform> {
    first: Pages<P>,
    /// The pages of all nodes but the first, in a mapping that this value owns. The table `homes`
    /// follows them.
    others: *const Pages<P>,
    count: usize,
    /// By CPU: the nearest node plus 1; 0 until the first call on the CPU.
    homes: *const AtomicU8,
    cpus: usize,
    /// By node: all nodes in the order of their distance. The node itself comes first.
    orders: [[u8; MAX_NODES]; MAX_NODES],
    own: memory::Range,
}

// SAFETY: this value owns the mapping. The mapping holds pages and atomics, which threads may
// share.
unsafe impl<P: Platform> Send for NodePages<P> {}
// SAFETY: this value owns the mapping. The mapping holds pages and atomics, which threads may
// share.
unsafe impl<P: Platform> Sync for NodePages<P> {}

impl<P: Platform> NodePages<P> {
    /// Finds address space and maps the first segment.
    ///
    /// # Errors
    /// The platform's error. Nothing stays mapped then.
    pub fn open(platform: &P, shape: &Shape) -> Result<NodePages<P>, Errno> {
        let (count, cpus) = (platform.nodes().min(MAX_NODES), platform.cpus());
        let first = Pages::open_first(platform, shape, count)?;
        let mut pages = NodePages {
            first,
            others: core::ptr::null(),
            count: 1,
            homes: core::ptr::null(),
            cpus,
            orders: [[0; MAX_NODES]; MAX_NODES],
            own: memory::Range { start: 0, length: 0 },
        };
        match if count > 1 { pages.open_others(platform, shape, count) } else { Ok(()) } {
            Ok(()) => Ok(pages),
            Err(error) => {
                // SAFETY: the pages were not returned yet, so no other thread uses them.
                unsafe { pages.close(platform) };
                Err(error)
            }
        }
    }

    fn open_others(&mut self, platform: &P, shape: &Shape, count: usize) -> Result<(), Errno> {
        let others = (count - 1) * size_of::<Pages<P>>();
        let length = (others + self.cpus).next_multiple_of(platform.page_size());
        self.own = memory::Range { start: platform.map(length)?, length };
        let start = core::ptr::with_exposed_provenance_mut::<Pages<P>>(self.own.start);
        (self.others, self.homes) = (start, core::ptr::with_exposed_provenance(self.own.start + others));
        for node in 1..count {
            // SAFETY: `close` closes the first node's pages last.
            let pages = unsafe { self.first.open_beside(platform, shape, node) }?;
            // SAFETY: the new mapping begins at a page and has room for `count - 1` values.
            unsafe { start.add(node - 1).write(pages) };
            self.count = node + 1;
        }
        for (node, order) in self.orders.iter_mut().enumerate().take(count) {
            (0..count).for_each(|other| order[other] = other as u8);
            // The node itself comes first, whatever the distances say.
            order[..count].sort_unstable_by_key(|&other| {
                (usize::from(other) != node, platform.distance(node, other.into()), other)
            });
        }
        Ok(())
    }

    /// Unmaps everything.
    ///
    /// # Safety
    /// No thread uses these pages or their memory any more.
    pub unsafe fn close(&self, platform: &P) {
        // SAFETY: the caller says that no thread uses the pages or their memory. The loop closes
        // the first node's pages, which have the arena, last. The mapping with the other nodes'
        // pages goes after that.
        unsafe {
            (0..self.count).rev().for_each(|node| self.node(node).close(platform));
            if self.own.length > 0 {
                platform.unmap(self.own.start, self.own.length);
            }
        }
    }

    /// Number of nodes.
    #[inline]
    pub fn nodes(&self) -> usize {
        self.count
    }

    /// The pages of one node.
    #[inline]
    pub fn node(&self, node: usize) -> &Pages<P> {
        if node == 0 || node >= self.count {
            return &self.first;
        }
        // SAFETY: the node is from 1 to below the count, so `open_others` wrote its pages.
        unsafe { &*self.others.add(node - 1) }
    }

    /// Number of CPUs that may ever exist.
    pub(crate) fn cpus(&self) -> usize {
        self.cpus
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Pages<P>> {
        (0..self.count).map(|node| self.node(node))
    }

    /// The node of a page.
    #[inline]
    pub fn node_of(&self, pfn: Pfn) -> usize {
        if self.count == 1 { 0 } else { self.first.arena.node(pfn).unwrap_or(0) }
    }

    /// The node nearest to this thread.
    #[inline]
    pub fn nearest(&self, platform: &P) -> usize {
        if self.count == 1 { 0 } else { self.nearest_of_many(platform, platform.cpu()) }
    }

    /// The node nearest to a CPU.
    #[inline]
    pub fn nearest_to(&self, platform: &P, cpu: usize) -> usize {
        if self.count == 1 { 0 } else { self.nearest_of_many(platform, cpu) }
    }

    #[inline(never)]
    fn nearest_of_many(&self, platform: &P, cpu: usize) -> usize {
        // SAFETY: the CPU is below `cpus`, and the table has a byte per CPU.
        let home = (cpu < self.cpus).then(|| unsafe { &*self.homes.add(cpu) });
        // Relaxed: all threads store the same value.
        if let Some(node) = home.and_then(|home| home.load(Relaxed).checked_sub(1)) {
            return node.into();
        }
        let NearestNode { node, is_of_cpu } = platform.node(cpu);
        if let Some(home) = home.filter(|_| is_of_cpu) {
            home.store(node as u8 + 1, Relaxed);
        }
        node
    }

    /// The result of `attempt` on the nearest node where it succeeds.
    fn take<T>(&self, platform: &P, attempt: impl Fn(&Pages<P>) -> Result<T, Exhausted>) -> Result<T, Exhausted> {
        if self.count == 1 {
            return attempt(&self.first);
        }
        let nearest = self.nearest(platform);
        attempt(self.node(nearest)).or_else(|Exhausted| self.fall_back(platform, nearest, attempt))
    }

    /// Runs `attempt` on all nodes by distance, after it failed on the nearest node. Drains a
    /// node's lists and tries again before it goes to the next node. All nodes share a budget. With
    /// one, drains the lists of all nodes, and moves the unused parts of the budget to its reserve.
    #[cold]
    fn fall_back<T>(
        &self,
        platform: &P,
        nearest: usize,
        attempt: impl Fn(&Pages<P>) -> Result<T, Exhausted>,
    ) -> Result<T, Exhausted> {
        let (budgeted, polls) = (self.first.share().is_some(), Cell::new(TURN_POLLS_MAX));
        for &node in &self.orders[nearest][..self.count] {
            let pages = self.node(node.into());
            self.all().for_each(|pages| pages.give_up_room(platform, &polls));
            let taken = attempt(pages).or_else(|Exhausted| {
                let drained = if budgeted { self.drain_all(platform) } else { pages.drain_all(platform) };
                pages.needs.count(drained.pages.into());
                self.all().for_each(|pages| pages.give_up_room(platform, &polls));
                attempt(pages)
            });
            if taken.is_ok() {
                self.node(nearest).misses.fetch_add((usize::from(node) != nearest).into(), Relaxed);
                return taken;
            }
        }
        Err(Exhausted)
    }

    /// Allocates a block of 2^order pages, order 0 to 10.
    ///
    /// # Errors
    /// [`Exhausted`] if no node has such a block.
    #[inline]
    pub fn allocate_block(&self, platform: &P, order: Order) -> Result<Block, Exhausted> {
        self.take_block(platform, order, |pages| pages.allocate_block(platform, order))
    }

    /// Allocates a block for a caller that has filled many such blocks, and probably fills this one
    /// too.
    ///
    /// # Errors
    /// [`Exhausted`] if no node has such a block.
    #[inline]
    pub fn allocate_one_more_block(&self, platform: &P, order: Order, early: EarlyTables) -> Result<Block, Exhausted> {
        self.take_block(platform, order, |pages| pages.allocate_one_more_block(platform, order, early))
    }

    #[inline]
    fn take_block(
        &self,
        platform: &P,
        order: Order,
        attempt: impl Fn(&Pages<P>) -> Result<Block, Exhausted>,
    ) -> Result<Block, Exhausted> {
        let block = self.take(platform, attempt)?;
        platform.note(Handover { pfn: block.pfn, pages: order.pages(), freed: false });
        Ok(block)
    }

    /// Allocates a block of the nearest node without taking memory from the system: see
    /// [`Pages::allocate_resident_block`].
    pub fn allocate_resident_block(&self, platform: &P, order: Order) -> Option<Block> {
        let block = self.node(self.nearest(platform)).allocate_resident_block(platform, order)?;
        platform.note(Handover { pfn: block.pfn, pages: order.pages(), freed: false });
        Some(block)
    }

    /// Allocates a run of the nearest node without taking memory from the system: see
    /// [`Pages::allocate_resident_run`].
    pub fn allocate_resident_run(&self, platform: &P, pages: u32, align_pages: u32) -> Option<Block> {
        let run = self.node(self.nearest(platform)).allocate_resident_run(platform, pages, align_pages)?;
        platform.note(Handover { pfn: run.pfn, pages, freed: false });
        Some(run)
    }

    /// Allocates a run of the nearest node that this CPU caches: see
    /// [`Pages::allocate_cached_run`].
    #[inline]
    pub fn allocate_cached_run(&self, platform: &P, pages: u32, align_pages: u32) -> Option<Block> {
        let run = self.node(self.nearest(platform)).allocate_cached_run(platform, pages, align_pages)?;
        platform.note(Handover { pfn: run.pfn, pages, freed: false });
        Some(run)
    }

    /// Frees a block. Ends the process if the block is not handed out, or is not of this order.
    #[inline]
    pub fn free_block(&self, platform: &P, pfn: Pfn, order: Order) {
        platform.note(Handover { pfn, pages: order.pages(), freed: true });
        self.node(self.node_of(pfn)).free_block(platform, pfn, order);
    }

    /// Allocates a run of exactly `pages` pages. Its address is a multiple of `align_pages` pages.
    /// `align_pages` must be a power of two.
    ///
    /// # Errors
    /// [`Exhausted`] if no node has such a run.
    pub fn allocate_run(&self, platform: &P, pages: u32, align_pages: u32) -> Result<Block, Exhausted> {
        let kept = || {
            // A kept chunk serves runs again, even if the thread now runs on another node.
            let nodes = &self.orders[self.nearest(platform)][..self.count];
            nodes.iter().find_map(|&node| self.node(node.into()).allocate_resident_run(platform, pages, align_pages))
        };
        let run = match if self.count > 1 && self.keeps_chunks() { kept() } else { None } {
            Some(run) => run,
            None => self.take(platform, |node| node.allocate_run(platform, pages, align_pages))?,
        };
        platform.note(Handover { pfn: run.pfn, pages, freed: false });
        Ok(run)
    }

    /// Sets whether free memory stays for its previous use. If so, whole free chunks are cut up for
    /// smaller blocks only as a last resort.
    pub fn keep_chunks(&self, keeps: bool) {
        self.all().for_each(|pages| pages.zone.lock().buddy.keeps_chunks = keeps);
    }

    /// Whether free chunks are kept, as set by [`NodePages::keep_chunks`].
    pub fn keeps_chunks(&self) -> bool {
        self.first.zone.lock().buddy.keeps_chunks
    }

    /// Finds the first adjacent pages of `part` of the run at `head` that may hold data. Returns
    /// `None` if every byte is zero. The result is right only if the run was not written to since
    /// its allocation.
    pub fn backed_part(&self, head: Pfn, part: Range<u32>) -> Option<Range<u32>> {
        self.node(self.node_of(head)).backed_part(head, part)
    }

    /// Whether neap asks for huge pages: they are wanted, and the system supplies them.
    pub fn uses_huge_pages(&self) -> bool {
        self.first.arena.huge_runs.supply != HugePageSupply::None
    }

    /// Whether a page may be part of a whole huge page.
    pub fn is_huge(&self, pfn: Pfn) -> bool {
        self.first.arena.is_huge(pfn)
    }

    /// Frees a run. Ends the process if the run is not handed out, or is not of this length.
    pub fn free_run(&self, platform: &P, pfn: Pfn, pages: u32) {
        platform.note(Handover { pfn, pages, freed: true });
        self.node(self.node_of(pfn)).free_run(platform, pfn, pages);
    }

    /// Frees a run whose pages were moved elsewhere ([`Platform::move_pages`]), so that it has no
    /// memory.
    pub fn free_moved_run(&self, platform: &P, pfn: Pfn, pages: u32) {
        platform.note(Handover { pfn, pages, freed: true });
        self.node(self.node_of(pfn)).free_moved_run(pfn, pages);
    }

    /// Ensures that a run's pages are mapped after the system refused to move other pages there.
    /// Kernels before 6.17 may have unmapped them first. Returns `false` if they may be unmapped.
    /// The caller must then never use them again.
    #[must_use]
    pub fn map_again(&self, platform: &P, pfn: Pfn, pages: u32) -> bool {
        self.first.arena.map_again(platform, pfn, pages, self.node_of(pfn))
    }

    /// Makes a run longer or shorter in place. Returns `false` and changes nothing if the run
    /// cannot grow there. The contents of the gained pages are undefined.
    pub fn resize_run(&self, platform: &P, pfn: Pfn, old: u32, new: u32) -> bool {
        let own = self.node(self.node_of(pfn));
        let resized = own.resize_run(platform, pfn, old, new);
        if resized || self.count == 1 {
            return resized;
        }
        // Other nodes may have an unused part of the budget.
        let polls = Cell::new(TURN_POLLS_MAX);
        self.all().for_each(|pages| pages.give_up_room(platform, &polls));
        own.resize_run(platform, pfn, old, new)
    }

    /// Sets whether background reclaim runs. While it runs, lists keep and move no more pages than
    /// without tuning.
    pub fn set_reclaiming(&self, reclaiming: bool) {
        self.all().for_each(|pages| pages.set_reclaiming(reclaiming));
    }

    /// Whether background reclaim runs, for any node.
    pub fn is_reclaiming(&self) -> bool {
        self.all().any(|pages| pages.is_reclaiming())
    }

    /// Releases pages that were not needed since the last tick: see [`Pages::tick`].
    pub fn tick(&self, platform: &P) -> Report {
        self.tick_until(platform, &|| false)
    }

    /// Ticks until `stop` returns true. Calls `stop` between system calls. The next tick does the
    /// rest.
    pub fn tick_until(&self, platform: &P, stop: &dyn Fn() -> bool) -> Report {
        self.tick_within(platform, u32::MAX, stop)
    }

    /// Ticks until `stop` returns true, and releases at most `most` pages. The next tick does the
    /// rest.
    pub fn tick_within(&self, platform: &P, mut most: u32, stop: &dyn Fn() -> bool) -> Report {
        self.all().fold(Report::default(), |sum, pages| {
            let report = pages.tick_within(platform, most, stop);
            most = most.saturating_sub(report.released);
            sum.and(report)
        })
    }

    /// Lets the system take up to `most` free pages when it is short of memory. `keep` free pages
    /// of each node stay as they are: see [`Pages::offer`].
    pub fn offer(&self, platform: &P, keep: u32, most: u32) -> u32 {
        self.all().fold(0, |offered, pages| offered + pages.offer(platform, keep, most - offered.min(most)))
    }

    /// Number of lazily free pages of all nodes.
    pub fn lazily_free(&self) -> u64 {
        self.all().map(|pages| u64::from(pages.lazily_free())).sum()
    }

    /// Releases all free pages, lists included: see [`Pages::release_all`].
    pub fn release_all(&self, platform: &P) -> Report {
        self.release_all_until(platform, &|| false)
    }

    /// Releases all free pages until `stop` returns true. Calls `stop` between system calls.
    pub fn release_all_until(&self, platform: &P, stop: &dyn Fn() -> bool) -> Report {
        self.all().fold(Report::default(), |sum, pages| sum.and(pages.release_all_until(platform, stop)))
    }

    /// Drains a CPU's lists, from any CPU.
    pub fn drain_cpu(&self, platform: &P, cpu: usize) -> DrainSum {
        self.all().fold(DrainSum::default(), |sum, pages| match pages.drain_cpu(platform, cpu) {
            Drain::Drained(pages) => DrainSum { pages: sum.pages + pages, ..sum },
            Drain::Skipped => DrainSum { held: sum.held + 1, ..sum },
        })
    }

    /// CPUs that have lists on any node now. No other CPU has listed pages.
    pub fn listed_cpus(&self) -> CpuSet {
        let mut all = CpuSet::EMPTY;
        self.all().for_each(|pages| all.insert_all(&pages.lists.used()));
        all
    }

    /// Drains every CPU's lists.
    pub fn drain_all(&self, platform: &P) -> DrainSum {
        self.all().map(|pages| pages.drain_all(platform)).fold(DrainSum::default(), |sum, more| DrainSum {
            pages: sum.pages + more.pages,
            held: sum.held + more.held,
        })
    }

    /// Counts one drain of all lists that the caller made as the last resort of an allocation. The
    /// drain took `pages` pages out of the lists.
    pub fn count_need(&self, pages: u64) {
        self.first.needs.count(pages);
    }

    /// Pages taken from the system so far, of all nodes. Pages that were released and taken again
    /// count again.
    pub fn grown(&self) -> u64 {
        self.all().map(Pages::grown).sum()
    }

    /// Resident pages of all nodes, used and free.
    pub fn resident(&self) -> u64 {
        self.all().map(|pages| u64::from(pages.resident())).sum()
    }

    /// Drains this CPU's lists into the zones if they have more than `most` pages.
    pub fn trim_list(&self, platform: &P, most: u32) {
        let cpu = platform.cpu();
        if self.listed_on(cpu).is_some_and(|pages| pages > most) {
            self.drain_cpu(platform, cpu);
        }
    }

    /// Free resident pages of all nodes.
    pub fn backed_free_pages(&self) -> u64 {
        self.all().map(|pages| u64::from(pages.backed_free_pages())).sum()
    }

    /// Pages in the lists of all CPUs, without lists that another thread holds at the moment.
    pub fn listed(&self) -> u64 {
        self.all().map(|pages| u64::from(pages.listed())).sum()
    }

    /// Free pages of all zones. Handed-out, listed and travelling pages do not count.
    pub fn free_pages(&self) -> u64 {
        self.all().map(|pages| u64::from(pages.free_pages())).sum()
    }

    /// Pages in a CPU's lists; `None` while another thread holds one.
    pub fn listed_on(&self, cpu: usize) -> Option<u32> {
        self.all().map(|pages| pages.listed_on(cpu)).sum()
    }

    /// The most pages that a CPU's lists keep at the moment; `None` while another thread holds one.
    pub fn list_high_on(&self, cpu: usize) -> Option<u32> {
        self.all().map(|pages| pages.list_high_on(cpu)).sum()
    }

    /// The statistics of all nodes together. Each number is exact for some moment. The numbers fit
    /// together only while no thread runs.
    pub fn statistics(&self) -> Statistics {
        (1..self.count).fold(self.first.statistics(), |sum, node| sum.and(&self.node(node).statistics()))
    }

    /// Stores each node's counts into its cell from now on.
    ///
    /// # Safety
    /// The conditions of [`Cells::attach`](neap_base::live::Cells::attach) hold, with a cell for
    /// each node.
    pub unsafe fn attach_live(&self, link: &Link<ZoneCell>) {
        for pages in self.all() {
            let inner = pages.zone.lock();
            // SAFETY: a zone passes only its node to `Cells::get`, and the caller promises the
            // conditions of `Cells::attach`, with a cell for each node.
            unsafe { inner.live.attach(link) };
            pages.zone.change_totals(&inner, |_| ());
        }
    }

    /// Stores the counts of every node into the node's cell now. Skips a node whose lock this
    /// thread holds.
    ///
    /// # Safety
    /// No other thread uses the pages.
    pub unsafe fn store_live(&self) {
        // SAFETY: no other thread uses a zone (the caller's promise).
        self.all().for_each(|pages| unsafe { pages.zone.store_live() });
    }

    /// Calls `each` with kind, start and length of every mapping.
    pub fn each_mapping(&self, each: &mut dyn FnMut(MappingKind, usize, usize)) {
        self.all().for_each(|pages| pages.each_mapping(each));
        if self.own.length > 0 {
            each(MappingKind::Lists, self.own.start, self.own.length);
        }
    }

    /// Number of pieces for [`NodePages::survey`].
    pub fn pieces(&self) -> u32 {
        self.frames().pages() / CHUNK
    }

    /// Whether the page at an offset from the base belongs to the arena. A page in a hole, where a
    /// foreign mapping lies, does not. All tables are mapped for a page of the arena.
    pub fn has(&self, offset: usize) -> bool {
        offset < self.limit() && self.first.arena.node(Pfn((offset >> self.page_shift()) as u32)).is_some()
    }

    /// Writes the use of each of the [`PIECE`] pages of a piece of the arena into a nibble of
    /// `uses`. The first page's nibble is the lowest of the first word. Holds the lock of the
    /// piece's node for some microseconds. A page that travels between a CPU's list and the zone or
    /// a thread may appear as part of a run.
    pub fn survey(&self, piece: u32, uses: &mut [u64; PIECE / 16]) {
        let first = Pfn(piece * CHUNK);
        *uses = [0; PIECE / 16];
        if piece < self.pieces() && self.first.arena.node(first).is_some() {
            self.node(self.node_of(first)).zone.survey(first, uses);
        }
    }

    /// Proves that every page is in exactly one state and on one node, and that all counts are
    /// right. No other thread may use the pages during the call.
    ///
    /// # Errors
    /// The first [`Finding`].
    pub fn verify(&self) -> Result<(), Finding> {
        self.all().try_for_each(Pages::verify)?;
        let numbers = self.statistics();
        let mapped = (numbers.mapped_bytes >> self.page_shift()) as u64;
        Finding::unless_equal("pages of all nodes", Pfn::NONE, mapped, numbers.managed.into())?;
        let reserve = self.first.arena.reserve.load(Relaxed);
        let shares = self.all().filter_map(Pages::share).map(u64::from).sum::<u64>();
        let tables = u64::from(self.first.arena.charged_tables.load(Relaxed));
        let budget = numbers.budget.map_or(0, u64::from);
        Finding::unless_equal("budget of all nodes", Pfn::NONE, budget, ((shares + tables) as i64 + reserve) as u64)
    }

    /// The first address of the arena.
    #[inline]
    pub fn base(&self) -> usize {
        self.first.base()
    }

    /// Bytes from the base to the end of the arena so far: see [`Pages::limit`].
    #[inline]
    pub fn limit(&self) -> usize {
        self.first.limit()
    }

    /// The page size as a power of two.
    #[inline]
    pub fn page_shift(&self) -> u32 {
        self.first.page_shift()
    }

    /// Bytes in a page.
    #[inline]
    pub fn page_size(&self) -> usize {
        self.first.page_size()
    }

    /// The address of a page.
    #[inline]
    pub fn address(&self, pfn: Pfn) -> usize {
        self.first.address(pfn)
    }

    /// The page of an address between base and limit.
    #[inline]
    pub fn pfn(&self, address: usize) -> Pfn {
        self.first.pfn(address)
    }

    /// The first byte of the caller's side table `table`.
    #[inline]
    pub fn side_table(&self, table: usize) -> usize {
        self.first.side_table(table)
    }

    /// The frame table.
    #[inline]
    pub fn frames(&self) -> &Frames {
        self.first.frames()
    }

    /// Records that the caller wrote to side table `table` for the chunk of `pfn`. That page must
    /// be handed out.
    #[inline]
    pub fn mark_side_table(&self, pfn: Pfn, table: usize) {
        self.first.mark_side_table(pfn, table);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::shape;
    use neap_base::Linux;
    use neap_base::platform::Recorder;
    use neap_testing::virtual_platform::Virtual;
    use std::sync::Mutex;
    use std::vec::Vec;

    #[derive(Debug)]
    struct Notes(Mutex<Vec<Handover>>);

    impl Recorder for Notes {
        fn note(&self, _cpu: usize, handover: Handover) {
            self.0.lock().unwrap().push(handover);
        }
    }

    #[test]
    fn whatever_is_handed_out_and_comes_back_is_noted() {
        static NOTES: Notes = Notes(Mutex::new(Vec::new()));
        let machine = Linux::probe().with_recorder(&NOTES);
        let pages = NodePages::open(&machine, &shape(None)).unwrap();
        let block = pages.allocate_block(&machine, Order(2)).unwrap().pfn;
        let more = pages.allocate_one_more_block(&machine, Order(3), EarlyTables::Written).unwrap().pfn;
        let run = pages.allocate_run(&machine, 77, 1).unwrap().pfn;
        pages.free_block(&machine, block, Order(2));
        pages.free_block(&machine, more, Order(3));
        pages.free_run(&machine, run, 77);
        let handed = [(block, 4), (more, 8), (run, 77)];
        let note = |freed| handed.map(|(pfn, pages)| Handover { pfn, pages, freed });
        assert_eq!(*NOTES.0.lock().unwrap(), [note(false), note(true)].concat());
        // SAFETY: the test is over, and no other thread uses the pages.
        unsafe { pages.close(&machine) };
    }

    #[test]
    fn what_one_list_gives_is_told_though_another_is_held() {
        let machine = Virtual::new(4096, 2).with_nodes(&[0, 1]);
        let pages = NodePages::open(&machine, &shape(None)).unwrap();
        // Blocks of both nodes, into the lists of CPU 0.
        for cpu in 0..2 {
            Virtual::run_on(cpu);
            let blocks: Vec<Pfn> = (0..20).map(|_| pages.allocate_block(&machine, Order(0)).unwrap().pfn).collect();
            Virtual::run_on(0);
            blocks.into_iter().for_each(|pfn| pages.free_block(&machine, pfn, Order(0)));
        }
        let listed = [0, 1].map(|node| pages.node(node).listed_on(0).unwrap());
        assert!(listed.iter().all(|count| *count > 0));
        for node in 0..2 {
            let holder = pages.node(node).lists.own(0).unwrap();
            assert_eq!(pages.drain_cpu(&machine, 0), DrainSum { pages: [listed[1], listed[0]][node], held: 1 });
            drop(holder);
        }
        assert_eq!(pages.drain_cpu(&machine, 0), DrainSum::default(), "nothing is left");
        // SAFETY: the test is over, and no other thread uses the pages.
        unsafe { pages.close(&machine) };
    }
}
