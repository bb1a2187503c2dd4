//! `neap bench phases`: live sets of one block size after another, and the memory that each
//! allocator needs for them.
//!
//! Figures, over all variations of the workload:
//!
//! * `peak_ratio`: neap's largest peak of resident memory over the live set. The program itself and
//!   its tables, which exist before the first block, are not part of a peak.
//! * `peak_ratio_best_peer`: the largest of neap's peak over the best peer's peak in that
//!   variation.
//! * `time_geomean_ratio`, `worst_time_ratio`: elapsed time over that of the fastest peer in each
//!   variation.
//! * `cpu_geomean_ratio`, `worst_cpu_ratio`: processor time over that of the peer that takes the
//!   least.
//! * `again_time_ratio`: elapsed time of a burst of one size that repeats, over that of the fastest
//!   peer.
//!
//! With `--limit` the figures are those of [`limit`], and nothing else is measured.

mod limit;

use std::process::ExitCode;

use anyhow::Result;

use super::{Options, Reading, Session, Workload, default_peers};
use crate::report::{Ratio, cell, number, table};
use crate::statistics::geometric_mean;
use crate::variant::Choice;
use crate::work::Outcome;
use crate::work::phases::Order;

/// Sizes far apart, neighbours in no order.
const ALL_SIZES: [usize; 8] = [64, 4096, 300, 32768, 1000, 200_000, 128, 2048];
const PAIRS: [[usize; 2]; 4] = [[64, 2048], [4096, 32768], [64, 200_000], [300, 1000]];
const THREADS: [usize; 3] = [1, 2, 8];
/// The variation whose size never changes.
const AGAIN: &str = "1000 again, 1 t";
/// MiB.
const LIVE: usize = 300;
const QUICK_LIVE: usize = 100;

/// One way to run the workload.
struct Variation {
    name: String,
    sizes: Vec<usize>,
    order: Order,
    threads: usize,
    /// Number of times that all sizes have their phase.
    turns: usize,
}

impl Variation {
    /// Arguments of `neap work`.
    fn arguments(&self, live: usize) -> Vec<String> {
        let sizes: Vec<String> = self.sizes.iter().map(ToString::to_string).collect();
        let options = [
            ("--live", live.to_string()),
            ("--order", self.order.name().to_string()),
            ("--threads", self.threads.to_string()),
            ("--turns", self.turns.to_string()),
            ("--sizes", sizes.join(",")),
        ];
        let options = options.into_iter().flat_map(|(name, value)| [name.to_string(), value]);
        ["phases".to_string()].into_iter().chain(options).collect()
    }
}

/// Variations: all eight sizes in each order of frees, pairs of sizes that are freed by stride,
/// and one size alone.
fn variations(quick: bool) -> Vec<Variation> {
    let turns = if quick { [1, 2] } else { [2, 4] };
    let mut all = Vec::new();
    for threads in THREADS {
        let eight = Order::ALL.map(|order| Variation {
            name: format!("8 sizes, {}, {threads} t", order.name()),
            sizes: ALL_SIZES.to_vec(),
            order,
            threads,
            turns: turns[0],
        });
        let pairs = PAIRS.map(|[one, other]| Variation {
            name: format!("{one}+{other}, stride, {threads} t"),
            sizes: vec![one, other],
            order: Order::Stride,
            threads,
            turns: turns[1],
        });
        all.extend(eight.into_iter().chain(pairs));
    }
    let again =
        Variation { name: AGAIN.to_string(), sizes: vec![1000], order: Order::Stride, threads: 1, turns: 2 * turns[1] };
    all.push(again);
    all
}

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let live = options.live.map_or(if options.quick { QUICK_LIVE } else { LIVE }, usize::from);
    if options.limit.is_some() {
        return limit::main(options, live);
    }
    let mut session = Session::new("phases", Choice::Defaults, &options.against)?;
    let rounds = options.rounds(if options.quick { 1 } else { 3 });
    let variations = variations(options.quick);
    let workload = |variation: &Variation| Workload {
        name: variation.name.clone(),
        arguments: variation.arguments(live),
        rounds,
        memory: (2 * live) << 20,
        unit: "x the live set",
        metric: peak,
    };
    session.measure_workloads(&variations.iter().map(workload).collect::<Vec<_>>());
    figures(&mut session, &variations);
    let tables = format!("{}\nLive set: {live} MiB.", tables(&session, &variations));
    session.finish(options.json, &tables)
}

/// Peak over live set.
fn peak(outcome: &Outcome) -> f64 {
    outcome.count("peak_kib") / outcome.count("live_kib").max(1.0)
}

/// neap's worst peak in a variation over the smallest peak of any peer.
fn to_best_peer(session: &Session, variation: &str) -> Option<f64> {
    let ours = session.summary("neap", variation)?.max;
    let peers = session.found.variants.iter().filter(|variant| default_peers(variant));
    let best = peers.filter_map(|peer| Some(session.summary(peer.name, variation)?.min)).min_by(f64::total_cmp)?;
    (best > 0.0).then(|| ours / best)
}

fn figures(session: &mut Session, variations: &[Variation]) {
    let names = || variations.iter().map(|variation| variation.name.as_str());
    let worst = |values: &mut dyn Iterator<Item = f64>| values.max_by(f64::total_cmp);
    let peak = worst(&mut names().filter_map(|name| Some(session.summary("neap", name)?.max)));
    let to_best = worst(&mut names().filter_map(|name| to_best_peer(session, name)));
    session.figure("peak_ratio", peak);
    session.figure("peak_ratio_best_peer", to_best);
    for (what, reading) in [("time", Outcome::ns_each as Reading), ("cpu", Outcome::cpu_ns_each)] {
        let ratio = |name| session.ratio_to_fastest("neap", name, Some(reading), default_peers);
        let ratios: Vec<Ratio> = names().filter_map(ratio).collect();
        let medians: Vec<f64> = ratios.iter().map(|ratio| ratio.summary.median).collect();
        let slowest = ratios.into_iter().max_by(|a, b| a.summary.median.total_cmp(&b.summary.median));
        session.figure(&format!("{what}_geomean_ratio"), geometric_mean(&medians));
        session.figure_of_ratio(&format!("worst_{what}_ratio"), slowest);
    }
    let again = session.ratio_to_fastest("neap", AGAIN, Some(Outcome::ns_each), default_peers);
    session.figure_of_ratio("again_time_ratio", again);
}

fn tables(session: &Session, variations: &[Variation]) -> String {
    let one = |title: &str, extra: Option<&str>, value: &dyn Fn(&str, &str) -> String| {
        let names = session.found.variants.iter().map(|variant| variant.name);
        let header: Vec<&str> = [title].into_iter().chain(names.clone()).chain(extra).collect();
        let row = |variation: &Variation| {
            let name = variation.name.as_str();
            let best = extra.map(|_| to_best_peer(session, name).map_or("-".to_string(), |ratio| number(ratio, 2)));
            [name.to_string()]
                .into_iter()
                .chain(names.clone().map(|variant| value(variant, name)))
                .chain(best)
                .collect()
        };
        table(&header, &variations.iter().map(row).collect::<Vec<Vec<String>>>())
    };
    let peaks =
        one("peak / live set", Some("neap / best peer"), &|variant, name| cell(session.summary(variant, name), 2));
    let times = one("ns a block", None, &|variant, name| cell(session.summary_of(variant, name, Outcome::ns_each), 0));
    let cpu =
        one("CPU ns a block", None, &|variant, name| cell(session.summary_of(variant, name, Outcome::cpu_ns_each), 0));
    format!("{peaks}\n{times}\n{cpu}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::{session, variant};
    use crate::variant::AllocatorKind;

    #[test]
    fn every_variation_has_a_name_of_its_own_and_all_threads() {
        let variations = variations(true);
        assert_eq!(variations.len(), THREADS.len() * (Order::ALL.len() + PAIRS.len()) + 1);
        let mut names: Vec<&str> = variations.iter().map(|variation| variation.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), variations.len());
        assert!(names.contains(&AGAIN));
        let arguments = variations[3].arguments(48).join(" ");
        let expected =
            "phases --live 48 --order stride --threads 1 --turns 1 --sizes 64,4096,300,32768,1000,200000,128,2048";
        assert_eq!(arguments, expected);
    }

    #[test]
    fn figures_are_the_worst_of_all_variations() {
        let variants = [("neap", AllocatorKind::Neap), ("thrifty", AllocatorKind::Peer), ("fast", AllocatorKind::Peer)];
        let mut session = session(variants.map(|(name, kind)| variant(name, kind)).to_vec());
        let variations: Vec<Variation> =
            variations(true).into_iter().filter(|variation| variation.threads == 1).collect();
        let workload = |variation: &Variation| Workload { metric: peak, ..Workload::timed(&variation.name, 2, &[]) };
        let workloads: Vec<Workload> = variations.iter().map(workload).collect();
        session.measure(&workloads, |variant, workload, round| {
            let again = workload.name == AGAIN;
            let (peak, time) = match variant.name {
                "neap" if again => (1100.0, 300),
                // The largest peak over the live set, in the last round, where every peer has as
                // much.
                "neap" if workload.name.contains("reversed") => (2000.0 + 100.0 * round as f64, 100),
                "neap" => (1300.0, 100),
                _ if workload.name.contains("reversed") => (2000.0, 200),
                "thrifty" => (1000.0, 400),
                _ => (1250.0, 200),
            };
            let mut outcome = Outcome { operations: 1, wall_ns: time, cpu_ns: 2 * time, ..Outcome::default() };
            outcome.counts.extend([("peak_kib".to_string(), peak), ("live_kib".to_string(), 1000.0)]);
            Some(Ok(outcome))
        });
        figures(&mut session, &variations);
        assert_eq!(session.figures["peak_ratio"], 2.1);
        assert_eq!(session.figures["peak_ratio_best_peer"], 1.3);
        for figure in ["worst_time_ratio", "worst_cpu_ratio", "again_time_ratio"] {
            assert_eq!(session.figures[figure], 1.5, "{figure}");
        }
        // Eight variations of half the fastest peer's time, and one of one and a half.
        let mean = crate::report::rounded((0.5_f64.powi(8) * 1.5).powf(1.0 / 9.0));
        assert_eq!((session.figures["time_geomean_ratio"], session.figures["cpu_geomean_ratio"]), (mean, mean));
        assert!(tables(&session, &variations).contains("neap / best peer"));
    }
}
