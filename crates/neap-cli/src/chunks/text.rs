//! Chunks of per-CPU data as a table and as a picture, in a terminal.
//!
//! The picture has a line of at most [`CELLS`] cells for each chunk. A cell stands for one page or
//! for several. Cells are block characters if the locale is UTF-8, and letters otherwise.

use std::io::{self, Write};

use super::{ChunkPage, Instance, ReadChunks};
use crate::colours::Colours;
use crate::look::stat_reader::ProcessStatus;
use crate::report::{number, write_table};

/// Cells of a line, at most.
const CELLS: usize = 64;

/// The style of pictures.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    blocks: bool,
    colours: Colours,
}

impl Look {
    #[cfg(test)]
    pub(super) const PLAIN: Look = Look { blocks: false, colours: Colours::NONE };

    /// The style that suits standard output.
    pub(super) fn here() -> Look {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default().to_uppercase();
        Look { blocks: locale.contains("UTF-8") || locale.contains("UTF8"), colours: Colours::of_output() }
    }
}

/// The pages of a cell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cell {
    Used,
    /// Used pages, and others.
    Partly,
    Empty,
    Missing,
}

impl Cell {
    fn of(pages: &[ChunkPage]) -> Cell {
        let has = |page| pages.contains(&page);
        match (has(ChunkPage::Used), has(ChunkPage::Empty), has(ChunkPage::Missing)) {
            (true, false, false) => Cell::Used,
            (true, ..) => Cell::Partly,
            (false, true, _) => Cell::Empty,
            (false, false, _) => Cell::Missing,
        }
    }

    fn letter(self, look: &Look) -> char {
        let (block, plain) = match self {
            Cell::Used => ('█', '#'),
            Cell::Partly => ('▓', '+'),
            Cell::Empty => ('░', 'o'),
            Cell::Missing => ('·', '.'),
        };
        if look.blocks { block } else { plain }
    }

    /// Blue, yellow and grey: distinct for colour-blind readers, too.
    fn colour(self) -> &'static str {
        match self {
            Cell::Used | Cell::Partly => "\x1b[34m",
            Cell::Empty => "\x1b[33m",
            Cell::Missing => "\x1b[90m",
        }
    }
}

/// A map in cells of `each` pages.
fn picture(map: &[ChunkPage], each: usize, look: &Look) -> String {
    let cells: Vec<Cell> = map.chunks(each).map(Cell::of).collect();
    let run = |run: &[Cell]| {
        let letters: String = run.iter().map(|cell| cell.letter(look)).collect();
        look.colours.paint(run[0].colour(), &letters)
    };
    cells.chunk_by(|a, b| a == b).map(run).collect()
}

/// Writes the whole report.
pub(super) fn write(output: &mut dyn Write, process: &ProcessStatus, seen: &ReadChunks, look: &Look) -> io::Result<()> {
    let of = &seen.instance;
    writeln!(
        output,
        "Process {} ({}): per-CPU data of {} CPUs, {}\n{}",
        process.pid,
        process.name,
        of.cpus,
        if of.cpu_major { "CPU by CPU" } else { "in rows" },
        summary(of)
    )?;
    if seen.chunks.is_empty() {
        return writeln!(output, "It has no chunk.");
    }
    let row = |chunk: &super::ReadChunk| {
        let bytes = [chunk.longest, chunk.free(of)].map(|bytes| bytes.to_string());
        let [longest, free] = bytes;
        let fragmentation = number(chunk.fragmentation(of), 1);
        let counts = [chunk.populated, chunk.empty, chunk.allocations].map(|count| count.to_string());
        let [populated, empty, allocations] = counts;
        let fragments = chunk.fragments.to_string();
        vec![
            chunk.number.to_string(),
            chunk.list(),
            populated,
            empty,
            allocations,
            free,
            longest,
            fragments,
            fragmentation,
        ]
    };
    let header =
        ["chunk", "list", "populated", "empty", "allocations", "free B", "longest run B", "free runs", "fragmented %"];
    write_table(output, &header, &seen.chunks, &row)?;
    let each = (of.pages as usize).div_ceil(CELLS).max(1);
    let example = |cell: Cell| look.colours.paint(cell.colour(), &cell.letter(look).to_string());
    let partly = if each == 1 { String::new() } else { format!(", {} partly used", example(Cell::Partly)) };
    writeln!(
        output,
        "\nPages of each chunk, {each} a cell: {} used{partly}, {} empty, {} not populated",
        example(Cell::Used),
        example(Cell::Empty),
        example(Cell::Missing)
    )?;
    let width = seen.chunks.iter().map(|chunk| chunk.number.to_string().len()).max().unwrap_or(0);
    let lists = seen.chunks.iter().map(|chunk| chunk.list().len()).max().unwrap_or(0);
    seen.chunks.iter().try_for_each(|chunk| {
        writeln!(output, "{:>width$} {:lists$} {}", chunk.number, chunk.list(), picture(&chunk.map, each, look))
    })
}

/// The instance in two lines.
pub(super) fn summary(of: &Instance) -> String {
    let kib = |pages: u64| number(pages.saturating_mul(of.page) as f64 / 1024.0, 0);
    format!(
        "Populated: {} pages of {} B ({} KiB), {} of them empty (the reserve is {}), {} to be released\n\
         Allocated: {} KiB in {} allocations, {} rows ({} KiB) of {} owners; {} chunks of {} pages{}\n",
        of.populated,
        of.page,
        kib(of.populated),
        of.empty,
        of.reserve,
        of.isolated_empty,
        number(of.allocated as f64 / 1024.0, 0),
        of.allocations,
        of.rows,
        number(of.rows_bytes as f64 / 1024.0, 0),
        of.owners,
        of.chunks,
        of.pages,
        if of.groups > 1 { format!(" in each of {} groups", of.groups) } else { String::new() },
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::seen;
    use super::*;
    use neap_percpu::Layout;

    #[test]
    fn a_cell_says_what_all_its_pages_are() {
        use ChunkPage::{Empty, Missing, Used};
        let cases = [
            (&[Used, Used][..], Cell::Used),
            (&[Used, Empty], Cell::Partly),
            (&[Missing, Used], Cell::Partly),
            (&[Empty, Missing], Cell::Empty),
            (&[Missing], Cell::Missing),
        ];
        cases.iter().for_each(|(pages, cell)| assert_eq!(Cell::of(pages), *cell, "{pages:?}"));
        let map = [Used, Used, Empty, Missing, Missing];
        let coloured = Look { blocks: true, colours: Colours::ALL };
        assert_eq!(picture(&map, 1, &Look::PLAIN), "##o..");
        assert_eq!(picture(&map, 2, &Look::PLAIN), "#o.");
        assert_eq!(picture(&map, 3, &coloured), "\x1b[34m▓\x1b[0m\x1b[90m·\x1b[0m");
    }

    #[test]
    fn a_report_has_a_row_and_a_line_for_every_chunk() {
        let process = crate::look::stat_reader::tests::ended();
        for cpus in [2, 24] {
            let seen = seen(Layout::Rows, cpus);
            let mut text = Vec::new();
            write(&mut text, &process, &seen, &Look::PLAIN).unwrap();
            let text = String::from_utf8(text).unwrap();
            let pictures: Vec<&str> = text.lines().filter(|line| line.ends_with(['#', '+', 'o', '.'])).collect();
            assert_eq!(pictures.len(), seen.chunks.len(), "{text}");
            let rows = text.lines().filter(|line| line.starts_with("| ")).count();
            assert_eq!(rows, seen.chunks.len() + 2, "{text}");
            let cells = pictures[0].rsplit(' ').next().unwrap().len();
            assert_eq!(cells, (seen.instance.pages as usize).div_ceil(if cpus == 2 { 1 } else { 6 }));
            assert!(text.contains("slot ") && text.contains("sidelined"), "{text}");
            assert_eq!(text.contains("partly used"), cpus > 2, "{text}");
            assert!(!text.chars().any(|each| each.is_control() && each != '\n') && text.is_ascii());
        }
    }
}
