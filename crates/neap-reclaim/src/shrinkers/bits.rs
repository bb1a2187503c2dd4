//! Bits in levels: a bit says that the word below it may have some, down to the bits of shrinkers that may have something.
//!
//! Sits under the places of groups, and is what a model checker explores. An adder and a visitor never wait for each other, and none of
//! what was added stays unseen:
//! 1. the adder makes what it adds visible, B the visitor clears the bit; 2. each has a fence; 3. the adder looks at the bit, and the
//!    visitor at what is there. So either the adder sees the bit cleared, and sets it, or the visitor sees what was added, and does.
//!
//! The same holds on each level, where what is added is a bit of the level below. Who finds a bit set does not look further up: whoever set
//! it is on the way there. No locks.

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

    /// Whether it is set.
    pub fn is_set(self) -> bool {
        self.word.load(Ordering::Relaxed) & self.mask() != 0
    }
}

/// Sets a bit and those above it, by one who has added what the first stands for. Answers how many words were written.
pub fn raise<'w>(levels: impl IntoIterator<Item = Bit<'w>>) -> u32 {
    let mut written = 0;
    for level in levels {
        // SeqCst pairs with the fence in `lower`.
        fence(Ordering::SeqCst);
        if level.is_set() {
            break;
        }
        // Release pairs with the Acquire in `lower`: who clears the bit sees what was added, also where it looks without a fence.
        level.word.fetch_or(level.mask(), Ordering::Release);
        written += 1;
    }
    written
}

/// Clears a bit by one who has seen nothing below it, and asks again: where there is something after all, `levels`, which begin with the bit, are raised
/// again. Answers whether the bit stays cleared.
pub fn lower<'w>(levels: impl IntoIterator<Item = Bit<'w>>, is_empty: impl FnOnce() -> bool) -> bool {
    let mut levels = levels.into_iter();
    let Some(first) = levels.next() else { return true };
    // Acquire pairs with the Release in `raise`.
    first.word.fetch_and(!first.mask(), Ordering::Acquire);
    // SeqCst pairs with the fence in `raise`.
    fence(Ordering::SeqCst);
    let stays = is_empty();
    if !stays {
        raise(core::iter::once(first).chain(levels));
    }
    stays
}
