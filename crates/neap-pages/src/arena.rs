//! The arena: a window of address space that grows upwards from a base, and the tables beside it.
//!
//! Sits between the platform's mappings and the zone. The window is aimed for, not reserved:
//! segments are mapped one after the other as they are needed, and every table lies at an
//! arithmetic address above the window, so that the byte of a table for an address is a shift and
//! an add away. Every table is mapped for every segment. Where a foreign mapping lies in the way of
//! a segment, or of a part of a table that speaks of one, the arena has a hole: of most tables
//! nothing is mapped there. Growth runs under its own mutex, never under the zone's. The nodes of a
//! machine share an arena: a segment belongs to the node that it was mapped for, and a byte per
//! chunk says to which. Gives nothing back before [`Arena::close`]; what is inside a mapped page is
//! not its concern.

use crate::frames;
use crate::huge_runs::HugeRuns;
use crate::pages::{MARKED, Shape};
use crate::populate::HUGE;
use crate::survey::Part;
use crate::tables::{ALL_TABLES, CHUNKS, FRAMES, FREE_CHUNKS, OWN_TABLES, Table, layout, place_whole, whole_bytes};
use core::ops::{Deref, Range};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering::Relaxed};
use neap_base::platform::Errno;
use neap_base::platform::nodes::MAX_NODES;
use neap_base::{Mutex, Pfn, Platform};

/// Pages of a chunk: the unit of growth, and the largest block of the buddy allocator.
pub(crate) const CHUNK: u32 = 1024;

/// The byte about a chunk that says where it may have memory: see [`Arena::marks`].
const MARKS: usize = 0;
/// The byte about a chunk that names its node, from 1; 0 in a foreign mapping.
const NODE: usize = 1;
/// The byte about a chunk with a bit per huge page: whether it is allowed there for a run.
pub(crate) const IN_RUNS: usize = 2;
/// Bytes about a chunk.
const ABOUT_CHUNK: usize = 4;

/// What is taken at once where address space costs nothing: as much again as there is, from the first to the largest of
/// these. Not the largest at once, because a program that locks its memory (`mlockall`) has all of it populated.
const SEGMENTS: (usize, usize) = (32 << 20, 1 << 30);
/// What is taken at once where it does.
const SMALL_SEGMENT: usize = 4 << 20;
/// The largest alignment that a run may ask for.
pub const MOST_ALIGNMENT: usize = 1 << 30;
/// Attempts of the platform after which its hints are for half the span of the one before.
const FULL_ATTEMPTS: u32 = 8;
/// How often the span is halved after an attempt that the system refused: its whole tables may have
/// been too much.
const REFUSED_HALVINGS: u32 = 3;
/// How many times the limit on address space the span may be.
const RAISED: usize = 1024;
/// Hints tried at all.
const ATTEMPTS: u32 = 32;
/// Foreign mappings that the arena grows around, in its whole life.
const HOLES: usize = 16;
/// Steps, each twice as long as the one before, over one foreign mapping in the arena or behind a
/// table.
const HOLE_STEPS: u32 = 24;

/// Offsets from the base: what growth has done so far.
#[derive(Debug)]
struct Growth {
    /// Where the next segment begins.
    end: usize,
    /// By node: the pages up to the end of its last segment.
    ends: [u32; MAX_NODES],
    /// How far each table is mapped.
    tables: [usize; ALL_TABLES],
    /// Start and end of the parts between segments.
    holes: [(usize, usize); HOLES],
    hole_count: usize,
}

impl Growth {
    /// Start and length of everything between the holes.
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

/// Start and length of every mapped part of a table that is mapped as far as `mapped`, between the
/// holes of the arena.
fn pieces_of(
    table: &Table,
    holes: &[(usize, usize)],
    mapped: usize,
    page_shift: u32,
    scarce: bool,
    mut each: impl FnMut(usize, usize),
) {
    let mut start = 0;
    for &(from, to) in if table.whole || table.shift == 0 { &[] } else { holes } {
        let (end, next) = (table.mapped(from, page_shift, scarce), table.page_of(to, page_shift));
        if end < next {
            each(table.start + start, end - start);
            start = next;
        }
    }
    if mapped > start {
        each(table.start + start, mapped - start);
    }
}

/// Pages that came new: the first, and how many.
pub(crate) type Grown = (Pfn, u32);

#[derive(Debug)]
pub(crate) struct Arena {
    base: usize,
    page_shift: u32,
    /// How many nodes share it. Where it is one, nothing is bound.
    pub(crate) nodes: usize,
    limit: AtomicUsize,
    frames: frames::Frames,
    tables: [Table; ALL_TABLES],
    /// Address space for the whole tables, and its bytes.
    whole: (usize, usize),
    scarce: bool,
    span: usize,
    growth: Mutex<Growth>,
    /// Pages of the budget that no node has: see [`Zone::acquire`](crate::zone::Zone::acquire).
    pub(crate) reserve: AtomicU32,
    /// Segments, and parts of one mapped again, that the system would not bind to their node.
    pub(crate) unbound: AtomicU32,
    pub(crate) huge_runs: HugeRuns,
    /// Pages are limited.
    is_limited: bool,
    /// See [`Arena::table_pages`].
    table_pages: AtomicU32,
    /// Whether huge pages were asked for behind early tables: then what these say of any chunk may be there.
    pub(crate) huge_tables: AtomicBool,
}

/// An arena that several may use, as long as it stays where it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared(NonNull<Arena>);

// SAFETY: an arena is atomics and a mutex.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// # Safety
    /// The arena stays there, initialised, for as long as any copy of this value is used.
    pub(crate) unsafe fn at(place: NonNull<Arena>) -> Shared {
        Shared(place)
    }
}

impl Deref for Shared {
    type Target = Arena;

    #[inline]
    fn deref(&self) -> &Arena {
        // SAFETY: as `at` was promised.
        unsafe { self.0.as_ref() }
    }
}

impl Arena {
    /// Finds a place for so many nodes and maps the first segment there, for node 0.
    pub(crate) fn open<P: Platform>(platform: &P, shape: &Shape, nodes: usize) -> Result<(Arena, Grown), Errno> {
        let page_shift = platform.page_size().trailing_zeros();
        let chunk = (CHUNK as usize) << page_shift;
        let most = (u32::MAX as usize / CHUNK as usize) * chunk;
        // A limit may be raised, but hardly so much; the whole tables of such a span are less than
        // a thousandth of it.
        let limit = platform.most_address_space().saturating_mul(RAISED);
        let span = shape.span.min(limit).clamp(chunk, most) / chunk * chunk;
        let scarce = platform.address_space_is_scarce();
        let (mut last, mut refused) = (Errno::NOMEM, 0);
        for attempt in 0..ATTEMPTS {
            let Some(hint) = platform.address_hint(attempt, layout(0, span, page_shift, &shape.tables).1) else {
                break;
            };
            let base = hint.next_multiple_of(chunk);
            let halvings = attempt.saturating_sub(FULL_ATTEMPTS).max(refused);
            let less = (span >> halvings).max(span.min(SEGMENTS.1)) / chunk * chunk;
            let (mut tables, _) = layout(base, less, page_shift, &shape.tables);
            let bytes = whole_bytes(&tables, less, page_shift);
            let whole = match platform.reserve(bytes) {
                Ok(address) => (address, bytes),
                Err(error) => {
                    (last, refused) = (error, refused + REFUSED_HALVINGS);
                    continue;
                }
            };
            place_whole(&mut tables, whole.0, less, page_shift);
            let arena = Arena {
                base,
                page_shift,
                nodes,
                limit: AtomicUsize::new(0),
                frames: frames::Frames::at(tables[FRAMES].start),
                tables,
                whole,
                scarce,
                span: less,
                growth: Mutex::new(Growth {
                    end: 0,
                    ends: [0; MAX_NODES],
                    tables: [0; ALL_TABLES],
                    holes: [(0, 0); HOLES],
                    hole_count: 0,
                }),
                reserve: AtomicU32::new(0),
                unbound: AtomicU32::new(0),
                huge_runs: HugeRuns::new(platform, shape.huge),
                is_limited: shape.budget.is_some(),
                table_pages: AtomicU32::new(0),
                huge_tables: AtomicBool::new(false),
            };
            // Growing around a hole right at the start would only mean that the aim was bad: that is the next attempt.
            let first = arena.extend(platform, &mut arena.growth.lock(), CHUNK, 0, 0);
            match first {
                Ok(grown) => return Ok((arena, grown)),
                Err(error) => last = error,
            }
            if last != Errno::EXIST {
                refused += REFUSED_HALVINGS;
            }
            // SAFETY: nobody has seen this arena.
            unsafe { arena.close(platform) };
        }
        Err(last)
    }

    /// Takes every mapping away.
    ///
    /// # Safety
    /// Nobody uses the arena, its tables or its memory any more.
    pub(crate) unsafe fn close<P: Platform>(&self, platform: &P) {
        let mut growth = self.growth.lock();
        growth.pieces(|start, length| {
            // SAFETY: mapped by `map_segment`, not a hole, and unused as the caller promises.
            unsafe { platform.unmap(self.base + start, length) };
        });
        for (table, mapped) in self.tables.iter().zip(growth.tables).filter(|(table, _)| !table.whole) {
            pieces_of(table, growth.holes(), mapped, self.page_shift, self.scarce, |start, length| {
                // SAFETY: mapped by `map_tables`, and unused as the caller promises.
                unsafe { platform.unmap(start, length) };
            });
        }
        // SAFETY: reserved by `open`, and unused as the caller promises.
        unsafe { platform.unmap(self.whole.0, self.whole.1) };
        growth.tables = [0; ALL_TABLES];
        growth.end = 0;
        growth.hole_count = 0;
        // SAFETY: an empty table needs nothing mapped.
        unsafe { self.frames.grow(0) };
        self.limit.store(0, Relaxed);
    }

    #[inline]
    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// Bytes from the base up to the end of the last segment.
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

    /// Puts memory behind what the tables say about a block that is populated, so that none of it is faulted in under
    /// somebody's lock: the [brief](crate::SideTable::brief) ones, and if `early`, those that are to be there early.
    pub(crate) fn populate_tables<P: Platform>(&self, platform: &P, pfn: Pfn, pages: u32, early: bool) {
        let (offset, bytes) = (pfn.index() << self.page_shift, (pages as usize) << self.page_shift);
        for (index, table) in self.tables.iter().enumerate().filter(|(_, table)| table.brief || early && table.early) {
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

    /// Whether what a named table says of a block may come as a huge page: nobody has written to
    /// any of that yet. Not where nodes share it, since it would lie on one of them; nor where
    /// address space is scarce, since it may not be mapped as a whole; nor under a limit, which
    /// would have to pay for the whole of it. A hint: others may write now, or put small pages
    /// there before whoever was told so has allowed huge ones, and then small ones come. Mostly one
    /// caller is told so: each that allows and forbids huge pages stops all that fault.
    fn claim_fresh(&self, named: usize, offset: usize) -> bool {
        let Some(window) = self.tables[OWN_TABLES + named].window(offset) else { return false };
        if self.nodes > 1 || self.is_limited || self.scarce {
            return false;
        }
        let pages = |offset: usize| (offset.min(self.limit()) >> self.page_shift) as u32;
        let mark = |page: u32| self.marks(Pfn(page));
        let first = pages(window.start);
        // In a hole of the arena the table may be a foreign mapping.
        let unwritten = |page: u32| self.node(Pfn(page)).is_some() && mark(page).load(Relaxed) >> named & 1 == 0;
        // Marked is what the huge page speaks of in any case. A chunk's marks are one word, so of two who find it unmarked one is told.
        (first..pages(window.end)).step_by(CHUNK as usize).all(unwritten) && self.mark_table(Pfn(first), named)
    }

    /// Notes that named table `named` has memory for the chunk of `pfn`. Returns whether it had
    /// none so far.
    pub(crate) fn mark_table(&self, pfn: Pfn, named: usize) -> bool {
        let is_new = self.marks(pfn).fetch_or(1 << named, Relaxed) >> named & 1 == 0;
        if is_new {
            self.table_pages.fetch_add(self.table_share(named), Relaxed);
        }
        is_new
    }

    /// Notes that no table has memory for the chunk of `pfn`. Returns a bit for each named table
    /// that had some.
    pub(crate) fn unmark_tables(&self, pfn: Pfn) -> u8 {
        let marked = self.marks(pfn).swap(0, Relaxed);
        let share = |named: usize| u32::from(marked >> named & 1) * self.table_share(named);
        self.table_pages.fetch_sub((0..MARKED).map(share).sum(), Relaxed);
        marked
    }

    /// Pages of a named table about one chunk.
    fn table_share(&self, named: usize) -> u32 {
        let table = self.table(OWN_TABLES + named);
        if table.droppable { CHUNK >> table.shift } else { 0 }
    }

    /// Pages that named tables have at most: all of their pages about the chunks for which they
    /// were written to.
    pub(crate) fn table_pages(&self) -> u32 {
        // Relaxed: a bound that follows late by what other threads write at the moment.
        self.table_pages.load(Relaxed)
    }

    /// Forbids huge pages again in the chunks of a range that are of a node and in no run: between them others may lie, and foreign mappings.
    /// Answers whether the system did so everywhere.
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
                done &= platform.huge_pages(self.address(Pfn(start)), bytes, false).is_ok();
            }
            start = end;
        }
        done
    }

    /// Calls `each` with everything that is mapped: what of, start, and length.
    pub(crate) fn each_mapping(&self, each: &mut dyn FnMut(Part, usize, usize)) {
        // Not under the mutex: whoever is told may take its time.
        let (mut tables, mut pieces, mut count) = ([0; ALL_TABLES], [(0, 0); HOLES + 1], 0);
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
        pieces[..count].iter().for_each(|&(start, length)| each(Part::Arena, self.base + start, length));
        each(Part::OwnTables, self.whole.0, self.whole.1);
        let others = self.tables.iter().zip(tables).enumerate().filter(|(_, (table, _))| !table.whole);
        for (index, (table, mapped)) in others {
            let part = index.checked_sub(OWN_TABLES).map_or(Part::OwnTables, Part::Table);
            let holes = &holes[..hole_count];
            pieces_of(table, holes, mapped, self.page_shift, self.scarce, |start, length| each(part, start, length));
        }
    }

    /// Bytes of the arena, and of its tables, that are mapped.
    pub(crate) fn mapped(&self) -> (usize, usize) {
        let growth = self.growth.lock();
        let holes: usize = growth.holes().iter().map(|(from, to)| to - from).sum();
        let mut tables = 0;
        for (table, mapped) in self.tables.iter().zip(growth.tables) {
            let add = |_, length: usize| tables += length;
            pieces_of(table, growth.holes(), mapped, self.page_shift, self.scarce, add);
        }
        (growth.end - holes, tables)
    }

    #[inline]
    pub(crate) fn frames(&self) -> &frames::Frames {
        &self.frames
    }

    /// The byte of the chunk of a page: a bit for each of the first [`MARKED`] named tables that may have memory there, and above those one per huge page.
    #[inline]
    pub(crate) fn marks(&self, pfn: Pfn) -> &AtomicU8 {
        self.about_chunk(pfn, MARKS)
    }

    /// The bit, in a chunk's byte of [`Arena::marks`], of a huge page of it: above those of the named tables.
    fn huge_bit(pfn: Pfn) -> u8 {
        const { assert!(MARKED as u32 + CHUNK / HUGE.pages() <= u8::BITS) };
        1 << (MARKED as u32 + pfn.0 / HUGE.pages() % (CHUNK / HUGE.pages()))
    }

    /// Notes that a page is part of a huge one.
    pub(crate) fn note_huge(&self, pfn: Pfn) {
        self.marks(pfn).fetch_or(Arena::huge_bit(pfn), Relaxed);
    }

    /// Whether a page may be part of a huge one; not any more.
    pub(crate) fn forget_huge(&self, pfn: Pfn) -> bool {
        let (marks, bit) = (self.marks(pfn), Arena::huge_bit(pfn));
        marks.load(Relaxed) & bit != 0 && marks.fetch_and(!bit, Relaxed) & bit != 0
    }

    /// The node of a page; `None` for one in a foreign mapping.
    #[inline]
    pub(crate) fn node(&self, pfn: Pfn) -> Option<usize> {
        // Relaxed: written before the page is known to anybody.
        usize::from(self.about_chunk(pfn, NODE).load(Relaxed)).checked_sub(1)
    }

    /// One of the bytes about the chunk of a page: [`MARKS`], [`NODE`] or [`IN_RUNS`].
    #[inline]
    pub(crate) fn about_chunk(&self, pfn: Pfn, byte: usize) -> &AtomicU8 {
        // The frame is asked for its check alone: the chunk table is open as far as the arena
        // reaches, in holes as well.
        let _ = self.frames.frame(pfn);
        let address = self.tables[CHUNKS].start + pfn.index() / CHUNK as usize * ABOUT_CHUNK + byte;
        // SAFETY: mapped, and accessed as atomic bytes alone.
        unsafe { AtomicU8::from_ptr(core::ptr::with_exposed_provenance_mut(address)) }
    }

    /// Bytes of a map with a bit per chunk, as far as the arena can ever grow.
    pub(crate) fn chunk_map(&self) -> usize {
        self.tables[FREE_CHUNKS].bytes(self.span, self.page_shift)
    }

    /// Maps at least `pages` more in one piece for a node, and tells `publish` about them before anybody else can grow.
    ///
    /// `seen` is the number of pages up to the end of what the node had when the caller found that too little: if it has
    /// more by now, somebody else grew the arena for it and nothing happens here.
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
        publish(self.extend(platform, &mut growth, pages, HOLE_STEPS, node)?);
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
        let usual = if self.scarce { small } else { doubled };
        // Where the next segment would begin, past foreign mappings found in this call.
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
            if failed != Errno::EXIST || growth.hole_count == HOLES {
                return Err(failed);
            }
            start += chunk << step;
        }
        Err(Errno::EXIST)
    }

    /// Maps a segment, then its tables. Where that fails nothing of either is mapped.
    fn map_segment<P: Platform>(
        &self,
        platform: &P,
        growth: &mut Growth,
        start: usize,
        size: usize,
    ) -> Result<(), Errno> {
        // What the system could never fill is refused now, not by a kill later.
        if size > SEGMENTS.1 && !platform.is_grantable(size) {
            return Err(Errno::NOMEM);
        }
        platform.map_at(self.base + start, size)?;
        let before = growth.tables;
        let mapped = self.map_tables(platform, &mut growth.tables, start, size);
        if mapped.is_err() {
            // SAFETY: mapped above, and nobody has seen it.
            unsafe { platform.unmap(self.base + start, size) };
            for (index, table) in self.tables.iter().enumerate().filter(|(_, table)| !table.whole) {
                let (from, to) = (self.first_unmapped(table, before[index], start), growth.tables[index]);
                if to > from {
                    // SAFETY: mapped by `map_tables` a moment ago, and nobody has seen it.
                    unsafe { platform.unmap(table.start + from, to - from) };
                    growth.tables[index] = before[index];
                }
            }
        }
        mapped
    }

    /// Where the next mapping of a table begins that is mapped as far as `mapped`, for a segment
    /// from `start` on.
    fn first_unmapped(&self, table: &Table, mapped: usize, start: usize) -> usize {
        mapped.max(table.page_of(start, self.page_shift))
    }

    /// Maps what the tables say of a segment, as far as it is not mapped yet.
    fn map_tables<P: Platform>(
        &self,
        platform: &P,
        tables: &mut [usize; ALL_TABLES],
        start: usize,
        size: usize,
    ) -> Result<(), Errno> {
        for (table, mapped) in self.tables.iter().zip(tables) {
            let needed = table.mapped(start + size, self.page_shift, self.scarce);
            if table.shift == 0 || needed <= *mapped {
                continue;
            }
            if table.whole {
                // SAFETY: all of the table lies in what `open` has reserved.
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

    /// Says of a fresh mapping of which node its memory is to be.
    fn advise<P: Platform>(&self, platform: &P, address: usize, length: usize, node: usize) {
        // Huge pages come by population, and to long runs: another range that the kernel may refill would never stay released.
        let _ = platform.huge_pages(address, length, false);
        let refused = self.nodes > 1 && platform.bind(address, length, node).is_err();
        // Its memory comes from wherever it is touched first, which is mostly there.
        self.unbound.fetch_add(refused.into(), Relaxed);
    }

    /// Maps a range of the arena again where somebody has unmapped all of it; where it is mapped nothing happens. `false` if that was refused.
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
        // SAFETY: `map_segment` has mapped the frame table for every segment that far, and only
        // `close` unmaps it. Frames in holes are nobody's.
        unsafe { self.frames.grow((growth.end >> self.page_shift) as u32) };
        let (first, pages) = (Pfn((start >> self.page_shift) as u32), (size >> self.page_shift) as u32);
        for chunk in (first.0..first.0 + pages).step_by(CHUNK as usize) {
            self.about_chunk(Pfn(chunk), NODE).store(node as u8 + 1, Relaxed);
        }
        growth.ends[node] = first.0 + pages;
        self.limit.store(growth.end, Relaxed);
        (first, pages)
    }
}
