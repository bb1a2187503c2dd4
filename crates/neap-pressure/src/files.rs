//! A trait for the files that a [`crate::Sensor`] reads.
//!
//! [`crate::System`] opens real files. Tests and simulations answer from memory.

use core::ffi::CStr;
use core::fmt;

/// An error number of Linux.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Errno(pub i32);

impl Errno {
    /// Operation not permitted.
    pub const PERM: Errno = Errno(1);
    /// No such file or directory.
    pub const NOENT: Errno = Errno(2);
    /// Input or output error.
    pub const IO: Errno = Errno(5);
    /// No such device or address.
    pub const NXIO: Errno = Errno(6);
    /// No data now.
    pub const AGAIN: Errno = Errno(11);
    /// Permission denied.
    pub const ACCES: Errno = Errno(13);
    /// Device or resource busy.
    pub const BUSY: Errno = Errno(16);
    /// No such device.
    pub const NODEV: Errno = Errno(19);
    /// Not a directory.
    pub const NOTDIR: Errno = Errno(20);
    /// Is a directory.
    pub const ISDIR: Errno = Errno(21);
    /// Invalid argument.
    pub const INVAL: Errno = Errno(22);
    /// Read-only file system.
    pub const ROFS: Errno = Errno(30);
    /// File name too long.
    pub const NAMETOOLONG: Errno = Errno(36);
    /// Operation not supported.
    pub const OPNOTSUPP: Errno = Errno(95);

    /// Returns whether the error says that a file, a part of its path, or its device does not
    /// exist.
    #[must_use]
    pub fn is_absent(self) -> bool {
        matches!(self, Errno::NOENT | Errno::NOTDIR | Errno::NODEV)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Errno::PERM => "operation not permitted",
            Errno::NOENT => "no such file",
            Errno::IO => "input or output error",
            Errno::NXIO => "no such device or address",
            Errno::AGAIN => "no data",
            Errno::BUSY => "busy",
            Errno::ACCES => "permission denied",
            Errno::NODEV => "no such device",
            Errno::NOTDIR => "not a directory",
            Errno::ISDIR => "is a directory",
            Errno::INVAL => "invalid argument",
            Errno::ROFS => "read-only file system",
            Errno::NAMETOOLONG => "file name too long",
            Errno::OPNOTSUPP => "not supported",
            Errno(number) => return write!(f, "error {number}"),
        })
    }
}

/// Rights that a file is opened with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Reading only.
    Read,
    /// Writing only.
    Write,
    /// Both, as a trigger of a pressure file needs.
    ReadWrite,
}

/// Kind of a file, as systemd's pressure protocol distinguishes them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileKind {
    /// A regular file of procfs or cgroup2, which takes a trigger.
    Kernel,
    /// A FIFO or character device. It becomes readable under pressure.
    Stream,
    /// A Unix socket. The process connects to it, and it becomes readable under pressure.
    Socket,
    /// A directory.
    Directory,
    /// Any other file.
    Other,
}

/// Source of files. Paths are absolute.
pub trait Files {
    /// An open file. Dropping it closes it.
    type File;

    /// Opens a file without blocking and without creating it.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error number if the file cannot be opened.
    fn open(&self, path: &CStr, access: Access) -> Result<Self::File, Errno>;

    /// Reads the next bytes of a file into `buffer`. Returns their number; 0 at the end.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error number if the file cannot be read.
    fn read(&self, file: &mut Self::File, buffer: &mut [u8]) -> Result<usize, Errno>;

    /// Returns the kind of a file without opening it.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error number if the kernel does not tell the kind.
    fn kind(&self, path: &CStr) -> Result<FileKind, Errno>;
}
