//! Waiting by real threads on Linux, with sequences where there are any, a thread that ticks on
//! request, and a small executor.

use crate::host::{Asked, Host, each_waiting};
use core::future::Future;
use core::pin::pin;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use core::task::{Context, Poll, Waker};
use core::time::Duration;
use neap_base::{Linux, Platform};
use neap_groups::{Bound, FOREVER, GroupId, Groups, Kind, OnLimit, Refusal, UNLIMITED};
use neap_percpu::{PerCpuData, Shape};
use neap_testing::random::{Random, number, seed};
use std::sync::Arc;
use std::task::Wake;
use std::thread::{self, Thread};

/// Time that a thread waits before it reports that it was forgotten, in nanoseconds.
const LONG: u64 = 60_000_000_000;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls a future until it is ready.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(answer) => return answer,
            Poll::Pending => thread::park(),
        }
    }
}

struct SetWhenDropped<'a>(&'a AtomicBool);

impl Drop for SetWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Runs `test` with groups on this machine, and a thread that comes on request, and every 20 ms.
fn with_groups(test: impl FnOnce(&Groups, Host<'_, Linux>)) {
    let linux = Linux::probe();
    let cpus = linux.cpus();
    let shape = Shape { span: 64 << 20, ..Shape::usual(cpus) };
    let data = PerCpuData::open(&linux, &shape, |_| 0, ()).unwrap();
    let asked = Asked::default();
    let host = Host::new(&linux, &data, &asked);
    let groups = Groups::open(&host).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let ticking = scope.spawn(|| {
            let mut turn = 0_u64;
            while !done.load(Relaxed) {
                turn += 1;
                if host.asked.come.swap(0, Relaxed) > 0 || turn.is_multiple_of(20) {
                    groups.tick(&host);
                    groups.deliver(&host);
                }
                thread::sleep(Duration::from_millis(1));
            }
        });
        {
            // Also if the test fails.
            let _done = SetWhenDropped(&done);
            test(&groups, host);
        }
        ticking.join().unwrap();
    });
    groups.drain(&host, GroupId::ROOT);
    groups.verify(&host).unwrap_or_else(|finding| panic!("{finding:?}"));
    assert_eq!(groups.info(&host, GroupId::ROOT).unwrap().charged, 0);
    each_waiting(&groups, &host, |waiting| panic!("{waiting:?}"));
    assert!((0..1000).any(|_| groups.tick(&host).is_none()), "there is always something to come for");
    // SAFETY: no thread uses them any more.
    unsafe { groups.close(&host) };
}

#[test]
fn all_waiting_threads_are_granted_and_no_limit_is_exceeded() {
    with_groups(|groups, host| {
        const MAX: u64 = 1 << 20;
        let (seed, turns) = (seed(), number("NEAP_STEPS", 2000));
        let top = groups.create(&host, GroupId::ROOT, "top").unwrap();
        groups.set_bound(&host, top, Bound::Max, MAX).unwrap();
        let leaves = [0, 1].map(|leaf| groups.create(&host, top, &format!("leaf{leaf}")).unwrap());
        groups.set_bound(&host, leaves[1], Bound::Max, MAX / 2).unwrap();
        let used = AtomicU64::new(0);
        // All of them wait at first.
        let everything = top.payer(Kind::ByHand, 0);
        groups.charge(&host, everything, MAX, OnLimit::Refuse).unwrap();
        thread::scope(|scope| {
            for number in 0..8 {
                let used = &used;
                scope.spawn(move || {
                    let mut random = Random(seed + number);
                    for turn in 0..turns {
                        let payer = leaves[random.below(2)].payer(Kind::ByHand, 0);
                        let most = if random.below(4) == 0 { MAX / 2 } else { 20_000 };
                        let bytes = 1 + random.below(most as usize) as u64;
                        let deadline = host.alone.platform.precise() + LONG;
                        let answer = if number % 2 == 0 {
                            groups.charge_or_wait(&host, payer, bytes, deadline)
                        } else {
                            block_on(groups.charge_async(host, payer, bytes, deadline))
                        };
                        assert_eq!(answer, Ok(0), "turn {turn} of thread {number}, {bytes} bytes");
                        let sum = used.fetch_add(bytes, SeqCst) + bytes;
                        assert!(sum <= MAX, "{sum} bytes of {MAX}");
                        if random.below(8) == 0 {
                            thread::yield_now();
                        }
                        used.fetch_sub(bytes, SeqCst);
                        groups.uncharge(&host, payer, bytes);
                    }
                });
            }
            let count = || {
                let mut count = 0;
                each_waiting(groups, &host, |_| count += 1);
                count
            };
            while count() < 8 {
                thread::yield_now();
            }
            groups.uncharge(&host, everything, MAX);
        });
    });
}

#[test]
fn a_storm_of_limits_deletes_and_cancels_leaves_nothing() {
    with_groups(|groups, host| {
        let (seed, turns) = (seed(), number("NEAP_STEPS", 2000));
        let [granted, refused, gone] = [const { AtomicU64::new(0) }; 3];
        thread::scope(|scope| {
            for number in 0..6 {
                let counts = [&granted, &refused, &gone];
                scope.spawn(move || {
                    let mut random = Random(seed + number);
                    let name = format!("g{}", number % 3);
                    for _ in 0..turns {
                        let id = groups.create(&host, GroupId::ROOT, &name);
                        let Ok(id) = id.or_else(|_| groups.find(&host, GroupId::ROOT, &name)) else { continue };
                        let payer = id.payer(Kind::ByHand, 0);
                        let max = if random.below(8) == 0 { UNLIMITED } else { random.below(1 << 20) as u64 };
                        if random.below(2) == 0 {
                            let _ = groups.set_bound(&host, id, Bound::Max, max);
                        }
                        let bytes = 1 + random.below(1 << 19) as u64;
                        let deadline = host.alone.platform.precise() + random.below(3_000_000) as u64;
                        let answer = match random.below(4) {
                            0 => groups.charge_or_wait(&host, payer, bytes, deadline),
                            1 => block_on(groups.charge_async(host, payer, bytes, deadline)),
                            2 => groups.charge(&host, payer, bytes, OnLimit::Refuse),
                            _ => {
                                let mut future = pin!(groups.charge_async(host, payer, bytes, FOREVER));
                                let mut context = Context::from_waker(Waker::noop());
                                match future.as_mut().poll(&mut context) {
                                    Poll::Ready(answer) => answer,
                                    // Given up, perhaps a moment after it was granted.
                                    Poll::Pending => {
                                        thread::yield_now();
                                        continue;
                                    }
                                }
                            }
                        };
                        let count = match answer {
                            Ok(_) => {
                                groups.uncharge(&host, payer, bytes);
                                0
                            }
                            Err(Refusal::Limit(_)) => 1,
                            Err(Refusal::Gone) => 2,
                        };
                        counts[count].fetch_add(1, Relaxed);
                        if random.below(6) == 0 {
                            let _ = groups.delete(&host, id);
                        }
                    }
                });
            }
        });
        let counts = [granted, refused, gone].map(AtomicU64::into_inner);
        // The number of deleted groups depends on scheduling.
        assert!(!counts[..2].contains(&0), "granted, refused, gone: {counts:?}");
        for name in ["g0", "g1", "g2"] {
            let _ = groups.find(&host, GroupId::ROOT, name).map(|id| groups.delete(&host, id));
        }
    });
}

#[test]
fn a_deadline_that_passed_is_a_refusal() {
    with_groups(|groups, host| {
        let id = groups.create(&host, GroupId::ROOT, "g").unwrap();
        let payer = id.payer(Kind::ByHand, 0);
        groups.set_bound(&host, id, Bound::Max, 1000).unwrap();
        groups.charge(&host, payer, 1000, OnLimit::Refuse).unwrap();
        for wait in [0, 30_000_000] {
            let deadline = host.alone.platform.precise() + wait;
            for answer in [
                groups.charge_or_wait(&host, payer, 1, deadline),
                block_on(groups.charge_async(host, payer, 1, deadline)),
            ] {
                assert!(matches!(answer, Err(Refusal::Limit(limit)) if limit.group == id && limit.need == 1));
                assert!(host.alone.platform.precise() >= deadline, "before its time");
            }
        }
        groups.uncharge(&host, payer, 1000);
    });
}
