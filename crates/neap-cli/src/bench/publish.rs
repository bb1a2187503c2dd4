//! `neap bench publish`: what it costs a process that commands can read its numbers.
//!
//! One thread allocates and frees 10,000 times a second for 30 s. The variants: `neap`, which
//! publishes; `read`, which publishes while `neap stat` reads it ten times a second; and
//! `unpublished`, with `stat:off`. Processor time of the command is not part of it.
//!
//! Figures, as shares of a core: `published_share`, the processor time of `neap` less that of
//! `unpublished`, and `read_share`, that of `read` less that of `unpublished`, each the median over
//! paired rounds; `program_share`, the processor time of `unpublished`.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};

use super::{Options, Session, Workload};
use crate::process::Process;
use crate::report::{cell, table};
use crate::statistics::{Summary, summary};
use crate::variant::Variant;
use crate::work::{self, Outcome};

const NAME: &str = "paced";
const READ: &str = "read";
const UNPUBLISHED: &str = "unpublished";
/// Time between two readings.
const EVERY: Duration = Duration::from_millis(100);
/// Longest time of a run.
const LIMIT: Duration = Duration::from_secs(120);

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session =
        Session::of_settings("publish", &[("neap", "stat:on"), (READ, "stat:on"), (UNPUBLISHED, "stat:off")])?;
    let seconds = options.amount(30).to_string();
    let workload = Workload {
        unit: "share of a core",
        metric: share,
        ..Workload::timed(NAME, options.rounds(7), &["paced", "--seconds", &seconds])
    };
    let executable = session.executable.clone();
    session.measure(&[workload], |variant, workload, _| {
        let arguments: Vec<&str> = workload.arguments.iter().map(String::as_str).collect();
        Some(match variant.name {
            READ => measure_while_read(&executable, variant, &arguments),
            _ => work::measure(&executable, variant, &arguments),
        })
    });
    for (figure, variant) in [("published_share", "neap"), ("read_share", READ)] {
        let of = more(&session, variant).map(|more| more.median);
        session.figure(figure, of);
    }
    let program = session.summary(UNPUBLISHED, NAME).map(|program| program.median);
    session.figure("program_share", program);
    let tables = tables(&session);
    session.finish(options.json, &tables)
}

fn share(outcome: &Outcome) -> f64 {
    outcome.cpu_ns as f64 / outcome.wall_ns.max(1) as f64
}

/// Share of a core beyond that of the variant without a page, over paired rounds.
fn more(session: &Session, variant: &str) -> Option<Summary> {
    let pairs = session.outcomes(variant, NAME).iter().zip(session.outcomes(UNPUBLISHED, NAME));
    summary(pairs.map(|(with, without)| share(with) - share(without)))
}

/// Runs the workload while `neap stat` reads its numbers.
fn measure_while_read(executable: &Path, variant: &Variant, arguments: &[&str]) -> Result<Outcome> {
    let mut process = Process::start(work::command(executable, variant, arguments), LIMIT)?;
    let (pid, has_ended) = (process.id().to_string(), AtomicBool::new(false));
    let (mut text, mut looks) = (Vec::new(), 0_u32);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Relaxed: the flag publishes no other data.
            while !has_ended.load(Ordering::Relaxed) {
                let mut stat = Command::new(executable);
                stat.args(["stat", &pid, "--json"]).stdout(Stdio::null()).stderr(Stdio::null());
                looks += u32::from(stat.status().is_ok_and(|status| status.success()));
                std::thread::sleep(EVERY);
            }
        });
        let read = process.read(|bytes| {
            text.extend_from_slice(bytes);
            true
        });
        has_ended.store(true, Ordering::Relaxed);
        read
    })?;
    process.wait()?;
    let mut outcome: Outcome = serde_json::from_slice(&text).context("the workload has no result")?;
    outcome.counts.insert("looks".to_string(), looks.into());
    Ok(outcome)
}

fn tables(session: &Session) -> String {
    let percent = |of: Option<Summary>| {
        let [median, min, max] = of.map_or([0.0; 3], |of| [of.median, of.min, of.max]).map(|share| 100.0 * share);
        cell(of.map(|_| Summary { median, min, max }), 3)
    };
    let row = |variant: &Variant| {
        let looks = session.summary_of(variant.name, NAME, |outcome| outcome.count("looks"));
        let (own, more) = (session.summary(variant.name, NAME), more(session, variant.name));
        vec![variant.name.to_string(), percent(own), percent(more), cell(looks, 0)]
    };
    let rows: Vec<Vec<String>> = session.found.variants.iter().map(row).collect();
    table(&["10,000 allocations a second", "% of a core", "beyond `unpublished`", "readings"], &rows)
}
