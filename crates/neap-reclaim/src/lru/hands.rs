//! Items in hands: taken off in one hold of the lock, looked at without it, and put back where they were or at the other end.
//!
//! Sits between lists and whoever asks functions about items that may do anything, which no function may under a lock. While
//! somebody has items of a sub-list in hands it leads to its heir though its group is gone, so they come back to where its other items are.

use super::block::{self, Sub};
use super::chain::End;
use super::item::Item;
use super::list::{LruList, Verdict, Walk};
use super::registry::Site;
use crate::Host;
use core::ptr::NonNull;
use neap_groups::GroupId;

/// The right to put items back that [`LruList::take`] took off.
#[derive(Debug)]
pub struct Hands<'a, H: Host> {
    site: Site<'a, H>,
    list: LruList,
    sub: NonNull<Sub>,
    node: usize,
}

impl LruList {
    /// Takes up to `most` of the oldest items of a group alone on a node off, and hands them to `each`, oldest first, with no lock
    /// held. They are the caller's then: to be put back by the answer, or to be kept and let go by [`Item::leave_hands`]. `None` where
    /// the group has nothing there.
    ///
    /// # Safety
    /// The items that are put back are there as [`LruList::add`] asks. Not called by a function that a walk calls under the lock.
    pub unsafe fn take<'a, H: Host>(
        self,
        site: &Site<'a, H>,
        group: GroupId,
        node: usize,
        most: usize,
        each: impl FnMut(NonNull<Item>),
    ) -> Option<Hands<'a, H>> {
        let mut walk = Walk::new(most);
        let hands = site.host.inside(|| {
            let reading = site.groups.reading();
            let block = self.head().block(self.seat(site, &reading, group)?.slot)?;
            // SAFETY: found within the reading.
            let sub = unsafe { block::sub(block, node) };
            let mut chain = sub.lock_this();
            if sub.heir().is_some() || sub.count() == 0 {
                return None;
            }
            chain.hands += 1;
            drop(chain);
            walk.over(sub, &mut |_| Verdict::Removed);
            Some(Hands { site: *site, list: self, sub: NonNull::from(sub), node })
        })?;
        walk.taken.for_each(each);
        Some(hands)
    }
}

impl<H: Host> Hands<'_, H> {
    /// Puts an item back; answers whether that was done: not where [`Item::leave_hands`] was first.
    ///
    /// # Safety
    /// The item is there, one that was handed out with this, and there as long as it is on the list.
    pub unsafe fn put_back(&self, item: NonNull<Item>, end: End) -> bool {
        self.site.host.inside(|| {
            let _reading = self.site.groups.reading();
            // SAFETY: it does not go while it is in hands.
            let sub = unsafe { self.sub.as_ref() };
            self.list.put(&self.site, sub, self.node, item, end, true)
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
