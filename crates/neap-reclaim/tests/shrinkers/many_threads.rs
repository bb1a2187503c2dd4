//! 64 threads on as many virtual CPUs, which lose theirs at any step: visits, shrinkers that come
//! and go, marks, reports and waits for callbacks.
//!
//! All added objects are found, no shrinker is called after it has gone, and `gone` is called once
//! for each.

use crate::host::{On, Stage, with};
use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use neap_base::gate::Inside;
use neap_groups::GroupId;
use neap_reclaim::{
    Asked, EMPTY, Report, STOP, ScanPressure, ShrinkerError, ShrinkerId, Shrinkers, Spec, Unregistered,
};
use neap_testing::random::{Random, number, seed};
use neap_testing::virtual_platform::Virtual;
use std::sync::{Barrier, Mutex};
use std::thread;

const THREADS: usize = 64;
const SLOTS: usize = 96;
const NODES: usize = 2;
/// Number of caches that stay.
const CACHES: usize = 5;

/// A cache of some groups' objects, which may be told to go.
struct Cache {
    objects: [AtomicU32; SLOTS * NODES],
    freed: AtomicU64,
    /// 1 while it may be called; `gone` sets 0.
    alive: AtomicU32,
    late: AtomicU64,
    /// Its own id, if it unregisters that when it is called.
    ends: Mutex<Option<ShrinkerId>>,
}

/// Argument of the callbacks.
struct Data<'d> {
    cache: Cache,
    stage: (On<'d, Virtual>, &'d Shrinkers),
}

impl Cache {
    fn new() -> Cache {
        Cache {
            objects: [const { AtomicU32::new(0) }; SLOTS * NODES],
            freed: AtomicU64::new(0),
            alive: AtomicU32::new(1),
            late: AtomicU64::new(0),
            ends: Mutex::new(None),
        }
    }

    fn of(&self, asked: &Asked) -> &AtomicU32 {
        self.late.fetch_add(u64::from(self.alive.load(Relaxed) != 1), Relaxed);
        &self.objects[asked.group as usize % SLOTS * NODES + asked.node as usize]
    }
}

fn data<'d>(data: *mut c_void) -> &'d Data<'d> {
    // SAFETY: registered with such a value, which outlives the registry.
    unsafe { &*data.cast() }
}

unsafe extern "C" fn count(of: *mut c_void, asked: *const Asked) -> u64 {
    let Data { cache, stage: (host, shrinkers) } = data(of);
    // SAFETY: what is asked is this call's.
    let objects = cache.of(unsafe { &*asked });
    host.lose_cpu();
    let ends = cache.ends.lock().unwrap().take();
    if let Some(id) = ends {
        // Its owner may unregister it at this moment.
        let answer = shrinkers.unregister(host, id);
        assert!(matches!(answer, Ok(Unregistered::Later) | Err(ShrinkerError::NoSuchShrinker)), "{answer:?}");
        assert_eq!(shrinkers.synchronize(host), Err(ShrinkerError::InCallback));
    }
    match objects.load(Relaxed) {
        0 => EMPTY,
        objects => objects.into(),
    }
}

unsafe extern "C" fn scan(of: *mut c_void, asked: *mut Asked) -> u64 {
    let Data { cache, stage: (host, _) } = data(of);
    // SAFETY: `asked` is this call's.
    let asked = unsafe { &mut *asked };
    let objects = cache.of(asked);
    host.lose_cpu();
    let most = asked.to_scan as u32;
    let before = objects.try_update(Relaxed, Relaxed, |left| Some(left.saturating_sub(most))).unwrap_or(0);
    cache.freed.fetch_add(before.min(most).into(), Relaxed);
    cache.late.fetch_add(u64::from(cache.alive.load(Relaxed) != 1), Relaxed);
    if before == 0 { STOP } else { before.min(most).into() }
}

unsafe extern "C" fn gone(of: *mut c_void) {
    data(of).cache.alive.fetch_sub(1, Relaxed);
}

impl Data<'_> {
    fn spec(&self) -> Spec<'static> {
        Spec {
            name: "one of many",
            count,
            scan,
            data: core::ptr::from_ref(self).cast_mut().cast(),
            gone: Some(gone),
            seeks: 1,
            batch: 1,
            by_node: true,
            by_group: true,
            inline: false,
        }
    }

    /// Adds an object of a group, and marks that if it is the first.
    fn add(&self, id: ShrinkerId, random: &mut Random) {
        let (slot, node) = (random.below(SLOTS), random.below(NODES));
        if self.cache.objects[slot * NODES + node].fetch_add(1, Relaxed) == 0 {
            let (host, shrinkers) = &self.stage;
            Inside::assume(|inside| shrinkers.mark(inside, host, id, slot as u32, node as u32));
        }
    }
}

fn group(slot: u32) -> GroupId {
    // A generation, which callbacks divide off.
    GroupId::from_bits(u64::from(slot) + (SLOTS as u64) * 1_000_000)
}

fn visit_all(host: &On<'_, Virtual>, shrinkers: &Shrinkers, node: u32) {
    shrinkers.each_group_with_anything(node, |slot| {
        shrinkers.visit(host, &(), group(slot), slot, node, ScanPressure::of(0));
    });
}

#[test]
fn sixty_four_threads_visit_register_mark_report_and_wait() {
    let (seed, rounds) = (seed(), number("NEAP_STEPS", 1000));
    let nearest = [0, 1].repeat(THREADS / NODES);
    let stage = Stage::with_nodes(&nearest);
    stage.loses_cpu.store(16, Relaxed);
    with(&stage, |host, shrinkers| {
        let made = || Data { cache: Cache::new(), stage: (*host, shrinkers) };
        let stay: Vec<_> = (0..CACHES).map(|_| made()).collect();
        // SAFETY: they outlive the registry.
        let ids: Vec<_> = stay.iter().map(|data| unsafe { shrinkers.register(host, &data.spec()) }.unwrap()).collect();
        let come: Mutex<Vec<Box<Data<'_>>>> = Mutex::default();
        let [added, visits, reports] = [(); 3].map(|()| AtomicU64::new(0));
        let all = Barrier::new(THREADS);
        let work = |thread: usize| {
            all.wait();
            let mut random = Random(seed ^ (thread as u64 + 1) << 32);
            Virtual::run_on(thread);
            for _ in 0..rounds {
                match thread % 8 {
                    0..3 => {
                        visit_all(host, shrinkers, (thread % NODES) as u32);
                        visits.fetch_add(1, Relaxed);
                    }
                    3..5 => {
                        for _ in 0..32 {
                            let at = random.below(CACHES);
                            stay[at].add(ids[at], &mut random);
                            added.fetch_add(1, Relaxed);
                        }
                    }
                    5 | 6 => {
                        let data = Box::new(made());
                        // SAFETY: it outlives the registry.
                        let id = unsafe { shrinkers.register(host, &data.spec()) }.unwrap();
                        (0..4).for_each(|_| data.add(id, &mut random));
                        if random.below(2) == 0 {
                            *data.cache.ends.lock().unwrap() = Some(id);
                        }
                        host.lose_cpu();
                        match shrinkers.unregister(host, id) {
                            Ok(Unregistered::Gone) => assert_eq!(data.cache.alive.load(Relaxed), 0, "{id:?} is told"),
                            // It unregisters itself, and `gone` is called when the callback has
                            // returned.
                            Err(ShrinkerError::NoSuchShrinker) => {}
                            other => panic!("{other:?}"),
                        }
                        come.lock().unwrap().push(data);
                    }
                    _ if random.below(2) == 0 => assert_eq!(shrinkers.synchronize(host), Ok(())),
                    _ => shrinkers.each(|report: &Report| {
                        assert_eq!(report.name.as_str(), "one of many");
                        reports.fetch_add(1, Relaxed);
                    }),
                }
            }
        };
        thread::scope(|scope| (0..THREADS).for_each(|thread| drop(scope.spawn(move || work(thread)))));
        shrinkers.synchronize(host).unwrap();
        Virtual::run_on(0);
        // All added objects are found by visits of groups with bits. After that no group has a bit.
        for (node, _) in (0..NODES as u32).flat_map(|node| [(node, 1), (node, 2), (node, 3)]) {
            visit_all(host, shrinkers, node);
        }
        let freed: u64 = stay.iter().map(|data| data.cache.freed.load(Relaxed)).sum();
        assert_eq!(freed, added.load(Relaxed), "objects that no pass finds");
        assert_eq!((0..NODES as u32).find_map(|node| shrinkers.next_with_anything(node, 0)), None);
        let come = come.into_inner().unwrap();
        assert_eq!(come.len() as u64, rounds * 16);
        for data in come.iter().map(|data| &**data).chain(&stay) {
            assert_eq!(data.cache.late.load(Relaxed), 0, "called after it was told that it is gone");
        }
        assert!(come.iter().all(|data| data.cache.alive.load(Relaxed) == 0), "told once");
        assert!(visits.load(Relaxed) > 0 && reports.load(Relaxed) > 0);
        assert!(ids.iter().all(|&id| shrinkers.unregister(host, id) == Ok(Unregistered::Gone)));
    });
}
