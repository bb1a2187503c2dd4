//! An LRU list: items by group and node. Each pair of group and node has its own lock.
//!
//! To add an item, a thread finds its sub-list by the group's slot. To remove an item, it uses the
//! sub-list that the item names. Both take the lock of one sub-list, and write no cache line of
//! another group or node. A walk passes the oldest items to a function under the lock, and the
//! function decides on each item. The walk passes removed items to a second function, `dispose`,
//! after it has released the lock. All but `dispose` runs inside the host's fork gate, so a fork
//! finds no lock held.

use super::block::{self, Block, By, Head};
use super::chain::{End, Item};
use super::radix::Radix;
use super::registry::{Site, chain};
use super::sublist::Sub;
use crate::Host;
use core::cell::Cell;
use core::ptr::{NonNull, null_mut};
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_groups::{GroupError, GroupId, GroupSlot};

/// Number of items after which a walk releases the lock and leaves the gate, if it has removed all
/// of them. It can then continue at the oldest item.
const HOLD: usize = 256;
/// Maximum number of items that a walk visits in one hold of the lock, since a fork waits for it.
pub const LONGEST: usize = 1 << 16;

/// Reference to a list, which does not move until it is closed. It does not keep the list alive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LruList(pub(super) NonNull<Head>);

/// An item to put on a sub-list. The item is on no list, or was taken off `from`.
pub(super) struct Put<'s> {
    pub(super) item: NonNull<Item>,
    pub(super) end: End,
    pub(super) sub: &'s Sub,
    pub(super) from: Option<&'s Sub>,
}

// SAFETY: the fields of the head are constant, or atomic, or used under the registry's mutex alone.
unsafe impl Send for LruList {}
// SAFETY: the fields of the head are constant, or atomic, or used under the registry's mutex alone.
unsafe impl Sync for LruList {}

/// Decision on an item in a walk, and whether the walk goes on under the same lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum LruStatus {
    /// The item is removed. `dispose` gets it once the lock is released. The walk goes on.
    Removed = 0,
    /// The item was in use: it becomes the newest. The walk goes on.
    Rotate = 1,
    /// The item stays in its place. The walk goes on.
    Skip = 2,
    /// No decision is possible at the moment, because the lock of the item's owner is held. The
    /// list's lock is released for the holder of that lock, and the walk starts again with the
    /// oldest item.
    Retry = 3,
    /// The walk is over.
    Stop = 4,
}

/// Result of a walk.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Walked {
    /// Number of decisions.
    pub scanned: usize,
    /// Number of removed items.
    pub removed: usize,
    /// Whether [`LruStatus::Stop`] ended it.
    pub stopped: bool,
}

/// Items that a walk removed, oldest first.
#[derive(Default)]
struct Taken(Option<(NonNull<Item>, NonNull<Item>)>);

impl Taken {
    fn push(&mut self, item: NonNull<Item>) {
        // SAFETY: the item exists until `dispose` gets it, by the contract of `add`. Until then its
        // name is that of an item in a walk's chain, so no other thread uses its links.
        unsafe { item.as_ref() }.relink(|links| links.next = null_mut());
        self.0 = Some(match self.0 {
            None => (item, item),
            Some((first, last)) => {
                // SAFETY: the last item of this chain was not passed to `dispose` yet, so it
                // exists, by the contract of `add`.
                unsafe { last.as_ref() }.relink(|links| links.next = item.as_ptr());
                (first, item)
            }
        });
    }
}

impl Iterator for Taken {
    type Item = NonNull<Item>;

    /// Takes the oldest item out, for `dispose`.
    fn next(&mut self) -> Option<NonNull<Item>> {
        let (first, last) = self.0?;
        // SAFETY: the first item of this chain was not passed to `dispose` yet, so it exists, by
        // the contract of `add`.
        let item = unsafe { first.as_ref() };
        let next = NonNull::new(item.links().next);
        self.0 = next.map(|next| (next, last));
        item.hand_out(None);
        Some(first)
    }
}

impl<H: Host> Site<'_, H> {
    /// Makes a list.
    ///
    /// With a `shrinker`, the list calls [`Host::mark`] for that id whenever it gets the first item
    /// of a group on a node.
    ///
    /// # Errors
    /// [`GroupError::NoMemory`]: there is no memory for the list.
    pub fn open(&self, by: By, shrinker: Option<u64>) -> Result<LruList, GroupError> {
        self.host.inside(|inside| {
            let head = self.host.memory(inside, size_of::<Head>()).ok_or(GroupError::NoMemory)?.cast::<Head>();
            let nodes = self.host.platform().nodes();
            let Some(root) = block::make(inside, self.host, head, nodes, GroupSlot::ROOT) else {
                // SAFETY: `memory` returned this above with this size, and no other thread has seen
                // it.
                unsafe { self.host.give_back(inside, head.cast(), size_of::<Head>()) };
                return Err(GroupError::NoMemory);
            };
            let mut registry = self.lists.registry.lock();
            let (next, previous) = (Cell::new(registry.first), Cell::new(null_mut()));
            // SAFETY: `Host::memory` returned room for a head, aligned to a cache line, and no
            // other thread knows of it. `first` is null or a list, which exists until it is closed
            // under the mutex that is held.
            unsafe {
                head.write(Head { table: Radix::new(), root, by, shrinker, nodes, next, previous });
                registry.first.as_ref().inspect(|first| first.previous.set(head.as_ptr()));
            }
            registry.first = head.as_ptr();
            Ok(LruList(head))
        })
    }

    /// Frees a list. Its items are on no list after that, though the call does not write to them.
    ///
    /// # Safety
    /// No thread uses the list any more. Items that were on it may only be overwritten, not used
    /// again.
    pub unsafe fn close_list(&self, list: LruList) {
        self.host.inside(|inside| {
            let blocks = self.lists.registry.lock().detach(list);
            // SAFETY: by this function's contract no thread uses the list. It was detached with
            // these blocks under the mutex.
            unsafe { self.free_list(inside, list, blocks) };
        });
    }

    /// Frees a list, and passes every item on it to `dispose`, each group's oldest first. When
    /// `dispose` gets an item, the item is on no list, and no lock is held.
    ///
    /// First the list is taken out of the registry, under the mutex that a deletion of a group
    /// takes. Otherwise:
    ///
    /// 1. A has emptied the parent's sub-list.
    /// 2. B deletes the group, which moves its items there.
    /// 3. A finds none in the group's sub-list, and frees the parent's with items on it.
    ///
    /// # Safety
    /// No thread uses the list any more. Items on it exist until `dispose` has got them.
    pub unsafe fn close_list_with(&self, list: LruList, mut dispose: impl FnMut(NonNull<Item>)) {
        let blocks = self.host.inside(|_| self.lists.registry.lock().detach(list));
        // SAFETY: the blocks were detached under the mutex, and by this function's contract no
        // thread uses the list. They are freed below.
        let subs = chain(blocks).flat_map(|block| unsafe { block::subs(block) });
        for sub in subs {
            while let Some(item) = sub.take_oldest() {
                // SAFETY: by this function's contract the item exists until `dispose` gets it.
                unsafe { item.as_ref() }.let_go();
                dispose(item);
            }
        }
        // SAFETY: by this function's contract no thread uses the list. It was detached with these
        // blocks under the mutex.
        self.host.inside(|inside| unsafe { self.free_list(inside, list, blocks) });
    }

    /// Frees a list and its blocks.
    ///
    /// # Safety
    /// No thread uses the list, which is detached, nor the blocks that it had.
    unsafe fn free_list(&self, inside: &Inside<'_>, list: LruList, blocks: *mut Block) {
        // SAFETY: by this function's contract no thread uses any of them. The blocks are from
        // `block::make`, the table's nodes and the head from this host, with these sizes.
        unsafe {
            chain(blocks).for_each(|block| self.free(inside, block));
            list.head().table.close(inside, self.host);
            self.host.give_back(inside, list.0.cast(), size_of::<Head>());
        }
    }
}

impl LruList {
    pub(super) fn head(&self) -> &Head {
        // SAFETY: the caller uses the list, and closing a list requires that no thread does. So the
        // head exists.
        unsafe { self.0.as_ref() }
    }

    /// Adds an item as the newest of a group on a node. A node that does not exist stands for the
    /// last one. Returns false if the item is on a list already, or in hands.
    ///
    /// If the group is gone, its heir gets the item. If there is no memory for the group's block,
    /// the nearest ancestor that has one gets it.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`]: the id leads nowhere any more.
    ///
    /// # Safety
    /// The item does not move until [`LruList::del`] has returned true for it, or a walk's
    /// `dispose` has got it. No function that a walk calls under the lock calls this one.
    pub unsafe fn add<H: Host>(
        self,
        site: &Site<'_, H>,
        group: GroupId,
        node: usize,
        item: NonNull<Item>,
    ) -> Result<bool, GroupError> {
        site.host.inside(|inside| {
            let reading = site.groups.reading();
            let seat = match self.head().by {
                By::Group => site.groups.attach_target(inside, &reading, group).ok_or(GroupError::NoSuchGroup)?,
                By::RootAlone => GroupSlot::ROOT,
            };
            let block = self.head().block(seat.slot).unwrap_or_else(|| site.make(inside, self.0, seat));
            // SAFETY: the block was found or made within the read, which is held, so it is not
            // freed.
            let sub = unsafe { block::sub(block, node) };
            Ok(self.put(inside, site, node, Put { item, end: End::Newest, sub, from: None }))
        })
    }

    /// Puts an item on a sub-list, or on its heir. If that was empty, its group is marked. The
    /// caller is within a read.
    pub(super) fn put<H: Host>(
        self,
        inside: &Inside<'_>,
        site: &Site<'_, H>,
        node: usize,
        Put { item, end, sub, from }: Put<'_>,
    ) -> bool {
        let (sub, mut chain) = sub.lock();
        // SAFETY: by the contract of `add`, or of `Hands::put_back`, the item exists for as long as
        // it is on the list.
        if !unsafe { item.as_ref() }.claim(sub, from) {
            return false;
        }
        chain.push(item, end);
        sub.set_count(sub.count() + 1);
        // The group that received the item may be an heir of the requested one.
        let (is_first, seat) = (sub.count() == 1, chain.seat);
        drop(chain);
        if is_first {
            site.mark(inside, self.head(), 1, seat, node.min(self.head().nodes - 1));
        }
        true
    }

    /// Removes an item, also if it moved to another group. Returns whether this call removed it.
    ///
    /// If not, the item is on no list, on another list, in hands, or a walk's `dispose` will get
    /// it. An item may be freed only by the caller that removed it, by this function or by a walk.
    ///
    /// # Safety
    /// The item exists. No function that a walk calls under the lock calls this one.
    pub unsafe fn del<H: Host>(self, site: &Site<'_, H>, item: NonNull<Item>) -> bool {
        // SAFETY: by this function's contract the item exists.
        let item_there = unsafe { item.as_ref() };
        site.host.inside(|_| {
            let _reading = site.groups.reading();
            // SAFETY: the name was read within the read, which is held, so its block is not freed.
            while let Some(sub) = item_there.name().map(|sub| unsafe { sub.as_ref() }) {
                if !sub.is_of(self.0) {
                    return false;
                }
                let (sub, mut chain) = sub.lock();
                // Another thread may have taken it off and put it elsewhere.
                // SAFETY: the name was read within the read, which is held, so its block is not
                // freed.
                if item_there.name().is_some_and(|now| core::ptr::eq(unsafe { now.as_ref() }.live(), sub)) {
                    chain.unlink(item);
                    sub.set_count(sub.count() - 1);
                    item_there.let_go();
                    return true;
                }
            }
            false
        })
    }

    /// Makes an item the newest of its present group on its node. Returns `false`, and changes
    /// nothing, if the item is on no list, on another list, or taken off by a walk.
    ///
    /// # Safety
    /// The item exists. No function that a walk calls under the lock may call this.
    pub unsafe fn touch<H: Host>(self, site: &Site<'_, H>, item: NonNull<Item>) -> bool {
        // SAFETY: by this function's contract the item exists.
        let there = unsafe { item.as_ref() };
        site.host.inside(|_| {
            let _reading = site.groups.reading();
            // SAFETY: the name was read within the read, which is held, so its block is not freed.
            while let Some(sub) = there.name().map(|sub| unsafe { sub.as_ref() }) {
                if !sub.is_of(self.0) {
                    return false;
                }
                let (sub, mut chain) = sub.lock();
                // Another thread may have taken it off and put it elsewhere.
                // SAFETY: the name was read within the read, which is held, so its block is not
                // freed.
                if there.name().is_some_and(|now| core::ptr::eq(unsafe { now.as_ref() }.live(), sub)) {
                    chain.unlink(item);
                    // Items that are newer than the chain's `stale` must name this sub-list.
                    there.rename(sub);
                    chain.push(item, End::Newest);
                    return true;
                }
            }
            false
        })
    }

    /// Returns the number of items of a group on a node at this moment, without those of
    /// descendants; 0 if the group is gone. Takes no lock.
    pub fn count<H>(self, site: &Site<'_, H>, group: GroupId, node: usize) -> usize {
        let reading = site.groups.reading();
        let Some(seat) = self.seat(site, &reading, group) else { return 0 };
        // SAFETY: the block was found within the read, which is held, so it is not freed.
        self.head().block(seat.slot).map_or(0, |block| unsafe { block::sub(block, node) }.count())
    }

    /// Returns the group that has the items of `group`, with its slot. It is the root for
    /// [`By::RootAlone`], and otherwise the group itself. Returns `None` if that is deleted.
    pub(super) fn seat<H>(
        self,
        site: &Site<'_, H>,
        reading: &neap_base::rcu::Reading<'_>,
        group: GroupId,
    ) -> Option<GroupSlot> {
        match self.head().by {
            By::Group => site.groups.own_slot(reading, group),
            By::RootAlone => Some(GroupSlot::ROOT),
        }
    }

    /// Passes up to `most` items of a group on a node to `isolate`, oldest first, and acts on its
    /// decisions. Items of descendants are not visited. Finds nothing if the group is gone.
    ///
    /// The walk passes an item again only after [`LruStatus::Retry`]. Unless `isolate` removes
    /// every item, the walk ends after [`LONGEST`] items in one hold of the lock. It then passes
    /// removed items to `dispose`, in the same order and with no lock held. They belong to
    /// `dispose` from then on. [`Item::is_linked`] is true for them until [`Item::leave_hands`].
    ///
    /// # Safety
    /// The walk calls `isolate` under the lock of the items and inside the fork gate. `isolate`
    /// does not wait, allocate or call this crate. It may only try a lock of the item's owner.
    pub unsafe fn walk<H: Host>(
        self,
        site: &Site<'_, H>,
        group: GroupId,
        node: usize,
        most: usize,
        mut isolate: impl FnMut(NonNull<Item>) -> LruStatus,
        dispose: impl FnMut(NonNull<Item>),
    ) -> Walked {
        let mut walk = Walk::new(most);
        let mut again = |inside: &Inside<'_>| {
            let reading = site.groups.reading();
            let seat = self.seat(site, &reading, group);
            let block = seat.and_then(|seat| self.head().block(seat.slot));
            // SAFETY: the block was found within the read, which is held, so it is not freed.
            block.is_some_and(|block| walk.over(inside, unsafe { block::sub(block, node) }, &mut isolate))
        };
        while site.host.inside(&mut again) {
            site.host.platform().pause();
        }
        walk.taken.for_each(dispose);
        walk.walked
    }
}

/// State of a walk.
struct Walk {
    left: usize,
    /// Number of items that were there when it began, or began again, and that it has not visited.
    in_all: usize,
    walked: Walked,
    taken: Taken,
}

impl Walk {
    fn new(most: usize) -> Walk {
        Walk { left: most, in_all: usize::MAX, walked: Walked::default(), taken: Taken::default() }
    }

    /// Visits items during one hold of a sub-list's lock. Returns whether to begin again. The
    /// caller is within a read.
    ///
    /// The hold ends when `left` is 0, at the end of the list, or by a decision. It also ends after
    /// [`HOLD`] items if all of them were removed: then the next hold begins where this one ended.
    fn over(&mut self, _: &Inside<'_>, sub: &Sub, isolate: &mut impl FnMut(NonNull<Item>) -> LruStatus) -> bool {
        let mut chain = sub.lock_this();
        if sub.heir().is_some() {
            return false;
        }
        // So no item is visited twice, however many are rotated.
        self.in_all = self.in_all.min(sub.count());
        let (mut next, mut held) = (chain.oldest(), 0);
        while let Some(item) = next.filter(|_| self.left > 0 && self.in_all > 0 && held < LONGEST) {
            if held >= HOLD && self.walked.removed == self.walked.scanned {
                return true;
            }
            held += 1;
            // Counted before the decision, so that a walk with the same decision each time ends,
            // too.
            self.left -= 1;
            self.in_all -= 1;
            self.walked.scanned += 1;
            next = chain.after(item);
            match isolate(item) {
                LruStatus::Removed => {
                    chain.unlink(item);
                    sub.set_count(sub.count() - 1);
                    // SAFETY: an item on a chain exists until it is taken off, by the contract of
                    // `add`, and the lock is held.
                    unsafe { item.as_ref() }.take();
                    self.taken.push(item);
                    self.walked.removed += 1;
                }
                LruStatus::Rotate => {
                    chain.unlink(item);
                    // SAFETY: an item on a chain exists until it is taken off, by the contract of
                    // `add`, and the lock is held.
                    unsafe { item.as_ref() }.rename(sub);
                    chain.push(item, End::Newest);
                }
                LruStatus::Skip => {}
                LruStatus::Retry => {
                    self.in_all = usize::MAX;
                    return self.left > 0;
                }
                LruStatus::Stop => {
                    self.walked.stopped = true;
                    return false;
                }
            }
        }
        false
    }
}
