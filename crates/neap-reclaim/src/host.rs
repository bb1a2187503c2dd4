//! Services that lists and shrinkers need from the manager that they are part of. No state, no
//! locks.

use core::ptr::NonNull;
use neap_groups::{GroupId, GroupSlot, Reclaimer};

/// The owner of lists and shrinkers: a manager, or a test.
pub trait Host: Reclaimer {
    /// Returns zeroed memory on a cache line of its own, which is charged to no group; `None` if
    /// there is none. Never reclaims; called inside the fork gate and perhaps under a lock of this
    /// crate.
    fn memory(&self, bytes: usize) -> Option<NonNull<u8>>;

    /// Frees memory of [`Host::memory`].
    ///
    /// # Safety
    /// It came from [`Host::memory`], with this size, and no thread uses it any more.
    unsafe fn give_back(&self, memory: NonNull<u8>, bytes: usize);

    /// Marks that a group has items on a node, for the shrinker of a list with this number. Called
    /// inside the fork gate, and within a read of the groups or under the tree's mutex. No lock of
    /// a list is held.
    ///
    /// It takes no lock under which a method of this trait is called.
    fn mark(&self, _shrinker: u64, _seat: GroupSlot, _node: usize) {}

    /// Returns whether a slot is that of a group, which is not about to leave it:
    /// [`Groups::is_seat`](neap_groups::Groups::is_seat).
    fn is_seat(&self, _group: GroupId, _slot: u32) -> bool {
        true
    }

    /// Calls `hang` with the group that now has the items of `group`, and again if that one leaves
    /// meanwhile: [`Groups::hang_on`](neap_groups::Groups::hang_on). If it is unknown, calls `hang`
    /// with every group that may be the one. Called outside the fork gate.
    fn follow(&self, _group: GroupId, _hang: impl FnMut(GroupSlot)) {}
}
