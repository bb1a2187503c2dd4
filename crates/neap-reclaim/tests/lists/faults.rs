//! Lists without memory: the nearest ancestor with a block gets the item, and everything else goes
//! on.

use crate::site::{On, SHRINKER, settle, target, things, verify, with_site};
use core::sync::atomic::Ordering::Relaxed;
use neap_groups::{GroupError, GroupId};
use neap_reclaim::lru::By;

#[test]
fn item_without_memory_goes_to_nearest_ancestor_with_a_block() {
    with_site(2, |site| {
        let exhausted = |is| site.host.state.is_exhausted.store(is, Relaxed);
        let list = On(site, site.open(By::Group, Some(SHRINKER)).unwrap());
        let things = things(6);
        let above = site.groups.create(site.host, GroupId::ROOT, "above").unwrap();
        let middle = site.groups.create(site.host, above, "middle").unwrap();
        let below = site.groups.create(site.host, middle, "below").unwrap();
        exhausted(true);
        assert!(list.add(below, 0, &things[0]));
        assert_eq!(list.all(GroupId::ROOT, 0), [0], "the root's is there from the start");
        exhausted(false);
        assert!(list.add(above, 0, &things[1]));
        exhausted(true);
        assert!(list.add(below, 0, &things[2]) && list.add(middle, 0, &things[3]));
        let seats = [GroupId::ROOT, above].map(|id| (target(site, id), 0));
        assert_eq!(*site.host.state.marks.lock().unwrap(), seats, "of the groups that received them");
        exhausted(false);
        // The group gets its own block now. Items that were put elsewhere are found there.
        assert!(list.add(below, 0, &things[4]));
        assert_eq!([above, middle, below].map(|group| list.all(group, 0)), [vec![1, 2, 3], vec![], vec![4]]);
        verify(site);
        assert!(list.del(&things[2]) && list.del(&things[0]));
        site.groups.delete(site.host, below).unwrap();
        site.groups.delete(site.host, middle).unwrap();
        assert_eq!(list.all(above, 0), [4, 1, 3]);
        assert_eq!([0, 1, 2, 3, 4, 5].map(|at| list.del(&things[at])), [false, true, false, true, true, false]);
        settle(site);
        list.close();
    });
}

/// A table has to grow for the parent, which is far from its child, and cannot. The nearest
/// ancestor with a block gets the items.
#[test]
fn a_parent_that_no_part_can_be_made_for_is_passed_over() {
    with_site(1, |site| {
        let list = On(site, site.open(By::Group, Some(SHRINKER)).unwrap());
        let things = things(2);
        let above = site.groups.create(site.host, GroupId::ROOT, "above").unwrap();
        let parent = site.groups.create(site.host, above, "parent").unwrap();
        // Slots of one node of the table are used up.
        let fill = |count| {
            for at in 0..count {
                site.groups.create(site.host, GroupId::ROOT, &format!("{at}")).unwrap();
            }
        };
        fill(130);
        let child = site.groups.create(site.host, parent, "child").unwrap();
        assert!(list.add(child, 0, &things[0]));
        site.host.state.is_exhausted.store(true, Relaxed);
        site.host.state.marks.lock().unwrap().clear();
        site.groups.delete(site.host, child).unwrap();
        assert_eq!((list.all(GroupId::ROOT, 0), list.count(parent, 0)), (vec![0], 0));
        assert_eq!(site.host.state.marks.lock().unwrap().len(), 1);
        assert!(list.add(parent, 0, &things[1]));
        assert_eq!(list.all(GroupId::ROOT, 0), [0, 1]);
        verify(site);
        site.host.state.is_exhausted.store(false, Relaxed);
        settle(site);
        assert!(list.del(&things[0]) && list.del(&things[1]));
        list.close();
    });
}

#[test]
fn a_list_that_there_is_no_memory_for_is_not_made() {
    with_site(1, |site| {
        site.host.state.is_exhausted.store(true, Relaxed);
        assert_eq!(site.open(By::Group, None), Err(GroupError::NoMemory));
        site.host.state.is_exhausted.store(false, Relaxed);
        let list = On(site, site.open(By::Group, None).unwrap());
        let thing = &things(1)[0];
        // An id that leads nowhere is an error, and the item is on no list.
        let group = site.groups.create(site.host, GroupId::ROOT, "group").unwrap();
        site.groups.delete(site.host, group).unwrap();
        assert!(!site.groups.end_deleted(site.host));
        // SAFETY: the item is not put on a list.
        assert_eq!(unsafe { list.1.add(site, group, 0, thing.item()) }, Err(GroupError::NoSuchGroup));
        assert!(!thing.item.is_linked() && !list.del(thing));
        list.close();
    });
}
