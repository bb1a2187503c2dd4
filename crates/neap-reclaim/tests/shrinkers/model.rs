//! Random histories against a sequential model: requested objects, deferred work, and that no
//! shrinker with objects is missed. The same by threads, of which only the end is known.

use crate::host::{On, Stage, with};
use core::ffi::c_void;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use neap_base::gate::Inside;
use neap_base::{Linux, Platform};
use neap_groups::GroupId;
use neap_reclaim::{Asked, EMPTY, ScanPressure, ShrinkerError, ShrinkerId, Shrinkers, Spec, Unregistered, WHOLE, Work};
use neap_testing::random::{Random, number, seed};
use neap_testing::virtual_platform::{Call, Virtual};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread;

const SLOTS: usize = 300;
const NODES: usize = 2;
const SLOT_BITS: u32 = 21;

/// Returns the group that has a slot, after that many other groups.
fn group(slot: usize, generation: u64) -> GroupId {
    GroupId::from_bits(slot as u64 | (generation + 1) << SLOT_BITS)
}

/// Objects of a shrinker of the model, by slot and node.
struct Held {
    id: ShrinkerId,
    spec: Spec<'static>,
    objects: Box<Mutex<BTreeMap<(usize, usize), u64>>>,
    deferred: BTreeMap<(usize, usize), u64>,
}

fn objects<'a>(data: *mut c_void) -> &'a Mutex<BTreeMap<(usize, usize), u64>> {
    // SAFETY: registered with such a map, which outlives the registration.
    unsafe { &*data.cast() }
}

fn key(asked: &Asked) -> (usize, usize) {
    ((asked.group & ((1 << SLOT_BITS) - 1)) as usize, asked.node as usize)
}

unsafe extern "C" fn count(data: *mut c_void, asked: *const Asked) -> u64 {
    // SAFETY: what is asked is this call's.
    let key = key(unsafe { &*asked });
    objects(data).lock().unwrap().get(&key).map_or(EMPTY, |&objects| objects)
}

unsafe extern "C" fn scan(data: *mut c_void, asked: *mut Asked) -> u64 {
    // SAFETY: `asked` is this call's.
    let asked = unsafe { &mut *asked };
    let (mut map, key) = (objects(data).lock().unwrap(), key(asked));
    let left = map.get(&key).copied().unwrap_or(0);
    let freed = left.min(asked.to_scan);
    map.insert(key, left - freed);
    map.retain(|_, objects| *objects > 0);
    freed
}

impl Held {
    /// Returns where it keeps the objects of a group on a node; `None` if it is not asked for
    /// these.
    fn key(&self, slot: usize, node: usize) -> Option<(usize, usize)> {
        let asked = self.spec.by_group || slot == 0;
        asked.then_some((slot, if self.spec.by_node { node } else { 0 }))
    }

    fn has(&self, key: (usize, usize)) -> u64 {
        self.objects.lock().unwrap().get(&key).copied().unwrap_or(0)
    }

    /// Does in the model what a visit does, by the arithmetic alone. Returns the freed objects
    /// and those that are left.
    fn visit(&mut self, key: (usize, usize), pressure: ScanPressure) -> (u64, u64) {
        let (mut left, mut freed) = (self.has(key), 0);
        if left == 0 {
            return (0, 0);
        }
        let deferred = self.deferred.remove(&key).unwrap_or(0);
        let mut work = Work::new(left, deferred, self.spec.seeks, self.spec.batch, pressure);
        while let Some(next) = work.next() {
            freed += next.min(left);
            left = left.saturating_sub(next);
            work.done(next);
        }
        if work.deferred() > 0 {
            self.deferred.insert(key, work.deferred());
        }
        (freed, left)
    }
}

struct History<'h> {
    host: &'h On<'h, Virtual>,
    shrinkers: &'h Shrinkers,
    random: Random,
    held: Vec<Held>,
    generations: Vec<u64>,
    /// Memory may be missing; then deferred work may be, too.
    faults: bool,
}

impl History<'_> {
    fn slot(&mut self) -> usize {
        // Few slots are used often, and other ones now and then.
        let most = [4, 4, 40, SLOTS][self.random.below(4)];
        self.random.below(most)
    }

    fn register(&mut self) {
        let objects = Box::new(Mutex::new(BTreeMap::new()));
        let spec = Spec {
            name: "model",
            count,
            scan,
            data: core::ptr::from_ref(&*objects).cast_mut().cast(),
            gone: None,
            seeks: self.random.below(4) as u32,
            batch: [0, 1, 32, 1000][self.random.below(4)],
            by_node: self.random.below(2) == 0,
            by_group: self.random.below(4) > 0,
            inline: false,
        };
        // SAFETY: the map stays until it is unregistered.
        match unsafe { self.shrinkers.register(self.host, &spec) } {
            Ok(id) => self.held.push(Held { id, spec, objects, deferred: BTreeMap::new() }),
            Err(error) => assert!(self.faults && error == ShrinkerError::NoMemory, "{error}"),
        }
    }

    fn add(&mut self) {
        let (slot, node, objects) = (self.slot(), self.random.below(NODES), 1 + self.random.below(3000) as u64);
        let at = self.random.below(self.held.len());
        let held = &self.held[at];
        let Some(key) = held.key(slot, node) else { return };
        let before = held.has(key);
        held.objects.lock().unwrap().insert(key, before + objects);
        if before == 0 {
            Inside::assume(|inside| self.shrinkers.mark(inside, self.host, held.id, key.0 as u32, key.1 as u32));
        }
    }

    fn visit(&mut self) {
        let (slot, node) = (self.slot(), self.random.below(NODES));
        let pressure = ScanPressure {
            share: if self.random.below(4) == 0 { self.random.below(WHOLE as usize + 1) as u32 } else { WHOLE },
            least: self.random.below(4) == 0,
            ..ScanPressure::of(self.random.below(13) as u32)
        };
        let mut expected = 0;
        let mut left = Vec::new();
        for held in &mut self.held {
            let Some(key) = held.key(slot, node) else { continue };
            let (freed, objects) = held.visit(key, pressure);
            expected += freed;
            left.push((held.id, key, objects));
        }
        let group = group(slot, self.generations[slot]);
        let visited = self.shrinkers.visit(self.host, &(), group, slot as u32, node as u32, pressure);
        if self.faults {
            // Deferred work differs then, and so do the freed objects.
            self.held.iter_mut().for_each(|held| held.deferred.clear());
            return;
        }
        assert_eq!(visited.freed, expected, "slot {slot}, node {node}, {pressure:?}");
        for (id, key, objects) in left {
            let held = self.held.iter().find(|held| held.id == id).unwrap();
            let deferred = self.shrinkers.deferred(id, key.0 as u32, key.1 as u32);
            assert_eq!(
                (held.has(key), deferred),
                (objects, held.deferred.get(&key).copied().unwrap_or(0)),
                "{id:?} {key:?}"
            );
        }
    }

    fn delete(&mut self) {
        let (slot, heir) = (1 + self.slot() % (SLOTS - 1), self.slot());
        if slot == heir {
            return;
        }
        for held in self.held.iter_mut().filter(|held| held.spec.by_group) {
            for node in 0..NODES {
                let mut objects = held.objects.lock().unwrap();
                let moved = objects.remove(&(slot, node)).unwrap_or(0);
                if moved > 0 {
                    *objects.entry((heir, node)).or_default() += moved;
                }
                let moved = held.deferred.remove(&(slot, node)).unwrap_or(0);
                if moved > 0 {
                    *held.deferred.entry((heir, node)).or_default() += moved;
                }
            }
        }
        let group = group(slot, self.generations[slot]);
        self.host.delete(self.shrinkers, group, slot as u32, heir as u32);
        self.generations[slot] += 1;
    }

    /// Checks that no shrinker with objects is missed.
    fn check(&self) {
        for held in &self.held {
            for &(slot, node) in held.objects.lock().unwrap().keys() {
                let nodes = if held.spec.by_node { node..node + 1 } else { 0..NODES };
                for node in nodes {
                    let found = self.shrinkers.next_with_anything(node as u32, slot as u32);
                    assert_eq!(found, Some(slot as u32), "{:?} has something in {slot} on {node}", held.id);
                }
            }
        }
    }
}

fn history(faults: bool) {
    let stage = Stage::with_nodes(&[0, 1]);
    with(&stage, |host, shrinkers| {
        let (random, steps) = (Random(seed()), number("NEAP_STEPS", 20_000));
        let mut history = History { host, shrinkers, random, held: Vec::new(), generations: vec![0; SLOTS], faults };
        for step in 0..steps {
            match history.random.below(24) {
                0 | 1 if history.held.len() < 150 => history.register(),
                2 if history.held.len() > 20 => {
                    let at = history.random.below(history.held.len());
                    let held = history.held.swap_remove(at);
                    assert_eq!(shrinkers.unregister(host, held.id), Ok(Unregistered::Gone));
                }
                3..12 if !history.held.is_empty() => history.add(),
                12 => history.delete(),
                13 if faults => {
                    let (left, calls) = [(usize::MAX, 0), (0, 3), (2, 0)][history.random.below(3)];
                    stage.left.store(left, Relaxed);
                    stage.platform.fail(Call::Map, 0, calls);
                }
                _ => history.visit(),
            }
            if step % 64 == 0 {
                history.check();
            }
        }
        history.check();
        assert!(history.held.len() > 20);
        // All objects can be found, and then it is known that none are left.
        stage.left.store(usize::MAX, Relaxed);
        stage.platform.fail(Call::Map, 0, 0);
        let all = ScanPressure { least: true, ..ScanPressure::of(0) };
        for _ in 0..2 {
            for (node, slot) in (0..NODES).flat_map(|node| (0..SLOTS).map(move |slot| (node, slot))) {
                let group = group(slot, history.generations[slot]);
                while shrinkers.visit(host, &(), group, slot as u32, node as u32, all).freed > 0 {}
            }
        }
        for held in history.held.drain(..) {
            assert!(held.objects.lock().unwrap().is_empty(), "{:?}", held.spec);
            shrinkers.unregister(host, held.id).unwrap();
        }
        for node in 0..NODES as u32 {
            shrinkers.visit(host, &(), GroupId::ROOT, 0, node, all);
            assert_eq!(shrinkers.next_with_anything(node, 0), None);
        }
    });
}

#[test]
fn visits_ask_for_what_the_model_says() {
    history(false);
}

#[test]
fn no_shrinker_is_missed_when_allocations_fail() {
    history(true);
}

/// Objects of a shrinker in some groups.
struct Shared([AtomicU64; 8]);

unsafe extern "C" fn count_shared(data: *mut c_void, asked: *const Asked) -> u64 {
    // SAFETY: registered with such a value, and what is asked is this call's.
    let (shared, key) = unsafe { (&*data.cast::<Shared>(), key(&*asked)) };
    match shared.0[key.0].load(Relaxed) {
        0 => EMPTY,
        objects => objects,
    }
}

unsafe extern "C" fn scan_shared(data: *mut c_void, asked: *mut Asked) -> u64 {
    // SAFETY: the shrinker was registered with such a value, which outlives it; `asked` is this
    // call's.
    let (shared, asked) = unsafe { (&*data.cast::<Shared>(), &mut *asked) };
    let objects = &shared.0[key(asked).0];
    let before = objects.try_update(Relaxed, Relaxed, |left| Some(left.saturating_sub(asked.to_scan)));
    before.map_or(0, |before| before.min(asked.to_scan))
}

fn storm<P: Platform>(stage: &Stage<P>) {
    const EACH: u64 = 20_000;
    with(stage, |host, shrinkers| {
        let shared = [(); 3].map(|()| Shared([const { AtomicU64::new(0) }; 8]));
        let ids = shared.each_ref().map(|shared| {
            let spec = Spec {
                name: "shared",
                count: count_shared,
                scan: scan_shared,
                data: core::ptr::from_ref(shared).cast_mut().cast(),
                gone: None,
                seeks: 1,
                batch: 1,
                by_node: true,
                by_group: true,
                inline: false,
            };
            // SAFETY: it outlives the registry.
            unsafe { shrinkers.register(host, &spec) }.unwrap()
        });
        let (freed, first) = (AtomicU64::new(0), seed());
        let visit_all = || {
            shrinkers.each_group_with_anything(0, |slot| {
                let visited = shrinkers.visit(host, &(), group(slot as usize, 0), slot, 0, ScanPressure::of(0));
                freed.fetch_add(visited.freed, Relaxed);
            });
        };
        thread::scope(|scope| {
            for thread in 0..2 {
                let (shared, ids) = (&shared, &ids);
                scope.spawn(move || {
                    let mut random = Random(first + thread);
                    for _ in 0..EACH {
                        let (at, slot) = (random.below(3), random.below(8));
                        if shared[at].0[slot].fetch_add(1, Relaxed) == 0 {
                            Inside::assume(|inside| shrinkers.mark(inside, host, ids[at], slot as u32, 0));
                        }
                    }
                });
                scope.spawn(|| (0..EACH / 8).for_each(|_| visit_all()));
            }
        });
        // All added objects are found by visits of groups with bits.
        (0..3).for_each(|_| visit_all());
        assert_eq!(freed.load(Relaxed), 2 * EACH, "objects that no pass finds");
        assert_eq!(shrinkers.next_with_anything(0, 0), None);
    });
}

#[test]
fn of_what_threads_add_nothing_stays_unseen() {
    storm(&Stage::with_nodes(&[0, 0]));
    storm(&Stage::on(Linux::probe()));
}
