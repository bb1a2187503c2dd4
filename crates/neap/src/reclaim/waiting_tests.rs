//! Tests of charges that wait for room while small objects are freed. Freed objects stay charged
//! while caches hold them, so the frees wake no waiter.
//!
//! The managers run on a virtual machine and have no thread. The tests advance the machine's clock.

use crate::mm::{Hooks, Mm};
use crate::options::Options;
use crate::reports::group_report::{self, ASK_WAITING, HEAD, REASONS, WAITING};
use core::future::Future;
use core::pin::pin;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use core::task::{Context, Poll, Waker};
use core::time::Duration;
use neap_base::Platform;
use neap_groups::{Bound, FOREVER, GroupId, Kind, Payer, Refusal, TICK_INTERVAL_NS, UNLIMITED};
use neap_testing::virtual_platform::Virtual;
use std::boxed::Box;
use std::thread;
use std::time::Instant;
use std::vec::Vec;

const MAX: u64 = 1 << 20;
const SIZE: usize = 1024;

/// A manager, and a group that is full of small objects.
struct Full {
    mm: Box<Mm<Virtual>>,
    group: GroupId,
    blocks: Vec<usize>,
}

impl Full {
    fn new() -> Full {
        let mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        let clock = Virtual::new(4096, 2);
        clock.advance(3_600_000_000_000);
        let options = Options { stat: false, background: crate::options::Background::Never, ..Options::DEFAULT };
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(clock, &options) }.unwrap();
        let groups = mm.groups().unwrap();
        let group = groups.create(GroupId::ROOT, "full").unwrap();
        groups.set_bound(group, Bound::Max, MAX).unwrap();
        Virtual::run_on(0);
        let before = mm.enter(Some(group));
        let blocks: Vec<usize> = (0..MAX as usize / SIZE).map(|_| mm.allocate(SIZE).expose_provenance()).collect();
        mm.leave(before);
        assert_eq!(groups.used(group), Ok(MAX));
        Full { mm, group, blocks }
    }

    fn clock(&self) -> &Virtual {
        &self.mm.core().unwrap().objects.platform
    }

    fn payer(&self) -> Payer {
        self.group.payer(Kind::ByHand, 0)
    }

    fn waiters(&self) -> usize {
        let grouped = self.mm.groups().unwrap();
        let inside = grouped.source().enter();
        let next = |from| grouped.groups().next_waiting(&inside, from);
        core::iter::successors(next(0), |(at, _)| next(at + 1)).count()
    }

    /// Frees everything.
    fn free(&self) {
        for &block in &self.blocks {
            // SAFETY: the block is this test's, and is freed once.
            unsafe { self.mm.free(core::ptr::with_exposed_provenance_mut(block)) };
        }
    }

    /// Lets a thread wait for all bytes that the limit allows, frees them meanwhile, and advances
    /// the clock. No thread ticks.
    fn free_for_thread(&self, deadline: u64) -> Result<(), Refusal> {
        let groups = self.mm.groups().unwrap();
        let (mut is_stuck, payer) = (false, self.payer());
        let answer = thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                Virtual::run_on(1);
                self.mm.groups().unwrap().charge_or_wait(payer, MAX, deadline)
            });
            while self.waiters() == 0 {
                thread::yield_now();
            }
            self.free();
            let end = Instant::now() + Duration::from_secs(60);
            while !waiting.is_finished() {
                self.clock().advance(TICK_INTERVAL_NS / 100);
                thread::sleep(Duration::from_millis(1));
                if Instant::now() > end {
                    is_stuck = true;
                    groups.set_bound(self.group, Bound::Max, UNLIMITED).unwrap();
                }
            }
            waiting.join().unwrap()
        });
        assert!(!is_stuck, "it waits for ever");
        answer
    }

    /// Lets a future wait for all bytes that the limit allows, frees them meanwhile, advances the
    /// clock by `pass`, and ticks. Returns the next poll.
    fn free_for_future(&self, deadline: u64, pass: u64) -> Poll<Result<u64, Refusal>> {
        Virtual::run_on(1);
        let groups = self.mm.groups().unwrap();
        let mut future = pin!(groups.charge_async(self.payer(), MAX, deadline));
        let mut poll = || future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(poll().is_pending());
        self.mm.tick(self.clock().now());
        assert!(poll().is_pending());
        self.free();
        assert_eq!((groups.used(self.group), groups.info(self.group).unwrap().charged), (Ok(0), MAX));
        self.clock().advance(pass);
        let tick = self.mm.tick(self.clock().now());
        assert!(tick.soon.is_some_and(|next| next <= TICK_INTERVAL_NS), "{tick:?}");
        poll()
    }

    /// Checks that the waiter was charged with everything.
    fn end(mut self) {
        let groups = self.mm.groups().unwrap();
        assert_eq!((groups.used(self.group), self.waiters()), (Ok(MAX), 0));
        groups.uncharge(self.payer(), MAX);
        groups.drain(self.group);
        assert_eq!(groups.info(self.group).unwrap().charged, 0);
        self.mm.verify(0).unwrap();
        // SAFETY: no thread uses the manager any more.
        unsafe { self.mm.close() };
    }
}

#[test]
fn a_thread_that_waits_sees_what_is_freed_into_caches() {
    let full = Full::new();
    assert_eq!(full.free_for_thread(FOREVER), Ok(()));
    full.end();
}

#[test]
fn a_thread_is_not_refused_what_was_freed_before_its_deadline() {
    let full = Full::new();
    let deadline = full.clock().now() + TICK_INTERVAL_NS / 5;
    assert_eq!(full.free_for_thread(deadline), Ok(()));
    full.end();
}

#[test]
fn report_tells_since_when_and_why_a_charge_waits() {
    let full = Full::new();
    let groups = full.mm.groups().unwrap();
    {
        let mut future = pin!(groups.charge_async(full.payer(), MAX, FOREVER));
        assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        full.clock().advance(7_000_000_000);
        let words: Vec<AtomicU64> = (0..HEAD + WAITING).map(|_| AtomicU64::new(0)).collect();
        group_report::write(&groups.source().enter(), Some(groups), None, ASK_WAITING, &words);
        let words: Vec<u64> = words.iter().map(|word| word.load(Relaxed)).collect();
        let room = REASONS.iter().position(|&reason| reason == "room").unwrap() as u64;
        let group = full.group.to_bits();
        assert_eq!(
            (&words[1..4], &words[HEAD..]),
            (&[1, u64::MAX, 2][..], &[group, group, room, MAX, 7_000_000_000, FOREVER][..])
        );
        full.free();
        full.clock().advance(TICK_INTERVAL_NS);
        full.mm.tick(full.clock().now());
        assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
    }
    full.end();
}

#[test]
fn a_tick_sees_what_is_freed_into_caches() {
    let full = Full::new();
    assert_eq!(full.free_for_future(FOREVER, TICK_INTERVAL_NS), Poll::Ready(Ok(0)));
    full.end();
}

#[test]
fn tick_at_deadline_grants_charge_from_earlier_frees() {
    let full = Full::new();
    let deadline = full.clock().now() + TICK_INTERVAL_NS / 5;
    assert_eq!(full.free_for_future(deadline, TICK_INTERVAL_NS / 5), Poll::Ready(Ok(0)));
    full.end();
}
