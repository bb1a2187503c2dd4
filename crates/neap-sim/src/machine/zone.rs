//! Operations under a zone's lock: refills, spills, pages that others carry there, and the
//! fallbacks of a zone without pages.
//!
//! The zones are real. The lock is a queue, first come, first served. A hold lasts as the cost
//! table says; a CPU that needs several holds joins the queue anew each time. A thread of each
//! node, which queues like any CPU, carries pages that ticks and drains took out of lists to the
//! zone. An allocation that finds nothing drains the lists of its node, then asks the next node,
//! then fails. The latter two are counted, and counted separately if lists of the nearer node had
//! pages.

use neap_base::virtual_platform::Virtual;
use neap_base::{Pfn, Platform};
use neap_pages::lab::{Held, Laboratory, Visit};
use neap_pages::policy::Policy;
use neap_pages::{BATCH_SCALE, Shape, SideTable, TABLES};

use super::cpu::{Operation, Pending};
use super::{Block, ListLock, Machine, SECOND};
use crate::cost;

/// Start time for policies: that of a machine that has run for a while.
pub(super) const START: u64 = 10 * SECOND;
/// Vain ticks after which none follows soon.
const LAST_TICKS: u32 = 3;
/// Nanoseconds between two attempts of a CPU that waits for an operation of another CPU.
pub(super) const RETRY: u64 = 20_000;
/// Attempts after which an operation fails.
const ATTEMPTS: u32 = 100;
/// Pages taken at once when a zone is filled.
const RUN: u32 = 1 << 16;

/// A node's zone and lists.
pub(super) struct Zone<T: Policy> {
    pub(super) lab: Laboratory<Virtual, T>,
    pub(super) managed: u32,
    locked_until: u64,
    /// Operations that have left a list for this zone, and have not arrived yet.
    pub(super) visiting: u32,
    pub(super) reclaiming: bool,
    reclaimer: Option<usize>,
    empty_ticks: u32,
}

impl<T: Policy> Zone<T> {
    /// # Panics
    /// If the system refuses address space for the zone's tables.
    pub(super) fn new(managed: u32, cpus: usize, reclaimer: Option<usize>) -> Zone<T> {
        let span = ((managed as usize) << 12).next_power_of_two() * 2;
        let budget = Some(managed);
        let tables = [SideTable::default(); TABLES];
        let shape = Shape { span, budget, tables, huge: false, list_high: None, batch_scale: BATCH_SCALE };
        let lab = Laboratory::open(Virtual::new(4096, cpus), &shape).expect("address space for the tables of the zone");
        // A machine's memory exists from the start: growth is not measured.
        let pages = lab.pages();
        let runs = (0..managed).step_by(RUN as usize).map(|start| {
            let length = RUN.min(managed - start);
            (pages.allocate_run(lab.platform(), length, 1).expect("address space for the zone").pfn, length)
        });
        let runs: Vec<(Pfn, u32)> = runs.collect();
        runs.iter().for_each(|&(pfn, length)| pages.free_run(lab.platform(), pfn, length));
        Zone { lab, managed, locked_until: 0, visiting: 0, reclaiming: false, reclaimer, empty_ticks: 0 }
    }

    fn listed(&self, cpus: usize) -> u32 {
        (0..cpus).map(|cpu| self.lab.list(cpu).1).sum()
    }
}

impl<T: Policy> Machine<T> {
    pub(super) fn tick(&mut self, node: usize) {
        let zone = &mut self.zones[node];
        let past = (self.now + SECOND).saturating_sub(zone.lab.platform().now());
        zone.lab.platform().advance(past);
        let (listed, held) = zone.lab.tick(zone.empty_ticks >= LAST_TICKS);
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
                    + u64::from(held.holds) * cost::hold(held.pages, false, self.siblings)
            } else {
                0
            };
            self.cpus[cpu].list_held_until += u64::from(held.pages) * cost::CUT + zone;
            self.maintain(node, held);
        }
    }

    /// Lets the node's thread take the lock, once for each batch.
    fn maintain(&mut self, node: usize, more: Held) {
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
        let (answer, mut held) = self.zones[node].lab.visit(visit, self.zones[node].locked_until > at);
        match (answer, into) {
            (Ok(Some(block)), Some(hand)) => {
                // The first hold took the pages that the others, if any, did not give back.
                self.costs.brought += u64::from(held.pages);
                self.costs.counts.misses += u64::from(node != self.node(cpu));
                self.cpus[cpu].view.refused = false;
                self.cpus[cpu].hands[hand].push_back(Block { node, order, pfn: block.pfn });
            }
            (Err(_), Some(_)) => match self.refused(cpu, operation, attempts) {
                Some(next) => {
                    self.zones[next.node].visiting += 1;
                    let attempts = attempts + 1;
                    self.cpus[cpu].pending = Pending::Visit { visit: Visit::Take(order), operation: next, attempts };
                    return;
                }
                None => {
                    held = Held { holds: 1, pages: 0 };
                    self.cpus[cpu].view.refused = true;
                }
            },
            _ => {}
        }
        self.hold(cpu, node, held, Some(operation));
        self.look_at_watermarks(node, at);
    }

    /// The library's fallbacks for a node without pages: its lists are drained, then it is asked
    /// again, then the next one. Returns the operation to try, or `None` if the allocation fails.
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
        if attempts < ATTEMPTS && self.zones.iter().any(|zone| zone.visiting > 0 || zone.reclaiming) {
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

    /// Holds a zone's lock once, and again later for the rest. The last hold completes the
    /// operation.
    pub(super) fn hold(&mut self, cpu: usize, node: usize, held: Held, operation: Option<Operation>) {
        let at = self.cpus[cpu].at;
        let zone = &mut self.zones[node];
        let wait = zone.locked_until.saturating_sub(at);
        let now = held.pages / held.holds.max(1);
        let time = cost::hold(now, wait > 0, self.siblings);
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
            let held = Held { holds: held.holds - 1, pages: held.pages - now };
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

fn sum(one: Held, other: Held) -> Held {
    Held { holds: one.holds + other.holds, pages: one.pages + other.pages }
}
