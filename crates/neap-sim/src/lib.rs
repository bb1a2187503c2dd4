//! Virtual CPUs in virtual time that run neap's page lists, policies and zone, on machines larger
//! than ours.
//!
//! Sits on `neap-pages` with its feature `lab`; `neap lab` sits on it. The lists, the policies, the
//! buddy and the code that moves pages between them are those of the library; simulated are CPUs,
//! the wait for the zone's lock, and time. What things cost stands in [`cost`] with where each
//! number is from; how far the result is from what was published, for runs that nothing was
//! calibrated on, in [`validate`]. Reads no clock: scenario, policy and seed decide everything.
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
pub mod policies;
pub mod program;
pub mod random;
pub mod scenarios;
pub mod setup;
pub mod trace;
pub mod validate;
