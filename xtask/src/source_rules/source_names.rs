//! Names of source files in back quotes, in documents and comments: each file exists.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::source_rules::sources;

/// Files with names of files of other projects, or of earlier times.
const LEFT_OUT: &[&str] = &["CHANGELOG.md", "xtask/src/source_rules/source_names.rs"];

/// The names in back quotes that end in `.rs`, with their lines.
fn named(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().enumerate();
    let quoted = lines.flat_map(|(line, text)| text.split('`').skip(1).step_by(2).map(move |name| (line + 1, name)));
    let is_path = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c));
    quoted.filter(move |(_, name)| name.ends_with(".rs") && is_path(name))
}

/// Whether a name is the end of a path.
fn is_end(path: &str, name: &str) -> bool {
    path.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('/'))
}

/// Findings for the names in a text with which no path ends.
fn missing(file: &str, text: &str, paths: &BTreeSet<String>) -> Vec<String> {
    let is_missing = |name: &str| !paths.iter().any(|path| is_end(path, name.trim_start_matches("../")));
    named(text)
        .filter(|(_, name)| is_missing(name))
        .map(|(line, name)| format!("{file}:{line}: file `{name}` does not exist; correct the name"))
        .collect()
}

/// Findings of all documents and sources of the project.
pub(crate) fn findings(root: &Path) -> Result<Vec<String>> {
    let files = sources::files(root)?;
    let relative = files.iter().filter_map(|file| file.strip_prefix(root).ok());
    let paths: BTreeSet<String> = relative.map(|path| path.to_string_lossy().into_owned()).collect();
    let mut found = Vec::new();
    let has_names = |path: &&String| path.ends_with(".md") || path.ends_with(".rs");
    for path in paths.iter().filter(has_names).filter(|path| !LEFT_OUT.contains(&path.as_str())) {
        let text = fs::read_to_string(root.join(path)).with_context(|| format!("cannot read {path}"))?;
        // Strings of sources may hold anything: only their comments are looked at.
        let is_read = |line: &&str| path.ends_with(".md") || line.trim_start().starts_with("//");
        let lines: Vec<&str> = text.lines().map(|line| if is_read(&line) { line } else { "" }).collect();
        found.extend(missing(path, &lines.join("\n"), &paths));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_does_not_exist_is_named() {
        let paths: BTreeSet<String> =
            ["crates/neap/src/room.rs", "crates/neap/src/state/mod.rs"].map(String::from).into();
        let text = "`room.rs`, `neap/src/room.rs`\n`state/mod.rs` `oom.rs` `a b.rs`\n`gone/room.rs` and `*.rs`\n";
        let found = missing("docs/a.md", text, &paths);
        let expected = [(2, "oom.rs"), (3, "gone/room.rs")]
            .map(|(line, name)| format!("docs/a.md:{line}: file `{name}` does not exist; correct the name"));
        assert_eq!(found, expected);
    }
}
