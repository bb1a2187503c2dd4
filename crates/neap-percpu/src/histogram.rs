//! A histogram of values, counted on every CPU.
//!
//! It has 8 buckets for each doubling of the value, so it records a value to within an eighth.
//! Recording is one addition to this CPU's word.

use crate::data::{OffsetsOf, Refused, Wait};
use crate::embedder::Host;
use crate::rows::Owner;
use crate::words::Words;
use core::sync::atomic::{AtomicI64, Ordering};

/// Buckets: 8 for the values below 8, and 8 for each of 61 doublings.
const BUCKETS: usize = 8 * 62;

/// A histogram of 64-bit values. Dropping it frees its memory. If its owner was closed before, the
/// caller must forget the histogram instead of dropping it.
#[derive(Debug)]
pub struct PerCpuHistogram<H: Host> {
    words: Words<H>,
    /// Counts whose addition to a CPU's word was refused.
    shared: [AtomicI64; BUCKETS],
}

/// The bucket of a value.
fn bucket(value: u64) -> usize {
    let shift = (value | 8).ilog2() - 3;
    if value < 8 { value as usize } else { shift as usize * 8 + (value >> shift) as usize }
}

/// The smallest value of a bucket.
fn lowest(bucket: usize) -> u64 {
    if bucket < 8 { bucket as u64 } else { (8 + bucket as u64 % 8) << (bucket / 8 - 1) }
}

impl<H: Host> PerCpuHistogram<H> {
    /// Creates an empty histogram: 4 KiB for each CPU.
    ///
    /// # Errors
    /// As for [`PerCpuData::allocate`](crate::PerCpuData::allocate).
    pub fn new(host: H, owner: Owner, wait: Wait) -> Result<Self, Refused> {
        let words = Words::new(host, owner, BUCKETS, OffsetsOf::AllCpus, wait)?;
        Ok(PerCpuHistogram { words, shared: [const { AtomicI64::new(0) }; BUCKETS] })
    }

    /// Counts a value. Never waits; signal-safe.
    #[inline]
    pub fn record(&self, value: u64) {
        let bucket = bucket(value);
        if !self.words.add(&raw const self.words.offsets, bucket, 1) {
            self.shared[bucket].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Calls `each` with the smallest value of each nonempty bucket, and its count.
    pub fn each(&self, mut each: impl FnMut(u64, u64)) {
        for (bucket, shared) in self.shared.iter().enumerate() {
            let count = self.words.sum(bucket) + shared.load(Ordering::Relaxed);
            if count > 0 {
                each(lowest(bucket), count as u64);
            }
        }
    }

    /// Number of values that were counted.
    pub fn count(&self) -> u64 {
        let mut all = 0;
        self.each(|_, count| all += count);
        all
    }

    /// A quantile: the smallest value of the bucket in which `millionths` of all values are
    /// reached; `None` without values.
    pub fn quantile(&self, millionths: u32) -> Option<u64> {
        let all = self.count();
        let rank = (u128::from(all) * u128::from(millionths)).div_ceil(1_000_000) as u64;
        let (mut seen, mut answer) = (0, None);
        self.each(|value, count| {
            if seen < rank.max(1) {
                answer = Some(value);
            }
            seen += count;
        });
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other_and_hold_their_values() {
        assert_eq!(
            (bucket(0), bucket(7), bucket(8), bucket(15), bucket(16), bucket(u64::MAX)),
            (0, 7, 8, 15, 16, BUCKETS - 1)
        );
        for at in 0..BUCKETS {
            assert_eq!(bucket(lowest(at)), at);
            assert!(at == 0 || bucket(lowest(at) - 1) == at - 1);
        }
    }
}
