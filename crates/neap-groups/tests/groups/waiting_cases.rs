//! Waiting, case by case: the end of each wait, the order of admission, and bugs of other projects.
//! Names that begin with a project's name and a number are after that project's issue.

use crate::host::machine::{Machine, with_groups_after};
use crate::host::{Asked, Host, each_waiting};
use core::future::Future;
use core::pin::Pin;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use core::task::{Context, Poll, Waker};
use neap_base::Platform;
use neap_groups::{Bound, ChargeAsync, Due, Event, FOREVER, GroupId, Groups, OnLimit, Payer, Refusal};
use neap_percpu::{PerCpuData, Shape};
use neap_testing::virtual_platform::Virtual;
use std::sync::{Arc, Mutex};
use std::task::Wake;

type Waiter<'g> = ChargeAsync<'g, Host<'g, Virtual>>;

/// Counts its calls.
#[derive(Default)]
struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

fn with_groups(test: impl FnOnce(&Machine<'_>)) {
    with_groups_after(0, test, |_| ());
}

impl<'a> Machine<'a> {
    fn ask(&self, payer: Payer, bytes: u64) -> Waiter<'a> {
        self.wait(payer, bytes, FOREVER)
    }

    fn charge(&self, payer: Payer, bytes: u64) {
        assert_eq!(self.groups.charge(&self.host, payer, bytes, OnLimit::Refuse), Ok(0));
    }
}

fn poll_with(waiter: &mut Waiter, waker: &Waker) -> Poll<Result<u64, Refusal>> {
    Pin::new(waiter).poll(&mut Context::from_waker(waker))
}

fn poll(waiter: &mut Waiter) -> Poll<Result<u64, Refusal>> {
    poll_with(waiter, Waker::noop())
}

fn is_in(waiter: &mut Waiter) -> bool {
    match poll(waiter) {
        Poll::Pending => false,
        Poll::Ready(answer) => answer == Ok(0),
    }
}

#[test]
fn a_wait_ends_at_its_deadline_with_the_error_of_a_charge() {
    with_groups(|m| {
        let (id, payer) = m.group(GroupId::ROOT, "g", 1000);
        m.charge(payer, 900);
        let count = Arc::new(Count::default());
        let mut waiter = m.wait(payer, 200, m.clock.now() + 5_000_000_000);
        let waker = Waker::from(count.clone());
        assert!(poll_with(&mut waiter, &waker).is_pending());
        let asked = m.host.asked.come.load(Relaxed);
        assert!(asked > 0, "no thread is asked to come before the deadline");
        m.clock.advance(4_900_000_000);
        assert_eq!(m.groups.tick(&m.host), Some(100_000_000));
        m.clock.advance(100_000_000);
        assert_eq!(count.0.load(Relaxed), 0);
        assert_eq!(m.groups.tick(&m.host), Some(250_000_000), "it has not taken its answer");
        m.groups.deliver(&m.host);
        assert_eq!(count.0.load(Relaxed), 1);
        let Poll::Ready(Err(Refusal::Limit(limit))) = poll(&mut waiter) else { panic!("it is not refused") };
        assert_eq!((limit.group, limit.max, limit.charged, limit.need), (id, 1000, 900, 200));
        assert_eq!(limit.holders[0], Some((id, 900)));
        let events = m.groups.info(&m.host, id).unwrap().events;
        assert_eq!(events[Event::Refused as usize], 1, "to wait is not to be refused");
        assert_eq!(m.groups.tick(&m.host), None);
        m.uncharge(payer, 900);
    });
}

#[test]
fn velox_15431_what_cannot_fit_does_not_wait_in_front_of_others() {
    with_groups(|m| {
        let (id, payer) = m.group(GroupId::ROOT, "g", 1000);
        m.charge(payer, 900);
        let mut large = m.ask(payer, 999);
        let mut next = m.ask(payer, 300);
        let mut too_large = m.groups.charge_async(m.host, payer, 1001, FOREVER);
        assert!(matches!(poll(&mut too_large), Poll::Ready(Err(Refusal::Limit(limit))) if limit.need == 1001));
        // The limit is below the oldest's request, which is refused; the next is the oldest.
        m.groups.set_bound(&m.host, id, Bound::Max, 998).unwrap();
        assert!(matches!(poll(&mut large), Poll::Ready(Err(Refusal::Limit(limit))) if limit.max == 998));
        m.uncharge(payer, 202);
        assert!(is_in(&mut next));
        m.uncharge(payer, 998);
    });
}

#[test]
fn velox_15431_oldest_lets_small_ones_pass_and_is_granted() {
    with_groups(|m| {
        let (_, payer) = m.group(GroupId::ROOT, "g", 10_000);
        m.charge(payer, 9000);
        let mut large = m.ask(payer, 8000);
        // An eighth is not less than an eighth, though there is room.
        let mut eighth = m.ask(payer, 1000);
        let mut passed = 0;
        let mut small = loop {
            let mut small = m.groups.charge_async(m.host, payer, 100, FOREVER);
            match poll(&mut small) {
                Poll::Ready(answer) => assert_eq!(answer, Ok(0)),
                Poll::Pending => break small,
            }
            passed += 1;
            m.uncharge(payer, 100);
        };
        assert_eq!(passed, 8);
        // All bytes uncharged now go to the oldest.
        m.uncharge(payer, 6999);
        assert!(!is_in(&mut large) && !is_in(&mut eighth) && !is_in(&mut small));
        m.uncharge(payer, 1);
        assert!(is_in(&mut large) && !is_in(&mut eighth));
        m.uncharge(payer, 100);
        assert!(is_in(&mut small), "it may pass the oldest now");
        assert!(!is_in(&mut eighth));
        m.uncharge(payer, 2000);
        assert!(is_in(&mut eighth));
        m.uncharge(payer, 9000);
    });
}

#[test]
fn at_a_common_limit_the_oldest_of_all_goes_first() {
    with_groups(|m| {
        let (top, of_top) = m.group(GroupId::ROOT, "top", 1000);
        let (_, one) = m.group(top, "one", 500);
        let (_, two) = m.group(top, "two", 1000);
        m.charge(one, 500);
        m.charge(two, 500);
        // The older request waits for the limit of both, the younger for its own.
        let mut older = m.ask(two, 500);
        let mut younger = m.ask(one, 50);
        m.uncharge(one, 500);
        assert!(is_in(&mut older), "a later charge was admitted first");
        assert!(!is_in(&mut younger));
        m.uncharge(two, 900);
        assert!(is_in(&mut younger));
        // A request that was refused further up waits there, by its age.
        m.charge(of_top, 850);
        let mut first = m.ask(one, 460);
        let mut second = m.ask(two, 400);
        m.uncharge(one, 50);
        let mut at = Vec::new();
        each_waiting(m.groups, &m.host, |waiting| at.push((waiting.age, waiting.group, waiting.at)));
        at.sort_unstable();
        assert_eq!(
            at.iter().map(|&(_, group, at)| (group, at)).collect::<Vec<_>>(),
            [(one.id(), top), (two.id(), top)]
        );
        m.uncharge(of_top, 409);
        assert!(!is_in(&mut first) && !is_in(&mut second));
        m.uncharge(of_top, 1);
        assert!(is_in(&mut first) && !is_in(&mut second));
        drop(second);
        m.uncharge(one, 460);
        m.uncharge(two, 100);
        m.uncharge(of_top, 440);
    });
}

#[test]
fn what_was_granted_and_not_taken_goes_back_and_on() {
    with_groups(|m| {
        let (id, payer) = m.group(GroupId::ROOT, "g", 1000);
        m.charge(payer, 1000);
        let mut waiters: Vec<_> = (0..3).map(|_| m.ask(payer, 1000)).collect();
        m.uncharge(payer, 1000);
        assert_eq!(m.groups.used(&m.host, id), Ok(1000));
        drop(waiters.remove(0));
        assert!(is_in(&mut waiters[0]) && !is_in(&mut waiters[1]));
        // The caller keeps what it took.
        drop(waiters.remove(0));
        assert_eq!(m.groups.used(&m.host, id), Ok(1000));
        drop(waiters);
        m.uncharge(payer, 1000);
        drop(m.groups.charge_async(m.host, payer, 1, FOREVER));
    });
}

#[test]
fn waiters_of_a_deleted_group_are_refused_at_once() {
    with_groups(|m| {
        let (top, of_top) = m.group(GroupId::ROOT, "top", 1000);
        let (id, payer) = m.group(top, "g", 500);
        m.charge(payer, 500);
        m.charge(of_top, 500);
        let (mut at_its_own, mut sibling) = (m.ask(payer, 400), m.ask(of_top, 300));
        let mut further_up = m.ask(payer, 450);
        m.groups.delete(&m.host, id).unwrap();
        for waiter in [&mut at_its_own, &mut further_up] {
            assert_eq!(poll(waiter), Poll::Ready(Err(Refusal::Gone)));
        }
        m.uncharge(payer, 300);
        assert!(is_in(&mut sibling), "its heir has what it was charged for");
        m.uncharge(payer, 200);
        m.uncharge(of_top, 800);
        while m.groups.tick(&m.host).is_some() {}
    });
}

#[test]
fn a_thousand_are_let_in_when_a_limit_goes() {
    with_groups(|m| {
        let (id, payer) = m.group(GroupId::ROOT, "g", 1000);
        m.charge(payer, 1000);
        let mut waiters: Vec<_> = (0..1000).map(|_| m.ask(payer, 1000)).collect();
        m.groups.set_bound(&m.host, id, Bound::Max, 1_000_000).unwrap();
        let first = waiters.iter_mut().map(is_in).take_while(|is_in| *is_in).count();
        assert_eq!(first, 999);
        m.groups.set_bound(&m.host, id, Bound::Max, neap_groups::UNLIMITED).unwrap();
        assert!(is_in(&mut waiters[999]));
        m.uncharge(payer, 1_001_000);
    });
}

#[test]
fn those_behind_ask_for_reclaim_too() {
    with_groups(|m| {
        let (id, payer) = m.group(GroupId::ROOT, "g", 1500);
        m.charge(payer, 1000);
        let first = m.ask(payer, 600);
        let before = m.host.asked.ask.load(Relaxed);
        let second = m.ask(payer, 700);
        assert_eq!(m.host.asked.ask.load(Relaxed) - before, 1);
        let Due::Now(request) = m.groups.look_for_request(&m.host) else { panic!("nothing is asked for") };
        assert_eq!((request.group, request.bytes), (id, 800), "what both need");
        assert_eq!(m.host.asked.reclaim.load(Relaxed), 0, "a charge that waits does so in its queue alone");
        drop((first, second));
        m.uncharge(payer, 1000);
    });
}

/// A waker that calls the groups as it likes.
struct Meddler(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Wake for Meddler {
    fn wake(self: Arc<Self>) {
        if let Some(meddle) = self.0.lock().unwrap().take() {
            meddle();
        }
    }
}

#[test]
fn golang_lru_230_a_waker_is_called_with_no_lock_held() {
    let clock: &'static Virtual = Box::leak(Box::new(Virtual::new(4096, 2)));
    let shape = Shape { span: 16 << 20, ..Shape::usual(2) };
    let data: &'static PerCpuData = Box::leak(Box::new(PerCpuData::open(clock, &shape, |_| 0, ()).unwrap()));
    let asked: &'static Asked = Box::leak(Box::default());
    let host = Host::new(clock, data, asked);
    let groups: &'static Groups = Box::leak(Box::new(Groups::open(&host).unwrap()));
    let m = Machine { groups, host, clock };
    let (id, payer) = m.group(GroupId::ROOT, "g", 1000);
    m.charge(payer, 1000);
    let (mut first, second) = (m.ask(payer, 600), m.ask(payer, 600));
    let meddle = move || {
        drop(second);
        groups.uncharge(&host, payer, 400);
        assert_eq!(groups.charge(&host, payer, 100, OnLimit::Refuse), Ok(0));
        groups.set_bound(&host, id, Bound::Max, 2000).unwrap();
        groups.tick(&host);
        groups.deliver(&host);
        assert_eq!(groups.delete(&host, id), Ok(()));
    };
    let meddler = Arc::new(Meddler(Mutex::new(Some(Box::new(meddle)))));
    assert!(poll_with(&mut first, &Waker::from(meddler.clone())).is_pending());
    m.uncharge(payer, 600);
    assert!(meddler.0.lock().unwrap().is_some(), "a waker was called from within a free");
    groups.deliver(&host);
    assert!(meddler.0.lock().unwrap().is_none());
    assert!(is_in(&mut first), "what was granted before the end is granted");
    m.uncharge(payer, 700);
}

#[test]
fn a_forked_child_has_no_waiters_and_may_ask_again() {
    with_groups(|m| {
        let (id, payer) = m.group(GroupId::ROOT, "g", 1000);
        m.charge(payer, 1000);
        let count = Arc::new(Count::default());
        let (mut granted, mut waiting) = (m.ask(payer, 700), m.ask(payer, 400));
        assert!(poll_with(&mut waiting, &Waker::from(count.clone())).is_pending());
        m.uncharge(payer, 900);
        assert_eq!(m.groups.used(&m.host, id), Ok(800));
        // SAFETY: no other thread is there, and this one reads nothing.
        unsafe { m.groups.forget_others(&m.host) };
        assert_eq!(m.groups.used(&m.host, id), Ok(100), "a grant that no charge takes");
        m.groups.deliver(&m.host);
        assert_eq!((count.0.load(Relaxed), Arc::strong_count(&count)), (0, 2), "a waker of the parent's was touched");
        assert_eq!(m.groups.tick(&m.host), None);
        m.charge(payer, 900);
        // A future that is polled all the same asks again; one that is dropped has nothing.
        assert!(!is_in(&mut waiting));
        assert!(!is_in(&mut granted));
        m.uncharge(payer, 1000);
        assert!(is_in(&mut waiting) && !is_in(&mut granted));
        drop(granted);
        m.uncharge(payer, 400);
    });
}
