//! Allocations of threads that are in a group. neap charges the group before it hands out the
//! memory, and records the payer.
//!
//! # Design
//! Once any thread has entered a group, the fast path refuses every allocation, and all allocations
//! come here. One restartable sequence pops an object from this CPU's stack. Another one charges
//! the class's size to the group's stock on this CPU. A charge beyond a limit succeeds, and is
//! counted, unless the option `refuse` is set.
//!
//! When any thread frees a run, neap uncharges the run's payer or the payer's heir. An object stays
//! charged while it lies in a cache ([`charged`](neap_objects::charged)). If a thread's group is
//! deleted, the thread moves to the group's heir at its next charge on the slow path.
//!
//! # Locking
//! A thread holds the mutex `flushing` while it flushes caches.

use crate::allocation::fresh::Fresh;
use crate::groups::memory_groups::{Grouped, price};
use crate::mm::{Core, Mm, is_beyond_any};
use crate::options::ThreadGroups;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_groups::{FlushPace, GroupId, Kind, OnLimit, PAYER_BITS, Payer, Refusal};
use neap_objects::charged::{GateSide, Owned};
use neap_objects::payers::word_of;
use neap_objects::size_class::{CLASSES, Class};
use neap_os::thread_state::{count_down, entered, set_entered};
use neap_reclaim::is_calling;

/// This bit is set in a word that names the sole owner of a whole page. A thread's word consists of
/// this bit, the manager's tag and the payer. The frame of a page has an equal word if the thread's
/// group is the page's sole owner. So malloc needs one comparison.
const TOP: usize = word_of(0) as usize;
const TAG_BITS: u32 = TOP.ilog2() - PAYER_BITS;
impl<P: Platform> Mm<P> {
    /// Sets this manager's tag, by which the words of threads name the manager. [`Mm::open`] calls
    /// this, before any thread is in a group of this manager.
    pub(crate) fn make_tag(&self) {
        // The tag is the manager's address divided by a power of two up to its size, without high
        // bits. Two managers that are less than 16 GiB apart have different tags. More distant ones
        // hardly ever have equal tags.
        let place = core::ptr::from_ref(self).addr() >> size_of::<Self>().ilog2();
        self.tag.store(place % (1 << TAG_BITS), Ordering::Relaxed);
    }

    /// Returns the owner number of a payer's objects.
    fn owner(&self, payer: Payer) -> u64 {
        (self.tag.load(Ordering::Relaxed) as u64) << PAYER_BITS | payer.to_bits()
    }

    /// Puts this thread into a group, or into none. Returns the word for [`Mm::leave`]. With a
    /// group, the manager must be open. After the first call with a group, the fast path refuses
    /// every allocation, and malloc reads its thread's word.
    pub fn enter(&self, group: Option<GroupId>) -> usize {
        let before = entered();
        if group.is_some() {
            self.fast_path.enable_group_check();
        }
        let node = || self.groups_if_made().map_or(0, |grouped| grouped.node());
        set_entered(group.map_or(0, |group| word_of(self.owner(group.payer(Kind::Objects, node()))) as usize));
        before
    }

    /// Restores the word that [`Mm::enter`] returned.
    pub fn leave(&self, before: usize) {
        set_entered(before);
    }

    /// Returns the group of this manager that the thread is in.
    #[inline]
    pub(crate) fn group_of_thread(&self) -> Option<GroupId> {
        let word = entered();
        let tag = (word ^ TOP) >> PAYER_BITS;
        (tag == self.tag.load(Ordering::Relaxed)).then(|| GroupId::from_bits(word as u64))
    }

    /// Step 2 of malloc: allocates at least `size` bytes from this CPU's stack. Their address is a
    /// multiple of 16. A thread in no group gets an object at once. A thread in a group gets one
    /// that the group has paid for already, or for which this CPU's stock pays. Otherwise calls
    /// `slow`, which must end in [`Mm::alloc_cpu_locked`].
    #[inline(always)]
    pub fn alloc_fast_grouped(&self, size: usize, slow: impl FnOnce() -> *mut u8) -> *mut u8 {
        if self.fast_path.counts(size) {
            return match count_down(size) {
                true => self.fast_path.allocate_ungrouped(size).map_or_else(slow, NonNull::as_ptr),
                false => self.allocate_sampled(size, slow),
            };
        }
        let word = entered();
        // No thread has entered a group, so no object has a payer. The stack would refuse again.
        if word == 0 && self.fast_path.serves_unchecked() {
            return slow();
        }
        if self.profile.is_on() && !count_down(size) {
            return self.allocate_sampled(size, slow);
        }
        self.pop_for_thread(word, size, slow)
    }

    /// Allocates, and samples the allocation.
    #[cold]
    #[inline(never)]
    fn allocate_sampled(&self, size: usize, slow: impl FnOnce() -> *mut u8) -> *mut u8 {
        let guarded = self.allocate_guarded(size);
        let memory = guarded.unwrap_or_else(|| self.pop_for_thread(entered(), size, slow));
        self.sample(memory, size);
        memory
    }

    /// Pops an object for this thread, whose word is `word`, as [`Mm::alloc_fast_grouped`] says.
    /// The allocation is counted already.
    #[inline(always)]
    fn pop_for_thread(&self, word: usize, size: usize, slow: impl FnOnce() -> *mut u8) -> *mut u8 {
        if word == 0
            && let Some(object) = self.fast_path.allocate_ungrouped(size)
        {
            return object.as_ptr();
        }
        // One comparison shows that the thread is in a group of this manager, and that the group
        // has paid.
        match self.fast_path.allocate_grouped(size, word as u64) {
            Owned::Again(object) => object.as_ptr(),
            Owned::Another(object) => self.pay_for_or(size, object, slow),
            Owned::Nothing => slow(),
        }
    }

    /// Charges the thread's group for `object`, which this thread has popped and which is marked as
    /// cached. If this CPU's stock does not suffice, puts the object back and calls `slow`. A
    /// thread in no group of this manager gets the object uncharged, unless the option `groups`
    /// puts every thread into a group.
    #[inline(never)]
    fn pay_for_or(&self, size: usize, object: NonNull<u8>, slow: impl FnOnce() -> *mut u8) -> *mut u8 {
        let (class, group) = (Class::of_size(size), self.group_of_thread());
        if let (Some(group), Some(grouped)) = (group, self.groups_if_made()) {
            let payer = group.payer(Kind::Objects, grouped.node());
            if grouped.take(payer, price(class)) {
                self.note_node(payer);
                // SAFETY: `allocate_grouped` popped the object from a stack of this manager for
                // this thread. The object is marked as cached, and no other thread has it.
                let object = unsafe { self.fast_path.hand_out(object, GateSide::Outside) };
                return object.map_or(null_mut(), |object| self.own(&grouped, class, object.as_ptr(), payer));
            }
        }
        if group.is_none() && self.fast_path.serves_ungrouped() {
            // SAFETY: `allocate_grouped` popped the object from a stack of this manager for this
            // thread. The object is marked as cached, and no other thread has it.
            return unsafe { self.fast_path.hand_out(object, GateSide::Outside) }.map_or(null_mut(), NonNull::as_ptr);
        }
        // SAFETY: the object came from a stack of this manager, so it lies in the arena and has a
        // class. `kind` returns its kind.
        if !unsafe { self.fast_path.put(self.fast_path.kind(object.as_ptr()), object.as_ptr()) } {
            self.free_cpu_locked(object.as_ptr());
        }
        slow()
    }

    /// Makes the thread's word name `payer`. The word names another payer if the thread has moved
    /// to another node.
    fn note_node(&self, payer: Payer) {
        let word = word_of(self.owner(payer)) as usize;
        if entered() != word {
            set_entered(word);
        }
    }

    /// Records the payer of an object that is charged already. If there is no memory for the
    /// record, uncharges the object. The object has no payer then.
    #[cold]
    fn own(&self, grouped: &Grouped<'_, P>, class: Class, object: *mut u8, payer: Payer) -> *mut u8 {
        let Some(core) = self.core_if_open() else { return object };
        // SAFETY: the object of this manager was handed out to this thread, and no other thread
        // knows it. An owner is a tag and a payer, which is not 0 and is below bit 63.
        let owned = unsafe { self.fast_path.own(object, self.owner(payer)) } || {
            let _inside = self.gate.enter(core.objects.platform.cpu());
            // SAFETY: the object of this manager was handed out to this thread, and no other thread
            // knows it. The owner is not 0 and is below bit 63.
            unsafe { core.objects.own_slowly(class, object, self.owner(payer)) }
        };
        if !owned {
            grouped.uncharge(payer, price(class));
        }
        object
    }

    /// Allocates on the slow path, and charges the thread's group, if it is in one.
    pub(crate) fn alloc_slow_charged(&self, core: &Core<P>, size: usize, align: usize) -> Fresh {
        if core.options.groups != ThreadGroups::Off {
            self.put_thread_into_group(core.options.groups);
        }
        let (Some(mut group), Some(grouped)) = (self.group_of_thread(), self.groups_if_made()) else {
            return self.alloc_slow_uncharged(core, size, align);
        };
        if is_beyond_any(size, align) {
            return Fresh::NULL;
        }
        let class = Class::of_layout(size, align, core.objects.pages.page_size());
        let (kind, bytes) = match class {
            Some(class) => (Kind::Objects, price(class)),
            None => (Kind::Pages, core.run_price(size)),
        };
        let payer = loop {
            let payer = group.payer(kind, grouped.node());
            match grouped.charge(payer, bytes, self.how()) {
                Ok(()) => break payer,
                Err(Refusal::Limit(_)) => {
                    core.profile_before_refusal(self);
                    core.count_refusal();
                    return Fresh::NULL;
                }
                Err(Refusal::Gone) => match grouped.heir(group) {
                    Some(heir) => {
                        group = heir;
                        self.enter(Some(heir));
                    }
                    None => return self.alloc_slow_uncharged(core, size, align),
                },
            }
        };
        let fresh = self.alloc_slow_uncharged(core, size, align);
        let memory = fresh.memory;
        if memory.is_null() {
            grouped.uncharge(payer, bytes);
        } else if let Some(class) = class {
            self.note_node(payer);
            self.own(&grouped, class, memory, payer);
        } else {
            core.set_run_payer(memory, payer);
        }
        fresh
    }

    /// Calls `resize`, which changes a run from `old` to `new` bytes, and charges its payer with
    /// the difference. Returns `None` if `resize` fails, the charge is refused, or the payer is
    /// gone. The heir of such a payer is not charged, since neap cannot tell it from other groups
    /// with bytes charged under the same id.
    pub(crate) fn resize_paid(
        &self,
        payer: Payer,
        old: u64,
        new: u64,
        resize: impl FnOnce() -> Option<*mut u8>,
    ) -> Option<*mut u8> {
        let Some(grouped) = self.groups_if_made() else { return resize() };
        let more = new.saturating_sub(old);
        if more > 0 {
            grouped.charge(payer, more, self.how()).ok()?;
        }
        let resized = resize();
        let less = if resized.is_some() { old.saturating_sub(new) } else { more };
        if less > 0 {
            grouped.uncharge(payer, less);
        }
        resized
    }

    /// Uncharges the payer of a run.
    pub(crate) fn uncharge_run(&self, payer: Payer, bytes: u64) {
        self.groups_if_made().inspect(|grouped| grouped.uncharge(payer, bytes));
    }

    /// Returns how an allocation beyond a limit is charged.
    pub(crate) fn how(&self) -> OnLimit {
        // A callback of reclaim may exceed a limit, since it frees memory.
        let refuse = self.core_if_open().is_some_and(|core| core.settings.refuses()) && !is_calling();
        if refuse { OnLimit::Refuse } else { OnLimit::Overcharge }
    }

    /// Finds the classes of which caches hold charged objects whose owners satisfy `is_wanted`.
    /// Moves all objects of these classes from stacks and barns to their slabs.
    ///
    /// A thread skips a spaced flush after a recent flush. So threads beyond their limits spend at
    /// most a ninth of their time on flushes.
    pub(crate) fn flush_paid(&self, is_wanted: &dyn Fn(u64) -> bool, pace: FlushPace) {
        let Some(core) = self.core_if_open().filter(|core| core.objects.has_owned()) else { return };
        let (platform, objects) = (&core.objects.platform, &core.objects);
        let inside = self.gate.enter(platform.cpu());
        // A thread that flushes at once waits for a flush that is under way:
        //
        // | thread A | thread B |
        // |---|---|
        // | 1. takes a sheaf of the group's objects out of a barn | |
        // | | 2. finds no cache with objects of the group |
        // | | 3. its charge is refused |
        // | 4. puts the objects into their slabs | |
        let at_once = pace == FlushPace::AtOnce;
        let flushing = if at_once { Some(core.flushing.lock(&inside)) } else { core.flushing.try_lock(&inside) };
        let (Some(mut next), began) = (flushing, platform.now()) else { return };
        if !at_once && began < *next {
            return;
        }
        let mut classes = [false; CLASSES];
        objects.each_paid(&mut |class, owner, _| classes[class.index()] |= is_wanted(owner));
        if classes.contains(&true) {
            self.flush_classes(&inside, core, |class| classes[class.index()]);
        }
        let ended = platform.now();
        *next = ended + (ended - began) * 8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Hooks;
    use crate::options::Options;
    use neap_groups::{Bound, Event};
    use neap_testing::virtual_platform::Virtual;
    use std::boxed::Box;
    use std::vec::Vec;

    const MAX: u64 = 4 << 20;

    /// Runs `test` with a group at its limit, all of whose charges are cached objects, shortly
    /// after caches were flushed.
    fn with_full_group(test: impl FnOnce(&Mm<Virtual>, &Grouped<'_, Virtual>, GroupId)) {
        let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        let options =
            Options { stat: false, background: crate::options::Background::Never, refuse: true, ..Options::DEFAULT };
        // SAFETY: the manager stays in its box until it is closed.
        unsafe { mm.open(Virtual::new(4096, 2), &options) }.unwrap();
        let groups = mm.groups().unwrap();
        let group = groups.create(GroupId::ROOT, "full").unwrap();
        groups.set_bound(group, Bound::Max, MAX).unwrap();
        Virtual::run_on(0);
        let before = mm.enter(Some(group));
        let blocks: Vec<*mut u8> = (0..MAX / 1024).map(|_| mm.allocate(1024)).collect();
        mm.leave(before);
        assert!(blocks.iter().all(|block| !block.is_null()) && mm.used_and_charged(group) == (MAX, MAX));
        Virtual::run_on(1);
        // SAFETY: the blocks are this test's.
        blocks.into_iter().for_each(|block| unsafe { mm.free(block) });
        assert_eq!(mm.used_and_charged(group), (0, MAX));
        *mm.core().unwrap().flushing.lock(&mm.gate.enter(0)) = u64::MAX;
        test(&mm, &groups, group);
        mm.verify(0).unwrap();
        // SAFETY: all blocks were freed, and this thread, in no group now, is the only user.
        unsafe { mm.close() };
    }

    #[test]
    fn migrated_thread_updates_the_node_of_its_payer() {
        let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        let options = Options { stat: false, background: crate::options::Background::Never, ..Options::DEFAULT };
        // SAFETY: the manager stays in its box until it is closed.
        unsafe { mm.open(Virtual::new(4096, 2).with_nodes(&[0, 1]), &options) }.unwrap();
        let group = mm.groups().unwrap().create(GroupId::ROOT, "moves").unwrap();
        for (from, to) in [(0, 1), (1, 0)] {
            Virtual::run_on(from);
            let before = mm.enter(Some(group));
            let node = || Payer::from_bits(entered() as u64).node();
            assert_eq!((mm.group_of_thread(), node()), (Some(group), from));
            Virtual::run_on(to);
            let block = mm.allocate(64);
            assert_eq!((mm.group_of_thread(), node()), (Some(group), to));
            // SAFETY: the block is this test's.
            unsafe { mm.free(block) };
            mm.leave(before);
        }
        Virtual::run_on(0);
        assert_eq!((mm.group_of_thread(), entered()), (None, 0));
        mm.verify(0).unwrap();
        // SAFETY: all blocks were freed, and this thread, in no group now, is the only user.
        unsafe { mm.close() };
    }

    #[test]
    fn a_thread_in_one_managers_group_is_in_no_other_managers() {
        let managers =
            [(); 3].map(|()| Box::new(Mm::<Virtual>::new(Hooks { open: |_| (), spawn: None, ticked: None })));
        managers.iter().for_each(|mm| mm.make_tag());
        for mm in &managers {
            let before = mm.enter(Some(GroupId::ROOT));
            for other in &managers {
                let is_in = other.group_of_thread();
                assert_eq!(is_in, core::ptr::eq(&raw const **mm, &raw const **other).then_some(GroupId::ROOT));
            }
            mm.leave(before);
        }
        let unopened = Mm::<Virtual>::new(Hooks { open: |_| (), spawn: None, ticked: None });
        assert_eq!(unopened.group_of_thread(), None);
    }

    impl Mm<Virtual> {
        fn used_and_charged(&self, group: GroupId) -> (u64, u64) {
            let groups = self.groups().unwrap();
            (groups.used(group).unwrap(), groups.info(group).unwrap().charged)
        }
    }

    #[test]
    fn charge_at_max_with_only_cached_memory_succeeds() {
        with_full_group(|mm, groups, group| {
            assert_eq!(groups.charge(group.payer(Kind::ByHand, 0), MAX, OnLimit::Refuse), Ok(()));
            assert_eq!(mm.used_and_charged(group), (MAX, MAX));
            groups.uncharge(group.payer(Kind::ByHand, 0), MAX);
        });
    }

    #[test]
    fn allocation_at_max_with_only_cached_memory_succeeds() {
        with_full_group(|mm, groups, group| {
            for size in [2048, 4096, 40_000] {
                let before = mm.enter(Some(group));
                let block = mm.allocate(size);
                assert!(!block.is_null(), "{size} bytes");
                mm.leave(before);
                // SAFETY: the block is this test's.
                unsafe { mm.free(block) };
                *mm.core().unwrap().flushing.lock(&mm.gate.enter(0)) = u64::MAX;
            }
            assert_eq!(groups.info(group).unwrap().events[Event::Refused as usize], 0);
        });
    }

    #[test]
    fn cached_memory_above_high_does_not_throttle_charges() {
        with_full_group(|mm, groups, group| {
            let (payer, clock) = (group.payer(Kind::ByHand, 0), &mm.core().unwrap().objects.platform);
            let highs = || groups.info(group).unwrap().events[Event::High as usize];
            groups.set_bound(group, Bound::High, MAX / 2).unwrap();
            groups.set_bound(group, Bound::Max, 4 * MAX).unwrap();
            let begun = clock.now();
            assert_eq!(groups.charge(payer, MAX / 8, OnLimit::Overcharge), Ok(()));
            assert_eq!((clock.now() - begun, highs(), mm.used_and_charged(group).0), (0, 0, MAX / 8));
            assert_eq!(groups.charge(payer, MAX, OnLimit::Refuse), Ok(()));
            assert!(clock.now() > begun && highs() == 1, "what is used does");
            assert_eq!(groups.info(group).unwrap().stalled_us, (clock.now() - begun) / 1000);
            groups.uncharge(payer, MAX / 8 + MAX);
        });
    }

    #[test]
    fn repeated_overcharges_flush_caches_at_limited_rate() {
        with_full_group(|mm, groups, group| {
            let payer = group.payer(Kind::ByHand, 0);
            assert_eq!(groups.charge(payer, 1, OnLimit::Overcharge), Ok(()));
            assert_eq!(mm.used_and_charged(group), (1, MAX + 1), "that was a moment ago");
            *mm.core().unwrap().flushing.lock(&mm.gate.enter(0)) = 0;
            assert_eq!(groups.charge(payer, 1, OnLimit::Overcharge), Ok(()));
            assert_eq!(mm.used_and_charged(group).0, 2);
            assert!(groups.info(group).unwrap().charged < MAX / 2, "it is worth it again");
            groups.uncharge(payer, 2);
        });
    }
}
