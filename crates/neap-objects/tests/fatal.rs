//! Objects in two places at once, as after two frees at the same moment. Each ends the process with
//! one line that names the object, before the program gets it twice.
//!
//! Each case runs in a process of its own.

mod instance;

use core::ptr::NonNull;
use instance::{CONFIG, Opened, machine};
use neap_base::gate::Inside;
use neap_objects::charged::GateSide;
use neap_objects::size_class::Class;
use neap_pages::Effort;
use neap_testing::again::{case as named_case, dies};
use neap_testing::virtual_platform::Virtual;

fn case(name: &str) {
    let (o, class) = (Opened::new(machine(2), &CONFIG).unwrap(), Class::of_size(64));
    let object = o.take(class).unwrap();
    if name == "handed out" {
        // SAFETY: the object lies in the arena. It is in no cache, which this call detects.
        unsafe { o.fast_path.hand_out(NonNull::new(object).unwrap(), GateSide::Outside) };
        return;
    }
    // The object is in two cells: of one stack, or of two CPUs' stacks.
    o.give(class, object);
    Virtual::run_on(usize::from(name == "slab gone"));
    Inside::assume(|inside| o.free(inside, class, object));
    match name {
        "given up" => assert_eq!(o.take(class), Some(object), "the program has one of the two"),
        "both given up" => {}
        "slab gone" => {
            assert!(o.drain_cpu(0, |_| true).is_some());
            assert_eq!(o.slabs_of(class).0, 0);
            // A run lies there now. Its length, where a slab's number was, is no slab's number.
            Class::all().for_each(|class| _ = o.trim_barn(class, Effort::Full, &|| false));
            o.pages.drain_all(&o.platform);
            let page = o.pages.pfn(object.addr());
            assert!([6000, 3000].iter().any(|&count| o.pages.allocate_run(&o.platform, count, 1).unwrap().pfn == page));
        }
        "accounted" => {
            let object = o.take(class).unwrap();
            // SAFETY: the object is the test's, of this instance.
            assert!(unsafe { o.fast_path.own(object, 7) || o.own_slowly(class, object, 7) });
        }
        other => panic!("no such case: {other}"),
    }
    o.drain();
}

fn dies_with(name: &str, line: &str) {
    let lines = dies("a_case", name, "");
    assert!(lines.iter().any(|said| said.starts_with("double free: ") && said.contains(line)), "{name}: {lines:?}");
}

/// Runs a case in the process that was started for it, and does nothing otherwise.
#[test]
fn a_case() {
    if let Some(name) = named_case() {
        case(&name);
    }
}

#[test]
fn what_is_in_no_cache_is_not_handed_out() {
    dies_with("handed out", "found before it was handed out again");
}

#[test]
fn what_the_program_has_does_not_go_back_into_its_slab() {
    dies_with("given up", "(64 bytes) was freed by two threads at once; found when a cache gave it up");
    dies_with("accounted", "(64 bytes) was freed by two threads at once; found when a cache gave it up");
}

#[test]
fn what_is_in_a_cache_twice_goes_back_once() {
    dies_with("both given up", "(64 bytes) was freed by two threads at once; found when a cache gave it up");
    dies_with("slab gone", "(64 bytes) was freed by two threads at once; found when a cache gave it up");
}
