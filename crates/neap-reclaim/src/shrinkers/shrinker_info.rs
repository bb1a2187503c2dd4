//! Bits of shrinkers that may have objects, by group and node, and their deferred work.
//!
//! # Design
//!
//! An *info* (a shrinker info) belongs to a group's slot on a node, and serves a *block* of
//! [`BLOCK`] shrinkers. It has a summary word, with a bit for each of up to 64 *units*. A unit has
//! a word of bits and 64 counters of deferred work. A unit is made when its first bit is set, and
//! stays until the registry is closed, so visitors need not wait while tables grow. For each node,
//! a bitmap has a bit for each slot that may have objects. The protocol of bits is in
//! [`bits`](crate::shrinkers::bits).
//!
//! Without memory for marks, objects are still found. A summary bit without its unit stands for all
//! 64 shrinkers. A slot below `untracked_slots` without an info is treated as if every shrinker had
//! objects.
//!
//! # Locking
//!
//! One mutex serialises the growth of tables. Functions that may take it or request memory take an
//! [`Inside`] as the proof that the thread is inside the host's fork gate.

use super::bits::{Bit, clear_bit_if_empty, set_bits};
use super::shrinker::Lines;
use crate::host::Host;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use neap_base::Mutex;
use neap_base::gate::Inside;
use neap_base::platform::Errno;
use neap_base::sync::{AtomicUsize, fence};
use neap_groups::table::{Entry, Table};
use neap_os::stack;

/// Numbers: shrinkers of a unit, units of an info, shrinkers of an info, and infos of a slot on a
/// node.
pub(crate) const UNIT: u32 = 64;
pub(crate) const UNITS: u32 = 64;
pub(crate) const BLOCK: u32 = UNIT * UNITS;
pub(crate) const BLOCKS: usize = 16;

/// Number of low bits of a counter that hold the deferred objects. The bits above hold the [`tag`]
/// of the shrinker's generation.
const NUMBER_BITS: u32 = 48;
const NUMBER: u64 = (1 << NUMBER_BITS) - 1;

/// Bits and deferred work of 64 shrinkers.
#[repr(C, align(64))]
pub(crate) struct InfoUnit {
    pub(crate) bits: AtomicUsize,
    /// Whether the thread that made the unit has set the bits of earlier marks.
    is_ready: AtomicBool,
    deferred: Deferred,
}

#[repr(C, align(64))]
struct Deferred([AtomicU64; UNIT as usize]);

impl InfoUnit {
    /// Returns whether none of its shrinkers may have objects.
    pub(crate) fn is_empty(&self) -> bool {
        // `is_ready` is read first: if it is true, the bits of earlier marks are seen.
        self.is_ready() && self.bits.load(Ordering::Relaxed) == 0
    }

    fn is_ready(&self) -> bool {
        // Pairs with the Release in `unit_or_make`: the bits are seen.
        self.is_ready.load(Ordering::Acquire)
    }

    /// Returns the deferred objects of the shrinker with that index and generation.
    pub(crate) fn deferred(&self, index: u32, generation: u32) -> u64 {
        let word = self.counter(index).load(Ordering::Relaxed);
        if word >> NUMBER_BITS == tag(generation) { word & NUMBER } else { 0 }
    }

    /// Takes the deferred objects, so that no other visitor scans them as well.
    pub(crate) fn take(&self, index: u32, generation: u32) -> u64 {
        // Nothing is written if nothing is deferred.
        if self.deferred(index, generation) == 0 {
            return 0;
        }
        let word = self.counter(index).swap(0, Ordering::Relaxed);
        if word >> NUMBER_BITS == tag(generation) { word & NUMBER } else { 0 }
    }

    /// Adds deferred objects, unless the counter has objects of a later shrinker of the index.
    /// Returns whether it wrote.
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
        self.counter(index).try_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    fn counter(&self, index: u32) -> &AtomicU64 {
        &self.deferred.0[(index % UNIT) as usize]
    }
}

/// Returns the low 16 bits of a generation. A comparison of two tags finds the later generation of
/// an index if the two generations differ by less than 32 768.
fn tag(generation: u32) -> u64 {
    u64::from(generation as u16)
}

#[repr(C)]
struct UnitTable([AtomicPtr<InfoUnit>; UNITS as usize]);

/// A group's slot on a node, for [`BLOCK`] shrinkers.
#[repr(C, align(64))]
pub(crate) struct ShrinkerInfo {
    pub(crate) summary: AtomicUsize,
    /// Pointers to the unit that was made first, [with the unit's number](numbered), and to the
    /// table of the other units. The first unit is usually the only one.
    first: AtomicPtr<InfoUnit>,
    rest: AtomicPtr<UnitTable>,
}

/// Returns a pointer to a unit with the unit's number in its low bits, which are 0 by alignment.
fn numbered(unit: *mut InfoUnit, number: u32) -> *mut InfoUnit {
    unit.map_addr(|address| address | number as usize)
}

/// Returns the number, and the pointer without it.
fn number(unit: *mut InfoUnit) -> (u32, *mut InfoUnit) {
    let number = unit.addr() % align_of::<InfoUnit>();
    (number as u32, unit.map_addr(|address| address - number))
}

const _: () = assert!(UNITS as usize <= align_of::<InfoUnit>());

// SAFETY: all fields are atomic integers and pointers. Zeroed memory is valid for these, and they
// change only atomically.
unsafe impl Entry for ShrinkerInfo {}

/// A word of the bitmaps of slots.
#[repr(transparent)]
pub(crate) struct Word(AtomicUsize);

// SAFETY: an atomic integer is valid if its memory is zeroed.
unsafe impl Entry for Word {}

/// Location of a unit: its info, its number there, and the slot's bit in the node's bitmap.
#[derive(Clone, Copy)]
pub(crate) struct UnitRef<'p> {
    pub(crate) info: &'p ShrinkerInfo,
    pub(crate) unit: u32,
    pub(crate) any: Bit<'p>,
}

impl<'p> UnitRef<'p> {
    /// Returns the unit's memory, if there is any.
    pub(crate) fn memory(self) -> Option<&'p InfoUnit> {
        self.info.unit(self.unit)
    }

    fn above(self) -> [Bit<'p>; 2] {
        [Bit { word: &self.info.summary, bit: self.unit }, self.any]
    }

    /// Returns whether a shrinker of the unit may have objects.
    pub(crate) fn is_set(self) -> bool {
        self.above()[0].is_set()
    }

    /// Clears a shrinker's bit, and sets it again if `is_empty` then returns false. Returns whether
    /// it stays cleared.
    pub(crate) fn clear_bit_if_empty(self, index: u32, is_empty: impl FnOnce() -> bool) -> bool {
        match self.memory() {
            Some(unit) => {
                let [summary, any] = self.above();
                clear_bit_if_empty([Bit { word: &unit.bits, bit: index % UNIT }, summary, any], is_empty)
            }
            None => is_empty(),
        }
    }

    /// Clears the summary's bit, and sets it again if `is_empty` then returns false. Returns
    /// whether it stays cleared.
    ///
    /// `is_empty` must return false for a unit that is not ready:
    ///
    /// 1. Thread A has no memory for the unit, and sets the bit of the summary for all its
    ///    shrinkers.
    /// 2. Thread B makes the unit.
    /// 3. A visitor finds no bit in it, and would clear the summary's.
    /// 4. B finds that cleared, and sets no bits.
    pub(crate) fn clear_unit_if_empty(self, is_empty: impl FnOnce() -> bool) -> bool {
        clear_bit_if_empty(self.above(), is_empty)
    }

    /// Clears the summary's bit of a unit without memory, and sets it again if `is_empty` then
    /// returns false. Returns whether it stays cleared.
    ///
    /// If the unit has memory by then, also sets the bit again. The bits to clear are then in the
    /// unit:
    ///
    /// 1. A visitor has found no memory, and is about to clear the bit.
    /// 2. Another thread makes the unit, finds the bit set, and sets the bits of all shrinkers.
    /// 3. The visitor clears the summary's bit, and finds no objects. A later mark would find its
    ///    bit in the unit set.
    pub(crate) fn clear_all_if_empty(self, is_empty: impl FnOnce() -> bool) -> bool {
        self.clear_unit_if_empty(|| is_empty() && self.memory().is_none())
    }
}

impl ShrinkerInfo {
    /// Returns the pointer to a unit; null if there is none.
    fn entry(&self, unit: u32) -> *mut InfoUnit {
        // Acquire, of all three: pairs with the Release in `get_or_alloc_zeroed`.
        match number(self.first.load(Ordering::Acquire)) {
            (first, memory) if first == unit => memory,
            _ => {
                // SAFETY: the pointer is null, or from `get_or_alloc_zeroed`. That returns zeroed
                // memory, which is a valid table. It is freed only in `ShrinkerInfos::close`.
                let rest = unsafe { self.rest.load(Ordering::Acquire).as_ref() };
                let entry = rest.and_then(|rest| rest.0.get(unit as usize));
                entry.map_or(core::ptr::null_mut(), |entry| entry.load(Ordering::Acquire))
            }
        }
    }

    pub(crate) fn unit(&self, unit: u32) -> Option<&InfoUnit> {
        // SAFETY: the pointer is null, or from `get_or_alloc_zeroed`. That returns zeroed memory,
        // which is a valid unit. It is freed only in `ShrinkerInfos::close`, when no thread uses
        // the info.
        unsafe { self.entry(unit).as_ref() }
    }

    /// Returns the unit, or makes it. Returns `None` if there is no unit and no memory for one.
    fn unit_or_make<H: Host>(&self, inside: &Inside<'_>, host: &H, unit: u32) -> Option<&InfoUnit> {
        if let Some(unit) = self.unit(unit) {
            return Some(unit);
        }
        // The number of the first unit never changes, so no unit is both in `first` and in `rest`.
        let made = match number(get_or_alloc_zeroed(inside, host, &self.first, |memory| numbered(memory, unit))?) {
            (first, memory) if first == unit => memory,
            _ => {
                let rest = get_or_alloc_zeroed(inside, host, &self.rest, |memory| memory)?;
                // SAFETY: `get_or_alloc_zeroed` returns non-null pointers to zeroed memory, which
                // is a valid table. It is freed only in `ShrinkerInfos::close`.
                get_or_alloc_zeroed(inside, host, unsafe { &*rest }.0.get(unit as usize)?, |memory| memory)?
            }
        };
        // SAFETY: `get_or_alloc_zeroed` returned the pointer here or earlier. It is not null, and
        // leads to zeroed memory, which is a valid unit. That is freed only in
        // `ShrinkerInfos::close`.
        let made = unsafe { &*made };
        if !made.is_ready() {
            // SeqCst pairs with the fence in `mark`. A thread that had no memory, and set the
            // summary for all shrinkers of the unit, looks for memory again after that. Either this
            // thread sees its bit, or it sees this unit.
            fence(Ordering::SeqCst);
            if (Bit { word: &self.summary, bit: unit }).is_set() {
                made.bits.fetch_or(usize::MAX, Ordering::Release); // As in `set_bits`.
            }
            made.is_ready.store(true, Ordering::Release); // Pairs with the Acquire in `is_ready`.
        }
        Some(made)
    }

    /// Returns a number that the numbers of all units are below: 0 if there is none. The first unit
    /// is made before the table of the others.
    fn unit_bound(&self) -> u32 {
        // Acquire: as in `entry`.
        if self.first.load(Ordering::Acquire).is_null() { 0 } else { UNITS }
    }

    /// Returns the units that exist, with their numbers.
    pub(crate) fn units(&self) -> impl Iterator<Item = (u32, &InfoUnit)> {
        (0..self.unit_bound()).filter_map(|unit| Some((unit, self.unit(unit)?)))
    }
}

/// Returns the pointer in `pointer`. If that is null, first stores a pointer to zeroed memory
/// there, encoded by `tagged`. Returns `None` if there is no memory.
fn get_or_alloc_zeroed<H: Host, T>(
    inside: &Inside<'_>,
    host: &H,
    pointer: &AtomicPtr<T>,
    tagged: impl FnOnce(*mut T) -> *mut T,
) -> Option<*mut T> {
    // Acquire pairs with the Release below.
    let mut there = pointer.load(Ordering::Acquire);
    if there.is_null() {
        // On a stack of its own: this happens once for each pointer, perhaps deep in a call chain.
        let memory = stack::apart(|| host.memory(inside, size_of::<T>()))??;
        there = tagged(memory.cast().as_ptr());
        let null = core::ptr::null_mut();
        // Release pairs with the Acquire above and where units are looked up: the zeroes are
        // visible.
        if let Err(first) = pointer.compare_exchange(null, there, Ordering::Release, Ordering::Acquire) {
            // If no stack can be mapped here, the memory leaks. That needs a lost race at the same
            // moment.
            // SAFETY: `host.memory` returned it above with this size, and no other thread has seen
            // it.
            let _ = stack::apart(|| unsafe { host.give_back(inside, memory, size_of::<T>()) });
            there = first;
        }
    }
    Some(there)
}

/// The infos of all slots on all nodes, in a table for each block.
pub(crate) struct ShrinkerInfos {
    nodes: u32,
    blocks: [Table<ShrinkerInfo>; BLOCKS],
    slots: Table<Word>,
    growing: Mutex<()>,
    /// Slots below this without an info, or without a word, may have objects of any shrinker, since
    /// memory was missing for their marks.
    untracked_slots: AtomicU32,
    /// Approximate number of bits that threads have set so far. It changes after a bit was set.
    marks: Lines<AtomicU64>,
}

impl ShrinkerInfos {
    /// Makes the infos of the root on each node.
    pub(crate) fn open<H: Host>(inside: &Inside<'_>, host: &H, nodes: u32) -> Result<ShrinkerInfos, Errno> {
        let infos = ShrinkerInfos {
            nodes,
            blocks: [const { Table::new() }; BLOCKS],
            slots: Table::new(),
            growing: Mutex::new(()),
            untracked_slots: AtomicU32::new(0),
            marks: Lines(AtomicU64::new(0)),
        };
        let opened = infos.grow(inside, host, 0, 0);
        if opened.is_err() {
            // SAFETY: this function made them, and no other thread has a reference.
            unsafe { infos.close(inside, host) };
        }
        opened.map(|()| infos)
    }

    /// Frees all infos and their tables.
    ///
    /// # Safety
    /// No thread uses the infos any more, and `host` is the one that they were made with.
    pub(crate) unsafe fn close<H: Host>(&self, inside: &Inside<'_>, host: &H) {
        for table in &self.blocks {
            for info in (0..table.len()).filter_map(|at| table.get(at)) {
                let units = (0..info.unit_bound()).filter_map(|unit| NonNull::new(info.entry(unit)));
                // SAFETY: `get_or_alloc_zeroed` got each unit from `host.memory` with this size. By
                // this function's contract the host is the same, and no thread uses the unit.
                units.for_each(|unit| unsafe { host.give_back(inside, unit.cast(), size_of::<InfoUnit>()) });
                if let Some(rest) = NonNull::new(info.rest.load(Ordering::Relaxed)) {
                    // SAFETY: `get_or_alloc_zeroed` got the table from `host.memory` with this
                    // size. By this function's contract the host is the same, and no thread uses
                    // the table.
                    unsafe { host.give_back(inside, rest.cast(), size_of::<UnitTable>()) };
                }
            }
            // SAFETY: by this function's contract no thread uses an info, and the table grew on
            // this platform.
            unsafe { table.close(host.platform()) };
        }
        // SAFETY: by this function's contract no thread uses a word, and the table grew on this
        // platform.
        unsafe { self.slots.close(host.platform()) };
    }

    /// Returns the number of nodes.
    pub(crate) fn nodes(&self) -> u32 {
        self.nodes
    }

    fn at(&self, slot: u32, node: u32) -> Option<u32> {
        slot.checked_mul(self.nodes)?.checked_add(node.min(self.nodes - 1))
    }

    /// Returns a slot's info on a node, in a block; `None` if there is none.
    pub(crate) fn info(&self, block: usize, slot: u32, node: u32) -> Option<&ShrinkerInfo> {
        self.blocks.get(block)?.get(self.at(slot, node)?)
    }

    /// Returns the bit of a slot on a node.
    fn any(&self, slot: u32, node: u32) -> Option<Bit<'_>> {
        let Word(word) = self.slots.get(self.at(slot / usize::BITS, node)?)?;
        Some(Bit { word, bit: slot % usize::BITS })
    }

    /// Returns the location of a unit; `None` if the slot has no info or no bit yet.
    #[inline(always)]
    pub(crate) fn unit_ref(&self, block: usize, slot: u32, node: u32, unit: u32) -> Option<UnitRef<'_>> {
        Some(UnitRef { info: self.info(block, slot, node)?, unit, any: self.any(slot, node)? })
    }

    /// Returns whether a slot without an info may have objects.
    pub(crate) fn is_untracked(&self, slot: u32) -> bool {
        slot < self.untracked_slots.load(Ordering::Relaxed)
    }

    /// Grows the tables so that a slot has its infos and its words.
    fn grow<H: Host>(&self, _: &Inside<'_>, host: &H, block: usize, slot: u32) -> Result<(), Errno> {
        let _growing = self.growing.lock();
        let grown = self.grow_to(host, block, slot);
        if grown.is_err() {
            // SeqCst pairs with the fence of a visitor, as for a bit.
            self.untracked_slots.fetch_max(slot.saturating_add(1), Ordering::SeqCst);
            self.count_mark();
        }
        grown
    }

    fn grow_to<H: Host>(&self, host: &H, block: usize, slot: u32) -> Result<(), Errno> {
        let last = |slot: u32| self.at(slot, self.nodes - 1).ok_or(Errno::NOMEM);
        let untracked_slots = self.untracked_slots.load(Ordering::Relaxed);
        // Marks for which there was no memory may be of any shrinker, and of any slot below
        // `untracked_slots`.
        let words = untracked_slots.div_ceil(usize::BITS).saturating_mul(self.nodes);
        grow(&self.slots, host, last(slot / usize::BITS)?, |at, Word(word)| {
            if at < words {
                word.store(usize::MAX, Ordering::Release); // As in `set_bits`.
            }
        })?;
        grow(&self.blocks[block], host, last(slot)?, |at, info| {
            let (slot, node) = (at / self.nodes, at % self.nodes);
            if slot < untracked_slots {
                info.summary.store(usize::MAX, Ordering::Release); // As in `set_bits`.
                self.set_bits(self.any(slot, node));
            }
        })
    }

    /// Marks that a shrinker may have objects in a slot on a node, after they were made visible.
    pub(crate) fn mark<H: Host>(&self, inside: &Inside<'_>, host: &H, index: u32, slot: u32, node: u32) {
        let (block, unit) = ((index / BLOCK) as usize, index % BLOCK / UNIT);
        let unit_ref = self.unit_ref(block, slot, node, unit);
        let unit_ref = unit_ref.or_else(|| {
            self.grow(inside, host, block, slot).ok().and_then(|()| self.unit_ref(block, slot, node, unit))
        });
        let Some(unit_ref) = unit_ref else {
            // If only the info is missing, the slot has a bit.
            self.set_bits(self.any(slot, node));
            return;
        };
        let memory = unit_ref.info.unit_or_make(inside, host, unit).or_else(|| {
            self.set_bits(unit_ref.above());
            // SeqCst: as in `unit_or_make`.
            fence(Ordering::SeqCst);
            unit_ref.memory()
        });
        if let Some(memory) = memory {
            let [summary, any] = unit_ref.above();
            self.set_bits([Bit { word: &memory.bits, bit: index % UNIT }, summary, any]);
        }
    }

    /// Sets bits, and counts a mark if any was cleared.
    fn set_bits<'w>(&self, levels: impl IntoIterator<Item = Bit<'w>>) {
        if set_bits(levels) > 0 {
            self.count_mark();
        }
    }

    /// Counts a mark, after the bit was set: objects may exist that were not there a moment ago.
    pub(crate) fn count_mark(&self) {
        self.marks.0.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `marks`.
    }

    /// Returns the number of marks. The caller reads it before it looks at bits.
    pub(crate) fn marks(&self) -> u64 {
        // Pairs with the Release in `count_mark`: the bits of the counted marks are seen.
        self.marks.0.load(Ordering::Acquire)
    }

    /// Clears the bit of a slot on a node if no info of the slot has a bit. Returns whether the bit
    /// was cleared and stays cleared.
    ///
    /// `blocks` returns the number of blocks. It is called again after the fence, since a thread
    /// that marks in a new block may have found the bit still set.
    pub(crate) fn settle(&self, blocks: impl Fn() -> usize, slot: u32, node: u32) -> bool {
        let is_empty = || {
            (0..blocks()).all(|block| match self.info(block, slot, node) {
                Some(info) => info.summary.load(Ordering::Relaxed) == 0,
                None => !self.is_untracked(slot),
            })
        };
        match self.any(slot, node) {
            Some(any) if any.is_set() && is_empty() => {
                let stays = clear_bit_if_empty([any], is_empty);
                if !stays {
                    self.count_mark();
                }
                stays
            }
            _ => false,
        }
    }

    /// Returns whether a slot may have objects on a node.
    pub(crate) fn has_anything(&self, node: u32, slot: u32) -> bool {
        self.any(slot, node).map_or_else(|| self.is_untracked(slot), Bit::is_set)
    }

    /// Returns the first slot from `from` on that may have objects on a node.
    pub(crate) fn next_with_anything(&self, node: u32, from: u32) -> Option<u32> {
        let mut slot = from;
        while let Some(bit) = self.any(slot, node) {
            // Relaxed: objects added at this moment are for the next pass.
            let word = bit.word.load(Ordering::Relaxed) >> bit.bit;
            if word != 0 {
                return Some(slot + word.trailing_zeros());
            }
            slot = (slot / usize::BITS + 1).checked_mul(usize::BITS)?;
        }
        self.is_untracked(slot).then_some(slot)
    }
}

/// Grows a table until it has the entry `last`, and calls `each` with the new entries.
fn grow<H: Host, T: Entry>(table: &Table<T>, host: &H, last: u32, each: impl Fn(u32, &T)) -> Result<(), Errno> {
    while table.len() <= last {
        let before = table.len();
        table.grow(host.platform())?;
        (before..table.len()).for_each(|at| _ = table.get(at).map(|entry| each(at, entry)));
    }
    Ok(())
}

mod offline;
#[cfg(test)]
mod tests;
