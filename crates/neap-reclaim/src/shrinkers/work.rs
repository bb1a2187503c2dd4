//! Number of objects that one visit of a shrinker asks for: arithmetic without state or locks.
//!
//! A pass asks a cache for a part of its objects. The part depends on the priority of the pass, on
//! the cost of recreating an object, and on the deferred work. A visit asks for batches. It defers
//! a remainder below one batch, and objects that a callback did not scan. It defers at most twice
//! the number of objects of the cache.
//!
//! Source: `do_shrink_slab` of Linux, by its published arithmetic.

/// Cost of recreating an object, for a shrinker that does not state it: two seeks.
pub const DEFAULT_SEEKS: u32 = 2;
/// Objects of one scan, for a shrinker that does not state them.
pub const DEFAULT_BATCH: u64 = 128;
/// Priority at which a pass usually begins. The pass counts down to 0, which asks for the most.
pub const FIRST_PRIORITY: u32 = 12;
/// Value of [`ScanPressure::share`] for a group without protection.
pub const WHOLE: u32 = 1024;

/// Shrinkers that the thread of a pass may call: it may hold locks that other shrinkers take.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum ShrinkerFilter {
    /// All shrinkers. The thread holds no lock that they may take.
    All,
    /// Shrinkers that may run in a thread that charges.
    Inline,
    /// The inline shrinkers that are the host's own. The thread charges or allocates for a caller
    /// that has not allowed callbacks.
    Own,
}

/// Pressure of a pass on a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScanPressure {
    /// From [`FIRST_PRIORITY`] down to 0. Each step down asks for about twice as much.
    pub priority: u32,
    /// Unprotected part of the group's usage. [`WHOLE`] stands for all of it.
    pub share: u32,
    /// Whether to ask for at least one batch, or for all objects if there are fewer. Otherwise the
    /// first priorities would ask a small group for nothing.
    pub least: bool,
    /// The shrinkers that may be called.
    pub filter: ShrinkerFilter,
    /// Needed bytes. They bound the first scan: it asks for about as many objects as hold these
    /// bytes, if the group's objects hold all of `usage`. There is no such bound if `usage` is 0.
    pub need: u64,
    /// Bytes that the group uses.
    pub usage: u64,
}

impl ScanPressure {
    /// Returns the pressure on a group without protection, by a thread that may run any callback.
    pub const fn of(priority: u32) -> ScanPressure {
        ScanPressure { priority, share: WHOLE, least: false, filter: ShrinkerFilter::All, need: u64::MAX, usage: 0 }
    }
}

/// Work of one visit of one shrinker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Work {
    freeable: u64,
    batch: u64,
    /// Objects deferred before, and those that this pass adds.
    wanted: u64,
    /// Objects that are still to be requested now.
    total: u64,
    scanned: u64,
    /// Maximum of the next scan. It doubles after each scan, since scanned objects are not always
    /// freed.
    most: u64,
    /// Objects deferred before.
    deferred: u64,
}

impl Work {
    /// Makes the work for `freeable` objects. Earlier passes left `deferred` objects. A `batch` of
    /// 0 stands for [`DEFAULT_BATCH`].
    pub fn new(freeable: u64, deferred: u64, seeks: u32, batch: u64, pressure: ScanPressure) -> Work {
        let batch = if batch == 0 { DEFAULT_BATCH } else { batch };
        let (priority, most) = (pressure.priority.min(u64::BITS - 1), freeable.saturating_mul(2));
        let delta = delta(freeable, seeks, pressure);
        let asked = (deferred >> priority).saturating_add(delta).min(most);
        // At least so many that `next` returns a scan.
        let least = if pressure.least { batch.min(freeable) } else { 0 };
        let (wanted, total) = (deferred.saturating_add(delta), asked.max(least));
        Work { freeable, batch, wanted, total, scanned: 0, most: needed(freeable, pressure).min(batch), deferred }
    }

    /// Returns the number of objects for the next scan; `None` if no more are requested now.
    pub fn next(&self) -> Option<u64> {
        let worth_it = self.freeable > 0 && (self.total >= self.batch || self.total >= self.freeable);
        (worth_it && self.total > 0).then(|| self.most.min(self.total))
    }

    /// Records a scan. Returns false if it scanned no objects. The caller must stop then, since it
    /// would call such a callback for ever.
    pub fn done(&mut self, scanned: u64) -> bool {
        self.total = self.total.saturating_sub(scanned);
        self.scanned = self.scanned.saturating_add(scanned);
        self.most = self.most.saturating_mul(2).min(self.batch);
        debug_assert!(self.most <= self.batch && self.total <= self.wanted.max(self.batch));
        scanned > 0
    }

    /// Records that enough was freed: objects that this pass added and did not request are not
    /// deferred.
    pub fn is_enough(&mut self) {
        self.wanted = self.wanted.min(self.deferred);
    }

    /// Returns the objects scanned so far.
    pub fn scanned(&self) -> u64 {
        self.scanned
    }

    /// Returns the objects that are left for later passes.
    pub fn deferred(&self) -> u64 {
        self.wanted.saturating_sub(self.scanned).min(self.freeable.saturating_mul(2))
    }
}

/// Returns how many objects are likely to hold the needed bytes, at least one, if objects are all
/// that a group uses.
fn needed(freeable: u64, pressure: ScanPressure) -> u64 {
    let objects = u128::from(pressure.need) * u128::from(freeable) / u128::from(pressure.usage.max(1));
    if pressure.usage == 0 { u64::MAX } else { u64::try_from(objects).unwrap_or(u64::MAX).max(1) }
}

/// Returns the objects that a pass adds to the request.
fn delta(freeable: u64, seeks: u32, pressure: ScanPressure) -> u64 {
    let whole = match seeks {
        // Recreating them costs nothing.
        0 => u128::from(freeable / 2),
        seeks => u128::from(freeable.checked_shr(pressure.priority).unwrap_or(0)) * 4 / u128::from(seeks),
    };
    u64::try_from(whole * u128::from(pressure.share) / u128::from(WHOLE)).unwrap_or(u64::MAX)
}

/// Returns the part of a scan for one of several lists with `total` objects together, in proportion
/// to its `count`.
///
/// The part is at least one for a list with objects, so that a small list beside large ones is not
/// left out for ever. So the parts of many lists may add up to more than `to_scan`. A caller that
/// stops at `to_scan` begins with another list each time.
///
/// ```
/// let lists = [900, 99, 1];
/// let parts = lists.map(|count| neap_reclaim::share(100, count, lists.iter().sum()));
/// assert_eq!(parts, [90, 9, 1]);
/// ```
pub fn share(to_scan: u64, count: u64, total: u64) -> u64 {
    let part = u128::from(to_scan) * u128::from(count) / u128::from(total.max(1));
    u64::try_from(part).unwrap_or(u64::MAX).max(1).min(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Runs a callback that scans all requested objects. Returns its scans and the deferred
    /// objects.
    fn run(freeable: u64, deferred: u64, seeks: u32, pressure: ScanPressure) -> (Vec<u64>, u64) {
        let (mut work, mut scans) = (Work::new(freeable, deferred, seeks, 0, pressure), Vec::new());
        while let Some(next) = work.next() {
            scans.push(next);
            assert!(work.done(next));
        }
        (scans, work.deferred())
    }
    use std::vec::Vec;

    #[test]
    fn the_published_vectors_hold_to_the_digit() {
        assert_eq!(run(10_000, 0, 2, ScanPressure::of(12)), (std::vec![], 4));
        assert_eq!(run(10_000, 0, 2, ScanPressure::of(4)), (std::vec![128; 9], 98));
        assert_eq!(run(10_000, 0, 2, ScanPressure::of(0)), (std::vec![128; 156], 32));
        assert_eq!(run(50, 0, 2, ScanPressure::of(0)), (std::vec![100], 0));
        assert_eq!(run(10, 0, 0, ScanPressure::of(12)), (std::vec![], 5));
        assert_eq!(run(10, 0, 0, ScanPressure::of(0)), (std::vec![], 5));
    }

    #[test]
    fn what_is_deferred_comes_back_by_priority_and_is_bounded() {
        // By hand: 512 >> 4 = 32, and 1250; 10 scans of 128 leave 2 of those, and 480 were not
        // asked for.
        assert_eq!(run(10_000, 512, 2, ScanPressure::of(4)), (std::vec![128; 10], 512 + 1250 - 1280));
        // At most twice the number of objects.
        assert_eq!(run(100, 1_000_000, 2, ScanPressure::of(12)), (std::vec![128], 200));
        assert_eq!(run(100, u64::MAX, 2, ScanPressure::of(0)), (std::vec![128], 200));
        assert_eq!(run(0, 77, 2, ScanPressure::of(0)), (std::vec![], 0));
    }

    #[test]
    fn a_small_cache_gives_a_batch_where_it_is_asked_to() {
        let least = |priority| ScanPressure { least: true, ..ScanPressure::of(priority) };
        assert_eq!(run(50, 0, 2, least(12)), (std::vec![50], 0));
        assert_eq!(run(10_000, 0, 2, least(12)), (std::vec![128], 0));
        // Objects that are requested anyway do not change.
        assert_eq!(run(10_000, 0, 2, least(4)), run(10_000, 0, 2, ScanPressure::of(4)));
    }

    #[test]
    fn protection_leaves_a_part() {
        let half = ScanPressure { share: WHOLE / 2, ..ScanPressure::of(4) };
        assert_eq!(run(10_000, 0, 2, half), (std::vec![128; 4], 625 - 512));
        assert_eq!(run(10_000, 0, 2, ScanPressure { share: 0, ..ScanPressure::of(0) }), (std::vec![], 0));
    }

    #[test]
    fn a_scan_that_looks_at_nothing_is_no_progress() {
        let mut work = Work::new(10_000, 0, 2, 0, ScanPressure::of(0));
        assert!(!work.done(0));
        assert_eq!((work.scanned(), work.deferred()), (0, 20_000));
    }

    /// Of 256 objects in 16 MiB, two hold 128 KiB.
    #[test]
    fn scan_is_bounded_by_the_need_and_doubles_without_progress() {
        let pressure = ScanPressure { need: 128 << 10, usage: 16 << 20, ..ScanPressure::of(0) };
        let scans = |pressure: ScanPressure| {
            let mut work = Work::new(256, 0, 2, 32, pressure);
            core::array::from_fn(|_| {
                let next = work.next().unwrap();
                assert!(work.done(next));
                next
            })
        };
        assert_eq!(scans(pressure), [2, 4, 8, 16, 32, 32, 32]);
        assert_eq!(scans(ScanPressure { need: 1, ..pressure }), [1, 2, 4, 8, 16, 32, 32]);
        assert_eq!(scans(ScanPressure { usage: 0, ..pressure }), [32; 7]);
    }

    #[test]
    fn what_is_not_asked_for_since_there_is_enough_is_not_owed() {
        let mut work = Work::new(10_000, 0, 2, 0, ScanPressure::of(4));
        assert!(work.done(128));
        work.is_enough();
        assert_eq!(work.deferred(), 0);
        let mut work = Work::new(10_000, 512, 2, 0, ScanPressure::of(4));
        assert!(work.done(128));
        work.is_enough();
        assert_eq!(work.deferred(), 512 - 128);
    }

    #[test]
    fn no_list_is_left_out_of_a_scan() {
        assert_eq!(share(128, 1, 1_000_000), 1);
        assert_eq!(share(128, 0, 1_000_000), 0);
        assert_eq!(share(128, 500_000, 1_000_000), 64);
        assert_eq!(share(128, 3, 3), 3);
        assert_eq!(share(u64::MAX, u64::MAX, u64::MAX), u64::MAX);
        assert_eq!(share(128, 1, 0), 1);
    }

    fn any_pressure() -> impl Strategy<Value = ScanPressure> {
        (0..=12_u32, 0..=WHOLE, any::<bool>()).prop_map(|(priority, share, least)| ScanPressure {
            share,
            least,
            ..ScanPressure::of(priority)
        })
    }

    /// Numbers of every size.
    fn number() -> impl Strategy<Value = u64> {
        (0..=64_u32, any::<u64>()).prop_map(|(bits, number)| number.checked_shr(bits).unwrap_or(0))
    }

    proptest! {
        /// No object is requested twice, only objects above the bound are lost, and it ends.
        #[test]
        fn what_is_asked_for_is_scanned_or_deferred(
            (freeable, deferred, seeks, batch) in (number(), number(), 0..5_u32, 0..1000_u64),
            pressure in any_pressure(),
            parts in proptest::collection::vec(0..300_u64, 0..40),
        ) {
            let mut work = Work::new(freeable, deferred, seeks, batch, pressure);
            let (most, added) = (freeable.saturating_mul(2), delta(freeable, seeks, pressure));
            let mut scanned = 0_u64;
            for part in parts {
                let Some(next) = work.next() else { break };
                let batch = if batch == 0 { DEFAULT_BATCH } else { batch };
                prop_assert!(next > 0 && next <= batch && next <= most.max(batch.min(freeable)));
                scanned = scanned.saturating_add(part);
                if !work.done(part) {
                    break;
                }
            }
            prop_assert_eq!(work.scanned(), scanned);
            prop_assert_eq!(work.deferred(), deferred.saturating_add(added).saturating_sub(scanned).min(most));
        }

        #[test]
        fn one_step_of_priority_asks_for_about_twice_as_much(freeable in 1..1_u64 << 40, priority in 0..12_u32) {
            let [more, less] = [priority, priority + 1].map(|priority| delta(freeable, 2, ScanPressure::of(priority)));
            prop_assert!(more / 2 >= less && more / 2 <= less + 2);
        }

        #[test]
        fn shares_are_of_what_there_is(to_scan in 1..10_000_u64, counts in proptest::collection::vec(0..1_000_000_u64, 1..20)) {
            let total = counts.iter().sum();
            let shares: Vec<u64> = counts.iter().map(|&count| share(to_scan, count, total)).collect();
            for (&count, &share) in counts.iter().zip(&shares) {
                prop_assert!(share <= count && (share > 0) == (count > 0));
            }
            prop_assert!(shares.iter().sum::<u64>() <= to_scan + counts.len() as u64);
        }
    }
}
