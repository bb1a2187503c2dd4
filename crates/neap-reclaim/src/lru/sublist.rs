//! A sub-list: the items of one group on one node.
//!
//! The sub-list of a deleted group is *dead*: it has no items, and leads to its heir for items that
//! still name it. A thread that uses a sub-list is within a read of the groups' RCU domain, or
//! holds the registry's mutex.
//!
//! # Locking
//!
//! A sub-list's lock is taken before its heir's. Both are held only under the registry's mutex.

use super::chain::{Chain, Item};
use core::cell::Cell;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::AtomicU64;
use neap_base::Mutex;
use neap_base::mutex::Guard;
use neap_base::sync::{AtomicPtr, AtomicUsize, Ordering};
use neap_groups::GroupSlot;

/// Result of [`Sub::rename`].
pub(super) struct Renamed {
    /// Number of renamed items.
    pub(super) items: usize,
    /// Whether any item may still name the dead sub-list.
    pub(super) is_named: bool,
}

/// Items of one group on one node, on cache lines of their own.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Sub {
    chain: Mutex<Chain>,
    /// The heir of a dead sub-list; null for a live one.
    heir: AtomicPtr<Sub>,
    /// Number of items, written under the lock.
    count: AtomicUsize,
    /// Number of evictions, and of refaults.
    pub(super) evicted: AtomicU64,
    pub(super) refaults: AtomicU64,
    /// The address of its list, for comparison.
    list: NonNull<()>,
    /// Whether items may name this dead sub-list, or threads may have items in hands that were on
    /// it. Protected by the registry's mutex.
    pub(super) named: Cell<bool>,
}

// SAFETY: `list` is constant, and `named` is accessed under the registry's mutex alone. The other
// fields may be sent.
unsafe impl Send for Sub {}
// SAFETY: `list` is constant, and `named` is accessed under the registry's mutex alone. The other
// fields are atomic, or a mutex.
unsafe impl Sync for Sub {}

impl Sub {
    /// Creates an empty sub-list of a list, for a group.
    pub(super) fn new<L>(list: NonNull<L>, seat: GroupSlot) -> Sub {
        Sub {
            chain: Mutex::new(Chain::new(seat)),
            heir: AtomicPtr::new(null_mut()),
            count: AtomicUsize::new(0),
            evicted: AtomicU64::new(0),
            refaults: AtomicU64::new(0),
            list: list.cast(),
            named: Cell::new(false),
        }
    }

    /// Locks this sub-list, or the live one that this dead one leads to.
    pub(super) fn lock(&self) -> (&Sub, Guard<'_, Chain>) {
        let mut sub = self.live();
        loop {
            let chain = sub.chain.lock();
            match sub.heir() {
                None => return (sub, chain),
                Some(heir) => sub = heir,
            }
        }
    }

    /// Locks this sub-list, dead or not.
    pub(super) fn lock_this(&self) -> Guard<'_, Chain> {
        self.chain.lock()
    }

    /// Returns the sub-list that a dead one leads to.
    pub(super) fn heir(&self) -> Option<&Sub> {
        // SAFETY: the pointer is null, or leads to a sub-list of the heir's block. This block pins
        // the heir's, or began to wait for readers no later. So the heir's block is freed no
        // earlier than this one. Acquire pairs with the Release in `die`.
        unsafe { self.heir.load(Ordering::Acquire).as_ref() }
    }

    /// Returns the live sub-list at the end of the chain of heirs.
    pub(super) fn live(&self) -> &Sub {
        core::iter::successors(Some(self), |sub| sub.heir()).last().unwrap_or(self)
    }

    /// Makes this sub-list dead, with an heir. The caller holds the locks of both.
    fn die(&self, heir: &Sub) {
        // Pairs with the Acquire in `heir`.
        self.heir.store(core::ptr::from_ref(heir).cast_mut(), Ordering::Release);
    }

    /// Returns the number of items at this moment. It is stable under the lock.
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Sets the number of items. The caller holds the lock.
    pub(super) fn set_count(&self, count: usize) {
        debug_assert!(count == 0 || self.heir().is_none(), "a dead sub-list has no items");
        self.count.store(count, Ordering::Relaxed);
    }

    pub(super) fn is_of<L>(&self, list: NonNull<L>) -> bool {
        self.list == list.cast()
    }

    /// Moves all its items before those of `heir`, and makes `heir` its heir. Returns the number of
    /// moved items, and the group that has them now. The caller holds the registry's mutex.
    pub(super) fn hand_over(&self, heir: &Sub) -> (usize, GroupSlot) {
        let mut from = self.chain.lock();
        let mut to = heir.chain.lock();
        let moved = self.count();
        to.splice(&mut from);
        heir.set_count(heir.count() + moved);
        self.set_count(0);
        self.die(heir);
        self.named.set(moved > 0 || from.hands > 0);
        (moved, to.seat)
    }

    /// Takes off its oldest item. For a list that no thread uses any more.
    pub(super) fn take_oldest(&self) -> Option<NonNull<Item>> {
        let mut chain = self.lock_this();
        let oldest = chain.oldest()?;
        chain.unlink(oldest);
        Some(oldest)
    }

    /// Renames up to `most` items that may name a dead sub-list. The items are on the live sub-list
    /// that this dead one leads to, and name that live one afterwards.
    ///
    /// The caller holds the registry's mutex.
    pub(super) fn rename(&self, most: usize) -> Renamed {
        let in_hands = self.chain.lock().hands > 0;
        let (live, mut chain) = self.lock();
        let items = chain.rename(live, most);
        Renamed { items, is_named: in_hands || chain.stale().is_some() }
    }
}
