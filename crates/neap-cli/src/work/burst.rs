//! Growth at a given rate beside a cache, towards the limit of a memory group of the kernel.
//!
//! 1. The cache is filled with touched blocks.
//! 2. After a pause, the workload allocates and touches further blocks at the given rate, and keeps
//!    them.
//! 3. The run ends at the wanted growth, or at the first allocation that is refused. After a
//!    refusal the workload frees blocks until it can allocate a small one, since the heap must
//!    still work.
//!
//! The run counts the looks at the container during the growth: those that allocations at the limit
//! have requested, and those of neap's clock. The kernel may kill the process before the run ends.

use std::process;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use neap::process::PROCESS;
use neap_base::{Linux, Platform};

use super::Outcome;
use super::block_cache::{BlockCache, Heap};
use super::meter::Meter;
use crate::look::allowance::{Allowance, USUAL_TIME};
use crate::look::handle::ProcessHandle;
use crate::look::stat_model::ContainerNumbers;
use crate::look::stat_reader::ProcessStatus;

/// Bytes of a block.
const BLOCK: usize = 100_000;
/// Time between the filled cache and the growth.
const PAUSE: Duration = Duration::from_millis(300);
/// Most blocks that are freed after a refusal, until a small one can be allocated.
const MOST_FREED: u32 = 64;
/// Blocks that are allocated between two looks at the clock.
const STRIDE: u64 = 8;

#[derive(Args)]
pub(crate) struct BurstOptions {
    #[arg(long, value_enum)]
    heap: Heap,
    /// Bytes of the cache
    #[arg(long)]
    cache: u64,
    /// Bytes that are allocated beside it
    #[arg(long)]
    growth: u64,
    /// Rate of the growth in GB/s
    #[arg(long)]
    rate: f64,
}

/// Time from the start of the growth at which `bytes` bytes are due at `rate` GB/s.
fn due(bytes: u64, rate: f64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / (rate * 1e9))
}

/// Reads the numbers of this process's container. They are 0 if no limit follows it. Fails if the
/// process publishes no numbers.
fn container() -> Result<ContainerNumbers> {
    // The page of numbers is written at ticks.
    PROCESS.tick(Linux::probe().now());
    let handle = Arc::new(ProcessHandle::open(process::id() as i32)?);
    let mut page = ProcessStatus::read(&handle, Allowance::new(USUAL_TIME))?.page()?;
    let numbers = page.object.get_mut("container").map(serde_json::Value::take).filter(|numbers| !numbers.is_null());
    Ok(numbers.map_or(Ok(ContainerNumbers::default()), serde_json::from_value)?)
}

pub(super) fn run(options: &BurstOptions) -> Result<Outcome> {
    let BurstOptions { heap, cache, growth, rate } = *options;
    ensure!(rate > 0.0 && rate.is_finite(), "--rate: {rate} is not a rate above 0");
    heap.open();
    let keys = (cache / BLOCK as u64) as usize;
    let cache = Arc::new(BlockCache::new(BLOCK, keys));
    let _shrinker = (heap == Heap::Neap).then(|| cache.shrinks("burst")).transpose()?;
    for key in 0..keys {
        cache.insert(key, heap.take(BLOCK).context("no memory for the cache")?);
    }
    thread::sleep(PAUSE);
    let before = (heap == Heap::Neap).then(container);
    let wanted = growth / BLOCK as u64;
    let mut blocks = Vec::with_capacity(wanted as usize);
    let meter = Meter::start();
    let start = Instant::now();
    for block in 0..wanted {
        if block % STRIDE == 0 {
            thread::sleep(due(block * BLOCK as u64, rate).saturating_sub(start.elapsed()));
        }
        let Some(block) = heap.take(BLOCK) else { break };
        blocks.push(block);
    }
    let spent = meter.stop();
    let grown = blocks.len() as u64;
    let refused = grown < wanted;
    let mut freed = 0;
    while refused && heap.take(BLOCK / 100).is_none() {
        ensure!(freed < MOST_FREED && blocks.pop().is_some(), "small blocks are refused after {freed} frees");
        freed += 1;
    }
    drop(blocks);
    let mut outcome = spent.outcome(grown);
    if let (Some(Ok(before)), Ok(after)) = (before, container()) {
        let for_allocations = after.looks_for_allocations - before.looks_for_allocations;
        let by_clock = after.looks - before.looks - for_allocations;
        let counts = [
            ("looks_for_allocations", for_allocations),
            ("looks_by_clock", by_clock),
            ("passed", after.passed - before.passed),
        ];
        outcome.counts.extend(counts.map(|(name, count)| (name.to_string(), count as f64)));
    }
    let counts = [
        ("refused", f64::from(u8::from(refused))),
        ("gbps", (grown * BLOCK as u64) as f64 / 1e9 / spent.wall().as_secs_f64().max(1e-9)),
        ("freed_before_small", f64::from(freed)),
        ("evicted", cache.evicted() as f64),
    ];
    outcome.counts.extend(counts.map(|(name, count)| (name.to_string(), count)));
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_due_at_the_rate() {
        assert_eq!(due(500_000_000, 0.25), Duration::from_secs(2));
        assert_eq!(due(0, 4.0), Duration::ZERO);
    }

    #[test]
    fn small_growth_beside_a_cache_is_allocated_whole() {
        for heap in [Heap::Neap, Heap::System] {
            let outcome = run(&BurstOptions { heap, cache: 1 << 20, growth: 2 << 20, rate: 4.0 }).unwrap();
            assert_eq!((outcome.operations, outcome.count("refused")), ((2 << 20) / BLOCK as u64, 0.0), "{heap:?}");
            assert!(outcome.count("gbps") > 0.0);
        }
        let never = run(&BurstOptions { heap: Heap::Neap, cache: 0, growth: 0, rate: 0.0 });
        assert!(never.unwrap_err().to_string().contains("--rate"));
    }
}
