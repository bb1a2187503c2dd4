//! An exhaustive explorer of the per-CPU slot protocol: every interleaving of a few threads on two CPUs.
//!
//! `protocol` has the sequences in plain words and as programs, `model` the machine with its store
//! buffers and what it cannot show, `steps` what can happen next, `execute` what an instruction does,
//! `check` what must hold, `search` the search. This file has the scenarios in which the protocol must hold; `mutants` has the ones in
//! which a wrong protocol must be caught. loom cannot do this: it knows neither restartable sequences
//! nor membarrier.
//!
//! Sits beside the crate and touches none of its code: what is proved is the design, so a change of a
//! sequence must be made in `protocol` too. Single threaded; holds no lock; never uses random numbers.
//!
//! Every scenario also says which events must have been seen (a fence that aborted a sequence, a lost
//! exchange), so that none passes because nothing happened in it.
//! `cargo test --test rseq_explorer -- --nocapture` prints the number of states, and for each mutant
//! the shortest way into damage as numbered steps.

#![allow(unreachable_pub, reason = "a test exports nothing; pub here means: for the other files")]

mod check;
mod execute;
mod model;
mod mutants;
mod protocol;
mod search;
mod steps;

use crate::model::event::*;
use crate::model::*;
use crate::protocol::Op::*;
use crate::protocol::{Mutant, Op};
use crate::search::{Report, explore};
use crate::steps::Machine;

/// A thread that may run on CPU 0 and CPU 1.
fn worker(name: &'static str, ops: &[Op]) -> Actor {
    Actor { name, ops: ops.to_vec(), cpus: 0b011, handler: None, rseq: Rseq::Registered, stays: false }
}

/// A thread on a CPU of its own, where nobody disturbs it.
fn remote(name: &'static str, ops: &[Op]) -> Actor {
    Actor { cpus: 0b100, ..worker(name, ops) }
}

/// Row 0 is sheaf A, row 1 is sheaf B; further sheaves are in the barn. Fences may fail.
fn scenario(name: &'static str, sheaves: &[&[u8]], actors: Vec<Actor>) -> Scenario {
    Scenario {
        name,
        actors,
        rows: [A, B],
        sheaves: sheaves.iter().map(|objects| objects.to_vec()).collect(),
        barn: ((1 << sheaves.len()) - 1) & !0b11,
        fence_may_fail: true,
        mutant: Mutant::None,
        at_rest: false,
    }
}

fn look(scenario: Scenario) -> Report {
    let kind = if scenario.at_rest { "at rest" } else { "every state" };
    let (mutant, report) = (scenario.mutant, explore(&Machine::new(scenario)));
    let Report { name, states, steps, .. } = report;
    println!("{name} ({mutant:?}, {kind}): {states} states, {steps} steps");
    report
}

/// The scenario has no bad state, and everything in `must_see` happened somewhere in it.
fn holds(scenario: Scenario, must_see: u32) {
    let report = look(scenario);
    if let Some((wrong, trace)) = report.violation {
        panic!("{}: {wrong}, after\n{trace}", report.name);
    }
    let missing = must_see & !report.events;
    assert!(missing == 0, "{}: events {missing:#b} of model::event never happened", report.name);
}

#[test]
fn push_push_take() {
    let actors = vec![worker("W1", &[Push(2)]), worker("W2", &[Push(3)]), remote("T", &[Take(0)])];
    holds(
        scenario("push, push, take", &[&[1], &[]], actors),
        PUSHED | ABORT_SWITCH | ABORT_FENCE | FENCE_DRAINED | TOOK_OBJECT | PUT_BACK,
    );
}

#[test]
fn push_pop_take() {
    let actors = vec![worker("W1", &[Push(2)]), worker("W2", &[Pop, Push(0)]), remote("T", &[Take(0)])];
    holds(
        scenario("push, pop, take", &[&[1], &[4]], actors),
        PUSHED | POPPED | ABORT_FENCE | FENCE_DRAINED | TOOK_OBJECT | PUT_BACK,
    );
}

#[test]
fn take_gives_the_row_back_before_it_empties_the_sheaf() {
    let actors = vec![worker("W1", &[Push(2)]), worker("W2", &[ColdPush(3)]), remote("T", &[Take(0)])];
    let released = scenario("row given back first", &[&[1], &[], &[]], actors);
    holds(Scenario { mutant: Mutant::ReleaseFirst, ..released }, PUSHED | TOOK_OBJECT | EXCHANGED | PUT_BACK);
}

#[test]
fn exchange_take_push() {
    let actors = vec![worker("W1", &[ColdPush(3)]), worker("W2", &[Push(4)]), remote("T", &[Take(0)])];
    holds(
        scenario("exchange, take, push", &[&[1, 2], &[], &[]], actors),
        PUSHED | EXCHANGED | EXCHANGE_LOST | TOOK_OBJECT | PUT_BACK | MIGRATED | ABORT_FENCE,
    );
}

#[test]
fn exchange_against_exchange() {
    // A sheaf that leaves a row comes back from the barn, so an expected pointer may be stale and right again.
    let actors = vec![worker("W1", &[ColdPush(3)]), worker("W2", &[ColdPop, ColdPop])];
    let both = scenario("exchange, exchange", &[&[1, 2], &[], &[]], actors);
    holds(both, PUSHED | POPPED | EXCHANGED | EXCHANGE_LOST | MIGRATED);
}

#[test]
fn three_exchanges() {
    let actors = vec![worker("W1", &[ColdPush(3)]), worker("W2", &[ColdPop]), worker("W3", &[ColdPop])];
    holds(
        scenario("three exchanges", &[&[1, 2], &[], &[]], actors),
        PUSHED | POPPED | EXCHANGED | EXCHANGE_LOST | MIGRATED | ABORT_SWITCH,
    );
}

#[test]
fn exchange_against_exchange_and_take() {
    let actors = vec![worker("W1", &[ColdPush(3)]), worker("W2", &[ColdPop]), remote("T", &[Take(0)])];
    holds(
        scenario("exchange, exchange, take", &[&[1, 2], &[], &[]], actors),
        EXCHANGED | EXCHANGE_LOST | TOOK_OBJECT | PUT_BACK | MIGRATED,
    );
}

#[test]
fn pop_with_a_handler_that_pushes_and_take() {
    let mut w1 = worker("W1", &[Pop]);
    w1.handler = Some(Push(2));
    let actors = vec![w1, worker("W2", &[Push(3)]), remote("T", &[Take(0)])];
    holds(
        scenario("pop with a handler that pushes, push, take", &[&[1], &[]], actors),
        PUSHED | POPPED | ABORT_SIGNAL | ABORT_FENCE | TOOK_OBJECT | PUT_BACK,
    );
}

#[test]
fn exchange_with_a_handler_that_pops_and_take() {
    let mut w1 = worker("W1", &[ColdPush(3)]);
    w1.handler = Some(Pop);
    let actors = vec![w1, remote("T", &[Take(0)])];
    holds(
        scenario("exchange with a handler that pops, take", &[&[1, 2], &[], &[]], actors),
        POPPED | EXCHANGED | EXCHANGE_LOST | ABORT_SIGNAL | ABORT_FENCE | TOOK_OBJECT,
    );
}

#[test]
fn two_takers_and_exchange() {
    let actors = vec![worker("W1", &[ColdPush(3)]), worker("T1", &[Take(0)]), remote("T2", &[Take(0)])];
    holds(
        scenario("two takers, exchange", &[&[1, 2], &[], &[]], actors),
        BUSY | EXCHANGED | EXCHANGE_LOST | TOOK_OBJECT | PUT_BACK,
    );
}

#[test]
fn a_taker_that_is_scheduled_like_everybody_else() {
    let actors = vec![worker("W1", &[Push(2)]), worker("W2", &[Pop]), worker("T", &[Take(0), Take(1)])];
    holds(
        scenario("push, pop, taker on the same CPUs", &[&[1], &[4]], actors),
        PUSHED | POPPED | TOOK_OBJECT | PUT_BACK | ABORT_FENCE,
    );
}

#[test]
fn a_thread_takes_after_it_pushed() {
    let actors = vec![worker("W1", &[Push(2), Take(0)]), worker("W2", &[Take(1), Pop])];
    holds(
        scenario("every thread pushes or pops, and takes", &[&[1], &[4]], actors),
        PUSHED | POPPED | TOOK_OBJECT | ABORT_FENCE | FENCE_DRAINED,
    );
}

#[test]
fn migration_in_every_gap() {
    let actors =
        vec![worker("W1", &[Push(2)]), worker("W2", &[Push(3)]), worker("W3", &[Pop]), remote("T", &[Take(0)])];
    holds(
        scenario("three threads on two CPUs, take", &[&[1], &[4]], actors),
        PUSHED | POPPED | ABORT_SWITCH | ABORT_FENCE | TOOK_OBJECT,
    );
}

#[test]
fn fork_closes_push_and_exchange() {
    let actors = vec![worker("W1", &[Push(4)]), worker("W2", &[ColdPush(3)]), remote("F", &[Fork])];
    // The last event is a known limit: a sheaf that another thread holds in its cold path is in the
    // memory that fork copies, but in no list there.
    holds(
        scenario("fork, push, exchange", &[&[1, 2], &[], &[]], actors),
        PUSHED
            | EXCHANGED
            | EXCHANGE_LOST
            | CLOSED_OUT
            | ABORT_FENCE
            | FENCE_DRAINED
            | SNAPSHOT
            | SNAPSHOT_MISSES_SHEAF,
    );
}

#[test]
fn fork_waits_for_a_taker() {
    let actors = vec![worker("W1", &[Push(2)]), worker("T", &[TakeLocked(0)]), remote("F", &[Fork])];
    let forks = scenario("fork, take under the mutex, push", &[&[1], &[]], actors);
    holds(forks, PUSHED | TOOK_OBJECT | CLOSED_OUT | SNAPSHOT);
}

#[test]
fn fork_and_a_taker_and_push_and_exchange() {
    let t = worker("T", &[TakeLocked(0)]);
    let actors = vec![worker("W1", &[Push(3)]), worker("W2", &[ColdPush(4)]), t, remote("F", &[Fork])];
    holds(
        scenario("fork, take under the mutex, push, exchange", &[&[1, 2], &[], &[]], actors),
        PUSHED | EXCHANGED | EXCHANGE_LOST | TOOK_OBJECT | PUT_BACK | CLOSED_OUT | ABORT_FENCE | SNAPSHOT,
    );
}

#[test]
fn a_thread_without_registration_takes_the_shared_path() {
    let mut w1 = worker("W1", &[ColdPush(2), ColdPop]);
    w1.rseq = Rseq::Unregistered;
    let actors = vec![w1, worker("W2", &[Push(3)]), remote("T", &[Take(0)])];
    holds(scenario("an unregistered thread, push, take", &[&[1], &[], &[]], actors), PUSHED | TOOK_OBJECT);
}

#[test]
fn a_cpu_beyond_the_table_takes_the_shared_path() {
    let w1 = Actor { cpus: 0b101, ..worker("W1", &[ColdPush(2), ColdPop]) };
    let actors = vec![w1, worker("W2", &[Push(3), Take(0)])];
    holds(scenario("a CPU that came late, push, take", &[&[1], &[], &[]], actors), PUSHED | POPPED | TOOK_OBJECT);
}

#[test]
fn a_row_that_was_drained_fills_again() {
    let actors = vec![worker("W1", &[ColdPush(1), ColdPush(2), ColdPop]), remote("T", &[Take(0)])];
    let drained = Scenario { rows: [EMPTY0, EMPTY0], barn: 0b11, ..scenario("rows at EMPTY0", &[&[], &[]], actors) };
    holds(drained, PUSHED | POPPED | EXCHANGED | EXCHANGE_LOST | TOOK_OBJECT | PUT_BACK);
}

#[test]
fn lock_bit_with_a_taker_that_waits() {
    let actors = vec![worker("W1", &[LockedPop]), worker("W2", &[Push(3)]), remote("T", &[Take(0)])];
    holds(
        scenario("pop under the lock bit, push, take", &[&[1], &[4]], actors),
        PUSHED | TOOK_OBJECT | WAITED_FOR_BIT | PUT_BACK,
    );
}
