//! Places at which moves of page tables have split the arena's mapping.
//!
//! A moved run takes its mapping along, and the kernel does not merge that mapping with its
//! neighbours. So the process has up to two more mappings after the move, split at the start and at
//! the end of the run. The kernel allows a process 65530 mappings by default. Both places stay when
//! the run is freed, until another move covers them. So the number of places bounds the mappings
//! that all moves have added.
//!
//! # Locking
//! `Core` has the [`Splits`] under a mutex. The caller holds it during a move. No thread waits
//! longer for that, since the kernel moves page tables for one thread of a process at a time.

use core::ops::Range;
use neap_base::Platform;
use neap_base::platform::{Errno, memory};

/// Most places: a quarter of the mappings that the kernel allows by default.
const MOST: usize = 16384;

/// The places, as page numbers in rising order. Their memory is mapped before the first move.
#[derive(Debug)]
pub(crate) struct Splits {
    memory: usize,
    count: usize,
    most: usize,
}

impl Splits {
    pub(crate) const fn new() -> Splits {
        Splits { memory: 0, count: 0, most: MOST }
    }

    /// Maps the memory of the places, unless it is mapped already.
    ///
    /// # Errors
    /// Returns the error of the mapping. Nothing is mapped then.
    pub(crate) fn open<P: Platform>(&mut self, platform: &P) -> Result<(), Errno> {
        if self.memory == 0 {
            self.memory = platform.map(Splits::length(platform))?;
        }
        Ok(())
    }

    fn length<P: Platform>(platform: &P) -> usize {
        (MOST * size_of::<u32>()).next_multiple_of(platform.page_size())
    }

    /// Returns the range of the memory. Start and length are 0 if nothing is mapped.
    pub(crate) fn mapping<P: Platform>(&self, platform: &P) -> memory::Range {
        memory::Range { start: self.memory, length: if self.memory == 0 { 0 } else { Splits::length(platform) } }
    }

    /// Unmaps the memory.
    pub(crate) fn close<P: Platform>(&mut self, platform: &P) {
        let memory::Range { start, length } = self.mapping(platform);
        if length > 0 {
            // SAFETY: `open` mapped the memory. Only this value uses it, and it forgets the
            // address.
            unsafe { platform.unmap(start, length) };
        }
        *self = Splits::new();
    }

    /// Returns the places.
    fn places(&self) -> &[u32] {
        if self.memory == 0 {
            return &[];
        }
        // SAFETY: `open` has mapped room for `MOST` places, and `count` is at most `MOST`. The
        // first `count` are initialised. Only this value uses them.
        unsafe { core::slice::from_raw_parts(core::ptr::with_exposed_provenance(self.memory), self.count) }
    }

    /// Returns the indices of the places that a move to `pages` replaces: the places inside the
    /// range and at both of its ends.
    fn covered(&self, pages: &Range<u32>) -> Range<usize> {
        let places = self.places();
        places.partition_point(|place| *place < pages.start)..places.partition_point(|place| *place <= pages.end)
    }

    /// Whether there is room for all places after a move to `pages` in `pieces` pieces.
    pub(crate) fn have_room(&self, pages: &Range<u32>, pieces: usize) -> bool {
        self.memory != 0 && self.count - self.covered(pages).len() + pieces < self.most
    }

    /// Splits a range of pages at the places inside it. Each piece is one mapping, unless the
    /// kernel has split it for another reason.
    pub(crate) fn pieces(&self, pages: Range<u32>) -> impl Iterator<Item = Range<u32>> {
        let places = self.places();
        let first = places.partition_point(|place| *place <= pages.start);
        let inside = places[first..].iter().copied().take_while(move |place| *place < pages.end);
        let mut start = pages.start;
        inside.chain([pages.end]).map(move |end| core::mem::replace(&mut start, end)..end)
    }

    /// Records a move to `pages`. `have_room` has found that there is room.
    pub(crate) fn note(&mut self, pages: &Range<u32>) {
        if !self.have_room(pages, 1) {
            return;
        }
        let covered = self.covered(pages);
        let places: *mut u32 = core::ptr::with_exposed_provenance_mut(self.memory);
        // SAFETY: `open` has mapped room for `MOST` places, and all accesses lie inside them.
        // `have_room` has verified that the places that stay and two more fit.
        unsafe {
            places.add(covered.end).copy_to(places.add(covered.start + 2), self.count - covered.end);
            places.add(covered.start).write(pages.start);
            places.add(covered.start + 1).write(pages.end);
        }
        self.count = self.count - covered.len() + 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use neap_testing::virtual_platform::Virtual;
    use proptest::prelude::*;

    const PAGES: usize = 60;

    proptest! {
        #[test]
        fn places_are_where_mappings_differ(moves in prop::collection::vec((0..PAGES, 1..9_usize), 1..60), most in 4..20_usize) {
            let machine = Virtual::new(4096, 1);
            let mut splits = Splits { most, ..Splits::new() };
            prop_assert!(!splits.have_room(&(0..1), 1), "without memory");
            splits.open(&machine).unwrap();
            // Which mapping each page is in; 0: the arena's.
            let mut mappings = [0; PAGES + 10];
            for (n, (start, pages)) in moves.into_iter().enumerate() {
                let mut moved = mappings;
                moved[start + 1..start + 1 + pages].fill(n + 1);
                let places = |mappings: &[usize]| mappings.windows(2).filter(|two| two[0] != two[1]).count();
                let pages = start as u32..(start + pages) as u32;
                prop_assert_eq!(splits.have_room(&pages, 1), places(&moved) <= most);
                if splits.have_room(&pages, 1) {
                    mappings = moved;
                }
                splits.note(&pages);
                prop_assert_eq!(splits.count, places(&mappings));
                let pieces: std::vec::Vec<_> = splits.pieces(0..PAGES as u32).collect();
                prop_assert_eq!(pieces.len(), places(&mappings[1..PAGES + 1]) + 1);
                prop_assert!(pieces.iter().all(|piece| piece.clone().all(|page| mappings[page as usize + 1] == mappings[piece.start as usize + 1])));
                prop_assert!(splits.places().windows(2).all(|two| two[0] < two[1]));
            }
            splits.close(&machine);
            prop_assert_eq!((splits.count, machine.mapped_bytes()), (0, 0));
        }
    }
}
