//! Sums of a stack, a group or a thread in a profile: bytes by view, and lifetimes.
//!
//! A sample of a size is taken with the probability `p = 1 - exp(-size / mean)`, so it stands for
//! `1 / p` allocations. The sums are unbiased. The variance of a sum of bytes is estimated by the
//! sum of `size² (1 - p) / p²`.

use clap::ValueEnum;

use super::area::SampledAllocation;
use crate::report::number;

/// The bytes that a profile shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProfileView {
    /// Allocated and not freed.
    #[default]
    Live,
    /// Allocated since the profile began, freed or not.
    Allocated,
    /// Live when the live bytes were highest.
    Peak,
}

impl ProfileView {
    pub(crate) fn name(self) -> &'static str {
        match self {
            ProfileView::Live => "live",
            ProfileView::Allocated => "allocated",
            ProfileView::Peak => "live at the peak",
        }
    }

    /// The option that chooses it.
    pub(crate) fn option(self) -> &'static str {
        match self {
            ProfileView::Live => "live",
            ProfileView::Allocated => "allocated",
            ProfileView::Peak => "peak",
        }
    }
}

/// Estimated objects and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Amount {
    pub(crate) samples: u64,
    pub(crate) objects: f64,
    pub(crate) bytes: f64,
    /// Estimated variance of the bytes.
    variance: f64,
}

impl Amount {
    /// Estimates the allocations that a sample stands for: their number, bytes and variance.
    pub(crate) fn of(sample: &SampledAllocation) -> Amount {
        Amount::of_size(sample.size, sample.mean)
    }

    /// Estimates the allocations that a sample of `bytes` bytes stands for. `mean` is the average
    /// number of bytes between two samples.
    pub(super) fn of_size(bytes: u64, mean: u64) -> Amount {
        let size = bytes.max(1) as f64;
        // A mean of 0 is damage, and one byte means that every allocation is sampled.
        let taken = -(-size / mean.max(1) as f64).exp_m1();
        let objects = 1.0 / taken;
        Amount {
            samples: 1,
            objects,
            bytes: bytes as f64 * objects,
            variance: size * size * (1.0 - taken) / taken / taken,
        }
    }

    /// Makes an estimate of `objects` objects with `bytes` bytes whose single samples are not
    /// available. The standard error assumes that all objects have one size.
    pub(crate) fn of_sum(objects: f64, bytes: f64, mean: u64) -> Amount {
        if objects < 1.0 {
            return Amount::default();
        }
        let size = bytes / objects;
        let taken = -(-size.max(1.0) / mean.max(1) as f64).exp_m1();
        let variance = objects * size * size * (1.0 - taken) / taken;
        Amount { samples: (objects * taken).round().max(1.0) as u64, objects, bytes, variance }
    }

    pub(crate) fn add(&mut self, other: Amount) {
        self.samples += other.samples;
        self.objects += other.objects;
        self.bytes += other.bytes;
        self.variance += other.variance;
    }

    pub(super) fn remove(&mut self, other: Amount) {
        self.samples = self.samples.saturating_sub(other.samples);
        if self.samples == 0 {
            *self = Amount::default();
            return;
        }
        self.objects = (self.objects - other.objects).max(0.0);
        self.bytes = (self.bytes - other.bytes).max(0.0);
        self.variance = (self.variance - other.variance).max(0.0);
    }

    /// Standard error of the bytes.
    pub(crate) fn error(self) -> f64 {
        self.variance.sqrt()
    }
}

/// Sums of samples.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SampleSums {
    pub(crate) live: Amount,
    pub(crate) allocated: Amount,
    pub(crate) peak: Amount,
    pub(crate) freed: Lifetimes,
}

impl SampleSums {
    pub(crate) fn of(&self, view: ProfileView) -> Amount {
        match view {
            ProfileView::Live => self.live,
            ProfileView::Allocated => self.allocated,
            ProfileView::Peak => self.peak,
        }
    }

    pub(crate) fn add(&mut self, other: &SampleSums) {
        self.live.add(other.live);
        self.allocated.add(other.allocated);
        self.peak.add(other.peak);
        self.freed.add(other.freed);
    }
}

/// Lifetimes of the objects that were freed while the profile was taken.
///
/// Objects that are still live do not count. So a short profile has only short lifetimes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Lifetimes {
    /// Estimated number of these objects.
    pub(crate) objects: f64,
    /// Estimated sum of their times from allocation to free.
    pub(crate) seconds: f64,
}

impl Lifetimes {
    /// Makes the lifetimes of `objects` objects with the same lifetime. The times are nanoseconds.
    /// They are untrusted.
    pub(crate) fn of(objects: f64, allocated: u64, freed: u64) -> Lifetimes {
        Lifetimes { objects, seconds: objects * (freed.saturating_sub(allocated) as f64 / 1e9) }
    }

    pub(crate) fn add(&mut self, other: Lifetimes) {
        self.objects += other.objects;
        self.seconds += other.seconds;
    }

    /// Returns the mean lifetime in seconds. `None` if no object was freed.
    pub(crate) fn mean(self) -> Option<f64> {
        (self.objects > 0.0).then(|| self.seconds / self.objects)
    }

    /// The mean lifetime with a unit.
    pub(crate) fn shown(self) -> String {
        let Some(seconds) = self.mean() else { return "-".to_string() };
        let (value, unit) = match seconds {
            ..1e-3 => (seconds * 1e6, "us"),
            ..1.0 => (seconds * 1e3, "ms"),
            ..120.0 => (seconds, "s"),
            ..7200.0 => (seconds / 60.0, "min"),
            _ => (seconds / 3600.0, "h"),
        };
        format!("{} {unit}", number(value, usize::from(value < 9.95)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(size: u64) -> SampledAllocation {
        SampledAllocation { size, mean: 1000, ..SampledAllocation::default() }
    }

    #[test]
    fn sums_of_samples_are_unbiased() {
        // A generator of numbers (xorshift).
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut uniform = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1_u64 << 53) as f64
        };
        for size in [8, 100, 1000, 5000, 100_000] {
            let (mut sum, count) = (Amount::default(), 200_000);
            for _ in 0..count {
                if uniform() < 1.0 - (-(size as f64) / 1000.0).exp() {
                    sum.add(Amount::of(&sample(size)));
                }
            }
            let (objects, bytes) = (f64::from(count), f64::from(count) * size as f64);
            let errors = (sum.bytes - bytes).abs() / sum.error().max(bytes * 1e-9);
            assert!(errors < 4.5, "size {size}: {} for {bytes}, {errors} standard errors", sum.bytes);
            assert!((sum.objects / objects - sum.bytes / bytes).abs() < 1e-6);
        }
        assert!(
            Amount::of(&SampledAllocation { size: 0, mean: 0, ..SampledAllocation::default() }).objects.is_finite()
        );
        assert!(
            Amount::of(&SampledAllocation { size: 1, mean: u64::MAX, ..SampledAllocation::default() })
                .objects
                .is_finite()
        );
    }

    #[test]
    fn sums_without_samples_have_their_error() {
        let (mut sum, each) = (Amount::default(), sample(300));
        (0..40).for_each(|_| sum.add(Amount::of(&each)));
        let again = Amount::of_sum(sum.objects, sum.bytes, 1000);
        assert_eq!(again.samples, 40);
        assert!((again.error() / sum.error() - 1.0).abs() < 1e-9, "{} {}", again.error(), sum.error());
        assert_eq!(Amount::of_sum(0.0, 0.0, 1000), Amount::default());
        assert!(Amount::of_sum(7.0, 0.0, 0).error().is_finite());
    }

    #[test]
    fn mean_lifetime_is_that_of_objects_and_not_of_samples() {
        let mut sum = Lifetimes::of(3.0, 1_000_000_000, 2_000_000_000);
        sum.add(Lifetimes::of(1.0, 0, 5_000_000_000));
        assert_eq!(sum.mean(), Some(2.0));
        assert_eq!(Lifetimes::of(1.0, 5, 3).mean(), Some(0.0), "times that are no truth");
        assert_eq!(Lifetimes::default().mean(), None);
    }

    #[test]
    fn lifetimes_have_units() {
        let shown = |nanoseconds| Lifetimes::of(1.0, 0, nanoseconds).shown();
        let texts = [900, 42_000, 1_500_000, 70_000_000_000, 1_800_000_000_000, 86_400_000_000_000].map(shown);
        assert_eq!(texts, ["0.9 us", "42 us", "1.5 ms", "70 s", "30 min", "24 h"]);
        assert_eq!(Lifetimes::default().shown(), "-");
    }
}
