//! Per-CPU data of a manager, and of the process.
//!
//! Goal: a manager without a request for per-CPU data makes none, and does no work for it. Freed
//! data is released, by the maintenance thread or in calls. Copies are near their CPUs. A child
//! that is forked at any moment finds every lock free and every sum right. A caller that may not
//! wait makes no system call for pages.
//!
//! Method: managers on virtual machines with counted calls, and the process's own, in processes
//! with different options.

mod program;

use core::sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed};
use core::time::Duration;
use neap::mm::Mm;
use neap::percpu::{self, Handle, Owner, PerCpu, PerCpuCounter, PerCpuHistogram, PerCpuRef, Refused, Source, Wait};
use neap::process::PROCESS;
use neap_base::Platform;
use neap_percpu::Host;
use neap_testing::again::{self, succeeds};
use neap_testing::child::in_child;
use neap_testing::random::{Random, number, seed};
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::{Call, Virtual};
use program::{OPTIONS, Opened};
use std::time::Instant;

/// Sizes of an owner's data in the scripts: those of a memory group of Linux.
const SIZES: [usize; 5] = [1400, 600, 24, 8, 8];
/// Longest wait: longer means never.
const NEVER: Duration = Duration::from_secs(20);

fn set<P: Platform>(source: &Source<'_, P>) -> (Owner, Vec<Handle>) {
    let owner = source.open_owner().unwrap();
    (owner, SIZES.map(|size| source.allocate(owner, size, 8, Wait::Long).unwrap()).into())
}

fn proves<P: Platform>(mm: &Mm<P>) {
    mm.verify(0).unwrap_or_else(|finding| panic!("in process {}: {finding}", std::process::id()));
}

#[test]
fn unused_percpu_source_maps_no_memory() {
    let machine = Shared::new(Virtual::new(4096, 2));
    let mm = Opened::new(machine.clone(), &OPTIONS).unwrap();
    let (mapped, maps) = (machine.mapped_bytes(), machine.made(Call::Map));
    (0..10).for_each(|now| assert_eq!(mm.tick(now).per_cpu, neap_percpu::Tick::default()));
    assert!(!mm.tick(11).left && mm.per_cpu_if_made().is_none());
    assert!(matches!(mm.per_cpu(Wait::Never), Err(Refused::WouldWait)), "it would have to be made");
    proves(&*mm);
    assert_eq!((machine.mapped_bytes(), machine.made(Call::Map), machine.made(Call::Populate)), (mapped, maps, 0));
    let usage = mm.usage();
    assert_eq!((usage.per_cpu_bytes, usage.per_cpu_free_bytes), (0, 0));
}

#[test]
fn freed_percpu_pages_are_released_by_ticks_and_on_close() {
    let machine = Shared::new(Virtual::new(4096, 4));
    let mm = Opened::new(machine.clone(), &OPTIONS).unwrap();
    let source = mm.per_cpu(Wait::Long).unwrap();
    let held: Vec<_> = (0..1100).map(|_| set(&source)).collect();
    let (full, usage) = (source.statistics(), mm.usage());
    assert_eq!((full.owners, full.allocations), (1100, 5500));
    let bytes = (full.populated * full.page) as u64;
    assert_eq!(usage.per_cpu_bytes + usage.per_cpu_free_bytes, bytes);
    assert!(usage.per_cpu_bytes >= 1100 * 4 * 2040 && usage.used_bytes == 0, "{usage:?}");
    proves(&*mm);
    for (at, (owner, handles)) in held.into_iter().enumerate() {
        if at % 2 == 0 {
            // SAFETY: no thread uses the allocations, and each is freed once.
            handles.into_iter().for_each(|handle| assert!(unsafe { source.free(handle) }.is_ok()));
        }
        // SAFETY: no thread uses the owner's data.
        let bytes = unsafe { source.close_owner(owner) }.unwrap();
        assert_eq!(bytes, if at % 2 == 0 { 0 } else { 2040 * 4 });
    }
    let mut now = 0;
    while mm.tick(now).left {
        now += 1;
        assert!(now < 20, "there is always more to do: {:?}", source.statistics());
    }
    let left = source.statistics();
    assert!(left.populated <= left.reserve && left.owners == 0, "{left:?}");
    proves(&*mm);
    drop(mm);
    assert_eq!(machine.mapped_bytes(), 0);
}

#[test]
fn all_that_is_free_goes_back_at_once_on_demand() {
    let mm = Opened::new(Shared::new(Virtual::new(4096, 2)), &OPTIONS).unwrap();
    let source = mm.per_cpu(Wait::Long).unwrap();
    let handles: Vec<_> = (0..60).map(|_| source.allocate(Owner::NONE, 4000, 8, Wait::Long).unwrap()).collect();
    let full = source.statistics().populated;
    // SAFETY: no thread uses the allocations, and each is freed once. They are fewer than the
    // quarter of a chunk that is released without waiting.
    handles[..15].iter().for_each(|handle| _ = unsafe { source.free(*handle) }.unwrap());
    assert!(mm.release_all(), "{:?}", source.statistics());
    let left = source.statistics();
    assert!(left.populated < full && left.empty <= left.reserve, "{full} pages, then {left:?}");
    assert!(!mm.release_all());
    proves(&*mm);
}

#[test]
fn percpu_source_with_scarce_address_space_reserves_less() {
    let machine = Shared::new(Virtual::new(4096, 2).with_scarce_address_space());
    let mm = Opened::new(machine.clone(), &OPTIONS).unwrap();
    let before = machine.mapped_bytes();
    let source = mm.per_cpu(Wait::Long).unwrap();
    assert!(machine.mapped_bytes() - before < 64 << 20, "{} bytes", machine.mapped_bytes() - before);
    let (owner, _) = set(&source);
    // SAFETY: no thread uses the owner's data.
    assert_eq!(unsafe { source.close_owner(owner) }, Ok(2040 * 2));
    let machine = Shared::new(Virtual::new(4096, 2));
    let mm = Opened::new(machine.clone(), &OPTIONS).unwrap();
    let before = machine.mapped_bytes();
    machine.fail(Call::Reserve, 0, 2);
    set(&mm.per_cpu(Wait::Long).unwrap());
    assert!(machine.mapped_bytes() - before < 1 << 30, "a sixteenth of what is usual");
    // After a refusal a later call makes it.
    let machine = Shared::new(Virtual::new(4096, 2));
    let mm = Opened::new(machine.clone(), &OPTIONS).unwrap();
    machine.fail(Call::Reserve, 0, 100);
    assert!(matches!(mm.per_cpu(Wait::Long), Err(Refused::Memory(_))));
    machine.fail(Call::Reserve, 0, 0);
    set(&mm.per_cpu(Wait::Long).unwrap());
    proves(&*mm);
}

#[test]
fn copies_are_near_their_cpus() {
    let machine = Shared::new(Virtual::new(4096, 4).with_nodes(&[0, 1, 1, 0]));
    let mm = Opened::new(machine.clone(), &OPTIONS).unwrap();
    let source = mm.per_cpu(Wait::Long).unwrap();
    let handle = source.allocate(Owner::NONE, 100, 8, Wait::Long).unwrap();
    let nodes: Vec<_> = (0..4).map(|cpu| machine.bound_to(source.data().address(handle, cpu).addr())).collect();
    assert_eq!(nodes, [Some(0), Some(1), Some(1), Some(0)]);
}

#[test]
fn non_waiting_percpu_allocation_uses_populated_pages_only() {
    let machine = Shared::new(Virtual::new(4096, 2));
    let mm = Opened::new(machine.clone(), &OPTIONS).unwrap();
    let source = mm.per_cpu(Wait::Long).unwrap();
    source.allocate(Owner::NONE, 8, 8, Wait::Long).unwrap();
    let calls = || [Call::Map, Call::Open, Call::Populate, Call::Release].map(|call| machine.made(call));
    let before = calls();
    let mut got = 0;
    while source.allocate(Owner::NONE, 2000, 8, Wait::Never).is_ok() {
        got += 1;
        assert!(got < 1000);
    }
    assert!(got > 0 && calls() == before, "{got} allocations, {before:?} {:?}", calls());
    assert_eq!(source.allocate(Owner::NONE, 2000, 8, Wait::Never), Err(Refused::WouldWait));
    // A tick refills the reserve.
    mm.tick(1);
    assert!(source.allocate(Owner::NONE, 2000, 8, Wait::Never).is_ok());
    proves(&*mm);
}

fn populated() -> usize {
    percpu::statistics().map_or(0, |numbers| numbers.populated)
}

/// Waits until only `before` pages and the reserve are populated.
fn waits_until_back(before: usize) {
    let start = Instant::now();
    loop {
        let numbers = percpu::statistics().unwrap();
        if numbers.populated <= before + numbers.reserve {
            return;
        }
        assert!(start.elapsed() < NEVER, "{before} pages before, and now {numbers:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Owners come and go, and their pages with them. A test of a process of its own: runs only if told
/// to.
#[test]
fn a_process() {
    let Some(case) = again::case() else { return };
    assert!(PROCESS.allocate(100).is_aligned() && PROCESS.per_cpu_if_made().is_none());
    assert_eq!((percpu::cpus(), percpu::statistics()), (0, None));
    let keeps = PerCpuCounter::new(16).unwrap();
    let before = populated();
    for round in 0..number("NEAP_ROUNDS", 3) {
        let source = PROCESS.per_cpu(Wait::Long).unwrap();
        let held: Vec<_> = (0..11_000).map(|_| set(&source).0).collect();
        let full = populated();
        for owner in held {
            keeps.add(1);
            // SAFETY: no thread uses the owner's data.
            unsafe { percpu::close_owner(owner) }.unwrap();
        }
        let left = populated();
        if case == "no thread" {
            assert!(left * 10 < full, "from within calls: {left} of {full}");
            // There is no thread, so this one ticks.
            (0..3).for_each(|tick| _ = PROCESS.tick((round * 3 + tick) << 30));
        }
        waits_until_back(before);
        proves(&PROCESS);
    }
    assert_eq!(keeps.exact(), 11_000 * number("NEAP_ROUNDS", 3) as i64);
}

#[test]
fn pages_go_back_with_and_without_a_thread() {
    for options in ["interval:10", "rseq:off,interval:10", "interval:10,nodes:2"] {
        succeeds("a_process", "thread", &format!("background:on,{options}"));
    }
    succeeds("a_process", "no thread", "background:off,interval:60000");
}

/// Uses every type once, and frees everything.
fn uses_everything() {
    let owner = percpu::open_owner().unwrap();
    let counter = PerCpuCounter::of(owner, 4, Wait::Long).unwrap();
    let histogram = PerCpuHistogram::of(owner, Wait::Long).unwrap();
    let value = PerCpu::of(owner, Wait::Long, |_| 1).unwrap();
    let users = PerCpuRef::of(owner, Wait::Long).unwrap();
    for number in 0..100 {
        counter.add(1);
        histogram.record(number);
        *value.here() += 1;
        users.get();
    }
    assert_eq!((counter.exact(), histogram.count()), (100, 100));
    assert_eq!(value.fold(0, |sum, value| sum + value), 100 + percpu::cpus());
    let mut last = 0;
    assert_eq!(PerCpuRef::kill_all([&users].into_iter(), |_| last += 1), Ok(1));
    assert_eq!((0..100).filter(|_| users.put()).count() + last, 1);
    let handle = percpu::allocate(owner, 3000, 64, Wait::Long).unwrap();
    for cpu in 0..percpu::cpus() {
        // SAFETY: the copy has that many bytes, and is this function's.
        unsafe { percpu::copy(handle, cpu).unwrap().write_bytes(1, 3000) };
    }
    // SAFETY: no thread uses the allocation.
    assert_eq!(unsafe { percpu::free(handle) }, Ok(3000));
    drop((counter, histogram, value, users));
    // SAFETY: no thread uses the owner's data.
    assert_eq!(unsafe { percpu::close_owner(owner) }, Ok(0));
}

/// Shared state of threads that work while other threads fork.
struct Stage {
    stop: AtomicBool,
    /// Added to by one thread, whose part changes all the time, and never more than one ahead of
    /// `added`.
    counter: PerCpuCounter,
    added: AtomicI64,
}

fn child(stage: &Stage, forked_at: i64) {
    proves(&PROCESS);
    // Added before the fork, and perhaps more before the child read it.
    let exact = stage.counter.exact();
    assert!((forked_at..=stage.added.load(Relaxed) + 1).contains(&exact), "{exact}, {forked_at}");
    stage.counter.add(1000);
    assert_eq!(stage.counter.exact(), exact + 1000);
    uses_everything();
    PROCESS.tick(u64::MAX / 2);
    proves(&PROCESS);
}

fn forks_a_child(stage: &Stage) {
    let forked_at = stage.added.load(Relaxed);
    in_child(|| child(stage, forked_at));
}

fn counts(stage: &Stage) {
    while !stage.stop.load(Relaxed) {
        stage.counter.add(1);
        stage.added.fetch_add(1, Relaxed);
    }
}

/// Owners of all sizes, a few hundred at a time, so that chunks come and go.
fn comes_and_goes(stage: &Stage, seed: u64) {
    let mut random = Random(seed);
    let mut held = Vec::new();
    while !stage.stop.load(Relaxed) {
        let owner = percpu::open_owner().unwrap();
        for _ in 0..random.below(6) {
            let wait = if random.below(4) == 0 { Wait::Never } else { Wait::Long };
            let size = 1 + random.below(4000);
            match percpu::allocate(owner, size, 8, wait) {
                Ok(_) | Err(Refused::WouldWait) => {}
                Err(refused) => panic!("{refused}"),
            }
        }
        held.push(owner);
        while held.len() > random.below(400) {
            // SAFETY: no thread uses the owner's data.
            unsafe { percpu::close_owner(held.swap_remove(random.below(held.len()))) }.unwrap();
        }
    }
    // SAFETY: no thread uses the data of the owners.
    held.into_iter().for_each(|owner| _ = unsafe { percpu::close_owner(owner) }.unwrap());
}

/// A test of a process of its own: runs only if told to.
#[test]
fn forks() {
    if again::case().is_none() {
        return;
    }
    let counter = PerCpuCounter::new(1).unwrap();
    let stage = Stage { stop: AtomicBool::new(false), counter, added: AtomicI64::new(0) };
    let (forks, seed, stage) = (number("NEAP_FORKS", 100), seed(), &stage);
    std::thread::scope(|scope| {
        scope.spawn(|| counts(stage));
        scope.spawn(|| {
            while !stage.stop.load(Relaxed) {
                assert!(stage.counter.exact() >= 0);
                uses_everything();
            }
        });
        scope.spawn(|| comes_and_goes(stage, seed));
        let forkers = [(); 2].map(|()| scope.spawn(|| (0..forks / 2).for_each(|_| forks_a_child(stage))));
        let ends = forkers.map(|forker| forker.join());
        stage.stop.store(true, Relaxed);
        assert!(ends.iter().all(Result::is_ok));
    });
    assert_eq!(stage.counter.exact(), stage.added.load(Relaxed));
    proves(&PROCESS);
}

#[test]
fn a_child_of_a_busy_process_is_whole() {
    let modes = ["interval:10", "rseq:off,interval:10", "isolated:1,interval:10", "background:off,interval:10"];
    modes.iter().for_each(|options| succeeds("forks", "forks", options));
}
