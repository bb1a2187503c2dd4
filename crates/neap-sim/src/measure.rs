//! What a run cost, and the numbers that tables and figures are made of.
//!
//! Sits between the machine, which counts, and the comparison, which reads.

use serde::Serialize;

use crate::cost;
use crate::histogram::Histogram;

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
    /// Nanoseconds that programs have waited for the zone's lock so far.
    pub waited: u64,
}

/// Counts of one run.
#[derive(Clone, Debug)]
pub struct Costs {
    /// CPUs that ran programs.
    pub cpus: usize,
    /// Pages allocated and freed.
    pub taken: u64,
    /// See `taken`.
    pub given: u64,
    /// Pages that refills, and allocations around lists, had from the zone.
    pub brought: u64,
    /// Holds of the zone's lock by programs, and by ticks.
    pub holds: u64,
    /// See `holds`.
    pub tick_holds: u64,
    /// Of the programs' holds, those that waited, and for how many nanoseconds in all.
    pub waits: u64,
    /// See `waits`.
    pub waited: u64,
    /// Nanoseconds that programs held it.
    pub held: u64,
    /// Nanoseconds that CPUs did something, waiting included.
    pub busy_time: u64,
    /// Most pages that moved under one hold.
    pub most_moved: u32,
    /// Operations that found their CPU's list held.
    pub list_busy: u64,
    /// Allocations that were tried again after everything had been drained, and those that failed all the same.
    pub retries: u64,
    /// See `retries`.
    pub failures: u64,
    /// Failures while pages lay in lists.
    pub failures_with_pages_listed: u64,
    /// Times that background reclaim began, and of these while free and listed pages together were above the high
    /// watermark.
    pub reclaims: u64,
    /// See `reclaims`.
    pub early_reclaims: u64,
    /// When the last program ended.
    pub ended: u64,
    /// How long allocations took.
    pub takes: Histogram,
    /// How long frees took.
    pub gives: Histogram,
    /// What lists held over time.
    pub samples: Vec<Sample>,
}

impl Costs {
    /// Nothing yet.
    pub fn new(cpus: usize) -> Costs {
        Costs {
            cpus,
            taken: 0,
            given: 0,
            brought: 0,
            holds: 0,
            tick_holds: 0,
            waits: 0,
            waited: 0,
            held: 0,
            busy_time: 0,
            most_moved: 0,
            list_busy: 0,
            retries: 0,
            failures: 0,
            failures_with_pages_listed: 0,
            reclaims: 0,
            early_reclaims: 0,
            ended: 0,
            takes: Histogram::default(),
            gives: Histogram::default(),
            samples: Vec::new(),
        }
    }

    /// The average of something over the samples.
    pub fn average(&self, of: impl Fn(&Sample) -> u64) -> f64 {
        self.samples.iter().map(|sample| of(sample) as f64).sum::<f64>() / self.samples.len().max(1) as f64
    }

    /// The numbers of a run of `time` nanoseconds.
    pub fn outcome(&self, time: u64) -> Outcome {
        let busy = self.busy_time.max(1) as f64;
        let operations = self.takes.total() + self.gives.total();
        let list = operations as f64 * cost::LIST as f64;
        Outcome {
            lock_takes: self.holds + self.tick_holds,
            lock_takes_per_million: (self.holds + self.tick_holds) as f64 * 1e6 / operations.max(1) as f64,
            lock_share: self.waited as f64 / busy,
            path_share: (self.waited as f64 + self.held as f64 + list) / busy,
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
            most_moved: self.most_moved,
            list_busy: self.list_busy,
            retries: self.retries,
            failures: self.failures,
            failures_with_pages_listed: self.failures_with_pages_listed,
            reclaims: self.reclaims,
            early_reclaims: self.early_reclaims,
            ended: self.ended,
        }
    }
}

/// The numbers of one run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Holds of the zone's lock, ticks included.
    pub lock_takes: u64,
    /// The same for a million allocations and frees.
    pub lock_takes_per_million: f64,
    /// Share of busy time that was waited for the zone's lock.
    pub lock_share: f64,
    /// Share of busy time in lists and zone, waiting included.
    pub path_share: f64,
    /// Pages that came from the zone.
    pub zone_pages: u64,
    /// The same as a share of all pages allocated.
    pub zone_share: f64,
    /// Allocated, in 10^9 bytes.
    pub gigabytes_per_second: f64,
    /// Pages in lists, on average over time.
    pub average_listed: f64,
    /// Pages in hands and lists, on average over time.
    pub average_used: f64,
    /// Nanoseconds of an allocation: median.
    pub alloc_p50: u64,
    /// 99 % take no longer.
    pub alloc_p99: u64,
    /// The longest.
    pub alloc_max: u64,
    /// Nanoseconds of a free.
    pub free_p50: u64,
    /// 99 % take no longer.
    pub free_p99: u64,
    /// The longest.
    pub free_max: u64,
    /// Most pages moved under one hold.
    pub most_moved: u32,
    /// Operations that found their list held.
    pub list_busy: u64,
    /// Allocations tried again after everything was drained.
    pub retries: u64,
    /// Allocations that failed.
    pub failures: u64,
    /// Of these, while pages lay in lists.
    pub failures_with_pages_listed: u64,
    /// Background reclaim began.
    pub reclaims: u64,
    /// Of these, while free and listed pages were above the high watermark together.
    pub early_reclaims: u64,
    /// Nanoseconds from the start until the last program ended; 0 if none did.
    pub ended: u64,
}
