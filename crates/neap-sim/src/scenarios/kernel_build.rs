//! A kernel build: processes that start, grow and exit, one after the other on each CPU.
//!
//! What is known of it is in source 003: 224 CPUs on two sockets, so 112 share a zone; the figure of one CPU's allocations
//! minus frees, which rises by about 30 000 pages and falls again about once a second; and what the unchanged kernel spends
//! in locks. From these come the size and the length of a compiler's process, and how many pages the small processes (shells,
//! drivers, assemblers) that start and exit beside it go through: as many as make `Fixed` wait 14.0 % of its time, which is
//! the base of the merged series, whose locks were the zone's alone. Every process has some blocks of higher order, which it
//! frees among its last pages, four of five with a page in between (the merged series' first patch, which lets only frees in a
//! row empty a list, left a fifth of the times that lists were emptied), and one in ten exits on another CPU than it grew on. No number
//! here was fitted to what a tuned policy makes of it.

use crate::machine::{SECOND, Setup};
use crate::program::{Op, Program};
use crate::random::Random;

/// CPUs of a socket.
pub const CPUS: usize = 112;
/// Pages of a process.
const PAGES: (u32, u32) = (20_000, 40_000);
/// Pages of small processes for each page of a compiler's.
const SMALL_SHARE: f64 = 2.1;
/// Pages of a small process.
const SMALL: (u32, u32) = (500, 4_000);
/// Pages of the compiler's process after which it takes a block of higher order.
const BETWEEN_BLOCKS: u32 = 3_000;
/// Blocks of higher order of a small process.
const BLOCKS: u32 = 3;
/// Nanoseconds for a page that is freed: unmapping it, among others.
const FREE: u32 = 150;
/// One in so many processes moves.
const MOVES: u32 = 10;
/// Of a hundred blocks, those that a page goes before.
const APART: u32 = 80;
/// One in so many pages stays in the cache of files.
const CACHED: u32 = 100;
/// The hand that nothing leaves.
const KEPT: usize = 3;
/// CPUs that still have something to do near the end.
const LAST: usize = 4;
/// Places in which moving processes meet.
const PLACES: usize = 8;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Grow,
    SmallGrow,
    SmallExit,
    Exit,
}

/// The build on so many CPUs, measured while there is work for all; or long after most of them have run out of it.
pub fn setup(cpus: usize, seed: u64, warm: u64, time: u64, nearly_done: bool) -> Setup {
    // Ten seconds before measuring begins.
    let end = |cpu| if nearly_done && cpu >= LAST { warm.saturating_sub(10 * SECOND) } else { u64::MAX };
    let programs = (0..cpus).map(|cpu| program(Random::new(seed, cpu as u64), end(cpu))).collect();
    Setup { channels: 2 * PLACES, warm, time, ..Setup::new(programs) }
}

fn program(mut random: Random, end: u64) -> Program {
    let mean = (PAGES.0 + PAGES.1) / 2;
    let work = (SECOND as f64 / (f64::from(mean) * (1.0 + SMALL_SHARE))) as u32 - FREE;
    let (mut phase, mut target, mut small, mut begun) = (Phase::Grow, 0, 0, false);
    // Pages of the compiler since the last small process, and since the last block.
    let (mut since_small, mut since_block) = (0, 0);
    // Blocks of the small process.
    let (mut blocks, mut block_went, mut last) = (0, false, false);
    Box::new(move |view| {
        if !begun {
            begun = true;
            return Op::Rest(u64::from(random.below(SECOND as u32)));
        }
        loop {
            match phase {
                Phase::Grow if target == 0 && view.now >= end => return Op::End,
                Phase::Grow if target == 0 => target = random.between(PAGES.0, PAGES.1),
                Phase::Grow if view.held[0] >= target => {
                    (phase, target) = (Phase::Exit, 0);
                    if random.below(MOVES) == 0 {
                        return Op::Swap(0, random.below(PLACES as u32) as usize);
                    }
                }
                Phase::Grow if f64::from(since_small) * SMALL_SHARE >= f64::from(small) => {
                    (phase, since_small) = (Phase::SmallGrow, 0);
                    small = random.between(SMALL.0, SMALL.1);
                }
                Phase::Grow => {
                    since_small += 1;
                    since_block += 1;
                    if since_block == BETWEEN_BLOCKS {
                        since_block = 0;
                        return Op::Take(random.between(1, 3) as u8, 2, random.about(work));
                    }
                    let hand = if random.below(CACHED) == 0 { KEPT } else { 0 };
                    return Op::Take(0, hand, random.about(work));
                }
                Phase::SmallGrow if view.held[1] >= small => {
                    phase = Phase::SmallExit;
                    if random.below(MOVES) == 0 {
                        return Op::Swap(1, random.below(PLACES as u32) as usize + PLACES);
                    }
                }
                Phase::SmallGrow if blocks < BLOCKS => {
                    blocks += 1;
                    return Op::Take(random.between(1, 3) as u8, 2, random.about(work));
                }
                Phase::SmallGrow => return Op::Take(0, 1, random.about(work)),
                Phase::SmallExit | Phase::Exit => {
                    let hand = if phase == Phase::Exit { 0 } else { 1 };
                    let left = if phase == Phase::Exit { view.held[2] } else { blocks.min(view.held[2]) };
                    if view.held[hand] + left == 0 {
                        (phase, blocks, last) = (Phase::Grow, 0, false);
                        continue;
                    }
                    // Blocks go last, some of them with a page in between.
                    last |= view.held[hand] <= left;
                    let apart = block_went && view.held[hand] > 0 && random.below(100) < APART;
                    block_went = last && left > 0 && !apart;
                    if !block_went {
                        return Op::Give(hand, FREE);
                    }
                    blocks = blocks.saturating_sub(1);
                    return Op::Give(2, FREE);
                }
            }
        }
    })
}
