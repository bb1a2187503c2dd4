//! Virtual CPUs in virtual time that run neap's page lists, policies and zone, also on large
//! machines.
//!
//! The lists, the policies, the buddy and the code that moves pages between them are those of the
//! library (`neap-pages` with its feature `lab`). CPUs, the wait for the zone's lock, and time are
//! simulated. [`cost`] has the costs with their origins. [`validate`] compares results with
//! published ones, for runs that were not used for calibration. Scenario, policy and seed determine
//! a run.
#![forbid(unsafe_code)]
#![deny(missing_docs)]
#![allow(clippy::std_instead_of_core, reason = "an ordinary library on std; nothing of it is inside the allocator")]

pub mod compare;
pub mod cost;
pub mod histogram;
pub mod machine;
pub mod measure;
pub mod offline;
pub mod page;
pub mod plots;
pub mod policies;
pub mod program;
pub mod random;
pub mod scenarios;
pub mod setup;
pub mod trace;
pub mod validate;
