//! Memory that another process of the same user can look at while this one lives: a memfd, mapped shared.
//!
//! The file has a name in `/proc/PID/fd`, no place in any file system, and is gone with the last process that has it. Its
//! descriptor is closed by exec and out of the way of the low numbers that programs count on. Takes no lock, keeps nothing.
//!
//! # Invariants
//! * No access to the first bytes, as many as the maker wants, meets a page that the system can refuse: their pages are
//!   allocated before they are mapped.
//! * Nothing can cut the file short below the mapping: it is sealed.
//! * No other user can open the file, and a forked child, however it is forked, does not have the mapping.
//! * No file grows over `RLIMIT_FSIZE`, which the kernel answers with a deadly signal.

use crate::Errno;
use core::ffi::CStr;
use core::ptr::null_mut;
use rustix::fd::{BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

/// The lowest descriptor to aim at.
const HIGH: u64 = 1000;
/// With fewer descriptors than this to have, the program needs all of them.
const FEW: u64 = 64;

/// Signals during the allocation of pages, each of which ends the attempt, before it is given up.
const MOST_INTERRUPTED: u32 = 100;

/// A mapped memfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memfd {
    /// Address of the first byte.
    pub address: usize,
    /// Bytes, as many as were asked for.
    pub length: usize,
    /// The file, by which it is recognised.
    pub file: OpenFile,
}

/// A descriptor, and which file it was when it was opened.
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
    /// Closes the descriptor if it still is this file's: a program may have closed it and been given its number for
    /// something else. Returns whether it was.
    ///
    /// No other thread may close or open files during the call.
    pub fn close(self) -> bool {
        // SAFETY: the descriptor is borrowed for one call; where it is closed the call fails.
        let descriptor = unsafe { BorrowedFd::borrow_raw(self.descriptor) };
        let found = rustix::fs::fstat(descriptor);
        let is_ours = found.is_ok_and(|status| (status.st_dev, status.st_ino) == (self.device, self.inode));
        if is_ours {
            // SAFETY: it was found to be the one that `make` made, and nothing else uses it.
            unsafe { rustix::io::close(self.descriptor) };
        }
        is_ours
    }
}

impl Memfd {
    /// Makes a memfd of `length` zeroes, the first `allocated` of them with pages, and maps it. Until it is moved its
    /// descriptor has the lowest free number: only where no other thread of the program runs, which could meet it there.
    ///
    /// # Errors
    /// What the first step that failed answered, a limit or a sandbox; nothing is left behind.
    pub fn make(name: &CStr, length: usize, allocated: usize) -> Result<Memfd, Errno> {
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < length as u64) {
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
        rustix::fs::ftruncate(&file, length as u64)?;
        let allocate = || rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, allocated as u64);
        let outcome = (0..MOST_INTERRUPTED).map(|_| allocate()).find(|outcome| *outcome != Err(Errno::INTR));
        outcome.unwrap_or(Err(Errno::INTR))?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let status = rustix::fs::fstat(&file)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without an address the kernel chooses one that is free.
        let got = unsafe { rustix::mm::mmap(null_mut(), length, protection, MapFlags::SHARED, &file, 0) }?;
        let address = got.expose_provenance();
        // SAFETY: nothing changes in this process.
        if let Err(error) = unsafe { rustix::mm::madvise(got, length, Advice::LinuxDontFork) } {
            // SAFETY: mapped above, and nothing refers to it.
            let _ = unsafe { crate::memory::unmap(address, length) };
            return Err(error);
        }
        let (device, inode) = (status.st_dev, status.st_ino);
        Ok(Memfd { address, length, file: OpenFile { descriptor: file.into_raw_fd(), device, inode } })
    }

    /// Takes the mapping away, and closes the descriptor as [`OpenFile::close`] does. Other processes that have the file
    /// keep it.
    ///
    /// # Safety
    /// This process made it, and nothing in this process uses the memory any more.
    pub unsafe fn leave(self) {
        self.file.close();
        // SAFETY: `make` mapped it, and as the caller promises. It cannot fail for a whole mapping.
        let _ = unsafe { crate::memory::unmap(self.address, self.length) };
    }
}

/// A sealable memfd that cannot be made executable, where the kernel knows that (6.3); one may be refused without.
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
        let memfd = Memfd::make(c"neap-read", LENGTH, LENGTH / 2).unwrap();
        let first = core::ptr::with_exposed_provenance_mut::<u8>(memfd.address);
        // SAFETY: the mapping was made above and is this test's alone.
        unsafe { first.copy_from_nonoverlapping(b"numbers".as_ptr(), 7) };
        let is_there =
            || fs::read_link(path(&memfd)).is_ok_and(|link| link.as_os_str() == "/memfd:neap-read (deleted)");
        assert!(is_there());
        let file = fs::read(path(&memfd)).unwrap();
        assert_eq!((&file[..8], file.len()), (&b"numbers\0"[..], LENGTH));
        // SAFETY: nobody uses the memory any more.
        unsafe { memfd.leave() };
        assert!(!is_there(), "the descriptor is closed");
    }

    #[test]
    fn the_descriptor_is_high_and_closed_by_exec_and_the_file_cannot_be_cut() {
        let memfd = Memfd::make(c"neap-test", LENGTH, LENGTH / 2).unwrap();
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        assert!(memfd.file.descriptor as u64 >= HIGH.min(limit / 2));
        let info = fs::read_to_string(std::format!("/proc/self/fdinfo/{}", memfd.file.descriptor)).unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
        assert_ne!(u32::from_str_radix(flags, 8).unwrap() & 0o2000000, 0, "O_CLOEXEC in {flags}");
        let status = fs::metadata(path(&memfd)).unwrap();
        assert_eq!(status.mode() & 0o7777, 0o600, "other users may not open it");
        assert_eq!(status.blocks() * 512, LENGTH as u64 / 2, "no store may need a page that can be refused");
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let own = maps.split_once(&std::format!("{:x}-", memfd.address)).unwrap().1;
        let flags = own.lines().find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "dc"), "not for children: {flags}");
        let again = fs::OpenOptions::new().write(true).open(path(&memfd)).unwrap();
        assert!(again.set_len(0).is_err());
        // SAFETY: nobody uses the memory any more.
        unsafe { memfd.leave() };
    }

    #[test]
    fn a_descriptor_that_is_something_else_by_now_stays_open() {
        let memfd = Memfd::make(c"neap-test", LENGTH, LENGTH / 2).unwrap();
        let other = fs::File::open("/dev/null").unwrap();
        // SAFETY: the program's side of the story: it closes what is not its own, and opens something there.
        let there = unsafe { libc::dup2(other.as_raw_fd(), memfd.file.descriptor) };
        assert_eq!(there, memfd.file.descriptor);
        // SAFETY: nobody uses the memory any more.
        unsafe { memfd.leave() };
        assert_eq!(fs::read_link(path(&memfd)).unwrap().to_str(), Some("/dev/null"));
        // SAFETY: made above.
        unsafe { rustix::io::close(there) };
    }
}
