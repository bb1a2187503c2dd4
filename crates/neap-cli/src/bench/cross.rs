//! `neap bench cross`: blocks allocated on one thread and freed on another.
//!
//! Figures: `larson_ratio` and `xmalloc_ratio`, each to its fastest peer, and `cross_ratio`, the
//! larger of the two; with the suffix `_cpu`, of processor time.

use std::process::ExitCode;

use anyhow::Result;

use super::{Options, Reading, Session, Workload, default_peers};
use crate::report::{cell, table};
use crate::variant::{Choice, Variant};
use crate::work::Outcome;

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::new("cross", Choice::Speed, &options.against)?;
    let rounds = options.rounds(20);
    let generations = options.amount(100).to_string();
    let batches = options.amount(4000).to_string();
    session.measure_workloads(&[
        Workload::timed("larson", rounds, &["larson", "--generations", &generations]),
        Workload::timed("xmalloc", rounds, &["xmalloc", "--batches", &batches]),
    ]);
    for (suffix, reading) in [("", None), ("_cpu", Some(Outcome::cpu_ns_each as Reading))] {
        let ratios =
            ["larson", "xmalloc"].map(|workload| session.ratio_to_fastest("neap", workload, reading, default_peers));
        if let [Some(larson), Some(xmalloc)] = ratios {
            let larger = if larson.summary.median >= xmalloc.summary.median { larson.clone() } else { xmalloc.clone() };
            session.figure_of_ratio(&format!("larson_ratio{suffix}"), Some(larson));
            session.figure_of_ratio(&format!("xmalloc_ratio{suffix}"), Some(xmalloc));
            session.figure_of_ratio(&format!("cross_ratio{suffix}"), Some(larger));
        }
    }
    let tables = tables(&session);
    session.finish(options.json, &tables)
}

fn tables(session: &Session) -> String {
    let mib = |outcome: &Outcome| outcome.peak_rss_kib.unwrap_or(0) as f64 / 1024.0;
    let row = |variant: &Variant| {
        let mut row = vec![variant.name.to_string()];
        for workload in ["larson", "xmalloc"] {
            row.push(cell(session.summary(variant.name, workload), 1));
            row.push(session.ratio_cell(variant, workload));
            row.push(cell(session.summary_of(variant.name, workload, mib), 0));
        }
        row
    };
    let rows: Vec<Vec<String>> = session.found.variants.iter().map(row).collect();
    let header =
        ["freed elsewhere", "larson-like ns", "neap / it", "peak MiB", "xmalloc-like ns", "neap / it", "peak MiB"];
    table(&header, &rows)
}
