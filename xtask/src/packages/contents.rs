//! Contents of packages and archives, compared with the lists in `contrib/contents`.
//!
//! A list has one line for each file, in any order: its mode, its path and the target of a link.
//! Folders are left out. Names that depend on the build stand for themselves: `@lib@` for the
//! folder of libraries of a processor, `@version@`, and `*` for a build id.

use std::fs;

use anyhow::{Context, Result, ensure};

use crate::layout;

/// Compares a listing in the format of `tar -tv` with the list `name`. `top` stands in front of
/// each path, and `lib` is the folder of libraries.
pub(crate) fn check(listing: &str, name: &str, top: &str, lib: &str) -> Result<()> {
    let file = layout::root().join("contrib/contents").join(name);
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let text = text.replace("@lib@", lib).replace("@version@", env!("CARGO_PKG_VERSION"));
    let expected = text.lines().map(str::to_string).collect();
    let found = listing.lines().filter_map(|line| entry(line, top)).collect();
    let differences = differences(expected, found);
    ensure!(differences.is_empty(), "contrib/contents/{name} (-) and the contents (+) differ:\n{differences}");
    Ok(())
}

/// The line of the list for a line of `tar -tv`; `None` for a folder.
fn entry(line: &str, top: &str) -> Option<String> {
    // Mode, owner, size, day, time, path.
    let mut words = line.split_whitespace();
    let mode = words.next().filter(|mode| !mode.starts_with('d'))?;
    let path = words.by_ref().nth(4)?;
    let path = without_build_id(path.strip_prefix(top).unwrap_or(path));
    let target: String = words.map(|word| format!(" {word}")).collect();
    Some(format!("{mode} {path}{target}"))
}

/// A path with `*` instead of a build id.
fn without_build_id(path: &str) -> String {
    match path.split_once(".build-id/") {
        Some((folder, _)) => format!("{folder}.build-id/*"),
        None => path.to_string(),
    }
}

/// Lines that only one of two lists has, or that it has more often.
fn differences(mut expected: Vec<String>, found: Vec<String>) -> String {
    let mut more = Vec::new();
    for line in found {
        match expected.iter().position(|other| *other == line) {
            Some(at) => drop(expected.swap_remove(at)),
            None => more.push(line),
        }
    }
    expected.sort();
    more.sort();
    let lines = expected.iter().map(|line| format!("-{line}\n")).chain(more.iter().map(|line| format!("+{line}\n")));
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_has_mode_path_and_target() {
        let file = "-rwxr-xr-x root/root   3125632 2026-11-27 12:00 ./usr/bin/neap";
        assert_eq!(entry(file, "./").unwrap(), "-rwxr-xr-x usr/bin/neap");
        let link = "lrwxrwxrwx root/root         0 2026-11-27 12:00 neap-0.1.0/lib/a.so.0 -> a.so.0.1.0";
        assert_eq!(entry(link, "neap-0.1.0/").unwrap(), "lrwxrwxrwx lib/a.so.0 -> a.so.0.1.0");
        let debug = "-rw-r--r-- root/root 1 2026-11-27 12:00 ./usr/lib/debug/.build-id/ab/cd.debug";
        assert_eq!(entry(debug, "./").unwrap(), "-rw-r--r-- usr/lib/debug/.build-id/*");
        assert_eq!(entry("drwxr-xr-x root/root 0 2026-11-27 12:00 ./usr/", "./"), None);
    }

    #[test]
    fn differences_are_counted_with_repetitions() {
        let lines = |text: &str| text.split(' ').map(str::to_string).collect::<Vec<_>>();
        assert_eq!(differences(lines("b a a"), lines("a b a")), "");
        assert_eq!(differences(lines("a a c"), lines("b a")), "-a\n-c\n+b\n");
    }
}
