//! Programs of the model's CPUs, and measurements of a run.
//!
//! A program is a closure that returns the next operation. It has no end unless it returns
//! [`Op::End`].

use super::fixed::Still;
use super::model_tests::{Costs, Model, Op, Program, Random};
use super::{Adaptive, Limits, Policy};
use std::boxed::Box;
use std::vec::Vec;

/// 64 GiB of pages: ample memory.
pub(super) const AMPLE: u32 = 1 << 24;

/// Takes and frees `pages` pages, over and over, with a rest after each round.
pub(super) fn swing(pages: u32, order: u8, rest: u64) -> Program {
    let (mut step, blocks) = (0, pages >> order);
    Box::new(move || {
        step = (step + 1) % (2 * blocks + 1);
        match step {
            0 => Op::Rest(rest),
            step if step <= blocks => Op::Take(order),
            _ => Op::Give(order),
        }
    })
}

/// Goes up to `most` blocks and down to none, with three steps back for seven ahead.
pub(super) fn mix(most: u32, order: u8, seed: u64) -> Program {
    let (mut random, mut held, mut up) = (Random(seed), 0, true);
    Box::new(move || {
        up = if up { held < most } else { held == 0 };
        let take = held == 0 || held < most && up == (random.below(10) < 7);
        held = if take { held + 1 } else { held - 1 };
        if take { Op::Take(order) } else { Op::Give(order) }
    })
}

/// `first` for a number of operations, then `second`.
pub(super) fn then(mut first: Program, operations: u32, mut second: Program) -> Program {
    let mut left = operations;
    Box::new(move || {
        left = left.saturating_sub(1);
        if left > 0 { first() } else { second() }
    })
}

pub(super) fn only(op: Op) -> Program {
    Box::new(move || op)
}

/// Warms up, then measures the costs of a time.
pub(super) fn measure<T: Policy>(bounds: Limits, programs: Vec<Program>, warm: u64, time: u64) -> (Costs, Model<T>) {
    let mut model = Model::new(bounds, AMPLE, programs);
    model.run(warm).costs();
    let costs = model.run(time).costs();
    (costs, model)
}

/// Runs the programs under `Fixed` and `Adaptive`, and prints both costs.
pub(super) fn compare(
    name: &str,
    bounds: Limits,
    programs: impl Fn() -> Vec<Program>,
    warm: u64,
    time: u64,
) -> (Costs, Costs) {
    let (fixed, _) = measure::<Still>(bounds, programs(), warm, time);
    let (adaptive, _) = measure::<Adaptive>(bounds, programs(), warm, time);
    for (policy, costs) in [("fixed", fixed), ("adaptive", adaptive)] {
        std::println!(
            "{name:24} {policy:9} {:6} locks/M  {:7} ms waited  {:6} pages held  {:5} in one call",
            costs.per_million(),
            costs.waited / 1_000_000,
            costs.average_held(),
            costs.most_moved
        );
    }
    (fixed, adaptive)
}
