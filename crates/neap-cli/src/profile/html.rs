//! A profile, or the differences between two, as one HTML page: a summary, the flame graph as
//! inline SVG, and tables. It loads nothing from elsewhere.

use std::io::{self, Write};

use super::compare::{Comparison, Growth, shown, signed};
use super::folded::{difference_graph, flame_graph};
use super::resolved::Profile;
use super::sums::{ProfileView, SampleSums};
use super::top_table::{by_name, named, sites, size, size_of, summary};
use crate::look::foreign::quoted;
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

/// Writes the page of a profile.
pub(crate) fn write(page: &mut dyn Write, profile: &Profile) -> io::Result<()> {
    let title = format!("Memory of {}", subject(profile));
    head(page, &title, &summary(profile))?;
    write!(page, "<h2>Stacks: bytes {}</h2>", profile.view.name())?;
    graph(page, &|output| flame_graph(output, profile))?;
    let sites: Vec<(String, SampleSums)> = sites(profile).iter().map(|(line, sums)| (named(line), *sums)).collect();
    table(page, profile, "function", &sites)?;
    table(page, profile, "group", &by_name(profile, |row| &row.group))?;
    table(page, profile, "thread", &by_name(profile, |row| &row.thread))?;
    writeln!(page, "</html>")
}

/// Writes an SVG from its `<svg` element on, without the header that a separate file needs.
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

/// Writes the page of the differences between two profiles.
pub(crate) fn write_comparison(page: &mut dyn Write, comparison: &Comparison<'_>) -> io::Result<()> {
    let title = format!("Growth of the memory of {}", subject(comparison.now));
    head(page, &title, &comparison.summary())?;
    let sites: Vec<(String, Growth)> = comparison.sites().iter().map(|(line, change)| (named(line), *change)).collect();
    changes(page, "function", &sites)?;
    for (head, rows) in comparison.names() {
        changes(page, head, &rows)?;
    }
    write!(page, "<h2>Stacks now: red has grown, blue is less, bytes {}</h2>", comparison.now.view.name())?;
    graph(page, &|output| difference_graph(output, comparison))?;
    writeln!(page, "</html>")
}

fn subject(profile: &Profile) -> String {
    match profile.of.pid {
        0 => profile.of.name.clone(),
        pid => format!("{} ({pid})", profile.of.name),
    }
}

fn head(page: &mut dyn Write, title: &str, summary: &[String]) -> io::Result<()> {
    let title = quoted(title);
    write!(page, "<!DOCTYPE html><html lang=en><meta charset=utf-8>")?;
    write!(page, "<meta name=viewport content='width=device-width'><meta name=color-scheme content='light dark'>")?;
    write!(page, "<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>")?;
    summary.iter().try_for_each(|line| write!(page, "<p>{}</p>", quoted(line)))
}

/// Writes a graph into the page.
fn graph(page: &mut dyn Write, draw: &dyn Fn(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    draw(&mut FromElement { output: page, head: Vec::new(), has_begun: false })
}

fn changes(page: &mut dyn Write, head: &str, rows: &[(String, Growth)]) -> io::Result<()> {
    write!(page, "<h2>By {head}</h2><table><tr><th>change<th>&plusmn;<th>before<th>now<th>{head}</tr>")?;
    let (shown, rest) = shown(rows, MOST_ROWS);
    for (name, change) in &shown {
        write!(
            page,
            "<tr><td>{}<td>{}<td>{}<td>{}<td>{}</tr>",
            signed(change.bytes()),
            size(change.error()),
            size(change.before.bytes),
            size(change.now.bytes),
            if name.is_empty() { "-".to_string() } else { quoted(name) },
        )?;
    }
    write!(page, "</table>")?;
    match rows.len() - shown.len() {
        0 => Ok(()),
        more => write!(page, "<p>and {more} more with {}</p>", signed(rest)),
    }
}

fn table(page: &mut dyn Write, profile: &Profile, head: &str, rows: &[(String, SampleSums)]) -> io::Result<()> {
    let view = profile.view;
    let total = profile.total().of(view).bytes.max(1.0);
    write!(page, "<h2>By {head}</h2><table><tr><th>{}<th>share<th>&plusmn;<th>objects", view.name())?;
    write!(page, "<th>live<th>allocated<th>lifetime<th>{head}</tr>")?;
    for (name, sums) in rows.iter().take(MOST_ROWS) {
        let of = sums.of(view);
        write!(
            page,
            "<tr><td>{}<td>{} %<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}</tr>",
            size(of.bytes),
            number(100.0 * of.bytes / total, 1),
            size(of.error()),
            number(of.objects, 0),
            size_of(profile, sums, ProfileView::Live),
            size_of(profile, sums, ProfileView::Allocated),
            sums.freed.shown(),
            if name.is_empty() { "-".to_string() } else { quoted(name) },
        )?;
    }
    write!(page, "</table>")?;
    match rows.len().saturating_sub(MOST_ROWS) {
        0 => Ok(()),
        more => write!(page, "<p>and {more} more</p>"),
    }
}
