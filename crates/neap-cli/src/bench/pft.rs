//! `neap bench pft`: cost of the lock of a page list, where every page is touched for the first
//! time.
//!
//! Figures: `lock_cost_ratio` (time with the lock over time of the code without it, one thread on
//! each CPU) and `bypasses_per_million` (blocks that bypassed a list because another thread held
//! it). The latter is the worse of two medians: of one thread on each CPU, and of four for each CPU
//! that the scheduler moves and preempts. Pages are 4 KiB and each costs a fault, as in pft.

use std::process::ExitCode;

use anyhow::Result;

use super::{Options, Session, Workload};
use crate::report::{cell, table};
use crate::variant::Variant;
use crate::work::{self, Outcome};

const UNLOCKED: &str = "neap-unlocked";
const CROWD: &str = "pft-crowd";

fn bypasses(outcome: &Outcome) -> f64 {
    outcome.count("list_busy") * 1e6 / outcome.operations.max(1) as f64
}

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::of_parts("pft", &["neap", UNLOCKED])?;
    let (rounds, mib) = (options.rounds(30), options.amount(256).to_string());
    let memory = (work::meter::cpus()?.len() * options.amount(256) as usize * 5 / 4) << 20;
    let workloads = [
        Workload { memory, ..Workload::timed("pft", rounds, &["first-touch", "--mib", &mib]) },
        Workload {
            memory,
            ..Workload::timed(CROWD, rounds.min(10), &["first-touch", "--per-cpu", "4", "--mib", &mib])
        },
    ];
    let executable = session.executable.clone();
    session.measure(&workloads, |variant, workload, _| {
        let mut arguments: Vec<&str> = workload.arguments.iter().map(String::as_str).collect();
        if variant.name == UNLOCKED {
            if workload.name == CROWD {
                return None;
            }
            arguments.push("--unlocked");
        }
        Some(work::measure(&executable, variant, &arguments))
    });
    let ratio = session.ratio("neap", UNLOCKED, "pft");
    session.figure_of_ratio("lock_cost_ratio", ratio);
    let medians = ["pft", CROWD].map(|workload| session.summary_of("neap", workload, bypasses));
    let worst = medians.iter().map(|summary| summary.map(|summary| summary.median)).collect::<Option<Vec<f64>>>();
    session.figure("bypasses_per_million", worst.and_then(|medians| medians.into_iter().reduce(f64::max)));
    let tables = tables(&session);
    session.finish(options.json, &tables)
}

fn tables(session: &Session) -> String {
    let row = |(variant, workload, name): (&Variant, &str, &str)| {
        vec![
            name.to_string(),
            cell(session.summary(variant.name, workload), 1),
            cell(session.summary_of(variant.name, workload, Outcome::cpu_ns_each), 1),
            cell(session.summary_of(variant.name, workload, bypasses), 1),
        ]
    };
    let [locked, unlocked] = &session.found.variants[..] else { return String::new() };
    let rows = [
        (locked, "pft", "with the lock, one thread a CPU"),
        (unlocked, "pft", "without, one thread a CPU"),
        (locked, CROWD, "with the lock, four threads a CPU"),
    ];
    table(&["first touch", "ns per page", "CPU ns", "bypasses per million"], &rows.map(row))
}
