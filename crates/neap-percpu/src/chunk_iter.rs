//! A walk over the chunks, for displaying them: each with its list, its numbers and its maps.
//!
//! Each call reads one chunk under the state's lock, a word for each 64 pages and each 64 grains.
//! Chunks come and go between two calls, so only each chunk is consistent, not the walk.
//! [`PerCpuData::chunk`] never waits for the worker. It frees the kept allocation, and changes
//! nothing else.

use crate::data::{Charge, PerCpuData};
use crate::geometry::Layout;

/// Dimensions that all chunks of an instance have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dimensions {
    /// The layout.
    pub layout: Layout,
    /// CPUs that have copies.
    pub cpus: usize,
    /// Number of groups. Each page of a chunk's map stands for this many pages of the machine.
    pub groups: usize,
    /// CPUs that a group has room for.
    pub columns: usize,
    /// Bytes of a page.
    pub page: usize,
    /// Pages of a chunk.
    pub pages: usize,
    /// Grains of a chunk.
    pub grains: usize,
    /// Bytes of a grain, per CPU.
    pub grain: usize,
    /// Bytes of a grain, per group: grain `g` lies at `g * stripe` of each group's part.
    pub stripe: usize,
}

/// The list that a chunk is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum List {
    /// The slot of its longest free run, which has at least `2^(n + 2)` bytes per CPU, and less
    /// than twice that. In slot 0 no allocation fits.
    Slot(usize),
    /// The list of chunks whose empty pages were released. Allocations try all slots first.
    Sidelined,
    /// The list of chunks without rows.
    Free,
    /// The list of chunks whose empty pages are to be released.
    ToDepopulate,
}

/// A chunk at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// Its number. A new chunk reuses the number after this one is destroyed.
    pub number: u32,
    /// The list that it is on.
    pub list: List,
    /// Whether its empty pages are not counted in the reserve.
    pub isolated: bool,
    /// Bytes per CPU in rows.
    pub taken_bytes: usize,
    /// Bytes per CPU in the longest free run.
    pub longest_bytes: usize,
    /// Populated pages.
    pub populated: usize,
    /// Populated pages that no row touches.
    pub empty: usize,
    /// Number of allocations.
    pub allocations: usize,
}

impl<C: Charge> PerCpuData<C> {
    /// The dimensions that all chunks have in common.
    pub fn dimensions(&self) -> Dimensions {
        let geometry = &self.geometry;
        Dimensions {
            layout: geometry.layout,
            cpus: geometry.cpus,
            groups: geometry.groups,
            columns: geometry.columns,
            page: geometry.page,
            pages: geometry.pages,
            grains: geometry.grains,
            grain: geometry.grain,
            stripe: geometry.stripe,
        }
    }

    /// Upper bound of the numbers of all chunks.
    pub fn chunk_numbers(&self) -> u32 {
        self.state.lock().chunks.reach()
    }

    /// Returns chunk `number`, if it exists. First calls `populated` with the words of its map of
    /// populated pages, and `taken` with those of its map of grains in rows. The first page or
    /// grain is the lowest bit of the first word. Both closures run under the lock, and must
    /// neither call the instance nor wait.
    pub fn chunk(&self, number: u32, populated: impl FnMut(u64), taken: impl FnMut(u64)) -> Option<Chunk> {
        let mut state = self.settled();
        if !state.chunks.exists(number as usize) {
            return None;
        }
        let [free, sidelined, to_depopulate] =
            [state.lists.free(), state.lists.sidelined(), state.lists.to_depopulate()];
        let view = state.chunks.get(number);
        let header = *view.header;
        view.populated.iter().copied().for_each(populated);
        view.map.words.iter().copied().for_each(taken);
        Some(Chunk {
            number,
            list: match header.list as usize {
                list if list == free => List::Free,
                list if list == sidelined => List::Sidelined,
                list if list == to_depopulate => List::ToDepopulate,
                slot => List::Slot(slot),
            },
            isolated: header.isolated,
            taken_bytes: header.taken as usize * view.geometry.grain,
            longest_bytes: header.longest as usize * view.geometry.grain,
            populated: header.populated as usize,
            empty: header.empty as usize,
            allocations: view.starts.iter().map(|word| word.count_ones() as usize).sum(),
        })
    }
}
