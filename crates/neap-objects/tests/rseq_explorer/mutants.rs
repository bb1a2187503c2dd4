//! Wrong protocols: each must be caught, and the right protocol must pass the very same scenario.
//!
//! Sits above `main`'s scenario builders. Each test explores three times: the right protocol, no
//! violation; the mutant judged in every state; the mutant judged only when everybody has finished, so
//! that what is found is damage that stays. The shortest trace of the last is printed. No lock; never
//! accepts a mutant because the scenario itself is broken.

use crate::model::*;
use crate::protocol::Mutant::{self, *};
use crate::protocol::Op::*;
use crate::{holds, look, remote, scenario, worker};

/// `damage` is part of the sentence that must describe what is wrong in the end.
fn caught(right: Scenario, wrong: Scenario, damage: &str) {
    let name = right.name;
    holds(right, 0);
    let early = look(wrong.clone());
    assert!(early.violation.is_some(), "{name}: {:?} has no bad state", wrong.mutant);
    let late = look(Scenario { at_rest: true, ..wrong.clone() });
    let (what, trace) = late.violation.unwrap_or_else(|| panic!("{name}: {:?} leaves no damage", wrong.mutant));
    println!("{name}, {:?}: {what}, after\n{trace}", wrong.mutant);
    assert!(what.contains(damage), "{name}: {:?} was to end in {damage:?}, but: {what}, after\n{trace}", wrong.mutant);
}

fn mutant(right: Scenario, mutant: Mutant, damage: &str) {
    let wrong = Scenario { mutant, ..right.clone() };
    caught(right, wrong, damage);
}

/// The smallest scenario with a taker: one push against it.
fn push_take() -> Scenario {
    scenario("push, take", &[&[1], &[]], vec![worker("W1", &[Push(2)]), remote("T", &[Take(0)])])
}

fn exchange_take() -> Scenario {
    let actors = vec![worker("W1", &[ColdPush(3)]), remote("T", &[Take(0)])];
    scenario("exchange, take", &[&[1, 2], &[], &[]], actors)
}

fn exchange_two_takers() -> Scenario {
    let actors = vec![worker("W1", &[ColdPush(3)]), worker("T1", &[Take(0)]), remote("T2", &[Take(0)])];
    scenario("exchange, two takers", &[&[1, 2], &[], &[]], actors)
}

#[test]
fn no_fence() {
    mutant(push_take(), NoFence, "2 places");
}

#[test]
fn fence_without_abort() {
    mutant(push_take(), FenceWithoutAbort, "2 places");
}

#[test]
fn fence_without_drain() {
    mutant(push_take(), FenceWithoutDrain, "2 places");
}

#[test]
fn fence_before_the_swap() {
    mutant(push_take(), FenceBeforeSwap, "2 places");
}

#[test]
fn count_read_before_the_fence() {
    mutant(push_take(), ReadBeforeFence, "0 places");
}

#[test]
fn put_back_after_touching() {
    mutant(push_take(), PutBackAfterTouch, "2 places");
}

#[test]
fn nothing_armed_against_a_taker() {
    mutant(push_take(), NoArm, "2 places");
}

#[test]
fn nothing_armed_against_preemption() {
    let actors = vec![worker("W1", &[Push(2)]), worker("W2", &[Push(3)])];
    mutant(scenario("push, push", &[&[], &[]], actors), NoArm, "0 places");
}

#[test]
fn gap_between_arming_and_start() {
    mutant(push_take(), GapAfterArm, "2 places");
}

#[test]
fn a_signal_alone_in_the_gap() {
    let mut w1 = worker("W1", &[Push(2)]);
    (w1.stays, w1.handler) = (true, Some(Push(3)));
    let actors = vec![w1, remote("T", &[Take(0)])];
    mutant(scenario("push with a handler that pushes, take", &[&[1], &[]], actors), GapAfterArm, "places");
}

#[test]
fn no_check_of_the_cpu_id() {
    let mut w1 = worker("W1", &[Push(2)]);
    w1.rseq = Rseq::Unregistered;
    let actors = vec![w1, worker("W2", &[Push(3)])];
    mutant(scenario("an unregistered thread, push", &[&[], &[]], actors), NoCpuCheck, "0 places");
}

#[test]
fn a_vfork_child_that_uses_its_parents_area() {
    let actors = vec![worker("W1", &[Push(2)]), worker("W2", &[Push(3)])];
    let right = scenario("a child of vfork, push", &[&[], &[]], actors);
    let mut wrong = right.clone();
    wrong.actors[0].rseq = Rseq::Borrowed;
    caught(right, wrong, "0 places");
}

#[test]
fn count_stored_before_the_slot() {
    let actors = vec![worker("W1", &[Push(2)])];
    mutant(scenario("push", &[&[1], &[]], actors), CountBeforeSlot, "no object");
}

#[test]
fn exchange_by_a_plain_store() {
    // The fence comes too late: the exchange has read the old pointer before the swap and its store arrives after
    // it, so both own the old sheaf, also when no fence fails.
    mutant(exchange_take(), PlainExchange, "2 places");
    mutant(Scenario { fence_may_fail: false, ..exchange_take() }, PlainExchange, "twice");
}

#[test]
fn a_plain_store_is_enough_if_the_one_taker_looks_again() {
    holds(Scenario { mutant: PlainExchangeRecheck, ..exchange_take() }, event::RECHECK_LOST | event::PUT_BACK);
    let mut locked = exchange_two_takers();
    locked.actors[1].ops = vec![TakeLocked(0)];
    locked.actors[2].ops = vec![TakeLocked(0)];
    holds(Scenario { mutant: PlainExchangeRecheck, ..locked }, event::RECHECK_LOST | event::PUT_BACK);
    mutant(exchange_two_takers(), PlainExchangeRecheck, "places");
}

#[test]
fn exchange_that_expects_dummy() {
    mutant(exchange_take(), ExpectDummy, "0 places");
}

#[test]
fn exchange_outside_any_sequence() {
    let actors = vec![worker("W1", &[ColdPush(3), ColdPop]), worker("W2", &[Pop])];
    mutant(scenario("exchange and pop, pop", &[&[1, 2], &[], &[]], actors), CasOutsideSequence, "2 places");
}

#[test]
fn no_wait_for_the_lock_bit() {
    let actors = vec![worker("W1", &[LockedPop]), remote("T", &[Take(0)])];
    mutant(scenario("pop under the lock bit, take", &[&[1], &[]], actors), NoWaitForBit, "2 places");
}

#[test]
fn second_taker_ignores_dummy() {
    // With fences that fail it puts back a DUMMY that it never owned; without, it overwrites a new sheaf.
    mutant(exchange_two_takers(), IgnoreDummy, "DUMMY");
    mutant(Scenario { fence_may_fail: false, ..exchange_two_takers() }, IgnoreDummy, "0 places");
}

#[test]
fn second_taker_puts_dummy_back() {
    mutant(exchange_two_takers(), PutBackDummy, "DUMMY");
}

/// Fork, one push and one exchange.
fn fork_push() -> Scenario {
    scenario("fork, push", &[&[1], &[]], vec![worker("W1", &[Push(2)]), remote("F", &[Fork])])
}

#[test]
fn fork_without_a_fence() {
    mutant(fork_push(), ForkNoFence, "in flight");
}

#[test]
fn fork_that_fences_first() {
    mutant(fork_push(), ForkFenceFirst, "in flight");
}

#[test]
fn fork_while_a_slot_is_locked() {
    // Closing and fencing stops sequences, not the ordinary steps of a thread that holds a slot by its bit.
    let actors = vec![worker("W1", &[Pop]), remote("F", &[Fork])];
    let right = scenario("fork, pop", &[&[1], &[]], actors);
    let mut wrong = right.clone();
    wrong.actors[0].ops = vec![LockedPop];
    caught(right, wrong, "locked slot");
}

#[test]
fn fork_that_does_not_wait_for_a_taker() {
    let actors = vec![worker("T", &[TakeLocked(0)]), remote("F", &[Fork])];
    mutant(scenario("fork, take", &[&[1], &[]], actors), ForkNoMutex, "DUMMY");
}
