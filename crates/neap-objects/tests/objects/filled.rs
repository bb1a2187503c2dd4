//! New slabs of a class whose slabs are all full: when they get memory, and in which order it is
//! handed out.
//!
//! Goal: the first slabs of a class get memory page by page as the program touches it, so that a
//! small program has little. From the fifth on, a slab gets all its memory at once. A burst goes
//! through it in one direction, as processors prefetch.
//!
//! Method: a virtual machine that counts its calls.

use crate::instance::{CONFIG, Opened, machine};
use neap_objects::size_class::Class;
use neap_testing::virtual_platform::Call;

#[test]
fn the_fifth_slab_of_a_class_is_populated_at_once() {
    for size in [64, 1000, 4096, 32768] {
        let o = Opened::new(machine(1), &CONFIG).unwrap();
        let class = Class::of_size(size);
        let mut objects = Vec::new();
        while o.slabs_of(class).0 < 9 {
            objects.push(o.take(class).unwrap());
            let slabs = o.slabs_of(class).0 as usize;
            assert_eq!(o.platform.made(Call::Populate), slabs.saturating_sub(4), "{slabs} slabs of {size} bytes");
        }
        objects.into_iter().for_each(|object| o.give(class, object));
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}

/// Memory that was not released is not asked for again.
#[test]
fn a_slab_over_memory_that_is_there_is_not_populated() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let class = Class::of_size(4096);
    let objects = o.take_many(class, 500);
    let made = o.platform.made(Call::Populate);
    assert!(made > 4);
    objects.into_iter().for_each(|object| o.give(class, object));
    o.drain();
    o.take_many(class, 500);
    assert_eq!(o.platform.made(Call::Populate), made);
}

#[test]
fn a_burst_goes_upward_and_the_next_one_downward() {
    for size in [64, 1000] {
        let o = Opened::new(machine(1), &CONFIG).unwrap();
        let class = Class::of_size(size);
        let burst = |upward: bool| {
            let objects = o.take_many(class, 10_000);
            let steps = objects.iter().zip(objects.iter().skip(1)).filter(|(one, next)| (one < next) == upward).count();
            assert!(steps > 9500, "{size} bytes: {steps} of 9999 steps");
            objects.into_iter().for_each(|object| o.give(class, object));
        };
        burst(true);
        burst(false);
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}
