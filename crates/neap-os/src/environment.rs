//! What a process is told from outside: environment variables and small files.
//!
//! Sits between the C library's `environ` or the kernel's file systems and the options and the topology. Reads only;
//! the environment is looked at once, at start-up, before the program can change it from another thread.

use crate::Errno;
use core::ffi::{CStr, c_char};
use rustix::fs::{CWD, Mode, OFlags};

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// The value of the environment variable `name`.
///
/// Before the C library has set `environ` (calls from the dynamic loader) there is none.
///
/// # Safety
/// No other thread changes the environment during the call; the value lives until somebody does.
pub unsafe fn variable(name: &str) -> Option<&'static [u8]> {
    // SAFETY: `environ` is a plain pointer that the C library sets before it runs any constructor.
    let mut entry = unsafe { environ };
    if entry.is_null() {
        return None;
    }
    loop {
        // SAFETY: `environ` is an array of C strings that ends with a null pointer; the caller keeps it still.
        let text = unsafe { entry.read() };
        if text.is_null() {
            return None;
        }
        // SAFETY: as above.
        let text = unsafe { CStr::from_ptr(text) }.to_bytes();
        if let Some(value) = text.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"=")) {
            return Some(value);
        }
        // SAFETY: the entry just read was not the last.
        entry = unsafe { entry.add(1) };
    }
}

/// Whether the program runs with more rights than its user (set-user-ID): the environment is not to be trusted then.
pub fn is_privileged() -> bool {
    // SAFETY: getauxval has no preconditions.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Eight of the sixteen random bytes that the kernel gave this process at its start; another value in every process.
pub fn random_seed() -> u64 {
    // SAFETY: getauxval has no preconditions.
    let bytes = unsafe { libc::getauxval(libc::AT_RANDOM) } as usize;
    if bytes == 0 {
        return crate::clock::precise();
    }
    // SAFETY: the kernel puts sixteen bytes there, aligned to nothing in particular. The C library takes its stack guard
    // from the first eight, so these are the others.
    unsafe { core::ptr::with_exposed_provenance::<u64>(bytes + 8).read_unaligned() }
}

/// Reads the start of a file into `buffer`, and answers what was read: `buffer.len()` bytes at most.
///
/// # Errors
/// Whatever opening or reading answered.
pub fn read_file<'b>(path: &CStr, buffer: &'b mut [u8]) -> Result<&'b [u8], Errno> {
    let file = rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut length = 0;
    while length < buffer.len() {
        match rustix::io::read(&file, &mut buffer[length..]) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(&buffer[..length])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_is_found_by_its_whole_name() {
        // SAFETY: no test of this crate changes the environment.
        unsafe {
            assert!(variable("PATH").is_some());
            assert_eq!(variable("PAT"), None);
            assert_eq!(variable("NEAP_NO_SUCH_VARIABLE"), None);
        }
    }

    #[test]
    fn a_file_is_read_up_to_the_buffer() {
        let mut buffer = [0; 4];
        assert_eq!(read_file(c"/proc/self/comm", &mut buffer).map(<[u8]>::len), Ok(4));
        assert_eq!(read_file(c"/no/such/file", &mut buffer), Err(Errno::NOENT));
    }
}
