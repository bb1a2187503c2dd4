//! The C library's malloc family on the process's memory manager, for programs that preload this
//! library or are linked with it.
//!
//! Each function behaves as its manual page says; so do the functions with flags that programs
//! linked with jemalloc call. This crate adds C's conventions only: null and errno on failure,
//! checks of overflowing sizes and invalid alignments. It allocates nothing itself and imports
//! little (see `cargo xtask symbols`). Its only state are the addresses of functions of other
//! libraries.
#![no_std]

// Before the modules that use its macros.
#[macro_use]
mod arch;
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
