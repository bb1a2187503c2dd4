//! Bounds of what a profile reads and keeps of a process.
//!
//! A process of another user may be made to hurt this command: its samples, files, names and maps
//! are as long as it likes. The command stays below 64 MiB with it, and reads no debug information,
//! whose parsers need many times its length. A user's own process could hurt its user otherwise.

use crate::stat_reader::ProcessStatus;

/// The bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProfileLimits {
    /// Bytes of files, unwind information of all modules included.
    pub(crate) file_bytes: usize,
    /// Files that are open.
    pub(crate) files: usize,
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
        ProfileLimits::OWN
    }
}

impl ProfileLimits {
    /// Bounds for a process of the user that runs the command.
    pub(crate) const OWN: ProfileLimits = ProfileLimits {
        file_bytes: 512 << 20,
        files: 16 << 10,
        has_lines: true,
        map_bytes: 64 << 20,
        map_entries: 1 << 20,
        stacks: 1 << 17,
        frames: 2 << 20,
        cells: 1 << 18,
        live: 1 << 18,
        threads: 1 << 16,
        places: 1 << 20,
        name_bytes: 256 << 20,
        folded_bytes: 512 << 20,
        folded_frames: 8 << 20,
    };

    /// Bounds for a process of another user.
    pub(crate) const FOREIGN: ProfileLimits = ProfileLimits {
        file_bytes: 12 << 20,
        files: 512,
        has_lines: false,
        map_bytes: 2 << 20,
        map_entries: 1 << 15,
        stacks: 1 << 13,
        frames: 1 << 17,
        cells: 1 << 14,
        live: 1 << 16,
        threads: 1 << 10,
        places: 1 << 14,
        name_bytes: 2 << 20,
        folded_bytes: 4 << 20,
        folded_frames: 1 << 15,
    };

    /// Returns the bounds for a process: [`ProfileLimits::OWN`] if `is_trusted`, else by its user.
    pub(crate) fn of(process: &ProcessStatus, is_trusted: bool) -> ProfileLimits {
        if is_trusted { ProfileLimits::OWN } else { ProfileLimits::of_user(&process.user) }
    }

    /// Returns the bounds for a process or a file of the user whose number is the text `user`.
    pub(crate) fn of_user(user: &str) -> ProfileLimits {
        // SAFETY: a query without side effects.
        if user == unsafe { libc::geteuid() }.to_string() { ProfileLimits::OWN } else { ProfileLimits::FOREIGN }
    }
}
