//! A trigger: one signal of memory pressure, armed so that the kernel notifies of it.
//!
//! # Design
//! [`Trigger::arm`] tries signals in the caller's order, which is that of trust in
//! [`Signal::NOTIFYING`], and keeps the first that the kernel takes. The caller waits on its
//! descriptor, for the bits of [`Trigger::wanted`], and passes the answer to [`Trigger::fired`].
//!
//! | signal | armed by | bits | after a notification |
//! |---|---|---|---|
//! | `memory.events.local`, `memory.events` | opening | urgent | read again |
//! | `MEMORY_PRESSURE_WATCH` | text of `MEMORY_PRESSURE_WRITE` | urgent or data | data is read |
//! | `memory.pressure`, `/proc/pressure/memory` | a text, with a NUL | urgent | never read |
//! | `memory.pressure_level` | an eventfd in `cgroup.event_control` | data | read |
//!
//! The events are those of the group with the nearest limit, which may be an ancestor: an
//! ancestor's limit does not show in the events of the groups below it. If they cannot be read, the
//! events are those of the process's own group.
//!
//! Each open pressure file has a trigger of its own. So a trigger on the file that
//! `MEMORY_PRESSURE_WATCH` names does not disturb a library of the program that uses the same file.
//! A second text on one descriptor is refused as busy.
//!
//! A file of cgroups reports an error bit with each notification. A pressure file reports it if it
//! holds no trigger, or if its group is gone. Then [`Fired::Gone`] tells the caller to arm anew:
//! such a descriptor would be ready forever.

use crate::files::{Access, Errno, FileKind, Files};
use crate::level::{LimitedBy, MemoryLevel};
use crate::notify::{Notify, Ready};
use crate::path::PathText;
use crate::process::Subject;
use crate::report::MemoryReport;
use crate::signals::{Signal, SignalState, refusal};
use crate::stall::{LONGEST_TRIGGER, StallWindow};
use crate::text::{key_value, number};
use crate::watch::Watch;

/// Most bytes of an events file that are read. The files have fewer than ten short lines.
const EVENTS: usize = 512;
/// Most reads that empty a FIFO, device or socket at one notification.
const READS: usize = 16;
/// The level of version 1 that notifies, also if a group below has a listener. Below this level the
/// kernel finds enough file pages.
const LEVEL: &[u8] = b" medium,hierarchy";

/// Counters of an events file. Version 2 counts from the group's creation on.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct LimitEvents {
    /// How often processes were throttled above `memory.high`.
    pub high: u64,
    /// How often the use was about to exceed `memory.max`.
    pub max: u64,
    /// How often the kernel found nothing to reclaim at `memory.max`.
    pub oom: u64,
    /// Processes that the kernel killed.
    pub oom_kill: u64,
}

impl LimitEvents {
    fn parse(text: &[u8]) -> LimitEvents {
        let mut found = LimitEvents::default();
        for (key, value) in text.split(|byte| *byte == b'\n').filter_map(key_value) {
            let place = match key {
                b"high" => &mut found.high,
                b"max" => &mut found.max,
                b"oom" => &mut found.oom,
                b"oom_kill" => &mut found.oom_kill,
                _ => continue,
            };
            *place = number(value).unwrap_or(0);
        }
        found
    }

    fn since(self, before: LimitEvents) -> LimitEvents {
        LimitEvents {
            high: self.high.saturating_sub(before.high),
            max: self.max.saturating_sub(before.max),
            oom: self.oom.saturating_sub(before.oom),
            oom_kill: self.oom_kill.saturating_sub(before.oom_kill),
        }
    }
}

/// What a descriptor has notified of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fired {
    /// Nothing that concerns a limit.
    Nothing,
    /// A limit was reached: the events since the last notification.
    Limit(LimitEvents),
    /// Tasks have waited for memory longer than the threshold, or the service manager says so.
    Stall,
    /// Reclaim in a group of version 1 finds little.
    Reclaim,
    /// The descriptor notifies no more: it was closed, or its group is gone. It must not be waited
    /// on.
    Gone,
}

/// How an armed descriptor notifies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Armed {
    Events(LimitEvents),
    Stalls,
    Stream,
    Counter,
}

/// One armed signal, or none, and why the others are not armed. Dropping it disarms the signal.
///
/// ```
/// use neap_pressure::{Fired, Sensor, Signal, StallWindow, Subject, System, Trigger};
///
/// let files = System::new();
/// let mut sensor = Box::new(Sensor::new(Subject::Own));
/// let report = sensor.survey(&files);
/// let mut trigger = Trigger::arm(&files, report, &Signal::NOTIFYING, StallWindow::DEFAULT);
/// match trigger.wait(&files, 10) {
///     Fired::Nothing => println!("10 ms are over"),
///     Fired::Gone => trigger.states().for_each(|each| println!("{each:?}")),
///     fired => println!("{fired:?}: {:?}", sensor.look(&files).wall()),
/// }
/// ```
pub struct Trigger<N: Notify> {
    armed: Option<(Signal, Armed, N::File)>,
    states: [SignalState; Signal::ALL.len()],
}

impl<N: Notify> Trigger<N> {
    /// Arms the first of `signals` that the kernel takes. `report` is of a
    /// [survey](crate::Sensor::survey) of the own process. `window` is for the pressure files.
    ///
    /// Call it again after the process moved to another group, and in a child of fork, which
    /// otherwise shares the parent's triggers.
    pub fn arm(files: &N, report: &MemoryReport, signals: &[Signal], window: StallWindow) -> Trigger<N> {
        let mut trigger = Trigger { armed: None, states: [SignalState::Not("not tried"); Signal::ALL.len()] };
        let mut path = PathText::new();
        for signal in signals {
            let state = match &trigger.armed {
                Some(_) => SignalState::Not("not tried: a signal with more trust is armed"),
                None => match arm(files, report, *signal, window, &mut path) {
                    Ok((armed, file)) => {
                        trigger.armed = Some((*signal, armed, file));
                        SignalState::Usable
                    }
                    Err(state) => state,
                },
            };
            if let Some(place) = trigger.states.get_mut(*signal as usize) {
                *place = state;
            }
        }
        trigger
    }

    /// The armed signal.
    #[must_use]
    pub fn signal(&self) -> Option<Signal> {
        Some(self.armed.as_ref()?.0)
    }

    /// The descriptor to wait on.
    #[must_use]
    pub fn file(&self) -> Option<&N::File> {
        Some(&self.armed.as_ref()?.2)
    }

    /// The bits to wait for.
    #[must_use]
    pub fn wanted(&self) -> Ready {
        match self.armed {
            Some((_, Armed::Events(_) | Armed::Stalls, _)) => Ready::URGENT,
            Some((_, Armed::Stream | Armed::Counter, _)) => Ready::DATA,
            None => Ready::default(),
        }
    }

    /// State of each signal that [`Trigger::arm`] was given: usable if it is armed, otherwise why
    /// it is not.
    pub fn states(&self) -> impl Iterator<Item = (Signal, SignalState)> {
        let was_given = |state: &SignalState| *state != SignalState::Not("not tried");
        Signal::ALL.into_iter().zip(self.states).filter(move |(_, state)| was_given(state))
    }

    /// Returns what has happened, by the bits that `poll` has returned, and lets the descriptor
    /// notify again. Disarms at [`Fired::Gone`].
    pub fn fired(&mut self, files: &N, ready: Ready) -> Fired {
        let Some((_, armed, file)) = &mut self.armed else { return Fired::Gone };
        if ready == Ready::default() {
            return Fired::Nothing;
        }
        let fired = match armed {
            _ if ready.has(Ready::INVALID) => Fired::Gone,
            Armed::Events(before) => match read_events(files, file) {
                Ok(now) => {
                    let events = now.since(*before);
                    *before = now;
                    if events == LimitEvents::default() { Fired::Nothing } else { Fired::Limit(events) }
                }
                Err(_) => Fired::Gone,
            },
            Armed::Stalls if ready.has(Ready::ERROR) => Fired::Gone,
            Armed::Stalls if ready.has(Ready::URGENT) => Fired::Stall,
            Armed::Stream if ready.has(Ready::DATA) && empty(files, file) => Fired::Stall,
            Armed::Counter if ready.has(Ready::DATA) && empty(files, file) => Fired::Reclaim,
            _ if ready.has(Ready(Ready::ERROR.0 | Ready::CLOSED.0 | Ready::DATA.0)) => Fired::Gone,
            _ => Fired::Nothing,
        };
        if fired == Fired::Gone {
            self.armed = None;
        }
        fired
    }

    /// Waits until the signal notifies, at most for `milliseconds`, and returns what has happened.
    pub fn wait(&mut self, files: &N, milliseconds: u32) -> Fired {
        let (wanted, file) = (self.wanted(), self.file());
        let ready = file.map_or(Ok(Ready::INVALID), |file| files.wait(file, wanted, milliseconds));
        self.fired(files, ready.unwrap_or(Ready::INVALID))
    }
}

/// Reads all data. Returns whether there was any, and the other end is open.
fn empty<F: Files>(files: &F, file: &mut F::File) -> bool {
    let mut buffer = [0; 64];
    for reads in 0..READS {
        match files.read(file, &mut buffer) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(Errno::AGAIN) => return reads > 0,
            Err(_) => return false,
        }
    }
    true
}

fn read_events<N: Notify>(files: &N, file: &mut N::File) -> Result<LimitEvents, Errno> {
    let mut buffer = [0; EVENTS];
    let length = files.read_anew(file, &mut buffer)?;
    Ok(LimitEvents::parse(buffer.get(..length).unwrap_or_default()))
}

/// Directory of the group whose limit is nearest, if a group has it.
fn nearest_group(report: &MemoryReport) -> Option<&[u8]> {
    let soft = report.soft_wall().filter(|soft| {
        let hard = report.wall().and_then(MemoryLevel::headroom);
        hard.is_none_or(|hard| soft.soft_headroom().is_some_and(|soft| soft <= hard))
    });
    let nearest = soft.or(report.wall()).filter(|level| level.owner == LimitedBy::Group)?;
    Some(report.path(nearest))
}

/// Arms one signal. On failure returns why it is not armed.
fn arm<N: Notify>(
    files: &N,
    report: &MemoryReport,
    signal: Signal,
    window: StallWindow,
    path: &mut PathText,
) -> Result<(Armed, N::File), SignalState> {
    let directory = || report.directory_of(signal).ok_or(SignalState::Absent);
    match signal {
        Signal::Headroom | Signal::Available => Err(SignalState::Not("does not notify")),
        Signal::EventsLocal | Signal::Events => {
            let (own, name) = (directory()?, signal.name().as_bytes());
            let mut arm = |group| {
                let mut file = open(files, path, &[group, b"/", name], Access::Read)?;
                let now = read_events(files, &mut file).map_err(refusal)?;
                Ok((Armed::Events(now), file))
            };
            arm(nearest_group(report).unwrap_or(own)).or_else(|_| arm(own))
        }
        Signal::Watch => arm_watch(files, report, window, path),
        Signal::GroupPressure if report.signals.get(signal as usize) == Some(&SignalState::WholeMachine) => {
            Err(SignalState::Not("it reports the whole machine"))
        }
        Signal::GroupPressure => arm_stalls(files, report, &[directory()?, b"/memory.pressure"], window, path),
        Signal::MachinePressure => arm_stalls(files, report, &[b"/proc/pressure/memory"], window, path),
        Signal::PressureLevel => {
            let directory = directory()?;
            let level = open(files, path, &[directory, b"/memory.pressure_level"], Access::Read)?;
            let mut control = open(files, path, &[directory, b"/cgroup.event_control"], Access::Write)?;
            let counter = files.counter().map_err(SignalState::Refused)?;
            let (mut text, mut end) = ([0; 48], 0);
            put_number(&mut text, &mut end, files.number(&counter));
            put(&mut text, &mut end, b" ");
            put_number(&mut text, &mut end, files.number(&level));
            put(&mut text, &mut end, LEVEL);
            files.write(&mut control, text.get(..end).unwrap_or_default()).map_err(SignalState::Refused)?;
            Ok((Armed::Counter, counter))
        }
    }
}

fn open<F: Files>(files: &F, path: &mut PathText, parts: &[&[u8]], access: Access) -> Result<F::File, SignalState> {
    path.set(parts).and_then(|()| path.as_c_str()).and_then(|path| files.open(path, access)).map_err(refusal)
}

/// Writes a threshold to a pressure file. A process in a user namespace may have CAP_SYS_RESOURCE
/// there alone: the kernel then takes only windows without privilege.
fn arm_stalls<N: Notify>(
    files: &N,
    report: &MemoryReport,
    parts: &[&[u8]],
    window: StallWindow,
    path: &mut PathText,
) -> Result<(Armed, N::File), SignalState> {
    let mut file = open(files, path, parts, Access::ReadWrite)?;
    let mut text = [0; LONGEST_TRIGGER];
    let mut write = |is_privileged| {
        let length = window.allowed(is_privileged).write(&mut text);
        files.write(&mut file, text.get(..length).unwrap_or_default())
    };
    let written = match write(report.is_privileged) {
        Err(Errno::INVAL | Errno::PERM) if report.is_privileged => write(false),
        written => written,
    };
    match written {
        Ok(()) => Ok((Armed::Stalls, file)),
        Err(Errno::OPNOTSUPP) => Err(SignalState::Not("pressure stall information is switched off")),
        Err(error) => Err(SignalState::Refused(error)),
    }
}

/// Arms the file that the service manager names.
fn arm_watch<N: Notify>(
    files: &N,
    report: &MemoryReport,
    window: StallWindow,
    path: &mut PathText,
) -> Result<(Armed, N::File), SignalState> {
    if !report.watch_is_set {
        return Err(SignalState::Absent);
    }
    let watch = match Watch::parse(report.watch.as_bytes()) {
        Watch::Off => return Err(SignalState::Not("switched off by the service manager")),
        Watch::Malformed => return Err(SignalState::Not("the path is not absolute and normalised")),
        Watch::Path(_) if report.process != Subject::Own => {
            return Err(SignalState::Not("not tried: the variable is of another process"));
        }
        Watch::Path(watch) => watch,
    };
    let set = path.set(&[watch]).and_then(|()| path.as_c_str());
    let kind = set.and_then(|path| files.kind(path)).map_err(SignalState::Refused)?;
    let text = report.trigger().filter(|text| !text.is_empty());
    let (armed, mut file) = match kind {
        FileKind::Directory => return Err(SignalState::Refused(Errno::ISDIR)),
        FileKind::Other => return Err(SignalState::Not("the file is not one of procfs or cgroup2")),
        FileKind::Kernel if text.is_none() => return arm_stalls(files, report, &[watch], window, path),
        FileKind::Kernel => (Armed::Stalls, open(files, path, &[watch], Access::ReadWrite)?),
        FileKind::Stream => {
            let access = if text.is_some() { Access::ReadWrite } else { Access::Read };
            (Armed::Stream, open(files, path, &[watch], access)?)
        }
        FileKind::Socket => {
            let set = path.set(&[watch]).and_then(|()| path.as_c_str());
            (Armed::Stream, set.and_then(|path| files.connect(path)).map_err(SignalState::Refused)?)
        }
    };
    if let Some(text) = text {
        files.write(&mut file, text).map_err(SignalState::Refused)?;
    }
    Ok((armed, file))
}

fn put(text: &mut [u8], end: &mut usize, bytes: &[u8]) {
    for (place, byte) in text.iter_mut().skip(*end).zip(bytes) {
        *place = *byte;
    }
    *end += bytes.len();
}

fn put_number(text: &mut [u8], end: &mut usize, number: i32) {
    let (mut digits, mut rest, mut at) = ([0; 10], number.unsigned_abs(), 10);
    while at > 0 && (rest > 0 || at == 10) {
        at -= 1;
        if let Some(digit) = digits.get_mut(at) {
            *digit = b'0' + (rest % 10) as u8;
        }
        rest /= 10;
    }
    put(text, end, digits.get(at..).unwrap_or_default());
}
