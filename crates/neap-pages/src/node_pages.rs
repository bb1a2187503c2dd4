//! The pages of an instance, node by node.
//!
//! Sits between the object layer and [`Pages`], of which there is one per node: a zone, lists and a way back to the system
//! of its own, in an arena that all share, so that an address leads to its tables by arithmetic whatever its node. Memory
//! comes from the node nearest to the CPU that asks. Only when that has none, its lists emptied, comes the next one by
//! distance; a page goes back to the node that it is of. On a machine with one node all of this is one compare. Which node
//! a CPU is nearest to is asked when it first comes here, so CPUs may be added at any time. Takes no lock of its own.

use crate::arena::CHUNK;
use crate::frames::Frames;
use crate::give_back::{Drain, Report};
use crate::pages::{Block, Exhausted, Pages, Shape};
use crate::statistics::{Finding, Statistics};
use crate::survey::{PIECE, Part};
use core::ops::Range;
use core::sync::atomic::{AtomicU8, Ordering::Relaxed};
use neap_base::platform::Errno;
use neap_base::platform::Handover;
use neap_base::platform::nodes::MAX_NODES;
use neap_base::{Order, Pfn, Platform};
use neap_os::topology::CpuSet;

/// All pages of an instance.
#[derive(Debug)]
pub struct NodePages<P: Platform> {
    first: Pages<P>,
    /// The other nodes', in memory of this value's own, with the two tables behind them.
    others: *const Pages<P>,
    count: usize,
    /// By CPU: one more than the node nearest to it; 0: not known yet.
    homes: *const AtomicU8,
    cpus: usize,
    /// By node: all nodes from the nearest, itself.
    orders: [[u8; MAX_NODES]; MAX_NODES],
    own: (usize, usize),
}

// SAFETY: the pointers lead to memory of this value's own, shared as its parts are.
unsafe impl<P: Platform> Send for NodePages<P> {}
// SAFETY: as above.
unsafe impl<P: Platform> Sync for NodePages<P> {}

impl<P: Platform> NodePages<P> {
    /// Finds address space and maps the first piece of it.
    ///
    /// # Errors
    /// What the platform answered where it refused; nothing stays mapped.
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
            own: (0, 0),
        };
        match if count > 1 { pages.open_others(platform, shape, count) } else { Ok(()) } {
            Ok(()) => Ok(pages),
            Err(error) => {
                // SAFETY: nobody has seen the pages.
                unsafe { pages.close(platform) };
                Err(error)
            }
        }
    }

    fn open_others(&mut self, platform: &P, shape: &Shape, count: usize) -> Result<(), Errno> {
        let others = (count - 1) * size_of::<Pages<P>>();
        let length = (others + self.cpus).next_multiple_of(platform.page_size());
        self.own = (platform.map(length)?, length);
        let start = core::ptr::with_exposed_provenance_mut::<Pages<P>>(self.own.0);
        (self.others, self.homes) = (start, core::ptr::with_exposed_provenance(self.own.0 + others));
        for node in 1..count {
            // SAFETY: `close` takes the first node's away last.
            let pages = unsafe { self.first.open_beside(platform, shape, node) }?;
            // SAFETY: inside what was mapped, which is aligned to a page.
            unsafe { start.add(node - 1).write(pages) };
            self.count = node + 1;
        }
        for (node, order) in self.orders.iter_mut().enumerate().take(count) {
            (0..count).for_each(|other| order[other] = other as u8);
            // Itself first, whatever the distances say.
            order[..count].sort_unstable_by_key(|&other| {
                (usize::from(other) != node, platform.distance(node, other.into()), other)
            });
        }
        Ok(())
    }

    /// Takes everything away.
    ///
    /// # Safety
    /// Nobody uses this, or any memory of it, any more.
    pub unsafe fn close(&self, platform: &P) {
        // SAFETY: as the caller promises; the first node's, which has the arena, goes last.
        unsafe {
            (0..self.count).rev().for_each(|node| self.node(node).close(platform));
            if self.own.1 > 0 {
                platform.unmap(self.own.0, self.own.1);
            }
        }
    }

    /// How many nodes there are.
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
        // SAFETY: below the count, so written by `open_others`.
        unsafe { &*self.others.add(node - 1) }
    }

    fn all(&self) -> impl Iterator<Item = &Pages<P>> {
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
        // SAFETY: the table has a byte per CPU.
        let home = (cpu < self.cpus).then(|| unsafe { &*self.homes.add(cpu) });
        // Relaxed: whoever writes it writes the same.
        if let Some(node) = home.and_then(|home| home.load(Relaxed).checked_sub(1)) {
            return node.into();
        }
        let (node, for_good) = platform.node(cpu);
        if let Some(home) = home.filter(|_| for_good) {
            home.store(node as u8 + 1, Relaxed);
        }
        node
    }

    /// What `attempt` gets from the nearest node that has it.
    fn take<T>(&self, platform: &P, attempt: impl Fn(&Pages<P>) -> Result<T, Exhausted>) -> Result<T, Exhausted> {
        if self.count == 1 {
            return attempt(&self.first);
        }
        let nearest = self.nearest(platform);
        attempt(self.node(nearest)).or_else(|Exhausted| self.fall_back(platform, nearest, attempt))
    }

    /// The same where the nearest node has none at first. What its lists keep is wanted before what is farther; and of a
    /// budget, which is one for all nodes, what others do not use or keep in lists.
    #[cold]
    fn fall_back<T>(
        &self,
        platform: &P,
        nearest: usize,
        attempt: impl Fn(&Pages<P>) -> Result<T, Exhausted>,
    ) -> Result<T, Exhausted> {
        let budgeted = self.first.share().is_some();
        for &node in &self.orders[nearest][..self.count] {
            let pages = self.node(node.into());
            self.all().for_each(|pages| pages.give_up_room(platform));
            let taken = attempt(pages).or_else(|Exhausted| {
                let (drained, _) = if budgeted { self.drain_all(platform) } else { pages.drain_all(platform) };
                pages.needs.count(drained.into());
                self.all().for_each(|pages| pages.give_up_room(platform));
                attempt(pages)
            });
            if taken.is_ok() {
                self.node(nearest).misses.fetch_add((usize::from(node) != nearest).into(), Relaxed);
                return taken;
            }
        }
        Err(Exhausted)
    }

    /// A block of 2^order pages, order 0 to 10.
    ///
    /// # Errors
    /// [`Exhausted`]: no node has one.
    #[inline]
    pub fn allocate_block(&self, platform: &P, order: Order) -> Result<Block, Exhausted> {
        self.take_block(platform, order, |pages| pages.allocate_block(platform, order))
    }

    /// The same where many such blocks have been filled, so that this one will be too; `early`: and [early tables](crate::SideTable::early) written to for it.
    ///
    /// # Errors
    /// [`Exhausted`]: no node has one.
    #[inline]
    pub fn allocate_one_more_block(&self, platform: &P, order: Order, early: bool) -> Result<Block, Exhausted> {
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

    /// A block of the nearest node for which no memory need come from the system: see
    /// [`Pages::allocate_resident_block`].
    pub fn allocate_resident_block(&self, platform: &P, order: Order) -> Option<Block> {
        let block = self.node(self.nearest(platform)).allocate_resident_block(platform, order)?;
        platform.note(Handover { pfn: block.pfn, pages: order.pages(), freed: false });
        Some(block)
    }

    /// A run of the nearest node for which no memory need come from the system: see
    /// [`Pages::allocate_resident_run`].
    pub fn allocate_resident_run(&self, platform: &P, pages: u32, align_pages: u32) -> Option<Block> {
        let run = self.node(self.nearest(platform)).allocate_resident_run(pages, align_pages)?;
        platform.note(Handover { pfn: run.pfn, pages, freed: false });
        Some(run)
    }

    /// Takes a block back. A block that is not handed out, or not of this order, ends the process.
    #[inline]
    pub fn free_block(&self, platform: &P, pfn: Pfn, order: Order) {
        platform.note(Handover { pfn, pages: order.pages(), freed: true });
        self.node(self.node_of(pfn)).free_block(platform, pfn, order);
    }

    /// A run of exactly `pages` pages whose address is a multiple of `align_pages` pages, a power of two.
    ///
    /// # Errors
    /// [`Exhausted`]: no node has one.
    pub fn allocate_run(&self, platform: &P, pages: u32, align_pages: u32) -> Result<Block, Exhausted> {
        let kept = || {
            // What a program keeps is to serve again what it served, wherever the thread is by now.
            let nodes = &self.orders[self.nearest(platform)][..self.count];
            nodes.iter().find_map(|&node| self.node(node.into()).allocate_resident_run(pages, align_pages))
        };
        let run = match if self.count > 1 && self.keeps_chunks() { kept() } else { None } {
            Some(run) => run,
            None => self.take(platform, |node| node.allocate_run(platform, pages, align_pages))?,
        };
        platform.note(Handover { pfn: run.pfn, pages, freed: false });
        Ok(run)
    }

    /// Says whether free memory is to stay for what it served: then chunks of 1024 free pages are cut up for smaller blocks only where nothing else will do.
    pub fn keep_chunks(&self, keeps: bool) {
        self.all().for_each(|pages| pages.zone.lock().buddy.keeps_chunks = keeps);
    }

    /// Whether free chunks are kept for the program, as it said by [`NodePages::keep_chunks`].
    pub fn keeps_chunks(&self) -> bool {
        self.first.zone.lock().buddy.keeps_chunks
    }

    /// The first pages in a row of `part` of the run at `head` that may hold data, if nothing has
    /// been written to the run since it was handed out; `None` if every byte is zero.
    pub fn backed_part(&self, head: Pfn, part: Range<u32>) -> Option<Range<u32>> {
        self.node(self.node_of(head)).backed_part(head, part)
    }

    /// Takes a run back. A run that is not handed out, or not of this length, ends the process.
    pub fn free_run(&self, platform: &P, pfn: Pfn, pages: u32) {
        platform.note(Handover { pfn, pages, freed: true });
        self.node(self.node_of(pfn)).free_run(platform, pfn, pages);
    }

    /// Takes a run back whose pages have been moved elsewhere ([`Platform::move_pages`]): nothing is behind it any more.
    pub fn free_moved_run(&self, platform: &P, pfn: Pfn, pages: u32) {
        platform.note(Handover { pfn, pages, freed: true });
        self.node(self.node_of(pfn)).free_moved_run(pfn, pages);
    }

    /// Allows huge pages behind a run, if it is worth them, after its pages have come from
    /// elsewhere ([`Platform::move_pages`]).
    pub fn allow_huge(&self, platform: &P, pfn: Pfn, pages: u32) {
        self.node(self.node_of(pfn)).allow_huge(platform, pfn, pages);
    }

    /// Forbids huge pages behind a run before its pages are moved ([`Platform::move_pages`]), which
    /// takes a single mapping.
    pub fn forbid_huge(&self, platform: &P, pfn: Pfn, pages: u32) {
        self.node(self.node_of(pfn)).forbid_huge(platform, pfn, pages, 0);
    }

    /// Makes sure that something is mapped behind pages that are handed out, after a refused move to them: kernels before 6.17
    /// may have unmapped them first. `false` if there may be nothing: then nobody may ever have them again.
    #[must_use]
    pub fn map_again(&self, platform: &P, pfn: Pfn, pages: u32) -> bool {
        self.first.arena.map_again(platform, pfn, pages, self.node_of(pfn))
    }

    /// Makes a run longer or shorter where it is; `false`, and nothing changed, if it cannot grow there. What the pages
    /// that it gains hold is not known.
    pub fn resize_run(&self, platform: &P, pfn: Pfn, old: u32, new: u32) -> bool {
        let own = self.node(self.node_of(pfn));
        let resized = own.resize_run(platform, pfn, old, new);
        if resized || self.count == 1 {
            return resized;
        }
        // Others may have a part of the budget that they do not use.
        self.all().for_each(|pages| pages.give_up_room(platform));
        own.resize_run(platform, pfn, old, new)
    }

    /// Says whether background reclaim runs. While it does, lists keep and move no more than they would without tuning.
    pub fn set_reclaiming(&self, reclaiming: bool) {
        self.all().for_each(|pages| pages.set_reclaiming(reclaiming));
    }

    /// Whether it does, for any of them.
    pub fn is_reclaiming(&self) -> bool {
        self.all().any(|pages| pages.is_reclaiming())
    }

    /// Gives back what was not needed since the last tick: see [`Pages::tick`].
    pub fn tick(&self, platform: &P) -> Report {
        self.tick_until(platform, &|| false)
    }

    /// The same, but looks between system calls whether to `stop`: what is left then is for the next tick.
    pub fn tick_until(&self, platform: &P, stop: &dyn Fn() -> bool) -> Report {
        self.tick_within(platform, u32::MAX, stop)
    }

    /// Ticks, and releases `most` pages at most: what is left then is for the next tick.
    pub fn tick_within(&self, platform: &P, mut most: u32, stop: &dyn Fn() -> bool) -> Report {
        self.all().fold(Report::default(), |sum, pages| {
            let report = pages.tick_within(platform, most, stop);
            most = most.saturating_sub(report.released);
            sum.and(report)
        })
    }

    /// Lets the system take up to `most` free pages when it is short of memory, less those that are
    /// to be kept: see [`Pages::offer`].
    pub fn offer(&self, platform: &P, keep: u32, most: u32) -> u32 {
        self.all().fold(0, |offered, pages| offered + pages.offer(platform, keep, most - offered.min(most)))
    }

    /// Pages of all nodes that the system may take.
    pub fn lazily_free(&self) -> u64 {
        self.all().map(|pages| u64::from(pages.lazily_free())).sum()
    }

    /// Gives everything back that is free, lists included: see [`Pages::release_all`].
    pub fn release_all(&self, platform: &P) -> Report {
        self.release_all_until(platform, &|| false)
    }

    /// The same, but looks between system calls whether to `stop`.
    pub fn release_all_until(&self, platform: &P, stop: &dyn Fn() -> bool) -> Report {
        self.all().fold(Report::default(), |sum, pages| sum.and(pages.release_all_until(platform, stop)))
    }

    /// Takes everything out of a CPU's lists, from any CPU; answers how many pages came back, and how many lists somebody
    /// held.
    pub fn drain_cpu(&self, platform: &P, cpu: usize) -> (u32, u32) {
        self.all().fold((0, 0), |(sum, held), pages| match pages.drain_cpu(platform, cpu) {
            Drain::Drained(pages) => (sum + pages, held),
            Drain::Skipped => (sum, held + 1),
        })
    }

    /// CPUs that have lists on any node, at this moment: no other has listed pages.
    pub fn listed_cpus(&self) -> CpuSet {
        let mut all = CpuSet::EMPTY;
        self.all().for_each(|pages| all.insert_all(&pages.lists.used()));
        all
    }

    /// Drains every CPU's lists; answers the same.
    pub fn drain_all(&self, platform: &P) -> (u32, u32) {
        self.all().map(|pages| pages.drain_all(platform)).fold((0, 0), |sum, pages| (sum.0 + pages.0, sum.1 + pages.1))
    }

    /// Counts that the caller has drained all lists, of so many pages, for an allocation that found nothing else.
    pub fn count_need(&self, pages: u64) {
        self.first.needs.count(pages);
    }

    /// Pages taken from the system so far, of all nodes; pages that went back and came again count again.
    pub fn grown(&self) -> u64 {
        self.all().map(Pages::grown).sum()
    }

    /// Pages of all nodes that have memory behind them: used ones and free ones.
    pub fn resident(&self) -> u64 {
        self.all().map(|pages| u64::from(pages.resident())).sum()
    }

    /// Empties this CPU's lists into the zones if they have more than `most` pages.
    pub fn trim_list(&self, platform: &P, most: u32) {
        let cpu = platform.cpu();
        if self.listed_on(cpu).is_some_and(|pages| pages > most) {
            self.drain_cpu(platform, cpu);
        }
    }

    /// Pages of all nodes that are free and have memory behind them.
    pub fn backed_free_pages(&self) -> u64 {
        self.all().map(|pages| u64::from(pages.backed_free_pages())).sum()
    }

    /// Pages in the lists of all CPUs, but for those that are held at the moment.
    pub fn listed(&self) -> u64 {
        self.all().map(|pages| u64::from(pages.listed())).sum()
    }

    /// Pages that are free in all zones: neither handed out nor in a list nor on their way.
    pub fn free_pages(&self) -> u64 {
        self.all().map(|pages| u64::from(pages.free_pages())).sum()
    }

    /// Pages in a CPU's lists; `None` while somebody holds one.
    pub fn listed_on(&self, cpu: usize) -> Option<u32> {
        self.all().map(|pages| pages.listed_on(cpu)).sum()
    }

    /// The most pages that a CPU's lists keep at the moment; `None` while somebody holds one.
    pub fn list_high_on(&self, cpu: usize) -> Option<u32> {
        self.all().map(|pages| pages.list_high_on(cpu)).sum()
    }

    /// The numbers of all nodes together; each is right for some moment, together they are when nobody runs.
    pub fn statistics(&self) -> Statistics {
        (1..self.count).fold(self.first.statistics(), |sum, node| sum.and(&self.node(node).statistics()))
    }

    /// Calls `each` with everything that is mapped: what of, start, and length.
    pub fn each_mapping(&self, each: &mut dyn FnMut(Part, usize, usize)) {
        self.all().for_each(|pages| pages.each_mapping(each));
        if self.own.1 > 0 {
            each(Part::Lists, self.own.0, self.own.1);
        }
    }

    /// How many pieces [`NodePages::survey`] tells of.
    pub fn pieces(&self) -> u32 {
        self.frames().pages() / CHUNK
    }

    /// Whether the page at an offset from the base belongs to the arena, and not to a hole. All
    /// tables are mapped for such a page.
    pub fn has(&self, offset: usize) -> bool {
        offset < self.limit() && self.first.arena.node(Pfn((offset >> self.page_shift()) as u32)).is_some()
    }

    /// What the pages of a piece of the arena are at the moment: [`PIECE`] of them, each a nibble of `uses`, the first the lowest of the
    /// first word. Under the lock of the piece's node, for some microseconds. A page that is just on its way between a CPU's list
    /// and somebody may be seen as a part of a run.
    pub fn survey(&self, piece: u32, uses: &mut [u64; PIECE / 16]) {
        let first = Pfn(piece * CHUNK);
        *uses = [0; PIECE / 16];
        if piece < self.pieces() && self.first.arena.node(first).is_some() {
            self.node(self.node_of(first)).zone.survey(first, uses);
        }
    }

    /// Proves that every page is in exactly one state, and on one node, and that all counts are true. Only while nobody else
    /// uses this.
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
        let budget = numbers.budget.map_or(0, u64::from);
        Finding::unless_equal("budget of all nodes", Pfn::NONE, budget, shares + u64::from(reserve))
    }

    /// The first address of the arena.
    #[inline]
    pub fn base(&self) -> usize {
        self.first.base()
    }

    /// Bytes from the base up to the end of the arena so far: see [`Pages::limit`].
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

    /// Notes that side table `table` has been written to for the chunk of `pfn`, a page that is handed out.
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
    use neap_base::virtual_platform::Virtual;
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
        let more = pages.allocate_one_more_block(&machine, Order(3), true).unwrap().pfn;
        let run = pages.allocate_run(&machine, 77, 1).unwrap().pfn;
        pages.free_block(&machine, block, Order(2));
        pages.free_block(&machine, more, Order(3));
        pages.free_run(&machine, run, 77);
        let handed = [(block, 4), (more, 8), (run, 77)];
        let note = |freed| handed.map(|(pfn, pages)| Handover { pfn, pages, freed });
        assert_eq!(*NOTES.0.lock().unwrap(), [note(false), note(true)].concat());
        // SAFETY: the test is over.
        unsafe { pages.close(&machine) };
    }

    #[test]
    fn what_one_list_gives_is_told_though_another_is_held() {
        let machine = Virtual::new(4096, 2).with_nodes(&[0, 1]);
        let pages = NodePages::open(&machine, &shape(None)).unwrap();
        // Of both nodes, into the lists of CPU 0.
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
            assert_eq!(pages.drain_cpu(&machine, 0), ([listed[1], listed[0]][node], 1));
            drop(holder);
        }
        assert_eq!(pages.drain_cpu(&machine, 0), (0, 0), "nothing is left");
        // SAFETY: the test is over.
        unsafe { pages.close(&machine) };
    }
}
