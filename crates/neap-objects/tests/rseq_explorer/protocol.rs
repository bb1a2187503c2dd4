//! The per-CPU slot protocol as small programs: what each thread executes, one shared access a line.
//!
//! Sits between `model` (which gives a line its meaning) and the scenarios in `main` (which choose
//! the operations). Holds no state and takes no lock. Never describes real instruction encodings.
//!
//! The protocol in plain words. One table `row` has one pointer a CPU. It names the current sheaf
//! of that CPU, or EMPTY0 (nothing there, take the cold path), or DUMMY (a remote taker is at
//! work). EMPTY0 and DUMMY have capacity 0, so push and pop fail on them with no extra compare.
//! A word `ncpus` is the size of the table; 0 closes every fast path.
//!
//! Push: 1. arm (`rseq_cs` := descriptor). 2. START: read the CPU id. 3. Give up unless it is below
//! `ncpus`. 4. Load the row. 5. Load the count; give up unless it is below the capacity. 6. Store
//! the object into the slot. 7. COMMIT: store the count plus one; END follows at once. Pop is the
//! mirror: the slot is loaded, and the commit stores the count minus one.
//!
//! Exchange: 1-3 as above, 4. COMMIT: `lock cmpxchg row[cpu]` from the expected pointer to a sheaf
//! that the caller owns. It runs on the CPU whose row it changes, so whoever else was inside a
//! sequence on that CPU has been aborted, and the old sheaf is the caller's alone. Nobody ever
//! expects DUMMY.
//!
//! Take, from anywhere: 1. swap the row for DUMMY; if DUMMY was there, go away and touch nothing.
//! 2. Fence that CPU: its stores become visible and a sequence that runs there is aborted. 3. The
//! old sheaf is the taker's: empty it. 4. Store EMPTY0 in the row. If the fence failed, store the
//! old pointer back instead, having touched nothing.
//!
//! Fork: 1. take the takers' mutex. 2. Store 0 in `ncpus`, full barrier. 3. Fence every CPU. 4. Now
//! no sequence can commit: the memory may be copied. 5. Store `ncpus`, release the mutex.
//!
//! Cold push: remember what the row holds, take an empty sheaf from the barn, put the object into
//! it, exchange; put whichever sheaf is then the caller's into the barn. Cold pop is the mirror.

/// One way to build the protocol wrong (or, where a comment says so, merely otherwise).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mutant {
    None,
    /// The taker never fences.
    NoFence,
    /// The taker uses a barrier that drains the other CPU's stores but aborts nothing there.
    FenceWithoutAbort,
    /// The taker aborts what runs on the other CPU but leaves the stores in its buffer.
    FenceWithoutDrain,
    /// The taker fences, then swaps.
    FenceBeforeSwap,
    /// The taker reads the count of the old sheaf before the fence and uses it after.
    ReadBeforeFence,
    /// The taker empties the sheaf before the fence, and puts it back when the fence fails.
    PutBackAfterTouch,
    /// The taker treats DUMMY like any sheaf that it found.
    IgnoreDummy,
    /// The taker that found DUMMY stores it "back".
    PutBackDummy,
    /// Not wrong: the taker gives the row back before it empties the sheaf.
    ReleaseFirst,
    /// The sequences never store `rseq_cs`, so the kernel aborts nothing.
    NoArm,
    /// One instruction lies between the store to `rseq_cs` and START.
    GapAfterArm,
    /// Nobody compares the CPU id with `ncpus`.
    NoCpuCheck,
    /// Push stores the count first and the slot last.
    CountBeforeSlot,
    /// Exchange is load, compare, plain store as the commit.
    PlainExchange,
    /// As `PlainExchange`, but a taker looks after the fence whether its DUMMY is still there, and
    /// puts back by compare-and-swap. Right or wrong depending on the number of takers.
    PlainExchangeRecheck,
    /// The cold path may expect DUMMY.
    ExpectDummy,
    /// Exchange is a compare-and-swap outside any sequence.
    CasOutsideSequence,
    /// The taker ignores the owner's lock bit instead of waiting for it.
    NoWaitForBit,
    /// Fork closes the table but does not fence.
    ForkNoFence,
    /// Fork fences first and closes the table after.
    ForkFenceFirst,
    /// Fork does not take the takers' mutex.
    ForkNoMutex,
}

/// What a thread does next. An object number of 0 means: the lowest object that it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// The fast path; on failure the object goes to the shared pool.
    Push(u8),
    Pop,
    /// The fast path; on failure the cold path with the barn and an exchange.
    ColdPush(u8),
    ColdPop,
    /// Lock the slot of this CPU by the bit, pop by ordinary steps, unlock.
    LockedPop,
    /// Empty the sheaf of this CPU from afar.
    Take(u8),
    /// The same under the takers' mutex.
    TakeLocked(u8),
    Fork,
}

/// One step. Registers: `c` CPU, `p` sheaf of the row, `n` count, `t` loaded object, `v` object to
/// push, `e` expected pointer, `s` sheaf of one's own, `d` sheaf taken out of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Instr {
    Finish,
    Arm,
    Gap,
    /// Take the branch, or do not: both are explored.
    Choice,
    ReadCpu,
    CheckCpu,
    LoadRow,
    CountForPush,
    CountForPop,
    CountForLock,
    StoreSlot,
    StoreCountUp,
    LoadSlot,
    StoreCountDown,
    StoreLocked,
    HeldSlot,
    HeldUnlock,
    SharedPush,
    LoadExpected,
    BarnEmpty,
    BarnFull,
    PrivateFill,
    PrivateTake,
    CmpXchg,
    PlainCompare,
    PlainStore,
    BarnPutOwn,
    BarnPutOld,
    Swap,
    FenceRow,
    Recheck,
    WaitBit,
    OldCount,
    OldSlot,
    OldStore,
    RowEmpty,
    PutBack,
    PutBackCas,
    LockTakers,
    UnlockTakers,
    Close,
    FullBarrier,
    FenceCpu(u8),
    Snapshot,
    Reopen,
}

/// Inside `[START, END)`: an interruption of an armed thread here aborts.
pub const SEQ: u8 = 1;
/// Past the check of `ncpus`: a sequence in flight, as far as fork is concerned.
pub const PAST: u8 = 2;
/// This line's store is the commit.
pub const COMMIT: u8 = 4;
/// The row holds this thread's DUMMY.
pub const DETACHED: u8 = 8;
/// The fence succeeded: the taken sheaf is the taker's.
pub const FENCED: u8 = 16;
/// The table is closed and fenced: no commit may happen.
pub const CLOSED: u8 = 32;

/// What the line does to the object in the thread's hand, besides its memory access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hand {
    Same,
    /// `v` leaves the hand.
    Give,
    /// `t` comes into the hand.
    Get,
}

#[derive(Clone, Copy, Debug)]
pub struct Line {
    pub instr: Instr,
    /// Where a failing check, a lost race or a `Choice` goes.
    pub to: u8,
    /// Where the kernel sends an aborted sequence.
    pub abort: u8,
    pub flags: u8,
    pub hand: Hand,
    pub text: &'static str,
}

pub struct Program {
    pub lines: Vec<Line>,
    entries: [u8; 8],
}

/// A place that lines can jump to before it is known where it is.
#[derive(Clone, Copy)]
struct Label(usize);

struct Assembler {
    lines: Vec<Line>,
    labels: Vec<u8>,
    flags: u8,
    abort: Label,
    mutant: Mutant,
    lock_bit: bool,
}

impl Assembler {
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
        self.lines.push(Line { instr, to: to.0 as u8, abort, flags, hand: Hand::Same, text });
        self.lines.last_mut().expect("just pushed")
    }

    fn line(&mut self, instr: Instr, text: &'static str) -> &mut Line {
        let nowhere = Label(0);
        self.jump(instr, nowhere, text)
    }

    fn finish(&mut self) {
        self.flags = 0;
        self.line(Instr::Finish, "end of the operation");
    }

    /// Arm, START, CPU id, check: how every sequence begins. The caller clears the flags at END.
    fn begin_sequence(&mut self, abort: Label, fail: Label) {
        self.abort = abort;
        if self.mutant != Mutant::NoArm {
            self.line(Instr::Arm, "arm: rseq_cs := descriptor");
        }
        if self.mutant == Mutant::GapAfterArm {
            self.line(Instr::Gap, "an instruction before START");
        }
        self.flags = SEQ;
        self.read_cpu_and_check(fail);
    }

    fn read_cpu_and_check(&mut self, fail: Label) {
        self.line(Instr::ReadCpu, "START: c := cpu id");
        if self.mutant != Mutant::NoCpuCheck {
            self.jump(Instr::CheckCpu, fail, "give up unless c < ncpus");
        }
        self.flags |= PAST;
    }

    /// A push or a pop by the fast path, then `cold` or the shared pool.
    fn fast(&mut self, push: bool, cold: bool) -> u8 {
        let [start, fail, aborted, done] = [(); 4].map(|()| self.label());
        self.here(start);
        self.begin_sequence(aborted, fail);
        self.line(Instr::LoadRow, "p := row[c]");
        if push {
            self.jump(Instr::CountForPush, fail, "n := p.count; give up unless n < capacity");
            if self.mutant == Mutant::CountBeforeSlot {
                self.line(Instr::StoreCountUp, "p.count := n + 1, before the slot");
                let last = self.line(Instr::StoreSlot, "p.slots[n] := v, last");
                (last.hand, last.flags) = (Hand::Give, SEQ | PAST | COMMIT);
            } else {
                self.line(Instr::StoreSlot, "p.slots[n] := v");
                let last = self.line(Instr::StoreCountUp, "COMMIT: p.count := n + 1");
                (last.hand, last.flags) = (Hand::Give, SEQ | PAST | COMMIT);
            }
        } else {
            self.jump(Instr::CountForPop, fail, "n := p.count - 1; give up unless n < capacity");
            self.line(Instr::LoadSlot, "t := p.slots[n]");
            let last = self.line(Instr::StoreCountDown, "COMMIT: p.count := n");
            (last.hand, last.flags) = (Hand::Get, SEQ | PAST | COMMIT);
        }
        self.flags = 0;
        self.finish();
        let entry = self.labels[start.0];
        self.here(aborted);
        self.jump(Instr::Choice, start, "aborted: try again, or go the slow way");
        self.here(fail);
        if cold {
            self.cold(push);
        } else if push {
            self.line(Instr::SharedPush, "v goes to the shared pool").hand = Hand::Give;
        }
        self.here(done);
        self.finish();
        entry
    }

    fn cold(&mut self, push: bool) {
        let [shared, again, lost, aborted] = [(); 4].map(|()| self.label());
        self.line(Instr::ReadCpu, "cold: c := cpu id, a hint");
        self.jump(Instr::LoadExpected, shared, "e := row[c]; shared path if DUMMY");
        if push {
            self.jump(Instr::BarnEmpty, shared, "s := an empty sheaf of the barn");
            self.line(Instr::PrivateFill, "s.slots[0] := v; s.count := 1").hand = Hand::Give;
        } else {
            self.jump(Instr::BarnFull, shared, "s := a filled sheaf of the barn");
            self.line(Instr::PrivateTake, "take t from s").hand = Hand::Get;
        }
        self.here(again);
        if self.mutant == Mutant::CasOutsideSequence {
            self.read_cpu_and_check(lost);
            self.flags = 0;
            self.jump(Instr::CmpXchg, lost, "cmpxchg row[c]: e -> s, outside any sequence");
        } else {
            self.begin_sequence(aborted, lost);
            match self.mutant {
                Mutant::PlainExchange | Mutant::PlainExchangeRecheck => {
                    self.jump(Instr::PlainCompare, lost, "give up unless row[c] = e");
                    self.line(Instr::PlainStore, "COMMIT: row[c] := s, a plain store").flags |= COMMIT;
                }
                _ => self.jump(Instr::CmpXchg, lost, "COMMIT: lock cmpxchg row[c]: e -> s").flags |= COMMIT,
            }
        }
        self.flags = 0;
        self.line(Instr::BarnPutOld, "the old sheaf goes to the barn");
        self.finish();
        self.here(aborted);
        self.jump(Instr::Choice, again, "aborted: exchange again, or give up");
        self.here(lost);
        self.line(Instr::BarnPutOwn, "exchange failed: s goes to the barn, whole");
        self.finish();
        self.here(shared);
        if push {
            self.line(Instr::SharedPush, "v goes to the shared pool").hand = Hand::Give;
        }
    }

    fn locked_pop(&mut self) -> u8 {
        let [start, fail, aborted] = [(); 3].map(|()| self.label());
        self.here(start);
        self.begin_sequence(aborted, fail);
        self.line(Instr::LoadRow, "p := row[c]");
        self.jump(Instr::CountForLock, fail, "n := p.count; give up if locked or empty");
        self.line(Instr::StoreLocked, "COMMIT: p.count := n with the lock bit").flags |= COMMIT;
        self.flags = 0;
        self.line(Instr::HeldSlot, "holding the lock: t := p.slots[n - 1]");
        self.line(Instr::HeldUnlock, "unlock: p.count := n - 1").hand = Hand::Get;
        self.finish();
        self.here(aborted);
        self.jump(Instr::Choice, start, "aborted: try again, or give up");
        self.here(fail);
        self.finish();
        self.labels[start.0]
    }

    fn take(&mut self, locked: bool) -> u8 {
        use Mutant as M;
        let m = self.mutant;
        let entry = self.lines.len() as u8;
        let [skip, leave, next, emptied] = [(); 4].map(|()| self.label());
        if locked {
            self.line(Instr::LockTakers, "lock the takers' mutex");
        }
        if m == M::FenceBeforeSwap {
            self.jump(Instr::FenceRow, leave, "fence(c), too early");
        }
        let busy = match m {
            M::IgnoreDummy => next,
            M::PutBackDummy => skip,
            _ => leave,
        };
        self.jump(Instr::Swap, busy, "d := xchg(row[c], DUMMY); busy if it was DUMMY");
        self.here(next);
        self.flags = DETACHED;
        if m == M::ReadBeforeFence {
            self.jump(Instr::OldCount, emptied, "n := d.count, before the fence");
        }
        if m == M::PutBackAfterTouch {
            self.empty_old(emptied);
            self.here(emptied);
        }
        if m != M::NoFence && m != M::FenceBeforeSwap {
            self.jump(Instr::FenceRow, skip, "fence(c)");
        }
        self.flags |= FENCED;
        if m == M::PlainExchangeRecheck {
            self.jump(Instr::Recheck, leave, "lost unless row[c] is still DUMMY");
        }
        if self.lock_bit && m != M::NoWaitForBit {
            self.jump(Instr::WaitBit, skip, "wait until d.count has no lock bit; bounded");
        }
        if m == M::ReleaseFirst {
            self.line(Instr::RowEmpty, "row[c] := EMPTY0");
            self.flags = FENCED;
        }
        if m != M::PutBackAfterTouch {
            self.empty_old(emptied);
            self.here(emptied);
        }
        if m != M::ReleaseFirst {
            self.line(Instr::RowEmpty, "row[c] := EMPTY0");
        }
        self.flags = FENCED;
        self.line(Instr::BarnPutOld, "the emptied sheaf goes to the barn");
        if locked {
            self.line(Instr::UnlockTakers, "unlock the takers' mutex");
        }
        self.finish();
        self.here(skip);
        self.flags = DETACHED;
        if m == M::PlainExchangeRecheck {
            self.line(Instr::PutBackCas, "skipped: row[c] := d if it is still DUMMY");
        } else {
            self.line(Instr::PutBack, "skipped: row[c] := d");
        }
        self.flags = 0;
        self.here(leave);
        if locked {
            self.line(Instr::UnlockTakers, "unlock the takers' mutex");
        }
        self.finish();
        entry
    }

    fn empty_old(&mut self, emptied: Label) {
        let more = self.label();
        if self.mutant != Mutant::ReadBeforeFence {
            self.jump(Instr::OldCount, emptied, "n := d.count");
        }
        self.here(more);
        self.line(Instr::OldSlot, "t := d.slots[n - 1]");
        self.jump(Instr::OldStore, more, "n := n - 1; d.count := n").hand = Hand::Get;
    }

    fn fork(&mut self) -> u8 {
        let entry = self.lines.len() as u8;
        let m = self.mutant;
        if m != Mutant::ForkNoMutex {
            self.line(Instr::LockTakers, "fork: lock the takers' mutex");
        }
        if m == Mutant::ForkFenceFirst {
            self.line(Instr::FenceCpu(0), "fork: fence CPU 0, too early");
            self.line(Instr::FenceCpu(1), "fork: fence CPU 1, too early");
        }
        self.line(Instr::Close, "fork: ncpus := 0");
        self.line(Instr::FullBarrier, "fork: full barrier");
        if m != Mutant::ForkFenceFirst && m != Mutant::ForkNoFence {
            self.line(Instr::FenceCpu(0), "fork: fence CPU 0");
            self.line(Instr::FenceCpu(1), "fork: fence CPU 1");
        }
        self.flags = CLOSED;
        self.line(Instr::Snapshot, "fork: copy the memory");
        self.line(Instr::Reopen, "fork: ncpus := 2");
        self.flags = 0;
        if m != Mutant::ForkNoMutex {
            self.line(Instr::UnlockTakers, "fork: unlock the takers' mutex");
        }
        self.finish();
        entry
    }
}

impl Program {
    /// `lock_bit` says whether anybody uses `LockedPop`, so that takers must wait for the bit.
    pub fn new(mutant: Mutant, lock_bit: bool) -> Program {
        let mut asm = Assembler { lines: Vec::new(), labels: vec![0], flags: 0, abort: Label(0), mutant, lock_bit };
        // Line 0 is never executed: a saved frame with pc 0 means "not in a signal handler".
        asm.finish();
        let entries = [
            asm.fast(true, false),
            asm.fast(false, false),
            asm.fast(true, true),
            asm.fast(false, true),
            asm.locked_pop(),
            asm.take(false),
            asm.take(true),
            asm.fork(),
        ];
        let Assembler { mut lines, labels, .. } = asm;
        for line in &mut lines {
            line.to = labels[line.to as usize];
            line.abort = labels[line.abort as usize];
        }
        Program { lines, entries }
    }

    pub fn entry(&self, op: Op) -> u8 {
        let index = match op {
            Op::Push(_) => 0,
            Op::Pop => 1,
            Op::ColdPush(_) => 2,
            Op::ColdPop => 3,
            Op::LockedPop => 4,
            Op::Take(_) => 5,
            Op::TakeLocked(_) => 6,
            Op::Fork => 7,
        };
        self.entries[index]
    }
}
