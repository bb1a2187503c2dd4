//! State of a manager's shrinkers and of reclaim, and the times for which threads wait.

use crate::reclaim::callback_clock::CallbackClock;
use core::sync::atomic::{AtomicU64, Ordering};
use neap_base::gate::Inside;
use neap_reclaim::Shrinkers;
use neap_reclaim::reclaim::{BUDGET, Backoff, JobQueue, Passes, Reclaimers, Watchdog};

/// Nanoseconds that a thread waits for reclaimers. One callback may use up its budget, and then
/// another reclaimer goes on with the job.
pub(crate) const WAIT_MAX_NS: u64 = 2 * BUDGET;
/// Nanoseconds that a reclaimer's pass may take, and calls that another process requests.
pub(crate) const PASS_MAX_NS: u64 = 10 * BUDGET;
/// Priorities that a pass for a request skips for each pass before it that was in vain. Slow
/// callbacks may use up the time of a pass before it asks small caches for anything.
pub(crate) const PRIORITY_STEPS: u32 = 4;

/// Shrinkers and reclaim of a manager. Made when the first shrinker is registered.
#[derive(Debug)]
pub struct Reclaim {
    /// Registry of shrinkers.
    pub shrinkers: Shrinkers,
    /// State that passes share, and counts of passes.
    pub passes: Passes,
    pub(crate) watchdog: Watchdog,
    pub(crate) jobs: JobQueue,
    pub(crate) backoff: Backoff,
    /// Clock by which the watchdog times callbacks.
    pub(crate) clock: CallbackClock,
    /// Number of waits for reclaimers, and of those that reached their deadline.
    pub(crate) waits: AtomicU64,
    pub(crate) late: AtomicU64,
}

impl Reclaim {
    pub(crate) fn new(shrinkers: Shrinkers) -> Reclaim {
        Reclaim {
            shrinkers,
            passes: Passes::default(),
            watchdog: Watchdog::default(),
            jobs: JobQueue::default(),
            backoff: Backoff::default(),
            clock: CallbackClock::default(),
            waits: AtomicU64::new(0),
            late: AtomicU64::new(0),
        }
    }

    /// Returns the numbers of reclaimers, and of waits for them.
    pub(crate) fn reclaimers(&self, inside: &Inside<'_>) -> ReclaimerCounts {
        let Reclaimers { working, lost } = self.jobs.threads(inside);
        let [waits, late] = [&self.waits, &self.late].map(|count| count.load(Ordering::Relaxed));
        ReclaimerCounts { working, lost, waits, late }
    }

    /// Forgets all other threads and waiters, in a forked child.
    pub(crate) fn forget_others(&self, inside: &Inside<'_>) {
        self.watchdog.forget_others();
        self.jobs.forget_all(inside);
    }
}

/// Numbers of reclaimers, and of waits for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReclaimerCounts {
    pub(crate) working: u32,
    /// Reclaimers that were written off, and whose callbacks have not returned.
    pub(crate) lost: u32,
    pub(crate) waits: u64,
    /// Waits that reached their deadline.
    pub(crate) late: u64,
}

/// How callbacks run for a charging thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Manner {
    /// The thread waits for reclaimers.
    Wait,
    /// The thread runs those callbacks that allow it, and then waits for reclaimers.
    Inline,
    /// The thread only posts a job for reclaimers.
    Post,
    /// The thread posts a job, and leaves the making of a missing reclaimer to the next tick.
    Quiet,
}
