//! The sequences of [`rseq`](crate::rseq) on words. Each function has the contract of the function
//! with the same name there.

use crate::rseq::{Counted, SequenceResult};
use core::arch::asm;
use core::sync::atomic::AtomicPtr;

#[inline(always)]
pub(crate) unsafe fn add(offset: isize, offsets: *const usize, cpus: usize, base: usize, value: i64) -> bool {
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
        // Registers: offset: offset of the rseq area. t: the CPU's id, then the offset of its word.
        // table: address of the table. offsets, cpus, base, value: the arguments.
        asm!(
            critical!(
                "mov {t:e}, dword ptr fs:[{offset} + 4]",
                "cmp {t}, {cpus}",
                "jae {refused}",
                "mov {table}, qword ptr [{offsets}]",
                "test {table}, {table}",
                "jz {refused}",
                "mov {t}, qword ptr [{table} + {t} * 8]",
                "cmp {t}, -1",
                "je {refused}",
                "add qword ptr [{base} + {t}], {value}",
                "22:";
                abort: "jmp {refused}"
            ),
            offset = in(reg) offset, offsets = in(reg) offsets, cpus = in(reg) cpus, base = in(reg) base,
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
        // Registers: offset: offset of the rseq area. t: the CPU's id, then the address of its
        // word. new: the new value of the word. offsets, cpus, base, value, mask: the arguments.
        asm!(
            critical!(
                "mov {t:e}, dword ptr fs:[{offset} + 4]",
                "cmp {t}, {cpus}",
                "jae {refused}",
                "mov {t}, qword ptr [{offsets} + {t} * 8]",
                "add {t}, {base}",
                "mov {new}, qword ptr [{t}]",
                "add {new}, {value}",
                "mov qword ptr [{t}], {new}",
                "22:",
                "test {new}, {mask}",
                "jnz {beyond}";
                abort: "jmp {refused}"
            ),
            offset = in(reg) offset, offsets = in(reg) offsets, cpus = in(reg) cpus, base = in(reg) base,
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
                "mov {word}, qword ptr [{t} + {place} * 8]",
                "mov {number}, {word}",
                "xor {number}, {tag}",
                "sub {number}, {low}",
                "cmp {number}, {span}",
                "ja {refused}",
                "add {word}, {delta}",
                "mov qword ptr [{t} + {place} * 8], {word}",
                "22:";
                abort: "jmp {aborted}"
            ),
            offset = in(reg) offset, table = in(reg) regions, first = const 0, place = in(reg) place,
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
    // SAFETY: the caller promises a valid table, whose addresses lead to words. The only store is
    // the commit, into this CPU's word.
    unsafe {
        // t := cpu_id of this thread
        // if t >= cpus: go to refused
        // t := table[t]; if it is 0: go to refused
        // word at t + 8 * word += 1 (commit)
        // abort: go to refused
        //
        // Registers: offset: offset of the rseq area. t: the CPU's id, then the address of its
        // words. table, cpus, word: the arguments.
        asm!(
            critical!(
                "mov {t:e}, dword ptr fs:[{offset} + 4]",
                "cmp {t}, {cpus}",
                "jae {refused}",
                "mov {t}, qword ptr [{table} + {t} * 8]",
                "test {t}, {t}",
                "jz {refused}",
                "add qword ptr [{t} + {word} * 8], 1",
                "22:";
                abort: "jmp {refused}"
            ),
            offset = in(reg) offset, table = in(reg) table, cpus = in(reg) cpus, word = in(reg) word, t = out(reg) _,
            refused = label { return false },
            options(nostack),
        );
    }
    true
}
