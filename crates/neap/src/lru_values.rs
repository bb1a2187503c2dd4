//! LRU lists that keep values by handle: safe, and with callbacks that may do anything.
//!
//! # Design
//! The list has one reference to each value; each [`Handle`] is another. A walk takes the oldest
//! items off in one hold of the lock, calls `decide` with no lock held, and puts back those that
//! stay. A value that is removed meanwhile is not put back.
//!
//! # Locking
//! No lock of its own.

extern crate std;

use super::{Denied, Group, Item, PROCESS, Verdict, Walked, made};
use crate::per_cpu_data::Source;
use core::fmt;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::Deref;
use core::ptr::NonNull;
use neap_base::{Linux, Platform};
use neap_reclaim::lru::{End, Hands, MOST};
use std::sync::Arc;
use std::vec::Vec;

/// A value with its item and the list that it belongs to.
#[repr(C)]
struct Entry<T> {
    item: Item,
    list: neap_reclaim::lru::LruList,
    value: T,
}

/// A reference to a value that is, or was, on a list. It keeps the value alive.
pub struct Handle<T>(Arc<Entry<T>>);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        Handle(self.0.clone())
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
/// The item is that of an entry of this type, and the list's reference is the caller's now.
unsafe fn reference<T>(item: NonNull<Item>) -> Arc<Entry<T>> {
    // SAFETY: the item is at the start of an entry, and its address comes from an `Arc` of this
    // type (the caller's promise).
    unsafe { Arc::from_raw(item.cast::<Entry<T>>().as_ptr()) }
}

/// A list of values by group and node. Dropping it drops its references to the values.
pub struct LruList<T: Send + Sync + 'static> {
    list: neap_reclaim::lru::LruList,
    values: PhantomData<Arc<T>>,
}

impl<T: Send + Sync + 'static> LruList<T> {
    /// Makes a list.
    ///
    /// # Errors
    /// [`Denied::NoMemory`].
    pub fn new() -> Result<LruList<T>, Denied> {
        let list = PROCESS.lists()?.site().open(true, None)?;
        Ok(LruList { list, values: PhantomData })
    }

    /// Adds a value as the newest of a group, on the node nearest to this thread.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`]: the group is gone, and its heir is not known.
    pub fn add(&self, group: Group, value: T) -> Result<Handle<T>, Denied> {
        let node = made().map_or(0, |listed| listed.grouped().node());
        self.add_on(group, node, value)
    }

    /// Adds a value as the newest of a group, on the node of the value's memory. A number beyond
    /// the last node means the last.
    ///
    /// # Errors
    /// Those of [`LruList::add`].
    pub fn add_on(&self, group: Group, node: usize, value: T) -> Result<Handle<T>, Denied> {
        let handle = Handle(Arc::new(Entry { item: Item::new(), list: self.list, value }));
        self.add_again(group, node, &handle)?;
        Ok(handle)
    }

    /// Adds a value of this list that was taken off it. Returns whether it did: not if the value is
    /// on the list, or belongs to another list.
    ///
    /// # Errors
    /// Those of [`LruList::add`].
    pub fn add_again(&self, group: Group, node: usize, handle: &Handle<T>) -> Result<bool, Denied> {
        if handle.0.list != self.list {
            return Ok(false);
        }
        let listed = made().ok_or(Denied::NoSuchGroup)?;
        let item = item_of(handle.0.clone());
        // SAFETY: `item_of` leaked a reference for the list, which keeps the entry in place until
        // the item is taken off.
        let added = unsafe { self.list.add(&listed.site(), group.id(), node, item) };
        if added != Ok(true) {
            // SAFETY: the reference that `item_of` leaked above; the list did not take it.
            drop(unsafe { reference::<T>(item) });
        }
        added
    }

    /// Takes a value off. Returns whether this call did. A walk that is deciding about it does not
    /// put it back.
    pub fn remove(&self, handle: &Handle<T>) -> bool {
        let (Some(listed), true) = (made(), handle.0.list == self.list) else { return false };
        let item = item_in(&handle.0);
        while handle.0.item.is_linked() {
            // SAFETY: the handle keeps the entry in place.
            if unsafe { self.list.del(&listed.site(), item) } {
                // SAFETY: `del` took the item off, so the list's reference is this call's. The
                // caller has another one.
                drop(unsafe { reference::<T>(item) });
                return true;
            }
            // The walk drops the reference.
            if handle.0.item.leave_hands() {
                return true;
            }
        }
        false
    }

    /// Returns how many values of a group alone are on the list, on all nodes. Takes no lock.
    pub fn count(&self, group: Group) -> usize {
        made().map_or(0, |listed| {
            let nodes = 0..listed.grouped().platform().nodes();
            nodes.map(|node| self.list.count(&listed.site(), group.id(), node)).sum()
        })
    }

    /// Returns how many values of a group alone are on the list on a node. Takes no lock.
    pub fn count_on(&self, group: Group, node: usize) -> usize {
        made().map_or(0, |listed| self.list.count(&listed.site(), group.id(), node))
    }

    /// Calls `decide` with up to `most` values of a group alone on a node ([`MOST`] in one call),
    /// oldest first and each once, and obeys its verdicts. [`Verdict::Retry`] counts as
    /// [`Verdict::Skip`]: no lock is held that another thread could wait for.
    ///
    /// Values that are taken off are passed to `evicted`. Both callbacks may do anything, even add
    /// to and remove from this list.
    pub fn walk(
        &self,
        group: Group,
        node: usize,
        most: usize,
        mut decide: impl FnMut(&T) -> Verdict,
        mut evicted: impl FnMut(Handle<T>),
    ) -> Walked {
        let (mut walked, mut items) = (Walked::default(), Vec::new());
        let Some(listed) = made() else { return walked };
        let most = most.min(MOST);
        // Outside the gate, inside which allocation is forbidden.
        items.reserve(most.min(self.count_on(group, node)));
        let most = most.min(items.capacity());
        let site = listed.site();
        // SAFETY: the list's references keep the entries in place. The vector has room for all
        // items, so the callback allocates nothing.
        let hands = unsafe { self.list.take(&site, group.id(), node, most, |item| items.push(item)) };
        let Some(hands) = hands else { return walked };
        // Items still held when this is dropped go back, newest first, even after a panic.
        let mut held = Held::<T> { hands: &hands, items, left: Vec::new(), values: PhantomData };
        held.left.reserve(held.items.len());
        held.items.reverse();
        while let Some(&item) = held.items.last().filter(|_| !walked.stopped) {
            walked.scanned += 1;
            // SAFETY: the item came from the list, so its entry has this type. The reference stays
            // the list's, by `ManuallyDrop`, while the item is held.
            let entry = ManuallyDrop::new(unsafe { reference::<T>(item) });
            let verdict = decide(&entry.value);
            if verdict == Verdict::Stop {
                walked.stopped = true;
                continue;
            }
            held.items.pop();
            match verdict {
                Verdict::Removed => {
                    let entry = ManuallyDrop::into_inner(entry);
                    // If `keep` fails another thread has removed the value, and only this reference
                    // is left to drop.
                    // SAFETY: the reference in `entry` keeps the item in place; `hands` gave it
                    // out.
                    if unsafe { hands.keep(item) } {
                        walked.removed += 1;
                        evicted(Handle(entry));
                    }
                }
                Verdict::Rotate => put_back::<T>(&hands, item, End::Newest),
                _ => held.left.push(item),
            }
        }
        drop(held);
        walked
    }
}

/// Returns the item of an entry. Its pointer comes from the `Arc`, as [`reference`] needs: one from
/// `&Entry` would not reach the counts.
fn item_in<T>(entry: &Arc<Entry<T>>) -> NonNull<Item> {
    // SAFETY: the pointer of an `Arc` is not null.
    unsafe { NonNull::new_unchecked(Arc::as_ptr(entry).cast_mut()).cast() }
}

/// Returns the item of an entry, with a reference that the list gets.
fn item_of<T>(entry: Arc<Entry<T>>) -> NonNull<Item> {
    item_in(&ManuallyDrop::new(entry))
}

/// Puts an item back with the list's reference, or drops the reference if the value was removed
/// meanwhile.
fn put_back<T>(hands: &Hands<'_, Source<'static, Linux>>, item: NonNull<Item>, end: End) {
    // SAFETY: `hands` gave the item out, and the list's reference keeps it in place.
    if !unsafe { hands.put_back(item, end) } {
        // SAFETY: the item was not put back, so the list's reference is this call's.
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
        // SAFETY: `&mut self` excludes other users of the list, and each item's reference, which
        // was the list's, is passed on to `dispose`.
        unsafe { listed.site().close_list_with(self.list, |item| drop(reference::<T>(item))) };
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for LruList<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LruList").finish_non_exhaustive()
    }
}
