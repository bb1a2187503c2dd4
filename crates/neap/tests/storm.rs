//! A storm of bad callbacks: they block, lie, allocate, panic, unregister themselves and each
//! other, call back, charge their own group at its limit, and take a lock that charging threads
//! hold.
//!
//! Meanwhile shrinkers and groups come and go, charges wait in threads and futures, and limits are
//! lowered and raised. The test checks that nothing hangs, no memory is lost, no limit is exceeded,
//! and culprits are named.
//!
//! Good caches hold values on an LRU list by tenant, which walks evict and threads remove. An
//! observer ([`Watch`]) counts the refusals of charges that an eviction would have avoided, without
//! neap's own counters.
//!
//! `NEAP_STORM_SECONDS` (5) and `NEAP_STORM_THREADS` (8) configure it; a run prints them, with its
//! seed.

use core::future::Future;
use core::pin::pin;
use core::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use core::task::{Context, Poll};
use core::time::Duration;
use neap::groups::{Bound, Charge, ChargeError, Group};
use neap::lru::{self, Handle, LruList};
use neap::process::PROCESS;
use neap::reclaim::{self, Misbehaviour, Shrinker, ShrinkerError};
use neap_testing::random::{Random, number, seed};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Wake;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

const OBJECT: u64 = 64 << 10;
const TENANTS: usize = 4;
/// Limit of a tenant, and of all of them.
const LIMIT: u64 = 32 * OBJECT;
const ALL: u64 = 96 * OBJECT;
/// Bad shrinkers at a time.
const BAD: usize = 24;
/// Handles that a thread keeps.
const KEPT: usize = 8;
/// How long a charge without a wait has callbacks run, and for how long it asks none after passes
/// in vain.
const NOW: Duration = Duration::from_millis(200);
const BACK_OFF: Duration = Duration::from_millis(10);
/// How long charges wait: one that may end in vain, and one that is to be admitted.
const SHORT_WAIT: Duration = Duration::from_millis(20);
const LONG_WAIT: Duration = Duration::from_secs(30);
/// Longest time without progress of a thread.
const STUCK: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Blocks,
    Lies,
    Allocates,
    Panics,
    UnregistersItself,
    UnregistersOthers,
    CallsBack,
    Charges,
    TakesTheLock,
    Stops,
}

const KINDS: [(Kind, &str); 10] = [
    (Kind::Blocks, "blocks"),
    (Kind::Lies, "lies"),
    (Kind::Allocates, "allocates"),
    (Kind::Panics, "panics"),
    (Kind::UnregistersItself, "unregisters itself"),
    (Kind::UnregistersOthers, "unregisters others"),
    (Kind::CallsBack, "calls back"),
    (Kind::Charges, "charges"),
    (Kind::TakesTheLock, "takes the lock"),
    (Kind::Stops, "stops"),
];

/// An observer of a group's cached values.
#[derive(Default)]
struct Watch {
    /// Values on the list. Below the true number while a value is added or taken off.
    listed: AtomicI64,
    /// Times that `listed` fell to 0.
    empties: AtomicU64,
    /// Values that were taken off, or are about to be.
    taken: AtomicU64,
}

impl Watch {
    /// Times that the group ran out of values, and values taken off. `None` while it has none.
    fn look(&self) -> Option<(u64, u64)> {
        (self.listed.load(SeqCst) > 0).then(|| (self.empties.load(SeqCst), self.taken.load(SeqCst)))
    }

    fn took(&self) {
        if self.listed.fetch_sub(1, SeqCst) <= 1 {
            self.empties.fetch_add(1, SeqCst);
        }
    }
}

/// A cached value. The thread that took it off the list takes its charge, once.
struct Value {
    charge: Mutex<Option<Charge>>,
    /// Observers of its tenant, and of all of them.
    watches: [Arc<Watch>; 2],
}

impl Value {
    /// To be called before an attempt to take it off the list.
    fn goes(&self) {
        self.watches.iter().for_each(|watch| _ = watch.taken.fetch_add(1, SeqCst));
    }
}

/// Number of blames of each name, by [`Misbehaviour`].
type Blames = BTreeMap<String, [u32; 3]>;
type List = LruList<Value>;

/// How a thread charges.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Now,
    WaitShortly,
    Wait,
    Future,
    Inline,
}

impl Way {
    const ALL: [Way; 5] = [Way::Now, Way::WaitShortly, Way::Wait, Way::Future, Way::Inline];

    fn time(self) -> Duration {
        match self {
            Way::Now => NOW,
            Way::WaitShortly => SHORT_WAIT,
            Way::Wait | Way::Future | Way::Inline => LONG_WAIT,
        }
    }

    /// Returns whether a charge was refused too early: callbacks that block may use up its time.
    /// neap's clock is a few milliseconds coarse.
    fn is_early(self, took: Duration) -> bool {
        match self {
            Way::Now => took > BACK_OFF && took < NOW,
            Way::WaitShortly => took < SHORT_WAIT / 2,
            Way::Wait | Way::Future | Way::Inline => true,
        }
    }

    fn charge(self, group: Group) -> Result<Charge, ChargeError> {
        let request = group.request(OBJECT);
        match self {
            Way::Now => request.now(),
            Way::WaitShortly | Way::Wait => request.deadline(self.time()).wait(),
            Way::Future => block_on(request.deadline(self.time()).into_future()),
            Way::Inline => request.inline().deadline(self.time()).wait(),
        }
    }
}

#[derive(Default)]
struct Counts {
    added: AtomicU64,
    refused: AtomicU64,
    /// Charges that were refused before their time was over, while there were values to evict all
    /// the time, and none went: by [`Way`].
    avoidable: [AtomicU64; Way::ALL.len()],
    /// Charges by [`Way`], and those refused.
    charges: [[AtomicU64; 2]; Way::ALL.len()],
    removed: AtomicU64,
    evicted: AtomicU64,
    /// Tenants that were deleted with all their memory.
    deleted: AtomicU64,
    /// Callbacks of bad shrinkers, by kind.
    calls: [AtomicU64; KINDS.len()],
}

/// A tenant of the moment, with its observer.
#[derive(Clone)]
struct Tenant {
    group: Group,
    watch: Arc<Watch>,
}

impl Tenant {
    fn new(tenant: usize) -> Tenant {
        let group = Group::create(&format!("storm/{tenant}")).unwrap();
        group.set(Bound::Max, LIMIT).unwrap();
        Tenant { group, watch: Arc::default() }
    }
}

struct Storm {
    list: List,
    all: Group,
    tenants: [Mutex<Tenant>; TENANTS],
    watch: Arc<Watch>,
    /// Held by threads that charge, and taken by a callback.
    lock: Mutex<()>,
    bad: Mutex<Vec<Shrinker>>,
    counts: Counts,
    stop: AtomicBool,
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

fn took(value: &Handle<Value>, count: &AtomicU64) {
    value.watches.iter().for_each(|watch| watch.took());
    assert!(value.charge.lock().unwrap().take().is_some(), "it was taken off twice");
    count.fetch_add(1, Relaxed);
}

impl Storm {
    fn tenant(&self, tenant: usize) -> Group {
        self.tenants[tenant].lock().unwrap().group
    }

    /// Counts a charge, and whether reclaim could have avoided its refusal: `before` is what the
    /// observers of the tenant and of all saw before it, at the time `begun`.
    fn note(
        &self,
        way: Way,
        tenant: &Tenant,
        (before, begun): ([Option<(u64, u64)>; 2], Instant),
        error: Option<&ChargeError>,
    ) {
        let took = begun.elapsed();
        let [all, refused] = &self.counts.charges[way as usize];
        all.fetch_add(1, Relaxed);
        // At the end no thread makes room for others.
        let Some(limit) = error.and_then(ChargeError::limit).filter(|_| !self.stop.load(SeqCst)) else { return };
        refused.fetch_add(1, Relaxed);
        let watched = match Group::find("storm").is_ok_and(|all| all == Group::from_id(limit.group)) {
            true => (&self.watch, before[1]),
            false => (&tenant.watch, before[0]),
        };
        if way.is_early(took) && watched.1.is_some() && watched.0.look() == watched.1 {
            self.counts.avoidable[way as usize].fetch_add(1, Relaxed);
        }
    }

    /// Registers the shrinker of a good cache, for the objects of a group.
    fn good(self: &Arc<Self>, group: Group) -> Shrinker {
        let (counted, shrunk) = (self.clone(), self.clone());
        let evict = move |wanted: u64| {
            let evicted = |value: Handle<Value>| took(&value, &shrunk.counts.evicted);
            let decide = |value: &Value| {
                value.goes();
                lru::LruStatus::Removed
            };
            shrunk.list.walk(group, 0, wanted as usize, decide, evicted).removed as u64
        };
        let count = move || counted.list.count(group) as u64;
        Shrinker::named("good citizen").group(group).batch(4).inline(true).register(count, evict).unwrap()
    }

    /// The callback of a bad shrinker.
    fn misbehave(&self, kind: Kind, group: Group, own: &OnceLock<reclaim::ShrinkerId>, wanted: u64) -> u64 {
        self.counts.calls[kind as usize].fetch_add(1, Relaxed);
        match kind {
            Kind::Blocks => std::thread::sleep(Duration::from_millis(150)),
            Kind::Lies => return u64::MAX / 4,
            Kind::Allocates => {
                core::hint::black_box(vec![1_u8; 3 << 20]);
                return wanted;
            }
            Kind::Panics => panic!("a bad citizen"),
            Kind::UnregistersItself => _ = own.get().map(|&id| reclaim::unregister(id)),
            Kind::UnregistersOthers => {
                let taken = self.bad.try_lock().ok().and_then(|mut bad| bad.pop());
                drop(taken);
            }
            Kind::CallsBack => {
                assert_eq!(reclaim::reclaim(group, OBJECT, Duration::from_secs(1)), reclaim::PassResult::default());
                assert_eq!(reclaim::synchronize(), Err(ShrinkerError::InCallback));
                reclaim::each_shrinker(|_| ());
                drop(Shrinker::named("short").group(group).register(|| 1, |_| 0));
            }
            Kind::Charges => drop(group.charge(OBJECT)),
            Kind::TakesTheLock => drop(self.lock.lock()),
            Kind::Stops => return reclaim::STOP,
        }
        0
    }

    fn bad(self: &Arc<Self>, kind: Kind, name: &str, group: Group) -> Result<Shrinker, ShrinkerError> {
        let (storm, own) = (self.clone(), Arc::new(OnceLock::new()));
        let known = own.clone();
        let evict = move |wanted| storm.misbehave(kind, group, &known, wanted);
        let shrinker = Shrinker::named(name).group(group).batch(8).register(|| 1000, evict)?;
        own.set(shrinker.id()).unwrap();
        Ok(shrinker)
    }

    /// Body of a thread that caches for a tenant.
    fn charge(&self, tenant: usize, mut random: Random, progress: &AtomicU64) {
        let mut kept = VecDeque::<Handle<Value>>::new();
        while !self.stop.load(Relaxed) {
            progress.fetch_add(1, Relaxed);
            let held = (random.below(16) == 0).then(|| self.lock.lock().unwrap());
            let current = self.tenants[tenant].lock().unwrap().clone();
            let group = current.group;
            if random.below(128) == 0 {
                let (max, high) = match random.below(4) {
                    0 => (LIMIT / 2, u64::MAX),
                    1 => (LIMIT, LIMIT / 4 * 3),
                    _ => (LIMIT, u64::MAX),
                };
                // The group may be gone by now.
                _ = group.set(Bound::Max, max).and_then(|_| group.set(Bound::High, high));
            }
            // A thread that holds a lock that others need does not wait.
            let way = if held.is_none() { Way::ALL[random.below(Way::ALL.len())] } else { Way::Now };
            let before = ([&current.watch, &self.watch].map(|watch| watch.look()), Instant::now());
            let charged = way.charge(group);
            self.note(way, &current, before, charged.as_ref().err());
            let Ok(charge) = charged else {
                self.counts.refused.fetch_add(1, Relaxed);
                continue;
            };
            drop(held);
            // If the tenant is being deleted the value is its parent's.
            let watches = [current.watch, self.watch.clone()];
            let value = Value { charge: Mutex::new(Some(charge)), watches: watches.clone() };
            let value = self.list.add_on(group, 0, value).unwrap();
            watches.iter().for_each(|watch| _ = watch.listed.fetch_add(1, SeqCst));
            self.counts.added.fetch_add(1, Relaxed);
            kept.push_back(value);
            if kept.len() > KEPT {
                let value = kept.remove(random.below(KEPT)).unwrap();
                if random.below(4) == 0 {
                    value.goes();
                    if self.list.remove(&value) {
                        took(&value, &self.counts.removed);
                    }
                }
            }
        }
    }

    /// Registers and unregisters bad shrinkers until the end, and sometimes deletes a tenant.
    /// Returns the blames of all of them, and the shrinkers that are left: threads may wait for
    /// them.
    fn come_and_go(self: &Arc<Self>, end: Instant, mut random: Random) -> (Blames, Vec<Shrinker>) {
        let mut named = Blames::new();
        let mut good: Vec<Shrinker> = (0..TENANTS).map(|tenant| self.good(self.tenant(tenant))).collect();
        let of_all = self.good(self.all);
        while Instant::now() < end {
            let (kind, name) = KINDS[random.below(KINDS.len())];
            let tenant = random.below(TENANTS);
            if let Ok(shrinker) = self.bad(kind, name, self.tenant(tenant)) {
                self.bad.lock().unwrap().push(shrinker);
            }
            let oldest = {
                let mut bad = self.bad.lock().unwrap();
                (bad.len() > BAD).then(|| bad.remove(0))
            };
            drop(oldest);
            if random.below(64) == 0 {
                let old = self.tenant(tenant);
                old.delete().unwrap();
                let new = Tenant::new(tenant);
                good[tenant] = self.good(new.group);
                *self.tenants[tenant].lock().unwrap() = new;
                self.counts.deleted.fetch_add(1, Relaxed);
            }
            let used = |group: Group| group.info().map_or(0, |info| info.peak);
            // Callbacks that charge have a reserve.
            let most = |max: u64| max + max / 8;
            let is_kept = (0..TENANTS).all(|tenant| used(self.tenant(tenant)) <= most(LIMIT));
            assert!(used(self.all) <= most(ALL) && is_kept);
            reclaim::each_culprit(|culprit| {
                let most = named.entry(culprit.name().to_string()).or_default();
                most.iter_mut().zip(culprit.counts).for_each(|(most, count)| *most = count.max(*most));
            });
            std::thread::sleep(Duration::from_millis(10));
        }
        self.stop.store(true, SeqCst);
        good.push(of_all);
        good.append(&mut self.bad.lock().unwrap());
        (named, good)
    }
}

/// Ends the process with a message if a thread makes no progress: joining it would hang.
fn watch(storm: &Storm, progress: &[AtomicU64]) {
    let mut last: Vec<_> = progress.iter().map(|_| (0, Instant::now())).collect();
    while !storm.stop.load(Relaxed) {
        for (thread, (count, last)) in progress.iter().zip(&mut last).enumerate() {
            let now = count.load(Relaxed);
            if now != last.0 {
                *last = (now, Instant::now());
            } else if last.1.elapsed() > STUCK {
                eprintln!("thread {thread} of {} has stopped after {now} rounds", progress.len());
                std::process::abort();
            }
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn storm_of_faulty_shrinkers_stalls_and_loses_nothing() {
    let (seconds, threads) = (number("NEAP_STORM_SECONDS", 5), number("NEAP_STORM_THREADS", 8) as usize);
    let seed = seed();
    println!("{threads} threads, {seconds} seconds");
    std::panic::set_hook(Box::new(|info| {
        if info.payload().downcast_ref::<&str>().is_none_or(|text| *text != "a bad citizen") {
            eprintln!("{info}");
        }
    }));
    let tenants = core::array::from_fn(|tenant| Mutex::new(Tenant::new(tenant)));
    let all = Group::find("storm").unwrap();
    all.set(Bound::Max, ALL).unwrap();
    let storm = Arc::new(Storm {
        list: LruList::new().unwrap(),
        all,
        tenants,
        watch: Arc::default(),
        lock: Mutex::default(),
        bad: Mutex::default(),
        counts: Counts::default(),
        stop: AtomicBool::new(false),
    });
    let progress: Vec<AtomicU64> = (0..threads).map(|_| AtomicU64::new(0)).collect();
    let end = Instant::now() + Duration::from_secs(seconds);
    let (named, left) = std::thread::scope(|scope| {
        for (thread, progress) in progress.iter().enumerate() {
            let storm = &storm;
            scope.spawn(move || storm.charge(thread % TENANTS, Random(seed.wrapping_add(thread as u64 + 1)), progress));
        }
        scope.spawn(|| watch(&storm, &progress));
        storm.come_and_go(end, Random(seed))
    });
    let _ = std::panic::take_hook();
    drop(left);
    reclaim::synchronize().unwrap();

    // Each value is in one place: off the list, by the thread that counted it, or on it, and
    // charged.
    let groups: Vec<Group> = (0..TENANTS).map(|tenant| storm.tenant(tenant)).chain([all]).collect();
    let left: u64 = groups.iter().map(|&group| storm.list.count(group) as u64).sum();
    let [added, refused, removed, evicted, deleted] = {
        let Counts { added, refused, removed, evicted, deleted, .. } = &storm.counts;
        [added, refused, removed, evicted, deleted].map(|count| count.load(Relaxed))
    };
    let lost = added.wrapping_sub(removed + evicted + left) as i64;
    println!(
        "{added} added, {refused} refused, {removed} removed, {evicted} evicted, {left} left, {lost} lost; {deleted} tenants deleted"
    );
    for ((way, [all, refused]), avoidable) in Way::ALL.iter().zip(&storm.counts.charges).zip(&storm.counts.avoidable) {
        println!("  {way:?}: {all:?} charges, {refused:?} refused, {avoidable:?} of them without need");
    }
    for ((_, name), calls) in KINDS.iter().zip(&storm.counts.calls) {
        println!("  {name}: called {calls:?} times");
    }
    for (name, [overran, lied, panicked]) in &named {
        println!("  {name}: overran {overran}, lied {lied}, panicked {panicked}, at most");
    }
    assert_eq!((lost, all.used().unwrap()), (0, left * OBJECT));
    let [refused, avoidable] = [
        Way::ALL.map(|way| storm.counts.charges[way as usize][1].load(Relaxed)),
        Way::ALL.map(|way| storm.counts.avoidable[way as usize].load(Relaxed)),
    ];
    assert_eq!((avoidable, &refused[2..]), ([0; 5], &[0; 3][..]), "refused without need, or after {LONG_WAIT:?}");
    assert!(
        added > 500 && evicted > 100 && removed > 0 && storm.counts.calls.iter().all(|calls| calls.load(Relaxed) > 0)
    );
    let is_named = |name, verdict| named.get(name).is_some_and(|counts: &[u32; 3]| counts[verdict as usize] > 0);
    assert!(is_named("blocks", Misbehaviour::Overran), "{named:?}");
    assert!(is_named("panics", Misbehaviour::Panicked) && is_named("lies", Misbehaviour::Lied), "{named:?}");
    let innocent = |name: &str| named.get(name).is_none_or(|counts| counts[1..] == [0, 0]);
    assert!(innocent("good citizen") && innocent("short") && innocent("stops"), "{named:?}");

    // And shrinkers that are registered now are asked.
    let good: Vec<Shrinker> = groups.iter().map(|&group| storm.good(group)).collect();
    let got = reclaim::reclaim(all, u64::MAX, Duration::from_secs(60));
    let after: u64 = groups.iter().map(|&group| storm.list.count(group) as u64).sum();
    assert!((left == 0 || after < left) && all.used().unwrap() == after * OBJECT, "{got:?} of {left}, {after}");
    drop(good);
    PROCESS.verify(64).unwrap_or_else(|finding| panic!("{finding:?}"));
}
