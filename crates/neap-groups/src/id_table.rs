//! Table of ids: each leads to a group, or to the heir of a deleted one.
//!
//! # Design
//!
//! A payer may keep the id of a group long after the group was deleted. An entry counts its
//! references: every byte booked under it, the group while it exists, and entries that inherit from
//! it. A deleted group's entry leads to its parent's entry, and so on upwards. A lookup through
//! several entries shortens the chain. Deleting a group changes one link, however many bytes it had
//! or inherited.
//!
//! An entry without references waits for a grace period, since a reader may still follow its link.
//! Then another id can have its index.
//!
//! # Locking
//!
//! One mutex protects the lists of free and waiting entries, and changes of chains. No other lock
//! of the groups is taken under it.

use crate::id::{GroupId, INDEX_BITS, LAST_GENERATION, MOST_GROUPS};
use crate::table::{Entry, FIRST, Table};
use core::mem::offset_of;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use neap_base::platform::Errno;
use neap_base::{Mutex, Platform};

/// Bit of a link that leads to an heir's entry, not to a group.
const HEIR: u32 = 1 << 31;
/// Bit, beside [`HEIR`], of an entry that still has the group's own reference.
const DYING: u32 = 1 << 30;
/// Bits of a link with the index of an entry.
const INDEX: u32 = DYING - 1;
/// End of a list, and the link of a free entry.
const NONE: u32 = u32::MAX;

/// An entry.
#[derive(Debug, Default)]
pub(crate) struct IdEntry {
    /// Generation of the newest id with this index; 0 if there was none yet.
    generation: AtomicU32,
    /// The slot of the group, or, with [`HEIR`], the index of the heir's entry.
    link: AtomicU32,
    references: AtomicU64,
    /// The next entry in a list of free or waiting entries.
    next: AtomicU32,
    /// Number of entries that inherit from it. Each has one of the references.
    heirs: AtomicU32,
}

impl IdEntry {
    /// Returns the bytes that are booked under it.
    fn booked(&self) -> u64 {
        let own = match self.link.load(Ordering::Relaxed) {
            link if link & HEIR == 0 || link & DYING != 0 => 1,
            _ => 0,
        };
        let others = u64::from(self.heirs.load(Ordering::Relaxed)) + own;
        self.references.load(Ordering::Relaxed).saturating_sub(others)
    }
}

// SAFETY: all fields are atomic integers. Zeroed memory is valid for these, and they change only
// atomically.
unsafe impl Entry for IdEntry {}

/// The table of ids.
#[derive(Debug)]
pub(crate) struct IdTable {
    table: Table<IdEntry>,
    lists: Mutex<FreeIds>,
}

#[derive(Debug)]
struct FreeIds {
    free: u32,
    /// Entries without references. The grace period of the second list has begun.
    waiting: [u32; 2],
    /// Number of entries that were ever used.
    fresh: u32,
    used: u32,
    /// Number of entries in the two waiting lists.
    buried: u32,
}

/// Grace periods that are needed before slots or ids are used again.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct GraceNeeds {
    /// Whether any wait for a grace period to begin.
    pub(crate) to_begin: bool,
    /// Whether any wait for one to end.
    pub(crate) to_end: bool,
}

impl GraceNeeds {
    /// The needs of two lists. The grace period of the second one has begun.
    pub(crate) fn of_lists([begins, ends]: [u32; 2]) -> GraceNeeds {
        GraceNeeds { to_begin: begins != NONE, to_end: ends != NONE }
    }
}

/// Room of the table for ids.
#[derive(Clone, Copy)]
pub(crate) struct IdRoom {
    /// Number of entries that have memory, used ones included.
    pub(crate) entries: u32,
    /// Whether the next id needs more entries.
    pub(crate) is_full: bool,
}

/// Sums over all entries: see [`IdTable::census`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Census {
    pub(crate) used: u64,
    pub(crate) with_heir: u64,
    pub(crate) heirs: u64,
    pub(crate) own: u64,
    pub(crate) booked: u64,
    pub(crate) references: u64,
}

/// Target of an id.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IdTarget {
    /// The group itself, in this slot.
    Group(u32),
    /// The slot of its heir: the group is deleted.
    Heir(u32),
}

impl IdTarget {
    pub(crate) fn slot(self) -> u32 {
        let (IdTarget::Group(slot) | IdTarget::Heir(slot)) = self;
        slot
    }
}

impl IdTable {
    pub(crate) fn new() -> IdTable {
        let lists = FreeIds { free: NONE, waiting: [NONE; 2], fresh: 0, used: 0, buried: 0 };
        IdTable { table: Table::new(), lists: Mutex::new(lists) }
    }

    /// Opens an id for the group in `slot`.
    ///
    /// # Errors
    /// `NOSPC` if all [`MOST_GROUPS`] indexes are used; the system's error if there is no memory.
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

    fn entry(&self, id: GroupId) -> Option<&IdEntry> {
        // Generation 0 is excluded: a fresh entry has it, and its link would lead to the root.
        // Acquire pairs with the Release in `open`.
        let is_of =
            |entry: &&IdEntry| entry.generation.load(Ordering::Acquire) == id.generation() && id.generation() > 0;
        self.table.get(id.index()).filter(is_of)
    }

    /// Returns whether the group of an id exists.
    pub(crate) fn exists(&self, id: GroupId) -> bool {
        self.own(id).is_some()
    }

    /// Returns the slot of an id's own group, if that exists. Shortens no chain, so it takes no
    /// lock.
    pub(crate) fn own(&self, id: GroupId) -> Option<u32> {
        // Acquire pairs with the Release in `lead`.
        Some(self.entry(id)?.link.load(Ordering::Acquire)).filter(|link| link & HEIR == 0)
    }

    /// Returns the target of an id; `None` for an id that is not in use any more. The caller must
    /// be within a read of the groups' RCU domain.
    pub(crate) fn behind(&self, id: GroupId) -> Option<IdTarget> {
        let first = self.entry(id)?;
        let (mut entry, mut hops) = (first, 0);
        let slot = loop {
            // Acquire pairs with the Release in `lead`: the heir's entry is visible.
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
        Some(if hops == 0 { IdTarget::Group(slot) } else { IdTarget::Heir(slot) })
    }

    /// Makes an entry lead directly to the last one of its chain, unless another thread holds the
    /// mutex.
    #[cold]
    fn shorten(&self, first: &IdEntry) {
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

    /// Makes the entry at `index` the heir of `entry`. The caller holds the mutex.
    fn lead(&self, entry: &IdEntry, index: u32, dying: u32) {
        if let Some(heir) = self.table.get(index) {
            heir.references.fetch_add(1, Ordering::Relaxed);
            heir.heirs.fetch_add(1, Ordering::Relaxed);
            // Pairs with the Acquire in `behind`.
            entry.link.store(index | HEIR | dying, Ordering::Release);
        }
    }

    /// Counts charged bytes as references to an id that has a group or bytes already.
    pub(crate) fn ref_bytes(&self, id: GroupId, bytes: u64) {
        if let Some(entry) = self.entry(id) {
            entry.references.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Drops the references of uncharged bytes to an id.
    pub(crate) fn unref_bytes(&self, id: GroupId, bytes: u64) {
        let Some(entry) = self.entry(id) else { return };
        // While the group exists, its own reference remains, so the mutex is taken only for a
        // deleted group.
        // AcqRel pairs with the other decrements: the thread that takes the last reference sees
        // all that was done under each.
        if entry.references.fetch_sub(bytes, Ordering::AcqRel) == bytes {
            self.bury(&mut self.lists.lock(), id.index());
        }
    }

    /// Makes the id of a deleted group lead to the id of `heir`. The group's own reference stays
    /// until [`IdTable::leave`].
    pub(crate) fn inherit(&self, id: GroupId, heir: GroupId) {
        let _lists = self.lists.lock();
        if let (Some(entry), Some(_)) = (self.entry(id), self.entry(heir)) {
            self.lead(entry, heir.index(), DYING);
        }
    }

    /// Drops a deleted group's reference to its own id.
    pub(crate) fn leave(&self, id: GroupId) {
        {
            let _lists = self.lists.lock();
            let Some(entry) = self.entry(id) else { return };
            // As in `lead`.
            entry.link.store(entry.link.load(Ordering::Relaxed) & !DYING, Ordering::Release);
        }
        self.unref_bytes(id, 1);
    }

    /// Drops a reference by an entry that inherited from the one at `index`.
    fn drop_heir(&self, lists: &mut FreeIds, index: u32) {
        let Some(entry) = self.table.get(index) else { return };
        entry.heirs.fetch_sub(1, Ordering::Relaxed);
        // AcqRel: as in `unref_bytes`.
        if entry.references.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.bury(lists, index);
        }
    }

    /// Puts an entry without references into the first waiting list. The caller holds the mutex.
    fn bury(&self, lists: &mut FreeIds, index: u32) {
        let Some(entry) = self.table.get(index) else { return };
        entry.next.store(lists.waiting[0], Ordering::Relaxed);
        lists.waiting[0] = index;
        lists.buried += 1;
    }

    /// Returns the grace periods that entries wait for.
    pub(crate) fn grace_needs(&self) -> GraceNeeds {
        GraceNeeds::of_lists(self.lists.lock().waiting)
    }

    /// Begins a grace period for the entries that wait for one. The caller has ended the previous
    /// one.
    pub(crate) fn begin_grace(&self) {
        let mut lists = self.lists.lock();
        lists.waiting = [NONE, lists.waiting[0]];
    }

    /// Frees the entries that waited for the grace period that has ended. No reader uses them any
    /// more.
    pub(crate) fn end_grace(&self) {
        let mut lists = self.lists.lock();
        let mut index = core::mem::replace(&mut lists.waiting[1], NONE);
        while let Some(entry) = self.table.get(index) {
            let following = entry.next.load(Ordering::Relaxed);
            lists.used -= 1;
            lists.buried -= 1;
            let generation = entry.generation.load(Ordering::Relaxed);
            if generation < LAST_GENERATION {
                // No id has the index of a free entry.
                entry.next.store(lists.free, Ordering::Relaxed);
                lists.free = index;
            }
            let link = entry.link.swap(NONE, Ordering::Relaxed);
            // A group that was not completely made has no heir.
            if link & HEIR != 0 {
                self.drop_heir(&mut lists, link & INDEX);
            }
            index = following;
        }
    }

    /// Adds up all entries: those in use, those with an heir, those with their own group (also if
    /// deleted lately), references, and booked bytes.
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

    /// Returns the room of the table.
    pub(crate) fn room(&self) -> IdRoom {
        let (lists, entries) = (self.lists.lock(), self.table.len());
        IdRoom { entries, is_full: lists.free == NONE && lists.fresh == entries }
    }

    /// Returns the number of entries in the waiting lists.
    pub(crate) fn waiting(&self) -> u64 {
        self.lists.lock().buried.into()
    }

    /// Returns the number of entries in use, waiting ones included.
    pub(crate) fn count(&self) -> u32 {
        self.lists.lock().used
    }

    /// Returns the address of the number that [`IdTable::count`] returns.
    pub(crate) fn used_word(&self) -> *const u32 {
        &raw const self.lists.lock().used
    }

    /// Returns names and values for readers of this process's memory: see
    /// [`Groups::ids_layout`](crate::Groups::ids_layout).
    pub(crate) fn memory_layout(&self) -> [(&'static str, usize); 12] {
        let at_indexes: *const u32 = &raw const self.lists.lock().fresh;
        [
            ("ids_table", self.table.chunks_word().expose_provenance()),
            ("first_chunk", FIRST as usize),
            ("at_indexes", at_indexes.expose_provenance()),
            ("id_length", size_of::<IdEntry>()),
            ("in_id_generation", offset_of!(IdEntry, generation)),
            ("in_id_link", offset_of!(IdEntry, link)),
            ("in_id_references", offset_of!(IdEntry, references)),
            ("in_id_heirs", offset_of!(IdEntry, heirs)),
            ("free_link", NONE as usize),
            ("heir_bit", HEIR as usize),
            ("dying_bit", DYING as usize),
            ("index_bits", INDEX_BITS as usize),
        ]
    }

    /// Returns the id of an index, if it is referred to though its group is deleted, and the bytes
    /// booked under it.
    pub(crate) fn gone_at(&self, index: u32) -> Option<(GroupId, u64)> {
        let entry = self.table.get(index)?;
        let references = entry.references.load(Ordering::Relaxed);
        let link = entry.link.load(Ordering::Relaxed);
        let is_gone = references > 0 && link != NONE && link & HEIR != 0;
        is_gone.then(|| (GroupId::new(index, entry.generation.load(Ordering::Relaxed)), entry.booked()))
    }

    /// Returns the number of indexes.
    pub(crate) fn len(&self) -> u32 {
        self.table.len()
    }

    pub(crate) fn each_mapping<P: Platform>(&self, platform: &P, each: &mut dyn FnMut(usize, usize)) {
        self.table.each_mapping(platform, each);
    }

    /// Unmaps the table of ids.
    ///
    /// # Safety
    /// No thread uses an entry any more, and the platform is the one that [`IdTable::open`] was
    /// called with.
    pub(crate) unsafe fn close<P: Platform>(&self, platform: &P) {
        // SAFETY: by this function's contract no thread has an entry, and the table grew on this
        // platform.
        unsafe { self.table.close(platform) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use neap_testing::virtual_platform::Virtual;

    #[test]
    fn id_table_own_lookup_shortens_no_chain() {
        let (machine, owners) = (Virtual::new(4096, 1), IdTable::new());
        let [first, second, third] = [1, 2, 3].map(|slot| owners.open(&machine, slot).unwrap());
        let link = || owners.entry(first).unwrap().link.load(Ordering::Relaxed) & INDEX;
        assert_eq!((owners.own(first), owners.behind(first)), (Some(1), Some(IdTarget::Group(1))));
        owners.inherit(first, second);
        owners.inherit(second, third);
        assert_eq!((owners.own(first), owners.own(third), link()), (None, Some(3), second.index()));
        assert_eq!((owners.behind(first), link()), (Some(IdTarget::Heir(3)), third.index()));
        // SAFETY: no thread has an entry any more, and the table grew on this machine.
        unsafe { owners.close(&machine) };
    }
}
