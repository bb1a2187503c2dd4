//! Charges against deletions against drains, in every interleaving of steps that take a mutex or
//! pass through ids and slots, by loom. Empty unless built with `--cfg loom` (`cargo xtask loom`).
//!
//! Counters and stocks are single atomic operations in mapped memory, which loom does not know. The
//! host of these groups therefore has a number that loom knows, and adds to it on each of its
//! calls. Other threads may run there, where a mutex is taken, and where a reader enters or leaves.
//! Sequences against drains are explored by `rseq_explorer/alter.rs`.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use loom::thread;
use neap_base::sync::Ordering::Relaxed;
use neap_groups::{CAP, GroupError, GroupId, Groups, Kind, OnLimit, Reclaimer, Refusal};
use neap_percpu::{PerCpuData, Shape};
use neap_testing::virtual_platform::Virtual;

struct World {
    machine: Virtual,
    data: PerCpuData,
    /// Point at which other threads may run.
    step: AtomicUsize,
    groups: Option<Groups>,
}

#[derive(Clone, Copy)]
struct Host<'w>(&'w World);

impl neap_percpu::Host for Host<'_> {
    type Platform = Virtual;
    type Charge = ();

    fn platform(&self) -> &Virtual {
        self.0.step.fetch_add(1, Relaxed);
        &self.0.machine
    }

    fn data(&self) -> &PerCpuData {
        self.0.step.fetch_add(1, Relaxed);
        &self.0.data
    }
}

impl Reclaimer for Host<'_> {}

impl World {
    fn open() -> World {
        let machine = Virtual::new(4096, 1);
        let data = PerCpuData::open(&machine, &Shape { span: 1 << 20, ..Shape::usual(1) }, |_| 0, ()).unwrap();
        let mut world = World { machine, data, step: AtomicUsize::new(0), groups: None };
        world.groups = Some(Groups::open(&world.host()).unwrap());
        world
    }

    fn host(&self) -> Host<'_> {
        Host(self)
    }

    fn with<R>(&self, body: impl FnOnce(&Groups, &Host<'_>) -> R) -> R {
        body(self.groups.as_ref().unwrap(), &self.host())
    }

    /// Makes a group below another.
    fn group(&self, above: GroupId, name: &str) -> GroupId {
        self.with(|groups, host| groups.create(host, above, name).unwrap())
    }

    /// Charges bytes for a moment; returns false if the group is gone.
    fn charge_for_a_moment(&self, group: GroupId, bytes: u64) -> bool {
        self.with(|groups, host| {
            let payer = group.payer(Kind::ByHand, 0);
            match groups.charge(host, payer, bytes, OnLimit::Refuse) {
                Ok(_) => {
                    groups.uncharge(host, payer, bytes);
                    true
                }
                Err(refusal) => {
                    assert_eq!(refusal, Refusal::Gone, "there are no limits");
                    false
                }
            }
        })
    }

    /// Checks that nothing of deleted groups is left in the end, and that no group is charged.
    fn is_clean(&self, alive: u32) {
        self.with(|groups, host| {
            while groups.tick(host).is_some() {}
            assert_eq!(groups.drain(host, GroupId::ROOT), 0);
            while groups.tick(host).is_some() {}
            let (count, root) = (groups.count(host), groups.info(host, GroupId::ROOT).unwrap());
            assert_eq!((count.live, count.dying, count.ids, root.charged), (alive, 0, alive, 0));
            groups.verify(host).unwrap_or_else(|finding| panic!("{finding:?}"));
        });
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // SAFETY: this is the last reference.
        unsafe {
            if let Some(groups) = self.groups.take() {
                groups.close(&self.host());
            }
            self.data.close(&self.machine);
        }
    }
}

/// Explores every interleaving. Making a tree of groups takes more steps than loom expects of a
/// whole test.
fn model(body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.max_branches = 20_000;
    model.check(body);
}

#[test]
fn a_charge_a_deletion_and_a_drain() {
    model(|| {
        let world = Arc::new(World::open());
        let above = world.group(GroupId::ROOT, "above");
        let group = world.group(above, "group");
        let threads = [
            {
                let world = world.clone();
                thread::spawn(move || _ = world.charge_for_a_moment(group, 1))
            },
            {
                let world = world.clone();
                thread::spawn(move || _ = world.with(|groups, host| groups.drain(host, above)))
            },
        ];
        world.with(|groups, host| groups.delete(host, group).unwrap());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        // It is deleted, but for stocked bytes.
        world.charge_for_a_moment(group, 1);
        world.is_clean(2);
        assert!(!world.charge_for_a_moment(group, 1), "nothing is stocked any more");
    });
}

/// The slot and the id of a deleted group are reused as soon as no reader can be on its way through
/// them.
#[test]
fn a_charge_and_a_group_in_the_place_of_a_deleted_one() {
    model(|| {
        let world = Arc::new(World::open());
        let group = world.group(GroupId::ROOT, "one");
        let payer = group.payer(Kind::ByHand, 0);
        world.with(|groups, host| groups.charge(host, payer, 5, OnLimit::Refuse).unwrap());
        let other = {
            let world = world.clone();
            thread::spawn(move || {
                // More than a stock can have: from the counters.
                world.charge_for_a_moment(group, CAP + 1);
                // Of a group that may be gone by now.
                world.with(|groups, host| groups.uncharge(host, payer, 5));
            })
        };
        let next = world.with(|groups, host| {
            groups.delete(host, group).unwrap();
            (0..3).for_each(|_| _ = groups.tick(host));
            let next = groups.create(host, GroupId::ROOT, "two").unwrap();
            groups.charge(host, next.payer(Kind::ByHand, 0), 7, OnLimit::Refuse).unwrap();
            next
        });
        other.join().unwrap();
        world.with(|groups, host| {
            assert_eq!((groups.used(host, next), groups.used(host, GroupId::ROOT)), (Ok(7), Ok(7)));
            assert_eq!(groups.info(host, group).err(), Some(GroupError::NoSuchGroup));
            let info = groups.info(host, next).unwrap();
            assert_eq!(info.kinds[Kind::ByHand as usize], info.charged, "counted in the place of the one before");
            groups.uncharge(host, next.payer(Kind::ByHand, 0), 7);
            groups.delete(host, next).unwrap();
        });
        world.is_clean(1);
    });
}
