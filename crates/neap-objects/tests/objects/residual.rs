//! The most that CPUs and barns keep, and that draining takes all of it.
//!
//! Goal:
//! * A CPU's stacks of a class never hold more than their capacity. So all stacks of a CPU hold at
//!   most the sum over classes of capacity times size.
//! * A barn gives up objects beyond its share when another class takes fresh memory.
//! * A drain leaves nothing behind, by one fence a CPU. The next call on a drained stack takes the
//!   slow path.
//! * The state bytes of a class take as much memory as documented, which is released with the
//!   slabs'.
//!
//! Method: every class is filled on every CPU beyond what it can keep, on virtual machines and on
//! the real one.

use crate::instance::{CONFIG, Opened, machine, resident, rseq};
use core::sync::atomic::Ordering::Relaxed;
use neap_base::gate::Inside;
use neap_base::{Linux, Platform};
use neap_objects::cpu_caches::CacheMode;
use neap_objects::fast_path::FreeOutcome;
use neap_objects::objects::{Config, MappingKind};
use neap_objects::region::StackId;
use neap_objects::size_class::Class;
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;

/// The most bytes in a CPU's two stacks of a class, as [`Class::stack_capacity`] says.
const OF_A_CLASS: usize = 1536 << 10;

/// The most objects in a CPU's two stacks of a class.
fn capacity(class: Class) -> u32 {
    StackId::local(class).capacity() + StackId::remote(class).capacity()
}

/// Fills every class on every CPU. `run_on` moves the thread there, if that is possible.
fn filled<P: Platform>(o: &Opened<P>, run_on: impl Fn(usize)) {
    // All objects are taken before any is freed, since growth drains stacks.
    let mut held = Vec::new();
    for cpu in 0..o.cpu_caches.cpus() {
        run_on(cpu);
        held.extend(Class::all().map(|class| (cpu, class, o.take_many(class, 4 * class.stack_capacity() as usize))));
    }
    for (cpu, class, objects) in held {
        run_on(cpu);
        objects.into_iter().for_each(|object| o.give(class, object));
    }
}

/// Checks the bounds. Returns the bytes in the stacks of the CPU with most.
fn bounded<P: Platform>(o: &Opened<P>) -> usize {
    let mut most = 0;
    for cpu in 0..o.cpu_caches.cpus() {
        let mut bytes = 0;
        for class in Class::all() {
            let stacked = o.stacked(cpu, class);
            assert!(stacked <= capacity(class), "{stacked} objects of {class:?} on CPU {cpu}");
            assert!(stacked as usize * class.size() <= OF_A_CLASS);
            bytes += stacked as usize * class.size();
        }
        most = most.max(bytes);
    }
    o.prove();
    most
}

/// The most bytes in a CPU's stacks of all classes.
fn bound() -> usize {
    Class::all().map(|class| capacity(class) as usize * class.size()).sum()
}

/// The most bytes in a CPU's local stacks at first.
fn first_bound() -> usize {
    Class::all().map(|class| class.stack_capacity() as usize * class.size()).sum()
}

#[test]
fn full_stacks_hold_what_is_promised_and_no_more() {
    assert!(bound() <= 72 * OF_A_CLASS);
    for cpus in [1, 2, 8] {
        let o = Opened::new(machine(cpus), &CONFIG).unwrap();
        filled(&o, Virtual::run_on);
        let most = bounded(&o);
        assert!(most <= bound() && most >= first_bound() / 2, "{most} of {}: the test fills stacks", first_bound());
        let sums: u64 = (0..cpus)
            .flat_map(|cpu| Class::all().map(move |class| (cpu, class)))
            .map(|(cpu, class)| u64::from(o.stacked(cpu, class)))
            .sum();
        assert!(sums > 0);
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}

/// From the sixty-fifth refill in a row on that a barn serves, a stack gets more room, up to its
/// maximum. Refills from slabs and short bursts do not count. A drain takes the room back.
#[test]
fn a_stack_grows_with_long_bursts_and_not_for_longer() {
    const LONG: u32 = 64;
    for class in [Class(4), Class(32), Class(72)] {
        let o = Opened::new(machine(1), &CONFIG).unwrap();
        let room = || o.cpu_caches.room(&o.platform, 0, StackId::local(class));
        let burst = |objects: u32| {
            let held = o.take_many(class, objects as usize);
            held.into_iter().for_each(|object| o.give(class, object));
            o.prove();
            room()
        };
        let (first, most) = (class.stack_capacity(), class.most_capacity());
        assert_eq!(burst(90 * first), first, "slabs have filled the stack of {class:?}");
        (0..20).for_each(|_| assert_eq!(burst(4 * first), first, "short bursts of {class:?}"));
        let (slabs, mut held, mut rooms) = (o.slabs_of(class).0, Vec::new(), Vec::new());
        while rooms.len() < LONG as usize + 6 {
            let refills = o.stacked(0, class) == 0;
            held.push(o.take(class).unwrap());
            rooms.extend(refills.then(&room));
        }
        let expected = (0..LONG + 6).map(|refill| (first * (refill + 2).saturating_sub(LONG).max(1)).min(most));
        assert_eq!(rooms, expected.collect::<Vec<_>>(), "after each refill of {class:?}");
        assert_eq!(o.slabs_of(class).0, slabs, "the barn served them all");
        held.into_iter().for_each(|object| o.give(class, object));
        assert_eq!(room(), most);
        o.drain();
        assert_eq!((o.prove().slabs, room()), (0, 0));
        assert_eq!(burst(4 * first), first, "after a drain");
    }
}

/// Objects that the program takes on one CPU and frees on another are no burst, also if the other
/// CPU is on another node.
#[test]
fn a_stack_does_not_grow_with_what_comes_back_from_another_cpu() {
    for (nodes, class) in [1, 2].into_iter().flat_map(|nodes| [4, 32, 72].map(|class| (nodes, Class(class)))) {
        let machine = Virtual::new(4096, 2).with_scarce_address_space().with_nodes(&[0, nodes - 1]);
        let o = Opened::new(Shared::new(machine), &CONFIG).unwrap();
        for _ in 0..400 {
            Virtual::run_on(0);
            let held = o.take_many(class, class.sheaf_capacity() as usize);
            Virtual::run_on(1);
            held.into_iter().for_each(|object| o.give(class, object));
        }
        let rooms = [0, 1].map(|cpu| o.cpu_caches.room(&o.platform, cpu, StackId::local(class)));
        assert_eq!(rooms, [class.stack_capacity(), 0], "of {class:?} on {nodes} nodes");
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
    Virtual::run_on(0);
}

/// A barn keeps a burst for the next one of its class.
#[test]
fn a_barn_keeps_a_burst_for_its_class() {
    for class in [Class(1), Class(20), Class(50), Class(72)] {
        let o = Opened::new(machine(2), &CONFIG).unwrap();
        let burst = 40 * class.sheaf_capacity() as usize;
        let mut made = 0;
        for round in 0..3 {
            let held = o.take_many(class, burst);
            assert!(round == 0 || o.slabs_of(class).0 == made, "{class:?}: round {round} made slabs");
            made = o.slabs_of(class).0;
            held.into_iter().for_each(|object| o.give(class, object));
        }
        assert!(o.barn(class).0 > 20, "{} sheaves of {class:?}", o.barn(class).0);
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}

#[test]
fn full_stacks_on_the_real_system() {
    for rseq in [true, false] {
        let o = Opened::new(Shared::new(Linux::probe()), &Config { rseq, ..CONFIG }).unwrap();
        filled(&o, |_| ());
        let most = bounded(&o);
        assert!(most > 0 && most <= bound(), "{most}");
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}

#[test]
fn a_drain_of_some_classes_leaves_the_others_as_they_were() {
    let o = Opened::new(machine(2), &CONFIG).unwrap();
    filled(&o, Virtual::run_on);
    let stacks = |o: &Opened<Shared<Virtual>>, even: bool| -> Vec<_> {
        let classes = Class::all().filter(|class| (class.0 % 2 == 0) == even);
        classes
            .flat_map(|class| (0..2).map(move |cpu| (cpu, class)))
            .map(|(cpu, class)| o.stacked(cpu, class))
            .collect()
    };
    let odd = stacks(&o, false);
    (0..2).for_each(|cpu| assert!(o.drain_cpu(cpu, |class| class.0.is_multiple_of(2)).is_some()));
    assert_eq!(stacks(&o, false), odd);
    assert!(stacks(&o, true).iter().all(|count| *count == 0));
    o.prove();
}

#[test]
fn a_drain_costs_a_cpu_one_fence() {
    let Some(o) = rseq() else { return };
    filled(&o, |_| ());
    let (machine, cpus) = (&o.platform, o.cpu_caches.cpus());
    let before = (machine.fences.load(Relaxed), o.cpu_caches.counters().fences);
    (0..cpus).for_each(|cpu| assert!(o.drain_cpu(cpu, |_| true).is_some()));
    let fenced = o.cpu_caches.used().iter().filter(|&cpu| o.cpu_caches.kind(machine, cpu) == CacheMode::Rseq).count();
    assert!(fenced > 0 || machine.is_isolated(machine.cpu()));
    assert_eq!(machine.fences.load(Relaxed) - before.0, fenced);
    assert_eq!(o.cpu_caches.counters().fences - before.1, fenced as u32);
    assert!((0..cpus).all(|cpu| Class::all().all(|class| o.stacked(cpu, class) == 0)));
}

/// A drained stack must not be filled again without maintenance noticing.
#[test]
fn the_next_call_on_a_stack_that_was_taken_goes_the_slow_way() {
    let Some(o) = rseq() else { return };
    let class = Class(20);
    // The thread may migrate between any two steps, so this is repeated until it did not.
    let mut seen = false;
    for _ in 0..1000 {
        let held = o.take_many(class, 3);
        let mut held = held.into_iter();
        o.give(class, held.next().unwrap());
        let cpu = o.platform.cpu();
        assert!((0..o.cpu_caches.cpus()).all(|cpu| o.drain_cpu(cpu, |_| true).is_some()));
        assert!(o.fast_path.allocate(class.size()).is_none(), "there is nothing in any stack");
        let object = held.next().unwrap();
        let freed = o.fast_path.free(object);
        if o.platform.cpu() == cpu {
            assert_eq!(freed, FreeOutcome::CacheFull, "there is no room in any stack");
            seen = true;
        }
        if freed == FreeOutcome::CacheFull {
            Inside::assume(|inside| o.free(inside, class, object));
        }
        o.give(class, held.next().unwrap());
        o.drain();
        assert_eq!(o.prove().slabs, 0);
        if seen {
            return;
        }
    }
    panic!("the thread never stays on a CPU");
}

/// Takes 16 MiB of objects of a class, and more that is freed as several ranges. The tables with
/// the class's bytes have a byte for every 64 bytes of memory each; that of odd multiples of 16 has
/// two. A byte for every 512 bytes is added if some objects lie on such multiples. The last table
/// has a page or two, which stay. So does one page of each of the two tables that begin within a
/// cache line, at the end of each range.
#[test]
fn state_memory_is_as_much_as_a_class_needs_and_goes_back() {
    const BURST: usize = 16 << 20;
    const RANGE: usize = 32 << 20;
    let of_classes = [(64, 1), (32, 2), (48, 4), (768, 1), (512, 0), (1 << 10, 0), (20 << 10, 0), (32 << 10, 0)];
    for (burst, (size, tables)) in of_classes.map(|class| (BURST, class)).into_iter().chain([(6 * BURST, (48, 4))]) {
        let stays = (2 + 2 * (burst / RANGE + 1)) * 4096;
        let o = Opened::new(machine(1), &CONFIG).unwrap();
        let states = || {
            let mut bytes = 0;
            o.each_mapping(&mut |part, start, length| {
                bytes += if part == MappingKind::States { resident(start, length) } else { 0 };
            });
            bytes
        };
        let class = Class::of_size(size);
        assert_eq!(class.size(), size);
        let held = o.take_many(class, burst / size);
        let (there, needed) = (states(), tables * burst / 64 + if size < 32 << 10 { burst / 512 } else { 0 });
        assert!((needed..=needed + needed / 10 + stays).contains(&there), "{there} where {size} bytes need {needed}");
        held.into_iter().for_each(|object| o.give(class, object));
        o.drain();
        assert_eq!(o.prove().slabs, 0);
        assert!(!o.pages.release_all(&o.platform).left);
        assert!(states() <= stays, "{size}: {}", states());
    }
}
