//! Where a group is, for whoever hangs things on groups: its slot, who is above it, and when nobody can be on the way to it any more.
//!
//! Sits between the tree and lists or caches that are kept by group, in tables by slot. No lock: what is answered holds for the
//! [`Reading`] that it was asked in, and a slot is nobody else's before the last of those who were reading has gone.

use crate::groups::Groups;
use crate::id::GroupId;
use core::sync::atomic::{Ordering, fence};
use neap_base::Platform;
use neap_base::rcu::{Mark, Reading};

/// A group, and its slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seat {
    /// The group.
    pub group: GroupId,
    /// Below [`GroupCount::slots`](crate::GroupCount::slots); the root's is 0.
    pub slot: u32,
}

impl Seat {
    /// The root's.
    pub const ROOT: Seat = Seat { group: GroupId::ROOT, slot: crate::group::ROOT };
}

impl Groups {
    /// Begins to read: what is found from now on stays for as long. Waits for nobody.
    pub fn reading(&self) -> Reading<'_> {
        self.rcu.enter()
    }

    /// The group that an id leads to, its own or an heir, that things may be hung on; `None` for one that leads nowhere any more. Inside the gate: a
    /// lock may be taken to shorten the way.
    pub fn seat(&self, _reading: &Reading<'_>, id: GroupId) -> Option<Seat> {
        let slot = self.tree.owners.behind(id)?.slot();
        let (slot, group) = self.tree.upwards(slot).find(|(_, group)| group.is_leaving.load(Ordering::Relaxed) == 0)?;
        Some(Seat { group: group.id(), slot })
    }

    /// The group that an id is of itself, while things may be hung on it. Takes no lock, so it may be asked for outside the gate.
    pub fn own_seat(&self, _reading: &Reading<'_>, id: GroupId) -> Option<Seat> {
        let slot = self.tree.owners.own(id)?;
        self.is_seat(id, slot).then_some(Seat { group: id, slot })
    }

    /// Whether a slot is a group's, and what hangs there has not gone to its parent, nor is about to.
    pub fn is_seat(&self, id: GroupId, slot: u32) -> bool {
        self.tree.group(slot).is_some_and(|group| group.id() == id) && !self.is_leaving(slot)
    }

    /// Calls `hang` with the group that an id leads to, and, where that is leaving by then, with the one that has what was its. So what is hung on a
    /// group is not left on one that goes meanwhile, if [`Reclaimer::offline`](crate::Reclaimer::offline) fences before it takes what hangs
    /// there:
    /// 1. A finds the group, B lets it leave; 2. B takes what hangs on it to the parent; 3. A hangs something on it. Either B takes that as
    ///    well, or A sees that the group is leaving.
    ///
    /// Answers `false` where the id leads nowhere.
    pub fn hang_on(&self, reading: &Reading<'_>, id: GroupId, mut hang: impl FnMut(Seat)) -> bool {
        while let Some(seat) = self.seat(reading, id) {
            hang(seat);
            // SeqCst pairs with the fence in `offline`.
            fence(Ordering::SeqCst);
            if !self.is_leaving(seat.slot) {
                return true;
            }
        }
        false
    }

    /// The groups that are there, by slot, and perhaps some that come or go meanwhile.
    pub fn seats(&self) -> impl Iterator<Item = Seat> {
        let seats = (0..).map_while(|slot| Some(Seat { group: self.tree.group(slot)?.id(), slot }));
        // A slot that nobody has, or not yet, has the id 0.
        seats.filter(|seat| seat.group.to_bits() != 0 && self.is_seat(seat.group, seat.slot))
    }

    /// The group above one; `None` above the root. Within a reading, or in [`Reclaimer::offline`](crate::Reclaimer::offline).
    pub fn parent_of(&self, slot: u32) -> Option<Seat> {
        let (slot, group) = self.tree.upwards(slot).nth(1)?;
        Some(Seat { group: group.id(), slot })
    }

    /// Whether what hangs on the group in a slot has gone to its parent, or is about to: [`Reclaimer::offline`](crate::Reclaimer::offline)
    /// is called after this is true.
    pub fn is_leaving(&self, slot: u32) -> bool {
        self.tree.group(slot).is_none_or(|group| group.is_leaving.load(Ordering::Relaxed) != 0)
    }

    /// Marks this moment, for [`Groups::has_passed`].
    pub fn moment(&self) -> Mark {
        self.rcu.mark()
    }

    /// Whether everybody who was reading at a moment has gone. Never waits; to be asked again. Inside the gate; fences.
    pub fn has_passed<P: Platform>(&self, platform: &P, moment: Mark) -> bool {
        // Where the fence fails nothing is known.
        self.rcu.advance_past(platform, &(), moment).unwrap_or(false)
    }
}
