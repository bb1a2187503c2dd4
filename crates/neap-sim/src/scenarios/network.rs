//! A network stream over the loopback: one CPU allocates blocks of order 3 in bursts, and another
//! CPU frees them.
//!
//! The published runs had 64 pairs on two sockets; 32 share a zone. No CPU allocates a block that
//! it has freed before, so the size of its list has no effect. Only the batch matters. Bursts, work
//! and rests are assumed: under `Fixed` the zone's lock is held about two fifths of the time and
//! CPUs are mostly idle, as published.

use crate::machine::Setup;
use crate::program::{Op, Program};
use crate::random::Random;

/// Pages in use in each of the two nodes of the published machine, before any change.
pub const BASE_USED: f64 = 5_479_861.0 / 4.0 / 2.0;
/// Pairs of CPUs.
const PAIRS: usize = 32;
/// Blocks of a burst.
const BURST: (u32, u32) = (16, 64);
/// Nanoseconds of work for a block, on either side.
const WORK: u32 = 500;
/// Nanoseconds between two bursts.
const REST: u32 = 2_500_000;
/// Blocks that may wait for the receiver.
const WINDOW: u32 = 256;

/// The stream.
pub fn setup(seed: u64, warm: u64, time: u64) -> Setup {
    let programs = (0..2 * PAIRS).map(|cpu| {
        let random = Random::new(seed, cpu as u64);
        if cpu < PAIRS { sender(cpu, random) } else { receiver(cpu - PAIRS, random) }
    });
    Setup { channels: PAIRS, warm, time, ..Setup::new(programs.collect()) }
}

fn sender(channel: usize, mut random: Random) -> Program {
    let mut left = 0;
    Box::new(move |view| {
        if view.held[0] > 0 {
            return Op::Send(0, channel, random.about(WORK));
        }
        if left == 0 || view.waiting >= WINDOW {
            left = random.between(BURST.0, BURST.1);
            return Op::Rest(u64::from(random.about(REST)));
        }
        left -= 1;
        Op::Take(3, 0, 0)
    })
}

fn receiver(channel: usize, mut random: Random) -> Program {
    Box::new(move |view| match view.held[0] {
        0 => Op::Receive(0, channel, random.about(WORK)),
        _ => Op::Give(0, 0),
    })
}
