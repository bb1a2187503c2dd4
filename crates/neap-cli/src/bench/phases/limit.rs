//! `neap bench phases --limit`: the smallest memory limit of a container in which a program with
//! phases survives.
//!
//! The program runs in a memory group of the kernel. The limit is found by bisection, in twentieths
//! of the live set. Figures: `limit_ratio`, neap's limit over the live set, and
//! `limit_ratio_best_peer`, that over the best peer's. The limit covers the whole program with its
//! tables, an eighth of the live set.

use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use super::{ALL_SIZES, Variation, default_peers};
use crate::bench::cgroup::Groups;
use crate::bench::{NOT_MEASURED, Options, Session, Workload};
use crate::process::Process;
use crate::report::{cell, table};
use crate::variant::{Choice, Variant};
use crate::work::phases::Order;
use crate::work::{self, Outcome};

/// Limits are multiples of the live set over this number.
const PARTS: usize = 20;
/// Largest limit that is tried, over the live set.
const LARGEST: usize = 8;
/// Longest time of a surviving program. A program that takes longer evicts its own code again and
/// again, and counts as one that does not survive.
const PATIENCE: Duration = Duration::from_secs(120);
const NAME: &str = "8 sizes, stride, 2 t, limit";

pub(super) fn main(options: &Options, live: usize) -> Result<ExitCode> {
    let groups = match Groups::find() {
        Ok(groups) => groups,
        Err(reason) => {
            eprintln!("neap bench phases: limits are not measured: {reason:#}");
            return Ok(ExitCode::from(NOT_MEASURED));
        }
    };
    let mut session = Session::new("phases", Choice::Defaults, &options.against)?;
    let variation =
        Variation { name: NAME.to_string(), sizes: ALL_SIZES.to_vec(), order: Order::Stride, threads: 2, turns: 3 };
    let workload = Workload {
        name: NAME.to_string(),
        arguments: variation.arguments(live),
        rounds: 1,
        memory: 0,
        unit: "x the live set",
        metric: |outcome| outcome.count("limit"),
    };
    let executable = session.executable.clone();
    session.measure(&[workload], |variant, workload, _| {
        Some(measure(&executable, variant, workload, live << 20, &groups))
    });
    figures(&mut session);
    let row = |variant: &Variant| vec![variant.name.to_string(), cell(session.summary(variant.name, NAME), 2)];
    let rows: Vec<Vec<String>> = session.found.variants.iter().map(row).collect();
    let header = ["8 sizes, stride, 2 threads, 3 turns", "smallest limit / live set"];
    let tables = format!("{}\nLive set: {live} MiB.", table(&header, &rows));
    session.finish(options.json, &tables)
}

fn figures(session: &mut Session) {
    let limit = |variant: &str| Some(session.summary(variant, NAME)?.median);
    let ours = limit("neap");
    let peers = session.found.variants.iter().filter(|variant| default_peers(variant));
    let best = peers.filter_map(|peer| limit(peer.name)).min_by(f64::total_cmp);
    session.figure("limit_ratio", ours);
    session.figure("limit_ratio_best_peer", ours.zip(best).map(|(ours, best)| ours / best));
}

/// Returns the smallest limit of one variant, as the count `limit`.
fn measure(executable: &Path, variant: &Variant, workload: &Workload, live: usize, groups: &Groups) -> Result<Outcome> {
    let arguments: Vec<&str> = workload.arguments.iter().map(String::as_str).collect();
    let mut tries = 0;
    let found = smallest(PARTS, LARGEST * PARTS, |parts| {
        tries += 1;
        let limit = parts * live / PARTS;
        let survived = survives(executable, variant, &arguments, limit as u64, groups)?;
        let end = if survived { "survives" } else { "does not survive" };
        eprintln!("neap bench phases: {} {end} a limit of {parts}/{PARTS} of the live set", variant.name);
        Ok(survived)
    })?;
    let parts = found.with_context(|| format!("a limit of {LARGEST} times the live set is not enough"))?;
    let mut outcome = Outcome { operations: tries, ..Outcome::default() };
    outcome.counts.insert("limit".to_string(), parts as f64 / PARTS as f64);
    Ok(outcome)
}

/// Returns the smallest number above `low` and up to `high` that survives, by bisection. `None` if
/// `high` does not survive.
///
/// Every number above a surviving one must survive as well.
fn smallest(mut low: usize, mut high: usize, mut survives: impl FnMut(usize) -> Result<bool>) -> Result<Option<usize>> {
    if !survives(high)? {
        return Ok(None);
    }
    while low + 1 < high {
        let middle = low.midpoint(high);
        if survives(middle)? { high = middle } else { low = middle }
    }
    Ok(Some(high))
}

/// Whether the program gets to its end in a memory group with this limit in bytes.
fn survives(executable: &Path, variant: &Variant, arguments: &[&str], limit: u64, groups: &Groups) -> Result<bool> {
    let group = groups.make(limit)?;
    let mut command = work::command(executable, variant, arguments);
    // If malloc fails, the program ends with a message. This is an expected result here, so nothing
    // is printed.
    command.stderr(Stdio::null());
    group.enter(&mut command)?;
    let mut process = Process::start(command, PATIENCE)?;
    let ended = process.read(|_| true).and_then(|()| process.wait());
    Ok(ended.is_ok_and(|finished| finished.status.success()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::{session, variant};
    use crate::variant::AllocatorKind;

    #[test]
    fn bisection_finds_the_smallest_that_survives_in_few_tries() {
        for wanted in 21..=80 {
            let mut tries = 0;
            let found = smallest(20, 80, |number| {
                tries += 1;
                Ok(number >= wanted)
            });
            assert_eq!(found.unwrap(), Some(wanted));
            assert!(tries <= 7, "{tries} tries for {wanted}");
        }
        assert_eq!(smallest(20, 80, |_| Ok(false)).unwrap(), None);
        assert!(smallest(20, 80, |_| Err(anyhow::anyhow!("no group"))).is_err());
    }

    #[test]
    fn limit_figures_compare_with_the_best_peer() {
        let variants = [("neap", AllocatorKind::Neap), ("big", AllocatorKind::Peer), ("small", AllocatorKind::Peer)];
        let mut session = session(variants.map(|(name, kind)| variant(name, kind)).to_vec());
        let workload = Workload { metric: |outcome| outcome.count("limit"), ..Workload::timed(NAME, 1, &[]) };
        session.measure(&[workload], |variant, _, _| {
            let limit = [("neap", 1.5), ("big", 2.0), ("small", 1.25)].into_iter().find(|one| one.0 == variant.name);
            let mut outcome = Outcome::default();
            outcome.counts.insert("limit".to_string(), limit?.1);
            Some(Ok(outcome))
        });
        figures(&mut session);
        assert_eq!((session.figures["limit_ratio"], session.figures["limit_ratio_best_peer"]), (1.5, 1.2));
    }
}
