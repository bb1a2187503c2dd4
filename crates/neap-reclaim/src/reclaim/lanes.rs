//! Who runs callbacks at the moment, since when, and which shrinkers are not to be asked for some time.
//!
//! Sits between passes and whoever watches over them. A thread that is about to run callbacks takes a lane, and says there what it runs; whoever waits for
//! it looks through the lanes, and writes one off that has been in one callback for longer than [`BUDGET`]: the shrinker is a culprit from then on, and
//! nobody runs it while that callback, or another one of it that was written off, is not back. A thread that comes back to a lane that was written off ends, if it is a
//! reclaimer: it has been replaced.
//!
//! What a callback is blamed for is the time of a CPU that it took, since a thread that is not
//! scheduled can do nothing about that. A callback that took long only by the clock on the wall (it
//! slept, or waited for a lock, or the machine was busy, or the process was stopped) is blamed from
//! the third time in a row on, and not for a time in which threads that watch came late themselves
//! ([`Lanes::looked`]). Culprits are barred for a second, and for twice as long each further time,
//! up to a minute; each [`DECAY`] without a penalty takes one doubling off. Who of the two was
//! first is decided by the lane's word ([`Seat`]). A callback writes its own lane and nothing else,
//! unless it was written off; one mutex, a leaf, for writing off and blaming, and for coming back
//! from that. Nothing here waits, and nobody is stopped.

use super::board::MOST_LOST;
use super::seat::{Running, Seat};
use core::cell::Cell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crossbeam_utils::CachePadded;
use neap_base::Mutex;
use neap_base::platform::nodes::MAX_NODES;
use neap_groups::Name;

/// How long one callback may take, in nanoseconds, unless its shrinker says otherwise.
pub const BUDGET: u64 = 100_000_000;
/// For how long a shrinker is barred the first time, and how often that is doubled.
const BARRED: u64 = 1_000_000_000;
const DOUBLINGS: u32 = 6;
/// How long it takes until a penalty is forgotten, in nanoseconds.
const DECAY: u64 = 30_000_000_000;
/// Callbacks in a row that were too long by the clock on the wall alone, the last of which is
/// blamed.
const ROW: u32 = 3;
/// Threads of the program's that may run callbacks at a time.
const LANES: usize = 64;
/// Lanes for reclaimers alone: for as many as work, and as many as may not come back. So none is
/// ever without one.
const RECLAIMERS: usize = MAX_NODES + MOST_LOST as usize;
/// How much later than it wanted to a thread that watches may come and still be on time, in
/// nanoseconds.
const LATE: u64 = BUDGET / 4;
/// How much of a CPU's time may be that of callbacks before: see [`Lanes::excess_of`].
pub const SLACK: u64 = BUDGET / 4;
/// Culprits that are known at a time.
const CULPRITS: usize = 64;
/// Bytes of a culprit's name.
const NAME: usize = 48;
/// The name of one that is gone.
const GONE: &str = "(unregistered)";

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

/// Why a callback took longer than its budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Excess {
    /// By the time of the CPU that its thread took.
    Busy,
    /// By the clock on the wall: it waited.
    Waited,
    /// By the clock on the wall, while threads that watch came late as well.
    Starved,
}

/// A thread that may run callbacks.
#[derive(Debug, Default)]
struct Place {
    seat: Seat,
    /// The record that counts what runs here among those that do not come back, plus one; under the mutex.
    record: AtomicU32,
}

/// A shrinker that was blamed.
#[derive(Debug, Default)]
struct Record {
    /// 0: nobody's.
    shrinker: AtomicU64,
    /// Until when it is not asked, and how many callbacks of it were written off and are not back: until then it is not asked either.
    until: AtomicU64,
    stuck: AtomicU32,
    /// Penalties that are not forgotten yet, when the last one was, and callbacks in a row that
    /// waited for too long.
    penalties: AtomicU32,
    last: AtomicU64,
    row: AtomicU32,
    /// How often for what, by [`Verdict`].
    counts: [AtomicU32; Verdict::ALL.len()],
    name: [AtomicU64; NAME / 8],
}

/// A shrinker that was blamed, as told to whoever asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Culprit {
    /// Its id, as a number.
    pub shrinker: u64,
    /// Until when it is not asked, in nanoseconds of whoever blamed it; `u64::MAX` while a callback of it does not come back.
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
    /// Those of reclaimers lie behind the others.
    places: [CachePadded<Place>; LANES + RECLAIMERS],
    records: [Record; CULPRITS],
    /// Records that were ever used.
    known: AtomicU32,
    blaming: Mutex<()>,
    /// When a thread that watches last came as soon as it wanted to, and when one came late.
    on_time: AtomicU64,
    late: AtomicU64,
    /// How often anybody was blamed, by [`Verdict`].
    counts: [AtomicU32; Verdict::ALL.len()],
}

impl Default for Lanes {
    fn default() -> Lanes {
        Lanes {
            places: core::array::from_fn(|_| CachePadded::default()),
            records: core::array::from_fn(|_| Record::default()),
            known: AtomicU32::new(0),
            blaming: Mutex::new(()),
            on_time: AtomicU64::new(0),
            late: AtomicU64::new(0),
            counts: Default::default(),
        }
    }
}

/// Being about to run callbacks, until this is dropped.
#[derive(Debug)]
pub struct Lane<'l> {
    lanes: &'l Lanes,
    place: &'l Place,
    /// When its last callback began.
    began: Cell<u64>,
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
    /// Takes a lane for this thread, the reclaimer of a number, or none for 0; `None` where too
    /// many threads of the program's run callbacks.
    pub fn enter(&self, reclaimer: u32) -> Option<Lane<'_>> {
        let (of_program, of_reclaimers) = self.places.split_at(LANES);
        let places = if reclaimer == 0 { of_program } else { of_reclaimers };
        let place = places.iter().find(|place| place.seat.take(reclaimer))?;
        Some(Lane { lanes: self, place, began: Cell::new(0) })
    }

    /// Whether a thread of the program's can take a lane at this moment.
    pub fn is_room(&self) -> bool {
        self.places[..LANES].iter().any(|place| !place.seat.is_taken())
    }

    fn record(&self, shrinker: u64) -> Option<&Record> {
        let known = self.known.load(Ordering::Relaxed) as usize;
        self.records[..known].iter().find(|record| record.shrinker.load(Ordering::Relaxed) == shrinker)
    }

    /// Whether a shrinker is not to be asked now.
    pub fn is_barred(&self, shrinker: u64, now: u64) -> bool {
        self.record(shrinker).is_some_and(|record| now < record.until())
    }

    /// Blames a shrinker, which is barred for some time then. Inside the gate.
    pub fn blame(&self, shrinker: u64, name: Option<Name>, verdict: Verdict, now: u64) {
        let _blaming = self.blaming.lock();
        if let Some(record) = self.count(shrinker, name, verdict, now) {
            record.bar(now);
        }
    }

    /// A thread that watches looked at a moment, so much later than it wanted to.
    pub fn looked(&self, now: u64, late_by: u64) {
        let moment = if late_by > LATE { &self.late } else { &self.on_time };
        // Relaxed: a hint, which publishes nothing.
        moment.store(now, Ordering::Relaxed);
    }

    /// Why a callback took too long that began at a moment, with the CPU time of its thread since
    /// then, at most.
    pub fn excess_of(&self, began: u64, busy: u64, budget: u64) -> Excess {
        if busy > budget.saturating_add(SLACK) {
            return Excess::Busy;
        }
        let [on_time, late] = [&self.on_time, &self.late].map(|moment| moment.load(Ordering::Relaxed));
        if on_time > began && late < began { Excess::Waited } else { Excess::Starved }
    }

    /// Blames a shrinker for a callback that took too long and was not written off. Inside the
    /// gate.
    pub fn overran(&self, shrinker: u64, name: Option<Name>, excess: Excess, now: u64) {
        let _blaming = self.blaming.lock();
        if let Some(record) = self.count(shrinker, name, Verdict::Overran, now) {
            record.charge(excess, now);
        }
    }

    /// Counts a verdict; answers the shrinker's record, if there is room for one. Under the mutex.
    fn count(&self, shrinker: u64, name: Option<Name>, verdict: Verdict, now: u64) -> Option<&Record> {
        self.counts[verdict as usize].fetch_add(1, Ordering::Relaxed);
        let name = name.as_ref().map_or(GONE, Name::as_str);
        let record = self.record(shrinker).or_else(|| self.new_record(shrinker, name, now))?;
        record.counts[verdict as usize].fetch_add(1, Ordering::Relaxed);
        Some(record)
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
            let until = |index: &usize| self.records[*index].until();
            (0..CULPRITS).min_by_key(until).filter(|index| until(index) <= now)?
        };
        let record = &self.records[index];
        for count in record.counts.iter().chain([&record.penalties, &record.row]) {
            count.store(0, Ordering::Relaxed);
        }
        let mut bytes = name.bytes();
        for word in &record.name {
            let part = core::array::from_fn(|_| bytes.next().unwrap_or(0));
            word.store(u64::from_ne_bytes(part), Ordering::Relaxed);
        }
        record.shrinker.store(shrinker, Ordering::Relaxed);
        self.known.fetch_max(index as u32 + 1, Ordering::Relaxed);
        Some(record)
    }

    /// Writes off callbacks that have run for longer than their budget, blames their shrinkers, by
    /// the `name` of one, and calls `each` with them; each once. Inside the gate.
    pub fn write_off(&self, now: u64, name: impl Fn(u64) -> Option<Name>, mut each: impl FnMut(Overdue)) {
        for place in &self.places {
            let is_overdue = |running: &Running| now > running.due;
            let Some(running) = place.seat.running().filter(is_overdue) else { continue };
            let (shrinker, name) = (running.shrinker, name(running.shrinker));
            {
                // The mutex first: 1. W writes it off. 2. The callback is back, and hears of it. 3. It waits here until what is known of it says that it was stuck.
                let _blaming = self.blaming.lock();
                if !place.seat.write_off(&running) {
                    continue;
                }
                let record = self.count(shrinker, name, Verdict::Overran, now);
                record.inspect(|record| _ = record.stuck.fetch_add(1, Ordering::Relaxed));
                let index = record.and_then(|record| self.records.element_offset(record)).map_or(0, |index| index + 1);
                place.record.store(index as u32, Ordering::Relaxed);
            }
            each(Overdue { shrinker, reclaimer: running.reclaimer });
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
                until: record.until(),
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
        self.records.iter().for_each(|record| record.stuck.store(0, Ordering::Relaxed));
        for place in &self.places {
            if !place.seat.is_mine() {
                place.seat.forget();
            } else if place.seat.is_off() {
                self.stuck_at(place).inspect(|record| _ = record.stuck.fetch_add(1, Ordering::Relaxed));
            }
        }
    }

    fn stuck_at(&self, place: &Place) -> Option<&Record> {
        self.records.get((place.record.load(Ordering::Relaxed) as usize).checked_sub(1)?)
    }
}

impl Record {
    /// What a callback is blamed for that took too long. Under the mutex.
    fn charge(&self, excess: Excess, now: u64) {
        let row = self.row.load(Ordering::Relaxed) + u32::from(excess == Excess::Waited);
        let is_blamed = excess == Excess::Busy || row >= ROW;
        self.row.store(if is_blamed { 0 } else { row }, Ordering::Relaxed);
        if is_blamed {
            self.bar(now);
        }
    }

    /// Until when it is not asked; all bits set while nobody knows.
    fn until(&self) -> u64 {
        if self.stuck.load(Ordering::Relaxed) > 0 { u64::MAX } else { self.until.load(Ordering::Relaxed) }
    }

    /// It is not asked for some time. Under the mutex.
    fn bar(&self, now: u64) {
        let forgotten = now.saturating_sub(self.last.load(Ordering::Relaxed)) / DECAY;
        let before = u64::from(self.penalties.load(Ordering::Relaxed)).saturating_sub(forgotten);
        let doublings = before.min(u64::from(DOUBLINGS)) as u32;
        self.penalties.store(doublings + 1, Ordering::Relaxed);
        self.last.store(now, Ordering::Relaxed);
        self.until.store(now.saturating_add(BARRED << doublings), Ordering::Relaxed);
    }
}

impl Lane<'_> {
    /// A callback begins that may take so long, unless its shrinker is barred; answers whether.
    pub fn began(&self, shrinker: u64, now: u64, budget: u64) -> bool {
        let begins = !self.lanes.is_barred(shrinker, now);
        if begins {
            self.began.set(now);
            self.place.seat.begin(shrinker, now.saturating_add(budget));
        }
        begins
    }

    /// When the last callback began.
    pub fn last_began(&self) -> u64 {
        self.began.get()
    }

    /// The callback is back; answers for how long it ran, and whether it was written off meanwhile: then [`Lane::is_back`] is to follow.
    pub fn ended(&self, now: u64) -> (u64, bool) {
        let (shrinker, due) = self.place.seat.last();
        if now <= due
            && let Some(record) = self.lanes.record(shrinker)
        {
            record.row.store(0, Ordering::Relaxed);
        }
        (now.saturating_sub(self.began.get()), self.place.seat.end())
    }

    /// The callback that was written off is back: its shrinker is barred for some more time if it
    /// is to be blamed, and, unless another one of it is stuck, no longer. Inside the gate.
    pub fn is_back(&self, now: u64, excess: Excess) {
        let _blaming = self.lanes.blaming.lock();
        if let Some(record) = self.lanes.stuck_at(self.place) {
            // A child has forgotten all that were stuck.
            let stuck = record.stuck.load(Ordering::Relaxed);
            record.stuck.store(stuck.saturating_sub(1), Ordering::Relaxed);
            record.charge(excess, now);
        }
    }
}

impl Drop for Lane<'_> {
    fn drop(&mut self) {
        self.place.seat.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;
    use std::vec::Vec;

    const SECOND: u64 = 1_000_000_000;

    fn named(name: &str) -> Option<Name> {
        let shared = neap_groups::SharedName::default();
        shared.set(name);
        Some(shared.get())
    }

    /// All that are written off now, by whoever looks.
    fn overdue(lanes: &Lanes, now: u64) -> Vec<Overdue> {
        let mut all = Vec::new();
        lanes.write_off(now, |_| named("seven"), |overdue| all.push(overdue));
        all
    }

    fn culprits(lanes: &Lanes) -> Vec<Culprit> {
        let mut all = Vec::new();
        lanes.each_culprit(|culprit| all.push(culprit));
        all
    }

    #[test]
    fn a_callback_that_runs_for_too_long_is_written_off_once_and_barred_until_it_is_back() {
        let lanes = Lanes::default();
        let lane = lanes.enter(1).unwrap();
        assert!(lane.began(7, 1000, BUDGET));
        assert_eq!(overdue(&lanes, 1000 + BUDGET), []);
        assert_eq!(overdue(&lanes, 1001 + BUDGET), [Overdue { shrinker: 7, reclaimer: 1 }]);
        assert_eq!(overdue(&lanes, SECOND), [], "once");
        assert!(lanes.is_barred(7, u64::MAX - 1) && !lanes.is_barred(8, 0));
        assert!(!lanes.enter(0).unwrap().began(7, SECOND, BUDGET));
        assert_eq!(lane.ended(3 * SECOND), (3 * SECOND - 1000, true));
        lane.is_back(3 * SECOND, Excess::Busy);
        assert!(lanes.is_barred(7, 4 * SECOND - 1) && !lanes.is_barred(7, 4 * SECOND));
        assert!(lane.began(7, 4 * SECOND, BUDGET));
        assert_eq!(lane.ended(4 * SECOND + 5), (5, false));
        let [culprit] = culprits(&lanes)[..] else { panic!("one culprit") };
        assert_eq!((culprit.name(), culprit.counts, lanes.counts()), ("seven", [1, 0, 0], [1, 0, 0]));
    }

    #[test]
    fn who_is_blamed_again_is_barred_for_longer_up_to_a_minute() {
        let lanes = Lanes::default();
        let barred = [1, 2, 4, 8, 16, 32, 64, 64].map(|seconds| seconds * SECOND);
        for seconds in barred {
            lanes.blame(1, named("one"), Verdict::Lied, 0);
            assert!(lanes.is_barred(1, seconds - 1) && !lanes.is_barred(1, seconds));
        }
    }

    /// The level falls by one for each half minute.
    #[test]
    fn penalties_are_forgotten_in_time() {
        let lanes = Lanes::default();
        let barred_at = |now: u64, seconds: u64| {
            lanes.overran(1, named("one"), Excess::Busy, now);
            assert!(lanes.is_barred(1, now + seconds * SECOND - 1) && !lanes.is_barred(1, now + seconds * SECOND));
        };
        [1, 2, 4, 8].into_iter().for_each(|seconds| barred_at(0, seconds));
        barred_at(DECAY, 8);
        barred_at(3 * DECAY, 4);
        barred_at(20 * DECAY, 1);
    }

    #[test]
    fn waiting_is_blamed_the_third_time_in_a_row_and_being_starved_never() {
        let lanes = Lanes::default();
        for excess in [Excess::Waited, Excess::Starved, Excess::Waited, Excess::Starved] {
            lanes.overran(1, named("one"), excess, 0);
            assert!(!lanes.is_barred(1, 0), "{excess:?}");
        }
        lanes.overran(1, named("one"), Excess::Waited, 0);
        assert!(lanes.is_barred(1, SECOND - 1) && !lanes.is_barred(1, SECOND));
        // A callback that is in time ends the row.
        let lane = lanes.enter(1).unwrap();
        for _ in 0..ROW {
            (1..ROW).for_each(|_| lanes.overran(1, named("one"), Excess::Waited, SECOND));
            assert!(lane.began(1, SECOND, BUDGET));
            assert_eq!(lane.ended(SECOND + BUDGET), (BUDGET, false));
        }
    }

    #[test]
    fn a_callback_that_was_written_off_and_was_not_busy_bars_no_longer_than_it_runs() {
        let lanes = Lanes::default();
        let lane = lanes.enter(1).unwrap();
        assert!(lane.began(7, 0, BUDGET));
        assert_eq!(overdue(&lanes, SECOND).len(), 1);
        assert!(lanes.is_barred(7, u64::MAX - 1));
        assert!(lane.ended(SECOND).1);
        lane.is_back(SECOND, Excess::Starved);
        assert!(!lanes.is_barred(7, SECOND));
    }

    #[test]
    fn why_a_callback_took_long_is_known_by_its_cpu_and_by_those_who_watch() {
        let lanes = Lanes::default();
        let excess = |busy| lanes.excess_of(100, busy, BUDGET);
        assert_eq!([excess(BUDGET), excess(BUDGET + SLACK + 1)], [Excess::Starved, Excess::Busy], "no thread watched");
        lanes.looked(200, LATE);
        assert_eq!(excess(0), Excess::Waited);
        lanes.looked(300, LATE + 1);
        assert_eq!([excess(0), lanes.excess_of(400, 0, BUDGET)], [Excess::Starved; 2]);
        lanes.looked(500, 0);
        assert_eq!([excess(0), lanes.excess_of(400, 0, BUDGET)], [Excess::Starved, Excess::Waited]);
    }

    #[test]
    fn a_budget_is_its_shrinkers_own() {
        let lanes = Lanes::default();
        let [short, long] = [1, 2].map(|reclaimer| lanes.enter(reclaimer).unwrap());
        assert!(short.began(6, 0, 10) && long.began(7, 0, SECOND));
        assert_eq!(overdue(&lanes, 11), [Overdue { shrinker: 6, reclaimer: 1 }]);
        assert_eq!(overdue(&lanes, SECOND), []);
        assert_eq!(overdue(&lanes, SECOND + 1), [Overdue { shrinker: 7, reclaimer: 2 }]);
    }

    #[test]
    fn reclaimers_have_lanes_however_many_threads_run_callbacks() {
        let lanes = Lanes::default();
        let all: Vec<_> = (0..LANES).map(|_| lanes.enter(0).unwrap()).collect();
        assert!(lanes.enter(0).is_none());
        let others: Vec<_> = (1..=RECLAIMERS as u32).map(|reclaimer| lanes.enter(reclaimer).unwrap()).collect();
        drop((all, others));
    }

    #[test]
    fn a_name_is_cut_between_characters() {
        let lanes = Lanes::default();
        lanes.blame(1, named(&"ä".repeat(28)), Verdict::Panicked, 0);
        lanes.blame(2, named(&format!("x{}", "ä".repeat(27))), Verdict::Panicked, 0);
        let names: Vec<_> = culprits(&lanes).iter().map(|culprit| culprit.name().len()).collect();
        assert_eq!(names, [48, 47]);
    }

    #[test]
    fn when_all_records_are_taken_those_who_are_not_barred_any_more_give_theirs() {
        let lanes = Lanes::default();
        (1..=CULPRITS as u64).for_each(|id| lanes.blame(id, named("old"), Verdict::Lied, id));
        lanes.blame(99, named("new"), Verdict::Lied, 1);
        assert!(!lanes.is_barred(99, 1), "all others are barred");
        lanes.blame(99, named("new"), Verdict::Lied, 1 + SECOND);
        assert!(lanes.is_barred(99, 1 + SECOND) && !lanes.is_barred(1, 0));
        assert_eq!((culprits(&lanes).len(), lanes.counts()[1]), (CULPRITS, CULPRITS as u32 + 2));
    }

    #[test]
    fn one_that_is_gone_gives_its_record_first() {
        let lanes = Lanes::default();
        (1..=CULPRITS as u64).for_each(|id| lanes.blame(id, named("old"), Verdict::Lied, id));
        lanes.forget(7);
        assert_eq!(culprits(&lanes).iter().filter(|culprit| culprit.shrinker == 7).count(), 1, "it is still known");
        lanes.blame(99, named("new"), Verdict::Lied, 1);
        assert_eq!(culprits(&lanes)[6].shrinker, 99);
    }

    #[test]
    fn lanes_are_given_back_and_a_child_forgets_all_but_its_own() {
        let lanes = Lanes::default();
        std::thread::scope(|scope| {
            let others = scope.spawn(|| {
                let mut all: Vec<_> = (1..LANES).map(|_| lanes.enter(0).unwrap()).collect();
                assert!(all[0].began(6, 0, BUDGET));
                assert_eq!(overdue(&lanes, SECOND).len(), 1);
                drop(all.pop());
                all.push(lanes.enter(0).unwrap());
                // They are as in a parent, when it forks.
                all.into_iter().for_each(core::mem::forget);
            });
            others.join().unwrap();
        });
        let own = lanes.enter(0).unwrap();
        assert!(own.began(5, 0, BUDGET) && lanes.enter(0).is_none() && lanes.is_barred(6, 0));
        lanes.forget_others();
        assert!(!lanes.is_barred(6, 0));
        assert_eq!(overdue(&lanes, SECOND), [Overdue { shrinker: 5, reclaimer: 0 }]);
        assert!(lanes.enter(0).is_some() && lanes.is_barred(5, u64::MAX - 1));
        lanes.forget_others();
        assert!(lanes.is_barred(5, u64::MAX - 1), "its own is as stuck there");
        assert!(own.ended(SECOND).1);
        own.is_back(SECOND, Excess::Busy);
        assert!(lanes.is_barred(5, SECOND) && !lanes.is_barred(5, 3 * SECOND));
    }

    /// 1. W looks. 2. The callback returns, and perhaps another one begins. 3. W goes on.
    #[test]
    fn a_callback_that_comes_back_while_somebody_looks_is_not_written_off() {
        for again in [None, Some(7), Some(8)] {
            let lanes = Lanes::default();
            let lane = lanes.enter(1).unwrap();
            assert!(lane.began(7, 1000, BUDGET));
            let name = |shrinker| {
                assert_eq!((shrinker, lane.ended(SECOND)), (7, (SECOND - 1000, false)));
                assert!(again.is_none_or(|again| lane.began(again, 1000, BUDGET)));
                named("seven")
            };
            lanes.write_off(SECOND, name, |overdue| panic!("{overdue:?}"));
            assert!(!lanes.is_barred(7, 0) && culprits(&lanes).is_empty());
            assert!(again.is_none() || !lane.ended(SECOND).1);
        }
    }

    #[test]
    fn a_shrinker_is_barred_until_the_last_of_its_callbacks_that_are_stuck_is_back() {
        let lanes = Lanes::default();
        let [first, second] = [1, 2].map(|reclaimer| lanes.enter(reclaimer).unwrap());
        assert!(first.began(7, 0, BUDGET) && second.began(7, 0, BUDGET));
        assert_eq!(overdue(&lanes, SECOND).len(), 2);
        lanes.blame(7, named("seven"), Verdict::Panicked, SECOND);
        assert!(lanes.is_barred(7, u64::MAX - 1), "both are stuck");
        assert!(first.ended(SECOND).1);
        first.is_back(SECOND, Excess::Busy);
        assert!(lanes.is_barred(7, u64::MAX - 1), "one is");
        assert!(second.ended(SECOND).1);
        second.is_back(SECOND, Excess::Busy);
        assert!(lanes.is_barred(7, SECOND) && !lanes.is_barred(7, 5 * SECOND), "three verdicts: four seconds");
    }

    #[test]
    fn what_is_stuck_where_there_is_no_record_for_it_bars_nobody() {
        let lanes = Lanes::default();
        let lane = lanes.enter(1).unwrap();
        assert!(lane.began(99, 0, BUDGET));
        (1..=CULPRITS as u64).for_each(|id| lanes.blame(id, named("old"), Verdict::Lied, SECOND));
        assert_eq!(overdue(&lanes, SECOND).len(), 1);
        lanes.blame(99, named("new"), Verdict::Lied, 3 * SECOND);
        assert!(lane.ended(3 * SECOND).1);
        lane.is_back(3 * SECOND, Excess::Busy);
        assert!(lanes.is_barred(99, 3 * SECOND) && !lanes.is_barred(99, 4 * SECOND));
    }
}
