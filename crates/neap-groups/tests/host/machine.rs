//! Groups on a virtual machine, whose clock the tests advance.

use core::pin::Pin;
use core::task::{Context, Waker};

use crate::host::{Asked, Host, each_waiting};
use neap_groups::{Bound, ChargeAsync, GroupId, Groups, Kind, Payer};
use neap_percpu::{PerCpuData, Shape};
use neap_testing::virtual_platform::Virtual;

/// Groups, their host, and its clock.
pub(crate) struct Machine<'a> {
    pub(crate) groups: &'a Groups,
    pub(crate) host: Host<'a, Virtual>,
    pub(crate) clock: &'a Virtual,
}

impl<'a> Machine<'a> {
    /// Makes a group with a `max`.
    pub(crate) fn group(&self, parent: GroupId, name: &str, max: u64) -> (GroupId, Payer) {
        let id = self.groups.create(&self.host, parent, name).unwrap();
        self.groups.set_bound(&self.host, id, Bound::Max, max).unwrap();
        (id, id.payer(Kind::ByHand, 0))
    }

    /// Returns a future that was polled, and waits.
    pub(crate) fn wait(&self, payer: Payer, bytes: u64, deadline: u64) -> ChargeAsync<'a, Host<'a, Virtual>> {
        let mut waiter = self.groups.charge_async(self.host, payer, bytes, deadline);
        assert!(Pin::new(&mut waiter).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        waiter
    }

    pub(crate) fn uncharge(&self, payer: Payer, bytes: u64) {
        self.groups.uncharge(&self.host, payer, bytes);
    }
}

/// Runs `test` with groups on a machine that has run for `age` nanoseconds, and then `end`. Between
/// the two the groups are drained, and nothing may be charged, and no charge wait.
pub(crate) fn with_groups_after(age: u64, test: impl FnOnce(&Machine<'_>), end: impl FnOnce(&Machine<'_>)) {
    let clock = Virtual::new(4096, 2);
    clock.advance(age);
    let data = PerCpuData::open(&clock, &Shape { span: 16 << 20, ..Shape::usual(2) }, |_| 0, ()).unwrap();
    let asked = Asked::default();
    let host = Host::new(&clock, &data, &asked);
    let groups = Groups::open(&host).unwrap();
    let machine = Machine { groups: &groups, host, clock: &clock };
    test(&machine);
    groups.drain(&host, GroupId::ROOT);
    groups.verify(&host).unwrap_or_else(|finding| panic!("{finding:?}"));
    assert_eq!(groups.info(&host, GroupId::ROOT).unwrap().charged, 0);
    each_waiting(&groups, &host, |waiting| panic!("{waiting:?}"));
    end(&machine);
}
