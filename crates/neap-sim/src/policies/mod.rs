//! The policies by name: their types, and their names in the command line and in tables.
//!
//! The library's own policies are in neap-pages. Those that exist for comparison are here.

pub mod alloc_depth;
#[cfg(test)]
mod bounds_tests;
pub mod double_halve;
pub mod idle_guard;
pub mod linux_6_6;
pub mod pid;
#[cfg(test)]
mod test_inputs;
pub mod upstream;

pub use alloc_depth::Depth;
pub use double_halve::DoubleHalve;
pub use idle_guard::IdleGuard;
pub use linux_6_6::Unchanged;
pub use pid::Pid;
pub use upstream::Upstream;

use neap_pages::policy::fixed::Still;
use neap_pages::policy::{Adaptive, Policy};

use crate::machine::{Machine, Setup};
use crate::measure::{Costs, Outcome};

/// A policy, which sizes lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Name {
    /// Linux's formula without tuning.
    Fixed,
    /// Linux's auto-tuning as first posted.
    Depth,
    /// Linux's auto-tuning as merged.
    Upstream,
    /// The policy of the library.
    Adaptive,
    /// Variant proposed in review: the batch doubles and halves.
    DoubleHalve,
    /// Variant proposed in review: `Upstream` with a guard against decay.
    IdleGuard,
    /// Variant proposed in review: a controller with three terms.
    Pid,
    /// The kernel before auto-tuning. Costs are calibrated on its published numbers. The tables do
    /// not compare it.
    Unchanged,
}

/// The compared policies.
pub const ALL: [Name; 7] =
    [Name::Fixed, Name::Depth, Name::Upstream, Name::Adaptive, Name::DoubleHalve, Name::IdleGuard, Name::Pid];

impl Name {
    /// Returns the policy of a name.
    pub fn named(text: &str) -> Option<Name> {
        ALL.into_iter().find(|name| name.text() == text)
    }

    /// The name in lower case.
    pub fn text(self) -> &'static str {
        match self {
            Name::Fixed => "fixed",
            Name::Depth => "depth",
            Name::Upstream => "upstream",
            Name::Adaptive => "adaptive",
            Name::DoubleHalve => "double-halve",
            Name::IdleGuard => "idle-guard",
            Name::Pid => "pid",
            Name::Unchanged => "unchanged",
        }
    }
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// The figures.
    pub outcome: Outcome,
    /// Nanoseconds of the warm-up.
    pub warm_time: u64,
    /// Nanoseconds of the measured time.
    pub time: u64,
    /// Counts of the warm-up.
    pub warm: Costs,
    /// Counts of the measured time.
    pub costs: Costs,
}

/// Runs a machine under a policy: its warm-up, then the measured time.
///
/// # Panics
/// Panics if a page is lost at the end.
pub fn run(policy: Name, setup: Setup) -> Run {
    match policy {
        Name::Fixed => run_as::<Still>(setup),
        Name::Depth => run_as::<Depth>(setup),
        Name::Upstream => run_as::<Upstream>(setup),
        Name::Adaptive => run_as::<Adaptive>(setup),
        Name::DoubleHalve => run_as::<DoubleHalve>(setup),
        Name::IdleGuard => run_as::<IdleGuard>(setup),
        Name::Pid => run_as::<Pid>(setup),
        Name::Unchanged => run_as::<Unchanged>(setup),
    }
}

fn run_as<T: Policy>(setup: Setup) -> Run {
    let (warm_time, time) = (setup.warm, setup.time);
    let mut machine = Machine::<T>::new(setup);
    machine.run(warm_time);
    let warm = machine.take_costs();
    machine.run(time);
    let costs = machine.take_costs();
    assert!(machine.settle(), "a page is nowhere");
    Run { outcome: costs.outcome(time), warm_time, time, warm, costs }
}
