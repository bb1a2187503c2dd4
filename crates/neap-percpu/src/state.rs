//! The allocator's state: where an allocation goes, and the consequences of a free.
//!
//! The state consists of chunks, lists and rows under one lock. No thread holds the lock over a
//! system call. The worker decides when pages are populated and released, with one exception. If a
//! quarter of a chunk is populated and empty, and other chunks hold enough reserve, `free`
//! *isolates* the chunk. Its empty pages then leave the reserve. No row is placed in it until the
//! worker has emptied it or made it available again.

use crate::chunk::{Chunks, Header, NONE, NewPages};
use crate::chunk_buckets::{ChunkBuckets, slot};
use crate::geometry::{CLASSES, ChunkOffset, GRANULE, Geometry, LINE, is_multiple};
use crate::handle::{Handle, Invalid};
use crate::rows::{ListEnd, Owner, Row, Rows};
use core::ops::Range;
use neap_base::bitmap;

/// Maximum number of an owner's rows that are tried for room.
const TRIED_ROWS_MAX: usize = 8;

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) chunks: Chunks,
    pub(crate) lists: ChunkBuckets,
    pub(crate) rows: Rows,
    /// Number of populated pages. The next three fields count empty pages in chunks that are not
    /// isolated (the reserve), empty pages in isolated chunks, and grains in rows.
    pub(crate) populated: usize,
    pub(crate) empty: usize,
    pub(crate) isolated_empty: usize,
    pub(crate) taken: usize,
    /// The smallest reserve since the last tick.
    pub(crate) empty_low: usize,
    /// Whether a caller that may not wait was refused.
    pub(crate) starved: bool,
    /// Whether the worker has work.
    pub(crate) wanted: bool,
    /// The last freed allocation. It may have been handed out again.
    kept: Option<Kept>,
    /// Chunks that the worker has examined.
    pub(crate) looks: u64,
    /// A bit per class, set if the class's offsets are in the table.
    pub(crate) known: [u64; CLASSES.div_ceil(64)],
    /// Number of granules in allocations. The next field counts the allocations.
    pub(crate) granules: usize,
    pub(crate) allocations: usize,
}

/// The places that a search for a new row accepts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Among {
    AllPages,
    /// Places whose pages all have memory.
    PopulatedPages,
}

/// A free place for a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spot {
    chunk: u32,
    start: u32,
    width: u32,
}

impl Spot {
    fn grains(self) -> Range<usize> {
        self.start as usize..(self.start + self.width) as usize
    }
}

/// Pages of a chunk, in a row.
#[derive(Debug)]
pub(crate) struct ChunkPages {
    pub(crate) chunk: u32,
    pub(crate) pages: Range<usize>,
}

/// A request in the units of the state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) owner: Owner,
    pub(crate) granules: usize,
    /// A power of two, in bytes, at least [`GRANULE`].
    pub(crate) align: usize,
}

/// An allocation in a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowAllocation {
    pub(crate) row: u32,
    /// Its first granule, counted from the chunk's start. The next field counts its granules.
    pub(crate) granule: u32,
    pub(crate) granules: u32,
}

/// The last freed allocation.
#[derive(Debug)]
struct Kept {
    handle: Handle,
    place: RowAllocation,
    owner: Owner,
    /// Whether it is free still.
    free: bool,
}

/// Owner and size of a freed allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Freed {
    pub(crate) owner: Owner,
    pub(crate) granules: usize,
}

impl State {
    pub(crate) fn new(chunks: Chunks, rows: Rows) -> State {
        let geometry = &chunks.geometry;
        State {
            lists: ChunkBuckets::new(geometry.grains * geometry.grain),
            chunks,
            rows,
            populated: 0,
            empty: 0,
            isolated_empty: 0,
            taken: 0,
            empty_low: 0,
            starved: false,
            wanted: false,
            kept: None,
            looks: 0,
            known: [0; CLASSES.div_ceil(64)],
            granules: 0,
            allocations: 0,
        }
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.chunks.geometry
    }

    /// Places a request in one of the owner's rows; `None` if none of the tried rows has room.
    #[inline(always)]
    pub(crate) fn share(&mut self, request: &Request) -> Option<RowAllocation> {
        if !self.geometry().shares() {
            return None;
        }
        let mut index = self.rows.record(request.owner)?.head;
        let first = index;
        for tried in 0..TRIED_ROWS_MAX {
            if index == NONE {
                return None;
            }
            let row = *self.rows.rows.get(index);
            if row.free == 0 {
                return None; // Full rows are at the list's end.
            }
            let geometry = self.geometry();
            let aligned = request.align <= LINE
                || is_multiple(row.start as usize * geometry.stripe, request.align)
                    && is_multiple(row.width as usize * geometry.grain, request.align);
            if row.free as usize >= request.granules && aligned {
                let chunk = self.chunks.get(row.chunk);
                let place = chunk.room(granules_of(chunk.geometry, &row), request.granules, request.align / GRANULE);
                if let Some(granule) = place {
                    let place = self.mark(index, granule, request.granules);
                    if row.free == place.granules {
                        self.rows.relist(index, ListEnd::Tail);
                    }
                    return Some(place);
                }
            }
            if tried == TRIED_ROWS_MAX - 1 {
                // Moves the first row behind the full ones until something in it is freed, so that
                // other rows are tried.
                self.rows.relist(first, ListEnd::Tail);
            }
            index = row.next;
        }
        None
    }

    // Always inlined, as are all functions that return a `RowAllocation`. Otherwise the value is
    // stored in parts and loaded as a whole, and the CPU stalls.
    #[inline(always)]
    fn mark(&mut self, index: u32, granule: usize, granules: usize) -> RowAllocation {
        let row = self.rows.rows.get_mut(index);
        row.free -= granules as u32;
        let chunk = self.chunks.get(row.chunk);
        bitmap::set_range(chunk.used, granule, granule + granules);
        bitmap::set(chunk.starts, granule);
        self.granules += granules;
        self.allocations += 1;
        RowAllocation { row: index, granule: granule as u32, granules: granules as u32 }
    }

    /// Whether the unused ends of rows' last pages are few enough for a row to begin a page.
    fn may_leave_gaps(&self) -> bool {
        let geometry = self.geometry();
        let touched = (self.populated - self.empty - self.isolated_empty) * geometry.page;
        let taken = self.taken * geometry.stripe;
        touched.saturating_sub(taken) <= taken / 16 + geometry.high * geometry.page
    }

    /// Finds a place for a new row: directly behind the owner's latest row, or else the first place
    /// that fits in the fullest chunk with such a place.
    pub(crate) fn find(&mut self, request: &Request, among: Among) -> Option<Spot> {
        let populated = among == Among::PopulatedPages;
        let geometry = &self.chunks.geometry;
        let record = self.rows.record(request.owner)?;
        let (latest, has) = (record.head, record.bytes);
        let width = geometry.row(request.granules * GRANULE, request.align, has);
        let step = geometry.alignment(request.align);
        let (shares, grain) = (geometry.shares(), geometry.grain);
        // Two rows of more than half a page never fit into one page. Without gaps, each would touch
        // two pages.
        let long = shares && 2 * width * geometry.stripe > geometry.page;
        let page_step = geometry.alignment(geometry.page);
        if latest != NONE && shares {
            let row = *self.rows.rows.get(latest);
            let chunk = self.chunks.get(row.chunk);
            let (start, end) = (row.end(), row.end() + width);
            if chunk.header.list as usize != self.lists.to_depopulate()
                && is_multiple(start, step)
                && chunk.map.is_free(start, end)
                && !(populated && chunk.first_hole(start, end).is_some())
            {
                return Some(Spot { chunk: row.chunk, start: start as u32, width: width as u32 });
            }
        }
        let step = if long && self.may_leave_gaps() { page_step } else { step };
        let mut list = slot(width * grain);
        while let Some(filled) = self.lists.filled_from(list) {
            let mut next = self.lists.head(filled);
            while let Some(chunk) = next {
                let Header { longest, populated: pages, next: after, .. } = *self.chunks.header(chunk);
                if longest as usize >= width && !(populated && pages == 0) {
                    let view = self.chunks.get(chunk);
                    let accept = |start| match populated.then(|| view.first_hole(start, start + width)).flatten() {
                        Some(hole) => Err(view.geometry.grain_after(hole)),
                        None => Ok(()),
                    };
                    if let Some(start) = view.map.find(width, step, accept) {
                        return Some(Spot { chunk, start: start as u32, width: width as u32 });
                    }
                }
                next = Some(after).filter(|after| *after != NONE);
            }
            list = filled + 1;
        }
        None
    }

    /// Whether all pages of a spot are populated.
    pub(crate) fn is_populated(&mut self, spot: Spot) -> bool {
        let grains = spot.grains();
        self.chunks.get(spot.chunk).first_hole(grains.start, grains.end).is_none()
    }

    /// Makes a row at a spot, and places the request in it. The row is not on its owner's list yet.
    #[inline(always)]
    pub(crate) fn commit(&mut self, spot: Spot, request: &Request) -> Option<RowAllocation> {
        let Spot { chunk, start, width } = spot;
        let grain_granules = self.geometry().grain_granules();
        let free = width * grain_granules as u32;
        let index = self.rows.rows.take()?;
        let owner = request.owner.index;
        *self.rows.rows.get_mut(index) =
            Row { chunk, start, width, owner, next: NONE, prev: NONE, free, listed: false };
        let mut view = self.chunks.get(chunk);
        let grains = spot.grains();
        let gone = view.take(grains.start, grains.end, index) as usize;
        self.taken += width as usize;
        if view.header.isolated {
            self.isolated_empty -= gone;
            self.reintegrate(chunk);
        } else {
            self.empty -= gone;
            self.relocate(chunk);
        }
        self.empty_low = self.empty_low.min(self.empty);
        self.wanted |= self.empty < self.geometry().low;
        Some(self.mark(index, grains.start * grain_granules, request.granules))
    }

    /// Puts a row with populated pages on its owner's list.
    pub(crate) fn publish(&mut self, row: u32) {
        let full = self.rows.rows.get(row).free == 0;
        self.rows.list(row, if full { ListEnd::Tail } else { ListEnd::Head });
    }

    /// Creates a chunk. Returns `false` if all opened chunks exist.
    pub(crate) fn grow(&mut self) -> bool {
        let Some(chunk) = self.chunks.create() else { return false };
        self.lists.add(&mut self.chunks, self.lists.free(), chunk, ListEnd::Head);
        true
    }

    /// The row's chunk, and its first run of pages that are not populated.
    pub(crate) fn holes(&mut self, row: u32) -> ChunkPages {
        let row = *self.rows.rows.get(row);
        let chunk = self.chunks.get(row.chunk);
        let pages = chunk.geometry.pages_of(row.start as usize, row.end());
        let from = bitmap::next_clear(chunk.populated, pages.start, pages.end).unwrap_or(pages.end);
        let to = bitmap::next_set(chunk.populated, from, pages.end).unwrap_or(pages.end);
        ChunkPages { chunk: row.chunk, pages: from..to }
    }

    /// Records that pages are populated.
    pub(crate) fn add_pages(&mut self, chunk: u32, pages: Range<usize>) {
        let mut view = self.chunks.get(chunk);
        let NewPages { came, empty } = view.populate(pages);
        self.populated += came as usize;
        *if view.header.isolated { &mut self.isolated_empty } else { &mut self.empty } += empty as usize;
    }

    /// Records that pages of an isolated chunk were released.
    pub(crate) fn remove_pages(&mut self, chunk: u32, pages: Range<usize>) {
        self.populated -= pages.len();
        self.isolated_empty -= pages.len();
        self.chunks.get(chunk).depopulate(pages);
    }

    /// The handle of an allocation; `base` is the address of the first chunk.
    pub(crate) fn handle(&self, base: usize, place: RowAllocation) -> Handle {
        let (row, geometry) = (self.rows.rows.get(place.row), self.geometry());
        let inside = place.granule as usize - row.start as usize * geometry.grain_granules();
        let address =
            base + row.chunk as usize * geometry.chunk + row.start as usize * geometry.stripe + inside * GRANULE;
        Handle::new(address, geometry.class(row.width as usize))
    }

    /// The place of a handle's allocation.
    fn locate(&mut self, base: usize, handle: Handle) -> Result<RowAllocation, Invalid> {
        let offset = handle.address().checked_sub(base).ok_or(Invalid::Foreign)?;
        let ChunkOffset { chunk, inside } = self.geometry().chunk_of(offset);
        if !self.chunks.exists(chunk) {
            return Err(Invalid::Foreign);
        }
        let view = self.chunks.get(chunk as u32);
        let (geometry, grain) = (view.geometry, view.geometry.grain_at(inside));
        if !bitmap::get(view.map.words, grain) {
            return Err(Invalid::NotAllocated);
        }
        let index = view.row_of[grain];
        let row = self.rows.rows.get(index);
        let inside = inside - row.start as usize * geometry.stripe;
        if !inside.is_multiple_of(GRANULE) || handle.class() != geometry.class(row.width as usize) {
            return Err(Invalid::NotAllocated);
        }
        let range = granules_of(geometry, row);
        let granule = range.start + inside / GRANULE; // Beyond `range` in another CPU's copy.
        let end = view.allocation_end(granule, range.end).ok_or(Invalid::NotAllocated)?;
        Ok(RowAllocation { row: index, granule: granule as u32, granules: (end - granule) as u32 })
    }

    /// Frees an allocation, and its row if it is empty then.
    pub(crate) fn free(&mut self, place: RowAllocation) -> Freed {
        let row = self.rows.rows.get_mut(place.row);
        row.free += place.granules;
        let row = *row;
        let chunk = self.chunks.get(row.chunk);
        let (granule, granules) = (place.granule as usize, place.granules as usize);
        bitmap::clear_range(chunk.used, granule, granule + granules);
        bitmap::clear(chunk.starts, granule);
        self.granules -= granules;
        self.allocations -= 1;
        let owner = Owner { index: row.owner, generation: self.rows.owners.get(row.owner).generation };
        if row.free as usize == row.width as usize * self.geometry().grain_granules() {
            self.free_row(place.row);
        } else if row.listed && row.prev != NONE {
            self.rows.relist(place.row, ListEnd::Head);
        }
        Freed { owner, granules }
    }

    /// Frees a handle's allocation, but keeps its place in the row taken until the next free or
    /// [`State::settle`]. Frees the place at once if that empties more than two pages, or leaves
    /// work for the worker.
    pub(crate) fn free_later(&mut self, base: usize, handle: Handle) -> Result<Freed, Invalid> {
        if let Some(kept) = &mut self.kept
            && kept.handle == handle
        {
            if kept.free {
                return Err(Invalid::NotAllocated);
            }
            kept.free = true;
        } else {
            let place = self.locate(base, handle)?;
            self.settle();
            let owner = self.rows.rows.get(place.row).owner;
            let owner = Owner { index: owner, generation: self.rows.owners.get(owner).generation };
            self.kept = Some(Kept { handle, place, owner, free: true });
        }
        let Some(Kept { place, owner, .. }) = &self.kept else { return Err(Invalid::NotAllocated) };
        let freed = Freed { owner: *owner, granules: place.granules as usize };
        if !self.may_keep(place.row, place.granules) {
            self.settle();
        }
        Ok(freed)
    }

    /// Whether an allocation of a row may be kept.
    fn may_keep(&mut self, row: u32, granules: u32) -> bool {
        let row = self.rows.rows.get(row);
        let geometry = &self.chunks.geometry;
        if (row.free + granules) as usize != row.width as usize * geometry.grain_granules() {
            return true; // The row is not empty then.
        }
        let pages = geometry.pages_of(row.start as usize, row.end()).len();
        let (chunk, width) = (row.chunk, row.width);
        let header = *self.chunks.header(chunk);
        let spare = header.taken == width && self.lists.head(self.lists.free()).is_some();
        pages <= 2 && !spare && !self.is_worthy(&header, pages)
    }

    /// Returns the kept allocation if it matches a request.
    pub(crate) fn again(&mut self, request: &Request) -> Option<Handle> {
        let kept = self.kept.as_mut().filter(|kept| kept.free && kept.owner == request.owner)?;
        // All copies begin at the same offset in their cache lines as the first.
        let aligned = request.align <= LINE && is_multiple(kept.handle.address(), request.align);
        (kept.place.granules as usize == request.granules && aligned).then(|| {
            kept.free = false;
            kept.handle
        })
    }

    /// Frees the kept allocation, if there is one.
    pub(crate) fn settle(&mut self) {
        if let Some(Kept { free: true, place, .. }) = &self.kept {
            let place = *place;
            self.kept = None;
            self.free(place);
        }
    }

    /// Frees all allocations of a row, and the row.
    pub(crate) fn free_all(&mut self, index: u32) -> Freed {
        self.kept = None; // The kept allocation may be in this row.
        let row = *self.rows.rows.get(index);
        let range = granules_of(self.geometry(), &row);
        let chunk = self.chunks.get(row.chunk);
        let granules = range.len() - row.free as usize;
        self.allocations -= bitmap::count_range(chunk.starts, range.start, range.end);
        self.granules -= granules;
        bitmap::clear_range(chunk.used, range.start, range.end);
        bitmap::clear_range(chunk.starts, range.start, range.end);
        let owner = Owner { index: row.owner, generation: self.rows.owners.get(row.owner).generation };
        self.free_row(index);
        Freed { owner, granules }
    }

    fn free_row(&mut self, index: u32) {
        let row = *self.rows.rows.get(index);
        if row.listed {
            self.rows.unlist(index);
        }
        self.rows.rows.give(index);
        let mut view = self.chunks.get(row.chunk);
        let came = view.give(row.start as usize, row.end()) as usize;
        self.taken -= row.width as usize;
        *if view.header.isolated { &mut self.isolated_empty } else { &mut self.empty } += came;
        self.relocate(row.chunk);
        let header = *self.chunks.header(row.chunk);
        let free = self.lists.free();
        let spare = header.list as usize == free && self.lists.head(free) != Some(self.lists.tail(free));
        if self.is_worthy(&header, 0) {
            self.isolate(row.chunk);
            self.wanted = true;
        }
        self.wanted |= spare;
    }

    /// Whether the worker would have to empty a chunk if it had `more` additional empty pages.
    fn is_worthy(&self, header: &Header, more: usize) -> bool {
        let (empty, geometry) = (header.empty as usize + more, self.geometry());
        if header.isolated { empty > 0 } else { self.empty + more > geometry.high + empty && empty >= geometry.quarter }
    }

    /// Takes a chunk's empty pages out of the reserve and gives them to the worker.
    pub(crate) fn isolate(&mut self, chunk: u32) {
        let header = self.chunks.header(chunk);
        if !header.isolated {
            header.isolated = true;
            self.empty -= header.empty as usize;
            self.isolated_empty += header.empty as usize;
            self.empty_low = self.empty_low.min(self.empty);
        }
        if self.chunks.header(chunk).list as usize != self.lists.to_depopulate() {
            self.move_to(chunk, self.lists.to_depopulate(), ListEnd::Head);
        }
    }

    /// Makes an isolated chunk available to allocations again.
    pub(crate) fn reintegrate(&mut self, chunk: u32) {
        let header = self.chunks.header(chunk);
        header.isolated = false;
        self.empty += header.empty as usize;
        self.isolated_empty -= header.empty as usize;
        self.relocate(chunk);
    }

    /// Puts a chunk on the list of its longest free run.
    fn relocate(&mut self, chunk: u32) {
        let grain = self.geometry().grain;
        let header = *self.chunks.header(chunk);
        let list = if header.taken == 0 { self.lists.free() } else { slot(header.longest as usize * grain) };
        if !header.isolated && header.list as usize != list {
            let end = if list > header.list as usize { ListEnd::Head } else { ListEnd::Tail };
            self.move_to(chunk, list, end);
        }
    }

    pub(crate) fn move_to(&mut self, chunk: u32, list: usize, end: ListEnd) {
        self.lists.remove(&mut self.chunks, chunk);
        self.lists.add(&mut self.chunks, list, chunk, end);
    }
}

/// The granules of a row.
pub(crate) fn granules_of(geometry: &Geometry, row: &Row) -> Range<usize> {
    row.start as usize * geometry.grain_granules()..row.end() * geometry.grain_granules()
}
