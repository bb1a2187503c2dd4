//! Ratios of neap's processor time and peak memory to those of the best allocator of each program.
//! neap is one of the allocators compared.
//!
//! # Invariants
//!
//! A ratio is at least 1, since neap is one of the allocators of its row. An allocator under which
//! a program's output differs is in no row.

use super::{differs, peak_mib};
use crate::bench::{Reading, Session, default_peers};
use crate::statistics::geometric_mean;
use crate::work::Outcome;

/// Smallest peak that counts in the mean of memory. Below it, the program's code is most of the
/// peak.
const SMALL_MIB: f64 = 15.0;

/// One program: neap's median over the smallest median (`ratio`), and the smallest median (`best`).
struct CostRow {
    ratio: f64,
    best: f64,
}

pub(in crate::bench) fn cpu_seconds(outcome: &Outcome) -> f64 {
    outcome.cpu_ns as f64 / 1e9
}

fn row(session: &Session, program: &str, reading: Reading) -> Option<CostRow> {
    let median = |variant: &str| Some(session.summary_of(variant, program, reading)?.median);
    let ours = median("neap")?;
    let peers = session.found.variants.iter().filter(|variant| default_peers(variant));
    let same = peers.filter(|peer| !differs(session, peer.name, program));
    let best = same.filter_map(|peer| median(peer.name)).fold(ours, f64::min);
    (best > 0.0).then(|| CostRow { ratio: ours / best, best })
}

fn mean(rows: impl Iterator<Item = CostRow>) -> Option<f64> {
    geometric_mean(&rows.map(|row| row.ratio).collect::<Vec<_>>())
}

/// `cpu_geomean_ratio`, `worst_cpu_ratio` and `rss_geomean_ratio`.
pub(super) fn figures(session: &mut Session, programs: &[&'static str]) {
    let measured: &Session = session;
    let rows = |reading: Reading| programs.iter().filter_map(move |program| row(measured, program, reading));
    let worst = rows(cpu_seconds).map(|row| row.ratio).max_by(f64::total_cmp);
    let figures = [
        ("cpu_geomean_ratio", mean(rows(cpu_seconds))),
        ("worst_cpu_ratio", worst),
        ("rss_geomean_ratio", mean(rows(peak_mib).filter(|row| row.best > SMALL_MIB))),
    ];
    for (name, value) in figures {
        session.figure(name, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Workload;
    use crate::bench::tests::{session, variant};
    use crate::variant::AllocatorKind;

    #[test]
    fn ratios_are_to_the_best_of_each_row() {
        let variants = [("neap", AllocatorKind::Neap), ("glibc", AllocatorKind::Peer), ("wrong", AllocatorKind::Peer)];
        let mut session = session(variants.map(|(name, kind)| variant(name, kind)).to_vec());
        let programs = ["one", "two", "small"];
        session.measure(&programs.map(|name| Workload::timed(name, 1, &[])), |variant, workload, _| {
            // Seconds and MiB.
            let (cpu, peak) = match (variant.name, workload.name.as_str()) {
                ("neap", "one") => (4, 40),
                ("neap", "two") => (1, 100),
                ("neap", _) => (1, 14),
                ("glibc", "one") => (1, 20),
                ("glibc", "two") => (2, 50),
                ("glibc", _) => (1, 7),
                _ => (0, 1),
            };
            let output = Some(if variant.name == "wrong" { "another" } else { "same" }.to_string());
            let peak_rss_kib = Some(peak << 10);
            Some(Ok(Outcome { cpu_ns: cpu * 1_000_000_000, peak_rss_kib, output, ..Outcome::default() }))
        });
        figures(&mut session, &programs);
        assert_eq!(session.figures["worst_cpu_ratio"], 4.0);
        assert_eq!(session.figures["cpu_geomean_ratio"], crate::report::rounded(4.0_f64.cbrt()));
        assert_eq!(session.figures["rss_geomean_ratio"], 2.0);
    }
}
