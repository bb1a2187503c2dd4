//! Orders in which a live set is freed.

use crate::random::Random;
use neap_base::listed_enum;

/// Distance between two blocks that are freed one after the other by stride; a prime.
const STRIDE: usize = 7919;

listed_enum! {
    /// An order relative to the one of allocation.
    #[derive(Clone, Copy, Debug)]
    pub enum Order {
        /// First allocated, first freed.
        Allocated,
        /// Last allocated, first freed.
        Reversed,
        /// By random numbers.
        Random,
        /// By steps of a prime distance.
        Stride,
    }
}

/// Puts blocks, which are in the order of their allocation, into another one.
pub fn reorder(blocks: &mut [*mut u8], order: Order, random: &mut Random) {
    match order {
        Order::Allocated => {}
        Order::Reversed => blocks.reverse(),
        Order::Random => (1..blocks.len()).rev().for_each(|n| blocks.swap(n, random.below(n + 1))),
        Order::Stride => {
            let before = blocks.to_vec();
            let mut visited = vec![false; before.len()];
            let mut at = 0;
            for block in blocks.iter_mut() {
                while visited[at] {
                    at = (at + 1) % before.len();
                }
                visited[at] = true;
                *block = before[at];
                at = (at + STRIDE) % before.len();
            }
        }
    }
}
