//! The items of a sub-list, oldest first, under its lock.
//!
//! The items of a deleted group are put before all other items in one step, however many they are.
//! They still name their previous sub-list, which leads here. They are renamed later, some at a
//! time, so that it can be freed: from the newest that may name another sub-list, towards the
//! oldest. All items behind that one name this sub-list, and only a splice puts others before it.

use super::block::Sub;
use super::item::Item;
use core::ptr::{NonNull, null_mut};
use neap_groups::Seat;

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
    /// The newest item that may name another sub-list; null: all name this one.
    stale: *mut Item,
    /// The group of the sub-list.
    pub(super) seat: Seat,
    /// Number of walks that have items of this sub-list in hands and may put them back.
    pub(super) hands: usize,
}

// SAFETY: the items on a chain belong to it, and an `Item` may be sent.
unsafe impl Send for Chain {}

/// Returns the item at an address that a chain has; `None` for null.
fn item<'a>(at: *mut Item) -> Option<&'a Item> {
    // SAFETY: null, or an item on a chain, which exists until it is taken off, by the contract of
    // [`LruList::add`](super::LruList::add).
    unsafe { at.as_ref() }
}

impl Chain {
    pub(super) const fn new(seat: Seat) -> Chain {
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

    /// Lets up to `most` items name `this` sub-list, which has the chain. Returns how many.
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
