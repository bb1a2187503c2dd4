//! Restartable sequences on per-CPU stacks of pointers and on per-CPU words, without a lock or a
//! locked instruction.
//!
//! The C library registers threads for the kernel's rseq; neap never does. The users are the slots
//! of `neap-objects`, the words of `neap-percpu`, memory groups and RCU.
//!
//! # Design
//!
//! A sequence reads the CPU id, loads the pointer to that CPU's region, and finds a stack in the
//! region. Its last instruction commits: it stores one word. If the thread is preempted, migrated
//! or signalled before, the kernel continues it at the abort exit, and nothing has happened.
//!
//! ```text
//! Table { offset, regions } -> pointer of this CPU -> region
//! region: writable | head, bottom, end | head, bottom, end | ... and cells
//!                    ^ at the stack's place
//! ```
//!
//! # Invariants
//!
//! * The first instruction of a sequence directly follows the store to `rseq_cs`. A signal in a gap
//!   would disarm the sequence.
//! * No visible word is written before every check has passed. The commit is the last instruction.
//! * No call, no system call and no use of the machine stack inside.
//! * `cpu_id` is read, never `cpu_id_start`; neither is written.
//! * An unregistered thread has the id -1 or -2. The table has entries for these ids, which lead to
//!   a region whose stacks have no room and no objects. In a closed table every entry does. So no
//!   sequence compares the id.
//! * A pop checks the cell and not the bottom: the cell below the lowest holds null and is never
//!   written.
//! * Only a thread that has fenced the CPU writes to a stack besides sequences.
//!
//! The forms are chosen for speed:
//!
//! * A stack holds pointers to cells, not an index. With `[base + index * 8]` a pop after a push
//!   waits longer for the stored word than with `[base]`.
//! * A push adds to the head in memory, which saves an instruction and keeps `free` on two cache
//!   lines. A pop stores the new head from a register, which is faster when the class changes
//!   between pops.
//! * The region pointers lie in the table itself, at an address known at link time. This saves one
//!   dependent load.
//!
//! # Concurrency
//!
//! Takes no lock and never retries: each call is one attempt. Signal-safe. A child of `vfork`
//! shares its parent's thread area. Therefore the parent [leaves](leave) rseq before. A child of
//! `clone(CLONE_VM)` must not call these functions.
//!
//! Source: Linux `kernel/rseq.c`, `include/uapi/linux/rseq.h`.

use core::arch::asm;
use core::mem::offset_of;
use core::sync::atomic::{AtomicIsize, AtomicPtr, Ordering};

/// A stack in a region. Its cells are pointers and lie in the same region.
#[repr(C)]
#[derive(Debug)]
pub struct Stack {
    /// The cell above the topmost object.
    pub head: AtomicPtr<*mut u8>,
    /// The lowest cell; the cell below it holds null. Constant while the region is in a table.
    pub bottom: AtomicPtr<*mut u8>,
    /// The cell above the highest. If it equals `bottom`, every operation takes the slow path.
    pub end: AtomicPtr<*mut u8>,
}

/// Entries of a table in front of CPU 0's: for -1 and -2, the ids of unregistered threads.
pub const UNREGISTERED: usize = 2;

/// CPUs that a table has entries for: the maximum of the largest kernels.
pub const MOST_CPUS: usize = 8192;

/// The start of all sequences, on cache lines of its own.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Table {
    /// Offset of the thread's rseq area from its thread pointer. Read by all threads, and kept
    /// apart from the entries, which takers write.
    pub offset: AtomicIsize,
    apart: [usize; 7],
    /// Pointers to the regions: [`UNREGISTERED`] entries, then one for each CPU that the kernel may
    /// name.
    pub regions: [AtomicPtr<u8>; UNREGISTERED + MOST_CPUS],
}

impl Table {
    /// Creates a table that no sequence may use yet.
    pub const fn unopened() -> Table {
        let regions = [const { AtomicPtr::new(core::ptr::null_mut()) }; UNREGISTERED + MOST_CPUS];
        Table { offset: AtomicIsize::new(0), apart: [0; 7], regions }
    }

    /// Offset of CPU 0's entry in bytes.
    pub const FIRST: usize = offset_of!(Table, regions) + UNREGISTERED * size_of::<AtomicPtr<u8>>();
}

/// Result of one attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The operation took effect.
    Committed,
    /// The stack has too few objects (pop) or too little room (push).
    Refused,
    /// The thread was interrupted; nothing changed.
    Aborted,
}

/// Reads a 64-bit (`__rseq_offset`) or 32-bit (`__rseq_size`) variable of the C library through the
/// GOT. With an empty `$read`, returns its address. 0 if the C library has no such variable.
///
/// The symbol is weak, since C libraries other than glibc 2.35 and later lack it. Each use declares
/// it weak, since each object file that uses the name must do so.
macro_rules! weak_variable {
    ($name:literal, $read:literal) => {{
        let value: usize;
        // SAFETY: loads the address from the GOT, and reads from it only if it is not null.
        unsafe {
            core::arch::asm!(concat!(".weak ", $name), concat!("mov {0}, qword ptr [rip + ", $name, "@GOTPCREL]"), "test {0}, {0}", "jz 2f", $read, "2:",
                out(reg) value, options(nostack, readonly));
        }
        value
    }};
}
pub(crate) use weak_variable;

/// Whether the C library registers its threads. It does not if it is too old, under
/// `GLIBC_TUNABLES=glibc.pthread.rseq=0`, under valgrind, or in some sandboxes.
pub fn is_registered() -> bool {
    weak_variable!("__rseq_size", "mov {0:e}, dword ptr [{0}]") != 0
}

/// Offset of a thread's rseq area from the thread pointer, if the C library [registers
/// threads](is_registered). It lies in the thread's control block, behind the pointer, or, from
/// glibc 2.41 on, in front of it with thread-local variables. Never 0, where the pointer itself is.
pub fn registered_offset() -> Option<isize> {
    let offset = weak_variable!("__rseq_offset", "mov {0}, qword ptr [{0}]");
    (is_registered() && offset != 0).then_some(offset.cast_signed())
}

/// Whether the kernel has the call that registers a thread, and a sandbox allows it.
pub fn may_register() -> bool {
    let number = linux_raw_sys::general::__NR_rseq as usize;
    // SAFETY: nothing is registered at address 0 with length 0; the kernel checks the arguments and
    // refuses.
    let answer = unsafe { crate::syscall::syscall5(number, 0, 0, 0, 0, 0) };
    matches!(answer, Err(crate::Errno::INVAL | crate::Errno::BUSY | crate::Errno::FAULT))
}

/// Whether the processor has the instructions of malloc's and free's sequences: `tzcnt` and shifts
/// that preserve the flags (BMI1 and BMI2; Intel since 2013, AMD since 2015).
pub fn has_instructions() -> bool {
    const BOTH: u32 = 1 << 3 | 1 << 8;
    let leaf = |leaf| core::arch::x86_64::__cpuid_count(leaf, 0);
    leaf(0).eax >= 7 && leaf(7).ebx & BOTH == BOTH
}

/// The CPU that this thread is on; `None` if the thread is not registered.
pub fn current_cpu() -> Option<usize> {
    registered_offset().and_then(cpu_at)
}

/// The CPU that this thread is on, with the [`registered_offset`] given; `None` if the thread is
/// not registered.
#[inline]
pub fn cpu_at(offset: isize) -> Option<usize> {
    let cpu: u32;
    // SAFETY: the caller passes the registered offset. There the C library keeps a `struct rseq`
    // for every thread, whose second word is `cpu_id`.
    unsafe {
        asm!("mov {0:e}, dword ptr fs:[{1} + 4]", out(reg) cpu, in(reg) offset, options(nostack, readonly, preserves_flags))
    };
    (cpu < u32::MAX - 15).then_some(cpu as usize)
}

/// Begin and end of every sequence: the descriptor that the kernel reads, and the abort exit with
/// its signature, both outside the hot code. Descriptors lie in the section that is read-only after
/// relocation: they are never written, and pages of their own would cost two more faults. The body
/// has `22:` behind its commit; `23:` is the end. Labels from 25 on are free for the body and its
/// surroundings.
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

/// Unwind information for code from `start` to `end` that lies outside its function, in the
/// function's section. The code unwinds as if it had been called from an equal distance behind
/// `like`, without a return address on the stack. From `like` on the function has as much code,
/// with the same stack pointer.
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
/// region, whose address is in `t` when the body starts. `look` runs while `t` holds the id; it
/// changes only registers that it names. `first` is the table's [`Table::FIRST`].
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

/// Pops the topmost object of the stack at `place` into `value`; null if there is none. `look`
/// checks the object before the commit, and refuses null. `then` runs after the commit. Changes
/// `place`, `offset`, `t` and `next`.
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

mod leaving;
mod words;

pub use leaving::{Left, enter, leave};
pub use words::{Counted, add, alter, count, count_one};

/// Pops the topmost pointer of this CPU's stack at `place` (bytes from the start of a region). Null
/// if the pop was refused or aborted.
///
/// # Safety
/// * The table holds [`registered_offset`], and a region for each entry, as [`Table`] describes.
/// * The regions have stacks at `place`, and stay mapped.
#[inline(always)]
pub unsafe fn pop(table: &Table, place: usize) -> *mut u8 {
    let value: *mut u8;
    // SAFETY: the caller promises a valid table and stacks at `place`. The only store is the
    // commit, into the head of a stack of this CPU.
    unsafe {
        asm!(
            pop_sequence!(),
            offset = inout(reg) table.offset.load(Ordering::Relaxed) => _,
            table = in(reg) table, first = const Table::FIRST, place = inout(reg) place => _,
            t = out(reg) _, next = out(reg) _, value = out(reg) value,
            options(nostack),
        );
    }
    value
}

/// Pushes `value` (not null) on this CPU's stack at `place` if the low 16 bits of the CPU's id are
/// `home`; otherwise on the next stack behind it.
///
/// # Safety
/// As for [`pop`], with a second stack behind the one at `place`.
#[inline(always)]
pub unsafe fn push(table: &Table, place: usize, home: u16, value: *mut u8) -> Outcome {
    // SAFETY: the caller promises a valid table and both stacks. The store before the commit goes
    // to the cell at the head, which no thread reads until the commit.
    unsafe {
        asm!(
            push_sequence!(),
            offset = in(reg) table.offset.load(Ordering::Relaxed),
            table = in(reg) table, first = const Table::FIRST, place = inout(reg) place => _,
            home = inout(reg) usize::from(home) => _, value = in(reg) value, t = out(reg) _,
            full = label { return Outcome::Refused },
            aborted = label { return Outcome::Aborted },
            options(nostack),
        );
    }
    Outcome::Committed
}

/// One attempt of a sequence at `place` that moves several pointers or none. Takes the body from
/// the region's address in `t` to the commit, and its operands. The body jumps to `refused` before
/// the commit.
macro_rules! attempt {
    ($table:ident, $place:ident: $($body:literal),+; $($operands:tt)*) => {{
        asm!(
            sequence!($($body),+, "22:"; abort: "jmp {aborted}"),
            offset = in(reg) $table.offset.load(Ordering::Relaxed),
            table = in(reg) $table, first = const Table::FIRST, place = in(reg) $place, t = out(reg) _,
            $($operands)*,
            refused = label { return Outcome::Refused },
            aborted = label { return Outcome::Aborted },
            options(nostack),
        );
        Outcome::Committed
    }};
}

/// Pops the topmost `to.len()` pointers of this CPU's stack at `place`, all or none. They keep the
/// order in which they lie in the stack.
///
/// # Safety
/// As for [`pop`].
#[inline]
pub unsafe fn pop_many(table: &Table, place: usize, to: &mut [*mut u8]) -> Outcome {
    // SAFETY: the caller promises a valid table and stack. The copies go to `to`, which has room
    // for them, and count only after the commit.
    unsafe {
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

/// Pushes all pointers of `from` on this CPU's stack at `place`, all or none.
///
/// # Safety
/// As for [`pop`]; no pointer is null.
#[inline]
pub unsafe fn push_many(table: &Table, place: usize, from: &[*mut u8]) -> Outcome {
    // SAFETY: the caller promises a valid table and stack. The cells from the head on are below
    // `end`, as checked, and no thread reads them until the commit.
    unsafe {
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

/// Pushes `count` pointers on this CPU's stack at `place`, all or none: `value`, and each further
/// one `step` bytes behind the one before.
///
/// # Safety
/// As for [`pop`]; there is at least one pointer, and none is null.
#[inline]
pub unsafe fn push_progression(table: &Table, place: usize, value: *mut u8, step: isize, count: usize) -> Outcome {
    // SAFETY: the caller promises a valid table and stack. The cells from the head on are below
    // `end`, as checked, and no thread reads them until the commit.
    unsafe {
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

/// Raises the capacity of this CPU's stack at `place` to `capacity` cells, if it is lower. Refused
/// if the region's first word is 0, which marks the region that must not be written.
///
/// # Safety
/// As for [`pop`]; the region has that many cells for the stack.
#[inline]
pub unsafe fn widen(table: &Table, place: usize, capacity: u32) -> Outcome {
    // SAFETY: the caller promises a valid table and stack. The only store is the commit, into the
    // stack's `end`.
    unsafe {
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

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicU32;
    use std::boxed::Box;
    use std::vec;
    use std::vec::Vec;

    /// A region with two stacks: without room at place 1, with four cells behind it.
    #[repr(C)]
    struct Region {
        writable: u64,
        full: Stack,
        stack: Stack,
        before: u64,
        none: *mut u8,
        cells: [*mut u8; 4],
        after: u64,
    }

    const FULL: usize = size_of::<u64>();
    const STACK: usize = FULL + size_of::<Stack>();
    /// A value of `home` that no CPU of this machine has.
    const ELSEWHERE: u16 = u16::MAX;

    /// Creates a table in which one region serves every entry, so the test may run on any CPU.
    fn table(capacity: usize) -> Option<(Box<Table>, Box<Region>)> {
        let offset = registered_offset()?;
        let null = || AtomicPtr::new(core::ptr::null_mut());
        let [full, stack] = [(), ()].map(|()| Stack { head: null(), bottom: null(), end: null() });
        let mut region = Box::new(Region {
            writable: 1,
            full,
            stack,
            before: 7,
            none: pointer(0),
            cells: [pointer(0); 4],
            after: 7,
        });
        let cells = region.cells.as_mut_ptr();
        region.stack.head.store(cells, Ordering::Relaxed);
        region.stack.bottom.store(cells, Ordering::Relaxed);
        region.stack.end.store(cells.wrapping_add(capacity), Ordering::Relaxed);
        let table = Box::new(Table::unopened());
        table.offset.store(offset, Ordering::Relaxed);
        let region_start = (&raw mut *region).cast();
        table.regions.iter().for_each(|entry| entry.store(region_start, Ordering::Relaxed));
        Some((table, region))
    }

    /// Repeats an attempt until it is not aborted. (A pop cannot tell an abort from a refusal.)
    fn settled(mut attempt: impl FnMut() -> Outcome) -> Outcome {
        core::iter::repeat_with(&mut attempt).find(|&outcome| outcome != Outcome::Aborted).unwrap()
    }

    unsafe fn settled_pop(table: &Table) -> *mut u8 {
        // SAFETY: the caller promises a valid table with a stack at `STACK`.
        (0..100).map(|_| unsafe { pop(table, STACK) }).find(|value| !value.is_null()).unwrap_or_default()
    }

    fn pointer(value: usize) -> *mut u8 {
        core::ptr::without_provenance_mut(value)
    }

    /// Pushes from a CPU that is not the object's home.
    unsafe fn push_guest(table: &Table, value: usize) -> Outcome {
        // SAFETY: the caller promises a valid table with stacks at `FULL` and behind it.
        settled(|| unsafe { push(table, FULL, ELSEWHERE, pointer(value)) })
    }

    #[test]
    fn a_stack_is_last_in_first_out_and_bounded() {
        let Some((table, region)) = table(4) else { return };
        // SAFETY: the table and its one region live to the end of the test, and only this thread
        // uses them.
        unsafe {
            for value in 1..=4 {
                assert_eq!(push_guest(&table, value), Outcome::Committed);
            }
            assert_eq!(push_guest(&table, 5), Outcome::Refused);
            for value in (1..=4).rev() {
                assert_eq!(settled_pop(&table), pointer(value));
            }
            assert!(settled_pop(&table).is_null());
        }
        assert_eq!((region.before, region.after), (7, 7));
    }

    #[test]
    fn an_object_goes_to_the_first_stack_at_home_and_to_the_second_elsewhere() {
        let Some((table, region)) = table(4) else { return };
        let home = pin();
        // SAFETY: the table and its one region live to the end of the test, and only this thread
        // uses them.
        unsafe {
            assert_eq!(settled(|| push(&table, FULL, home, pointer(1))), Outcome::Refused);
            assert_eq!(push_guest(&table, 2), Outcome::Committed);
            // With the second stack's place, home has room, and no cell behind it is touched.
            assert_eq!(settled(|| push(&table, STACK, home, pointer(3))), Outcome::Committed);
            assert_eq!([settled_pop(&table), settled_pop(&table)], [3, 2].map(pointer));
        }
        assert_eq!((region.before, region.after), (7, 7));
    }

    /// Pins this thread to its current CPU, and returns the CPU.
    fn pin() -> u16 {
        // SAFETY: a zeroed set of CPUs is valid, and the calls only read or write it.
        unsafe {
            let cpu = libc::sched_getcpu();
            let mut set: libc::cpu_set_t = core::mem::zeroed();
            libc::CPU_SET(cpu as usize, &mut set);
            assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &set), 0);
            cpu as u16
        }
    }

    #[test]
    fn many_go_together_or_not_at_all() {
        let Some((table, region)) = table(4) else { return };
        let three = [1, 2, 3].map(pointer);
        let mut taken = [pointer(0); 2];
        // SAFETY: the table and its one region live to the end of the test, and only this thread
        // uses them.
        unsafe {
            assert_eq!(settled(|| push_many(&table, STACK, &three)), Outcome::Committed);
            assert_eq!(settled(|| push_many(&table, STACK, &three)), Outcome::Refused);
            assert_eq!(settled(|| pop_many(&table, STACK, &mut taken)), Outcome::Committed);
            assert_eq!(taken, [2, 3].map(pointer));
            assert_eq!(settled(|| pop_many(&table, STACK, &mut taken)), Outcome::Refused);
            assert_eq!(settled_pop(&table), pointer(1));
        }
        assert_eq!((region.before, region.after), (7, 7));
    }

    #[test]
    fn a_progression_goes_up_or_down_and_together() {
        let Some((table, region)) = table(4) else { return };
        // SAFETY: the table and its one region live to the end of the test, and only this thread
        // uses them.
        unsafe {
            let progression =
                |first, step, count| settled(|| push_progression(&table, STACK, pointer(first), step, count));
            assert_eq!(progression(48, 16, 5), Outcome::Refused);
            assert_eq!(progression(48, 16, 3), Outcome::Committed);
            assert_eq!(progression(7, 1, 2), Outcome::Refused);
            assert_eq!(progression(7, 1, 1), Outcome::Committed);
            assert_eq!([(); 5].map(|()| settled_pop(&table)), [7, 80, 64, 48, 0].map(pointer));
            assert_eq!(progression(64, -16, 4), Outcome::Committed);
            assert_eq!([(); 5].map(|()| settled_pop(&table)), [16, 32, 48, 64, 0].map(pointer));
        }
        assert_eq!((region.before, region.after), (7, 7));
    }

    /// Eight threads push and pop on all CPUs, interrupted by fences: the stacks hold exactly the
    /// pointers that were pushed and not popped. Runs until each operation on several pointers was
    /// interrupted.
    #[test]
    fn no_object_is_lost_between_threads() {
        const CELLS: usize = 64;
        let Some(offset) = registered_offset() else { return };
        // A region: one word, the stack at `FULL` without room, the next stack, null, and its
        // cells.
        let stack = STACK / size_of::<usize>();
        let length = stack + 4 + CELLS;
        let mut memory = vec![0_usize; crate::topology::nameable() * length];
        let table = Box::new(Table::unopened());
        table.offset.store(offset, Ordering::Relaxed);
        for (region, entry) in memory.chunks_mut(length).zip(&table.regions[UNREGISTERED..]) {
            let cells = region[stack + 4..].as_ptr().expose_provenance();
            region[0] = 1; // The region is writable.
            region[stack..stack + 3].copy_from_slice(&[cells, cells, cells + CELLS * size_of::<usize>()]);
            entry.store(region.as_mut_ptr().cast(), Ordering::Relaxed);
        }
        let aborted = [(); 4].map(|()| AtomicU32::new(0));
        // Number of pointers that an attempt moved.
        let moved = |which: usize, outcome: Outcome, count: isize| {
            aborted[which].fetch_add(u32::from(outcome == Outcome::Aborted), Ordering::Relaxed);
            if outcome == Outcome::Committed { count } else { 0 }
        };
        let fenced = crate::fence::register().is_ok();
        let all_aborted = || aborted.iter().all(|times| times.load(Ordering::Relaxed) > 0);
        let work = || {
            let mut left = 0_isize;
            for round in 0..50_000_000_u32 {
                // SAFETY: the table has a region for each CPU, which lives to the end of the test.
                // Only these calls change the stacks.
                unsafe {
                    left += isize::from(push(&table, FULL, ELSEWHERE, pointer(1)) == Outcome::Committed);
                    left -= isize::from(!pop(&table, STACK).is_null());
                    if round % 16 == 0 {
                        left += moved(0, push_progression(&table, STACK, pointer(8), 8, 7), 7);
                        left -= moved(1, pop_many(&table, STACK, &mut [pointer(0); 7]), 7);
                        left += moved(2, push_many(&table, STACK, &[pointer(1); 7]), 7);
                        left -= moved(1, pop_many(&table, STACK, &mut [pointer(0); 7]), 7);
                        moved(3, widen(&table, STACK, 1), 0);
                        if round > 2_000_000 && (!fenced || all_aborted()) {
                            break;
                        }
                    }
                }
            }
            left
        };
        let left: isize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(work)).collect();
            // Each fence interrupts the threads that run on other CPUs.
            while threads.iter().any(|thread| !thread.is_finished()) {
                let _ = crate::fence::all();
            }
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(!fenced || all_aborted(), "{aborted:?}");
        let there = memory.chunks(length).map(|region| (region[stack] - region[stack + 1]) / size_of::<usize>());
        assert_eq!(there.sum::<usize>() as isize, left);
    }

    #[test]
    fn a_stack_refuses_beyond_its_capacity_which_only_grows() {
        let Some((table, mut region)) = table(0) else { return };
        region.writable = 0;
        // SAFETY: the table and its one region live to the end of the test, and only this thread
        // uses them.
        assert_eq!(settled(|| unsafe { widen(&table, STACK, 1) }), Outcome::Refused);
        region.writable = 1;
        // SAFETY: the table and its one region live to the end of the test, and only this thread
        // uses them.
        unsafe {
            assert_eq!(push_guest(&table, 1), Outcome::Refused);
            assert_eq!(settled(|| widen(&table, STACK, 1)), Outcome::Committed);
            assert_eq!(push_guest(&table, 1), Outcome::Committed);
            assert_eq!(push_guest(&table, 2), Outcome::Refused);
            assert_eq!(settled(|| widen(&table, STACK, 3)), Outcome::Committed);
            assert_eq!(settled(|| widen(&table, STACK, 2)), Outcome::Committed);
            assert_eq!(
                [2, 3, 4].map(|value| push_guest(&table, value)),
                [Outcome::Committed, Outcome::Committed, Outcome::Refused]
            );
        }
    }
}
