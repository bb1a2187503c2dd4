//! The process's groups: the promises of the documentation, and threads that charge, delete and
//! drain.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use neap::groups::{Bound, Charge, ChargeRequest, Event, Group, GroupError, Kind, Listener, UNLIMITED, count};
use neap::process::PROCESS;
use std::sync::Mutex;
use std::time::Instant;

/// Tests that look at the whole tree take turns.
static ALONE: Mutex<()> = Mutex::new(());

/// Waits until `done`, while maintenance, or this thread in its place, works.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < end, "{what} does not come true");
        PROCESS.tick(0);
        std::thread::yield_now();
    }
}

#[test]
fn paths_are_made_found_and_end() {
    let _alone = ALONE.lock().unwrap();
    let leaf = Group::create("paths/a/b").unwrap();
    assert_eq!(Group::create("paths/a/b"), Err(GroupError::Exists));
    assert_eq!(Group::find("paths/a/b"), Ok(leaf));
    assert_eq!(Group::find_or_create("paths/a/b"), Ok(leaf));
    assert_eq!(Group::find(""), Ok(Group::ROOT));
    assert_eq!((leaf.to_string(), Group::ROOT.to_string()), ("paths/a/b".into(), "the root group".into()));
    for bad in ["", "paths//b", "/paths", "paths/", "paths/..", "paths/\n", &"x".repeat(57)] {
        assert_eq!(Group::create(bad), Err(GroupError::BadName), "{bad:?}");
    }
    let above = Group::find("paths/a").unwrap();
    assert_eq!(above.delete(), Err(GroupError::HasChildren));
    assert_eq!(Group::ROOT.delete(), Err(GroupError::Root));
    assert_eq!(above.children().collect::<Vec<_>>(), [leaf]);
    leaf.delete().unwrap();
    assert_eq!((leaf.delete(), Group::find("paths/a/b")), (Err(GroupError::NoSuchGroup), Err(GroupError::NoSuchGroup)));
    assert!(leaf.to_string().ends_with("which is gone"));
    let second = Group::create("paths/a/b").unwrap();
    assert_ne!(second, leaf);
    assert_eq!(leaf.used(), Err(GroupError::NoSuchGroup));
    assert_eq!((above.next_child(None), above.next_child(Some(second))), (Ok(Some(second)), Ok(None)));
    for (parent, after) in [(above, Some(leaf)), (Group::ROOT, Some(second)), (leaf, None)] {
        assert_eq!(parent.next_child(after), Err(GroupError::NoSuchGroup), "{parent}");
    }
    for path in ["paths/a/b", "paths/a", "paths"] {
        Group::find(path).unwrap().delete().unwrap();
    }
}

#[test]
fn charges_split_merge_and_move() {
    let _alone = ALONE.lock().unwrap();
    let [one, two] = ["moves/one", "moves/two"].map(|path| Group::create(path).unwrap());
    let mut charge = one.charge(1000).unwrap();
    assert!(charge.split(1001).is_none() && charge.bytes() == 1000);
    let mut part = charge.split(400).unwrap();
    assert_eq!((charge.bytes(), part.bytes(), one.used()), (600, 400, Ok(1000)));
    let by_hand = |node: usize| one.charged(Kind::ByHand, node).unwrap();
    assert!(by_hand(0) >= 1000 && by_hand(31) == 0 && one.charged(Kind::Pages, 0) == Ok(0));
    part.move_to(two).unwrap();
    assert_eq!((one.used(), two.used(), part.group()), (Ok(600), Ok(400), two));
    let part = charge.merge(part).unwrap_err();
    two.set(Bound::Max, 500).unwrap();
    let refused = charge.move_to(two).unwrap_err();
    assert_eq!((refused.limit().unwrap().need, charge.group(), one.used()), (600, one, Ok(600)));
    charge.merge(one.charge(1).unwrap()).unwrap();
    assert_eq!(charge.bytes(), 601);
    drop((charge, part));
    assert_eq!(Group::find("moves").unwrap().used(), Ok(0));
    for path in ["moves/one", "moves/two", "moves"] {
        Group::find(path).unwrap().delete().unwrap();
    }
}

#[test]
fn refusal_message_lists_largest_holders() {
    let _alone = ALONE.lock().unwrap();
    let top = Group::create("held").unwrap();
    top.set(Bound::Max, 10 << 20).unwrap();
    let held: Vec<Charge> = [("a", 1), ("b", 5), ("c", 2), ("d", 1)]
        .map(|(name, mib)| Group::create(&format!("held/{name}")).unwrap().charge(mib << 20).unwrap())
        .into();
    let leaf = Group::find("held/a").unwrap();
    let refused = leaf.charge(2 << 20).unwrap_err();
    let text =
        "held has 9.0 MiB of 10.0 MiB and is asked for 2.0 MiB more; held by held/b (5.0 MiB), held/c (2.0 MiB), held/";
    assert!(refused.to_string().starts_with(text), "{refused}");
    let over = leaf.request(2 << 20).overcharge().now().unwrap();
    let info = top.info().unwrap();
    assert_eq!((info.events[3], info.events[4], top.used()), (1, 1, Ok(11 << 20)));
    assert!(leaf.charge(1).is_err());
    drop((over, held));
    assert_eq!(top.used(), Ok(0));
    for path in ["held/a", "held/b", "held/c", "held/d", "held"] {
        Group::find(path).unwrap().delete().unwrap();
    }
}

/// An idle process does not tick, and no thread is made for that.
#[test]
fn deleted_group_ends_without_ticks() {
    let _alone = ALONE.lock().unwrap();
    let [one, two] = ["ends/one", "ends/two"].map(|path| Group::create(path).unwrap());
    drop(one.charge(1).unwrap());
    let outliving = two.charge(1).unwrap();
    [one, two, Group::find("ends").unwrap()].into_iter().for_each(|group| group.delete().unwrap());
    let end = Instant::now() + Duration::from_secs(20);
    while count().unwrap().dying > 0 {
        assert!(Instant::now() < end, "{:?} do not end", count());
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(outliving);
}

/// Threads charge and free on all CPUs, while groups are made and deleted, stocks are drained and
/// limits change. No group is ever charged beyond its limit, and in the end no charge is left.
#[test]
fn more_than_can_be_counted_is_refused_to_everybody() {
    let _alone = ALONE.lock().unwrap();
    let group = Group::create("uncountable/below").unwrap();
    let request = |bytes| group.request(bytes);
    for is_over in [false, true] {
        let charge = |request: ChargeRequest| if is_over { request.overcharge().now() } else { request.now() };
        assert!(charge(request(u64::MAX)).unwrap_err().limit().is_some());
        let most = charge(request(i64::MAX as u64)).unwrap();
        let refused = charge(request(i64::MAX as u64)).unwrap_err();
        assert_eq!(refused.limit().map(|limit| (limit.group, limit.max)), Some((group.id(), UNLIMITED)));
        assert_eq!(group.info().unwrap().kinds[Kind::ByHand as usize], i64::MAX as u64);
        drop(most);
        assert_eq!(
            (group.used(), Group::ROOT.used(), group.info().unwrap().events[3]),
            (Ok(0), Ok(0), 2 + 2 * u64::from(is_over))
        );
    }
    group.delete().unwrap();
    Group::find("uncountable").unwrap().delete().unwrap();
}

#[test]
fn l21_a_storm_leaves_nothing_behind() {
    let _alone = ALONE.lock().unwrap();
    const MAX: u64 = 8 << 20;
    let top = Group::create("storm").unwrap();
    top.set(Bound::Max, MAX).unwrap();
    let (stop, outside, refused) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let rounds = if cfg!(debug_assertions) { 20_000 } else { 100_000 };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4_u64)
            .map(|thread| {
                let (outside, refused) = (&outside, &refused);
                scope.spawn(move || {
                    let mut held: Vec<Charge> = Vec::new();
                    let mut state = thread + 1;
                    for round in 0..rounds {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let random = state >> 33;
                        if round % 2000 == 0 {
                            let _ = Group::create(&format!("storm/{thread}"));
                        }
                        if round % 2000 == 1500 {
                            let _ = Group::find(&format!("storm/{thread}")).unwrap().delete();
                        }
                        let group = Group::find_or_create(&format!("storm/{}", random % 4)).unwrap_or(top);
                        match group.charge(1 + random % 100_000) {
                            Ok(charge) => {
                                // An independent counter of the granted bytes.
                                let sum = outside.fetch_add(charge.bytes(), Ordering::SeqCst) + charge.bytes();
                                assert!(sum <= MAX, "{sum} bytes charged beyond the limit");
                                held.push(charge);
                            }
                            Err(error) if error.limit().is_some() => _ = refused.fetch_add(1, Ordering::Relaxed),
                            Err(_) => {}
                        }
                        while held.len() > 40 + (random % 20) as usize {
                            let charge = held.swap_remove((random % 40) as usize);
                            outside.fetch_sub(charge.bytes(), Ordering::SeqCst);
                            drop(charge);
                        }
                    }
                    held.drain(..).for_each(|charge| _ = outside.fetch_sub(charge.bytes(), Ordering::SeqCst));
                })
            })
            .collect();
        let stop = &stop;
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                top.drain().unwrap();
                PROCESS.tick(0);
                top.set(Bound::High, UNLIMITED).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        stop.store(true, Ordering::Relaxed);
    });
    println!("{} charges were refused", refused.load(Ordering::Relaxed));
    assert_eq!((top.used(), outside.load(Ordering::Relaxed)), (Ok(0), 0));
    Group::ROOT.drain().unwrap();
    // A thread that was charging a group while it was deleted has counted there.
    until("that the deleted ones are gone", || count().unwrap().dying == 0);
    let info = top.info().unwrap();
    assert_eq!((info.charged, info.kinds), (0, [0; Kind::ALL.len()]));
    (0..4).for_each(|thread| _ = Group::find(&format!("storm/{thread}")).map(Group::delete));
    top.delete().unwrap();
    PROCESS.verify(0).unwrap();
    until("that nothing is left", || {
        let count = count().unwrap();
        count.dying == 0 && count.ids == count.live
    });
    PROCESS.verify(0).unwrap();
}

/// A future of a waiting charge, polled by hand: its task is woken by neap's thread, without a tick
/// of the program's.
#[test]
fn a_charge_that_waits_is_woken_by_neaps_thread() {
    let _alone = ALONE.lock().unwrap();
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
    let group = Group::create("waits").unwrap();
    group.set(Bound::Max, 1 << 20).unwrap();
    let mut held = Some(group.charge(1 << 20).unwrap());
    let waker = std::sync::Arc::new(Unpark(std::thread::current())).into();
    let mut context = core::task::Context::from_waker(&waker);
    let mut wait = group.request(4096).deadline(Duration::from_secs(600)).into_future();
    let mut polls = 0;
    let charge = loop {
        match core::pin::Pin::new(&mut wait).poll(&mut context) {
            core::task::Poll::Ready(answer) => break answer.unwrap(),
            core::task::Poll::Pending if polls == 0 => drop(held.take()),
            core::task::Poll::Pending => std::thread::park_timeout(Duration::from_secs(60)),
        }
        polls += 1;
        assert!(polls < 1000, "no thread wakes the task");
    };
    assert_eq!((charge.bytes(), group.used()), (4096, Ok(4096)));
    drop(charge);
    group.delete().unwrap();
}

/// neap's thread tells listeners of events, and of the end of the group.
#[test]
fn l13_events_arrive_before_group_deletion_notice_not_after() {
    let _alone = ALONE.lock().unwrap();
    static HEARD: Mutex<Vec<(u64, Option<Event>)>> = Mutex::new(Vec::new());
    let note = |context: usize, happened: neap::groups::EventDelta| {
        let (event, times) = happened.event.map_or((None, 1), |(event, times)| (Some(event), times));
        HEARD.lock().unwrap().push((context as u64 + times, event));
    };
    let top = Group::create("heard").unwrap();
    let child = Group::create("heard/child").unwrap();
    let heard = top.subscribe(&[Event::Refused, Event::LimitChanged], Listener::Callback(note, 100)).unwrap();
    child.set(Bound::Max, 1000).unwrap();
    let has = |event: Option<Event>| HEARD.lock().unwrap().iter().any(|(_, heard)| *heard == event);
    let wait = |event: Option<Event>| {
        let end = Instant::now() + Duration::from_secs(60);
        while !has(event) {
            assert!(Instant::now() < end, "{event:?} is not heard");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    wait(Some(Event::LimitChanged));
    assert!(!has(Some(Event::Refused)) && !has(None));
    assert!(child.charge(2000).is_err() && child.charge(3000).is_err());
    child.delete().unwrap();
    top.delete().unwrap();
    wait(None);
    assert!(has(Some(Event::Refused)), "what happened is heard before the end");
    assert_eq!(HEARD.lock().unwrap().last().unwrap(), &(101, None));
    drop(heard);
}
