//! page_fault1: each CPU faults in 128 MiB, page by page, and frees all of it, over and over.
//!
//! The published figures are of 56 processes on one socket. Other numbers of CPUs share one zone
//! here too, so there is more contention than on such machines. The scenario is calibrated on 56
//! CPUs and `Fixed`, see [`crate::cost`].

use crate::cost;
use crate::machine::{SECOND, Setup};
use crate::program;
use crate::random::Random;

/// Pages that each CPU swings by.
pub const PAGES: u32 = (128 << 20) / 4096;
/// Part of a page's work that belongs to the free. It is assumed: unmapping takes about a sixth of
/// the time of the fault.
const FREE_SHARE: f64 = 0.15;

/// The setup for `cpus` CPUs.
pub fn setup(cpus: usize, seed: u64, warm: u64, time: u64) -> Setup {
    let work = cost::page_work();
    let (up, down) = ((work * (1.0 - FREE_SHARE)) as u32, (work * FREE_SHARE) as u32);
    let program = |cpu: usize| program::swing(PAGES, 0, (up, down), 0, Random::new(seed, cpu as u64));
    Setup { warm, time, step: SECOND / 50, ..Setup::new((0..cpus).map(program).collect()) }
}
