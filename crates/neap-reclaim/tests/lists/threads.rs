//! Threads that add, remove, walk and delete at once: no item is lost, none is in two hands.

use crate::site::{On, SHRINKER, Thing, settle, things, verify, with_site};
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use neap_groups::GroupId;
use neap_reclaim::lru::{By, End, LruStatus};
use neap_testing::random::{Random, number, seed};
use neap_testing::virtual_platform::Virtual;
use std::sync::Mutex;

const THREADS: usize = 6;
const NODES: usize = 2;
const ITEMS: usize = 300;

/// Groups that threads add to. One of them deletes and makes them.
struct Living(Mutex<Vec<GroupId>>);

impl Living {
    fn any(&self, random: &mut Random) -> GroupId {
        let groups = self.0.lock().unwrap();
        groups[random.below(groups.len())]
    }
}

#[test]
fn whatever_happens_at_once_every_item_has_one_owner() {
    let (seed, steps) = (seed(), number("NEAP_STEPS", 30_000));
    with_site(NODES, |site| {
        let list = On(site, site.open(By::Group, Some(SHRINKER)).unwrap());
        let living = Living(Mutex::new(vec![GroupId::ROOT]));
        let all = things(ITEMS);
        // Whether a thread owns an item that is on no list: only the thread that removed it may add
        // it.
        let owned: Vec<_> = (0..ITEMS).map(|_| AtomicBool::new(true)).collect();
        let (removed, deleted, is_over) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
        let own = |thing: &Thing| assert!(!owned[thing.number].swap(true, Relaxed), "two have an item");
        std::thread::scope(|scope| {
            let deleter = scope.spawn(|| {
                let mut random = Random(seed);
                let mut made = 0;
                while !is_over.load(Relaxed) {
                    if random.below(2) == 0 && living.0.lock().unwrap().len() < 12 {
                        made += 1;
                        let parent = living.any(&mut random);
                        let group = site.groups.create(site.host, parent, &format!("g{made}"));
                        group.into_iter().for_each(|group| living.0.lock().unwrap().push(group));
                    } else {
                        let group = living.any(&mut random);
                        // Other threads may add to it during and shortly after the deletion.
                        if site.groups.delete(site.host, group).is_ok() {
                            deleted.fetch_add(1, Relaxed);
                            living.0.lock().unwrap().retain(|&other| other != group);
                        }
                    }
                    _ = site.groups.tick(site.host);
                    _ = site.tick();
                }
            });
            let workers: Vec<_> = (0..THREADS as u64)
                .map(|thread| {
                    let (list, all, owned, living, own) = (&list, &all, &owned, &living, &own);
                    let removed = &removed;
                    scope.spawn(move || {
                        let mut random = Random(seed ^ (thread + 1) << 32);
                        Virtual::run_on(thread as usize % NODES);
                        for _ in 0..steps {
                            let (thing, group) = (&all[random.below(ITEMS)], living.any(&mut random));
                            let node = random.below(NODES);
                            match random.below(10) {
                                0..4 if owned[thing.number].swap(false, Relaxed) => {
                                    // SAFETY: things outlive the list.
                                    match unsafe { list.1.add(list.0, group, node, thing.item()) } {
                                        Ok(added) => assert!(added, "an item that this thread had"),
                                        // The group is gone, and its id leads nowhere any more.
                                        Err(_) => own(thing),
                                    }
                                }
                                4..7 if list.del(thing) => own(thing),
                                7..9 => {
                                    let most = random.below(8);
                                    let verdicts =
                                        [LruStatus::Removed, LruStatus::Rotate, LruStatus::Skip, LruStatus::Retry];
                                    let (walked, out) = list.walk(group, node, most, |_| verdicts[random.below(4)]);
                                    assert!(walked.scanned <= most);
                                    removed.fetch_add(out.len(), Relaxed);
                                    out.into_iter().for_each(|number| own(&all[number]));
                                }
                                9 => {
                                    let mut items = Vec::new();
                                    // SAFETY: the items that are taken are in things, which outlive
                                    // the list.
                                    let hands = unsafe { list.1.take(list.0, group, node, 4, |item| items.push(item)) };
                                    for item in items {
                                        let end = [End::Oldest, End::Newest][random.below(2)];
                                        // SAFETY: the item was handed out with `hands`, and is in a
                                        // thing, which outlives the list.
                                        let put = hands.as_ref().map(|hands| unsafe { hands.put_back(item, end) });
                                        assert_eq!(put, Some(true));
                                    }
                                }
                                _ => {}
                            }
                        }
                    })
                })
                .collect();
            workers.into_iter().for_each(|worker| worker.join().unwrap());
            is_over.store(true, Relaxed);
            deleter.join().unwrap();
        });
        verify(site);
        let linked = owned.iter().filter(|owned| !owned.load(Relaxed)).count();
        assert_eq!((0..NODES).map(|node| list.count_node(node)).sum::<usize>(), linked, "an item is lost");
        assert!(deleted.load(Relaxed) > 50 && removed.load(Relaxed) > 100, "{deleted:?} {removed:?}");
        let mut groups = living.0.into_inner().unwrap();
        while let Some(at) = groups.iter().rposition(|&group| site.groups.delete(site.host, group).is_ok()) {
            groups.remove(at);
        }
        assert_eq!((0..NODES).map(|node| list.count(GroupId::ROOT, node)).sum::<usize>(), linked);
        settle(site);
        verify(site);
        assert_eq!(all.iter().filter(|thing| list.del(thing)).count(), linked);
        list.close();
    });
}
