//! A cache of file metadata at a memory limit, with the look-ups of a build by 24 workers.
//!
//! # Design
//! Eight tenants have three workers each, which compile units (`pattern.rs`). The cache
//! (`cache.rs`) holds results of `stat` and contents of small files. Its limit is half the bytes
//! that all units look up. Groups, lists and shrinkers belong to this process. The workload uses
//! them through neap's public interface.
//!
//! 1. Every worker compiles a number of units to fill the cache. Workers take turns, so each tenant
//!    is charged for its part of the shared headers.
//! 2. All wait for one another. Then the measurement starts.
//! 3. Every worker compiles a fixed number of further units. With a flood, the workers of tenant 0
//!    instead walk through all files and directories, until the others are done.
//!
//! # Concurrency
//! The run fails if the peak of the group's charge, read at the end, is above the limit.

mod cache;
mod files;
#[cfg(test)]
mod made;
mod pattern;
mod tree;

use core::sync::atomic::{AtomicUsize, Ordering};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;

use anyhow::{Result, anyhow, ensure};
use clap::Args;
use neap::groups::Bound;
use neap::process::PROCESS;

use super::Outcome;
use super::meter::Meter;
pub(crate) use cache::Variant;
use cache::{MetadataCache, Tally};
use files::{Value, ValueKind};
pub(crate) use pattern::TENANTS;
use pattern::{Pattern, WORKERS};
use tree::Tree;

/// Units of the measured part, over those that fill the cache.
const WARM_UP: usize = 2;
/// The working set, over the limit.
const FITS: u64 = 2;
/// The tenant that floods.
const FLOODING: usize = 0;

#[derive(Args)]
pub(crate) struct MetadataOptions {
    #[arg(long, value_enum)]
    variant: Variant,
    /// Let one tenant walk through all files
    #[arg(long)]
    flood: bool,
    /// Directory whose files are cached
    #[arg(long)]
    directory: PathBuf,
    /// Units that each worker compiles
    #[arg(long)]
    units: usize,
}

/// Checks that a directory has enough files, and reads the small ones, so that no run waits for the
/// disk.
///
/// # Errors
/// The directory cannot be read, or has too few small files. The text names a remedy.
pub(crate) fn prepare(directory: &Path) -> Result<()> {
    let tree = Tree::walk(directory)?;
    tree.files.iter().filter(|file| file.is_small()).for_each(|file| _ = Value::read(ValueKind::Content, &file.path));
    Ok(())
}

/// State of a run that all workers share.
struct Run<'r> {
    tree: &'r Tree,
    pattern: &'r Pattern<'r>,
    cache: &'r MetadataCache,
    units: usize,
    flood: bool,
    barrier: Barrier,
    /// Number of workers that still compile.
    compiling: AtomicUsize,
}

impl Run<'_> {
    fn floods(&self, tenant: usize) -> bool {
        self.flood && tenant == FLOODING
    }

    /// Runs the part of one worker. Returns the counts of the measured part.
    fn work(&self, tenant: usize, worker: usize) -> Result<Tally> {
        let (mut warm_up, mut tally) = (Tally::default(), Tally::default());
        let mut units = self.pattern.units_of(tenant, worker);
        let mut compile = |count: usize, tally: &mut Tally, after: fn()| {
            units.by_ref().take(count).try_for_each(|unit| {
                let look_up = |what, path| self.cache.look_up(tenant, what, path, tally);
                self.pattern.compile(unit, look_up).inspect(|()| after())
            })
        };
        let warm = compile(self.units / WARM_UP, &mut warm_up, thread::yield_now);
        // The measurement starts between the two waits.
        self.barrier.wait();
        self.barrier.wait();
        if self.floods(tenant) {
            return warm.and_then(|()| self.walk(tenant, worker, &mut tally)).map(|()| tally);
        }
        let done = warm.and_then(|()| compile(self.units, &mut tally, || ()));
        // Relaxed: it publishes no other data.
        self.compiling.fetch_sub(1, Ordering::Relaxed);
        done.map(|()| tally)
    }

    /// Looks up every file and directory, each worker its part, until the others are done.
    fn walk(&self, tenant: usize, worker: usize, tally: &mut Tally) -> Result<()> {
        let files = self.tree.files.iter().map(|file| (&*file.path, file.is_small()));
        let all = files.chain(self.tree.directories.iter().map(|path| (&**path, false)));
        for (path, is_small) in all.cycle().skip(worker).step_by(WORKERS) {
            if self.compiling.load(Ordering::Relaxed) == 0 {
                return Ok(());
            }
            self.cache.look_up(tenant, ValueKind::Stat, path, tally)?;
            if is_small {
                self.cache.look_up(tenant, ValueKind::Content, path, tally)?;
            }
        }
        Ok(())
    }

    /// Runs all workers. Returns the counts of each tenant, and the costs of the measured part.
    fn all(&self) -> Result<([Tally; TENANTS], Outcome)> {
        let (mut tallies, mut answer) = ([Tally::default(); TENANTS], Ok(()));
        let meter = thread::scope(|scope| {
            let workers = (0..TENANTS).flat_map(|tenant| (0..WORKERS).map(move |worker| (tenant, worker)));
            let workers: Vec<_> =
                workers.map(|(tenant, worker)| (tenant, scope.spawn(move || self.work(tenant, worker)))).collect();
            self.barrier.wait();
            let (meter, evicted) = (Meter::start(), self.cache.evictions());
            self.barrier.wait();
            for (tenant, worker) in workers {
                match worker.join().unwrap_or_else(|_| Err(anyhow!("a worker of tenant {tenant} panicked"))) {
                    Ok(tally) => tallies[tenant].add(&tally),
                    Err(error) => answer = Err(error),
                }
            }
            let spent = meter.stop();
            let look_ups = tallies.iter().map(|tally| tally.look_ups).sum();
            let mut outcome = spent.outcome(look_ups);
            let evicted = self.cache.evictions() - evicted;
            let counts = [
                ("evictions", evicted as f64),
                ("user_s", (spent.cpu_ns() - spent.system_ns()) as f64 / 1e9),
                ("system_s", spent.system_ns() as f64 / 1e9),
            ];
            outcome.counts.extend(counts.map(|(name, count)| (name.to_string(), count)));
            outcome
        });
        answer.map(|()| (tallies, meter))
    }
}

/// Hits in a hundred look-ups.
fn hit_rate<'t>(tallies: impl IntoIterator<Item = &'t Tally>) -> f64 {
    let mut sum = Tally::default();
    tallies.into_iter().for_each(|tally| sum.add(tally));
    100.0 * sum.hits as f64 / sum.look_ups.max(1) as f64
}

pub(super) fn run(options: &MetadataOptions) -> Result<Outcome> {
    run_named("metadata", options)
}

/// Runs with groups below the group `name`.
fn run_named(name: &str, options: &MetadataOptions) -> Result<Outcome> {
    let tree = Tree::walk(&options.directory)?;
    let pattern = Pattern::new(&tree);
    let working_set = pattern.working_set();
    let limit = working_set / FITS;
    let cache = MetadataCache::open(name, options.variant, limit)?;
    let flooding = if options.flood { WORKERS } else { 0 };
    let run = Run {
        tree: &tree,
        pattern: &pattern,
        cache: &cache,
        units: options.units,
        flood: options.flood,
        barrier: Barrier::new(TENANTS * WORKERS + 1),
        compiling: AtomicUsize::new(TENANTS * WORKERS - flooding),
    };
    let (tallies, mut outcome) = run.all()?;
    let info = cache.info()?;
    let max = info.bounds[Bound::Max as usize];
    ensure!(info.peak <= max, "the tenants were charged {} bytes at a limit of {max}", info.peak);
    PROCESS.verify(0).map_err(|finding| anyhow!("{finding}"))?;

    let innocent = || (0..TENANTS).filter(|tenant| *tenant != FLOODING).map(|tenant| &tallies[tenant]);
    let rates = || innocent().map(|tally| hit_rate([tally]));
    let used = (0..TENANTS).map(|tenant| cache.used(tenant)).collect::<Result<Vec<u64>>>()?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let counts = [
        ("limit_mib", mib(limit)),
        ("working_set_mib", mib(working_set)),
        ("files", tree.files.len() as f64),
        ("refused", tallies.iter().map(|tally| tally.refused as f64).sum()),
        ("hit_rate", hit_rate(&tallies)),
        ("hit_rate_flooding", hit_rate([&tallies[FLOODING]])),
        ("hit_rate_innocent", rates().sum::<f64>() / (TENANTS - 1) as f64),
        ("hit_rate_innocent_worst", rates().fold(f64::INFINITY, f64::min)),
        ("used_mib_flooding", mib(used[FLOODING])),
        ("sum", (innocent().fold(0, |sum, tally| sum ^ tally.sum) & u64::from(u32::MAX)) as f64),
    ];
    outcome.counts.extend(counts.map(|(name, count)| (name.to_string(), count)));
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::made::Made;
    use super::*;

    #[test]
    fn every_variant_makes_equal_look_ups_and_holds_the_limit() {
        let made = Made::new("run", 800);
        let variants = [Variant::Global, Variant::Node, Variant::Group, Variant::Refuse];
        let runs = variants.map(|variant| {
            let options = MetadataOptions { variant, flood: false, directory: made.0.clone(), units: 30 };
            run_named(&format!("run-{variant:?}"), &options).unwrap()
        });
        let [first, ..] = &runs;
        for (variant, run) in variants.iter().zip(&runs) {
            assert_eq!((run.operations, run.count("sum")), (first.operations, first.count("sum")), "{variant:?}");
            let rate = run.count("hit_rate");
            assert!(
                (1.0..100.0).contains(&rate) && run.count("hit_rate_innocent_worst") <= rate,
                "{variant:?}: {rate}"
            );
        }
    }

    #[test]
    fn flood_changes_no_look_up_of_other_tenants() {
        let made = Made::new("run-flood", 800);
        let [quiet, flooded] = [false, true].map(|flood| {
            let options = MetadataOptions { variant: Variant::Group, flood, directory: made.0.clone(), units: 30 };
            run_named(&format!("run-flood-{flood}"), &options).unwrap()
        });
        assert_eq!(quiet.count("sum"), flooded.count("sum"));
        assert_ne!(quiet.operations, flooded.operations);
    }
}
