//! Shared parts of the tests of neap's crates.
//!
//! # Design
//! A development dependency by path alone, which a package leaves out. It depends on `neap-base`
//! only, so that crates above it share it. Unit tests of `neap-base`, `neap-os` and
//! `neap-pressure` cannot use it: it would bring a second build of their crate.

pub mod again;
pub mod child;
pub mod orders;
pub mod probe;
pub mod random;
pub mod shared;
pub mod terminal;
