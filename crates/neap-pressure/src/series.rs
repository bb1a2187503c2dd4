//! Headroom over time: the level of pressure after each look. It depends on the samples alone.

use crate::wall::{Estimator, Pressure, Sample};

/// A series of looks at one process.
///
/// ```
/// use neap_pressure::{Pressure, Sample, Series};
///
/// let mut series = Series::new();
/// let sample = |at_ms, headroom| Sample { at_ms, headroom, limit: 1 << 30 };
/// assert_eq!(series.add(sample(0, 900 << 20)).pressure, Pressure::Roomy);
/// let step = series.add(sample(1_000_000, 40 << 20));
/// assert!(step.level_changed && step.pressure == Pressure::Critical);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Series {
    estimator: Estimator,
    pressure: Option<Pressure>,
}

/// The result of a look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// Level of pressure, with hysteresis.
    pub pressure: Pressure,
    /// Whether the level differs from the one before. True for the first look.
    pub level_changed: bool,
    /// Whether the limit differs from the one before, which restarts the estimate of growth.
    pub limit_changed: bool,
    /// Bytes per second by which headroom shrinks.
    pub growth: u64,
    /// Milliseconds until headroom is used up at this growth. `None` without growth.
    pub ms_to_wall: Option<u64>,
}

impl Series {
    /// A series without looks.
    #[must_use]
    pub const fn new() -> Series {
        Series { estimator: Estimator::new(), pressure: None }
    }

    /// Adds a look. If it is not later than the last one, it counts for the level of pressure, but
    /// not for growth.
    pub fn add(&mut self, sample: Sample) -> Step {
        let limit_changed = self.estimator.add(sample);
        let ms_to_wall = self.estimator.time_to_wall();
        let Sample { headroom, limit, .. } = sample;
        let pressure = match self.pressure {
            Some(before) => before.next(headroom, limit, ms_to_wall),
            None => Pressure::of(headroom, limit, ms_to_wall),
        };
        let level_changed = self.pressure.replace(pressure) != Some(pressure);
        Step { pressure, level_changed, limit_changed, growth: self.estimator.growth(), ms_to_wall }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn look(series: &mut Series, at_ms: u64, headroom: u64, limit: u64) -> Step {
        series.add(Sample { at_ms, headroom: headroom * MIB, limit: limit * MIB })
    }

    #[test]
    fn a_level_changes_at_its_mark_and_back_at_the_wider_one() {
        let mut series = Series::new();
        // Far apart, so that growth does not count. The margin is 64 MiB.
        let mut at = 0;
        let mut level = |headroom| {
            at += 1 << 30;
            let step = look(&mut series, at, headroom, 4096);
            (step.pressure.name(), step.level_changed)
        };
        assert_eq!(level(1000), ("roomy", true));
        assert_eq!(level(900), ("roomy", false));
        assert_eq!(level(63), ("critical", true));
        assert_eq!(level(79), ("critical", false));
        assert_eq!(level(80), ("medium", true));
        assert_eq!(level(1000), ("roomy", true));
    }

    #[test]
    fn a_changed_limit_is_told_once_and_ends_the_growth() {
        let mut series = Series::new();
        look(&mut series, 0, 900, 1000);
        assert_eq!(look(&mut series, 1000, 800, 1000).growth, 100 * MIB);
        let step = look(&mut series, 2000, 300, 500);
        assert_eq!((step.limit_changed, step.growth, step.ms_to_wall), (true, 0, None));
        assert!(!look(&mut series, 3000, 300, 500).limit_changed);
        assert!(!look(&mut series, 3000, 300, 600).limit_changed, "at the same time");
        assert!(look(&mut series, 3001, 300, 600).limit_changed);
    }
}
