//! Objects of neap: size classes, slabs, sheaves, barns, and the per-CPU slots in front of them.
//!
//! [`hot`] is the fast path of small allocations and frees; [`objects`] is the slow path and the
//! return to the pages. This crate knows nothing of memory groups, and never reclaims.
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
pub mod live;
#[cfg(test)]
#[path = "../tests/machine/mod.rs"]
mod machine;
pub mod objects;
mod other_nodes;
pub mod owners;
pub mod paid;
mod payback;
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
