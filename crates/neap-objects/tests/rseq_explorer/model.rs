//! The machine that the explorer runs: memory, store buffers, CPUs and threads, in a small value.
//!
//! Sits between `protocol` (the programs) and `steps` (which lists all successors of a state).
//! A state is a small value; nothing here is shared and nothing locks. Never decides whether a
//! state is right: that is `check`.
//!
//! The machine, x86-64 TSO: each CPU has a buffer of stores in order; its own loads see them, other
//! CPUs only after they drained, at any time. A `lock` instruction, a fence for that CPU, a signal
//! and a context switch drain it. CPUs 0 and 1 have a row; CPU 2 has none and is where a taker sits
//! that nobody disturbs. A thread leaves its CPU at any step and goes on where it finds a free one.
//!
//! What is one step: one access to shared memory with the arithmetic that follows it. Merging those
//! is safe, because registers are private and an abort forgets them. Four further merges:
//! * Filling or popping a sheaf of one's own is one step. No other thread reads or writes such a
//!   sheaf before the step that publishes it; the check in every state that a sheaf is in one place
//!   only would report the first state where that is not so.
//! * A barn operation is one step, because the barn has a mutex; the lock instruction drains.
//! * The end of an operation or of a signal handler belongs to the step before it: it is private.
//! * `rseq_cs` is a flag, cleared at END. The real word goes stale there instead, which no one can
//!   see: the next sequence overwrites it before its START.
//!
//! What the model cannot show:
//! * the real instructions and descriptors: that START is the instruction after the store, the
//!   signature, the range, the offsets, tearing of wide stores;
//! * memory orders other than TSO; more than four pending stores a CPU;
//! * the kernel's own races: a fence is one step here, and an abort happens when the thread is
//!   interrupted, not when it returns; a kernel that fails to abort is a broken protocol (`NoArm`);
//! * a fence that fails under fork; what fork must do then is not modelled;
//! * more than one signal a thread, nested handlers, handlers that use the barn; more threads, CPUs,
//!   operations or objects than the scenarios have; a barn that hands out other than its lowest sheaf;
//! * progress: a thread may try again for ever. That every state can go on is checked.

use crate::protocol::*;

pub const CPUS: usize = 3;
pub const ROWS: usize = 2;
pub const MAX_SHEAVES: usize = 4;
pub const MAX_THREADS: usize = 4;
pub const CAPACITY: u8 = 2;
pub const LOCK: u8 = 8;
/// The CPU number of a thread that waits for one.
pub const OFF: u8 = 3;
/// What an unregistered thread reads as its CPU id: -1.
pub const NO_CPU: u8 = 15;

pub const NOTHING: u8 = 0;
pub const EMPTY0: u8 = 1;
pub const DUMMY: u8 = 2;
pub const A: u8 = 3;
pub const B: u8 = 4;

/// Memory words: `ncpus`, the rows, then count and two slots of each sheaf, then the takers' mutex.
pub const NCPUS: usize = 0;
pub const ROW: usize = 1;
pub const SHEAF: usize = 3;
pub const TAKERS: usize = 15;
const DEPTH: usize = 4;

/// The slots that a sheaf has; EMPTY0 and DUMMY have none, which is what makes push and pop fail.
pub fn capacity(pointer: u8) -> u8 {
    if pointer >= A { CAPACITY } else { 0 }
}

/// Where the count of a real sheaf lies.
pub fn count_of(pointer: u8) -> usize {
    SHEAF + 3 * (pointer - A) as usize
}

/// Something that only a broken protocol does, noticed while a step is carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flaw {
    None,
    ForeignStore,
    CommitWhileClosed,
    PoppedNothing,
    ObjectTwice,
    SheafTwice,
    OutOfBounds,
    SnapshotInFlight,
    SnapshotDummy,
    SnapshotLocked,
}

/// What a run must have seen, so that a scenario cannot pass by doing nothing.
pub mod event {
    pub const PUSHED: u32 = 1;
    pub const POPPED: u32 = 1 << 1;
    pub const ABORT_SWITCH: u32 = 1 << 2;
    pub const ABORT_SIGNAL: u32 = 1 << 3;
    pub const ABORT_FENCE: u32 = 1 << 4;
    pub const FENCE_DRAINED: u32 = 1 << 5;
    pub const EXCHANGED: u32 = 1 << 6;
    pub const EXCHANGE_LOST: u32 = 1 << 7;
    pub const TOOK_OBJECT: u32 = 1 << 8;
    pub const BUSY: u32 = 1 << 9;
    pub const PUT_BACK: u32 = 1 << 10;
    pub const CLOSED_OUT: u32 = 1 << 11;
    pub const SNAPSHOT: u32 = 1 << 12;
    pub const SNAPSHOT_MISSES_SHEAF: u32 = 1 << 13;
    pub const MIGRATED: u32 = 1 << 14;
    pub const WAITED_FOR_BIT: u32 = 1 << 15;
    pub const RECHECK_LOST: u32 = 1 << 16;
}

/// How the kernel knows a thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rseq {
    Registered,
    /// Reads -1 as its CPU id and is never aborted.
    Unregistered,
    /// A child of vfork: reads its parent's area, which says 0, and is never aborted.
    Borrowed,
}

#[derive(Clone, Debug)]
pub struct Actor {
    pub name: &'static str,
    pub ops: Vec<Op>,
    /// The CPUs that it may run on, as a mask.
    pub cpus: u8,
    /// What a signal handler does that may interrupt it once.
    pub handler: Option<Op>,
    pub rseq: Rseq,
    /// Keeps the first CPU that it gets: shows what signals alone can do.
    pub stays: bool,
}

#[derive(Clone, Debug)]
pub struct Scenario {
    pub name: &'static str,
    pub actors: Vec<Actor>,
    pub rows: [u8; ROWS],
    /// The objects in each sheaf at the beginning.
    pub sheaves: Vec<Vec<u8>>,
    /// The sheaves in the barn, as a mask.
    pub barn: u8,
    pub fence_may_fail: bool,
    pub mutant: Mutant,
    /// Judge only where everybody has finished, instead of every state.
    pub at_rest: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Frame {
    pub pc: u8,
    pub c: u8,
    pub p: u8,
    pub n: u8,
    pub t: u8,
    pub v: u8,
    pub e: u8,
    pub s: u8,
    pub d: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Thread {
    pub now: Frame,
    /// What a signal interrupted; its pc is 0 outside a handler.
    pub saved: Frame,
    /// The index of the operation in `Actor::ops`.
    pub op: u8,
    pub cpu: u8,
    pub armed: bool,
    pub signals: u8,
    /// The objects that it holds, as a mask.
    pub hand: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct State {
    pub mem: [u8; 16],
    /// Oldest first; `(word + 1) << 4 | value`, 0 where unused.
    pub buf: [[u8; DEPTH]; CPUS],
    pub thr: [Thread; MAX_THREADS],
    /// The sheaves in the barn, as a mask.
    pub barn: u8,
    /// The objects in the shared pool, as a mask.
    pub pool: u8,
    pub flaw: Flaw,
}

/// A state in 88 bytes: what the search keeps.
pub type Packed = [u64; 11];

impl Frame {
    fn pack(&self) -> u64 {
        let nibbles = [self.c, self.p, self.n, self.t, self.v, self.e, self.s, self.d];
        nibbles.iter().fold(u64::from(self.pc), |word, &nibble| word << 4 | u64::from(nibble))
    }

    fn unpack(word: u64) -> Frame {
        let nibble = |i: u32| (word >> (4 * i)) as u8 & 15;
        Frame {
            pc: (word >> 32) as u8,
            c: nibble(7),
            p: nibble(6),
            n: nibble(5),
            t: nibble(4),
            v: nibble(3),
            e: nibble(2),
            s: nibble(1),
            d: nibble(0),
        }
    }
}

impl State {
    pub fn pack(&self) -> Packed {
        let mut words = [0; 11];
        words[0] = self.mem.iter().fold(0, |word, &value| word << 4 | u64::from(value));
        let buffer = |i: usize| u64::from(u32::from_le_bytes(self.buf[i]));
        words[1] = buffer(0) << 32 | buffer(1);
        let rest = u64::from(self.barn) << 16 | u64::from(self.pool) << 8 | self.flaw as u64;
        words[2] = buffer(2) << 32 | rest;
        for (i, t) in self.thr.iter().enumerate() {
            let small = u64::from(t.op) << 12 | u64::from(t.cpu) << 8 | u64::from(t.signals) << 1 | u64::from(t.armed);
            words[3 + 2 * i] = t.now.pack() | small << 40;
            words[4 + 2 * i] = t.saved.pack() | u64::from(t.hand) << 40;
        }
        words
    }

    pub fn unpack(words: &Packed) -> State {
        use Flaw::*;
        const FLAWS: [Flaw; 10] = [
            None,
            ForeignStore,
            CommitWhileClosed,
            PoppedNothing,
            ObjectTwice,
            SheafTwice,
            OutOfBounds,
            SnapshotInFlight,
            SnapshotDummy,
            SnapshotLocked,
        ];
        let mut mem = [0; 16];
        for (i, value) in mem.iter_mut().enumerate() {
            *value = (words[0] >> (60 - 4 * i)) as u8 & 15;
        }
        let mut thr = [Thread::default(); MAX_THREADS];
        for (i, t) in thr.iter_mut().enumerate() {
            let (first, second) = (words[3 + 2 * i], words[4 + 2 * i]);
            let small = first >> 40;
            *t = Thread {
                now: Frame::unpack(first & 0xff_ffff_ffff),
                saved: Frame::unpack(second & 0xff_ffff_ffff),
                op: (small >> 12) as u8,
                cpu: (small >> 8) as u8 & 15,
                armed: small & 1 == 1,
                signals: (small >> 1) as u8 & 1,
                hand: (second >> 40) as u8,
            };
        }
        let low = |word: u64| (word as u32).to_le_bytes();
        State {
            mem,
            buf: [low(words[1] >> 32), low(words[1]), low(words[2] >> 32)],
            thr,
            barn: (words[2] >> 16) as u8,
            pool: (words[2] >> 8) as u8,
            flaw: FLAWS[words[2] as usize & 15],
        }
    }

    /// The memory as it will be when every buffer has drained.
    pub fn settled(&self) -> [u8; 16] {
        let mut mem = self.mem;
        for entry in self.buf.iter().flatten().filter(|&&entry| entry != 0) {
            mem[(entry >> 4) as usize - 1] = entry & 15;
        }
        mem
    }

    pub fn drain_one(&mut self, cpu: usize) {
        let entry = self.buf[cpu][0];
        self.mem[(entry >> 4) as usize - 1] = entry & 15;
        self.buf[cpu].copy_within(1.., 0);
        self.buf[cpu][DEPTH - 1] = 0;
    }

    pub fn drain(&mut self, cpu: usize) {
        while self.buf[cpu][0] != 0 {
            self.drain_one(cpu);
        }
    }
}
