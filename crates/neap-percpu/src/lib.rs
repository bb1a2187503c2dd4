//! Per-CPU data of neap: an allocator for data with one copy for each CPU, which gives its pages back.
//!
//! Sits on `neap-base`, beside the pages and objects: its memory has another life than theirs. [`PerCpuData`] is the whole
//! of it; the platform is passed to every call that acts. Memory is in chunks of reserved address space, populated page by
//! page and depopulated from the end. In the layout [`Layout::Rows`] all copies of an owner's data lie together,
//! so that whole pages are free when an owner is gone; [`Layout::CpuMajor`] is the kernel's, for comparison.
//!
//! Row rules:
//! * a row belongs to one owner; every CPU has a copy of its width in it, on cache lines of its own;
//! * an allocation goes into a row of its owner's that has room, the latest first, at most eight of them;
//! * else into a new row, as wide as the allocation or as a sixteenth of what the owner has, up to a page for all copies,
//!   whichever is more: sizes that arrive one by one share few rows, and at most a sixteenth waits;
//! * a new row lies right behind the owner's latest, where that is free; else in the first place that fits of the fullest chunk
//!   that has one. One that is longer than half a page begins a page, while all pages' unused ends together are
//!   less than a sixteenth of what is in use (and the reserve's worth): what follows it is mostly its owner's next row;
//! * an empty row is free at once.
//!
//! What was freed last is kept as it was until the next allocation, free or tick, or until somebody looks: if that allocation is for as much
//! and for the same owner, it has it again. What is longer than a page, or leaves the worker something to do, is not kept.
//!
//! So populated memory is at most 17/16 of what rows have, and twice the reserve and a page, as long as nothing was freed; rows
//! have at most 17/16 of what was asked for, for each row less than a cache line, and what sizes leave that do not fit together. An owner with one tiny allocation
//! has a line for each CPU, and shares pages with others like it. [`Owner::NOBODY`] has rows of about a page, in which all
//! allocations without an owner share lines; one that stays keeps about a page.
//!
//! Each node's copies are on the node (a group), in rows for as many CPUs as the largest node has; the room of CPUs that a
//! smaller node lacks is lost. CPUs that do not exist yet have their copies from the start.
#![no_std]
#![deny(missing_docs)]

#[cfg(test)]
extern crate std;

mod chunk;
mod copies;
mod counter;
mod data;
mod geometry;
mod histogram;
mod host;
mod lent;
mod lists;
mod map;
mod open;
mod pool;
pub mod reference;
mod rows;
mod state;
mod statistics;
mod verify;
mod walk;
mod words;
mod work;

pub use copies::PerCpu;
pub use counter::PerCpuCounter;
pub use data::{Charge, Handle, Invalid, PerCpuData, Refused, Wait};
pub use geometry::{GRANULE, LARGEST, LINE, Layout, Shape};
pub use histogram::PerCpuHistogram;
pub use host::{Alone, Host};
pub use lent::LentWords;
pub use reference::PerCpuRef;
pub use rows::Owner;
pub use statistics::{Finding, Statistics};
pub use walk::{Chunk, Dimensions, List};
pub use work::Tick;
