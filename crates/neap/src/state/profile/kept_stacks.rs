//! The stacks of live samples whose records leave the ring, in cells of the
//! [area](neap_base::profile_area).
//!
//! # Design
//! A stack is packed into a chain of cells. Words that cannot be addresses are left out, because
//! unwinding needs only return addresses and pointers into the stack. Other processes may write to
//! the area. So [`KeptStacks`] has a copy of the chains' links, in memory that only this process
//! can write to. All zeroes is a state without stacks.
//!
//! # Invariants
//! A cell is free, never used, or in the chain of one entry of the
//! [table](super::sample_table::SampleTable).

use core::ptr::NonNull;
use neap_base::profile_area::{CELL_BYTES, CELL_COUNT, GROUP_WORDS, MOST_CELLS, NOT_KEPT, SLOT_COUNT};
use neap_os::call_stack::{ADDRESS_END, without_signature};

const CELL_WORDS: usize = CELL_BYTES / 8;

/// Words of a cell. The first is the link to the next one.
pub(super) type Cell = [u64; CELL_WORDS];

/// Addresses of code lie between this one and [`ADDRESS_END`].
const LOWEST_ADDRESS: u64 = 1 << 12;

/// The cells in use. Links are numbers of cells plus 1; 0 ends a chain.
#[derive(Debug)]
#[repr(C)]
pub(super) struct KeptStacks {
    /// Cells from this one on were never used.
    unused: u32,
    /// First cell of the chain of free ones.
    free: u32,
    /// The addresses of the group that is being packed.
    group: [u64; GROUP_WORDS],
    next: [u32; CELL_COUNT],
    /// First cells of the entries' chains.
    first: [u32; SLOT_COUNT],
}

/// Why a word was not written.
enum Ended {
    /// The stack fills [`MOST_CELLS`] cells, the most that a stack may have.
    Full,
    /// All cells are in use.
    NoCell,
}

/// A chain of cells that is being written.
struct Writer<'a> {
    kept: &'a mut KeptStacks,
    cells: NonNull<Cell>,
    first: u32,
    last: u32,
    count: usize,
    /// Words of the last cell.
    used: usize,
}

impl Writer<'_> {
    /// Writes a word, and returns its place.
    ///
    /// # Safety
    /// `cells` are the cells of a mapped area that no other thread writes to.
    #[inline]
    unsafe fn push(&mut self, word: u64) -> Result<NonNull<u64>, Ended> {
        // SAFETY: a link other than 0 leads to a cell of the mapped area (the caller's promise),
        // and 0 is not passed.
        let at = |link: u32| unsafe { self.cells.add(link as usize - 1) }.cast::<u64>();
        if self.last == 0 || self.used == CELL_WORDS {
            if self.count == MOST_CELLS {
                return Err(Ended::Full);
            }
            let cell = self.kept.take().ok_or(Ended::NoCell)?;
            if self.last == 0 {
                self.first = cell;
            } else {
                self.kept.next[self.last as usize - 1] = cell;
                // SAFETY: `at` returns the first word of a cell, and no other thread writes to it
                // (the caller's promise).
                unsafe { at(self.last).write(cell.into()) };
            }
            // SAFETY: `at` returns the first word of a cell, and no other thread writes to it (the
            // caller's promise).
            unsafe { at(cell).write(0) };
            (self.last, self.count, self.used) = (cell, self.count + 1, 1);
        }
        // SAFETY: `used` is less than `CELL_WORDS`, so the word lies in the cell.
        let place = unsafe { at(self.last).add(self.used) };
        // SAFETY: `place` is a word of a cell, and no other thread writes to it (the caller's
        // promise).
        unsafe { place.write(word) };
        self.used += 1;
        Ok(place)
    }

    /// Writes a stack. Stops at the first word that does not fit.
    ///
    /// # Safety
    /// * `cells` are the cells of a mapped area that no other thread writes to.
    /// * `words` words from `stack` on are mapped.
    unsafe fn write(&mut self, registers: [u64; 3], stack: NonNull<u64>, words: usize) -> Result<(), Ended> {
        // This has no branch, because the CPU could hardly predict which words are addresses.
        let is_address = |word: u64| {
            let from_lowest = without_signature(word).wrapping_sub(LOWEST_ADDRESS);
            let from_stack = word.wrapping_sub(registers[1]);
            u64::from((from_lowest < ADDRESS_END - LOWEST_ADDRESS) | (from_stack < words as u64 * 8))
        };
        // SAFETY: no other thread writes to the mapped cells, as `push` requires, and the words of
        // the stack are mapped (the caller's promise). `count` is a word of such a cell, so it
        // stays valid. Volatile: another process may write the stack meanwhile.
        unsafe {
            for register in registers {
                self.push(register)?;
            }
            let count = self.push(0)?;
            for start in (0..words).step_by(GROUP_WORDS) {
                let (end, mut mask, mut found) = (words.min(start + GROUP_WORDS), 0, 0);
                for at in start..end {
                    let word = stack.add(at).read_volatile();
                    self.kept.group[found % GROUP_WORDS] = word;
                    found += is_address(word) as usize;
                    mask |= is_address(word) << (at - start);
                }
                self.push(mask)?;
                for at in 0..found {
                    self.push(self.kept.group[at % GROUP_WORDS])?;
                }
                if mask > 0 {
                    count.write(end as u64);
                }
            }
        }
        Ok(())
    }
}

impl KeptStacks {
    /// Takes a free cell.
    fn take(&mut self) -> Option<u32> {
        let cell = match self.free {
            0 if self.unused as usize == CELL_COUNT => return None,
            0 => {
                self.unused += 1;
                self.unused
            }
            free => free,
        };
        if self.free > 0 {
            self.free = self.next[cell as usize - 1];
        }
        debug_assert!(cell <= self.unused && self.unused as usize <= CELL_COUNT);
        self.next[cell as usize - 1] = 0;
        Some(cell)
    }

    /// Frees the cells of an entry. Takes at most [`MOST_CELLS`] steps.
    pub(super) fn free(&mut self, entry: usize) {
        let first = core::mem::take(&mut self.first[entry]);
        self.free_chain(first);
    }

    fn free_chain(&mut self, first: u32) {
        let mut link = first;
        while link > 0 {
            let next = core::mem::replace(&mut self.next[link as usize - 1], self.free);
            self.free = link;
            link = next;
        }
    }

    /// Returns the words of an entry's [packed stack](neap_base::packed_stack).
    ///
    /// # Safety
    /// `cells` are the cells of an area that stays mapped while the words are read.
    pub(super) unsafe fn stream(&self, cells: NonNull<Cell>, entry: usize) -> impl Iterator<Item = u64> {
        let (mut link, mut at) = (self.first[entry], 1);
        core::iter::from_fn(move || {
            if at == CELL_WORDS && link > 0 {
                (link, at) = (self.next[link as usize - 1], 1);
            }
            let cell = (link as usize).checked_sub(1)?;
            at += 1;
            // SAFETY: a link other than 0 leads to a cell of the area, which stays mapped (the
            // caller's promise). `at` is at most `CELL_WORDS`. Volatile: another process may write
            // it, and any value is valid.
            Some(unsafe { cells.add(cell).cast::<u64>().add(at - 1).read_volatile() })
        })
    }

    /// Keeps the stack of an entry: registers, and `words` words from `stack` on. Returns the value
    /// for the field `kept` of the entry's slot. If the entry has a stack, changes nothing.
    ///
    /// # Safety
    /// * `cells` are the cells of a mapped area that no other thread of the process writes to.
    /// * `words` words from `stack` on are mapped.
    pub(super) unsafe fn keep(
        &mut self,
        cells: NonNull<Cell>,
        entry: usize,
        registers: [u64; 3],
        stack: NonNull<u64>,
        words: usize,
    ) -> u32 {
        // The entry has a stack if another process has copied its record within the ring.
        if self.first[entry] > 0 {
            return self.first[entry];
        }
        let mut writer = Writer { kept: self, cells, first: 0, last: 0, count: 0, used: 0 };
        // SAFETY: the cells are mapped, no other thread writes to them, and the words are mapped
        // (the caller's promise).
        let written = unsafe { writer.write(registers, stack, words) };
        let first = writer.first;
        if let Err(Ended::NoCell) = written {
            self.free_chain(first);
            return NOT_KEPT;
        }
        self.first[entry] = first;
        first
    }
}

#[cfg(test)]
impl KeptStacks {
    /// Number of cells that are in chains of entries.
    pub(super) fn used(&self) -> usize {
        self.first.iter().map(|&first| self.chain(first).count()).sum()
    }

    fn chain(&self, first: u32) -> impl Iterator<Item = u32> {
        let next = |&link: &u32| (link > 0).then(|| self.next[link as usize - 1]);
        // A circle ends, too.
        core::iter::successors(Some(first), next).take_while(|&link| link > 0).take(CELL_COUNT + 1)
    }

    /// Checks that each cell is in one chain.
    pub(super) fn verified(&self) -> Result<(), std::string::String> {
        let mut seen = std::vec![0; CELL_COUNT];
        let firsts = self.first.iter().chain([&self.free]);
        firsts.flat_map(|&first| self.chain(first)).for_each(|link| seen[link as usize - 1] += 1);
        let wrong = seen.iter().enumerate().find(|(cell, count)| **count != i32::from(*cell < self.unused as usize));
        wrong.map_or(Ok(()), |(cell, count)| Err(std::format!("cell {cell} is in {count} chains")))
    }
}
