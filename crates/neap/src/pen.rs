//! Words of a report, written one after the other.
//!
//! Sits between reports for other processes and the page of numbers, of which they get the part
//! behind the numbers. No locks.

use core::sync::atomic::{AtomicU64, Ordering};

/// Where the next word goes. Those beyond the end are lost.
pub(crate) struct Pen<'a> {
    words: &'a [AtomicU64],
    at: usize,
}

impl Pen<'_> {
    /// Begins at a word.
    pub(crate) fn new(words: &[AtomicU64], at: usize) -> Pen<'_> {
        Pen { words, at }
    }

    pub(crate) fn write(&mut self, word: u64) {
        if let Some(place) = self.words.get(self.at) {
            place.store(word, Ordering::Relaxed);
        }
        self.at += 1;
    }

    pub(crate) fn write_all(&mut self, words: impl IntoIterator<Item = u64>) {
        words.into_iter().for_each(|word| self.write(word));
    }

    /// The word that comes next.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn has_room(&self, words: usize) -> bool {
        self.at + words <= self.words.len()
    }
}

/// Sees to it that each page of the file is there, before a lock is taken, and that nothing is left
/// of another report's beginning.
pub(crate) fn touch(words: &[AtomicU64]) {
    words.iter().step_by(512).for_each(|word| word.store(0, Ordering::Relaxed));
}
