//! `neap bench charge`: cost of charging a page to a memory group, and uncharging it.
//!
//! A pair is a `Group::charge` of 4096 bytes and its uncharge, which happens when the result is
//! dropped. The group is 1 to 8 levels below the root. A *stock* holds bytes that a CPU has charged
//! ahead. A pair that *hits* finds its page in this CPU's stock. A pair that *misses* is one page
//! larger than a stock can hold, so both calls change the counters of all levels. The same rounds
//! measure for comparison: one addition to an atomic that no other thread uses (`add`); an addition
//! to the atomic of each level, and a subtraction (`atomic`); the same with an atomic for each
//! thread (`sharded`).
//!
//! 1 to 64 threads run, spread over the CPUs in turn. Each thread's median part counts, so waiting
//! for a CPU is not measured.
//!
//! Figures:
//!
//! * `charge_ns`;
//! * `charge_ratio`: a pair that hits over one addition; `charge_ratio_atomic`,
//!   `charge_ratio_sharded`: over the atomics, with the suffix `_64` for 64 threads;
//! * `level_ratio_hit`, `level_ratio_miss`: time of a pair over that of a pair one level higher,
//!   the largest of the seven medians;
//! * `miss_ns`;
//! * `shared_ops_ratio_16`: operations on shared counters for each call
//!   (`Groups::shared_operations`), on 16 virtual CPUs. Each CPU charges and uncharges at random. A
//!   plain atomic makes one operation for each call;
//! * `shared_ops_ratio_16_flow`: one half of the CPUs charges and the other half uncharges, so that
//!   all bytes go through the counters.

mod shared;

use core::hint::black_box;
use core::sync::atomic::{AtomicU64, Ordering};
use std::process::ExitCode;

use anyhow::Result;
use neap::groups::{Charge, ChargeError, Group};
use neap_groups::CAP;

use super::counter::timed;
use super::{Options, Session, Workload};
use crate::report::{cell, number, table};
use crate::statistics::{Measured, paired_ratios, summary};
use crate::work::Outcome;
use crate::work::meter::cpus;
use shared::Pattern;

const PAGE: u64 = 4096;
const DEEPEST: usize = 8;
const THREADS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const MOST_THREADS: usize = 64;

const ADD: &str = "add";
const ATOMIC: &str = "atomic";
const SHARDED: &str = "sharded";
const VARIANTS: [&str; 4] = ["neap", ADD, ATOMIC, SHARDED];

/// The subject of a workload.
#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Hit { depth: usize },
    Miss { depth: usize },
    Threads(usize),
    Shared { pattern: Pattern, cpus: usize, depth: usize },
}

impl What {
    fn name(self) -> String {
        match self {
            What::Hit { depth } => format!("hit-{depth}"),
            What::Miss { depth } => format!("miss-{depth}"),
            What::Threads(threads) => format!("threads-{threads}"),
            What::Shared { pattern, cpus, depth } => format!("{}-{cpus}-{depth}", pattern.name()),
        }
    }

    fn all() -> Vec<What> {
        let depths = 1..=DEEPEST;
        let shared = |pattern| {
            let machine = move |cpus| [1, DEEPEST].map(|depth| What::Shared { pattern, cpus, depth });
            // `Pattern::Flow` needs two halves, so two CPUs.
            THREADS.into_iter().filter(move |&cpus| pattern == Pattern::Walk || cpus > 1).flat_map(machine)
        };
        let timed = depths.clone().map(|depth| What::Hit { depth }).chain(depths.map(|depth| What::Miss { depth }));
        timed.chain(THREADS.map(What::Threads)).chain(Pattern::ALL.into_iter().flat_map(shared)).collect()
    }

    fn workload(self, rounds: usize) -> Workload {
        let timed = Workload::timed(&self.name(), rounds, &[]);
        match self {
            // One round is enough, since the result is the same each time.
            What::Shared { .. } => Workload {
                rounds: 1,
                unit: "operations on shared counters",
                metric: |outcome| outcome.count("shared") / outcome.operations.max(1) as f64,
                ..timed
            },
            _ => timed,
        }
    }
}

/// An atomic on cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Level(AtomicU64);

impl Level {
    fn pair(levels: &[Level]) {
        levels.iter().for_each(|level| _ = level.0.fetch_add(PAGE, Ordering::Relaxed));
        levels.iter().for_each(|level| _ = level.0.fetch_sub(PAGE, Ordering::Relaxed));
    }
}

/// Charges and uncharges. The charge is not moved, as in a program: a move would cost as much as
/// both calls.
#[inline(always)]
fn pair(group: Group, bytes: u64) {
    let charge: Result<Charge, ChargeError> = group.charge(bytes);
    black_box(&charge);
}

/// Groups and counters to charge.
struct ChargeStage {
    /// Groups by depth. The first lies directly below the root.
    groups: Vec<Group>,
    levels: Vec<Level>,
    /// Atomics by thread.
    shards: Vec<Level>,
    cpus: Vec<usize>,
    /// Pairs of a run.
    times: u64,
}

impl ChargeStage {
    fn open(times: u64) -> Result<ChargeStage> {
        let mut groups: Vec<Group> = Vec::new();
        let mut path = String::new();
        for depth in 1..=DEEPEST {
            path += &format!("{}depth-{depth}", if depth == 1 { "" } else { "/" });
            groups.push(Group::find_or_create(&path)?);
        }
        let levels = |count| (0..count).map(|_| Level::default()).collect();
        Ok(ChargeStage { groups, levels: levels(DEEPEST), shards: levels(MOST_THREADS), cpus: cpus()?, times })
    }

    /// Makes one run. `None` if the variant does not apply to the workload.
    fn run(&self, variant: &str, what: What) -> Option<Result<Outcome>> {
        let (here, times) = (&self.cpus[..1], self.times);
        let group = |depth: usize| self.groups[depth - 1];
        let outcome = match (what, variant) {
            (What::Hit { depth }, "neap") => self.neap(here, times, group(depth), PAGE),
            (What::Hit { depth }, ATOMIC) => self.atomic(here, times, depth),
            (What::Hit { depth: 1 }, SHARDED) => self.sharded(here, times),
            (What::Hit { depth: 1 }, ADD) => {
                let level = &self.levels[0].0;
                timed(here, times, move |_| _ = level.fetch_add(PAGE, Ordering::Relaxed))
            }
            (What::Miss { depth }, "neap") => self.neap(here, times / 20, group(depth), CAP + PAGE),
            (What::Threads(threads), _) => {
                let on: Vec<usize> = self.cpus.iter().copied().cycle().take(threads).collect();
                match variant {
                    "neap" => self.neap(&on, times / 10, group(1), PAGE),
                    ATOMIC => self.atomic(&on, times / 10, 1),
                    SHARDED => self.sharded(&on, times / 10),
                    _ => return None,
                }
            }
            (What::Shared { pattern, cpus, depth }, "neap") => shared::run(pattern, cpus, depth, times),
            _ => return None,
        };
        Some(outcome)
    }

    fn neap(&self, on: &[usize], times: u64, group: Group, bytes: u64) -> Result<Outcome> {
        timed(on, times, move |_| pair(group, bytes))
    }

    fn atomic(&self, on: &[usize], times: u64, depth: usize) -> Result<Outcome> {
        let levels = &self.levels[..depth];
        timed(on, times, move |_| Level::pair(levels))
    }

    fn sharded(&self, on: &[usize], times: u64) -> Result<Outcome> {
        let shards = &self.shards[..];
        timed(on, times, move |thread| Level::pair(&shards[thread..=thread]))
    }

    fn close(self) -> Result<()> {
        Ok(self.groups.into_iter().rev().try_for_each(Group::delete)?)
    }
}

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::of_parts("charge", &VARIANTS)?;
    let (rounds, stage) = (options.rounds(30), ChargeStage::open(options.amount(1_000_000))?);
    let all = What::all();
    let workloads: Vec<Workload> = all.iter().map(|what| what.workload(rounds)).collect();
    session.measure(&workloads, |variant, workload, _| {
        let what = all.iter().find(|what| what.name() == workload.name)?;
        stage.run(variant.name, *what)
    });
    stage.close()?;
    figures(&mut session);
    let tables = tables(&session);
    session.finish(options.json, &tables)
}

fn figures(session: &mut Session) {
    let median = |session: &Session, name: &str| session.summary("neap", name).map(|summary| summary.median);
    session.figure("charge_ns", median(session, "hit-1"));
    session.figure("miss_ns", median(session, "miss-1"));
    for (name, against, workload) in [
        ("charge_ratio", ADD, "hit-1"),
        ("charge_ratio_atomic", ATOMIC, "hit-1"),
        ("charge_ratio_sharded", SHARDED, "hit-1"),
        ("charge_ratio_atomic_64", ATOMIC, "threads-64"),
        ("charge_ratio_sharded_64", SHARDED, "threads-64"),
    ] {
        let ratio = session.ratio("neap", against, workload);
        session.figure_of_ratio(name, ratio);
    }
    for (name, kind) in [("level_ratio_hit", "hit"), ("level_ratio_miss", "miss")] {
        session.figure(name, (2..=DEEPEST).filter_map(|depth| level_ratio(session, kind, depth)).reduce(f64::max));
    }
    session.figure("shared_ops_ratio_16", median(session, "walk-16-1"));
    session.figure("shared_ops_ratio_16_flow", median(session, "flow-16-1"));
}

/// Cost of a pair over that of one a level higher: the median of the rounds.
fn level_ratio(session: &Session, kind: &str, depth: usize) -> Option<f64> {
    let measured = |depth: usize| -> Vec<Measured> {
        let outcomes = session.outcomes("neap", &format!("{kind}-{depth}"));
        outcomes.iter().map(|outcome| (outcome.round, outcome.ns_each())).collect()
    };
    summary(paired_ratios(&measured(depth), &measured(depth - 1))).map(|summary| summary.median)
}

fn tables(session: &Session) -> String {
    let of = |variant: &str, name: String| cell(session.summary(variant, &name), 2);
    let ratio =
        |kind: &str, depth: usize| level_ratio(session, kind, depth).map_or("-".into(), |ratio| number(ratio, 2));
    let depths = (1..=DEEPEST).map(|depth| {
        let [hit, miss] = ["hit", "miss"].map(|kind| format!("{kind}-{depth}"));
        let cells =
            [of("neap", hit.clone()), ratio("hit", depth), of("neap", miss), ratio("miss", depth), of(ATOMIC, hit)];
        [depth.to_string()].into_iter().chain(cells).collect()
    });
    let header = ["depth", "ns, hit", "over one higher", "ns, miss", "over one higher", "ns, atomics"];
    let depths = table(&header, &depths.collect::<Vec<_>>());
    let threads = THREADS.map(|threads| {
        let cells = ["neap", ATOMIC, SHARDED].map(|variant| of(variant, What::Threads(threads).name()));
        [threads.to_string()].into_iter().chain(cells).collect()
    });
    let threads = table(&["threads", "ns, neap", "ns, atomic", "ns, sharded"], &threads);
    let machines = THREADS.map(|cpus| {
        let cells = Pattern::ALL
            .into_iter()
            .flat_map(|pattern| [1, DEEPEST].map(|depth| What::Shared { pattern, cpus, depth }));
        let cells = cells.map(|what| cell(session.summary("neap", &what.name()), 4));
        [cpus.to_string()].into_iter().chain(cells).collect()
    });
    let header = ["virtual CPUs", "at random", "at random, depth 8", "half to half", "half to half, depth 8"];
    let machines = table(&header, &machines);
    format!(
        "Charging and uncharging one page; an addition alone takes {} ns, a pair on an atomic of the thread's own {} ns.\n{depths}\n\
         {threads}\nOperations on shared counters for each call; a plain atomic's is 1 for each level.\n{machines}",
        of(ADD, "hit-1".into()),
        of(SHARDED, "hit-1".into()),
    )
}
