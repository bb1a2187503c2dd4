//! Files that a process writes by system calls or through a shared mapping. Bytes that it stores to
//! the mapping are in the file even if the process is killed.
//!
//! [`File::map_zeroes`] reserves the whole file before it maps it, so no [`store`] finds the disk
//! full. No function grows a file over `RLIMIT_FSIZE`, since the kernel would send a deadly signal.
//! If the owner cuts the file short, an access to the missing part would raise a deadly signal,
//! too. Therefore [`store`] lets the kernel make the access, and returns an error instead. The
//! module has no lock, and keeps no state or descriptor outside its [`File`] values.

use crate::Errno;
use crate::syscall::{PROCESS_VM_WRITEV, syscall6};
use core::ffi::CStr;
use core::ptr::null_mut;
use libc::iovec;
use rustix::fd::OwnedFd;
use rustix::fs::{CWD, FallocateFlags, FileType, Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

/// An open file.
#[derive(Debug)]
pub struct File(OwnedFd);

impl File {
    /// Creates a file that does not exist yet.
    ///
    /// # Errors
    /// `EXIST` if the file exists; otherwise the error of the system.
    pub fn make(path: &CStr) -> Result<File, Errno> {
        let (read, write) = (Mode::RUSR | Mode::RGRP | Mode::ROTH, Mode::WUSR | Mode::WGRP | Mode::WOTH);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::openat(CWD, path, flags, read | write).map(File)
    }

    /// Creates a file that does not exist yet, for its owner alone. Does not follow a symbolic link
    /// in its place.
    ///
    /// # Errors
    /// `EXIST` if the name exists, even as a symbolic link; otherwise the error of the system.
    pub fn make_private(path: &CStr) -> Result<File, Errno> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(CWD, path, flags, Mode::RUSR | Mode::WUSR).map(File)
    }

    /// Creates a file for its owner alone, or empties an existing regular file. Follows a symbolic
    /// link, as creat(2) does.
    ///
    /// # Errors
    /// `INVAL` for an object that is not a regular file, `NXIO` for a pipe without a reader;
    /// otherwise the error of the system.
    pub fn make_or_empty(path: &CStr) -> Result<File, Errno> {
        // NONBLOCK: opening a pipe could block for ever otherwise.
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = File(rustix::fs::openat(CWD, path, flags, Mode::RUSR | Mode::WUSR)?);
        // The system refuses this for objects that are not files.
        rustix::fs::ftruncate(&file.0, 0)?;
        Ok(file)
    }

    /// Sets the length of the file. New bytes are zero, and take no space until they are written.
    ///
    /// # Errors
    /// `FBIG` over the limit for files; otherwise the error of the system.
    pub fn set_length(&self, length: usize) -> Result<(), Errno> {
        fits_limit(length)?;
        rustix::fs::ftruncate(&self.0, length as u64)
    }

    /// Writes bytes at an offset. The range must lie within the file's length.
    ///
    /// # Errors
    /// The error of the system, such as `NOSPC`. A part of the bytes may be written then.
    pub fn write_at(&self, mut bytes: &[u8], mut offset: usize) -> Result<(), Errno> {
        while !bytes.is_empty() {
            match rustix::io::pwrite(&self.0, bytes, offset as u64) {
                Ok(0) => return Err(Errno::IO),
                Ok(written) => (bytes, offset) = (&bytes[written.min(bytes.len())..], offset + written),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Time of the last change, in seconds since 1970.
    ///
    /// # Errors
    /// The error of the system.
    pub fn changed_at(&self) -> Result<u64, Errno> {
        Ok(rustix::fs::fstat(&self.0)?.st_mtime.cast_unsigned())
    }

    /// Opens an existing file that no other user can have put there.
    ///
    /// # Errors
    /// `INVAL` for an object that is not a regular file, `LOOP` for a symbolic link, `PERM` for a
    /// file of another user or with several names.
    pub fn open(path: &CStr) -> Result<File, Errno> {
        // NONBLOCK: opening a pipe could block for ever otherwise.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
        let status = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(Errno::INVAL);
        }
        let is_own = status.st_uid == rustix::process::geteuid().as_raw() && status.st_nlink == 1;
        if is_own { Ok(File(file)) } else { Err(Errno::PERM) }
    }

    /// Reads the first bytes of the file into `buffer`, and returns the part of `buffer` that it
    /// has filled.
    ///
    /// # Errors
    /// The error of reading.
    pub fn start<'b>(&self, buffer: &'b mut [u8]) -> Result<&'b [u8], Errno> {
        let read = rustix::io::pread(&self.0, &mut *buffer, 0)?;
        Ok(&buffer[..read])
    }

    /// Replaces the file's contents by `length` zeroes, and maps them. Returns the address. The
    /// mapping outlives the file's descriptor.
    ///
    /// # Errors
    /// `FBIG` over the limit for files, `NOSPC` if the disk is full, `OPNOTSUPP` if the file system
    /// cannot reserve space. The file is unchanged, empty, or all zeroes then.
    pub fn map_zeroes(self, length: usize) -> Result<usize, Errno> {
        fits_limit(length)?;
        rustix::fs::ftruncate(&self.0, 0)?;
        rustix::fs::fallocate(&self.0, FallocateFlags::empty(), 0, length as u64)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without an address the kernel chooses a free range.
        let got = unsafe { rustix::mm::mmap(null_mut(), length, protection, MapFlags::SHARED, &self.0, 0) }?;
        Ok(got.expose_provenance())
    }
}

/// Returns `FBIG` for a length beyond `RLIMIT_FSIZE`, at which the kernel would send a deadly
/// signal.
fn fits_limit(length: usize) -> Result<(), Errno> {
    let is_beyond = getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < length as u64);
    if is_beyond { Err(Errno::FBIG) } else { Ok(()) }
}

/// Copies bytes to two addresses in this process, one after the other. If the memory cannot be
/// written, the call fails and raises no signal.
///
/// # Errors
/// `FAULT` if a page cannot be provided. Then either no byte is stored, or only those of the first
/// part. `NOSYS` or `PERM` in a sandbox.
///
/// # Safety
/// `process` is this process's id. The memory at the addresses may be overwritten.
pub unsafe fn store(process: u32, parts: [(usize, &[u8]); 2]) -> Result<(), Errno> {
    let from = parts.map(|(_, bytes)| iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() });
    let to = parts.map(|(address, bytes)| iovec {
        iov_base: core::ptr::with_exposed_provenance_mut(address),
        iov_len: bytes.len(),
    });
    let (from, to) = (from.as_ptr().expose_provenance(), to.as_ptr().expose_provenance());
    // SAFETY: both lists live during the call. The caller promises that `process` is this process,
    // so the call reads the parts and writes to this process's memory. It writes only where the
    // caller allows it.
    let stored = unsafe { syscall6(PROCESS_VM_WRITEV, process as usize, from, 2, to, 2, 0) }?;
    let wanted = parts[0].1.len() + parts[1].1.len();
    if stored == wanted { Ok(()) } else { Err(Errno::FAULT) }
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
        // SAFETY: the mapping was made above, and only this test uses it.
        unsafe { first.copy_from_nonoverlapping(b"new".as_ptr(), 3) };
        let found = fs::read(&path).unwrap();
        assert_eq!((&found[..9], found.len()), (&b"new\0\0\0\0\0\0"[..], 10_000));
        fs::remove_file(&path).unwrap();
        // SAFETY: no code uses the memory any more.
        unsafe { crate::memory::unmap(address, 10_000) }.unwrap();
    }

    #[test]
    fn store_into_a_file_that_was_cut_short_fails() {
        let (path, c_path) = place("cut");
        let address = File::make(&c_path).unwrap().map_zeroes(10_000).unwrap();
        // SAFETY: the mapping was made above, and only this test uses it.
        let put = || unsafe { store(process::id(), [(address + 8192, b"second"), (address, b"first")]) };
        put().unwrap();
        let found = fs::read(&path).unwrap();
        assert_eq!((&found[..6], &found[8192..8199]), (&b"first\0"[..], &b"second\0"[..]));
        for length in [4096, 0] {
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length).unwrap();
            assert_eq!(put(), Err(Errno::FAULT), "{length} bytes are left");
        }
        fs::remove_file(&path).unwrap();
        // SAFETY: no code uses the memory any more.
        unsafe { crate::memory::unmap(address, 10_000) }.unwrap();
    }

    #[test]
    fn file_that_another_user_could_have_put_there_is_refused() {
        let (path, c_path) = place("planted");
        let (other, c_other) = place("planted-link");
        fs::write(&path, "words").unwrap();
        std::os::unix::fs::symlink(&path, &other).unwrap();
        assert_eq!(File::open(&c_other).err(), Some(Errno::LOOP));
        assert_eq!(File::make(&c_other).err(), Some(Errno::EXIST));
        fs::remove_file(&other).unwrap();
        fs::hard_link(&path, &other).unwrap();
        assert_eq!(File::open(&c_path).err(), Some(Errno::PERM), "a second name");
        fs::remove_file(&other).unwrap();
        assert!(File::open(&c_path).is_ok());
        // Only root can create a file that another user owns.
        if std::os::unix::fs::chown(&path, Some(65_534), None).is_ok() {
            assert_eq!(File::open(&c_path).err(), Some(Errno::PERM), "another user's");
        }
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn private_file_is_new_and_written_at_offsets() {
        use std::os::unix::fs::PermissionsExt;
        let (path, c_path) = place("private");
        let (other, c_other) = place("private-link");
        std::os::unix::fs::symlink(&path, &other).unwrap();
        assert_eq!(File::make_private(&c_other).err(), Some(Errno::EXIST), "a link to nothing");
        fs::remove_file(&other).unwrap();
        let file = File::make_private(&c_path).unwrap();
        assert_eq!(File::make_private(&c_path).err(), Some(Errno::EXIST));
        file.set_length(10_000).unwrap();
        file.write_at(b"middle", 5000).unwrap();
        file.write_at(b"", 0).unwrap();
        let about = fs::metadata(&path).unwrap();
        assert_eq!((about.len(), about.permissions().mode() & 0o777), (10_000, 0o600));
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        assert!(file.changed_at().unwrap().abs_diff(now) < 60);
        let found = fs::read(&path).unwrap();
        assert_eq!((&found[..2], &found[4999..5008]), (&b"\0\0"[..], &b"\0middle\0\0"[..]));
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn file_is_made_for_its_owner_or_emptied() {
        use std::os::unix::fs::PermissionsExt;
        let (path, c_path) = place("emptied");
        for _ in 0..2 {
            File::make_or_empty(&c_path).unwrap().set_length(10).unwrap();
            assert_eq!(fs::read(&path).unwrap(), [0; 10]);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            fs::write(&path, "old words that are longer").unwrap();
        }
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn what_is_no_file_is_refused() {
        for path in [c"/dev/null", c"/"] {
            assert!(matches!(File::open(path).err(), Some(Errno::INVAL | Errno::ISDIR)), "{path:?}");
            assert!(matches!(File::make_or_empty(path).err(), Some(Errno::INVAL | Errno::ISDIR)), "{path:?}");
        }
        assert_eq!(File::open(c"/no/such/file").err(), Some(Errno::NOENT));
        assert_eq!(File::make(c"/no/such/file").err(), Some(Errno::NOENT));
    }
}
