//! `neap leaks`: memory that a process allocated and did not free for a time, or until its end, by
//! stack.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;

use super::limits::{CommandMemory, ProfileLimits};
use super::resolved::{ChosenSamples, Profile, Subjected};
use super::sums::{Amount, ProfileView};
use super::switch::{SamplingSwitch, longest_wait, parse_every};
use super::symbols::SourceLine;
use super::top_table::{losses, named, size};
use super::tuned::{FIRST, TunedInterval};
use super::{LONGEST_END, begin, record, stop_flag, watch};
use crate::look::allowance::Allowance;
use crate::look::control_channel::LongWait;
use crate::look::handle::ProcessHandle;
use crate::look::stat_reader::{ProcessStatus, monotonic};
use crate::look::subject::{Timeout, print, within};
use crate::report::number;
use crate::run::sampled;

const EXAMPLES: &str = "\
Examples:
  neap leaks 1234                    stacks whose memory of the next 22 s is not freed 23 s later
  neap leaks 1234 --seconds 600      the same in ten minutes: caches are told from leaks by time
  neap leaks 1234 --every 1m         with fewer samples, for a program that must not be slowed at all
  neap leaks 1234 --memory 512m      with files and lines of a program with much debug information
  neap leaks -- ./test               memory that a program has at its end, on standard error

Allocations are sampled at random. For a running process, the command shows those of the first
half of the time that are not freed at its end. A leak grows with the time; a full cache does not. For
a program that ends, the command shows all memory that the program has not freed, leaked or not, and
ends with the program's exit status.";

/// Most stacks that are shown, and most functions of a stack.
const MOST_STACKS: usize = 20;
const MOST_LINES: usize = 12;

/// Time without tries after a process has not answered a request for another interval.
const REST: Duration = Duration::from_secs(5);

/// Show memory that is not freed, by the stacks that allocated it.
#[derive(Args, Clone)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LeaksOptions {
    /// The process
    #[arg(value_parser = clap::value_parser!(i32).range(1..), required_unless_present = "command")]
    pid: Option<i32>,
    #[command(flatten)]
    timeout: Timeout,
    /// Seconds for which a process is watched
    #[arg(id = "duration", long = "seconds", value_name = "SECONDS", default_value_t = 45, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Bytes between two samples, on average. Without this, a process has some 2000 samples a
    /// second, one in 2k to 512k bytes; a program that is run has one in 64k
    #[arg(long, value_name = "BYTES", value_parser = parse_every)]
    every: Option<String>,
    /// Preload this library into a program
    #[arg(long, value_name = "FILE", requires = "command")]
    library: Option<PathBuf>,
    #[command(flatten)]
    memory: CommandMemory,
    /// Read a process of another user as one of your own: with files and lines
    #[arg(long)]
    trust: bool,
    /// A program and its arguments
    #[arg(last = true, value_name = "COMMAND", conflicts_with = "pid")]
    command: Vec<OsString>,
}

pub(crate) fn main(options: &LeaksOptions) -> Result<ExitCode> {
    match options.pid {
        Some(pid) => of_process(pid, options),
        None => of_program(options),
    }
}

fn of_process(pid: i32, options: &LeaksOptions) -> Result<ExitCode> {
    let time = options.timeout.time();
    let options = options.clone();
    let time = time + longest_wait(options.seconds) + Duration::from_secs(options.seconds) + LONGEST_END;
    within(time, &format!("process {pid}"), move || watched(pid, &options))
}

fn watched(pid: i32, options: &LeaksOptions) -> Result<ExitCode> {
    let (handle, time) = (Arc::new(ProcessHandle::open(pid)?), options.timeout.time());
    let process = ProcessStatus::read(&handle, Allowance::new(time))?;
    let page = process.page()?;
    let stop = stop_flag()?;
    let first = FIRST.to_string();
    // A process that samples already goes on as it does.
    let every = options.every.as_deref().or(Some(&*first).filter(|_| !SamplingSwitch::is_on(&page)));
    let wait = LongWait { time: longest_wait(options.seconds), stop: &stop };
    let mut switch = SamplingSwitch::on(&process, &page, every, time, Some(wait))?;
    let began = switch.since;
    let is_tuned = options.every.is_none() && every.is_some();
    let limits = ProfileLimits::of(&process, options.trust).with(options.memory.bytes);
    let mut session = begin(&process, &page, began, limits)?;
    let (mut tuned, mut refused, mut effective) = (TunedInterval::new(session.taken()), None::<Instant>, None);
    watch(&mut session, Duration::from_secs(options.seconds), &stop, &mut |session, since| {
        if !is_tuned {
            return;
        }
        if since.as_secs_f64() >= options.seconds as f64 / 2.0 && effective.is_none() {
            effective = Some(tuned.effective());
        }
        let better = tuned.better(since, session.taken());
        if let Some(every) = better.filter(|_| refused.is_none_or(|at| at.elapsed() >= REST)) {
            // A process that answers later has another chance.
            match switch.change(every) {
                Ok(()) => tuned.every = every,
                Err(_) => refused = Some(Instant::now()),
            }
        }
    })?;
    // If the setting cannot be restored, the drop says so, and the leaks are shown nevertheless.
    drop(switch);
    let ended = monotonic();
    let seconds = (ended - began) as f64 / 1e9;
    let of = Subjected { pid, name: process.name.clone(), seconds, in_use: None };
    let before = began + (ended - began) / 2;
    let profile = Profile::of(&session, of, ProfileView::Live, ChosenSamples { group: None, before: Some(before) });
    let what = format!("allocated in the first {} s, and not freed", number(seconds / 2.0, 1));
    // So many bytes have three samples on average, and none with probability exp(-3).
    let least = size(3.0 * effective.unwrap_or(profile.every as f64));
    print(|output| {
        write(output, &profile, &what)?;
        if losses(&profile).is_empty() {
            writeln!(output, "\nOf leaks of {least} in that time, one in 20 has no sample; of larger ones, fewer.")?;
        }
        Ok(())
    })
}

fn of_program(options: &LeaksOptions) -> Result<ExitCode> {
    let every = options.every.clone().unwrap_or_else(|| FIRST.to_string());
    let mut command = sampled(&options.command, options.library.as_deref(), &every)?;
    let code = record::run(&mut command, options.memory.bytes, &mut |session, of| {
        let profile = Profile::of(session, of, ProfileView::Live, ChosenSamples::default());
        write(&mut io::stderr().lock(), &profile, "not freed at its end").context("cannot write to standard error")
    });
    code.with_context(|| format!("cannot run `{}`", options.command[0].to_string_lossy()))
}

/// Writes the stacks with the most bytes.
fn write(output: &mut dyn Write, profile: &Profile, what: &str) -> io::Result<()> {
    let (of, total) = (&profile.of, profile.total().live);
    writeln!(output, "Process {} ({}), {} s", of.pid, of.name, number(of.seconds, 1))?;
    writeln!(output, "{} {what} (standard error {})", size(total.bytes), size(total.error()))?;
    losses(profile).iter().try_for_each(|line| writeln!(output, "{line}"))?;
    // Stacks that differ in places of the same functions and lines look alike.
    let mut stacks: BTreeMap<Vec<String>, Amount> = BTreeMap::new();
    for row in profile.rows.iter().filter(|row| row.sums.live.samples > 0) {
        let lines: Vec<&SourceLine> = profile.stacks[row.stack].iter().flat_map(|place| place.lines.iter()).collect();
        let own = lines.iter().position(|line| !Profile::is_standard(line)).unwrap_or(0);
        let shown = lines[own..].iter().take(MOST_LINES).map(|line| named(line));
        stacks.entry(shown.collect()).or_default().add(row.sums.live);
    }
    let mut stacks: Vec<_> = stacks.into_iter().collect();
    stacks.sort_by(|(_, one), (_, other)| other.bytes.total_cmp(&one.bytes));
    for (lines, amount) in stacks.iter().take(MOST_STACKS) {
        let (bytes, error, objects) = (size(amount.bytes), size(amount.error()), number(amount.objects, 0));
        writeln!(output, "\n{bytes} (+- {error}) in {objects} objects, by {} samples", amount.samples)?;
        if lines.is_empty() {
            writeln!(output, "    [no stack]")?;
        }
        lines.iter().try_for_each(|line| writeln!(output, "    {line}"))?;
    }
    match stacks.len().saturating_sub(MOST_STACKS) {
        0 => Ok(()),
        more => writeln!(output, "\nand {more} more"),
    }
}
