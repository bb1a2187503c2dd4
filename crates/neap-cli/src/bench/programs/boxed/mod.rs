//! `neap bench boxed`: real programs in a memory group of the kernel (a cgroup), under each
//! allocator.
//!
//! Each program comes near its limit in six turns. Each turn uses blocks of another size:
//!
//! * `redis`: a command of redis's own tests fills the database to four fifths of the limit. Then
//!   500 single requests are made, and the database is flushed;
//! * `memcached`: requests of its protocol fill it to its own limit, four fifths of the group's;
//! * `python`: a parent with a table of a fifth of the limit has forked four workers, which build
//!   and drop dictionaries of 15 % of the limit each;
//! * `postgres`: three sessions with parallel workers build a hash table each, together four fifths
//!   of the limit;
//! * `node`, `java`: buffers outside of the language's own heap, of 60 % of the limit.
//!
//! Memory that an allocator keeps for one size cannot serve the next. Then the kernel kills the
//! program, or its malloc refuses memory. Scripts print how a run ended and its slowest request or
//! turn.
//!
//! Figures: `killed`, `refused` and `runs` count runs of `neap-auto`, which is neap with
//! `limit:auto`. `baseline_killed` counts killed runs of all allocators but neap.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::redis::{Reply, Server};
use super::scratch::{Scratch, package};
use super::series::{BESIDE, VALUES, allow_debug};
use super::{LIMIT, tool};
use crate::bench::cgroup::{Cgroup, Groups};
use crate::bench::{NOT_MEASURED, Options, Session, Workload};
use crate::process::Process;
use crate::report::{cell, table};
use crate::statistics::{Summary, summary};
use crate::variant::{Choice, Missing, Variant};
use crate::work::Outcome;

const AUTO: &str = "neap-auto";
/// MiB.
const MIB: u64 = 512;
const ROUNDS: usize = 2;
/// Single requests after each fill of redis.
const REQUESTS: usize = 500;
const KILLED: &str = "killed";
const REFUSED: &str = "refused";
const SLOWEST: &str = "slowest_ms";

/// A real program, and how it is run in a memory group.
struct Boxed {
    name: &'static str,
    /// Programs that must be installed.
    needs: &'static [&'static str],
    method: Method,
}

#[derive(Clone, Copy)]
enum Method {
    /// redis-server, with this benchmark's own client.
    Redis,
    /// A command that runs in the group and prints how it ended.
    Inside(&'static [&'static str]),
    /// A Python script that starts a server in the group, and prints how the server ended.
    Driver(&'static str),
}

const PROGRAMS: [Boxed; 6] = [
    Boxed { name: "redis", needs: &["redis-server"], method: Method::Redis },
    Boxed { name: "memcached", needs: &["memcached", "python3"], method: Method::Driver("memcached.py") },
    Boxed { name: "python", needs: &["python3"], method: Method::Inside(&["python3", "forks.py"]) },
    Boxed { name: "postgres", needs: &["postgres", "psql", "python3"], method: Method::Driver("postgres.py") },
    Boxed { name: "node", needs: &["node"], method: Method::Inside(&["node", "--expose-gc", "buffers.js"]) },
    Boxed { name: "java", needs: &["java", "javac"], method: Method::Inside(JAVA) },
];

const JAVA: &[&str] =
    &["java", "-Xmx64m", "-XX:+UseSerialGC", "-XX:MaxDirectMemorySize=16g", "-cp", "classes", "Buffers"];

const SCRIPTS: [(&str, &str); 6] = [
    ("driver.py", include_str!("driver.py")),
    ("memcached.py", include_str!("memcached.py")),
    ("forks.py", include_str!("forks.py")),
    ("postgres.py", include_str!("postgres.py")),
    ("buffers.js", include_str!("buffers.js")),
    ("Buffers.java", include_str!("Buffers.java")),
];

pub(in crate::bench) fn main(options: &Options) -> Result<ExitCode> {
    let groups = match Groups::find() {
        Ok(groups) => groups,
        Err(reason) => {
            eprintln!("neap bench boxed: not measured: {reason:#}");
            return Ok(ExitCode::from(NOT_MEASURED));
        }
    };
    let limit = options.limit_mib(MIB) << 20;
    let mut session = Session::new("boxed", Choice::Return, &options.against)?;
    let auto = session.found.variants.iter().find(|variant| variant.name == "neap").cloned();
    session.found.variants.extend(auto.map(|neap| Variant {
        name: AUTO,
        environment: vec![("NEAP", "limit:auto")],
        ..neap
    }));
    let scratch = Scratch::new(options.quick)?;
    for (name, text) in SCRIPTS {
        scratch.file(name, |file| file.write_all(text.as_bytes()))?;
    }
    let programs = installed(&scratch, &options.programs, &mut session.found.missing)?;
    let workload = |name: &&str| Workload {
        unit: "ms, the slowest request",
        metric: |outcome| outcome.count(SLOWEST),
        memory: limit as usize,
        ..Workload::timed(name, options.rounds(ROUNDS), &[])
    };
    let names: Vec<&'static str> = programs.iter().map(|program| program.name).collect();
    let workloads: Vec<Workload> = names.iter().map(workload).collect();
    session.measure(&workloads, |variant, workload, _| {
        let program = programs.iter().find(|program| program.name == workload.name)?;
        eprintln!("neap bench boxed: {} on {}", workload.name, variant.name);
        Some(groups.make(limit).and_then(|group| match program.method {
            Method::Redis => redis(&scratch, variant, &group, limit),
            Method::Inside(words) => scripted(&scratch, variant, words, &group, Member::Command, limit),
            Method::Driver(script) => scripted(&scratch, variant, &["python3", script], &group, Member::Server, limit),
        }))
    });
    figures(&mut session, &names);
    let tables = tables(&session, &names, limit);
    session.finish(options.json, &tables)
}

/// Returns the installed ones of the requested programs. Without a request, all programs count as
/// requested.
fn installed(scratch: &Scratch, wanted: &[String], missing: &mut Vec<Missing>) -> Result<Vec<Boxed>> {
    if let Some(unknown) = wanted.iter().find(|name| PROGRAMS.iter().all(|program| program.name != **name)) {
        bail!("--programs: no program is called `{unknown}`; there are {}", PROGRAMS.map(|each| each.name).join(", "));
    }
    let is_wanted = |program: &Boxed| wanted.is_empty() || wanted.iter().any(|name| name == program.name);
    let mut ready = Vec::new();
    for program in PROGRAMS.into_iter().filter(is_wanted) {
        let absent = program.needs.iter().find(|tool| scratch.tool(tool).is_err());
        let reason = match absent {
            Some(tool) => Some(format!("`{tool}` is not installed (apt-get install {})", package(tool))),
            None if program.name == "java" => compile(scratch).err().map(|error| format!("{error:#}")),
            None => None,
        };
        match reason {
            None => ready.push(program),
            Some(reason) => {
                eprintln!("neap bench boxed: {} is left out: {reason}", program.name);
                missing.push(Missing { name: program.name.to_string(), reason });
            }
        }
    }
    Ok(ready)
}

fn compile(scratch: &Scratch) -> Result<()> {
    let compiled = tool(scratch, "javac")?.args(["-d", "classes", "Buffers.java"]).output()?;
    if !compiled.status.success() {
        bail!("javac failed: {}", String::from_utf8_lossy(&compiled.stderr).trim());
    }
    Ok(())
}

/// How a program ended.
#[derive(Clone, Copy, PartialEq)]
enum ProgramEnd {
    /// The program ran to its end. The number is the milliseconds of its slowest request.
    Survived(f64),
    Refused,
    Killed,
}

fn ended(end: ProgramEnd) -> Outcome {
    let mut outcome = Outcome { operations: 1, ..Outcome::default() };
    let flag = |of: ProgramEnd| f64::from(u8::from(end == of));
    outcome
        .counts
        .extend([(KILLED.to_string(), flag(ProgramEnd::Killed)), (REFUSED.to_string(), flag(ProgramEnd::Refused))]);
    if let ProgramEnd::Survived(slowest_ms) = end {
        outcome.counts.insert(SLOWEST.to_string(), slowest_ms);
    }
    outcome
}

fn redis(scratch: &Scratch, variant: &Variant, group: &Cgroup, limit: u64) -> Result<Outcome> {
    let said = tool(scratch, "redis-server")?.arg("--version").output().context("cannot run redis-server")?;
    let version = String::from_utf8_lossy(&said.stdout).into_owned();
    let mut server = Server::start(scratch, variant, allow_debug(&version), Some(group))?;
    let mut slowest = 0.0_f64;
    let mut cycle = |value: usize| -> Result<()> {
        let keys = (limit as usize / 5 * 4 / (value + BESIDE)).to_string();
        let populate = ["DEBUG", "POPULATE", &keys, "key", &value.to_string()].map(str::to_string).to_vec();
        server.client.pipelined(1, |_| populate.clone(), Reply::Line)?;
        for request in 0..REQUESTS {
            let start = Instant::now();
            let set = ["SET".to_string(), format!("key:{request}"), "v".repeat(value)].to_vec();
            server.client.pipelined(1, |_| set.clone(), Reply::Line)?;
            slowest = slowest.max(start.elapsed().as_secs_f64() * 1000.0);
        }
        server.client.pipelined(1, |_| vec!["FLUSHALL".to_string()], Reply::Line)
    };
    match VALUES.into_iter().try_for_each(&mut cycle) {
        Ok(()) => server.stop().map(|_| ended(ProgramEnd::Survived(slowest))),
        Err(_) => {
            let killed = server.end()?.status.signal() == Some(libc::SIGKILL);
            Ok(ended(if killed { ProgramEnd::Killed } else { ProgramEnd::Refused }))
        }
    }
}

/// The process that is in the group.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Member {
    /// The command itself.
    Command,
    /// A server that the command starts.
    Server,
}

/// Runs a command that prints how it ended, as one line.
fn scripted(
    scratch: &Scratch,
    variant: &Variant,
    words: &[&str],
    group: &Cgroup,
    member: Member,
    limit: u64,
) -> Result<Outcome> {
    let (name, rest) = words.split_first().context("a program's name")?;
    let mut command = tool(scratch, name)?;
    command.args(rest).arg(limit.to_string()).arg(group.processes_file());
    variant.apply(&mut command);
    command.env("PYTHONMALLOC", "malloc").stderr(scratch.errors()?);
    if member == Member::Command {
        group.enter(&mut command)?;
    }
    let mut process = Process::start(command, LIMIT)?;
    let mut said = Vec::new();
    process.read(|bytes| {
        said.extend_from_slice(bytes);
        true
    })?;
    let killed = process.wait()?.status.signal() == Some(libc::SIGKILL);
    let said = String::from_utf8_lossy(&said);
    let outcome = end_of(&said, killed);
    if outcome.is_none() {
        scratch.show_errors();
    }
    outcome.with_context(|| format!("{name} ended without a result"))
}

/// The outcome of a process that printed `said`. A killed one may have printed nothing.
fn end_of(said: &str, killed: bool) -> Option<Outcome> {
    match said.split_whitespace().collect::<Vec<_>>()[..] {
        ["survived", slowest] if !killed => Some(ended(ProgramEnd::Survived(slowest.parse().ok()?))),
        ["refused"] if !killed => Some(ended(ProgramEnd::Refused)),
        ["killed"] => Some(ended(ProgramEnd::Killed)),
        _ => killed.then(|| ended(ProgramEnd::Killed)),
    }
}

fn count(session: &Session, variant: &str, program: &str, end: &str) -> usize {
    session.outcomes(variant, program).iter().filter(|outcome| outcome.count(end) > 0.0).count()
}

fn slowest(session: &Session, variant: &str, program: &str) -> Option<Summary> {
    summary(session.outcomes(variant, program).iter().filter_map(|outcome| outcome.counts.get(SLOWEST).copied()))
}

fn figures(session: &mut Session, programs: &[&str]) {
    let of =
        |variant: &str, end: &str| programs.iter().map(|program| count(session, variant, program, end)).sum::<usize>();
    let runs = programs.iter().map(|program| session.outcomes(AUTO, program).len()).sum::<usize>();
    let baselines = session.found.variants.iter().filter(|variant| !variant.is_neap());
    let baseline_killed = baselines.map(|variant| of(variant.name, KILLED)).sum::<usize>();
    let ours = [KILLED, REFUSED].map(|end| of(AUTO, end));
    session.figure("runs", Some(runs as f64));
    session.figure("killed", Some(ours[0] as f64));
    session.figure("refused", Some(ours[1] as f64));
    session.figure("baseline_killed", Some(baseline_killed as f64));
}

/// Returns a table with a cell for each program, such as `2/0/0, 4.1 ms`. The numbers count runs
/// that survived, runs that the kernel killed, and runs whose malloc refused memory. The time is
/// that of the slowest request of the survivors.
fn tables(session: &Session, programs: &[&str], limit: u64) -> String {
    let end = |variant: &str, program: &str| {
        let runs = session.outcomes(variant, program).len();
        if runs == 0 {
            return "-".to_string();
        }
        let [killed, refused] = [KILLED, REFUSED].map(|end| count(session, variant, program, end));
        let ends = format!("{}/{killed}/{refused}", runs - killed - refused);
        slowest(session, variant, program).map_or(ends.clone(), |time| format!("{ends}, {} ms", cell(Some(time), 0)))
    };
    let row = |variant: &Variant| {
        let cells = programs.iter().map(|program| end(variant.name, program));
        [variant.name.to_string()].into_iter().chain(cells).collect()
    };
    let rows: Vec<Vec<String>> = session.found.variants.iter().map(row).collect();
    let header: Vec<&str> = ["allocator"].into_iter().chain(programs.iter().copied()).collect();
    let mib = limit >> 20;
    format!(
        "{}\nRuns that survived/were killed/were refused memory, and the slowest request of survivors. Limit: {mib} MiB.\n",
        table(&header, &rows)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::{session, variant};
    use crate::variant::AllocatorKind;

    #[test]
    fn ends_are_counted_by_allocator_and_only_survivors_have_times() {
        let programs = ["redis", "python", "absent"];
        let glibc = variant("glibc", AllocatorKind::Peer);
        let mut session = session(vec![variant(AUTO, AllocatorKind::Neap), glibc]);
        let workloads = ["redis", "python"]
            .map(|name| Workload { metric: |outcome| outcome.count(SLOWEST), ..Workload::timed(name, 2, &[]) });
        session.measure(&workloads, |variant, workload, round| {
            Some(Ok(match (variant.name, workload.name.as_str()) {
                (AUTO, "python") if round == 1 => ended(ProgramEnd::Refused),
                ("glibc", "redis") => ended(ProgramEnd::Killed),
                _ => ended(ProgramEnd::Survived(25.0)),
            }))
        });
        figures(&mut session, &programs);
        let figure = |name: &str| session.figures[name];
        assert_eq!(["runs", "killed", "refused", "baseline_killed"].map(figure), [4.0, 0.0, 1.0, 2.0]);
        let text = tables(&session, &programs, 1 << 29);
        let row = |name: &str| text.lines().find(|line| line.contains(name)).unwrap().replace(' ', "");
        assert!(row(AUTO).starts_with("|neap-auto|2/0/0,25"), "{text}");
        assert!(row(AUTO).contains("|1/0/1,25ms|-|"), "{text}");
        assert!(row("glibc").starts_with("|glibc|0/2/0|2/0/0,25"), "{text}");
    }

    #[test]
    fn a_killed_process_needs_no_line() {
        let counts = |said: &str, killed| {
            let outcome = end_of(said, killed)?;
            Some([KILLED, REFUSED, SLOWEST].map(|name| outcome.count(name)))
        };
        assert_eq!(counts("survived 2.5\n", false), Some([0.0, 0.0, 2.5]));
        assert_eq!(counts("refused\n", false), Some([0.0, 1.0, 0.0]));
        assert_eq!(counts("killed\n", false), Some([1.0, 0.0, 0.0]));
        assert_eq!([counts("", true), counts("survived 1", true)], [Some([1.0, 0.0, 0.0]); 2]);
        assert_eq!([counts("", false), counts("survived soon", false)], [None; 2]);
    }
}
