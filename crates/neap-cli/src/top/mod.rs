//! `neap top`: a process under neap, live: used and cached memory by group, zone and CPU, and
//! events.
//!
//! A screen is a pure function of two readings (`reading`) and of the user's choices and the
//! process's answers (`state`). It has lines about the whole process (`summary`), and panes of rows
//! (`panes`, `listing`, `groups`, `events`). `screen` lays them out. Only `live` and `all`, the
//! list of processes, touch the terminal.
//!
//! Only `asking` and `profiling` make requests to the process. If it has memory groups, neap's
//! thread in it writes a report of them for each reading. While the user wants the profile
//! (`sites`), the process samples its allocations. Otherwise `neap top` neither stops nor slows the
//! process.

mod all;
mod asking;
mod events;
mod groups;
mod listing;
mod live;
#[cfg(test)]
mod live_tests;
mod panes;
mod profiling;
mod reading;
mod screen;
mod sites;
mod state;
mod summary;

use core::time::Duration;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use clap::Args;
use serde_json::{Value, json};

use asking::Asked;
use panes::Pane;
pub(crate) use reading::Kernel;
use reading::{Pair, Reading};
use state::{LONGEST, SHORTEST, View};

use crate::look::handle::ProcessHandle;
use crate::look::stat_reader::monotonic;
use crate::look::subject::{SCHEMA, Timeout, print, within};
use crate::profile::LONGEST_END;

const EXAMPLES: &str = "\
Examples:
  neap top                        all processes under neap, live; Enter shows the selected one,
                                  d drains it, m changes its limit
  neap top 1234                   process 1234, live; ? lists the keys
  neap top 1234 --interval 200    five times a second
  neap top 1234 --once            one screen as text, of two readings a second apart
  neap top 1234 --json            the same as one JSON object
  neap top 1234 --profile         also the functions that hold memory allocated from now on (key p)
  neap top 1234 --profile --once --interval 10000
                                  the functions that hold what was allocated in 10 s

Only the process's own user and root may watch it. The numbers are those of `neap stat`. The process
reports its memory groups on request. Rates are of the time between two readings. The profile
samples allocations as `neap profile` does; at the end, sampling is as it was before.";

/// Watch a running process: memory, groups, zones, CPUs' caches and events.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    /// Id of the process; without it, all processes under neap
    #[arg(value_parser = clap::value_parser!(i32).range(1..))]
    pid: Option<i32>,
    #[command(flatten)]
    timeout: Timeout,
    /// Show the profile: the functions with the most live bytes, by samples of allocations
    #[arg(long, requires = "pid")]
    profile: bool,
    /// Milliseconds from one reading to the next
    #[arg(long, value_name = "MS", default_value = "1000", value_parser = interval)]
    interval: Duration,
    /// Print one screen as text
    #[arg(long)]
    once: bool,
    /// Print one JSON object
    #[arg(long, conflicts_with = "once")]
    json: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = text.parse().map(Duration::from_millis).ok();
    let (least, most) = (SHORTEST.as_millis(), LONGEST.as_millis());
    interval.filter(|it| (SHORTEST..=LONGEST).contains(it)).ok_or(format!("not {least} to {most} milliseconds"))
}

pub(crate) fn main(options: &Options) -> Result<ExitCode> {
    let time = options.timeout.time();
    let Some(pid) = options.pid else {
        let is_once = options.once || options.json;
        return if is_once { all::once(time, options.json) } else { all::run(time, options.interval) };
    };
    let asked = Asked { handle: Arc::new(ProcessHandle::open(pid)?), time };
    let (interval, is_json) = (options.interval, options.json);
    if !options.once && !is_json {
        let first = Reading::take(&asked.handle, asked.time)?;
        return live::run(asked, first, view(interval, options.profile));
    }
    let (state, end) = (view(interval, options.profile), if options.profile { LONGEST_END } else { Duration::ZERO });
    let screen = move || once(&asked, state, is_json);
    let text = within(time + interval + end, &format!("process {pid}"), screen)?;
    print(|output| write!(output, "{text}"))
}

fn view(interval: Duration, is_profiled: bool) -> View {
    let mut view = View::new(interval);
    if is_profiled {
        view.turn_profile();
    }
    view
}

/// Returns a screen of two readings, as text or as a JSON object. If the process has not answered
/// the first request for groups, makes no second one.
fn once(asked: &Asked, mut state: View, is_json: bool) -> Result<String> {
    let take = |state: &mut View| {
        let reading = Reading::take(&asked.handle, asked.time)?;
        if reading.numbers.groups.is_some() && state.groups.failed.is_none() {
            state.groups.follow(asked.groups(), monotonic());
        }
        anyhow::Ok(reading)
    };
    let first = take(&mut state)?;
    if state.profile.is_on() {
        let taken = profiling::once(asked, state.interval);
        state.profile.follow(taken);
    } else {
        std::thread::sleep(state.interval);
    }
    let second = take(&mut state)?;
    let pair = Pair { previous: &first, current: &second };
    state.log.follow(pair);
    Ok(if is_json { format!("{}\n", object(pair, &state)) } else { screen::text(pair, &state) })
}

/// A whole screen as a JSON object.
fn object(pair: Pair<'_>, state: &View) -> Value {
    let now = pair.current;
    let mut object = json!({
        "schema": SCHEMA, "pid": now.pid, "name": now.name, "version": now.numbers.version, "time": now.clock,
        "age_ms": pair.age().as_millis() as u64, "interval_ms": state.interval.as_millis() as u64,
        "summary": summary::json(pair), "groups": null, "groups_failed": state.groups.failed,
        "groups_age_ms": state.groups.age(now.at).map(|age| age.as_millis() as u64),
    });
    for pane in Pane::shown(pair, state) {
        object[pane.name()] = state.listing(pane, pair).json();
    }
    (object["profile"], object["profile_failed"]) = state.profile.json(now);
    object
}
