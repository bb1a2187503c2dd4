//! A table of neap's memory groups in a process's memory: chunks of entries, found by a list of
//! their addresses.

use anyhow::{Result, ensure};

use crate::look::remote_memory::{MemoryLayout, RemoteMemory};

/// Most bytes of an entry, and most bytes that are read at once.
pub(super) const MOST_OF_ENTRY: usize = 4096;
const AT_ONCE: usize = 1 << 20;
/// Most entries of a table.
const MOST_ENTRIES: u64 = 1 << 24;
/// Chunks of a table.
const MOST_CHUNKS: usize = 16;

/// A table in a layout.
pub(super) struct RemoteTable<'l> {
    pub(super) layout: MemoryLayout<'l>,
    /// Names of three values: the address of the list of chunks, the address of the number of
    /// entries in use, and the length of an entry.
    pub(super) chunks: &'static str,
    pub(super) count: &'static str,
    pub(super) length: &'static str,
}

impl RemoteTable<'_> {
    /// Calls `each` with the index and the bytes of every entry that was ever used.
    pub(super) fn each(&self, memory: &RemoteMemory<'_>, each: &mut dyn FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        let [count] = memory.shorts([self.layout.get(self.count)?])?;
        let (length, first) = (self.layout.size(self.length, MOST_OF_ENTRY)?, self.layout.get("first_chunk")?);
        ensure!(count <= MOST_ENTRIES && length > 0 && first > 0, "{count} entries of a table of groups");
        let chunks = if count > 0 { memory.words(self.layout.get(self.chunks)?, MOST_CHUNKS)? } else { Vec::new() };
        // The first chunk is as long as the second, and each later one as long as all before it.
        let (mut start, mut chunk_length) = (0_u64, first);
        for (number, &chunk) in chunks.iter().enumerate() {
            let end = start.saturating_add(chunk_length).min(count);
            for from in (start..end).step_by(AT_ONCE / length) {
                let part = (end - from).min((AT_ONCE / length) as u64) as usize;
                let address = chunk.wrapping_add((from - start).wrapping_mul(length as u64));
                let bytes = memory.read(vec![(address, part * length)])?;
                for (index, bytes) in (from..).zip(bytes.chunks_exact(length)) {
                    each(index, bytes)?;
                }
            }
            (start, chunk_length) = (end, if number == 0 { first } else { chunk_length.saturating_mul(2) });
            if start == count {
                break;
            }
        }
        Ok(())
    }
}
