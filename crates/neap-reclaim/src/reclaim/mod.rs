//! Reclaim: which groups and shrinkers a pass asks for memory, in which order, and for how much.
//!
//! # Design
//!
//! Passes reach groups and shrinkers through the trait [`Domain`] alone. No threads are created
//! here. A pass runs in its caller's thread to its end or its deadline; threads wait only at the
//! [job queue](job_queue).
//!
//! # Locking
//!
//! A pass holds no lock while it calls a method of the domain.

mod backoff;
pub mod callback_state;
mod group_iter;
pub mod job_queue;
mod pass;
mod pressure;
mod scan_target;
mod watchdog;

#[cfg(test)]
mod pass_tests;

/// Enters a gate that the tests of this crate share.
#[cfg(all(test, not(loom)))]
fn inside() -> neap_base::gate::Inside<'static> {
    static GATE: neap_base::gate::Gate = neap_base::gate::Gate::new();
    GATE.enter(0)
}

pub use backoff::Backoff;
pub use group_iter::{Generation, Walk, Walks};
pub use job_queue::{JobCount, JobQueue, Next, ReclaimJob, Reclaimers, Waiter};
pub use pass::{Ask, Domain, GOAL, Given, PassResult, Passes, UsedBytes, goal};
pub use pressure::{Level, Levels};
pub use scan_target::{LowProtection, ProtectedBy, scan_pressure};
pub use watchdog::{BUDGET, Culprit, EndedCallback, Excess, Misbehaviour, Overdue, RunningCallback, SLACK, Watchdog};
