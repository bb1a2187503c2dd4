//! Per-CPU data with a payer: charged with all copies, uncharged wherever it is freed, refused at a
//! limit.
//!
//! Method: managers of their own on the real system, verified after every step: charges equal
//! allocations.

use crate::program::{OPTIONS, Opened, linux};
use neap::groups::Kind;
use neap_base::Platform;
use neap_groups::{BATCH, Bound, Event, GroupError, GroupId};
use neap_percpu::{Host, Owner, PerCpuCounter, Refused, Wait};
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;

#[test]
fn all_copies_are_charged_until_they_are_freed() {
    for rseq in [true, false] {
        let (linux, options) = linux(rseq);
        let mm = Opened::new(linux, &options).unwrap();
        let groups = mm.groups().unwrap();
        let source = mm.per_cpu(Wait::Long).unwrap();
        let cpus = source.data().cpus() as u64;
        let (above, other) =
            (groups.create(GroupId::ROOT, "above").unwrap(), groups.create(GroupId::ROOT, "o").unwrap());
        let group = groups.create(above, "paying").unwrap();
        let owner = groups.open_owner(group).unwrap();
        let nobodys = source.open_owner().unwrap();
        let allocate = |owner, size| source.allocate(owner, size, 8, Wait::Long).unwrap();
        let (mut handles, mut bytes) = (Vec::new(), 0);
        for size in [1, 8, 64, 100, 4096, 32_768] {
            handles.push(allocate(owner, size));
            allocate(nobodys, size);
            allocate(Owner::NONE, size);
            bytes += size.next_multiple_of(8) as u64 * cpus;
            assert_eq!((groups.used(group), groups.used(above), groups.used(other)), (Ok(bytes), Ok(bytes), Ok(0)));
            mm.verify(0).unwrap();
        }
        let seen = mm.reconcile().unwrap();
        assert_eq!((seen.charged(Kind::PerCpu), seen.payable(Kind::PerCpu)), (bytes, Some(bytes)), "{seen}");
        let counter = PerCpuCounter::new(source, owner, 64, Wait::Long).unwrap();
        assert!(groups.used(group).unwrap() >= bytes + 8 * cpus);
        // Freed by other threads, and with their owner.
        std::thread::scope(|scope| {
            scope.spawn(|| drop(counter));
            // SAFETY: no thread uses the allocations, and each is freed once.
            handles.drain(..3).for_each(|handle| _ = scope.spawn(move || unsafe { source.free(handle) }.unwrap()));
        });
        bytes -= (8 + 8 + 64) * cpus;
        assert_eq!(groups.used(group), Ok(bytes));
        // SAFETY: no thread uses the owner's data.
        assert_eq!(unsafe { source.close_owner(owner) }, Ok(bytes as usize));
        assert_eq!((groups.used(group), groups.used(GroupId::ROOT)), (Ok(0), Ok(0)));
        mm.verify(0).unwrap();
    }
}

#[test]
fn a_limit_refuses_and_leaves_nothing_behind() {
    let (linux, options) = linux(true);
    let mm = Opened::new(linux, &options).unwrap();
    let groups = mm.groups().unwrap();
    let source = mm.per_cpu(Wait::Long).unwrap();
    let price = 4096 * source.data().cpus() as u64;
    let group = groups.create(GroupId::ROOT, "bounded").unwrap();
    let owner = groups.open_owner(group).unwrap();
    groups.set_bound(group, Bound::Max, 3 * price).unwrap();
    let handles: Vec<_> = (0..3).map(|_| source.allocate(owner, 4096, 64, Wait::Long).unwrap()).collect();
    for wait in [Wait::Long, Wait::Never, Wait::Until(source.platform().now() + 1_000_000_000)] {
        assert_eq!(source.allocate(owner, 8, 8, wait), Err(Refused::Charge));
    }
    // SAFETY: no thread uses the allocation.
    unsafe { source.free(handles[0]) }.unwrap();
    // The stock of the CPU that the charge was made on.
    groups.drain(group);
    source.allocate(owner, 4096, 64, Wait::Never).unwrap();
    // An allocation that fails for another reason is not charged.
    groups.set_bound(group, Bound::Max, 100 * price).unwrap();
    for (size, align) in [(1 << 20, 8), (0, 8), (8, 3)] {
        assert_eq!(source.allocate(owner, size, align, Wait::Long), Err(Refused::BadRequest));
    }
    assert_eq!(groups.used(group), Ok(3 * price));
    mm.verify(0).unwrap();
    // SAFETY: no thread uses the owner's data.
    unsafe { source.close_owner(owner) }.unwrap();
    assert_eq!(groups.used(group), Ok(0));
}

/// A caller that does not wait is refused at a limit, though a fence would find room on another
/// CPU, or in a cache.
#[test]
fn non_waiting_percpu_allocation_does_not_fence_or_flush() {
    let machine = Shared::new(Virtual::new(4096, 16));
    let mm = Opened::new(machine, &OPTIONS).unwrap();
    let groups = mm.groups().unwrap();
    let source = mm.per_cpu(Wait::Long).unwrap();
    let group = groups.create(GroupId::ROOT, "bounded").unwrap();
    let owner = groups.open_owner(group).unwrap();
    groups.set_bound(group, Bound::Max, BATCH + 1000).unwrap();
    // There are populated pages: an allocation without an owner succeeds.
    let nobodys = source.allocate(Owner::NONE, 4096, 8, Wait::Never).unwrap();
    Virtual::run_on(3);
    let object = mm.enter(Some(group));
    let block = mm.allocate(1000);
    mm.leave(object);
    // SAFETY: the block is this test's.
    unsafe { mm.free(block) };
    let charged = || groups.info(group).unwrap().charged;
    let before = charged();
    assert!(before >= BATCH && groups.used(group) == Ok(0));
    Virtual::run_on(5);
    assert_eq!(source.allocate(owner, 4096, 8, Wait::Never), Err(Refused::Charge));
    let events = groups.info(group).unwrap().events;
    assert_eq!((charged(), events[Event::Max as usize], events[Event::Refused as usize]), (before, 0, 1));
    // The rest of the limit can be allocated, exactly.
    let few = source.allocate(owner, 8, 8, Wait::Never).unwrap();
    assert_eq!(charged(), before + 8 * 16);
    // A caller that can wait gets it.
    let many = source.allocate(owner, 4096, 8, Wait::Until(source.platform().now())).unwrap();
    assert_eq!(groups.used(group), Ok((4096 + 8) * 16));
    // SAFETY: no thread uses the allocations, and each is freed once.
    [few, many, nobodys].into_iter().for_each(|handle| _ = unsafe { source.free(handle) }.unwrap());
    // An allocation that is refused for its arguments is not charged.
    assert_eq!(source.allocate(owner, 8, 3, Wait::Never), Err(Refused::BadRequest));
    assert_eq!(groups.used(group), Ok(0));
    mm.verify(0).unwrap();
}

#[test]
fn percpu_charges_of_deleted_group_pass_to_heir_until_close() {
    let (linux, options) = linux(true);
    let mm = Opened::new(linux, &options).unwrap();
    let groups = mm.groups().unwrap();
    let source = mm.per_cpu(Wait::Long).unwrap();
    let cpus = source.data().cpus() as u64;
    let heir = groups.create(GroupId::ROOT, "heir").unwrap();
    let before = source.statistics().populated;
    let owners: Vec<_> = (0..64)
        .map(|n| {
            let group = groups.create(heir, &n.to_string()).unwrap();
            let owner = groups.open_owner(group).unwrap();
            (0..40).for_each(|_| _ = source.allocate(owner, 1000, 8, Wait::Long).unwrap());
            (group, owner)
        })
        .collect();
    let full = source.statistics().populated;
    for &(group, _) in &owners {
        groups.delete(group).unwrap();
    }
    assert_eq!(groups.used(heir), Ok(64 * 40 * 1000 * cpus));
    let &(gone, owner) = &owners[0];
    assert_eq!(source.allocate(owner, 8, 8, Wait::Long), Err(Refused::Charge));
    assert_eq!(groups.open_owner(gone), Err(GroupError::NoSuchGroup));
    mm.verify(0).unwrap();
    // SAFETY: no thread uses the data of the owners.
    owners.iter().for_each(|&(_, owner)| _ = unsafe { source.close_owner(owner) }.unwrap());
    assert_eq!(groups.used(heir), Ok(0));
    (0..4).for_each(|tick| _ = mm.tick(tick));
    let left = source.statistics().populated;
    assert!(full - before >= 64 * 40 * 1000 / 4096 && left - before <= (full - before) / 8, "{before} {full} {left}");
    mm.verify(0).unwrap();
}
