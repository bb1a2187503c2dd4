//! Orders in which a live set is freed.

use super::Random;
use std::vec;

/// Distance between two blocks that are freed one after the other by stride; a prime.
const STRIDE: usize = 7919;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Order {
    Allocated,
    Reversed,
    Random,
    Stride,
}

impl Order {
    pub(crate) const ALL: [Order; 4] = [Order::Allocated, Order::Reversed, Order::Random, Order::Stride];
}

/// Puts blocks, which are in the order of their allocation, into another one.
pub(crate) fn reorder(blocks: &mut [*mut u8], order: Order, random: &mut Random) {
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
