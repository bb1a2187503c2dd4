//! The page layer of neap: an arena of address space, a buddy allocator over the arena, per-CPU
//! lists in front of the buddy allocator, and the release of memory to the system.
//!
//! [`NodePages`] is the entry point. It has one [`Pages`] for each node. The caller passes the
//! platform to every call. If there is no memory, an allocation returns [`Exhausted`].
//!
//! # Locking
//!
//! The growth mutex is taken before a zone's mutex. A CPU's list lock is never held together with
//! either.
//!
//! # Resident memory
//!
//! After the program has freed everything, the following stays resident:
//! * Pages: none, once three ticks have passed without an allocation.
//! * Tables: all tables that are not released with a chunk. If more than 64 MiB were in use, also
//!   less than 2 MiB of each early table (`tables.rs`).
//! * While CPUs go on using their lists: at most [`Statistics::list_highs`] pages in all lists, and
//!   up to seven more for each CPU. That is at most an eighth of the budget.
//! * While a program goes on using the zone: the memory that it needed since the last tick, and
//!   less than 2 MiB more.
//!
//! [`Statistics::release_failures`] counts the calls that the system refuses. Later ticks try
//! again, at growing intervals.
#![no_std]
#![deny(missing_docs)]

#[cfg(test)]
extern crate self as neap_pages;
#[cfg(test)]
extern crate std;

mod arena;
mod block_batch;
mod buddy;
#[cfg(test)]
mod buddy_tests;
mod change;
mod frames;
mod holes;
mod huge_runs;
mod init;
mod isolate;
#[cfg(test)]
mod known_bug_tests;
#[cfg(feature = "lab")]
pub mod lab;
mod live;
#[cfg(test)]
#[path = "../tests/machine/mod.rs"]
mod machine;
mod memory_layout;
#[cfg(feature = "lab")]
mod meter;
mod node_pages;
mod page_lists;
mod pages;
#[cfg(feature = "lab")]
pub mod policy;
mod trim;
// Without the feature `lab`, some parts of `policy` (below) are unused.
mod page_snapshot;
#[cfg(not(feature = "lab"))]
#[allow(unreachable_pub)]
#[cfg_attr(not(test), allow(dead_code))]
mod policy;
mod populate;
mod purge;
mod run_cache;
mod runs;
mod settings;
mod shape;
mod statistics;
mod tables;
mod units;
mod verify;
mod watermark;
mod whole;
mod zone;

pub use arena::MOST_ALIGNMENT;
pub use frames::{Frame, Frames, State};
pub use holes::MOST_PAGES;
pub use live::ZoneCell;
pub use node_pages::NodePages;
pub use page_snapshot::{PIECE, Use};
pub use pages::Pages;
pub use purge::{Effort, Report};
pub use settings::Settings;
pub use shape::{BATCH_SCALE, EarlyTables, MARKED, MOST_BATCH_SCALE, Shape, SideTable, TABLES};
pub use statistics::{Statistics, Watermarks};
pub use tables::MappingKind;
pub use trim::{Drain, DrainSum};
pub use units::{Block, Exhausted, HUGE, HUGE_BYTES};
pub use watermark::Shortage;
pub use zone::INTERVALS;
