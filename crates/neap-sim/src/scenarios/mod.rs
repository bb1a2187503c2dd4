//! Scenarios: machines, their programs, and the time for which they run.
//!
//! A scenario is made anew for each policy from the same seed, so all policies meet the same
//! programs. A program's next step depends on virtual time only.

pub mod first_touch;
pub mod kernel_build;
pub mod network;
pub mod page_fault;
pub mod pressure;
pub mod programs;

use crate::machine::{ListLock, SECOND, Setup};
use crate::scenarios::kernel_build::BuildStage;

/// Extent of the runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// A minute or two on two CPUs: fewer machines, shorter runs.
    Quick,
    /// Everything.
    Full,
}

/// One scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// page_fault1 on this many CPUs.
    PageFault(usize),
    /// page_fault1 on 56 CPUs until a policy with a window of a second has learned it.
    Learned,
    /// pft on this many CPUs with this lock of lists.
    FirstTouch(usize, ListLock),
    /// The kernel build while there is work for all CPUs.
    KernelBuild,
    /// The kernel build when little work is left.
    KernelBuildEnd,
    /// Senders and receivers.
    Network,
    /// A big program's start and exit.
    BigProgram,
    /// Bursts three seconds apart.
    Bursts,
    /// A steady mix.
    SteadyMix,
    /// Memory that runs out, on this many nodes.
    Pressure(usize),
    /// A switching load.
    Adversary,
}

impl Scenario {
    /// The name in tables.
    pub fn name(self) -> String {
        match self {
            Scenario::PageFault(cpus) => format!("page_fault1 x{cpus}"),
            Scenario::Learned => "page_fault1 x56, learned".into(),
            Scenario::FirstTouch(cpus, lock) => {
                let lock = match lock {
                    ListLock::None => "no lock",
                    ListLock::Blocking => "spin lock",
                    ListLock::Try => "trylock",
                };
                format!("pft x{cpus}, {lock}")
            }
            Scenario::KernelBuild => "kernel build".into(),
            Scenario::KernelBuildEnd => "kernel build, end".into(),
            Scenario::Network => "network".into(),
            Scenario::BigProgram => "big program".into(),
            Scenario::Bursts => "bursts 3 s apart".into(),
            Scenario::SteadyMix => "steady mix".into(),
            Scenario::Pressure(1) => "memory pressure".into(),
            Scenario::Pressure(nodes) => format!("memory pressure, {nodes} nodes"),
            Scenario::Adversary => "adversary".into(),
        }
    }

    /// The machine with its programs.
    pub fn setup(self, seed: u64, size: Size) -> Setup {
        let time = |quick: u64, full: u64| SECOND * if size == Size::Quick { quick } else { full } / 10;
        match self {
            // With more CPUs it takes a second or more until each has had its first swing.
            Scenario::PageFault(cpus) if cpus > 56 => {
                page_fault::setup(cpus, seed, SECOND * cpus as u64 / 56, time(3, 3))
            }
            Scenario::PageFault(cpus) => page_fault::setup(cpus, seed, time(10, 30), time(10, 10)),
            Scenario::Learned => page_fault::setup(56, seed, time(60, 60), time(10, 10)),
            Scenario::FirstTouch(cpus, lock) => {
                first_touch::setup(cpus, lock, if size == Size::Quick { 8 } else { 32 })
            }
            Scenario::KernelBuild => {
                kernel_build::setup(kernel_build::CPUS, seed, time(90, 100), time(20, 60), BuildStage::Busy)
            }
            Scenario::KernelBuildEnd => {
                kernel_build::setup(kernel_build::CPUS, seed, time(105, 140), time(10, 30), BuildStage::NearlyDone)
            }
            Scenario::Network => network::setup(seed, time(5, 20), time(20, 50)),
            Scenario::BigProgram => programs::big_program(seed, 0, time(100, 150)),
            Scenario::Bursts => programs::bursts(seed, time(40, 40), time(60, 150)),
            Scenario::SteadyMix => programs::steady_mix(seed, time(20, 50), time(20, 100)),
            Scenario::Pressure(nodes) => pressure::setup(nodes, seed, time(5, 10), time(15, 40)),
            Scenario::Adversary => programs::adversary(seed, time(10, 10), time(40, 200)),
        }
    }
}

/// The scenarios that all policies are compared on.
pub fn compared(size: Size) -> Vec<Scenario> {
    let cpus: &[usize] = if size == Size::Quick { &[1, 56] } else { &[1, 4, 16, 56, 112, 224] };
    let mut scenarios: Vec<Scenario> = cpus.iter().map(|&cpus| Scenario::PageFault(cpus)).collect();
    scenarios.extend([
        Scenario::KernelBuild,
        Scenario::KernelBuildEnd,
        Scenario::Network,
        Scenario::BigProgram,
        Scenario::Bursts,
        Scenario::SteadyMix,
        Scenario::Pressure(1),
        Scenario::Pressure(2),
        Scenario::Adversary,
    ]);
    scenarios
}

/// Returns the numbers of CPUs for pft. The full size has those of the published runs.
pub fn first_touch_cpus(size: Size) -> &'static [usize] {
    if size == Size::Quick { &[1, 80] } else { &[1, 4, 7, 12, 21, 30, 48, 79, 80] }
}
