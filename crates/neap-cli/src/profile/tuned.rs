//! The interval between samples that `neap leaks` tunes: as short as the rate of samples allows.
//!
//! A small leak in a program that allocates little needs a short interval to be sampled at all. In
//! a program that allocates much, samples at such an interval would cost much. So the command
//! measures the rate of samples, and changes the interval of the process now and then. Each sample
//! records its interval, so sums stay unbiased.

use std::time::Duration;

/// Bytes between two samples at first, and at least.
pub(super) const FIRST: u64 = 64 << 10;
const LEAST: u64 = 1 << 10;
/// The most bytes between two samples.
const MOST: u64 = 512 << 10;
/// Samples a second that the command aims at. It changes the interval if there are less than half
/// of these, or more than twice as many.
const WANTED: f64 = 2000.0;
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
}

impl TunedInterval {
    pub(super) fn new() -> TunedInterval {
        TunedInterval { every: FIRST, since: Duration::ZERO, taken: 0 }
    }

    /// Returns a better interval if the process has taken `taken` samples at the time `now`.
    pub(super) fn better(&mut self, now: Duration, taken: u64) -> Option<u64> {
        let elapsed = now.saturating_sub(self.since);
        if elapsed < PERIOD {
            return None;
        }
        let rate = taken.saturating_sub(self.taken) as f64 / elapsed.as_secs_f64();
        (self.since, self.taken) = (now, taken);
        if (WANTED / 2.0..=WANTED * 2.0).contains(&rate) {
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
        let mut tuned = TunedInterval::new();
        assert_eq!(tuned.better(PERIOD / 2, 1 << 20), None, "too early");
        assert_eq!(intervals(&mut tuned, 0, 8 << 20), [16, 4, 4, 4]);
        assert_eq!(intervals(&mut tuned, 4, 0), [1, 1, 1, 1]);
        assert_eq!(intervals(&mut tuned, 8, 1 << 30), [512, 512, 512, 512]);
        assert_eq!(intervals(&mut tuned, 12, 1 << 26), [128, 32, 32, 32]);
    }
}
