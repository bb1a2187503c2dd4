//! `neap bench accounting`: cost of malloc and free in a thread that is in a memory group, and in
//! one that is not.
//!
//! All variants use neap's library:
//!
//! * `neap`: in no group, in a process where no thread ever was in one;
//! * `inside`: in a group;
//! * `beside`: in no group, after the thread was in one;
//! * `old`: an older library that `--old` names.
//!
//! Figures:
//!
//! * `in_group_ratio`, `in_group_ratio_1k`: malloc and free of 64 bytes and of 1 KiB, inside over
//!   outside;
//! * `in_group_ratio_batch`: of 64 bytes, 1000 blocks at a time;
//! * `beside_ratio`: 64 bytes, beside over outside;
//! * `outside_ratio`: 64 bytes in no group, over the older library;
//! * `owner_bytes`, `owner_bytes_1k`: resident bytes that a block takes more inside than outside.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};

use super::{Options, Session, Workload};
use crate::library;
use crate::report::{cell, table};
use crate::variant::Missing;
use crate::work::{self, Outcome};

const INSIDE: &str = "inside";
const BESIDE: &str = "beside";
const OLD: &str = "old";
const PAIR: &str = "pair-64";
const PAIR_1K: &str = "pair-1k";
const BATCH: &str = "batch-64";
const KEPT: &str = "kept-64";
const KEPT_1K: &str = "kept-1k";

/// Resident bytes of a block.
fn bytes_each(outcome: &Outcome) -> f64 {
    let [before, after] = outcome.rss_kib[..] else { return 0.0 };
    (after as f64 - before as f64) * 1024.0 / outcome.operations.max(1) as f64
}

/// Sets the library of each variant.
fn prepare(session: &mut Session, old: Option<&PathBuf>) -> Result<()> {
    let new = library::find(&session.executable)?;
    if old.is_none() {
        session.found.variants.retain(|variant| variant.name != OLD);
        let reason = "no older library to compare with: `--old FILE` names one".to_string();
        session.found.missing.push(Missing { name: OLD.to_string(), reason });
    }
    for variant in &mut session.found.variants {
        let file = old.filter(|_| variant.name == OLD).unwrap_or(&new);
        let file = file.canonicalize().with_context(|| format!("cannot resolve {}", file.display()))?;
        library::check_preloadable(&file)?;
        variant.library = Some(file);
    }
    Ok(())
}

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::of_parts("accounting", &["neap", INSIDE, BESIDE, OLD])?;
    prepare(&mut session, options.old.as_ref())?;
    let (rounds, count) = (options.rounds(20), options.amount(20_000_000).to_string());
    let blocks = options.amount(500_000).to_string();
    let timed = |name: &str, arguments: &[&str]| Workload::timed(name, rounds, arguments);
    let kept = |name: &str, size: &str| Workload {
        unit: "bytes",
        metric: bytes_each,
        ..Workload::timed(name, rounds.min(3), &["grouped", "--size", size, "--blocks", &blocks])
    };
    let workloads = [
        timed(PAIR, &["pair", "--size", "64", "--count", &count]),
        timed(PAIR_1K, &["pair", "--size", "1024", "--count", &count]),
        timed(BATCH, &["batch", "--size", "64", "--order", "lifo", "--count", &count]),
        kept(KEPT, "64"),
        kept(KEPT_1K, "1024"),
    ];
    let executable = session.executable.clone();
    session.measure(&workloads, |variant, workload, _| {
        let mut arguments: Vec<&str> = workload.arguments.iter().map(String::as_str).collect();
        match variant.name {
            INSIDE => arguments.extend(["--group", "accounting"]),
            BESIDE if workload.name == PAIR => arguments.extend(["--visited", "accounting"]),
            BESIDE => return None,
            _ => {}
        }
        Some(work::measure(&executable, variant, &arguments).and_then(|outcome| {
            let library = variant.library.as_deref();
            ensure!(library == Some(Path::new(&outcome.malloc_from)), "malloc is that of {}", outcome.malloc_from);
            Ok(outcome)
        }))
    });
    for (name, variant, against, workload) in [
        ("in_group_ratio", INSIDE, "neap", PAIR),
        ("in_group_ratio_1k", INSIDE, "neap", PAIR_1K),
        ("in_group_ratio_batch", INSIDE, "neap", BATCH),
        ("beside_ratio", BESIDE, "neap", PAIR),
        ("outside_ratio", "neap", OLD, PAIR),
    ] {
        let ratio = session.ratio(variant, against, workload);
        session.figure_of_ratio(name, ratio);
    }
    for (name, workload) in [("owner_bytes", KEPT), ("owner_bytes_1k", KEPT_1K)] {
        let [inside, outside] = [INSIDE, "neap"].map(|variant| session.summary(variant, workload));
        session.figure(name, inside.zip(outside).map(|(inside, outside)| inside.median - outside.median));
    }
    let names: Vec<&str> = session.found.variants.iter().map(|variant| variant.name).collect();
    let row = |name: &str| {
        let cells = [PAIR, PAIR_1K, BATCH, KEPT, KEPT_1K].map(|workload| cell(session.summary(name, workload), 2));
        [name.to_string()].into_iter().chain(cells).collect()
    };
    let rows: Vec<Vec<String>> = names.into_iter().map(row).collect();
    let header = ["malloc", "ns, 64 B", "1 KiB", "64 B, 1000 at a time", "bytes for 64", "for 1024"];
    let tables = table(&header, &rows);
    session.finish(options.json, &tables)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_of_what_blocks_added() {
        let outcome = Outcome { operations: 512, rss_kib: vec![1000, 1036], ..Outcome::default() };
        assert_eq!(bytes_each(&outcome), 72.0);
        assert_eq!(bytes_each(&Outcome::default()), 0.0);
    }
}
