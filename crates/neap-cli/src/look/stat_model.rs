//! The numbers in a process's page that `neap stat` and `neap top` show.
//!
//! They come from the JSON text that [`stat_reader`](crate::look::stat_reader) has read and
//! escaped, and from the live counters. This module has only types and sums. The library in a
//! process may be older or newer than this command.

use std::collections::BTreeMap;

use anyhow::Context;
use neap_pressure::{LimitedBy, Pressure};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

use crate::look::stat_reader::{Page, ProcessStatus, VERSION};

/// The shown numbers of a page. Numbers that another version of the library lacks are zero.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Numbers {
    pub(crate) version: String,
    pub(crate) mode: Mode,
    /// Options that may change, with the values in force.
    pub(crate) settings: BTreeMap<String, String>,
    /// The container that the option `limit` follows, if it follows one.
    pub(crate) container: Option<ContainerNumbers>,
    /// Counts of heap profiles, if the option `profile_at_limit` is set.
    pub(crate) heap_profiles: Option<HeapProfiles>,
    pub(crate) bytes: Bytes,
    pub(crate) per_cpu: Option<PerCpuNumbers>,
    /// Present if the process has had memory groups.
    pub(crate) groups: Option<IgnoredAny>,
    pub(crate) pages: Pages,
    pub(crate) lists: ListNumbers,
    pub(crate) released: Released,
    pub(crate) holes: Holes,
    pub(crate) reuse: Reuse,
    /// Guarded samples, if the process may have some.
    pub(crate) guard: Option<GuardNumbers>,
    /// Allocations that were refused.
    pub(crate) refused: u64,
    /// Objects that the program's shrinkers have freed.
    pub(crate) shrunk: u64,
    pub(crate) ticks: u64,
    pub(crate) drains: u64,
    pub(crate) fences: u64,
    pub(crate) skipped: u64,
    pub(crate) busy: u64,
    pub(crate) nodes: Vec<Node>,
    pub(crate) unbound_segments: u64,
    pub(crate) classes: Vec<Class>,
    pub(crate) cpus: Vec<Cpu>,
    pub(crate) truncated: bool,
    /// Whether this command has counted the contents of CPUs' caches now.
    pub(crate) cpus_read_now: bool,
    /// Whether the live counters did not change while they were read.
    pub(crate) settled: bool,
}

impl Numbers {
    /// Parses the numbers of a page. Keys that [`Numbers`] does not have are ignored.
    pub(crate) fn read(process: &ProcessStatus, page: &Page) -> anyhow::Result<Numbers> {
        let numbers = Numbers::deserialize(&page.object);
        numbers.with_context(|| format!("the numbers of process {} are not those of neap {VERSION}", process.pid))
    }
}

/// Guarded samples of allocations.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct GuardNumbers {
    pub(crate) live: u64,
    pub(crate) bytes: u64,
    pub(crate) guarded: u64,
    pub(crate) refused: u64,
}

impl GuardNumbers {
    /// Returns the line of the report.
    pub(crate) fn shown(&self) -> String {
        let GuardNumbers { live, bytes, guarded, refused } = self;
        format!("Guarded: {live} samples with {} KiB; {guarded} so far, {refused} left out\n", bytes >> 10)
    }
}

/// Memory taken from the system, in pages, and memory reused instead.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Reuse {
    pub(crate) grown: u64,
    pub(crate) sweeps: u64,
    pub(crate) objects: u64,
    pub(crate) grown_in_sweeps: u64,
    pub(crate) released: u64,
    pub(crate) beside_free_pages: u64,
    pub(crate) beside_barns: u64,
    pub(crate) beside_slabs: u64,
    pub(crate) waits_in_vain: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Mode {
    pub(crate) slots: String,
    pub(crate) why: String,
    pub(crate) isolated_cpus: Vec<u32>,
    pub(crate) background: String,
    pub(crate) interval_ms: u64,
    pub(crate) page_size: u64,
    pub(crate) huge: bool,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Bytes {
    pub(crate) mapped: u64,
    pub(crate) used: u64,
    pub(crate) cached: u64,
    /// Part of `cached`: objects on the stacks of CPUs, as the last tick found them.
    pub(crate) on_stacks: u64,
    pub(crate) free_resident: u64,
    pub(crate) tables: u64,
    pub(crate) unaccounted: i64,
}

/// Counts of heap profiles at a limit: those written, and those that could not be written.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(crate) struct HeapProfiles {
    pub(crate) written: u64,
    pub(crate) failed: u64,
}

/// Numbers of `limit:auto` about the container: bytes, and counts since the process began.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub(crate) struct ContainerNumbers {
    /// The nearest limit; 0 if none is visible.
    pub(crate) limit: u64,
    pub(crate) used: u64,
    pub(crate) heap_limit: u64,
    pub(crate) looks: u64,
    /// Part of `looks` that allocations at the limit have requested.
    pub(crate) looks_for_allocations: u64,
    /// Number of times that the heap went beyond its limit.
    pub(crate) passed: u64,
    /// `None` if no limit is visible, or if this command does not know the name of the level.
    #[serde(deserialize_with = "pressure_of_name")]
    pub(crate) pressure: Option<Pressure>,
    /// Kind of the level that has the nearest limit.
    #[serde(deserialize_with = "kind_of_name")]
    pub(crate) limited_by: Option<LimitedBy>,
    /// Milliseconds until the limit is reached at the observed growth; `None` without growth.
    pub(crate) ms_to_wall: Option<u64>,
    /// Whether this command has looked now. It does not observe growth.
    pub(crate) read_now: bool,
}

fn pressure_of_name<'de, D: Deserializer<'de>>(name: D) -> Result<Option<Pressure>, D::Error> {
    let name: Option<String> = Deserialize::deserialize(name)?;
    Ok(Pressure::ALL.into_iter().find(|level| Some(level.name()) == name.as_deref()))
}

fn kind_of_name<'de, D: Deserializer<'de>>(name: D) -> Result<Option<LimitedBy>, D::Error> {
    let name: Option<String> = Deserialize::deserialize(name)?;
    Ok(LimitedBy::ALL.into_iter().find(|kind| Some(kind.name()) == name.as_deref()))
}

/// Bytes of the used and of the empty pages of per-CPU data.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PerCpuNumbers {
    pub(crate) used: u64,
    pub(crate) free: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Pages {
    pub(crate) managed: u64,
    pub(crate) free: u64,
    pub(crate) backed_free: u64,
    pub(crate) used: u64,
    pub(crate) listed: u64,
    pub(crate) releasing: u64,
    pub(crate) draining: u64,
    pub(crate) populated: u64,
    pub(crate) budget: Option<u64>,
    pub(crate) watermarks: Watermarks,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct ListNumbers {
    pub(crate) highs: u64,
    pub(crate) drains: u64,
    pub(crate) need_drains: u64,
    pub(crate) need_pages: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Node {
    pub(crate) node: u32,
    pub(crate) managed: u64,
    pub(crate) free: u64,
    pub(crate) backed_free: u64,
    pub(crate) used: u64,
    pub(crate) listed: u64,
    pub(crate) highs: u64,
    pub(crate) zone_waits: u64,
    pub(crate) misses: u64,
    pub(crate) watermarks: Watermarks,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Watermarks {
    pub(crate) min: u64,
    pub(crate) low: u64,
    pub(crate) high: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Released {
    pub(crate) pages: u64,
    pub(crate) calls: u64,
    pub(crate) failures: u64,
}

/// Holes: pages of partly used slabs that have no objects and were released. Counts of the current
/// holes, and of pages released and refilled so far.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Holes {
    pub(crate) pages: u64,
    pub(crate) released: u64,
    pub(crate) refilled: u64,
}

#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Class {
    pub(crate) size: u64,
    pub(crate) slabs: u64,
    pub(crate) holes: u64,
    pub(crate) objects: u64,
    pub(crate) in_slabs: u64,
    pub(crate) in_barn: u64,
    pub(crate) in_slots: u64,
}

impl Class {
    pub(crate) fn cached_bytes(&self) -> u64 {
        self.size.saturating_mul(self.in_slabs.saturating_add(self.in_barn).saturating_add(self.in_slots))
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Cpu {
    pub(crate) cpu: u32,
    pub(crate) kind: String,
    pub(crate) cached_bytes: u64,
    pub(crate) stacks: u64,
    pub(crate) page_list: u64,
    pub(crate) list_high: u64,
}
