//! Bits in levels. A bit of the lowest level says that a shrinker may have objects. A bit of
//! another level says that a word of the level below may have set bits.
//!
//! # Concurrency
//!
//! An adder and a visitor never wait for each other, and no added object stays unseen:
//!
//! | adder | visitor |
//! |---|---|
//! | 1. makes the object visible | 1. clears the bit |
//! | 2. fence | 2. fence |
//! | 3. reads the bit; sets it if cleared | 3. looks again; sets the bit if there are objects |
//!
//! Either the adder reads the cleared bit, or the visitor sees the new object.
//!
//! The rule holds on each level; there the added object is a bit of the level below. An adder that
//! finds a bit set does not look further up: the thread that set the bit also sets the bits above.
//! This module has no lock. A model checker explores it (`tests/loom.rs`).

use neap_base::sync::{AtomicUsize, Ordering, fence};

/// A bit of a word.
#[derive(Clone, Copy, Debug)]
pub struct Bit<'w> {
    /// The word.
    pub word: &'w AtomicUsize,
    /// The bit's number.
    pub bit: u32,
}

impl Bit<'_> {
    fn mask(self) -> usize {
        1 << (self.bit % usize::BITS)
    }

    /// Returns whether it is set.
    pub fn is_set(self) -> bool {
        self.word.load(Ordering::Relaxed) & self.mask() != 0
    }
}

/// Sets a bit and those above it. The caller has made the object visible that the first bit stands
/// for. Returns the number of words that were written.
pub fn set_bits<'w>(levels: impl IntoIterator<Item = Bit<'w>>) -> u32 {
    let mut written = 0;
    for level in levels {
        // SeqCst pairs with the fence in `clear_bit_if_empty`.
        fence(Ordering::SeqCst);
        if level.is_set() {
            break;
        }
        // Release pairs with the Acquire in `clear_bit_if_empty`: the visitor that clears the bit
        // sees the object, even if it looks without a fence.
        level.word.fetch_or(level.mask(), Ordering::Release);
        written += 1;
    }
    written
}

/// Clears a bit below which the caller has seen nothing, and then calls `is_empty`, which looks
/// again. Returns whether the bit stays cleared.
///
/// If `is_empty` returns false, `levels`, which begin with the bit, are set again.
pub fn clear_bit_if_empty<'w>(levels: impl IntoIterator<Item = Bit<'w>>, is_empty: impl FnOnce() -> bool) -> bool {
    let mut levels = levels.into_iter();
    let Some(first) = levels.next() else { return true };
    // Acquire pairs with the Release in `set_bits`.
    first.word.fetch_and(!first.mask(), Ordering::Acquire);
    // SeqCst pairs with the fence in `set_bits`.
    fence(Ordering::SeqCst);
    let stays = is_empty();
    if !stays {
        set_bits(core::iter::once(first).chain(levels));
    }
    stays
}
