//! neap for C: what `include/neap.h` declares, and no more.
//!
//! Sits between C and the process's instance: [`neap::percpu`], [`neap::groups`], [`neap::lru`] and [`neap::reclaim`]. Each function checks what it was given, calls the one that does the
//! work, and answers in numbers. No state of its own: objects lie in the caller's memory ([`object`]). Nothing unwinds, writes errno
//! or allocates memory but what was asked for. The contract of every function stands in the header, once.
//!
//! The library libneap is this crate with the feature `runtime`; `neap-malloc` contains it as well, so that a program with
//! both has one instance: the loader finds the preloaded functions first.
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
mod histogram;
mod instance;
mod list;
#[cfg(test)]
mod list_tests;
mod object;
mod percpu;
mod reference;
#[cfg(feature = "runtime")]
mod runtime;
mod shrinker;
#[cfg(test)]
mod shrinker_tests;
#[cfg(test)]
mod tests;
