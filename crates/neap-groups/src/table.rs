//! A table that grows and never moves. Threads name an entry by its index, and read it without a
//! lock.
//!
//! Each chunk is as large as all before it, so the table takes at most about twice the needed
//! memory. The caller lets only one thread at a time grow it. Chunks are unmapped only with the
//! whole table, so an index that was once valid stays valid.

use core::marker::PhantomData;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use neap_base::Platform;
use neap_base::platform::Errno;

/// Entries of the first chunk. Pages that were never touched take no memory.
pub(crate) const FIRST: u32 = 256;
const CHUNKS: usize = 16;

/// An entry of a [`Table`].
///
/// # Safety
/// Zeroed memory is a valid value of the type, and all changes of an entry are atomic.
pub unsafe trait Entry: Sync {}

/// A table of entries of one type.
#[derive(Debug)]
pub struct Table<T: Entry> {
    chunks: [AtomicPtr<T>; CHUNKS],
    /// Number of entries.
    length: AtomicU32,
    entries: PhantomData<T>,
}

/// A chunk of a table.
struct TableChunk {
    /// Index into [`Table::chunks`].
    number: usize,
    /// Index of the first entry.
    first: u32,
    /// Number of entries.
    length: u32,
}

/// Returns the chunk of an entry's index.
const fn chunk_of(index: u32) -> TableChunk {
    let log = (index | (FIRST - 1)).ilog2();
    // The first chunk begins at 0, and is as long as the second.
    let first = 1 << log & !(FIRST - 1);
    let length = if first == 0 { FIRST } else { first };
    TableChunk { number: (log + 1 - FIRST.ilog2()) as usize, first, length }
}

impl<T: Entry> Table<T> {
    /// Returns an empty table.
    pub const fn new() -> Table<T> {
        Table {
            chunks: [const { AtomicPtr::new(core::ptr::null_mut()) }; CHUNKS],
            length: AtomicU32::new(0),
            entries: PhantomData,
        }
    }

    /// Returns the number of entries.
    #[expect(clippy::len_without_is_empty, reason = "callers want an index")]
    pub fn len(&self) -> u32 {
        self.length.load(Ordering::Acquire) // Pairs with the Release in `grow`.
    }

    /// Returns the address of the pointers to the chunks.
    pub(crate) fn chunks_word(&self) -> *const AtomicPtr<T> {
        self.chunks.as_ptr()
    }

    /// Returns an entry; `None` from [`Table::len`] on.
    pub fn get(&self, index: u32) -> Option<&T> {
        if index >= self.len() {
            return None;
        }
        let TableChunk { number, first, .. } = chunk_of(index);
        // Relaxed: the Acquire in `len` makes the store in `grow` visible.
        let chunk = self.chunks[number].load(Ordering::Relaxed);
        // SAFETY: the index is below the length, so `grow` has mapped its chunk with room for it.
        // Zeroed memory is a valid entry by the contract of [`Entry`]. Chunks stay mapped until
        // `close`.
        Some(unsafe { &*chunk.add((index - first) as usize) })
    }

    /// Adds a chunk of zeroes. Only one thread at a time may call this.
    ///
    /// # Errors
    /// The error of the system, or [`Errno::NOMEM`] if the table is full.
    pub fn grow<P: Platform>(&self, platform: &P) -> Result<(), Errno> {
        let TableChunk { number, first, length } = chunk_of(self.len());
        let place = self.chunks.get(number).ok_or(Errno::NOMEM)?;
        let memory = platform.map(bytes::<T, P>(platform, length))?;
        place.store(core::ptr::with_exposed_provenance_mut(memory), Ordering::Relaxed);
        self.length.store(first + length, Ordering::Release); // Pairs with the Acquire in `len`.
        Ok(())
    }

    /// Calls `each` with the start and length of every chunk.
    pub(crate) fn each_mapping<P: Platform>(&self, platform: &P, each: &mut dyn FnMut(usize, usize)) {
        self.each_chunk().for_each(|(chunk, length)| each(chunk.addr(), bytes::<T, P>(platform, length)));
    }

    /// Returns the number of mapped bytes.
    pub fn bytes<P: Platform>(&self, platform: &P) -> usize {
        self.each_chunk().map(|(_, length)| bytes::<T, P>(platform, length)).sum()
    }

    fn each_chunk(&self) -> impl Iterator<Item = (*mut T, u32)> {
        let starts = core::iter::successors(Some(0), |&first| Some(first + chunk_of(first).length));
        let lengths = starts.map(|first| chunk_of(first).length);
        let chunks = self.chunks.iter().map(|chunk| chunk.load(Ordering::Relaxed));
        chunks.zip(lengths).take_while(|(chunk, _)| !chunk.is_null())
    }

    /// Unmaps all chunks.
    ///
    /// # Safety
    /// No thread has an entry or uses the table, and the platform is the one that it grew on.
    pub unsafe fn close<P: Platform>(&self, platform: &P) {
        self.length.store(0, Ordering::Relaxed);
        for (chunk, length) in self.each_chunk() {
            // SAFETY: `grow` mapped the chunk with this length on this platform, and by this
            // function's contract no thread has an entry.
            unsafe { platform.unmap(chunk.expose_provenance(), bytes::<T, P>(platform, length)) };
        }
    }
}

impl<T: Entry> Default for Table<T> {
    fn default() -> Self {
        Table::new()
    }
}

fn bytes<T, P: Platform>(platform: &P, entries: u32) -> usize {
    (entries as usize * size_of::<T>()).next_multiple_of(platform.page_size())
}

#[cfg(test)]
mod tests {
    use super::*;
    use neap_testing::virtual_platform::Virtual;

    // SAFETY: an atomic integer is valid if its memory is zeroed.
    unsafe impl Entry for AtomicU32 {}

    #[test]
    fn entries_stay_where_they_are() {
        let machine = Virtual::new(4096, 1);
        let table = Table::<AtomicU32>::new();
        assert!(table.get(0).is_none());
        let mut first = None;
        for _ in 0..if cfg!(miri) { 3 } else { 8 } {
            let before = table.len();
            table.grow(&machine).unwrap();
            assert!(table.len() == 2 * before || before == 0 && table.len() == FIRST);
            for index in before..table.len() {
                let entry = table.get(index).unwrap();
                assert_eq!(entry.load(Ordering::Relaxed), 0);
                entry.store(index + 1, Ordering::Relaxed);
            }
            let entry: *const AtomicU32 = table.get(0).unwrap();
            assert_eq!(*first.get_or_insert(entry), entry);
        }
        assert!((0..table.len()).all(|index| table.get(index).unwrap().load(Ordering::Relaxed) == index + 1));
        assert!(table.get(table.len()).is_none());
        // SAFETY: no thread has an entry any more, and the table grew on this machine.
        unsafe { table.close(&machine) };
    }
}
