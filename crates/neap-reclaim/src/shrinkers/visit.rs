//! A visit: a thread asks the shrinkers that may have objects of a group on a node to free some.
//!
//! # Design
//!
//! The caller of a visit, a [pass](crate::reclaim), chooses group and node. Callbacks run with no
//! lock held, outside the fork gate, and never inside one another. A visitor reads bits and takes
//! references. It clears a bit if a callback reported no objects, and stores deferred work. The
//! visitor bounds the numbers of scanned and freed objects that a callback reports. A scan that
//! reports no scanned objects ends the visit of its shrinker.
//!
//! # Concurrency
//!
//! While callbacks run, the group may be deleted and its slot reused:
//!
//! 1. A callback reports no objects of the group, and the visitor clears the bit.
//! 2. The group is deleted. A new group in the slot finds the bit still set, or the parent gets no
//!    bit, since it is cleared.
//! 3. The visitor asks again, for the deleted group, which has no objects, and leaves the bit
//!    cleared.
//!
//! So the visitor then checks whether the group is still in the slot and is not being deleted. If
//! not, it sets the bit again, for a new group in the slot. It also marks the heir, and moves
//! deferred work to the heir.

use super::call_depth::{CallFrame, is_calling};
use super::lifecycle::{LIVE, PREPARED};
use super::registry::Shrinkers;
use super::shrinker::{Asked, DONE, EMPTY, STOP, Shrinker, ShrinkerId, Total};
use super::shrinker_info::{BLOCK, UNIT, UnitRef};
use super::work::{ScanPressure, Work};
use crate::host::Host;
use core::ops::Range;
use core::pin::pin;
use core::sync::atomic::{Ordering, fence};
use neap_groups::GroupId;

/// Supervisor of callbacks: it measures their time, and decides when a visit has freed enough.
pub trait Caller {
    /// Returns whether a callback may be called. A visit asks before each callback. After false, it
    /// defers the rest of the work.
    ///
    /// `again` is true if the previous callback was one of the same shrinker, and ended a moment
    /// ago.
    fn began(&self, _id: ShrinkerId, _again: bool) -> bool {
        true
    }

    /// Returns the end of the pass, in nanoseconds of the platform's clock; `u64::MAX` for no end.
    fn deadline(&self) -> u64 {
        u64::MAX
    }

    /// Returns whether enough was freed for a pass that needs `need` bytes. A visit asks between
    /// callbacks, once something was freed. `said` is the number of freed bytes that callbacks
    /// reported in this visit.
    fn has_enough(&self, _need: u64, _said: u64) -> bool {
        false
    }

    /// Returns the duration of the callback that has just ended, in nanoseconds, for reports; 0 if
    /// unknown.
    fn ended(&self, _id: ShrinkerId, _asked: &Asked, _answer: u64) -> u64 {
        0
    }
}

/// No supervision.
impl Caller for () {}

/// Result of a visit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Visited {
    /// Number of calls of callbacks.
    pub calls: u64,
    /// Scanned objects, as reported.
    pub scanned: u64,
    /// Freed objects, as reported.
    pub freed: u64,
    /// Freed bytes, as reported.
    pub freed_bytes: u64,
    /// Objects that count as scanned, though the callback may not have examined them. It freed
    /// none, and set [`Asked::unsure`].
    pub unsure: u64,
    /// Number of scans that scanned nothing, and of counts that could not tell.
    pub stops: u64,
    /// Number of written words that other visitors of this group may read: bits and deferred work.
    pub written: u64,
}

impl Visited {
    /// Adds the result of another visit.
    pub fn add(&mut self, other: Visited) {
        self.calls += other.calls;
        self.scanned = self.scanned.saturating_add(other.scanned);
        self.freed = self.freed.saturating_add(other.freed);
        self.freed_bytes = self.freed_bytes.saturating_add(other.freed_bytes);
        self.unsure = self.unsure.saturating_add(other.unsure);
        self.stops += other.stops;
        self.written += other.written;
    }
}

/// Answer of a shrinker.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Had {
    /// It has no objects until it marks the group again.
    Nothing,
    /// It has objects, or that is unknown.
    Something,
}

/// A visit that runs.
struct Visit<'v, H: Host, C: Caller> {
    shrinkers: &'v Shrinkers,
    host: &'v H,
    caller: &'v C,
    group: GroupId,
    slot: u32,
    node: u32,
    pressure: ScanPressure,
    visited: &'v mut Visited,
}

impl Shrinkers {
    /// Visits the shrinkers of a group on a node. `slot` is the group's slot. Does nothing inside a
    /// callback.
    // Inlined: the result is added up word by word. A copy of the whole result would wait for these
    // stores.
    #[inline(always)]
    pub fn visit<H: Host, C: Caller>(
        &self,
        host: &H,
        caller: &C,
        group: GroupId,
        slot: u32,
        node: u32,
        pressure: ScanPressure,
    ) -> Visited {
        let mut visited = Visited::default();
        if !is_calling() {
            Visit { shrinkers: self, host, caller, group, slot, node, pressure, visited: &mut visited }.all();
        }
        visited
    }

    /// Asks a shrinker for its number of objects of a group on a node. `None` if it is not
    /// live, `caller` refused, or the thread is inside a callback.
    pub fn count<H: Host, C: Caller>(
        &self,
        host: &H,
        caller: &C,
        id: ShrinkerId,
        group: GroupId,
        node: u32,
    ) -> Option<u64> {
        let mut asked = Asked { deadline: caller.deadline(), ..Asked::of(group, node) };
        let count = |calls: &mut Calls<'_, C>| match may_have(host, calls.shrinker, group) {
            true => calls.count(&mut asked),
            false => Some(EMPTY),
        };
        self.call(host, caller, id, count)?.map(|answer| if answer >= DONE { 0 } else { answer })
    }

    /// Lets a shrinker scan `objects` objects of a group on a node, in batches. `None` if it is
    /// not live, or the thread is inside a callback.
    pub fn scan<H: Host, C: Caller>(
        &self,
        host: &H,
        caller: &C,
        id: ShrinkerId,
        group: GroupId,
        node: u32,
        objects: u64,
    ) -> Option<Visited> {
        let mut asked = Asked { deadline: caller.deadline(), ..Asked::of(group, node) };
        self.call(host, caller, id, |calls| {
            // No more than requested count as scanned. The host's own caches may free more at once.
            calls.most = if calls.shrinker.own() { u64::MAX } else { objects };
            asked.scanned = 0;
            let mut left = objects;
            while left > 0 && calls.scan(&mut asked, left.min(calls.batch())) {
                left = left.saturating_sub(asked.scanned);
            }
            calls.visited
        })
    }

    /// Calls a shrinker by id, with a reference to it.
    fn call<H: Host, C: Caller, R>(
        &self,
        host: &H,
        caller: &C,
        id: ShrinkerId,
        f: impl FnOnce(&mut Calls<'_, C>) -> R,
    ) -> Option<R> {
        let shrinker = self.at(id.index()).filter(|_| !is_calling())?;
        self.referred(host, caller, id.index(), shrinker, |calls| shrinker.is(id).then(|| f(calls)))?
    }

    /// Takes a reference to a shrinker, and calls `f` within a [`CallFrame`]. Then adds the calls
    /// to the shrinker's counts. Returns `None` if the shrinker is not live.
    #[inline]
    fn referred<'s, H: Host, C: Caller, R>(
        &self,
        host: &H,
        caller: &'s C,
        index: u32,
        shrinker: &'s Shrinker,
        f: impl FnOnce(&mut Calls<'s, C>) -> R,
    ) -> Option<R> {
        let running = self.running.enter();
        if !shrinker.try_get() {
            return None;
        }
        let frame = pin!(CallFrame::new(core::ptr::from_ref(self).addr(), index));
        let inside = frame.enter();
        let mut calls = Calls::new(shrinker, shrinker.id(index), caller);
        let answer = f(&mut calls);
        calls.book();
        drop(inside);
        drop(running);
        self.put(host, index, shrinker);
        Some(answer)
    }
}

/// Returns whether a shrinker may have objects of a group. A shrinker that belongs to one group
/// ([`Shrinkers::belongs_to`]) has objects of that group alone, or of its heir.
fn may_have<H: Host>(host: &H, shrinker: &Shrinker, group: GroupId) -> bool {
    let Some(of) = shrinker.of() else { return true };
    let mut may = false;
    host.follow(of, |_, seat| may |= seat.group == group);
    may
}

impl<H: Host, C: Caller> Visit<'_, H, C> {
    fn all(&mut self) {
        let shrinkers = self.shrinkers;
        let left = (0..shrinkers.blocks()).map(|block| self.block(block)).filter(|left| *left).count();
        if left == 0 {
            let settled = shrinkers.infos.settle(|| shrinkers.blocks(), self.slot, self.node);
            self.visited.written += u64::from(settled);
        }
    }

    /// Visits the shrinkers of a block. Returns whether any is left that may have objects.
    fn block(&mut self, block: usize) -> bool {
        let shrinkers = self.shrinkers;
        let Some(UnitRef { info, any, .. }) = shrinkers.infos.unit_ref(block, self.slot, self.node, 0) else {
            let is_untracked = shrinkers.infos.is_untracked(self.slot);
            if is_untracked {
                let first = block as u32 * BLOCK;
                (first..first + BLOCK).for_each(|index| _ = self.shrinker(index, None));
            }
            return is_untracked;
        };
        // Relaxed: objects added at this moment are for the next visit.
        let mut summary = info.summary.load(Ordering::Relaxed);
        while summary != 0 {
            let unit = summary.trailing_zeros();
            summary &= summary - 1;
            self.unit(block as u32 * BLOCK + unit * UNIT, UnitRef { info, unit, any });
        }
        info.summary.load(Ordering::Relaxed) != 0
    }

    /// Visits the shrinkers of a unit that have a bit, or all, if there was no memory for bits.
    fn unit(&mut self, first: u32, unit_ref: UnitRef<'_>) {
        let Some(unit) = unit_ref.memory() else {
            let stays = unit_ref.clear_all_if_empty(|| {
                let something = (first..first + UNIT).filter(|index| self.shrinker(*index, None) == Had::Something);
                something.count() == 0 && self.is_here()
            });
            self.cleared(stays, first..first + UNIT);
            return;
        };
        let mut bits = unit.bits.load(Ordering::Relaxed);
        while bits != 0 {
            let index = first + bits.trailing_zeros();
            bits &= bits - 1;
            if self.shrinker(index, Some(&unit_ref)) == Had::Nothing {
                // Asks once more after the bit was cleared.
                let stays = unit_ref.clear_bit_if_empty(index, || {
                    self.shrinker(index, Some(&unit_ref)) == Had::Nothing && self.is_here()
                });
                self.cleared(stays, index..index + 1);
            }
        }
        if unit.is_empty() {
            let stays = unit_ref.clear_unit_if_empty(|| unit.is_empty());
            self.visited.written += 1;
            if !stays {
                self.shrinkers.infos.count_mark();
            }
        }
    }

    /// Returns whether the group is still in the slot and is not being deleted.
    fn is_here(&self) -> bool {
        self.host.is_online(self.group, self.slot)
    }

    /// Records that the visit cleared bits. If they do not stay cleared, counts a mark. If the
    /// group is gone as well, marks the shrinkers for its heir.
    fn cleared(&mut self, stays: bool, indexes: Range<u32>) {
        self.visited.written += 1;
        if stays {
            return;
        }
        self.shrinkers.infos.count_mark();
        if !self.is_here() {
            let infos = &self.shrinkers.infos;
            self.host.follow(self.group, |inside, heir| {
                indexes.clone().for_each(|index| infos.mark(inside, self.host, index, heir.slot, self.node));
            });
        }
    }

    /// Visits one shrinker.
    fn shrinker(&mut self, index: u32, unit_ref: Option<&UnitRef<'_>>) -> Had {
        let (shrinkers, host) = (self.shrinkers, self.host);
        let Some(shrinker) = shrinkers.at(index) else { return Had::Nothing };
        // Checked before the reference is taken: a thread with the last reference calls `gone`,
        // which may take a lock that this thread holds. A later shrinker of the index is of the
        // same kind.
        if !shrinker.is_for(self.pressure.filter) {
            return Had::Something;
        }
        match shrinkers.referred(host, self.caller, index, shrinker, |calls| self.ask(calls, unit_ref)) {
            Some(had) => had,
            // A prepared shrinker keeps its marks. A live one has taken the index meanwhile.
            None if matches!(shrinker.life.state(), PREPARED | LIVE) => Had::Something,
            None => Had::Nothing,
        }
    }

    /// Returns whether this visit and the current call have freed enough.
    fn has_enough(&self, now: Visited) -> bool {
        let is_anything = self.visited.freed > 0 || now.freed > 0;
        is_anything
            && self.caller.has_enough(self.pressure.need, self.visited.freed_bytes.saturating_add(now.freed_bytes))
    }

    /// Calls `count`, and then `scan` for a part of the counted objects. The caller has a
    /// reference.
    fn ask(&mut self, calls: &mut Calls<'_, C>, unit_ref: Option<&UnitRef<'_>>) -> Had {
        let shrinker = calls.shrinker;
        if !shrinker.by_group() && self.slot != 0 {
            return Had::Nothing;
        }
        if self.has_enough(Visited::default()) {
            return Had::Something;
        }
        // A mark may be left where a deleted group was. A new group in its slot has no objects of a
        // shrinker that belongs to another group.
        if !may_have(self.host, shrinker, self.group) {
            return Had::Nothing;
        }
        let node = if shrinker.by_node() { self.node } else { 0 };
        let (deadline, ScanPressure { priority, need, .. }) = (self.caller.deadline(), self.pressure);
        let need = need.saturating_sub(self.visited.freed_bytes);
        let mut asked = Asked { need, deadline, priority, ..Asked::of(self.group, node) };
        let freeable = calls.count(&mut asked);
        if let Some(freeable @ 1..DONE) = freeable {
            self.scan(calls, &mut asked, freeable, unit_ref);
        }
        calls.visited.stops += u64::from(freeable == Some(STOP));
        self.visited.add(calls.visited);
        // A shrinker that does not mark groups keeps its bit.
        if (freeable == Some(EMPTY) || calls.is_empty) && shrinker.by_group() { Had::Nothing } else { Had::Something }
    }

    fn scan(&mut self, calls: &mut Calls<'_, C>, asked: &mut Asked, freeable: u64, unit_ref: Option<&UnitRef<'_>>) {
        let (shrinker, index, generation) = (calls.shrinker, calls.id.index(), calls.id.generation());
        // Work of shrinkers that know no nodes is deferred on the first node.
        let unit_ref = if asked.node == self.node {
            unit_ref.copied()
        } else {
            self.shrinkers.infos.unit_ref((index / BLOCK) as usize, self.slot, 0, index % BLOCK / UNIT)
        };
        calls.most = freeable;
        let unit = unit_ref.and_then(UnitRef::memory);
        let taken = unit.map_or(0, |unit| unit.take(index, generation));
        let mut work = Work::new(freeable, taken, shrinker.seeks(), shrinker.batch(), self.pressure);
        while let Some(next) = work.next() {
            let goes_on = calls.scan(asked, next);
            if !work.done(asked.scanned) || !goes_on {
                break;
            }
            if self.has_enough(calls.visited) {
                work.is_enough();
                break;
            }
        }
        let wrote = unit.is_some_and(|unit| unit.defer(index, generation, work.deferred()));
        calls.visited.written += u64::from(taken > 0) + u64::from(wrote);
        if let Some(unit) = unit.filter(|_| wrote) {
            // SeqCst pairs with the fence in `ShrinkerInfos::offline`.
            fence(Ordering::SeqCst);
            if !self.is_here() {
                let infos = &self.shrinkers.infos;
                self.host.follow(self.group, |_, heir| infos.move_deferred(unit, index, heir.slot, asked.node));
            }
        }
    }
}

/// Calls of one shrinker's callbacks.
struct Calls<'c, C: Caller> {
    shrinker: &'c Shrinker,
    id: ShrinkerId,
    caller: &'c C,
    /// Maximum number of objects that one scan can have examined.
    most: u64,
    visited: Visited,
    nanoseconds: u64,
    /// Whether a scan has returned [`EMPTY`].
    is_empty: bool,
}

impl<'c, C: Caller> Calls<'c, C> {
    fn new(shrinker: &'c Shrinker, id: ShrinkerId, caller: &'c C) -> Self {
        Calls { shrinker, id, caller, most: 0, visited: Visited::default(), nanoseconds: 0, is_empty: false }
    }

    fn batch(&self) -> u64 {
        match self.shrinker.batch() {
            0 => super::work::DEFAULT_BATCH,
            batch => batch,
        }
    }

    fn count(&mut self, asked: &mut Asked) -> Option<u64> {
        if !self.caller.began(self.id, self.visited.calls > 0) {
            return None;
        }
        let answer = self.shrinker.call_count(asked);
        self.ended(asked, answer);
        Some(answer)
    }

    /// Calls `scan`. Returns whether another scan is worth it. `asked.scanned` is the number of
    /// objects scanned.
    fn scan(&mut self, asked: &mut Asked, objects: u64) -> bool {
        if !self.caller.began(self.id, self.visited.calls > 0) {
            asked.scanned = 0;
            return false;
        }
        (asked.to_scan, asked.scanned, asked.freed_bytes, asked.unsure) = (objects, objects, 0, 0);
        let freed = self.shrinker.call_scan(asked);
        self.ended(asked, freed);
        if freed == STOP || freed == EMPTY {
            asked.scanned = 0;
            self.visited.stops += u64::from(freed == STOP);
            self.is_empty = freed == EMPTY;
            return false;
        }
        let (is_done, freed) = (freed == DONE, if freed == DONE { 0 } else { freed });
        // A scan cannot have examined more objects than there were, or than were requested.
        asked.scanned = asked.scanned.min(self.most.max(objects));
        let (scanned, freed_bytes) = (asked.scanned, asked.freed_bytes);
        let unsure = if freed == 0 && asked.unsure != 0 { scanned } else { 0 };
        let stops = u64::from(scanned == 0);
        self.visited.add(Visited {
            scanned,
            freed: freed.min(scanned),
            freed_bytes,
            unsure,
            stops,
            ..Visited::default()
        });
        scanned > 0 && !is_done
    }

    fn ended(&mut self, asked: &Asked, answer: u64) {
        self.visited.calls += 1;
        self.nanoseconds = self.nanoseconds.saturating_add(self.caller.ended(self.id, asked, answer));
    }

    /// Adds to the counts of the shrinker. The reference itself counts as one of the calls.
    fn book(&self) {
        let Visited { calls, scanned, freed, .. } = self.visited;
        for (total, number) in [
            (Total::Calls, calls.wrapping_sub(1)),
            (Total::Scanned, scanned),
            (Total::Freed, freed),
            (Total::Nanoseconds, self.nanoseconds),
        ] {
            self.shrinker.add(total, number);
        }
    }
}
