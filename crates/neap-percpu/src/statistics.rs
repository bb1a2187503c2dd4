//! Statistics of an instance.
//!
//! Statistics are copied under the state's lock. Page counts are for all groups together.

use crate::chunk::NONE;
use crate::data::{Charge, PerCpuData};
use crate::geometry::GRANULE;
use crate::state::State;
use neap_base::platform::memory::Range;

/// Statistics of an instance at a moment.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Statistics {
    /// Bytes of a page.
    pub page: usize,
    /// Populated pages.
    pub populated: usize,
    /// Populated pages without rows that allocations may use: the reserve.
    pub empty: usize,
    /// Populated pages without rows in isolated chunks.
    pub isolated_empty: usize,
    /// Pages of the reserve that the worker keeps.
    pub reserve: usize,
    /// Bytes of all copies of all allocations. The bytes of each copy are rounded up to 8.
    pub allocated_bytes: usize,
    /// Bytes of rows, including their free parts and the room for CPUs that a node lacks.
    pub row_bytes: usize,
    /// Number of allocations.
    pub allocations: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of owners, without [`Owner::NONE`](crate::Owner::NONE).
    pub owners: usize,
    /// Number of chunks.
    pub chunks: usize,
    /// Number of wholly free chunks.
    pub free_chunks: usize,
    /// Number of sidelined chunks.
    pub sidelined_chunks: usize,
    /// Number of chunks that are to be depopulated.
    pub depopulating_chunks: usize,
    /// Pages released so far.
    pub released: u64,
    /// Calls so far that released pages.
    pub release_calls: u64,
    /// Releasing calls so far that the system refused.
    pub release_failures: u64,
    /// Calls so far that populated pages.
    pub populate_calls: u64,
    /// Chunks destroyed so far.
    pub destroyed: u64,
    /// Chunks that the worker has examined so far.
    pub looks: u64,
    /// Entries that the tables of rows and owners have grown to.
    pub table_entries: usize,
}

/// Bytes of populated pages.
#[derive(Clone, Copy, Debug, Default)]
pub struct PopulatedBytes {
    /// Bytes of pages with rows.
    pub used: u64,
    /// Bytes of pages without rows.
    pub free: u64,
}

impl<C: Charge> PerCpuData<C> {
    /// Returns the statistics. May wait for a pass of the worker.
    pub fn statistics(&self) -> Statistics {
        let counts = self.turn.lock().counts;
        let mut state = self.settled();
        let lists = [state.lists.free(), state.lists.sidelined(), state.lists.to_depopulate()];
        let [free_chunks, sidelined_chunks, depopulating_chunks] = lists.map(|list| state.count(list));
        Statistics {
            free_chunks,
            sidelined_chunks,
            depopulating_chunks,
            released: counts.released,
            release_calls: counts.release_calls,
            release_failures: counts.release_failures,
            populate_calls: counts.populate_calls,
            destroyed: counts.destroyed,
            ..self.numbers(&state)
        }
    }

    /// Returns the statistics that need no wait. The numbers of chunks by list are 0. The counts of
    /// the worker's actions are also 0, except `looks`.
    pub fn statistics_at_once(&self) -> Statistics {
        self.numbers(&self.settled())
    }

    fn numbers(&self, state: &State) -> Statistics {
        let groups = self.geometry.groups;
        Statistics {
            page: self.geometry.page,
            populated: state.populated * groups,
            empty: state.empty * groups,
            isolated_empty: state.isolated_empty * groups,
            reserve: self.geometry.high * groups,
            allocated_bytes: state.granules * GRANULE * self.geometry.cpus,
            row_bytes: state.taken * self.geometry.stripe * groups,
            allocations: state.allocations,
            rows: state.rows.rows.in_use() as usize,
            owners: state.rows.owners.in_use() as usize - 1,
            chunks: state.chunks.in_use() as usize,
            looks: state.looks,
            table_entries: (state.rows.rows.reach() + state.rows.owners.reach()) as usize,
            ..Statistics::default()
        }
    }

    /// Bytes of populated pages with rows, and of those without. Does not wait for the worker.
    pub fn populated_bytes(&self) -> PopulatedBytes {
        let state = self.settled();
        let (page, empty) = (self.geometry.page * self.geometry.groups, state.empty + state.isolated_empty);
        PopulatedBytes { used: ((state.populated - empty) * page) as u64, free: (empty * page) as u64 }
    }

    /// Bytes of all copies that belong to owners with a payer. Walks their rows under the lock.
    pub fn paid_bytes(&self) -> u64 {
        let (state, mut granules) = (self.settled(), 0);
        let rows = &state.rows;
        let owners = (0..rows.owners.reach()).map(|index| rows.owners.get(index));
        for owner in owners.filter(|owner| owner.exists && owner.payer != 0) {
            let mut next = owner.head;
            while next != NONE {
                let row = rows.rows.get(next);
                granules += row.width as usize * self.geometry.grain_granules() - row.free as usize;
                next = row.next;
            }
        }
        (granules * GRANULE * self.geometry.cpus) as u64
    }

    /// The two reservations: memory, and tables.
    pub fn mappings(&self) -> [Range; 2] {
        self.mappings
    }

    /// Calls `each` with address and length of each group's part that chunks have reached so far.
    pub fn reach(&self, mut each: impl FnMut(usize, usize)) {
        let chunks = self.state.lock().chunks.reach() as usize;
        (0..self.geometry.groups).for_each(|group| each(self.pages_at(group, 0, 0), chunks * self.geometry.chunk));
    }
}
