//! The setup of a machine: memory, programs and times.

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
    /// A spin lock with interrupts off. A drainer holds it while it waits for the zone's lock.
    Blocking,
    /// A lock that CPUs only try. A CPU that finds it held goes to the zone.
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
    /// Nanoseconds between two samples of lists. No CPU runs ahead further than that.
    pub step: u64,
    /// Whether each CPU is one of two hardware threads of a core.
    pub siblings: bool,
    /// Lock of the CPU lists.
    pub list_lock: ListLock,
    /// Nanoseconds between two drains. Each drain empties the next CPU's lists.
    pub drain_every: Option<u64>,
    /// Whether gaps between a page's uses are measured, see [`crate::offline`].
    pub watched: bool,
    /// For each node the CPU that reclaims, if any. It starts at the low watermark, and stops when
    /// the high watermark is reached.
    pub reclaimers: Vec<Option<usize>>,
}

impl Setup {
    /// Makes a setup with one node with ample memory. Each list may keep 150 MiB, more than
    /// page_fault1 allocates and frees.
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
