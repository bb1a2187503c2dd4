//! Phases: one live set after another. Each has blocks of another size, and is freed before the
//! next one begins.
//!
//! # Design
//!
//! Each phase starts new threads, and each thread has its share of the live set. No thread frees a
//! block before all have allocated theirs, so the whole live set exists at once. The tables of
//! addresses are mapped and filled before the first phase, and the peak is counted from there: it
//! holds the allocator's memory and little else.

use std::sync::Barrier;
use std::thread;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use neap_base::listed_enum;

use super::Outcome;
use super::meter::{BlockTable, Meter, Random, give, own_peak_kib, own_rss_kib, take};

/// Distance between two blocks that are freed one after the other by stride; a prime.
const STRIDE: usize = 7919;

#[derive(Args)]
pub(super) struct PhasesOptions {
    /// MiB of blocks that are live at the end of a phase's allocations
    #[arg(long, default_value_t = 300)]
    live: usize,
    /// Order in which a phase's blocks are freed
    #[arg(long, value_enum, default_value_t = Order::Stride)]
    order: Order,
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=512))]
    threads: u16,
    /// Number of times that all sizes have their phase
    #[arg(long, default_value_t = 1)]
    turns: usize,
    /// Block sizes in bytes, one for each phase
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', required = true)]
    sizes: Vec<usize>,
}

listed_enum! {
    /// Order in which blocks are freed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
    pub(crate) enum Order {
        Allocated = "allocated",
        Reversed = "reversed",
        Random = "random",
        Stride = "stride",
    }
}

pub(super) fn run(options: &PhasesOptions) -> Result<Outcome> {
    let threads = usize::from(options.threads);
    let share = (options.live << 20) / threads;
    let Some(&smallest) = options.sizes.iter().min().filter(|&&size| size > 0) else {
        bail!("--sizes: 0 is not a block size; give sizes of at least 1 byte");
    };
    let count = |size: usize| (share / size).max(1);
    let mut tables = Vec::with_capacity(threads);
    for _ in 0..threads {
        tables.push(BlockTable::new(count(smallest))?);
    }
    let allocated = Barrier::new(threads);
    let before = own_rss_kib()?;
    let mut blocks = 0;
    let meter = Meter::start();
    for &size in options.sizes.iter().cycle().take(options.sizes.len() * options.turns) {
        thread::scope(|scope| {
            for (number, table) in tables.iter_mut().enumerate() {
                let (order, allocated) = (options.order, &allocated);
                scope.spawn(move || {
                    let blocks = &mut table[..count(size)];
                    blocks.fill_with(|| take(size));
                    allocated.wait();
                    // SAFETY: `take` filled every entry above. No entry was freed or is used again,
                    // since the next phase fills the table again.
                    unsafe { free(blocks, order, number as u64) };
                });
            }
        });
        blocks += (threads * count(size)) as u64;
    }
    let spent = meter.stop();
    let peak = own_peak_kib()?;
    let largest = options.sizes.iter().map(|&size| threads * count(size) * size).max().unwrap_or(0);
    let mut outcome = spent.outcome(blocks);
    outcome.rss_kib = vec![before, own_rss_kib()?];
    outcome.counts.insert("peak_kib".to_string(), peak.saturating_sub(before) as f64);
    outcome.counts.insert("live_kib".to_string(), largest as f64 / 1024.0);
    Ok(outcome)
}

/// Frees all blocks in the given order.
///
/// # Safety
/// Every entry came from [`take`] and was not freed. The caller uses no entry again.
unsafe fn free(blocks: &mut [*mut u8], order: Order, seed: u64) {
    let free = |block: *mut u8| {
        // SAFETY: every entry came from `take` and was not freed (the caller's promise); each order
        // below names every entry once.
        unsafe { give(block) }
    };
    match order {
        Order::Allocated => blocks.iter().for_each(|&block| free(block)),
        Order::Reversed => blocks.iter().rev().for_each(|&block| free(block)),
        Order::Random => {
            shuffle(blocks, seed);
            blocks.iter().for_each(|&block| free(block));
        }
        Order::Stride => by_stride(blocks.len()).for_each(|index| free(blocks[index])),
    }
}

fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut random = Random::new(seed);
    for end in (1..items.len()).rev() {
        items.swap(end, random.below(end + 1));
    }
}

/// Returns every index below `count` once. Each follows the previous one by [`STRIDE`], modulo
/// `count`.
///
/// If the stride divides `count`, a round through the indices ends at its first index. The next
/// round then begins one index later.
fn by_stride(count: usize) -> impl Iterator<Item = usize> {
    let step = STRIDE % count.max(1);
    let lap = if count.is_multiple_of(STRIDE) { count / STRIDE } else { count };
    let (mut next, mut left) = (0, lap);
    (0..count).map(move |_| {
        let index = next;
        next += step;
        if next >= count {
            next -= count;
        }
        left -= 1;
        if left == 0 {
            (next, left) = (next + 1, lap);
        }
        index
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stride_order_names_every_block_once() {
        for count in [0, 1, 2, 10, 7918, STRIDE, 7920, 3 * STRIDE, 100_000] {
            let mut seen: Vec<usize> = by_stride(count).collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..count), "{count} blocks");
        }
        assert_eq!(by_stride(10_000).take(3).collect::<Vec<_>>(), [0, 7919, 5838]);
    }

    #[test]
    fn shuffle_keeps_every_item_and_depends_on_the_seed() {
        let shuffled = |seed| {
            let mut items: Vec<usize> = (0..1000).collect();
            shuffle(&mut items, seed);
            items
        };
        let (one, other) = (shuffled(1), shuffled(2));
        assert_ne!(one, other);
        assert_eq!(one, shuffled(1));
        let mut sorted = one;
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..1000));
    }

    #[test]
    fn every_phase_is_counted_and_the_peak_holds_the_live_set() {
        for order in [Order::Allocated, Order::Reversed, Order::Random, Order::Stride] {
            let options = PhasesOptions { live: 4, order, threads: 2, turns: 3, sizes: vec![1 << 10, 64 << 10] };
            let outcome = run(&options).unwrap();
            assert_eq!(outcome.operations, 3 * (4096 + 64), "{order:?}");
            assert_eq!(outcome.count("live_kib"), 4096.0);
        }
        let options = PhasesOptions { live: 1, order: Order::Stride, threads: 8, turns: 1, sizes: vec![200_000] };
        assert_eq!(run(&options).unwrap().operations, 8, "a thread has one block at least");
        let nothing = PhasesOptions { live: 1, order: Order::Stride, threads: 1, turns: 1, sizes: vec![0] };
        assert!(run(&nothing).unwrap_err().to_string().contains("--sizes"));
    }
}
