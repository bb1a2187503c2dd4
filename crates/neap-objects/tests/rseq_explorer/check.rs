//! What must hold in a state: every object and every sheaf is in exactly one place.
//!
//! Sits between `execute` and `search`. Reads a state, changes nothing, locks nothing. Never looks at
//! how a state was reached, except for the flaw that a step has noted.
//!
//! The memory is judged as it will be when all buffers have drained, so an object is in a sheaf from
//! the moment its commit is executed. In every state:
//! 1. Each object is once in: a slot below the count of a sheaf, a thread's hand, the pool.
//! 2. Each sheaf is once in: a row, the barn, a thread's registers `s` or `d`.
//! 3. A row is DUMMY only while some taker is between its swap and its store to the row.
//! 4. No sequence has stored into a sheaf that is neither in its CPU's row nor just swapped out
//!    with the fence still to come; none has committed between fork's fence and its reopening.
//!
//! "At rest" 1 to 3 are judged only where all threads have finished and all buffers are empty: a
//! violation there is real damage that stays. Popped rubbish, an object received twice and a torn
//! snapshot are damage at once and count in both modes.

use crate::model::*;
use crate::protocol::*;
use crate::steps::Machine;

pub fn pointer_name(pointer: u8) -> &'static str {
    ["nothing", "EMPTY0", "DUMMY", "A", "B", "C", "D"].get(pointer as usize).copied().unwrap_or("?")
}

impl Machine {
    pub fn at_rest(&self, s: &State) -> bool {
        (0..self.scenario.actors.len()).all(|t| self.done(s, t)) && s.buf.iter().all(|buffer| buffer[0] == 0)
    }

    /// Says what is wrong with a state, if anything is.
    pub fn judge(&self, s: &State) -> Option<String> {
        let text = match s.flaw {
            Flaw::None => return self.judge_places(s),
            Flaw::ForeignStore => "a sequence stored into a sheaf that was not its CPU's any more",
            Flaw::CommitWhileClosed => "a sequence committed while fork had the table closed",
            Flaw::PoppedNothing => "a pop returned what is no object",
            Flaw::ObjectTwice => "a thread received an object that was there already",
            Flaw::SheafTwice => "a sheaf was put into the barn twice",
            Flaw::OutOfBounds => "a slot outside the sheaf was used",
            Flaw::SnapshotInFlight => "the copied memory had a sequence or a store in flight",
            Flaw::SnapshotLocked => "the copied memory had a locked slot: nobody in the child unlocks it",
            Flaw::SnapshotDummy => "the copied memory had DUMMY in a row: the child could never use it",
        };
        Some(text.to_string())
    }

    fn judge_places(&self, s: &State) -> Option<String> {
        if self.scenario.at_rest && !self.at_rest(s) {
            return None;
        }
        let mem = s.settled();
        for row in 0..ROWS {
            let taking = |f: &Frame| self.program.lines[f.pc as usize].flags & DETACHED != 0 && f.c as usize == row;
            if mem[ROW + row] == DUMMY && !s.thr.iter().any(|t| taking(&t.now) || taking(&t.saved)) {
                return Some(format!("row[{row}] is DUMMY and no taker is at work"));
            }
        }
        let mut objects = [0_u8; 8];
        for sheaf in 0..self.scenario.sheaves.len() {
            let pointer = A + sheaf as u8;
            let count = count_of(pointer);
            let full = mem[count] & !LOCK;
            if full > CAPACITY {
                return Some(format!("sheaf {} has count {full}", pointer_name(pointer)));
            }
            for slot in 0..full as usize {
                objects[mem[count + 1 + slot] as usize & 7] += 1;
            }
            let held = |t: &Thread| {
                let holds =
                    |f: &Frame| usize::from(f.s == pointer) + usize::from(f.d == pointer && self.decided(f, &mem));
                holds(&t.now) + holds(&t.saved)
            };
            let rows = mem[ROW..ROW + ROWS].iter().filter(|&&row| row == pointer).count();
            let places = rows + usize::from(s.barn >> sheaf & 1) + s.thr.iter().map(held).sum::<usize>();
            if places != 1 {
                return Some(format!("sheaf {} is in {places} places", pointer_name(pointer)));
            }
        }
        for mask in s.thr.iter().map(|t| t.hand).chain([s.pool]) {
            for (object, places) in objects.iter_mut().enumerate() {
                *places += mask >> object & 1;
            }
        }
        if objects[0] != 0 {
            return Some("a slot below the count holds no object".to_string());
        }
        for (object, &places) in objects.iter().enumerate().skip(1) {
            if places != u8::from(self.exists(object as u8)) {
                return Some(format!("object {object} is in {places} places"));
            }
        }
        None
    }

    /// Whether what a taker has in `d` counts as taken. It always does, except in the variant where an
    /// exchange may overwrite DUMMY and the taker finds out later.
    fn decided(&self, f: &Frame, settled: &[u8; 16]) -> bool {
        let open =
            matches!(self.program.lines[f.pc as usize].instr, Instr::FenceRow | Instr::Recheck | Instr::PutBackCas);
        let overwritten = settled[ROW + (f.c as usize).min(ROWS - 1)] != DUMMY;
        !(self.scenario.mutant == Mutant::PlainExchangeRecheck && open && overwritten)
    }

    fn exists(&self, object: u8) -> bool {
        let pushes = |op: &Op| matches!(*op, Op::Push(v) | Op::ColdPush(v) if v == object);
        self.scenario.sheaves.iter().flatten().any(|&v| v == object)
            || self.scenario.actors.iter().any(|a| a.ops.iter().chain(&a.handler).any(pushes))
    }
}
