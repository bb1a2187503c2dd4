//! The invariant of a state: every object and every region is in exactly one place.
//!
//! Reads a state and changes nothing. The way to a state does not matter, except for the flaw that
//! a step has noted.
//!
//! The memory is judged as it will be when all buffers have drained, so an object is in a stack
//! from the moment its commit is executed. In every state:
//! 1. Each object is once in: a cell below the count of a stack of its class, a thread's hand, a
//!    thread's private memory where that counts, the barn. The stacks are those of the regions in
//!    the rows, of those that fork has, and of the region that a taker has. Of the taker's only the
//!    wanted classes count once the spare region is in the row.
//! 2. Each region is once in: a row, the registers of fork or of a taker, the word for the spare
//!    region.
//! 3. No count is above its capacity and no capacity above what there is.
//! 4. The spare region is all zeroes unless a taker is at work on it; the closed region always is.
//! 5. A row leads to the closed region only while some taker, or fork, is between its swap and its
//!    next store to the row.
//! 6. No sequence has stored into a region that is neither in its CPU's row nor just swapped out
//!    with the fence still to come; none has committed between fork's fence and its reopening.
//!
//! With readers none of this holds. There no thread looks at a freed object, and in the end the
//! counts are even. With charges, 6 holds, the closed region is not written to, and in the end the
//! charges are the bytes stocked and in hands.
//!
//! "At rest" 1 to 5 are judged only where all threads have finished and all buffers are empty: a
//! violation there is real damage that stays. Popped rubbish, an object received twice and a torn
//! snapshot are damage at once and count in both modes.

use crate::model::*;
use crate::protocol::*;
use crate::steps::Machine;

pub fn region_name(pointer: u8) -> &'static str {
    ["nothing", "CLOSED_REGION", "A", "B", "C", "D"].get(pointer as usize).copied().unwrap_or("?")
}

impl Machine {
    pub fn at_rest(&self, s: &State) -> bool {
        (0..self.scenario.actors.len()).all(|t| self.done(s, t)) && s.buf.iter().all(|buffer| buffer[0] == 0)
    }

    /// Describes the fault of a state, if it has one.
    pub fn judge(&self, s: &State) -> Option<String> {
        let text = match s.flaw {
            Flaw::None if self.scenario.at_rest && !self.at_rest(s) => return None,
            Flaw::None if self.scenario.reads() => return self.judge_counts(s),
            Flaw::None if self.scenario.stocks() => return self.judge_stocks(s),
            Flaw::None => {
                let mem = s.settled();
                return self.judge_objects(s, &mem).or_else(|| self.judge_regions(s, &mem));
            }
            Flaw::ForeignStore => "a sequence stored into a region that was not its CPU's any more",
            Flaw::CommitWhileClosed => "a sequence committed while fork had the rows closed",
            Flaw::PoppedNothing => "what was popped is no object",
            Flaw::ObjectTwice => "an object came to where it was already",
            Flaw::UsedFreed => "a reader looked at an object that was freed",
            Flaw::OutOfBounds => "a cell outside the stack was used",
            Flaw::SnapshotInFlight => "the copied memory had a sequence or a store in flight",
            Flaw::SnapshotLocked => "the copied memory had a locked mutex: no thread of the child unlocks it",
            Flaw::SnapshotClosed => "the row that fork closed was closed already: no thread would ever undo that",
            Flaw::SnapshotLoses => {
                "the copied memory had objects that only another thread knew of: the child loses them"
            }
        };
        Some(text.to_string())
    }

    /// In the end as many readers of each phase have left as entered.
    fn judge_counts(&self, s: &State) -> Option<String> {
        let sum = |side, phase| (0..PLACES).map(|place| s.mem[word_of(side, place, phase)]).sum::<u8>();
        let uneven = |&phase: &u8| sum(Side::Entered, phase) != sum(Side::Left, phase);
        let phase = if self.at_rest(s) { (0..2).find(uneven) } else { None };
        phase.map(|phase| format!("no thread reads, but the counts of phase {phase} differ"))
    }

    /// The closed region is not written to. In the end each payer is charged for the bytes stocked
    /// for it and those that threads have.
    fn judge_stocks(&self, s: &State) -> Option<String> {
        let mem = s.settled();
        if mem[stock_of(CLOSED_REGION)] != self.initial().mem[stock_of(CLOSED_REGION)] {
            return Some("CLOSED_REGION was written to".to_string());
        }
        let has = |payer: u8| {
            let words = (A..C).map(|region| mem[stock_of(region)]).filter(|word| word >> 2 == payer + 1);
            words.map(|word| word & 3).sum::<u8>() + s.thr.iter().map(|t| t.hand >> (payer + 1) & 1).sum::<u8>()
        };
        let uneven = |&payer: &u8| mem[CHARGED + payer as usize] != has(payer);
        let payer = if self.at_rest(s) { (0..PAYERS).find(uneven) } else { None }?;
        Some(format!("payer {payer} is charged for {} and has {}", mem[CHARGED + payer as usize], has(payer)))
    }

    /// The threads at lines with `flag`, which hold a region, with their frames.
    fn takers<'a>(&'a self, s: &'a State, flag: u8) -> impl Iterator<Item = (usize, Frame)> + 'a {
        let holds = move |(_, t): &(usize, &Thread)| self.program.lines[t.now.pc as usize].flags & flag != 0;
        s.thr.iter().enumerate().filter(holds).map(|(index, t)| (index, t.now))
    }

    fn judge_regions(&self, s: &State, mem: &[u8; WORDS]) -> Option<String> {
        // A mutant that breaks the rule itself must be found at rest by the consequences.
        let kept = |rule: Mutant| !(self.scenario.at_rest && self.scenario.mutant == rule);
        for row in 0..if self.scenario.one_region { 1 } else { ROWS } {
            let taking = self.takers(s, DETACHED).any(|(_, f)| f.c as usize == row);
            let forking = self.takers(s, SHUT).any(|(_, f)| [f.d, f.s][row] != NOTHING);
            if mem[ROW + row] == CLOSED_REGION && !taking && !forking {
                return Some(format!("row[{row}] is CLOSED_REGION and neither a taker nor fork is at work"));
            }
        }
        let spares: Vec<usize> = (SPARE..SPARE + self.spares()).collect();
        // If the spare region has become a row's, the word still names it.
        let stale = |&word: &usize| self.takers(s, PUBLISHED).any(|(t, _)| self.spare_of(t) == word);
        for region in A..C + self.spares() as u8 {
            let rows = mem[ROW..ROW + ROWS].iter().filter(|&&row| row == region).count();
            let taken = self.takers(s, DETACHED | PUBLISHED | SHUT).filter(|(_, f)| f.d == region).count()
                + self.takers(s, SHUT).filter(|(_, f)| f.s == region).count();
            let spare = spares.iter().filter(|word| mem[**word] == region && !stale(word)).count();
            let expected = usize::from(!self.scenario.one_region || region != B);
            if rows + taken + spare != expected {
                return Some(format!("region {} is in {} places", region_name(region), rows + taken + spare));
            }
            let idle = s.frames().all(|f| f.s != region);
            let zero = |class| mem[count_of(region, class)..][..2] == [0, 0];
            if spare == 1 && idle && kept(Mutant::SpareNotZeroed) && !(0..self.scenario.classes()).all(zero) {
                return Some(format!("the spare region {} is not all zeroes", region_name(region)));
            }
        }
        let touched = mem[REGION..REGION + STRIDE].iter().any(|&word| word != 0);
        (touched && kept(Mutant::CapacityOnClosed)).then(|| "CLOSED_REGION was written to".to_string())
    }

    fn judge_objects(&self, s: &State, mem: &[u8; WORDS]) -> Option<String> {
        let mut places = [0_u8; 8];
        let rows = (ROW..ROW + ROWS).map(|row| (mem[row], 0xff)).filter(|&(region, _)| region != CLOSED_REGION);
        let detached = self.takers(s, DETACHED).map(|(_, f)| (f.d, 0xff));
        let shut =
            self.takers(s, SHUT).flat_map(|(_, f)| [(f.d, 0xff), (f.s, 0xff)]).filter(|&(region, _)| region >= A);
        let published = self.takers(s, PUBLISHED).map(|(t, f)| (f.d, self.wanted(s, t)));
        for (region, classes) in rows.chain(detached).chain(published).chain(shut) {
            for class in (0..self.scenario.classes()).filter(|class| classes >> class & 1 == 1) {
                let name = format!("{}.{class}", region_name(region));
                let [count, capacity] = [0, 1].map(|word| mem[count_of(region, class) + word]);
                if count > capacity || capacity > self.scenario.capacity {
                    return Some(format!("stack {name} has count {count} and capacity {capacity}"));
                }
                for &object in &mem[count_of(region, class) + 2..][..count as usize] {
                    if object == NOTHING || self.scenario.class_of(object) != class {
                        return Some(format!("a cell of {name} below the count holds no object of the class"));
                    }
                    places[object as usize & 7] += 1;
                }
            }
        }
        for f in s.frames() {
            f.b[..f.m as usize].iter().for_each(|&object| places[object as usize & 7] += 1);
        }
        for mask in s.thr.iter().map(|t| t.hand).chain([s.barn]) {
            for (object, places) in places.iter_mut().enumerate() {
                *places += mask >> object & 1;
            }
        }
        for (object, &places) in places.iter().enumerate().skip(1) {
            if places != u8::from(self.exists(object as u8)) {
                return Some(format!("object {object} is in {places} places"));
            }
        }
        None
    }

    /// The classes that a taker wants, as a mask.
    fn wanted(&self, s: &State, t: usize) -> u8 {
        match self.scenario.actors[t].ops[s.thr[t].op as usize] {
            Op::Take(_, wanted) => wanted,
            _ => 0,
        }
    }

    fn exists(&self, object: u8) -> bool {
        let pushes = |op: &Op| matches!(*op, Op::Push(v) | Op::SlowPush(v) if v == object);
        self.scenario.stacks.iter().flatten().flatten().any(|&v| v == object)
            || self.scenario.barn >> object & 1 == 1
            || self.scenario.actors.iter().any(|a| a.ops.iter().chain(&a.handler).any(pushes))
    }
}
