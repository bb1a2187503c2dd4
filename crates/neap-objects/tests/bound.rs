//! Sheaves whose objects lie in rows need no cell for each.
//!
//! Goal: what is freed in the order of its addresses, or against it, is kept in bound sheaves and given out again, each object once; what is
//! freed in disorder in loose ones; small sheaves are never bound, and nothing is lost where there is no memory to bind one with, or where the
//! nodes meet in a row. Method: bursts on virtual machines and on the real one, each proved afterwards.

mod instance;
mod machine;

use instance::{CONFIG, Opened, machine};
use machine::Shared;
use neap_base::virtual_platform::Virtual;
use neap_base::{Linux, Platform};
use neap_objects::objects::Config;
use neap_objects::sheaf::Sheaf;
use neap_objects::size_class::{CLASSES, Class};
use std::collections::BTreeSet;

/// Whether sheaves of a class are bound: those that take twice as much with cells.
fn binds(class: Class) -> bool {
    Sheaf::bytes(class.sheaf_capacity()) >= 2 * Sheaf::bytes(0)
}

/// Full sheaves in the barn of a class: loose ones, and bound ones.
fn full<P: Platform>(o: &Opened<P>, class: Class) -> (u32, u32) {
    o.caches[class.index()].lock().full.lengths()
}

/// So many objects that most are in sheaves once they are free.
fn many(class: Class) -> usize {
    3 * class.stack_capacity() as usize
}

/// Frees what a burst took, and takes as much again: none of it comes from slabs, and each object once. Answers which sheaves there were between.
fn there_and_back<P: Platform>(o: &Opened<P>, class: Class, order: impl Fn(&mut [*mut u8])) -> (u32, u32) {
    let mut held = Vec::from(o.take_many(class, many(class)));
    // Of what there is of some classes their own sheaves are made.
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

/// Every so manieth from the front to the back: no two of what lies side by side follow each other.
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
            let (loose, bound) = there_and_back(&o, class, |objects| {
                objects.sort_unstable();
                if down {
                    objects.reverse();
                }
            });
            assert_eq!(
                (loose > 0, bound > 0),
                (!binds(class), binds(class)),
                "{class:?}: {loose} loose, {bound} bound"
            );
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
        let (loose, bound) = there_and_back(&o, class, disorder);
        assert!(loose > 1 && bound <= 1, "{class:?}: what the first slab left in the stack may be a row");
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}

/// A bound sheaf is memory as well, and if that is not to be had its objects stay where they are.
#[test]
fn without_memory_a_sheaf_stays_loose() {
    let (class, filler) = (Class::of_size(256), Class::of_size(32 << 10));
    let o = Opened::new(machine(1), &Config { budget: Some(1024), ..CONFIG }).unwrap();
    // Loose sheaves, empty in the end.
    let mut held = Vec::from(o.take_many(class, many(class)));
    disorder(&mut held);
    held.drain(..).for_each(|object| o.give(class, object));
    held.extend(o.take_many(class, many(class)));
    assert!(o.barn(class).1 > 0);
    // All the memory there is, down to what a bound sheaf takes.
    let memory = Class::of_size(Sheaf::bytes(0));
    let fillers: Vec<_> = core::iter::from_fn(|| o.take(filler)).collect();
    let small: Vec<_> = core::iter::from_fn(|| o.take(memory)).collect();
    held.sort_unstable();
    held.into_iter().for_each(|object| o.give(class, object));
    let (loose, bound) = full(&o, class);
    assert!(loose > 0 && bound == 0, "{loose} loose, {bound} bound");
    assert_eq!(o.prove().allocated as usize, fillers.len() + small.len());
    fillers.into_iter().for_each(|object| o.give(filler, object));
    small.into_iter().for_each(|object| o.give(memory, object));
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

/// Rows of two nodes are in no sheaf of one, and each node has bound ones of its own: the proof looks into every barn.
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
    // All are guests, and lie in one stack: in turns, and then those of a node together.
    Virtual::run_on(2);
    let [one, other] = of_each.each_ref().map(|held| held.split_at(5 * many(class)));
    let turns = one.0.chunks(200).zip(other.0.chunks(200)).flat_map(|(one, other)| [one, other]);
    for rows in turns.chain([one.1, other.1]) {
        rows.iter().for_each(|&object| o.give(class, object));
        o.prove();
    }
    let bound: Vec<_> = o.caches_of(class).map(|cache| cache.lock().full.lengths().1 > 0).collect();
    assert_eq!(bound, [true, true, false]);
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

/// The same where sequences move progressions, between threads that are moved themselves.
#[test]
fn what_threads_free_in_rows_comes_back_once_each() {
    for rseq in [true, false] {
        let o = Opened::new(Shared::new(Linux::probe()), &Config { rseq, ..CONFIG }).unwrap();
        std::thread::scope(|scope| {
            for seed in 0..4_usize {
                let o = &o;
                scope.spawn(move || {
                    let class = Class::of_size([64, 200, 512, 48][seed]);
                    for round in 0..30 {
                        let mut held = Vec::from(o.take_many(class, many(class) + seed * 100));
                        assert_eq!(held.iter().collect::<BTreeSet<_>>().len(), held.len());
                        if round % 3 > 0 {
                            held.sort_unstable();
                        }
                        held.into_iter().for_each(|object| o.give(class, object));
                    }
                });
            }
        });
        let bound: u32 = Class::all().map(|class| full(&o, class).1).sum();
        assert!(bound > 0);
        o.prove();
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}
