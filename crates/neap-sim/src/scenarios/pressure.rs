//! Memory pressure: programs that swing, in nodes of a gibibyte that a cache of files fills up
//! again and again.
//!
//! A node's reclaimer starts at the low watermark, and frees pages of the cache until the high one
//! is reached. The start is early if free and listed pages together exceed the high watermark,
//! since then only the pages in lists have caused it. Of two nodes, only the second has a
//! reclaimer. It takes the oldest pages of the cache, whatever their node. The first one, where
//! files are read, runs out of memory, and its allocations come from the second.

use crate::machine::{SECOND, Setup};
use crate::program::{self, Op, Program};
use crate::random::Random;

/// CPUs that swing, of one node.
const SWINGERS: usize = 6;
/// Pages of a node.
const MANAGED: u32 = 1 << 18;

/// One or two nodes with six swings each, one reader of files, one reclaimer.
pub fn setup(nodes: usize, seed: u64, warm: u64, time: u64) -> Setup {
    let swingers = SWINGERS * nodes;
    let swing = |cpu: usize| {
        let pages = 9_000 + 2_000 * (cpu / nodes) as u32;
        program::swing(pages, 0, (1_500, 200), 0, Random::new(seed, cpu as u64))
    };
    let mut programs: Vec<Program> = (0..swingers).map(swing).collect();
    // The number of the reader's CPU is a multiple of the number of nodes, so the reader is on the
    // first node. The reclaimer has the next CPU, on the second node if there are two.
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
    let mut reclaimers = vec![None; nodes];
    reclaimers[nodes - 1] = Some(swingers + 1);
    let step = SECOND / 20_000;
    Setup { managed: MANAGED, nodes, channels: 1, warm, time, step, reclaimers, ..Setup::new(programs) }
}
