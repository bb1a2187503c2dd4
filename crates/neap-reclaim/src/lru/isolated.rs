//! Items in hands: a thread takes items off a list during one hold of the lock, examines them
//! without the lock, and puts them back at either end.
//!
//! To examine an item, a caller may call functions that may do anything, which is not allowed under
//! a lock. While items of a sub-list are in hands, the sub-list exists even if its group is
//! deleted. It then leads to its heir, so the items are put back there.
//!
//! # Concurrency
//!
//! A thread that took items does not follow their links, which may belong to another thread:
//!
//! 1. A takes an item off, and names it as in hands.
//! 2. B lets it leave these hands, and puts it on another list.
//! 3. A would follow a link of that list.
//!
//! So A gets each item by the function `each`, under the lock, before the item is in hands.

use super::block;
use super::chain::{End, Item};
use super::list::{LruList, Put};
use super::registry::Site;
use super::sublist::Sub;
use crate::Host;
use core::ptr::NonNull;
use neap_groups::GroupId;

/// Maximum number of items that one call of [`LruList::take`] takes off.
pub const MOST: usize = 1024;

/// The right to put items back that [`LruList::take`] took off.
#[derive(Debug)]
pub struct Hands<'a, H: Host> {
    site: Site<'a, H>,
    list: LruList,
    sub: NonNull<Sub>,
    node: usize,
}

impl LruList {
    /// Takes up to `most` of the oldest items of a group on a node off the list, at most [`MOST`].
    /// Items of its descendants stay. Returns `None` if the group has none there.
    ///
    /// Calls `each` with every item, the oldest first. The caller then passes each item to
    /// [`Hands::put_back`] or [`Hands::keep`]. A thread that owns an item may withdraw it by
    /// [`Item::leave_hands`].
    ///
    /// # Safety
    /// * `each` runs under the sub-list's lock and inside the fork gate. It does not wait, allocate
    ///   or call this crate. It may only try a lock of the item's owner.
    /// * Items that are put back exist for as long as they are on the list.
    /// * No function that a walk calls under the lock calls this one.
    pub unsafe fn take<'a, H: Host>(
        self,
        site: &Site<'a, H>,
        group: GroupId,
        node: usize,
        most: usize,
        mut each: impl FnMut(NonNull<Item>),
    ) -> Option<Hands<'a, H>> {
        site.host.inside(|_| {
            let reading = site.groups.reading();
            let block = self.head().block(self.seat(site, &reading, group)?.slot)?;
            // SAFETY: the block was found within the read, which is held, so it is not freed.
            let sub = unsafe { block::sub(block, node) };
            let mut chain = sub.lock_this();
            if sub.heir().is_some() || sub.count() == 0 {
                return None;
            }
            chain.hands += 1;
            for _ in 0..most.min(MOST) {
                let Some(item) = chain.oldest() else { break };
                chain.unlink(item);
                sub.set_count(sub.count() - 1);
                each(item);
                // Here the item is accessed for the last time: from now on any thread may let it
                // go.
                // SAFETY: an item on a chain exists until it is taken off, by the contract of
                // `add`, and the lock is held.
                unsafe { item.as_ref() }.hand_out(Some(sub));
            }
            Some(Hands { site: *site, list: self, sub: NonNull::from(sub), node })
        })
    }
}

impl<H: Host> Hands<'_, H> {
    /// Releases an item from hands without putting it back. Returns false if [`Item::leave_hands`]
    /// released it before and it was not taken off the same sub-list again since.
    ///
    /// # Safety
    /// The item exists. The call of [`LruList::take`] that returned this has taken it off.
    pub unsafe fn keep(&self, item: NonNull<Item>) -> bool {
        // SAFETY: by this function's contract the item exists. The sub-list's block is pinned while
        // the sub-list counts hands.
        unsafe { item.as_ref().leave_hands_of(self.sub.as_ref()) }
    }

    /// Puts an item back. Returns false if [`Item::leave_hands`] released it before and it was not
    /// taken off the same sub-list again since.
    ///
    /// # Safety
    /// The call of [`LruList::take`] that returned this has taken the item off. The item exists for
    /// as long as it is on the list.
    pub unsafe fn put_back(&self, item: NonNull<Item>, end: End) -> bool {
        self.site.host.inside(|inside| {
            let _reading = self.site.groups.reading();
            // SAFETY: the sub-list's block is pinned while the sub-list counts hands.
            let sub = unsafe { self.sub.as_ref() };
            self.list.put(inside, &self.site, self.node, Put { item, end, sub, from: Some(sub) })
        })
    }
}

impl<H: Host> Drop for Hands<'_, H> {
    fn drop(&mut self) {
        self.site.host.inside(|_| {
            let _reading = self.site.groups.reading();
            // SAFETY: the sub-list's block is pinned until the count falls; after that the read,
            // which is held until the lock is released, keeps it.
            unsafe { self.sub.as_ref() }.lock_this().hands -= 1;
        });
    }
}
