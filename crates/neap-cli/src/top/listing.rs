//! A pane's rows: named columns of cells that can be sorted, written as text and as JSON.
//!
//! This module does not depend on neap. A pane is a list of items, with cells for each item.

use core::cmp::Ordering;

use serde_json::{Map, Value, json};

use crate::pressure::wall_in;
use crate::report::{number, rounded};

/// The content of a cell.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cell {
    Text(String),
    /// A node of a tree: its indented name, and its path.
    Path(String, String),
    Number(u64),
    Bytes(u64),
    /// A difference of bytes.
    Change(i64),
    /// A limit in bytes; `None` if there is none.
    Limit(Option<u64>),
    /// Milliseconds until a limit is reached; `None` if nothing grows.
    Wall(Option<u64>),
    /// A rate per second; `None` if no time has passed.
    Rate(Option<f64>),
    /// Bytes in a second.
    Flow(Option<f64>),
}

impl Cell {
    pub(super) fn text(&self) -> String {
        match self {
            Cell::Text(text) | Cell::Path(text, _) => text.clone(),
            Cell::Number(value) => value.to_string(),
            Cell::Bytes(bytes) | Cell::Limit(Some(bytes)) => size(*bytes),
            Cell::Limit(None) => "none".to_string(),
            Cell::Change(0) => "0".to_string(),
            Cell::Change(change) => format!("{}{}", if *change < 0 { '-' } else { '+' }, size(change.unsigned_abs())),
            Cell::Rate(Some(rate)) if *rate == 0.0 => "0".to_string(),
            Cell::Rate(Some(rate)) => number(*rate, 1),
            Cell::Flow(Some(flow)) => size(*flow as u64),
            Cell::Wall(Some(ms)) => wall_in(*ms),
            Cell::Rate(None) | Cell::Flow(None) | Cell::Wall(None) => "-".to_string(),
        }
    }

    pub(super) fn json(&self) -> Value {
        match self {
            Cell::Text(text) | Cell::Path(_, text) => json!(text),
            Cell::Number(value) | Cell::Bytes(value) => json!(value),
            Cell::Limit(value) | Cell::Wall(value) => json!(value),
            Cell::Change(change) => json!(change),
            Cell::Rate(rate) | Cell::Flow(rate) => json!(rate.map(rounded)),
        }
    }

    /// Compares cells: text in alphabetical order, numbers with the largest first.
    fn order(&self, other: &Cell) -> Ordering {
        match (self, other) {
            (Cell::Text(a), Cell::Text(b)) | (Cell::Path(_, a), Cell::Path(_, b)) => a.cmp(b),
            (Cell::Number(a), Cell::Number(b)) | (Cell::Bytes(a), Cell::Bytes(b)) => b.cmp(a),
            (Cell::Limit(a), Cell::Limit(b)) => b.cmp(a),
            (Cell::Change(a), Cell::Change(b)) => b.cmp(a),
            (Cell::Rate(a), Cell::Rate(b)) | (Cell::Flow(a), Cell::Flow(b)) => {
                b.unwrap_or_default().total_cmp(&a.unwrap_or_default())
            }
            _ => Ordering::Equal,
        }
    }
}

/// Bytes in few characters: K, M, G and so on are powers of 1024.
pub(super) fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = None;
    for next in ["K", "M", "G", "T", "P", "E"] {
        // A value that would be written as 1024.0 gets the next unit.
        if value < 1023.95 {
            break;
        }
        value /= 1024.0;
        unit = Some(next);
    }
    unit.map_or_else(|| bytes.to_string(), |unit| format!("{value:.1}{unit}"))
}

/// How rows are ordered.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct SortOrder {
    /// The column; `None` for the pane's own order.
    pub(super) column: Option<usize>,
    pub(super) reversed: bool,
}

/// Rows with their title and columns.
#[derive(Clone, Debug)]
pub(super) struct Listing {
    pub(super) title: String,
    heads: Vec<&'static str>,
    names: Vec<&'static str>,
    /// Each row with its key.
    rows: Vec<(String, Vec<Cell>)>,
    /// The text shown if there are no rows.
    empty: String,
}

/// Characters between two columns.
const GAP: usize = 2;

/// Rows to which the caller adds columns.
pub(super) struct Filling<'a, T> {
    pub(super) listing: Listing,
    items: &'a [T],
}

impl<T> Filling<'_, T> {
    /// Adds a column: its head, its name in JSON, and its cells.
    pub(super) fn column(mut self, head: &'static str, name: &'static str, cell: impl Fn(&T) -> Cell) -> Self {
        self.listing.heads.push(head);
        self.listing.names.push(name);
        self.listing.rows.iter_mut().zip(self.items).for_each(|((_, cells), item)| cells.push(cell(item)));
        self
    }
}

impl Listing {
    /// Makes a row for each item, without columns yet. `key` identifies an item, also in later
    /// listings.
    pub(super) fn of<'a, T>(
        title: impl Into<String>,
        empty: impl Into<String>,
        items: &'a [T],
        key: impl Fn(&T) -> String,
    ) -> Filling<'a, T> {
        let rows = items.iter().map(|item| (key(item), Vec::new())).collect();
        let (title, empty) = (title.into(), empty.into());
        Filling { listing: Listing { title, heads: Vec::new(), names: Vec::new(), rows, empty }, items }
    }

    pub(super) fn columns(&self) -> usize {
        self.heads.len()
    }

    /// Keys of the rows, from the first on.
    pub(super) fn keys(&self) -> impl ExactSizeIterator<Item = &str> {
        self.rows.iter().map(|(key, _)| key.as_str())
    }

    pub(super) fn sorted(mut self, order: SortOrder) -> Listing {
        if let Some(column) = order.column {
            // Equal rows keep their order.
            self.rows.sort_by(|(_, a), (_, b)| a[column].order(&b[column]));
        }
        if order.reversed {
            self.rows.reverse();
        }
        self
    }

    /// The title with the order of the rows.
    pub(super) fn heading(&self, order: SortOrder) -> String {
        let reversed = if order.reversed { ", reversed" } else { "" };
        match order.column {
            Some(column) => format!("{}, by {}{reversed}", self.title, self.heads[column]),
            None => format!("{}{reversed}", self.title),
        }
    }

    /// Returns the number of lines at this width: the title, the heads and the rows. Without rows,
    /// these are the title and the lines of the text `empty`.
    pub(super) fn height(&self, width: usize) -> usize {
        1 + if self.rows.is_empty() { wrapped(&self.empty, width).len() } else { 1 + self.rows.len() }
    }

    fn widths(&self) -> Vec<usize> {
        let longest = |column: usize| {
            let cells = self.rows.iter().map(|(_, cells)| cells[column].text().chars().count());
            cells.chain([self.heads[column].len()]).max().unwrap_or(0)
        };
        (0..self.columns()).map(longest).collect()
    }

    /// Returns the width of all columns in characters. Without rows, returns that of the text
    /// `empty`.
    pub(super) fn width(&self) -> usize {
        if self.rows.is_empty() {
            return self.empty.chars().count();
        }
        self.widths().iter().map(|width| width + GAP).sum::<usize>().saturating_sub(GAP)
    }

    /// Returns the heads, and a line for each row. Without rows, returns the lines of the text
    /// `empty`. Leaves out columns that do not fit into `width`, from the right. Cuts text in the
    /// last column.
    pub(super) fn lines(&self, width: usize) -> (String, Vec<String>) {
        let widths = self.widths();
        let is_text = |column: usize| {
            self.rows.first().is_some_and(|(_, cells)| matches!(cells[column], Cell::Text(_) | Cell::Path(..)))
        };
        let (mut columns, mut taken) = (0, 0);
        while columns < self.columns() {
            let needed = taken + widths[columns];
            let can_be_cut = columns + 1 == self.columns() && is_text(columns);
            if needed > width && !can_be_cut {
                break;
            }
            taken = needed + GAP;
            columns += 1;
        }
        let line = |cell: &dyn Fn(usize) -> String| {
            let padded = (0..columns).map(|column| {
                let (cell, width) = (cell(column), widths[column]);
                if is_text(column) { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            });
            let line = padded.collect::<Vec<_>>().join(&" ".repeat(GAP));
            line.trim_end().chars().take(width).collect::<String>()
        };
        if self.rows.is_empty() {
            let mut lines = wrapped(&self.empty, width).into_iter();
            return (lines.next().unwrap_or_default(), lines.collect());
        }
        let rows = self.rows.iter().map(|(_, cells)| line(&|column| cells[column].text())).collect();
        (line(&|column| self.heads[column].to_string()), rows)
    }

    pub(super) fn json(&self) -> Value {
        let row = |(_, cells): &(String, Vec<Cell>)| {
            let named = self.names.iter().zip(cells).map(|(name, cell)| ((*name).to_string(), cell.json()));
            Value::Object(named.collect::<Map<_, _>>())
        };
        self.rows.iter().map(row).collect()
    }
}

/// Breaks a text into lines of at most `width` characters, at least one. Cuts longer words.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let (last, word) = (lines.len() - 1, word.chars().take(width).collect::<String>());
        let line = &mut lines[last];
        match line.chars().count() {
            0 => *line = word,
            taken if taken + 1 + word.chars().count() <= width => *line += &format!(" {word}"),
            _ => lines.push(word),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(items: &[(&'static str, u64)]) -> Listing {
        let rows = Listing::of("Things", "There are none.", items, |item| item.0.to_string());
        let rows = rows.column("size", "bytes", |item| Cell::Bytes(item.1));
        rows.column("half", "half", |item| Cell::Number(item.1 / 2))
            .column("name", "name", |item| Cell::Text(item.0.to_string()))
            .listing
    }

    #[test]
    fn sizes_take_few_characters_and_are_never_1024_of_a_unit() {
        let cases = [
            (0, "0"),
            (1023, "1023"),
            (1024, "1.0K"),
            (1536, "1.5K"),
            ((1 << 20) - 52, "1023.9K"),
            ((1 << 20) - 51, "1.0M"),
            (3 << 30, "3.0G"),
            (u64::MAX, "16.0E"),
        ];
        for (bytes, expected) in cases {
            assert_eq!(size(bytes), expected, "{bytes}");
        }
    }

    #[test]
    fn cells_say_what_they_are_of() {
        let cells = [
            (Cell::Change(0), "0", json!(0)),
            (Cell::Change(-2048), "-2.0K", json!(-2048)),
            (Cell::Change(i64::MIN), "-8.0E", json!(i64::MIN)),
            (Cell::Change(5), "+5", json!(5)),
            (Cell::Path("  b".into(), "a/b".into()), "  b", json!("a/b")),
            (Cell::Limit(Some(2048)), "2.0K", json!(2048)),
            (Cell::Limit(None), "none", Value::Null),
            (Cell::Rate(None), "-", Value::Null),
            (Cell::Rate(Some(0.0)), "0", json!(0.0)),
            (Cell::Rate(Some(12.34)), "12.3", json!(12.34)),
            (Cell::Flow(Some(2048.4)), "2.0K", json!(2048.4)),
        ];
        for (cell, text, value) in cells {
            assert_eq!((cell.text().as_str(), cell.json()), (text, value));
        }
    }

    #[test]
    fn listing_sorts_numbers_down_text_up_and_is_stable() {
        let keys = |column, reversed| {
            let sorted = listing(&[("b", 5), ("c", 9), ("a", 5)]).sorted(SortOrder { column, reversed });
            sorted.keys().collect::<Vec<_>>().join("")
        };
        assert_eq!([keys(None, false), keys(None, true)], ["bca", "acb"]);
        assert_eq!([keys(Some(0), false), keys(Some(0), true)], ["cba", "abc"]);
        assert_eq!([keys(Some(2), false), keys(Some(2), true)], ["abc", "cba"]);
        let heading = listing(&[]).heading(SortOrder { column: Some(1), reversed: true });
        assert_eq!(heading, "Things, by half, reversed");
    }

    #[test]
    fn columns_that_do_not_fit_are_left_out_and_text_is_cut() {
        let listing = listing(&[("a longer name", 2048), ("b", 7)]);
        assert_eq!((listing.width(), listing.height(25)), (25, 4));
        let (heads, rows) = listing.lines(25);
        assert_eq!(heads, "size  half  name");
        assert_eq!(rows, ["2.0K  1024  a longer name", "   7     3  b"]);
        assert_eq!(listing.lines(20).1, ["2.0K  1024  a longer", "   7     3  b"]);
        assert_eq!(listing.lines(9).1, ["2.0K", "   7"]);
        assert_eq!(listing.json()[1], json!({"bytes": 7, "half": 3, "name": "b"}));
    }

    #[test]
    fn where_there_is_nothing_a_sentence_says_so() {
        let listing = listing(&[]);
        assert_eq!(listing.lines(40), ("There are none.".to_string(), Vec::new()));
        assert_eq!((listing.width(), listing.height(15), listing.json()), (15, 2, json!([])));
        assert_eq!((listing.height(9), listing.lines(9)), (3, ("There are".to_string(), vec!["none.".to_string()])));
        assert_eq!(listing.lines(4).1, ["are", "none"], "a longer word is cut");
    }
}
