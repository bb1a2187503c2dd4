//! `neap bench workers`: four servers with caches of different sizes in one container, whose limit
//! is halved while they serve.
//!
//! The servers are those of `wall`. Their caches have 40, 30, 20 and 10 % of four fifths of the
//! limit. The operator of `wall` cuts it from 1 GiB to 512 MiB. Each process knows only itself and
//! the container. After a second at the target the caches are counted.
//!
//! Variants: `neap-auto` has `limit:auto`, and shrinkers for its caches. In `glibc-poller` each
//! process runs the poller of `wall`.
//!
//! Figures, of `neap-auto` unless named otherwise:
//!
//! * `killed`: killed processes; `runs`; `baseline_killed`: killed processes of the poller;
//! * `accepted`: runs in which the target was in force within 2 s;
//! * `seconds_to_comply`: longest time until the target was in force;
//! * `share_off_percent`: deviation of a cache's share of all cached bytes from its share of their
//!   sizes, in percent of the latter; the largest of all caches and runs.
//!   `share_off_median_percent`: the largest of a run's caches, median over runs.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::Result;

use super::cgroup::Groups;
use super::contained::{Contained, KILLED};
use super::wall::{self, CUT, POLLER};
use super::{NOT_MEASURED, Options, Session, Workload};
use crate::report::{cell, table};
use crate::statistics::{Summary, summary};
use crate::variant::Variant;
use crate::work::Outcome;

const NEAP: &str = "neap-auto";
/// Name, value of `NEAP`, policy of the workload.
const VARIANTS: [(&str, &str, &str); 2] = [(NEAP, "limit:auto", "shrinker"), (POLLER, "", "poller")];
/// MiB.
const LIMIT: u64 = 1024;
const ROUNDS: usize = 5;
/// Part of each cache in the size of all caches, in tenths.
const PARTS: [u64; 4] = [4, 3, 2, 1];
const TENTHS: u64 = 10;
/// Hundredths of the limit that all caches may have before the cut.
const CACHES: u64 = 80;
/// Requests a second of each of a server's threads.
const RATE: &str = "250";
/// Seconds in which the target is to be in force.
const SOON: f64 = 2.0;
/// Time at the target before the caches are counted.
const SETTLE: Duration = Duration::from_secs(1);
const OFF: &str = "share_off_percent";

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let groups = match Groups::find() {
        Ok(groups) => groups,
        Err(reason) => {
            eprintln!("neap bench workers: not measured: {reason:#}");
            return Ok(ExitCode::from(NOT_MEASURED));
        }
    };
    let limit = options.limit_mib(LIMIT) << 20;
    let mut session = Session::of_parts("workers", &VARIANTS.map(|(name, ..)| name))?;
    for (variant, (_, value, _)) in session.found.variants.iter_mut().zip(VARIANTS) {
        variant.environment = vec![("NEAP", value)];
    }
    let workload = Workload {
        unit: "s",
        metric: |outcome| outcome.count("seconds"),
        memory: limit as usize,
        ..Workload::timed(CUT, options.rounds(ROUNDS), &[])
    };
    let executable = session.executable.clone();
    session.measure(&[workload], |variant, _, _| Some(run(&executable, variant, &groups, limit)));
    figures(&mut session);
    let tables = tables(&session, limit);
    session.finish(options.json, &tables)
}

/// Sizes of the caches in bytes.
fn sizes(limit: u64) -> [u64; 4] {
    PARTS.map(|part| limit / 100 * CACHES / TENTHS * part)
}

/// Runs four servers on a variant, and halves their limit.
fn run(executable: &Path, variant: &Variant, groups: &Groups, limit: u64) -> Result<Outcome> {
    let policy = VARIANTS.iter().find(|(name, ..)| *name == variant.name).map_or("", |(.., policy)| policy);
    let group = groups.make(limit)?;
    let files = [group.usage_file(), group.limit_file()].map(|path| path.to_string_lossy().into_owned());
    let start = |size: u64| {
        let size = size.to_string();
        let [usage, limit] = &files;
        let arguments = ["wall", "--cache", &size, "--rate", RATE, "--policy", policy];
        let files = ["--usage-file", usage, "--limit-file", limit];
        Contained::start(executable, variant, &[arguments.as_slice(), &files].concat(), &group)
    };
    let mut servers = sizes(limit).into_iter().map(start).collect::<Result<Vec<_>>>()?;
    servers.iter_mut().try_for_each(Contained::wait_for_line)?;
    let seconds = wall::cut(&group, limit, limit / 2)?;
    thread::sleep(SETTLE);
    let outcomes = servers.into_iter().map(Contained::end).collect::<Result<Vec<_>>>()?;
    Ok(of_run(&outcomes, seconds))
}

/// The outcome of a run from those of its servers.
fn of_run(servers: &[Outcome], seconds: Option<f64>) -> Outcome {
    let sum = |name: &str| servers.iter().map(|server| server.count(name)).sum::<f64>();
    let mut counts = BTreeMap::from([(KILLED.to_string(), sum(KILLED)), ("refused".to_string(), sum("refused"))]);
    if sum(KILLED) == 0.0 {
        counts.extend(seconds.map(|seconds| ("seconds".to_string(), seconds)));
        let cached = servers.iter().map(|server| server.count("cached_bytes"));
        counts.insert(OFF.to_string(), share_off_percent(cached));
        for (server, part) in servers.iter().zip(PARTS) {
            counts.insert(format!("cached_mib_{part}"), server.count("cached_bytes") / f64::from(1 << 20));
        }
    }
    let operations = servers.iter().map(|server| server.operations).sum();
    Outcome { operations, counts, ..Outcome::default() }
}

/// The largest deviation of a cache's share from its share of the sizes, in percent of the latter.
fn share_off_percent(cached: impl Iterator<Item = f64> + Clone) -> f64 {
    let all = cached.clone().sum::<f64>().max(1.0);
    let off = cached.zip(PARTS).map(|(cached, part)| {
        let fair = part as f64 / TENTHS as f64;
        (cached / all / fair - 1.0).abs() * 100.0
    });
    off.fold(0.0, f64::max)
}

fn killed(session: &Session, variant: &str) -> f64 {
    session.outcomes(variant, CUT).iter().map(|outcome| outcome.count(KILLED)).sum()
}

/// A count over the runs of a variant that have it.
fn of(session: &Session, variant: &str, count: &str) -> Option<Summary> {
    summary(session.outcomes(variant, CUT).iter().filter_map(|outcome| outcome.counts.get(count).copied()))
}

fn figures(session: &mut Session) {
    let runs = session.outcomes(NEAP, CUT);
    let soon = |run: &&Outcome| run.counts.get("seconds").is_some_and(|&seconds| seconds <= SOON);
    let (accepted, runs) = (runs.iter().filter(soon).count(), runs.len());
    session.figure("runs", Some(runs as f64));
    session.figure("accepted", Some(accepted as f64));
    session.figure("killed", Some(killed(session, NEAP)));
    session.figure("baseline_killed", Some(killed(session, POLLER)));
    session.figure("seconds_to_comply", of(session, NEAP, "seconds").map(|seconds| seconds.max));
    let off = of(session, NEAP, OFF);
    session.figure(OFF, off.map(|off| off.max));
    session.figure("share_off_median_percent", off.map(|off| off.median));
}

fn tables(session: &Session, limit: u64) -> String {
    let row = |(variant, ..): &(&str, &str, &str)| {
        let outcomes = session.outcomes(variant, CUT);
        let never = outcomes.iter().filter(|run| run.count(KILLED) == 0.0 && !run.counts.contains_key("seconds"));
        let mut row = vec![(*variant).to_string(), outcomes.len().to_string(), killed(session, variant).to_string()];
        row.push(never.count().to_string());
        row.push(cell(of(session, variant, "seconds"), 2));
        row.extend(PARTS.map(|part| cell(of(session, variant, &format!("cached_mib_{part}")), 0)));
        row.push(cell(of(session, variant, OFF), 1));
        row
    };
    let sizes = sizes(limit).map(|size| format!("of {}", size >> 20));
    let head = ["variant", "runs", "killed", "never complied", "seconds to comply"];
    let header: Vec<&str> = head.into_iter().chain(sizes.iter().map(String::as_str)).chain(["share off, %"]).collect();
    let [from, to] = [limit, limit / 2].map(|bytes| bytes >> 20);
    format!(
        "{}\nLimit: {from} MiB, cut to {to} MiB. `of N`: MiB cached after the cut by the server whose cache had N MiB. `killed`: processes.\n",
        table(&header, &VARIANTS.each_ref().map(row))
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::{session, variant};
    use crate::variant::AllocatorKind;

    fn server(cached: f64, killed: bool) -> Outcome {
        let counts = [(KILLED, f64::from(u8::from(killed))), ("cached_bytes", cached)];
        let counts = counts.map(|(name, count)| (name.to_string(), count)).into();
        Outcome { operations: 10, counts, ..Outcome::default() }
    }

    #[test]
    fn shares_are_compared_with_those_of_the_sizes() {
        let off = |cached: [f64; 4]| share_off_percent(cached.into_iter());
        assert_eq!(off([400.0, 300.0, 200.0, 100.0]), 0.0);
        assert!((off([390.0, 300.0, 200.0, 110.0]) - 10.0).abs() < 1e-9);
        assert!((off([300.0, 300.0, 200.0, 100.0]) - 100.0 / 6.0).abs() < 1e-9);
        assert_eq!(off([0.0; 4]), 100.0);
        assert_eq!(sizes(1000), [320, 240, 160, 80]);
    }

    #[test]
    fn a_killed_server_is_counted_and_its_run_has_no_time() {
        let mut session = session(VARIANTS.map(|(name, ..)| variant(name, AllocatorKind::Neap)).to_vec());
        let workload = Workload { metric: |outcome| outcome.count("seconds"), ..Workload::timed(CUT, 3, &[]) };
        session.measure(&[workload], |variant, _, round| {
            let killed = variant.name == POLLER && round == 1;
            let cached = [390.0, 300.0, 200.0, 110.0].map(|cached| server(cached * 1e6, killed));
            Some(Ok(of_run(&cached, (round != 2).then_some(1.5 + round as f64))))
        });
        figures(&mut session);
        let figure = |name: &str| session.figures[name];
        assert_eq!([figure("runs"), figure("accepted"), figure("killed")], [3.0, 1.0, 0.0]);
        assert_eq!([figure("baseline_killed"), figure("seconds_to_comply")], [4.0, 2.5]);
        assert!((figure(OFF) - 10.0).abs() < 0.01);
        let text = tables(&session, 1 << 30);
        let row = |name: &str| text.lines().find(|line| line.contains(name)).unwrap().replace(' ', "");
        assert!(row(NEAP).starts_with("|neap-auto|3|0|1|2.00(1.50"), "{text}");
        assert!(row(POLLER).starts_with("|glibc-poller|3|4|1|1.50"), "{text}");
    }
}
