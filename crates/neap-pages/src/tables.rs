//! The tables beside the arena: their places, the extent of their mappings, and how they get
//! memory.
//!
//! # Design
//!
//! Each table has a byte for every 2^shift bytes of the arena and lies at a fixed address above the
//! arena. A table gets memory when it is touched, or when a block is populated for small blocks.
//! For the first part of the arena, an early table gets small pages. For later parts, it gets a
//! huge page where it had no memory. With small pages, a populated block of 2 MiB would take one
//! fault for itself and eight for its state bytes.
//!
//! A foreign mapping may lie in the place of a table's page. The arena then grows around the part
//! that this page would describe. Reserved tables would take a tenth of the span. A program with a
//! limit on its address space could then map nothing any more. Only the tables with bits or bytes
//! per chunk are reserved, since they are small.
//!
//! # Locking
//!
//! This module has no lock. The arena maps tables under its growth mutex. A thread populates tables
//! only for a block that it has detached.
use crate::shape::{EarlyTables, MARKED, SideTable, TABLES};
use crate::units::{CHUNK, HUGE_BYTES};
use core::ops::Range;
use core::sync::atomic::{AtomicU8, Ordering::Relaxed};
use neap_base::Platform;
use neap_base::platform::Errno;
use neap_base::platform::memory::{self, HugePages};

/// A kind of mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MappingKind {
    /// Memory that is handed out.
    Arena,
    /// Frames, and maps of pages and chunks.
    OwnTables,
    /// A side table of the layer above, by its number.
    Table(usize),
    /// Lists of CPUs, and the other data of a node's pages.
    Lists,
}

/// The arena's own tables, in front of the caller's.
pub(crate) const OWN_TABLES: usize = 6;
pub(crate) const FRAMES: usize = 0;
pub(crate) const BACKED: usize = 1;
pub(crate) const CHUNKS: usize = 2;
pub(crate) const FREE_CHUNKS: usize = 3;
pub(crate) const BACKED_CHUNKS: usize = 4;
pub(crate) const LAZY_CHUNKS: usize = 5;
pub(crate) const ALL_TABLES: usize = OWN_TABLES + TABLES;

/// Tables with bits or bytes per chunk. They are read across holes of the arena, and one page of
/// such a table describes gibibytes.
const WHOLE: [usize; 4] = [CHUNKS, FREE_CHUNKS, BACKED_CHUNKS, LAZY_CHUNKS];

/// Bytes of the arena for which an early table has small pages. For later parts it has huge pages.
/// The table's last huge page may describe a part that was never used, and then stays resident
/// after all other memory was released. It is smaller than 1/32 of the memory that was used.
const SMALL: usize = 64 << 20;

/// The process's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressSpace {
    Ample,
    /// A limit on it is near.
    Scarce,
}

/// One table: a byte per 2^shift bytes of the arena.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Table {
    pub(crate) start: usize,
    /// 0: no such table.
    pub(crate) shift: u32,
    /// Unused bytes in front of the first byte.
    pub(crate) lead: usize,
    pub(crate) droppable: bool,
    pub(crate) brief: bool,
    pub(crate) early: bool,
    /// Whether address space is reserved for the whole table, so that no foreign mapping can lie in
    /// its place.
    pub(crate) whole: bool,
}

impl Table {
    /// Bytes of the table in front of the page with the byte for `offset`.
    pub(crate) fn page_of(&self, offset: usize, page_shift: u32) -> usize {
        (self.place(offset, 0).start - self.start) >> page_shift << page_shift
    }

    /// Size of the table for the first `arena` bytes of the arena, in whole pages.
    pub(crate) fn bytes(&self, arena: usize, page_shift: u32) -> usize {
        (self.lead + arena.div_ceil(1 << self.shift)).next_multiple_of(1 << page_shift)
    }

    /// Bytes to map for `arena` bytes of the arena. A huge page must be mapped as a whole. So with
    /// ample address space, the mapping of an early table ends at the end of a huge page.
    pub(crate) fn mapped(&self, arena: usize, page_shift: u32, space: AddressSpace) -> usize {
        let bytes = self.bytes(arena, page_shift);
        let is_whole = self.early && space == AddressSpace::Ample;
        if is_whole { (self.start + bytes).next_multiple_of(HUGE_BYTES) - self.start } else { bytes }
    }

    /// Whether the table's part for a block is populated with the block.
    pub(crate) fn comes_with_block(&self, early: EarlyTables) -> bool {
        self.brief || self.early && early == EarlyTables::Written
    }

    /// Forbids huge pages in a fresh mapping of an early table until [`Table::populate`] wants
    /// them. A system that uses huge pages everywhere would put one behind the first byte of a
    /// small program's table.
    pub(crate) fn advise<P: Platform>(&self, platform: &P, bytes: Range<usize>) {
        if self.early {
            let _ = platform.huge_pages(self.start + bytes.start, bytes.len(), HugePages::Forbidden);
        }
    }

    /// The part of the arena, as offsets, that the huge page with the byte for this offset
    /// describes. `None` where the table has small pages.
    pub(crate) fn window(&self, offset: usize) -> Option<Range<usize>> {
        let bytes = HUGE_BYTES << self.shift;
        let start = offset.checked_sub(SMALL)? / bytes * bytes + SMALL;
        self.early.then_some(start..start + bytes)
    }

    /// An address in each huge page that may have the bytes for a part of the arena.
    pub(crate) fn huge_pages(&self, part: Range<usize>) -> impl Iterator<Item = usize> {
        let first = self.early.then_some(part.start.max(SMALL));
        let next = |offset: &usize| Some(self.window(*offset)?.end);
        let offsets = core::iter::successors(first, next).take_while(move |offset| *offset < part.end);
        offsets.map(|offset| self.place(offset, 0).start)
    }

    /// Populates the table's bytes for a part of the arena that the caller has detached. With
    /// `fresh`, the table has no memory there yet, and may get a huge page. If the system has no
    /// huge page, it supplies small pages. Allowing a huge page, and forbidding it again, each take
    /// the process's mapping lock for writing.
    ///
    /// # Errors
    /// The platform's error. Some of the pages may be populated.
    pub(crate) fn populate<P: Platform>(
        &self,
        platform: &P,
        part: Range<usize>,
        page: usize,
        fresh: bool,
    ) -> Result<(), Errno> {
        let memory::Range { start, length } = self.place(part.start, part.len());
        let huge = self.window(part.start).filter(|_| fresh).map(|window| self.place(window.start, 0).start);
        if let Some(huge) = huge {
            let _ = platform.huge_pages(huge, HUGE_BYTES, HugePages::Allowed);
            // This store faults the huge page in under the lock of its mapping. `populate` below
            // would hold the process's mapping lock meanwhile. SAFETY: the byte is mapped, belongs
            // to the caller's part of the arena, and is accessed as an atomic.
            unsafe { AtomicU8::from_ptr(core::ptr::with_exposed_provenance_mut(start)) }.store(0, Relaxed);
        }
        let (start, end) = (start / page * page, (start + length).next_multiple_of(page));
        let populated = platform.populate(start, end - start);
        if let Some(huge) = huge {
            // Otherwise the kernel could fill released pages of the table again.
            let _ = platform.huge_pages(huge, HUGE_BYTES, HugePages::Forbidden);
        }
        populated
    }

    /// The table's bytes for `bytes` of the arena from `offset` on.
    pub(crate) fn place(&self, offset: usize, bytes: usize) -> memory::Range {
        memory::Range { start: self.start + self.lead + (offset >> self.shift), length: bytes >> self.shift }
    }

    /// The whole pages among the table's bytes for `bytes` of the arena from `offset` on.
    pub(crate) fn pages(&self, offset: usize, bytes: usize, page: usize) -> memory::Range {
        let memory::Range { start, length } = self.place(offset, bytes);
        let (first, end) = (start.next_multiple_of(page), (start + length) / page * page);
        memory::Range { start: first, length: end.saturating_sub(first) }
    }
}

/// The tables of an arena at `base`, and the bytes that arena and tables span.
/// [Whole](Table::whole) tables lie elsewhere: see [`place_whole`].
pub(crate) fn layout(
    base: usize,
    span: usize,
    page_shift: u32,
    named: &[SideTable; TABLES],
) -> ([Table; ALL_TABLES], usize) {
    let mut tables = [Table::default(); ALL_TABLES];
    // Frames have 16 bytes a page. The maps have a bit a page, four bytes a chunk, and three times
    // a bit a chunk.
    for (table, shift) in
        [(FRAMES, -4), (BACKED, 3), (CHUNKS, 8), (FREE_CHUNKS, 13), (BACKED_CHUNKS, 13), (LAZY_CHUNKS, 13)]
    {
        tables[table].shift = page_shift.wrapping_add_signed(shift);
        tables[table].whole = WHOLE.contains(&table);
    }
    tables[FRAMES].brief = true;
    // The frames of a free chunk hold no information. They are droppable if they fill whole pages.
    tables[FRAMES].droppable = (CHUNK as usize * 16) >> page_shift > 0;
    for (index, (table, named)) in tables[OWN_TABLES..].iter_mut().zip(named).enumerate() {
        debug_assert!(index < MARKED || !named.droppable && !named.early, "only marked tables are droppable or early");
        debug_assert!(named.lead == 0 || !named.early, "an early table begins on a page");
        table.shift = u32::from(named.shift);
        // A chunk's part of a table of a higher shift is less than a page.
        table.droppable = named.droppable && named.shift <= 10;
        table.lead = named.lead.into();
        table.brief = named.brief;
        table.early = named.early;
    }
    let mut end = base + span;
    for table in tables.iter_mut().filter(|table| table.shift != 0 && !table.whole) {
        if table.early {
            // Huge pages begin where the small ones end.
            let small = SMALL >> table.shift;
            debug_assert!(small.is_multiple_of(1 << page_shift), "an early table begins on a page");
            end = (end + small).next_multiple_of(HUGE_BYTES) - small;
        }
        table.start = end;
        end += table.mapped(span, page_shift, AddressSpace::Ample);
    }
    (tables, end - base)
}

/// Bytes of address space for the whole tables of an arena of `span` bytes.
pub(crate) fn whole_bytes(tables: &[Table; ALL_TABLES], span: usize, page_shift: u32) -> usize {
    WHOLE.map(|table| tables[table].bytes(span, page_shift)).iter().sum::<usize>() + (1 << page_shift)
}

/// Places the whole tables of an arena in address space of [`whole_bytes`] at `address`.
pub(crate) fn place_whole(tables: &mut [Table; ALL_TABLES], address: usize, span: usize, page_shift: u32) {
    // The pages of a virtual machine may be larger than those of the reservation.
    let mut end = address.next_multiple_of(1 << page_shift);
    for table in WHOLE {
        tables[table].start = end;
        end += tables[table].bytes(span, page_shift);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_reaches_as_far_as_the_arena() {
        for (shift, lead) in [(8, 0), (10, 0), (25, 0), (8, 63), (10, 9), (25, 3)] {
            let table = Table { shift, lead, ..Table::default() };
            for last in [0, 1, (1 << 25) - 1, 1 << 25, (128_usize << 30) - 1, 128 << 30, (128 << 30) + (1 << 22)] {
                let bytes = table.bytes(last + 1, 12);
                let place = table.place(last, 0).start;
                assert!(place < bytes && bytes.is_multiple_of(4096), "{last} of shift {shift}, {lead}: {bytes} bytes");
                assert!(bytes <= place + 4096, "and no further");
            }
        }
    }

    #[test]
    fn an_early_table_has_whole_huge_pages_beyond_its_small_ones() {
        let mut named = [SideTable::default(); TABLES];
        for (table, shift) in [(1, 6), (3, 4), (5, 10)] {
            named[table] = SideTable { shift, droppable: true, early: table != 5, ..SideTable::default() };
        }
        for span in [4 << 20, 33 << 20, (128 << 20) + 4096, 8 << 30] {
            let (tables, all) = layout(1 << 30, span, 12, &named);
            let mut end = (1 << 30) + span;
            for table in tables.iter().filter(|table| table.shift != 0 && !table.whole) {
                assert!(table.start >= end && table.start.is_multiple_of(4096), "{tables:x?}");
                end = table.start + table.mapped(span, 12, AddressSpace::Ample);
                if table.early {
                    for offset in [SMALL, SMALL + 12345, (HUGE_BYTES << table.shift) + SMALL - 1, 5 << 30] {
                        let window = table.window(offset).unwrap();
                        assert!(
                            window.contains(&offset) && table.place(window.start, 0).start.is_multiple_of(HUGE_BYTES)
                        );
                        assert_eq!(table.place(window.start, window.len()).length, HUGE_BYTES);
                    }
                    assert_eq!(table.window(SMALL - 1), None);
                    assert_eq!(table.huge_pages(0..SMALL).count(), 0);
                    let (start, window) = (SMALL + 4096, HUGE_BYTES << table.shift);
                    let addresses = [start, SMALL + window].map(|offset| table.place(offset, 0).start);
                    assert!(table.huge_pages(start..SMALL + window + 1).eq(addresses), "both that it has a part of");
                    assert!(end.is_multiple_of(HUGE_BYTES), "mapped to the end of one: {table:x?}");
                }
                assert_eq!(
                    table.mapped(span, 12, AddressSpace::Scarce),
                    table.bytes(span, 12),
                    "where address space is scarce, as far as needed"
                );
            }
            assert_eq!(end, (1 << 30) + all);
        }
    }
}
