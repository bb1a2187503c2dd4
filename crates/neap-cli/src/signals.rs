//! neap's handling of SIGPIPE, and the signal state that `neap run` hands to its program.
//!
//! The standard library ignores SIGPIPE before `main`, and resets it for every child. If a reader
//! closes its pipe early, `println!` panics. A program started under an ignored SIGPIPE would get
//! another disposition than without `neap run`. So the state is noted before the standard library
//! changes it.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether SIGPIPE was ignored when this process was executed.
static IGNORED_AT_START: AtomicBool = AtomicBool::new(false);

/// Runs before the standard library's own start.
extern "C" fn note() {
    // SAFETY: zeroes are a `sigaction`; the call only fills it.
    let ignored = unsafe {
        let mut now: libc::sigaction = core::mem::zeroed();
        libc::sigaction(libc::SIGPIPE, null(), &raw mut now) == 0 && now.sa_sigaction == libc::SIG_IGN
    };
    // Relaxed: this process has one thread.
    IGNORED_AT_START.store(ignored, Ordering::Relaxed);
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = note;

/// Lets SIGPIPE end this process silently.
pub(crate) fn end_by_a_closed_pipe() {
    // SAFETY: the default disposition runs no code.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Lets writes to a closed connection fail, for commands that go on then.
pub(crate) fn ignore_closed_pipes() {
    // SAFETY: to ignore a signal runs no code.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// Gives the program of `command` the disposition of SIGPIPE and the signal mask that this process
/// was started with.
pub(crate) fn pass_on(command: &mut Command) -> &mut Command {
    // SAFETY: zeroes are a signal set; the call only fills it.
    let mask = unsafe {
        let mut mask: libc::sigset_t = core::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_BLOCK, null(), &raw mut mask);
        mask
    };
    let disposition = if IGNORED_AT_START.load(Ordering::Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
    let restore = move || {
        // SAFETY: neither disposition runs code, and the mask was read above.
        let done = unsafe {
            libc::signal(libc::SIGPIPE, disposition) != libc::SIG_ERR
                && libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, null_mut()) == 0
        };
        if done { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(restore) }
}
