//! Meetings of charges that wait, caches that are busy, limits that are lowered, and callbacks that
//! charge.
//!
//! Method: the process's own groups, threads and caches. No times are measured; a guard of a minute
//! detects a hang.

use core::future::Future;
use core::pin::{Pin, pin};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use core::task::{Context, Poll};
use core::time::Duration;
use neap::groups::{Bound, Charge, Event, Group};
use neap::lru::{LruList, LruStatus};
use neap::reclaim::{self, Shrinker};
use std::collections::BTreeMap;
use std::sync::{Arc, Barrier, Mutex};
use std::task::Wake;
use std::time::Instant;

const OBJECT: u64 = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(60);

type Objects = Arc<Mutex<BTreeMap<u64, Charge>>>;

/// A cache as in the documentation: while its lock is held it counts nothing, and frees nothing.
struct Cache {
    group: Group,
    objects: Objects,
    next: AtomicU64,
    calls: Arc<AtomicU64>,
    _shrinker: Shrinker,
}

impl Cache {
    fn new(path: &str, bound: Bound, objects: u64) -> Cache {
        let group = Group::find_or_create(path).unwrap();
        group.set(bound, objects * OBJECT).unwrap();
        let (all, calls) = (Objects::default(), Arc::new(AtomicU64::new(0)));
        let (counted, shrunk, called) = (all.clone(), all.clone(), calls.clone());
        let shrinker = Shrinker::named("cache")
            .group(group)
            .batch(4)
            .inline(true)
            .register(
                move || counted.try_lock().map_or(0, |objects| BTreeMap::<u64, Charge>::len(&objects) as u64),
                move |wanted| {
                    called.fetch_add(1, Relaxed);
                    let Ok(mut objects) = shrunk.try_lock() else { return 0 };
                    (0..wanted).filter_map(|_| objects.pop_first()).count() as u64
                },
            )
            .unwrap();
        Cache { group, objects: all, next: AtomicU64::new(0), calls, _shrinker: shrinker }
    }

    fn put(&self, charge: Charge) {
        self.objects.lock().unwrap().insert(self.next.fetch_add(1, Relaxed), charge);
    }

    fn fill(&self, objects: u64) {
        (0..objects).for_each(|_| self.put(self.group.charge(OBJECT).unwrap()));
    }

    fn len(&self) -> usize {
        self.objects.lock().unwrap().len()
    }

    fn count(&self, event: Event) -> u64 {
        self.group.info().unwrap().events[event as usize]
    }
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let (mut future, mut context) = (pin!(future), Context::from_waker(&waker));
    loop {
        if let Poll::Ready(answer) = future.as_mut().poll(&mut context) {
            return answer;
        }
        std::thread::park();
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "{what} does not come true");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// 1. The cache's lock is held. 2. A charge waits, and the cache has nothing to give. 3. The lock
///    is released, without a mark.
#[test]
fn waiting_charge_reclaims_busy_cache_after_unlock() {
    for is_async in [false, true] {
        let cache = Cache::new(&format!("asking/busy/{is_async}"), Bound::Max, 16);
        cache.fill(16);
        let waiting = AtomicBool::new(false);
        let charge = std::thread::scope(|scope| {
            let held = cache.objects.lock().unwrap();
            let (group, waiting) = (cache.group, &waiting);
            let charging = scope.spawn(move || {
                waiting.store(true, Relaxed);
                match is_async {
                    true => block_on(group.request(OBJECT).deadline(PATIENCE).into_future()),
                    false => group.charge_or_wait(OBJECT, PATIENCE),
                }
            });
            until("it waits", || waiting.load(Relaxed));
            // So long that passes have found nothing.
            std::thread::sleep(Duration::from_millis(50));
            drop(held);
            charging.join().unwrap()
        });
        assert_eq!(charge.map(|charge| charge.bytes()), Ok(OBJECT));
        assert_eq!(cache.count(Event::Refused), 0);
    }
}

/// The job queue has sixteen entries.
#[test]
fn however_many_tenants_wait_each_is_asked() {
    const TENANTS: usize = 64;
    let caches: Vec<Cache> = (0..TENANTS).map(|at| Cache::new(&format!("asking/many/{at}"), Bound::Max, 16)).collect();
    caches.iter().for_each(|cache| cache.fill(16));
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = Context::from_waker(&waker);
    let mut futures: Vec<_> =
        caches.iter().map(|cache| Some(cache.group.request(OBJECT).deadline(PATIENCE).into_future())).collect();
    while futures.iter().any(Option::is_some) {
        for (future, cache) in futures.iter_mut().zip(&caches) {
            let Some(Poll::Ready(answer)) = future.as_mut().map(|pending| Pin::new(pending).poll(&mut context)) else {
                continue;
            };
            cache.put(answer.unwrap());
            *future = None;
        }
        std::thread::park_timeout(Duration::from_millis(20));
    }
    assert!(caches.iter().all(|cache| cache.calls.load(Relaxed) > 0 && cache.count(Event::Refused) == 0));
}

/// A slow cache with objects in use takes the time of a pass before a small cache is asked for
/// anything: each pass for the waiting charge begins with more pressure, and caches take turns.
#[test]
fn waiting_charge_reaches_a_small_cache_behind_a_slow_one() {
    let group = Group::create("asking/slow").unwrap();
    let busy = |_| {
        std::thread::sleep(Duration::from_millis(90));
        0
    };
    let slow = Shrinker::named("slow").group(group).batch(8).register(|| 4000, busy).unwrap();
    let cache = Cache::new("asking/slow", Bound::Max, 16);
    cache.fill(16);
    let charge = cache.group.charge_or_wait(OBJECT, PATIENCE);
    assert_eq!(charge.map(|charge| charge.bytes()), Ok(OBJECT));
    drop(slow);
}

#[test]
fn a_limit_below_usage_is_reached_by_itself() {
    for bound in [Bound::Max, Bound::High] {
        let cache = Cache::new(&format!("asking/cut/{}", bound as u8), bound, 256);
        cache.fill(200);
        cache.group.set(bound, 64 * OBJECT).unwrap();
        until("usage is below the limit", || cache.group.info().unwrap().charged <= 64 * OBJECT);
        assert!(cache.len() > 32, "{} of 64 are left", cache.len());
    }
}

#[test]
fn charges_of_every_kind_find_room_below_a_limit_that_was_cut() {
    let cache = Cache::new("asking/cut while charging", Bound::Max, 256);
    for round in 0..12 {
        cache.group.set(Bound::Max, 256 * OBJECT).unwrap();
        cache.fill(256 - cache.len() as u64);
        cache.group.set(Bound::Max, 64 * OBJECT).unwrap();
        let charge = match round % 3 {
            0 => cache.group.charge(OBJECT),
            1 => cache.group.charge_or_wait(OBJECT, PATIENCE),
            _ => block_on(cache.group.request(OBJECT).deadline(PATIENCE).into_future()),
        };
        cache.put(charge.unwrap_or_else(|refused| panic!("round {round}: {refused}")));
    }
    assert_eq!(cache.count(Event::Refused), 0);
}

#[test]
fn a_high_bounds_what_futures_charge_as_it_does_what_threads_do() {
    let cache = Cache::new("asking/high", Bound::High, 32);
    let mut most = 0;
    for _ in 0..300 {
        let charge = block_on(cache.group.request(OBJECT).deadline(PATIENCE).into_future()).unwrap();
        cache.put(charge);
        most = most.max(cache.len());
    }
    assert!(cache.calls.load(Relaxed) > 0 && most < 128, "{most} objects at once");
}

/// It compresses: the copy is charged before the original is freed. At the limit it uses the
/// reserve; above a `high` it is not delayed.
#[test]
fn a_callback_that_charges_is_neither_held_up_nor_refused() {
    for bound in [Bound::Max, Bound::High] {
        let group = Group::create(&format!("asking/compress/{}", bound as u8)).unwrap();
        let (objects, copies) = (Objects::default(), Objects::default());
        (0..64).for_each(|key| _ = objects.lock().unwrap().insert(key, group.charge(OBJECT).unwrap()));
        let (counted, shrunk, kept) = (objects.clone(), objects.clone(), copies.clone());
        let failures = Arc::new(AtomicU64::new(0));
        let failed = failures.clone();
        let shrinker = Shrinker::named("compresses")
            .group(group)
            .batch(1)
            .register(
                move || counted.try_lock().map_or(0, |objects| BTreeMap::<u64, Charge>::len(&objects) as u64),
                move |_| {
                    let Some((key, original)) = shrunk.lock().unwrap().pop_first() else { return 0 };
                    match group.charge(OBJECT / 8) {
                        Ok(copy) => _ = kept.lock().unwrap().insert(key, copy),
                        Err(_) => _ = failed.fetch_add(1, Relaxed),
                    }
                    drop(original);
                    1
                },
            )
            .unwrap();
        group.drain().unwrap();
        group.set(bound, 64 * OBJECT).unwrap();
        let more: Vec<Charge> = (0..16).map(|_| group.charge(OBJECT).unwrap()).collect();
        let mut barred = false;
        reclaim::each_culprit(|culprit| barred |= culprit.shrinker == shrinker.id().to_bits());
        assert!(!barred && failures.load(Relaxed) == 0 && !copies.lock().unwrap().is_empty());
        drop((shrinker, more));
    }
}

/// A list that rotates used items, all of which were used.
#[test]
fn a_visit_ends_when_there_is_enough() {
    let group = Group::create("asking/over").unwrap();
    group.set(Bound::Max, 256 * OBJECT).unwrap();
    let list: Arc<LruList<(AtomicBool, Mutex<Option<Charge>>)>> = Arc::new(LruList::new().unwrap());
    let (counted, shrunk) = (list.clone(), list.clone());
    let decide = |value: &(AtomicBool, Mutex<Option<Charge>>)| {
        if value.0.swap(false, Relaxed) { LruStatus::Rotate } else { LruStatus::Removed }
    };
    let _shrinker = Shrinker::named("over")
        .group(group)
        .batch(4)
        .object_bytes(OBJECT)
        .register(
            move || counted.count(group) as u64,
            move |wanted| {
                let gone = |value: neap::lru::Handle<(AtomicBool, Mutex<Option<Charge>>)>| {
                    _ = value.1.lock().unwrap().take();
                };
                shrunk.walk(group, 0, wanted as usize, decide, gone).removed as u64
            },
        )
        .unwrap();
    let mut least = 256;
    for number in 0..1000 {
        let charge = group.charge(OBJECT).unwrap();
        list.add(group, (AtomicBool::new(true), Mutex::new(Some(charge)))).unwrap();
        if number > 256 {
            least = least.min(list.count(group));
        }
    }
    assert!(least > 192, "{least} of 256 were left");
}

/// 64 threads are in callbacks. The charge of another thread is served by a reclaimer, which has a
/// callback slot of its own.
#[test]
fn charge_gets_reclaimer_while_many_threads_run_callbacks() {
    const THREADS: usize = 64;
    let (enter, leave) = (Arc::new(Barrier::new(THREADS + 1)), Arc::new(Barrier::new(THREADS + 1)));
    let group = Group::create("asking/crowd").unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let (entered, left, over) = (enter.clone(), leave.clone(), is_over.clone());
    let crowd = Shrinker::named("crowd")
        .group(group)
        .budget(PATIENCE)
        .register(
            || 1000,
            move |_| {
                // The pass continues with other priorities.
                if !over.load(Relaxed) {
                    entered.wait();
                    left.wait();
                }
                reclaim::STOP
            },
        )
        .unwrap();
    let cache = Cache::new("asking/beside the crowd", Bound::Max, 16);
    cache.fill(16);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| reclaim::reclaim(group, OBJECT, Duration::from_nanos(u64::MAX / 4)));
        }
        enter.wait();
        (0..32).for_each(|_| cache.put(cache.group.request(OBJECT).inline().now().unwrap()));
        is_over.store(true, Relaxed);
        leave.wait();
    });
    drop(crowd);
    assert_eq!(cache.count(Event::Refused), 0);
}

#[test]
fn a_cache_that_was_busy_is_no_critical_pressure() {
    let group = Group::create("asking/pressure").unwrap();
    group.set(Bound::Max, 16 * OBJECT).unwrap();
    let held: Vec<Charge> = (0..16).map(|_| group.charge(OBJECT).unwrap()).collect();
    for answer in [0, reclaim::STOP] {
        let busy = Shrinker::named("busy").group(group).batch(4).register(|| 64, move |_| answer).unwrap();
        assert!(group.charge(OBJECT).is_err());
        assert_eq!(group.info().unwrap().events[Event::PressureCritical as usize], 0, "answers {answer}");
        drop(busy);
    }
    drop(held);
}

/// Prints how late waits end, one thread at a time: `--ignored --nocapture`.
#[test]
#[ignore = "a measurement, for a machine that does nothing else"]
fn waits_end_soon_after_their_deadline() {
    const TIME: Duration = Duration::from_millis(5);
    let cache = Cache::new("asking/late", Bound::Max, 16);
    let held: Vec<Charge> = (0..16).map(|_| cache.group.charge(OBJECT).unwrap()).collect();
    for is_async in [false, true] {
        let mut late: Vec<Duration> = (0..1000)
            .map(|_| {
                let (request, begun) = (cache.group.request(OBJECT).deadline(TIME), Instant::now());
                let answer = if is_async { block_on(request.into_future()) } else { request.wait() };
                assert!(answer.is_err());
                begun.elapsed().saturating_sub(TIME)
            })
            .collect();
        late.sort_unstable();
        println!("future: {is_async}; late by {:?} in the median, {:?} at p99", late[500], late[990]);
    }
    drop(held);
}

#[test]
fn a_shrinker_may_have_a_budget_of_its_own() {
    let group = Group::create("asking/budget").unwrap();
    let slow = Shrinker::named("slow, and allowed to be")
        .group(group)
        .budget(PATIENCE)
        .register(
            || 100,
            |_| {
                std::thread::sleep(Duration::from_millis(400));
                1
            },
        )
        .unwrap();
    reclaim::reclaim(group, 1, PATIENCE);
    reclaim::each_culprit(|culprit| assert_ne!(culprit.shrinker, slow.id().to_bits()));
    drop(slow);
}
