//! neap: a memory manager for Linux processes.
//!
//! Used by `neap-malloc` (the C library's malloc family), [`Neap`] (Rust's global allocator), and
//! tests, which make managers of any shape with [`mm::Mm`]. Locks are those of the layers below.
//! One function, `Core::make_room`, has the order in which caches give memory to an allocation.
//!
//! - [`Neap`]: the process's allocator, `#[global_allocator]`.
//! - [`groups`]: memory groups: charges, limits, and futures or threads that are charged.
//! - [`reclaim`]: caches that shrink at a limit. [`lru`]: lists in the order of a cache's eviction.
//! - [`fn@set`]: changes options while the process runs. [`fn@headroom`]: room in the container.
//! - [`fn@stats`]: the process's memory by state, in one call. [`statistics`] has the details.
//! - [`percpu`]: per-CPU data. [`mod@drain`], [`mod@verify`]: give back, check.
//!
//! A cache with a limit that shrinks instead of refusing:
#![cfg_attr(feature = "std", doc = concat!("```\n", include_str!("../examples/tenant_cache.rs"), "```"))]
#![no_std]
#![deny(missing_docs)]

#[cfg(test)]
extern crate std;

mod background;
mod builtin_shrinkers;
mod callback_clock;
mod change;
mod charged_alloc;
mod checked;
pub mod chunk_report;
mod control;
mod control_channel;
pub mod drain;
mod following;
mod fork;
mod global;
pub mod group_report;
pub mod groups;
mod headroom;
mod high;
mod in_call;
mod large;
mod limit;
pub mod lists;
mod live;
pub mod lru;
mod main_thread;
pub mod maintenance;
pub mod map_report;
mod memory_groups;
pub mod mm;
mod once;
pub mod options;
mod payers;
mod per_cpu_data;
pub mod percpu;
pub mod process;
mod profile;
mod reallocate;
pub mod reclaim;
mod reclaim_pass;
mod reclaim_workers;
#[cfg(test)]
mod reclaim_workers_tests;
pub mod reclaiming;
pub mod reconcile;
mod report_writer;
mod room;
pub mod settings;
pub mod shrinker_report;
mod splits;
mod stat_page;
mod stat_sheet;
mod stat_text;
mod state;
pub mod statistics;
pub mod stats;
mod thread_groups;
pub mod trace;
pub mod verify;
#[cfg(test)]
mod waiting_tests;
mod watching;

pub use change::set;
pub use global::Neap;
pub use headroom::{Headroom, Pressure, headroom};
pub use neap_os::fatal::{Line, die, say};
pub use state::checked::NamedSize;
pub use stats::{Stats, stats};
