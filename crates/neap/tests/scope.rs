//! Futures whose allocations are charged to a group, on any thread that polls them.
//!
//! Method: the tests' own executors poll a future by several threads in turn, or drop it at each of
//! its awaits.

use core::future::poll_fn;
use core::hint::black_box;
use core::pin::{Pin, pin};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use core::task::{Context, Poll, Waker};
use core::time::Duration;
use neap::groups::Group;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::task::Wake;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

const LONG: Duration = Duration::from_secs(60);

fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Returns a future that is pending once.
fn step() -> impl Future<Output = ()> {
    let mut is_over = false;
    poll_fn(move |context| {
        context.waker().wake_by_ref();
        if core::mem::replace(&mut is_over, true) { Poll::Ready(()) } else { Poll::Pending }
    })
}

/// Allocates one MiB in each step, frees one in each third step, and awaits in between. Asserts
/// that the held blocks are charged to `group`.
async fn work(group: Group, steps: usize) -> Vec<Vec<u8>> {
    let mut held = Vec::new();
    for number in 0..steps {
        held.push(black_box(vec![number as u8; 1 << 20]));
        assert!(group.used().unwrap() >= (held.len() as u64) << 20, "step {number}");
        step().await;
        if number % 3 == 2 {
            held.pop();
        }
        step().await;
    }
    held
}

struct Task {
    future: Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>,
    queue: Arc<Mutex<VecDeque<Arc<Task>>>>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let queue = self.queue.clone();
        queue.lock().unwrap().push_back(self);
    }
}

/// Asserts that an allocation of this thread, which must be in no group, is not charged to `group`.
fn outside_is_not_charged(group: Group) {
    let before = group.used().unwrap();
    let block = black_box(vec![1_u8; 4 << 20]);
    assert!(group.used().unwrap() < before + (4 << 20), "a poll has left its thread in the group");
    drop(block);
}

#[test]
fn a_scope_goes_with_its_future_from_thread_to_thread() {
    let queue: Arc<Mutex<VecDeque<Arc<Task>>>> = Arc::default();
    let (done, threads) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(Vec::new())));
    let groups: Vec<_> = (0..4).map(|at| Group::create(&format!("scopes/{at}")).unwrap()).collect();
    for &group in &groups {
        let (done, threads) = (done.clone(), threads.clone());
        let future = group.scope(async move {
            let held = work(group, 24).await;
            assert!(group.used().unwrap() >= (held.len() as u64) << 20);
            threads.lock().unwrap().push(std::thread::current().id());
            drop(held);
            done.fetch_add(1, Relaxed);
        });
        let task = Task { future: Mutex::new(Some(Box::pin(future))), queue: queue.clone() };
        queue.lock().unwrap().push_back(Arc::new(task));
    }
    let migrations = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let end = Instant::now() + LONG;
                while done.load(Relaxed) < 4 && Instant::now() < end {
                    let task = queue.lock().unwrap().pop_front();
                    let Some(task) = task else {
                        std::thread::yield_now();
                        continue;
                    };
                    let mut future = task.future.lock().unwrap();
                    let Some(running) = &mut *future else { continue };
                    migrations.fetch_add(1, Relaxed);
                    let waker = Waker::from(task.clone());
                    if running.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                        *future = None;
                    }
                }
            });
        }
    });
    assert_eq!(done.load(Relaxed), 4);
    assert!(migrations.load(Relaxed) >= 4 * 24);
    for group in groups {
        outside_is_not_charged(group);
        assert!(group.used().unwrap() < 1 << 20, "{group} has {}", group.used().unwrap());
    }
}

#[test]
fn a_scope_that_is_given_up_at_any_await_leaves_nothing() {
    let group = Group::create("given up").unwrap();
    for polls in 0..=2 * 6 + 1 {
        let mut future = Box::pin(group.scope(work(group, 6)));
        for number in 0..polls {
            // Each poll runs in a new thread.
            let future = &mut future;
            let is_ready = std::thread::scope(|scope| {
                let poll = scope.spawn(move || {
                    let is_ready = poll(future.as_mut()).is_ready();
                    outside_is_not_charged(group);
                    is_ready
                });
                poll.join().unwrap()
            });
            assert_eq!(is_ready, number == 2 * 6, "poll {number}");
        }
        drop(future);
        outside_is_not_charged(group);
        assert!(group.used().unwrap() < 1 << 20, "after {polls} polls: {}", group.used().unwrap());
    }
}

#[test]
fn a_scope_survives_its_group_nests_and_leaves_in_a_panic() {
    let [group, inner] = ["nests/outer", "nests/inner"].map(|path| Group::create(path).unwrap());
    let mut future = pin!(group.scope(async move {
        let first = black_box(vec![1_u8; 1 << 20]);
        step().await;
        let second = inner.scope(async { black_box(vec![1_u8; 2 << 20]) }).await;
        let third = black_box(vec![1_u8; 1 << 20]);
        (first, second, third)
    }));
    assert!(poll(future.as_mut()).is_pending());
    let Poll::Ready(blocks) = poll(future.as_mut()) else { panic!("it has one await") };
    assert!((2 << 20..3 << 20).contains(&group.used().unwrap()) && inner.used().unwrap() >= 2 << 20);
    drop(blocks);
    let panics = group.scope(async { panic!("in a scope") });
    let mut panics = Box::pin(panics);
    let caught =
        std::panic::catch_unwind(core::panic::AssertUnwindSafe(|| poll::<neap::groups::Scope<_>>(panics.as_mut())));
    assert!(caught.is_err());
    outside_is_not_charged(group);
    // After the deletion the heir is charged.
    let mut future = pin!(group.scope(async { black_box(vec![1_u8; 4 << 20]) }));
    group.delete().unwrap();
    let heir = Group::find("nests").unwrap();
    let before = heir.used().unwrap();
    let Poll::Ready(block) = poll(future.as_mut()) else { panic!("it has no await") };
    // What a CPU's stock of charges held may have gone back meanwhile.
    assert!(heir.used().unwrap() >= before + (3 << 20), "{} after {before}", heir.used().unwrap());
    drop(block);
}
