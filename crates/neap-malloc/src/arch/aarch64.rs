//! arm64.

use core::arch::asm;
use core::ops::Range;

/// The address of the function that the dynamic linker chose for a name, of this library or
/// another.
macro_rules! chosen {
    ($name:literal) => {{
        let address: usize;
        // SAFETY: loads a word of this library's own global offset table.
        unsafe {
            // {0} := entry of the name in the GOT
            core::arch::asm!(concat!("adrp {0}, :got:", $name), concat!("ldr {0}, [{0}, :got_lo12:", $name, "]"),
                out(reg) address,
                options(nostack, nomem, preserves_flags));
        }
        address
    }};
}

/// Text that jumps to the function that the dynamic linker chose for a name.
///
/// ```text
/// x16 := the name's entry in the GOT
/// go to x16
/// ```
macro_rules! jump {
    ($name:literal) => {
        concat!("adrp x16, :got:", $name, "\nldr x16, [x16, :got_lo12:", $name, "]\nbr x16")
    };
}

/// Addresses of this library's code.
#[inline(always)]
pub(crate) fn own_code() -> Range<usize> {
    let (start, end): (usize, usize);
    // SAFETY: accesses no memory; the linker defines both symbols.
    unsafe {
        // {0} := start of this library; {1} := end of its code
        asm!("adrp {0}, __ehdr_start", "add {0}, {0}, :lo12:__ehdr_start", "adrp {1}, _etext", "add {1}, {1}, :lo12:_etext",
            out(reg) start, out(reg) end, options(nostack, nomem, preserves_flags));
    }
    start..end
}

/// Calls `take`. If it returns null, jumps to the result of `other`.
///
/// ```text
///                 push x29, x30, x0, x1 and x2
///                 x0 := take(x0, x1, x2)
///                 if x0 != 0: go to taken
///                 x16 := other()
///                 pop x0, x1, x2, x29 and x30
///                 go to x16
/// taken (2):      pop x29 and x30
///                 return x0
/// ```
///
/// | register | holds |
/// |---|---|
/// | `x0`, `x1`, `x2` | the caller's arguments; `x0` also the result of `take` |
/// | `x16` | the function to jump to |
/// | `x29`, `x30` | frame and return address |
macro_rules! or_other {
    ($take:ident, $other:ident) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            "stp x29, x30, [sp, #-48]!", ".cfi_def_cfa_offset 48", ".cfi_offset x29, -48", ".cfi_offset x30, -40",
            "mov x29, sp",
            "stp x0, x1, [sp, #16]",
            "str x2, [sp, #32]",
            "bl {take}",
            "cbnz x0, 2f",
            "bl {other}",
            "mov x16, x0",
            "ldp x0, x1, [sp, #16]",
            "ldr x2, [sp, #32]",
            ".cfi_remember_state",
            "ldp x29, x30, [sp], #48", ".cfi_def_cfa_offset 0", ".cfi_restore x29", ".cfi_restore x30",
            "br x16",
            "2:",
            ".cfi_restore_state",
            "ldp x29, x30, [sp], #48", ".cfi_def_cfa_offset 0", ".cfi_restore x29", ".cfi_restore x30",
            "ret",
            ".cfi_endproc",
            take = sym $take, other = sym $other
        )
    };
}

/// Masks the second argument, and jumps to the result of `next`.
///
/// ```text
/// w1 := w1 & mask
/// push x29, x30, x0 and x1
/// x16 := next()
/// pop x0, x1, x29 and x30
/// go to x16
/// ```
///
/// | register | holds |
/// |---|---|
/// | `x0`, `x1` | the caller's arguments |
/// | `x16` | the function to jump to |
/// | `x29`, `x30` | frame and return address |
macro_rules! filtered {
    ($mask:expr, $next:ident) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            "and w1, w1, #{mask}",
            "stp x29, x30, [sp, #-32]!", ".cfi_def_cfa_offset 32", ".cfi_offset x29, -32", ".cfi_offset x30, -24",
            "mov x29, sp",
            "stp x0, x1, [sp, #16]",
            "bl {next}",
            "mov x16, x0",
            "ldp x0, x1, [sp, #16]",
            "ldp x29, x30, [sp], #32", ".cfi_def_cfa_offset 0", ".cfi_restore x29", ".cfi_restore x30",
            "br x16",
            ".cfi_endproc",
            mask = const $mask, next = sym $next
        )
    };
}

/// The body of `vfork`. The child overwrites the stack, so registers keep what the parent needs.
/// The kernel does not change them. arm64 has no system call `vfork`. `clone` with CLONE_VM,
/// CLONE_VFORK and SIGCHLD does the same, on the caller's stack.
///
/// ```text
///                 (x0, x1) := before(), with x29 and x30 pushed
///                 x9 := x0; x10 := x1
///                 x0 := kernel(clone; flags, 0, 0, 0, 0), in the child and then in the parent
///                 if x0 = 0: go to child
///                 go to in_parent(x0, x9, x10)
/// child (2):      return 0
/// ```
///
/// | register | holds |
/// |---|---|
/// | `x9`, `x10` | the registration that `before` ended |
/// | `x30` | the return address |
/// | `x0` to `x4` | arguments; `x0` also the kernel's answer |
/// | `x8` | the call's number |
macro_rules! vfork {
    ($before:ident, $in_parent:ident) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            "stp x29, x30, [sp, #-16]!", ".cfi_def_cfa_offset 16", ".cfi_offset x29, -16", ".cfi_offset x30, -8",
            "bl {before}",
            "ldp x29, x30, [sp], #16", ".cfi_def_cfa_offset 0", ".cfi_restore x29", ".cfi_restore x30",
            "mov x9, x0",
            "mov x10, x1",
            "mov x0, #{flags}",
            "mov x1, xzr",
            "mov x2, xzr",
            "mov x3, xzr",
            "mov x4, xzr",
            "mov x8, #{clone}",
            "svc #0",
            "cbz x0, 2f",
            "mov x1, x9",
            "mov x2, x10",
            "b {in_parent}",
            "2:",
            "ret",
            ".cfi_endproc",
            before = sym $before, flags = const 0x4111, clone = const 220, in_parent = sym $in_parent
        )
    };
}
