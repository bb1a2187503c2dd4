//! A generator of random numbers from a seed, which are the same on every machine. It is a linear
//! congruential generator that returns its upper bits. It is not for secrets.

/// A generator.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The generator number `stream` of a seed.
    pub fn new(seed: u64, stream: u64) -> Random {
        // The finaliser of MurmurHash3 (public domain), so that neighbouring streams have nothing
        // in common.
        let mut state = seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for factor in [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53] {
            state = (state ^ (state >> 33)).wrapping_mul(factor);
        }
        Random(state)
    }

    /// Returns a number below `bound`. `bound` must not be 0.
    #[inline]
    pub fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (((self.0 >> 32) * u64::from(bound)) >> 32) as u32
    }

    /// A number from `least` to `most`.
    #[inline]
    pub fn between(&mut self, least: u32, most: u32) -> u32 {
        least + self.below(most - least + 1)
    }

    /// About `mean`, from half of it to one and a half.
    #[inline]
    pub fn about(&mut self, mean: u32) -> u32 {
        mean / 2 + self.below(mean + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_differ_and_repeat() {
        let draw = |seed, stream| {
            let mut random = Random::new(seed, stream);
            [(); 8].map(|()| random.below(1000))
        };
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(1, 3));
        assert_ne!(draw(1, 2), draw(2, 2));
    }

    #[test]
    fn numbers_stay_in_their_bounds_and_reach_both_ends() {
        let mut random = Random::new(7, 0);
        let drawn: Vec<u32> = (0..1000).map(|_| random.between(3, 6)).collect();
        assert_eq!((drawn.iter().min(), drawn.iter().max()), (Some(&3), Some(&6)));
        assert!((0..1000).all(|_| (50..=150).contains(&random.about(100))));
    }
}
