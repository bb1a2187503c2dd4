//! Reclaim in a process: caches that shrink at limits, and callbacks that misbehave.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use core::time::Duration;
use neap::groups::{Bound, Charge, ChargeError, Event, Group};
use neap::process::PROCESS;
use neap::reclaim::{self, Misbehaviour, Shrinker, ShrinkerError};
use neap_testing::again::{case, succeeds};
use neap_testing::child::in_child;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

const OBJECT: u64 = 64 << 10;

/// A cache whose objects are charged to a group.
struct Cache {
    objects: Arc<Mutex<HashMap<u64, Charge>>>,
    group: Group,
    next: AtomicU64,
    _shrinker: Shrinker,
}

impl Cache {
    fn new(name: &str, group: Group) -> Cache {
        let objects = Arc::new(Mutex::new(HashMap::new()));
        let (counted, shrunk) = (objects.clone(), objects.clone());
        let count = move || {
            counted
                .try_lock()
                .map_or(0, |objects: std::sync::MutexGuard<'_, HashMap<u64, Charge>>| objects.len() as u64)
        };
        let evict = move |wanted| evict(&shrunk, wanted);
        let shrinker = Shrinker::named(name).group(group).batch(4).register(count, evict).unwrap();
        Cache { objects, group, next: AtomicU64::new(0), _shrinker: shrinker }
    }

    /// Inserts an object; returns whether its charge succeeded.
    fn insert(&self) -> bool {
        let Ok(charge) = self.group.charge(OBJECT) else { return false };
        self.objects.lock().unwrap().insert(self.next.fetch_add(1, Relaxed), charge);
        true
    }

    fn len(&self) -> u64 {
        self.objects.lock().unwrap().len() as u64
    }
}

fn evict(objects: &Mutex<HashMap<u64, Charge>>, wanted: u64) -> u64 {
    let Ok(mut objects) = objects.try_lock() else { return 0 };
    let keys: Vec<u64> = objects.keys().copied().take(wanted as usize).collect();
    keys.iter().filter(|key| objects.remove(key).is_some()).count() as u64
}

fn culprit(name: &str) -> Option<reclaim::Culprit> {
    let mut found = None;
    reclaim::each_culprit(|culprit| found = found.or((culprit.name() == name).then_some(culprit)));
    found
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < end, "{what} does not come true");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A mark may be left in a slot that another group has now: such a mark is made here.
#[test]
fn a_cache_gives_nothing_for_a_group_that_is_not_its_own() {
    let (group, stranger) = (Group::create("own/a").unwrap(), Group::create("own/b").unwrap());
    let (mine, theirs) = (Cache::new("mine", group), Cache::new("theirs", stranger));
    assert!((0..32).all(|_| mine.insert() && theirs.insert()));
    assert!(reclaim::mark(mine._shrinker.id(), stranger, 0));
    let mut objects = 0;
    reclaim::dry_run(stranger, OBJECT, |payment| objects += payment.objects);
    assert_eq!(objects, 32);
    assert!(reclaim::reclaim(stranger, 8 * OBJECT, Duration::from_secs(10)).bytes >= 8 * OBJECT);
    assert!(mine.len() == 32 && theirs.len() <= 24);
    // Objects of a deleted group are its heir's.
    group.delete().unwrap();
    let heir = Group::find("own").unwrap();
    stranger.set(Bound::Min, u64::MAX).unwrap();
    assert!(reclaim::reclaim(heir, 8 * OBJECT, Duration::from_secs(10)).bytes >= 8 * OBJECT);
    assert!(mine.len() <= 24);
}

#[test]
fn a_cache_shrinks_where_a_charge_would_have_been_refused() {
    let group = Group::create("shrinks/a").unwrap();
    group.set(Bound::Max, 64 * OBJECT).unwrap();
    let cache = Cache::new("shrinks", group);
    for _ in 0..1000 {
        assert!(cache.insert());
        assert!(group.info().unwrap().charged <= 64 * OBJECT);
    }
    assert!((32..=64).contains(&cache.len()), "{} are left", cache.len());
    // The limit of a group above asks the cache as well; a lowered limit does at the next charge.
    Group::find("shrinks").unwrap().set(Bound::Max, 16 * OBJECT).unwrap();
    until("a charge after the cut", || cache.insert());
    assert!(cache.len() <= 16, "{} are left", cache.len());
    assert_eq!(group.info().unwrap().events[Event::Refused as usize], 0);
}

#[test]
fn impossible_charge_evicts_nothing() {
    let group = Group::create("never").unwrap();
    group.set(Bound::Max, 64 * OBJECT).unwrap();
    let cache = Cache::new("never", group);
    (0..32).for_each(|_| assert!(cache.insert()));
    assert!(group.charge(64 * OBJECT + 1).is_err() && cache.len() == 32);
    assert!(group.request(64 * OBJECT + 1).inline().now().is_err() && cache.len() == 32);
    let refused = group.charge_or_wait(64 * OBJECT + 1, Duration::from_secs(30)).unwrap_err();
    assert_eq!((refused.limit().unwrap().group, cache.len()), (group.id(), 32));
    // The group may use its whole limit.
    drop(group.charge(64 * OBJECT).unwrap());
    assert_eq!(cache.len(), 0);
}

/// With few groups, which a pass visits one by one, and with many, of which it visits the marked
/// ones.
#[test]
fn only_groups_below_the_one_that_is_asked_give_anything() {
    for count in [1, 31, 40] {
        let top = Group::create(&format!("below{count}")).unwrap();
        let stranger = Cache::new("stranger", Group::create(&format!("stranger{count}")).unwrap());
        let path = |name| format!("below{count}/{name}/group");
        let caches: Vec<_> = (0..count).map(|at| Cache::new("below", Group::create(&path(at)).unwrap())).collect();
        for cache in caches.iter().chain([&stranger]) {
            (0..8).for_each(|_| assert!(cache.insert()));
        }
        let got = reclaim::reclaim(top, u64::MAX, Duration::from_secs(10));
        assert_eq!((got.freed, stranger.len()), (count * 8, 8));
    }
}

#[test]
fn a_group_above_its_high_is_asked_before_it_is_slowed_down() {
    let group = Group::create("high").unwrap();
    group.set(Bound::High, 64 * OBJECT).unwrap();
    let cache = Cache::new("high", group);
    (0..2000).for_each(|_| assert!(cache.insert()));
    assert!(cache.len() < 128, "{} are left", cache.len());
}

/// Freed objects stay charged while neap's own caches have them. These are emptied before the
/// program's caches. The test has a process of its own: a stack that a thread of another test holds
/// is skipped.
#[test]
fn unused_memory_above_high_does_not_shrink_caches() {
    const SIZE: usize = 1024;
    if case().is_none() {
        return succeeds("unused_memory_above_high_does_not_shrink_caches", "alone", "");
    }
    let group = Group::create("unused").unwrap();
    group.set(Bound::High, 64 * OBJECT).unwrap();
    let inside = group.enter().unwrap();
    let blocks: Vec<_> = (0..48 * OBJECT as usize / SIZE).map(|_| PROCESS.allocate(SIZE)).collect();
    drop(inside);
    assert!(group.used().unwrap() >= 48 * OBJECT);
    // SAFETY: the blocks are this test's.
    blocks.into_iter().for_each(|block| unsafe { PROCESS.free(block) });
    let cache = Cache::new("unused", group);
    (0..32).for_each(|_| assert!(cache.insert()));
    assert_eq!((cache.len(), group.info().unwrap().events[Event::High as usize]), (32, 0));
}

#[test]
fn growth_of_one_group_does_not_evict_protected_memory() {
    let all = Group::create("tenants").unwrap();
    let [protected, greedy] = ["tenants/protected", "tenants/greedy"].map(|path| Group::create(path).unwrap());
    all.set(Bound::Max, 64 * OBJECT).unwrap();
    protected.set(Bound::Low, 32 * OBJECT).unwrap();
    let [first, second] = [("protected", protected), ("greedy", greedy)].map(|(name, group)| Cache::new(name, group));
    (0..32).for_each(|_| assert!(first.insert()));
    (0..1000).for_each(|_| assert!(second.insert()));
    assert_eq!((first.len(), protected.info().unwrap().events[Event::Low as usize]), (32, 0));
    assert!((8..=32).contains(&second.len()), "{} are left", second.len());
    // Without other groups to take from, memory protected by `low` is reclaimed, and memory
    // protected by `min` is not.
    drop(second);
    protected.set(Bound::Low, u64::MAX).unwrap();
    all.set(Bound::Max, 16 * OBJECT).unwrap();
    until("a charge after the cut", || first.insert());
    assert!(first.len() <= 16, "{} are left", first.len());
    assert!(protected.info().unwrap().events[Event::Low as usize] > 0);
    protected.set(Bound::Min, u64::MAX).unwrap();
    let before = first.len();
    all.set(Bound::Max, OBJECT).unwrap();
    assert!(!first.insert() && first.len() == before);
}

/// A thread that reclaims holds the lock of the cache until another call did not get it. That call
/// frees nothing, which is no reason to refuse the charge that it was made for.
fn charge_while_another_thread_empties_the_cache(charge: impl FnOnce(Group) -> Result<Charge, ChargeError>) {
    const HELD: Duration = Duration::from_millis(50);
    let group = Group::create("emptied").unwrap();
    group.set(Bound::Max, 16 * OBJECT).unwrap();
    let objects: Arc<Mutex<Vec<Charge>>> = Arc::default();
    let [is_held, misses] = [const { AtomicU64::new(0) }; 2].map(Arc::new);
    let (counted, missed, shrunk) = (objects.clone(), misses.clone(), objects.clone());
    let (held, seen) = (is_held.clone(), misses.clone());
    let count = move || match counted.try_lock() {
        Ok(objects) => objects.len() as u64,
        Err(_) => {
            missed.fetch_add(1, Relaxed);
            0
        }
    };
    let scan = move |wanted| {
        let Ok(mut objects) = shrunk.try_lock() else { return 0 };
        held.store(1, Relaxed);
        let end = Instant::now() + HELD;
        while seen.load(Relaxed) == 0 && Instant::now() < end {
            std::thread::yield_now();
        }
        // Long enough for the rest of the other pass.
        std::thread::sleep(Duration::from_millis(10));
        let left = objects.len().saturating_sub(wanted as usize);
        objects.split_off(left).len() as u64
    };
    let _cache = Shrinker::named("emptied").group(group).batch(4).inline(true).register(count, scan).unwrap();
    objects.lock().unwrap().extend((0..16).map(|_| group.charge(OBJECT).unwrap()));
    std::thread::scope(|scope| {
        scope.spawn(|| reclaim::reclaim(group, 4 * OBJECT, Duration::from_secs(10)));
        until("the cache is held", || is_held.load(Relaxed) == 1);
        let charge = charge(group);
        assert!(charge.is_ok(), "{:?} after {} misses", charge, misses.load(Relaxed));
    });
}

#[test]
fn charge_succeeds_while_another_thread_reclaims_cache() {
    charge_while_another_thread_empties_the_cache(|group| group.charge(OBJECT));
}

#[test]
fn inline_charge_without_reclaimers() {
    if case().is_some() {
        charge_while_another_thread_empties_the_cache(|group| group.request(OBJECT).inline().now());
    }
}

#[test]
fn inline_charge_succeeds_while_another_thread_reclaims_cache() {
    succeeds("inline_charge_without_reclaimers", "no threads", "background:off");
}

#[test]
fn dry_run_predicts_payers_and_reclaim_frees_the_request() {
    let (group, other) = (Group::create("asked/a").unwrap(), Group::create("asked/b").unwrap());
    let (cache, beside) = (Cache::new("asked", group), Cache::new("beside", other));
    (0..300).for_each(|_| assert!(cache.insert()));
    (0..100).for_each(|_| assert!(beside.insert()));
    let mut payments = Vec::new();
    reclaim::dry_run(Group::find("asked").unwrap(), 40 * OBJECT, |payment| payments.push(payment));
    payments.sort_by_key(|payment| payment.bytes);
    let objects: Vec<_> = payments.iter().map(|payment| (Group::from_id(payment.group), payment.objects)).collect();
    assert_eq!(objects, [(other, 100), (group, 300)]);
    let bytes: u64 = payments.iter().map(|payment| payment.bytes).sum();
    assert!(bytes <= 40 * OBJECT && bytes + 2 >= 40 * OBJECT);
    assert!(payments[1].bytes.abs_diff(30 * OBJECT) < OBJECT, "{payments:?}");
    assert_eq!((cache.len(), beside.len()), (300, 100), "nothing was taken");
    let got = reclaim::reclaim(group, 40 * OBJECT, Duration::from_secs(10));
    assert!(got.bytes >= 40 * OBJECT && got.freed == 300 - cache.len() && beside.len() == 100, "{got:?}");
}

#[test]
fn what_a_deleted_group_cached_its_parent_is_asked_for() {
    let (above, group) = (Group::create("heir").unwrap(), Group::create("heir/gone").unwrap());
    let cache = Cache::new("heir", group);
    (0..32).for_each(|_| assert!(cache.insert()));
    group.delete().unwrap();
    above.set(Bound::Max, 32 * OBJECT).unwrap();
    let more: Vec<_> = (0..8).map(|_| above.charge(OBJECT).unwrap()).collect();
    assert!(cache.len() <= 32 - more.len() as u64);
}

#[test]
fn pressure_is_told_up_the_tree() {
    let (above, group) = (Group::create("pressure").unwrap(), Group::create("pressure/below").unwrap());
    let count = |group: Group, event| group.info().unwrap().events[event as usize];
    let cache = Cache::new("pressure", group);
    (0..2000).for_each(|_| assert!(cache.insert()));
    reclaim::reclaim(group, 1000 * OBJECT, Duration::from_secs(10));
    assert!(count(above, Event::PressureLow) > 0 && count(above, Event::PressureCritical) == 0);
    let useless = Shrinker::named("useless").group(group).batch(512).register(|| 100_000, |_| 0).unwrap();
    reclaim::reclaim(group, u64::MAX, Duration::from_secs(10));
    assert!(count(above, Event::PressureCritical) > 0);
    drop(useless);
}

/// The thread that waits for memory holds the lock that the callback takes.
#[test]
fn callback_deadlocked_on_waiters_lock_is_abandoned() {
    let group = Group::create("blocked").unwrap();
    group.set(Bound::Max, 32 * OBJECT).unwrap();
    let lock = Arc::new(Mutex::new(0_u64));
    let (counted, taken) = (lock.clone(), lock.clone());
    let bad = Shrinker::named("blocks on the lock")
        .group(group)
        .batch(1)
        .register(move || *counted.lock().unwrap() + 1000, move |_| *taken.lock().unwrap())
        .unwrap();
    let good = Cache::new("beside it", group);
    (0..32).for_each(|_| assert!(good.insert()));
    let held = lock.lock().unwrap();
    let refused = (0..64).filter(|_| !good.insert()).count();
    assert!(refused < 64, "all of them");
    until("the culprit is named", || {
        culprit("blocks on the lock").is_some_and(|culprit| culprit.counts[Misbehaviour::Overran as usize] > 0)
    });
    (0..64).for_each(|_| assert!(good.insert(), "no charge waits for the culprit any more"));
    drop(held);
    drop(bad);
    assert!(group.info().unwrap().charged <= 32 * OBJECT);
}

#[test]
fn panics_and_lies_are_counted_and_named_and_go_no_further() {
    // A backtrace of each panic may take longer than a callback may.
    std::panic::set_hook(Box::new(|info| {
        if info.payload().downcast_ref::<&str>().is_none_or(|text| !text.starts_with("in a c")) {
            eprintln!("{info}");
        }
    }));
    let group = Group::create("panics").unwrap();
    let panics = Shrinker::named("panics").group(group).batch(1).register(|| 100, |_| panic!("in a callback")).unwrap();
    let throws = Shrinker::named("throws at count").group(group).register(|| panic!("in a count"), |_| 0).unwrap();
    let lies = Shrinker::named("lies").group(group).batch(1).register(|| 10, |_| u64::MAX / 2).unwrap();
    let cache = Cache::new("honest", group);
    (0..100).for_each(|_| assert!(cache.insert()));
    reclaim::reclaim(group, u64::MAX, Duration::from_secs(10));
    for (name, verdict) in
        [("panics", Misbehaviour::Panicked), ("throws at count", Misbehaviour::Panicked), ("lies", Misbehaviour::Lied)]
    {
        let counts = culprit(name).unwrap_or_else(|| panic!("{name} is not named")).counts;
        assert_eq!(counts.iter().sum::<u32>(), 1, "barred from then on: {name} {counts:?}");
        assert_eq!(counts[verdict as usize], 1, "{name}");
    }
    drop((panics, throws, lies));
}

/// S10.
#[test]
fn s10_a_callback_that_charges_or_asks_begins_no_second_reclaim() {
    let group = Group::create("nested").unwrap();
    group.set(Bound::Max, 8 * OBJECT).unwrap();
    let (refused, asked) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (counts, asks) = (refused.clone(), asked.clone());
    let shrinker = Shrinker::named("nested")
        .group(group)
        .batch(1)
        .register(
            || 1000,
            move |_| {
                // More than the reserve of an eighth.
                counts.fetch_add(u64::from(group.charge(2 * OBJECT).is_err()), Relaxed);
                let got = reclaim::reclaim(group, OBJECT, Duration::from_secs(10));
                asks.fetch_add(u64::from(got == reclaim::PassResult::default()), Relaxed);
                assert_eq!(reclaim::synchronize(), Err(ShrinkerError::InCallback));
                let mut memory = Vec::with_capacity(1 << 20);
                memory.push(0_u8);
                core::hint::black_box(&memory);
                0
            },
        )
        .unwrap();
    let full: Vec<_> = (0..8).map(|_| group.charge(OBJECT).unwrap()).collect();
    assert!(group.charge(OBJECT).is_err());
    assert!(refused.load(Relaxed) > 0 && asked.load(Relaxed) == refused.load(Relaxed));
    drop((shrinker, full));
}

#[test]
fn inline_charges_call_those_that_allow_it_in_their_own_thread() {
    let group = Group::create("inline").unwrap();
    group.set(Bound::Max, 8 * OBJECT).unwrap();
    let objects = Arc::new(Mutex::new(HashMap::new()));
    let (counted, shrunk, own) = (objects.clone(), objects.clone(), Arc::new(AtomicU64::new(0)));
    let (calls, thread) = (own.clone(), std::thread::current().id());
    let shrinker = Shrinker::named("inline")
        .group(group)
        .batch(1)
        .inline(true)
        .register(
            move || counted.lock().unwrap().len() as u64,
            move |wanted| {
                calls.fetch_add(u64::from(std::thread::current().id() == thread), Relaxed);
                evict(&shrunk, wanted)
            },
        )
        .unwrap();
    for key in 0..32 {
        let charge = group.request(OBJECT).inline().now().unwrap();
        objects.lock().unwrap().insert(key, charge);
    }
    assert!(own.load(Relaxed) >= 24);
    drop(shrinker);
}

#[test]
fn a_child_asks_its_own_copy_of_a_cache() {
    let group = Group::create("forked").unwrap();
    group.set(Bound::Max, 32 * OBJECT).unwrap();
    let cache = Cache::new("forked", group);
    (0..64).for_each(|_| assert!(cache.insert()));
    // The child's charges make no thread; `start_background` makes neap's, which makes reclaimers.
    let charges_all = || assert!(PROCESS.start_background() && (0..64).all(|_| cache.insert()));
    in_child(charges_all);
    assert!(cache.insert());
}

/// On any error the data of callbacks stays the caller's, and `gone` is not called.
#[test]
fn what_is_not_registered_is_not_told_that_it_is_gone() {
    use core::ffi::c_void;
    use reclaim::Asked;
    unsafe extern "C" fn count(_: *mut c_void, _: *const Asked) -> u64 {
        0
    }
    unsafe extern "C" fn scan(_: *mut c_void, _: *mut Asked) -> u64 {
        0
    }
    unsafe extern "C" fn gone(told: *mut c_void) {
        // SAFETY: registered with a number that outlives it.
        unsafe { &*told.cast::<AtomicU64>() }.fetch_add(1, Relaxed);
    }
    let told = AtomicU64::new(0);
    let data = core::ptr::from_ref(&told).cast_mut().cast();
    let nowhere = Group::from_id(neap::groups::GroupId::from_bits(1 << 40));
    for (name, group, error) in
        [("a/name", Group::ROOT, ShrinkerError::BadName), ("nowhere", nowhere, ShrinkerError::NoSuchGroup)]
    {
        // SAFETY: the number outlives the shrinker; the callbacks return.
        let answer = unsafe { Shrinker::named(name).group(group).register_raw(count, scan, Some(gone), data) };
        assert_eq!((answer.err(), told.load(Relaxed)), (Some(error), 0));
    }
    // SAFETY: the number outlives the shrinker; the callbacks return.
    drop(
        unsafe { Shrinker::named("somewhere").group(Group::ROOT).register_raw(count, scan, Some(gone), data) }.unwrap(),
    );
    assert_eq!(told.load(Relaxed), 1);
    // Closures are dropped once in all cases.
    let kept = Arc::new(());
    for group in [nowhere, Group::ROOT] {
        let held = kept.clone();
        drop(Shrinker::named("closures").group(group).register(
            move || {
                let _ = &held;
                0
            },
            |_| 0,
        ));
        assert_eq!(Arc::strong_count(&kept), 1);
    }
}

/// The child's only thread is the copy of a reclaimer. It ends when the callback returns, and the
/// child with it.
#[test]
fn a_reclaimer_that_forks_in_a_callback_ends_in_the_child() {
    let group = Group::create("forks").unwrap();
    group.set(Bound::Max, 4 * OBJECT).unwrap();
    let child = Arc::new(AtomicU64::new(0));
    let forked = child.clone();
    let forks = move |_| {
        if forked.load(Relaxed) == 0 {
            // SAFETY: the child returns, and ends.
            let child = unsafe { libc::fork() };
            // So that the child does not fork again.
            forked.store(child.max(1) as u64, Relaxed);
        }
        0
    };
    let shrinker = Shrinker::named("forks").group(group).batch(1).register(|| 100, forks).unwrap();
    let full: Vec<_> = (0..4).map(|_| group.charge(OBJECT).unwrap()).collect();
    assert!(group.charge(OBJECT).is_err());
    until("a callback forks", || child.load(Relaxed) > 0);
    let (child, mut status) = (child.load(Relaxed) as i32, 0);
    // SAFETY: the child is this test's own.
    until("the child ends", || unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == child);
    assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 0));
    drop((shrinker, full));
}
