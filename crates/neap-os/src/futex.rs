//! Waits for a word to change, by the kernel's futex.
//!
//! The users are the mutex and the sleep of neap's thread. This module keeps no state. A wait may
//! end without a reason, so callers check the word again.

use crate::Errno;
use core::sync::atomic::AtomicU32;
use rustix::thread::ClockId;
use rustix::thread::futex::{self, Flags, Wait, WaitFlags, WaitPtr, WaitvFlags};
use rustix::time::Timespec;

/// Users of the word: threads of one process, or any process that maps its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Threads of this process.
    Process,
    /// Threads of every process that maps the word's page.
    Shared,
}

impl Sharing {
    fn flags(self) -> Flags {
        if self == Sharing::Process { Flags::PRIVATE } else { Flags::empty() }
    }
}

/// Sleeps while `word` holds `expected`, at most `nanoseconds` (`None`: without limit). Spurious
/// returns happen.
pub fn wait(word: &AtomicU32, expected: u32, nanoseconds: Option<u64>, scope: Sharing) {
    let timeout = nanoseconds.map(timespec);
    // EAGAIN (the word changed), EINTR and ETIMEDOUT all mean: check again.
    let _ = futex::wait(word, scope.flags(), expected, timeout.as_ref());
}

fn timespec(nanoseconds: u64) -> Timespec {
    Timespec { tv_sec: (nanoseconds / 1_000_000_000) as i64, tv_nsec: (nanoseconds % 1_000_000_000) as i64 }
}

/// Sleeps while both words hold their expected values, at most `nanoseconds`. Other processes may
/// wake `shared`; `own` is a word of this process. Returns `false` at once if the kernel lacks the
/// call (before 5.16) or a sandbox refuses it. Spurious returns happen.
pub fn wait_either(own: (&AtomicU32, u32), shared: (&AtomicU32, u32), nanoseconds: Option<u64>) -> bool {
    let wait = |(word, expected): (&AtomicU32, u32), flags| {
        let mut wait = Wait::new();
        wait.val = expected.into();
        wait.uaddr = WaitPtr::new(word.as_ptr().cast());
        wait.flags = WaitFlags::SIZE_U32 | flags;
        wait
    };
    let words = [wait(own, WaitFlags::PRIVATE), wait(shared, WaitFlags::empty())];
    // An absolute time; `wait` takes a relative one.
    let until = nanoseconds.map(|n| timespec(crate::clock::precise().saturating_add(n)));
    let answer = futex::waitv(&words, WaitvFlags::empty(), until.as_ref(), ClockId::Monotonic);
    matches!(answer, Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT))
}

/// Wakes up to `count` sleepers on `word`.
pub fn wake(word: &AtomicU32, count: u32, scope: Sharing) {
    let _ = futex::wake(word, scope.flags(), count);
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::Ordering::Relaxed;

    #[test]
    fn either_word_ends_the_wait() {
        let words = [AtomicU32::new(0), AtomicU32::new(0)];
        for (changed, scope) in [(0, Sharing::Process), (1, Sharing::Shared)] {
            words.iter().for_each(|word| word.store(0, Relaxed));
            std::thread::scope(|threads| {
                let waiter = threads.spawn(|| {
                    while words.iter().all(|word| word.load(Relaxed) == 0) {
                        if !wait_either((&words[0], 0), (&words[1], 0), None) {
                            return false;
                        }
                    }
                    true
                });
                std::thread::sleep(core::time::Duration::from_millis(20));
                words[changed].store(1, Relaxed);
                while !waiter.is_finished() {
                    wake(&words[changed], 1, scope);
                    std::thread::yield_now();
                }
                assert!(waiter.join().unwrap(), "Linux 5.16 has the call");
            });
        }
        assert!(wait_either((&words[0], 7), (&words[1], 7), None), "a thread that finds another value does not sleep");
        words.iter().for_each(|word| word.store(0, Relaxed));
        assert!(wait_either((&words[0], 0), (&words[1], 0), Some(1_000_000)), "the time is over");
    }
}
