//! A charge at a `max` with nothing left to give does not ask all shrinkers again, until there is a
//! new mark.
//!
//! Method: a virtual machine without threads. Its charges call shrinkers inline, and its passes are
//! counted.

use crate::program::{OPTIONS, Opened};
use core::ffi::c_void;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use neap::reclaim::{Asked, EMPTY, ShrinkerId, Spec};
use neap_groups::{Bound, GroupId, Kind, OnLimit, Payer};
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;

const OBJECT: u64 = 64 << 10;
const FULL: u64 = 8;

/// Objects charged to a group, and the answer of `count` if there are none.
struct Cache {
    mm: Opened<Shared<Virtual>>,
    payer: Payer,
    objects: AtomicU64,
    nothing: u64,
}

impl Cache {
    fn new(nothing: u64) -> (Box<Cache>, ShrinkerId) {
        let mm = Opened::new(Shared::new(Virtual::new(4096, 2)), &OPTIONS).unwrap();
        let grouped = mm.groups().unwrap();
        let above = grouped.create(GroupId::ROOT, "above").unwrap();
        let group = grouped.create(above, "tenant").unwrap();
        grouped.set_bound(above, Bound::Max, FULL * OBJECT).unwrap();
        let payer = group.payer(Kind::ByHand, 0);
        let cache = Box::new(Cache { mm, payer, objects: AtomicU64::new(0), nothing });
        let data = core::ptr::from_ref(&*cache).cast_mut().cast();
        let (name, by_node, by_group, inline) = ("cache", false, true, true);
        let spec = Spec { name, count, scan, data, gone: None, seeks: 2, batch: 1, by_node, by_group, inline };
        let reclaiming = cache.mm.reclaiming().unwrap();
        // SAFETY: the cache stays in its box, and ends after the manager is closed.
        let id = unsafe { reclaiming.reclaim.shrinkers.prepare(&reclaiming.source, &spec) }.unwrap();
        reclaiming.start(id).unwrap();
        (cache, id)
    }

    fn charge(&self) -> bool {
        self.mm.groups().unwrap().inline().charge(self.payer, OBJECT, OnLimit::Refuse).is_ok()
    }

    /// Caches an object that is charged already.
    fn put(&self, id: ShrinkerId) {
        self.objects.fetch_add(1, Relaxed);
        assert!(self.mm.reclaiming().unwrap().mark(id, self.payer.id(), 0));
    }

    fn passes(&self) -> u64 {
        self.mm.reclaiming().unwrap().reclaim.passes.counts()[0][0]
    }
}

unsafe extern "C" fn count(data: *mut c_void, _: *const Asked) -> u64 {
    // SAFETY: registered with a cache that outlives the shrinker.
    let cache = unsafe { &*data.cast::<Cache>() };
    match cache.objects.load(Relaxed) {
        0 => cache.nothing,
        objects => objects,
    }
}

unsafe extern "C" fn scan(data: *mut c_void, _: *mut Asked) -> u64 {
    // SAFETY: registered with a cache that outlives the shrinker.
    let cache = unsafe { &*data.cast::<Cache>() };
    let taken = cache.objects.try_update(Relaxed, Relaxed, |objects| objects.checked_sub(1)).is_ok();
    if taken {
        cache.mm.groups().unwrap().uncharge(cache.payer, OBJECT);
    }
    taken.into()
}

#[test]
fn charge_with_empty_shrinker_runs_no_pass_until_mark() {
    let (cache, id) = Cache::new(EMPTY);
    (0..FULL).for_each(|_| assert!(cache.charge()));
    (0..100).for_each(|_| assert!(!cache.charge()));
    assert_eq!(cache.passes(), 0, "nothing was ever marked");
    cache.put(id);
    assert!(cache.charge());
    let one = cache.passes();
    assert_eq!(one, 1);
    // The first of these finds nothing, and clears the mark.
    (0..100).for_each(|_| assert!(!cache.charge()));
    assert_eq!(cache.passes(), one + 1);
    cache.put(id);
    assert!(cache.charge());
    assert_eq!(cache.passes(), one + 2);
}

/// A shrinker that never says that it is empty until a mark is asked again, but not by every
/// charge.
#[test]
fn shrinker_never_reporting_empty_is_retried_with_backoff() {
    let (cache, id) = Cache::new(0);
    (0..FULL).for_each(|_| assert!(cache.charge()));
    cache.put(id);
    assert!(cache.charge());
    let before = cache.passes();
    // Without time passing: three times.
    (0..100).for_each(|_| assert!(!cache.charge()));
    assert_eq!(cache.passes(), before + 3);
    // An object without a mark is found after a while.
    cache.objects.fetch_add(1, Relaxed);
    let machine = cache.mm.groups().unwrap();
    machine.platform().advance(1_000_000);
    assert!(cache.charge());
    assert_eq!((cache.passes(), cache.objects.load(Relaxed)), (before + 4, 0));
}

/// A thread charges all the time. Every object that another thread marks is found, though nothing
/// is marked twice.
#[test]
fn no_mark_is_slept_over() {
    let rounds = if cfg!(debug_assertions) { 2000 } else { 20_000 };
    let (cache, id) = Cache::new(EMPTY);
    (0..FULL).for_each(|_| assert!(cache.charge()));
    let had = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let charger = scope.spawn(|| {
            while had.load(Relaxed) < rounds {
                had.fetch_add(u64::from(cache.charge()), Relaxed);
            }
        });
        for round in 1..=rounds {
            cache.put(id);
            let mut looks = 0_u64;
            while had.load(Relaxed) < round {
                std::thread::yield_now();
                looks += 1;
                if looks == 10_000_000 {
                    had.store(rounds, Relaxed);
                    panic!("round {round}: a mark was slept over");
                }
            }
        }
        charger.join().unwrap();
    });
    assert_eq!(cache.objects.load(Relaxed), 0);
}
