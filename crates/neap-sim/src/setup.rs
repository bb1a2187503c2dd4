//! What a machine is made from: how much memory, which programs, for how long.
//!
//! Sits between the scenarios, which fill one in, and the machine. Plain numbers; nothing here
//! acts.

use crate::program::Program;

/// Between two ticks, in nanoseconds.
pub const TICK: u64 = 250_000_000;
/// A second.
pub const SECOND: u64 = 1_000_000_000;

/// How CPU lists are locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListLock {
    /// Not at all: nobody else ever wants them.
    None,
    /// By a spin lock with interrupts off, which a drainer holds while it waits for the zone's.
    Blocking,
    /// By an attempt: who finds it held goes to the zone.
    Try,
}

/// A machine and what runs on it.
pub struct Setup {
    /// Pages of each node's zone.
    pub managed: u32,
    /// Nodes. CPUs are dealt out to them in turn.
    pub nodes: usize,
    /// A CPU for each.
    pub programs: Vec<Program>,
    /// Channels between CPUs.
    pub channels: usize,
    /// Time before measuring begins, in nanoseconds.
    pub warm: u64,
    /// Time that is measured.
    pub time: u64,
    /// Between two samples of what lists hold; no CPU runs ahead further than that.
    pub step: u64,
    /// Whether each CPU is one of two hardware threads of a core.
    pub siblings: bool,
    /// How lists are locked.
    pub list_lock: ListLock,
    /// Somebody drains all lists, one after the other, so often.
    pub drain_every: Option<u64>,
    /// Whether gaps between a page's uses are measured, see [`crate::offline`].
    pub watched: bool,
    /// For each node the CPU that reclaims when the low watermark is reached, until the high one
    /// is, if there is one.
    pub reclaimers: Vec<Option<usize>>,
}

impl Setup {
    /// One node with memory to spare: lists may keep 150 MiB each, as much as page_fault1 swings,
    /// and more.
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
