//! malloc and free in a tight loop: one block at a time, of one size or of mixed sizes, and many at
//! a time.
//!
//! A single thread is pinned to a CPU; several threads are not. The threads do not write to the
//! blocks, so only the calls are measured. This module takes no lock.

use std::arch::asm;
use std::sync::Barrier;
use std::thread;

use anyhow::Result;
use clap::{Args, ValueEnum};

use super::meter::{BlockTable, Meter, Random, pin};
use super::{Outcome, grouped};

#[derive(Args)]
pub(super) struct PairOptions {
    #[arg(long, default_value_t = 64)]
    size: usize,
    /// Draw each size from 1 to this instead
    #[arg(long)]
    mixed: Option<usize>,
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Pairs per thread
    #[arg(long)]
    count: u64,
    /// Group of the preloaded neap that the thread is in; one thread only
    #[arg(long, conflicts_with = "threads")]
    group: Option<String>,
    /// Group that the thread has entered and left; one thread only
    #[arg(long, conflicts_with_all = ["threads", "group"])]
    visited: Option<String>,
}

#[derive(Args)]
pub(super) struct BatchOptions {
    #[arg(long, default_value_t = 64)]
    size: usize,
    /// Blocks held before the first is freed
    #[arg(long, default_value_t = 1000)]
    blocks: usize,
    #[arg(long, value_enum)]
    order: BatchOrder,
    /// Pairs in all
    #[arg(long)]
    count: u64,
    /// Group of the preloaded neap that the thread is in
    #[arg(long)]
    group: Option<String>,
}

/// Which block of a batch is freed first.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BatchOrder {
    /// The last one allocated
    Lifo,
    /// The first one allocated
    Fifo,
}

/// Keeps a word in a register and hides its origin from the compiler. `std::hint::black_box` would
/// store it on the stack and load it again, which costs as much as a fast allocator.
#[inline(always)]
fn opaque(mut word: usize) -> usize {
    // No instruction; the comment names the register.
    //
    // Registers: word: the argument, which the compiler must take for changed.
    // SAFETY: the assembly contains no instruction, so it changes no register, flag or memory.
    unsafe { asm!("/* {} */", inout(reg) word, options(nostack, preserves_flags)) };
    word
}

/// Calls malloc and free `count` times, with the results of `size`.
#[inline(always)]
fn pairs(count: u64, mut size: impl FnMut(u64) -> usize) {
    for index in 0..count {
        // SAFETY: malloc may be called with any size.
        let block = unsafe { libc::malloc(opaque(size(index))) };
        let block = std::ptr::with_exposed_provenance_mut(opaque(block.expose_provenance()));
        // SAFETY: the block came from malloc, is freed once, and is not used afterwards.
        unsafe { libc::free(block) };
    }
}

pub(super) fn run(options: &PairOptions) -> Result<Outcome> {
    let mut random = Random::new(1);
    let mut sizes = [0u16; 4096];
    if let Some(largest) = options.mixed {
        sizes.fill_with(|| 1 + random.below(largest.min(usize::from(u16::MAX))) as u16);
    }
    let work = || match options.mixed {
        Some(_) => pairs(options.count, |index| usize::from(sizes[index as usize % sizes.len()])),
        None => pairs(options.count, |_| options.size),
    };
    if options.threads == 1 {
        pin()?;
        options.group.as_deref().map_or(Ok(()), grouped::enter)?;
        options.visited.as_deref().map_or(Ok(()), grouped::visit)?;
        pairs(options.count / 50, |_| options.size);
        let meter = Meter::start();
        work();
        return Ok(meter.stop().outcome(options.count));
    }
    let step = Barrier::new(options.threads + 1);
    let spent = thread::scope(|scope| {
        for _ in 0..options.threads {
            scope.spawn(|| {
                for part in 0..3 {
                    step.wait();
                    if part == 1 {
                        work();
                    }
                }
            });
        }
        // All threads wait for this one at the barrier, so the meter starts before they run.
        step.wait();
        let meter = Meter::start();
        step.wait();
        step.wait();
        meter.stop()
    });
    Ok(spent.outcome(options.count * options.threads as u64))
}

pub(super) fn run_batch(options: &BatchOptions) -> Result<Outcome> {
    pin()?;
    options.group.as_deref().map_or(Ok(()), grouped::enter)?;
    let mut table = BlockTable::new(options.blocks)?;
    batch(&mut table, options);
    let rounds = (options.count / options.blocks.max(1) as u64).max(1);
    let meter = Meter::start();
    for _ in 0..rounds {
        batch(&mut table, options);
    }
    Ok(meter.stop().outcome(rounds * options.blocks as u64))
}

/// Allocates and frees one batch.
fn batch(table: &mut BlockTable, options: &BatchOptions) {
    for entry in table.iter_mut() {
        // SAFETY: malloc may be called with any size.
        *entry = unsafe { libc::malloc(opaque(options.size)) }.cast();
    }
    // SAFETY: each entry came from malloc above and is freed once.
    let free = |entry: &*mut u8| unsafe { libc::free(entry.cast()) };
    match options.order {
        BatchOrder::Lifo => table.iter().rev().for_each(free),
        BatchOrder::Fifo => table.iter().for_each(free),
    }
}
