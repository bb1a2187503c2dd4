//! Subscribers of events: which are told, when, and when no more.

mod host;

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use core::time::Duration;
use host::{Asked, Host};
use neap_groups::{
    Bound, Event, EventDelta, GroupId, Groups, Kind, Listener, NotSubscribed, OnLimit, Subscription, UNLIMITED,
};
use neap_percpu::{PerCpuData, Shape};
use neap_testing::child::exit_code_of;
use neap_testing::virtual_platform::Virtual;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

const REFUSED: &[Event] = &[Event::Refused];

/// Runs `test` with groups on a virtual machine.
fn with_groups(test: impl FnOnce(&Groups, Host<'_, Virtual>)) {
    let machine = Virtual::new(4096, 4);
    let data = PerCpuData::open(&machine, &Shape { span: 16 << 20, ..Shape::usual(4) }, |_| 0, ()).unwrap();
    let asked = Asked::default();
    let host = Host::new(&machine, &data, &asked);
    let groups = Groups::open(&host).unwrap();
    test(&groups, host);
    groups.verify(&host).unwrap_or_else(|finding| panic!("{finding:?}"));
}

/// News that a callback was told.
#[derive(Default)]
struct Heard(Mutex<Vec<EventDelta>>);

impl Heard {
    fn listener(&self) -> Listener {
        Listener::Callback(
            |context, happened| {
                let heard = core::ptr::with_exposed_provenance::<Heard>(context);
                // SAFETY: the test ends the subscription before it drops this value.
                unsafe { &*heard }.0.lock().unwrap().push(happened);
            },
            core::ptr::from_ref(self).expose_provenance(),
        )
    }

    fn take(&self) -> Vec<EventDelta> {
        core::mem::take(&mut *self.0.lock().unwrap())
    }
}

fn group(groups: &Groups, host: &Host<Virtual>, parent: GroupId, name: &str) -> GroupId {
    let id = groups.create(host, parent, name).unwrap();
    groups.set_bound(host, id, Bound::Max, 1000).unwrap();
    id
}

/// Makes a charge that is refused at the group's own limit.
fn refuse(groups: &Groups, host: &Host<Virtual>, id: GroupId) {
    groups.charge(host, id.payer(Kind::ByHand, 0), 1001, OnLimit::Refuse).unwrap_err();
}

fn told(group: GroupId, event: Event, times: u64) -> EventDelta {
    EventDelta { group, event: Some((event, times)) }
}

fn gone(group: GroupId) -> EventDelta {
    EventDelta { group, event: None }
}

#[test]
fn events_are_told_once_with_how_often_and_to_those_above() {
    with_groups(|groups, host| {
        let top = group(groups, &host, GroupId::ROOT, "top");
        let leaf = group(groups, &host, top, "leaf");
        let [of_leaf, of_top, other] = [const { Heard(Mutex::new(Vec::new())) }; 3];
        refuse(groups, &host, leaf);
        let first = groups.subscribe(&host, leaf, REFUSED, of_leaf.listener()).unwrap();
        let second = groups.subscribe(&host, top, &Event::ALL, of_top.listener()).unwrap();
        let third = groups.subscribe(&host, leaf, &[Event::Low], other.listener()).unwrap();
        groups.deliver(&host);
        assert_eq!(of_leaf.take(), [], "what happened before");
        host.asked.come.store(0, Relaxed);
        (0..3).for_each(|_| refuse(groups, &host, leaf));
        assert_eq!(host.asked.come.load(Relaxed), 1, "to come is asked for once");
        assert_eq!((of_leaf.take(), of_top.take()), (vec![], vec![]), "told where it happened");
        groups.deliver(&host);
        assert_eq!(of_leaf.take(), [told(leaf, Event::Refused, 3)]);
        let drained = told(top, Event::Max, 3);
        assert_eq!(of_top.take(), [drained, told(top, Event::Refused, 3)]);
        groups.deliver(&host);
        groups.set_bound(&host, top, Bound::High, 10).unwrap();
        groups.set_bound(&host, GroupId::ROOT, Bound::High, 10).unwrap();
        groups.deliver(&host);
        assert_eq!((of_leaf.take(), of_top.take()), (vec![], vec![told(top, Event::LimitChanged, 1)]));
        assert!([first, second].map(|subscription| groups.unsubscribe(&host, subscription)) == [true; 2]);
        assert!(!groups.unsubscribe(&host, first), "a second time");
        host.asked.come.store(0, Relaxed);
        refuse(groups, &host, leaf);
        assert_eq!(host.asked.come.load(Relaxed), 0, "no listener wants it");
        groups.deliver(&host);
        assert_eq!((of_leaf.take(), of_top.take(), other.take()), (vec![], vec![], vec![]));
        assert!(groups.unsubscribe(&host, third));
        let refused = groups.subscribe(&host, GroupId::from_bits(0), REFUSED, other.listener());
        assert_eq!(refused, Err(NotSubscribed::NoSuchGroup));
    });
}

#[test]
fn local_events_exclude_those_below_and_sums_keep_deleted() {
    with_groups(|groups, host| {
        let top = group(groups, &host, GroupId::ROOT, "top");
        let leaf = group(groups, &host, top, "leaf");
        let counts = |id: GroupId| {
            let info = groups.info(&host, id).unwrap();
            [info.events, info.local_events].map(|events| events[Event::Refused as usize])
        };
        (0..3).for_each(|_| refuse(groups, &host, leaf));
        refuse(groups, &host, top);
        assert_eq!([leaf, top, GroupId::ROOT].map(counts), [[3, 3], [4, 1], [4, 0]]);
        // At the ancestor's limit, the charged group itself is not at one.
        groups.set_bound(&host, leaf, Bound::Max, UNLIMITED).unwrap();
        refuse(groups, &host, leaf);
        assert_eq!([leaf, top, GroupId::ROOT].map(counts), [[3, 3], [5, 2], [5, 0]]);
        groups.delete(&host, leaf).unwrap();
        groups.end_deleted(&host);
        assert_eq!([top, GroupId::ROOT].map(counts), [[5, 2], [5, 0]]);
        let next = group(groups, &host, top, "leaf");
        assert_eq!(counts(next), [0, 0], "also in the slot of a deleted group");
    });
}

/// Events that are delivered after their group is deleted: counts must be kept before the group's
/// memory is reused.
#[test]
fn l13_deleted_group_sends_no_event_after_gone() {
    with_groups(|groups, host| {
        let (old, new) = (Heard::default(), Heard::default());
        let id = group(groups, &host, GroupId::ROOT, "g");
        let before = groups.count(&host).slots;
        let subscription = groups.subscribe(&host, id, &[Event::Refused, Event::Max], old.listener()).unwrap();
        refuse(groups, &host, id);
        refuse(groups, &host, id);
        groups.delete(&host, id).unwrap();
        // Its slot gets another group before anything is delivered.
        while groups.tick(&host).is_some() {}
        let next = group(groups, &host, GroupId::ROOT, "g");
        assert_eq!(groups.count(&host).slots, before, "the slot was not used again");
        let second = groups.subscribe(&host, next, REFUSED, new.listener()).unwrap();
        (0..5).for_each(|_| refuse(groups, &host, next));
        groups.deliver(&host);
        assert_eq!(old.take(), [told(id, Event::Max, 2), told(id, Event::Refused, 2), gone(id)]);
        assert_eq!(new.take(), [told(next, Event::Refused, 5)]);
        refuse(groups, &host, next);
        groups.deliver(&host);
        assert_eq!((old.take(), new.take()), (vec![], vec![told(next, Event::Refused, 1)]));
        assert!(!groups.unsubscribe(&host, subscription), "it has ended");
        // A subscription that was ended before is not told of the end.
        refuse(groups, &host, next);
        groups.delete(&host, next).unwrap();
        assert!(groups.unsubscribe(&host, second));
        groups.deliver(&host);
        assert_eq!(new.take(), []);
    });
}

/// Argument of a callback that uses the groups.
struct Busy {
    groups: &'static Groups,
    host: Host<'static, Virtual>,
    own: Mutex<Option<Subscription>>,
    other: Heard,
    calls: AtomicU32,
}

#[test]
fn a_callback_may_end_itself_delete_its_group_and_subscribe() {
    let machine: &'static Virtual = Box::leak(Box::new(Virtual::new(4096, 4)));
    let shape = Shape { span: 16 << 20, ..Shape::usual(4) };
    let data: &'static PerCpuData = Box::leak(Box::new(PerCpuData::open(machine, &shape, |_| 0, ()).unwrap()));
    let host = Host::new(machine, data, Box::leak(Box::default()));
    let groups: &'static Groups = Box::leak(Box::new(Groups::open(&host).unwrap()));
    let (other, calls) = (Heard::default(), AtomicU32::new(0));
    let busy: &'static Busy = Box::leak(Box::new(Busy { groups, host, own: Mutex::new(None), other, calls }));
    let id = group(groups, &host, GroupId::ROOT, "g");
    let listener = Listener::Callback(
        |context, happened| {
            let busy = core::ptr::with_exposed_provenance::<Busy>(context);
            // SAFETY: it was leaked.
            let Busy { groups, host, own, other, calls } = unsafe { &*busy };
            calls.fetch_add(1, Relaxed);
            let own = own.lock().unwrap().take().unwrap();
            groups.subscribe(host, happened.group, REFUSED, other.listener()).unwrap();
            refuse(groups, host, happened.group);
            groups.deliver(host);
            assert!(groups.unsubscribe(host, own));
            groups.delete(host, happened.group).unwrap();
            groups.deliver(host);
            groups.tick(host);
        },
        core::ptr::from_ref(busy).expose_provenance(),
    );
    *busy.own.lock().unwrap() = Some(groups.subscribe(&host, id, &[Event::Max, Event::Refused], listener).unwrap());
    refuse(groups, &host, id);
    groups.deliver(&host);
    groups.deliver(&host);
    assert_eq!(busy.calls.load(Relaxed), 1, "called after it ended itself");
    assert_eq!(busy.other.take(), [told(id, Event::Refused, 1), gone(id)]);
}

/// A callback that reports that it runs, and waits for permission to return.
#[derive(Default)]
struct Gate {
    entered: AtomicBool,
    open: AtomicBool,
    left: AtomicBool,
}

impl Gate {
    fn listener(&self) -> Listener {
        Listener::Callback(
            |context, _| {
                let gate = core::ptr::with_exposed_provenance::<Gate>(context);
                // SAFETY: the test ends the subscription before it drops the gate.
                let gate = unsafe { &*gate };
                gate.entered.store(true, SeqCst);
                while !gate.open.load(SeqCst) {
                    thread::yield_now();
                }
                gate.left.store(true, SeqCst);
            },
            core::ptr::from_ref(self).expose_provenance(),
        )
    }
}

#[test]
fn unsubscribe_waits_for_own_callback_only() {
    with_groups(|groups, host| {
        let id = group(groups, &host, GroupId::ROOT, "g");
        let (slow, other) = (Gate::default(), Heard::default());
        let running = groups.subscribe(&host, id, REFUSED, slow.listener()).unwrap();
        let idle = groups.subscribe(&host, id, REFUSED, other.listener()).unwrap();
        refuse(groups, &host, id);
        thread::scope(|scope| {
            let telling = scope.spawn(|| groups.deliver(&host));
            while !slow.entered.load(SeqCst) {
                thread::yield_now();
            }
            // Another thread delivers meanwhile, but not to this subscription.
            refuse(groups, &host, id);
            groups.deliver(&host);
            assert_eq!(other.take(), [told(id, Event::Refused, 2)]);
            assert!(groups.unsubscribe(&host, idle));
            let ending = scope.spawn(|| {
                assert!(groups.unsubscribe(&host, running));
                assert!(slow.left.load(SeqCst), "its callback still ran");
            });
            for _ in 0..100 {
                thread::yield_now();
                assert!(!ending.is_finished());
            }
            slow.open.store(true, SeqCst);
            ending.join().unwrap();
            telling.join().unwrap();
        });
        slow.entered.store(false, SeqCst);
        refuse(groups, &host, id);
        groups.deliver(&host);
        assert!(!slow.entered.load(SeqCst) && other.take().is_empty());
    });
}

fn eventfd(flags: i32) -> i32 {
    // SAFETY: a call without pointers.
    unsafe { libc::eventfd(0, flags) }
}

/// Returns the number that was added to an eventfd since; 0 for none.
fn read(descriptor: i32) -> u64 {
    let mut count = 0_u64;
    // SAFETY: the buffer has eight bytes.
    let read = unsafe { libc::read(descriptor, (&raw mut count).cast(), 8) };
    if read == 8 { count } else { 0 }
}

#[test]
fn an_eventfd_is_told_once_for_all_and_never_blocks() {
    with_groups(|groups, host| {
        let id = group(groups, &host, GroupId::ROOT, "g");
        let subscribe = |descriptor| groups.subscribe(&host, id, &Event::ALL, Listener::EventFd(descriptor));
        let (blocking, descriptor) = (eventfd(0), eventfd(libc::EFD_NONBLOCK));
        assert_eq!(subscribe(blocking), Err(NotSubscribed::Blocking));
        assert_eq!((subscribe(-1), subscribe(0)), (Err(NotSubscribed::NoEventFd), Err(NotSubscribed::NoEventFd)));
        let subscription = subscribe(descriptor).unwrap();
        refuse(groups, &host, id);
        refuse(groups, &host, id);
        assert_eq!(read(descriptor), 0);
        groups.deliver(&host);
        groups.deliver(&host);
        assert_eq!(read(descriptor), 1);
        assert!(groups.unsubscribe(&host, subscription));
        refuse(groups, &host, id);
        groups.deliver(&host);
        assert_eq!(read(descriptor), 0);
        // A closed eventfd is not written to again.
        let closed = eventfd(libc::EFD_NONBLOCK);
        let subscription = subscribe(closed).unwrap();
        let last = subscribe(descriptor).unwrap();
        // SAFETY: the descriptor is the test's own.
        unsafe { libc::close(closed) };
        refuse(groups, &host, id);
        groups.deliver(&host);
        assert!(!groups.unsubscribe(&host, subscription), "it was kept");
        assert_eq!(read(descriptor), 1);
        groups.delete(&host, id).unwrap();
        groups.deliver(&host);
        assert_eq!(read(descriptor), 1, "that it is gone");
        assert!(!groups.unsubscribe(&host, last));
        // SAFETY: the descriptors are the test's own.
        let _ = [blocking, descriptor].map(|descriptor| unsafe { libc::close(descriptor) });
    });
}

#[test]
fn forked_child_runs_own_callbacks_and_skips_parent_eventfds() {
    with_groups(|groups, host| {
        let id = group(groups, &host, GroupId::ROOT, "g");
        let (heard, slow, descriptor) = (Heard::default(), Gate::default(), eventfd(libc::EFD_NONBLOCK));
        let first = groups.subscribe(&host, id, REFUSED, heard.listener()).unwrap();
        let second = groups.subscribe(&host, id, REFUSED, Listener::EventFd(descriptor)).unwrap();
        let third = groups.subscribe(&host, id, REFUSED, slow.listener()).unwrap();
        refuse(groups, &host, id);
        thread::scope(|scope| {
            let telling = scope.spawn(|| groups.deliver(&host));
            while !slow.entered.load(SeqCst) {
                thread::yield_now();
            }
            assert_eq!((heard.take(), read(descriptor)), (vec![told(id, Event::Refused, 1)], 1));
            let code = exit_code_of(|| {
                // SAFETY: this is the only thread of the child, and it is in no read.
                unsafe { groups.forget_others(&host) };
                assert!(groups.unsubscribe(&host, third), "it waits for a thread that is not there");
                refuse(groups, &host, id);
                groups.deliver(&host);
                assert_eq!((heard.take(), read(descriptor)), (vec![told(id, Event::Refused, 1)], 0));
                assert!(groups.unsubscribe(&host, first) && !groups.unsubscribe(&host, second));
                0
            });
            slow.open.store(true, SeqCst);
            telling.join().unwrap();
            assert_eq!(code, 0);
        });
        assert_eq!(read(descriptor), 0, "the child told its parent");
        assert!([first, second, third].map(|subscription| groups.unsubscribe(&host, subscription)) == [true; 3]);
        // SAFETY: the descriptor is the test's own.
        unsafe { libc::close(descriptor) };
    });
}

struct SetWhenDropped<'a>(&'a AtomicBool);

impl Drop for SetWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// A subscription of the storm: what it was told, and whether it may be told anything.
#[derive(Default)]
struct Ear {
    is_open: AtomicBool,
    is_gone: AtomicBool,
    inside: AtomicBool,
    heard: AtomicU64,
}

fn hear(context: usize, happened: EventDelta) {
    let ear = core::ptr::with_exposed_provenance::<Ear>(context);
    // SAFETY: these values are leaked.
    let ear = unsafe { &*ear };
    assert!(ear.is_open.load(SeqCst), "told after its end");
    assert!(!ear.is_gone.load(SeqCst), "told after it heard that the group is gone");
    assert!(!ear.inside.swap(true, SeqCst), "told by two at a time");
    match happened.event {
        Some((_, times)) => _ = ear.heard.fetch_add(times, SeqCst),
        None => ear.is_gone.store(true, SeqCst),
    }
    ear.inside.store(false, SeqCst);
}

#[test]
fn subscription_storm_loses_no_event_and_hears_none_late() {
    with_groups(|groups, host| {
        let (done, refusals) = (AtomicBool::new(false), AtomicU64::new(0));
        let open = || {
            let ear: &'static Ear = Box::leak(Box::default());
            ear.is_open.store(true, SeqCst);
            (ear, Listener::Callback(hear, core::ptr::from_ref(ear).expose_provenance()))
        };
        let (of_root, listener) = open();
        let of_all = groups.subscribe(&host, GroupId::ROOT, REFUSED, listener).unwrap();
        thread::scope(|scope| {
            let end = Instant::now() + Duration::from_secs(60);
            // Also if this fails.
            let ending = SetWhenDropped(&done);
            let delivering: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        while !done.load(SeqCst) {
                            groups.deliver(&host);
                            groups.tick(&host);
                        }
                    })
                })
                .collect();
            let storm: Vec<_> = (0..3)
                .map(|number| {
                    let (refusals, open) = (&refusals, &open);
                    scope.spawn(move || {
                        let (mut gone, mut ended) = (0, 0);
                        for turn in 0..300_u64 {
                            let id = group(groups, &host, GroupId::ROOT, &format!("{number}"));
                            let ears = [open(), open()];
                            let [first, second] =
                                ears.map(|(_, listener)| groups.subscribe(&host, id, &Event::ALL, listener).unwrap());
                            for _ in 0..1 + turn % 3 {
                                refuse(groups, &host, id);
                                refusals.fetch_add(1, SeqCst);
                            }
                            if groups.unsubscribe(&host, first) {
                                ended += 1;
                            }
                            ears[0].0.is_open.store(false, SeqCst);
                            groups.delete(&host, id).unwrap();
                            if turn % 2 == 0 {
                                // Lets a thread deliver the end.
                                while !ears[1].0.is_gone.load(SeqCst) {
                                    assert!(Instant::now() < end, "the end is never delivered");
                                    thread::yield_now();
                                }
                                let all = (1 + turn % 3) * 2;
                                assert_eq!(ears[1].0.heard.load(SeqCst), all, "an event was lost, or told twice");
                                gone += 1;
                            }
                            groups.unsubscribe(&host, second);
                            ears[1].0.is_open.store(false, SeqCst);
                        }
                        assert!(gone > 0 && ended > 0);
                    })
                })
                .collect();
            storm.into_iter().for_each(|thread| thread.join().unwrap());
            drop(ending);
            delivering.into_iter().for_each(|thread| thread.join().unwrap());
        });
        groups.deliver(&host);
        assert_eq!(of_root.heard.load(SeqCst), refusals.load(SeqCst));
        assert!(groups.unsubscribe(&host, of_all));
        groups.set_bound(&host, GroupId::ROOT, Bound::Max, UNLIMITED).unwrap();
    });
}
