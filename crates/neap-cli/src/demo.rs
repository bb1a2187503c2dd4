//! `neap demo`: the burst-then-idle program under the system's malloc and under neap, side by side.
//!
//! It runs the workload of `neap bench idle` with one size and few rounds. It needs only the
//! library, takes under 20 seconds, and shows its measurements even where neap loses.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;

use crate::bench::{Session, Workload};
use crate::report::{cell, number, table};
use crate::statistics::summary;
use crate::variant::Choice;
use crate::work::{self, Outcome};

const EXAMPLES: &str = "\
Examples:
  neap demo              16 threads allocate and free 32 MiB each in 64-byte blocks, then sleep
  neap demo --size 4096  the same in blocks of 4096 bytes
  neap demo --json       one JSON object instead of the table";

/// Compare the memory that stays after a burst, under the system's malloc and under neap.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DemoOptions {
    /// Block size in bytes
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(16..=1 << 20))]
    size: u32,
    /// Print one JSON object; progress still goes to standard error
    #[arg(long)]
    json: bool,
}

const THREADS: usize = 16;
const MIB: usize = 32;
const ROUNDS: usize = 3;

pub(crate) fn main(options: &DemoOptions) -> Result<ExitCode> {
    let mut session = Session::new("demo", Choice::Defaults, &["glibc".to_string()])?;
    if session.found.variants.len() < 2 {
        bail!("the demo needs both the system's malloc and neap; `neap run true` tells why neap is missing");
    }
    session.found.variants.reverse();
    eprintln!(
        "{THREADS} threads allocate {MIB} MiB each in {} B blocks and free them, {ROUNDS} times, then sleep.",
        options.size
    );
    let (size, rounds) = (options.size.to_string(), ROUNDS.to_string());
    let workload = Workload {
        unit: "s",
        metric: Outcome::wall_seconds,
        // One half is added for the overhead of allocators.
        memory: (THREADS * MIB * 3 / 2) << 20,
        ..Workload::timed("burst", 1, &["idle", "--progress", "--size", &size, "--rounds", &rounds])
    };
    let executable = session.executable.clone();
    session.measure(&[workload], |variant, workload, _| {
        eprintln!("{}:", title(variant.name));
        let arguments: Vec<&str> = workload.arguments.iter().map(String::as_str).collect();
        Some(work::measure(&executable, variant, &arguments))
    });
    let rss = |name: &str, reading: usize| {
        let kib = session.outcomes(name, "burst").first()?.rss_kib.get(reading).copied();
        kib.map(|kib| kib as f64 / 1024.0)
    };
    let row = |name: &str| {
        let mut row = vec![title(name).to_string(), cell(session.summary(name, "burst"), 2)];
        row.extend((0..work::idle::READ_AT_MS.len()).map(|reading| cell(summary(rss(name, reading)), 0)));
        row
    };
    let header = ["", "busy s", "RSS MiB at once", "+0.5 s", "+1 s", "+2 s"];
    let mut tables = table(&header, &[row("glibc"), row("neap")]);
    let (kept, ours) = (rss("glibc", 3), rss("neap", 3));
    if let (Some(kept), Some(ours)) = (kept, ours) {
        tables += &format!(
            "\nTwo seconds after the burst the program holds {} MiB under the system's malloc and {} MiB under neap.\n",
            number(kept, 0),
            number(ours, 0)
        );
    }
    session.figure("system_rss_2s_mib", kept);
    session.figure("rss_2s_mib", ours);
    let ratio = session.ratio("neap", "glibc", "burst");
    session.figure_of_ratio("busy_ratio", ratio);
    session.finish(options.json, &tables)
}

fn title(variant: &str) -> &'static str {
    if variant == "neap" { "neap" } else { "system malloc" }
}
