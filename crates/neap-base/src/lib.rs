//! What every layer of neap stands on.
//!
//! Sits between `neap-os` and the page, object and facade crates. Nothing here knows what a page list or an object is,
//! allocates, or keeps state outside the values it hands out.
#![no_std]
#![deny(missing_docs)]

#[cfg(any(test, feature = "virtual"))]
extern crate std;

pub mod bitmap;
pub mod cpu_lock;
pub mod gate;
pub mod in_place;
pub mod mutex;
pub mod platform;
pub mod rcu;
pub mod sync;
pub mod units;
#[cfg(feature = "virtual")]
pub mod virtual_platform;

pub use cpu_lock::CpuLock;
pub use mutex::Mutex;
pub use platform::{Linux, Platform};
pub use rcu::{Rcu, RcuHead};
pub use units::{Order, Pfn};
