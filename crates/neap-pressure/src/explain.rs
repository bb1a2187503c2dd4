//! A report as plain text.

use core::fmt::{self, Write};

use crate::groups::Version;
use crate::level::{LimitedBy, MemoryLevel};
use crate::place::{FilesRead, Visibility};
use crate::process::Subject;
use crate::report::MemoryReport;
use crate::signals::{Signal, SignalState};
use crate::stall::Stalls;

/// A number of bytes for people, with one decimal.
#[derive(Clone, Copy)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let power = (63 - self.0.leading_zeros()) / 10;
        let unit = 1_u64 << (10 * power);
        let (whole, rest) = (self.0 / unit, u128::from(self.0 % unit) * 10 / u128::from(unit));
        let name = UNITS.get(power as usize - 1).copied().unwrap_or("EiB");
        write!(f, "{whole}.{rest} {name}")
    }
}

/// A percentage in hundredths.
struct Percent(u32);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02} %", self.0 / 100, self.0 % 100)
    }
}

/// Name of a level for a sentence.
struct LevelName<'a>(&'a MemoryReport, &'a MemoryLevel);

impl fmt::Display for LevelName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1.owner {
            LimitedBy::Group => write!(f, "{}", self.0.path(self.1).escape_ascii()),
            LimitedBy::HiddenAncestor => f.write_str("a hidden ancestor"),
            LimitedBy::Machine => f.write_str("the machine"),
            LimitedBy::AddressSpace => f.write_str("address space (RLIMIT_AS)"),
            LimitedBy::Data => f.write_str("private memory (RLIMIT_DATA)"),
        }
    }
}

impl MemoryReport {
    /// Writes the levels that were found, which of them binds, which signals the looks of a sensor
    /// use, and why they do not use the others.
    ///
    /// # Errors
    ///
    /// Returns the first error of `out`. The text before it is written.
    pub fn explain(&self, out: &mut impl Write) -> fmt::Result {
        self.explain_place(out)?;
        writeln!(out, "\nLevels, from the process's own group up:")?;
        for level in self.levels() {
            self.explain_level(out, level)?;
        }
        if self.levels().is_empty() {
            writeln!(out, "  none could be read")?;
        }
        if self.unlisted > 0 {
            writeln!(out, "  and {} more, which count as well", self.unlisted)?;
        }
        writeln!(out)?;
        self.explain_walls(out)?;
        if self.is_surveyed {
            writeln!(out, "\nSignals, in the order of trust:")?;
            for (signal, state) in self.signals() {
                self.explain_signal(out, signal, state)?;
            }
        }
        self.explain_gaps(out)
    }

    fn explain_place(&self, out: &mut impl Write) -> fmt::Result {
        match self.process {
            Subject::Own => write!(out, "This process: ")?,
            Subject::Other(id) => write!(out, "Process {id}: ")?,
        }
        match self.version {
            None if self.levels().iter().any(|level| level.owner == LimitedBy::Machine) => {
                return writeln!(out, "no memory group found; only the machine's numbers are known");
            }
            None => return writeln!(out, "no memory group found, and the machine's numbers cannot be read"),
            Some(Version::V1) if self.is_hybrid() => {
                writeln!(out, "cgroup version 1 (hybrid: version 2 is mounted without memory)")?;
            }
            Some(Version::V1) => writeln!(out, "cgroup version 1")?,
            Some(Version::V2) => writeln!(out, "cgroup version 2")?,
        }
        writeln!(out, "Group:     {}", self.member().escape_ascii())?;
        let directory = self.directory().escape_ascii();
        match self.view() {
            Visibility::Nothing => writeln!(out, "Directory: not mounted"),
            Visibility::Outside => writeln!(out, "Directory: outside of all mounts; the process was moved away"),
            Visibility::Missing => writeln!(out, "Directory: {directory} (the group's own is missing)"),
            Visibility::AncestorsOnly => {
                writeln!(out, "Directory: {directory} (an ancestor; the group's own is not named)")
            }
            Visibility::Deleted => writeln!(out, "Directory: {directory} (removed)"),
            Visibility::Own => writeln!(out, "Directory: {directory}"),
        }?;
        if self.view() > Visibility::Outside {
            let ancestors = if self.ancestors_hidden { "some are hidden" } else { "all visible" };
            writeln!(out, "Ancestors: {ancestors}")?;
        }
        Ok(())
    }

    fn explain_level(&self, out: &mut impl Write, level: &MemoryLevel) -> fmt::Result {
        writeln!(out, "  {}", LevelName(self, level))?;
        match level.limit {
            Some(limit) => write!(out, "    limit {}", Size(limit))?,
            None => write!(out, "    limit none")?,
        }
        if let Some(high) = level.high {
            write!(out, ", throttled above {}", Size(high))?;
        }
        if let (Some(used), Some(usage)) = (level.used(), level.usage) {
            let least = if level.owner == LimitedBy::HiddenAncestor { "at least " } else { "" };
            write!(out, ", used {least}{}", Size(used))?;
            if level.reclaimable > 0 {
                write!(out, " ({} less {} reclaimable)", Size(usage), Size(level.reclaimable))?;
            }
        } else {
            write!(out, ", usage unknown")?;
        }
        if let Some(headroom) = level.headroom() {
            let most = if level.owner == LimitedBy::HiddenAncestor { "at most " } else { "" };
            write!(out, ", headroom {most}{}", Size(headroom))?;
        }
        writeln!(out)
    }

    fn explain_walls(&self, out: &mut impl Write) -> fmt::Result {
        match self.limit() {
            Some(level) => {
                writeln!(out, "Limit:     {}, of {}", Size(level.limit.unwrap_or(0)), LevelName(self, level))?
            }
            None => writeln!(out, "Limit:     unknown")?,
        }
        match self.wall() {
            Some(level) => {
                writeln!(out, "Headroom:  {}, of {}", Size(level.headroom().unwrap_or(0)), LevelName(self, level))?;
            }
            None => writeln!(out, "Headroom:  unknown")?,
        }
        if let Some(level) = self.soft_wall() {
            let headroom = Size(level.soft_headroom().unwrap_or(0));
            writeln!(out, "Throttled: after {headroom}, by {}", LevelName(self, level))?;
        }
        match self.swap_headroom {
            Some(swap) => writeln!(out, "Swap:      {} free", Size(swap))?,
            None => writeln!(out, "Swap:      unknown")?,
        }
        if let Some(pressure) = self.pressure() {
            writeln!(out, "Pressure:  {}; caches may grow by {}", pressure.name(), Size(self.room_to_grow()))?;
        }
        Ok(())
    }

    fn explain_signal(&self, out: &mut impl Write, signal: Signal, state: SignalState) -> fmt::Result {
        write!(out, "  {:<24}", signal.name())?;
        match state {
            SignalState::Usable if signal.unused_because().is_none() => write!(out, "in use, read at each look")?,
            SignalState::Usable => write!(out, "usable")?,
            SignalState::ReadOnly(error) => write!(out, "can be read; no notification ({error})")?,
            SignalState::WholeMachine => write!(out, "usable; reports the whole machine, not a group")?,
            SignalState::Absent if signal == Signal::Watch => write!(out, "not set")?,
            SignalState::Absent => write!(out, "absent")?,
            SignalState::Refused(error) => write!(out, "refused: {error}")?,
            SignalState::Not(reason) => write!(out, "not usable: {reason}")?,
        }
        if let Some(reason) = signal.unused_because().filter(|_| state.is_usable()) {
            write!(out, "; not in use: {reason}")?;
        }
        let stalls = match signal {
            Signal::GroupPressure => self.group_stalls,
            Signal::MachinePressure => self.machine_stalls,
            _ => None,
        };
        if let Some(Stalls { some_10, full_10, .. }) = stalls {
            write!(out, "; last 10 s: some {}, full {}", Percent(some_10), Percent(full_10))?;
            if state.is_usable() && !matches!(state, SignalState::ReadOnly(_)) && !self.is_privileged {
                write!(out, "; windows of 2, 4, 6, 8 or 10 s")?;
            }
        }
        if signal == Signal::Watch && self.watch_is_set {
            write!(out, "; {}", self.watch.as_bytes().escape_ascii())?;
            if let Some(trigger) = self.trigger() {
                write!(out, ", write \"{}\"", trigger.escape_ascii())?;
            }
        }
        writeln!(out)
    }

    /// Writes a line for each part that could not be read.
    fn explain_gaps(&self, out: &mut impl Write) -> fmt::Result {
        let mut gap = |args: fmt::Arguments<'_>| writeln!(out, "Not seen:  {args}");
        let FilesRead { error, too_long } = self.members;
        if let Some(error) = error {
            gap(format_args!("the process's groups ({error})"))?;
        }
        let lines = too_long.saturating_add(self.mounts.too_long);
        if let Some(error) = self.mounts.error {
            gap(format_args!("mounts ({error})"))?;
        }
        if lines > 0 {
            gap(format_args!("{lines} lines of groups or mounts, which are too long"))?;
        }
        if self.ancestors_hidden {
            gap(format_args!("limits of ancestors outside of the namespace or mount"))?;
        }
        if self.uncounted > 0 {
            gap(format_args!("{} ancestors that do not count this group (memory.use_hierarchy is 0)", self.uncounted))?;
        }
        if let Some(error) = self.refused {
            gap(format_args!("a file of a level ({error})"))?;
        }
        if self.malformed {
            gap(format_args!("a file of a level that holds no number"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::format;

    use super::*;

    #[test]
    fn sizes_have_one_decimal() {
        let sizes = [0, 1023, 1024, 1536, (1 << 30) - 1, 1 << 30, u64::MAX].map(|bytes| format!("{}", Size(bytes)));
        assert_eq!(sizes, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1023.9 MiB", "1.0 GiB", "15.9 EiB"]);
    }
}
