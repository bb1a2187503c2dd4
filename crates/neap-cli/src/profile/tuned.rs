//! The interval between samples that `neap leaks` tunes: as short as the rate of samples allows.
//!
//! A small leak in a program that allocates little needs a short interval to be sampled at all. In
//! a program that allocates much, samples at such an interval would cost much. So the command
//! measures the rate of samples, and changes the interval of the process now and then. Each sample
//! records its interval, so sums stay unbiased.

use std::time::Duration;

/// Bytes between two samples at first, and at least.
pub(super) const FIRST: u64 = 64 << 10;
const LEAST: u64 = 2 << 10;
/// The most bytes between two samples. At this interval the process itself takes fewer samples
/// while more than 1280 come in a second.
const MOST: u64 = 512 << 10;
/// Samples a second that the command aims at. It changes the interval if there are less than half
/// of these, or more than twice as many.
const WANTED: f64 = 2000.0;
/// Samples a second at [`MOST`] below which the command shortens the interval. The process keeps
/// them above 320 itself.
const FEW_AT_MOST: f64 = 200.0;
/// Time over which the rate is measured.
const PERIOD: Duration = Duration::from_millis(250);
/// The most halvings of the interval at once. A program that has allocated little may begin to
/// allocate much.
const MOST_HALVINGS: i32 = 2;

/// The interval, and the start of the present measurement.
#[derive(Debug)]
pub(super) struct TunedInterval {
    pub(super) every: u64,
    since: Duration,
    taken: u64,
    /// Seconds over the interval then, summed over the measurements so far.
    density: f64,
}

impl TunedInterval {
    /// The process has taken `taken` samples so far.
    pub(super) fn new(taken: u64) -> TunedInterval {
        TunedInterval { every: FIRST, since: Duration::ZERO, taken, density: 0.0 }
    }

    /// Returns the one interval at which a steady leak would have had as many samples by now.
    pub(super) fn effective(&self) -> f64 {
        if self.density > 0.0 { self.since.as_secs_f64() / self.density } else { self.every as f64 }
    }

    /// Returns a better interval if the process has taken `taken` samples at the time `now`.
    pub(super) fn better(&mut self, now: Duration, taken: u64) -> Option<u64> {
        let elapsed = now.saturating_sub(self.since);
        if elapsed < PERIOD {
            return None;
        }
        let rate = taken.saturating_sub(self.taken) as f64 / elapsed.as_secs_f64();
        (self.since, self.taken) = (now, taken);
        self.density += elapsed.as_secs_f64() / self.every as f64;
        let least = if self.every == MOST { FEW_AT_MOST } else { WANTED / 2.0 };
        if (least..=WANTED * 2.0).contains(&rate) {
            return None;
        }
        // One sample in ten seconds stands for none.
        let doublings = (rate.max(0.1) / WANTED).log2().round() as i32;
        let factor = 2_f64.powi(doublings.max(-MOST_HALVINGS));
        let every = ((self.every as f64 * factor) as u64).clamp(LEAST, MOST);
        (every != self.every).then_some(every)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The intervals of a program that allocates `bytes` bytes a second, at each measurement.
    fn intervals(tuned: &mut TunedInterval, from: u64, bytes: u64) -> Vec<u64> {
        let mut taken = tuned.taken;
        (1..=4)
            .map(|step| {
                taken += bytes / tuned.every / 4;
                if let Some(every) = tuned.better(PERIOD * (from as u32 + step), taken) {
                    tuned.every = every;
                }
                tuned.every >> 10
            })
            .collect()
    }

    #[test]
    fn interval_follows_the_rate_of_samples() {
        let mut tuned = TunedInterval::new(7);
        assert_eq!(tuned.better(PERIOD / 2, 1 << 20), None, "too early");
        assert_eq!(intervals(&mut tuned, 0, 8 << 20), [16, 4, 4, 4]);
        let effective = 4.0 / (1.0 / 65_536.0 + 1.0 / 16_384.0 + 2.0 / 4096.0);
        assert!((tuned.effective() - effective).abs() < 1.0, "{}", tuned.effective());
        assert_eq!(intervals(&mut tuned, 4, 0), [2, 2, 2, 2]);
        assert_eq!(intervals(&mut tuned, 8, 1 << 30), [512, 512, 512, 512]);
        assert_eq!(intervals(&mut tuned, 12, 1 << 27), [512, 512, 512, 512], "the process keeps its pace");
        assert_eq!(intervals(&mut tuned, 16, 1 << 26), [128, 32, 32, 32]);
    }
}
