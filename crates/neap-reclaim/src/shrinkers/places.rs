//! Which shrinkers may have something, by group and node, and what was deferred there.
//!
//! Sits between marks and visits. A *place* is a group's slot on a node: a summary word over up to 64 *units*, each a word of bits and 64 counters
//! of deferred work. A unit is made when its first bit is set and never moves or goes before everything does, so it grows while in use without
//! anybody waiting. Beside the places is, for each node, a bitmap of the slots that may have anything. Which bit means what is in
//! [`bits`](crate::shrinkers::bits).
//!
//! Nothing is lost where there is no memory: a summary's bit without its unit stands for all 64 shrinkers; slots below `blind` that have no
//! place may have anything.
//!
//! Lock: one mutex for growing tables. Everything here is inside the host's gate but for reading, clearing and counting.

use super::bits::{Bit, lower, raise};
use super::shrinker::Lines;
use crate::host::Host;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use neap_base::Mutex;
use neap_base::platform::Errno;
use neap_base::sync::{AtomicUsize, fence};
use neap_groups::table::{Entry, Table};
use neap_os::stack;

/// Shrinkers of a unit, units of a place, and places of a slot on a node.
pub(crate) const UNIT: u32 = 64;
pub(crate) const UNITS: u32 = 64;
pub(crate) const BLOCK: u32 = UNIT * UNITS;
pub(crate) const BLOCKS: usize = 16;

/// Bits of a counter that are the number; above them is which shrinker of that index it is about.
const NUMBER_BITS: u32 = 48;
const NUMBER: u64 = (1 << NUMBER_BITS) - 1;

/// Bits and deferred work of 64 shrinkers.
#[repr(C, align(64))]
pub(crate) struct Unit {
    pub(crate) bits: AtomicUsize,
    /// Whoever made it has set the bits that were meant before it was there.
    is_ready: AtomicBool,
    deferred: Deferred,
}

#[repr(C, align(64))]
struct Deferred([AtomicU64; UNIT as usize]);

impl Unit {
    /// Whether none of its shrinkers may have something.
    pub(crate) fn is_empty(&self) -> bool {
        // In this order.
        self.is_ready() && self.bits.load(Ordering::Relaxed) == 0
    }

    fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::Acquire) // Pairs with the Release in `unit_or_make`: the bits are seen.
    }

    /// What is deferred for the shrinker that has the index now.
    pub(crate) fn deferred(&self, index: u32, generation: u32) -> u64 {
        let word = self.counter(index).load(Ordering::Relaxed);
        if word >> NUMBER_BITS == tag(generation) { word & NUMBER } else { 0 }
    }

    /// Takes what is deferred, so that no other visitor does it as well.
    pub(crate) fn take(&self, index: u32, generation: u32) -> u64 {
        // Nothing is written where there is nothing.
        if self.deferred(index, generation) == 0 {
            return 0;
        }
        let word = self.counter(index).swap(0, Ordering::Relaxed);
        if word >> NUMBER_BITS == tag(generation) { word & NUMBER } else { 0 }
    }

    /// Adds to what is deferred, unless a later shrinker of the index has something there; whether it wrote.
    pub(crate) fn defer(&self, index: u32, generation: u32, objects: u64) -> bool {
        if objects == 0 {
            return false;
        }
        let more = |word: u64| {
            let before = match (word >> NUMBER_BITS) as i16 {
                _ if word == 0 => 0,
                tag if tag == generation as i16 => word & NUMBER,
                tag if tag.wrapping_sub(generation as i16) > 0 => return None,
                _ => 0,
            };
            Some(tag(generation) << NUMBER_BITS | before.saturating_add(objects).min(NUMBER))
        };
        self.counter(index).fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    fn counter(&self, index: u32) -> &AtomicU64 {
        &self.deferred.0[(index % UNIT) as usize]
    }
}

/// Part of a generation: which of two is later is known unless there were 32 768 shrinkers of one index in between.
fn tag(generation: u32) -> u64 {
    u64::from(generation as u16)
}

#[repr(C)]
struct Rest([AtomicPtr<Unit>; UNITS as usize]);

/// A group's slot on a node, for [`BLOCK`] shrinkers.
#[repr(C, align(64))]
pub(crate) struct Place {
    pub(crate) summary: AtomicUsize,
    /// The unit that was made first, the only one nearly everywhere, [with its number](numbered), and where the others are.
    first: AtomicPtr<Unit>,
    rest: AtomicPtr<Rest>,
}

/// A pointer to a unit with the unit's number, in bits that are 0 where a line begins.
fn numbered(unit: *mut Unit, number: u32) -> *mut Unit {
    unit.map_addr(|address| address | number as usize)
}

/// The number, and the pointer without it.
fn number(unit: *mut Unit) -> (u32, *mut Unit) {
    let number = unit.addr() % align_of::<Unit>();
    (number as u32, unit.map_addr(|address| address - number))
}

const _: () = assert!(UNITS as usize <= align_of::<Unit>());

// SAFETY: atomic numbers and pointers, of which 0 is one.
unsafe impl Entry for Place {}

/// A word of the bitmaps of slots.
#[repr(transparent)]
pub(crate) struct Word(AtomicUsize);

// SAFETY: an atomic number, of which 0 is one.
unsafe impl Entry for Word {}

/// Where a bit is: a unit of a place, and what is above it.
#[derive(Clone, Copy)]
pub(crate) struct Spot<'p> {
    pub(crate) place: &'p Place,
    pub(crate) unit: u32,
    pub(crate) any: Bit<'p>,
}

impl<'p> Spot<'p> {
    /// The unit's memory, if there is any.
    pub(crate) fn memory(self) -> Option<&'p Unit> {
        self.place.unit(self.unit)
    }

    fn above(self) -> [Bit<'p>; 2] {
        [Bit { word: &self.place.summary, bit: self.unit }, self.any]
    }

    /// Whether any of the unit may have something.
    pub(crate) fn is_raised(self) -> bool {
        self.above()[0].is_set()
    }

    /// Clears a shrinker's bit, unless `is_empty` answers that there is something after all.
    pub(crate) fn lower(self, index: u32, is_empty: impl FnOnce() -> bool) -> bool {
        match self.memory() {
            Some(unit) => {
                let [summary, any] = self.above();
                lower([Bit { word: &unit.bits, bit: index % UNIT }, summary, any], is_empty)
            }
            None => is_empty(),
        }
    }

    /// Clears the summary's bit, unless `is_empty` answers that there is something after all, as it does of a unit that is not ready:
    /// 1. there is no memory for A, which raises the summary for all; 2. B makes the unit; 3. a visitor finds no bit there, and would clear the summary's;
    ///    4. B finds that cleared, and sets none.
    pub(crate) fn lower_unit(self, is_empty: impl FnOnce() -> bool) -> bool {
        lower(self.above(), is_empty)
    }

    /// The same for a unit that had no memory, all of whose shrinkers may have something:
    /// 1. a visitor has seen that, and is about to clear the bit; 2. somebody makes the memory, finds the bit set, and sets the bits of all; 3. the
    ///    visitor clears the summary's, and finds that nobody has anything. Whoever marks one later finds its bit set.
    ///
    /// So where there is memory by then, the bit is raised again: what to clear is known there.
    pub(crate) fn lower_all(self, is_empty: impl FnOnce() -> bool) -> bool {
        self.lower_unit(|| is_empty() && self.memory().is_none())
    }
}

impl Place {
    /// Where a unit is; null: nowhere.
    fn entry(&self, unit: u32) -> *mut Unit {
        // Acquire, of all three: pairs with the Release in `made`.
        match number(self.first.load(Ordering::Acquire)) {
            (first, memory) if first == unit => memory,
            _ => {
                // SAFETY: it is there as long as the place is.
                let rest = unsafe { self.rest.load(Ordering::Acquire).as_ref() };
                let entry = rest.and_then(|rest| rest.0.get(unit as usize));
                entry.map_or(core::ptr::null_mut(), |entry| entry.load(Ordering::Acquire))
            }
        }
    }

    pub(crate) fn unit(&self, unit: u32) -> Option<&Unit> {
        // SAFETY: it is there as long as the place is.
        unsafe { self.entry(unit).as_ref() }
    }

    /// The unit, which is made where there is none; `None`: there is no memory.
    fn unit_or_make<H: Host>(&self, host: &H, unit: u32) -> Option<&Unit> {
        if let Some(unit) = self.unit(unit) {
            return Some(unit);
        }
        // Which one is the first never changes, so no unit is in both.
        let made = match number(made(host, &self.first, |memory| numbered(memory, unit))?) {
            (first, memory) if first == unit => memory,
            _ => {
                let rest = made(host, &self.rest, |memory| memory)?;
                // SAFETY: it is there as long as the place is.
                made(host, unsafe { &*rest }.0.get(unit as usize)?, |memory| memory)?
            }
        };
        // SAFETY: as above.
        let made = unsafe { &*made };
        if !made.is_ready() {
            // SeqCst pairs with the fence in `mark`: who had no memory, and raised the summary for all shrinkers of the unit, looks for memory
            // again after that: so either is seen here, or has seen this.
            fence(Ordering::SeqCst);
            if (Bit { word: &self.summary, bit: unit }).is_set() {
                made.bits.fetch_or(usize::MAX, Ordering::Release); // As in `raise`.
            }
            made.is_ready.store(true, Ordering::Release); // Pairs with the Acquire in `is_ready`.
        }
        Some(made)
    }

    /// Units that there are.
    pub(crate) fn units(&self) -> impl Iterator<Item = (u32, &Unit)> {
        (0..UNITS).filter_map(|unit| Some((unit, self.unit(unit)?)))
    }
}

/// What a pointer is, which leads to new zeroes, and is what `named` makes of that, where it was null.
fn made<H: Host, T>(host: &H, pointer: &AtomicPtr<T>, named: impl FnOnce(*mut T) -> *mut T) -> Option<*mut T> {
    // Acquire pairs with the Release below.
    let mut there = pointer.load(Ordering::Acquire);
    if there.is_null() {
        // Once for each pointer, and perhaps below calls that have come far already.
        let memory = stack::apart(|| host.memory(size_of::<T>()))??;
        there = named(memory.cast().as_ptr());
        let null = core::ptr::null_mut();
        // Release pairs with the Acquire above and where units are looked up: the zeroes are there.
        if let Err(first) = pointer.compare_exchange(null, there, Ordering::Release, Ordering::Acquire) {
            // Where no stack can be mapped the memory is lost: a race was lost at the same moment.
            // SAFETY: made above, and no other thread has seen it.
            let _ = stack::apart(|| unsafe { host.give_back(memory, size_of::<T>()) });
            there = first;
        }
    }
    Some(there)
}

/// All places.
pub(crate) struct Places {
    nodes: u32,
    blocks: [Table<Place>; BLOCKS],
    slots: Table<Word>,
    growing: Mutex<()>,
    /// Slots below this that have no place, or no word, may have anything: there was no memory to say what.
    blind: AtomicU32,
    /// Bits that were raised, about: changes after each.
    marks: Lines<AtomicU64>,
}

impl Places {
    /// Places of the root on each node.
    pub(crate) fn open<H: Host>(host: &H, nodes: u32) -> Result<Places, Errno> {
        let places = Places {
            nodes,
            blocks: [const { Table::new() }; BLOCKS],
            slots: Table::new(),
            growing: Mutex::new(()),
            blind: AtomicU32::new(0),
            marks: Lines(AtomicU64::new(0)),
        };
        let opened = places.grow(host, 0, 0);
        if opened.is_err() {
            // SAFETY: nobody has seen them.
            unsafe { places.close(host) };
        }
        opened.map(|()| places)
    }

    /// # Safety
    /// Nobody uses them any more.
    pub(crate) unsafe fn close<H: Host>(&self, host: &H) {
        for table in &self.blocks {
            for place in (0..table.len()).filter_map(|at| table.get(at)) {
                let units = (0..UNITS).filter_map(|unit| NonNull::new(place.entry(unit)));
                // SAFETY: made by `made`, and nobody uses them, as the caller promises.
                units.for_each(|unit| unsafe { host.give_back(unit.cast(), size_of::<Unit>()) });
                if let Some(rest) = NonNull::new(place.rest.load(Ordering::Relaxed)) {
                    // SAFETY: as above.
                    unsafe { host.give_back(rest.cast(), size_of::<Rest>()) };
                }
            }
            // SAFETY: as the caller promises.
            unsafe { table.close(host.platform()) };
        }
        // SAFETY: as above.
        unsafe { self.slots.close(host.platform()) };
    }

    /// How many nodes there are.
    pub(crate) fn nodes(&self) -> u32 {
        self.nodes
    }

    fn at(&self, slot: u32, node: u32) -> Option<u32> {
        slot.checked_mul(self.nodes)?.checked_add(node.min(self.nodes - 1))
    }

    /// A slot's place on a node, in a block, if there is such a one.
    pub(crate) fn place(&self, block: usize, slot: u32, node: u32) -> Option<&Place> {
        self.blocks.get(block)?.get(self.at(slot, node)?)
    }

    /// The bit of a slot on a node.
    fn any(&self, slot: u32, node: u32) -> Option<Bit<'_>> {
        let Word(word) = self.slots.get(self.at(slot / usize::BITS, node)?)?;
        Some(Bit { word, bit: slot % usize::BITS })
    }

    /// A unit of a place.
    #[inline(always)]
    pub(crate) fn spot(&self, block: usize, slot: u32, node: u32, unit: u32) -> Option<Spot<'_>> {
        Some(Spot { place: self.place(block, slot, node)?, unit, any: self.any(slot, node)? })
    }

    /// Whether a slot without a place may have something.
    pub(crate) fn is_blind(&self, slot: u32) -> bool {
        slot < self.blind.load(Ordering::Relaxed)
    }

    /// Sees to it that a slot has its places and its words.
    fn grow<H: Host>(&self, host: &H, block: usize, slot: u32) -> Result<(), Errno> {
        let _growing = self.growing.lock();
        let grown = self.grow_to(host, block, slot);
        if grown.is_err() {
            // SeqCst pairs with the fence of who visits: as for a bit.
            self.blind.fetch_max(slot.saturating_add(1), Ordering::SeqCst);
            self.count_mark();
        }
        grown
    }

    fn grow_to<H: Host>(&self, host: &H, block: usize, slot: u32) -> Result<(), Errno> {
        let last = |slot: u32| self.at(slot, self.nodes - 1).ok_or(Errno::NOMEM);
        let blind = self.blind.load(Ordering::Relaxed);
        // What was marked while there was no room for it may be any shrinker of any slot up to there.
        let words = blind.div_ceil(usize::BITS).saturating_mul(self.nodes);
        grow(&self.slots, host, last(slot / usize::BITS)?, |at, Word(word)| {
            if at < words {
                word.store(usize::MAX, Ordering::Release); // As in `raise`.
            }
        })?;
        grow(&self.blocks[block], host, last(slot)?, |at, place| {
            let (slot, node) = (at / self.nodes, at % self.nodes);
            if slot < blind {
                place.summary.store(usize::MAX, Ordering::Release); // As in `raise`.
                self.raise(self.any(slot, node));
            }
        })
    }

    /// Says that a shrinker may have something in a slot on a node, by one who has made it visible. Inside the gate.
    pub(crate) fn mark<H: Host>(&self, host: &H, index: u32, slot: u32, node: u32) {
        let (block, unit) = ((index / BLOCK) as usize, index % BLOCK / UNIT);
        let spot = self.spot(block, slot, node, unit);
        let spot = spot.or_else(|| self.grow(host, block, slot).ok().and_then(|()| self.spot(block, slot, node, unit)));
        let Some(spot) = spot else {
            // Where only the place is missing.
            self.raise(self.any(slot, node));
            return;
        };
        let memory = spot.place.unit_or_make(host, unit).or_else(|| {
            self.raise(spot.above());
            // SeqCst: as in `unit_or_make`.
            fence(Ordering::SeqCst);
            spot.memory()
        });
        if let Some(memory) = memory {
            let [summary, any] = spot.above();
            self.raise([Bit { word: &memory.bits, bit: index % UNIT }, summary, any]);
        }
    }

    /// Raises bits, and counts it where that made a difference.
    fn raise<'w>(&self, levels: impl IntoIterator<Item = Bit<'w>>) {
        if raise(levels) > 0 {
            self.count_mark();
        }
    }

    /// Something may be had that could not be a moment ago. After the bit that says so.
    pub(crate) fn count_mark(&self) {
        self.marks.0.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `marks`.
    }

    /// How often that was so: to be read before looking at bits.
    pub(crate) fn marks(&self) -> u64 {
        self.marks.0.load(Ordering::Acquire) // Pairs with the Release in `count_mark`: the bits of those are seen.
    }

    /// Clears the bit of a slot where nothing is below it any more, in as many blocks as there are. Answers whether it did. How many there are is asked
    /// again behind the fence, since whoever marks in a new one finds the bit set until it is cleared.
    pub(crate) fn settle(&self, blocks: impl Fn() -> usize, slot: u32, node: u32) -> bool {
        let is_empty = || {
            (0..blocks()).all(|block| match self.place(block, slot, node) {
                Some(place) => place.summary.load(Ordering::Relaxed) == 0,
                None => !self.is_blind(slot),
            })
        };
        match self.any(slot, node) {
            Some(any) if any.is_set() && is_empty() => {
                let stays = lower([any], is_empty);
                if !stays {
                    self.count_mark();
                }
                stays
            }
            _ => false,
        }
    }

    /// Whether a slot may have anything on a node.
    pub(crate) fn has_anything(&self, node: u32, slot: u32) -> bool {
        self.any(slot, node).map_or_else(|| self.is_blind(slot), Bit::is_set)
    }

    /// The first slot from `from` on that may have anything on a node.
    pub(crate) fn next_with_anything(&self, node: u32, from: u32) -> Option<u32> {
        let mut slot = from;
        while let Some(bit) = self.any(slot, node) {
            // Relaxed: what is added at this moment is the next pass's.
            let word = bit.word.load(Ordering::Relaxed) >> bit.bit;
            if word != 0 {
                return Some(slot + word.trailing_zeros());
            }
            slot = (slot / usize::BITS + 1).checked_mul(usize::BITS)?;
        }
        self.is_blind(slot).then_some(slot)
    }

    /// Hands what the group in a slot has, which is leaving, to its heir: deferred work, and bits of as many shrinkers as there are. Inside the gate.
    pub(crate) fn offline<H: Host>(&self, host: &H, shrinkers: impl Fn() -> u32, slot: u32, heir: u32) {
        // SeqCst pairs with the fences of who writes here: `Groups::hang_on`, `lower`, and that of a visit that has deferred. Either what they write is taken here, or they
        // see that the group is leaving, and take it to the heir themselves.
        fence(Ordering::SeqCst);
        let shrinkers = shrinkers();
        let blocks = shrinkers.div_ceil(BLOCK) as usize;
        for node in 0..self.nodes {
            for block in 0..blocks {
                let first = block as u32 * BLOCK;
                let Some(place) = self.place(block, slot, node) else {
                    if self.is_blind(slot) {
                        // Any of them may have something.
                        (first..shrinkers.min(first + BLOCK)).for_each(|index| self.mark(host, index, heir, node));
                    }
                    continue;
                };
                for (unit, memory) in place.units() {
                    let first = block as u32 * BLOCK + unit * UNIT;
                    for index in
                        (first..first + UNIT).filter(|index| memory.counter(*index).load(Ordering::Relaxed) != 0)
                    {
                        // So that the heir has a counter.
                        self.mark(host, index, heir, node);
                        self.move_deferred(memory, index, heir, node);
                    }
                    // Acquire and Release: as in `lower` and `raise`.
                    let bits = memory.bits.swap(0, Ordering::Acquire);
                    let set = (0..UNIT).filter(|bit| bits >> bit & 1 != 0);
                    set.for_each(|bit| self.mark(host, first + bit, heir, node));
                }
                let Some(any) = self.any(slot, node) else { continue };
                let summary = place.summary.swap(0, Ordering::Acquire);
                let stands_for_all =
                    |unit: &u32| summary >> unit & 1 != 0 && !place.unit(*unit).is_some_and(Unit::is_ready);
                for unit in (0..UNITS).filter(stands_for_all) {
                    let first = first + unit * UNIT;
                    (first..first + UNIT).for_each(|index| self.mark(host, index, heir, node));
                }
                // Who marked meanwhile has found the summary set.
                let spots = (0..UNITS).map(|unit| Spot { place, unit, any });
                spots
                    .filter(|spot| spot.memory().is_some_and(|unit| !unit.is_empty()))
                    .for_each(|spot| self.raise(spot.above()));
            }
            self.settle(|| blocks, slot, node);
        }
    }

    /// Adds a shrinker's deferred work to the heir's, where that has room for it.
    pub(crate) fn move_deferred(&self, from: &Unit, index: u32, heir: u32, node: u32) {
        let counter = from.counter(index);
        if counter.load(Ordering::Relaxed) == 0 {
            return;
        }
        let word = counter.swap(0, Ordering::Relaxed);
        let (block, unit) = ((index / BLOCK) as usize, index % BLOCK / UNIT);
        let to = self.place(block, heir, node).and_then(|place| place.unit(unit));
        to.inspect(|to| _ = to.defer(index, (word >> NUMBER_BITS) as u32, word & NUMBER));
    }
}

/// Grows a table until it has an entry, and calls `each` with those that are new.
fn grow<H: Host, T: Entry>(table: &Table<T>, host: &H, last: u32, each: impl Fn(u32, &T)) -> Result<(), Errno> {
    while table.len() <= last {
        let before = table.len();
        table.grow(host.platform())?;
        (before..table.len()).for_each(|at| _ = table.get(at).map(|entry| each(at, entry)));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
