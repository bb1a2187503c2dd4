//! The state of samples of allocations. [`profile`](crate::profile) has the design.
//!
//! # Locking
//! One mutex protects the recorder.

mod intervals;
mod kept_stacks;
#[cfg(test)]
mod kept_tests;
pub(crate) mod recorder;
mod sample_table;

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
pub(crate) use intervals::Pace;
use neap_base::Mutex;
use recorder::Recorder;

/// The state of sampling.
#[derive(Debug)]
pub(crate) struct Profile {
    /// Bytes between two samples, on average; 0: nothing is sampled.
    pub(crate) mean: AtomicU64,
    /// Whether samples are recorded for readers, by the option `profile`. Else they are only
    /// [guarded](crate::guard).
    pub(crate) is_recorded: AtomicBool,
    /// Number of samples that are live.
    pub(crate) live: AtomicU32,
    /// Number of heap profiles that the program requested without naming a file.
    pub(crate) dumps: AtomicU32,
    pub(crate) recorder: Mutex<Recorder>,
}

impl Profile {
    pub(crate) const fn new() -> Profile {
        Profile {
            mean: AtomicU64::new(0),
            is_recorded: AtomicBool::new(false),
            live: AtomicU32::new(0),
            dumps: AtomicU32::new(0),
            recorder: Mutex::new(Recorder::new()),
        }
    }

    /// Begins to sample allocations for guarding, or continues to sample for that purpose alone.
    pub(crate) fn begin_guard(&self, mean: u64) {
        self.recorder.lock().begin_guard();
        self.mean.store(mean, Ordering::Relaxed);
    }

    /// Bytes between two recorded samples, on average; `None` if no samples are recorded.
    pub(crate) fn recorded_every(&self) -> Option<u64> {
        // Relaxed: heuristic. Guarded samples may begin or end between the two loads.
        let mean = self.mean.load(Ordering::Relaxed);
        (mean > 0 && self.is_recorded.load(Ordering::Relaxed)).then_some(mean)
    }

    /// Whether allocations are counted for samples. All accesses to `mean` are relaxed. A thread
    /// that reads an old value acts as it would have acted before the change.
    #[inline(always)]
    pub(crate) fn is_on(&self) -> bool {
        self.mean.load(Ordering::Relaxed) != 0
    }
}
