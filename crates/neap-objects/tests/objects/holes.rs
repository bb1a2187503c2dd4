//! Holes: released pages of partly used slabs.
//!
//! Goal:
//! * Exactly those pages are released that were found empty at rest. No object in use loses a byte
//!   or lies in a hole. The counts agree with the kernel.
//! * A slab in use is left alone.
//! * Objects that come back while pages are released are found again.
//! * Objects with memory are handed out first.
//! * A release that the system refuses changes nothing.
//!
//! Method: virtual machines over real memory, whose calls fail on demand and let a test act in the
//! middle of a release. `/proc/self/pagemap` says which pages have memory. Every object in use is
//! written from end to end.

use crate::instance::{CONFIG, Opened, machine, resident};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use neap_objects::objects::Config;
use neap_objects::size_class::Class;
use neap_objects::slab::{Slab, SlabId};
use neap_pages::Effort;
use neap_testing::random::{Random, number, seed};
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::{Call, Virtual};
use std::collections::BTreeMap;
use std::sync::Arc;

type Instance = Opened<Shared<Virtual>>;

/// The test's objects: address to class.
type Held = BTreeMap<usize, Class>;

fn never() -> bool {
    false
}

fn pointer(address: usize) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut(address)
}

/// Takes an object and writes all of it.
fn take(o: &Instance, held: &mut Held, class: Class) -> Option<usize> {
    let object = o.take(class)?;
    // SAFETY: the object was just handed out. The first word, which `give` checks, is left alone.
    unsafe { object.add(8).write_bytes(object.addr() as u8 | 1, class.size() - 8) };
    assert!(held.insert(object.addr(), class).is_none());
    Some(object.addr())
}

fn give(o: &Instance, held: &mut Held, address: usize) {
    let class = held.remove(&address).expect("held");
    // SAFETY: the object is the test's and has `class.size()` bytes.
    let bytes = unsafe { core::slice::from_raw_parts(pointer(address).add(8), class.size() - 8) };
    assert!(bytes.iter().all(|&byte| byte == address as u8 | 1), "{address:#x} of {class:?} lost its contents");
    o.give(class, pointer(address));
}

/// Checks the contents of all objects of the test's.
fn check_contents(held: &Held) {
    for (&address, class) in held {
        // SAFETY: the objects are the test's and have `class.size()` bytes.
        let bytes = unsafe { core::slice::from_raw_parts(pointer(address).add(8), class.size() - 8) };
        assert!(bytes.iter().all(|&byte| byte == address as u8 | 1), "{address:#x} lost its contents");
    }
}

/// Every slab with an object of the test's: address of the first page, number of pages, holes.
fn slabs(o: &Instance, held: &Held) -> Vec<(usize, u32, u64)> {
    let mut slabs: Vec<(usize, u32, u64)> = held
        .keys()
        .map(|&address| {
            let slab = slab_of(o, address);
            (o.pages.address(slab.pfn), 1 << slab.order, slab.holes)
        })
        .collect();
    slabs.sort_unstable();
    slabs.dedup();
    slabs
}

/// Checks that no hole has memory and no object of the test's lies in one. Returns the number of
/// holes.
fn holes_are_holes(o: &Instance, held: &Held) -> usize {
    let page_size = o.pages.page_size();
    let mut sum = 0;
    for (start, pages, holes) in slabs(o, held) {
        for page in (0..pages).filter(|page| holes >> page & 1 == 1) {
            let address = start + page as usize * page_size;
            assert!(resident(address, page_size) == 0, "{address:#x} is to be a hole");
            let before = held.range(..address + page_size).next_back();
            assert!(before.is_none_or(|(at, class)| at + class.size() <= address), "an object in a hole");
            sum += 1;
        }
    }
    sum
}

/// Checks that the pages of the slabs with memory are exactly those with an object of the test's.
/// The waste at the end of a wholly used slab may have memory too.
fn nothing_but_what_is_held_is_there(o: &Instance, held: &Held) {
    let page_size = o.pages.page_size();
    for (start, pages, _) in slabs(o, held) {
        let full = slab_of(o, start).free == 0;
        for address in (0..pages as usize).map(|page| start + page * page_size) {
            let before = held.range(..address + page_size).next_back();
            let used = before.is_some_and(|(at, class)| at + class.size() > address);
            let there = resident(address, page_size) > 0;
            assert!(there == used || there && full, "page at {address:#x} of {:?}", slab_of(o, address));
        }
    }
}

/// The slab at an address.
#[expect(clippy::mut_from_ref, reason = "no other test uses the instance")]
fn slab_of(o: &Instance, address: usize) -> &mut Slab {
    let id = SlabId(o.pages.frames().frame(o.pages.pfn(address)).owner());
    // SAFETY: the test has the instance alone, and keeps no two results of this function.
    unsafe { o.slabs.get(id) }
}

/// Takes `count` objects of a class and frees all but every `keep`th.
fn sparse(o: &Instance, held: &mut Held, class: Class, count: usize, keep: usize) {
    let all: Vec<usize> = (0..count).map(|_| take(o, held, class).expect("there is memory")).collect();
    all.into_iter().enumerate().filter(|(n, _)| n % keep != 0).for_each(|(_, address)| give(o, held, address));
}

/// The work of a tick on slabs.
fn tick(o: &Instance) -> neap_pages::Report {
    o.punch(Effort::Sparing, &never)
}

fn end(o: &Instance, mut held: Held) {
    while let Some((&address, _)) = held.first_key_value() {
        give(o, &mut held, address);
    }
    o.drain();
    assert_eq!((o.prove().slabs, o.pages.statistics().holes), (0, 0));
}

#[test]
fn what_rests_for_a_tick_gives_all_its_empty_pages() {
    for (page_size, size) in [(4096, 48), (4096, 80), (4096, 512), (4096, 1000), (4096, 2048), (4096, 5000)]
        .into_iter()
        .chain([(4096, 20_000), (4096, 32_768), (16_384, 2048), (65_536, 20_000)])
    {
        let o = Opened::new(Shared::new(Virtual::new(page_size, 1).with_scarce_address_space()), &CONFIG).unwrap();
        let (mut held, class) = (Held::new(), Class::of_size(size));
        sparse(&o, &mut held, class, (4 << 20) / size, 40);
        assert_eq!(tick(&o).released, 0, "objects that are cached keep their pages");
        o.drain();
        let first = tick(&o);
        assert!(first.released == 0 && first.left, "what came back a moment ago was used: {first:?}");
        let second = tick(&o);
        assert!(second.released > 0 && !second.left, "{size} bytes on {page_size}: {second:?}");
        let pages: usize = o.pages.statistics().holes as usize;
        assert_eq!((holes_are_holes(&o, &held), second.released as usize), (pages, pages));
        nothing_but_what_is_held_is_there(&o, &held);
        o.prove();
        assert_eq!(tick(&o), neap_pages::Report::default(), "nothing is looked at twice");
        end(&o, held);
    }
}

#[test]
fn a_slab_that_is_used_in_every_interval_is_left_alone() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let (mut held, class) = (Held::new(), Class::of_size(1024));
    (0..640).for_each(|_| _ = take(&o, &mut held, class).unwrap());
    let whole = slabs(&o, &held);
    let in_slab = |held: &Held, start: usize| -> Vec<usize> {
        held.range(start..start + (32 << 10)).map(|(address, _)| *address).collect()
    };
    // Half of the pages of each slab are empty. Then one object comes back in every interval.
    for &(start, ..) in &whole {
        in_slab(&held, start).into_iter().take(16).for_each(|address| give(&o, &mut held, address));
    }
    for _ in 0..8 {
        for &(start, ..) in &whole {
            in_slab(&held, start).into_iter().take(1).for_each(|address| give(&o, &mut held, address));
        }
        o.drain();
        assert_eq!(tick(&o).released, 0);
    }
    assert!(tick(&o).released > 0, "now they have rested");
    nothing_but_what_is_held_is_there(&o, &held);
    end(&o, held);
}

#[test]
fn a_slab_that_is_taken_from_is_used() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let (mut held, class) = (Held::new(), Class::of_size(2048));
    sparse(&o, &mut held, class, 4 * 64, 64);
    o.drain();
    tick(&o);
    // The object comes with a sheaf of others, which leaves some in the slab.
    let taken = take(&o, &mut held, class).unwrap();
    assert!(slab_of(&o, taken).free > 16);
    assert!(tick(&o).released > 0, "the others have rested");
    assert_eq!(slab_of(&o, taken).holes, 0);
    assert!(tick(&o).released > 0 && slab_of(&o, taken).holes > 0, "and now it has");
    o.prove();
    end(&o, held);
}

#[test]
fn what_has_memory_is_handed_out_before_holes_are_filled() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let (mut held, class) = (Held::new(), Class::of_size(512));
    sparse(&o, &mut held, class, 4000, 20);
    o.drain();
    assert!(o.punch(Effort::Full, &never).released > 0);
    let slabs_before = o.slabs_of(class).0;
    let page_size = o.pages.page_size();
    let (backed, holes) = slabs(&o, &held).iter().fold((0, 0), |(backed, gone), &(.., pages, holes)| {
        (backed + pages - holes.count_ones(), gone + holes.count_ones())
    });
    let fitting = backed as usize * page_size / class.size() - held.len();
    let sheaf = class.sheaf_capacity() as usize;
    let (mut taken, populated) = (0, o.platform.made(Call::Populate));
    while o.pages.statistics().holes == holes {
        take(&o, &mut held, class).unwrap();
        taken += 1;
        assert!(taken <= fitting + 1, "holes are filled when nothing else is free");
    }
    // The other objects of the last sheaf are in the stack.
    assert!(taken + 2 * sheaf >= fitting, "{taken} of {fitting}");
    while o.pages.statistics().holes > 0 {
        take(&o, &mut held, class).unwrap();
    }
    o.prove();
    assert_eq!(o.slabs_of(class).0, slabs_before, "and holes before a new slab");
    let statistics = o.pages.statistics();
    assert_eq!((statistics.refilled, statistics.punched), (u64::from(holes), u64::from(holes)));
    let calls = o.platform.made(Call::Populate) - populated;
    assert!(calls > 0 && calls < holes as usize / 2, "{calls} calls for {holes} holes");
    check_contents(&held);
    end(&o, held);
}

/// P11: Objects that came back while a slab's pages were released were forgotten.
#[test]
fn p11_objects_freed_during_a_page_release_are_found_again() {
    for wholly in [false, true] {
        let o = Opened::new(machine(1), &CONFIG).unwrap();
        let (mut held, class) = (Held::new(), Class::of_size(2048));
        sparse(&o, &mut held, class, 640, 16);
        o.drain();
        tick(&o);
        let all: Vec<usize> = held.keys().copied().collect();
        // During the release every other survivor, or each, comes back, and objects are taken.
        let coming: Vec<usize> =
            all.iter().copied().enumerate().filter(|(n, _)| wholly || n % 2 == 0).map(|(_, a)| a).collect();
        let isolated = slabs(&o, &held);
        let (shared, given) = (core::ptr::from_ref(&o).expose_provenance(), Arc::new(AtomicUsize::new(0)));
        let (counter, addresses) = (Arc::clone(&given), coming.clone());
        *o.platform.on_release.lock().unwrap() = Some(Box::new(move || {
            if counter.fetch_add(1, Relaxed) > 0 {
                return;
            }
            // SAFETY: the instance outlives the hook, which is removed below.
            let o = unsafe { &*core::ptr::with_exposed_provenance::<Instance>(shared) };
            addresses.iter().for_each(|&address| o.give(class, pointer(address)));
            o.drain();
            // Objects handed out meanwhile lie elsewhere.
            let mut others = Held::new();
            (0..200).for_each(|_| _ = take(o, &mut others, class).unwrap());
            for &address in others.keys() {
                let meets = isolated
                    .iter()
                    .any(|(start, pages, _)| (*start..start + *pages as usize * 4096).contains(&address));
                assert!(!meets, "{address:#x} of a slab whose pages are on their way");
            }
            while let Some((&address, _)) = others.first_key_value() {
                give(o, &mut others, address);
            }
        }));
        assert!(tick(&o).released > 0);
        *o.platform.on_release.lock().unwrap() = None;
        assert!(given.load(Relaxed) > 0, "the window was met");
        coming.iter().for_each(|address| _ = held.remove(address));
        o.drain();
        if !wholly {
            assert!(tick(&o).released > 0, "they are looked at again");
        }
        while tick(&o).left {}
        o.prove();
        holes_are_holes(&o, &held);
        nothing_but_what_is_held_is_there(&o, &held);
        assert_eq!(o.slabs_of(class).0 == 0, wholly);
        end(&o, held);
    }
}

/// Every order of four actions during a release: frees of objects, a drain, an allocation, another
/// pass.
#[test]
fn whatever_happens_in_the_window_of_a_release() {
    const ACTIONS: usize = 5;
    for script in 0..ACTIONS.pow(4) {
        let o = Opened::new(machine(2), &CONFIG).unwrap();
        let class = Class::of_size(2048);
        let mut held = Held::new();
        // Two slabs with four objects in use each.
        sparse(&o, &mut held, class, 2 * 64, 16);
        o.drain();
        tick(&o);
        let world = Box::new((core::ptr::from_ref(&o).expose_provenance(), core::cell::Cell::new(script)));
        let held_at = core::ptr::from_mut(&mut held).expose_provenance();
        let (instance, first) = (world.0, AtomicUsize::new(0));
        *o.platform.on_release.lock().unwrap() = Some(Box::new(move || {
            if first.fetch_add(1, Relaxed) > 0 {
                return;
            }
            // SAFETY: both outlive the hook, and the thread that owns them is inside `punch`,
            // called by `tick`, and uses neither `held` nor an exclusive reference.
            let (o, held) = unsafe {
                (
                    &*core::ptr::with_exposed_provenance::<Instance>(instance),
                    &mut *core::ptr::with_exposed_provenance_mut::<Held>(held_at),
                )
            };
            let mut left = script;
            for _ in 0..4 {
                Virtual::run_on(left % 2);
                match left % ACTIONS {
                    0 => give(o, held, *held.first_key_value().unwrap().0),
                    1 => give(o, held, *held.last_key_value().unwrap().0),
                    2 => o.drain(),
                    3 => _ = take(o, held, class).unwrap(),
                    _ => assert_eq!(o.punch(Effort::Full, &never).released, 0, "one thread at a time"),
                }
                left /= ACTIONS;
            }
        }));
        assert!(tick(&o).released > 0);
        *o.platform.on_release.lock().unwrap() = None;
        o.prove();
        holes_are_holes(&o, &held);
        o.drain();
        o.punch(Effort::Full, &never);
        o.prove();
        nothing_but_what_is_held_is_there(&o, &held);
        check_contents(&held);
        end(&o, held);
    }
}

/// Isolated pages were not available, and an allocation failed for it.
#[test]
fn an_allocation_about_to_fail_waits_for_pages_on_their_way() {
    let budget = 96;
    let config = Config { budget: Some(budget), list_high: Some(0), ..CONFIG };
    let o = Opened::new(machine(1), &config).unwrap();
    let (mut held, class) = (Held::new(), Class::of_size(512));
    while take(&o, &mut held, class).is_some() {}
    let all: Vec<usize> = held.keys().copied().collect();
    all.iter().enumerate().filter(|(n, _)| n % 20 != 0).for_each(|(_, &address)| give(&o, &mut held, address));
    o.drain();
    tick(&o);
    o.platform.really_sleeps.store(true, Relaxed);
    let (entered, inside) = std::sync::mpsc::channel();
    let (go_on, waited) = std::sync::mpsc::channel::<()>();
    *o.platform.on_release.lock().unwrap() = Some(Box::new(move || {
        entered.send(()).expect("the test listens");
        let _ = waited.recv_timeout(core::time::Duration::from_secs(60));
    }));
    std::thread::scope(|scope| {
        let o = &o;
        let releaser = scope.spawn(move || tick(o));
        inside.recv().expect("a release begins");
        let before = o.platform.pauses.load(Relaxed);
        let allocator = scope.spawn(move || o.take(class).map(|object| object.addr()));
        while o.platform.pauses.load(Relaxed) == before && !allocator.is_finished() {
            std::thread::yield_now();
        }
        *o.platform.on_release.lock().unwrap() = None;
        go_on.send(()).expect("the release waits");
        assert!(releaser.join().unwrap().released > 0);
        let object = allocator.join().unwrap().expect("it waited");
        o.give(class, pointer(object));
    });
    o.drain();
    o.prove();
    end(&o, held);
}

/// A limit counts resident memory only.
#[test]
fn holes_make_room_and_filling_them_takes_it() {
    let budget = 512;
    let config = Config { budget: Some(budget), list_high: Some(0), ..CONFIG };
    let o = Opened::new(machine(1), &config).unwrap();
    let (mut held, small, large) = (Held::new(), Class::of_size(512), Class::of_size(4096));
    while take(&o, &mut held, small).is_some() {}
    let all: Vec<usize> = held.keys().copied().collect();
    all.iter().enumerate().filter(|(n, _)| n % 30 != 0).for_each(|(_, &address)| give(&o, &mut held, address));
    o.drain();
    assert!(o.take(large).is_none(), "all pages are in slabs");
    let holes = o.punch(Effort::Full, &never).released;
    assert!(holes > budget / 2);
    let mut others = Held::new();
    while take(&o, &mut others, large).is_some() {}
    assert!(others.len() as u32 > holes / 2, "{} of {holes}", others.len());
    // The holes cannot be filled now, but objects with memory are available.
    let mut more = Held::new();
    while take(&o, &mut more, small).is_some() {}
    let left = o.pages.statistics();
    assert!(left.holes > holes / 2 && left.used <= budget, "{left:?}");
    check_contents(&held);
    // With more room, more objects are available.
    while let Some((&address, _)) = others.first_key_value() {
        give(&o, &mut others, address);
    }
    o.drain();
    while take(&o, &mut more, small).is_some() {}
    assert_eq!(o.pages.statistics().holes, 0);
    assert!(more.len() + held.len() + 64 >= all.len());
    o.drain();
    o.prove();
    end(&o, held.into_iter().chain(more).collect());
}

#[test]
fn where_the_system_refuses_nothing_has_happened() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let (mut held, class) = (Held::new(), Class::of_size(1024));
    sparse(&o, &mut held, class, 4000, 20);
    o.drain();
    for call in [Call::Release, Call::ReleaseScattered] {
        o.platform.fail(call, 0, usize::MAX);
    }
    tick(&o);
    let refused = tick(&o);
    assert!(refused.released == 0 && refused.failed > 0 && !refused.left, "{refused:?}");
    assert_eq!((holes_are_holes(&o, &held), o.pages.statistics().holes), (0, 0));
    o.prove();
    let calls = o.platform.made(Call::Release);
    (0..20).for_each(|_| _ = tick(&o));
    assert!(o.platform.made(Call::Release) <= calls + 1, "it is not asked all the time");
    // One range at a time succeeds, for some of them; then all.
    o.platform.fail(Call::Release, 3, 1);
    let some = o.punch(Effort::Full, &never);
    assert!(some.released > 0 && some.failed > 0, "{some:?}");
    assert_eq!(holes_are_holes(&o, &held), some.released as usize);
    o.prove();
    o.platform.fail(Call::Release, 0, 0);
    o.platform.fail(Call::ReleaseScattered, 0, 0);
    o.punch(Effort::Full, &never);
    o.punch(Effort::Full, &never);
    nothing_but_what_is_held_is_there(&o, &held);
    o.prove();
    // Memory that cannot be populated comes when it is touched.
    o.platform.fail(Call::Populate, 0, usize::MAX);
    (0..4000).for_each(|_| _ = take(&o, &mut held, class).unwrap());
    check_contents(&held);
    o.platform.fail(Call::Populate, 0, 0);
    end(&o, held);
}

/// A fork waits for a pass, which ends between two calls. The rest is released the next time.
#[test]
fn a_pass_that_is_stopped_goes_on_the_next_time() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let (mut held, class) = (Held::new(), Class::of_size(2048));
    sparse(&o, &mut held, class, 40_000, 20);
    o.drain();
    tick(&o);
    assert_eq!(o.punch(Effort::Sparing, &|| true), neap_pages::Report { left: true, ..neap_pages::Report::default() });
    let looks = core::cell::Cell::new(0);
    let some = o.punch(Effort::Sparing, &|| looks.replace(looks.get() + 1) == 1);
    assert!(some.released > 0 && some.left && some.calls == 1, "{some:?}");
    o.prove();
    let rest = tick(&o);
    assert!(rest.released > some.released && !rest.left, "{rest:?}");
    nothing_but_what_is_held_is_there(&o, &held);
    end(&o, held);
}

/// Random actions, with calls that fail, on one node and on two.
#[test]
fn holes_are_what_the_kernel_says_after_any_history() {
    let mut random = Random(seed());
    for round in 0..number("NEAP_CASES", 12) {
        let page_size = [4096, 4096, 16_384][random.below(3)];
        let machine = Virtual::new(page_size, 4).with_scarce_address_space();
        let machine = if random.below(2) == 0 { machine } else { machine.with_nodes(&[0, 1, 0, 1]) };
        let o = Opened::new(Shared::new(machine), &CONFIG).unwrap();
        let sizes = [16, 48, 80, 512, 720, 1024, 2048, 3000, 10_000, 24_000, 32_768];
        let classes: Vec<Class> = (0..3).map(|_| Class::of_size(sizes[random.below(sizes.len())])).collect();
        let mut held = Held::new();
        for _ in 0..60 {
            Virtual::run_on(random.below(4));
            let class = classes[random.below(3)];
            match random.below(8) {
                0 | 1 => (0..random.below((2 << 20) / class.size().max(64))).for_each(|_| {
                    let _ = take(&o, &mut held, class);
                }),
                2 | 3 => {
                    let keep = 1 + random.below(30);
                    let gone: Vec<usize> = held.keys().copied().filter(|_| random.below(keep + 1) > 0).collect();
                    gone.into_iter().for_each(|address| give(&o, &mut held, address));
                }
                4 => o.drain(),
                5 => {
                    let call = [Call::Release, Call::ReleaseScattered, Call::Populate][random.below(3)];
                    o.platform.fail(call, random.below(3), random.below(3));
                }
                _ => _ = o.punch(if random.below(4) == 0 { Effort::Full } else { Effort::Sparing }, &never),
            }
            o.prove();
            holes_are_holes(&o, &held);
        }
        for call in [Call::Release, Call::ReleaseScattered, Call::Populate] {
            o.platform.fail(call, 0, 0);
        }
        o.drain();
        // A range that the system refused at first is released the second time.
        (0..2).for_each(|_| _ = o.punch(Effort::Full, &never));
        println!("round {round}: {} held, {} holes", held.len(), o.pages.statistics().holes);
        nothing_but_what_is_held_is_there(&o, &held);
        o.prove();
        check_contents(&held);
        end(&o, held);
    }
}

/// Threads allocate and free beside a thread that runs passes all the time.
#[test]
fn threads_beside_a_worker_lose_nothing() {
    let seed = seed();
    let o = Opened::new(machine(4), &CONFIG).unwrap();
    let done = AtomicUsize::new(0);
    const THREADS: usize = 3;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (o, done) = (&o, &done);
            scope.spawn(move || {
                Virtual::run_on(thread);
                let (mut random, mut held) = (Random(seed + thread as u64), Held::new());
                for step in 0..60 {
                    let class = Class::of_size([512, 1024, 2048][random.below(3)]);
                    (0..400).for_each(|_| _ = take(o, &mut held, class).unwrap());
                    let gone: Vec<usize> = held.keys().copied().filter(|_| random.below(20) > 0).collect();
                    gone.into_iter().for_each(|address| give(o, &mut held, address));
                    if step % 5 == 0 {
                        _ = o.drain_cpu(thread, |_| true);
                        _ = o.trim_barn(class, Effort::Full, &never);
                    }
                    check_contents(&held);
                }
                while let Some((&address, _)) = held.first_key_value() {
                    give(o, &mut held, address);
                }
                done.fetch_add(1, Relaxed);
            });
        }
        let mut released = 0;
        while done.load(Relaxed) < THREADS {
            released += o.punch(Effort::Full, &never).released;
        }
        assert!(released > 0);
        println!("{released} pages released, {} filled again", o.pages.statistics().refilled);
    });
    o.drain();
    assert_eq!((o.prove().slabs, o.pages.statistics().holes), (0, 0));
}
