//! `Shrink` values: their requests and answers, and LRU lists that mark their shrinker.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use core::time::Duration;
use neap::groups::{Bound, Charge, Event, Group};
use neap::lru::{LruList, LruStatus};
use neap::reclaim::{self, Context, Count, Scan, Shrink, Shrinker, ShrinkerError};
use std::sync::{Arc, Mutex};

const OBJECT: u64 = 64 << 10;
const LONG: Duration = Duration::from_secs(10);

/// Group, node, needed bytes and priority of a call.
type Call = (Group, Option<usize>, Option<u64>, u32);

/// A cache whose objects and answers are set by a test.
#[derive(Default)]
struct Fake {
    objects: AtomicU64,
    is_busy: AtomicBool,
    answers_empty: AtomicBool,
    stops: AtomicBool,
    counts: AtomicU64,
    scans: AtomicU64,
    /// The last call of `scan`.
    asked: Mutex<Option<Call>>,
    is_in_time: AtomicBool,
}

impl Shrink for Fake {
    fn count(&self, _: &Context) -> Count {
        self.counts.fetch_add(1, Relaxed);
        match self.objects.load(Relaxed) {
            _ if self.is_busy.load(Relaxed) => Count::Busy,
            0 if self.answers_empty.load(Relaxed) => Count::Empty,
            objects => Count::Objects(objects),
        }
    }

    fn scan(&self, cx: &Context, objects: usize) -> Scan {
        self.scans.fetch_add(1, Relaxed);
        *self.asked.lock().unwrap() = Some((cx.group(), cx.node(), cx.need(), cx.priority()));
        self.is_in_time.store(cx.time_left().is_some_and(|left| left <= LONG), Relaxed);
        if self.answers_empty.load(Relaxed) {
            self.objects.store(0, Relaxed);
            return Scan::Empty;
        }
        if self.stops.load(Relaxed) {
            return Scan::Stop;
        }
        let objects = (objects as u64).min(self.objects.load(Relaxed));
        self.objects.fetch_sub(objects, Relaxed);
        cx.add_freed_bytes(objects * OBJECT);
        Scan::Freed(objects)
    }
}

fn fake(name: &str, group: Group, objects: u64) -> (Arc<Fake>, Shrinker) {
    let fake = Arc::new(Fake::default());
    fake.objects.store(objects, Relaxed);
    let shrinker = Shrinker::named(name).group(group).batch(4).register_shrink(fake.clone()).unwrap();
    (fake, shrinker)
}

#[test]
fn shrink_context_names_payer_need_and_deadline() {
    let group = Group::create("asked/group").unwrap();
    let (fake, shrinker) = fake("asked", group, 100);
    let got = reclaim::reclaim(group, 3 * OBJECT, LONG);
    assert!(got.bytes >= 3 * OBJECT, "the call says how many bytes it has freed: {got:?}");
    let (asked, node, need, priority) = fake.asked.lock().unwrap().unwrap();
    assert_eq!((asked, node), (group, None));
    assert!(need.is_some_and(|need| (1..=3 * OBJECT).contains(&need)) && priority <= 12, "{need:?} {priority}");
    assert!(fake.is_in_time.load(Relaxed));
    // After the deletion the context names the heir, which has the charges.
    group.delete().unwrap();
    let heir = Group::find("asked").unwrap();
    assert_eq!(group.heir(), Some(heir));
    reclaim::reclaim(heir, u64::MAX, LONG);
    let (asked, _, need, _) = fake.asked.lock().unwrap().unwrap();
    assert_eq!((asked, need), (heir, None));
    drop(shrinker);
}

#[test]
fn an_empty_cache_is_not_called_before_it_marks() {
    let group = Group::create("empty").unwrap();
    let (fake, shrinker) = fake("empty", group, 100);
    fake.answers_empty.store(true, Relaxed);
    reclaim::reclaim(group, OBJECT, LONG);
    let calls = || (fake.counts.load(Relaxed), fake.scans.load(Relaxed));
    let before = calls();
    assert_eq!(before.1, 1, "the scan that finds nothing is the only one");
    reclaim::reclaim(group, OBJECT, LONG);
    assert_eq!(calls(), before);
    fake.answers_empty.store(false, Relaxed);
    fake.objects.store(8, Relaxed);
    assert!(shrinker.mark(group));
    assert!(reclaim::reclaim(group, OBJECT, LONG).bytes >= OBJECT);
}

#[test]
fn a_scan_that_says_empty_is_asked_once_more_and_believed() {
    let group = Group::create("contradicts").unwrap();
    let scans = Arc::new(AtomicU64::new(0));
    let scanned = scans.clone();
    let scan = move |_: &Context, _| {
        scanned.fetch_add(1, Relaxed);
        Scan::Empty
    };
    let shrinker =
        Shrinker::named("contradicts").group(group).register_shrink((|_: &Context| Count::Objects(64), scan)).unwrap();
    reclaim::reclaim(group, OBJECT, LONG);
    let before = scans.load(Relaxed);
    reclaim::reclaim(group, OBJECT, LONG);
    assert_eq!((before, scans.load(Relaxed)), (2, 2));
    drop(shrinker);
}

#[test]
fn stopping_cache_is_called_once_and_busy_one_is_no_pressure() {
    let group = Group::create("stops").unwrap();
    let critical = || group.info().unwrap().events[Event::PressureCritical as usize];
    group.set(Bound::Max, OBJECT).unwrap();
    let full = group.charge(OBJECT).unwrap();
    let (busy, shrinker) = fake("busy", group, 64);
    busy.is_busy.store(true, Relaxed);
    assert!(group.charge(OBJECT).is_err());
    assert_eq!((busy.counts.load(Relaxed) > 0, busy.scans.load(Relaxed), critical()), (true, 0, 0));
    drop(shrinker);
    // At the last of 13 priorities all 64 objects are requested, in 16 batches.
    let (stops, shrinker) = fake("stops", group, 64);
    stops.stops.store(true, Relaxed);
    reclaim::reclaim(group, u64::MAX, LONG);
    assert!((1..=2 * 13).contains(&stops.scans.load(Relaxed)), "{:?}", stops.scans);
    assert!(group.charge(OBJECT).is_err());
    assert!(critical() > 0, "all that it has is in use, which is pressure");
    drop((shrinker, full));
}

#[test]
fn prepared_shrinker_dropped_before_start_is_never_called() {
    let kept = Arc::new(());
    let held = kept.clone();
    let count = move |_: &Context| {
        let _ = &held;
        Count::Empty
    };
    let mut pair = Some((count, |_: &Context, _| Scan::Busy));
    let prepared = Shrinker::named("prepared").prepare_shrink().unwrap();
    if false {
        _ = prepared.start(pair.take().unwrap());
    } else {
        drop(prepared);
    }
    drop(pair);
    assert_eq!(Arc::strong_count(&kept), 1);
}

/// A program may end a shrinker by its id before it starts it.
#[test]
fn a_cache_that_was_unregistered_by_its_id_does_not_start() {
    let prepared = Shrinker::named("ended").prepare_shrink().unwrap();
    reclaim::unregister(prepared.id()).unwrap();
    let pair = (|_: &Context| Count::Empty, |_: &Context, _| Scan::Busy);
    assert_eq!(prepared.start(pair).unwrap_err(), ShrinkerError::NoSuchShrinker);
}

/// Makes one list and one shrinker for all tenants.
fn shared_list(name: &str) -> (Arc<LruList<Charge>>, Shrinker) {
    let prepared = Shrinker::named(name).by_group().by_node().batch(4).prepare_shrink().unwrap();
    let list = Arc::new(LruList::for_shrinker(prepared.id()).unwrap());
    let (counted, shrunk) = (list.clone(), list.clone());
    let count = move |cx: &Context| counted.count_for(cx);
    let scan = move |cx: &Context, objects| shrunk.evict(cx, objects, |_: &Charge| LruStatus::Removed, drop);
    (list, prepared.start((count, scan)).unwrap())
}

#[test]
fn one_list_serves_many_tenants_and_each_pays_for_itself() {
    let tenants: Vec<_> = (0..3).map(|at| Group::create(&format!("shared/{at}")).unwrap()).collect();
    let (list, shrinker) = shared_list("shared");
    for tenant in &tenants {
        tenant.set(Bound::Max, 16 * OBJECT).unwrap();
    }
    let add = |tenant: Group| drop(list.add(tenant, tenant.charge(OBJECT).unwrap()).unwrap());
    (0..8).for_each(|_| add(tenants[1]));
    (0..200).for_each(|_| add(tenants[0]));
    assert!((4..=16).contains(&list.count(tenants[0])), "{}", list.count(tenants[0]));
    assert_eq!((list.count(tenants[1]), list.count(tenants[2])), (8, 0));
    assert_eq!(tenants[0].info().unwrap().events[Event::Refused as usize], 0);
    // After a group's values were all evicted, the list marks the group for a new value.
    reclaim::reclaim(tenants[1], u64::MAX, LONG);
    assert_eq!(list.count(tenants[1]), 0);
    reclaim::reclaim(tenants[1], u64::MAX, LONG);
    (0..100).for_each(|_| add(tenants[1]));
    assert!((4..=16).contains(&list.count(tenants[1])));
    drop(shrinker);
}

/// The closures use their group's handle after its deletion.
#[test]
fn closures_that_keep_their_group_serve_its_heir() {
    let group = Group::create("kept/tenant").unwrap();
    let list = Arc::new(LruList::new().unwrap());
    let (counted, shrunk) = (list.clone(), list.clone());
    let count = move || counted.count(group) as u64;
    let evict =
        move |objects| shrunk.walk(group, 0, objects as usize, |_: &Charge| LruStatus::Removed, drop).removed as u64;
    let shrinker = Shrinker::named("kept").group(group).batch(8).register(count, evict).unwrap();
    let add = || list.add_on(group, 0, group.charge(OBJECT).unwrap()).unwrap();
    let handles: Vec<_> = (0..48).map(|_| add()).collect();
    group.delete().unwrap();
    let heir = Group::find("kept").unwrap();
    assert_eq!((list.count(group), list.count(heir), heir.used().unwrap()), (48, 48, 48 * OBJECT));
    assert!(list.remove(&handles[0]));
    drop(handles);
    let got = reclaim::reclaim(heir, 16 * OBJECT, LONG);
    assert!(got.bytes >= 16 * OBJECT && list.count(heir) <= 47 - 16, "{got:?}");
    // A value that is added through the deleted group's handle is on the heir's list.
    list.add_on(group, 0, heir.charge(OBJECT).unwrap()).unwrap();
    reclaim::reclaim(heir, u64::MAX, LONG);
    assert_eq!((list.count(group), heir.used().unwrap()), (0, 0));
    drop(shrinker);
}

#[test]
fn values_with_their_charge_go_for_as_much_as_is_needed() {
    let group = Group::create("charged/tenant").unwrap();
    group.set(Bound::Max, 64 * OBJECT).unwrap();
    let prepared = Shrinker::named("charged").by_group().batch(64).prepare_shrink().unwrap();
    let list = Arc::new(LruList::<u64>::for_shrinker(prepared.id()).unwrap());
    let (counted, shrunk) = (list.clone(), list.clone());
    let shrinker = prepared
        .start((
            move |cx: &Context| counted.count_for(cx),
            move |cx: &Context, objects| shrunk.evict(cx, objects, |_| LruStatus::Removed, drop),
        ))
        .unwrap();
    let add = |number| list.add_charged(group.charge(OBJECT).unwrap(), number).unwrap();
    let first = add(0);
    assert_eq!((first.weight(), first.charge().map(Charge::group), list.count(group)), (OBJECT, Some(group), 1));
    (1..64).for_each(|number| drop(add(number)));
    assert_eq!(group.used().unwrap(), 64 * OBJECT);
    // Values are evicted oldest first, without the one that was touched, and no more than needed.
    assert!(list.touch(&first));
    drop(group.charge(4 * OBJECT).unwrap());
    assert!((56..=60).contains(&list.count(group)), "{} are left", list.count(group));
    assert_eq!(group.used().unwrap(), list.count(group) as u64 * OBJECT, "list and charges agree");
    assert!(list.remove(&first) && group.used().unwrap() > list.count(group) as u64 * OBJECT);
    assert!(list.add_again(Group::ROOT, 7, &first).unwrap(), "it goes to the group of its charge");
    assert_eq!(group.used().unwrap(), list.count(group) as u64 * OBJECT);
    group.delete().unwrap();
    let heir = Group::find("charged").unwrap();
    let late = list.add_charged(heir.charge(OBJECT).unwrap(), 99).unwrap();
    assert_eq!(heir.used().unwrap(), list.count(heir) as u64 * OBJECT);
    drop((first, late));
    reclaim::reclaim(heir, u64::MAX, LONG);
    assert_eq!((list.count(heir), heir.used().unwrap()), (0, 0));
    drop(shrinker);
}
