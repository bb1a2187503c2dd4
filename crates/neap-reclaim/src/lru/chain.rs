//! The items of a sub-list, oldest first, under its lock.
//!
//! Sits inside the sub-list's mutex, between items and those who add, take off and walk. What comes from a deleted group is put before all
//! others in one step, however many they are; those items go on naming the sub-list they were on, which leads here. So that it need
//! not stay for ever, they are renamed later, some at a time: from the last that may name another one, towards the oldest. All behind that
//! one name this sub-list, and nothing but a splice puts one that does not before it.

use super::block::Sub;
use super::item::Item;
use core::ptr::{NonNull, null_mut};
use neap_groups::Seat;

/// Which end of a list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// Where walks begin.
    Oldest,
    /// Where items are added.
    Newest,
}

/// The items, and the group that they are of.
#[derive(Debug)]
pub(super) struct Chain {
    oldest: *mut Item,
    newest: *mut Item,
    /// The newest that may name another sub-list than this; null: all name this.
    stale: *mut Item,
    /// The group whose the sub-list is.
    pub(super) seat: Seat,
    /// Walks that have items of this sub-list in hands and may put them back.
    pub(super) hands: usize,
}

// SAFETY: items may be sent, and those on a chain are its.
unsafe impl Send for Chain {}

/// The item at an address that a chain has.
fn item<'a>(at: *mut Item) -> Option<&'a Item> {
    // SAFETY: items on a chain are there: whoever added them has promised that.
    unsafe { at.as_ref() }
}

impl Chain {
    pub(super) const fn new(seat: Seat) -> Chain {
        Chain { oldest: null_mut(), newest: null_mut(), stale: null_mut(), seat, hands: 0 }
    }

    /// The oldest item.
    pub(super) fn oldest(&self) -> Option<NonNull<Item>> {
        NonNull::new(self.oldest)
    }

    /// The newest that may name another sub-list.
    pub(super) fn stale(&self) -> Option<NonNull<Item>> {
        NonNull::new(self.stale)
    }

    /// The one behind an item of this chain.
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

    /// Puts all items of another chain before those of this one. They go on naming their sub-list.
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

    /// Lets up to `most` items name `this` sub-list, whose the chain is; how many.
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
