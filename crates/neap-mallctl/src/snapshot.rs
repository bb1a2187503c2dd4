//! The values that programs read. They are those of the last refresh.
//!
//! # Concurrency
//! The words are atomic, and this module has no lock. If two threads refresh at once, a reader may
//! find some values of one refresh and some of the other.

use crate::instance::{self, WORDS};
use core::sync::atomic::{AtomicU64, Ordering};

/// A value: a field of `neap_stats`, or computed from several fields.
#[derive(Clone, Copy)]
pub(crate) enum Quantity {
    Allocated,
    Active,
    Resident,
    Retained,
    Metadata,
    /// Mapped less retained memory.
    MappedWithMemory,
    Page,
    Nodes,
    HasThread,
}

/// `MALLCTL_ARENAS_ALL`.
const ALL_ARENAS: usize = 4096;

static STATS: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];
/// Number of refreshes.
static EPOCH: AtomicU64 = AtomicU64::new(0);

/// Stores the current numbers, and increments the epoch.
pub(crate) fn refresh() {
    for (word, now) in STATS.iter().zip(instance::stats()) {
        word.store(now, Ordering::Relaxed);
    }
    EPOCH.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `epoch`.
}

/// Returns the number of refreshes. The first call does the first refresh.
pub(crate) fn epoch() -> u64 {
    // Acquire pairs with the Release in `refresh`.
    if EPOCH.load(Ordering::Acquire) == 0 {
        refresh();
    }
    EPOCH.load(Ordering::Acquire) // Pairs with the Release in `refresh`.
}

/// A word of `neap_stats`, as of the last refresh.
fn word(at: usize) -> u64 {
    epoch();
    STATS[at].load(Ordering::Relaxed)
}

/// A value as a `size_t`. Numbers passed to `word` are indexes of words in `neap_stats`.
pub(crate) fn size(value: Quantity) -> usize {
    let bytes = match value {
        Quantity::Allocated => word(0),
        Quantity::Active => word(1),
        Quantity::Resident => word(2),
        Quantity::MappedWithMemory => word(3).saturating_sub(word(4)),
        Quantity::Retained => word(4),
        Quantity::Metadata => word(5),
        Quantity::Page => word(14),
        Quantity::Nodes => word(15) & u64::from(u32::MAX),
        Quantity::HasThread => word(15) >> 32,
    };
    bytes as usize
}

/// Whether allocations are sampled, at the moment and not as of the last refresh.
pub(crate) fn is_sampled() -> bool {
    instance::stats()[17] > 0
}

/// A value as an `unsigned`.
pub(crate) fn number(value: Quantity) -> u32 {
    size(value) as u32
}

/// Whether an arena has this number. neap's nodes are the arenas.
pub(crate) fn has_arena(index: usize) -> bool {
    index < size(Quantity::Nodes) || index == ALL_ARENAS
}
