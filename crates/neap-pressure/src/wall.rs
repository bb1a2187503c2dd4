//! The time until memory runs out, and the level of pressure. All decisions depend on samples
//! alone.
//!
//! # Design
//!
//! Growth is the larger of two slopes:
//!
//! 1. Over all kept samples. It notices slow growth, and forgets it after [`KEPT`] samples.
//! 2. The smaller one of the last two steps. It notices a burst after two steps, and ignores a
//!    single jump.
//!
//! A changed limit restarts the estimate, because headroom jumps with it.
//!
//! Each level of pressure has two marks. Pressure rises to the level at the first mark. It falls
//! from the level only beyond the second one, which is a larger headroom and a longer time. So
//! headroom that moves around a mark does not change the level each time.

/// Number of samples that are kept.
pub const KEPT: usize = 16;

/// Headroom at a time.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Sample {
    /// Milliseconds of a clock that does not go back.
    pub at_ms: u64,
    /// Bytes until the wall.
    pub headroom: u64,
    /// Limit of the wall in bytes.
    pub limit: u64,
}

/// Estimates the time until memory runs out.
#[derive(Clone, Debug)]
pub struct Estimator {
    /// The kept samples, the oldest first.
    samples: [Sample; KEPT],
    count: usize,
}

impl Estimator {
    /// An estimator without samples.
    #[must_use]
    pub const fn new() -> Estimator {
        Estimator { samples: [Sample { at_ms: 0, headroom: 0, limit: 0 }; KEPT], count: 0 }
    }

    /// Adds a sample. Returns whether the limit changed, which restarts the estimate. A sample that
    /// is not later than the last one is ignored.
    pub fn add(&mut self, sample: Sample) -> bool {
        let mut changed = false;
        if let Some(last) = self.samples().last() {
            if sample.at_ms <= last.at_ms {
                return false;
            }
            changed = sample.limit != last.limit;
        }
        if changed {
            self.count = 0;
        }
        if self.count == KEPT {
            self.samples.rotate_left(1);
            self.count -= 1;
        }
        if let Some(place) = self.samples.get_mut(self.count) {
            *place = sample;
            self.count += 1;
        }
        changed
    }

    /// Growth in bytes per second; 0 if headroom does not fall, or there are no two samples.
    #[must_use]
    pub fn growth(&self) -> u64 {
        let samples = self.samples();
        let [.., newest] = samples else {
            return 0;
        };
        let whole = samples.first().map_or(0, |oldest| slope(oldest, newest));
        let burst = match samples {
            [.., a, b, c] => slope(a, b).min(slope(b, c)),
            _ => 0,
        };
        whole.max(burst)
    }

    /// Milliseconds until headroom is used up at the observed growth. `None` without growth.
    #[must_use]
    pub fn time_to_wall(&self) -> Option<u64> {
        let headroom = self.samples().last()?.headroom;
        let growth = self.growth();
        (growth > 0).then(|| saturated(u128::from(headroom) * 1000 / u128::from(growth)))
    }

    fn samples(&self) -> &[Sample] {
        self.samples.get(..self.count).unwrap_or_default()
    }
}

impl Default for Estimator {
    fn default() -> Estimator {
        Estimator::new()
    }
}

/// Lost headroom in bytes per second.
fn slope(from: &Sample, to: &Sample) -> u64 {
    let bytes = u128::from(from.headroom.saturating_sub(to.headroom));
    let elapsed = u128::from(to.at_ms.saturating_sub(from.at_ms).max(1));
    saturated(bytes * 1000 / elapsed)
}

fn saturated(value: u128) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

/// Level of memory pressure. The order is from much headroom to none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Pressure {
    /// There is room: caches may grow.
    Roomy,
    /// Caches keep their size.
    Steady,
    /// Headroom is getting short.
    Low,
    /// Headroom is near the margin.
    Medium,
    /// Headroom is below the margin.
    Critical,
    /// Memory is about to run out.
    Imminent,
}

impl Pressure {
    /// All levels, from much headroom to none.
    pub const ALL: [Pressure; 6] =
        [Pressure::Roomy, Pressure::Steady, Pressure::Low, Pressure::Medium, Pressure::Critical, Pressure::Imminent];

    /// Name in lower case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Pressure::Roomy => "roomy",
            Pressure::Steady => "steady",
            Pressure::Low => "low",
            Pressure::Medium => "medium",
            Pressure::Critical => "critical",
            Pressure::Imminent => "imminent",
        }
    }

    /// Returns the level for a first sample.
    #[must_use]
    pub fn of(headroom: u64, limit: u64, time_to_wall: Option<u64>) -> Pressure {
        judged(headroom, limit, time_to_wall, Width::Enter)
    }

    /// Returns the level that follows `self`. Pressure falls only when headroom and time are both
    /// beyond the second, wider mark of a level.
    #[must_use]
    pub fn next(self, headroom: u64, limit: u64, time_to_wall: Option<u64>) -> Pressure {
        let entered = judged(headroom, limit, time_to_wall, Width::Enter);
        let left = judged(headroom, limit, time_to_wall, Width::Leave);
        self.clamp(entered, left.max(entered))
    }
}

/// Bytes that a program should keep free: a tenth of the limit, and at most 64 MiB.
#[must_use]
pub fn margin(limit: u64) -> u64 {
    (limit / 10).min(64 << 20)
}

/// Bytes that caches may grow by until the pressure is [`Pressure::Low`].
#[must_use]
pub fn room_to_grow(headroom: u64, limit: u64) -> u64 {
    headroom.saturating_sub(LOW.bytes(limit, Width::Enter))
}

/// Selects a mark of a level: the one for entering it, or the wider one for leaving it.
#[derive(Clone, Copy)]
enum Width {
    Enter,
    Leave,
}

/// A mark: headroom in quarters of the margin, and a time to the wall. The level holds below either
/// of them.
#[derive(Clone, Copy)]
struct Mark {
    level: Pressure,
    quarters: u64,
    milliseconds: u64,
}

/// Where the level [`Pressure::Low`] begins.
const LOW: Mark = Mark { level: Pressure::Low, quarters: 8, milliseconds: 60_000 };
const MARKS: [Mark; 5] = [
    Mark { level: Pressure::Imminent, quarters: 1, milliseconds: 1_000 },
    Mark { level: Pressure::Critical, quarters: 4, milliseconds: 5_000 },
    Mark { level: Pressure::Medium, quarters: 6, milliseconds: 15_000 },
    LOW,
    Mark { level: Pressure::Steady, quarters: 12, milliseconds: 120_000 },
];

impl Mark {
    /// Headroom below which the level holds. It is a quarter larger for leaving the level.
    fn bytes(self, limit: u64, width: Width) -> u64 {
        let enter = margin(limit) * self.quarters / 4;
        match width {
            Width::Enter => enter,
            Width::Leave => enter + enter / 4,
        }
    }

    /// Time to the wall below which the level holds. It is twice as long for leaving the level.
    fn time(self, width: Width) -> u64 {
        match width {
            Width::Enter => self.milliseconds,
            Width::Leave => self.milliseconds * 2,
        }
    }
}

fn judged(headroom: u64, limit: u64, time_to_wall: Option<u64>, width: Width) -> Pressure {
    let holds = |mark: &&Mark| {
        headroom == 0 || headroom < mark.bytes(limit, width) || time_to_wall.is_some_and(|time| time < mark.time(width))
    };
    MARKS.iter().find(holds).map_or(Pressure::Roomy, |mark| mark.level)
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn filled(headrooms: &[u64]) -> Estimator {
        let mut estimator = Estimator::new();
        for (at, headroom) in headrooms.iter().enumerate() {
            estimator.add(Sample { at_ms: 100 * at as u64, headroom: *headroom, limit: 1 << 30 });
        }
        estimator
    }

    #[test]
    fn steady_growth_gives_the_time_to_the_wall() {
        let estimator = filled(&[1000, 900, 800, 700]);
        assert_eq!((estimator.growth(), estimator.time_to_wall()), (1000, Some(700)));
        assert_eq!(filled(&[700, 800, 900]).time_to_wall(), None, "memory is freed");
        assert_eq!(filled(&[700]).time_to_wall(), None);
        assert_eq!(Estimator::new().time_to_wall(), None);
        assert_eq!(filled(&[100, 0]).time_to_wall(), Some(0));
    }

    #[test]
    fn burst_counts_after_two_steps_and_a_jump_does_not() {
        let calm = [10_000; 12];
        let mut burst = calm.to_vec();
        burst.extend([9_000, 8_000]);
        assert_eq!(filled(&burst).growth(), 10_000);
        let mut jump = calm.to_vec();
        jump.push(9_000);
        assert!(filled(&jump).growth() < 1_000);
    }

    #[test]
    fn old_samples_are_forgotten() {
        let mut samples = vec![1_000_000];
        samples.extend([1000; KEPT]);
        assert_eq!(filled(&samples).growth(), 0);
    }

    #[test]
    fn changed_limit_restarts_the_estimate() {
        let mut estimator = filled(&[1000, 900, 800]);
        let (at_ms, headroom, limit) = (1000, 10, 1 << 20);
        assert!(estimator.add(Sample { at_ms, headroom, limit }));
        assert_eq!(estimator.time_to_wall(), None);
        assert!(!estimator.add(Sample { at_ms, headroom: 0, limit: 7 }), "not later");
        assert!(!estimator.add(Sample { at_ms: at_ms + 1, headroom, limit }));
    }

    #[test]
    fn extreme_samples_do_not_overflow() {
        let mut estimator = Estimator::new();
        estimator.add(Sample { at_ms: 0, headroom: u64::MAX, limit: u64::MAX });
        estimator.add(Sample { at_ms: 1, headroom: 0, limit: u64::MAX });
        assert_eq!((estimator.growth(), estimator.time_to_wall()), (u64::MAX, Some(0)));
        assert_eq!(Pressure::of(u64::MAX, u64::MAX, Some(u64::MAX)), Pressure::Roomy);
        assert_eq!(Pressure::of(0, 0, None), Pressure::Imminent);
    }

    #[test]
    fn levels_follow_headroom() {
        let at = |mib: u64| Pressure::of(mib * MIB, 1 << 40, None);
        let names = [15, 16, 64, 96, 128, 191, 192].map(|mib| at(mib).name());
        assert_eq!(names, ["imminent", "critical", "medium", "low", "steady", "steady", "roomy"]);
        assert_eq!(Pressure::of(20, 100, None), Pressure::Steady);
        assert_eq!(Pressure::of(30, 100, None), Pressure::Roomy);
    }

    #[test]
    fn levels_follow_the_time_to_the_wall() {
        let at = |time| Pressure::of(1 << 39, 1 << 40, Some(time));
        let names = [0, 999, 1000, 5000, 15_000, 60_000, 120_000].map(|time| at(time).name());
        assert_eq!(names, ["imminent", "imminent", "critical", "medium", "low", "steady", "roomy"]);
    }

    #[test]
    fn levels_are_left_later_than_entered() {
        let limit = 1 << 40;
        let step = |level: Pressure, mib: u64| level.next(mib * MIB, limit, None);
        assert_eq!(step(Pressure::Steady, 63), Pressure::Critical);
        assert_eq!(step(Pressure::Critical, 65), Pressure::Critical);
        assert_eq!(step(Pressure::Critical, 79), Pressure::Critical);
        assert_eq!(step(Pressure::Critical, 80), Pressure::Medium);
        assert_eq!(step(Pressure::Critical, 1000), Pressure::Roomy);
        assert_eq!(step(Pressure::Roomy, 192), Pressure::Roomy);
        assert_eq!(step(Pressure::Roomy, 191), Pressure::Steady);
        assert_eq!(step(Pressure::Steady, 239), Pressure::Steady);
        assert_eq!(step(Pressure::Steady, 240), Pressure::Roomy);
        let long = |time| Pressure::Imminent.next(1 << 39, limit, Some(time));
        assert_eq!((long(1500), long(2000)), (Pressure::Imminent, Pressure::Critical));
    }

    #[test]
    fn room_ends_where_headroom_is_short() {
        assert_eq!(room_to_grow(100, 100), 80);
        assert_eq!(room_to_grow(20, 100), 0);
        assert_eq!(margin(1 << 40), 64 * MIB);
    }
}
