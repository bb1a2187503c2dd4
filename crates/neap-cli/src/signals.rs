//! neap's handling of SIGPIPE, and the signal state that `neap run` hands to its program.
//!
//! The standard library ignores SIGPIPE before `main`, so `println!` panics if a reader closes its
//! pipe early. It also resets SIGPIPE for every child. If SIGPIPE was ignored when `neap run` was
//! started, the program would get another disposition than without `neap run`. So `note` stores the
//! disposition before the standard library changes it.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether SIGPIPE was ignored when this process was executed.
static IGNORED_AT_START: AtomicBool = AtomicBool::new(false);

/// Runs before the standard library's own start.
extern "C" fn note() {
    // SAFETY: all-zero bytes are a valid `sigaction`. With a null new action, the call changes
    // nothing but `now`.
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

/// Ignores SIGPIPE: a write to a closed connection fails instead of ending this process.
pub(crate) fn ignore_closed_pipes() {
    // SAFETY: to ignore a signal runs no code.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// Gives the program of `command` the disposition of SIGPIPE and the signal mask that this process
/// was started with.
pub(crate) fn pass_on(command: &mut Command) -> &mut Command {
    // SAFETY: all-zero bytes are a valid signal set. With a null new set, the call changes nothing
    // but `mask`.
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
    // SAFETY: the closure runs in the child between fork and exec. It allocates nothing, and both
    // of its calls are async-signal-safe.
    unsafe { command.pre_exec(restore) }
}
