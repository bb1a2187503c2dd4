//! `neap bench profile`: cost and accuracy of samples of allocations.
//!
//! Both variants use the same library: `neap` takes no samples, and `sampled` takes one in 512 KiB.
//! No command reads the samples while costs are measured.
//!
//! Figures:
//!
//! * `pair_on_ratio`: malloc and free of 64 bytes, with samples over without;
//! * `programs_on_ratio`: geometric mean of the processor times of real programs, with samples over
//!   without;
//! * `attribution_error`: 50 known functions hold a known number of bytes. The figure is the
//!   difference between that number and the bytes that a profile attributes to them, over that
//!   number. It is the median of the rounds;
//! * `site_error`: the mean of this error over the single functions;
//! * `unwound_share`: the part of the samples whose stack reaches `main` or the start of its
//!   thread: in the program of the functions, which is in Rust, in real ones in C and Python, and
//!   in one in C++, compiled by `-O2 -fomit-frame-pointer`.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};

use super::programs::{self, Program, Scratch, cpu_seconds};
use super::{Options, Session, Workload};
use crate::profile::{self, ChosenSamples, Profile, ProfileView};
use crate::report::{cell, table};
use crate::statistics::{geometric_mean, summary};
use crate::variant::Variant;
use crate::work::sites::{NAME, SITES, shares};
use crate::work::{self, Outcome};

/// Memory of the profile.
const MEMORY: usize = 1 << 30;
const SAMPLED: &str = "sampled";
const PAIR: &str = "pair-64";
const ATTRIBUTION: &str = "sites";
/// Real programs, unless others are named.
const PROGRAMS: [&str; 3] = ["python-lists", "lua", "redis"];

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::of_settings("profile", &[("neap", "profile:off"), (SAMPLED, "profile:on")])?;
    let scratch = Scratch::new(options.quick)?;
    let wanted: Vec<String> = match &options.programs[..] {
        [] => PROGRAMS.map(String::from).into(),
        named => named.to_vec(),
    };
    let programs = programs::installed(&scratch, &wanted, &mut session.found.missing)?;
    let frameless = programs::prepared(&scratch, [programs::frameless::program()], &mut session.found.missing);
    let (rounds, count) = (options.rounds(15), options.amount(20_000_000).to_string());
    let mib = options.amount(512).to_string();
    let mut workloads = vec![
        Workload::timed(PAIR, rounds, &["pair", "--size", "64", "--count", &count]),
        Workload {
            unit: "share of the bytes that is wrong",
            metric: |outcome| outcome.count("error"),
            ..Workload::timed(ATTRIBUTION, options.rounds(5), &["sites", "--mib", &mib])
        },
    ];
    workloads.extend(programs.iter().map(|program| Workload {
        unit: "s of processor time",
        metric: cpu_seconds,
        ..Workload::timed(program.name, options.rounds(7), &[])
    }));
    let executable = session.executable.clone();
    session.measure(&workloads, |variant, workload, _| {
        let arguments: Vec<&str> = workload.arguments.iter().map(String::as_str).collect();
        match programs.iter().find(|program| program.name == workload.name) {
            Some(program) => Some(program.run(&scratch, variant)),
            None if workload.name == PAIR => Some(work::measure(&executable, variant, &arguments)),
            None if variant.name != SAMPLED => None,
            None => Some(attribution(&mut work::command(&executable, variant, &arguments), options.amount(512))),
        }
    });
    let names: Vec<&'static str> = programs.iter().map(|program| program.name).collect();
    let unwound = unwound(&session, &scratch, programs.iter().chain(&frameless));
    figures(&mut session, &names, &unwound);
    let tables = tables(&session, &names, &unwound);
    session.finish(options.json, &tables)
}

/// Runs the program of the sites, and compares its profile with the bytes that the sites hold.
fn attribution(command: &mut Command, mib: u64) -> Result<Outcome> {
    let profile = profiled(command)?;
    let truth = shares((mib as usize) << 20).map(|(count, size)| (count * size) as f64);
    let mut found = [0.0; SITES];
    for row in &profile.rows {
        if let Some(site) = profile.stacks[row.stack].iter().flat_map(|place| place.lines.iter()).find_map(site) {
            found[site] += row.sums.peak.bytes;
        }
    }
    let (all, seen): (f64, f64) = (truth.iter().sum(), found.iter().sum());
    let each = truth.iter().zip(found).map(|(truth, found)| (found / truth - 1.0).abs());
    let mut outcome = Outcome { operations: 1, ..Outcome::default() };
    outcome.counts.insert("error".to_string(), (seen / all - 1.0).abs());
    outcome.counts.insert("site_error".to_string(), each.sum::<f64>() / SITES as f64);
    note_stacks(&mut outcome, &profile);
    Ok(outcome)
}

/// Returns the number of the site whose function the line names. `None` for another function.
fn site(line: &profile::SourceLine) -> Option<usize> {
    let (_, rest) = line.function.rsplit_once(NAME)?;
    let digits = rest.split(|byte: char| !byte.is_ascii_digit()).next()?;
    digits.parse().ok().filter(|site| *site < SITES)
}

fn note_stacks(outcome: &mut Outcome, profile: &Profile) {
    let all = profile.complete + profile.incomplete + profile.without_stack;
    outcome.counts.insert("complete".to_string(), profile.complete as f64);
    outcome.counts.insert("samples".to_string(), all as f64);
}

/// Runs a program from its start to its end, and returns its profile.
fn profiled(command: &mut Command) -> Result<Profile> {
    let mut taken = None;
    command.stdout(std::process::Stdio::null());
    let status = profile::record(command, MEMORY, &mut |session, of| {
        taken = Some(Profile::of(session, of, ProfileView::Peak, ChosenSamples::default()));
        Ok(())
    })?;
    ensure!(status == ExitCode::SUCCESS, "the program of the profile has failed");
    taken.context("there is no profile")
}

/// Returns samples with a whole stack, and all samples, of each program that runs as one command.
fn unwound<'a>(
    session: &Session,
    scratch: &Scratch,
    programs: impl Iterator<Item = &'a Program>,
) -> Vec<(&'static str, f64, f64)> {
    let sampled = session.found.variants.iter().find(|variant| variant.name == SAMPLED);
    let of_program = |program: &Program, sampled: &Variant| {
        let mut command = program.command(scratch)?.ok()?;
        sampled.apply(&mut command);
        let profile = profiled(&mut command).inspect_err(|error| eprintln!("{}: {error:#}", program.name)).ok()?;
        let mut outcome = Outcome::default();
        note_stacks(&mut outcome, &profile);
        Some((program.name, outcome.count("complete"), outcome.count("samples")))
    };
    let programs = programs.filter_map(|program| of_program(program, sampled?));
    let sites = session.outcomes(SAMPLED, ATTRIBUTION);
    let sum = |name: &str| sites.iter().map(|outcome| outcome.count(name)).sum::<f64>();
    [(ATTRIBUTION, sum("complete"), sum("samples"))].into_iter().chain(programs).collect()
}

fn figures(session: &mut Session, programs: &[&'static str], unwound: &[(&str, f64, f64)]) {
    let pair = session.ratio(SAMPLED, "neap", PAIR);
    session.figure_of_ratio("pair_on_ratio", pair);
    let ratios = programs.iter().filter_map(|program| session.ratio(SAMPLED, "neap", program));
    let medians: Vec<f64> = ratios.map(|ratio| ratio.summary.median).collect();
    session.figure("programs_on_ratio", geometric_mean(&medians));
    for (figure, count) in [("attribution_error", "error"), ("site_error", "site_error")] {
        let errors = session.outcomes(SAMPLED, ATTRIBUTION).iter().map(|outcome| outcome.count(count));
        let errors = summary(errors).map(|errors| errors.median);
        session.figure(figure, errors);
    }
    let (whole, all) = unwound.iter().fold((0.0, 0.0), |sum, (_, whole, all)| (sum.0 + whole, sum.1 + all));
    session.figure("unwound_share", (all > 0.0).then(|| whole / all));
}

fn tables(session: &Session, programs: &[&'static str], unwound: &[(&str, f64, f64)]) -> String {
    let costs = [PAIR].into_iter().chain(programs.iter().copied()).map(|workload| {
        let ratio = session.ratio(SAMPLED, "neap", workload).map(|ratio| ratio.summary);
        let of = |variant: &str| cell(session.summary(variant, workload), 2);
        vec![workload.to_string(), of("neap"), of(SAMPLED), cell(ratio, 3)]
    });
    let costs = table(&["cost (ns, s)", "without", "with samples", "ratio"], &costs.collect::<Vec<_>>());
    let stacks = unwound.iter().map(|(name, whole, all)| {
        vec![name.to_string(), format!("{all:.0}"), format!("{:.2} %", 100.0 * whole / all.max(1.0))]
    });
    let stacks = table(&["stacks", "samples", "reach main or the thread's start"], &stacks.collect::<Vec<_>>());
    let error = |count: &str| {
        let errors = session.outcomes(SAMPLED, ATTRIBUTION).iter().map(|outcome| 100.0 * outcome.count(count));
        cell(summary(errors), 1)
    };
    format!(
        "{costs}\n{stacks}\nBytes of 50 functions that the profile gets wrong: {} % of the sum, {} % of one function's.",
        error("error"),
        error("site_error")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_is_the_site_of_its_number() {
        let line = |function: &str| profile::SourceLine {
            function: function.into(),
            system_name: "".into(),
            source: "".into(),
            line: 0,
        };
        assert_eq!(site(&line("neap::work::sites::site_of_7")), Some(7));
        assert_eq!(site(&line("neap::work::sites::site_of_49::h0123")), Some(49));
        assert_eq!(["neap::main", "site_of_50", "site_of_"].map(|name| site(&line(name))), [None; 3]);
    }

    #[test]
    fn the_sites_share_all_bytes() {
        let shares = shares(512 << 20);
        let bytes: usize = shares.iter().map(|(count, size)| count * size).sum();
        assert!(bytes > 500 << 20 && bytes <= 512 << 20, "{bytes}");
        assert!(shares.iter().all(|(count, _)| *count > 10));
    }
}
