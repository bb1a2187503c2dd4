//! `neap profile`: finds the code that holds the memory of a process, by samples of its
//! allocations.
//!
//! # Design
//! 1. `switch` switches sampling in the process on.
//! 2. `area` repeatedly reads the sample records from the file of the process's *page of numbers*,
//!    which contains its statistics.
//! 3. `unwind` finds the callers of each record, with `maps` and `elf`.
//! 4. `collect` sums by stack, group and thread. `session` calls these parts.
//! 5. `resolved` adds names at the end. `symbols` finds them: functions by `symbol_table`, and
//!    files and lines by `debug_lines`, which starts a `bounded_child`.
//! 6. `live_sites` repeatedly sums by function, for `neap top`.
//! 7. `top_table`, `pprof`, `folded` and `html` are outputs.
//! 8. `saved` and `recorded` read a profile from a file. `compare` computes the differences between
//!    two profiles.
//!
//! A copy of a stack may hold secrets. The command unwinds it and then discards it, and writes no
//! copy to a file.

mod area;
#[cfg(test)]
mod area_tests;
mod bounded_child;
mod code_source;
mod collect;
mod compare;
mod debug_lines;
mod dhat;
mod elf;
#[cfg(test)]
mod elf_tests;
mod folded;
mod html;
mod leaks;
mod limits;
mod live_sites;
mod maps;
#[cfg(test)]
pub(crate) mod mutated_tests;
mod output;
mod perf_map;
mod pprof;
mod processor;
mod record;
mod recorded;
mod resolved;
mod saved;
mod session;
mod sums;
mod switch;
mod symbol_table;
mod symbols;
mod top_table;
mod tuned;
mod unwind;
#[cfg(all(test, target_arch = "x86_64"))]
mod unwind_tests;

use core::time::Duration;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail};
use clap::Args;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::look::allowance::Allowance;
use crate::look::control_channel::LongWait;
use crate::look::handle::ProcessHandle;
use crate::look::stat_reader::{Page, ProcessStatus, monotonic};
use crate::look::subject::{Timeout, print, print_json, within};

use compare::Comparison;
pub(crate) use debug_lines::{LinesOptions, main as lines};
pub(crate) use leaks::{LeaksOptions, main as leaks};
pub(crate) use limits::parse_memory;
use limits::{CommandMemory, ProfileLimits};
pub(crate) use live_sites::{HotSite, LiveSites, SiteTable};
pub(crate) use output::ProfileFile;
pub(crate) use record::{run as record, to_file};
use resolved::Subjected;
pub(crate) use resolved::{ChosenSamples, Profile};
use session::Session;
#[cfg(test)]
pub(crate) use sums::Amount;
pub(crate) use sums::ProfileView;
use switch::longest_wait;
pub(crate) use switch::{KEY, SamplingSwitch, parse_every};
pub(crate) use symbols::SourceLine;
use top_table::ProfileObject;
pub(crate) use top_table::{amount, named_place};

const EXAMPLES: &str = "\
Examples:
  neap profile 1234                         the functions that hold what was allocated in 30 s
  neap profile 1234 --seconds 5 --allocated the functions that allocate, whether they free or not
  neap profile 1234 -o heap.pb.gz && go tool pprof -http : heap.pb.gz
  neap profile 1234 --group tenant/acme -o acme.svg
                                            a flame graph of one memory group
  neap profile 1234 -o heap.html            one page: flame graph, and tables by function, group and thread
  neap run --profile heap.html -- ./server  a program from its start to its end
  neap profile 1234 --compare heap.pb.gz    what has grown since that profile, by function
  neap profile 1234 --memory 512m           files and lines of a program with much debug information
  neap profile --read new.pb.gz --compare old.pb.gz -o growth.html
                                            the differences between two files, as one page

Allocations are sampled at random, one in 512 KiB on average. Bytes are estimates with their standard
error (+-). Memory that was allocated before sampling began is in no sample; its bytes are shown.
A process under NEAP=profile:on is sampled from its start. At the end sampling is set back as
it was. Ctrl-C ends the profile early, and sets it back, too. Only the process's user and root may do
this.";

/// Time beyond the wanted one in which names are read and the profile is written.
pub(crate) const LONGEST_END: Duration = Duration::from_secs(30);

/// What a profile shows.
#[derive(Clone, Args)]
#[group(multiple = false)]
struct Views {
    /// Show the bytes that are allocated and not freed (this is the default)
    #[arg(long)]
    live: bool,
    /// Show the bytes that were allocated, freed or not
    #[arg(long)]
    allocated: bool,
    /// Show the bytes that were live when the live bytes were highest
    #[arg(long)]
    peak: bool,
}

impl Views {
    /// The view that was asked for.
    fn asked(&self) -> Option<ProfileView> {
        match self {
            Views { live: true, .. } => Some(ProfileView::Live),
            Views { allocated: true, .. } => Some(ProfileView::Allocated),
            Views { peak: true, .. } => Some(ProfileView::Peak),
            _ => None,
        }
    }
}

/// Show which code holds the memory of a process, by samples of its allocations.
#[derive(Args, Clone)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ProfileOptions {
    /// The process
    #[arg(value_parser = clap::value_parser!(i32).range(1..), required_unless_present = "read")]
    pid: Option<i32>,
    #[command(flatten)]
    timeout: Timeout,
    /// Show the profile in a file in place of a process: in the format of pprof, or written by
    /// `profile_at_limit`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["pid", "duration", "every"])]
    read: Option<PathBuf>,
    /// Show the differences to an earlier profile in such a file
    #[arg(long, value_name = "OLD")]
    compare: Option<PathBuf>,
    /// Seconds that the profile takes
    #[arg(id = "duration", long = "seconds", value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    #[command(flatten)]
    views: Views,
    /// Only this memory group and those below it
    #[arg(long, value_name = "PATH")]
    group: Option<String>,
    /// Bytes between two samples, on average: 512k, unless the process is sampled already
    #[arg(long, value_name = "BYTES", value_parser = parse_every)]
    every: Option<String>,
    /// Write a file: pprof (.pb.gz, .pprof), folded stacks (.folded), a flame graph (.svg), a
    /// page (.html) or DHAT (.dhat.json)
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    memory: CommandMemory,
    /// Read a process of another user as one of your own: with files and lines
    #[arg(long)]
    trust: bool,
    /// Print one JSON object
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

pub(crate) fn main(options: &ProfileOptions) -> Result<ExitCode> {
    let seconds = options.seconds;
    let time = options.timeout.time() + longest_wait(seconds) + Duration::from_secs(seconds) + LONGEST_END;
    let options = options.clone();
    within(time, "the process", move || profiled(&options))
}

fn profiled(options: &ProfileOptions) -> Result<ExitCode> {
    let file = options.output.as_deref().map(ProfileFile::choose).transpose()?;
    // Files that cannot be read are refused before time is spent.
    let mut before = options.compare.as_deref().map(|path| saved::read(path, options.memory.bytes)).transpose()?;
    let profile = match (options.pid, &options.read) {
        (Some(pid), _) => take(pid, options)?,
        (None, Some(path)) => {
            let mut profile = saved::read(path, options.memory.bytes)?;
            profile
                .choose(options.views.asked(), options.group.as_deref())
                .with_context(|| path.display().to_string())?;
            profile
        }
        (None, None) => bail!("there is no process to profile"),
    };
    if let (Some(before), Some(path)) = (&mut before, &options.compare) {
        let chosen = before.choose(Some(profile.view), options.group.as_deref());
        chosen.with_context(|| path.display().to_string())?;
    }
    show(options, file.as_ref(), &profile, before.as_ref())
}

/// Takes a profile of a process.
fn take(pid: i32, options: &ProfileOptions) -> Result<Profile> {
    let (handle, time) = (Arc::new(ProcessHandle::open(pid)?), options.timeout.time());
    let process = ProcessStatus::read(&handle, Allowance::new(time))?;
    let page = process.page()?;
    let stop = stop_flag()?;
    let wait = LongWait { time: longest_wait(options.seconds), stop: &stop };
    let switch = SamplingSwitch::on(&process, &page, options.every.as_deref(), time, Some(wait))?;
    let began = switch.since;
    let limits = ProfileLimits::of(&process, options.trust).with(options.memory.bytes);
    let mut session = begin(&process, &page, began, limits)?;
    watch(&mut session, Duration::from_secs(options.seconds), &stop, &mut |_, _| {})?;
    let seconds = (monotonic() - began) as f64 / 1e9;
    // The process reports one number for all groups, so a profile of one group has no such number.
    let in_use = in_use(&handle, time).filter(|_| options.group.is_none());
    // If the setting cannot be restored, the drop says so, and the profile is shown nevertheless.
    drop(switch);
    let of = Subjected { pid: process.pid, name: process.name.clone(), seconds, in_use };
    let chosen = ChosenSamples { group: options.group.as_deref(), before: None };
    Ok(Profile::of(&session, of, options.views.asked().unwrap_or_default(), chosen))
}

/// Prints or writes a profile. If there is an earlier one, shows the differences instead.
fn show(
    options: &ProfileOptions,
    file: Option<&ProfileFile>,
    now: &Profile,
    before: Option<&Profile>,
) -> Result<ExitCode> {
    let comparison = before.map(|before| Comparison { before, now });
    let Some(file) = file else {
        return match comparison {
            None if options.json => print_json(&ProfileObject(now)),
            None => print(|output| top_table::write(output, now)),
            Some(comparison) if options.json => print_json(&compare::object(&comparison)),
            Some(comparison) => print(|output| compare::write(output, &comparison)),
        };
    };
    file.write(now, before)?;
    let (summary, path) = (comparison.map_or_else(|| top_table::summary(now), |both| both.summary()), file.path());
    print(|output| {
        writeln!(output, "{}\nWritten to {}", summary.join("\n"), path.display())?;
        match options.compare.as_deref().filter(|_| file.is_pprof()) {
            Some(old) => writeln!(output, "go tool pprof -diff_base {} {}", old.display(), path.display()),
            None => Ok(()),
        }
    })
}

/// Begins to read the samples of a process.
fn begin(process: &ProcessStatus, page: &Page, began: u64, limits: ProfileLimits) -> Result<Session> {
    let pid = process.pid;
    let memfd = page.file.as_ref();
    let memfd =
        memfd.with_context(|| format!("process {pid} has closed neap's descriptor, by which its samples are read"))?;
    Session::begin(&process.handle, memfd, began, limits).with_context(|| format!("process {pid}"))
}

/// Returns a flag that SIGINT, SIGTERM and SIGHUP set. A second SIGINT ends the command at once.
pub(crate) fn stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register_conditional_shutdown(SIGINT, 130, Arc::clone(&stop)).context("cannot catch signals")?;
    for number in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(number, Arc::clone(&stop)).context("cannot catch signals")?;
    }
    Ok(stop)
}

/// Reads samples for a time, until the process or its sampling ends, or until a signal comes. Calls
/// `looked` after each look, with the time since the start.
fn watch(
    session: &mut Session,
    time: Duration,
    stop: &AtomicBool,
    looked: &mut dyn FnMut(&mut Session, Duration),
) -> Result<()> {
    let shows = std::io::stderr().is_terminal();
    session.watch(time, stop, &mut |session, since| {
        looked(session, since);
        session.learn_groups();
        if shows {
            let live = session.collector.live_total();
            let (since, time) = (since.as_secs(), time.as_secs());
            let (bytes, samples) = (top_table::size(live.bytes), live.samples);
            eprint!("\r{since} of {time} s, {bytes} live in {samples} samples\x1b[K");
        }
    })?;
    if shows {
        eprint!("\r\x1b[K");
    }
    if session.is_over {
        eprintln!("neap: sampling was switched off meanwhile; the profile ends there");
    }
    Ok(())
}

/// Returns the bytes that a process has in use. `None` if the process has ended.
fn in_use(handle: &Arc<ProcessHandle>, time: Duration) -> Option<u64> {
    let page = ProcessStatus::read(handle, Allowance::new(time)).ok()?.page().ok()?;
    page.object.get("bytes")?["used"].as_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_tell_their_format() {
        let folder = std::env::temp_dir();
        let error = ProfileFile::choose(&folder.join("heap.txt")).unwrap_err().to_string();
        assert!(error.contains(".pb.gz, .pprof, .folded"), "{error}");
        assert!(ProfileFile::choose(&folder.join("no such folder/heap.svg")).is_err());
        let path = folder.join(format!("chosen-{}.svg", std::process::id()));
        assert!(ProfileFile::choose(&path).is_ok() && !path.exists(), "made when it is written");
        std::fs::write(&path, "old").unwrap();
        assert!(ProfileFile::choose(&path).is_ok());
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        std::fs::remove_file(&path).unwrap();
    }
}
