//! Lists of groups that are deleted while other threads add, remove, walk and free: the real lists
//! on the real groups.

use core::alloc::Layout;
use core::ptr::NonNull;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use neap_base::gate::Inside;
use neap_base::sync::{AtomicUsize, Ordering};
use neap_groups::{GroupId, GroupSlot, Groups, Reclaimer};
use neap_percpu::{PerCpuData, Shape};
use neap_reclaim::lru::{By, End, Item, LruList, LruRegistry, LruStatus, Site};
use neap_reclaim::shrinkers::bits::{Bit, clear_bit_if_empty, set_bits};
use neap_testing::virtual_platform::Virtual;
use std::alloc::{alloc_zeroed, dealloc};

/// An object to be cached. Two threads must not access its contents at once, if one of them changes
/// them.
#[repr(C)]
struct Thing {
    item: Item,
    contents: UnsafeCell<usize>,
}

// SAFETY: a model: loom reports concurrent access to the contents.
unsafe impl Sync for Thing {}

/// Groups and lists: a parent, its child, and one list.
struct World {
    machine: Virtual,
    data: PerCpuData,
    /// Bits of the list's shrinker, by slot.
    bits: [AtomicUsize; 4],
    lists: LruRegistry,
    groups: Option<Groups>,
    list: Option<LruList>,
    parent: GroupId,
    child: GroupId,
    things: [Thing; 3],
}

#[derive(Clone, Copy)]
struct Host<'a>(&'a World);

impl neap_percpu::Host for Host<'_> {
    type Platform = Virtual;
    type Charge = ();

    fn platform(&self) -> &Virtual {
        &self.0.machine
    }

    fn data(&self) -> &PerCpuData {
        &self.0.data
    }
}

impl Reclaimer for Host<'_> {
    fn offline(&self, inside: &Inside<'_>, groups: &Groups, child: GroupSlot, parent: GroupSlot) {
        Site { host: self, groups, lists: &self.0.lists }.offline(inside, child, parent);
        // As shrinkers do.
        if self.0.bits[child.slot as usize].swap(0, Ordering::Acquire) != 0 {
            set_bits([self.0.bit(parent.slot)]);
        }
    }
}

impl neap_reclaim::Host for Host<'_> {
    fn memory(&self, _: &Inside<'_>, bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the layout has a size, since no caller requests 0 bytes.
        NonNull::new(unsafe { alloc_zeroed(Layout::from_size_align(bytes, 64).unwrap()) })
    }

    unsafe fn give_back(&self, _: &Inside<'_>, memory: NonNull<u8>, bytes: usize) {
        // SAFETY: `memory` allocated it with this layout, and no thread uses it any more.
        unsafe { dealloc(memory.as_ptr(), Layout::from_size_align(bytes, 64).unwrap()) };
    }

    fn mark(&self, _: &Inside<'_>, _shrinker: u64, seat: GroupSlot, _node: usize) {
        set_bits([self.0.bit(seat.slot)]);
    }
}

impl World {
    fn new() -> Arc<World> {
        let machine = Virtual::new(4096, 1);
        let shape = Shape { unit: 64 << 10, span: 128 << 10, ..Shape::usual(1) };
        let data = PerCpuData::open(&machine, &shape, |_| 0, ()).unwrap();
        let thing = || Thing { item: Item::new(), contents: UnsafeCell::new(1) };
        let mut world = World {
            machine,
            data,
            bits: [(); 4].map(|()| AtomicUsize::new(0)),
            lists: LruRegistry::new(),
            groups: None,
            list: None,
            parent: GroupId::ROOT,
            child: GroupId::ROOT,
            things: [thing(), thing(), thing()],
        };
        world.groups = Some(Groups::open(&Host(&world)).unwrap());
        world.parent = world.groups().create(&Host(&world), GroupId::ROOT, "parent").unwrap();
        world.child = world.groups().create(&Host(&world), world.parent, "child").unwrap();
        world.list = Some(world.site(|site| site.open(By::Group, Some(7)).unwrap()));
        Arc::new(world)
    }

    fn groups(&self) -> &Groups {
        self.groups.as_ref().unwrap()
    }

    fn site<R>(&self, f: impl FnOnce(&Site<'_, Host<'_>>) -> R) -> R {
        f(&Site { host: &Host(self), groups: self.groups(), lists: &self.lists })
    }

    fn on<R>(&self, f: impl FnOnce(&Site<'_, Host<'_>>, LruList) -> R) -> R {
        self.site(|site| f(site, self.list.unwrap()))
    }

    fn item(&self, thing: usize) -> NonNull<Item> {
        NonNull::from(&self.things[thing]).cast()
    }

    fn add(&self, group: GroupId, thing: usize) {
        // SAFETY: things outlive the list.
        self.on(|site, list| assert!(unsafe { list.add(site, group, 0, self.item(thing)) }.unwrap()));
    }

    fn del(&self, thing: usize) -> bool {
        // SAFETY: the thing exists: it outlives the list.
        self.on(|site, list| unsafe { list.del(site, self.item(thing)) })
    }

    fn delete_child(&self) {
        self.groups().delete(&Host(self), self.child).unwrap();
    }

    fn count(&self, group: GroupId) -> usize {
        self.on(|site, list| list.count(site, group, 0))
    }

    fn verify(&self) {
        self.on(|site, _| site.verify().unwrap());
    }

    fn slot(&self, group: GroupId) -> u32 {
        let groups = self.groups();
        Inside::assume(|inside| groups.attach_target(inside, &groups.reading(), group)).unwrap().slot
    }

    fn bit(&self, slot: u32) -> Bit<'_> {
        Bit { word: &self.bits[slot as usize], bit: 3 }
    }

    fn marked(&self, group: GroupId) -> bool {
        self.bit(self.slot(group)).is_set()
    }

    /// Visits the group in a slot, and clears the bit if there are no items.
    fn visit(&self, group: GroupId, slot: u32) {
        let is_empty = || self.count(group) == 0;
        if self.bit(slot).is_set() && is_empty() {
            clear_bit_if_empty([self.bit(slot)], is_empty);
        }
    }

    /// Changes the contents of a thing, as freeing it would.
    fn free(&self, thing: &Thing) {
        // SAFETY: a model: loom reports a concurrent access.
        thing.contents.with_mut(|contents| unsafe { *contents = 0 });
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let (host, groups) = (Host(self), self.groups());
        // SAFETY: no thread uses them any more.
        unsafe {
            self.on(|site, list| site.close_list(list));
            self.site(|site| site.close());
            groups.close(&host);
            self.data.close(&self.machine);
        }
    }
}

fn model(test: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.max_branches = 20_000;
    model.check(test);
}

fn beside(world: &Arc<World>, f: impl FnOnce(&World) + Send + 'static) -> thread::JoinHandle<()> {
    let world = world.clone();
    thread::spawn(move || f(&world))
}

/// The parent has a block of the list, and gets the items put before its own; or it has none, and
/// gets the child's block.
const PARENTS: [bool; 2] = [true, false];

#[test]
fn an_item_is_taken_off_while_its_group_goes() {
    for has_part in PARENTS {
        model(move || {
            let world = World::new();
            if has_part {
                world.add(world.parent, 2);
            }
            world.add(world.child, 0);
            world.add(world.child, 1);
            let other = beside(&world, |world| assert!(world.del(0)));
            world.delete_child();
            other.join().unwrap();
            world.verify();
            assert_eq!(world.count(world.parent), 1 + usize::from(has_part));
            assert!(world.marked(world.parent), "it got the other one");
            assert!(world.del(1) && !world.del(0) && world.del(2) == has_part);
            world.verify();
        });
    }
}

#[test]
fn an_item_is_added_while_its_group_goes() {
    for has_part in PARENTS {
        model(move || {
            let world = World::new();
            // So that neither model requests the block's memory.
            world.add(world.child, 1);
            assert!(world.del(1));
            if has_part {
                world.add(world.parent, 2);
                assert!(world.del(2));
                world.visit(world.parent, world.slot(world.parent));
                assert!(!world.marked(world.parent));
            }
            let other = beside(&world, |world| world.add(world.child, 0));
            world.delete_child();
            other.join().unwrap();
            world.verify();
            assert_eq!(world.count(world.parent), 1);
            assert!(world.marked(world.parent));
            assert!(world.del(0));
        });
    }
}

#[test]
fn the_first_item_of_a_group_is_added_while_it_goes() {
    model(|| {
        let world = World::new();
        let other = beside(&world, |world| world.add(world.child, 0));
        world.delete_child();
        other.join().unwrap();
        world.verify();
        assert!(world.count(world.parent) == 1 && world.marked(world.parent));
        assert!(world.del(0));
    });
}

#[test]
fn walk_and_concurrent_del_free_an_item_exactly_once() {
    model(|| {
        let world = World::new();
        world.add(world.parent, 0);
        let other = beside(&world, |world| {
            if world.del(0) {
                world.free(&world.things[0]);
            }
        });
        world.on(|site, list| {
            // SAFETY: items are in things, at the beginning.
            let thing = |item: NonNull<Item>| unsafe { item.cast::<Thing>().as_ref() };
            let isolate = |item| {
                // SAFETY: the thread that frees the item has not taken it off yet, since it is on
                // the list.
                thing(item).contents.with(|contents| assert_eq!(unsafe { *contents }, 1));
                LruStatus::Removed
            };
            let dispose = |item| {
                assert!(thing(item).item.leave_hands());
                world.free(thing(item));
            };
            // SAFETY: `isolate` neither waits, allocates nor calls the list.
            unsafe { list.walk(site, world.parent, 0, 1, isolate, dispose) };
        });
        other.join().unwrap();
        world.verify();
        assert!(world.count(world.parent) == 0 && !world.del(0));
    });
}

#[test]
fn an_item_that_is_seen_on_no_list_may_be_freed() {
    model(|| {
        let world = World::new();
        world.add(world.parent, 0);
        let other = beside(&world, |world| {
            if !world.things[0].item.is_linked() {
                world.free(&world.things[0]);
            }
        });
        world.on(|site, list| {
            // SAFETY: items are in things, at the beginning.
            let thing = |item: NonNull<Item>| unsafe { item.cast::<Thing>().as_ref() };
            let look = |item| {
                // SAFETY: a thread that sees the item on a list does not free it.
                thing(item).contents.with(|contents| assert_eq!(unsafe { *contents }, 1));
            };
            let isolate = |item| {
                look(item);
                LruStatus::Removed
            };
            let dispose = |item| {
                look(item);
                assert!(thing(item).item.leave_hands());
            };
            // SAFETY: `isolate` neither waits, allocates nor calls the list.
            unsafe { list.walk(site, world.parent, 0, 1, isolate, dispose) };
        });
        other.join().unwrap();
    });
}

/// Its links are those of the next list then, under another lock.
#[test]
fn item_removed_by_another_thread_may_be_added_elsewhere() {
    for looks_first in [true, false] {
        model(move || {
            let world = World::new();
            world.add(world.parent, 0);
            let other = beside(&world, move |world| {
                if !looks_first || !world.things[0].item.is_linked() {
                    // SAFETY: things outlive the list.
                    world.on(|site, list| unsafe { list.add(site, world.child, 0, world.item(0)) }).unwrap();
                }
            });
            assert!(world.del(0));
            other.join().unwrap();
            world.verify();
        });
    }
}

#[test]
fn a_group_goes_while_it_is_walked() {
    for has_part in PARENTS {
        model(move || {
            let world = World::new();
            if has_part {
                world.add(world.parent, 2);
            }
            world.add(world.child, 0);
            world.add(world.child, 1);
            let other = beside(&world, |world| world.delete_child());
            let mut removed = 0;
            world.on(|site, list| {
                let isolate = |item| if item == world.item(0) { LruStatus::Removed } else { LruStatus::Rotate };
                // SAFETY: `isolate` neither waits, allocates nor calls the list.
                unsafe { list.walk(site, world.child, 0, 8, isolate, |_| removed += 1) };
            });
            other.join().unwrap();
            world.verify();
            assert_eq!(world.count(world.parent) + removed, 2 + usize::from(has_part));
            assert!(world.del(1) && world.del(0) == (removed == 0));
        });
    }
}

/// When the second thread has the lock of the item's sub-list, the first has put the item on
/// another one.
#[test]
fn an_item_is_taken_off_while_it_moves_to_another_group() {
    model(|| {
        let world = World::new();
        world.add(world.child, 0);
        world.add(world.child, 1);
        let other = beside(&world, |world| {
            if world.del(0) {
                world.add(world.parent, 0);
            }
        });
        let taken = world.del(0);
        other.join().unwrap();
        world.verify();
        // If this thread has not removed the item, the other one has moved it to the parent.
        let left = world.count(world.parent);
        assert!(world.count(world.child) == 1 && left <= 1 && (taken || left == 1));
        assert!(world.del(1) && world.del(0) == (left == 1));
    });
}

/// Items that name a dead sub-list are renamed while they are removed.
#[test]
fn an_item_is_taken_off_while_it_is_renamed() {
    model(|| {
        let world = World::new();
        world.add(world.parent, 2);
        world.add(world.child, 0);
        world.add(world.child, 1);
        world.delete_child();
        let other = beside(&world, |world| assert!(world.del(0)));
        world.on(|site, _| _ = site.tick());
        other.join().unwrap();
        world.verify();
        assert!(world.del(1) && world.del(2));
    });
}

/// One thread takes items off and puts them back. Another lets the first one go meanwhile, and puts
/// it on another sub-list, which has an item.
#[test]
fn an_item_leaves_the_hands_that_have_it_and_goes_elsewhere() {
    model(|| {
        let world = World::new();
        world.add(world.child, 0);
        world.add(world.child, 1);
        world.add(world.parent, 2);
        let other = beside(&world, |world| {
            let moved = world.del(0) || world.things[0].item.leave_hands();
            if moved {
                world.add(world.parent, 0);
            }
        });
        world.on(|site, list| {
            let mut items = Vec::with_capacity(2);
            // SAFETY: things outlive the list, and the vector does not grow.
            let hands = unsafe { list.take(site, world.child, 0, 2, |item| items.push(item)) };
            // SAFETY: the items were handed out with `hands`, and are in things, which outlive the
            // list.
            let put_back = |item| hands.as_ref().is_some_and(|hands| unsafe { hands.put_back(item, End::Oldest) });
            items.into_iter().for_each(|item| _ = put_back(item));
        });
        other.join().unwrap();
        world.verify();
        assert_eq!(world.count(world.parent) + world.count(world.child), 3);
        assert!(world.del(0) && world.del(1) && world.del(2));
    });
}

/// A visitor looks at the parent, and then at the group, while that is deleted: with an item, or
/// with none and one is added.
#[test]
fn what_a_group_leaves_is_found_by_visitors() {
    for (has_part, has_item) in PARENTS.into_iter().flat_map(|part| [(part, true), (part, false)]) {
        model(move || {
            let world = World::new();
            world.add(world.child, 0);
            if has_part {
                world.add(world.parent, 2);
                assert!(world.del(2));
            }
            if !has_item {
                assert!(world.del(0));
            }
            let slots = [world.parent, world.child].map(|group| (group, world.slot(group)));
            slots.into_iter().for_each(|(group, slot)| world.visit(group, slot));
            let visitor = beside(&world, move |world| {
                slots.into_iter().for_each(|(group, slot)| world.visit(group, slot));
            });
            let adder = (!has_item).then(|| beside(&world, |world| world.add(world.child, 0)));
            world.delete_child();
            visitor.join().unwrap();
            adder.into_iter().for_each(|adder| adder.join().unwrap());
            world.verify();
            assert!(
                world.count(world.parent) == 1 && world.marked(world.parent),
                "there is something that no pass finds"
            );
            assert!(world.del(0));
        });
    }
}
