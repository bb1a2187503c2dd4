//! `neap bench churn`: 11 000 memory groups that are made, filled up to their limit and deleted, 64
//! at a time, while other groups are charged.
//!
//! Each run is a process of its own (see `work/churn.rs`). Half of the charges of a group end at
//! once. One charge of each group is kept until 32 more groups have been deleted. A thread on each
//! CPU charges live groups, and keeps its charges for a while. Times are thread CPU time.
//!
//! Figures, the worst of the rounds:
//!
//! * `metadata_growth_bytes`: growth of metadata from the first 64 live groups to the last 64.
//!   Metadata are the tables of groups and stocks, and the used part of per-CPU data;
//! * `per_cpu_growth_bytes`: pages populated for per-CPU data, reserve included;
//! * `dying_after_1s`: deleted groups that are not yet gone a second after the last delete;
//! * `delete_p99_us`, `create_p99_us`;
//! * `pass_ratio`, `walk_ratio`: time of a pass of maintenance, and of a walk over all groups. Each
//!   is the time after all groups have come and gone, over the time with the first 64 groups;
//! * `bytes_per_group`: tables for each of some 4000 empty groups, right after the tables have
//!   grown;
//! * `per_cpu_bytes_per_group`: bytes of a group's statistics on all CPUs.

use std::process::ExitCode;

use anyhow::Result;

use super::{Options, Reading, Session, Workload};
use crate::report::{cell, table};
use crate::work::Outcome;

const CHURN: &str = "churn";

fn metadata_growth(outcome: &Outcome) -> f64 {
    growth(outcome, "metadata")
}

fn per_cpu_growth(outcome: &Outcome) -> f64 {
    growth(outcome, "per_cpu_bytes")
}

fn growth(outcome: &Outcome, name: &str) -> f64 {
    outcome.count(&format!("{name}_after")) - outcome.count(&format!("{name}_before"))
}

fn ratio(outcome: &Outcome, name: &str) -> f64 {
    outcome.count(&format!("{name}_after")) / outcome.count(&format!("{name}_before"))
}

/// Figures and their readings.
const FIGURES: [(&str, Reading); 9] = [
    ("metadata_growth_bytes", metadata_growth),
    ("per_cpu_growth_bytes", per_cpu_growth),
    ("dying_after_1s", |outcome| outcome.count("dying_after_1s")),
    ("delete_p99_us", |outcome| outcome.count("delete_p99_us")),
    ("create_p99_us", |outcome| outcome.count("create_p99_us")),
    ("pass_ratio", |outcome| ratio(outcome, "pass_ns")),
    ("walk_ratio", |outcome| ratio(outcome, "walk_ns")),
    ("bytes_per_group", |outcome| outcome.count("bytes_per_group")),
    ("per_cpu_bytes_per_group", |outcome| outcome.count("per_cpu_bytes_per_group")),
];

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::of_parts("churn", &["neap"])?;
    let [groups, empty] = [11_000, 4000].map(|usual| options.amount(usual).to_string());
    let arguments = ["churn", "--groups", &groups, "--empty", &empty];
    let workload = Workload {
        unit: "us for a group that comes and goes",
        metric: |outcome| outcome.ns_each() / 1e3,
        ..Workload::timed(CHURN, options.rounds(10), &arguments)
    };
    session.measure_workloads(&[workload]);
    for (name, reading) in FIGURES {
        session.figure(name, session.summary_of("neap", CHURN, reading).map(|summary| summary.max));
    }
    let tables = tables(&session);
    session.finish(options.json, &tables)
}

/// Readings of the percentiles of one kind of call.
macro_rules! times {
    ($name:literal) => {
        [
            |outcome| outcome.count(concat!($name, "_p50_us")),
            |outcome| outcome.count(concat!($name, "_p90_us")),
            |outcome| outcome.count(concat!($name, "_p99_us")),
            |outcome| outcome.count(concat!($name, "_max_us")),
        ]
    };
}

fn tables(session: &Session) -> String {
    let of = |reading: Reading, decimals: usize| cell(session.summary_of("neap", CHURN, reading), decimals);
    let rows: [(&str, [Reading; 4]); 3] =
        [("create", times!("create")), ("charge up to the limit", times!("fill")), ("delete", times!("delete"))];
    let rows = rows.map(|(name, times)| [name.to_string()].into_iter().chain(times.map(|time| of(time, 1))).collect());
    let times = table(&["thread CPU us", "p50", "p90", "p99", "most"], &rows);
    let rows: [(&str, Reading, Reading); 5] = [
        ("bytes of metadata", |outcome| outcome.count("metadata_before"), |outcome| outcome.count("metadata_after")),
        (
            "bytes of per-CPU pages",
            |outcome| outcome.count("per_cpu_bytes_before"),
            |outcome| outcome.count("per_cpu_bytes_after"),
        ),
        ("KiB resident", |outcome| outcome.count("rss_kib_before"), |outcome| outcome.count("rss_kib_after")),
        (
            "us for a pass",
            |outcome| outcome.count("pass_ns_before") / 1e3,
            |outcome| outcome.count("pass_ns_after") / 1e3,
        ),
        (
            "us for a walk",
            |outcome| outcome.count("walk_ns_before") / 1e3,
            |outcome| outcome.count("walk_ns_after") / 1e3,
        ),
    ];
    let rows = rows.map(|(name, before, after)| vec![name.to_string(), of(before, 1), of(after, 1)]);
    let moments = table(&["with 64 groups alive", "the first", "the last"], &rows);
    let granted = of(|outcome| outcome.count("charges_granted"), 0);
    format!(
        "{times}\n{moments}\nWhile groups were created and deleted, a thread on each CPU charged live groups. \
         {granted} charges were granted in a run.\n"
    )
}
