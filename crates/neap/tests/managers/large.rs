//! Large blocks that are resized: in place, by moving page tables, and by copying.
//!
//! Goal: a block keeps its contents whichever way it grows or shrinks, also if its pages come from
//! several earlier moves, if moving fails, or is not worth it. Pages that a move leaves are free,
//! and counted as such. The gained part of a block is the program's alone.
//!
//! Method: random chains of reallocations of blocks that are in each other's way, every byte
//! patterned, on virtual machines and on the real system, with moves that fail now and then.

use crate::program::{OPTIONS, Opened, Program, Request, linux};
use neap::options::Options;
use neap_base::Platform;
use neap_testing::random::{Random, number, seed};
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::{Call, Virtual};

/// Reallocates blocks of up to 13 MiB at random.
fn chains<P: Platform>(machine: &Shared<P>, options: &Options, before_each: impl Fn(&mut Random)) {
    let mm = Opened::new(machine.clone(), options).unwrap();
    let (mut program, mut random) = (Program::new(&mm), Random(seed()));
    for step in 0..number("NEAP_STEPS", 300) {
        before_each(&mut random);
        let size = match random.below(6) {
            0 => 1 + random.below(40_000),
            1 => 250_000 + random.below(20_000),
            _ => 300_000 + random.below(4_000_000),
        };
        match random.below(10) {
            0..3 => {
                assert!(program.allocate(Request { size, align: 1 << random.below(20), zeroed: random.below(2) == 0 }))
            }
            3 if step % 7 == 0 => _ = mm.release_all(),
            3 => _ = mm.tick(step),
            4 | 5 => program.choose(random.below(usize::MAX)).into_iter().for_each(|start| program.free(start)),
            _ => {
                if let Some(start) = program.choose(random.below(usize::MAX)) {
                    assert!(program.reallocate(start, size * (1 + random.below(3))));
                }
            }
        }
        while program.blocks.len() > 12 {
            let start = program.choose(random.below(usize::MAX)).unwrap();
            program.free(start);
        }
        if step % 50 == 49 {
            program.verify();
        }
    }
    program.end();
}

#[test]
fn chains_of_reallocations_on_virtual_machines() {
    for page_size in [4 << 10, 16 << 10, 64 << 10] {
        for huge in [true, false] {
            let machine = Shared::new(Virtual::new(page_size, 2));
            let options = Options { huge, ..OPTIONS };
            chains(&machine, &options, |_| ());
            let moves = machine.made(Call::MovePages);
            // Shorter runs are copied where there are huge pages, which are of 2 MiB or not used.
            let least = if huge && page_size == 4096 { 5 } else { 20 };
            assert!(moves > least, "{moves} moves");
            chains(&machine, &options, |random| machine.fail(Call::MovePages, 0, random.below(2)));
        }
    }
}

#[test]
fn chains_of_reallocations_on_the_real_system() {
    let (machine, options) = linux(true);
    chains(&machine, &options, |_| ());
    chains(&machine, &Options { huge: false, ..options }, |_| ());
}

/// A run that lies partly in moved pages is several mappings of the kernel.
#[test]
fn run_over_partially_moved_mappings_can_be_moved() {
    const PART: usize = 512 << 10;
    for round in 0..3 {
        let (machine, options) = linux(true);
        let mm = Opened::new(machine, &Options { huge: false, ..options }).unwrap();
        let mut program = Program::new(&mm);
        let request = |size| Request { size, align: 1, zeroed: false };
        // Neighbours, so that none grows in place: every second one moves away, and returns over
        // the gap.
        (0..16).for_each(|_| assert!(program.allocate(request(PART))));
        for _ in 0..3 {
            for (n, start) in program.blocks.keys().copied().collect::<Vec<_>>().into_iter().enumerate() {
                if n % 2 == round % 2 {
                    assert!(program.reallocate(start, PART * 3 / 2));
                }
            }
            program.verify();
        }
        // All of it is freed, and allocated as whole blocks over all those mappings.
        while let Some((start, _)) = program.blocks.first_key_value() {
            program.free(*start);
        }
        (0..6).for_each(|_| assert!(program.allocate(request(4 * PART))));
        for start in program.blocks.keys().copied().collect::<Vec<_>>() {
            assert!(program.reallocate(start, 5 * PART));
        }
        program.verify();
        (0..6).for_each(|_| assert!(program.allocate(request(4 * PART))));
        program.end();
    }
}

#[test]
fn a_failed_growth_leaves_the_block_as_it_was() {
    let machine = Shared::new(Virtual::new(4096, 2).with_scarce_address_space());
    let mm = Opened::new(machine, &Options { limit: 10 << 20, ..OPTIONS }).unwrap();
    let mut program = Program::new(&mm);
    assert!(program.allocate(Request { size: 4 << 20, align: 1, zeroed: true }));
    let start = *program.blocks.keys().next().unwrap();
    for size in [11 << 20, usize::MAX, isize::MAX as usize, 1 << 45] {
        assert!(!program.reallocate(start, size));
        program.verify();
    }
    program.end();
}

/// A program writes to undefined memory before it reads it, so a long buffer has huge pages though
/// nothing else is resident. A run of zeroes may stay sparse, and under a limit size counts.
#[test]
fn long_buffers_have_huge_pages_and_zeroes_may_stay_sparse() {
    const LONG: usize = 16 << 20;
    let cases = [
        (LONG, false, 0, true),
        (LONG - 4096, false, 0, false),
        (LONG, true, 0, false),
        (LONG, false, 1 << 30, false),
        (LONG, true, 1 << 30, false),
    ];
    for (size, zeroed, limit, expected) in cases {
        let machine = Shared::new(Virtual::new(4096, 1));
        let mm = Opened::new(machine.clone(), &Options { limit, ..OPTIONS }).unwrap();
        let mut program = Program::new(&mm);
        for is_alone in [true, false] {
            assert!(program.allocate(Request { size, align: 1, zeroed }));
            let (&start, _) = program.blocks.last_key_value().unwrap();
            let has = machine.allows_huge_pages(start + (4 << 20));
            assert_eq!(has, expected || !is_alone, "{size} bytes, zeroed: {zeroed}, limit {limit}, alone: {is_alone}");
        }
        program.end();
    }
}
