//! Programs of a few CPUs: a big one that starts and exits, bursts with long pauses, a steady mix,
//! and an adversary whose actions change at random.
//!
//! Each tests one property of a policy. All numbers are assumed, and equal for every policy.

use crate::machine::{SECOND, Setup};
use crate::program::{self, Op, Program};
use crate::random::Random;

/// CPUs of these scenarios.
const CPUS: usize = 8;
/// Nanoseconds of work for a page that is allocated, and for one that is freed.
const WORK: (u32, u32) = (1_500, 200);
/// Most blocks that an adversary holds.
const MOST_HELD: u32 = 100_000;

/// A program of 2 GiB starts, works with few pages for two seconds, and exits. Seven other CPUs use
/// few pages meanwhile.
pub fn big_program(seed: u64, warm: u64, time: u64) -> Setup {
    let mut programs = vec![big(512 << 10, Random::new(seed, 0))];
    programs.extend((1..CPUS).map(|cpu| program::mix(150, 0, 20 * WORK.0, Random::new(seed, cpu as u64))));
    Setup { warm, time, ..Setup::new(programs) }
}

fn big(pages: u32, mut random: Random) -> Program {
    let (mut phase, mut since) = (0, 0);
    Box::new(move |view| {
        loop {
            match phase {
                0 if view.held[0] < pages => return Op::Take(0, 0, WORK.0),
                0 => (phase, since) = (1, view.now),
                1 if view.now < since + 2 * SECOND => {
                    let give = view.held[1] > 0 && random.below(200) < view.held[1];
                    let work = random.about(10 * WORK.0);
                    return if give { Op::Give(1, work) } else { Op::Take(0, 1, work) };
                }
                1 => phase = 2,
                _ if view.held[1] > 0 => return Op::Give(1, WORK.1),
                _ if view.held[0] > 0 => return Op::Give(0, WORK.1),
                _ => {
                    phase = 0;
                    return Op::Rest(SECOND);
                }
            }
        }
    })
}

/// Swings of 50 000 pages, or 9000 in blocks of order 3, with three seconds between two.
pub fn bursts(seed: u64, warm: u64, time: u64) -> Setup {
    let program = |cpu: usize| {
        let (pages, order) = if cpu.is_multiple_of(2) { (50_000, 0) } else { (9_000, 3) };
        program::swing(pages, order, WORK, 3 * SECOND, Random::new(seed, cpu as u64))
    };
    Setup { warm, time, ..Setup::new((0..CPUS).map(program).collect()) }
}

/// Random walks up and down, of several orders and depths.
pub fn steady_mix(seed: u64, warm: u64, time: u64) -> Setup {
    let program = |cpu: usize| {
        let (most, order) = [(3000, 0), (1500, 1), (800, 3), (400, 0)][cpu % 4];
        program::mix(most, order, WORK.0, Random::new(seed, cpu as u64))
    };
    Setup { warm, time, ..Setup::new((0..CPUS).map(program).collect()) }
}

/// Each CPU changes its action every 50 to 500 ms: it swings, walks at random, only allocates, only
/// frees, or does nothing.
pub fn adversary(seed: u64, warm: u64, time: u64) -> Setup {
    let programs = (0..CPUS).map(|cpu| fickle(Random::new(seed, cpu as u64)));
    Setup { warm, time, ..Setup::new(programs.collect()) }
}

fn fickle(mut random: Random) -> Program {
    // The schedule is the same for every policy. Only the duration of a step depends on the number
    // of steps so far.
    let mut jitter = random.clone();
    let (mut until, mut what, mut order, mut depth, mut up) = (0, 0, 0, 0, true);
    Box::new(move |view| {
        while view.now >= until {
            until += u64::from(random.between(50_000_000, 500_000_000));
            (what, order) = (random.below(5), [0, 0, 0, 1, 2, 3][random.below(6) as usize]);
            depth = random.between(100, 20_000) >> order;
        }
        let held: u32 = view.held[0];
        up = if up { held < depth } else { held == 0 };
        let take = match what {
            0 => up,
            1 => up == (jitter.below(10) < 7),
            2 => true,
            3 => false,
            _ => return Op::Rest(until - view.now),
        };
        let work = jitter.about(if take { WORK.0 } else { WORK.1 });
        match take {
            true if held < MOST_HELD => Op::Take(order, 0, work),
            false if held > 0 => Op::Give(0, work),
            _ => Op::Rest(until - view.now),
        }
    })
}
