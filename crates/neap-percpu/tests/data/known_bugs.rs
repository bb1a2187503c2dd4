//! Bugs that the kernel's per-CPU allocator had or could have, each with a test that detects it.
//!
//! A test's name begins with the bug's id. P13, hints that forget a hole, is tested beside the map
//! (`src/alloc_bitmap.rs`). Two bugs cannot occur here. P7, an unlocked read of the reserve: all
//! counters are in the mutex under which every decision is made. The other half of P2, a missing
//! flush of translations: the system call flushes them.

use crate::machine::{Held, end, give, open, populated_ranges, settle, shape, take, verify};
use core::num::NonZeroU64;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use core::time::Duration;
use neap_base::platform::memory;
use neap_base::{Linux, Platform};
use neap_percpu::{Charge, Handle, Invalid, LARGEST, Layout, Owner, PerCpuData, Refused, Shape, Wait};
use neap_testing::probe::Probe;
use neap_testing::virtual_platform::{Call, Virtual};
use std::sync::Mutex;
use std::sync::mpsc::RecvTimeoutError;

const LAYOUTS: [Layout; 2] = [Layout::Rows, Layout::CpuMajor];

/// An instance with `count` allocations, each of its own owner.
fn filled<P: Platform>(platform: &P, shape: &Shape, count: usize, size: usize) -> (PerCpuData, Vec<Held>) {
    let data = open(platform, shape);
    let make = |stamp: usize| {
        let owner = data.open_owner(platform).unwrap();
        take(&data, platform, owner, (size, 8), Wait::Long, stamp as u64).unwrap()
    };
    let held = (0..count).map(make).collect();
    settle(&data, platform);
    (data, held)
}

/// The bug: a chunk was emptied except for a few allocations, and sidelined. When these were freed
/// as well, the worker did not examine it again.
#[test]
fn p1_a_sidelined_chunk_that_becomes_wholly_free_is_destroyed() {
    for layout in LAYOUTS {
        // The units of the machine that had the bug: ten pages of 64 KiB.
        let shape = Shape { unit: 10 * 65536, ..shape(layout, 4, 65536) };
        let machine = Virtual::new(4096, 4);
        let (data, held) = filled(&machine, &shape, 200, 32 << 10);
        let full = data.statistics();
        let (stay, go): (Vec<_>, Vec<_>) = held.into_iter().enumerate().partition(|(at, _)| at % 20 == 0);
        go.into_iter().for_each(|(_, held)| give(&data, held));
        settle(&data, &machine);
        let few = data.statistics();
        assert!(full.chunks >= 10 && few.sidelined_chunks >= full.chunks - 2, "{few:?}");
        end(&data, &machine, stay.into_iter().map(|(_, held)| held).collect());
    }
}

/// The bug: depopulated pages could be reached through a stale translation, and new pages had old
/// contents.
#[test]
fn p2_depopulated_pages_read_as_zeroes_through_every_copy() {
    for layout in LAYOUTS {
        let linux = Linux::probe();
        let (data, mut held) = filled(&linux, &shape(layout, 3, 4096), 400, 1000);
        let kept = held.split_off(390);
        let copies = |held: &Held| (0..3).map(|cpu| data.address(held.handle, cpu)).collect::<Vec<_>>();
        let old: Vec<*mut u8> = held.iter().flat_map(copies).collect();
        held.into_iter().for_each(|held| give(&data, held));
        settle(&data, &linux);
        let mut populated = Vec::new();
        populated_ranges(&data, |start, length| populated.push(start..start + length));
        let gone = |address: &&*mut u8| !populated.iter().any(|range| range.contains(&address.addr()));
        let gone: Vec<_> = old.iter().filter(gone).collect();
        assert!(gone.len() > 900);
        // SAFETY: the addresses stay mapped as long as the instance is open.
        assert!(gone.iter().all(|address| unsafe { address.read() } == 0));
        // New allocations in the freed places; `take` checks that they are zeroes.
        let make = |stamp| take(&data, &linux, Owner::NONE, (1000, 8), Wait::Long, stamp).unwrap();
        let new: Vec<Held> = (0..400).map(make).collect();
        new.iter().chain(&kept).for_each(|held| held.check(&data));
        end(&data, &linux, new.into_iter().chain(kept).collect());
    }
}

/// The bug: a back end that cannot depopulate was asked to, and failed.
#[test]
fn p3_failing_release_is_not_retried_on_every_tick() {
    let machine = Virtual::new(4096, 2);
    let (data, held) = filled(&machine, &shape(Layout::Rows, 2, 4096), 300, 1024);
    machine.fail(Call::Release, 0, usize::MAX);
    machine.fail(Call::ReleaseScattered, 0, usize::MAX);
    held.into_iter().for_each(|held| give(&data, held));
    let asked = || machine.made(Call::Release) + machine.made(Call::ReleaseScattered);
    let before = asked();
    for _ in 0..1000 {
        assert_eq!(data.tick(&machine).released, 0);
        verify(&data);
    }
    assert!(asked() - before < 100, "asked {} times in 1000 ticks", asked() - before);
    // Meanwhile all of the memory can be allocated without waiting.
    let all: Vec<Held> =
        (0..200).map(|stamp| take(&data, &machine, Owner::NONE, (1024, 8), Wait::Never, stamp).unwrap()).collect();
    machine.fail(Call::Release, 0, 0);
    machine.fail(Call::ReleaseScattered, 0, 0);
    end(&data, &machine, all);
}

/// The bug: callers that may wait but not recurse were treated as if they could not wait, and
/// failed.
#[test]
fn p4_allocation_that_may_wait_succeeds_with_nothing_populated() {
    for (layout, wait) in LAYOUTS.iter().flat_map(|layout| [(layout, Wait::Long), (layout, Wait::Until(0))]) {
        let machine = Virtual::new(4096, 2);
        let data = open(&machine, &shape(*layout, 2, 4096));
        let refused = take(&data, &machine, Owner::NONE, (8, 8), Wait::Never, 0).err();
        assert_eq!(refused, Some(Refused::WouldWait));
        assert!(data.is_work_wanted());
        let held = take(&data, &machine, Owner::NONE, (LARGEST, 8), wait, 1).unwrap();
        end(&data, &machine, vec![held]);
    }
}

/// A charge that allocates from the instance that it charges for.
struct Recursive {
    data: Mutex<Option<&'static PerCpuData<&'static Recursive>>>,
    machine: Virtual,
    inside: AtomicBool,
    charged: AtomicUsize,
}

impl Recursive {
    /// Allocates without an owner, and frees the allocation.
    fn allocate_and_free(&self) {
        let data = *self.data.lock().unwrap();
        if let Some(data) = data.filter(|_| !self.inside.swap(true, Relaxed)) {
            for wait in [Wait::Never, Wait::Long] {
                let got = data.allocate(&self.machine, Owner::NONE, 5000, 8, wait);
                // SAFETY: no code uses it any more.
                got.into_iter().for_each(|handle| assert!(unsafe { data.free(handle) }.is_ok()));
            }
            self.inside.store(false, Relaxed);
        }
    }
}

impl Charge for &'static Recursive {
    fn charge(&self, _owner: Owner, bytes: usize) -> bool {
        self.charged.fetch_add(bytes, Relaxed);
        self.allocate_and_free();
        bytes < 1 << 20
    }

    fn uncharge(&self, _owner: Owner, bytes: usize) {
        self.charged.fetch_sub(bytes, Relaxed);
        self.allocate_and_free();
    }
}

/// Runs `body`, which deadlocks if locks are wrong; then this fails after a minute.
fn ends(body: impl FnOnce() + Send + 'static) {
    let (over, heard) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        over.send(()).unwrap();
    });
    match heard.recv_timeout(Duration::from_secs(60)) {
        Err(RecvTimeoutError::Timeout) => panic!("it waits for itself"),
        _ => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
    }
}

/// The bug: the worker held the mutex during reclaim, whose callback allocated per-CPU data.
#[test]
fn p5_charge_callback_may_allocate_percpu_data() {
    ends(charge_and_allocate);
}

fn charge_and_allocate() {
    let pays: &Recursive = Box::leak(Box::new(Recursive {
        data: Mutex::new(None),
        machine: Virtual::new(4096, 2),
        inside: AtomicBool::new(false),
        charged: AtomicUsize::new(0),
    }));
    let data = PerCpuData::open(&pays.machine, &shape(Layout::Rows, 2, 4096), |_| 0, pays).unwrap();
    let data: &'static PerCpuData<&Recursive> = Box::leak(Box::new(data));
    *pays.data.lock().unwrap() = Some(data);
    let owner = data.open_owner(&pays.machine).unwrap();
    let handles: Vec<Handle> =
        (0..100).map(|_| data.allocate(&pays.machine, owner, 100, 8, Wait::Long).unwrap()).collect();
    assert_eq!(pays.charged.load(Relaxed), 100 * 104 * 2);
    // SAFETY: no code uses them any more.
    handles.into_iter().skip(50).for_each(|handle| assert_eq!(unsafe { data.free(handle) }, Ok(104)));
    assert_eq!(pays.charged.load(Relaxed), 50 * 104 * 2);
    // SAFETY: no code uses them any more.
    assert_eq!(unsafe { data.close_owner(owner) }, Ok(50 * 104 * 2));
    assert_eq!(pays.charged.load(Relaxed), 0);
    assert!(!data.tick(&pays.machine).held);
    data.verify().unwrap();
}

/// An instance and its machine, which has hooks.
fn hooked(shape: &Shape, machine: Virtual) -> (&'static PerCpuData, &'static Probe) {
    let probe: &'static Probe = Box::leak(Box::new(Probe::new(machine)));
    (Box::leak(Box::new(open(probe, shape))), probe)
}

/// The bug: a thread that waited for the worker waited without limit, even while it was being
/// killed.
#[test]
fn p6_waiting_for_the_worker_ends_at_the_deadline() {
    ends(wait_to_a_deadline);
}

fn wait_to_a_deadline() {
    let (data, probe) = hooked(&shape(Layout::Rows, 2, 4096), Virtual::new(4096, 2));
    let seen: &'static AtomicUsize = Box::leak(Box::default());
    // While pages are populated for one caller, the thread plays another caller, with a deadline.
    let once: &'static AtomicBool = Box::leak(Box::default());
    *probe.on_pause.lock().unwrap() = Some(Box::new(|| {
        assert!(probe.pauses.load(Relaxed) < 1000, "it waits for ever");
        probe.machine.advance(100);
    }));
    *probe.on_populate.lock().unwrap() = Some(Box::new(move || {
        if !once.swap(true, Relaxed) {
            let until = Wait::Until(probe.now() + 1000);
            let answer = data.allocate(probe, Owner::NONE, 30_000, 8, until);
            assert_eq!(answer, Err(Refused::WouldWait));
            assert_eq!(data.allocate(probe, Owner::NONE, 30_000, 8, Wait::Never), Err(Refused::WouldWait));
            seen.fetch_add(1, Relaxed);
        }
    }));
    let held = take(data, probe, Owner::NONE, (8, 8), Wait::Long, 1).unwrap();
    assert_eq!((seen.load(Relaxed), probe.pauses.load(Relaxed)), (1, 10));
    *probe.on_populate.lock().unwrap() = None;
    end(data, probe, vec![held]);
}

/// The bug: all empty pages were in chunks that allocations do not use.
#[test]
fn p8_no_wait_allocation_succeeds_throughout_depopulation() {
    for layout in LAYOUTS {
        let machine = Virtual::new(4096, 2);
        let (data, held) = filled(&machine, &shape(layout, 2, 4096), 500, 1000);
        let mut isolated = 0;
        for (at, held) in held.into_iter().enumerate() {
            give(&data, held);
            // Before and after the worker runs.
            for _ in 0..2 {
                let small = take(&data, &machine, Owner::NONE, (900, 8), Wait::Never, at as u64);
                give(&data, small.unwrap_or_else(|refused| panic!("after {at}: {refused}")));
                isolated += data.statistics().depopulating_chunks;
                if at % 50 == 0 {
                    data.tick(&machine);
                }
            }
            verify(&data);
        }
        assert!(isolated > 0, "no chunk was ever isolated");
        // The final reserve's pages were populated all the time.
        let populated = machine.made(Call::Populate);
        settle(&data, &machine);
        assert_eq!(machine.made(Call::Populate), populated);
        end(&data, &machine, Vec::new());
    }
}

/// The bug: if populating failed, the place stayed taken, or the worker tried for ever.
#[test]
fn p9_a_failure_at_any_call_leaves_nothing_behind() {
    ends(fail_at_every_call);
}

fn fail_at_every_call() {
    for (layout, call) in LAYOUTS.iter().flat_map(|layout| {
        [Call::Open, Call::Populate, Call::Release, Call::ReleaseScattered].map(|call| (*layout, call))
    }) {
        let program = |machine: &Virtual, what: &str, refused_from: usize| {
            let data = open(machine, &shape(layout, 2, 4096));
            let mut held = Vec::new();
            for stamp in 0..60 {
                let owner = data.open_owner(machine).unwrap();
                let size = [40, 700, 9000, LARGEST][stamp as usize % 4];
                let allocations = data.statistics().allocations;
                match take(&data, machine, owner, (size, 8), Wait::Long, stamp) {
                    Ok(new) => held.push(new),
                    Err(Refused::Memory(_)) => assert_eq!(data.statistics().allocations, allocations, "{what}"),
                    Err(refused) => panic!("{what}: {refused}"),
                }
                if stamp % 3 == 2 {
                    held.drain(..held.len() / 2).for_each(|held| give(&data, held));
                    let before = machine.made(Call::Populate);
                    data.tick(machine);
                    let most = if before >= refused_from { 1 } else { 16 };
                    assert!(machine.made(Call::Populate) - before <= most, "{what}: a tick goes on after a failure");
                }
                data.verify().unwrap_or_else(|finding| panic!("{what}: {finding}"));
            }
            machine.fail(call, 0, 0);
            end(&data, machine, held);
        };
        let calls = {
            let machine = Virtual::new(4096, 2);
            program(&machine, "no fault", usize::MAX);
            machine.made(call)
        };
        let machine = Virtual::new(4096, 2);
        let unused = open(&machine, &shape(layout, 2, 4096));
        let first = machine.made(call);
        // SAFETY: no code uses it any more.
        unsafe { unused.close(&machine) };
        // If scattered releases work, single ones are rarely made.
        assert!(calls > first || (layout, call) == (Layout::CpuMajor, Call::Release), "{layout:?} makes no {call:?}");
        for (position, failures) in (first..calls).flat_map(|position| [(position, 1), (position, usize::MAX)]) {
            let machine = Virtual::new(4096, 2);
            machine.fail(call, position, failures);
            let for_good = call == Call::Populate && failures == usize::MAX;
            let what = format!("{layout:?}: {call:?} fails {failures} times after {position}");
            program(&machine, &what, if for_good { position } else { usize::MAX });
        }
    }
}

/// The bug: a second free, or a free of an inner pointer, freed another owner's memory.
#[test]
fn p10_what_is_no_allocation_is_not_freed() {
    for layout in LAYOUTS {
        let machine = Virtual::new(4096, 2);
        let data = open(&machine, &shape(layout, 2, 4096));
        let other = open(&machine, &shape(layout, 2, 4096));
        let owner = data.open_owner(&machine).unwrap();
        let [a, b, c] = [64, 48, 8].map(|size| take(&data, &machine, owner, (size, 8), Wait::Long, 3).unwrap());
        let moved =
            |held: &Held, by: u64| Handle::from_bits(NonZeroU64::new(held.handle.to_bits().get() + by).unwrap());
        let (first, second) = (b.handle, moved(&a, 8));
        // SAFETY: as the results prove, no allocation is freed that is in use.
        unsafe {
            for by in [1, 8, 56] {
                assert_eq!(data.free(moved(&a, by)), Err(Invalid::NotAllocated), "{by} bytes inside");
            }
            if layout == Layout::Rows {
                assert_eq!(data.free(moved(&a, 64)), Err(Invalid::NotAllocated), "another CPU's copy");
            }
            assert_eq!(data.free(moved(&a, 1 << 20)), Err(Invalid::Foreign));
            assert_eq!(data.free(moved(&a, 5 << 48)), Err(Invalid::NotAllocated), "of another class");
            assert_eq!(other.free(a.handle), Err(Invalid::Foreign));
            give(&data, b);
            assert_eq!(data.free(first), Err(Invalid::NotAllocated), "twice");
            assert_eq!(data.free(second), Err(Invalid::NotAllocated));
        }
        // No allocation is left at the handle's place; the row there belongs to another owner.
        let of_another =
            |size| take(&data, &machine, data.open_owner(&machine).unwrap(), (size, 8), Wait::Long, 4).unwrap();
        let (gone, between) = (of_another(2048), of_another(64));
        let handle = gone.handle;
        give(&data, gone);
        let behind = of_another(4096);
        // SAFETY: no code uses it any more.
        assert_eq!(unsafe { data.free(handle) }, Err(Invalid::NotAllocated), "in no row");
        end(&data, &machine, vec![a, c, between, behind]);
        // SAFETY: no code uses it any more.
        unsafe { other.close(&machine) };
    }
}

/// The bug: a page that became empty in the chunk that the worker was releasing stayed.
#[test]
fn p11_what_is_freed_while_pages_go_goes_as_well() {
    for layout in LAYOUTS {
        for stays in [0, 1, 3] {
            let (data, probe) = hooked(&shape(layout, 2, 4096), Virtual::new(4096, 2));
            let make = |stamp| {
                let owner = data.open_owner(probe).unwrap();
                take(data, probe, owner, (2048, 8), Wait::Long, stamp).unwrap()
            };
            let mut held: Vec<Held> = (0..100).map(make).collect();
            settle(data, probe);
            // Allocations at the ends of chunks are freed after the worker has passed them, earlier
            // ones before.
            let kept = held.split_off(100 - stays);
            let late: Vec<Held> = held.extract_if(.., |held| held.handle.to_bits().get() / 2048 % 5 == 3).collect();
            assert!(late.len() >= 10);
            let late: &'static Mutex<Vec<Held>> = Box::leak(Box::new(Mutex::new(late)));
            held.into_iter().for_each(|held| give(data, held));
            *probe.on_release.lock().unwrap() =
                Some(Box::new(move || late.lock().unwrap().pop().into_iter().for_each(|held| give(data, held))));
            while !late.lock().unwrap().is_empty() {
                let before = late.lock().unwrap().len();
                settle(data, probe);
                if late.lock().unwrap().len() == before {
                    // No release ran, so the hook frees nothing; free here instead.
                    late.lock().unwrap().pop().into_iter().for_each(|held| give(data, held));
                }
            }
            *probe.on_release.lock().unwrap() = None;
            settle(data, probe);
            let left = data.statistics();
            assert_eq!((left.empty, left.isolated_empty), (left.reserve, 0), "{stays} stay");
            end(data, probe, kept);
        }
    }
}

/// The bug: a quarter of three pages is 0, so a chunk was emptied of nothing, again and again.
#[test]
fn p12_a_chunk_of_few_pages_is_not_emptied_of_none() {
    let machine = Virtual::new(4096, 1);
    let shape = Shape { unit: 65536, ..shape(Layout::Rows, 1, 65536) };
    let (data, held) = filled(&machine, &shape, 640, 1024);
    let mut held = held.into_iter();
    // One chunk is freed, which is one page more than the reserve needs.
    held.by_ref().take(64).for_each(|held| give(&data, held));
    assert!(data.statistics().empty > data.statistics().reserve);
    // One of 64 allocations in each other chunk is freed.
    let (mut stay, mut go) = (Vec::new(), Vec::new());
    for (at, held) in held.by_ref().enumerate() {
        if at % 64 == 5 { go.push(held) } else { stay.push(held) }
    }
    for held in go {
        give(&data, held);
        let now = data.statistics();
        assert_eq!((now.depopulating_chunks, now.sidelined_chunks), (0, 0));
        verify(&data);
    }
    // The reserve is four pages, in as many chunks.
    stay.into_iter().for_each(|held| give(&data, held));
    settle(&data, &machine);
    assert_eq!((data.statistics().populated, data.statistics().chunks), (4, 4));
    // SAFETY: no code uses it any more.
    unsafe { data.close(&machine) };
}

/// A release flushes translations on every CPU that runs the process.
#[test]
fn while_an_isolated_cpu_runs_the_process_nothing_goes() {
    let machine = Virtual::new(4096, 2);
    let (data, held) = filled(&machine, &shape(Layout::Rows, 2, 4096), 100, 2000);
    machine.use_isolated_cpu(true);
    let calls = machine.made(Call::Release) + machine.made(Call::ReleaseScattered);
    held.into_iter().for_each(|held| give(&data, held));
    for _ in 0..4 {
        let tick = data.tick(&machine);
        assert!(tick.held && tick.released == 0);
    }
    assert_eq!(machine.made(Call::Release) + machine.made(Call::ReleaseScattered), calls);
    verify(&data);
    machine.use_isolated_cpu(false);
    end(&data, &machine, Vec::new());
}

/// The bug: freed memory waited to be emptied, where no allocation finds it. Each cycle of
/// allocations took new chunks, until the address space was full. Only a request releases memory
/// meanwhile.
#[test]
fn while_nothing_goes_what_is_free_is_used_again() {
    for (isolated, ticks) in [(true, true), (true, false), (false, true)] {
        let machine = Virtual::new(4096, 2);
        let data = open(&machine, &shape(Layout::Rows, 2, 4096));
        let refuse = |failures| [Call::Release, Call::ReleaseScattered].map(|call| machine.fail(call, 0, failures));
        machine.use_isolated_cpu(isolated);
        refuse(if isolated { 0 } else { usize::MAX });
        let cycle = |seed: u64| {
            let make = |stamp| take(&data, &machine, Owner::NONE, (2000, 8), Wait::Long, seed + stamp).unwrap();
            let held: Vec<Held> = (0..100).map(make).collect();
            held.into_iter().for_each(|held| give(&data, held));
            if ticks {
                data.tick(&machine);
            }
            verify(&data);
            data.statistics()
        };
        let first = cycle(0);
        let last = (1..300).fold(first, |_, seed| cycle(1000 * seed));
        assert!(first.chunks >= 3 && last.chunks <= first.chunks + 1, "{first:?}, {last:?}");
        assert!(last.populated <= first.populated + 64, "{first:?}, {last:?}");
        if isolated {
            let asked = data.release_all(&machine, &|| false);
            assert!(!asked.held && asked.released > 0 && data.statistics().chunks <= 1);
            verify(&data);
            machine.use_isolated_cpu(false);
        }
        refuse(0);
        end(&data, &machine, Vec::new());
    }
}

/// Each copy is on its CPU's node, if nodes differ in size, and if one has no CPUs.
#[test]
fn copies_are_on_their_nodes() {
    let nodes = [0, 0, 2, 0, 2];
    for layout in LAYOUTS {
        let machine = Virtual::new(4096, 5).with_nodes(&nodes);
        let shape = shape(layout, 5, 4096);
        let data = PerCpuData::open(&machine, &shape, |cpu| nodes[cpu], ()).unwrap();
        let make = |stamp| take(&data, &machine, Owner::NONE, (1 + 97 * stamp as usize, 8), Wait::Long, stamp).unwrap();
        let held: Vec<Held> = (0..100).map(make).collect();
        for held in &held {
            for (cpu, node) in nodes.iter().enumerate() {
                assert_eq!(machine.bound_to(data.address(held.handle, cpu).addr()), Some(*node));
            }
        }
        let groups = if layout == Layout::Rows { 2 } else { 5 };
        assert!(data.statistics().populated.is_multiple_of(groups));
        held.iter().for_each(|held| held.check(&data));
        end(&data, &machine, held);
    }
}

/// The shape has more CPUs than the machine.
#[test]
fn cpus_that_do_not_exist_yet_have_copies() {
    let linux = Linux::probe();
    let cpus = linux.cpus() + 3;
    let data = open(&linux, &shape(Layout::Rows, cpus, 0));
    assert_eq!((data.cpus(), data.statistics().page), (cpus, memory::page_size()));
    let held = take(&data, &linux, Owner::NONE, (100, 64), Wait::Long, 1).unwrap();
    end(&data, &linux, vec![held]);
}

#[test]
fn requests_and_owners_that_make_no_sense_are_refused() {
    let machine = Virtual::new(4096, 2);
    let data = open(&machine, &Shape { span: 64 << 10, ..shape(Layout::Rows, 2, 4096) });
    for (size, align) in [(0, 8), (LARGEST + 1, 8), (8, 0), (8, 3), (8, 8192)] {
        assert_eq!(data.allocate(&machine, Owner::NONE, size, align, Wait::Long), Err(Refused::BadRequest));
    }
    let owner = data.open_owner(&machine).unwrap();
    // SAFETY: the owner has no allocations.
    unsafe {
        assert_eq!(data.close_owner(owner), Ok(0));
        assert_eq!(data.close_owner(owner), Err(Refused::UnknownOwner));
        assert_eq!(data.close_owner(Owner::NONE), Err(Refused::BadRequest));
    }
    assert_ne!(data.open_owner(&machine), Ok(owner), "an old owner's number");
    assert_eq!(data.allocate(&machine, owner, 8, 8, Wait::Long), Err(Refused::UnknownOwner));
    let all: Vec<Held> =
        (0..2).map(|stamp| take(&data, &machine, Owner::NONE, (LARGEST, 8), Wait::Long, stamp).unwrap()).collect();
    assert_eq!(data.allocate(&machine, Owner::NONE, 8, 8, Wait::Long), Err(Refused::Full));
    end(&data, &machine, all);
}
