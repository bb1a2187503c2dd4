//! The result of an allocation that may need zeroing.

use core::ptr::null_mut;

/// Memory that was just allocated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fresh {
    /// Null if there is no memory.
    pub(crate) memory: *mut u8,
    /// `true` only if all bytes are zero.
    pub(crate) is_zero: bool,
}

impl Fresh {
    pub(crate) const NULL: Fresh = Fresh { memory: null_mut(), is_zero: false };
}
