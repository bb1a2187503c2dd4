//! `neap bench wall`: a server with a cache serves requests while the limit of its container is cut
//! to a quarter.
//!
//! The limit falls from 1 GiB to 256 MiB, with `--full` from 4 GiB to 1 GiB in 100 runs. Version 1
//! of control groups refuses a limit below the usage. So an operator's loop writes the larger of
//! the target and a little above the usage, every 50 ms, until the target is in force or 10 s are
//! over. The server then goes on for a second, which counts as part of the cut.
//!
//! Variants: `neap-auto` has `limit:auto`, and a shrinker for its cache. `glibc-fixed` is the same
//! server on the C library's malloc, whose cache keeps its size. `glibc-poller` looks at usage and
//! limit every 100 ms. Above 95 % it evicts 5 % of the cache, and trims the heap.
//!
//! Figures, of `neap-auto` unless named otherwise:
//!
//! * `killed`, `runs`, and `baseline_killed`, of both baselines;
//! * `accepted`: runs in which the target was in force within 2 s;
//! * `seconds_to_comply`: longest time until the target was in force;
//! * `p999_ratio`: median over runs of the cut's 99.9th percentile of latencies over the steady
//!   state's; `p999_ratio_glibc_poller`: that of the poller;
//! * `over_reclaim_percent`: how far the cached bytes fell below the allowed ones, at the lowest,
//!   in percent of these; median over runs. Allowed is the target less the memory outside the
//!   cache.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::cgroup::{Cgroup, Groups};
use super::contained::{Contained, KILLED};
use super::{NOT_MEASURED, Options, Session, Workload};
use crate::report::{cell, table};
use crate::statistics::{Summary, summary};
use crate::work::Outcome;

const NEAP: &str = "neap-auto";
pub(super) const POLLER: &str = "glibc-poller";
/// Name, value of `NEAP`, policy of the workload.
const VARIANTS: [(&str, &str, &str); 3] =
    [(NEAP, "limit:auto", "shrinker"), ("glibc-fixed", "", "fixed"), (POLLER, "", "poller")];
pub(super) const CUT: &str = "cut";
/// Initial limit in MiB and number of rounds. The second constant is for `--full`.
const USUAL: (u64, usize) = (1024, 5);
const FULL: (u64, usize) = (4096, 100);
/// The limit before the cut, over the limit after it.
const QUARTER: u64 = 4;
/// The operator's limit stays above the usage by the first limit over this number.
const ABOVE: u64 = 128;
/// Hundredths of the limit that the cache may have before the cut.
const CACHE: u64 = 60;
const TICK: Duration = Duration::from_millis(50);
const PATIENCE: Duration = Duration::from_secs(10);
/// Seconds in which the target is to be in force.
const SOON: f64 = 2.0;
const SETTLE: Duration = Duration::from_secs(1);

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let groups = match Groups::find() {
        Ok(groups) => groups,
        Err(reason) => {
            eprintln!("neap bench wall: not measured: {reason:#}");
            return Ok(ExitCode::from(NOT_MEASURED));
        }
    };
    let (limit, rounds) = if options.full { FULL } else { USUAL };
    let limit = options.limit_mib(limit) << 20;
    let mut session = Session::of_parts("wall", &VARIANTS.map(|(name, ..)| name))?;
    for (variant, (_, value, _)) in session.found.variants.iter_mut().zip(VARIANTS) {
        variant.environment = vec![("NEAP", value)];
    }
    let cache = (limit / 100 * CACHE).to_string();
    let workload = Workload {
        unit: "s",
        metric: |outcome| outcome.count("seconds"),
        memory: limit as usize,
        ..Workload::timed(CUT, options.rounds(rounds), &["wall", "--cache", &cache])
    };
    let executable = session.executable.clone();
    session.measure(&[workload], |variant, workload, _| {
        let policy = VARIANTS.iter().find(|(name, ..)| *name == variant.name).map_or("", |(.., policy)| policy);
        let run = || {
            let group = groups.make(limit)?;
            let files = [group.usage_file(), group.limit_file()].map(|path| path.to_string_lossy().into_owned());
            let more = ["--policy", policy, "--usage-file", &files[0], "--limit-file", &files[1]];
            let arguments: Vec<&str> = workload.arguments.iter().map(String::as_str).chain(more).collect();
            let mut server = Contained::start(&executable, variant, &arguments, &group)?;
            server.wait_for_line()?;
            let target = limit / QUARTER;
            let seconds = cut(&group, limit, target)?;
            thread::sleep(SETTLE);
            let usage = group.usage()?;
            let mut outcome = server.end()?;
            add_cut(&mut outcome, target, usage, seconds);
            Ok(outcome)
        };
        Some(run())
    });
    figures(&mut session);
    let tables = tables(&session, limit);
    session.finish(options.json, &tables)
}

/// Returns the limit that the operator writes next: `above` bytes above the usage, but at least the
/// target.
fn next_limit(usage: u64, target: u64, above: u64) -> u64 {
    target.max(usage + above)
}

/// Cuts the limit from `from` to `target`. Returns the seconds until the target is in force. `None`
/// if it does not come into force in time, or no process is left.
pub(super) fn cut(group: &Cgroup, from: u64, target: u64) -> Result<Option<f64>> {
    let (start, above) = (Instant::now(), from / ABOVE);
    while start.elapsed() < PATIENCE && !group.is_empty() {
        let limit = next_limit(group.usage()?, target, above);
        // If the usage has grown meanwhile, the kernel refuses the limit.
        if group.set_limit(limit).is_ok() && limit == target {
            return Ok(Some(start.elapsed().as_secs_f64()));
        }
        thread::sleep(TICK);
    }
    Ok(None)
}

/// Adds two counts to the outcome of a surviving process: the `seconds` until the target was in
/// force, and `over_percent`, how far the cache fell below the allowed bytes. Adds none if the
/// target did not come into force.
fn add_cut(outcome: &mut Outcome, target: u64, usage: u64, seconds: Option<f64>) {
    if outcome.count(KILLED) > 0.0 {
        return;
    }
    let Some(seconds) = seconds else { return };
    let beside = usage as f64 - outcome.count("cached_bytes");
    let allowed = target as f64 - beside;
    let below = (allowed - outcome.count("lowest_bytes")).max(0.0);
    outcome.counts.insert("seconds".to_string(), seconds);
    outcome.counts.insert("over_percent".to_string(), 100.0 * below / allowed.max(1.0));
}

/// Whether the target came in force and the process lived on.
fn complied(outcome: &Outcome) -> bool {
    outcome.counts.contains_key("seconds")
}

fn killed(session: &Session, variant: &str) -> usize {
    session.outcomes(variant, CUT).iter().filter(|outcome| outcome.count(KILLED) > 0.0).count()
}

/// A reading over the runs of a variant that complied.
fn of_complied(session: &Session, variant: &str, reading: impl Fn(&Outcome) -> f64) -> Option<Summary> {
    summary(session.outcomes(variant, CUT).iter().filter(|outcome| complied(outcome)).map(reading))
}

fn ratio(outcome: &Outcome) -> f64 {
    outcome.count("cut_p999_us") / outcome.count("steady_p999_us").max(1.0)
}

fn figures(session: &mut Session) {
    let runs = session.outcomes(NEAP, CUT).len();
    let soon = session.outcomes(NEAP, CUT).iter().filter(|run| complied(run) && run.count("seconds") <= SOON).count();
    let baselines = VARIANTS.iter().filter(|(name, ..)| *name != NEAP);
    let baseline_killed = baselines.map(|(name, ..)| killed(session, name)).sum::<usize>();
    session.figure("runs", Some(runs as f64));
    session.figure("accepted", Some(soon as f64));
    session.figure("killed", Some(killed(session, NEAP) as f64));
    session.figure("baseline_killed", Some(baseline_killed as f64));
    let seconds = of_complied(session, NEAP, |outcome| outcome.count("seconds"));
    session.figure("seconds_to_comply", seconds.map(|seconds| seconds.max));
    for (name, variant) in [("p999_ratio", NEAP), ("p999_ratio_glibc_poller", POLLER)] {
        session.figure(name, of_complied(session, variant, ratio).map(|ratio| ratio.median));
    }
    let over = of_complied(session, NEAP, |outcome| outcome.count("over_percent"));
    session.figure("over_reclaim_percent", over.map(|over| over.median));
}

fn tables(session: &Session, limit: u64) -> String {
    let row = |(variant, ..): &(&str, &str, &str)| {
        let outcomes = session.outcomes(variant, CUT);
        let never = outcomes.iter().filter(|run| run.count(KILLED) == 0.0 && !complied(run)).count();
        let mut row = vec![(*variant).to_string()];
        row.extend([outcomes.len(), killed(session, variant), never].map(|count| count.to_string()));
        let mut add = |reading: fn(&Outcome) -> f64, decimals| {
            row.push(cell(of_complied(session, variant, reading), decimals));
        };
        add(|run| run.count("seconds"), 2);
        add(|run| run.count("steady_p999_us") / 1000.0, 2);
        add(|run| run.count("cut_p999_us") / 1000.0, 2);
        add(ratio, 2);
        add(|run| run.count("over_percent"), 1);
        row
    };
    let header = [
        "variant",
        "runs",
        "killed",
        "never complied",
        "seconds to comply",
        "p99.9 steady, ms",
        "p99.9 cut, ms",
        "cut / steady",
        "over-reclaim, %",
    ];
    let [from, to] = [limit, limit / QUARTER].map(|bytes| bytes >> 20);
    format!(
        "{}\nLimit: {from} MiB, cut to {to} MiB. Times, latencies and over-reclaim are of runs that complied and survived.\n",
        table(&header, &VARIANTS.each_ref().map(row))
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::{session, variant};
    use crate::variant::AllocatorKind;

    const MIB: u64 = 1 << 20;

    #[test]
    fn limit_stays_above_the_usage_and_ends_at_the_target() {
        assert_eq!(next_limit(600, 256, 8), 608);
        assert_eq!(next_limit(248, 256, 8), 256);
        assert_eq!(next_limit(10, 256, 8), 256);
    }

    /// neap complies in 0.5 s and more by round, with 30 MiB less than the target allows; the
    /// poller is killed once; the fixed cache never complies.
    fn measured() -> Session {
        let mut session = session(VARIANTS.map(|(name, ..)| variant(name, AllocatorKind::Neap)).to_vec());
        let workload = Workload { metric: |outcome| outcome.count("seconds"), ..Workload::timed(CUT, 3, &[]) };
        session.measure(&[workload], |variant, _, round| {
            let killed = variant.name == POLLER && round == 2;
            let mut outcome = Outcome { operations: 1, ..Outcome::default() };
            let counts = [
                (KILLED, f64::from(u8::from(killed))),
                ("steady_p999_us", 100.0),
                ("cut_p999_us", 200.0),
                ("cached_bytes", 200e6),
                ("lowest_bytes", 180e6),
            ];
            outcome.counts.extend(counts.map(|(name, count)| (name.to_string(), count)));
            let seconds = (variant.name != "glibc-fixed").then_some(0.5 + round as f64);
            add_cut(&mut outcome, 250_000_000, 240_000_000, seconds);
            Some(Ok(outcome))
        });
        session
    }

    #[test]
    fn figures_are_of_runs_that_complied() {
        let mut session = measured();
        figures(&mut session);
        let figure = |name: &str| session.figures[name];
        assert_eq!(
            [figure("runs"), figure("accepted"), figure("killed"), figure("baseline_killed")],
            [3.0, 2.0, 0.0, 1.0]
        );
        assert_eq!([figure("seconds_to_comply"), figure("p999_ratio")], [2.5, 2.0]);
        // There are 40 MB outside the cache, so 210 MB are allowed.
        assert!((figure("over_reclaim_percent") - 100.0 * 30.0 / 210.0).abs() < 0.01);
        let text = tables(&session, 1024 * MIB);
        assert!(text.contains("cut to 256 MiB"), "{text}");
        let row = |name: &str| text.lines().find(|line| line.contains(name)).unwrap().replace(' ', "");
        assert!(row("glibc-fixed").starts_with("|glibc-fixed|3|0|3|-|-|"), "{text}");
        assert!(row(POLLER).starts_with("|glibc-poller|3|1|0|1.00(0.5"), "{text}");
    }
}
