//! Code for arm64: little endian, ARMv8.0 and later. Loads and stores of a thread may be done in
//! any order that its dependencies allow: see docs/design/arm64.md.

use crate::call_stack::Registers;
use crate::signal::Interrupted;
use core::arch::{asm, naked_asm};
use core::ffi::CStr;

// Before the modules that use its macros.
#[macro_use]
mod sequences;
pub(crate) mod stacks;
pub(crate) mod words;

/// Bits of an address that loads and stores ignore. Linux leaves this top byte to programs.
pub(crate) const TAG: usize = 0xff << 56;

/// Word in front of each abort exit, which the kernel checks. It is a `brk` that no debugger uses.
pub(crate) const SIGNATURE: usize = 0xd428_bc00;

/// Name of the vDSO's function that reads a clock.
pub(crate) const CLOCK: &CStr = c"__kernel_clock_gettime";

/// Reads a variable of another library through the GOT, with the type `u8`, `u32` or `usize`, as a
/// `usize`. With `address` as the type, returns the address of a variable or function. Returns 0 if
/// no loaded library has the name.
///
/// The symbol is weak, so neap's library also loads where no library defines it. Each use declares
/// the symbol weak, since every object file that uses it must do so.
#[macro_export]
macro_rules! weak_variable {
    ($name:literal, u8) => { $crate::weak_variable!(@ $name, "ldrb {0:w}, [{0}]") };
    ($name:literal, u32) => { $crate::weak_variable!(@ $name, "ldr {0:w}, [{0}]") };
    ($name:literal, usize) => { $crate::weak_variable!(@ $name, "ldr {0}, [{0}]") };
    ($name:literal, address) => { $crate::weak_variable!(@ $name, "") };
    (@ $name:literal, $read:literal) => {{
        let value: usize;
        // SAFETY: loads the address from the GOT, and reads from it only if it is not null.
        unsafe {
            // {0} := address of the symbol, from the GOT
            // if {0} != 0: {0} := variable at {0}
            // end (2):
            //
            // Registers: {0}: the address, then the value.
            core::arch::asm!(concat!(".weak ", $name), concat!("adrp {0}, :got:", $name),
                concat!("ldr {0}, [{0}, :got_lo12:", $name, "]"), "cbz {0}, 2f", $read, "2:",
                out(reg) value, options(nostack, readonly, preserves_flags));
        }
        value
    }};
}

/// Text of an instruction that raises SIGTRAP.
#[cfg(feature = "runtime")]
macro_rules! trap_text {
    () => {
        "brk #1"
    };
}

/// Ends the process by a breakpoint instruction.
pub(crate) fn trap() -> ! {
    // SAFETY: the instruction raises a signal, which ends the process or runs the program's
    // handler. If the handler returns, the instruction runs again.
    unsafe {
        // raise SIGTRAP
        asm!("brk #1", options(noreturn))
    }
}

/// Makes one system call.
///
/// # Safety
/// The arguments meet the requirements of the call.
#[inline(always)]
pub(crate) unsafe fn system_call(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let answer: isize;
    // SAFETY: the caller meets the call's requirements. The arm64 convention: number in x8,
    // arguments in x0 to x5; no other register changes than x0.
    unsafe {
        // x0 := kernel(x8; x0, x1, x2, x3, x4, x5)
        //
        // Registers: x8: the call's number. x0 to x5: its arguments. x0: then the answer.
        asm!("svc #0", in("x8") number, inlateout("x0") a => answer, in("x1") b, in("x2") c, in("x3") d, in("x4") e,
            in("x5") f, options(nostack));
    }
    answer
}

/// The thread pointer. Thread-local variables lie behind the 16 bytes that it points to; the
/// thread's control block lies in front of it.
#[inline(always)]
pub(crate) fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: reads a register that only the C library writes.
    unsafe {
        // pointer := thread pointer
        asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, nomem, preserves_flags));
    }
    pointer
}

/// Address of this thread's rseq area, which lies `offset` bytes from the thread pointer.
#[inline(always)]
fn area(offset: isize) -> usize {
    thread_pointer().wrapping_add_signed(offset)
}

/// Address of this thread's words of [`thread_state`](crate::thread_state).
#[inline(always)]
fn words_of_thread() -> usize {
    let address: usize;
    // SAFETY: loads the distance of the words from the thread pointer, which a relocation provides,
    // and adds the thread pointer.
    unsafe {
        // {1} := thread pointer
        // {0} := distance of the words from the thread pointer, from the GOT
        // {0} := {0} + {1}
        //
        // Registers: {0}: the distance, then the address. {1}: the thread pointer.
        asm!(
            "mrs {1}, tpidr_el0",
            "adrp {0}, :gottprel:__entered_of_neap",
            "ldr {0}, [{0}, :gottprel_lo12:__entered_of_neap]",
            "add {0}, {0}, {1}",
            out(reg) address, out(reg) _, options(nostack, readonly, preserves_flags)
        );
    }
    address
}

/// Distance of the words of [`thread_state`](crate::thread_state) from the thread pointer.
pub(crate) fn words_offset() -> isize {
    words_of_thread().wrapping_sub(thread_pointer()).cast_signed()
}

#[inline(always)]
pub(crate) fn word<const AT: usize>() -> usize {
    let word: usize;
    // SAFETY: reads a word of this thread.
    unsafe {
        // {0} := word at {1} + at
        //
        // Registers: {0}: the word. {1}: address of this thread's words.
        asm!("ldr {0}, [{1}, #{at}]", out(reg) word, in(reg) words_of_thread(), at = const AT,
            options(nostack, readonly, preserves_flags));
    }
    word
}

#[inline(always)]
pub(crate) fn set_word<const AT: usize>(word: usize) {
    // SAFETY: writes a word of this thread, which only `thread_state` accesses.
    unsafe {
        // word at {1} + at := {0}
        //
        // Registers: {0}: the new value. {1}: address of this thread's words.
        asm!("str {0}, [{1}, #{at}]", in(reg) word, in(reg) words_of_thread(), at = const AT,
            options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub(crate) fn count_down<const AT: usize>(bytes: usize) -> bool {
    let left = word::<AT>();
    if left <= bytes {
        return false;
    }
    set_word::<AT>(left - bytes);
    true
}

/// Calls a function with the stack pointer at `top`, then restores the stack pointer.
///
/// # Safety
/// `top` is a multiple of 16. Below it lies as much memory as the function needs. The function
/// accepts `argument`.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn call_on_stack(
    top: *mut u8,
    function: unsafe extern "C" fn(*mut u8),
    argument: *mut u8,
) {
    // push x29 and x30; x29 := sp
    // sp := top
    // function(argument)
    // sp := x29; pop x29 and x30
    //
    // Registers: x0: top, then argument. x1: function. x2: argument. x29: the caller's stack
    // pointer, less 16. x30: the return address.
    naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-16]!",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset x29, -16",
        ".cfi_offset x30, -8",
        "mov x29, sp",
        ".cfi_def_cfa_register x29",
        "mov sp, x0",
        "mov x0, x2",
        "blr x1",
        "mov sp, x29",
        ".cfi_def_cfa_register sp",
        "ldp x29, x30, [sp], #16",
        ".cfi_def_cfa_offset 0",
        ".cfi_restore x29",
        ".cfi_restore x30",
        "ret",
        ".cfi_endproc",
    )
}

pub(crate) const ADDRESS_END: u64 = 1 << 48;

#[inline(always)]
pub(crate) fn without_signature(word: u64) -> u64 {
    word & (ADDRESS_END - 1)
}

#[inline(always)]
pub(crate) fn registers() -> Registers {
    let (instruction, stack_pointer, frame_pointer);
    // The link register is declared as changed. So the function has saved its return address on the
    // stack before, where an unwinder can find it.
    // SAFETY: reads three registers.
    unsafe {
        // instruction := address of this instruction
        // stack := sp
        // frame := x29
        asm!(
            "adr {instruction}, .",
            "mov {stack}, sp",
            "mov {frame}, x29",
            instruction = out(reg) instruction, stack = out(reg) stack_pointer, frame = out(reg) frame_pointer,
            out("lr") _,
            options(nomem, nostack, preserves_flags)
        );
    }
    Registers { instruction, stack_pointer, frame_pointer }
}

/// Copies bytes that no Rust code may access, such as other functions' variables.
///
/// # Safety
/// The range at `from` can be read. The range at `to` belongs to the caller.
pub(crate) unsafe fn copy(from: usize, to: *mut u8, bytes: usize) {
    // SAFETY: the caller promises that the first range can be read, and that the second is its own.
    unsafe {
        // if bytes = 0: go to end
        // next (2): byte := byte at from; from := from + 1
        //           byte at to := byte; to := to + 1
        //           bytes := bytes - 1; if bytes != 0: go to next
        // end (3):
        //
        // Registers: bytes: bytes left. from, to: the next bytes to read and to write. byte: the
        // byte read.
        asm!(
            "cbz {bytes}, 3f",
            "2:",
            "ldrb {byte:w}, [{from}], #1",
            "strb {byte:w}, [{to}], #1",
            "subs {bytes}, {bytes}, #1",
            "b.ne 2b",
            "3:",
            bytes = inout(reg) bytes => _, from = inout(reg) from => _, to = inout(reg) to => _, byte = out(reg) _,
            options(nostack)
        );
    }
}

/// Returns `true`: every arm64 processor has the instructions of the sequences.
pub(crate) fn has_instructions() -> bool {
    true
}

/// The CPU's id in this thread's rseq area.
///
/// # Safety
/// `offset` is [`registered_offset`](crate::rseq::registered_offset), or that of
/// [`OwnAreas`](crate::rseq::OwnAreas).
#[inline]
pub(crate) unsafe fn cpu_id(offset: isize) -> u32 {
    let cpu: u32;
    // SAFETY: the caller passes the offset at which every thread has a `struct rseq`, whose second
    // word is `cpu_id`.
    unsafe {
        // {0} := cpu_id of the rseq area at {1}
        //
        // Registers: {0}: the id. {1}: address of this thread's rseq area.
        asm!("ldr {0:w}, [{1}, #4]", out(reg) cpu, in(reg) area(offset), options(nostack, readonly, preserves_flags))
    };
    cpu
}

/// Returns 0, since the kernel makes a signal handler return to the vDSO.
pub(crate) fn signal_restorer() -> usize {
    0
}

/// Returns registers of the context that a signal has interrupted. They do not tell whether a
/// memory access was a write.
///
/// # Safety
/// The context is the third argument of a signal handler.
pub(crate) unsafe fn interrupted(context: *const core::ffi::c_void) -> Interrupted {
    /// Offset of the registers in `struct ucontext`, and numbers of three of them.
    const REGISTERS: usize = 184;
    const LINK: usize = 30;
    const STACK: usize = 31;
    const INSTRUCTION: usize = 32;
    // SAFETY: the caller promises the context of a signal handler, in which the kernel stores these
    // registers.
    let register = |number: usize| unsafe { context.byte_add(REGISTERS).cast::<usize>().add(number).read() };
    Interrupted {
        instruction: register(INSTRUCTION),
        stack_pointer: register(STACK),
        link: Some(register(LINK)),
        is_write: None,
    }
}

/// Whether code ends in a call: `bl` or `blr`.
pub(crate) fn ends_in_call(code: [u8; 8]) -> bool {
    let [.., a, b, c, d] = code;
    let last = u32::from_le_bytes([a, b, c, d]);
    last & 0xfc00_0000 == 0x9400_0000 || last & 0xffff_fc1f == 0xd63f_0000
}
