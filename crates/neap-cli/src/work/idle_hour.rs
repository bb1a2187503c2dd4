//! A server that has load for a while, and is idle afterwards.
//!
//! # Design
//!
//! Each thread fills a live set with blocks as in [`steady`](super::steady). Requests come in
//! bursts: a thread allocates the blocks of many requests, and frees them all. Between bursts some
//! blocks of the live set are replaced, and change hands. At the end of the load only the live set
//! is left, and the threads wait on a condition variable.
//!
//! 1. The load runs for a time, in which a part of the live set is replaced.
//! 2. The workload prints one line at the end of the load. The benchmark reads memory and processor
//!    time from outside.
//! 3. The run ends when standard input is closed.
//!
//! The table of a burst is unmapped when the load ends. The tables of the live set stay, and count
//! as live bytes.

use std::io::Read;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;

use super::Outcome;
use super::idle::Gate;
use super::meter::{BlockTable, Meter, Random, give, own_peak_kib, pages_of, take};
use super::steady::{Exchange, Live, PLACES, draw, window};

/// Parts into which [`window`] divides the time of the load.
const PARTS: u64 = 1 << 16;

#[derive(Args)]
pub(crate) struct IdleHourOptions {
    /// Milliseconds of load
    #[arg(long, default_value_t = 10_000)]
    load_ms: u64,
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=512))]
    threads: u16,
    /// MiB of the live set, over all threads
    #[arg(long, default_value_t = 256)]
    live: usize,
    /// MiB of bursts, over all threads
    #[arg(long, default_value_t = 256)]
    burst: usize,
    /// Percent of the blocks of the live set that are replaced in the time of the load
    #[arg(long, default_value_t = 10)]
    replaced: u64,
}

/// The blocks of a burst.
struct Burst {
    blocks: BlockTable,
    bytes: usize,
    random: Random,
}

impl Burst {
    /// Allocates blocks, and frees them. Returns their number.
    fn run(&mut self, window: usize) -> u64 {
        let (mut count, mut bytes) = (0, 0);
        for entry in self.blocks.iter_mut() {
            if bytes >= self.bytes {
                break;
            }
            let size = draw(&mut self.random, window);
            *entry = take(size);
            (count, bytes) = (count + 1, bytes + size);
        }
        for &entry in self.blocks.iter().take(count) {
            // SAFETY: the block came from `take`, is freed once, and is not used again.
            unsafe { give(entry) };
        }
        count as u64
    }
}

/// Loads one thread. Returns the number of blocks that were allocated.
fn load(live: &mut Live, mut burst: Burst, exchange: &Exchange, time: Duration, percent: u64) -> u64 {
    let filled = live.fill();
    let (mut allocated, mut replaced, start) = (filled, 0, Instant::now());
    loop {
        let part = (start.elapsed().as_nanos() * u128::from(PARTS) / time.as_nanos().max(1)) as u64;
        if part >= PARTS {
            return allocated + replaced;
        }
        let window = window(part, PARTS);
        let due = filled * percent / 100 * part / PARTS;
        (replaced..due).for_each(|_| live.replace(window, exchange));
        replaced = due.max(replaced);
        allocated += burst.run(window);
    }
}

pub(super) fn run(options: &IdleHourOptions) -> Result<Outcome> {
    run_until(options, || {
        println!("idle");
        // Waits for the end of the input. An error is an end, too.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
    })
}

/// Runs the load, and is idle until `wait` returns.
fn run_until(options: &IdleHourOptions, wait: impl FnOnce()) -> Result<Outcome> {
    let count = usize::from(options.threads);
    let (time, burst_bytes) = (Duration::from_millis(options.load_ms), (options.burst << 20) / count);
    let mut threads = Vec::with_capacity(count);
    for number in 0..u64::from(options.threads) {
        let live = Live::new((options.live << 20) / count, Random::new(1000 + number))?;
        let burst = Burst { blocks: BlockTable::new(PLACES)?, bytes: burst_bytes, random: Random::new(2000 + number) };
        threads.push((live, burst));
    }
    let exchange = Exchange::new();
    let (step, gate) = (Barrier::new(count + 1), Gate::default());
    let meter = Meter::start();
    let (lives, allocated, spent) = thread::scope(|scope| {
        let (step, gate, exchange) = (&step, &gate, &exchange);
        let mut running = Vec::with_capacity(count);
        for (mut live, burst) in threads {
            running.push(scope.spawn(move || {
                let allocated = load(&mut live, burst, exchange, time, options.replaced);
                step.wait();
                gate.pass();
                (live, allocated)
            }));
        }
        step.wait();
        let spent = meter.stop();
        exchange.empty();
        wait();
        gate.open();
        let (mut lives, mut allocated) = (Vec::with_capacity(count), 0);
        for thread in running {
            let (live, number) = thread.join().map_err(|_| anyhow::anyhow!("a thread of the load panicked"))?;
            lives.push(live);
            allocated += number;
        }
        anyhow::Ok((lives, allocated, spent))
    })?;
    let blocks = || lives.iter().flat_map(Live::blocks);
    let tables = 2 * PLACES * size_of::<*mut u8>() * count;
    let bytes: usize = blocks().map(|(_, size)| size).sum();
    let mut outcome = spent.outcome(allocated);
    // SAFETY: sysconf takes a number.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let pages = pages_of(PLACES * count, blocks())? * page;
    let counts = [
        ("live_bytes", (bytes + tables) as f64),
        ("live_pages_bytes", (pages + tables) as f64),
        ("peak_kib", own_peak_kib()? as f64),
    ];
    outcome.counts.extend(counts.map(|(name, count)| (name.to_string(), count)));
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn live_bytes_are_those_of_the_blocks_that_stay() {
        let options = IdleHourOptions { load_ms: 50, threads: 2, live: 4, burst: 4, replaced: 100 };
        let mut waited = 0;
        let outcome = run_until(&options, || waited += 1).unwrap();
        assert_eq!(waited, 1);
        assert!(outcome.operations > 1000, "{} blocks", outcome.operations);
        let tables = (2 * 2 * PLACES * size_of::<*mut u8>()) as f64;
        let [live, pages] = ["live_bytes", "live_pages_bytes"].map(|name| outcome.count(name) - tables);
        // A thread's last block may have had no place that was large enough.
        let bound = f64::from(4 << 20);
        assert!((bound * 0.8..=bound).contains(&live), "{live} live bytes");
        assert!(pages >= live && pages % 4096.0 == 0.0, "{pages} bytes of pages, {live} live");
    }
}
