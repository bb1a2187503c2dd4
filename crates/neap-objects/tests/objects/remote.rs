//! Remote objects, which are freed on another CPU than their page's home.
//!
//! Goal: a remote object is not handed out again on the CPU that freed it, but returns by the barn.
//! A page whose objects are used elsewhere for long moves its home there. A remote object never
//! makes a thread wait for the barn. Wrong homes in the kind map lose nothing.
//!
//! Method: a virtual machine on which the test chooses the CPU.

use crate::instance::{CONFIG, Opened, machine};
use neap_objects::kind_map::KindEntry;
use neap_objects::size_class::Class;
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;
use std::collections::BTreeSet;

type Instance = Opened<Shared<Virtual>>;

const CLASS: Class = Class(20);
const SHEAF: usize = CLASS.sheaf_capacity() as usize;

fn kind(o: &Instance, object: *const u8) -> &KindEntry {
    let kinds = core::ptr::with_exposed_provenance::<KindEntry>(o.pages.side_table(0));
    // SAFETY: the first side table has an entry for every 4 KiB of the arena.
    unsafe { &*kinds.add((object.addr() - o.pages.base()) >> KindEntry::SHIFT) }
}

fn take(o: &Instance, cpu: usize, count: usize) -> Vec<*mut u8> {
    Virtual::run_on(cpu);
    o.take_many(CLASS, count).into()
}

fn give(o: &Instance, cpu: usize, objects: Vec<*mut u8>) {
    Virtual::run_on(cpu);
    objects.into_iter().for_each(|object| o.give(CLASS, object));
}

#[test]
fn remote_object_is_handed_out_at_home_only() {
    let o = Opened::new(machine(2), &CONFIG).unwrap();
    // All of CPU 0's objects, so that it has to refill.
    let mut remote = take(&o, 0, SHEAF + 1);
    remote.extend(take(&o, 0, o.stacked(0, CLASS) as usize));
    assert!(remote.iter().all(|&object| kind(&o, object).home() == 0));
    let last = remote.split_off(SHEAF);
    let known: BTreeSet<_> = remote.iter().copied().collect();
    give(&o, 1, remote);
    assert_eq!((o.stacked(1, CLASS) as usize, o.barn(CLASS).0), (SHEAF, 0), "they wait with CPU 1");
    let taken = take(&o, 1, 2 * SHEAF);
    assert!(taken.iter().all(|object| !known.contains(object)), "but it does not use them");
    give(&o, 1, last);
    assert!(o.barn(CLASS).0 > 0, "there is room for so many, then they leave");
    let back = take(&o, 0, SHEAF);
    assert!(back.iter().all(|object| known.contains(object)), "CPU 0 has its own again");
    give(&o, 0, back);
    give(&o, 1, taken);
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

/// Cache lines of state bytes end where homes end.
#[test]
fn slab_part_is_homed_on_the_cpu_of_its_first_allocation() {
    for class in [Class(1), Class(8), CLASS, Class(40), Class(72)] {
        let o = Opened::new(machine(2), &CONFIG).unwrap();
        Virtual::run_on(1);
        let object = o.take_many(class, 1)[0];
        let start = object.wrapping_sub(object.addr() % class.home_bytes());
        let pages = (0..class.home_bytes()).step_by(4096).map(|offset| kind(&o, start.wrapping_add(offset)));
        let all: Vec<_> = pages.map(|page| (page.home(), page.class())).collect();
        assert!(all.iter().all(|&page| page == (1, class)), "{class:?}: {all:?}");
        o.give(class, object);
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}

#[test]
fn a_page_moves_to_the_cpu_that_uses_its_objects() {
    let o = Opened::new(machine(2), &CONFIG).unwrap();
    let mut objects = take(&o, 0, 20 * SHEAF);
    let away = |objects: &[*mut u8]| objects.iter().filter(|&&object| kind(&o, object).home() == 0).count();
    let mut remote = vec![away(&objects)];
    while remote.len() < 100 && remote.last() != Some(&0) {
        give(&o, 1, objects);
        objects = take(&o, 1, 20 * SHEAF);
        remote.push(away(&objects));
        o.prove();
    }
    assert_eq!((remote[0], remote.last()), (20 * SHEAF, Some(&0)), "{remote:?}");
    give(&o, 1, objects);
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

#[test]
fn remote_objects_stay_while_barn_is_busy() {
    let o = Opened::new(machine(2), &CONFIG).unwrap();
    let remote = take(&o, 0, SHEAF + 1);
    let own = take(&o, 1, 1);
    let before = o.stacked(1, CLASS) as usize;
    let busy = o.caches[CLASS.index()].lock();
    give(&o, 1, remote);
    assert_eq!(o.stacked(1, CLASS) as usize, before + SHEAF + 1, "in both stacks, and no thread has waited");
    drop(busy);
    give(&o, 1, own);
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

#[test]
fn wrong_homes_lose_nothing() {
    for homes in [[0, 1, 2], [1, 1, 1], [2, 65535, 0], [9, 0, 9]] {
        let o = Opened::new(machine(3), &CONFIG).unwrap();
        let mut held: Vec<Vec<*mut u8>> = (0..3).map(|cpu| take(&o, cpu, 2 * SHEAF)).collect();
        for round in 0..30 {
            for (objects, home) in held.iter().zip(homes) {
                objects.iter().step_by(7).for_each(|&object| kind(&o, object).set_home(home));
            }
            held.rotate_left(1);
            for (cpu, objects) in held.iter_mut().enumerate() {
                let some = objects.split_off(objects.len() / (2 + round % 3));
                let count = some.len();
                give(&o, cpu, some);
                objects.extend(take(&o, cpu, count));
            }
            assert_eq!(o.prove().allocated, 6 * SHEAF as u64);
        }
        held.into_iter().for_each(|objects| give(&o, 1, objects));
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}
