//! Plain types of options.

use core::ffi::CStr;
use neap_base::listed_enum;

listed_enum! {
    /// When neap has a thread that releases memory.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Background {
        /// Once the program has made a thread, or requests work that only a thread can do.
        Threaded,
        /// From the start.
        Always,
        /// Never.
        Never,
    }
}

listed_enum! {
    /// The groups that an unmodified program's threads are in.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ThreadGroups {
        /// None.
        Off,
        /// All threads with the same name are in one group.
        ByName,
        /// Each thread is in a group of its own.
        ByThread,
    }
}

/// The most bytes of a [`Path`].
pub const LONGEST_PATH: usize = 255;

/// A file's absolute path, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path([u8; LONGEST_PATH + 1]);

impl Path {
    /// No file.
    pub const NONE: Path = Path([0; LONGEST_PATH + 1]);

    /// Returns the path in `bytes`, if it begins with a slash, contains no zero byte, and has at
    /// most [`LONGEST_PATH`] bytes.
    pub fn absolute(bytes: &[u8]) -> Option<Path> {
        let mut path = Path::NONE;
        path.0[..LONGEST_PATH].get_mut(..bytes.len())?.copy_from_slice(bytes);
        (bytes.first() == Some(&b'/') && !bytes.contains(&0)).then_some(path)
    }

    /// The path, if there is one.
    pub fn as_c_str(&self) -> Option<&CStr> {
        CStr::from_bytes_until_nul(&self.0).ok().filter(|path| !path.is_empty())
    }
}

/// The number of a [`Setting`] whose value neap chooses at run time.
pub const AUTO: u64 = u64::MAX;

listed_enum! {
    /// An option that may change while the process runs, with its value as a number. `neap set`
    /// sends the number of the setting, so these numbers must not change.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[repr(u32)]
    pub enum Setting {
        /// Bytes; 0 for no limit; [`AUTO`] to follow the container. 2^63 plus a percentage follows
        /// the container, too, and bounds the use by that part of the container's limit.
        Limit,
        /// Milliseconds.
        Interval,
        /// Pages; [`AUTO`]: tuned at run time.
        PageListHigh,
        /// 1: on; 0: off.
        Refuse,
        /// Doublings.
        PageBatchScale,
        /// Bytes between two samples; 0: none.
        Profile,
        /// Bytes, or 2^63 plus a percentage of the limit; 0 for no bound.
        High,
        /// Bytes, or 2^63 plus a percentage of the limit. With [`AUTO`], neap chooses a margin
        /// below the container's limit.
        Reserve,
    }
}
