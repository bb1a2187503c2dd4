//! A clock that times the callbacks of shrinkers. It stands still while the [fork
//! gate](neap_base::gate) is closed.
//!
//! # Design
//! A callback that allocates waits at the gate while the process forks. The thread that watches the
//! callback waits there, too. That time must not count against the callback's budget.
//!
//! The clock is one word. While the clock runs, the word is the total time for which the clock
//! stood still. While the clock stands still, the word is the time at which it stopped, with a bit
//! set. A reader loads the word twice and takes no lock. Only the thread that closes the gate
//! changes the word.

use core::sync::atomic::{AtomicU64, Ordering};
use neap_os::clock;

/// Bit of the word that is set while the clock stands still.
const STANDS: u64 = 1 << 63;

/// A clock that can be stopped.
#[derive(Debug, Default)]
pub(crate) struct CallbackClock(AtomicU64);

impl CallbackClock {
    /// Returns the time of this clock in nanoseconds.
    pub(crate) fn now(&self) -> u64 {
        self.read(clock::precise)
    }

    /// Implements [`CallbackClock::now`]. `now` reads the system's clock, which does not stop.
    fn read(&self, now: impl Fn() -> u64) -> u64 {
        loop {
            let word = self.0.load(Ordering::Acquire); // Pairs with the Release in `stop` and `go`.
            if word & STANDS != 0 {
                return word & !STANDS;
            }
            let time = now().saturating_sub(word);
            // The second load detects a stop in between:
            // 1. The clock runs. 2. It is stopped, and goes on. 3. `now` is read: the time of step
            //    2 would count.
            if self.0.load(Ordering::Relaxed) == word {
                return time;
            }
        }
    }

    /// Stops the clock if it runs. The caller must have closed the gate.
    pub(crate) fn stop(&self, now: u64) {
        let word = self.0.load(Ordering::Relaxed);
        if word & STANDS == 0 {
            self.0.store(now.saturating_sub(word) | STANDS, Ordering::Release); // Pairs with the Acquire in `read`.
        }
    }

    /// Restarts the clock if it stands still. The caller must be about to open the gate.
    pub(crate) fn go(&self, now: u64) {
        let word = self.0.load(Ordering::Relaxed);
        if word & STANDS != 0 {
            self.0.store(now.saturating_sub(word & !STANDS), Ordering::Release); // Pairs with the Acquire in `read`.
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::Cell;

    #[test]
    fn time_in_which_it_stands_does_not_go_by() {
        let clock = CallbackClock::default();
        assert_eq!(clock.read(|| 100), 100);
        clock.stop(150);
        clock.stop(170);
        assert_eq!(clock.read(|| 180), 150);
        clock.go(250);
        clock.go(260);
        assert_eq!(clock.read(|| 300), 200);
        clock.stop(310);
        clock.go(1310);
        assert_eq!(clock.read(|| 1320), 220);
    }

    /// 1. A reader looks. 2. The gate is closed and opened. 3. The reader looks at the other clock.
    #[test]
    fn callback_clock_read_across_stop_and_go_retries() {
        let (clock, reads) = (CallbackClock::default(), Cell::new(0));
        let now = || {
            reads.set(reads.get() + 1);
            if reads.get() == 1 {
                clock.stop(100);
                clock.go(1100);
            }
            1110
        };
        assert_eq!((clock.read(now), reads.get()), (110, 2));
    }
}
