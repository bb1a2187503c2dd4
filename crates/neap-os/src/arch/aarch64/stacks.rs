//! The sequences of [`rseq`](crate::rseq) on stacks. Each function has the contract of the function
//! with the same name there.

use super::area;
use crate::rseq::{SequenceResult, SequenceTable, UNREGISTERED};
use core::arch::asm;
use core::sync::atomic::{AtomicPtr, Ordering};

/// The entry of CPU 0, in front of which lie the entries of unregistered threads.
#[inline(always)]
fn first(table: &SequenceTable) -> *const AtomicPtr<u8> {
    table.regions.as_ptr().wrapping_add(UNREGISTERED)
}

#[inline(always)]
pub(crate) unsafe fn pop(table: &SequenceTable, place: usize) -> *mut u8 {
    let value: *mut u8;
    // SAFETY: the caller promises a valid table and stacks at `place`. The only store is the
    // commit, into the head of a stack of this CPU.
    unsafe {
        // The code and its registers: see `pop_sequence`.
        asm!(
            pop_sequence!(),
            area = in(reg) area(table.offset.load(Ordering::Relaxed)), first = in(reg) first(table),
            place = inout(reg) place => _, t = out(reg) _, next = out(reg) _, value = out(reg) value,
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
            area = in(reg) area(table.offset.load(Ordering::Relaxed)), first = in(reg) first(table),
            place = inout(reg) place => _, home = inout(reg) usize::from(home) => _, value = in(reg) value,
            t = out(reg) _,
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
            sequence!($($body),+, "22:"; abort: "b {aborted}"),
            area = in(reg) area($table.offset.load(Ordering::Relaxed)), first = in(reg) first($table),
            place = in(reg) $place, t = out(reg) _,
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
        // from := head - 8 * count
        // rest := bottom
        // if from < rest: go to refused
        // rest := from
        // if count = 0: go to done
        // next (25): value := cell at from; from := from + 8
        //            cell at to := value; to := to + 8
        //            count := count - 1; if count != 0: go to next
        // done (26): head := rest (commit)
        //
        // Registers: t: the region, then the stack. count: cells left. from: the next cell to read.
        // to: the next to write. value: the pointer read. rest: the bottom, then the new head.
        attempt!(
            table, place:
            "add {t}, {t}, {place}",
            "ldr {from}, [{t}]",
            "sub {from}, {from}, {count}, lsl #3",
            "ldr {rest}, [{t}, #8]",
            "cmp {from}, {rest}",
            "b.lo {refused}",
            "mov {rest}, {from}",
            "cbz {count}, 26f",
            "25:",
            "ldr {value}, [{from}], #8",
            "str {value}, [{to}], #8",
            "subs {count}, {count}, #1",
            "b.ne 25b",
            "26:",
            "str {rest}, [{t}]";
            rest = out(reg) _, from = out(reg) _, value = out(reg) _,
            count = inout(reg) to.len() => _, to = inout(reg) to.as_mut_ptr() => _
        )
    }
}

#[inline]
pub(crate) unsafe fn push_many(table: &SequenceTable, place: usize, from: &[*mut u8]) -> SequenceResult {
    // SAFETY: the caller promises a valid table and stack. The cells from the head on are below
    // `end`, as checked, and no thread reads them until the commit.
    unsafe {
        // t := region + place
        // to := head
        // total := to + 8 * count
        // value := end of the stack
        // if total > value: go to refused
        // if count = 0: go to done
        // next (25): value := cell at from; from := from + 8
        //            cell at to := value; to := to + 8
        //            count := count - 1; if count != 0: go to next
        // done (26): head := total (commit)
        //
        // Registers: t: the region, then the stack. count: cells left. from: the next cell to read.
        // to: the next to write. value: the stack's end, then the pointer read. total: the new
        // head.
        attempt!(
            table, place:
            "add {t}, {t}, {place}",
            "ldr {to}, [{t}]",
            "add {total}, {to}, {count}, lsl #3",
            "ldr {value}, [{t}, #16]",
            "cmp {total}, {value}",
            "b.hi {refused}",
            "cbz {count}, 26f",
            "25:",
            "ldr {value}, [{from}], #8",
            "str {value}, [{to}], #8",
            "subs {count}, {count}, #1",
            "b.ne 25b",
            "26:",
            "str {total}, [{t}]";
            total = out(reg) _, to = out(reg) _, value = out(reg) _,
            count = inout(reg) from.len() => _, from = inout(reg) from.as_ptr() => _
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
        // end := end of the stack
        // if total > end: go to refused
        // next (25): cell at cell := value; cell := cell + 8
        //            value := value + step
        //            if cell != total: go to next
        // head := total (commit)
        //
        // Registers: t: the region, then the stack. cell: the next cell to write. value: the next
        // pointer. step: bytes between pointers. total: the count, then the new head. end: the
        // stack's end.
        attempt!(
            table, place:
            "add {t}, {t}, {place}",
            "ldr {cell}, [{t}]",
            "add {total}, {cell}, {total}, lsl #3",
            "ldr {end}, [{t}, #16]",
            "cmp {total}, {end}",
            "b.hi {refused}",
            "25:",
            "str {value}, [{cell}], #8",
            "add {value}, {value}, {step}",
            "cmp {cell}, {total}",
            "b.ne 25b",
            "str {total}, [{t}]";
            value = inout(reg) value => _, step = in(reg) step, total = inout(reg) count => _, cell = out(reg) _,
            end = out(reg) _
        )
    }
}

#[inline]
pub(crate) unsafe fn raise_capacity(table: &SequenceTable, place: usize, capacity: u32) -> SequenceResult {
    // SAFETY: the caller promises a valid table and stack. The only store is the commit, into the
    // stack's `end`.
    unsafe {
        // end := mark of the region
        // if end = 0: go to refused
        // t := region + place
        // end := bottom; old := end of the stack
        // end := max(end + 8 * capacity, old)
        // end of the stack := end (commit)
        //
        // Registers: t: the region, then the stack. capacity: the new capacity. end: the region's
        // mark, then the new end. old: the old end.
        attempt!(
            table, place:
            "ldr {end:w}, [{t}]",
            "cbz {end:w}, {refused}",
            "add {t}, {t}, {place}",
            "ldp {end}, {old}, [{t}, #8]",
            "add {end}, {end}, {capacity}, lsl #3",
            "cmp {end}, {old}",
            "csel {end}, {old}, {end}, lo",
            "str {end}, [{t}, #16]";
            capacity = in(reg) capacity as usize, end = out(reg) _, old = out(reg) _
        )
    }
}
