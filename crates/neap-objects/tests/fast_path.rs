//! The assembly of malloc's and free's fast paths.
//!
//! Goal:
//! * A size leads to the stack of its own class. Sizes above the largest are refused.
//! * All sizes are refused once a thread has entered something, except by the call for threads that
//!   have entered nothing.
//! * An object is taken only if it is cached and not charged; otherwise it stays where it is.
//! * A free finds the stack of the object's class, and refuses pointers that are no objects of the
//!   program's.
//!
//! Method: stacks with one object of each class, and with states that they should not hold, on the
//! real machine, on one CPU.

mod instance;

use instance::{Opened, rseq};
use neap_base::gate::Inside;
use neap_base::{Linux, Platform};
use neap_objects::charged::{GateSide, Owned};
use neap_objects::cpu_caches::Attempt;
use neap_objects::fast_path::FreeOutcome;
use neap_objects::region::StackId;
use neap_objects::size_class::{Class, GRAIN, LARGEST};
use neap_testing::shared::Shared;

/// The real machine, and a thread that stays on its CPU.
fn opened() -> Option<Opened<Shared<Linux>>> {
    // SAFETY: a set of CPUs may be all zeroes, and the calls access only the set.
    unsafe {
        let mut set: libc::cpu_set_t = core::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu() as usize, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set), 0);
    }
    rseq()
}

/// Repeats a call that may be interrupted. Several refusals in a row are no coincidence.
fn allocate<P: Platform>(o: &Opened<P>, size: usize) -> Option<*mut u8> {
    (0..100).find_map(|_| o.fast_path.allocate(size)).map(|object| object.as_ptr())
}

/// Repeats a call for a thread that has entered nothing.
fn allocate_ungrouped<P: Platform>(o: &Opened<P>, size: usize) -> Option<*mut u8> {
    (0..100).find_map(|_| o.fast_path.allocate_ungrouped(size)).map(|object| object.as_ptr())
}

/// Runs `test` with an object of 64 bytes on this CPU's stack. The object is the program's
/// afterwards.
fn with_an_object_of_64(test: impl FnOnce(&Opened<Shared<Linux>>, *mut u8)) {
    let Some(o) = opened() else { return };
    let class = Class::of_size(64);
    let object = o.take(class).unwrap();
    o.give(class, object);
    test(&o, object);
    o.give(class, object);
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

#[test]
fn a_size_leads_to_the_stack_of_its_class() {
    let Some(o) = opened() else { return };
    for class in Class::all() {
        let object = o.take(class).unwrap();
        o.give(class, object);
    }
    for size in 0..=LARGEST {
        let class = Class::of_size(size);
        let object = allocate(&o, size).unwrap_or_else(|| panic!("nothing of {size} bytes"));
        assert_eq!(o.class_at(object), Some(class), "size {size}");
        assert!(o.is_allocated(object) && o.fast_path.free(object.wrapping_add(GRAIN / 2)) == FreeOutcome::NotFastPath);
        let inside = object.wrapping_add(GRAIN / 2);
        assert_eq!([object, inside].map(|pointer| o.fast_path.class_of(pointer)), [Some(class), None]);
        let before = o.cpu_caches.count(&o.platform, o.platform.cpu(), StackId::local(class));
        if o.fast_path.free(object) == FreeOutcome::CacheFull {
            Inside::assume(|inside| o.free(inside, class, object));
        }
        assert!(o.is_cached(object) && o.fast_path.free(object) == FreeOutcome::NotFastPath);
        assert_eq!(o.fast_path.class_of(object), None, "it is not the program's any more");
        assert_eq!(o.cpu_caches.count(&o.platform, o.platform.cpu(), StackId::local(class)), before + 1, "size {size}");
    }
    let outside = [core::ptr::null(), (&raw const o).cast(), core::ptr::without_provenance(usize::MAX)];
    assert_eq!(outside.map(|pointer| o.fast_path.class_of(pointer)), [None; 3]);
    for size in [LARGEST + 1, 1 << 32, usize::MAX] {
        assert!(allocate(&o, size).is_none() && allocate_ungrouped(&o, size).is_none(), "{size} bytes");
    }
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}

#[test]
fn group_check_refuses_unchecked_calls_and_serves_ungrouped() {
    with_an_object_of_64(|o, object| {
        o.fast_path.enable_group_check();
        assert!(allocate(o, 64).is_none() && !o.fast_path.serves_unchecked() && o.fast_path.serves_ungrouped());
        assert_eq!(allocate_ungrouped(o, 64), Some(object));
    });
}

#[test]
fn counting_all_calls_ends_unless_group_check_is_enabled() {
    with_an_object_of_64(|o, object| {
        assert!(!o.fast_path.counts(64));
        o.fast_path.count_all();
        assert!(allocate(o, 64).is_none() && o.fast_path.serves_ungrouped());
        assert!(o.fast_path.counts(64) && o.fast_path.counts(LARGEST) && !o.fast_path.counts(LARGEST + 1));
        o.fast_path.count_none();
        assert!(!o.fast_path.counts(64));
        assert_eq!(allocate(o, 64), Some(object));
        assert_eq!(o.fast_path.free(object), FreeOutcome::Cached);
        o.fast_path.count_all();
        o.fast_path.enable_group_check();
        assert!(!o.fast_path.counts(64), "the thread's word comes first");
        o.fast_path.count_all();
        o.fast_path.count_none();
        assert!(allocate(o, 64).is_none() && !o.fast_path.serves_unchecked() && !o.fast_path.counts(64));
        assert_eq!(allocate_ungrouped(o, 64), Some(object));
    });
}

#[test]
fn disabled_ungrouped_fast_path_serves_only_grouped_threads() {
    with_an_object_of_64(|o, object| {
        o.fast_path.disable_ungrouped_fast_path();
        assert!(allocate(o, 64).is_none() && allocate_ungrouped(o, 64).is_none());
        assert!(!o.fast_path.serves_unchecked() && !o.fast_path.serves_ungrouped());
        let entered = (0..100).map(|_| o.fast_path.allocate_grouped(64, 1)).find(|owned| *owned != Owned::Nothing);
        let Some(Owned::Another(popped)) = entered else { panic!("an owner that was entered is served") };
        assert_eq!(popped.as_ptr(), object);
        // SAFETY: this thread just popped the object, which is marked as cached.
        assert_eq!(unsafe { o.fast_path.hand_out(popped, GateSide::Outside) }, Some(popped));
    });
}

#[test]
fn an_object_that_is_not_cached_stays_where_it_is() {
    let Some(o) = opened() else { return };
    let class = Class::of_size(64);
    let (stack, cpu) = (StackId::local(class), o.platform.cpu());
    let [object, another] = [(); 2].map(|()| o.take(class).unwrap());
    o.give(class, another);
    let before = o.cpu_caches.count(&o.platform, cpu, stack);
    // The result of two frees at the same moment.
    assert_eq!(o.cpu_caches.push(&o.platform, stack, object), Attempt::Done(()));
    assert!(allocate(&o, 64).is_none(), "the program has it");
    assert_eq!(o.cpu_caches.count(&o.platform, cpu, stack), before + 1);
    assert_eq!(o.cpu_caches.pop(&o.platform, class), Attempt::Done(object));
    assert_eq!(allocate(&o, 64), Some(another));
    o.give(class, another);
    o.give(class, object);
    o.drain();
    assert_eq!(o.prove().slabs, 0);
}
