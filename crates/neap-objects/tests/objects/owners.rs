//! Owners of objects.
//!
//! Goal: an object's owner is the one set last, from any thread and CPU, regardless of its
//! neighbours. Objects without an owner behave as before. A page has a vector only if it has
//! several owners. All vectors are gone when everything is free, also if slabs hold vectors for
//! each other. A failed allocation of a vector changes nothing.
//!
//! Method: virtual machines of every page size against a model; real threads on real sequences; a
//! verification after everything.

use crate::instance::{CONFIG, Opened, machine, rseq};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use neap_base::gate::Inside;
use neap_base::{Order, Platform};
use neap_objects::charged::{GateSide, Owned};
use neap_objects::fast_path::FreeOutcome;
use neap_objects::objects::Config;
use neap_objects::payers::word_of;
use neap_objects::size_class::Class;
use neap_pages::Effort;
use neap_testing::random::{Random, number, seed};
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::{Call, Virtual};
use std::collections::BTreeMap;
use std::sync::{Barrier, mpsc};

type Instance = Opened<Shared<Virtual>>;

/// The test's objects: address to class and owner, 0 for none.
type Held = BTreeMap<usize, (Class, u64)>;

fn pointer(address: usize) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut(address)
}

/// Sets an object's owner as an allocation does. Returns `false` if there is no memory for a
/// vector.
fn own<P: Platform>(o: &Opened<P>, class: Class, object: *mut u8, owner: u64) -> bool {
    let before = payer(o, object);
    // SAFETY: the object is the test's, of this instance, and owners are small numbers from 1 on.
    let owned = unsafe { o.fast_path.own(object, owner) || o.own_slowly(class, object, owner) };
    if owned {
        before.inspect(|&before| o.ledger.repay(class, before, 1));
        o.ledger.charge(class, owner);
    }
    owned
}

/// Allocates a charged object, by the fast path if possible. Returns it, and whether it was paid
/// for already.
fn take_owned<P: Platform>(o: &Opened<P>, class: Class, owner: u64) -> (*mut u8, bool) {
    let (object, again) = match o.fast_path.allocate_grouped(class.size(), word_of(owner)) {
        Owned::Again(object) => (object.as_ptr(), true),
        Owned::Another(object) => {
            // SAFETY: a stack of this instance gave out the object to this thread.
            let object = unsafe { o.fast_path.hand_out(object, GateSide::Outside) };
            (object.expect("it was cached").as_ptr(), false)
        }
        Owned::Nothing => (o.take(class).expect("there is memory"), false),
    };
    assert_eq!((o.is_allocated(object), o.is_accounted(object)), (true, again), "{object:p}");
    assert_eq!(payer(o, object), again.then_some(owner), "{object:p}");
    assert!(again || own(o, class, object, owner));
    // SAFETY: the object was just handed out and holds at least two words. `give` checks the first
    // one.
    unsafe { object.cast::<usize>().write(object.addr()) };
    (object, again)
}

fn payer<P: Platform>(o: &Opened<P>, object: *mut u8) -> Option<u64> {
    // SAFETY: the object is the test's, of this instance.
    unsafe { o.fast_path.payer(object) }
}

/// Frees an object as a program does, and returns its owner; 0 for none.
fn give<P: Platform>(o: &Opened<P>, class: Class, object: *mut u8) -> u64 {
    let paid = payer(o, object).unwrap_or(0);
    assert_eq!((o.is_allocated(object), o.is_accounted(object)), (true, paid != 0), "{object:p}");
    o.give(class, object);
    paid
}

/// Checks that exactly the test's objects have owners, and the right ones, and that owners pay for
/// exactly these and the cached ones.
fn check(o: &Instance, held: &Held) {
    let (mut seen, mut paid, mut kept) = (BTreeMap::new(), BTreeMap::new(), 0);
    o.each_accounted(&mut |class, object, owner| {
        *paid.entry((class, owner)).or_default() += 1;
        if o.is_accounted(object) {
            assert!(seen.insert(object.addr(), (class, owner)).is_none(), "{object:p} twice");
        } else {
            assert!(o.is_cached(object), "{object:p}");
            kept += 1;
        }
    });
    let owned: Held = held.iter().filter(|(_, (_, owner))| *owner != 0).map(|(at, what)| (*at, *what)).collect();
    assert_eq!(seen, owned);
    assert_eq!(o.ledger.all(), paid);
    let census = o.prove();
    let objects = (census.allocated, census.accounted, census.paid);
    assert_eq!(objects, (held.len() as u64, owned.len() as u64, kept));
    let mut met = 0;
    o.each_paid(&mut |class, owner, objects| {
        assert!(paid[&(class, owner)] >= objects);
        met += u64::from(objects);
    });
    assert_eq!(met, kept, "what caches keep");
}

#[test]
fn each_paid_holds_no_lock_in_callback_and_survives_a_drain() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let class = Class::of_size(64);
    let mut held = Held::new();
    for _ in 0..20_000 {
        let object = o.take(class).unwrap();
        let owner = in_turn(object.addr(), 64, 1);
        assert!(own(&o, class, object, owner));
        held.insert(object.addr(), (class, owner));
    }
    held.iter().for_each(|(&address, &(_, owner))| assert_eq!(give(&o, class, pointer(address)), owner));
    let mut calls = 0;
    o.each_paid(&mut |class, owner, objects| {
        assert!(o.caches_of(class).all(|cache| cache.try_lock().is_some()), "a lock is held");
        assert!((1..=2).contains(&owner) && (1..=64).contains(&objects), "{objects} objects of {owner} at a time");
        calls += 1;
    });
    assert!(calls >= 2 * 20_000 / 64, "{calls} calls");
    let mut left = 0;
    o.each_paid(&mut |_, _, objects| {
        left += objects;
        o.drain();
    });
    assert!(left <= 64, "{left} objects were met, and one drain took them all");
    check(&o, &Held::new());
}

/// The owner of an object if neighbours are to have different owners: `owners` or the next one.
fn in_turn(address: usize, size: usize, owners: u64) -> u64 {
    owners + (address / size % 2) as u64
}

/// Frees everything. There is no vector and no slab then.
fn end(o: &Instance, held: Held) {
    held.into_iter().for_each(|(address, (class, owner))| assert_eq!(give(o, class, pointer(address)), owner));
    check(o, &Held::new());
    o.drain();
    let census = o.prove();
    assert_eq!((census.vectors, o.vector_bytes(), census.slabs), (0, 0, 0), "{census:?}");
    assert!(o.ledger.all().is_empty(), "all are paid back");
}

/// Number of pages on which objects of `wanted` owners start.
fn pages(held: &Held, wanted: impl Fn(u64) -> bool) -> usize {
    let mut pages: Vec<usize> = held.iter().filter(|(_, of)| wanted(of.1)).map(|(address, _)| address / 4096).collect();
    pages.dedup();
    pages.len()
}

/// Number of pages on which several objects start.
fn shared_pages(held: &Held) -> usize {
    let mut objects = BTreeMap::<usize, usize>::new();
    held.keys().for_each(|address| *objects.entry(address / 4096).or_default() += 1);
    objects.values().filter(|objects| **objects > 1).count()
}

/// Checks that there are `vectors` vectors of `of` bytes, and no others.
fn bytes<P: Platform>(o: &Opened<P>, vectors: usize, of: usize) {
    assert_eq!(o.vector_bytes(), (vectors * Class::of_size(of).size()) as u64);
}

#[test]
fn owner_is_the_last_payer_after_random_operations() {
    let mut random = Random(seed());
    let steps = number("NEAP_STEPS", 6000);
    for page_size in [4096, 16_384, 65_536] {
        let o = Opened::new(Shared::new(Virtual::new(page_size, 3).with_scarce_address_space()), &CONFIG).unwrap();
        let mut held = Held::new();
        // Vectors of some of these classes are objects of some of these classes, so slabs hold
        // vectors for each other.
        let sizes = [16, 24, 32, 48, 80, 112, 512, 704, 1024, 1280, 2048, 3000, 4096, 9000, 20_000, 32_768];
        for step in 0..steps {
            Virtual::run_on(random.below(3));
            let any = |held: &Held, random: &mut Random| {
                let address = *held.keys().nth(random.below(held.len())).unwrap();
                (address, held[&address])
            };
            match random.below(if held.len() < 1500 { 100 } else { 200 }) {
                0..50 => {
                    let class = Class::of_size(sizes[random.below(sizes.len())]);
                    for _ in 0..=random.below(8) {
                        let owner = random.below(4) as u64;
                        let object = if owner == 0 { o.take(class).unwrap() } else { take_owned(&o, class, owner).0 };
                        assert!(held.insert(object.addr(), (class, owner)).is_none());
                    }
                }
                50..60 if !held.is_empty() => {
                    // Another owner pays, or the first one again.
                    let (address, (class, _)) = any(&held, &mut random);
                    let owner = 1 + random.below(5) as u64;
                    assert!(own(&o, class, pointer(address), owner));
                    held.insert(address, (class, owner));
                }
                60 => (0..3).for_each(|cpu| assert!(o.drain_cpu(cpu, |_| true).is_some())),
                61 => o.drain(),
                62 | 63 => _ = o.punch(if random.below(2) == 0 { Effort::Full } else { Effort::Sparing }, &|| false),
                64 => {
                    let class = Class::of_size(sizes[random.below(sizes.len())]);
                    let all: Vec<usize> = held.iter().filter(|(_, of)| of.0 == class).map(|(at, _)| *at).collect();
                    for address in all {
                        assert_eq!(give(&o, class, pointer(address)), held.remove(&address).unwrap().1);
                    }
                }
                _ if !held.is_empty() => {
                    let (address, (class, owner)) = any(&held, &mut random);
                    assert_eq!(give(&o, class, pointer(address)), owner);
                    held.remove(&address);
                }
                _ => {}
            }
            if step % 200 == 0 {
                check(&o, &held);
            }
        }
        check(&o, &held);
        end(&o, held);
    }
}

#[test]
fn page_with_one_owner_needs_no_vector_else_8_bytes_per_object() {
    for (size, on_a_page) in [(16, 256), (64, 64), (1024, 4), (2048, 2)] {
        let o = Opened::new(machine(1), &CONFIG).unwrap();
        let class = Class::of_size(size);
        let mut held: Held = (0..40 * on_a_page).map(|_| (o.take(class).unwrap().addr(), (class, 0))).collect();
        assert_eq!(o.vector_bytes(), 0, "no group pays for anything");
        let mut owned_by = |of: fn(usize) -> u64| {
            for (&address, (_, owner)) in held.iter_mut().filter(|(address, _)| **address / 4096 % 2 == 0) {
                *owner = of(address);
                assert!(own(&o, class, pointer(address), *owner));
            }
            check(&o, &held);
            o.vector_bytes()
        };
        assert_eq!(owned_by(|page| (page / 4096) as u64), 0, "one for each page");
        owned_by(|object| object as u64);
        bytes(&o, pages(&held, |owner| owner != 0), 8 * on_a_page);
        end(&o, held);
    }
}

/// A slab of 2 KiB objects and one of 16 bytes: each has the vectors of the other's pages.
#[test]
fn slabs_that_hold_vectors_for_each_other_go_all_the_same() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let (small, large) = (Class::of_size(16), Class::of_size(2048));
    let mut held = Held::new();
    let mut take = |class: Class| {
        let object = o.take(class).unwrap();
        held.insert(object.addr(), (class, 2));
        object
    };
    let objects = [(small, take(small)), (large, take(large))];
    for owner in [1, 2] {
        objects.iter().for_each(|&(class, object)| assert!(own(&o, class, object, owner)));
    }
    let slab = |object: usize| o.pages.frames().frame(o.pages.pfn(object)).owner();
    // Each class has one slab, so the vectors can lie nowhere else.
    let (census, slabs) = (o.prove(), objects.map(|(_, object)| slab(object.addr())));
    assert_eq!((census.vectors, slabs[0] != slabs[1]), (2, true));
    assert_eq!([small, large].map(|class| o.slabs_of(class).0), [1, 1], "one slab of each");
    end(&o, held);
}

#[test]
fn the_vector_of_a_page_goes_when_the_page_does() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let class = Class::of_size(1024);
    let take = || o.take(class).unwrap().addr();
    let mut held: Held = (0..640).map(|_| take()).map(|at| (at, (class, in_turn(at, 1024, 7)))).collect();
    held.iter().for_each(|(&address, &(_, owner))| assert!(own(&o, class, pointer(address), owner)));
    bytes(&o, shared_pages(&held), 32);
    let given: Vec<usize> = held.keys().copied().filter(|address| address / 4096 % 8 != 3).collect();
    for address in given {
        assert_eq!(give(&o, class, pointer(address)), held.remove(&address).unwrap().1);
    }
    o.drain();
    let left = shared_pages(&held);
    assert!(o.prove().vectors as usize > left, "pages of slabs in use keep theirs");
    assert!(o.punch(Effort::Full, &|| false).released > 0);
    bytes(&o, left, 32);
    check(&o, &held);
    // A page that is used again has no vector until an owner pays.
    let (more, before) = (o.take_many(class, 300), o.vector_bytes());
    bytes(&o, left, 32);
    let owner = |object: *mut u8| in_turn(object.addr(), 1024, 8);
    more.iter().for_each(|&object| {
        assert_eq!((payer(&o, object), own(&o, class, object, owner(object))), (None, true));
    });
    assert!(o.vector_bytes() > before);
    more.into_iter().for_each(|object| assert_eq!(give(&o, class, object), owner(object)));
    end(&o, held);
}

#[test]
fn accounted_runs_are_reported_with_the_objects() {
    let o = Opened::new(machine(1), &CONFIG).unwrap();
    let class = Class::of_size(300);
    let object = o.take(class).unwrap();
    assert!(own(&o, class, object, 4));
    let runs = [1, 9, 2000].map(|pages| o.pages.allocate_run(&o.platform, pages, 1).unwrap().pfn);
    o.pages.frames().set_run_owner(runs[1], 5);
    let mut seen = Vec::new();
    o.each_accounted(&mut |class, object, owner| seen.push((class, object.addr(), owner)));
    seen.sort_unstable();
    assert_eq!(seen, [(Class::NONE, o.pages.address(runs[1]), 5), (class, object.addr(), 4)]);
    [1, 9, 2000].into_iter().zip(runs).for_each(|(pages, run)| o.pages.free_run(&o.platform, run, pages));
    end(&o, Held::from([(object.addr(), (class, 4))]));
}

#[test]
fn no_memory_for_a_vector_changes_nothing() {
    let config = Config { budget: Some(128), list_high: Some(0), ..CONFIG };
    let o = Opened::new(machine(1), &config).unwrap();
    let class = Class::of_size(64);
    let all: Vec<*mut u8> = core::iter::from_fn(|| o.take(class)).collect();
    assert!(all.len() > 1000);
    // The side tables are charged as well, so slabs leave some pages.
    let left: Vec<_> = core::iter::from_fn(|| o.pages.allocate_block(&o.platform, Order(0)).ok()).collect();
    let (paid, unpaid) = all.split_at(1);
    assert!(own(&o, class, paid[0], 2), "one owner takes no memory");
    for &object in unpaid.iter().take_while(|object| object.addr() / 4096 == paid[0].addr() / 4096) {
        assert!(!own(&o, class, object, 3), "there is no memory left");
        assert_eq!((o.is_allocated(object), payer(&o, object)), (true, None));
    }
    assert!(!own(&o, class, paid[0], 3), "nor for another owner of the same");
    assert_eq!(payer(&o, paid[0]), Some(2));
    assert_eq!((o.prove().accounted, o.vector_bytes()), (1, 0));
    left.into_iter().for_each(|block| o.pages.free_block(&o.platform, block.pfn, Order(0)));
    // The memory of one slab is enough for some vectors.
    let (first, rest) = all.split_at(all.len() / 2);
    assert_eq!(first.iter().map(|&object| give(&o, class, object)).sum::<u64>(), 2);
    o.drain();
    let owner = |object: *mut u8| in_turn(object.addr(), 64, 3);
    assert!(rest.iter().all(|&object| own(&o, class, object, owner(object))));
    let held: Held = rest.iter().map(|&object| (object.addr(), (class, owner(object)))).collect();
    assert!(o.vector_bytes() > 0);
    check(&o, &held);
    end(&o, held);
}

#[test]
fn a_system_that_refuses_memory_for_a_vector_is_asked_again() {
    let o = Opened::new(machine(2), &CONFIG).unwrap();
    let sizes = [16, 2048, 4096, 700];
    sizes.iter().for_each(|&size| o.give(Class::of_size(size), o.take(Class::of_size(size)).unwrap()));
    o.platform.fail(Call::MapAt, 0, usize::MAX);
    let mut held = Held::new();
    for class in sizes.map(Class::of_size) {
        held.extend(core::iter::from_fn(|| o.take(class)).map(|object| (object.addr(), (class, 0))));
    }
    let mut own_all = |first: u64| {
        let all = held.iter_mut().map(|(&address, (class, owner))| {
            let new = in_turn(address, class.size(), first);
            let owned = own(&o, *class, pointer(address), new);
            *owner = if owned { new } else { *owner };
            usize::from(!owned)
        });
        let refused: usize = all.sum();
        check(&o, &held);
        (refused, held.len())
    };
    let (refused, of) = own_all(9);
    assert!(refused > 0 && refused < of && o.vector_bytes() == 0, "all memory is in the program's hands");
    o.platform.fail(Call::MapAt, 0, 0);
    assert_eq!(own_all(9).0, 0);
    assert!(o.vector_bytes() > 0);
    check(&o, &held);
    end(&o, held);
}

#[test]
fn accounted_object_is_freed_only_once() {
    let virtual_machine = Opened::new(machine(1), &CONFIG).unwrap();
    freed_once(&virtual_machine);
    if let Some(real) = rseq() {
        freed_once(&real);
    }
}

fn freed_once<P: Platform>(o: &Opened<P>) {
    for size in [16, 64, 1024, 1152, 4096, 32_768] {
        let class = Class::of_size(size);
        let object = o.take(class).unwrap();
        assert!(own(o, class, object, 5));
        for offset in (16..size).step_by(16) {
            let inside = object.wrapping_add(offset);
            assert!(!o.is_allocated(inside) && !o.is_accounted(inside));
            assert!(!o.disown(inside), "{offset} bytes into {size}");
            assert_eq!(o.fast_path.free(inside), FreeOutcome::NotFastPath, "{offset} bytes into {size}");
        }
        assert!(o.is_accounted(object), "nothing has changed");
        let put = match o.fast_path.free(object) {
            FreeOutcome::Cached => true,
            FreeOutcome::CacheFull => false,
            FreeOutcome::NotFastPath => !o.disown(object),
        };
        assert_eq!((o.is_allocated(object), o.is_cached(object), o.disown(object)), (false, true, false));
        assert_eq!(o.fast_path.free(object), FreeOutcome::NotFastPath, "it is free already");
        if !put {
            Inside::assume(|inside| o.free(inside, class, object));
        }
        // Handed out again, without an owner.
        let again = o.take_many(class, 100);
        again.iter().for_each(|&object| assert_eq!(payer(o, object), None));
        again.into_iter().for_each(|object| assert_eq!(give(o, class, object), 0));
    }
    o.drain();
    assert_eq!((o.prove().slabs, o.vector_bytes()), (0, 0));
}

#[test]
fn reuse_by_same_owner_keeps_charge_by_another_uncharges() {
    let Some(o) = rseq() else { return };
    for size in [16, 1024, 2048, 32_768] {
        let class = Class::of_size(size);
        let mut again = 0;
        // The topmost object was freed just before, unless the thread migrated in between.
        for round in 0..100 {
            let (object, paid) = take_owned(&o, class, 1);
            assert!(round > 0 || !paid);
            again += u32::from(paid);
            assert_eq!(give(&o, class, object), 1);
            assert!(o.ledger.all().contains_key(&(class, 1)), "a cache keeps it");
        }
        assert!(again > 0, "{size}");
        let all = o.take_many(class, 2000);
        assert!(o.ledger.all().is_empty(), "no owner has it any more: {:?}", o.ledger.all());
        all.into_iter().for_each(|object| assert_eq!(give(&o, class, object), 0));
        // Other owners in turn.
        for owner in [2, 3, 2] {
            let (object, paid) = take_owned(&o, class, owner);
            assert!(!paid);
            assert_eq!(give(&o, class, object), owner);
        }
        o.drain();
        assert!(o.ledger.all().is_empty(), "no group pays for objects in slabs: {:?}", o.ledger.all());
    }
    o.prove();
}

/// Threads that all make a vector for the same page agree on one, and no owner is stored in
/// another.
#[test]
fn racing_threads_agree_on_one_vector_per_page() {
    const THREADS: usize = 3;
    let Some(o) = rseq() else { return };
    let (class, barrier) = (Class::of_size(64), Barrier::new(THREADS));
    for _ in 0..number("NEAP_ROUNDS", 200) {
        let objects: Vec<usize> = (0..200).map(|_| o.take(class).unwrap().addr()).collect();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (o, objects, barrier) = (&o, &objects, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    let own_some = |&address: &usize| assert!(own(o, class, pointer(address), address as u64));
                    objects.iter().skip(thread).step_by(THREADS).for_each(own_some);
                });
            }
        });
        let held: Held = objects.iter().map(|&address| (address, (class, address as u64))).collect();
        bytes(&o, shared_pages(&held), 512);
        objects.into_iter().for_each(|address| assert_eq!(give(&o, class, pointer(address)), address as u64));
        o.prove();
        o.drain();
        assert_eq!(o.vector_bytes(), 0);
    }
}

/// Every thread pays for its objects, in pages that all share, and another thread frees them.
#[test]
fn objects_freed_by_other_threads_report_their_payer() {
    const THREADS: usize = 4;
    let Some(o) = rseq() else { return };
    let (o, rounds, random_seed) = (&o, number("NEAP_ROUNDS", 300), seed());
    let paid = [const { AtomicUsize::new(0) }; THREADS + 1];
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::channel::<(Class, usize, u64)>()).unzip();
    std::thread::scope(|scope| {
        for (thread, receiver) in receivers.into_iter().enumerate() {
            let (senders, paid) = (senders.clone(), &paid);
            scope.spawn(move || {
                let mut random = Random(random_seed + thread as u64);
                let give_some = |most: usize| {
                    for (class, address, owner) in receiver.try_iter().take(most) {
                        assert_eq!(give(o, class, pointer(address)), owner, "{address:#x}");
                        paid[owner as usize].fetch_sub(1, Relaxed);
                    }
                };
                for _ in 0..rounds {
                    for _ in 0..random.below(200) {
                        let class = Class::of_size([16, 48, 64, 1024, 2048, 5000][random.below(6)]);
                        // Owner 0: the object is not charged.
                        let owner = if random.below(4) == 0 { 0 } else { thread as u64 + 1 };
                        let object = if owner == 0 { o.take(class).unwrap() } else { take_owned(o, class, owner).0 };
                        paid[owner as usize].fetch_add(1, Relaxed);
                        senders[random.below(THREADS)].send((class, object.addr(), owner)).expect("it listens");
                    }
                    give_some(random.below(400));
                    if random.below(50) == 0 {
                        _ = o.drain_cpu(random.below(o.cpu_caches.cpus()), |_| true);
                        _ = o.punch(if random.below(2) == 0 { Effort::Full } else { Effort::Sparing }, &|| false);
                    }
                }
                drop(senders);
                for (class, address, owner) in &receiver {
                    assert_eq!(give(o, class, pointer(address)), owner, "{address:#x}");
                    paid[owner as usize].fetch_sub(1, Relaxed);
                }
            });
        }
        drop(senders);
    });
    assert!(paid.iter().all(|count| count.load(Relaxed) == 0), "{paid:?}");
    assert_eq!(o.prove().accounted, 0);
    o.drain();
    assert!(o.ledger.all().is_empty(), "{:?}", o.ledger.all());
    assert_eq!((o.prove().slabs, o.vector_bytes()), (0, 0));
}
