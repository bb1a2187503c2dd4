//! The proof that groups add up, when nobody charges.
//!
//! Sits beside [`Groups`]. Checked are the links of the tree, that every group is charged for what is booked under its own id, under those it has
//! inherited, and by the groups below it, that its counts by kind say the same, that stocks hold no more than is booked, and that
//! what refers to an id is there.

use crate::group::{Group, NONE, ROOT};
use crate::groups::Groups;
use crate::id::{GroupId, Kind};
use crate::owners::Behind;
use core::sync::atomic::Ordering;
use neap_percpu::Host;

/// What does not add up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Finding {
    /// In words.
    pub what: &'static str,
    /// The group.
    pub group: GroupId,
    /// What it should be.
    pub expected: u64,
    /// What it is.
    pub found: u64,
}

fn same(what: &'static str, group: GroupId, expected: u64, found: u64) -> Result<(), Finding> {
    if expected == found { Ok(()) } else { Err(Finding { what, group, expected, found }) }
}

impl Groups {
    /// Looks at everything.
    ///
    /// # Errors
    /// The first thing that does not add up.
    pub fn verify<H: Host>(&self, host: &H) -> Result<(), Finding> {
        let (mut live, mut at) = (0, ROOT);
        while let Some(group) = self.tree.group(at) {
            live += 1;
            self.verify_group(host, at, group)?;
            at = self.after(at);
        }
        let count = self.tree.count();
        same("groups in the tree", GroupId::ROOT, live, count.live.into())?;
        let (mut gone, mut finding) = (0, Ok(()));
        self.tree.owners.each_gone(|id, references| {
            gone += 1;
            let heirs = self.tree.owners.heirs(id);
            if references < heirs && finding.is_ok() {
                finding = same("references to an id whose group is gone", id, heirs, references);
            }
        });
        finding?;
        let waiting = self.tree.owners.waiting();
        same("ids in use", GroupId::ROOT, live + gone + waiting, count.ids.into())
    }

    /// The slot that follows in a walk of the tree; [`NONE`] at its end.
    fn after(&self, slot: u32) -> u32 {
        let link = |slot: u32, link: fn(&Group) -> u32| self.tree.group(slot).map_or(NONE, link);
        let child = link(slot, |group| group.first_child.load(Ordering::Relaxed));
        if child != NONE {
            return child;
        }
        let mut at = slot;
        while at != NONE {
            let next = link(at, |group| group.next.load(Ordering::Relaxed));
            if next != NONE && at != ROOT {
                return next;
            }
            at = link(at, |group| group.parent.load(Ordering::Relaxed));
        }
        NONE
    }

    fn verify_group<H: Host>(&self, host: &H, slot: u32, group: &Group) -> Result<(), Finding> {
        let id = group.id();
        same(
            "the slot of an id",
            id,
            Behind::Group(slot).slot().into(),
            self.tree.owners.behind(id).map_or(NONE, Behind::slot).into(),
        )?;
        // What is booked: under its own id, besides the group itself and those whose heir it is; and under those that lead here.
        let mut booked = self.tree.owners.references(id).wrapping_sub(1 + self.tree.owners.heirs(id));
        self.tree.owners.each_gone(|gone, references| {
            if self.tree.owners.behind(gone) == Some(Behind::Heir(slot)) {
                booked = booked.wrapping_add(
                    references.wrapping_sub(self.tree.owners.heirs(gone)).wrapping_sub(self.tree.own_reference(gone)),
                );
            }
        });
        let (mut children, mut below) = (0, 0);
        self.tree.each_child(group, |child| {
            children += 1;
            below += child.usage();
        });
        same("the number of children", id, children, group.children.load(Ordering::Relaxed).into())?;
        same("what is charged", id, booked.wrapping_add(below), group.usage())?;
        let kinds = Kind::ALL.into_iter().map(|kind| self.of_kind(host, group, kind));
        same("what is charged by kind", id, booked, kinds.sum())?;
        let mut stocked = 0;
        self.stocks.each(|payer, bytes| {
            if self.tree.owners.behind(payer.id()).map(Behind::slot) == Some(slot) {
                stocked += bytes;
            }
        });
        if stocked > booked { same("what is stocked", id, booked, stocked) } else { Ok(()) }
    }
}
