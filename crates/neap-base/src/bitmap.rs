//! Bits in 64-bit words: set, clear, count and find, by range.
//!
//! Pure functions over `&[u64]`, used by the chunk map, the backed map and the slabs. The caller
//! holds the lock that protects the words. The functions panic at an index beyond the words, which
//! is a bug of the caller.

/// Whether `bit` is set.
#[inline]
pub fn get(words: &[u64], bit: usize) -> bool {
    words[bit / 64] >> (bit % 64) & 1 == 1
}

/// Sets `bit`; returns whether it was set before.
#[inline]
pub fn set(words: &mut [u64], bit: usize) -> bool {
    let (word, mask) = (&mut words[bit / 64], 1 << (bit % 64));
    let before = *word & mask != 0;
    *word |= mask;
    before
}

/// Clears `bit`; returns whether it was set before.
#[inline]
pub fn clear(words: &mut [u64], bit: usize) -> bool {
    let (word, mask) = (&mut words[bit / 64], 1 << (bit % 64));
    let before = *word & mask != 0;
    *word &= !mask;
    before
}

/// Calls `each` for every word that `start..end` touches, with its index and a mask of the range's
/// bits in it.
#[inline]
fn masks(start: usize, end: usize, mut each: impl FnMut(usize, u64)) {
    if start >= end {
        return;
    }
    let (first, last) = (start / 64, (end - 1) / 64);
    let (from, to) = (u64::MAX << (start % 64), u64::MAX >> (63 - (end - 1) % 64));
    if first == last {
        return each(first, from & to);
    }
    each(first, from);
    (first + 1..last).for_each(|word| each(word, u64::MAX));
    each(last, to);
}

/// Sets every bit of `start..end`.
pub fn set_range(words: &mut [u64], start: usize, end: usize) {
    masks(start, end, |word, mask| words[word] |= mask);
}

/// Clears every bit of `start..end`.
pub fn clear_range(words: &mut [u64], start: usize, end: usize) {
    masks(start, end, |word, mask| words[word] &= !mask);
}

/// Number of set bits in `start..end`.
pub fn count_range(words: &[u64], start: usize, end: usize) -> usize {
    let mut count = 0;
    masks(start, end, |word, mask| count += (words[word] & mask).count_ones() as usize);
    count
}

/// The first set bit of `start..end`.
pub fn next_set(words: &[u64], start: usize, end: usize) -> Option<usize> {
    next(words, start, end, 0)
}

/// The first clear bit of `start..end`.
pub fn next_clear(words: &[u64], start: usize, end: usize) -> Option<usize> {
    next(words, start, end, u64::MAX)
}

#[inline]
fn next(words: &[u64], start: usize, end: usize, flip: u64) -> Option<usize> {
    if start >= end {
        return None;
    }
    let (mut word, last) = (start / 64, (end - 1) / 64);
    let mut bits = (words[word] ^ flip) & u64::MAX << (start % 64);
    while bits == 0 && word < last {
        word += 1;
        bits = words[word] ^ flip;
    }
    let bit = word * 64 + bits.trailing_zeros() as usize;
    (bits != 0 && bit < end).then_some(bit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    const BITS: usize = 200;

    fn words(bits: &[bool]) -> Vec<u64> {
        let mut words = std::vec![0; BITS.div_ceil(64)];
        bits.iter().enumerate().filter(|(_, set)| **set).for_each(|(bit, _)| _ = set(&mut words, bit));
        words
    }

    proptest! {
        #[test]
        fn every_function_agrees_with_a_list_of_booleans(bits in prop::collection::vec(any::<bool>(), BITS), a in 0..BITS, b in 0..BITS) {
            let (start, end) = (a.min(b), a.max(b));
            let map = words(&bits);
            let range = || bits.iter().enumerate().skip(start).take(end - start);
            prop_assert_eq!(get(&map, start), bits[start]);
            prop_assert_eq!(count_range(&map, start, end), range().filter(|(_, set)| **set).count());
            prop_assert_eq!(next_set(&map, start, end), range().find(|(_, set)| **set).map(|(bit, _)| bit));
            prop_assert_eq!(next_clear(&map, start, end), range().find(|(_, set)| !**set).map(|(bit, _)| bit));
            for value in [true, false] {
                let (mut changed, mut model) = (map.clone(), bits.clone());
                if value { set_range(&mut changed, start, end) } else { clear_range(&mut changed, start, end) }
                model[start..end].fill(value);
                prop_assert_eq!(changed, words(&model));
            }
            let mut changed = map.clone();
            prop_assert_eq!(set(&mut changed, a), bits[a]);
            prop_assert_eq!(clear(&mut changed, a), true);
            prop_assert!(!get(&changed, a));
        }
    }
}
