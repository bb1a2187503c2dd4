//! Protocols that are right where a CPU's stores become visible in their order, and wrong on arm64:
//! stores that must be releases there.

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
    let on = |name, cpus| Actor { cpus, ..worker(name, &[Read]) };
    let actors = vec![on("R1", 0b001), on("R2", 0b010), remote("U", &[Retire])];
    wrong_on_arm64(reading("two readers on a CPU each, retire", actors), CountPlainly, "freed");
}
