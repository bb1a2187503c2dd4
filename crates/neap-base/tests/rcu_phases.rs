//! Tests of RCU with one or two threads, on simulated machines.
#![cfg(not(loom))]

mod deferral;

use core::sync::atomic::Ordering;
use deferral::Deferral;
use neap_base::gate::Inside;
use neap_base::platform::{Errno, Platform};
use neap_os::topology::{CpuSet, nameable};
use neap_testing::virtual_platform::{Call, Virtual};

/// A domain whose deferred objects are numbers, and the freed ones.
struct World {
    deferral: Deferral<u32>,
    graves: std::sync::Mutex<Vec<u32>>,
}

impl core::ops::Deref for World {
    type Target = Deferral<u32>;

    fn deref(&self) -> &Deferral<u32> {
        &self.deferral
    }
}

impl World {
    fn new() -> World {
        World { deferral: Deferral::new(), graves: std::sync::Mutex::default() }
    }

    fn open(machine: &Virtual) -> World {
        let world = World::new();
        world.rcu.open(machine).unwrap();
        world
    }

    fn bury(&self, name: u32) {
        self.graves.lock().unwrap().push(name);
    }

    fn advance(&self, machine: &Virtual) -> Result<bool, Errno> {
        self.deferral.advance(machine, |name| self.bury(name))
    }

    fn wait(&self, machine: &Virtual) -> Result<(), Errno> {
        self.deferral.wait(machine, |name| self.bury(name))
    }

    /// Names of the objects that were freed since the last call.
    fn freed(&self) -> Vec<u32> {
        let mut freed = core::mem::take(&mut *self.graves.lock().unwrap());
        freed.sort();
        freed
    }
}

fn with_sequences() -> Virtual {
    Virtual::new(4096, nameable()).with_sequences()
}

/// A machine without sequences, and one with the real machine's, if it has them.
fn machines() -> Vec<Virtual> {
    let mut machines = Vec::from([Virtual::new(4096, 2)]);
    if !cfg!(miri) {
        machines.push(with_sequences());
    }
    machines
}

#[test]
fn what_a_reader_may_have_seen_is_freed_when_it_has_gone() {
    for machine in machines() {
        let world = World::open(&machine);
        assert_eq!(world.advance(&machine), Ok(false));
        let [outer, inner] = [world.rcu.enter(), world.rcu.enter()];
        [1, 2].into_iter().for_each(|name| world.defer(name));
        drop(outer);
        (0..5).for_each(|_| assert_eq!(world.advance(&machine), Ok(true)));
        assert!(world.freed().is_empty());
        drop(inner);
        assert_eq!((world.advance(&machine), world.freed()), (Ok(false), Vec::from([1, 2])));
    }
}

#[test]
fn rcu_overlapping_readers_do_not_delay_free_forever() {
    for machine in machines() {
        let world = World::open(&machine);
        for round in 0..10 {
            let mut reading = world.rcu.enter();
            world.defer(round);
            let steps = (1..10).find(|_| {
                let next = world.rcu.enter();
                reading = next;
                world.advance(&machine) == Ok(false)
            });
            assert!(steps.is_some_and(|steps| steps <= 3), "round {round}: {steps:?} steps");
            assert_eq!(world.freed(), [round]);
        }
    }
}

#[test]
fn rcu_item_deferred_mid_period_waits_for_later_readers() {
    for machine in machines() {
        let world = World::open(&machine);
        let early = world.rcu.enter();
        world.defer(1);
        assert_eq!(world.advance(&machine), Ok(true));
        let late = world.rcu.enter();
        world.defer(2);
        drop(early);
        let freed: Vec<_> = (0..4).map(|_| (world.advance(&machine), world.freed())).collect();
        assert!(freed.iter().all(|(left, _)| *left == Ok(true)), "{freed:?}");
        assert_eq!(freed.iter().flat_map(|(_, names)| names).collect::<Vec<_>>(), [&1]);
        drop(late);
        (0..2).for_each(|_| _ = world.advance(&machine));
        assert_eq!((world.advance(&machine), world.freed()), (Ok(false), Vec::from([2])));
    }
}

#[test]
fn a_wait_frees_what_was_deferred_before_and_no_more() {
    for machine in machines() {
        let world = World::open(&machine);
        assert_eq!(world.wait(&machine), Ok(()));
        // The current period began too early for the objects deferred from here on.
        let reading = world.rcu.enter();
        world.defer(1);
        assert_eq!(world.advance(&machine), Ok(true));
        world.defer(2);
        drop(reading);
        assert_eq!((world.wait(&machine), world.freed()), (Ok(()), Vec::from([1, 2])));
        // This object comes after the moment that the wait is for.
        let earlier = world.rcu.mark();
        world.wait(&machine).unwrap();
        world.defer(3);
        let passed = Inside::assume(|inside| world.rcu.advance_past(inside, &machine, earlier));
        assert_eq!((passed, world.freed()), (Ok(true), Vec::new()));
        assert_eq!((world.wait(&machine), world.freed()), (Ok(()), Vec::from([3])));
    }
}

#[test]
fn a_grace_period_waits_for_readers_on_other_threads() {
    for machine in machines() {
        let (world, gone) = (World::open(&machine), core::sync::atomic::AtomicBool::new(false));
        let (come, wait) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _reading = world.rcu.enter();
                come.send(()).unwrap();
                std::thread::sleep(core::time::Duration::from_millis(20));
                gone.store(true, Ordering::Relaxed);
            });
            wait.recv().unwrap();
            assert_eq!(world.wait(&machine), Ok(()));
            assert!(gone.load(Ordering::Relaxed));
        });
    }
}

#[test]
#[cfg_attr(miri, ignore = "sequences are assembly")]
fn while_fences_fail_nothing_is_freed() {
    if with_sequences().rseq_offset().is_none() {
        return;
    }
    let machine = with_sequences();
    let world = World::open(&machine);
    machine.fail(Call::Fence, 0, 3);
    world.defer(1);
    let failed: Vec<_> = (0..2).map(|_| world.advance(&machine).is_err()).collect();
    world.defer(2);
    assert_eq!((failed, world.wait(&machine).is_err()), (Vec::from([true, true]), true));
    assert!(world.freed().is_empty());
    // A reader that began before the successful fence is waited for.
    let reading = world.rcu.enter();
    assert_eq!((world.advance(&machine), world.freed()), (Ok(true), Vec::new()));
    drop(reading);
    assert_eq!((world.advance(&machine), world.freed()), (Ok(true), Vec::from([1])));
    assert_eq!((world.advance(&machine), world.freed()), (Ok(false), Vec::from([2])));
    // Three failed fences, and one for each period.
    assert_eq!(machine.made(Call::Fence), 5);
}

#[test]
fn without_sequences_nothing_is_mapped_or_fenced() {
    let machine = Virtual::new(4096, 2);
    let world = World::open(&machine);
    world.defer(1);
    assert_eq!((world.advance(&machine), world.freed()), (Ok(false), Vec::from([1])));
    assert_eq!((machine.mapped_bytes(), machine.made(Call::Fence)), (0, 0));
}

#[test]
#[cfg_attr(miri, ignore = "sequences are assembly")]
fn rcu_open_during_use_succeeds_or_continues_without_sequences() {
    let (machine, world) = (with_sequences(), World::new());
    machine.fail(Call::Map, 0, 1);
    for opened in [machine.rseq_offset().is_none(), true, true] {
        let reading = world.rcu.enter();
        world.defer(1);
        assert_eq!(world.advance(&machine), Ok(true));
        assert_eq!(world.rcu.open(&machine).is_ok(), opened);
        assert_eq!((world.advance(&machine), world.freed()), (Ok(true), Vec::new()));
        drop(reading);
        assert_eq!((world.advance(&machine), world.freed()), (Ok(false), Vec::from([1])));
    }
    // SAFETY: the domain is not used any more.
    unsafe { world.rcu.close(&machine) };
    assert_eq!(machine.mapped_bytes(), 0);
}

/// Pins this thread to a CPU; `false` if that fails.
fn pin(cpu: usize) -> bool {
    // SAFETY: a zeroed set of CPUs is valid, and the calls only read or write it.
    unsafe {
        let mut set: libc::cpu_set_t = core::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set) == 0
    }
}

#[test]
#[cfg_attr(miri, ignore = "sequences are assembly")]
fn readers_on_isolated_cpus_count_where_no_fence_is_needed() {
    if with_sequences().rseq_offset().is_none() {
        return;
    }
    let mut isolated = CpuSet::EMPTY;
    isolated.insert(0);
    let machine = with_sequences().with_isolated(isolated);
    for [comes_in, goes_out] in [[0, 0], [0, 1], [1, 0], [1, 1]] {
        let world = World::open(&machine);
        let moves = || pin(comes_in) && pin(goes_out);
        if !moves() || !pin(comes_in) {
            continue;
        }
        let mapping = world.rcu.mapping(&machine).unwrap();
        // SAFETY: the records stay mapped while `world` lives, and no other thread uses them.
        let records = || unsafe { core::slice::from_raw_parts(mapping.start as *const u8, mapping.length) }.to_vec();
        let before = records();
        let reading = world.rcu.enter();
        assert_eq!(records() == before, comes_in == 0, "counted by the CPU's record unless it is isolated");
        world.defer(1);
        assert_eq!(world.advance(&machine), Ok(true));
        assert!(pin(goes_out));
        let before = records();
        drop(reading);
        assert_eq!(records() == before, goes_out == 0);
        assert_eq!((world.advance(&machine), world.freed()), (Ok(false), Vec::from([1])));
    }
}

#[test]
fn in_a_child_readers_of_other_threads_are_forgotten() {
    for machine in machines() {
        let world = World::open(&machine);
        for _ in 0..3 {
            // Stands for a thread that does not exist in the child. Its last action was to defer an
            // object.
            core::mem::forget(world.rcu.enter());
            world.defer(1);
            let own = world.rcu.enter();
            assert_eq!(world.advance(&machine), Ok(true));
            // SAFETY: no reader of this test uses an object that it found.
            unsafe { world.rcu.forget_others() };
            assert_eq!((world.advance(&machine), world.freed()), (Ok(false), Vec::from([1])));
            // A reader that enters now counts. One from before the fork does not, nor does its
            // leaving.
            let reading = world.rcu.enter();
            drop(own);
            world.defer(2);
            (0..3).for_each(|_| assert_eq!(world.advance(&machine), Ok(true)));
            drop(reading);
            assert_eq!((world.advance(&machine), world.freed()), (Ok(false), Vec::from([2])));
        }
    }
}
