//! Reclaim: who is asked for memory, in which order, how hard, and what is made of what they gave.
//!
//! Sits between whoever needs memory (a charge at its limit, a budget at its watermark, a program) and the shrinkers, which it reaches by
//! the trait [`Domain`] alone. Here no threads are made, and nobody waits but at the [board of jobs](board): a pass runs in its caller's thread to its end or its
//! deadline. Holds no lock while anything of the domain's runs.

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
