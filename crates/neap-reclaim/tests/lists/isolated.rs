//! Items in hands, with threads that take them off, let them go and put them back at once.

use crate::site::{Host, On, SHRINKER, Thing, settle, things, verify, with_site};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use neap_groups::GroupId;
use neap_reclaim::lru::{By, End, Hands, Item, LruStatus};
use neap_testing::random::{Random, number, seed};
use neap_testing::virtual_platform::Virtual;
use std::sync::Mutex;

/// Takes up to `most` items off. Returns them with the right to put them back.
fn take<'s>(list: &On<'_, 's>, group: GroupId, most: usize) -> Option<(Hands<'s, Host<'s>>, Vec<NonNull<Item>>)> {
    let mut items = Vec::with_capacity(most);
    // SAFETY: things outlive the list, and the vector does not grow.
    let hands = unsafe { list.1.take(list.0, group, 0, most, |item| items.push(item)) };
    Some((hands?, items))
}

/// Does the same as `LruList::remove` of values.
fn remove(list: &On<'_, '_>, thing: &Thing) -> bool {
    while thing.item.is_linked() {
        if list.del(thing) || thing.item.leave_hands() {
            return true;
        }
    }
    false
}

/// The taker is told of each item before it is in hands: from then on it may be on another list.
#[test]
fn taken_item_cannot_be_released_until_its_callback_returns() {
    with_site(1, |site| {
        let list = On(site, site.open(By::Group, None).unwrap());
        let things = things(3);
        things.iter().for_each(|thing| assert!(list.add(GroupId::ROOT, 0, thing)));
        let mut told = 0;
        let each = |item| {
            let thing = Thing::around(item);
            assert!(thing.number == told && thing.item.is_linked() && !thing.item.leave_hands());
            // Any thread may let the item before go.
            assert!(told == 0 || things[told - 1].item.leave_hands());
            told += 1;
        };
        // SAFETY: things outlive the list.
        let hands = unsafe { list.1.take(site, GroupId::ROOT, 0, 2, each) }.unwrap();
        assert!(list.add(GroupId::ROOT, 0, &things[0]) && things[1].item.leave_hands());
        // SAFETY: the item was handed out with `hands`, and is in a thing, which outlives the list.
        assert!(!unsafe { hands.put_back(things[1].item(), End::Newest) });
        drop(hands);
        assert_eq!((told, list.all(GroupId::ROOT, 0)), (2, vec![2, 0]));
        verify(site);
        assert_eq!(things.iter().filter(|thing| list.del(thing)).count(), 2);
        list.close();
    });
}

/// An item in one thread's hands is removed and added to another group, from which a second thread
/// takes it. The second one's hands have it, and put it back there.
#[test]
fn each_hands_put_back_what_they_have() {
    with_site(1, |site| {
        let list = On(site, site.open(By::Group, Some(SHRINKER)).unwrap());
        let things = things(2);
        let [first, second] = ["a", "b"].map(|name| site.groups.create(site.host, GroupId::ROOT, name).unwrap());
        assert!(things.iter().all(|thing| list.add(first, 0, thing)));
        let (hands, items) = take(&list, first, 2).unwrap();
        assert!(things.iter().all(|thing| remove(&list, thing) && list.add(second, 0, thing)));
        let (others, taken) = take(&list, second, 2).unwrap();
        assert_eq!(items, taken);
        // SAFETY: things outlive the list.
        unsafe {
            assert!(!hands.put_back(items[0], End::Oldest) && !hands.keep(items[1]));
            assert!(others.put_back(items[0], End::Oldest) && others.keep(items[1]) && !others.keep(items[1]));
        }
        assert_eq!((list.all(first, 0), list.all(second, 0)), (vec![], vec![0]));
        assert!(!things[1].item.is_linked() && list.del(&things[0]));
        // An item that a walk hands out was removed for good.
        assert!(list.add(first, 0, &things[0]));
        // SAFETY: `isolate` does nothing but return a verdict.
        let walked = unsafe {
            list.1.walk(site, first, 0, 1, |_| LruStatus::Removed, |item| assert!(!hands.put_back(item, End::Oldest)))
        };
        assert!(walked.removed == 1 && things[0].item.leave_hands());
        drop((hands, others));
        list.close();
    });
}

/// Threads take off, put back, remove and add again, while groups are deleted and their slots
/// reused.
#[test]
fn what_is_removed_from_hands_and_added_elsewhere_stays_there() {
    const THREADS: usize = 4;
    const ITEMS: usize = 64;
    let (seed, steps) = (seed(), number("NEAP_STEPS", 30_000));
    with_site(1, |site| {
        let list = On(site, site.open(By::Group, Some(SHRINKER)).unwrap());
        let (all, living) = (things(ITEMS), Mutex::new(vec![GroupId::ROOT]));
        // Whether a thread has removed the item for good, and owns it.
        let owned: Vec<_> = (0..ITEMS).map(|_| AtomicBool::new(true)).collect();
        let own = |thing: &Thing| assert!(!owned[thing.number].swap(true, Relaxed), "two have an item");
        let any = |random: &mut Random| {
            let living = living.lock().unwrap();
            living[random.below(living.len())]
        };
        let (deleted, kept, is_over) = (AtomicU64::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let deleter = scope.spawn(|| {
                let mut random = Random(seed);
                for made in 0.. {
                    if is_over.load(Relaxed) {
                        break;
                    }
                    let group = any(&mut random);
                    if random.below(2) == 0 && living.lock().unwrap().len() < 6 {
                        let group = site.groups.create(site.host, group, &format!("g{made}"));
                        group.into_iter().for_each(|group| living.lock().unwrap().push(group));
                    } else if site.groups.delete(site.host, group).is_ok() {
                        deleted.fetch_add(1, Relaxed);
                        living.lock().unwrap().retain(|&other| other != group);
                    }
                    _ = site.groups.tick(site.host);
                    _ = site.tick();
                }
            });
            let workers = (0..THREADS as u64).map(|thread| {
                let (list, all, owned, own, any, kept) = (&list, &all, &owned, &own, &any, &kept);
                scope.spawn(move || {
                    let mut random = Random(seed ^ (thread + 1) << 32);
                    Virtual::run_on(thread as usize % 2);
                    for _ in 0..steps {
                        let (thing, group) = (&all[random.below(ITEMS)], any(&mut random));
                        match random.below(4) {
                            0 if owned[thing.number].swap(false, Relaxed) => {
                                // SAFETY: things outlive the list.
                                match unsafe { list.1.add(list.0, group, 0, thing.item()) } {
                                    Ok(added) => assert!(added, "an item that this thread had"),
                                    Err(_) => own(thing),
                                }
                            }
                            1 if remove(list, thing) => own(thing),
                            2 | 3 => {
                                let Some((hands, items)) = take(list, group, 4) else { continue };
                                for item in items {
                                    let thing = Thing::around(item);
                                    if random.below(4) == 0 {
                                        // SAFETY: the item was handed out with `hands`, and is in a
                                        // thing, which outlives the list.
                                        if unsafe { hands.keep(item) } {
                                            kept.fetch_add(1, Relaxed);
                                            own(thing);
                                        }
                                        continue;
                                    }
                                    let end = [End::Oldest, End::Newest][random.below(2)];
                                    // SAFETY: the item was handed out with `hands`, and is in a
                                    // thing, which outlives the list. If it is not put back,
                                    // another thread has it.
                                    unsafe { hands.put_back(item, end) };
                                }
                            }
                            _ => {}
                        }
                    }
                })
            });
            workers.collect::<Vec<_>>().into_iter().for_each(|worker| worker.join().unwrap());
            is_over.store(true, Relaxed);
            deleter.join().unwrap();
        });
        verify(site);
        let linked = owned.iter().filter(|owned| !owned.load(Relaxed)).count();
        assert_eq!(list.count_node(0), linked, "an item is lost");
        assert!(deleted.load(Relaxed) > 50 && kept.load(Relaxed) > 100, "{deleted:?} {kept:?}");
        let mut groups = living.into_inner().unwrap();
        while let Some(at) = groups.iter().rposition(|&group| site.groups.delete(site.host, group).is_ok()) {
            groups.remove(at);
        }
        settle(site);
        verify(site);
        assert_eq!(all.iter().filter(|thing| list.del(thing)).count(), linked);
        list.close();
    });
}
