//! The C library's malloc family on the process's memory manager.
//!
//! Sits between a program that was started with this library preloaded (or linked) and `neap`. Each function, also those with flags that programs
//! linked with jemalloc call, is what its manual page says, and nothing more happens here than C's conventions: null and errno on failure, sizes that overflow,
//! alignments that are none. Allocates nothing itself, imports little (see `cargo xtask symbols`), keeps no state but where the C++ library's operators are.
#![no_std]

/// The address of the function that the dynamic linker chose for a name, of this library or another; 0 if there is none.
///
/// Of a name that is `weak` there may be none; each object file that uses it has to say so.
macro_rules! chosen {
    (weak $name:literal) => {
        chosen!($name, concat!(".weak ", $name))
    };
    ($name:literal $(, $first:expr)?) => {{
        let address: usize;
        // SAFETY: loads a word of this library's own.
        unsafe {
            core::arch::asm!($($first,)? concat!("mov {}, qword ptr [rip + ", $name, "@GOTPCREL]"), out(reg) address,
                options(nostack, nomem, preserves_flags));
        }
        address
    }};
}

mod cxx;
mod dl_open;
mod family;
mod jemalloc;
mod libc_names;
mod report;
mod threads;
mod vfork;

// The functions of `neap.h`, which work on the same instance here, and the panic handler.
use neap_c as _;
