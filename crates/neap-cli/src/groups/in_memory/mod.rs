//! Memory groups of a process that does not answer, read from [its
//! memory](crate::look::remote_memory).
//!
//! The process writes the numbers without a lock that this command could take, so they are of one
//! moment only while the process sleeps.
//!
//! | numbers | file |
//! |---|---|
//! | groups, kinds, stocks | this one |
//! | tables of entries | `table` |
//! | groups behind ids, deleted groups | `ids` |
//! | charges that wait | `waits` |
//! | freed objects in caches that are still charged | `kept` |

mod ids;
mod kept;
mod table;
mod waits;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use anyhow::{Context, Result, ensure};
use neap::groups::{Bound, Event, Kind};

use super::{ENTRY, ReadGroups, ReportedGroup};
use crate::look::allowance::{ALLOCATION, Allowance};
use crate::look::control_channel::name_of;
use crate::look::remote_memory::{MemoryLayout, RemoteMemory, long_at, short_at, words_of};
use crate::look::stat_reader::{Page, monotonic};
use ids::Ids;
use table::{MOST_OF_ENTRY, RemoteTable};

/// Most CPUs, and most nodes.
const MOST_CPUS: usize = 8192;
const MOST_NODES: usize = 1024;
/// Most classes of offsets of per-CPU data.
const MOST_CLASSES: usize = 2048;

/// The groups of the table, in the order of their slots.
#[derive(Default)]
struct TableEntries(Vec<TableEntry>);

/// A group of the table. Its parent is a slot.
struct TableEntry {
    group: ReportedGroup,
    slot: u64,
    parent: u64,
    /// Word that leads to the group's per-CPU counts.
    counts: u64,
    /// The oldest charge that waits here, plus one, and microseconds of rest after reclaim.
    first_waiter: u64,
    rest: u64,
}

impl TableEntries {
    /// Returns the group in a slot.
    fn at(&self, slot: u64) -> Option<&TableEntry> {
        self.0.binary_search_by_key(&slot, |entry| entry.slot).ok().map(|at| &self.0[at])
    }

    /// Returns the groups with their parents' ids. A group that was read before its parent was made
    /// gets an id that no group has, and is left out later.
    fn groups(mut self) -> Vec<ReportedGroup> {
        let parent = |entry: &TableEntry| match self.at(entry.parent) {
            _ if entry.slot == 0 => 0,
            parent => parent.map_or(u64::MAX, |parent| parent.group.id),
        };
        let parents: Vec<u64> = self.0.iter().map(parent).collect();
        self.0.iter_mut().zip(parents).for_each(|(entry, parent)| entry.group.parent = parent);
        self.0.into_iter().map(|entry| entry.group).collect()
    }
}

/// Reads all groups.
pub(super) fn read(
    memory: &RemoteMemory<'_>,
    layout: MemoryLayout<'_>,
    page: &Page,
    allowance: &Allowance,
) -> Result<ReadGroups> {
    let parts = ["bounds", "kinds", "events"].map(|name| layout.get(name).ok());
    let expected = [Bound::ALL.len(), Kind::ALL.len(), Event::ALL.len()].map(|length| Some(length as u64));
    ensure!(parts == expected, "its groups are of another version of neap");
    let part = |name| MemoryLayout::of(page, name).with_context(|| format!("its page has no layout of {name}"));
    let mut entries = entries(memory, layout, allowance)?;
    if let Some(per_cpu) = MemoryLayout::of(page, "per_cpu") {
        read_kinds(memory, layout, per_cpu, &mut entries, allowance)?;
    }
    let [dying, known, fences] =
        memory.shorts([layout.get("at_dying")?, layout.get("at_ids")?, layout.get("at_fences")?])?;
    let ids = Ids::read(memory, part("group_ids")?, allowance)?;
    let id_bits = layout.size("id_bits", 63)?;
    let waiting = waits::read(memory, part("group_waits")?, id_bits, &entries, &ids, allowance)?;
    let mut unused = BTreeMap::new();
    let mut add = |id: u64, bytes: u64| -> Result<()> {
        let Some(group) = ids.group_of(id, &entries) else { return Ok(()) };
        allowance.take(if unused.contains_key(&group) { 0 } else { ENTRY })?;
        let sum: &mut u64 = unused.entry(group).or_default();
        *sum = sum.saturating_add(bytes);
        Ok(())
    };
    stocked(memory, layout)?.into_iter().try_for_each(|(id, bytes)| add(id, bytes))?;
    for (payer, bytes) in kept::read(memory, part("charged")?, page, allowance)? {
        add(payer & ((1 << id_bits) - 1), bytes)?;
    }
    Ok(ReadGroups {
        unused,
        gone: ids.gone(&entries, allowance)?,
        waiting,
        groups: entries.groups(),
        dying,
        ids: known,
        fences,
        metadata: layout.get("bytes")?,
        is_from_memory: true,
        ..ReadGroups::default()
    })
}

/// Reads the groups of all slots in use.
fn entries(memory: &RemoteMemory<'_>, layout: MemoryLayout<'_>, allowance: &Allowance) -> Result<TableEntries> {
    let table = RemoteTable { layout, chunks: "chunks_table", count: "at_slots", length: "group_length" };
    let mut entries = TableEntries::default();
    table.each(memory, &mut |slot, bytes| {
        if let Some(entry) = entry(layout, slot, bytes)? {
            allowance.take(size_of::<TableEntry>() + entry.group.name.len() + 2 * ALLOCATION)?;
            entries.0.push(entry);
        }
        Ok(())
    })?;
    Ok(entries)
}

/// Reads an entry of the table. `None` for a free slot, and for a group that is being deleted.
fn entry(layout: MemoryLayout<'_>, slot: u64, bytes: &[u8]) -> Result<Option<TableEntry>> {
    let at = |name: &str| layout.size(name, MOST_OF_ENTRY);
    let long = |name: &str| at(name).map(|at| long_at(bytes, at));
    let short = |name: &str| at(name).map(|at| short_at(bytes, at));
    let id = long("in_group_id")?;
    if id == 0 || short("in_group_is_leaving")? != 0 {
        return Ok(None);
    }
    let list = |start: usize, at: usize| long_at(bytes, start + 8 * at);
    let (bounds, local, below, name) = (
        at("in_group_bounds")?,
        at("in_group_local_events")?,
        at("in_group_events_below")?,
        at("in_group_name")?..at("in_group_name")? + at("name_length")?,
    );
    let running = match short("in_group_stalls")? {
        0 => 0,
        _ => monotonic().saturating_sub(long("in_group_stalled_since")?),
    };
    let group = ReportedGroup {
        id,
        name: name_of(short("in_group_name_length")?, &words_of(bytes.get(name).unwrap_or_default())),
        charged: long("in_group_usage")?,
        peak: long("in_group_peak")?,
        stalled_us: long("in_group_stalled")?.saturating_add(running) / 1000,
        bounds: core::array::from_fn(|at| list(bounds, at)),
        events: core::array::from_fn(|at| list(local, at).wrapping_add(list(below, at))),
        local_events: core::array::from_fn(|at| list(local, at)),
        ..ReportedGroup::default()
    };
    Ok(Some(TableEntry {
        group,
        slot,
        parent: short("in_group_parent")?,
        counts: long("in_group_counts")?,
        first_waiter: short("in_group_first_waiter")?,
        rest: short("in_group_rest")?,
    }))
}

/// Adds up the bytes of each group by kind. A group has a word for each node and kind on each CPU.
fn read_kinds(
    memory: &RemoteMemory<'_>,
    layout: MemoryLayout<'_>,
    per_cpu: MemoryLayout<'_>,
    entries: &mut TableEntries,
    allowance: &Allowance,
) -> Result<()> {
    let (cpus, nodes) = (per_cpu.size("cpus", MOST_CPUS)?, layout.size("nodes", MOST_NODES)?);
    let (table, bits) = (per_cpu.get("offsets_table")?, layout.size("handle_address_bits", 63)?);
    ensure!(cpus > 0 && nodes > 0, "{cpus} CPUs and {nodes} nodes");
    let length = nodes * Kind::ALL.len() * 8;
    let mut offsets: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for TableEntry { group, counts, .. } in entries.0.iter_mut().filter(|entry| entry.counts != 0) {
        let (address, class) = (*counts & ((1 << bits) - 1), *counts >> bits);
        ensure!(class < MOST_CLASSES as u64, "class {class} of per-CPU data");
        let offsets = match offsets.entry(class) {
            Entry::Vacant(vacant) => {
                allowance.take(cpus * 8 + ENTRY + ALLOCATION)?;
                vacant.insert(memory.words(table.saturating_add(class * cpus as u64 * 8), cpus)?)
            }
            Entry::Occupied(known) => known.into_mut(),
        };
        let copies = offsets.iter().map(|offset| (address.wrapping_add(*offset), length)).collect();
        let mut sums = [0_i64; Kind::ALL.len()];
        for (at, word) in words_of(&memory.read(copies)?).into_iter().enumerate() {
            let sum = &mut sums[at % Kind::ALL.len()];
            *sum = sum.wrapping_add(word.cast_signed());
        }
        group.kinds = sums.map(|sum| sum.max(0).cast_unsigned());
    }
    Ok(())
}

/// Returns the ids of groups in stocks, and their bytes there.
fn stocked(memory: &RemoteMemory<'_>, layout: MemoryLayout<'_>) -> Result<Vec<(u64, u64)>> {
    let (cpus, stride) = (layout.size("stocks_cpus", MOST_CPUS)?, layout.get("stocks_stride")?);
    let (words, bits) = (layout.size("stocks_words", MOST_OF_ENTRY / 8)?, layout.size("stock_bytes_bits", 63)?);
    let (table, id_bits) = (layout.get("stocks_table")?, layout.size("id_bits", 63)?);
    let lines = (0..cpus as u64).map(|cpu| (table.wrapping_add(cpu.wrapping_mul(stride)), words * 8));
    let words = words_of(&memory.read(lines.collect())?).into_iter();
    let parts = words.map(|word| (word >> bits & ((1 << id_bits) - 1), word & ((1 << bits) - 1)));
    Ok(parts.filter(|(_, bytes)| *bytes > 0).collect())
}
