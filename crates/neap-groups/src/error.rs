//! Why an operation on groups was refused.

use core::fmt;
use neap_base::platform::Errno;
use neap_percpu::Refused;

/// Reason for which a group was not created, found, changed or deleted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupError {
    /// There is no such group, or it was deleted.
    NoSuchGroup,
    /// A group of that name exists already.
    Exists,
    /// The name is invalid. A valid one has 1 to 56 bytes, is printable, has no `/`, and is neither
    /// `.` nor `..`.
    BadName,
    /// The parent is at the maximum depth.
    TooDeep,
    /// The group has children, which must be deleted first.
    HasChildren,
    /// The root cannot be deleted, and has no protection of its own.
    Root,
    /// The maximum number of groups is reached.
    Full,
    /// There is no memory for the group.
    NoMemory,
}

impl fmt::Display for GroupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GroupError::NoSuchGroup => "there is no such group",
            GroupError::Exists => "a group of that name is there already",
            GroupError::BadName => "a name has 1 to 56 bytes, all printable, without '/', and is neither '.' nor '..'",
            GroupError::TooDeep => "no group can be deeper",
            GroupError::HasChildren => "the group has children, which must be deleted first",
            GroupError::Root => "the root cannot be deleted, and has no protection of its own",
            GroupError::Full => "the maximum number of groups is reached",
            GroupError::NoMemory => "there is no memory for the group",
        })
    }
}

impl core::error::Error for GroupError {}

impl From<Errno> for GroupError {
    fn from(error: Errno) -> GroupError {
        if error == Errno::NOSPC { GroupError::Full } else { GroupError::NoMemory }
    }
}

impl From<Refused> for GroupError {
    fn from(refused: Refused) -> GroupError {
        if refused == Refused::Full { GroupError::Full } else { GroupError::NoMemory }
    }
}
