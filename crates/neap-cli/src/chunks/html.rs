//! Chunks of per-CPU data as one HTML page: tables, and a strip for each chunk's map as inline SVG.
//! The page loads nothing and has no scripts. It follows the reader's choice of light or dark.

use std::io::{self, Write};

use super::{ChunkPage, FREE, Instance, ReadChunk, ReadChunks, SIDELINED, TO_DEPOPULATE};
use crate::report::number;
use crate::stat_reader::ProcessStatus;

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
    ul{list-style:none;display:flex;flex-wrap:wrap;gap:.4em 1.4em;padding:0;margin:.6em 0;font-size:.9em}\
    li::before{content:'';display:inline-block;width:.8em;height:.8em;border-radius:.15em;margin-right:.45em;\
    background:var(--none)}li.used::before{background:var(--used)}li.empty::before{background:var(--empty)}\
    svg{display:block;width:100%;height:1.05em;background:var(--none);border-radius:.15em}svg.all{height:1.6em}\
    .u{fill:var(--used)}.e{fill:var(--empty)}\
    table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}\
    th{font-weight:normal;color:var(--soft);font-size:.85em}\
    td,th{padding:.18em .6em;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}\
    td:first-child,th:first-child{padding-left:0}td:nth-child(2),th:nth-child(2){width:50%;text-align:left}";

/// Most cells of a strip. A screen shows no more.
const CELLS: usize = 1024;

/// Escapes characters with a meaning in HTML.
fn quoted(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

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
    write!(page, "<title>Per-CPU data of {name} ({pid})</title><style>{STYLE}</style>")?;
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
    write!(page, "</dl><ul><li class=used>used<li class=empty>populated, and empty<li>not populated</ul>")?;
    let all = || seen.chunks.iter().flat_map(|chunk| &chunk.map);
    let count = |wanted| all().filter(|page| **page == wanted).count();
    let runs = [ChunkPage::Used, ChunkPage::Empty].map(|what| (what, count(what)));
    strip(page, "all", all().count(), runs.into_iter())?;
    for chunks in seen.chunks.chunk_by(|a, b| a.list == b.list) {
        write_list(page, of, chunks)?;
    }
    if seen.chunks.is_empty() {
        write!(page, "<p>There is no chunk.</p>")?;
    }
    write!(page, "</html>")
}

fn write_list(page: &mut dyn Write, of: &Instance, chunks: &[ReadChunk]) -> io::Result<()> {
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
    let chunks_count = chunks.len();
    write!(page, "<h2>{title}: {chunks_count} {}</h2>", if chunks_count == 1 { "chunk" } else { "chunks" })?;
    write!(page, "<p>{}{}.</p><table><tr><th>chunk<th>", what[..1].to_uppercase(), &what[1..])?;
    write!(page, "map<th>populated<th>empty<th>allocations<th>longest run<th>free runs<th>fragmented")?;
    for chunk in chunks {
        write!(page, "<tr><td>{}<td>", chunk.number)?;
        // A cell of several pages is used if a page of it is used. Otherwise it is empty if a page
        // of it is empty.
        let cells = chunk.map.chunks(chunk.map.len().div_ceil(CELLS).max(1)).map(|pages| pages.iter().max());
        let cells: Vec<ChunkPage> = cells.flatten().copied().collect();
        let runs = cells.chunk_by(|a, b| a == b).map(|run| (run[0], run.len()));
        strip(page, "map", cells.len(), runs)?;
        write!(page, "<td>{}<td>{}<td>{}<td>", chunk.populated, chunk.empty, chunk.allocations)?;
        let fragmented = number(chunk.fragmentation(of), 1);
        write!(page, "{}<td>{}<td>{fragmented} %", size(chunk.longest), chunk.fragments)?;
    }
    write!(page, "</table>")
}

/// Writes runs of pages side by side, `pages` in all. Missing pages show the background.
fn strip(
    page: &mut dyn Write,
    class: &str,
    pages: usize,
    runs: impl Iterator<Item = (ChunkPage, usize)>,
) -> io::Result<()> {
    write!(page, "<svg class={class} viewBox='0 0 {} 1' preserveAspectRatio=none ", pages.max(1))?;
    write!(page, "shape-rendering=crispEdges>")?;
    let mut at = 0;
    for (what, count) in runs {
        let class = match what {
            ChunkPage::Used => "u",
            ChunkPage::Empty => "e",
            ChunkPage::Missing => "",
        };
        if !class.is_empty() && count > 0 {
            write!(page, "<rect class={class} x={at} width={count} height=1 />")?;
        }
        at += count;
    }
    write!(page, "</svg>")
}

#[cfg(test)]
mod tests {
    use super::super::tests::seen;
    use super::*;
    use neap_percpu::Layout;

    #[test]
    fn the_page_has_a_strip_for_each_chunk_and_loads_nothing() {
        let process = ProcessStatus { name: "a<b>&".to_string(), ..crate::stat_reader::tests::ended() };
        let seen = seen(Layout::Rows, 2);
        let page = |seen: &ReadChunks| {
            let mut page = Vec::new();
            write(&mut page, &process, seen).unwrap();
            String::from_utf8(page).unwrap()
        };
        let empty = page(&ReadChunks { chunks: Vec::new(), ..seen.clone() });
        assert!(empty.contains("There is no chunk"));
        let page = page(&seen);
        assert_eq!(page.matches("<svg class=map").count(), seen.chunks.len());
        let rects = |wanted| {
            let runs = |chunk: &ReadChunk| chunk.map.chunk_by(|a, b| a == b).filter(|run| run[0] == wanted).count();
            seen.chunks.iter().map(runs).sum::<usize>()
        };
        // One more in the strip of all chunks.
        assert_eq!(page.matches("<rect class=u").count(), rects(ChunkPage::Used) + 1);
        assert_eq!(page.matches("<rect class=e").count(), rects(ChunkPage::Empty) + 1);
        assert!(page.contains("a&lt;b&gt;&amp;") && page.contains("<h2>Sidelined: "), "{page}");
        for foreign in ["http", "src=", "<script", "@import", "url(", "NaN", "inf", "a<b"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
    }

    #[test]
    fn sizes_are_in_the_unit_that_suits_them() {
        assert_eq!([8, 10239, 10240, 10 << 20].map(size), ["8 B", "10239 B", "10.0 KiB", "10.0 MiB"]);
    }
}
