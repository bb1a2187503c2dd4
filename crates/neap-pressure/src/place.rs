//! Finds the directories of a process's groups, from its memberships and the reader's mounts.
//!
//! # Design
//!
//! 1. `/proc/PID/cgroup` names the groups. Both its paths and the roots in `/proc/self/mountinfo`
//!    are relative to the reader's cgroup namespace, so the reader's mounts serve any process.
//! 2. Of all mounts of a hierarchy, this module uses the one that shows most. A mount that shows
//!    the group itself comes before one that shows only ancestors. Of several such mounts, the one
//!    with the most ancestors comes first. A later mount on the same mount point hides the earlier
//!    one.
//! 3. Version 1 has the memory controller if a version 1 line lists it, and such a hierarchy is
//!    mounted. Otherwise version 2 has it. A `0::` line alone does not decide, since hybrid systems
//!    have both versions.

use core::ffi::CStr;

use crate::files::{Access, Errno, Files};
use crate::lines::{Membership, Mount, Position, position};
use crate::path::{PathText, as_prefix};
use crate::records::Records;
use crate::text::without_deleted;

/// Which part of the process's own group the mounts show.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Visibility {
    /// No mount shows the group or an ancestor.
    Nothing,
    /// The group is not below any mount: it lies outside the part of the hierarchy that is mounted.
    Outside,
    /// The group's directory does not exist. The mount point is used in its place.
    Missing,
    /// The mount shows ancestors of the group. The names of the directories between them and the
    /// group are not known.
    AncestorsOnly,
    /// The group was removed after its last process ended.
    Deleted,
    /// The mount shows the group's directory.
    Own,
}

/// The directory of a process's group in one hierarchy.
pub(crate) struct GroupDirectory {
    pub(crate) view: Visibility,
    /// Path of the group in `/proc/PID/cgroup`; empty without such a line.
    pub(crate) member: PathText,
    /// The group's directory. It is the mount point if `view` is not `Own` or `Deleted`.
    pub(crate) directory: PathText,
    /// Length of the mount point in `directory`.
    pub(crate) point: usize,
    /// Whether the mount's root is the root of the reader's namespace.
    pub(crate) from_root: bool,
    /// Number of groups from the mount point down to the directory.
    depth: usize,
}

/// Files of which at least one is in the directory of every group.
const MARKS: [&[u8]; 4] = [b"/cgroup.procs", b"/memory.limit_in_bytes", b"/memory.max", b"/memory.current"];

impl GroupDirectory {
    pub(crate) const fn new() -> GroupDirectory {
        let (member, directory) = (PathText::new(), PathText::new());
        GroupDirectory { view: Visibility::Nothing, member, directory, point: 0, from_root: false, depth: 0 }
    }

    /// Forgets the membership and the directory.
    pub(crate) fn clear(&mut self) {
        let _ = self.member.set(&[]);
        self.forget_directory();
    }

    fn forget_directory(&mut self) {
        let _ = self.directory.set(&[]);
        (self.view, self.point, self.from_root, self.depth) = (Visibility::Nothing, 0, false, 0);
    }

    /// Takes the mount if it shows more than the mount so far.
    fn consider<F: Files>(&mut self, files: &F, mount: &Mount<'_>, scratch: &mut PathText) {
        let member = self.member.as_bytes();
        if member.is_empty() {
            return;
        }
        let point = as_prefix(mount.point);
        let hides = self.view > Visibility::Outside && self.directory.as_bytes().get(..self.point) == Some(point);
        let (view, below) = match position(mount.root, member) {
            Position::Outside => (Visibility::Outside, &b""[..]),
            Position::Unnamed => (Visibility::AncestorsOnly, &b""[..]),
            Position::Below(below) if is_group(files, point, below, scratch) => (Visibility::Own, below),
            Position::Below(below) => match without_deleted(below) {
                Some(below) => (Visibility::Deleted, below),
                None => (Visibility::Missing, &b""[..]),
            },
        };
        let depth = below.iter().filter(|byte| **byte == b'/').count();
        if hides || (view, depth) > (self.view, self.depth) || self.view == Visibility::Nothing {
            if self.directory.set(&[point, below]).is_err() {
                return;
            }
            (self.view, self.point, self.depth) = (view, point.len(), depth);
            self.from_root = mount.root == b"/";
        }
    }
}

/// Returns whether a directory exists and belongs to a group.
pub(crate) fn is_group<F: Files>(files: &F, point: &[u8], below: &[u8], scratch: &mut PathText) -> bool {
    MARKS.iter().any(|mark| {
        let set = scratch.set(&[point, below, mark]);
        let opened = set.and_then(|()| scratch.as_c_str()).and_then(|path| files.open(path, Access::Read));
        // A file that the reader may not open exists as well.
        opened.err().is_none_or(|error| !error.is_absent() && error != Errno::NAMETOOLONG && error != Errno::INVAL)
    })
}

/// Outcome of reading `/proc/PID/cgroup` or `/proc/self/mountinfo`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct FilesRead {
    /// The kernel's error, if the file could not be opened or ended early.
    pub(crate) error: Option<Errno>,
    /// Lines that were too long to be read.
    pub(crate) too_long: u32,
}

/// Reads the memberships of a process. `hash` becomes a hash of the lines.
pub(crate) fn read_members<F: Files>(
    files: &F,
    path: &CStr,
    (memory, unified): (&mut GroupDirectory, &mut GroupDirectory),
    buffer: &mut [u8],
    hash: &mut u64,
) -> FilesRead {
    memory.clear();
    unified.clear();
    *hash = HASH;
    let mut lines = match Records::open(files, path, b'\n', buffer) {
        Ok(lines) => lines,
        Err(error) => return FilesRead { error: Some(error), too_long: 0 },
    };
    while let Some(line) = lines.next() {
        *hash = hashed(*hash, line);
        let Some(member) = Membership::parse(line) else {
            continue;
        };
        let place = if member.is_version_2() {
            &mut *unified
        } else if member.has_memory() {
            &mut *memory
        } else {
            continue;
        };
        if place.member.as_bytes().is_empty() {
            let _ = place.member.set(&[member.path]);
        }
    }
    FilesRead { error: lines.error, too_long: lines.too_long }
}

/// Finds, for each of the two groups, the mount that shows most of it, and the group's directory.
pub(crate) fn read_mounts<F: Files>(
    files: &F,
    path: &CStr,
    (memory, unified): (&mut GroupDirectory, &mut GroupDirectory),
    buffer: &mut [u8],
    scratch: &mut PathText,
) -> FilesRead {
    memory.forget_directory();
    unified.forget_directory();
    let mut lines = match Records::open(files, path, b'\n', buffer) {
        Ok(lines) => lines,
        Err(error) => return FilesRead { error: Some(error), too_long: 0 },
    };
    while let Some(line) = lines.next() {
        let Some(mount) = Mount::parse(line) else {
            continue;
        };
        if mount.is_version_2() {
            unified.consider(files, &mount, scratch);
        } else if mount.has_memory() {
            memory.consider(files, &mount, scratch);
        }
    }
    FilesRead { error: lines.error, too_long: lines.too_long }
}

/// Start value of [`hashed`].
pub(crate) const HASH: u64 = 0xcbf2_9ce4_8422_2325;

/// Adds a line to a hash (FNV-1a).
pub(crate) fn hashed(hash: u64, line: &[u8]) -> u64 {
    line.iter().chain(b"\n").fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
