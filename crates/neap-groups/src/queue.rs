//! Queues of waiters: each waiter has an entry in a table. It is queued at the group that has no
//! room, oldest first.
//!
//! # Design
//!
//! An entry belongs to one thread or future, which names it by index and generation. An entry is in
//! at most one list: the queue of a group's slot, or the list of entries with a waker to be called.
//! The thread that admits a waiter charges the waiter's bytes at once, so no other thread can take
//! the room.
//!
//! # Locking
//!
//! One mutex protects all entries and lists. No thread holds it while it calls or drops a waker.

use crate::group::{Group, NONE};
use crate::id::Payer;
use crate::table::{Entry, FIRST, Table};
use crate::tree::Tree;
use core::mem::{ManuallyDrop, offset_of};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use core::task::{RawWakerVTable, Waker};
use neap_base::gate::Inside;
use neap_base::mutex::Guard;
use neap_base::platform::Errno;
use neap_base::{Mutex, Platform};

/// Interval of [`Groups::tick`](crate::Groups::tick), if nothing is more urgent.
pub const TICK_INTERVAL_NS: u64 = 250_000_000;
/// Maximum time that a group still rests once another charge requests memory there.
pub(crate) const RENEWED_REST_NS_MAX: u64 = 8_000_000;

/// State of a waiter: the word that its thread sleeps on.
pub(crate) mod state {
    /// The entry has no owner.
    pub(crate) const FREE: u32 = 0;
    /// It waits.
    pub(crate) const WAITING: u32 = 1;
    /// The requested bytes were charged to it.
    pub(crate) const GRANTED: u32 = 2;
    /// It was refused. The answer is the group with the limit.
    pub(crate) const REFUSED: u32 = 3;
    /// Its group is gone.
    pub(crate) const GONE: u32 = 4;
    /// Its bytes were charged, and it is delayed above a `high` until its deadline.
    pub(crate) const HELD: u32 = 5;
    /// The entry is not a request: its thread is stalled in another way (`stall.rs`).
    pub(crate) const STALLED: u32 = 6;
}

/// Place of an entry with a waker to be called.
const DUE: u32 = NONE - 1;

/// An entry. A waiting thread reads `state` without the mutex. All other accesses hold the mutex.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    pub(crate) state: AtomicU32,
    generation: AtomicU32,
    /// The slot of the group that it is queued at, [`DUE`], or [`NONE`].
    place: AtomicU32,
    /// Links of a ring, or of the list of free entries.
    next: AtomicU32,
    previous: AtomicU32,
    /// Number of younger waiters that were admitted before it.
    pub(crate) passed: AtomicU32,
    /// Its age: the lowest is the oldest.
    ticket: AtomicU64,
    payer: AtomicU64,
    bytes: AtomicU64,
    deadline: AtomicU64,
    since: AtomicU64,
    pub(crate) answer: AtomicU64,
    /// Not 0 while groups count it as a stall.
    pub(crate) counts: AtomicU32,
    waker: AtomicPtr<()>,
    waker_vtable: AtomicPtr<RawWakerVTable>,
}

// SAFETY: all fields are atomic integers and pointers. Zeroed memory is valid for these, and they
// change only atomically.
unsafe impl Entry for Waiter {}

impl Waiter {
    pub(crate) fn ticket(&self) -> u64 {
        self.ticket.load(Ordering::Relaxed)
    }

    pub(crate) fn payer(&self) -> Payer {
        Payer::from_bits(self.payer.load(Ordering::Relaxed))
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns the deadline, by the platform's clock.
    pub(crate) fn deadline(&self) -> u64 {
        self.deadline.load(Ordering::Relaxed)
    }

    /// Returns the time when it was added, by the platform's clock.
    pub(crate) fn since(&self) -> u64 {
        self.since.load(Ordering::Relaxed)
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.state.load(Ordering::Relaxed) == state::WAITING
    }

    pub(crate) fn is_held(&self) -> bool {
        self.state.load(Ordering::Relaxed) == state::HELD
    }

    /// Returns whether it is a stall, and not a request.
    pub(crate) fn is_stalled(&self) -> bool {
        self.state.load(Ordering::Relaxed) == state::STALLED
    }

    /// Returns the slot of the group that it is queued at, or [`NONE`].
    pub(crate) fn place(&self) -> u32 {
        self.place.load(Ordering::Relaxed)
    }

    /// Replaces the waker by another one or none. The caller drops the old one without the mutex.
    pub(crate) fn replace_waker(&self, waker: Option<Waker>) -> Option<Waker> {
        let waker = waker.map(ManuallyDrop::new);
        let (data, vtable) = waker.map_or((null_mut(), null_mut()), |waker| {
            (waker.data().cast_mut(), core::ptr::from_ref(waker.vtable()).cast_mut())
        });
        let old = self.waker.swap(data, Ordering::Relaxed);
        let old_vtable = self.waker_vtable.swap(vtable, Ordering::Relaxed);
        // SAFETY: the pointer is null, or was made from the `'static` table of a waker in the last
        // call of this function.
        let old_vtable: Option<&'static RawWakerVTable> = unsafe { old_vtable.as_ref() };
        // SAFETY: both words are of one waker, since they are only swapped here, under the mutex.
        // That waker was not dropped (`ManuallyDrop`), and the swaps took it out, so no other call
        // finds it.
        old_vtable.map(|vtable| unsafe { Waker::new(old, vtable) })
    }

    fn has_waker(&self) -> bool {
        !self.waker_vtable.load(Ordering::Relaxed).is_null()
    }
}

/// Reference of an owner to its waiter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WaiterHandle {
    pub(crate) index: u32,
    generation: u32,
}

/// All waiters.
#[derive(Debug)]
pub(crate) struct Waiters {
    table: Table<Waiter>,
    lists: Mutex<WaiterLists>,
    /// Time of the last flush of caches for waiters, in the platform's nanoseconds.
    flushed: AtomicU64,
}

#[derive(Debug)]
struct WaiterLists {
    free: u32,
    /// The lowest index of an entry that was never used.
    fresh: u32,
    /// Number of entries in use for requests, and for stalls that are not requests.
    used: u32,
    stalled: u32,
    ticket: u64,
    /// The first entry with a waker to be called, plus one; 0 for none.
    due: AtomicU32,
    /// The last slot in the ring of groups that ask for memory, plus one; 0 for none.
    asking: AtomicU32,
}

impl WaiterLists {
    /// Returns the counter of the entries in use that are requests, or of those that are not, by
    /// state.
    fn of_state(&mut self, state: u32) -> &mut u32 {
        if state == state::STALLED { &mut self.stalled } else { &mut self.used }
    }
}

/// The queues, for a thread that holds their mutex.
pub(crate) struct Queues<'w> {
    table: &'w Table<Waiter>,
    tree: &'w Tree,
    lists: Guard<'w, WaiterLists>,
}

impl Waiters {
    pub(crate) fn new() -> Waiters {
        let lists = WaiterLists {
            free: NONE,
            fresh: 0,
            used: 0,
            stalled: 0,
            ticket: 0,
            due: AtomicU32::new(0),
            asking: AtomicU32::new(0),
        };
        Waiters { table: Table::new(), lists: Mutex::new(lists), flushed: AtomicU64::new(0) }
    }

    pub(crate) fn lock<'w>(&'w self, _: &'w Inside<'_>, tree: &'w Tree) -> Queues<'w> {
        Queues { table: &self.table, tree, lists: self.lists.lock() }
    }

    /// Returns the nanoseconds from `now` until caches are to be flushed again for waiters.
    pub(crate) fn flush_in(&self, now: u64) -> u64 {
        let flushed = self.flushed.load(Ordering::Relaxed);
        TICK_INTERVAL_NS.saturating_sub(now.saturating_sub(flushed))
    }

    /// Records that caches are about to be flushed for waiters.
    pub(crate) fn note_flush(&self, now: u64) {
        self.flushed.store(now, Ordering::Relaxed);
    }

    /// Returns the entry at an index, even if its owner has changed.
    pub(crate) fn entry(&self, index: u32) -> Option<&Waiter> {
        self.table.get(index)
    }

    /// Returns names and values for readers of this process's memory: see
    /// [`Groups::waits_layout`](crate::Groups::waits_layout).
    pub(crate) fn memory_layout(&self) -> [(&'static str, usize); 12] {
        let at_waiters: *const u32 = &raw const self.lists.lock().fresh;
        [
            ("waiters_table", self.table.chunks_word().expose_provenance()),
            ("first_chunk", FIRST as usize),
            ("at_waiters", at_waiters.expose_provenance()),
            ("waiter_length", size_of::<Waiter>()),
            ("in_waiter_state", offset_of!(Waiter, state)),
            ("in_waiter_place", offset_of!(Waiter, place)),
            ("in_waiter_payer", offset_of!(Waiter, payer)),
            ("in_waiter_bytes", offset_of!(Waiter, bytes)),
            ("in_waiter_deadline", offset_of!(Waiter, deadline)),
            ("in_waiter_since", offset_of!(Waiter, since)),
            ("waiting", state::WAITING as usize),
            ("held", state::HELD as usize),
        ]
    }

    pub(crate) fn each_mapping<P: Platform>(&self, platform: &P, each: &mut dyn FnMut(usize, usize)) {
        self.table.each_mapping(platform, each);
    }

    /// Unmaps the table of waiters.
    ///
    /// # Safety
    /// No thread uses an entry any more, and the platform is the one that [`Queues::add`] was
    /// called with.
    pub(crate) unsafe fn close<P: Platform>(&self, platform: &P) {
        // SAFETY: by this function's contract no thread has an entry, and the table grew on this
        // platform.
        unsafe { self.table.close(platform) };
    }
}

impl<'w> Queues<'w> {
    pub(crate) fn tree(&self) -> &'w Tree {
        self.tree
    }

    /// Returns [`WaiterLists::asking`].
    pub(crate) fn last_asking(&self) -> &AtomicU32 {
        &self.lists.asking
    }

    /// Adds an entry with a state, as the youngest of all and in no queue. Begins its stall. The
    /// caller must be within a read.
    ///
    /// # Errors
    /// The error of the system if there is no memory.
    pub(crate) fn add<P: Platform>(
        &mut self,
        platform: &P,
        payer: Payer,
        bytes: u64,
        deadline: u64,
        state: u32,
    ) -> Result<WaiterHandle, Errno> {
        let lists = &mut *self.lists;
        let index = lists.free.min(lists.fresh);
        if index == self.table.len() {
            self.table.grow(platform)?;
        }
        let waiter = self.table.get(index).ok_or(Errno::NOMEM)?;
        if lists.free == NONE {
            lists.fresh += 1;
        } else {
            lists.free = waiter.next.load(Ordering::Relaxed);
        }
        *lists.of_state(state) += 1;
        debug_assert!(lists.used + lists.stalled <= lists.fresh, "more entries are in use than were ever added");
        lists.ticket += 1;
        for (word, value) in [
            (&waiter.ticket, lists.ticket),
            (&waiter.payer, payer.to_bits()),
            (&waiter.bytes, bytes),
            (&waiter.deadline, deadline),
            (&waiter.since, platform.precise()),
        ] {
            word.store(value, Ordering::Relaxed);
        }
        waiter.place.store(NONE, Ordering::Relaxed);
        waiter.passed.store(0, Ordering::Relaxed);
        waiter.state.store(state, Ordering::Relaxed);
        self.begin_stall(waiter);
        Ok(WaiterHandle { index, generation: waiter.generation.load(Ordering::Relaxed) })
    }

    /// Returns an owner's waiter; `None` in a forked child, which has none of its parent's.
    pub(crate) fn of(&self, handle: WaiterHandle) -> Option<&'w Waiter> {
        let is_it = |waiter: &&Waiter| waiter.generation.load(Ordering::Relaxed) == handle.generation;
        self.table.get(handle.index).filter(is_it)
    }

    pub(crate) fn get(&self, index: u32) -> Option<&'w Waiter> {
        self.table.get(index)
    }

    /// Returns the number of entries that were ever used.
    pub(crate) fn len(&self) -> u32 {
        self.lists.fresh
    }

    /// Returns the number of requests.
    pub(crate) fn count(&self) -> u32 {
        self.lists.used
    }

    /// Returns whether no entry is in use.
    pub(crate) fn is_empty(&self) -> bool {
        self.lists.used + self.lists.stalled == 0
    }

    /// Frees an entry, after taking it out of its list, and ends its stall. Returns its waker, for
    /// the caller to drop without the mutex. The caller must be within a read.
    pub(crate) fn free(&mut self, index: u32, now: u64) -> Option<Waker> {
        let waiter = self.table.get(index)?;
        self.withdraw(index);
        self.end_stall(waiter, now);
        *self.lists.of_state(waiter.state.swap(state::FREE, Ordering::Relaxed)) -= 1;
        waiter.generation.fetch_add(1, Ordering::Relaxed);
        waiter.next.store(self.lists.free, Ordering::Relaxed);
        self.lists.free = index;
        waiter.replace_waker(None)
    }

    fn ring(&self, place: u32) -> Option<&AtomicU32> {
        if place == DUE { Some(&self.lists.due) } else { self.tree.group(place).map(|group| &group.first_waiter) }
    }

    /// Takes a waiter out of the list that it is in, if any.
    pub(crate) fn withdraw(&self, index: u32) {
        let Some(waiter) = self.table.get(index) else { return };
        let Some(first) = self.ring(waiter.place.swap(NONE, Ordering::Relaxed)) else { return };
        let [next, previous] = [&waiter.next, &waiter.previous].map(|link| link.load(Ordering::Relaxed));
        if next == index {
            first.store(0, Ordering::Relaxed);
            return;
        }
        self.table.get(next).inspect(|entry| entry.previous.store(previous, Ordering::Relaxed));
        self.table.get(previous).inspect(|entry| entry.next.store(next, Ordering::Relaxed));
        if first.load(Ordering::Relaxed) == index + 1 {
            first.store(next + 1, Ordering::Relaxed);
        }
    }

    /// Puts a waiter that is in no list into a list, by its age. The list is [`DUE`], or the queue
    /// of the group in `slot`, which then asks for memory.
    pub(crate) fn queue(&self, index: u32, slot: u32) {
        let (Some(waiter), Some(first)) = (self.table.get(index), self.ring(slot)) else { return };
        waiter.place.store(slot, Ordering::Relaxed);
        if slot != DUE {
            self.ask_for(slot, RENEWED_REST_NS_MAX);
        }
        let Some(oldest) = first.load(Ordering::Relaxed).checked_sub(1) else {
            [&waiter.next, &waiter.previous].into_iter().for_each(|link| link.store(index, Ordering::Relaxed));
            return first.store(index + 1, Ordering::Relaxed);
        };
        // Most waiters are the youngest in the queue. A waiter from another group's queue may be
        // older.
        let is_younger = |other: u32| self.table.get(other).is_some_and(|other| other.ticket() > waiter.ticket());
        let follow = |link: fn(&Waiter) -> &AtomicU32, of: u32| {
            self.table.get(of).map_or(oldest, |entry| link(entry).load(Ordering::Relaxed))
        };
        let youngest = follow(|entry| &entry.previous, oldest);
        let mut next = oldest;
        if is_younger(youngest) {
            while !is_younger(next) {
                next = follow(|entry| &entry.next, next);
            }
            if next == oldest {
                first.store(index + 1, Ordering::Relaxed);
            }
        }
        let previous = follow(|entry| &entry.previous, next);
        for (entry, link, value) in [(index, 0, next), (index, 1, previous), (previous, 0, index), (next, 1, index)] {
            let entry = self.table.get(entry);
            entry.inspect(|entry| [&entry.next, &entry.previous][link].store(value, Ordering::Relaxed));
        }
    }

    /// Returns the oldest waiter in a group's queue.
    pub(crate) fn first(&self, group: &Group) -> Option<u32> {
        group.first_waiter.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Returns the next younger waiter in the queue.
    pub(crate) fn after(&self, index: u32) -> Option<u32> {
        let waiter = self.table.get(index)?;
        let next = waiter.next.load(Ordering::Relaxed);
        (next + 1 != self.ring(waiter.place())?.load(Ordering::Relaxed)).then_some(next)
    }

    /// Answers a waiter that is in no queue. Returns whether it has a waker that is to be called.
    pub(crate) fn conclude(&self, index: u32, state: u32, answer: u64) -> bool {
        let Some(waiter) = self.table.get(index) else { return false };
        waiter.answer.store(answer, Ordering::Relaxed);
        // Pairs with the Acquire of the sleeper in `charge_or_wait`.
        waiter.state.store(state, Ordering::Release);
        let due = waiter.has_waker();
        if due {
            self.queue(index, DUE);
        }
        due
    }

    /// Takes the next waker to be called, which the caller calls without the mutex.
    pub(crate) fn next_due(&self) -> Option<Waker> {
        let index = self.lists.due.load(Ordering::Relaxed).checked_sub(1)?;
        self.withdraw(index);
        self.table.get(index)?.replace_waker(None)
    }
}
