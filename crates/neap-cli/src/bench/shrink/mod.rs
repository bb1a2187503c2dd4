//! `neap bench shrink`: cost of visiting the shrinkers of 4000 groups, by number of threads.
//!
//! There are 4000 groups and 4000 shrinkers. Each shrinker has a bit in one group. A *count-only*
//! visit calls a shrinker that can free nothing now. Variants:
//!
//! * `neap`;
//! * `rwlock`: a visit takes a read-write lock for reading, if it gets it at once;
//! * `srcu`: a visit is a reader as in SRCU, and unregistering waits for all readers;
//! * `nothing`: a visit has no protection, so shrinkers cannot be unregistered.
//!
//! 1 to 64 threads visit, spread over the CPUs in turn. Each thread's median part counts, so
//! waiting for a CPU is not measured.
//!
//! A *pass* visits every group that may have objects. In `full`, each group gives one batch of 128
//! objects of 64 bytes; in `one-percent`, 40 groups do. In `empty`, no group has objects, and every
//! group is visited all the same, without the bitmap of groups. In `direct-N`, N threads charge 128
//! KiB each at the `max` of a full group above all others (`direct.rs`).
//!
//! Figures:
//!
//! * `throughput_ratio_2`: count-only visits per second of neap over those of `rwlock`, with a
//!   thread on each of 2 CPUs;
//! * `throughput_ratio_64`: the ratio of `neap` to `rwlock` in a model of 64 CPUs. A visit of neap
//!   lasts as long as a lone visit does here, since no thread writes memory that another visit
//!   needs. Under the lock there are no more visits than with 2 CPUs here, which serialise on the
//!   lock's cache line already;
//! * `registry_share.lockless`, `registry_share.rwlock`: the registry's percentage of the
//!   operations on shared cache lines, counted in full passes by one thread for each CPU. The other
//!   operations are on bits, deferred work, and the caches' own locks;
//! * `one_percent_pass_ratio`, `empty_pass_us`;
//! * `direct_p99_us`: the worst of all `direct-N`.

mod direct;
pub(crate) mod old;
pub(crate) mod stage;

use core::sync::atomic::{AtomicUsize, Ordering};
use std::process::ExitCode;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use anyhow::Result;
use neap_base::Linux;
use neap_base::gate::Inside;
use neap_reclaim::{ScanPressure, ShrinkerId, Shrinkers, Visited};

use super::counter::timed;
use super::{Options, Session, Workload};
use crate::report::{cell, table};
use crate::work::Outcome;
use crate::work::meter::{cpus, pin_to};
use direct::Direct;
use old::{Guarding, Old, counted};
use stage::{Cache, Here, count_nothing, group};

const GROUPS: usize = 4000;
/// Groups that have objects in a pass where one percent has.
const FEW: usize = GROUPS / 100;
/// Bytes that direct reclaim tries to free: 32 pages.
const GOAL: u64 = 32 * 4096;
/// Charges at the limit, by all threads together, in a round. With 1000, several lie above the 99th
/// percentile.
const CHARGES: u64 = 1000;
const THREADS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// CPUs of the modelled machine.
const VIRTUAL: f64 = 64.0;
/// Operations of a read-write lock on its cache line: taking it, and releasing it.
const LOCK_OPERATIONS: f64 = 2.0;

const RWLOCK: &str = "rwlock";
const SRCU: &str = "srcu";
const NOTHING: &str = "nothing";
const VARIANTS: [&str; 4] = ["neap", RWLOCK, SRCU, NOTHING];

/// A value on cache lines of its thread's own.
#[derive(Default)]
#[repr(align(128))]
struct Position(AtomicUsize);

impl Position {
    fn next(&self) -> usize {
        let next = (self.0.load(Ordering::Relaxed) + 1) % GROUPS;
        self.0.store(next, Ordering::Relaxed);
        next
    }
}

/// Count-only visits.
struct Counting<'a> {
    host: Here<'a>,
    shrinkers: &'a Shrinkers,
    old: Vec<(&'static str, Old)>,
    positions: Vec<Position>,
}

impl<'a> Counting<'a> {
    fn open(host: Here<'a>, shrinkers: &'a Shrinkers) -> Result<Counting<'a>> {
        let linux = host.0.platform;
        let old: Vec<(&'static str, Old)> =
            [(RWLOCK, Guarding::ReadWriteLock), (SRCU, Guarding::Srcu), (NOTHING, Guarding::Nothing)]
                .map(|(name, guarding)| (name, Old::new(guarding, linux, GROUPS)))
                .into();
        for slot in 0..GROUPS {
            let spec = counted(count_nothing, core::ptr::null_mut());
            // SAFETY: the callbacks use no data.
            let id = unsafe { shrinkers.register(&host, &spec) }?;
            Inside::assume(|inside| shrinkers.mark(inside, &host, id, slot as u32, 0));
            old.iter().for_each(|(_, old)| _ = old.register(spec, slot));
        }
        let positions = (0..64).map(|at| Position(AtomicUsize::new(at * GROUPS / 64))).collect();
        Ok(Counting { host, shrinkers, old, positions })
    }

    fn run(&self, variant: &str, on: &[usize], times: u64) -> Result<Outcome> {
        let positions = &self.positions;
        match self.old.iter().find(|(name, _)| *name == variant) {
            Some((_, old)) => timed(on, times, move |thread| _ = old.visit(positions[thread].next())),
            None => {
                let (host, shrinkers, pressure) = (&self.host, self.shrinkers, ScanPressure::of(12));
                timed(on, times, move |thread| {
                    let slot = positions[thread].next();
                    shrinkers.visit(host, &(), group(slot), slot as u32, 0, pressure);
                })
            }
        }
    }

    fn close(self, linux: &Linux) {
        self.old.into_iter().for_each(|(_, old)| old.close(linux));
    }
}

/// Passes over caches with objects.
struct Passes<'a> {
    host: Here<'a>,
    shrinkers: &'a Shrinkers,
    caches: Vec<Cache>,
    ids: Vec<ShrinkerId>,
}

/// Scans one batch of each shrinker, at any priority.
const ONE_BATCH: ScanPressure = ScanPressure { least: true, ..ScanPressure::of(12) };

impl Passes<'_> {
    fn fill(&self, groups: impl Iterator<Item = usize>) {
        for slot in groups {
            if self.caches[slot].fill() {
                Inside::assume(|inside| self.shrinkers.mark(inside, &self.host, self.ids[slot], slot as u32, 0));
            }
        }
    }

    fn visit(&self, slot: u32) -> Visited {
        self.shrinkers.visit(&self.host, &(), group(slot as usize), slot, 0, ONE_BATCH)
    }

    /// Visits all groups that may have objects. Returns the time, and the result.
    fn pass(&self) -> (u64, Visited) {
        let (start, mut sum) = (Instant::now(), Visited::default());
        self.shrinkers.each_group_with_anything(0, |slot| sum.add(self.visit(slot)));
        (start.elapsed().as_nanos() as u64, sum)
    }

    /// Times a pass in which `full` groups have a batch each. With 0, visits every group.
    fn timed(&self, full: usize) -> Outcome {
        // Passes until none calls a shrinker: they free remaining objects, and clear old bits.
        while self.pass().1.calls > 0 {}
        self.fill((0..GROUPS).step_by((GROUPS / full.max(1)).max(1)).take(full));
        let (wall_ns, sum) = if full > 0 { self.pass() } else { self.visit_all() };
        let counts = [("freed".to_string(), sum.freed as f64), ("calls".to_string(), sum.calls as f64)].into();
        Outcome { operations: 1, wall_ns, counts, ..Outcome::default() }
    }

    fn visit_all(&self) -> (u64, Visited) {
        let (start, mut sum) = (Instant::now(), Visited::default());
        (0..GROUPS as u32).for_each(|slot| sum.add(self.visit(slot)));
        (start.elapsed().as_nanos() as u64, sum)
    }

    /// Runs full passes by a thread on each CPU, at the same time. Counts the operations on shared
    /// cache lines for each visit, by kind of place.
    fn shared(&self, on: &[usize]) -> Outcome {
        self.fill(0..GROUPS);
        let taken = || {
            let mut sum = 0;
            self.shrinkers.each(|report| sum += report.shared);
            sum
        };
        let (before, sum) = (taken(), Mutex::new(Visited::default()));
        let pass = |cpu: usize| {
            // A thread that may not run on this CPU runs on another.
            let _ = pin_to(cpu);
            let (_, visited) = self.pass();
            sum.lock().into_iter().for_each(|mut sum| sum.add(visited));
        };
        let pass = &pass;
        thread::scope(|scope| on.iter().for_each(|&cpu| _ = scope.spawn(move || pass(cpu))));
        let sum = sum.into_inner().unwrap_or_default();
        // Taking and putting a reference, and entering and leaving as a reader.
        let registry = 4.0 * (taken() - before) as f64;
        // A scan takes and releases its cache's lock.
        let others = sum.written as f64 + 2.0 * sum.freed as f64 / stage::BATCH as f64;
        let counts = [("registry", registry), ("others", others)].map(|(name, count)| (name.to_string(), count));
        Outcome { operations: GROUPS as u64 * on.len() as u64, counts: counts.into(), ..Outcome::default() }
    }
}

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::of_parts("shrink", &VARIANTS)?;
    let (rounds, on, times) = (options.rounds(20), cpus()?, options.amount(500_000));
    let crowd = |threads: usize| on.iter().copied().cycle().take(threads).collect::<Vec<usize>>();
    let count = |threads: usize| Workload::timed(&format!("count-{threads}"), rounds, &[]);
    let counting: Vec<Workload> =
        THREADS.map(count).into_iter().chain([Workload::timed("line", rounds, &[])]).collect();
    stage::with(|host, shrinkers| {
        let stage = Counting::open(host, shrinkers)?;
        session.measure(&counting, |variant, workload, _| {
            let threads: usize = workload.name.trim_start_matches("count-").parse().unwrap_or(1);
            Some(stage.run(variant.name, &crowd(threads), times / threads as u64))
        });
        stage.close(host.0.platform);
        Ok(())
    })?;
    let micros = |name: &str| Workload {
        unit: "us",
        metric: |outcome| outcome.ns_each() / 1e3,
        ..Workload::timed(name, rounds, &[])
    };
    let charges =
        |threads: usize| Workload { metric: |outcome| outcome.count("p99_us"), ..micros(&format!("direct-{threads}")) };
    let shared = Workload {
        unit: "operations on shared cache lines per visit",
        metric: |outcome| (outcome.count("registry") + outcome.count("others")) / outcome.operations.max(1) as f64,
        ..Workload::timed("shared", 1, &[])
    };
    let passes = [micros("empty"), micros("one-percent"), micros("full"), shared];
    stage::with(|host, shrinkers| {
        let caches: Vec<Cache> = (0..GROUPS).map(|_| Cache::default()).collect();
        let ids = stage::register(host, shrinkers, &caches)?;
        let stage = Passes { host, shrinkers, caches, ids };
        stage.fill(0..GROUPS);
        session.measure(&passes, |variant, workload, _| {
            (variant.name == "neap").then(|| match workload.name.as_str() {
                "empty" => Ok(stage.timed(0)),
                "one-percent" => Ok(stage.timed(FEW)),
                "full" => Ok(stage.timed(GROUPS)),
                _ => Ok(stage.shared(&on)),
            })
        });
        Ok(())
    })?;
    let direct = Direct::open()?;
    session.measure(&THREADS.map(charges), |variant, workload, _| {
        let threads = workload.name.trim_start_matches("direct-").parse().unwrap_or(1);
        (variant.name == "neap").then(|| direct.run(&crowd(threads), CHARGES / threads as u64))
    });
    figures(&mut session);
    let tables = tables(&session);
    session.finish(options.json, &tables)
}

fn figures(session: &mut Session) {
    let median = |session: &Session, variant, name: &str| session.summary(variant, name).map(|summary| summary.median);
    // Times are inverse to throughputs, so this is the lock's time over neap's.
    let ratio = session.ratio(RWLOCK, "neap", "count-2");
    session.figure_of_ratio("throughput_ratio_2", ratio);
    let neap = median(session, "neap", "count-1");
    let lock = [1, 2].map(|threads| median(session, RWLOCK, &format!("count-{threads}")));
    let known = neap.zip(lock[0]).zip(lock[1]).map(|((neap, alone), two)| modelled_ratio(VIRTUAL, neap, alone, two));
    session.figure("throughput_ratio_64", known);
    if let Some(outcome) = session.outcomes("neap", "shared").first().cloned() {
        let (registry, others) = (outcome.count("registry"), outcome.count("others"));
        let share = |registry: f64| 100.0 * registry / (registry + others).max(1.0);
        session.figure("registry_share.lockless", Some(share(registry)));
        session.figure("registry_share.rwlock", Some(share(LOCK_OPERATIONS * outcome.operations as f64)));
    }
    let [few, full, empty] = ["one-percent", "full", "empty"].map(|name| median(session, "neap", name));
    session.figure("one_percent_pass_ratio", few.zip(full).map(|(few, full)| few / full));
    session.figure("empty_pass_us", empty);
    let direct = THREADS.iter().filter_map(|threads| median(session, "neap", &format!("direct-{threads}")));
    session.figure("direct_p99_us", direct.reduce(f64::max));
}

/// Returns visits per second of neap over those under a lock, on `cpus` CPUs. `neap`, `alone` and
/// `two` are nanoseconds: of a lone visit of neap, and of a visit under the lock with one CPU and
/// with two CPUs.
fn modelled_ratio(cpus: f64, neap: f64, alone: f64, two: f64) -> f64 {
    let under_lock = (cpus / alone).min(2.0 / two);
    cpus / neap / under_lock
}

fn tables(session: &Session) -> String {
    let row = |threads: usize| {
        let cells = VARIANTS.map(|variant| cell(session.summary(variant, &format!("count-{threads}")), 1));
        [threads.to_string()].into_iter().chain(cells).collect()
    };
    let counting =
        table(&["threads", "ns for a visit, neap", "read-write lock", "SRCU-like", "nothing"], &THREADS.map(row));
    let of = |name: &str| cell(session.summary("neap", name), 1);
    let passes =
        [("4000 empty groups, each visited", "empty"), ("1 % give a batch", "one-percent"), ("all do", "full")];
    let passes = table(&["pass", "us"], &passes.map(|(name, workload)| vec![name.to_string(), of(workload)]));
    let row = |threads: usize| {
        let name = format!("direct-{threads}");
        let p50 = cell(session.summary_of("neap", &name, |outcome| outcome.count("p50_us")), 1);
        let most = cell(session.summary_of("neap", &name, |outcome| outcome.count("most_caches")), 0);
        vec![threads.to_string(), p50, of(&name), most]
    };
    let direct = table(
        &["threads that charge 128 KiB", "thread CPU us, p50", "p99", "caches that gave for one, at most"],
        &THREADS.map(row),
    );
    format!("Visits that only count, {GROUPS} groups and shrinkers.\n{counting}\n{passes}\n{direct}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_the_limit_of_many_cpus_and_not_of_one() {
        // 64 CPUs, 50 ns a visit; or two visits in 200 ns, on any number of CPUs.
        assert_eq!(modelled_ratio(64.0, 50.0, 40.0, 200.0), 64.0 / 50.0 * 100.0);
        assert_eq!(modelled_ratio(1.0, 50.0, 400.0, 200.0), 8.0);
    }

    #[test]
    fn a_full_pass_takes_a_batch_of_each_and_an_empty_one_nothing() {
        stage::with(|host, shrinkers| {
            let caches: Vec<Cache> = (0..GROUPS).map(|_| Cache::default()).collect();
            let ids = stage::register(host, shrinkers, &caches)?;
            let passes = Passes { host, shrinkers, caches, ids };
            for (full, freed) in [(GROUPS, GROUPS), (FEW, FEW), (0, 0)] {
                assert_eq!(passes.timed(full).count("freed"), (freed * stage::BATCH) as f64);
            }
            let shared = passes.shared(&[0]);
            assert!(shared.count("others") >= 2.0 * GROUPS as f64);
            Ok(())
        })
        .unwrap();
    }
}
