//! Readers of the tree take no lock that other threads hold, and a refusal visits few groups.

use crate::host::{Asked, Host};
use core::time::Duration;
use neap_base::gate::Inside;
use neap_groups::{Bound, GroupId, GroupSlot, Groups, Kind, OnLimit, Reclaimer, Refusal};
use neap_percpu::{PerCpuData, Shape, Standalone};
use neap_testing::virtual_platform::Virtual;
use std::sync::mpsc::channel;
use std::thread;

/// A host that lets a second thread read while a deletion holds the tree's mutex.
#[derive(Clone, Copy)]
struct Reads<'a>(Standalone<'a, Virtual>, GroupId);

impl neap_percpu::Host for Reads<'_> {
    type Platform = Virtual;
    type Charge = ();

    fn platform(&self) -> &Virtual {
        self.0.platform
    }

    fn data(&self) -> &PerCpuData {
        self.0.data
    }
}

impl Reclaimer for Reads<'_> {
    fn offline(&self, _: &Inside<'_>, groups: &Groups, child: GroupSlot, parent: GroupSlot) {
        let (done, is_done) = channel();
        thread::scope(|scope| {
            scope.spawn(move || {
                Virtual::run_on(1);
                let full = self.1.payer(Kind::ByHand, 0);
                assert!(matches!(groups.charge(self, full, 1, OnLimit::Refuse), Err(Refusal::Limit(_))));
                assert_eq!(groups.info(self, self.1).unwrap().charged, 1000);
                assert_eq!(groups.usage(self, self.1), Ok(1000));
                assert!(groups.standing(self, 0, GroupId::ROOT).is_some());
                assert!(groups.protection(self, self.1).is_ok());
                assert!(groups.slots_below(self, GroupId::ROOT, &mut [0; 8]).is_some());
                done.send(()).unwrap();
            });
            if is_done.recv_timeout(Duration::from_secs(60)).is_err() {
                eprintln!("a reader waits while {child:?} of {parent:?} is deleted");
                std::process::abort();
            }
        });
    }
}

#[test]
fn group_reads_do_not_block_during_tree_change() {
    let clock = Virtual::new(4096, 2);
    let data = PerCpuData::open(&clock, &Shape { span: 16 << 20, ..Shape::usual(2) }, |_| 0, ()).unwrap();
    let alone = Standalone { data: &data, platform: &clock };
    let groups = Groups::open(&Reads(alone, GroupId::ROOT)).unwrap();
    let host = Reads(Standalone { data: &data, platform: &clock }, GroupId::ROOT);
    let full = groups.create(&host, GroupId::ROOT, "full").unwrap();
    let host = Reads(Standalone { data: &data, platform: &clock }, full);
    groups.set_bound(&host, full, Bound::Max, 1000).unwrap();
    let payer = full.payer(Kind::ByHand, 0);
    groups.charge(&host, payer, 1000, OnLimit::Refuse).unwrap();
    let other = groups.create(&host, GroupId::ROOT, "other").unwrap();
    groups.delete(&host, other).unwrap();
    groups.uncharge(&host, payer, 1000);
}

#[test]
fn a_refusal_looks_at_few_groups_and_finds_the_largest_in_time() {
    const CHILDREN: usize = 1000;
    let clock = Virtual::new(4096, 2);
    let data = PerCpuData::open(&clock, &Shape { span: 256 << 20, ..Shape::usual(2) }, |_| 0, ()).unwrap();
    let asked = Asked::default();
    let host = Host::new(&clock, &data, &asked);
    let groups = Groups::open(&host).unwrap();
    let parent = groups.create(&host, GroupId::ROOT, "crowd").unwrap();
    let children: Vec<GroupId> =
        (0..CHILDREN).map(|at| groups.create(&host, parent, &format!("{at}")).unwrap()).collect();
    // The oldest children are found last.
    let holds = |at: usize| if at < 3 { 1000 - 100 * at as u64 } else { 1 };
    for (at, child) in children.iter().enumerate() {
        groups.charge(&host, child.payer(Kind::ByHand, 0), holds(at), OnLimit::Refuse).unwrap();
    }
    groups.charge(&host, parent.payer(Kind::ByHand, 0), 850, OnLimit::Refuse).unwrap();
    groups.drain(&host, parent);
    let usage = groups.usage(&host, parent).unwrap();
    groups.set_bound(&host, parent, Bound::Max, usage).unwrap();
    let mut last = [None; 3];
    for _ in 0..CHILDREN / 64 + 2 {
        let before = groups.summed();
        let Err(Refusal::Limit(limit)) = groups.charge(&host, children[500].payer(Kind::ByHand, 0), 1, OnLimit::Refuse)
        else {
            panic!("it is not refused")
        };
        assert!(groups.summed() - before <= 64, "a refusal looks at {}", groups.summed() - before);
        assert!(limit.holders.contains(&Some((parent, 850))), "{limit:?}");
        last = limit.holders;
    }
    assert_eq!(last, [Some((children[0], 1000)), Some((children[1], 900)), Some((parent, 850))]);
    // A deleted group is named no more.
    groups.uncharge(&host, children[0].payer(Kind::ByHand, 0), 1000);
    groups.drain(&host, parent);
    groups.delete(&host, children[0]).unwrap();
    groups.set_bound(&host, parent, Bound::Max, 0).unwrap();
    let Err(Refusal::Limit(limit)) = groups.charge(&host, children[500].payer(Kind::ByHand, 0), 1, OnLimit::Refuse)
    else {
        panic!("it is not refused")
    };
    assert_eq!(limit.holders[0], Some((children[1], 900)), "{limit:?}");
}
