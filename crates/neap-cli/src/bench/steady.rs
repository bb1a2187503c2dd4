//! `neap bench steady`: a server's steady state, in which eight threads replace blocks of drifting
//! sizes at random.
//!
//! Figures: `ops_ratio_fastest`, neap's operations a second over those of the peer that does the
//! most (above 1 neap is faster), and `peak_ratio_median`, neap's peak of resident memory over the
//! median of the peers' peaks. The program itself and its tables are not part of a peak. A round's
//! seed is its number; all allocators have the same sizes in it.

use std::process::ExitCode;

use anyhow::Result;

use super::{Options, Session, Workload, default_peers};
use crate::report::{Ratio, cell, table};
use crate::statistics::summary;
use crate::variant::{Choice, Variant};
use crate::work::{self, Outcome};

const NAME: &str = "steady";

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::new("steady", Choice::Defaults, &options.against)?;
    let rounds = options.rounds(7);
    let blocks = options.amount(1_000_000).to_string();
    let workload = Workload {
        unit: "million operations a second",
        metric: mops,
        memory: 384 << 20,
        ..Workload::timed(NAME, rounds, &[])
    };
    let executable = session.executable.clone();
    session.measure(&[workload], |variant, _, round| {
        let seed = (round + 1).to_string();
        Some(work::measure(&executable, variant, &["steady", "--seed", &seed, "--blocks", &blocks]))
    });
    figures(&mut session);
    let tables = format!("{}\nSizes: seeds 1 to {rounds}.", tables(&session));
    session.finish(options.json, &tables)
}

/// Million operations, an allocation and a free each, in a second.
fn mops(outcome: &Outcome) -> f64 {
    outcome.operations as f64 * 1e3 / outcome.wall_ns.max(1) as f64
}

fn peak_mib(outcome: &Outcome) -> f64 {
    outcome.count("peak_kib") / 1024.0
}

/// neap's rate over that of the peer with the highest median.
fn to_fastest(session: &Session) -> Option<Ratio> {
    let peers = session.found.variants.iter().filter(|variant| default_peers(variant));
    let rates = peers.filter_map(|peer| Some((session.summary(peer.name, NAME)?.median, peer.name)));
    let (_, fastest) = rates.max_by(|a, b| a.0.total_cmp(&b.0))?;
    session.ratio("neap", fastest, NAME)
}

fn figures(session: &mut Session) {
    let fastest = to_fastest(session);
    session.figure_of_ratio("ops_ratio_fastest", fastest);
    let peak = |variant: &str| Some(session.summary_of(variant, NAME, peak_mib)?.median);
    let peers = session.found.variants.iter().filter(|variant| default_peers(variant));
    let middle = summary(peers.filter_map(|peer| peak(peer.name)));
    let ratio = peak("neap").zip(middle).map(|(ours, peers)| ours / peers.median);
    session.figure("peak_ratio_median", ratio);
}

fn tables(session: &Session) -> String {
    let row = |variant: &Variant| {
        let over_live = |outcome: &Outcome| outcome.count("peak_kib") / outcome.count("live_kib").max(1.0);
        let of = |reading, decimals| cell(session.summary_of(variant.name, NAME, reading), decimals);
        vec![
            variant.name.to_string(),
            of(mops, 2),
            session.ratio_cell(variant, NAME),
            of(Outcome::cpu_ns_each, 0),
            of(peak_mib, 0),
            of(over_live, 2),
        ]
    };
    let rows: Vec<Vec<String>> = session.found.variants.iter().map(row).collect();
    let header = ["8 threads, 16 B to 64 KiB", "M ops/s", "neap / it", "CPU ns an op", "peak MiB", "peak / live set"];
    table(&header, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::{session, variant};
    use crate::variant::AllocatorKind;

    #[test]
    fn steady_ratios_use_fastest_rate_and_median_peak() {
        let variants = [
            ("neap", AllocatorKind::Neap),
            ("a", AllocatorKind::Peer),
            ("b", AllocatorKind::Peer),
            ("c", AllocatorKind::Peer),
        ];
        let mut session = session(variants.map(|(name, kind)| variant(name, kind)).to_vec());
        let workload = Workload { metric: mops, ..Workload::timed(NAME, 2, &[]) };
        session.measure(&[workload], |variant, _, _| {
            let (wall, peak) = match variant.name {
                "neap" => (100, 150.0),
                "a" => (80, 400.0),
                "b" => (200, 100.0),
                _ => (400, 200.0),
            };
            let mut outcome = Outcome { operations: 1000, wall_ns: wall, ..Outcome::default() };
            outcome.counts.extend([("peak_kib".to_string(), peak * 1024.0), ("live_kib".to_string(), 102_400.0)]);
            Some(Ok(outcome))
        });
        figures(&mut session);
        assert_eq!(session.figures["ops_ratio_fastest"], 0.8);
        assert_eq!(session.figures["peak_ratio_median"], 0.75);
        assert!(tables(&session).contains("| neap "));
    }
}
