//! An item of a list: what an object has inside to be on one.
//!
//! Sits inside objects that are cached. It names the sub-list that it was put on, which leads to its heir once the group is deleted, so nobody has
//! to say, nor look up, which group an item is of to take it off. The links are whoever's who has the sub-list's lock; the name may be read without.

use super::block::Sub;
use core::fmt;
use core::ptr::{NonNull, null, null_mut, without_provenance_mut};
use neap_base::constructor;
use neap_base::sync::{AtomicPtr, Ordering, UnsafeCell};

/// What an item names that was taken off a sub-list, until somebody lets it go, or puts it back there; without one it cannot be put back. So of two that
/// had it in hands, one after the other, from different sub-lists, the first does nothing with it that is the second's to do.
fn in_hands(of: *const Sub) -> *mut Sub {
    of.map_addr(|address| address | 1).cast_mut()
}

/// The same while it is in a walk's chain, which leads over its link: nobody lets it go yet.
fn chained() -> *mut Sub {
    without_provenance_mut(2)
}

/// A part of an object, by which it is on a list. All zeroes are an item that is on none. On a list it stays where it is.
#[repr(C)]
pub struct Item {
    /// The sub-list that it is on, or one whose heir that is; null on none.
    name: AtomicPtr<Sub>,
    links: UnsafeCell<Links>,
}

/// The neighbours of an item.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    pub(super) next: *mut Item,
    pub(super) previous: *mut Item,
}

// SAFETY: the links are looked at under the lock of the sub-list alone, or by whoever took the item off.
unsafe impl Sync for Item {}
// SAFETY: it names no thread.
unsafe impl Send for Item {}

impl Item {
    constructor! {
        /// An item that is on no list.
        pub fn new() -> Item {
            let links = Links { next: null_mut(), previous: null_mut() };
            Item { name: AtomicPtr::new(null_mut()), links: UnsafeCell::new(links) }
        }
    }

    /// Whether it is on a list, or in the hands of a walk that has taken it off. Where it is not, whoever has the object may free it.
    pub fn is_linked(&self) -> bool {
        !self.name.load(Ordering::Acquire).is_null() // Pairs with the Release in `let_go`.
    }

    /// Ends that it is in hands, for the walk's `dispose`, or for somebody else who keeps the object there for as long as whoever took it off may
    /// look at it; answers whether it was. From then on it may be put on a list again. A walk's `dispose` gets it before anybody
    /// can do that.
    pub fn leave_hands(&self) -> bool {
        let mut name = self.name.load(Ordering::Relaxed);
        while name.addr() & 1 != 0 {
            // AcqRel pairs with itself and with the others here: the links are the next one's.
            match self.name.compare_exchange(name, null_mut(), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => name = now,
            }
        }
        false
    }

    /// The same, out of the hands that took it off a sub-list.
    pub(super) fn leave_hands_of(&self, sub: &Sub) -> bool {
        // AcqRel: as above.
        self.name.compare_exchange(in_hands(sub), null_mut(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// The sub-list that it names. Within a reading that stays there.
    pub(super) fn name(&self) -> Option<NonNull<Sub>> {
        let name = self.name.load(Ordering::Acquire); // Pairs with the Release in `rename` and `claim`: it is made.
        NonNull::new(name).filter(|_| name.addr().is_multiple_of(align_of::<Sub>()))
    }

    /// Names a sub-list, under whose lock it is about to be linked, unless somebody else has the item; from none, or out of the hands that took it
    /// off one.
    pub(super) fn claim(&self, sub: &Sub, from: Option<&Sub>) -> bool {
        let before = from.map_or(null_mut(), |from| in_hands(from));
        // AcqRel: Acquire pairs with the Release of whoever let go, Release with the Acquire in `name`.
        let sub = core::ptr::from_ref(sub).cast_mut();
        self.name.compare_exchange(before, sub, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Names a sub-list that is the heir of the one that is named. Under its lock.
    pub(super) fn rename(&self, sub: &Sub) {
        self.name.store(core::ptr::from_ref(sub).cast_mut(), Ordering::Release); // Pairs with the Acquire in `name`.
    }

    /// It is on no list any more, and the caller's last look at it.
    pub(super) fn let_go(&self) {
        self.name.store(null_mut(), Ordering::Release); // Pairs with the Acquire in `claim` and `is_linked`.
    }

    /// It is on no list any more, but in a walk's chain. Under the lock.
    pub(super) fn take(&self) {
        self.name.store(chained(), Ordering::Release); // Pairs with the Acquire in `name`.
    }

    /// It is on no list any more, but in the caller's hands, and this the last look at its links. It may be put back to `to`, or its heir.
    pub(super) fn hand_out(&self, to: Option<&Sub>) {
        let to = to.map_or(null(), core::ptr::from_ref);
        self.name.store(in_hands(to), Ordering::Release); // Pairs with the Acquire in `leave_hands` and `claim`.
    }

    /// Its neighbours. Under the lock of the sub-list, or in the caller's chain.
    pub(super) fn links(&self) -> Links {
        // SAFETY: whoever has the lock, or the item in a chain of its own, is alone with them.
        self.links.with_mut(|links| unsafe { *links })
    }

    /// Changes its neighbours. As for [`Item::links`].
    pub(super) fn relink(&self, change: impl FnOnce(&mut Links)) {
        // SAFETY: as above, and nothing in `change` comes back here.
        self.links.with_mut(|links| change(unsafe { &mut *links }));
    }
}

impl Default for Item {
    fn default() -> Self {
        Item::new()
    }
}

impl fmt::Debug for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Item").field("linked", &self.is_linked()).finish_non_exhaustive()
    }
}
