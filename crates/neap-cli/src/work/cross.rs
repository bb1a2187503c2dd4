//! Blocks allocated on one thread and freed on another, modelled on two well-known benchmarks.
//!
//! Larson-like: each thread replaces random blocks of an array, then hands the array to a new
//! thread and ends, as a server does with its sessions. Starting a thread allocates memory too.
//! Xmalloc-like: producers only allocate, and consumers only free. Producers and consumers share a
//! fixed buffer under a mutex, with a condition variable. No thread allocates or frees a block
//! while it holds the mutex.

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use anyhow::Result;
use clap::Args;

use super::Outcome;
use super::meter::{BlockTable, Meter, Random, give, take};

#[derive(Args)]
pub(super) struct LarsonOptions {
    #[arg(long, default_value_t = 4)]
    threads: usize,
    /// Blocks in each thread's array
    #[arg(long, default_value_t = 1000)]
    blocks: usize,
    #[arg(long, default_value_t = 8)]
    min: usize,
    #[arg(long, default_value_t = 1000)]
    max: usize,
    /// Blocks that a thread replaces before it hands over
    #[arg(long, default_value_t = 50_000)]
    replacements: u64,
    /// Threads that each array passes through
    #[arg(long)]
    generations: usize,
}

#[derive(Args)]
pub(super) struct XmallocOptions {
    /// Producers, and as many consumers
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Blocks handed over at a time
    #[arg(long, default_value_t = 1024)]
    blocks: usize,
    #[arg(long, default_value_t = 8)]
    min: usize,
    #[arg(long, default_value_t = 512)]
    max: usize,
    /// Batches that each producer makes
    #[arg(long)]
    batches: usize,
}

/// Most batches of a producer in transit.
const BATCHES_PER_PRODUCER: usize = 16;

/// An array of blocks that passes through the threads.
struct RunningCallback {
    table: BlockTable,
    random: Random,
    left: usize,
    replacements: u64,
    sizes: (usize, usize),
}

/// Result of a thread: the next thread of its lane. `None` in the last one.
struct Handed(Option<JoinHandle<Handed>>);

impl RunningCallback {
    fn fill(&mut self) {
        for index in 0..self.table.len() {
            self.table[index] = take(draw(&mut self.random, self.sizes));
        }
    }

    /// Body of one thread.
    fn live(mut self) -> Handed {
        for _ in 0..self.replacements {
            let index = self.random.below(self.table.len());
            // SAFETY: every entry of a filled table came from `take`. The next statement replaces
            // the entry, so the block is freed once and not used again.
            unsafe { give(self.table[index]) };
            self.table[index] = take(draw(&mut self.random, self.sizes));
        }
        self.left -= 1;
        if self.left > 0 {
            return Handed(Some(thread::spawn(move || self.live())));
        }
        for &block in self.table.iter() {
            // SAFETY: every entry came from `take`. The table ends here, so each block is freed
            // once and not used again.
            unsafe { give(block) };
        }
        Handed(None)
    }
}

fn draw(random: &mut Random, (min, max): (usize, usize)) -> usize {
    min + random.below(max.saturating_sub(min) + 1)
}

pub(super) fn larson(options: &LarsonOptions) -> Result<Outcome> {
    let mut lanes = Vec::with_capacity(options.threads);
    for number in 0..options.threads {
        let mut lane = RunningCallback {
            table: BlockTable::new(options.blocks)?,
            random: Random::new(number as u64 + 1),
            left: options.generations.max(1),
            replacements: options.replacements,
            sizes: (options.min, options.max),
        };
        lane.fill();
        lanes.push(lane);
    }
    let mut running = Vec::with_capacity(options.threads);
    let meter = Meter::start();
    running.extend(lanes.into_iter().map(|lane| thread::spawn(move || lane.live())));
    for first in running {
        let mut next = Some(first);
        while let Some(thread) = next {
            next = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).0;
        }
    }
    let spent = meter.stop();
    let replaced = options.replacements * options.generations.max(1) as u64;
    Ok(spent.outcome(replaced * options.threads as u64))
}

/// A queue of batches, full or empty.
struct Shelf {
    batches: Mutex<Vec<BlockTable>>,
    filled: Condvar,
}

impl Shelf {
    fn new(capacity: usize) -> Shelf {
        Shelf { batches: Mutex::new(Vec::with_capacity(capacity)), filled: Condvar::new() }
    }

    fn put(&self, batch: BlockTable) {
        // The capacity is the number of all batches, so this never allocates.
        self.batches.lock().unwrap_or_else(PoisonError::into_inner).push(batch);
        self.filled.notify_one();
    }

    fn take(&self) -> BlockTable {
        let mut batches = self.batches.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match batches.pop() {
                Some(batch) => return batch,
                None => batches = self.filled.wait(batches).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

pub(super) fn xmalloc(options: &XmallocOptions) -> Result<Outcome> {
    let there_are = options.threads * BATCHES_PER_PRODUCER;
    let (empty, full) = (Shelf::new(there_are), Shelf::new(there_are));
    for _ in 0..there_are {
        empty.put(BlockTable::new(options.blocks)?);
    }
    let meter = Meter::start();
    thread::scope(|scope| {
        for number in 0..options.threads {
            let (empty, full) = (&empty, &full);
            scope.spawn(move || {
                let mut random = Random::new(number as u64 + 1);
                for _ in 0..options.batches {
                    let mut batch = empty.take();
                    batch.fill_with(|| take(draw(&mut random, (options.min, options.max))));
                    full.put(batch);
                }
            });
            scope.spawn(move || {
                for _ in 0..options.batches {
                    let batch = full.take();
                    for &block in batch.iter() {
                        // SAFETY: a producer got the block from `take`. This consumer alone has the
                        // batch, frees each block once, and does not use it again.
                        unsafe { give(block) };
                    }
                    empty.put(batch);
                }
            });
        }
    });
    Ok(meter.stop().outcome((options.threads * options.batches * options.blocks) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larson_counts_every_replacement() {
        let options = LarsonOptions { threads: 2, blocks: 10, min: 8, max: 100, replacements: 50, generations: 3 };
        assert_eq!(larson(&options).unwrap().operations, 300);
    }

    #[test]
    fn xmalloc_moves_every_block_across() {
        let options = XmallocOptions { threads: 2, blocks: 8, min: 1, max: 64, batches: 100 };
        assert_eq!(xmalloc(&options).unwrap().operations, 1600);
    }

    #[test]
    fn sizes_reach_both_ends() {
        let mut random = Random::new(3);
        let drawn: Vec<usize> = (0..1000).map(|_| draw(&mut random, (8, 11))).collect();
        assert_eq!((drawn.iter().min(), drawn.iter().max()), (Some(&8), Some(&11)));
    }
}
