//! Random programs on every kind of machine, against a model of what they have.
//!
//! Goal: for any order of allocating, moving, freeing, migrating, ticks, releases and passing time:
//! no block overlaps another, or loses its contents or its alignment; zeroed memory is zero; every
//! object and page is in exactly one place. Once all is freed and released, nothing is left.
//!
//! Method: proptest makes sequences of operations, and shrinks failing ones. `Program` executes
//! them and is the model. The manager is verified every few steps.

use crate::program::{OPTIONS, Opened, Program, Request, linux, nothing_is_kept};
use neap::options::Options;
use neap_base::platform::Platform;
use neap_objects::size_class::LARGEST;
use neap_testing::random::{number, seed};
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

#[derive(Clone, Debug)]
enum Step {
    Allocate(Request),
    /// Number of blocks, their size, and n: every n-th stays.
    Burst(usize, usize, usize),
    Free(usize),
    /// Number of blocks, and the place of the first.
    FreeMany(usize, usize),
    Reallocate(usize, usize),
    Migrate(usize),
    /// Milliseconds.
    Pass(u64),
    Tick,
    ReleaseAll,
    Verify,
}

fn sizes() -> impl Strategy<Value = usize> {
    prop_oneof![
        8 => 0..=1024_usize,
        4 => 1024..=LARGEST,
        2 => (0..=4_usize).prop_map(|over| LARGEST - 2 + over),
        2 => LARGEST..400_000,
        1 => 1_000_000..6_000_000_usize,
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let request = (sizes(), prop_oneof![6 => Just(0), 2 => 4..=12_u32, 1 => 12..=22_u32], any::<bool>())
        .prop_map(|(size, align, zeroed)| Request { size, align: 1 << align, zeroed });
    let step = prop_oneof![
        30 => request.prop_map(Step::Allocate),
        6 => (prop_oneof![0..=256_usize, 0..=LARGEST], 1..1500_usize, 1..40_usize)
            .prop_map(|(size, count, keep)| Step::Burst(size, count.min((4 << 20) / size.max(16)), keep)),
        25 => any::<usize>().prop_map(Step::Free),
        6 => (any::<usize>(), 1..600_usize).prop_map(|(from, count)| Step::FreeMany(from, count)),
        12 => (any::<usize>(), sizes()).prop_map(|(which, size)| Step::Reallocate(which, size)),
        12 => any::<usize>().prop_map(Step::Migrate),
        5 => (1..600_u64).prop_map(Step::Pass),
        5 => Just(Step::Tick),
        2 => Just(Step::ReleaseAll),
        2 => Just(Step::Verify),
    ];
    prop::collection::vec(step, 1..120)
}

fn run<P: Platform>(machine: &Shared<P>, options: &Options, steps: &[Step], pass: impl Fn(u64)) {
    let mm = Opened::new(machine.clone(), options).unwrap();
    let mut program = Program::new(&mm);
    for step in steps {
        match *step {
            Step::Allocate(request) => assert!(program.allocate(request)),
            Step::Burst(size, count, keep) => {
                let before: Vec<usize> = program.blocks.keys().copied().collect();
                (0..count).for_each(|_| assert!(program.allocate(Request { size, align: 1, zeroed: false })));
                let new = program.blocks.keys().filter(|start| before.binary_search(start).is_err());
                let gone: Vec<usize> =
                    new.enumerate().filter(|(n, _)| n % keep != 0).map(|(_, start)| *start).collect();
                gone.into_iter().for_each(|start| program.free(start));
            }
            Step::Free(which) => program.choose(which).into_iter().for_each(|start| program.free(start)),
            Step::FreeMany(from, count) => {
                let Some(from) = program.choose(from) else { continue };
                let starts: Vec<usize> = program.blocks.range(from..).take(count).map(|(start, _)| *start).collect();
                starts.into_iter().for_each(|start| program.free(start));
            }
            Step::Reallocate(which, size) => {
                if let Some(start) = program.choose(which) {
                    assert!(program.reallocate(start, size));
                }
            }
            Step::Migrate(cpu) => Virtual::run_on(cpu % 8),
            Step::Pass(milliseconds) => pass(milliseconds * 1_000_000),
            Step::Tick => _ = mm.tick(machine.now()),
            Step::ReleaseAll => _ = mm.release_all(),
            Step::Verify => program.verify(),
        }
    }
    program.end();
}

fn programs<P: Platform>(make: impl Fn() -> (Shared<P>, Options), pass: impl Fn(&P, u64)) {
    let seed = RngSeed::Fixed(seed());
    let cases = number("NEAP_CASES", 12) as u32;
    let config = Config { cases, rng_seed: seed, failure_persistence: None, ..Config::default() };
    let run = |steps: Vec<Step>| {
        let (machine, options) = make();
        run(&machine, &options, &steps, |nanoseconds| pass(&machine, nanoseconds));
        Ok(())
    };
    if let Err(failure) = TestRunner::new(config).run(&steps(), run) {
        panic!("{failure}");
    }
}

fn virtual_programs(page_size: usize) {
    for cpus in [1, 2, 8] {
        for scarce in [false, true] {
            let make = || {
                let machine = Virtual::new(page_size, cpus);
                (Shared::new(if scarce { machine.with_scarce_address_space() } else { machine }), OPTIONS)
            };
            programs(make, Virtual::advance);
        }
    }
}

#[test]
fn programs_on_pages_of_4_kib() {
    virtual_programs(4 << 10);
}

#[test]
fn programs_on_pages_of_16_kib() {
    virtual_programs(16 << 10);
}

#[test]
fn programs_on_pages_of_64_kib() {
    virtual_programs(64 << 10);
}

#[test]
fn programs_on_the_real_system_with_both_kinds_of_slots() {
    // Real time cannot be advanced; ticks can be made.
    for rseq in [true, false] {
        programs(|| linux(rseq), |_, _| ());
    }
}

#[test]
fn a_manager_that_did_nothing_keeps_nothing() {
    let (machine, options) = linux(true);
    nothing_is_kept(&Opened::new(machine, &options).unwrap().0);
}
