//! Bounds of the data that a profile reads and keeps of a process.
//!
//! The command uses a bounded number of bytes for any process, since a process determines the
//! length of its samples, files, names and maps. A process of another user may be designed to harm
//! this command, so the command does not read its debug information.
//!
//! Pages of mapped files do not count, since the kernel reclaims them by itself.

use core::time::Duration;

use clap::Args;

use crate::drain::size;
use crate::look::stat_reader::ProcessStatus;

/// Memory of the command, unless the user allows more.
const USUAL: usize = 64 << 20;
/// Memory of a command that reads a profile from a file in the format of pprof.
const OF_FILE: usize = 4 << 30;
/// Time in which a command looks for lines.
pub(crate) const LINE_TIME: Duration = Duration::from_secs(10);

/// The bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProfileLimits {
    /// Memory of the command, with the child that looks for lines.
    pub(crate) memory: usize,
    /// Bytes of unwind information of all modules, and of tables of sections.
    pub(crate) file_bytes: usize,
    /// Files that are open.
    pub(crate) files: usize,
    /// Bytes of symbol tables that are read at a time. None of them is kept.
    pub(crate) table_bytes: u64,
    /// Whether debug information gives files and lines.
    pub(crate) has_lines: bool,
    /// Bytes and entries of a perf map.
    pub(crate) map_bytes: u64,
    pub(crate) map_entries: usize,
    /// Distinct stacks, and frames of all stacks.
    pub(crate) stacks: usize,
    pub(crate) frames: usize,
    /// Sums by stack, group and thread name.
    pub(crate) cells: usize,
    /// Live samples.
    pub(crate) live: usize,
    /// Distinct names of threads.
    pub(crate) threads: usize,
    /// Places that get names of their own, and the bytes of all names.
    pub(crate) places: usize,
    pub(crate) name_bytes: usize,
    /// Bytes and frames of folded stacks.
    pub(crate) folded_bytes: usize,
    pub(crate) folded_frames: usize,
}

impl Default for ProfileLimits {
    fn default() -> ProfileLimits {
        ProfileLimits::within(OF_FILE, true)
    }
}

impl ProfileLimits {
    /// Bounds for a process of the user that runs the command.
    pub(crate) const OWN: ProfileLimits = ProfileLimits::within(USUAL, true);

    /// Bounds for a process of another user.
    pub(crate) const FOREIGN: ProfileLimits = ProfileLimits::within(USUAL, false);

    /// Returns the bounds by which a command has at most `memory` bytes.
    pub(crate) const fn within(memory: usize, has_lines: bool) -> ProfileLimits {
        /// A bound that grows with the memory.
        const fn share(usual: usize, memory: usize) -> usize {
            usual / 64 * (memory >> 20)
        }
        ProfileLimits {
            memory,
            file_bytes: share(20 << 20, memory),
            files: share(512, memory),
            table_bytes: 128 << 20,
            has_lines,
            map_bytes: share(4 << 20, memory) as u64,
            map_entries: share(1 << 16, memory),
            stacks: share(1 << 14, memory),
            frames: share(1 << 18, memory),
            cells: share(1 << 15, memory),
            live: share(112 << 10, memory),
            threads: share(1 << 10, memory),
            places: share(1 << 15, memory),
            name_bytes: share(4 << 20, memory),
            folded_bytes: share(8 << 20, memory),
            folded_frames: share(1 << 16, memory),
        }
    }

    /// Returns these bounds for a command with so much memory.
    pub(crate) const fn with(self, memory: usize) -> ProfileLimits {
        ProfileLimits::within(memory, self.has_lines)
    }

    /// Returns the bounds for a process: [`ProfileLimits::OWN`] if `is_trusted`, and otherwise
    /// those for its user.
    pub(crate) fn of(process: &ProcessStatus, is_trusted: bool) -> ProfileLimits {
        if is_trusted { ProfileLimits::OWN } else { ProfileLimits::of_user(&process.user) }
    }

    /// Returns the bounds for a process or a file of the user whose number is the text `user`.
    pub(crate) fn of_user(user: &str) -> ProfileLimits {
        // SAFETY: `geteuid` takes no argument and has no side effect.
        if user == unsafe { libc::geteuid() }.to_string() { ProfileLimits::OWN } else { ProfileLimits::FOREIGN }
    }
}

/// The memory that the user allows the command.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct CommandMemory {
    /// Memory that this command may have: more is for files with much debug information, and for
    /// more stacks
    #[arg(id = "memory", long = "memory", value_name = "BYTES", default_value = "64m", value_parser = parse_memory)]
    pub(crate) bytes: usize,
}

/// Parses the memory of a command.
pub(crate) fn parse_memory(text: &str) -> Result<usize, String> {
    let bytes = size(text)? as usize;
    if bytes < USUAL { Err("the least is 64m".to_string()) } else { Ok(bytes.min(1 << 40)) }
}
