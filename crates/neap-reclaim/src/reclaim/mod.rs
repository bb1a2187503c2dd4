//! Reclaim: which groups and shrinkers are asked for memory, in which order, and for how much.
//!
//! # Design
//!
//! Passes reach groups and shrinkers through the trait [`Domain`] alone. No threads are created
//! here. A pass runs in its caller's thread to its end or its deadline; threads wait only at the
//! [board of jobs](board).
//!
//! # Locking
//!
//! No lock is held while anything of the domain runs.

pub mod board;
mod lanes;
mod level;
mod pass;
pub mod seat;
mod share;
mod vain;
mod walk;

#[cfg(test)]
mod pass_tests;

pub use board::{Aim, Jobs, Next, Waiter};
pub use lanes::{BUDGET, Culprit, Excess, Lane, Lanes, Overdue, SLACK, Verdict};
pub use level::{Level, Levels};
pub use pass::{Ask, Domain, GOAL, Given, Got, Passes, goal};
pub use share::{Grip, press};
pub use vain::Vain;
pub use walk::{Lap, Walk, Walks};
