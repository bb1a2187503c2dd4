//! The groups of a manager. The first use makes them. Threads use them inside the fork gate. A tick
//! does their deferred work.
//!
//! If no groups were made, a tick only checks that. This module has no lock.

use crate::mm::{Core, Mm};
use crate::options::ThreadGroups;
use crate::percpu::per_cpu_data::Source;
use crate::state::reclaim::Manner;
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_groups::protection::Protection;
use neap_groups::{
    Bound, ChargeAsync, Event, FlushPace, GroupCount, GroupError, GroupId, GroupSlot, Groups, Info, Kind, Listener,
    Name, NotSubscribed, OnLimit, Payer, Reclaimer, Refusal, Subscription, TICK_INTERVAL_NS,
};
use neap_objects::charged::GateSide;
use neap_objects::size_class::Class;
use neap_objects::verify::Finding;
use neap_os::{clock, stack};
use neap_percpu::{Host, Owner, Wait};
use neap_reclaim::is_calling;
use neap_reclaim::lru::Site;

/// The groups of a manager, for [`groups`](crate::groups).
#[derive(Debug)]
pub struct Grouped<'m, P: Platform> {
    source: Source<'m, P>,
    groups: &'m Groups,
}

/// Returns how many bytes neap charges for an object.
pub(crate) fn price(class: Class) -> u64 {
    class.size() as u64
}

impl<P: Platform> Clone for Grouped<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for Grouped<'_, P> {}

impl<P: Platform> Reclaimer for Source<'_, P> {
    fn each_kept(&self, _: &Inside<'_>, each: &mut dyn FnMut(Payer, u64)) {
        self.core().objects.each_paid(&mut |class, owner, objects| {
            each(Payer::from_bits(owner), price(class) * u64::from(objects));
        });
    }

    fn flush(&self, wanted: &dyn Fn(Payer) -> bool, pace: FlushPace) {
        self.mm().flush_paid(&|owner| wanted(Payer::from_bits(owner)), pace);
    }

    fn reclaim(&self, group: GroupId, bytes: u64) -> u64 {
        self.core().reclaim_for_charge(self.mm(), group, bytes, self.manner)
    }

    fn offline(&self, inside: &Inside<'_>, groups: &Groups, child: GroupSlot, parent: GroupSlot) {
        // The lists come first. After the next step, reclaim asks shrinkers for objects of the
        // parent.
        Site { host: self, groups, lists: &self.core().lists }.offline(inside, child, parent);
        if let Some(reclaim) = self.core().reclaim.get() {
            reclaim.shrinkers.offline(inside, self, child.slot, parent.slot);
        }
    }

    fn request_tick(&self, _: &Inside<'_>) {
        self.core().request_tick();
    }

    fn ask_soon(&self) {
        self.core().call_servers(self.mm(), self.manner);
    }
}

/// Uncharges objects that were freed into their slabs.
///
/// # Safety
/// `mm` is the address of the manager of the objects, an `Mm<P>`. The manager does not move, and
/// outlives the call.
unsafe fn repay<P: Platform>(mm: *const (), owner: u64, class: Class, objects: u32, side: GateSide) {
    // SAFETY: `mm` is the address of the objects' manager, an `Mm<P>`, which outlives this call
    // (the caller's promise).
    let Some(Grouped { source, groups }) = unsafe { &*mm.cast::<Mm<P>>() }.groups_if_made() else { return };
    let (payer, bytes) = (Payer::from_bits(owner), price(class) * u64::from(objects));
    match side {
        GateSide::Inside => Inside::assume(|inside| groups.uncharge_inside(inside, &source, payer, bytes)),
        GateSide::Outside => groups.uncharge(&source, payer, bytes),
    }
}

impl<P: Platform> Mm<P> {
    /// Returns the manager's groups. Makes them if need be.
    ///
    /// # Errors
    /// [`GroupError::NoMemory`] if there is no memory for the groups.
    pub fn groups(&self) -> Result<Grouped<'_, P>, GroupError> {
        let make = || stack::apart(|| self.make_groups()).unwrap_or(Err(GroupError::NoMemory));
        self.groups_if_made().map_or_else(make, Ok)
    }

    #[cold]
    fn make_groups(&self) -> Result<Grouped<'_, P>, GroupError> {
        let source = self.per_cpu(Wait::Long)?;
        let core = self.core().ok_or(GroupError::NoMemory)?;
        // SAFETY: `repay` may be called from any thread. It gets the address of this manager, to
        // which the objects belong. An open manager does not move, and outlives its objects.
        unsafe { core.objects.uncharger.open(repay::<P>, core::ptr::from_ref(self).cast()) };
        // This runs outside the gate, since `Groups::open` enters it.
        let mut made = Some(Groups::open(&source)?);
        let groups = source.inside(|_| core.groups.get_or_make(|| made.take().ok_or(GroupError::NoMemory)));
        if let Some(second) = made {
            // SAFETY: another thread published its groups first, so no other thread has seen these.
            // `source` has the platform that they were opened with.
            unsafe { second.close(&source) };
        }
        // This publishes in the page of numbers that there are groups. Until then, `neap stat
        // --groups` sends this process no request.
        self.ticked();
        Ok(Grouped { source, groups: groups? })
    }

    /// Returns the manager's groups, if they were made.
    #[inline]
    pub fn groups_if_made(&self) -> Option<Grouped<'_, P>> {
        let groups = self.core_if_open()?.groups.get()?;
        Some(Grouped { source: self.per_cpu_if_made()?, groups })
    }

    /// Charges bytes from this CPU's stock ([`Groups::take`]). Returns `false`, and charges
    /// nothing, if there are no groups or the stock does not suffice.
    #[inline(always)]
    pub(crate) fn take_stocked(&self, payer: Payer, bytes: u64) -> bool {
        self.stocks().is_some_and(|(platform, groups)| groups.take(platform, payer, bytes))
    }

    /// Uncharges bytes into this CPU's stock ([`Groups::give`]). Returns `false`, and uncharges
    /// nothing, if there are no groups or the stock has no room.
    #[inline(always)]
    pub(crate) fn give_to_stock(&self, payer: Payer, bytes: u64) -> bool {
        self.stocks().is_some_and(|(platform, groups)| groups.give(platform, payer, bytes))
    }

    /// Returns the parts that stocks need. They are fewer than those of [`Grouped`]. So a fast path
    /// does not build a [`Grouped`] in memory.
    #[inline(always)]
    fn stocks(&self) -> Option<(&P, &Groups)> {
        let core = self.core_if_open()?;
        Some((&core.objects.platform, core.groups.get()?))
    }

    /// Calls listeners ([`Groups::deliver`]). The caller is a thread that ticks, and holds no lock.
    pub(crate) fn deliver(&self) {
        self.groups_if_made().inspect(|grouped| grouped.groups.deliver(&grouped.source));
    }

    /// Counts the event that the container's level or limit changed, so that a tick calls its
    /// listeners.
    pub(crate) fn container_changed(&self) {
        self.groups_if_made()
            .inspect(|grouped| grouped.groups.happened(&grouped.source, GroupId::ROOT, Event::Container));
    }

    /// Verifies that charges add up. If `in_hands` is 0, also verifies that they equal the
    /// allocated bytes. `in_hands` is the number of allocations that threads may be working on. The
    /// caller has closed the gate, and no thread is inside.
    pub(crate) fn verify_groups(&self, in_hands: u64) -> Result<(), Finding> {
        let (Some(Grouped { source, groups }), Some(core)) = (self.groups_if_made(), self.core_if_open()) else {
            return Ok(());
        };
        groups.verify(&source)?;
        if in_hands > 0 {
            return Ok(());
        }
        // This thread has closed the gate, so it may enter.
        let (inside, mut objects, mut runs) = (source.enter(), 0, 0);
        core.objects.each_accounted(&mut |class, memory, _| match class {
            Class::NONE => runs += core.usable_size(memory, "verify") as u64,
            class => objects += price(class),
        });
        runs += core.guard.paid.load(Ordering::Relaxed);
        for (what, kind, bytes) in [
            ("bytes of objects in groups", Kind::Objects, objects),
            ("bytes of runs in groups", Kind::Pages, runs),
            ("bytes of per-CPU data in groups", Kind::PerCpu, source.data().paid_bytes()),
        ] {
            Finding::unless_equal(what, Class::NONE, 0, bytes, groups.used_of_kind(&inside, &source, kind))?;
        }
        Ok(())
    }
}

impl<P: Platform> Core<P> {
    /// Does the groups' part of a tick. Returns the nanoseconds until groups need the next tick.
    /// Returns `None` if they need none.
    pub(crate) fn tick_groups(&self, mm: &Mm<P>) -> Option<u64> {
        let grouped = mm.groups_if_made()?;
        if self.options.groups == ThreadGroups::ByThread {
            // A separate stack is needed, since the lists of the parent get the items and may grow.
            let _ = stack::apart(|| grouped.delete_groups_of_ended_threads());
        }
        let next = grouped.groups.tick(&grouped.source);
        // This frees the remains of deleted groups in the lists. If no stack can be mapped the next
        // tick does it.
        let tick_lists = |site: Site<'_, _>| stack::apart(|| site.tick()).unwrap_or(true);
        let is_left = mm.lists_if_made().is_some_and(|listed| tick_lists(listed.site()));
        next.into_iter().chain(is_left.then_some(TICK_INTERVAL_NS)).min()
    }
}

impl<'m, P: Platform> Grouped<'m, P> {
    /// Returns the platform.
    pub fn platform(&self) -> &P {
        self.source.platform()
    }

    /// Makes a group ([`Groups::create`]).
    ///
    /// # Errors
    /// Those of [`Groups::create`].
    pub fn create(&self, parent: GroupId, name: &str) -> Result<GroupId, GroupError> {
        self.groups.create(&self.source, parent, name)
    }

    /// Finds a group ([`Groups::find`]).
    ///
    /// # Errors
    /// Those of [`Groups::find`].
    pub fn find(&self, from: GroupId, path: &str) -> Result<GroupId, GroupError> {
        self.groups.find(&self.source, from, path)
    }

    /// Returns the group of a name directly below `parent`. Makes it if need be.
    ///
    /// # Errors
    /// Those of [`Groups::create`].
    pub fn find_or_create(&self, parent: GroupId, name: &str) -> Result<GroupId, GroupError> {
        match self.find(parent, name) {
            Err(GroupError::NoSuchGroup) => match self.create(parent, name) {
                // Another thread has just made it.
                Err(GroupError::Exists) => self.find(parent, name),
                answer => answer,
            },
            answer => answer,
        }
    }

    /// Makes an owner of per-CPU data that is charged to a group. The caller must close it.
    ///
    /// # Errors
    /// * [`GroupError::NoSuchGroup`] if the group is deleted.
    /// * [`GroupError::Full`] if there is no room for another owner.
    /// * [`GroupError::NoMemory`] if the system refuses memory for tables.
    pub fn open_owner(&self, id: GroupId) -> Result<Owner, GroupError> {
        if !self.groups.exists(id) {
            return Err(GroupError::NoSuchGroup);
        }
        Ok(self.source.open_owner_in(id)?)
    }

    /// Deletes a group ([`Groups::delete`]).
    ///
    /// # Errors
    /// Those of [`Groups::delete`].
    pub fn delete(&self, id: GroupId) -> Result<(), GroupError> {
        self.groups.delete(&self.source, id)?;
        self.source.after(Wait::Long);
        // Ticks free the remains of the group. If no thread ticks, this call frees as much of them
        // as possible.
        if !self.source.has_thread() {
            let lists = &self.source.core().lists;
            let site = Site { host: &self.source, groups: self.groups, lists };
            self.groups.end_deleted(&self.source);
            site.end_deleted();
        }
        Ok(())
    }

    /// Sets a bound ([`Groups::set_bound`]).
    ///
    /// # Errors
    /// Those of [`Groups::set_bound`].
    pub fn set_bound(&self, id: GroupId, bound: Bound, bytes: u64) -> Result<u64, GroupError> {
        self.groups.set_bound(&self.source, id, bound, bytes)
    }

    /// Calls [`Groups::exists`].
    pub fn exists(&self, id: GroupId) -> bool {
        self.groups.exists(id)
    }

    /// Returns the parent and name of a group ([`Groups::place`]).
    ///
    /// # Errors
    /// Those of [`Groups::place`].
    pub fn place(&self, id: GroupId) -> Result<(Option<GroupId>, Name), GroupError> {
        self.groups.place(&self.source, id)
    }

    /// Calls [`Groups::info`].
    ///
    /// # Errors
    /// Those of [`Groups::info`].
    pub fn info(&self, id: GroupId) -> Result<Info, GroupError> {
        self.groups.info(&self.source, id)
    }

    /// Calls [`Groups::reset_peak`].
    ///
    /// # Errors
    /// Those of [`Groups::reset_peak`].
    pub fn reset_peak(&self, id: GroupId) -> Result<u64, GroupError> {
        self.groups.reset_peak(&self.source, id)
    }

    /// Calls [`Groups::charged`].
    ///
    /// # Errors
    /// Those of [`Groups::charged`].
    pub fn charged(&self, id: GroupId, kind: Kind, node: usize) -> Result<u64, GroupError> {
        self.groups.charged(&self.source, id, kind, node)
    }

    /// Calls [`Groups::used`].
    ///
    /// # Errors
    /// Those of [`Groups::used`].
    pub fn used(&self, id: GroupId) -> Result<u64, GroupError> {
        self.groups.used(&self.source, id)
    }

    /// Calls [`Groups::protection`].
    ///
    /// # Errors
    /// Those of [`Groups::protection`].
    pub fn protection(&self, id: GroupId) -> Result<Protection, GroupError> {
        self.groups.protection(&self.source, id)
    }

    /// Calls [`Groups::next_child`].
    pub fn next_child(&self, parent: GroupId, after: Option<GroupId>) -> Option<GroupId> {
        self.groups.next_child(&self.source, parent, after)
    }

    /// Calls [`Groups::count`].
    pub fn count(&self) -> GroupCount {
        self.groups.count(&self.source)
    }

    pub(crate) fn source(&self) -> &Source<'m, P> {
        &self.source
    }

    pub(crate) fn groups(&self) -> &'m Groups {
        self.groups
    }

    /// Returns a handle of the groups with which a charge at a limit may call shrinkers in the
    /// charging thread. The charge calls only shrinkers that allow it.
    pub fn inline(&self) -> Grouped<'m, P> {
        Grouped { source: self.source.with(Manner::Inline), ..*self }
    }

    /// Returns a handle of the groups for threads that may hold a lock of the C library. Calls with
    /// it make no thread.
    pub(crate) fn quietly(&self) -> Grouped<'m, P> {
        Grouped { source: self.source.with(Manner::Quiet), ..*self }
    }

    /// Calls [`Groups::drain`].
    pub fn drain(&self, id: GroupId) -> u32 {
        self.groups.drain(&self.source, id)
    }

    /// Returns the bytes of memory that groups use, besides their per-CPU data.
    pub fn bytes(&self) -> usize {
        self.groups.bytes(self.platform())
    }

    /// Returns how many fences drains of stocks have made so far.
    pub fn fences(&self) -> u32 {
        self.groups.fences()
    }

    /// Charges bytes, and then delays the caller for the time that [`Groups::charge`] returns.
    ///
    /// # Errors
    /// Those of [`Groups::charge`].
    #[inline]
    pub fn charge(&self, payer: Payer, bytes: u64, on_limit: OnLimit) -> Result<(), Refusal> {
        // A callback of a shrinker may use the reserve. It may have to make a smaller copy before
        // it frees the original.
        let on_limit = if on_limit == OnLimit::Refuse && is_calling() { OnLimit::Reserve } else { on_limit };
        match self.groups.charge(&self.source, payer, bytes, on_limit) {
            Ok(0) => Ok(()),
            Ok(delay) => {
                self.hold_up(payer, delay);
                Ok(())
            }
            Err(refusal) => Err(refusal),
        }
    }

    /// Delays a thread that has charged a group above its `high`, for `delay` nanoseconds or until
    /// the group is below it again.
    #[cold]
    fn hold_up(&self, payer: Payer, delay: u64) {
        // A callback of a shrinker is not delayed, since the memory that it frees brings the group
        // below its `high`.
        if is_calling() {
            return;
        }
        self.groups.stalled(&self.source, payer, || {
            let begun = clock::precise();
            if !self.source.core().relieve(self.source.mm(), payer.id(), delay) {
                self.platform().sleep(delay.saturating_sub(clock::precise() - begun));
            }
        });
    }

    /// Calls [`Groups::take`].
    #[inline(always)]
    pub fn take(&self, payer: Payer, bytes: u64) -> bool {
        self.groups.take(self.platform(), payer, bytes)
    }

    /// Returns the group of an id, or the heir if the group is gone.
    pub fn heir(&self, id: GroupId) -> Option<GroupId> {
        self.source.inside(|inside| self.groups.heir(inside, id))
    }

    /// Returns the node that memory for this thread comes from.
    #[inline]
    pub(crate) fn node(&self) -> usize {
        self.source.node()
    }

    /// Charges bytes, and waits for room ([`Groups::charge_or_wait`]). Then delays the caller for
    /// the time that [`Groups::charge_or_wait`] returns, but not beyond the deadline. A callback of
    /// a shrinker charges without waiting.
    ///
    /// # Errors
    /// Those of [`Groups::charge_or_wait`].
    pub fn charge_or_wait(&self, payer: Payer, bytes: u64, deadline: u64) -> Result<(), Refusal> {
        // Reclaim in another thread waits for this callback, so it must not wait for room.
        if is_calling() {
            return self.charge(payer, bytes, OnLimit::Refuse);
        }
        let delay = self.groups.charge_or_wait(&self.source, payer, bytes, deadline)?;
        let delay = delay.min(deadline.saturating_sub(self.platform().precise()));
        if delay > 0 {
            self.hold_up(payer, delay);
        }
        Ok(())
    }

    /// Calls [`Groups::charge_async`]. Makes neap's thread if need be, since the charge needs
    /// ticks.
    pub fn charge_async(&self, payer: Payer, bytes: u64, deadline: u64) -> ChargeAsync<'m, Source<'m, P>> {
        self.source.ensure_thread();
        // A poll does not wait.
        self.groups.charge_async(self.source.with(Manner::Post), payer, bytes, deadline)
    }

    /// Calls [`Groups::subscribe`]. Makes neap's thread if need be, since a tick calls the
    /// listener.
    ///
    /// # Errors
    /// Those of [`Groups::subscribe`].
    pub fn subscribe(
        &self,
        group: GroupId,
        events: &[Event],
        listener: Listener,
    ) -> Result<Subscription, NotSubscribed> {
        self.source.ensure_thread();
        let subscription = self.groups.subscribe(&self.source, group, events, listener)?;
        if group == GroupId::ROOT && events.contains(&Event::Container) {
            // A tick tells the listener the present state. The event also wakes neap's thread,
            // which makes looks from now on.
            self.groups.happened(&self.source, GroupId::ROOT, Event::Container);
        }
        Ok(subscription)
    }

    /// Calls [`Groups::unsubscribe`].
    pub fn unsubscribe(&self, subscription: Subscription) -> bool {
        self.groups.unsubscribe(&self.source, subscription)
    }

    /// Calls [`Groups::uncharge`].
    #[inline]
    pub fn uncharge(&self, payer: Payer, bytes: u64) {
        self.groups.uncharge(&self.source, payer, bytes);
    }

    /// Frees the groups.
    ///
    /// # Safety
    /// Those of [`Groups::close`].
    pub(crate) unsafe fn close(&self) {
        // SAFETY: no thread uses the groups any more (the caller's promise). `source` has the
        // platform that they were opened with.
        unsafe { self.groups.close(&self.source) };
    }

    /// Forgets the threads of the parent, in a forked child.
    ///
    /// # Safety
    /// Those of [`Groups::forget_others`].
    pub(crate) unsafe fn forget_others(&self) {
        // SAFETY: this is the only thread of a forked child. It does not rely on groups that it
        // found as a reader before the fork (the caller's promise).
        unsafe { self.groups.forget_others(&self.source) };
    }
}
