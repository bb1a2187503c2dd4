//! Objects on virtual machines, and on the real one where a file says so.
//!
//! One program: each of its own would compile the objects for the virtual machine again. Tests that
//! fork or bind themselves to a CPU are programs of their own.

#[path = "../instance/mod.rs"]
mod instance;

mod bound;
mod exhaustive;
mod filled;
mod holes;
mod owners;
mod paid_edges;
mod remote;
mod residual;
mod reuse;
mod verify;
