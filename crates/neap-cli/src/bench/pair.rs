//! `neap bench pair`: cost of malloc and free.
//!
//! Figures: `pair_ratio` and `pair_ratio_no_rseq` (64 B, one block at a time, to the fastest of
//! jemalloc, mimalloc and tcmalloc), `batch_ratio` (1000 blocks at a time, last in first out, to
//! the fastest peer). Batches in the other order, mixed sizes and four threads are shown beside
//! them. Figures with the suffix `_cpu` are of processor time. On a busy machine they vary far less
//! than wall time. They do not include the time in which a thread waits.

use std::process::ExitCode;

use anyhow::Result;

use super::{Options, Reading, Session, Workload, default_peers};
use crate::report::{cell, table};
use crate::variant::{Choice, Variant};
use crate::work::Outcome;

/// The peers that `pair_ratio` is taken against.
const FAST_PEERS: [&str; 4] = ["jemalloc", "mimalloc2", "mimalloc3", "tcmalloc"];

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::new("pair", Choice::Speed, &options.against)?;
    let rounds = options.rounds(20);
    let shown = rounds.min(5);
    let count = options.amount(40_000_000).to_string();
    let fewer = options.amount(20_000_000).to_string();
    let each = options.amount(5_000_000).to_string();
    session.measure_workloads(&[
        Workload::timed("pair", rounds, &["pair", "--count", &count]),
        Workload::timed("batch", rounds, &["batch", "--order", "lifo", "--count", &fewer]),
        Workload::timed("batch-fifo", shown, &["batch", "--order", "fifo", "--count", &fewer]),
        Workload::timed("mixed", shown, &["pair", "--mixed", "1000", "--count", &fewer]),
        Workload {
            metric: Outcome::cpu_ns_each,
            unit: "ns of processor time",
            ..Workload::timed("threads", shown, &["pair", "--threads", "4", "--count", &each])
        },
    ]);
    let fast = |variant: &Variant| FAST_PEERS.contains(&variant.name);
    for (suffix, reading) in [("", None), ("_cpu", Some(Outcome::cpu_ns_each as Reading))] {
        let pair = session.ratio_to_fastest("neap", "pair", reading, fast);
        let without = session.ratio_to_fastest("neap-no-rseq", "pair", reading, fast);
        let batch = session.ratio_to_fastest("neap", "batch", reading, default_peers);
        session.figure_of_ratio(&format!("pair_ratio{suffix}"), pair);
        session.figure_of_ratio(&format!("pair_ratio_no_rseq{suffix}"), without);
        session.figure_of_ratio(&format!("batch_ratio{suffix}"), batch);
    }
    let tables = tables(&session);
    session.finish(options.json, &tables)
}

fn tables(session: &Session) -> String {
    let header = [
        "ns per malloc + free",
        "64 B",
        "neap / it",
        "1000 x 64 B, last in first out",
        "neap / it",
        "first in first out",
        "1 to 1000 B",
        "64 B, 4 threads (CPU)",
    ];
    let row = |variant: &Variant| {
        let value = |workload: &str| cell(session.summary(variant.name, workload), 2);
        vec![
            variant.name.to_string(),
            value("pair"),
            session.ratio_cell(variant, "pair"),
            value("batch"),
            session.ratio_cell(variant, "batch"),
            value("batch-fifo"),
            value("mixed"),
            value("threads"),
        ]
    };
    table(&header, &session.found.variants.iter().map(row).collect::<Vec<_>>())
}
