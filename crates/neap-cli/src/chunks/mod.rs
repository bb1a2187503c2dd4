//! `neap stat PID --percpu`: the chunks of a process's per-CPU data, each with its list, its
//! numbers and its map.
//!
//! The reports come from the process's [control channel](crate::look::control_channel), in the
//! format of `crates/neap/src/reports/chunk_report.rs`. This command does not trust them, and
//! checks sizes. All else in them is numbers. The command shows the result as tables and a picture
//! (`text`), as a page (`html`), or as one JSON object.

mod html;
mod in_memory;
mod text;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use neap::chunk_report::{CHUNK, HEAD};
use serde::Serialize;
use serde_json::json;

use crate::look::allowance::{ALLOCATION, Allowance};
use crate::look::control_channel::Haste;
use crate::look::control_channel::{CHUNKS, ControlChannel};
use crate::look::remote_memory::{MemoryLayout, ask_or_read};
use crate::look::stat_reader::{Page as Published, ProcessStatus};
use crate::look::subject::{Rows, Subject, print, print_json};
use crate::report::rounded;

/// Most pages or grains (units of rows) of a chunk, and most bytes of each. This command refuses a
/// report with more.
const MOST: u64 = 1 << 24;

/// State of a page of a chunk, which is the same in all groups of CPUs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum ChunkPage {
    /// The page has no memory.
    Missing,
    /// The page has memory, but no row lies in it.
    Empty,
    Used,
}

/// Numbers of an instance, over all its chunks.
#[derive(Clone, Copy, Debug, Default)]
struct Instance {
    cpu_major: bool,
    cpus: u64,
    groups: u64,
    columns: u64,
    page: u64,
    /// Pages and grains of a chunk. Bytes of a grain for one CPU (`grain`) and for a group
    /// (`stripe`).
    pages: u64,
    grains: u64,
    grain: u64,
    stripe: u64,
    /// Pages in all groups together.
    populated: u64,
    empty: u64,
    isolated_empty: u64,
    reserve: u64,
    /// Bytes.
    allocated: u64,
    rows_bytes: u64,
    allocations: u64,
    rows: u64,
    owners: u64,
    chunks: u64,
}

#[derive(Clone, Debug)]
struct ReadChunk {
    number: u64,
    /// The number of a slot, or [`SIDELINED`], [`FREE`] or [`TO_DEPOPULATE`].
    list: u64,
    isolated: bool,
    /// Bytes for one CPU: those taken, and the longest free run.
    taken: u64,
    longest: u64,
    populated: u64,
    empty: u64,
    allocations: u64,
    /// Runs of free grains.
    fragments: u64,
    map: Vec<ChunkPage>,
}

const SIDELINED: u64 = 64;
const FREE: u64 = 65;
const TO_DEPOPULATE: u64 = 66;

impl ReadChunk {
    fn list(&self) -> String {
        match self.list {
            SIDELINED => "sidelined".to_string(),
            FREE => "free".to_string(),
            TO_DEPOPULATE => "to depopulate".to_string(),
            slot => format!("slot {slot}"),
        }
    }

    fn free(&self, instance: &Instance) -> u64 {
        (instance.grains * instance.grain).saturating_sub(self.taken)
    }

    /// Percentage of the free bytes that lies outside the longest free run.
    fn fragmentation(&self, instance: &Instance) -> f64 {
        match self.free(instance) {
            0 => 0.0,
            free => 100.0 * free.saturating_sub(self.longest) as f64 / free as f64,
        }
    }

    /// Returns the map as runs of equal pages. Each is a count and the letter of a kind: `3u1e28-`.
    fn runs(&self) -> String {
        let letter = |page: ChunkPage| match page {
            ChunkPage::Missing => '-',
            ChunkPage::Empty => 'e',
            ChunkPage::Used => 'u',
        };
        self.map.chunk_by(|a, b| a == b).map(|run| format!("{}{}", run.len(), letter(run[0]))).collect()
    }
}

/// An instance with its chunks.
#[derive(Clone, Debug)]
struct ReadChunks {
    instance: Instance,
    chunks: Vec<ReadChunk>,
}

impl ReadChunks {
    /// Requests reports of all chunks, or reads them in the process's memory where no thread of it
    /// answers. Returns `None` if there is no per-CPU data.
    fn ask(process: &ProcessStatus, page: &Published) -> Result<Option<ReadChunks>> {
        // The text has "per_cpu" from the first use on.
        if page.lacks("per_cpu") {
            return Ok(None);
        }
        let allowance = &process.allowance;
        let ask = |haste| {
            let (mut chunks, mut last) = (Vec::new(), None);
            ControlChannel::of(process, page)?.with_haste(haste).reports(CHUNKS, |words| {
                let read = ReadChunks::read(words, &mut chunks, allowance)?;
                let Some((instance, next)) = read else { return Ok(None) };
                last = Some(instance);
                Ok(Some(next))
            })?;
            Ok(last.map(|instance| ReadChunks { instance, chunks }))
        };
        ask_or_read(process, MemoryLayout::of(page, "per_cpu"), Haste::Unhurried, ask, |memory, layout| {
            let (words, mut chunks) = (in_memory::report(memory, layout, allowance)?, Vec::new());
            let read = ReadChunks::read(&words, &mut chunks, allowance)?;
            Ok(read.map(|(instance, _)| ReadChunks { instance, chunks }))
        })
    }

    /// Reads a report, and appends its chunks to `chunks`. Returns the instance's numbers, and the
    /// next chunk to request. Returns `None` if there is no per-CPU data.
    fn read(
        words: &[u64],
        chunks: &mut Vec<ReadChunk>,
        allowance: &Allowance,
    ) -> Result<Option<(Instance, Option<u32>)>> {
        ensure!(words.len() >= HEAD, "it has {} words", words.len());
        if words[0] == 0 {
            return Ok(None);
        }
        let (count, next) = (words[1], words[2]);
        let instance = Instance {
            cpu_major: words[3] == 1,
            cpus: words[4],
            groups: words[5],
            columns: words[6],
            page: words[7],
            pages: words[8],
            grains: words[9],
            grain: words[10],
            stripe: words[11],
            populated: words[12],
            empty: words[13],
            isolated_empty: words[14],
            reserve: words[15],
            allocated: words[16],
            rows_bytes: words[17],
            allocations: words[18],
            rows: words[19],
            owners: words[20],
            chunks: words[21],
        };
        let Instance { page, pages, grains, grain, stripe, .. } = instance;
        for size in [page, pages, grains, grain, stripe] {
            ensure!((1..=MOST).contains(&size), "a size of {size}");
        }
        ensure!(grains * stripe == pages * page, "{grains} grains of {stripe} bytes in {pages} pages of {page}");
        let maps = [pages, grains].map(|bits| bits.div_ceil(64) as usize);
        let size = CHUNK + maps[0] + maps[1];
        let body = words[HEAD..].get(..(count as usize).saturating_mul(size));
        let body = body.with_context(|| format!("{count} chunks in it"))?;
        for words in body.chunks_exact(size) {
            allowance.take(size_of::<ReadChunk>() + pages as usize + ALLOCATION)?;
            chunks.push(read_chunk(&instance, words, maps[0]));
        }
        Ok(Some((instance, u32::try_from(next).ok())))
    }

    /// Sorts chunks as the kernel lists them: by slots, then sidelined, wholly free, and to be
    /// depopulated.
    fn sort(&mut self) {
        self.chunks.sort_unstable_by_key(|chunk| (chunk.list, chunk.number));
    }

    fn json(&self) -> impl Serialize {
        let of = &self.instance;
        let chunk = |chunk: &ReadChunk| {
            json!({
                "chunk": chunk.number, "list": chunk.list(), "isolated": chunk.isolated,
                "populated": chunk.populated, "empty": chunk.empty, "allocations": chunk.allocations,
                "taken_bytes": chunk.taken, "free_bytes": chunk.free(of), "longest_bytes": chunk.longest,
                "fragments": chunk.fragments,
                "fragmentation_percent": rounded(chunk.fragmentation(of)),
                "map": chunk.runs(),
            })
        };
        ChunksJson {
            layout: if of.cpu_major { "cpu-major" } else { "rows" },
            cpus: of.cpus,
            groups: of.groups,
            columns: of.columns,
            page_bytes: of.page,
            chunk_pages: of.pages,
            chunk_bytes: of.grains * of.grain,
            populated: of.populated,
            empty: of.empty,
            isolated_empty: of.isolated_empty,
            reserve: of.reserve,
            allocated_bytes: of.allocated,
            row_bytes: of.rows_bytes,
            allocations: of.allocations,
            rows: of.rows,
            owners: of.owners,
            chunks: Rows(&self.chunks, chunk),
        }
    }
}

/// The JSON object of chunks.
#[derive(Serialize)]
struct ChunksJson<C: Serialize> {
    layout: &'static str,
    cpus: u64,
    groups: u64,
    columns: u64,
    page_bytes: u64,
    chunk_pages: u64,
    chunk_bytes: u64,
    populated: u64,
    empty: u64,
    isolated_empty: u64,
    reserve: u64,
    allocated_bytes: u64,
    row_bytes: u64,
    allocations: u64,
    rows: u64,
    owners: u64,
    chunks: C,
}

fn read_chunk(instance: &Instance, words: &[u64], map_words: usize) -> ReadChunk {
    let (head, maps) = words.split_at(CHUNK);
    let (populated, taken) = maps.split_at(map_words);
    let bit = |words: &[u64], at: u64| words[at as usize / 64] >> (at % 64) & 1 == 1;
    let mut map: Vec<ChunkPage> = (0..instance.pages)
        .map(|page| if bit(populated, page) { ChunkPage::Empty } else { ChunkPage::Missing })
        .collect();
    let mut fragments = 0;
    for grain in 0..instance.grains {
        if bit(taken, grain) {
            let pages =
                grain * instance.stripe / instance.page..((grain + 1) * instance.stripe).div_ceil(instance.page);
            for page in pages {
                // A grain may be taken before its page is populated. Such a page stays missing.
                let page = &mut map[page as usize];
                if *page == ChunkPage::Empty {
                    *page = ChunkPage::Used;
                }
            }
        } else {
            fragments += u64::from(grain == 0 || bit(taken, grain - 1));
        }
    }
    ReadChunk {
        number: head[0],
        // A process may write any number.
        list: head[1].min(TO_DEPOPULATE),
        isolated: head[2] != 0,
        taken: head[3],
        longest: head[4],
        populated: head[5],
        empty: head[6],
        allocations: head[7],
        fragments,
        map,
    }
}

/// Shows a process's chunks, and writes a page if `html` names a file.
pub(crate) fn show(subject: &Subject, json: bool, html: Option<&Path>) -> Result<ExitCode> {
    let (process, seen) = subject.look(|process| {
        for page in process.pages()? {
            if let Some(mut seen) = ReadChunks::ask(process, &page)? {
                seen.sort();
                return Ok(Some(seen));
            }
        }
        Ok(None)
    })?;
    if let (Some(path), Some(seen)) = (html, &seen) {
        let write = || {
            let mut page = BufWriter::new(File::create(path)?);
            html::write(&mut page, &process, seen)?;
            page.flush()
        };
        write().with_context(|| format!("cannot write {}", path.display()))?;
    }
    if json {
        return print_json(&process.named("percpu", &seen.as_ref().map(ReadChunks::json)));
    }
    print(|output| match &seen {
        Some(seen) => text::write(output, &process, seen, &text::Look::here()),
        None => writeln!(output, "Process {} ({}) has no per-CPU data.", process.pid, process.name),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use core::sync::atomic::AtomicU64;
    use core::time::Duration;
    use neap_percpu::{Layout, Owner, PerCpuData, Shape, Wait};
    use neap_testing::virtual_platform::Virtual;

    fn allowance() -> Allowance {
        Allowance::new(Duration::from_secs(1000))
    }

    fn report(data: Option<&PerCpuData>, from: u32) -> Vec<u64> {
        let words: Vec<AtomicU64> = (0..8192).map(|_| AtomicU64::new(0)).collect();
        neap::chunk_report::write(data, from, &words);
        words.into_iter().map(AtomicU64::into_inner).collect()
    }

    /// A report of an instance of two CPUs.
    pub(crate) fn words() -> Vec<u64> {
        let machine = Virtual::new(4096, 2);
        let data = PerCpuData::open(&machine, &Shape { span: 1 << 20, ..Shape::usual(2) }, |_| 0, ()).unwrap();
        data.allocate(&machine, Owner::NONE, 8, 8, Wait::Long).unwrap();
        let words = report(Some(&data), 0);
        // SAFETY: the instance and its allocation belong to this function, which does not use them
        // again.
        unsafe { data.close(&machine) };
        words
    }

    /// Reads a report as if it were the whole answer, and shows the result.
    pub(crate) fn show_report(words: &[u64], allowance: &Allowance) -> Result<[String; 2]> {
        let (process, mut chunks, mut text) = (crate::look::stat_reader::tests::ended(), Vec::new(), Vec::new());
        let Some((instance, _)) = ReadChunks::read(words, &mut chunks, allowance)? else {
            return Ok(Default::default());
        };
        let mut seen = ReadChunks { instance, chunks };
        seen.sort();
        text::write(&mut text, &process, &seen, &text::Look::PLAIN)?;
        html::write(&mut text, &process, &seen)?;
        Ok([String::from_utf8(text)?, serde_json::to_string(&seen.json())?])
    }

    /// An instance in which chunks are on every list.
    pub(super) fn seen(layout: Layout, cpus: usize) -> ReadChunks {
        let machine = Virtual::new(4096, cpus);
        let shape = Shape { layout, span: 16 << 20, ..Shape::usual(cpus) };
        let data = PerCpuData::open(&machine, &shape, |_| 0, ()).unwrap();
        let make =
            |size: usize| data.allocate(&machine, data.open_owner(&machine).unwrap(), size, 8, Wait::Long).unwrap();
        let mut handles: Vec<_> = (0..600).map(|at| (at, make(if at % 7 == 0 { 600 } else { 1400 }))).collect();
        let mut free = |goes: &dyn Fn(usize) -> bool| {
            handles.retain(|&(at, handle)| {
                if goes(at) {
                    // SAFETY: no thread uses the allocation.
                    unsafe { data.free(handle) }.unwrap();
                }
                !goes(at)
            });
        };
        free(&|at| (150..300).contains(&at) && at % 50 != 0);
        data.tick(&machine);
        free(&|at| (400..450).contains(&at) && at % 25 != 0);
        data.allocate(&machine, Owner::NONE, 30_000, 8, Wait::Long).unwrap();
        let mut chunks = Vec::new();
        let (instance, next) = ReadChunks::read(&report(Some(&data), 0), &mut chunks, &allowance()).unwrap().unwrap();
        assert_eq!(next, None);
        let statistics = data.statistics();
        assert_eq!(chunks.len(), statistics.chunks);
        let pages = |page| chunks.iter().flat_map(|chunk| &chunk.map).filter(|&&each| each == page).count();
        let groups = instance.groups as usize;
        assert_eq!(pages(ChunkPage::Empty) * groups, statistics.empty + statistics.isolated_empty);
        assert_eq!((pages(ChunkPage::Empty) + pages(ChunkPage::Used)) * groups, statistics.populated);
        for chunk in &chunks {
            let of = |page| chunk.map.iter().filter(|&&each| each == page).count() as u64;
            assert_eq!(
                (of(ChunkPage::Empty), of(ChunkPage::Empty) + of(ChunkPage::Used)),
                (chunk.empty, chunk.populated)
            );
            assert!(chunk.fragments > 0 || chunk.longest == 0);
        }
        // SAFETY: the instance and its allocations belong to this function, which does not use them
        // again.
        unsafe { data.close(&machine) };
        let mut seen = ReadChunks { instance, chunks };
        seen.sort();
        seen
    }

    #[test]
    fn a_report_is_read_as_it_was_meant() {
        for (layout, cpus) in [(Layout::Rows, 2), (Layout::Rows, 24), (Layout::CpuMajor, 3)] {
            let seen = seen(layout, cpus);
            let on = |list: &dyn Fn(u64) -> bool| seen.chunks.iter().filter(|chunk| list(chunk.list)).count();
            assert!(on(&|list| list < SIDELINED) > 0 && on(&|list| list >= SIDELINED) > 0, "{layout:?}");
            let object = serde_json::to_value(seen.json()).unwrap();
            assert_eq!(object["cpus"], cpus);
            let first = &object["chunks"][0];
            let map = first["map"].as_str().unwrap();
            let pages: u64 = map.split(['u', 'e', '-']).filter_map(|count| count.parse::<u64>().ok()).sum();
            assert_eq!(pages, seen.instance.pages, "{map}");
            assert!(first["fragmentation_percent"].as_f64().is_some_and(|percent| (0.0..=100.0).contains(&percent)));
        }
        assert!(ReadChunks::read(&report(None, 0), &mut Vec::new(), &allowance()).unwrap().is_none());
    }

    #[test]
    fn a_report_that_makes_no_sense_is_refused() {
        let good = words();
        assert!(ReadChunks::read(&good, &mut Vec::new(), &allowance()).is_ok());
        for (at, word) in [(1, 1000), (1, u64::MAX), (7, 0), (8, 33), (9, u64::MAX), (11, 0), (8, 1 << 40)] {
            let mut bad = good.clone();
            bad[at] = word;
            assert!(ReadChunks::read(&bad, &mut Vec::new(), &allowance()).is_err(), "word {at} is {word}");
        }
        assert!(ReadChunks::read(&good[..HEAD - 1], &mut Vec::new(), &allowance()).is_err());
        // Numbers that are no sizes are shown unchanged.
        let mut odd = good.clone();
        for at in (3..7).chain(12..HEAD).chain(HEAD..HEAD + CHUNK) {
            odd[at] = u64::MAX;
        }
        let mut chunks = Vec::new();
        let (instance, _) = ReadChunks::read(&odd, &mut chunks, &allowance()).unwrap().unwrap();
        let seen = ReadChunks { instance, chunks };
        let process = crate::look::stat_reader::tests::ended();
        assert!(serde_json::to_value(seen.json()).unwrap()["chunks"].is_array());
        let (mut text, mut page) = (Vec::new(), Vec::new());
        text::write(&mut text, &process, &seen, &text::Look::PLAIN).unwrap();
        html::write(&mut page, &process, &seen).unwrap();
        assert!(!text.is_empty() && !page.is_empty());
    }
}
