//! Bounds of a group, one by one: protection down the tree, charges that can never be granted, and
//! delays above `high`.

use crate::host::{Asked, Host};
use core::sync::atomic::Ordering::Relaxed;
use neap_groups::{Bound, Event, GroupId, GroupSlot, Groups, Kind, OnLimit, Refusal};
use neap_percpu::{Host as _, PerCpuData, Shape};
use neap_testing::virtual_platform::Virtual;

const MIB: u64 = 1 << 20;

fn with_groups(test: impl FnOnce(&Groups, &Host<'_, Virtual>)) {
    let machine = Virtual::new(4096, 2);
    let data = PerCpuData::open(&machine, &Shape { span: 16 << 20, ..Shape::usual(2) }, |_| 0, ()).unwrap();
    let asked = Asked::default();
    let host = Host::new(&machine, &data, &asked);
    let groups = Groups::open(&host).unwrap();
    test(&groups, &host);
    groups.verify(&host).unwrap_or_else(|finding| panic!("{finding:?}"));
    // SAFETY: no thread uses them any more.
    unsafe { groups.close(&host) };
}

/// The tree of the kernel's selftest of `memory.low`. A parent with 50 MiB protected is below one
/// with as much. Its children use 50 each, or nothing, and claim 75, 25, 0 and 500.
#[test]
fn protection_goes_down_the_tree_and_is_shared() {
    with_groups(|groups, host| {
        let top = groups.create(host, GroupId::ROOT, "top").unwrap();
        let parent = groups.create(host, top, "parent").unwrap();
        let children = ["c", "d", "e", "f"].map(|name| groups.create(host, parent, name).unwrap());
        for (child, used) in children.into_iter().zip([50, 50, 50, 0]) {
            let charged = groups.charge(host, child.payer(Kind::ByHand, 0), used * MIB, OnLimit::Refuse);
            assert_eq!(charged, Ok(0));
        }
        for (child, low) in children.into_iter().zip([75, 25, 0, 500]) {
            groups.set_bound(host, child, Bound::Low, low * MIB).unwrap();
        }
        groups.set_bound(host, parent, Bound::Low, 50 * MIB).unwrap();
        let low = |id: GroupId| groups.protection(host, id).unwrap().low / MIB;
        assert_eq!((low(top), low(parent), low(GroupId::ROOT)), (0, 0, 0), "nothing is claimed at the top");
        groups.set_bound(host, top, Bound::Low, 50 * MIB).unwrap();
        assert_eq!((low(top), low(parent)), (50, 50));
        assert_eq!(children.map(low), [33, 16, 0, 0]);
        assert_eq!(groups.protection(host, parent).unwrap().min, 0, "low is not min");
        groups.set_bound(host, parent, Bound::Min, 20 * MIB).unwrap();
        groups.set_bound(host, top, Bound::Min, 10 * MIB).unwrap();
        assert_eq!(groups.protection(host, parent).unwrap().min, 10 * MIB);
        for (child, used) in children.into_iter().zip([50, 50, 50, 0]) {
            groups.uncharge(host, child.payer(Kind::ByHand, 0), used * MIB);
        }
    });
}

/// Caches would otherwise give all their memory for nothing.
#[test]
fn impossible_charge_is_refused_without_reclaim() {
    with_groups(|groups, host| {
        let above = groups.create(host, GroupId::ROOT, "above").unwrap();
        let [below, beside] = ["below", "beside"].map(|name| groups.create(host, above, name).unwrap());
        groups.set_bound(host, above, Bound::Max, 10 * MIB).unwrap();
        groups.set_bound(host, below, Bound::Max, 20 * MIB).unwrap();
        let charge = |id: GroupId, bytes, how| groups.charge(host, id.payer(Kind::ByHand, 0), bytes, how);
        let limit = |refusal| match refusal {
            Err(Refusal::Limit(limit)) => (limit.group, limit.max),
            other => panic!("{other:?}"),
        };
        let asked = || host.asked.reclaim.swap(0, Relaxed);
        assert_eq!(charge(beside, 8 * MIB, OnLimit::Refuse), Ok(0));
        assert_eq!((limit(charge(below, 10 * MIB + 1, OnLimit::Refuse)), asked()), ((above, 10 * MIB), 0));
        assert_eq!((limit(charge(below, 20 * MIB + 1, OnLimit::Refuse)), asked()), ((below, 20 * MIB), 0));
        // Memory is requested for a charge that may be granted, and for one that is granted in any
        // case.
        assert_eq!((limit(charge(below, 10 * MIB, OnLimit::Refuse)), asked()), ((above, 10 * MIB), 10 * MIB));
        assert_eq!((charge(below, 10 * MIB + 1, OnLimit::Overcharge), asked()), (Ok(0), 10 * MIB + 1));
        groups.uncharge(host, below.payer(Kind::ByHand, 0), 10 * MIB + 1);
        // No memory that `min` protects is taken. If its owner uncharges it, that is seen.
        groups.set_bound(host, beside, Bound::Min, 7 * MIB).unwrap();
        assert_eq!((limit(charge(below, 3 * MIB, OnLimit::Refuse)), asked()), ((above, 10 * MIB), 3 * MIB));
        assert_eq!((limit(charge(below, 3 * MIB + 1, OnLimit::Refuse)), asked()), ((above, 10 * MIB), 0));
        assert_eq!((charge(below, 4 * MIB, OnLimit::Overcharge), asked()), (Ok(0), 4 * MIB));
        groups.uncharge(host, below.payer(Kind::ByHand, 0), 4 * MIB);
        groups.set_bound(host, beside, Bound::Min, 0).unwrap();
        assert_eq!((limit(charge(below, 3 * MIB + 1, OnLimit::Refuse)), asked()), ((above, 10 * MIB), 3 * MIB + 1));
        groups.set_bound(host, beside, Bound::Min, 9 * MIB).unwrap();
        groups.uncharge(host, beside.payer(Kind::ByHand, 0), 8 * MIB);
        assert_eq!((charge(below, 3 * MIB, OnLimit::Refuse), asked()), (Ok(0), 0));
        groups.uncharge(host, below.payer(Kind::ByHand, 0), 3 * MIB);
        // A claim ends with its group.
        groups.delete(host, beside).unwrap();
        assert_eq!((limit(charge(below, 10 * MIB + 1, OnLimit::Refuse)), asked()), ((above, 10 * MIB), 0));
    });
}

/// A walk of all children visits each, and once more each for the sum of their claims; not all of
/// them for each.
#[test]
fn siblings_that_are_protected_are_added_up_once_in_a_walk() {
    with_groups(|groups, host| {
        let top = groups.create(host, GroupId::ROOT, "top").unwrap();
        let parent = groups.create(host, top, "parent").unwrap();
        let children: Vec<_> = (0..100).map(|name| groups.create(host, parent, &name.to_string()).unwrap()).collect();
        groups.set_bound(host, parent, Bound::Low, 50 * MIB).unwrap();
        for &child in &children {
            assert_eq!(groups.charge(host, child.payer(Kind::ByHand, 0), MIB, OnLimit::Refuse), Ok(0));
        }
        let slot = |id| host.inside(|inside| groups.attach_target(inside, &groups.reading(), id)).unwrap().slot;
        let walk = || {
            let before = groups.summed();
            let low = |&child| groups.standing(host, slot(child), top).unwrap().low;
            (children.iter().map(low).collect::<Vec<_>>(), groups.summed() - before)
        };
        assert_eq!(walk(), (vec![MIB / 2; 100], 0), "no child claims anything");
        children.iter().for_each(|&child| _ = groups.set_bound(host, child, Bound::Low, MIB).unwrap());
        groups.begin_pass();
        assert_eq!(walk(), (vec![MIB / 2; 100], 100));
        // A change is seen by the next walk, and by the next pass at once.
        let double = |id: GroupId| groups.charge(host, id.payer(Kind::ByHand, 0), MIB, OnLimit::Refuse).unwrap();
        children[..50].iter().for_each(|&child| {
            groups.set_bound(host, child, Bound::Low, 2 * MIB).unwrap();
            double(child);
        });
        assert_eq!((walk().0[0], walk().1), (2 * MIB / 3, 100));
        assert_eq!(groups.standing(host, slot(children[99]), top).unwrap().low, MIB / 3);
        children[..50].iter().for_each(|&child| groups.uncharge(host, child.payer(Kind::ByHand, 0), MIB));
        _ = groups.drain(host, top);
        groups.begin_pass();
        assert_eq!(groups.standing(host, slot(children[99]), top).unwrap().low, MIB / 2);
        children.iter().for_each(|&child| groups.uncharge(host, child.payer(Kind::ByHand, 0), MIB));
    });
}

#[test]
fn slots_of_a_group_and_those_below_it_are_told_if_they_are_few() {
    with_groups(|groups, host| {
        let make = |above, name| groups.create(host, above, name).unwrap();
        let first = make(GroupId::ROOT, "first");
        let top = make(GroupId::ROOT, "top");
        let [one, two] = ["one", "two"].map(|name| make(top, name));
        let deep = make(make(one, "below"), "deep");
        let mut slots = [0; 5];
        let mut below = |id, room: usize| {
            let count = groups.slots_below(host, id, &mut slots[..room])?;
            Some(slots[..count].to_vec())
        };
        assert_eq!((below(top, 5), below(top, 4)), (Some(vec![2, 3, 4, 5, 6]), None));
        assert_eq!((below(first, 1), below(first, 0), below(GroupId::ROOT, 5)), (Some(vec![1]), None, None));
        assert_eq!((below(one, 5), below(deep, 5)), (Some(vec![3, 5, 6]), Some(vec![6])));
        groups.delete(host, two).unwrap();
        assert_eq!((below(two, 5), below(top, 5)), (None, Some(vec![2, 3, 5, 6])));
    });
}

#[test]
fn charge_above_high_is_delayed_only_in_that_subtree() {
    with_groups(|groups, host| {
        let [above, beside] = ["above", "beside"].map(|name| groups.create(host, GroupId::ROOT, name).unwrap());
        let below = groups.create(host, above, "below").unwrap();
        groups.set_bound(host, above, Bound::High, 10 * MIB).unwrap();
        let charge =
            |id: GroupId, bytes| groups.charge(host, id.payer(Kind::Pages, 0), bytes, OnLimit::Refuse).unwrap();
        let high = |id| groups.info(host, id).unwrap().events[Event::High as usize];
        assert_eq!((charge(below, 10 * MIB), high(above)), (0, 0));
        let first = charge(below, MIB / 4);
        let second = charge(below, MIB / 4);
        assert!(0 < first && first < second, "{first} {second}");
        assert_eq!((charge(beside, 20 * MIB), high(above), high(below), high(GroupId::ROOT)), (0, 2, 0, 2));
        groups.uncharge(host, below.payer(Kind::Pages, 0), 10 * MIB + MIB / 2);
        groups.uncharge(host, beside.payer(Kind::Pages, 0), 20 * MIB);
    });
}

#[test]
fn deleted_group_calls_offline_with_parent_before_slot_reuse() {
    with_groups(|groups, host| {
        let above = groups.create(host, GroupId::ROOT, "above").unwrap();
        let below = groups.create(host, above, "below").unwrap();
        let target = |id| host.inside(|inside| groups.attach_target(inside, &groups.reading(), id));
        let (parent, child) = (target(above).unwrap(), target(below).unwrap());
        assert_eq!((parent.group, child.group), (above, below));
        assert_eq!(
            (groups.parent_of(child.slot), groups.parent_of(parent.slot)),
            (Some(parent), Some(GroupSlot::ROOT))
        );
        assert!(groups.parent_of(GroupSlot::ROOT.slot).is_none() && !groups.is_leaving(child.slot));
        assert!(
            groups.delete(host, above).is_err() && host.asked.offline.lock().unwrap().is_empty(),
            "it has children"
        );
        groups.delete(host, below).unwrap();
        assert_eq!(*host.asked.offline.lock().unwrap(), [(child, parent, true, Some(parent))]);
        assert!(target(below).is_none_or(|target| target == parent), "nothing is booked under it");
        let moment = groups.moment();
        let reading = groups.reading();
        let has_passed = |moment| host.inside(|inside| groups.has_passed(inside, host.alone.platform, moment));
        assert!((0..4).all(|_| !has_passed(groups.moment())));
        drop(reading);
        assert!((0..8).any(|_| has_passed(moment)));
        assert!(!groups.end_deleted(host));
        let next = groups.create(host, above, "next").unwrap();
        assert_eq!((target(next).unwrap().slot, groups.is_leaving(child.slot)), (child.slot, false));
    });
}
