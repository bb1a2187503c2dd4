//! State of a thread that runs callbacks, in one word.
//!
//! A thread that writes a callback off, and the thread that returns from the callback, agree on
//! which of them was first.
//!
//! # Design
//!
//! The word has a turn, which is a number that grows with each callback. It also has three bits:
//! the slot is taken, a callback runs, the callback was written off. The owner of the slot changes
//! the turn and the first two bits. Any other thread only sets the third bit, by
//! compare-and-exchange of the word that it has read.
//!
//! # Concurrency
//!
//! | watcher | owner |
//! |---|---|
//! | 1. reads the word of turn T, then shrinker and end of time | |
//! | 2. compare-and-exchange sets "written off" | 3. the callback returns; a swap ends T |
//!
//! If 2 comes first, the swap returns the bit. If 3 comes first, the exchange fails, even if
//! another callback has begun.
//!
//! If the exchange succeeds, the shrinker and the end of time that the watcher read are those of
//! turn T. Threads write both with Release and read them with Acquire. A watcher that reads a value
//! of a later turn therefore exchanges after the end of T, and fails.
//!
//! There is no lock, and no thread waits. A model checker explores this module
//! (`tests/loom_callback_state`).

use neap_base::sync::{AtomicU32, AtomicUsize, Ordering, me};

const TAKEN: usize = 1;
const RUNS: usize = 2;
const OFF: usize = 4;
/// The first bit of the turn.
const TURN: usize = 8;

/// State of a slot of the watchdog.
#[derive(Debug)]
pub struct CallbackState {
    word: AtomicUsize,
    /// The thread that took the slot, and its number among the reclaimers, or 0.
    owner: AtomicUsize,
    reclaimer: AtomicU32,
    /// Shrinker of the running callback, and the time until which that may run.
    shrinker: AtomicUsize,
    due: AtomicUsize,
}

/// A running callback, as read from a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Running {
    word: usize,
    /// The shrinker.
    pub shrinker: u64,
    /// Time until which the callback may run.
    pub due: u64,
    /// The number of the reclaimer; 0: a thread of the program.
    pub reclaimer: u32,
}

impl Default for CallbackState {
    fn default() -> CallbackState {
        let zero = || AtomicUsize::new(0);
        CallbackState { word: zero(), owner: zero(), reclaimer: AtomicU32::new(0), shrinker: zero(), due: zero() }
    }
}

impl CallbackState {
    /// Takes the slot for this thread, with a reclaimer's number or 0. Returns false if it is
    /// taken.
    pub fn take(&self, reclaimer: u32) -> bool {
        let word = self.word.load(Ordering::Relaxed);
        // Acquire pairs with the Release in `leave`.
        let taken = word & TAKEN == 0
            && self.word.compare_exchange(word, word | TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if taken {
            self.owner.store(me(), Ordering::Relaxed);
            // Release pairs with the Acquire in `running`.
            self.reclaimer.store(reclaimer, Ordering::Release);
        }
        taken
    }

    /// Returns whether a thread has the slot at this moment.
    pub fn is_taken(&self) -> bool {
        self.word.load(Ordering::Relaxed) & TAKEN != 0
    }

    /// Leaves the slot. Only its owner calls this, while no callback runs.
    pub fn leave(&self) {
        // Before the bit is cleared: a fork may find the slot taken by a thread that has not stored
        // itself here yet. The child must not take that slot for its own.
        self.owner.store(0, Ordering::Relaxed);
        self.word.fetch_and(!TAKEN, Ordering::Release); // Pairs with the Acquire in `take`.
    }

    /// Returns whether this thread is the last owner that was stored and has not left.
    pub fn is_mine(&self) -> bool {
        self.owner.load(Ordering::Relaxed) == me()
    }

    /// Begins a callback that may run until `due`. Only the slot's owner calls this.
    pub fn begin(&self, shrinker: u64, due: u64) {
        // Release, of all three: pairs with the Acquire in `running`.
        self.shrinker.store(shrinker as usize, Ordering::Release);
        self.due.store(due as usize, Ordering::Release);
        self.word.fetch_or(RUNS, Ordering::Release);
    }

    /// Ends the callback. Returns whether it was written off. Only the slot's owner calls this.
    pub fn end(&self) -> bool {
        // Other threads change nothing but OFF.
        let next = (self.word.load(Ordering::Relaxed) & !(TURN - 1)).wrapping_add(TURN) | TAKEN;
        // Acquire pairs with the Release in `write_off`.
        self.word.swap(next, Ordering::Acquire) & OFF != 0
    }

    /// Returns the shrinker of the last callback. Only the slot's owner calls this.
    pub fn last_shrinker(&self) -> u64 {
        self.shrinker.load(Ordering::Relaxed) as u64
    }

    /// Returns the time until which the last callback might run. Only the slot's owner calls this.
    pub fn last_due(&self) -> u64 {
        self.due.load(Ordering::Relaxed) as u64
    }

    /// Returns the running callback; `None` if there is none or it was written off.
    pub fn running(&self) -> Option<Running> {
        // Acquire, of all four: pairs with the Release in `begin` and `take`.
        let word = self.word.load(Ordering::Acquire);
        if word & (RUNS | OFF) != RUNS {
            return None;
        }
        let (shrinker, due) = (self.shrinker.load(Ordering::Acquire), self.due.load(Ordering::Acquire));
        let reclaimer = self.reclaimer.load(Ordering::Acquire);
        Some(Running { word, shrinker: shrinker as u64, due: due as u64, reclaimer })
    }

    /// Writes off the callback that was read; returns false if it has ended or was written off
    /// already.
    pub fn write_off(&self, running: &Running) -> bool {
        let Running { word, .. } = *running;
        // Release pairs with the Acquire in `end`.
        self.word.compare_exchange(word, word | OFF, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Returns whether the running callback was written off.
    pub fn is_off(&self) -> bool {
        self.word.load(Ordering::Relaxed) & OFF != 0
    }

    /// Frees the slot in a forked child, where its owner does not exist.
    pub fn forget(&self) {
        self.word.store((self.word.load(Ordering::Relaxed) & !(TURN - 1)).wrapping_add(TURN), Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_callback_is_written_off_once_and_hears_of_it_when_it_ends() {
        let slot = CallbackState::default();
        assert!(slot.take(3) && !slot.take(4) && slot.is_mine() && slot.running().is_none());
        slot.begin(7, 100);
        let running = slot.running().unwrap();
        assert_eq!((running.shrinker, running.due, running.reclaimer), (7, 100, 3));
        assert!(slot.write_off(&running) && !slot.write_off(&running) && slot.is_off() && slot.running().is_none());
        assert!(slot.end() && !slot.is_off());
        slot.leave();
        assert!(slot.take(0));
    }

    /// The word changes between the look and the exchange, in each possible way.
    #[test]
    fn write_off_with_a_stale_look_has_no_effect() {
        let slot = CallbackState::default();
        assert!(slot.take(1));
        slot.begin(7, 100);
        let seen = slot.running().unwrap();
        assert!(!slot.end());
        assert!(!slot.write_off(&seen), "nothing runs");
        slot.begin(7, 100);
        assert!(!slot.write_off(&seen), "another call, though of the same at the same time");
        assert!(!slot.end());
        slot.leave();
        assert!(!slot.write_off(&seen), "the slot is free");
        assert!(slot.take(2));
        slot.begin(7, 100);
        assert!(!slot.write_off(&seen), "another thread's");
        assert!(!slot.end(), "which has not been written off");
        slot.begin(8, 200);
        let seen = slot.running().unwrap();
        slot.forget();
        assert!(!slot.write_off(&seen) && slot.take(5), "a child's");
    }
}
