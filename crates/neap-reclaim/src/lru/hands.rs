//! Items in hands: taken off in one hold of the lock, looked at without it, and put back where they were or at the other end.
//!
//! Sits between lists and whoever asks functions about items that may do anything, which no function may under a lock. While
//! somebody has items of a sub-list in hands it leads to its heir though its group is gone, so they come back to where its other items are.
//!
//! Whoever took them does not look at their links, which another may have already:
//! 1. A takes an item off, and names it as in hands; 2. B lets it leave these hands, and puts it on another list; 3. A would follow a link of that
//!    list's. So A hears of items under the lock, before they are in hands, and goes by what it was told.

use super::block::{self, Sub};
use super::chain::End;
use super::item::Item;
use super::list::LruList;
use super::registry::Site;
use crate::Host;
use core::ptr::NonNull;
use neap_groups::GroupId;

/// Items that one call of [`LruList::take`] takes off at most.
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
    /// Takes up to `most` of the oldest items of a group alone on a node off ([`MOST`] in one call), which are in the caller's hands then: to be put back by the answer, or
    /// to be let go by [`Item::leave_hands`], which is anybody's who keeps them there. `each` is told of them, oldest first. `None` where the
    /// group has nothing there.
    ///
    /// # Safety
    /// `each` is called as `isolate` of [`LruList::walk`] is. The items that are put back are there as [`LruList::add`] asks. Not called
    /// by a function that a walk calls under the lock.
    pub unsafe fn take<'a, H: Host>(
        self,
        site: &Site<'a, H>,
        group: GroupId,
        node: usize,
        most: usize,
        mut each: impl FnMut(NonNull<Item>),
    ) -> Option<Hands<'a, H>> {
        site.host.inside(|| {
            let reading = site.groups.reading();
            let block = self.head().block(self.seat(site, &reading, group)?.slot)?;
            // SAFETY: found within the reading.
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
                // The last look at it: from here on it is anybody's.
                // SAFETY: items on a chain are there.
                unsafe { item.as_ref() }.hand_out(Some(sub));
            }
            Some(Hands { site: *site, list: self, sub: NonNull::from(sub), node })
        })
    }
}

impl<H: Host> Hands<'_, H> {
    /// Keeps an item: it is in nobody's hands from now on. Answers whether that was done: not where [`Item::leave_hands`] was first, whatever
    /// became of it since.
    ///
    /// # Safety
    /// The item is there, one that was handed out with this.
    pub unsafe fn keep(&self, item: NonNull<Item>) -> bool {
        // SAFETY: as the caller promises; the sub-list does not go while it has items in hands.
        unsafe { item.as_ref().leave_hands_of(self.sub.as_ref()) }
    }

    /// Puts an item back; answers whether that was done: not where [`Item::leave_hands`] was first, whatever became of it since.
    ///
    /// # Safety
    /// The item is there, one that was handed out with this, and there as long as it is on the list.
    pub unsafe fn put_back(&self, item: NonNull<Item>, end: End) -> bool {
        self.site.host.inside(|| {
            let _reading = self.site.groups.reading();
            // SAFETY: it does not go while it is in hands.
            let sub = unsafe { self.sub.as_ref() };
            self.list.put(&self.site, sub, self.node, item, end, Some(sub))
        })
    }
}

impl<H: Host> Drop for Hands<'_, H> {
    fn drop(&mut self) {
        self.site.host.inside(|| {
            let _reading = self.site.groups.reading();
            // SAFETY: as above, and then not within the reading.
            unsafe { self.sub.as_ref() }.lock_this().hands -= 1;
        });
    }
}
