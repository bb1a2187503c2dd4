//! The places of the groups' numbers in memory, for a debugger or a monitor that reads the memory
//! of this process from outside.
//!
//! A monitor computes offsets and sizes from the fields alone, so it may be of another version than
//! this crate. It takes no lock: while threads charge, it may read numbers of different moments.

use crate::group::{Bound, Counters, Event, Group, LONGEST_NAME, SharedName};
use crate::groups::Groups;
use crate::id::{ID_BITS, Kind};
use crate::table::FIRST;
use core::mem::offset_of;
use neap_base::Platform;
use neap_percpu::Handle;

impl Groups {
    /// Returns names and values: sizes and counts; addresses of words that change (`at_...`) and of
    /// tables (`..._table`); and offsets in an entry of the table of groups (`in_group_...`). They
    /// stay the same until the groups are closed. Takes the tree's mutex and that of the ids.
    pub fn memory_layout<P: Platform>(&self, platform: &P) -> [(&'static str, u64); 36] {
        let counters = offset_of!(Group, counters);
        let name = offset_of!(Group, name);
        let [at_dying, at_slots] = self.tree.count_words().map(|word| word.expose_provenance());
        let stocks = self.stocks.memory_layout();
        [
            ("nodes", self.nodes),
            ("bounds", Bound::ALL.len()),
            ("kinds", Kind::ALL.len()),
            ("events", Event::ALL.len()),
            ("bytes", self.bytes(platform)),
            ("at_dying", at_dying),
            ("at_slots", at_slots),
            ("at_ids", self.tree.owners.used_word().expose_provenance()),
            ("at_fences", stocks.fences.expose_provenance()),
            ("chunks_table", self.tree.slots.chunks_word().expose_provenance()),
            ("first_chunk", FIRST as usize),
            ("group_length", size_of::<Group>()),
            ("in_group_usage", counters + offset_of!(Counters, usage)),
            ("in_group_peak", counters + offset_of!(Counters, peak)),
            ("in_group_id", offset_of!(Group, id)),
            ("in_group_bounds", offset_of!(Group, bounds)),
            ("in_group_parent", offset_of!(Group, parent)),
            ("in_group_is_leaving", offset_of!(Group, is_leaving)),
            ("in_group_name_length", name + offset_of!(SharedName, length)),
            ("in_group_name", name + offset_of!(SharedName, words)),
            ("in_group_rest", counters + offset_of!(Counters, rest)),
            ("in_group_first_waiter", offset_of!(Group, first_waiter)),
            ("in_group_counts", offset_of!(Group, counts)),
            ("in_group_stalls", offset_of!(Group, stalls)),
            ("in_group_stalled_since", offset_of!(Group, stalled_since)),
            ("in_group_stalled", offset_of!(Group, stalled)),
            ("in_group_local_events", offset_of!(Group, local_events)),
            ("in_group_events_below", offset_of!(Group, events_below)),
            ("name_length", LONGEST_NAME),
            ("stocks_table", stocks.lines),
            ("stocks_cpus", stocks.cpus),
            ("stocks_stride", stocks.stride),
            ("stocks_words", stocks.words),
            ("stock_bytes_bits", stocks.bytes_bits as usize),
            ("id_bits", ID_BITS as usize),
            ("handle_address_bits", Handle::ADDRESS_BITS as usize),
        ]
        .map(|(name, value)| (name, value as u64))
    }

    /// Returns names and values of the table of ids, as [`Groups::memory_layout`] does for groups.
    /// An entry (`in_id_...`) is free if its link is `free_link`. A link with `heir_bit` leads to
    /// another entry, by its lower bits, and any other link is the slot of a group. The references
    /// of an entry are its booked bytes, its heirs, and one for its own group, which has not ended
    /// if the link lacks `heir_bit` or has `dying_bit`.
    pub fn ids_layout(&self) -> [(&'static str, u64); 12] {
        self.tree.owners.memory_layout().map(|(name, value)| (name, value as u64))
    }

    /// Returns names and values of the table of waiters, as [`Groups::memory_layout`] does for
    /// groups. Entries in the states `waiting` and `held` are charges that wait. Takes the waiters'
    /// mutex.
    pub fn waits_layout(&self) -> [(&'static str, u64); 12] {
        self.waiters.memory_layout().map(|(name, value)| (name, value as u64))
    }
}
