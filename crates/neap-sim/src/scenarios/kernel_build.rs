//! A kernel build: processes that start, grow and exit, one after the other on each CPU.
//!
//! The model follows figures that were published with two series of auto-tuning for Linux's page
//! lists:
//!
//! * 224 CPUs are the hardware threads of two sockets, so 112 share a zone, with lists of 367 pages
//!   without tuning.
//! * One CPU's allocations minus frees rise by about 30 000 pages and fall again about once a
//!   second: a compiler's process. In the ten seconds that the figure shows, they always fell back
//!   to about the same level. So processes rarely exit on a different CPU from the one on which
//!   they grew.
//! * A process that exits frees its pages, then its page directory, a block of order 1, which
//!   empties the list in the unchanged kernel. If a block empties the list only right after another
//!   block, 19.5 % of these events remain. If the list must also have a batch, 7.1 % remain. So one
//!   process in fourteen frees other blocks before its directory, almost three on average.
//! * The first of these changes kept 4.4 % of the pages from the zone. The number of exiting
//!   processes follows from this share: small processes have 1500 pages on average. In the
//!   simulation the change keeps 4.8 %.
//! * The unchanged kernel spends 15.38 % in allocations and in frees of single pages. That gives
//!   the number of pages of the small processes (shells, drivers, assemblers) beside the
//!   compiler's.
//!
//! No number here was fitted to the results of a tuned policy.

use crate::machine::{SECOND, Setup};
use crate::program::{Op, Program};
use crate::random::Random;

/// CPUs of a socket.
pub const CPUS: usize = 112;
/// Pages of a zone, with which lists keep 367 pages.
const MANAGED: u32 = 30_200_000;
/// Pages of a compiler's process.
const PAGES: (u32, u32) = (20_000, 40_000);
/// Mean of `PAGES`, and so pages in a second.
const MEAN: u32 = (PAGES.0 + PAGES.1) / 2;
/// Pages of small processes for each page of a compiler's.
const SMALL_SHARE: f64 = 0.87;
/// Pages of a small process.
const SMALL: (u32, u32) = (300, 2_800);
/// One process in this many has further blocks besides its directory when it exits. `MORE_BLOCKS`
/// has the bounds of their number.
const WITH_BLOCKS: u32 = 14;
const MORE_BLOCKS: (u32, u32) = (1, 5);
/// Nanoseconds of freeing a page, unmapping included.
const FREE: u32 = 150;
/// One process in this many moves.
const MOVES: u32 = 30;
/// One page in this many stays in the cache of files.
const CACHED: u32 = 100;
/// Numbers of the hands: pages of the compiler, pages of the small process, blocks of both, and
/// pages that stay.
const COMPILER: usize = 0;
const SMALL_ONE: usize = 1;
const BLOCKS: usize = 2;
const KEPT: usize = 3;
/// CPUs that still have work near the end.
const LAST: usize = 4;
/// Places in which moving processes meet.
const PLACES: usize = 8;

/// When the build is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BuildStage {
    /// While there is work for all CPUs.
    Busy,
    /// Long after most CPUs have run out of work.
    NearlyDone,
}

/// The build on `cpus` CPUs, measured at a stage of it.
pub fn setup(cpus: usize, seed: u64, warm: u64, time: u64, stage: BuildStage) -> Setup {
    // Amount of work that CPUs without waits would finish ten seconds before the measurement
    // begins. The total is the same for every policy. A fixed share of it stays in the cache of
    // files.
    let share = warm.saturating_sub(10 * SECOND) as f64 / SECOND as f64 * f64::from(MEAN);
    let share = |cpu| if stage == BuildStage::NearlyDone && cpu >= LAST { share } else { f64::MAX };
    let programs = (0..cpus).map(|cpu| program(Random::new(seed, cpu as u64), share(cpu))).collect();
    Setup { managed: MANAGED, channels: 2 * PLACES, siblings: true, warm, time, ..Setup::new(programs) }
}

/// A process of the build.
#[derive(Clone, Copy, Default)]
struct Process {
    /// Pages that it grows to.
    target: u32,
    /// Blocks that it still needs, and those that it has.
    wanted: u32,
    blocks: u32,
    exits: bool,
}

impl Process {
    fn new(target: u32, random: &mut Random) -> Process {
        let more = if random.below(WITH_BLOCKS) == 0 { random.between(MORE_BLOCKS.0, MORE_BLOCKS.1) } else { 0 };
        Process { target, wanted: 1 + more, ..Process::default() }
    }
}

/// A CPU's processes, up to `share` pages of compilers.
fn program(mut random: Random, share: f64) -> Program {
    let work = (SECOND as f64 / (f64::from(MEAN) * (1.0 + SMALL_SHARE))) as u32 - FREE;
    let (mut compiler, mut small, mut begun) = (Process::default(), Process::default(), false);
    // Pages that the compilers and the small processes have used so far.
    let (mut compiled, mut others) = (0.0, 0.0);
    Box::new(move |view| {
        if !begun {
            begun = true;
            return Op::Rest(u64::from(random.below(SECOND as u32)));
        }
        loop {
            // A small process runs in the middle of the compiler's.
            let (process, hand) = if small.target > 0 { (&mut small, SMALL_ONE) } else { (&mut compiler, COMPILER) };
            let is_compiler = hand == COMPILER;
            let held = view.held[hand];
            if process.target == 0 {
                if compiled >= share {
                    return Op::End;
                }
                *process = Process::new(random.between(PAGES.0, PAGES.1), &mut random);
            } else if process.wanted > 0 {
                process.wanted -= 1;
                process.blocks += 1;
                // The directory is not the last block that it takes, but the last that it frees.
                let order = if process.wanted > 0 { random.between(1, 3) as u8 } else { 1 };
                return Op::Take(order, BLOCKS, random.about(work));
            } else if !process.exits && held >= process.target {
                process.exits = true;
                if random.below(MOVES) == 0 {
                    return Op::Swap(hand, random.below(PLACES as u32) as usize + PLACES * hand);
                }
            } else if process.exits && held > 0 {
                return Op::Give(hand, FREE);
            } else if process.exits && process.blocks > 0 && view.held[BLOCKS] > 0 {
                process.blocks -= 1;
                return Op::Give(BLOCKS, FREE);
            } else if process.exits {
                *process = Process::default();
            } else if is_compiler && compiled * SMALL_SHARE >= others {
                small = Process::new(random.between(SMALL.0, SMALL.1), &mut random);
                others += f64::from(small.target);
            } else {
                compiled += f64::from(u32::from(is_compiler));
                let stays = is_compiler && random.below(CACHED) == 0;
                return Op::Take(0, if stays { KEPT } else { hand }, random.about(work));
            }
        }
    })
}
