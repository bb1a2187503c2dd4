//! Tests of the addresses and the numbers that a Linux process gets.

use super::*;

/// Number of bits in which a thousand arenas' bases differ, counted in chunks of 4 MiB.
fn differing_bits(attempt: u32, span: usize) -> u32 {
    let machine = Linux::probe();
    let bases = (0..1000)
        .map_while(|_| machine.address_hint(attempt, span).ok())
        .map(|hint| hint.next_multiple_of(4 << 20) >> 22);
    let (all, any) = bases.fold((usize::MAX, 0), |(all, any), base| (all & base, any | base));
    (any & !all).count_ones()
}

#[test]
fn resident_memory_grows_when_it_is_touched() {
    let machine = Linux::probe();
    let before = machine.resident().unwrap();
    let touched = std::vec![1_u8; 64 << 20];
    let grown = machine.resident().unwrap() - before;
    assert!(grown >= 48 << 20, "{grown} bytes of {}", touched.len());
}

#[test]
fn arenas_begin_anywhere() {
    assert!(differing_bits(0, 16 << 40) >= 20, "{} bits", differing_bits(0, 16 << 40));
    // A machine with 39 address bits uses a gap that the kernel selects.
    assert!(differing_bits(8, 128 << 30) >= 12, "{} bits", differing_bits(8, 128 << 30));
}
