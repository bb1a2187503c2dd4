//! Slots that pass from one group to the next, while shrinkers are marked for them and visited:
//! every group with objects is found.

use core::alloc::Layout;
use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use neap_base::gate::Inside;
use neap_groups::{GroupId, GroupSlot, Groups, Kind, OnLimit, Reclaimer};
use neap_percpu::{PerCpuData, Shape};
use neap_reclaim::{Asked, EMPTY, Host, ScanPressure, ShrinkerId, Shrinkers, Spec};
use neap_testing::random::{Random, number, seed};
use neap_testing::virtual_platform::Virtual;
use std::alloc::{alloc_zeroed, dealloc};
use std::sync::{Mutex, OnceLock};

/// Called with the number of counts before this one.
type Counted = Box<dyn FnMut(u32) + Send>;

/// Called in place of the usual deletion hook, once.
type Offline = Box<dyn FnOnce(GroupSlot, GroupSlot) + Send>;

/// Groups, and their only shrinker.
struct World {
    machine: Virtual,
    data: PerCpuData,
    groups: OnceLock<Groups>,
    shrinkers: OnceLock<Shrinkers>,
    offline: Mutex<Option<Offline>>,
    cache: Cache,
    id: OnceLock<ShrinkerId>,
}

/// The objects of the shrinker, by group. Those of a deleted group are its heir's.
struct Cache {
    objects: Mutex<Vec<(GroupId, u64)>>,
    /// Called on each count, with the number of counts before it.
    counted: Mutex<Option<Counted>>,
    counts: AtomicU32,
    /// Lets other threads run during a count, and during a mark.
    is_slow: AtomicBool,
}

#[derive(Clone, Copy)]
struct On(&'static World);

impl neap_percpu::Host for On {
    type Platform = Virtual;
    type Charge = ();

    fn platform(&self) -> &Virtual {
        &self.0.machine
    }

    fn data(&self) -> &PerCpuData {
        &self.0.data
    }
}

impl Reclaimer for On {
    fn offline(&self, _: &Inside<'_>, _: &Groups, child: GroupSlot, parent: GroupSlot) {
        let instead = self.0.offline.lock().unwrap().take();
        match instead {
            Some(instead) => instead(child, parent),
            None => Inside::assume(|inside| self.shrinkers().offline(inside, self, child.slot, parent.slot)),
        }
    }
}

impl Host for On {
    fn memory(&self, _: &Inside<'_>, bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the layout has a size, since no caller requests 0 bytes.
        NonNull::new(unsafe { alloc_zeroed(Layout::from_size_align(bytes, 64).unwrap()) })
    }

    unsafe fn give_back(&self, _: &Inside<'_>, memory: NonNull<u8>, bytes: usize) {
        // SAFETY: `memory` allocated it with this layout, and no thread uses it any more.
        unsafe { dealloc(memory.as_ptr(), Layout::from_size_align(bytes, 64).unwrap()) };
    }

    fn is_online(&self, group: GroupId, slot: u32) -> bool {
        self.groups().is_online(group, slot)
    }

    fn follow(&self, group: GroupId, mut hang: impl FnMut(&Inside<'_>, GroupSlot)) {
        assert!(Inside::assume(|inside| {
            self.groups().attach(inside, &self.groups().reading(), group, |seat| hang(inside, seat))
        }));
    }
}

unsafe extern "C" fn count(data: *mut c_void, asked: *const Asked) -> u64 {
    // SAFETY: the shrinker was registered with a world, which is leaked; `asked` is this call's.
    let (host, group) = unsafe { (On(&*data.cast::<World>()), (*asked).group()) };
    let cache = &host.0.cache;
    let before = cache.counts.fetch_add(1, Relaxed);
    let counted = cache.counted.lock().unwrap().take();
    if let Some(mut counted) = counted {
        counted(before);
        *cache.counted.lock().unwrap() = Some(counted);
    }
    host.let_others();
    let _reading = host.groups().reading();
    let is_its = |of: GroupId| host.seat(of).group == group;
    let objects = cache.objects.lock().unwrap();
    match objects.iter().filter(|(of, _)| is_its(*of)).map(|(_, objects)| objects).sum() {
        0 => EMPTY,
        objects => objects,
    }
}

unsafe extern "C" fn scan(data: *mut c_void, asked: *mut Asked) -> u64 {
    // SAFETY: the shrinker was registered with a world, which is leaked; `asked` is this call's.
    let (host, asked) = unsafe { (On(&*data.cast::<World>()), &mut *asked) };
    let _reading = host.groups().reading();
    let mut freed = 0;
    for (of, objects) in host.0.cache.objects.lock().unwrap().iter_mut() {
        if host.seat(*of).group == asked.group() {
            let some = (*objects).min(asked.to_scan - freed);
            *objects -= some;
            freed += some;
        }
    }
    freed
}

impl On {
    /// Makes a world, which exists until the end of the program.
    fn new() -> On {
        let machine = Virtual::new(4096, 2);
        let data = PerCpuData::open(&machine, &Shape { span: 16 << 20, ..Shape::usual(2) }, |_| 0, ()).unwrap();
        let cache = Cache {
            objects: Mutex::default(),
            counted: Mutex::default(),
            counts: AtomicU32::new(0),
            is_slow: AtomicBool::new(false),
        };
        let (groups, shrinkers, offline) = (OnceLock::new(), OnceLock::new(), Mutex::default());
        let host =
            On(Box::leak(Box::new(World { machine, data, groups, shrinkers, offline, cache, id: OnceLock::new() })));
        assert!(host.0.groups.set(Groups::open(&host).unwrap()).is_ok());
        assert!(host.0.shrinkers.set(Shrinkers::open(&host).unwrap()).is_ok());
        let data = core::ptr::from_ref(host.0).cast_mut().cast();
        let (gone, seeks, batch) = (None, 1, 1);
        let spec =
            Spec { name: "cache", count, scan, data, gone, seeks, batch, by_node: true, by_group: true, inline: false };
        // SAFETY: the world, which is `data`, is leaked.
        assert!(host.0.id.set(unsafe { host.shrinkers().register(&host, &spec) }.unwrap()).is_ok());
        host
    }

    fn groups(&self) -> &'static Groups {
        self.0.groups.get().unwrap()
    }

    fn shrinkers(&self) -> &'static Shrinkers {
        self.0.shrinkers.get().unwrap()
    }

    fn seat(&self, group: GroupId) -> GroupSlot {
        Inside::assume(|inside| self.groups().attach_target(inside, &self.groups().reading(), group)).unwrap()
    }

    /// Makes a group that is charged, so that its heir is known for as long as that lasts.
    fn create(&self, parent: GroupId, name: &str) -> Option<GroupId> {
        let group = self.groups().create(self, parent, name).ok()?;
        self.groups().charge(self, group.payer(Kind::ByHand, 0), 1 << 20, OnLimit::Refuse).unwrap();
        Some(group)
    }

    fn delete(&self, group: GroupId) -> bool {
        self.groups().delete(self, group).is_ok()
    }

    /// Adds an object of a group.
    fn add(&self, group: GroupId) {
        let mut objects = self.0.cache.objects.lock().unwrap();
        match objects.iter_mut().find(|(of, _)| *of == group) {
            Some((_, objects)) if *objects > 0 => return *objects += 1,
            Some((_, objects)) => *objects = 1,
            None => objects.push((group, 1)),
        }
        drop(objects);
        self.mark(group);
    }

    fn let_others(&self) {
        if self.0.cache.is_slow.load(Relaxed) {
            std::thread::sleep(core::time::Duration::from_micros(20));
        }
    }

    fn mark_slot(&self, slot: u32) {
        Inside::assume(|inside| self.shrinkers().mark(inside, self, *self.0.id.get().unwrap(), slot, 0));
    }

    fn mark(&self, group: GroupId) {
        let mark = |seat: GroupSlot| {
            self.let_others();
            self.mark_slot(seat.slot);
        };
        assert!(Inside::assume(|inside| self.groups().attach(inside, &self.groups().reading(), group, mark)));
    }

    fn visit(&self, seat: GroupSlot) -> u64 {
        self.shrinkers().visit(self, &(), seat.group, seat.slot, 0, ScanPressure::of(0)).freed
    }

    fn is_found(&self, group: GroupId) -> bool {
        let slot = self.seat(group).slot;
        self.shrinkers().next_with_anything(0, slot) == Some(slot)
    }
}

/// A visit is in a callback, before or after the bit is cleared, while its group is deleted and the
/// slot gets a new group with objects.
#[test]
fn the_next_group_of_a_slot_keeps_its_mark() {
    for at in [0, 1] {
        let host = On::new();
        let parent = host.create(GroupId::ROOT, "parent").unwrap();
        let (first, next) = (host.create(parent, "first").unwrap(), Mutex::new(None));
        let next: &'static Mutex<Option<GroupId>> = Box::leak(Box::new(next));
        let seat = host.seat(first);
        host.mark(first);
        *host.0.cache.counted.lock().unwrap() = Some(Box::new(move |count| {
            if count == at {
                assert!(host.delete(first));
                (0..10).for_each(|_| _ = host.groups().tick(&host));
                let group = host.create(parent, "next").unwrap();
                assert_eq!(host.seat(group).slot, seat.slot, "the slot is used again");
                host.add(group);
                *next.lock().unwrap() = Some(group);
            }
        }));
        assert_eq!((host.visit(seat), host.0.cache.counts.load(Relaxed)), (0, 2));
        let next = next.lock().unwrap().unwrap();
        assert!(host.is_found(next), "there is something that no pass finds: call {at}");
        assert_eq!(host.visit(host.seat(next)), 1);
    }
}

/// The bit is cleared because the group is leaving and has no objects, before the deletion moves
/// bits to the parent.
#[test]
fn the_heir_of_a_group_that_leaves_gets_a_mark_that_was_cleared() {
    let host = On::new();
    let parent = host.create(GroupId::ROOT, "parent").unwrap();
    let child = host.create(parent, "child").unwrap();
    host.add(child);
    *host.0.offline.lock().unwrap() = Some(Box::new(move |child, parent| {
        *host.0.cache.counted.lock().unwrap() = Some(Box::new(move |count| {
            if count == 1 {
                // The second count: the bit is cleared.
                Inside::assume(|inside| host.shrinkers().offline(inside, &host, child.slot, parent.slot));
            }
        }));
        assert_eq!(host.visit(child), 0);
    }));
    assert!(host.delete(child));
    assert!(host.is_found(parent), "there is something that no pass finds");
    assert_eq!(host.visit(host.seat(parent)), 1);
}

/// A thread has found the group, and marks it after it is deleted.
#[test]
fn a_mark_that_meets_a_deletion_is_the_heirs() {
    let host = On::new();
    let parent = host.create(GroupId::ROOT, "parent").unwrap();
    let child = host.create(parent, "child").unwrap();
    host.0.cache.objects.lock().unwrap().push((child, 1));
    let mut marked = Vec::new();
    let hang = |seat: GroupSlot| {
        _ = host.delete(child);
        host.mark_slot(seat.slot);
        marked.push(seat.group);
    };
    assert!(Inside::assume(|inside| host.groups().attach(inside, &host.groups().reading(), child, hang)));
    assert_eq!(marked, [child, parent]);
    assert!(host.is_found(parent));
    assert_eq!(host.visit(host.seat(parent)), 1);
}

/// A shrinker with callbacks that know no groups is asked for its own group, and for the heir of
/// that.
#[test]
fn what_belongs_to_a_group_is_asked_for_no_other() {
    let host = On::new();
    let [owner, stranger] = ["owner", "stranger"].map(|name| host.create(GroupId::ROOT, name).unwrap());
    let (cache, id) = (&host.0.cache, *host.0.id.get().unwrap());
    host.shrinkers().belongs_to(id, owner);
    let counts = || cache.counts.swap(0, Relaxed);
    [owner, stranger].into_iter().for_each(|group| host.mark(group));
    host.visit(host.seat(stranger));
    assert_eq!((counts(), host.shrinkers().count(&host, &(), id, stranger, 0), counts()), (0, Some(0), 0));
    assert!(!host.is_found(stranger), "nor again");
    host.visit(host.seat(owner));
    assert_eq!(counts(), 2);
    host.mark(owner);
    assert!(host.delete(owner));
    host.visit(GroupSlot::ROOT);
    assert_eq!(counts(), 2);
}

/// Threads add and visit while groups are deleted and made, in few slots.
#[test]
fn of_what_threads_add_to_groups_that_go_nothing_stays_unseen() {
    let (host, seed, rounds) = (On::new(), seed(), number("NEAP_STEPS", 300));
    host.0.cache.is_slow.store(true, Relaxed);
    let living = Mutex::new(vec![GroupId::ROOT]);
    let any = |random: &mut Random| {
        let living = living.lock().unwrap();
        living[random.below(living.len())]
    };
    let visit_all = || {
        for seat in host.groups().online_slots() {
            if host.shrinkers().next_with_anything(0, seat.slot) == Some(seat.slot) {
                host.visit(seat);
            }
        }
    };
    let delete_or_create = |random: &mut Random, name: &str| {
        let group = any(random);
        host.let_others();
        if random.below(2) == 0 && living.lock().unwrap().len() < 6 {
            living.lock().unwrap().extend(host.create(group, name));
        } else if host.delete(group) {
            living.lock().unwrap().retain(|&other| other != group);
        }
        _ = host.groups().tick(&host);
    };
    let slots = host.groups().count(&host).slots;
    for round in 0..rounds {
        let of_thread = |thread: u64| {
            Virtual::run_on(thread as usize % 2);
            Random(seed ^ round << 8 ^ (thread + 1) << 48)
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = of_thread(0);
                (0..16).for_each(|made| delete_or_create(&mut random, &format!("{round}-{made}")));
            });
            for thread in 1..3 {
                let (of_thread, any) = (&of_thread, &any);
                scope.spawn(move || {
                    let mut random = of_thread(thread);
                    // The group may be deleted meanwhile. Nothing is added to the root, so that its
                    // objects come from deletions alone.
                    let groups = (0..8).map(|_| any(&mut random)).filter(|&group| group != GroupId::ROOT);
                    groups.for_each(|group| host.add(group));
                });
                scope.spawn(move || {
                    of_thread(thread + 2);
                    (0..6).for_each(|_| visit_all());
                });
            }
        });
        (0..3).for_each(|_| visit_all());
        let mut objects = host.0.cache.objects.lock().unwrap();
        let left: Vec<_> = objects.drain(..).filter(|(_, objects)| *objects > 0).collect();
        assert!(left.is_empty(), "objects that no pass finds in round {round}: {left:?}");
    }
    assert!(host.groups().count(&host).slots < slots + 100, "slots are used again");
}
