//! Shared parts of the tests of neap's crates.
//!
//! # Design
//! A development dependency by path alone, which a package leaves out; the simulator and `neap
//! bench charge` depend on its machines. It depends on `neap-base` and what that depends on, so
//! that crates above it share it. Unit tests of `neap-base`, `neap-os` and `neap-pressure` cannot
//! use it: it would bring a second build of their crate.

pub mod again;
pub mod child;
mod hand_on;
pub mod orders;
pub mod probe;
pub mod random;
pub mod shared;
pub mod terminal;
pub mod virtual_platform;
