//! Scenarios of RCU (`neap-base/src/rcu.rs`), right and wrong: readers by sequences and by locked
//! instructions, and threads that retire their objects.
//!
//! loom cannot show a count in a store buffer, nor a fence that only the other side makes.

use crate::model::event::*;
use crate::model::*;
use crate::mutants::mutant;
use crate::protocol::Mutant::{self, *};
use crate::protocol::Op::*;
use crate::{holds, reading, remote, worker};

fn one_reader(retires: usize) -> Scenario {
    let actors = vec![worker("R", &[Read]), remote("U", &[Retire; 2][..retires])];
    reading("a reader, retire", actors)
}

fn two_readers() -> Scenario {
    reading("two readers, retire", vec![worker("R1", &[Read]), worker("R2", &[Read]), remote("U", &[Retire])])
}

/// The effect of a lost count is known: the retiring thread waits for no reader, or for one that is
/// not there.
fn readers_alone() -> Scenario {
    reading("two readers", vec![worker("R1", &[Read]), worker("R2", &[Read])])
}

/// CPU 1 is never fenced.
fn isolated(right: Scenario) -> Scenario {
    Scenario { one_region: true, ..right }
}

#[test]
fn a_reader_and_two_grace_periods() {
    holds(
        one_reader(2),
        ABORT_SWITCH | ABORT_FENCE | FENCE_DRAINED | READ_OLD | WAITED | FLIPPED | FREED | COUNTED_LOCKED,
    );
}

#[test]
fn two_readers_and_a_grace_period() {
    holds(two_readers(), ABORT_SWITCH | ABORT_FENCE | FENCE_DRAINED | READ_OLD | WAITED | FLIPPED | FREED);
}

#[test]
fn a_reader_that_reads_twice() {
    let actors = vec![worker("R", &[Read, Read]), remote("U", &[Retire, Retire])];
    holds(reading("a reader that reads twice, retire twice", actors), READ_OLD | WAITED | FLIPPED | FREED);
}

#[test]
fn a_reader_with_a_handler_that_reads() {
    let reader = Actor { handler: Some(Read), ..worker("R", &[Read]) };
    let right = reading("a reader with a handler that reads, retire", vec![reader, remote("U", &[Retire])]);
    holds(right, ABORT_SIGNAL | READ_OLD | WAITED | FREED);
}

#[test]
fn retire_sharing_cpus_with_a_reader_waits_and_frees() {
    let actors = vec![worker("R", &[Read]), worker("U", &[Retire, Retire])];
    holds(reading("a reader, retire on the same CPUs", actors), READ_OLD | WAITED | FLIPPED | FREED);
}

#[test]
fn readers_that_come_and_go_on_an_isolated_cpu() {
    holds(isolated(one_reader(2)), READ_OLD | COUNTED_LOCKED | WAITED | FLIPPED | FREED);
    holds(isolated(two_readers()), READ_OLD | COUNTED_LOCKED | WAITED | FLIPPED | FREED);
}

#[test]
fn readers_without_registration() {
    let actor = Actor { rseq: Rseq::Unregistered, ..worker("R1", &[Read]) };
    let actors = vec![actor, worker("R2", &[Read]), remote("U", &[Retire])];
    holds(reading("an unregistered reader, a reader, retire", actors), READ_OLD | COUNTED_LOCKED | WAITED | FREED);
}

/// Right: a count that is committed after the fence is that of a reader that finds the new object.
#[test]
fn no_count_needs_to_be_aborted() {
    holds(Scenario { mutant: FenceWithoutAbort, ..one_reader(2) }, READ_OLD | FREED);
}

fn caught(right: Scenario, wrong: Mutant) {
    mutant(right, wrong, "freed");
}

#[test]
fn no_fence() {
    caught(one_reader(1), RetireNoFence);
}

#[test]
fn fence_before_the_object_is_replaced() {
    caught(one_reader(1), RetireFenceFirst);
}

#[test]
fn fence_that_leaves_counts_in_the_buffer() {
    caught(one_reader(1), FenceWithoutDrain);
}

#[test]
fn failed_fence_taken_for_success() {
    caught(one_reader(1), FenceFailureIgnored);
}

#[test]
fn only_the_phase_before_is_waited_for() {
    caught(one_reader(2), RetireOnePhase);
}

#[test]
fn retire_that_sums_entries_first_frees_too_early() {
    // One reader is inside, and the other comes and goes between the two sums.
    let on = |name, cpus| Actor { cpus, ..worker(name, &[Read]) };
    let actors = vec![on("R1", 0b001), on("R2", 0b010), remote("U", &[Retire])];
    caught(reading("two readers on a CPU each, retire", actors), RetireEnteredFirst);
}

#[test]
fn isolated_cpu_that_counts_by_sequences() {
    caught(isolated(one_reader(1)), IsolatedWords);
}

#[test]
fn locked_and_restartable_additions_to_one_word() {
    mutant(isolated(readers_alone()), SharedWords, "differ");
}

#[test]
fn counts_that_nothing_aborts() {
    mutant(readers_alone(), NoArm, "differ");
}

#[test]
fn out_before_the_last_look() {
    caught(one_reader(1), LeaveFirst);
}
