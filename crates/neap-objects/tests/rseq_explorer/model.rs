//! The machine that the explorer runs: memory, store buffers, CPUs and threads, in a small value.
//!
//! `protocol` has the programs, and `steps` lists all successors of a state. A state is a small
//! value; nothing here is shared or locked. Whether a state is right is decided in `check`.
//!
//! The machine: each CPU has a buffer of stores. Its own loads see them, other CPUs only after they
//! drained, at any time: in order on x86-64 ([`Order::Tso`]). On arm64 ([`Order::Weak`]) a store
//! passes earlier ones of other words, unless it is a release. A `lock` instruction, a fence for
//! that CPU, a signal and a context switch drain the buffer.
//!
//! With [`Order::Loads`] a load may also be done before earlier ones, as arm64 does. Such a load
//! misses changes of memory that came after it. So the state has the newest changes with the values
//! before them, and for each thread the number of them that its next load may miss. A fence for the
//! CPU, a signal, a switch and an acquire set that number to 0; every change adds 1. A load whose
//! address depends on an earlier load misses at most what the earlier one missed.
//!
//! CPUs 0 and 1 have a region. CPU 2 has none; an undisturbed taker runs there. A thread leaves its
//! CPU at any step and goes on where it finds a free one.
//!
//! A step is one access to shared memory with the arithmetic that follows it. Merging those is
//! safe, because registers are private and an abort forgets them. Four further merges:
//! * A load from a region that a taker has for itself is one step with the store that it leads to.
//!   No other thread writes to such a region. Two checks would report the first state where that is
//!   not so: that a region is in one place only, and that of every store of a sequence.
//! * A barn operation is one step, because the barn has a mutex; the lock instruction drains.
//! * The end of an operation or of a signal handler belongs to the step before it: it is private.
//! * `rseq_cs` is a flag, cleared at END. The real word goes stale there instead. That is not
//!   visible, since the next sequence overwrites it before its START.
//!
//! The model cannot show:
//! * the real instructions and descriptors: that START is the instruction after the store, the
//!   signature, the range, the offsets, tearing of wide stores;
//! * a store before an earlier load; more than four pending stores a CPU; a load that misses more
//!   than three changes; a `lock` instruction whose load and store are apart;
//! * the kernel's own races: a fence is one step here, and an abort happens when the thread is
//!   interrupted, not when it returns; a kernel that fails to abort is a broken protocol (`NoArm`);
//! * a fence that fails under fork, and the child of fork;
//! * more than one signal a thread, nested handlers, handlers that use the barn; more threads,
//!   CPUs,
//!   operations or objects than the scenarios have; a barn that hands out other than its lowest
//!   objects;
//! * progress: a thread may try again for ever. Every state is checked for a way to the end.

use crate::protocol::*;

pub const CPUS: usize = 3;
/// CPUs that the table has a region for.
pub const ROWS: usize = 2;
pub const MAX_THREADS: usize = 4;
/// The CPU number of a thread that waits for one.
pub const OFF: u8 = 3;
/// The CPU id that an unregistered thread reads: -1.
pub const NO_CPU: u8 = 15;

/// Pointers to regions. A and B start as those of CPU 0 and 1, C is spare; D is spare in one
/// variant.
pub const NOTHING: u8 = 0;
pub const CLOSED_REGION: u8 = 1;
pub const A: u8 = 2;
pub const B: u8 = 3;
pub const C: u8 = 4;

/// Memory words: the table, the takers' spare regions and mutex, fork's gate, a gap, then the
/// regions.
pub const ROW: usize = 0;
pub const SPARE: usize = 2;
pub const TAKERS: usize = 4;
pub const GATE: usize = 5;
pub const INSIDE: usize = 6;
pub const REGION: usize = 8;
/// Words a region: room for two stacks with two cells or one stack with three.
pub const STRIDE: usize = 8;
const STACK: usize = 4;
const REGIONS: usize = 5;
pub const WORDS: usize = REGION + REGIONS * STRIDE;
/// Stores that a CPU's buffer holds.
pub const DEPTH: usize = 4;
/// Changes of memory that a load can miss.
pub const CHANGES: usize = 3;
/// Mark of a release in a buffer.
pub const RELEASE: u16 = 1 << 10;
/// A change in [`State::changes`] has its CPU above this bit.
const CHANGER: u32 = 10;
const _: () = assert!((WORDS as u16) < RELEASE >> 4);

/// Words of scenarios with readers, in the place of the regions, which are unused then: the phase
/// in which readers count, the number of the object that they find, and the lowest number of an
/// object that is not freed.
pub const PHASE: usize = REGION;
pub const OBJECT: usize = REGION + 1;
pub const ALIVE: usize = REGION + 2;
const COUNTS: usize = REGION + 4;
/// Places of readers' counts by sequences, one a CPU, and the last one for counts by a locked
/// instruction.
pub const PLACES: u8 = 3;
pub const LOCKED: u8 = 2;

/// The word of readers that entered, or left, at a place in a phase.
pub fn word_of(side: Side, place: u8, phase: u8) -> usize {
    COUNTS + side as usize * 2 * PLACES as usize + 2 * place as usize + phase as usize
}

/// The word of a stack's count. Its capacity and its cells follow.
pub fn count_of(region: u8, class: u8) -> usize {
    REGION + (region - CLOSED_REGION) as usize * STRIDE + class as usize * STACK
}

/// A flaw that only a broken protocol has, noticed while a step is executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flaw {
    None,
    ForeignStore,
    CommitWhileClosed,
    PoppedNothing,
    ObjectTwice,
    OutOfBounds,
    SnapshotInFlight,
    SnapshotClosed,
    SnapshotLocked,
    SnapshotLoses,
    UsedFreed,
}

/// Events that a run must have seen, so that a scenario cannot pass by doing nothing.
pub mod event {
    pub const PUSHED: u32 = 1;
    pub const POPPED: u32 = 1 << 1;
    pub const PUSHED_MANY: u32 = 1 << 2;
    pub const POPPED_MANY: u32 = 1 << 3;
    pub const ACTIVATED: u32 = 1 << 4;
    pub const ABORT_SWITCH: u32 = 1 << 5;
    pub const ABORT_SIGNAL: u32 = 1 << 6;
    pub const ABORT_FENCE: u32 = 1 << 7;
    pub const FENCE_DRAINED: u32 = 1 << 8;
    /// A sequence was refused because it found the closed region.
    pub const REFUSED: u32 = 1 << 9;
    pub const TOOK_OBJECT: u32 = 1 << 10;
    /// A taker copied an object of an unwanted class.
    pub const KEPT: u32 = 1 << 11;
    pub const PUT_BACK: u32 = 1 << 12;
    /// A taker used a region as its spare that had been a CPU's.
    pub const REUSED: u32 = 1 << 13;
    pub const BUSY: u32 = 1 << 14;
    /// A sequence was refused because it found the closed region, while fork had the rows.
    pub const CLOSED_OUT: u32 = 1 << 15;
    pub const SNAPSHOT: u32 = 1 << 16;
    /// A thread came to the gate and found it closed.
    pub const GATE_CLOSED: u32 = 1 << 17;
    /// A reader looked at an object that had been replaced.
    pub const READ_OLD: u32 = 1 << 18;
    /// A reader counted by a locked instruction.
    pub const COUNTED_LOCKED: u32 = 1 << 19;
    /// A phase was not without readers.
    pub const WAITED: u32 = 1 << 20;
    /// Readers were sent to the other phase.
    pub const FLIPPED: u32 = 1 << 21;
    pub const FREED: u32 = 1 << 22;
    /// A byte came out of a stock, or into one.
    pub const STOCK_TOOK: u32 = 1 << 23;
    pub const STOCK_GAVE: u32 = 1 << 24;
    /// A word became another payer's.
    pub const STOCK_PUT: u32 = 1 << 25;
    /// Bytes came out of a stock that was emptied.
    pub const STOCK_EMPTIED: u32 = 1 << 26;
    /// A load missed a change of its word.
    pub const MISSED: u32 = 1 << 27;
}

/// Words of charging threads, in the place of those for the spare region, which is unused then: the
/// bytes that each payer is charged for.
pub const CHARGED: usize = SPARE;
/// Number of payers. The next constant is the most that a word holds. In a word the payer, from 1
/// on, is above the number.
pub const PAYERS: u8 = 2;
pub const MOST: u8 = 3;
/// The closed region's word: no payer's.
pub const NOBODYS: u8 = 15;

/// The word of a region's stock.
pub fn stock_of(region: u8) -> usize {
    count_of(region, 0)
}

/// The word of a payer with a number of bytes.
pub fn stocked(payer: u8, number: u8) -> u8 {
    (payer + 1) << 2 | number
}

/// Stocks anew for a payer over a word. Returns the new word, and the bytes that come out of the
/// old one.
pub fn restocked(found: u8, payer: u8) -> (u8, u8) {
    match (found >> 2 == payer + 1, found & 3) {
        (false, _) => (stocked(payer, 1), found),
        (true, MOST) => (stocked(payer, MOST / 2), stocked(payer, MOST + 1 - MOST / 2)),
        (true, held) => (stocked(payer, held + 1), 0),
    }
}

/// A thread's registration with the kernel.
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
    /// The operation of a signal handler that may interrupt the thread once.
    pub handler: Option<Op>,
    pub rseq: Rseq,
    /// Keeps the first CPU that it gets: shows what signals alone can do.
    pub stays: bool,
}

/// The order of a CPU's accesses to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Stores become visible in their order, and loads are done in theirs.
    Tso,
    /// Stores become visible in any order, but that of stores to one word, and a release comes
    /// after all earlier stores. Loads are done in theirs. Allows all that [`Order::Tso`] does.
    Weak,
    /// Loads are done in any order, too, but for dependencies and acquires. Allows all that
    /// [`Order::Weak`] does. It has many times the states, so only small scenarios have it.
    Loads,
}

#[derive(Clone, Debug)]
pub struct Scenario {
    pub name: &'static str,
    pub actors: Vec<Actor>,
    /// The objects in the stacks of region A and of region B at the beginning, by class: one class
    /// or two.
    pub stacks: [Vec<Vec<u8>>; ROWS],
    /// The objects in the barn at the beginning, as a mask.
    pub barn: u8,
    /// The objects of class 1, as a mask.
    pub second: u8,
    /// The room in a stack that is not drained.
    pub capacity: u8,
    /// Whether A and B start without room, as after a take.
    pub drained: bool,
    /// CPU 1 has no region: its row leads to the closed region for good. For readers: it has no
    /// words and is never fenced.
    pub one_region: bool,
    pub fence_may_fail: bool,
    pub mutant: Mutant,
    /// Judge only where all threads have finished, instead of in every state.
    pub at_rest: bool,
    pub order: Order,
}

impl Scenario {
    pub fn classes(&self) -> u8 {
        self.stacks[0].len() as u8
    }

    pub fn class_of(&self, object: u8) -> u8 {
        self.second >> object & 1
    }

    /// Whether the scenario is about readers and retired objects, not about stacks.
    pub fn reads(&self) -> bool {
        self.actors.iter().flat_map(|actor| &actor.ops).any(|op| matches!(op, Op::Read | Op::Retire))
    }

    /// Whether the scenario is about stocks. The objects in stacks are bytes of the first payer
    /// then.
    pub fn stocks(&self) -> bool {
        let charges = |op: &Op| matches!(op, Op::Charge(_) | Op::Uncharge(_) | Op::Stock(_) | Op::Empty(_));
        self.actors.iter().flat_map(|actor| &actor.ops).any(charges)
    }

    /// Number of objects that the slow paths move at once.
    pub fn half(&self) -> u8 {
        self.capacity.div_ceil(2)
    }
}

/// Registers, as described in `protocol`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Frame {
    pub pc: u8,
    pub k: u8,
    pub c: u8,
    pub p: u8,
    pub n: u8,
    pub i: u8,
    pub t: u8,
    pub v: u8,
    pub b: [u8; 2],
    pub m: u8,
    pub d: u8,
    pub s: u8,
    /// Newest changes that the load of `p` missed, and that of `n`; 0 without `p`.
    pub p_missed: u8,
    pub n_missed: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Thread {
    pub now: Frame,
    /// The frame that a signal interrupted; its pc is 0 outside a handler.
    pub saved: Frame,
    /// The index of the operation in `Actor::ops`.
    pub op: u8,
    pub cpu: u8,
    pub armed: bool,
    pub signals: u8,
    /// The objects that it holds, as a mask.
    pub hand: u8,
    /// Newest changes that its next load may miss.
    pub may_miss: u8,
}

impl Thread {
    /// A full barrier: later loads miss nothing.
    pub fn see_all(&mut self) {
        (self.may_miss, self.now.p_missed, self.now.n_missed) = (0, 0, 0);
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct State {
    pub mem: [u8; WORDS],
    /// Oldest first; `(word + 1) << 4 | value`, with [`RELEASE`] or not; 0 where unused.
    pub buf: [[u16; DEPTH]; CPUS],
    pub thr: [Thread; MAX_THREADS],
    /// The objects in the barn, as a mask.
    pub barn: u8,
    pub flaw: Flaw,
    /// Changes of words that are loaded without order, the newest first; `(word + 1) << 4 | value
    /// before`, with the CPU above; 0 where unused or too old to be missed.
    pub changes: [u16; CHANGES],
    /// Whether loads may miss changes.
    pub early: bool,
}

/// A state in 120 bytes, as the search keeps it.
pub type Packed = [u64; 15];

impl Frame {
    /// The registers that remain outside a sequence. Copies in `b` of an aborted sequence mean
    /// nothing.
    pub fn private(&self) -> Frame {
        let Frame { pc, k, v, b, m, .. } = *self;
        Frame { pc, k, v, b: if m == 0 { [NOTHING; 2] } else { b }, m, ..Frame::default() }
    }

    fn pack(&self) -> u64 {
        let nibbles = [self.c, self.p, self.n, self.t, self.v, self.b[0], self.b[1], self.d, self.s];
        let small = u64::from(self.pc) << 5 | u64::from(self.i) << 3 | u64::from(self.m) << 1 | u64::from(self.k);
        nibbles.iter().fold(small, |word, &nibble| word << 4 | u64::from(nibble))
    }

    fn unpack(word: u64) -> Frame {
        let nibble = |i: u32| (word >> (4 * i)) as u8 & 15;
        let small = word >> 36;
        Frame {
            pc: (small >> 5) as u8,
            i: (small >> 3) as u8 & 3,
            m: (small >> 1) as u8 & 3,
            k: small as u8 & 1,
            c: nibble(8),
            p: nibble(7),
            n: nibble(6),
            t: nibble(5),
            v: nibble(4),
            b: [nibble(3), nibble(2)],
            d: nibble(1),
            s: nibble(0),
            ..Frame::default()
        }
    }
}

impl State {
    pub fn pack(&self) -> Packed {
        let mut words = [0; 15];
        for (word, values) in words.iter_mut().zip(self.mem.chunks(16)) {
            *word = values.iter().fold(0, |word, &value| word << 4 | u64::from(value));
        }
        for (word, buffer) in words[3..].iter_mut().zip(&self.buf) {
            *word = buffer.iter().fold(0, |word, &entry| word << 12 | u64::from(entry));
        }
        words[3] |= u64::from(self.barn) << 48;
        words[4] |= (self.flaw as u64) << 48;
        for (i, t) in self.thr.iter().enumerate() {
            let small = u64::from(t.op) << 6 | u64::from(t.cpu) << 2 | u64::from(t.signals) << 1 | u64::from(t.armed);
            words[6 + 2 * i] = t.now.pack() | small << 49;
            words[7 + 2 * i] = t.saved.pack() | u64::from(t.hand) << 49;
            let missed = [t.may_miss, t.now.p_missed, t.now.n_missed];
            words[14] = missed.iter().fold(words[14], |word, &missed| word << 2 | u64::from(missed));
        }
        words[14] = self.changes.iter().fold(words[14], |word, &change| word << 12 | u64::from(change));
        words[5] |= u64::from(self.early) << 48;
        words
    }

    pub fn unpack(words: &Packed) -> State {
        use Flaw::*;
        const FLAWS: [Flaw; 11] = [
            None,
            ForeignStore,
            CommitWhileClosed,
            PoppedNothing,
            ObjectTwice,
            OutOfBounds,
            SnapshotInFlight,
            SnapshotClosed,
            SnapshotLocked,
            SnapshotLoses,
            UsedFreed,
        ];
        let mut mem = [0; WORDS];
        for (i, value) in mem.iter_mut().enumerate() {
            *value = (words[i / 16] >> (60 - 4 * (i % 16))) as u8 & 15;
        }
        let mut buf = [[0; DEPTH]; CPUS];
        for (cpu, buffer) in buf.iter_mut().enumerate() {
            *buffer = [36, 24, 12, 0].map(|shift| (words[3 + cpu] >> shift) as u16 & 0xfff);
        }
        let mut thr = [Thread::default(); MAX_THREADS];
        for (i, t) in thr.iter_mut().enumerate() {
            let (first, second) = (words[6 + 2 * i], words[7 + 2 * i]);
            let small = first >> 49;
            *t = Thread {
                now: Frame::unpack(first & ((1 << 49) - 1)),
                saved: Frame::unpack(second & ((1 << 49) - 1)),
                op: (small >> 6) as u8,
                cpu: (small >> 2) as u8 & 15,
                armed: small & 1 == 1,
                signals: (small >> 1) as u8 & 1,
                hand: (second >> 49) as u8,
                may_miss: 0,
            };
            let missed = |number: usize| (words[14] >> (36 + 2 * (11 - 3 * i - number))) as u8 & 3;
            (t.may_miss, t.now.p_missed, t.now.n_missed) = (missed(0), missed(1), missed(2));
        }
        let changes = [24, 12, 0].map(|shift| (words[14] >> shift) as u16 & 0xfff);
        let (barn, flaw) = ((words[3] >> 48) as u8, FLAWS[(words[4] >> 48) as usize]);
        State { mem, buf, thr, barn, flaw, changes, early: words[5] >> 48 != 0 }
    }

    /// The frames of every thread, and those that a signal interrupted.
    pub fn frames(&self) -> impl Iterator<Item = Frame> + '_ {
        self.thr.iter().flat_map(|t| [t.now, t.saved])
    }

    /// The memory as it will be when every buffer has drained.
    pub fn settled(&self) -> [u8; WORDS] {
        let mut mem = self.mem;
        for &entry in self.buf.iter().flatten().filter(|&&entry| entry != 0) {
            mem[stored_word(entry)] = (entry & 15) as u8;
        }
        mem
    }

    /// Whether the store at a place of a CPU's buffer may be the next one that others see.
    pub fn may_drain(&self, cpu: usize, at: usize, order: Order) -> bool {
        let (entry, earlier) = (self.buf[cpu][at], &self.buf[cpu][..at]);
        let passes = |other: &u16| entry & RELEASE == 0 && stored_word(*other) != stored_word(entry);
        entry != 0 && (at == 0 || order != Order::Tso && earlier.iter().all(passes))
    }

    /// Changes a word of the memory, by a CPU.
    pub fn change(&mut self, cpu: usize, word: usize, value: u8) {
        let before = core::mem::replace(&mut self.mem[word], value);
        let is_logged = self.early && before != value && !(TAKERS..REGION).contains(&word);
        if !is_logged {
            return;
        }
        self.changes.copy_within(..CHANGES - 1, 1);
        self.changes[0] = (word as u16 + 1) << 4 | u16::from(before) | (cpu as u16) << CHANGER;
        for thread in self.thr.iter_mut().filter(|thread| thread.cpu != OFF) {
            let one_more = |missed: &mut u8| *missed = (*missed + 1).min(CHANGES as u8);
            one_more(&mut thread.may_miss);
            if thread.now.p != NOTHING {
                one_more(&mut thread.now.p_missed);
                one_more(&mut thread.now.n_missed);
            }
        }
    }

    /// Forgets changes that no load can miss any more, so that equal states are found again.
    pub fn forget_changes(&mut self) {
        if !self.early {
            return;
        }
        let mut most = 0;
        for thread in self.thr.iter_mut() {
            // A load sees the changes of its own CPU.
            let own = |missed: u8| self.changes[missed as usize - 1] >> CHANGER == u16::from(thread.cpu);
            for missed in [&mut thread.may_miss, &mut thread.now.p_missed, &mut thread.now.n_missed] {
                while *missed > 0 && (self.changes[*missed as usize - 1] == 0 || own(*missed)) {
                    *missed -= 1;
                }
                most = most.max(*missed);
            }
        }
        self.changes[most as usize..].fill(0);
    }

    /// The value that a load by a CPU returns which may miss the newest `may_miss` changes, and
    /// the number that it missed: the most for that value. Number 0 of the possible values is that
    /// in memory; `None` behind the last.
    pub fn value(&self, cpu: usize, word: usize, may_miss: u8, number: u8) -> Option<(u8, u8)> {
        let (mut value, mut left) = (self.mem[word], number);
        for (missed, &change) in (0..may_miss).zip(&self.changes) {
            if change == 0 || change & ((1 << CHANGER) - 16) != (word as u16 + 1) << 4 {
                continue;
            }
            if change >> CHANGER == cpu as u16 {
                break;
            }
            if left == 0 {
                return Some((value, missed));
            }
            (value, left) = ((change & 15) as u8, left - 1);
        }
        (left == 0).then_some((value, may_miss))
    }

    pub fn drain_at(&mut self, cpu: usize, at: usize) {
        let entry = self.buf[cpu][at];
        self.change(cpu, stored_word(entry), (entry & 15) as u8);
        self.buf[cpu].copy_within(at + 1.., at);
        self.buf[cpu][DEPTH - 1] = 0;
    }

    pub fn drain(&mut self, cpu: usize) {
        while self.buf[cpu][0] != 0 {
            self.drain_at(cpu, 0);
        }
    }
}

/// The word of a store in a buffer.
pub fn stored_word(entry: u16) -> usize {
    usize::from((entry & !RELEASE) >> 4) - 1
}
