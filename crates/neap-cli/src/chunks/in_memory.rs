//! Chunks of per-CPU data of a process that does not answer, read from
//! [its memory](crate::look::remote_memory) as a report in the format of `chunk_report.rs`.

use anyhow::{Result, ensure};
use neap::chunk_report::HEAD;

use super::{FREE, MOST, SIDELINED, TO_DEPOPULATE};
use crate::look::allowance::Allowance;
use crate::look::remote_memory::{MemoryLayout, RemoteMemory, short_at, words_of};

/// Most bytes of the header of a chunk.
const MOST_OF_HEADER: usize = 4096;

/// Returns a report on all chunks.
pub(super) fn report(memory: &RemoteMemory<'_>, layout: MemoryLayout<'_>, allowance: &Allowance) -> Result<Vec<u64>> {
    let value = |name: &str| layout.get(name);
    let [reach, destroyed, rows, owners] =
        memory.shorts([value("at_reach")?, value("at_destroyed")?, value("at_rows")?, value("at_owners")?])?;
    let [populated, empty, isolated, taken, granules, allocations] = memory.longs([
        value("at_populated")?,
        value("at_empty")?,
        value("at_isolated_empty")?,
        value("at_taken")?,
        value("at_granules")?,
        value("at_allocations")?,
    ])?;
    let (groups, cpus) = (value("groups")?, value("cpus")?);
    ensure!(reach <= value("chunks")?, "{reach} chunks");
    let mut words = vec![1, 0, u64::MAX];
    for name in ["cpu_major", "cpus", "groups", "columns", "page", "pages", "grains", "grain", "stripe"] {
        words.push(value(name)?);
    }
    words.extend([populated, empty, isolated, value("reserve")?].map(|pages| pages.saturating_mul(groups)));
    words.push(granules.saturating_mul(value("granule")?).saturating_mul(cpus));
    words.push(taken.saturating_mul(value("stripe")?).saturating_mul(groups));
    words.extend([allocations, rows, owners.saturating_sub(1), reach.saturating_sub(destroyed)]);
    ensure!(words.len() == HEAD, "a head of {} words", words.len());
    for number in 0..reach {
        let chunk = chunk(memory, layout, number)?;
        allowance.take(size_of_val(&chunk[..]))?;
        words[1] += u64::from(!chunk.is_empty());
        words.extend(chunk);
    }
    Ok(words)
}

/// Returns the words of a chunk; none if it does not exist.
fn chunk(memory: &RemoteMemory<'_>, layout: MemoryLayout<'_>, number: u64) -> Result<Vec<u64>> {
    let base = layout.get("chunks_table")?.wrapping_add(number.wrapping_mul(layout.get("chunk_length")?));
    let length = layout.size("header_length", MOST_OF_HEADER)?;
    let maps = [("in_chunk_populated", "pages"), ("in_chunk_map", "grains"), ("in_chunk_starts", "granules")];
    let mut places = vec![(base, length)];
    for (map, bits) in maps {
        let bytes = layout.size(bits, MOST as usize)?.div_ceil(64) * 8;
        places.push((base.wrapping_add(layout.get(map)?), bytes));
    }
    let ends = places.iter().scan(0, |end, (_, length)| {
        *end += length;
        Some(*end)
    });
    let ends: Vec<usize> = ends.collect();
    let bytes = memory.read(places)?;
    let header = |name: &str| layout.size(name, MOST_OF_HEADER);
    let short = |name: &str| header(name).map(|at| short_at(&bytes, at));
    let flag = |name: &str| header(name).map(|at| u64::from(bytes.get(at).is_some_and(|byte| *byte != 0)));
    if flag("in_header_exists")? == 0 {
        return Ok(Vec::new());
    }
    let list = short("in_header_list")?;
    let list = match list {
        _ if list == layout.get("list_free")? => FREE,
        _ if list == layout.get("list_sidelined")? => SIDELINED,
        _ if list == layout.get("list_to_depopulate")? => TO_DEPOPULATE,
        slot => slot,
    };
    let grain = layout.get("grain")?;
    let allocations: u64 = words_of(&bytes[ends[2]..]).iter().map(|word| u64::from(word.count_ones())).sum();
    let mut words = vec![number, list, flag("in_header_isolated")?];
    words.push(short("in_header_taken")?.saturating_mul(grain));
    words.push(short("in_header_longest")?.saturating_mul(grain));
    words.extend([short("in_header_populated")?, short("in_header_empty")?, allocations]);
    words.extend(words_of(&bytes[ends[0]..ends[2]]));
    Ok(words)
}
