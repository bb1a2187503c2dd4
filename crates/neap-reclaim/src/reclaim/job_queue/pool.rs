//! Pool of reclaimer threads, without a lock: their number, and whether another one is to be
//! created.
//!
//! # Design
//!
//! Reclaimers have numbers from 1 on, which are never used again. A reclaimer that was written off
//! does not count as working. It is lost until its callback returns.
//!
//! | event | working | lost |
//! |---|---|---|
//! | reserved, before the thread is created | +1 | |
//! | creation failed | -1 | |
//! | written off | -1 | +1 |
//! | returns after it was written off | | -1 |
//! | returns before the watcher writes it off | -1 | |
//! | fork, in the child | 0 | 0 |
//! | all are dismissed | 0 | 0 |
//!
//! Numbers up to that of the newest reclaimer at a fork are numbers of the parent's reclaimers. A
//! reclaimer with such a number ends, and is not counted.
//!
//! # Locking
//!
//! This module has no lock: the caller holds the job queue's mutex.

/// Maximum number of written-off reclaimers that have not returned. No more threads are created at
/// that number.
pub(in crate::reclaim) const LOST_MAX: u32 = 32;
/// Delay after a failed creation of a thread before the next attempt, in nanoseconds.
pub(super) const SPAWN_RETRY_NS: u64 = 1_000_000_000;

/// Number of reclaimers.
#[derive(Debug)]
pub(super) struct Pool {
    /// Number of reclaimers that work, and of those that were written off and have not returned.
    working: u32,
    lost: u32,
    /// Number of the newest reclaimer, and of the newest one at the fork that made this process.
    last: u32,
    parents: u32,
    /// Time before which no reclaimer is created, after a failed creation.
    until: u64,
}

/// Numbers of reclaimers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reclaimers {
    /// Those that work.
    pub working: u32,
    /// Those that were written off and have not returned.
    pub lost: u32,
}

impl Pool {
    pub(super) const fn new() -> Pool {
        Pool { working: 0, lost: 0, last: 0, parents: 0, until: 0 }
    }

    /// Returns whether a reclaimer is not counted: it is one of the parent process, or all were
    /// dismissed.
    pub(super) fn is_gone(&self, reclaimer: u32) -> bool {
        reclaimer <= self.parents
    }

    /// Returns whether fewer reclaimers than `least` work, or fewer are idle than jobs are posted.
    pub(super) fn is_short(&self, least: u32, posted: u32, taken: u32) -> bool {
        self.working < least || posted > self.working.saturating_sub(taken)
    }

    /// Counts another reclaimer, and returns its number. `None` if `most` work, too many are lost,
    /// or a creation failed lately.
    pub(super) fn reserve_worker(&mut self, most: u32, now: u64) -> Option<u32> {
        if self.working >= most || self.lost >= LOST_MAX || now < self.until {
            return None;
        }
        self.working += 1;
        self.last += 1;
        debug_assert!(self.has_sound_counts());
        Some(self.last)
    }

    /// Records that the creation of a counted reclaimer failed, and starts the delay.
    pub(super) fn spawn_failed(&mut self, now: u64) {
        self.working -= 1;
        self.until = now.saturating_add(SPAWN_RETRY_NS);
    }

    /// Counts a working reclaimer as lost.
    pub(super) fn write_off(&mut self) {
        self.working -= 1;
        self.lost += 1;
        debug_assert!(self.has_sound_counts());
    }

    /// Whether there are at most as many reclaimers as this process has given numbers to.
    fn has_sound_counts(&self) -> bool {
        self.working + self.lost <= self.last - self.parents
    }

    /// Subtracts a reclaimer that returned from a callback before the watcher wrote it off.
    pub(super) fn end_working(&mut self) {
        self.working -= 1;
    }

    /// Subtracts a reclaimer that was written off and has returned.
    pub(super) fn end_lost(&mut self) {
        self.lost -= 1;
    }

    /// Returns the numbers of reclaimers.
    pub(super) fn threads(&self) -> Reclaimers {
        Reclaimers { working: self.working, lost: self.lost }
    }

    /// Resets the pool in a forked child, which has none of the reclaimers.
    pub(super) fn forget_all(&mut self) {
        (self.working, self.lost, self.parents, self.until) = (0, 0, self.last, 0);
    }

    /// Lets every reclaimer end. No further one is created.
    pub(super) fn dismiss(&mut self) {
        (self.working, self.lost, self.parents, self.until) = (0, 0, u32::MAX, u64::MAX);
    }
}
