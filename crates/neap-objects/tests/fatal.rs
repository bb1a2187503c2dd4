//! Objects in two places at once, as two threads leave one that they free in the same nanoseconds: each ends the process with one line
//! that names the object, before the program has it twice.
//!
//! Each case runs in a process of its own: this test program again, told by a variable which case it is.

mod instance;
mod machine;

use core::ptr::NonNull;
use instance::{CONFIG, Opened, machine};
use neap_base::Order;
use neap_base::virtual_platform::Virtual;
use neap_objects::size_class::Class;
use std::process::Command;

const VARIABLE: &str = "NEAP_FATAL_CASE";

fn case(name: &str) {
    let (o, class) = (Opened::new(machine(2), &CONFIG).unwrap(), Class::of_size(64));
    let object = o.take(class).unwrap();
    if name == "handed out" {
        // SAFETY: it is not in the caller's hands, which is found.
        unsafe { o.hot.hand_out(NonNull::new(object).unwrap(), false) };
        return;
    }
    // In two cells: of one stack, or of two CPUs'.
    o.give(class, object);
    Virtual::run_on(usize::from(name == "slab gone"));
    o.free(class, object);
    match name {
        "given up" => assert_eq!(o.take(class), Some(object), "the program has one of the two"),
        "both given up" => {}
        "slab gone" => {
            assert!(o.drain_cpu(0, |_| true).is_some());
            assert_eq!(o.slabs_of(class).0, 0);
            // Something else lies there now.
            let page = o.pages.pfn(object.addr());
            let taken = |order| o.pages.allocate_block(&o.platform, Order(order)).unwrap().pfn == page;
            assert!((0..=4).flat_map(|order| [order; 100]).any(taken));
        }
        "accounted" => {
            let object = o.take(class).unwrap();
            // SAFETY: the object is the test's, of this instance.
            assert!(unsafe { o.hot.own(object, 7) || o.own_slowly(class, object, 7) });
        }
        other => panic!("no such case: {other}"),
    }
    o.drain();
}

fn dies_with(name: &str, line: &str) {
    let answer = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_case", "--nocapture"])
        .env(VARIABLE, name)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&answer.stderr).into_owned();
    let signal = std::os::unix::process::ExitStatusExt::signal(&answer.status);
    assert!(matches!(signal, Some(6 | 4)), "{name}: {text}");
    assert!(text.lines().any(|text| text.starts_with("neap: double free: ") && text.contains(line)), "{name}: {text}");
}

/// Runs a case where it is told to, and does nothing otherwise.
#[test]
fn a_case() {
    if let Ok(name) = std::env::var(VARIABLE) {
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
