//! Checks of the built libraries by their instructions, symbols and unwind information.

pub(crate) mod debug_info;
pub(crate) mod depth;
pub(crate) mod fast_path;
pub(crate) mod listing;
pub(crate) mod probes;
pub(crate) mod rules;
pub(crate) mod sequences;
pub(crate) mod stack;
pub(crate) mod stub_libc;
pub(crate) mod symbols;
pub(crate) mod unwind;
