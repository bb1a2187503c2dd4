//! Charge requests, group handles, and resets of a peak.

use core::pin::{Pin, pin};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use core::task::{Context, Poll, Waker};
use core::time::Duration;
use neap::groups::{Bound, Charge, ChargeError, Event, Group, GroupError, GroupHandle};
use neap::reclaim::{self, Scan, Shrinker};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

const OBJECT: u64 = 64 << 10;
const SOON: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(60);

fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn an_owner_deletes_its_group_with_all_below() {
    let owner = GroupHandle::create("owned/by/one").unwrap();
    let (group, charge) = (owner.group(), owner.charge(1000).unwrap());
    for path in ["owned/by/one/a/b", "owned/by/one/a/c", "owned/by/one/d"] {
        Group::create(path).unwrap();
    }
    let below = Group::find("owned/by/one/a/c").unwrap().charge(1000).unwrap();
    assert_eq!(group.delete(), Err(GroupError::HasChildren));
    drop(owner);
    assert_eq!(
        (Group::find("owned/by/one"), group.used()),
        (Err(GroupError::NoSuchGroup), Err(GroupError::NoSuchGroup))
    );
    let above = Group::find("owned/by").unwrap();
    assert_eq!((above.used(), group.heir(), above.children().count()), (Ok(2000), Some(above), 0));
    drop((charge, below));
    let kept = GroupHandle::create("owned/by/two").unwrap().leak();
    assert_eq!(Group::find("owned/by/two"), Ok(kept));
    // An owner whose group was deleted by name deletes no other group of that name.
    let owner = GroupHandle::of(kept);
    kept.delete().unwrap();
    let second = Group::create("owned/by/two").unwrap();
    drop(owner);
    assert_eq!((Group::find("owned/by/two"), Group::ROOT.delete_all()), (Ok(second), Err(GroupError::Root)));
    Group::find("owned").unwrap().delete_all().unwrap();
    assert_eq!(Group::find("owned"), Err(GroupError::NoSuchGroup));
}

#[test]
fn a_tree_goes_while_other_threads_make_groups_in_it() {
    let top = Group::create("growing").unwrap();
    let made = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let made = &made;
            scope.spawn(move || {
                // The groups above may be deleted at any moment. A new group at the path of `top`
                // is not filled.
                for number in 0..200 {
                    let Ok(above) = Group::find("growing") else { break };
                    if above != top {
                        break;
                    }
                    made.fetch_add(1, Relaxed);
                    _ = Group::create(&format!("growing/{thread}/{number}"));
                }
            });
        }
        while made.load(Relaxed) < 20 {
            std::thread::yield_now();
        }
        top.delete_all().unwrap();
    });
    assert_eq!(top.used(), Err(GroupError::NoSuchGroup));
    _ = Group::find("growing").map(Group::delete_all);
}

#[test]
fn a_peak_begins_again_at_the_charge_of_the_moment() {
    let (above, group) = (Group::create("peaks").unwrap(), Group::create("peaks/below").unwrap());
    let peaks = || [above, group].map(|group| group.info().unwrap().peak);
    let kept = group.charge(1 << 20).unwrap();
    drop(group.charge(4 << 20).unwrap());
    let [first, second] = peaks();
    assert!(first >= 5 << 20 && second >= 5 << 20);
    assert_eq!(group.reset_peak(), Ok(second));
    let now = group.info().unwrap().charged;
    assert_eq!((peaks(), (1 << 20..5 << 20).contains(&now)), ([first, now], true));
    drop(group.charge(2 << 20).unwrap());
    assert!((now + (2 << 20) - (256 << 10)..second).contains(&peaks()[1]), "{:?}", peaks());
    drop(kept);
    group.delete().unwrap();
    assert_eq!(group.reset_peak(), Err(GroupError::NoSuchGroup));
}

#[test]
fn a_refusal_says_why_and_names_the_holders() {
    let (pool, tenant) = (Group::create("why").unwrap(), Group::create("why/tenant").unwrap());
    pool.set(Bound::Max, 1 << 20).unwrap();
    let all = tenant.request(1 << 20).now().unwrap();
    let errors = [
        (
            pool.request(1).now().unwrap_err(),
            "why has 1.0 MiB of 1.0 MiB and is asked for 1 B more; held by why/tenant",
        ),
        (
            pool.request(1).deadline(SOON).wait().unwrap_err(),
            "1 B more, until the deadline; held by why/tenant (1.0 MiB)",
        ),
        (pool.request(2 << 20).wait().unwrap_err(), "2.0 MiB more, which is more than its limit; held by why/tenant"),
    ];
    for (error, text) in &errors {
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!(error.holders().collect::<Vec<_>>(), [(tenant, 1 << 20)]);
    }
    use ChargeError::{Limit, Timeout, TooLarge};
    let [(now, _), (late, _), (large, _)] = &errors;
    assert!(matches!((now, late, large), (Limit(_), Timeout(_), TooLarge(_))), "{errors:?}");
    // The requests as futures.
    let mut late = pin!(pool.request(1).deadline(Duration::ZERO).into_future());
    let end = Instant::now() + LONG;
    let over = loop {
        match poll(late.as_mut()) {
            Poll::Pending => assert!(Instant::now() < end, "a deadline that is over ends a charge"),
            Poll::Ready(answer) => break answer,
        }
    };
    assert!(matches!(over, Err(Timeout(_))), "{over:?}");
    let more = match poll(pin!(pool.request(1).overcharge().into_future())) {
        Poll::Ready(answer) => answer.unwrap(),
        Poll::Pending => panic!("what goes beyond a limit does not wait"),
    };
    assert_eq!(pool.used().unwrap(), (1 << 20) + 1);
    drop((all, more));
    tenant.delete().unwrap();
    assert_eq!(tenant.request(1).now().unwrap_err(), ChargeError::Deleted);
    assert_eq!(tenant.request(1).wait().unwrap_err(), ChargeError::Deleted);
    let gone = poll(pin!(tenant.request(1).into_future()));
    assert_eq!(gone.map(|answer| answer.unwrap_err()), Poll::Ready(ChargeError::Deleted));
}

#[test]
fn a_wait_that_is_inline_calls_shrinkers_in_its_own_thread() {
    let group = Group::create("inline").unwrap();
    group.set(Bound::Max, 8 * OBJECT).unwrap();
    let objects: Arc<Mutex<VecDeque<Charge>>> = Arc::default();
    let (counted, shrunk, own) = (objects.clone(), objects.clone(), Arc::new(AtomicU64::new(0)));
    let (calls, thread) = (own.clone(), std::thread::current().id());
    let count = move |_: &reclaim::Context| reclaim::Count::Objects(counted.lock().unwrap().len() as u64);
    let scan = move |_: &reclaim::Context, wanted| {
        calls.fetch_add(u64::from(std::thread::current().id() == thread), Relaxed);
        let mut objects = shrunk.lock().unwrap();
        let wanted = objects.len().min(wanted);
        Scan::Freed(objects.drain(..wanted).count() as u64)
    };
    let shrinker = Shrinker::named("inline").group(group).batch(1).inline(true).register_shrink((count, scan)).unwrap();
    for _ in 0..32 {
        let charge = group.request(OBJECT).inline().deadline(LONG).wait().unwrap();
        objects.lock().unwrap().push_back(charge);
    }
    assert!(own.load(Relaxed) >= 24, "{own:?}");
    assert_eq!(group.info().unwrap().events[Event::Refused as usize], 0);
    // A request above the limit calls no shrinker.
    let before = (own.load(Relaxed), objects.lock().unwrap().len());
    assert!(matches!(group.request(9 * OBJECT).inline().wait(), Err(ChargeError::TooLarge(_))));
    assert_eq!((own.load(Relaxed), objects.lock().unwrap().len()), before);
    // A future calls no shrinker in its thread, whatever it may exceed.
    let inline = own.load(Relaxed);
    for _ in 0..32 {
        let mut future = pin!(group.request(OBJECT).inline().overcharge().into_future());
        let Poll::Ready(charge) = poll(future.as_mut()) else { panic!("no limit is waited for") };
        objects.lock().unwrap().push_back(charge.unwrap());
    }
    assert_eq!(own.load(Relaxed), inline);
    drop(shrinker);
}
