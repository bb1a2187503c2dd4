//! neap: a memory manager for Linux processes.
//!
//! `neap-malloc` (the C library's malloc family) and [`Neap`] (Rust's global allocator) use the
//! process's manager. Tests make managers with [`mm::Mm`]. `Core::reclaim_for_allocation` defines
//! the order in which caches give memory to an allocation that found none.
//!
//! - [`Neap`]: the process's allocator, `#[global_allocator]`.
//! - [`groups`]: memory groups: charges, limits, and futures or threads that are charged.
//! - [`reclaim`]: caches that shrink at a limit. [`lru`]: lists in the order of a cache's eviction.
//! - [`fn@set`]: changes options while the process runs, such as `limit:auto`, by which the heap
//!   follows the container. [`fn@headroom`]: room in the container.
//! - [`fn@stats`]: the process's memory by state, in one call. [`statistics`] has the details.
//! - [`dump_profile`]: writes a heap profile to a file.
//! - [`percpu`]: per-CPU data. [`mod@drain`]: empties caches. [`mod@verify`]: checks the manager.
//!
//! Example: a cache with a limit, which shrinks at the limit instead of refusing new entries.
#![cfg_attr(feature = "std", doc = concat!("```\n", include_str!("../examples/tenant_cache.rs"), "```"))]
#![no_std]
#![deny(missing_docs)]

#[cfg(test)]
extern crate std;

mod allocation;
mod control;
mod fork;
mod global;
pub mod groups;
mod guard;
mod limits;
pub mod lru;
mod main_thread;
pub mod mm;
mod numbers;
mod once;
pub mod options;
pub mod percpu;
pub mod process;
mod profile;
pub mod reclaim;
mod reports;
mod returning;
mod state;
pub mod trace;
pub mod verify;

pub use global::Neap;
pub use limits::dump::{NotDumped, dump_profile};
pub use limits::headroom::{Headroom, LimitedBy, Pressure, headroom};
pub use neap_os::fatal::{Line, die, say};
pub use numbers::stats::{Stats, stats};
pub use numbers::{statistics, stats};
pub use options::change::set;
pub use options::settings;
pub use reports::{chunk_report, group_report, map_report, reconcile, shrinker_report};
pub use returning::{drain, maintenance};
pub use state::checked::NamedSize;
