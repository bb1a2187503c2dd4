//! `neap pressure`: the memory limit and the headroom that bind a process, and how they were found.
//!
//! [`neap_pressure`] finds and reads the limits, and this file prints them. The process need not
//! run under neap.

mod watch;

pub(crate) use watch::wall_in;

use core::fmt;
use core::time::Duration;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use neap_pressure::{
    LimitedBy, MemoryLevel, MemoryReport, Sensor, SignalState, Stalls, Subject, Swap, System, Version, Visibility,
};
use serde_json::{Value, json};

use crate::look::allowance::Allowance;
use crate::look::foreign::escaped;
use crate::look::handle::ProcessHandle;
use crate::look::refusal::LookRefusal;
use crate::look::stat_model::Numbers;
use crate::look::stat_reader::ProcessStatus;
use crate::look::subject::{SCHEMA, Timeout, print, within};

const EXAMPLES: &str = "\
Examples:
  neap pressure           the limits of this command itself, which is in the group of your shell
  neap pressure 1234      the limits of process 1234, which may be in a container
  neap pressure 1234 --json | python3 -m json.tool
                          everything, as one JSON object; all sizes are bytes
  neap pressure 1234 --watch
                          a line a second: headroom, growth, time until memory runs out
  neap pressure 1234 --watch=0.2 --times 50 --json
                          fifty objects, one on each line, in ten seconds
  neap pressure --root /tmp/tree
                          a copy of another system's /proc and /sys/fs/cgroup

A level is a cgroup, the machine, or a limit of the process (RLIMIT_AS, RLIMIT_DATA). Used memory is
usage less the files and slabs that the kernel can reclaim. Headroom is the limit less the used
memory. The level with the least headroom binds. Only groups that this command can see are listed;
run it outside of the container to see all ancestors. The command changes nothing.

Signals in use are those that this command and neap's looks read. neap uses no other, and the line
of each says why. The last line says whether neap in the process looks. With --watch this command
also waits for one that notifies, which the first line names.";

/// Show the memory limit that binds a process, the room below it, and the signals of pressure.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PressureOptions {
    /// Id of the process; without it, this command itself
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Print a line every so many seconds, until the process ends
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "1", value_parser = seconds)]
    watch: Option<Duration>,
    /// End --watch after this many lines
    #[arg(long, value_name = "N", requires = "watch", value_parser = clap::value_parser!(u64).range(1..))]
    times: Option<u64>,
    #[command(flatten)]
    timeout: Timeout,
    /// Read files below this directory instead of /
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
}

/// A time between two looks.
fn seconds(text: &str) -> Result<Duration> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.01..=86_400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).with_context(|| format!("{text}: give 0.01 to 86400 seconds"))
}

pub(crate) fn main(options: &PressureOptions) -> Result<ExitCode> {
    let files = match &options.root {
        None => System::new(),
        Some(root) => {
            let path = CString::new(root.as_os_str().as_bytes()).context("--root: the path has a NUL in it")?;
            let below = System::below(&path);
            below.map_err(|error| anyhow!("--root {}: {error}; name a directory", root.display()))?
        }
    };
    // If the process of the handle has not ended afterwards, all numbers are of that process.
    let handle = match (options.pid, &options.root) {
        (Some(pid), None) => Some(ProcessHandle::open(pid as i32)?),
        (Some(pid), Some(root)) if !root.join(format!("proc/{pid}")).is_dir() => bail!("there is no process {pid}"),
        _ => None,
    };
    let (subject, is_json) = (options.pid.map_or(Subject::Own, Subject::Other), options.json);
    if let Some(every) = options.watch {
        return watch::main(options, every, subject, files, handle);
    }
    let time = options.timeout.time();
    let text = within(time, "the limits of a process", move || {
        let handle = handle.map(Arc::new);
        let mut sensor = Box::new(Sensor::new(subject));
        let report = sensor.survey(&files);
        let looks = handle.as_ref().map(|handle| LooksOfProcess::read(handle, time));
        if let Some(handle) = handle.filter(|handle| handle.has_ended()) {
            bail!("process {} has ended", handle.pid);
        }
        if is_json {
            return Ok(format!("{}\n", object(report, looks.as_ref())));
        }
        let mut text = String::new();
        report.explain(&mut text)?;
        Ok(text + &looks.map(|looks| format!("In use by: {looks}\n")).unwrap_or_default())
    })?;
    print(|output| write!(output, "{text}"))
}

/// Whether neap in the process reads the signals in use.
enum LooksOfProcess {
    /// The heap's limit follows the container. The number of looks so far.
    Made(u64),
    /// No limit of the heap follows the container.
    NotFollowing,
    NotNeap,
    /// The numbers of the process cannot be read, for this reason.
    Unknown(String),
}

impl LooksOfProcess {
    fn read(handle: &Arc<ProcessHandle>, time: Duration) -> LooksOfProcess {
        let read = || {
            let process = ProcessStatus::read(handle, Allowance::new(time))?;
            let page = process.page()?;
            ensure!(page.is_written, "it has not written these numbers yet");
            Numbers::read(&process, &page)
        };
        match read() {
            Ok(Numbers { container: Some(container), .. }) => LooksOfProcess::Made(container.looks),
            Ok(_) => LooksOfProcess::NotFollowing,
            Err(error) if LookRefusal::of(&error) == Some(LookRefusal::NotNeap) => LooksOfProcess::NotNeap,
            Err(error) => LooksOfProcess::Unknown(escaped(format!("{error:#}").as_bytes())),
        }
    }
}

impl fmt::Display for LooksOfProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LooksOfProcess::Made(looks) => {
                write!(f, "neap in the process, whose limit follows the container; {looks} looks so far")
            }
            LooksOfProcess::NotFollowing => {
                f.write_str("neap in the process only if the program asks it to, since no limit follows the container")
            }
            LooksOfProcess::NotNeap => f.write_str("this command only; the process does not run under neap"),
            LooksOfProcess::Unknown(reason) => write!(f, "this command; for the process it is not known ({reason})"),
        }
    }
}

fn object(report: &MemoryReport, looks: Option<&LooksOfProcess>) -> Value {
    let (group_stalls, machine_stalls) = report.stalls();
    let each_signal = report.signals().map(|(signal, state)| {
        let unused = signal.unused_because().filter(|_| state.is_usable());
        let in_use = state.is_usable() && unused.is_none();
        let (state, reason) = described(state);
        let name = signal.name();
        json!({"signal": name, "state": state, "reason": reason, "in_use": in_use, "unused_because": unused})
    });
    json!({
        "schema": SCHEMA,
        "pid": match report.process() {
            Subject::Own => std::process::id(),
            Subject::Other(id) => id,
        },
        "cgroup_version": report.version().map(|version| match version {
            Version::V1 => 1,
            Version::V2 => 2,
        }),
        "hybrid": report.is_hybrid(),
        "group": text(report.member()),
        "directory": text(report.directory()),
        "view": match report.view() {
            Visibility::Nothing => "nothing",
            Visibility::Outside => "outside",
            Visibility::Missing => "missing",
            Visibility::AncestorsOnly => "ancestors only",
            Visibility::Deleted => "deleted",
            Visibility::Own => "own",
        },
        "ancestors_hidden": report.ancestors_hidden(),
        "levels": report.levels().iter().map(|each| level(report, each)).collect::<Vec<_>>(),
        "levels_not_listed": report.unlisted(),
        "limit": report.limit().map(|each| level(report, each)),
        "wall": report.wall().map(|each| level(report, each)),
        "soft_wall": report.soft_wall().map(|each| level(report, each)),
        "swap_headroom": report.swap_headroom(),
        "pressure": report.pressure().map(|pressure| pressure.name()),
        "room_to_grow": report.room_to_grow(),
        "privileged": report.is_privileged(),
        "signals": each_signal.collect::<Vec<_>>(),
        "group_stalls": group_stalls.map(stalls),
        "machine_stalls": machine_stalls.map(stalls),
        "watch_write": report.trigger().map(text),
        "looks_by_neap": match looks {
            Some(LooksOfProcess::Made(looks)) => Some(looks),
            _ => None,
        },
    })
}

fn level(report: &MemoryReport, level: &MemoryLevel) -> Value {
    let (swap_limit, swap_usage, with_memory) = match level.swap {
        Swap::Unlimited => (None, None, false),
        Swap::Standalone { limit, usage } => (Some(limit), Some(usage), false),
        Swap::Together { limit, usage } => (Some(limit), Some(usage), true),
    };
    json!({
        "kind": level.owner.name(),
        "path": (level.owner == LimitedBy::Group).then(|| text(report.path(level))),
        "limit": level.limit,
        "high": level.high,
        "usage": level.usage,
        "reclaimable": level.reclaimable,
        "used": level.used(),
        "headroom": level.headroom(),
        "soft_headroom": level.soft_headroom(),
        "swap_limit": swap_limit,
        "swap_usage": swap_usage,
        "swap_counts_memory": with_memory,
    })
}

/// Name of a state, and the reason for it.
fn described(state: SignalState) -> (&'static str, Option<String>) {
    match state {
        SignalState::Usable => ("usable", None),
        SignalState::ReadOnly(error) => ("read only", Some(error.to_string())),
        SignalState::WholeMachine => ("whole machine", None),
        SignalState::Absent => ("absent", None),
        SignalState::Refused(error) => ("refused", Some(error.to_string())),
        SignalState::Not(reason) => ("not usable", Some(reason.to_string())),
    }
}

fn stalls(stalls: Stalls) -> Value {
    let percent = |hundredths: u32| f64::from(hundredths) / 100.0;
    json!({
        "some_percent_10s": percent(stalls.some_10),
        "full_percent_10s": percent(stalls.full_10),
        "some_us": stalls.some_us,
        "full_us": stalls.full_us,
    })
}

fn text(bytes: &[u8]) -> String {
    escaped(bytes)
}
