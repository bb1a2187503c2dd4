//! Objects of neap: size classes, slabs, sheaves, barns, and the per-CPU slots in front of them.
//!
//! [`fast_path`] has small allocations and frees; [`objects`] is the slow path and the return to
//! the pages. This crate does not use memory groups, and never reclaims.
#![no_std]
#![deny(missing_docs)]

#[cfg(test)]
extern crate self as neap_objects;
#[cfg(test)]
extern crate std;

pub mod barns;
pub mod charged;
pub mod class_cache;
pub mod cpu_caches;
#[cfg(test)]
mod cpu_caches_tests;
pub mod fast_path;
pub mod helper;
mod hole_punching;
pub mod holes;
#[cfg(test)]
#[path = "../tests/instance/mod.rs"]
mod instance;
mod isolated_use;
pub mod kind_map;
#[cfg(test)]
mod known_bug_tests;
pub mod live;
mod memory_layout;
pub mod object_state;
pub mod objects;
mod other_nodes;
pub mod payers;
pub mod region;
pub mod reuse;
pub mod sheaf;
pub mod size_class;
pub mod slab;
mod slab_free;
mod slab_refill;
pub mod strided_run;
mod transfer;
mod uncharger;
pub mod verify;
