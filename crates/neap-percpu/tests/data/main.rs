//! Per-CPU data on virtual machines, and on the real one where a file says so.
//!
//! One program: each of its own would compile the data for the virtual machine again.

#[path = "../machine/mod.rs"]
mod machine;

mod chunk_iter;
mod cycles;
mod histories;
mod kept;
mod known_bugs;
mod opened;
mod returning;
mod typed;
