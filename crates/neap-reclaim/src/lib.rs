//! LRU lists, shrinkers and reclaim of neap: caches free memory when a group, a node or the machine
//! needs it.
//!
//! The crate knows groups, but neither pages nor objects. No callback of a shrinker runs under a
//! lock of the crate. With restartable sequences, a visitor that finds and calls a shrinker writes
//! no cache line that visitors on other CPUs read.
#![no_std]
#![deny(missing_docs)]

#[cfg(test)]
extern crate std;

mod host;
pub mod lru;
pub mod reclaim;
pub mod shrinkers;

pub use host::Host;
pub use shrinkers::{
    Asked, Caller, CountFn, DEFAULT_BATCH, DEFAULT_SEEKS, DONE, EMPTY, FIRST_PRIORITY, GoneFn, MOST_SHRINKERS, Report,
    STOP, ScanFn, ScanPressure, ShrinkerError, ShrinkerFilter, ShrinkerId, Shrinkers, Spec, Unregistered, Visited,
    WHOLE, Work, is_calling, share, without_reclaim,
};
