//! Histogram of times of operations. Times below 32 ns are exact. Longer times have an error of at
//! most a thirty-second part.

/// Parts of each doubling.
const PARTS: u64 = 32;
const BUCKETS: usize = 64 * PARTS as usize;

/// Counts of times in nanoseconds.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    sum: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { counts: vec![0; BUCKETS], total: 0, sum: 0, max: 0 }
    }
}

fn bucket(time: u64) -> usize {
    if time < PARTS {
        return time as usize;
    }
    let doublings = u64::from(time.ilog2()) - 5;
    (doublings * PARTS + (time >> doublings)) as usize
}

/// The least time of a bucket.
fn least(bucket: u64) -> u64 {
    if bucket < 2 * PARTS {
        return bucket;
    }
    let doublings = bucket / PARTS - 1;
    (bucket - doublings * PARTS) << doublings
}

impl Histogram {
    /// Counts `times` operations that took `time` each.
    pub fn add(&mut self, time: u64, times: u64) {
        self.counts[bucket(time)] += times;
        self.total += times;
        self.sum += time * times;
        if times > 0 {
            self.max = self.max.max(time);
        }
    }

    /// Operations counted.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Nanoseconds of all of them together.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// The longest time.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Returns the time that a share of the operations, 0 to 1, did not exceed. 0 without
    /// operations.
    pub fn percentile(&self, share: f64) -> u64 {
        let wanted = (self.total as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return least(bucket as u64).min(self.max);
            }
        }
        self.max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_the_bucket_that_begins_at_or_just_below_it() {
        for time in (0..5000).chain((10..60).map(|bits| (1 << bits) + 12345)) {
            let begin = least(bucket(time) as u64);
            assert!(begin <= time && time - begin <= time / PARTS, "{time} is in the bucket of {begin}");
        }
    }

    #[test]
    fn percentiles_are_those_of_what_was_added() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.percentile(0.5), 0);
        histogram.add(10, 985);
        histogram.add(4000, 15);
        assert_eq!((histogram.percentile(0.5), histogram.percentile(0.98)), (10, 10));
        assert_eq!((histogram.percentile(0.99) / 128, histogram.max(), histogram.total()), (31, 4000, 1000));
    }
}
