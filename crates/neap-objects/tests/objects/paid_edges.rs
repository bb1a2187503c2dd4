//! Charged objects in caches: the arguments of the uncharger, and sizes beyond the largest.

use crate::instance::{CONFIG, Opened, machine, rseq};
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use neap_base::Platform;
use neap_objects::charged::{GateSide, Owned};
use neap_objects::payers::word_of;
use neap_objects::size_class::{Class, LARGEST};
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;
use std::collections::BTreeMap;

/// Number of objects paid back: outside of slow paths, and inside.
type Told = [AtomicU32; 2];

/// # Safety
/// `told` points to a [`Told`].
unsafe fn repay(told: *const (), _owner: u64, _class: Class, objects: u32, side: GateSide) {
    // SAFETY: `Uncharger::open` stored this function with the address of a `Told` that outlives the
    // instance's use.
    let told = unsafe { &*told.cast::<Told>() };
    told[usize::from(side == GateSide::Inside)].fetch_add(objects, Relaxed);
}

fn count<P: Platform>(o: &Opened<P>, told: &'static Told) -> impl Fn() -> [u32; 2] {
    // SAFETY: no object has an owner yet, and `told` outlives the use of the objects.
    unsafe { o.uncharger.open(repay, core::ptr::from_ref(told).cast()) };
    || told.each_ref().map(|count| count.swap(0, Relaxed))
}

/// Allocates objects, one for each owner in turn, and frees them.
fn leave<P: Platform>(o: &Opened<P>, class: Class, owners: &[u64]) {
    let objects = o.take_many(class, owners.len());
    for (&object, &owner) in objects.iter().zip(owners) {
        // SAFETY: the objects are the test's, of this instance.
        assert!(unsafe { o.fast_path.own(object, owner) || o.own_slowly(class, object, owner) });
    }
    objects.into_iter().for_each(|object| o.give(class, object));
}

/// The side of the gate decides what the uncharger may do.
#[test]
fn uncharger_is_told_whether_it_runs_in_a_slow_path() {
    static TOLD: Told = [const { AtomicU32::new(0) }; 2];
    static FAST: Told = [const { AtomicU32::new(0) }; 2];
    let (o, class) = (Opened::new(machine(1), &CONFIG).unwrap(), Class::of_size(64));
    let told = count(&o, &TOLD);
    leave(&o, class, &[1, 1, 2, 2, 3]);
    assert_eq!(told(), [0, 0], "caches keep them");
    o.drain();
    assert_eq!(told(), [0, 5]);
    let Some(o) = rseq() else { return };
    let told = count(&o, &FAST);
    // Repeated until the thread does not migrate between two calls.
    let found = (0..1000).any(|_| {
        leave(&o, class, &[1]);
        told();
        let Owned::Another(object) = o.fast_path.allocate_grouped(64, 0) else { return false };
        assert_eq!(told(), [0, 0], "it is another's until it is handed out");
        // SAFETY: a stack of this instance gave out the object to this thread.
        let object = unsafe { o.fast_path.hand_out(object, GateSide::Outside) }.unwrap();
        let paid_back = told();
        // SAFETY: the object is the test's and holds two words. `give` checks the first one.
        unsafe { object.as_ptr().cast::<usize>().write(object.addr().get()) };
        o.give(class, object.as_ptr());
        assert!(matches!(paid_back, [0 | 1, 0]), "{paid_back:?}");
        paid_back == [1, 0]
    });
    assert!(found);
}

#[test]
fn each_paid_reports_cached_objects_once_on_every_node() {
    let o = Opened::new(Shared::new(Virtual::new(4096, 4).with_nodes(&[0, 1, 0, 1])), &CONFIG).unwrap();
    let classes = [Class::of_size(16), Class::of_size(1024)];
    for (cpu, class) in (0..4).flat_map(|cpu| classes.map(|class| (cpu, class))) {
        Virtual::run_on(cpu);
        leave(&o, class, &[7, 8, 7]);
    }
    let mut seen = BTreeMap::<_, u32>::new();
    o.each_paid(&mut |class, owner, objects| *seen.entry((class.size(), owner)).or_default() += objects);
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [((16, 7), 8), ((16, 8), 4), ((1024, 7), 8), ((1024, 8), 4)]);
    Virtual::run_on(0);
}

#[test]
fn block_above_largest_class_has_no_payer_again() {
    let Some(o) = rseq() else { return };
    Class::all().for_each(|class| leave(&o, class, &[1; 3]));
    for size in [LARGEST + 1, LARGEST + 16, LARGEST + 17, usize::MAX] {
        assert_eq!(o.fast_path.allocate_grouped(size, word_of(1)), Owned::Nothing, "{size}");
    }
}
