//! The code that depends on the processor: one module for each, with equal names and contracts.
//!
//! # Contract
//!
//! | name | contract |
//! |---|---|
//! | `chosen!` | the address that the dynamic linker chose for a name |
//! | `jump!` | text that jumps there, without a linkage table, which has no unwind information |
//! | `own_code` | addresses of this library's code |
//! | `or_other!` | naked body: calls `take`; for null, jumps to the result of `other` |
//! | `filtered!` | naked body: masks the second argument, jumps to the result of `next` |
//! | `vfork!` | the body of `vfork` |
//!
//! With `crt-static`, some of these names are unused, since their modules are left out.
//!
//! A naked body jumps to a function with its own arguments, stack and return address.

#[cfg(target_arch = "aarch64")]
#[macro_use]
#[cfg_attr(target_feature = "crt-static", allow(dead_code, unused_macros))]
mod aarch64;
#[cfg(target_arch = "x86_64")]
#[macro_use]
#[cfg_attr(target_feature = "crt-static", allow(dead_code, unused_macros))]
mod x86_64;

#[cfg(all(target_arch = "aarch64", not(target_feature = "crt-static")))]
pub(crate) use aarch64::own_code;
#[cfg(all(target_arch = "x86_64", not(target_feature = "crt-static")))]
pub(crate) use x86_64::own_code;
