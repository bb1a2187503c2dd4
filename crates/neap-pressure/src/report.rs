//! The result of a look: levels, the levels with the least headroom, signals, and the parts that
//! could not be read.

use crate::files::Errno;
use crate::groups::Version;
use crate::level::{LimitedBy, MemoryLevel};
use crate::path::PathText;
use crate::place::{FilesRead, GroupDirectory, Visibility};
use crate::process::Subject;
use crate::room::Room;
use crate::signals::{Signal, SignalState};
use crate::stall::Stalls;
use crate::wall::{Pressure, room_to_grow};

/// Most levels that a report lists. A sensor reads further levels as well, and the minima are over
/// all levels.
pub const MOST_LEVELS: usize = 32;

/// Bytes of a decoded `MEMORY_PRESSURE_WRITE` that are kept.
pub(crate) const MOST_TRIGGER: usize = 64;

/// Limits and headroom of a process, and how they were found.
pub struct MemoryReport {
    pub(crate) process: Subject,
    /// The process's group in the version 1 hierarchy with the memory controller (`memory`), and in
    /// version 2 (`unified`).
    pub(crate) memory: GroupDirectory,
    pub(crate) unified: GroupDirectory,
    pub(crate) version: Option<Version>,
    pub(crate) levels: [MemoryLevel; MOST_LEVELS],
    pub(crate) listed: usize,
    pub(crate) unlisted: usize,
    pub(crate) limit: Option<MemoryLevel>,
    pub(crate) wall: Option<MemoryLevel>,
    pub(crate) soft_wall: Option<MemoryLevel>,
    pub(crate) room: Option<Room>,
    pub(crate) swap_headroom: Option<u64>,
    pub(crate) ancestors_hidden: bool,
    pub(crate) uncounted: usize,
    pub(crate) moved: bool,
    pub(crate) is_privileged: bool,
    pub(crate) is_surveyed: bool,
    pub(crate) signals: [SignalState; 8],
    pub(crate) group_stalls: Option<Stalls>,
    pub(crate) machine_stalls: Option<Stalls>,
    pub(crate) watch: PathText,
    pub(crate) watch_is_set: bool,
    pub(crate) trigger: [u8; MOST_TRIGGER],
    pub(crate) trigger_length: Option<usize>,
    pub(crate) members: FilesRead,
    pub(crate) mounts: FilesRead,
    pub(crate) refused: Option<Errno>,
    pub(crate) malformed: bool,
}

impl MemoryReport {
    pub(crate) const fn new(process: Subject) -> MemoryReport {
        const READ: FilesRead = FilesRead { error: None, too_long: 0 };
        MemoryReport {
            process,
            memory: GroupDirectory::new(),
            unified: GroupDirectory::new(),
            version: None,
            levels: [MemoryLevel::new(LimitedBy::Group); MOST_LEVELS],
            listed: 0,
            unlisted: 0,
            limit: None,
            wall: None,
            soft_wall: None,
            room: None,
            swap_headroom: None,
            ancestors_hidden: false,
            uncounted: 0,
            moved: false,
            is_privileged: false,
            is_surveyed: false,
            signals: [SignalState::Not("not surveyed"); 8],
            group_stalls: None,
            machine_stalls: None,
            watch: PathText::new(),
            watch_is_set: false,
            trigger: [0; MOST_TRIGGER],
            trigger_length: None,
            members: READ,
            mounts: READ,
            refused: None,
            malformed: false,
        }
    }

    pub(crate) fn forget_numbers(&mut self) {
        (self.listed, self.unlisted, self.uncounted) = (0, 0, 0);
        (self.limit, self.wall, self.soft_wall, self.swap_headroom, self.room) = (None, None, None, None, None);
        (self.refused, self.malformed, self.ancestors_hidden) = (None, false, false);
    }

    /// Adds a level, and updates the minima over all levels. Of levels with equal values the first
    /// stays.
    pub(crate) fn add(&mut self, level: MemoryLevel) {
        match self.levels.get_mut(self.listed) {
            Some(place) => {
                *place = level;
                self.listed += 1;
            }
            None => self.unlisted += 1,
        }
        let keep = |least: &mut Option<MemoryLevel>, value: fn(&MemoryLevel) -> Option<u64>| {
            let both = [*least, Some(level)].into_iter().flatten();
            *least = crate::level::smallest(both, value);
        };
        keep(&mut self.limit, |level| level.limit);
        keep(&mut self.wall, MemoryLevel::headroom);
        keep(&mut self.soft_wall, MemoryLevel::soft_headroom);
        self.room = [self.room, Room::of(&level)].into_iter().flatten().reduce(Room::nearer);
        self.add_swap(level.swap_headroom());
    }

    pub(crate) fn add_swap(&mut self, headroom: Option<u64>) {
        self.swap_headroom = [self.swap_headroom, headroom].into_iter().flatten().min();
    }

    /// The directory of the group that the kernel charges memory to.
    pub(crate) fn place(&self) -> Option<&GroupDirectory> {
        Some(match self.version? {
            Version::V1 => &self.memory,
            Version::V2 => &self.unified,
        })
    }

    /// The directory with the file of a group's signal. `None` for other signals, and if no mount
    /// shows a directory. A mount point that stands for the group has its limit, events and stalls.
    pub(crate) fn directory_of(&self, signal: Signal) -> Option<&[u8]> {
        let place = match (signal, self.version) {
            (Signal::EventsLocal | Signal::Events, Some(Version::V2)) | (Signal::GroupPressure, _) => &self.unified,
            (Signal::PressureLevel, Some(Version::V1)) => &self.memory,
            _ => return None,
        };
        (place.view > Visibility::Outside).then(|| place.directory.as_bytes())
    }

    /// The process.
    #[must_use]
    pub fn process(&self) -> Subject {
        self.process
    }

    /// Version of cgroups that has the memory controller. `None` if the sensor found no group with
    /// it.
    #[must_use]
    pub fn version(&self) -> Option<Version> {
        self.version
    }

    /// Returns whether version 1 has the memory controller, and version 2 is mounted as well.
    #[must_use]
    pub fn is_hybrid(&self) -> bool {
        self.version == Some(Version::V1) && self.unified.view > Visibility::Nothing
    }

    /// Which part of the process's own group the mounts show.
    #[must_use]
    pub fn view(&self) -> Visibility {
        self.place().map_or(Visibility::Nothing, |place| place.view)
    }

    /// Path of the group in `/proc/PID/cgroup`; empty if there is none.
    #[must_use]
    pub fn member(&self) -> &[u8] {
        self.place().map_or(b"", |place| place.member.as_bytes())
    }

    /// Directory of the group, or the mount point that stands for it; empty if there is none.
    #[must_use]
    pub fn directory(&self) -> &[u8] {
        let found = self.place().filter(|place| place.view > Visibility::Outside);
        found.map_or(b"", |place| shown(place.directory.as_bytes()))
    }

    /// Levels from the process's own group up, then the machine and the process's own limits.
    #[must_use]
    pub fn levels(&self) -> &[MemoryLevel] {
        self.levels.get(..self.listed).unwrap_or_default()
    }

    /// Number of levels beyond [`MOST_LEVELS`]. The minima include them.
    #[must_use]
    pub fn unlisted(&self) -> usize {
        self.unlisted
    }

    /// Directory of a group's level; empty for other levels.
    #[must_use]
    pub fn path<'a>(&'a self, level: &MemoryLevel) -> &'a [u8] {
        if level.owner != LimitedBy::Group {
            return b"";
        }
        let directory = self.place().map_or(&b""[..], |place| place.directory.as_bytes());
        shown(directory.get(..level.path_length).unwrap_or_default())
    }

    /// The level with the smallest limit.
    #[must_use]
    pub fn limit(&self) -> Option<&MemoryLevel> {
        self.limit.as_ref()
    }

    /// The level that binds: the one with the least headroom. Its limit need not be the smallest.
    #[must_use]
    pub fn wall(&self) -> Option<&MemoryLevel> {
        self.wall.as_ref()
    }

    /// The level that throttles first.
    #[must_use]
    pub fn soft_wall(&self) -> Option<&MemoryLevel> {
        self.soft_wall.as_ref()
    }

    /// The room below the nearest limit on resident memory. `None` if none is visible.
    #[must_use]
    pub fn room(&self) -> Option<&Room> {
        self.room.as_ref()
    }

    /// Bytes that may still be swapped out, over all levels and the machine. `None` if unknown.
    #[must_use]
    pub fn swap_headroom(&self) -> Option<u64> {
        self.swap_headroom
    }

    /// The level of pressure, by headroom alone and without hysteresis. `None` without a wall.
    #[must_use]
    pub fn pressure(&self) -> Option<Pressure> {
        let wall = self.wall?;
        Some(Pressure::of(wall.headroom()?, wall.limit?, None))
    }

    /// Bytes that caches may grow by until the pressure is [`Pressure::Low`], by hard and soft
    /// limits.
    #[must_use]
    pub fn room_to_grow(&self) -> u64 {
        let room = |level: Option<MemoryLevel>,
                    headroom: fn(&MemoryLevel) -> Option<u64>,
                    limit: fn(&MemoryLevel) -> Option<u64>| {
            let level = level?;
            Some(room_to_grow(headroom(&level)?, limit(&level)?))
        };
        let hard = room(self.wall, MemoryLevel::headroom, |level| level.limit);
        let soft = room(self.soft_wall, MemoryLevel::soft_headroom, |level| level.high);
        [hard, soft].into_iter().flatten().min().unwrap_or(0)
    }

    /// Returns whether the group has ancestors that are not visible. Their limits are not known.
    #[must_use]
    pub fn ancestors_hidden(&self) -> bool {
        self.ancestors_hidden
    }

    /// Returns whether the process has changed its group since the previous look. Memory that was
    /// charged before stays with the old group. False after [`crate::Sensor::survey`], which
    /// searches anew.
    #[must_use]
    pub fn moved(&self) -> bool {
        self.moved
    }

    /// State of each signal of [`Signal::ALL`], in that order.
    pub fn signals(&self) -> impl Iterator<Item = (Signal, SignalState)> {
        Signal::ALL.into_iter().zip(self.signals)
    }

    /// Stall times of the process's own version 2 group and of the machine, at the last survey.
    #[must_use]
    pub fn stalls(&self) -> (Option<Stalls>, Option<Stalls>) {
        (self.group_stalls, self.machine_stalls)
    }

    /// Returns whether the process has CAP_SYS_RESOURCE. Then its pressure windows may have any
    /// length.
    #[must_use]
    pub fn is_privileged(&self) -> bool {
        self.is_privileged
    }

    /// Bytes that a process has to write to the file of `MEMORY_PRESSURE_WATCH`, as systemd's
    /// variable `MEMORY_PRESSURE_WRITE` says. `None` without a valid value.
    #[must_use]
    pub fn trigger(&self) -> Option<&[u8]> {
        self.trigger.get(..self.trigger_length?)
    }
}

fn shown(path: &[u8]) -> &[u8] {
    if path.is_empty() { b"/" } else { path }
}
