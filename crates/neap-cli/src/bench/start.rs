//! `neap bench start`: cost of preloading for a program that does nothing.
//!
//! A round starts `/bin/true` a thousand times by posix_spawn, and waits for each process before it
//! starts the next. The environment consists of the variant's variables.
//!
//! Figures: `start_ratio` is the time with neap over the time without a preloaded library.
//! `start_ratio_cpu` is the same ratio of processor time. The other allocators have no figure.
//! The report shows them, and they run in the first rounds only.

use std::ffi::{CString, OsString};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::{Options, Reading, Session, Workload};
use crate::process::cpu_ns;
use crate::report::{cell, table};
use crate::variant::{Choice, Variant};
use crate::work::Outcome;

const PROGRAM: &str = "/bin/true";

/// Rounds that peers take part in.
const PEER_ROUNDS: usize = 3;

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::new("start", Choice::Speed, &options.against)?;
    let count = options.amount(1000);
    let workload = Workload {
        unit: "us",
        metric: |outcome| outcome.ns_each() / 1000.0,
        ..Workload::timed("start", options.rounds(20), &[])
    };
    session.measure(&[workload], |variant, _, round| {
        let counts = variant.is_neap() || variant.name == "glibc";
        (counts || round < PEER_ROUNDS).then(|| spawn(variant, count))
    });
    for (name, reading) in [("start_ratio", None), ("start_ratio_cpu", Some(Outcome::cpu_ns_each as Reading))] {
        let ratio = session.ratio_of("neap", "glibc", "start", reading);
        session.figure_of_ratio(name, ratio);
    }
    let tables = tables(&session);
    session.finish(options.json, &tables)
}

fn tables(session: &Session) -> String {
    let row = |variant: &Variant| {
        let cpu = |outcome: &Outcome| outcome.cpu_ns_each() / 1000.0;
        let faults = |outcome: &Outcome| outcome.minor_faults as f64 / outcome.operations.max(1) as f64;
        vec![
            variant.name.to_string(),
            cell(session.summary(variant.name, "start"), 0),
            session.ratio_cell(variant, "start"),
            cell(session.summary_of(variant.name, "start", cpu), 0),
            cell(session.summary_of(variant.name, "start", faults), 0),
        ]
    };
    let rows: Vec<Vec<String>> = session.found.variants.iter().map(row).collect();
    table(&["/bin/true", "us from start to end", "neap / it", "CPU us", "page faults"], &rows)
}

/// Starts and awaits the program `count` times.
fn spawn(variant: &Variant, count: u64) -> Result<Outcome> {
    let program = CString::new(PROGRAM)?;
    let mut variables = Vec::new();
    for (name, value) in variant.variables() {
        let mut text = OsString::from(name);
        text.push("=");
        text.push(value);
        variables.push(CString::new(text.into_vec()).context("a variable with a zero byte")?);
    }
    let mut environment: Vec<*mut libc::c_char> = variables.iter().map(|text| text.as_ptr().cast_mut()).collect();
    environment.push(std::ptr::null_mut());
    let arguments = [program.as_ptr().cast_mut(), std::ptr::null_mut()];
    let before = children_usage();
    let started = Instant::now();
    for _ in 0..count {
        let mut child = 0;
        // SAFETY: the strings and both null-terminated arrays live until the end of this function.
        let error = unsafe {
            libc::posix_spawn(
                &mut child,
                program.as_ptr(),
                std::ptr::null(),
                std::ptr::null(),
                arguments.as_ptr(),
                environment.as_ptr(),
            )
        };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error)).with_context(|| format!("cannot run {PROGRAM}"));
        }
        let mut status = 0;
        // SAFETY: the status is a live local. The process is a child of this one, and nothing else
        // waits for it.
        if unsafe { libc::waitpid(child, &mut status, 0) } != child {
            return Err(io::Error::last_os_error()).with_context(|| format!("cannot wait for {PROGRAM}"));
        }
        if status != 0 {
            bail!("{PROGRAM} ended with wait status {status:#x}");
        }
    }
    let wall_ns = started.elapsed().as_nanos() as u64;
    let after = children_usage();
    Ok(Outcome {
        operations: count,
        wall_ns,
        cpu_ns: cpu_ns(&after) - cpu_ns(&before),
        minor_faults: (after.ru_minflt - before.ru_minflt) as u64,
        ..Outcome::default()
    })
}

fn children_usage() -> libc::rusage {
    // SAFETY: all-zero bytes are a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live local; RUSAGE_CHILDREN cannot fail.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) };
    usage
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::variant::AllocatorKind;

    #[test]
    fn every_start_is_counted() {
        let plain = Variant {
            name: "glibc",
            kind: AllocatorKind::Peer,
            library: None,
            environment: Vec::new(),
            release_thread: false,
        };
        let outcome = spawn(&plain, 3).unwrap();
        assert_eq!(outcome.operations, 3);
        assert!(outcome.wall_ns > 0 && outcome.minor_faults > 0);
    }
}
