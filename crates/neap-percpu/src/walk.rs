//! A walk over the chunks, for whoever shows them: each with its list, its numbers and its maps.
//!
//! Sits between the state and a program that draws it. One chunk at a time under the state's lock, for as long as it takes to hand
//! over its maps: a word for each 64 pages and for each 64 grains. Chunks come and go between two steps, so a walk is no
//! picture of one moment; each chunk is. Never waits for the worker, and changes nothing.

use crate::data::{Charge, PerCpuData};
use crate::geometry::Layout;

/// What all chunks of an instance have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dimensions {
    /// The layout.
    pub layout: Layout,
    /// CPUs that have copies.
    pub cpus: usize,
    /// Groups: each page of a chunk's map is so many of the machine.
    pub groups: usize,
    /// CPUs that a group has room for.
    pub columns: usize,
    /// Bytes of a page.
    pub page: usize,
    /// Pages and grains of a chunk.
    pub pages: usize,
    /// See there.
    pub grains: usize,
    /// Bytes of a grain, per CPU.
    pub grain: usize,
    /// Bytes of a grain, per group: grain `g` lies at `g * stripe` of each group's part.
    pub stripe: usize,
}

/// Which list a chunk is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum List {
    /// The slot of chunks whose longest free run is about as long: at least `2^(n + 2)` bytes per CPU, and less than twice that. 0
    /// for those that nothing fits into.
    Slot(usize),
    /// It was emptied, so that fuller ones are filled first.
    Sidelined,
    /// Nothing is in it.
    Free,
    /// Its empty pages are to go.
    ToDepopulate,
}

/// A chunk at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// Its number, which another one may have when it is gone.
    pub number: u32,
    /// The list it is on.
    pub list: List,
    /// Whether its empty pages are not counted as reserve.
    pub isolated: bool,
    /// Bytes per CPU in rows, and in the longest run that is in none.
    pub taken_bytes: usize,
    /// See there.
    pub longest_bytes: usize,
    /// Pages with memory behind them, and those of them that no row touches.
    pub populated: usize,
    /// See there.
    pub empty: usize,
    /// Allocations.
    pub allocations: usize,
}

impl<C: Charge> PerCpuData<C> {
    /// What all chunks have in common.
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

    /// The numbers of all chunks are below this.
    pub fn chunk_numbers(&self) -> u32 {
        self.state.lock().chunks.reach()
    }

    /// The chunk of that number, if there is one. Before it answers, `populated` is called with the words of its map of populated
    /// pages, and `taken` with those of its map of grains in rows, the first page and the first grain in the lowest bit of the
    /// first. Under the lock: neither may come back to the instance, or wait.
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
