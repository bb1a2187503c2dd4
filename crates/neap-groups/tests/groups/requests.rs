//! Requests for memory: which groups ask, how often, and when that ends.
//!
//! Method: groups on a virtual machine with a clock that the tests advance. The test is the server,
//! and frees as it likes.

use crate::host::machine::{Machine, with_groups_after};
use crate::host::{Host, each_waiting};
use core::future::Future;
use core::pin::Pin;
use core::sync::atomic::Ordering::Relaxed;
use core::task::{Context, Poll, Waker};
use neap_base::Platform;
use neap_groups::{
    Bound, ChargeAsync, Due, Event, FOREVER, GroupError, GroupId, Kind, OnLimit, Payer, Reason, Refusal, Request,
    TICK_INTERVAL_NS,
};
use neap_percpu::Host as _;
use neap_testing::virtual_platform::Virtual;

const MILLI: u64 = 1_000_000;

fn with_groups(test: impl FnOnce(&Machine<'_>)) {
    with_groups_after(3_600_000 * MILLI, test, |machine| {
        assert_eq!(machine.due(), Due::Nothing, "what no group needs is asked for");
    });
}

impl Machine<'_> {
    /// Makes a group that is charged for all of its limit.
    fn full(&self, name: &str, max: u64) -> (GroupId, Payer) {
        let (id, payer) = self.group(GroupId::ROOT, name, max);
        assert_eq!(self.groups.charge(&self.host, payer, max, OnLimit::Refuse), Ok(0));
        (id, payer)
    }

    fn due(&self) -> Due {
        self.groups.look_for_request(&self.host)
    }

    fn take(&self, server: u32) -> Request {
        match self.groups.take_request(&self.host, server) {
            Due::Now(request) => request,
            due => panic!("{due:?}"),
        }
    }

    /// Serves each request that is due, in vain. Returns how long the group rests then.
    fn serve_in_vain(&self) -> u64 {
        let request = self.take(1);
        self.groups.served(&self.host, &request, 1);
        match self.due() {
            Due::In(rest) => rest,
            due => panic!("{due:?}"),
        }
    }
}

fn poll(waiter: &mut ChargeAsync<'_, Host<'_, Virtual>>) -> Poll<Result<u64, Refusal>> {
    Pin::new(waiter).poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn a_waiting_charge_asks_again_after_rests_that_are_bounded() {
    with_groups(|m| {
        let (id, payer) = m.full("g", 1000);
        let waiter = m.wait(payer, 100, FOREVER);
        assert_eq!(m.take(1).bytes, 100);
        m.host.inside(|inside| m.groups.leave_request(inside, 1));
        let mut rests = Vec::new();
        for pass in 0..12 {
            assert!(matches!(m.due(), Due::Now(request) if request.vain == pass.min(8)));
            rests.push(m.serve_in_vain() / MILLI);
            m.clock.advance(rests[rests.len() - 1] * MILLI);
        }
        assert_eq!(rests, [1, 2, 4, 8, 16, 32, 64, 128, 250, 250, 250, 250]);
        let mut waits = Vec::new();
        each_waiting(m.groups, &m.host, |waiting| waits.push((waiting.at, waiting.reason, waiting.deadline)));
        assert_eq!(waits, [(id, Reason::Backoff, FOREVER)]);
        // Some of it is freed: the next pass is made at once.
        let request = m.take(1);
        let other = m.wait(payer, 300, FOREVER);
        m.uncharge(payer, 50);
        assert_eq!(m.groups.needs(&m.host, &request), 350);
        drop(other);
        m.groups.served(&m.host, &request, 1);
        assert!(matches!(m.due(), Due::Now(next) if next.group == id && next.bytes == 50));
        // No charge waits any more: no pass is made.
        drop(waiter);
        assert_eq!(m.due(), Due::Nothing);
        m.uncharge(payer, 950);
    });
}

#[test]
fn another_charge_that_comes_is_not_made_to_rest_for_long() {
    with_groups(|m| {
        let (_, payer) = m.full("g", 1000);
        let first = m.wait(payer, 100, FOREVER);
        for _ in 0..12 {
            let rest = m.serve_in_vain();
            m.clock.advance(rest);
        }
        assert_eq!(m.serve_in_vain(), TICK_INTERVAL_NS);
        m.clock.advance(3 * MILLI);
        let second = m.wait(payer, 100, FOREVER);
        assert_eq!(m.due(), Due::In(5 * MILLI));
        m.clock.advance(5 * MILLI);
        assert_eq!(m.serve_in_vain(), 16 * MILLI);
        drop((first, second));
        m.uncharge(payer, 1000);
    });
}

/// The job queue that threads share has sixteen places; a group has its own.
#[test]
fn however_many_groups_ask_each_is_served() {
    const GROUPS: usize = 300;
    with_groups(|m| {
        let full: Vec<_> = (0..GROUPS).map(|at| m.full(&format!("g{at}"), 1000)).collect();
        let waiters: Vec<_> = full.iter().map(|&(_, payer)| m.wait(payer, 100, FOREVER)).collect();
        let mut served: Vec<GroupId> = (1..=GROUPS as u32).map(|server| m.take(server).group).collect();
        assert_eq!(m.due(), Due::Nothing, "all are being served");
        served.sort_unstable_by_key(|id| id.to_bits());
        assert!(served.iter().eq(full.iter().map(|(id, _)| id)));
        // One of the servers does not return.
        m.host.inside(|inside| m.groups.leave_request(inside, 7));
        let again = m.take(1000);
        m.groups.served(&m.host, &again, 7);
        assert_eq!(m.due(), Due::Nothing, "it is not the late one's to report");
        drop(waiters);
        full.iter().for_each(|&(_, payer)| m.uncharge(payer, 1000));
    });
}

#[test]
fn a_limit_below_usage_asks_by_itself_until_usage_is_below_it() {
    for bound in [Bound::Max, Bound::High] {
        with_groups(|m| {
            let (id, payer) = m.full("g", 1000);
            let asked = m.host.asked.ask.load(Relaxed);
            m.groups.set_bound(&m.host, id, bound, 400).unwrap();
            assert_eq!(m.host.asked.ask.load(Relaxed) - asked, 1);
            let request = m.take(1);
            assert_eq!((request.group, request.bytes), (id, 600), "the whole excess");
            m.uncharge(payer, 500);
            m.groups.drain(&m.host, id);
            assert_eq!(m.groups.needs(&m.host, &request), 100);
            m.groups.served(&m.host, &request, 1);
            let request = m.take(1);
            assert_eq!(request.bytes, 100, "at once, since that brought something");
            m.uncharge(payer, 100);
            m.groups.drain(&m.host, id);
            assert_eq!(m.groups.needs(&m.host, &request), 0);
            m.groups.served(&m.host, &request, 1);
            assert_eq!(m.due(), Due::Nothing);
            m.uncharge(payer, 400);
        });
    }
}

/// Rests are longer where no charge waits, but do not end.
#[test]
fn a_limit_below_usage_is_asked_for_as_long_as_it_takes() {
    with_groups(|m| {
        let (id, payer) = m.full("g", 1000);
        m.groups.set_bound(&m.host, id, Bound::Max, 400).unwrap();
        for _ in 0..40 {
            let rest = m.serve_in_vain();
            assert!(rest <= 16 * TICK_INTERVAL_NS);
            m.clock.advance(rest);
        }
        assert_eq!(m.serve_in_vain(), 16 * TICK_INTERVAL_NS);
        // Another limit is a reason to look at once.
        m.groups.set_bound(&m.host, id, Bound::Max, 300).unwrap();
        assert_eq!(m.take(1).bytes, 700);
        m.uncharge(payer, 1000);
    });
}

#[test]
fn what_waits_beyond_its_deadline_asks_for_nothing() {
    with_groups(|m| {
        let (_, payer) = m.full("g", 1000);
        let mut waiter = m.wait(payer, 100, m.clock.now() + 5 * MILLI);
        let request = m.take(1);
        m.clock.advance(5 * MILLI);
        assert_eq!(m.groups.needs(&m.host, &request), 0, "a pass that is under way ends");
        m.groups.served(&m.host, &request, 1);
        assert_eq!(m.due(), Due::Nothing);
        assert!(matches!(poll(&mut waiter), Poll::Ready(Err(Refusal::Limit(_)))));
        m.uncharge(payer, 1000);
    });
}

/// The waiting thread runs nothing, and waits for nothing but its grant.
#[test]
fn charge_or_wait_asks_others_and_ends_at_deadline() {
    with_groups(|m| {
        let (_, payer) = m.full("g", 1000);
        let answer = m.groups.charge_or_wait(&m.host, payer, 100, m.clock.now());
        assert!(matches!(answer, Err(Refusal::Limit(_))));
        assert_eq!((m.host.asked.reclaim.load(Relaxed), m.host.asked.ask.load(Relaxed)), (0, 1));
        m.uncharge(payer, 1000);
    });
}

#[test]
fn async_charge_above_high_pends_until_delay_or_usage_drops() {
    for is_freed in [false, true] {
        with_groups(|m| {
            let id = m.groups.create(&m.host, GroupId::ROOT, "g").unwrap();
            let payer = id.payer(Kind::ByHand, 0);
            m.groups.set_bound(&m.host, id, Bound::High, 1 << 20).unwrap();
            let mut waiter = m.wait(payer, 4 << 20, FOREVER);
            let mut reasons = Vec::new();
            each_waiting(m.groups, &m.host, |waiting| reasons.push((waiting.group, waiting.at, waiting.reason)));
            assert_eq!(reasons, [(id, id, Reason::High)]);
            let request = m.take(1);
            assert_eq!((request.group, request.bytes), (id, 3 << 20));
            if is_freed {
                m.uncharge(payer, 3 << 20);
            } else {
                m.clock.advance(2_000 * MILLI);
            }
            m.groups.served(&m.host, &request, 1);
            assert!(m.groups.tick(&m.host).is_some());
            assert_eq!(poll(&mut waiter), Poll::Ready(Ok(0)));
            m.uncharge(payer, if is_freed { 1 << 20 } else { 4 << 20 });
        });
    }
}

#[test]
fn async_overcharge_delays_above_high_and_ignores_limit() {
    with_groups(|m| {
        let (id, payer) = m.full("g", 1 << 20);
        let overcharge = |bytes| m.groups.charge_async(m.host, payer, bytes, FOREVER).overcharge();
        assert_eq!(poll(&mut overcharge(100)), Poll::Ready(Ok(0)));
        m.groups.set_bound(&m.host, id, Bound::High, 1 << 19).unwrap();
        let mut waiter = overcharge(4 << 20);
        assert!(poll(&mut waiter).is_pending());
        let mut reasons = Vec::new();
        each_waiting(m.groups, &m.host, |waiting| reasons.push((waiting.at, waiting.reason)));
        assert_eq!(reasons, [(id, Reason::High)]);
        m.clock.advance(2_000 * MILLI);
        m.groups.tick(&m.host);
        assert_eq!(poll(&mut waiter), Poll::Ready(Ok(0)));
        let _ = poll(&mut overcharge(4 << 20));
        m.uncharge(payer, (5 << 20) + 100);
        m.groups.drain(&m.host, id);
    });
}

/// Memory that a callback of reclaim needs before it frees.
#[test]
fn reserve_allows_an_eighth_above_max_without_reclaim() {
    with_groups(|m| {
        let (id, payer) = m.full("g", 800);
        let charge = |bytes| m.groups.charge(&m.host, payer, bytes, OnLimit::Reserve);
        assert_eq!((charge(60), charge(40)), (Ok(0), Ok(0)));
        let Err(Refusal::Limit(limit)) = charge(1) else { panic!("the reserve has no end") };
        assert_eq!((limit.group, limit.charged), (id, 900));
        let events = m.groups.info(&m.host, id).unwrap().events;
        assert_eq!([Event::Overcharged, Event::Refused].map(|event| events[event as usize]), [2, 1]);
        assert_eq!(m.host.asked.reclaim.load(Relaxed), 0);
        assert!(m.groups.charge(&m.host, payer, 1, OnLimit::Refuse).is_err());
        m.uncharge(payer, 900);
    });
}

#[test]
fn future_dropped_while_throttled_uncharges_its_bytes() {
    with_groups(|m| {
        let id = m.groups.create(&m.host, GroupId::ROOT, "g").unwrap();
        m.groups.set_bound(&m.host, id, Bound::High, 1 << 20).unwrap();
        drop(m.wait(id.payer(Kind::ByHand, 0), 4 << 20, FOREVER));
    });
}

#[test]
fn deleted_group_withdraws_its_request_and_slot_is_reusable() {
    with_groups(|m| {
        let (id, payer) = m.full("g", 1000);
        m.groups.set_bound(&m.host, id, Bound::Max, 400).unwrap();
        let request = m.take(1);
        m.groups.delete(&m.host, id).unwrap();
        assert_eq!(m.groups.needs(&m.host, &request), 0);
        m.groups.served(&m.host, &request, 1);
        assert_eq!(m.due(), Due::Nothing);
        m.uncharge(payer, 1000);
        assert_eq!(m.groups.set_bound(&m.host, id, Bound::Max, 1), Err(GroupError::NoSuchGroup));
        while m.groups.tick(&m.host).is_some() {}
        let (id, payer) = m.full("g", 1000);
        m.groups.set_bound(&m.host, id, Bound::Max, 400).unwrap();
        assert_eq!(m.take(2).group, id);
        m.uncharge(payer, 1000);
    });
}

#[test]
fn a_forked_child_has_no_servers_and_asks_its_own() {
    with_groups(|m| {
        let (id, payer) = m.full("g", 1000);
        m.groups.set_bound(&m.host, id, Bound::Max, 400).unwrap();
        let request = m.take(1);
        assert_eq!(m.due(), Due::Nothing);
        // SAFETY: no other thread is on its way through the groups.
        unsafe { m.groups.forget_others(&m.host) };
        assert_eq!(m.take(2), request);
        m.uncharge(payer, 1000);
    });
}

#[test]
fn a_charge_that_is_held_up_goes_on_when_its_group_is_deleted() {
    with_groups(|m| {
        let parent = m.groups.create(&m.host, GroupId::ROOT, "parent").unwrap();
        let id = m.groups.create(&m.host, parent, "g").unwrap();
        m.groups.set_bound(&m.host, parent, Bound::High, 1 << 20).unwrap();
        m.groups.set_bound(&m.host, id, Bound::High, 1 << 20).unwrap();
        let payer = id.payer(Kind::ByHand, 0);
        let mut waiter = m.wait(payer, 4 << 20, FOREVER);
        m.groups.delete(&m.host, id).unwrap();
        assert_eq!(poll(&mut waiter), Poll::Ready(Ok(0)));
        assert_eq!(m.take(1).group, parent, "which has what was charged");
        m.uncharge(payer, 4 << 20);
        while m.groups.tick(&m.host).is_some() {}
    });
}

#[test]
fn a_forked_child_holds_up_no_charge_of_its_parents() {
    with_groups(|m| {
        let id = m.groups.create(&m.host, GroupId::ROOT, "g").unwrap();
        m.groups.set_bound(&m.host, id, Bound::High, 1 << 20).unwrap();
        let payer = id.payer(Kind::ByHand, 0);
        let mut waiter = m.wait(payer, 4 << 20, FOREVER);
        // SAFETY: no other thread is on its way through the groups.
        unsafe { m.groups.forget_others(&m.host) };
        assert_eq!(m.groups.info(&m.host, id).unwrap().charged, 0);
        each_waiting(m.groups, &m.host, |waiting| panic!("{waiting:?}"));
        assert!(poll(&mut waiter).is_pending(), "it is charged again, and held up");
        m.clock.advance(2_000 * MILLI);
        m.groups.tick(&m.host);
        assert_eq!(poll(&mut waiter), Poll::Ready(Ok(0)));
        m.uncharge(payer, 4 << 20);
    });
}

#[test]
fn a_raised_high_lets_go_of_charges_that_are_held_up() {
    with_groups(|m| {
        let id = m.groups.create(&m.host, GroupId::ROOT, "g").unwrap();
        m.groups.set_bound(&m.host, id, Bound::High, 1 << 20).unwrap();
        let payer = id.payer(Kind::ByHand, 0);
        let mut waiter = m.wait(payer, 4 << 20, FOREVER);
        let come = m.host.asked.come.load(Relaxed);
        m.groups.set_bound(&m.host, id, Bound::High, 8 << 20).unwrap();
        assert!(m.host.asked.come.load(Relaxed) > come, "a tick is to come soon");
        m.groups.tick(&m.host);
        assert_eq!((poll(&mut waiter), m.due()), (Poll::Ready(Ok(0)), Due::Nothing));
        m.uncharge(payer, 4 << 20);
    });
}

#[test]
fn a_forked_child_ends_what_groups_left_that_its_parent_deleted() {
    with_groups(|m| {
        let (id, payer) = m.full("g", 1000);
        let waiter = m.wait(payer, 100, FOREVER);
        m.groups.delete(&m.host, id).unwrap();
        // SAFETY: no other thread is on its way through the groups.
        unsafe { m.groups.forget_others(&m.host) };
        drop(waiter);
        m.uncharge(payer, 1000);
        while m.groups.tick(&m.host).is_some() {}
        assert_eq!((m.groups.count(&m.host).live, m.groups.count(&m.host).dying), (1, 0));
    });
}
