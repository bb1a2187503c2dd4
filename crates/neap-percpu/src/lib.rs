//! Allocator of per-CPU data: each allocation has one copy for each CPU. Unused pages are released
//! to the system.
//!
//! [`PerCpuData`] is the whole allocator. Calls that may make a system call take the platform. The
//! allocator's memory is separate from that of the page and object layers. It consists of chunks of
//! reserved address space. Chunks get memory page by page, and the worker releases their pages from
//! the end. In the layout [`Layout::Rows`] all copies of an owner's data lie together, so whole
//! pages are free when an owner ends. [`Layout::CpuMajor`] is the kernel's layout, for comparison.
//!
//! # Design
//!
//! Rules of rows:
//!
//! * A row belongs to one owner. Every CPU has a copy of the row's width in it, on cache lines of
//!   its own.
//! * An allocation goes into a row of its owner that has room. The search begins at the head of the
//!   owner's list and tries at most eight rows.
//! * Otherwise it goes into a new row. The row is as wide as the allocation or as a sixteenth of
//!   the owner's bytes, whichever is more. The sixteenth counts up to a page for all copies. So
//!   sizes that arrive one by one share few rows, and at most a sixteenth is unused.
//! * A new row lies directly behind the owner's latest row, if that place is free. Otherwise it
//!   takes the first place that fits in the fullest chunk that has one.
//! * A row longer than half a page begins at the start of a page. This holds while the unused ends
//!   of all pages are less than a sixteenth of the memory in rows, plus the reserve. The owner's
//!   next row mostly fills the end.
//! * An empty row is freed at once.
//!
//! The instance keeps the last freed allocation until the next allocation, free, tick or
//! inspection. If the next allocation has the same owner and size, and an alignment that suits, it
//! gets the kept one. An allocation whose free would empty more than two pages, or would leave work
//! for the worker, is not kept.
//!
//! # Bounds
//!
//! As long as nothing was freed, populated memory is at most 17/16 of the rows, plus two reserves
//! and a page. Rows are at most 17/16 of the requested bytes, plus two losses: less than a cache
//! line for each row, and the remainders of sizes that do not fit together. An owner with one tiny
//! allocation takes a cache line for each CPU, and shares pages with similar owners.
//! [`Owner::NONE`] has rows of about a page, in which allocations without an owner share cache
//! lines. An allocation that stays keeps its row of about a page.
//!
//! # Nodes
//!
//! Each node's copies form a group in memory of that node. Rows are as wide as the node with the
//! most CPUs needs; a smaller node does not use the rest. CPUs that do not exist yet have copies
//! from the start.
#![no_std]
#![deny(missing_docs)]

#[cfg(test)]
extern crate std;

mod alloc_bitmap;
mod chunk;
mod chunk_buckets;
mod chunk_iter;
mod counter;
mod data;
mod depopulate;
mod embedder;
mod geometry;
mod handle;
mod histogram;
mod memory_layout;
mod open;
mod per_cpu_cell;
mod pool;
pub mod reference;
mod rows;
mod state;
mod static_words;
mod statistics;
mod tables;
mod verify;
mod words;

pub use chunk_iter::{Chunk, Dimensions, List};
pub use counter::PerCpuCounter;
pub use data::{Charge, PerCpuData, Refused, TakenBack, Wait};
pub use depopulate::Tick;
pub use embedder::{Host, Standalone};
pub use geometry::{GRANULE, LARGEST, LINE, Layout, Shape};
pub use handle::{Handle, Invalid};
pub use histogram::PerCpuHistogram;
pub use per_cpu_cell::PerCpu;
pub use reference::PerCpuRef;
pub use rows::Owner;
pub use static_words::PerCpuWords;
pub use statistics::{PopulatedBytes, Statistics};
