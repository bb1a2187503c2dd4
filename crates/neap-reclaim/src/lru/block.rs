//! The sub-lists of a list for one group, one for each node, in one piece of memory.
//!
//! Sits between a list, whose table leads to it by the group's slot, and the items, which name the sub-lists. Each has its lock on a cache line
//! of its own. A sub-list whose group was deleted is *dead*: it has no items and leads to its heir, for items that still name it. Who looks at
//! one holds a reading of the groups', or the registry's mutex. Locks: a sub-list's before its heir's, both under the registry's mutex, under
//! which nothing else does that.

use super::chain::Chain;
use super::item::Item;
use super::list::Head;
use crate::Host;
use core::cell::Cell;
use core::ptr::{NonNull, null_mut};
use neap_base::Mutex;
use neap_base::mutex::Guard;
use neap_base::sync::{AtomicPtr, AtomicUsize, Ordering};
use neap_groups::Seat;

/// Items of one group on one node, on cache lines of their own.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Sub {
    chain: Mutex<Chain>,
    /// Of a dead one.
    heir: AtomicPtr<Sub>,
    /// Items, written under the lock.
    count: AtomicUsize,
    list: NonNull<Head>,
    /// Of a dead one, and the registry's: items may name it, or a walk may have some in hands that were its.
    pub(super) named: Cell<bool>,
}

/// What stands before the sub-lists. All but the list and the number of nodes is the registry's.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Block {
    pub(super) list: NonNull<Head>,
    pub(super) nodes: usize,
    /// The slot in whose chain it is.
    pub(super) slot: Cell<u32>,
    /// The blocks of a group, of all lists; or dead ones that items still name; or those that wait for readers to go.
    pub(super) next: Cell<*mut Block>,
    pub(super) previous: Cell<*mut Block>,
    /// Of a dead one: the block of its heir, which is pinned by it.
    pub(super) heir: Cell<*mut Block>,
    /// Dead ones that lead to it, and, of a dead one, its sub-lists that are named.
    pub(super) pins: Cell<usize>,
}

// SAFETY: the rest is atomic, constant, or under the mutex.
unsafe impl Send for Sub {}
// SAFETY: as above.
unsafe impl Sync for Sub {}

impl Sub {
    /// Locks it, or the one that it leads to.
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

    /// Locks this one, dead or not.
    pub(super) fn lock_this(&self) -> Guard<'_, Chain> {
        self.chain.lock()
    }

    /// The one that a dead one leads to.
    pub(super) fn heir(&self) -> Option<&Sub> {
        // SAFETY: an heir goes no earlier than those that lead to it. Acquire pairs with the Release in `die`.
        unsafe { self.heir.load(Ordering::Acquire).as_ref() }
    }

    /// The one at the end of the way.
    pub(super) fn live(&self) -> &Sub {
        core::iter::successors(Some(self), |sub| sub.heir()).last().unwrap_or(self)
    }

    /// Leads to an heir from now on. Under the locks of both.
    fn die(&self, heir: &Sub) {
        self.heir.store(core::ptr::from_ref(heir).cast_mut(), Ordering::Release); // Pairs with the Acquire in `heir`.
    }

    /// Items, at this moment; without the lock they may be more or fewer the next.
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Under the lock.
    pub(super) fn set_count(&self, count: usize) {
        self.count.store(count, Ordering::Relaxed);
    }

    pub(super) fn is_of(&self, list: NonNull<Head>) -> bool {
        self.list == list
    }

    /// Gives all that it has to another sub-list, before what that has, and leads there from now on. Answers how many, and whose they are
    /// now. Under the registry's mutex.
    pub(super) fn hand_over(&self, heir: &Sub) -> (usize, Seat) {
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

    /// Takes its oldest item off, of a list that nobody uses any more.
    pub(super) fn take_oldest(&self) -> Option<NonNull<Item>> {
        let mut chain = self.lock_this();
        let oldest = chain.oldest()?;
        chain.unlink(oldest);
        Some(oldest)
    }

    /// Of a dead one: renames up to `most` of the items that may name it, or another one; how many, and whether it is named still. Under
    /// the registry's mutex.
    pub(super) fn rename(&self, most: usize) -> (usize, bool) {
        let in_hands = self.chain.lock().hands > 0;
        let (live, mut chain) = self.lock();
        let renamed = chain.rename(live, most);
        (renamed, in_hands || chain.stale().is_some())
    }
}

impl Block {
    /// Adds to what pins it.
    pub(super) fn pin(&self, more: isize) {
        self.pins.set(self.pins.get().wrapping_add_signed(more));
    }
}

/// Bytes of a block.
pub(super) fn bytes(nodes: usize) -> usize {
    size_of::<Block>() + nodes * size_of::<Sub>()
}

/// A block for a list and a group; `None` without memory.
pub(super) fn make<H: Host>(host: &H, list: NonNull<Head>, nodes: usize, seat: Seat) -> Option<NonNull<Block>> {
    let block = host.memory(bytes(nodes))?.cast::<Block>();
    let slot = Cell::new(seat.slot);
    let [next, previous] = [(); 2].map(|()| Cell::new(null_mut()));
    // SAFETY: there are that many bytes, aligned, which nobody else knows of.
    unsafe {
        let heir = Cell::new(null_mut());
        block.write(Block { list, nodes, slot, next, previous, heir, pins: Cell::new(0) });
        for node in 0..nodes {
            at(block, node).write(Sub {
                chain: Mutex::new(Chain::new(seat)),
                heir: AtomicPtr::new(null_mut()),
                count: AtomicUsize::new(0),
                list,
                named: Cell::new(false),
            });
        }
    }
    Some(block)
}

/// Where a node's sub-list lies.
fn at(block: NonNull<Block>, node: usize) -> NonNull<Sub> {
    // SAFETY: the sub-lists follow the block in the same piece of memory.
    unsafe { block.add(1).cast::<Sub>().add(node) }
}

/// The sub-list of a node; of the last one for a number beyond.
///
/// # Safety
/// The block is there for as long as the answer is used.
pub(super) unsafe fn sub<'a>(block: NonNull<Block>, node: usize) -> &'a Sub {
    // SAFETY: as the caller promises.
    unsafe { at(block, node.min(block.as_ref().nodes - 1)).as_ref() }
}

/// All sub-lists, by node.
///
/// # Safety
/// As for [`sub`].
pub(super) unsafe fn subs<'a>(block: NonNull<Block>) -> impl Iterator<Item = &'a Sub> {
    // SAFETY: as the caller promises.
    (0..unsafe { block.as_ref() }.nodes).map(move |node| unsafe { sub(block, node) })
}
