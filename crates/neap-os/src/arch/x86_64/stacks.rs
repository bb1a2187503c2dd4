//! The sequences of [`rseq`](crate::rseq) on stacks. Each function has the contract of the function
//! with the same name there.

use crate::rseq::{SequenceResult, SequenceTable};
use core::arch::asm;
use core::sync::atomic::Ordering;

#[inline(always)]
pub(crate) unsafe fn pop(table: &SequenceTable, place: usize) -> *mut u8 {
    let value: *mut u8;
    // SAFETY: the caller promises a valid table and stacks at `place`. The only store is the
    // commit, into the head of a stack of this CPU.
    unsafe {
        // The code and its registers: see `pop_sequence`.
        asm!(
            pop_sequence!(),
            offset = inout(reg) table.offset.load(Ordering::Relaxed) => _,
            table = in(reg) table, first = const SequenceTable::FIRST, place = inout(reg) place => _,
            t = out(reg) _, next = out(reg) _, value = out(reg) value,
            options(nostack),
        );
    }
    value
}

#[inline(always)]
pub(crate) unsafe fn push(table: &SequenceTable, place: usize, home: u16, value: *mut u8) -> SequenceResult {
    // SAFETY: the caller promises a valid table and both stacks. The store before the commit goes
    // to the cell at the head, which no thread reads until the commit.
    unsafe {
        // The code and its registers: see `push_sequence`.
        asm!(
            push_sequence!(),
            offset = in(reg) table.offset.load(Ordering::Relaxed),
            table = in(reg) table, first = const SequenceTable::FIRST, place = inout(reg) place => _,
            home = inout(reg) usize::from(home) => _, value = in(reg) value, t = out(reg) _,
            full = label { return SequenceResult::Refused },
            aborted = label { return SequenceResult::Aborted },
            options(nostack),
        );
    }
    SequenceResult::Committed
}

/// Makes one attempt of a sequence on the stack at `place`. The arguments are the body and its
/// operands. The body begins with the region's address in `t`, and ends with the commit. To refuse,
/// it jumps to `refused` before the commit.
///
/// The code around the body, and its registers: see `sequence`.
macro_rules! attempt {
    ($table:ident, $place:ident: $($body:literal),+; $($operands:tt)*) => {{
        asm!(
            sequence!($($body),+, "22:"; abort: "jmp {aborted}"),
            offset = in(reg) $table.offset.load(Ordering::Relaxed),
            table = in(reg) $table, first = const SequenceTable::FIRST, place = in(reg) $place, t = out(reg) _,
            $($operands)*,
            refused = label { return SequenceResult::Refused },
            aborted = label { return SequenceResult::Aborted },
            options(nostack),
        );
        SequenceResult::Committed
    }};
}

#[inline]
pub(crate) unsafe fn pop_many(table: &SequenceTable, place: usize, to: &mut [*mut u8]) -> SequenceResult {
    // SAFETY: the caller promises a valid table and stack. The copies go to `to`, which has room
    // for them, and count only after the commit.
    unsafe {
        // t := region + place
        // rsi := head - 8 * rcx
        // if rsi < bottom: go to refused
        // rest := rsi
        // while rcx > 0: cell at rdi := cell at rsi; rdi += 8; rsi += 8; rcx -= 1
        // head := rest (commit)
        //
        // Registers: t: the region, then the stack. rcx: cells left. rsi: the next cell to read.
        // rdi: the next to write. rest: the new head.
        attempt!(
            table, place:
            "add {t}, {place}",
            "lea rsi, [rcx * 8]",
            "neg rsi",
            "add rsi, qword ptr [{t}]",
            "cmp rsi, qword ptr [{t} + 8]",
            "jl {refused}",
            "mov {rest}, rsi",
            "rep movsq",
            "mov qword ptr [{t}], {rest}";
            rest = out(reg) _, inout("rcx") to.len() => _, inout("rdi") to.as_mut_ptr() => _, out("rsi") _
        )
    }
}

#[inline]
pub(crate) unsafe fn push_many(table: &SequenceTable, place: usize, from: &[*mut u8]) -> SequenceResult {
    // SAFETY: the caller promises a valid table and stack. The cells from the head on are below
    // `end`, as checked, and no thread reads them until the commit.
    unsafe {
        // t := region + place
        // rdi := head
        // total := rdi + 8 * rcx
        // if total > end of the stack: go to refused
        // while rcx > 0: cell at rdi := cell at rsi; rdi += 8; rsi += 8; rcx -= 1
        // head := total (commit)
        //
        // Registers: t: the region, then the stack. rcx: cells left. rsi: the next cell to read.
        // rdi: the next to write. total: the new head.
        attempt!(
            table, place:
            "add {t}, {place}",
            "mov rdi, qword ptr [{t}]",
            "lea {total}, [rdi + rcx * 8]",
            "cmp {total}, qword ptr [{t} + 16]",
            "jg {refused}",
            "rep movsq",
            "mov qword ptr [{t}], {total}";
            total = out(reg) _, inout("rcx") from.len() => _, inout("rsi") from.as_ptr() => _, out("rdi") _
        )
    }
}

#[inline]
pub(crate) unsafe fn push_strided_run(
    table: &SequenceTable,
    place: usize,
    value: *mut u8,
    step: isize,
    count: usize,
) -> SequenceResult {
    // SAFETY: the caller promises a valid table and stack. The cells from the head on are below
    // `end`, as checked, and no thread reads them until the commit.
    unsafe {
        // t := region + place
        // cell := head
        // total := cell + 8 * count
        // if total > end of the stack: go to refused
        // next (25): cell at cell := value
        //            value := value + step
        //            cell := cell + 8; if cell != total: go to next
        // head := total (commit)
        //
        // Registers: t: the region, then the stack. cell: the next cell to write. value: the next
        // pointer. step: bytes between pointers. total: the count, then the new head.
        attempt!(
            table, place:
            "add {t}, {place}",
            "mov {cell}, qword ptr [{t}]",
            "lea {total}, [{cell} + {total} * 8]",
            "cmp {total}, qword ptr [{t} + 16]",
            "jg {refused}",
            "25:",
            "mov qword ptr [{cell}], {value}",
            "add {value}, {step}",
            "add {cell}, 8",
            "cmp {cell}, {total}",
            "jne 25b",
            "mov qword ptr [{t}], {total}";
            value = inout(reg) value => _, step = in(reg) step, total = inout(reg) count => _, cell = out(reg) _
        )
    }
}

#[inline]
pub(crate) unsafe fn raise_capacity(table: &SequenceTable, place: usize, capacity: u32) -> SequenceResult {
    // SAFETY: the caller promises a valid table and stack. The only store is the commit, into the
    // stack's `end`.
    unsafe {
        // if mark of the region = 0: go to refused
        // t := region + place
        // end := bottom + 8 * capacity
        // end := max(end, end of the stack)
        // end of the stack := end (commit)
        //
        // Registers: t: the region, then the stack. capacity: the new capacity. end: the new end.
        attempt!(
            table, place:
            "cmp dword ptr [{t}], 0",
            "je {refused}",
            "add {t}, {place}",
            "mov {end}, qword ptr [{t} + 8]",
            "lea {end}, [{end} + {capacity} * 8]",
            "cmp {end}, qword ptr [{t} + 16]",
            "cmovb {end}, qword ptr [{t} + 16]",
            "mov qword ptr [{t} + 16], {end}";
            capacity = in(reg) capacity as usize, end = out(reg) _
        )
    }
}
