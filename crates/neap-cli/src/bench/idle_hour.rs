//! `neap bench idle-hour`: ten seconds of load, then ten idle minutes with a live set.
//!
//! Loads run one after the other. All loaded processes are then idle at the same time, so a round
//! takes little longer than one process. Each process has its own memory group of the kernel, if
//! such a group can be made; otherwise its usage is not read. Resident memory is that of the whole
//! process. Live bytes are those of its blocks and of the tables with their addresses.
//!
//! The load replaces a tenth of the live set. A second workload, run with neap alone, replaces the
//! whole set ten times. Its live blocks then lie between freed ones.
//!
//! `neap-auto` has `limit:auto`, so it looks at the container once a second. All others have their
//! usual settings.
//!
//! Figures, of `neap`:
//!
//! * `rss_ratio_10s`, `usage_ratio_10s`: resident memory, and usage of the group, ten seconds after
//!   the load, over the live bytes; the largest of the rounds;
//! * `pages_ratio`: all pages with a live byte over the live bytes. An allocator that moves no
//!   blocks cannot go below this ratio. The largest of the rounds;
//! * `idle_cpu_percent`: processor time from the end of the load on, as a part of one CPU; the
//!   largest of the rounds. `idle_cpu_percent_auto`: that of `neap-auto`;
//! * `rss_ratio_10s_replaced`, `pages_ratio_replaced`: the ratios of the second workload.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::cgroup::{Cgroup, Groups};
use super::contained::{Contained, KILLED};
use super::{Options, Session, Workload, warm};
use crate::process::{rss_kib, threads_cpu_ns};
use crate::report::{cell, table};
use crate::statistics::{Summary, summary};
use crate::variant::{Choice, Variant};
use crate::work::Outcome;

const NAME: &str = "idle-hour";
/// Name, percent of the live set that is replaced in the time of the load.
const STAYS: (&str, &str) = ("live set stays", "10");
const REPLACED: (&str, &str) = ("live set replaced", "1000");
const NEAP: &str = "neap";
const AUTO: &str = "neap-auto";
/// Counts of the workload: live bytes, and bytes of all pages with one.
const LIVE: &str = "live_bytes";
const PAGES: &str = "live_pages_bytes";
/// Seconds after the load at which memory is read. The end of the idle time is another.
const READ_AT: [u64; 4] = [1, 10, 60, 600];
/// MiB of live set and bursts, half as much again for allocators' overhead.
const MEMORY: usize = 768;
/// A limit that no process reaches. The benchmark only reads the group's usage.
const LIMIT: u64 = 1 << 40;
/// Longest time of the workload, beyond load and idle time.
const PATIENCE: Duration = Duration::from_secs(600);

/// Seconds of load, and after it.
#[derive(Clone, Copy)]
struct Times {
    load: u64,
    idle: u64,
}

impl Times {
    fn of(options: &Options) -> Times {
        let (load, idle) = if options.quick { (2, 10) } else { (10, 600) };
        Times { load: options.load.map_or(load, u64::from), idle: options.idle.map_or(idle, u64::from) }
    }

    /// Seconds after the load at which memory is read.
    fn read_at(self) -> Vec<u64> {
        let mut read_at: Vec<u64> = READ_AT.into_iter().filter(|&at| at < self.idle).collect();
        read_at.push(self.idle);
        read_at
    }
}

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let times = Times::of(options);
    let groups = Groups::find();
    if let Err(reason) = &groups {
        eprintln!("neap bench {NAME}: without usage of memory groups: {reason:#}");
    }
    let mut session = Session::new(NAME, Choice::Return, &options.against)?;
    let variants = &mut session.found.variants;
    if let Some(at) = variants.iter().position(|variant| variant.name == NEAP) {
        let auto = Variant { name: AUTO, environment: vec![("NEAP", "limit:auto")], ..variants[at].clone() };
        variants.insert(at + 1, auto);
    }
    let rounds = options.rounds(1);
    let mut results: Vec<_> = (0..rounds).map(|_| run_all(&session, times, groups.as_ref().ok())).collect();
    let workloads = [STAYS, REPLACED].map(|(name, _)| Workload {
        unit: "ratio",
        metric: |run| over_live(run, &rss_at(10)).unwrap_or(0.0),
        ..Workload::timed(name, rounds, &[])
    });
    session.measure(&workloads, |variant, workload, round| {
        results.get_mut(round)?.remove(&(variant.name, workload.name.clone()))
    });
    figures(&mut session);
    let tables = tables(&session, times, groups.is_ok());
    session.finish(options.json, &tables)
}

/// Outcomes by variant and workload.
type Outcomes = BTreeMap<(&'static str, String), Result<Outcome>>;

/// Loads all variants one after the other, and waits until each has been idle for its time.
fn run_all(session: &Session, times: Times, groups: Option<&Groups>) -> Outcomes {
    let all = session.found.variants.iter().map(|variant| (variant, STAYS));
    let neap = session.found.variants.iter().filter(|variant| variant.name == NEAP);
    let runs = all.chain(neap.map(|variant| (variant, REPLACED)));
    thread::scope(|scope| {
        let mut idle = Vec::new();
        let mut results = BTreeMap::new();
        for (variant, (workload, percent)) in runs {
            eprintln!("neap bench {NAME}: {}, {workload}: {} s of load", variant.name, times.load);
            warm::touch(MEMORY << 20);
            let run = (variant.name, workload.to_string());
            match load(session, variant, percent, times, groups) {
                Ok(loaded) => idle.push((run, scope.spawn(move || loaded.watch(times)))),
                Err(error) => _ = results.insert(run, Err(error)),
            }
        }
        eprintln!("neap bench {NAME}: all are idle; {} s to go", times.idle);
        for (run, watcher) in idle {
            let result = watcher.join().unwrap_or_else(|_| Err(anyhow::anyhow!("its watcher panicked")));
            results.insert(run, result);
        }
        results
    })
}

/// A process whose load has just ended.
struct Loaded {
    process: Contained,
    group: Option<Cgroup>,
    ended: Instant,
    cpu_ns: u64,
}

/// Runs the load of a variant, which replaces `percent` % of the live set.
fn load(session: &Session, variant: &Variant, percent: &str, times: Times, groups: Option<&Groups>) -> Result<Loaded> {
    let group = groups.map(|groups| groups.make(LIMIT)).transpose()?;
    let milliseconds = (times.load * 1000).to_string();
    let arguments = [NAME, "--load-ms", &milliseconds, "--replaced", percent];
    // Idle processes wait until all loads are over.
    let patience = PATIENCE + Duration::from_secs(times.load + times.idle);
    let mut process = Contained::start_for(patience, &session.executable, variant, &arguments, group.as_ref())?;
    process.wait_for_line()?;
    let ended = Instant::now();
    // A process that has ended has no threads. `Contained::end` reports the reason later.
    let cpu_ns = threads_cpu_ns(process.id()).unwrap_or(0);
    Ok(Loaded { process, group, ended, cpu_ns })
}

impl Loaded {
    /// Reads memory and processor time while the process is idle, and ends it.
    fn watch(self, times: Times) -> Result<Outcome> {
        let pid = self.process.id();
        let mut counts = BTreeMap::new();
        let mut spent = None;
        for at in times.read_at() {
            let next = self.ended + Duration::from_secs(at);
            thread::sleep(next.saturating_duration_since(Instant::now()));
            // A killed process has none of these.
            let Ok(rss) = rss_kib(pid) else { break };
            counts.insert(rss_at(at), (rss << 10) as f64);
            if let Some(group) = &self.group {
                counts.insert(usage_at(at), group.usage()? as f64);
            }
            let elapsed = self.ended.elapsed().as_nanos().max(1) as f64;
            let cpu = threads_cpu_ns(pid).context("cannot read its processor time")?.saturating_sub(self.cpu_ns);
            spent = Some((cpu, 100.0 * cpu as f64 / elapsed));
        }
        let mut outcome = self.process.end()?;
        anyhow::ensure!(outcome.count(KILLED) == 0.0, "the kernel killed it");
        let (cpu, percent) = spent.context("its memory could not be read")?;
        outcome.idle_cpu_ns = Some(cpu);
        counts.insert("idle_cpu_percent".to_string(), percent);
        outcome.counts.extend(counts);
        Ok(outcome)
    }
}

fn rss_at(seconds: u64) -> String {
    format!("rss_{seconds}s")
}

fn usage_at(seconds: u64) -> String {
    format!("usage_{seconds}s")
}

/// Returns a count of a run over its live bytes. `None` if the run lacks the count.
fn over_live(run: &Outcome, name: &str) -> Option<f64> {
    let live = run.count(LIVE);
    run.counts.get(name).filter(|_| live > 0.0).map(|bytes| bytes / live)
}

fn of(session: &Session, variant: &str, workload: &str, reading: impl Fn(&Outcome) -> Option<f64>) -> Option<Summary> {
    summary(session.outcomes(variant, workload).iter().filter_map(reading))
}

fn idle_cpu(run: &Outcome) -> Option<f64> {
    run.counts.get("idle_cpu_percent").copied()
}

fn figures(session: &mut Session) {
    let [(stays, _), (replaced, _)] = [STAYS, REPLACED];
    for (figure, workload, count) in [
        ("rss_ratio_10s", stays, rss_at(10)),
        ("usage_ratio_10s", stays, usage_at(10)),
        ("pages_ratio", stays, PAGES.to_string()),
        ("rss_ratio_10s_replaced", replaced, rss_at(10)),
        ("pages_ratio_replaced", replaced, PAGES.to_string()),
    ] {
        let ratio = of(session, NEAP, workload, |run| over_live(run, &count));
        session.figure(figure, ratio.map(|ratio| ratio.max));
    }
    for (figure, variant) in [("idle_cpu_percent", NEAP), ("idle_cpu_percent_auto", AUTO)] {
        let percent = of(session, variant, stays, idle_cpu);
        session.figure(figure, percent.map(|percent| percent.max));
    }
}

fn tables(session: &Session, times: Times, has_groups: bool) -> String {
    let mut text = String::new();
    for (workload, _) in [STAYS, REPLACED] {
        text += &format!("{}\n", one_table(session, workload, &times.read_at(), has_groups));
    }
    let usage = if has_groups { "" } else { "Usage of memory groups was not read: none could be made.\n" };
    text + &format!(
        "{} s of load, one process after the other; then all are idle at once, each for {} s.\n{usage}",
        times.load, times.idle
    )
}

fn one_table(session: &Session, workload: &str, read_at: &[u64], has_groups: bool) -> String {
    let mib = |name: String| move |run: &Outcome| run.counts.get(&name).map(|bytes| bytes / f64::from(1 << 20));
    let row = |variant: &Variant| {
        let mut row = vec![variant.name.to_string()];
        let mut add = |reading: &dyn Fn(&Outcome) -> Option<f64>, decimals| {
            row.push(cell(of(session, variant.name, workload, reading), decimals));
        };
        add(&mib(LIVE.to_string()), 0);
        add(&|run| Some(run.count("peak_kib") / 1024.0), 0);
        read_at.iter().for_each(|&at| add(&mib(rss_at(at)), 0));
        read_at.iter().filter(|_| has_groups).for_each(|&at| add(&mib(usage_at(at)), 0));
        add(&|run| over_live(run, &rss_at(10)), 3);
        add(&|run| over_live(run, PAGES), 3);
        add(&idle_cpu, 4);
        row
    };
    let mut header = [workload, "live MiB", "peak MiB"].map(String::from).to_vec();
    let named = |name: &str| read_at.iter().map(|at| format!("{name} +{at} s")).collect::<Vec<_>>();
    header.extend(named("RSS"));
    header.extend(named("usage").into_iter().filter(|_| has_groups));
    header.extend(["RSS +10 s / live", "pages / live", "idle CPU %"].map(String::from));
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let measured = session.found.variants.iter().filter(|variant| !session.outcomes(variant.name, workload).is_empty());
    table(&header, &measured.map(row).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::{session, variant};
    use crate::variant::AllocatorKind;

    #[test]
    fn idle_memory_readings_include_end_of_idle_time() {
        let read_at = |idle| Times { load: 1, idle }.read_at();
        assert_eq!(read_at(600), [1, 10, 60, 600]);
        assert_eq!(read_at(30), [1, 10, 30]);
        assert_eq!(read_at(1), [1]);
    }

    /// neap has 110 and 120 MiB for 100 live; its usage is not known in the second round.
    fn measured() -> Session {
        let names = [NEAP, AUTO, "glibc"];
        let mut session = session(names.map(|name| variant(name, AllocatorKind::Neap)).to_vec());
        let workloads = [STAYS, REPLACED].map(|(name, _)| Workload::timed(name, 2, &[]));
        session.measure(&workloads, |variant, workload, round| {
            if workload.name == REPLACED.0 && variant.name != NEAP {
                return None;
            }
            let mut outcome = Outcome { operations: 1, ..Outcome::default() };
            let (rss, percent) = match variant.name {
                NEAP => (110.0 + 10.0 * round as f64, 0.01),
                AUTO => (115.0, 0.05),
                _ => (400.0, 0.0),
            };
            let live = if workload.name == REPLACED.0 { 50.0 } else { 100.0 };
            let counts = [(LIVE, live), (PAGES, 104.0), ("idle_cpu_percent", percent)];
            outcome.counts.extend(counts.map(|(name, count)| (name.to_string(), count)));
            outcome.counts.insert(rss_at(10), rss);
            if round == 0 {
                outcome.counts.insert(usage_at(10), rss + 5.0);
            }
            Some(Ok(outcome))
        });
        session
    }

    #[test]
    fn figures_are_the_largest_of_the_rounds_and_absent_if_unknown() {
        let mut session = measured();
        figures(&mut session);
        let names = ["rss_ratio_10s", "usage_ratio_10s", "pages_ratio", "idle_cpu_percent", "idle_cpu_percent_auto"];
        assert_eq!(names.map(|name| session.figures[name]), [1.2, 1.15, 1.04, 0.01, 0.05]);
        let names = ["rss_ratio_10s_replaced", "pages_ratio_replaced"];
        assert_eq!(names.map(|name| session.figures[name]), [2.4, 2.08]);
        let mut empty = super::super::tests::session(Vec::new());
        figures(&mut empty);
        assert!(empty.figures.is_empty());
    }

    #[test]
    fn tables_have_usage_only_with_groups() {
        let (session, times) = (measured(), Times { load: 10, idle: 600 });
        let text = tables(&session, times, true);
        assert!(text.contains("usage +60 s"));
        assert_eq!(text.lines().filter(|line| line.starts_with("| glibc")).count(), 1, "{text}");
        let without = tables(&session, times, false);
        assert!(!without.contains("usage +60 s") && without.contains("none could be made"), "{without}");
    }
}
