//! Reclaim in a manager: shrinkers and passes, and the parts of the manager that they use.
//!
//! # Design
//! Made when the first shrinker is registered. Here passes meet groups, shrinkers and the clock,
//! and callbacks are watched. Unused, it costs one load in a tick, and one at a limit.
//!
//! # Locking
//! No lock of its own. Callbacks run outside the gate and with no lock held.

use crate::memory_groups::Grouped;
use crate::mm::{Core, Mm};
use crate::own_caches;
use crate::per_cpu_data::Source;
use crate::state::reclaim::{PASS, PATIENCE, Reclaim, STEPS};
use crate::watching::{Enough, Watch};
use core::ptr::NonNull;
use neap_base::Platform;
use neap_groups::protection::Standing;
use neap_groups::{Bound, Due, Event, GroupId, Groups, Info, Request, Seat};
use neap_objects::size_class::Class;
use neap_os::{clock, stack};
use neap_percpu::Host as _;
use neap_reclaim::reclaim::{Ask, Culprit, Domain, Given, Got, Grip, Level, Levels, Verdict, press};
use neap_reclaim::{
    FIRST_PRIORITY, Host, NotDone, Press, Report, ShrinkerId, Shrinkers, Spec, Unregistered, Visited, WHOLE, Whom,
    is_calling,
};

/// Largest subtree whose groups a pass visits one by one; in larger ones it visits marked slots of
/// all groups.
const FEW: usize = 32;
/// Nanoseconds between two looks for a free lane.
const NAP: u64 = 1_000_000;
/// Alignment of tables, in bytes.
const LINE: usize = 64;

/// Reclaim of a manager, for [`reclaim`](crate::reclaim).
#[derive(Debug)]
pub struct Reclaiming<'m, P: Platform> {
    grouped: Grouped<'m, P>,
    pub(crate) reclaim: &'m Reclaim,
}

impl<P: Platform> Clone for Reclaiming<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for Reclaiming<'_, P> {}

/// The thread that runs a pass, and the purpose of the pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Runner {
    /// The number of a reclaimer; 0 for a thread of the program.
    pub(crate) reclaimer: u32,
    /// Which shrinkers it calls: it may hold locks that callbacks of a program take.
    pub(crate) whom: Whom,
    /// Reclaims for the budget: only pages that fall out of use count.
    pub(crate) for_budget: bool,
    /// The request that it serves, which may be over before the pass is.
    pub(crate) request: Option<Request>,
}

impl Runner {
    /// A thread without locks: it calls all shrinkers.
    pub(crate) const fn of(reclaimer: u32) -> Runner {
        Runner { reclaimer, whom: Whom::All, for_budget: false, request: None }
    }
}

impl<P: Platform> Host for Source<'_, P> {
    fn memory(&self, bytes: usize) -> Option<NonNull<u8>> {
        let core = self.core();
        let memory = match Class::of_layout(bytes, LINE, core.objects.pages.page_size()) {
            Some(class) => core.objects.allocate(class)?,
            None => {
                let (memory, _) = core.allocate_run(bytes, LINE)?;
                core.count_run(bytes.max(1), 0);
                memory
            }
        };
        // SAFETY: allocated above with at least `bytes` bytes, and known to no other thread yet.
        unsafe { memory.write_bytes(0, bytes) };
        NonNull::new(memory)
    }

    unsafe fn give_back(&self, memory: NonNull<u8>, _bytes: usize) {
        let core = self.core();
        match core.class_of(memory.as_ptr(), "free") {
            Class::NONE => {
                let bytes = core.free_run(memory.as_ptr());
                core.count_run(0, bytes);
            }
            class => {
                // It is marked as allocated: it is marked as cached first.
                if core.objects.disown(memory.as_ptr()) {
                    core.objects.free(class, memory.as_ptr());
                }
            }
        }
    }

    fn mark(&self, shrinker: u64, seat: Seat, node: usize) {
        if let Some(reclaim) = self.core().reclaim.get() {
            reclaim.shrinkers.mark(self, ShrinkerId::from_bits(shrinker), seat.slot, node as u32);
        }
    }

    fn is_seat(&self, group: GroupId, slot: u32) -> bool {
        self.mm().groups_if_made().is_some_and(|grouped| grouped.groups().is_seat(group, slot))
    }

    fn follow(&self, group: GroupId, mut hang: impl FnMut(Seat)) {
        let Some(grouped) = self.mm().groups_if_made() else { return };
        let groups = grouped.groups();
        self.inside(|| {
            let reading = groups.reading();
            if !groups.hang_on(&reading, group, &mut hang) {
                // No reference to the group is left that names its heir: mark every group.
                groups.seats().for_each(|seat| _ = groups.hang_on(&reading, seat.group, &mut hang));
            }
        });
    }
}

impl<P: Platform> Mm<P> {
    /// Returns the manager's shrinkers and reclaim. Makes them, and its groups, if need be.
    ///
    /// # Errors
    /// [`NotDone::NoMemory`].
    pub fn reclaiming(&self) -> Result<Reclaiming<'_, P>, NotDone> {
        let make = || stack::apart(|| self.make_reclaiming()).unwrap_or(Err(NotDone::NoMemory));
        self.reclaiming_if_made().map_or_else(make, Ok)
    }

    #[cold]
    fn make_reclaiming(&self) -> Result<Reclaiming<'_, P>, NotDone> {
        let grouped = self.groups().map_err(|_| NotDone::NoMemory)?;
        let core = self.core().ok_or(NotDone::NoMemory)?;
        let (_, source) = grouped.parts();
        // Outside the gate: making the shrinkers passes it.
        let made = Shrinkers::open(source)?;
        // SAFETY: an open manager does not move, and closes its registry before its own end.
        if let Err(error) = unsafe { own_caches::register(self, source, &made) } {
            // SAFETY: `made` was never published, so no other thread uses it and no callback runs.
            unsafe { made.close(source) };
            return Err(error);
        }
        let mut made = Some(made);
        let reclaim =
            source.inside(|| core.reclaim.get_or_make(|| made.take().map(Reclaim::new).ok_or(NotDone::NoMemory)))?;
        if let Some(second) = made {
            // SAFETY: another thread published its own first, so no other thread uses this one.
            unsafe { second.close(source) };
        }
        Ok(Reclaiming { grouped, reclaim })
    }

    /// Returns the manager's shrinkers and reclaim, if they were made.
    #[inline]
    pub fn reclaiming_if_made(&self) -> Option<Reclaiming<'_, P>> {
        let reclaim = self.core_if_open()?.reclaim.get()?;
        Some(Reclaiming { grouped: self.groups_if_made()?, reclaim })
    }
}

impl<'m, P: Platform> Reclaiming<'m, P> {
    fn source(&self) -> &Source<'m, P> {
        self.grouped.source()
    }

    fn groups(&self) -> &'m Groups {
        self.grouped.groups()
    }

    pub(crate) fn inside<R>(&self, body: impl FnOnce() -> R) -> R {
        self.source().inside(body)
    }

    pub(crate) fn now(&self) -> u64 {
        self.source().platform().precise()
    }

    /// The current time of the clock of lanes, in nanoseconds: for watching callbacks and for
    /// penalties.
    pub(crate) fn moment(&self) -> u64 {
        self.reclaim.clock.read(clock::precise)
    }

    pub(crate) fn used(&self, group: GroupId) -> Option<u64> {
        self.grouped.used(group).ok()
    }

    /// Bytes charged to a group and those below it, with stocks and cached objects.
    pub(crate) fn charged(&self, group: GroupId) -> Option<u64> {
        self.groups().usage(self.source(), group).ok()
    }

    pub(crate) fn info(&self, group: GroupId) -> Option<Info> {
        self.grouped.info(group).ok()
    }

    pub(crate) fn drain(&self, group: GroupId) {
        self.grouped.drain(group);
    }

    /// The group and those above it that are beyond their `high`, lowest first.
    pub(crate) fn above_high(&self, group: GroupId) -> impl Iterator<Item = Info> {
        let chain = core::iter::successors(self.info(group), |info| self.info(info.parent?));
        chain.filter(|info| info.charged > info.bounds[Bound::High as usize])
    }

    /// Bytes by which a group is above its `max`.
    pub(crate) fn excess(&self, group: GroupId) -> u64 {
        self.groups().excess(self.source(), group)
    }

    /// [`Groups::ask_for`].
    pub(crate) fn ask_for(&self, group: GroupId, bytes: u64) {
        self.groups().ask_for(self.source(), group, bytes);
    }

    /// [`Groups::take_request`].
    pub(crate) fn take_request(&self, server: u32) -> Due {
        self.groups().take_request(self.source(), server)
    }

    /// [`Groups::look_for_request`].
    pub(crate) fn look_for_request(&self) -> Due {
        self.groups().look_for_request(self.source())
    }

    /// [`Groups::needs`].
    pub(crate) fn needs(&self, request: &Request) -> u64 {
        self.groups().needs(self.source(), request)
    }

    /// [`Groups::served`].
    pub(crate) fn served(&self, request: &Request, server: u32) {
        self.groups().served(self.source(), request, server);
    }

    /// [`Groups::wake`].
    pub(crate) fn wake_waiters(&self) {
        self.groups().wake(self.source());
    }

    /// [`Groups::leave_request`]. Inside the gate.
    pub(crate) fn leave_request(&self, server: u32) {
        self.groups().leave_request(server);
    }

    /// Number of nodes.
    pub(crate) fn nodes(&self) -> u32 {
        self.source().platform().nodes() as u32
    }

    /// Whether any shrinker is marked for the group or one below it. If not, there is nothing to
    /// reclaim.
    pub(crate) fn is_anybody_below(&self, top: GroupId) -> bool {
        let domain = self.domain(top, false);
        (0..domain.nodes()).any(|node| domain.next(top, node, 0).is_some())
    }

    /// [`Shrinkers::prepare`].
    ///
    /// # Errors
    /// Those of [`Shrinkers::prepare`].
    ///
    /// # Safety
    /// Those of [`Shrinkers::prepare`].
    pub unsafe fn prepare(&self, spec: &Spec<'_>) -> Result<ShrinkerId, NotDone> {
        // SAFETY: the callbacks may be called with `data` by any threads until the end of the
        // shrinker, and do not unwind (the caller's promise).
        unsafe { self.reclaim.shrinkers.prepare(self.source(), spec) }
    }

    /// [`Shrinkers::belongs_to`].
    pub fn belongs_to(&self, id: ShrinkerId, group: GroupId) {
        self.reclaim.shrinkers.belongs_to(id, group);
    }

    /// [`Shrinkers::set_budget`].
    pub fn set_budget(&self, id: ShrinkerId, nanoseconds: u64) {
        self.reclaim.shrinkers.set_budget(id, nanoseconds);
    }

    /// Starts a shrinker ([`Shrinkers::start`]), and makes neap's thread and a reclaimer if it can.
    ///
    /// # Errors
    /// Those of [`Shrinkers::start`].
    pub fn start(&self, id: ShrinkerId) -> Result<(), NotDone> {
        self.reclaim.shrinkers.start(self.source(), id)?;
        let source = self.source();
        source.want_thread();
        _ = source.core().recruit(source.mm(), self, 1);
        Ok(())
    }

    /// Ends every reclaimer after the callback that it runs.
    pub(crate) fn dismiss(&self) {
        self.inside(|| self.reclaim.dismiss());
    }

    /// [`Shrinkers::unregister`].
    ///
    /// # Errors
    /// Those of [`Shrinkers::unregister`].
    pub fn unregister(&self, id: ShrinkerId) -> Result<Unregistered, NotDone> {
        self.reclaim.shrinkers.unregister(self.source(), id).inspect(|_| self.reclaim.lanes.forget(id.to_bits()))
    }

    /// [`Shrinkers::synchronize`].
    ///
    /// # Errors
    /// Those of [`Shrinkers::synchronize`].
    pub fn synchronize(&self) -> Result<(), NotDone> {
        self.reclaim.shrinkers.synchronize(self.source())
    }

    /// Marks a shrinker for the group, or its heir, on a node ([`Shrinkers::mark`]). Returns
    /// `false` if there is neither.
    pub fn mark(&self, id: ShrinkerId, group: GroupId, node: u32) -> bool {
        self.inside(|| {
            let reading = self.groups().reading();
            let mark = |seat: Seat| self.reclaim.shrinkers.mark(self.source(), id, seat.slot, node);
            self.groups().hang_on(&reading, group, mark)
        })
    }

    /// [`Shrinkers::each`].
    pub fn each(&self, each: impl FnMut(&Report)) {
        self.reclaim.shrinkers.each(each);
    }

    /// Calls `each` with the records of blamed shrinkers.
    pub fn each_culprit(&self, each: impl FnMut(Culprit)) {
        self.reclaim.lanes.each_culprit(each);
    }

    /// Calls `each` with the groups and nodes that a shrinker is marked for, and its deferred work
    /// there.
    pub(crate) fn each_place(&self, report: &Report, mut each: impl FnMut(GroupId, u32, u64)) {
        let (shrinkers, nodes) = (&self.reclaim.shrinkers, self.source().platform().nodes() as u32);
        for node in 0..if report.by_node { nodes } else { 1 } {
            let mut from = 0;
            while let Some(slot) = shrinkers.next_with_anything(node, from) {
                from = slot + 1;
                if shrinkers.is_marked(report.id, slot, node)
                    && let Some(standing) = self.groups().standing(self.source(), slot, GroupId::ROOT)
                {
                    each(standing.id, node, shrinkers.deferred(report.id, slot, node));
                }
            }
        }
    }

    /// Number of reclaimers, of those that do not return, of waits, and of waits in vain.
    pub(crate) fn threads(&self) -> (u32, u32, u64, u64) {
        self.inside(|| self.reclaim.threads())
    }

    /// [`Passes::counts`](neap_reclaim::reclaim::Passes::counts).
    pub fn passes(&self) -> [[u64; 5]; 2] {
        self.reclaim.passes.counts()
    }

    /// How often shrinkers were blamed so far, by [`Verdict`].
    pub fn blames(&self) -> [u32; Verdict::ALL.len()] {
        self.reclaim.lanes.counts()
    }

    /// Blames a shrinker, which is not called for some time then.
    pub(crate) fn blame(&self, shrinker: ShrinkerId, verdict: Verdict) {
        let Reclaim { shrinkers, lanes, .. } = self.reclaim;
        let name = shrinkers.name_of(shrinker);
        self.inside(|| lanes.blame(shrinker.to_bits(), name, verdict, self.moment()));
    }

    /// Blames a shrinker for a panic. Called by the function that caught it.
    pub fn has_panicked(&self, id: ShrinkerId) {
        self.blame(id, Verdict::Panicked);
    }

    /// Asks the shrinkers of a group that allow it for `bytes` bytes, in this thread. Returns the
    /// bytes that came back. For charges that the program makes inline, never for an allocation.
    #[inline(never)]
    pub(crate) fn ask_inline(&self, group: GroupId, bytes: u64, deadline: u64) -> u64 {
        let deadline = deadline.min(self.now().saturating_add(PATIENCE));
        let ask = Ask { top: group, bytes, deadline, node: None, ahead: false };
        self.run(&ask, Runner { whom: Whom::Inline, ..Runner::of(0) }).0.bytes
    }

    /// Makes room for a charge, in this thread, by shrinkers that allow it, until `deadline` by the
    /// platform's clock: in each group that the charge would take beyond its `max`.
    pub(crate) fn make_room_inline(&self, group: GroupId, bytes: u64, deadline: u64) {
        if is_calling() {
            return;
        }
        let chain = core::iter::successors(self.info(group), |info| self.info(info.parent?));
        for info in chain.filter(|info| bytes <= info.bounds[Bound::Max as usize]) {
            let missing = info.charged.saturating_add(bytes).saturating_sub(info.bounds[Bound::Max as usize]);
            if missing > 0 && self.now() < deadline {
                self.ask_inline(info.id, missing, deadline);
            }
        }
    }

    /// Asks a group, and those below it, for `bytes` bytes, until `deadline` by the platform's
    /// clock. Callbacks run in this thread, which must hold no lock that they take. Inside a
    /// callback no shrinker is called. While too many threads run callbacks it waits for one of
    /// them to end.
    pub fn ask(&self, group: GroupId, bytes: u64, deadline: u64) -> Got {
        while !self.reclaim.lanes.is_room() && self.now() < deadline {
            self.source().platform().sleep(NAP);
        }
        let ask = Ask { top: group, bytes, deadline, node: None, ahead: true };
        let (got, _) = self.run(&ask, Runner::of(0));
        self.drain(group);
        got
    }

    /// Has a shrinker scan `objects` objects of a group on a node, or all that it counts if these
    /// are fewer. Callbacks run in this thread, for one second at most. `None` if there is no such
    /// shrinker, or it is barred.
    pub fn scan(&self, id: ShrinkerId, group: GroupId, node: u32, objects: u64) -> Option<Visited> {
        self.scan_as(0, id, group, node, objects).map(|(visited, _)| visited)
    }

    /// Scans as the reclaimer of the given number. Differs from [`Reclaiming::scan`]: also returns
    /// whether the thread was written off meanwhile.
    pub(crate) fn scan_as(
        &self,
        reclaimer: u32,
        id: ShrinkerId,
        group: GroupId,
        node: u32,
        objects: u64,
    ) -> Option<(Visited, bool)> {
        let lane = self.reclaim.lanes.enter(reclaimer)?;
        let watch = Watch::new(self, &lane, self.now().saturating_add(PASS));
        let (shrinkers, source) = (&self.reclaim.shrinkers, self.source());
        // Bounded by the count: a shrinker that scans nothing does not say so.
        let objects = objects.min(shrinkers.count(source, &watch, id, group, node)?);
        let visited = shrinkers.scan(source, &watch, id, group, node, objects)?;
        Some((visited, watch.is_written_off.get()))
    }

    /// Returns how many objects a shrinker counts of a group on a node. `None` if there is no such
    /// shrinker, or it is barred.
    pub fn count(&self, id: ShrinkerId, group: GroupId, node: u32) -> Option<u64> {
        self.count_as(0, id, group, node).map(|(objects, _)| objects)
    }

    /// Counts as the reclaimer of the given number. Differs from [`Reclaiming::count`]: also
    /// returns whether the thread was written off meanwhile.
    pub(crate) fn count_as(&self, reclaimer: u32, id: ShrinkerId, group: GroupId, node: u32) -> Option<(u64, bool)> {
        let lane = self.reclaim.lanes.enter(reclaimer)?;
        let watch = Watch::new(self, &lane, self.now().saturating_add(PASS));
        let objects = self.reclaim.shrinkers.count(self.source(), &watch, id, group, node)?;
        Some((objects, watch.is_written_off.get()))
    }

    /// Calls `each` with the groups that would pay if `top` were asked for `bytes` bytes, and their
    /// shares. A share is in proportion to what a group has beyond its protection; groups without
    /// objects have none. Frees nothing; `count` callbacks run in this thread.
    pub fn dry_run(&self, top: GroupId, bytes: u64, mut each: impl FnMut(Payment)) {
        let domain = self.domain(top, false);
        self.groups().begin_pass();
        let mut whole = 0_u64;
        self.each_payer(&domain, top, |payment| whole = whole.saturating_add(payment.bytes));
        self.each_payer(&domain, top, |payment| {
            let share = u128::from(payment.bytes) * u128::from(bytes.min(whole)) / u128::from(whole.max(1));
            each(Payment { bytes: share as u64, ..payment });
        });
    }

    /// Calls `each` with the groups that have objects, and with the bytes that each could pay.
    fn each_payer(&self, domain: &Ground<'_, 'm, P>, top: GroupId, mut each: impl FnMut(Payment)) {
        let mut from = 0;
        while let Some(slot) = (0..domain.nodes()).filter_map(|node| domain.next(top, node, from)).min() {
            from = slot + 1;
            let Some(standing) = domain.standing(slot, top) else { continue };
            let Ok(Press { share, .. }) = press(&standing, 0, FIRST_PRIORITY, Grip::Fair) else { continue };
            let mut objects = 0_u64;
            self.each(|report| {
                // neap's own caches cost nothing to empty.
                if report.own {
                    return;
                }
                let nodes = if report.by_node { domain.nodes() as u32 } else { 1 };
                let marked = (0..nodes).filter(|&node| self.reclaim.shrinkers.is_marked(report.id, slot, node));
                objects = marked
                    .filter_map(|node| self.count(report.id, standing.id, node))
                    .fold(objects, u64::saturating_add);
            });
            if objects > 0 {
                let own = self.groups().own_usage(self.source(), standing.id).unwrap_or(0);
                let bytes = u128::from(own) * u128::from(share) / u128::from(WHOLE);
                each(Payment { group: standing.id, objects, bytes: bytes as u64 });
            }
        }
    }

    fn domain(&self, top: GroupId, for_budget: bool) -> Ground<'_, 'm, P> {
        let mut slots = [0; FEW];
        let few = self.groups().slots_below(self.source(), top, &mut slots).map(|count| (slots, count));
        Ground { reclaiming: self, watch: None, few, whom: Whom::All, for_budget, top, node: None, request: None }
    }

    /// Runs a pass. Returns its result, and whether its thread was written off meanwhile.
    pub(crate) fn run(&self, ask: &Ask, runner: Runner) -> (Got, bool) {
        let Some(lane) = self.reclaim.lanes.enter(runner.reclaimer) else { return (Got::default(), false) };
        let watch = Watch::new(self, &lane, ask.deadline);
        let mut domain = self.domain(ask.top, runner.for_budget);
        (domain.watch, domain.whom, domain.node) = (Some(&watch), runner.whom, ask.node);
        domain.request = runner.request;
        if runner.whom == Whom::Own {
            // neap's own shrinkers know no groups.
            domain.few = Some(([Seat::ROOT.slot; FEW], 1));
        }
        self.groups().begin_pass();
        let got = self.reclaim.passes.run(&domain, ask);
        (got, watch.is_written_off.get())
    }

    /// Frees the shrinkers.
    ///
    /// # Safety
    /// Those of [`Shrinkers::close`].
    pub(crate) unsafe fn close(&self) {
        // SAFETY: no thread uses the registry any more, and no callback runs (the caller's
        // promise).
        unsafe { self.reclaim.shrinkers.close(self.source()) };
    }

    /// Forgets the threads of the parent, in a forked child.
    ///
    /// # Safety
    /// Those of [`Shrinkers::forget_others`].
    pub(crate) unsafe fn forget_others(&self) {
        // SAFETY: this is the only thread of a forked child, as `Shrinkers::forget_others` needs
        // (the caller's promise).
        unsafe { self.reclaim.shrinkers.forget_others(self.source()) };
        self.inside(|| self.reclaim.forget_others());
        self.source().core().objects.pages.set_reclaiming(false);
    }
}

/// The share of one group in a dry run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Payment {
    /// The group.
    pub group: GroupId,
    /// Objects that its shrinkers count.
    pub objects: u64,
    /// Bytes that it would pay.
    pub bytes: u64,
}

/// The subtree of one pass, with its thread's purpose.
struct Ground<'g, 'm, P: Platform> {
    reclaiming: &'g Reclaiming<'m, P>,
    watch: Option<&'g Watch<'g, 'm, P>>,
    /// The slots of all groups below `top`, in order, and their number, if these are few. Then the
    /// pass visits no other slots; a group made meanwhile is visited by the next pass.
    few: Option<([u32; FEW], usize)>,
    whom: Whom,
    /// Only room in the budget counts.
    for_budget: bool,
    /// The group to reclaim from, with all below it.
    top: GroupId,
    /// The node whose shortage the pass is to end.
    node: Option<usize>,
    /// The request that the pass serves.
    request: Option<Request>,
}

impl<P: Platform> Domain for Ground<'_, '_, P> {
    fn nodes(&self) -> usize {
        self.reclaiming.source().platform().nodes()
    }

    fn now(&self) -> u64 {
        self.reclaiming.now()
    }

    fn next(&self, top: GroupId, node: usize, from: u32) -> Option<u32> {
        let (shrinkers, groups) = (&self.reclaiming.reclaim.shrinkers, self.reclaiming.groups());
        if let Some((slots, count)) = &self.few {
            let has_anything = |slot: &u32| *slot >= from && shrinkers.has_anything(node as u32, *slot);
            return slots[..*count].iter().copied().find(has_anything);
        }
        let mut slot = shrinkers.next_with_anything(node as u32, from)?;
        if top == GroupId::ROOT {
            return Some(slot);
        }
        self.reclaiming.inside(|| {
            let reading = groups.reading();
            let top = groups.seat(&reading, top)?;
            loop {
                let above = core::iter::successors(Some(slot), |&slot| Some(groups.parent_of(slot)?.slot));
                if above.into_iter().any(|slot| slot == top.slot) {
                    return Some(slot);
                }
                slot = shrinkers.next_with_anything(node as u32, slot + 1)?;
            }
        })
    }

    fn standing(&self, slot: u32, top: GroupId) -> Option<Standing> {
        self.reclaiming.groups().standing(self.reclaiming.source(), slot, top)
    }

    fn give(&self, group: GroupId, slot: u32, node: usize, press: Press) -> Given {
        let Some(watch) = self.watch else { return Given::default() };
        let press = Press { whom: self.whom, ..press };
        let (shrinkers, source) = (&self.reclaiming.reclaim.shrinkers, self.reclaiming.source());
        let before = self.charged(self.top);
        let enough = |need, said: u64| {
            let now = self.charged(self.top);
            let fallen = before.iter().zip(now).map(|(before, now)| before.saturating_sub(now)).max();
            // Freed objects are cached at first, and make no room in the budget until the caches
            // are drained.
            (if self.for_budget { 0 } else { said }).max(fallen.unwrap_or(0)) >= need || self.has_enough()
        };
        let watch = Enough { watch, enough, takes_turns: self.request.is_some(), begun: Default::default() };
        let Visited { scanned, freed, freed_bytes, unsure, stops, .. } =
            shrinkers.visit(source, &watch, group, slot, node as u32, press);
        Given { scanned, freed, bytes: if self.for_budget { 0 } else { freed_bytes }, unsure, stops }
    }

    fn used(&self, top: GroupId) -> [u64; 2] {
        self.measures(top, || self.reclaiming.used(top))
    }

    fn charged(&self, top: GroupId) -> [u64; 2] {
        self.measures(top, || self.reclaiming.charged(top))
    }

    fn tell(&self, group: GroupId, event: Event) {
        self.reclaiming.groups().happened(self.reclaiming.source(), group, event);
    }

    fn note(&self, levels: &Levels, group: GroupId, scanned: u64, freed: u64) -> Option<Level> {
        self.reclaiming.inside(|| levels.note(group, scanned, freed))
    }

    fn has_enough(&self) -> bool {
        let pages = &self.reclaiming.source().core().objects.pages;
        self.request.is_some_and(|request| self.reclaiming.needs(&request) == 0)
            || self.node.is_some_and(|node| self.reclaiming.inside(|| pages.shortage(node).pages == 0))
    }

    fn first_priority(&self) -> u32 {
        self.request.map_or(FIRST_PRIORITY, |request| FIRST_PRIORITY.saturating_sub(STEPS * request.vain))
    }

    fn is_called_off(&self) -> bool {
        self.watch.is_some_and(|watch| watch.is_written_off.get())
    }
}

impl<P: Platform> Ground<'_, '_, P> {
    /// Returns the bytes of a group, by `in_group`, and those of pages, which count for the root
    /// alone.
    fn measures(&self, top: GroupId, in_group: impl Fn() -> Option<u64>) -> [u64; 2] {
        if top != GroupId::ROOT {
            return [in_group().unwrap_or(0), 0];
        }
        // Memory that is charged to no group is known as pages of the process.
        let core = self.reclaiming.source().core();
        let pages = self.reclaiming.inside(|| match self.node {
            Some(node) => core.objects.pages.node(node).used().into(),
            None if self.for_budget => core.used_pages(),
            None => core.resident_pages(),
        });
        let in_group = if self.for_budget { 0 } else { in_group().unwrap_or(0) };
        [in_group, pages * core.objects.pages.page_size() as u64]
    }
}

impl<P: Platform> Core<P> {
    /// Number of pages that count for the budget. Inside the gate.
    fn used_pages(&self) -> u64 {
        let pages = &self.objects.pages;
        (0..pages.nodes()).map(|node| u64::from(pages.node(node).used())).sum()
    }

    /// Number of pages that count for the budget, plus free backed pages and pages of per-CPU data.
    /// Inside the gate.
    fn resident_pages(&self) -> u64 {
        let pages = &self.objects.pages;
        let free: u64 = (0..pages.nodes()).map(|node| u64::from(pages.node(node).backed_free_pages())).sum();
        let (used, spare) = self.per_cpu.bytes();
        self.used_pages() + free + (used + spare) / pages.page_size() as u64
    }
}
