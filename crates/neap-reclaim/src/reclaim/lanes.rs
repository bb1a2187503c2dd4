//! Who runs callbacks at the moment, since when, and which shrinkers are not to be asked for some time.
//!
//! Sits between passes and whoever watches over them. A thread that is about to run callbacks takes a lane, and says there what it runs; whoever waits for
//! it looks through the lanes, and writes one off that has been in one callback for longer than [`BUDGET`]: the shrinker is a culprit from then on, and
//! nobody runs it while that callback is not back. A thread that comes back to a lane that was written off ends, if it is a reclaimer: it has been
//! replaced. Culprits are barred for a second, and for twice as long each further time, up to a minute. A callback writes its own lane and nothing else; one mutex, a leaf,
//! for blaming. Nothing here waits, and nobody is stopped.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use crossbeam_utils::CachePadded;
use neap_base::Mutex;
use neap_base::sync::me;

/// How long one callback may take, in nanoseconds.
pub const BUDGET: u64 = 100_000_000;
/// For how long a shrinker is barred the first time, and how often that is doubled.
const BARRED: u64 = 1_000_000_000;
const DOUBLINGS: u32 = 6;
/// Threads that may run callbacks at a time.
const LANES: usize = 64;
/// Culprits that are known at a time.
const CULPRITS: usize = 64;
/// Bytes of a culprit's name.
const NAME: usize = 48;

/// What a shrinker is blamed for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Verdict {
    /// It took longer than [`BUDGET`].
    Overran = 0,
    /// Its answers cannot be true.
    Lied = 1,
    /// It panicked.
    Panicked = 2,
}

impl Verdict {
    /// All of them, in the order of their numbers.
    pub const ALL: [Verdict; 3] = [Verdict::Overran, Verdict::Lied, Verdict::Panicked];

    /// As it is called in reports.
    pub const fn name(self) -> &'static str {
        ["overran", "lied", "panicked"][self as usize]
    }
}

/// A thread that may run callbacks.
#[derive(Debug, Default)]
struct Seat {
    taken: AtomicBool,
    /// The thread, and its number among the reclaimers; 0 for one that is none.
    owner: AtomicUsize,
    reclaimer: AtomicU32,
    /// Odd while a callback runs.
    turn: AtomicU32,
    /// The turn that was written off; 0: none.
    written_off: AtomicU32,
    /// The shrinker whose callback runs, and since when.
    shrinker: AtomicU64,
    since: AtomicU64,
}

/// A shrinker that was blamed.
#[derive(Debug, Default)]
struct Record {
    /// 0: nobody's.
    shrinker: AtomicU64,
    /// Until when it is not asked; all bits set while a callback of it that was written off is not back.
    until: AtomicU64,
    /// How often for what, by [`Verdict`].
    counts: [AtomicU32; Verdict::ALL.len()],
    name: [AtomicU64; NAME / 8],
}

/// A shrinker that was blamed, as told to whoever asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Culprit {
    /// Its id, as a number.
    pub shrinker: u64,
    /// Until when it is not asked, in nanoseconds; `u64::MAX` while a callback of it does not come back.
    pub until: u64,
    /// How often for what, by [`Verdict`].
    pub counts: [u32; Verdict::ALL.len()],
    /// The beginning of its name, and zeroes.
    pub name: [u8; NAME],
}

impl Culprit {
    /// Its name, as far as it is kept.
    pub fn name(&self) -> &str {
        let end = self.name.iter().position(|&byte| byte == 0).unwrap_or(NAME);
        let whole = |end: usize| core::str::from_utf8(&self.name[..end]).ok();
        // It may have been cut within a character.
        (0..=end).rev().find_map(whole).unwrap_or("")
    }
}

/// All lanes, and all who were blamed.
#[derive(Debug)]
pub struct Lanes {
    seats: [CachePadded<Seat>; LANES],
    records: [Record; CULPRITS],
    /// Records that were ever used.
    known: AtomicU32,
    blaming: Mutex<()>,
    /// How often anybody was blamed, by [`Verdict`].
    counts: [AtomicU32; Verdict::ALL.len()],
}

impl Default for Lanes {
    fn default() -> Lanes {
        Lanes {
            seats: core::array::from_fn(|_| CachePadded::default()),
            records: core::array::from_fn(|_| Record::default()),
            known: AtomicU32::new(0),
            blaming: Mutex::new(()),
            counts: Default::default(),
        }
    }
}

/// Being about to run callbacks, until this is dropped.
#[derive(Debug)]
pub struct Lane<'l> {
    lanes: &'l Lanes,
    seat: &'l Seat,
}

/// A callback that has run for too long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Overdue {
    /// Whose it is.
    pub shrinker: u64,
    /// The number of the reclaimer that runs it, which is to be replaced; 0: a thread of somebody's.
    pub reclaimer: u32,
}

impl Lanes {
    /// Takes a lane for this thread, the reclaimer of a number, or none for 0; `None` where too many threads run callbacks.
    pub fn enter(&self, reclaimer: u32) -> Option<Lane<'_>> {
        let take = |seat: &&CachePadded<Seat>| {
            // Acquire pairs with the Release in `Lane::drop`.
            seat.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let seat = self.seats.iter().find(take)?;
        seat.owner.store(me(), Ordering::Relaxed);
        seat.reclaimer.store(reclaimer, Ordering::Relaxed);
        Some(Lane { lanes: self, seat })
    }

    fn record(&self, shrinker: u64) -> Option<&Record> {
        let known = self.known.load(Ordering::Relaxed) as usize;
        self.records[..known].iter().find(|record| record.shrinker.load(Ordering::Relaxed) == shrinker)
    }

    /// Whether a shrinker is not to be asked now.
    pub fn is_barred(&self, shrinker: u64, now: u64) -> bool {
        self.record(shrinker).is_some_and(|record| now < record.until.load(Ordering::Relaxed))
    }

    /// Blames a shrinker, which is barred for some time then; `stuck`: until it comes back. Inside the gate.
    pub fn blame(&self, shrinker: u64, name: &str, verdict: Verdict, now: u64, stuck: bool) {
        let _blaming = self.blaming.lock();
        self.counts[verdict as usize].fetch_add(1, Ordering::Relaxed);
        let Some(record) = self.record(shrinker).or_else(|| self.new_record(shrinker, name, now)) else { return };
        record.counts[verdict as usize].fetch_add(1, Ordering::Relaxed);
        let until = if stuck { u64::MAX } else { now.saturating_add(record.penalty()) };
        record.until.store(until, Ordering::Relaxed);
    }

    /// A shrinker is gone: its record is known for as long as nobody else needs it.
    pub fn forget(&self, shrinker: u64) {
        if let Some(record) = self.record(shrinker) {
            record.until.store(0, Ordering::Relaxed);
        }
    }

    /// A record that was never used, or that of somebody who may be asked again.
    fn new_record(&self, shrinker: u64, name: &str, now: u64) -> Option<&Record> {
        let known = self.known.load(Ordering::Relaxed) as usize;
        let index = if known < CULPRITS {
            known
        } else {
            let until = |index: &usize| self.records[*index].until.load(Ordering::Relaxed);
            (0..CULPRITS).min_by_key(until).filter(|index| until(index) <= now)?
        };
        let record = &self.records[index];
        record.counts.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        let mut bytes = name.bytes();
        for word in &record.name {
            let part = core::array::from_fn(|_| bytes.next().unwrap_or(0));
            word.store(u64::from_ne_bytes(part), Ordering::Relaxed);
        }
        record.shrinker.store(shrinker, Ordering::Relaxed);
        self.known.fetch_max(index as u32 + 1, Ordering::Relaxed);
        Some(record)
    }

    /// Writes off callbacks that have run for longer than [`BUDGET`], and calls `each` with them; each once.
    pub fn write_off(&self, now: u64, mut each: impl FnMut(Overdue)) {
        for seat in &self.seats {
            // Acquire pairs with the Release in `Lane::began`: what runs in that turn, or a later one.
            let turn = seat.turn.load(Ordering::Acquire);
            let (shrinker, since) = (seat.shrinker.load(Ordering::Relaxed), seat.since.load(Ordering::Relaxed));
            let runs = turn % 2 == 1 && seat.written_off.load(Ordering::Relaxed) != turn;
            if !runs || now.saturating_sub(since) <= BUDGET || seat.turn.load(Ordering::Relaxed) != turn {
                continue;
            }
            // A turn that is just over is written off in vain: nobody looks at its number again.
            if seat.written_off.swap(turn, Ordering::Relaxed) != turn {
                each(Overdue { shrinker, reclaimer: seat.reclaimer.load(Ordering::Relaxed) });
            }
        }
    }

    /// Calls `each` with all who were blamed, as far as they are known.
    pub fn each_culprit(&self, mut each: impl FnMut(Culprit)) {
        for record in &self.records[..self.known.load(Ordering::Relaxed) as usize] {
            let mut name = [0; NAME];
            for (bytes, word) in name.chunks_exact_mut(8).zip(&record.name) {
                bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
            }
            each(Culprit {
                shrinker: record.shrinker.load(Ordering::Relaxed),
                until: record.until.load(Ordering::Relaxed),
                counts: record.counts.each_ref().map(|count| count.load(Ordering::Relaxed)),
                name,
            });
        }
    }

    /// How often anybody was blamed so far, by [`Verdict`].
    pub fn counts(&self) -> [u32; Verdict::ALL.len()] {
        self.counts.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// In a forked child: nobody else runs anything, and what does not come back there may be asked here. This thread keeps its lane.
    pub fn forget_others(&self) {
        for seat in self.seats.iter().filter(|seat| seat.owner.load(Ordering::Relaxed) != me()) {
            seat.turn.store(0, Ordering::Relaxed);
            seat.written_off.store(0, Ordering::Relaxed);
            seat.taken.store(false, Ordering::Relaxed);
        }
        for record in &self.records {
            let _ = record.until.compare_exchange(u64::MAX, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

impl Record {
    fn penalty(&self) -> u64 {
        let times: u32 = self.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum();
        BARRED << times.saturating_sub(1).min(DOUBLINGS)
    }
}

impl Lane<'_> {
    /// A callback begins, unless its shrinker is barred; answers whether.
    pub fn began(&self, shrinker: u64, now: u64) -> bool {
        if self.lanes.is_barred(shrinker, now) {
            return false;
        }
        self.seat.shrinker.store(shrinker, Ordering::Relaxed);
        self.seat.since.store(now, Ordering::Relaxed);
        self.seat.turn.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `write_off`.
        true
    }

    /// The callback is back; answers for how long it ran, and whether it was written off meanwhile. Where it was, its shrinker is barred for some more
    /// time, and no longer.
    pub fn ended(&self, now: u64) -> (u64, bool) {
        let turn = self.seat.turn.fetch_add(1, Ordering::Relaxed);
        let was_written_off = self.seat.written_off.load(Ordering::Relaxed) == turn;
        if was_written_off && let Some(record) = self.lanes.record(self.seat.shrinker.load(Ordering::Relaxed)) {
            record.until.store(now.saturating_add(record.penalty()), Ordering::Relaxed);
        }
        (now.saturating_sub(self.seat.since.load(Ordering::Relaxed)), was_written_off)
    }
}

impl Drop for Lane<'_> {
    fn drop(&mut self) {
        self.seat.taken.store(false, Ordering::Release); // Pairs with the Acquire in `Lanes::enter`.
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;
    use std::vec::Vec;

    const SECOND: u64 = 1_000_000_000;

    fn culprits(lanes: &Lanes) -> Vec<Culprit> {
        let mut all = Vec::new();
        lanes.each_culprit(|culprit| all.push(culprit));
        all
    }

    #[test]
    fn a_callback_that_runs_for_too_long_is_written_off_once_and_barred_until_it_is_back() {
        let lanes = Lanes::default();
        let lane = lanes.enter(1).unwrap();
        assert!(lane.began(7, 1000));
        let overdue = |now| {
            let mut all = Vec::new();
            lanes.write_off(now, |overdue| all.push(overdue));
            all
        };
        assert_eq!(overdue(1000 + BUDGET), []);
        assert_eq!(overdue(1001 + BUDGET), [Overdue { shrinker: 7, reclaimer: 1 }]);
        lanes.blame(7, "seven", Verdict::Overran, BUDGET, true);
        assert_eq!(overdue(SECOND), [], "once");
        assert!(lanes.is_barred(7, u64::MAX - 1) && !lanes.is_barred(8, 0));
        assert!(!lanes.enter(0).unwrap().began(7, SECOND));
        assert_eq!(lane.ended(3 * SECOND), (3 * SECOND - 1000, true));
        assert!(lanes.is_barred(7, 4 * SECOND - 1) && !lanes.is_barred(7, 4 * SECOND));
        assert!(lane.began(7, 4 * SECOND));
        assert_eq!(lane.ended(4 * SECOND + 5), (5, false));
        let [culprit] = culprits(&lanes)[..] else { panic!("one culprit") };
        assert_eq!((culprit.name(), culprit.counts, lanes.counts()), ("seven", [1, 0, 0], [1, 0, 0]));
    }

    #[test]
    fn who_is_blamed_again_is_barred_for_longer_up_to_a_minute() {
        let lanes = Lanes::default();
        let barred = [1, 2, 4, 8, 16, 32, 64, 64].map(|seconds| seconds * SECOND);
        for seconds in barred {
            lanes.blame(1, "one", Verdict::Lied, 0, false);
            assert!(lanes.is_barred(1, seconds - 1) && !lanes.is_barred(1, seconds));
        }
    }

    #[test]
    fn a_name_is_cut_between_characters() {
        let lanes = Lanes::default();
        lanes.blame(1, &"ä".repeat(40), Verdict::Panicked, 0, false);
        lanes.blame(2, &format!("x{}", "ä".repeat(40)), Verdict::Panicked, 0, false);
        let names: Vec<_> = culprits(&lanes).iter().map(|culprit| culprit.name().len()).collect();
        assert_eq!(names, [48, 47]);
    }

    #[test]
    fn when_all_records_are_taken_those_who_are_not_barred_any_more_give_theirs() {
        let lanes = Lanes::default();
        (1..=CULPRITS as u64).for_each(|id| lanes.blame(id, "old", Verdict::Lied, id, false));
        lanes.blame(99, "new", Verdict::Lied, 1, false);
        assert!(!lanes.is_barred(99, 1), "all others are barred");
        lanes.blame(99, "new", Verdict::Lied, 1 + SECOND, false);
        assert!(lanes.is_barred(99, 1 + SECOND) && !lanes.is_barred(1, 0));
        assert_eq!((culprits(&lanes).len(), lanes.counts()[1]), (CULPRITS, CULPRITS as u32 + 2));
    }

    #[test]
    fn one_that_is_gone_gives_its_record_first() {
        let lanes = Lanes::default();
        (1..=CULPRITS as u64).for_each(|id| lanes.blame(id, "old", Verdict::Lied, id, false));
        lanes.forget(7);
        assert_eq!(culprits(&lanes).iter().filter(|culprit| culprit.shrinker == 7).count(), 1, "it is still known");
        lanes.blame(99, "new", Verdict::Lied, 1, false);
        assert_eq!(culprits(&lanes)[6].shrinker, 99);
    }

    #[test]
    fn lanes_are_given_back_and_a_child_forgets_all_but_its_own() {
        let lanes = Lanes::default();
        std::thread::scope(|scope| {
            let others = scope.spawn(|| {
                let mut all: Vec<_> = (1..LANES).map(|_| lanes.enter(0).unwrap()).collect();
                assert!(all[0].began(6, 0));
                lanes.blame(6, "six", Verdict::Overran, 0, true);
                drop(all.pop());
                all.push(lanes.enter(1).unwrap());
                // They are as in a parent, when it forks.
                all.into_iter().for_each(core::mem::forget);
            });
            others.join().unwrap();
        });
        let own = lanes.enter(0).unwrap();
        assert!(own.began(5, 0) && lanes.enter(0).is_none());
        lanes.forget_others();
        assert!(!lanes.is_barred(6, 0));
        let mut overdue = Vec::new();
        lanes.write_off(SECOND, |callback| overdue.push(callback.shrinker));
        assert_eq!((overdue, lanes.enter(0).is_some()), (Vec::from([5]), true));
    }
}
