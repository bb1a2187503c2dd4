//! Inputs of a process: environment variables, privileges, random numbers and small files.
//!
//! This module only reads. neap reads the environment once, at start-up, before another thread of
//! the program can change it.

use crate::Errno;
use crate::syscall::{GETRANDOM, syscall5};
use core::ffi::{CStr, c_char};
use rustix::fs::{CWD, Mode, OFlags};

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// The value of the environment variable `name`; `None` before the C library has set `environ`, as
/// in calls from the dynamic loader.
///
/// # Safety
/// No other thread changes the environment during the call. The value is valid until the
/// environment changes.
pub unsafe fn variable(name: &str) -> Option<&'static [u8]> {
    // SAFETY: `environ` is a plain pointer that the C library sets before it runs any constructor.
    let mut entry = unsafe { environ };
    if entry.is_null() {
        return None;
    }
    loop {
        // SAFETY: `environ` is an array of C strings that ends with a null pointer. The caller
        // promises that it does not change during the call.
        let text = unsafe { entry.read() };
        if text.is_null() {
            return None;
        }
        // SAFETY: `text` is not null, so it is a C string of `environ`, which does not change
        // during the call.
        let text = unsafe { CStr::from_ptr(text) }.to_bytes();
        if let Some(value) = text.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"=")) {
            return Some(value);
        }
        // SAFETY: the entry just read is not the null pointer at the end, so another entry follows.
        entry = unsafe { entry.add(1) };
    }
}

/// Whether the program runs with more rights than its user (set-user-ID). Its environment must not
/// be trusted then.
pub fn is_privileged() -> bool {
    // SAFETY: getauxval has no preconditions.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Returns a random number.
///
/// The function does not use the random bytes that the kernel gave the process at its start. The C
/// library makes its stack guard and its pointer guard of these bytes, and an address of neap must
/// not reveal them.
pub fn random() -> u64 {
    /// `GRND_INSECURE` (since Linux 5.6) and `GRND_NONBLOCK`. Neither waits.
    const FLAGS: [usize; 2] = [4, 1];
    let mut bytes = [0_u8; 8];
    for flags in FLAGS {
        // SAFETY: the kernel writes at most `bytes.len()` bytes.
        let got = unsafe { syscall5(GETRANDOM, bytes.as_mut_ptr().expose_provenance(), bytes.len(), flags, 0, 0) };
        if got == Ok(bytes.len()) {
            return u64::from_ne_bytes(bytes);
        }
    }
    // A sandbox refused the call. Mixes the time and the stack's address by the finaliser of
    // MurmurHash3 (public domain).
    let seed = crate::clock::precise() ^ (bytes.as_ptr().addr() as u64).rotate_left(24);
    let mixed = (seed ^ (seed >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    mixed ^ (mixed >> 33)
}

/// Reads the start of a file into `buffer`, and returns the bytes read: at most `buffer.len()`.
///
/// # Errors
/// The error of opening or reading.
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

/// Reads how many bytes of anonymous memory of the process are resident or swapped out. `None` if
/// the system does not say. Takes 4 KiB of stack.
pub fn anonymous_bytes() -> Option<u64> {
    let mut text = [0; 4096];
    let text = read_file(c"/proc/self/status", &mut text).ok()?;
    let kibibytes = |key: &[u8]| {
        let line = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(key))?;
        core::str::from_utf8(line).ok()?.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    // A kernel without swap has no second line.
    Some((kibibytes(b"RssAnon:")? + kibibytes(b"VmSwap:").unwrap_or(0)) << 10)
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
