//! What a library without std has to bring along: a panic handler and a symbol for unwinding.
//!
//! Sits between rustc and the linker. Nothing here panics on purpose: a panic is a bug of neap's, and ends the process
//! with one line.

use core::arch::global_asm;
use core::panic::PanicInfo;

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    neap::die(format_args!("bug: {info}"))
}

// The prebuilt `core` refers to it though nothing unwinds. Hidden and weak: it is not to stand in for that of Rust programs, or to
// clash with it where libneap.a is linked into one.
global_asm!(
    ".pushsection .text.rust_eh_personality,\"ax\",@progbits",
    ".weak rust_eh_personality",
    ".hidden rust_eh_personality",
    ".type rust_eh_personality,@function",
    "rust_eh_personality:",
    ".cfi_startproc",
    "ud2",
    ".cfi_endproc",
    ".size rust_eh_personality, . - rust_eh_personality",
    ".popsection",
);
