//! `neap bench burst`: growth at 0.25 to 4 GB/s towards the limit of a container, beside a cache
//! that can be reclaimed.
//!
//! Each run is a process in a memory group of the kernel with a limit, 512 MiB by default. Half of
//! the limit is a cache behind a shrinker. `within`: the process grows by three quarters of the
//! limit, which fits if the cache shrinks. `beyond`: it grows by one and a half limits, which never
//! fits. Variants: `limit:auto`, that with `refuse:on`, neap without a limit, and the C library's
//! malloc, whose cache does not shrink.
//!
//! A second table names the sensor that has saved a run that survived. `allocations`: the heap came
//! to its limit, and an allocation there has requested a look. `clock`: neap's clock alone has
//! looked, and the heap stayed below its limit. `watermarks`: background reclaim has kept the heap
//! below its limit without a look.
//!
//! Figures:
//!
//! * `killed`: killed runs of both variants with `limit:auto` in `within`, and of the variant with
//!   `refuse:on` in `beyond`;
//! * `highest_survived_gbps`: the highest rate in `within` at which both variants survived every
//!   run, as at all lower rates. A rate that the machine does not reach counts as the rate reached.

use std::process::ExitCode;

use anyhow::Result;

use super::cgroup::Groups;
use super::contained::{Contained, KILLED};
use super::{NOT_MEASURED, Options, Session, Workload};
use crate::report::{number, table};
use crate::statistics::summary;
use crate::work::Outcome;

const AUTO: &str = "neap-auto";
const REFUSE: &str = "neap-auto-refuse";
const GLIBC: &str = "glibc";
/// Name, value of `NEAP`.
const VARIANTS: [(&str, &str); 4] =
    [(AUTO, "limit:auto"), (REFUSE, "limit:auto,refuse:on"), ("neap", "limit:none"), (GLIBC, "")];
/// GB/s.
const RATES: [f64; 5] = [0.25, 0.5, 1.0, 2.0, 4.0];
/// MiB.
const LIMIT: u64 = 512;
/// Name, growth in quarters of the limit.
const GROWTHS: [(&str, u64); 2] = [("within", 3), ("beyond", 6)];
/// A rate below this part of the wanted one was not reached.
const REACHED: f64 = 0.95;

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let groups = match Groups::find() {
        Ok(groups) => groups,
        Err(reason) => {
            eprintln!("neap bench burst: not measured: {reason:#}");
            return Ok(ExitCode::from(NOT_MEASURED));
        }
    };
    let limit = options.limit_mib(LIMIT) << 20;
    let mut session = Session::of_parts("burst", &VARIANTS.map(|(name, _)| name))?;
    for (variant, (_, value)) in session.found.variants.iter_mut().zip(VARIANTS) {
        variant.environment = vec![("NEAP", value)];
    }
    let rounds = options.rounds(3);
    let workloads = GROWTHS.map(|(growth, quarters)| RATES.map(|rate| workload(growth, quarters, rate, limit, rounds)));
    let executable = session.executable.clone();
    session.measure(workloads.as_flattened(), |variant, workload, _| {
        let heap = if variant.name == GLIBC { "system" } else { "neap" };
        let arguments = workload.arguments.iter().map(String::as_str).chain(["--heap", heap]);
        let arguments: Vec<&str> = arguments.collect();
        let run = || {
            let group = groups.make(limit)?;
            let mut outcome = Contained::start(&executable, variant, &arguments, &group)?.end()?;
            let peak = group.peak()?;
            outcome.counts.insert("left_mib".to_string(), limit.saturating_sub(peak) as f64 / f64::from(1 << 20));
            Ok(outcome)
        };
        Some(run())
    });
    figures(&mut session);
    let tables = tables(&session, limit);
    session.finish(options.json, &tables)
}

fn name(growth: &str, rate: f64) -> String {
    format!("{growth}, {rate} GB/s")
}

fn workload(growth: &str, quarters: u64, rate: f64, limit: u64, rounds: usize) -> Workload {
    let [cache, bytes, speed] = [(limit / 2).to_string(), (limit / 4 * quarters).to_string(), rate.to_string()];
    Workload {
        unit: "MiB",
        metric: |outcome| outcome.count("left_mib"),
        memory: limit as usize,
        ..Workload::timed(
            &name(growth, rate),
            rounds,
            &["burst", "--cache", &cache, "--growth", &bytes, "--rate", &speed],
        )
    }
}

fn killed(outcomes: &[Outcome]) -> usize {
    outcomes.iter().filter(|outcome| outcome.count(KILLED) > 0.0).count()
}

fn refused(outcomes: &[Outcome]) -> usize {
    outcomes.iter().filter(|outcome| outcome.count("refused") > 0.0).count()
}

/// Median rate of the runs that were not killed.
fn reached(outcomes: &[Outcome]) -> Option<f64> {
    let survivors = outcomes.iter().filter(|outcome| outcome.count(KILLED) == 0.0);
    Some(summary(survivors.map(|outcome| outcome.count("gbps")))?.median)
}

fn figures(session: &mut Session) {
    let [(within, _), (beyond, _)] = GROWTHS;
    let of = |variant: &str, growth: &str, rate: f64| session.outcomes(variant, &name(growth, rate));
    let deaths = RATES.map(|rate| {
        killed(of(AUTO, within, rate)) + killed(of(REFUSE, within, rate)) + killed(of(REFUSE, beyond, rate))
    });
    let survived = RATES.iter().take_while(|&&rate| {
        let runs = [AUTO, REFUSE].map(|variant| of(variant, within, rate));
        runs.iter().all(|runs| !runs.is_empty() && killed(runs) + refused(runs) == 0)
    });
    let highest = survived.last().map(|&rate| {
        let reached = [AUTO, REFUSE].iter().filter_map(|variant| reached(of(variant, within, rate)));
        reached.fold(rate, f64::min)
    });
    session.figure("killed", Some(deaths.iter().sum::<usize>() as f64));
    session.figure("highest_survived_gbps", Some(highest.unwrap_or(0.0)));
}

/// Describes the ends of runs, the least memory that was left below the limit, and the rate if it
/// is lower than `wanted`.
fn ends(outcomes: &[Outcome], wanted: f64) -> String {
    let (killed, refused) = (killed(outcomes), refused(outcomes));
    let survived = outcomes.len() - killed - refused;
    let ends = [(survived, "survived"), (refused, "refused"), (killed, "killed")];
    let ends = ends.iter().filter(|(count, _)| *count > 0);
    let mut text: Vec<String> = ends.map(|(count, end)| format!("{count} {end}")).collect();
    let left = summary(outcomes.iter().map(|outcome| outcome.count("left_mib")));
    text.extend(left.filter(|_| killed == 0).map(|left| format!("{} left", number(left.min, 0))));
    let slower = reached(outcomes).filter(|rate| *rate < wanted * REACHED);
    text.extend(slower.map(|rate| format!("at {}", number(rate, 2))));
    if text.is_empty() { "-".to_string() } else { text.join(", ") }
}

/// Counts, by sensor, the survivors of a variant whose limit follows the container. Behind that
/// stand the looks for allocations, those of the clock, and how often the heap went beyond its
/// limit: each the median over the survivors.
fn sensors(outcomes: &[Outcome]) -> String {
    let has_looks = |outcome: &&Outcome| outcome.counts.contains_key("looks_for_allocations");
    let has_survived = |outcome: &&Outcome| outcome.count(KILLED) + outcome.count("refused") == 0.0;
    let survivors = || outcomes.iter().filter(has_looks).filter(has_survived);
    let sensor = |outcome: &Outcome| match ["looks_for_allocations", "looks_by_clock"].map(|name| outcome.count(name)) {
        [asked, _] if asked > 0.0 => "allocations",
        [_, by_clock] if by_clock > 0.0 => "clock",
        _ => "watermarks",
    };
    let saved_by = |name| (survivors().filter(|outcome| sensor(outcome) == name).count(), name);
    let sensors = ["allocations", "clock", "watermarks"].map(saved_by);
    let sensors = sensors.iter().filter(|(count, _)| *count > 0);
    let sensors: Vec<String> = sensors.map(|(count, sensor)| format!("{count} {sensor}")).collect();
    let median = |name: &str| summary(survivors().map(|outcome| outcome.count(name))).map(|counts| counts.median);
    let [Some(asked), Some(by_clock), Some(passed)] = ["looks_for_allocations", "looks_by_clock", "passed"].map(median)
    else {
        return "-".to_string();
    };
    format!("{}: {} + {}, {}", sensors.join(", "), number(asked, 0), number(by_clock, 0), number(passed, 0))
}

fn tables(session: &Session, limit: u64) -> String {
    let mut text = String::new();
    for (growth, quarters) in GROWTHS {
        let percent = quarters * 25;
        let first = format!("{growth}: growth by {percent} % of the limit");
        let rates = RATES.map(|rate| format!("{rate} GB/s"));
        let header: Vec<&str> = [first.as_str()].into_iter().chain(rates.iter().map(String::as_str)).collect();
        let row = |(variant, _): &(&str, &str)| {
            let cells = RATES.map(|rate| ends(session.outcomes(variant, &name(growth, rate)), rate));
            [(*variant).to_string()].into_iter().chain(cells).collect()
        };
        text += &format!("{}\n", table(&header, &VARIANTS.each_ref().map(row)));
    }
    let (within, _) = GROWTHS[0];
    let rates = RATES.map(|rate| format!("{rate} GB/s"));
    let first = format!("{within}: saved by");
    let header: Vec<&str> = [first.as_str()].into_iter().chain(rates.iter().map(String::as_str)).collect();
    let row = |variant: &str| {
        let cells = RATES.map(|rate| sensors(session.outcomes(variant, &name(within, rate))));
        [variant.to_string()].into_iter().chain(cells).collect()
    };
    text += &format!("{}\n", table(&header, &[AUTO, REFUSE].map(row)));
    text + &format!(
        "Limit: {} MiB, half of it a cache. `left`: least MiB below the limit in any run. `at`: the rate reached, GB/s, \
         if lower.\n`saved by`: survivors by sensor; then median numbers of looks for allocations + of the clock, and of growth \
         beyond the limit.\nneap and glibc have no limit of their own: the kernel may kill them. So it may neap-auto in `beyond`.\n",
        limit >> 20
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::{session, variant};
    use crate::variant::AllocatorKind;

    /// `neap-auto` is killed from `deadly` GB/s on; 4 GB/s are not reached.
    fn measured(deadly: f64) -> Session {
        let mut session = session(VARIANTS.map(|(name, _)| variant(name, AllocatorKind::Neap)).to_vec());
        let workloads =
            GROWTHS.map(|(growth, quarters)| RATES.map(|rate| workload(growth, quarters, rate, 1 << 20, 2)));
        session.measure(workloads.as_flattened(), |variant, workload, round| {
            let rate: f64 = workload.arguments.last()?.parse().ok()?;
            let within = workload.name.starts_with("within");
            let killed = match variant.name {
                AUTO => !within || round == 1 && rate >= deadly,
                REFUSE => false,
                _ => true,
            };
            let refused = !within && variant.name == REFUSE;
            let mut outcome = Outcome { operations: 1, ..Outcome::default() };
            let counts = [
                (KILLED, f64::from(u8::from(killed))),
                ("refused", f64::from(u8::from(refused))),
                ("left_mib", 51.2 + round as f64),
                ("looks_for_allocations", if rate < 0.5 { 0.0 } else { 6.0 + 2.0 * round as f64 }),
                ("looks_by_clock", if rate < 0.5 && round == 1 { 0.0 } else { 4.0 }),
                ("passed", 1.0),
                ("gbps", rate.min(3.0)),
            ];
            outcome.counts.extend(counts.map(|(name, count)| (name.to_string(), count)));
            Some(Ok(outcome))
        });
        session
    }

    #[test]
    fn figures_count_deaths_and_name_the_highest_rate_without_one() {
        for (deadly, deaths, highest) in [(9.0, 0.0, 3.0), (4.0, 1.0, 2.0), (1.0, 3.0, 0.5), (0.1, 5.0, 0.0)] {
            let mut session = measured(deadly);
            figures(&mut session);
            assert_eq!((session.figures["killed"], session.figures["highest_survived_gbps"]), (deaths, highest));
        }
    }

    #[test]
    fn cells_have_ends_margins_and_rates_that_were_not_reached() {
        let session = measured(4.0);
        let cell = |variant, growth, rate| ends(session.outcomes(variant, &name(growth, rate)), rate);
        assert_eq!(cell(AUTO, "within", 1.0), "2 survived, 51 left");
        assert_eq!(cell(AUTO, "within", 4.0), "1 survived, 1 killed, at 3.00");
        assert_eq!(cell(REFUSE, "beyond", 2.0), "2 refused, 51 left");
        assert_eq!(cell(GLIBC, "within", 2.0), "2 killed");
        assert_eq!(ends(&[], 1.0), "-");
        let saved = |variant, rate| sensors(session.outcomes(variant, &name("within", rate)));
        assert_eq!(saved(AUTO, 0.25), "1 clock, 1 watermarks: 0 + 2, 1");
        assert_eq!(saved(REFUSE, 1.0), "2 allocations: 7 + 4, 1");
        assert_eq!(sensors(&[Outcome::default()]), "-", "it publishes no numbers");
        assert_eq!(saved(AUTO, 4.0), "1 allocations: 6 + 4, 1");
        assert_eq!(sensors(&[]), "-");
        assert!(tables(&session, 1 << 29).contains("within: saved by"));
        assert!(tables(&session, 1 << 29).contains("Limit: 512 MiB"));
    }
}
