//! State of releasing memory within calls: counts of frees, and numbers learned from earlier
//! releases. [`in_call`](crate::returning::in_call) has the design, and defines *look* and
//! *surplus*.
//!
//! # Locking
//! A mutex protects the learned numbers. Threads only try to take it.

use crate::state::gated::GatedMutex;
use core::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use neap_base::gate::Inside;
use neap_objects::size_class::Class;

/// Bytes that slow frees return between two looks, at least.
pub(crate) const STEP: u64 = 512 << 10;
/// Least bytes that slow frees return between two looks, while objects in use keep free memory from
/// being released.
pub(crate) const LEAST_STEP: u64 = 4 << 10;
/// A look that releases this many bytes lets the next looks stay frequent, while a burst comes to
/// its end.
pub(crate) const FRUITFUL: u64 = 64 << 10;
/// Looks in a row that release less than [`FRUITFUL`], after which looks become rarer.
pub(crate) const FRUITLESS_LOOKS_MAX: u32 = 32;
/// Nanoseconds after which allocations that survive a burst count as settled. Then single pages
/// between them are released.
pub(crate) const SETTLED: u64 = SECOND / 5;
/// Nanoseconds after which the bound shrinks by an eighth.
pub(crate) const SECOND: u64 = 1_000_000_000;
/// Seconds after which the learned numbers are 0 again.
pub(crate) const FORGOTTEN: u64 = 128;
/// A burst is at its end when the surplus is more than this many times the bytes that keep slabs in
/// use.
const LATE: u64 = 8;
/// It stays at its end as long as the surplus, with what was released of it, is more than this many
/// times these bytes.
const LATE_IN_ALL: u64 = 12;
/// Bytes of surplus above which frees release memory, if nothing was learned.
pub(crate) const HIGH: u64 = 10 << 20;

/// The memory that a free on the slow path returned.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Returned {
    /// Objects of a class. They count as many as the class's largest stack holds.
    Objects(Class),
    /// A run, or a part of one, of so many bytes.
    Run(usize),
}

/// State of releasing memory within calls.
#[derive(Debug)]
pub(crate) struct InCall {
    /// Bytes that slow frees may return before the next look.
    pub(crate) left: AtomicI64,
    /// Resident bytes of free objects at the last look, and the bytes of objects that slow frees
    /// have returned since.
    objects: AtomicU64,
    /// Surplus above which the last look would have released memory. 0 before the first look.
    bound: AtomicU64,
    /// Time from which `bound` may have shrunk, in the platform's nanoseconds.
    expires: AtomicU64,
    /// [`Learned::kept`] at the last look.
    pub(crate) kept: AtomicU64,
    pub(crate) learned: GatedMutex<Learned>,
}

impl InCall {
    pub(crate) const fn new() -> InCall {
        InCall {
            left: AtomicI64::new(HIGH as i64),
            objects: AtomicU64::new(0),
            bound: AtomicU64::new(0),
            expires: AtomicU64::new(0),
            kept: AtomicU64::new(0),
            learned: GatedMutex::new(Learned::new()),
        }
    }

    /// Counts the bytes that a slow free returned. Returns whether a look is due.
    #[inline]
    pub(crate) fn count(&self, returned: Returned) -> bool {
        let bytes = match returned {
            Returned::Run(bytes) => bytes as u64,
            Returned::Objects(class) => {
                let bytes = u64::from(class.most_capacity()) * class.size() as u64;
                // Relaxed, and no atomic addition: heuristic. A later look counts anew.
                self.objects.store(self.objects.load(Relaxed) + bytes, Relaxed);
                bytes
            }
        };
        // Relaxed, and no atomic subtraction: heuristic. A late look finds the same surplus.
        let left = self.left.load(Relaxed) - bytes as i64;
        self.left.store(left, Relaxed);
        left <= 0
    }

    /// Whether the next slow free looks.
    #[cfg(test)]
    pub(crate) fn is_due(&self) -> bool {
        self.left.load(Relaxed) <= 0
    }

    /// Puts the next look off if the surplus is still below its bound: the program has allocated
    /// again what it freed. Returns whether it did. `free_pages` are the resident bytes of free
    /// pages.
    pub(crate) fn put_off(&self, free_pages: u64, now: u64) -> bool {
        if now >= self.expires.load(Relaxed) {
            return false;
        }
        let surplus = self.objects.load(Relaxed).saturating_add(free_pages);
        let below = self.bound.load(Relaxed).checked_sub(surplus);
        below.inspect(|below| self.left.store((*below).max(STEP) as i64, Relaxed)).is_some()
    }

    /// Records the result of a look: bytes that slow frees return before the next one, resident
    /// bytes of free objects, and the bound of the surplus.
    pub(crate) fn note_look(&self, left: u64, objects: u64, bound: u64, now: u64) {
        self.left.store(left as i64, Relaxed);
        self.objects.store(objects, Relaxed);
        self.bound.store(bound, Relaxed);
        self.expires.store(now.saturating_add(SECOND), Relaxed);
    }

    /// Makes the next look count anew, because the bytes that the program keeps have changed.
    pub(crate) fn forget_bound(&self) {
        self.expires.store(0, Relaxed);
    }

    /// Bytes of surplus that stay beyond the fixed bounds, as learned.
    pub(crate) fn kept(&self) -> u64 {
        self.kept.load(Relaxed)
    }

    /// Records that a tick within a call has released `bytes` bytes.
    pub(crate) fn note_given(&self, inside: &Inside<'_>, bytes: u64, now: u64) {
        if let Some(mut learned) = self.learned.try_lock(inside) {
            learned.give(bytes, now);
        }
    }
}

/// Numbers that frees have learned from earlier releases. Sizes are bytes.
#[derive(Debug)]
pub(crate) struct Learned {
    /// Surplus that stays beyond [`LOW`].
    pub(crate) kept: u64,
    /// Bytes that were released lately, and that neap has not taken from the system again.
    pub(crate) given: u64,
    /// Bytes that neap has taken from the system so far.
    pub(crate) grown: u64,
    /// Live bytes at the last look.
    pub(crate) last_live: u64,
    /// Bytes of objects in use that kept free memory from being released, at the last look that
    /// left much surplus.
    pub(crate) live: u64,
    /// Live bytes when a look last found that they had changed much, and the time of that look.
    pub(crate) steady_live: u64,
    pub(crate) steady_since: u64,
    /// One more than the number of looks in a row that released hardly anything although much was
    /// free. 0 if the last look brought the surplus below its bound.
    pub(crate) fruitless: u32,
    /// Bytes that were released lately, by the end of a burst: see [`Learned::is_late`].
    pub(crate) lately: u64,
    /// Time of the last release, or up to which `lately` was aged since, in the platform's
    /// nanoseconds.
    pub(crate) lately_at: u64,
    /// Time up to which `kept` and `given` were aged, in the platform's nanoseconds.
    pub(crate) aged: u64,
}

impl Learned {
    pub(crate) const fn new() -> Learned {
        Learned {
            kept: 0,
            given: 0,
            lately: 0,
            lately_at: 0,
            grown: 0,
            last_live: 0,
            live: 0,
            steady_live: 0,
            steady_since: 0,
            fruitless: 0,
            aged: 0,
        }
    }

    /// Learns from the bytes taken from the system so far (`grown`), from the live bytes, and from
    /// the bytes of a run that was live until this look (`own`). Memory that neap takes for itself
    /// while the program frees is no reason to keep more.
    pub(crate) fn learn(&mut self, grown: u64, live: u64, own: u64, now: u64) {
        self.age(now);
        let more = (live + own).saturating_sub(self.last_live);
        let again = grown.saturating_sub(self.grown).min(self.given).min(more);
        (self.grown, self.last_live) = (grown, live);
        self.given -= again;
        self.lately = self.lately.saturating_sub(again);
        self.kept += again;
    }

    /// Returns the number of bytes that slow frees may return before the next look. The current
    /// look released `gone` bytes and left `rest` bytes of surplus. neap cannot release these,
    /// because `pinning` bytes of objects in use share their slabs.
    ///
    /// The program can free at most the pinning bytes. Towards the end of a burst, few objects
    /// prevent the release of many pages, and no look follows the last free. So the returned number
    /// shrinks with `pinning`. It grows again after [`FRUITLESS_LOOKS_MAX`] looks in a row that
    /// released less than [`FRUITFUL`] bytes.
    pub(crate) fn after_stuck(&mut self, rest: u64, pinning: u64, gone: u64) -> u64 {
        // Looks while the pinning bytes shrink are few anyway. Several looks may pass until they
        // have shrunk by a sixteenth, because a slow free may return few objects.
        let shrinks = pinning < self.live - self.live / 16;
        if shrinks || pinning > self.live {
            self.live = pinning;
        }
        self.fruitless = if shrinks || gone >= FRUITFUL { 1 } else { self.fruitless.saturating_add(1) };
        let step = (rest.min(pinning) / 8).max(LEAST_STEP);
        (step << self.fruitless.saturating_sub(FRUITLESS_LOOKS_MAX).min(16)).min(rest / 2)
    }

    /// Records the live bytes. Returns whether they have neither shrunk by an eighth nor grown to
    /// four times as much for [`SETTLED`].
    pub(crate) fn has_settled(&mut self, live: u64, now: u64) -> bool {
        if live < self.steady_live - self.steady_live / 8 || live / 4 > self.steady_live {
            (self.steady_live, self.steady_since) = (live, now);
        }
        now.saturating_sub(self.steady_since) >= SETTLED
    }

    /// Whether a burst is at its end: `pinning` bytes in use keep most of it from being released.
    /// Releases must not end that by themselves, so what they gave counts as well.
    pub(crate) fn is_late(&self, surplus: u64, pinning: u64) -> bool {
        pinning < (surplus / LATE).max((surplus + self.lately) / LATE_IN_ALL)
    }

    /// Records that `bytes` bytes were released.
    pub(crate) fn give(&mut self, bytes: u64, now: u64) {
        if bytes > 0 {
            self.given += bytes;
            self.lately += bytes;
            self.lately_at = now;
        }
    }

    /// Reduces `kept` by an eighth and `given` by half for every second that has passed, and
    /// `lately` by half for every second since the last release.
    pub(crate) fn age(&mut self, now: u64) {
        let seconds = |since: &mut u64| {
            let seconds = now.saturating_sub(*since) / SECOND;
            *since += seconds * SECOND;
            seconds
        };
        let halved = |bytes: u64, seconds: u64| bytes.checked_shr(seconds.min(64) as u32).unwrap_or(0);
        let passed = seconds(&mut self.aged);
        if passed >= FORGOTTEN {
            self.kept = 0;
        }
        (0..passed.min(FORGOTTEN)).for_each(|_| self.kept -= self.kept.div_ceil(8));
        self.given = halved(self.given, passed);
        self.lately = halved(self.lately, seconds(&mut self.lately_at));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn bound_shrinks_by_an_eighth_a_second() {
        let mut learned = Learned { given: 80, ..Learned::new() };
        learned.learn(64, 64, 0, 0);
        assert_eq!((learned.kept, learned.given), (64, 16));
        learned.learn(64, 64, 0, SECOND - 1);
        assert_eq!((learned.kept, learned.given), (64, 16));
        learned.learn(66, 66, 0, SECOND);
        assert_eq!((learned.kept, learned.given), (58, 6), "two of the eight bytes that may be regretted");
        learned.learn(66, 66, 0, FORGOTTEN * 2 * SECOND);
        assert_eq!((learned.kept, learned.given), (0, 0));
    }

    /// A burst that takes part of a second may lie in two of them.
    #[test]
    fn what_was_released_counts_in_full_for_a_second() {
        let mut learned = Learned::new();
        learned.give(160, SECOND - 1);
        learned.age(2 * SECOND - 2);
        assert_eq!(learned.lately, 160);
        assert!(learned.is_late(8, 13) && !learned.is_late(8, 14), "the surplus itself would allow 1 byte");
        learned.give(0, 2 * SECOND - 2);
        learned.age(2 * SECOND - 1);
        assert_eq!(learned.lately, 80);
        learned.age(60 * SECOND);
        assert_eq!(learned.lately, 0);
    }

    #[test]
    fn growth_while_the_program_frees_is_not_regretted() {
        let mut learned = Learned { given: 80, last_live: 100, ..Learned::new() };
        learned.learn(64, 40, 0, 0);
        assert_eq!((learned.kept, learned.given), (0, 80));
        learned.learn(128, 50, 0, 0);
        assert_eq!((learned.kept, learned.given), (10, 70), "ten bytes more are live");
        learned.learn(192, 50, 30, 0);
        assert_eq!((learned.kept, learned.given), (40, 40), "thirty bytes more were live until this look");
    }

    #[test]
    fn after_stuck_interval_follows_live_and_grows_if_fruitless() {
        let mut learned = Learned::new();
        assert_eq!(learned.after_stuck(40 * MIB, 32 * MIB, 0), 4 * MIB, "an eighth of what may be freed yet");
        assert_eq!(learned.after_stuck(80 * MIB, 90 * MIB, 0), 10 * MIB);
        // Looks that give nothing stay frequent while what is live shrinks.
        let steps = [(); 60].map(|()| learned.after_stuck(80 * MIB, learned.live - learned.live / 8, 0));
        assert!(steps.is_sorted_by(|a, b| a >= b) && steps[59] < MIB / 64, "{steps:?}");
        // Each look may find only a hundredth less.
        let mut live = 4 * MIB;
        let steps = [(); 400].map(|()| {
            live -= live / 100;
            learned.after_stuck(80 * MIB, live, 0)
        });
        assert!(steps.is_sorted_by(|a, b| a >= b) && steps[399] < MIB / 64, "{steps:?}");
        let steps = [(); 40].map(|()| learned.after_stuck(40 * MIB, 4 * MIB, 0));
        assert_eq!((steps[30], steps[31], steps[38]), (MIB / 2, MIB, 20 * MIB));
        assert_eq!(learned.after_stuck(40 * MIB, 4 * MIB, FRUITFUL), MIB / 2);
    }
}
