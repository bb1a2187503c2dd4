//! The effect of one instruction: on memory, on the thread's registers, and on the objects that it
//! holds.
//!
//! `protocol` has the lines, `model` the state, and `steps` asks for every possible outcome.
//! Nothing is kept between calls. It reports only flaws that are visible at the moment of the step.

use crate::model::*;
use crate::protocol::*;
use crate::steps::Machine;

impl Machine {
    /// Records a flaw. Flaws that do no harm by themselves count only if every state is judged.
    fn note(&self, s: &mut State, flaw: Flaw) {
        let harmless = matches!(flaw, Flaw::ForeignStore | Flaw::CommitWhileClosed);
        if s.flaw == Flaw::None && !(harmless && self.scenario.at_rest) {
            s.flaw = flaw;
        }
    }

    /// A load of the newest value.
    fn load(&self, s: &State, t: usize, word: usize) -> u8 {
        let is_of = |entry: &&u16| **entry != 0 && stored_word(**entry) == word;
        let newest = s.buf[s.thr[t].cpu as usize].iter().rfind(is_of);
        newest.map_or(s.mem[word], |entry| (entry & 15) as u8)
    }

    /// A load that may miss the newest `may_miss` changes: the value with number `branch`, and the
    /// changes missed; `None` if there is no such value.
    fn load_early(&self, s: &State, t: usize, word: usize, may_miss: u8, branch: u8) -> Option<(u8, u8)> {
        let cpu = s.thr[t].cpu as usize;
        if s.buf[cpu].iter().any(|&entry| entry != 0 && stored_word(entry) == word) {
            return (branch == 0).then(|| (self.load(s, t, word), may_miss));
        }
        s.value(cpu, word, may_miss, branch)
    }

    /// Puts a store, with [`RELEASE`] or 0, into the buffer of the thread's CPU; false if that is
    /// full, so that it must drain.
    fn store(&self, s: &mut State, t: usize, word: usize, value: u8, mark: u16) -> bool {
        let buffer = &mut s.buf[s.thr[t].cpu as usize];
        let free = buffer.iter_mut().find(|entry| **entry == 0);
        free.map(|entry| *entry = (word as u16 + 1) << 4 | u16::from(value) | mark).is_some()
    }

    /// The word of a cell. Only a broken protocol asks for one outside a region.
    fn cell(&self, s: &mut State, region: u8, class: u8, index: u8) -> usize {
        let inside = index < self.scenario.capacity;
        if !inside {
            self.note(s, Flaw::OutOfBounds);
        }
        count_of(region, class) + 2 + if inside { index as usize } else { 0 }
    }

    /// A sequence stores into region `p` of CPU `c`: right only if that is the row of the CPU it is
    /// on, or if a taker has swapped the region out and not fenced yet.
    fn check_owner(&self, s: &mut State, t: usize, p: u8, c: u8) {
        let flags = |frame: &Frame| self.program.lines[frame.pc as usize].flags;
        let shut = |f: &Frame| flags(f) & (SHUT | CLOSED) == SHUT && [f.d, f.s].get(c as usize) == Some(&p);
        let leaving = |f: Frame| f.d == p && f.c == c && flags(&f) & (DETACHED | FENCED) == DETACHED || shut(&f);
        let own = c == s.thr[t].cpu && (c as usize) < ROWS;
        if own && self.scenario.reads() {
            return;
        }
        if !own || s.settled()[ROW + c as usize] != p && !s.frames().any(leaving) {
            self.note(s, Flaw::ForeignStore);
        }
    }

    fn put_into_barn(&self, s: &mut State, object: u8) {
        if object == NOTHING {
            self.note(s, Flaw::PoppedNothing);
        } else if s.barn >> object & 1 == 1 {
            self.note(s, Flaw::ObjectTwice);
        }
        s.barn |= 1 << object & !1;
    }

    fn take_from_barn(&self, s: &mut State, class: u8) -> u8 {
        let fits = |object: &u8| s.barn >> object & 1 == 1 && self.scenario.class_of(*object) == class;
        let Some(found) = (1..8).find(fits) else { return NOTHING };
        s.barn &= !(1 << found);
        found
    }

    fn receive(&self, s: &mut State, t: usize, object: u8) {
        if object == NOTHING {
            self.note(s, Flaw::PoppedNothing);
        } else if s.thr[t].hand >> object & 1 == 1 {
            self.note(s, Flaw::ObjectTwice);
        }
        s.thr[t].hand |= 1 << object & !1;
    }

    /// The word that a line loads without order or by an acquire, and the changes that it may miss;
    /// `None` for other lines.
    fn early(&self, s: &mut State, t: usize, row: usize) -> Option<(usize, u8)> {
        let f = s.thr[t].now;
        let may_miss = s.thr[t].may_miss;
        let with_row = if self.scenario.mutant == Mutant::RegionWithoutRow { may_miss } else { f.p_missed };
        match self.program.lines[f.pc as usize].instr {
            Instr::LoadRow if f.c as usize >= ROWS && self.scenario.mutant != Mutant::NoOtherEntries => None,
            Instr::LoadRow => Some((row, may_miss)),
            Instr::LoadCount | Instr::LoadCountDown(_) => Some((count_of(f.p, f.k), with_row)),
            Instr::CheckRoom(_) => Some((count_of(f.p, f.k) + 1, with_row)),
            Instr::CountUp => Some((count_of(f.p, f.k), f.n_missed)),
            Instr::LoadCell => Some((self.cell(s, f.p, f.k, f.n), f.n_missed)),
            Instr::CopyOut => Some((self.cell(s, f.p, f.k, f.n + f.i), f.n_missed)),
            Instr::LoadSpare => Some((self.spare_of(t), may_miss)),
            Instr::OldCount(class) => Some((count_of(f.d, class), may_miss)),
            Instr::LoadPhase => Some((PHASE, may_miss)),
            Instr::LoadWord(side) => Some((word_of(side, f.c, f.k), may_miss)),
            Instr::LoadObject => Some((OBJECT, may_miss)),
            Instr::AddUp(side) => Some((word_of(side, f.i, f.k), may_miss)),
            Instr::LoadStock => Some((stock_of(f.p), f.p_missed)),
            Instr::Hint if (s.thr[t].cpu as usize) < ROWS => Some((stock_of(A + s.thr[t].cpu), may_miss)),
            _ => None,
        }
    }

    /// Executes the next line of thread `t`; false if that is not possible, or has no such branch.
    pub fn execute(&self, s: &mut State, t: usize, branch: u8, events: &mut u32) -> bool {
        let mut f = s.thr[t].now;
        let line = self.program.lines[f.pc as usize];
        let cpu = s.thr[t].cpu as usize;
        let two = match line.instr {
            Instr::Choice => true,
            Instr::FenceRow | Instr::FencePlace(_) => self.scenario.fence_may_fail,
            _ => false,
        };
        // Takers and sequences may ask for a row beside those of the table. It is row 0, if
        // anything.
        let row = ROW + if (f.c as usize) < ROWS { f.c as usize } else { 0 };
        let mut seen = 0;
        let mut loaded = 0;
        if let Some((word, may_miss)) = self.early(s, t, row) {
            let Some((value, missed)) = self.load_early(s, t, word, may_miss, branch) else { return false };
            loaded = value;
            if branch > 0 {
                seen |= event::MISSED;
            }
            match line.instr {
                Instr::LoadRow => (f.p_missed, f.n_missed) = (missed, missed),
                Instr::LoadCount | Instr::LoadCountDown(_) => f.n_missed = missed,
                _ => {}
            }
            if line.instr.acquires(self.scenario.mutant) {
                s.thr[t].may_miss = missed;
            }
        } else if branch > u8::from(two) {
            return false;
        } else if line.instr.acquires(self.scenario.mutant) {
            s.thr[t].may_miss = 0;
        }
        // Whether the line succeeds; otherwise it jumps.
        let mut goes_on = true;
        // A plain store of the line: a word and its value.
        let mut store = None;
        match line.instr {
            Instr::Finish => unreachable!("settled by the step before"),
            Instr::Arm => s.thr[t].armed = self.scenario.actors[t].rseq == Rseq::Registered,
            Instr::Gap => {}
            Instr::Choice => goes_on = branch == 0,
            Instr::ReadCpu => {
                f.c = match self.scenario.actors[t].rseq {
                    Rseq::Registered => cpu as u8,
                    Rseq::Unregistered => NO_CPU,
                    Rseq::Borrowed => 0,
                };
            }
            Instr::LoadRow => {
                let entry = (f.c as usize) < ROWS || self.scenario.mutant == Mutant::NoOtherEntries;
                f.p = if entry { loaded } else { CLOSED_REGION };
                if f.p == CLOSED_REGION && s.frames().any(|f| self.program.lines[f.pc as usize].flags & SHUT != 0) {
                    seen |= event::CLOSED_OUT;
                }
            }
            Instr::LoadCount | Instr::LoadStock => f.n = loaded,
            Instr::LoadCountDown(many) => {
                let less = if many { self.scenario.half() } else { 1 };
                goes_on = loaded >= less;
                f.n = loaded.saturating_sub(less);
            }
            Instr::CheckRoom(many) => {
                goes_on = if many { f.n + f.m <= loaded } else { f.n != loaded };
            }
            Instr::CheckClosed => goes_on = f.p != CLOSED_REGION,
            Instr::StoreCell => store = Some((self.cell(s, f.p, f.k, f.n), f.v)),
            Instr::CopyIn => {
                store = Some((self.cell(s, f.p, f.k, f.n + f.i), f.b[f.i as usize]));
                f.i += 1;
                goes_on = f.i == f.m;
            }
            Instr::StoreCountUp(many) => store = Some((count_of(f.p, f.k), f.n + if many { f.m } else { 1 })),
            Instr::StoreCountDown => store = Some((count_of(f.p, f.k), f.n)),
            Instr::CountUp => store = Some((count_of(f.p, f.k), loaded.wrapping_add(1))),
            Instr::StoreCapacity => store = Some((count_of(f.p, f.k) + 1, self.scenario.capacity)),
            Instr::LoadCell => f.t = loaded,
            Instr::CopyOut => {
                f.b[f.i as usize] = loaded;
                f.i += 1;
                goes_on = f.i == self.scenario.half();
            }
            Instr::BarnPutOne => {
                s.drain(cpu);
                self.put_into_barn(s, f.v);
            }
            Instr::BarnPutMany => {
                s.drain(cpu);
                f.b[..f.m as usize].iter().for_each(|&object| self.put_into_barn(s, object));
            }
            Instr::BarnTake(keep) => {
                s.drain(cpu);
                let kept = if keep { self.take_from_barn(s, f.k) } else { NOTHING };
                if kept != NOTHING {
                    self.receive(s, t, kept);
                }
                for _ in 0..self.scenario.half() {
                    f.b[f.m as usize] = self.take_from_barn(s, f.k);
                    f.m += u8::from(f.b[f.m as usize] != NOTHING);
                }
                goes_on = f.m > 0;
            }
            Instr::EnterGate | Instr::LeaveGate => {
                s.drain(cpu);
                s.mem[INSIDE] = if line.instr == Instr::EnterGate { s.mem[INSIDE] + 1 } else { s.mem[INSIDE] - 1 };
            }
            Instr::CheckGate => {
                goes_on = self.load(s, t, GATE) == 1;
                if goes_on {
                    seen = event::GATE_CLOSED;
                }
            }
            Instr::WaitGate if self.load(s, t, GATE) == 1 => return false,
            Instr::WaitEmpty if self.load(s, t, INSIDE) > 0 => return false,
            Instr::WaitGate | Instr::WaitEmpty => {}
            Instr::CloseGate => {
                if self.scenario.mutant == Mutant::GateNoBarrier {
                    store = Some((GATE, 1));
                } else {
                    s.drain(cpu);
                    s.mem[GATE] = 1;
                }
            }
            Instr::OpenGate => store = Some((GATE, 0)),
            Instr::LockTakers | Instr::UnlockTakers => {
                let lock = line.instr == Instr::LockTakers;
                if lock && s.mem[TAKERS] == 1 {
                    return false;
                }
                s.drain(cpu);
                s.mem[TAKERS] = u8::from(lock);
            }
            Instr::LoadSpare => {
                f.s = loaded;
                if f.s < C {
                    seen |= event::REUSED;
                }
            }
            Instr::Swap => {
                s.drain(cpu);
                f.d = s.mem[row];
                s.change(cpu, row, CLOSED_REGION);
                goes_on = f.d != CLOSED_REGION;
                if !goes_on {
                    seen = event::BUSY;
                    if matches!(self.scenario.mutant, Mutant::SharedSpare | Mutant::OwnSpares) {
                        (f.d, f.s) = (NOTHING, NOTHING);
                    }
                }
            }
            Instr::LoadOld => f.d = self.load(s, t, row),
            Instr::FenceRow => {
                goes_on = branch == 0;
                if goes_on {
                    self.fence(s, t, f.c, &mut seen);
                }
            }
            Instr::FenceCpu(target) => self.fence(s, t, target, &mut seen),
            Instr::OldCount(_) => {
                f.n = loaded;
                goes_on = f.n > 0;
            }
            Instr::CopyCell(class) => {
                let (from, to) = (self.cell(s, f.d, class, f.i), self.cell(s, f.s, class, f.i));
                store = Some((to, self.load(s, t, from)));
                f.i += 1;
                goes_on = f.i == f.n;
                seen = event::KEPT;
            }
            Instr::CopyCount(class) => {
                store = Some((count_of(f.s, class), f.n));
                (f.n, f.i) = (0, 0);
            }
            Instr::CopyCapacity(class) => {
                store = Some((count_of(f.s, class) + 1, self.load(s, t, count_of(f.d, class) + 1)))
            }
            Instr::Publish => store = Some((row, f.s)),
            Instr::Dissolve(class) => {
                s.drain(cpu);
                for index in 0..f.n {
                    let word = self.cell(s, f.d, class, index);
                    let object = self.load(s, t, word);
                    self.put_into_barn(s, object);
                    seen = event::TOOK_OBJECT;
                }
                f.n = 0;
                if self.scenario.mutant != Mutant::SpareNotZeroed {
                    store = Some((count_of(f.d, class), 0));
                }
            }
            Instr::ZeroCount(class) => store = Some((count_of(f.d, class), 0)),
            Instr::ZeroCapacity(class) => store = Some((count_of(f.d, class) + 1, 0)),
            Instr::StoreSpare => store = Some((self.spare_of(t), f.d)),
            Instr::PutBack => {
                store = Some((row, f.d));
                seen = event::PUT_BACK;
            }
            Instr::CloseRow(of) => {
                s.drain(cpu);
                *(if of == 0 { &mut f.d } else { &mut f.s }) = s.mem[ROW + of as usize];
                s.change(cpu, ROW + of as usize, CLOSED_REGION);
            }
            Instr::ReopenRow(of) => {
                let held = if of == 0 { &mut f.d } else { &mut f.s };
                store = Some((ROW + of as usize, core::mem::replace(held, NOTHING)));
            }
            Instr::Snapshot => self.snapshot(s, t, &mut seen),
            Instr::LoadPhase => f.k = loaded,
            Instr::CheckPlace => {
                let isolated = f.c == 1 && self.scenario.one_region && self.scenario.mutant != Mutant::IsolatedWords;
                goes_on = (f.c as usize) < ROWS && !isolated;
            }
            Instr::LoadWord(_) => f.n = loaded,
            Instr::StoreWordUp(side) => store = Some((word_of(side, f.c, f.k), f.n + 1)),
            Instr::AddLocked(side) => {
                s.drain(cpu);
                let place = if self.scenario.mutant == Mutant::SharedWords { 0 } else { LOCKED };
                let word = word_of(side, place, f.k);
                s.change(cpu, word, s.mem[word] + 1);
                seen = event::COUNTED_LOCKED;
            }
            Instr::LoadObject => f.v = loaded,
            Instr::Look => {
                if f.v < s.mem[ALIVE] {
                    self.note(s, Flaw::UsedFreed);
                } else if f.v < s.mem[OBJECT] {
                    seen = event::READ_OLD;
                }
            }
            Instr::Replace => {
                f.v = self.load(s, t, OBJECT);
                store = Some((OBJECT, f.v + 1));
            }
            Instr::TakeUp => s.drain(cpu),
            Instr::FencePlace(place) => {
                goes_on = branch == 0;
                if goes_on && !(place == 1 && self.scenario.one_region) {
                    self.fence(s, t, place, &mut seen);
                }
            }
            Instr::FlipFirst => {
                f.k = self.load(s, t, PHASE);
                store = Some((PHASE, 1 - f.k));
            }
            Instr::AddUp(side) => {
                f.n = if side == Side::Left { f.n.wrapping_sub(loaded) } else { f.n.wrapping_add(loaded) } & 15;
                f.i = (f.i + 1) % PLACES;
                goes_on = f.i == 0;
            }
            Instr::Decide => {
                if f.n == 0 {
                    f.m |= 1 << f.k;
                } else {
                    seen = event::WAITED;
                }
                f.n = 0;
                goes_on = f.m == 0b11;
                if self.scenario.mutant == Mutant::RetireOnePhase {
                    goes_on = f.m > 0;
                } else if f.m == 0 {
                    f.k = 1 - f.k;
                } else if !goes_on {
                    f.k = 1 - f.m / 2;
                    if self.load(s, t, PHASE) == f.k {
                        store = Some((PHASE, 1 - f.k));
                        seen |= event::FLIPPED;
                    }
                }
            }
            Instr::Free => {
                s.mem[ALIVE] = f.v + 1;
                seen = event::FREED;
            }
            Instr::CheckStock(change) => {
                let number = f.n ^ stocked(f.k, 0);
                goes_on = match change {
                    Change::Take => (1..=MOST).contains(&number),
                    Change::Give => number < MOST,
                    Change::Put => f.n == f.v,
                };
            }
            Instr::StoreStock(change) => {
                let mine = 1 << (f.k + 1);
                let (value, event) = match change {
                    Change::Take => (f.n - 1, event::STOCK_TOOK),
                    Change::Give => (f.n + 1, event::STOCK_GAVE),
                    Change::Put => (restocked(f.v, f.k).0, event::STOCK_PUT),
                };
                match change {
                    Change::Take => s.thr[t].hand |= mine,
                    Change::Give => s.thr[t].hand &= !mine,
                    // This thread settles the bytes that come out of the word.
                    Change::Put => f.v = restocked(f.v, f.k).1,
                }
                (store, seen) = (Some((stock_of(f.p), value)), event);
            }
            Instr::Hint => f.v = if cpu < ROWS { loaded } else { NOTHING },
            Instr::CounterUp(held) | Instr::CounterDown(held) => {
                s.drain(cpu);
                let up = matches!(line.instr, Instr::CounterUp(_));
                let counter = &mut s.mem[CHARGED + f.k as usize];
                *counter = counter.wrapping_add(if up { 1 } else { 15 }) & 15;
                if held {
                    let mine = 1 << (f.k + 1);
                    s.thr[t].hand = if up { s.thr[t].hand | mine } else { s.thr[t].hand & !mine };
                }
            }
            Instr::CounterOut => {
                s.drain(cpu);
                if let Some(payer) = (f.v >> 2).checked_sub(1).filter(|payer| *payer < PAYERS) {
                    let counter = &mut s.mem[CHARGED + payer as usize];
                    *counter = counter.wrapping_sub(f.v & 3) & 15;
                }
            }
            Instr::ReadStock => f.v = self.load(s, t, stock_of(f.d)),
            Instr::TakeStock => {
                s.drain(cpu);
                let found = s.mem[stock_of(f.d)];
                s.change(cpu, stock_of(f.d), 0);
                f.v = if self.scenario.mutant == Mutant::ReadBeforeFence { f.v } else { found };
                seen = if found & 3 > 0 { event::STOCK_EMPTIED } else { 0 };
            }
        }
        if let Some((word, value)) = store {
            if line.flags & (SEQ | COMMIT) != 0 {
                self.check_owner(s, t, f.p, f.c);
            }
            let mark = if line.instr.releases(self.scenario.mutant) { RELEASE } else { 0 };
            if !self.store(s, t, word, value, mark) {
                return false;
            }
        }
        if matches!(line.instr, Instr::StoreSpare | Instr::PutBack) {
            (f.d, f.s) = (NOTHING, NOTHING);
        }
        if !goes_on && f.p == CLOSED_REGION {
            seen |= event::REFUSED;
        }
        *events |= seen;
        self.move_on(s, t, f, line, goes_on, events);
        true
    }

    /// The private part of a step: hand, next line, forgotten registers.
    fn move_on(&self, s: &mut State, t: usize, mut f: Frame, line: Line, goes_on: bool, events: &mut u32) {
        if goes_on && line.flags & COMMIT != 0 {
            if s.frames().any(|f| self.program.lines[f.pc as usize].flags & CLOSED != 0) {
                self.note(s, Flaw::CommitWhileClosed);
            }
            *events |= match line.hand {
                Hand::Same => event::ACTIVATED,
                Hand::Give => event::PUSHED,
                Hand::Get => event::POPPED,
                Hand::GiveMany => event::PUSHED_MANY,
                Hand::GetMany => event::POPPED_MANY,
            };
        }
        match line.hand {
            Hand::Give if goes_on => {
                s.thr[t].hand &= !(1 << f.v);
                f.v = NOTHING;
            }
            Hand::Get if goes_on => self.receive(s, t, f.t),
            Hand::GiveMany if goes_on => (f.m, f.b) = (0, [NOTHING; 2]),
            Hand::GetMany if goes_on => f.m = self.scenario.half(),
            _ => {}
        }
        f.pc = if goes_on { line.next } else { line.to };
        let next = self.program.lines[f.pc as usize];
        if (line.flags & SEQ != 0 || line.instr == Instr::StoreCapacity) && next.flags & SEQ == 0 {
            s.thr[t].armed = false;
            f = f.private();
        }
        s.thr[t].now = f;
        if next.instr == Instr::Finish {
            let thread = &mut s.thr[t];
            if thread.saved.pc != 0 {
                thread.now = thread.saved;
                thread.saved = Frame::default();
            } else {
                thread.op += 1;
                self.load_op(s, t);
            }
        }
    }

    /// Fork copies the memory: no thread may be half way, pending, locked or hold more than its own
    /// objects.
    fn snapshot(&self, s: &mut State, forker: usize, seen: &mut u32) {
        *seen = event::SNAPSHOT;
        for t in (0..self.scenario.actors.len()).filter(|&t| t != forker) {
            for f in [s.thr[t].now, s.thr[t].saved] {
                if self.program.lines[f.pc as usize].flags & SEQ != 0 && f.p >= A {
                    self.note(s, Flaw::SnapshotInFlight);
                }
                if f.m > 0 || f.d >= A {
                    self.note(s, Flaw::SnapshotLoses);
                }
            }
        }
        if [s.thr[forker].now.d, s.thr[forker].now.s].contains(&CLOSED_REGION) {
            self.note(s, Flaw::SnapshotClosed);
        }
        if s.mem[TAKERS] == 1 {
            self.note(s, Flaw::SnapshotLocked);
        }
        if s.settled() != s.mem {
            self.note(s, Flaw::SnapshotInFlight);
        }
    }
}
