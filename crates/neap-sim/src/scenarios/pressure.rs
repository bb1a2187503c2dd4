//! Memory pressure: programs that swing, in a gibibyte that a cache of files fills up to the low watermark again and again.
//!
//! When the low watermark is reached a reclaimer frees pages of the cache until the high one is. It begins early where
//! free pages and those in lists are together above the high watermark: what lists keep is then its only reason.

use crate::machine::{SECOND, Setup};
use crate::program::{self, Op, Program};
use crate::random::Random;

/// CPUs that swing.
const SWINGERS: usize = 6;
/// Pages of the machine.
const MANAGED: u32 = 1 << 18;

/// The machine: six swings, one reader of files, the reclaimer.
pub fn setup(seed: u64, warm: u64, time: u64) -> Setup {
    let swing = |cpu: usize| {
        let pages = 9_000 + 2_000 * cpu as u32;
        program::swing(pages, 0, (1_500, 200), 0, Random::new(seed, cpu as u64))
    };
    let mut programs: Vec<Program> = (0..SWINGERS).map(swing).collect();
    programs.push(Box::new(|view| match (view.refused, view.held[0]) {
        (_, 1..) => Op::Send(0, 0, 3_000),
        (true, _) if view.now % 2 == 0 => Op::Rest(1_000_001),
        _ => Op::Take(0, 0, 0),
    }));
    programs.push(Box::new(|view| match view.held[0] {
        1.. => Op::Give(0, 300),
        0 if view.reclaiming => Op::Receive(0, 0, 0),
        0 => Op::Sleep,
    }));
    let step = SECOND / 20_000;
    Setup { managed: MANAGED, channels: 1, warm, time, step, reclaimer: Some(SWINGERS + 1), ..Setup::new(programs) }
}
