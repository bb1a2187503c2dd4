//! A pass: it asks groups for memory, at rising priority, until it has freed enough.
//!
//! # Design
//!
//! Priorities go from 12 down to 0, the most urgent one. At each, the pass walks the groups below
//! its target on every node. It asks each group for a part of its unprotected objects.
//!
//! | pass | walks | ends |
//! |---|---|---|
//! | direct, first attempt | shared with other passes | with enough bytes, or after priority 0 |
//! | direct, second, if the first freed nothing | own, from the shared position | likewise |
//! | direct, third, if `low` protected a group | own; takes bytes that `low` protects | likewise |
//! | background | own, each to its end | with enough bytes, or after priority 1 |
//!
//! A direct pass stops as soon as it has enough. Otherwise every group would evict objects for one
//! group that needs little. The second attempt exists because other passes may have taken all
//! groups of the shared walks.
//!
//! The freed bytes of a pass are the fall of the target's usage, or the sum that shrinkers
//! reported, whichever is larger. Usage falls less if other threads charge meanwhile. A shrinker
//! that reports too much ends a pass too early. A charge that is still refused then asks again.
//!
//! A reading of the used bytes looks at all stocks and caches. A pass reads them only when a
//! quarter more objects were freed than at the last reading, when the yield so far suggests that
//! there is enough, and at the end of a walk.
//!
//! # Locking
//!
//! A pass takes no locks but those of [`Levels`].
//!
//! Source: Linux `mm/vmscan.c` (`do_try_to_free_pages`, `shrink_node`, `balance_pgdat`), by
//! description.

use crate::reclaim::group_iter::{Generation, Walks};
use crate::reclaim::pressure::{Level, Levels};
use crate::reclaim::scan_target::{LowProtection, ProtectedBy, scan_pressure};
use crate::shrinkers::{FIRST_PRIORITY, ScanPressure};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use neap_base::platform::nodes::MAX_NODES;
use neap_groups::protection::GroupUsage;
use neap_groups::{Event, GroupId};

/// Priority from which on, down to 0, pressure counts as critical: earlier priorities did not
/// suffice.
const HARD: u32 = (100_u32 / 10).ilog2();
/// Used bytes are read again when the objects freed since the last reading are this part of those
/// freed before it.
const READING_PART: u64 = 4;
/// Least goal of a pass in bytes, so that not every charge at a limit needs a pass.
pub const GOAL: u64 = 128 << 10;
/// Part of a group's usage. A pass requests no more than this, unless more is needed.
const PART: u64 = 8;
/// Number of fruitless background passes in a row after which no further one runs until there is
/// enough memory again.
const HOPELESS: u32 = 16;

/// Returns how many bytes to ask of a group with this usage when `need` bytes are needed.
pub const fn goal(need: u64, usage: u64) -> u64 {
    let extra = if usage / PART < GOAL { usage / PART } else { GOAL };
    if need > extra { need } else { extra }
}

/// Bytes of a group and its descendants, by two measures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UsedBytes {
    /// Bytes charged in the group.
    pub in_group: u64,
    /// Bytes of the pages of the process or of a node; 0 unless the group is the root.
    pub in_pages: u64,
}

impl UsedBytes {
    /// Returns the freed bytes: the larger fall of the two measures.
    pub fn fall_to(self, now: UsedBytes) -> u64 {
        self.in_group.saturating_sub(now.in_group).max(self.in_pages.saturating_sub(now.in_pages))
    }
}

/// Access of a pass to groups and shrinkers. No method is called under a lock.
pub trait Domain {
    /// Returns the number of nodes that objects may lie on.
    fn nodes(&self) -> usize;

    /// Returns the time in nanoseconds.
    fn now(&self) -> u64;

    /// Returns the first slot from `from` on of a group that may have objects on a node and is
    /// `top` or a descendant.
    fn next(&self, top: GroupId, node: usize, from: u32) -> Option<u32>;

    /// Returns usage and protection of the group in a slot, relative to `top`. `None` if it is
    /// neither `top` nor a descendant, or gone.
    fn group_usage(&self, slot: u32, top: GroupId) -> Option<GroupUsage>;

    /// Asks the shrinkers of a group on a node. Runs callbacks.
    fn give(&self, group: GroupId, slot: u32, node: usize, pressure: ScanPressure) -> Given;

    /// Returns the bytes that a group and its descendants use.
    fn used(&self, top: GroupId) -> UsedBytes;

    /// Returns usage with stocked and cached bytes. Cheap, unlike [`Domain::used`].
    fn charged(&self, top: GroupId) -> UsedBytes;

    /// Counts an event of a group.
    fn tell(&self, group: GroupId, event: Event);

    /// Adds to a group's window of pressure by [`Levels::note`].
    fn note(&self, levels: &Levels, group: GroupId, scanned: u64, freed: u64) -> Option<Level>;

    /// Returns whether there is enough memory even if the pass has not freed the requested bytes.
    fn has_enough(&self) -> bool {
        false
    }

    /// Returns the priority at which the pass begins.
    fn first_priority(&self) -> u32 {
        FIRST_PRIORITY
    }

    /// Returns whether no thread needs the pass any more. The pass ends then, and its result says
    /// nothing about memory.
    fn is_called_off(&self) -> bool {
        false
    }
}

/// Result of asking shrinkers.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Given {
    /// Scanned objects.
    pub scanned: u64,
    /// Freed objects.
    pub freed: u64,
    /// Freed bytes that the shrinkers reported.
    pub bytes: u64,
    /// Scanned objects that a busy shrinker may not have looked at.
    pub unsure: u64,
    /// Number of calls in which a shrinker looked at none.
    pub stops: u64,
}

/// Request of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// The group to reclaim from, with its descendants.
    pub top: GroupId,
    /// Requested bytes.
    pub bytes: u64,
    /// Time at which the pass ends, by [`Domain::now`]; `u64::MAX` for none.
    pub deadline: u64,
    /// For a background pass: the only node to reclaim on. Caches that do not know nodes have
    /// objects on each.
    pub node: Option<usize>,
    /// The memory is not needed yet. Then only the freed objects count as pressure, not the
    /// priority.
    pub ahead: bool,
}

/// Result of a pass.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct PassResult {
    /// Freed bytes.
    pub bytes: u64,
    /// Scanned objects.
    pub scanned: u64,
    /// Freed objects.
    pub freed: u64,
    /// Visits of groups, on all nodes together.
    pub visits: u64,
    /// The last priority.
    pub priority: u32,
    /// Whether the deadline ended the pass.
    pub late: bool,
}

impl PassResult {
    /// Returns whether anything was freed.
    pub fn is_something(&self) -> bool {
        self.bytes > 0 || self.freed > 0
    }
}

/// Kind of an attempt.
#[derive(Clone, Copy)]
struct Try {
    /// The walks are shared.
    partial: bool,
    grip: LowProtection,
}

/// State that passes share: positions of walks, windows of pressure, and counts.
#[derive(Debug, Default)]
pub struct Passes {
    walks: Walks,
    levels: Levels,
    /// Fruitless background passes in a row, by node.
    failures: [AtomicU32; MAX_NODES],
    /// Passes, visits, scanned objects, freed objects, bytes: of direct and of background passes.
    counts: [[AtomicU64; 5]; 2],
}

/// A pass that runs.
struct Pass<'a, D: Domain> {
    passes: &'a Passes,
    domain: &'a D,
    ask: Ask,
    /// Used bytes when it began. The next field has the charged bytes.
    used: UsedBytes,
    charged: UsedBytes,
    said: u64,
    /// Freed objects at the last reading of used bytes.
    seen: u64,
    got: PassResult,
    /// See [`Given`].
    unsure: u64,
    stops: u64,
    /// Whether `low` protected a group from this pass.
    passed_by: bool,
}

impl Passes {
    /// Asks for memory until there is enough, nothing more can be freed, or the deadline has
    /// passed.
    pub fn run<D: Domain>(&self, domain: &D, ask: &Ask) -> PassResult {
        let (used, charged) = (domain.used(ask.top), domain.charged(ask.top));
        let got = PassResult::default();
        let (passes, said, seen, unsure, stops, passed_by) = (self, 0, 0, 0, 0, false);
        let mut pass = Pass { passes, domain, ask: *ask, used, charged, said, seen, got, unsure, stops, passed_by };
        pass.run();
        let got = pass.got;
        let counts = &self.counts[usize::from(ask.node.is_some())];
        for (count, more) in counts.iter().zip([1, got.visits, got.scanned, got.freed, got.bytes]) {
            count.fetch_add(more, Ordering::Relaxed);
        }
        if let Some(node) = ask.node.filter(|_| !domain.is_called_off()) {
            // Only enough memory ends a row of failures. A pass that frees something but not enough
            // neither ends the row nor adds to it.
            match (domain.has_enough(), got.is_something()) {
                (true, _) => self.has_enough(node),
                (false, false) => _ = self.failures[node].fetch_add(1, Ordering::Relaxed),
                (false, true) => {}
            }
        }
        got
    }

    /// Returns whether background passes on a node are given up.
    pub fn is_hopeless(&self, node: usize) -> bool {
        self.failures[node].load(Ordering::Relaxed) >= HOPELESS
    }

    /// Records that a node has enough memory, from any source: background passes make sense again.
    pub fn has_enough(&self, node: usize) {
        if self.failures[node].load(Ordering::Relaxed) > 0 {
            self.failures[node].store(0, Ordering::Relaxed);
        }
    }

    /// Ends the round of a shared walk, and takes the next one up to a slot, as other passes would.
    #[cfg(test)]
    pub(crate) fn end_round(&self, top: GroupId, node: usize, next: u32) {
        let _ = self.walks.join(top, node).next(|_| None);
        let _ = self.walks.join(top, node).next(|_| Some(next));
    }

    /// Returns the counts of direct and of background passes: passes, visits, scanned objects,
    /// freed objects, bytes.
    pub fn counts(&self) -> [[u64; 5]; 2] {
        self.counts.each_ref().map(|counts| counts.each_ref().map(|count| count.load(Ordering::Relaxed)))
    }
}

impl<D: Domain> Pass<'_, D> {
    fn run(&mut self) {
        if self.ask.node.is_some() {
            self.attempt(Try { partial: false, grip: LowProtection::Fair });
            return;
        }
        self.attempt(Try { partial: true, grip: LowProtection::Fair });
        if self.tries_again() {
            self.attempt(Try { partial: false, grip: LowProtection::Fair });
        }
        if self.tries_again() && self.passed_by {
            self.attempt(Try { partial: false, grip: LowProtection::TakesLow });
        }
    }

    fn tries_again(&self) -> bool {
        !self.got.is_something() && !self.got.late && !self.domain.is_called_off()
    }

    /// Goes through all priorities.
    fn attempt(&mut self, how: Try) {
        let (before, mut is_told) = (self.got, false);
        let (unsure, stops) = (self.unsure, self.stops);
        let (last, all) = (u32::from(self.ask.node.is_some()), 0..self.domain.nodes());
        let nodes = self.ask.node.map_or(all, |node| node..node + 1);
        for priority in (last..=self.domain.first_priority()).rev() {
            self.got.priority = priority;
            // Objects were scanned at earlier priorities, and did not suffice. If small caches were
            // not asked for anything yet, no object was scanned, and that alone is no pressure.
            is_told = priority <= HARD && self.looked_at(&before, unsure) > 0 && !self.ask.ahead;
            if is_told {
                self.domain.tell(self.ask.top, Level::Critical.event());
            }
            for node in nodes.clone() {
                if self.is_over() {
                    return;
                }
                self.walk(node, priority, how);
            }
            // No group has anything that is not protected.
            if self.is_over() || self.got.visits == before.visits {
                return;
            }
        }
        // The objects of the last priority did not suffice, or there are none. If all shrinkers
        // were busy, the pass reports no pressure.
        let was_busy = self.looked_at(&before, unsure) == 0 && (self.unsure > unsure || self.stops > stops);
        if !is_told && last == 0 && !self.ask.ahead && !was_busy {
            self.domain.tell(self.ask.top, Level::Critical.event());
        }
    }

    /// Returns the objects scanned since `before`. If none was freed, objects that may not have
    /// been looked at are left out.
    fn looked_at(&self, before: &PassResult, unsure: u64) -> u64 {
        let doubtful = if self.got.freed > before.freed { 0 } else { self.unsure - unsure };
        (self.got.scanned - before.scanned).saturating_sub(doubtful)
    }

    fn walk(&mut self, node: usize, priority: u32, how: Try) {
        let (domain, top) = (self.domain, self.ask.top);
        let (before, unsure) = (self.got, self.unsure);
        let mut shared = how.partial.then(|| self.passes.walks.join(top, node));
        let goes_to_the_end = self.ask.node.is_some();
        let mut own = Generation::from(if goes_to_the_end { 0 } else { self.passes.walks.place_of(top, node) });
        let find = |from| domain.next(top, node, from);
        while let Some(slot) = match &mut shared {
            Some(walk) => walk.next(find),
            None => own.next(find),
        } {
            self.visit(slot, node, priority, how.grip);
            let ends = if goes_to_the_end { self.is_late() || domain.is_called_off() } else { self.is_over() };
            if ends {
                break;
            }
        }
        if self.got.freed > self.seen && self.said < self.ask.bytes {
            self.look();
        }
        self.note_pressure(self.looked_at(&before, unsure), self.got.freed - before.freed);
    }

    fn visit(&mut self, slot: u32, node: usize, priority: u32, grip: LowProtection) {
        let Some(group) = self.domain.group_usage(slot, self.ask.top) else { return };
        let pressure = match scan_pressure(&group, self.ask.bytes, priority, grip) {
            Ok(pressure) => ScanPressure { need: self.ask.bytes.saturating_sub(self.got.bytes), ..pressure },
            Err(by) => return self.passed_by |= by == ProtectedBy::Low,
        };
        let given = self.domain.give(group.id, slot, node, pressure);
        debug_assert!(given.freed <= given.scanned, "{given:?}");
        self.got.visits += 1;
        self.got.scanned = self.got.scanned.saturating_add(given.scanned);
        self.got.freed = self.got.freed.saturating_add(given.freed);
        self.said = self.said.saturating_add(given.bytes);
        self.unsure = self.unsure.saturating_add(given.unsure);
        self.stops += given.stops;
        if given.freed > 0 {
            if group.low > 0 && group.usage <= group.low {
                self.domain.tell(group.id, Event::Low);
            }
            self.got.bytes = self.got.bytes.max(self.said);
            self.count_fall(self.charged, self.domain.charged(self.ask.top));
            if self.is_look_worth_it() {
                self.look();
            }
        }
    }

    /// Returns whether there may be enough, or the yield since the last reading is unknown.
    fn is_look_worth_it(&self) -> bool {
        let (PassResult { bytes, freed, .. }, seen) = (self.got, self.seen);
        let may_be = u128::from(bytes) * u128::from(freed) / u128::from(seen.max(1));
        bytes < self.ask.bytes
            && ((freed - seen).saturating_mul(READING_PART) >= seen || may_be >= self.ask.bytes.into())
    }

    /// Reads used bytes.
    fn look(&mut self) {
        self.seen = self.got.freed;
        self.count_fall(self.used, self.domain.used(self.ask.top));
    }

    /// Counts the larger fall of the two measures as freed bytes.
    fn count_fall(&mut self, before: UsedBytes, now: UsedBytes) {
        self.got.bytes = self.got.bytes.max(before.fall_to(now));
    }

    fn note_pressure(&self, scanned: u64, freed: u64) {
        if let Some(level) = self.domain.note(&self.passes.levels, self.ask.top, scanned, freed) {
            self.domain.tell(self.ask.top, level.event());
        }
    }

    fn is_late(&mut self) -> bool {
        self.got.late |= self.ask.deadline != u64::MAX && self.domain.now() >= self.ask.deadline;
        self.got.late
    }

    fn is_over(&mut self) -> bool {
        self.got.bytes >= self.ask.bytes || self.domain.is_called_off() || self.domain.has_enough() || self.is_late()
    }
}
