//! Restartable sequences: operations on per-CPU stacks of pointers, and on per-CPU words, without a lock and without a locked
//! instruction.
//!
//! Sits between the kernel's rseq (registered by the C library, never by neap) and the slots of `neap-objects` and the words
//! of `neap-percpu` and RCU. A sequence reads the CPU id, loads the pointer of that CPU's region, finds a stack in it, and commits by its last
//! instruction, which stores one word; if the thread is preempted, migrated or signalled before that, the kernel sends it to the
//! abort exit and nothing has happened.
//!
//! ```text
//! Table { offset, regions } -> pointer of this CPU -> region: writable | head, bottom, end | head, bottom, end | ... and cells
//!                                                                      ^ at the stack's place
//! ```
//!
//! Rules kept here (the measurements and the forms that broke are in docs/design/fast-path.md):
//! * the first instruction of a sequence directly follows the store to `rseq_cs`: a signal in a gap would disarm it;
//! * nothing that counts is written before every check has passed, and the commit is the last instruction;
//! * a stack is pointers to cells, not a count and an index: with `[base + index * 8]` a pop that follows a push waits for
//!   16 cycles, with `[base]` for 6 (the processor forwards a store to a load before it knows their addresses);
//! * a push changes the head in place, an instruction less, which keeps `free` on two lines; a pop stores what it has worked out from the
//!   head that it loaded, which is faster than an instruction that loads the head once more where the next object is of another class
//!   than the last. Nobody else writes to it but who has fenced the CPU;
//! * the pointers to regions lie in the table itself, at an address that the program's code knows: all that a sequence does
//!   waits for one load after the other, and this is one less;
//! * a pop looks at the cell and not at the bottom: the cell below the lowest holds null, and is written by nobody;
//! * no call, no system call and no use of the machine stack inside;
//! * `cpu_id` is read, never `cpu_id_start`; neither is written. An unregistered thread has the id -1 or -2: the table has
//!   entries there, too, which lead to a region whose stacks have no room and no objects. So has a table that is closed,
//!   everywhere. No compare is needed for either.
//!
//! Takes no lock, never retries: one attempt, one answer. Signal-safe. A child of `vfork` shares its parent's thread
//! area: the parent [leaves](leave) before, and no child of `clone(CLONE_VM)` must call these.
//!
//! Source: Linux `kernel/rseq.c`, `include/uapi/linux/rseq.h`.

use core::arch::asm;
use core::mem::offset_of;
use core::sync::atomic::{AtomicIsize, AtomicPtr, Ordering};

/// A stack in a region; its cells, pointers, lie somewhere in the same region.
#[repr(C)]
#[derive(Debug)]
pub struct Stack {
    /// The cell above the topmost object.
    pub head: AtomicPtr<*mut u8>,
    /// The lowest cell; the one below it holds null. Never changes while the region is in a table.
    pub bottom: AtomicPtr<*mut u8>,
    /// The cell above the highest; the same as `bottom` sends every operation to the caller's slow path.
    pub end: AtomicPtr<*mut u8>,
}

/// Entries of a table below that of CPU 0: for -1 and -2, the ids of threads that are not registered.
pub const UNREGISTERED: usize = 2;

/// CPUs that a table has entries for: those of the largest kernels.
pub const MOST_CPUS: usize = 8192;

/// What the sequences start from, on cache lines of its own.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Table {
    /// Where the thread's rseq area lies from its thread pointer. Everybody reads it; what follows is written by takers.
    pub offset: AtomicIsize,
    apart: [usize; 7],
    /// One pointer per CPU that the kernel may name, to its region, behind those of [`UNREGISTERED`].
    pub regions: [AtomicPtr<u8>; UNREGISTERED + MOST_CPUS],
}

impl Table {
    /// A table that no sequence may start from yet.
    pub const fn unopened() -> Table {
        let regions = [const { AtomicPtr::new(core::ptr::null_mut()) }; UNREGISTERED + MOST_CPUS];
        Table { offset: AtomicIsize::new(0), apart: [0; 7], regions }
    }

    /// Where the entry of CPU 0 is, in bytes.
    pub const FIRST: usize = offset_of!(Table, regions) + UNREGISTERED * size_of::<AtomicPtr<u8>>();
}

/// One attempt's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It happened.
    Committed,
    /// The stack has too few objects (pop) or too little room (push).
    Refused,
    /// The thread was interrupted; nothing happened.
    Aborted,
}

/// Reads a 64-bit (`__rseq_offset`) or 32-bit (`__rseq_size`) variable of the C library through the GOT, or with nothing to read answers where it is; 0 if there is none.
///
/// Weak: a C library before 2.35, or another one, has none of these, and that is an answer too.
/// Each use says so, because each object file that uses the name has to.
macro_rules! weak_variable {
    ($name:literal, $read:literal) => {{
        let value: usize;
        // SAFETY: loads the address from the GOT, and from it only where it is not null.
        unsafe {
            core::arch::asm!(concat!(".weak ", $name), concat!("mov {0}, qword ptr [rip + ", $name, "@GOTPCREL]"), "test {0}, {0}", "jz 2f", $read, "2:",
                out(reg) value, options(nostack, readonly));
        }
        value
    }};
}
pub(crate) use weak_variable;

/// Whether the C library registers its threads; not if it is an older one, under `GLIBC_TUNABLES=glibc.pthread.rseq=0`, valgrind, or in a sandbox.
pub fn is_registered() -> bool {
    weak_variable!("__rseq_size", "mov {0:e}, dword ptr [{0}]") != 0
}

/// Where its area of a thread lies from the thread pointer, if it [registers threads](is_registered): in the thread's control block, behind the
/// pointer, or with thread-local variables, in front of it (glibc from 2.41 on). Never 0, where the pointer itself is.
pub fn registered_offset() -> Option<isize> {
    let offset = weak_variable!("__rseq_offset", "mov {0}, qword ptr [{0}]");
    (is_registered() && offset != 0).then_some(offset.cast_signed())
}

/// Whether the kernel knows the call that registers a thread, and a sandbox lets it through.
pub fn may_register() -> bool {
    let number = linux_raw_sys::general::__NR_rseq as usize;
    // SAFETY: nothing is registered at address 0 with length 0; the kernel only looks at the arguments and refuses.
    let answer = unsafe { crate::syscall::syscall5(number, 0, 0, 0, 0, 0) };
    matches!(answer, Err(crate::Errno::INVAL | crate::Errno::BUSY | crate::Errno::FAULT))
}

/// Whether the processor has what malloc's and free's sequences are made of beside loads and stores, counts of trailing zeros and shifts that leave the flags
/// alone (BMI1 and BMI2: Intel's since 2013, AMD's since 2015).
pub fn has_instructions() -> bool {
    const BOTH: u32 = 1 << 3 | 1 << 8;
    let leaf = |leaf| core::arch::x86_64::__cpuid_count(leaf, 0);
    leaf(0).eax >= 7 && leaf(7).ebx & BOTH == BOTH
}

/// The CPU this thread is on; `None` for a thread that is not registered.
pub fn current_cpu() -> Option<usize> {
    registered_offset().and_then(cpu_at)
}

/// The same where [`registered_offset`] is known already.
#[inline]
pub fn cpu_at(offset: isize) -> Option<usize> {
    let cpu: u32;
    // SAFETY: the C library keeps a `struct rseq` at this offset for every thread; cpu_id is its second word.
    unsafe {
        asm!("mov {0:e}, dword ptr fs:[{1} + 4]", out(reg) cpu, in(reg) offset, options(nostack, readonly, preserves_flags))
    };
    (cpu < u32::MAX - 15).then_some(cpu as usize)
}

/// What every sequence begins and ends with: the descriptor that the kernel reads, and the abort exit with its signature, both
/// out of the way of the hot code. Descriptors lie among what is read-only once it is relocated: nobody writes them, and on pages of their own they
/// cost every process two faults more. The body puts `22:` behind its commit; `23:` is the end. Labels from 25 on are free for what stands in and around it.
///
/// The abort exit unwinds as if the sequence had called it without a return address on the stack:
/// the frame of the exit begins at the stack pointer, and its return address is the start of the
/// sequence, whose function has its own unwind information. The distance to that start lies in an
/// instruction that nothing executes, at the start of the 32 bytes of each exit. The bytes of
/// `.cfi_escape` are `DW_CFA_val_expression` for `rip`: round `rip` down to a multiple of 32, and
/// add the eight bytes that lie two bytes behind.
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
/// function's section: what lies there unwinds as if it had been called from as far behind `like`,
/// without a return address on the stack. From `like` on the function has as much code, with the
/// stack pointer as it is in that code.
///
/// An assembler adds nothing to the unwind information of a function that it is within, but for
/// code in another section. So this is a record of `.eh_frame` with its own head. In its
/// instructions: the frame begins at `rsp` (`DW_CFA_def_cfa`), and the return address is `rip` and
/// the distance (`DW_CFA_val_expression` of `DW_OP_breg16`, `DW_OP_const2s` and `DW_OP_plus`).
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

/// The same with the way from the CPU id to the region, whose address is in `t` when the body starts; `look` is at the id, in `t`, and changes no
/// other register of the body's but what it says. `first` is [`Table::FIRST`], or what is that of another table.
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

/// Takes the topmost object, `value`, of the stack at `place`; null where there is none. `look` is at the object before it is taken, and refuses null;
/// `then` is done with it.
/// `place`, `offset`, `t` and `next` change.
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

/// Puts `value` on the stack at `place` if the low 16 bits of the CPU's id are those of `home`, or on the one behind that. `place`, `home` and `t` change.
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

/// Takes the topmost pointer of this CPU's stack at `place` (in bytes from the start of a region); null if that
/// was refused or aborted.
///
/// # Safety
/// The table is as described there, with [`registered_offset`] and regions that have stacks at `place`, and these stay mapped.
#[inline(always)]
pub unsafe fn pop(table: &Table, place: usize) -> *mut u8 {
    let value: *mut u8;
    // SAFETY: as the caller promises; the only store is the commit, into the head of a stack of this CPU.
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

/// Puts `value` (not null) on this CPU's stack at `place` if the low 16 bits of the CPU's id are `home`, on any other CPU on the stack behind that.
///
/// # Safety
/// As for [`pop`].
#[inline(always)]
pub unsafe fn push(table: &Table, place: usize, home: u16, value: *mut u8) -> Outcome {
    // SAFETY: as the caller promises; the cell at the head is nobody's until the commit.
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

/// One attempt of a sequence that moves several pointers, or none, at `place`: its body from the region's address in `t` to the commit, and the
/// operands of its own. It leaves for `refused` before that.
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

/// Takes the topmost `to.len()` pointers off this CPU's stack at `place`, in the order they lie there; all or none.
///
/// # Safety
/// As for [`pop`].
#[inline]
pub unsafe fn pop_many(table: &Table, place: usize, to: &mut [*mut u8]) -> Outcome {
    // SAFETY: as the caller promises; the copies go to the caller's own memory and count only after the commit.
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

/// Puts all of `from` on top of this CPU's stack at `place`; all or none.
///
/// # Safety
/// As for [`pop`]; no pointer is null.
#[inline]
pub unsafe fn push_many(table: &Table, place: usize, from: &[*mut u8]) -> Outcome {
    // SAFETY: as the caller promises; the cells from the head on are nobody's until the commit.
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

/// Puts `count` pointers on top of this CPU's stack at `place`: `value`, and each `step` bytes behind the one before; all or
/// none.
///
/// # Safety
/// As for [`pop`]; there is at least one pointer, and none is null.
#[inline]
pub unsafe fn push_progression(table: &Table, place: usize, value: *mut u8, step: isize, count: usize) -> Outcome {
    // SAFETY: as the caller promises; the cells from the head on are nobody's until the commit.
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

/// Raises the capacity of this CPU's stack at `place` to `capacity`, unless it has as much, or the region's first word is 0:
/// that marks the one region that nobody may write to.
///
/// # Safety
/// As for [`pop`]; the region has that many cells.
#[inline]
pub unsafe fn widen(table: &Table, place: usize, capacity: u32) -> Outcome {
    // SAFETY: as the caller promises; the only store is the commit.
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
    /// No CPU.
    const ELSEWHERE: u16 = u16::MAX;

    /// A table whose every entry is one region, so that it does not matter which CPU the test is on.
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

    /// Tries until it is not aborted. A pop that is aborted answers as one that is refused: several in a row are not chance.
    fn settled(mut attempt: impl FnMut() -> Outcome) -> Outcome {
        core::iter::repeat_with(&mut attempt).find(|&outcome| outcome != Outcome::Aborted).unwrap()
    }

    unsafe fn settled_pop(table: &Table) -> *mut u8 {
        // SAFETY: as the caller promises.
        (0..100).map(|_| unsafe { pop(table, STACK) }).find(|value| !value.is_null()).unwrap_or_default()
    }

    fn pointer(value: usize) -> *mut u8 {
        core::ptr::without_provenance_mut(value)
    }

    /// Pushes from a CPU that is not the object's home.
    unsafe fn push_guest(table: &Table, value: usize) -> Outcome {
        // SAFETY: as the caller promises.
        settled(|| unsafe { push(table, FULL, ELSEWHERE, pointer(value)) })
    }

    #[test]
    fn a_stack_is_last_in_first_out_and_bounded() {
        let Some((table, region)) = table(4) else { return };
        // SAFETY: the table and its one region live to the end of the test, and only this thread uses them.
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
        // SAFETY: as above.
        unsafe {
            assert_eq!(settled(|| push(&table, FULL, home, pointer(1))), Outcome::Refused);
            assert_eq!(push_guest(&table, 2), Outcome::Committed);
            // The second stack as the first: there is room at home, and behind it nothing is touched.
            assert_eq!(settled(|| push(&table, STACK, home, pointer(3))), Outcome::Committed);
            assert_eq!([settled_pop(&table), settled_pop(&table)], [3, 2].map(pointer));
        }
        assert_eq!((region.before, region.after), (7, 7));
    }

    /// Keeps this thread on the CPU it is on.
    fn pin() -> u16 {
        // SAFETY: a set of CPUs may be all zeroes, and the calls only read or write it.
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
        // SAFETY: as above.
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
        // SAFETY: as above.
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

    /// Many threads on all CPUs, each push and pop interrupted or not: what is in the stacks is what was put there and not taken. Until each sequence that
    /// moves several was interrupted, which the fences see to.
    #[test]
    fn no_object_is_lost_between_threads() {
        const CELLS: usize = 64;
        let Some(offset) = registered_offset() else { return };
        // A region: a word, the stack at `FULL` without room, the one behind it, null, and its cells.
        let stack = STACK / size_of::<usize>();
        let length = stack + 4 + CELLS;
        let mut memory = vec![0_usize; crate::topology::nameable() * length];
        let table = Box::new(Table::unopened());
        table.offset.store(offset, Ordering::Relaxed);
        for (region, entry) in memory.chunks_mut(length).zip(&table.regions[UNREGISTERED..]) {
            let cells = region[stack + 4..].as_ptr().expose_provenance();
            region[0] = 1; // It may be written to.
            region[stack..stack + 3].copy_from_slice(&[cells, cells, cells + CELLS * size_of::<usize>()]);
            entry.store(region.as_mut_ptr().cast(), Ordering::Relaxed);
        }
        let aborted = [(); 4].map(|()| AtomicU32::new(0));
        // How many pointers one of those moved.
        let moved = |which: usize, outcome: Outcome, count: isize| {
            aborted[which].fetch_add(u32::from(outcome == Outcome::Aborted), Ordering::Relaxed);
            if outcome == Outcome::Committed { count } else { 0 }
        };
        let fenced = crate::fence::register().is_ok();
        let all_aborted = || aborted.iter().all(|times| times.load(Ordering::Relaxed) > 0);
        let work = || {
            let mut left = 0_isize;
            for round in 0..50_000_000_u32 {
                // SAFETY: the table has a region for each CPU; the stacks are changed by such calls alone.
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
            // Each interrupts whoever runs elsewhere.
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
        // SAFETY: as above.
        assert_eq!(settled(|| unsafe { widen(&table, STACK, 1) }), Outcome::Refused);
        region.writable = 1;
        // SAFETY: as above.
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
