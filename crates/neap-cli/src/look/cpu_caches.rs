//! The contents of the CPUs' caches, read from the [memory](super::remote_memory) of a process that
//! has not ticked for a while.
//!
//! A tick counts the objects on the stacks of CPUs and the pages in their lists. A process without
//! neap's thread makes none while it sleeps. A command then counts them itself. The process may
//! have published any layout, and may have any numbers in its memory. So sizes are bounded, and
//! sums do not overflow.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::allowance::Allowance;
use super::cpu_stacks::{self, CPUS_MAX, SeenStack};
use super::live::{list, put, put_row};
use super::remote_memory::{MemoryLayout, RemoteMemory, short_at};
use super::stat_reader::Page;

/// Most nodes. A layout with more is damaged.
const NODES_MAX: usize = 32;
/// Most bytes of a CPU's lists.
const LIST_BYTES_MAX: usize = 64 << 10;
/// Most bytes that a row of the table of CPUs takes as JSON.
const ROW_BYTES_MAX: usize = 1 << 10;

/// Caches of a CPU.
#[derive(Clone, Copy, Debug, Default)]
struct CpuContents {
    /// Bytes of objects on the stacks, and classes with a stack in use.
    bytes: u64,
    stacks: u64,
    /// Pages in the lists of all nodes, and the most that they keep.
    pages: u64,
    high: u64,
}

/// Caches of all CPUs, and their sums by class and by node.
struct Contents {
    cpus: Vec<CpuContents>,
    /// Objects by class.
    objects: Vec<u64>,
    nodes: Vec<NodeLists>,
}

/// The lists of a node on all CPUs.
struct NodeLists {
    node: Value,
    pages: u64,
    high: u64,
}

/// Replaces the numbers of CPUs' caches by those in the process's memory.
///
/// # Errors
/// If the memory cannot be read, or not in time. The page stays as it is.
pub(crate) fn refresh(memory: &RemoteMemory<'_>, page: &mut Page, allowance: &Allowance) -> Result<()> {
    Contents::read(memory, page, allowance)?.put_into(page);
    Ok(())
}

impl Contents {
    fn read(memory: &RemoteMemory<'_>, page: &Page, allowance: &Allowance) -> Result<Contents> {
        let sizes = page.live.class_sizes();
        let layout = cpu_stacks::layout(page)?;
        let count = layout.size("cpus", CPUS_MAX)?;
        allowance.take(count * ROW_BYTES_MAX)?;
        let (mut cpus, mut objects) = (vec![CpuContents::default(); count], vec![0_u64; sizes.len()]);
        let mut last = None;
        cpu_stacks::each(memory, layout, sizes.len(), &mut |SeenStack { cpu, class, count, is_active, .. }| {
            let of = &mut cpus[cpu];
            objects[class] = objects[class].saturating_add(count);
            of.bytes = of.bytes.saturating_add(count.saturating_mul(sizes[class]));
            // A class with several stacks in use counts once.
            if is_active && last.replace((cpu, class)) != Some((cpu, class)) {
                of.stacks += 1;
            }
            Ok(())
        })?;
        let layout = MemoryLayout::of(page, "lists").context("its page has no layout of lists")?;
        let rows = page.object.get("nodes").and_then(Value::as_array).context("its page has no nodes")?;
        let nodes = rows.iter().take(NODES_MAX).map(|row| lists(memory, layout, row, &mut cpus));
        Ok(Contents { nodes: nodes.collect::<Result<_>>()?, cpus, objects })
    }

    fn put_into(self, page: &mut Page) {
        let Page { live, object, .. } = page;
        live.set_stacked(self.cpus.iter().fold(0, |sum, cpu| sum.saturating_add(cpu.bytes)));
        live.put_into(object);
        let mode = object.get("mode").cloned().unwrap_or_default();
        let is_isolated =
            |cpu: usize| mode["isolated_cpus"].as_array().is_some_and(|all| all.contains(&Value::from(cpu)));
        let full = self.cpus.iter().enumerate().filter(|(_, of)| of.stacks > 0 || of.pages > 0);
        let rows = full.map(|(cpu, of)| {
            json!({
                "cpu": cpu, "kind": if is_isolated(cpu) { "atomic" } else { mode["slots"].as_str().unwrap_or_default() },
                "cached_bytes": of.bytes, "stacks": of.stacks, "page_list": of.pages, "list_high": of.high,
            })
        });
        let rows: Vec<Value> = rows.collect();
        object.insert("cpus".to_string(), rows.into());
        let high = self.nodes.iter().fold(0_u64, |sum, node| sum.saturating_add(node.high));
        put(object, "lists", json!({"highs": high}));
        let nodes = list(object, "nodes");
        self.nodes.into_iter().for_each(|NodeLists { node, pages, high }| {
            put_row(nodes, "node", json!({"node": node, "listed": pages, "highs": high}));
        });
        let sizes = live.class_sizes();
        for row in list(object, "classes") {
            let class = sizes.iter().position(|size| row["size"].as_u64() == Some(*size));
            if let (Some(class), Some(row)) = (class, row.as_object_mut()) {
                row.insert("in_slots".to_string(), self.objects[class].into());
            }
        }
    }
}

/// Adds the lists of a node to those of each CPU. Returns their sums.
fn lists(
    memory: &RemoteMemory<'_>,
    layout: MemoryLayout<'_>,
    row: &Value,
    cpus: &mut [CpuContents],
) -> Result<NodeLists> {
    let number = |name: &str| row[name].as_u64().with_context(|| format!("a node of its page has no {name}"));
    let (first, length) = (number("lists_table")?, layout.size("list_length", LIST_BYTES_MAX)?);
    let parts = ["in_list_count", "in_list_run_pages", "in_list_high"].map(|part| layout.get(part));
    let mut places = Vec::new();
    for cpu in 0..cpus.len() as u64 {
        for part in &parts {
            let part = *part.as_ref().map_err(|error| anyhow::anyhow!("{error}"))?;
            places.push((first.wrapping_add(cpu.wrapping_mul(length as u64)).wrapping_add(part), 4));
        }
    }
    let bytes = memory.read(places)?;
    let mut sums = NodeLists { node: row["node"].clone(), pages: 0, high: 0 };
    for (cpu, words) in cpus.iter_mut().zip(bytes.chunks_exact(12)) {
        let [count, runs, high] = [0, 4, 8].map(|at| short_at(words, at));
        // Lists that the CPU has not used are zeroes.
        let high = if high == 0 { number("first_list_high")? } else { high };
        for (sum, more) in [
            (&mut cpu.pages, count + runs),
            (&mut cpu.high, high),
            (&mut sums.pages, count + runs),
            (&mut sums.high, high),
        ] {
            *sum = sum.saturating_add(more);
        }
    }
    Ok(sums)
}
