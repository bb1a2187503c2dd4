//! Linux as a memory allocator needs it, and nothing else.
//!
//! Sits between the kernel (and a few symbols of the C library: `pthread_create`, `__rseq_offset`, `getauxval`, those of [`streams`]) and
//! everything above. Usable alone. It takes no lock, keeps no state but a word for each thread, allocates nothing,
//! and never writes `errno`: a failed call answers with an [`Errno`].
#![no_std]
#![deny(missing_docs)]

#[cfg(test)]
extern crate std;

pub mod clock;
pub mod cpuset;
pub mod entered;
pub mod environment;
pub mod event_fd;
pub mod fence;
pub mod file;
pub mod fork_handlers;
pub mod futex;
pub mod mappings;
pub mod memfd;
pub mod memory;
pub mod nodes;
pub mod own_thread;
pub mod rseq;
pub mod stack;
pub mod streams;
mod syscall;
pub mod thread;
pub mod topology;
pub mod used_cpus;
mod vdso;
pub mod write;

pub use rustix::io::Errno;
