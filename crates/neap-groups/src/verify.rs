//! Consistency check of groups, for a time when no thread charges.
//!
//! It checks the links of the tree, the charges of each group against its counts by kind and its
//! children's charges, and the bytes booked under ids against the charged bytes. It also checks
//! that stocks hold no more, that references to ids are valid, and that no waiter could be
//! admitted.

use crate::group::{Group, NONE, ROOT};
use crate::groups::Groups;
use crate::id::{GroupId, Kind};
use crate::id_table::IdTarget;
use core::sync::atomic::Ordering;
use neap_base::Finding;
use neap_base::gate::Inside;
use neap_percpu::Host;

fn same(what: &'static str, group: GroupId, expected: u64, found: u64) -> Result<(), Finding> {
    Finding::unless_equal(what, group, expected, found)
}

impl Groups {
    /// Checks all groups. No other thread may use the groups meanwhile.
    ///
    /// # Errors
    /// A [`Finding`] with the first inconsistency.
    pub fn verify<H: Host>(&self, host: &H) -> Result<(), Finding> {
        // Counts the bytes of threads that charged a group while it was deleted.
        self.tree.each_dying(|group| self.reparent_counts(host, group));
        let (mut live, mut at) = (0, ROOT);
        while let Some(group) = self.tree.group(at) {
            live += 1;
            self.verify_group(host, at, group)?;
            at = self.after(at);
        }
        let (count, ids) = (self.tree.count(), self.tree.owners.census());
        let root = GroupId::ROOT;
        same("groups in the tree", root, live, count.live.into())?;
        same("ids in use", root, ids.used, count.ids.into())?;
        same("ids with a group", root, live + u64::from(count.dying), ids.own)?;
        same("ids with an heir", root, ids.with_heir, ids.heirs)?;
        same("references to ids", root, ids.own + ids.heirs + ids.booked, ids.references)?;
        let all = self.tree.group(ROOT).map_or(0, Group::usage);
        same("bytes booked under all ids", root, ids.booked, all)?;
        let mut stocked = 0;
        self.stocks.each(|_, bytes| stocked += bytes);
        if stocked > all { same("bytes stocked", root, all, stocked) } else { Ok(()) }
    }

    /// Returns the slot that follows in a walk of the tree; [`NONE`] at its end.
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
            IdTarget::Group(slot).slot().into(),
            self.tree.owners.behind(id).map_or(NONE, IdTarget::slot).into(),
        )?;
        // No other thread uses the groups, so no gate is needed.
        Inside::assume(|inside| self.verify_queue(inside, slot, group))?;
        let (mut children, mut below) = (0, 0);
        self.tree.each_child(group, |child| {
            children += 1;
            below += child.usage();
        });
        same("the number of children", id, children, group.children.load(Ordering::Relaxed).into())?;
        let own: u64 = Kind::ALL.into_iter().map(|kind| self.of_kind(host, group, kind)).sum();
        same("charged bytes, by kind and by group", id, own + below, group.usage())
    }

    /// Checks that a group's queue is sorted by age and agrees with the published bytes, and that
    /// no waiter could be admitted.
    fn verify_queue(&self, inside: &Inside<'_>, slot: u32, group: &Group) -> Result<(), Finding> {
        let (id, queues) = (group.id(), self.waiters.lock(inside, &self.tree));
        let (mut next, mut ticket) = (queues.first(group), 0);
        same("whether a charge waits", id, next.is_some().into(), group.has_waiters().into())?;
        same("whether a waiter could be admitted", id, 0, group.is_waited_for().into())?;
        while let Some((index, waiter)) = next.and_then(|index| Some((index, queues.get(index)?))) {
            same("group where a charge waits", id, slot.into(), waiter.place().into())?;
            same("whether a charge in a queue waits", id, 1, waiter.is_waiting().into())?;
            same("whether a queue is sorted by age", id, 1, (ticket < waiter.ticket()).into())?;
            (next, ticket) = (queues.after(index), waiter.ticket());
        }
        Ok(())
    }
}
