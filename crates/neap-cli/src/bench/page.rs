//! `neap bench page`: cost of a page-sized block, 128 MiB up and down.
//!
//! Figures: `page_ratio`, to the fastest peer, and `page_ratio_cpu`, of processor time. Each run
//! goes up and down ten times. The first time pays for fresh pages, and the other nine can reuse
//! them. An allocator that releases pages too eagerly pays for fresh pages each time.

use std::process::ExitCode;

use anyhow::Result;

use super::{Options, Reading, Session, Workload, default_peers};
use crate::report::{cell, table};
use crate::variant::{Choice, Variant};
use crate::work::Outcome;

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::new("page", Choice::Speed, &options.against)?;
    let repeats = options.amount(10).to_string();
    let timed = Workload::timed("page", options.rounds(30), &["page", "--repeats", &repeats]);
    session.measure_workloads(&[Workload { memory: 192 << 20, ..timed }]);
    for (name, reading) in [("page_ratio", None), ("page_ratio_cpu", Some(Outcome::cpu_ns_each as Reading))] {
        let ratio = session.ratio_to_fastest("neap", "page", reading, default_peers);
        session.figure_of_ratio(name, ratio);
    }
    let tables = tables(&session);
    session.finish(options.json, &tables)
}

fn tables(session: &Session) -> String {
    let row = |variant: &Variant| {
        let faults = |outcome: &Outcome| outcome.minor_faults as f64 / outcome.operations.max(1) as f64;
        vec![
            variant.name.to_string(),
            cell(session.summary(variant.name, "page"), 1),
            session.ratio_cell(variant, "page"),
            cell(session.summary_of(variant.name, "page", Outcome::cpu_ns_each), 1),
            cell(session.summary_of(variant.name, "page", faults), 2),
        ]
    };
    let rows: Vec<Vec<String>> = session.found.variants.iter().map(row).collect();
    table(&["4 KiB blocks", "ns per page", "neap / it", "CPU ns per page", "faults per page"], &rows)
}
