//! Offlining of a group's slot: its bits and deferred work move to its heir.
//!
//! # Concurrency
//!
//! Threads may mark, visit and defer in the slot meanwhile. Each of them writes, executes a fence,
//! and then looks whether the group is leaving. The fence of [`ShrinkerInfos::offline`] follows the
//! store that says so. Either `offline` moves the thread's write, or the thread sees that the group
//! is leaving and moves its write to the heir.

use super::{BLOCK, InfoUnit, NUMBER, NUMBER_BITS, ShrinkerInfo, ShrinkerInfos, UNIT, UNITS, UnitRef};
use crate::host::Host;
use core::sync::atomic::Ordering;
use neap_base::gate::Inside;
use neap_base::sync::fence;

impl ShrinkerInfos {
    /// Moves deferred work and bits of a leaving group's slot to its heir.
    ///
    /// `shrinkers` returns the number of shrinker indexes that were ever used.
    pub(crate) fn offline<H: Host>(
        &self,
        inside: &Inside<'_>,
        host: &H,
        shrinkers: impl Fn() -> u32,
        slot: u32,
        heir: u32,
    ) {
        // SeqCst pairs with the fences of threads that write here: in `Groups::attach`, in
        // `clear_bit_if_empty`, and in a visit that has deferred work.
        fence(Ordering::SeqCst);
        let shrinkers = shrinkers();
        let blocks = shrinkers.div_ceil(BLOCK);
        for node in 0..self.nodes {
            let leaving = Leaving { infos: self, inside, host, slot, heir, node };
            for block in 0..blocks {
                let first = block * BLOCK;
                match self.info(block as usize, slot, node) {
                    Some(info) => {
                        leaving.move_units(info, first);
                        leaving.move_summary(info, first);
                    }
                    // Any shrinker of the block may have objects.
                    None if self.is_untracked(slot) => leaving.mark(first..shrinkers.min(first + BLOCK)),
                    None => {}
                }
            }
            self.settle(|| blocks as usize, slot, node);
        }
    }

    /// Adds a shrinker's deferred work to the heir's, if that has a counter.
    pub(crate) fn move_deferred(&self, from: &InfoUnit, index: u32, heir: u32, node: u32) {
        let counter = from.counter(index);
        if counter.load(Ordering::Relaxed) == 0 {
            return;
        }
        let word = counter.swap(0, Ordering::Relaxed);
        let (block, unit) = ((index / BLOCK) as usize, index % BLOCK / UNIT);
        let to = self.info(block, heir, node).and_then(|info| info.unit(unit));
        to.inspect(|to| _ = to.defer(index, (word >> NUMBER_BITS) as u32, word & NUMBER));
    }
}

/// A leaving group's slot on a node, and the slot of its heir.
struct Leaving<'a, H> {
    infos: &'a ShrinkerInfos,
    inside: &'a Inside<'a>,
    host: &'a H,
    slot: u32,
    heir: u32,
    node: u32,
}

impl<H: Host> Leaving<'_, H> {
    /// Marks that these shrinkers may have objects in the heir's slot.
    fn mark(&self, indexes: impl Iterator<Item = u32>) {
        indexes.for_each(|index| self.infos.mark(self.inside, self.host, index, self.heir, self.node));
    }

    /// Moves deferred work and bits of an info's units. `first` is the info's first shrinker.
    fn move_units(&self, info: &ShrinkerInfo, first: u32) {
        for (unit, memory) in info.units() {
            let first = first + unit * UNIT;
            for index in first..first + UNIT {
                if memory.counter(index).load(Ordering::Relaxed) != 0 {
                    // The mark makes a counter for the heir.
                    self.mark(index..index + 1);
                    self.infos.move_deferred(memory, index, self.heir, self.node);
                }
            }
            // Acquire and Release: as in `clear_bit_if_empty` and `set_bits`.
            let bits = memory.bits.swap(0, Ordering::Acquire);
            self.mark((0..UNIT).filter(|bit| bits >> bit & 1 != 0).map(|bit| first + bit));
        }
    }

    /// Clears an info's summary. Moves the bits that stand for all shrinkers of a unit, since there
    /// was no memory for it. `first` is the info's first shrinker.
    fn move_summary(&self, info: &ShrinkerInfo, first: u32) {
        let Some(any) = self.infos.any(self.slot, self.node) else { return };
        // Acquire: as in `clear_bit_if_empty`.
        let summary = info.summary.swap(0, Ordering::Acquire);
        for unit in (0..UNITS).filter(|unit| summary >> unit & 1 != 0) {
            if !info.unit(unit).is_some_and(InfoUnit::is_ready) {
                self.mark(first + unit * UNIT..first + (unit + 1) * UNIT);
            }
        }
        // A thread that marked meanwhile found the summary set, so this thread sets it again.
        for (unit, _) in info.units().filter(|(_, memory)| !memory.is_empty()) {
            self.infos.set_bits(UnitRef { info, unit, any }.above());
        }
    }
}
