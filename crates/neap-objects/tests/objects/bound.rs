//! Bound sheaves: objects in rows of addresses need no cell each.
//!
//! Goal: objects freed in ascending or descending order of addresses lie in bound sheaves, and are
//! handed out again once each. Objects freed in disorder lie in plain sheaves. Small sheaves are
//! never bound. Nothing is lost if there is no memory for a bound sheaf, or if rows of two nodes
//! meet. Empty sheaves are trimmed in time.
//!
//! Method: bursts on virtual machines and on the real one, each verified afterwards.

use crate::instance::{CONFIG, Opened, machine};
use neap_base::{Linux, Platform};
use neap_objects::barns::TrimmedBarn;
use neap_objects::objects::Config;
use neap_objects::sheaf::Sheaf;
use neap_objects::size_class::{CLASSES, Class};
use neap_pages::Effort;
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;
use std::collections::BTreeSet;

/// Whether sheaves of a class are bound: those that take more than twice as much with cells, all
/// but the largest.
fn binds(class: Class) -> bool {
    class.size() < 32 << 10
}

/// Number of full sheaves in the barn of a class: plain ones, and bound ones.
fn full<P: Platform>(o: &Opened<P>, class: Class) -> (u32, u32) {
    let counts = o.caches[class.index()].lock().full.lengths();
    (counts.plain, counts.bound)
}

/// Number of full bound sheaves of a class on all nodes.
fn bound<P: Platform>(o: &Opened<P>, class: Class) -> u32 {
    o.caches_of(class).map(|cache| cache.lock().full.lengths().bound).sum()
}

/// Number of objects of which most lie in sheaves once they are free.
fn many(class: Class) -> usize {
    3 * class.stack_capacity() as usize
}

/// Frees the objects of a burst and takes as many again. None of them comes from slabs, and none
/// comes twice. Returns the number of plain and of bound sheaves in between.
fn there_and_back<P: Platform>(o: &Opened<P>, class: Class, order: impl Fn(&mut [*mut u8])) -> (u32, u32) {
    let mut held = Vec::from(o.take_many(class, many(class)));
    // The sheaves of some classes are objects of the same class.
    let memory = [0, class.sheaf_capacity()].iter().any(|&cells| Class::of_size(Sheaf::bytes(cells)) == class);
    let slabs = || if memory { (o.slabs_of(class).0, 0) } else { o.slabs_of(class) };
    let before = slabs();
    order(&mut held);
    held.into_iter().for_each(|object| o.give(class, object));
    let kept = full(o, class);
    assert_eq!(o.prove().allocated, 0);
    let again = o.take_many(class, many(class));
    assert_eq!((again.iter().collect::<BTreeSet<_>>().len(), slabs()), (many(class), before), "{class:?}");
    again.into_iter().for_each(|object| o.give(class, object));
    o.prove();
    kept
}

/// Takes every n-th object from front to back, so that no two neighbours in memory follow each
/// other.
fn disorder(objects: &mut [*mut u8]) {
    let mut by_address = objects.to_vec();
    by_address.sort_unstable();
    let (step, count) = (objects.len() / 3 - 1, objects.len());
    assert!(step > 1 && count % step != 0);
    let order = (0..step).flat_map(|first| (first..count).step_by(step));
    objects.iter_mut().zip(order).for_each(|(object, n)| *object = by_address[n]);
}

#[test]
fn what_is_freed_in_a_row_is_bound() {
    for class in Class::all() {
        for down in [false, true] {
            let o = Opened::new(machine(1), &CONFIG).unwrap();
            let (plain, bound) = there_and_back(&o, class, |objects| {
                objects.sort_unstable();
                if down {
                    objects.reverse();
                }
            });
            assert_eq!(
                (plain > 0, bound > 0),
                (!binds(class), binds(class)),
                "{class:?}: {plain} plain, {bound} bound"
            );
            let cells = o.barn(class).1;
            assert!(!binds(class) || cells <= 1, "{class:?}: {cells} sheaves with cells, where one serves");
            o.drain();
            assert_eq!(o.prove().slabs, 0);
        }
    }
    assert!(binds(Class(1)) && !binds(Class(CLASSES as u8 - 1)));
}

#[test]
fn what_is_freed_in_disorder_is_not() {
    for class in Class::all() {
        let o = Opened::new(machine(1), &CONFIG).unwrap();
        let (plain, bound) = there_and_back(&o, class, disorder);
        assert!(plain > 1 && bound <= 1, "{class:?}: what the first slab left in the stack may be a row");
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}

/// Without memory for a bound sheaf the objects stay in the plain one.
#[test]
fn without_memory_a_sheaf_stays_plain() {
    let (class, filler) = (Class::of_size(256), Class::of_size(32 << 10));
    let o = Opened::new(machine(1), &Config { budget: Some(1024), ..CONFIG }).unwrap();
    // Plain sheaves, empty in the end.
    let mut held = Vec::from(o.take_many(class, many(class)));
    disorder(&mut held);
    held.drain(..).for_each(|object| o.give(class, object));
    held.extend(o.take_many(class, many(class)));
    assert!(o.barn(class).1 > 0);
    // All memory, down to a bound sheaf's size.
    let memory = Class::of_size(Sheaf::bytes(0));
    let fillers: Vec<_> = core::iter::from_fn(|| o.take(filler)).collect();
    let small: Vec<_> = core::iter::from_fn(|| o.take(memory)).collect();
    held.sort_unstable();
    held.into_iter().for_each(|object| o.give(class, object));
    let kept = full(&o, class);
    assert!(kept.0 > 0 && kept.1 == 0, "{kept:?}");
    assert_eq!(o.prove().allocated as usize, fillers.len() + small.len());
    fillers.into_iter().for_each(|object| o.give(filler, object));
    small.into_iter().for_each(|object| o.give(memory, object));
    // With memory again, sheaves are bound after a while. Not every sheaf asks for memory.
    let sheaves = (0..).find(|_| {
        let mut held = Vec::from(o.take_many(class, many(class)));
        held.sort_unstable();
        held.into_iter().for_each(|object| o.give(class, object));
        bound(&o, class) > 0
    });
    assert!((10..1000).contains(&sheaves.unwrap()), "{sheaves:?} bursts of some sheaves");
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

/// No sheaf has rows of two nodes, and each node has bound sheaves of its own. The verification
/// checks every barn.
#[test]
fn rows_of_two_nodes_are_not_bound_together() {
    let class = Class::of_size(64);
    let o = Opened::new(Shared::new(Virtual::new(4096, 3).with_nodes(&[0, 1, 2])), &CONFIG).unwrap();
    let of_each = [0, 1].map(|cpu| {
        Virtual::run_on(cpu);
        let mut held = Vec::from(o.take_many(class, 10 * many(class)));
        held.sort_unstable();
        held
    });
    // All objects are remote and lie in one stack: first in turns, then by node.
    Virtual::run_on(2);
    let [one, other] = of_each.each_ref().map(|held| held.split_at(5 * many(class)));
    let turns = one.0.chunks(200).zip(other.0.chunks(200)).flat_map(|(one, other)| [one, other]);
    for rows in turns.chain([one.1, other.1]) {
        rows.iter().for_each(|&object| o.give(class, object));
        o.prove();
    }
    let bound: Vec<_> = o.caches_of(class).map(|cache| cache.lock().full.lengths().bound > 0).collect();
    assert_eq!(bound, [true, true, false]);
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

/// A row of objects over the border of two nodes' segments lies in two bound sheaves, or in none.
#[test]
fn a_row_across_a_border_is_not_bound() {
    let class = Class::of_size(4096);
    let o = Opened::new(Shared::new(Virtual::new(4096, 3).with_scarce_address_space().with_nodes(&[0, 1, 2])), &CONFIG)
        .unwrap();
    // Small segments in turns, all full.
    let mut held = Vec::new();
    for _ in 0..8 {
        for cpu in [0, 1] {
            Virtual::run_on(cpu);
            held.extend(o.take_many(class, (4 << 20) / 4096));
        }
    }
    held.sort_unstable();
    let meets =
        |pair: &[*mut u8]| pair[0].addr() + class.size() == pair[1].addr() && o.node_of(pair[0]) != o.node_of(pair[1]);
    let borders: Vec<_> = (1..held.len()).filter(|&n| meets(&held[n - 1..=n])).collect();
    assert!(borders.len() > 2, "{borders:?}");
    Virtual::run_on(2);
    let sheaf = class.sheaf_capacity() as usize;
    for border in borders {
        // The border is in the middle of a sheaf.
        let row = held[border - sheaf / 2..border + sheaf / 2].to_vec();
        row.iter().for_each(|&object| o.give(class, object));
        Virtual::run_on(0);
        let extra = o.take(class).unwrap();
        Virtual::run_on(2);
        o.give(class, extra);
        o.prove();
        assert!(o.drain_cpu(2, |_| true).is_some());
    }
}

/// A burst that takes everything back leaves as many empty bound sheaves, which are trimmed in
/// time.
#[test]
fn empty_bound_sheaves_go_with_time() {
    let class = Class::of_size(64);
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let many = 3300;
    let held = Vec::from(o.take_many(class, many * 10));
    held.into_iter().for_each(|object| o.give(class, object));
    let mut held = o.take_many(class, many * 10);
    let empty = || o.caches[class.index()].lock().empty_bound.length();
    let left = empty();
    assert!(left > 30, "{left}");
    held.extend(o.take_many(class, 10_000));
    let trim = || o.trim_barn(class, Effort::Sparing, &|| false);
    trim();
    assert_eq!(trim(), TrimmedBarn::default(), "not needed between the two");
    assert_eq!(empty(), 0);
    held.into_iter().for_each(|object| o.give(class, object));
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

/// Sequences move strided_runs between threads that migrate. Each object comes back once.
#[test]
fn what_threads_free_in_rows_comes_back_once_each() {
    let classes = [64, 512].map(Class::of_size);
    for rseq in [true, false] {
        let o = Opened::new(Shared::new(Linux::probe()), &Config { rseq, ..CONFIG }).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4_usize {
                let o = &o;
                scope.spawn(move || {
                    for round in 0..41 {
                        let class = classes[(thread + round) % 2];
                        let mut held = Vec::from(o.take_many(class, many(class) + thread * 100));
                        // A second thread with the same object would have written its own number.
                        for &object in &held {
                            // SAFETY: the object is the test's, and has room for two words.
                            unsafe { object.cast::<usize>().add(1).write(thread) };
                        }
                        if round % 3 > 0 {
                            held.sort_unstable();
                        }
                        for object in held {
                            // SAFETY: the object is the test's, and has room for two words.
                            assert_eq!(unsafe { object.cast::<usize>().add(1).read() }, thread);
                            o.give(class, object);
                        }
                    }
                });
            }
        });
        assert!(classes.map(|class| bound(&o, class)).iter().sum::<u32>() > 0);
        o.prove();
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}
