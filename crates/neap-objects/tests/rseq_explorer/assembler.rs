//! The assembler: the lines of every operation, in the right protocol and in each wrong one.
//!
//! `protocol` describes in words what is built here. `execute` gives a line its meaning. Used once
//! per scenario.

use crate::protocol::*;

/// A place to jump to, which may be placed later.
#[derive(Clone, Copy)]
struct Label(usize);

/// The next line; nowhere if a line has no jump.
const NEXT: Label = Label(0);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sequence {
    Push,
    Pop,
    PushMany,
    PopMany,
    SetCapacity,
    Count(Side),
    Alter(Change),
}

pub struct Assembler {
    lines: Vec<Line>,
    labels: Vec<u8>,
    flags: u8,
    abort: Label,
    /// Abort exits that are still to be written: the exit, the sequence, and the line after giving
    /// up.
    exits: Vec<[Label; 3]>,
    mutant: Mutant,
    classes: u8,
    gate: bool,
}

impl Assembler {
    pub fn new(mutant: Mutant, classes: u8, gate: bool) -> Assembler {
        let (labels, exits) = (vec![0], Vec::new());
        let mut asm = Assembler { lines: Vec::new(), labels, flags: 0, abort: NEXT, exits, mutant, classes, gate };
        // Line 0 is never executed: a saved frame with pc 0 means "not in a signal handler".
        asm.finish();
        asm
    }

    /// The lines, with places in place of labels.
    pub fn lines(self) -> Vec<Line> {
        let Assembler { mut lines, labels, .. } = self;
        assert!(lines.len() < 256, "a pc is a byte");
        for (at, line) in lines.iter_mut().enumerate() {
            line.next = if line.next == 0 { at as u8 + 1 } else { labels[line.next as usize] };
            line.to = labels[line.to as usize];
            line.abort = labels[line.abort as usize];
        }
        lines
    }

    pub fn operation(&mut self, op: Op) -> u8 {
        let entry = self.lines.len() as u8;
        match op {
            Op::Push(_) => self.fast(Sequence::Push),
            Op::Pop(_) => self.fast(Sequence::Pop),
            Op::SlowPush(_) => self.slow_push(),
            Op::SlowPop(_) => self.slow_pop(),
            Op::Flush(_) => self.flush(),
            Op::Fill(_) => self.fill(),
            Op::Take(_, wanted) => self.take(wanted),
            Op::Fork => self.fork(),
            Op::Read => self.read(),
            Op::Retire => self.retire(),
            Op::Charge(_) => self.change(Change::Take, Instr::CounterUp(true)),
            Op::Uncharge(_) => self.change(Change::Give, Instr::CounterDown(true)),
            Op::Stock(_) => self.stock(),
            Op::Empty(_) => self.empty(),
        }
        self.flags = 0;
        for [exit, again, given_up] in core::mem::take(&mut self.exits) {
            self.here(exit);
            let line = self.jump(Instr::Choice, again, "aborted: try again, or give up");
            line.next = given_up.0 as u8;
        }
        entry
    }

    fn label(&mut self) -> Label {
        self.labels.push(0);
        Label(self.labels.len() - 1)
    }

    fn here(&mut self, label: Label) {
        self.labels[label.0] = self.lines.len() as u8;
    }

    /// Adds a line that jumps to `to` when it fails.
    fn jump(&mut self, instr: Instr, to: Label, text: &'static str) -> &mut Line {
        let (flags, abort) = (self.flags, self.abort.0 as u8);
        self.lines.push(Line { instr, next: 0, to: to.0 as u8, abort, flags, hand: Hand::Same, text });
        self.lines.last_mut().expect("just pushed")
    }

    fn line(&mut self, instr: Instr, text: &'static str) -> &mut Line {
        self.jump(instr, NEXT, text)
    }

    /// Adds a line that is repeated until everything is copied.
    fn repeat(&mut self, instr: Instr, text: &'static str) -> &mut Line {
        let itself = self.label();
        self.here(itself);
        self.jump(instr, itself, text)
    }

    fn finish(&mut self) {
        self.flags = 0;
        self.line(Instr::Finish, "end of the operation");
    }

    /// A sequence from arming to END. The line after it runs once it has committed. `refused` is
    /// also the line after too many aborts.
    fn sequence(&mut self, kind: Sequence, refused: Label) {
        let [start, exit] = [(); 2].map(|()| self.label());
        self.here(start);
        self.exits.push([exit, start, refused]);
        self.abort = exit;
        let loose = kind == Sequence::SetCapacity && self.mutant == Mutant::CapacityOutsideSequence;
        if self.mutant != Mutant::NoArm && !loose {
            self.line(Instr::Arm, "arm: rseq_cs := descriptor");
        }
        if self.mutant == Mutant::GapAfterArm {
            self.line(Instr::Gap, "an instruction before START");
        }
        self.flags = if loose { 0 } else { SEQ };
        self.line(Instr::ReadCpu, "START: c := cpu id");
        if !matches!(kind, Sequence::Count(_)) {
            self.line(Instr::LoadRow, "p := row[c]");
        }
        match kind {
            Sequence::Count(side) => {
                self.jump(Instr::CheckPlace, refused, "refused if c has no words");
                self.line(Instr::LoadWord(side), "n := the word of c and k");
                self.line(Instr::StoreWordUp(side), "COMMIT: the word of c and k := n + 1").flags |= COMMIT;
            }
            Sequence::Alter(change) => {
                self.line(Instr::LoadStock, "n := p.word");
                if change != Change::Put || self.mutant != Mutant::StockBlindly {
                    self.jump(
                        Instr::CheckStock(change),
                        refused,
                        "refused if n is not of k, or has too few or no room",
                    );
                }
                self.line(Instr::StoreStock(change), "COMMIT: p.word := n, changed").flags |= COMMIT;
            }
            Sequence::Push | Sequence::PushMany => self.push(kind == Sequence::PushMany, refused),
            Sequence::Pop | Sequence::PopMany => self.pop(kind == Sequence::PopMany, refused),
            Sequence::SetCapacity => {
                if self.mutant != Mutant::CapacityOnClosed {
                    self.jump(Instr::CheckClosed, refused, "refused if p is CLOSED_REGION");
                }
                self.line(Instr::StoreCapacity, "COMMIT: p.capacity := full").flags |= COMMIT;
            }
        }
        self.flags = 0;
    }

    fn push(&mut self, many: bool, refused: Label) {
        let early = self.mutant == Mutant::CountFirst;
        self.line(Instr::LoadCount, "n := p.count");
        let careless = self.mutant == Mutant::StoreBeforeCheck && !many;
        if careless {
            self.line(Instr::StoreCell, "p.cells[n] := v, before the check");
        }
        let room = if many { "refused if n + m > p.capacity" } else { "refused if n = p.capacity" };
        self.jump(Instr::CheckRoom(many), refused, room);
        if early {
            self.line(Instr::StoreCountUp(many), "p.count := n + what comes, before the cells");
        }
        if many {
            self.repeat(Instr::CopyIn, "p.cells[n + i] := b[i]; i := i + 1");
        } else if !careless {
            self.line(Instr::StoreCell, "p.cells[n] := v");
        }
        if !early {
            if many {
                self.line(Instr::StoreCountUp(many), "COMMIT: p.count := n + m");
            } else {
                self.line(Instr::CountUp, "COMMIT: p.count := p.count + 1");
            }
        }
        self.commit(if many { Hand::GiveMany } else { Hand::Give });
    }

    fn pop(&mut self, many: bool, refused: Label) {
        let early = self.mutant == Mutant::CountFirst;
        let count =
            if many { "n := p.count - half; refused if negative" } else { "n := p.count - 1; refused if negative" };
        self.jump(Instr::LoadCountDown(many), refused, count);
        if early {
            self.line(Instr::StoreCountDown, "p.count := n, before the cells");
        }
        if many {
            self.repeat(Instr::CopyOut, "b[i] := p.cells[n + i]; i := i + 1");
        } else {
            self.line(Instr::LoadCell, "t := p.cells[n]");
        }
        if !early {
            self.line(Instr::StoreCountDown, "COMMIT: p.count := n");
        }
        self.commit(if many { Hand::GetMany } else { Hand::Get });
    }

    /// Makes the last line the commit.
    fn commit(&mut self, hand: Hand) {
        let last = self.lines.last_mut().expect("a sequence has lines");
        (last.hand, last.flags) = (hand, last.flags | COMMIT);
    }

    fn fast(&mut self, kind: Sequence) {
        let refused = self.label();
        self.sequence(kind, refused);
        self.finish();
        self.here(refused);
        if kind == Sequence::Push {
            self.line(Instr::BarnPutOne, "v goes to the barn").hand = Hand::Give;
        }
        self.finish();
    }

    fn slow_push(&mut self) {
        let [slow, small, again, barn] = [(); 4].map(|()| self.label());
        self.sequence(Sequence::Push, slow);
        self.finish();
        self.here(slow);
        self.enter_gate();
        self.sequence(Sequence::PopMany, small);
        self.line(Instr::BarnPutMany, "what is in b goes to the barn").hand = Hand::GiveMany;
        self.here(again);
        self.sequence(Sequence::Push, barn);
        self.leave_gate();
        self.finish();
        self.here(small);
        self.sequence(Sequence::SetCapacity, again);
        self.lines.last_mut().expect("a sequence has lines").next = again.0 as u8;
        self.here(barn);
        self.line(Instr::BarnPutOne, "v goes to the barn").hand = Hand::Give;
        self.leave_gate();
        self.finish();
    }

    fn slow_pop(&mut self) {
        let slow = self.label();
        self.sequence(Sequence::Pop, slow);
        self.finish();
        self.here(slow);
        self.enter_gate();
        self.refill(true);
    }

    fn fill(&mut self) {
        self.enter_gate();
        self.refill(false);
    }

    fn refill(&mut self, keep: bool) {
        let [small, again, refused, leave] = [(); 4].map(|()| self.label());
        self.jump(Instr::BarnTake(keep), leave, if keep { "barn: keep one, others to b" } else { "barn: some to b" });
        self.sequence(Sequence::PushMany, small);
        self.here(leave);
        self.leave_gate();
        self.finish();
        self.here(small);
        self.sequence(Sequence::SetCapacity, again);
        self.here(again);
        self.sequence(Sequence::PushMany, refused);
        self.lines.last_mut().expect("a sequence has lines").next = leave.0 as u8;
        self.here(refused);
        self.line(Instr::BarnPutMany, "what is in b goes back to the barn").hand = Hand::GiveMany;
        self.leave_gate();
        self.finish();
    }

    fn flush(&mut self) {
        let refused = self.label();
        self.enter_gate();
        self.sequence(Sequence::PopMany, refused);
        self.line(Instr::BarnPutMany, "what is in b goes to the barn").hand = Hand::GiveMany;
        self.here(refused);
        self.leave_gate();
        self.finish();
    }

    fn enter_gate(&mut self) {
        if !self.gate {
            return;
        }
        let [enter, inside] = [(); 2].map(|()| self.label());
        self.here(enter);
        if self.mutant == Mutant::GateCheckFirst {
            self.jump(Instr::CheckGate, inside, "is the gate closed?");
        } else {
            self.line(Instr::EnterGate, "gate: inside := inside + 1");
            self.jump(Instr::CheckGate, inside, "is the gate closed?");
        }
        if !matches!(self.mutant, Mutant::GateCheckFirst | Mutant::GateWaitInside) {
            self.leave_gate();
        }
        self.line(Instr::WaitGate, "wait until the gate is open").next = enter.0 as u8;
        self.here(inside);
        if self.mutant == Mutant::GateCheckFirst {
            self.line(Instr::EnterGate, "gate: inside := inside + 1, too late");
        }
    }

    fn leave_gate(&mut self) {
        if self.gate {
            self.line(Instr::LeaveGate, "gate: inside := inside - 1");
        }
    }

    fn take(&mut self, wanted: u8) {
        use Mutant as M;
        let m = self.mutant;
        let [leave, found, fenced, skip] = [(); 4].map(|()| self.label());
        let serial = !matches!(m, M::SharedSpare | M::OwnSpares | M::IgnoreClosed);
        self.enter_gate();
        if serial {
            self.line(Instr::LockTakers, "lock the takers' mutex");
        }
        self.line(Instr::LoadSpare, "s := the spare region");
        if m == M::FenceBeforeSwap {
            self.jump(Instr::FenceRow, leave, "fence(c), too early");
        }
        if m == M::NoSwap {
            self.line(Instr::LoadOld, "d := row[c], which stays there");
        } else {
            let busy = if matches!(m, M::SharedSpare | M::OwnSpares) { leave } else { found };
            self.jump(Instr::Swap, busy, "d := xchg(row[c], CLOSED_REGION)");
        }
        self.here(found);
        self.flags = DETACHED;
        match m {
            M::ReadBeforeFence => {
                self.each(wanted, |asm, k| _ = asm.line(Instr::OldCount(k), "n := d.count, too early"))
            }
            M::PutBackAfterTouch => self.each(wanted, Assembler::dissolve),
            M::CopyBeforeFence => self.each(!wanted, Assembler::copy),
            _ => {}
        }
        if m != M::NoFence && m != M::FenceBeforeSwap {
            self.jump(Instr::FenceRow, if m == M::FenceFailureIgnored { fenced } else { skip }, "fence(c)");
        }
        self.here(fenced);
        self.flags |= FENCED;
        if m != M::CopyBeforeFence && m != M::CopyAfterPublish {
            self.each(!wanted, Assembler::copy);
        }
        self.line(Instr::Publish, "row[c] := s");
        self.flags = FENCED | PUBLISHED;
        if m == M::CopyAfterPublish {
            self.each(!wanted, Assembler::copy);
        }
        if m != M::PutBackAfterTouch {
            self.each(wanted, Assembler::dissolve);
        }
        if m != M::SpareNotZeroed {
            self.each(!wanted, |asm, k| _ = asm.line(Instr::ZeroCount(k), "d.count := 0"));
            self.each(0xff, |asm, k| _ = asm.line(Instr::ZeroCapacity(k), "d.capacity := 0"));
        }
        self.line(Instr::StoreSpare, "the spare region is d now");
        self.flags = 0;
        self.here(leave);
        if serial {
            self.line(Instr::UnlockTakers, "unlock the takers' mutex");
        }
        self.leave_gate();
        self.finish();
        self.here(skip);
        self.flags = DETACHED;
        self.line(Instr::PutBack, "skipped: row[c] := d").next = leave.0 as u8;
    }

    /// Adds lines for each class of a mask.
    fn each(&mut self, mask: u8, mut lines: impl FnMut(&mut Assembler, u8)) {
        (0..self.classes).filter(|k| mask >> k & 1 == 1).for_each(|k| lines(self, k));
    }

    fn dissolve(&mut self, k: u8) {
        let none = self.label();
        if self.mutant != Mutant::ReadBeforeFence {
            self.jump(Instr::OldCount(k), none, "n := d.count");
        }
        self.line(Instr::Dissolve(k), "n objects of d go to the barn; d.count := 0");
        self.here(none);
    }

    fn copy(&mut self, k: u8) {
        let none = self.label();
        self.jump(Instr::OldCount(k), none, "n := d.count");
        self.repeat(Instr::CopyCell(k), "s.cells[i] := d.cells[i]; i := i + 1");
        self.line(Instr::CopyCount(k), "s.count := n");
        self.here(none);
        self.line(Instr::CopyCapacity(k), "s.capacity := d.capacity");
    }

    fn fork(&mut self) {
        let m = self.mutant;
        if m != Mutant::ForkNoGate {
            self.line(Instr::CloseGate, "fork: close the gate");
            self.line(Instr::WaitEmpty, "fork: wait until no thread is inside");
        }
        if m == Mutant::ForkFenceFirst {
            self.line(Instr::FenceCpu(0), "fork: fence CPU 0, too early");
            self.line(Instr::FenceCpu(1), "fork: fence CPU 1, too early");
        }
        self.line(Instr::CloseRow(0), "fork: d := xchg(row[0], CLOSED_REGION)");
        self.flags = SHUT;
        self.line(Instr::CloseRow(1), "fork: s := xchg(row[1], CLOSED_REGION)");
        if m != Mutant::ForkFenceFirst && m != Mutant::ForkNoFence {
            self.line(Instr::FenceCpu(0), "fork: fence CPU 0");
            self.line(Instr::FenceCpu(1), "fork: fence CPU 1");
        }
        self.flags = SHUT | CLOSED;
        self.line(Instr::Snapshot, "fork: copy the memory");
        self.line(Instr::ReopenRow(0), "fork: row[0] := d");
        self.flags = SHUT;
        self.line(Instr::ReopenRow(1), "fork: row[1] := s");
        self.flags = 0;
        if m != Mutant::ForkNoGate {
            self.line(Instr::OpenGate, "fork: open the gate");
        }
        self.finish();
    }

    fn change(&mut self, change: Change, otherwise: Instr) {
        let refused = self.label();
        self.sequence(Sequence::Alter(change), refused);
        self.finish();
        self.here(refused);
        self.line(otherwise, "lock: the counter of k");
        self.finish();
    }

    fn stock(&mut self) {
        let refused = self.label();
        self.line(Instr::CounterUp(false), "lock: the counter of k + 1");
        self.line(Instr::Hint, "v := the word of this CPU");
        self.sequence(Sequence::Alter(Change::Put), refused);
        self.line(Instr::CounterOut, "lock: what v held for another, or too much, off its counter");
        self.finish();
        self.here(refused);
        self.line(Instr::CounterDown(false), "lock: the counter of k - 1");
        self.finish();
    }

    fn empty(&mut self) {
        use Mutant as M;
        let m = self.mutant;
        let [leave, fenced, skip] = [(); 3].map(|()| self.label());
        self.line(Instr::LockTakers, "lock the takers' mutex");
        if m == M::FenceBeforeSwap {
            self.jump(Instr::FenceRow, leave, "fence(c), too early");
        }
        self.jump(Instr::Swap, leave, "d := xchg(row[c], CLOSED_REGION)");
        self.flags = DETACHED;
        if m == M::ReadBeforeFence {
            self.line(Instr::ReadStock, "n := d.word, too early");
        }
        if m != M::NoFence && m != M::FenceBeforeSwap {
            self.jump(Instr::FenceRow, if m == M::FenceFailureIgnored { fenced } else { skip }, "fence(c)");
        }
        self.here(fenced);
        self.flags |= FENCED;
        self.line(Instr::TakeStock, "n := xchg(d.word, 0)");
        self.line(Instr::PutBack, "row[c] := d");
        self.flags = 0;
        self.line(Instr::CounterOut, "lock: n off the counter of its owner");
        self.here(leave);
        self.line(Instr::UnlockTakers, "unlock the takers' mutex");
        self.finish();
        self.here(skip);
        self.flags = DETACHED;
        self.line(Instr::PutBack, "skipped: row[c] := d").next = leave.0 as u8;
    }

    fn read(&mut self) {
        let [enter, inside, leave] = [(); 3].map(|()| self.label());
        self.line(Instr::LoadPhase, "k := phase");
        self.sequence(Sequence::Count(Side::Entered), enter);
        self.here(inside);
        self.line(Instr::LoadObject, "v := object");
        if self.mutant != Mutant::LeaveFirst {
            self.line(Instr::Look, "look at v");
        }
        self.sequence(Sequence::Count(Side::Left), leave);
        if self.mutant == Mutant::LeaveFirst {
            self.line(Instr::Look, "look at v, too late");
        }
        self.finish();
        self.here(enter);
        self.line(Instr::AddLocked(Side::Entered), "lock: the shared word of k + 1").next = inside.0 as u8;
        self.here(leave);
        self.line(Instr::AddLocked(Side::Left), "lock: the shared word of k + 1");
        self.finish();
    }

    fn retire(&mut self) {
        use Mutant as M;
        let m = self.mutant;
        let [fenced, look, failed] = [(); 3].map(|()| self.label());
        let ignored = m == M::FenceFailureIgnored;
        let fence = |asm: &mut Assembler| {
            for (cpu, text) in [(0, "fence CPU 0"), (1, "fence CPU 1")] {
                asm.jump(Instr::FencePlace(cpu), if ignored { fenced } else { failed }, text);
            }
        };
        if m == M::RetireFenceFirst {
            fence(self);
        }
        self.line(Instr::Replace, "v := object; object := v + 1");
        self.line(Instr::TakeUp, "v is deferred and taken up");
        if m != M::RetireFenceFirst && m != M::RetireNoFence {
            fence(self);
        }
        self.here(fenced);
        if m == M::RetireOnePhase {
            self.line(Instr::FlipFirst, "k := phase; phase := the other");
        }
        self.here(look);
        let sides = [Side::Left, Side::Entered];
        for side in if m == M::RetireEnteredFirst { [sides[1], sides[0]] } else { sides } {
            let text = if side == Side::Left { "n := n - leavers at i" } else { "n := n + enterers at i" };
            self.repeat(Instr::AddUp(side), text);
        }
        self.jump(Instr::Decide, look, "both phases seen? otherwise phase := the one that is; k := the other");
        self.line(Instr::Free, "v is freed");
        self.here(failed);
        self.finish();
    }
}
