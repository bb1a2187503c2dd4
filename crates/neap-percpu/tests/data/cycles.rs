//! Thousands of owners that come and go: nothing grows with their number.
//!
//! Goal: after 11 000 sets of owners, the remaining memory and the worker's work equal those of the
//! first sets. Method: equal work on a virtual machine is compared part by part: pages, chunks,
//! table entries, calls, and chunks that the worker examines. `neap bench percpu` prints the times.

use crate::machine::{end, open, settle, shape, verify};
use neap_percpu::{Layout, Owner, PerCpuData, Statistics, Wait};
use neap_testing::random::{Random, seed};
use neap_testing::virtual_platform::Virtual;

/// Sizes of the allocations that Linux makes for a memory group.
const SIZES: [usize; 5] = [1400, 600, 24, 8, 8];
const CYCLES: usize = 11_000;
/// Cycles of a part; parts are compared with each other.
const PART: usize = 1000;
/// Cycles between two ticks.
const TICK: usize = 50;

fn make(data: &PerCpuData, machine: &Virtual) -> Owner {
    let owner = data.open_owner(machine).unwrap();
    for size in SIZES {
        data.allocate(machine, owner, size, 8, Wait::Long).unwrap();
    }
    owner
}

fn delete(data: &PerCpuData, owner: Owner) {
    // SAFETY: no code uses the owner's allocations any more.
    unsafe { data.close_owner(owner) }.unwrap();
}

/// Populated pages, chunks and table entries at a moment.
fn footprint(data: &PerCpuData) -> [usize; 3] {
    let Statistics { populated, chunks, table_entries, .. } = data.statistics();
    [populated, chunks, table_entries]
}

/// Work so far: populating calls, releasing calls, pages released, chunks examined.
fn work(data: &PerCpuData) -> [u64; 4] {
    let Statistics { populate_calls, release_calls, released, looks, .. } = data.statistics();
    [populate_calls, release_calls, released, looks]
}

fn difference(before: [u64; 4], after: [u64; 4]) -> [u64; 4] {
    core::array::from_fn(|at| after[at] - before[at])
}

/// One set after the other: all parts are alike.
#[test]
fn a_set_that_comes_and_goes_leaves_nothing_however_often() {
    for (cpus, others) in [(2, 0), (2, 100), (4, 1), (32, 20)] {
        let machine = Virtual::new(4096, cpus);
        let data = open(&machine, &shape(Layout::Rows, cpus, 4096));
        let others: Vec<Owner> = (0..others).map(|_| make(&data, &machine)).collect();
        let part = || {
            let before = work(&data);
            for cycle in 0..PART {
                delete(&data, make(&data, &machine));
                if cycle % TICK == 0 {
                    data.tick(&machine);
                }
            }
            verify(&data);
            (footprint(&data), difference(before, work(&data)))
        };
        part();
        let first = part();
        for number in 2..CYCLES / PART {
            assert_eq!(part(), first, "{cpus} CPUs: part {number} and the first");
        }
        println!("{cpus} CPUs, beside {} others: {first:?} in each {PART} cycles", others.len());
        others.into_iter().for_each(|owner| delete(&data, owner));
        end(&data, &machine, Vec::new());
    }
}

/// All sets at once, again and again: the peak and the remainder are equal each time.
#[test]
fn sets_made_and_deleted_together_cost_the_same_every_round() {
    let machine = Virtual::new(4096, 2);
    let data = open(&machine, &shape(Layout::Rows, 2, 4096));
    let round = || {
        let before = work(&data);
        let held: Vec<Owner> = (0..CYCLES / 5).map(|_| make(&data, &machine)).collect();
        let peak = footprint(&data);
        held.into_iter().for_each(|owner| delete(&data, owner));
        settle(&data, &machine);
        (peak, footprint(&data), difference(before, work(&data)))
    };
    round();
    let first = round();
    (0..4).for_each(|number| assert_eq!(round(), first, "round {number} and the first"));
    println!("{first:?}");
    assert!(first.2.iter().all(|done| *done > 0), "the worker has work: {first:?}");
    end(&data, &machine, Vec::new());
}

/// A number of sets that grows and shrinks at random: neither memory nor work creeps up.
#[test]
fn sets_that_go_at_random_do_not_spread() {
    const MOST: usize = 1500;
    let (machine, mut random) = (Virtual::new(4096, 2), Random(seed()));
    let data = open(&machine, &shape(Layout::Rows, 2, 4096));
    let mut live: Vec<Owner> = (0..MOST - PART).map(|_| make(&data, &machine)).collect();
    let mut part = || {
        let (before, mut all) = (work(&data), [0; 3]);
        for cycle in 0..2 * PART {
            if cycle < PART {
                live.push(make(&data, &machine));
            } else {
                delete(&data, live.swap_remove(random.below(live.len())));
            }
            if cycle % TICK == 0 {
                data.tick(&machine);
            }
            if cycle + 1 == PART {
                all = footprint(&data);
            }
        }
        (0..4).for_each(|_| _ = data.tick(&machine));
        verify(&data);
        (all, footprint(&data), difference(before, work(&data)))
    };
    let parts: Vec<_> = (0..CYCLES / PART).map(|_| part()).collect();
    parts.iter().for_each(|part| println!("{part:?}"));
    let (first, last) = (parts[1], parts[parts.len() - 1]);
    // At most a twentieth more: the positions of holes are random.
    for at in 0..3 {
        assert!(last.0[at] * 20 <= first.0[at] * 21, "with all: {last:?} after {first:?}");
        assert!(last.1[at] * 20 <= first.1[at] * 21, "with few: {last:?} after {first:?}");
    }
    // The work of five early parts and of the last five differs by at most a quarter.
    for at in 0..4 {
        let [early, late] = [1..6, 6..11].map(|range| parts[range].iter().map(|part| part.2[at]).sum::<u64>());
        assert!(early > 0 && late * 4 <= early * 5, "{late} after {early}: {parts:?}");
    }
    live.into_iter().for_each(|owner| delete(&data, owner));
    end(&data, &machine, Vec::new());
}
