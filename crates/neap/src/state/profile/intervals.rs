//! Draws the bytes from one sample to the next, and computes the bytes that a sample stands for.
//! The intervals are exponentially distributed, so the samples are a Poisson process.

/// A generator of pseudo-random numbers, known as SplitMix64. It applies the finaliser of
/// MurmurHash3 (public domain) to multiples of the golden ratio.
#[derive(Debug)]
pub(super) struct Intervals(u64);

impl Intervals {
    pub(super) const fn new(seed: u64) -> Intervals {
        Intervals(seed)
    }

    /// Draws a number of bytes, at least 1, whose average is `mean`.
    pub(super) fn draw(&mut self, mean: u64) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (minus_ln(mixed ^ mixed >> 31) * mean as f64) as usize + 1
    }
}

/// Widens the distance between samples while there are too many, so that they cost at most some
/// percent of a core. A sample then stands for correspondingly more bytes, so sums stay unbiased.
#[derive(Debug)]
pub(crate) struct Pace {
    doublings: u32,
    /// Start of the window, and samples in it.
    since: u64,
    count: u32,
}

impl Pace {
    /// The smallest mean distance that neap widens. If the program requests a smaller one, neap
    /// takes all samples.
    pub(crate) const WIDENED: u64 = 512 << 10;
    /// Number of samples in a window at which the distance doubles; equal to 1280 a second. With
    /// fewer than a quarter of it, the distance is halved.
    const MOST: u32 = 128;
    /// Nanoseconds of a window.
    const WINDOW: u64 = 100_000_000;
    const MOST_DOUBLINGS: u32 = 12;

    pub(crate) const fn new() -> Pace {
        Pace { doublings: 0, since: 0, count: 0 }
    }

    /// Counts a sample at the time `now`.
    pub(crate) fn count(&mut self, now: u64) {
        self.count += 1;
        if self.count >= Pace::MOST {
            let soon = now.saturating_sub(self.since) <= Pace::WINDOW;
            self.doublings = (self.doublings + u32::from(soon)).min(Pace::MOST_DOUBLINGS);
        } else if now.saturating_sub(self.since) <= Pace::WINDOW {
            return;
        } else if self.count < Pace::MOST / 4 {
            self.doublings = self.doublings.saturating_sub(1);
        }
        (self.since, self.count) = (now, 0);
    }

    /// Returns the mean distance in force, if `mean` was requested.
    pub(crate) fn mean(&self, mean: u64) -> u64 {
        if mean < Pace::WIDENED { mean } else { mean << self.doublings }
    }
}

/// Minus the natural logarithm of `number` / 2^64, to six digits. 0 counts as 1.
fn minus_ln(number: u64) -> f64 {
    let number = number | 1;
    let zeros = number.leading_zeros();
    // `number` is `mantissa` * 2^(63 - zeros).
    let mantissa = (number << zeros) as f64 / (1_u64 << 63) as f64;
    // ln((1 + z) / (1 - z)) is twice the sum of z^n / n over odd n.
    let z = (mantissa - 1.0) / (mantissa + 1.0);
    let square = z * z;
    let odd = [1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0];
    let ln = 2.0 * z * odd.iter().fold(0.0, |sum, term| sum * square + term);
    f64::from(zeros + 1) * core::f64::consts::LN_2 - ln
}

/// Bytes that a sample of `size` bytes stands for, at one sample in `mean` bytes: its size divided
/// by its probability, 1 - exp(-size / mean). To four digits.
pub(super) fn weight(size: u64, mean: u64) -> u64 {
    /// Times that the exponent is halved. The series needs a small one.
    const HALVINGS: i32 = 6;
    let exponent = (size as f64 / mean as f64).min(32.0);
    let x = exponent / f64::from(1 << HALVINGS);
    // 1 - exp(-x). Twice the exponent: 1 - exp(-2x) is (1 - exp(-x)) * (2 - (1 - exp(-x))).
    let part = x * (1.0 - x / 2.0 * (1.0 - x / 3.0 * (1.0 - x / 4.0 * (1.0 - x / 5.0))));
    let probability = (0..HALVINGS).fold(part, |part, _| part * (2.0 - part));
    // For size 0, the division would be 0 / 0.
    if size == 0 { mean } else { (size as f64 / probability) as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logarithm_is_right_to_six_digits() {
        for number in
            (0..64).flat_map(|bit| [1_u64 << bit, 3 << bit, (1 << bit) - 1, u64::MAX >> bit, 0xabcd_ef01 << bit])
        {
            let number = number.max(1);
            let expected = -((number | 1) as f64 / 2_f64.powi(64)).ln();
            assert!((minus_ln(number) - expected).abs() < 4e-6, "{number}: {}, {expected}", minus_ln(number));
        }
    }

    #[test]
    fn a_sample_stands_for_its_size_by_its_probability() {
        for mean in [1_u64 << 10, 512 << 10, 1 << 30] {
            for size in [1, 16, 1000, 4096, 100_000, 512 << 10, 3 << 20, 1 << 30, 1 << 40] {
                let expected = size as f64 / -(-(size as f64) / mean as f64).exp_m1();
                let found = weight(size, mean) as f64;
                assert!((found / expected - 1.0).abs() < 1e-3, "{size} at {mean}: {found}, {expected}");
            }
        }
        assert_eq!(weight(0, 1024), 1024);
    }

    #[test]
    fn sampling_interval_widens_at_high_rate_and_narrows_at_low() {
        const MEAN: u64 = 1 << 20;
        let mut pace = Pace::new();
        let mut at = 0;
        let mut run = |pace: &mut Pace, per_second: u64, samples: u64| {
            (0..samples).for_each(|_| {
                at += 1_000_000_000 / per_second;
                pace.count(at);
            });
            pace.mean(MEAN) / MEAN
        };
        assert_eq!(run(&mut pace, 1000, 10_000), 1);
        assert_eq!(run(&mut pace, 100_000, 128 * 4), 16);
        assert_eq!(run(&mut pace, 800, 10_000), 16, "neither too many nor few");
        assert_eq!(run(&mut pace, 100, 1000), 1);
        assert_eq!(run(&mut pace, 10_000_000, 1 << 20), 1 << 12, "not without end");
        assert_eq!(pace.mean(Pace::WIDENED - 1), Pace::WIDENED - 1);
    }

    /// Mean and variance, and the share of numbers below the mean, of an exponential distribution.
    #[test]
    fn intervals_are_exponentially_distributed() {
        const SEED: u64 = 20_261_127;
        const COUNT: usize = 200_000;
        let (mut intervals, mean) = (Intervals::new(SEED), 512 << 10);
        let drawn: std::vec::Vec<f64> = (0..COUNT).map(|_| intervals.draw(mean) as f64 / mean as f64).collect();
        let average = drawn.iter().sum::<f64>() / COUNT as f64;
        let variance = drawn.iter().map(|number| (number - average).powi(2)).sum::<f64>() / COUNT as f64;
        let below = drawn.iter().filter(|number| **number < 1.0).count() as f64 / COUNT as f64;
        let expected = 1.0 - 1.0 / core::f64::consts::E;
        assert!((average - 1.0).abs() < 0.01, "seed {SEED}: mean {average}");
        assert!((variance - 1.0).abs() < 0.03, "seed {SEED}: variance {variance}");
        assert!((below - expected).abs() < 0.005, "seed {SEED}: {below} are below the mean");
    }
}
