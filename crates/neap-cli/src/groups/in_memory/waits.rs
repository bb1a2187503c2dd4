//! The charges that wait, in a process's memory.

use anyhow::{Context, Result};
use neap::group_report::REASONS;
use neap::groups::Bound;
use neap_groups::DEEPEST;

use super::super::WaitingCharge;
use super::TableEntries;
use super::ids::Ids;
use super::table::{MOST_OF_ENTRY, RemoteTable};
use crate::look::allowance::Allowance;
use crate::look::remote_memory::{MemoryLayout, RemoteMemory, long_at, short_at};
use crate::look::stat_reader::monotonic;

/// Reads the charges that wait. Whether neap calls no shrinker of a group at present is not read,
/// so such a wait has the reason `in vain`, not `barred`.
pub(super) fn read(
    memory: &RemoteMemory<'_>,
    layout: MemoryLayout<'_>,
    id_bits: usize,
    entries: &TableEntries,
    ids: &Ids,
    allowance: &Allowance,
) -> Result<Vec<WaitingCharge>> {
    let at = |name: &str| layout.size(name, MOST_OF_ENTRY);
    let (state, place, payer) = (at("in_waiter_state")?, at("in_waiter_place")?, at("in_waiter_payer")?);
    let (bytes_at, since, deadline) = (at("in_waiter_bytes")?, at("in_waiter_since")?, at("in_waiter_deadline")?);
    let (waiting, held) = (layout.get("waiting")?, layout.get("held")?);
    let table = RemoteTable { layout, chunks: "waiters_table", count: "at_waiters", length: "waiter_length" };
    let (mut all, now) = (Vec::new(), monotonic());
    table.each(memory, &mut |index, bytes| {
        let group = long_at(bytes, payer) & ((1 << id_bits) - 1);
        let place = match short_at(bytes, state) {
            state if state == waiting => place_of_waiting(entries, short_at(bytes, place), index),
            state if state == held => ids.slot_of(group).and_then(|slot| place_of_held(entries, slot)),
            _ => None,
        };
        if let Some((at, reason)) = place {
            allowance.take(2 * size_of::<WaitingCharge>())?;
            let deadline = Some(long_at(bytes, deadline)).filter(|deadline| *deadline != u64::MAX);
            all.push(WaitingCharge {
                group,
                at,
                reason: REASONS.iter().find(|name| **name == reason).context("a reason has another name")?,
                bytes: long_at(bytes, bytes_at),
                waited: now.saturating_sub(long_at(bytes, since)),
                left: deadline.map(|deadline| deadline.saturating_sub(now)),
            });
        }
        Ok(())
    })?;
    Ok(all)
}

/// Returns the group that a charge is queued at, and the reason.
fn place_of_waiting(entries: &TableEntries, slot: u64, index: u64) -> Option<(u64, &'static str)> {
    let entry = entries.at(slot)?;
    let reason = match (entry.first_waiter == index + 1, entry.rest) {
        (false, _) => "turn",
        (true, 0) => "room",
        (true, _) => "in vain",
    };
    Some((entry.group.id, reason))
}

/// Returns the uppermost group above its `high`, from a slot upwards.
fn place_of_held(entries: &TableEntries, slot: u64) -> Option<(u64, &'static str)> {
    let mut found = None;
    let mut entry = entries.at(slot);
    for _ in 0..=DEEPEST {
        let Some(of) = entry else { break };
        if of.group.charged > of.group.bounds[Bound::High as usize] {
            found = Some((of.group.id, "high"));
        }
        entry = if of.slot == 0 { None } else { entries.at(of.parent) };
    }
    found
}
