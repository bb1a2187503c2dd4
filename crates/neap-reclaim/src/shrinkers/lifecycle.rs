//! Life cycle of an index of the registry: free, prepared, live, ending, and free again.
//!
//! A *life* of an index is the time of one shrinker. Entries are never freed, so a visitor may read
//! one at any time. It gets a reference to the current life only if that is live. A thread writes
//! the data of a life while the index is free. Visitors read the data with a reference. This module
//! has no lock; the registry's mutex serialises changes of state. A model checker explores this
//! module (`tests/loom.rs`).

use neap_base::platform::Errno;
use neap_base::sync::{AtomicU32, Ordering, wait, wake};
use neap_percpu::reference::{Count, Counts};

/// The index is free.
pub const FREE: u32 = 0;
/// The index has a shrinker, which is not called yet.
pub const PREPARED: u32 = 1;
/// The shrinker can be called.
pub const LIVE: u32 = 2;
/// No call begins any more.
pub const ENDING: u32 = 3;

/// State and references of an index.
#[derive(Debug)]
pub struct Life<W> {
    references: Count<W>,
    state: AtomicU32,
    /// Changes when a life is over.
    ended: AtomicU32,
}

/// A life that has begun to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ending {
    /// Its state before.
    pub before: u32,
    /// The value for [`Life::wait`].
    pub ended: u32,
}

impl<W: Counts> Life<W> {
    /// Makes a free index.
    pub fn new(words: W) -> Life<W> {
        Life { references: Count::dead(words), state: AtomicU32::new(FREE), ended: AtomicU32::new(0) }
    }

    /// Returns the words of its references.
    pub fn words(&self) -> &W {
        self.references.words()
    }

    /// Returns its state.
    pub fn state(&self) -> u32 {
        self.state.load(Ordering::Acquire) // Pairs with the Release in `prepare`.
    }

    /// Begins a life, after its data was written.
    pub fn prepare(&self) {
        self.state.store(PREPARED, Ordering::Release); // Pairs with the Acquire in `state`.
    }

    /// Lets the shrinker be called.
    pub fn start(&self) {
        // The state changes first: a visitor that gets no reference looks at the state.
        self.state.store(LIVE, Ordering::Release); // Pairs with the Acquire in `state`.
        self.references.revive();
    }

    /// Begins the end of a life; `None` if it was not prepared or live.
    pub fn end(&self) -> Option<Ending> {
        let before = self.state.load(Ordering::Relaxed);
        if !matches!(before, PREPARED | LIVE) {
            return None;
        }
        self.state.store(ENDING, Ordering::Relaxed);
        Some(Ending { before, ended: self.ended.load(Ordering::Relaxed) })
    }

    /// Prevents further calls of a life that was live. Returns true if no call runs. Then the
    /// caller must call [`Life::free`].
    ///
    /// # Errors
    /// The error of the fence. The life is live again then.
    pub fn close(&self, fence: impl FnOnce() -> Result<(), Errno>) -> Result<bool, Errno> {
        if let Err(error) = Count::close_all(core::iter::once(&self.references), fence) {
            self.state.store(LIVE, Ordering::Release); // Pairs with the Acquire in `state`.
            return Err(error);
        }
        Ok(self.references.put_first())
    }

    /// Takes a reference if the life is live. Calls `elsewhere` if the reference is counted in a
    /// cache line that all CPUs write.
    #[inline]
    pub fn try_get(&self, elsewhere: impl FnOnce()) -> bool {
        self.references.try_get_here()
            || self.references.try_get_shared() && {
                elsewhere();
                true
            }
    }

    /// Puts a reference. Returns true if it was the last one of a life that ends. Then the caller
    /// must call [`Life::free`].
    #[inline]
    #[must_use = "the caller that puts the last one ends the life"]
    pub fn put(&self) -> bool {
        self.references.put()
    }

    /// Ends a life: the index is free.
    pub fn free(&self) {
        self.state.store(FREE, Ordering::Release); // Pairs with the Acquire in `state`.
        // Release pairs with the Acquire in `is_over`: the waiting thread sees all that was done
        // with references.
        self.ended.fetch_add(1, Ordering::Release);
        wake(&self.ended, i32::MAX as u32);
    }

    /// Returns whether the life that [`Life::end`] ended is over.
    pub fn is_over(&self, ended: u32) -> bool {
        self.ended.load(Ordering::Acquire) != ended // Pairs with the Release in `free`.
    }

    /// Waits for the end of that life. It may return earlier.
    pub fn wait(&self, ended: u32) {
        wait(&self.ended, ended);
    }

    /// Forgets references of other threads, in a forked child; see [`Count::forget_others`].
    /// Returns whether that ended a life.
    ///
    /// A life goes on if a thread that is not in the child had begun its end without killing its
    /// references: no other thread would end it.
    pub fn forget_others(&self, held: usize) -> bool {
        let is_over = self.references.forget_others(held);
        let ends = self.state.load(Ordering::Relaxed) == ENDING;
        if ends && !self.references.is_dead() {
            self.state.store(LIVE, Ordering::Release); // Pairs with the Acquire in `state`.
        }
        is_over && ends
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use neap_base::sync::AtomicUsize;

    /// No CPU has words.
    struct Shared;

    impl Counts for Shared {
        fn add(&self, _open: &AtomicUsize, _value: i64) -> bool {
            false
        }

        fn sum(&self) -> i64 {
            0
        }

        fn opened(&self) -> usize {
            0
        }

        fn clear(&self) {}
    }

    #[test]
    #[cfg_attr(miri, ignore = "a thread knows itself by assembly")]
    fn life_ending_but_not_closed_continues_in_forked_child() {
        let life = Life::new(Shared);
        life.prepare();
        life.start();
        assert!(life.end() == Some(Ending { before: LIVE, ended: 0 }) && life.end().is_none());
        // The thread that was about to close the life is not in the child.
        assert!(!life.forget_others(0) && life.state() == LIVE);
        assert!(life.try_get(|| ()) && !life.put());
        assert_eq!(life.end(), Some(Ending { before: LIVE, ended: 0 }));
        assert_eq!(life.close(|| Ok(())), Ok(true));
        // Here the life was closed, and another thread had the last reference.
        assert!(life.forget_others(0) && life.state() == ENDING);
        life.free();
        assert!(!life.forget_others(0) && life.state() == FREE);
    }
}
