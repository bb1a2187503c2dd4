//! The allocation map of a chunk: which grains are in rows, with hints about free runs.
//!
//! The map has a bit per grain. Each block of grains has a hint with three lengths: of the free run
//! at the block's start, of the one at its end, and of the longest. Each change scans a changed
//! block anew (four words), so hints are always exact. The kernel instead updates its hints by
//! rules, which can forget a hole that an aligned search skipped.

use crate::geometry::round_up;
use neap_base::bitmap;

/// Grains of a block.
pub(crate) const BLOCK: usize = 256;
const WORDS: usize = BLOCK / 64;

/// Lengths of a block's free runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(crate) struct Hint {
    left: u16,
    right: u16,
    longest: u16,
}

impl Hint {
    pub(crate) const FREE: Hint = Hint { left: BLOCK as u16, right: BLOCK as u16, longest: BLOCK as u16 };

    fn of(words: &[u64]) -> Hint {
        let (mut run, mut longest, mut left) = (0, 0, None);
        for &word in words {
            let (mut rest, mut unseen) = (word, 64);
            while rest != 0 {
                let zeros = rest.trailing_zeros();
                left = left.or(Some(run + zeros));
                longest = longest.max(run + zeros);
                run = 0;
                let gone = zeros + (rest >> zeros).trailing_ones();
                rest = rest.checked_shr(gone).unwrap_or(0);
                unseen -= gone;
            }
            run += unseen;
        }
        let left = left.unwrap_or(run);
        Hint { left: left as u16, right: run as u16, longest: longest.max(run) as u16 }
    }
}

/// The map of one chunk.
#[derive(Debug)]
pub(crate) struct Map<'a> {
    pub(crate) words: &'a mut [u64],
    pub(crate) hints: &'a mut [Hint],
}

impl Map<'_> {
    fn grains(&self) -> usize {
        self.hints.len() * BLOCK
    }

    /// Whether all grains of a run are free.
    pub(crate) fn is_free(&self, start: usize, end: usize) -> bool {
        end <= self.grains() && bitmap::next_set(self.words, start, end).is_none()
    }

    /// Takes a run.
    pub(crate) fn take(&mut self, start: usize, end: usize) {
        bitmap::set_range(self.words, start, end);
        self.renew_hints(start, end);
    }

    /// Frees a run.
    pub(crate) fn free(&mut self, start: usize, end: usize) {
        bitmap::clear_range(self.words, start, end);
        self.renew_hints(start, end);
    }

    fn renew_hints(&mut self, start: usize, end: usize) {
        for block in start / BLOCK..end.div_ceil(BLOCK) {
            self.hints[block] = Hint::of(&self.words[block * WORDS..][..WORDS]);
        }
    }

    /// Length of the longest free run.
    pub(crate) fn longest(&self) -> usize {
        let (mut run, mut longest) = (0, 0);
        for hint in self.hints.iter() {
            longest = longest.max(run + usize::from(hint.left)).max(hint.longest.into());
            run = if *hint == Hint::FREE { run + BLOCK } else { hint.right.into() };
        }
        longest.max(run)
    }

    /// Finds the first `size` free grains at a multiple of `align` that `accept` accepts. If it
    /// refuses a place, `accept` returns where the search continues.
    pub(crate) fn find(&self, size: usize, align: usize, accept: impl Fn(usize) -> Result<(), usize>) -> Option<usize> {
        let mut at = 0;
        while let Some(start) = self.next_run(at, size) {
            let place = round_up(start, align);
            if place + size > self.grains() {
                return None;
            }
            at = match bitmap::next_set(self.words, place, place + size) {
                Some(taken) => taken + 1,
                None => match accept(place) {
                    Ok(()) => return Some(place),
                    Err(next) => next.max(place + 1),
                },
            };
        }
        None
    }

    /// Start of the next free run that may have `size` grains. Skips blocks whose hints exclude it.
    fn next_run(&self, mut at: usize, size: usize) -> Option<usize> {
        while at < self.grains() {
            let hint = self.hints[at / BLOCK];
            let end = (at / BLOCK + 1) * BLOCK;
            if usize::from(hint.longest) < size {
                // Only the free run at the block's end may continue in the next block.
                at = at.max(end - usize::from(hint.right));
                if at < end {
                    return Some(at);
                }
                continue;
            }
            match bitmap::next_clear(self.words, at, end) {
                Some(start) => return Some(start),
                None => at = end,
            }
        }
        None
    }

    /// Whether every hint equals a scan of the bits.
    pub(crate) fn hints_are_exact(&self) -> bool {
        self.words.chunks(WORDS).zip(self.hints.iter()).all(|(words, hint)| Hint::of(words) == *hint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    const GRAINS: usize = 4 * BLOCK;

    /// Free runs by a scan of every bit: start and length.
    fn runs(bits: &[bool]) -> Vec<(usize, usize)> {
        let mut runs = Vec::new();
        let mut start = None;
        for (at, taken) in bits.iter().copied().chain([true]).enumerate() {
            match (taken, start) {
                (false, None) => start = Some(at),
                (true, Some(from)) => {
                    runs.push((from, at - from));
                    start = None;
                }
                _ => {}
            }
        }
        runs
    }

    fn check(map: &Map, bits: &[bool]) -> Result<(), TestCaseError> {
        for (block, hint) in map.hints.iter().enumerate() {
            let own = runs(&bits[block * BLOCK..][..BLOCK]);
            let longest = own.iter().map(|run| run.1).max().unwrap_or(0);
            let left = own.first().filter(|run| run.0 == 0).map_or(0, |run| run.1);
            let right = own.last().filter(|run| run.0 + run.1 == BLOCK).map_or(0, |run| run.1);
            prop_assert_eq!([hint.left, hint.right, hint.longest].map(usize::from), [left, right, longest]);
        }
        prop_assert_eq!(map.longest(), runs(bits).iter().map(|run| run.1).max().unwrap_or(0));
        Ok(())
    }

    proptest! {
        /// Compares the hints, and the places found by them, with a scan of every bit after every
        /// operation.
        #[test]
        fn p13_hints_agree_with_a_scan_after_every_operation(
            operations in prop::collection::vec((1..400_usize, 0..6_u32, any::<prop::sample::Index>()), 1..60)
        ) {
            let (mut words, mut hints) = ([0; GRAINS / 64], [Hint::FREE; GRAINS / BLOCK]);
            let mut map = Map { words: &mut words, hints: &mut hints };
            let (mut bits, mut held) = ([false; GRAINS], Vec::new());
            for (size, align, which) in operations {
                let align = 1 << align;
                let fits = |(start, length): &(usize, usize)| start.next_multiple_of(align) + size <= start + length;
                let expected = runs(&bits).iter().find(|run| fits(run)).map(|run| run.0.next_multiple_of(align));
                prop_assert_eq!(map.find(size, align, |_| Ok(())), expected);
                // A refused place is skipped; the next one is behind it.
                let beyond = expected.map(|place| map.find(size, align, |at| if at > place { Ok(()) } else { Err(at + 1) }));
                prop_assert!(beyond.flatten().is_none_or(|at| at > expected.unwrap() && map.is_free(at, at + size)));
                match expected {
                    Some(place) if held.len() < 12 => {
                        map.take(place, place + size);
                        bits[place..place + size].fill(true);
                        held.push((place, size));
                    }
                    _ if !held.is_empty() => {
                        let (place, size) = held.swap_remove(which.index(held.len()));
                        map.free(place, place + size);
                        bits[place..place + size].fill(false);
                    }
                    _ => {}
                }
                check(&map, &bits)?;
                prop_assert!(map.hints_are_exact());
            }
        }
    }
}
