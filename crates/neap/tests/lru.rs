//! LRU lists of the process: values by handle, from any thread, in groups that go, across forks.
#![cfg(feature = "std")]

use core::panic::AssertUnwindSafe;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use core::time::Duration;
use neap::groups::Group;
use neap::lru::{Handle, LruList, LruStatus};
use neap::process::PROCESS;
use neap::reclaim::{self, Context, Shrinker};
use neap_testing::child::in_child;
use std::panic::catch_unwind;
use std::sync::Arc;

const OBJECT: u64 = 64 << 10;

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

/// A value that counts its drop.
#[derive(Debug)]
struct Counted(u32, Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, Relaxed);
    }
}

fn verify() {
    PROCESS.verify(64).unwrap_or_else(|finding| panic!("{finding:?}"));
}

/// The values of a group, oldest first.
fn all(list: &LruList<Counted>, group: Group) -> Vec<u32> {
    let mut all = Vec::new();
    let look = |value: &Counted| {
        all.push(value.0);
        LruStatus::Skip
    };
    assert_eq!(list.walk(group, 0, usize::MAX, look, drop).removed, 0);
    all
}

#[test]
fn values_live_as_long_as_the_list_or_a_handle_has_them() {
    let (dropped, group) = (Arc::new(AtomicUsize::new(0)), Group::create("lru/lives").unwrap());
    let list = LruList::new().unwrap();
    let handles: Vec<Handle<Counted>> =
        (0..6).map(|number| list.add_on(group, 0, Counted(number, dropped.clone())).unwrap()).collect();
    assert_eq!((list.count(group), all(&list, group)), (6, vec![0, 1, 2, 3, 4, 5]));
    assert!(!list.add_again(group, 0, &handles[0]).unwrap(), "it is on it");
    assert!(list.remove(&handles[0]) && !list.remove(&handles[0]) && list.add_again(group, 0, &handles[0]).unwrap());
    assert_eq!(all(&list, group), [1, 2, 3, 4, 5, 0]);
    let other = LruList::<Counted>::new().unwrap();
    assert!(!other.remove(&handles[1]) && !other.add_again(group, 0, &handles[1]).unwrap(), "it is another list's");
    // Callbacks of walks may do anything, also with items that the walk holds.
    let mut evicted = Vec::new();
    let walked = list.walk(
        group,
        0,
        100,
        |value| match value.0 {
            1 => {
                assert!(list.remove(&handles[1]) && list.remove(&handles[3]) && list.remove(&handles[0]));
                drop(vec![0_u8; 1 << 20]);
                LruStatus::Removed
            }
            2 | 5 => LruStatus::Skip,
            4 => LruStatus::Rotate,
            _ => LruStatus::Removed,
        },
        |handle| evicted.push(handle.0),
    );
    assert_eq!((walked.scanned, walked.removed, evicted), (6, 0, vec![]), "all that was to go was removed before");
    assert_eq!(all(&list, group), [2, 5, 4]);
    drop(handles);
    assert_eq!(dropped.load(Relaxed), 3);
    let walked = list.walk(group, 0, 1, |_| LruStatus::Removed, |handle| assert_eq!(handle.0, 2));
    assert_eq!((walked.removed, dropped.load(Relaxed)), (1, 4));
    // A dropped list drops its values; a deleted group's values were its parent's before.
    group.delete().unwrap();
    assert_eq!(all(&list, Group::find("lru").unwrap()), [5, 4]);
    // Until neap's thread ends the group, its handle names the heir. No charge keeps the handle.
    assert!((0..1000).any(|_| {
        PROCESS.tick(0);
        group.heir().is_none()
    }));
    assert_eq!(list.count(group), 0);
    verify();
    drop(list);
    assert_eq!(dropped.load(Relaxed), 6);
    verify();
}

#[test]
fn a_touched_value_is_the_newest_also_after_its_group_has_gone() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let [above, group] = ["lru/touch", "lru/touch/below"].map(|path| Group::create(path).unwrap());
    let list = LruList::new().unwrap();
    let add = |group, number| list.add_on(group, 0, Counted(number, dropped.clone())).unwrap();
    let handles: Vec<_> = (0..4).map(|number| add(group, number)).collect();
    let newest = add(above, 9);
    assert!(list.touch(&handles[1]) && list.touch(&handles[3]) && list.touch(&handles[3]));
    assert_eq!(all(&list, group), [0, 2, 1, 3]);
    let other = LruList::<Counted>::new().unwrap();
    assert!(!other.touch(&handles[0]), "it is on another list");
    // A walk that asks about a value decides what becomes of it.
    let look = |value: &Counted| {
        assert!(!list.touch(&handles[value.0 as usize]));
        LruStatus::Skip
    };
    assert_eq!(list.walk(group, 0, 9, look, drop).scanned, 4);
    // Values of a group that has gone name its part of the list for a while.
    group.delete().unwrap();
    assert!(list.touch(&handles[2]));
    assert_eq!(all(&list, above), [0, 1, 3, 9, 2]);
    verify();
    for _ in 0..3 {
        handles.iter().for_each(|handle| assert!(list.touch(handle)));
        PROCESS.tick(0);
        verify();
    }
    assert_eq!(all(&list, above), [9, 0, 1, 2, 3]);
    assert!(list.remove(&newest) && !list.touch(&newest));
    drop(list);
    assert!(!LruList::new().unwrap().touch(&handles[0]));
    drop((handles, newest));
    assert_eq!(dropped.load(Relaxed), 5);
    verify();
}

#[test]
fn a_subtree_is_counted_and_walked_as_a_whole() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let paths = ["lru/tree", "lru/tree/a", "lru/tree/a/b", "lru/tree/c", "lru/beside"];
    let groups = paths.map(|path| Group::create(path).or_else(|_| Group::find(path)).unwrap());
    let below: Vec<_> = groups[0].below().map(|group| group.to_string()).collect();
    let mut sorted = below.clone();
    sorted.sort();
    assert_eq!((sorted.as_slice(), below[0].as_str()), (&paths.map(String::from)[..4], "lru/tree"));
    let at = |path: &str| below.iter().position(|group| group == path);
    assert!(at("lru/tree/a") < at("lru/tree/a/b"));
    assert!(groups[1].below().eq([groups[1], groups[2]]) && groups[4].below().eq([groups[4]]));
    let list = LruList::new().unwrap();
    for (number, &group) in groups.iter().enumerate() {
        (0..2).for_each(|_| drop(list.add(group, Counted(number as u32, dropped.clone())).unwrap()));
    }
    assert_eq!((list.count_below(groups[0]), list.count_below(groups[1]), list.count(groups[0])), (8, 4, 2));
    let mut evicted = Vec::new();
    let walked = list.walk_below(groups[0], 5, |_| LruStatus::Removed, |handle| evicted.push(handle.0));
    assert_eq!(
        (walked.removed, evicted.len(), list.count_below(groups[0]), &evicted[..2]),
        (5, 5, 3, [0, 0].as_slice())
    );
    let stopped = list.walk_below(groups[0], 99, |_| LruStatus::Stop, drop);
    assert_eq!((stopped.scanned, stopped.stopped), (1, true), "a verdict ends all of it");
    list.walk_below(groups[0], usize::MAX, |_| LruStatus::Removed, drop);
    assert_eq!((list.count_below(groups[0]), list.count(groups[4])), (0, 2));
    drop((evicted, list));
    verify();
}

/// A value that deletes a group when it is dropped. The group's values go to the parent, where the
/// list has been emptied already.
struct Deleter(Option<Group>, Arc<AtomicUsize>);

impl Drop for Deleter {
    fn drop(&mut self) {
        self.1.fetch_add(1, Relaxed);
        self.0.into_iter().for_each(|group| group.delete().unwrap());
    }
}

#[test]
fn a_list_goes_with_all_values_while_groups_do() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let list = LruList::new().unwrap();
    let groups = ["a", "b"].map(|name| Group::create(&format!("drops/{name}")).unwrap());
    let parent = Group::find("drops").unwrap();
    let add = |group, deletes| list.add_on(group, 0, Deleter(deletes, dropped.clone())).unwrap();
    drop((add(Group::ROOT, None), add(parent, Some(groups[0])), add(groups[0], Some(groups[1])), add(groups[1], None)));
    let kept = add(groups[1], None);
    drop(list);
    assert_eq!((dropped.load(Relaxed), parent.children().count()), (4, 0));
    // Most likely at the place of the former list.
    let list = LruList::new().unwrap();
    assert!(!list.remove(&kept), "it is on no list any more");
    drop((list, kept));
    assert_eq!(dropped.load(Relaxed), 5);
    verify();
}

#[test]
fn a_function_that_panics_loses_nothing() {
    let (dropped, group) = (Arc::new(AtomicUsize::new(0)), Group::create("panics").unwrap());
    let list = LruList::new().unwrap();
    (0..5).for_each(|number| drop(list.add_on(group, 0, Counted(number, dropped.clone())).unwrap()));
    let decide = |value: &Counted| match value.0 {
        0 => LruStatus::Removed,
        1 => LruStatus::Skip,
        2 => panic!("in the middle"),
        _ => LruStatus::Stop,
    };
    let panicked = catch_unwind(AssertUnwindSafe(|| list.walk(group, 0, 10, decide, drop)));
    assert!(panicked.is_err());
    assert_eq!((dropped.load(Relaxed), list.count(group)), (1, 4));
    let mut left = all(&list, group);
    left.sort_unstable();
    assert_eq!(left, [1, 2, 3, 4]);
    let stopped = list.walk(group, 0, 10, |value| if value.0 > 2 { LruStatus::Stop } else { LruStatus::Skip }, drop);
    assert!(stopped.stopped && stopped.removed == 0 && list.count(group) == 4);
    drop(list);
    assert_eq!(dropped.load(Relaxed), 5);
}

/// Threads add, remove and walk while groups come and go: each value is dropped once.
#[test]
fn threads_share_a_list_while_groups_go() {
    const EACH: u32 = 2000;
    let (dropped, over) = (Arc::new(AtomicUsize::new(0)), AtomicBool::new(false));
    let (list, evicted) = (LruList::new().unwrap(), AtomicUsize::new(0));
    let tenants = Group::create("sharing").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0.. {
                if over.load(Relaxed) {
                    break;
                }
                let group = Group::create(&format!("sharing/{round}")).unwrap();
                list.walk(tenants, 0, 64, |_| LruStatus::Rotate, drop);
                group.delete().unwrap();
                PROCESS.tick(0);
            }
        });
        let workers: Vec<_> = (0..4_u32)
            .map(|thread| {
                let (list, dropped, evicted) = (&list, dropped.clone(), &evicted);
                scope.spawn(move || {
                    let mut handles = Vec::new();
                    for number in 0..EACH {
                        let group = tenants.children().next().unwrap_or(tenants);
                        // The group may have gone meanwhile, without a known heir.
                        match list.add_on(group, 0, Counted(number, dropped.clone())) {
                            Ok(handle) => handles.push(handle),
                            Err(_) => continue,
                        }
                        if number % 3 == thread % 3 {
                            let at = number as usize % handles.len();
                            // Some move to another group, also while a walk holds them.
                            match list.remove(&handles[at]) && number % 2 == 0 {
                                true => _ = list.add_again(tenants, 0, &handles[at]),
                                false => drop(handles.swap_remove(at)),
                            }
                        }
                        if number % 16 == 0 {
                            let verdict = |value: &Counted| [LruStatus::Removed, LruStatus::Skip][value.0 as usize % 2];
                            list.walk(tenants, 0, 8, verdict, |_| _ = evicted.fetch_add(1, Relaxed));
                        }
                    }
                })
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        over.store(true, Relaxed);
    });
    verify();
    drop(list);
    assert!(evicted.load(Relaxed) > 0);
    assert_eq!(dropped.load(Relaxed), 4 * EACH as usize, "each value is dropped once");
    verify();
}

/// Forks while other threads use lists: the child finds none of their locks held, and every list in
/// order.
#[test]
fn a_child_finds_lists_in_order() {
    let list = LruList::new().unwrap();
    let group = Group::create("forks").unwrap();
    let kept: Vec<_> = (0..100_u32).map(|number| list.add_on(group, 0, number).unwrap()).collect();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !over.load(Relaxed) {
                    let handle = list.add_on(group, 0, 1000).unwrap();
                    assert!(list.remove(&handle));
                    let below = Group::create(&format!("forks/{:?}", std::thread::current().id())).unwrap();
                    drop(list.add_on(below, 0, 2000).unwrap());
                    below.delete().unwrap();
                    list.walk(
                        group,
                        0,
                        1,
                        |value| if *value == 2000 { LruStatus::Removed } else { LruStatus::Skip },
                        drop,
                    );
                }
            });
        }
        for _ in 0..12 {
            let child = || {
                assert!(PROCESS.verify(64).is_ok());
                // Some were held by walks, which do not exist here.
                assert_eq!(kept.iter().filter(|handle| list.remove(handle)).count(), kept.len());
                assert!(list.add_on(group, 0, 7).is_ok_and(|handle| list.remove(&handle)));
            };
            in_child(child);
        }
        over.store(true, Relaxed);
    });
    assert_eq!(kept.iter().filter(|handle| list.remove(handle)).count(), 100);
}

/// A cache without groups, whose values have weights and are charged to none.
#[test]
fn ungrouped_cache_evicts_weighted_values_of_all_groups() {
    let tenants = ["weighed/a", "weighed/b"].map(|path| Group::create(path).unwrap());
    let list = Arc::new(LruList::<u64>::new().unwrap());
    for (number, tenant) in (0..64).zip(tenants.into_iter().cycle()) {
        drop(list.add_weighted(tenant, 0, OBJECT, number).unwrap());
    }
    let (counted, shrunk) = (list.clone(), list.clone());
    let pair = (
        move |cx: &Context| counted.count_for(cx),
        move |cx: &Context, objects| shrunk.evict(cx, objects, |_| LruStatus::Removed, drop),
    );
    let shrinker = Shrinker::named("weighed").batch(64).register_shrink(pair).unwrap();
    let got = reclaim::reclaim(Group::ROOT, u64::MAX, Duration::from_secs(10));
    assert!(got.bytes >= 64 * OBJECT, "{got:?}");
    assert_eq!(tenants.map(|tenant| list.count(tenant)), [0, 0]);
    drop(shrinker);
}
