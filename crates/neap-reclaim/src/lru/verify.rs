//! The proof that lists add up, when nobody uses them.
//!
//! Sits beside [`Site`]. Checked are the links of every sub-list both ways, that as many items are on it as it counts, that each
//! names it or one that leads to it, and those behind the stale ones it itself, that every block is in its list's table and its group's
//! chain, which is there, and that dead ones lead to somebody and are pinned by what there is to pin them.

use super::block::{self, Block, Sub};
use super::item::Item;
use super::list::Head;
use super::registry::{Site, chain, header};
use crate::Host;
use core::ptr::NonNull;
use neap_groups::{GroupId, Seat};

/// What does not add up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Finding {
    /// In words.
    pub what: &'static str,
    /// The group.
    pub group: GroupId,
    /// What it should be.
    pub expected: usize,
    /// What it is.
    pub found: usize,
}

fn same(what: &'static str, group: GroupId, expected: usize, found: usize) -> Result<(), Finding> {
    if expected == found { Ok(()) } else { Err(Finding { what, group, expected, found }) }
}

impl<H: Host> Site<'_, H> {
    /// Looks at everything. Nobody uses the lists or deletes groups meanwhile.
    ///
    /// # Errors
    /// The first thing that does not add up.
    pub fn verify(&self) -> Result<(), Finding> {
        let registry = self.lists.registry.lock();
        let (mut list, mut pins) = (NonNull::new(registry.first), 0);
        while let Some(head) = list {
            // SAFETY: lists are there until they are closed, which takes the mutex.
            let this = unsafe { head.as_ref() };
            pins += self.verify_block(head, this.root, Seat::ROOT)?;
            let mut next = this.table.next(0);
            while let Some((slot, block)) = next {
                let in_chain = chain(registry.of(slot)).filter(|&other| other == block).count();
                // SAFETY: found under the mutex.
                let seat = unsafe { block::sub(block, 0) }.lock_this().seat;
                same("blocks in a group's chain", seat.group, 1, in_chain)?;
                same("the slot of a block", seat.group, slot as usize, seat.slot as usize)?;
                same("whether the group is there", seat.group, 1, self.groups.is_there(seat.group).into())?;
                pins += self.verify_block(head, block, seat)?;
                next = this.table.next(slot + 1);
            }
            list = NonNull::new(this.next.get());
        }
        let mut pinning = 0;
        for block in chain(registry.dead) {
            let (named, pinned) = verify_dead(block)?;
            // Each pins its heir.
            pinning += named + 1;
            pins += pinned;
        }
        same("what pins blocks", GroupId::ROOT, pinning, pins)
    }

    /// Answers what pins it.
    fn verify_block(&self, head: NonNull<Head>, block: NonNull<Block>, seat: Seat) -> Result<usize, Finding> {
        // SAFETY: found under the mutex.
        let (this, subs) = unsafe { (header(block), block::subs(block)) };
        same("the list of a block", seat.group, head.as_ptr().addr(), this.list.as_ptr().addr())?;
        for sub in subs {
            verify_sub(sub, seat)?;
        }
        Ok(this.pins.get())
    }
}

fn verify_sub(sub: &Sub, seat: Seat) -> Result<(), Finding> {
    let chain = sub.lock_this();
    same("whether a group's sub-list is dead", seat.group, 0, sub.heir().is_some().into())?;
    same("the seat of a sub-list", seat.group, seat.slot as usize, chain.seat.slot as usize)?;
    let (mut items, mut next) = (0, chain.oldest());
    let mut previous = None::<NonNull<Item>>;
    let mut may_be_stale = chain.stale().is_some();
    while let Some(item) = next {
        items += 1;
        // SAFETY: items on a chain are there.
        let there = unsafe { item.as_ref() };
        let before = there.links().previous;
        same("the one before an item", seat.group, previous.map_or(0, |item| item.as_ptr().addr()), before.addr())?;
        // SAFETY: it leads to a sub-list that is there as long as an item names it.
        let named = there.name().map(|name| unsafe { name.as_ref() });
        let leads_here = named.is_some_and(|named| core::ptr::eq(named.live(), sub));
        same("whether an item names its sub-list", seat.group, 1, leads_here.into())?;
        let names_it = named.is_some_and(|named| core::ptr::eq(named, sub));
        same("whether an item that is not stale names it itself", seat.group, 1, (may_be_stale || names_it).into())?;
        may_be_stale &= chain.stale() != Some(item);
        (previous, next) = (Some(item), chain.after(item));
    }
    same("whether the last that may be stale is on the list", seat.group, 0, may_be_stale.into())?;
    same("items", seat.group, items, sub.count())
}

/// How many of its sub-lists are named, and what pins it.
fn verify_dead(block: NonNull<Block>) -> Result<(usize, usize), Finding> {
    // SAFETY: found under the mutex.
    let (this, subs) = unsafe { (header(block), block::subs(block)) };
    let mut named = 0;
    for sub in subs {
        let group = sub.lock_this().seat.group;
        same("items of a dead sub-list", group, 0, sub.count())?;
        same("whether a dead sub-list leads anywhere", group, 1, sub.heir().is_some().into())?;
        named += usize::from(sub.named.get());
    }
    Ok((named, this.pins.get()))
}
