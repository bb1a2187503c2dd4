//! Chunks of per-CPU data as one HTML page: a map and a table for each list of chunks.
//!
//! The page loads nothing and has no scripts. It follows the reader's choice of light or dark.
//!
//! A map has a row for each chunk, and the offset in the chunk across. The maps of a page have at
//! most [`ROWS`] rows and one for each list, of at most [`CELLS`] cells. With more chunks, a row is
//! several chunks.

use std::io::{self, Write};

use neap_sim::plots::{self, Labelled, LegendEntry, Titles};
use plotters::prelude::*;

use super::{ChunkPage, FREE, Instance, ReadChunk, ReadChunks, SIDELINED, TO_DEPOPULATE};
use crate::look::foreign::quoted;
use crate::look::stat_reader::ProcessStatus;
use crate::report::number;

const STYLE: &str = "\
    :root{color-scheme:light dark;--text:#1d2126;--soft:#5c6670;--ground:#fff;--card:#f4f6f8;--line:#dfe4e8;--used:#0b62c4;\
    --empty:#f0a30a;--none:#e3e7eb}\
    @media(prefers-color-scheme:dark){:root{--text:#e4e8ec;--soft:#98a2ad;--ground:#14171a;--card:#1e2327;--line:#30373d;\
    --used:#4c9df0;--empty:#f5b93f;--none:#2a3036}}\
    body{font:15px/1.45 system-ui,sans-serif;color:var(--text);background:var(--ground);max-width:72em;margin:2em auto;\
    padding:0 1.2em}h1{font-size:1.5em;margin:0}h2{font-size:1.05em;margin:2em 0 .4em}p{color:var(--soft);margin:.3em 0 1em}\
    dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(11em,1fr));gap:.7em;margin:1.2em 0}\
    dl div{background:var(--card);border-radius:.5em;padding:.6em .9em}dt{color:var(--soft);font-size:.85em}\
    dd{margin:0;font-size:1.25em;font-variant-numeric:tabular-nums}dd small{display:block;font-size:.65em;color:var(--soft)}\
    svg{display:block}svg [fill='#0B62C4']{fill:var(--used)}svg [fill='#F0A30A']{fill:var(--empty)}\
    svg [fill='#E3E7EB']{fill:var(--none)}\
    table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}\
    th{font-weight:normal;color:var(--soft);font-size:.85em}\
    td,th{padding:.18em .6em;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}\
    td:first-child,th:first-child{padding-left:0}";

/// Most cells of a row. Each has three pixels or more.
const CELLS: usize = 256;
/// Most rows of all maps, without the last row of each list.
const ROWS: usize = 256;
/// Pixels: width of a map, width of its legend, height of a row, height of title and axis.
const WIDTH: u32 = 1040;
const LEGEND: i32 = 170;
const ROW: u32 = 18;
const FRAME: u32 = 84;

/// Colours in the SVG. The page's style has their values for light and for dark.
const USED: RGBColor = RGBColor(0x0b, 0x62, 0xc4);
const EMPTY: RGBColor = RGBColor(0xf0, 0xa3, 0x0a);
const MISSING: RGBColor = RGBColor(0xe3, 0xe7, 0xeb);

/// Bytes in the unit that suits them.
fn size(bytes: u64) -> String {
    match bytes {
        0..0x2800 => format!("{bytes} B"),
        0x2800..0xa0_0000 => format!("{} KiB", number(bytes as f64 / 1024.0, 1)),
        _ => format!("{} MiB", number(bytes as f64 / f64::from(1 << 20), 1)),
    }
}

/// Writes the page.
pub(super) fn write(page: &mut dyn Write, process: &ProcessStatus, seen: &ReadChunks) -> io::Result<()> {
    let (of, pid, name) = (&seen.instance, process.pid, quoted(&process.name));
    write!(page, "<!DOCTYPE html><html lang=en><meta charset=utf-8>")?;
    write!(page, "<meta name=viewport content='width=device-width'><meta name=color-scheme content='light dark'>")?;
    write!(page, "<title>Per-CPU data of {name} ({pid})</title><style>{STYLE}{}</style>", plots::STYLE)?;
    write!(page, "<h1>Per-CPU data of {name} ({pid})</h1><p>{} CPUs, ", of.cpus)?;
    write!(page, "{}; ", if of.cpu_major { "CPU by CPU" } else { "in rows by owner" })?;
    let groups = if of.groups > 1 { format!(" in each of {} groups", of.groups) } else { String::new() };
    write!(
        page,
        "a chunk is {} for each CPU, {} pages of {}{groups}.</p><dl>",
        size(of.grains * of.grain),
        of.pages,
        size(of.page)
    )?;
    let bytes = |pages: u64| size(pages.saturating_mul(of.page));
    for (what, value, more) in [
        ("Populated", bytes(of.populated), format!("{} pages", of.populated)),
        ("Allocated", size(of.allocated), format!("{} allocations", of.allocations)),
        ("Rows", size(of.rows_bytes), format!("{} of {} owners", of.rows, of.owners)),
        ("Empty", bytes(of.empty), format!("{} pages; the reserve is {}", of.empty, of.reserve)),
        ("To be released", bytes(of.isolated_empty), format!("{} pages", of.isolated_empty)),
        ("Chunks", of.chunks.to_string(), String::new()),
    ] {
        write!(page, "<div><dt>{what}<dd>{value} <small>{more}</small></div>")?;
    }
    write!(page, "</dl>")?;
    let together = seen.chunks.len().div_ceil(ROWS).max(1);
    for chunks in seen.chunks.chunk_by(|a, b| a.list == b.list) {
        write_list(page, of, chunks, together)?;
    }
    if seen.chunks.is_empty() {
        write!(page, "<p>There is no chunk.</p>")?;
    }
    write!(page, "</html>")
}

/// Writes a list's map, with `together` chunks in a row, and its table.
fn write_list(page: &mut dyn Write, of: &Instance, chunks: &[ReadChunk], together: usize) -> io::Result<()> {
    let (title, what) = match chunks[0].list {
        SIDELINED => ("Sidelined".to_string(), "emptied once; allocations go to fuller chunks first".to_string()),
        FREE => ("Free".to_string(), "nothing is in them; all but one are destroyed".to_string()),
        TO_DEPOPULATE => ("To depopulate".to_string(), "the worker releases their empty pages".to_string()),
        0 => ("Slot 0".to_string(), "no free run that anything fits into".to_string()),
        slot => {
            let least = 1_u64.checked_shl(slot.saturating_add(2).min(64) as u32).unwrap_or(0);
            (
                format!("Slot {slot}"),
                format!("the longest free run has {} or more for each CPU, and less than twice that", size(least)),
            )
        }
    };
    let title = format!("{title}: {} {}", chunks.len(), if chunks.len() == 1 { "chunk" } else { "chunks" });
    write!(page, "<h2>{title}</h2><p>{}{}.</p>", what[..1].to_uppercase(), &what[1..])?;
    let rows: Vec<MapRow> = chunks.chunks(together).map(MapRow::of).collect();
    write!(page, "{}<table><tr><th>chunk<th>", map(of, &format!("Pages of chunks: {}", chunks[0].list()), &rows))?;
    write!(page, "populated<th>empty<th>allocations<th>longest run<th>free runs<th>fragmented")?;
    for chunk in chunks {
        write!(page, "<tr><td>{}<td>{}<td>{}<td>", chunk.number, chunk.populated, chunk.empty)?;
        let fragmented = number(chunk.fragmentation(of), 1);
        write!(page, "{}<td>{}<td>{}<td>{fragmented} %", chunk.allocations, size(chunk.longest), chunk.fragments)?;
    }
    write!(page, "</table>")
}

/// A row of a map.
struct MapRow {
    /// The chunk's number; of several chunks, the first and the last.
    name: String,
    /// Pages of a cell.
    cell: usize,
    cells: Vec<ChunkPage>,
}

impl MapRow {
    /// The row of one or several chunks. A cell of several pages is used if one of them is used.
    /// Otherwise it is empty if one of them is empty.
    fn of(chunks: &[ReadChunk]) -> MapRow {
        let (first, last) = (&chunks[0], &chunks[chunks.len() - 1]);
        let name = match chunks {
            [one] => one.number.to_string(),
            _ => format!("{}–{}", first.number, last.number),
        };
        let cell = first.map.len().div_ceil(CELLS).max(1);
        let most = |from: usize| {
            let pages = chunks.iter().flat_map(|chunk| chunk.map.iter().skip(from).take(cell));
            pages.max().copied().unwrap_or(ChunkPage::Missing)
        };
        MapRow { name, cell, cells: (0..first.map.len()).step_by(cell).map(most).collect() }
    }
}

/// Draws a map: chunks downwards, the offset in a chunk across.
fn map(of: &Instance, title: &str, rows: &[MapRow]) -> String {
    let (unit, bytes) = if of.pages * of.page < 0xa0_0000 { ("KiB", 1024.0) } else { ("MiB", f64::from(1 << 20)) };
    let end = (of.pages * of.page) as f64 / bytes;
    // At most eight, at powers of two.
    let step = (end / 8.0).log2().ceil().exp2();
    let ticks = (0..=8).map(|tick| f64::from(tick) * step).filter(|tick| *tick <= end).collect();
    let height = rows.len() as f64;
    let middles = (0..rows.len()).map(|row| row as f64 + 0.5).collect();
    let name = |y: &f64| rows.get(*y as usize).map_or(String::new(), |row| row.name.clone());
    let titles = Titles { title, x: &format!("offset in the chunk ({unit})"), y: "chunk", labels: 90 };
    plots::inline((WIDTH, FRAME + ROW * rows.len() as u32), |area| {
        let (left, right) = area.split_horizontally(WIDTH as i32 - LEGEND);
        let (x, y) = (Labelled::new(0.0..end, ticks), Labelled::new(height..0.0, middles));
        let mut chart = plots::chart(&left, &titles, x, y, &name)?;
        for (top, row) in rows.iter().enumerate() {
            let at = |cells: usize| (cells * row.cell) as f64 * of.page as f64 / bytes;
            let bar = |from: f64, to: f64, colour: RGBColor| {
                let top = top as f64;
                Rectangle::new([(from, top + 0.1), (to.min(end), top + 0.9)], colour.filled())
            };
            let mut from = 0;
            let runs = row.cells.chunk_by(|a, b| a == b).filter_map(|run| {
                let start = from;
                from += run.len();
                let colour = match run[0] {
                    ChunkPage::Used => USED,
                    ChunkPage::Empty => EMPTY,
                    ChunkPage::Missing => return None,
                };
                Some(bar(at(start), at(from), colour))
            });
            chart.draw_series(core::iter::once(bar(0.0, end, MISSING)).chain(runs))?;
        }
        let entries = [("used", USED), ("populated, and empty", EMPTY), ("not populated", MISSING)];
        plots::legend(
            &right.margin(24, 0, 16, 0),
            entries.into_iter().map(|(name, colour)| LegendEntry { name, colour }),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::seen;
    use super::*;
    use neap_percpu::Layout;

    fn page_of(seen: &ReadChunks) -> String {
        let process = ProcessStatus { name: "a<b>&".to_string(), ..crate::look::stat_reader::tests::ended() };
        let mut page = Vec::new();
        write(&mut page, &process, seen).unwrap();
        String::from_utf8(page).unwrap()
    }

    #[test]
    fn the_page_has_a_map_for_each_list_and_loads_nothing() {
        let seen = seen(Layout::Rows, 2);
        assert!(page_of(&ReadChunks { chunks: Vec::new(), ..seen.clone() }).contains("There is no chunk"));
        let page = page_of(&seen);
        let lists = seen.chunks.chunk_by(|a, b| a.list == b.list).count();
        let maps: Vec<&str> = page.split("<svg").skip(1).map(|svg| svg.split("</svg>").next().unwrap()).collect();
        assert_eq!(maps.len(), lists);
        for map in maps {
            for text in [
                "Pages of chunks: ",
                "offset in the chunk (KiB)",
                "chunk\n",
                "used",
                "populated, and empty",
                "not populated",
            ] {
                assert!(map.contains(text), "{text}: {map}");
            }
        }
        for chunk in &seen.chunks {
            assert!(page.contains(&format!(">\n{}\n</text>", chunk.number)), "no row of chunk {}", chunk.number);
        }
        let rects = |wanted| {
            let runs = |chunk: &ReadChunk| chunk.map.chunk_by(|a, b| a == b).filter(|run| run[0] == wanted).count();
            seen.chunks.iter().map(runs).sum::<usize>()
        };
        // One more in each legend.
        assert_eq!(page.matches("fill=\"#0B62C4\"").count(), rects(ChunkPage::Used) + lists);
        assert_eq!(page.matches("fill=\"#F0A30A\"").count(), rects(ChunkPage::Empty) + lists);
        assert!(page.contains("a&lt;b&gt;&amp;") && page.contains("<h2>Sidelined: "), "{page}");
        for foreign in ["http", "src=", "<script", "@import", "url(", "NaN", "inf", "a<b"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
    }

    #[test]
    fn maps_of_many_chunks_stay_small() {
        let mut seen = seen(Layout::Rows, 2);
        // The state changes with each cell of 14 pages.
        let state = |page: usize| [ChunkPage::Used, ChunkPage::Empty, ChunkPage::Missing][page / 14 % 3];
        let map: Vec<ChunkPage> = (0..3584).map(state).collect();
        let chunk = |number: u64| ReadChunk { number, list: number / 9000, map: map.clone(), ..seen.chunks[0].clone() };
        seen.chunks = (0..18_000).map(chunk).collect();
        seen.instance.pages = 3584;
        let page = page_of(&seen);
        // 18 000 chunks in 256 rows are 71 in each.
        assert!(page.contains("\n0–70\n") && page.contains("\n9000–9070\n"));
        // A row has its background, and a rectangle for two of three cells. A legend has three.
        let rects = page.matches("<rect").count();
        assert!(rects <= (ROWS + 2) * (1 + CELLS * 2 / 3 + 1) + 2 * 3 && rects > ROWS * CELLS / 2, "{rects}");
        let maps: usize = page.split("<svg").skip(1).map(|svg| svg.split("</svg>").next().unwrap().len()).sum();
        assert!(maps < 8 << 20, "{maps} bytes");
    }

    #[test]
    fn sizes_are_in_the_unit_that_suits_them() {
        assert_eq!([8, 10239, 10240, 10 << 20].map(size), ["8 B", "10239 B", "10.0 KiB", "10.0 MiB"]);
    }
}
