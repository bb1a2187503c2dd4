//! A pass: groups are asked for memory, gently at first and then harder, until there is enough.
//!
//! Sits between whoever needs memory and a [`Domain`], which knows groups and shrinkers. Priorities go from 12 to 0; at each, the groups below the target are
//! walked on every node, and each is asked for its part of what it has beyond what is protected. A direct pass shares its walks with others. If it got
//! nothing at all, it tries again, each once: with walks of its own, from where the shared one is, since others may have had all the groups of that; and
//! taking what `low` protects. It stops as soon as it has enough: who went on to the end would have every group evict for one that needs little. A background
//! pass has walks of its own, goes on to the end of each, and stops above priority 0.
//!
//! What came back is what the target's use fell by, or what the shrinkers say that they gave, whichever is more: others charge meanwhile. So who
//! lies ends a pass too soon, and the charge that is still refused asks again. To say what is used takes a look at all that is free and cached, so that is not done after
//! every visit: only when a quarter more objects have come than at the look before, when what these brought says that there may be enough, and at the end of a walk.
//! Takes no lock but those of [`Levels`].
//!
//! Source: Linux `mm/vmscan.c` (`do_try_to_free_pages`, `shrink_node`, `balance_pgdat`), by description.

use crate::reclaim::level::{Level, Levels};
use crate::reclaim::share::{Grip, press};
use crate::reclaim::walk::{Lap, Walks};
use crate::shrinkers::{FIRST_PRIORITY, Press};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use neap_base::platform::nodes::MAX_NODES;
use neap_groups::protection::Standing;
use neap_groups::{Event, GroupId};

/// From this priority on memory is hard to get, whatever is given: where a tenth of all is asked for at a time.
const HARD: u32 = (100_u32 / 10).ilog2();
/// A look at what is used is worth it when so much more was freed since the last, in parts of what had been freed by then.
const LOOK: u64 = 4;
/// What one pass is to bring at least, in bytes, so that not every charge at a limit needs one.
pub const GOAL: u64 = 128 << 10;
/// Of a group that has little, at most this part is asked for beyond what is needed.
const PART: u64 = 8;
/// Background passes in a row without anything, after which nobody makes another until there is enough again.
const HOPELESS: u32 = 16;

/// How many bytes to ask a group for that uses so many, when so many are needed.
pub const fn goal(need: u64, usage: u64) -> u64 {
    let extra = if usage / PART < GOAL { usage / PART } else { GOAL };
    if need > extra { need } else { extra }
}

/// What a pass reaches groups and shrinkers by. Nothing of it is called under a lock.
pub trait Domain {
    /// Nodes that something may lie on.
    fn nodes(&self) -> usize;

    /// This moment, in nanoseconds.
    fn now(&self) -> u64;

    /// The first slot from `from` on of a group that may have something on a node, and is `top` or below it.
    fn next(&self, top: GroupId, node: usize, from: u32) -> Option<u32>;

    /// The group in a slot, as seen from `top`; `None` if it is neither `top` nor below it, or gone.
    fn standing(&self, slot: u32, top: GroupId) -> Option<Standing>;

    /// Asks the shrinkers of a group on a node. Runs callbacks.
    fn give(&self, group: GroupId, slot: u32, node: usize, press: Press) -> Given;

    /// Bytes that a group and those below it use, by each measure that there is: what came back is what one of them fell by.
    fn used(&self, top: GroupId) -> [u64; 2];

    /// The same with what nobody uses but is stocked, or kept by caches: that takes no time.
    fn charged(&self, top: GroupId) -> [u64; 2];

    /// Something happened to a group.
    fn tell(&self, group: GroupId, event: Event);

    /// Adds to a group's window of pressure: [`Levels::note`], inside the gate.
    fn note(&self, levels: &Levels, group: GroupId, scanned: u64, freed: u64) -> Option<Level>;

    /// Whether there is enough for another reason than what was asked for.
    fn has_enough(&self) -> bool {
        false
    }

    /// Whether nobody waits for the pass any more: it ends, and what it came to says nothing about memory.
    fn is_called_off(&self) -> bool {
        false
    }
}

/// What shrinkers gave.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Given {
    /// Objects that they looked at.
    pub scanned: u64,
    /// Objects that they freed.
    pub freed: u64,
    /// Bytes of these, as far as they said.
    pub bytes: u64,
    /// Of what they looked at, objects that they may not have looked at, since they were busy; and
    /// how often they looked at none.
    pub unsure: u64,
    /// See `unsure`.
    pub stops: u64,
}

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// The group that is to give, with all below it.
    pub top: GroupId,
    /// How many bytes.
    pub bytes: u64,
    /// Until when, by [`Domain::now`]; `u64::MAX` for no end.
    pub deadline: u64,
    /// Only what lies on this node, in the background: nobody waits for it. Of caches that know no nodes something lies on each.
    pub node: Option<usize>,
    /// Nobody needs it at this moment: how hard it is asked for says nothing about pressure then, only what is given does.
    pub ahead: bool,
}

/// What a pass came to.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Got {
    /// Bytes that came back.
    pub bytes: u64,
    /// Objects that were looked at.
    pub scanned: u64,
    /// Objects that were freed.
    pub freed: u64,
    /// Groups that were asked, on all nodes together.
    pub visits: u64,
    /// The last priority.
    pub priority: u32,
    /// Whether the deadline ended it.
    pub late: bool,
}

impl Got {
    /// Whether anything came back.
    pub fn is_something(&self) -> bool {
        self.bytes > 0 || self.freed > 0
    }
}

/// One way of trying: made anew for each try, so that nothing of the one before stays.
#[derive(Clone, Copy)]
struct Try {
    /// Walks are shared.
    partial: bool,
    grip: Grip,
}

/// What passes have in common: places of walks, windows of pressure, and how they went.
#[derive(Debug, Default)]
pub struct Passes {
    walks: Walks,
    levels: Levels,
    /// Background passes in a row without anything, by node.
    failures: [AtomicU32; MAX_NODES],
    /// Passes, visits, objects looked at, objects freed, bytes; of direct and of background passes.
    counts: [[AtomicU64; 5]; 2],
}

/// A pass under way.
struct Pass<'a, D: Domain> {
    passes: &'a Passes,
    domain: &'a D,
    ask: Ask,
    /// What was used, and charged.
    before: [[u64; 2]; 2],
    said: u64,
    /// Objects that had been freed when what is used was last looked at.
    seen: u64,
    got: Got,
    /// As in [`Given`].
    unsure: u64,
    stops: u64,
    /// `low` protected something.
    passed_by: bool,
}

impl Passes {
    /// Asks for memory until there is enough, or nothing more to be had, or the deadline.
    pub fn run<D: Domain>(&self, domain: &D, ask: &Ask) -> Got {
        let before = [domain.used(ask.top), domain.charged(ask.top)];
        let got = Got::default();
        let (passes, said, seen, unsure, stops, passed_by) = (self, 0, 0, 0, 0, false);
        let mut pass = Pass { passes, domain, ask: *ask, before, said, seen, got, unsure, stops, passed_by };
        pass.run();
        let got = pass.got;
        let counts = &self.counts[usize::from(ask.node.is_some())];
        for (count, more) in counts.iter().zip([1, got.visits, got.scanned, got.freed, got.bytes]) {
            count.fetch_add(more, Ordering::Relaxed);
        }
        if let Some(node) = ask.node.filter(|_| !domain.is_called_off()) {
            // Only enough ends a row of failures: some progress by others would let it go on for ever.
            match (domain.has_enough(), got.is_something()) {
                (true, _) => self.has_enough(node),
                (false, false) => _ = self.failures[node].fetch_add(1, Ordering::Relaxed),
                (false, true) => {}
            }
        }
        got
    }

    /// Whether background passes bring nothing any more on a node.
    pub fn is_hopeless(&self, node: usize) -> bool {
        self.failures[node].load(Ordering::Relaxed) >= HOPELESS
    }

    /// There is enough on a node, whoever brought it: background passes have a purpose again.
    pub fn has_enough(&self, node: usize) {
        if self.failures[node].load(Ordering::Relaxed) > 0 {
            self.failures[node].store(0, Ordering::Relaxed);
        }
    }

    /// Goes on with the round of a shared walk to its end, and the next one up to a slot, as others would.
    #[cfg(test)]
    pub(crate) fn end_round(&self, top: GroupId, node: usize, next: u32) {
        let _ = self.walks.join(top, node).next(|_| None);
        let _ = self.walks.join(top, node).next(|_| Some(next));
    }

    /// Of direct and of background passes so far: how many, groups asked, objects looked at, objects freed, and bytes.
    pub fn counts(&self) -> [[u64; 5]; 2] {
        self.counts.each_ref().map(|counts| counts.each_ref().map(|count| count.load(Ordering::Relaxed)))
    }
}

impl<D: Domain> Pass<'_, D> {
    fn run(&mut self) {
        if self.ask.node.is_some() {
            self.attempt(Try { partial: false, grip: Grip::Fair });
            return;
        }
        self.attempt(Try { partial: true, grip: Grip::Fair });
        if self.tries_again() {
            self.attempt(Try { partial: false, grip: Grip::Fair });
        }
        if self.tries_again() && self.passed_by {
            self.attempt(Try { partial: false, grip: Grip::TakesLow });
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
        for priority in (last..=FIRST_PRIORITY).rev() {
            self.got.priority = priority;
            // What was looked at did not suffice. Small caches are not asked for anything before: that alone is no pressure.
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
            // Nobody has anything, or all of it is protected.
            if self.is_over() || self.got.visits == before.visits {
                return;
            }
        }
        // What was looked at for the first time did not suffice, or there is nothing to look at.
        // Where all were busy nothing is known.
        let was_busy = self.looked_at(&before, unsure) == 0 && (self.unsure > unsure || self.stops > stops);
        if !is_told && last == 0 && !self.ask.ahead && !was_busy {
            self.domain.tell(self.ask.top, Level::Critical.event());
        }
    }

    /// How many objects have been looked at since a moment. Where nothing was freed, those that may
    /// not have been are left out.
    fn looked_at(&self, before: &Got, unsure: u64) -> u64 {
        let doubtful = if self.got.freed > before.freed { 0 } else { self.unsure - unsure };
        (self.got.scanned - before.scanned).saturating_sub(doubtful)
    }

    fn walk(&mut self, node: usize, priority: u32, how: Try) {
        let (domain, top) = (self.domain, self.ask.top);
        let (before, unsure) = (self.got, self.unsure);
        let mut shared = how.partial.then(|| self.passes.walks.join(top, node));
        let goes_to_the_end = self.ask.node.is_some();
        let mut own = Lap::from(if goes_to_the_end { 0 } else { self.passes.walks.place_of(top, node) });
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
        self.press_on(self.looked_at(&before, unsure), self.got.freed - before.freed);
    }

    fn visit(&mut self, slot: u32, node: usize, priority: u32, grip: Grip) {
        let Some(standing) = self.domain.standing(slot, self.ask.top) else { return };
        let press = match press(&standing, self.ask.bytes, priority, grip) {
            Ok(press) => Press { need: self.ask.bytes.saturating_sub(self.got.bytes), ..press },
            Err(by_low) => return self.passed_by |= by_low,
        };
        let given = self.domain.give(standing.id, slot, node, press);
        self.got.visits += 1;
        self.got.scanned = self.got.scanned.saturating_add(given.scanned);
        self.got.freed = self.got.freed.saturating_add(given.freed);
        self.said = self.said.saturating_add(given.bytes);
        self.unsure = self.unsure.saturating_add(given.unsure);
        self.stops += given.stops;
        if given.freed > 0 {
            if standing.low > 0 && standing.usage <= standing.low {
                self.domain.tell(standing.id, Event::Low);
            }
            self.got.bytes = self.got.bytes.max(self.said);
            self.count_fall(1, self.domain.charged(self.ask.top));
            if self.is_look_worth_it() {
                self.look();
            }
        }
    }

    /// Whether there may be enough, or so much was freed since the last look that what it brought is not known any more.
    fn is_look_worth_it(&self) -> bool {
        let (Got { bytes, freed, .. }, seen) = (self.got, self.seen);
        let may_be = u128::from(bytes) * u128::from(freed) / u128::from(seen.max(1));
        bytes < self.ask.bytes && ((freed - seen).saturating_mul(LOOK) >= seen || may_be >= self.ask.bytes.into())
    }

    /// Looks at what is used.
    fn look(&mut self) {
        self.seen = self.got.freed;
        self.count_fall(0, self.domain.used(self.ask.top));
    }

    /// What one of several measures fell by came back.
    fn count_fall(&mut self, kind: usize, now: [u64; 2]) {
        let fallen = self.before[kind].iter().zip(now).map(|(before, now)| before.saturating_sub(now));
        self.got.bytes = self.got.bytes.max(fallen.max().unwrap_or(0));
    }

    fn press_on(&self, scanned: u64, freed: u64) {
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
