//! Where the fields of [`FastPath`] lie.
//!
//! # Design
//!
//! malloc and free hold the address of `table` in a register. Most fields that they use lie in the
//! 128 bytes before it, in reach of a one-byte displacement.
//!
//! The value is placed at the start of a page. The hot fields avoid two ranges of page offsets.
//! Programs write to the first cache line of every page that they get, and these lines compete for
//! a few cache sets. A load may wait for an earlier store to an equal offset of another page (4K
//! aliasing), such as a store into the stacks of a region. So the hot fields lie behind both
//! ranges. There is no room there for the words of `states`. They lie at the offsets of the stacks
//! of large classes.
//!
//! # Invariants
//!
//! Assertions at the end of this file hold these rules when the crate is compiled.

use super::FastPath;
use crate::object_state::States;
use crate::region::STACKS_END;
use crate::size_class::{Class, GRAIN, LARGEST, OF_GRAINS};
use core::mem::offset_of;
use neap_os::rseq::SequenceTable;

/// Words of padding at the start of [`FastPath`](super::FastPath). They place the hot fields behind
/// two ranges of page offsets: the first cache line, which programs write on every page, and the
/// stacks of a region. Equal offsets on two pages can delay a load (4K aliasing).
pub(super) const PADDING: usize = 389;

/// Binary logarithm of a grain.
pub(super) const GRAIN_SHIFT: u32 = GRAIN.trailing_zeros();

/// Entries of `stack_offsets`: sizes in grains, from the largest to 0.
pub(super) const SIZES: usize = LARGEST / GRAIN + 1;

/// Offset of a field from `table`, in bytes.
macro_rules! from_table {
    ($field:ident) => {
        core::mem::offset_of!(FastPath, $field) as isize - core::mem::offset_of!(FastPath, table) as isize
    };
}

/// Offset of the entry of size 0 in `stack_offsets` from `table`, in bytes.
pub(super) const NO_SIZE: isize = from_table!(stack_offsets) + (entry_of(0) * size_of::<u16>()) as isize;

/// Assembly text that lets a function which consists of one block begin on a cache line. The block
/// starts with it.
///
/// The compiler places each function in a section of its own. The directive raises the alignment of
/// that section. At the start of the function it skips nothing, elsewhere at most one byte.
macro_rules! on_cache_line {
    () => {
        ".p2align 6, , 1"
    };
}

/// Number of the entry of a size, at most [`LARGEST`], in `stack_offsets`.
#[inline(always)]
#[expect(clippy::manual_div_ceil, reason = "two instructions instead of five")]
pub(super) const fn entry_of(size: usize) -> usize {
    SIZES - 1 - (size + GRAIN - 1) / GRAIN
}

/// The entries of `stack_offsets`.
pub(super) const fn stack_offsets() -> [u16; SIZES] {
    let mut offsets = [0; SIZES];
    let mut grains = 0;
    while grains < SIZES {
        offsets[entry_of(grains * GRAIN)] = Class(OF_GRAINS[grains]).stack_offset();
        grains += 1;
    }
    offsets
}

const _: () = {
    assert!(offset_of!(FastPath, table) <= offset_of!(FastPath, limit) + 128 && align_of::<SequenceTable>() >= 64);
    // `limit` and `table` lie at page offsets behind the stacks of a region.
    assert!(offset_of!(FastPath, limit) % 4096 >= STACKS_END && offset_of!(FastPath, table) % 4096 >= STACKS_END);
    // `states`, and the entries in `stack_offsets` for sizes of whole pages, do not lie at page
    // starts.
    assert!(offset_of!(FastPath, states) >= 64 && offset_of!(FastPath, states) + size_of::<States>() <= 4096);
    let mut size = 4096;
    while size <= LARGEST {
        assert!((offset_of!(FastPath, stack_offsets) + entry_of(size) * size_of::<u16>()) % 4096 >= 64);
        size += 4096;
    }
};
