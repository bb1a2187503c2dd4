//! The life of an index of the registry: free, prepared, live, ending, and free again.
//!
//! Sits between the registry, which changes it, and visitors, who take references; it is what a model checker explores. Entries are never freed, so
//! a visitor may look at one at any time: it gets a reference to whichever life is live then, or none. What is said of a life is written while it
//! is free, and read with a reference. No locks; the changes of state are the caller's to serialise.

use neap_base::platform::Errno;
use neap_base::sync::{AtomicU32, Ordering, wait, wake};
use neap_percpu::reference::{Count, Counts};

/// Nobody has the index.
pub const FREE: u32 = 0;
/// Somebody has it, and is not called yet.
pub const PREPARED: u32 = 1;
/// It can be called.
pub const LIVE: u32 = 2;
/// No call begins any more.
pub const ENDING: u32 = 3;

/// An index.
#[derive(Debug)]
pub struct Life<W> {
    references: Count<W>,
    state: AtomicU32,
    /// Changes when a life is over.
    ended: AtomicU32,
}

impl<W: Counts> Life<W> {
    /// A free index.
    pub fn new(words: W) -> Life<W> {
        Life { references: Count::dead(words), state: AtomicU32::new(FREE), ended: AtomicU32::new(0) }
    }

    /// The words of its references.
    pub fn words(&self) -> &W {
        self.references.words()
    }

    /// Where it is in life.
    pub fn state(&self) -> u32 {
        self.state.load(Ordering::Acquire) // Pairs with the Release in `prepare`.
    }

    /// Somebody has it from now on: what is said of it is written.
    pub fn prepare(&self) {
        self.state.store(PREPARED, Ordering::Release); // Pairs with the Acquire in `state`.
    }

    /// It can be called from now on.
    pub fn start(&self) {
        // Before the references: who is refused one looks at this.
        self.state.store(LIVE, Ordering::Release); // Pairs with the Acquire in `state`.
        self.references.revive();
    }

    /// It ends, by whoever gets an answer: what its state was, and what [`Life::wait`] wants.
    pub fn end(&self) -> Option<(u32, u32)> {
        let before = self.state.load(Ordering::Relaxed);
        if !matches!(before, PREPARED | LIVE) {
            return None;
        }
        self.state.store(ENDING, Ordering::Relaxed);
        Some((before, self.ended.load(Ordering::Relaxed)))
    }

    /// Lets no call of a life that was live begin, from when this returns; the answer is whether none runs: then [`Life::free`] is the caller's.
    ///
    /// # Errors
    /// That of the fence: it lives on.
    pub fn close(&self, fence: impl FnOnce() -> Result<(), Errno>) -> Result<bool, Errno> {
        if let Err(error) = Count::close_all(core::iter::once(&self.references), fence) {
            self.state.store(LIVE, Ordering::Release); // Pairs with the Acquire in `state`.
            return Err(error);
        }
        Ok(self.references.put_first())
    }

    /// Takes a reference, if it is live; `elsewhere` is called if that is not in a word of this CPU's, but in a line that others write.
    #[inline]
    pub fn try_get(&self, elsewhere: impl FnOnce()) -> bool {
        self.references.try_get_here()
            || self.references.try_get_shared() && {
                elsewhere();
                true
            }
    }

    /// Puts one; whether it was the last of a life that ends: then [`Life::free`] is the caller's.
    #[inline]
    #[must_use = "whoever puts the last one ends the life"]
    pub fn put(&self) -> bool {
        self.references.put()
    }

    /// The life is over.
    pub fn free(&self) {
        self.state.store(FREE, Ordering::Release); // Pairs with the Acquire in `state`.
        // Release pairs with the Acquire in `is_over`: what was done with references is visible to who waited.
        self.ended.fetch_add(1, Ordering::Release);
        wake(&self.ended, i32::MAX as u32);
    }

    /// Whether the life that [`Life::end`] ended is over.
    pub fn is_over(&self, ended: u32) -> bool {
        self.ended.load(Ordering::Acquire) != ended // Pairs with the Release in `free`.
    }

    /// Waits a while for that; may return for no reason.
    pub fn wait(&self, ended: u32) {
        wait(&self.ended, ended);
    }

    /// In a forked child: [`Count::forget_others`]; whether that was the end of a life. One whose end a thread had begun that is not here, without killing
    /// its references yet, lives on: nobody else would end it.
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
    fn a_child_in_which_nobody_ends_a_life_that_was_to_end_goes_on_with_it() {
        let life = Life::new(Shared);
        life.prepare();
        life.start();
        assert!(life.end() == Some((LIVE, 0)) && life.end().is_none());
        // The thread that was about to close it is not in the child.
        assert!(!life.forget_others(0) && life.state() == LIVE);
        assert!(life.try_get(|| ()) && !life.put());
        assert_eq!(life.end(), Some((LIVE, 0)));
        assert_eq!(life.close(|| Ok(())), Ok(true));
        // Here it was closed, and the last reference another thread's.
        assert!(life.forget_others(0) && life.state() == ENDING);
        life.free();
        assert!(!life.forget_others(0) && life.state() == FREE);
    }
}
