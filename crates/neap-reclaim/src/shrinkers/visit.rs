//! A visit: every shrinker that may have something in a group, on a node, is asked for some of it.
//!
//! Sits between a pass, which chooses groups, and callbacks, which run with no lock held, outside the gate, and never inside one another. A visitor
//! reads bits and takes references; it writes a bit where a callback said that there is nothing, and the work that is deferred there.
//! A callback that lies about numbers gets its answers bounded; one that says it looked at nothing ends its own visit.
//!
//! While callbacks run the group may go, and its slot be another's. What a visit writes then is made good:
//! 1. a visitor is told that the group has nothing, and clears the bit; 2. the group goes, and whoever has the slot then finds the bit
//!    set still, or the parent gets none since it is cleared already; 3. the visitor asks again, for the group that has nothing now, and leaves the
//!    bit cleared. So it looks after that whether the slot is the group's and stays. If not, the bit is set again, for whoever has the slot, and
//!    also where the group's things have gone. The same for work that it defers.

use super::calling::{Frame, is_calling};
use super::life::{LIVE, PREPARED};
use super::places::{BLOCK, Spot, UNIT};
use super::registry::Shrinkers;
use super::shrinker::{Asked, DONE, EMPTY, STOP, Shrinker, ShrinkerId, Total};
use super::work::{Press, Work};
use crate::host::Host;
use core::ops::Range;
use core::pin::pin;
use core::sync::atomic::{Ordering, fence};
use neap_groups::GroupId;

/// Who calls callbacks: watches the time, and says when it is enough.
pub trait Caller {
    /// Asked before each callback; `false`: it is not called, and the rest is deferred. `again`: another one of the same shrinker has ended a moment ago, and
    /// nothing was done since that takes time.
    fn began(&self, _id: ShrinkerId, _again: bool) -> bool {
        true
    }

    /// When the pass is over, in nanoseconds of the platform's clock; `u64::MAX`: it has no end.
    fn deadline(&self) -> u64 {
        u64::MAX
    }

    /// Asked between batches, when something was freed: whether that is enough for a pass that
    /// needs so many bytes, of which callbacks say that they have freed `said` in this visit.
    fn has_enough(&self, _need: u64, _said: u64) -> bool {
        false
    }

    /// Told after each. Answers how many nanoseconds it took, for reports; 0: nobody knows.
    fn ended(&self, _id: ShrinkerId, _asked: &Asked, _answer: u64) -> u64 {
        0
    }
}

/// Nobody watches.
impl Caller for () {}

/// What a visit came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Visited {
    /// Callbacks that were called.
    pub calls: u64,
    /// Objects that were looked at, and freed, as they said.
    pub scanned: u64,
    /// See `scanned`.
    pub freed: u64,
    /// Bytes that they said they freed.
    pub freed_bytes: u64,
    /// Objects that count as looked at though it may be that a callback was busy: it freed none,
    /// and cannot say why.
    pub unsure: u64,
    /// Scans that looked at nothing, and counts that could not say.
    pub stops: u64,
    /// Words that other visitors of this group may look at and that were written: bits, and deferred work.
    pub written: u64,
}

impl Visited {
    /// Adds another visit's.
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

/// What a shrinker had.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Had {
    /// Nothing, until somebody marks it again.
    Nothing,
    /// Something, or nobody knows.
    Something,
}

/// A visit under way.
struct Visit<'v, H: Host, C: Caller> {
    shrinkers: &'v Shrinkers,
    host: &'v H,
    caller: &'v C,
    group: GroupId,
    slot: u32,
    node: u32,
    press: Press,
    visited: &'v mut Visited,
}

impl Shrinkers {
    /// Visits a group's shrinkers on a node; the group is the one that has `slot`. Inside a callback it does nothing.
    // Inline: the answer is added to word by word, and a copy of it as a whole would wait for these.
    #[inline(always)]
    pub fn visit<H: Host, C: Caller>(
        &self,
        host: &H,
        caller: &C,
        group: GroupId,
        slot: u32,
        node: u32,
        press: Press,
    ) -> Visited {
        let mut visited = Visited::default();
        if !is_calling() {
            Visit { shrinkers: self, host, caller, group, slot, node, press, visited: &mut visited }.all();
        }
        visited
    }

    /// Asks a shrinker how many objects it has of a group on a node; `None`: it is not there, or the caller of callbacks said no.
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

    /// Has a shrinker look at so many objects of a group on a node, in batches; `None` as for [`Shrinkers::count`].
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
            // Exactly that many: a batch that is left over counts as one. What the host has goes as a whole.
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

    /// Calls `f` with a reference to a shrinker, inside its callbacks, and books what it called; `None` if it is not live.
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
        let frame = pin!(Frame::new(core::ptr::from_ref(self).addr(), index));
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

/// Whether a shrinker may have something of a group: not if it belongs to one, and another has what is that one's.
fn may_have<H: Host>(host: &H, shrinker: &Shrinker, group: GroupId) -> bool {
    let Some(of) = shrinker.of() else { return true };
    let mut may = false;
    host.follow(of, |seat| may |= seat.group == group);
    may
}

impl<H: Host, C: Caller> Visit<'_, H, C> {
    fn all(&mut self) {
        let shrinkers = self.shrinkers;
        let left = (0..shrinkers.blocks()).map(|block| self.block(block)).filter(|left| *left).count();
        if left == 0 {
            let settled = shrinkers.places.settle(|| shrinkers.blocks(), self.slot, self.node);
            self.visited.written += u64::from(settled);
        }
    }

    /// Visits those of a block; whether any is left that may have something.
    fn block(&mut self, block: usize) -> bool {
        let shrinkers = self.shrinkers;
        let Some(Spot { place, any, .. }) = shrinkers.places.spot(block, self.slot, self.node, 0) else {
            let is_blind = shrinkers.places.is_blind(self.slot);
            if is_blind {
                let first = block as u32 * BLOCK;
                (first..first + BLOCK).for_each(|index| _ = self.shrinker(index, None));
            }
            return is_blind;
        };
        // Relaxed: what is added at this moment is the next visit's.
        let mut summary = place.summary.load(Ordering::Relaxed);
        while summary != 0 {
            let unit = summary.trailing_zeros();
            summary &= summary - 1;
            self.unit(block as u32 * BLOCK + unit * UNIT, Spot { place, unit, any });
        }
        place.summary.load(Ordering::Relaxed) != 0
    }

    /// Visits those of a unit that have a bit, or all, where there was no memory for bits.
    fn unit(&mut self, first: u32, spot: Spot<'_>) {
        let Some(unit) = spot.memory() else {
            let stays = spot.lower_all(|| {
                let something = (first..first + UNIT).filter(|index| self.shrinker(*index, None) == Had::Something);
                something.count() == 0 && self.is_here()
            });
            self.lowered(stays, first..first + UNIT);
            return;
        };
        let mut bits = unit.bits.load(Ordering::Relaxed);
        while bits != 0 {
            let index = first + bits.trailing_zeros();
            bits &= bits - 1;
            if self.shrinker(index, Some(&spot)) == Had::Nothing {
                // The same question once more, after the bit was cleared.
                let stays = spot.lower(index, || self.shrinker(index, Some(&spot)) == Had::Nothing && self.is_here());
                self.lowered(stays, index..index + 1);
            }
        }
        if unit.is_empty() {
            let stays = spot.lower_unit(|| unit.is_empty());
            self.visited.written += 1;
            if !stays {
                self.shrinkers.places.count_mark();
            }
        }
    }

    /// Whether the slot is the group's still, and stays so for now.
    fn is_here(&self) -> bool {
        self.host.is_seat(self.group, self.slot)
    }

    /// After bits of some were cleared, or set again: in the latter case that counts as a mark, and they are set for the heir as well, where the group has gone.
    fn lowered(&mut self, stays: bool, indexes: Range<u32>) {
        self.visited.written += 1;
        if stays {
            return;
        }
        self.shrinkers.places.count_mark();
        if !self.is_here() {
            let mark = |index, slot| self.shrinkers.places.mark(self.host, index, slot, self.node);
            self.host.follow(self.group, |heir| indexes.clone().for_each(|index| mark(index, heir.slot)));
        }
    }

    /// Visits one.
    fn shrinker(&mut self, index: u32, spot: Option<&Spot<'_>>) -> Had {
        let (shrinkers, host) = (self.shrinkers, self.host);
        let Some(shrinker) = shrinkers.at(index) else { return Had::Nothing };
        // Before the reference: who puts the last one tells `gone`, and this thread may hold what that wants. Whoever has the index by then is of the same kind.
        if !shrinker.is_for(self.press.whom) {
            return Had::Something;
        }
        match shrinkers.referred(host, self.caller, index, shrinker, |calls| self.ask(calls, spot)) {
            Some(had) => had,
            // One that is not started yet has its marks. One that is live by now has taken the index meanwhile.
            None if matches!(shrinker.life.state(), PREPARED | LIVE) => Had::Something,
            None => Had::Nothing,
        }
    }

    /// Whether what this visit and the call under way have freed is enough.
    fn has_enough(&self, now: Visited) -> bool {
        let is_anything = self.visited.freed > 0 || now.freed > 0;
        is_anything && self.caller.has_enough(self.press.need, self.visited.freed_bytes.saturating_add(now.freed_bytes))
    }

    /// Counts, and scans what that and the pass make of it. With a reference.
    fn ask(&mut self, calls: &mut Calls<'_, C>, spot: Option<&Spot<'_>>) -> Had {
        let shrinker = calls.shrinker;
        if !shrinker.by_group() && self.slot != 0 {
            return Had::Nothing;
        }
        if self.has_enough(Visited::default()) {
            return Had::Something;
        }
        // A mark may be left where a group was that is gone: whoever has the slot by now has nothing of a shrinker that belongs to another.
        if !may_have(self.host, shrinker, self.group) {
            return Had::Nothing;
        }
        let node = if shrinker.by_node() { self.node } else { 0 };
        let (deadline, Press { priority, need, .. }) = (self.caller.deadline(), self.press);
        let need = need.saturating_sub(self.visited.freed_bytes);
        let mut asked = Asked { need, deadline, priority, ..Asked::of(self.group, node) };
        let freeable = calls.count(&mut asked);
        if let Some(freeable @ 1..DONE) = freeable {
            self.scan(calls, &mut asked, freeable, spot);
        }
        calls.visited.stops += u64::from(freeable == Some(STOP));
        self.visited.add(calls.visited);
        // Who does not mark has its bit always.
        if (freeable == Some(EMPTY) || calls.is_empty) && shrinker.by_group() { Had::Nothing } else { Had::Something }
    }

    fn scan(&mut self, calls: &mut Calls<'_, C>, asked: &mut Asked, freeable: u64, spot: Option<&Spot<'_>>) {
        let (shrinker, index, generation) = (calls.shrinker, calls.id.index(), calls.id.generation());
        // Work of those who know no nodes is deferred on the first.
        let spot = if asked.node == self.node {
            spot.copied()
        } else {
            self.shrinkers.places.spot((index / BLOCK) as usize, self.slot, 0, index % BLOCK / UNIT)
        };
        calls.most = freeable;
        let unit = spot.and_then(Spot::memory);
        let taken = unit.map_or(0, |unit| unit.take(index, generation));
        let mut work = Work::new(freeable, taken, shrinker.seeks(), shrinker.batch(), self.press);
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
            // SeqCst pairs with the fence in `Places::offline`.
            fence(Ordering::SeqCst);
            if !self.is_here() {
                let places = &self.shrinkers.places;
                self.host.follow(self.group, |heir| places.move_deferred(unit, index, heir.slot, asked.node));
            }
        }
    }
}

/// Calls of one shrinker's callbacks.
struct Calls<'c, C: Caller> {
    shrinker: &'c Shrinker,
    id: ShrinkerId,
    caller: &'c C,
    /// Objects that it can have looked at in one scan.
    most: u64,
    visited: Visited,
    nanoseconds: u64,
    /// A scan found that there is nothing, and will be nothing until a mark.
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

    /// Whether another scan is worth it. `asked.scanned` is the number of objects looked at.
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
        // No more than there was.
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

    /// Books what was counted to the shrinker, of which one call is with the reference.
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
