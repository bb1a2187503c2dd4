//! Watchdog of callbacks: which threads run callbacks, since when, and which shrinkers are barred.
//!
//! # Design
//!
//! 1. A thread that is about to run callbacks takes a slot. There it publishes the shrinker and the
//!    time by which the callback must end.
//! 2. A watching thread looks through the slots. It writes off a callback that has run longer than
//!    its budget ([`BUDGET`] by default). If no thread watched when the budget was used up, the
//!    callback gets one more [`BUDGET`], since the process may have been stopped.
//! 3. No thread asks the shrinker until its written-off callbacks have returned.
//! 4. A reclaimer that returns from a callback that was written off ends: it has been replaced.
//!
//! A shrinker is blamed at once for a callback that exceeded its budget in CPU time. A callback
//! that took long only by wall time slept, waited for a lock, or ran on a busy machine or in a
//! stopped process. Its shrinker is blamed from the third time in a row on. A time in which
//! watching threads came late themselves does not count ([`Watchdog::looked`]).
//!
//! A blamed shrinker is barred for a second, and for twice as long each further time, up to 64 s.
//! Each [`DECAY`] without a penalty takes one doubling off.
//!
//! # Locking
//!
//! A thread writes its own slot, and its shrinker's count of slow callbacks in a row, without a
//! lock. One mutex protects writing off, blaming, and returning from a callback that was written
//! off. No other lock is taken under it. No function here waits for a callback.
//!
//! # Concurrency
//!
//! The slot's word decides whether the watcher or the returning callback was first
//! ([`CallbackState`]).

use super::callback_state::{CallbackState, Running};
use super::job_queue::LOST_MAX;
use core::cell::Cell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crossbeam_utils::CachePadded;
use neap_base::gate::Inside;
use neap_base::platform::nodes::MAX_NODES;
use neap_base::{Mutex, listed_enum};
use neap_groups::Name;

/// Time that one callback may take, in nanoseconds, unless its shrinker has a budget of its own.
pub const BUDGET: u64 = 100_000_000;
/// First time that a shrinker is barred, in nanoseconds, and how often that is doubled at most.
const BARRED: u64 = 1_000_000_000;
const DOUBLINGS: u32 = 6;
/// Time after which one penalty is forgotten, in nanoseconds.
const DECAY: u64 = 30_000_000_000;
/// Number of callbacks in a row that took too long by wall time alone, after which the shrinker is
/// blamed.
const ROW: u32 = 3;
/// Threads of the program that may run callbacks at a time.
const PROGRAM_SLOTS: usize = 64;
/// Slots for reclaimers alone: the maximum number that work, and the maximum number that may be
/// stuck. So a reclaimer always finds one.
const RECLAIMERS: usize = MAX_NODES + LOST_MAX as usize;
/// Delay up to which a watching thread counts as on time, in nanoseconds.
const LATE: u64 = BUDGET / 4;
/// CPU time beyond the budget, in nanoseconds, that may be that of earlier callbacks: see
/// [`Watchdog::excess_of`].
pub const SLACK: u64 = BUDGET / 4;
/// Maximum number of known culprits.
const CULPRITS: usize = 64;
/// Bytes that are kept of a culprit's name.
const NAME: usize = 48;
/// Name of a shrinker that was unregistered.
const GONE: &str = "(unregistered)";

listed_enum! {
    /// Reason for which a shrinker is blamed.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[repr(u32)]
    pub enum Misbehaviour {
        /// A callback took longer than its budget.
        Overran = "overran",
        /// Its answers are impossible.
        Lied = "lied",
        /// It panicked.
        Panicked = "panicked",
    }
}

/// Reason for which a callback took longer than its budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Excess {
    /// Its thread used that much CPU time.
    Busy,
    /// It waited: only the wall time was too long.
    Waited,
    /// Only the wall time was too long, and watching threads came late as well.
    Starved,
}

/// A slot of a thread that may run callbacks.
#[derive(Debug, Default)]
struct CallbackSlot {
    state: CallbackState,
    /// Index plus one of the record that counts this slot's callback as stuck; 0 for none.
    /// Protected by the mutex.
    record: AtomicU32,
    /// Deadline of the callback that was overdue when a watching thread first saw it, and the time
    /// when that thread saw it. Protected by the mutex.
    doubted: AtomicU64,
    doubted_at: AtomicU64,
}

impl CallbackSlot {
    /// Returns whether an overdue callback is to be written off. It is if a thread watched when its
    /// time was over, or found it overdue a [`BUDGET`] ago. The caller holds the mutex.
    fn is_given_up(&self, running: &Running, now: u64, seen_from: Option<u64>) -> bool {
        if seen_from.is_some_and(|from| from <= running.due) {
            return true;
        }
        if self.doubted.swap(running.due, Ordering::Relaxed) != running.due {
            self.doubted_at.store(now, Ordering::Relaxed);
        }
        now >= self.doubted_at.load(Ordering::Relaxed).saturating_add(BUDGET)
    }
}

/// A shrinker that was blamed.
#[derive(Debug, Default)]
struct Blamed {
    /// 0: the record is free.
    shrinker: AtomicU64,
    /// Time until which the shrinker is not asked. Number of its stuck callbacks, which were
    /// written off and have not returned. While there are any, the shrinker is not asked, either.
    until: AtomicU64,
    stuck: AtomicU32,
    /// Number of penalties that are not forgotten, the time of the last penalty, and the number of
    /// callbacks in a row that only waited too long.
    penalties: AtomicU32,
    last: AtomicU64,
    row: AtomicU32,
    /// Number of blames by [`Misbehaviour`].
    counts: [AtomicU32; Misbehaviour::ALL.len()],
    name: [AtomicU64; NAME / 8],
}

/// Report of a shrinker that was blamed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Culprit {
    /// The shrinker's id, as a number.
    pub shrinker: u64,
    /// Time until which it is not asked, in nanoseconds of the caller's clock; `u64::MAX` while a
    /// callback of it is stuck.
    pub until: u64,
    /// Number of blames by [`Misbehaviour`].
    pub counts: [u32; Misbehaviour::ALL.len()],
    /// The beginning of its name, padded by zeroes.
    #[cfg_attr(feature = "serde", serde(serialize_with = "serialize_name"))]
    pub name: [u8; NAME],
}

impl Culprit {
    /// Returns the beginning of the name, up to 48 bytes.
    pub fn name(&self) -> &str {
        text(&self.name)
    }
}

/// Returns the text of a name that is padded by zeroes.
fn text(name: &[u8; NAME]) -> &str {
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(NAME);
    let whole = |end: usize| core::str::from_utf8(&name[..end]).ok();
    // The name may have been cut within a character.
    (0..=end).rev().find_map(whole).unwrap_or("")
}

#[cfg(feature = "serde")]
fn serialize_name<S: serde::Serializer>(name: &[u8; NAME], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(text(name))
}

/// All slots, and the records of blamed shrinkers.
#[derive(Debug)]
pub struct Watchdog {
    /// Slots of reclaimers lie behind those of the program's threads.
    slots: [CachePadded<CallbackSlot>; PROGRAM_SLOTS + RECLAIMERS],
    records: [Blamed; CULPRITS],
    /// Records that were ever used.
    known: AtomicU32,
    blaming: Mutex<()>,
    /// Time when a watching thread last came on time, and time when one last came late.
    on_time: AtomicU64,
    late: AtomicU64,
    /// Number of all blames by [`Misbehaviour`].
    counts: [AtomicU32; Misbehaviour::ALL.len()],
}

impl Default for Watchdog {
    fn default() -> Watchdog {
        Watchdog {
            slots: core::array::from_fn(|_| CachePadded::default()),
            records: core::array::from_fn(|_| Blamed::default()),
            known: AtomicU32::new(0),
            blaming: Mutex::new(()),
            on_time: AtomicU64::new(0),
            late: AtomicU64::new(0),
            counts: Default::default(),
        }
    }
}

/// A callback that has returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EndedCallback {
    /// Its duration.
    pub nanoseconds: u64,
    /// Whether it was written off.
    pub is_written_off: bool,
}

/// Right of a thread to run callbacks, until this is dropped.
#[derive(Debug)]
pub struct RunningCallback<'l> {
    watchdog: &'l Watchdog,
    slot: &'l CallbackSlot,
    /// Time when its last callback began.
    began: Cell<u64>,
}

/// A callback that has run for too long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Overdue {
    /// The shrinker.
    pub shrinker: u64,
    /// Number of the reclaimer that runs it and is to be replaced; 0 for a thread of the program.
    pub reclaimer: u32,
}

impl Watchdog {
    /// Takes a slot for this thread. `reclaimer` is the thread's number among the reclaimers, or 0
    /// for a thread of the program. Returns `None` if too many threads of the program run
    /// callbacks.
    pub fn enter(&self, reclaimer: u32) -> Option<RunningCallback<'_>> {
        let (of_program, of_reclaimers) = self.slots.split_at(PROGRAM_SLOTS);
        let slots = if reclaimer == 0 { of_program } else { of_reclaimers };
        let slot = slots.iter().find(|slot| slot.state.take(reclaimer))?;
        Some(RunningCallback { watchdog: self, slot, began: Cell::new(0) })
    }

    /// Returns whether a slot for a thread of the program is free at this moment.
    pub fn is_room(&self) -> bool {
        self.slots[..PROGRAM_SLOTS].iter().any(|slot| !slot.state.is_taken())
    }

    fn record(&self, shrinker: u64) -> Option<&Blamed> {
        let known = self.known.load(Ordering::Relaxed) as usize;
        self.records[..known].iter().find(|record| record.shrinker.load(Ordering::Relaxed) == shrinker)
    }

    /// Returns whether a shrinker is barred at the time `now`.
    pub fn is_barred(&self, shrinker: u64, now: u64) -> bool {
        self.record(shrinker).is_some_and(|record| now < record.until())
    }

    /// Returns whether a thread is in a callback of a shrinker at this moment. One that was written
    /// off does not count.
    pub fn runs(&self, shrinker: u64) -> bool {
        self.slots.iter().filter_map(|slot| slot.state.running()).any(|running| running.shrinker == shrinker)
    }

    /// Blames a shrinker and bars it for some time.
    pub fn blame(&self, _: &Inside<'_>, shrinker: u64, name: Option<Name>, misbehaviour: Misbehaviour, now: u64) {
        let _blaming = self.blaming.lock();
        if let Some(record) = self.count(shrinker, name, misbehaviour, now) {
            record.bar(now);
        }
    }

    /// Records that a watching thread looked at the time `now`, `late_by` nanoseconds later than it
    /// planned. Returns whether it was on time.
    pub fn looked(&self, now: u64, late_by: u64) -> bool {
        let moment = if late_by > LATE { &self.late } else { &self.on_time };
        // Relaxed: heuristic; it publishes no other data.
        moment.store(now, Ordering::Relaxed);
        late_by <= LATE
    }

    /// Returns why a callback that began at `began` took too long. `busy` is an upper bound of the
    /// CPU time of its thread since then.
    pub fn excess_of(&self, began: u64, busy: u64, budget: u64) -> Excess {
        if busy > budget.saturating_add(SLACK) {
            return Excess::Busy;
        }
        let [on_time, late] = [&self.on_time, &self.late].map(|moment| moment.load(Ordering::Relaxed));
        if on_time > began && late < began { Excess::Waited } else { Excess::Starved }
    }

    /// Blames a shrinker for a callback that took too long and was not written off.
    pub fn overran(&self, _: &Inside<'_>, shrinker: u64, name: Option<Name>, excess: Excess, now: u64) {
        let _blaming = self.blaming.lock();
        if let Some(record) = self.count(shrinker, name, Misbehaviour::Overran, now) {
            record.charge(excess, now);
        }
    }

    /// Counts a misbehaviour. Returns the shrinker's record, if there is room for one. The caller
    /// holds the mutex.
    fn count(&self, shrinker: u64, name: Option<Name>, misbehaviour: Misbehaviour, now: u64) -> Option<&Blamed> {
        self.counts[misbehaviour as usize].fetch_add(1, Ordering::Relaxed);
        let name = name.as_ref().map_or(GONE, Name::as_str);
        let record = self.record(shrinker).or_else(|| self.new_record(shrinker, name, now))?;
        record.counts[misbehaviour as usize].fetch_add(1, Ordering::Relaxed);
        Some(record)
    }

    /// Ends the bar of a shrinker that is gone. Its record is kept until another shrinker needs it.
    pub fn forget(&self, shrinker: u64) {
        if let Some(record) = self.record(shrinker) {
            record.until.store(0, Ordering::Relaxed);
        }
    }

    /// Returns a record that was never used, or that of a shrinker that is not barred.
    fn new_record(&self, shrinker: u64, name: &str, now: u64) -> Option<&Blamed> {
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

    /// Writes off each callback that has run longer than its budget, and blames its shrinker.
    ///
    /// `seen_from` is the time from which the caller has watched; `None` if it came late or has not
    /// watched. A callback whose time was over before is written off a [`BUDGET`] later, if it has
    /// not returned: the process may have been stopped.
    ///
    /// `name` returns the name of a shrinker. `each` is called once for each callback that was
    /// written off, outside the mutex.
    pub fn write_off(
        &self,
        _: &Inside<'_>,
        now: u64,
        seen_from: Option<u64>,
        name: impl Fn(u64) -> Option<Name>,
        mut each: impl FnMut(Overdue),
    ) {
        for slot in &self.slots {
            let is_overdue = |running: &Running| now > running.due;
            let Some(running) = slot.state.running().filter(is_overdue) else { continue };
            let (shrinker, name) = (running.shrinker, name(running.shrinker));
            {
                // The mutex first: a callback that returns and reads the bit waits in `is_back`
                // until the record counts it as stuck.
                let _blaming = self.blaming.lock();
                if !slot.is_given_up(&running, now, seen_from) || !slot.state.write_off(&running) {
                    continue;
                }
                let record = self.count(shrinker, name, Misbehaviour::Overran, now);
                record.inspect(|record| _ = record.stuck.fetch_add(1, Ordering::Relaxed));
                let index = record.and_then(|record| self.records.element_offset(record)).map_or(0, |index| index + 1);
                slot.record.store(index as u32, Ordering::Relaxed);
            }
            each(Overdue { shrinker, reclaimer: running.reclaimer });
        }
    }

    /// Calls `each` with every blamed shrinker of which there is a record.
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

    /// Returns the number of blames so far by [`Misbehaviour`].
    pub fn counts(&self) -> [u32; Misbehaviour::ALL.len()] {
        self.counts.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// Forgets the callbacks of other threads, in a forked child. The slot of this thread stays.
    pub fn forget_others(&self) {
        self.records.iter().for_each(|record| record.stuck.store(0, Ordering::Relaxed));
        for slot in &self.slots {
            if !slot.state.is_mine() {
                slot.state.forget();
            } else if slot.state.is_off() {
                self.stuck_at(slot).inspect(|record| _ = record.stuck.fetch_add(1, Ordering::Relaxed));
            }
        }
    }

    fn stuck_at(&self, slot: &CallbackSlot) -> Option<&Blamed> {
        self.records.get((slot.record.load(Ordering::Relaxed) as usize).checked_sub(1)?)
    }
}

impl Blamed {
    /// Bars the shrinker of a callback that took too long, if the shrinker is to be blamed for the
    /// excess. The caller holds the mutex.
    fn charge(&self, excess: Excess, now: u64) {
        let row = self.row.load(Ordering::Relaxed) + u32::from(excess == Excess::Waited);
        let is_blamed = excess == Excess::Busy || row >= ROW;
        self.row.store(if is_blamed { 0 } else { row }, Ordering::Relaxed);
        if is_blamed {
            self.bar(now);
        }
    }

    /// Returns the time until which the shrinker is not asked; `u64::MAX` while a callback is
    /// stuck.
    fn until(&self) -> u64 {
        if self.stuck.load(Ordering::Relaxed) > 0 { u64::MAX } else { self.until.load(Ordering::Relaxed) }
    }

    /// Bars the shrinker for some time. The caller holds the mutex.
    fn bar(&self, now: u64) {
        let forgotten = now.saturating_sub(self.last.load(Ordering::Relaxed)) / DECAY;
        let before = u64::from(self.penalties.load(Ordering::Relaxed)).saturating_sub(forgotten);
        let doublings = before.min(u64::from(DOUBLINGS)) as u32;
        self.penalties.store(doublings + 1, Ordering::Relaxed);
        self.last.store(now, Ordering::Relaxed);
        self.until.store(now.saturating_add(BARRED << doublings), Ordering::Relaxed);
    }
}

impl RunningCallback<'_> {
    /// Begins a callback with that budget, in nanoseconds. Returns false, and begins nothing, if
    /// its shrinker is barred.
    pub fn began(&self, shrinker: u64, now: u64, budget: u64) -> bool {
        let begins = !self.watchdog.is_barred(shrinker, now);
        if begins {
            self.began.set(now);
            self.slot.state.begin(shrinker, now.saturating_add(budget));
        }
        begins
    }

    /// Returns the time when the last callback began.
    pub fn last_began(&self) -> u64 {
        self.began.get()
    }

    /// Ends the callback. If it was written off, the caller must call [`RunningCallback::is_back`].
    pub fn ended(&self, now: u64) -> EndedCallback {
        if now <= self.slot.state.last_due()
            && let Some(record) = self.watchdog.record(self.slot.state.last_shrinker())
        {
            record.row.store(0, Ordering::Relaxed);
        }
        let nanoseconds = now.saturating_sub(self.began.get());
        EndedCallback { nanoseconds, is_written_off: self.slot.state.end() }
    }

    /// Counts a written-off callback as returned, and bars its shrinker if that is to be blamed.
    /// The shrinker stays barred while another callback of it is stuck.
    pub fn is_back(&self, _: &Inside<'_>, now: u64, excess: Excess) {
        let _blaming = self.watchdog.blaming.lock();
        if let Some(record) = self.watchdog.stuck_at(self.slot) {
            // A forked child has set the count to 0.
            let stuck = record.stuck.load(Ordering::Relaxed);
            record.stuck.store(stuck.saturating_sub(1), Ordering::Relaxed);
            record.charge(excess, now);
        }
    }
}

impl Drop for RunningCallback<'_> {
    fn drop(&mut self) {
        self.slot.state.leave();
    }
}

#[cfg(test)]
mod tests;
