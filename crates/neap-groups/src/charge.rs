//! Charging from a stock and on the counters, and the steps at a limit before a charge is refused.
//!
//! # Design
//!
//! The fast path is one restartable sequence. A charge that exceeds a limit takes these steps:
//!
//! 1. The thread flushes caches of the group at its limit and its descendants, and empties their
//!    stocks.
//! 2. The host reclaims from that group, at most [`RECLAIMS_MAX`] times, while that frees anything.
//!    The thread empties stocks after each time, since they may have the freed bytes.
//! 3. The charge is refused, with an error that names the groups that hold the memory. [`OnLimit`]
//!    may grant it instead. Then [`Event::Overcharged`] is counted.
//!
//! [`OnLimit::Refuse`] refuses a charge that can never fit before the host reclaims. Such a charge
//! exceeds the `max` of a group, or the part of `max` that the `min` of the group's children does
//! not protect.
//!
//! An uncharge always succeeds and does not wait. A charge takes available bytes, even while other
//! threads wait for room (`wait.rs`). While a thread waits at a group, charges and uncharges below
//! that group stock no bytes. So each uncharge lowers the counters and can admit waiters.
//!
//! # Locking
//!
//! The thread holds no lock between these steps. It is outside the fork gate while the host
//! reclaims.
//!
//! Source: Linux `mm/memcontrol.c` (`try_charge`), by description.

use crate::group::{Bound, DEEPEST, Event, Group, HOLDERS, NONE};
use crate::groups::{FlushPace, Groups, Reclaimer};
use crate::id::{GroupId, Kind, Payer};
use crate::id_table::IdTarget;
use crate::protection::delay;
use crate::stock::{BATCH, CAP};
use core::sync::atomic::{AtomicU32, Ordering};
use neap_base::Platform;
use neap_base::gate::Inside;

/// Maximum number of reclaim calls for one charge, if each call frees something.
const RECLAIMS_MAX: u32 = 16;
/// Part of a `max` by which [`OnLimit::Reserve`] may exceed it.
const RESERVE: u64 = 8;
/// Maximum number of children that a refusal visits.
const REFUSAL_CHILDREN_MAX: u64 = 64;

/// Treatment of a charge beyond a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnLimit {
    /// Refuse it.
    Refuse,
    /// Grant it up to the largest countable usage, and count [`Event::Overcharged`]. For a caller
    /// that must not fail.
    Overcharge,
    /// Grant it up to an eighth above a `max`, and count [`Event::Overcharged`]. The host does not
    /// reclaim. For a callback of reclaim, which may need memory before it frees more.
    Reserve,
}

impl OnLimit {
    /// Returns the most bytes that a group with a `max` may be charged.
    fn most(self, max: u64) -> u64 {
        match self {
            OnLimit::Refuse => max,
            OnLimit::Reserve => max.saturating_add(max / RESERVE),
            OnLimit::Overcharge => u64::MAX,
        }
    }
}

/// Reason for which a charge was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The group is gone.
    Gone,
    /// A limit was reached.
    Limit(Limit),
}

/// The limit that a charge was refused at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Limit {
    /// The group with the limit: the charged group or an ancestor.
    pub group: GroupId,
    /// Its `max`, in bytes.
    pub max: u64,
    /// Bytes charged to that group at the time of the refusal.
    pub charged: u64,
    /// Requested bytes.
    pub need: u64,
    /// The groups that hold most of the charged bytes, with the bytes charged to them, largest
    /// first: children of the group, or the group itself. If it has more than 64 children, they are
    /// the largest that refusals have visited so far.
    pub holders: [Option<(GroupId, u64)>; HOLDERS],
}

/// Obstacle to a charge.
pub(crate) enum ChargeFailure {
    Gone,
    /// The group at its limit.
    Full(GroupId),
}

impl Groups {
    /// Charges bytes to a payer from its stock on this CPU. Returns false if the stock has too few.
    /// Signal-safe on CPUs with sequences.
    #[inline(always)]
    pub fn take<P: Platform>(&self, platform: &P, payer: Payer, bytes: u64) -> bool {
        self.stocks.take(platform, payer, bytes)
    }

    /// Uncharges bytes of a payer into its stock on this CPU. Returns false if the stock has no
    /// room. Signal-safe on CPUs with sequences.
    #[inline(always)]
    pub fn give<P: Platform>(&self, platform: &P, payer: Payer, bytes: u64) -> bool {
        self.stocks.give(platform, payer, bytes)
    }

    /// Charges bytes to the group of a payer and all its ancestors. Returns the nanoseconds for
    /// which the caller is to be delayed because a group is above its `high`.
    ///
    /// This function does not sleep. The caller sleeps when it holds no lock.
    ///
    /// # Errors
    /// [`Refusal`] gives the reason. Nothing is charged then.
    #[inline]
    pub fn charge<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64, on_limit: OnLimit) -> Result<u64, Refusal> {
        if self.take(host.platform(), payer, bytes) {
            return Ok(0);
        }
        self.charge_slowly(host, payer, bytes, on_limit)
    }

    #[cold]
    #[inline(never)]
    fn charge_slowly<H: Reclaimer>(
        &self,
        host: &H,
        payer: Payer,
        bytes: u64,
        on_limit: OnLimit,
    ) -> Result<u64, Refusal> {
        let reclaims = if on_limit == OnLimit::Reserve { 0 } else { RECLAIMS_MAX };
        let charged = match self.look_for_room(host, payer, bytes, on_limit, reclaims) {
            Err(ChargeFailure::Full(_)) if on_limit != OnLimit::Refuse => {
                host.inside(|inside| self.try_charge(inside, host, payer, bytes, on_limit))
            }
            answer => answer,
        };
        match charged {
            Ok(charged) => Ok(self.delay(host, payer, charged)),
            Err(ChargeFailure::Gone) => Err(Refusal::Gone),
            Err(ChargeFailure::Full(group)) => Err(host.inside(|inside| self.refuse(inside, host, group, bytes))),
        }
    }

    /// Charges the counters. Without room, flushes caches, empties stocks, and reclaims. Returns
    /// the charged bytes.
    ///
    /// With [`OnLimit::Refuse`] caches are flushed at once, so no charge is refused for cached
    /// bytes. Otherwise a flush soon after another one may be skipped. The host reclaims at most
    /// `reclaims` times.
    pub(crate) fn look_for_room<H: Reclaimer>(
        &self,
        host: &H,
        payer: Payer,
        bytes: u64,
        on_limit: OnLimit,
        mut reclaims: u32,
    ) -> Result<u64, ChargeFailure> {
        let (mut drained, mut drains) = (None, 0);
        let pace = if on_limit == OnLimit::Refuse { FlushPace::AtOnce } else { FlushPace::Spaced };
        loop {
            let full = match host.inside(|inside| self.try_charge(inside, host, payer, bytes, OnLimit::Refuse)) {
                Err(ChargeFailure::Full(group)) => group,
                answer => return answer,
            };
            let drains_next = drained != Some(full) && drains < DEEPEST + RECLAIMS_MAX;
            let reclaims_next = reclaims > 0;
            // Evaluated only when stocks are empty, since stocked bytes count as used. Only then
            // are the protected bytes and the holders exact.
            let never = |inside: &Inside<'_>| {
                self.exceeds_max(inside, payer, bytes).or_else(|| self.blocked_by_min(inside, full, bytes))
            };
            if on_limit == OnLimit::Refuse
                && !drains_next
                && let Some(group) = host.inside(never)
            {
                if group != full {
                    self.drain_with(host, group, FlushPace::AtOnce);
                }
                return Err(ChargeFailure::Full(group));
            }
            if drains_next || reclaims_next {
                _ = host.inside(|inside| self.with(inside, full, |group| self.tell(inside, host, group, Event::Max)));
            }
            // Another full group, further up, has further descendants with stocks.
            if drains_next {
                drained = Some(full);
                drains += 1;
                self.drain_with(host, full, pace);
            } else if reclaims_next {
                // If nothing was freed, other threads may have made room meanwhile.
                let wanted = bytes.saturating_add(self.excess(host, full));
                let got = self.stalled(host, payer, || host.reclaim(full, wanted));
                reclaims = if got > 0 { reclaims - 1 } else { 0 };
                drained = drained.filter(|_| got == 0);
            } else {
                return Err(ChargeFailure::Full(full));
            }
        }
    }

    /// Returns the first group, upwards, with a `max` below the bytes to be charged.
    fn exceeds_max(&self, _: &Inside<'_>, payer: Payer, bytes: u64) -> Option<GroupId> {
        let _reading = self.rcu.enter();
        let slot = self.tree.owners.behind(payer.id())?.slot();
        self.tree.upwards(slot).find(|(_, group)| bytes > group.bound(Bound::Max)).map(|(_, group)| group.id())
    }

    /// Returns `full` if the `min` of its children leaves no room for `bytes` below its `max`.
    fn blocked_by_min(&self, inside: &Inside<'_>, full: GroupId, bytes: u64) -> Option<GroupId> {
        let kept = self.with(inside, full, |group| {
            let room = group.bound(Bound::Max).saturating_sub(bytes);
            self.tree.claimed_below(group, Bound::Min) > room
        });
        kept.is_ok_and(|kept| kept).then_some(full)
    }

    /// Charges a batch to the counters, or `bytes` if a batch does not fit, and stocks the excess.
    /// Returns the charged bytes.
    fn try_charge<H: Reclaimer>(
        &self,
        inside: &Inside<'_>,
        host: &H,
        payer: Payer,
        bytes: u64,
        on_limit: OnLimit,
    ) -> Result<u64, ChargeFailure> {
        let _reading = self.rcu.enter();
        let Some(IdTarget::Group(slot)) = self.tree.owners.behind(payer.id()) else { return Err(ChargeFailure::Gone) };
        // While a request waits, nothing is stocked.
        let is_waited_for = self.tree.upwards(slot).any(|(_, group)| group.has_waiters());
        let batch = if is_waited_for { bytes } else { bytes.max(BATCH) };
        let charged = match self.charge_ancestors(slot, batch, OnLimit::Refuse) {
            Ok(()) => batch,
            Err(full) => {
                let exact = if bytes < batch { self.charge_ancestors(slot, bytes, OnLimit::Refuse) } else { Err(full) };
                // `charge_ancestors` took room for a moment that a waiter may have needed.
                if self.tree.upwards(slot).any(|(_, group)| group.is_waited_for()) {
                    _ = self.admit(inside, host, payer.id());
                }
                match (exact, on_limit) {
                    (Ok(()), _) => {}
                    (Err(full), OnLimit::Refuse) => return Err(ChargeFailure::Full(full.id())),
                    (Err(full), OnLimit::Overcharge | OnLimit::Reserve) => {
                        self.charge_ancestors(slot, bytes, on_limit).map_err(|full| ChargeFailure::Full(full.id()))?;
                        self.tell(inside, host, full, Event::Overcharged);
                    }
                }
                bytes
            }
        };
        self.record_charge(host, slot, payer, charged);
        if charged > bytes
            && let Some((payer, bytes)) = self.stocks.put(host.platform(), payer, charged - bytes)
        {
            self.uncharge_counters(inside, host, payer, bytes);
        }
        Ok(charged)
    }

    /// Charges bytes to a payer without waiting: from this CPU's stock, or to the counters if they
    /// have room. Returns whether the bytes were charged.
    ///
    /// Does not reclaim, fence a CPU or delay the caller. Stocks of other CPUs and cached bytes are
    /// not used. The only system call wakes the thread that ticks.
    pub fn charge_at_once<H: Reclaimer>(&self, inside: &Inside<'_>, host: &H, payer: Payer, bytes: u64) -> bool {
        if self.take(host.platform(), payer, bytes) {
            return true;
        }
        let _reading = self.rcu.enter();
        let Some(IdTarget::Group(slot)) = self.tree.owners.behind(payer.id()) else { return false };
        match self.charge_ancestors(slot, bytes, OnLimit::Refuse) {
            Ok(()) => {
                self.record_charge(host, slot, payer, bytes);
                true
            }
            Err(full) => {
                self.tell(inside, host, full, Event::Refused);
                // `charge_ancestors` took room for a moment, as in `try_charge`. Here a tick admits
                // waiters.
                if self.tree.upwards(slot).any(|(_, group)| group.is_waited_for()) {
                    host.request_tick(inside);
                }
                false
            }
        }
    }

    /// Books charged bytes under a payer, and counts them. The caller has charged them to the group
    /// in this slot and to all ancestors.
    pub(crate) fn record_charge<H: Reclaimer>(&self, host: &H, slot: u32, payer: Payer, bytes: u64) {
        self.tree.owners.ref_bytes(payer.id(), bytes);
        self.tree.group(slot).inspect(|group| {
            self.count_charged(host, group, payer, bytes);
            self.count_shared(host, group, 2);
        });
    }

    /// Charges bytes to a group and all its ancestors. If one of them is at its limit,
    /// or at the largest countable charge, charges none, and returns that group.
    pub(crate) fn charge_ancestors(&self, slot: u32, bytes: u64, on_limit: OnLimit) -> Result<(), &Group> {
        for (full, group) in self.tree.upwards(slot) {
            if !group.try_add_usage(bytes, on_limit.most(group.bound(Bound::Max))) {
                self.tree
                    .upwards(slot)
                    .take_while(|(below, _)| *below != full)
                    .for_each(|(_, below)| _ = below.sub_usage(bytes));
                return Err(group);
            }
        }
        Ok(())
    }

    /// Returns the delay in nanoseconds of a thread that has charged `charged` bytes; 0 for none.
    /// Flushes caches first, so that only used bytes cause a delay. The caller must be outside the
    /// fork gate.
    pub(crate) fn delay<H: Reclaimer>(&self, host: &H, payer: Payer, charged: u64) -> u64 {
        // Returns the delay and the uppermost group above its `high`. If `tells`, counts
        // [`Event::High`] at each group above its `high`.
        let look = |inside: &Inside<'_>, tells: bool| {
            let _reading = self.rcu.enter();
            let (mut longest, mut top) = (0, None);
            let Some(behind) = self.tree.owners.behind(payer.id()) else { return (longest, top) };
            for (_, group) in self.tree.upwards(behind.slot()) {
                let (usage, high) = (group.usage(), group.bound(Bound::High));
                if usage > high {
                    longest = longest.max(delay(usage, high, charged));
                    top = Some(group.id());
                    if tells {
                        self.tell(inside, host, group, Event::High);
                    }
                }
            }
            (longest, top)
        };
        let (longest, top) = host.inside(|inside| look(inside, false));
        // Stocks are not emptied: the batch that filled a stock delays all small charges from it at
        // once.
        if let Some(top) = top.filter(|_| longest > 0) {
            host.flush(&|payer| self.is_below(payer.id(), top), FlushPace::AtOnce);
        }
        if top.is_some() { host.inside(|inside| look(inside, true)).0 } else { 0 }
    }

    /// Returns the groups that hold most of the bytes charged to a group. The caller must be within
    /// a read.
    ///
    /// Visits at most [`REFUSAL_CHILDREN_MAX`] children, and the children that held most before. If
    /// there are more, the next call visits the following ones. So a refusal has a bounded cost.
    /// Once refusals have visited all children, the answer has the largest child.
    fn holders<H: Reclaimer>(&self, host: &H, group: &Group) -> [Option<(GroupId, u64)>; HOLDERS] {
        let mut holders: [Option<(u32, GroupId, u64)>; HOLDERS] = [None; HOLDERS];
        let mut hold = |slot: u32, id: GroupId, bytes: u64| {
            let is_known = holders.iter().flatten().any(|&(_, known, _)| known == id);
            let is_less = |holder: &Option<(u32, GroupId, u64)>| holder.is_none_or(|(.., least)| least < bytes);
            if let (Some(place), true) = (holders.iter().position(is_less), bytes > 0 && !is_known) {
                holders[place..].rotate_right(1);
                holders[place] = Some((slot, id, bytes));
            }
        };
        let slot = |word: &AtomicU32| word.load(Ordering::Relaxed).checked_sub(1);
        let is_below = |child: &Group| {
            let parent = self.tree.group(child.parent.load(Ordering::Relaxed));
            parent.is_some_and(|parent| parent.id() == group.id()) && self.exists(child.id())
        };
        let found = |slot: u32| self.tree.group(slot).filter(|child| is_below(child));
        let from = slot(&group.looked_at).filter(|&slot| found(slot).is_some()).unwrap_or(NONE);
        let (mut visited, mut next, mut sum) = (0, NONE, 0_u64);
        for (slot, child) in self.tree.children_from(group, from) {
            if visited == REFUSAL_CHILDREN_MAX {
                next = slot;
                break;
            }
            visited += 1;
            sum = sum.saturating_add(child.usage());
            hold(slot, child.id(), child.usage());
        }
        self.tree.note_visits(visited);
        group.looked_at.store(next.wrapping_add(1), Ordering::Relaxed);
        for slot in group.counters.holders.iter().filter_map(slot) {
            found(slot).inspect(|child| hold(slot, child.id(), child.usage()));
        }
        for (place, holder) in group.counters.holders.iter().zip(holders) {
            place.store(holder.map_or(0, |(slot, ..)| slot + 1), Ordering::Relaxed);
        }
        // Bytes held by the group itself: its usage without that of its children. If not all
        // children were visited, the sum of the group's own counts.
        let own = match (from, next) {
            (NONE, NONE) => group.usage().saturating_sub(sum),
            _ => Kind::ALL.into_iter().map(|kind| self.of_kind(host, group, kind)).sum(),
        };
        let own = Some((group.id(), own)).filter(|&(_, bytes)| bytes > 0);
        let mut all = [None; HOLDERS + 1];
        all.iter_mut().zip(holders).for_each(|(place, holder)| *place = holder.map(|(_, id, bytes)| (id, bytes)));
        all[HOLDERS] = own;
        all.sort_unstable_by_key(|holder| core::cmp::Reverse(holder.map_or(0, |(_, bytes)| bytes)));
        core::array::from_fn(|place| all[place])
    }

    /// Counts a refusal, and returns it.
    #[cold]
    pub(crate) fn refuse<H: Reclaimer>(&self, inside: &Inside<'_>, host: &H, full: GroupId, need: u64) -> Refusal {
        let limit = self.with(inside, full, |group| {
            self.tell(inside, host, group, Event::Refused);
            let holders = self.holders(host, group);
            (group.usage(), group.bound(Bound::Max), holders)
        });
        let Ok((charged, max, holders)) = limit else { return Refusal::Gone };
        Refusal::Limit(Limit { group: full, max, charged, need, holders })
    }

    /// Uncharges bytes from a payer's group, or from its heir if the group is deleted. Waits only
    /// for mutexes that are held briefly, and for a fork.
    #[inline]
    pub fn uncharge<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64) {
        if !self.give(host.platform(), payer, bytes) {
            self.uncharge_slowly(host, payer, bytes);
        }
    }

    #[cold]
    #[inline(never)]
    fn uncharge_slowly<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64) {
        // Booked bytes keep the id's entry, so the id still leads to its group or an heir.
        let gone = !self.tree.owners.exists(payer.id());
        if gone && self.give(host.platform(), payer.of_heir(), bytes) {
            return;
        }
        host.inside(|inside| self.stock_or_uncharge(inside, host, payer, bytes));
    }

    /// Uncharges bytes from a payer's group, or from its heir if the group is deleted.
    pub fn uncharge_inside<H: Reclaimer>(&self, inside: &Inside<'_>, host: &H, payer: Payer, bytes: u64) {
        if !self.give(host.platform(), payer, bytes) {
            self.stock_or_uncharge(inside, host, payer, bytes);
        }
    }

    /// Stocks uncharged bytes, or takes them off the counters.
    fn stock_or_uncharge<H: Reclaimer>(&self, inside: &Inside<'_>, host: &H, payer: Payer, bytes: u64) {
        let out = {
            let _reading = self.rcu.enter();
            // Checked again within the read. If the group exists now, its grace period cannot end
            // before the read ends.
            let there = self.tree.owners.exists(payer.id());
            let payer = if there { payer } else { payer.of_heir() };
            if bytes > CAP || self.is_waited_for(payer.id()) {
                Some((payer, bytes))
            } else {
                self.stocks.put(host.platform(), payer, bytes)
            }
        };
        out.inspect(|&(payer, bytes)| self.uncharge_counters(inside, host, payer, bytes));
    }
}
