//! Assembly of the sequences on stacks, as text for [`asm!`](core::arch::asm).
//!
//! # Design
//!
//! [`critical`](crate::critical) begins and ends every sequence. [`sequence`](crate::sequence) adds
//! the steps from the CPU id to the region. [`pop_sequence`](crate::pop_sequence) and
//! [`push_sequence`](crate::push_sequence) move one object.
//!
//! The abort exit lies behind the sequence, in the same function, and a branch leads around it. So
//! the function's own unwind information describes it for every unwinder. On x86-64 the exit lies
//! in another section, which saves the branch but needs separate unwind information. That
//! information needs a register for the program counter, which arm64 unwinders do not have.
//!
//! # Invariants
//!
//! The rules for a body are those of [`rseq`](crate::rseq). These operands have the same meaning in
//! all macros:
//!
//! | operand | value |
//! |---|---|
//! | `area` | address of the thread's rseq area |
//! | `first` | address of CPU 0's entry in the region table, or of another table by CPU |
//! | `place` | bytes from the start of a region to a stack |
//! | `t` | scratch register |
//!
//! Each use repeats the labels, and named labels would clash. So labels are numbers:
//!
//! | label | name |
//! |---|---|
//! | 20 | descriptor |
//! | 21 | start: the first instruction of the sequence |
//! | 22 | committed: behind the commit |
//! | 23 | end: behind the sequence |
//! | 24 | abort: the abort exit |
//! | 25 and above | for the body and its surroundings |
//!
//! # Concurrency
//!
//! The address of each load depends on an earlier load: the region on the CPU id, the head on the
//! region, the cell on the head. The processor does such loads in this order. So a thread that
//! finds a region also finds what was stored there before the Release store of its address. No
//! barrier is needed.
//!
//! Threads that take turns on a CPU see each other's stores in program order, as one thread does.
//! The kernel orders all accesses of a thread when it switches threads. A thread on another CPU
//! reads a stack only after a fence on the stack's CPU. So the commit is a plain store.

/// Puts a body between the begin and the end of a sequence: the descriptor that the kernel reads,
/// and the abort exit with its signature. No code writes to a descriptor. Descriptors lie in the
/// section that is read-only after relocation, since a section of their own would cost two more
/// page faults. The body must have the label `22:` behind its commit.
///
/// ```text
/// t := address of the descriptor (20)
/// rseq_cs of this thread := t
/// start (21):     body
///                 go to end
/// abort (24):     code of `abort`
/// end (23):
/// ```
///
/// | register | holds |
/// |---|---|
/// | `area` | address of the rseq area |
/// | `t` | address of the descriptor, until the start |
#[doc(hidden)]
#[macro_export]
macro_rules! critical {
    ($($body:literal),* ; abort: $($abort:literal),+) => {
        concat!(
            ".pushsection .data.rel.ro, \"aw\", @progbits\n.balign 32\n",
            "20: .long 0, 0\n.quad 21f, 22f - 21f, 24f\n.popsection\n",
            "adrp {t}, 20b\nadd {t}, {t}, :lo12:20b\n",
            "str {t}, [{area}, #8]\n",
            "21:\n",
            $($body, "\n",)*
            "b 23f\n.inst 0xd428bc00\n",
            "24:\n",
            $($abort, "\n",)+
            "23:\n",
        )
    };
}

/// A [`critical`](crate::critical) section that begins with the steps from the CPU id to the
/// region, whose address is in `t` when the body starts. `look` runs while `t` holds the id. It may
/// change only registers that it names.
///
/// ```text
/// t := cpu_id of this thread
/// code of `look`
/// t := region of CPU t, from the table
/// body
/// ```
///
/// | register | holds |
/// |---|---|
/// | `first` | address of CPU 0's entry in the table |
/// | `t` | the CPU's id, then the address of its region |
#[doc(hidden)]
#[macro_export]
macro_rules! sequence {
    ($(look: $($look:literal),*;)? $($body:literal),* ; abort: $($abort:literal),+) => {
        $crate::critical!(
            "ldr {t:w}, [{area}, #4]",
            $($($look,)*)?
            "ldr {t}, [{first}, {t:w}, sxtw #3]",
            $($body),*;
            abort: $($abort),+
        )
    };
}

/// Pops the topmost object of the stack at `place` into `value`, which is null if there is none.
/// `look` checks the object before the commit, and refuses null. `then` runs after the commit.
/// Changes `place`, `t` and `next`.
///
/// ```text
/// place := region + place
/// next := head
/// value := cell below the head; next := next - 8
/// code of `look`, which goes to end if it refuses value
/// head := next (commit)
/// code of `then`
/// abort: value := null
/// ```
///
/// | register | holds |
/// |---|---|
/// | `place` | offset, then address of the stack |
/// | `t` | the CPU's id, then its region; free for `look` |
/// | `next` | the old head, then the new one |
/// | `value` | the object |
#[doc(hidden)]
#[macro_export]
macro_rules! pop_sequence {
    () => {
        $crate::pop_sequence!(look: "cbz {value}, 23f"; then:)
    };
    (look: $($look:literal),*; then: $($then:literal),*) => {
        $crate::sequence!(
            "add {place}, {place}, {t}",
            "ldr {next}, [{place}]",
            "ldr {value}, [{next}, #-8]!",
            $($look,)*
            "str {next}, [{place}]",
            "22:"
            $(, $then)*;
            abort: "mov {value}, xzr"
        )
    };
}

/// Pushes `value` on the stack at `place` if the CPU's id equals the low 16 bits of `home`,
/// otherwise on the next stack behind it. Changes `place`, `home` and `t`. `behind` is code behind
/// the abort exit, which the processor reaches only by jumps.
///
/// ```text
/// look: is_home := (t = low 16 bits of home); home := place + 24
///       if not is_home: place := home
/// place := region + place
/// t := head
/// home := end of the stack
/// if t = home: go to full
/// cell at t := value; t := t + 8
/// head := t (commit)
/// abort: go to aborted
/// ```
///
/// | register | holds |
/// |---|---|
/// | `place` | offset, then address of the stack |
/// | `home` | the object's home, the offset of the next stack, then the end of the stack |
/// | `t` | the CPU's id, its region, the old head, then the new one |
/// | `value` | the object |
#[doc(hidden)]
#[macro_export]
macro_rules! push_sequence {
    ($($behind:literal),*) => {
        $crate::sequence!(
            look: "cmp {t:w}, {home:w}, uxth", "add {home}, {place}, #24", "csel {place}, {place}, {home}, eq";
            "add {place}, {place}, {t}",
            "ldr {t}, [{place}]",
            "ldr {home}, [{place}, #16]",
            "cmp {t}, {home}",
            "b.eq {full}",
            "str {value}, [{t}], #8",
            "str {t}, [{place}]",
            "22:";
            abort: "b {aborted}" $(, $behind)*
        )
    };
}
