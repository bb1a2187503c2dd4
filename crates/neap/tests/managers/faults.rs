//! Every system call failing at every position of a fixed program.
//!
//! Goal: where the system refuses, an allocation returns null or finds another way, the program's
//! memory keeps its contents, nothing is lost, and once the system has recovered everything works
//! and is released.
//!
//! Method: the program runs once to count its calls. Then it runs again for each of them, with that
//! one failing, once and from then on. Virtual machines have no real fences: those fail on the real
//! system.

use crate::program::{OPTIONS, Opened, Program, Request, linux};
use core::sync::atomic::Ordering::Relaxed;
use neap::options::{AUTO, Options};
use neap_base::Platform;
use neap_base::platform::{LimitedBy, Room};
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::{Call, Virtual};

const SIZES: [usize; 8] = [24, 500, 40_000, 3000, 100, 300_000, 20_000, 70];

/// Allocates, moves, frees, ticks and releases. Failed allocations are accepted.
fn work<P: Platform>(program: &mut Program<'_, P>, now: impl Fn() -> u64) {
    // Enough memory in use that fresh memory comes as huge pages.
    let ballast = program.mm.allocate(20 << 20);
    for step in 0..45_usize {
        Virtual::run_on(step % 2);
        for size in [SIZES[step % 8], SIZES[step * 5 % 7]] {
            let align = if step % 9 == 4 { 1 << (step % 14) } else { 1 };
            (0..(60_000 / size).clamp(1, 90)).for_each(|n| {
                _ = program.allocate(Request { size, align, zeroed: n % 4 == 0 });
            });
        }
        if let Some(start) = program.choose(step * 7919) {
            _ = program.reallocate(start, SIZES[step * 3 % 8] * 2);
        }
        while program.blocks.len() > 500 {
            let start = program.choose(step * 104_729 + program.blocks.len() * 31).unwrap();
            program.free(start);
        }
        match step % 15 {
            3 | 7 | 11 => _ = program.mm.tick(now()),
            14 => _ = program.mm.release_all(),
            _ => {}
        }
    }
    // SAFETY: allocated above, or null, and not used.
    unsafe { program.mm.free(ballast) };
}

/// Runs the program on a system that may fail, lets the system recover, and runs the program again.
fn survives<P: Platform>(machine: &Shared<P>, options: &Options, recover: impl Fn(), what: &str) {
    let Ok(mm) = Opened::new(machine.clone(), options) else { return recover() };
    let mut program = Program::new(&mm);
    work(&mut program, || machine.now());
    recover();
    program.verify();
    assert!(program.allocate(Request { size: 3 << 20, align: 1, zeroed: true }), "{what}: it never recovered");
    work(&mut program, || machine.now());
    program.end();
}

/// Runs it on a virtual machine. `nodes`: the nearest of each CPU. With two nodes the limit follows
/// a container.
fn on_a_virtual_machine(what: &str, nodes: [usize; 2], prepare: impl Fn(&Virtual)) -> Shared<Virtual> {
    let machine = Shared::new(Virtual::new(4096, 2).with_nodes(&nodes).with_scarce_address_space());
    machine.set_room(|| Room { owner: LimitedBy::Group, limit: 2 << 30, used: 1 << 30, smallest: 2 << 30 });
    prepare(&machine);
    let recover = || Call::ALL.iter().for_each(|call| machine.fail(*call, 0, 0));
    let options = Options { limit: if nodes == [0, 0] { 0 } else { AUTO }, ..OPTIONS };
    survives(&machine, &options, recover, what);
    machine
}

#[test]
fn every_call_fails_at_every_position_once_and_from_then_on() {
    for nodes in [[0, 0], [0, 1]] {
        let faultless = on_a_virtual_machine("no fault", nodes, |_| ());
        for call in Call::ALL {
            // The second half of a run is after the recovery.
            let calls = faultless.made(call).div_ceil(2) + 2;
            println!("{call:?} is made {} times", faultless.made(call));
            // The program has no per-CPU data, and keeps no resting memory.
            let never =
                matches!(call, Call::Fence | Call::MovePages | Call::Reserve | Call::Open | Call::ReleaseLazily)
                    || matches!(call, Call::Bind | Call::Room) && nodes == [0, 0];
            assert!(faultless.made(call) > 0 || never, "{call:?} is never made");
            for position in 0..calls {
                for failures in [1, usize::MAX] {
                    let what = format!("{call:?} fails {failures} times after {position}");
                    on_a_virtual_machine(&what, nodes, |machine| machine.fail(call, position, failures));
                }
            }
        }
    }
}

/// Where memory can be neither released, nor populated, nor moved, the failing calls have no
/// effect.
#[test]
fn p3_a_system_that_takes_nothing_back_is_a_system_all_the_same() {
    let machine = on_a_virtual_machine("nothing is taken back", [0, 1], |machine| {
        for call in [Call::Release, Call::ReleaseScattered, Call::Populate, Call::MovePages, Call::Fence] {
            machine.fail(call, 0, usize::MAX);
        }
    });
    assert!(machine.made(Call::Release) > 0);
    let only_single_releases = on_a_virtual_machine("no scattered release", [0, 0], |machine| {
        machine.fail(Call::ReleaseScattered, 0, usize::MAX);
    });
    assert!(only_single_releases.released_bytes() > 0);
}

#[test]
fn every_fence_fails_once_and_from_then_on() {
    let run = |good: usize, failing: usize| {
        let (machine, options) = linux(true);
        machine.good_fences.store(good, Relaxed);
        machine.failing_fences.store(failing, Relaxed);
        let recover = || {
            machine.good_fences.store(0, Relaxed);
            machine.failing_fences.store(0, Relaxed);
        };
        survives(&machine, &options, recover, &format!("{failing} fences fail after {good}"));
        machine.fences.load(Relaxed)
    };
    let fences = run(0, 0);
    if linux(true).0.rseq_offset().is_none() {
        return assert_eq!(fences, 0);
    }
    assert!(fences > 10, "{fences} fences");
    for position in 0..fences / 2 + 2 {
        run(position, 1);
        run(position, usize::MAX);
    }
}

/// A failed fence drains nothing: the tick says so, and a later one does it.
#[test]
fn tick_with_failed_fence_skips_and_later_tick_drains() {
    let (machine, options) = linux(true);
    if machine.rseq_offset().is_none() {
        return;
    }
    let mm = Opened::new(machine.clone(), &options).unwrap();
    let mut program = Program::new(&mm);
    (0..500).for_each(|n| assert!(program.allocate(Request { size: n, align: 1, zeroed: false })));
    while let Some(start) = program.choose(0) {
        program.free(start);
    }
    let in_stacks = || mm.classes().iter().map(|class| class.in_slots).sum::<u64>();
    let before = in_stacks();
    assert!(before > 0);
    let first = mm.tick(1);
    assert_eq!((first.drained, first.skipped, in_stacks()), (0, 0, before), "what is looked at once is not idle yet");
    machine.failing_fences.store(usize::MAX, Relaxed);
    let second = mm.tick(2);
    assert!(second.drained == 0 && second.skipped > 0 && second.left, "{second:?}");
    assert_eq!(in_stacks(), before);
    machine.failing_fences.store(0, Relaxed);
    let third = mm.tick(3);
    assert_eq!((third.drained, third.skipped, in_stacks()), (second.skipped, 0, 0), "{third:?}");
    program.end();
}
