//! All lists, and how what they have of a group goes to its parent.
//!
//! Sits between lists, which ask it for blocks, and groups, whose deletion it is told of. Every group has a chain of the blocks that lists
//! have for it, so that a deletion looks at those lists alone that the group has used. Where the parent has a block of the list, too, the
//! items are put before the parent's, in one step; where it has none it gets the group's. A dead block stays until no item names it, which
//! [`Site::tick`] sees to, and until nobody can be on the way through it: one grace period for all.
//!
//! Locks: groups' tree, then the registry's mutex, then a sub-list, then its heir. Memory is asked for under the registry's mutex.

use super::block::{self, Block};
use super::list::{Head, LruList};
use super::radix::Radix;
use crate::Host;
use core::ptr::{NonNull, null_mut};
use neap_base::Mutex;
use neap_base::rcu::Mark;
use neap_groups::{Groups, Seat};

/// Items renamed under one hold of the mutex, and holds in one tick.
const RENAMED: usize = 256;
const HOLDS: usize = 64;
/// Ticks that are enough where nobody is on the way through what is to end.
const LOOKS: usize = 4;

/// What lists have in common: one for all lists of a tree of groups.
#[derive(Debug)]
pub struct Lists {
    pub(super) registry: Mutex<Registry>,
    grace: Mutex<Grace>,
}

/// What the registry's mutex is for.
#[derive(Debug)]
pub(super) struct Registry {
    /// The first block of each group.
    pub(super) slots: Radix,
    /// Blocks that items name, or others lead to.
    pub(super) dead: *mut Block,
    /// Those that nobody new can find.
    pub(super) waiting: *mut Block,
    /// All lists.
    pub(super) first: *mut Head,
}

/// Blocks whose last readers are waited for.
#[derive(Debug)]
struct Grace {
    ending: *mut Block,
    since: Option<Mark>,
}

// SAFETY: what they lead to is everybody's who has the mutex.
unsafe impl Send for Registry {}
// SAFETY: as above.
unsafe impl Send for Grace {}

/// Lists, and what they are part of: what every call is told.
#[derive(Debug)]
pub struct Site<'a, H> {
    /// Whose memory it is, and whose gate.
    pub host: &'a H,
    /// Whose items they are.
    pub groups: &'a Groups,
    /// The lists.
    pub lists: &'a Lists,
}

impl<H> Clone for Site<'_, H> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<H> Copy for Site<'_, H> {}

impl Lists {
    neap_base::constructor! {
        /// No lists yet.
        pub fn new() -> Lists {
            let registry = Registry { slots: Radix::new(), dead: null_mut(), waiting: null_mut(), first: null_mut() };
            Lists { registry: Mutex::new(registry), grace: Mutex::new(Grace { ending: null_mut(), since: None }) }
        }
    }
}

impl Default for Lists {
    fn default() -> Self {
        Lists::new()
    }
}

/// What a block has besides sub-lists.
///
/// # Safety
/// It is there as long as the answer is used, and whoever changes it has the registry's mutex.
pub(super) unsafe fn header<'a>(block: NonNull<Block>) -> &'a Block {
    // SAFETY: as the caller promises.
    unsafe { block.as_ref() }
}

/// Puts a block at the head of a chain.
fn link(first: *mut Block, block: NonNull<Block>) -> *mut Block {
    // SAFETY: blocks of chains are there, and the mutex is held.
    unsafe {
        header(block).previous.set(null_mut());
        header(block).next.set(first);
        if let Some(first) = NonNull::new(first) {
            header(first).previous.set(block.as_ptr());
        }
    }
    block.as_ptr()
}

/// Takes a block out of a chain; answers what its first is then.
fn unlink(first: *mut Block, block: NonNull<Block>) -> *mut Block {
    // SAFETY: as above.
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

/// The blocks of a chain. Each may be taken out of it, or freed, once the next was asked for.
pub(super) fn chain(first: *mut Block) -> impl Iterator<Item = NonNull<Block>> {
    let mut next = NonNull::new(first);
    core::iter::from_fn(move || {
        let block = next?;
        // SAFETY: as above.
        next = NonNull::new(unsafe { header(block) }.next.get());
        Some(block)
    })
}

impl Registry {
    /// The first block of a group.
    pub(super) fn of(&self, slot: u32) -> *mut Block {
        self.slots.get(slot).map_or(null_mut(), NonNull::as_ptr)
    }

    /// Sees to it that a block of a list can be put into a slot.
    fn reserve<H: Host>(&mut self, host: &H, list: &Head, slot: u32) -> bool {
        list.table.reserve(host, slot) && self.slots.reserve(host, slot)
    }

    /// Puts a block into a slot that was reserved.
    fn install(&mut self, list: &Head, slot: u32, block: NonNull<Block>) {
        // SAFETY: the block is there, and the mutex held.
        unsafe { header(block) }.slot.set(slot);
        self.slots.set(slot, NonNull::new(link(self.of(slot), block)));
        list.table.set(slot, Some(block));
    }

    /// Takes a block out of its slot's chain, but not out of the list's table.
    pub(super) fn remove(&mut self, block: NonNull<Block>) {
        // SAFETY: as above.
        let slot = unsafe { header(block) }.slot.get();
        self.slots.set(slot, NonNull::new(unlink(self.of(slot), block)));
    }

    /// Takes a list, and all blocks that it has, out of everybody's sight; answers the blocks, in a chain.
    pub(super) fn detach(&mut self, list: LruList) -> *mut Block {
        let head = list.head();
        let mut blocks = null_mut();
        for (_, block) in core::iter::successors(head.table.next(0), |&(slot, _)| head.table.next(slot + 1)) {
            self.remove(block);
            blocks = link(blocks, block);
        }
        // SAFETY: found under the mutex.
        for block in chain(self.dead).filter(|&block| unsafe { header(block) }.list == list.0) {
            self.dead = unlink(self.dead, block);
            blocks = link(blocks, block);
        }
        let (next, previous) = (head.next.get(), head.previous.get());
        // SAFETY: the neighbours are lists.
        unsafe {
            next.as_ref().inspect(|next| next.previous.set(previous));
            match previous.as_ref() {
                Some(previous) => previous.next.set(next),
                None => self.first = next,
            }
        }
        link(blocks, head.root)
    }

    /// A dead block that nothing pins waits for its readers from now on. Its heir may be the next.
    fn bury(&mut self, block: NonNull<Block>) {
        self.dead = unlink(self.dead, block);
        self.waiting = link(self.waiting, block);
        // SAFETY: as above; the heir is pinned by this one until now.
        unsafe { NonNull::new(header(block).heir.get()).inspect(|&heir| header(heir).pin(-1)) };
    }
}

impl<H: Host> Site<'_, H> {
    /// The block of a group for a list, which is made where there is none; where there is no memory, that of the nearest above that has one.
    /// Within a reading that the seat was found in.
    #[cold]
    pub(super) fn make(&self, list: NonNull<Head>, seat: Seat) -> NonNull<Block> {
        // SAFETY: the list is in use.
        let head = unsafe { list.as_ref() };
        let mut registry = self.lists.registry.lock();
        let mut at = seat;
        // What would be hung on a group that leaves would never come off it.
        while self.groups.is_leaving(at.slot) {
            at = self.groups.parent_of(at.slot).unwrap_or(Seat::ROOT);
        }
        if let Some(block) = head.block(at.slot) {
            return block;
        }
        if registry.reserve(self.host, head, at.slot)
            && let Some(block) = block::make(self.host, list, head.nodes, at)
        {
            registry.install(head, at.slot, block);
            return block;
        }
        self.nearest(head, at)
    }

    /// The block of the nearest above a group that has one.
    fn nearest(&self, head: &Head, seat: Seat) -> NonNull<Block> {
        let above = |seat: &Seat| self.groups.parent_of(seat.slot);
        core::iter::successors(above(&seat), above).find_map(|seat| head.block(seat.slot)).unwrap_or(head.root)
    }

    /// A group is being deleted: all that lists have of it is its parent's from now on. For [`Reclaimer::offline`](neap_groups::Reclaimer::offline).
    pub fn offline(&self, child: Seat, parent: Seat) {
        let mut registry = self.lists.registry.lock();
        for block in chain(registry.of(child.slot)) {
            registry.remove(block);
            self.hand_up(&mut registry, block, child, parent);
        }
    }

    /// Lets the parent have a block of a group's, or what is in it.
    fn hand_up(&self, registry: &mut Registry, block: NonNull<Block>, child: Seat, parent: Seat) {
        // SAFETY: it was found under the mutex, and so is its list there.
        let (dead, head) = unsafe { (header(block), header(block).list.as_ref()) };
        // SAFETY: as above.
        let subs = || unsafe { block::subs(block) }.enumerate();
        let heir = match head.block(parent.slot) {
            Some(heir) => heir,
            None if registry.reserve(self.host, head, parent.slot) => {
                subs().for_each(|(_, sub)| sub.lock_this().seat = parent);
                registry.install(head, parent.slot, block);
                head.table.set(child.slot, None);
                // Not before it is the parent's, whose count would not see what is there:
                // 1. the parent is marked; 2. a visitor counts nothing there, and clears the mark; 3. now the parent has items.
                for (node, sub) in subs() {
                    // Who adds the first item behind this marks the parent itself.
                    let items = Some(sub.lock_this()).map_or(0, |_chain| sub.count());
                    self.mark(head, items, parent, node);
                }
                return;
            }
            None => self.nearest(head, parent),
        };
        for (node, sub) in subs() {
            // SAFETY: as above; it has as many nodes.
            let (moved, seat) = sub.hand_over(unsafe { block::sub(heir, node) });
            self.mark(head, moved, seat, node);
        }
        // Not before the last sub-list leads to its heir: nobody finds an heir whose items are elsewhere.
        head.table.set(child.slot, None);
        let named = subs().filter(|(_, sub)| sub.named.get()).count() as isize;
        dead.pin(named);
        if dead.pins.get() == 0 {
            registry.waiting = link(registry.waiting, block);
            return;
        }
        dead.heir.set(heir.as_ptr());
        // SAFETY: as above.
        unsafe { header(heir) }.pin(1);
        registry.dead = link(registry.dead, block);
    }

    /// Has it marked that a group has something in a list, if it has.
    pub(super) fn mark(&self, list: &Head, items: usize, seat: Seat, node: usize) {
        if let (Some(shrinker), true) = (list.shrinker, items > 0) {
            self.host.mark(shrinker, seat, node);
        }
    }

    /// Work that waits: lets go of what deleted groups have left. Answers whether anything is left, for another call. To be called now and
    /// then; never waits, takes about a millisecond at most.
    pub fn tick(&self) -> bool {
        let is_dead = (0..HOLDS).all(|_| self.host.inside(|| self.rename()));
        self.host.inside(|| self.end_grace())
            || is_dead
            || !self.host.inside(|| self.lists.registry.lock().dead.is_null())
    }

    /// The same, several times, for hosts whose ticks may not come soon.
    pub fn end_deleted(&self) -> bool {
        (0..LOOKS).all(|_| self.tick())
    }

    /// Renames some items that name a dead sub-list; whether another call would do more.
    fn rename(&self) -> bool {
        let mut registry = self.lists.registry.lock();
        let (mut left, mut is_news) = (RENAMED, false);
        for block in chain(registry.dead) {
            // SAFETY: found under the mutex.
            let (dead, subs) = unsafe { (header(block), block::subs(block)) };
            for sub in subs.filter(|sub| sub.named.get()) {
                let (renamed, is_named) = sub.rename(left);
                left = left.saturating_sub(renamed + 1);
                if !is_named {
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

    /// Gives back what nobody can be on the way through any more; whether anything is left.
    fn end_grace(&self) -> bool {
        let Some(mut grace) = self.lists.grace.try_lock() else { return true };
        if let Some(since) = grace.since {
            if !self.groups.has_passed(self.host.platform(), since) {
                return true;
            }
            for block in chain(core::mem::replace(&mut grace.ending, null_mut())) {
                // SAFETY: its readers have gone, and nothing names it.
                unsafe { self.free(block) };
            }
            grace.since = None;
        }
        grace.ending = core::mem::replace(&mut self.lists.registry.lock().waiting, null_mut());
        if !grace.ending.is_null() {
            grace.since = Some(self.groups.moment());
        }
        grace.since.is_some()
    }

    /// # Safety
    /// Nobody uses the block any more.
    pub(super) unsafe fn free(&self, block: NonNull<Block>) {
        // SAFETY: as the caller promises; it is from `block::make`.
        unsafe { self.host.give_back(block.cast(), block::bytes(header(block).nodes)) };
    }

    /// Gives everything back. Lists are closed before.
    ///
    /// # Safety
    /// Nobody uses the lists any more.
    pub unsafe fn close(&self) {
        let mut registry = self.lists.registry.lock();
        let mut grace = self.lists.grace.lock();
        let [waiting, ending] =
            [&mut registry.waiting, &mut grace.ending].map(|first| core::mem::replace(first, null_mut()));
        for block in chain(waiting).chain(chain(ending)) {
            // SAFETY: as the caller promises.
            unsafe { self.free(block) };
        }
        // SAFETY: as the caller promises.
        unsafe { registry.slots.close(self.host) };
    }
}
