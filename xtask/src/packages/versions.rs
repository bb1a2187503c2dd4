//! The places of the sources that name neap's version, and the change of all of them for a release.
//!
//! Each function takes a text and returns the new one, or an error if the text does not name the
//! expected version. A place that is missing here shows in a release of another version: its tests
//! compare header and crates.

use core::fmt;
use core::str::FromStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// A version without a pre-release.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Version([u32; 3]);

impl FromStr for Version {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Version> {
        let numbers: Vec<u32> = text.split('.').filter_map(|number| number.parse().ok()).collect();
        let version = <[u32; 3]>::try_from(numbers).ok().map(Version).filter(|version| version.to_string() == text);
        version.with_context(|| format!("`{text}` is not a version such as 1.2.3"))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, patch] = self.0;
        write!(f, "{major}.{minor}.{patch}")
    }
}

const MANIFEST: &str = "Cargo.toml";
const HEADER: &str = "crates/neap-c/include/neap.h";
const CHANGES: &str = "CHANGELOG.md";
const DEBIAN: &str = "contrib/debian/changelog";

/// The heading of changes that no release has.
const UNRELEASED: &str = "## Unreleased\n";

/// The version between quotes behind `version = ` in a line of the workspace's manifest.
fn of_line(line: &str) -> Option<&str> {
    let is_ours = line.starts_with("version = ") || line.starts_with("neap");
    line.split_once("version = \"").filter(|_| is_ours)?.1.split_once('"').map(|(version, _)| version)
}

/// The manifest with all versions changed.
fn manifest(text: &str, from: Version, to: Version) -> Result<String> {
    let mut new = String::new();
    for line in text.lines() {
        let line = match of_line(line) {
            Some(version) => {
                ensure!(version == from.to_string(), "not {from}: {line}");
                line.replace(&format!("version = \"{from}\""), &format!("version = \"{to}\""))
            }
            None => line.to_string(),
        };
        new.extend([&line, "\n"]);
    }
    Ok(new)
}

/// The lines of the C header that name a version.
fn macros(version: Version) -> [String; 4] {
    let [major, minor, patch] = version.0;
    [
        format!("#define NEAP_VERSION \"{version}\"\n"),
        format!("#define NEAP_VERSION_MAJOR {major}\n"),
        format!("#define NEAP_VERSION_MINOR {minor}\n"),
        format!("#define NEAP_VERSION_PATCH {patch}\n"),
    ]
}

/// The C header with its version changed.
fn header(text: &str, from: Version, to: Version) -> Result<String> {
    let mut new = text.to_string();
    for (old, line) in macros(from).iter().zip(macros(to)) {
        ensure!(new.contains(old), "there is no line `{}`", old.trim_end());
        new = new.replace(old, &line);
    }
    Ok(new)
}

/// The list of changes, with those that no release had under the heading of the new one.
fn changes(text: &str, to: Version, day: &str) -> Result<String> {
    let (before, rest) = text.split_once(UNRELEASED).context("there is no section `## Unreleased`")?;
    ensure!(!rest.contains(UNRELEASED), "there are two sections `## Unreleased`");
    let section = rest.split("\n## ").next().unwrap_or_default();
    ensure!(!section.trim().is_empty(), "the section `## Unreleased` is empty");
    ensure!(!text.contains(&format!("## {to} ")), "{to} has a section already");
    Ok(format!("{before}## {to} ({day})\n{rest}"))
}

/// Debian's list of changes with an entry for the new version. `time` is as in e-mails.
fn debian(text: &str, from: Version, to: Version, time: &str) -> Result<String> {
    let (first, rest) = text.split_once('\n').context("it is empty")?;
    ensure!(first.starts_with(&format!("neap ({from}-")), "its first entry is not of {from}");
    let signed = " -- neap contributors <maintainers@neap.example>  ";
    let entry = |body: &str| format!("neap ({to}-1) unstable; urgency=medium\n{body}{signed}{time}\n");
    if from == to {
        let (body, rest) = rest.split_once(signed).context("its first entry has no last line")?;
        return Ok(entry(body) + rest.split_once('\n').map_or("", |(_, rest)| rest));
    }
    Ok(entry(&format!("\n  * Version {to}: see CHANGELOG.md.\n\n")) + "\n" + text)
}

fn read(root: &Path, file: &str) -> Result<String> {
    fs::read_to_string(root.join(file)).with_context(|| file.to_string())
}

/// Manifests of the workspace's crates.
fn members(root: &Path) -> Result<Vec<PathBuf>> {
    let mut folders: Vec<PathBuf> =
        ["xtask", "xtask/book", "xtask/packing", "examples/server"].map(PathBuf::from).into();
    for entry in fs::read_dir(root.join("crates"))? {
        folders.push(Path::new("crates").join(entry?.file_name()));
    }
    Ok(folders.into_iter().map(|folder| folder.join(MANIFEST)).collect())
}

/// The version that all places name, and an error that names one which differs.
pub(crate) fn agreed(root: &Path) -> Result<Version> {
    let text = read(root, MANIFEST)?;
    let version: Version = text.lines().find_map(of_line).context("Cargo.toml names no version")?.parse()?;
    manifest(&text, version, version).context(MANIFEST)?;
    header(&read(root, HEADER)?, version, version).context(HEADER)?;
    debian(&read(root, DEBIAN)?, version, version, "").context(DEBIAN)?;
    for member in members(root)? {
        let file = member.to_string_lossy();
        let inherits = read(root, &file)?.lines().any(|line| line == "version.workspace = true");
        ensure!(inherits, "{file} has a version of its own");
    }
    Ok(version)
}

/// Writes a new version to all places. `day` is such as 2030-01-31, `time` as in e-mails.
pub(crate) fn set(root: &Path, to: Version, day: &str, time: &str) -> Result<()> {
    let from = agreed(root)?;
    let texts = [
        (MANIFEST, manifest(&read(root, MANIFEST)?, from, to)),
        (HEADER, header(&read(root, HEADER)?, from, to)),
        (CHANGES, changes(&read(root, CHANGES)?, to, day)),
        (DEBIAN, debian(&read(root, DEBIAN)?, from, to, time)),
    ];
    for (file, text) in texts {
        fs::write(root.join(file), text.context(file)?).context(file)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout;

    fn version(text: &str) -> Version {
        text.parse().unwrap()
    }

    #[test]
    fn version_has_three_numbers_and_an_order() {
        assert!(version("0.10.0") > version("0.9.12"));
        for text in ["1.2", "1.2.3.4", "1.2.x", "v1.2.3", "01.2.3", "1.2.3-rc1", ""] {
            assert!(text.parse::<Version>().is_err(), "{text}");
        }
    }

    #[test]
    fn sources_agree_on_a_version() {
        assert_eq!(agreed(&layout::root()).unwrap().to_string(), env!("CARGO_PKG_VERSION"));
    }

    #[test]
    fn manifest_of_mixed_versions_is_refused() {
        let text = "[workspace.package]\nversion = \"0.1.0\"\nneap = { path = \"p\", version = \"0.1.0\" }\n\
                    rustix = { version = \"1.1\" }\n";
        let new = manifest(text, version("0.1.0"), version("0.2.0")).unwrap();
        assert_eq!(new, text.replace("0.1.0", "0.2.0"));
        let mixed = text.replacen("0.1.0", "0.1.1", 1);
        assert!(manifest(&mixed, version("0.1.1"), version("0.2.0")).unwrap_err().to_string().contains("neap = "));
    }

    #[test]
    fn header_names_text_and_numbers() {
        let text = macros(version("0.1.0")).concat() + "int x;\n";
        let new = header(&text, version("0.1.0"), version("1.20.3")).unwrap();
        assert_eq!(new, macros(version("1.20.3")).concat() + "int x;\n");
        assert!(header(&text, version("0.1.1"), version("0.2.0")).is_err());
    }

    #[test]
    fn unreleased_changes_become_those_of_the_version() {
        let text = "# Changelog\n\n## Unreleased\n\n* New.\n\n## 0.1.0 (2026-01-01)\n\n* Old.\n";
        let new = changes(text, version("0.2.0"), "2026-02-03").unwrap();
        assert_eq!(new, text.replace("## Unreleased", "## 0.2.0 (2026-02-03)"));
        for (bad, why) in [
            (new, "no section"),
            (text.replace("* New.\n\n", ""), "is empty"),
            (text.replace("0.1.0", "0.2.0"), "already"),
            (text.to_string() + UNRELEASED, "two sections"),
        ] {
            assert!(changes(&bad, version("0.2.0"), "").unwrap_err().to_string().contains(why), "{bad}");
        }
    }

    #[test]
    fn debian_gets_an_entry_and_the_first_release_a_date() {
        let signed = " -- neap contributors <maintainers@neap.example>  ";
        let text = format!("neap (0.1.0-1) unstable; urgency=medium\n\n  * A.\n\n{signed}then\n");
        let same = debian(&text, version("0.1.0"), version("0.1.0"), "now").unwrap();
        assert_eq!(same, text.replace("then", "now"));
        let next = debian(&text, version("0.1.0"), version("0.2.0"), "now").unwrap();
        assert!(next.starts_with("neap (0.2.0-1) ") && next.ends_with(&format!("{signed}now\n\n{text}")), "{next}");
        assert!(debian(&text, version("0.1.1"), version("0.2.0"), "now").is_err());
    }
}
