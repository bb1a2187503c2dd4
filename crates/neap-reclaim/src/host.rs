//! Services that lists and shrinkers need from the manager that they are part of. This module has
//! no state and no lock.

use core::ptr::NonNull;
use neap_base::gate::Inside;
use neap_groups::{GroupId, GroupSlot, Reclaimer};

/// The owner of lists and shrinkers: a manager, or a test.
pub trait Host: Reclaimer {
    /// Returns zeroed memory that begins on a cache line of its own and is charged to no group.
    /// Returns `None` if there is none. The implementation must not reclaim. The caller may hold a
    /// lock of this crate.
    fn memory(&self, inside: &Inside<'_>, bytes: usize) -> Option<NonNull<u8>>;

    /// Frees memory of [`Host::memory`].
    ///
    /// # Safety
    /// It came from [`Host::memory`], with this size, and no thread uses it any more.
    unsafe fn give_back(&self, inside: &Inside<'_>, memory: NonNull<u8>, bytes: usize);

    /// Marks that the group in `seat` has items on a node, for the shrinker with this id. The
    /// caller is within a read of the groups or under the tree's mutex. It holds no lock of a list.
    ///
    /// The implementation takes no lock under which a method of this trait is called.
    fn mark(&self, _: &Inside<'_>, _shrinker: u64, _seat: GroupSlot, _node: usize) {}

    /// Returns whether a group is in a slot and is not being deleted:
    /// [`Groups::is_online`](neap_groups::Groups::is_online).
    fn is_online(&self, _group: GroupId, _slot: u32) -> bool {
        true
    }

    /// Calls `hang` with the group that now has the items of `group`, and again with the heir if
    /// that group is deleted meanwhile: [`Groups::attach`](neap_groups::Groups::attach). If no
    /// heir of `group` is known, calls `hang` with every group. The caller is outside the fork
    /// gate.
    fn follow(&self, _group: GroupId, _hang: impl FnMut(&Inside<'_>, GroupSlot)) {}
}
