//! neap for C: the functions that `include/neap.h` declares.
//!
//! The functions call the process's [`neap::percpu`], [`neap::groups`], [`neap::lru`] and
//! [`neap::reclaim`]. Each function checks its arguments, calls neap, and returns numbers. There is
//! no state here: objects lie in the caller's memory (`object.rs`). No function unwinds, writes
//! errno, or allocates memory beyond the request. The header holds the contract of every function.
//!
//! The library libneap is this crate with the feature `runtime`. `neap-malloc` contains this crate
//! as well. A program with both has one instance: the loader finds the preloaded functions first.
#![cfg_attr(not(test), no_std)]

mod charge;
mod counter;
mod error;
mod event;
mod group;
#[cfg(test)]
mod group_tests;
#[cfg(test)]
mod header_tests;
mod headroom;
mod histogram;
mod instance;
mod list;
#[cfg(test)]
mod list_tests;
mod object;
mod percpu;
mod reference;
mod shrinker;
#[cfg(test)]
mod shrinker_tests;
#[cfg(test)]
mod tests;
