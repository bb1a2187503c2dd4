//! Slots and parents of groups, for tables that are indexed by slot, and the grace period of such
//! tables.
//!
//! LRU lists and caches attach items to groups in such tables. An answer is valid during the
//! [`Reading`] in which a thread requested it. A slot is reused only after all readers that began
//! earlier have left. Only [`Groups::attach_target`] and [`Groups::attach`] may take a lock.

use crate::group::GroupSlot;
use crate::groups::Groups;
use crate::id::GroupId;
use core::sync::atomic::{Ordering, fence};
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_base::rcu::{Mark, Reading};

impl Groups {
    /// Begins a read: groups that are found from now on keep their slots until it ends. Never
    /// waits.
    pub fn reading(&self) -> Reading<'_> {
        self.rcu.enter()
    }

    /// Returns the group to which items for an id may be attached: the id's group, its heir, or the
    /// nearest ancestor that is not being deleted. `None` if the id leads nowhere. A lookup may
    /// take the mutex of the ids.
    pub fn attach_target(&self, _: &Inside<'_>, _reading: &Reading<'_>, id: GroupId) -> Option<GroupSlot> {
        let slot = self.tree.owners.behind(id)?.slot();
        let (slot, group) = self.tree.upwards(slot).find(|(_, group)| group.is_leaving.load(Ordering::Relaxed) == 0)?;
        Some(GroupSlot { group: group.id(), slot })
    }

    /// Returns the group of an id itself, while items may be attached to it. Takes no lock, so it
    /// may be called outside the fork gate.
    pub fn own_slot(&self, _reading: &Reading<'_>, id: GroupId) -> Option<GroupSlot> {
        let slot = self.tree.owners.own(id)?;
        self.is_online(id, slot).then_some(GroupSlot { group: id, slot })
    }

    /// Returns whether a slot is that of the group `id`, and the group is not being deleted.
    pub fn is_online(&self, id: GroupId, slot: u32) -> bool {
        self.tree.group(slot).is_some_and(|group| group.id() == id) && !self.is_leaving(slot)
    }

    /// Calls `add` with the group that [`Groups::attach_target`] returns. If that group is being
    /// deleted by then, calls `add` again with its heir, and so on. Returns false if the id leads
    /// nowhere.
    ///
    /// So no item stays on a deleted group, if [`Reclaimer::offline`](crate::Reclaimer::offline)
    /// fences before it moves items:
    ///
    /// | A attaches | B deletes |
    /// |---|---|
    /// | 1. finds the group | 1. marks the group as leaving |
    /// | 2. attaches an item | 2. fence |
    /// | 3. fence | 3. moves all attached items to the parent |
    /// | 4. reads the mark | |
    ///
    /// Either B moves the item of A, or A reads the mark and attaches to the heir as well.
    pub fn attach(
        &self,
        inside: &Inside<'_>,
        reading: &Reading<'_>,
        id: GroupId,
        mut add: impl FnMut(GroupSlot),
    ) -> bool {
        while let Some(target) = self.attach_target(inside, reading, id) {
            add(target);
            // SeqCst pairs with the fence in `offline`.
            fence(Ordering::SeqCst);
            if !self.is_leaving(target.slot) {
                return true;
            }
        }
        false
    }

    /// Returns the groups by slot. Groups that are created or deleted meanwhile may be missing or
    /// included.
    pub fn online_slots(&self) -> impl Iterator<Item = GroupSlot> {
        let slots = (0..).map_while(|slot| Some(GroupSlot { group: self.tree.group(slot)?.id(), slot }));
        // A free slot has the id 0.
        slots.filter(|at| at.group.to_bits() != 0 && self.is_online(at.group, at.slot))
    }

    /// Returns the parent of the group in a slot; `None` for the root. The caller must be within a
    /// read, or in [`Reclaimer::offline`](crate::Reclaimer::offline).
    pub fn parent_of(&self, slot: u32) -> Option<GroupSlot> {
        let (slot, group) = self.tree.upwards(slot).nth(1)?;
        Some(GroupSlot { group: group.id(), slot })
    }

    /// Returns whether items of the group in a slot have moved to its parent, or are about to.
    /// [`Reclaimer::offline`](crate::Reclaimer::offline) is called after this is true.
    pub fn is_leaving(&self, slot: u32) -> bool {
        self.tree.group(slot).is_none_or(|group| group.is_leaving.load(Ordering::Relaxed) != 0)
    }

    /// Returns a mark of this moment, for [`Groups::has_passed`].
    pub fn moment(&self) -> Mark {
        self.rcu.mark()
    }

    /// Returns whether all readers of a moment have left. Does not wait for them: if some have not
    /// left, the caller calls this again later. Fences CPUs.
    pub fn has_passed<P: Platform>(&self, inside: &Inside<'_>, platform: &P, moment: Mark) -> bool {
        // If the fence fails, it is unknown whether readers have left.
        self.rcu.advance_past(inside, platform, moment).unwrap_or(false)
    }
}
