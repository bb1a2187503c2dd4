//! Writes one line to standard error without allocating, and ends the process.
//!
//! Text is formatted into a buffer on the stack. A line is one write, so lines of two threads do
//! not mix. All functions are signal-safe. They ignore errors of the write, which they could not
//! report.

use crate::Errno;
use core::fmt::{self, Write};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::BorrowedFd;

/// A line of at most 512 bytes; longer text is cut off.
pub struct Line {
    bytes: [u8; 512],
    length: usize,
}

impl Line {
    /// Creates an empty line.
    pub const fn new() -> Line {
        Line { bytes: [0; 512], length: 0 }
    }

    /// The bytes written so far.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl Default for Line {
    fn default() -> Self {
        Line::new()
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.bytes.len() - self.length;
        let taken = text.len().min(room);
        self.bytes[self.length..self.length + taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.length += taken;
        Ok(())
    }
}

/// Writes `neap: `, the message and a newline to standard error by one call.
pub fn say(message: fmt::Arguments<'_>) {
    let mut line = Line::new();
    let _ = write!(line, "neap: {message}");
    line.length = line.length.min(line.bytes.len() - 1);
    line.bytes[line.length] = b'\n';
    line.length += 1;
    write_all(line.as_bytes());
}

/// Writes bytes to standard error, by one call if it takes all of them.
pub fn write_all(mut bytes: &[u8]) {
    // rustix's own function is safe or unsafe depending on a feature that another crate may enable.
    // SAFETY: descriptor 2 is only borrowed for this call. If it is closed, the write fails.
    let error = unsafe { BorrowedFd::borrow_raw(rustix::stdio::raw_stderr()) };
    while !bytes.is_empty() {
        match rustix::io::write(error, bytes) {
            Ok(written) if written > 0 => bytes = bytes.get(written..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            _ => break,
        }
    }
}

/// Writes a message as [`say`] does, unless that would block or raise SIGPIPE. This is for messages
/// of a process that continues.
pub fn say_if_heard(message: fmt::Arguments<'_>) {
    // SAFETY: descriptor 2 is only borrowed for this call. If it is closed, `poll` reports it.
    let error = unsafe { BorrowedFd::borrow_raw(rustix::stdio::raw_stderr()) };
    let mut asked = [PollFd::new(&error, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if rustix::event::poll(&mut asked, Some(&now)) == Ok(1) && asked[0].revents() == PollFlags::OUT {
        say(message);
    }
}

/// Writes the message, then ends the process with an exit status. Runs no handler of the program.
pub fn stop(status: i32, message: fmt::Arguments<'_>) -> ! {
    say(message);
    let number = linux_raw_sys::general::__NR_exit_group as usize;
    // SAFETY: the call has no pointers and ends all threads.
    let _ = unsafe { crate::syscall::syscall5(number, status as usize, 0, 0, 0, 0) };
    // Reached only if a sandbox refuses the call.
    crate::arch::trap()
}

const SIGABRT: usize = 6;

/// Writes the message, then ends the process by SIGABRT.
pub fn die(message: fmt::Arguments<'_>) -> ! {
    say(message);
    abort()
}

/// Ends the process by SIGABRT.
pub fn abort() -> ! {
    // The C library's abort takes a lock that a crashing thread may hold. Sending a signal to this
    // thread takes no lock.
    let (process, thread) = (rustix::process::getpid(), rustix::thread::gettid());
    let (process, thread) = (process.as_raw_pid() as usize, thread.as_raw_pid() as usize);
    let number = linux_raw_sys::general::__NR_tgkill as usize;
    // SAFETY: the call has no pointers; the signal goes to this thread.
    let _ = unsafe { crate::syscall::syscall5(number, process, thread, SIGABRT, 0, 0) };
    // Reached only if the program ignores, blocks or handles SIGABRT, or a sandbox refuses the
    // call.
    crate::arch::trap()
}
