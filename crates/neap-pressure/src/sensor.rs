//! Looks at a process: finds its groups, and reads their numbers at each look.

use crate::files::{Access, Files};
use crate::groups::{Reader, Version};
use crate::level::{LimitedBy, MemoryLevel};
use crate::path::PathText;
use crate::place::{self, HASH, Visibility, hashed, read_members, read_mounts};
use crate::process::{Folder, MachineMemory, ProcessFacts, Subject};
use crate::records::Records;
use crate::report::MemoryReport;
use crate::signals::{Signal, SignalState};
use crate::watch::decode;

/// Longest line that is read whole.
const BUFFER: usize = 4096;

/// Names of systemd's variables, with the equals sign.
const WATCH: &[u8] = b"MEMORY_PRESSURE_WATCH=";
const WRITE: &[u8] = b"MEMORY_PRESSURE_WRITE=";

/// Finds and reads the limits of one process.
///
/// A sensor holds all buffers, about 32 KiB. So a look needs little stack and no allocation.
pub struct Sensor {
    report: MemoryReport,
    scratch: PathText,
    buffer: [u8; BUFFER],
    /// Hash of the memberships at the last search for groups.
    members: Option<u64>,
    own: ProcessFacts,
}

impl Sensor {
    /// A sensor that has not looked yet.
    #[must_use]
    pub const fn new(process: Subject) -> Sensor {
        let own = ProcessFacts { address_space: None, data: None, is_privileged: false };
        Sensor { report: MemoryReport::new(process), scratch: PathText::new(), buffer: [0; BUFFER], members: None, own }
    }

    /// Reads all levels. Before that, searches for the groups at the first look, if the process
    /// moved to another group, or if its group's directory is gone.
    ///
    /// A look does not notice new mounts. After [`Sensor::forget`], the next look searches again.
    pub fn look<F: Files>(&mut self, files: &F) -> &MemoryReport {
        self.find(files);
        self.read_levels(files);
        &self.report
    }

    /// Searches for the groups, reads all levels, and tries which signals can be used.
    pub fn survey<F: Files>(&mut self, files: &F) -> &MemoryReport {
        self.forget();
        self.look(files);
        self.read_environment(files);
        self.try_signals(files);
        &self.report
    }

    /// Makes the next look search for the groups again.
    pub fn forget(&mut self) {
        self.members = None;
    }

    /// The report of the last look.
    #[must_use]
    pub fn report(&self) -> &MemoryReport {
        &self.report
    }

    fn reader<'a, F: Files>(
        files: &'a F,
        (scratch, buffer): (&'a mut PathText, &'a mut [u8; BUFFER]),
    ) -> Reader<'a, F> {
        Reader { files, scratch, buffer, refused: None, malformed: false }
    }

    fn find<F: Files>(&mut self, files: &F) {
        let folder = Folder::of(self.report.process);
        let before = self.members;
        let now = self.hash_members(files, &folder);
        self.report.moved = before.is_some() && before != now;
        if before.is_some() && before == now && self.is_there(files) {
            return;
        }
        let MemoryReport { memory, unified, members, mounts, .. } = &mut self.report;
        let mut hash = HASH;
        let path = self.scratch.set(&[folder.as_bytes(), b"/cgroup"]).and_then(|()| self.scratch.as_c_str());
        if let Ok(path) = path {
            *members = read_members(files, path, (&mut *memory, &mut *unified), &mut self.buffer, &mut hash);
        }
        let places = (memory, unified);
        *mounts = read_mounts(files, c"/proc/self/mountinfo", places, &mut self.buffer, &mut self.scratch);
        self.members = Some(hash);
        self.own = Sensor::reader(files, (&mut self.scratch, &mut self.buffer)).own(&folder);
    }

    /// Returns a hash of the current memberships; `None` if the path of the file is too long.
    fn hash_members<F: Files>(&mut self, files: &F, folder: &Folder) -> Option<u64> {
        self.scratch.set(&[folder.as_bytes(), b"/cgroup"]).ok()?;
        let path = self.scratch.as_c_str().ok()?;
        let Ok(mut lines) = Records::open(files, path, b'\n', &mut self.buffer) else {
            return Some(HASH);
        };
        let mut hash = HASH;
        while let Some(line) = lines.next() {
            hash = hashed(hash, line);
        }
        Some(hash)
    }

    /// Returns whether the directory that was found still exists. True if no mount shows the group.
    fn is_there<F: Files>(&mut self, files: &F) -> bool {
        let MemoryReport { memory, unified, version, .. } = &self.report;
        let place = match version {
            Some(Version::V1) => memory,
            Some(Version::V2) => unified,
            None => return true,
        };
        place.view <= Visibility::Outside || place::is_group(files, place.directory.as_bytes(), b"", &mut self.scratch)
    }

    fn read_levels<F: Files>(&mut self, files: &F) {
        self.report.forget_numbers();
        let folder = Folder::of(self.report.process);
        let mut reader = Sensor::reader(files, (&mut self.scratch, &mut self.buffer));
        let MemoryReport { memory, .. } = &self.report;
        // Version 1 has the memory controller if its hierarchy is mounted and the process is in it.
        self.report.version = Some(if memory.view > Visibility::Nothing { Version::V1 } else { Version::V2 });
        let has_memory = read_groups(&mut reader, &mut self.report);
        if self.report.version == Some(Version::V2) && !has_memory && !lists_memory(&mut reader, &self.report) {
            self.report.version = None;
        }
        let MachineMemory { level, swap_free, .. } = reader.machine();
        if self.own.address_space.is_some() || self.own.data.is_some() {
            self.own = reader.own(&folder);
        }
        let (refused, malformed) = (reader.refused, reader.malformed);
        (self.report.refused, self.report.malformed) = (refused, malformed);
        for level in [level, self.own.address_space, self.own.data].into_iter().flatten() {
            self.report.add(level);
        }
        self.report.add_swap(swap_free);
        self.report.is_privileged = self.own.is_privileged;
    }

    /// Reads systemd's variables.
    fn read_environment<F: Files>(&mut self, files: &F) {
        let Sensor { report, scratch, buffer, .. } = self;
        let _ = report.watch.set(&[]);
        (report.watch_is_set, report.trigger_length) = (false, None);
        let folder = Folder::of(report.process);
        let path = scratch.set(&[folder.as_bytes(), b"/environ"]).and_then(|()| scratch.as_c_str());
        let Ok(mut variables) = path.and_then(|path| Records::open(files, path, 0, buffer)) else {
            return;
        };
        while let Some(variable) = variables.next() {
            if let Some(value) = variable.strip_prefix(WATCH) {
                report.watch_is_set = report.watch.set(&[value]).is_ok();
            } else if let Some(value) = variable.strip_prefix(WRITE) {
                report.trigger_length = decode(value, &mut report.trigger).map(<[u8]>::len);
            }
        }
    }

    fn try_signals<F: Files>(&mut self, files: &F) {
        let mut reader = Sensor::reader(files, (&mut self.scratch, &mut self.buffer));
        let report = &mut self.report;
        let headroom = match (report.levels().first(), reader.refused.or(report.refused)) {
            (Some(MemoryLevel { owner: LimitedBy::Group, usage: Some(_), .. }), _) => SignalState::Usable,
            (_, Some(error)) => SignalState::Refused(error),
            _ => SignalState::Absent,
        };
        let mut events = |signal: Signal| match report.directory_of(signal) {
            Some(group) => reader.can_open(&[group, b"/", signal.name().as_bytes()], Access::Read),
            None => SignalState::Absent,
        };
        let (local, events) = (events(Signal::EventsLocal), events(Signal::Events));
        let watch = report.watch_is_set.then(|| report.watch.as_bytes());
        let watch = reader.watch(watch, report.process == Subject::Own);
        let (mut group, mut group_stalls) = (SignalState::Absent, None);
        if let Some(directory) = report.directory_of(Signal::GroupPressure) {
            (group, group_stalls) = reader.pressure_file(&[directory, b"/memory.pressure"]);
            // The root of version 2 has a pressure file of the whole machine.
            let is_root = report.unified.from_root && directory.len() == report.unified.point;
            if group == SignalState::Usable && is_root && !reader.is_there(directory, b"cgroup.type") {
                group = SignalState::WholeMachine;
            }
        }
        let (machine, machine_stalls) = reader.pressure_file(&[b"/proc/pressure/memory"]);
        let level = match report.directory_of(Signal::PressureLevel) {
            Some(group) => match reader.can_open(&[group, b"/memory.pressure_level"], Access::Read) {
                SignalState::Usable => reader.can_open(&[group, b"/cgroup.event_control"], Access::Write),
                refused => refused,
            },
            None => SignalState::Absent,
        };
        let available = match reader.machine() {
            MachineMemory { level: None, .. } => SignalState::Absent,
            MachineMemory { has_available: false, .. } => {
                SignalState::Not("estimated: the kernel does not say MemAvailable")
            }
            MachineMemory { .. } => SignalState::Usable,
        };
        report.signals = [headroom, local, events, watch, group, machine, level, available];
        (report.group_stalls, report.machine_stalls) = (group_stalls, machine_stalls);
        report.is_surveyed = true;
    }
}

/// Reads the process's own group and its ancestors up to the mount point. Returns whether one of
/// them has files of the memory controller.
fn read_groups<F: Files>(reader: &mut Reader<'_, F>, report: &mut MemoryReport) -> bool {
    let Some(version) = report.version else {
        return false;
    };
    let mut has_memory = false;
    let (mut hierarchical, mut smallest, mut topmost) = (None, None, None);
    let mut is_counted = true;
    let mut next = Some(usize::MAX);
    while let Some(length) = next {
        // Each round looks up the place anew, because adding a level borrows the report.
        let Some(place) = report.place().filter(|place| place.view > Visibility::Outside) else {
            return has_memory;
        };
        let directory = place.directory.as_bytes();
        let directory = directory.get(..length).unwrap_or(directory);
        let point = place.point.min(directory.len());
        if version == Version::V1 && length != usize::MAX {
            is_counted &= reader.counts_children(directory);
        }
        let group = reader.group(version, directory);
        let below = directory.get(point..).unwrap_or_default();
        next = below.iter().rposition(|byte| *byte == b'/').map(|at| point + at);
        if next.is_none() {
            let from_root = place.from_root && matches!(place.view, Visibility::Own | Visibility::Deleted);
            let is_root = match version {
                Version::V1 => {
                    reader.is_there(directory, b"release_agent") || reader.is_there(directory, b"cgroup.sane_behavior")
                }
                Version::V2 => !group.has_memory && !reader.is_there(directory, b"cgroup.type"),
            };
            report.ancestors_hidden = !from_root || !is_root;
        }
        if !group.has_memory {
            continue;
        }
        if !is_counted {
            report.uncounted += 1;
            continue;
        }
        if !has_memory {
            hierarchical = group.hierarchical;
        }
        has_memory = true;
        smallest = [smallest, group.level.limit].into_iter().flatten().min();
        topmost = Some(group.level);
        report.add(group.level);
    }
    // Version 1 shows the smallest limit of all ancestors, including those above the mount.
    if let (Some(limit), Some(MemoryLevel { usage, reclaimable, .. })) = (hierarchical, topmost)
        && smallest.is_none_or(|smallest| limit < smallest)
    {
        report.add(MemoryLevel {
            limit: Some(limit),
            usage,
            reclaimable,
            ..MemoryLevel::new(LimitedBy::HiddenAncestor)
        });
    }
    has_memory
}

/// Returns whether the directory that was found shows that version 2 has the memory controller.
fn lists_memory<F: Files>(reader: &mut Reader<'_, F>, report: &MemoryReport) -> bool {
    let place = &report.unified;
    if place.view == Visibility::Nothing {
        return false;
    }
    // If the process is outside of all mounts, none of its groups was read. Then the directory is
    // the mount point, and its group shows whether version 2 has the memory controller.
    if reader.is_there(place.directory.as_bytes(), b"memory.max") {
        return true;
    }
    let path = reader.scratch.set(&[place.directory.as_bytes(), b"/cgroup.controllers"]);
    let path = path.and_then(|()| reader.scratch.as_c_str());
    let text = path.and_then(|path| crate::records::read_small(reader.files, path, &mut *reader.buffer));
    text.is_ok_and(|text| text.split(u8::is_ascii_whitespace).any(|word| word == b"memory"))
}
