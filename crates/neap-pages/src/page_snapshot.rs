//! A survey of the arena: the use of every page at the moment, and the mappings beside it, for
//! comparison with the system's view.
//!
//! Unlike the verification (`verify`) it runs while other threads work, under the zone's mutex for
//! one piece of the arena. It changes nothing.

use crate::buddy::Buddy;
use crate::frames::State;
use crate::units::CHUNK;
use crate::zone::Zone;
use neap_base::{Pfn, bitmap, listed_enum};

/// Number of pages of a piece of the arena.
pub const PIECE: usize = CHUNK as usize;

listed_enum! {
    /// The use of a page.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(u8)]
    pub enum Use {
        /// Not part of the arena.
        Foreign,
        /// Free, without memory.
        Free,
        /// Free, possibly with memory.
        FreeBacked,
        /// In a CPU's list.
        Listed,
        /// Part of a block that is handed out and is no slab.
        Block,
        /// Part of a run that is handed out.
        Run,
        /// Part of a slab.
        Slab,
        /// Detached while its memory is released or populated.
        Releasing,
    }
}

impl Use {
    /// The use of a page of a piece, from the piece's nibbles.
    pub fn of(uses: &[u64], page: usize) -> Use {
        let nibble = uses.get(page / 16).map_or(0, |word| word >> (page % 16 * 4) & 15);
        Use::ALL.get(nibble as usize).copied().unwrap_or(Use::Foreign)
    }
}

impl Zone {
    pub(crate) fn survey(&self, first: Pfn, uses: &mut [u64; PIECE / 16]) {
        self.lock().buddy.survey(first, uses);
    }
}

impl Buddy {
    fn survey(&self, first: Pfn, uses: &mut [u64; PIECE / 16]) {
        let mut set = |at: u32, what: Use| uses[at as usize / 16] |= (what as u64) << (at % 16 * 4);
        let free = |page: u32| match self.count_backed(first.plus(page), 1) {
            0 => Use::Free,
            _ => Use::FreeBacked,
        };
        if bitmap::get(self.free_chunks.get(), first.index() / PIECE) {
            return (0..CHUNK).for_each(|page| set(page, free(page)));
        }
        let mut at = 0;
        while at < CHUNK {
            let frame = self.frames.frame(first.plus(at));
            let (pages, what) = match frame.state() {
                // The rest of a run that began in an earlier piece. Only runs extend over several
                // pieces.
                State::Inside | State::Absent => (1, Use::Run),
                State::Run => (frame.owner(), Use::Run),
                State::Free => (frame.order().pages(), Use::Free),
                State::Listed => (frame.order().pages(), Use::Listed),
                State::Cached => (frame.owner(), Use::Listed),
                State::Allocated => (frame.order().pages(), Use::Block),
                State::Slab => (1, Use::Slab),
                State::Releasing => (frame.order().pages(), Use::Releasing),
            };
            let end = at.saturating_add(pages.max(1)).min(CHUNK);
            (at..end).for_each(|page| set(page, if what == Use::Free { free(page) } else { what }));
            at = end;
        }
    }
}
