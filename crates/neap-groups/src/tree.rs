//! The tree of groups: names, links, creation and deletion.
//!
//! # Design
//!
//! A deleted group leaves the tree at once, and its path is free. Its slot is freed only after a
//! grace period: a charge may still go up through the slot, or a reader may follow its link to the
//! next sibling. The slot is also kept until stocks hold no bytes of the group. Lists of deleted
//! groups use the links of buckets, since threads follow these only under the mutex.
//!
//! # Locking
//!
//! One mutex protects changes of links, names and lists, and lookups of paths. Charges go up the
//! tree without it, and readers go down without it. Within a read of the RCU domain of the groups,
//! a group that was found stays in its slot, and its links stay valid. The mutex of the ids may be
//! taken under the tree's mutex. Items of a deleted group move to its parent under the tree's
//! mutex.

use crate::error::GroupError;
use crate::group::{Bound, DEEPEST, Group, GroupSlot, NONE, ROOT, is_name};
use crate::id::GroupId;
use crate::id_table::{GraceNeeds, IdTable, IdTarget};
use crate::protection::{Claim, GroupUsage};
use crate::table::Table;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use neap_base::platform::Errno;
use neap_base::{Mutex, Platform};
use neap_percpu::{Handle, Owner};

/// Number of hash buckets for lookups by name. With a hundred thousand groups, a bucket has about
/// 24.
const BUCKETS: usize = 4096;

/// All groups.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) slots: Table<Group>,
    pub(crate) owners: IdTable,
    /// Address of a mapping of [`BUCKETS`] words. Each has the first slot of a bucket, plus one.
    buckets: usize,
    lists: Mutex<FreeSlots>,
    /// Number of passes of reclaim that have begun. Each pass computes sums over children anew.
    passes: AtomicU64,
    /// Children that were visited for such sums.
    summed: AtomicU64,
}

#[derive(Debug)]
struct FreeSlots {
    free: u32,
    /// Number of slots that were ever used.
    fresh: u32,
    /// Lists of deleted groups. The grace period of the second list has begun.
    dying: [u32; 2],
    live: u32,
    dying_count: u32,
}

/// Numbers of groups and ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct GroupCount {
    /// Groups in the tree, the root included.
    pub live: u32,
    /// Deleted groups that still have a slot, because readers may use it.
    pub dying: u32,
    /// Slots that were ever used.
    pub slots: u32,
    /// Ids in use: groups, and deleted ones that are still referred to.
    pub ids: u32,
}

impl Tree {
    pub(crate) fn open<P: Platform>(platform: &P, per_cpu: (Owner, Handle)) -> Result<Tree, Errno> {
        let tree = Tree {
            slots: Table::new(),
            owners: IdTable::new(),
            buckets: platform.map(buckets_length(platform))?,
            lists: Mutex::new(FreeSlots { free: NONE, fresh: 0, dying: [NONE; 2], live: 0, dying_count: 0 }),
            passes: AtomicU64::new(0),
            summed: AtomicU64::new(0),
        };
        let root = tree.add(&mut tree.lists.lock(), platform, NONE, "", per_cpu);
        if let Err(error) = root {
            // SAFETY: this function made the tree, and no other thread has a reference to it. The
            // mappings are of this platform.
            unsafe { tree.close(platform) };
            return Err(error);
        }
        Ok(tree)
    }

    /// Unmaps the tree.
    ///
    /// # Safety
    /// No thread uses the tree any more. The platform is the one that the tree was opened with.
    pub(crate) unsafe fn close<P: Platform>(&self, platform: &P) {
        // SAFETY: by this function's contract no thread uses the tree or an entry of its tables.
        // `open` mapped the buckets with this length, on this platform.
        unsafe {
            self.slots.close(platform);
            self.owners.close(platform);
            platform.unmap(self.buckets, buckets_length(platform));
        }
    }

    pub(crate) fn each_mapping<P: Platform>(&self, platform: &P, each: &mut dyn FnMut(usize, usize)) {
        self.slots.each_mapping(platform, each);
        self.owners.each_mapping(platform, each);
        each(self.buckets, buckets_length(platform));
    }

    /// Returns the group in a slot; `None` for [`NONE`]. Every other number that a link has is a
    /// valid slot.
    pub(crate) fn group(&self, slot: u32) -> Option<&Group> {
        self.slots.get(slot)
    }

    /// Returns a slot and the slots above it, up to the root.
    pub(crate) fn upwards(&self, slot: u32) -> impl Iterator<Item = (u32, &Group)> {
        let above = |(_, group): &(u32, &Group)| {
            let parent = group.parent.load(Ordering::Relaxed);
            self.group(parent).map(|group| (parent, group))
        };
        core::iter::successors(self.group(slot).map(|group| (slot, group)), above)
    }

    fn slot<P: Platform>(&self, lists: &mut FreeSlots, platform: &P) -> Result<u32, Errno> {
        if let Some(group) = self.group(lists.free) {
            let slot = lists.free;
            lists.free = group.next.load(Ordering::Relaxed);
            return Ok(slot);
        }
        if lists.fresh == self.slots.len() {
            self.slots.grow(platform)?;
        }
        lists.fresh += 1;
        Ok(lists.fresh - 1)
    }

    /// Adds a group below the one in slot `parent`. The caller holds the mutex.
    fn add<P: Platform>(
        &self,
        lists: &mut FreeSlots,
        platform: &P,
        parent: u32,
        name: &str,
        (owner, counts): (Owner, Handle),
    ) -> Result<GroupId, Errno> {
        let slot = self.slot(lists, platform)?;
        let (Some(group), above) = (self.group(slot), self.group(parent)) else { return Err(Errno::NOMEM) };
        let id = self.owners.open(platform, slot).inspect_err(|_| {
            group.next.store(lists.free, Ordering::Relaxed);
            lists.free = slot;
        })?;
        let events = group.local_events.iter().chain(&group.events_below);
        let sums = [&group.counters.usage, &group.counters.peak, &group.unused, &group.stalled];
        for counter in events.chain(sums) {
            counter.store(0, Ordering::Relaxed);
        }
        Bound::ALL.into_iter().for_each(|bound| group.set_bound(bound, bound.default()));
        let eldest = above.map_or(NONE, |above| above.first_child.load(Ordering::Relaxed));
        for (link, value) in [
            (&group.parent, parent),
            (&group.depth, above.map_or(1, |above| above.depth.load(Ordering::Relaxed) + 1)),
            (&group.first_child, NONE),
            (&group.next, eldest),
            (&group.previous, NONE),
            (&group.children, 0),
            (&group.made_for, 0),
            (&group.is_leaving, 0),
            (&group.stalls, 0),
        ] {
            link.store(value, Ordering::Relaxed);
        }
        Bound::CLAIMS.into_iter().for_each(|claim| group.claims(claim).reads_left.store(0, Ordering::Relaxed));
        group.set_name(name);
        group.per_cpu.store(owner.to_bits(), Ordering::Relaxed);
        group.counts.store(counts.to_bits().get(), Ordering::Relaxed);
        group.id.store(id.to_bits(), Ordering::Release); // Pairs with the Acquire in `Group::id`.
        if let Some(above) = above {
            // Release pairs with the Acquire in `Tree::first_child`: a reader that finds the group
            // sees it complete.
            above.first_child.store(slot, Ordering::Release);
            above.children.fetch_add(1, Ordering::Relaxed);
            self.group(eldest).inspect(|eldest| eldest.previous.store(slot, Ordering::Relaxed));
            let bucket = self.bucket(parent, name);
            group.bucket_next.store(bucket.swap(slot + 1, Ordering::Relaxed), Ordering::Relaxed);
        }
        lists.live += 1;
        Ok(id)
    }

    fn bucket(&self, parent: u32, name: &str) -> &AtomicU32 {
        // FNV-1a.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325 ^ u64::from(parent), |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let bucket = (hash ^ hash >> 32) as usize % BUCKETS;
        // SAFETY: `open` mapped `BUCKETS` zeroed words, which are valid atomic integers and stay
        // mapped until `close`. The index is below `BUCKETS`.
        unsafe { &*core::ptr::with_exposed_provenance::<AtomicU32>(self.buckets).add(bucket) }
    }

    fn in_bucket(&self, bucket: &AtomicU32) -> impl Iterator<Item = (u32, &Group)> {
        let entry = move |link: &AtomicU32| {
            let slot = link.load(Ordering::Relaxed).wrapping_sub(1);
            self.group(slot).map(|group| (slot, group))
        };
        core::iter::successors(entry(bucket), move |(_, group)| entry(&group.bucket_next))
    }

    /// Returns the child with a name. The caller holds the mutex.
    fn child(&self, parent: u32, name: &str) -> Option<&Group> {
        let is_it = |group: &Group| group.parent.load(Ordering::Relaxed) == parent && group.name().as_str() == name;
        self.in_bucket(self.bucket(parent, name)).map(|(_, group)| group).find(|group| is_it(group))
    }

    /// Returns the slot of a group that exists. It stays there under the mutex, or within a read.
    pub(crate) fn slot_of(&self, id: GroupId) -> Result<u32, GroupError> {
        match self.owners.behind(id) {
            Some(IdTarget::Group(slot)) => Ok(slot),
            _ => Err(GroupError::NoSuchGroup),
        }
    }

    /// Makes a group below `parent`.
    ///
    /// # Errors
    /// [`GroupError`] gives the reason. The tree is unchanged then.
    pub(crate) fn create<P: Platform>(
        &self,
        platform: &P,
        parent: GroupId,
        name: &str,
        per_cpu: (Owner, Handle),
    ) -> Result<GroupId, GroupError> {
        if !is_name(name) {
            return Err(GroupError::BadName);
        }
        let mut lists = self.lists.lock();
        let above = self.slot_of(parent)?;
        if self.group(above).is_none_or(|group| group.depth.load(Ordering::Relaxed) >= DEEPEST) {
            return Err(GroupError::TooDeep);
        }
        if self.child(above, name).is_some() {
            return Err(GroupError::Exists);
        }
        Ok(self.add(&mut lists, platform, above, name, per_cpu)?)
    }

    /// Returns the group at a path from `from` on: names separated by `/`, or an empty path for
    /// `from` itself.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`].
    pub(crate) fn find(&self, from: GroupId, path: &str) -> Result<GroupId, GroupError> {
        let _lists = self.lists.lock();
        let mut slot = self.slot_of(from)?;
        let mut id = from;
        for name in path.split('/').filter(|_| !path.is_empty()) {
            id = self.child(slot, name).ok_or(GroupError::NoSuchGroup)?.id();
            slot = self.slot_of(id)?;
        }
        Ok(id)
    }

    /// Takes a group without children out of the tree and returns its slot, which then waits for a
    /// grace period. The group's charges become its parent's.
    ///
    /// Before that it calls `reparent` with the group and its parent, to move attached items. From
    /// then on no thread attaches an item to the group.
    ///
    /// # Errors
    /// [`GroupError`] gives the reason. The tree is unchanged then.
    pub(crate) fn delete(&self, id: GroupId, reparent: impl FnOnce(GroupSlot, GroupSlot)) -> Result<u32, GroupError> {
        let mut lists = self.lists.lock();
        let slot = self.slot_of(id)?;
        let group = self.group(slot).ok_or(GroupError::NoSuchGroup)?;
        let parent = group.parent.load(Ordering::Relaxed);
        let above = self.group(parent).ok_or(GroupError::Root)?;
        if group.children.load(Ordering::Relaxed) > 0 {
            return Err(GroupError::HasChildren);
        }
        // The parent does not count the claims of the group any more.
        Bound::CLAIMS.into_iter().for_each(|bound| self.set_bound(group, bound, 0));
        group.is_leaving.store(1, Ordering::Relaxed);
        reparent(GroupSlot { group: id, slot }, GroupSlot { group: above.id(), slot: parent });
        // From here on the group's id leads to the parent, so the charges are the parent's.
        self.owners.inherit(id, above.id());
        let (previous, next) = (group.previous.load(Ordering::Relaxed), group.next.load(Ordering::Relaxed));
        let before = self.group(previous).map_or(&above.first_child, |previous| &previous.next);
        // Release, as in `add`: another thread may have made the next sibling.
        before.store(next, Ordering::Release);
        self.group(next).inspect(|next| next.previous.store(previous, Ordering::Relaxed));
        above.children.fetch_sub(1, Ordering::Relaxed);
        let name = group.name();
        let bucket = self.bucket(parent, name.as_str());
        let link = self.in_bucket(bucket).map(|(_, group)| &group.bucket_next);
        let link = core::iter::once(bucket).chain(link).find(|link| link.load(Ordering::Relaxed) == slot + 1);
        link.inspect(|link| link.store(group.bucket_next.load(Ordering::Relaxed), Ordering::Relaxed));
        // `next` stays: a reader at this group may follow it.
        group.bucket_next.store(lists.dying[0], Ordering::Relaxed);
        lists.dying[0] = slot;
        lists.live -= 1;
        lists.dying_count += 1;
        Ok(slot)
    }

    /// Returns whether the next group would grow a table of which deleted groups hold at least a
    /// quarter.
    pub(crate) fn is_crowded(&self) -> bool {
        let lists = self.lists.lock();
        let (slots, ids) = (self.slots.len(), self.owners.room());
        let no_slot = lists.free == NONE && lists.fresh == slots;
        let dying = u64::from(lists.dying_count);
        no_slot && dying >= u64::from(slots / 4)
            || ids.is_full && dying + self.owners.waiting() >= u64::from(ids.entries / 4)
    }

    /// Returns the grace periods that slots and ids wait for.
    pub(crate) fn grace_needs(&self) -> GraceNeeds {
        let (slots, ids) = (GraceNeeds::of_lists(self.lists.lock().dying), self.owners.grace_needs());
        GraceNeeds { to_begin: slots.to_begin || ids.to_begin, to_end: slots.to_end || ids.to_end }
    }

    /// Begins a grace period for all groups that were deleted by now. The caller has ended the
    /// previous one.
    pub(crate) fn begin_grace(&self) {
        let mut lists = self.lists.lock();
        lists.dying = [NONE, lists.dying[0]];
        drop(lists);
        self.owners.begin_grace();
    }

    /// Calls `each` with every group that waited for the grace period that has ended, and frees its
    /// slot. The caller has emptied the stocks of these groups.
    pub(crate) fn end_grace(&self, mut each: impl FnMut(&Group)) {
        let mut slot = core::mem::replace(&mut self.lists.lock().dying[1], NONE);
        while let Some(group) = self.group(slot) {
            each(group);
            let id = group.id();
            let mut lists = self.lists.lock();
            let following = group.bucket_next.load(Ordering::Relaxed);
            group.id.store(0, Ordering::Relaxed);
            group.next.store(lists.free, Ordering::Relaxed);
            lists.free = slot;
            lists.dying_count -= 1;
            drop(lists);
            self.owners.leave(id);
            slot = following;
        }
        self.owners.end_grace();
    }

    /// Calls `each` with every deleted group that still has its slot. This holds no mutex
    /// meanwhile, so the caller must be the only user.
    pub(crate) fn each_dying(&self, mut each: impl FnMut(&Group)) {
        let dying = self.lists.lock().dying;
        for mut slot in dying {
            while let Some(group) = self.group(slot) {
                each(group);
                slot = group.bucket_next.load(Ordering::Relaxed);
            }
        }
    }

    /// Returns the numbers of groups, slots and ids.
    pub(crate) fn count(&self) -> GroupCount {
        let ids = self.owners.count();
        let lists = self.lists.lock();
        GroupCount { live: lists.live, dying: lists.dying_count, slots: lists.fresh, ids }
    }

    /// Returns the addresses of the numbers of dying groups and of slots.
    pub(crate) fn count_words(&self) -> [*const u32; 2] {
        let lists = self.lists.lock();
        [&raw const lists.dying_count, &raw const lists.fresh]
    }

    /// Returns the child of `parent` that follows `after`; the first child if `after` is `None`.
    /// The caller must be within a read.
    pub(crate) fn next_child(&self, parent: GroupId, after: Option<GroupId>) -> Option<GroupId> {
        let above = self.group(self.slot_of(parent).ok()?)?;
        let link = match after {
            None => &above.first_child,
            Some(id) => &self.group(self.slot_of(id).ok()?)?.next,
        };
        self.group(link.load(Ordering::Acquire)).map(Group::id) // As in `first_child`.
    }

    /// Writes the slots of a group and all its descendants to `slots`, in order, and returns their
    /// number. `None` if there is not room for all, or the group is gone. The caller must be within
    /// a read.
    pub(crate) fn slots_below(&self, top: GroupId, slots: &mut [u32]) -> Option<usize> {
        let (mut count, mut done) = (0, 0);
        let mut add = |slots: &mut [u32], slot| {
            slots.get_mut(count).map(|place| *place = slot)?;
            count += 1;
            Some(count)
        };
        let mut all = add(slots, self.slot_of(top).ok()?)?;
        while done < all {
            let mut child = self.first_child(self.group(slots[done])?);
            while let Some(group) = self.group(child) {
                all = add(slots, child)?;
                child = group.next.load(Ordering::Acquire); // As in `first_child`.
            }
            done += 1;
        }
        slots[..all].sort_unstable();
        Some(all)
    }

    /// Returns the slot of the newest child of a group, or [`NONE`].
    fn first_child(&self, group: &Group) -> u32 {
        // Acquire pairs with the Release in `add`, also if another child was removed in between.
        group.first_child.load(Ordering::Acquire)
    }

    /// Returns the children of a group, from the one in `slot` on, or all for [`NONE`]. The caller
    /// must be within a read.
    pub(crate) fn children_from(&self, group: &Group, slot: u32) -> impl Iterator<Item = (u32, &Group)> {
        let found = |slot: u32| self.group(slot).map(|group| (slot, group));
        let first = found(slot).map_or_else(|| self.first_child(group), |(slot, _)| slot);
        core::iter::successors(found(first), move |(_, group)| {
            found(group.next.load(Ordering::Acquire)) // As in `first_child`.
        })
    }

    /// Calls `each` with the children of a group. The caller must be within a read.
    pub(crate) fn each_child(&self, group: &Group, mut each: impl FnMut(&Group)) {
        self.children_from(group, NONE).for_each(|(_, child)| each(child));
    }

    /// Adds to the number of children that were visited.
    pub(crate) fn note_visits(&self, children: u64) {
        self.summed.fetch_add(children, Ordering::Relaxed);
    }

    /// Sets a bound of a group. The caller holds the mutex.
    pub(crate) fn set_bound(&self, group: &Group, bound: Bound, bytes: u64) {
        let before = group.bound(bound);
        group.set_bound(bound, bytes);
        let above = self.group(group.parent.load(Ordering::Relaxed));
        if let (Some(above), true) = (above, Bound::CLAIMS.contains(&bound) && (before == 0) != (bytes == 0)) {
            let claimants = &above.claims(bound).claimants;
            let others = claimants.load(Ordering::Relaxed).saturating_sub(u32::from(before != 0));
            claimants.store(others + u32::from(bytes != 0), Ordering::Relaxed);
        }
    }

    /// Returns the sum, over the children of a group, of the part of their claim that they use. The
    /// caller must be within a read.
    pub(crate) fn claimed_below(&self, group: &Group, claim: Bound) -> u64 {
        if group.claims(claim).claimants.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let (mut sum, mut children) = (0_u64, 0);
        self.each_child(group, |child| {
            sum = sum.saturating_add(child.claimed(claim));
            children += 1;
        });
        self.summed.fetch_add(children, Ordering::Relaxed);
        sum
    }

    /// Returns [`Tree::claimed_below`], computed at the first call in this pass. The caller must be
    /// within a read.
    ///
    /// The stored sum serves as many calls as the group has children. So a pass that visits all
    /// children computes the sum once, not once for each child. Concurrent passes share these
    /// calls, so a pass may compute a sum more than once. A sum from before the last
    /// [`Tree::begin_pass`] is not used.
    fn claimed_below_in_pass(&self, group: &Group, claim: Bound) -> u64 {
        let (claims, pass) = (group.claims(claim), self.passes.load(Ordering::Relaxed));
        // Both Acquire loads pair with the Release stores below: the sum is that of the pass, or of
        // a later one.
        let reads_left = claims.reads_left.load(Ordering::Acquire);
        if reads_left > 0 && claims.pass.load(Ordering::Acquire) == pass {
            claims.reads_left.store(reads_left - 1, Ordering::Relaxed);
            return claims.sum.load(Ordering::Relaxed);
        }
        let sum = self.claimed_below(group, claim);
        claims.sum.store(sum, Ordering::Relaxed);
        claims.pass.store(pass, Ordering::Release);
        claims.reads_left.store(group.children.load(Ordering::Relaxed).saturating_sub(1), Ordering::Release);
        sum
    }

    /// Begins a pass, which does not use sums of earlier passes.
    pub(crate) fn begin_pass(&self) {
        self.passes.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how many children were visited so far to add up `min` and `low`, and to find the
    /// largest holders.
    pub(crate) fn summed(&self) -> u64 {
        self.summed.load(Ordering::Relaxed)
    }

    /// Returns the bytes of a group that its claim protects, within the protection of its
    /// ancestors. The caller must be within a read.
    pub(crate) fn effective(&self, id: GroupId, claim: Bound) -> Result<u64, GroupError> {
        Ok(self.protection(self.slot_of(id)?, ROOT, claim, |above| self.claimed_below(above, claim)))
    }

    /// Returns the protected bytes of the group in a slot when memory is taken from `top` and its
    /// descendants. `top` and its ancestors protect nothing then. The caller must be within a read.
    ///
    /// `claimed_below` is [`Tree::claimed_below`], or equivalent.
    fn protection(&self, slot: u32, top: u32, claim: Bound, claimed_below: impl Fn(&Group) -> u64) -> u64 {
        let mut path = [NONE; DEEPEST as usize];
        let mut length = 0;
        for ((slot, _), place) in self.upwards(slot).zip(&mut path) {
            *place = slot;
            length += 1;
            if slot == top {
                break;
            }
        }
        let mut protection = 0;
        for pair in path[..length].windows(2).rev() {
            let [Some(group), Some(above)] = [pair[0], pair[1]].map(|slot| self.group(slot)) else { break };
            // A child of `top` gets all of its claim that it uses.
            if pair[1] == top {
                protection = group.claimed(claim);
                continue;
            }
            // If the parent has no protection, its descendants have none.
            if protection == 0 {
                break;
            }
            protection = Claim {
                usage: group.usage(),
                claim: group.bound(claim),
                parent_usage: above.usage(),
                parent_protection: protection,
                children_claimed: claimed_below(above),
            }
            .protection();
        }
        protection
    }

    /// Returns usage and protection of the group in a slot, relative to `top`. `None` if it is
    /// neither `top` nor a descendant. The caller must be within a read.
    pub(crate) fn standing(&self, slot: u32, top: GroupId) -> Option<GroupUsage> {
        let top = self.slot_of(top).ok()?;
        let group = self.group(slot).filter(|group| self.owners.exists(group.id()))?;
        if top != ROOT && !self.upwards(slot).any(|(above, _)| above == top) {
            return None;
        }
        let [low, min] = Bound::CLAIMS
            .map(|claim| self.protection(slot, top, claim, |above| self.claimed_below_in_pass(above, claim)));
        Some(GroupUsage { id: group.id(), usage: group.usage(), min, low })
    }

    /// Returns the bytes charged to a group without those of its descendants. The caller must be
    /// within a read.
    pub(crate) fn own_usage(&self, group: &Group) -> u64 {
        let mut own = group.usage();
        self.each_child(group, |child| own = own.saturating_sub(child.usage()));
        own
    }

    /// Calls `f` with the group in a slot, if there is one. The caller must be within a read, in
    /// which the group stays there.
    pub(crate) fn at<R>(&self, slot: u32, f: impl FnOnce(&Group) -> R) -> Option<R> {
        self.group(slot).filter(|group| self.owners.exists(group.id())).map(f)
    }

    /// Calls `f` with a group. The caller must be within a read, in which the group keeps its slot,
    /// though it may be deleted meanwhile.
    pub(crate) fn with<R>(&self, id: GroupId, f: impl FnOnce(&Group) -> R) -> Result<R, GroupError> {
        self.group(self.slot_of(id)?).map(f).ok_or(GroupError::NoSuchGroup)
    }

    /// Calls `f` with a group under the mutex, so it is not deleted or changed meanwhile.
    pub(crate) fn change<R>(&self, id: GroupId, f: impl FnOnce(&Group) -> R) -> Result<R, GroupError> {
        let _lists = self.lists.lock();
        self.with(id, f)
    }
}

fn buckets_length<P: Platform>(platform: &P) -> usize {
    (BUCKETS * size_of::<AtomicU32>()).next_multiple_of(platform.page_size())
}
