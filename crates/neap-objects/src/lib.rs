//! Objects of neap: size classes, slabs, sheaves, barns, and the per-CPU slots in front of them.
//!
//! Sits between the pages and the facade. [`hot`] is what every small `malloc` and `free` touches; [`objects`] is the
//! slow way and the way back. Knows nothing of groups, limits or threads, and never reclaims.
#![no_std]
#![deny(missing_docs)]

#[cfg(test)]
extern crate self as neap_objects;
#[cfg(test)]
extern crate std;

mod barns;
pub mod class_cache;
mod exchange;
mod flush;
pub mod helper;
pub mod holes;
pub mod hot;
#[cfg(test)]
#[path = "../tests/instance/mod.rs"]
mod instance;
mod isolated_use;
#[cfg(test)]
mod known_bug_tests;
#[cfg(test)]
#[path = "../tests/machine/mod.rs"]
mod machine;
pub mod objects;
pub mod owners;
pub mod paid;
pub mod progression;
mod punch;
pub mod region;
pub mod reuse;
pub mod sheaf;
pub mod size_class;
pub mod slab;
pub mod slots;
#[cfg(test)]
mod slots_tests;
pub mod state;
mod supply;
pub mod verify;
