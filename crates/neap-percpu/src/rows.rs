//! Rows and their owners.
//!
//! A row is a run of grains of one chunk and belongs to one owner. An owner's rows are on its list,
//! those with room first. The allocator's lock protects rows and owners. This module does not
//! handle pages.

use crate::chunk::NONE;
use crate::pool::Pool;

/// An end of a list. Searches begin at the head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ListEnd {
    Head,
    Tail,
}

/// A row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) chunk: u32,
    /// The first grain, and the number of grains.
    pub(crate) start: u32,
    pub(crate) width: u32,
    pub(crate) owner: u32,
    pub(crate) next: u32,
    pub(crate) prev: u32,
    /// Granules that are in no allocation.
    pub(crate) free: u32,
    /// Whether the row is on its owner's list. It is not while its pages are being populated.
    pub(crate) listed: bool,
}

impl Row {
    /// Number of the grain behind the last.
    pub(crate) fn end(&self) -> usize {
        (self.start + self.width) as usize
    }
}

/// An owner of rows. The value is valid until [`close_owner`](crate::PerCpuData::close_owner).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Owner {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl Owner {
    /// The owner of allocations that have no other owner. They share rows, and are not charged.
    pub const NONE: Owner = Owner { index: 0, generation: 1 };

    /// The owner as a number; 0 for [`Owner::NONE`].
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation.wrapping_sub(1)) << 32 | u64::from(self.index)
    }

    /// The owner that [`Owner::to_bits`] turned into `bits`. Any other number gives an unknown
    /// owner.
    pub fn from_bits(bits: u64) -> Owner {
        Owner { index: bits as u32, generation: ((bits >> 32) as u32).wrapping_add(1) }
    }
}

/// An owner's record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) head: u32,
    pub(crate) tail: u32,
    pub(crate) generation: u32,
    pub(crate) exists: bool,
    /// Word that names the payer, in a format of the layers above; 0 without a payer.
    pub(crate) payer: u64,
    /// Width of all its rows, in bytes per CPU.
    pub(crate) bytes: u64,
}

/// All rows and owners.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) rows: Pool<Row>,
    pub(crate) owners: Pool<Record>,
    /// Bytes of a grain, per CPU.
    pub(crate) grain: usize,
}

impl Rows {
    /// Creates an owner with the word of its payer, or 0. `None` if no record is free.
    pub(crate) fn open(&mut self, payer: u64) -> Option<Owner> {
        let index = self.owners.take()?;
        let generation = self.owners.get(index).generation.wrapping_add(1);
        *self.owners.get_mut(index) = Record { head: NONE, tail: NONE, generation, exists: true, payer, bytes: 0 };
        Some(Owner { index, generation })
    }

    pub(crate) fn record(&self, owner: Owner) -> Option<&Record> {
        let known = owner.index < self.owners.reach();
        let record = known.then(|| self.owners.get(owner.index))?;
        (record.exists && record.generation == owner.generation).then_some(record)
    }

    /// Ends an owner without rows.
    pub(crate) fn close(&mut self, owner: Owner) {
        let record = self.owners.get_mut(owner.index);
        record.exists = false;
        self.owners.give(owner.index);
    }

    /// Puts a row on its owner's list.
    pub(crate) fn list(&mut self, row: u32, end: ListEnd) {
        let owner = self.rows.get(row).owner;
        let record = self.owners.get_mut(owner);
        let (next, prev) = match end {
            ListEnd::Head => (record.head, NONE),
            ListEnd::Tail => (NONE, record.tail),
        };
        if next == NONE {
            record.tail = row
        } else {
            self.rows.get_mut(next).prev = row
        }
        if prev == NONE {
            record.head = row
        } else {
            self.rows.get_mut(prev).next = row
        }
        let own = self.rows.get_mut(row);
        (own.next, own.prev, own.listed) = (next, prev, true);
        record.bytes += u64::from(own.width) * self.grain as u64;
    }

    /// Removes a row from its owner's list.
    pub(crate) fn unlist(&mut self, row: u32) {
        let own = self.rows.get_mut(row);
        own.listed = false;
        let Row { next, prev, owner, width, .. } = *own;
        let record = self.owners.get_mut(owner);
        record.bytes -= u64::from(width) * self.grain as u64;
        if next == NONE {
            record.tail = prev
        } else {
            self.rows.get_mut(next).prev = prev
        }
        if prev == NONE { record.head = next } else { self.rows.get_mut(prev).next = next }
    }

    /// Moves a row to an end of its owner's list.
    pub(crate) fn relist(&mut self, row: u32, end: ListEnd) {
        self.unlist(row);
        self.list(row, end);
    }
}
