//! Restartable sequences: three operations on a table of per-CPU stacks, without a lock and without a locked instruction.
//!
//! Sits between the kernel's rseq (registered by the C library, never by neap) and the slots of `neap-objects`. A
//! sequence reads the CPU id, follows pointers, and commits by its last instruction, one store; if the thread is
//! preempted, migrated or signalled before that, the kernel sends it to the abort exit and nothing has happened.
//!
//! ```text
//! Table { cpus, rows } -> row of this CPU (1 KiB) -> stack { next, count, capacity, cells[] }
//! ```
//!
//! Rules kept here (the measurements and the forms that broke are told in ARCHITECTURE.md, "Rseq slots"):
//! * the first instruction of a sequence directly follows the store to `rseq_cs`: a signal in a gap would disarm it;
//! * nothing is written through the stack pointer before every check has passed, and the commit is the last instruction;
//! * the count is loaded and stored through the same plain `base + 8` address: an indexed load of it costs 5 ns;
//! * no call, no system call and no use of the machine stack inside;
//! * `cpu_id` is read, never `cpu_id_start`; neither is written. An unregistered thread has the id -1 or -2, which no
//!   table is long enough for: the same compare that closes a table sends it to the shared path.
//!
//! Takes no lock, never retries: one attempt, one answer. Signal-safe. A child of `vfork` shares its parent's thread
//! area and must not call these.
//!
//! Source: Linux `kernel/rseq.c`, `include/uapi/linux/rseq.h`.

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// Bytes from one CPU's row to the next, as a power of two: 128 pointers.
pub const ROW_SHIFT: usize = 10;

/// Pointers in one row.
pub const ROW_LENGTH: usize = (1 << ROW_SHIFT) / size_of::<usize>();

/// The head of a stack of pointers; its cells follow directly in memory.
#[repr(C, align(8))]
#[derive(Debug)]
pub struct Stack {
    /// For whoever owns the stack while it is in no row (a list of stacks).
    pub next: AtomicPtr<Stack>,
    /// Cells in use. In a row: written by sequences of that row's CPU alone.
    pub count: AtomicU32,
    /// Cells there are. Never changes while the stack is in a row.
    pub capacity: AtomicU32,
}

/// What the sequences start from. `cpus` = 0 closes the table: every operation fails until it is opened again.
#[repr(C)]
#[derive(Debug)]
pub struct Table {
    /// Rows there are; 0 closes the table.
    pub cpus: AtomicU32,
    /// Where the thread's rseq area lies from its thread pointer.
    pub offset: AtomicU32,
    /// The rows: one per CPU, each [`ROW_LENGTH`] pointers to stacks, none of them null.
    pub rows: AtomicPtr<AtomicPtr<Stack>>,
}

impl Table {
    /// A closed table without rows.
    pub const fn closed() -> Table {
        Table { cpus: AtomicU32::new(0), offset: AtomicU32::new(0), rows: AtomicPtr::new(core::ptr::null_mut()) }
    }
}

/// One attempt's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It happened.
    Committed,
    /// The stack was empty (pop) or full (push), the entry was not the expected one (exchange), or the table is closed.
    Refused,
    /// The thread was interrupted; nothing happened.
    Aborted,
}

// Weak: a C library before 2.35, or another one, has none of these, and that is an answer too.
global_asm!(".weak __rseq_offset", ".weak __rseq_size");

/// Reads a 64-bit (`__rseq_offset`) or 32-bit (`__rseq_size`) variable of the C library through the GOT; 0 if there is none.
macro_rules! weak_variable {
    ($name:literal, $read:literal) => {{
        let value: usize;
        // SAFETY: loads the address from the GOT, and from it only where it is not null.
        unsafe {
            asm!(concat!("mov {0}, qword ptr [rip + ", $name, "@GOTPCREL]"), "test {0}, {0}", "jz 2f", $read, "2:",
                out(reg) value, options(nostack, readonly));
        }
        value
    }};
}

/// Where the C library's rseq area of a thread lies from the thread pointer; `None` where it has registered none
/// (an older library, `GLIBC_TUNABLES=glibc.pthread.rseq=0`, valgrind, a sandbox).
pub fn registered_offset() -> Option<usize> {
    let size = weak_variable!("__rseq_size", "mov {0:e}, dword ptr [{0}]");
    if size == 0 {
        return None;
    }
    let offset = weak_variable!("__rseq_offset", "mov {0}, qword ptr [{0}]");
    (offset != 0 && offset < 1 << 31).then_some(offset)
}

/// The CPU this thread is on; `None` for a thread that is not registered.
pub fn current_cpu() -> Option<usize> {
    registered_offset().and_then(|offset| cpu_at(offset))
}

/// The same where [`registered_offset`] is known already.
#[inline]
pub fn cpu_at(offset: usize) -> Option<usize> {
    let cpu: u32;
    // SAFETY: the C library keeps a `struct rseq` at this offset for every thread; cpu_id is its second word.
    unsafe {
        asm!("mov {0:e}, dword ptr fs:[{1} + 4]", out(reg) cpu, in(reg) offset, options(nostack, readonly, preserves_flags))
    };
    (cpu < u32::MAX - 15).then_some(cpu as usize)
}

impl Table {
    /// The CPU this thread is on where the table has a row for it and is open.
    #[inline]
    pub fn current_row(&self) -> Option<usize> {
        let cpus = self.cpus.load(Ordering::Relaxed) as usize;
        if cpus == 0 {
            return None;
        }
        cpu_at(self.offset.load(Ordering::Relaxed) as usize).filter(|&cpu| cpu < cpus)
    }
}

/// The descriptor that the kernel reads, the abort exit with its signature, both out of the way of the hot code.
macro_rules! sequence {
    ($($body:literal),* ; abort: $($abort:literal),*) => {
        concat!(
            ".pushsection __rseq_cs, \"aw\", @progbits\n.balign 32\n",
            "20: .long 0, 0\n.quad 21f, 22f - 21f, 24f\n.popsection\n",
            "lea {t}, [rip + 20b]\n",
            "mov qword ptr fs:[{offset} + 8], {t}\n",
            "21:\n",
            "mov {t:e}, dword ptr fs:[{offset} + 4]\n",
            "cmp {t:e}, dword ptr [{table}]\n",
            "jae 23f\n",
            "shl {t}, 10\n",
            "add {t}, qword ptr [{table} + 8]\n",
            $($body, "\n",)*
            ".pushsection __rseq_failure, \"ax\", @progbits\n",
            ".byte 0x0f, 0xb9, 0x3d\n.long 0x53053053\n",
            "24:\n", $($abort, "\n",)* "jmp 23f\n.popsection\n",
            "23:\n",
        )
    };
}

/// Takes the topmost pointer of this CPU's stack in column `column`. The pointer is null
/// unless the outcome is `Committed`.
///
/// # Safety
/// `table` is closed, or its rows and the stacks they point to are laid out as described at the top, stay mapped, and
/// `offset` is [`registered_offset`].
#[inline(always)]
pub unsafe fn pop(table: &Table, column: usize) -> (*mut u8, Outcome) {
    let value: *mut u8;
    // SAFETY: as the caller promises; the only store is the commit, into the count of a stack in this CPU's row.
    unsafe {
        asm!(
            "xor {value:e}, {value:e}",
            sequence!(
                "mov {t}, qword ptr [{t} + {column} * 8]",
                "mov {count:e}, dword ptr [{t} + 8]",
                "dec {count:e}",
                "cmp {count:e}, dword ptr [{t} + 12]",
                "jae 23f",
                "mov {value}, qword ptr [{t} + 16 + {count} * 8]",
                "mov dword ptr [{t} + 8], {count:e}",
                "22:";
                abort: "mov {value}, -1"
            ),
            table = in(reg) table, offset = in(reg) table.offset.load(Ordering::Relaxed) as usize, column = in(reg) column,
            t = out(reg) _, count = out(reg) _, value = out(reg) value,
            options(nostack),
        );
    }
    match value.addr() {
        0 => (value, Outcome::Refused),
        usize::MAX => (core::ptr::null_mut(), Outcome::Aborted),
        _ => (value, Outcome::Committed),
    }
}

/// Puts `value` (neither null nor all ones) on this CPU's stack in column `column`.
///
/// # Safety
/// As for [`pop`].
#[inline(always)]
pub unsafe fn push(table: &Table, column: usize, value: *mut u8) -> Outcome {
    let status: u32;
    // SAFETY: as the caller promises; the cell above the count is nobody's until the commit.
    unsafe {
        asm!(
            "mov {status:e}, 1",
            sequence!(
                "mov {t}, qword ptr [{t} + {column} * 8]",
                "mov {count:e}, dword ptr [{t} + 8]",
                "cmp {count:e}, dword ptr [{t} + 12]",
                "jae 23f",
                "mov qword ptr [{t} + 16 + {count} * 8], {value}",
                "inc {count:e}",
                "mov dword ptr [{t} + 8], {count:e}",
                "22:",
                "xor {status:e}, {status:e}";
                abort: "mov {status:e}, 2"
            ),
            table = in(reg) table, offset = in(reg) table.offset.load(Ordering::Relaxed) as usize, column = in(reg) column,
            value = in(reg) value, t = out(reg) _, count = out(reg) _, status = out(reg) status,
            options(nostack),
        );
    }
    outcome(status)
}

/// Puts the stack `new` into this CPU's row at `column` if `expected` is there; the caller owns `expected` then.
///
/// The commit is one locked compare-and-exchange as the last instruction, so a sequence that is let run to its end can
/// still not overwrite what a remote taker has put there meanwhile.
///
/// # Safety
/// As for [`pop`], and the caller owns `new`, which is initialised.
#[inline]
pub unsafe fn exchange(table: &Table, column: usize, expected: *mut Stack, new: *mut Stack) -> Outcome {
    let status: u32;
    // SAFETY: as the caller promises.
    unsafe {
        asm!(
            "mov {status:e}, 1",
            sequence!(
                "lock cmpxchg qword ptr [{t} + {column} * 8], {new}",
                "22:",
                "setne {status:l}";
                abort: "mov {status:e}, 2"
            ),
            table = in(reg) table, offset = in(reg) table.offset.load(Ordering::Relaxed) as usize, column = in(reg) column,
            new = in(reg) new, inout("rax") expected => _, t = out(reg) _, status = out(reg) status,
            options(nostack),
        );
    }
    outcome(status)
}

#[inline(always)]
fn outcome(status: u32) -> Outcome {
    match status {
        0 => Outcome::Committed,
        1 => Outcome::Refused,
        _ => Outcome::Aborted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;
    use std::vec::Vec;

    #[repr(C)]
    struct Sheaf {
        head: Stack,
        cells: [*mut u8; 4],
    }

    fn sheaf(capacity: u32) -> Box<Sheaf> {
        let head = Stack { next: AtomicPtr::default(), count: AtomicU32::new(0), capacity: AtomicU32::new(capacity) };
        Box::new(Sheaf { head, cells: [core::ptr::null_mut(); 4] })
    }

    /// A table whose every entry is one stack, so that it does not matter which CPU the test is on.
    fn table(stack: *mut Stack) -> Option<(Table, Vec<AtomicPtr<Stack>>)> {
        let offset = registered_offset()? as u32;
        let mut rows: Vec<_> = (0..256 * ROW_LENGTH).map(|_| AtomicPtr::new(stack)).collect();
        let table = Table {
            cpus: AtomicU32::new(256),
            offset: AtomicU32::new(offset),
            rows: AtomicPtr::new(rows.as_mut_ptr()),
        };
        Some((table, rows))
    }

    fn settled<T>(mut attempt: impl FnMut() -> (T, Outcome)) -> (T, Outcome) {
        loop {
            let (value, outcome) = attempt();
            if outcome != Outcome::Aborted {
                return (value, outcome);
            }
        }
    }

    fn pointer(value: usize) -> *mut u8 {
        core::ptr::without_provenance_mut(value)
    }

    #[test]
    fn a_stack_is_last_in_first_out_and_bounded() {
        let mut sheaf = sheaf(4);
        let Some((table, _rows)) = table(&raw mut sheaf.head) else { return };
        // SAFETY: the table and its one stack live to the end of the test, and only this thread uses them.
        unsafe {
            for value in 1..=4 {
                assert_eq!(settled(|| ((), push(&table, 1, pointer(value)))).1, Outcome::Committed);
            }
            assert_eq!(settled(|| ((), push(&table, 1, pointer(5)))).1, Outcome::Refused);
            for value in (1..=4).rev() {
                assert_eq!(settled(|| pop(&table, 1)), (pointer(value), Outcome::Committed));
            }
            assert_eq!(settled(|| pop(&table, 1)), (pointer(0), Outcome::Refused));
        }
    }

    #[test]
    fn a_closed_table_refuses_everything() {
        let mut sheaf = sheaf(4);
        let stack = &raw mut sheaf.head;
        let Some((table, rows)) = table(stack) else { return };
        table.cpus.store(0, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe {
            assert_eq!(settled(|| ((), push(&table, 0, pointer(1)))).1, Outcome::Refused);
            assert_eq!(settled(|| pop(&table, 0)).1, Outcome::Refused);
            assert_eq!(settled(|| ((), exchange(&table, 0, stack, stack))).1, Outcome::Refused);
        }
        assert!(rows.iter().all(|entry| entry.load(Ordering::Relaxed) == stack));
    }

    #[test]
    fn exchange_replaces_only_what_was_expected() {
        let (mut first, mut second) = (sheaf(4), sheaf(4));
        let (first, second) = (&raw mut first.head, &raw mut second.head);
        let Some((table, rows)) = table(first) else { return };
        // SAFETY: as above.
        unsafe {
            assert_eq!(settled(|| ((), exchange(&table, 2, second, second))).1, Outcome::Refused);
            assert_eq!(settled(|| ((), exchange(&table, 2, first, second))).1, Outcome::Committed);
        }
        assert_eq!(rows.iter().filter(|entry| entry.load(Ordering::Relaxed) == second).count(), 1);
    }
}
