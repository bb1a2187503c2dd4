//! Registry of all lists, and the move of a deleted group's items to its parent.
//!
//! # Design
//!
//! A *block* has a list's sub-lists for one group. Every group has a chain of the blocks that lists
//! have for it, so a deletion visits only the lists that the group has used. If the parent has a
//! block of the list, the group's items are put before the parent's in one step. Otherwise the
//! parent gets the group's block.
//!
//! A block that no group has is *dead*. It stays until no item names it; [`Site::tick`] renames
//! items. Then it waits for one grace period, since readers may still use it.
//!
//! # Locking
//!
//! Locks are taken in this order: the tree of groups, the registry's mutex, a sub-list, its heir.
//! Memory is requested under the registry's mutex.

use super::block::{self, Block, Head};
use super::list::LruList;
use super::radix::Radix;
use crate::Host;
use core::ptr::{NonNull, null_mut};
use neap_base::Mutex;
use neap_base::gate::Inside;
use neap_base::rcu::Mark;
use neap_groups::{GroupSlot, Groups};

/// Maximum number of items renamed during one hold of the mutex, and of holds in one tick.
const RENAMED: usize = 256;
const HOLDS: usize = 64;
/// Number of ticks that free a dead block if no reader uses it.
const TICKS_MAX: usize = 4;

/// Shared state of all lists of a tree of groups.
#[derive(Debug)]
pub struct LruRegistry {
    pub(super) registry: Mutex<Registry>,
    grace: Mutex<Grace>,
}

/// State under the registry's mutex.
#[derive(Debug)]
pub(super) struct Registry {
    /// The first block of each group.
    pub(super) slots: Radix,
    /// Dead blocks that items name, or that other dead blocks lead to.
    pub(super) dead: *mut Block,
    /// Blocks that no new reader can find, and that wait for the next grace period.
    pub(super) waiting: *mut Block,
    /// The first list.
    pub(super) first: *mut Head,
}

/// Blocks that wait for the end of the current grace period.
#[derive(Debug)]
struct Grace {
    ending: *mut Block,
    since: Option<Mark>,
}

// SAFETY: any thread may use the blocks and heads that it points to. Threads use their links only
// under the mutex that contains the registry.
unsafe impl Send for Registry {}
// SAFETY: only readers still have references to these blocks, and readers do not use the links.
// Only the thread that holds the mutex uses the chain.
unsafe impl Send for Grace {}

/// Lists and the parts that they depend on, as an argument of every call.
#[derive(Debug)]
pub struct Site<'a, H> {
    /// The owner of memory and fork gate.
    pub host: &'a H,
    /// The groups of the items.
    pub groups: &'a Groups,
    /// The registry of lists.
    pub lists: &'a LruRegistry,
}

impl<H> Clone for Site<'_, H> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<H> Copy for Site<'_, H> {}

impl LruRegistry {
    neap_base::constructor! {
        /// Makes an empty registry.
        pub fn new() -> LruRegistry {
            let registry = Registry { slots: Radix::new(), dead: null_mut(), waiting: null_mut(), first: null_mut() };
            LruRegistry { registry: Mutex::new(registry), grace: Mutex::new(Grace { ending: null_mut(), since: None }) }
        }
    }
}

impl Default for LruRegistry {
    fn default() -> Self {
        LruRegistry::new()
    }
}

/// Returns the header of a block.
///
/// # Safety
/// The block exists as long as the answer is used. The caller has the registry's mutex, or no other
/// thread can reach the block's links.
pub(super) unsafe fn header<'a>(block: NonNull<Block>) -> &'a Block {
    // SAFETY: by this function's contract the block exists; its changing fields are cells, which no
    // other thread uses meanwhile.
    unsafe { block.as_ref() }
}

/// Puts a block at the head of a chain, and returns the new head.
fn link(first: *mut Block, block: NonNull<Block>) -> *mut Block {
    // SAFETY: blocks of a chain exist. The caller has the registry's mutex, which protects the
    // chains of all its callers.
    unsafe {
        header(block).previous.set(null_mut());
        header(block).next.set(first);
        if let Some(first) = NonNull::new(first) {
            header(first).previous.set(block.as_ptr());
        }
    }
    block.as_ptr()
}

/// Takes a block out of a chain, and returns the new head.
fn unlink(first: *mut Block, block: NonNull<Block>) -> *mut Block {
    // SAFETY: blocks of a chain exist. The caller has the registry's mutex, which protects the
    // chains of all its callers.
    unsafe {
        let (next, previous) = (header(block).next.get(), header(block).previous.get());
        if let Some(next) = NonNull::new(next) {
            header(next).previous.set(previous);
        }
        match NonNull::new(previous) {
            Some(previous) => header(previous).next.set(next),
            None => return next,
        }
    }
    first
}

/// Returns the blocks of a chain. The caller may take a returned block out of the chain or free it,
/// but not the block behind it.
pub(super) fn chain(first: *mut Block) -> impl Iterator<Item = NonNull<Block>> {
    let mut next = NonNull::new(first);
    core::iter::from_fn(move || {
        let block = next?;
        // SAFETY: blocks of a chain exist, and this block was not returned yet. The caller has the
        // mutex that protects the chain, or the chain is detached.
        next = NonNull::new(unsafe { header(block) }.next.get());
        Some(block)
    })
}

impl Registry {
    /// Returns the first block of a group.
    pub(super) fn of(&self, slot: u32) -> *mut Block {
        self.slots.get(slot).map_or(null_mut(), NonNull::as_ptr)
    }

    /// Makes room for a block of a list in a slot. Returns false if there is no memory.
    fn reserve<H: Host>(&mut self, inside: &Inside<'_>, host: &H, list: &Head, slot: u32) -> bool {
        list.table.reserve(inside, host, slot) && self.slots.reserve(inside, host, slot)
    }

    /// Puts a block into a slot that was reserved.
    fn install(&mut self, list: &Head, slot: u32, block: NonNull<Block>) {
        // SAFETY: the block was made by the caller, or found in a chain, under the mutex that is
        // held.
        unsafe { header(block) }.slot.set(slot);
        self.slots.set(slot, NonNull::new(link(self.of(slot), block)));
        list.table.set(slot, Some(block));
    }

    /// Takes a block out of its slot's chain, but not out of the list's table.
    pub(super) fn remove(&mut self, block: NonNull<Block>) {
        // SAFETY: the block was found in a chain or a table under the mutex, which is held.
        let slot = unsafe { header(block) }.slot.get();
        self.slots.set(slot, NonNull::new(unlink(self.of(slot), block)));
    }

    /// Takes a list and all its blocks out of the registry. Returns the blocks in a chain.
    pub(super) fn detach(&mut self, list: LruList) -> *mut Block {
        let head = list.head();
        let mut blocks = null_mut();
        for (_, block) in core::iter::successors(head.table.next(0), |&(slot, _)| head.table.next(slot + 1)) {
            self.remove(block);
            blocks = link(blocks, block);
        }
        // SAFETY: blocks of the chain of dead ones exist, and the mutex is held.
        for block in chain(self.dead).filter(|&block| unsafe { header(block) }.list == list.0) {
            self.dead = unlink(self.dead, block);
            blocks = link(blocks, block);
        }
        let (next, previous) = (head.next.get(), head.previous.get());
        // SAFETY: the neighbours are null or lists, which exist until they are closed. That takes
        // the mutex, which is held.
        unsafe {
            next.as_ref().inspect(|next| next.previous.set(previous));
            match previous.as_ref() {
                Some(previous) => previous.next.set(next),
                None => self.first = next,
            }
        }
        link(blocks, head.root)
    }

    /// Moves a dead block without pins to the blocks that wait for readers, and unpins its heir.
    fn bury(&mut self, block: NonNull<Block>) {
        self.dead = unlink(self.dead, block);
        self.waiting = link(self.waiting, block);
        // SAFETY: the block was found in the chain of dead ones under the mutex, which is held. It
        // has pinned its heir until now, so that exists.
        unsafe { NonNull::new(header(block).heir.get()).inspect(|&heir| header(heir).pin(-1)) };
    }
}

impl<H: Host> Site<'_, H> {
    /// Returns the block of a list for a group, or makes it. If there is no memory, returns the
    /// block of the nearest ancestor that has one. The caller is within the read in which the seat
    /// was found.
    #[cold]
    pub(super) fn make(&self, inside: &Inside<'_>, list: NonNull<Head>, seat: GroupSlot) -> NonNull<Block> {
        // SAFETY: the caller uses the list, which is not closed while a thread does.
        let head = unsafe { list.as_ref() };
        let mut registry = self.lists.registry.lock();
        let mut at = seat;
        // Items attached to a group that leaves would never move to its parent.
        while self.groups.is_leaving(at.slot) {
            at = self.groups.parent_of(at.slot).unwrap_or(GroupSlot::ROOT);
        }
        if let Some(block) = head.block(at.slot) {
            return block;
        }
        if registry.reserve(inside, self.host, head, at.slot)
            && let Some(block) = block::make(inside, self.host, list, head.nodes, at)
        {
            registry.install(head, at.slot, block);
            return block;
        }
        self.nearest(head, at)
    }

    /// Returns the block of the nearest ancestor that has one.
    fn nearest(&self, head: &Head, seat: GroupSlot) -> NonNull<Block> {
        let above = |seat: &GroupSlot| self.groups.parent_of(seat.slot);
        core::iter::successors(above(&seat), above).find_map(|seat| head.block(seat.slot)).unwrap_or(head.root)
    }

    /// Moves the items of a group that is being deleted to its parent, in all lists. For
    /// [`Reclaimer::offline`](neap_groups::Reclaimer::offline).
    pub fn offline(&self, inside: &Inside<'_>, child: GroupSlot, parent: GroupSlot) {
        let mut registry = self.lists.registry.lock();
        for block in chain(registry.of(child.slot)) {
            registry.remove(block);
            self.reparent(inside, &mut registry, block, child, parent);
        }
    }

    /// Gives the parent a block of a deleted group, or the items in it.
    fn reparent(
        &self,
        inside: &Inside<'_>,
        registry: &mut Registry,
        block: NonNull<Block>,
        child: GroupSlot,
        parent: GroupSlot,
    ) {
        // SAFETY: the block was found in the group's chain under the registry's mutex, which is
        // held. Its list exists, since closing a list takes its blocks out of chains under that
        // mutex.
        let (dead, head) = unsafe { (header(block), header(block).list.as_ref()) };
        // SAFETY: the block was found in the group's chain under the registry's mutex, which is
        // held.
        let subs = || unsafe { block::subs(block) }.enumerate();
        let heir = match head.block(parent.slot) {
            Some(heir) => heir,
            None if registry.reserve(inside, self.host, head, parent.slot) => {
                subs().for_each(|(_, sub)| sub.lock_this().seat = parent);
                registry.install(head, parent.slot, block);
                head.table.set(child.slot, None);
                // The marks come after the block is the parent's. Otherwise the parent's count
                // would miss the items:
                // 1. The parent is marked.
                // 2. A visitor counts no items there, and clears the mark.
                // 3. Now the parent has items.
                for (node, sub) in subs() {
                    // A thread that adds the first item after this marks the parent itself.
                    let items = Some(sub.lock_this()).map_or(0, |_chain| sub.count());
                    self.mark(inside, head, items, parent, node);
                }
                return;
            }
            None => self.nearest(head, parent),
        };
        for (node, sub) in subs() {
            // SAFETY: the heir's block is the root's or in the list's table, under the mutex that
            // is held. It has as many nodes, being of the same list.
            let (moved, seat) = sub.hand_over(unsafe { block::sub(heir, node) });
            self.mark(inside, head, moved, seat, node);
        }
        // The table keeps the block until the last sub-list leads to its heir. Otherwise threads
        // would use the heir while items are still in this block.
        head.table.set(child.slot, None);
        let named = subs().filter(|(_, sub)| sub.named.get()).count() as isize;
        dead.pin(named);
        if dead.pins.get() == 0 {
            registry.waiting = link(registry.waiting, block);
            return;
        }
        dead.heir.set(heir.as_ptr());
        // SAFETY: the heir's block is the root's or in the list's table, under the mutex that is
        // held.
        unsafe { header(heir) }.pin(1);
        registry.dead = link(registry.dead, block);
    }

    /// Marks a group for the list's shrinker, if the group has items there.
    pub(super) fn mark(&self, inside: &Inside<'_>, list: &Head, items: usize, seat: GroupSlot, node: usize) {
        if let (Some(shrinker), true) = (list.shrinker, items > 0) {
            self.host.mark(inside, shrinker, seat, node);
        }
    }

    /// Frees the blocks of deleted groups that no thread uses. Returns whether another call would
    /// do more. The host calls this at intervals. It waits for no reader, and takes about a
    /// millisecond at most.
    pub fn tick(&self) -> bool {
        let is_dead = (0..HOLDS).all(|_| self.host.inside(|_| self.rename()));
        self.host.inside(|inside| self.end_grace(inside))
            || is_dead
            || !self.host.inside(|_| self.lists.registry.lock().dead.is_null())
    }

    /// Calls [`Site::tick`] several times, for hosts whose ticks may not come soon. Returns whether
    /// anything is left.
    pub fn end_deleted(&self) -> bool {
        (0..TICKS_MAX).all(|_| self.tick())
    }

    /// Renames some items that name a dead sub-list. Returns whether another call would do more.
    fn rename(&self) -> bool {
        let mut registry = self.lists.registry.lock();
        let (mut left, mut is_news) = (RENAMED, false);
        for block in chain(registry.dead) {
            // SAFETY: the block was found in the chain of dead ones under the mutex, which is held.
            let (dead, subs) = unsafe { (header(block), block::subs(block)) };
            for sub in subs.filter(|sub| sub.named.get()) {
                let renamed = sub.rename(left);
                left = left.saturating_sub(renamed.items + 1);
                if !renamed.is_named {
                    sub.named.set(false);
                    dead.pin(-1);
                }
            }
            if dead.pins.get() == 0 {
                registry.bury(block);
                is_news = true;
            }
            if left == 0 {
                return true;
            }
        }
        is_news
    }

    /// Frees the blocks whose grace period has ended, and begins one for the waiting blocks.
    /// Returns whether any blocks are left.
    fn end_grace(&self, inside: &Inside<'_>) -> bool {
        let Some(mut grace) = self.lists.grace.try_lock() else { return true };
        if let Some(since) = grace.since {
            if !self.groups.has_passed(inside, self.host.platform(), since) {
                return true;
            }
            for block in chain(core::mem::replace(&mut grace.ending, null_mut())) {
                // SAFETY: no item names the block, and all readers that can have found it have
                // left, so no thread uses it. It is from `block::make` with the host of the site.
                unsafe { self.free(inside, block) };
            }
            grace.since = None;
        }
        grace.ending = core::mem::replace(&mut self.lists.registry.lock().waiting, null_mut());
        if !grace.ending.is_null() {
            grace.since = Some(self.groups.moment());
        }
        grace.since.is_some()
    }

    /// Frees a block.
    ///
    /// # Safety
    /// No thread uses the block any more, and it is from [`block::make`] with this host.
    pub(super) unsafe fn free(&self, inside: &Inside<'_>, block: NonNull<Block>) {
        // SAFETY: by this function's contract no thread uses the block, and it is from
        // `block::make`, which got it from this host with this size.
        unsafe { self.host.give_back(inside, block.cast(), block::bytes(header(block).nodes)) };
    }

    /// Frees the registry. The caller has closed all lists.
    ///
    /// # Safety
    /// No thread uses the lists any more.
    pub unsafe fn close(&self) {
        self.host.inside(|inside| {
            let mut registry = self.lists.registry.lock();
            let mut grace = self.lists.grace.lock();
            let [waiting, ending] =
                [&mut registry.waiting, &mut grace.ending].map(|first| core::mem::replace(first, null_mut()));
            for block in chain(waiting).chain(chain(ending)) {
                // SAFETY: by this function's contract no thread uses a block. Blocks in these
                // chains are from `block::make` with the host of the site.
                unsafe { self.free(inside, block) };
            }
            // SAFETY: by this function's contract no thread uses the table, and its nodes are from
            // the host of the site.
            unsafe { registry.slots.close(inside, self.host) };
        });
    }
}
