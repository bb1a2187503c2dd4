//! Bugs of memory groups elsewhere that concern stocks: L14, L19, L20 of the list. Tests of other
//! bugs are beside the code that they concern.
//!
//! Method: a virtual machine of two CPUs, the second isolated, so that words are read and written
//! there without sequences and fences.

use crate::host::{Asked, Host};
use core::pin::Pin;
use core::task::{Context, Waker};
use neap_groups::{Bound, Event, GroupId, Groups, Kind, OnLimit, Payer};
use neap_os::topology::CpuSet;
use neap_percpu::{PerCpuData, Shape};
use neap_testing::virtual_platform::Virtual;
use std::thread;

const KIB: u64 = 1 << 10;
/// Maximum of one payer's stock on one CPU.
const STOCK: u64 = neap_groups::CAP;

fn with_groups(test: impl FnOnce(&Groups, Host<'_, Virtual>)) {
    let machine = Virtual::new(4096, 2).with_isolated(CpuSet::parse(b"1").unwrap());
    let data = PerCpuData::open(&machine, &Shape { span: 16 << 20, ..Shape::usual(2) }, |_| 0, ()).unwrap();
    let asked = Asked::default();
    let host = Host::new(&machine, &data, &asked);
    let groups = Groups::open(&host).unwrap();
    Virtual::run_on(0);
    test(&groups, host);
    Virtual::run_on(0);
    groups.drain(&host, GroupId::ROOT);
    groups.verify(&host).unwrap_or_else(|finding| panic!("{finding:?}"));
    assert_eq!(groups.info(&host, GroupId::ROOT).unwrap().charged, 0);
    // SAFETY: no thread uses them any more.
    unsafe { groups.close(&host) };
}

/// Leaves a full stock of a payer on the isolated CPU: charged and unused.
fn leave_a_stock(groups: &Groups, host: &Host<'_, Virtual>, payer: Payer) {
    Virtual::run_on(1);
    assert_eq!(groups.charge(host, payer, STOCK / 2, OnLimit::Refuse), Ok(0));
    groups.uncharge(host, payer, STOCK / 2);
    Virtual::run_on(0);
    let (charged, used) = (groups.info(host, payer.id()).unwrap().charged, groups.used(host, payer.id()).unwrap());
    assert!(charged >= STOCK / 2 && used == 0, "{charged} charged, {used} used: there is no stock");
}

#[test]
fn l14_stock_flush_reads_word_once() {
    with_groups(|groups, host| {
        // So many payers that some share a word, which belongs to one and then to another.
        let payers: Vec<Payer> = (0..32)
            .map(|n| groups.create(&host, GroupId::ROOT, &format!("g{n}")).unwrap().payer(Kind::ByHand, 0))
            .collect();
        thread::scope(|scope| {
            let charges = scope.spawn(|| {
                Virtual::run_on(1);
                for round in 0..4_000_000 {
                    let payer = payers[round * 7 % payers.len()];
                    let bytes = (round as u64 % 61 + 1) * 64;
                    assert_eq!(groups.charge(&host, payer, bytes, OnLimit::Refuse), Ok(0));
                    groups.uncharge(&host, payer, bytes);
                }
            });
            while !charges.is_finished() {
                payers.iter().for_each(|payer| _ = groups.drain(&host, payer.id()));
            }
        });
        for payer in payers {
            groups.drain(&host, payer.id());
            assert_eq!(
                groups.info(&host, payer.id()).unwrap().charged,
                0,
                "bytes of one group were charged to another"
            );
        }
    });
}

#[test]
fn l19_charge_or_wait_takes_room_from_isolated_cpu_stock() {
    with_groups(|groups, host| {
        let id = groups.create(&host, GroupId::ROOT, "full").unwrap();
        let payer = id.payer(Kind::ByHand, 0);
        // A charge that is refused or not.
        groups.set_bound(&host, id, Bound::Max, STOCK).unwrap();
        leave_a_stock(groups, &host, payer);
        assert_eq!(groups.charge(&host, payer, STOCK, OnLimit::Refuse), Ok(0));
        groups.uncharge(&host, payer, STOCK);
        // A charge that waits for room.
        groups.drain(&host, id);
        leave_a_stock(groups, &host, payer);
        let mut waiter = groups.charge_async(host, payer, STOCK, u64::MAX);
        let polled = Pin::new(&mut waiter).poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_ready(), "there is room");
        drop(waiter);
        groups.uncharge(&host, payer, STOCK);
        assert_eq!(groups.info(&host, id).unwrap().events[Event::Refused as usize], 0);
    });
}

#[test]
fn l20_stock_belongs_to_one_group_and_drains_on_isolated_cpu() {
    with_groups(|groups, host| {
        let parent = groups.create(&host, GroupId::ROOT, "parent").unwrap();
        groups.set_bound(&host, parent, Bound::Max, STOCK).unwrap();
        for round in 0..100 {
            let child = groups.create(&host, parent, "child").unwrap();
            leave_a_stock(groups, &host, child.payer(Kind::ByHand, 0));
            groups.delete(&host, child).unwrap();
            // The stock of a deleted group is no other group's, not even of one with its name, or
            // its slot.
            let next = groups.create(&host, parent, "child").unwrap();
            let payer = next.payer(Kind::ByHand, 0);
            Virtual::run_on(1);
            assert!(!groups.take(host.alone.platform, payer, 64), "round {round}: the stock of a group that is gone");
            Virtual::run_on(0);
            // The stock takes no room below the parent's limit.
            assert_eq!(groups.charge(&host, payer, STOCK, OnLimit::Refuse), Ok(0), "round {round}");
            groups.uncharge(&host, payer, STOCK);
            groups.delete(&host, next).unwrap();
            while groups.end_deleted(&host) {}
        }
        assert_eq!(groups.used(&host, parent), Ok(0));
        groups.drain(&host, parent);
        assert_eq!(groups.info(&host, parent).unwrap().charged, 0);
        assert!(groups.info(&host, GroupId::ROOT).unwrap().charged < 4 * KIB);
    });
}
