//! Notes of groups in which a pass freed nothing. While a note is valid, a charge at the group's
//! limit is refused without another pass.
//!
//! # Design
//!
//! A note of a group stores the number of marks ([`Shrinkers::marks`](crate::Shrinkers::marks))
//! when the pass began.
//!
//! * If no bit is set below the group, the note is valid until there is a new mark anywhere.
//! * If a bit is set, its shrinker freed nothing, and adds no mark when it has objects to free.
//!   From the third such pass in a row on, the note is valid for eight times as long as the pass
//!   took. At most a ninth of a thread's time goes into fruitless passes.
//!
//! A note is one word, a hash of the group and the number, so a thread reads it by one load.
//! Several groups share a place in the table, and their notes displace each other. This module has
//! no lock.
//!
//! # Concurrency
//!
//! | pass | marking thread |
//! |---|---|
//! | 1. reads the number of marks | A. sets a bit that it finds cleared |
//! | 2. finds no bit set below the group | B. counts the mark, and returns |
//! | 3. makes the note with the number of 1 | |
//!
//! If A is before 2, the pass finds the bit. If A is after 2, B is after 1: once B is done, the
//! number differs from the note's. A charge that begins after the mark has returned finds the new
//! number.
//!
//! A marking thread that finds the bit set counts nothing. Then either step 2 finds the bit, or the
//! visitor that clears it meanwhile counts again, finds the new object, and does A and B itself.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use neap_groups::GroupId;

/// Number of notes.
const NOTES: usize = 64;
/// Fruitless passes in a row from which on a note is valid although a bit is set.
const ROW: u32 = 3;
/// Duration of a note, as a multiple of the pass's duration. Bounds of the duration that a pass
/// counts for, in nanoseconds.
const TIMES: u64 = 8;
const LEAST: u64 = 20_000;
const MOST: u64 = 10_000_000;

#[derive(Debug, Default)]
struct Note {
    /// Word of a note that is valid while there is no new mark.
    empty: AtomicU64,
    /// Word of a note made although a bit was set; the time until which it is valid; and the number
    /// of such passes in a row.
    idle: AtomicU64,
    until: AtomicU64,
    row: AtomicU32,
}

/// All notes.
#[derive(Debug)]
pub struct Backoff([Note; NOTES]);

impl Default for Backoff {
    fn default() -> Backoff {
        Backoff(core::array::from_fn(|_| Note::default()))
    }
}

/// Returns the word of a group and a number of marks, never 0. Words of two different pairs are
/// equal with a probability of about 2^-63.
fn word(group: GroupId, marks: u64) -> u64 {
    let mixed = (group.to_bits() ^ marks.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93) | 1
}

impl Backoff {
    fn of(&self, group: GroupId) -> &Note {
        &self.0[(group.to_bits().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize % NOTES]
    }

    /// Returns whether the group has a note that is valid at the time `now`.
    pub fn is_noted(&self, group: GroupId, marks: u64, now: u64) -> bool {
        let (note, word) = (self.of(group), word(group, marks));
        // Relaxed, as everywhere here: one word has the whole note. A time of another note only
        // changes how long this one is valid.
        note.empty.load(Ordering::Relaxed) == word
            || note.idle.load(Ordering::Relaxed) == word && now < note.until.load(Ordering::Relaxed)
    }

    /// Notes that a pass from `began` to `now` freed nothing in a group.
    ///
    /// The caller read `marks` before the pass. After the pass it checked whether anything below
    /// the group is marked.
    pub fn note(&self, group: GroupId, marks: u64, began: u64, now: u64, is_anything_marked: bool) {
        let (note, word) = (self.of(group), word(group, marks));
        if !is_anything_marked {
            note.empty.store(word, Ordering::Relaxed);
        } else if note.row.fetch_add(1, Ordering::Relaxed) + 1 >= ROW {
            let took = now.saturating_sub(began).clamp(LEAST, MOST);
            note.until.store(now.saturating_add(took * TIMES), Ordering::Relaxed);
            note.idle.store(word, Ordering::Relaxed);
        }
    }

    /// Invalidates the note of a group in which a pass has freed something.
    pub fn forget(&self, group: GroupId) {
        let note = self.of(group);
        if note.row.load(Ordering::Relaxed) > 0 {
            note.row.store(0, Ordering::Relaxed);
            note.idle.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: GroupId = GroupId::from_bits(GroupId::ROOT.to_bits() + 1);

    #[test]
    fn where_nothing_is_marked_a_note_counts_until_there_is_a_mark() {
        let backoff = Backoff::default();
        assert!(!backoff.is_noted(ONE, 7, 0));
        backoff.note(ONE, 7, 0, 5, false);
        assert!(
            backoff.is_noted(ONE, 7, u64::MAX)
                && !backoff.is_noted(ONE, 8, 6)
                && !backoff.is_noted(GroupId::ROOT, 7, 6)
        );
    }

    #[test]
    fn note_with_a_set_bit_is_valid_from_third_pass_for_a_while() {
        let backoff = Backoff::default();
        for _ in 0..2 {
            backoff.note(ONE, 7, 0, 100_000, true);
            assert!(!backoff.is_noted(ONE, 7, 100_000));
        }
        backoff.note(ONE, 7, 0, 100_000, true);
        assert!(
            backoff.is_noted(ONE, 7, 899_999)
                && !backoff.is_noted(ONE, 7, 900_000)
                && !backoff.is_noted(ONE, 8, 100_000)
        );
        backoff.forget(ONE);
        assert!(!backoff.is_noted(ONE, 7, 100_000));
        backoff.note(ONE, 7, 0, 100_000, true);
        assert!(!backoff.is_noted(ONE, 7, 100_000), "it begins anew");
    }

    #[test]
    fn asking_that_takes_no_time_or_for_ever_is_bounded() {
        let backoff = Backoff::default();
        (0..ROW).for_each(|_| backoff.note(ONE, 7, 5, 5, true));
        assert!(backoff.is_noted(ONE, 7, 4 + LEAST * TIMES) && !backoff.is_noted(ONE, 7, 5 + LEAST * TIMES));
        backoff.note(ONE, 7, 0, u64::MAX / 2, true);
        assert!(!backoff.is_noted(ONE, 7, u64::MAX / 2 + MOST * TIMES));
    }
}
