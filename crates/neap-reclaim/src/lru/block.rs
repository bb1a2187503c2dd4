//! The sub-lists of a list for one group, one for each node, in one piece of memory.
//!
//! A list's table leads to a block by the group's slot; items name its sub-lists. Each sub-list has
//! its lock on a cache line of its own. The sub-list of a deleted group is *dead*: it has no items,
//! and leads to its heir for items that still name it. A thread that looks at a sub-list holds a
//! read of the groups' RCU domain, or the registry's mutex.
//!
//! # Locking
//!
//! A sub-list's lock is taken before its heir's. Both are held only under the registry's mutex.

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
    /// The heir of a dead sub-list; null for a live one.
    heir: AtomicPtr<Sub>,
    /// Number of items, written under the lock.
    count: AtomicUsize,
    list: NonNull<Head>,
    /// Of a dead sub-list, under the registry's mutex: items may name it, or a walk may have items
    /// in hands that were on it.
    pub(super) named: Cell<bool>,
}

/// Header of a block, before its sub-lists. All but the list and the number of nodes is changed
/// under the registry's mutex.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Block {
    pub(super) list: NonNull<Head>,
    pub(super) nodes: usize,
    /// The slot with the chain that it is in.
    pub(super) slot: Cell<u32>,
    /// Links of a chain: the blocks of a group, of all lists; or dead blocks that items still name;
    /// or those that wait for readers.
    pub(super) next: Cell<*mut Block>,
    pub(super) previous: Cell<*mut Block>,
    /// Of a dead block: the heir's block, which it pins.
    pub(super) heir: Cell<*mut Block>,
    /// Number of dead blocks that lead to it; of a dead block, also of its sub-lists that are
    /// named.
    pub(super) pins: Cell<usize>,
}

// SAFETY: `list` is constant, and `named` is accessed under the registry's mutex alone. The other
// fields may be sent.
unsafe impl Send for Sub {}
// SAFETY: `list` is constant, and `named` is accessed under the registry's mutex alone. The other
// fields are atomic, or a mutex.
unsafe impl Sync for Sub {}

impl Sub {
    /// Locks it, or the live sub-list that it leads to.
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
        // SAFETY: null, or a sub-list of a block that is freed no earlier than this one's: that
        // pins it, or began to wait for its readers before it did. Acquire pairs with the Release
        // in `die`.
        unsafe { self.heir.load(Ordering::Acquire).as_ref() }
    }

    /// Returns the live sub-list at the end of the chain of heirs.
    pub(super) fn live(&self) -> &Sub {
        core::iter::successors(Some(self), |sub| sub.heir()).last().unwrap_or(self)
    }

    /// Makes it dead, with an heir. Under the locks of both.
    fn die(&self, heir: &Sub) {
        // Pairs with the Acquire in `heir`.
        self.heir.store(core::ptr::from_ref(heir).cast_mut(), Ordering::Release);
    }

    /// Returns the number of items at this moment. It is stable under the lock.
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Sets the number of items. Under the lock.
    pub(super) fn set_count(&self, count: usize) {
        self.count.store(count, Ordering::Relaxed);
    }

    pub(super) fn is_of(&self, list: NonNull<Head>) -> bool {
        self.list == list
    }

    /// Moves all its items before those of another sub-list, and makes that its heir. Returns the
    /// number of items, and their group now. Under the registry's mutex.
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

    /// Takes off its oldest item. For a list that no thread uses any more.
    pub(super) fn take_oldest(&self) -> Option<NonNull<Item>> {
        let mut chain = self.lock_this();
        let oldest = chain.oldest()?;
        chain.unlink(oldest);
        Some(oldest)
    }

    /// Renames up to `most` items of the live sub-list that may name another one. Returns how many,
    /// and whether this dead sub-list may be named still. Under the registry's mutex.
    pub(super) fn rename(&self, most: usize) -> (usize, bool) {
        let in_hands = self.chain.lock().hands > 0;
        let (live, mut chain) = self.lock();
        let renamed = chain.rename(live, most);
        (renamed, in_hands || chain.stale().is_some())
    }
}

impl Block {
    /// Adds to its number of pins.
    pub(super) fn pin(&self, more: isize) {
        self.pins.set(self.pins.get().wrapping_add_signed(more));
    }
}

/// Returns the bytes of a block.
pub(super) fn bytes(nodes: usize) -> usize {
    size_of::<Block>() + nodes * size_of::<Sub>()
}

/// Makes a block for a list and a group; `None` without memory.
pub(super) fn make<H: Host>(host: &H, list: NonNull<Head>, nodes: usize, seat: Seat) -> Option<NonNull<Block>> {
    let block = host.memory(bytes(nodes))?.cast::<Block>();
    let slot = Cell::new(seat.slot);
    let [next, previous] = [(); 2].map(|()| Cell::new(null_mut()));
    // SAFETY: `host.memory` returned `bytes(nodes)` bytes on a cache line of their own, which no
    // other thread knows of. The header and `nodes` sub-lists fit, and are aligned.
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

/// Returns the address of a node's sub-list. `node` is below the block's number of nodes.
fn at(block: NonNull<Block>, node: usize) -> NonNull<Sub> {
    // SAFETY: the sub-lists follow the header in the same piece of memory, and `node` is one of
    // them.
    unsafe { block.add(1).cast::<Sub>().add(node) }
}

/// Returns the sub-list of a node, or the last one if there are fewer nodes.
///
/// # Safety
/// The block exists for as long as the answer is used.
pub(super) unsafe fn sub<'a>(block: NonNull<Block>, node: usize) -> &'a Sub {
    // SAFETY: by this function's contract the block exists. `make` has written its header and as
    // many sub-lists, and the index is below that.
    unsafe { at(block, node.min(block.as_ref().nodes - 1)).as_ref() }
}

/// Returns all sub-lists, by node.
///
/// # Safety
/// The block exists for as long as the answers are used.
pub(super) unsafe fn subs<'a>(block: NonNull<Block>) -> impl Iterator<Item = &'a Sub> {
    // SAFETY: by this function's contract the block exists; `node` is below its number of nodes.
    (0..unsafe { block.as_ref() }.nodes).map(move |node| unsafe { sub(block, node) })
}
