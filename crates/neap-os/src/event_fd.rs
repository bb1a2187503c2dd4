//! Signals an eventfd, to wake the threads that wait on it.
//!
//! The owner of the descriptor must keep it open. A call with a closed descriptor fails. No call
//! blocks, since [`check`] refuses a descriptor that could block. This module has no lock and no
//! state.

use crate::Errno;
use rustix::fd::BorrowedFd;
use rustix::fs::{FileType, OFlags};

/// Checks that a descriptor is an eventfd or another object without a file type, and that it is in
/// non-blocking mode.
///
/// # Errors
/// `BADF` if the descriptor is not open; `INVAL` for a file, a pipe or a socket; `WOULDBLOCK` if it
/// lacks `O_NONBLOCK` (`EFD_NONBLOCK` of an eventfd).
pub fn check(descriptor: i32) -> Result<(), Errno> {
    let borrowed = borrow(descriptor)?;
    // Objects without a file, such as an eventfd, have no file type.
    if FileType::from_raw_mode(rustix::fs::fstat(borrowed)?.st_mode) != FileType::Unknown {
        return Err(Errno::INVAL);
    }
    if rustix::fs::fcntl_getfl(borrowed)?.contains(OFlags::NONBLOCK) { Ok(()) } else { Err(Errno::WOULDBLOCK) }
}

/// Adds one to the eventfd's count, which wakes the threads that wait. If the count is at its
/// maximum, leaves it unchanged.
///
/// # Errors
/// `BADF` if the descriptor is negative; otherwise the kernel's error, for example if the
/// descriptor is closed. Nothing is added.
pub fn tell(descriptor: i32) -> Result<(), Errno> {
    match rustix::io::write(borrow(descriptor)?, &1_u64.to_ne_bytes()) {
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(error) => Err(error),
    }
}

fn borrow(descriptor: i32) -> Result<BorrowedFd<'static>, Errno> {
    if descriptor < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the descriptor is only passed to the kernel, which checks it.
    Ok(unsafe { BorrowedFd::borrow_raw(descriptor) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::ffi::c_void;

    fn eventfd(start: u32, flags: i32) -> i32 {
        // SAFETY: a call without pointers.
        unsafe { libc::eventfd(start, flags) }
    }

    fn close(descriptor: i32) {
        // SAFETY: the test owns the descriptor.
        unsafe { libc::close(descriptor) };
    }

    #[test]
    fn what_was_told_is_added_up_and_a_full_one_does_not_block() {
        let descriptor = eventfd(3, libc::EFD_NONBLOCK);
        assert_eq!((check(descriptor), tell(descriptor), tell(descriptor)), (Ok(()), Ok(()), Ok(())));
        let mut count = 0_u64;
        let place: *mut c_void = (&raw mut count).cast();
        // SAFETY: the buffer has eight bytes.
        assert_eq!(unsafe { libc::read(descriptor, place, 8) }, 8);
        assert_eq!(count, 5);
        let most = u64::MAX - 1;
        // SAFETY: the buffer has eight bytes.
        assert_eq!(unsafe { libc::write(descriptor, (&raw const most).cast(), 8) }, 8);
        assert_eq!(tell(descriptor), Ok(()));
        close(descriptor);
    }

    #[test]
    fn what_would_block_or_is_something_else_is_refused() {
        let blocking = eventfd(0, 0);
        assert_eq!(check(blocking), Err(Errno::WOULDBLOCK));
        close(blocking);
        let mut pipe = [0; 2];
        // SAFETY: the buffer has room for two descriptors.
        assert_eq!(unsafe { libc::pipe2(pipe.as_mut_ptr(), libc::O_NONBLOCK) }, 0);
        assert_eq!(check(pipe[1]), Err(Errno::INVAL));
        pipe.into_iter().for_each(close);
        assert_eq!((check(-1), tell(-1)), (Err(Errno::BADF), Err(Errno::BADF)));
        assert_eq!(check(1 << 20), Err(Errno::BADF));
    }
}
