//! Whole managers on virtual machines, and on the real one where a file says so.
//!
//! One program: each of its own would compile the manager for the virtual machine again. Tests that
//! fork, handle signals, count the process's mappings, or use its manager are programs of their
//! own.

#[path = "../program/mod.rs"]
mod program;

mod asked_in_vain;
mod drain;
mod faults;
mod group_options;
mod isolated;
mod large;
mod limits;
mod model;
mod nodes;
mod own_caches;
mod percpu_in_group;
mod phases;
mod reconcile;
mod returning;
mod second_machine;
mod stopped;
