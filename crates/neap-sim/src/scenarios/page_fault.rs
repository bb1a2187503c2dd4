//! page_fault1: each CPU faults in 128 MiB, page by page, and gives all of it back, over and over.
//!
//! Source 003's figures are of 56 processes on one socket; other numbers of CPUs share one zone
//! here too, which is harder than what such machines have. Calibrated on 56 CPUs and `Fixed`, see
//! [`crate::cost`].

use crate::cost;
use crate::machine::{SECOND, Setup};
use crate::program;
use crate::random::Random;

/// Pages that each CPU swings by.
pub const PAGES: u32 = (128 << 20) / 4096;
/// Of the work for a page, what falls to the free; assumed: unmapping takes a sixth of the time of
/// faulting in.
const FREE_SHARE: f64 = 0.15;

/// For so many CPUs.
pub fn setup(cpus: usize, seed: u64, warm: u64, time: u64) -> Setup {
    let work = cost::page_work();
    let (up, down) = ((work * (1.0 - FREE_SHARE)) as u32, (work * FREE_SHARE) as u32);
    let program = |cpu: usize| program::swing(PAGES, 0, (up, down), 0, Random::new(seed, cpu as u64));
    Setup { warm, time, step: SECOND / 50, ..Setup::new((0..cpus).map(program).collect()) }
}
