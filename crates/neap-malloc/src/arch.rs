//! The code that depends on the processor: one module for each, with equal names and contracts.
//!
//! # Contract
//!
//! | name | contract |
//! |---|---|
//! | `chosen!` | the address that the dynamic linker chose for a name |
//! | `jump!` | text that jumps there, without a linkage table, which has no unwind information |
//! | `third_is_second!` | text that passes the third argument as the second |
//! | `own_code` | start and end of this library's code |
//! | `or_other!` | naked body: calls `take`; for null, jumps to the result of `other` |
//! | `filtered!` | naked body: masks the second argument, jumps to the result of `next` |
//! | `vfork!` | the body of `vfork` |
//!
//! A function that is jumped to has the naked one's arguments, stack and return address.

#[cfg(target_arch = "aarch64")]
#[macro_use]
mod aarch64;
#[cfg(target_arch = "x86_64")]
#[macro_use]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::own_code;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::own_code;
