//! Protocols that are right where a CPU does its accesses in their order, and wrong on arm64:
//! stores that must be releases there, and loads that need an acquire or a dependency.

use crate::model::event::*;
use crate::model::*;
use crate::mutants::caught;
use crate::protocol::Mutant::{self, *};
use crate::protocol::Op::*;
use crate::{holds, reading, remote, scenario, second_class, worker};

/// The mutant does damage on arm64, and none on x86-64.
fn wrong_on_arm64(right: Scenario, mutant: Mutant, damage: &str) {
    let wrong = Scenario { mutant, ..right.clone() };
    holds(Scenario { order: Order::Tso, ..wrong.clone() }, 0);
    caught(right, wrong, damage);
}

/// Adds loads that are done before earlier ones. No fence fails and no thread leaves its CPU, which
/// keeps the states few: a switch would only make the loads miss nothing.
fn early(mut right: Scenario) -> Scenario {
    right.actors.iter_mut().for_each(|actor| actor.stays = true);
    Scenario { order: Order::Loads, fence_may_fail: false, ..right }
}

/// The mutant does damage only where a load may be done before earlier ones.
fn wrong_with_early_loads(right: Scenario, mutant: Mutant, damage: &str) {
    holds(Scenario { mutant, ..right.clone() }, 0);
    wrong_on_arm64(early(right), mutant, damage);
}

/// The kept object is in the spare region when its row is there.
#[test]
fn spare_region_published_before_what_was_kept_in_it() {
    let actors = vec![worker("W", &[SlowPush(3)]), remote("T", &[Take(0, 1)])];
    let right = second_class(scenario("push of another class, take", &[1], &[], &[], actors), &[2], &[], &[3]);
    wrong_on_arm64(right, PublishPlainly, "no object");
}

/// One reader is inside. The other enters after the fence and leaves, and is seen to leave first.
#[test]
fn reader_seen_to_leave_before_it_entered() {
    wrong_on_arm64(readers_on_a_cpu_each(), CountPlainly, "freed");
}

fn readers_on_a_cpu_each() -> Scenario {
    let on = |name, cpus| Actor { cpus, ..worker(name, &[Read]) };
    reading("two readers on a CPU each, retire", vec![on("R1", 0b001), on("R2", 0b010), remote("U", &[Retire])])
}

/// A push of the class that the taker does not want.
fn push_keep() -> Scenario {
    let actors = vec![worker("W", &[Push(3)]), remote("T", &[Take(0, 1)])];
    second_class(scenario("push of another class, take", &[1], &[], &[], actors), &[2], &[], &[3])
}

/// One reader is inside. The other comes and goes between the sum of entries, which is done first
/// then, and that of exits.
#[test]
fn entries_summed_before_exits_without_an_acquire() {
    wrong_with_early_loads(readers_on_a_cpu_each(), SumPlainly, "freed");
}

/// The sequence finds the spare region, and its count before the kept object came into it.
#[test]
fn count_loaded_before_the_row_that_leads_to_it() {
    wrong_with_early_loads(push_keep(), RegionWithoutRow, "no object");
}

#[test]
fn early_loads_against_a_take() {
    let seen = MISSED | TOOK_OBJECT | REFUSED | ABORT_FENCE;
    let one = |op| vec![worker("W", &[op]), remote("T", &[Take(0, 1)])];
    holds(early(scenario("push, take", &[1], &[], &[], one(Push(2)))), seen | PUSHED);
    holds(early(scenario("pop, take", &[1], &[], &[], one(Pop(0)))), seen | POPPED);
    holds(early(push_keep()), seen | PUSHED | KEPT);
}

#[test]
fn early_loads_find_a_region_that_went_around() {
    let actors = vec![worker("W", &[Push(2)]), remote("T", &[Take(0, 1), Take(1, 1)])];
    holds(early(scenario("push, take from both", &[1], &[3], &[], actors)), MISSED | PUSHED | REUSED | REFUSED);
}

#[test]
fn early_loads_of_many_against_a_take() {
    let actors = vec![worker("W", &[Flush(0)]), remote("T", &[Take(0, 1)])];
    let many = scenario("pop many, take", &[1, 2], &[], &[], actors);
    holds(early(Scenario { capacity: 3, ..many }), MISSED | POPPED_MANY | REFUSED | ABORT_FENCE);
    let actors = vec![worker("W", &[Fill(0)]), remote("T", &[Take(0, 1)])];
    let many = scenario("push many, take", &[1], &[], &[2, 3], actors);
    holds(early(Scenario { capacity: 3, ..many }), MISSED | PUSHED_MANY | REFUSED | ABORT_FENCE);
}

#[test]
fn early_loads_against_fork() {
    let actors = vec![worker("W", &[SlowPush(3)]), remote("F", &[Fork])];
    holds(early(scenario("slow push, fork", &[1, 2], &[], &[], actors)), MISSED | CLOSED_OUT | SNAPSHOT | GATE_CLOSED);
}

#[test]
fn early_loads_of_readers() {
    let reader = worker("R", &[Read, Read]);
    holds(
        early(reading("a reader that reads twice, retire", vec![reader, remote("U", &[Retire])])),
        MISSED | READ_OLD | FREED,
    );
    let isolated = Scenario { one_region: true, ..readers_on_a_cpu_each() };
    holds(early(isolated), MISSED | READ_OLD | COUNTED_LOCKED | FREED);
}

#[test]
fn early_loads_of_stocks() {
    let actors = vec![worker("W", &[Stock(1), Charge(0)]), remote("D", &[Empty(0)])];
    let stocks = scenario("stock for another payer, charge, empty", &[1], &[], &[], actors);
    holds(early(stocks), MISSED | STOCK_TOOK | STOCK_PUT | STOCK_EMPTIED | REFUSED);
}
