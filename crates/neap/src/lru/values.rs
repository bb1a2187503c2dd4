//! LRU lists of values, which the program refers to by handles. Their interface is safe, and
//! callbacks may do anything.
//!
//! # Design
//! The list has one reference to each value, and each [`Handle`] is another. A walk takes the
//! oldest items off while it holds the lock once. Then it calls `decide` with no lock held, and
//! puts back the items that stay. It does not put back a value that was removed meanwhile.
//!
//! A value whose key returns soon after its eviction enters a second list, of *protected* values.
//! Walks begin with the other values while these are more than a tenth of all values. So values
//! that are used once evict each other, and do not evict the values that are used again.
//!
//! # Locking
//! This module has no lock.

extern crate std;

use super::by_memory::place_of;
use super::{By, Group, GroupError, Item, LruStatus, PROCESS, ShrinkerId, Stamp, Turnover, Walked, made};
use crate::groups::Charge;
use crate::percpu::per_cpu_data::Source;
use crate::reclaim::{Context, Count, Scan};
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::{Deref, Range};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use neap_base::{Linux, Platform};
use neap_reclaim::lru::{End, Hands, LruList as Raw, MOST};
use std::sync::Arc;
use std::vec::Vec;

/// Walks begin with values without protection while these are more than one in so many of all
/// values.
const PROBATION: usize = 10;

/// A value with its item and the list that it belongs to.
#[repr(C)]
struct Entry<T> {
    item: Item,
    list: Raw,
    /// Bits of the stamp of the value's last eviction, or 0 before the first.
    stamp: AtomicU64,
    /// The bytes that the value counts for.
    weight: u64,
    charge: Option<Charge>,
    value: T,
}

/// A reference to a value that is, or was, on a list. It keeps the value alive.
pub struct Handle<T>(Arc<Entry<T>>);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        Handle(self.0.clone())
    }
}

impl<T> Handle<T> {
    fn new(list: Raw, weight: u64, charge: Option<Charge>, value: T) -> Handle<T> {
        Handle(Arc::new(Entry { item: Item::new(), list, stamp: AtomicU64::new(0), weight, charge, value }))
    }

    /// Returns the bytes that the value counts for. These are the bytes of its charge, or those
    /// passed to [`LruList::add_weighted`] or [`LruList::readmit`]. Returns 0 for other values.
    pub fn weight(&self) -> u64 {
        self.0.weight
    }

    /// Returns the stamp of the value's last eviction by a walk. A cache keeps it for the value's
    /// key, and passes it to [`LruList::readmit`]. Returns `None` if no walk evicted the value.
    pub fn stamp(&self) -> Option<Stamp> {
        // Relaxed: a hint; it publishes no other data.
        Stamp::from_bits(self.0.stamp.load(Ordering::Relaxed))
    }

    /// Returns the charge of a value that was added with one.
    pub fn charge(&self) -> Option<&Charge> {
        self.0.charge.as_ref()
    }
}

impl<T> Deref for Handle<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.value
    }
}

impl<T: fmt::Debug> fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Returns the list's reference to the entry of an item.
///
/// # Safety
/// The item is that of an entry of this type. The list's reference belongs to the caller now.
unsafe fn reference<T>(item: NonNull<Item>) -> Arc<Entry<T>> {
    // SAFETY: the item is at the start of an entry of this type, and its address comes from an
    // `Arc` of the entry. The list's reference is the caller's (both are the caller's promise).
    unsafe { Arc::from_raw(item.cast::<Entry<T>>().as_ptr()) }
}

/// Numbers of values of a group on a node.
#[derive(Clone, Copy, Default)]
struct ValueCounts {
    protected: usize,
    /// Those that are not protected.
    others: usize,
}

/// A list of values by group and node. Dropping it drops its references to the values.
pub struct LruList<T: Send + Sync + 'static> {
    list: Raw,
    /// Values that were needed again soon after their eviction.
    protected: Raw,
    /// Whether the lists mark a shrinker.
    marks: bool,
    values: PhantomData<Arc<T>>,
}

impl<T: Send + Sync + 'static> LruList<T> {
    /// Makes a list.
    ///
    /// # Errors
    /// [`GroupError::NoMemory`] if there is no memory for the list.
    pub fn new() -> Result<LruList<T>, GroupError> {
        LruList::open(None)
    }

    fn open(shrinker: Option<u64>) -> Result<LruList<T>, GroupError> {
        let listed = PROCESS.lists()?;
        let site = listed.site();
        let list = site.open(By::Group, shrinker)?;
        let protected = site.open(By::Group, shrinker).inspect_err(|_| {
            // SAFETY: this call has opened the list, which has no items. No other thread has seen
            // it.
            unsafe { site.close_list(list) };
        })?;
        Ok(LruList { list, protected, marks: shrinker.is_some(), values: PhantomData })
    }

    /// Makes a list that marks a shrinker when a group gets its first value on a node. The shrinker
    /// must know groups ([`by_group`](crate::reclaim::Builder::by_group)). Reclaim calls it only
    /// for groups that have values.
    ///
    /// ```
    /// use neap::groups::{Bound, Charge, Group};
    /// use neap::lru::{LruList, LruStatus};
    /// use neap::reclaim::{Context, Shrinker};
    /// use std::sync::Arc;
    ///
    /// // One list and one shrinker for all tenants.
    /// let prepared = Shrinker::named("pages").by_group().by_node().batch(8).prepare_shrink()?;
    /// let pages = Arc::new(LruList::<(Vec<u8>, Charge)>::for_shrinker(prepared.id())?);
    /// let (counted, shrunk) = (pages.clone(), pages.clone());
    /// let shrinker = prepared.start((
    ///     move |cx: &Context| counted.count_for(cx),
    ///     move |cx: &Context, objects| shrunk.evict(cx, objects, |_| LruStatus::Removed, drop),
    /// ))?;
    ///
    /// let tenant = Group::create("sites/acme")?;
    /// tenant.set(Bound::Max, 1 << 20)?;
    /// for _ in 0..64 {
    ///     let charge = tenant.charge(64 << 10)?;
    ///     pages.add(tenant, (vec![0; 64 << 10], charge))?;
    /// }
    /// assert!((1..=16).contains(&pages.count(tenant)));
    /// drop(shrinker);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`GroupError::NoMemory`] if there is no memory for the list.
    pub fn for_shrinker(shrinker: ShrinkerId) -> Result<LruList<T>, GroupError> {
        LruList::open(Some(shrinker.to_bits()))
    }

    /// Adds a value as the newest of a group, on the node nearest to this thread.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`] if the group is gone and neap cannot find its heir.
    pub fn add(&self, group: Group, value: T) -> Result<Handle<T>, GroupError> {
        let node = made().map_or(0, |listed| listed.grouped().node());
        self.add_on(group, node, value)
    }

    /// Adds a value as the newest of a group, on the node of the value's memory. A number beyond
    /// the last node stands for the last node.
    ///
    /// # Errors
    /// Those of [`LruList::add`].
    pub fn add_on(&self, group: Group, node: usize, value: T) -> Result<Handle<T>, GroupError> {
        self.add_entry(self.list, group, node, 0, None, value)
    }

    /// Adds a value that counts for `bytes` bytes, which are charged to no group. When
    /// [`LruList::evict`] evicts the value, it reports these bytes to reclaim as freed.
    ///
    /// # Errors
    /// Those of [`LruList::add`].
    pub fn add_weighted(&self, group: Group, node: usize, bytes: u64, value: T) -> Result<Handle<T>, GroupError> {
        self.add_entry(self.list, group, node, bytes, None, value)
    }

    /// Adds a value with its charge, as the newest of the charged group, on the charge's node. The
    /// charge ends when the list and all handles have dropped the value. So a group is charged for
    /// the values that the list has for it.
    ///
    /// # Errors
    /// Those of [`LruList::add`]. The charge ends then.
    pub fn add_charged(&self, charge: Charge, value: T) -> Result<Handle<T>, GroupError> {
        let (group, node, bytes) = (charge.group(), charge.node(), charge.bytes());
        self.add_entry(self.list, group, node, bytes, Some(charge), value)
    }

    /// Adds a value whose key was evicted before, as [`LruList::add_weighted`] does. Protects the
    /// value if the eviction was recent. It was recent if, since the [stamp](Handle::stamp), the
    /// group has evicted at most as many values on the node as it has there now.
    /// [`LruList::is_protected`] returns whether the value is protected.
    ///
    /// Walks take other values first while more than a tenth of the values are not protected.
    ///
    /// ```
    /// use neap::groups::Group;
    /// use neap::lru::{LruList, Stamp, LruStatus};
    /// use std::collections::HashMap;
    ///
    /// let (tenant, pages) = (Group::create("cache/returns")?, LruList::new()?);
    /// for key in 0..16 {
    ///     pages.add_on(tenant, 0, key)?;
    /// }
    /// let mut evicted: HashMap<u32, Stamp> = HashMap::new();
    /// pages.walk(tenant, 0, 1, |_| LruStatus::Removed, |page| {
    ///     evicted.extend(page.stamp().map(|stamp| (*page, stamp)));
    /// });
    ///
    /// // Key 0 is needed again. Key 1 is the oldest now, but had key 0 been kept, 1 would be gone.
    /// let page = pages.readmit(tenant, 0, 0, 0, evicted[&0])?;
    /// assert!(pages.is_protected(&page));
    /// assert_eq!(pages.turnover(tenant).refaults, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`LruList::add`].
    pub fn readmit(
        &self,
        group: Group,
        node: usize,
        bytes: u64,
        value: T,
        stamp: Stamp,
    ) -> Result<Handle<T>, GroupError> {
        self.add_entry(self.list_for(group, node, stamp), group, node, bytes, None, value)
    }

    /// Adds a value with its charge, as [`LruList::add_charged`] does, and protects it as
    /// [`LruList::readmit`] does.
    ///
    /// # Errors
    /// Those of [`LruList::add`]. The charge ends then.
    pub fn readmit_charged(&self, charge: Charge, value: T, stamp: Stamp) -> Result<Handle<T>, GroupError> {
        let (group, node, bytes) = (charge.group(), charge.node(), charge.bytes());
        self.add_entry(self.list_for(group, node, stamp), group, node, bytes, Some(charge), value)
    }

    /// Returns whether a value of this list is protected.
    pub fn is_protected(&self, handle: &Handle<T>) -> bool {
        handle.0.list == self.protected
    }

    /// Returns the number of evictions by walks on all nodes, and how many evicted keys returned
    /// soon. Counts the values of a group alone, or of its heir.
    pub fn turnover(&self, group: Group) -> Turnover {
        let Some((listed, group)) = made().zip(living(group)) else { return Turnover::default() };
        let all = (0..nodes()).map(|node| self.list.turnover(&listed.site(), group.id(), node));
        all.fold(Turnover::default(), |sum, node| Turnover {
            evicted: sum.evicted + node.evicted,
            refaults: sum.refaults + node.refaults,
        })
    }

    /// Returns the list for a value whose key has a stamp.
    fn list_for(&self, group: Group, node: usize, stamp: Stamp) -> Raw {
        let Some((listed, group)) = made().zip(living(group)) else { return self.list };
        let size = self.count_on(group, node);
        match self.list.refault(&listed.site(), group.id(), node, stamp, size) {
            true => self.protected,
            false => self.list,
        }
    }

    /// Returns whether a value was added to this list.
    fn owns(&self, handle: &Handle<T>) -> bool {
        handle.0.list == self.list || handle.0.list == self.protected
    }

    /// Adds a value as the newest of the group that [pays](crate::groups::payer_of) for its memory,
    /// on the node of that memory. If neap is the allocator, that is the group of the thread that
    /// allocated the memory. If no group pays, adds the value to the root.
    ///
    /// # Errors
    /// Those of [`LruList::add`].
    pub fn add_by_memory(&self, value: T) -> Result<Handle<T>, GroupError> {
        let handle = Handle::new(self.list, 0, None, value);
        let (group, node) = place_of(&*handle.0);
        self.add_again(Group::from_id(group), node, &handle)?;
        Ok(handle)
    }

    fn add_entry(
        &self,
        list: Raw,
        group: Group,
        node: usize,
        weight: u64,
        charge: Option<Charge>,
        value: T,
    ) -> Result<Handle<T>, GroupError> {
        let handle = Handle::new(list, weight, charge, value);
        self.add_again(group, node, &handle)?;
        Ok(handle)
    }

    /// Makes a value the newest of its group on its node, because it was used. Returns `false` if
    /// the value is not on this list, or a walk calls `decide` with it at this moment.
    pub fn touch(&self, handle: &Handle<T>) -> bool {
        let (Some(listed), true) = (made(), self.owns(handle)) else { return false };
        // SAFETY: the handle keeps the item in place. This list calls no callback under the lock,
        // and a callback of a raw list must not call neap.
        unsafe { handle.0.list.touch(&listed.site(), item_in(&handle.0)) }
    }

    /// Adds a value of this list that was taken off it. Returns `false` if the value is on the list
    /// or belongs to another one. A value with a charge goes to the group and node of that charge,
    /// not to those given here.
    ///
    /// # Errors
    /// Those of [`LruList::add`].
    pub fn add_again(&self, group: Group, node: usize, handle: &Handle<T>) -> Result<bool, GroupError> {
        if !self.owns(handle) {
            return Ok(false);
        }
        let (group, node) = handle.charge().map_or((group, node), |charge| (charge.group(), charge.node()));
        let listed = made().ok_or(GroupError::NoSuchGroup)?;
        let item = item_of(handle.0.clone());
        // SAFETY: `item_of` leaked a reference for the list. It keeps the entry in place until the
        // item is taken off. This list calls no callback under the lock, and a callback of a raw
        // list must not call neap.
        let added = unsafe { handle.0.list.add(&listed.site(), group.id(), node, item) };
        if added != Ok(true) {
            // SAFETY: the item's entry has this type. `item_of` leaked the reference above, and the
            // list did not take it.
            drop(unsafe { reference::<T>(item) });
        }
        added
    }

    /// Takes a value off the list. Returns whether this call took it off. A walk that calls
    /// `decide` with the value at this moment does not put it back.
    pub fn remove(&self, handle: &Handle<T>) -> bool {
        let (Some(listed), true) = (made(), self.owns(handle)) else { return false };
        let item = item_in(&handle.0);
        while handle.0.item.is_linked() {
            // SAFETY: the handle keeps the entry in place. This list calls no callback under the
            // lock, and a callback of a raw list must not call neap.
            if unsafe { handle.0.list.del(&listed.site(), item) } {
                // SAFETY: the item's entry has this type. `del` took the item off, so the list's
                // reference is this call's. The caller has another one.
                drop(unsafe { reference::<T>(item) });
                return true;
            }
            // A walk has taken the item off. It drops the list's reference.
            if handle.0.item.leave_hands() {
                return true;
            }
        }
        false
    }

    /// Returns how many values of a group alone, or of its heir, are on the list, on all nodes.
    /// Takes no lock.
    pub fn count(&self, group: Group) -> usize {
        (0..nodes()).map(|node| self.count_on(group, node)).sum()
    }

    /// Returns how many values of a group alone, or of its heir, are on the list on a node. Takes
    /// no lock.
    pub fn count_on(&self, group: Group, node: usize) -> usize {
        let ValueCounts { others, protected } = self.counts(group, node);
        others + protected
    }

    /// Returns how many values of a group alone, or of its heir, are on a node.
    fn counts(&self, group: Group, node: usize) -> ValueCounts {
        let Some((listed, group)) = made().zip(living(group)) else { return ValueCounts::default() };
        let count = |list: Raw| list.count(&listed.site(), group.id(), node);
        ValueCounts { others: count(self.list), protected: count(self.protected) }
    }

    /// Returns how many values of a group and of all groups below it are on the list, on all nodes.
    /// Takes no lock.
    pub fn count_below(&self, group: Group) -> usize {
        living(group).map_or(0, |group| group.below().map(|group| self.count(group)).sum())
    }

    /// Calls [`LruList::walk`] for a group and all groups below it, on all nodes, one group after
    /// the other. Each walk begins with the oldest values of its group. `most` bounds the number of
    /// values of all groups together.
    pub fn walk_below(
        &self,
        group: Group,
        most: usize,
        decide: impl FnMut(&T) -> LruStatus,
        evicted: impl FnMut(Handle<T>),
    ) -> Walked {
        let groups = living(group).into_iter().flat_map(Group::below);
        self.walk_each(groups, 0..nodes(), most, decide, evicted)
    }

    fn walk_each(
        &self,
        groups: impl Iterator<Item = Group>,
        nodes: Range<usize>,
        most: usize,
        mut decide: impl FnMut(&T) -> LruStatus,
        mut evicted: impl FnMut(Handle<T>),
    ) -> Walked {
        let mut all = Walked::default();
        for (group, node) in groups.flat_map(|group| nodes.clone().map(move |node| (group, node))) {
            let mut walked = Walked { removed: MOST, scanned: MOST, stopped: false };
            // One walk passes at most [`MOST`] values to `decide`. If it evicted as many, the list
            // may have more.
            while walked.removed == MOST && all.scanned < most && !all.stopped {
                walked = self.walk(group, node, most - all.scanned, &mut decide, &mut evicted);
                all.scanned += walked.scanned;
                all.removed += walked.removed;
                all.stopped |= walked.stopped;
            }
        }
        all
    }

    /// Counts the values for which reclaim calls a shrinker, as
    /// [`Shrink::count`](crate::reclaim::Shrink::count) does. Takes no lock.
    pub fn count_for(&self, cx: &Context) -> Count {
        let objects = match cx.node() {
            _ if !cx.is_by_group() => self.count_below(cx.group()),
            Some(node) => self.count_on(cx.group(), node),
            None => self.count(cx.group()),
        };
        match objects as u64 {
            0 if self.marks && cx.is_by_group() => Count::Empty,
            objects => Count::Objects(objects),
        }
    }

    /// Evicts the oldest of the values for which reclaim calls a shrinker, as [`LruList::walk`]
    /// does. A shrinker calls this in its [`Shrink::scan`](crate::reclaim::Shrink::scan). Ends once
    /// the [weights](Handle::weight) of the evicted values reach the bytes that reclaim needs. A
    /// shrinker that is not by group evicts values of all groups.
    pub fn evict(
        &self,
        cx: &Context,
        objects: usize,
        mut decide: impl FnMut(&T) -> LruStatus,
        mut evicted: impl FnMut(Handle<T>),
    ) -> Scan {
        let nodes = cx.node().map_or(0..nodes(), |node| node..node + 1);
        let (weight, need) = (Cell::new(0_u64), cx.need().unwrap_or(u64::MAX).max(1));
        let decide = |value: &T| if weight.get() >= need { LruStatus::Stop } else { decide(value) };
        let evicted = |handle: Handle<T>| {
            weight.set(weight.get().saturating_add(handle.weight()));
            if handle.charge().is_none() {
                cx.add_freed_bytes(handle.weight());
            }
            evicted(handle);
        };
        let all = match cx.is_by_group() {
            true => self.walk_each(core::iter::once(cx.group()), nodes, objects, decide, evicted),
            false => self.walk_each(cx.group().below(), nodes, objects, decide, evicted),
        };
        match (all.scanned, all.removed) {
            (0, _) if self.marks && cx.is_by_group() => Scan::Empty,
            (_, 0) if all.stopped => Scan::Stop,
            (_, removed) => Scan::Freed(removed as u64),
        }
    }

    /// Passes up to `most` values of `group` on a node to `decide`, and acts on its verdicts. Does
    /// not visit values of the groups below. If the group is deleted, visits values of its heir. A
    /// call visits at most [`MOST`] values, and no value twice. [`LruStatus::Retry`] counts as
    /// [`LruStatus::Skip`], since the walk holds no lock that another thread could wait for.
    ///
    /// The walk visits unprotected and [protected](LruList::readmit) values apart, the oldest of
    /// each first. It begins with the unprotected values if they are more than a tenth of all
    /// values, and otherwise with the protected values.
    ///
    /// The walk passes each value for which `decide` returned [`LruStatus::Removed`] to `evicted`.
    /// Both callbacks may do anything, even add values to this list and remove values from it.
    pub fn walk(
        &self,
        group: Group,
        node: usize,
        most: usize,
        mut decide: impl FnMut(&T) -> LruStatus,
        mut evicted: impl FnMut(Handle<T>),
    ) -> Walked {
        let ValueCounts { others, protected } = self.counts(group, node);
        let mut order = [(self.list, others), (self.protected, protected)];
        if others <= (others + protected) / PROBATION {
            order.reverse();
        }
        let (mut all, most) = (Walked::default(), most.min(MOST));
        for (list, count) in order {
            let most = most - all.scanned;
            if most > 0 && count > 0 && !all.stopped {
                let walked = self.walk_part(list, group, node, most.min(count), &mut decide, &mut evicted);
                all.scanned += walked.scanned;
                all.removed += walked.removed;
                all.stopped = walked.stopped;
            }
        }
        all
    }

    /// Walks through up to `most` values of one of the two lists, as [`LruList::walk`] does.
    fn walk_part(
        &self,
        list: Raw,
        group: Group,
        node: usize,
        most: usize,
        decide: &mut impl FnMut(&T) -> LruStatus,
        evicted: &mut impl FnMut(Handle<T>),
    ) -> Walked {
        let (mut walked, mut items) = (Walked::default(), Vec::new());
        let Some(listed) = made() else { return walked };
        // This runs outside the gate, inside which allocation is forbidden.
        items.reserve(most);
        let most = most.min(items.capacity());
        let site = listed.site();
        let (hands, group) = loop {
            let Some(group) = living(group) else { return walked };
            // The vector has room for all items, so the callback only stores them.
            // SAFETY: the callback does not allocate. The list's references keep the entries in
            // place while they are on the list. No callback under a list's lock calls this, since
            // such a callback must not call neap.
            let hands = unsafe { list.take(&site, group.id(), node, most, |item| items.push(item)) };
            // A group that was deleted meanwhile has left its values to its heir.
            if hands.is_some() || listed.grouped().exists(group.id()) {
                break (hands, group);
            }
        };
        let Some(hands) = hands else { return walked };
        // Dropping this puts back the items that it still holds, newest first, even after a panic.
        let mut held = Held::<T> { hands: &hands, items, left: Vec::new(), values: PhantomData };
        held.left.reserve(held.items.len());
        held.items.reverse();
        while let Some(&item) = held.items.last().filter(|_| !walked.stopped) {
            walked.scanned += 1;
            // SAFETY: the item came from the list, so its entry has this type. The reference stays
            // the list's, by `ManuallyDrop`, while the item is held.
            let entry = ManuallyDrop::new(unsafe { reference::<T>(item) });
            let verdict = decide(&entry.value);
            if verdict == LruStatus::Stop {
                walked.stopped = true;
                continue;
            }
            held.items.pop();
            match verdict {
                LruStatus::Removed => {
                    let entry = ManuallyDrop::into_inner(entry);
                    // If `keep` fails another thread has removed the value, and only this reference
                    // is left to drop.
                    // SAFETY: the reference in `entry` keeps the item in place. `hands` has handed
                    // it out.
                    if unsafe { hands.keep(item) } {
                        walked.removed += 1;
                        // The stamps for both lists are those of `self.list`, so they count the
                        // evictions from both.
                        let stamp = self.list.stamp(&site, group.id(), node).map_or(0, Stamp::to_bits);
                        // Relaxed: a hint; it publishes no other data.
                        entry.stamp.store(stamp, Ordering::Relaxed);
                        evicted(Handle(entry));
                    }
                }
                LruStatus::Rotate => put_back::<T>(&hands, item, End::Newest),
                _ => held.left.push(item),
            }
        }
        drop(held);
        walked
    }
}

/// Returns a group or, if it is deleted, its [heir](Group::heir). Returns `None` if neap has freed
/// the id of a deleted group, which no charge has then. So a cache that keeps the handle of a
/// deleted group finds the charged values that the group had.
fn living(group: Group) -> Option<Group> {
    if made()?.grouped().exists(group.id()) { Some(group) } else { group.heir() }
}

/// Returns the number of nodes, or 0 before the first list is opened.
fn nodes() -> usize {
    made().map_or(0, |listed| listed.grouped().platform().nodes())
}

/// Returns the item of an entry. The pointer comes from the `Arc`, as [`reference`] requires. A
/// pointer from `&Entry` may not access the reference counts.
fn item_in<T>(entry: &Arc<Entry<T>>) -> NonNull<Item> {
    // SAFETY: the pointer of an `Arc` is not null.
    unsafe { NonNull::new_unchecked(Arc::as_ptr(entry).cast_mut()).cast() }
}

/// Returns the item of an entry. The reference in `entry` becomes the list's.
fn item_of<T>(entry: Arc<Entry<T>>) -> NonNull<Item> {
    item_in(&ManuallyDrop::new(entry))
}

/// Puts an item back with the list's reference, or drops the reference if the value was removed
/// meanwhile.
fn put_back<T>(hands: &Hands<'_, Source<'static, Linux>>, item: NonNull<Item>, end: End) {
    // SAFETY: `hands` has handed the item out. The list's reference keeps it in place while it is
    // on the list.
    if !unsafe { hands.put_back(item, end) } {
        // SAFETY: the item's entry has this type. The item was not put back, so the list's
        // reference is this call's.
        drop(unsafe { reference::<T>(item) });
    }
}

/// Items that a walk has taken off.
struct Held<'h, 'a, T> {
    hands: &'h Hands<'a, Source<'static, Linux>>,
    /// Items without a verdict, oldest last.
    items: Vec<NonNull<Item>>,
    /// Items that keep their place, oldest first. All of them are older than `items`.
    left: Vec<NonNull<Item>>,
    values: PhantomData<T>,
}

impl<T> Drop for Held<'_, '_, T> {
    fn drop(&mut self) {
        let newest_first = self.items.drain(..).chain(self.left.drain(..).rev());
        newest_first.for_each(|item| put_back::<T>(self.hands, item, End::Oldest));
    }
}

impl<T: Send + Sync + 'static> Drop for LruList<T> {
    fn drop(&mut self) {
        let Some(listed) = made() else { return };
        for list in [self.list, self.protected] {
            // SAFETY: `&mut self` excludes other users of both lists. The list's reference keeps
            // each item's entry in place until the callback drops it. All entries have this type.
            unsafe { listed.site().close_list_with(list, |item| drop(reference::<T>(item))) };
        }
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for LruList<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LruList").finish_non_exhaustive()
    }
}
