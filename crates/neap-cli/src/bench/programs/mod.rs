//! `neap bench programs`: real programs that are installed, under each allocator.
//!
//! Figures:
//!
//! * `programs_differing`: programs with another output or exit status under neap than without a
//!   preload;
//! * `peak_rss_ratio`: geometric mean of peak resident memory, neap's over the best peer's;
//! * `redis_rss_2s_mib`, `python_rss_2s_mib`: resident two seconds after everything was freed;
//! * `redis_cpu_ratio`: server time per request, best run under neap over best run under jemalloc;
//! * `redis_series_ratio_jemalloc`: peak of a redis with values of changing sizes, neap's over
//!   jemalloc's;
//! * `cpu_geomean_ratio`, `worst_cpu_ratio` (processor time), `rss_geomean_ratio` (peaks of more
//!   than 15 MiB): neap over the best allocator of each program, neap included.
//!
//! Inputs are generated in a temporary folder that is removed at the end.

pub(super) mod boxed;
mod costs;
pub(super) mod frameless;
mod languages;
mod ordinary;
mod python;
mod redis;
mod scratch;
mod series;
mod tools;

use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::{Options, Session, Workload, default_peers};
use crate::process::{self, Finished, cpu_ns};
use crate::report::{cell, number, table};
use crate::statistics::geometric_mean;
use crate::variant::{AllocatorKind, Choice, Missing, Variant};
use crate::work::Outcome;
pub(super) use costs::cpu_seconds;
pub(super) use scratch::Scratch;

/// Longest time of any program.
const LIMIT: Duration = Duration::from_secs(300);

/// More than any of the programs uses.
const MEMORY: usize = 640 << 20;

/// Usual number of rounds of every program and variant. One round is not enough: under most
/// allocators the peaks of node and java take one of two values, which differ by a seventh or more.
const ROUNDS: usize = 3;

/// Rounds of redis for neap and jemalloc, whose processor times are compared by the best run.
const REDIS_ROUNDS: usize = 5;

/// A program that can be run here.
pub(super) struct Program {
    pub(super) name: &'static str,
    /// Programs that must be installed.
    needs: &'static [&'static str],
    /// Generates its input.
    prepare: fn(&Scratch) -> Result<()>,
    run: Method,
}

/// Ways to run and measure a program.
enum Method {
    /// Start it, read its output, wait for its end.
    Through(fn(&Scratch) -> Result<Command>),
    /// Call a function that runs the program and measures it.
    Own(fn(&Scratch, &Variant) -> Result<Outcome>),
}

impl Program {
    /// Runs the program on a variant, and measures it.
    pub(super) fn run(&self, scratch: &Scratch, variant: &Variant) -> Result<Outcome> {
        match self.run {
            Method::Own(run) => run(scratch, variant),
            Method::Through(_) => {
                let command = self.command(scratch).context("it has a command")??;
                run_through(scratch, command, variant)
            }
        }
    }

    /// Returns the command of a program that runs as one command; `None` for `Method::Own`.
    pub(super) fn command(&self, scratch: &Scratch) -> Option<Result<Command>> {
        match self.run {
            Method::Own(_) => None,
            Method::Through(command) => Some(command(scratch)),
        }
    }
}

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::new("programs", Choice::Defaults, &options.against)?;
    if !session.found.variants.iter().any(|variant| variant.name == "glibc") {
        bail!("--against: `programs` needs glibc, since it compares every output with the output under glibc");
    }
    let scratch = Scratch::new(options.quick)?;
    let programs = installed(&scratch, &options.programs, &mut session.found.missing)?;
    let rounds = options.rounds(ROUNDS);
    let redis_rounds = if options.quick { rounds } else { rounds.max(REDIS_ROUNDS) };
    let workloads: Vec<Workload> = programs
        .iter()
        .map(|program| Workload {
            unit: "MiB at the peak",
            metric: peak_mib,
            memory: MEMORY,
            ..Workload::timed(program.name, if program.name == "redis" { redis_rounds } else { rounds }, &[])
        })
        .collect();
    session.measure(&workloads, |variant, workload, round| {
        if round >= rounds && !matches!(variant.name, "neap" | "jemalloc") {
            return None;
        }
        let program = programs.iter().find(|program| program.name == workload.name)?;
        eprintln!("neap bench programs: {} on {}", program.name, variant.name);
        Some(program.run(&scratch, variant))
    });
    let names: Vec<&'static str> = programs.iter().map(|program| program.name).collect();
    figures(&mut session, &names);
    let tables = tables(&session, &names);
    session.finish(options.json, &tables)
}

/// All programs of the benchmark.
fn programs() -> Vec<Program> {
    let more = [python::program(), redis::program(), series::program()];
    let groups = [ordinary::programs(), languages::programs(), tools::programs(), more.into()];
    groups.into_iter().flatten().collect()
}

/// Returns the installed ones of the requested programs (of all if none is named), with their
/// inputs generated. Adds the others to `missing`.
pub(super) fn installed(scratch: &Scratch, wanted: &[String], missing: &mut Vec<Missing>) -> Result<Vec<Program>> {
    let all = programs();
    if let Some(unknown) = wanted.iter().find(|name| all.iter().all(|program| program.name != **name)) {
        let known: Vec<&str> = all.iter().map(|program| program.name).collect();
        bail!("--programs: no program is called `{unknown}`; there are {}", known.join(", "));
    }
    let is_wanted = |program: &Program| wanted.is_empty() || wanted.iter().any(|name| name == program.name);
    Ok(prepared(scratch, all.into_iter().filter(is_wanted), missing))
}

/// Returns the programs that can be run here, with their inputs generated. Adds the others to
/// `missing`.
pub(super) fn prepared(
    scratch: &Scratch,
    programs: impl IntoIterator<Item = Program>,
    missing: &mut Vec<Missing>,
) -> Vec<Program> {
    let mut ready = Vec::new();
    for program in programs {
        let absent = program.needs.iter().find(|tool| scratch.tool(tool).is_err());
        let reason = match absent {
            Some(tool) => Some(format!("`{tool}` is not installed (apt-get install {})", scratch::package(tool))),
            None => (program.prepare)(scratch).err().map(|error| format!("{error:#}")),
        };
        match reason {
            None => ready.push(program),
            Some(reason) => {
                eprintln!("neap bench programs: {} is left out: {reason}", program.name);
                missing.push(Missing { name: program.name.to_string(), reason });
            }
        }
    }
    ready
}

/// Runs a command on a variant from start to end.
fn run_through(scratch: &Scratch, mut command: Command, variant: &Variant) -> Result<Outcome> {
    variant.apply(&mut command);
    command.stderr(scratch.errors()?);
    let mut output = Output::default();
    let finished = process::run(command, LIMIT, |bytes| output.add(bytes))?;
    if !finished.status.success() {
        scratch.show_errors();
    }
    Ok(output.outcome(&finished))
}

/// A command whose standard input is empty, run in the scratch folder.
fn tool(scratch: &Scratch, name: &str) -> Result<Command> {
    let mut command = Command::new(scratch.tool(name)?);
    command.current_dir(scratch.folder()).stdin(Stdio::null()).env("LC_ALL", "C");
    Ok(command)
}

/// Length and hash (FNV-1a, 64 bits) of a standard output.
struct Output {
    hash: u64,
    length: u64,
}

impl Default for Output {
    fn default() -> Output {
        Output { hash: 0xcbf2_9ce4_8422_2325, length: 0 }
    }
}

impl Output {
    fn add(&mut self, bytes: &[u8]) {
        self.length += bytes.len() as u64;
        for byte in bytes {
            self.hash = (self.hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn outcome(&self, finished: &Finished) -> Outcome {
        Outcome {
            operations: 1,
            wall_ns: finished.wall.as_nanos() as u64,
            cpu_ns: cpu_ns(&finished.usage),
            minor_faults: finished.usage.ru_minflt as u64,
            voluntary_switches: finished.usage.ru_nvcsw as u64,
            involuntary_switches: finished.usage.ru_nivcsw as u64,
            peak_rss_kib: Some(finished.usage.ru_maxrss as u64),
            output: Some(format!("{}, {} bytes, {:016x}", finished.status, self.length, self.hash)),
            ..Outcome::default()
        }
    }
}

fn peak_mib(outcome: &Outcome) -> f64 {
    outcome.peak_rss_kib.unwrap_or(0) as f64 / 1024.0
}

/// Resident MiB two seconds after everything was freed.
fn kept_mib(outcome: &Outcome) -> f64 {
    outcome.rss_kib.last().copied().unwrap_or(0) as f64 / 1024.0
}

fn figures(session: &mut Session, programs: &[&'static str]) {
    if session.found.variants.iter().any(|variant| variant.kind == AllocatorKind::Neap) {
        let differing = programs.iter().filter(|program| differs(session, "neap", program)).count();
        session.figure("programs_differing", Some(differing as f64));
    }
    let ratio = peak_ratio(session, programs);
    session.figure("peak_rss_ratio", ratio.map(|(ratio, _)| ratio));
    for program in ["redis", "python"] {
        let kept = session.summary_of("neap", program, kept_mib);
        session.figure(&format!("{program}_rss_2s_mib"), kept.map(|kept| kept.max));
    }
    let best = |variant: &str| Some(session.summary_of(variant, "redis", Outcome::cpu_ns_each)?.min);
    let redis = best("neap").zip(best("jemalloc")).map(|(ours, theirs)| ours / theirs);
    session.figure("redis_cpu_ratio", redis);
    let series = |variant: &str| Some(session.summary(variant, series::NAME)?.median);
    let series = series("neap").zip(series("jemalloc")).map(|(ours, theirs)| ours / theirs);
    session.figure("redis_series_ratio_jemalloc", series);
    costs::figures(session, programs);
}

/// Whether a program did not end, or ended with another status or output than without a preload.
fn differs(session: &Session, variant: &str, program: &str) -> bool {
    let expected = session.outcomes("glibc", program).first().and_then(|outcome| outcome.output.as_ref());
    let outcomes = session.outcomes(variant, program);
    outcomes.is_empty() || outcomes.iter().any(|outcome| outcome.output.as_ref() != expected)
}

/// neap's geometric mean of peaks over that of the best peer, and the peer's name. A peer counts if
/// it ran every program that neap ran.
fn peak_ratio(session: &Session, programs: &[&'static str]) -> Option<(f64, &'static str)> {
    let ran: Vec<&str> =
        programs.iter().copied().filter(|program| session.summary("neap", program).is_some()).collect();
    let mean = |variant: &str| {
        let peaks: Option<Vec<f64>> =
            ran.iter().map(|program| Some(session.summary(variant, program)?.median)).collect();
        geometric_mean(&peaks?)
    };
    let ours = mean("neap")?;
    let peers = session.found.variants.iter().filter(|variant| default_peers(variant));
    let means = peers.filter_map(|peer| Some((mean(peer.name)?, peer.name)));
    means.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(theirs, name)| (ours / theirs, name))
}

fn tables(session: &Session, programs: &[&'static str]) -> String {
    let variants: Vec<&'static str> = session.found.variants.iter().map(|variant| variant.name).collect();
    let one = |title: &str, programs: &[&'static str], value: &dyn Fn(&str, &str) -> String| {
        let header: Vec<&str> = [title].into_iter().chain(variants.iter().copied()).collect();
        let row = |program: &&'static str| {
            [program.to_string()].into_iter().chain(variants.iter().map(|name| value(name, program))).collect()
        };
        table(&header, &programs.iter().map(row).collect::<Vec<Vec<String>>>())
    };
    let mark = |name: &str, program: &str| if differs(session, name, program) { " differs" } else { "" };
    let peaks =
        one("peak MiB", programs, &|name, program| cell(session.summary(name, program), 0) + mark(name, program));
    let times = one("CPU s", programs, &|name, program| cell(session.summary_of(name, program, costs::cpu_seconds), 2));
    let faults = one("thousand minor faults", programs, &|name, program| {
        let thousands = |outcome: &Outcome| outcome.minor_faults as f64 / 1e3;
        cell(session.summary_of(name, program, thousands), 1)
    });
    let idle: Vec<&'static str> = programs.iter().copied().filter(|name| matches!(*name, "redis" | "python")).collect();
    let kept = one("MiB kept at +2 s", &idle, &|name, program| cell(session.summary_of(name, program, kept_mib), 0));
    let mut notes = String::new();
    if let Some((ratio, peer)) = peak_ratio(session, programs) {
        notes += &format!("\nPeak memory, geometric mean: {} x that of {peer}, the best peer.", number(ratio, 3));
    }
    if let Some(outcome) = session.outcomes("glibc", "redis").first() {
        notes += &format!("\nredis without a preload takes malloc from {}.", outcome.malloc_from);
    }
    format!("{peaks}\n{times}\n{faults}\n{kept}{notes}\n")
}

/// Reads the standard output of `process` until a line ends with `word`.
///
/// # Errors
/// The output cannot be read, or the program ended before such a line.
fn read_until(process: &mut process::Process, output: &mut Output, word: &str) -> Result<()> {
    let mut text = Vec::new();
    process.read(|bytes| {
        output.add(bytes);
        text.extend_from_slice(bytes);
        !text.ends_with(format!("{word}\n").as_bytes())
    })?;
    let said = text.ends_with(format!("{word}\n").as_bytes());
    said.then_some(()).with_context(|| format!("the program ended before it said `{word}`"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::{session, variant};

    #[test]
    fn the_hash_does_not_depend_on_how_output_arrives() {
        let (mut whole, mut parts) = (Output::default(), Output::default());
        whole.add(b"hello");
        parts.add(b"hel");
        parts.add(b"lo");
        assert_eq!((whole.hash, whole.length), (parts.hash, parts.length));
        // The published test vector of FNV-1a for "hello".
        assert_eq!(whole.hash, 0xa430_d846_80aa_bd0b);
    }

    /// Two programs; `say` returns output and peak in MiB by variant and program, or `None` for a
    /// failure.
    fn measured(say: impl Fn(&str, &str) -> Option<(&'static str, u64)>) -> Session {
        let variants = [
            ("neap", AllocatorKind::Neap),
            ("glibc", AllocatorKind::Peer),
            ("small", AllocatorKind::Peer),
            ("broken", AllocatorKind::Peer),
        ];
        let mut session = session(variants.map(|(name, kind)| variant(name, kind)).to_vec());
        let workloads = ["one", "two"].map(|name| Workload { metric: peak_mib, ..Workload::timed(name, 1, &[]) });
        session.measure(&workloads, |variant, workload, _| {
            let (output, peak) = match say(variant.name, &workload.name) {
                None => return Some(Err(anyhow::anyhow!("signal 11"))),
                Some(said) => said,
            };
            let peak_rss_kib = Some(peak * 1024);
            Some(Ok(Outcome { output: Some(output.to_string()), peak_rss_kib, ..Outcome::default() }))
        });
        session
    }

    #[test]
    fn another_output_and_no_end_are_differences() {
        let mut session = measured(|variant, program| match (variant, program) {
            ("neap", "one") => Some(("other", 1)),
            ("neap", "two") => None,
            _ => Some(("same", 1)),
        });
        figures(&mut session, &["one", "two"]);
        assert_eq!(session.figures["programs_differing"], 2.0);
        assert!(!differs(&session, "small", "one") && !differs(&session, "small", "two"));
    }

    #[test]
    fn the_best_peer_has_run_every_program() {
        let mut session = measured(|variant, program| match (variant, program) {
            ("neap", "one") => Some(("same", 20)),
            ("neap", _) => Some(("same", 5)),
            ("glibc", _) => Some(("same", 50)),
            ("small", "one") => Some(("same", 4)),
            ("small", _) => Some(("same", 16)),
            (_, "one") => Some(("same", 1)),
            _ => None,
        });
        assert_eq!(peak_ratio(&session, &["one", "two"]).unwrap().1, "small");
        figures(&mut session, &["one", "two"]);
        assert_eq!(session.figures["peak_rss_ratio"], 1.25);
        assert_eq!(session.figures["programs_differing"], 0.0);
        assert!(!session.figures.contains_key("redis_rss_2s_mib"));
        assert!(!session.figures.contains_key("redis_series_ratio_jemalloc"));
    }

    #[test]
    fn series_peak_is_compared_with_that_of_jemalloc() {
        let variants =
            [("neap", AllocatorKind::Neap), ("glibc", AllocatorKind::Peer), ("jemalloc", AllocatorKind::Peer)];
        let mut session = session(variants.map(|(name, kind)| variant(name, kind)).to_vec());
        let workload = Workload { metric: peak_mib, ..Workload::timed(series::NAME, 1, &[]) };
        session.measure(&[workload], |variant, _, _| {
            let peak_rss_kib = Some(if variant.name == "neap" { 900 } else { 600 });
            Some(Ok(Outcome { peak_rss_kib, ..Outcome::default() }))
        });
        figures(&mut session, &[series::NAME]);
        assert_eq!(session.figures["redis_series_ratio_jemalloc"], 1.5);
    }

    #[test]
    fn every_program_has_a_name_of_its_own() {
        let all = programs();
        let mut names: Vec<&str> = all.iter().map(|program| program.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all.len());
        assert!(all.iter().all(|program| !program.needs.is_empty()));
    }
}
