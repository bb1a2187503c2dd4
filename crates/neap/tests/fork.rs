//! Fork while threads allocate.
//!
//! Goal: a child forked at any moment finds every object and page in exactly one place, no mutex
//! held, and can use every class at once. Its parent goes on. Forks of two threads wait for each
//! other. In both kinds of slots.
//!
//! Method: this program has neap as its allocator. Threads keep their stacks moving and check their
//! memory. Two threads fork. Each child verifies the manager, allocates and frees in all classes
//! and as runs, verifies again, forks a child of its own, and ends. `NEAP_FORKS` sets the number of
//! forks.

mod program;

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use neap::process::PROCESS;
use neap_objects::size_class::Class;
use neap_testing::again::{self, succeeds};
use neap_testing::child::in_child;
use neap_testing::random::{Random, number, seed};
use program::{Program, Request};

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

/// Number of working threads, of which one never leaves the fast paths.
const WORKERS: u64 = 3;
const FORKERS: u64 = 2;

/// Threads that may be stopped with an object in their hands: ours, the harness's two, and neap's.
const IN_HANDS: u64 = WORKERS + FORKERS + 3;

fn request(size: usize) -> Request {
    Request { size, align: 1, zeroed: false }
}

fn proves(in_hands: u64) {
    if let Err(finding) = PROCESS.verify(in_hands) {
        panic!("in process {}: {finding}", std::process::id());
    }
}

/// Uses every class and some runs.
fn uses_everything() {
    let mut program = Program::new(&PROCESS);
    for class in Class::all() {
        (0..5).for_each(|_| assert!(program.allocate(request(class.size()))));
    }
    [40_000, 300_000].into_iter().for_each(|size| assert!(program.allocate(request(size))));
    while let Some((start, _)) = program.blocks.first_key_value() {
        program.free(*start);
    }
}

fn child(number: u64) {
    proves(IN_HANDS);
    uses_everything();
    if number.is_multiple_of(10) {
        PROCESS.release_all();
        PROCESS.tick(u64::MAX / 2);
        // Threads and children of the child work as well.
        std::thread::scope(|scope| _ = scope.spawn(uses_everything));
        in_child(|| {
            proves(IN_HANDS);
            uses_everything();
        });
    }
    proves(IN_HANDS);
}

/// Allocates and frees in a few classes, checks every byte, until told to stop.
fn works(seed: u64, stop: &AtomicBool) {
    const SIZES: [usize; 8] = [16, 64, 64, 200, 1000, 5000, 30_000, 50_000];
    let (mut program, mut random) = (Program::new(&PROCESS), Random(seed));
    while !stop.load(Relaxed) {
        assert!(program.allocate(request(SIZES[random.below(SIZES.len())])));
        while program.blocks.len() > random.below(300) {
            program.free(program.choose(random.below(usize::MAX)).unwrap());
        }
    }
    while let Some((start, _)) = program.blocks.first_key_value() {
        program.free(*start);
    }
}

/// Allocates and frees so little that it never enters the gate.
fn stays_hot(stop: &AtomicBool) {
    while !stop.load(Relaxed) {
        for _ in 0..1000 {
            let objects = [PROCESS.allocate(100), PROCESS.allocate(100), PROCESS.allocate(100)];
            for object in objects {
                // SAFETY: just allocated.
                unsafe {
                    object.write(1);
                    PROCESS.free(object);
                }
            }
        }
    }
}

/// A test of a process of its own: runs only if told to.
#[test]
fn forks() {
    if again::case().is_none() {
        return;
    }
    let (forks, seed, stop) = (number("NEAP_FORKS", 200), seed(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| stays_hot(&stop));
        for number in 1..WORKERS {
            let stop = &stop;
            scope.spawn(move || works(seed + number, stop));
        }
        let forkers: Vec<_> = (0..FORKERS)
            .map(|_| scope.spawn(move || (0..forks / FORKERS).for_each(|n| in_child(|| child(n)))))
            .collect();
        let ends: Vec<_> = forkers.into_iter().map(|forker| forker.join()).collect();
        stop.store(true, Relaxed);
        assert!(ends.iter().all(Result::is_ok));
    });
    proves(IN_HANDS);
}

#[test]
fn forked_child_of_busy_process_is_consistent_in_all_modes() {
    let modes = ["rseq:on,interval:10", "rseq:off,interval:10", "isolated:1,interval:10", "interval:10,nodes:2"];
    modes.iter().for_each(|options| succeeds("forks", "forks", options));
}
