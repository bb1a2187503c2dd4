//! Groups that were asked in vain: who comes to the same limit again is refused at once, and does not have everybody asked again.
//!
//! Sits between a charge at a limit and passes. A note says of a group how many marks there had been when it was asked. Where nothing below it is
//! marked any more it counts until there is a new mark, anywhere. Where something is (a shrinker that has nothing to give now, and will not say
//! when it has), from the third time in a row on it counts for eight times as long as asking took: so at most a ninth of a thread's time goes into
//! asking in vain, and what can be had again is had soon. No mark is slept over:
//! 1. who asks reads the number of marks; 2. it finds no bit set below the group; 3. it makes the note, with the number of 1.
//!    Meanwhile, A, who marks sets a bit that it finds cleared; B, it counts that, and returns.
//!
//! If A is before 2, the bit is found. If A is after 2, B is after 1, so the number is another one than the note's once B is done, and whoever charges after
//! the mark has returned finds that. Who finds the bit set already counts nothing: then it is set at 2 as well, or somebody clears it meanwhile,
//! looks once more, finds what the mark is for, and does A and B itself.
//!
//! A note is one word, made of the group and the number, so it is seen whole; groups share places, and displace each other. No lock.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use neap_groups::GroupId;

/// Notes at a time.
const NOTES: usize = 64;
/// Times in a row after which a note counts although something is marked.
const ROW: u32 = 3;
/// How much longer it counts than asking took, and how long that is taken to be, in nanoseconds.
const TIMES: u64 = 8;
const LEAST: u64 = 20_000;
const MOST: u64 = 10_000_000;

#[derive(Debug, Default)]
struct Note {
    /// Nothing was marked then.
    empty: AtomicU64,
    /// Something was; until when that counts, and how often it was so in a row.
    idle: AtomicU64,
    until: AtomicU64,
    row: AtomicU32,
}

/// All notes.
#[derive(Debug)]
pub struct Vain([Note; NOTES]);

impl Default for Vain {
    fn default() -> Vain {
        Vain(core::array::from_fn(|_| Note::default()))
    }
}

/// The word of a group and a number of marks, never 0. Of two different ones it is the same once in 2^64.
fn word(group: GroupId, marks: u64) -> u64 {
    let mixed = (group.to_bits() ^ marks.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93) | 1
}

impl Vain {
    fn of(&self, group: GroupId) -> &Note {
        &self.0[(group.to_bits().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize % NOTES]
    }

    /// Whether a group was asked in vain, and nothing has happened since that could make it otherwise.
    pub fn is_noted(&self, group: GroupId, marks: u64, now: u64) -> bool {
        let (note, word) = (self.of(group), word(group, marks));
        // Relaxed, as everything here: one word says it, and of the time nothing hangs on which note it is of.
        note.empty.load(Ordering::Relaxed) == word
            || note.idle.load(Ordering::Relaxed) == word && now < note.until.load(Ordering::Relaxed)
    }

    /// Notes that a group was asked in vain, from `began` to `now`, by one who had read the number of marks before that, and has looked after it
    /// whether anything below the group is marked.
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

    /// A group has given something.
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
        let vain = Vain::default();
        assert!(!vain.is_noted(ONE, 7, 0));
        vain.note(ONE, 7, 0, 5, false);
        assert!(vain.is_noted(ONE, 7, u64::MAX) && !vain.is_noted(ONE, 8, 6) && !vain.is_noted(GroupId::ROOT, 7, 6));
    }

    #[test]
    fn where_something_is_marked_it_counts_from_the_third_time_on_and_for_a_while() {
        let vain = Vain::default();
        for _ in 0..2 {
            vain.note(ONE, 7, 0, 100_000, true);
            assert!(!vain.is_noted(ONE, 7, 100_000));
        }
        vain.note(ONE, 7, 0, 100_000, true);
        assert!(vain.is_noted(ONE, 7, 899_999) && !vain.is_noted(ONE, 7, 900_000) && !vain.is_noted(ONE, 8, 100_000));
        vain.forget(ONE);
        assert!(!vain.is_noted(ONE, 7, 100_000));
        vain.note(ONE, 7, 0, 100_000, true);
        assert!(!vain.is_noted(ONE, 7, 100_000), "it begins anew");
    }

    #[test]
    fn asking_that_takes_no_time_or_for_ever_is_bounded() {
        let vain = Vain::default();
        (0..ROW).for_each(|_| vain.note(ONE, 7, 5, 5, true));
        assert!(vain.is_noted(ONE, 7, 4 + LEAST * TIMES) && !vain.is_noted(ONE, 7, 5 + LEAST * TIMES));
        vain.note(ONE, 7, 0, u64::MAX / 2, true);
        assert!(!vain.is_noted(ONE, 7, u64::MAX / 2 + MOST * TIMES));
    }
}
