//! `neap pressure --watch`: repeatedly prints headroom, how fast it shrinks, and the level of
//! pressure.
//!
//! # Design
//! Each line is one look of a [`Series`]. If a look takes longer than the timeout, the command ends
//! with an error.
//!
//! Between two looks the command waits on a [`Trigger`]. A notification brings a look at once. For
//! [`DEAF`] after that the command does not wait on the trigger. Without a signal that can be armed
//! it only sleeps, and each line has the part of the time since the line before in which tasks
//! waited for memory.

use core::fmt;
use core::time::Duration;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::Instant;

use anyhow::Result;
use neap_pressure::{
    Fired, LimitEvents, MemoryReport, Sample, Sensor, Series, Signal, SignalState, Size, StallReading, StallWindow,
    Step, Subject, System, Trigger, room_to_grow,
};
use serde_json::{Value, json};

use super::{PressureOptions, described, level};
use crate::look::handle::ProcessHandle;
use crate::look::subject::{SCHEMA, print, within};

/// The result of one look.
struct WatchLine {
    /// Milliseconds since the first look.
    at_ms: u64,
    headroom: u64,
    limit: u64,
    /// The level that binds, as in the report of a single look.
    wall: Value,
    step: Step,
    /// The notification that has brought this look.
    fired: Option<Fired>,
    /// Hundredths of a percent of the time since the last look in which tasks waited for memory.
    stalled: Option<u32>,
}

/// Adds the headroom in a report to the series. `None` if no level in the report has a headroom.
fn add(series: &mut Series, report: &MemoryReport, at_ms: u64) -> Option<WatchLine> {
    let wall = report.wall()?;
    let (headroom, limit) = (wall.headroom()?, wall.limit?);
    let step = series.add(Sample { at_ms, headroom, limit });
    Some(WatchLine { at_ms, headroom, limit, wall: level(report, wall), step, fired: None, stalled: None })
}

/// Reads the stall times of the group, or of the machine, from a survey at time `at`.
fn stall_reading(report: &MemoryReport, at: Duration) -> Option<StallReading> {
    let (group, machine) = report.stalls();
    Some(StallReading { at_us: at.as_micros() as u64, stalls: group.or(machine)? })
}

impl WatchLine {
    fn object(&self) -> Value {
        json!({
            "schema": SCHEMA,
            "at_ms": self.at_ms,
            "headroom": self.headroom,
            "limit": self.limit,
            "limit_changed": self.step.limit_changed,
            "growth_per_second": self.step.growth,
            "ms_to_wall": self.step.ms_to_wall,
            "pressure": self.step.pressure.name(),
            "room_to_grow": room_to_grow(self.headroom, self.limit),
            "wall": self.wall,
            "notified": self.fired.and_then(noticed).map(|(kind, _)| kind),
            "stalled_percent": self.stalled.map(|stalled| f64::from(stalled) / 100.0),
        })
    }
}

/// Returns a time until the limit is reached, for people.
pub(crate) fn wall_in(ms: u64) -> String {
    match ms / 1000 {
        seconds @ 0..=9 => format!("{seconds}.{} s", ms % 1000 / 100),
        seconds @ 10..=5999 => format!("{seconds} s"),
        seconds => format!("{} h", seconds / 3600),
    }
}

/// The columns of [`WatchLine`].
const HEAD: &str = "    time    headroom       limit        growth   wall in  pressure";

impl fmt::Display for WatchLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Step { pressure, limit_changed, growth, ms_to_wall, .. } = self.step;
        let (seconds, tenths) = (self.at_ms / 1000, self.at_ms % 1000 / 100);
        let time = format!("{seconds}.{tenths} s");
        let [headroom, limit] = [self.headroom, self.limit].map(|bytes| Size(bytes).to_string());
        let growth = if growth == 0 { "-".into() } else { format!("{}/s", Size(growth)) };
        let wall = ms_to_wall.map_or("-".into(), wall_in);
        write!(f, "{time:>8}  {headroom:>10}  {limit:>10}  {growth:>12}  {wall:>8}  {}", pressure.name())?;
        if limit_changed {
            write!(f, ", the limit has changed")?;
        }
        if let Some(stalled @ 1..) = self.stalled {
            write!(f, ", tasks waited {}.{:02} % of the time", stalled / 100, stalled % 100)?;
        }
        match self.fired.and_then(noticed) {
            Some((_, what)) => write!(f, ", notified: {what}"),
            None => Ok(()),
        }
    }
}

/// A notification for machines and for people. `None` if nothing has happened.
fn noticed(fired: Fired) -> Option<(&'static str, &'static str)> {
    match fired {
        Fired::Nothing | Fired::Gone => None,
        Fired::Limit(LimitEvents { oom_kill: 1.., .. }) => Some(("oom kill", "the kernel killed a process")),
        Fired::Limit(LimitEvents { max: 0, oom: 0, .. }) => Some(("high", "throttled above memory.high")),
        Fired::Limit(_) => Some(("max", "a limit was reached")),
        Fired::Stall => Some(("stall", "tasks wait for memory")),
        Fired::Reclaim => Some(("reclaim", "the kernel finds little to reclaim")),
    }
}

/// The signals that this command arms. The file of `MEMORY_PRESSURE_WATCH` is left to the programs
/// that inherit the variable: it may be a FIFO, from which each notification is read once.
const SIGNALS: [Signal; 5] =
    [Signal::EventsLocal, Signal::Events, Signal::GroupPressure, Signal::PressureLevel, Signal::MachinePressure];

/// Time after a notification in which the command waits for no other one.
const DEAF: Duration = Duration::from_secs(1);

/// A trigger, if one can be armed, and when the next notification is waited for.
struct Notifier {
    files: System,
    trigger: Option<Trigger<System>>,
    deaf_until: Instant,
}

impl Notifier {
    /// Waits until `due`, or returns earlier with a notification.
    fn wait_until(&mut self, due: Instant) -> Option<Fired> {
        loop {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let deaf = self.deaf_until.saturating_duration_since(Instant::now());
            let Some(trigger) = self.trigger.as_mut().filter(|_| deaf.is_zero()) else {
                sleep(if self.trigger.is_some() { left.min(deaf) } else { left });
                continue;
            };
            let fired = trigger.wait(&self.files, left.as_millis().clamp(1, 60_000) as u32);
            match fired {
                Fired::Gone => self.trigger = None,
                fired if noticed(fired).is_some() => {
                    self.deaf_until = Instant::now() + DEAF;
                    return Some(fired);
                }
                // Events of protection may come at any rate.
                _ if Instant::now() < due => self.deaf_until = Instant::now() + DEAF,
                _ => {}
            }
        }
    }
}

/// The signal that notifies, or why none does, in a line.
fn heading(trigger: &Trigger<System>) -> String {
    if let Some(signal) = trigger.signal() {
        return format!("Notified by {}: a reached limit or a stall brings a line at once", signal.name());
    }
    let reason = |(signal, state): (Signal, SignalState)| match described(state) {
        (state, None) => format!("{} {state}", signal.name()),
        (state, Some(reason)) => format!("{} {state}: {reason}", signal.name()),
    };
    let reasons: Vec<_> = trigger.states().filter(|(_, state)| *state != SignalState::Absent).map(reason).collect();
    format!("No signal notifies ({})", if reasons.is_empty() { "all are absent".into() } else { reasons.join("; ") })
}

/// Looks until the process ends, or `--times` times.
pub(super) fn main(
    options: &PressureOptions,
    every: Duration,
    subject: Subject,
    files: System,
    handle: Option<ProcessHandle>,
) -> Result<ExitCode> {
    let (mut begin, mut next) = (None, Instant::now());
    let mut series = Series::new();
    let mut state = (Box::new(Sensor::new(subject)), files, None);
    // A copy of a system's files cannot notify.
    let is_real = options.root.is_none();
    let mut notifier = Notifier { files: System::new(), trigger: None, deaf_until: next };
    let (mut looks, mut fired, mut stalls) = (0, None, None);
    while options.times.is_none_or(|times| looks < times) {
        if looks > 0 {
            next = if fired.is_none() { next + every } else { next };
            fired = notifier.wait_until(next);
        }
        let (mut sensor, files, _) = state;
        let is_armed = notifier.trigger.is_some();
        state = within(options.timeout.time(), "the limits of a process", move || {
            let is_moved = sensor.look(&files).moved();
            let report = (is_moved || !is_armed).then(|| sensor.survey(&files));
            let report = report.filter(|_| is_real);
            let trigger = report.map(|report| Trigger::arm(&files, report, &SIGNALS, StallWindow::DEFAULT));
            Ok((sensor, files, trigger))
        })?;
        if handle.as_ref().is_some_and(ProcessHandle::has_ended) {
            break;
        }
        let at = begin.get_or_insert_with(Instant::now).elapsed();
        let mut seen = add(&mut series, state.0.report(), at.as_millis() as u64);
        let is_first = looks == 0;
        let head = state.2.as_ref().map(heading);
        notifier.trigger = state.2.take().filter(|trigger| trigger.signal().is_some()).or(notifier.trigger);
        let before = stalls.take();
        if notifier.trigger.is_none() {
            stalls = stall_reading(state.0.report(), at);
        }
        if let Some(line) = &mut seen {
            line.fired = fired;
            line.stalled = stalls.zip(before).and_then(|(now, before)| now.some_since(&before));
        }
        print(|output| {
            if options.json {
                let object = seen.as_ref().map_or(Value::Null, WatchLine::object);
                return writeln!(output, "{object}");
            }
            if is_first {
                head.iter().try_for_each(|head| writeln!(output, "{head}"))?;
                writeln!(output, "{HEAD}")?;
            }
            match &seen {
                Some(seen) => writeln!(output, "{seen}"),
                None => writeln!(output, "no limit is visible"),
            }
        })?;
        looks += 1;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use neap_pressure::Pressure;

    fn seen(at_ms: u64, growth: u64, ms_to_wall: Option<u64>, limit_changed: bool) -> String {
        let (headroom, limit) = (324 << 20, 1 << 30);
        let pressure = Pressure::of(headroom, limit, ms_to_wall);
        let step = Step { pressure, level_changed: false, limit_changed, growth, ms_to_wall };
        WatchLine { at_ms, headroom, limit, wall: Value::Null, step, fired: None, stalled: Some(0) }.to_string()
    }

    #[test]
    fn a_line_has_the_columns_of_its_head() {
        let line = seen(61_250, 12 << 20, Some(27_000), false);
        assert_eq!(line, "  61.2 s   324.0 MiB     1.0 GiB    12.0 MiB/s      27 s  low");
        let ends = |text: &str| -> Vec<usize> {
            let bytes = text.as_bytes();
            (1..bytes.len())
                .filter(|&at| bytes[at] == b' ' && bytes[at - 1] != b' ' && bytes.get(at + 1) == Some(&b' '))
                .collect()
        };
        assert_eq!(ends(&line), ends(HEAD), "{line}\n{HEAD}");
    }

    #[test]
    fn short_time_to_the_wall_has_tenths() {
        let shown = [0, 999, 9999, 10_000, 5_999_999, 6_000_000, u64::MAX].map(wall_in);
        assert_eq!(shown, ["0.0 s", "0.9 s", "9.9 s", "10 s", "5999 s", "1 h", "5124095576030 h"]);
    }

    #[test]
    fn stalls_since_the_line_before_are_a_percentage() {
        let (headroom, limit) = (324 << 20, 1 << 30);
        let pressure = Pressure::of(headroom, limit, None);
        let step = Step { pressure, level_changed: false, limit_changed: false, growth: 0, ms_to_wall: None };
        let line = |stalled| WatchLine { at_ms: 0, headroom, limit, wall: Value::Null, step, fired: None, stalled };
        assert!(line(Some(1205)).to_string().ends_with("roomy, tasks waited 12.05 % of the time"));
        assert_eq!(line(Some(1205)).object()["stalled_percent"], 12.05);
        assert!(line(Some(0)).to_string().ends_with("roomy") && line(None).object()["stalled_percent"].is_null());
    }

    #[test]
    fn what_is_not_known_is_a_dash_and_a_changed_limit_is_named() {
        let line = seen(0, 0, None, true);
        assert!(line.contains("  -         -  roomy, the limit has changed"), "{line}");
    }
}
