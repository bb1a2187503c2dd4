//! Tests of the stacks of live samples whose records leave the ring.

use super::kept_stacks::KeptStacks;
use super::recorder::{Recorder, Sampled};
use core::sync::atomic::Ordering;
use neap_base::packed_stack::UnpackedStack;
use neap_base::profile_area::{
    AREA_BYTES, AreaHeader, BLOCK_BYTES, CELL_BYTES, CELL_COUNT, MOST_CELLS, MOST_STACK, NOT_KEPT, RING_AT, RING_BYTES,
    SLOTS_AT, Slot,
};
use neap_os::call_stack::Registers;
use neap_os::memory;
use std::vec::Vec;

/// An area, its recorder, and the stack of all samples.
struct Recording {
    address: usize,
    recorder: Recorder,
    stack: Vec<u64>,
    samples: u64,
}

impl Recording {
    fn begin(stack: Vec<u64>) -> Recording {
        let mut recording =
            Recording { address: memory::map(AREA_BYTES).unwrap(), recorder: Recorder::new(), stack, samples: 0 };
        let area = recording.area();
        recording.recorder.begin(area, 1000).unwrap();
        recording
    }

    fn area(&self) -> &'static AreaHeader {
        // SAFETY: mapped by `begin`, and used by the test alone until it is dropped.
        unsafe { &*core::ptr::with_exposed_provenance(self.address) }
    }

    fn start(&self) -> u64 {
        self.stack.as_ptr().addr() as u64
    }

    /// Records a sample at a new address, and returns its number.
    fn sample(&mut self) -> u64 {
        self.samples += 1;
        let (area, address, size) = (self.area(), self.samples * 16, 100);
        let sampled = Sampled { address, size, mean: 1000, group: 0, time: 1, thread: 1 };
        let registers = Registers { instruction: 77, stack_pointer: self.start() as usize, frame_pointer: 88 };
        // SAFETY: the area is mapped; the bytes are those of a vector.
        assert!(unsafe { self.recorder.record(area, &sampled, registers, self.stack.len() * 8) });
        self.samples
    }

    fn free(&mut self, number: u64) {
        let area = self.area();
        // SAFETY: the area is mapped.
        unsafe { self.recorder.forget(area, number * 16) };
    }

    /// Lets the ring grow by samples that are freed at once.
    fn churn(&mut self, bytes: usize) {
        let end = self.recorder.head().unwrap() + bytes as u64;
        while self.recorder.head().unwrap() < end {
            let number = self.sample();
            self.free(number);
        }
    }

    fn slot(&self, index: usize) -> &Slot {
        // SAFETY: a slot of the area that `begin` mapped.
        unsafe { &*core::ptr::with_exposed_provenance(self.address + SLOTS_AT + index * size_of::<Slot>()) }
    }

    fn kept_of_slot(&self, index: usize) -> u32 {
        self.slot(index).kept.load(Ordering::Relaxed)
    }

    fn unpacked(&self, number: u64) -> Option<(UnpackedStack, Vec<u64>)> {
        let mut words = std::vec![1; MOST_STACK / 8];
        // SAFETY: the area is mapped.
        let stack = unsafe { self.recorder.kept(self.area(), number * 16, number, &mut words) }?;
        words.truncate(stack.words);
        Some((stack, words))
    }

    fn kept(&self) -> &KeptStacks {
        self.recorder.live_samples().unwrap().kept()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.recorder.end(None);
        // SAFETY: mapped by `begin`.
        unsafe { memory::unmap(self.address, AREA_BYTES) }.unwrap();
    }
}

/// Words of which every third is an address of code.
fn sparse(words: usize) -> Vec<u64> {
    (0..words as u64).map(|at| if at % 3 == 0 { 0x5555_0000_0000 + at } else { at << 50 | at }).collect()
}

#[test]
fn another_distance_starts_with_a_pace_of_its_own() {
    let mut recording = Recording::begin(std::vec![1]);
    (0..2000).for_each(|_| _ = recording.sample());
    recording.recorder.begin(recording.area(), 512 << 10).unwrap();
    assert_eq!(recording.recorder.interval(512 << 10).mean, 512 << 10, "samples of a shorter distance do not widen it");
}

#[test]
fn live_stack_is_kept_before_a_reader_misses_its_record() {
    let mut recording = Recording::begin(sparse(500));
    let number = recording.sample();
    let oldest =
        |head: u64| head.saturating_sub((RING_BYTES - BLOCK_BYTES) as u64).next_multiple_of(BLOCK_BYTES as u64);
    let mut kept_at = None;
    while recording.recorder.head().unwrap() < 3 * RING_BYTES as u64 {
        recording.churn(1);
        let head = recording.recorder.head().unwrap();
        let kept = recording.kept_of_slot(0);
        assert!(kept > 0 || oldest(head) == 0, "a reader that begins at {} misses the record", oldest(head));
        if kept > 0 && kept_at.is_none() {
            kept_at = Some(head);
        }
    }
    assert!(kept_at > Some((RING_BYTES - 4 * BLOCK_BYTES) as u64), "{kept_at:?}");
    let (stack, words) = recording.unpacked(number).unwrap();
    assert_eq!(stack.registers, [77, recording.start(), 88]);
    let addresses: Vec<u64> =
        recording.stack.iter().map(|&word| if word >> 47 == 0 && word >= 4096 { word } else { 0 }).collect();
    assert_eq!(words, addresses);
    assert_eq!(recording.kept().used(), 6, "500 words, a third of them, 8 masks and 4: 179 of 31 in a cell");
    assert_eq!(recording.slot(0).number.load(Ordering::Relaxed), number);
}

#[test]
fn freed_stack_is_not_kept_and_gives_its_cells_back() {
    let mut recording = Recording::begin(sparse(500));
    let numbers: Vec<u64> = (0..100).map(|_| recording.sample()).collect();
    numbers.iter().step_by(2).for_each(|&number| recording.free(number));
    recording.churn(2 * RING_BYTES);
    for &number in &numbers {
        assert_eq!(recording.unpacked(number).is_some(), number % 2 == 0, "{number}");
    }
    assert_eq!(recording.kept().used(), 50 * 6);
    numbers.iter().for_each(|&number| recording.free(number));
    assert_eq!((recording.kept().used(), recording.recorder.live()), (0, 0));
    // The slots are used again, without stacks of before.
    (0..100).for_each(|_| _ = recording.sample());
    assert!((0..100).all(|slot| recording.kept_of_slot(slot) == 0));
    recording.churn(2 * RING_BYTES);
    assert!((0..100).all(|slot| recording.kept_of_slot(slot) > 0));
    assert_eq!(recording.kept().used(), 100 * 6);
}

#[test]
fn stack_beyond_all_cells_is_told_and_later_ones_are_kept() {
    // All words are addresses, and a stack takes as many cells as one may.
    let mut recording = Recording::begin((0..MOST_STACK as u64 / 8).map(|at| 0x7000_0000_0000 + at).collect());
    let most = CELL_COUNT / MOST_CELLS;
    let numbers: Vec<u64> = (0..most + 100).map(|_| recording.sample()).collect();
    recording.churn(RING_BYTES);
    assert_eq!(recording.kept().used(), CELL_COUNT);
    let lost = (0..numbers.len()).filter(|&slot| recording.kept_of_slot(slot) == NOT_KEPT).count();
    assert_eq!((lost, recording.kept_of_slot(most + 99)), (100, NOT_KEPT));
    let (stack, words) = recording.unpacked(1).unwrap();
    let payload = MOST_CELLS * (CELL_BYTES / 8 - 1) - 4;
    assert_eq!(stack.words, payload / 65 * 64, "whole groups from the inner end");
    assert_eq!(words, recording.stack[..words.len()]);
    recording.free(1);
    let number = recording.sample();
    recording.churn(RING_BYTES);
    assert!(recording.unpacked(number).is_some() && recording.kept().used() == CELL_COUNT);
}

#[test]
fn pointers_into_the_stack_and_ends_of_groups_are_kept() {
    for words in [1, 2, 63, 64, 65, 128, 1000, MOST_STACK / 8] {
        for at in [0, words / 2, words - 1] {
            let mut stack = std::vec![0; words];
            let start = stack.as_ptr().addr() as u64;
            stack[at] = start + (words as u64 - 1) * 8;
            let mut recording = Recording::begin(stack);
            let number = recording.sample();
            recording.churn(RING_BYTES);
            let (stack, unpacked) = recording.unpacked(number).unwrap();
            assert!(stack.words > at && stack.words <= (at / 64 + 1) * 64);
            assert_eq!(unpacked, recording.stack[..stack.words]);
        }
    }
}

#[test]
fn ring_that_another_process_writes_to_hurts_nothing() {
    const SEED: u64 = 7;
    let mut recording = Recording::begin(sparse(500));
    let mut random = SEED;
    let mut draw = move || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        random >> 16
    };
    for round in 0..200 {
        for _ in 0..20 {
            let (number, word) = (recording.sample(), draw());
            if word % 4 > 0 {
                recording.free(number);
            }
        }
        for _ in 0..200 {
            let ring = (recording.recorder.head().unwrap().min(RING_BYTES as u64) / 8) as usize;
            let at = recording.address + RING_AT + draw() as usize % ring * 8;
            let word = match draw() % 4 {
                0 => draw(),
                1 => (draw() % 5) | ((draw() % 40_000) << 32),
                2 => u64::MAX,
                _ => draw() % recording.samples * 16,
            };
            // SAFETY: a word of the area that `begin` mapped.
            unsafe { core::ptr::with_exposed_provenance_mut::<u64>(at).write(word) };
        }
        recording.churn(RING_BYTES / 8);
        assert_eq!(recording.kept().verified(), Ok(()), "seed {SEED}, round {round}");
        (1..=recording.samples).rev().take(3000).for_each(|number| _ = recording.unpacked(number));
    }
    (1..=recording.samples).for_each(|number| recording.free(number));
    assert_eq!((recording.kept().used(), recording.kept().verified()), (0, Ok(())));
}
