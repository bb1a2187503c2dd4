//! Passes of reclaim in a manager: which groups and shrinkers a pass asks, and how threads run it.
//!
//! # Design
//! The passes of `neap_reclaim` do not depend on a manager. [`ReclaimDomain`] gives them the
//! manager's groups, shrinkers and clock, for the subtree of one group. The thread that runs a pass
//! watches its callbacks with a [`Watch`].
//!
//! # Locking
//! This module has no lock. Callbacks run outside the gate and with no lock held.

use crate::mm::Core;
use crate::reclaim::reclaiming::Reclaiming;
use crate::reclaim::watching::{Enough, Ran, Watch};
use crate::state::reclaim::{PASS_MAX_NS, PRIORITY_STEPS, WAIT_MAX_NS};
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_groups::protection::GroupUsage;
use neap_groups::{Bound, Event, GroupId, GroupSlot, Request};
use neap_percpu::Host as _;
use neap_reclaim::reclaim::{Ask, Domain, Given, Level, Levels, LowProtection, PassResult, UsedBytes, scan_pressure};
use neap_reclaim::{FIRST_PRIORITY, ScanPressure, ShrinkerFilter, ShrinkerId, Visited, WHOLE, is_calling};

/// Most groups in a subtree that a pass visits one by one. In a larger subtree, the pass goes
/// through the marked slots of all groups, and skips those outside the subtree.
const FEW: usize = 32;
/// Nanoseconds of a nap while a thread waits for a free slot of the watchdog, or for another
/// thread's callback.
const POLL_SLEEP_NS: u64 = 1_000_000;

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

/// The bound below which a pass makes room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// The bounds of groups.
    Charges,
    /// The page budget of the process. Only pages that are no longer in use count as freed.
    Budget,
}

/// The thread that runs a pass, and the purpose of the pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PassContext {
    /// The number of a reclaimer; 0 for a thread of the program.
    pub(crate) reclaimer: u32,
    /// The shrinkers that the pass calls. Some passes exclude the program's shrinkers, because
    /// their thread may hold locks that callbacks take.
    pub(crate) filter: ShrinkerFilter,
    pub(crate) purpose: Purpose,
    /// The request that the pass serves. The request may end before the pass does.
    pub(crate) request: Option<Request>,
}

impl PassContext {
    /// Returns the context of a thread that holds no lock: its pass calls all shrinkers.
    pub(crate) const fn of(reclaimer: u32) -> PassContext {
        PassContext { reclaimer, filter: ShrinkerFilter::All, purpose: Purpose::Charges, request: None }
    }
}

impl<'m, P: Platform> Reclaiming<'m, P> {
    /// Returns whether any shrinker is marked for the group or one below it. If not, there is
    /// nothing to reclaim.
    pub(crate) fn has_shrinkers_below(&self, top: GroupId) -> bool {
        let domain = self.domain(top, Purpose::Charges);
        (0..domain.nodes()).any(|node| domain.next(top, node, 0).is_some())
    }

    /// Asks those shrinkers of a group that allow inline calls for `bytes` bytes, in this thread.
    /// Returns the freed bytes. Inline charges of the program call this; allocations do not.
    #[inline(never)]
    pub(crate) fn ask_inline(&self, group: GroupId, bytes: u64, deadline: u64) -> u64 {
        let deadline = deadline.min(self.source.platform().precise().saturating_add(WAIT_MAX_NS));
        let ask = Ask { top: group, bytes, deadline, node: None, ahead: false };
        let context = PassContext { filter: ShrinkerFilter::Inline, ..PassContext::of(0) };
        self.run_to_answer(&ask, context).result.bytes
    }

    /// Makes room for a charge in each group that the charge would take beyond its `max`. Asks
    /// shrinkers that allow inline calls, in this thread, until `deadline`, a time of the
    /// platform's clock.
    pub(crate) fn make_room_inline(&self, group: GroupId, bytes: u64, deadline: u64) {
        if is_calling() {
            return;
        }
        for info in self.with_ancestors(group).filter(|info| bytes <= info.bounds[Bound::Max as usize]) {
            let missing = info.charged.saturating_add(bytes).saturating_sub(info.bounds[Bound::Max as usize]);
            if missing > 0 && self.source.platform().precise() < deadline {
                self.ask_inline(info.id, missing, deadline);
            }
        }
    }

    /// Asks a group, and those below it, for `bytes` bytes, until `deadline`, a time of the
    /// platform's clock. Callbacks run in this thread, which must hold no lock that they take.
    /// Inside a callback, this calls no shrinker. While too many threads run callbacks, this waits
    /// until one of them ends.
    pub fn ask(&self, group: GroupId, bytes: u64, deadline: u64) -> PassResult {
        while !self.reclaim.watchdog.is_room() && self.source.platform().precise() < deadline {
            self.source.platform().sleep(POLL_SLEEP_NS);
        }
        let ask = Ask { top: group, bytes, deadline, node: None, ahead: true };
        let ran = self.run(&ask, PassContext::of(0));
        self.groups.drain(&self.source, group);
        ran.result
    }

    /// Has a shrinker scan `objects` objects of a group on a node, or all that it counts if these
    /// are fewer. Callbacks run in this thread, for one second at most. `None` if there is no such
    /// shrinker, or it is barred: neap does not call it at present, after it was blamed.
    pub fn scan(&self, id: ShrinkerId, group: GroupId, node: u32, objects: u64) -> Option<Visited> {
        self.scan_as(0, id, group, node, objects).map(|ran| ran.result)
    }

    /// Implements [`Reclaiming::scan`] for the reclaimer with the number `reclaimer`.
    pub(crate) fn scan_as(
        &self,
        reclaimer: u32,
        id: ShrinkerId,
        group: GroupId,
        node: u32,
        objects: u64,
    ) -> Option<Ran<Visited>> {
        let running = self.reclaim.watchdog.enter(reclaimer)?;
        let watch = Watch::new(self, &running, self.source.platform().precise().saturating_add(PASS_MAX_NS));
        let (shrinkers, source) = (&self.reclaim.shrinkers, &self.source);
        // The count bounds the request, because a shrinker that scans nothing does not report that.
        let objects = objects.min(shrinkers.count(source, &watch, id, group, node)?);
        let visited = shrinkers.scan(source, &watch, id, group, node, objects)?;
        Some(watch.ran(visited))
    }

    /// Returns how many objects a shrinker counts of a group on a node. `None` if there is no such
    /// shrinker, or it is barred.
    pub fn count(&self, id: ShrinkerId, group: GroupId, node: u32) -> Option<u64> {
        self.count_as(0, id, group, node).map(|ran| ran.result)
    }

    /// Implements [`Reclaiming::count`] for the reclaimer with the number `reclaimer`.
    pub(crate) fn count_as(&self, reclaimer: u32, id: ShrinkerId, group: GroupId, node: u32) -> Option<Ran<u64>> {
        let running = self.reclaim.watchdog.enter(reclaimer)?;
        let watch = Watch::new(self, &running, self.source.platform().precise().saturating_add(PASS_MAX_NS));
        let objects = self.reclaim.shrinkers.count(&self.source, &watch, id, group, node)?;
        Some(watch.ran(objects))
    }

    /// Calls `each` with the groups that would pay if reclaim asked `top` for `bytes` bytes, and
    /// their shares. A share is in proportion to a group's usage beyond its protection. A group
    /// without objects has no share. Frees nothing. `count` callbacks run in this thread.
    pub fn dry_run(&self, top: GroupId, bytes: u64, mut each: impl FnMut(Payment)) {
        let domain = self.domain(top, Purpose::Charges);
        self.groups.begin_pass();
        let mut whole = 0_u64;
        self.each_payer(&domain, top, |payment| whole = whole.saturating_add(payment.bytes));
        self.each_payer(&domain, top, |payment| {
            let share = u128::from(payment.bytes) * u128::from(bytes.min(whole)) / u128::from(whole.max(1));
            each(Payment { bytes: share as u64, ..payment });
        });
    }

    /// Calls `each` with the groups that have objects, and with the bytes that each could pay.
    fn each_payer(&self, domain: &ReclaimDomain<'_, 'm, P>, top: GroupId, mut each: impl FnMut(Payment)) {
        let mut from = 0;
        while let Some(slot) = (0..domain.nodes()).filter_map(|node| domain.next(top, node, from)).min() {
            from = slot + 1;
            let Some(group) = domain.group_usage(slot, top) else { continue };
            let Ok(ScanPressure { share, .. }) = scan_pressure(&group, 0, FIRST_PRIORITY, LowProtection::Fair) else {
                continue;
            };
            let mut objects = 0_u64;
            self.reclaim.shrinkers.each(|report| {
                // neap's own caches cost nothing to empty.
                if report.own {
                    return;
                }
                let nodes = if report.by_node { domain.nodes() as u32 } else { 1 };
                let marked = (0..nodes).filter(|&node| self.reclaim.shrinkers.is_marked(report.id, slot, node));
                objects =
                    marked.filter_map(|node| self.count(report.id, group.id, node)).fold(objects, u64::saturating_add);
            });
            if objects > 0 {
                let own = self.groups.own_usage(&self.source, group.id).unwrap_or(0);
                let bytes = u128::from(own) * u128::from(share) / u128::from(WHOLE);
                each(Payment { group: group.id, objects, bytes: bytes as u64 });
            }
        }
    }

    fn domain(&self, top: GroupId, purpose: Purpose) -> ReclaimDomain<'_, 'm, P> {
        let mut slots = [0; FEW];
        let few = self.groups.slots_below(&self.source, top, &mut slots).map(|count| (slots, count));
        ReclaimDomain {
            reclaiming: self,
            watch: None,
            few,
            filter: ShrinkerFilter::All,
            purpose,
            top,
            node: None,
            request: None,
        }
    }

    /// Runs passes until a pass frees something, or until no other thread calls the shrinkers that
    /// freed nothing. Ends once the thread is written off. No further pass begins after the
    /// deadline, or after [`WAIT_MAX_NS`].
    ///
    /// | thread A, in a pass | thread B, in another one |
    /// |---|---|
    /// | 1. `scan` takes the lock of the cache | |
    /// | | 2. `count` does not get the lock, and returns 0 |
    /// | 3. frees objects, returns | |
    /// | | 4. asks again, instead of answering that nothing can be freed |
    pub(crate) fn run_to_answer(&self, ask: &Ask, context: PassContext) -> Ran<PassResult> {
        let end = ask.deadline.min(self.source.platform().precise().saturating_add(WAIT_MAX_NS));
        loop {
            let ran = self.run(ask, context);
            let is_answer = ran.result.is_something() || !ran.is_contended || ran.is_written_off;
            if is_answer || self.source.platform().precise() >= end {
                return ran;
            }
            self.source.platform().sleep(POLL_SLEEP_NS);
        }
    }

    /// Runs a pass.
    pub(crate) fn run(&self, ask: &Ask, context: PassContext) -> Ran<PassResult> {
        let Some(running) = self.reclaim.watchdog.enter(context.reclaimer) else {
            return Ran::of(PassResult::default());
        };
        let watch = Watch::new(self, &running, ask.deadline);
        let mut domain = self.domain(ask.top, context.purpose);
        (domain.watch, domain.filter, domain.node) = (Some(&watch), context.filter, ask.node);
        domain.request = context.request;
        if context.filter == ShrinkerFilter::Own {
            // neap's own shrinkers have no groups, so the pass visits the root alone.
            domain.few = Some(([GroupSlot::ROOT.slot; FEW], 1));
        }
        self.groups.begin_pass();
        watch.ran(self.reclaim.passes.run(&domain, ask))
    }
}

/// The subtree of one pass, with its thread's purpose.
struct ReclaimDomain<'g, 'm, P: Platform> {
    reclaiming: &'g Reclaiming<'m, P>,
    watch: Option<&'g Watch<'g, 'm, P>>,
    /// The slots of all groups below `top`, in order, and their number, if they are few. The pass
    /// then visits only these slots. The next pass visits a group that is made meanwhile.
    few: Option<([u32; FEW], usize)>,
    filter: ShrinkerFilter,
    purpose: Purpose,
    /// The group to reclaim from, with all below it.
    top: GroupId,
    /// The node whose shortage the pass is to end.
    node: Option<usize>,
    /// The request that the pass serves.
    request: Option<Request>,
}

impl<P: Platform> Domain for ReclaimDomain<'_, '_, P> {
    fn nodes(&self) -> usize {
        self.reclaiming.source.platform().nodes()
    }

    fn now(&self) -> u64 {
        self.reclaiming.source.platform().precise()
    }

    fn next(&self, top: GroupId, node: usize, from: u32) -> Option<u32> {
        let (shrinkers, groups) = (&self.reclaiming.reclaim.shrinkers, self.reclaiming.groups);
        if let Some((slots, count)) = &self.few {
            let has_anything = |slot: &u32| *slot >= from && shrinkers.has_anything(node as u32, *slot);
            return slots[..*count].iter().copied().find(has_anything);
        }
        let mut slot = shrinkers.next_with_anything(node as u32, from)?;
        if top == GroupId::ROOT {
            return Some(slot);
        }
        self.reclaiming.source.inside(|inside| {
            let reading = groups.reading();
            let top = groups.attach_target(inside, &reading, top)?;
            loop {
                let above = core::iter::successors(Some(slot), |&slot| Some(groups.parent_of(slot)?.slot));
                if above.into_iter().any(|slot| slot == top.slot) {
                    return Some(slot);
                }
                slot = shrinkers.next_with_anything(node as u32, slot + 1)?;
            }
        })
    }

    fn group_usage(&self, slot: u32, top: GroupId) -> Option<GroupUsage> {
        self.reclaiming.groups.standing(&self.reclaiming.source, slot, top)
    }

    fn give(&self, group: GroupId, slot: u32, node: usize, pressure: ScanPressure) -> Given {
        let Some(watch) = self.watch else { return Given::default() };
        let pressure = ScanPressure { filter: self.filter, ..pressure };
        let (shrinkers, source) = (&self.reclaiming.reclaim.shrinkers, &self.reclaiming.source);
        let before = self.charged(self.top);
        let enough = |need, said: u64| {
            let fallen = before.fall_to(self.charged(self.top));
            self.counted(said).max(fallen) >= need || self.has_enough()
        };
        let watch = Enough { watch, enough, takes_turns: self.request.is_some(), begun: Default::default() };
        let Visited { scanned, freed, freed_bytes, unsure, stops, .. } =
            shrinkers.visit(source, &watch, group, slot, node as u32, pressure);
        Given { scanned, freed, bytes: self.counted(freed_bytes), unsure, stops }
    }

    fn used(&self, top: GroupId) -> UsedBytes {
        self.measures(top, || self.reclaiming.groups.used(&self.reclaiming.source, top).ok())
    }

    fn charged(&self, top: GroupId) -> UsedBytes {
        self.measures(top, || self.reclaiming.groups.usage(&self.reclaiming.source, top).ok())
    }

    fn tell(&self, group: GroupId, event: Event) {
        self.reclaiming.groups.happened(&self.reclaiming.source, group, event);
    }

    fn note(&self, levels: &Levels, group: GroupId, scanned: u64, freed: u64) -> Option<Level> {
        levels.note(&self.reclaiming.source.enter(), group, scanned, freed)
    }

    fn has_enough(&self) -> bool {
        let pages = &self.reclaiming.source.core().objects.pages;
        self.request.is_some_and(|request| self.reclaiming.groups.needs(&self.reclaiming.source, &request) == 0)
            || self.node.is_some_and(|node| self.reclaiming.source.inside(|_| pages.shortage(node).pages == 0))
    }

    fn first_priority(&self) -> u32 {
        self.request.map_or(FIRST_PRIORITY, |request| FIRST_PRIORITY.saturating_sub(PRIORITY_STEPS * request.vain))
    }

    fn is_called_off(&self) -> bool {
        self.watch.is_some_and(|watch| watch.is_written_off())
    }
}

impl<P: Platform> ReclaimDomain<'_, '_, P> {
    /// Returns the part of `said`, the bytes that callbacks report as freed, that makes room. neap
    /// caches freed objects at first, so they make no room in the budget until the caches are
    /// drained.
    fn counted(&self, said: u64) -> u64 {
        if self.purpose == Purpose::Budget { 0 } else { said }
    }

    /// Returns the bytes of a group, as `in_group` reads them, and the bytes of pages. The bytes of
    /// pages are 0 unless `top` is the root.
    fn measures(&self, top: GroupId, in_group: impl Fn() -> Option<u64>) -> UsedBytes {
        if top != GroupId::ROOT {
            return UsedBytes { in_group: in_group().unwrap_or(0), in_pages: 0 };
        }
        // Memory that is charged to no group shows only in the number of pages of the process.
        let core = self.reclaiming.source.core();
        let inside = self.reclaiming.source.enter();
        let pages = match self.node {
            Some(node) => core.objects.pages.node(node).used().into(),
            None if self.purpose == Purpose::Budget => core.used_pages(&inside),
            None => core.resident_pages(&inside),
        };
        drop(inside);
        let in_group = if self.purpose == Purpose::Budget { 0 } else { in_group().unwrap_or(0) };
        UsedBytes { in_group, in_pages: pages * core.objects.pages.page_size() as u64 }
    }
}

impl<P: Platform> Core<P> {
    /// Number of pages that count for the budget.
    fn used_pages(&self, _: &Inside<'_>) -> u64 {
        let pages = &self.objects.pages;
        (0..pages.nodes()).map(|node| u64::from(pages.node(node).used())).sum()
    }

    /// Number of pages that count for the budget, plus free backed pages and pages of per-CPU data.
    fn resident_pages(&self, inside: &Inside<'_>) -> u64 {
        let pages = &self.objects.pages;
        let free: u64 = (0..pages.nodes()).map(|node| u64::from(pages.node(node).backed_free_pages())).sum();
        let per_cpu = self.per_cpu.bytes();
        self.used_pages(inside) + free + (per_cpu.used + per_cpu.free) / pages.page_size() as u64
    }
}
