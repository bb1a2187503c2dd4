//! Requests for memory: which groups need reclaim, for how much, and when each is served next.
//!
//! # Design
//!
//! A group has at most one request. Groups with a request form a ring, which is linked through the
//! groups. So no request is dropped, and none needs memory. A request stores no size: whenever a
//! server looks, it computes the need of the group from usage, bounds and queue. A grant, a
//! deadline, a free or a raised limit can end the need. Then the request ends at the next look. A
//! group needs memory
//!
//! 1. for the charges in its queue that are before their deadline, and for a charge that asked by
//!    [`Groups::ask_for`] and does not wait;
//! 2. because its usage exceeds its `max`, after that was lowered;
//! 3. because its usage exceeds its `high`.
//!
//! A *server* is a thread that reclaims for groups. It takes the next group that is due, runs a
//! pass, and reports. After a pass that reduced the need, another one follows at once. After any
//! other pass the group rests, for twice as long each time: up to [`TICK_INTERVAL_NS`] while a
//! charge waits, up to [`IDLE_REST_NS_MAX`] otherwise. Caches that were busy, barred or pinned are
//! thus asked again, and a cache that never frees anything costs little.
//!
//! # Locking
//!
//! The waiters' mutex protects the ring. A server examines at most [`GROUPS_PER_HOLD_MAX`] groups
//! in one hold.

use crate::group::{Bound, Group};
use crate::groups::{Groups, Reclaimer};
use crate::id::GroupId;
use crate::queue::{Queues, RENEWED_REST_NS_MAX, TICK_INTERVAL_NS, Waiter};
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_base::gate::Inside;

/// Rest of a group after the first pass that freed nothing.
const FIRST_REST_NS: u64 = 1_000_000;
/// Maximum rest of a group while no charge waits there.
const IDLE_REST_NS_MAX: u64 = 16 * TICK_INTERVAL_NS;
/// Groups that are examined during one hold of the mutex.
const GROUPS_PER_HOLD_MAX: usize = 128;
/// Maximum number of waiters of one group with requests that are added up.
const ADDED_WAITERS_MAX: usize = 64;

/// A request for memory, as a server gets it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The group.
    pub group: GroupId,
    /// Bytes that it is to free, with its descendants.
    pub bytes: u64,
    /// Passes in a row that did not reduce the need.
    pub vain: u32,
    slot: u32,
    /// Bytes requested by [`Groups::ask_for`], for a charge that does not wait.
    once: u64,
}

/// Next request to serve.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Due {
    /// Serve this group now.
    Now(Request),
    /// No request is due before so many nanoseconds.
    In(u64),
    /// There is no request.
    Nothing,
}

/// Need of a group for memory.
#[derive(Clone, Copy, Default)]
struct MemoryNeed {
    bytes: u64,
    /// Whether a charge waits for some of the bytes.
    is_waited_for: bool,
}

/// Returns the bytes that waiters at a group need at the time `now`.
fn waited_for(queues: &Queues<'_>, group: &Group, now: u64) -> MemoryNeed {
    let all = core::iter::successors(queues.first(group), |&index| queues.after(index)).take(ADDED_WAITERS_MAX);
    let live = all.filter_map(|index| queues.get(index)).filter(|waiter| waiter.deadline() > now);
    live.map(Waiter::bytes).fold(MemoryNeed::default(), |sum, bytes| MemoryNeed {
        bytes: sum.bytes.saturating_add(bytes),
        is_waited_for: true,
    })
}

/// Returns the bytes that a group is to free.
fn need(queues: &Queues<'_>, group: &Group, now: u64) -> MemoryNeed {
    let MemoryNeed { bytes, is_waited_for } = waited_for(queues, group, now);
    let (usage, max, high) = (group.usage(), group.bound(Bound::Max), group.bound(Bound::High));
    // Together, the waiters may request more than the limit allows.
    let wanted = bytes.max(group.counters.asks_once.load(Ordering::Relaxed)).min(max);
    let bytes = usage.saturating_add(wanted).saturating_sub(max).max(usage.saturating_sub(high));
    MemoryNeed { bytes, is_waited_for }
}

impl Queues<'_> {
    /// Puts the group in a slot into the ring of groups that ask for memory, to be served at once.
    /// If the group is in the ring already, its rest is shortened to `most` nanoseconds.
    pub(crate) fn ask_for(&self, slot: u32, most: u64) {
        let (last, tree) = (self.last_asking(), self.tree());
        let Some(group) = tree.group(slot) else { return };
        if group.counters.next_asking.load(Ordering::Relaxed) != 0 {
            let before = group.rest();
            let rest = before.min(most);
            let at = group.counters.ask_at.load(Ordering::Relaxed);
            group.counters.ask_at.store(at.saturating_sub(before - rest), Ordering::Relaxed);
            return group.set_rest(rest);
        }
        group.counters.ask_at.store(0, Ordering::Relaxed);
        group.set_rest(0);
        group.counters.server.store(0, Ordering::Relaxed);
        let end = last.load(Ordering::Relaxed).checked_sub(1).and_then(|last| tree.group(last));
        let first = end.map_or(slot + 1, |end| end.counters.next_asking.swap(slot + 1, Ordering::Relaxed));
        group.counters.next_asking.store(first, Ordering::Relaxed);
        last.store(slot + 1, Ordering::Relaxed);
    }

    /// Returns the slot and group of the ring's first entry, and its last group.
    fn ends_of_asking(&self) -> Option<(u32, &Group, &Group)> {
        let last = self.tree().group(self.last_asking().load(Ordering::Relaxed).checked_sub(1)?)?;
        let first = last.counters.next_asking.load(Ordering::Relaxed).checked_sub(1)?;
        Some((first, self.tree().group(first)?, last))
    }

    /// Makes the first entry of the ring its last.
    fn rotate_asking(&self, first: u32) {
        self.last_asking().store(first + 1, Ordering::Relaxed);
    }

    /// Takes the first entry out of the ring.
    fn end_asking(&self, (slot, first, last): (u32, &Group, &Group)) {
        let next = first.counters.next_asking.swap(0, Ordering::Relaxed);
        if next == slot + 1 {
            self.last_asking().store(0, Ordering::Relaxed);
        } else {
            last.counters.next_asking.store(next, Ordering::Relaxed);
        }
    }

    /// Calls `each` with all groups of the ring.
    fn each_asking(&self, mut each: impl FnMut(&Group)) {
        let Some((first, ..)) = self.ends_of_asking() else { return };
        let mut slot = first;
        while let Some(group) = self.tree().group(slot) {
            let next = group.counters.next_asking.load(Ordering::Relaxed);
            each(group);
            if next == 0 || next == first + 1 {
                return;
            }
            slot = next - 1;
        }
    }
}

impl Groups {
    /// Requests memory of a group and its descendants, for a charge that does not wait for it. The
    /// caller must be outside the fork gate.
    pub fn ask_for<H: Reclaimer>(&self, host: &H, id: GroupId, bytes: u64) {
        host.inside(|inside| {
            let queues = self.waiters.lock(inside, &self.tree);
            let _reading = self.rcu.enter();
            let Some(behind) = self.tree.owners.behind(id) else { return };
            self.tree
                .group(behind.slot())
                .inspect(|group| _ = group.counters.asks_once.fetch_max(bytes, Ordering::Relaxed));
            queues.ask_for(behind.slot(), RENEWED_REST_NS_MAX);
        });
        host.ask_soon();
    }

    /// Requests memory at once of the groups above their `max` or `high`, from a slot upwards. The
    /// caller must be within a read.
    pub(crate) fn ask_for_excess(&self, inside: &Inside<'_>, slot: u32) {
        let queues = self.waiters.lock(inside, &self.tree);
        let is_above = |group: &Group| group.usage() > group.bound(Bound::Max).min(group.bound(Bound::High));
        self.tree.upwards(slot).filter(|(_, group)| is_above(group)).for_each(|(slot, _)| queues.ask_for(slot, 0));
    }

    /// Takes the next due request for a server. `server` is the server's number, which is not 0.
    /// [`Groups::served`] must follow before the server takes another. The caller must be outside
    /// the fork gate.
    pub fn take_request<H: Reclaimer>(&self, host: &H, server: u32) -> Due {
        self.next_request(host, server)
    }

    /// Returns the next request without taking it. The caller must be outside the fork gate.
    pub fn look_for_request<H: Reclaimer>(&self, host: &H) -> Due {
        self.next_request(host, 0)
    }

    fn next_request<H: Reclaimer>(&self, host: &H, server: u32) -> Due {
        let now = host.platform().precise();
        let (mut start, mut soonest, mut left) = (None, u64::MAX, self.tree.slots.len());
        loop {
            let due = host.inside(|inside| {
                let queues = self.waiters.lock(inside, &self.tree);
                let _reading = self.rcu.enter();
                for _ in 0..GROUPS_PER_HOLD_MAX {
                    // The loop ends at the first group that it visited, or after as many groups as
                    // there are slots, since other servers rotate the ring as well.
                    let next = queues.ends_of_asking().filter(|ends| start != Some(ends.0) && left > 0);
                    let Some(ends @ (slot, group, _)) = next else {
                        return Some(if soonest == u64::MAX { Due::Nothing } else { Due::In(soonest - now) });
                    };
                    left -= 1;
                    let bytes = self.need_of(&queues, group, group.id(), now).bytes;
                    if bytes == 0 {
                        group.counters.asks_once.store(0, Ordering::Relaxed);
                        queues.end_asking(ends);
                        continue;
                    }
                    start.get_or_insert(slot);
                    queues.rotate_asking(slot);
                    let at = group.counters.ask_at.load(Ordering::Relaxed);
                    if group.counters.server.load(Ordering::Relaxed) != 0 {
                        continue;
                    }
                    if at <= now {
                        group.counters.server.store(server, Ordering::Relaxed);
                        let once = group.counters.asks_once.load(Ordering::Relaxed);
                        // The rest is doubled after each pass in vain.
                        let vain = (group.rest() / FIRST_REST_NS).checked_ilog2().map_or(0, |doublings| doublings + 1);
                        return Some(Due::Now(Request { group: group.id(), bytes, vain, slot, once }));
                    }
                    soonest = soonest.min(at);
                }
                None
            });
            if let Some(due) = due {
                return due;
            }
        }
    }

    /// Returns the [`need`] of a group. It is 0 if the group is deleted or another group has its
    /// slot.
    fn need_of(&self, queues: &Queues<'_>, group: &Group, id: GroupId, now: u64) -> MemoryNeed {
        let is_it = group.id() == id && self.tree.owners.exists(id);
        if is_it { need(queues, group, now) } else { MemoryNeed::default() }
    }

    /// Returns the bytes by which a group exceeds its `max`; 0 if it is gone. The caller must be
    /// outside the fork gate.
    pub fn excess<H: Reclaimer>(&self, host: &H, id: GroupId) -> u64 {
        let excess = |group: &Group| group.usage().saturating_sub(group.bound(Bound::Max));
        host.inside(|_| {
            let _reading = self.rcu.enter();
            self.tree.owners.own(id).and_then(|slot| self.tree.group(slot)).map_or(0, excess)
        })
    }

    /// Returns the bytes that the group of a request still needs; 0 if it needs none any more. The
    /// caller must be outside the fork gate.
    pub fn needs<H: Reclaimer>(&self, host: &H, request: &Request) -> u64 {
        let now = host.platform().precise();
        host.inside(|inside| {
            let queues = self.waiters.lock(inside, &self.tree);
            let group = self.tree.group(request.slot);
            group.map_or(0, |group| self.need_of(&queues, group, request.group, now).bytes)
        })
    }

    /// Ends the service of a request. The caller must be outside the fork gate.
    pub fn served<H: Reclaimer>(&self, host: &H, request: &Request, server: u32) {
        let now = host.platform().precise();
        host.inside(|inside| {
            let queues = self.waiters.lock(inside, &self.tree);
            let Some(group) = self.tree.group(request.slot) else { return };
            // If not, `leave_request` took the request from this server, and another server may
            // have it.
            if group.counters.server.load(Ordering::Relaxed) != server {
                return;
            }
            group.counters.server.store(0, Ordering::Relaxed);
            // A charge that asked for more meanwhile gets a pass of its own.
            _ = group.counters.asks_once.compare_exchange(request.once, 0, Ordering::Relaxed, Ordering::Relaxed);
            let MemoryNeed { bytes, is_waited_for } = self.need_of(&queues, group, request.group, now);
            let most = if is_waited_for { TICK_INTERVAL_NS } else { IDLE_REST_NS_MAX };
            let rest = (2 * group.rest()).clamp(FIRST_REST_NS, most);
            let rest = if bytes < request.bytes { 0 } else { rest };
            group.set_rest(rest);
            group.counters.ask_at.store(now.saturating_add(rest), Ordering::Relaxed);
        });
        self.end_delays(host);
    }

    /// Gives up the request of a server that does not return, so that another one takes it.
    pub fn leave_request(&self, inside: &Inside<'_>, server: u32) {
        self.give_up_requests(inside, |group| group.counters.server.load(Ordering::Relaxed) == server);
    }

    /// Makes the requests of the groups for which `is_theirs` returns true due at once, for any
    /// server.
    pub(crate) fn give_up_requests(&self, inside: &Inside<'_>, mut is_theirs: impl FnMut(&Group) -> bool) {
        self.waiters.lock(inside, &self.tree).each_asking(|group| {
            if is_theirs(group) {
                group.counters.server.store(0, Ordering::Relaxed);
                group.counters.ask_at.store(0, Ordering::Relaxed);
            }
        });
    }
}
