//! The virtual machine: CPUs, one zone lock, and a clock that jumps from event to event.
//!
//! Sits between a scenario's programs and the real page lists, zone and buddy of `neap-pages`. A CPU runs ahead on its own
//! list, which nobody else touches, until it needs the zone, a channel, or time to pass; these things happen in the order
//! of the clock. Who finds the zone's lock held waits until all before it have had it (first come, first served) and its
//! list is told so by the code that would notice it. A hold lasts as the cost table says. Ticks come four times a second;
//! what they give to the zone is carried there by a maintenance thread that queues like everybody. Takes no real lock, reads
//! no real clock: the same scenario and seed give the same numbers.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use neap_base::virtual_platform::Virtual;
use neap_base::{Order, Pfn, Platform};
use neap_pages::lab::{Held, Laboratory, Visit};
use neap_pages::policy::Policy;
use neap_pages::{Shape, SideTable, TABLES};

use crate::cost;
use crate::measure::{Costs, Sample};
use crate::program::{HANDS, Op, Program, View};

/// Between two ticks, in nanoseconds.
pub const TICK: u64 = 250_000_000;
/// A second.
pub const SECOND: u64 = 1_000_000_000;
/// What policies take the start for: a machine that has run for a while.
const START: u64 = 10 * SECOND;
/// Ticks that find nothing after which no other follows soon.
const LAST_TICKS: u32 = 3;
/// Between two attempts of whoever waits for what another CPU has under way.
const RETRY: u64 = 20_000;
/// Attempts after which it fails.
const ATTEMPTS: u32 = 100;

/// Pages that are taken at once when the machine is filled.
const RUN: u32 = 1 << 16;

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
    /// Pages of the zone.
    pub managed: u32,
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
    /// How lists are locked.
    pub list_lock: ListLock,
    /// Somebody drains all lists, one after the other, so often.
    pub drain_every: Option<u64>,
    /// The CPU that reclaims when the low watermark is reached, until the high one is.
    pub reclaimer: Option<usize>,
}

impl Setup {
    /// A zone with memory to spare: lists may keep 150 MiB each, as much as page_fault1 swings, and more.
    pub fn new(programs: Vec<Program>) -> Setup {
        let managed = programs.len() as u32 * 8 * 37_500;
        let (warm, time, step) = (SECOND, 2 * SECOND, 10_000_000);
        let list_lock = ListLock::Try;
        Setup {
            managed: managed.max(1 << 21),
            programs,
            channels: 0,
            warm,
            time,
            step,
            list_lock,
            drain_every: None,
            reclaimer: None,
        }
    }
}

/// What a CPU does when its turn comes.
enum Pending {
    /// Goes on with its program.
    Go,
    /// Wants the zone's lock.
    Visit { visit: Visit, hand: usize, work: u32, since: u64, attempts: u32 },
    /// Wants it again, so often and for so many pages in all, and has then done this.
    Holds { holds: u32, pages: u32, then: Then },
    /// Sends or receives.
    Channel(Op),
}

/// What an operation was.
#[derive(Clone, Copy)]
enum Then {
    Taken { since: u64, work: u32 },
    Given { since: u64, work: u32 },
    Maintained,
}

struct Cpu {
    program: Option<Program>,
    hands: [VecDeque<(Pfn, Order)>; HANDS],
    view: View,
    at: u64,
    pending: Pending,
    /// Somebody else holds its list up to then.
    list_held_until: u64,
    parked: bool,
    ended: bool,
}

#[derive(Default)]
struct Channel {
    blocks: VecDeque<(Pfn, Order)>,
    receiver: Option<usize>,
}

/// A machine whose lists have policy `T`.
pub struct Machine<T: Policy> {
    lab: Laboratory<Virtual, T>,
    managed: u32,
    cpus: Vec<Cpu>,
    channels: Vec<Channel>,
    named: BTreeMap<u32, (Pfn, Order)>,
    /// Time, a number that orders equals, CPU.
    queue: BinaryHeap<Reverse<(u64, u64, usize)>>,
    queued: u64,
    locked_until: u64,
    list_lock: ListLock,
    list_cost: u64,
    step: u64,
    drain_every: Option<u64>,
    reclaimer: Option<usize>,
    reclaiming: bool,
    now: u64,
    next_tick: u64,
    next_sample: u64,
    next_drain: u64,
    drained_cpu: usize,
    empty_ticks: u32,
    visiting: u32,
    /// What was measured since the last call that took it.
    pub costs: Costs,
}

impl<T: Policy> Machine<T> {
    /// A machine at time 0.
    ///
    /// # Panics
    /// If the system refuses address space for the zone's tables.
    pub fn new(setup: Setup) -> Machine<T> {
        let cpus = setup.programs.len();
        let platform = Virtual::new(4096, cpus);
        let span = ((setup.managed as usize) << 12).next_power_of_two() * 2;
        let budget = Some(setup.managed);
        let shape = Shape { span, budget, tables: [SideTable::default(); TABLES], huge: false, list_high: None };
        let lab = Laboratory::open(platform, &shape).expect("address space for the tables of the zone");
        // A machine's memory is there from the start: growing is not what is measured.
        let pages = lab.pages();
        let runs = (0..setup.managed).step_by(RUN as usize).map(|start| {
            let length = RUN.min(setup.managed - start);
            (pages.allocate_run(lab.platform(), length, 1).expect("address space for the zone").pfn, length)
        });
        let runs: Vec<(Pfn, u32)> = runs.collect();
        runs.iter().for_each(|&(pfn, length)| pages.free_run(lab.platform(), pfn, length));
        let cpu = |program| Cpu {
            program,
            hands: Default::default(),
            view: View::default(),
            at: 0,
            pending: Pending::Go,
            list_held_until: 0,
            parked: false,
            ended: false,
        };
        let mut virtual_cpus: Vec<Cpu> = setup.programs.into_iter().map(|program| cpu(Some(program))).collect();
        virtual_cpus.push(Cpu { parked: true, ..cpu(None) });
        let list_cost = match setup.list_lock {
            ListLock::None => cost::LIST_WITHOUT_LOCK,
            ListLock::Blocking => cost::LIST_WITH_INTERRUPTS_OFF,
            ListLock::Try => cost::LIST,
        };
        let mut machine = Machine {
            lab,
            managed: setup.managed,
            cpus: virtual_cpus,
            channels: (0..setup.channels).map(|_| Channel::default()).collect(),
            named: BTreeMap::new(),
            queue: BinaryHeap::new(),
            queued: 0,
            locked_until: 0,
            list_lock: setup.list_lock,
            list_cost,
            step: setup.step,
            drain_every: setup.drain_every,
            reclaimer: setup.reclaimer,
            reclaiming: false,
            now: 0,
            next_tick: TICK,
            next_sample: setup.step,
            next_drain: setup.drain_every.unwrap_or(u64::MAX),
            drained_cpu: 0,
            empty_ticks: 0,
            visiting: 0,
            costs: Costs::new(cpus),
        };
        (0..cpus).for_each(|cpu| machine.enqueue(cpu));
        machine
    }

    /// CPUs that run programs.
    pub fn cpus(&self) -> usize {
        self.cpus.len() - 1
    }

    /// Nanoseconds since the start.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// The costs since the last call.
    pub fn take_costs(&mut self) -> Costs {
        let cpus = self.cpus();
        core::mem::replace(&mut self.costs, Costs::new(cpus))
    }

    /// The real pages.
    pub fn lab(&self) -> &Laboratory<Virtual, T> {
        &self.lab
    }

    /// Pages in programs' hands and channels.
    pub fn in_hands(&self) -> u32 {
        let pages = |blocks: &VecDeque<(Pfn, Order)>| blocks.iter().map(|(_, order)| order.pages()).sum::<u32>();
        let hands: u32 = self.cpus.iter().flat_map(|cpu| &cpu.hands).map(pages).sum();
        let named: u32 = self.named.values().map(|(_, order)| order.pages()).sum();
        hands + named + self.channels.iter().map(|channel| pages(&channel.blocks)).sum::<u32>()
    }

    /// Finishes the operations that are under way, and answers whether every page is in hands, in lists or free.
    pub fn settle(&mut self) -> bool {
        for cpu in 0..self.cpus.len() {
            Virtual::run_on(cpu);
            while matches!(self.cpus[cpu].pending, Pending::Visit { .. } | Pending::Holds { .. }) {
                match core::mem::replace(&mut self.cpus[cpu].pending, Pending::Go) {
                    Pending::Visit { visit, hand, work, since, attempts } => {
                        self.visit(cpu, visit, hand, work, since, attempts);
                    }
                    Pending::Holds { holds, pages, then } => self.hold(cpu, holds, pages, then),
                    other => self.cpus[cpu].pending = other,
                }
            }
        }
        let listed: u32 = (0..self.cpus()).map(|cpu| self.lab.list(cpu).1).sum();
        self.in_hands() + listed + self.lab.room() == self.managed
    }

    /// Whether no program will ever do anything again.
    pub fn has_ended(&self) -> bool {
        self.cpus[..self.cpus()].iter().all(|cpu| cpu.ended)
    }

    /// Whether no operation is under way.
    pub fn is_quiet(&self) -> bool {
        self.visiting == 0 && self.cpus.iter().all(|cpu| !matches!(cpu.pending, Pending::Holds { .. }))
    }

    /// Lets so much time pass.
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

    /// Does what is due at this moment.
    fn pass(&mut self) {
        if self.now == self.next_drain {
            self.next_drain += self.drain_every.unwrap_or(u64::MAX);
            self.drain_next();
        }
        if self.now == self.next_tick {
            self.next_tick += TICK;
            self.tick();
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

    fn tick(&mut self) {
        let past = (self.now + SECOND).saturating_sub(self.lab.platform().now());
        self.lab.platform().advance(past);
        let (listed, held) = self.lab.tick(self.empty_ticks >= LAST_TICKS);
        self.empty_ticks = if listed { 0 } else { self.empty_ticks + 1 };
        self.maintain(held);
    }

    fn drain_next(&mut self) {
        let cpu = self.drained_cpu;
        self.drained_cpu = (cpu + 1) % self.cpus();
        let held = self.lab.drain(Some(cpu));
        let cut = u64::from(held.pages) * cost::CUT;
        let zone = if self.list_lock == ListLock::Blocking {
            self.locked_until.saturating_sub(self.now) + u64::from(held.holds) * cost::hold(held.pages, false)
        } else {
            0
        };
        self.cpus[cpu].list_held_until = self.now + cut + zone;
        self.maintain(held);
    }

    /// Lets the maintenance thread take the zone's lock so often.
    fn maintain(&mut self, held: Held) {
        let cpu = self.cpus();
        if held.pages == 0 {
            return;
        }
        let thread = &mut self.cpus[cpu];
        if let Pending::Holds { holds, pages, .. } = &mut thread.pending {
            *holds += held.holds;
            *pages += held.pages;
            return;
        }
        thread.pending = Pending::Holds { holds: held.holds, pages: held.pages, then: Then::Maintained };
        thread.at = thread.at.max(self.now);
        self.enqueue(cpu);
    }

    fn sample(&mut self) {
        let lists = (0..self.cpus()).map(|cpu| self.lab.list(cpu));
        let (highs, listed) = lists.fold((0_u64, 0_u64), |(highs, listed), (high, count)| {
            (highs + u64::from(high), listed + u64::from(count))
        });
        let used = u64::from(self.managed - self.lab.room());
        let waited = self.costs.waited;
        self.costs.samples.push(Sample { at: self.now, listed, highs, used, waited });
    }

    /// Runs a CPU until it needs something that others have too, or up to `horizon`.
    fn act(&mut self, cpu: usize, horizon: u64) {
        Virtual::run_on(cpu);
        // Not more often: within a step a policy cannot tell.
        self.lab.set_clock(START + self.cpus[cpu].at);
        match core::mem::replace(&mut self.cpus[cpu].pending, Pending::Go) {
            Pending::Go => {}
            Pending::Visit { visit, hand, work, since, attempts } => {
                self.visit(cpu, visit, hand, work, since, attempts);
                return self.enqueue(cpu);
            }
            Pending::Holds { holds, pages, then } => {
                self.hold(cpu, holds, pages, then);
                if !self.cpus[cpu].parked || matches!(self.cpus[cpu].pending, Pending::Holds { .. }) {
                    self.enqueue(cpu);
                }
                return;
            }
            Pending::Channel(op) => {
                if !self.pass_on(cpu, op) {
                    return;
                }
            }
        }
        self.go(cpu, horizon);
    }

    fn go(&mut self, cpu: usize, horizon: u64) {
        let Cpu { program: Some(program), hands, view, at, pending, list_held_until, parked, ended, .. } =
            &mut self.cpus[cpu]
        else {
            return;
        };
        let (costs, list_cost) = (&mut self.costs, self.list_cost);
        while *at < horizon {
            view.now = *at;
            view.reclaiming = self.reclaiming;
            for (held, hand) in view.held.iter_mut().zip(&*hands) {
                *held = hand.len() as u32;
            }
            let op = program(view);
            let (mut bypass, since) = (false, *at);
            if *list_held_until > *at && matches!(op, Op::Take(..) | Op::Give(..)) {
                bypass = self.list_lock == ListLock::Try;
                costs.list_busy += 1;
                if self.list_lock == ListLock::Blocking {
                    costs.busy_time += *list_held_until - *at;
                    *at = *list_held_until;
                }
            }
            match op {
                Op::Take(order, hand, work) => {
                    *at += list_cost;
                    costs.busy_time += list_cost;
                    costs.taken += 1 << order;
                    let order = Order(order);
                    match self.lab.begin_allocate(order, bypass) {
                        Ok(block) => {
                            view.refused = false;
                            hands[hand].push_back((block.pfn, order));
                            costs.takes.add(*at - since, 1);
                            *at += u64::from(work);
                            costs.busy_time += u64::from(work);
                        }
                        Err(visit) => {
                            self.visiting += 1;
                            *pending = Pending::Visit { visit, hand, work, since, attempts: 0 };
                            break;
                        }
                    }
                }
                Op::Give(hand, work) => {
                    let Some((pfn, order)) = hands[hand].pop_front() else { continue };
                    *at += list_cost;
                    costs.busy_time += list_cost;
                    costs.given += u64::from(order.pages());
                    match self.lab.begin_free(pfn, order, bypass) {
                        None => {
                            costs.gives.add(*at - since, 1);
                            *at += u64::from(work);
                            costs.busy_time += u64::from(work);
                        }
                        Some(visit) => {
                            self.visiting += 1;
                            *pending = Pending::Visit { visit, hand, work, since, attempts: 0 };
                            break;
                        }
                    }
                }
                Op::Send(..) | Op::Receive(..) | Op::Swap(..) | Op::Name(..) | Op::Claim(..) => {
                    *pending = Pending::Channel(op);
                    break;
                }
                Op::Work(time) => {
                    costs.busy_time += time;
                    *at += time;
                }
                Op::Rest(time) => *at += time,
                Op::Sleep if self.reclaiming => {}
                Op::Sleep => {
                    *parked = true;
                    return;
                }
                Op::End => {
                    costs.ended = costs.ended.max(*at);
                    (*parked, *ended) = (true, true);
                    return;
                }
            }
        }
        self.enqueue(cpu);
    }

    /// Sends or receives; answers whether the CPU goes on.
    fn pass_on(&mut self, cpu: usize, op: Op) -> bool {
        let at = self.cpus[cpu].at;
        match op {
            Op::Send(hand, channel, work) => {
                if let Some(block) = self.cpus[cpu].hands[hand].pop_front() {
                    self.channels[channel].blocks.push_back(block);
                }
                self.cpus[cpu].view.waiting = self.channels[channel].blocks.len() as u32;
                self.work(cpu, work);
                if let Some(receiver) = self.channels[channel].receiver.take() {
                    self.wake(receiver, at);
                }
                true
            }
            Op::Receive(hand, channel, work) => match self.channels[channel].blocks.pop_front() {
                Some(block) => {
                    self.cpus[cpu].hands[hand].push_back(block);
                    self.cpus[cpu].view.waiting = self.channels[channel].blocks.len() as u32;
                    self.work(cpu, work);
                    true
                }
                None => {
                    self.channels[channel].receiver = Some(cpu);
                    self.cpus[cpu].pending = Pending::Channel(op);
                    self.cpus[cpu].parked = true;
                    false
                }
            },
            Op::Swap(hand, channel) => {
                core::mem::swap(&mut self.cpus[cpu].hands[hand], &mut self.channels[channel].blocks);
                true
            }
            Op::Name(hand, name) => {
                let block = self.cpus[cpu].hands[hand].pop_front();
                self.named.extend(block.map(|block| (name, block)));
                true
            }
            Op::Claim(hand, name) => match self.named.remove(&name) {
                Some(block) => {
                    self.cpus[cpu].hands[hand].push_back(block);
                    true
                }
                None => {
                    self.cpus[cpu].at += RETRY;
                    self.cpus[cpu].pending = Pending::Channel(op);
                    self.enqueue(cpu);
                    false
                }
            },
            _ => true,
        }
    }

    fn work(&mut self, cpu: usize, work: u32) {
        self.cpus[cpu].at += u64::from(work);
        self.costs.busy_time += u64::from(work);
    }

    fn wake(&mut self, cpu: usize, now: u64) {
        let sleeper = &mut self.cpus[cpu];
        if core::mem::take(&mut sleeper.parked) {
            sleeper.at = sleeper.at.max(now + cost::WAKE);
            self.enqueue(cpu);
        }
    }

    /// Does what an operation left to do with the zone's lock.
    fn visit(&mut self, cpu: usize, visit: Visit, hand: usize, work: u32, since: u64, attempts: u32) {
        let at = self.cpus[cpu].at;
        let (order, spills) = match visit {
            Visit::Refill(order, _) | Visit::Take(order) => (Some(order), false),
            Visit::Spill(_) | Visit::Give(..) => (None, true),
        };
        let (answer, mut held) = self.lab.visit(visit, self.locked_until > at);
        self.visiting -= 1;
        let then = if spills { Then::Given { since, work } } else { Then::Taken { since, work } };
        match (answer, order) {
            (Ok(Some(block)), Some(order)) => {
                // The first hold brought what the others, if any, did not give back.
                self.costs.brought += u64::from(held.pages);
                self.cpus[cpu].view.refused = false;
                self.cpus[cpu].hands[hand].push_back((block.pfn, order));
            }
            (Err(_), Some(order)) => {
                let (again, given) = self.refused(cpu, order, attempts);
                if again {
                    self.maintain(given);
                    self.visiting += 1;
                    self.cpus[cpu].at += RETRY;
                    self.costs.busy_time += RETRY;
                    let visit = Visit::Take(order);
                    self.cpus[cpu].pending = Pending::Visit { visit, hand, work, since, attempts: attempts + 1 };
                    return;
                }
                held = Held { holds: held.holds + given.holds, pages: held.pages + given.pages };
                self.cpus[cpu].view.refused = true;
            }
            _ => {}
        }
        self.hold(cpu, held.holds.max(1), held.pages, then);
        self.look_at_watermarks(at);
    }

    /// What the library does when nothing can be had: lists are drained, then it is tried again. Answers whether to.
    fn refused(&mut self, cpu: usize, order: Order, attempts: u32) -> (bool, Held) {
        self.costs.retries += 1;
        let listed = |machine: &Machine<T>| (0..machine.cpus()).map(|cpu| machine.lab.list(cpu).1).sum::<u32>();
        let held = self.lab.drain(None);
        Virtual::run_on(cpu);
        if held.pages > 0 || attempts < ATTEMPTS && (self.visiting > 0 || self.reclaiming) {
            return (true, held);
        }
        self.costs.failures += 1;
        self.costs.taken -= u64::from(order.pages());
        self.costs.failures_with_pages_listed += u64::from(listed(self) > 0);
        (false, held)
    }

    fn look_at_watermarks(&mut self, now: u64) {
        let Some(reclaimer) = self.reclaimer else { return };
        let (room, marks) = (self.lab.room(), self.lab.limits().watermarks);
        if !self.reclaiming && room <= marks.low {
            let listed: u32 = (0..self.cpus()).map(|cpu| self.lab.list(cpu).1).sum();
            self.costs.reclaims += 1;
            self.costs.early_reclaims += u64::from(room + listed > marks.high);
            self.set_reclaiming(true);
            self.wake(reclaimer, now);
        } else if self.reclaiming && room > marks.high {
            self.set_reclaiming(false);
        }
    }

    fn set_reclaiming(&mut self, reclaiming: bool) {
        self.reclaiming = reclaiming;
        let held = self.lab.set_reclaiming(reclaiming);
        self.maintain(held);
    }

    /// Takes the zone's lock once, and again later for the rest; after the last time the operation is over.
    fn hold(&mut self, cpu: usize, holds: u32, pages: u32, then: Then) {
        let at = self.cpus[cpu].at;
        let wait = self.locked_until.saturating_sub(at);
        let now = pages / holds;
        let time = cost::hold(now, wait > 0);
        self.locked_until = at + wait + time;
        self.cpus[cpu].at = self.locked_until;
        self.costs.most_moved = self.costs.most_moved.max(now);
        if matches!(then, Then::Maintained) {
            self.costs.tick_holds += 1;
        } else {
            self.costs.holds += 1;
            self.costs.waits += u64::from(wait > 0);
            self.costs.waited += wait;
            self.costs.held += time;
            self.costs.busy_time += wait + time;
        }
        if holds > 1 {
            self.cpus[cpu].pending = Pending::Holds { holds: holds - 1, pages: pages - now, then };
            return;
        }
        match then {
            Then::Taken { since, work } => {
                self.costs.takes.add(self.locked_until - since, 1);
                self.work(cpu, work);
            }
            Then::Given { since, work } => {
                self.costs.gives.add(self.locked_until - since, 1);
                self.work(cpu, work);
            }
            Then::Maintained => self.cpus[cpu].parked = true,
        }
    }
}
