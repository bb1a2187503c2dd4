//! Runtime parts of a library without std: a panic handler and a symbol for unwinding.
//!
//! No code here panics on purpose. A panic is a bug of neap, and ends the process with one line.

use core::arch::global_asm;
use core::panic::PanicInfo;

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    crate::fatal::die(format_args!("bug: {info}"))
}

// The prebuilt `core` refers to this symbol, although no code unwinds. The symbol is hidden and
// weak. So it neither replaces the symbol of a Rust program, nor clashes with that symbol where
// libneap.a is linked into the program.
//
// rust_eh_personality: trap
global_asm!(
    ".pushsection .text.rust_eh_personality,\"ax\",@progbits",
    ".weak rust_eh_personality",
    ".hidden rust_eh_personality",
    ".type rust_eh_personality,@function",
    "rust_eh_personality:",
    ".cfi_startproc",
    trap_text!(),
    ".cfi_endproc",
    ".size rust_eh_personality, . - rust_eh_personality",
    ".popsection",
);
