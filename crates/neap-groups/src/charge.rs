//! Charging: from the stock, from the counters, and the steps at a limit before a charge is
//! refused.
//!
//! # Design
//!
//! The fast path is one restartable sequence. At a limit, in this order:
//!
//! 1. Caches of the group at its limit and its descendants are flushed, and their stocks emptied.
//! 2. The host reclaims from that group, as long as that frees anything. Stocks are emptied again
//!    afterwards, since freed bytes may be there.
//! 3. The charge is refused, with an error that names the groups that hold the memory. Or it
//!    exceeds the limit and is counted ([`OnLimit`]).
//!
//! A charge that can never be granted is refused before the host is asked. It exceeds a `max`, or
//! the part of a `max` that `min` does not protect below it.
//!
//! An uncharge always succeeds and does not wait. A charge takes available bytes, even while other
//! threads wait for room (`wait.rs`). Meanwhile neither charges nor uncharges stock bytes, so
//! waiters learn of uncharged bytes.
//!
//! # Locking
//!
//! No lock is held in these steps, and the fork gate is not held while the host reclaims.
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

/// Maximum number of reclaim calls for one charge that frees something each time.
const RETRIES: u32 = 16;
/// Part of a `max` by which [`OnLimit::Reserve`] may exceed it.
const RESERVE: u64 = 8;
/// Maximum number of children that a refusal visits.
const LOOKS: u64 = 64;

/// Treatment of a charge beyond a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnLimit {
    /// Refuse it.
    Refuse,
    /// Grant and count it, as far as can be counted: for a caller that must not fail.
    Overcharge,
    /// Grant and count it up to an eighth of a `max` beyond that, without asking the host: for a
    /// callback of reclaim, which needs memory before it frees more.
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
    /// The groups that hold most of it: its children, or itself, with the bytes charged to them,
    /// largest first. Of more than 64 children, the largest of those that refusals have visited so
    /// far.
    pub holders: [Option<(GroupId, u64)>; HOLDERS],
}

/// Obstacle to a charge.
pub(crate) enum ChargeFailure {
    Gone,
    /// The group at its limit.
    Full(GroupId),
}

impl Groups {
    /// Charges bytes to a payer from its stock on this CPU; returns false if that has too few.
    /// Signal-safe on CPUs with sequences.
    #[inline(always)]
    pub fn take<P: Platform>(&self, platform: &P, payer: Payer, bytes: u64) -> bool {
        self.stocks.take(platform, payer, bytes)
    }

    /// Uncharges bytes of a payer into its stock on this CPU; returns false if that has no room.
    /// Signal-safe on CPUs with sequences.
    #[inline(always)]
    pub fn give<P: Platform>(&self, platform: &P, payer: Payer, bytes: u64) -> bool {
        self.stocks.give(platform, payer, bytes)
    }

    /// Charges bytes to the group of a payer and all its ancestors. Returns the nanoseconds for
    /// which the caller is to be delayed because a group is above its `high`.
    ///
    /// The caller sleeps itself, where it holds nothing.
    ///
    /// # Errors
    /// See [`Refusal`]; nothing is charged then.
    #[inline]
    pub fn charge<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64, how: OnLimit) -> Result<u64, Refusal> {
        if self.take(host.platform(), payer, bytes) {
            return Ok(0);
        }
        self.charge_slowly(host, payer, bytes, how)
    }

    #[cold]
    #[inline(never)]
    fn charge_slowly<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64, how: OnLimit) -> Result<u64, Refusal> {
        let reclaims = if how == OnLimit::Reserve { 0 } else { RETRIES };
        let charged = match self.look_for_room(host, payer, bytes, how, reclaims) {
            Err(ChargeFailure::Full(_)) if how != OnLimit::Refuse => {
                host.inside(|| self.attempt(host, payer, bytes, how))
            }
            answer => answer,
        };
        match charged {
            Ok(charged) => Ok(self.delay(host, payer, charged)),
            Err(ChargeFailure::Gone) => Err(Refusal::Gone),
            Err(ChargeFailure::Full(group)) => Err(host.inside(|| self.refuse(host, group, bytes))),
        }
    }

    /// Charges the counters, and makes room where there is none. Returns the charged bytes.
    ///
    /// Cached bytes refuse no charge: caches are flushed at once, unless a failure would only be
    /// counted, by `how`. The host is asked for memory at most `reclaims` times.
    pub(crate) fn look_for_room<H: Reclaimer>(
        &self,
        host: &H,
        payer: Payer,
        bytes: u64,
        how: OnLimit,
        mut reclaims: u32,
    ) -> Result<u64, ChargeFailure> {
        let (mut drained, mut drains) = (None, 0);
        let pace = if how == OnLimit::Refuse { FlushPace::AtOnce } else { FlushPace::Spaced };
        loop {
            let full = match host.inside(|| self.attempt(host, payer, bytes, OnLimit::Refuse)) {
                Err(ChargeFailure::Full(group)) => group,
                answer => return answer,
            };
            let drains_next = drained != Some(full) && drains < DEEPEST + RETRIES;
            let reclaims_next = reclaims > 0;
            // Only when stocks, which count as used, are empty. The protected bytes are known then,
            // and a refusal names the holders.
            let never = || self.too_small(payer, bytes).or_else(|| self.is_kept(full, bytes));
            if how == OnLimit::Refuse
                && !drains_next
                && let Some(group) = host.inside(never)
            {
                if group != full {
                    self.drain_with(host, group, FlushPace::AtOnce);
                }
                return Err(ChargeFailure::Full(group));
            }
            if drains_next || reclaims_next {
                let tell = |group: &Group| self.tell(host, group, Event::Max);
                _ = host.inside(|| self.with(full, tell));
            }
            // Another limit, further up, is reached with other stocks.
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

    /// Returns the first group, upwards, with a `max` below the bytes to be charged. The caller
    /// must be inside the fork gate.
    fn too_small(&self, payer: Payer, bytes: u64) -> Option<GroupId> {
        let _reading = self.rcu.enter();
        let slot = self.tree.owners.behind(payer.id())?.slot();
        self.tree.upwards(slot).find(|(_, group)| bytes > group.bound(Bound::Max)).map(|(_, group)| group.id())
    }

    /// Returns `full` if `min` of its children leaves no room for so many bytes. The caller must be
    /// inside the fork gate.
    fn is_kept(&self, full: GroupId, bytes: u64) -> Option<GroupId> {
        let kept = self.with(full, |group| {
            let room = group.bound(Bound::Max).saturating_sub(bytes);
            self.tree.claimed_below(group, Bound::Min) > room
        });
        kept.is_ok_and(|kept| kept).then_some(full)
    }

    /// Charges the counters and stocks the excess. Returns the charged bytes. The caller must be
    /// inside the fork gate.
    fn attempt<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64, how: OnLimit) -> Result<u64, ChargeFailure> {
        let _reading = self.rcu.enter();
        let Some(IdTarget::Group(slot)) = self.tree.owners.behind(payer.id()) else { return Err(ChargeFailure::Gone) };
        // While a request waits, nothing is stocked.
        let is_waited_for = self.tree.upwards(slot).any(|(_, group)| group.has_waiters());
        let batch = if is_waited_for { bytes } else { bytes.max(BATCH) };
        let charged = match self.raise(slot, batch, OnLimit::Refuse) {
            Ok(()) => batch,
            Err(full) => {
                let exact = if bytes < batch { self.raise(slot, bytes, OnLimit::Refuse) } else { Err(full) };
                // The counters raised on the way up were missing to waiters for a moment.
                if self.tree.upwards(slot).any(|(_, group)| group.is_waited_for()) {
                    _ = self.admit(host, payer.id());
                }
                match (exact, how) {
                    (Ok(()), _) => {}
                    (Err(full), OnLimit::Refuse) => return Err(ChargeFailure::Full(full.id())),
                    (Err(full), OnLimit::Overcharge | OnLimit::Reserve) => {
                        self.raise(slot, bytes, how).map_err(|full| ChargeFailure::Full(full.id()))?;
                        self.tell(host, full, Event::Overcharged);
                    }
                }
                bytes
            }
        };
        self.book(host, slot, payer, charged);
        if charged > bytes
            && let Some((payer, bytes)) = self.stocks.put(host.platform(), payer, charged - bytes)
        {
            self.settle(host, payer, bytes);
        }
        Ok(charged)
    }

    /// Charges bytes to a payer without waiting: from this CPU's stock, or from the room that the
    /// counters have. Returns whether there was enough. The caller must be inside the fork gate.
    ///
    /// Does not reclaim, fence a CPU or delay the caller. Stocks of other CPUs and cached bytes are
    /// not used. The only system call wakes the thread that ticks.
    pub fn charge_at_once<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64) -> bool {
        if self.take(host.platform(), payer, bytes) {
            return true;
        }
        let _reading = self.rcu.enter();
        let Some(IdTarget::Group(slot)) = self.tree.owners.behind(payer.id()) else { return false };
        match self.raise(slot, bytes, OnLimit::Refuse) {
            Ok(()) => {
                self.book(host, slot, payer, bytes);
                true
            }
            Err(full) => {
                self.tell(host, full, Event::Refused);
                // As in `attempt`, but a tick admits waiters.
                if self.tree.upwards(slot).any(|(_, group)| group.is_waited_for()) {
                    host.come_soon();
                }
                false
            }
        }
    }

    /// Books bytes under a payer that were charged to its group, in this slot, and its ancestors.
    pub(crate) fn book<H: Reclaimer>(&self, host: &H, slot: u32, payer: Payer, bytes: u64) {
        self.tree.owners.book(payer.id(), bytes);
        self.tree.group(slot).inspect(|group| {
            self.count_charged(host, group, payer, bytes);
            self.count_shared(host, group, 2);
        });
    }

    /// Raises the charged bytes of a group and all its ancestors, or of none of them. Then it
    /// returns the group that is at its limit, or at the largest countable charge.
    pub(crate) fn raise(&self, slot: u32, bytes: u64, how: OnLimit) -> Result<(), &Group> {
        for (full, group) in self.tree.upwards(slot) {
            if !group.raise(bytes, how.most(group.bound(Bound::Max))) {
                self.tree
                    .upwards(slot)
                    .take_while(|(below, _)| *below != full)
                    .for_each(|(_, below)| _ = below.lower(bytes));
                return Err(group);
            }
        }
        Ok(())
    }

    /// Returns the delay in nanoseconds of a thread that has charged `charged` bytes; 0 for none.
    /// Caches are flushed before, so only used bytes delay. The caller must be outside the fork
    /// gate.
    pub(crate) fn delay<H: Reclaimer>(&self, host: &H, payer: Payer, charged: u64) -> u64 {
        // Returns the delay and the uppermost group above its `high`; tells these groups if
        // `tells`.
        let look = |tells: bool| {
            let _reading = self.rcu.enter();
            let (mut longest, mut top) = (0, None);
            let Some(behind) = self.tree.owners.behind(payer.id()) else { return (longest, top) };
            for (_, group) in self.tree.upwards(behind.slot()) {
                let (usage, high) = (group.usage(), group.bound(Bound::High));
                if usage > high {
                    longest = longest.max(delay(usage, high, charged));
                    top = Some(group.id());
                    if tells {
                        self.tell(host, group, Event::High);
                    }
                }
            }
            (longest, top)
        };
        let (longest, top) = host.inside(|| look(false));
        // Not the stocks: small charges are delayed together, for a stock.
        if let Some(top) = top.filter(|_| longest > 0) {
            host.flush(&|payer| self.is_below(payer.id(), top), FlushPace::AtOnce);
        }
        if top.is_some() { host.inside(|| look(true)).0 } else { 0 }
    }

    /// Returns the groups that hold most of the bytes charged to a group. The caller must be within
    /// a read.
    ///
    /// Visits [`LOOKS`] children; if there are more, other ones at the next call, beside those that
    /// held most before. A refusal thus has a bounded cost, and the largest child is known once all
    /// were visited.
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
            parent.is_some_and(|parent| parent.id() == group.id()) && self.is_there(child.id())
        };
        let found = |slot: u32| self.tree.group(slot).filter(|child| is_below(child));
        let from = slot(&group.looked_at).filter(|&slot| found(slot).is_some()).unwrap_or(NONE);
        let (mut looks, mut next, mut sum) = (0, NONE, 0_u64);
        for (slot, child) in self.tree.children_from(group, from) {
            if looks == LOOKS {
                next = slot;
                break;
            }
            looks += 1;
            sum = sum.saturating_add(child.usage());
            hold(slot, child.id(), child.usage());
        }
        self.tree.note_looks(looks);
        group.looked_at.store(next.wrapping_add(1), Ordering::Relaxed);
        for slot in group.counters.holders.iter().filter_map(slot) {
            found(slot).inspect(|child| hold(slot, child.id(), child.usage()));
        }
        for (place, holder) in group.counters.holders.iter().zip(holders) {
            place.store(holder.map_or(0, |(slot, ..)| slot + 1), Ordering::Relaxed);
        }
        // Bytes held by the group itself: usage without that of its children; or its own counts, if
        // not all children were visited.
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
    pub(crate) fn refuse<H: Reclaimer>(&self, host: &H, full: GroupId, need: u64) -> Refusal {
        let limit = self.with(full, |group| {
            self.tell(host, group, Event::Refused);
            let holders = self.holders(host, group);
            (group.usage(), group.bound(Bound::Max), holders)
        });
        let Ok((charged, max, holders)) = limit else { return Refusal::Gone };
        Refusal::Limit(Limit { group: full, max, charged, need, holders })
    }

    /// Uncharges bytes of a payer: from its group, or from the heir of a deleted one. Never waits
    /// but for a fork.
    #[inline]
    pub fn uncharge<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64) {
        if !self.give(host.platform(), payer, bytes) {
            self.uncharge_slowly(host, payer, bytes);
        }
    }

    #[cold]
    #[inline(never)]
    fn uncharge_slowly<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64) {
        // The bytes are booked, so the id still has the entry under which they were charged.
        let gone = !self.tree.owners.is_there(payer.id());
        if gone && self.give(host.platform(), payer.of_heir(), bytes) {
            return;
        }
        host.inside(|| self.put_or_settle(host, payer, bytes));
    }

    /// Uncharges bytes of a payer. Differs from [`Groups::uncharge`]: the caller is inside the fork
    /// gate.
    pub fn uncharge_inside<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64) {
        if !self.give(host.platform(), payer, bytes) {
            self.put_or_settle(host, payer, bytes);
        }
    }

    /// Stocks uncharged bytes, or takes them off the counters. The caller must be inside the fork
    /// gate.
    fn put_or_settle<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64) {
        let out = {
            let _reading = self.rcu.enter();
            // Checked again within the section: a group that exists now cannot end its grace period
            // before the section ends.
            let there = self.tree.owners.is_there(payer.id());
            let payer = if there { payer } else { payer.of_heir() };
            if bytes > CAP || self.is_waited_for(payer.id()) {
                Some((payer, bytes))
            } else {
                self.stocks.put(host.platform(), payer, bytes)
            }
        };
        out.inspect(|&(payer, bytes)| self.settle(host, payer, bytes));
    }
}
