//! Pages on virtual machines, and on the real one where a file says so.
//!
//! One program: each of its own would compile the pages for the virtual machine again. Tests that
//! fork are a program of their own.

#[path = "../machine/mod.rs"]
mod machine;

mod faults;
mod holes;
mod huge_runs;
mod limits;
mod nodes;
mod pages;
mod populate;
mod release;
mod settings;
mod stress;
mod survey;
