//! A server with a cache, in a memory group of the kernel whose limit is cut while it serves.
//!
//! # Design
//! Threads serve requests at a fixed rate. A request reads a value of the cache, or makes it and
//! caches it. Then it fills and frees a buffer. Its latency counts from the time at which it was
//! due, so a stall delays all requests behind it.
//!
//! 1. The cache is filled, and requests are served for a while: the steady state.
//! 2. The workload prints one line. Requests from then on count for the cut.
//! 3. The run ends when standard input is closed.
//!
//! Policies: a cache on neap's heap has a shrinker. A cache on the C library's heap keeps its size,
//! or a thread polls usage and limit, evicts a part of the cache near the limit, and trims the
//! heap.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use clap::{Args, ValueEnum};

use super::Outcome;
use super::block_cache::{BlockCache, Heap};
use super::meter::{Meter, Random};

/// Bytes of a value.
const VALUE: usize = 16_000;
/// Bytes of a request's buffer.
const BUFFER: usize = 30_000;
/// Keys for each value that fits into the cache at its full size, in halves.
const KEYS: usize = 3;
const THREADS: u64 = 2;
/// Time between two looks of the poller.
const TICK: Duration = Duration::from_millis(100);
/// The poller evicts above this part of the limit, in hundredths.
const NEAR: u64 = 95;
/// The poller evicts one value in this many.
const PART: u64 = 20;

/// Ways to shrink the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Policy {
    /// neap asks the cache for memory
    Shrinker,
    /// On the C library's malloc, not at all
    Fixed,
    /// On the C library's malloc, by a thread that polls usage and limit
    Poller,
}

#[derive(Args)]
pub(crate) struct WallOptions {
    #[arg(long, value_enum)]
    policy: Policy,
    /// Largest size of the cache in bytes
    #[arg(long)]
    cache: u64,
    /// Requests a second of each thread
    #[arg(long, default_value_t = 1000)]
    rate: u32,
    /// Milliseconds of steady state
    #[arg(long, default_value_t = 2000)]
    steady: u64,
    /// Files with usage and limit in bytes, for the poller
    #[arg(long)]
    usage_file: PathBuf,
    #[arg(long)]
    limit_file: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Phase {
    Steady,
    Cut,
    End,
}

/// State that all threads share.
struct Server {
    heap: Heap,
    cache: Arc<BlockCache>,
    /// Values of the cache at its full size.
    most: u64,
    keys: usize,
    /// A [`Phase`] as a number. It publishes no other data.
    phase: AtomicU8,
}

/// Latencies in nanoseconds, by phase, and refused allocations.
#[derive(Default)]
struct Served {
    latencies: [Vec<u64>; 2],
    refused: u64,
}

impl Server {
    fn is_in(&self, phase: Phase) -> bool {
        self.phase.load(Ordering::Relaxed) == phase as u8
    }

    fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// Serves a request. Returns whether all its allocations succeeded.
    fn serve(&self, random: &mut Random) -> bool {
        // The smaller of two random keys, so that low keys are looked up more often.
        let key = random.below(self.keys).min(random.below(self.keys));
        let mut complete = true;
        if self.cache.look_up(key).is_none() {
            match self.heap.take(VALUE) {
                Some(mut value) => {
                    value.fill(key as u8);
                    if self.cache.cached() >= self.most {
                        self.cache.evict(1);
                    }
                    self.cache.insert(key, value);
                }
                None => complete = false,
            }
        }
        match self.heap.take(BUFFER) {
            Some(mut buffer) => buffer.fill(0),
            None => complete = false,
        }
        complete
    }

    /// Serves requests at a rate until the end.
    fn work(&self, number: u64, rate: u32) -> Served {
        let mut served = Served::default();
        let mut random = Random::new(number + 1);
        let (start, period) = (Instant::now(), Duration::from_secs(1) / rate);
        for request in 0.. {
            let due = start + period * request;
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let phase = self.phase.load(Ordering::Relaxed);
            let Some(latencies) = served.latencies.get_mut(usize::from(phase)) else { break };
            served.refused += u64::from(!self.serve(&mut random));
            latencies.push(due.elapsed().as_nanos() as u64);
        }
        served
    }

    /// Evicts a part of the cache at each look that finds the usage near the limit.
    fn poll(&self, usage_file: &Path, limit_file: &Path) {
        let number = |path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        while !self.is_in(Phase::End) {
            let (usage, limit) = (number(usage_file), number(limit_file));
            if usage.zip(limit).is_some_and(|(usage, limit)| is_near(usage, limit)) {
                self.cache.evict((self.cache.cached() / PART) as usize);
                // SAFETY: glibc's function takes a number and may be called at any time.
                unsafe { libc::malloc_trim(0) };
            }
            thread::sleep(TICK);
        }
    }
}

/// Whether the poller evicts.
fn is_near(usage: u64, limit: u64) -> bool {
    usage > limit / 100 * NEAR
}

/// Returns the value below which the part `part` of `values` lies. Returns 0 if there are no
/// values.
fn quantile(values: &mut [u64], part: f64) -> u64 {
    values.sort_unstable();
    let at = (values.len() as f64 * part) as usize;
    values.get(at).or(values.last()).copied().unwrap_or(0)
}

pub(super) fn run(options: &WallOptions) -> Result<Outcome> {
    let end_of_input = || {
        println!("steady");
        // Waits for the end of the input. An error is an end, too.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
    };
    run_until(options, end_of_input)
}

/// Runs with a cut that ends when `cut` returns.
fn run_until(options: &WallOptions, cut: impl FnOnce()) -> Result<Outcome> {
    let heap = if options.policy == Policy::Shrinker { Heap::Neap } else { Heap::System };
    heap.open();
    let most = options.cache / VALUE as u64;
    let keys = (most as usize * KEYS / 2).max(1);
    let cache = Arc::new(BlockCache::new(VALUE, keys));
    let _shrinker = (heap == Heap::Neap).then(|| cache.shrinks("wall")).transpose()?;
    for key in 0..most as usize {
        cache.insert(key, heap.take(VALUE).context("no memory for the cache")?);
    }
    let server = Server { heap, cache, most, keys, phase: AtomicU8::new(Phase::Steady as u8) };
    thread::scope(|scope| {
        let server = &server;
        let rate = options.rate.max(1);
        let threads: Vec<_> = (0..THREADS).map(|number| scope.spawn(move || server.work(number, rate))).collect();
        if options.policy == Policy::Poller {
            scope.spawn(|| server.poll(&options.usage_file, &options.limit_file));
        }
        thread::sleep(Duration::from_millis(options.steady));
        server.cache.reset_lowest();
        server.enter(Phase::Cut);
        let meter = Meter::start();
        cut();
        server.enter(Phase::End);
        let spent = meter.stop();
        let mut all = Served::default();
        for thread in threads {
            let served = thread.join().map_err(|_| anyhow!("a serving thread panicked"))?;
            all.refused += served.refused;
            all.latencies.iter_mut().zip(served.latencies).for_each(|(sum, more)| sum.extend(more));
        }
        let mut outcome = spent.outcome(all.latencies[Phase::Cut as usize].len() as u64);
        outcome.counts = counts(&server.cache, &mut all);
        Ok(outcome)
    })
}

fn counts(cache: &BlockCache, served: &mut Served) -> BTreeMap<String, f64> {
    let [steady, cut] = &mut served.latencies;
    let us = |latencies: &mut [u64]| quantile(latencies, 0.999) as f64 / 1000.0;
    let bytes = |values: u64| (values * VALUE as u64) as f64;
    let counts = [
        ("steady_p999_us", us(steady)),
        ("cut_p999_us", us(cut)),
        ("cached_bytes", bytes(cache.cached())),
        ("lowest_bytes", bytes(cache.lowest())),
        ("refused", served.refused as f64),
    ];
    counts.map(|(name, count)| (name.to_string(), count)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_members_or_nothing() {
        let mut values: Vec<u64> = (0..1000).rev().collect();
        assert_eq!([0.0, 0.5, 0.999, 1.0].map(|part| quantile(&mut values, part)), [0, 500, 999, 999]);
        assert_eq!(quantile(&mut [], 0.5), 0);
        assert!(is_near(96, 100) && is_near(960, 1000) && !is_near(950, 1000));
    }

    #[test]
    fn every_policy_serves_and_the_poller_evicts() {
        let folder = std::env::temp_dir().join(format!("neap-wall-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let [usage_file, limit_file] = ["usage", "limit"].map(|name| folder.join(name));
        fs::write(&usage_file, "99\n").unwrap();
        fs::write(&limit_file, "100\n").unwrap();
        for policy in [Policy::Shrinker, Policy::Fixed, Policy::Poller] {
            let (usage_file, limit_file) = (usage_file.clone(), limit_file.clone());
            let options = WallOptions { policy, cache: 1 << 20, rate: 1000, steady: 50, usage_file, limit_file };
            let outcome = run_until(&options, || thread::sleep(TICK * 3)).unwrap();
            assert!(outcome.operations > 0 && outcome.count("steady_p999_us") > 0.0, "{policy:?}: {outcome:?}");
            let (cached, lowest) = (outcome.count("cached_bytes"), outcome.count("lowest_bytes"));
            assert!(0.0 < lowest && lowest <= cached && cached < f64::from(2 << 20), "{policy:?}: {outcome:?}");
            assert_eq!(outcome.count("refused"), 0.0);
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
