//! The code that depends on the processor. Each processor has a module. The modules define the
//! names below with the same contracts.
//!
//! # Contract
//!
//! | name | contract |
//! |---|---|
//! | `system_call` | one call with six arguments; returns the kernel's number |
//! | `trap`, `trap_text!` | ends the process by an instruction; that instruction's text |
//! | `thread_pointer` | the base of `registered_offset`, which no other thread has; never 0 |
//! | `word`, `set_word` | read and write the thread-local word at `__entered_of_neap` + `AT` |
//! | `words_offset` | distance of that word from the thread pointer |
//! | `count_down` | subtracts from such a word unless nothing would be left of it |
//! | `call_on_stack` | calls a function with another stack pointer; a debugger finds the caller |
//! | `registers`, `copy` | see [`call_stack`](crate::call_stack) |
//! | `signal_restorer` | the function by which a signal handler ends; 0: the kernel's |
//! | `interrupted` | registers of the context that a signal has interrupted |
//! | `ends_in_call` | whether the last instruction of some code is a call |
//! | `cpu_id` | the word `cpu_id` of this thread's rseq area |
//! | `has_instructions` | whether the processor has every instruction of the sequences |
//! | `TAG` | bits of an address that loads and stores ignore |
//! | `SIGNATURE` | the word before each abort exit, with which threads are registered |
//! | `CLOCK` | name of the vDSO's `clock_gettime` |
//! | `stacks`, `words` | the sequences, whose contracts are those of [`rseq`](crate::rseq) |
//! | `weak_variable!` | reads a variable that may not exist |
//!
//! The macros of `sequences` are the assembly from which the sequences of one processor are made.
//! `neap-objects` uses them, too, so that malloc and free are one block of assembly each.

#[cfg(target_arch = "aarch64")]
#[macro_use]
mod aarch64;
#[cfg(target_arch = "x86_64")]
#[macro_use]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

#[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), target_endian = "little")))]
compile_error!("neap has its system calls and restartable sequences for x86-64 and little-endian arm64 only");
