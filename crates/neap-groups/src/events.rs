//! Subscriptions to events of groups, by callback or eventfd.
//!
//! # Design
//!
//! An event can happen inside the fork gate, perhaps inside malloc, so it is only counted. The
//! group counts it as local, and each ancestor counts it as an event of a descendant. A sum over
//! descendants would lose the events of deleted groups. A subscription stores the counts that its
//! listener was told. [`Groups::deliver`] tells the listener the difference, outside the gate and
//! with no lock held. A callback may therefore do anything, such as end its subscription or delete
//! the group.
//!
//! When a group is deleted, its subscriptions store its final counts. Each listener is told these
//! counts, and then that the group is gone. After that it is told nothing, even if the group's slot
//! is reused.
//!
//! In a forked child, callbacks stay subscribed. Subscriptions by eventfd end there, since the
//! parent shares the eventfd.
//!
//! # Locking
//!
//! One mutex protects all subscriptions. It is taken before the tree's. A subscription is *running*
//! while a thread tells its listener. If the subscription is ended meanwhile, that thread frees it.
//! So [`Groups::unsubscribe`] waits for one callback at most.

use crate::group::{Event, Group, ROOT};
use crate::groups::{Groups, Reclaimer};
use crate::id::GroupId;
use crate::id_table::IdTarget;
use crate::table::{Entry, Table};
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use neap_base::gate::Inside;
use neap_base::mutex::Guard;
use neap_base::platform::Errno;
use neap_base::sync::me;
use neap_base::{Mutex, Platform};
use neap_os::event_fd;
use neap_os::futex::{self, Sharing};

/// Callback of a subscriber, which gets the subscriber's context and the event. It may do anything
/// but unwind.
pub type Callback = fn(context: usize, happened: EventDelta);

/// Way in which a subscriber is told.
#[derive(Clone, Copy, Debug)]
pub enum Listener {
    /// Call with this context, on the thread that delivers. Two threads never call it at the same
    /// time.
    Callback(Callback, usize),
    /// Add one to an eventfd with `EFD_NONBLOCK`, which must stay open until
    /// [`Groups::unsubscribe`] has returned.
    EventFd(i32),
}

/// News for a subscriber.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct EventDelta {
    /// The group that was subscribed to: the event happened to it or to a descendant.
    pub group: GroupId,
    /// The event, and how often it happened since the last news. `None`: the group was deleted, and
    /// no more news follow.
    pub event: Option<(Event, u64)>,
}

/// A subscription. It ends by [`Groups::unsubscribe`], or when the listener has been told that the
/// group is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Subscription {
    index: u32,
    generation: u32,
}

/// Reason for which no subscription was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotSubscribed {
    /// There is no such group, or it was deleted.
    NoSuchGroup,
    /// There is no memory for the subscription.
    NoMemory,
    /// The descriptor is not an eventfd.
    NoEventFd,
    /// The eventfd could block the telling thread: it lacks `EFD_NONBLOCK`.
    Blocking,
}

impl fmt::Display for NotSubscribed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NotSubscribed::NoSuchGroup => "there is no such group",
            NotSubscribed::NoMemory => "there is no memory for a subscription",
            NotSubscribed::NoEventFd => "the descriptor is not an eventfd",
            NotSubscribed::Blocking => "the eventfd could block: it lacks EFD_NONBLOCK",
        })
    }
}

impl core::error::Error for NotSubscribed {}

/// The group exists.
const LIVE: u32 = 0;
/// The group is gone; `seen` has the counts that are still to be delivered.
const ORPHANED: u32 = 1;
/// The subscription was ended, or has delivered all.
const ENDED: u32 = 2;

const fn bit(event: Event) -> u32 {
    1 << event as u32
}

/// An entry. All of it is read and written under the mutex, except that threads sleep on `turns`.
#[derive(Debug, Default)]
struct Subscriber {
    generation: AtomicU32,
    state: AtomicU32,
    /// [`GroupId`]; 0 for a free entry.
    group: AtomicU64,
    /// The wanted events, by [`Event`].
    mask: AtomicU32,
    /// Count of each event when it was last delivered.
    seen: [AtomicU64; Event::ALL.len()],
    /// Null for an eventfd.
    callback: AtomicPtr<()>,
    context: AtomicUsize,
    descriptor: AtomicI32,
    /// The thread that is telling it; 0 for none.
    running: AtomicUsize,
    /// Changes when that thread is done.
    turns: AtomicU32,
    /// The next subscription of the same group, or the next free entry, plus one.
    next: AtomicU32,
}

// SAFETY: all fields are atomic integers and pointers. Zeroed memory is valid for these, and they
// change only atomically.
unsafe impl Entry for Subscriber {}

impl Subscriber {
    fn group(&self) -> GroupId {
        GroupId::from_bits(self.group.load(Ordering::Relaxed))
    }

    fn is(&self, state: u32) -> bool {
        self.state.load(Ordering::Relaxed) == state
    }

    fn running(&self) -> usize {
        self.running.load(Ordering::Relaxed)
    }

    fn listener(&self) -> Listener {
        let callback = self.callback.load(Ordering::Relaxed);
        if callback.is_null() {
            return Listener::EventFd(self.descriptor.load(Ordering::Relaxed));
        }
        // SAFETY: `subscribe` stored a valid `Callback` in this word, or null, which was excluded.
        // The caller holds the mutex, so the word belongs to this subscription.
        let callback = unsafe { core::mem::transmute::<*mut (), Callback>(callback) };
        Listener::Callback(callback, self.context.load(Ordering::Relaxed))
    }

    /// Returns how often `event` has happened since it was last told, and counts that as told.
    fn take(&self, event: Event, counted: Option<&Group>) -> u64 {
        let seen = &self.seen[event as usize];
        match counted {
            Some(group) => {
                let count = group.events(event);
                count.wrapping_sub(seen.swap(count, Ordering::Relaxed))
            }
            None => seen.swap(0, Ordering::Relaxed),
        }
    }

    /// Returns the next news. The last news is that the group is gone.
    fn next_news(&self, counted: Option<&Group>) -> Option<EventDelta> {
        let mask = self.mask.load(Ordering::Relaxed);
        let mut wanted = Event::ALL.into_iter().filter(|event| mask & bit(*event) != 0);
        let happened = wanted.find_map(|event| match self.take(event, counted) {
            0 => None,
            times => Some((event, times)),
        });
        if happened.is_none() {
            if !self.is(ORPHANED) {
                return None;
            }
            self.state.store(ENDED, Ordering::Relaxed);
        }
        Some(EventDelta { group: self.group(), event: happened })
    }
}

/// All subscriptions.
#[derive(Debug)]
pub(crate) struct Subscribers {
    table: Table<Subscriber>,
    lists: Mutex<FreeSubscriptions>,
    /// Whether an event happened to a group with subscribers that want it.
    marked: AtomicBool,
}

#[derive(Debug)]
pub(crate) struct FreeSubscriptions {
    /// The first free entry, plus one.
    free: u32,
    /// Number of entries that were ever used.
    fresh: u32,
}

impl Subscribers {
    pub(crate) fn new() -> Subscribers {
        let lists = FreeSubscriptions { free: 0, fresh: 0 };
        Subscribers { table: Table::new(), lists: Mutex::new(lists), marked: AtomicBool::new(false) }
    }

    /// Locks the subscriptions.
    pub(crate) fn lock<'a>(&'a self, _: &'a Inside<'_>) -> Guard<'a, FreeSubscriptions> {
        self.lists.lock()
    }

    /// Notes that there is something to deliver. Returns whether it was not noted yet.
    fn mark(&self) -> bool {
        // Release pairs with the Acquire in `deliver`: the thread that takes the mark sees the
        // counts.
        !self.marked.swap(true, Ordering::Release)
    }

    fn of(&self, subscription: Subscription) -> Option<&Subscriber> {
        let is_it = |entry: &&Subscriber| entry.generation.load(Ordering::Relaxed) == subscription.generation;
        self.table.get(subscription.index).filter(is_it)
    }

    /// Returns the subscriptions of a group, with their indexes. The caller holds the mutex.
    fn of_group<'s>(&'s self, group: &Group) -> impl Iterator<Item = (u32, &'s Subscriber)> {
        let follow = |link: u32| self.table.get(link.wrapping_sub(1)).map(|entry| (link - 1, entry));
        let first = follow(group.first_subscriber.load(Ordering::Relaxed));
        core::iter::successors(first, move |(_, entry)| follow(entry.next.load(Ordering::Relaxed)))
    }

    fn free(&self, lists: &mut FreeSubscriptions, index: u32, group: Option<&Group>) {
        let Some(entry) = self.table.get(index) else { return };
        if let Some(group) = group {
            let links = self.of_group(group).map(|(_, entry)| &entry.next);
            let link = core::iter::once(&group.first_subscriber)
                .chain(links)
                .find(|link| link.load(Ordering::Relaxed) == index + 1);
            link.inspect(|link| link.store(entry.next.load(Ordering::Relaxed), Ordering::Relaxed));
            let heard = self.of_group(group).fold(0, |heard, (_, entry)| heard | entry.mask.load(Ordering::Relaxed));
            group.heard.store(heard, Ordering::Relaxed);
        }
        entry.group.store(0, Ordering::Relaxed);
        entry.generation.fetch_add(1, Ordering::Relaxed);
        entry.next.store(lists.free, Ordering::Relaxed);
        lists.free = index + 1;
    }

    /// Keeps the final counts of a deleted group with its subscriptions. Returns whether there is
    /// something to deliver that was not noted yet.
    ///
    /// The caller has held the mutex since before it deleted the group.
    pub(crate) fn orphan(&self, _lists: &FreeSubscriptions, group: &Group) -> bool {
        let mut next = group.first_subscriber.swap(0, Ordering::Relaxed);
        let any = next != 0;
        group.heard.store(0, Ordering::Relaxed);
        while let Some(entry) = self.table.get(next.wrapping_sub(1)) {
            next = entry.next.load(Ordering::Relaxed);
            for event in Event::ALL {
                let left = entry.take(event, Some(group));
                entry.seen[event as usize].store(left, Ordering::Relaxed);
            }
            let _ = entry.state.compare_exchange(LIVE, ORPHANED, Ordering::Relaxed, Ordering::Relaxed);
        }
        any && self.mark()
    }

    pub(crate) fn each_mapping<P: Platform>(&self, platform: &P, each: &mut dyn FnMut(usize, usize)) {
        self.table.each_mapping(platform, each);
    }

    /// Unmaps the table of subscriptions.
    ///
    /// # Safety
    /// No thread uses a subscription any more, and the platform is the one that
    /// [`Groups::subscribe`] was called with.
    pub(crate) unsafe fn close<P: Platform>(&self, platform: &P) {
        // SAFETY: by this function's contract no thread has an entry, and the table grew on this
        // platform.
        unsafe { self.table.close(platform) };
    }
}

impl Groups {
    /// Counts an event of a group and its ancestors. If a subscriber wants it, requests a delivery.
    /// The caller may hold the tree's mutex.
    pub(crate) fn tell<H: Reclaimer>(&self, inside: &Inside<'_>, host: &H, group: &Group, event: Event) {
        let parent = group.parent.load(Ordering::Relaxed);
        let mut is_heard = false;
        let above = self.tree.upwards(parent).map(|(_, above)| (above, false));
        for (group, is_local) in core::iter::once((group, true)).chain(above) {
            group.count_event(event, is_local);
            is_heard |= group.heard.load(Ordering::Relaxed) & bit(event) != 0;
        }
        if is_heard && self.subscribers.mark() {
            host.request_tick(inside);
        }
    }

    /// Subscribes a listener to events of a group and its descendants that happen from now on, and
    /// to the group's end. Several events of one kind may be told as one.
    ///
    /// # Errors
    /// [`NotSubscribed`] gives the reason. No subscription exists then.
    pub fn subscribe<H: Reclaimer>(
        &self,
        host: &H,
        group: GroupId,
        events: &[Event],
        listener: Listener,
    ) -> Result<Subscription, NotSubscribed> {
        let (callback, context, descriptor) = match listener {
            Listener::Callback(callback, context) => (callback as *mut (), context, -1),
            Listener::EventFd(descriptor) => (core::ptr::null_mut(), 0, descriptor),
        };
        if callback.is_null() {
            event_fd::check(descriptor).map_err(|error| match error {
                Errno::WOULDBLOCK => NotSubscribed::Blocking,
                _ => NotSubscribed::NoEventFd,
            })?;
        }
        host.inside(|inside| {
            let mut lists = self.subscribers.lock(inside);
            let table = &self.subscribers.table;
            if lists.free == 0 {
                if lists.fresh == table.len() {
                    table.grow(host.platform()).map_err(|_| NotSubscribed::NoMemory)?;
                }
                // Uses a fresh entry like a freed one: its `next` is 0.
                lists.fresh += 1;
                lists.free = lists.fresh;
            }
            let index = lists.free - 1;
            let entry = table.get(index).ok_or(NotSubscribed::NoMemory)?;
            self.tree
                .with(group, |of| {
                    lists.free = entry.next.load(Ordering::Relaxed);
                    let mask = events.iter().fold(0, |mask, event| mask | bit(*event));
                    of.heard.fetch_or(mask, Ordering::Relaxed);
                    entry.mask.store(mask, Ordering::Relaxed);
                    entry.group.store(group.to_bits(), Ordering::Relaxed);
                    entry.state.store(LIVE, Ordering::Relaxed);
                    entry.callback.store(callback, Ordering::Relaxed);
                    entry.context.store(context, Ordering::Relaxed);
                    entry.descriptor.store(descriptor, Ordering::Relaxed);
                    entry.next.store(of.first_subscriber.swap(index + 1, Ordering::Relaxed), Ordering::Relaxed);
                    for (seen, event) in entry.seen.iter().zip(Event::ALL) {
                        seen.store(of.events(event), Ordering::Relaxed);
                    }
                })
                .map_err(|_| NotSubscribed::NoSuchGroup)?;
            Ok(Subscription { index, generation: entry.generation.load(Ordering::Relaxed) })
        })
    }

    /// Returns whether a listener of the root wants an event. Takes no lock.
    pub fn root_hears(&self, event: Event) -> bool {
        self.tree.group(ROOT).is_some_and(|root| root.heard.load(Ordering::Relaxed) & bit(event) != 0)
    }

    /// Ends a subscription, and returns whether it existed. After this has returned, no delivery to
    /// it begins.
    ///
    /// If another thread is telling the subscription at the moment, this waits for that thread
    /// alone. In the subscription's own callback it returns at once. If two running callbacks end
    /// each other's subscriptions, both wait for ever.
    pub fn unsubscribe<H: Reclaimer>(&self, host: &H, subscription: Subscription) -> bool {
        let mut was_there = false;
        while let Some((entry, turns)) = host.inside(|inside| {
            let mut lists = self.subscribers.lock(inside);
            let _reading = self.rcu.enter();
            let entry = self.subscribers.of(subscription)?;
            was_there = true;
            entry.state.store(ENDED, Ordering::Relaxed);
            match entry.running() {
                0 => {
                    let group = self.subscribed(entry);
                    self.subscribers.free(&mut lists, subscription.index, group);
                    None
                }
                runner if runner == me() => None,
                _ => Some((entry, entry.turns.load(Ordering::Relaxed))),
            }
        }) {
            futex::wait(&entry.turns, turns, None, Sharing::Process);
        }
        was_there
    }

    /// Returns the group of a subscription, while it exists. The caller holds the subscriptions'
    /// mutex.
    fn subscribed(&self, entry: &Subscriber) -> Option<&Group> {
        match self.tree.owners.behind(entry.group()) {
            Some(IdTarget::Group(slot)) => self.tree.group(slot),
            _ => None,
        }
    }

    /// Wakes the tasks of futures that have an answer, and delivers events. The caller must be
    /// outside the fork gate and hold no lock that callbacks or wakers may take.
    pub fn deliver<H: Reclaimer>(&self, host: &H) {
        self.wake(host);
        // Acquire pairs with the Release in `mark`.
        if !self.subscribers.marked.swap(false, Ordering::Acquire) {
            return;
        }
        let mut index = 0;
        while let Some((listener, happened)) = host.inside(|inside| self.next_news(inside, &mut index)) {
            let is_heard = match listener {
                Listener::Callback(callback, context) => {
                    callback(context, happened);
                    true
                }
                // If the descriptor was closed, the subscription ends: its number may be another
                // file's.
                Listener::EventFd(descriptor) => event_fd::tell(descriptor).is_ok(),
            };
            host.inside(|inside| self.has_told(inside, index, is_heard));
        }
    }

    /// Returns the next news and its listener, from the subscription at `index` on, and marks that
    /// subscription as running.
    fn next_news(&self, inside: &Inside<'_>, index: &mut u32) -> Option<(Listener, EventDelta)> {
        let _lists = self.subscribers.lock(inside);
        let _reading = self.rcu.enter();
        loop {
            let entry = self.subscribers.table.get(*index)?;
            if entry.group.load(Ordering::Relaxed) != 0 && !entry.is(ENDED) && entry.running() == 0 {
                let counted = self.subscribed(entry).filter(|_| entry.is(LIVE));
                if let Some(happened) = entry.next_news(counted) {
                    let listener = entry.listener();
                    if let Listener::EventFd(_) = listener {
                        // An eventfd is told once for all events.
                        while entry.is(LIVE) && entry.next_news(counted).is_some() {}
                    }
                    entry.running.store(me(), Ordering::Relaxed);
                    return Some((listener, happened));
                }
            }
            *index += 1;
        }
    }

    fn has_told(&self, inside: &Inside<'_>, index: u32, is_heard: bool) {
        let mut lists = self.subscribers.lock(inside);
        let _reading = self.rcu.enter();
        let Some(entry) = self.subscribers.table.get(index) else { return };
        entry.running.store(0, Ordering::Relaxed);
        entry.turns.fetch_add(1, Ordering::Relaxed);
        let ended = entry.is(ENDED);
        if ended || !is_heard {
            self.subscribers.free(&mut lists, index, self.subscribed(entry));
        }
        drop(lists);
        if ended {
            futex::wake(&entry.turns, i32::MAX as u32, Sharing::Process);
        }
    }

    /// In a forked child, frees ended subscriptions that other threads of the parent were telling,
    /// and all subscriptions by eventfd.
    pub(crate) fn forget_tellers(&self, inside: &Inside<'_>) {
        let mut lists = self.subscribers.lock(inside);
        let _reading = self.rcu.enter();
        let mut index = 0;
        while let Some(entry) = self.subscribers.table.get(index) {
            let runs_here = entry.running() == me();
            let is_there = entry.group.load(Ordering::Relaxed) != 0;
            if is_there && !runs_here {
                entry.running.store(0, Ordering::Relaxed);
                if entry.is(ENDED) || matches!(entry.listener(), Listener::EventFd(_)) {
                    self.subscribers.free(&mut lists, index, self.subscribed(entry));
                }
            }
            index += 1;
        }
    }
}
