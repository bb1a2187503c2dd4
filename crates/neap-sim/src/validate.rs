//! Compares simulated numbers with published ones, for runs that were not used for calibration.
//!
//! Published numbers are rounded. The error of a simulated number is its distance to the nearest
//! number that rounds to the published one, as a share of the published number. The largest error
//! covers all lines but those marked "calibrated". "Series" is the first series of patches for
//! auto-tuning. "Later" is the merged series, whose build consists of eight builds, each in its own
//! memory group.
//!
//! Published lock shares are of all locks. Locks other than the zone's are not simulated, and are
//! added from published numbers alone:
//!
//! * Series' build: 17.0 %, less the simulated share of the zone in the unchanged kernel. Under
//!   `Depth` it is 0.75 more, since the lock of the LRU lists of pages rose by that much.
//! * Later build: 0.6 %. Its two postings have three lines with a tuned size before the last one:
//!   0.5, 0.7 and 0.6 %. A sixth of the pages came from the zone, so the zone's part of these
//!   shares must be small.
//! * page_fault1: the share of other locks is not published, nor which part of the 300 s of a run
//!   the profile covers. So the simulation gives two numbers: the part after the warm-up, and the
//!   average of all 300 s. The error is the distance to the nearer number, and 0 between them.

use serde::Serialize;

use crate::machine::SECOND;
use crate::policies::{Name, Run};
use crate::scenarios::Scenario;

/// Percent of cycles in all locks in the series' unchanged build.
const BUILD_LOCKS: f64 = 17.00;
/// Rise under `Depth` of the share of the one lock that was published separately: from 1.21 % to
/// 1.96 %.
const BUILD_RISE: f64 = 0.75;
/// Percent of cycles in other locks in the later build.
const LATER_OTHERS: f64 = 0.6;
/// Nanoseconds that a page_fault1 runs, its warm-up included.
const WHOLE_RUN: f64 = 300.0 * SECOND as f64;

/// One published number.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// The published quantity.
    pub what: &'static str,
    /// The published value.
    pub published: f64,
    /// Half of its last digit.
    pub rounding: f64,
    /// The simulated value.
    pub simulated: f64,
    /// The other end, if the simulated value is a range.
    pub to: Option<f64>,
    /// The distance as a share of the published number. `None` if that number was used for
    /// calibration.
    pub error: Option<f64>,
}

impl Check {
    fn new(what: &'static str, published: f64, rounding: f64, simulated: f64) -> Check {
        let error = ((simulated - published).abs() - rounding).max(0.0) / published;
        Check { what, published, rounding, simulated, to: None, error: Some(error) }
    }

    /// A simulated value in the range up to `to`.
    fn to(self, to: f64) -> Check {
        let nearest = self.published.clamp(self.simulated.min(to), self.simulated.max(to));
        let Check { error, .. } = Check::new(self.what, self.published, self.rounding, nearest);
        Check { to: Some(to), error, ..self }
    }

    fn calibrated(self) -> Check {
        Check { error: None, ..self }
    }
}

/// The runs that [`checks`] needs.
pub const WANTED: [(Scenario, Name); 5] = [
    (Scenario::PageFault(56), Name::Fixed),
    (Scenario::Learned, Name::Depth),
    (Scenario::KernelBuild, Name::Unchanged),
    (Scenario::KernelBuild, Name::Depth),
    (Scenario::KernelBuild, Name::Upstream),
];

/// Every check, from runs in the order of [`WANTED`].
pub fn checks(runs: [&Run; 5]) -> Vec<Check> {
    let [fixed, depth, build, build_depth, build_upstream] = runs;
    let percent = |run: &Run| run.outcome.lock_share * 100.0;
    let speed = |run: &Run| run.outcome.gigabytes_per_second;
    let path = |run: &Run| run.outcome.path_share * 100.0;
    let others = BUILD_LOCKS - percent(build);
    let from_zone = build_upstream.outcome.zone_share / build.outcome.zone_share * 100.0;
    vec![
        Check::new("page_fault1 x56, fixed: zone lock, %", 60.9, 0.05, percent(fixed)).calibrated(),
        Check::new("page_fault1 x56, fixed: GB/s", 34.3, 0.05, speed(fixed)).calibrated(),
        Check::new("page_fault1 x56, depth: zone lock, %", 0.2, 0.05, percent(depth)).to(over_whole_run(depth)),
        Check::new("page_fault1 x56, depth: GB/s", 75.0, 0.05, speed(depth)),
        Check::new("page_fault1 x56, depth: times fixed", 2.187, 0.0005, speed(depth) / speed(fixed)),
        Check::new("kernel build, unchanged: page path, %", 15.38, 0.005, path(build)).calibrated(),
        Check::new("kernel build, unchanged: all locks, %", 17.0, 0.005, percent(build) + others).calibrated(),
        Check::new("kernel build, depth: all locks, %", 12.28, 0.005, percent(build_depth) + others + BUILD_RISE),
        Check::new("kernel build, depth: page path, %", 8.87, 0.005, path(build_depth)),
        Check::new("later build, unchanged: all locks, %", 14.0, 0.05, percent(build) + LATER_OTHERS),
        Check::new("later build, upstream: all locks, %", 1.0, 0.05, percent(build_upstream) + LATER_OTHERS),
        Check::new("later build, upstream: pages from the zone, % of unchanged", 20.0, 0.05, from_zone),
    ]
}

/// Returns the percentage of cycles in the zone's lock over a whole run, from the simulated warm-up
/// and the time after it.
fn over_whole_run(run: &Run) -> f64 {
    let warm = run.warm_time as f64;
    let share = run.warm.lock_share() * warm + run.outcome.lock_share * (WHOLE_RUN - warm);
    share / WHOLE_RUN * 100.0
}

/// The largest error.
pub fn worst(checks: &[Check]) -> f64 {
    checks.iter().filter_map(|check| check.error).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_is_the_distance_beyond_rounding_and_none_if_calibrated() {
        let checks = [
            Check::new("a", 0.2, 0.05, 0.24),
            Check::new("b", 10.0, 0.5, 12.5),
            Check::new("c", 10.0, 0.5, 7.5),
            Check::new("d", 10.0, 0.0, 99.0).calibrated(),
        ];
        let errors: Vec<Option<f64>> = checks.iter().map(|check| check.error).collect();
        assert_eq!(errors, [Some(0.0), Some(0.2), Some(0.2), None]);
        assert_eq!(worst(&checks), 0.2);
    }

    #[test]
    fn range_check_error_is_the_distance_to_the_nearer_bound() {
        let error = |from, to| Check::new("a", 10.0, 0.5, from).to(to).error;
        assert_eq!([error(1.0, 20.0), error(1.0, 8.5), error(11.5, 20.0)], [Some(0.0), Some(0.1), Some(0.1)]);
    }
}
