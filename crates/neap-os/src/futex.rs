//! Waiting for a word to change.
//!
//! Sits between the kernel's futex and the mutex and the maintenance thread's sleep. Holds nothing; a wait may end for
//! no reason, so callers look at the word again.

use core::sync::atomic::AtomicU32;
use rustix::thread::futex::{self, Flags};
use rustix::time::Timespec;

/// Who may share the word: threads of one process, or any process that maps the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Threads of this process.
    Process,
    /// Every process that maps the page the word lies in.
    Shared,
}

impl Scope {
    fn flags(self) -> Flags {
        if self == Scope::Process { Flags::PRIVATE } else { Flags::empty() }
    }
}

/// Sleeps while `word` holds `expected`, at most `nanoseconds` (`None`: without limit). Spurious returns happen.
pub fn wait(word: &AtomicU32, expected: u32, nanoseconds: Option<u64>, scope: Scope) {
    let timeout =
        nanoseconds.map(|n| Timespec { tv_sec: (n / 1_000_000_000) as i64, tv_nsec: (n % 1_000_000_000) as i64 });
    // EAGAIN (the word changed), EINTR and ETIMEDOUT all mean: look again.
    let _ = futex::wait(word, scope.flags(), expected, timeout.as_ref());
}

/// Wakes up to `count` sleepers on `word`.
pub fn wake(word: &AtomicU32, count: u32, scope: Scope) {
    let _ = futex::wake(word, scope.flags(), count);
}
