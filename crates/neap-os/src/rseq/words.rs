//! Restartable sequences on per-CPU words: additions, unconditional or after a check of the word.
//!
//! The rules are those of [`rseq`](super). The users are counters, references, RCU's readers and
//! the stocks of memory groups. The functions take no lock, never retry, and are signal-safe.

use super::SequenceResult;
use crate::arch::words;
use core::sync::atomic::AtomicPtr;

/// Adds `value` to this CPU's word of per-CPU data. The load of the table's address is an acquire
/// load. Returns whether the addition took effect. It has no effect if the thread was interrupted
/// or has no CPU id, if the CPU has no word, or if there is no table.
///
/// `offsets` points to the address of a table, or to 0. The table has for each of `cpus` CPUs a
/// word's offset from `base`; `usize::MAX` means that the CPU has none. The sequence itself reads
/// the address. After a thread has replaced the address by 0 and fenced all CPUs, no word changes
/// any more.
///
/// # Safety
/// `offset` is [`registered_offset`](super::registered_offset), or that of
/// [`OwnAreas`](super::OwnAreas). `offsets` is as described. Only sequences of this module change
/// the words.
#[inline(always)]
pub unsafe fn add(offset: isize, offsets: *const usize, cpus: usize, base: usize, value: i64) -> bool {
    // SAFETY: the caller meets the requirements above, which are also those of `words::add`.
    unsafe { words::add(offset, offsets, cpus, base, value) }
}

/// Result of [`count`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// The word was changed, and has none of the mask's bits.
    Within,
    /// The word was changed, and has some of the mask's bits.
    Beyond,
    /// Nothing changed.
    Refused,
}

/// Adds `value` to this CPU's word, and checks the new value against `mask`. Counters use this
/// function. Unlike in [`add`], the table lies at `offsets` itself, and has an offset for every
/// CPU.
///
/// # Safety
/// As for [`add`].
#[inline(always)]
pub unsafe fn count(offset: isize, offsets: usize, cpus: usize, base: usize, value: i64, mask: i64) -> Counted {
    // SAFETY: the caller meets the requirements above, which are also those of `words::count`.
    unsafe { words::count(offset, offsets, cpus, base, value, mask) }
}

/// Adds `delta` to this CPU's word at `place` (in units of 8 bytes from the start of a region), if
/// its number is in bounds. A word has a tag in its high bits and a number in its low bits. The
/// word `xor` `tag` must be at least `low` and at most `low + span`; otherwise nothing changes. A
/// word with another tag exceeds every such bound.
///
/// # Safety
/// `offset` is [`registered_offset`](super::registered_offset), or that of
/// [`OwnAreas`](super::OwnAreas). `regions` is laid out as in a
/// [`SequenceTable`](super::SequenceTable) from CPU 0 on, with words instead of stacks. `place` is
/// the place of a word. In a region that must not be written, the word exceeds every bound under
/// every tag.
#[inline(always)]
pub unsafe fn alter(
    offset: isize,
    regions: *const AtomicPtr<u8>,
    place: usize,
    tag: u64,
    low: u64,
    span: u64,
    delta: u64,
) -> SequenceResult {
    // SAFETY: the caller meets the requirements above, which are also those of `words::alter`.
    unsafe { words::alter(offset, regions, place, tag, low, span, delta) }
}

/// Adds one to word number `word` of this CPU, for readers of RCU. `table` has for each of `cpus`
/// CPUs the address of its words, or 0 if the CPU has none. Returns whether the addition took
/// effect. The store of the sum is a release store.
///
/// # Safety
/// As for [`add`], with `table` as described here.
#[inline(always)]
pub unsafe fn count_one(offset: isize, table: usize, cpus: usize, word: usize) -> bool {
    // SAFETY: the caller meets the requirements above, which are also those of `words::count_one`.
    unsafe { words::count_one(offset, table, cpus, word) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rseq::registered_offset;
    use core::sync::atomic::{AtomicU64, Ordering};
    use std::vec;
    use std::vec::Vec;

    #[test]
    fn a_word_counts_every_add_that_is_answered_and_no_other() {
        let Some(offset) = registered_offset() else { return };
        let words: Vec<core::sync::atomic::AtomicI64> = (0..3).map(|_| 0.into()).collect();
        // Every CPU's word is the second one, or none.
        let tables = [vec![8_usize; 1024], vec![usize::MAX; 1024]];
        let add = |table: usize, cpus: usize, value: i64| {
            // SAFETY: the table has an entry for each CPU, and leads to the words; only this thread
            // uses them.
            unsafe { add(offset, &raw const table, cpus, words.as_ptr().addr(), value) }
        };
        let mut sum = 0;
        for value in [1, -5, 1 << 40, i64::from(i32::MIN)] {
            assert!((0..100).any(|_| add(tables[0].as_ptr().addr(), 1024, value)));
            sum += value;
            assert_eq!(words[1].load(Ordering::Relaxed), sum);
        }
        for _ in 0..100 {
            assert!(!add(0, 1024, 1), "no table");
            assert!(!add(tables[0].as_ptr().addr(), 0, 1), "no CPU");
            assert!(!add(tables[1].as_ptr().addr(), 1024, 1), "no word");
        }
        // Every CPU's address is that of the second word, or none.
        let addresses = [vec![words[1].as_ptr().addr(); 1024], vec![0; 1024]];
        // SAFETY: the tables have an entry for each CPU, and lead to a word; only this thread uses
        // it.
        let one = |table: usize, cpus| unsafe { count_one(offset, addresses[table].as_ptr().addr(), cpus, 0) };
        assert!((0..100).any(|_| one(0, 1024)) && (0..100).all(|_| !one(1, 1024) && !one(0, 0)));
        assert_eq!(words.iter().map(|word| word.load(Ordering::Relaxed)).collect::<Vec<_>>(), [0, sum + 1, 0]);
    }

    #[test]
    fn counting_says_when_a_word_leaves_the_mask() {
        let Some(offset) = registered_offset() else { return };
        let word = core::sync::atomic::AtomicI64::new(0);
        let table = vec![0_usize; 1024];
        let count = |cpus: usize, value: i64| {
            // SAFETY: the table has an entry for each CPU, and leads to the word; only this thread
            // uses it.
            unsafe { super::count(offset, table.as_ptr().addr(), cpus, (&raw const word).addr(), value, !7) }
        };
        let settled = |value| (0..100).map(|_| count(1024, value)).find(|counted| *counted != Counted::Refused);
        let answers = [5, 2, 1, -1, -8, 1].map(|value| (settled(value).unwrap(), word.load(Ordering::Relaxed)));
        let expected = [(Counted::Within, 5), (Counted::Within, 7), (Counted::Beyond, 8), (Counted::Within, 7)];
        assert_eq!(answers[..4], expected);
        assert_eq!(answers[4..], [(Counted::Beyond, -1), (Counted::Within, 0)]);
        assert_eq!((count(0, 1), word.load(Ordering::Relaxed)), (Counted::Refused, 0));
    }

    /// Eight threads add on all CPUs, interrupted by fences: the words' sum equals the reported
    /// additions.
    #[test]
    fn no_add_is_lost_between_threads() {
        let Some(offset) = registered_offset() else { return };
        let cpus = crate::topology::nameable();
        let words: Vec<core::sync::atomic::AtomicI64> = (0..cpus * 8).map(|_| 0.into()).collect();
        let table: Vec<usize> = (0..cpus).map(|cpu| cpu * 64).collect();
        let (table, base) = (table.as_ptr().addr(), words.as_ptr().addr());
        let places: Vec<usize> = (0..cpus).map(|cpu| base + cpu * 64).collect();
        let places = places.as_ptr().addr();
        let work = || {
            // SAFETY: the table has an entry for each CPU, which leads to a word. Only such
            // additions change it.
            let one = |_: &_| unsafe { add(offset, &raw const table, cpus, base, 1) };
            // SAFETY: the table has an address for each CPU, which leads to words. Only such
            // additions change them.
            let another = |_: &_| unsafe { count_one(offset, places, cpus, 1) };
            (0..5_000_000).filter(one).count() + (0..5_000_000).filter(another).count()
        };
        let _ = crate::fence::register();
        let answered: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(work)).collect();
            // Each fence interrupts the threads that run on other CPUs.
            while threads.iter().any(|thread| !thread.is_finished()) {
                let _ = crate::fence::all();
            }
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        let counted: i64 = words.iter().map(|word| word.load(Ordering::Relaxed)).sum();
        assert_eq!(counted, answered as i64);
        assert!(answered > 40_000_000, "most adds are not interrupted");
    }

    /// Eight threads add to and subtract from tagged words: the words' sum equals the reported
    /// changes.
    #[test]
    fn a_word_is_altered_under_its_own_tag_alone_and_within_bounds() {
        const TAG: u64 = 5 << 20;
        const MOST: u64 = (1 << 20) - 1;
        let Some(offset) = registered_offset() else { return };
        let words: Vec<AtomicU64> = (0..crate::topology::nameable() * 8).map(|_| TAG.into()).collect();
        let mut regions: Vec<_> =
            words.chunks(8).map(|line| AtomicPtr::new(line.as_ptr().cast_mut().cast::<u8>())).collect();
        let regions = regions.as_mut_ptr().expose_provenance();
        let alter = |tag: u64, low: u64, span: u64, delta: u64| {
            // SAFETY: the table has a line for each CPU; only such calls change the words.
            unsafe { alter(offset, core::ptr::with_exposed_provenance(regions), 3, tag, low, span, delta) }
        };
        let give = |n: u64| alter(TAG, 0, MOST - n, n);
        let take = |n: u64| alter(TAG, n, MOST - n, n.wrapping_neg());
        let work = || {
            let mut left = 0_i64;
            for n in (1..=7).cycle().take(500_000) {
                left += if give(n) == SequenceResult::Committed { n as i64 } else { 0 };
                left -= if take(n + 1) == SequenceResult::Committed { n as i64 + 1 } else { 0 };
                let others = [TAG + (1 << 20), TAG - (1 << 20), 0].map(|tag| alter(tag, 0, MOST, 1));
                assert!(!others.contains(&SequenceResult::Committed));
            }
            left
        };
        let left: i64 = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        let there = words.chunks(8).map(|line| line[3].load(Ordering::Relaxed) - TAG).sum::<u64>();
        assert_eq!(there as i64, left);
        assert!(words.chunks(8).flat_map(|line| [&line[2], &line[4]]).all(|word| word.load(Ordering::Relaxed) == TAG));
    }
}
