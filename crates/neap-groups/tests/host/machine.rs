//! Groups on a virtual machine, whose clock the tests advance.

use crate::host::{Asked, Host, each_waiting};
use neap_groups::{GroupId, Groups};
use neap_percpu::{PerCpuData, Shape};
use neap_testing::virtual_platform::Virtual;

/// Groups, their host, and its clock.
pub(crate) struct Machine<'a> {
    pub(crate) groups: &'a Groups,
    pub(crate) host: Host<'a, Virtual>,
    pub(crate) clock: &'a Virtual,
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
