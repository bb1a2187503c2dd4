//! Costs of a run, and the figures of tables.

use serde::Serialize;

use crate::cost;
use crate::histogram::Histogram;
use crate::machine::Operation;
use crate::offline::Gaps;

/// The state of all lists at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Nanoseconds since the start.
    pub at: u64,
    /// Pages in lists.
    pub listed: u64,
    /// Pages that lists may keep.
    pub highs: u64,
    /// Pages in hands and lists.
    pub used: u64,
    /// Nanoseconds that programs have waited for a zone's lock so far.
    pub waited: u64,
}

/// Counts of rare events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Most pages that moved under one hold.
    pub most_moved: u32,
    /// Operations that found their CPU's list held.
    pub list_busy: u64,
    /// Allocations that were tried again after lists had been drained.
    pub retries: u64,
    /// Allocations that failed.
    pub failures: u64,
    /// Failed allocations while pages lay in lists.
    pub failures_with_pages_listed: u64,
    /// Blocks that came from another node than the nearest.
    pub misses: u64,
    /// Requests to another node while pages of the nearer one lay in lists.
    pub misses_with_pages_listed: u64,
    /// Times that background reclaim began.
    pub reclaims: u64,
    /// Early starts, while free and listed pages together were above the high watermark.
    pub early_reclaims: u64,
    /// Nanoseconds from the start until the last program ended. 0 if no program ended.
    pub ended: u64,
}

/// Counts of one run.
#[derive(Clone, Debug, Default)]
pub struct Costs {
    /// CPUs that ran programs.
    pub cpus: usize,
    /// Pages allocated.
    pub taken: u64,
    /// Pages freed.
    pub given: u64,
    /// Pages that refills, and allocations that bypassed lists, took from a zone.
    pub brought: u64,
    /// Holds of a zone's lock by programs.
    pub holds: u64,
    /// Holds of a zone's lock by ticks.
    pub tick_holds: u64,
    /// Holds of programs that waited.
    pub waits: u64,
    /// Nanoseconds of all waits of programs for a zone's lock.
    pub waited: u64,
    /// Nanoseconds that programs held a zone's lock.
    pub held: u64,
    /// Nanoseconds that CPUs were busy, waiting included.
    pub busy_time: u64,
    /// Times of allocations.
    pub takes: Histogram,
    /// Times of frees.
    pub gives: Histogram,
    /// Nanoseconds of the frees of blocks of more than a page.
    pub block_time: u64,
    /// Rare events.
    pub counts: Counts,
    /// Gaps between a page's uses, if they are measured.
    pub gaps: Gaps,
    /// Samples of the lists over time.
    pub samples: Vec<Sample>,
}

impl Costs {
    /// No costs yet, from `now` on.
    pub fn new(cpus: usize, now: u64) -> Costs {
        Costs { cpus, gaps: Gaps::new(now), ..Costs::default() }
    }

    /// Notes that an operation has ended.
    pub(crate) fn done(&mut self, operation: &Operation, at: u64) {
        let time = at - operation.since;
        if operation.into.is_some() {
            self.takes.add(time, 1);
        } else {
            self.gives.add(time, 1);
            self.block_time += if operation.order.0 > 0 { time } else { 0 };
        }
    }

    /// The average of a value over the samples.
    pub fn average(&self, of: impl Fn(&Sample) -> u64) -> f64 {
        self.samples.iter().map(|sample| of(sample) as f64).sum::<f64>() / self.samples.len().max(1) as f64
    }

    /// Share of busy time that was waited for a zone's lock.
    pub fn lock_share(&self) -> f64 {
        self.waited as f64 / self.busy_time.max(1) as f64
    }

    /// Share of busy time in allocations, and in frees of single pages, waiting included.
    pub fn path_share(&self) -> f64 {
        (self.takes.sum() + self.gives.sum() - self.block_time) as f64 / self.busy_time.max(1) as f64
    }

    /// The figures of a run of `time` nanoseconds.
    pub fn outcome(&self, time: u64) -> Outcome {
        let operations = self.takes.total() + self.gives.total();
        Outcome {
            lock_takes: self.holds + self.tick_holds,
            lock_takes_per_million: (self.holds + self.tick_holds) as f64 * 1e6 / operations.max(1) as f64,
            lock_share: self.lock_share(),
            path_share: self.path_share(),
            zone_pages: self.brought,
            zone_share: self.brought as f64 / self.taken.max(1) as f64,
            gigabytes_per_second: self.taken as f64 * cost::PAGE / time as f64,
            average_listed: self.average(|sample| sample.listed),
            average_used: self.average(|sample| sample.used),
            alloc_p50: self.takes.percentile(0.5),
            alloc_p99: self.takes.percentile(0.99),
            alloc_max: self.takes.max(),
            free_p50: self.gives.percentile(0.5),
            free_p99: self.gives.percentile(0.99),
            free_max: self.gives.max(),
            counts: self.counts,
        }
    }
}

/// The figures of one run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Holds of a zone's lock, ticks included.
    pub lock_takes: u64,
    /// Holds of a zone's lock for a million allocations and frees.
    pub lock_takes_per_million: f64,
    /// Share of busy time that was waited for a zone's lock.
    pub lock_share: f64,
    /// Share of busy time in allocations, and in frees of single pages, waiting included.
    pub path_share: f64,
    /// Pages that came from a zone.
    pub zone_pages: u64,
    /// Pages that came from a zone, as a share of all pages allocated.
    pub zone_share: f64,
    /// Allocated memory a second, in 10^9 bytes.
    pub gigabytes_per_second: f64,
    /// Pages in lists, on average over time.
    pub average_listed: f64,
    /// Pages in hands and lists, on average over time.
    pub average_used: f64,
    /// Nanoseconds of an allocation: median.
    pub alloc_p50: u64,
    /// Nanoseconds that 99 % of the allocations do not exceed.
    pub alloc_p99: u64,
    /// Nanoseconds of the longest allocation.
    pub alloc_max: u64,
    /// Nanoseconds of a free: median.
    pub free_p50: u64,
    /// Nanoseconds that 99 % of the frees do not exceed.
    pub free_p99: u64,
    /// Nanoseconds of the longest free.
    pub free_max: u64,
    /// Rare events.
    #[serde(flatten)]
    pub counts: Counts,
}
