//! `neap bench metadata`: a cache of file metadata at a memory limit, by ways to shrink it.
//!
//! The cache holds results of `stat` and contents of small files of a directory, /usr by default. A
//! miss makes the system calls. Eight tenants with three workers each look values up as a build
//! does; `work/metadata` has the pattern. The limit is half of the looked-up bytes. Each run is a
//! process of its own, and makes a fixed number of look-ups. All files are in the page cache.
//!
//! * `global`: one memory group, one LRU list;
//! * `node`: one group, a list for each node;
//! * `group`: a group for each tenant, with a list for each node, and `low` at its part of the
//!   limit;
//! * `refuse`: one group without a shrinker. A value whose charge is refused is not cached.
//!
//! `build`: all tenants compile. `flood`: tenant 0 instead walks through all files, without reuse,
//! until the others are done. Tenants 1 to 7 are the innocent ones in both.
//!
//! Figures, medians over interleaved pairs of rounds:
//!
//! * `elapsed_ratio`, `cpu_ratio`: `group` over `global` in `build`; `…_low` and `…_high` are the
//!   ends of the 95 % interval, from six pairs on;
//! * `hit_drop_points`: fall of the innocent tenants' mean hit rate by the flood, in points, under
//!   `group`; `hit_drop_points_worst`: that of the innocent tenant with the lowest rate;
//! * `hit_drop_points_global`, `hit_drop_points_worst_global`: likewise under `global`.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};

use super::{Options, Reading, Session, Workload};
use crate::report::{Ratio, cell, number, table};
use crate::statistics::{median_interval, paired_ratios, summary};
use crate::work::metadata::prepare;
use crate::work::{self, Outcome};

const GLOBAL: &str = "global";
const GROUP: &str = "group";
const VARIANTS: [(&str, &str); 4] = [
    (GLOBAL, "one global list"),
    ("node", "one list per node"),
    (GROUP, "one per group and node"),
    ("refuse", "refusing"),
];
const BUILD: &str = "build";
const FLOOD: &str = "flood";
/// Units that each worker compiles.
const UNITS: u64 = 1000;
const DIRECTORY: &str = "/usr";

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let directory = options.directory.as_deref().unwrap_or(Path::new(DIRECTORY));
    prepare(directory)?;
    let path = directory.to_str().context("the directory's path is not UTF-8; name another one with --directory")?;
    let mut session = Session::of_parts("metadata", &VARIANTS.map(|(name, _)| name))?;
    let (rounds, units) = (options.rounds(20), options.amount(UNITS).to_string());
    let workload = |name: &str, more: &[&str]| Workload {
        unit: "s",
        metric: Outcome::wall_seconds,
        ..Workload::timed(name, rounds, &[&["metadata", "--directory", path, "--units", &units], more].concat())
    };
    let executable = session.executable.clone();
    session.measure(&[workload(BUILD, &[]), workload(FLOOD, &["--flood"])], |variant, workload, _| {
        let mut arguments: Vec<&str> = workload.arguments.iter().map(String::as_str).collect();
        arguments.extend(["--variant", variant.name]);
        Some(work::measure(&executable, variant, &arguments))
    });
    figures(&mut session);
    let tables = tables(&session);
    let failed = !session.failed.is_empty();
    let answer = session.finish(options.json, &tables)?;
    Ok(if failed { ExitCode::FAILURE } else { answer })
}

fn cpu_seconds(outcome: &Outcome) -> f64 {
    outcome.cpu_ns as f64 / 1e9
}

fn mean_rate(outcome: &Outcome) -> f64 {
    outcome.count("hit_rate_innocent")
}

fn worst_rate(outcome: &Outcome) -> f64 {
    outcome.count("hit_rate_innocent_worst")
}

/// A ratio of `group` to `global` in `build`, with its 95 % interval.
fn ratio(session: &Session, reading: Reading) -> Option<(Ratio, Option<(f64, f64)>)> {
    let ratio = session.ratio_of(GROUP, GLOBAL, BUILD, Some(reading))?;
    let measured = |variant| session.measured(variant, BUILD, Some(reading));
    Some((ratio, median_interval(paired_ratios(&measured(GROUP), &measured(GLOBAL)))))
}

/// Median fall of a hit rate by the flood, over rounds.
fn drop_points(session: &Session, variant: &str, rate: Reading) -> Option<f64> {
    let [quiet, flooded] = [BUILD, FLOOD].map(|workload| session.measured(variant, workload, Some(rate)));
    let fall = |&(round, rate): &(usize, f64)| {
        let (_, flooded) = flooded.iter().find(|(other, _)| *other == round)?;
        Some(rate - flooded)
    };
    Some(summary(quiet.iter().filter_map(fall))?.median)
}

fn figures(session: &mut Session) {
    for (name, reading) in [("elapsed_ratio", Outcome::wall_seconds as Reading), ("cpu_ratio", cpu_seconds)] {
        let Some((ratio, interval)) = ratio(session, reading) else { continue };
        session.figure_of_ratio(name, Some(ratio));
        session.figure(&format!("{name}_low"), interval.map(|(low, _)| low));
        session.figure(&format!("{name}_high"), interval.map(|(_, high)| high));
    }
    for (variant, suffix) in [(GROUP, ""), (GLOBAL, "_global")] {
        for (name, rate) in [("hit_drop_points", mean_rate as Reading), ("hit_drop_points_worst", worst_rate)] {
            session.figure(&format!("{name}{suffix}"), drop_points(session, variant, rate));
        }
    }
}

/// Columns of the tables: heading, reading, decimals.
const COLUMNS: [(&str, Reading, usize); 11] = [
    ("elapsed s", Outcome::wall_seconds, 2),
    ("user s", |outcome| outcome.count("user_s"), 2),
    ("system s", |outcome| outcome.count("system_s"), 2),
    ("hit %, all", |outcome| outcome.count("hit_rate"), 2),
    ("tenant 0", |outcome| outcome.count("hit_rate_flooding"), 2),
    ("innocent, mean", mean_rate, 2),
    ("worst", worst_rate, 2),
    ("context switches", |outcome| (outcome.voluntary_switches + outcome.involuntary_switches) as f64, 0),
    ("sleeps", |outcome| outcome.voluntary_switches as f64, 0),
    ("evictions", |outcome| outcome.count("evictions"), 0),
    ("refused", |outcome| outcome.count("refused"), 0),
];

fn tables(session: &Session) -> String {
    let mut text = String::new();
    for workload in [BUILD, FLOOD] {
        let header: Vec<&str> = [workload].into_iter().chain(COLUMNS.map(|(heading, ..)| heading)).collect();
        let row = |(variant, label): &(&str, &str)| {
            let cells = COLUMNS.map(|(_, reading, decimals)| {
                let median = session.summary_of(variant, workload, reading).map(|summary| summary.median);
                median.map_or("-".to_string(), |median| number(median, decimals))
            });
            [label.to_string()].into_iter().chain(cells).collect()
        };
        text += &format!("{}\n", table(&header, &VARIANTS.each_ref().map(row)));
    }
    for (name, reading) in [("elapsed", Outcome::wall_seconds as Reading), ("CPU time", cpu_seconds)] {
        let Some((ratio, Some((low, high)))) = ratio(session, reading) else { continue };
        let (median, pairs) = (ratio.summary.median, ratio.pairs);
        text +=
            &format!("{name}, {GROUP} / {GLOBAL}: {median:.3}, 95 % interval {low:.3} to {high:.3}, {pairs} pairs\n");
    }
    let of = |name: &'static str, decimals: usize| {
        let values = session.outcomes(GLOBAL, BUILD).iter().map(move |outcome| outcome.count(name));
        cell(summary(values), decimals)
    };
    let (limit, set, files) = (of("limit_mib", 1), of("working_set_mib", 1), of("files", 0));
    text + &format!("Limit: {limit} MiB. Looked-up bytes of all units: {set} MiB. Files: {files}.\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::{session, variant};
    use crate::variant::AllocatorKind;

    /// `group` takes 1 % longer than `global`. The flood costs `group` 0.2 points of 90 %, and
    /// `global` 5.
    fn measured(rounds: usize) -> Session {
        let mut session = session(VARIANTS.map(|(name, _)| variant(name, AllocatorKind::Neap)).to_vec());
        let workloads =
            [BUILD, FLOOD].map(|name| Workload { metric: Outcome::wall_seconds, ..Workload::timed(name, rounds, &[]) });
        session.measure(&workloads, |variant, workload, round| {
            let slower = if variant.name == GROUP { 1.01 } else { 1.0 };
            let time = (2e9 + 1e8 * round as f64) * slower;
            let fall = if variant.name == GROUP { 0.2 } else { 5.0 };
            let rate = 90.0 - if workload.name == FLOOD { fall } else { 0.0 };
            let mut outcome = Outcome {
                operations: 1000,
                wall_ns: time as u64,
                cpu_ns: (2.0 * time * slower) as u64,
                ..Outcome::default()
            };
            let counts = [("hit_rate_innocent", rate), ("hit_rate_innocent_worst", rate - 1.0)];
            outcome.counts.extend(counts.map(|(name, count)| (name.to_string(), count)));
            Some(Ok(outcome))
        });
        session
    }

    #[test]
    fn figures_are_ratios_of_pairs_and_falls_of_rates() {
        let mut session = measured(6);
        figures(&mut session);
        let figure = |name: &str| session.figures[name];
        for name in ["elapsed_ratio", "elapsed_ratio_low", "elapsed_ratio_high"] {
            assert_eq!(figure(name), 1.01, "{name}");
        }
        assert_eq!(figure("cpu_ratio"), crate::report::rounded(1.01 * 1.01));
        assert_eq!((figure("hit_drop_points"), figure("hit_drop_points_worst")), (0.2, 0.2));
        assert_eq!((figure("hit_drop_points_global"), figure("hit_drop_points_worst_global")), (5.0, 5.0));
        let text = tables(&session);
        assert!(text.contains("elapsed, group / global: 1.010, 95 % interval 1.010 to 1.010, 6 pairs"), "{text}");
    }

    #[test]
    fn few_pairs_have_no_interval() {
        let mut session = measured(5);
        figures(&mut session);
        assert!(session.figures.contains_key("cpu_ratio") && !session.figures.contains_key("cpu_ratio_low"));
    }
}
