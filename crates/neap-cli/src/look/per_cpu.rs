//! Bytes of per-CPU data, read from the [memory](super::remote_memory) of a process that has not
//! ticked for a while. The process may have any numbers there, so products do not overflow.

use anyhow::Result;
use serde_json::json;

use super::live::put;
use super::remote_memory::{MemoryLayout, RemoteMemory};
use super::stat_reader::Page;

/// Replaces the bytes of per-CPU data by those in the process's memory, if it has such data.
///
/// # Errors
/// If the memory cannot be read, or not in time. The page stays as it is.
pub(crate) fn refresh(memory: &RemoteMemory<'_>, page: &mut Page) -> Result<()> {
    let Some(layout) = MemoryLayout::of(page, "per_cpu") else { return Ok(()) };
    let places = [layout.get("at_populated")?, layout.get("at_empty")?, layout.get("at_isolated_empty")?];
    let [populated, empty, isolated] = memory.longs(places)?;
    // Each of these pages has one in every group of CPUs.
    let bytes = layout.get("page")?.saturating_mul(layout.get("groups")?);
    let empty = empty.saturating_add(isolated);
    let [used, free] = [populated.saturating_sub(empty), empty].map(|pages| pages.saturating_mul(bytes));
    put(&mut page.object, "per_cpu", json!({"used": used, "free": free}));
    Ok(())
}
