//! Blocks and heads of lists. A *block* is one piece of memory with the sub-lists of a list for one
//! group, one for each node. The *head* of a list has a table that leads to a block by the group's
//! slot.

use super::radix::Radix;
use super::sublist::Sub;
use crate::Host;
use core::cell::Cell;
use core::ptr::{NonNull, null_mut};
use neap_base::gate::Inside;
use neap_groups::GroupSlot;

/// The group that items of a list belong to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    /// The group that they are added for.
    Group,
    /// The root, whichever group they are added for.
    RootAlone,
}

/// Head of a list: the memory that a [`LruList`](super::LruList) points to.
#[derive(Debug)]
pub(super) struct Head {
    /// The block of each group but the root, by slot.
    pub(super) table: Radix,
    /// The block of the root, with all items of a list that is not by group.
    pub(super) root: NonNull<Block>,
    pub(super) by: By,
    pub(super) shrinker: Option<u64>,
    pub(super) nodes: usize,
    /// Links of the chain of all lists, under the registry's mutex.
    pub(super) next: Cell<*mut Head>,
    pub(super) previous: Cell<*mut Head>,
}

impl Head {
    /// Returns the block of a group.
    pub(super) fn block(&self, slot: u32) -> Option<NonNull<Block>> {
        if slot == GroupSlot::ROOT.slot { Some(self.root) } else { self.table.get(slot) }
    }
}

/// Header of a block, before its sub-lists. All but the list and the number of nodes is changed
/// under the registry's mutex.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Block {
    pub(super) list: NonNull<Head>,
    pub(super) nodes: usize,
    /// The slot of the group whose chain has the block.
    pub(super) slot: Cell<u32>,
    /// Links of the chain that has the block. It is the chain of a group's blocks, of dead blocks
    /// that items still name, or of blocks that wait for readers.
    pub(super) next: Cell<*mut Block>,
    pub(super) previous: Cell<*mut Block>,
    /// The heir's block, which a dead block pins. A block is dead once no group has it
    /// (`registry.rs`).
    pub(super) heir: Cell<*mut Block>,
    /// Number of dead blocks that lead to this one. For a dead block, also the number of its
    /// sub-lists that items name.
    pub(super) pins: Cell<usize>,
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

/// Makes a block for a list and a group. Returns `None` if there is no memory.
pub(super) fn make<H: Host>(
    inside: &Inside<'_>,
    host: &H,
    list: NonNull<Head>,
    nodes: usize,
    seat: GroupSlot,
) -> Option<NonNull<Block>> {
    let block = host.memory(inside, bytes(nodes))?.cast::<Block>();
    let slot = Cell::new(seat.slot);
    let [next, previous] = [(); 2].map(|()| Cell::new(null_mut()));
    // SAFETY: `host.memory` returned `bytes(nodes)` bytes on a cache line of their own, which no
    // other thread knows of. The header and `nodes` sub-lists fit, and are aligned.
    unsafe {
        let heir = Cell::new(null_mut());
        block.write(Block { list, nodes, slot, next, previous, heir, pins: Cell::new(0) });
        for node in 0..nodes {
            at(block, node).write(Sub::new(list, seat));
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
