//! A model of one zone: lists that are only counts, virtual time, and the real policies.
//!
//! Every CPU runs a program of allocations and frees. An operation costs about [`OPERATION`], a
//! hold of the zone's mutex [`HOLD`] and [`PAGE`] per page. A CPU that finds the lock held waits.
//! Ticks come four times a second and cost nothing. The same program gives the same numbers.

use super::{Limits, List, Policy, ZoneState};
use std::boxed::Box;
use std::vec::Vec;

/// Nanoseconds of an allocation or free with the program's work on a page.
pub(super) const OPERATION: u64 = 500;
/// Nanoseconds of an empty hold of the zone's mutex.
const HOLD: u64 = 500;
/// Additional nanoseconds for each page that moves.
const PAGE: u64 = 20;
/// Nanoseconds between two ticks.
pub(super) const TICK: u64 = 250_000_000;
pub(super) const SECOND: u64 = 1_000_000_000;

/// The next operation of a program.
#[derive(Clone, Copy, Debug)]
pub(super) enum Op {
    Take(u8),
    Give(u8),
    /// Nothing, for a number of nanoseconds.
    Rest(u64),
    End,
}

pub(super) type Program = Box<dyn FnMut() -> Op>;

/// Orders of the model's lists: the listed ones, and up to that of huge pages.
pub(super) const ORDERS: usize = 10;

/// The rest of an operation, under the zone's mutex.
enum Pending {
    Refill(u8),
    Give(u32),
}

pub(super) struct Cpu<T> {
    pub(super) policy: T,
    pub(super) list: List,
    blocks: [u32; ORDERS],
    at: u64,
    pending: Option<Pending>,
    program: Program,
}

impl<T> Cpu<T> {
    /// Takes up to `pages` pages out, mostly of the order with most pages.
    fn cut(&mut self, pages: u32) -> u32 {
        let before = self.list.count;
        while self.list.count > before - pages.min(before) {
            let order = (0..ORDERS).max_by_key(|&order| self.blocks[order] << order).unwrap_or(0);
            self.blocks[order] -= 1;
            self.list.count -= 1 << order;
        }
        before - self.list.count
    }
}

/// The costs of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Costs {
    pub(super) operations: u64,
    /// Holds of the zone's mutex by programs.
    pub(super) locks: u64,
    /// Holds that had to wait. The next field is the time waited.
    pub(super) waits: u64,
    pub(super) waited: u64,
    /// Holds by ticks.
    pub(super) tick_locks: u64,
    /// The most pages that one operation moved.
    pub(super) most_moved: u32,
    /// The most pages that all lists together were allowed to keep while free pages were at the low
    /// watermark or below.
    pub(super) highs_at_low: u64,
    /// Sum of the pages in lists at each tick, and number of ticks.
    held: u64,
    ticks: u64,
}

impl Costs {
    /// Holds of the zone's mutex per million operations.
    pub(super) fn per_million(&self) -> u64 {
        (self.locks + self.tick_locks) * 1_000_000 / self.operations.max(1)
    }

    pub(super) fn average_held(&self) -> u64 {
        self.held / self.ticks.max(1)
    }
}

pub(super) struct Model<T> {
    pub(super) limits: Limits,
    pub(super) cpus: Vec<Cpu<T>>,
    pub(super) free: u32,
    pub(super) reclaiming: bool,
    pub(super) costs: Costs,
    pub(super) now: u64,
    locked_until: u64,
    level: u8,
    random: Random,
}

impl<T: Policy> Model<T> {
    /// A zone with `free` pages, and a list per program.
    pub(super) fn new(limits: Limits, free: u32, programs: Vec<Program>) -> Model<T> {
        let cpu = |program| Cpu {
            policy: T::new(&limits),
            list: List { count: 0, moved: 0 },
            blocks: [0; ORDERS],
            at: 0,
            pending: None,
            program,
        };
        let cpus = programs.into_iter().map(cpu).collect();
        let costs = Costs::default();
        Model { limits, cpus, free, reclaiming: false, costs, now: 0, locked_until: 0, level: 0, random: Random(1) }
    }

    /// Runs all programs for `time` nanoseconds, a multiple of a tick.
    pub(super) fn run(&mut self, time: u64) -> &mut Model<T> {
        let until = self.now + time;
        while self.now < until {
            let next = (0..self.cpus.len()).min_by_key(|&cpu| self.cpus[cpu].at).unwrap();
            if self.cpus[next].at < self.now + TICK {
                self.act(next);
            } else {
                self.now += TICK;
                self.tick();
            }
        }
        self
    }

    /// The costs since the last call.
    pub(super) fn costs(&mut self) -> Costs {
        core::mem::take(&mut self.costs)
    }

    pub(super) fn held(&self) -> u32 {
        self.cpus.iter().map(|cpu| cpu.list.count).sum()
    }

    /// The most pages that all lists together keep.
    pub(super) fn highs(&self) -> u64 {
        self.cpus.iter().map(|cpu| u64::from(cpu.policy.high())).sum()
    }

    fn act(&mut self, index: usize) {
        if let Some(pending) = self.cpus[index].pending.take() {
            return self.visit(index, pending);
        }
        let supply = ZoneState { limits: &self.limits, free: self.free, reclaiming: self.reclaiming, now: 0 };
        let cpu = &mut self.cpus[index];
        while cpu.at < self.now + TICK && cpu.pending.is_none() {
            let supply = ZoneState { now: cpu.at, ..supply };
            match (cpu.program)() {
                Op::Take(order) => {
                    cpu.policy.asked(cpu.list, order);
                    if cpu.blocks[order as usize] == 0 {
                        cpu.pending = Some(Pending::Refill(order));
                    } else {
                        cpu.blocks[order as usize] -= 1;
                        cpu.list.count -= 1 << order;
                        cpu.list.moved = cpu.list.moved.wrapping_add(1 << order);
                    }
                }
                Op::Give(order) => {
                    cpu.blocks[order as usize] += 1;
                    cpu.list.count += 1 << order;
                    cpu.list.moved = cpu.list.moved.wrapping_add(1 << order);
                    let give = cpu.policy.put(cpu.list, order, || supply);
                    assert!(give <= cpu.list.count);
                    if give > 0 {
                        cpu.pending = Some(Pending::Give(give));
                    }
                }
                Op::Rest(time) => {
                    cpu.at += time;
                    continue;
                }
                Op::End => {
                    cpu.at = u64::MAX;
                    continue;
                }
            }
            self.costs.operations += 1;
            // The time varies, since CPUs in lockstep would never meet at the lock.
            cpu.at += OPERATION / 2 + u64::from(self.random.below(OPERATION as u32));
        }
    }

    /// The part of an operation under the zone's mutex.
    fn visit(&mut self, index: usize, pending: Pending) {
        let supply = ZoneState { limits: &self.limits, free: self.free, reclaiming: self.reclaiming, now: 0 };
        let cpu = &mut self.cpus[index];
        let supply = ZoneState { now: cpu.at, ..supply };
        let pages = match pending {
            Pending::Refill(order) => {
                let blocks = cpu.policy.refill(cpu.list, order, &supply);
                assert!(blocks > 0);
                let blocks = blocks.min(self.free >> order);
                assert!(blocks > 0, "the model's programs ask for no more than there is");
                self.free -= blocks << order;
                cpu.blocks[order as usize] += blocks - 1;
                cpu.list.count += (blocks - 1) << order;
                blocks << order
            }
            Pending::Give(pages) => {
                let pages = cpu.cut(pages);
                self.free += pages;
                pages
            }
        };
        self.costs.locks += 1;
        self.costs.most_moved = self.costs.most_moved.max(pages);
        if self.locked_until > cpu.at {
            self.costs.waits += 1;
            self.costs.waited += self.locked_until - cpu.at;
            cpu.policy.contended(&supply);
        }
        cpu.at = cpu.at.max(self.locked_until) + HOLD + PAGE * u64::from(pages);
        self.locked_until = cpu.at;
        self.look_at_watermarks();
    }

    /// Tells every list when a watermark has been reached.
    fn look_at_watermarks(&mut self) {
        let marks = self.limits.watermarks;
        let level = u8::from(self.free <= marks.high) + u8::from(self.free <= marks.low);
        if level > self.level {
            self.each(|cpu, supply| cpu.policy.pressure(cpu.list, supply));
        }
        self.level = level;
        if self.free <= marks.low {
            self.costs.highs_at_low = self.costs.highs_at_low.max(self.highs());
        }
    }

    fn tick(&mut self) {
        self.each(|cpu, supply| cpu.policy.decay(cpu.list, supply, 1));
        self.costs.held += u64::from(self.held());
        self.costs.ticks += 1;
    }

    /// Calls every policy, and gives the pages that it returns to the zone, a fixed batch at a
    /// time.
    fn each(&mut self, answer: impl Fn(&mut Cpu<T>, &ZoneState<'_>) -> u32) {
        for cpu in &mut self.cpus {
            let supply =
                ZoneState { limits: &self.limits, free: self.free, reclaiming: self.reclaiming, now: self.now };
            let give = answer(cpu, &supply);
            let pages = cpu.cut(give);
            self.free += pages;
            self.costs.tick_locks += u64::from(pages.div_ceil(self.limits.fixed.batch));
        }
    }
}

/// A small generator with a seed, the same on every machine.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(bound)) as u32
    }
}
