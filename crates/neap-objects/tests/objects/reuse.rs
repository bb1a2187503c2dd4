//! Reuse before growth: after a live set was freed, a live set of other sizes grows the process
//! little, in whatever order the first was freed. Measured in pages of the virtual machine.

use crate::instance::{CONFIG, Opened, machine};
use neap_objects::reuse::GrowthBeside;
use neap_objects::size_class::Class;
use neap_testing::orders::{Order, reorder};
use neap_testing::random::{Random, seed};
use neap_testing::virtual_platform::Virtual;

const LIVE: usize = 64 << 20;

/// Runs live sets of these sizes one after the other. Returns the most pages that were resident.
fn peak_of_phases(o: &Opened<impl neap_base::Platform>, sizes: &[usize], order: Order, random: &mut Random) -> u64 {
    let mut peak = 0;
    for &size in sizes {
        let class = Class::of_size(size);
        let mut objects = Vec::from(o.take_many(class, LIVE / class.size()));
        peak = peak.max(o.pages.resident());
        reorder(&mut objects, order, random);
        objects.into_iter().for_each(|object| o.give(class, object));
        peak = peak.max(o.pages.resident());
    }
    peak
}

#[test]
fn phases_of_other_sizes_reuse_what_was_freed() {
    let mut random = Random(seed());
    let sizes = [64, 4096, 300, 32768, 1000, 128, 2048, 64, 32768, 16, 4096];
    for order in Order::ALL {
        let o = Opened::new(machine(2), &CONFIG).unwrap();
        let peak = peak_of_phases(&o, &sizes, order, &mut random) as usize * 4096;
        assert!(peak < LIVE * 3 / 2, "{order:?}: {} of {} KiB", peak >> 10, LIVE >> 10);
        assert!(o.reuse_numbers().sweeps > 0 && o.reuse_numbers().objects > 0);
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}

/// Half of the pages are freed on another CPU, whose stacks then keep slabs from being whole.
#[test]
fn stacks_of_other_cpus_are_emptied_before_growth() {
    let o = Opened::new(machine(4), &CONFIG).unwrap();
    let mut peak = 0;
    for round in 0..6 {
        let class = Class::of_size([64, 4096, 1000][round % 3]);
        Virtual::run_on(round % 4);
        let objects = Vec::from(o.take_many(class, LIVE / class.size()));
        peak = peak.max(o.pages.resident());
        for (n, object) in objects.into_iter().enumerate() {
            Virtual::run_on(n / 1000 % 4);
            o.give(class, object);
        }
    }
    Virtual::run_on(0);
    assert!((peak as usize) << 12 < LIVE * 5 / 4, "{peak} pages");
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

#[test]
fn a_burst_that_repeats_is_served_by_its_barn() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let class = Class::of_size(64);
    for round in 0..5 {
        let before = o.reuse_numbers();
        let objects = Vec::from(o.take_many(class, LIVE / class.size()));
        objects.into_iter().for_each(|object| o.give(class, object));
        assert!(round == 0 || o.reuse_numbers() == before, "round {round} swept");
    }
    o.drain();
}

/// A cache is emptied and filled again with values of another size: what is freed at random must
/// not stay in the barn, where a few objects keep each slab.
#[test]
fn barn_is_thinned_out_while_the_class_is_mostly_freed() {
    let mut random = Random(seed());
    for size in [16, 64] {
        let o = Opened::new(machine(1), &CONFIG).unwrap();
        let class = Class::of_size(size);
        let mut objects = Vec::from(o.take_many(class, LIVE / class.size()));
        let slabs = o.caches_of(class).map(|cache| cache.lock().slabs).sum::<u32>();
        reorder(&mut objects, Order::Random, &mut random);
        objects.into_iter().for_each(|object| o.give(class, object));
        let cache = o.caches_of(class).next().unwrap().lock();
        // The objects of the CPU's stacks are all that keeps slabs.
        let others = cache.objects - cache.free;
        assert!(cache.full.objects() <= others / 4, "{size}: {} of {others}", cache.full.objects());
        assert!(others <= LIVE as u64 / class.size() as u64 / 20 + 2048, "{size}: {others}");
        assert!(cache.slabs <= slabs, "{size}");
        drop(cache);
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}

/// A program that only grows checks a few times whether there is something to reuse, and never
/// sweeps.
#[test]
fn growth_alone_does_not_sweep() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let held: Vec<_> =
        [64, 300, 5000].map(|size| (Class::of_size(size), o.take_many(Class::of_size(size), LIVE / size))).into();
    let numbers = o.reuse_numbers();
    assert_eq!((numbers.sweeps, numbers.beside), (0, GrowthBeside::default()));
    assert!((1..=128).contains(&numbers.checks), "{} checks for 192 MiB", numbers.checks);
    held.into_iter()
        .for_each(|(class, objects)| Vec::from(objects).into_iter().for_each(|object| o.give(class, object)));
    o.drain();
}

/// Frees in disorder list their objects in little memory of their own.
#[test]
fn cells_of_sheaves_are_bounded_by_what_is_resident() {
    let mut random = Random(seed());
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let class = Class::of_size(64);
    let mut objects = Vec::from(o.take_many(class, LIVE / class.size()));
    let before = o.pages.resident();
    reorder(&mut objects, Order::Random, &mut random);
    objects.into_iter().for_each(|object| o.give(class, object));
    let more = o.pages.resident().saturating_sub(before) as usize * 4096;
    assert!(more <= LIVE / 16, "{more} bytes more");
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

/// Growth is counted beside the place of most unused memory: slabs that a few objects keep, or the
/// barn of a program that keeps its free memory.
#[test]
fn growth_is_counted_beside_the_place_of_unused_memory() {
    let (class, other) = (Class::of_size(64), Class::of_size(300));
    for keeps in [false, true] {
        let o = Opened::new(machine(1), &CONFIG).unwrap();
        o.pages.keep_chunks(keeps);
        let objects = Vec::from(o.take_many(class, LIVE / class.size()));
        assert_eq!(o.reuse_numbers().beside, GrowthBeside::default());
        let (kept, freed): (Vec<_>, Vec<_>) = objects.into_iter().enumerate().partition(|(n, _)| !keeps && n % 32 == 0);
        freed.into_iter().for_each(|(_, object)| o.give(class, object));
        let grown = o.pages.grown();
        let others = Vec::from(o.take_many(other, LIVE / other.size()));
        let (grown, beside) = (o.pages.grown() - grown, o.reuse_numbers().beside);
        let counted = if keeps { beside.barns } else { beside.slabs };
        // What was grown since the last check before counts as well: 2 MiB at most.
        assert!(
            counted > grown * 3 / 4 && counted <= grown + 512,
            "{beside:?} of {grown} pages, keeps free memory: {keeps}"
        );
        others.into_iter().for_each(|object| o.give(other, object));
        kept.into_iter().for_each(|(_, object)| o.give(class, object));
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}
