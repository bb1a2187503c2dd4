//! The least size of lists for a policy that knows the future. It is a lower bound for every
//! policy.
//!
//! A gap is the time between a CPU's free of a page and the page's next use there. Lists are last
//! in, first out, so a gap ends with the allocation that finds as many pages free again as before
//! the free. A list that keeps a page over a gap holds it for the length of the gap. Otherwise the
//! page comes from the zone again. So the best choice with a given number of zone pages keeps the
//! pages of the shortest gaps. A block counts as single pages, and batches cost nothing. So the
//! bound is below the attainable size.

/// Buckets for each doubling of a gap's length.
const PARTS: u32 = 16;

/// Gaps of about one length.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    gaps: u64,
    /// Measured nanoseconds of all these gaps.
    time: u64,
}

/// Gaps that ended during the measured time.
#[derive(Clone, Debug, Default)]
pub struct Gaps {
    /// Start of the measured time.
    since: u64,
    /// Buckets by length, the shortest gaps first.
    buckets: Vec<Bucket>,
    taken: u64,
}

fn bucket(length: u64) -> usize {
    let length = length.max(u64::from(PARTS));
    let part = (length >> (length.ilog2() - PARTS.ilog2())) as u32 - PARTS;
    ((length.ilog2() - PARTS.ilog2()) * PARTS + part) as usize
}

impl Gaps {
    /// No gaps, measured from `since` on.
    pub(crate) fn new(since: u64) -> Gaps {
        Gaps { since, ..Gaps::default() }
    }

    /// Records that a CPU allocates `pages` pages. `freed` has the times at which the CPU freed the
    /// pages that it might have kept.
    pub(crate) fn take(&mut self, freed: &mut Vec<u64>, pages: u32, now: u64) {
        self.taken += u64::from(pages);
        for at in (0..pages).map_while(|_| freed.pop()) {
            let index = bucket(now - at);
            if self.buckets.len() <= index {
                self.buckets.resize(index + 1, Bucket::default());
            }
            let Bucket { gaps, time } = &mut self.buckets[index];
            (*gaps, *time) = (*gaps + 1, *time + now - at.max(self.since));
        }
    }

    /// Returns the fewest pages in lists, on average over `time` nanoseconds, with which at most
    /// this share of the allocated pages comes from the zone. `None` if no list is long enough.
    pub fn listed(&self, zone_share: f64, time: u64) -> Option<f64> {
        let mut wanted = self.taken as f64 * (1.0 - zone_share);
        let mut held = 0.0;
        for &Bucket { gaps, time } in self.buckets.iter().filter(|bucket| bucket.gaps > 0) {
            let kept = wanted.clamp(0.0, gaps as f64);
            wanted -= kept;
            held += time as f64 * kept / gaps as f64;
        }
        // Less than a page is a rounding error.
        (wanted < 1.0).then_some(held / time as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other_and_are_as_wide_as_a_sixteenth() {
        for length in [1, 16, 17, 1000, 123_456_789, u64::MAX / 2] {
            assert!(bucket(length) <= bucket(length + length / 8 + 1), "{length}");
            assert!(bucket(length + length / 8 + 16) > bucket(length), "{length}");
        }
    }

    #[test]
    fn the_shortest_gaps_are_kept_first() {
        let mut gaps = Gaps::new(0);
        // The CPU frees four pages at 0, 100, 200 and 300. It allocates them 1000 later, in reverse
        // order.
        let mut freed = vec![0, 100, 200, 300];
        for now in [1300, 1400, 1500, 1600, 1700] {
            gaps.take(&mut freed, 1, now);
        }
        let tenths = |share| gaps.listed(share, 1000).map(|pages| (pages * 10.0).round());
        assert_eq!(
            [1.0, 0.8, 0.6, 0.2].map(tenths),
            [0, 10, 22, 10 + 12 + 14 + 16].map(|tenths| Some(f64::from(tenths)))
        );
        assert_eq!(tenths(0.0), None, "the fifth was never free");
    }

    #[test]
    fn gap_begun_before_measuring_counts_only_its_measured_part() {
        let mut gaps = Gaps::new(900);
        gaps.take(&mut vec![0], 1, 1000);
        assert_eq!(gaps.listed(0.0, 100), Some(1.0));
    }
}
