//! The table of ids in a process's memory: the group behind each id, and the bytes that are booked
//! under ids of deleted groups.

use anyhow::Result;
use neap_groups::DEEPEST;

use super::super::Gone;
use super::TableEntries;
use super::table::{MOST_OF_ENTRY, RemoteTable};
use crate::look::allowance::Allowance;
use crate::look::remote_memory::{MemoryLayout, RemoteMemory, long_at, short_at};

/// The ids.
pub(super) struct Ids {
    /// Links by index.
    links: Vec<u32>,
    /// Ids of deleted groups, with the bytes that are booked under each.
    gone: Vec<(u64, u64)>,
    index: u64,
    free: u64,
    heir: u64,
    dying: u64,
}

impl Ids {
    pub(super) fn read(memory: &RemoteMemory<'_>, layout: MemoryLayout<'_>, allowance: &Allowance) -> Result<Ids> {
        let at = |name: &str| layout.size(name, MOST_OF_ENTRY);
        let (generation, link) = (at("in_id_generation")?, at("in_id_link")?);
        let (references, heirs) = (at("in_id_references")?, at("in_id_heirs")?);
        let bits = layout.size("index_bits", 32)?;
        let mut ids = Ids {
            links: Vec::new(),
            gone: Vec::new(),
            index: (1 << bits) - 1,
            free: layout.get("free_link")?,
            heir: layout.get("heir_bit")?,
            dying: layout.get("dying_bit")?,
        };
        let table = RemoteTable { layout, chunks: "ids_table", count: "at_indexes", length: "id_length" };
        table.each(memory, &mut |index, bytes| {
            // A list grows to up to twice its length.
            allowance.take(2 * size_of::<u32>())?;
            let (link, references) = (short_at(bytes, link), long_at(bytes, references));
            ids.links.push(link as u32);
            if references > 0 && link != ids.free && link & ids.heir != 0 {
                allowance.take(2 * size_of::<(u64, u64)>())?;
                let others = short_at(bytes, heirs) + u64::from(link & ids.dying != 0);
                let id = index | short_at(bytes, generation) << bits;
                ids.gone.push((id, references.saturating_sub(others)));
            }
            Ok(())
        })?;
        Ok(ids)
    }

    /// Returns the slot of the group of an id, or of its heir. Memory, stocks and waiters refer to
    /// their ids, so no other id has the index of one of these.
    pub(super) fn slot_of(&self, id: u64) -> Option<u64> {
        let mut index = id & self.index;
        // Each link leads to a group that was above the one before it.
        for _ in 0..=DEEPEST {
            match u64::from(*self.links.get(index as usize)?) {
                link if link == self.free => return None,
                link if link & self.heir == 0 => return Some(link),
                link => index = link & !(self.heir | self.dying),
            }
        }
        None
    }

    /// Returns the group behind an id.
    pub(super) fn group_of(&self, id: u64, entries: &TableEntries) -> Option<u64> {
        entries.at(self.slot_of(id)?).map(|entry| entry.group.id)
    }

    /// Returns the ids of deleted groups that are still referred to. Leaves out an id whose heir
    /// was made after the groups were read.
    pub(super) fn gone(&self, entries: &TableEntries, allowance: &Allowance) -> Result<Vec<Gone>> {
        let mut all = Vec::new();
        for &(id, bytes) in &self.gone {
            if let Some(heir) = self.group_of(id, entries) {
                allowance.take(2 * size_of::<Gone>())?;
                all.push(Gone { id, heir, bytes });
            }
        }
        Ok(all)
    }
}
