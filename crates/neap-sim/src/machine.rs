//! The virtual machine: CPUs, a zone lock per node, and a clock that jumps from event to event.
//!
//! The page lists, zone and buddy are the real ones of `neap-pages`. Other CPUs touch a CPU's list
//! only in ticks, in drains, and when a node has no pages. So a CPU runs ahead on its own list
//! until it needs a zone, a channel, or time to pass (`cpu`, `exchange`). These events happen in
//! the order of the clock. A CPU that finds a zone's lock held waits for all CPUs that came
//! earlier. The machine tells the lists' code that the lock was held (`zone`). Every node ticks
//! four times a second. The machine takes no real lock and reads no real clock, so a scenario and a
//! seed give the same numbers each time.

mod cpu;
mod exchange;
mod parts;
mod zone;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use neap_pages::lab::Laboratory;
use neap_pages::policy::Policy;
use neap_testing::virtual_platform::Virtual;

use crate::cost;
use crate::measure::{Costs, Sample};
pub use crate::setup::{ListLock, SECOND, Setup, TICK};
pub(crate) use parts::Operation;
use parts::{Channel, Cpu, HeldBlock, Pending, Zone};

/// A machine with lists of policy `T`.
pub struct Machine<T: Policy> {
    zones: Vec<Zone<T>>,
    /// First the CPUs that run programs. Then a carrier for each node: a CPU that brings pages,
    /// which ticks and drains took out of lists, to the node's zone.
    cpus: Vec<Cpu>,
    programs: usize,
    channels: Vec<Channel>,
    named: BTreeMap<u32, HeldBlock>,
    /// Time, a number that orders equal times, CPU.
    queue: BinaryHeap<Reverse<(u64, u64, usize)>>,
    queued: u64,
    siblings: bool,
    list_lock: ListLock,
    list_cost: u64,
    step: u64,
    drain_every: Option<u64>,
    now: u64,
    next_tick: u64,
    next_sample: u64,
    next_drain: u64,
    drained_cpu: usize,
    /// Costs since the last call that took them.
    pub costs: Costs,
}

impl<T: Policy> Machine<T> {
    /// Makes a machine at time 0.
    ///
    /// # Panics
    /// Panics if there is no node, or the system refuses address space for the zones' tables.
    pub fn new(setup: Setup) -> Machine<T> {
        let programs = setup.programs.len();
        assert!(setup.nodes > 0, "a machine has a node");
        let zone = |node| Zone::new(setup.managed, programs, setup.reclaimers.get(node).copied().flatten());
        let watched = setup.watched;
        let mut cpus: Vec<Cpu> =
            setup.programs.into_iter().map(|program| Cpu::with_program(program, watched)).collect();
        cpus.extend((0..setup.nodes).map(|_| Cpu::carrier()));
        let mut machine = Machine {
            zones: (0..setup.nodes).map(zone).collect(),
            cpus,
            programs,
            channels: (0..setup.channels).map(|_| Channel::default()).collect(),
            named: BTreeMap::new(),
            queue: BinaryHeap::new(),
            queued: 0,
            siblings: setup.siblings,
            list_lock: setup.list_lock,
            list_cost: cost::list(setup.list_lock, setup.siblings),
            step: setup.step,
            drain_every: setup.drain_every,
            now: 0,
            next_tick: TICK,
            next_sample: setup.step,
            next_drain: setup.drain_every.unwrap_or(u64::MAX),
            drained_cpu: 0,
            costs: Costs::new(programs, 0),
        };
        (0..programs).for_each(|cpu| machine.enqueue(cpu));
        machine
    }

    /// CPUs that run programs.
    pub fn cpus(&self) -> usize {
        self.programs
    }

    /// Nanoseconds since the start.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// The costs since the last call.
    pub fn take_costs(&mut self) -> Costs {
        core::mem::replace(&mut self.costs, Costs::new(self.programs, self.now))
    }

    /// The real pages of each node.
    pub fn labs(&self) -> impl Iterator<Item = &Laboratory<Virtual, T>> {
        self.zones.iter().map(|zone| &zone.lab)
    }

    /// The node that a CPU is nearest to.
    fn node(&self, cpu: usize) -> usize {
        cpu % self.zones.len()
    }

    /// The limit of a CPU's lists at the moment.
    pub fn list_high(&self, cpu: usize) -> u32 {
        self.labs().map(|lab| lab.list_high(cpu)).sum()
    }

    /// Pages in a CPU's lists.
    pub fn listed_on(&self, cpu: usize) -> u32 {
        self.labs().map(|lab| lab.listed_on(cpu)).sum()
    }

    /// Pages in lists.
    pub fn listed(&self) -> u32 {
        (0..self.programs).map(|cpu| self.listed_on(cpu)).sum()
    }

    /// Pages that can still be handed out.
    pub fn room(&self) -> u32 {
        self.labs().map(Laboratory::room).sum()
    }

    /// Returns the pages of programs' blocks: in hands, in channels, and stored under a number.
    pub fn in_hands(&self) -> u32 {
        let pages = |blocks: &VecDeque<HeldBlock>| blocks.iter().map(|block| block.order.pages()).sum::<u32>();
        let hands: u32 = self.cpus.iter().flat_map(|cpu| &cpu.hands).map(pages).sum();
        let named: u32 = self.named.values().map(|block| block.order.pages()).sum();
        hands + named + self.channels.iter().map(|channel| pages(&channel.blocks)).sum::<u32>()
    }

    /// Completes the operations that are under way. Returns whether every page is with a program
    /// (in a hand, in a channel or under a number), in a list or free.
    pub fn settle(&mut self) -> bool {
        for cpu in 0..self.cpus.len() {
            while let Pending::Visit { .. } | Pending::Holds { .. } = self.cpus[cpu].pending {
                let pending = core::mem::replace(&mut self.cpus[cpu].pending, Pending::Go);
                Virtual::run_on(cpu);
                self.resume(cpu, pending);
            }
        }
        let managed: u32 = self.zones.iter().map(|zone| zone.managed).sum();
        self.in_hands() + self.listed() + self.room() == managed
    }

    /// Whether all programs have ended.
    pub fn has_ended(&self) -> bool {
        self.cpus[..self.programs].iter().all(|cpu| cpu.ended)
    }

    /// Whether no operation is under way.
    pub fn is_quiet(&self) -> bool {
        self.cpus.iter().all(|cpu| !matches!(cpu.pending, Pending::Visit { .. } | Pending::Holds { .. }))
    }

    /// Lets `time` nanoseconds pass.
    pub fn run(&mut self, time: u64) {
        let until = self.now + time;
        loop {
            let next = self.next_tick.min(self.next_sample).min(self.next_drain).min(until);
            match self.queue.peek() {
                Some(Reverse((at, ..))) if *at < next => {
                    let Some(Reverse((_, _, cpu))) = self.queue.pop() else { break };
                    self.act(cpu, next);
                }
                _ => {
                    self.now = next;
                    self.pass();
                    if next == until {
                        break;
                    }
                }
            }
        }
    }

    /// Executes everything that is due at this moment.
    fn pass(&mut self) {
        if self.now == self.next_drain {
            self.next_drain += self.drain_every.unwrap_or(u64::MAX);
            self.drain_next();
        }
        if self.now == self.next_tick {
            self.next_tick += TICK;
            (0..self.zones.len()).for_each(|node| self.tick(node));
        }
        if self.now == self.next_sample {
            self.next_sample += self.step;
            self.sample();
        }
    }

    fn enqueue(&mut self, cpu: usize) {
        self.queued += 1;
        self.queue.push(Reverse((self.cpus[cpu].at, self.queued, cpu)));
    }

    fn sample(&mut self) {
        let sum = |of: fn(&Self, usize) -> u32| (0..self.programs).map(|cpu| u64::from(of(self, cpu))).sum();
        let (highs, listed) = (sum(Self::list_high), sum(Self::listed_on));
        let used = self.zones.iter().map(|zone| u64::from(zone.managed - zone.lab.room())).sum();
        let waited = self.costs.waited;
        self.costs.samples.push(Sample { at: self.now, listed, highs, used, waited });
    }

    /// Runs a CPU until it needs a shared resource, or up to `horizon`.
    fn act(&mut self, cpu: usize, horizon: u64) {
        Virtual::run_on(cpu);
        self.now = self.now.max(self.cpus[cpu].at);
        for zone in &self.zones {
            zone.lab.set_clock(zone::START + self.now);
        }
        let pending = core::mem::replace(&mut self.cpus[cpu].pending, Pending::Go);
        let in_zone = matches!(pending, Pending::Visit { .. } | Pending::Holds { .. });
        if self.resume(cpu, pending) {
            self.go(cpu, horizon);
        } else if in_zone && (!self.cpus[cpu].parked || matches!(self.cpus[cpu].pending, Pending::Holds { .. })) {
            self.enqueue(cpu);
        }
    }

    /// Continues a CPU's pending action. Returns whether the machine must then ask the CPU's
    /// program for its next step.
    fn resume(&mut self, cpu: usize, pending: Pending) -> bool {
        match pending {
            Pending::Go => return true,
            Pending::Visit { visit, operation, attempts } => self.visit(cpu, visit, operation, attempts),
            Pending::Holds { node, held, operation } => self.hold(cpu, node, held, operation),
            Pending::Channel(op) => return self.pass_on(cpu, op),
        }
        false
    }
}
