//! The result of a benchmark: one JSON object, or tables with a line on the machine.
//!
//! A figure that could not be computed is absent, never zero. This module measures nothing.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::Serialize;

use crate::colours::width as shown_width;
use crate::machine::Machine;
use crate::statistics::Summary;
use crate::variant::{Failure, Missing};
use crate::work::Outcome;

/// The object that `--json` prints.
#[derive(Serialize)]
pub(crate) struct JsonReport {
    /// [`SCHEMA`](crate::look::subject::SCHEMA).
    pub(crate) schema: u32,
    pub(crate) bench: &'static str,
    /// Figures by name, for thresholds.
    pub(crate) figures: BTreeMap<String, f64>,
    /// The rounds behind each ratio.
    pub(crate) ratios: Vec<Ratio>,
    pub(crate) machine: Machine,
    pub(crate) versions: BTreeMap<String, String>,
    /// Results by variant, then by workload.
    pub(crate) variants: BTreeMap<&'static str, BTreeMap<String, Results>>,
    /// Names of missing variants or programs.
    pub(crate) missing: Vec<String>,
    /// Variants or programs that failed.
    pub(crate) failed: Vec<Failure>,
}

/// All results of one variant in one workload.
#[derive(Serialize)]
pub(crate) struct Results {
    pub(crate) unit: &'static str,
    #[serde(flatten)]
    pub(crate) summary: Summary,
    pub(crate) raw: Vec<Outcome>,
}

/// Median and spread of the ratios of paired rounds.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Ratio {
    /// Name of the figure that holds the ratio; `None` if the ratio is only in a table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) figure: Option<String>,
    pub(crate) workload: String,
    pub(crate) variant: &'static str,
    pub(crate) against: &'static str,
    #[serde(flatten)]
    pub(crate) summary: Summary,
    pub(crate) pairs: usize,
}

impl JsonReport {
    /// Prints the JSON object, or `tables` and notes that explain them.
    pub(crate) fn print(&self, json: bool, tables: &str, unavailable: &[Missing]) -> anyhow::Result<()> {
        if json {
            println!("{}", serde_json::to_string(self)?);
            return Ok(());
        }
        println!("{tables}");
        for ratio in self.ratios.iter().filter(|ratio| ratio.figure.is_some()) {
            println!(
                "{}: {} = {} / {} in {}, median of {} pairs, {:.3} to {:.3}",
                ratio.figure.as_deref().unwrap_or_default(),
                number(ratio.summary.median, 3),
                ratio.variant,
                ratio.against,
                ratio.workload,
                ratio.pairs,
                ratio.summary.min,
                ratio.summary.max
            );
        }
        let ratio_figures: Vec<&str> = self.ratios.iter().filter_map(|ratio| ratio.figure.as_deref()).collect();
        for (name, value) in self.figures.iter().filter(|(name, _)| !ratio_figures.contains(&name.as_str())) {
            println!("{name}: {}", number(*value, 3));
        }
        println!("\nMachine: {}", self.machine.line());
        let versions: Vec<String> = self.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
        println!("Versions: {}", versions.join(", "));
        println!("Values are medians over interleaved rounds, in brackets the smallest and largest.");
        for missing in unavailable {
            println!("Missing: {}: {}", missing.name, missing.reason);
        }
        for failure in &self.failed {
            println!("Failed: {} in {}: {}", failure.variant, failure.workload, failure.reason);
        }
        Ok(())
    }
}

/// Returns a markdown table with aligned columns. The first column holds text, the others numbers.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut text = Vec::new();
    // Writing into a vector does not fail.
    let _ = write_table(&mut text, header, rows, &|row: &Vec<String>| row.clone());
    String::from_utf8(text).unwrap_or_default()
}

/// Most characters that a column is filled up to. A longer cell extends beyond its column.
const WIDEST: usize = 200;

/// Writes a table. Calls `row` twice for each item: for the widths of the columns, and to write the
/// row.
pub(crate) fn write_table<T>(
    output: &mut dyn Write,
    header: &[&str],
    items: &[T],
    row: &dyn Fn(&T) -> Vec<String>,
) -> io::Result<()> {
    let mut widths: Vec<usize> = header.iter().map(|head| head.chars().count().max(3)).collect();
    for item in items {
        let cells = row(item);
        let lengths = cells.iter().map(|cell| shown_width(cell).min(WIDEST));
        widths.iter_mut().zip(lengths).for_each(|(width, length)| *width = length.max(*width));
    }
    let mut line = |cells: &[String]| {
        for (column, &width) in widths.iter().enumerate() {
            let cell = cells.get(column).map(String::as_str).unwrap_or_default();
            let room = " ".repeat(width.saturating_sub(shown_width(cell)));
            if column == 0 { write!(output, "| {cell}{room} ")? } else { write!(output, "| {room}{cell} ")? }
        }
        writeln!(output, "|")
    };
    line(&header.iter().map(ToString::to_string).collect::<Vec<_>>())?;
    let rule = |(column, &width): (usize, &usize)| match column {
        0 => "-".repeat(width),
        _ => "-".repeat(width - 1) + ":",
    };
    line(&widths.iter().enumerate().map(rule).collect::<Vec<_>>())?;
    items.iter().try_for_each(|item| line(&row(item)))
}

/// Bytes in a readable form.
pub(crate) fn human(bytes: u64) -> String {
    neap::groups::Bytes(bytes).to_string()
}

/// Formats a number with at most `decimals` decimals. A large number gets fewer.
pub(crate) fn number(value: f64, decimals: usize) -> String {
    let fewer = if value.abs() >= 1000.0 {
        0
    } else if value.abs() >= 100.0 {
        1
    } else {
        decimals
    };
    format!("{value:.*}", decimals.min(fewer))
}

/// Returns the median with the spread in brackets, or a dash if there is no summary.
pub(crate) fn cell(summary: Option<Summary>, decimals: usize) -> String {
    match summary {
        None => "-".to_string(),
        Some(Summary { median, min, max }) if min == max => number(median, decimals),
        Some(Summary { median, min, max }) => {
            format!("{} ({}-{})", number(median, decimals), number(min, decimals), number(max, decimals))
        }
    }
}

/// Rounds a measured number to four decimals, for JSON.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::colours::Colours;

    #[test]
    fn a_table_is_aligned_markdown() {
        let rows = [vec!["neap".to_string(), "5.1".to_string()], vec!["a long name".to_string(), "123.4".to_string()]];
        let expected = "\
| allocator   |    ns |
| ----------- | ----: |
| neap        |   5.1 |
| a long name | 123.4 |
";
        assert_eq!(table(&["allocator", "ns"], &rows), expected);
    }

    #[test]
    fn colours_do_not_widen_a_table() {
        let table = |colours: Colours| {
            table(&["a", "b"], &[vec!["x".into(), colours.warning("123")], vec!["y".into(), "4".into()]])
        };
        let coloured = table(Colours::ALL);
        assert_eq!(coloured.replace("\x1b[1;33m", "").replace("\x1b[0m", ""), table(Colours::NONE));
        assert_eq!(coloured.matches('\x1b').count(), 2);
    }

    #[test]
    fn a_short_row_has_empty_cells() {
        assert!(table(&["a", "b"], &[vec!["x".to_string()]]).ends_with("| x   |     |\n"));
    }

    #[test]
    fn numbers_lose_decimals_as_they_grow() {
        assert_eq!(number(5.4321, 2), "5.43");
        assert_eq!(number(123.456, 2), "123.5");
        assert_eq!(number(12345.6, 2), "12346");
        assert_eq!(number(123.456, 0), "123");
    }

    #[test]
    fn a_cell_shows_the_spread_only_where_there_is_one() {
        assert_eq!(cell(Some(Summary { median: 2.0, min: 1.5, max: 3.0 }), 1), "2.0 (1.5-3.0)");
        assert_eq!(cell(Some(Summary { median: 2.0, min: 2.0, max: 2.0 }), 1), "2.0");
        assert_eq!(cell(None, 1), "-");
    }
}
