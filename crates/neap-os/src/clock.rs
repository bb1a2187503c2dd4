//! Monotonic time in nanoseconds.
//!
//! Sits between the kernel and whoever ticks. No lock, signal-safe. A system call and not the vDSO: rustix would look for
//! it where valgrind has nothing mapped, and nobody here asks often.

use crate::syscall::syscall5;
use linux_raw_sys::general::{__NR_clock_gettime, CLOCK_MONOTONIC, CLOCK_MONOTONIC_COARSE, CLOCK_THREAD_CPUTIME_ID};

/// Nanoseconds of `CLOCK_MONOTONIC_COARSE`: exact to one timer interrupt (1 to 10 ms).
pub fn coarse() -> u64 {
    nanoseconds(CLOCK_MONOTONIC_COARSE)
}

/// Nanoseconds of `CLOCK_MONOTONIC`.
pub fn precise() -> u64 {
    nanoseconds(CLOCK_MONOTONIC)
}

/// Nanoseconds for which this thread has had a CPU.
pub fn of_thread() -> u64 {
    nanoseconds(CLOCK_THREAD_CPUTIME_ID)
}

fn nanoseconds(clock: u32) -> u64 {
    let mut time = [0_u64; 2];
    // SAFETY: the kernel writes a `struct timespec`: two 64-bit numbers. A clock that exists never fails.
    let _ = unsafe {
        syscall5(__NR_clock_gettime as usize, clock as usize, time.as_mut_ptr().expose_provenance(), 0, 0, 0)
    };
    time[0] * 1_000_000_000 + time[1]
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_thread_that_sleeps_takes_no_time_of_a_cpu() {
        let before = super::of_thread();
        std::thread::sleep(core::time::Duration::from_millis(50));
        let slept = super::of_thread() - before;
        assert!(slept < 40_000_000, "{slept} ns");
        let start = super::precise();
        while super::of_thread() - before < slept + 1_000_000 {
            assert!(super::precise() - start < 60_000_000_000, "it stands still");
        }
    }

    #[test]
    fn both_clocks_run_on_the_same_time() {
        let (before, coarse, after) = (super::precise(), super::coarse(), super::precise());
        assert!(coarse <= after && before <= after);
        assert!(after - coarse < 1_000_000_000, "the coarse clock is a second behind");
    }
}
