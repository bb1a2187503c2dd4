//! bpftrace counts samples by the probes of the preload library.
//!
//! `symbols` reads the notes that describe the probes. This check has a tracer find their places
//! and arguments: the address, the size and the weight of an allocation, and the address of its
//! free. It needs bpftrace, and the right to trace.

use core::time::Duration;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::process::{Outcome, command, observe, observe_lines, which};
use crate::report::Report;
use crate::smoke::{DEFAULT, preload};
use crate::target::Target;
use crate::{layout, programs};

const CHECK: &str = "bpftrace counts samples";

/// Most time of bpftrace, against a hang. It waits for a probe that may never be passed.
const LIMIT: Duration = Duration::from_secs(60);

/// The numbers of `tests/programs/probed.c`.
const BLOCKS: u64 = 200;
const BYTES: u64 = 100_003;
const LAST: u64 = 200_003;

/// The script for bpftrace. With a mean of 1 KiB practically every block is a sample, and weighs
/// its size.
fn script(library: &Path) -> String {
    let probe = format!("usdt:{}:otel_memory", library.display());
    format!(
        "BEGIN {{ printf(\"attached\\n\"); }}\n\
         {probe}:alloc / arg1 == {BYTES} / {{ @allocated = count(); @bytes = sum(arg2); @held[arg0] = 1; }}\n\
         {probe}:free / @held[arg0] == 1 / {{ @freed = count(); delete(@held[arg0]); }}\n\
         {probe}:alloc / arg1 == {LAST} / {{ exit(); }}\n"
    )
}

/// Checks the built library, counted in a report with other checks.
pub(crate) fn into(report: &mut Report) -> Result<()> {
    if which("bpftrace").is_none() {
        report.skip(CHECK, "bpftrace is not installed");
        return Ok(());
    }
    let able = observe(command("bpftrace", ["-e", "BEGIN { exit(); }"]), LIMIT)?;
    if !able.success() {
        report.skip(CHECK, &format!("it may not trace here: {}", able.summary()));
        return Ok(());
    }
    let (library, scratch) = (layout::library(), layout::target().join("probes"));
    fs::create_dir_all(&scratch)?;
    let program = programs::compile(Target::Native, &layout::root().join("tests/programs/probed.c"), &[], &scratch)?;
    let mut traced = Command::new(program);
    preload(&mut traced, &library, &DEFAULT);
    traced.env("NEAP", "profile:1k");
    let traced = std::sync::Mutex::new(traced);
    let found = observe_lines(command("bpftrace", ["-B", "line", "-e", &script(&library)]), LIMIT, move |line| {
        if line.trim() == "attached" {
            // The counts show whether the program ran.
            let _ = traced.lock().unwrap_or_else(|e| e.into_inner()).status();
        }
    })?;
    report.check(CHECK, counted(&found));
    Ok(())
}

/// Whether bpftrace printed the program's numbers.
fn counted(found: &Outcome) -> Result<()> {
    let text = String::from_utf8_lossy(&found.stdout);
    let count = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")?.parse().ok());
    let numbers = ["@allocated", "@bytes", "@freed"].map(count);
    let expected = [BLOCKS, BLOCKS * BYTES, BLOCKS].map(Some);
    ensure!(numbers == expected, "{numbers:?} for {expected:?}\n{text}{}", found.summary());
    Ok(())
}
