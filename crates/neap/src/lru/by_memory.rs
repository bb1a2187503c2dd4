//! Adding an item to an LRU list for the group that pays for the item's memory.

use super::{GroupError, Item, RawList, made};
use crate::groups::payers::payer_of_value;
use core::ptr::NonNull;
use neap_groups::GroupId;

/// Returns the group that pays for a value's memory, and the node of the charge. For memory without
/// a payer, returns the root and the node nearest to this thread.
///
/// The group may be deleted. Adding to a list then finds the heir.
pub(super) fn place_of<T: ?Sized>(value: &T) -> (GroupId, usize) {
    match payer_of_value(value) {
        Some(payer) => (payer.id(), payer.node()),
        None => (GroupId::ROOT, made().map_or(0, |listed| listed.grouped().node())),
    }
}

impl RawList {
    /// Adds an item as the newest of the group that pays for the item's memory, on the node of that
    /// charge. Memory without a [payer](crate::groups::payer_of) counts for the root, on the node
    /// nearest to this thread. Returns `false`, and changes nothing, if the item is on a list
    /// already.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`] if the process's groups were not made, so there is no list.
    ///
    /// # Safety
    /// Those of [`RawList::add`].
    pub unsafe fn add_by_memory(self, item: NonNull<Item>) -> Result<bool, GroupError> {
        let listed = made().ok_or(GroupError::NoSuchGroup)?;
        // SAFETY: the item is in place, and changes only atomically (the caller's promise).
        let (group, node) = place_of(unsafe { item.as_ref() });
        // SAFETY: the item stays in place until it is taken off, and no walk's callback calls this
        // under the lock (the caller's promise).
        unsafe { self.0.add(&listed.site(), group, node, item) }
    }
}
