//! The arena: a window of address space that grows upwards from a base, and the tables beside it.
//!
//! # Design
//!
//! The window is not reserved. Segments are mapped one after the other as they are needed. Every
//! table lies at a fixed address above the window, so a shift and an addition lead from an address
//! to its byte in a table. Every table is mapped for every segment.
//!
//! If a foreign mapping, which neap did not make, lies in the way of a segment or of its part of a
//! table, the arena has a hole. Most tables have no mapping for a hole. The nodes of a machine
//! share the arena. A segment belongs to the node that it was mapped for; a byte per chunk names
//! the node. No segment is unmapped before [`Arena::close`].
//!
//! # Locking
//!
//! Growth runs under the growth mutex, never under a zone's mutex.

use crate::frames;
use crate::huge_runs::HugeRuns;
use crate::shape::{EarlyTables, MARKED, Shape};
use crate::tables::{
    ALL_TABLES, AddressSpace, CHUNKS, FRAMES, FREE_CHUNKS, MappingKind, OWN_TABLES, Table, layout, place_whole,
};
use crate::units::{CHUNK, HUGE, UNLIMITED};
use core::ops::{Deref, Range};
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use core::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU32, AtomicUsize};
use neap_base::platform::Errno;
use neap_base::platform::memory::{self, HugePages};
use neap_base::platform::nodes::MAX_NODES;
use neap_base::{Mutex, Pfn, Platform};

/// Index of a chunk's byte that says which tables may have memory for it: see [`Arena::marks`].
const MARKS: usize = 0;
/// Index of a chunk's byte with the number of its node plus 1. The byte is 0 in a hole.
const NODE: usize = 1;
/// Index of a chunk's byte with a bit per huge page. A bit is set if a run allows huge pages there.
pub(crate) const IN_RUNS: usize = 2;
/// Number of bytes for each chunk.
const ABOUT_CHUNK: usize = 4;

/// The least and the most bytes of a segment if address space is plentiful. Between these bounds, a
/// segment is as large as the arena so far. The first segment is small, because `mlockall`
/// populates all of it.
const SEGMENTS: (usize, usize) = (32 << 20, 1 << 30);
/// Bytes of a segment if address space is scarce.
const SMALL_SEGMENT: usize = 4 << 20;
/// The largest alignment that a run may ask for.
pub const MOST_ALIGNMENT: usize = 1 << 30;
/// Number of attempts at addresses that may not exist on this machine, so a refusal there tells
/// nothing about smaller spans. In later attempts the kernel selects a gap.
const FIXED_ATTEMPTS_MAX: u32 = 8;
/// Number of times that the span is halved after the system refused to map a part of the arena. The
/// address space for the attempt's [whole](Table::whole) tables may have been too large.
const REFUSED_HALVINGS_MAX: u32 = 3;
/// The largest ratio of the span to the limit on address space.
const RAISED: usize = 1024;
/// Number of address hints that [`Arena::open`] tries.
const ATTEMPTS_MAX: u32 = 32;
/// The most holes of the arena.
const HOLES_MAX: usize = 16;
/// The most steps over one foreign mapping that lies in the place of the arena or of a table. Each
/// step is twice as long as the previous one.
const HOLE_STEPS_MAX: u32 = 24;

/// The extent of the arena, as offsets from the base.
#[derive(Debug)]
struct Growth {
    /// Start of the next segment.
    end: usize,
    /// By node: number of pages up to the end of its last segment.
    ends: [u32; MAX_NODES],
    /// The end of the mapped part of each table.
    tables: [usize; ALL_TABLES],
    /// Start and end of the holes between segments.
    holes: [(usize, usize); HOLES_MAX],
    hole_count: usize,
}

impl Growth {
    /// Calls `each` with start and length of every part between the holes.
    fn pieces(&self, each: impl Fn(usize, usize)) {
        let mut start = 0;
        for &(from, to) in self.holes[..self.hole_count].iter().chain([&(self.end, self.end)]) {
            if from > start {
                each(start, from - start);
            }
            start = to;
        }
    }

    fn holes(&self) -> &[(usize, usize)] {
        &self.holes[..self.hole_count]
    }
}

/// Calls `each` with start and length of every mapped part of a table whose mapping ends at
/// `mapped`, between the holes of the arena.
fn pieces_of(
    table: &Table,
    holes: &[(usize, usize)],
    mapped: usize,
    page_shift: u32,
    space: AddressSpace,
    mut each: impl FnMut(usize, usize),
) {
    let mut start = 0;
    for &(from, to) in if table.whole || table.shift == 0 { &[] } else { holes } {
        let (end, next) = (table.mapped(from, page_shift, space), table.page_of(to, page_shift));
        if end < next {
            each(table.start + start, end - start);
            start = next;
        }
    }
    if mapped > start {
        each(table.start + start, mapped - start);
    }
}

/// New pages of an arena.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grown {
    pub(crate) first: Pfn,
    pub(crate) pages: u32,
    /// Mapped bytes of all tables of the arena by now.
    pub(crate) table_bytes: usize,
}

#[derive(Debug)]
pub(crate) struct Arena {
    base: usize,
    page_shift: u32,
    /// Number of nodes that share the arena. With one node, no memory is bound.
    pub(crate) nodes: usize,
    limit: AtomicUsize,
    frames: frames::Frames,
    tables: [Table; ALL_TABLES],
    /// Address space for the [whole](Table::whole) tables.
    whole: memory::Range,
    space: AddressSpace,
    span: usize,
    growth: Mutex<Growth>,
    /// The most pages that may be in use; `UNLIMITED` without a budget. Only [`Arena::budget`]
    /// and `set_budget` access it.
    pub(crate) budget: AtomicU32,
    /// Pages of the budget that neither a node nor a table has. Negative after the budget was cut
    /// below the pages in use, or tables grew, until enough pages are given up.
    pub(crate) reserve: AtomicI64,
    /// Number of mappings that the system did not bind to their node: segments, and parts of
    /// segments that were mapped again.
    pub(crate) unbound: AtomicU32,
    pub(crate) huge_runs: HugeRuns,
    /// See [`Arena::table_pages`].
    table_pages: AtomicU32,
    /// The part of `table_pages` that the reserve has paid for.
    pub(crate) charged_tables: AtomicU32,
    /// Whether huge pages were requested for [early](crate::SideTable::early) tables. One huge page
    /// of a table can describe several chunks. So an early table may then have memory for a chunk
    /// whose [mark](Arena::marks) for the table is not set.
    pub(crate) huge_tables: AtomicBool,
}

/// A reference to an arena that several nodes share and that does not move.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared(NonNull<Arena>);

// SAFETY: an arena consists of atomics, a mutex, and values that do not change once it is shared.
unsafe impl Send for Shared {}
// SAFETY: an arena consists of atomics, a mutex, and values that do not change once it is shared.
unsafe impl Sync for Shared {}

impl Shared {
    /// # Safety
    /// `place` leads to an initialised arena. The arena stays there and mapped while any copy of
    /// this value is used.
    pub(crate) unsafe fn at(place: NonNull<Arena>) -> Shared {
        Shared(place)
    }
}

impl Deref for Shared {
    type Target = Arena;

    #[inline]
    fn deref(&self) -> &Arena {
        // SAFETY: the caller of `at` promised an initialised arena that stays there.
        unsafe { self.0.as_ref() }
    }
}

/// Mapped bytes of an [`Arena`].
pub(crate) struct MappedBytes {
    /// Mapped bytes of the arena's memory.
    pub(crate) memory: usize,
    /// Mapped bytes of the arena's tables.
    pub(crate) tables: usize,
}

impl Arena {
    /// Finds a place for an arena of `nodes` nodes and maps the first segment there, for node 0.
    pub(crate) fn open<P: Platform>(platform: &P, shape: &Shape, nodes: usize) -> Result<(Arena, Grown), Errno> {
        let page_shift = platform.page_size().trailing_zeros();
        let chunk = (CHUNK as usize) << page_shift;
        let most = (u32::MAX as usize / CHUNK as usize) * chunk;
        // The program may raise its limit, but hardly by this factor. The whole tables of such a
        // span take about a thousandth of the limit.
        let limit = platform.most_address_space().saturating_mul(RAISED);
        let span = shape.span.min(limit).clamp(chunk, most) / chunk * chunk;
        let space = if platform.address_space_is_scarce() { AddressSpace::Scarce } else { AddressSpace::Ample };
        let (mut last, mut halvings) = (Errno::NOMEM, 0);
        for attempt in 0..ATTEMPTS_MAX {
            if attempt == FIXED_ATTEMPTS_MAX {
                halvings = 0;
            }
            let less = span.checked_shr(halvings).unwrap_or(0).max(span.min(SEGMENTS.1)) / chunk * chunk;
            let hint = match platform.address_hint(attempt, layout(0, less, page_shift, &shape.tables).1) {
                Ok(hint) => hint,
                Err(error) => {
                    (last, halvings) = (error, halvings + 1);
                    continue;
                }
            };
            let base = hint.next_multiple_of(chunk);
            let (mut tables, _) = layout(base, less, page_shift, &shape.tables);
            let bytes = crate::tables::whole_bytes(&tables, less, page_shift);
            let whole = match platform.reserve(bytes) {
                Ok(start) => memory::Range { start, length: bytes },
                Err(error) => {
                    (last, halvings) = (error, halvings + REFUSED_HALVINGS_MAX);
                    continue;
                }
            };
            place_whole(&mut tables, whole.start, less, page_shift);
            let arena = Arena {
                base,
                page_shift,
                nodes,
                limit: AtomicUsize::new(0),
                frames: frames::Frames::at(tables[FRAMES].start),
                tables,
                whole,
                space,
                span: less,
                growth: Mutex::new(Growth {
                    end: 0,
                    ends: [0; MAX_NODES],
                    tables: [0; ALL_TABLES],
                    holes: [(0, 0); HOLES_MAX],
                    hole_count: 0,
                }),
                reserve: AtomicI64::new(0),
                budget: AtomicU32::new(shape.budget.map_or(UNLIMITED, |pages| pages.min(UNLIMITED - 1))),
                unbound: AtomicU32::new(0),
                huge_runs: HugeRuns::new(platform, shape.huge),
                table_pages: AtomicU32::new(0),
                charged_tables: AtomicU32::new(0),
                huge_tables: AtomicBool::new(false),
            };
            // The first segment must not lie behind a hole: the next attempt uses another hint.
            let first = arena.extend(platform, &mut arena.growth.lock(), CHUNK, 0, 0);
            match first {
                Ok(grown) => return Ok((arena, grown)),
                Err(error) => last = error,
            }
            halvings += match last {
                Errno::EXIST => u32::from(attempt >= FIXED_ATTEMPTS_MAX),
                _ => REFUSED_HALVINGS_MAX,
            };
            // SAFETY: the arena was not returned yet, so no other thread uses it.
            unsafe { arena.close(platform) };
        }
        Err(last)
    }

    /// Unmaps everything.
    ///
    /// # Safety
    /// No thread uses the arena, its tables or its memory any more.
    pub(crate) unsafe fn close<P: Platform>(&self, platform: &P) {
        let mut growth = self.growth.lock();
        growth.pieces(|start, length| {
            // SAFETY: `map_segment` mapped this part, which is no hole, and the caller says that no
            // thread uses it.
            unsafe { platform.unmap(self.base + start, length) };
        });
        for (table, mapped) in self.tables.iter().zip(growth.tables).filter(|(table, _)| !table.whole) {
            pieces_of(table, growth.holes(), mapped, self.page_shift, self.space, |start, length| {
                // SAFETY: `map_tables` mapped this part, and the caller says that no thread uses
                // it.
                unsafe { platform.unmap(start, length) };
            });
        }
        // SAFETY: `open` reserved this range, and the caller says that no thread uses it.
        unsafe { platform.unmap(self.whole.start, self.whole.length) };
        growth.tables = [0; ALL_TABLES];
        growth.end = 0;
        growth.hole_count = 0;
        // SAFETY: an empty frame table needs no mapping.
        unsafe { self.frames.grow(0) };
        self.limit.store(0, Relaxed);
    }

    #[inline]
    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// Bytes from the base to the end of the last segment.
    #[inline]
    pub(crate) fn limit(&self) -> usize {
        self.limit.load(Relaxed)
    }

    #[inline]
    pub(crate) fn page_shift(&self) -> u32 {
        self.page_shift
    }

    #[inline]
    pub(crate) fn address(&self, pfn: Pfn) -> usize {
        self.base + (pfn.index() << self.page_shift)
    }

    #[inline]
    pub(crate) fn table(&self, table: usize) -> &Table {
        &self.tables[table]
    }

    /// Populates the parts of the [brief](crate::SideTable::brief) tables for a block that is
    /// populated. Also populates the parts of the early tables if the caller will write to them.
    /// Threads then do not fault on these parts under a lock.
    pub(crate) fn populate_tables<P: Platform>(&self, platform: &P, pfn: Pfn, pages: u32, early: EarlyTables) {
        let (offset, bytes) = (pfn.index() << self.page_shift, (pages as usize) << self.page_shift);
        for (index, table) in self.tables.iter().enumerate().filter(|(_, table)| table.comes_with_block(early)) {
            let named = index.checked_sub(OWN_TABLES).filter(|named| *named < MARKED);
            let fresh = named.is_some_and(|named| self.claim_fresh(named, offset));
            if fresh {
                self.huge_tables.store(true, Relaxed);
            }
            if table.populate(platform, offset..offset + bytes, 1 << self.page_shift, fresh).is_ok()
                && let Some(named) = named
            {
                self.mark_table(pfn, named);
            }
        }
    }

    /// Whether side table `named` may get a huge page for `offset`. It may if nothing was written
    /// yet to the bytes that the huge page would hold. If so, marks the first chunk that these
    /// bytes describe. A table gets no huge page:
    /// * if there are several nodes, since the huge page would lie on one of them;
    /// * if address space is scarce, since the table may not be mapped for all of the huge page;
    /// * with a budget, since the whole huge page would be charged to the budget.
    ///
    /// The result is a hint. If another thread writes there before the caller allows huge pages,
    /// the system supplies small pages. Because of the mark, few callers get `true`. A caller that
    /// allows and forbids huge pages makes all faulting threads wait.
    fn claim_fresh(&self, named: usize, offset: usize) -> bool {
        let Some(window) = self.tables[OWN_TABLES + named].window(offset) else { return false };
        if self.nodes > 1 || self.budget().is_some() || self.space == AddressSpace::Scarce {
            return false;
        }
        let pages = |offset: usize| (offset.min(self.limit()) >> self.page_shift) as u32;
        let mark = |page: u32| self.marks(Pfn(page));
        let first = pages(window.start);
        // In a hole of the arena, a foreign mapping may lie in place of the table.
        let unwritten = |page: u32| self.node(Pfn(page)).is_some() && mark(page).load(Relaxed) >> named & 1 == 0;
        // The huge page holds the marked chunk's bytes, too. A chunk's marks are one atomic byte,
        // so of two threads that find the chunk unmarked one succeeds.
        (first..pages(window.end)).step_by(CHUNK as usize).all(unwritten) && self.mark_table(Pfn(first), named)
    }

    /// Records that side table `named` has memory for the chunk of `pfn`. Returns `true` if that
    /// was not recorded before.
    pub(crate) fn mark_table(&self, pfn: Pfn, named: usize) -> bool {
        let is_new = self.marks(pfn).fetch_or(1 << named, Relaxed) >> named & 1 == 0;
        if is_new {
            self.table_pages.fetch_add(self.table_share(named), Relaxed);
        }
        is_new
    }

    /// Records that no side table has memory for the chunk of `pfn`, except those with a bit in
    /// `kept`.
    pub(crate) fn unmark_tables(&self, pfn: Pfn, kept: u8) {
        let marked = self.marks(pfn).fetch_and(kept, Relaxed) & !kept;
        let share = |named: usize| u32::from(marked >> named & 1) * self.table_share(named);
        self.table_pages.fetch_sub((0..MARKED).map(share).sum(), Relaxed);
    }

    /// Pages of side table `named` for one chunk if the table is droppable; otherwise 0.
    fn table_share(&self, named: usize) -> u32 {
        let table = self.table(OWN_TABLES + named);
        if table.droppable { CHUNK >> table.shift } else { 0 }
    }

    /// The most pages that may be in use; `None` without a budget.
    #[inline]
    pub(crate) fn budget(&self) -> Option<u32> {
        // Acquire: pairs with `NodePages::change`, which begins the reserve before. The nodes'
        // parts decide whether pages fit. They change under the zones' locks.
        Some(self.budget.load(Acquire)).filter(|&pages| pages != UNLIMITED)
    }

    /// Upper bound of the resident pages of droppable side tables. Counts all pages of a table for
    /// each chunk for which the table was written to.
    pub(crate) fn table_pages(&self) -> u32 {
        // Relaxed: a count that publishes no other data. It may lack concurrent changes.
        self.table_pages.load(Relaxed)
    }

    /// Forbids huge pages again in those parts of a range that belong to a node and to no run.
    /// Chunks of other nodes and foreign mappings may lie in between. Returns `false` if the system
    /// refused for a part.
    pub(crate) fn forbid_huge_pages<P: Platform>(&self, platform: &P, pages: Range<u32>, node: usize) -> bool {
        let (mut start, mut done) = (pages.start, true);
        while start < pages.end {
            let whose = |page| (self.node(Pfn(page)), self.is_in_run(Pfn(page)));
            let (owner, mut end) = (whose(start), start);
            while end < pages.end && whose(end) == owner {
                end = (end / HUGE.pages() + 1) * HUGE.pages();
            }
            if owner == (Some(node), false) {
                let bytes = ((end - start) as usize) << self.page_shift;
                done &= platform.huge_pages(self.address(Pfn(start)), bytes, HugePages::Forbidden).is_ok();
            }
            start = end;
        }
        done
    }

    /// Calls `each` with kind, start and length of every mapping.
    pub(crate) fn each_mapping(&self, each: &mut dyn FnMut(MappingKind, usize, usize)) {
        // `each` runs without the mutex, since it may take long.
        let (mut tables, mut pieces, mut count) = ([0; ALL_TABLES], [(0, 0); HOLES_MAX + 1], 0);
        let (holes, hole_count);
        {
            let growth = self.growth.lock();
            tables.copy_from_slice(&growth.tables);
            (holes, hole_count) = (growth.holes, growth.hole_count);
            let mut start = 0;
            for &(from, to) in growth.holes().iter().chain([&(growth.end, growth.end)]) {
                pieces[count] = (start, from - start);
                count += 1;
                start = to;
            }
        }
        pieces[..count].iter().for_each(|&(start, length)| each(MappingKind::Arena, self.base + start, length));
        each(MappingKind::OwnTables, self.whole.start, self.whole.length);
        let others = self.tables.iter().zip(tables).enumerate().filter(|(_, (table, _))| !table.whole);
        for (index, (table, mapped)) in others {
            let part = index.checked_sub(OWN_TABLES).map_or(MappingKind::OwnTables, MappingKind::Table);
            let holes = &holes[..hole_count];
            pieces_of(table, holes, mapped, self.page_shift, self.space, |start, length| each(part, start, length));
        }
    }

    /// Mapped bytes.
    pub(crate) fn mapped(&self) -> MappedBytes {
        let growth = self.growth.lock();
        let holes: usize = growth.holes().iter().map(|(from, to)| to - from).sum();
        MappedBytes { memory: growth.end - holes, tables: self.table_bytes(&growth) }
    }

    fn table_bytes(&self, growth: &Growth) -> usize {
        let mut bytes = 0;
        for (table, mapped) in self.tables.iter().zip(growth.tables) {
            let add = |_, length: usize| bytes += length;
            pieces_of(table, growth.holes(), mapped, self.page_shift, self.space, add);
        }
        bytes
    }

    #[inline]
    pub(crate) fn frames(&self) -> &frames::Frames {
        &self.frames
    }

    /// The marks of a page's chunk. The low bits name those of the first [`MARKED`] side tables
    /// that may have memory for the chunk. Above them is one bit per huge page.
    #[inline]
    pub(crate) fn marks(&self, pfn: Pfn) -> &AtomicU8 {
        self.about_chunk(pfn, MARKS)
    }

    /// The node of a page; `None` for a page in a hole of the arena.
    #[inline]
    pub(crate) fn node(&self, pfn: Pfn) -> Option<usize> {
        // Relaxed: `publish` stores it before a thread gets the page. A zone's mutex publishes it.
        usize::from(self.about_chunk(pfn, NODE).load(Relaxed)).checked_sub(1)
    }

    /// A byte of a page's chunk: [`MARKS`], [`NODE`] or [`IN_RUNS`].
    #[inline]
    pub(crate) fn about_chunk(&self, pfn: Pfn, byte: usize) -> &AtomicU8 {
        // The frame is looked up for its range check only. The chunk table is mapped up to the end
        // of the arena, in holes as well.
        let _ = self.frames.frame(pfn);
        let address = self.tables[CHUNKS].start + pfn.index() / CHUNK as usize * ABOUT_CHUNK + byte;
        // SAFETY: the frame's check passed, so the chunk table is mapped there. All accesses are
        // atomic.
        unsafe { AtomicU8::from_ptr(core::ptr::with_exposed_provenance_mut(address)) }
    }

    /// Bytes of a map with a bit per chunk, for the largest extent of the arena.
    pub(crate) fn chunk_map(&self) -> usize {
        self.tables[FREE_CHUNKS].bytes(self.span, self.page_shift)
    }

    /// Maps at least `pages` more pages in one piece for a node, and passes them to `publish`
    /// before another thread can grow the arena.
    ///
    /// `seen` is the number of pages up to the end of the node's last segment when the caller found
    /// its pages too few. If the node has more by now, another thread grew the arena for it, and
    /// nothing happens.
    pub(crate) fn grow<P: Platform>(
        &self,
        platform: &P,
        node: usize,
        pages: u32,
        seen: u32,
        publish: impl FnOnce(Grown),
    ) -> Result<(), Errno> {
        let mut growth = self.growth.lock();
        if growth.ends[node] != seen {
            return Ok(());
        }
        publish(self.extend(platform, &mut growth, pages, HOLE_STEPS_MAX, node)?);
        Ok(())
    }

    fn extend<P: Platform>(
        &self,
        platform: &P,
        growth: &mut Growth,
        pages: u32,
        hole_steps: u32,
        node: usize,
    ) -> Result<Grown, Errno> {
        let chunk = (CHUNK as usize) << self.page_shift;
        let need = ((pages as usize) << self.page_shift).next_multiple_of(chunk);
        let small = SMALL_SEGMENT.max(need).next_multiple_of(chunk);
        let doubled = growth.end.clamp(SEGMENTS.0, SEGMENTS.1).max(need).next_multiple_of(chunk);
        let usual = if self.space == AddressSpace::Scarce { small } else { doubled };
        // Start of the next segment, past foreign mappings found in this call.
        let mut start = growth.end;
        for step in 0..=hole_steps {
            let mut failed = Errno::NOMEM;
            for size in [usual, small] {
                let size = size.min(self.span.saturating_sub(start));
                if size < need {
                    return Err(Errno::NOMEM);
                }
                match self.map_segment(platform, growth, start, size) {
                    Ok(()) => {
                        self.advise(platform, self.base + start, size, node);
                        return Ok(self.publish(growth, start, size, node));
                    }
                    Err(failure) => failed = failure,
                }
                if size <= small {
                    break;
                }
            }
            if failed != Errno::EXIST || growth.hole_count == HOLES_MAX {
                return Err(failed);
            }
            start += chunk << step;
        }
        Err(Errno::EXIST)
    }

    /// Maps a segment, then its tables. On failure, neither stays mapped.
    fn map_segment<P: Platform>(
        &self,
        platform: &P,
        growth: &mut Growth,
        start: usize,
        size: usize,
    ) -> Result<(), Errno> {
        // Refuses a size that the system can never fill. Otherwise the kernel would kill the
        // process later.
        if size > SEGMENTS.1 && !platform.is_grantable(size) {
            return Err(Errno::NOMEM);
        }
        platform.map_at(self.base + start, size)?;
        let before = growth.tables;
        let mapped = self.map_tables(platform, &mut growth.tables, start, size);
        if mapped.is_err() {
            // SAFETY: `map_at` just mapped this range, and no other thread uses it yet.
            unsafe { platform.unmap(self.base + start, size) };
            for (index, table) in self.tables.iter().enumerate().filter(|(_, table)| !table.whole) {
                let (from, to) = (self.first_unmapped(table, before[index], start), growth.tables[index]);
                if to > from {
                    // SAFETY: `map_tables` just mapped this part, and no other thread uses it yet.
                    unsafe { platform.unmap(table.start + from, to - from) };
                    growth.tables[index] = before[index];
                }
            }
        }
        mapped
    }

    /// Start of the next mapping of a table whose mapping ends at `mapped`, for a segment from
    /// `start` on.
    fn first_unmapped(&self, table: &Table, mapped: usize, start: usize) -> usize {
        mapped.max(table.page_of(start, self.page_shift))
    }

    /// Maps the parts of the tables for a segment, where they are not mapped yet.
    fn map_tables<P: Platform>(
        &self,
        platform: &P,
        tables: &mut [usize; ALL_TABLES],
        start: usize,
        size: usize,
    ) -> Result<(), Errno> {
        for (table, mapped) in self.tables.iter().zip(tables) {
            let needed = table.mapped(start + size, self.page_shift, self.space);
            if table.shift == 0 || needed <= *mapped {
                continue;
            }
            if table.whole {
                // SAFETY: the table lies in the range that `open` reserved, and this part was not
                // open yet.
                unsafe { platform.open(table.start + *mapped, needed - *mapped)? };
            } else {
                let from = self.first_unmapped(table, *mapped, start);
                platform.map_at(table.start + from, needed - from)?;
                table.advise(platform, from..needed);
            }
            *mapped = needed;
        }
        Ok(())
    }

    /// Binds a fresh mapping to a node, and forbids huge pages in it.
    fn advise<P: Platform>(&self, platform: &P, address: usize, length: usize, node: usize) {
        // Only population and long runs allow huge pages. Elsewhere the kernel could fill a
        // released range with a huge page.
        let _ = platform.huge_pages(address, length, HugePages::Forbidden);
        let refused = self.nodes > 1 && platform.bind(address, length, node).is_err();
        // Without a binding, memory comes from the node of the CPU that touches it first. That is
        // mostly `node`.
        self.unbound.fetch_add(refused.into(), Relaxed);
    }

    /// Maps a range of the arena again if all of it is unmapped. Changes nothing if it is mapped.
    /// Returns `false` if the system refused.
    pub(crate) fn map_again<P: Platform>(&self, platform: &P, pfn: Pfn, pages: u32, node: usize) -> bool {
        let (address, length) = (self.address(pfn), (pages as usize) << self.page_shift);
        let answer = platform.map_at(address, length);
        if answer.is_ok() {
            self.advise(platform, address, length, node);
        }
        matches!(answer, Ok(()) | Err(Errno::EXIST))
    }

    fn publish(&self, growth: &mut Growth, start: usize, size: usize, node: usize) -> Grown {
        if start > growth.end {
            growth.holes[growth.hole_count] = (growth.end, start);
            growth.hole_count += 1;
        }
        growth.end = start + size;
        // SAFETY: `map_segment` mapped the frame table for every segment up to there, and only
        // `close` unmaps it. No code reads or writes frames in holes.
        unsafe { self.frames.grow((growth.end >> self.page_shift) as u32) };
        let (first, pages) = (Pfn((start >> self.page_shift) as u32), (size >> self.page_shift) as u32);
        for chunk in (first.0..first.0 + pages).step_by(CHUNK as usize) {
            self.about_chunk(Pfn(chunk), NODE).store(node as u8 + 1, Relaxed);
        }
        growth.ends[node] = first.0 + pages;
        self.limit.store(growth.end, Relaxed);
        Grown { first, pages, table_bytes: self.table_bytes(growth) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::shape;
    use neap_testing::virtual_platform::Virtual;

    #[test]
    fn small_address_space_has_a_large_arena() {
        // 39 and 42 bits are those of arm64 with pages of 4 and 64 KiB. A part is in use already.
        for bits in [38, 39, 42, 44, 47] {
            let machine = Virtual::new(4096, 1).with_address_space((1 << bits) / 8 * 7);
            let (arena, _) = Arena::open(&machine, &Shape { span: 16 << 40, ..shape(None) }, 1).unwrap();
            assert!(arena.span >= 1usize << (bits - 2).min(43), "{bits} bits: {:#x}", arena.span);
            // SAFETY: no thread uses the arena.
            unsafe { arena.close(&machine) };
        }
    }
}
