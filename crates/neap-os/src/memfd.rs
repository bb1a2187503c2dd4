//! Shared memory of a memfd, which another process of the same user can read while this one lives.
//!
//! The file has a name in `/proc/PID/fd` and none in a file system. It vanishes when no process has
//! it open or mapped. Exec closes its descriptor. If the limit allows it, the descriptor is above
//! the low numbers that programs rely on. This module has no lock and no state.
//!
//! # Invariants
//!
//! * The pages of the first `allocated` bytes are allocated before they are mapped. So no access to
//!   these bytes needs a page that the system can refuse.
//! * The file is sealed, so no process can make it shorter than the mapping.
//! * No other user can open the file. A child, however it is forked, does not have the mapping.
//! * No file grows over `RLIMIT_FSIZE`. At that limit the kernel would send a deadly signal.

use crate::Errno;
use core::ffi::CStr;
use core::ptr::null_mut;
use rustix::fd::{BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

/// The lowest number for the descriptor, if the limit allows it.
const HIGH: u64 = 1000;
/// [`Memfd::make`] fails below this limit of descriptors, since the program needs all of them.
const FEW: u64 = 64;

/// Maximum attempts to allocate pages, each of which a signal may interrupt.
const MOST_INTERRUPTED: u32 = 100;

/// A mapped memfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memfd {
    /// Address of the first byte.
    pub address: usize,
    /// Length in bytes, as requested.
    pub length: usize,
    /// The descriptor and the identity of the memfd's file.
    pub file: OpenFile,
}

/// A descriptor, and the identity of its file when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFile {
    /// The descriptor.
    pub descriptor: RawFd,
    /// The file's device.
    pub device: u64,
    /// The file's inode.
    pub inode: u64,
}

impl OpenFile {
    /// Closes the descriptor if it still belongs to this file, and returns whether it did. The
    /// program may have closed it, and its number may belong to another file now.
    ///
    /// No other thread may close or open files during the call.
    pub fn close(self) -> bool {
        // SAFETY: the descriptor is borrowed for one call, which fails if it is closed.
        let descriptor = unsafe { BorrowedFd::borrow_raw(self.descriptor) };
        let found = rustix::fs::fstat(descriptor);
        let is_ours = found.is_ok_and(|status| (status.st_dev, status.st_ino) == (self.device, self.inode));
        if is_ours {
            // SAFETY: `fstat` has found the file that `make` created, and no other code uses its
            // descriptor.
            unsafe { rustix::io::close(self.descriptor) };
        }
        is_ours
    }

    /// Maps a part of the file, shared. No child of this process has the mapping, and no core file
    /// has its contents.
    ///
    /// # Errors
    /// `BADF` if the descriptor no longer belongs to this file. `INVAL` if the part lies beyond the
    /// file's end. Otherwise the error of the step that failed. No new mapping is left.
    pub fn map(self, offset: usize, length: usize) -> Result<usize, Errno> {
        let high = HIGH.min(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 2);
        // SAFETY: the descriptor is borrowed for one call, which fails if it is closed.
        let descriptor = unsafe { BorrowedFd::borrow_raw(self.descriptor) };
        // The program may close the descriptor at any moment, but does not know this duplicate.
        let file = rustix::io::fcntl_dupfd_cloexec(descriptor, high as RawFd)?;
        let status = rustix::fs::fstat(&file)?;
        if (status.st_dev, status.st_ino) != (self.device, self.inode) {
            return Err(Errno::BADF);
        }
        if (status.st_size as u64) < (offset + length) as u64 {
            return Err(Errno::INVAL);
        }
        let address = map(&file, offset, length)?;
        crate::memory::keep_from_core_files(address, length).inspect_err(|_| {
            // SAFETY: `map` returned the range above, and no code uses it.
            let _ = unsafe { crate::memory::unmap(address, length) };
        })?;
        Ok(address)
    }
}

/// Maps a part of a file, shared. No child of this process has the mapping.
fn map(file: &OwnedFd, offset: usize, length: usize) -> Result<usize, Errno> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: without an address the kernel chooses a free range.
    let got = unsafe { rustix::mm::mmap(null_mut(), length, protection, MapFlags::SHARED, file, offset as u64) }?;
    let address = got.expose_provenance();
    // SAFETY: the advice changes nothing in this process.
    if let Err(error) = unsafe { rustix::mm::madvise(got, length, Advice::LinuxDontFork) } {
        // SAFETY: `mmap` returned the range above, and no code uses it.
        let _ = unsafe { crate::memory::unmap(address, length) };
        return Err(error);
    }
    Ok(address)
}

impl Memfd {
    /// Creates a memfd of `file_bytes` zeroes, allocates the first `allocated` bytes, and maps the
    /// first `length` bytes. For a moment the descriptor has the lowest free number, where another
    /// thread of the program could close or use it. So no other thread of the program should run.
    ///
    /// # Errors
    /// The error of the first step that failed, at a limit or in a sandbox. No descriptor and no
    /// mapping is left.
    pub fn make(name: &CStr, file_bytes: usize, length: usize, allocated: usize) -> Result<Memfd, Errno> {
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < file_bytes as u64) {
            return Err(Errno::FBIG);
        }
        let low = create(name)?;
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        if limit < FEW {
            return Err(Errno::MFILE);
        }
        let high = HIGH.min(limit / 2);
        let file = rustix::io::fcntl_dupfd_cloexec(&low, high as RawFd)?;
        drop(low);
        rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR)?;
        rustix::fs::ftruncate(&file, file_bytes as u64)?;
        let allocate = || rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, allocated as u64);
        let outcome = (0..MOST_INTERRUPTED).map(|_| allocate()).find(|outcome| *outcome != Err(Errno::INTR));
        outcome.unwrap_or(Err(Errno::INTR))?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let status = rustix::fs::fstat(&file)?;
        let address = map(&file, 0, length)?;
        let (device, inode) = (status.st_dev, status.st_ino);
        Ok(Memfd { address, length, file: OpenFile { descriptor: file.into_raw_fd(), device, inode } })
    }

    /// Unmaps the memory, and closes the descriptor as [`OpenFile::close`] does. Other processes
    /// that have the file keep it.
    ///
    /// # Safety
    /// This process created the memfd, and no code in this process uses the memory any more.
    pub unsafe fn leave(self) {
        self.file.close();
        // SAFETY: `make` mapped the memory, and the caller promises that no code uses it. The call
        // cannot fail, since it removes a whole mapping.
        let _ = unsafe { crate::memory::unmap(self.address, self.length) };
    }
}

/// Creates a sealable memfd that cannot be made executable, where the kernel supports that (6.3).
/// Such a kernel may refuse a memfd without `NOEXEC_SEAL`.
fn create(name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        answer => answer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;
    use std::string::String;

    const LENGTH: usize = 1 << 16;

    fn path(memfd: &Memfd) -> String {
        std::format!("/proc/self/fd/{}", memfd.file.descriptor)
    }

    #[test]
    fn what_is_written_to_the_memory_is_read_from_the_file() {
        let memfd = Memfd::make(c"neap-read", LENGTH, LENGTH, LENGTH / 2).unwrap();
        let first = core::ptr::with_exposed_provenance_mut::<u8>(memfd.address);
        // SAFETY: the mapping was made above, and only this test uses it.
        unsafe { first.copy_from_nonoverlapping(b"numbers".as_ptr(), 7) };
        let is_there =
            || fs::read_link(path(&memfd)).is_ok_and(|link| link.as_os_str() == "/memfd:neap-read (deleted)");
        assert!(is_there());
        let file = fs::read(path(&memfd)).unwrap();
        assert_eq!((&file[..8], file.len()), (&b"numbers\0"[..], LENGTH));
        // SAFETY: no code uses the memory any more.
        unsafe { memfd.leave() };
        assert!(!is_there(), "the descriptor is closed");
    }

    /// The flags of the mapping that begins at `address`, each between spaces.
    fn flags_at(address: usize) -> std::string::String {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let own = maps.split_once(&std::format!("{address:x}-")).unwrap().1;
        let flags = own.lines().find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
        std::format!("{flags} ")
    }

    #[test]
    fn descriptor_is_high_and_cloexec_and_file_cannot_shrink() {
        let memfd = Memfd::make(c"neap-test", LENGTH, LENGTH, LENGTH / 2).unwrap();
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        assert!(memfd.file.descriptor as u64 >= HIGH.min(limit / 2));
        let info = fs::read_to_string(std::format!("/proc/self/fdinfo/{}", memfd.file.descriptor)).unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
        assert_ne!(u32::from_str_radix(flags, 8).unwrap() & 0o2000000, 0, "O_CLOEXEC in {flags}");
        let status = fs::metadata(path(&memfd)).unwrap();
        assert_eq!(status.mode() & 0o7777, 0o600, "other users may not open it");
        assert_eq!(status.blocks() * 512, LENGTH as u64 / 2, "no store may need a page that can be refused");
        assert!(flags_at(memfd.address).contains(" dc "), "not for children");
        let again = fs::OpenOptions::new().write(true).open(path(&memfd)).unwrap();
        assert!(again.set_len(0).is_err());
        // SAFETY: no code uses the memory any more.
        unsafe { memfd.leave() };
    }

    #[test]
    fn later_part_maps_separately_while_the_descriptor_is_open() {
        let memfd = Memfd::make(c"neap-part", 4 * LENGTH, LENGTH, LENGTH / 2).unwrap();
        let part = memfd.file.map(2 * LENGTH, LENGTH).unwrap();
        let flags = flags_at(part);
        assert!(flags.contains(" dc ") && flags.contains(" dd "), "neither for children nor for core files: {flags}");
        // SAFETY: the mapping was made above, and only this test uses it.
        unsafe { core::ptr::with_exposed_provenance_mut::<u8>(part).write(7) };
        assert_eq!(fs::read(path(&memfd)).unwrap()[2 * LENGTH], 7);
        let refused = memfd.file.map(2 * LENGTH, 3 * LENGTH);
        assert_eq!(refused, Err(Errno::INVAL), "beyond the end");
        let file = memfd.file;
        // SAFETY: no code uses either mapping any more.
        unsafe {
            crate::memory::unmap(part, LENGTH).unwrap();
            memfd.leave();
        }
        assert_eq!(file.map(0, LENGTH), Err(Errno::BADF), "closed");
    }

    #[test]
    fn a_descriptor_that_is_something_else_by_now_stays_open() {
        let memfd = Memfd::make(c"neap-test", LENGTH, LENGTH, LENGTH / 2).unwrap();
        let other = fs::File::open("/dev/null").unwrap();
        // SAFETY: plays a program that closes a foreign descriptor, and opens a file there.
        let there = unsafe { libc::dup2(other.as_raw_fd(), memfd.file.descriptor) };
        assert_eq!(there, memfd.file.descriptor);
        // SAFETY: no code uses the memory any more.
        unsafe { memfd.leave() };
        assert_eq!(fs::read_link(path(&memfd)).unwrap().to_str(), Some("/dev/null"));
        // SAFETY: the test made this descriptor.
        unsafe { rustix::io::close(there) };
    }
}
