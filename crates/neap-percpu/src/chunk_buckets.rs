//! The lists of chunks: slots by the longest free run, and three special lists behind them.
//!
//! A search walks the slots upwards from the one of its size, then the sidelined chunks, then the
//! wholly free ones. It never walks the chunks to depopulate. The allocator's lock protects all
//! lists.

use crate::chunk::{Chunks, NONE};
use crate::geometry::GRANULE;
use crate::rows::ListEnd;

/// Number of lists, enough for every unit: the longest run is below 2^32 bytes.
pub(crate) const LISTS: usize = 34;
const BASE_SHIFT: u32 = 3;

/// The slot of a free run of `bytes`; 0 if no allocation fits into it.
pub(crate) fn slot(bytes: usize) -> usize {
    let length = usize::BITS - bytes.leading_zeros();
    if bytes < GRANULE { 0 } else { length.saturating_sub(BASE_SHIFT).max(1) as usize }
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    head: u32,
    tail: u32,
}

/// All lists of an instance.
#[derive(Debug)]
pub(crate) struct ChunkBuckets {
    ends: [Ends; LISTS],
    /// A bit per list, set if the list is not empty.
    filled: u64,
    /// The slot of the longest possible run.
    last_slot: usize,
}

impl ChunkBuckets {
    pub(crate) fn new(unit: usize) -> ChunkBuckets {
        ChunkBuckets { ends: [Ends { head: NONE, tail: NONE }; LISTS], filled: 0, last_slot: slot(unit) }
    }

    /// The list of chunks that were depopulated. Searches try it after all slots, so that
    /// allocations fill fuller chunks first.
    pub(crate) fn sidelined(&self) -> usize {
        self.last_slot + 1
    }

    /// The list of chunks without rows.
    pub(crate) fn free(&self) -> usize {
        self.last_slot + 2
    }

    /// The list of chunks whose empty pages are to be released.
    pub(crate) fn to_depopulate(&self) -> usize {
        self.last_slot + 3
    }

    pub(crate) fn head(&self, list: usize) -> Option<u32> {
        Some(self.ends[list].head).filter(|head| *head != NONE)
    }

    /// The first nonempty list from `from` on, up to the wholly free chunks.
    pub(crate) fn filled_from(&self, from: usize) -> Option<usize> {
        let rest = self.filled >> from << from;
        let list = rest.trailing_zeros() as usize;
        (list <= self.free()).then_some(list)
    }

    /// Puts a chunk on a list.
    pub(crate) fn add(&mut self, chunks: &mut Chunks, list: usize, chunk: u32, end: ListEnd) {
        let ends = &mut self.ends[list];
        let (next, prev) = match end {
            ListEnd::Head => (ends.head, NONE),
            ListEnd::Tail => (NONE, ends.tail),
        };
        let own = chunks.header(chunk);
        (own.next, own.prev, own.list) = (next, prev, list as u32);
        if next == NONE {
            ends.tail = chunk
        } else {
            chunks.header(next).prev = chunk
        }
        if prev == NONE {
            ends.head = chunk
        } else {
            chunks.header(prev).next = chunk
        }
        self.filled |= 1 << list;
    }

    /// Removes a chunk from its list.
    pub(crate) fn remove(&mut self, chunks: &mut Chunks, chunk: u32) {
        let own = chunks.header(chunk);
        let (next, prev, list) = (own.next, own.prev, own.list);
        own.list = NONE;
        let ends = &mut self.ends[list as usize];
        if next == NONE {
            ends.tail = prev
        } else {
            chunks.header(next).prev = prev
        }
        if prev == NONE {
            ends.head = next
        } else {
            chunks.header(prev).next = next
        }
        if ends.head == NONE {
            self.filled &= !(1 << list);
        }
    }

    pub(crate) fn tail(&self, list: usize) -> u32 {
        self.ends[list].tail
    }

    pub(crate) fn is_marked_filled(&self, list: usize) -> bool {
        self.filled >> list & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_doublings() {
        assert_eq!([0, 7, 8, 16, 31, 32, 64, 65535, 65536].map(slot), [0, 0, 1, 2, 2, 3, 4, 13, 14]);
        assert!(slot(1 << 30) + 3 < LISTS);
    }
}
