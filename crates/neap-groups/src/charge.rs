//! Charging: from the stock, from the counters, and what is tried at a limit before a charge is refused.
//!
//! Sits between whoever uses memory and [`Groups`]. The fast path is one restartable sequence. At a limit, in this order: what caches keep for all below it is put
//! back, and their stocks are emptied; the host is asked to reclaim from the group that is at its limit, as long as that brings something, after
//! which stocks are emptied again, since that is where what came back may be; then the charge is refused, with an error that says who holds the memory, or goes beyond the limit, counted, for
//! somebody who must not fail. No lock is held meanwhile, and the gate is not held while the host reclaims. What comes back always finds its
//! way and waits for nobody. What can never be granted, whatever is given back, is refused before the host is asked: more than a `max`, or more than a `max` leaves
//! beside what `min` protects below it. A charge takes what there is, also from under those who wait for room (`wait.rs`); it stocks nothing
//! meanwhile, and neither does what comes back, so that they hear of it.
//!
//! Source: Linux `mm/memcontrol.c` (`try_charge`), by description.

use crate::group::{Bound, DEEPEST, Event, Group, NONE};
use crate::groups::{Groups, Reclaimer};
use crate::id::{GroupId, Kind, Payer};
use crate::owners::Behind;
use crate::protection::delay;
use crate::stock::{BATCH, CAP};
use core::sync::atomic::{AtomicU32, Ordering};
use neap_base::Platform;

/// How often reclaim is asked, for one charge, while it brings something.
const RETRIES: u32 = 16;
/// The part of a `max` that [`How::Reserve`] may go beyond it.
const RESERVE: u64 = 8;
/// Groups that a refusal names.
pub(crate) const HOLDERS: usize = 3;
/// Groups right below one that a refusal looks at.
const LOOKS: u64 = 64;

/// What becomes of a charge beyond a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// It is refused.
    Refuse,
    /// It is granted and counted, as far as can be counted: by somebody who must not fail.
    Overcharge,
    /// It is granted and counted up to an eighth of a `max` beyond that, and the host is not asked:
    /// by a callback of reclaim, which frees more than it needs, but not first.
    Reserve,
}

impl How {
    /// How much a group may be charged for that has a `max`.
    fn most(self, max: u64) -> u64 {
        match self {
            How::Refuse => max,
            How::Reserve => max.saturating_add(max / RESERVE),
            How::Overcharge => u64::MAX,
        }
    }
}

/// Why a charge was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The group is gone.
    Gone,
    /// A limit was reached.
    Limit(Limit),
}

/// The limit that a charge was refused at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limit {
    /// Whose limit it is: the group that was charged, or one above it.
    pub group: GroupId,
    /// Its `max`, in bytes.
    pub max: u64,
    /// What it was charged for.
    pub charged: u64,
    /// What was asked for.
    pub need: u64,
    /// Who holds most of it: groups right below it, or itself, with what is charged to them,
    /// largest first. Of more than 64 groups below it, the largest of those that refusals have
    /// looked at so far.
    pub holders: [Option<(GroupId, u64)>; HOLDERS],
}

/// What stands against a charge.
pub(crate) enum Against {
    Gone,
    /// The group at its limit.
    Full(GroupId),
}

impl Groups {
    /// Charges bytes to a payer from what is stocked for it on this CPU, or not at all. Signal-safe where there are sequences.
    #[inline(always)]
    pub fn take<P: Platform>(&self, platform: &P, payer: Payer, bytes: u64) -> bool {
        self.stocks.take(platform, payer, bytes)
    }

    /// Takes bytes back that were charged to a payer, into what is stocked for it on this CPU, or not at all. Signal-safe where there are sequences.
    #[inline(always)]
    pub fn give<P: Platform>(&self, platform: &P, payer: Payer, bytes: u64) -> bool {
        self.stocks.give(platform, payer, bytes)
    }

    /// Charges bytes to the group of a payer, and all above it. Answers for how many nanoseconds the caller is to be held up, because
    /// a group is above its `high`; that is the caller's to do, where it holds nothing.
    ///
    /// # Errors
    /// See [`Refusal`]; nothing is charged then.
    #[inline]
    pub fn charge<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64, how: How) -> Result<u64, Refusal> {
        if self.take(host.platform(), payer, bytes) {
            return Ok(0);
        }
        self.charge_slowly(host, payer, bytes, how)
    }

    #[cold]
    #[inline(never)]
    fn charge_slowly<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64, how: How) -> Result<u64, Refusal> {
        let charged = match self.look_for_room(host, payer, bytes, how, how != How::Reserve) {
            Err(Against::Full(_)) if how != How::Refuse => host.inside(|| self.attempt(host, payer, bytes, how)),
            answer => answer,
        };
        match charged {
            Ok(charged) => Ok(self.delay(host, payer, charged)),
            Err(Against::Gone) => Err(Refusal::Gone),
            Err(Against::Full(group)) => Err(host.inside(|| self.refuse(host, group, bytes))),
        }
    }

    /// Charges the counters, and asks for room where there is none; answers how much was charged.
    /// What nobody uses refuses nobody: so caches give up what they keep at once, unless the answer
    /// is only `how` the charge is counted. The host is asked for memory where the caller `asks`.
    pub(crate) fn look_for_room<H: Reclaimer>(
        &self,
        host: &H,
        payer: Payer,
        bytes: u64,
        how: How,
        asks: bool,
    ) -> Result<u64, Against> {
        let (mut tries, mut drained, mut drains) = (0, None, 0);
        loop {
            let full = match host.inside(|| self.attempt(host, payer, bytes, How::Refuse)) {
                Err(Against::Full(group)) => group,
                answer => return answer,
            };
            let drains_next = drained != Some(full) && drains < DEEPEST + RETRIES;
            let reclaims_next = asks && tries < RETRIES;
            // When stocks, which count as used, are empty: so it is known what is protected, and a refusal says who holds what.
            let never = || self.too_small(payer, bytes).or_else(|| self.is_kept(full, bytes));
            if how == How::Refuse
                && !drains_next
                && let Some(group) = host.inside(never)
            {
                if group != full {
                    self.drain_with(host, group, true);
                }
                return Err(Against::Full(group));
            }
            if drains_next || reclaims_next {
                let tell = |group: &Group| self.tell(host, group, Event::Max);
                _ = host.inside(|| self.with(full, tell));
            }
            // Another limit, further up, is reached with other stocks.
            if drains_next {
                drained = Some(full);
                drains += 1;
                self.drain_with(host, full, how == How::Refuse);
            } else if reclaims_next {
                // Where it got nothing others may have made room meanwhile.
                let got = host.reclaim(full, bytes.saturating_add(self.excess(host, full)));
                tries = if got > 0 { tries + 1 } else { RETRIES };
                drained = drained.filter(|_| got == 0);
            } else {
                return Err(Against::Full(full));
            }
        }
    }

    /// A group on the way up whose `max` is less than what is to be charged. Inside the gate.
    fn too_small(&self, payer: Payer, bytes: u64) -> Option<GroupId> {
        let _reading = self.rcu.enter();
        let slot = self.tree.owners.behind(payer.id())?.slot();
        self.tree.upwards(slot).find(|(_, group)| bytes > group.bound(Bound::Max)).map(|(_, group)| group.id())
    }

    /// The group that is full, if what `min` protects right below it leaves no room for so many bytes. Inside the gate.
    fn is_kept(&self, full: GroupId, bytes: u64) -> Option<GroupId> {
        let kept = self.with(full, |group| {
            let room = group.bound(Bound::Max).saturating_sub(bytes);
            self.tree.claimed_below(group, Bound::Min) > room
        });
        kept.is_ok_and(|kept| kept).then_some(full)
    }

    /// Charges the counters, and stocks what is too much; answers how much was charged. Inside the gate.
    fn attempt<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64, how: How) -> Result<u64, Against> {
        let _reading = self.rcu.enter();
        let Some(Behind::Group(slot)) = self.tree.owners.behind(payer.id()) else { return Err(Against::Gone) };
        // While somebody waits nothing is stocked.
        let is_waited_for = self.tree.upwards(slot).any(|(_, group)| group.has_waiters());
        let batch = if is_waited_for { bytes } else { bytes.max(BATCH) };
        let charged = match self.raise(slot, batch, How::Refuse) {
            Ok(()) => batch,
            Err(full) => {
                let exact = if bytes < batch { self.raise(slot, bytes, How::Refuse) } else { Err(full) };
                // What was raised on the way up was missing to others for a moment.
                if self.tree.upwards(slot).any(|(_, group)| group.is_waited_for()) {
                    _ = self.admit(host, payer.id());
                }
                match (exact, how) {
                    (Ok(()), _) => {}
                    (Err(full), How::Refuse) => return Err(Against::Full(full.id())),
                    (Err(full), How::Overcharge | How::Reserve) => {
                        self.raise(slot, bytes, how).map_err(|full| Against::Full(full.id()))?;
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

    /// Charges bytes to a payer for somebody who does not wait: from this CPU's stock, or from what the counters have left. No room is looked for
    /// and no CPU fenced, so what other CPUs have in stock, and what caches keep, is not to be had; nobody is held up, and no system call
    /// made but one that wakes who ticks. Whether there was as much. Inside the gate.
    pub fn charge_at_once<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64) -> bool {
        if self.take(host.platform(), payer, bytes) {
            return true;
        }
        let _reading = self.rcu.enter();
        let Some(Behind::Group(slot)) = self.tree.owners.behind(payer.id()) else { return false };
        match self.raise(slot, bytes, How::Refuse) {
            Ok(()) => {
                self.book(host, slot, payer, bytes);
                true
            }
            Err(full) => {
                self.tell(host, full, Event::Refused);
                // As in `attempt`, but a tick lets them in.
                if self.tree.upwards(slot).any(|(_, group)| group.is_waited_for()) {
                    host.come_soon();
                }
                false
            }
        }
    }

    /// Books bytes under a payer that its group, in this slot, and all above it have been charged for.
    pub(crate) fn book<H: Reclaimer>(&self, host: &H, slot: u32, payer: Payer, bytes: u64) {
        self.tree.owners.book(payer.id(), bytes);
        self.tree.group(slot).inspect(|group| {
            self.count_charged(host, group, payer, bytes);
            self.count_shared(host, group, 2);
        });
    }

    /// Raises what a group and all above it are charged for, or nothing of it; then answers who is at the limit, or at the end of what can
    /// be counted.
    pub(crate) fn raise(&self, slot: u32, bytes: u64, how: How) -> Result<(), &Group> {
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

    /// How long somebody who has charged so much is held up, for what is used: before anybody is, caches give up what they keep. Outside
    /// the gate.
    pub(crate) fn delay<H: Reclaimer>(&self, host: &H, payer: Payer, charged: u64) -> u64 {
        // The delay, and the uppermost group that is above its `high`; and whether these are told.
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
        // Not the stocks: a stock is what small charges are held up for together.
        if let Some(top) = top.filter(|_| longest > 0) {
            host.flush(&|payer| self.is_below(payer.id(), top), true);
        }
        if top.is_some() { host.inside(|| look(true)).0 } else { 0 }
    }

    /// Who holds most of what a group is charged for. Looks at [`LOOKS`] of the groups right below
    /// it: where there are more, at others the next time, beside those that held most before. So a
    /// refusal costs the same however many there are, and the largest is known once all were looked
    /// at. Within a read.
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
        // What it holds itself: what is not below it, or, where not all below it were looked at,
        // what was counted for it.
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

    /// A refusal, counted.
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

    /// Takes bytes back that were charged to a payer: to its group, or to the heir if it is gone. Never waits but for a fork under way.
    #[inline]
    pub fn uncharge<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64) {
        if !self.give(host.platform(), payer, bytes) {
            self.uncharge_slowly(host, payer, bytes);
        }
    }

    #[cold]
    #[inline(never)]
    fn uncharge_slowly<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64) {
        // The bytes are booked, so the id is what it was when they were charged.
        let gone = !self.tree.owners.is_there(payer.id());
        if gone && self.give(host.platform(), payer.of_heir(), bytes) {
            return;
        }
        host.inside(|| self.put_or_settle(host, payer, bytes));
    }

    /// [`Groups::uncharge`] for somebody who is inside the gate.
    pub fn uncharge_inside<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64) {
        if !self.give(host.platform(), payer, bytes) {
            self.put_or_settle(host, payer, bytes);
        }
    }

    /// Stocks bytes that came back, or takes them off the counters. Inside the gate.
    fn put_or_settle<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64) {
        let out = {
            let _reading = self.rcu.enter();
            // Looked at again within the section: a group that is there cannot have ended its grace period before it is over.
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
