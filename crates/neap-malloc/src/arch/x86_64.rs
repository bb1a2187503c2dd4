//! x86-64.

use core::arch::asm;
use core::ops::Range;

/// The address of the function that the dynamic linker chose for a name, of this library or
/// another.
macro_rules! chosen {
    ($name:literal) => {{
        let address: usize;
        // SAFETY: loads a word of this library's own global offset table.
        unsafe {
            // address := entry of the name in the GOT
            core::arch::asm!(concat!("mov {}, qword ptr [rip + ", $name, "@GOTPCREL]"), out(reg) address,
                options(nostack, nomem, preserves_flags));
        }
        address
    }};
}

/// Text that jumps to the function that the dynamic linker chose for a name.
///
/// ```text
/// go to the address in the name's entry in the GOT
/// ```
macro_rules! jump {
    ($name:literal) => {
        concat!("jmp qword ptr [rip + ", $name, "@GOTPCREL]")
    };
}

/// Addresses of this library's code.
#[inline(always)]
pub(crate) fn own_code() -> Range<usize> {
    let (start, end): (usize, usize);
    // SAFETY: accesses no memory; the linker defines both symbols.
    unsafe {
        // start := start of this library; end := end of its code
        asm!("lea {}, [rip + __ehdr_start]", "lea {}, [rip + _etext]", out(reg) start, out(reg) end,
            options(nostack, nomem, preserves_flags));
    }
    start..end
}

/// Calls `take`. If it returns null, jumps to the result of `other`.
///
/// ```text
///                 push rdi, rsi and rdx
///                 rax := take(rdi, rsi, rdx)
///                 if rax != 0: go to taken
///                 rax := other()
///                 pop rdx, rsi and rdi
///                 go to rax
/// taken (2):      drop the three words
///                 return rax
/// ```
///
/// | register | holds |
/// |---|---|
/// | `rdi`, `rsi`, `rdx` | the caller's arguments |
/// | `rax` | the result of `take`, then the function to jump to |
macro_rules! or_other {
    ($take:ident, $other:ident) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            "push rdi", ".cfi_adjust_cfa_offset 8",
            "push rsi", ".cfi_adjust_cfa_offset 8",
            "push rdx", ".cfi_adjust_cfa_offset 8",
            "call {take}",
            "test rax, rax",
            "jne 2f",
            "call {other}",
            "pop rdx", ".cfi_adjust_cfa_offset -8",
            "pop rsi", ".cfi_adjust_cfa_offset -8",
            "pop rdi", ".cfi_adjust_cfa_offset -8",
            "jmp rax",
            "2:",
            ".cfi_adjust_cfa_offset 24",
            "add rsp, 24",
            ".cfi_adjust_cfa_offset -24",
            "ret",
            ".cfi_endproc",
            take = sym $take, other = sym $other
        )
    };
}

/// Masks the second argument, and jumps to the result of `next`.
///
/// ```text
/// esi := esi & mask
/// push rdi, rsi and rax, which aligns the stack
/// rax := next()
/// pop rcx, rsi and rdi
/// go to rax
/// ```
///
/// | register | holds |
/// |---|---|
/// | `rdi`, `rsi` | the caller's arguments |
/// | `rax` | the function to jump to |
/// | `rcx` | scratch |
macro_rules! filtered {
    ($mask:expr, $next:ident) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            "and esi, {mask}",
            "push rdi", ".cfi_adjust_cfa_offset 8",
            "push rsi", ".cfi_adjust_cfa_offset 8",
            "push rax", ".cfi_adjust_cfa_offset 8",
            "call {next}",
            "pop rcx", ".cfi_adjust_cfa_offset -8",
            "pop rsi", ".cfi_adjust_cfa_offset -8",
            "pop rdi", ".cfi_adjust_cfa_offset -8",
            "jmp rax",
            ".cfi_endproc",
            mask = const $mask, next = sym $next
        )
    };
}

/// The body of `vfork`. The child overwrites the stack, so registers keep what the parent needs.
/// The kernel does not change them.
///
/// ```text
/// (rax, rdx) := before()
/// rsi := rax
/// r9 := the return address, off the stack
/// rax := kernel(vfork), which returns in the child and then in the parent
/// the return address on the stack := r9
/// rdi := rax
/// if rax != 0: go to in_parent(rdi, rsi, rdx)
/// return 0 in the child
/// ```
///
/// | register | holds |
/// |---|---|
/// | `rsi`, `rdx` | the registration that `before` ended |
/// | `r9` | the return address |
/// | `rax`, `rdi` | the kernel's answer |
macro_rules! vfork {
    ($before:ident, $in_parent:ident) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            "sub rsp, 8", ".cfi_adjust_cfa_offset 8",
            "call {before}",
            "add rsp, 8", ".cfi_adjust_cfa_offset -8",
            "mov rsi, rax",
            "mov r9, qword ptr [rsp]", ".cfi_register rip, r9",
            "mov eax, {vfork}",
            "syscall",
            "mov qword ptr [rsp], r9", ".cfi_offset rip, -8",
            "mov rdi, rax",
            "test rax, rax",
            "jne {in_parent}",
            "ret",
            ".cfi_endproc",
            before = sym $before, vfork = const 58, in_parent = sym $in_parent
        )
    };
}
