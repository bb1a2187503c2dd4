//! `neap options`: the keys of the variable `NEAP`.
//!
//! [`neap::options`] is the one source of keys, values, defaults and effects. `neap run --help`
//! shows the listing too, and `neap run` checks the options of its program here.

use std::ffi::OsStr;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use neap::options::{self, OptionRow, TABLE};
use serde_json::json;

use crate::look::subject::SCHEMA;
use crate::set::may_change;

const EXAMPLES: &str = "\
Examples:
  neap options
  neap options --json | python3 -m json.tool
  NEAP=limit:1g,strict:on neap run -- ./server";

/// Columns of the listing.
const WIDTH: usize = 100;
/// Where the text begins.
const INDENT: usize = 20;

/// List the options of the library: keys, values, defaults.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct KeysOptions {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn main(options: &KeysOptions) -> Result<ExitCode> {
    if options.json {
        let each = TABLE.iter().map(|option| {
            json!({"key": option.key, "values": option.values, "default": option.default, "text": option.text, "changes": may_change(option)})
        });
        let all: Vec<_> = each.collect();
        println!("{}", json!({"schema": SCHEMA, "version": env!("CARGO_PKG_VERSION"), "options": all}));
    } else {
        println!("NEAP=KEY:VALUE,...\n\n{}", listing());
    }
    Ok(ExitCode::SUCCESS)
}

/// All options: key, values and default in one line, and below them the effect.
pub(crate) fn listing() -> String {
    listing_of(|_| true)
}

/// Returns the listing of those options for which `wanted` returns true.
pub(crate) fn listing_of(wanted: impl Fn(&OptionRow) -> bool) -> String {
    let mut text = String::new();
    for option in TABLE.iter().filter(|option| wanted(option)) {
        let _ = write!(text, "  {:<1$}", option.key, INDENT - 2);
        let changes = if may_change(option) { "; may change" } else { "" };
        let _ = write!(text, "{} (default: {}){changes}", option.values, option.default);
        let mut column = WIDTH;
        for word in option.text.split(' ') {
            if column + 1 + word.len() > WIDTH {
                let _ = write!(text, "\n{:INDENT$}{word}", "");
                column = INDENT + word.len();
            } else {
                let _ = write!(text, " {word}");
                column += 1 + word.len();
            }
        }
        text.push('\n');
    }
    text
}

/// Returns a line for each part of `told`, the value of `NEAP`, that the library would ignore.
pub(crate) fn complaints(told: &OsStr) -> Vec<String> {
    let mut lines = Vec::new();
    options::Options::parse(told.as_bytes(), |item, wrong| {
        let near = options::nearest(item).map_or_else(String::new, |key| format!(" (did you mean \"{key}\"?)"));
        lines.push(format!("\"{}\" {wrong}{near}", item.escape_ascii()));
    });
    lines
}
