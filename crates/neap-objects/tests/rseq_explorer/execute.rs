//! What one instruction does: to memory, to the thread's registers, and to what it holds.
//!
//! Sits between `model` (the state), `protocol` (the lines) and `steps` (which asks for every possible
//! outcome). Takes no lock, keeps nothing between calls. Never judges, except for flaws that can only
//! be seen at the moment of the step.

use crate::model::*;
use crate::protocol::*;
use crate::steps::Machine;

impl Machine {
    /// Notes a flaw. Those that do no harm by themselves count only where every state is judged.
    fn note(&self, s: &mut State, flaw: Flaw) {
        let harmless = matches!(flaw, Flaw::ForeignStore | Flaw::CommitWhileClosed);
        if s.flaw == Flaw::None && !(harmless && self.scenario.at_rest) {
            s.flaw = flaw;
        }
    }

    fn load(&self, s: &State, t: usize, word: usize) -> u8 {
        let newest = s.buf[s.thr[t].cpu as usize].iter().rfind(|&&entry| (entry >> 4) as usize == word + 1);
        newest.map_or(s.mem[word], |entry| entry & 15)
    }

    /// Puts a store into the buffer of the thread's CPU; false if that is full, so that it must drain.
    fn store(&self, s: &mut State, t: usize, word: usize, value: u8) -> bool {
        let buffer = &mut s.buf[s.thr[t].cpu as usize];
        match buffer.iter_mut().find(|entry| **entry == 0) {
            Some(free) => *free = (word as u8 + 1) << 4 | value,
            None => return false,
        }
        true
    }

    fn count(&self, s: &State, t: usize, pointer: u8) -> u8 {
        if pointer >= A { self.load(s, t, count_of(pointer)) } else { 0 }
    }

    /// A word of a sheaf's slots. Only a broken protocol asks for one outside.
    fn slot(&self, s: &mut State, pointer: u8, index: u8) -> usize {
        if index >= capacity(pointer) {
            self.note(s, Flaw::OutOfBounds);
            return count_of(A) + 1;
        }
        count_of(pointer) + 1 + index as usize
    }

    /// A sequence stores into sheaf `p` of CPU `c`: right only if that is the row of the CPU it is
    /// on, or if a taker has swapped the sheaf out and not fenced yet.
    fn check_owner(&self, s: &mut State, t: usize, p: u8, c: u8) {
        let flags = |frame: &Frame| self.program.lines[frame.pc as usize].flags;
        let leaving = |f: &Frame| f.d == p && f.c == c && flags(f) & (DETACHED | FENCED) == DETACHED;
        let own = c == s.thr[t].cpu && (c as usize) < ROWS;
        if !own
            || s.settled()[ROW + c as usize] != p
                && !s.thr.iter().any(|other| leaving(&other.now) || leaving(&other.saved))
        {
            self.note(s, Flaw::ForeignStore);
        }
    }

    fn put_into_barn(&self, s: &mut State, t: usize, pointer: u8) {
        s.drain(s.thr[t].cpu as usize);
        if pointer >= A {
            let bit = 1 << (pointer - A);
            if s.barn & bit != 0 {
                self.note(s, Flaw::SheafTwice);
            }
            s.barn |= bit;
        }
    }

    fn take_from_barn(&self, s: &mut State, t: usize, empty: bool) -> Option<u8> {
        s.drain(s.thr[t].cpu as usize);
        let fits = |&p: &u8| s.barn >> (p - A) & 1 == 1 && (s.mem[count_of(p)] == 0) == empty;
        let found = (A..A + MAX_SHEAVES as u8).find(fits)?;
        s.barn &= !(1 << (found - A));
        Some(found)
    }

    /// Executes the next line of thread `t`; false if that is not possible, or has no such branch.
    pub fn execute(&self, s: &mut State, t: usize, branch: u8, events: &mut u32) -> bool {
        let mut f = s.thr[t].now;
        let line = self.program.lines[f.pc as usize];
        let cpu = s.thr[t].cpu as usize;
        let two = match line.instr {
            Instr::Choice | Instr::WaitBit => true,
            Instr::FenceRow => self.scenario.fence_may_fail,
            _ => false,
        };
        if branch == 1 && !two {
            return false;
        }
        // The table has rows 0 and 1. What lies in front of it is, in the model, row 0 again.
        let row = ROW + if (f.c as usize) < ROWS { f.c as usize } else { 0 };
        let mut seen = 0;
        // Whether the line does what it says; otherwise it jumps.
        let mut goes_on = true;
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
            Instr::CheckCpu => {
                let ncpus = self.load(s, t, NCPUS);
                goes_on = f.c < ncpus;
                if ncpus == 0 {
                    seen = event::CLOSED_OUT;
                }
            }
            Instr::LoadRow => f.p = self.load(s, t, row),
            Instr::CountForPush => {
                f.n = self.count(s, t, f.p);
                goes_on = f.n < capacity(f.p);
            }
            // The unsigned trick: 0 - 1 and a count with the lock bit are both above any capacity.
            Instr::CountForPop | Instr::CountForLock => {
                let n = self.count(s, t, f.p);
                let below = n.wrapping_sub(1);
                goes_on = below < capacity(f.p);
                f.n = if line.instr == Instr::CountForPop { below } else { n };
            }
            Instr::StoreSlot | Instr::StoreCountUp | Instr::StoreCountDown | Instr::StoreLocked => {
                self.check_owner(s, t, f.p, f.c);
                let count = count_of(f.p);
                let (word, value) = match line.instr {
                    Instr::StoreSlot => (self.slot(s, f.p, f.n), f.v),
                    Instr::StoreCountUp => (count, f.n + 1),
                    Instr::StoreCountDown => (count, f.n),
                    _ => (count, f.n | LOCK),
                };
                if !self.store(s, t, word, value) {
                    return false;
                }
                if line.flags & COMMIT != 0 {
                    seen = if line.hand == Hand::Give { event::PUSHED } else { event::POPPED };
                }
            }
            Instr::LoadSlot => {
                let word = self.slot(s, f.p, f.n);
                f.t = self.load(s, t, word);
            }
            Instr::HeldSlot => {
                let word = self.slot(s, f.p, f.n - 1);
                f.t = self.load(s, t, word);
            }
            Instr::HeldUnlock => {
                if !self.store(s, t, count_of(f.p), f.n - 1) {
                    return false;
                }
            }
            Instr::SharedPush => {
                s.drain(cpu);
                if s.pool >> f.v & 1 == 1 {
                    self.note(s, Flaw::ObjectTwice);
                }
                s.pool |= 1 << f.v;
            }
            Instr::LoadExpected => {
                if f.c != cpu as u8 && f.c != NO_CPU {
                    seen = event::MIGRATED;
                }
                f.e = if (f.c as usize) < ROWS { self.load(s, t, row) } else { DUMMY };
                goes_on = f.e != DUMMY || self.scenario.mutant == Mutant::ExpectDummy;
                f.c = 0;
                if !goes_on {
                    f.e = NOTHING;
                }
            }
            Instr::BarnEmpty | Instr::BarnFull => {
                let found = self.take_from_barn(s, t, line.instr == Instr::BarnEmpty);
                goes_on = found.is_some();
                f.s = found.unwrap_or(NOTHING);
            }
            Instr::PrivateFill => {
                let count = count_of(f.s);
                if !self.store(s, t, count + 1, f.v) || !self.store(s, t, count, 1) {
                    return false;
                }
            }
            Instr::PrivateTake => {
                let n = self.count(s, t, f.s).wrapping_sub(1);
                let word = self.slot(s, f.s, n);
                f.t = self.load(s, t, word);
                if !self.store(s, t, count_of(f.s), n & 15) {
                    return false;
                }
            }
            Instr::CmpXchg | Instr::PlainCompare | Instr::PlainStore => {
                if line.instr == Instr::CmpXchg {
                    s.drain(cpu);
                }
                if line.instr != Instr::PlainStore {
                    goes_on = self.load(s, t, row) == f.e;
                }
                if !goes_on {
                    f.e = NOTHING;
                    seen = event::EXCHANGE_LOST;
                } else if line.instr != Instr::PlainCompare {
                    if !self.store(s, t, row, f.s) {
                        return false;
                    }
                    if line.instr == Instr::CmpXchg {
                        s.drain(cpu);
                    }
                    (f.d, f.s, f.e) = (f.e, NOTHING, NOTHING);
                    seen = event::EXCHANGED;
                }
            }
            Instr::BarnPutOwn => {
                self.put_into_barn(s, t, f.s);
                f.s = NOTHING;
            }
            Instr::BarnPutOld => {
                self.put_into_barn(s, t, f.d);
                f.d = NOTHING;
            }
            Instr::Swap => {
                s.drain(cpu);
                f.d = s.mem[row];
                s.mem[row] = DUMMY;
                goes_on = f.d != DUMMY;
                if !goes_on {
                    seen = event::BUSY;
                }
            }
            Instr::FenceRow => {
                goes_on = branch == 0;
                if goes_on {
                    self.fence(s, t, f.c, &mut seen);
                }
            }
            Instr::FenceCpu(target) => self.fence(s, t, target, &mut seen),
            Instr::Recheck => {
                goes_on = self.load(s, t, row) == DUMMY;
                if !goes_on {
                    f.d = NOTHING;
                    seen = event::RECHECK_LOST;
                }
            }
            Instr::WaitBit => {
                let locked = self.count(s, t, f.d) & LOCK != 0;
                if locked != (branch == 1) {
                    return false;
                }
                goes_on = !locked;
                if locked {
                    seen = event::WAITED_FOR_BIT;
                }
            }
            Instr::OldCount => {
                f.n = self.count(s, t, f.d) & !LOCK;
                goes_on = f.n > 0;
            }
            Instr::OldSlot => {
                let word = self.slot(s, f.d, f.n - 1);
                f.t = self.load(s, t, word);
            }
            Instr::OldStore => {
                f.n -= 1;
                if !self.store(s, t, count_of(f.d), f.n) {
                    return false;
                }
                seen = event::TOOK_OBJECT;
            }
            Instr::RowEmpty | Instr::PutBack => {
                let value = if line.instr == Instr::RowEmpty { EMPTY0 } else { f.d };
                if !self.store(s, t, row, value) {
                    return false;
                }
                if line.instr == Instr::PutBack {
                    f.d = NOTHING;
                    seen = event::PUT_BACK;
                }
            }
            Instr::PutBackCas => {
                s.drain(cpu);
                if s.mem[row] == DUMMY {
                    s.mem[row] = f.d;
                    seen = event::PUT_BACK;
                } else {
                    seen = event::RECHECK_LOST;
                }
                f.d = NOTHING;
            }
            Instr::LockTakers | Instr::UnlockTakers => {
                let lock = line.instr == Instr::LockTakers;
                if lock && s.mem[TAKERS] == 1 {
                    return false;
                }
                s.drain(cpu);
                s.mem[TAKERS] = u8::from(lock);
            }
            Instr::Close | Instr::Reopen => {
                let value = if line.instr == Instr::Close { 0 } else { ROWS as u8 };
                if !self.store(s, t, NCPUS, value) {
                    return false;
                }
            }
            Instr::FullBarrier => s.drain(cpu),
            Instr::Snapshot => self.snapshot(s, t, &mut seen),
        }
        *events = seen;
        self.move_on(s, t, f, line, goes_on);
        true
    }

    /// The part of a step that is the thread's own business: hand, next line, forgotten registers.
    fn move_on(&self, s: &mut State, t: usize, mut f: Frame, line: Line, goes_on: bool) {
        if goes_on && line.flags & COMMIT != 0 {
            let closed = |other: &Thread| self.program.lines[other.now.pc as usize].flags & CLOSED != 0;
            if s.thr.iter().any(closed) {
                self.note(s, Flaw::CommitWhileClosed);
            }
        }
        match line.hand {
            Hand::Give if goes_on => {
                s.thr[t].hand &= !(1 << f.v);
                f.v = NOTHING;
            }
            Hand::Get if goes_on => {
                if f.t == NOTHING {
                    self.note(s, Flaw::PoppedNothing);
                } else if s.thr[t].hand >> f.t & 1 == 1 {
                    self.note(s, Flaw::ObjectTwice);
                }
                s.thr[t].hand |= 1 << f.t & !1;
                f.t = NOTHING;
            }
            _ => {}
        }
        // The loop of the taker: `OldStore` goes back while there is more.
        let jumps = !goes_on || line.instr == Instr::OldStore && f.n > 0;
        f.pc = if jumps { line.to } else { f.pc + 1 };
        if line.flags & SEQ != 0 && self.program.lines[f.pc as usize].flags & SEQ == 0 {
            s.thr[t].armed = false;
            if line.instr != Instr::StoreLocked || !goes_on {
                (f.c, f.p, f.n, f.t) = (0, NOTHING, 0, NOTHING);
            }
        }
        s.thr[t].now = f;
        if self.program.lines[f.pc as usize].instr == Instr::Finish {
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

    /// Fork copies the memory: no sequence may be half way, no store pending, no row a DUMMY.
    fn snapshot(&self, s: &mut State, forker: usize, seen: &mut u32) {
        *seen = event::SNAPSHOT;
        let others = |t: &usize| *t != forker;
        for t in (0..self.scenario.actors.len()).filter(others) {
            let Thread { now, saved, .. } = s.thr[t];
            if self.program.lines[now.pc as usize].flags & PAST != 0 {
                self.note(s, Flaw::SnapshotInFlight);
            }
            if [now.s, now.d, saved.s, saved.d].iter().any(|&p| p >= A) {
                *seen |= event::SNAPSHOT_MISSES_SHEAF;
            }
        }
        let settled = s.settled();
        for row in ROW..ROW + ROWS {
            let pointer = s.mem[row];
            if pointer == DUMMY {
                self.note(s, Flaw::SnapshotDummy);
            }
            if pointer >= A && settled[count_of(pointer)] & LOCK != 0 {
                self.note(s, Flaw::SnapshotLocked);
            }
            let sheaf = if pointer >= A { count_of(pointer)..count_of(pointer) + 3 } else { row..row + 1 };
            if settled[row] != pointer || settled[sheaf.clone()] != s.mem[sheaf] {
                self.note(s, Flaw::SnapshotInFlight);
            }
        }
    }
}
