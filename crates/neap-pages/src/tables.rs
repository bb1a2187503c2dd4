//! The tables beside the arena: where they lie, how far they are mapped, and how memory comes behind them.
//!
//! Sits between the arena and the platform's mappings. Each has a byte for every so many bytes of the arena and lies at an
//! arithmetic address above it. Memory comes as it is touched, or with a block that is populated for small blocks. Of a table that is
//! wanted as early as the blocks themselves, that is small pages for the first part of the arena and huge ones beyond, where
//! nothing of one was there: of state bytes a block of two mebibytes, which is one fault itself, has eight small pages. Takes no lock: the arena's
//! growth maps, and what is populated speaks of a block that the caller has.
//!
//! A page behind a table may be a foreign mapping. The arena then grows around the part that this
//! page would speak of. To reserve address space for the tables instead would take a tenth of the
//! span: a program that limits its own address space could map nothing any more. The three tables
//! by the chunk are small, so these are reserved.

use crate::arena::CHUNK;
use crate::pages::{MARKED, SideTable, TABLES};
use crate::populate::HUGE_BYTES;
use core::ops::Range;
use core::sync::atomic::{AtomicU8, Ordering::Relaxed};
use neap_base::Platform;
use neap_base::platform::Errno;

/// The arena's own tables, in front of the caller's.
pub(crate) const OWN_TABLES: usize = 6;
pub(crate) const FRAMES: usize = 0;
pub(crate) const BACKED: usize = 1;
pub(crate) const CHUNKS: usize = 2;
pub(crate) const FREE_CHUNKS: usize = 3;
pub(crate) const BACKED_CHUNKS: usize = 4;
pub(crate) const LAZY_CHUNKS: usize = 5;
pub(crate) const ALL_TABLES: usize = OWN_TABLES + TABLES;

/// Tables by the chunk. They are read across foreign mappings that the arena grows around, and a
/// page of one speaks of gibibytes.
const WHOLE: [usize; 4] = [CHUNKS, FREE_CHUNKS, BACKED_CHUNKS, LAZY_CHUNKS];

/// Bytes of the arena of which an early table speaks by small pages; by huge ones of what is beyond. Of the last of those some speaks of what
/// was never used, and stays when all else has gone: less than a thirty-second of what was.
const SMALL: usize = 64 << 20;

/// One table: a byte per 2^shift bytes of the arena.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Table {
    pub(crate) start: usize,
    /// 0: no such table.
    pub(crate) shift: u32,
    /// Bytes in front of the first.
    pub(crate) lead: usize,
    pub(crate) droppable: bool,
    pub(crate) brief: bool,
    pub(crate) early: bool,
    /// Whether address space is reserved for all of it, so that no foreign mapping is in its way.
    pub(crate) whole: bool,
}

impl Table {
    /// Bytes of the table in front of the first page that speaks of `offset` or of more.
    pub(crate) fn page_of(&self, offset: usize, page_shift: u32) -> usize {
        (self.place(offset, 0).0 - self.start) >> page_shift << page_shift
    }

    /// Bytes of what it says of so many bytes of the arena: whole pages, and a byte for every part begun.
    pub(crate) fn bytes(&self, arena: usize, page_shift: u32) -> usize {
        (self.lead + arena.div_ceil(1 << self.shift)).next_multiple_of(1 << page_shift)
    }

    /// Bytes to map for that: for a huge page all of it must be, so where address space is not scarce an early table is mapped on to the end of one.
    pub(crate) fn mapped(&self, arena: usize, page_shift: u32, scarce: bool) -> usize {
        let bytes = self.bytes(arena, page_shift);
        if self.early && !scarce { (self.start + bytes).next_multiple_of(HUGE_BYTES) - self.start } else { bytes }
    }

    /// Says of a fresh mapping of it how its memory is to come: huge pages when [`Table::populate`] wants them. A system that gives them
    /// to everybody would put one behind the first byte of a small program's.
    pub(crate) fn advise<P: Platform>(&self, platform: &P, bytes: Range<usize>) {
        if self.early {
            let _ = platform.huge_pages(self.start + bytes.start, bytes.len(), false);
        }
    }

    /// What a huge page of it speaks of, as offsets into the arena: the one with its byte for this offset. `None` where small pages speak.
    pub(crate) fn window(&self, offset: usize) -> Option<Range<usize>> {
        let bytes = HUGE_BYTES << self.shift;
        let start = offset.checked_sub(SMALL)? / bytes * bytes + SMALL;
        self.early.then_some(start..start + bytes)
    }

    /// An address in each huge page that may be behind what it says of a part of the arena.
    pub(crate) fn huge_pages(&self, part: Range<usize>) -> impl Iterator<Item = usize> {
        let first = self.early.then_some(part.start.max(SMALL));
        let next = |offset: &usize| Some(self.window(*offset)?.end);
        let offsets = core::iter::successors(first, next).take_while(move |offset| *offset < part.end);
        offsets.map(|offset| self.place(offset, 0).0)
    }

    /// Puts memory behind what it says of a part of the arena that is the caller's: a huge page, if it is `fresh`, so that there is nothing behind
    /// that yet. Where the system has none, small ones come. Allowing it and forbidding it again takes the process's mapping lock for writing, once for
    /// each huge page.
    ///
    /// # Errors
    /// Some of it may be done.
    pub(crate) fn populate<P: Platform>(
        &self,
        platform: &P,
        part: Range<usize>,
        page: usize,
        fresh: bool,
    ) -> Result<(), Errno> {
        let (start, length) = self.place(part.start, part.len());
        let huge = self.window(part.start).filter(|_| fresh).map(|window| self.place(window.start, 0).0);
        if let Some(huge) = huge {
            let _ = platform.huge_pages(huge, HUGE_BYTES, true);
            // It comes by this fault, which holds the lock of its mapping; the call below would hold that of the process meanwhile.
            // SAFETY: mapped, and the byte speaks of what is the caller's.
            unsafe { AtomicU8::from_ptr(core::ptr::with_exposed_provenance_mut(start)) }.store(0, Relaxed);
        }
        let (start, end) = (start / page * page, (start + length).next_multiple_of(page));
        let populated = platform.populate(start, end - start);
        if let Some(huge) = huge {
            // What goes back of it stays away.
            let _ = platform.huge_pages(huge, HUGE_BYTES, false);
        }
        populated
    }

    /// Where the bytes lie that it has for `bytes` of the arena from `offset` on, and how many they are.
    pub(crate) fn place(&self, offset: usize, bytes: usize) -> (usize, usize) {
        (self.start + self.lead + (offset >> self.shift), bytes >> self.shift)
    }

    /// The whole pages of that: where they begin, and how many bytes they are.
    pub(crate) fn pages(&self, offset: usize, bytes: usize, page: usize) -> (usize, usize) {
        let (start, length) = self.place(offset, bytes);
        let (first, end) = (start.next_multiple_of(page), (start + length) / page * page);
        (first, end.saturating_sub(first))
    }
}

/// Where the tables of an arena at `base` lie, and how many bytes arena and tables span.
/// [Whole](Table::whole) tables lie elsewhere: [`place_whole`] says where.
pub(crate) fn layout(
    base: usize,
    span: usize,
    page_shift: u32,
    named: &[SideTable; TABLES],
) -> ([Table; ALL_TABLES], usize) {
    let mut tables = [Table::default(); ALL_TABLES];
    // A frame is 16 bytes a page; the maps are a bit a page, four bytes a chunk, and three times a
    // bit a chunk.
    for (table, shift) in
        [(FRAMES, -4), (BACKED, 3), (CHUNKS, 8), (FREE_CHUNKS, 13), (BACKED_CHUNKS, 13), (LAZY_CHUNKS, 13)]
    {
        tables[table].shift = page_shift.wrapping_add_signed(shift);
        tables[table].whole = WHOLE.contains(&table);
    }
    tables[FRAMES].brief = true;
    // The frames of a free chunk say nothing, where they fill whole pages.
    tables[FRAMES].droppable = (CHUNK as usize * 16) >> page_shift > 0;
    for (index, (table, named)) in tables[OWN_TABLES..].iter_mut().zip(named).enumerate() {
        debug_assert!(index < MARKED || !named.droppable && !named.early, "nobody marks where it has memory");
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
            // Huge pages begin where small ones end.
            let small = SMALL >> table.shift;
            debug_assert!(small.is_multiple_of(1 << page_shift), "an early table begins on a page");
            end = (end + small).next_multiple_of(HUGE_BYTES) - small;
        }
        table.start = end;
        end += table.mapped(span, page_shift, false);
    }
    (tables, end - base)
}

/// Bytes of address space for the whole tables of an arena of `span` bytes.
pub(crate) fn whole_bytes(tables: &[Table; ALL_TABLES], span: usize, page_shift: u32) -> usize {
    WHOLE.map(|table| tables[table].bytes(span, page_shift)).iter().sum::<usize>() + (1 << page_shift)
}

/// Puts the whole tables of an arena into address space of [`whole_bytes`] at `address`.
pub(crate) fn place_whole(tables: &mut [Table; ALL_TABLES], address: usize, span: usize, page_shift: u32) {
    // A made-up machine's pages may be larger than those that its reservations begin with.
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
                let place = table.place(last, 0).0;
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
                end = table.start + table.mapped(span, 12, false);
                if table.early {
                    for offset in [SMALL, SMALL + 12345, (HUGE_BYTES << table.shift) + SMALL - 1, 5 << 30] {
                        let window = table.window(offset).unwrap();
                        assert!(window.contains(&offset) && table.place(window.start, 0).0.is_multiple_of(HUGE_BYTES));
                        assert_eq!(table.place(window.start, window.len()).1, HUGE_BYTES);
                    }
                    assert_eq!(table.window(SMALL - 1), None);
                    assert_eq!(table.huge_pages(0..SMALL).count(), 0);
                    let (start, window) = (SMALL + 4096, HUGE_BYTES << table.shift);
                    let addresses = [start, SMALL + window].map(|offset| table.place(offset, 0).0);
                    assert!(table.huge_pages(start..SMALL + window + 1).eq(addresses), "both that it has a part of");
                    assert!(end.is_multiple_of(HUGE_BYTES), "mapped to the end of one: {table:x?}");
                }
                assert_eq!(
                    table.mapped(span, 12, true),
                    table.bytes(span, 12),
                    "where address space is scarce, as far as needed"
                );
            }
            assert_eq!(end, (1 << 30) + all);
        }
    }
}
