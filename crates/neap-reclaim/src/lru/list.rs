//! A list: items by group and node, each group's and node's under a lock of its own.
//!
//! Sits between whoever caches objects and sub-lists. Adding finds the sub-list by the group's slot, taking off by what the item names; either takes
//! that one lock, and writes nothing that another group or node has. A walk hands the oldest to a function, under the lock, which says
//! what becomes of each; what it takes off it gets once more after the lock. Everything passes the host's gate, so a fork finds no
//! lock held.

use super::block::{self, Block, Sub};
use super::chain::End;
use super::item::Item;
use super::radix::Radix;
use super::registry::{Site, chain};
use crate::Host;
use core::cell::Cell;
use core::ptr::{NonNull, null_mut};
use neap_base::Platform;
use neap_groups::{Denied, GroupId, Seat};

/// Items after which the lock and the gate are let go for others, if the walk can go on where it was.
const HOLD: usize = 256;
/// Items of one hold at most: a fork waits for it.
pub const LONGEST: usize = 1 << 16;

/// What is behind a [`LruList`].
#[derive(Debug)]
pub(super) struct Head {
    /// The block of each group but the root, by slot.
    pub(super) table: Radix,
    /// The root's, and everybody's of a list that is not by group.
    pub(super) root: NonNull<Block>,
    by_group: bool,
    pub(super) shrinker: Option<u64>,
    pub(super) nodes: usize,
    /// Under the registry's mutex: all lists.
    pub(super) next: Cell<*mut Head>,
    pub(super) previous: Cell<*mut Head>,
}

impl Head {
    /// The block that a group has.
    pub(super) fn block(&self, slot: u32) -> Option<NonNull<Block>> {
        if slot == Seat::ROOT.slot { Some(self.root) } else { self.table.get(slot) }
    }
}

/// A list, which stays where it is until it is closed: a name for it that keeps nothing alive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LruList(pub(super) NonNull<Head>);

// SAFETY: what it leads to is atomic, constant, or under locks.
unsafe impl Send for LruList {}
// SAFETY: as above.
unsafe impl Sync for LruList {}

/// What becomes of an item that a walk has come to, and whether the walk goes on under the same lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Verdict {
    /// It is taken off, and handed out after the lock. Goes on.
    Removed = 0,
    /// It was in use: it is the newest from now on. Goes on.
    Rotate = 1,
    /// It stays where it is. Goes on.
    Skip = 2,
    /// It cannot be said at the moment, because its owner's lock is held. The list's lock is let go for whoever that is, and the walk
    /// begins again from the oldest.
    Retry = 3,
    /// The walk is over.
    Stop = 4,
}

/// What a walk did.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Walked {
    /// Verdicts that were asked for.
    pub scanned: usize,
    /// Items taken off.
    pub removed: usize,
    /// A verdict ended it.
    pub stopped: bool,
}

/// Items that a walk took off, oldest first.
#[derive(Default)]
struct Taken(Option<(NonNull<Item>, NonNull<Item>)>);

impl Taken {
    fn push(&mut self, item: NonNull<Item>) {
        // SAFETY: items in a walk's chain are there.
        unsafe { item.as_ref() }.relink(|links| links.next = null_mut());
        self.0 = Some(match self.0 {
            None => (item, item),
            Some((first, last)) => {
                // SAFETY: as above.
                unsafe { last.as_ref() }.relink(|links| links.next = item.as_ptr());
                (first, item)
            }
        });
    }
}

impl Iterator for Taken {
    type Item = NonNull<Item>;

    /// Takes the oldest out, for `dispose`.
    fn next(&mut self) -> Option<NonNull<Item>> {
        let (first, last) = self.0?;
        // SAFETY: as above.
        let item = unsafe { first.as_ref() };
        let next = NonNull::new(item.links().next);
        self.0 = next.map(|next| (next, last));
        item.hand_out(None);
        Some(first)
    }
}

impl<H: Host> Site<'_, H> {
    /// Makes a list. With `by_group` every group has its own items, otherwise all are the root's. Where there is a shrinker for it, it is
    /// marked ([`Host::mark`]) whenever a group's first item on a node is added.
    ///
    /// # Errors
    /// [`Denied::NoMemory`].
    pub fn open(&self, by_group: bool, shrinker: Option<u64>) -> Result<LruList, Denied> {
        self.host.inside(|| {
            let head = self.host.memory(size_of::<Head>()).ok_or(Denied::NoMemory)?.cast::<Head>();
            let nodes = self.host.platform().nodes();
            let Some(root) = block::make(self.host, head, nodes, Seat::ROOT) else {
                // SAFETY: from above.
                unsafe { self.host.give_back(head.cast(), size_of::<Head>()) };
                return Err(Denied::NoMemory);
            };
            let mut registry = self.lists.registry.lock();
            let (next, previous) = (Cell::new(registry.first), Cell::new(null_mut()));
            // SAFETY: nobody else knows of it; the other is a list.
            unsafe {
                head.write(Head { table: Radix::new(), root, by_group, shrinker, nodes, next, previous });
                registry.first.as_ref().inspect(|first| first.previous.set(head.as_ptr()));
            }
            registry.first = head.as_ptr();
            Ok(LruList(head))
        })
    }

    /// Gives back what a list takes. Items that are on it still stay as they are, and are no list's any more.
    ///
    /// # Safety
    /// Nobody uses the list any more, nor an item that is on it but to put other things in its place.
    pub unsafe fn close_list(&self, list: LruList) {
        self.host.inside(|| {
            let blocks = self.lists.registry.lock().detach(list);
            // SAFETY: as the caller promises.
            unsafe { self.free_list(list, blocks) };
        });
    }

    /// The same, and hands every item that is on it to `dispose`, each group's oldest first, with no lock held: it is on none by then.
    ///
    /// Groups that are deleted meanwhile take nothing along:
    /// 1. A has emptied the parent's part; 2. B deletes the group, whose items go there; 3. A finds none in the group's part, and would free the parent's with
    ///    items on it. So first of all the list is taken out of everybody's sight, under the registry's mutex, which a deletion takes.
    ///
    /// # Safety
    /// Nobody uses the list any more; items on it are there until `dispose` has got them.
    pub unsafe fn close_list_with(&self, list: LruList, mut dispose: impl FnMut(NonNull<Item>)) {
        let blocks = self.host.inside(|| self.lists.registry.lock().detach(list));
        // SAFETY: nobody else has them.
        let subs = chain(blocks).flat_map(|block| unsafe { block::subs(block) });
        for sub in subs {
            while let Some(item) = sub.take_oldest() {
                // SAFETY: items on a chain are there.
                unsafe { item.as_ref() }.let_go();
                dispose(item);
            }
        }
        // SAFETY: as the caller promises.
        self.host.inside(|| unsafe { self.free_list(list, blocks) });
    }

    /// # Safety
    /// Nobody uses the list, which is detached, nor the blocks that it had.
    unsafe fn free_list(&self, list: LruList, blocks: *mut Block) {
        // SAFETY: as the caller promises.
        unsafe {
            chain(blocks).for_each(|block| self.free(block));
            list.head().table.close(self.host);
            self.host.give_back(list.0.cast(), size_of::<Head>());
        }
    }
}

impl LruList {
    pub(super) fn head(&self) -> &Head {
        // SAFETY: whoever uses a list does not close it meanwhile.
        unsafe { self.0.as_ref() }
    }

    /// Puts an item on it, as the newest of a group on a node (the last node, for a number beyond). Where the group is gone the item is its
    /// heir's; where there is no memory for the group's part of the list, that of the nearest above that has one. Answers whether it was
    /// put there: not where it is on a list already.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`]: the id leads nowhere any more.
    ///
    /// # Safety
    /// The item stays where it is until [`LruList::del`] has answered that it was taken off, or a walk's `dispose` has got it. Not called by
    /// a function that a walk calls under the lock.
    pub unsafe fn add<H: Host>(
        self,
        site: &Site<'_, H>,
        group: GroupId,
        node: usize,
        item: NonNull<Item>,
    ) -> Result<bool, Denied> {
        site.host.inside(|| {
            let reading = site.groups.reading();
            let seat = match self.head().by_group {
                true => site.groups.seat(&reading, group).ok_or(Denied::NoSuchGroup)?,
                false => Seat::ROOT,
            };
            let block = self.head().block(seat.slot).unwrap_or_else(|| site.make(self.0, seat));
            // SAFETY: found within the reading.
            Ok(self.put(site, unsafe { block::sub(block, node) }, node, item, End::Newest, None))
        })
    }

    /// Puts an item on a sub-list or its heir, and marks that if it had none: one that is on none, or that was taken `from` one. Within a reading.
    pub(super) fn put<H: Host>(
        self,
        site: &Site<'_, H>,
        sub: &Sub,
        node: usize,
        item: NonNull<Item>,
        end: End,
        from: Option<&Sub>,
    ) -> bool {
        let (sub, mut chain) = sub.lock();
        // SAFETY: it is there, as whoever adds it promises.
        if !unsafe { item.as_ref() }.claim(sub, from) {
            return false;
        }
        chain.push(item, end);
        sub.set_count(sub.count() + 1);
        // The group that received it, which need not be the one that was asked for.
        let (is_first, seat) = (sub.count() == 1, chain.seat);
        drop(chain);
        if is_first {
            site.mark(self.head(), 1, seat, node.min(self.head().nodes - 1));
        }
        true
    }

    /// Takes an item off, whichever group's it is by now; answers whether this call did. If not, it is on no list, or on another, or a walk
    /// has taken it off, whose `dispose` gets it. So whoever got it, here or there, and nobody else, may free it.
    ///
    /// # Safety
    /// The item is there. Not called by a function that a walk calls under the lock.
    pub unsafe fn del<H: Host>(self, site: &Site<'_, H>, item: NonNull<Item>) -> bool {
        // SAFETY: as the caller promises.
        let item_there = unsafe { item.as_ref() };
        site.host.inside(|| {
            let _reading = site.groups.reading();
            // SAFETY: it was found within the reading.
            while let Some(sub) = item_there.name().map(|sub| unsafe { sub.as_ref() }) {
                if !sub.is_of(self.0) {
                    return false;
                }
                let (sub, mut chain) = sub.lock();
                // Somebody else may have taken it off and put it elsewhere.
                // SAFETY: as above.
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

    /// Makes an item the newest of the group that has it by now, on the node that it is on. Returns
    /// whether that was done: not where it is on no list, on another, or taken off by a walk.
    ///
    /// # Safety
    /// The item is there. Not called by a function that a walk calls under the lock.
    pub unsafe fn touch<H: Host>(self, site: &Site<'_, H>, item: NonNull<Item>) -> bool {
        // SAFETY: the caller keeps the item there.
        let item_there = unsafe { item.as_ref() };
        site.host.inside(|| {
            let _reading = site.groups.reading();
            // SAFETY: the sub-list was found within the reading, which keeps it.
            while let Some(sub) = item_there.name().map(|sub| unsafe { sub.as_ref() }) {
                if !sub.is_of(self.0) {
                    return false;
                }
                let (sub, mut chain) = sub.lock();
                // Another thread may have taken it off and put it elsewhere.
                // SAFETY: the sub-list was found within the reading, which keeps it.
                if item_there.name().is_some_and(|now| core::ptr::eq(unsafe { now.as_ref() }.live(), sub)) {
                    chain.unlink(item);
                    // All items behind the last that may name another sub-list name this one.
                    item_there.rename(sub);
                    chain.push(item, End::Newest);
                    return true;
                }
            }
            false
        })
    }

    /// Items of a group alone on a node, at this moment; 0 where the group is gone. Takes no lock.
    pub fn count<H>(self, site: &Site<'_, H>, group: GroupId, node: usize) -> usize {
        let reading = site.groups.reading();
        let Some(seat) = self.seat(site, &reading, group) else { return 0 };
        // SAFETY: found within the reading.
        self.head().block(seat.slot).map_or(0, |block| unsafe { block::sub(block, node) }.count())
    }

    /// Items of all groups on a node. Takes no lock: while groups are deleted some may be counted twice, or not at all.
    pub fn count_node<H>(self, site: &Site<'_, H>, node: usize) -> usize {
        let (mut count, mut next) = (0, Some(Seat::ROOT.slot));
        while let Some(slot) = next {
            let _reading = site.groups.reading();
            // SAFETY: found within the reading.
            count += self.head().block(slot).map_or(0, |block| unsafe { block::sub(block, node) }.count());
            next = self.head().table.next(slot + 1).map(|(slot, _)| slot);
        }
        count
    }

    /// The seat of a group that is there itself.
    pub(super) fn seat<H>(
        self,
        site: &Site<'_, H>,
        reading: &neap_base::rcu::Reading<'_>,
        group: GroupId,
    ) -> Option<Seat> {
        if !self.head().by_group {
            return Some(Seat::ROOT);
        }
        site.groups.own_seat(reading, group)
    }

    /// Hands up to `most` items of a group alone on a node, or [`LONGEST`] where not all are taken off, to `isolate`, oldest first and each once at
    /// most but for retries, and does what it answers. Those that it takes off are handed to `dispose`, in the same order, with no lock held: they are
    /// its own then, and nobody's before, and say [`Item::is_linked`] until [`Item::leave_hands`]. Finds nothing where the group is gone.
    ///
    /// # Safety
    /// `isolate` is called under the lock of the items and inside the gate: it neither waits, nor allocates, nor calls anything of this
    /// crate's; a lock of the item's owner it only tries.
    pub unsafe fn walk<H: Host>(
        self,
        site: &Site<'_, H>,
        group: GroupId,
        node: usize,
        most: usize,
        mut isolate: impl FnMut(NonNull<Item>) -> Verdict,
        dispose: impl FnMut(NonNull<Item>),
    ) -> Walked {
        let mut walk = Walk::new(most);
        let mut again = || {
            let reading = site.groups.reading();
            let seat = self.seat(site, &reading, group);
            let block = seat.and_then(|seat| self.head().block(seat.slot));
            // SAFETY: found within the reading.
            block.is_some_and(|block| walk.over(unsafe { block::sub(block, node) }, &mut isolate))
        };
        while site.host.inside(&mut again) {
            site.host.platform().pause();
        }
        walk.taken.for_each(dispose);
        walk.walked
    }
}

/// A walk under way.
struct Walk {
    left: usize,
    /// Items that were there when it began, or began again, and that it has not come to.
    in_all: usize,
    walked: Walked,
    taken: Taken,
}

impl Walk {
    fn new(most: usize) -> Walk {
        Walk { left: most, in_all: usize::MAX, walked: Walked::default(), taken: Taken::default() }
    }

    /// One hold of a sub-list's lock: until the budget is used, the end is reached, or a verdict ends it; or until it was long enough, and all that it came
    /// to are taken off, so that the next one begins where this ends. Whether to begin again. Within a reading and the gate.
    fn over(&mut self, sub: &Sub, isolate: &mut impl FnMut(NonNull<Item>) -> Verdict) -> bool {
        let mut chain = sub.lock_this();
        if sub.heir().is_some() {
            return false;
        }
        // No item is come to twice, however many are rotated.
        self.in_all = self.in_all.min(sub.count());
        let (mut next, mut held) = (chain.oldest(), 0);
        while let Some(item) = next.filter(|_| self.left > 0 && self.in_all > 0 && held < LONGEST) {
            if held >= HOLD && self.walked.removed == self.walked.scanned {
                return true;
            }
            held += 1;
            // First of all: a verdict that is always the same ends, too.
            self.left -= 1;
            self.in_all -= 1;
            self.walked.scanned += 1;
            next = chain.after(item);
            match isolate(item) {
                Verdict::Removed => {
                    chain.unlink(item);
                    sub.set_count(sub.count() - 1);
                    // SAFETY: items on a chain are there.
                    unsafe { item.as_ref() }.take();
                    self.taken.push(item);
                    self.walked.removed += 1;
                }
                Verdict::Rotate => {
                    chain.unlink(item);
                    // SAFETY: as above.
                    unsafe { item.as_ref() }.rename(sub);
                    chain.push(item, End::Newest);
                }
                Verdict::Skip => {}
                Verdict::Retry => {
                    self.in_all = usize::MAX;
                    return self.left > 0;
                }
                Verdict::Stop => {
                    self.walked.stopped = true;
                    return false;
                }
            }
        }
        false
    }
}
