//! The C library's malloc family on the process's memory manager, for programs that preload this
//! library or are linked with it.
//!
//! Each function behaves as its manual page says. That includes jemalloc's functions with flags,
//! for programs that are linked with jemalloc. This crate adds C's conventions only: null and errno
//! on failure, checks of overflowing sizes and invalid alignments. It allocates nothing itself and
//! imports little (see `cargo xtask symbols`). Its only state is the addresses of functions of
//! other libraries.
//!
//! The archive for static programs (`crt-static`) lacks `dlopen`, `pthread_create` and
//! `thrd_create`, since these forward to another library's function with the same name. It also
//! lacks C++'s operators: the C++ library's own operators call `malloc` and `free`, and a program
//! may define others.
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

// `neap-c` adds the functions of `neap.h`, which work on the instance of this crate, and the panic
// handler.
use neap_c as _;
