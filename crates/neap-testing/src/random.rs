//! Random numbers for tests, and the seed that repeats a run.

/// A generator of numbers (SplitMix64); a test prints its seed.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// Returns the next 64 bits.
    #[expect(clippy::should_implement_trait, reason = "it has no end")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// Returns the seed of a random test: `NEAP_SEED`, or a fixed one. It is printed, so that a failing
/// run can be repeated.
pub fn seed() -> u64 {
    let seed = number("NEAP_SEED", 1);
    println!("NEAP_SEED={seed} repeats this run");
    seed
}

/// Returns a number from the environment, or the default.
pub fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}
