//! The per-CPU slot protocol as small programs: the lines of each thread, one shared access a line.
//!
//! `model` gives a line its meaning, and the scenarios in `main` choose the operations. Real
//! instruction encodings are left out.
//!
//! # Slots
//!
//! A *region* has one stack per size class: a count, a capacity, and the cells. The real stacks are
//! pointers to cells: head, bottom and end. Bottom never changes; head and end change where count
//! and capacity do here. A real pop learns from the null below the lowest cell that the count is 0.
//!
//! A table `row` has one pointer a CPU, to that CPU's region. The closed region is never written
//! to. It has no room and no objects, so its stacks refuse everything. The table also has the
//! closed region for the ids of unregistered threads and for CPUs that came late, so no sequence
//! compares the CPU id with anything. A stack of capacity 0 refuses everything, too: it has not
//! been used, or not since it was taken.
//!
//! Push:
//! 1. Arm (`rseq_cs` := descriptor).
//! 2. START: read the CPU id.
//! 3. Load the row.
//! 4. Load the count.
//! 5. Refused if it is the capacity.
//! 6. Store the object into the cell.
//! 7. COMMIT: store the count plus one. END follows at once.
//!
//! Pop is the mirror image: refused if the count is 0; it loads the cell, and the commit stores the
//! count minus one. malloc reads the object's state before that and is refused too if the object is
//! charged. That only reads, so it has no line here. Push and pop of many copy several cells from
//! and to private memory before the one commit, all or none. Copies in private memory of an aborted
//! pop mean nothing.
//!
//! Set capacity: 1 to 3 as above. 4. Refused if the region is the closed region, which has a mark
//! for that. 5. COMMIT: store the capacity. It checks for the closed region itself, because it
//! checks nothing else.
//!
//! Refused push: pop half a stack into the barn. If that is refused, too, the stack has no room, so
//! set its capacity. Push again; if that is refused, the object goes to the barn. Refused pop: take
//! objects from the barn, keep one, push the others. If that is refused, set the capacity and push
//! them again; if that is refused, they go back. A bound sheaf is several such pushes with
//! different objects, which come from registers. An aborted sequence may be tried again or counts
//! as refused.
//!
//! Take, from any thread:
//! 1. Lock the takers' mutex; a spare region, all zeroes, comes with it.
//! 2. Swap the row for the closed region.
//! 3. Fence that CPU: its stores become visible, and a sequence that runs there is aborted.
//! 4. The old region is the taker's: copy the stacks that are not wanted to the spare one.
//! 5. Store the spare region in the row.
//! 6. Move the wanted objects to the barn and make the old region all zeroes: it is the next spare.
//! 7. Unlock.
//!
//! If the fence failed, the taker stores the old pointer back and has read and touched nothing.
//!
//! # Gate and fork
//!
//! Slow paths and takes pass a gate: 1. Count in. 2. If the gate is closed, count out, wait, start
//! again. 3. Count out in the end.
//!
//! Fork:
//! 1. Close the gate, full barrier.
//! 2. Wait until no thread is inside.
//! 3. Swap every row for the closed region.
//! 4. Fence every CPU.
//! 5. Now no sequence can commit: the memory may be copied.
//! 6. Store the rows again, open the gate.
//!
//! The real code knows a row's pointer from the lock of its CPU. Here the swap returns it, to
//! takers and to fork.
//!
//! # RCU (`neap-base/src/rcu.rs`)
//!
//! Read:
//! 1. Load the phase.
//! 2. By a sequence, add one to this CPU's word of readers that entered in that phase. A CPU that
//!    is isolated or unknown has no words, so the sequence is refused. Then add one to a word for
//!    such readers by a locked instruction.
//! 3. Load the object's number, look at the object.
//! 4. Count one reader that left, in the same way, on the CPU of that moment.
//!
//! Retire:
//! 1. Store another number.
//! 2. Take up the previous object (a locked instruction).
//! 3. Fence every CPU that has words; if that fails nothing is freed.
//! 4. Add up the readers that left in a phase, then those that entered. If the sums are equal, the
//!    phase was seen without readers.
//! 5. If one phase was, store its number as the phase, and look at the other.
//! 6. If both were, free the object.
//!
//! # Stocks (`neap-groups/src/stock.rs`)
//!
//! A region has one word: the payer, and the bytes stocked for it. The closed region's word is
//! above every number under every payer.
//!
//! Charge: a sequence, 1 to 3 as above. 4. Load the word. 5. Refused unless it is of this payer and
//! has some. 6. COMMIT: store it with less. Refused: add to the payer's counter by a locked
//! instruction. Uncharge is the mirror image.
//!
//! Stock:
//! 1. Add to the counter.
//! 2. Look at the word of this CPU, a hint.
//! 3. By a sequence, if the word still is that, store the new one.
//! 4. Subtract from the counter of another payer what the word held for it; or, if refused, what
//!    was added.
//!
//! Empty, from any thread: lock, swap and fence as a take does. 5. Exchange the word for 0. 6.
//! Store the region in the row again. 7. Subtract what came out from its counter. 8. Unlock.

use crate::assembler::Assembler;

/// A way to build the protocol wrong, or, where a comment says so, right in another way.
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
    /// The taker goes on when the fence has failed.
    FenceFailureIgnored,
    /// The taker reads the count of a wanted stack before the fence and uses it after.
    ReadBeforeFence,
    /// The taker copies the unwanted stacks before the fence.
    CopyBeforeFence,
    /// The taker empties the wanted stacks before the fence, and puts the region back when the
    /// fence fails.
    PutBackAfterTouch,
    /// The taker copies the unwanted stacks when the spare region is in the row already.
    CopyAfterPublish,
    /// The taker leaves the old region in the row until it stores the spare one there.
    NoSwap,
    /// The taker leaves counts and capacities in the old region.
    SpareNotZeroed,
    /// No mutex: takers share the spare region and give up if they find the closed region.
    SharedSpare,
    /// Right: no mutex, each taker has a spare region of its own and gives up if it finds the
    /// closed region.
    OwnSpares,
    /// `OwnSpares`, but a taker treats the closed region like any region that it found.
    IgnoreClosed,
    /// The sequences never store `rseq_cs`, so the kernel aborts nothing.
    NoArm,
    /// One instruction lies between the store to `rseq_cs` and START.
    GapAfterArm,
    /// The table has entries for its own CPUs only. Here row 0 lies beside them.
    NoOtherEntries,
    /// Every sequence stores the count first and copies the cells after.
    CountFirst,
    /// Push stores the object above the count before it checks whether there is room.
    StoreBeforeCheck,
    /// Set capacity does not check for the closed region.
    CapacityOnClosed,
    /// Set capacity is a plain store outside any sequence.
    CapacityOutsideSequence,
    /// Fork closes the rows but does not fence.
    ForkNoFence,
    /// Fork fences first and closes the rows after.
    ForkFenceFirst,
    /// Fork does not close the gate.
    ForkNoGate,
    /// A thread that passes the gate checks first and counts in after.
    GateCheckFirst,
    /// A thread that finds the gate closed does not count out before it waits.
    GateWaitInside,
    /// Fork closes the gate by a plain store, without a barrier.
    GateNoBarrier,
    /// The retiring thread never fences.
    RetireNoFence,
    /// The retiring thread fences, then stores the new number.
    RetireFenceFirst,
    /// The retiring thread sends readers to the other phase and waits only for those of the
    /// previous one.
    RetireOnePhase,
    /// The retiring thread adds up the readers that entered first.
    RetireEnteredFirst,
    /// A CPU that is never fenced has words.
    IsolatedWords,
    /// Readers without sequences add to the words of CPU 0.
    SharedWords,
    /// Readers count out before they have looked.
    LeaveFirst,
    /// The closed region's word is that of an empty stock.
    ClosedWordOfZeroes,
    /// The stocking thread does not check whether the word has changed.
    StockBlindly,
    /// The taker stores the spare region in the row by a plain store. Right on x86-64.
    PublishPlainly,
    /// Readers count by plain stores. Right on x86-64.
    CountPlainly,
    /// The retiring thread adds up readers by loads without acquire. Right on x86-64.
    SumPlainly,
    /// The address of a load from a region does not depend on the load of the row. Right on x86-64.
    RegionWithoutRow,
}

/// The next operation of a thread. An object number of 0 stands for the lowest object that the
/// thread holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// The fast path; on failure the object goes to the barn.
    Push(u8),
    /// The fast path for a class; nothing on failure.
    Pop(u8),
    /// The fast path; on failure the slow path.
    SlowPush(u8),
    SlowPop(u8),
    /// The middle of the slow push: pop many into the barn.
    Flush(u8),
    /// The end of the slow pop: push many from the barn.
    Fill(u8),
    /// Take the classes of a mask from a CPU.
    Take(u8, u8),
    Fork,
    /// Look at the object, as a reader.
    Read,
    /// Replace the object, wait for its readers, free it.
    Retire,
    /// A byte for a payer: out of the stock, or by its counter.
    Charge(u8),
    /// Back into the stock, or off its counter.
    Uncharge(u8),
    /// One more into the stock, for any payer in the word.
    Stock(u8),
    /// Empty a CPU's stock.
    Empty(u8),
}

/// A change of a stock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    Take,
    Give,
    Put,
}

/// One of a reader's two counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    Entered,
    Left,
}

/// One step.
///
/// Registers: `k` class, `c` CPU, `p` region of the row, `n` count, `i` cells copied, `t` loaded
/// object, `v` object to push, `b` private memory for objects and `m` their number, `d` region
/// taken out of a row, `s` spare region. A number in a line is a class, in fork's a CPU.
///
/// Of a reader: `k` phase, `v` object. Of a retiring thread: `k` the phase that it checks, `i` the
/// place, `n` readers that entered and did not leave, `m` a bit for each phase seen without
/// readers, `v` the retired object. Of a charging thread: `k` the payer, `n` the word, `v` the
/// previous word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Instr {
    Finish,
    Arm,
    Gap,
    /// Take the branch, or do not: both are explored.
    Choice,
    ReadCpu,
    LoadRow,
    LoadCount,
    /// Of one object, or of those in `b`.
    CheckRoom(bool),
    StoreCell,
    CopyIn,
    StoreCountUp(bool),
    /// Loads the count and subtracts 1, or half a stack.
    LoadCountDown(bool),
    LoadCell,
    CopyOut,
    StoreCountDown,
    /// Loads the count again and stores one more than it is then, by one instruction.
    CountUp,
    CheckClosed,
    StoreCapacity,
    BarnPutOne,
    BarnPutMany,
    /// Takes one object to keep, or none, and half a stack.
    BarnTake(bool),
    EnterGate,
    CheckGate,
    LeaveGate,
    WaitGate,
    LockTakers,
    UnlockTakers,
    LoadSpare,
    Swap,
    LoadOld,
    FenceRow,
    OldCount(u8),
    CopyCell(u8),
    CopyCount(u8),
    CopyCapacity(u8),
    Publish,
    Dissolve(u8),
    ZeroCount(u8),
    ZeroCapacity(u8),
    StoreSpare,
    PutBack,
    CloseGate,
    WaitEmpty,
    OpenGate,
    CloseRow(u8),
    FenceCpu(u8),
    Snapshot,
    ReopenRow(u8),
    LoadPhase,
    CheckPlace,
    LoadWord(Side),
    StoreWordUp(Side),
    AddLocked(Side),
    LoadObject,
    Look,
    Replace,
    TakeUp,
    /// Of a CPU that has words; it may fail.
    FencePlace(u8),
    /// Stores the other phase at once.
    FlipFirst,
    AddUp(Side),
    /// Whether all phases are seen; otherwise the phase to check next.
    Decide,
    Free,
    LoadStock,
    CheckStock(Change),
    StoreStock(Change),
    Hint,
    /// To the payer's counter, and into the thread's hands or not.
    CounterUp(bool),
    CounterDown(bool),
    /// Bytes that a stock held for another payer.
    CounterOut,
    TakeStock,
    ReadStock,
}

impl Instr {
    /// Whether later loads come after the line: an acquire, or a locked instruction that is one.
    pub fn acquires(self, mutant: Mutant) -> bool {
        match self {
            Instr::AddUp(_) => mutant != Mutant::SumPlainly,
            // A full fence follows.
            Instr::AddLocked(Side::Entered) | Instr::TakeUp => true,
            Instr::BarnPutOne | Instr::BarnPutMany | Instr::BarnTake(_) | Instr::Dissolve(_) => true,
            Instr::EnterGate | Instr::CheckGate | Instr::WaitGate | Instr::CloseGate | Instr::WaitEmpty => true,
            Instr::LockTakers | Instr::Swap | Instr::CloseRow(_) | Instr::TakeStock => true,
            _ => false,
        }
    }

    /// Whether the store is a release in the code: after all that the thread stored before it.
    pub fn releases(self, mutant: Mutant) -> bool {
        match self {
            Instr::Publish => mutant != Mutant::PublishPlainly,
            Instr::PutBack | Instr::ReopenRow(_) | Instr::OpenGate => true,
            Instr::StoreWordUp(_) => mutant != Mutant::CountPlainly,
            _ => false,
        }
    }
}

/// Inside `[START, END)`: an interruption of an armed thread here aborts.
pub const SEQ: u8 = 1;
/// Fork has swapped a row: `d` is that of CPU 0, `s` that of CPU 1.
pub const SHUT: u8 = 2;
/// This line's store is the commit.
pub const COMMIT: u8 = 4;
/// The row holds the closed region, which this thread stored.
pub const DETACHED: u8 = 8;
/// The fence succeeded: the taken region is the taker's.
pub const FENCED: u8 = 16;
/// The spare region is in the row; of the taken one only the wanted classes count.
pub const PUBLISHED: u8 = 32;
/// Every row leads to the closed region and is fenced: no commit may happen.
pub const CLOSED: u8 = 64;

/// The change of the objects that the thread holds, besides the line's memory access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hand {
    Same,
    /// `v` leaves the hand.
    Give,
    /// `t` comes into the hand.
    Get,
    /// The objects in `b` leave the hand.
    GiveMany,
    /// The objects copied to `b` count from now on.
    GetMany,
}

#[derive(Clone, Copy, Debug)]
pub struct Line {
    pub instr: Instr,
    /// The next line; 0 while the program is put together: the line after this one.
    pub next: u8,
    /// The next line after a failing check, a repeated line or a `Choice`.
    pub to: u8,
    /// The line to which the kernel sends an aborted sequence.
    pub abort: u8,
    pub flags: u8,
    pub hand: Hand,
    pub text: &'static str,
}

pub struct Program {
    pub lines: Vec<Line>,
    entries: Vec<(Op, u8)>,
}

impl Program {
    /// The programs of `ops`, which must be all operations of a scenario: a thread that may meet a
    /// fork passes the gate.
    pub fn new(mutant: Mutant, classes: u8, ops: impl Iterator<Item = Op>) -> Program {
        let ops: Vec<Op> = ops.map(shape).collect();
        let mut asm = Assembler::new(mutant, classes, ops.contains(&Op::Fork));
        let mut entries = Vec::new();
        for op in ops {
            if entries.iter().all(|&(known, _)| known != op) {
                entries.push((op, asm.operation(op)));
            }
        }
        Program { lines: asm.lines(), entries }
    }

    pub fn entry(&self, op: Op) -> u8 {
        let found = self.entries.iter().find(|&&(known, _)| known == shape(op));
        found.expect("the program was made for this operation").1
    }
}

/// Operations that are the same program.
fn shape(op: Op) -> Op {
    match op {
        Op::Push(_) => Op::Push(0),
        Op::Pop(_) => Op::Pop(0),
        Op::SlowPush(_) => Op::SlowPush(0),
        Op::SlowPop(_) => Op::SlowPop(0),
        Op::Flush(_) => Op::Flush(0),
        Op::Fill(_) => Op::Fill(0),
        Op::Take(_, wanted) => Op::Take(0, wanted),
        Op::Charge(_) => Op::Charge(0),
        Op::Uncharge(_) => Op::Uncharge(0),
        Op::Stock(_) => Op::Stock(0),
        Op::Empty(_) => Op::Empty(0),
        Op::Fork | Op::Read | Op::Retire => op,
    }
}
