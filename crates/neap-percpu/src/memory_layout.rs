//! The places of an instance's numbers in memory, for a debugger or a monitor that reads the memory
//! of this process from outside.
//!
//! A monitor computes offsets and sizes from the fields alone, so it may be of another version than
//! this crate. It takes no lock: while threads use the instance, it may read numbers of different
//! moments.

use crate::chunk::Header;
use crate::data::{Charge, PerCpuData};
use crate::geometry::{GRANULE, Layout};
use core::mem::offset_of;

impl<C: Charge> PerCpuData<C> {
    /// Returns names and values: sizes and counts; addresses of words that change (`at_...`) and of
    /// tables (`..._table`); and offsets in the tables of a chunk (`in_chunk_...`) and in its
    /// header, with which the tables begin (`in_header_...`). They stay the same until the instance
    /// is closed. Takes the state's lock.
    pub fn memory_layout(&self) -> [(&'static str, u64); 40] {
        let (geometry, state) = (&self.geometry, self.state.lock());
        let (chunks, rows, lists) = (&state.chunks, &state.rows, &state.lists);
        let parts = chunks.parts();
        let at = |word: *const usize| word.expose_provenance();
        let at_short = |word: *const u32| word.expose_provenance();
        [
            ("cpu_major", usize::from(geometry.layout == Layout::CpuMajor)),
            ("cpus", geometry.cpus),
            ("groups", geometry.groups),
            ("columns", geometry.columns),
            ("page", geometry.page),
            ("pages", geometry.pages),
            ("grains", geometry.grains),
            ("grain", geometry.grain),
            ("stripe", geometry.stripe),
            ("granules", geometry.granules),
            ("granule", GRANULE),
            ("reserve", geometry.high),
            ("chunks", geometry.chunks),
            ("list_free", lists.free()),
            ("list_sidelined", lists.sidelined()),
            ("list_to_depopulate", lists.to_depopulate()),
            ("offsets_table", self.tables.offsets.expose_provenance()),
            ("chunks_table", chunks.tables(0)),
            ("chunk_length", chunks.tables_length()),
            ("in_chunk_map", parts.map),
            ("in_chunk_starts", parts.starts),
            ("in_chunk_populated", parts.populated),
            ("header_length", size_of::<Header>()),
            ("in_header_list", offset_of!(Header, list)),
            ("in_header_exists", offset_of!(Header, exists)),
            ("in_header_isolated", offset_of!(Header, isolated)),
            ("in_header_longest", offset_of!(Header, longest)),
            ("in_header_taken", offset_of!(Header, taken)),
            ("in_header_populated", offset_of!(Header, populated)),
            ("in_header_empty", offset_of!(Header, empty)),
            ("at_reach", at_short(chunks.reach_word())),
            ("at_destroyed", at_short(chunks.destroyed_word())),
            ("at_rows", at_short(rows.rows.in_use_word())),
            ("at_owners", at_short(rows.owners.in_use_word())),
            ("at_populated", at(&raw const state.populated)),
            ("at_empty", at(&raw const state.empty)),
            ("at_isolated_empty", at(&raw const state.isolated_empty)),
            ("at_taken", at(&raw const state.taken)),
            ("at_granules", at(&raw const state.granules)),
            ("at_allocations", at(&raw const state.allocations)),
        ]
        .map(|(name, value)| (name, value as u64))
    }
}
