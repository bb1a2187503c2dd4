//! The allocator's state: where an allocation goes, and what follows when it comes back.
//!
//! Sits between the entry points and the worker (above) and chunks, lists and rows (below), under one lock that is never held
//! over a system call. Decides nothing about when pages come and go except this: a chunk of which a quarter is populated and
//! empty, while others hold reserve enough, is *isolated*. Its empty pages leave the reserve, nothing is placed in it, and
//! the worker empties it.

use crate::chunk::{Chunks, Header, NONE};
use crate::data::{Handle, Invalid};
use crate::geometry::{CLASSES, GRANULE, Geometry, LINE, is_multiple};
use crate::lists::{Lists, slot};
use crate::rows::{Owner, Row, Rows};
use core::ops::Range;
use neap_base::bitmap;

/// Rows of an owner that are looked at for room.
const TRIES: usize = 8;

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) chunks: Chunks,
    pub(crate) lists: Lists,
    pub(crate) rows: Rows,
    /// Populated pages; empty ones in chunks that are not isolated (the reserve) and in those that are; grains in rows.
    pub(crate) populated: usize,
    pub(crate) empty: usize,
    pub(crate) isolated_empty: usize,
    pub(crate) taken: usize,
    /// The smallest reserve since the worker last looked.
    pub(crate) empty_low: usize,
    /// Somebody who may not block was refused.
    pub(crate) starved: bool,
    /// There is something for the worker to do.
    pub(crate) wanted: bool,
    /// What was freed last, and is still there for an allocation just like it, or was handed out again since.
    kept: Option<Kept>,
    /// Chunks that the worker has looked at.
    pub(crate) looks: u64,
    /// A bit per class whose offsets are in the table.
    pub(crate) known: [u64; CLASSES.div_ceil(64)],
    /// Granules in allocations, and allocations.
    pub(crate) granules: usize,
    pub(crate) allocations: usize,
}

/// A place for a row that is still free.
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
pub(crate) struct Place {
    pub(crate) row: u32,
    /// The granule of the chunk at which it begins, and how many it has.
    pub(crate) granule: u32,
    pub(crate) granules: u32,
}

/// An allocation that was freed last.
#[derive(Debug)]
struct Kept {
    handle: Handle,
    place: Place,
    owner: Owner,
    /// Whether it is free still.
    free: bool,
}

/// What was freed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Freed {
    pub(crate) owner: Owner,
    pub(crate) granules: usize,
}

impl State {
    pub(crate) fn new(chunks: Chunks, rows: Rows) -> State {
        let geometry = &chunks.geometry;
        State {
            lists: Lists::new(geometry.grains * geometry.grain),
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

    /// Room in one of the owner's rows.
    #[inline(always)]
    pub(crate) fn share(&mut self, request: &Request) -> Option<Place> {
        if !self.geometry().shares() {
            return None;
        }
        let mut index = self.rows.record(request.owner)?.head;
        let first = index;
        for tried in 0..TRIES {
            if index == NONE {
                return None;
            }
            let row = *self.rows.rows.get(index);
            if row.free == 0 {
                return None; // Full rows are behind the others.
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
                        self.rows.relist(index, false);
                    }
                    return Some(place);
                }
            }
            if tried == TRIES - 1 {
                // Behind the full ones until something in it is freed, so that others get their turn.
                self.rows.relist(first, false);
            }
            index = row.next;
        }
        None
    }

    // Always inlined, as those that answer a place: one that goes through memory in parts and is read as a whole is waited for.
    #[inline(always)]
    fn mark(&mut self, index: u32, granule: usize, granules: usize) -> Place {
        let row = self.rows.rows.get_mut(index);
        row.free -= granules as u32;
        let chunk = self.chunks.get(row.chunk);
        bitmap::set_range(chunk.used, granule, granule + granules);
        bitmap::set(chunk.starts, granule);
        self.granules += granules;
        self.allocations += 1;
        Place { row: index, granule: granule as u32, granules: granules as u32 }
    }

    /// The bytes of rows' last pages in which nothing is, while that is little: then a row may begin a page of its own.
    fn may_leave_gaps(&self) -> bool {
        let geometry = self.geometry();
        let touched = (self.populated - self.empty - self.isolated_empty) * geometry.page;
        let taken = self.taken * geometry.stripe;
        touched.saturating_sub(taken) <= taken / 16 + geometry.high * geometry.page
    }

    /// A place for a new row: behind the owner's latest, else the first that fits in the fullest chunk that has one.
    ///
    /// `populated`: only where memory stands behind all of it.
    pub(crate) fn find(&mut self, request: &Request, populated: bool) -> Option<Spot> {
        let geometry = &self.chunks.geometry;
        let record = self.rows.record(request.owner)?;
        let (latest, has) = (record.head, record.bytes);
        let width = geometry.row(request.granules * GRANULE, request.align, has);
        let step = geometry.alignment(request.align);
        let (shares, grain) = (geometry.shares(), geometry.grain);
        // Two rows of more than half a page never share one; one of them would touch two.
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

    /// Whether memory stands behind all of a spot.
    pub(crate) fn is_populated(&mut self, spot: Spot) -> bool {
        let grains = spot.grains();
        self.chunks.get(spot.chunk).first_hole(grains.start, grains.end).is_none()
    }

    /// Takes a spot for a row, and the request's place in it; the row is not on its owner's list yet.
    #[inline(always)]
    pub(crate) fn commit(&mut self, spot: Spot, request: &Request) -> Option<Place> {
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

    /// Puts a row whose pages are populated on its owner's list.
    pub(crate) fn publish(&mut self, row: u32) {
        let full = self.rows.rows.get(row).free == 0;
        self.rows.list(row, !full);
    }

    /// A chunk more, if there is address space.
    pub(crate) fn grow(&mut self) -> bool {
        let Some(chunk) = self.chunks.create() else { return false };
        self.lists.add(&mut self.chunks, self.lists.free(), chunk, true);
        true
    }

    /// The pages of a row that have to be populated, and its chunk.
    pub(crate) fn holes(&mut self, row: u32) -> (u32, Range<usize>) {
        let row = *self.rows.rows.get(row);
        let chunk = self.chunks.get(row.chunk);
        let pages = chunk.geometry.pages_of(row.start as usize, row.end());
        let from = bitmap::next_clear(chunk.populated, pages.start, pages.end).unwrap_or(pages.end);
        let to = bitmap::next_set(chunk.populated, from, pages.end).unwrap_or(pages.end);
        (row.chunk, from..to)
    }

    /// Notes that pages are populated now.
    pub(crate) fn add_pages(&mut self, chunk: u32, pages: Range<usize>) {
        let mut view = self.chunks.get(chunk);
        let (came, empty) = view.populate(pages);
        self.populated += came as usize;
        *if view.header.isolated { &mut self.isolated_empty } else { &mut self.empty } += empty as usize;
    }

    /// Notes that pages of an isolated chunk are gone.
    pub(crate) fn remove_pages(&mut self, chunk: u32, pages: Range<usize>) {
        self.populated -= pages.len();
        self.isolated_empty -= pages.len();
        self.chunks.get(chunk).depopulate(pages);
    }

    /// The handle of an allocation; `base` is the address of the first chunk.
    pub(crate) fn handle(&self, base: usize, place: Place) -> Handle {
        let (row, geometry) = (self.rows.rows.get(place.row), self.geometry());
        let inside = place.granule as usize - row.start as usize * geometry.grain_granules();
        let address =
            base + row.chunk as usize * geometry.chunk + row.start as usize * geometry.stripe + inside * GRANULE;
        Handle::new(address, geometry.class(row.width as usize))
    }

    /// Where the allocation of a handle lies.
    fn locate(&mut self, base: usize, handle: Handle) -> Result<Place, Invalid> {
        let offset = handle.address().checked_sub(base).ok_or(Invalid::Foreign)?;
        let (chunk, inside) = self.geometry().chunk_of(offset);
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
        let granule = range.start + inside / GRANULE; // Behind the range, if it is another CPU's copy.
        let end = view.allocation_end(granule, range.end).ok_or(Invalid::NotAllocated)?;
        Ok(Place { row: index, granule: granule as u32, granules: (end - granule) as u32 })
    }

    /// Frees an allocation, and its row if it was the last in it.
    pub(crate) fn free(&mut self, place: Place) -> Freed {
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
            self.rows.relist(place.row, true);
        }
        Freed { owner, granules }
    }

    /// Frees the allocation of a handle in a moment: as soon as another is freed, or [`State::settle`] is called. At once, if it keeps
    /// more than two pages from being empty, or leaves the worker something to do.
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

    /// Whether an allocation of a row may stay for a moment.
    fn may_keep(&mut self, row: u32, granules: u32) -> bool {
        let row = self.rows.rows.get(row);
        let geometry = &self.chunks.geometry;
        if (row.free + granules) as usize != row.width as usize * geometry.grain_granules() {
            return true; // Its row stays.
        }
        let pages = geometry.pages_of(row.start as usize, row.end()).len();
        let (chunk, width) = (row.chunk, row.width);
        let header = *self.chunks.header(chunk);
        let spare = header.taken == width && self.lists.head(self.lists.free()).is_some();
        pages <= 2 && !spare && !self.is_worthy(&header, pages)
    }

    /// What is kept, if it is what a request is for.
    pub(crate) fn again(&mut self, request: &Request) -> Option<Handle> {
        let kept = self.kept.as_mut().filter(|kept| kept.free && kept.owner == request.owner)?;
        // Copies begin at the same place in their lines as the first.
        let aligned = request.align <= LINE && is_multiple(kept.handle.address(), request.align);
        (kept.place.granules as usize == request.granules && aligned).then(|| {
            kept.free = false;
            kept.handle
        })
    }

    /// Frees what is kept, so that everything is as if nothing ever were.
    pub(crate) fn settle(&mut self) {
        if let Some(Kept { free: true, place, .. }) = &self.kept {
            let place = *place;
            self.kept = None;
            self.free(place);
        }
    }

    /// Frees all allocations of a row, and the row.
    pub(crate) fn free_all(&mut self, index: u32) -> Freed {
        self.kept = None; // It may be one of them.
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

    /// Whether a chunk is to be emptied at once, with so many `more` empty pages than are counted.
    fn is_worthy(&self, header: &Header, more: usize) -> bool {
        let (empty, geometry) = (header.empty as usize + more, self.geometry());
        if header.isolated { empty > 0 } else { self.empty + more > geometry.high + empty && empty >= geometry.quarter }
    }

    /// Takes a chunk's empty pages out of the reserve and lets the worker have them.
    pub(crate) fn isolate(&mut self, chunk: u32) {
        let header = self.chunks.header(chunk);
        if !header.isolated {
            header.isolated = true;
            self.empty -= header.empty as usize;
            self.isolated_empty += header.empty as usize;
            self.empty_low = self.empty_low.min(self.empty);
        }
        if self.chunks.header(chunk).list as usize != self.lists.to_depopulate() {
            self.move_to(chunk, self.lists.to_depopulate(), true);
        }
    }

    /// Lets allocations have a chunk again.
    pub(crate) fn reintegrate(&mut self, chunk: u32) {
        let header = self.chunks.header(chunk);
        header.isolated = false;
        self.empty += header.empty as usize;
        self.isolated_empty -= header.empty as usize;
        self.relocate(chunk);
    }

    /// Puts a chunk on the list where its longest run belongs.
    fn relocate(&mut self, chunk: u32) {
        let grain = self.geometry().grain;
        let header = *self.chunks.header(chunk);
        let list = if header.taken == 0 { self.lists.free() } else { slot(header.longest as usize * grain) };
        if !header.isolated && header.list as usize != list {
            self.move_to(chunk, list, list > header.list as usize);
        }
    }

    pub(crate) fn move_to(&mut self, chunk: u32, list: usize, front: bool) {
        self.lists.remove(&mut self.chunks, chunk);
        self.lists.add(&mut self.chunks, list, chunk, front);
    }
}

/// The granules of a row.
pub(crate) fn granules_of(geometry: &Geometry, row: &Row) -> Range<usize> {
    row.start as usize * geometry.grain_granules()..row.end() * geometry.grain_granules()
}
