//! Time stalled on memory: which groups count it, and that stalls that overlap count once.

use crate::host::Host;
use crate::host::machine::{Machine, with_groups_after};
use core::future::Future;
use core::pin::Pin;
use core::sync::atomic::Ordering::Relaxed;
use core::task::{Context, Waker};
use neap_base::Platform;
use neap_groups::{Bound, ChargeAsync, FOREVER, GroupId, Kind, OnLimit};
use neap_testing::virtual_platform::Virtual;

const MILLISECOND: u64 = 1_000_000;

/// Runs `test` with groups. At the end no stall may run.
fn with_groups(test: impl FnOnce(&Machine<'_>)) {
    with_groups_after(0, test, |Machine { groups, host, clock }| {
        let stalled = || groups.info(host, GroupId::ROOT).unwrap().stalled_us;
        let before = stalled();
        clock.sleep(MILLISECOND);
        assert_eq!(stalled(), before);
    });
}

impl<'a> Machine<'a> {
    fn fill(&self, id: GroupId) {
        self.groups.charge(&self.host, id.payer(Kind::ByHand, 0), 1000, OnLimit::Refuse).unwrap();
    }

    fn empty(&self, id: GroupId) {
        self.groups.uncharge(&self.host, id.payer(Kind::ByHand, 0), 1000);
        self.groups.drain(&self.host, id);
    }

    /// Returns a future that waits for room in a full group.
    fn wait_in(&self, id: GroupId) -> ChargeAsync<'a, Host<'a, Virtual>> {
        self.wait(id.payer(Kind::ByHand, 0), 10, FOREVER)
    }

    fn pass(&self, milliseconds: u64) {
        self.clock.sleep(milliseconds * MILLISECOND);
    }

    /// Milliseconds in which groups were stalled.
    fn stalled<const N: usize>(&self, ids: [GroupId; N]) -> [u64; N] {
        ids.map(|id| self.groups.info(&self.host, id).unwrap().stalled_us / 1000)
    }
}

fn poll<H: neap_groups::Reclaimer>(future: &mut ChargeAsync<'_, H>) -> Option<u64> {
    match Pin::new(future).poll(&mut Context::from_waker(Waker::noop())) {
        core::task::Poll::Ready(answer) => Some(answer.unwrap()),
        core::task::Poll::Pending => None,
    }
}

#[test]
fn stalls_that_overlap_count_once_in_each_group_above() {
    with_groups(|m| {
        let top = m.groups.create(&m.host, GroupId::ROOT, "top").unwrap();
        let [a, b] = ["a", "b"].map(|name| m.group(top, name, 1000).0);
        [a, b].iter().for_each(|&id| m.fill(id));
        let first = m.wait_in(a);
        m.pass(10);
        assert_eq!(m.stalled([a, b, top, GroupId::ROOT]), [10, 0, 10, 10], "also while it goes on");
        let second = m.wait_in(a);
        let third = m.wait_in(b);
        m.pass(10);
        drop(first);
        m.pass(10);
        assert_eq!(m.stalled([a, b, top, GroupId::ROOT]), [30, 20, 30, 30]);
        drop(second);
        m.pass(10);
        drop(third);
        m.pass(10);
        assert_eq!(m.stalled([a, b, top, GroupId::ROOT]), [30, 30, 40, 40]);
        let fourth = m.wait_in(b);
        m.pass(5);
        drop(fourth);
        assert_eq!(m.stalled([a, b, top, GroupId::ROOT]), [30, 35, 45, 45]);
        [a, b].iter().for_each(|&id| m.empty(id));
    });
}

#[test]
fn a_granted_future_is_stalled_no_more_before_it_is_polled() {
    with_groups(|m| {
        let id = m.group(GroupId::ROOT, "g", 1000).0;
        m.fill(id);
        let mut future = m.wait_in(id);
        m.pass(10);
        m.empty(id);
        m.pass(10);
        assert_eq!(m.stalled([id]), [10]);
        assert_eq!(poll(&mut future), Some(0));
        m.groups.uncharge(&m.host, id.payer(Kind::ByHand, 0), 10);
        assert_eq!(m.stalled([id]), [10]);
    });
}

#[test]
fn reclaim_within_a_charge_and_delays_above_high_are_stalls() {
    with_groups(|m| {
        let [full, high] = ["full", "high"].map(|name| m.group(GroupId::ROOT, name, 1000).0);
        m.fill(full);
        m.host.asked.reclaim_takes.store(7 * MILLISECOND, Relaxed);
        m.groups.charge(&m.host, full.payer(Kind::ByHand, 0), 10, OnLimit::Refuse).unwrap_err();
        assert_eq!(m.stalled([full, high, GroupId::ROOT]), [7, 0, 7]);
        m.empty(full);
        // A future is delayed here, a thread by the caller of `charge`.
        m.groups.set_bound(&m.host, high, Bound::Max, u64::MAX).unwrap();
        m.groups.set_bound(&m.host, high, Bound::High, 1).unwrap();
        let mut future = m.groups.charge_async(m.host, high.payer(Kind::ByHand, 0), 1 << 20, FOREVER);
        assert!(poll(&mut future).is_none());
        m.pass(10);
        assert_eq!(m.stalled([full, high, GroupId::ROOT]), [7, 10, 17]);
        m.groups.stalled(&m.host, full.payer(Kind::ByHand, 0), || m.pass(3));
        assert_eq!(m.stalled([full, high, GroupId::ROOT]), [10, 13, 20]);
        drop(future);
    });
}

#[test]
fn deleting_a_group_ends_its_stalls() {
    with_groups(|m| {
        let top = m.groups.create(&m.host, GroupId::ROOT, "top").unwrap();
        let leaf = m.group(top, "leaf", 1000).0;
        m.fill(leaf);
        let future = m.wait_in(leaf);
        m.groups.stalled(&m.host, leaf.payer(Kind::ByHand, 0), || {
            m.pass(10);
            m.groups.delete(&m.host, leaf).unwrap();
            m.pass(10);
            assert_eq!(m.stalled([top, GroupId::ROOT]), [10, 10]);
            m.empty(leaf);
            // Neither the slot nor the id is in use any more when the stall ends.
            while m.groups.end_deleted(&m.host) {}
            let next = m.group(top, "next", 1000).0;
            assert_eq!(m.stalled([next]), [0]);
            m.groups.stalled(&m.host, next.payer(Kind::ByHand, 0), || m.pass(1));
            assert_eq!(m.stalled([next, top]), [1, 11]);
        });
        drop(future);
        m.pass(10);
        assert_eq!(m.stalled([top, GroupId::ROOT]), [11, 11]);
    });
}

#[test]
fn a_forked_child_has_no_stalls_of_other_threads() {
    with_groups(|m| {
        let id = m.group(GroupId::ROOT, "g", 1000).0;
        m.fill(id);
        let future = m.wait_in(id);
        m.groups.stalled(&m.host, id.payer(Kind::ByHand, 0), || {
            m.pass(10);
            // SAFETY: this thread is the only user of the groups, as in a child.
            unsafe { m.groups.forget_others(&m.host) };
            m.pass(10);
            assert_eq!(m.stalled([id, GroupId::ROOT]), [10, 10]);
            m.groups.stalled(&m.host, id.payer(Kind::ByHand, 0), || m.pass(1));
        });
        drop(future);
        assert_eq!(m.stalled([id, GroupId::ROOT]), [11, 11]);
        m.empty(id);
    });
}
