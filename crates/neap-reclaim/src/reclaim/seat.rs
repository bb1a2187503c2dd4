//! What a thread that runs callbacks is at: one word, so that who writes a callback off and the callback that comes back agree on who was first.
//!
//! Sits under [`Lanes`](super::Lanes); it is what a model checker explores. The word has a turn, which only grows, and three bits: the seat is taken, a callback
//! runs, and that callback was written off. Who has the seat changes all but the last of these; any other thread does nothing but set that one, by one
//! compare-and-exchange of the word that it has looked at. So:
//! 1. W reads the word of turn T, and then what runs, and until when it may: it has run for too
//!    long. 2. The callback returns, which ends T: W's
//!    exchange fails, whatever has begun meanwhile. Or: 2. W sets the bit. 3. The callback returns, and reads it with the very exchange that ends T.
//!
//! One of the two happens, and both threads know which. What W read with T was not a later turn's: the numbers are written with Release and read with Acquire, so who
//! reads one of turn U knows that T has ended, and does not find T's word any more. No lock, and nobody waits.

use neap_base::sync::{AtomicU32, AtomicUsize, Ordering, me};

const TAKEN: usize = 1;
const RUNS: usize = 2;
const OFF: usize = 4;
/// The first bit of the turn.
const TURN: usize = 8;

/// A place for a thread that runs callbacks.
#[derive(Debug)]
pub struct Seat {
    word: AtomicUsize,
    /// The thread, and its number among the reclaimers; 0 for one that is none.
    owner: AtomicUsize,
    reclaimer: AtomicU32,
    /// The shrinker whose callback runs, and until when it may.
    shrinker: AtomicUsize,
    due: AtomicUsize,
}

/// A callback that runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Running {
    word: usize,
    /// The shrinker.
    pub shrinker: u64,
    /// Until when it may.
    pub due: u64,
    /// The number of the reclaimer; 0: a thread of somebody's.
    pub reclaimer: u32,
}

impl Default for Seat {
    fn default() -> Seat {
        let zero = || AtomicUsize::new(0);
        Seat { word: zero(), owner: zero(), reclaimer: AtomicU32::new(0), shrinker: zero(), due: zero() }
    }
}

impl Seat {
    /// Takes it for this thread, the reclaimer of a number or none, unless somebody has it.
    pub fn take(&self, reclaimer: u32) -> bool {
        let word = self.word.load(Ordering::Relaxed);
        // Acquire pairs with the Release in `leave`.
        let taken = word & TAKEN == 0
            && self.word.compare_exchange(word, word | TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if taken {
            self.owner.store(me(), Ordering::Relaxed);
            self.reclaimer.store(reclaimer, Ordering::Release); // Pairs with the Acquire in `running`.
        }
        taken
    }

    /// Whether a thread has it at this moment.
    pub fn is_taken(&self) -> bool {
        self.word.load(Ordering::Relaxed) & TAKEN != 0
    }

    /// Leaves it. By its thread, while nothing runs.
    pub fn leave(&self) {
        // Before: a fork may come between who takes it next and that one's name.
        self.owner.store(0, Ordering::Relaxed);
        self.word.fetch_and(!TAKEN, Ordering::Release); // Pairs with the Acquire in `take`.
    }

    /// Whether it is this thread's, or was.
    pub fn is_mine(&self) -> bool {
        self.owner.load(Ordering::Relaxed) == me()
    }

    /// A callback begins that may run until a moment. By its thread.
    pub fn begin(&self, shrinker: u64, due: u64) {
        // Release, of all three: pairs with the Acquire in `running`.
        self.shrinker.store(shrinker as usize, Ordering::Release);
        self.due.store(due as usize, Ordering::Release);
        self.word.fetch_or(RUNS, Ordering::Release);
    }

    /// The callback is back; whether it was written off. By its thread.
    pub fn end(&self) -> bool {
        // Nobody else changes anything but OFF.
        let next = (self.word.load(Ordering::Relaxed) & !(TURN - 1)).wrapping_add(TURN) | TAKEN;
        // Acquire pairs with the Release in `write_off`.
        self.word.swap(next, Ordering::Acquire) & OFF != 0
    }

    /// What was begun last. By its thread.
    pub fn last(&self) -> (u64, u64) {
        (self.shrinker.load(Ordering::Relaxed) as u64, self.due.load(Ordering::Relaxed) as u64)
    }

    /// The callback that runs, if one does and is not written off.
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

    /// Writes that callback off, unless it has ended, or somebody has.
    pub fn write_off(&self, running: &Running) -> bool {
        let Running { word, .. } = *running;
        // Release pairs with the Acquire in `end`.
        self.word.compare_exchange(word, word | OFF, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Whether what runs here was written off.
    pub fn is_off(&self) -> bool {
        self.word.load(Ordering::Relaxed) & OFF != 0
    }

    /// In a forked child, where its thread does not exist: nobody has it.
    pub fn forget(&self) {
        self.word.store((self.word.load(Ordering::Relaxed) & !(TURN - 1)).wrapping_add(TURN), Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_callback_is_written_off_once_and_hears_of_it_when_it_ends() {
        let seat = Seat::default();
        assert!(seat.take(3) && !seat.take(4) && seat.is_mine() && seat.running().is_none());
        seat.begin(7, 100);
        let running = seat.running().unwrap();
        assert_eq!((running.shrinker, running.due, running.reclaimer), (7, 100, 3));
        assert!(seat.write_off(&running) && !seat.write_off(&running) && seat.is_off() && seat.running().is_none());
        assert!(seat.end() && !seat.is_off());
        seat.leave();
        assert!(seat.take(0));
    }

    /// The step between the look and the exchange is taken at each moment at which the word has changed.
    #[test]
    fn who_looked_at_a_turn_that_has_ended_writes_nothing_off() {
        let seat = Seat::default();
        assert!(seat.take(1));
        seat.begin(7, 100);
        let seen = seat.running().unwrap();
        assert!(!seat.end());
        assert!(!seat.write_off(&seen), "nothing runs");
        seat.begin(7, 100);
        assert!(!seat.write_off(&seen), "another call, though of the same at the same time");
        assert!(!seat.end());
        seat.leave();
        assert!(!seat.write_off(&seen), "nobody is there");
        assert!(seat.take(2));
        seat.begin(7, 100);
        assert!(!seat.write_off(&seen), "another thread's");
        assert!(!seat.end(), "which has not been written off");
        seat.begin(8, 200);
        let seen = seat.running().unwrap();
        seat.forget();
        assert!(!seat.write_off(&seen) && seat.take(5), "a child's");
    }
}
