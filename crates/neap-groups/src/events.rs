//! Who is told what happens to a group: subscriptions, by callback or eventfd.
//!
//! Sits between what happens, inside the gate and perhaps inside malloc, and those who want to know. There an event is only counted, in the
//! group and all above it, so who subscribes to a group hears of all below it. A subscription knows the counts that it was told of; what has been counted since
//! is delivered by [`Groups::deliver`], outside the gate and with no lock held, however often it happened in one go. So a callback may do
//! anything, also end its subscription or delete the group.
//!
//! When a group is deleted, what was counted by then is kept with its subscriptions; after that they hear that it is gone, and then nothing
//! any more, whoever gets its slot. One mutex, which is taken before the tree's; a subscription is *running* while its callback is, and is freed
//! by who runs it, so ending one waits for that one alone.
//!
//! Fork: in a child, callbacks go on, and eventfds, which are the parent's as well, are told nothing.

use crate::group::{Event, Group};
use crate::groups::{Groups, Reclaimer};
use crate::id::GroupId;
use crate::owners::Behind;
use crate::table::{Entry, Table};
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use neap_base::mutex::Guard;
use neap_base::platform::Errno;
use neap_base::sync::me;
use neap_base::{Mutex, Platform};
use neap_os::event_fd;
use neap_os::futex::{self, Scope};

/// Called with what its subscriber left for it, and what happened. It may do anything but unwind.
pub type Callback = fn(context: usize, happened: Happened);

/// How a subscriber is told.
#[derive(Clone, Copy, Debug)]
pub enum Listener {
    /// By a call, with this number, on the thread that delivers. Never by two threads at a time.
    Callback(Callback, usize),
    /// By adding one to an eventfd with `EFD_NONBLOCK`, which stays open until [`Groups::unsubscribe`] has returned.
    EventFd(i32),
}

/// What is delivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Happened {
    /// The group that was subscribed to: it happened to it or to one below it.
    pub group: GroupId,
    /// What, and how often since the last time; `None`: the group was deleted, and there will be nothing more.
    pub event: Option<(Event, u64)>,
}

/// A subscription: ends with [`Groups::unsubscribe`], or when the group is gone and that was delivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Subscription {
    index: u32,
    generation: u32,
}

/// Why nobody is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotSubscribed {
    /// There is no such group, or it was deleted.
    NoSuchGroup,
    /// There is no memory for it.
    NoMemory,
    /// The descriptor is no eventfd.
    NoEventFd,
    /// The eventfd could block whoever tells: it lacks `EFD_NONBLOCK`.
    Blocking,
}

impl fmt::Display for NotSubscribed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NotSubscribed::NoSuchGroup => "there is no such group",
            NotSubscribed::NoMemory => "there is no memory for a subscription",
            NotSubscribed::NoEventFd => "the descriptor is no eventfd",
            NotSubscribed::Blocking => "the eventfd could block: it lacks EFD_NONBLOCK",
        })
    }
}

impl core::error::Error for NotSubscribed {}

/// The group is there.
const LIVE: u32 = 0;
/// It is gone; `seen` is what is still to be delivered.
const ORPHANED: u32 = 1;
/// Nobody wants to hear any more.
const ENDED: u32 = 2;

const fn bit(event: Event) -> u32 {
    1 << event as u32
}

/// An entry. All of it is read and written under the mutex, but for `turns`, which is slept on.
#[derive(Debug, Default)]
struct Subscriber {
    generation: AtomicU32,
    state: AtomicU32,
    /// [`GroupId`]; 0 for an entry that nobody has.
    group: AtomicU64,
    /// By [`Event`].
    mask: AtomicU32,
    /// How often each event had happened when it was last delivered.
    seen: [AtomicU64; Event::ALL.len()],
    /// Null: by the eventfd.
    callback: AtomicPtr<()>,
    context: AtomicUsize,
    descriptor: AtomicI32,
    /// Which thread is telling it at the moment; 0: none.
    running: AtomicUsize,
    /// Changes when that thread is done.
    turns: AtomicU32,
    /// The next of the same group, or the next that nobody has, plus one.
    next: AtomicU32,
}

// SAFETY: atomic numbers and pointers, of which 0 is one.
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
        // SAFETY: not null, so it was made from a callback, in `subscribe`.
        let callback = unsafe { core::mem::transmute::<*mut (), Callback>(callback) };
        Listener::Callback(callback, self.context.load(Ordering::Relaxed))
    }

    /// How often an event happened that is still to be told; it counts as told then.
    fn take(&self, event: Event, counted: Option<&Group>) -> u64 {
        let seen = &self.seen[event as usize];
        match counted {
            Some(group) => {
                let count = group.events[event as usize].load(Ordering::Relaxed);
                count.wrapping_sub(seen.swap(count, Ordering::Relaxed))
            }
            None => seen.swap(0, Ordering::Relaxed),
        }
    }

    /// What is to be delivered next. A group that is gone is the last of it.
    fn next_news(&self, counted: Option<&Group>) -> Option<Happened> {
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
        Some(Happened { group: self.group(), event: happened })
    }
}

/// All subscriptions.
#[derive(Debug)]
pub(crate) struct Subscribers {
    table: Table<Subscriber>,
    lists: Mutex<Lists>,
    /// Something happened to a group that somebody subscribed to.
    marked: AtomicBool,
}

#[derive(Debug)]
pub(crate) struct Lists {
    /// The first that nobody has, plus one.
    free: u32,
    /// Never used yet.
    fresh: u32,
}

impl Subscribers {
    pub(crate) fn new() -> Subscribers {
        let lists = Lists { free: 0, fresh: 0 };
        Subscribers { table: Table::new(), lists: Mutex::new(lists), marked: AtomicBool::new(false) }
    }

    /// Keeps subscriptions as they are.
    pub(crate) fn lock(&self) -> Guard<'_, Lists> {
        self.lists.lock()
    }

    /// Says that there is something to deliver; answers whether that is new.
    fn mark(&self) -> bool {
        // Release pairs with the Acquire in `deliver`: what was counted is seen by who takes the mark.
        !self.marked.swap(true, Ordering::Release)
    }

    fn of(&self, subscription: Subscription) -> Option<&Subscriber> {
        let is_it = |entry: &&Subscriber| entry.generation.load(Ordering::Relaxed) == subscription.generation;
        self.table.get(subscription.index).filter(is_it)
    }

    /// Those of a group, with their indexes. Under the mutex.
    fn of_group<'s>(&'s self, group: &Group) -> impl Iterator<Item = (u32, &'s Subscriber)> {
        let follow = |link: u32| self.table.get(link.wrapping_sub(1)).map(|entry| (link - 1, entry));
        let first = follow(group.first_subscriber.load(Ordering::Relaxed));
        core::iter::successors(first, move |(_, entry)| follow(entry.next.load(Ordering::Relaxed)))
    }

    fn free(&self, lists: &mut Lists, index: u32, group: Option<&Group>) {
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

    /// A group is gone: what was counted by now is all that its subscribers hear, and that it is gone. Answers whether there is anything to deliver that
    /// nobody knew of. Under the mutex since before it was deleted.
    pub(crate) fn orphan(&self, _lists: &Lists, group: &Group) -> bool {
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

    /// # Safety
    /// As for [`Table::close`].
    pub(crate) unsafe fn close<P: Platform>(&self, platform: &P) {
        // SAFETY: as the caller promises.
        unsafe { self.table.close(platform) };
    }
}

impl Groups {
    /// Counts an event of a group, and of those above it, and has it told to who subscribed. Inside the gate; perhaps under the tree's mutex.
    pub(crate) fn tell<H: Reclaimer>(&self, host: &H, group: &Group, event: Event) {
        let parent = group.parent.load(Ordering::Relaxed);
        let mut is_heard = false;
        for group in core::iter::once(group).chain(self.tree.upwards(parent).map(|(_, above)| above)) {
            group.events[event as usize].fetch_add(1, Ordering::Relaxed);
            is_heard |= group.heard.load(Ordering::Relaxed) & bit(event) != 0;
        }
        if is_heard && self.subscribers.mark() {
            host.come_soon();
        }
    }

    /// Has a listener told of events of a group and of those below it, from now on, and when it is gone. Several of one kind may be told as one.
    ///
    /// # Errors
    /// See [`NotSubscribed`].
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
        host.inside(|| {
            let mut lists = self.subscribers.lock();
            let table = &self.subscribers.table;
            if lists.free == 0 {
                if lists.fresh == table.len() {
                    table.grow(host.platform()).map_err(|_| NotSubscribed::NoMemory)?;
                }
                // As if somebody had given it up.
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
                    for (seen, count) in entry.seen.iter().zip(&of.events) {
                        seen.store(count.load(Ordering::Relaxed), Ordering::Relaxed);
                    }
                })
                .map_err(|_| NotSubscribed::NoSuchGroup)?;
            Ok(Subscription { index, generation: entry.generation.load(Ordering::Relaxed) })
        })
    }

    /// Ends a subscription; answers whether it was there. Nothing is delivered to it when this returns: where another thread is telling it at the moment, this
    /// waits for that, and for no other; in its own callback it returns at once. Two callbacks that end each other's wait for ever.
    pub fn unsubscribe<H: Reclaimer>(&self, host: &H, subscription: Subscription) -> bool {
        let mut was_there = false;
        while let Some((entry, turns)) = host.inside(|| {
            let mut lists = self.subscribers.lock();
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
            futex::wait(&entry.turns, turns, None, Scope::Process);
        }
        was_there
    }

    /// The group of a subscription, while it is there. Under the subscriptions' mutex.
    fn subscribed(&self, entry: &Subscriber) -> Option<&Group> {
        match self.tree.owners.behind(entry.group()) {
            Some(Behind::Group(slot)) => self.tree.group(slot),
            _ => None,
        }
    }

    /// Tells what there is to tell: wakes the tasks of futures that have their answer, and delivers events. Not inside the gate, and by somebody who holds
    /// nothing that these may want.
    pub fn deliver<H: Reclaimer>(&self, host: &H) {
        self.wake(host);
        // Acquire pairs with the Release in `mark`.
        if !self.subscribers.marked.swap(false, Ordering::Acquire) {
            return;
        }
        let mut index = 0;
        while let Some((listener, happened)) = host.inside(|| self.next_news(&mut index)) {
            let is_heard = match listener {
                Listener::Callback(callback, context) => {
                    callback(context, happened);
                    true
                }
                // Whoever closed it is told nothing more: its number may be another file's.
                Listener::EventFd(descriptor) => event_fd::tell(descriptor).is_ok(),
            };
            host.inside(|| self.has_told(index, is_heard));
        }
    }

    /// What is to be delivered next, to the subscriber of that index or one behind it, which is running then.
    fn next_news(&self, index: &mut u32) -> Option<(Listener, Happened)> {
        let _lists = self.subscribers.lock();
        let _reading = self.rcu.enter();
        loop {
            let entry = self.subscribers.table.get(*index)?;
            if entry.group.load(Ordering::Relaxed) != 0 && !entry.is(ENDED) && entry.running() == 0 {
                let counted = self.subscribed(entry).filter(|_| entry.is(LIVE));
                if let Some(happened) = entry.next_news(counted) {
                    let listener = entry.listener();
                    if let Listener::EventFd(_) = listener {
                        // It is told once, of everything.
                        while entry.is(LIVE) && entry.next_news(counted).is_some() {}
                    }
                    entry.running.store(me(), Ordering::Relaxed);
                    return Some((listener, happened));
                }
            }
            *index += 1;
        }
    }

    fn has_told(&self, index: u32, is_heard: bool) {
        let mut lists = self.subscribers.lock();
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
            futex::wake(&entry.turns, i32::MAX as u32, Scope::Process);
        }
    }

    /// In a forked child: nobody else is telling anybody. Inside the gate.
    pub(crate) fn forget_tellers(&self) {
        let mut lists = self.subscribers.lock();
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
