//! Per-CPU counts of a group: the bytes charged to it alone, by kind and node.
//!
//! # Design
//!
//! Each group is an owner of per-CPU data, and has one allocation there. Its copy on a CPU has a
//! word for each node and kind: `node * Kind::ALL.len() + kind`. A charge adds to the copy of its
//! CPU. The uncharge may run on another CPU. So a word may be negative, and only the sum over all
//! CPUs is a number of bytes.
//!
//! The counts of a deleted group move to its heir at once. Counts of charges that were under way
//! follow at the end of the grace period.
//!
//! # Locking
//!
//! This module has no lock. During a read a group keeps its slot, and its counts are not freed.

use crate::group::Group;
use crate::groups::Groups;
use crate::id::{Kind, Payer};
use crate::id_table::IdTarget;
use core::sync::atomic::{AtomicI64, Ordering};
use neap_base::Platform;
use neap_percpu::{Handle, Host};

impl Groups {
    /// Adds to the counts of a group, on this CPU.
    pub(crate) fn count_charged<H: Host>(&self, host: &H, group: &Group, payer: Payer, bytes: u64) {
        let index = payer.node().min(self.nodes - 1) * Kind::ALL.len() + payer.kind() as usize;
        let cpu = host.platform().cpu();
        if let Some(count) = self.counts(host, group, cpu).and_then(|counts| counts.get(index)) {
            count.fetch_add(bytes as i64, Ordering::Relaxed);
        }
    }

    /// Returns the counts of a group on a CPU. The caller is within a read, ends the group's grace
    /// period, or is the only user of the groups.
    fn counts<'h, H: Host>(&self, host: &'h H, group: &Group, cpu: usize) -> Option<&'h [AtomicI64]> {
        let handle = core::num::NonZeroU64::new(group.counts.load(Ordering::Relaxed))?;
        let copy = host.data().copy(Handle::from_bits(handle), cpu)?.cast::<AtomicI64>();
        // SAFETY: `counts_of_new_group` allocated this many words in each copy. They are freed only
        // after the group's grace period, which has not ended for the caller: it is within a read,
        // ends that period itself, or is the only user of the groups.
        Some(unsafe { core::slice::from_raw_parts(copy, self.nodes * Kind::ALL.len()) })
    }

    /// Returns the bytes charged to a group alone, of one kind.
    pub(crate) fn of_kind<H: Host>(&self, host: &H, group: &Group, kind: Kind) -> u64 {
        (0..self.nodes).map(|node| self.counted(host, group, kind, node)).sum()
    }

    pub(crate) fn counted<H: Host>(&self, host: &H, group: &Group, kind: Kind, node: usize) -> u64 {
        let index = node * Kind::ALL.len() + kind as usize;
        let words = (0..host.data().cpus()).filter_map(|cpu| self.counts(host, group, cpu)?.get(index));
        words.map(|word| word.load(Ordering::Relaxed)).fold(0, i64::wrapping_add).max(0) as u64
    }

    /// Adds the counts of a deleted group to those of its heir.
    pub(crate) fn reparent_counts<H: Host>(&self, host: &H, group: &Group) {
        let _reading = self.rcu.enter();
        let Some(IdTarget::Heir(slot)) = self.tree.owners.behind(group.id()) else { return };
        let Some(heir) = self.tree.group(slot) else { return };
        for cpu in 0..host.data().cpus() {
            let (Some(from), Some(to)) = (self.counts(host, group, cpu), self.counts(host, heir, cpu)) else { return };
            for (from, to) in from.iter().zip(to) {
                to.fetch_add(from.swap(0, Ordering::Relaxed), Ordering::Relaxed);
            }
        }
    }
}
