//! Handles: names of allocations of per-CPU data.
//!
//! A handle holds the address of the first copy in its low 48 bits and the class above them.

use core::fmt;
use core::num::NonZeroU64;

/// An allocation of one instance: the address of its first copy, and its row's class.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Handle(NonZeroU64);

impl Handle {
    /// Number of low bits of a handle's number that hold the address of the first copy. The bits
    /// above them hold the class.
    pub const ADDRESS_BITS: u32 = 48;

    pub(crate) fn new(address: usize, class: usize) -> Handle {
        // A process's addresses are not 0 and have fewer than 48 bits.
        let word = (class as u64) << Self::ADDRESS_BITS | address as u64;
        Handle(NonZeroU64::new(word).unwrap_or(NonZeroU64::MIN))
    }

    pub(crate) fn address(self) -> usize {
        (self.0.get() & ((1 << Self::ADDRESS_BITS) - 1)) as usize
    }

    pub(crate) fn class(self) -> usize {
        (self.0.get() >> Self::ADDRESS_BITS) as usize
    }

    /// The handle as a number, which is never 0.
    pub fn to_bits(self) -> NonZeroU64 {
        self.0
    }

    /// The handle that [`Handle::to_bits`] turned into `bits`.
    pub fn from_bits(bits: NonZeroU64) -> Handle {
        Handle(bits)
    }
}

/// Why a handle was not freed. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Invalid {
    /// The handle belongs to another instance.
    Foreign,
    /// No allocation begins there: it was freed before, or the handle is invalid.
    NotAllocated,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Invalid::Foreign => "the handle belongs to another instance",
            Invalid::NotAllocated => "no allocation begins at the handle's address; it may have been freed before",
        })
    }
}

impl core::error::Error for Invalid {}
