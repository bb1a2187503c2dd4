//! Reports to other processes, which this process writes to the page of numbers. [`reconcile`]
//! compares neap's counters with the kernel's view.

pub mod chunk_report;
pub mod group_report;
pub mod map_report;
pub mod reconcile;
pub mod shrinker_report;
pub(crate) mod writer;
