//! The groups of a manager: made when they are first asked for, kept from forks by the gate, ticked by maintenance.
//!
//! Sits between [`Mm`] and `neap-groups`. What is not asked for costs nothing but one load in a tick. No lock of its own.

use crate::in_group::price;
use crate::mm::{Core, Mm};
use crate::options::ThreadGroups;
use crate::per_cpu_data::Source;
use crate::reclaimers::Manner;
use neap_base::Platform;
use neap_groups::{
    Bound, ChargeAsync, Denied, Event, GroupCount, GroupId, Groups, How, INTERVAL, Info, Kind, Listener, Name,
    NotSubscribed, Payer, Reclaimer, Refusal, Seat, Subscription,
};
use neap_objects::size_class::Class;
use neap_objects::verify::Finding;
use neap_os::{clock, stack};
use neap_percpu::{Host, Owner, Wait};
use neap_reclaim::is_calling;
use neap_reclaim::lru::Site;

/// The groups of a manager: what [`groups`](crate::groups) stands on.
#[derive(Debug)]
pub struct Grouped<'m, P: Platform> {
    source: Source<'m, P>,
    groups: &'m Groups,
}

impl<P: Platform> Clone for Grouped<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for Grouped<'_, P> {}

impl<P: Platform> Reclaimer for Source<'_, P> {
    fn each_kept(&self, each: &mut dyn FnMut(Payer, u64)) {
        self.core().objects.each_paid(&mut |class, owner, objects| {
            each(Payer::from_bits(owner), price(class) * u64::from(objects));
        });
    }

    fn flush(&self, wanted: &dyn Fn(Payer) -> bool, at_once: bool) {
        self.mm().flush_paid(&|owner| wanted(Payer::from_bits(owner)), at_once);
    }

    fn reclaim(&self, group: GroupId, bytes: u64) -> u64 {
        self.core().reclaim_for_charge(self.mm(), group, bytes, self.manner)
    }

    fn offline(&self, groups: &Groups, child: Seat, parent: Seat) {
        // First the lists: what shrinkers are asked for is the parent's then.
        Site { host: self, groups, lists: &self.core().lists }.offline(child, parent);
        if let Some(reclaim) = self.core().reclaim.get() {
            reclaim.shrinkers.offline(self, child.slot, parent.slot);
        }
    }

    fn come_soon(&self) {
        self.core().come_soon();
    }

    fn ask_soon(&self) {
        self.core().call_servers(self.mm(), self.manner != Manner::Quiet);
    }
}

/// Takes back what was charged for objects that nobody has any more.
///
/// # Safety
/// `mm` is the manager whose objects they are.
unsafe fn repay<P: Platform>(mm: *const (), owner: u64, class: Class, objects: u32, inside: bool) {
    // SAFETY: as the caller promises.
    let Some(Grouped { source, groups }) = unsafe { &*mm.cast::<Mm<P>>() }.groups_if_made() else { return };
    let (payer, bytes) = (Payer::from_bits(owner), price(class) * u64::from(objects));
    if inside { groups.uncharge_inside(&source, payer, bytes) } else { groups.uncharge(&source, payer, bytes) }
}

impl<P: Platform> Mm<P> {
    /// The manager's groups, which are made where there are none yet.
    ///
    /// # Errors
    /// [`Denied::NoMemory`].
    pub fn groups(&self) -> Result<Grouped<'_, P>, Denied> {
        let make = || stack::apart(|| self.make_groups()).unwrap_or(Err(Denied::NoMemory));
        self.groups_if_made().map_or_else(make, Ok)
    }

    #[cold]
    fn make_groups(&self) -> Result<Grouped<'_, P>, Denied> {
        let source = self.per_cpu(Wait::Long)?;
        let core = self.core().ok_or(Denied::NoMemory)?;
        // SAFETY: a manager that is open does not move, and outlives its objects.
        unsafe { core.objects.payback.open(repay::<P>, core::ptr::from_ref(self).cast()) };
        // Not inside the gate, which making them passes.
        let mut made = Some(Groups::open(&source)?);
        let groups = source.inside(|| core.groups.get_or_make(|| made.take().ok_or(Denied::NoMemory)));
        if let Some(second) = made {
            // SAFETY: somebody else was first, and nobody has seen these.
            unsafe { second.close(&source) };
        }
        // Who looks at the numbers and finds no groups does not ask further.
        self.ticked();
        Ok(Grouped { source, groups: groups? })
    }

    /// The manager's groups, if anybody has asked for them before.
    #[inline]
    pub fn groups_if_made(&self) -> Option<Grouped<'_, P>> {
        let groups = self.core_if_open()?.groups.get()?;
        Some(Grouped { source: self.per_cpu_if_made()?, groups })
    }

    /// [`Groups::take`], of the manager's groups, if it has any.
    #[inline(always)]
    pub(crate) fn take_stocked(&self, payer: Payer, bytes: u64) -> bool {
        self.stocks().is_some_and(|(platform, groups)| groups.take(platform, payer, bytes))
    }

    /// [`Groups::give`], to the manager's groups, if it has any.
    #[inline(always)]
    pub(crate) fn give_to_stock(&self, payer: Payer, bytes: u64) -> bool {
        self.stocks().is_some_and(|(platform, groups)| groups.give(platform, payer, bytes))
    }

    /// What stocks want: less than [`Grouped`] is, so nothing of it is written for a call that may be needed.
    #[inline(always)]
    fn stocks(&self) -> Option<(&P, &Groups)> {
        let core = self.core_if_open()?;
        Some((&core.objects.platform, core.groups.get()?))
    }

    /// [`Groups::deliver`], by whoever ticks and holds nothing.
    pub(crate) fn deliver(&self) {
        self.groups_if_made().inspect(|grouped| grouped.groups.deliver(&grouped.source));
    }

    /// The proof that they add up, and, unless somebody may have an allocation in hands, that what is charged is what is allocated. The gate is
    /// closed, and nobody inside.
    pub(crate) fn verify_groups(&self, in_hands: u64) -> Result<(), Finding> {
        let (Some(Grouped { source, groups }), Some(core)) = (self.groups_if_made(), self.core_if_open()) else {
            return Ok(());
        };
        groups.verify(&source).map_err(|finding| {
            let neap_groups::Finding { what, group, expected, found } = finding;
            Finding { what, class: Class::NONE, at: group.to_bits() as usize, expected, found }
        })?;
        if in_hands > 0 {
            return Ok(());
        }
        let (mut objects, mut runs) = (0, 0);
        core.objects.each_accounted(&mut |class, memory, _| match class {
            Class::NONE => runs += core.usable_size(memory, "verify") as u64,
            class => objects += price(class),
        });
        for (what, kind, bytes) in [
            ("bytes of objects in groups", Kind::Objects, objects),
            ("bytes of runs in groups", Kind::Pages, runs),
            ("bytes of per-CPU data in groups", Kind::PerCpu, source.data().paid_bytes()),
        ] {
            Finding::unless_equal(what, Class::NONE, 0, bytes, groups.used_of_kind(&source, kind))?;
        }
        Ok(())
    }
}

impl<P: Platform> Core<P> {
    /// What groups have to do in a tick. Not inside the gate.
    pub(crate) fn tick_groups(&self, mm: &Mm<P>) -> Option<u64> {
        let grouped = mm.groups_if_made()?;
        if self.options.groups == ThreadGroups::ByThread {
            // Their items go to their parents' lists, which may grow.
            let _ = stack::apart(|| grouped.delete_groups_of_ended_threads());
        }
        let next = grouped.groups.tick(&grouped.source);
        // It frees what deleted groups have left. Without a stack that is for the next tick.
        let tick_lists = |site: Site<'_, _>| stack::apart(|| site.tick()).unwrap_or(true);
        let is_left = mm.lists_if_made().is_some_and(|listed| tick_lists(listed.site()));
        next.into_iter().chain(is_left.then_some(INTERVAL)).min()
    }
}

impl<'m, P: Platform> Grouped<'m, P> {
    /// The machine.
    pub fn platform(&self) -> &P {
        self.source.platform()
    }

    /// [`Groups::create`].
    ///
    /// # Errors
    /// As there.
    pub fn create(&self, parent: GroupId, name: &str) -> Result<GroupId, Denied> {
        self.groups.create(&self.source, parent, name)
    }

    /// [`Groups::find`].
    ///
    /// # Errors
    /// As there.
    pub fn find(&self, from: GroupId, path: &str) -> Result<GroupId, Denied> {
        self.groups.find(&self.source, from, path)
    }

    /// The group of a name right below another, which is made where it is not there.
    ///
    /// # Errors
    /// As for [`Groups::create`].
    pub fn find_or_create(&self, parent: GroupId, name: &str) -> Result<GroupId, Denied> {
        match self.find(parent, name) {
            Err(Denied::NoSuchGroup) => match self.create(parent, name) {
                // By somebody else, a moment ago.
                Err(Denied::Exists) => self.find(parent, name),
                answer => answer,
            },
            answer => answer,
        }
    }

    /// An owner of per-CPU data that is charged to a group. Its own end is the caller's to bring about.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`]; [`Denied::Full`] with as many owners as there can be; [`Denied::NoMemory`] where the system refuses tables for more.
    pub fn open_owner(&self, id: GroupId) -> Result<Owner, Denied> {
        if !self.groups.is_there(id) {
            return Err(Denied::NoSuchGroup);
        }
        Ok(self.source.open_owner_in(id)?)
    }

    /// [`Groups::delete`].
    ///
    /// # Errors
    /// As there.
    pub fn delete(&self, id: GroupId) -> Result<(), Denied> {
        self.groups.delete(&self.source, id)?;
        self.source.after(false);
        // What is left of it is ended by ticks, and as far as that goes here where no thread ticks.
        if !self.source.has_thread() {
            let lists = &self.source.core().lists;
            let site = Site { host: &self.source, groups: self.groups, lists };
            self.groups.end_deleted(&self.source);
            site.end_deleted();
        }
        Ok(())
    }

    /// [`Groups::set_bound`].
    ///
    /// # Errors
    /// As there.
    pub fn set_bound(&self, id: GroupId, bound: Bound, bytes: u64) -> Result<u64, Denied> {
        self.groups.set_bound(&self.source, id, bound, bytes)
    }

    /// [`Groups::is_there`].
    pub fn is_there(&self, id: GroupId) -> bool {
        self.groups.is_there(id)
    }

    /// [`Groups::place`].
    ///
    /// # Errors
    /// As there.
    pub fn place(&self, id: GroupId) -> Result<(Option<GroupId>, Name), Denied> {
        self.groups.place(&self.source, id)
    }

    /// [`Groups::info`].
    ///
    /// # Errors
    /// As there.
    pub fn info(&self, id: GroupId) -> Result<Info, Denied> {
        self.groups.info(&self.source, id)
    }

    /// [`Groups::reset_peak`].
    ///
    /// # Errors
    /// As there.
    pub fn reset_peak(&self, id: GroupId) -> Result<u64, Denied> {
        self.groups.reset_peak(&self.source, id)
    }

    /// [`Groups::charged`].
    ///
    /// # Errors
    /// As there.
    pub fn charged(&self, id: GroupId, kind: Kind, node: usize) -> Result<u64, Denied> {
        self.groups.charged(&self.source, id, kind, node)
    }

    /// [`Groups::used`].
    ///
    /// # Errors
    /// As there.
    pub fn used(&self, id: GroupId) -> Result<u64, Denied> {
        self.groups.used(&self.source, id)
    }

    /// [`Groups::protection`].
    ///
    /// # Errors
    /// As there.
    pub fn protection(&self, id: GroupId) -> Result<(u64, u64), Denied> {
        self.groups.protection(&self.source, id)
    }

    /// [`Groups::next_child`].
    pub fn next_child(&self, parent: GroupId, after: Option<GroupId>) -> Option<GroupId> {
        self.groups.next_child(&self.source, parent, after)
    }

    /// [`Groups::count`].
    pub fn count(&self) -> GroupCount {
        self.groups.count(&self.source)
    }

    /// The groups, and what they stand on, for whoever is inside the gate.
    pub(crate) fn parts(&self) -> (&Groups, &Source<'_, P>) {
        (self.groups, &self.source)
    }

    pub(crate) fn source(&self) -> &Source<'m, P> {
        &self.source
    }

    pub(crate) fn groups(&self) -> &'m Groups {
        self.groups
    }

    /// The same, but what it charges at a limit may run callbacks in its own thread: those of shrinkers that allow it.
    pub fn inline(&self) -> Grouped<'m, P> {
        Grouped { source: self.source.with(Manner::Inline), ..*self }
    }

    /// The same for a call that may have come from under a lock of the C library's: it makes no
    /// thread.
    pub(crate) fn quietly(&self) -> Grouped<'m, P> {
        Grouped { source: self.source.with(Manner::Quiet), ..*self }
    }

    /// [`Groups::drain`].
    pub fn drain(&self, id: GroupId) -> u32 {
        self.groups.drain(&self.source, id)
    }

    /// Bytes of memory that groups take, besides their per-CPU data.
    pub fn bytes(&self) -> usize {
        self.groups.bytes(self.platform())
    }

    /// Fences that emptying stocks has asked for so far.
    pub fn fences(&self) -> u32 {
        self.groups.fences()
    }

    /// [`Groups::charge`]; and holds the caller up for as long as it answers.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn charge(&self, payer: Payer, bytes: u64, how: How) -> Result<(), Refusal> {
        // Memory that reclaim itself needs: a copy that is smaller, made before the original goes.
        let how = if how == How::Refuse && is_calling() { How::Reserve } else { how };
        match self.groups.charge(&self.source, payer, bytes, how) {
            Ok(0) => Ok(()),
            Ok(delay) => {
                self.hold_up(payer, delay);
                Ok(())
            }
            Err(refusal) => Err(refusal),
        }
    }

    /// Holds up who has charged a group above its `high`, for so long, or until it is below again.
    #[cold]
    fn hold_up(&self, payer: Payer, delay: u64) {
        // A callback of a shrinker's brings the group below its `high`: it is not to wait for that.
        if is_calling() {
            return;
        }
        let begun = clock::precise();
        if !self.source.core().relieve(self.source.mm(), payer.id(), delay) {
            self.platform().sleep(delay.saturating_sub(clock::precise() - begun));
        }
    }

    /// [`Groups::take`].
    #[inline(always)]
    pub fn take(&self, payer: Payer, bytes: u64) -> bool {
        self.groups.take(self.platform(), payer, bytes)
    }

    /// The group that an id leads to: its own, or the heir of one that is gone. Not inside the gate.
    pub fn heir(&self, id: GroupId) -> Option<GroupId> {
        self.source.inside(|| self.groups.heir(id))
    }

    /// The node that memory for this thread comes from.
    #[inline]
    pub(crate) fn node(&self) -> usize {
        self.source.node()
    }

    /// [`Groups::charge_or_wait`]; and holds the caller up for as long as it answers, but not
    /// beyond the deadline. In a callback of a shrinker's it does not wait.
    ///
    /// # Errors
    /// As there.
    pub fn charge_or_wait(&self, payer: Payer, bytes: u64, deadline: u64) -> Result<(), Refusal> {
        // A callback is waited for itself.
        if is_calling() {
            return self.charge(payer, bytes, How::Refuse);
        }
        let delay = self.groups.charge_or_wait(&self.source, payer, bytes, deadline)?;
        let delay = delay.min(deadline.saturating_sub(self.platform().now()));
        if delay > 0 {
            self.hold_up(payer, delay);
        }
        Ok(())
    }

    /// [`Groups::charge_async`]. Somebody has to tick: the thread is made where there is none.
    pub fn charge_async(&self, payer: Payer, bytes: u64, deadline: u64) -> ChargeAsync<'m, Source<'m, P>> {
        self.source.want_thread();
        // A poll is not to wait.
        self.groups.charge_async(self.source.with(Manner::Post), payer, bytes, deadline)
    }

    /// [`Groups::subscribe`]. Somebody has to tick: the thread is made where there is none.
    ///
    /// # Errors
    /// As there.
    pub fn subscribe(
        &self,
        group: GroupId,
        events: &[Event],
        listener: Listener,
    ) -> Result<Subscription, NotSubscribed> {
        self.source.want_thread();
        self.groups.subscribe(&self.source, group, events, listener)
    }

    /// [`Groups::unsubscribe`].
    pub fn unsubscribe(&self, subscription: Subscription) -> bool {
        self.groups.unsubscribe(&self.source, subscription)
    }

    /// [`Groups::uncharge`].
    #[inline]
    pub fn uncharge(&self, payer: Payer, bytes: u64) {
        self.groups.uncharge(&self.source, payer, bytes);
    }

    /// # Safety
    /// As for [`Groups::close`].
    pub(crate) unsafe fn close(&self) {
        // SAFETY: as the caller promises.
        unsafe { self.groups.close(&self.source) };
    }

    /// In a forked child.
    ///
    /// # Safety
    /// As for [`Groups::forget_others`].
    pub(crate) unsafe fn forget_others(&self) {
        // SAFETY: as the caller promises.
        unsafe { self.groups.forget_others(&self.source) };
    }
}
