//! Scenarios of stocks (`neap-groups/src/stock.rs`), right and wrong: charges by sequences, and
//! threads that empty stocks.
//!
//! A sequence looks at a word with two parts, payer and number of bytes, and changes it by one
//! store, while another thread empties it behind a fence.

use crate::model::event::*;
use crate::model::*;
use crate::mutants::mutant;
use crate::protocol::Mutant::{self, *};
use crate::protocol::Op::{self, *};
use crate::{holds, remote, scenario, worker};

/// Bytes that are stocked for the first payer on CPU 0 and on CPU 1. Fences may fail.
fn stocks(name: &'static str, a: u8, b: u8, actors: Vec<Actor>) -> Scenario {
    const BYTES: [u8; 3] = [1, 2, 3];
    scenario(name, &BYTES[..a as usize], &BYTES[..b as usize], &[], actors)
}

fn against_a_drain(ops: &[Op]) -> Scenario {
    stocks("one charging thread, empty", 1, 0, vec![worker("W", ops), remote("D", &[Empty(0)])])
}

#[test]
fn charges_and_a_drain() {
    let actors = vec![worker("W1", &[Charge(0)]), worker("W2", &[Charge(0), Uncharge(0)]), remote("D", &[Empty(0)])];
    holds(
        stocks("charge, charge and uncharge, empty", 2, 1, actors),
        STOCK_TOOK | STOCK_GAVE | STOCK_EMPTIED | ABORT_SWITCH | ABORT_FENCE | FENCE_DRAINED | REFUSED | PUT_BACK,
    );
}

#[test]
fn what_comes_back_and_a_drain() {
    let actors = vec![worker("W", &[Charge(0), Uncharge(0)]), remote("D", &[Empty(0), Empty(0)])];
    holds(
        stocks("charge and uncharge, empty, empty", 1, 3, actors),
        STOCK_TOOK | STOCK_GAVE | STOCK_EMPTIED | ABORT_SWITCH | ABORT_FENCE | FENCE_DRAINED | REFUSED | PUT_BACK,
    );
}

#[test]
fn two_payers_and_a_drain() {
    let actors = vec![worker("W1", &[Stock(1), Charge(1)]), worker("W2", &[Charge(0)]), remote("D", &[Empty(0)])];
    holds(
        stocks("stock for another payer, charge, empty", 2, 0, actors),
        STOCK_TOOK | STOCK_PUT | STOCK_EMPTIED | ABORT_SWITCH | ABORT_FENCE | FENCE_DRAINED | REFUSED,
    );
}

#[test]
fn a_full_word_and_a_drain() {
    let actors = vec![worker("W", &[Stock(0), Stock(0)]), remote("D", &[Empty(0)])];
    holds(stocks("stock a full word twice, empty", 3, 3, actors), STOCK_PUT | STOCK_EMPTIED | ABORT_FENCE | REFUSED);
}

#[test]
fn concurrent_drains_lose_no_charge() {
    let actors = vec![worker("W", &[Charge(0), Empty(0)]), worker("D1", &[Empty(1)]), remote("D2", &[Empty(0)])];
    holds(
        stocks("charge and empty, empty the other, empty", 2, 1, actors),
        STOCK_TOOK | STOCK_EMPTIED | ABORT_FENCE | REFUSED | PUT_BACK,
    );
}

#[test]
fn a_handler_that_charges() {
    let w = Actor { handler: Some(Charge(1)), ..worker("W", &[Stock(1), Charge(0)]) };
    holds(
        stocks("stock and charge with a handler that charges, empty", 1, 0, vec![w, remote("D", &[Empty(0)])]),
        STOCK_TOOK | STOCK_PUT | ABORT_SIGNAL | ABORT_FENCE | REFUSED,
    );
}

#[test]
fn unregistered_thread_charges_the_counter() {
    let w = Actor { rseq: Rseq::Unregistered, ..worker("W1", &[Charge(0), Uncharge(0)]) };
    let actors = vec![w, worker("W2", &[Charge(0)]), remote("D", &[Empty(0)])];
    holds(stocks("an unregistered thread, charge, empty", 1, 0, actors), STOCK_TOOK | STOCK_EMPTIED | REFUSED);
}

fn caught(wrong: Mutant) {
    mutant(against_a_drain(&[Charge(0)]), wrong, "is charged for");
}

#[test]
fn no_fence() {
    caught(NoFence);
}

#[test]
fn fence_without_abort() {
    caught(FenceWithoutAbort);
}

#[test]
fn fence_that_leaves_stores_in_the_buffer() {
    caught(FenceWithoutDrain);
}

#[test]
fn fence_before_the_swap() {
    caught(FenceBeforeSwap);
}

#[test]
fn failed_fence_taken_for_success() {
    caught(FenceFailureIgnored);
}

#[test]
fn word_read_before_the_fence() {
    caught(ReadBeforeFence);
}

#[test]
fn sequences_that_nothing_aborts() {
    caught(NoArm);
}

#[test]
fn an_instruction_before_the_start() {
    let actors = vec![worker("W1", &[Charge(0)]), worker("W2", &[Charge(0)])];
    mutant(stocks("charge, charge", 2, 0, actors), GapAfterArm, "is charged for");
}

#[test]
fn closed_region_that_looks_empty() {
    mutant(against_a_drain(&[Stock(0)]), ClosedWordOfZeroes, "CLOSED_REGION was written to");
}

#[test]
fn stock_over_a_word_that_has_changed() {
    let actors = vec![worker("W1", &[Stock(1)]), worker("W2", &[Charge(0)])];
    mutant(stocks("stock for another payer, charge", 2, 0, actors), StockBlindly, "is charged for");
}
