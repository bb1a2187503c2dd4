//! One line of text to standard error, without allocation, and the end of the process.
//!
//! Sits between a fatal finding and the person who reads it. Formats into a buffer on the stack, so that a line goes out
//! by one write and lines of two threads do not mix. Signal-safe. Never returns an error: there is nobody to tell.

use core::fmt::{self, Write};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::BorrowedFd;

/// A line of at most 512 bytes; what does not fit is cut off.
pub struct Line {
    bytes: [u8; 512],
    length: usize,
}

impl Line {
    /// An empty line.
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
    // Not by rustix's function for it, which is safe or unsafe as a feature says that another crate may switch on.
    // SAFETY: descriptor 2 is only borrowed for this call; where it is closed the write fails and nothing happens.
    let error = unsafe { BorrowedFd::borrow_raw(rustix::stdio::raw_stderr()) };
    let _ = rustix::io::write(error, line.as_bytes());
}

/// The same in a process that goes on: only where it neither waits for who reads that, nor ends because nobody does.
pub fn say_if_heard(message: fmt::Arguments<'_>) {
    // SAFETY: as above.
    let error = unsafe { BorrowedFd::borrow_raw(rustix::stdio::raw_stderr()) };
    let mut asked = [PollFd::new(&error, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if rustix::event::poll(&mut asked, Some(&now)) == Ok(1) && asked[0].revents() == PollFlags::OUT {
        say(message);
    }
}

/// Says the message, then ends the process with an exit status; runs none of the program's handlers.
pub fn stop(status: i32, message: fmt::Arguments<'_>) -> ! {
    say(message);
    let number = linux_raw_sys::general::__NR_exit_group as usize;
    // SAFETY: ends all threads at once.
    let _ = unsafe { crate::syscall::syscall5(number, status as usize, 0, 0, 0, 0) };
    // SAFETY: a sandbox that refuses the call comes this far; an undefined instruction ends the process in any case.
    unsafe { core::arch::asm!("ud2", options(noreturn)) }
}

const SIGABRT: usize = 6;

/// Says the message, then ends the process by SIGABRT.
pub fn die(message: fmt::Arguments<'_>) -> ! {
    say(message);
    // The C library's abort takes a lock that a crashing thread may hold; a signal to this very thread does not.
    let (process, thread) = (rustix::process::getpid(), rustix::thread::gettid());
    let (process, thread) = (process.as_raw_pid() as usize, thread.as_raw_pid() as usize);
    let number = linux_raw_sys::general::__NR_tgkill as usize;
    // SAFETY: a signal to oneself; what it does is the program's to say.
    let _ = unsafe { crate::syscall::syscall5(number, process, thread, SIGABRT, 0, 0) };
    // SAFETY: a program that ignores or blocks SIGABRT comes this far; an undefined instruction ends it in any case.
    unsafe { core::arch::asm!("ud2", options(noreturn)) }
}
