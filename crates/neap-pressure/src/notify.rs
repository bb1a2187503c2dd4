//! A trait for the descriptors by which the kernel notifies a [`crate::Trigger`].
//!
//! [`crate::System`] has real descriptors. Tests answer from memory.

use core::ffi::CStr;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::io;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::files::{Errno, Files};
use crate::system::{System, errno};

/// What `poll` says of a descriptor.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Ready(pub i16);

impl Ready {
    /// There is data to read (`POLLIN`).
    pub const DATA: Ready = Ready(0x1);
    /// There is an exceptional condition (`POLLPRI`). The kernel notifies of pressure by it.
    pub const URGENT: Ready = Ready(0x2);
    /// Error (`POLLERR`).
    pub const ERROR: Ready = Ready(0x8);
    /// The other end is closed (`POLLHUP`).
    pub const CLOSED: Ready = Ready(0x10);
    /// The descriptor is not open (`POLLNVAL`).
    pub const INVALID: Ready = Ready(0x20);

    /// Returns whether a bit of `other` is set.
    #[must_use]
    pub fn has(self, other: Ready) -> bool {
        self.0 & other.0 != 0
    }
}

/// Descriptors that notify.
pub trait Notify: Files {
    /// Writes all of `bytes` at once.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error number, or [`Errno::IO`] if only a part was written.
    fn write(&self, file: &mut Self::File, bytes: &[u8]) -> Result<(), Errno>;

    /// Reads from the start of a file. A file of version 2 notifies again only after this.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error number if the file cannot be read.
    fn read_anew(&self, file: &mut Self::File, buffer: &mut [u8]) -> Result<usize, Errno>;

    /// Makes an eventfd that does not block and does not survive `exec`.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error number if there are too many descriptors.
    fn counter(&self) -> Result<Self::File, Errno>;

    /// Connects to a Unix socket, without blocking later.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error number if the socket refuses.
    fn connect(&self, path: &CStr) -> Result<Self::File, Errno>;

    /// Number of a descriptor, by which `cgroup.event_control` of version 1 names it.
    fn number(&self, file: &Self::File) -> i32;

    /// Waits until the descriptor is ready, at most for `milliseconds`. Returns [`Ready`] without
    /// bits when the time is over or a signal interrupts the wait.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error number if it refuses to wait.
    fn wait(&self, file: &Self::File, wanted: Ready, milliseconds: u32) -> Result<Ready, Errno>;
}

impl Notify for System {
    fn write(&self, file: &mut OwnedFd, bytes: &[u8]) -> Result<(), Errno> {
        match rustix::io::write(&*file, bytes) {
            Ok(length) if length == bytes.len() => Ok(()),
            Ok(_) => Err(Errno::IO),
            Err(error) => Err(errno(error)),
        }
    }

    fn read_anew(&self, file: &mut OwnedFd, buffer: &mut [u8]) -> Result<usize, Errno> {
        rustix::io::pread(&*file, buffer, 0).map_err(errno)
    }

    fn counter(&self) -> Result<OwnedFd, Errno> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(errno)
    }

    fn connect(&self, path: &CStr) -> Result<OwnedFd, Errno> {
        if self.is_below() {
            // The address of a socket cannot be relative to a directory.
            return Err(Errno::OPNOTSUPP);
        }
        let address = SocketAddrUnix::new(path).map_err(errno)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(errno)?;
        connect(&socket, &address).map_err(errno)?;
        Ok(socket)
    }

    fn number(&self, file: &OwnedFd) -> i32 {
        file.as_raw_fd()
    }

    fn wait(&self, file: &OwnedFd, wanted: Ready, milliseconds: u32) -> Result<Ready, Errno> {
        // The flags have 16 bits, signed or not by the back end of rustix.
        let mut polled = [PollFd::from_borrowed_fd(file.as_fd(), PollFlags::from_bits_retain(wanted.0 as _))];
        let time =
            Timespec { tv_sec: i64::from(milliseconds / 1000), tv_nsec: i64::from(milliseconds % 1000) * 1_000_000 };
        match poll(&mut polled, Some(&time)) {
            Ok(0) | Err(io::Errno::INTR) => Ok(Ready::default()),
            Ok(_) => Ok(polled.first().map_or(Ready::default(), |polled| Ready(polled.revents().bits() as i16))),
            Err(error) => Err(errno(error)),
        }
    }
}
