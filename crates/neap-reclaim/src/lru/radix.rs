//! A table indexed by slot, of three levels of nodes. Only nodes that lead to used slots take
//! memory.
//!
//! Threads read it without a lock. They add nodes under the registry's mutex. Nodes stay until the
//! table is closed.

use super::block::Block;
use crate::Host;
use core::ptr::{NonNull, null_mut};
use neap_base::gate::Inside;
use neap_base::sync::{AtomicPtr, Ordering};

const BITS: u32 = 7;
const FAN: usize = 1 << BITS;
const LEVELS: u32 = 3;

/// Entries that lead to nodes of the next level, or to blocks.
#[derive(Debug)]
struct Node([AtomicPtr<Node>; FAN]);

/// The table.
#[derive(Debug)]
pub(super) struct Radix {
    top: AtomicPtr<Node>,
}

const fn part(slot: u32, level: u32) -> usize {
    slot as usize >> (BITS * level) & (FAN - 1)
}

const _: () = assert!(neap_groups::MOST_GROUPS < 1 << (BITS * LEVELS));

impl Radix {
    neap_base::constructor! {
        pub(super) fn new() -> Radix {
            Radix { top: AtomicPtr::new(null_mut()) }
        }
    }

    /// Returns the entry of a slot, if there are nodes for it.
    fn entry(&self, slot: u32) -> Option<&AtomicPtr<Node>> {
        (0..LEVELS).rev().try_fold(&self.top, |entry, level| {
            // SAFETY: the pointer is null, or a node that `reserve` has written, and that stays
            // until `close`. Acquire pairs with the Release in `reserve`.
            unsafe { entry.load(Ordering::Acquire).as_ref() }.and_then(|node| node.0.get(part(slot, level)))
        })
    }

    /// Returns the block of a slot.
    pub(super) fn get(&self, slot: u32) -> Option<NonNull<Block>> {
        // Pairs with the Release in `set`.
        NonNull::new(self.entry(slot)?.load(Ordering::Acquire).cast())
    }

    /// Makes the nodes for the block of a slot. Returns `false` if there is no memory. The caller
    /// holds the registry's mutex.
    pub(super) fn reserve<H: Host>(&self, inside: &Inside<'_>, host: &H, slot: u32) -> bool {
        let mut entry = &self.top;
        for level in (0..LEVELS).rev() {
            let mut node = entry.load(Ordering::Relaxed);
            if node.is_null() {
                let Some(memory) = host.memory(inside, size_of::<Node>()) else { return false };
                node = memory.as_ptr().cast();
                // SAFETY: `host.memory` returned that many bytes on a cache line of their own,
                // which no other thread knows of.
                unsafe { node.write(Node([(); FAN].map(|()| AtomicPtr::new(null_mut())))) };
                entry.store(node, Ordering::Release); // Pairs with the Acquire in `entry`.
            }
            // SAFETY: a node that this function has written, now or earlier, and that stays until
            // `close`.
            entry = unsafe { &(&(*node).0)[part(slot, level)] };
        }
        true
    }

    /// Sets the block of a slot that was reserved. The caller holds the registry's mutex.
    pub(super) fn set(&self, slot: u32, block: Option<NonNull<Block>>) {
        if let Some(entry) = self.entry(slot) {
            // Release pairs with the Acquire in `get`.
            entry.store(block.map_or(null_mut(), NonNull::as_ptr).cast(), Ordering::Release);
        }
    }

    /// Returns the first block from a slot on, and its slot.
    pub(super) fn next(&self, mut slot: u32) -> Option<(u32, NonNull<Block>)> {
        while slot >> (BITS * LEVELS) == 0 {
            let (mut entry, mut level) = (&self.top, LEVELS);
            // Goes down to the first missing node, and then skips the slots of that node.
            // SAFETY: the pointer is null, or a node that `reserve` has written, and that stays
            // until `close`. Acquire pairs with the Release in `reserve`.
            while let Some(node) = unsafe { entry.load(Ordering::Acquire).as_ref() } {
                level -= 1;
                entry = &node.0[part(slot, level)];
                if level == 0 {
                    break;
                }
            }
            if let Some(block) = NonNull::new(entry.load(Ordering::Acquire)).filter(|_| level == 0) {
                return Some((slot, block.cast()));
            }
            slot = ((slot >> (BITS * level)) + 1) << (BITS * level);
        }
        None
    }

    /// Frees the nodes.
    ///
    /// # Safety
    /// No thread uses the table any more, and `host` is the one of `reserve`.
    pub(super) unsafe fn close<H: Host>(&self, inside: &Inside<'_>, host: &H) {
        // SAFETY: by this function's contract no thread uses a node. `top` is null or a node of
        // `LEVELS` levels from `reserve`.
        unsafe { give_back(inside, host, self.top.swap(null_mut(), Ordering::Relaxed), LEVELS) };
    }
}

/// Frees a node and those below it.
///
/// # Safety
/// The pointer is null, or a node of `levels` levels, itself included, from [`Radix::reserve`] with
/// this host, and no thread uses it any more. With 0 levels it may be any pointer.
unsafe fn give_back<H: Host>(inside: &Inside<'_>, host: &H, node: *mut Node, levels: u32) {
    let Some(node) = NonNull::new(node).filter(|_| levels > 0) else { return };
    // SAFETY: by this function's contract the node exists, and its entries are null or nodes with
    // one level less; at the last level they are blocks, which the call ignores. `reserve` got it
    // from the host with this size.
    unsafe {
        node.as_ref().0.iter().for_each(|entry| give_back(inside, host, entry.load(Ordering::Relaxed), levels - 1));
        host.give_back(inside, node.cast(), size_of::<Node>());
    }
}
