//! Bytes from one sample to the next: exponentially distributed, so that the samples are a Poisson
//! process.

/// Numbers that look random, from a counter: the finaliser of MurmurHash3 (public domain) over
/// steps of the golden ratio, known as SplitMix64.
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
