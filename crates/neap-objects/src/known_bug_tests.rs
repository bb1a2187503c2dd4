//! Known bugs of earlier object caches, each with a test that reproduces its conditions.
//!
//! A test's name begins with the bug's id. Bugs of pages are in `neap-pages`. Bugs that need a
//! whole manager or real threads (A3, A6, B6, P3, and B11 as a program meets it) are in `neap`'s
//! tests. The tests access the locks. To interrupt a taker, a test acts in the function `wanted`,
//! which chooses classes. The taker calls it while it holds the CPU's lock, or has the closed
//! region in the table.

use crate::class_cache::ObjectIndex;
use crate::cpu_caches::CacheMode;
use crate::instance::{CONFIG, Opened, machine, rseq};
use crate::objects::Config;
use crate::sheaf::Sheaf;
use crate::size_class::{CLASSES, Class};
use crate::slab::{SlabId, SlabList};
use core::cell::RefCell;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use neap_base::gate::Inside;
use neap_base::{Linux, Platform};
use neap_pages::{Effort, State};
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;
use std::collections::VecDeque;
use std::vec::Vec;

const CLASS: Class = Class(30);

/// Allocates and frees on the calling CPU, in two classes.
fn churn<P: Platform>(o: &Opened<P>) {
    for class in [CLASS, Class(5)] {
        let held = o.take_many(class, 3 * class.sheaf_capacity() as usize);
        held.into_iter().for_each(|object| o.give(class, object));
    }
}

/// D1: An interrupt inside a drain allocated and freed through the stacks that were being drained.
fn drains_that_are_interrupted<P: Platform>(o: &Opened<P>) {
    for round in 0..3 {
        churn(o);
        let interrupted = RefCell::new(0);
        let drained = o
            .drain_cpu(o.platform.cpu(), |class| {
                if class == CLASS {
                    // This code runs on the taker's own thread, like a signal handler. It must
                    // neither deadlock nor access the stacks.
                    churn(o);
                    *interrupted.borrow_mut() += 1;
                }
                class.0 % 3 == round || class == CLASS
            })
            .is_some();
        assert!(drained && *interrupted.borrow() > 0);
        o.prove();
    }
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

#[test]
fn d1_signal_handler_in_own_cpu_drain_bypasses_the_stacks() {
    let o = Opened::new(machine(2), &CONFIG).unwrap();
    let before = o.busy();
    drains_that_are_interrupted(&o);
    assert!(o.busy() - before > 100, "the lock was held, so every call went around it");
}

#[test]
fn d1_signal_handler_in_fence_drain_is_refused_without_loss() {
    let Some(o) = rseq() else { return };
    drains_that_are_interrupted(&o);
    // Interrupts the drain also right before the fence, when sequences that began earlier can still
    // commit.
    let interrupter = o.platform.clone();
    let (shared, hits) = (core::ptr::from_ref(&o).expose_provenance(), interrupter.pauses.load(Relaxed));
    *interrupter.on_fence.lock().unwrap() = Some(std::boxed::Box::new(move || {
        // SAFETY: the instance outlives the hook, which is removed below.
        churn(unsafe { &*core::ptr::with_exposed_provenance::<Opened<Shared<Linux>>>(shared) });
    }));
    for _ in 0..3 {
        churn(&o);
        o.drain();
    }
    *interrupter.on_fence.lock().unwrap() = None;
    assert_eq!(interrupter.pauses.load(Relaxed), hits, "no thread waits");
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

/// D2: A thread that unlocked in the middle went on with the lists of its previous CPU.
#[test]
fn d2_thread_migrating_at_every_step_uses_the_right_stacks() {
    for wander in [1, 2, 3] {
        let platform = machine(5);
        platform.wander.store(wander, Relaxed);
        let o = Opened::new(platform, &CONFIG).unwrap();
        let mut held = VecDeque::new();
        for round in 0..4000_usize {
            held.push_back(o.take(CLASS).unwrap());
            if round % 3 == 2 || round % 1000 > 700 {
                o.give(CLASS, held.swap_remove_back(round % held.len()).unwrap());
            }
            if round % 100 == 0 {
                assert_eq!(o.prove().allocated as usize, held.len());
            }
        }
        assert!((0..5).filter(|cpu| o.stacked(*cpu, CLASS) > 0).count() > 1);
        held.into_iter().for_each(|object| o.give(CLASS, object));
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}

/// D4: A count differed from the number of objects in its lists, so a bulk free did not end.
#[test]
fn d4_counts_match_stacks_sheaves_and_slabs_at_every_step() {
    for class in [Class(1), Class(40), Class(71)] {
        let o = Opened::new(machine(2), &CONFIG).unwrap();
        let mut held = VecDeque::new();
        for round in 0..1500_usize {
            Virtual::run_on(round / 7 % 2);
            match round % 11 {
                0..6 => held.extend(o.take_many(class, 1 + round % 5)),
                6 if round % 5 == 0 => assert!(o.drain_cpu(round % 2, |_| true).is_some()),
                7 if round % 3 == 0 => {
                    _ = o.trim_barn(class, if round % 2 == 0 { Effort::Full } else { Effort::Sparing }, &|| false)
                }
                _ if !held.is_empty() => o.give(class, held.swap_remove_front(round * 31 % held.len()).unwrap()),
                _ => {}
            }
            assert_eq!(o.prove().allocated as usize, held.len());
        }
    }
}

/// D10: A drain waited for an owner that was preempted.
#[test]
fn d10_an_owner_that_does_not_run_is_skipped_and_counted() {
    let o = Opened::new(machine(2), &CONFIG).unwrap();
    for cpu in [0, 1] {
        Virtual::run_on(cpu);
        churn(&o);
    }
    let owner = o.cpu_caches.lock(1).try_lock().unwrap();
    assert!(o.drain_cpu(0, |_| true).is_some() && o.drain_cpu(1, |_| true).is_none());
    assert_eq!(o.cpu_caches.counters().skipped, 1);
    drop(owner);
    assert_eq!((o.stacked(0, CLASS), o.stacked(1, CLASS) > 0), (0, true), "nothing was taken from the second");
    assert!(o.drain_cpu(1, |_| true).is_some());
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

/// D5: A drain looked at stacks without their lock and missed one that was being filled.
#[test]
fn d5_draining_visits_stacks_that_look_empty() {
    let o = Opened::new(machine(4), &CONFIG).unwrap();
    for cpu in 0..4 {
        Virtual::run_on(cpu);
        churn(&o);
    }
    assert!((0..4).all(|cpu| o.drain_cpu(cpu, |_| true).is_some_and(|objects| objects > 0)));
    // The stack is empty but has room. An object that its owner pushes from now on is found by the
    // next drain.
    Virtual::run_on(2);
    let object = o.take(CLASS).unwrap();
    o.give(CLASS, object);
    assert!((0..4).filter_map(|cpu| o.drain_cpu(cpu, |_| true)).sum::<u64>() > 0);
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

/// D11: A free that could not lock its stack put the object where neither allocations nor drains
/// found it.
#[test]
fn d11_what_is_freed_past_a_held_slot_is_in_its_slab_at_once() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let held = o.take_many(CLASS, 200);
    o.drain();
    let before = o.slabs_of(CLASS).0;
    assert!(before > 0);
    let guard = o.cpu_caches.lock(0).try_lock().unwrap();
    held.into_iter().for_each(|object| o.give(CLASS, object));
    assert_eq!(o.slabs_of(CLASS).0, 0, "all slabs went back to the pages though the slot is held");
    drop(guard);
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

/// B1: Allocating on one CPU and freeing on another took the shared lock every time.
#[test]
fn b1_objects_that_cross_cpus_travel_by_the_sheaf() {
    for class in [Class(4), CLASS, Class(72)] {
        let o = Opened::new(machine(2), &CONFIG).unwrap();
        let (mut slabs, mut changes, mut before) = (0, 0, o.barn(class));
        for round in 0..20_000_u32 {
            Virtual::run_on(0);
            let object = o.take(class).unwrap();
            Virtual::run_on(1);
            o.give(class, object);
            let barn = o.barn(class);
            (changes, before) = (changes + u32::from(barn != before), barn);
            if round == 10_000 {
                slabs = o.slabs_of(class).0;
            }
        }
        let most = 2 * 20_000 / class.sheaf_capacity() + 10;
        assert!(changes > 0 && changes <= most, "{changes} visits to the barn, {most} are needed");
        assert_eq!(o.busy(), 0);
        assert_eq!(o.slabs_of(class).0, slabs, "what flows in a circle needs no new slab");
        o.prove();
    }
}

/// B2: A refill that failed half-way lost its objects, or stopped although there were more.
#[test]
fn b2_refill_that_fails_midway_loses_and_leaks_no_objects() {
    for class in [Class(4), Class(47), Class(60), Class(72)] {
        let shape = class.slab_shape(4096);
        for budget in (0..5 << shape.order).step_by(1 << shape.order >> 1 | 1) {
            let o = Opened::new(machine(1), &Config { budget: Some(budget), ..CONFIG }).unwrap();
            let mut held = VecDeque::new();
            let drain = || {
                o.drain();
                _ = o.pages.drain_all(&o.platform);
            };
            // As in `Mm`: try again after everything was drained.
            while let Some(object) = o.take(class).or_else(|| {
                drain();
                o.prove();
                o.take(class)
            }) {
                held.push_back(object);
            }
            // The side tables are charged from the first slab on.
            let (size, tables) = (1 << shape.order, o.pages.statistics().table_pages);
            let slabs = (budget.saturating_sub(tables) / size).max(u32::from(budget >= size));
            let fits = slabs * shape.objects;
            assert_eq!(held.len() as u32, fits, "{class:?} in {budget} pages, slabs of {size}");
            o.prove();
            held.into_iter().for_each(|object| o.give(class, object));
            o.drain();
            assert_eq!(o.prove().slabs, 0);
        }
    }
}

/// B3: A flush was skipped silently after a failed try.
#[test]
fn b3_what_a_flush_could_not_take_is_told() {
    let Some(o) = rseq() else { return };
    let cpus = 0..o.platform.cpus();
    churn(&o);
    let full = |cpu: &usize| o.stacked(*cpu, CLASS) > 0;
    let used: Vec<usize> = cpus.clone().filter(full).collect();
    assert!(!used.is_empty());
    let (before, census) = (o.cpu_caches.counters(), o.prove());
    o.platform.failing_fences.store(used.len(), Relaxed);
    assert!(used.iter().all(|cpu| o.drain_cpu(*cpu, |_| true).is_none()));
    let after = o.cpu_caches.counters();
    assert_eq!(after.skipped - before.skipped, used.len() as u32, "counted");
    assert_eq!(o.prove(), census, "nothing was acquired");
    churn(&o);
    assert!(cpus.clone().all(|cpu| o.drain_cpu(cpu, |_| true).is_some()));
    assert_eq!(o.cpu_caches.counters().skipped, after.skipped);
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

/// B4: Making a sheaf used the cache that the sheaf was for.
#[test]
fn b4_a_sheaf_for_a_class_comes_from_slabs_alone() {
    for class in Class::all() {
        let o = Opened::new(machine(1), &CONFIG).unwrap();
        let object = o.take(class).unwrap();
        let memory = Class::of_size(Sheaf::bytes(class.sheaf_capacity()));
        assert_eq!((o.barn(class), o.prove().sheaves), ((0, 1), 1), "{class:?}");
        let others = (1..CLASSES as u8).map(Class).filter(|other| ![class, memory].contains(other));
        others.for_each(|other| assert_eq!((o.slabs_of(other), o.barn(other)), ((0, 0), (0, 0)), "{class:?}"));
        assert!(memory == class || o.stacked(0, memory) == 0, "{class:?}");
        o.give(class, object);
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}

/// B5: A CPU that came online late had no barn, and the code did not check.
#[test]
fn b5_a_cpu_beyond_the_tables_shares_the_last_stacks() {
    let platform = machine(2);
    platform.shift.store(1000, Relaxed);
    let o = Opened::new(platform, &CONFIG).unwrap();
    churn(&o);
    assert_eq!((o.stacked(0, CLASS), o.stacked(1, CLASS) > 0), (0, true));
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

/// B5: The kernel names a CPU that was not there at the start. This thread runs on one, sooner or
/// later.
#[test]
fn b5_a_cpu_beyond_the_rows_goes_without_a_stack() {
    let platform = Shared::new(Linux::probe());
    if platform.rseq_offset().is_none() || platform.nameable_cpus() < 2 {
        return;
    }
    platform.told.store(1, Relaxed);
    let o = Opened::new(platform, &CONFIG).unwrap();
    assert_eq!(o.cpu_caches.kind(&o.platform, 0), CacheMode::Rseq);
    for _ in 0..20 {
        churn(&o);
        std::thread::yield_now();
    }
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

/// B8: A container filled for one CPU was installed on another without a check.
#[test]
fn b8_a_refill_that_migrates_lands_where_the_thread_is_now() {
    // Every second query of the CPU returns the other one: the refill begins on one and ends on the
    // other.
    let platform = machine(2);
    platform.wander.store(1, Relaxed);
    let o = Opened::new(platform, &CONFIG).unwrap();
    Virtual::run_on(0);
    let object = o.take(CLASS).unwrap();
    let (here, there) = (o.stacked(0, CLASS), o.stacked(1, CLASS));
    let census = o.prove();
    assert_eq!(u64::from(here + there) + o.caches[CLASS.index()].lock().full.objects(), census.cached);
    assert!((here == 0) != (there == 0) || o.barn(CLASS).0 == 1, "{here} and {there}");
    o.give(CLASS, object);
    churn(&o);
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

/// B9: A failed try of the lock was repeated in a context that may not wait.
#[test]
fn b9_a_call_that_finds_its_stack_taken_does_not_wait() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let held = o.take_many(CLASS, 30);
    let owner = o.cpu_caches.lock(0).try_lock().unwrap();
    let (busy, free) = (o.busy(), o.slabs_of(CLASS).1);
    held.into_iter().for_each(|object| o.give(CLASS, object));
    assert_eq!((o.busy() - busy, o.platform.pauses.load(Relaxed)), (30, 0));
    assert_eq!(o.slabs_of(CLASS).1 - free, 30, "they went to their slabs");
    o.take_many(CLASS, 30);
    assert_eq!((o.busy() - busy, o.platform.pauses.load(Relaxed)), (60, 0));
    drop(owner);
    assert_eq!(o.prove().allocated, 30);
}

/// B10: A loop around a failed try took a fresh slab and threw it away in every pass.
#[test]
fn b10_a_call_that_finds_its_stack_taken_makes_one_slab() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    Inside::assume(|inside| o.cpu_caches.begin(inside, &o.platform, 0));
    let owner = o.cpu_caches.lock(0).try_lock().unwrap();
    let object = o.take(CLASS).unwrap();
    let shape = CLASS.slab_shape(4096);
    assert_eq!(o.slabs_of(CLASS), (1, u64::from(shape.objects) - 1));
    let pages = o.pages.statistics();
    assert_eq!(pages.used - pages.listed, 1 << shape.order);
    assert_eq!(o.slabs.used(), 1, "and no slab for sheaves");
    drop(owner);
    o.give(CLASS, object);
    assert_eq!(o.prove().allocated, 0);
}

/// The maker of a new slab was served by another thread's frees meanwhile. The slab stayed wholly
/// free on the list, out of reach.
#[test]
fn a_new_slab_is_never_seen_wholly_free() {
    let (class, stop) = (Class(72), AtomicBool::new(false));
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    // The stack's lock is held, so every call goes to the slabs.
    Inside::assume(|inside| o.cpu_caches.begin(inside, &o.platform, 0));
    let owner = o.cpu_caches.lock(0).try_lock().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..200_000 {
                let held = o.take_many(class, 5);
                held.into_iter().for_each(|object| o.give(class, object));
            }
            stop.store(true, Relaxed);
        });
        // Checks in the gaps between two holds of the lock. More turns hit more gaps.
        while !stop.load(Relaxed) {
            let cache = o.caches[class.index()].lock();
            let mut next = cache.partial.first();
            while let Some(id) = next {
                // SAFETY: the class's mutex is held.
                let (slab, after) = unsafe { (o.slabs.get(id), SlabList::after(&o.slabs, id)) };
                assert!(slab.free < slab.objects, "a slab of {} free objects is on the list", slab.free);
                next = after;
            }
        }
    });
    drop(owner);
    assert_eq!(o.slabs_of(class), (0, 0), "everything was given back");
    o.prove();
}

/// B11: The frame of a slab that is gone led into another class's slab.
#[test]
fn b11_a_slab_that_is_gone_leaves_no_trace() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    for class in Class::all().chain(Class::all().rev()) {
        let object = o.take(class).unwrap();
        let pfn = o.pages.pfn(object.addr());
        assert_eq!((o.pages.frames().frame(pfn).state(), o.class_at(object)), (State::Slab, Some(class)));
        o.give(class, object);
        o.drain();
        assert_eq!(o.class_at(object), Some(Class::NONE));
        assert!(!o.is_allocated(object) && !o.is_cached(object) && !o.disown(object));
        assert!(o.pages.frames().frame(pfn).state() != State::Slab);
        assert_eq!(o.prove().slabs, 0);
    }
}

/// B11: A second free that reaches the bitmap is detected there.
#[test]
fn b11_a_bitmap_takes_an_object_once() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let held = o.take_many(CLASS, 2);
    let mut cache = o.caches[CLASS.index()].lock();
    let (slab, mut empties) = (SlabId(o.pages.frames().frame(o.pages.pfn(held[0].addr())).owner()), SlabList::new());
    // SAFETY: the class's mutex is held.
    unsafe {
        let start = o.pages.address(o.slabs.pfn_of(slab));
        let place = ObjectIndex { slab, object: ((held[0].addr() - start) / CLASS.size()) as u32 };
        assert!(cache.put(&o.slabs, place, &mut empties) && !cache.put(&o.slabs, place, &mut empties));
    }
}
