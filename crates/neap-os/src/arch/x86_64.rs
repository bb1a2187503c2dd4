//! Code for x86-64. A thread's stores become visible in program order, and its loads are done in
//! program order (TSO). So no sequence needs a barrier.

use crate::call_stack::Registers;
use crate::signal::Interrupted;
use core::arch::{asm, naked_asm};
use core::ffi::CStr;

// Before the modules that use its macros.
#[macro_use]
mod sequences;
pub(crate) mod stacks;
pub(crate) mod words;

/// Bits of an address that loads and stores ignore. x86-64 ignores none.
pub(crate) const TAG: usize = 0;

/// Word in front of each abort exit, which the kernel checks.
pub(crate) const SIGNATURE: usize = 0x5305_3053;

/// Name of the vDSO's function that reads a clock.
pub(crate) const CLOCK: &CStr = c"__vdso_clock_gettime";

/// Reads a variable of another library through the GOT, with the type `u8`, `u32` or `usize`, as a
/// `usize`. With `address` as the type, returns the address of a variable or function. Returns 0 if
/// no loaded library has the name.
///
/// The symbol is weak, so neap's library also loads where no library defines it. Each use declares
/// the symbol weak, since every object file that uses it must do so.
#[macro_export]
macro_rules! weak_variable {
    ($name:literal, u8) => { $crate::weak_variable!(@ $name, "movzx {0:e}, byte ptr [{0}]") };
    ($name:literal, u32) => { $crate::weak_variable!(@ $name, "mov {0:e}, dword ptr [{0}]") };
    ($name:literal, usize) => { $crate::weak_variable!(@ $name, "mov {0}, qword ptr [{0}]") };
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
            core::arch::asm!(concat!(".weak ", $name), concat!("mov {0}, qword ptr [rip + ", $name, "@GOTPCREL]"), "test {0}, {0}", "jz 2f", $read, "2:",
                out(reg) value, options(nostack, readonly));
        }
        value
    }};
}

/// Text of an instruction that is undefined.
#[cfg(feature = "runtime")]
macro_rules! trap_text {
    () => {
        "ud2"
    };
}

/// Ends the process by an undefined instruction.
pub(crate) fn trap() -> ! {
    // SAFETY: the instruction raises a signal, which ends the process or runs the program's
    // handler. If the handler returns, the instruction runs again.
    unsafe {
        // raise SIGILL
        asm!("ud2", options(noreturn))
    }
}

/// Makes one system call.
///
/// # Safety
/// The arguments meet the requirements of the call.
#[inline(always)]
pub(crate) unsafe fn system_call(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let answer: isize;
    // SAFETY: the caller meets the call's requirements. The x86-64 convention: number in rax,
    // arguments in rdi, rsi, rdx, r10, r8 and r9; rcx and r11 are clobbered.
    unsafe {
        // rax := kernel(rax; rdi, rsi, rdx, r10, r8, r9)
        //
        // Registers: rax: the call's number, then its answer. rdi, rsi, rdx, r10, r8, r9: its
        // arguments. The kernel changes rcx and r11.
        asm!("syscall", inlateout("rax") number as isize => answer, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    answer
}

/// The thread pointer, which is the address of this thread's control block.
#[inline]
pub(crate) fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: on x86-64 the first word of a thread's control block is its own address.
    unsafe {
        // pointer := word at the thread pointer
        asm!("mov {}, qword ptr fs:[0]", out(reg) pointer, options(nostack, readonly, preserves_flags));
    }
    pointer
}

/// Distance of the words of [`thread_state`](crate::thread_state) from the thread pointer.
pub(crate) fn words_offset() -> isize {
    let offset: isize;
    // SAFETY: loads the distance, which a relocation provides, and accesses no other memory.
    unsafe {
        // offset := distance of the words from the thread pointer
        asm!("mov {}, qword ptr [rip + __entered_of_neap@GOTTPOFF]", out(reg) offset,
            options(nostack, readonly, preserves_flags));
    }
    offset
}

#[inline(always)]
pub(crate) fn word<const AT: usize>() -> usize {
    let word: usize;
    // SAFETY: reads a word of this thread. The first instruction loads its offset, which a
    // relocation provides.
    unsafe {
        // {0} := distance of the words from the thread pointer
        // {0} := word of this thread at {0} + at
        //
        // Registers: {0}: the distance, then the word.
        asm!(
            "mov {0}, qword ptr [rip + __entered_of_neap@GOTTPOFF]",
            "mov {0}, qword ptr fs:[{0} + {at}]",
            out(reg) word, at = const AT, options(nostack, readonly, preserves_flags)
        );
    }
    word
}

#[inline(always)]
pub(crate) fn set_word<const AT: usize>(word: usize) {
    // SAFETY: writes a word of this thread, which only `thread_state` accesses.
    unsafe {
        // {0} := distance of the words from the thread pointer
        // word of this thread at {0} + at := {1}
        //
        // Registers: {0}: the distance. {1}: the new value.
        asm!(
            "mov {0}, qword ptr [rip + __entered_of_neap@GOTTPOFF]",
            "mov qword ptr fs:[{0} + {at}], {1}",
            out(reg) _, in(reg) word, at = const AT, options(nostack, preserves_flags)
        );
    }
}

#[inline(always)]
pub(crate) fn count_down<const AT: usize>(bytes: usize) -> bool {
    // One block of assembly, so that the address of the words is computed only once.
    // SAFETY: reads and writes a word of this thread, which only `thread_state` accesses.
    unsafe {
        // words := distance of the words from the thread pointer
        // left := word of this thread at words + at
        // left := left - bytes; if that is 0 or less: go to due
        // word of this thread at words + at := left
        //
        // Registers: words: the distance. left: the countdown. bytes: the bytes to subtract.
        asm!(
            "mov {words}, qword ptr [rip + __entered_of_neap@GOTTPOFF]",
            "mov {left}, qword ptr fs:[{words} + {at}]",
            "sub {left}, {bytes}",
            "jbe {due}",
            "mov qword ptr fs:[{words} + {at}], {left}",
            words = out(reg) _, left = out(reg) _, bytes = in(reg) bytes, at = const AT,
            due = label { return false },
            options(nostack)
        );
    }
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
    // push rbp; rbp := rsp
    // rsp := top
    // function(argument)
    // rsp := rbp; pop rbp
    //
    // Registers: rdi: top, then argument. rsi: function. rdx: argument. rbp: the caller's stack
    // pointer, less 16.
    naked_asm!(
        ".cfi_startproc",
        "push rbp",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset rbp, -16",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        "mov rsp, rdi",
        "mov rdi, rdx",
        "call rsi",
        "mov rsp, rbp",
        "pop rbp",
        ".cfi_def_cfa rsp, 8",
        "ret",
        ".cfi_endproc",
    )
}

pub(crate) const ADDRESS_END: u64 = 1 << 47;

#[inline(always)]
pub(crate) fn without_signature(word: u64) -> u64 {
    word
}

#[inline(always)]
pub(crate) fn registers() -> Registers {
    let (instruction, stack_pointer, frame_pointer);
    // SAFETY: reads three registers.
    unsafe {
        // instruction := address of the next instruction
        // stack := rsp
        // frame := rbp
        asm!(
            "lea {instruction}, [rip]",
            "mov {stack}, rsp",
            "mov {frame}, rbp",
            instruction = out(reg) instruction, stack = out(reg) stack_pointer, frame = out(reg) frame_pointer,
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
        // while rcx > 0: byte at rdi := byte at rsi; rdi += 1; rsi += 1; rcx -= 1
        //
        // Registers: rcx: bytes left. rsi: the next byte to read. rdi: the next byte to write.
        asm!(
            "rep movsb",
            inout("rcx") bytes => _, inout("rsi") from => _, inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Whether the processor has `tzcnt` and shifts that preserve the flags (BMI1 and BMI2; Intel since
/// 2013, AMD since 2015).
pub(crate) fn has_instructions() -> bool {
    const BOTH: u32 = 1 << 3 | 1 << 8;
    let leaf = |leaf| core::arch::x86_64::__cpuid_count(leaf, 0);
    leaf(0).eax >= 7 && leaf(7).ebx & BOTH == BOTH
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
        // {0} := cpu_id of this thread's rseq area
        //
        // Registers: {0}: the id. {1}: the area's offset from the thread pointer.
        asm!("mov {0:e}, dword ptr fs:[{1} + 4]", out(reg) cpu, in(reg) offset, options(nostack, readonly, preserves_flags))
    };
    cpu
}

/// Returns the address of the function by which a signal handler ends.
pub(crate) fn signal_restorer() -> usize {
    restore_from_signal as *const () as usize
}

/// Ends a signal handler. Unwinders know the two instructions by their bytes, so the function has
/// no unwind information. `cargo xtask symbols` recognises the function by the name of its section.
#[unsafe(naked)]
#[unsafe(link_section = "__signal_return")]
extern "C" fn restore_from_signal() {
    // mov rax, 15 (rt_sigreturn), in the form that unwinders know
    // syscall; the kernel restores all registers
    //
    // Registers: rax: the call's number.
    naked_asm!(".byte 0x48, 0xc7, 0xc0, 15, 0, 0, 0", "syscall")
}

/// Returns registers of the context that a signal has interrupted.
///
/// # Safety
/// The context is the third argument of a signal handler.
pub(crate) unsafe fn interrupted(context: *const core::ffi::c_void) -> Interrupted {
    /// Offset of the registers in `struct ucontext`, and numbers of three of them.
    const REGISTERS: usize = 40;
    const STACK: usize = 15;
    const INSTRUCTION: usize = 16;
    const ERROR: usize = 19;
    /// Bit of the error of a page fault.
    const WRITE: usize = 2;
    // SAFETY: the caller promises the context of a signal handler, in which the kernel stores these
    // registers.
    let register = |number: usize| unsafe { context.byte_add(REGISTERS).cast::<usize>().add(number).read() };
    Interrupted {
        instruction: register(INSTRUCTION),
        stack_pointer: register(STACK),
        link: None,
        is_write: Some(register(ERROR) & WRITE != 0),
    }
}

/// Whether code ends in a call: `E8` with a distance, or `FF /2` with any operand.
pub(crate) fn ends_in_call(code: [u8; 8]) -> bool {
    let by_operand = (2..=7).any(|length| {
        let at = code.len() - length;
        code[at] == 0xff && code[at + 1] >> 3 & 7 == 2 && length == operand_length(code[at + 1], code.get(at + 2))
    });
    code[3] == 0xe8 || by_operand
}

/// Length of an instruction of one byte and the ModRM byte `operand`, with the further bytes that
/// ModRM requires. `scale` is the byte after `operand`.
fn operand_length(operand: u8, scale: Option<&u8>) -> usize {
    let (mode, register) = (operand >> 6, operand & 7);
    let is_scaled = mode < 3 && register == 4;
    // An operand without a base register, or relative to the instruction, has a distance of four
    // bytes.
    let has_no_base = mode == 0 && (register == 5 || is_scaled && scale.is_some_and(|scale| scale & 7 == 5));
    let distance = if mode == 2 || has_no_base { 4 } else { usize::from(mode == 1) };
    2 + usize::from(is_scaled) + distance
}

#[cfg(test)]
mod tests {
    use super::ends_in_call;

    #[test]
    fn calls_are_told_from_other_code() {
        let is = |code: &[u8]| {
            let mut whole = [0x90; 8];
            whole[8 - code.len()..].copy_from_slice(code);
            ends_in_call(whole)
        };
        let calls: [&[u8]; 8] = [
            &[0xe8, 1, 2, 3, 4],             // call relative
            &[0xff, 0xd0],                   // call rax
            &[0x41, 0xff, 0xd4],             // call r12
            &[0xff, 0x10],                   // call [rax]
            &[0xff, 0x15, 1, 2, 3, 4],       // call [rip + ...]
            &[0xff, 0x50, 0x18],             // call [rax + 24]
            &[0xff, 0x14, 0xc5, 0, 1, 2, 3], // call [rax * 8 + ...]
            &[0xff, 0x94, 0x24, 1, 2, 3, 4], // call [rsp + ...]
        ];
        assert!(calls.into_iter().all(is));
        let others: [&[u8]; 4] = [&[], &[0xff, 0xe0], &[0xff, 0x15, 1, 2], &[0xe8, 1, 2, 3]];
        assert!(!others.into_iter().any(is));
    }
}
