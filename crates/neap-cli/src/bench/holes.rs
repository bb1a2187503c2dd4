//! `neap bench holes`: memory released when one block in twenty survives, and the time of the
//! burst.
//!
//! Figures:
//!
//! * `returned_percent`: the part of the burst's resident memory that was released within ten
//!   seconds after the last free. The figure is the least of the rounds;
//! * `bound_percent`: the largest part that any allocator could release without moving blocks. It
//!   is the share of the pages with blocks that have no byte of a survivor;
//! * `best_peer_percent`: the most that any other allocator released, at any setting;
//! * `busy_ratio`: the time of burst and frees, against the fastest peer's default;
//! * `pages_per_flush`: released pages for each interrupt that flushed address translations on a
//!   CPU where another thread ran. There is no such figure where the kernel does not count these
//!   interrupts.
//!
//! The programs wait ten seconds in the first rounds only: neap's in three rounds, the peers' in
//! one. Later rounds measure the burst only.

use std::process::ExitCode;

use anyhow::Result;

use super::{Options, Session, Workload, default_peers};
use crate::report::{cell, table};
use crate::statistics::{Summary, summary};
use crate::variant::{AllocatorKind, Choice, Variant};
use crate::work::{self, Outcome};

/// The burst and ten seconds.
const QUIET: &str = "holes";
/// The burst and ten seconds, while another thread runs.
const BESIDE: &str = "beside a thread";

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::new("holes", Choice::Return, &options.against)?;
    let rounds = options.rounds(15);
    let workload = |name: &str, rounds: usize| Workload {
        unit: "s",
        metric: Outcome::wall_seconds,
        memory: 384 << 20,
        ..Workload::timed(name, rounds, &["holes"])
    };
    let workloads = [workload(QUIET, rounds), workload(BESIDE, 1)];
    let executable = session.executable.clone();
    session.measure(&workloads, |variant, workload, round| {
        let seed = round.to_string();
        let mut arguments = vec!["holes", "--seed", &seed];
        match workload.name == BESIDE {
            true if variant.kind != AllocatorKind::Neap => return None,
            true => arguments.push("--spin"),
            false if round >= if variant.is_neap() { 3 } else { 1 } => arguments.push("--no-wait"),
            false => {}
        }
        Some(work::measure(&executable, variant, &arguments))
    });
    figures(&mut session);
    let tables = format!("{}\nSurvivors: seeds 0 to {}.", tables(&session), rounds - 1);
    session.finish(options.json, &tables)
}

/// Percent of the burst that was released in the end, in rounds that waited.
fn returned(outcome: &Outcome) -> Option<f64> {
    let [before, burst, _, after] = outcome.rss_kib[..] else { return None };
    let percent = |part: f64, whole: f64| (whole > 0.0).then(|| 100.0 * part / whole);
    percent(burst as f64 - after as f64, burst as f64 - before as f64)
}

/// Percent of the pages with blocks that have no survivor.
fn bound(outcome: &Outcome) -> Option<f64> {
    let (all, live) = (outcome.count("pages"), outcome.count("pages_with_survivors"));
    (all > 0.0).then(|| 100.0 * (all - live) / all)
}

fn of(session: &Session, variant: &str, workload: &str, reading: fn(&Outcome) -> Option<f64>) -> Option<Summary> {
    summary(session.outcomes(variant, workload).iter().filter_map(reading))
}

fn figures(session: &mut Session) {
    session.figure("returned_percent", of(session, "neap", QUIET, returned).map(|percent| percent.min));
    session.figure("bound_percent", of(session, "neap", QUIET, bound).map(|percent| percent.median));
    let peers = session.found.variants.iter().filter(|variant| !variant.is_neap());
    let best = peers.filter_map(|peer| of(session, peer.name, QUIET, returned)).map(|percent| percent.max);
    let best = best.max_by(f64::total_cmp);
    session.figure("best_peer_percent", best);
    let to_fastest = session.ratio_to_fastest("neap", QUIET, None, default_peers);
    session.figure_of_ratio("busy_ratio", to_fastest);
    let pages_per_flush = |outcome: &Outcome| {
        let [_, burst, _, after] = outcome.rss_kib[..] else { return None };
        let flushes = outcome.counts.get("flushes")?;
        // Divides by at least one, so that a run without a flush has a figure.
        Some(burst.saturating_sub(after) as f64 / 4.0 / flushes.max(1.0))
    };
    session.figure("pages_per_flush", of(session, "neap", BESIDE, pages_per_flush).map(|pages| pages.min));
}

fn tables(session: &Session) -> String {
    let row = |variant: &Variant| {
        let rss = |reading: usize| {
            let at = |outcome: &Outcome| Some(*outcome.rss_kib.get(reading)? as f64 / 1024.0);
            cell(summary(session.outcomes(variant.name, QUIET).iter().filter_map(at)), 1)
        };
        let idle = |outcome: &Outcome| outcome.idle_cpu_ns.map(|ns| ns as f64 / 1e6);
        vec![
            variant.name.to_string(),
            rss(0),
            rss(1),
            rss(2),
            rss(3),
            cell(of(session, variant.name, QUIET, returned), 1),
            cell(of(session, variant.name, QUIET, bound), 1),
            cell(session.summary(variant.name, QUIET), 3),
            session.ratio_cell(variant, QUIET),
            cell(of(session, variant.name, QUIET, idle), 1),
        ]
    };
    let rows: Vec<Vec<String>> = session.found.variants.iter().map(row).collect();
    let header = [
        "300 000 blocks, 1 in 20 stays",
        "RSS MiB before",
        "burst",
        "freed",
        "+10 s",
        "returned %",
        "permitted %",
        "busy s",
        "neap / it",
        "CPU ms while idle",
    ];
    table(&header, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::{session, variant};

    #[test]
    fn percentages_are_of_what_the_burst_added() {
        let mut outcome = Outcome { rss_kib: vec![1000, 11_000, 11_000, 3000], ..Outcome::default() };
        assert_eq!(returned(&outcome), Some(80.0));
        outcome.rss_kib.pop();
        assert_eq!((returned(&outcome), bound(&outcome)), (None, None));
        outcome.counts.insert("pages".to_string(), 400.0);
        outcome.counts.insert("pages_with_survivors".to_string(), 100.0);
        assert_eq!(bound(&outcome), Some(75.0));
    }

    #[test]
    fn the_figures_are_the_least_of_neap_and_the_most_of_the_peers() {
        let variants =
            ["neap", "slow", "tuned"].into_iter().zip([AllocatorKind::Neap, AllocatorKind::Peer, AllocatorKind::Tuned]);
        let mut session = session(variants.map(|(name, kind)| variant(name, kind)).collect());
        let workload = |name: &str| Workload::timed(name, 2, &[]);
        session.measure(&[workload(QUIET), workload(BESIDE)], |variant, workload, round| {
            let after = match variant.name {
                "neap" => 2000 + 500 * round as u64,
                "slow" => 11_000,
                _ => 6000,
            };
            let mut outcome = Outcome { rss_kib: vec![1000, 11_000, 11_000, after], wall_ns: 1, ..Outcome::default() };
            if workload.name == BESIDE {
                outcome.counts.insert("flushes".to_string(), 10.0);
            }
            Some(Ok(outcome))
        });
        figures(&mut session);
        assert_eq!(session.figures["returned_percent"], 85.0);
        assert_eq!(session.figures["best_peer_percent"], 50.0);
        assert_eq!(session.figures["pages_per_flush"], 8500.0 / 4.0 / 10.0);
        assert!(!session.figures.contains_key("bound_percent"), "no pages were counted");
    }
}
