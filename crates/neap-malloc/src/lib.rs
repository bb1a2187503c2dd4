//! The C library's malloc family on the process's memory manager.
//!
//! Sits between a program that was started with this library preloaded (or linked) and `neap`. Each function, also those with flags that programs
//! linked with jemalloc call, is what its manual page says, and nothing more happens here than C's conventions: null and errno on failure, sizes that overflow,
//! alignments that are none. Allocates nothing itself, imports little (see `cargo xtask symbols`), keeps no state but where the C++ library's operators are.
#![no_std]

mod cxx;
mod family;
mod jemalloc;
mod report;

// The functions of `neap.h`, which work on the same instance here, and the panic handler.
use neap_c as _;
