//! Draining on demand, from any CPU's caches by any thread, and what it leaves undisturbed.
//!
//! Goal: a drain takes all caches of its scope and no others, whether a CPU is in use, has vanished
//! or has come late. Held lists are tried again and then reported. `until` stops in time, and takes
//! cheap caches first. An allocation never fails while lists hold enough memory. No memory is lost
//! when owners, drains and ends of threads coincide.
//!
//! Method: virtual machines with chosen CPUs, the real system for fences and threads; the whole
//! manager is verified after each step.

use crate::program::{OPTIONS, Opened, Program, Request, linux};
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use neap::drain::{Drained, NoSuch, Scope};
use neap::mm::Mm;
use neap::options::Options;
use neap_base::Platform;
use neap_testing::random::{Random, seed};
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;

fn request(size: usize) -> Request {
    Request { size, align: 1, zeroed: false }
}

fn cpu(number: u32) -> Scope {
    Scope { cpu: Some(number), ..Scope::ALL }
}

/// Leaves objects in stacks and barns and pages in lists of a CPU.
fn use_cpu<P: Platform>(program: &mut Program<'_, P>, cpu: usize) {
    Virtual::run_on(cpu);
    let before: Vec<usize> = program.blocks.keys().copied().collect();
    for size in [16, 300, 3000, 20_000] {
        (0..(1 << 20) / size.max(1000)).for_each(|_| assert!(program.allocate(request(size))));
    }
    let new: Vec<usize> = program.blocks.keys().copied().filter(|start| before.binary_search(start).is_err()).collect();
    new.into_iter().for_each(|start| program.free(start));
}

fn in_stacks<P: Platform>(mm: &Mm<P>) -> u64 {
    mm.classes().iter().map(|class| class.in_slots).sum()
}

fn in_barns<P: Platform>(mm: &Mm<P>) -> u64 {
    mm.classes().iter().map(|class| class.in_barn).sum()
}

#[test]
fn a_scope_is_drained_and_nothing_else() {
    let mm = Opened::new(Shared::new(Virtual::new(4096, 3)), &OPTIONS).unwrap();
    let mut program = Program::new(&mm);
    (0..3).for_each(|number| use_cpu(&mut program, number));
    Virtual::run_on(0);
    let (stacks, barns) = (in_stacks(&mm), in_barns(&mm));
    let first = mm.drain(&cpu(1)).unwrap();
    assert_eq!((first.cpus, first.skipped, first.retried), (1, 0, 0), "{first:?}");
    assert!(first.objects > 0 && first.pages > 0 && first.free > 0, "{first:?}");
    assert_eq!((in_stacks(&mm), in_barns(&mm)), (stacks - first.objects, barns), "only that CPU's stacks");
    let again = mm.drain(&cpu(1)).unwrap();
    assert_eq!((again.objects, again.pages), (0, 0), "there was nothing left: {again:?}");
    let all = mm.drain(&Scope { node: Some(0), zone: Some(0), ..Scope::ALL }).unwrap();
    assert_eq!((all.cpus, all.skipped), (3, 0));
    assert_eq!((all.objects, in_stacks(&mm), in_barns(&mm)), (stacks - first.objects + barns, 0, 0), "{all:?}");
    assert_eq!(mm.usage().cached_bytes, 0);
    program.end();
}

#[test]
fn a_scope_that_names_nothing_is_refused_by_name() {
    let mm = Opened::new(Shared::new(Virtual::new(4096, 2)), &OPTIONS).unwrap();
    let mut program = Program::new(&mm);
    use_cpu(&mut program, 1);
    let before = mm.usage();
    let cases = [
        (cpu(2), NoSuch::Cpu(2), "there is no CPU 2"),
        (cpu(u32::MAX), NoSuch::Cpu(u32::MAX), "there is no CPU 4294967295"),
        (Scope { node: Some(1), ..Scope::ALL }, NoSuch::Node(1), "there is no node 1"),
        (Scope { zone: Some(7), ..Scope::ALL }, NoSuch::Zone(7), "there is no zone 7"),
    ];
    for (scope, error, text) in cases {
        assert_eq!(mm.drain(&scope), Err(error));
        assert_eq!(error.to_string(), text);
    }
    assert_eq!(mm.usage(), before, "nothing was done");
    program.end();
}

#[test]
fn a_manager_that_never_allocated_has_nothing_to_drain() {
    let mm: Mm<Virtual> = Mm::new(neap::mm::Hooks { open: |_| (), spawn: None, ticked: None });
    assert_eq!(mm.drain(&Scope::ALL), Ok(Drained::default()));
}

#[test]
fn until_enough_is_free_stops_there_and_takes_page_lists_first() {
    let mm = Opened::new(Shared::new(Virtual::new(4096, 4)), &OPTIONS).unwrap();
    let mut program = Program::new(&mm);
    (0..4).for_each(|number| use_cpu(&mut program, number));
    let until = |pages| mm.drain(&Scope { until: Some(pages), ..Scope::ALL }).unwrap();
    let free = until(0).free;
    assert_eq!(until(free), Drained { cpus: 4, free, ..Drained::default() }, "that much is free already");
    let stacks = in_stacks(&mm);
    let some = until(free + 1);
    assert!(some.free > free && some.pages == some.free - free, "{some:?}");
    assert_eq!((some.objects, in_stacks(&mm), some.skipped), (0, stacks, 0), "page lists were enough: {some:?}");
    let all = until(u64::MAX);
    assert!(all.free < u64::MAX && all.objects > 0 && all.skipped == 0, "all there is: {all:?}");
    assert_eq!((in_stacks(&mm), in_barns(&mm)), (0, 0));
    program.end();
}

/// Free memory of other nodes does not count for a drain of one node.
#[test]
fn until_enough_is_free_on_a_node_looks_at_that_node() {
    // Blocks that wait for a huge page are not free.
    let options = Options { huge: false, ..OPTIONS };
    let mm = Opened::new(Shared::new(Virtual::new(4096, 4).with_nodes(&[0, 0, 1, 1])), &options).unwrap();
    let mut program = Program::new(&mm);
    (0..4).for_each(|number| use_cpu(&mut program, number));
    for (node, cpus) in [(0, 0..2), (1, 2..4)] {
        let free = |node| u64::from(mm.node(node as usize).unwrap().free);
        let listed = || u64::from(mm.node(node as usize).unwrap().listed);
        let until = |pages| mm.drain(&Scope { node: Some(node), until: Some(pages), ..Scope::ALL }).unwrap();
        let (before, other) = (free(node), free(1 - node));
        assert!(other > 0 && listed() > 0, "the test needs free pages on both nodes and some in lists");
        let stacks = in_stacks(&mm);
        assert_eq!(until(before), Drained { cpus: cpus.len() as u32, free: before, ..Drained::default() });
        // The other node's would suffice, if it were drained.
        let some = until(before + 1);
        assert!(some.pages > 0 && some.free == before + some.pages && free(node) == some.free, "{some:?}");
        assert_eq!((some.objects, in_stacks(&mm), some.skipped), (0, stacks, 0), "lists were enough: {some:?}");
        let all = until(before + other);
        assert!(all.objects > 0 && all.skipped == 0, "it goes on while the node has less: {all:?}");
        assert_eq!((all.free, listed()), (free(node), 0));
    }
    program.end();
}

/// CPUs that were not known at the start, and CPUs that no thread runs on any more.
#[test]
fn drain_empties_vanished_cpu_and_finds_late_cpu() {
    let mm = Opened::new(Shared::new(Virtual::new(4096, 8)), &OPTIONS).unwrap();
    let mut program = Program::new(&mm);
    use_cpu(&mut program, 0);
    assert_eq!(mm.drain(&cpu(7)).unwrap().objects, 0, "it has not come yet");
    use_cpu(&mut program, 7);
    // From here on no thread is on CPU 7.
    Virtual::run_on(0);
    let vanished = mm.drain(&cpu(7)).unwrap();
    assert!(vanished.objects > 0 && vanished.skipped == 0, "{vanished:?}");
    use_cpu(&mut program, 7);
    assert!(mm.drain(&cpu(7)).unwrap().objects > 0, "it came back");
    program.end();
}

/// Free memory lies in lists. A large request must find it by draining, even if reclaim has found
/// nothing.
#[test]
fn d7_what_lists_hold_is_had_before_a_contiguous_request_fails() {
    const LIMIT: usize = 16 << 20;
    for size in [4096, 8192, 32_768] {
        let mm = Opened::new(Shared::new(Virtual::new(4096, 4)), &Options { limit: LIMIT as u64, ..OPTIONS }).unwrap();
        let mut program = Program::new(&mm);
        while program.allocate(request(size)) {}
        let all: Vec<usize> = program.blocks.keys().copied().collect();
        for (number, start) in all.into_iter().enumerate() {
            Virtual::run_on(number % 4);
            program.free(start);
        }
        let usage = mm.usage();
        assert!(usage.cached_bytes > 0, "{usage:?}");
        let numbers = mm.node(0).unwrap();
        let most = (numbers.budget.unwrap() - numbers.table_pages) as usize * 4096;
        assert!(program.allocate(request(most)), "all of it, in one piece, of which nothing is in use: {usage:?}");
        program.end();
    }
}

#[test]
fn a_cpu_that_cannot_be_fenced_is_tried_again_and_then_reported() {
    let (machine, options) = linux(true);
    if machine.rseq_offset().is_none() {
        return;
    }
    let mm = Opened::new(machine.clone(), &options).unwrap();
    let mut program = Program::new(&mm);
    use_cpu(&mut program, 0);
    let stacks = in_stacks(&mm);
    machine.failing_fences.store(usize::MAX, Relaxed);
    let refused = mm.drain(&Scope::ALL).unwrap();
    // CPUs that were never used need no fence. The scheduler decides how many were used.
    assert!((1..=refused.cpus).contains(&refused.skipped), "{refused:?}");
    assert_eq!(in_stacks(&mm), stacks, "{refused:?}");
    assert!(refused.retried >= refused.skipped && refused.pages > 0, "what can be had is taken: {refused:?}");
    // The first fails, and the second try succeeds.
    machine.failing_fences.store(1, Relaxed);
    let second = mm.drain(&Scope::ALL).unwrap();
    assert_eq!((second.skipped, second.retried, in_stacks(&mm)), (0, 1, 0), "{second:?}");
    program.end();
}

/// Working owners, ending threads, and drains of everything, at the same time.
#[test]
fn d1_d2_nothing_is_lost_to_drains_while_owners_work_and_end() {
    let seed = seed();
    for rseq in [true, false] {
        let (machine, options) = linux(rseq);
        let mm = Opened::new(machine, &options).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let owners: Vec<_> = (0..3)
                .map(|number| {
                    let mm = &mm;
                    scope.spawn(move || {
                        // Each generation of threads leaves its cached memory behind.
                        for generation in 0..6 {
                            std::thread::scope(|scope| {
                                scope.spawn(move || {
                                    let mut random = Random(seed + number * 100 + generation);
                                    let mut program = Program::new(mm);
                                    for _ in 0..3000 {
                                        if random.below(5) < 3 {
                                            let size = [16, 64, 500, 4096, 30_000, 70_000][random.below(6)];
                                            assert!(program.allocate(request(size)));
                                        } else if let Some(start) = program.choose(random.below(usize::MAX)) {
                                            program.free(start);
                                        }
                                    }
                                    let all: Vec<usize> = program.blocks.keys().copied().collect();
                                    all.into_iter().for_each(|start| program.free(start));
                                });
                            });
                        }
                    })
                })
                .collect();
            let drainer = scope.spawn(|| {
                let (mut random, mut objects) = (Random(seed), 0);
                while !stop.load(Relaxed) {
                    let number = (random.below(3) > 0).then(|| random.below(2) as u32);
                    let until = (random.below(4) == 0).then(|| random.below(10_000) as u64);
                    if let Ok(drained) = mm.drain(&Scope { cpu: number, until, ..Scope::ALL }) {
                        objects += drained.objects;
                    }
                }
                objects
            });
            owners.into_iter().for_each(|owner| owner.join().unwrap());
            stop.store(true, Relaxed);
            assert!(drainer.join().unwrap() > 0, "drains and owners met");
        });
        assert_eq!(mm.drain(&Scope::ALL).unwrap().skipped, 0);
        Program::new(&mm).end();
    }
}
