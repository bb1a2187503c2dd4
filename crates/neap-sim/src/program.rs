//! Programs: the steps of a virtual CPU.
//!
//! The machine asks a program for one step after the other. Before each step the program gets a
//! [`View`], which says how many blocks its CPU has. The program knows nothing of lists, zones or
//! policies. A CPU has [`HANDS`] *hands*. A hand is a first-in, first-out queue of blocks that the
//! CPU has allocated. A CPU can pass blocks to another CPU through a channel.

use crate::random::Random;

/// Number of hands of a CPU.
pub const HANDS: usize = 4;

/// One step.
#[derive(Clone, Copy, Debug)]
pub enum Op {
    /// Allocates a block of an order into a hand, then works for the given nanoseconds.
    Take(u8, usize, u32),
    /// Frees the oldest block of a hand, then works.
    Give(usize, u32),
    /// Puts the oldest block of a hand into a channel, then works.
    Send(usize, usize, u32),
    /// Waits for a block from a channel and takes it into a hand, then works.
    Receive(usize, usize, u32),
    /// Exchanges all blocks of a hand for all blocks of a channel. It models a process that moves
    /// away and another one that arrives.
    Swap(usize, usize),
    /// Puts the oldest block of a hand where any CPU can claim it by a number.
    Name(usize, u32),
    /// Waits for the block of a number and takes it into a hand.
    Claim(usize, u32),
    /// Works.
    Work(u64),
    /// Does nothing.
    Rest(u64),
    /// Does nothing until the machine wakes it. A watermark wakes the CPU of background reclaim.
    Sleep,
    /// Ends for good.
    End,
}

/// A program's view.
#[derive(Clone, Copy, Debug, Default)]
pub struct View {
    /// Nanoseconds since the start.
    pub now: u64,
    /// Blocks in each hand.
    pub held: [u32; HANDS],
    /// Blocks in the channel that was used last.
    pub waiting: u32,
    /// The last allocation failed.
    pub refused: bool,
    /// Background reclaim is due.
    pub reclaiming: bool,
}

/// Returns the next step.
pub type Program = Box<dyn FnMut(&View) -> Op + Send>;

/// Returns a program that allocates and frees `pages` pages, over and over. `work` has the
/// nanoseconds after each allocation and after each free. The program rests after each round.
pub fn swing(pages: u32, order: u8, work: (u32, u32), rest: u64, mut random: Random) -> Program {
    let blocks = (pages >> order).max(1);
    // The first round starts at a random place, so that CPUs do not run in step.
    let first = u64::from(random.below(blocks)) * u64::from(work.0 + work.1);
    let (mut up, mut begun) = (true, false);
    Box::new(move |view| {
        if !begun {
            begun = true;
            return Op::Rest(first);
        }
        if up && view.held[0] >= blocks {
            up = false;
        } else if !up && view.held[0] == 0 {
            up = true;
            if rest > 0 {
                return Op::Rest(rest);
            }
        }
        if up { Op::Take(order, 0, random.about(work.0)) } else { Op::Give(0, random.about(work.1)) }
    })
}

/// Goes up to `most` blocks and down to none, three steps back for seven forward.
pub fn mix(most: u32, order: u8, work: u32, mut random: Random) -> Program {
    let mut up = true;
    Box::new(move |view| {
        let held = view.held[0];
        up = if up { held < most } else { held == 0 };
        let take = held == 0 || held < most && up == (random.below(10) < 7);
        let work = random.about(work);
        if take { Op::Take(order, 0, work) } else { Op::Give(0, work) }
    })
}
