//! The samples that are live, by address.
//!
//! # Design
//! A hash table with chains, in memory that only this process can write to. All zeroes is an empty
//! table, so untouched parts take no memory. An entry has the number of its slot in the
//! [area](neap_base::profile_area).

use super::kept_stacks::KeptStacks;
use core::ptr::NonNull;
use neap_base::platform::Errno;
use neap_base::profile_area::SLOT_COUNT;
use neap_os::memory;

const BUCKETS: usize = 1 << 16;

/// The memory of a table. Links are numbers of entries plus 1; 0 ends a chain.
#[repr(C)]
struct Entries {
    first: [u32; BUCKETS],
    next: [u32; SLOT_COUNT],
    /// Addresses of the allocations.
    addresses: [u64; SLOT_COUNT],
    /// Numbers of the samples.
    numbers: [u64; SLOT_COUNT],
    kept: KeptStacks,
}

/// A table of at most [`SLOT_COUNT`] samples.
#[derive(Debug)]
pub(super) struct SampleTable {
    entries: NonNull<Entries>,
    /// Entries from this one on were never used.
    unused: u32,
    /// First entry of the chain of free ones.
    free: u32,
    live: u32,
}

/// A sample that was removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RemovedSample {
    /// Number of its entry.
    pub(super) index: usize,
    /// Number of the sample.
    pub(super) number: u64,
}

// SAFETY: the table owns its memory, and no other code refers to that memory.
unsafe impl Send for SampleTable {}

impl SampleTable {
    /// Makes an empty table.
    ///
    /// # Errors
    /// The system's error if it gives no address space.
    pub(super) fn make() -> Result<SampleTable, Errno> {
        let address = memory::map(Self::bytes())?;
        let entries = NonNull::new(core::ptr::with_exposed_provenance_mut(address)).ok_or(Errno::NOMEM)?;
        Ok(SampleTable { entries, unused: 0, free: 0, live: 0 })
    }

    /// Number of entries that were ever used.
    pub(super) fn used(&self) -> usize {
        self.unused as usize
    }

    fn bytes() -> usize {
        size_of::<Entries>().next_multiple_of(memory::page_size())
    }

    /// Unmaps the table.
    pub(super) fn close(self) {
        // SAFETY: `make` mapped it, and this was the only user.
        let _ = unsafe { memory::unmap(self.entries.addr().get(), Self::bytes()) };
    }

    fn entries(&mut self) -> &mut Entries {
        // SAFETY: mapped by `make` for this table alone; numbers of any value are valid.
        unsafe { self.entries.as_mut() }
    }

    fn shared(&self) -> &Entries {
        // SAFETY: mapped by `make` for this table alone; numbers of any value are valid.
        unsafe { self.entries.as_ref() }
    }

    /// The kept stacks, by the numbers of entries.
    pub(super) fn kept(&self) -> &KeptStacks {
        &self.shared().kept
    }

    pub(super) fn kept_mut(&mut self) -> &mut KeptStacks {
        &mut self.entries().kept
    }

    pub(super) fn live(&self) -> u32 {
        self.live
    }

    /// Adds a sample. Returns the number of its entry; `None` if the table is full.
    pub(super) fn insert(&mut self, address: u64, number: u64) -> Option<usize> {
        let entry = match self.free {
            0 if self.unused as usize == SLOT_COUNT => return None,
            0 => {
                self.unused += 1;
                self.unused - 1
            }
            free => free - 1,
        };
        let index = entry as usize;
        if self.free > 0 {
            self.free = self.entries().next[index];
        }
        let (bucket, entries) = (bucket(address), self.entries());
        entries.addresses[index] = address;
        entries.numbers[index] = number;
        entries.next[index] = entries.first[bucket];
        entries.first[bucket] = entry + 1;
        self.live += 1;
        Some(index)
    }

    /// Returns whether the sample at an address has the number `number`.
    pub(super) fn has(&self, address: u64, number: u64) -> bool {
        self.find(address, number).is_some()
    }

    /// Returns the number of the entry of a sample.
    pub(super) fn find(&self, address: u64, number: u64) -> Option<usize> {
        let entries = self.shared();
        let mut link = entries.first[bucket(address)];
        while link > 0 {
            let index = link as usize - 1;
            if entries.addresses[index] == address {
                return (entries.numbers[index] == number).then_some(index);
            }
            link = entries.next[index];
        }
        None
    }

    /// Removes the sample at an address, and returns it.
    pub(super) fn remove(&mut self, address: u64) -> Option<RemovedSample> {
        let (bucket, entries) = (bucket(address), self.entries());
        let (mut before, mut link) = (None, entries.first[bucket]);
        while link > 0 {
            let index = link as usize - 1;
            if entries.addresses[index] == address {
                let (next, number) = (entries.next[index], entries.numbers[index]);
                match before {
                    None => entries.first[bucket] = next,
                    Some(before) => entries.next[before] = next,
                }
                let free = self.free;
                self.entries().next[index] = free;
                self.free = link;
                self.live -= 1;
                return Some(RemovedSample { index, number });
            }
            (before, link) = (Some(index), entries.next[index]);
        }
        None
    }
}

/// Returns the bucket of an address. Drops the low four bits, since an allocation's address is a
/// multiple of 16. Multiplies the rest by the golden ratio, and takes the high bits.
fn bucket(address: u64) -> usize {
    ((address >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - BUCKETS.ilog2())) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn the_table_is_as_a_map_is() {
        const SEED: u64 = 11;
        let (mut table, mut model, mut random) = (SampleTable::make().unwrap(), HashMap::new(), SEED);
        for number in 1..400_000_u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let address = (random >> 40) % 60_000 * 16;
            let removed = table.remove(address);
            assert_eq!(removed, model.remove(&address), "seed {SEED}, step {number}");
            assert!(!table.has(address, number));
            if random >> 62 > 0 {
                let entry = table.insert(address, number).unwrap();
                assert!(entry < 60_000, "entries are used again");
                assert!(table.has(address, number) && !table.has(address, number + 1));
                model.insert(address, RemovedSample { index: entry, number });
            }
            assert_eq!(table.live() as usize, model.len());
        }
        table.close();
    }

    #[test]
    fn a_full_table_takes_samples_again_once_one_is_removed() {
        let mut table = SampleTable::make().unwrap();
        (0..SLOT_COUNT as u64).for_each(|n| assert_eq!(table.insert(n * 16, n + 1), Some(n as usize)));
        assert_eq!(table.insert(1 << 40, 7), None);
        assert_eq!(table.remove(160), Some(RemovedSample { index: 10, number: 11 }));
        assert_eq!(table.insert(1 << 40, 7), Some(10));
        assert_eq!(table.remove(1 << 40), Some(RemovedSample { index: 10, number: 7 }));
        assert_eq!(table.live() as usize, SLOT_COUNT - 1);
        table.close();
    }
}
