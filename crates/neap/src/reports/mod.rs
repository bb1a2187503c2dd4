//! Reports to other processes, in words of the page of numbers, and their comparison with the
//! kernel's view.

pub mod chunk_report;
pub mod group_report;
pub mod map_report;
pub mod reconcile;
pub mod shrinker_report;
pub(crate) mod writer;
