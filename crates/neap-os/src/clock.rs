//! Monotonic time in nanoseconds.
//!
//! Sits between the vDSO and whoever ticks. No lock, no system call where the vDSO works, signal-safe.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC_COARSE`: exact to one timer interrupt (1 to 10 ms), and a few nanoseconds to read.
pub fn coarse() -> u64 {
    nanoseconds(ClockId::MonotonicCoarse)
}

/// Nanoseconds of `CLOCK_MONOTONIC`.
pub fn precise() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    #[test]
    fn both_clocks_run_on_the_same_time() {
        let (before, coarse, after) = (super::precise(), super::coarse(), super::precise());
        assert!(coarse <= after && before <= after);
        assert!(after - coarse < 1_000_000_000, "the coarse clock is a second behind");
    }
}
