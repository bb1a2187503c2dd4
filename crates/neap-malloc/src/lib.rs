//! The C library's malloc family on the process's memory manager, for programs that preload this
//! library or are linked with it.
//!
//! Each function behaves as its manual page says; so do the functions with flags that programs
//! linked with jemalloc call. This crate adds C's conventions only: null and errno on failure,
//! checks of overflowing sizes and invalid alignments. It allocates nothing itself and imports
//! little (see `cargo xtask symbols`). Its only state are the addresses of functions of other
//! libraries.
//!
//! As an archive for static programs (`crt-static`) it lacks the functions that forward to another
//! library's function of their name: `dlopen`, `pthread_create` and `thrd_create`; and C++'s
//! operators, since those of the C++ library end in `malloc` and `free`, and a program may define
//! its own.
#![no_std]

// Before the modules that use its macros.
#[macro_use]
mod arch;
#[cfg(not(target_feature = "crt-static"))]
mod cxx;
#[cfg(not(target_feature = "crt-static"))]
mod dl_open;
mod family;
#[cfg(all(target_env = "musl", not(target_feature = "crt-static")))]
mod flush;
mod jemalloc;
mod libc_names;
mod report;
#[cfg(not(target_feature = "crt-static"))]
mod threads;
mod vfork;

// The functions of `neap.h`, which work on the same instance here, and the panic handler.
use neap_c as _;
