//! A look into another process: its identity, the pages that it publishes, requests to it, and its
//! memory.
//!
//! # Design
//!
//! | question | file |
//! |---|---|
//! | Which process is it, and is it still the same one? | `handle` |
//! | Which processes are asked for on the command line? | `subject` |
//! | Which processes run under neap? | `census` |
//! | What does a process publish? | `stat_reader`; counters `live`; types `stat_model` |
//! | How is it asked? | `control_channel`; and if it does not answer, `silence` |
//! | What lies in its memory? | `remote_memory`; caches: `cpu_caches`, `cpu_stacks`; `per_cpu` |
//! | What has its container now? | `container` |
//! | Which of these numbers are needed? | `fresh` |
//! | How much may a look cost? | `allowance` |
//! | How is its text shown? | `foreign` |
//! | Why was a look refused? | `refusal` |
//! | Sums for lists of processes | `totals`, `page_bytes` |
//!
//! The process is not trusted: all that it publishes or answers may be anything.

pub(crate) mod allowance;
pub(crate) mod census;
mod container;
pub(crate) mod control_channel;
mod cpu_caches;
pub(crate) mod cpu_stacks;
pub(crate) mod foreign;
pub(crate) mod fresh;
pub(crate) mod handle;
#[cfg(test)]
pub(crate) mod hostile_tests;
pub(crate) mod live;
pub(crate) mod page_bytes;
mod per_cpu;
pub(crate) mod refusal;
pub(crate) mod remote_memory;
pub(crate) mod silence;
pub(crate) mod stat_model;
pub(crate) mod stat_reader;
pub(crate) mod subject;
pub(crate) mod totals;
