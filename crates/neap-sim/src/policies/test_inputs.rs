//! Inputs for tests of policies.

use neap_pages::policy::{Limits, List, ZoneState, watermarks};

/// Limits of lists of a zone with a budget.
pub(super) fn limits(managed: u32, cpus: usize) -> Limits {
    Limits::new(managed, cpus, 12, watermarks(managed, 12))
}

/// A zone with `free` pages, without reclaim.
pub(super) fn supply(limits: &Limits, free: u32) -> ZoneState<'_> {
    ZoneState { limits, free, reclaiming: false, now: 0 }
}

/// The state of a list.
pub(super) fn list(count: u32, moved: u32) -> List {
    List { count, moved }
}
