//! System calls, rseq and process information: Linux as a memory allocator needs it.
//!
//! The crate uses the kernel and a few symbols of the C library, such as `__rseq_offset` and
//! `getauxval`. It depends on no other crate of neap. It keeps no state except the thread-local
//! words of [`thread_state`], and preserves `errno`: a failed call returns an [`Errno`]. Only
//! `dynamic_linker`, [`own_thread`], [`stdio_lock`] and [`fork_handlers`] may take a lock or
//! allocate.
#![no_std]
#![deny(missing_docs)]

#[cfg(test)]
extern crate std;

// Before the modules that use its macros.
#[macro_use]
mod arch;
pub mod call_stack;
pub mod clock;
pub mod cpuset;
#[cfg(not(target_feature = "crt-static"))]
pub mod dynamic_linker;
pub mod environment;
pub mod event_fd;
pub mod fatal;
pub mod fence;
pub mod file;
pub mod fork_handlers;
pub mod futex;
pub mod huge_pages;
pub mod mappings;
pub mod memfd;
pub mod memory;
pub mod nodes;
pub mod own_thread;
pub mod rseq;
#[cfg(feature = "runtime")]
mod runtime;
pub mod signal;
pub mod stack;
pub mod stdio_lock;
mod syscall;
pub mod thread;
pub mod thread_state;
pub mod topology;
pub mod used_cpus;
mod vdso;

pub use rustix::io::Errno;
