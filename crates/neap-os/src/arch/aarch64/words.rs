//! The sequences of [`rseq`](crate::rseq) on words. Each function has the contract of the function
//! with the same name there.

use super::area;
use crate::rseq::{Counted, SequenceResult};
use core::arch::asm;
use core::sync::atomic::AtomicPtr;

#[inline(always)]
pub(crate) unsafe fn add(offset: isize, offsets: *const usize, cpus: usize, base: usize, value: i64) -> bool {
    // The table's address is loaded by an acquire load, which pairs with the Release store of the
    // thread that opens the table. That thread's earlier stores are visible to the caller, which
    // may use data that the word counts references to.
    // SAFETY: the caller promises a valid table, whose offsets lead to words. The only store is the
    // commit, into this CPU's word.
    unsafe {
        // t := cpu_id of this thread
        // if t >= cpus: go to refused
        // table := address at offsets; if it is 0: go to refused
        // t := table[t]; if it is -1: go to refused
        // word at base + t += value (commit)
        // abort: go to refused
        //
        // Registers: area: address of the rseq area. t: the CPU's id, then the offset of its word.
        // table: address of the table, then the new value of the word. offsets, cpus, base, value:
        // the arguments.
        asm!(
            critical!(
                "ldr {t:w}, [{area}, #4]",
                "cmp {t}, {cpus}",
                "b.hs {refused}",
                "ldar {table}, [{offsets}]",
                "cbz {table}, {refused}",
                "ldr {t}, [{table}, {t}, lsl #3]",
                "cmn {t}, #1",
                "b.eq {refused}",
                "ldr {table}, [{base}, {t}]",
                "add {table}, {table}, {value}",
                "str {table}, [{base}, {t}]",
                "22:";
                abort: "b {refused}"
            ),
            area = in(reg) area(offset), offsets = in(reg) offsets, cpus = in(reg) cpus, base = in(reg) base,
            value = in(reg) value, t = out(reg) _, table = out(reg) _,
            refused = label { return false },
            options(nostack),
        );
    }
    true
}

#[inline(always)]
pub(crate) unsafe fn count(offset: isize, offsets: usize, cpus: usize, base: usize, value: i64, mask: i64) -> Counted {
    // SAFETY: the caller promises a valid table, whose offsets lead to words. The only store is the
    // commit, into this CPU's word.
    unsafe {
        // t := cpu_id of this thread
        // if t >= cpus: go to refused
        // t := offsets[t] + base
        // new := word at t + value
        // word at t := new (commit)
        // if new has bits of mask: go to beyond
        // abort: go to refused
        //
        // Registers: area: address of the rseq area. t: the CPU's id, then the address of its word.
        // new: the new value of the word. offsets, cpus, base, value, mask: the arguments.
        asm!(
            critical!(
                "ldr {t:w}, [{area}, #4]",
                "cmp {t}, {cpus}",
                "b.hs {refused}",
                "ldr {t}, [{offsets}, {t}, lsl #3]",
                "add {t}, {t}, {base}",
                "ldr {new}, [{t}]",
                "add {new}, {new}, {value}",
                "str {new}, [{t}]",
                "22:",
                "tst {new}, {mask}",
                "b.ne {beyond}";
                abort: "b {refused}"
            ),
            area = in(reg) area(offset), offsets = in(reg) offsets, cpus = in(reg) cpus, base = in(reg) base,
            value = in(reg) value, mask = in(reg) mask, t = out(reg) _, new = out(reg) _,
            refused = label { return Counted::Refused },
            beyond = label { return Counted::Beyond },
            options(nostack),
        );
    }
    Counted::Within
}

#[inline(always)]
pub(crate) unsafe fn alter(
    offset: isize,
    regions: *const AtomicPtr<u8>,
    place: usize,
    tag: u64,
    low: u64,
    span: u64,
    delta: u64,
) -> SequenceResult {
    // SAFETY: the caller promises regions with a word at `place`. The only store is the commit,
    // into a word of this CPU that the checks have admitted.
    unsafe {
        // word := word at region + 8 * place
        // number := (word xor tag) - low
        // if number > span: go to refused
        // word at region + 8 * place := word + delta (commit)
        // abort: go to aborted
        //
        // Registers: t: the CPU's id, then its region. word: the old, then the new value of the
        // word. number: the word's number above low. place, tag, low, span, delta: the arguments.
        asm!(
            sequence!(
                "ldr {word}, [{t}, {place}, lsl #3]",
                "eor {number}, {word}, {tag}",
                "sub {number}, {number}, {low}",
                "cmp {number}, {span}",
                "b.hi {refused}",
                "add {word}, {word}, {delta}",
                "str {word}, [{t}, {place}, lsl #3]",
                "22:";
                abort: "b {aborted}"
            ),
            area = in(reg) area(offset), first = in(reg) regions, place = in(reg) place,
            tag = in(reg) tag, low = in(reg) low, span = in(reg) span, delta = in(reg) delta,
            t = out(reg) _, word = out(reg) _, number = out(reg) _,
            refused = label { return SequenceResult::Refused },
            aborted = label { return SequenceResult::Aborted },
            options(nostack),
        );
    }
    SequenceResult::Committed
}

#[inline(always)]
pub(crate) unsafe fn count_one(offset: isize, table: usize, cpus: usize, word: usize) -> bool {
    // The commit is a release store, which pairs with the Acquire load in `Rcu::sum`: a reader that
    // is seen to have left has done its accesses, and was seen to enter.
    // SAFETY: the caller promises a valid table, whose addresses lead to words. The only store is
    // the commit, into this CPU's word.
    unsafe {
        // t := cpu_id of this thread
        // if t >= cpus: go to refused
        // t := table[t]; if it is 0: go to refused
        // word at t + 8 * word += 1 (commit, a release store)
        // abort: go to refused
        //
        // Registers: area: address of the rseq area. t: the CPU's id, then the address of its words
        // or of the word. new: the new value of the word. table, cpus, word: the arguments.
        asm!(
            critical!(
                "ldr {t:w}, [{area}, #4]",
                "cmp {t}, {cpus}",
                "b.hs {refused}",
                "ldr {t}, [{table}, {t}, lsl #3]",
                "cbz {t}, {refused}",
                "add {t}, {t}, {word}, lsl #3",
                "ldr {new}, [{t}]",
                "add {new}, {new}, #1",
                "stlr {new}, [{t}]",
                "22:";
                abort: "b {refused}"
            ),
            area = in(reg) area(offset), table = in(reg) table, cpus = in(reg) cpus, word = in(reg) word,
            t = out(reg) _, new = out(reg) _,
            refused = label { return false },
            options(nostack),
        );
    }
    true
}
