//! What lists and shrinkers ask of whoever they are part of.
//!
//! Sits between this crate and the facade, or a test. No state, no locks.

use core::ptr::NonNull;
use neap_groups::{GroupId, Reclaimer, Seat};

/// Whoever lists and shrinkers are part of.
pub trait Host: Reclaimer {
    /// Zeroed memory that nobody is charged for, on a cache line of its own; `None`: there is none. Never reclaims; called inside the
    /// gate and perhaps under a lock of this crate's.
    fn memory(&self, bytes: usize) -> Option<NonNull<u8>>;

    /// Takes such memory back.
    ///
    /// # Safety
    /// It came from [`Host::memory`], with as many bytes, and nobody uses it any more.
    unsafe fn give_back(&self, memory: NonNull<u8>, bytes: usize);

    /// A group has something on a node now that a shrinker may be asked for: the one of a list, whose number is in `shrinker`. Called inside
    /// the gate and within a reading of the groups', or under the tree's mutex, but under no lock of a list. It takes no lock under which
    /// any of these is called.
    fn mark(&self, _shrinker: u64, _seat: Seat, _node: usize) {}

    /// Whether a slot is a group's, which is not about to leave it: [`Groups::is_seat`](neap_groups::Groups::is_seat).
    fn is_seat(&self, _group: GroupId, _slot: u32) -> bool {
        true
    }

    /// Calls `hang` with whoever has what is, or was, a group's, and again where that one leaves meanwhile:
    /// [`Groups::hang_on`](neap_groups::Groups::hang_on); where nobody knows who that is, with everybody who may be. Outside the gate.
    fn follow(&self, _group: GroupId, _hang: impl FnMut(Seat)) {}
}
