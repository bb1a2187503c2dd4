//! Every policy in every scenario, and the resulting figures.
//!
//! Runs are independent, so as many run at once as the machine has CPUs. Their results do not
//! depend on that number.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::machine::{ListLock, Setup};
use crate::policies::{self, Name, Run};
use crate::scenarios::{self, Scenario, Size, network};
use crate::validate::{self, Check};

/// Worse than Upstream by more than this is a violation.
const TOLERANCE: f64 = 1.05;
/// Difference of holds in a million operations that counts as none.
const FEW_HOLDS: f64 = 1.0;
/// Largest difference of pages in a CPU's list that counts as equal: a batch.
const FEW_PAGES: f64 = 63.0;

/// All results.
pub struct Comparison {
    /// The seed.
    pub seed: u64,
    /// Every run.
    pub runs: BTreeMap<(usize, Name), (Scenario, Run)>,
    /// Published numbers beside simulated ones.
    pub checks: Vec<Check>,
    /// Describes, as text, each scenario in which another policy takes the lock less often than
    /// `Adaptive` and keeps fewer pages in lists.
    pub dominated: Vec<String>,
    /// Describes, as text, each scenario in which `Adaptive` is worse than `Upstream` by more than
    /// a twentieth, in locks taken or in pages in lists.
    pub worse: Vec<String>,
    /// Figures by name.
    pub figures: BTreeMap<String, f64>,
}

impl Comparison {
    /// Returns a lower bound, for every policy, of the pages in lists in a scenario. It holds for
    /// the programs of the `Adaptive` run if at most `zone_share` of their pages comes from the
    /// zone. See [`crate::offline`].
    pub fn least_listed(&self, scenario: Scenario, zone_share: f64) -> Option<f64> {
        let run = self.run(scenario, Name::Adaptive)?;
        run.costs.gaps.listed(zone_share, run.time)
    }

    /// All violations and dominations of `Adaptive`.
    pub fn violations(&self) -> impl Iterator<Item = &String> {
        self.dominated.iter().chain(&self.worse)
    }

    /// Compares `Adaptive` with every other policy.
    fn judge(&mut self, scenarios: &[Scenario]) {
        let (mut dominated, mut worse) = (Vec::new(), Vec::new());
        for &scenario in scenarios {
            let Some(adaptive) = self.run(scenario, Name::Adaptive) else { continue };
            let (name, Point { holds, listed }) = (scenario.name(), point(adaptive));
            let few = FEW_PAGES * adaptive.costs.cpus as f64;
            for policy in policies::ALL.into_iter().filter(|policy| *policy != Name::Adaptive) {
                let Some(other) = self.run(scenario, policy) else { continue };
                let Point { holds: others_holds, listed: others_listed } = point(other);
                let clearly = holds > others_holds + FEW_HOLDS || listed > others_listed + few;
                if others_holds <= holds && others_listed <= listed && clearly {
                    dominated.push(format!(
                        "{name}: {} takes the lock {others_holds:.0} times and keeps {others_listed:.0} pages in page lists, adaptive {holds:.0} and {listed:.0}",
                        policy.text()
                    ));
                }
            }
            let Some(upstream) = self.run(scenario, Name::Upstream) else { continue };
            let Point { holds: most_holds, listed: most_listed } = point(upstream);
            if holds > most_holds * TOLERANCE && holds > most_holds + FEW_HOLDS {
                worse.push(format!("{name}: lock taken {holds:.0} times, upstream {most_holds:.0}"));
            }
            if listed > most_listed * TOLERANCE && listed > most_listed + few {
                worse.push(format!("{name}: {listed:.0} pages in page lists, upstream {most_listed:.0}"));
            }
        }
        (self.dominated, self.worse) = (dominated, worse);
    }

    /// The run of a policy in a scenario.
    pub fn run(&self, scenario: Scenario, policy: Name) -> Option<&Run> {
        let found = self.runs.iter().find(|((_, name), (of, _))| *name == policy && *of == scenario);
        found.map(|(_, (_, run))| run)
    }
}

/// Which policies run in which scenarios.
fn jobs(size: Size) -> Vec<(Scenario, Name)> {
    // The longest runs begin first.
    let mut jobs = vec![(Scenario::Learned, Name::Depth), (Scenario::KernelBuild, Name::Unchanged)];
    for scenario in scenarios::compared(size) {
        jobs.extend(policies::ALL.map(|policy| (scenario, policy)));
    }
    if !jobs.contains(&(Scenario::PageFault(224), Name::Adaptive)) {
        jobs.push((Scenario::PageFault(224), Name::Adaptive));
    }
    for &cpus in scenarios::first_touch_cpus(size) {
        jobs.extend([ListLock::None, ListLock::Blocking].map(|lock| (Scenario::FirstTouch(cpus, lock), Name::Fixed)));
        jobs.extend([Name::Fixed, Name::Adaptive].map(|name| (Scenario::FirstTouch(cpus, ListLock::Try), name)));
    }
    jobs
}

/// Runs every policy in every scenario. Passes progress messages to `tell`.
pub fn compare(seed: u64, size: Size, tell: &(dyn Fn(&str) + Sync)) -> Comparison {
    let mut comparison = run_all(seed, size, &jobs(size), tell);
    comparison.checks = checks_of(&comparison);
    comparison.judge(&scenarios::compared(size));
    comparison.figures = figures_of(&comparison);
    comparison
}

/// Runs every policy in one scenario.
pub fn only(seed: u64, size: Size, scenario: Scenario, tell: &(dyn Fn(&str) + Sync)) -> Comparison {
    let mut comparison = run_all(seed, size, &policies::ALL.map(|policy| (scenario, policy)), tell);
    comparison.judge(&[scenario]);
    comparison.figures = figures_of(&comparison);
    comparison
}

fn run_all(seed: u64, size: Size, jobs: &[(Scenario, Name)], tell: &(dyn Fn(&str) + Sync)) -> Comparison {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let work = || {
        loop {
            // Relaxed: it publishes no other data.
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(scenario, policy)) = jobs.get(index) else { return };
            let setup = scenario.setup(seed, size);
            let run = policies::run(policy, Setup { watched: policy == Name::Adaptive, ..setup });
            let mut done = done.lock().expect("no run panics while it holds this");
            done.insert(index, run);
            tell(&format!("{} of {}: {}: {}", done.len(), jobs.len(), scenario.name(), policy.text()));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| _ = scope.spawn(work)));
    let done = done.into_inner().expect("a run panicked");
    let order = |scenario: Scenario| jobs.iter().position(|job| job.0 == scenario).unwrap_or_default();
    let named = done.into_iter().map(|(index, run)| {
        let (scenario, policy) = jobs[index];
        ((order(scenario), policy), (scenario, run))
    });
    Comparison {
        seed,
        runs: named.collect(),
        checks: Vec::new(),
        dominated: Vec::new(),
        worse: Vec::new(),
        figures: BTreeMap::new(),
    }
}

fn checks_of(comparison: &Comparison) -> Vec<Check> {
    let runs: Vec<&Run> = validate::WANTED.iter().filter_map(|job| comparison.run(job.0, job.1)).collect();
    runs.try_into().map(validate::checks).unwrap_or_default()
}

/// Place of a run in a scenario's plot: holds in a million operations, and pages in lists.
struct Point {
    holds: f64,
    listed: f64,
}

fn point(run: &Run) -> Point {
    Point { holds: run.outcome.lock_takes_per_million, listed: run.outcome.average_listed }
}

fn figures_of(comparison: &Comparison) -> BTreeMap<String, f64> {
    let mut figures = BTreeMap::new();
    let both = |scenario| Some((comparison.run(scenario, Name::Adaptive)?, comparison.run(scenario, Name::Fixed)?));
    let mut add = |name: &str, value: Option<f64>| {
        if let Some(value) = value.filter(|value| value.is_finite()) {
            figures.insert(name.to_string(), value);
        }
    };
    let ratio = |scenario, of: fn(&Run) -> f64| both(scenario).map(|(adaptive, fixed)| of(adaptive) / of(fixed));
    let share = |scenario, policy| comparison.run(scenario, policy).map(|run| run.outcome.lock_share);
    add("pf1_56.fixed.lock_share", share(Scenario::PageFault(56), Name::Fixed));
    add("pf1_56.adaptive.lock_share", share(Scenario::PageFault(56), Name::Adaptive));
    add("pf1_56.speedup", ratio(Scenario::PageFault(56), |run| run.outcome.gigabytes_per_second));
    add("pf1_224.adaptive.lock_share", share(Scenario::PageFault(224), Name::Adaptive));
    add("kbuild.lock_share_ratio", ratio(Scenario::KernelBuild, |run| run.outcome.lock_share));
    add("kbuild.zone_allocation_ratio", ratio(Scenario::KernelBuild, |run| run.outcome.zone_share));
    // The permitted share of pages from the zone, and the pages that lists need for it if the
    // policy knows the future.
    let allowed = comparison.run(Scenario::KernelBuild, Name::Fixed).map(|fixed| fixed.outcome.zone_share * 0.2);
    add("kbuild.least_listed", allowed.and_then(|share| comparison.least_listed(Scenario::KernelBuild, share)));
    add("kbuild.listed", comparison.run(Scenario::KernelBuild, Name::Adaptive).map(|run| run.outcome.average_listed));
    // The published value is all used memory of a machine. The part that neither the build nor the
    // lists use is taken from another run.
    add("kbuild.held_end_ratio", ratio(Scenario::KernelBuildEnd, |run| run.outcome.average_used + network::BASE_USED));
    add("network.alloc_p99_ratio", ratio(Scenario::Network, |run| run.outcome.alloc_p99 as f64));
    add("network.free_p99_ratio", ratio(Scenario::Network, |run| run.outcome.free_p99 as f64));
    // Relative to all published memory in use of such a machine.
    let more = |(adaptive, fixed): (&Run, &Run)| adaptive.outcome.average_used - fixed.outcome.average_used;
    add("network.held_ratio", both(Scenario::Network).map(|runs| 1.0 + more(runs) / network::BASE_USED));
    add("pressure.failures", both(Scenario::Pressure(1)).map(|(run, _)| run.outcome.counts.failures as f64));
    let missed = |run: &Run| run.outcome.counts.misses_with_pages_listed as f64;
    add("pressure.misses_with_pages_listed", comparison.run(Scenario::Pressure(2), Name::Adaptive).map(missed));
    add("pressure.early_reclaim_ratio", ratio(Scenario::Pressure(1), |run| run.outcome.counts.early_reclaims as f64));
    add("validation_worst_error", (!comparison.checks.is_empty()).then(|| validate::worst(&comparison.checks)));
    add("pareto_dominated", Some(comparison.dominated.len() as f64));
    add("pareto_violations", Some(comparison.violations().count() as f64));
    figures
}
