//! Wrong protocols: each must be caught, and the right protocol must pass the very same scenario.
//!
//! Each test explores three times: the right protocol, without a violation; the mutant judged in
//! every state; and the mutant judged only when all threads have finished, so that the violation is
//! lasting damage. The shortest trace of the last is printed.

use crate::model::*;
use crate::protocol::Mutant::{self, *};
use crate::protocol::Op::*;
use crate::{holds, look, remote, scenario, second_class, worker};

/// `damage` is part of the sentence that must describe what is wrong in the end.
pub fn caught(right: Scenario, wrong: Scenario, damage: &str) {
    let name = right.name;
    holds(right, 0);
    let early = look(wrong.clone());
    assert!(early.violation.is_some(), "{name}: {:?} has no bad state", wrong.mutant);
    let late = look(Scenario { at_rest: true, ..wrong.clone() });
    let (what, trace) = late.violation.unwrap_or_else(|| panic!("{name}: {:?} leaves no damage", wrong.mutant));
    println!("{name}, {:?}: {what}, after\n{trace}", wrong.mutant);
    assert!(what.contains(damage), "{name}: {:?} was to end in {damage:?}, but: {what}, after\n{trace}", wrong.mutant);
}

/// The mutant does damage where stores become visible in their order.
pub fn mutant(right: Scenario, mutant: Mutant, damage: &str) {
    let wrong = Scenario { mutant, order: Order::Tso, ..right.clone() };
    caught(right, wrong, damage);
}

/// The smallest scenario with a taker: one push against it.
fn push_take() -> Scenario {
    scenario("push, take", &[1], &[], &[], vec![worker("W1", &[Push(2)]), remote("T", &[Take(0, 1)])])
}

/// A push of the class that the taker does not want.
fn push_keep() -> Scenario {
    let actors = vec![worker("W1", &[Push(3)]), remote("T", &[Take(0, 1)])];
    second_class(scenario("push of another class, take", &[1], &[], &[], actors), &[2], &[], &[3])
}

fn two_takers(of: u8) -> Scenario {
    let actors = vec![worker("T1", &[Take(0, 1)]), remote("T2", &[Take(of, 1)])];
    scenario("two takers", &[1], &[2], &[], actors)
}

#[test]
fn no_fence() {
    mutant(push_take(), NoFence, "0 places");
}

#[test]
fn fence_without_abort() {
    mutant(push_take(), FenceWithoutAbort, "0 places");
}

#[test]
fn fence_without_drain() {
    mutant(push_take(), FenceWithoutDrain, "0 places");
}

#[test]
fn fence_before_the_swap() {
    mutant(push_take(), FenceBeforeSwap, "0 places");
}

#[test]
fn failed_fence_taken_for_success() {
    mutant(push_take(), FenceFailureIgnored, "0 places");
}

#[test]
fn count_read_before_the_fence() {
    mutant(push_take(), ReadBeforeFence, "0 places");
}

#[test]
fn unwanted_stack_copied_before_the_fence() {
    mutant(Scenario { fence_may_fail: false, ..push_keep() }, CopyBeforeFence, "0 places");
    // If the fence fails, the copy also stays in the spare region.
    mutant(push_keep(), CopyBeforeFence, "not all zeroes");
}

#[test]
fn unwanted_stack_copied_after_its_region_was_published() {
    let actors = vec![worker("W1", &[Pop(1), SlowPush(3)]), remote("T", &[Take(0, 1)])];
    let right = second_class(scenario("pop and push of another class, take", &[1], &[], &[], actors), &[2], &[], &[3]);
    mutant(right, CopyAfterPublish, "no object");
}

#[test]
fn put_back_after_touching() {
    mutant(push_take(), PutBackAfterTouch, "0 places");
}

#[test]
fn take_without_a_swap() {
    mutant(push_take(), NoSwap, "0 places");
}

#[test]
fn spare_region_not_zeroed() {
    // The objects left in it appear again on the next CPU: of the wanted class, and of one that was
    // copied.
    let one = vec![worker("W1", &[Pop(0)]), remote("T", &[Take(0, 1), Take(1, 1)])];
    mutant(scenario("pop, take from both", &[1], &[2], &[], one), SpareNotZeroed, "2 places");
    let each = vec![worker("W1", &[Pop(1)]), remote("T", &[Take(0, 1), Take(1, 2)])];
    let right = scenario("pop, take a class of each", &[], &[], &[], each);
    mutant(second_class(right, &[3], &[4], &[]), SpareNotZeroed, "2 places");
}

#[test]
fn two_takers_share_the_spare_region() {
    mutant(two_takers(1), SharedSpare, "region A is in 0 places");
}

#[test]
fn two_takers_with_own_spares_need_no_mutex_but_check_closed() {
    for fence_may_fail in [true, false] {
        let takers = Scenario { fence_may_fail, ..two_takers(0) };
        holds(Scenario { mutant: OwnSpares, ..takers.clone() }, event::BUSY | event::TOOK_OBJECT);
        mutant(takers, IgnoreClosed, "0 places");
    }
}

#[test]
fn nothing_armed_against_a_taker() {
    mutant(push_take(), NoArm, "0 places");
}

#[test]
fn nothing_armed_against_preemption() {
    let actors = vec![worker("W1", &[Push(2)]), worker("W2", &[Push(3)])];
    mutant(scenario("push, push", &[], &[], &[], actors), NoArm, "no object");
}

#[test]
fn gap_between_arming_and_start() {
    mutant(push_take(), GapAfterArm, "0 places");
}

#[test]
fn a_signal_alone_in_the_gap() {
    let w1 = Actor { stays: true, handler: Some(Push(3)), ..worker("W1", &[Push(2)]) };
    let actors = vec![w1, remote("T", &[Take(0, 1)])];
    mutant(scenario("push with a handler that pushes, take", &[1], &[], &[], actors), GapAfterArm, "outside the stack");
}

#[test]
fn no_entry_for_an_unregistered_thread() {
    let w1 = Actor { rseq: Rseq::Unregistered, ..worker("W1", &[Push(2)]) };
    let actors = vec![w1, worker("W2", &[Push(3)])];
    mutant(scenario("an unregistered thread, push", &[], &[], &[], actors), NoOtherEntries, "no object");
}

#[test]
fn a_vfork_child_that_uses_its_parents_area() {
    let actors = vec![worker("W1", &[Push(2)]), worker("W2", &[Push(3)])];
    let right = scenario("a child of vfork, push", &[], &[], &[], actors);
    let mut wrong = right.clone();
    wrong.actors[0].rseq = Rseq::Borrowed;
    caught(right, wrong, "no object");
}

#[test]
fn count_stored_before_the_cell() {
    mutant(scenario("push", &[1], &[], &[], vec![worker("W1", &[Push(2)])]), CountFirst, "no object");
}

#[test]
fn count_stored_before_the_cell_is_read() {
    mutant(scenario("pop", &[1], &[], &[], vec![worker("W1", &[Pop(0)])]), CountFirst, "0 places");
}

#[test]
fn count_stored_before_many_cells() {
    let right = scenario("push many", &[], &[], &[1, 2], vec![worker("W1", &[Fill(0)])]);
    mutant(Scenario { capacity: 3, ..right }, CountFirst, "no object");
}

#[test]
fn count_stored_before_many_cells_are_read() {
    let right = scenario("pop many", &[1, 2, 3], &[], &[], vec![worker("W1", &[Flush(0)])]);
    mutant(Scenario { capacity: 3, ..right }, CountFirst, "0 places");
}

#[test]
fn cell_stored_before_the_check() {
    mutant(push_take(), StoreBeforeCheck, "CLOSED_REGION was written to");
    let full = scenario("push", &[1, 3], &[], &[], vec![worker("W1", &[Push(2)])]);
    mutant(full, StoreBeforeCheck, "outside the stack");
}

#[test]
fn capacity_given_to_closed_region() {
    // The closed region then has room, and takes the object that was refused.
    let actors = vec![worker("W1", &[SlowPush(2)]), remote("T", &[Take(0, 1)])];
    mutant(scenario("slow push, take", &[1], &[], &[], actors), CapacityOnClosed, "0 places");
    // No taker is needed if a CPU always has the closed region and a thread passes through it.
    let right = scenario("slow push, a CPU without a region", &[1, 3], &[], &[], vec![worker("W1", &[SlowPush(2)])]);
    mutant(Scenario { one_region: true, ..right }, CapacityOnClosed, "0 places");
}

#[test]
fn capacity_stored_outside_any_sequence() {
    let actors = vec![worker("W1", &[SlowPush(2)]), remote("T", &[Take(0, 1)])];
    let right = scenario("slow push, take", &[1], &[], &[], actors);
    mutant(right, CapacityOutsideSequence, "not all zeroes");
}

/// Fork against one push.
fn fork_push() -> Scenario {
    scenario("fork, push", &[1], &[], &[], vec![worker("W1", &[Push(2)]), remote("F", &[Fork])])
}

/// Fork against a push that finds the stack full.
fn fork_slow_push() -> Scenario {
    scenario("fork, slow push", &[1, 2], &[], &[], vec![worker("W1", &[SlowPush(3)]), remote("F", &[Fork])])
}

fn fork_take() -> Scenario {
    scenario("fork, take", &[1], &[], &[], vec![worker("T", &[Take(0, 1)]), remote("F", &[Fork])])
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
fn no_entry_for_a_cpu_that_came_late() {
    let actors = vec![Actor { cpus: 0b101, ..worker("W1", &[Push(2)]) }, worker("W2", &[Push(3)])];
    mutant(scenario("a CPU that came late, push", &[], &[], &[], actors), NoOtherEntries, "0 places");
}

#[test]
fn fork_that_does_not_close_the_gate() {
    mutant(fork_slow_push(), ForkNoGate, "child loses them");
    mutant(fork_take(), ForkNoGate, "copied memory");
}

#[test]
fn gate_that_is_looked_at_before_counting_in() {
    mutant(fork_slow_push(), GateCheckFirst, "child loses them");
    mutant(fork_take(), GateCheckFirst, "copied memory");
}

#[test]
fn gate_that_is_closed_without_a_barrier() {
    mutant(fork_slow_push(), GateNoBarrier, "child loses them");
    mutant(fork_take(), GateNoBarrier, "copied memory");
}

#[test]
fn gate_that_keeps_waiters_counted_deadlocks() {
    mutant(fork_slow_push(), GateWaitInside, "never finish");
    mutant(fork_take(), GateWaitInside, "never finish");
}
