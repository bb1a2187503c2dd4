//! Pages of neap: an arena of address space, a buddy allocator over it, per-CPU lists before it, and the way back to the
//! system.
//!
//! Sits between `neap-base` and the object layer. [`NodePages`] is the whole of it, with [`Pages`] for each node; the
//! platform is passed to every call.
//! No upward calls: where nothing can be had the answer is [`Exhausted`] and the caller decides what to do.
//! Lock order: growth mutex before zone mutex; a CPU's list lock is never held together with either.
//!
//! What stays resident after everything was freed: of the pages nothing once three ticks have passed in which nobody allocated; of the tables
//! what does not go back with a chunk, and of an early one less than two mebibytes where more than 64 were in use (`tables.rs`). While
//! CPUs go on using their lists, at most [`Statistics::list_highs`] (and up to seven for each) pages in them, which is at
//! most an eighth of the budget; while a program goes
//! on using the zone, what it needed since the last tick and less than two mebibytes above that. What the system
//! refuses to take is counted, and tried again less and less often.
#![no_std]
#![deny(missing_docs)]

#[cfg(test)]
extern crate self as neap_pages;
#[cfg(test)]
extern crate std;

mod arena;
mod buddy;
#[cfg(test)]
mod buddy_tests;
mod chains;
mod detach;
mod frames;
mod give_back;
mod holes;
mod huge_runs;
#[cfg(test)]
mod known_bug_tests;
#[cfg(feature = "lab")]
pub mod lab;
#[cfg(test)]
#[path = "../tests/machine/mod.rs"]
mod machine;
mod node_pages;
mod open;
mod page_lists;
mod pages;
#[cfg(feature = "lab")]
pub mod policy;
// What only the laboratory uses is not used here.
#[cfg(not(feature = "lab"))]
#[allow(unreachable_pub)]
#[cfg_attr(not(test), allow(dead_code))]
mod policy;
mod populate;
mod release;
mod run_cache;
mod runs;
mod shortage;
mod statistics;
mod survey;
mod tables;
mod verify;
mod zone;

pub use arena::MOST_ALIGNMENT;
pub use frames::{Frame, Frames, State};
pub use give_back::{Drain, Report};
pub use holes::MOST_PAGES;
pub use node_pages::NodePages;
pub use pages::{Block, Exhausted, MARKED, Pages, Shape, SideTable, TABLES};
pub use shortage::Shortage;
pub use statistics::{Finding, Statistics, Watermarks};
pub use survey::{PIECE, Part, Use};
