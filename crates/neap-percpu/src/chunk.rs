//! A chunk: its header, its maps, and which of its pages are populated or empty.
//!
//! # Invariants
//!
//! * A page is *populated* if it has memory in every group, and *empty* if no row touches it.
//! * The header counts populated pages, and those of them that are empty. Each change of the maps
//!   changes both counts, too.
//!
//! # Locking
//!
//! A [`Chunk`] is made, used and dropped under the allocator's lock.

use crate::alloc_bitmap::{BLOCK, Hint, Map};
use crate::geometry::{Geometry, round_up};
use core::ops::Range;
use neap_base::bitmap;

/// No chunk, row or owner: the end of a list.
pub(crate) const NONE: u32 = u32::MAX;

/// Header of a chunk. If it is all zeroes, the chunk does not exist.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) next: u32,
    pub(crate) prev: u32,
    /// The list that the chunk is on.
    pub(crate) list: u32,
    pub(crate) exists: bool,
    /// Whether its empty pages are not counted in the reserve.
    pub(crate) isolated: bool,
    /// Length of the longest run of free grains.
    pub(crate) longest: u32,
    /// Grains in rows.
    pub(crate) taken: u32,
    pub(crate) populated: u32,
    /// Populated pages that no row touches.
    pub(crate) empty: u32,
}

/// Offsets of the parts of a chunk's tables, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    pub(crate) map: usize,
    hints: usize,
    used: usize,
    pub(crate) starts: usize,
    pub(crate) populated: usize,
    row_of: usize,
    /// Bytes of all parts.
    pub(crate) length: usize,
}

impl Parts {
    pub(crate) fn new(geometry: &Geometry, platform_page: usize) -> Parts {
        let words = |bits: usize| bits.div_ceil(64) * 8;
        let mut next = size_of::<Header>().next_multiple_of(8);
        let mut part = |bytes: usize| {
            let start = next;
            next += bytes.next_multiple_of(8);
            start
        };
        let map = part(words(geometry.grains));
        let hints = part(geometry.grains / BLOCK * size_of::<Hint>());
        let [used, starts] = [(); 2].map(|()| part(words(geometry.granules)));
        let populated = part(words(geometry.pages));
        let row_of = part(geometry.grains * size_of::<u32>());
        Parts { map, hints, used, starts, populated, row_of, length: next.next_multiple_of(platform_page) }
    }
}

/// View of a chunk for the holder of the lock.
#[derive(Debug)]
pub(crate) struct Chunk<'a> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) header: &'a mut Header,
    pub(crate) map: Map<'a>,
    /// A bit per granule: whether it is part of an allocation.
    pub(crate) used: &'a mut [u64],
    /// A bit per granule: whether an allocation begins there.
    pub(crate) starts: &'a mut [u64],
    pub(crate) populated: &'a mut [u64],
    /// By grain: the index of its row. Valid only for grains that the map marks as taken.
    pub(crate) row_of: &'a mut [u32],
}

/// All chunks: an array of tables, of which those below `reach` have been in use.
#[derive(Debug)]
pub(crate) struct Chunks {
    pub(crate) geometry: Geometry,
    parts: Parts,
    address: usize,
    /// Number of chunks whose tables and memory may be touched.
    opened: u32,
    reach: u32,
    /// Room for the numbers of all chunks. The first `destroyed` entries are destroyed chunks.
    /// Their headers cannot hold these numbers, since the headers' memory is released.
    stack: *mut u32,
    destroyed: u32,
}

// SAFETY: the addresses lead to memory that only this value uses.
unsafe impl Send for Chunks {}

impl Chunks {
    /// # Safety
    /// For as long as the value is used, two pieces of memory belong to it alone:
    ///
    /// * `address`, aligned to 8 bytes: `parts.length` bytes of address space for each chunk of the
    ///   geometry, with zeroes where it is opened;
    /// * `stack`, aligned for a number: room for a number for each chunk.
    pub(crate) unsafe fn at(geometry: Geometry, parts: Parts, address: usize, stack: *mut u32) -> Chunks {
        Chunks { geometry, parts, address, opened: 0, reach: 0, stack, destroyed: 0 }
    }

    /// Address of a chunk's tables.
    pub(crate) fn tables(&self, chunk: u32) -> usize {
        self.address + chunk as usize * self.parts.length
    }

    /// Offsets of the parts of a chunk's tables.
    pub(crate) fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Address of the number that [`Chunks::reach`] returns.
    pub(crate) fn reach_word(&self) -> *const u32 {
        &raw const self.reach
    }

    /// Address of the number of destroyed chunks.
    pub(crate) fn destroyed_word(&self) -> *const u32 {
        &raw const self.destroyed
    }

    /// Bytes of a chunk's tables.
    pub(crate) fn tables_length(&self) -> usize {
        self.parts.length
    }

    /// Number of chunks that exist.
    pub(crate) fn in_use(&self) -> u32 {
        self.reach - self.destroyed
    }

    /// Upper bound of the numbers of all chunks.
    pub(crate) fn reach(&self) -> u32 {
        self.reach
    }

    pub(crate) fn exists(&mut self, chunk: usize) -> bool {
        chunk < self.reach as usize && self.header(chunk as u32).exists
    }

    /// The header of a chunk that exists or existed.
    pub(crate) fn header(&mut self, chunk: u32) -> &mut Header {
        debug_assert!(chunk < self.reach);
        // SAFETY: the chunk's tables are open, begin with a header, and are borrowed exclusively
        // with `self`.
        unsafe { &mut *core::ptr::with_exposed_provenance_mut(self.tables(chunk)) }
    }

    /// The view of a chunk that exists or existed.
    pub(crate) fn get(&mut self, chunk: u32) -> Chunk<'_> {
        /// # Safety
        /// `length` valid values of `T` lie at `address`, aligned for `T`. Fresh tables are zeroes,
        /// so all zeroes must be a valid `T`. No other reference to the values exists.
        unsafe fn slice<'a, T>(address: usize, length: usize) -> &'a mut [T] {
            // SAFETY: the caller promises valid, aligned values that no other reference leads to.
            unsafe { core::slice::from_raw_parts_mut(core::ptr::with_exposed_provenance_mut(address), length) }
        }
        debug_assert!(chunk < self.reach);
        let (address, geometry, parts) = (self.tables(chunk), &self.geometry, &self.parts);
        let (grains, granules) = (geometry.grains, geometry.granules);
        // SAFETY: the parts lie in the chunk's open tables, are aligned to 8 bytes, and do not
        // overlap. All zeroes are valid for all of their types. `self` is borrowed exclusively with
        // them.
        unsafe {
            Chunk {
                geometry,
                header: &mut *core::ptr::with_exposed_provenance_mut(address),
                map: Map {
                    words: slice(address + parts.map, grains.div_ceil(64)),
                    hints: slice(address + parts.hints, grains / BLOCK),
                },
                used: slice(address + parts.used, granules.div_ceil(64)),
                starts: slice(address + parts.starts, granules.div_ceil(64)),
                populated: slice(address + parts.populated, geometry.pages.div_ceil(64)),
                row_of: slice(address + parts.row_of, grains),
            }
        }
    }

    pub(crate) fn opened(&self) -> u32 {
        self.opened
    }

    /// Allows the chunks below `end` to be created.
    ///
    /// # Safety
    /// The tables and the memory of the chunks below `end` are open.
    pub(crate) unsafe fn open(&mut self, end: u32) {
        self.opened = end;
    }

    /// The chunk that is created next; `None` if all opened chunks exist.
    pub(crate) fn next(&self) -> Option<u32> {
        match self.destroyed.checked_sub(1) {
            // SAFETY: `destroy` wrote the numbers below `destroyed`.
            Some(top) => Some(unsafe { self.stack.add(top as usize).read() }),
            None => (self.reach < self.opened).then_some(self.reach),
        }
    }

    /// Creates the next chunk, with nothing taken or populated. `None` if all opened chunks exist.
    pub(crate) fn create(&mut self) -> Option<u32> {
        let chunk = self.next()?;
        self.destroyed = self.destroyed.saturating_sub(1);
        self.reach = self.reach.max(chunk + 1);
        self.get(chunk).create();
        Some(chunk)
    }

    /// Destroys a chunk that is on no list, with nothing taken or populated. Its tables may be
    /// released until it is created again.
    pub(crate) fn destroy(&mut self, chunk: u32) {
        self.header(chunk).exists = false;
        // SAFETY: the stack has room for every chunk's number. A chunk is destroyed only while it
        // exists, so there are fewer destroyed chunks than chunks.
        unsafe { self.stack.add(self.destroyed as usize).write(chunk) };
        self.destroyed += 1;
    }
}

/// Pages that were not populated before.
pub(crate) struct NewPages {
    pub(crate) came: u32,
    /// New pages that no row touches.
    pub(crate) empty: u32,
}

impl Chunk<'_> {
    /// Initialises a chunk that does not exist. No grain is then taken, and no page populated.
    fn create(&mut self) {
        self.map.words.fill(0);
        self.map.hints.fill(Hint::FREE);
        self.used.fill(0);
        self.starts.fill(0);
        self.populated.fill(0);
        *self.header = Header {
            next: NONE,
            prev: NONE,
            list: NONE,
            exists: true,
            isolated: false,
            longest: self.geometry.grains as u32,
            taken: 0,
            populated: 0,
            empty: 0,
        };
    }

    /// Whether no row touches a page.
    pub(crate) fn is_page_empty(&self, page: usize) -> bool {
        let grains = self.geometry.grains_of(page);
        bitmap::next_set(self.map.words, grains.start, grains.end).is_none()
    }

    /// The first page of a run of grains that is not populated.
    pub(crate) fn first_hole(&self, start: usize, end: usize) -> Option<usize> {
        let pages = self.geometry.pages_of(start, end);
        bitmap::next_clear(self.populated, pages.start, pages.end)
    }

    /// Returns whether the counts of the header are consistent.
    fn has_sound_counts(&self) -> bool {
        let Header { empty, populated, taken, longest, .. } = *self.header;
        empty <= populated
            && populated as usize <= self.geometry.pages
            && (taken + longest) as usize <= self.geometry.grains
    }

    /// Number of populated pages that overlap a run of grains, and that no other row touches.
    fn empty_around(&self, start: usize, end: usize) -> u32 {
        let pages = self.geometry.pages_of(start, end);
        let (first, last) = (pages.start, pages.end - 1);
        let counts = |page| u32::from(bitmap::get(self.populated, page) && self.is_page_empty(page));
        if first == last {
            return counts(first);
        }
        // Only the run touches the pages between.
        counts(first) + counts(last) + bitmap::count_range(self.populated, first + 1, last) as u32
    }

    /// Takes a free run for a row; returns the number of pages that are no longer empty.
    pub(crate) fn take(&mut self, start: usize, end: usize, row: u32) -> u32 {
        let gone = self.empty_around(start, end);
        self.map.take(start, end);
        self.row_of[start..end].fill(row);
        self.header.taken += (end - start) as u32;
        self.header.empty -= gone;
        self.header.longest = self.map.longest() as u32;
        debug_assert!(self.has_sound_counts());
        gone
    }

    /// Frees a row's run; returns the number of pages that became empty.
    pub(crate) fn give(&mut self, start: usize, end: usize) -> u32 {
        self.map.free(start, end);
        let came = self.empty_around(start, end);
        self.header.taken -= (end - start) as u32;
        self.header.empty += came;
        self.header.longest = self.map.longest() as u32;
        debug_assert!(self.has_sound_counts());
        came
    }

    /// Records that pages are populated.
    pub(crate) fn populate(&mut self, pages: Range<usize>) -> NewPages {
        let (mut came, mut empty) = (0, 0);
        for page in pages {
            if !bitmap::set(self.populated, page) {
                came += 1;
                empty += u32::from(self.is_page_empty(page));
            }
        }
        self.header.populated += came;
        self.header.empty += empty;
        debug_assert!(self.has_sound_counts());
        NewPages { came, empty }
    }

    /// Records that pages were released. All of them were populated and empty.
    pub(crate) fn depopulate(&mut self, pages: Range<usize>) {
        let count = pages.len() as u32;
        bitmap::clear_range(self.populated, pages.start, pages.end);
        self.header.populated -= count;
        self.header.empty -= count;
        debug_assert!(self.has_sound_counts());
    }

    /// The first run of pages that are not populated, at most `most`.
    pub(crate) fn first_holes(&self, most: usize) -> Option<Range<usize>> {
        let first = bitmap::next_clear(self.populated, 0, self.geometry.pages)?;
        let end = (first + most).min(self.geometry.pages);
        Some(first..bitmap::next_set(self.populated, first, end).unwrap_or(end))
    }

    /// The last run of populated, empty pages below `before`, at most `most`.
    pub(crate) fn last_empty(&self, before: usize, most: usize) -> Option<Range<usize>> {
        let counts = |page: &usize| bitmap::get(self.populated, *page) && self.is_page_empty(*page);
        let last = (0..before).rev().find(counts)?;
        let first = (0..last).rev().take(most.saturating_sub(1)).take_while(counts).last().unwrap_or(last);
        Some(first..last + 1)
    }

    /// The end of the allocation that begins at granule `start`; `None` if none does.
    pub(crate) fn allocation_end(&self, start: usize, row_end: usize) -> Option<usize> {
        if start >= row_end || !bitmap::get(self.starts, start) {
            return None;
        }
        let end = bitmap::next_clear(self.used, start, row_end).unwrap_or(row_end);
        Some(bitmap::next_set(self.starts, start + 1, end).unwrap_or(end))
    }

    /// First granule of `size` adjacent free ones, at a multiple of `align` from the row's start.
    /// The row itself begins at such a multiple.
    pub(crate) fn room(&self, row: Range<usize>, size: usize, align: usize) -> Option<usize> {
        let mut at = row.start;
        while at + size <= row.end {
            at = row.start + round_up(at - row.start, align);
            match bitmap::next_set(self.used, at.min(row.end), (at + size).min(row.end)) {
                None => return (at + size <= row.end).then_some(at),
                Some(taken) => at = bitmap::next_clear(self.used, taken, row.end)?,
            }
        }
        None
    }
}
