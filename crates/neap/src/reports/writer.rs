//! A writer of words, for reports to other processes. Reports lie in the page of numbers, after the
//! numbers. This module has no lock.

use core::sync::atomic::{AtomicU64, Ordering};

/// A position in a report. Words beyond the end are lost.
pub(crate) struct ReportWriter<'a> {
    words: &'a [AtomicU64],
    at: usize,
}

impl ReportWriter<'_> {
    /// Begins at word `at`.
    pub(crate) fn new(words: &[AtomicU64], at: usize) -> ReportWriter<'_> {
        ReportWriter { words, at }
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

    /// The position of the next word.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn has_room(&self, words: usize) -> bool {
        self.at + words <= self.words.len()
    }
}

/// Stores a zero to each page, so that later stores under a lock fault on none. The first zero
/// clears the start of an earlier report.
pub(crate) fn touch(words: &[AtomicU64]) {
    words.iter().step_by(512).for_each(|word| word.store(0, Ordering::Relaxed));
}
