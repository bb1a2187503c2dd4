//! A profile as one HTML page: a summary, the flame graph as inline SVG, and tables. It loads
//! nothing from elsewhere.

use std::io::{self, Write};

use super::collect::Amount;
use super::folded::flame_graph;
use super::resolved::{Profile, ProfileView};
use super::top_table::{by_name, named, sites, size, summary};
use crate::report::number;

const STYLE: &str = "\
    :root{color-scheme:light dark;--text:#1d2126;--soft:#5c6670;--ground:#fff;--line:#dfe4e8}\
    @media(prefers-color-scheme:dark){:root{--text:#e4e8ec;--soft:#98a2ad;--ground:#14171a;--line:#30373d}}\
    body{font:15px/1.45 system-ui,sans-serif;color:var(--text);background:var(--ground);max-width:84em;margin:2em auto;\
    padding:0 1.2em}h1{font-size:1.5em;margin:0}h2{font-size:1.05em;margin:2em 0 .4em}p{color:var(--soft);margin:.2em 0}\
    table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}\
    th{font-weight:normal;color:var(--soft);font-size:.85em}\
    td,th{padding:.18em .6em;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}\
    td:last-child,th:last-child{width:60%;text-align:left;white-space:normal;overflow-wrap:anywhere}\
    svg{width:100%;height:auto;background:#fff}";

/// Rows of a table, at most.
const MOST_ROWS: usize = 200;

/// Escapes characters with a meaning in HTML.
fn quoted(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Writes the page.
pub(crate) fn write(page: &mut dyn Write, profile: &Profile) -> io::Result<()> {
    let (name, pid) = (quoted(&profile.of.name), profile.of.pid);
    write!(page, "<!DOCTYPE html><html lang=en><meta charset=utf-8>")?;
    write!(page, "<meta name=viewport content='width=device-width'><meta name=color-scheme content='light dark'>")?;
    write!(page, "<title>Memory of {name} ({pid})</title><style>{STYLE}</style><h1>Memory of {name} ({pid})</h1>")?;
    for line in summary(profile) {
        write!(page, "<p>{}</p>", quoted(&line))?;
    }
    write!(page, "<h2>Stacks: bytes {}</h2>", profile.view.name())?;
    flame_graph(&mut FromElement { output: page, head: Vec::new(), has_begun: false }, profile)?;
    let sites: Vec<(String, [Amount; 3])> = sites(profile).iter().map(|(line, sums)| (named(line), *sums)).collect();
    table(page, profile, "function", &sites)?;
    table(page, profile, "group", &by_name(profile, |row| &row.group))?;
    table(page, profile, "thread", &by_name(profile, |row| &row.thread))?;
    writeln!(page, "</html>")
}

/// Writes an SVG from its element on. The part in front is for files of their own.
struct FromElement<'a> {
    output: &'a mut dyn Write,
    head: Vec<u8>,
    has_begun: bool,
}

impl Write for FromElement<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.has_begun {
            return self.output.write(bytes);
        }
        self.head.extend(bytes);
        if let Some(at) = self.head.windows(4).position(|part| part == b"<svg") {
            self.has_begun = true;
            self.output.write_all(&self.head[at..])?;
            self.head = Vec::new();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

fn table(page: &mut dyn Write, profile: &Profile, head: &str, rows: &[(String, [Amount; 3])]) -> io::Result<()> {
    let view = profile.view;
    let total = profile.total(view).bytes.max(1.0);
    write!(page, "<h2>By {head}</h2><table><tr><th>{}<th>share<th>&plusmn;<th>objects", view.name())?;
    write!(page, "<th>live<th>allocated<th>{head}</tr>")?;
    for (name, sums) in rows.iter().take(MOST_ROWS) {
        let of = sums[view as usize];
        write!(
            page,
            "<tr><td>{}<td>{} %<td>{}<td>{}<td>{}<td>{}<td>{}</tr>",
            size(of.bytes),
            number(100.0 * of.bytes / total, 1),
            size(of.error()),
            number(of.objects, 0),
            size(sums[ProfileView::Live as usize].bytes),
            size(sums[ProfileView::Allocated as usize].bytes),
            if name.is_empty() { "-".to_string() } else { quoted(name) },
        )?;
    }
    write!(page, "</table>")?;
    match rows.len().saturating_sub(MOST_ROWS) {
        0 => Ok(()),
        more => write!(page, "<p>and {more} more</p>"),
    }
}
