//! Bugs of Linux's list_lru, one test each, under the ids of the reference. L10 to L12 concern
//! shrinkers and pressure.

use crate::site::{On, SHRINKER, Thing, settle, target, things, verify, with_site};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use neap_groups::{GroupId, GroupSlot};
use neap_reclaim::lru::{By, LONGEST, LruStatus};
use std::collections::BTreeMap;
use std::sync::Barrier;

const ROUNDS: usize = 300;

/// An item is added while the group is deleted: the group that gets the item is marked.
#[test]
fn l1_the_group_that_received_an_item_is_marked() {
    with_site(1, |site| {
        let list = On(site, site.open(By::Group, Some(SHRINKER)).unwrap());
        let things = things(ROUNDS);
        for thing in &things {
            let parent = site.groups.create(site.host, GroupId::ROOT, "parent").unwrap();
            let child = site.groups.create(site.host, parent, "child").unwrap();
            let seat = target(site, parent);
            // The child has a block already, or one is made meanwhile.
            if thing.number % 2 == 0 {
                assert!(list.add(child, 0, thing) && list.del(thing));
            }
            site.host.state.marks.lock().unwrap().clear();
            let start = Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    start.wait();
                    assert!(list.add(child, 0, thing));
                });
                start.wait();
                site.groups.delete(site.host, child).unwrap();
            });
            assert_eq!((list.count(parent, 0), list.all(parent, 0)), (1, vec![thing.number]));
            assert!(site.host.state.marks.lock().unwrap().contains(&(seat, 0)), "no pass would look there");
            assert!(list.del(thing));
            site.groups.delete(site.host, parent).unwrap();
            settle(site);
        }
        list.close();
    });
}

/// Neighbours are removed while their sub-list goes to the parent.
#[test]
fn l2_item_is_unlinked_only_under_its_own_list_lock() {
    with_site(1, |site| {
        let list = On(site, site.open(By::Group, None).unwrap());
        let things = things(6);
        for round in 0..ROUNDS {
            let child = site.groups.create(site.host, GroupId::ROOT, "child").unwrap();
            // The parent's: two before, if it has a block of its own.
            let (olds, news) = things.split_at(2);
            olds.iter().filter(|_| round % 2 == 0).for_each(|thing| assert!(list.add(GroupId::ROOT, 0, thing)));
            news.iter().for_each(|thing| assert!(list.add(child, 0, thing)));
            let start = Barrier::new(3);
            std::thread::scope(|scope| {
                for thing in &news[1..3] {
                    let (start, list) = (&start, &list);
                    scope.spawn(move || {
                        start.wait();
                        assert!(list.del(thing));
                    });
                }
                start.wait();
                site.groups.delete(site.host, child).unwrap();
            });
            verify(site);
            let expected = if round % 2 == 0 { vec![2, 5, 0, 1] } else { vec![2, 5] };
            assert_eq!(list.all(GroupId::ROOT, 0), expected);
            assert!(things.iter().filter(|thing| list.del(thing)).count() == expected.len());
        }
        list.close();
    });
}

/// The parent is marked if and only if the deleted group had items, also while these are removed.
/// It never has items without a mark.
#[test]
fn l3_the_parent_is_marked_if_it_gets_anything() {
    with_site(2, |site| {
        let list = On(site, site.open(By::Group, Some(SHRINKER)).unwrap());
        let parent = site.groups.create(site.host, GroupId::ROOT, "parent").unwrap();
        let things = things(2);
        let seat = target(site, parent);
        for round in 0..ROUNDS {
            let child = site.groups.create(site.host, parent, "child").unwrap();
            assert!(list.add(child, 1, &things[0]) && list.add(child, 1, &things[1]));
            site.host.state.marks.lock().unwrap().clear();
            let start = Barrier::new(2);
            std::thread::scope(|scope| {
                if round % 3 > 0 {
                    scope.spawn(|| {
                        start.wait();
                        assert!(list.del(&things[0]));
                        assert!(round % 3 == 1 || list.del(&things[1]));
                    });
                    start.wait();
                }
                site.groups.delete(site.host, child).unwrap();
            });
            let marks = site.host.state.marks.lock().unwrap().clone();
            assert!(marks.iter().all(|mark| *mark == (seat, 1)), "of no other group, and on no other node");
            assert!(list.count(parent, 1) == 0 || !marks.is_empty(), "items that no pass would look for");
            things.iter().for_each(|thing| _ = list.del(thing));
            // A group without items that is deleted causes no mark.
            let child = site.groups.create(site.host, parent, "empty").unwrap();
            assert!(list.add(child, 0, &things[0]) && list.del(&things[0]));
            site.host.state.marks.lock().unwrap().clear();
            site.groups.delete(site.host, child).unwrap();
            assert!(site.host.state.marks.lock().unwrap().is_empty());
            settle(site);
        }
        list.close();
    });
}

/// A reader that has found a group's sub-list, and has not looked at it yet, can do so for any
/// time.
#[test]
fn l4_what_a_group_had_is_there_for_those_on_the_way_to_it() {
    with_site(1, |site| {
        let list = On(site, site.open(By::Group, None).unwrap());
        let things = things(2);
        assert!(list.add(GroupId::ROOT, 0, &things[0]));
        let parent = site.groups.create(site.host, GroupId::ROOT, "parent").unwrap();
        assert!(list.add(parent, 0, &things[1]) && list.del(&things[1]));
        let child = site.groups.create(site.host, parent, "child").unwrap();
        assert!(list.add(child, 0, &things[1]) && list.del(&things[1]));
        let bytes = site.host.state.bytes.load(Relaxed);
        let reading = site.groups.reading();
        site.groups.delete(site.host, child).unwrap();
        assert!((0..20).all(|_| site.tick()), "a visitor may be on the way");
        assert_eq!(site.host.state.bytes.load(Relaxed), bytes);
        drop(reading);
        settle(site);
        assert!(site.host.state.bytes.load(Relaxed) < bytes, "no visitor is");
        list.close();
    });
}

/// An item is added from within the deletion, before the group's items go to the parent.
#[test]
fn l5_a_group_that_leaves_gets_no_list_any_more() {
    with_site(1, |site| {
        let list = On(site, site.open(By::Group, Some(SHRINKER)).unwrap());
        let thing: &'static Thing = Box::leak(Box::new(Thing::new(0)));
        let parent = site.groups.create(site.host, GroupId::ROOT, "parent").unwrap();
        let child = site.groups.create(site.host, parent, "child").unwrap();
        let seats = [parent, child].map(|id| target(site, id));
        let added = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let (begin, began) = std::sync::mpsc::channel();
            let (done, end) = std::sync::mpsc::channel();
            scope.spawn(|| {
                let began: std::sync::mpsc::Receiver<()> = began;
                began.recv().unwrap();
                assert!(list.add(child, 0, thing));
                added.fetch_add(1, Relaxed);
                done.send(()).unwrap();
                drop(done);
            });
            *site.host.state.before_offline.lock().unwrap() = Some(Box::new(move || {
                begin.send(()).unwrap();
                end.recv().unwrap();
            }));
            site.groups.delete(site.host, child).unwrap();
        });
        assert_eq!((added.load(Relaxed), list.all(parent, 0)), (1, vec![0]));
        assert_eq!(*site.host.state.marks.lock().unwrap(), [(seats[0], 0)], "and not {:?}", seats[1]);
        // The next group of the slot finds no items there.
        settle(site);
        let next = site.groups.create(site.host, parent, "next").unwrap();
        assert_eq!(target(site, next).slot, seats[1].slot);
        assert_eq!(list.count(next, 0), 0);
        assert!(list.del(thing));
        list.close();
    });
}

/// A thread frees an item when it is on no list: not before the walk that took it off has looked at
/// it for the last time.
#[test]
fn l6_item_reports_linked_until_the_walk_is_done_with_it() {
    with_site(1, |site| {
        let list = On(site, site.open(By::Group, None).unwrap());
        let things = things(2);
        things.iter().for_each(|thing| assert!(list.add(GroupId::ROOT, 0, thing)));
        let mut disposed = 0;
        // SAFETY: `isolate` does nothing but return a verdict.
        let walked = unsafe {
            list.1.walk(
                site,
                GroupId::ROOT,
                0,
                2,
                |_| LruStatus::Removed,
                |item| {
                    let thing = Thing::around(item);
                    // The other item is on its way to `dispose`, which uses its link: it cannot be
                    // let go.
                    let others = &things[thing.number + 1..];
                    assert!(thing.item.is_linked());
                    assert!(others.iter().all(|thing| thing.item.is_linked() && !thing.item.leave_hands()));
                    assert!(!list.del(thing) && !list.add(GroupId::ROOT, 0, thing), "the walk has it");
                    assert!(thing.item.leave_hands() && !thing.item.is_linked());
                    thing.freed.store(true, Relaxed);
                    disposed += 1;
                },
            )
        };
        assert_eq!((walked.removed, disposed, list.count(GroupId::ROOT, 0)), (2, 2, 0));
        list.close();
        // Of a walk and a concurrent `del`, one gets the item.
        let list = On(site, site.open(By::Group, None).unwrap());
        let thing = Thing::new(0);
        for _ in 0..ROUNDS {
            assert!(list.add(GroupId::ROOT, 0, &thing));
            let (start, got) = (Barrier::new(2), AtomicUsize::new(0));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    start.wait();
                    got.fetch_add(usize::from(list.del(&thing)), Relaxed);
                });
                start.wait();
                got.fetch_add(list.walk(GroupId::ROOT, 0, 1, |_| LruStatus::Removed).0.removed, Relaxed);
            });
            assert_eq!(got.load(Relaxed), 1);
        }
        list.close();
    });
}

/// Items of a list that is not by group are the root's, and so are its marks.
#[test]
fn l7_marks_go_to_the_group_that_holds_the_items() {
    with_site(2, |site| {
        let list = On(site, site.open(By::RootAlone, Some(SHRINKER)).unwrap());
        let things = things(2);
        let groups = ["a", "b"].map(|name| site.groups.create(site.host, GroupId::ROOT, name).unwrap());
        groups.iter().zip(&things).for_each(|(&group, thing)| assert!(list.add(group, 1, thing)));
        assert_eq!(*site.host.state.marks.lock().unwrap(), [(GroupSlot::ROOT, 1)], "the first one's, and the list's");
        groups.iter().for_each(|&group| assert_eq!(list.all(group, 1), [0, 1]));
        groups.iter().for_each(|&group| site.groups.delete(site.host, group).unwrap());
        assert_eq!(list.count(GroupId::ROOT, 1), 2);
        assert!(things.iter().all(|thing| list.del(thing)));
        list.close();
    });
}

/// Counted without a lock while groups are deleted: never more items than there are.
#[test]
fn l8_counts_are_numbers_of_items() {
    const ITEMS: usize = 10;
    with_site(1, |site| {
        let list = On(site, site.open(By::Group, None).unwrap());
        let (things, is_over) = (things(ITEMS), AtomicBool::new(false));
        let parent = site.groups.create(site.host, GroupId::ROOT, "parent").unwrap();
        std::thread::scope(|scope| {
            let counting = scope.spawn(|| {
                let mut most = 0;
                while !is_over.load(Relaxed) {
                    most = most.max(list.count(parent, 0));
                    assert!(list.count_node(0) <= 2 * ITEMS);
                }
                most
            });
            for _ in 0..ROUNDS {
                let child = site.groups.create(site.host, parent, "child").unwrap();
                things.iter().for_each(|thing| assert!(list.add(child, 0, thing)));
                site.groups.delete(site.host, child).unwrap();
                assert_eq!(list.count(parent, 0), ITEMS);
                assert!(things.iter().all(|thing| list.del(thing)));
            }
            is_over.store(true, Relaxed);
            assert!(counting.join().unwrap() <= ITEMS);
        });
        list.close();
    });
}

/// A function that always retries ends with its budget; one that rotates visits no item twice.
#[test]
fn l9_no_walk_goes_on_for_ever() {
    with_site(1, |site| {
        let list = On(site, site.open(By::Group, None).unwrap());
        let things = things(10);
        things.iter().for_each(|thing| assert!(list.add(GroupId::ROOT, 0, thing)));
        let (retried, _) = list.walk(GroupId::ROOT, 0, 1000, |_| LruStatus::Retry);
        assert_eq!((retried.scanned, retried.removed, retried.stopped), (1000, 0, false));
        let mut seen = Vec::new();
        let (rotated, _) = list.walk(GroupId::ROOT, 0, 1000, |thing| {
            seen.push(thing.number);
            if thing.number == 3 { LruStatus::Skip } else { LruStatus::Rotate }
        });
        assert_eq!((rotated.scanned, seen), (10, (0..10).collect()));
        assert_eq!(list.all(GroupId::ROOT, 0), [3, 0, 1, 2, 4, 5, 6, 7, 8, 9]);
        let (stopped, out) = list.walk(GroupId::ROOT, 0, 1000, |thing| match thing.number {
            3 => LruStatus::Removed,
            0 => LruStatus::Skip,
            _ => LruStatus::Stop,
        });
        assert_eq!((stopped.scanned, stopped.stopped, out), (3, true, vec![3]));
        assert_eq!(things.iter().filter(|thing| list.del(thing)).count(), 9);
        assert_eq!(list.walk(GroupId::ROOT, 0, 1000, |_| LruStatus::Stop).0.scanned, 0);
        list.close();
    });
}

/// A lock, and the gate that forks wait for, are held for a bounded number of items.
#[test]
fn no_walk_holds_a_lock_for_ever() {
    with_site(1, |site| {
        let list = On(site, site.open(By::Group, None).unwrap());
        let things = things(LONGEST + 10);
        things.iter().for_each(|thing| assert!(list.add(GroupId::ROOT, 0, thing)));
        let mut held = BTreeMap::new();
        let (walked, out) = list.walk(GroupId::ROOT, 0, 2000, |_| {
            *held.entry(site.host.state.passages.load(Relaxed)).or_insert(0) += 1;
            LruStatus::Removed
        });
        assert_eq!((walked.removed, out), (2000, (0..2000).collect()));
        assert!(held.len() == 8 && held.values().all(|items| *items <= 256), "{held:?}");
        // If some items stay, the visited ones are known under the lock alone.
        let mut asked = 0;
        let mut skip = |_: &Thing| {
            asked += 1;
            if asked == 5 { LruStatus::Removed } else { LruStatus::Skip }
        };
        assert_eq!(list.walk(GroupId::ROOT, 0, usize::MAX, &mut skip).0.scanned, LONGEST + 10 - 2000);
        assert_eq!(things[..2000].iter().filter(|thing| list.add(GroupId::ROOT, 0, thing)).count(), 2000);
        assert_eq!(list.walk(GroupId::ROOT, 0, usize::MAX, &mut skip).0.scanned, LONGEST);
        // All items that are there are removed, however many, and none that come meanwhile.
        let count = list.count(GroupId::ROOT, 0);
        assert_eq!(list.walk(GroupId::ROOT, 0, usize::MAX, |_| LruStatus::Removed).0.removed, count);
        list.close();
    });
}
