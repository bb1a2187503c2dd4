//! Groups that are deleted while they have items: no item is lost, nothing is pinned, and every
//! item can be reached from the parent at once.

use crate::site::{On, SHRINKER, settle, things, verify, with_site};
use core::sync::atomic::Ordering::Relaxed;
use neap_groups::GroupId;
use neap_reclaim::lru::{By, End, LruStatus};

/// The groups of the script by which the memory use of memory cgroups was published.
const GROUPS: usize = if cfg!(miri) { 20 } else { 11_000 };
const EACH: usize = 4;

#[test]
fn eleven_thousand_groups_go_while_their_lists_are_full() {
    with_site(1, |site| {
        let list = On(site, site.open(By::Group, Some(SHRINKER)).unwrap());
        let things = things(GROUPS * EACH);
        let parent = site.groups.create(site.host, GroupId::ROOT, "parent").unwrap();
        let mut groups = Vec::new();
        for things in things.chunks(EACH) {
            let group = site.groups.create(site.host, parent, &format!("{}", groups.len())).unwrap();
            things.iter().for_each(|thing| assert!(list.add(group, 0, thing)));
            groups.push(group);
        }
        let full = site.host.state.bytes.load(Relaxed);
        for (gone, &group) in groups.iter().enumerate() {
            assert_eq!(list.count(parent, 0), gone * EACH);
            site.groups.delete(site.host, group).unwrap();
        }
        assert_eq!((list.count(parent, 0), list.count_node(0)), (things.len(), things.len()));
        verify(site);
        // The group that was deleted last has the oldest items. Items of a group are together and
        // in order.
        let all = list.all(parent, 0);
        let expected = (0..GROUPS).rev().flat_map(|group| (group * EACH..).take(EACH));
        assert!(all.into_iter().eq(expected));
        // Items are removed without knowledge of the deletion, before and after the ticks.
        assert!(things.iter().step_by(3).all(|thing| list.del(thing)));
        settle(site);
        verify(site);
        let left = site.host.state.bytes.load(Relaxed);
        assert!(left < full / 10 || cfg!(miri), "{left} of {full} bytes are pinned by items");
        assert!(things.iter().skip(1).step_by(3).all(|thing| list.del(thing)));
        let (walked, out) = list.walk(parent, 0, usize::MAX, |_| LruStatus::Removed);
        assert_eq!((walked.removed, list.count(parent, 0)), (GROUPS * EACH / 3, 0));
        assert!(out.iter().all(|number| number % 3 == 2));
        assert_eq!(site.groups.count(site.host).live, 2, "all that was deleted is gone");
        list.close();
    });
}

/// A deletion visits the lists that the group has used, however many there are.
#[test]
fn lists_that_a_group_never_used_are_not_looked_at() {
    with_site(1, |site| {
        let lists: Vec<_> = (0..if cfg!(miri) { 20 } else { 4000 })
            .map(|_| On(site, site.open(By::Group, Some(SHRINKER)).unwrap()))
            .collect();
        let things = things(lists.len());
        let [used, unused] = ["used", "unused"].map(|name| site.groups.create(site.host, GroupId::ROOT, name).unwrap());
        let bytes = site.host.state.bytes.load(Relaxed);
        assert!(lists[7].add(unused, 0, &things[7]) && lists[7].del(&things[7]));
        let one = site.host.state.bytes.load(Relaxed) - bytes;
        site.groups.delete(site.host, unused).unwrap();
        assert!(site.host.state.marks.lock().unwrap().len() == 1, "for the one that was added");
        // Only a group that used a list gets a block of it.
        assert!(site.host.state.bytes.load(Relaxed) - bytes <= one);
        lists.iter().zip(&things).for_each(|(list, thing)| assert!(list.add(used, 0, thing)));
        site.groups.delete(site.host, used).unwrap();
        for (list, thing) in lists.iter().zip(&things) {
            assert_eq!(list.all(GroupId::ROOT, 0), [thing.number]);
            assert!(list.del(thing));
        }
        settle(site);
        lists.into_iter().for_each(On::close);
    });
}

/// A group is deleted while an item is in hands. Its sub-list leads to the parent until the item is
/// put back.
#[test]
fn what_is_in_hands_comes_back_to_the_parent() {
    with_site(1, |site| {
        let list = On(site, site.open(By::Group, Some(SHRINKER)).unwrap());
        let things = things(3);
        for parent_has_a_part in [true, false] {
            let parent = site.groups.create(site.host, GroupId::ROOT, "parent").unwrap();
            let child = site.groups.create(site.host, parent, "child").unwrap();
            assert!(!parent_has_a_part || list.add(parent, 0, &things[2]));
            assert!(list.add(child, 0, &things[0]) && list.add(child, 0, &things[1]));
            let mut taken = Vec::new();
            // SAFETY: things outlive the list.
            let hands = unsafe { list.1.take(site, child, 0, 9, |item| taken.push(item)) }.unwrap();
            assert_eq!(taken, [things[0].item(), things[1].item()]);
            site.groups.delete(site.host, child).unwrap();
            assert!((0..20).all(|_| site.tick() == parent_has_a_part), "what has items in hands stays");
            // SAFETY: the items were handed out with `hands`, and are in things, which outlive the
            // list.
            let put = taken.into_iter().rev().all(|item| unsafe { hands.put_back(item, End::Oldest) });
            drop(hands);
            let expected = if parent_has_a_part { vec![0, 1, 2] } else { vec![0, 1] };
            assert_eq!((put, list.all(parent, 0)), (true, expected));
            settle(site);
            verify(site);
            assert_eq!(things.iter().filter(|thing| list.del(thing)).count(), 2 + usize::from(parent_has_a_part));
            site.groups.delete(site.host, parent).unwrap();
            settle(site);
        }
        list.close();
    });
}
