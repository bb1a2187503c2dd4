//! [`Group::scope`] and charges under tokio: tasks migrate between threads, and end at any await.

use core::hint::black_box;
use core::pin::{Pin, pin};
use core::task::{Context, Poll};
use core::time::Duration;
use neap::groups::{Bound, Group, GroupHandle};
use std::collections::HashSet;
use std::sync::Mutex;
use std::thread::{self, ThreadId};
use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

const BLOCK: usize = 64 << 10;
const STEPS: usize = 12;

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap()
}

/// Allocates a block, charges as much by hand, and awaits, in each step. Asserts that both are
/// charged to the group. Notes the threads that it runs on.
async fn work(group: Group, threads: &'static Mutex<HashSet<ThreadId>>) {
    let mut held = Vec::new();
    for step in 1..=STEPS {
        let block = black_box(vec![step as u8; BLOCK]);
        held.push((block, group.request(BLOCK as u64).deadline(Duration::from_secs(60)).await.unwrap()));
        // A reading adds up the CPUs' counts one after the other. Another task's charge may be
        // taken on one CPU and given back on another meanwhile, and be seen as less than nothing.
        let least = (2 * held.len() * BLOCK) as u64;
        assert!((0..1000).any(|_| group.used().unwrap() >= least), "step {step}");
        threads.lock().unwrap().insert(thread::current().id());
        yield_now().await;
    }
}

/// The threads of a run, with room for all of them: what the tasks allocate is charged.
fn no_threads() -> &'static Mutex<HashSet<ThreadId>> {
    Box::leak(Box::new(Mutex::new(HashSet::with_capacity(16))))
}

/// Asserts that nothing of the tasks is charged any more, and that no thread of the runtime is left
/// in the group. tokio keeps some bytes that it allocated while it polled them.
fn settle(runtime: &Runtime, group: Group) {
    runtime.block_on(async {
        let probes = (0..30).map(|_| tokio::spawn(async move { black_box(vec![0_u8; BLOCK]).len() }));
        for probe in Vec::from_iter(probes) {
            assert_eq!(probe.await.unwrap(), BLOCK);
        }
    });
    assert!(group.used().unwrap() < BLOCK as u64, "{:?} bytes", group.used());
}

#[test]
fn what_a_task_allocates_is_charged_on_whichever_thread_it_runs() {
    let (runtime, group) = (runtime(), GroupHandle::create("migrating").unwrap());
    let (group, mut rounds) = (*group, 0);
    loop {
        let threads = no_threads();
        runtime.block_on(async {
            let tasks = (0..8).map(|_| tokio::spawn(group.scope(work(group, threads))));
            for task in Vec::from_iter(tasks) {
                task.await.unwrap();
            }
        });
        rounds += 1;
        if threads.lock().unwrap().len() > 1 {
            break;
        }
        assert!(rounds < 10_000, "tokio runs all tasks on one thread");
    }
    settle(&runtime, group);
}

/// Polls a future a number of times, and drops it then.
struct PolledAtMost<F> {
    future: Option<Pin<Box<F>>>,
    polls: usize,
}

impl<F: Future<Output = ()>> Future for PolledAtMost<F> {
    /// Whether the future ended by itself.
    type Output = bool;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<bool> {
        let Some(future) = self.future.as_mut() else { return Poll::Ready(false) };
        if pin!(future).poll(context).is_ready() {
            return Poll::Ready(true);
        }
        match self.polls.checked_sub(1) {
            Some(left) => {
                self.polls = left;
                Poll::Pending
            }
            None => {
                self.future = None;
                Poll::Ready(false)
            }
        }
    }
}

#[test]
fn a_task_that_is_cancelled_at_any_await_leaves_no_charge() {
    let (runtime, owned) = (runtime(), GroupHandle::create("cancelled").unwrap());
    let group = *owned;
    // Room for two tasks at once, so some charges wait while others are cancelled.
    group.set(Bound::Max, (5 * STEPS * BLOCK) as u64).unwrap();
    let (mut ended, mut polls) = (0, 0);
    while ended == 0 {
        assert!(polls < 1000, "no task of {STEPS} steps ended within {polls} polls");
        runtime.block_on(async {
            let threads = no_threads();
            let limited = |polls| PolledAtMost { future: Some(Box::pin(group.scope(work(group, threads)))), polls };
            let tasks = (0..2).map(|_| tokio::spawn(limited(polls)));
            for task in Vec::from_iter(tasks) {
                ended += usize::from(task.await.unwrap());
            }
        });
        settle(&runtime, group);
        polls += 1;
    }
    assert!(polls > STEPS, "{polls} polls");
}
