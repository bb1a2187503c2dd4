//! Unused memory is released, tick by tick.
//!
//! Goal: objects that rested for a tick are taken from the stacks by the next one; barns and pages
//! follow; after a bounded number of ticks nothing is resident. `left` says correctly whether there
//! is more to do. A tick fences an idle CPU at most once, and a busy one never for stacks in use.
//! Without a thread, ordinary calls tick as time passes.
//!
//! Method: a burst is freed and ticks are counted, on virtual machines and on the real system with
//! both kinds of slots.

use crate::program::{OPTIONS, Opened, Program, Request, linux, nothing_is_kept};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use neap::maintenance::Tick;
use neap::mm::{Hooks, Mm};
use neap::options::Options;
use neap_base::Platform;
use neap_testing::random::{Random, seed};
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;
use std::collections::BTreeSet;

/// Ticks after which nothing of a burst may be left. One looks, one takes from stacks, one from
/// barns and slabs; then pages rest for a tick each in lists and in the zone.
const TICKS: u64 = 6;

fn burst<P: Platform>(mm: &Mm<P>, cpus: usize) {
    let mut program = Program::new(mm);
    for size in [16, 64, 300, 1000, 5000, 30_000, 100_000, 3 << 20] {
        for n in 0..(4 << 20) / size.max(2000) {
            Virtual::run_on(n % cpus);
            assert!(program.allocate(Request { size, align: 1, zeroed: false }));
        }
    }
    while let Some((start, _)) = program.blocks.first_key_value() {
        Virtual::run_on(program.blocks.len() % cpus);
        program.free(*start);
    }
    // Frees of one thread release a large burst themselves. The objects on these stacks are too few
    // for that.
    for cpu in 0..cpus {
        Virtual::run_on(cpu);
        program.allocate(Request { size: 64, align: 1, zeroed: false });
        let start = *program.blocks.first_key_value().unwrap().0;
        program.free(start);
    }
}

fn in_stacks<P: Platform>(mm: &Mm<P>) -> u64 {
    mm.classes().iter().map(|class| class.in_slots).sum()
}

fn flows_back<P: Platform>(machine: &Shared<P>, options: &Options) {
    let mm = Opened::new(machine.clone(), options).unwrap();
    for round in 0..2 {
        burst(&mm, machine.cpus());
        let resident = mm.usage().cached_bytes + mm.usage().free_bytes;
        assert!(in_stacks(&mm) > 0 && resident > 3 << 20, "{resident}");
        let (fences, mut ticks, mut released) = (machine.fences.load(Relaxed), 0, 0);
        let tick = |ticks: &mut u64| -> Tick {
            *ticks += 1;
            mm.tick(round * 1000 + *ticks)
        };
        let first = tick(&mut ticks);
        assert!(first.left && (first.drained == 0 || round > 0), "{first:?}");
        let second = tick(&mut ticks);
        assert_eq!((in_stacks(&mm), second.skipped), (0, 0), "{second:?}");
        assert!(first.drained + second.drained > 0 && (first.drained + second.drained) as usize <= 2 * machine.cpus());
        released += first.pages.released + second.pages.released;
        loop {
            let next = tick(&mut ticks);
            released += next.pages.released;
            assert_eq!(next.drained, 0, "the stacks were empty already");
            if !next.left {
                break;
            }
            assert!(ticks < TICKS, "something is left after {TICKS} ticks: {:?}", mm.usage());
        }
        let fences = machine.fences.load(Relaxed) - fences;
        assert!(fences <= (first.drained + second.drained) as usize, "{fences} fences");
        // Nothing is kept, without an explicit release.
        nothing_is_kept(&mm);
        assert!(
            u64::from(released) * machine.page_size() as u64 >= resident / 2,
            "{released} pages of {resident} bytes"
        );
        println!("{ticks} ticks, {fences} fences, {released} pages released");
    }
}

#[test]
fn after_a_burst_everything_flows_back_on_virtual_machines() {
    for page_size in [4 << 10, 16 << 10, 64 << 10] {
        for cpus in [1, 2, 8] {
            flows_back(&Shared::new(Virtual::new(page_size, cpus).with_scarce_address_space()), &OPTIONS);
        }
    }
}

/// Keeps this thread on the CPU that it is on.
fn stay() {
    // SAFETY: a set of CPUs may be all zeroes, and the calls only read or write it.
    unsafe {
        let mut set: libc::cpu_set_t = core::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu() as usize, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set), 0);
    }
}

#[test]
fn after_a_burst_everything_flows_back_on_the_real_system() {
    // Memory that a tick frees on a CPU that it was moved to rests there until the tick after next.
    stay();
    for rseq in [true, false] {
        let (machine, options) = linux(rseq);
        flows_back(&machine, &options);
    }
}

/// One in twenty objects stays, scattered: then only their own pages are resident, without an
/// explicit release.
fn survivors_keep_their_own_pages<P: Platform>(machine: &Shared<P>, options: &Options) {
    let mm = Opened::new(machine.clone(), options).unwrap();
    let (mut program, mut random, page) = (Program::new(&mm), Random(seed()), machine.page_size());
    for size in [512, 1024, 2048] {
        (0..(6 << 20) / size).for_each(|_| assert!(program.allocate(Request { size, align: 1, zeroed: false })));
    }
    let gone: Vec<usize> = program.blocks.keys().copied().filter(|_| random.below(20) > 0).collect();
    gone.into_iter().for_each(|start| program.free(start));
    let mut ticks = 0;
    while mm.tick(ticks).left {
        ticks += 1;
        assert!(ticks <= TICKS + 2, "{:?}", mm.usage());
    }
    program.verify();
    let pages: BTreeSet<usize> = program.blocks.keys().map(|start| start / page).collect();
    let usage = mm.usage();
    let resident = usage.used_bytes + usage.cached_bytes + usage.free_bytes;
    assert_eq!(resident, (pages.len() * page) as u64, "{usage:?}");
    assert_eq!(usage.unaccounted_bytes, 0, "{usage:?}");
    // Another tick finds nothing, and the next burst uses the holes.
    assert_eq!(mm.tick(1000), Tick::default());
    let mapped = mm.usage().mapped_bytes;
    for size in [512, 1024, 2048] {
        (0..(5 << 20) / size).for_each(|_| assert!(program.allocate(Request { size, align: 1, zeroed: true })));
    }
    assert_eq!(mm.usage().mapped_bytes, mapped);
    program.end();
}

#[test]
fn survivors_keep_their_own_pages_everywhere() {
    for page_size in [4 << 10, 16 << 10, 64 << 10] {
        let machine = Shared::new(Virtual::new(page_size, 2).with_scarce_address_space());
        survivors_keep_their_own_pages(&machine, &OPTIONS);
    }
    for rseq in [true, false] {
        let (machine, options) = linux(rseq);
        survivors_keep_their_own_pages(&machine, &options);
    }
}

#[test]
fn what_is_in_use_between_ticks_stays_cached_and_is_not_fenced() {
    let (machine, options) = linux(true);
    let mm = Opened::new(machine.clone(), &options).unwrap();
    let mut program = Program::new(&mm);
    // The lowest object is freed first or last, in turns.
    let mut work = |n: usize, now: usize| {
        (0..n).for_each(|_| assert!(program.allocate(Request { size: 64, align: 1, zeroed: false })));
        let start = |program: &Program<'_, _>| {
            let mut starts = program.blocks.keys().copied();
            if now.is_multiple_of(2) { starts.next() } else { starts.next_back() }
        };
        (0..n).for_each(|_| program.free(start(&program).unwrap()));
    };
    work(10, 1);
    mm.tick(1);
    let fences = machine.fences.load(Relaxed);
    let mut drained = 0;
    for now in 2..30 {
        // The top of the stack changes, even if its height does not.
        work(now % 5 + 2, now);
        drained += mm.tick(now as u64).drained;
    }
    // The scheduler may have moved the thread to another CPU for good.
    assert!(drained < 14 && machine.fences.load(Relaxed) - fences <= drained as usize, "{drained} drained");
    assert!(in_stacks(&mm) > 0);
    program.end();
}

static TICKED: AtomicUsize = AtomicUsize::new(0);

/// Without a thread, slow calls tick in its place. A free on a drained stack is a slow call.
#[test]
fn ordinary_calls_tick_as_time_passes() {
    let machine = Shared::new(Virtual::new(4096, 2));
    let mut mm =
        Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: Some(|_, _| _ = TICKED.fetch_add(1, Relaxed)) }));
    // SAFETY: the manager stays in its box.
    unsafe { mm.open(machine.clone(), &OPTIONS) }.unwrap();
    burst(&mm, 2);
    let before = (TICKED.load(Relaxed), mm.usage());
    assert!(before.1.cached_bytes > 0);
    // One call more, so that ticks come while a run is in use: then the rest of its two mebibytes
    // can be released. Between two runs all of it is one free block, which is not split for that.
    let kept = mm.allocate(40_000);
    for _ in 0..TICKS {
        machine.advance(u64::from(OPTIONS.interval) * 1_000_000);
        // Every seventh slow call looks at the time.
        (0..200).for_each(|_| {
            let memory = mm.allocate(40_000);
            // SAFETY: just allocated.
            unsafe { mm.free(memory) };
        });
    }
    let after = (TICKED.load(Relaxed), mm.usage());
    assert_eq!(after.0 - before.0, TICKS as usize, "a tick per interval and no more");
    assert_eq!(after.1.cached_bytes, 0);
    assert!(after.1.free_bytes < 1 << 20, "{:?}", after.1);
    // While time stands still there is no tick.
    (0..1000).for_each(|_| {
        let memory = mm.allocate(40_000);
        // SAFETY: just allocated.
        unsafe { mm.free(memory) };
    });
    assert_eq!(TICKED.load(Relaxed), after.0);
    // SAFETY: allocated above; then nothing of the manager is used any more.
    unsafe {
        mm.free(kept);
        mm.close();
    }
}
