//! Edge cases of lists: nodes beyond the last, groups that are gone, slots far from each other.

use crate::site::{On, SHRINKER, settle, things, verify, with_site};
use neap_groups::GroupId;
use neap_reclaim::lru::{By, LruStatus};

const NODES: usize = 3;

#[test]
fn a_node_beyond_the_last_is_the_last() {
    with_site(NODES, |site| {
        let list = On(site, site.open(By::Group, Some(SHRINKER)).unwrap());
        let things = things(3);
        let group = site.groups.create(site.host, GroupId::ROOT, "group").unwrap();
        for (thing, node) in things.iter().zip([NODES - 1, NODES, usize::MAX]) {
            assert!(list.add(group, node, thing));
        }
        assert_eq!([0, 1, 2, NODES, usize::MAX].map(|node| list.count(group, node)), [0, 0, 3, 3, 3]);
        assert_eq!(list.all(group, NODES), [0, 1, 2]);
        assert_eq!(list.walk(group, usize::MAX, 2, |_| LruStatus::Removed).1, [0, 1]);
        let marks = site.host.state.marks.lock().unwrap().clone();
        assert!(marks.iter().all(|&(_, node)| node == NODES - 1), "{marks:?}");
        assert!(list.del(&things[2]));
        list.close();
    });
}

#[test]
fn by_the_name_of_a_group_that_is_gone_nothing_is_found() {
    with_site(1, |site| {
        let list = On(site, site.open(By::Group, Some(SHRINKER)).unwrap());
        let things = things(4);
        let parent = site.groups.create(site.host, GroupId::ROOT, "parent").unwrap();
        let child = site.groups.create(site.host, parent, "child").unwrap();
        assert!(list.add(parent, 0, &things[0]) && list.add(child, 0, &things[1]));
        site.groups.delete(site.host, child).unwrap();
        let removed = list.walk(child, 0, usize::MAX, |_| LruStatus::Removed);
        assert_eq!((list.count(child, 0), removed.0.scanned, removed.1), (0, 0, vec![]));
        // SAFETY: items that are taken are in things; none is taken.
        let hands = unsafe { list.1.take(site, child, 0, 4, |item| panic!("{item:?}")) };
        assert!(hands.is_none());
        // An item added by it goes where the other items went.
        assert!(list.add(child, 0, &things[2]));
        assert_eq!(list.all(parent, 0), [1, 0, 2]);
        verify(site);
        assert!(things[..3].iter().all(|thing| list.del(thing)));
        settle(site);
        list.close();
    });
}

/// A table leads to a slot's block even if all slots before it are empty.
#[test]
fn what_one_group_alone_has_is_found_whichever_its_slot_is() {
    with_site(1, |site| {
        let thing = &things(1)[0];
        let groups: Vec<_> = (0..600)
            .map(|number| site.groups.create(site.host, GroupId::ROOT, &format!("{number}")).unwrap())
            .collect();
        for &group in &groups {
            let list = On(site, site.open(By::Group, None).unwrap());
            assert!(list.add(group, 0, thing));
            assert_eq!(list.count_node(0), 1, "{group:?}");
            assert!(list.del(thing), "{group:?}");
            list.close();
        }
    });
}
