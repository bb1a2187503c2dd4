//! Real files, below a directory that stands for `/`.
//!
//! This module calls the kernel without the C library. So calls write no `errno` and allocate
//! nothing.

use core::ffi::CStr;

use rustix::fd::OwnedFd;
use rustix::fs::{CWD, Mode, OFlags, PROC_SUPER_MAGIC};
use rustix::io;

use crate::files::{Access, Errno, FileKind, Files};

/// Magic number of the cgroup2 file system.
const CGROUP2_MAGIC: i64 = 0x6367_7270;

/// Most tries of a read that signals interrupt.
const TRIES: usize = 16;

/// Files of the running system, or of a tree below a directory.
pub struct System {
    root: Option<OwnedFd>,
}

impl System {
    /// Files of the running system.
    #[must_use]
    pub const fn new() -> System {
        System { root: None }
    }

    /// Files below `directory`, for example made-up ones. Symbolic links may lead out of the
    /// directory.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error number if the directory cannot be opened.
    pub fn below(directory: &CStr) -> Result<System, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat(CWD, directory, flags, Mode::empty()).map_err(errno)?;
        Ok(System { root: Some(root) })
    }

    /// Whether a directory stands for `/`.
    pub(crate) fn is_below(&self) -> bool {
        self.root.is_some()
    }

    /// Returns an absolute path relative to the root directory, if there is one.
    fn inside<'a>(&self, path: &'a CStr) -> &'a CStr {
        if self.root.is_none() {
            return path;
        }
        let bytes = path.to_bytes_with_nul();
        let slashes = bytes.iter().take_while(|byte| **byte == b'/').count();
        let rest = bytes.get(slashes..).and_then(|rest| CStr::from_bytes_with_nul(rest).ok());
        rest.filter(|rest| !rest.is_empty()).unwrap_or(c".")
    }
}

impl Default for System {
    fn default() -> System {
        System::new()
    }
}

pub(crate) fn errno(error: io::Errno) -> Errno {
    Errno(error.raw_os_error())
}

impl Files for System {
    type File = OwnedFd;

    fn open(&self, path: &CStr, access: Access) -> Result<OwnedFd, Errno> {
        let rights = match access {
            Access::Read => OFlags::RDONLY,
            Access::Write => OFlags::WRONLY,
            Access::ReadWrite => OFlags::RDWR,
        };
        let flags = rights | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let path = self.inside(path);
        match &self.root {
            Some(root) => rustix::fs::openat(root, path, flags, Mode::empty()),
            None => rustix::fs::openat(CWD, path, flags, Mode::empty()),
        }
        .map_err(errno)
    }

    fn read(&self, file: &mut OwnedFd, buffer: &mut [u8]) -> Result<usize, Errno> {
        for _ in 0..TRIES {
            match rustix::io::read(&*file, &mut *buffer) {
                Ok(length) => return Ok(length),
                Err(io::Errno::INTR) => {}
                Err(error) => return Err(errno(error)),
            }
        }
        Err(errno(io::Errno::INTR))
    }

    fn kind(&self, path: &CStr) -> Result<FileKind, Errno> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let path = self.inside(path);
        let file = match &self.root {
            Some(root) => rustix::fs::openat(root, path, flags, Mode::empty()),
            None => rustix::fs::openat(CWD, path, flags, Mode::empty()),
        }
        .map_err(errno)?;
        let mode = rustix::fs::fstat(&file).map_err(errno)?.st_mode;
        Ok(match rustix::fs::FileType::from_raw_mode(mode) {
            rustix::fs::FileType::RegularFile => {
                let magic = rustix::fs::fstatfs(&file).map_err(errno)?.f_type;
                if magic == CGROUP2_MAGIC || magic == PROC_SUPER_MAGIC { FileKind::Kernel } else { FileKind::Other }
            }
            rustix::fs::FileType::Fifo | rustix::fs::FileType::CharacterDevice => FileKind::Stream,
            rustix::fs::FileType::Socket => FileKind::Socket,
            rustix::fs::FileType::Directory => FileKind::Directory,
            _ => FileKind::Other,
        })
    }
}
