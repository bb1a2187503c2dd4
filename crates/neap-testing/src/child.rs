//! A test in a forked child, with the parent's memory.
//!
//! The child calls a function and ends by `_exit`, so no code of the test harness runs in it.

use core::panic::AssertUnwindSafe;
use std::panic::catch_unwind;

/// Exit code of a child whose function panicked.
const PANICKED: i32 = 99;

/// Waits until a child of this process ends, and returns its wait status.
///
/// # Panics
/// If `child` is no child of this process.
#[must_use]
pub fn status_of(child: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: the status is a local of this function.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}

/// Forks, and returns the child's wait status. The child exits with the code that `body` returns.
/// `body` uses nothing that another thread of this process may hold.
///
/// # Panics
/// If the child cannot be made.
pub fn status_in_child(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child runs `body` alone, which is written for a child, and ends by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = catch_unwind(AssertUnwindSafe(body)).unwrap_or(PANICKED);
        // SAFETY: ends the child without running code of the harness.
        unsafe { libc::_exit(code) };
    }
    assert!(child > 0, "fork failed: {}", std::io::Error::last_os_error());
    status_of(child)
}

/// Returns the exit code that `body` returns in a forked child: see [`status_in_child`].
///
/// # Panics
/// If the child cannot be made, or ends by a signal.
pub fn exit_code_of(body: impl FnOnce() -> i32) -> i32 {
    let status = status_in_child(body);
    assert!(libc::WIFEXITED(status), "the child ended with status {status:#x}");
    libc::WEXITSTATUS(status)
}

/// Calls `body` in a forked child, which must reach its end.
///
/// # Panics
/// If `body` panics in the child, or the child ends otherwise.
pub fn in_child(body: impl FnOnce()) {
    let code = exit_code_of(|| {
        body();
        0
    });
    assert_eq!(code, 0, "the child ended with code {code}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_child_is_its_exit_code_and_fails_the_parent() {
        assert_eq!([3, 0].map(|code| exit_code_of(|| code)), [3, 0]);
        assert_eq!(exit_code_of(|| panic!("in the child")), PANICKED);
        assert!(catch_unwind(|| in_child(|| panic!("in the child"))).is_err());
        in_child(|| {});
    }
}
