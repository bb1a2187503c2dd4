//! What every page of the arena is at the moment, and what is mapped beside it: for whoever compares that with what the system
//! has there.
//!
//! Sits beside the proof (`verify`), which wants everything to stand still and counts; this tells page by page while others go on,
//! under the zone's lock for one piece of the arena. Changes nothing.

use crate::arena::CHUNK;
use crate::buddy::Buddy;
use crate::frames::State;
use crate::zone::Zone;
use neap_base::{Pfn, bitmap};

/// Pages of a piece of the arena.
pub const PIECE: usize = CHUNK as usize;

/// Something that is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Memory that is handed out.
    Arena,
    /// Frames, and maps of pages and chunks.
    OwnTables,
    /// A side table of the layer above, by its number.
    Table(usize),
    /// Lists of CPUs, and what else the pages of a node keep.
    Lists,
}

/// What a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Use {
    /// Not of the arena.
    Foreign = 0,
    /// Free, with nothing behind it.
    Free = 1,
    /// Free, and something may be behind it.
    FreeBacked = 2,
    /// In a CPU's list.
    Listed = 3,
    /// Of a block that is handed out and is no slab.
    Block = 4,
    /// Of a run that is handed out.
    Run = 5,
    /// Of a slab.
    Slab = 6,
    /// Detached while its memory goes or comes.
    Releasing = 7,
}

impl Use {
    /// All, by their numbers.
    pub const ALL: [Use; 8] =
        [Use::Foreign, Use::Free, Use::FreeBacked, Use::Listed, Use::Block, Use::Run, Use::Slab, Use::Releasing];

    /// That of a page of a piece, of the nibbles that tell of all.
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
                // The rest of what began in a piece before this one, which can only be a run.
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
