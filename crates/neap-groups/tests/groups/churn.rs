//! Groups that come and go: tables are as large as the live groups need, however many there were.

use crate::host::{Asked, Host};
use neap_groups::{GroupId, Groups, Kind, OnLimit};
use neap_percpu::{PerCpuData, Shape};
use neap_testing::virtual_platform::Virtual;
use std::collections::VecDeque;

const ALIVE: usize = 64;
const CPUS: usize = 2;

/// No thread ticks. Every fourth group leaves a charge that outlives it for a while.
#[test]
fn tables_do_not_grow_with_the_groups_that_were_deleted() {
    let machine = Virtual::new(4096, CPUS);
    let data = PerCpuData::open(&machine, &Shape { span: 16 << 20, ..Shape::usual(CPUS) }, |_| 0, ()).unwrap();
    let asked = Asked::default();
    let host = Host::new(&machine, &data, &asked);
    let groups = Groups::open(&host).unwrap();
    let (mut alive, mut outliving) = (VecDeque::new(), VecDeque::new());
    let mut before = None;
    for number in 0..11_000 {
        if alive.len() == ALIVE {
            let bytes = groups.bytes(&machine);
            assert_eq!(bytes, *before.get_or_insert(bytes), "after {number} groups");
            let (group, payer) = alive.pop_front().unwrap();
            groups.delete(&host, group).unwrap();
            if number % 4 == 0 {
                outliving.push_back(payer);
            } else {
                groups.uncharge(&host, payer, 1);
            }
            if outliving.len() > 16 {
                groups.uncharge(&host, outliving.pop_front().unwrap(), 1);
            }
        }
        Virtual::run_on(number % CPUS);
        let group = groups.create(&host, GroupId::ROOT, &format!("{number}")).unwrap();
        let payer = group.payer(Kind::ByHand, 0);
        groups.charge(&host, payer, 1, OnLimit::Refuse).unwrap();
        alive.push_back((group, payer));
    }
    alive.iter().map(|&(_, payer)| payer).chain(outliving).for_each(|payer| groups.uncharge(&host, payer, 1));
    alive.iter().for_each(|&(group, _)| groups.delete(&host, group).unwrap());
    // Bytes that were uncharged for deleted groups are stocked for their heir.
    assert_eq!(groups.drain(&host, GroupId::ROOT), 0);
    assert!(!groups.end_deleted(&host), "no thread is on the way through groups");
    let count = groups.count(&host);
    assert_eq!((count.live, count.dying, count.ids), (1, 0, 1));
    groups.verify(&host).unwrap();
}
