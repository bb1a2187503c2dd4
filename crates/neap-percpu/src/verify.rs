//! Verifies that every grain, page, row and chunk is in exactly one state.
//!
//! [`PerCpuData::verify`] walks every chunk from row to row, then every list of chunks and of rows,
//! and compares all sums. It holds the turn, so no pages are populated or released meanwhile, and
//! the state's lock. It frees the kept allocation, and changes nothing else.

use crate::chunk::NONE;
use crate::chunk_buckets::slot;
use crate::data::{Charge, PerCpuData};
use crate::state::{State, granules_of};
use neap_base::Finding;
use neap_base::bitmap;
use neap_base::finding::At;

/// Sums over chunks.
#[derive(Default)]
struct Sums {
    populated: u64,
    empty: u64,
    isolated_empty: u64,
    taken: u64,
    granules: u64,
    allocations: u64,
    rows: u64,
    chunks: u64,
    row_bytes: u64,
}

/// Returns a finding unless both numbers are equal. `number` names the chunk, row or owner of the
/// finding; [`NONE`] stands for none of them.
fn equal(what: &'static str, number: u32, expected: u64, found: u64) -> Result<(), Finding> {
    let at = if number == NONE { At::NONE } else { At { thing: "entry", number: number.into() } };
    Finding::unless_equal(what, at, expected, found)
}

impl<C: Charge> PerCpuData<C> {
    /// Verifies the whole instance. Waits for the worker, and keeps all other threads waiting.
    ///
    /// # Errors
    /// The first inconsistency.
    pub fn verify(&self) -> Result<(), Finding> {
        let _turn = self.turn.lock();
        self.settled().verify()
    }
}

impl State {
    /// Number of chunks on a list.
    pub(crate) fn count(&mut self, list: usize) -> usize {
        let (mut next, mut count) = (self.lists.head(list).unwrap_or(NONE), 0);
        while next != NONE {
            next = self.chunks.header(next).next;
            count += 1;
        }
        count
    }

    /// Verifies all chunks, lists, rows and owners.
    pub(crate) fn verify(&mut self) -> Result<(), Finding> {
        let mut sums = Sums::default();
        for chunk in 0..self.chunks.reach() {
            if self.chunks.exists(chunk as usize) {
                self.verify_chunk(chunk, &mut sums)?;
            }
        }
        equal("populated pages", NONE, sums.populated, self.populated as u64)?;
        equal("empty pages", NONE, sums.empty, self.empty as u64)?;
        equal("isolated empty pages", NONE, sums.isolated_empty, self.isolated_empty as u64)?;
        equal("grains in rows", NONE, sums.taken, self.taken as u64)?;
        equal("granules in allocations", NONE, sums.granules, self.granules as u64)?;
        equal("allocations", NONE, sums.allocations, self.allocations as u64)?;
        equal("rows", NONE, sums.rows, self.rows.rows.in_use().into())?;
        equal("chunks", NONE, sums.chunks, self.chunks.in_use().into())?;
        equal("lowest reserve above the present one", NONE, 0, (self.empty_low > self.empty).into())?;
        self.verify_lists(sums.chunks)?;
        self.verify_owners(&sums)
    }

    fn verify_chunk(&mut self, chunk: u32, sums: &mut Sums) -> Result<(), Finding> {
        let equal = |what, expected: usize, found: usize| equal(what, chunk, expected as u64, found as u64);
        let geometry = self.chunks.geometry.clone();
        let view = self.chunks.get(chunk);
        equal("exact hints", 1, view.map.hints_are_exact().into())?;
        equal("longest run", view.map.longest(), view.header.longest as usize)?;
        let taken = bitmap::count_range(view.map.words, 0, geometry.grains);
        equal("grains in rows of a chunk", taken, view.header.taken as usize)?;
        let populated = bitmap::count_range(view.populated, 0, geometry.pages);
        equal("populated pages of a chunk", populated, view.header.populated as usize)?;
        let counts = |page: &usize| bitmap::get(view.populated, *page) && view.is_page_empty(*page);
        let empty = (0..geometry.pages).filter(counts).count();
        equal("empty pages of a chunk", empty, view.header.empty as usize)?;
        equal(
            "hole under a row",
            0,
            (0..geometry.pages)
                .filter(|page| !bitmap::get(view.populated, *page) && !view.is_page_empty(*page))
                .count(),
        )?;

        let (mut grain, mut granules, mut starts) = (0, 0, 0);
        while let Some(first) = bitmap::next_set(view.map.words, grain, geometry.grains) {
            let index = view.row_of[first];
            let row = self.rows.rows.get(index);
            equal("first grain of a row", row.start as usize, first)?;
            equal("chunk of a row", row.chunk as usize, chunk as usize)?;
            let all = view.row_of[first..row.end()].iter().all(|of| *of == index);
            equal("grains of a row that are another's", 1, (all && row.width > 0).into())?;
            equal("row on its owner's list", 1, row.listed.into())?;
            let range = granules_of(&geometry, row);
            let used = bitmap::count_range(view.used, range.start, range.end);
            equal("free granules of a row", range.len() - used, row.free as usize)?;
            equal("row without allocations", 1, (used > 0).into())?;
            let mut at = range.start;
            while let Some(start) = bitmap::next_set(view.used, at, range.end) {
                let Some(end) = view.allocation_end(start, range.end) else {
                    return equal("allocation without a start", start, 0);
                };
                (at, starts) = (end, starts + 1);
            }
            granules += used;
            grain = row.end();
            sums.rows += 1;
            sums.row_bytes += u64::from(row.width) * geometry.grain as u64;
        }
        equal("used granules outside of rows", granules, bitmap::count_range(view.used, 0, geometry.granules))?;
        equal("starts of allocations", starts, bitmap::count_range(view.starts, 0, geometry.granules))?;

        let (header, lists) = (*view.header, &self.lists);
        let natural = if taken == 0 { lists.free() } else { slot(header.longest as usize * geometry.grain) };
        let list = header.list as usize;
        let special = list == lists.sidelined() || list == lists.to_depopulate();
        equal("list of a chunk", natural, if header.isolated && special { natural } else { list })?;
        equal("isolation of a chunk", special.into(), header.isolated.into())?;
        let waiting = list == lists.sidelined() && header.empty > 0;
        equal("sidelined chunk with pages to give", 0, waiting.into())?;
        *if header.isolated { &mut sums.isolated_empty } else { &mut sums.empty } += empty as u64;
        sums.populated += populated as u64;
        sums.taken += taken as u64;
        sums.granules += granules as u64;
        sums.allocations += starts as u64;
        sums.chunks += 1;
        Ok(())
    }

    fn verify_lists(&mut self, chunks: u64) -> Result<(), Finding> {
        let mut listed = 0;
        for list in 0..=self.lists.to_depopulate() {
            let (mut next, mut before) = (self.lists.head(list).unwrap_or(NONE), NONE);
            let filled = self.lists.is_marked_filled(list);
            equal("map of lists", list as u32, (next != NONE).into(), filled.into())?;
            while next != NONE {
                let header = *self.chunks.header(next);
                equal("list of a listed chunk", next, list as u64, header.list.into())?;
                equal("back link of a chunk", next, before.into(), header.prev.into())?;
                (before, next, listed) = (next, header.next, listed + 1);
                equal("length of the lists of chunks", NONE, 1, (listed <= chunks).into())?;
            }
            equal("tail of a list of chunks", list as u32, before.into(), self.lists.tail(list).into())?;
        }
        equal("chunks on lists", NONE, chunks, listed)
    }

    fn verify_owners(&self, sums: &Sums) -> Result<(), Finding> {
        let (mut owners, mut rows, mut bytes) = (0, 0, 0);
        for index in 0..self.rows.owners.reach() {
            let record = self.rows.owners.get(index);
            if !record.exists {
                continue;
            }
            owners += 1;
            let (mut next, mut before, mut own) = (record.head, NONE, 0);
            while next != NONE {
                let row = self.rows.rows.get(next);
                equal("owner of a row", next, index.into(), row.owner.into())?;
                equal("back link of a row", next, before.into(), row.prev.into())?;
                own += u64::from(row.width) * self.rows.grain as u64;
                (before, next, rows) = (next, row.next, rows + 1);
                equal("length of the lists of rows", index, 1, (rows <= sums.rows).into())?;
            }
            equal("tail of a list of rows", index, before.into(), record.tail.into())?;
            equal("bytes of an owner", index, own, record.bytes)?;
            bytes += own;
        }
        equal("rows on lists", NONE, sums.rows, rows)?;
        equal("bytes of all owners", NONE, sums.row_bytes, bytes)?;
        equal("owners", NONE, owners, self.rows.owners.in_use().into())
    }
}
