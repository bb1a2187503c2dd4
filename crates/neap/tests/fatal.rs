//! Wrong frees: each ends the process by SIGABRT, at once or later, after one line that names the
//! error.
//!
//! Goal: every kind of wrong pointer is named, in every place that its memory may be in by then, in
//! both kinds of slots, and with or without a payer. An object that two threads free at the same
//! moment is never handed out twice. Method: each case is a process of its own, this program again.

mod program;

use core::ptr::{with_exposed_provenance_mut, without_provenance_mut};
use core::sync::atomic::{AtomicUsize, Ordering};
use neap::groups::GroupId;
use neap::mm::{Hooks, Mm};
use neap_base::Linux;
use neap_testing::again::{self, dies};
use neap_testing::child::status_in_child;
use neap_testing::random::number;
use neap_testing::shared::Shared;
use program::{Opened, linux};
use std::collections::BTreeSet;

type Manager = Opened<Shared<Linux>>;

/// Kinds of slots, with memory without a payer, and memory of a group.
const KINDS: [&str; 4] = ["rseq", "atomic", "rseq, in a group", "atomic, in a group"];

/// Opens a manager for a kind. The thread is in a group if the kind says so.
fn manager(kind: &str) -> Manager {
    let (machine, options) = linux(kind.starts_with("rseq"));
    let mm = Opened::new(machine, &options).unwrap();
    if kind.ends_with("in a group") {
        let group = mm.groups().unwrap().create(GroupId::ROOT, "wrong").unwrap();
        mm.enter(Some(group));
    }
    mm
}

fn free(mm: &Manager, pointer: *mut u8) {
    // SAFETY: unsound by design: the tested checks end the process at a wrong pointer.
    unsafe { mm.free(pointer) };
}

fn reallocate(mm: &Manager, pointer: *mut u8, size: usize) -> *mut u8 {
    // SAFETY: unsound by design: the tested checks end the process at a wrong pointer.
    unsafe { mm.reallocate(pointer, size) }
}

fn free_elsewhere(mm: &Manager, pointer: *mut u8) {
    let address = pointer.expose_provenance();
    std::thread::scope(|scope| _ = scope.spawn(move || free(mm, with_exposed_provenance_mut(address))));
}

/// Returns a freed object. Another one beside it keeps its slab.
fn freed(mm: &Manager, size: usize) -> *mut u8 {
    let (object, _kept) = (mm.allocate(size), mm.allocate(size));
    free(mm, object);
    object
}

fn case(name: &str, mm: &Manager) {
    let first = mm.allocate(100);
    match name {
        "twice" => free(mm, freed(mm, 64)),
        "twice, the largest" => free(mm, freed(mm, 32 << 10)),
        "twice, with others in between" => {
            let object = freed(mm, 64);
            (0..300).map(|_| mm.allocate(64)).collect::<Vec<_>>().into_iter().for_each(|other| {
                if other != object {
                    free(mm, other);
                }
            });
            // It may have been handed out again: then this is the first free of the new one.
            (0..2).for_each(|_| free(mm, object));
        }
        "twice, in a barn" => {
            let many: Vec<*mut u8> = (0..5000).map(|_| mm.allocate(64)).collect();
            many.iter().for_each(|object| free(mm, *object));
            free(mm, many[100]);
        }
        "twice, after a release" => {
            let object = freed(mm, 64);
            mm.release_all();
            free(mm, object);
        }
        "twice, after ticks" => {
            let object = freed(mm, 64);
            (1..4).for_each(|now| _ = mm.tick(now));
            free(mm, object);
        }
        "twice, after its slab is gone" => {
            let objects: Vec<*mut u8> = (0..2000).map(|_| mm.allocate(400)).collect();
            objects.iter().for_each(|object| free(mm, *object));
            mm.release_all();
            free(mm, objects[0]);
        }
        "twice, from another thread" => free_elsewhere(mm, freed(mm, 64)),
        "twice, from another thread after a release" => {
            let object = freed(mm, 64);
            mm.release_all();
            free_elsewhere(mm, object);
        }
        "twice, first on another thread" => {
            let (object, _kept) = (mm.allocate(64), mm.allocate(64));
            free_elsewhere(mm, object);
            free(mm, object);
        }
        "inside by a grain" => free(mm, mm.allocate(64).wrapping_add(16)),
        "inside by a byte" => free(mm, mm.allocate(64).wrapping_add(1)),
        "before the start" => {
            let highest = (0..8).map(|_| mm.allocate(3000)).max().unwrap();
            free(mm, highest.wrapping_sub(16));
        }
        "inside a free one" => free(mm, freed(mm, 64).wrapping_add(32)),
        "b11: of a slab that is another class's now" => {
            let object = mm.allocate(48);
            let other = loop {
                (0..3000).map(|_| mm.allocate(48)).collect::<Vec<_>>().into_iter().for_each(|object| free(mm, object));
                free(mm, object);
                mm.release_all();
                let other: Vec<*mut u8> = (0..600).map(|_| mm.allocate(5000)).collect();
                let around = |other: &&*mut u8| (1..5000).contains(&object.addr().wrapping_sub(other.addr()));
                if let Some(found) = other.iter().find(around) {
                    break *found;
                }
            };
            assert_ne!(other, object);
            free(mm, object);
        }
        "large, twice" => {
            let run = mm.allocate(1 << 20);
            free(mm, run);
            free(mm, run);
        }
        "large, twice, after a release" => {
            let (run, _kept) = (mm.allocate(1 << 20), mm.allocate(1 << 20));
            free(mm, run);
            mm.release_all();
            free(mm, run);
        }
        "large, inside by a page" => free(mm, mm.allocate(1 << 20).wrapping_add(4096)),
        "large, inside by a grain" => free(mm, mm.allocate(1 << 20).wrapping_add(16)),
        "large, from another thread" => {
            let run = mm.allocate(1 << 20);
            free_elsewhere(mm, run);
            free(mm, run);
        }
        "foreign, on the stack" => free(mm, (&raw mut *Box::new([0_u8; 64])).cast()),
        "foreign, low" => free(mm, without_provenance_mut(64)),
        "foreign, high" => free(mm, without_provenance_mut(usize::MAX - 15)),
        "foreign, never handed out" => free(mm, first.wrapping_add((3 << 20) + 5 * 4096)),
        "realloc of a freed one" => _ = reallocate(mm, freed(mm, 64), 100),
        "realloc to nothing of a freed one" => _ = reallocate(mm, freed(mm, 64), 0),
        "realloc of a large freed one" => {
            let run = mm.allocate(1 << 20);
            free(mm, run);
            _ = reallocate(mm, run, 2 << 20);
        }
        "realloc of a foreign one" => _ = reallocate(mm, without_provenance_mut(4096), 100),
        "realloc of an inside" => _ = reallocate(mm, mm.allocate(640).wrapping_add(160), 100),
        "size of a freed one" => _ = mm.usable_size(freed(mm, 64)),
        "size of an inside" => _ = mm.usable_size(mm.allocate(640).wrapping_add(16)),
        "before anything" => {
            let closed: Mm<Linux> = Mm::new(Hooks { open: |_| (), spawn: None, ticked: None });
            // SAFETY: the free of a foreign pointer ends the process.
            unsafe { closed.free(first) };
        }
        other => panic!("no such case: {other}"),
    }
}

#[test]
fn the_memory_of_cases_in_a_group_is_paid_for() {
    for kind in KINDS {
        let mm = manager(kind);
        let memory = [64, 32 << 10, 1 << 20].map(|size| mm.allocate(size));
        assert_eq!(mm.verify(0).unwrap().accounted, if kind.ends_with("in a group") { 2 } else { 0 }, "{kind}");
        memory.into_iter().for_each(|memory| free(&mm, memory));
        mm.leave(0);
    }
}

/// A test of a process of its own: runs only if told to.
#[test]
fn a_case() {
    if let Some(name) = again::case() {
        let (name, kind) = name.split_once('/').unwrap();
        let mm = manager(kind);
        case(name, &mm);
    }
}

fn dies_with(name: &str, start: &str, end: &str) {
    for kind in KINDS {
        let lines = dies("a_case", &format!("{name}/{kind}"), "");
        assert_eq!(lines.len(), 1, "{name}: {lines:?}");
        assert!(lines[0].starts_with(start) && lines[0].ends_with(end), "{name}: {lines:?}");
    }
}

#[test]
fn objects_that_are_freed_twice() {
    dies_with("twice", "double free: free: 0x", " (64 bytes) is free already, cached");
    dies_with("twice, the largest", "double free: free: 0x", " (32768 bytes) is free already, cached");
    dies_with("twice, with others in between", "double free: free: 0x", " (64 bytes) is free already, cached");
    dies_with("twice, in a barn", "double free: free: 0x", " (64 bytes) is free already, cached");
    dies_with("twice, after a release", "double free: free: 0x", " (64 bytes) is free already, in its slab");
    dies_with("twice, after ticks", "double free: free: 0x", " (64 bytes) is free already, in its slab");
    dies_with("twice, from another thread", "double free: free: 0x", " (64 bytes) is free already, cached");
    dies_with("twice, first on another thread", "double free: free: 0x", " (64 bytes) is free already, cached");
    let slab = " (64 bytes) is free already, in its slab";
    dies_with("twice, from another thread after a release", "double free: free: 0x", slab);
}

#[test]
fn double_free_after_slab_release_is_fatal() {
    let gone = "twice, after its slab is gone";
    dies_with(gone, "double free or bad pointer: free: the page at 0x", ", not allocated");
}

#[test]
fn b11_pointers_into_objects_of_this_or_another_class() {
    dies_with("inside by a grain", "interior pointer: free: 0x", " is 16 bytes into an object of 64 bytes");
    dies_with("inside by a byte", "interior pointer: free: 0x", " is 1 bytes into an object of 64 bytes");
    dies_with("before the start", "interior pointer: free: 0x", " is 3056 bytes into an object of 3072 bytes");
    dies_with("inside a free one", "interior pointer: free: 0x", " is 32 bytes into an object of 64 bytes");
    let other = "b11: of a slab that is another class's now";
    dies_with(other, "interior pointer: free: 0x", " bytes into an object of 5120 bytes");
}

#[test]
fn large_blocks() {
    dies_with("large, twice", "double free or bad pointer: free: the page at 0x", ", not allocated");
    dies_with("large, twice, after a release", "double free or bad pointer: free: the page at 0x", ", not allocated");
    dies_with("large, from another thread", "double free or bad pointer: free: the page at 0x", ", not allocated");
    dies_with("large, inside by a page", "double free or bad pointer: free: the page at 0x", ", not allocated");
    let inside = " is not the start of an allocation (page Run)";
    dies_with("large, inside by a grain", "interior or free pointer: free: 0x", inside);
}

#[test]
fn pointers_from_elsewhere() {
    for place in ["foreign, on the stack", "foreign, low", "foreign, high"] {
        dies_with(place, "free: 0x", " is not from this allocator");
    }
    let never = "foreign, never handed out";
    dies_with(never, "double free or bad pointer: free: the page at 0x", ", not allocated");
    let early = " is not from this allocator, which has not allocated anything yet";
    dies_with("before anything", "free: 0x", early);
}

#[test]
fn other_calls_than_free() {
    dies_with("realloc of a freed one", "double free: realloc: 0x", " (64 bytes) is free already, cached");
    dies_with("realloc to nothing of a freed one", "double free: realloc: 0x", " (64 bytes) is free already, cached");
    let large = "realloc of a large freed one";
    dies_with(large, "double free or bad pointer: realloc: the page at 0x", ", not allocated");
    dies_with("realloc of a foreign one", "realloc: 0x1000", " is not from this allocator");
    dies_with("realloc of an inside", "interior pointer: realloc: 0x", " is 160 bytes into an object of 640 bytes");
    dies_with("size of a freed one", "double free: malloc_usable_size: 0x", " (64 bytes) is free already, cached");
    dies_with(
        "size of an inside",
        "interior pointer: malloc_usable_size: 0x",
        " is 16 bytes into an object of 640 bytes",
    );
}

/// One try: two threads free one object at the same moment, then everything is allocated and freed.
/// The process must end before the object is handed out twice, whatever the threads saw.
fn free_at_once(kind: &str) -> ! {
    let mm = manager(kind);
    let (object, arrived) = (mm.allocate(64).expose_provenance(), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                // AcqRel: each thread starts from here after the other has arrived.
                arrived.fetch_add(1, Ordering::AcqRel);
                while arrived.load(Ordering::Acquire) < 2 {
                    core::hint::spin_loop();
                }
                free(&mm, with_exposed_provenance_mut(object));
            });
        }
    });
    // Neither free was caught: the object is in two cells now.
    let mut taken = BTreeSet::new();
    for cpu in [0, 1] {
        // SAFETY: all zeroes is a valid set, which is this function's; where there is no such CPU
        // nothing changes.
        unsafe {
            let mut set: libc::cpu_set_t = core::mem::zeroed();
            libc::CPU_SET(cpu, &mut set);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
        }
        for _ in 0..3000 {
            if !taken.insert(mm.allocate(64)) {
                println!("handed out twice");
                std::process::exit(1);
            }
        }
    }
    taken.into_iter().for_each(|object| free(&mm, object));
    mm.release_all();
    println!("not noticed");
    std::process::exit(2);
}

#[test]
fn a_try() {
    if let Some(kind) = again::case() {
        let tries = number("NEAP_TRIES", 100);
        for _ in 0..tries {
            // The child uses its own manager, and parts of the C library that fork leaves whole.
            let status = status_in_child(|| free_at_once(&kind));
            assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGABRT, "status {status:#x}");
        }
    }
}

/// Best effort: the machine decides how often the two threads meet.
#[test]
fn concurrent_double_free_never_yields_object_twice() {
    for kind in KINDS {
        let answer = again::again("a_try", kind, "");
        let error = String::from_utf8_lossy(&answer.stderr);
        assert!(answer.status.success(), "{}\n{}{error}", answer.status, String::from_utf8_lossy(&answer.stdout));
        let lines: Vec<&str> = error.lines().filter(|line| line.starts_with("neap: double free: ")).collect();
        let met = lines.iter().filter(|line| !line.ends_with("cached")).count();
        println!("{kind}: {met} of {} tries met", lines.len());
        assert_eq!(lines.len() as u64, number("NEAP_TRIES", 100), "{error}");
    }
}
