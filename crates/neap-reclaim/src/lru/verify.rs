//! Consistency check of all lists, for a time when no thread uses them.
//!
//! It checks the links of every sub-list in both directions, and its count of items. Each item must
//! name the sub-list, or one that leads to it. Items newer than the stale ones must name the
//! sub-list itself. Every block must be in its list's table and in its group's chain, and the group
//! must exist. Dead blocks must lead to an heir and have the right number of pins.

use super::block::{self, Block, Head};
use super::chain::Item;
use super::registry::{Site, chain, header};
use super::sublist::Sub;
use crate::Host;
use core::ptr::NonNull;
use neap_base::Finding;
use neap_groups::{GroupId, GroupSlot};

fn same(what: &'static str, group: GroupId, expected: usize, found: usize) -> Result<(), Finding> {
    Finding::unless_equal(what, group, expected as u64, found as u64)
}

impl<H: Host> Site<'_, H> {
    /// Checks all lists. No thread may use the lists or delete groups meanwhile.
    ///
    /// # Errors
    /// A [`Finding`] with the first inconsistency.
    pub fn verify(&self) -> Result<(), Finding> {
        let registry = self.lists.registry.lock();
        let (mut list, mut pins) = (NonNull::new(registry.first), 0);
        while let Some(head) = list {
            // SAFETY: lists in the registry exist until they are closed, which takes the mutex that
            // is held.
            let this = unsafe { head.as_ref() };
            pins += self.verify_block(head, this.root, GroupSlot::ROOT)?;
            let mut next = this.table.next(0);
            while let Some((slot, block)) = next {
                let in_chain = chain(registry.of(slot)).filter(|&other| other == block).count();
                // SAFETY: a block in a list's table exists while the registry's mutex is held.
                let seat = unsafe { block::sub(block, 0) }.lock_this().seat;
                same("blocks in a group's chain", seat.group, 1, in_chain)?;
                same("the slot of a block", seat.group, slot as usize, seat.slot as usize)?;
                same("whether the group is there", seat.group, 1, self.groups.exists(seat.group).into())?;
                pins += self.verify_block(head, block, seat)?;
                next = this.table.next(slot + 1);
            }
            list = NonNull::new(this.next.get());
        }
        let mut pinning = 0;
        for block in chain(registry.dead) {
            let dead = verify_dead(block)?;
            // Each pins its heir.
            pinning += dead.named + 1;
            pins += dead.pins;
        }
        same("number of pins of all blocks", GroupId::ROOT, pinning, pins)
    }

    /// Returns its number of pins.
    fn verify_block(&self, head: NonNull<Head>, block: NonNull<Block>, seat: GroupSlot) -> Result<usize, Finding> {
        // SAFETY: the block is the root's or in the list's table, and the registry's mutex is held.
        let (this, subs) = unsafe { (header(block), block::subs(block)) };
        same("the list of a block", seat.group, head.as_ptr().addr(), this.list.as_ptr().addr())?;
        for sub in subs {
            verify_sub(sub, seat)?;
        }
        Ok(this.pins.get())
    }
}

fn verify_sub(sub: &Sub, seat: GroupSlot) -> Result<(), Finding> {
    let chain = sub.lock_this();
    same("whether a group's sub-list is dead", seat.group, 0, sub.heir().is_some().into())?;
    same("the seat of a sub-list", seat.group, seat.slot as usize, chain.seat.slot as usize)?;
    let (mut items, mut next) = (0, chain.oldest());
    let mut previous = None::<NonNull<Item>>;
    let mut may_be_stale = chain.stale().is_some();
    while let Some(item) = next {
        items += 1;
        // SAFETY: an item on a chain exists until it is taken off, which takes the lock that is
        // held.
        let there = unsafe { item.as_ref() };
        let before = there.links().previous;
        same("the item before an item", seat.group, previous.map_or(0, |item| item.as_ptr().addr()), before.addr())?;
        // SAFETY: a sub-list exists as long as an item names it.
        let named = there.name().map(|name| unsafe { name.as_ref() });
        let leads_here = named.is_some_and(|named| core::ptr::eq(named.live(), sub));
        same("whether an item names its sub-list", seat.group, 1, leads_here.into())?;
        let names_it = named.is_some_and(|named| core::ptr::eq(named, sub));
        same("whether an item not stale names its sub-list", seat.group, 1, (may_be_stale || names_it).into())?;
        may_be_stale &= chain.stale() != Some(item);
        (previous, next) = (Some(item), chain.after(item));
    }
    same("whether the newest item that may be stale is on the list", seat.group, 0, may_be_stale.into())?;
    same("items", seat.group, items, sub.count())
}

/// Numbers of a dead block.
struct DeadBlock {
    /// Its sub-lists that are named.
    named: usize,
    pins: usize,
}

fn verify_dead(block: NonNull<Block>) -> Result<DeadBlock, Finding> {
    // SAFETY: the block is in the chain of dead ones, and the registry's mutex is held.
    let (this, subs) = unsafe { (header(block), block::subs(block)) };
    let mut named = 0;
    for sub in subs {
        let group = sub.lock_this().seat.group;
        same("items of a dead sub-list", group, 0, sub.count())?;
        same("whether a dead sub-list leads anywhere", group, 1, sub.heir().is_some().into())?;
        named += usize::from(sub.named.get());
    }
    Ok(DeadBlock { named, pins: this.pins.get() })
}
