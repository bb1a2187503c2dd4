//! Groups on virtual machines, and on the real one where a file says so.
//!
//! One program: each of its own would compile the groups for the virtual machine again. Tests that
//! fork are a program of their own.

#[path = "../host/mod.rs"]
mod host;

mod cases;
mod churn;
mod known_bugs;
mod limits;
mod model;
mod readers;
mod requests;
mod stalls;
mod waiting;
mod waiting_cases;
mod waiting_threads;
