//! Isolated CPUs: no work of a manager interrupts them.
//!
//! Goal: an isolated CPU's caches work, and are drained from outside without a fence. Other CPUs
//! have sequences. Fork and verification fence only the others. While an isolated CPU runs the
//! process ticks release and move nothing, report that, and do not keep the maintenance thread
//! awake. Explicit calls release.
//!
//! Method: the real system with CPUs declared isolated, and virtual machines that count calls.

use crate::program::{OPTIONS, Opened, Program, Request};
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use neap::drain::Scope;
use neap::mm::{Hooks, Mm};
use neap::options::{Background, Options};
use neap_base::platform::Errno;
use neap_base::{Linux, Platform};
use neap_os::topology::CpuSet;
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::{Call, Virtual};

fn set(text: &str) -> CpuSet {
    CpuSet::parse(text.as_bytes()).unwrap()
}

fn work<P: Platform>(program: &mut Program<'_, P>) {
    for size in [16, 64, 500, 3000, 30_000, 100_000] {
        (0..(2 << 20) / size.max(2000))
            .for_each(|_| assert!(program.allocate(Request { size, align: 1, zeroed: false })));
    }
    while let Some((start, _)) = program.blocks.first_key_value() {
        program.free(*start);
    }
}

fn in_stacks<P: Platform>(mm: &Mm<P>) -> u64 {
    mm.classes().iter().map(|class| class.in_slots).sum()
}

/// Runs `body` on a thread that stays on a CPU. `None` if the process may not run there.
fn on<T: Send>(cpu: usize, body: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            // SAFETY: zeroes are an empty set, and its size is given.
            let moved = unsafe {
                let mut one: libc::cpu_set_t = core::mem::zeroed();
                libc::CPU_SET(cpu, &mut one);
                libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const one) == 0
            };
            moved.then(body)
        });
        thread.join().unwrap()
    })
}

#[test]
fn where_all_cpus_are_isolated_there_is_no_fence_ever() {
    let machine = Shared::new(Linux::probe().with_isolated(&set("0-1023")));
    let mm = Opened::new(machine.clone(), &OPTIONS).unwrap();
    let mut program = Program::new(&mm);
    for tick in 1..6 {
        work(&mut program);
        mm.tick(tick);
        program.verify();
        assert!(mm.drain(&Scope::ALL).unwrap().skipped == 0 && in_stacks(&mm) == 0);
    }
    program.end();
    assert_eq!(machine.fences.load(Relaxed), 0);
}

/// Returns the fences of a drain of a CPU from CPU 1, with the CPUs of a list isolated. `None` if
/// there are no sequences, or the process may not run on one of the two.
fn fences_of_a_drain(isolated: &str, cpu: usize) -> Option<usize> {
    let machine = Shared::new(Linux::probe().with_isolated(&set(isolated)));
    machine.rseq_offset()?;
    let mm = Opened::new(machine.clone(), &OPTIONS).unwrap();
    on(cpu, || work(&mut Program::new(&mm)))?;
    let drain = || {
        let stacks = in_stacks(&mm);
        assert!(stacks > 0, "CPU {cpu} keeps something");
        let before = machine.fences.load(Relaxed);
        let drained = mm.drain(&Scope { cpu: Some(cpu as u32), ..Scope::ALL }).unwrap();
        assert_eq!((drained.objects, drained.skipped, in_stacks(&mm)), (stacks, 0, 0));
        machine.fences.load(Relaxed) - before
    };
    let fences = on(1, drain)?;
    // The whole manager is verified, which closes all sequences.
    Program::new(&mm).end();
    Some(fences)
}

#[test]
fn drain_fences_only_cpus_that_are_not_isolated() {
    for (isolated, cpu, expected) in [("", 0, 1), ("0", 0, 0), ("0", 1, 1), ("1", 1, 0), ("0-1", 0, 0)] {
        let fences = fences_of_a_drain(isolated, cpu);
        assert!(
            fences.is_none_or(|fences| fences == expected),
            "CPU {cpu} with {isolated} isolated: {fences:?} fences"
        );
    }
}

#[test]
fn threads_come_and_go_between_isolated_cpus_and_others() {
    let machine = Shared::new(Linux::probe().with_isolated(&set("1")));
    let mm = Opened::new(machine, &OPTIONS).unwrap();
    std::thread::scope(|scope| {
        for number in 0..3 {
            let mm = &mm;
            scope.spawn(move || {
                for round in 0..6 {
                    // Blocks of one kind of CPU are freed on the other.
                    let mut program = Program::new(mm);
                    (0..500).for_each(|n| {
                        assert!(program.allocate(Request { size: 16 + n * 7, align: 1, zeroed: false }));
                    });
                    let blocks: Vec<_> = program.blocks.keys().copied().collect();
                    let blocks: Vec<_> = blocks.into_iter().map(|start| program.give_away(start)).collect();
                    let free = move || {
                        let mut program = Program::new(mm);
                        for block in blocks {
                            let start = block.0;
                            program.adopt(block);
                            program.free(start);
                        }
                    };
                    on((number + round) % 2, free);
                    if number == 0 {
                        mm.drain(&Scope::ALL).unwrap();
                    }
                }
            });
        }
    });
    // If a CPU is not available its blocks were not freed.
    if on(0, || ()).is_some() && on(1, || ()).is_some() {
        Program::new(&mm).end();
    }
}

#[test]
fn release_and_move_wait_while_isolated_cpu_is_in_use() {
    let machine = Shared::new(Virtual::new(4096, 2).with_isolated(set("1")));
    let mm = Opened::new(machine.clone(), &OPTIONS).unwrap();
    let mut program = Program::new(&mm);
    let released = || machine.made(Call::Release) + machine.made(Call::ReleaseScattered);
    machine.use_isolated_cpu(true);
    work(&mut program);
    let ticks = (1..=20).map(|tick| mm.tick(tick * 250_000_000));
    let left: Vec<bool> =
        ticks.inspect(|tick| assert!(tick.held && tick.pages.released == 0)).map(|tick| tick.left).collect();
    assert!(left[0] && !left[19], "waiting keeps no thread awake: {left:?}");
    assert!(released() == 0 && mm.usage().cached_bytes == 0 && mm.usage().free_bytes > 1 << 20, "{:?}", mm.usage());
    // An explicit call releases.
    assert!(mm.release_all() && released() > 0);
    // Page tables are not moved either: blocks that cannot grow in place are copied.
    let mut grow = |sizes: [usize; 3]| {
        let start = |program: &Program<'_, Shared<Virtual>>| *program.blocks.keys().next_back().unwrap();
        for mib in sizes {
            let request = |mib: usize| Request { size: mib << 20, align: 1, zeroed: false };
            assert!(program.allocate(request(mib)));
            let growing = start(&program);
            assert!(program.allocate(request(mib)), "it is in the way");
            assert!(program.reallocate(growing, mib << 22));
        }
        machine.made(Call::MovePages)
    };
    assert_eq!(grow([1, 5, 20]), 0);
    // Once the isolated CPU is not in use, memory is released again.
    machine.use_isolated_cpu(false);
    assert_eq!(grow([1, 5, 20]), 0, "calls go by the last look, for an interval");
    machine.advance(250_000_000);
    assert!(grow([2, 6, 30]) > 0);
    let before = released();
    while let Some((start, _)) = program.blocks.first_key_value() {
        program.free(*start);
    }
    let ticks: Vec<_> = (21..=30).map(|tick| mm.tick(tick * 250_000_000)).collect();
    assert!(ticks.iter().all(|tick| !tick.held) && ticks.iter().any(|tick| tick.pages.released > 0) && !ticks[9].left);
    assert!(released() > before);
    program.end();
}

/// Ticks do not run on isolated CPUs.
#[test]
fn a_call_on_an_isolated_cpu_makes_no_thread_and_no_tick() {
    static THREADS: AtomicU32 = AtomicU32::new(0);
    static TICKS: AtomicU32 = AtomicU32::new(0);
    let hooks = || Hooks::<Shared<Virtual>> {
        open: |_| (),
        spawn: Some(|_, _| {
            THREADS.fetch_add(1, Relaxed);
            Err(Errno::PERM)
        }),
        ticked: Some(|_, _| _ = TICKS.fetch_add(1, Relaxed)),
    };
    for background in [Background::Threaded, Background::Never] {
        let machine = Shared::new(Virtual::new(4096, 2).with_isolated(set("1")));
        let mm = Opened::with_hooks(machine.clone(), &Options { background, ..OPTIONS }, hooks()).unwrap();
        let mut program = Program::new(&mm);
        // So long that a tick is due at every look.
        let mut calls = |cpu| {
            Virtual::run_on(cpu);
            for _ in 0..3 {
                machine.advance(1 << 40);
                work(&mut program);
                assert!(program.allocate(Request { size: 40 << 20, align: 1, zeroed: false }));
                let run = *program.blocks.keys().next().unwrap();
                program.free(run);
            }
            (THREADS.swap(0, Relaxed), TICKS.swap(0, Relaxed).min(1))
        };
        assert_eq!(calls(1), (0, 0), "{background:?}");
        assert_eq!(calls(0), (0, 1), "{background:?}");
        program.end();
    }
}
