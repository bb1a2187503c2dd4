//! Memory groups of a process that does not answer, read from [its
//! memory](crate::look::remote_memory).
//!
//! The process writes the numbers without a lock that this command could take, so they are of one
//! moment only while the process sleeps. Not read are charges that wait, bytes of deleted groups,
//! and charged bytes of freed objects in caches, which count as used.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use anyhow::{Result, ensure};
use neap::groups::{Bound, Event, Kind};

use super::{ENTRY, ReadGroups, ReportedGroup};
use crate::look::allowance::{ALLOCATION, Allowance};
use crate::look::control_channel::name_of;
use crate::look::remote_memory::{MemoryLayout, RemoteMemory, long_at, short_at, words_of};
use crate::look::stat_reader::monotonic;

/// Most bytes of a group, of a line of stocks, and of the numbers in it.
const MOST_OF_GROUP: usize = 4096;
/// Most CPUs, and most nodes.
const MOST_CPUS: usize = 8192;
const MOST_NODES: usize = 1024;
/// Most classes of offsets of per-CPU data.
const MOST_CLASSES: usize = 2048;
/// Most slots of groups, and the groups that are read at once.
const MOST_SLOTS: u64 = 1 << 24;
const AT_ONCE: usize = 256;
/// Chunks of the table of groups.
const MOST_CHUNKS: usize = 16;

/// The groups of the table, in the order of their slots.
#[derive(Default)]
struct TableEntries {
    /// `parent` is a slot until [`TableEntries::name_parents`] replaces it.
    groups: Vec<ReportedGroup>,
    slots: Vec<u64>,
    /// Words that lead to the groups' per-CPU counts.
    counts: Vec<u64>,
}

impl TableEntries {
    /// Replaces each parent's slot by its id. A group that was read before its parent was made gets
    /// an id that no group has, and is left out later.
    fn name_parents(&mut self) {
        let ids: Vec<u64> = self.groups.iter().map(|group| group.id).collect();
        for (group, &slot) in self.groups.iter_mut().zip(&self.slots) {
            group.parent = match self.slots.binary_search(&group.parent) {
                _ if slot == 0 => 0,
                Ok(at) => ids[at],
                Err(_) => u64::MAX,
            };
        }
    }
}

/// Reads all groups.
pub(super) fn read(
    memory: &RemoteMemory<'_>,
    layout: MemoryLayout<'_>,
    per_cpu: Option<MemoryLayout<'_>>,
    allowance: &Allowance,
) -> Result<ReadGroups> {
    let parts = ["bounds", "kinds", "events"].map(|name| layout.get(name).ok());
    let expected = [Bound::ALL.len(), Kind::ALL.len(), Event::ALL.len()].map(|length| Some(length as u64));
    ensure!(parts == expected, "its groups are of another version of neap");
    let mut entries = entries(memory, layout, allowance)?;
    entries.name_parents();
    if let Some(per_cpu) = per_cpu {
        read_kinds(memory, layout, per_cpu, &mut entries, allowance)?;
    }
    let [dying, known, fences] =
        memory.shorts([layout.get("at_dying")?, layout.get("at_ids")?, layout.get("at_fences")?])?;
    Ok(ReadGroups {
        unused: stocked(memory, layout, allowance)?,
        groups: entries.groups,
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
    let [slots] = memory.shorts([layout.get("at_slots")?])?;
    let (length, first) = (layout.size("group_length", MOST_OF_GROUP)?, layout.get("first_chunk")?);
    ensure!(slots <= MOST_SLOTS && length > 0 && first > 0, "{slots} slots of groups");
    let chunks = memory.words(layout.get("chunks_table")?, MOST_CHUNKS)?;
    // The first chunk is as long as the second, and each later one as long as all before it.
    let (mut entries, mut start, mut chunk_length) = (TableEntries::default(), 0_u64, first);
    for (number, &chunk) in chunks.iter().enumerate() {
        let end = start.saturating_add(chunk_length).min(slots);
        for from in (start..end).step_by(AT_ONCE) {
            let count = (end - from).min(AT_ONCE as u64) as usize;
            let address = chunk.saturating_add((from - start) * length as u64);
            let bytes = memory.read(vec![(address, count * length)])?;
            for (slot, bytes) in (from..).zip(bytes.chunks_exact(length)) {
                if let Some((group, counts)) = entry(layout, bytes)? {
                    allowance.take(size_of::<ReportedGroup>() + group.name.len() + 2 * ALLOCATION + 3 * 8)?;
                    entries.groups.push(group);
                    entries.slots.push(slot);
                    entries.counts.push(counts);
                }
            }
        }
        (start, chunk_length) = (end, if number == 0 { first } else { chunk_length.saturating_mul(2) });
        if start == slots {
            break;
        }
    }
    Ok(entries)
}

/// Reads an entry of the table: the group, with its parent's slot as `parent`, and the word of its
/// counts. `None` for a free slot, and for a group that is being deleted.
fn entry(layout: MemoryLayout<'_>, bytes: &[u8]) -> Result<Option<(ReportedGroup, u64)>> {
    let at = |name: &str| layout.size(name, MOST_OF_GROUP);
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
        parent: short("in_group_parent")?,
        name: name_of(short("in_group_name_length")?, &words_of(bytes.get(name).unwrap_or_default())),
        charged: long("in_group_usage")?,
        peak: long("in_group_peak")?,
        stalled_us: long("in_group_stalled")?.saturating_add(running) / 1000,
        bounds: core::array::from_fn(|at| list(bounds, at)),
        events: core::array::from_fn(|at| list(local, at).wrapping_add(list(below, at))),
        local_events: core::array::from_fn(|at| list(local, at)),
        ..ReportedGroup::default()
    };
    Ok(Some((group, long("in_group_counts")?)))
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
    let counted = entries.groups.iter_mut().zip(&entries.counts).filter(|(_, counts)| **counts != 0);
    for (group, counts) in counted {
        let (address, class) = (counts & ((1 << bits) - 1), counts >> bits);
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

/// Adds up the bytes in stocks by group.
fn stocked(memory: &RemoteMemory<'_>, layout: MemoryLayout<'_>, allowance: &Allowance) -> Result<BTreeMap<u64, u64>> {
    let (cpus, stride) = (layout.size("stocks_cpus", MOST_CPUS)?, layout.get("stocks_stride")?);
    let (words, bits) = (layout.size("stocks_words", MOST_OF_GROUP / 8)?, layout.size("stock_bytes_bits", 63)?);
    let (table, id_bits) = (layout.get("stocks_table")?, layout.size("id_bits", 63)?);
    let lines = (0..cpus as u64).map(|cpu| (table.wrapping_add(cpu.wrapping_mul(stride)), words * 8));
    let mut unused: BTreeMap<u64, u64> = BTreeMap::new();
    for word in words_of(&memory.read(lines.collect())?) {
        let (bytes, id) = (word & ((1 << bits) - 1), word >> bits & ((1 << id_bits) - 1));
        if bytes > 0 {
            allowance.take(ENTRY)?;
            let sum = unused.entry(id).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }
    Ok(unused)
}
