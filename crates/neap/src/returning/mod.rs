//! Return of memory that the program does not use: ticks, neap's thread, frees without a thread,
//! and drains.

pub(crate) mod background;
pub mod drain;
pub(crate) mod in_call;
pub mod maintenance;
