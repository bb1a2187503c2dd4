//! Monotonic time in nanoseconds.
//!
//! The time comes from the kernel's function in the vDSO (`vdso.rs`), since a sandbox may end a
//! process that reads the time by a system call. Where the vDSO has no such function, this module
//! makes the system call. It has no lock, and is signal-safe.

use crate::syscall::syscall5;
use crate::vdso::{self, ClockGettime};
use linux_raw_sys::general::{__NR_clock_gettime, CLOCK_MONOTONIC, CLOCK_MONOTONIC_COARSE, CLOCK_THREAD_CPUTIME_ID};

/// Reads the time for frequent callers, by the kernel's function, which it looks up once, or by the
/// system call.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Option<ClockGettime>);

impl Clock {
    /// A clock that makes the system call.
    pub const CALL: Clock = Clock(None);

    /// Finds the kernel's function.
    pub fn find() -> Clock {
        Clock(vdso::find())
    }

    /// Nanoseconds of `CLOCK_MONOTONIC_COARSE`: exact to one timer interrupt (1 to 10 ms).
    pub fn coarse(self) -> u64 {
        self.nanoseconds(CLOCK_MONOTONIC_COARSE)
    }

    /// Nanoseconds of `CLOCK_MONOTONIC`.
    pub fn precise(self) -> u64 {
        self.nanoseconds(CLOCK_MONOTONIC)
    }

    fn nanoseconds(self, clock: u32) -> u64 {
        let mut time = [0_u64; 2];
        let answer = match self.0 {
            // SAFETY: the function writes a `struct timespec`: two 64-bit numbers.
            Some(get) => unsafe { get(clock as i32, &raw mut time) },
            None => 1,
        };
        if answer != 0 {
            // SAFETY: the kernel writes a `struct timespec`, two 64-bit numbers, to `time`.
            let _ = unsafe {
                let time = time.as_mut_ptr().expose_provenance();
                syscall5(__NR_clock_gettime as usize, clock as usize, time, 0, 0, 0)
            };
        }
        time[0] * 1_000_000_000 + time[1]
    }
}

/// Nanoseconds of `CLOCK_MONOTONIC_COARSE`, exact to one timer interrupt (1 to 10 ms). Each call
/// looks the kernel's function up.
pub fn coarse() -> u64 {
    Clock::find().coarse()
}

/// Nanoseconds of `CLOCK_MONOTONIC`. Each call looks the kernel's function up.
pub fn precise() -> u64 {
    Clock::find().precise()
}

/// Nanoseconds of CPU time that this thread has used. Makes a system call, since the vDSO does not
/// provide this clock.
pub fn of_thread() -> u64 {
    Clock::CALL.nanoseconds(CLOCK_THREAD_CPUTIME_ID)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_sleeps_takes_no_time_of_a_cpu() {
        let before = of_thread();
        std::thread::sleep(core::time::Duration::from_millis(50));
        let slept = of_thread() - before;
        assert!(slept < 40_000_000, "{slept} ns");
        let start = precise();
        while of_thread() - before < slept + 1_000_000 {
            assert!(precise() - start < 60_000_000_000, "it stands still");
        }
    }

    #[test]
    fn all_clocks_run_on_the_same_time() {
        let (before, coarse, after) = (precise(), coarse(), precise());
        assert!(coarse <= after && before <= after);
        assert!(after - coarse < 1_000_000_000, "the coarse clock is a second behind");
        let (before, call, after) = (precise(), Clock::CALL.precise(), precise());
        assert!(before <= call && call <= after);
    }
}
