//! Virtual time for real threads. The clock advances only when every thread sleeps or waits. It
//! advances to the end of the earliest sleep.
//!
//! # Design
//! The measured code runs unchanged. Computing takes no virtual time, however busy the machine is.
//! Sleeps take their given time. A thread that waits for another one waits for as long as that
//! takes.
//!
//! The clock reads the state of each thread from the kernel twice. A thread waits if it slept both
//! times and did not run in between. If all threads sleep or wait in this way, only time can wake
//! one. So measured code may wait on futexes, but must not sleep for a time by itself.
//!
//! # Locking
//! One mutex for the state.

use core::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

/// Time between two checks of threads that wait.
const LOOK: Duration = Duration::from_micros(20);
/// Real time after which threads that neither sleep nor wait, such as napping ones, are an error.
const PATIENCE: Duration = Duration::from_secs(60);

/// State of a thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Doing {
    /// The thread runs.
    Runs,
    /// The thread sleeps until a moment.
    Sleeps {
        until: u64,
    },
    /// The thread may wait for another one.
    Waits,
    Ended,
}

/// A thread that takes part.
struct Participant {
    /// The kernel's id of the thread.
    id: u32,
    thread: Thread,
    doing: Doing,
}

#[derive(Default)]
struct ClockState {
    now: u64,
    threads: Vec<Participant>,
    /// Number of threads that have not begun yet.
    awaited: usize,
    /// Number of changes of the state.
    changes: u64,
}

impl ClockState {
    fn runs(&self) -> bool {
        self.awaited > 0 || self.threads.iter().any(|thread| thread.doing == Doing::Runs)
    }
}

/// The virtual time of the threads that take part.
#[derive(Default)]
pub(super) struct Clock {
    state: Mutex<ClockState>,
    /// Wakes the thread that advances time. That thread unparks the other threads one by one. A
    /// thread that it woke needlessly would take the lock while it counts as asleep.
    changed: Condvar,
}

thread_local! {
    /// The thread's place among those that take part.
    static PLACE: Cell<Option<usize>> = const { Cell::new(None) };
}

impl Clock {
    fn state(&self) -> MutexGuard<'_, ClockState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Virtual nanoseconds since the clock was made.
    pub(super) fn now(&self) -> u64 {
        self.state().now
    }

    fn set(&self, place: usize, doing: impl FnOnce(u64) -> Doing) {
        let mut state = self.state();
        state.changes += 1;
        state.threads[place].doing = doing(state.now);
        self.changed.notify_one();
    }

    /// Stops time until `threads` more threads have begun to [`Clock::take_part`].
    pub(super) fn await_threads(&self, threads: usize) {
        self.state().awaited += threads;
    }

    /// Runs a thread's work in virtual time.
    pub(super) fn take_part<R>(&self, work: impl FnOnce() -> R) -> R {
        let mut state = self.state();
        let place = state.threads.len();
        state.threads.push(Participant { id: neap_os::thread::id(), thread: thread::current(), doing: Doing::Runs });
        state.awaited -= 1;
        drop(state);
        PLACE.set(Some(place));
        let answer = work();
        PLACE.set(None);
        self.set(place, |_| Doing::Ended);
        answer
    }

    /// Sleeps, in a thread that takes part.
    pub(super) fn sleep(&self, nanoseconds: u64) {
        let Some(place) = PLACE.get() else { return };
        self.set(place, |now| Doing::Sleeps { until: now + nanoseconds });
        loop {
            thread::park();
            if self.state().threads[place].doing == Doing::Runs {
                return;
            }
        }
    }

    /// Runs code that may wait for another thread that takes part.
    pub(super) fn waiting<R>(&self, body: impl FnOnce() -> R) -> R {
        let place = PLACE.get();
        place.inspect(|&place| self.set(place, |_| Doing::Waits));
        let answer = body();
        place.inspect(|&place| self.set(place, |_| Doing::Runs));
        answer
    }

    /// Advances time, in a thread that does not take part, until all threads have ended.
    pub(super) fn run(&self) -> Result<()> {
        let mut passed = Instant::now();
        loop {
            let mut state = self.state();
            while state.runs() {
                passed = Instant::now();
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let changes = state.changes;
            let waiting = state.threads.iter().filter(|thread| thread.doing == Doing::Waits);
            let waiting: Vec<u32> = waiting.map(|thread| thread.id).collect();
            drop(state);
            // 1. A is seen asleep. 2. B, which ran, wakes A, and sleeps. 3. B is seen asleep. The
            //    second look finds that A has run.
            let first = asleep(&waiting)?;
            let all_wait = first.is_some() && first == asleep(&waiting)?;
            let mut state = self.state();
            if !all_wait || state.changes != changes {
                drop(state);
                ensure!(passed.elapsed() < PATIENCE, "threads neither go on nor wait");
                thread::sleep(LOOK);
                continue;
            }
            let until = |thread: &Participant| match thread.doing {
                Doing::Sleeps { until } => Some(until),
                _ => None,
            };
            match state.threads.iter().filter_map(until).min() {
                Some(next) => state.now = next,
                None if waiting.is_empty() => return Ok(()),
                None => bail!("{} threads wait for each other, for ever", waiting.len()),
            }
            passed = Instant::now();
            let now = state.now;
            for thread in state.threads.iter_mut().filter(|thread| until(thread).is_some_and(|until| until <= now)) {
                thread.doing = Doing::Runs;
                thread.thread.unpark();
            }
        }
    }
}

/// Returns how often each of these threads has gone to sleep so far, if all are asleep.
fn asleep(threads: &[u32]) -> Result<Option<Vec<u64>>> {
    let of = |thread: &u32| -> Result<Option<u64>> {
        let file = format!("/proc/self/task/{thread}/status");
        // A thread that has ended meanwhile does not wait.
        let Ok(status) = std::fs::read_to_string(&file) else { return Ok(None) };
        let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let state = field("State:").with_context(|| format!("{file} says no state"))?;
        let switches = field("voluntary_ctxt_switches:").and_then(|count| count.parse().ok());
        let switches = switches.with_context(|| format!("{file} counts no switches"))?;
        Ok(state.starts_with('S').then_some(switches))
    };
    threads.iter().map(of).collect()
}
