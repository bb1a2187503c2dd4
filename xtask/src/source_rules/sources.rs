//! The files of the project, and the lines of a source file.
//!
//! A file's tests begin at a `#[cfg(test)]`, or one that adds conditions to it, before a `mod`, and
//! run to its end. A file whose name ends in `tests.rs` holds nothing else.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

/// The crate of shared parts of the tests.
const TESTING: &str = "crates/neap-testing/";

/// A source file: its path from the root, and its lines.
pub(crate) struct Source<'a> {
    pub(crate) path: &'a str,
    pub(crate) lines: Vec<&'a str>,
}

impl<'a> Source<'a> {
    pub(crate) fn new(path: &'a str, text: &'a str) -> Source<'a> {
        Source { path, lines: text.lines().collect() }
    }

    /// The number of lines before the file's tests.
    fn tests_begin(&self) -> usize {
        if self.path.ends_with("/tests.rs") || self.path.ends_with("_tests.rs") || self.path.starts_with(TESTING) {
            return 0;
        }
        let is_module = |line: &str| line.trim_start_matches("pub(crate) ").starts_with("mod ");
        let is_test = |line: &str| line == "#[cfg(test)]" || line.starts_with("#[cfg(all(test,");
        let marked = |at: usize| is_test(self.lines[at]) && self.lines.get(at + 1).is_some_and(|next| is_module(next));
        (0..self.lines.len()).find(|at| marked(*at)).unwrap_or(self.lines.len())
    }

    /// Lines of code with their numbers, tests and comments left out.
    pub(crate) fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let numbered = self.lines[..self.tests_begin()].iter().enumerate();
        numbered.map(|(at, line)| (at + 1, *line)).filter(|(_, line)| !line.trim_start().starts_with("//"))
    }
}

/// All files of the project, sorted.
pub(crate) fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    walk(root, &mut files)?;
    files.sort();
    Ok(files)
}

/// Adds all files below a folder, without the target folder and hidden folders. `.ci` and `.cargo`
/// are the exceptions.
fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && (!name.starts_with('.') || name == ".ci" || name == ".cargo") {
                walk(&path, files)?;
            }
        } else {
            files.push(path);
        }
    }
    Ok(())
}
