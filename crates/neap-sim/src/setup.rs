//! The setup of a machine: memory, programs and times. Plain numbers.

use crate::program::Program;

/// Nanoseconds between two ticks.
pub const TICK: u64 = 250_000_000;
/// Nanoseconds of a second.
pub const SECOND: u64 = 1_000_000_000;

/// Kinds of locks of CPU lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListLock {
    /// No lock, since no other CPU uses the lists.
    None,
    /// A spin lock with interrupts off, which a drainer holds while it waits for the zone's.
    Blocking,
    /// A lock that is only tried: a CPU that finds it held goes to the zone.
    Try,
}

/// A machine and its programs.
pub struct Setup {
    /// Pages of each node's zone.
    pub managed: u32,
    /// Number of nodes, over which CPUs are spread in turn.
    pub nodes: usize,
    /// Programs, with a CPU for each.
    pub programs: Vec<Program>,
    /// Channels between CPUs.
    pub channels: usize,
    /// Time before measuring begins, in nanoseconds.
    pub warm: u64,
    /// Time that is measured.
    pub time: u64,
    /// Nanoseconds between two samples of lists; no CPU runs ahead further than that.
    pub step: u64,
    /// Whether each CPU is one of two hardware threads of a core.
    pub siblings: bool,
    /// Lock of the CPU lists.
    pub list_lock: ListLock,
    /// Nanoseconds between two drains; each takes the next CPU's lists.
    pub drain_every: Option<u64>,
    /// Whether gaps between a page's uses are measured, see [`crate::offline`].
    pub watched: bool,
    /// For each node the CPU that reclaims, if there is one: from the low watermark until the high
    /// one is reached.
    pub reclaimers: Vec<Option<usize>>,
}

impl Setup {
    /// One node with ample memory: lists may keep 150 MiB each, more than page_fault1 swings by.
    pub fn new(programs: Vec<Program>) -> Setup {
        Setup {
            managed: (programs.len() as u32 * 8 * 37_500).max(1 << 21),
            nodes: 1,
            programs,
            channels: 0,
            warm: SECOND,
            time: 2 * SECOND,
            step: 10_000_000,
            siblings: false,
            list_lock: ListLock::Try,
            drain_every: None,
            watched: false,
            reclaimers: Vec::new(),
        }
    }
}
