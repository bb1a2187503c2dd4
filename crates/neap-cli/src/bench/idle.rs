//! `neap bench idle`: resident memory after a burst, and the time of the burst.
//!
//! Figures: `rss_2s_mib_SIZE` (resident two seconds after the last free, worst of the rounds),
//! `rss_2s_mib` (largest over the sizes), `busy_ratio` (largest over the sizes of the ratio to the
//! fastest peer in its default) and `busy_ratio_cpu` (that ratio of processor time). For each peer
//! that is set to return memory: `rss_2s_mib_NAME`, and `busy_ratio_NAME`, neap's time over that
//! peer's. The programs wait in the first rounds only: neap's in three rounds, the peers' in one.
//! Later rounds measure the burst only.

use std::process::ExitCode;

use anyhow::Result;

use super::{Options, Reading, Session, Workload, default_peers};
use crate::report::{Ratio, cell, table};
use crate::statistics::Summary;
use crate::variant::{AllocatorKind, Choice, Variant};
use crate::work::{self, Outcome};

/// Block sizes in bytes.
pub(super) const SIZES: [usize; 4] = [64, 512, 4096, 32768];

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::new("idle", Choice::Return, &options.against)?;
    let rounds = options.rounds(3);
    let (mib, bursts) = if options.quick { (8, "2") } else { (32, "5") };
    let workload = |size: &usize| Workload {
        unit: "s",
        metric: Outcome::wall_seconds,
        // 16 threads, and half as much again for allocators' overhead.
        memory: (mib * 16 * 3 / 2) << 20,
        ..Workload::timed(
            &size.to_string(),
            rounds,
            &["idle", "--size", &size.to_string(), "--mib", &mib.to_string(), "--rounds", bursts],
        )
    };
    let workloads: Vec<Workload> = options.sizes.iter().map(workload).collect();
    let executable = session.executable.clone();
    session.measure(&workloads, |variant, workload, round| {
        let mut arguments: Vec<&str> = workload.arguments.iter().map(String::as_str).collect();
        if round >= if variant.is_neap() { 3 } else { 1 } {
            arguments.push("--no-wait");
        }
        Some(work::measure(&executable, variant, &arguments))
    });
    let sizes: Vec<String> = workloads.into_iter().map(|workload| workload.name).collect();
    figures(&mut session, &sizes);
    let tables: Vec<String> = sizes.iter().map(|size| one_table(&session, size)).collect();
    session.finish(options.json, &tables.join("\n"))
}

fn figures(session: &mut Session, sizes: &[String]) {
    for size in sizes {
        session.figure(&format!("rss_2s_mib_{size}"), resident(session, "neap", size, 3).map(|rss| rss.max));
    }
    session.figure("rss_2s_mib", worst_resident(session, "neap", sizes));
    for (name, reading) in [("busy_ratio", None), ("busy_ratio_cpu", Some(Outcome::cpu_ns_each as Reading))] {
        let to_fastest =
            sizes.iter().map(|size| session.ratio_to_fastest("neap", size, reading, default_peers)).collect();
        session.figure_of_ratio(name, largest(to_fastest));
    }
    let tuned: Vec<&'static str> = session
        .found
        .variants
        .iter()
        .filter(|variant| variant.kind == AllocatorKind::Tuned)
        .map(|variant| variant.name)
        .collect();
    for name in tuned {
        let plain = name.replace('-', "_");
        session.figure(&format!("rss_2s_mib_{plain}"), worst_resident(session, name, sizes));
        let ratios = sizes.iter().map(|size| session.ratio("neap", name, size)).collect();
        session.figure_of_ratio(&format!("busy_ratio_{plain}"), largest(ratios));
    }
}

/// The largest ratio, if every size has one.
fn largest(ratios: Vec<Option<Ratio>>) -> Option<Ratio> {
    let ratios: Option<Vec<Ratio>> = ratios.into_iter().collect();
    ratios?.into_iter().max_by(|a, b| a.summary.median.total_cmp(&b.summary.median))
}

/// The largest reading after two seconds over all sizes, if every size has one.
fn worst_resident(session: &Session, variant: &str, sizes: &[String]) -> Option<f64> {
    let readings: Option<Vec<f64>> =
        sizes.iter().map(|size| resident(session, variant, size, 3).map(|rss| rss.max)).collect();
    readings?.into_iter().max_by(f64::total_cmp)
}

/// Resident MiB at one of the reading times, over the rounds that waited that long.
fn resident(session: &Session, variant: &str, size: &str, reading: usize) -> Option<Summary> {
    let outcomes = session.outcomes(variant, size).iter();
    crate::statistics::summary(outcomes.filter_map(|outcome| Some(*outcome.rss_kib.get(reading)? as f64 / 1024.0)))
}

fn one_table(session: &Session, size: &str) -> String {
    let row = |variant: &Variant| {
        let idle_cpu = session.outcomes(variant.name, size).iter().filter_map(|outcome| outcome.idle_cpu_ns);
        let idle_cpu = crate::statistics::summary(idle_cpu.map(|ns| ns as f64 / 1e6));
        let mut row = vec![
            variant.name.to_string(),
            cell(session.summary(variant.name, size), 2),
            session.ratio_cell(variant, size),
        ];
        row.extend((0..4).map(|reading| cell(resident(session, variant.name, size, reading), 0)));
        row.push(cell(idle_cpu, 1));
        row
    };
    let rows: Vec<Vec<String>> = session.found.variants.iter().map(row).collect();
    let first = format!("{size} B blocks");
    let header = [&first, "busy s", "neap / it", "RSS MiB at once", "+0.5 s", "+1 s", "+2 s", "CPU ms while idle"];
    table(&header, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_ratio_needs_every_size() {
        let ratio = |median: f64| Ratio {
            figure: None,
            workload: "64".to_string(),
            variant: "neap",
            against: "glibc",
            summary: Summary { median, min: median, max: median },
            pairs: 1,
        };
        assert_eq!(largest(vec![Some(ratio(0.5)), Some(ratio(1.5))]).unwrap().summary.median, 1.5);
        assert!(largest(vec![Some(ratio(0.5)), None]).is_none());
        assert!(largest(Vec::new()).is_none());
    }
}
