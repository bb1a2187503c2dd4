//! An exhaustive explorer of the per-CPU slot protocol: every interleaving of a few threads on two
//! CPUs.
//!
//! loom cannot do this: it knows neither restartable sequences nor membarrier. The files:
//! * `protocol`: the sequences in plain words;
//! * `assembler`: the sequences as programs;
//! * `model`: the machine with its store buffers, and what it cannot show;
//! * `steps`: what can happen next;
//! * `execute`: the effect of an instruction;
//! * `check`: the invariants;
//! * `search`: the search;
//! * this file: the scenarios in which the protocol must hold;
//! * `mutants`: those in which a wrong protocol must be caught;
//! * `rcu` and `alter`: both for readers and for stocks;
//! * `weak`: protocols that are right on x86-64 alone, and loads out of order;
//! * `listing`: the model's sequences for a comparison with machine code.
//!
//! The explorer uses none of the crate's code. `cargo xtask sequences` proves that the sequences of
//! a built library are those of `assembler`. The rest of the protocol, such as a take, must be
//! changed in both. The explorer is single threaded and uses no random numbers.
//!
//! Every scenario also lists events that must have been seen, such as a fence that aborted a
//! sequence, so that none passes because nothing happened in it. `cargo test --test rseq_explorer
//! -- --nocapture` prints the number of states, and for each mutant the shortest way into damage as
//! numbered steps.

#![allow(unreachable_pub, reason = "a test exports nothing; pub here means: for the other files")]

mod alter;
mod assembler;
mod check;
mod execute;
mod listing;
mod model;
mod mutants;
mod protocol;
mod rcu;
mod search;
mod steps;
mod weak;

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

/// An undisturbed thread on a CPU of its own.
fn remote(name: &'static str, ops: &[Op]) -> Actor {
    Actor { cpus: 0b100, ..worker(name, ops) }
}

/// Readers and retiring threads. Fences may fail.
fn reading(name: &'static str, actors: Vec<Actor>) -> Scenario {
    scenario(name, &[], &[], &[], actors)
}

/// One class; region A is CPU 0's, region B is CPU 1's. Stacks have room for two. Fences may fail.
fn scenario(name: &'static str, a: &[u8], b: &[u8], barn: &[u8], actors: Vec<Actor>) -> Scenario {
    Scenario {
        name,
        actors,
        stacks: [vec![a.to_vec()], vec![b.to_vec()]],
        barn: barn.iter().fold(0, |mask, object| mask | 1 << object),
        second: 0,
        capacity: 2,
        drained: false,
        one_region: false,
        fence_may_fail: true,
        mutant: Mutant::None,
        at_rest: false,
        order: Order::Weak,
    }
}

/// Adds a second class, with its objects in the two regions and its objects elsewhere.
fn second_class(first: Scenario, a: &[u8], b: &[u8], elsewhere: &[u8]) -> Scenario {
    let [a0, b0] = first.stacks;
    let second = a.iter().chain(b).chain(elsewhere).fold(0, |mask, object| mask | 1 << object);
    let stacks = [[a0, vec![a.to_vec()]].concat(), [b0, vec![b.to_vec()]].concat()];
    Scenario { stacks, second, ..first }
}

fn look(scenario: Scenario) -> Report {
    let kind = if scenario.at_rest { "at rest" } else { "every state" };
    let (mutant, report) = (scenario.mutant, explore(&Machine::new(scenario)));
    let Report { name, states, steps, .. } = report;
    println!("{name} ({mutant:?}, {kind}): {states} states, {steps} steps");
    report
}

/// The scenario has no bad state and none without a way to the end; everything in `must_see`
/// happened in it.
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
    let actors = vec![worker("W1", &[Push(2)]), worker("W2", &[Push(3)]), remote("T", &[Take(0, 1)])];
    holds(
        scenario("push, push, take", &[1], &[], &[], actors),
        PUSHED | ABORT_SWITCH | ABORT_FENCE | FENCE_DRAINED | TOOK_OBJECT | PUT_BACK | REFUSED,
    );
}

#[test]
fn push_pop_take() {
    let actors = vec![worker("W1", &[Push(2)]), worker("W2", &[Pop(0), Push(0)]), remote("T", &[Take(0, 1)])];
    holds(
        scenario("push, pop, take", &[1], &[4], &[], actors),
        PUSHED | POPPED | ABORT_FENCE | FENCE_DRAINED | TOOK_OBJECT | PUT_BACK | REFUSED,
    );
}

#[test]
fn migration_in_every_gap() {
    let actors =
        vec![worker("W1", &[Push(2)]), worker("W2", &[Push(3)]), worker("W3", &[Pop(0)]), remote("T", &[Take(0, 1)])];
    holds(
        scenario("three threads on two CPUs, take", &[1], &[4], &[], actors),
        PUSHED | POPPED | ABORT_SWITCH | ABORT_FENCE | TOOK_OBJECT,
    );
}

#[test]
fn pop_with_a_handler_that_pushes_and_take() {
    let w1 = Actor { handler: Some(Push(2)), ..worker("W1", &[Pop(0)]) };
    let actors = vec![w1, worker("W2", &[Push(3)]), remote("T", &[Take(0, 1)])];
    holds(
        scenario("pop with a handler that pushes, push, take", &[1], &[], &[], actors),
        PUSHED | POPPED | ABORT_SIGNAL | ABORT_FENCE | TOOK_OBJECT | PUT_BACK,
    );
}

#[test]
fn slow_push_with_a_handler_that_pops_and_take() {
    let w1 = Actor { handler: Some(Pop(0)), ..worker("W1", &[SlowPush(3)]) };
    let actors = vec![w1, remote("T", &[Take(0, 1)])];
    holds(
        scenario("slow push with a handler that pops, take", &[1, 2], &[], &[], actors),
        PUSHED | POPPED | POPPED_MANY | ACTIVATED | ABORT_SIGNAL | ABORT_FENCE | TOOK_OBJECT,
    );
}

#[test]
fn a_full_stack_and_a_take() {
    let actors = vec![worker("W1", &[SlowPush(3)]), worker("W2", &[Pop(0)]), remote("T", &[Take(0, 1)])];
    holds(
        scenario("slow push, pop, take", &[1, 2], &[4], &[], actors),
        PUSHED | POPPED | POPPED_MANY | ACTIVATED | REFUSED | ABORT_FENCE | TOOK_OBJECT | PUT_BACK,
    );
}

#[test]
fn an_empty_stack_and_a_take() {
    let actors = vec![worker("W1", &[SlowPop(0)]), worker("W2", &[Push(1)]), remote("T", &[Take(0, 1)])];
    holds(
        scenario("slow pop, push, take", &[], &[4], &[2, 3], actors),
        PUSHED | POPPED | PUSHED_MANY | REFUSED | ABORT_FENCE | TOOK_OBJECT | PUT_BACK,
    );
}

#[test]
fn slow_against_slow() {
    let actors = vec![worker("W1", &[SlowPush(3)]), worker("W2", &[SlowPop(0)])];
    holds(
        scenario("slow push, slow pop", &[1, 2], &[], &[4], actors),
        PUSHED | POPPED | POPPED_MANY | ABORT_SWITCH | ACTIVATED,
    );
}

#[test]
fn many_go_both_ways_and_a_take() {
    let actors = vec![worker("W1", &[Flush(0)]), worker("W2", &[Fill(0)]), remote("T", &[Take(0, 1)])];
    let many = scenario("pop many, push many, take", &[1, 2], &[3], &[4, 5], actors);
    holds(
        Scenario { capacity: 3, ..many },
        PUSHED_MANY | POPPED_MANY | REFUSED | ABORT_SWITCH | ABORT_FENCE | FENCE_DRAINED | TOOK_OBJECT | PUT_BACK,
    );
}

#[test]
fn push_many_against_push_and_pop() {
    let actors = vec![worker("W1", &[Push(1)]), worker("W2", &[Fill(0)]), worker("W3", &[Pop(0)])];
    let many = scenario("push, push many, pop", &[2], &[], &[3, 4], actors);
    holds(Scenario { capacity: 3, ..many }, PUSHED | POPPED | PUSHED_MANY | ABORT_SWITCH);
}

#[test]
fn a_stack_that_was_drained_fills_again() {
    let actors = vec![worker("W1", &[SlowPush(1), SlowPop(0)]), worker("W2", &[SlowPush(2)])];
    let drained = scenario("stacks without room", &[], &[], &[], actors);
    holds(Scenario { drained: true, ..drained }, PUSHED | POPPED | ACTIVATED);
}

#[test]
fn setting_a_capacity_against_a_take() {
    let actors = vec![worker("W1", &[SlowPush(1)]), remote("T", &[Take(0, 1), Take(0, 1)])];
    let drained = scenario("a stack without room, take, take", &[], &[], &[], actors);
    holds(Scenario { drained: true, ..drained }, PUSHED | ACTIVATED | REFUSED | ABORT_FENCE | TOOK_OBJECT | PUT_BACK);
}

#[test]
fn the_spare_region_goes_around() {
    // A becomes spare, then CPU 1's; B becomes spare, then CPU 0's.
    let actors = vec![worker("W1", &[Push(2), Pop(0)]), remote("T", &[Take(0, 1), Take(1, 1), Take(0, 1)])];
    holds(
        scenario("push and pop, take from both", &[1], &[3], &[], actors),
        PUSHED | POPPED | REFUSED | ABORT_FENCE | TOOK_OBJECT | PUT_BACK | REUSED,
    );
}

#[test]
fn an_unwanted_stack_is_kept() {
    let actors = vec![worker("W1", &[Push(4)]), worker("W2", &[Pop(1)]), remote("T", &[Take(0, 1)])];
    holds(
        second_class(scenario("push, pop of another class, take", &[1], &[], &[], actors), &[3], &[], &[4]),
        PUSHED | POPPED | REFUSED | ABORT_FENCE | TOOK_OBJECT | KEPT | PUT_BACK,
    );
}

#[test]
fn classes_take_turns() {
    let actors = vec![worker("W1", &[Push(2), Push(4)]), remote("T", &[Take(0, 1), Take(0, 2)])];
    holds(
        second_class(scenario("push of both classes, take of each", &[1], &[], &[], actors), &[3], &[], &[4]),
        PUSHED | REFUSED | ABORT_FENCE | FENCE_DRAINED | TOOK_OBJECT | KEPT | PUT_BACK | REUSED,
    );
}

#[test]
fn a_kept_stack_is_moved_twice() {
    let actors = vec![worker("W1", &[SlowPush(4)]), remote("T", &[Take(0, 1), Take(1, 1)])];
    holds(
        second_class(scenario("slow push of another class, take, take", &[1], &[2], &[], actors), &[3, 5], &[], &[4]),
        PUSHED | POPPED_MANY | ACTIVATED | TOOK_OBJECT | KEPT | PUT_BACK | REUSED,
    );
}

#[test]
fn two_takers_one_after_the_other() {
    let actors = vec![worker("W1", &[Push(2)]), worker("T1", &[Take(0, 1)]), remote("T2", &[Take(0, 1)])];
    holds(
        scenario("two takers, push", &[1], &[], &[], actors),
        PUSHED | REFUSED | ABORT_FENCE | TOOK_OBJECT | PUT_BACK | REUSED,
    );
}

#[test]
fn two_takers_on_different_cpus() {
    let actors = vec![worker("W1", &[Pop(0), Push(0)]), worker("T1", &[Take(1, 1)]), remote("T2", &[Take(0, 1)])];
    holds(
        scenario("two takers of different CPUs, pop and push", &[1], &[2], &[], actors),
        PUSHED | POPPED | REFUSED | ABORT_FENCE | TOOK_OBJECT | PUT_BACK | REUSED,
    );
}

#[test]
fn a_taker_that_is_scheduled_like_everybody_else() {
    let actors = vec![worker("W1", &[Push(2)]), worker("W2", &[Pop(0)]), worker("T", &[Take(0, 1), Take(1, 1)])];
    holds(
        scenario("push, pop, taker on the same CPUs", &[1], &[4], &[], actors),
        PUSHED | POPPED | REFUSED | TOOK_OBJECT | PUT_BACK | ABORT_FENCE | REUSED,
    );
}

#[test]
fn a_thread_takes_after_it_pushed() {
    let actors = vec![worker("W1", &[Push(2), Take(0, 1)]), worker("W2", &[Take(1, 1), Pop(0)])];
    holds(
        scenario("every thread pushes or pops, and takes", &[1], &[4], &[], actors),
        PUSHED | POPPED | REFUSED | TOOK_OBJECT | ABORT_FENCE | FENCE_DRAINED,
    );
}

#[test]
fn slow_paths_and_two_takers() {
    let actors = vec![worker("W1", &[SlowPush(3)]), worker("T1", &[Take(1, 1)]), remote("T2", &[Take(0, 1)])];
    holds(
        scenario("slow push, two takers", &[1, 2], &[4], &[], actors),
        PUSHED | POPPED_MANY | ACTIVATED | REFUSED | ABORT_FENCE | TOOK_OBJECT | PUT_BACK | REUSED,
    );
}

#[test]
fn slow_paths_of_both_classes_and_a_take() {
    let actors = vec![worker("W1", &[SlowPush(2)]), worker("W2", &[SlowPop(1)]), remote("T", &[Take(0, 1)])];
    holds(
        second_class(scenario("slow push, slow pop of another class, take", &[1], &[], &[], actors), &[3], &[], &[]),
        PUSHED | POPPED | ACTIVATED | REFUSED | ABORT_FENCE | TOOK_OBJECT | KEPT | PUT_BACK,
    );
}

#[test]
fn fork_closes_push_and_pop() {
    let actors = vec![worker("W1", &[SlowPush(4)]), worker("W2", &[Pop(0)]), remote("F", &[Fork])];
    holds(
        scenario("fork, slow push, pop", &[1, 2], &[3], &[], actors),
        PUSHED | POPPED | POPPED_MANY | CLOSED_OUT | ABORT_FENCE | FENCE_DRAINED | SNAPSHOT | GATE_CLOSED,
    );
}

#[test]
fn fork_and_a_slow_pop() {
    let actors = vec![worker("W1", &[Push(4)]), worker("W2", &[SlowPop(0)]), remote("F", &[Fork])];
    holds(
        scenario("fork, push, slow pop", &[1], &[], &[2, 3], actors),
        PUSHED | POPPED | PUSHED_MANY | CLOSED_OUT | ABORT_FENCE | SNAPSHOT | GATE_CLOSED,
    );
}

#[test]
fn fork_and_a_taker_and_push() {
    let actors = vec![worker("W1", &[SlowPush(2)]), worker("T", &[Take(0, 1)]), remote("F", &[Fork])];
    holds(
        scenario("fork, take, slow push", &[1], &[], &[], actors),
        PUSHED | ACTIVATED | TOOK_OBJECT | PUT_BACK | CLOSED_OUT | ABORT_FENCE | SNAPSHOT | GATE_CLOSED,
    );
}

#[test]
fn fork_and_everybody() {
    let t = worker("T", &[Take(0, 1)]);
    let actors = vec![worker("W1", &[SlowPush(3)]), worker("W2", &[Pop(0)]), t, remote("F", &[Fork])];
    holds(
        scenario("fork, take, slow push, pop", &[1, 2], &[4], &[], actors),
        PUSHED | POPPED | POPPED_MANY | TOOK_OBJECT | PUT_BACK | CLOSED_OUT | ABORT_FENCE | SNAPSHOT | GATE_CLOSED,
    );
}

#[test]
fn a_thread_without_registration_uses_the_barn() {
    let w1 = Actor { rseq: Rseq::Unregistered, ..worker("W1", &[SlowPush(2), SlowPop(0)]) };
    let actors = vec![w1, worker("W2", &[Push(3)]), remote("T", &[Take(0, 1)])];
    holds(scenario("an unregistered thread, push, take", &[1], &[], &[], actors), PUSHED | REFUSED | TOOK_OBJECT);
}

/// The owner's thread ends. An object that it frees after the C library has ended its registration
/// takes the shared path.
#[test]
fn an_owner_ends_while_its_stacks_are_drained() {
    let ends = Actor { rseq: Rseq::Unregistered, ..worker("W1 at its end", &[SlowPush(2)]) };
    let actors = vec![worker("W1", &[Push(3)]), ends, remote("T", &[Take(0, 1), Take(1, 1)])];
    holds(
        scenario("owner, its end, two takes", &[1], &[4], &[], actors),
        PUSHED | REFUSED | ABORT_FENCE | TOOK_OBJECT | PUT_BACK | REUSED,
    );
}

#[test]
fn a_cpu_closed_for_good_uses_the_barn() {
    let actors = vec![worker("W1", &[SlowPush(2), SlowPop(0)]), worker("W2", &[Push(3)]), remote("T", &[Take(0, 1)])];
    let one = scenario("a CPU without a region, slow push and pop, push, take", &[1], &[], &[], actors);
    holds(Scenario { one_region: true, ..one }, PUSHED | POPPED | ACTIVATED | REFUSED | TOOK_OBJECT);
}

#[test]
fn a_cpu_beyond_the_table_uses_the_barn() {
    let w1 = Actor { cpus: 0b101, ..worker("W1", &[SlowPush(2), SlowPop(0)]) };
    let actors = vec![w1, worker("W2", &[Push(3), Take(0, 1)])];
    holds(scenario("a CPU that came late, push, take", &[1], &[], &[], actors), PUSHED | POPPED | TOOK_OBJECT);
}
