//! Assembly of the sequences on stacks, as text for [`asm!`](core::arch::asm).
//!
//! # Design
//!
//! [`critical`](crate::critical) begins and ends every sequence. [`sequence`](crate::sequence) adds
//! the steps from the CPU id to the region. [`pop_sequence`](crate::pop_sequence) and
//! [`push_sequence`](crate::push_sequence) move one object. [`unwinds_like`](crate::unwinds_like)
//! describes code of malloc and free that lies outside its function.
//!
//! # Invariants
//!
//! The rules for a body are those of [`rseq`](crate::rseq). These operands have the same meaning in
//! all macros:
//!
//! | operand | value |
//! |---|---|
//! | `offset` | offset of the thread's rseq area from the thread pointer |
//! | `table`, `first` | region table's address, and [`FIRST`](crate::rseq::SequenceTable::FIRST) |
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
//! | 201, 202, 203 | start, body and end of a record of `.eh_frame` |

/// Puts a body between the begin and the end of a sequence: the descriptor that the kernel reads,
/// and the abort exit with its signature. Both lie outside the hot code. No code writes to a
/// descriptor. Descriptors lie in the section that is read-only after relocation, since a section
/// of their own would cost two more page faults. The body must have the label `22:` behind its
/// commit.
///
/// ```text
/// t := address of the descriptor (20)
/// rseq_cs of this thread := t
/// start (21):     body
/// end (23):
///
/// in another section:
/// abort (24):     code of `abort`
///                 go to end
/// ```
///
/// | register | holds |
/// |---|---|
/// | `offset` | offset of the rseq area |
/// | `t` | address of the descriptor, until the start |
///
/// The abort exit unwinds as if the sequence had called it without a return address on the stack.
/// The exit's frame begins at the stack pointer. Its return address is the start of the sequence,
/// whose function has its own unwind information. The distance to that start lies in an instruction
/// that is never executed, at the start of each exit's 32 bytes. The bytes of `.cfi_escape` are
/// `DW_CFA_val_expression` for `rip`: round `rip` down to a multiple of 32, and add the eight bytes
/// that lie two bytes behind.
#[doc(hidden)]
#[macro_export]
macro_rules! critical {
    ($($body:literal),* ; abort: $abort:literal) => {
        concat!(
            ".pushsection .data.rel.ro, \"aw\", @progbits\n.balign 32\n",
            "20: .long 0, 0\n.quad 21f, 22f - 21f, 24f\n.popsection\n",
            "lea {t}, [rip + 20b]\n",
            "mov qword ptr fs:[{offset} + 8], {t}\n",
            "21:\n",
            $($body, "\n",)*
            ".pushsection __rseq_failure, \"ax\", @progbits\n.balign 32\n",
            // movabs rax, 21b - (start of these 32 bytes)
            ".byte 0x48, 0xb8\n.quad 21b - . + 2\n",
            ".byte 0x0f, 0xb9, 0x3d\n.long 0x53053053\n",
            "24:\n.cfi_startproc\n.cfi_def_cfa rsp, 0\n",
            ".cfi_escape 0x16, 0x10, 10, 0x80, 0, 0x09, 0xe0, 0x1a, 0x12, 0x23, 2, 0x06, 0x22\n",
            $abort, "\njmp 23f\n.cfi_endproc\n.popsection\n",
            "23:\n",
        )
    };
}

/// Unwind information for the code from `start` to `end`. The code lies outside its function, but
/// in the function's section. An unwinder treats this code as a frame without a stack. For an
/// address `start + d`, the frame's return address is `like + d`. The function must have at least
/// as much code behind `like`, with the same stack pointer as the described code.
///
/// An assembler extends the unwind information of a function only with code in another section.
/// Therefore this is a record of `.eh_frame` with its own head. In its instructions, the frame
/// begins at `rsp` (`DW_CFA_def_cfa`). The return address is `rip` plus the distance
/// (`DW_CFA_val_expression` of `DW_OP_breg16`, `DW_OP_const2s` and `DW_OP_plus`).
#[doc(hidden)]
#[macro_export]
macro_rules! unwinds_like {
    ($start:literal to $end:literal, like: $like:literal) => {
        concat!(
            ".pushsection .eh_frame, \"a\", @unwind\n",
            // Version 1, "zR", code in units of 1 and data of -8 bytes, return address in column
            // 16, addresses relative in 4 bytes.
            "201: .long 202f - . - 4, 0\n.byte 1\n.asciz \"zR\"\n.byte 1, 0x78, 16, 1, 0x1b\n",
            ".byte 0x0c, 7, 0\n.balign 8, 0\n202:\n",
            ".long 203f - . - 4\n.long . - 201b\n.long ",
            $start,
            " - ., ",
            $end,
            " - ",
            $start,
            "\n.byte 0\n",
            ".byte 0x16, 0x10, 6, 0x80, 0, 0x0b\n.short ",
            $like,
            " - ",
            $start,
            "\n.byte 0x22\n",
            ".balign 8, 0\n203:\n.popsection\n",
        )
    };
}

/// A [`critical`](crate::critical) section that begins with the steps from the CPU id to the
/// region, whose address is in `t` when the body starts. `look` runs while `t` holds the id. It may
/// change only registers that it names. `first` is
/// [`SequenceTable::FIRST`](crate::rseq::SequenceTable::FIRST).
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
/// | `table` | address of the table |
/// | `t` | the CPU's id, then the address of its region |
#[doc(hidden)]
#[macro_export]
macro_rules! sequence {
    ($(look: $($look:literal),*;)? $($body:literal),* ; abort: $abort:literal) => {
        $crate::critical!(
            "movsxd {t}, dword ptr fs:[{offset} + 4]",
            $($($look,)*)?
            "mov {t}, qword ptr [{table} + {t} * 8 + {first}]",
            $($body),*;
            abort: $abort
        )
    };
}

/// Pops the topmost object of the stack at `place` into `value`, which is null if there is none.
/// `look` checks the object before the commit, and refuses null. `then` runs after the commit.
/// Changes `place`, `offset`, `t` and `next`.
///
/// ```text
/// place := region + place
/// offset := head
/// value := cell below the head
/// next := offset - 8
/// code of `look`, which goes to end if it refuses value
/// head := next (commit)
/// code of `then`
/// abort: value := null
/// ```
///
/// | register | holds |
/// |---|---|
/// | `place` | offset, then address of the stack |
/// | `offset` | offset of the rseq area, then the old head; free for `look` |
/// | `t` | the CPU's id, then its region; free for `look` |
/// | `next` | the new head |
/// | `value` | the object |
#[doc(hidden)]
#[macro_export]
macro_rules! pop_sequence {
    () => {
        $crate::pop_sequence!(look: "test {value}, {value}", "jz 23f"; then:)
    };
    (look: $($look:literal),*; then: $($then:literal),*) => {
        $crate::sequence!(
            "add {place}, {t}",
            "mov {offset}, qword ptr [{place}]",
            "mov {value}, qword ptr [{offset} - 8]",
            "lea {next}, [{offset} - 8]",
            $($look,)*
            "mov qword ptr [{place}], {next}",
            "22:"
            $(, $then)*;
            abort: "xor {value:e}, {value:e}"
        )
    };
}

/// Pushes `value` on the stack at `place` if the low 16 bits of the CPU's id equal `home`,
/// otherwise on the next stack behind it. Changes `place`, `home` and `t`.
///
/// ```text
/// look: if the low 16 bits of t, the CPU's id, and of home differ: place := place + 24
/// place := region + place
/// t := head
/// if t = end of the stack: go to full
/// cell at t := value
/// head := head + 8 (commit)
/// abort: go to aborted
/// ```
///
/// | register | holds |
/// |---|---|
/// | `place` | offset, then address of the stack |
/// | `home` | the object's home, then the offset of the next stack |
/// | `t` | the CPU's id, its region, then the old head |
/// | `value` | the object |
#[doc(hidden)]
#[macro_export]
macro_rules! push_sequence {
    () => {
        $crate::sequence!(
            look: "cmp {t:x}, {home:x}", "lea {home:e}, [{place} + 24]", "cmovne {place:e}, {home:e}";
            "add {place}, {t}",
            "mov {t}, qword ptr [{place}]",
            "cmp {t}, qword ptr [{place} + 16]",
            "je {full}",
            "mov qword ptr [{t}], {value}",
            "add qword ptr [{place}], 8",
            "22:";
            abort: "jmp {aborted}"
        )
    };
}
