//! The signals of memory pressure that a process can use, in the order of trust.
//!
//! To try a signal, this module opens its file and closes it again. It writes nothing, so it leaves
//! no trigger behind. It opens a file that a process's environment names only if that process is
//! the reader itself (`Subject::Own`).

use crate::files::{Access, Errno, FileKind, Files};
use crate::groups::Reader;
use crate::records::Records;
use crate::stall::Stalls;
use crate::watch::Watch;

/// A source of information about memory pressure.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Signal {
    /// Limits and usages of the group and its ancestors, which the program reads repeatedly.
    Headroom,
    /// `memory.events.local` of the process's own group. It notifies at that group's limits.
    EventsLocal,
    /// `memory.events` of the process's own group. It notifies at limits of the group and those
    /// below it.
    Events,
    /// The file that the service manager names in `MEMORY_PRESSURE_WATCH`.
    Watch,
    /// `memory.pressure` of the process's own version 2 group.
    GroupPressure,
    /// `/proc/pressure/memory`, of the whole machine.
    MachinePressure,
    /// `memory.pressure_level` of version 1, through `cgroup.event_control`.
    PressureLevel,
    /// `MemAvailable` of the whole machine, which the program reads repeatedly.
    Available,
}

impl Signal {
    /// All signals in the order of trust.
    pub const ALL: [Signal; 8] = [
        Signal::Headroom,
        Signal::EventsLocal,
        Signal::Events,
        Signal::Watch,
        Signal::GroupPressure,
        Signal::MachinePressure,
        Signal::PressureLevel,
        Signal::Available,
    ];

    /// The signals that notify on a descriptor. Signals of the group come before that of the
    /// machine, otherwise they are in the order of trust.
    pub const NOTIFYING: [Signal; 6] = [
        Signal::EventsLocal,
        Signal::Events,
        Signal::Watch,
        Signal::GroupPressure,
        Signal::PressureLevel,
        Signal::MachinePressure,
    ];

    /// Name for people and machines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Signal::Headroom => "headroom",
            Signal::EventsLocal => "memory.events.local",
            Signal::Events => "memory.events",
            Signal::Watch => "MEMORY_PRESSURE_WATCH",
            Signal::GroupPressure => "memory.pressure",
            Signal::MachinePressure => "/proc/pressure/memory",
            Signal::PressureLevel => "memory.pressure_level",
            Signal::Available => "MemAvailable",
        }
    }

    /// Why a look of a sensor does not use the signal; `None` if each look reads it.
    #[must_use]
    pub const fn unused_because(self) -> Option<&'static str> {
        match self {
            Signal::Headroom | Signal::Available => None,
            Signal::EventsLocal | Signal::Events | Signal::PressureLevel => {
                Some("tells of a reached limit, not how far it is")
            }
            Signal::Watch => Some("left to the program"),
            Signal::GroupPressure => Some("tells of stalls that a limit near has caused, not how far it is"),
            Signal::MachinePressure => Some("tells of stalls on the machine, not how far a limit is"),
        }
    }
}

/// Whether a signal can be used. [`Signal::unused_because`] says whether looks use it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SignalState {
    /// The signal can be read. If it is one that can notify, it notifies.
    Usable,
    /// The signal can be read, but cannot notify, for the kernel's reason.
    ReadOnly(Errno),
    /// The signal can be used. It covers the whole machine, since the group is the root group.
    WholeMachine,
    /// The signal does not exist.
    Absent,
    /// The signal exists, and the kernel refuses access to it.
    Refused(Errno),
    /// The signal cannot be used for another reason.
    Not(&'static str),
}

impl SignalState {
    /// Returns whether the signal can at least be read.
    #[must_use]
    pub fn is_usable(self) -> bool {
        matches!(self, SignalState::Usable | SignalState::ReadOnly(_) | SignalState::WholeMachine)
    }
}

pub(crate) fn refusal(error: Errno) -> SignalState {
    if error.is_absent() { SignalState::Absent } else { SignalState::Refused(error) }
}

impl<F: Files> Reader<'_, F> {
    /// Tries to open a file of a group.
    pub(crate) fn can_open(&mut self, parts: &[&[u8]], access: Access) -> SignalState {
        let path = self.scratch.set(parts).and_then(|()| self.scratch.as_c_str());
        match path.and_then(|path| self.files.open(path, access)) {
            Ok(_) => SignalState::Usable,
            Err(error) => refusal(error),
        }
    }

    /// Reads a pressure file, and tries to open it for a trigger.
    pub(crate) fn pressure_file(&mut self, parts: &[&[u8]]) -> (SignalState, Option<Stalls>) {
        let writing = self.can_open(parts, Access::ReadWrite);
        if writing == SignalState::Absent {
            return (SignalState::Absent, None);
        }
        let path = self.scratch.set(parts).and_then(|()| self.scratch.as_c_str());
        let mut lines = match path.and_then(|path| Records::open(self.files, path, b'\n', &mut *self.buffer)) {
            Ok(lines) => lines,
            Err(error) => return (refusal(error), None),
        };
        let mut stalls = Stalls::default();
        let mut found = false;
        while let Some(line) = lines.next() {
            found |= stalls.add(line);
        }
        match (lines.error, writing) {
            (Some(Errno::OPNOTSUPP), _) => (SignalState::Not("pressure stall information is switched off"), None),
            (Some(error), _) => (SignalState::Refused(error), None),
            _ if !found => (SignalState::Not("the file holds no stall times"), None),
            (None, SignalState::Refused(error)) => (SignalState::ReadOnly(error), Some(stalls)),
            (None, _) => (SignalState::Usable, Some(stalls)),
        }
    }

    /// Returns the state of the file that systemd's variable names.
    pub(crate) fn watch(&mut self, value: Option<&[u8]>, is_own: bool) -> SignalState {
        let path = match value.map(Watch::parse) {
            None => return SignalState::Absent,
            Some(Watch::Off) => return SignalState::Not("switched off by the service manager"),
            Some(Watch::Malformed) => return SignalState::Not("the path is not absolute and normalised"),
            Some(Watch::Path(path)) => path,
        };
        let kind = self.scratch.set(&[path]).and_then(|()| self.scratch.as_c_str());
        match kind.and_then(|path| self.files.kind(path)) {
            Err(error) => SignalState::Refused(error),
            Ok(FileKind::Directory) => SignalState::Refused(Errno::ISDIR),
            Ok(FileKind::Other) => SignalState::Not("the file is not one of procfs or cgroup2"),
            Ok(_) if !is_own => SignalState::Not("not tried: the variable is of another process"),
            Ok(FileKind::Socket) => SignalState::Usable,
            Ok(FileKind::Stream) => self.can_open(&[path], Access::Read),
            Ok(FileKind::Kernel) => self.can_open(&[path], Access::ReadWrite),
        }
    }
}
