//! Who is behind an id: a group, or the heir of one that was deleted.
//!
//! Sits between ids, which charges keep for as long as they like, and the groups that are there. An entry counts what still
//! refers to it: every byte that is booked under it, the group while it is there, and entries whose heir it is. A deleted group's
//! entry leads to its parent's, and so on up; whoever goes a long way shortens it. So deleting a group is one store however
//! much it had, and however much it had inherited. An entry that nothing refers to waits for a grace period, since somebody may be
//! on the way through it, before its index can be an id again. Mutex: the lists of free and waiting entries, a leaf.

use crate::id::{GroupId, LAST_GENERATION, MOST_GROUPS};
use crate::table::{Entry, Table};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use neap_base::platform::Errno;
use neap_base::{Mutex, Platform};

/// The bit of a link that says that it leads to an heir's entry, not to a group.
const HEIR: u32 = 1 << 31;
/// With it, the bit that says that the group's own reference is still there.
const DYING: u32 = 1 << 30;
/// The bits that say which entry.
const INDEX: u32 = DYING - 1;
/// The end of a list; the link of an entry that nobody has.
const NONE: u32 = u32::MAX;

/// An entry.
#[derive(Debug, Default)]
pub(crate) struct Owner {
    /// Which id has the index; 0: none yet.
    generation: AtomicU32,
    /// The slot of the group, or, with [`HEIR`], the index of the heir's entry.
    link: AtomicU32,
    references: AtomicU64,
    /// In a list of entries that nobody has.
    next: AtomicU32,
    /// References that are those of entries whose heir it is.
    heirs: AtomicU32,
}

impl Owner {
    /// Bytes that are booked under it.
    fn booked(&self) -> u64 {
        let own = match self.link.load(Ordering::Relaxed) {
            link if link & HEIR == 0 || link & DYING != 0 => 1,
            _ => 0,
        };
        let others = u64::from(self.heirs.load(Ordering::Relaxed)) + own;
        self.references.load(Ordering::Relaxed).saturating_sub(others)
    }
}

// SAFETY: atomic numbers, of which 0 is one.
unsafe impl Entry for Owner {}

/// All entries.
#[derive(Debug)]
pub(crate) struct Owners {
    table: Table<Owner>,
    lists: Mutex<Lists>,
}

#[derive(Debug)]
struct Lists {
    free: u32,
    /// Nothing refers to them; the grace period of the second list has begun.
    waiting: [u32; 2],
    /// Never used yet.
    fresh: u32,
    used: u32,
    /// Of these, the ones that nothing refers to and that wait.
    buried: u32,
}

/// What [`Owners::census`] counts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Census {
    pub(crate) used: u64,
    pub(crate) with_heir: u64,
    pub(crate) heirs: u64,
    pub(crate) own: u64,
    pub(crate) booked: u64,
    pub(crate) references: u64,
}

/// Where an id leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Behind {
    /// The group itself, in this slot.
    Group(u32),
    /// It is gone; the slot of its heir.
    Heir(u32),
}

impl Behind {
    pub(crate) fn slot(self) -> u32 {
        let (Behind::Group(slot) | Behind::Heir(slot)) = self;
        slot
    }
}

impl Owners {
    pub(crate) fn new() -> Owners {
        let lists = Lists { free: NONE, waiting: [NONE; 2], fresh: 0, used: 0, buried: 0 };
        Owners { table: Table::new(), lists: Mutex::new(lists) }
    }

    /// An id for the group in `slot`.
    ///
    /// # Errors
    /// `NOSPC` with [`MOST_GROUPS`] of them; where there is no memory, that.
    pub(crate) fn open<P: Platform>(&self, platform: &P, slot: u32) -> Result<GroupId, Errno> {
        let mut lists = self.lists.lock();
        let (index, entry) = match self.table.get(lists.free) {
            Some(entry) => (lists.free, entry),
            None => {
                let index = lists.fresh;
                if index == MOST_GROUPS {
                    return Err(Errno::NOSPC);
                }
                if index == self.table.len() {
                    self.table.grow(platform)?;
                }
                let entry = self.table.get(index).ok_or(Errno::NOMEM)?;
                lists.fresh += 1;
                entry.next.store(NONE, Ordering::Relaxed);
                (index, entry)
            }
        };
        if index == lists.free {
            lists.free = entry.next.load(Ordering::Relaxed);
        }
        lists.used += 1;
        let generation = entry.generation.load(Ordering::Relaxed) + 1;
        entry.link.store(slot, Ordering::Relaxed);
        entry.references.store(1, Ordering::Relaxed);
        entry.heirs.store(0, Ordering::Relaxed);
        entry.generation.store(generation, Ordering::Release); // Pairs with the Acquire in `entry`.
        Ok(GroupId::new(index, generation))
    }

    fn entry(&self, id: GroupId) -> Option<&Owner> {
        // An entry that nobody had yet has generation 0, and would lead to the root.
        // Acquire pairs with the Release in `open`.
        let is_of = |entry: &&Owner| entry.generation.load(Ordering::Acquire) == id.generation() && id.generation() > 0;
        self.table.get(id.index()).filter(is_of)
    }

    /// Whether the group of an id is there.
    pub(crate) fn is_there(&self, id: GroupId) -> bool {
        self.own(id).is_some()
    }

    /// The slot of an id's own group, if that is there. Shortens nothing, so no lock is taken.
    pub(crate) fn own(&self, id: GroupId) -> Option<u32> {
        // Acquire pairs with the Release in `inherit`.
        Some(self.entry(id)?.link.load(Ordering::Acquire)).filter(|link| link & HEIR == 0)
    }

    /// Who is behind an id; `None` for one that is nobody's any more. Within a read of the grace periods' domain.
    pub(crate) fn behind(&self, id: GroupId) -> Option<Behind> {
        let first = self.entry(id)?;
        let (mut entry, mut hops) = (first, 0);
        let slot = loop {
            // Acquire pairs with the Release in `inherit`: what the heir was given is visible.
            match entry.link.load(Ordering::Acquire) {
                NONE => return None,
                link if link & HEIR == 0 => break link,
                link => entry = self.table.get(link & INDEX)?,
            }
            hops += 1;
        };
        if hops > 1 {
            self.shorten(first);
        }
        Some(if hops == 0 { Behind::Group(slot) } else { Behind::Heir(slot) })
    }

    /// Lets an entry lead straight to the one at the end of its way, unless somebody else changes ways at the moment.
    #[cold]
    fn shorten(&self, first: &Owner) {
        let Some(mut lists) = self.lists.try_lock() else { return };
        let old = first.link.load(Ordering::Relaxed);
        let mut last = old & INDEX;
        while let Some(entry) = self.table.get(last) {
            match entry.link.load(Ordering::Relaxed) {
                link if link & HEIR == 0 => break,
                link => last = link & INDEX,
            }
        }
        if old != NONE && last != old & INDEX {
            self.lead(first, last, old & DYING);
            self.drop_heir(&mut lists, old & INDEX);
        }
    }

    /// Makes the entry at `index` the heir of another. Under the mutex.
    fn lead(&self, entry: &Owner, index: u32, dying: u32) {
        if let Some(heir) = self.table.get(index) {
            heir.references.fetch_add(1, Ordering::Relaxed);
            heir.heirs.fetch_add(1, Ordering::Relaxed);
            entry.link.store(index | HEIR | dying, Ordering::Release); // Pairs with the Acquire in `behind`.
        }
    }

    /// Books bytes under an id, whose group is there, or that has bytes already.
    pub(crate) fn book(&self, id: GroupId, bytes: u64) {
        if let Some(entry) = self.entry(id) {
            entry.references.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Takes bytes off an id again.
    pub(crate) fn unbook(&self, id: GroupId, bytes: u64) {
        let Some(entry) = self.entry(id) else { return };
        // The last reference of a group that is there is the group's own: the mutex is needed when it is gone.
        // AcqRel pairs with itself in the others: whoever sees the last go has seen what was done under each.
        if entry.references.fetch_sub(bytes, Ordering::AcqRel) == bytes {
            self.bury(&mut self.lists.lock(), id.index());
        }
    }

    /// A group is gone: its id leads to that of `heir` from now on. The group's own reference stays until [`Owners::leave`].
    pub(crate) fn inherit(&self, id: GroupId, heir: GroupId) {
        let _lists = self.lists.lock();
        if let (Some(entry), Some(_)) = (self.entry(id), self.entry(heir)) {
            self.lead(entry, heir.index(), DYING);
        }
    }

    /// The group that had the id needs it no more.
    pub(crate) fn leave(&self, id: GroupId) {
        {
            let _lists = self.lists.lock();
            let Some(entry) = self.entry(id) else { return };
            entry.link.store(entry.link.load(Ordering::Relaxed) & !DYING, Ordering::Release); // As in `lead`.
        }
        self.unbook(id, 1);
    }

    /// An entry's heir has one entry less to inherit from.
    fn drop_heir(&self, lists: &mut Lists, index: u32) {
        let Some(entry) = self.table.get(index) else { return };
        entry.heirs.fetch_sub(1, Ordering::Relaxed);
        // AcqRel: as in `unbook`.
        if entry.references.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.bury(lists, index);
        }
    }

    /// Nothing refers to an entry: after a grace period it is free, and so perhaps is the one that it leads to.
    fn bury(&self, lists: &mut Lists, index: u32) {
        let Some(entry) = self.table.get(index) else { return };
        entry.next.store(lists.waiting[0], Ordering::Relaxed);
        lists.waiting[0] = index;
        lists.buried += 1;
    }

    /// Whether entries wait for the next grace period to begin, or for one to end.
    pub(crate) fn is_waiting(&self) -> [bool; 2] {
        self.lists.lock().waiting.map(|list| list != NONE)
    }

    /// A grace period begins, for all that nothing refers to by now. The one before has ended.
    pub(crate) fn begin_grace(&self) {
        let mut lists = self.lists.lock();
        lists.waiting = [NONE, lists.waiting[0]];
    }

    /// It has ended: nobody is on the way through the entries that waited for it.
    pub(crate) fn end_grace(&self) {
        let mut lists = self.lists.lock();
        let mut index = core::mem::replace(&mut lists.waiting[1], NONE);
        while let Some(entry) = self.table.get(index) {
            let following = entry.next.load(Ordering::Relaxed);
            lists.used -= 1;
            lists.buried -= 1;
            let generation = entry.generation.load(Ordering::Relaxed);
            if generation < LAST_GENERATION {
                // No id has an index that nobody has.
                entry.next.store(lists.free, Ordering::Relaxed);
                lists.free = index;
            }
            let link = entry.link.swap(NONE, Ordering::Relaxed);
            // A group that was never quite made has no heir.
            if link & HEIR != 0 {
                self.drop_heir(&mut lists, link & INDEX);
            }
            index = following;
        }
    }

    /// What all entries refer to, and how many entries there are: in use, and of those the ones that have an heir and the ones whose own group
    /// is there or on its way out; and bytes booked.
    pub(crate) fn census(&self) -> Census {
        let mut census = Census::default();
        for entry in (0..self.table.len()).filter_map(|index| self.table.get(index)) {
            let link = entry.link.load(Ordering::Relaxed);
            if link == NONE || entry.generation.load(Ordering::Relaxed) == 0 {
                continue;
            }
            census.used += 1;
            census.with_heir += u64::from(link & HEIR != 0);
            census.heirs += u64::from(entry.heirs.load(Ordering::Relaxed));
            census.own += u64::from(link & HEIR == 0 || link & DYING != 0);
            census.booked += entry.booked();
            census.references += entry.references.load(Ordering::Relaxed);
        }
        census
    }

    /// How many entries there are room for, and whether the next one needs more.
    pub(crate) fn room(&self) -> (u32, bool) {
        let (lists, room) = (self.lists.lock(), self.table.len());
        (room, lists.free == NONE && lists.fresh == room)
    }

    /// Entries that nothing refers to and that wait.
    pub(crate) fn waiting(&self) -> u64 {
        self.lists.lock().buried.into()
    }

    /// Entries in use, also those that wait.
    pub(crate) fn count(&self) -> u32 {
        self.lists.lock().used
    }

    /// The id of an index, if its group is gone though something refers to it, and the bytes that are booked under it.
    pub(crate) fn gone_at(&self, index: u32) -> Option<(GroupId, u64)> {
        let entry = self.table.get(index)?;
        let references = entry.references.load(Ordering::Relaxed);
        let link = entry.link.load(Ordering::Relaxed);
        let is_gone = references > 0 && link != NONE && link & HEIR != 0;
        is_gone.then(|| (GroupId::new(index, entry.generation.load(Ordering::Relaxed)), entry.booked()))
    }

    /// Indexes that there are.
    pub(crate) fn len(&self) -> u32 {
        self.table.len()
    }

    pub(crate) fn each_mapping<P: Platform>(&self, platform: &P, each: &mut dyn FnMut(usize, usize)) {
        self.table.each_mapping(platform, each);
    }

    /// # Safety
    /// As for [`Table::close`].
    pub(crate) unsafe fn close<P: Platform>(&self, platform: &P) {
        // SAFETY: as the caller promises.
        unsafe { self.table.close(platform) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use neap_base::virtual_platform::Virtual;

    #[test]
    fn who_asks_for_the_group_itself_shortens_no_way() {
        let (machine, owners) = (Virtual::new(4096, 1), Owners::new());
        let [first, second, third] = [1, 2, 3].map(|slot| owners.open(&machine, slot).unwrap());
        let link = || owners.entry(first).unwrap().link.load(Ordering::Relaxed) & INDEX;
        assert_eq!((owners.own(first), owners.behind(first)), (Some(1), Some(Behind::Group(1))));
        owners.inherit(first, second);
        owners.inherit(second, third);
        assert_eq!((owners.own(first), owners.own(third), link()), (None, Some(3), second.index()));
        assert_eq!((owners.behind(first), link()), (Some(Behind::Heir(3)), third.index()));
        // SAFETY: nobody uses it any more.
        unsafe { owners.close(&machine) };
    }
}
