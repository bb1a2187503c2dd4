//! The report on the chunks of per-CPU data for another process: words in the page of numbers.
//!
//! # Design
//! The report answers a request (`control/mod.rs`). A report begins at the requested chunk and ends
//! where the page does, so a large instance takes several reports. The numbers of a chunk are read
//! at one moment. This module writes only to the page, and touches it before it takes any lock.
//!
//! # Format
//! Words of 64 bits:
//!
//! 1. whether there is per-CPU data; chunks in this report; the next chunk to request, all bits set
//!    if there is none;
//! 2. the layout (0 for rows, 1 for CPU by CPU), CPUs, groups, columns, bytes of a page, pages of a
//!    chunk, grains of a chunk, bytes of a grain for each CPU and for each group;
//! 3. of all chunks: populated pages, empty ones of the reserve, empty ones of chunks that are
//!    isolated, the size of the reserve, bytes allocated, bytes of rows, allocations, rows, owners,
//!    chunks;
//! 4. for each chunk: its number; its list (a slot, or 64 for sidelined, 65 for free, 66 for to
//!    depopulate); 1 if it is isolated; bytes for each CPU in rows and in the longest free run;
//!    populated and empty pages; allocations; the map of populated pages; the map of grains in
//!    rows.

use crate::reports::writer::{self, ReportWriter};
use core::sync::atomic::AtomicU64;
use neap_percpu::{Charge, Chunk, Layout, List, PerCpuData};

/// Words before the chunks.
pub const HEAD: usize = 22;
/// Words of a chunk before its maps.
pub const CHUNK: usize = 8;

/// Writes a report on the chunks from `from` on into `words`, at least [`HEAD`] of them. Takes the
/// instance's locks, one after the other.
pub fn write<C: Charge>(data: Option<&PerCpuData<C>>, from: u32, words: &[AtomicU64]) {
    writer::touch(words);
    let Some(data) = data else { return };
    let (all, of) = (data.statistics_at_once(), data.dimensions());
    let size = CHUNK + of.pages.div_ceil(64) + of.grains.div_ceil(64);
    let (mut at, mut count, mut next, numbers) = (HEAD, 0_u64, from, data.chunk_numbers());
    while next < numbers && at + size <= words.len() {
        let (head, maps) = words[at..at + size].split_at(CHUNK);
        let (populated, taken) = maps.split_at(of.pages.div_ceil(64));
        let [mut populated, mut taken] = [populated, taken].map(|words| ReportWriter::new(words, 0));
        if let Some(chunk) = data.chunk(next, |word| populated.write(word), |word| taken.write(word)) {
            write_chunk(&chunk, &mut ReportWriter::new(head, 0));
            at += size;
            count += 1;
        }
        next += 1;
    }
    let mut writer = ReportWriter::new(words, 0);
    writer.write(1);
    writer.write(count);
    writer.write(if next < numbers { u64::from(next) } else { u64::MAX });
    writer.write(u64::from(of.layout == Layout::CpuMajor));
    writer.write_all(
        [of.cpus, of.groups, of.columns, of.page, of.pages, of.grains, of.grain, of.stripe].map(|number| number as u64),
    );
    writer.write_all(
        [all.populated, all.empty, all.isolated_empty, all.reserve, all.allocated_bytes, all.row_bytes]
            .map(|number| number as u64),
    );
    writer.write_all([all.allocations, all.rows, all.owners, all.chunks].map(|number| number as u64));
    debug_assert!(writer.at() == HEAD);
}

fn write_chunk(chunk: &Chunk, writer: &mut ReportWriter<'_>) {
    let list = match chunk.list {
        List::Slot(slot) => slot,
        List::Sidelined => 64,
        List::Free => 65,
        List::ToDepopulate => 66,
    };
    writer.write_all(
        [chunk.number as usize, list, usize::from(chunk.isolated), chunk.taken_bytes, chunk.longest_bytes]
            .map(|number| number as u64),
    );
    writer.write_all([chunk.populated, chunk.empty, chunk.allocations].map(|number| number as u64));
    debug_assert!(writer.at() == CHUNK);
}

#[cfg(test)]
mod tests {
    use super::*;
    use neap_percpu::{Owner, Shape, Wait};
    use neap_testing::virtual_platform::Virtual;
    use std::vec::Vec;

    fn report(data: Option<&PerCpuData>, from: u32, length: usize) -> Vec<u64> {
        let words: Vec<AtomicU64> = (0..length).map(|_| AtomicU64::new(7)).collect();
        write(data, from, &words);
        words.into_iter().map(AtomicU64::into_inner).collect()
    }

    #[test]
    fn a_report_says_that_there_is_nothing_to_say() {
        assert_eq!(report(None, 0, HEAD)[0], 0);
    }

    #[test]
    fn reports_that_follow_each_other_have_every_chunk_once() {
        let machine = Virtual::new(4096, 2);
        let data = PerCpuData::open(&machine, &Shape { span: 8 << 20, ..Shape::usual(2) }, |_| 0, ()).unwrap();
        let empty = report(Some(&data), 0, 100);
        assert_eq!((empty[0], empty[1], empty[2]), (1, 0, u64::MAX));
        let make = |_| data.allocate(&machine, Owner::NONE, 8000, 8, Wait::Long).unwrap();
        let handles: Vec<_> = (0..100).map(make).collect();
        let chunks = data.statistics().chunks;
        assert!(chunks > 10);
        // Sixteen pages for each CPU, and a grain for each cache line.
        let size = CHUNK + 1 + 16;
        for room in [0, size - 1, size, 3 * size, 1000 * size] {
            let (mut from, mut seen, mut reports) = (0, Vec::new(), 0);
            loop {
                let words = report(Some(&data), from, HEAD + room);
                let count = words[1] as usize;
                assert_eq!(words[3..12], [0, 2, 1, 2, 4096, 32, 1024, 64, 128]);
                assert_eq!(words[12] as usize, data.statistics().populated);
                assert_eq!((words[18], words[21] as usize), (100, chunks));
                for chunk in words[HEAD..HEAD + count * size].chunks(size) {
                    seen.push(chunk[0]);
                    let populated = chunk[CHUNK].count_ones();
                    let taken: u32 = chunk[CHUNK + 1..].iter().map(|word| word.count_ones()).sum();
                    assert_eq!((u64::from(populated), u64::from(taken) * 64), (chunk[5], chunk[3]));
                }
                reports += 1;
                match words[2] {
                    u64::MAX => break,
                    next if room < size => {
                        assert_eq!((next, count), (0, 0), "no room for any");
                        break;
                    }
                    next => from = next as u32,
                }
            }
            let expected: Vec<u64> = if room < size { Vec::new() } else { (0..chunks as u64).collect() };
            assert_eq!(seen, expected);
            assert!(room > 3 * size || reports == chunks.div_ceil((room / size).max(1)) || room < size);
        }
        // SAFETY: each allocation is freed once, and no thread uses it.
        handles.into_iter().for_each(|handle| assert!(unsafe { data.free(handle) }.is_ok()));
        // SAFETY: all allocations were freed, and no thread uses the instance.
        unsafe { data.close(&machine) };
    }
}
