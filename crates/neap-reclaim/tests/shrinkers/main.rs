//! Shrinkers on a virtual machine: the callbacks that a visit calls, and for how many objects.

mod coming_and_going;
mod edges;
mod host;
mod known_bugs;
mod many_threads;
mod model;
mod tenants;

use core::sync::atomic::Ordering::Relaxed;
use host::{Cache, Stage, with};
use neap_base::gate::Inside;
use neap_groups::GroupId;
use neap_reclaim::{Caller, ScanPressure, ShrinkerId, Unregistered};
use std::sync::Mutex;

const ROOT: GroupId = GroupId::ROOT;

#[test]
fn a_cache_is_asked_by_priority_until_it_is_gone() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let cache = Cache::of(10_000);
        // SAFETY: the cache outlives its registration.
        let id = unsafe { shrinkers.register(host, &cache.spec()) }.unwrap();
        let visited = shrinkers.visit(host, &(), ROOT, 0, 0, ScanPressure::of(4));
        assert_eq!((visited.scanned, visited.freed, visited.freed_bytes), (1152, 1152, 1152 * 64));
        assert_eq!(shrinkers.deferred(id, 0, 0), 98);
        assert_eq!(shrinkers.unregister(host, id), Ok(Unregistered::Gone));
        assert_eq!(shrinkers.visit(host, &(), ROOT, 0, 0, ScanPressure::of(0)).calls, 0);
        assert_eq!(cache.objects.load(Relaxed), 10_000 - 1152);
    });
}

#[test]
fn groups_that_have_nothing_are_not_visited() {
    with(&Stage::with_nodes(&[0, 1]), |host, shrinkers| {
        let cache = Cache::of(0);
        // SAFETY: the cache outlives its registration.
        let id = unsafe { shrinkers.register(host, &cache.by_group()) }.unwrap();
        Inside::assume(|inside| shrinkers.mark(inside, host, id, 3000, 1));
        assert_eq!((shrinkers.next_with_anything(1, 0), shrinkers.next_with_anything(0, 0)), (Some(3000), None));
        let visited = shrinkers.visit(host, &(), ROOT, 3000, 1, ScanPressure::of(0));
        // Once, and again after the bit was cleared.
        assert_eq!((visited.calls, cache.counts.load(Relaxed)), (2, 2));
        assert_eq!(shrinkers.next_with_anything(1, 0), None);
        shrinkers.unregister(host, id).unwrap();
    });
}

/// Records the shrinkers with callbacks that are called, and which calls follow one of the same
/// shrinker at once.
#[derive(Default)]
struct Following(Mutex<Vec<(u32, bool)>>);

impl Caller for Following {
    fn began(&self, id: ShrinkerId, again: bool) -> bool {
        self.0.lock().unwrap().push((id.index(), again));
        true
    }
}

/// A caller that measures thus reads a clock once for each callback, and once more for each
/// shrinker.
#[test]
fn observer_is_told_which_callbacks_follow_immediately() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let caches = [Cache::of(300), Cache::of(300)];
        // SAFETY: the caches outlive their registration.
        let ids = caches.each_ref().map(|cache| unsafe { shrinkers.register(host, &cache.spec()) }.unwrap());
        let following = Following::default();
        assert_eq!(shrinkers.visit(host, &following, ROOT, 0, 0, ScanPressure::of(1)).freed, 512);
        let one = |index| [(index, false), (index, true), (index, true)];
        assert_eq!(*following.0.lock().unwrap(), [one(0), one(1)].concat());
        following.0.lock().unwrap().clear();
        assert!(shrinkers.scan(host, &following, ids[0], ROOT, 0, 200).is_some());
        assert_eq!(*following.0.lock().unwrap(), [(0, false), (0, true)]);
    });
}
