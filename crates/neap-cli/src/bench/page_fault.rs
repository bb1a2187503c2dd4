//! `neap bench page-fault`: page lists that tune themselves against lists of a fixed size, 128 MiB
//! up and down on every CPU.
//!
//! Figures: `zone_lock_ratio` (locks of the zone in a million page operations, tuned over fixed)
//! and `throughput_ratio` (page operations in a second, tuned over fixed). An operation is an
//! allocation, with a first byte written, or a free. The workload is modelled on page_fault1 of
//! will-it-scale, whose pages come from the kernel's lists.

use std::process::ExitCode;

use anyhow::Result;

use super::{Options, Session, Workload};
use crate::report::{cell, table};
use crate::variant::Variant;
use crate::work::{self, Outcome};

const FIXED: &str = "neap-fixed";

/// Number of times that the zone's lock was taken in a million operations.
fn locks(outcome: &Outcome) -> f64 {
    outcome.count("zone_locks") * 1e6 / outcome.operations.max(1) as f64
}

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::of_parts("page-fault", &["neap", FIXED])?;
    let repeats = options.amount(40).to_string();
    let timed = Workload::timed("page-fault", options.rounds(20), &["page-fault", "--repeats", &repeats]);
    let cpus = work::meter::cpus()?.len();
    let executable = session.executable.clone();
    session.measure(&[Workload { memory: cpus * (192 << 20), ..timed }], |variant, workload, _| {
        let mut arguments: Vec<&str> = workload.arguments.iter().map(String::as_str).collect();
        if variant.name == FIXED {
            arguments.push("--fixed");
        }
        Some(work::measure(&executable, variant, &arguments))
    });
    let ratio = session.ratio_of("neap", FIXED, "page-fault", Some(locks));
    session.figure_of_ratio("zone_lock_ratio", ratio);
    // Fixed time over tuned time is tuned throughput over fixed.
    let ratio = session.ratio(FIXED, "neap", "page-fault");
    session.figure_of_ratio("throughput_ratio", ratio);
    let tables = tables(&session);
    session.finish(options.json, &tables)
}

fn tables(session: &Session) -> String {
    let row = |variant: &Variant| {
        let of = |reading| session.summary_of(variant.name, "page-fault", reading);
        vec![
            if variant.name == FIXED { "fixed" } else { "adaptive" }.to_string(),
            cell(session.summary(variant.name, "page-fault"), 1),
            cell(of(Outcome::cpu_ns_each), 1),
            cell(of(locks), 0),
            cell(of(|outcome| outcome.count("zone_waits") * 1e6 / outcome.operations.max(1) as f64), 1),
            cell(of(|outcome| outcome.count("list_batch")), 0),
        ]
    };
    let rows: Vec<Vec<String>> = session.found.variants.iter().map(row).collect();
    let header =
        ["page lists", "ns per operation", "CPU ns", "zone locks per million", "found held", "batch in the end"];
    table(&header, &rows)
}
