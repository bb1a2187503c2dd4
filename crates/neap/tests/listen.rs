//! Closures that are told of events, and events that async programs wait for.

use core::pin::pin;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use core::task::{Context, Poll, Waker};
use core::time::Duration;
use neap::groups::{Bound, Event, EventDelta, Group};
use neap::process::PROCESS;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Wake;
use std::thread;
use std::time::Instant;

const LONG: Duration = Duration::from_secs(60);

/// A group that refuses a charge of two pages.
fn small(name: &str) -> Group {
    let group = Group::create(name).unwrap();
    group.set(Bound::Max, 4096).unwrap();
    group
}

fn refuse(group: Group) {
    assert!(group.charge(8192).is_err());
}

/// Refusals until `times` of them were told.
fn told(from: &Receiver<EventDelta>, times: u64) {
    let mut sum = 0;
    while sum < times {
        let happened = from.recv_timeout(LONG).unwrap();
        let Some((Event::Refused, number)) = happened.event else { panic!("{happened:?}") };
        sum += number;
    }
    assert_eq!(sum, times);
}

#[test]
fn closure_gets_events_of_group_and_subgroups_until_dropped() {
    let (group, other) = (small("heard/below"), small("unheard"));
    let (to, from) = channel();
    let counted = Arc::new(());
    let kept = counted.clone();
    let above = Group::find("heard").unwrap();
    let listening = above.listen(&[Event::Refused], move |happened| {
        let _ = (&kept, to.send(happened));
    });
    let listening = listening.unwrap();
    refuse(other);
    (0..3).for_each(|_| refuse(group));
    told(&from, 3);
    assert_eq!(Arc::strong_count(&counted), 2);
    drop(listening);
    assert_eq!(Arc::strong_count(&counted), 1, "the closure is dropped with its handle");
    refuse(group);
    PROCESS.tick(0);
    assert!(from.try_recv().is_err());
}

#[test]
fn a_closure_may_end_itself_and_lives_to_its_end() {
    struct Tells(Arc<AtomicBool>);
    impl Drop for Tells {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }
    let group = small("ends-itself");
    let (dropped, own) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None)));
    let (to, from) = channel();
    let (tells, mine) = (Tells(dropped.clone()), own.clone());
    let listening = group.listen(&[Event::Refused], move |_| {
        drop(mine.lock().unwrap().take());
        let _ = to.send(tells.0.load(Relaxed));
    });
    *own.lock().unwrap() = Some(listening.unwrap());
    refuse(group);
    assert!(!from.recv_timeout(LONG).unwrap(), "what the closure has is not dropped while it runs");
    let end = Instant::now() + LONG;
    while !dropped.load(Relaxed) {
        assert!(Instant::now() < end, "the closure is never dropped");
        thread::yield_now();
    }
}

#[test]
fn a_panic_ends_one_call() {
    let group = small("panics");
    let (to, from) = channel();
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let _listening = group
        .listen(&[Event::Refused], move |happened| {
            assert!(CALLS.fetch_add(1, Relaxed) > 0, "the first call panics");
            let _ = to.send(happened);
        })
        .unwrap();
    refuse(group);
    while CALLS.load(Relaxed) == 0 {
        PROCESS.tick(0);
    }
    refuse(group);
    told(&from, 1);
}

/// Wakes a thread.
struct Unpark(OnceLock<thread::Thread>, AtomicUsize);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.fetch_add(1, Relaxed);
        if let Some(thread) = self.0.get() {
            thread.unpark();
        }
    }
}

#[test]
fn events_wake_their_task_are_summed_up_and_end_with_the_group() {
    let group = small("events");
    let mut events = group.events(&[Event::Refused, Event::LimitChanged]).unwrap();
    let unpark = Arc::new(Unpark(OnceLock::from(thread::current()), AtomicUsize::new(0)));
    let waker = Waker::from(unpark.clone());
    let mut context = Context::from_waker(&waker);
    assert!(events.poll_next(&mut context).is_pending());
    {
        // A future that is dropped takes no event with it.
        let mut future = pin!(events.next());
        assert!(future.as_mut().poll(&mut context).is_pending());
        refuse(group);
        while unpark.1.load(Relaxed) == 0 {
            thread::park_timeout(LONG);
        }
    }
    (0..2).for_each(|_| refuse(group));
    let mut refused = 0;
    while refused < 3 {
        match events.poll_next(&mut context) {
            Poll::Ready(Some(EventDelta { event: Some((Event::Refused, number)), group: told })) => {
                assert_eq!(told, group.id());
                refused += number;
            }
            Poll::Pending => thread::park_timeout(LONG),
            other => panic!("{other:?}"),
        }
    }
    group.delete().unwrap();
    let last = loop {
        match events.poll_next(&mut context) {
            Poll::Ready(last) => break last,
            Poll::Pending => thread::park_timeout(LONG),
        }
    };
    assert!(last.is_some_and(|happened| happened.event.is_none()), "{last:?}");
    assert_eq!(events.poll_next(&mut context), Poll::Ready(None));
}
