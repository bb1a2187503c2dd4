//! Operations under a zone's lock: refills, spills, pages that carriers bring, and the fallbacks
//! when a zone has no pages.
//!
//! The zones are real. The lock is a queue: CPUs get it in the order of their arrival.
//! [`crate::cost`] gives the duration of each hold. A CPU that needs several holds joins the queue
//! again for each. Ticks and drains take pages out of lists. A *carrier* of each node, which queues
//! like any CPU, brings these pages to the zone. An allocation that finds no page drains the lists
//! of its node, then tries the next node, and fails after the last one. Blocks from another node,
//! and failures, are counted. So are requests to another node, and failures, that happen while
//! lists have pages.

use neap_base::Platform;
use neap_pages::lab::{LockUse, Metered, Visit};
use neap_pages::policy::Policy;
use neap_testing::virtual_platform::Virtual;

use super::parts::{HeldBlock, Operation, Pending};
use super::{ListLock, Machine, SECOND};
use crate::cost::{self, ZoneLock};

/// Time that policies see at the start, as on a machine that has run for a while.
pub(super) const START: u64 = 10 * SECOND;
/// Vain ticks after which none follows soon.
const VAIN_TICKS_MAX: u32 = 3;
/// Nanoseconds between two attempts of a CPU that waits for an operation of another CPU.
pub(super) const RETRY: u64 = 20_000;
/// Attempts after which an operation fails.
const ATTEMPTS_MAX: u32 = 100;
impl<T: Policy> Machine<T> {
    pub(super) fn tick(&mut self, node: usize) {
        let zone = &mut self.zones[node];
        let past = (self.now + SECOND).saturating_sub(zone.lab.platform().now());
        zone.lab.platform().advance(past);
        let Metered { answer: listed, held } = zone.lab.tick(zone.empty_ticks >= VAIN_TICKS_MAX);
        zone.empty_ticks = if listed { 0 } else { zone.empty_ticks + 1 };
        self.maintain(node, held);
    }

    /// Drains the next CPU's lists.
    pub(super) fn drain_next(&mut self) {
        let cpu = self.drained_cpu;
        self.drained_cpu = (cpu + 1) % self.programs;
        self.cpus[cpu].list_held_until = self.now;
        for node in 0..self.zones.len() {
            let held = self.zones[node].lab.drain(Some(cpu));
            let zone = if self.list_lock == ListLock::Blocking {
                self.zones[node].locked_until.saturating_sub(self.now)
                    + u64::from(held.holds) * cost::hold(held.pages, ZoneLock::Free, self.siblings)
            } else {
                0
            };
            self.cpus[cpu].list_held_until += u64::from(held.pages) * cost::CUT + zone;
            self.maintain(node, held);
        }
    }

    /// Has the node's carrier take the zone's lock, once for each batch.
    fn maintain(&mut self, node: usize, more: LockUse) {
        let cpu = self.programs + node;
        if more.pages == 0 {
            return;
        }
        let thread = &mut self.cpus[cpu];
        if let Pending::Holds { held, .. } = &mut thread.pending {
            *held = sum(*held, more);
            return;
        }
        thread.pending = Pending::Holds { node, held: more, operation: None };
        thread.at = thread.at.max(self.now);
        self.enqueue(cpu);
    }

    /// Executes an operation under a zone's lock.
    pub(super) fn visit(&mut self, cpu: usize, visit: Visit, operation: Operation, attempts: u32) {
        let Operation { node, order, into, .. } = operation;
        let at = self.cpus[cpu].at;
        self.zones[node].visiting -= 1;
        let Metered { answer, mut held } = self.zones[node].lab.visit(visit, self.zones[node].locked_until > at);
        match (answer, into) {
            (Ok(Some(block)), Some(hand)) => {
                // The first hold took the pages that the others, if any, did not give back.
                self.costs.brought += u64::from(held.pages);
                self.costs.counts.misses += u64::from(node != self.node(cpu));
                self.cpus[cpu].view.refused = false;
                self.cpus[cpu].hands[hand].push_back(HeldBlock { node, order, pfn: block.pfn });
            }
            (Err(_), Some(_)) => match self.refused(cpu, operation, attempts) {
                Some(next) => {
                    self.zones[next.node].visiting += 1;
                    let attempts = attempts + 1;
                    self.cpus[cpu].pending = Pending::Visit { visit: Visit::Take(order), operation: next, attempts };
                    return;
                }
                None => {
                    held = LockUse { holds: 1, pages: 0 };
                    self.cpus[cpu].view.refused = true;
                }
            },
            _ => {}
        }
        self.hold(cpu, node, held, Some(operation));
        self.look_at_watermarks(node, at);
    }

    /// Falls back as the library does when a node has no pages: drains the node's page lists and
    /// tries the node again, then tries the next node. Returns the operation to try. `None` if all
    /// nodes were tried, and waiting for other CPUs or for reclaim does not help.
    fn refused(&mut self, cpu: usize, operation: Operation, attempts: u32) -> Option<Operation> {
        self.costs.counts.retries += 1;
        let (node, home) = (operation.node, self.node(cpu));
        let held = self.zones[node].lab.drain(None);
        Virtual::run_on(cpu);
        self.maintain(node, held);
        let listed = self.zones[node].listed(self.programs) > 0;
        let next = (node + 1) % self.zones.len();
        if held.pages > 0 {
            self.work(cpu, RETRY as u32);
            return Some(operation);
        }
        if next != home {
            self.costs.counts.misses_with_pages_listed += u64::from(listed);
            return Some(Operation { node: next, ..operation });
        }
        if attempts < ATTEMPTS_MAX && self.zones.iter().any(|zone| zone.visiting > 0 || zone.reclaiming) {
            self.work(cpu, RETRY as u32);
            return Some(Operation { node: home, ..operation });
        }
        self.costs.counts.failures += 1;
        self.costs.taken -= u64::from(operation.order.pages());
        self.costs.counts.failures_with_pages_listed += u64::from(self.listed() > 0);
        None
    }

    fn look_at_watermarks(&mut self, node: usize, now: u64) {
        let zone = &self.zones[node];
        let Some(reclaimer) = zone.reclaimer else { return };
        let (room, marks) = (zone.lab.room(), zone.lab.limits().watermarks);
        if !zone.reclaiming && room <= marks.low {
            let listed = zone.listed(self.programs);
            self.costs.counts.reclaims += 1;
            self.costs.counts.early_reclaims += u64::from(room + listed > marks.high);
            self.set_reclaiming(node, true);
            self.wake(reclaimer, now);
        } else if zone.reclaiming && room > marks.high {
            self.set_reclaiming(node, false);
        }
    }

    fn set_reclaiming(&mut self, node: usize, reclaiming: bool) {
        self.zones[node].reclaiming = reclaiming;
        let held = self.zones[node].lab.set_reclaiming(reclaiming);
        self.maintain(node, held);
    }

    /// Holds a zone's lock once. If the operation needs further holds, makes them pending. The last
    /// hold completes the operation.
    pub(super) fn hold(&mut self, cpu: usize, node: usize, held: LockUse, operation: Option<Operation>) {
        let at = self.cpus[cpu].at;
        let zone = &mut self.zones[node];
        let wait = zone.locked_until.saturating_sub(at);
        let now = held.pages / held.holds.max(1);
        let found = if wait > 0 { ZoneLock::HandedOver } else { ZoneLock::Free };
        let time = cost::hold(now, found, self.siblings);
        zone.locked_until = at + wait + time;
        self.cpus[cpu].at = zone.locked_until;
        self.costs.counts.most_moved = self.costs.counts.most_moved.max(now);
        if operation.is_none() {
            self.costs.tick_holds += 1;
        } else {
            self.costs.holds += 1;
            self.costs.waits += u64::from(wait > 0);
            self.costs.waited += wait;
            self.costs.held += time;
            self.costs.busy_time += wait + time;
        }
        if held.holds > 1 {
            let held = LockUse { holds: held.holds - 1, pages: held.pages - now };
            self.cpus[cpu].pending = Pending::Holds { node, held, operation };
            return;
        }
        match operation {
            Some(operation) => {
                self.costs.done(&operation, self.cpus[cpu].at);
                self.work(cpu, operation.work);
            }
            None => self.cpus[cpu].parked = true,
        }
    }
}

fn sum(one: LockUse, other: LockUse) -> LockUse {
    LockUse { holds: one.holds + other.holds, pages: one.pages + other.pages }
}
