//! Items, and the chain of a sub-list's items, oldest first. An *item* is the part of a cached
//! object that links the object into a list. It is *in hands* while a thread has taken it off
//! (`isolated.rs`).
//!
//! An item names the sub-list that it was put on, which leads to its heir once the group is
//! deleted. Taking it off therefore needs no group and no lookup. The links are protected by the
//! sub-list's lock; the name may be read without it.
//!
//! The items of a deleted group are put before all items of its heir in one step, however many they
//! are. They still name their previous sub-list, which leads to the heir. Later they are renamed,
//! some at a time, so that the previous sub-list can be freed. Renaming goes from the newest item
//! that may name another sub-list (`stale`) towards the oldest. All items that are newer than
//! `stale` name the heir.

use super::sublist::Sub;
use core::fmt;
use core::ptr::{NonNull, null, null_mut, without_provenance_mut};
use neap_base::constructor;
use neap_base::sync::{AtomicPtr, Ordering, UnsafeCell};
use neap_groups::GroupSlot;

/// Returns the name of an item in hands that was taken off the sub-list `of`. If `of` is null, the
/// item cannot be put back.
///
/// Two threads may have an item in hands one after the other, from different sub-lists. The names
/// differ, so the first thread cannot put back or release the item of the second.
fn in_hands(of: *const Sub) -> *mut Sub {
    of.map_addr(|address| address | 1).cast_mut()
}

/// Returns the name of an item in a walk's chain. The chain uses the item's link, so
/// [`Item::leave_hands`] has no effect on the item.
fn chained() -> *mut Sub {
    without_provenance_mut(2)
}

/// The part of an object that links it into a list. Zeroed memory is an item that is on no list. An
/// item must not move while it is on a list.
#[repr(C)]
pub struct Item {
    /// The sub-list that the item is on, or a dead one that leads to it; null if it is on none.
    name: AtomicPtr<Sub>,
    links: UnsafeCell<Links>,
}

/// The neighbours of an item.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    pub(super) next: *mut Item,
    pub(super) previous: *mut Item,
}

// SAFETY: the links are used only under the lock of the sub-list, or by the thread that took the
// item off. The name is atomic.
unsafe impl Sync for Item {}
// SAFETY: nothing in an item depends on the thread that made it.
unsafe impl Send for Item {}

impl Item {
    constructor! {
        /// Makes an item that is on no list.
        pub fn new() -> Item {
            let links = Links { next: null_mut(), previous: null_mut() };
            Item { name: AtomicPtr::new(null_mut()), links: UnsafeCell::new(links) }
        }
    }

    /// Returns whether it is on a list, or in the hands of a thread that has taken it off. If
    /// neither, the owner of the object may free it.
    pub fn is_linked(&self) -> bool {
        !self.name.load(Ordering::Acquire).is_null() // Pairs with the Release in `let_go`.
    }

    /// Takes the item out of the hands of the thread that took it off. Returns whether it was in
    /// hands. Afterwards it may be put on a list again.
    ///
    /// A walk's `dispose` may call this. Another thread may call it only if it keeps the object
    /// alive for as long as the thread that took the item off may access the item.
    pub fn leave_hands(&self) -> bool {
        let mut name = self.name.load(Ordering::Relaxed);
        while name.addr() & 1 != 0 {
            // AcqRel pairs with this and the other changes of `name`: the next owner uses the
            // links.
            match self.name.compare_exchange(name, null_mut(), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => name = now,
            }
        }
        false
    }

    /// Takes the item out of the hands that took it off `sub`. Returns whether it was in those
    /// hands.
    pub(super) fn leave_hands_of(&self, sub: &Sub) -> bool {
        // AcqRel: as in `leave_hands`.
        self.name.compare_exchange(in_hands(sub), null_mut(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Returns the sub-list that it names. Within a read that sub-list is not freed.
    pub(super) fn name(&self) -> Option<NonNull<Sub>> {
        // Pairs with the Release in `rename` and `claim`: the sub-list is initialised.
        let name = self.name.load(Ordering::Acquire);
        NonNull::new(name).filter(|_| name.addr().is_multiple_of(align_of::<Sub>()))
    }

    /// Makes the item name `sub`, before it is linked there. The caller holds the lock of `sub`.
    /// Returns false if the item is on a list, or in other hands.
    ///
    /// The item must be on no list, or in the hands that took it off `from`.
    pub(super) fn claim(&self, sub: &Sub, from: Option<&Sub>) -> bool {
        let before = from.map_or(null_mut(), |from| in_hands(from));
        // AcqRel: Acquire pairs with the Release of the thread that let go, Release with the
        // Acquire in `name`.
        let sub = core::ptr::from_ref(sub).cast_mut();
        self.name.compare_exchange(before, sub, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Makes the item name the heir `sub` of the sub-list that it names. The caller holds the lock
    /// of `sub`.
    pub(super) fn rename(&self, sub: &Sub) {
        // Pairs with the Acquire in `name`.
        self.name.store(core::ptr::from_ref(sub).cast_mut(), Ordering::Release);
    }

    /// Clears the item's name: it is on no list. The caller must not access the item after that.
    pub(super) fn let_go(&self) {
        // Pairs with the Acquire in `claim` and `is_linked`.
        self.name.store(null_mut(), Ordering::Release);
    }

    /// Marks the item as moved from a list to a walk's chain. The caller holds the sub-list's lock.
    pub(super) fn take(&self) {
        self.name.store(chained(), Ordering::Release); // Pairs with the Acquire in `name`.
    }

    /// Moves the item from a list to the caller's hands. The caller uses its links no more. The
    /// item may be put back to `to`, or to the heir of `to`.
    pub(super) fn hand_out(&self, to: Option<&Sub>) {
        let to = to.map_or(null(), core::ptr::from_ref);
        // Pairs with the Acquire in `leave_hands` and `claim`.
        self.name.store(in_hands(to), Ordering::Release);
    }

    /// Returns its neighbours. The caller holds the sub-list's lock, or has the item in its own
    /// chain.
    pub(super) fn links(&self) -> Links {
        // SAFETY: the caller has the sub-list's lock, or the item in a chain of its own. No other
        // thread uses the links then.
        self.links.with_mut(|links| unsafe { *links })
    }

    /// Changes its neighbours. The caller holds the sub-list's lock, or has the item in its own
    /// chain.
    pub(super) fn relink(&self, change: impl FnOnce(&mut Links)) {
        // SAFETY: the caller has the sub-list's lock, or the item in a chain of its own, so no
        // other thread uses the links. `change` does not use them by another way.
        self.links.with_mut(|links| change(unsafe { &mut *links }));
    }
}

impl Default for Item {
    fn default() -> Self {
        Item::new()
    }
}

impl fmt::Debug for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Item").field("linked", &self.is_linked()).finish_non_exhaustive()
    }
}

/// An end of a list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The end at which walks begin.
    Oldest,
    /// The end at which items are added.
    Newest,
}

/// The items, and their group.
#[derive(Debug)]
pub(super) struct Chain {
    oldest: *mut Item,
    newest: *mut Item,
    /// The newest item that may name another sub-list; null if all items name this one.
    stale: *mut Item,
    /// The group of the sub-list.
    pub(super) seat: GroupSlot,
    /// Number of walks that have items of this sub-list in hands and may put them back.
    pub(super) hands: usize,
}

// SAFETY: the items on a chain belong to it, and an `Item` may be sent.
unsafe impl Send for Chain {}

/// Returns the item at an address that a chain has; `None` for null.
fn item<'a>(at: *mut Item) -> Option<&'a Item> {
    // SAFETY: the pointer is null, or leads to an item on a chain. That exists until it is taken
    // off, by the contract of [`LruList::add`](super::LruList::add).
    unsafe { at.as_ref() }
}

impl Chain {
    pub(super) const fn new(seat: GroupSlot) -> Chain {
        Chain { oldest: null_mut(), newest: null_mut(), stale: null_mut(), seat, hands: 0 }
    }

    /// Returns the oldest item.
    pub(super) fn oldest(&self) -> Option<NonNull<Item>> {
        NonNull::new(self.oldest)
    }

    /// Returns the newest item that may name another sub-list.
    pub(super) fn stale(&self) -> Option<NonNull<Item>> {
        NonNull::new(self.stale)
    }

    /// Returns the next newer item of this chain.
    pub(super) fn after(&self, of: NonNull<Item>) -> Option<NonNull<Item>> {
        NonNull::new(item(of.as_ptr())?.links().next)
    }

    /// Puts an item that names this sub-list at an end.
    pub(super) fn push(&mut self, new: NonNull<Item>, end: End) {
        let new = new.as_ptr();
        let (next, previous) = match end {
            End::Oldest => (core::mem::replace(&mut self.oldest, new), null_mut()),
            End::Newest => (null_mut(), core::mem::replace(&mut self.newest, new)),
        };
        item(new).inspect(|item| {
            item.relink(|links| {
                links.next = next;
                links.previous = previous;
            });
        });
        match item(next) {
            Some(next) => next.relink(|links| links.previous = new),
            None => self.newest = new,
        }
        match item(previous) {
            Some(previous) => previous.relink(|links| links.next = new),
            None => self.oldest = new,
        }
    }

    /// Takes an item of this chain off.
    pub(super) fn unlink(&mut self, old: NonNull<Item>) {
        let Some(links) = item(old.as_ptr()).map(Item::links) else { return };
        match item(links.next) {
            Some(next) => next.relink(|other| other.previous = links.previous),
            None => self.newest = links.previous,
        }
        match item(links.previous) {
            Some(previous) => previous.relink(|other| other.next = links.next),
            None => self.oldest = links.next,
        }
        if self.stale == old.as_ptr() {
            self.stale = links.previous;
        }
    }

    /// Puts all items of another chain before those of this one. They still name their previous
    /// sub-list.
    pub(super) fn splice(&mut self, other: &mut Chain) {
        let (oldest, newest) = (other.oldest, other.newest);
        let (Some(_), Some(last)) = (item(oldest), item(newest)) else { return };
        last.relink(|links| links.next = self.oldest);
        match item(self.oldest) {
            Some(first) => first.relink(|links| links.previous = newest),
            None => self.newest = newest,
        }
        self.oldest = oldest;
        if self.stale.is_null() {
            self.stale = newest;
        }
        (other.oldest, other.newest, other.stale) = (null_mut(), null_mut(), null_mut());
    }

    /// Makes up to `most` items name `this` sub-list, which owns the chain. Returns their number.
    pub(super) fn rename(&mut self, this: &Sub, most: usize) -> usize {
        let mut renamed = 0;
        while let Some(stale) = item(self.stale).filter(|_| renamed < most) {
            stale.rename(this);
            self.stale = stale.links().previous;
            renamed += 1;
        }
        renamed
    }
}
