//! Shared foundations of neap's layers: locks, the fork gate, RCU, units and the platform.
//!
//! The crate depends on neither page lists nor objects, and does not allocate. It keeps no state
//! outside the values that it returns.
#![no_std]
#![deny(missing_docs)]

#[cfg(test)]
extern crate std;

pub mod bitmap;
pub mod cpu_lock;
pub mod finding;
pub mod gate;
pub mod in_place;
pub mod listed_enum;
pub mod live;
pub mod mutex;
pub mod packed_stack;
pub mod platform;
pub mod profile_area;
pub mod profile_file;
pub mod rcu;
pub mod sync;
pub mod units;

pub use cpu_lock::CpuLock;
pub use finding::Finding;
pub use mutex::Mutex;
pub use platform::{Linux, Platform};
pub use rcu::Rcu;
pub use units::{Order, Pfn};
