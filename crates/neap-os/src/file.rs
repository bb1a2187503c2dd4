//! A file that a process writes by storing to memory: what was stored is in the file even if the process is killed.
//!
//! Sits between the kernel's file systems and whoever records. The whole of the file is reserved before it is mapped, so
//! that no store ever finds the disk full, which the kernel answers with a deadly signal; nor is a file grown over
//! `RLIMIT_FSIZE`, for the same reason. No descriptor stays open. Takes no lock, keeps nothing.

use crate::Errno;
use core::ffi::CStr;
use core::ptr::null_mut;
use rustix::fd::OwnedFd;
use rustix::fs::{CWD, FallocateFlags, FileType, Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

/// An open file.
#[derive(Debug)]
pub struct File(OwnedFd);

impl File {
    /// Makes a file that is not there yet.
    ///
    /// # Errors
    /// `EXIST` where it is.
    pub fn make(path: &CStr) -> Result<File, Errno> {
        let (read, write) = (Mode::RUSR | Mode::RGRP | Mode::ROTH, Mode::WUSR | Mode::WGRP | Mode::WOTH);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::openat(CWD, path, flags, read | write).map(File)
    }

    /// Opens one that is there.
    ///
    /// # Errors
    /// `INVAL` for what is no regular file.
    pub fn open(path: &CStr) -> Result<File, Errno> {
        // What is no file might block for ever.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
        if kind == FileType::RegularFile { Ok(File(file)) } else { Err(Errno::INVAL) }
    }

    /// The bytes that it begins with, as many as it has of them.
    ///
    /// # Errors
    /// Whatever reading answered.
    pub fn start<'b>(&self, buffer: &'b mut [u8]) -> Result<&'b [u8], Errno> {
        let read = rustix::io::pread(&self.0, &mut *buffer, 0)?;
        Ok(&buffer[..read])
    }

    /// Replaces what is in it by `length` zeroes, and maps them; answers where. They stay mapped.
    ///
    /// # Errors
    /// `FBIG` over the limit for files, `NOSPC`, `OPNOTSUPP` where the file system reserves nothing. The file is as it was, or
    /// empty, or all zeroes.
    pub fn map_zeroes(self, length: usize) -> Result<usize, Errno> {
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < length as u64) {
            return Err(Errno::FBIG);
        }
        rustix::fs::ftruncate(&self.0, 0)?;
        rustix::fs::fallocate(&self.0, FallocateFlags::empty(), 0, length as u64)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without an address the kernel chooses one that is free.
        let got = unsafe { rustix::mm::mmap(null_mut(), length, protection, MapFlags::SHARED, &self.0, 0) }?;
        Ok(got.expose_provenance())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::path::PathBuf;
    use std::{env, format, fs, process};

    fn place(name: &str) -> (PathBuf, CString) {
        let path = env::temp_dir().join(format!("neap-os-{name}-{}", process::id()));
        let c_path = CString::new(path.as_os_str().as_bytes()).unwrap();
        (path, c_path)
    }

    #[test]
    fn what_is_stored_is_in_the_file_and_what_was_there_is_not() {
        let (path, c_path) = place("mapped");
        let file = File::make(&c_path).unwrap();
        assert_eq!(File::make(&c_path).err(), Some(Errno::EXIST));
        fs::write(&path, "old words").unwrap();
        let mut buffer = [0; 16];
        assert_eq!(file.start(&mut buffer), Ok(&b"old words"[..]));
        assert_eq!(File::open(&c_path).unwrap().start(&mut buffer[..3]), Ok(&b"old"[..]));
        let address = file.map_zeroes(10_000).unwrap();
        let first = core::ptr::with_exposed_provenance_mut::<u8>(address);
        // SAFETY: the mapping was made above and is this test's alone.
        unsafe { first.copy_from_nonoverlapping(b"new".as_ptr(), 3) };
        let found = fs::read(&path).unwrap();
        assert_eq!((&found[..9], found.len()), (&b"new\0\0\0\0\0\0"[..], 10_000));
        fs::remove_file(&path).unwrap();
        // SAFETY: nobody uses the memory any more.
        unsafe { crate::memory::unmap(address, 10_000) }.unwrap();
    }

    #[test]
    fn what_is_no_file_is_refused() {
        for path in [c"/dev/null", c"/"] {
            assert!(matches!(File::open(path).err(), Some(Errno::INVAL | Errno::ISDIR)), "{path:?}");
        }
        assert_eq!(File::open(c"/no/such/file").err(), Some(Errno::NOENT));
        assert_eq!(File::make(c"/no/such/file").err(), Some(Errno::NOENT));
    }
}
