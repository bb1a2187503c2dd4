//! The possible next events: an instruction, a drained store, a switch, a signal; and the kernel's
//! part in them.
//!
//! Lists every successor of a state, with the events on the way. Nothing is kept between calls.

use crate::model::*;
use crate::protocol::*;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// The thread executes its next line; the branch tells apart the outcomes of a line that has
    /// several.
    Step(usize, u8),
    /// The store at a place of a CPU's buffer reaches memory; the oldest is at 0.
    Drain(usize, usize),
    /// The thread is preempted.
    Leave(usize),
    /// The thread gets a CPU.
    Enter(usize, u8),
    /// A signal handler starts on top of the thread.
    Signal(usize),
}

pub struct Machine {
    pub scenario: Scenario,
    pub program: Program,
}

impl Machine {
    pub fn new(scenario: Scenario) -> Machine {
        assert!(scenario.actors.len() <= MAX_THREADS);
        assert!((scenario.classes(), scenario.capacity) == (1, 3) || scenario.classes() <= 2 && scenario.capacity <= 2);
        let pinned = scenario.actors.iter().filter(|a| a.cpus & 1 << 2 != 0).count();
        assert!(pinned <= 1, "CPU 2 is for one thread");
        let mut handlers = scenario.actors.iter().filter_map(|a| a.handler);
        assert!(
            handlers.all(|op| matches!(op, Op::Pop(_) | Op::Push(1..) | Op::Read | Op::Charge(_))),
            "no such handler"
        );
        let takes = |a: &Actor| a.ops.iter().any(|op| matches!(op, Op::Take(..)));
        assert!(!scenario.actors.iter().any(|a| a.handler.is_some() && takes(a)), "no handler on top of a taker");
        let ops = scenario.actors.iter().flat_map(|a| a.ops.iter().copied().chain(a.handler));
        let program = Program::new(scenario.mutant, scenario.classes(), ops);
        Machine { scenario, program }
    }

    pub fn initial(&self) -> State {
        let mut s = State {
            mem: [0; WORDS],
            buf: Default::default(),
            thr: [Thread { cpu: OFF, ..Thread::default() }; MAX_THREADS],
            barn: self.scenario.barn,
            flaw: Flaw::None,
            changes: [0; CHANGES],
            early: self.scenario.order == Order::Loads,
        };
        if self.scenario.reads() {
            (s.mem[OBJECT], s.mem[ALIVE]) = (1, 1);
        }
        if self.scenario.stocks() {
            s.mem[stock_of(CLOSED_REGION)] =
                if self.scenario.mutant == Mutant::ClosedWordOfZeroes { 0 } else { NOBODYS };
            for (row, (region, stacks)) in (A..).zip(&self.scenario.stacks).enumerate() {
                let number = stacks[0].len() as u8;
                s.mem[ROW + row] = region;
                s.mem[stock_of(region)] = if number > 0 { stocked(0, number) } else { 0 };
                s.mem[CHARGED] += number;
            }
        }
        let stacks = (A..).zip(&self.scenario.stacks).filter(|_| !self.scenario.reads() && !self.scenario.stocks());
        for (row, (region, stacks)) in stacks.enumerate() {
            if region == B && self.scenario.one_region {
                s.mem[ROW + row] = CLOSED_REGION;
                break;
            }
            s.mem[ROW + row] = region;
            for (class, objects) in stacks.iter().enumerate() {
                let count = count_of(region, class as u8);
                s.mem[count] = objects.len() as u8;
                s.mem[count + 1] = if self.scenario.drained { 0 } else { self.scenario.capacity };
                s.mem[count + 2..][..objects.len()].copy_from_slice(objects);
            }
        }
        for spare in 0..if self.scenario.stocks() { 0 } else { self.spares() } {
            s.mem[SPARE + spare] = C + spare as u8;
        }
        for (t, actor) in self.scenario.actors.iter().enumerate() {
            for op in actor.ops.iter().chain(&actor.handler) {
                if let Op::Push(v @ 1..) | Op::SlowPush(v @ 1..) = *op {
                    s.thr[t].hand |= 1 << v;
                }
            }
            s.thr[t].signals = u8::from(actor.handler.is_some());
            if self.undisturbed(t) {
                s.thr[t].cpu = 2;
            }
            self.load_op(&mut s, t);
        }
        s
    }

    /// Number of spare regions.
    pub fn spares(&self) -> usize {
        if matches!(self.scenario.mutant, Mutant::OwnSpares | Mutant::IgnoreClosed) { 2 } else { 1 }
    }

    /// The word with a taker's spare region.
    pub fn spare_of(&self, t: usize) -> usize {
        SPARE + t % self.spares()
    }

    /// Whether the thread has CPU 2 for itself. A switch there would only drain a buffer that can
    /// drain anyway, since such a thread runs no sequence. So it is not explored.
    fn undisturbed(&self, t: usize) -> bool {
        self.scenario.actors[t].cpus == 1 << 2
    }

    pub fn done(&self, s: &State, t: usize) -> bool {
        s.thr[t].op as usize == self.scenario.actors[t].ops.len()
    }

    pub fn load_op(&self, s: &mut State, t: usize) {
        let actor = &self.scenario.actors[t];
        let thread = &mut s.thr[t];
        thread.now = Frame::default();
        let own = match actor.handler {
            Some(Op::Push(v)) if thread.signals > 0 => thread.hand & !(1 << v),
            _ => thread.hand,
        };
        while let Some(&op) = actor.ops.get(thread.op as usize) {
            if !matches!(op, Op::Push(0) | Op::SlowPush(0)) || own != 0 {
                thread.now = self.frame_for(op, own);
                return;
            }
            thread.op += 1;
        }
        // The thread's stores stay in its CPU's buffer until that drains.
        thread.cpu = OFF;
        thread.see_all();
    }

    fn frame_for(&self, op: Op, own: u8) -> Frame {
        let mut frame = Frame { pc: self.program.entry(op), ..Frame::default() };
        match op {
            Op::Push(0) | Op::SlowPush(0) => frame.v = own.trailing_zeros() as u8,
            Op::Push(v) | Op::SlowPush(v) => frame.v = v,
            Op::Pop(class) | Op::SlowPop(class) | Op::Flush(class) | Op::Fill(class) => frame.k = class,
            Op::Take(cpu, _) | Op::Empty(cpu) => frame.c = cpu,
            Op::Charge(payer) | Op::Uncharge(payer) | Op::Stock(payer) => frame.k = payer,
            Op::Fork | Op::Read | Op::Retire => {}
        }
        if frame.v != NOTHING {
            frame.k = self.scenario.class_of(frame.v);
        }
        frame
    }

    /// Calls `visit` with every possible action in `s` and its successor. Returns the events.
    pub fn successors(&self, s: &State, mut visit: impl FnMut(Action, &State)) -> u32 {
        let mut events = 0;
        let mut visit = |action: Action, next: &mut State| {
            next.forget_changes();
            visit(action, next);
        };
        for t in 0..self.scenario.actors.len() {
            if self.done(s, t) {
                continue;
            }
            let thread = &s.thr[t];
            if thread.cpu == OFF {
                for cpu in 0..CPUS as u8 {
                    let free = s.thr.iter().all(|other| other.cpu != cpu);
                    if self.scenario.actors[t].cpus >> cpu & 1 == 1 && free {
                        let mut next = *s;
                        next.drain(cpu as usize);
                        next.thr[t].cpu = cpu;
                        next.thr[t].see_all();
                        visit(Action::Enter(t, cpu), &mut next);
                    }
                }
                continue;
            }
            for branch in 0..=CHANGES as u8 {
                let mut next = *s;
                let mut seen = 0;
                if !self.execute(&mut next, t, branch, &mut seen) {
                    break;
                }
                events |= seen;
                visit(Action::Step(t, branch), &mut next);
            }
            if !self.undisturbed(t) && !self.scenario.actors[t].stays {
                let mut next = *s;
                if self.interrupt(&mut next, t) {
                    events |= event::ABORT_SWITCH;
                }
                next.thr[t].cpu = OFF;
                visit(Action::Leave(t), &mut next);
            }
            if let Some(op) = self.scenario.actors[t].handler
                && thread.signals > 0
            {
                let mut next = *s;
                if self.interrupt(&mut next, t) {
                    events |= event::ABORT_SIGNAL;
                }
                let thread = &mut next.thr[t];
                thread.signals -= 1;
                thread.saved = thread.now;
                thread.now = self.frame_for(op, 0);
                visit(Action::Signal(t), &mut next);
            }
        }
        for (cpu, at) in (0..CPUS).flat_map(|cpu| (0..DEPTH).map(move |at| (cpu, at))) {
            if s.may_drain(cpu, at, self.scenario.order) {
                let mut next = *s;
                next.drain_at(cpu, at);
                visit(Action::Drain(cpu, at), &mut next);
            }
        }
        events
    }

    /// The kernel interrupts a running thread: the buffer drains, and an armed sequence is aborted.
    pub fn interrupt(&self, s: &mut State, t: usize) -> bool {
        s.drain(s.thr[t].cpu as usize);
        s.thr[t].see_all();
        self.abort(s, t)
    }

    /// The kernel's part on the way back to the thread: `rseq_cs` is cleared in any case.
    fn abort(&self, s: &mut State, t: usize) -> bool {
        if self.scenario.actors[t].rseq != Rseq::Registered {
            return false;
        }
        let thread = &mut s.thr[t];
        let line = &self.program.lines[thread.now.pc as usize];
        let abort = thread.armed && line.flags & SEQ != 0;
        thread.armed = false;
        if abort {
            thread.now = Frame { pc: line.abort, ..thread.now.private() };
        }
        abort
    }

    /// membarrier for one CPU: a full barrier on both sides, and an abort of a sequence that runs
    /// there.
    pub fn fence(&self, s: &mut State, caller: usize, cpu: u8, events: &mut u32) {
        s.drain(s.thr[caller].cpu as usize);
        let there = (0..self.scenario.actors.len()).find(|&t| t != caller && s.thr[t].cpu == cpu);
        if self.scenario.mutant != Mutant::FenceWithoutDrain {
            if s.buf[cpu as usize][0] != 0 {
                *events |= event::FENCE_DRAINED;
            }
            s.drain(cpu as usize);
            if let Some(t) = there {
                s.thr[t].see_all();
            }
        }
        s.thr[caller].see_all();
        if let Some(t) = there
            && self.scenario.mutant != Mutant::FenceWithoutAbort
            && self.abort(s, t)
        {
            *events |= event::ABORT_FENCE;
        }
    }
}
