//! The verification itself: it accepts a right state, and names what is wrong in a damaged one.
//!
//! Goal: no damage to stacks, sheaves, slabs, states or counts escapes `verify`.
//!
//! Method: the same small program runs on its own instance for every kind of damage. The
//! verification passes before and names the damage after. It passes again where the damage can be
//! undone, and leaves every state byte unchanged.

use crate::instance::{CONFIG, Opened, machine};
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use neap_base::Pfn;
use neap_objects::class_cache::ObjectIndex;
use neap_objects::cpu_caches::Attempt;
use neap_objects::kind_map::KindEntry;
use neap_objects::object_state::{ACCOUNTED, ALLOCATED, COMMON, SHIFTS};
use neap_objects::region::StackId;
use neap_objects::sheaf::Sheaf;
use neap_objects::size_class::Class;
use neap_objects::slab::{Slab, SlabId, SlabList};
use neap_objects::strided_run::Packed;
use neap_objects::verify::Census;
use neap_pages::Effort;
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;
use std::collections::VecDeque;

type Instance = Opened<Shared<Virtual>>;

const CLASS: Class = Class(40);

/// Objects of a class in the program, a stack, a barn and a slab.
fn populated() -> (Instance, VecDeque<*mut u8>) {
    let o = Opened::new(machine(2), &CONFIG).unwrap();
    Virtual::run_on(0);
    let sheaf = CLASS.sheaf_capacity() as usize;
    let mut held = o.take_many(CLASS, 5 * sheaf);
    let given = 4 * sheaf + sheaf / 2;
    (0..given).for_each(|_| o.give(CLASS, held.pop_front().unwrap()));
    let census = o.prove();
    assert_eq!(census.allocated as usize, 5 * sheaf - given);
    assert!(o.stacked(0, CLASS) > 0 && o.barn(CLASS).0 > 0 && census.free > 0 && census.sheaves > 0, "{census:?}");
    (o, held)
}

/// Checks that the verification passes, and then finds `what` after `damage`.
fn finds(what: &str, damage: impl FnOnce(&Instance, &mut VecDeque<*mut u8>)) {
    let (o, mut held) = populated();
    assert_eq!(o.prove(), o.prove(), "the proof changes nothing");
    damage(&o, &mut held);
    let finding = o.verify(0).expect_err(what).to_string();
    assert!(finding.starts_with(&format!("{what}: ")), "{what} was to be found, not {finding}");
    assert_eq!(o.verify(0).expect_err(what).to_string(), finding, "the same again");
}

fn popped(o: &Instance, class: Class) -> *mut u8 {
    match o.cpu_caches.pop(&o.platform, class) {
        Attempt::Done(object) => object,
        other => panic!("{other:?}"),
    }
}

fn pushed(o: &Instance, class: Class, object: *mut u8) {
    assert_eq!(o.cpu_caches.push(&o.platform, StackId::local(class), object), Attempt::Done(()));
}

/// The slab of an object, and the object's number.
fn place(o: &Instance, object: *mut u8) -> ObjectIndex {
    let pfn = o.pages.pfn(object.addr());
    let slab = SlabId(o.pages.frames().frame(pfn).owner());
    // SAFETY: the test holds the object, so its slab exists.
    let start = o.pages.address(unsafe { o.slabs.pfn_of(slab) });
    ObjectIndex { slab, object: ((object.addr() - start) / CLASS.size()) as u32 }
}

/// The slab of an object.
#[expect(clippy::mut_from_ref, reason = "no other test uses the instance")]
fn slab(o: &Instance, object: *mut u8) -> &mut Slab {
    // SAFETY: the test has the instance alone, and keeps no two results of this function.
    unsafe { o.slabs.get(place(o, object).slab) }
}

/// The state byte of an address.
fn state(o: &Instance, address: usize) -> &AtomicU8 {
    let table = match address.trailing_zeros() {
        6..9 => COMMON,
        9..15 => 3,
        _ => panic!("it is in another table"),
    };
    let byte = o.pages.side_table(2 + table) + ((address - o.pages.base()) >> SHIFTS[table]);
    // SAFETY: these side tables have a byte for every mapped part of the arena, and all accesses
    // are atomic.
    unsafe { &*core::ptr::with_exposed_provenance(byte) }
}

/// The entry of the kind map for an offset from the base.
fn kind(o: &Instance, offset: usize) -> &KindEntry {
    let kinds = core::ptr::with_exposed_provenance::<KindEntry>(o.pages.side_table(0));
    // SAFETY: the first side table has an entry for every 4 KiB of the arena.
    unsafe { &*kinds.add(offset >> KindEntry::SHIFT) }
}

#[test]
fn an_empty_instance_adds_up() {
    let o = Opened::new(machine(3), &CONFIG).unwrap();
    assert_eq!(o.prove(), Census::default());
}

#[test]
fn what_is_lost_or_there_twice_in_stacks() {
    finds("objects that are cached but in no cache", |o, _| _ = popped(o, CLASS));
    finds("object that is cached, once, in a cache", |o, _| {
        let object = popped(o, CLASS);
        (0..2).for_each(|_| pushed(o, CLASS, object));
    });
    finds("object that is cached, once, in a cache", |o, held| pushed(o, CLASS, held[0]));
    finds("object of the class in a cache", |o, _| {
        let (other, object) = (Class(41), popped(o, CLASS));
        o.give(other, o.take(other).unwrap());
        pushed(o, other, object);
    });
    finds("address in the arena in a cache", |o, _| {
        _ = popped(o, CLASS);
        pushed(o, CLASS, core::ptr::without_provenance_mut(4096));
    });
}

#[test]
fn an_object_on_its_way_is_allowed_where_that_is_said() {
    let (o, _) = populated();
    let before = o.prove();
    let object = popped(&o, CLASS);
    let census = o.verify(1).unwrap().census;
    assert_eq!((census.in_hands, census.cached), (1, before.cached - 1));
    pushed(&o, CLASS, object);
    assert_eq!(o.prove(), before);
}

#[test]
fn what_is_lost_or_there_twice_in_barns() {
    finds("objects that are cached but in no cache", |o, _| {
        let mut cache = o.caches[CLASS.index()].lock();
        let mut sheaf = cache.full.pop().expect("a full sheaf");
        sheaf.clear();
        cache.stow(sheaf);
    });
    finds("memory of sheaves", |o, _| _ = o.caches[CLASS.index()].lock().full.pop().expect("a full sheaf"));
    finds("empty sheaf", |o, _| {
        let mut cache = o.caches[CLASS.index()].lock();
        let sheaf = cache.full.pop().unwrap();
        cache.empty.push(sheaf);
    });
    finds("object of the class in a cache", |o, _| {
        let sheaf = o.caches[CLASS.index()].lock().full.pop().unwrap();
        o.caches[CLASS.index() + 1].lock().full.push(sheaf);
    });
}

#[test]
fn bound_sheaves_and_their_lists() {
    fn parts(sheaf: &Sheaf) -> Vec<Packed> {
        assert!(sheaf.is_bound());
        sheaf.strided_runs().map(|part| Packed::of(&part).unwrap()).collect()
    }
    finds("sheaf of the other kind on a list", |o, _| {
        let mut cache = o.caches[CLASS.index()].lock();
        let sheaf = cache.empty.pop().expect("an empty sheaf with cells");
        cache.empty_bound.push(sheaf);
    });
    finds("sheaf of the other kind on a list", |o, held| {
        let emptied = || o.caches[CLASS.index()].lock().empty_bound.pop();
        let sheaf =
            core::iter::repeat_with(|| (held.push_back(o.take(CLASS).unwrap()), emptied()).1).find_map(|sheaf| sheaf);
        sheaf.into_iter().for_each(|sheaf| o.caches[CLASS.index()].lock().empty.push(sheaf));
    });
    finds("objects of a sheaf", |o, _| {
        let mut cache = o.caches[CLASS.index()].lock();
        let [mut one, mut other] = [(); 2].map(|()| cache.full.pop().expect("a full sheaf"));
        let both = [parts(&one), parts(&other)].concat();
        [&mut one, &mut other].into_iter().for_each(Sheaf::clear);
        assert!(one.bind(&both));
        [one, other].into_iter().for_each(|sheaf| cache.stow(sheaf));
    });
    finds("strided_runs without objects", |o, _| {
        let mut cache = o.caches[CLASS.index()].lock();
        let mut sheaf = cache.full.pop().expect("a full sheaf");
        let all = [parts(&sheaf), vec![Packed::NONE]].concat();
        sheaf.clear();
        assert!(sheaf.bind(&all));
        cache.full.push(sheaf);
    });
}

#[test]
fn counts_and_lists_of_slabs() {
    finds("free objects of a class", |o, _| o.caches[CLASS.index()].lock().free += 1);
    finds("slabs of a class", |o, _| o.caches[CLASS.index()].lock().slabs += 1);
    finds("partly free slabs", |o, _| o.caches[CLASS.index()].lock().partial.length += 1);
    finds("partly free slabs", |o, _| o.caches[CLASS.index()].lock().partial = SlabList::new());
    finds("counts and bitmap of a slab", |o, held| slab(o, held[0]).free += 1);
    finds("class of a slab", |o, held| slab(o, held[0]).class = Class::NONE);
    finds("order of a slab", |o, held| slab(o, held[0]).order += 1);
    finds("objects of a slab", |o, held| slab(o, held[0]).objects -= 1);
    finds("first page of a slab", |o, held| slab(o, held[0]).pfn = Pfn(77));
    finds("number of a slab", |o, held| {
        let first = slab(o, held[0]).pfn;
        o.pages.frames().frame(first).set_owner(u32::MAX);
    });
    finds("owner of a slab's page", |o, held| {
        let first = slab(o, held[0]).pfn;
        o.pages.frames().frame(first.plus(1)).set_owner(u32::MAX);
    });
    finds("slab on the list of partly free ones", |o, _| {
        let mut cache = o.caches[CLASS.index()].lock();
        let slab = cache.partial.first().unwrap();
        // SAFETY: the class cache's lock is held, and the slab is on the list.
        unsafe { cache.partial.remove(&o.slabs, slab) };
    });
    finds("numbers of slabs", |o, _| {
        let shape = CLASS.slab_shape(4096);
        o.slabs.create(Pfn(900), CLASS, shape, |_| true).unwrap();
    });
}

#[test]
fn holes_that_are_none_and_lists() {
    finds("hole where an object is in use", |o, held| slab(o, held[0]).holes = 1 << 3);
    finds("holes of a class", |o, _| o.caches[CLASS.index()].lock().holes += 1);
    finds("holes of a node", |o, _| {
        assert!(o.punch(Effort::Full, &|| false).released > 0);
        assert_eq!(o.pages.node(0).charge_holes(1), 1);
    });
    finds("isolated slabs while no thread releases", |o, _| {
        let mut cache = o.caches[CLASS.index()].lock();
        let slab = cache.partial.first().unwrap();
        // SAFETY: the class cache's lock is held, and the slab is on the list.
        unsafe {
            cache.partial.remove(&o.slabs, slab);
            cache.isolated.insert(&o.slabs, slab);
        }
    });
    finds("lists of slabs with the right names", |o, _| {
        let mut cache = o.caches[CLASS.index()].lock();
        cache.sidelined = core::mem::take(&mut cache.partial);
    });
    finds("hollow slab with an object that is in no hole", |o, _| {
        let mut cache = o.caches[CLASS.index()].lock();
        let slab = cache.partial.first().unwrap();
        // SAFETY: the class cache's lock is held, and the slab is on the list.
        unsafe {
            cache.partial.remove(&o.slabs, slab);
            cache.hollow.insert(&o.slabs, slab);
        }
    });
}

#[test]
fn a_bit_or_a_state_that_is_wrong() {
    finds("free object", |o, held| {
        let place = place(o, held[0]);
        let mut cache = o.caches[CLASS.index()].lock();
        // SAFETY: the class cache's lock is held, and the slab is one of the class.
        assert!(unsafe { cache.put(&o.slabs, place, &mut SlabList::new()) });
    });
    finds("memory of sheaves", |o, _| {
        let mut cache = o.caches[CLASS.index()].lock();
        // SAFETY: the class cache's lock is held.
        assert_eq!(unsafe { cache.take(&o.slabs, 1, |_| ()) }, 1);
    });
    finds("state of an object", |o, held| state(o, held[0].addr()).store(6, Relaxed));
    finds("memory of sheaves", |o, held| state(o, held[0].addr()).store(0, Relaxed));
    finds("state bytes of a slab", |o, held| state(o, held[0].addr() + (1 << SHIFTS[COMMON])).store(3, Relaxed));
    // An object in the middle: all objects of its page are the program's.
    finds("kind map", |o, held| kind(o, held[held.len() / 2].addr() - o.pages.base()).set(Class(3)));
    finds("kind map", |o, _| kind(o, o.pages.limit() - 1).set(CLASS));
}

#[test]
fn owners_and_their_vectors() {
    /// Runs [`finds`] after `owners` owners in turn were set for the first object; `damage` gets
    /// the word of its page.
    fn finds_with(owners: u64, what: &str, damage: impl FnOnce(&Instance, &mut VecDeque<*mut u8>, &AtomicU64)) {
        finds(what, |o, held| {
            let object = held[0];
            // SAFETY: the object is the test's, of this instance.
            (0..owners).for_each(|owner| assert!(unsafe { o.own_slowly(CLASS, object, 77 + owner) }));
            assert_eq!((o.prove().accounted, o.prove().vectors), (1, owners - 1));
            damage(o, held, o.pages.frames().frame(o.pages.pfn(object.addr())).word());
        });
    }
    fn finds_of(what: &str, damage: impl FnOnce(&Instance, &mut VecDeque<*mut u8>, &AtomicU64)) {
        finds_with(2, what, damage);
    }
    finds_with(1, "owner of an object that a group pays for", |_, _, word| word.store(1 << 63, Relaxed));
    finds_with(1, "owner of an object that a group pays for", |_, _, word| word.store(0, Relaxed));
    let address = |word: &AtomicU64| (word.load(Relaxed) >> 16) as usize;
    finds_of("owner of an object that a group pays for", |_, _, word| {
        let entries = core::ptr::with_exposed_provenance::<[AtomicU64; 2]>(address(word));
        // SAFETY: the vector has an entry for each of the two objects that may start on a page.
        unsafe { &*entries }.iter().for_each(|entry| entry.store(0, Relaxed));
    });
    finds_of("owner of an object that a group pays for", |_, _, word| word.store(0, Relaxed));
    // The page has no owner any more, and the vector is lost.
    finds_of("memory of sheaves", |o, held, word| {
        word.store(0, Relaxed);
        state(o, held[0].addr()).fetch_xor(ACCOUNTED ^ ALLOCATED, Relaxed);
    });
    finds_of("class of a vector's memory", |_, held, word| {
        word.store((held[0].addr() as u64) << 16 | word.load(Relaxed) & 0xffff, Relaxed);
    });
    finds_of("place of a vector", |_, _, word| _ = word.fetch_add(8 << 16, Relaxed));
    finds_of("factor of a vector", |_, _, word| _ = word.fetch_add(1, Relaxed));
    finds_of("memory of sheaves", |o, held, word| {
        let other = held.iter().find(|object| object.addr() / 4096 != held[0].addr() / 4096).unwrap();
        o.pages.frames().frame(o.pages.pfn(other.addr())).word().store(word.load(Relaxed), Relaxed);
    });
    for owners in [|_| 1 << 63 | 77, |word| word] {
        finds_of("owner where no object can lie", |o, _, word| {
            // The slab of the vector has no other objects.
            o.pages.frames().frame(o.pages.pfn(address(word))).word().store(owners(word.load(Relaxed)), Relaxed);
        });
    }
    finds_of("objects of neap's own in a slab", |o, held, _| slab(o, held[0]).private += 1);
}

#[test]
fn pages_that_are_lost() {
    finds("used pages", |o, _| {
        let block = o.pages.allocate_block(&o.platform, neap_base::Order(4)).unwrap();
        let frame = o.pages.frames().frame(block.pfn);
        frame.set_state(neap_pages::State::Releasing);
    });
}
